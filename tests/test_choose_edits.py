"""Edits that blind an agent to a hazard: which are tried, which is chosen, and what is written."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import killed_at, small_policy

from clarity import choose_edits
from clarity.attributing.clarity_files import FeaturesFolder
from clarity.attributing.layers import find_cuts
from clarity.checking.object_files import COLUMNS as SCORES
from clarity.checking.object_files import ObjectsFolder
from clarity.editing.candidates import Candidate, candidates_for, compared
from clarity.failing.files import CausesFolder
from common.agent_file import load_agent, read_origin, save_agent
from common.env import EnvConfig
from common.errors import UserError
from common.files import save_json, sha256
from common.tables import write_table

HARD = EnvConfig("coinrun", "hard")
HOP, RIGHT = 8, 7  # actions: to the right and up; to the right
GUARD, LAYER = 5, "relu3"  # a channel that is 1 everywhere
SEED = "18"  # of levels on which an agent that hops meets saws, and one that also walks does not


def table(rows):
    """Scores of features: feature, kind, area."""
    return pd.DataFrame(rows, columns=["feature", "kind", "auc"])


def test_the_best_features_of_each_layer_are_tried_alone_and_together():
    scores = {"low": table([(0, "saw", .6), (1, "saw", .9), (2, "saw", .7), (3, "box", .99)]),
              "high": table([(0, "saw", np.nan), (4, "saw", .8)])}
    assert candidates_for("saw", scores, 2, [1.0, 2.0]) == [
        Candidate("saw", "low", (1,), 1.0, .9), Candidate("saw", "low", (1,), 2.0, .9),
        Candidate("saw", "low", (1, 2), 1.0, .7), Candidate("saw", "low", (1, 2), 2.0, .7),
        Candidate("saw", "high", (4,), 1.0, .8), Candidate("saw", "high", (4,), 2.0, .8)]
    with pytest.raises(UserError, match="no feature has a score for 'lava'"):
        candidates_for("lava", scores, 2, [1.0])


def test_the_edit_is_chosen_that_raises_failures_by_the_hazard_more_than_others():
    ended = {name: np.array(each.split()) for name, each in {
        "original": "solved solved solved solved saw other",
        "a_0_strength_1": "saw saw saw saw saw other",      # + 4
        "a_0_strength_2": "saw saw saw saw saw saw",        # + 5, others - 1
        "b_1_strength_1": "lava lava lava lava saw other",
        "b_1_strength_2": "saw solved solved solved saw lava"}.items()}
    tried = [Candidate(hazard, *each) for hazard in ("saw", "lava") for each in (
        ("a", (0,), 1.0, .7), ("a", (0,), 2.0, .7), ("b", (1,), 1.0, .9), ("b", (1,), 2.0, .9))]
    found = compared(tried, ended, ended["original"], "solved")
    assert found["chosen"].tolist() == [False, True, False, False, False, False, True, False]
    assert found.loc[1, ["by_hazard_before", "by_hazard", "by_others_before", "by_others"]
                     ].tolist() == [1, 6, 1, 0]
    # Much that is no saw is worse than little that is one; of equals it is the first.
    ended["a_0_strength_1"] = np.array(["saw", "saw", "lava", "lava", "other", "other"])
    ended["a_0_strength_2"] = ended["b_1_strength_2"]
    found = compared(tried[:4], ended, ended["original"], "solved")
    assert found["chosen"].tolist() == [False, True, False, False]


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
    """An agent, two features of a layer, and scores by which the other one goes with saws more."""
    path = tmp_path_factory.mktemp("edits")
    policy = guarded()
    save_agent(path / "model.pth", policy)
    [cut] = find_cuts(policy, [LAYER])
    features = FeaturesFolder(path / "features", LAYER)
    features.open({"agent_sha256": sha256(path / "model.pth"), "game": "coinrun",
                   "layer": cut.layer.name, "baseline": "zero"}, False)
    directions = np.zeros((2, 64), np.float32)
    directions[[0, 1], [7, GUARD]] = 1
    features.finish(directions, np.zeros(cut.shape, np.float32), np.zeros((9, 2), np.int32), {},
                    {"signed": False, "grid": cut.shape[1:]})
    objects = ObjectsFolder(path / "objects")
    scores = pd.DataFrame([(feature, kind, auc, .5, 1, .5, .4, .6, 99) for feature, kind, auc in (
        (0, "saw", .9), (0, "lava", np.nan), (1, "saw", .8), (1, "lava", np.nan))], columns=SCORES)
    write_table(objects.scores_file(LAYER), scores)
    save_json(objects.names_file(LAYER), {"features_sha256": features.read().checksum,
                                          "features": []})
    return path


def arguments(folder, output, *more: str) -> list[str]:
    return ["--agent_file", str(folder / "model.pth"), "--distribution_mode", "hard",
            "--features_dir", str(folder / "features"), "--objects_dir", str(folder / "objects"),
            "--num_episodes", "6", "--num_features", "1", "--seed", SEED, "--device", "cpu",
            "--output_dir", str(output), *(more or ("--hazards", "saw"))]


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def test_a_planted_edit_is_found_written_and_a_killed_run_ends_with_the_same_files(
        folder, tmp_path, capsys):
    output, more = tmp_path / "edits", ("--hazards", "saw", "--num_features", "2")
    assert choose_edits.main(arguments(folder, output, *more)) == 0
    tried = pd.read_csv(output / "candidates.csv").set_index(["features", "strength"])
    assert tried.index.tolist() == [("0", 1), ("0", 2), ("0 1", 1), ("0 1", 2)]
    assert tried["chosen"].tolist() == [False, False, True, False]
    assert (tried["by_hazard"] > tried["by_hazard_before"]).tolist() == [
        False, False, True, True]
    folder_played = CausesFolder(output / "played", "coinrun")
    assert folder_played.episodes("original")["level_seed"].tolist() == HARD.unseen_levels(
        ).draw_levels(6, int(SEED))
    edited = load_agent(output / "blind_to_saw.pth")
    [edit] = edited.edits
    assert (edit.layer, edit.strength) == ("embedder.relu3", 1.0)
    np.testing.assert_array_equal(edit.directions.nonzero()[:, 1], [7, GUARD])
    assert read_origin(output / "blind_to_saw.pth").edited_from == sha256(folder / "model.pth")
    assert f"fails {tried['by_hazard'].iloc[2]} of 6 levels by saw" in capsys.readouterr().out

    again = tmp_path / "again"
    with killed_at(CausesFolder, "add", 9):
        assert choose_edits.main(arguments(folder, again, *more)) == 130
    assert not (again / "blind_to_saw.pth").exists()
    assert choose_edits.main(arguments(folder, again, *more)) == 0
    assert contents(again) == contents(output)


@pytest.mark.parametrize(("more", "named"), [
    (("--hazards", "sow"), "did you mean 'saw'"),
    (("--hazards", "lava"), "no feature has a score for 'lava'"),
    (("--hazards", "saw", "--env_name", "fruitbot"), "causes of failure are timeout and ended"),
    (("--hazards", "saw", "--layers", "relu2"), "holds no finished features"),
    (("--hazards", "saw", "--strengths", "inf"), "NaN or infinity")])
def test_what_cannot_be_chosen_is_said(folder, tmp_path, more, named, capsys):
    assert choose_edits.main(arguments(folder, tmp_path / "edits", *more)) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "edits").exists()
