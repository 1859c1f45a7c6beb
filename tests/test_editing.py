"""Edits of an agent: hooks, files, weights, random edits, and the scripts that make edits."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, small_policy

import train
from agents.acting import run_policy
from agents.agent_file import load_agent, read_origin, save_agent, weights_sha256
from agents.edits import Edit, with_edits
from agents.outputs import outputs_named
from agents.provenance import agent_sha256
from agents.reference_set import activations_of
from agents.rollout_files import EpisodeArrays, RolloutWriter
from attribution import choose_edits, edit_agent
from attribution.editing import in_weights, pool_behind, random_edits
from attribution.failures.results import FAILURES
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import find_bottlenecks
from attribution.recordings import Recording
from attribution.results import FEATURES, finish_features, load_features
from common.errors import UserError
from common.results import ResultStore
from envs.procgen_env import EnvConfig
from maze.field.page_export import check_agent

RNG = np.random.default_rng(0)
FRAMES = RNG.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
BLOCK3, CLEAR_2A = "embedder.relu3", "embedder.relu2a"


def directions(number: int, slots: int) -> torch.Tensor:
    """Return random overlapping directions, each of sum 1."""
    drawn = np.random.default_rng(slots).random((number, slots)) ** 4
    return torch.from_numpy((drawn / drawn.sum(axis=1, keepdims=True)).astype(np.float32))


def answers(policy, frames=FRAMES) -> np.ndarray:
    """Return logits and values, one row per frame."""
    output = run_policy(policy, FLOAT32, frames, policy.initial_states(len(frames)))
    return np.concatenate([output.logits.numpy(), output.values.numpy()[:, None]], axis=1)


def outputs_of(policy, layer: str) -> np.ndarray:
    """Return the outputs of a layer with channels last, float64."""
    return np.moveaxis(activations_of(policy, FRAMES, [layer])[layer].double().numpy(), 1, -1)


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_an_edit_is_the_projection_off_the_span_of_its_directions_in_every_cell(strength):
    policy, taken = small_policy("clear"), directions(3, 32)
    taken[2] = 0.3 * taken[0] + taken[1]  # in the span of the other two
    before = outputs_of(policy, CLEAR_2A)
    after = outputs_of(with_edits(policy, [Edit(CLEAR_2A, taken, strength)]), CLEAR_2A)
    rows = taken.double().numpy()
    expected = before - strength * before @ np.linalg.pinv(rows, 1e-5) @ rows
    np.testing.assert_allclose(after, expected, atol=1e-6)
    assert np.abs(before @ rows.T).max() > 0.1
    if strength == 1:
        assert np.abs(after @ rows.T).max() < 1e-6


def test_an_edit_of_a_signed_layer_acts_on_slots_and_recombines_them():
    policy, layer = small_policy(), "embedder.block2.res2.resadd"
    before = outputs_of(policy, layer)
    taken = directions(2, 12)  # two slots for each of 6 channels
    after = outputs_of(with_edits(policy, [Edit(layer, taken)]), layer)
    slots = np.concatenate([np.maximum(before, 0), np.maximum(-before, 0)], axis=-1)
    rows = taken.double().numpy()
    left = slots - slots @ np.linalg.pinv(rows, 1e-5) @ rows
    np.testing.assert_allclose(after, left[..., :6] - left[..., 6:], atol=1e-5)
    one = torch.zeros(1, 12)
    one[0, 8] = 1  # slot of negative values of channel 2
    cut_off = outputs_of(with_edits(policy, [Edit(layer, one)]), layer)
    expected = before.copy()
    expected[..., 2] = np.maximum(expected[..., 2], 0)
    assert before[..., 2].min() < 0
    np.testing.assert_allclose(cut_off, expected, atol=1e-6)


@pytest.mark.parametrize(("architecture", "layer"), [
    ("impala", BLOCK3), ("nature", "embedder.relu3"), ("clear", CLEAR_2A),
    ("clear", "embedder.pool4"), ("impala", "embedder.block2.res1.relu2")])
def test_an_edit_in_weights_is_the_edit_as_a_hook(architecture, layer):
    policy = small_policy(architecture, recurrent=architecture != "clear")
    channels = outputs_of(policy, layer).shape[-1]
    edit = Edit(layer, directions(2, channels), 0.4)
    hooked, weighted = with_edits(policy, [edit]), in_weights(policy, edit)
    assert not weighted.edits
    np.testing.assert_allclose(answers(weighted), answers(hooked), atol=1e-5 * np.abs(
        answers(policy)).max())
    assert np.abs(answers(hooked) - answers(policy)).max() > 1e-3


def test_the_published_edit_behind_the_pool_is_the_one_before_it_for_one_channel_alone():
    policy = small_policy("clear", recurrent=False)
    pool = pool_behind(policy, "embedder.relu2b")
    assert pool == "embedder.pool2"

    def differ(taken: torch.Tensor) -> float:
        behind, before = (answers(with_edits(policy, [Edit(layer, taken)]))
                          for layer in (pool, "embedder.relu2b"))
        return np.abs(behind - before).max()

    # If a channel is ablated before L2 pooling, the pooled value is the root of 1e-8, not 0.
    assert differ(torch.eye(32)[3:4]) < 1e-2 * differ(directions(1, 32))


@pytest.mark.parametrize(("architecture", "layer", "slots", "named"), [
    ("clear", "embedder.relu2b", 32, "pool2"),
    ("impala", "embedder.block1.res2.resadd", 8, "by sign"),
    ("impala", "embedder.block2.maxpool", 6, "relu1"), ("impala", "fc_policy", 15, "no single")])
def test_an_edit_is_put_into_weights_only_where_that_is_the_same(architecture, layer, slots, named):
    with pytest.raises(UserError, match=named):
        in_weights(small_policy(architecture, recurrent=False), Edit(layer, torch.eye(slots)[:1]))


def test_an_edited_agent_file_is_another_agent_and_plays_the_edit(tmp_path):
    policy = small_policy()
    edited = with_edits(policy, [Edit(BLOCK3, directions(1, 5), 0.7),
                                 Edit("embedder.block1.res2.resadd", directions(2, 8))])
    save_agent(tmp_path / "edited.pth", edited)
    loaded = load_agent(tmp_path / "edited.pth")
    assert weights_sha256(loaded) == weights_sha256(edited) != weights_sha256(policy)
    save_agent(tmp_path / "again.pth", loaded)  # like a tool that ignores edits
    np.testing.assert_array_equal(answers(load_agent(tmp_path / "again.pth")), answers(edited))


@pytest.mark.parametrize(("entries", "named"), [
    ([("embedder.relu9", torch.ones(1, 5), 1.0)], "edit: .* no layer 'embedder.relu9'"),
    ([(BLOCK3, torch.ones(1, 5), 1.0), (BLOCK3, torch.zeros(1, 5), 1.0)], "edit: .* nonzero"),
    ([(BLOCK3, torch.ones(1, 5), torch.inf)], "edit: .* NaN or infinity"),
    ([("gru", torch.ones(1, 12), 1.0)], "edit: .* next step"), ({"layer": BLOCK3}, "invalid edit")])
def test_an_edit_in_a_file_that_cannot_be_is_named(entries, named, tmp_path):
    path = tmp_path / "edited.pth"
    save_agent(path, small_policy())
    torch.save({**torch.load(path, weights_only=True), "edits": entries}, path)
    with pytest.raises(UserError, match=named):
        load_agent(path)


@pytest.mark.parametrize("layer", [BLOCK3, "embedder.block2.res2.resadd"])
def test_random_edits_change_as_much_as_the_edit_and_have_its_entries(layer):
    policy = small_policy()
    activations = activations_of(policy, FRAMES, [layer])[layer]
    channels = activations.shape[1]
    edit = Edit(layer, directions(2, channels * (1 + (layer != BLOCK3))), 0.8)

    def size(each: Edit) -> float:
        return float((each.changed(activations, 1) - activations).flatten(1).norm(dim=1).mean())

    drawn = random_edits(edit, activations, 12, 3)
    for each in drawn:
        assert size(each.edit) == pytest.approx(size(edit), rel=1e-4)
        at_own_strength = dataclasses.replace(each.edit, strength=edit.strength)
        assert size(at_own_strength) == pytest.approx(each.relative * size(edit), rel=1e-4)
        for row, own in zip(each.edit.directions, edit.directions):
            assert not torch.equal(row, own)
            torch.testing.assert_close(row.sort().values, own.sort().values)
    assert len({each.edit.directions.numpy().tobytes() for each in drawn}) == 12
    assert [each.near for each in drawn] == sorted((each.near for each in drawn), reverse=True)
    fewer = random_edits(edit, activations, 4, 3)
    assert torch.equal(fewer[0].edit.directions, drawn[0].edit.directions)
    with pytest.raises(UserError, match="7 controls cannot be drawn"):
        random_edits(Edit(layer, torch.eye(channels)[:1]), activations[:, :], 7, 0)
    with pytest.raises(UserError, match="changes nothing"):
        random_edits(edit, torch.zeros_like(activations), 2, 0)


def test_attributions_of_an_edited_agent_add_up_to_its_output():
    """One of the edits acts on both signs after the layer; no path may skip its kink."""
    policy = small_policy(recurrent=False)
    with torch.no_grad():  # so that activations change their sign on the path
        policy.embedder.block3.conv.bias += torch.tensor([-0.3, 0.3, -0.2, 0.4, 0.2])
    taken = torch.eye(10)[[0, 6, 2, 8, 9]]  # slots of positive and negative values
    edited = with_edits(policy, [Edit("embedder.block3.conv", taken),
                                 Edit("embedder.block2.res2.resadd", directions(1, 6))])
    [bottleneck] = find_bottlenecks(edited, ["block2"])
    attributor = LayerIntegratedGradients(edited, FLOAT32, bottleneck, outputs_named(["value"]),
                            Integration(16, tolerance=0.01))
    found = attributor.attribute(attributor.run_prefix(FRAMES, np.zeros((5, 16), np.float32)),
                                 np.zeros(5, np.int64), np.ones(1))
    sums = found.values[0].reshape(5, -1).sum(axis=1)
    np.testing.assert_allclose(found.outputs[0], answers(edited)[:, -1], atol=1e-4)
    np.testing.assert_allclose(sums, found.outputs[0] - found.baselines[0], rtol=0.02, atol=1e-3)


def test_what_would_leave_the_edits_out_refuses_an_edited_agent(tmp_path, capsys):
    policy = with_edits(small_policy(recurrent=False), [Edit(BLOCK3, directions(1, 5))])
    with pytest.raises(UserError, match="has edits"):
        check_agent(policy, Path("model.pth"))
    save_agent(tmp_path / "edited.pth", policy)
    assert train.main(["--env_name", "coinrun", "--param_name", "tiny", "--exp_name", "x",
                       "--logdir", str(tmp_path), "--device", "cpu", "--num_timesteps", "1",
                       "--model_file", str(tmp_path / "edited.pth")]) == 2
    assert "edited agent" in capsys.readouterr().err


@pytest.fixture(scope="module")
def with_features(tmp_path_factory) -> Path:
    """A folder with an agent, a recording of it, and synthetic features."""
    folder = tmp_path_factory.mktemp("editing")
    policy = small_policy()
    save_agent(folder / "model.pth", policy)
    checksum = agent_sha256(folder / "model.pth")
    RolloutWriter(folder / "data", {"agent_sha256": checksum}).add(0, EpisodeArrays(
        RNG.integers(0, 256, (20, 64, 64, 3), dtype=np.uint8),
        RNG.normal(size=(21, 12)).astype(np.float32), np.zeros((20, 15), np.float32),
        pd.DataFrame({"level_seed": 0, "episode_step": np.arange(20), "done": np.arange(20) == 19,
                      "reward": 0.0, "value": 0.0, "action": 4})))
    recording = Recording(folder / "data", policy, folder / "model.pth")
    features = ResultStore(folder / "features" / "block3", FEATURES)
    features.open({"layer": BLOCK3, "agent_sha256": checksum, "recording_sha256": recording.sha256})
    finish_features(features, {"signed": False, "grid": [8, 8], "stride": 8, "first_pixel": 0},
                    directions=directions(3, 5).numpy(), mean_activations=np.zeros((5, 8, 8)),
                    observations=recording.observations(20, 0))
    return folder


def edited(folder: Path, output: Path, *more: str, agent: str | Path = "model.pth") -> int:
    return edit_agent.main(["--agent_file", str(folder / agent), "--features_dir",
                            str(folder / "features"), "--layer", "block3", "--output", str(output),
                            *more])


def test_the_script_takes_features_out_as_edits_and_in_weights(with_features, tmp_path):
    chosen = ("--features", "0", "2", "--strength", "0.6")
    assert edited(with_features, tmp_path / "hook.pth", *chosen) == 0
    assert edited(with_features, tmp_path / "weights.pth", *chosen, "--in_weights") == 0
    policy = load_agent(with_features / "model.pth")
    expected = answers(with_edits(policy, [Edit(BLOCK3, directions(3, 5)[[0, 2]], 0.6)]))
    for name in ("hook", "weights"):
        path = tmp_path / f"{name}.pth"
        np.testing.assert_allclose(answers(load_agent(path)), expected, atol=1e-5 * np.abs(
            expected).max())
        assert read_origin(path).edited_from == agent_sha256(with_features / "model.pth")
    assert not load_agent(tmp_path / "weights.pth").edits
    # The features belong to the agent before the edit, and may also be ablated in the edited one.
    assert edited(with_features, tmp_path / "both.pth", "--features", "1",
                  agent=tmp_path / "hook.pth") == 0
    assert len(load_agent(tmp_path / "both.pth").edits) == 2


def test_the_script_takes_random_directions_out_that_change_as_much(with_features, tmp_path):
    assert edited(with_features, tmp_path / "random.pth", "--features", "1", "--random_directions",
                  "4", "--data_dir", str(with_features / "data")) == 0
    policy = load_agent(with_features / "model.pth")
    recording = Recording(with_features / "data", policy, with_features / "model.pth")
    rows = recording.read(recording.observations(20, 0))
    activations = activations_of(policy, rows.frames, [BLOCK3], rows.entering)[BLOCK3]
    [drawn] = load_agent(tmp_path / "random.pth").edits
    sizes = [float((edit.changed(activations, 1) - activations).flatten(1).norm(dim=1).mean())
             for edit in (drawn, Edit(BLOCK3, directions(3, 5)[1:2]))]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-4)
    assert not torch.equal(drawn.directions, directions(3, 5)[1:2])


# Choosing edits that blind an agent to a hazard

HARD = EnvConfig("coinrun", "hard")
HOP, RIGHT = 8, 7  # actions: jump to the right; go to the right
GUARD, LAYER = 5, "relu3"  # a channel that is 1 everywhere
SEED = "18"  # of levels where an agent that hops meets saws, but one that also walks does not


def guarded() -> torch.nn.Module:
    """Return an agent that hops to the right, and also walks because of channel GUARD."""
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
    """A folder with an agent and three features of a layer; the second one is planted."""
    path = tmp_path_factory.mktemp("edits")
    policy = guarded()
    save_agent(path / "model.pth", policy)
    [bottleneck] = find_bottlenecks(policy, [LAYER])
    features = ResultStore(path / "features" / LAYER, FEATURES)
    features.open({"agent_sha256": agent_sha256(path / "model.pth"), "game": "coinrun",
                   "layer": bottleneck.layer.name, "baseline": "zero"})
    directions = np.zeros((3, 64), np.float32)
    directions[[0, 1, 2], [7, GUARD, 9]] = 1
    finish_features(features, {"signed": False, "grid": bottleneck.shape[1:], "stride": 8,
                               "first_pixel": 0},
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
    assert (tried["levels"] == 6).all()  # saws matter on too few levels
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
    assert f"fails {tried['by_hazard']['1']} of 6 levels because of saw" in capsys.readouterr().out


@pytest.mark.slow
def test_random_features_are_searched_in_the_same_way(folder, tmp_path):
    """The planted feature is found, and the best of as many random edits breaks nothing."""
    output = tmp_path / "edits"
    output.mkdir()
    foreign = output / "control_001_blind_to_saw.pth"
    foreign.write_bytes(b"a file of the user")
    given = [*arguments(folder, output), "--num_controls", "2"]
    assert choose_edits.main(given) == 2 and foreign.read_bytes() == b"a file of the user"
    foreign.unlink()
    assert choose_edits.main(given) == 0
    tried = pd.read_csv(output / "candidates.csv").set_index("control")
    policy = load_agent(folder / "model.pth")
    drawn = []
    for number in range(2):
        rows = tried.loc[number]
        assert rows["features"].tolist()[:3] == ["0", "1", "2"] and rows["chosen"].sum() == 1
        path = output / f"control_{number:03d}_blind_to_saw.pth"
        assert read_origin(path).edited_from == agent_sha256(folder / "model.pth")
        [edit] = load_agent(path).edits
        drawn.append(edit.directions)
        assert GUARD not in edit.directions.nonzero()[:, 1]
        assert (rows["by_hazard"] - rows["by_hazard_before"]).max() < (
            tried.loc[-1, "by_hazard"] - tried.loc[-1, "by_hazard_before"]).max()
    assert not torch.equal(*drawn)
    outputs = activations_of(policy, FRAMES, ["embedder.relu3"])
    features = {LAYER: load_features(folder / "features", find_bottlenecks(policy, [LAYER])[0], {
        agent_sha256(folder / "model.pth")}, "coinrun")}
    for control in range(3):
        make = choose_edits.random_features(features, outputs, 0, control)
        sizes = [float((edit.changed(outputs[edit.layer], 1) - outputs[edit.layer]
                        ).flatten(1).norm(dim=1).mean()) for edit in (
                            make(LAYER, [1], 1.5), choose_edits.edit_of(features, LAYER, [1], 1.5))]
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-4) or sizes[0] == 0


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
    # Lava cannot be made invisible.
    assert not lava.has("episodes", "invisible_lava")
    assert (tried.loc["lava", "levels"] == 6).all()
