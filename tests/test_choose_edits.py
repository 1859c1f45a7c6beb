"""Edits that blind an agent to a hazard: which are tried, which is chosen, and what is written."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import small_policy

from agents.agent_file import load_agent, read_origin, save_agent
from agents.provenance import agent_sha256
from attribution import choose_edits
from attribution.failures.results import FAILURES
from attribution.layers import find_bottlenecks
from attribution.results import FEATURES, finish_features
from common.results import ResultStore
from envs.procgen_env import EnvConfig

HARD = EnvConfig("coinrun", "hard")
HOP, RIGHT = 8, 7  # actions: to the right and up; to the right
GUARD, LAYER = 5, "relu3"  # a channel that is 1 everywhere
SEED = "18"  # of levels on which an agent that hops meets saws, and one that also walks does not


def guarded() -> torch.nn.Module:
    """An agent that hops to the right, and with a channel also walks."""
    policy = small_policy("nature", recurrent=False)
    embedder = policy.embedder
    with torch.no_grad():
        embedder.conv3.weight[GUARD], embedder.conv3.bias[GUARD] = 0, 1
        embedder.fc.weight[0] = 0
        embedder.fc.weight.view(-1, 64, 16)[:, GUARD] = 0
        embedder.fc.weight.view(-1, 64, 16)[0, GUARD] = 1
        policy.fc_policy.weight *= 0.02
        policy.fc_policy.weight[RIGHT, 0] = 5.5 / 16
        policy.fc_policy.bias[HOP] = 6
    return policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An agent and three features of a layer, the second of which is the planted one."""
    path = tmp_path_factory.mktemp("edits")
    policy = guarded()
    save_agent(path / "model.pth", policy)
    [bottleneck] = find_bottlenecks(policy, [LAYER])
    features = ResultStore(path / "features" / LAYER, FEATURES)
    features.open({"agent_sha256": agent_sha256(path / "model.pth"), "game": "coinrun",
                   "layer": bottleneck.layer.name, "baseline": "zero"})
    directions = np.zeros((3, 64), np.float32)
    directions[[0, 1, 2], [7, GUARD, 9]] = 1
    finish_features(features, {"signed": False, "grid": bottleneck.shape[1:], "stride": 8},
                    directions=directions, mean_activations=np.zeros(bottleneck.shape),
                    observations=np.zeros((9, 2)))
    return path


def arguments(folder, output, *more: str) -> list[str]:
    return ["--agent_file", str(folder / "model.pth"), "--distribution_mode", "hard",
            "--features_dir", str(folder / "features"), "--num_episodes", "6", "--seed", SEED,
            "--strengths", "1", "--device", "cpu", "--output_dir", str(output),
            *(more or ("--hazards", "saw"))]


def test_a_planted_edit_is_found_and_written(folder, tmp_path, capsys):
    output = tmp_path / "edits"
    assert choose_edits.main(arguments(folder, output)) == 0
    tried = pd.read_csv(output / "candidates.csv").set_index("features")
    assert tried.index.tolist() == ["0", "1", "2", "0 1", "1 2"]
    assert tried["chosen"].tolist() == [False, True, False, False, False]
    assert (tried["by_hazard"] > tried["by_hazard_before"]).tolist() == [
        False, True, False, True, True]
    assert (tried["levels"] == 6).all()  # too few that saws must be seen on
    played = ResultStore(output / "played" / "saw", FAILURES)
    causes = played.read("episodes", "edited_relu3_1_strength_1")["cause"]
    assert tried.loc["1", "by_others"] == (~causes.isin(["saw", "solved"])).sum()
    seeds = played.read("episodes", "original")["level_seed"].tolist()
    assert seeds == HARD.unseen_levels().draw_levels(6, int(SEED))
    [edit] = load_agent(output / "blind_to_saw.pth").edits
    assert (edit.layer, edit.strength) == ("embedder.relu3", 1.0)
    np.testing.assert_array_equal(edit.directions.nonzero()[:, 1], [GUARD])
    origin = read_origin(output / "blind_to_saw.pth")
    assert origin.edited_from == agent_sha256(folder / "model.pth")
    assert f"fails {tried['by_hazard']['1']} of 6 levels by saw" in capsys.readouterr().out


def test_edits_are_tried_where_the_hazard_must_be_seen(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(choose_edits, "MIN_LEVELS", 1)
    assert choose_edits.main(arguments(folder, tmp_path, "--hazards", "saw", "lava",
                                       "--num_features", "1")) == 0
    saw, lava = (ResultStore(tmp_path / "played" / name, FAILURES) for name in ("saw", "lava"))
    hidden = saw.read("episodes", "invisible_saw")
    needed = hidden.loc[hidden["cause"] == "saw", "level"].tolist()
    assert 1 <= len(needed) < 6
    edited = saw.read("episodes", "edited_relu3_1_strength_1")
    assert edited["level"].tolist() == needed
    before = saw.read("episodes", "original").set_index("level")["cause"]
    tried = pd.read_csv(tmp_path / "candidates.csv").set_index(["hazard", "features"])
    row = tried.loc[("saw", 1)]
    assert (row["levels"], row["by_hazard_before"], row["by_hazard"]) == (
        len(needed), (before.loc[needed] == "saw").sum(), (edited["cause"] == "saw").sum())
    # Lava cannot be invisible.
    assert not lava.has("episodes", "invisible_lava")
    assert (tried.loc["lava", "levels"] == 6).all()
