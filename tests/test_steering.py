"""Steering vectors: files, and the way from a recording to the table of a vector's effects."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, random_frames, tiny_policy

import compare_interventions
import record
from agents.acting import run_policy
from agents.agent_file import load_agent, save_agent, weights_sha256
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import patched
from agents.rollout_files import RolloutFolder
from analysis import steering_vectors
from analysis.steering_vectors import read_states, split_states
from common.errors import UserError
from envs.procgen_env import EnvConfig
from interventions.comparison import collect_runs, comparison_store, read_runs
from interventions.conditions import count_vector_levels
from interventions.patch_text import parse_patch
from interventions.patches import Add
from interventions.vectors import (
    AS_COMPUTED,
    PAIRS,
    PROBE,
    RMS,
    UNIT,
    check_classes,
    read_vectors,
    save_vectors,
    vector_of_probe,
    vectors_of_pairs,
)

MAP = "embedder.block2.res1.resadd"
NUM_EPISODES = 10


def steps_of(lengths, **columns):
    """Return the steps of episodes of given lengths, each with a terminal row."""
    table = pd.DataFrame({
        "episode": np.repeat(np.arange(len(lengths)), lengths), "reward": 0.0, "value": 0.0,
        "action": 4, "level_seed": np.repeat(np.arange(len(lengths)), lengths)})
    table["done"] = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    return table.assign(**columns)


REWARDED = steps_of([5, 4], reward=[10, 0, 0, 10, 0, 0, 0, 0, 10])
CLUSTERS = np.array([1, 0, 0, -1, 1, 1])  # -1 is noise


@pytest.mark.parametrize(("text", "steps", "inside", "outside"), [
    ("action=right,11", steps_of([3, 4], action=[7, 8, 7, 1, 7, 11, 8]), [0, 4, 5], [1, 3]),
    ("value=0.2", steps_of([6, 6], value=[5, 1, 9, 2, 8, -99, 3, 7, 4, 6, 0, 99]), [2, 4], [1, 10]),
    # The reward in row 3 arrives after the step in row 2; that in row 0 precedes all steps.
    ("reward=1", REWARDED, [2, 7], [0, 1, 3, 5, 6]),
    ("reward=2", REWARDED, [1, 2, 6, 7], [0, 3, 5]),
    ("cluster=1", steps_of([3, 3]), [0, 4], [1])])
def test_steps_are_split_without_terminal_ones(text, steps, inside, outside):
    split = split_states(text, steps, lambda: CLUSTERS)
    assert split.rows[split.is_in].tolist() == inside
    assert split.rows[~split.is_in].tolist() == outside


def test_some_states_are_drawn_of_each_class():
    steps = steps_of([200], action=np.arange(200) % 10 == 7)
    split = split_states("action=1", steps, None)
    some = split.some(12, 0)
    assert some.is_in.sum() == 12 == (~some.is_in).sum() and (np.diff(some.rows) > 0).all()
    assert (steps["action"][some.rows] == 1).tolist() == some.is_in.tolist()
    assert len(split.some(10**6, 0).rows) == 199


@pytest.mark.parametrize(("text", "message"), [
    ("act=7", "there is no split 'act=7' .did you mean 'action'"),
    ("value=0.6", "a share above 0 and up to 0.5, not 0.6"),
    ("cluster=3", "there is no cluster 3: they are numbered 0 to 1")])
def test_splits_that_mean_nothing_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        split_states(text, steps_of([3, 3]), lambda: CLUSTERS)
    with pytest.raises(UserError, match="there are clusters of 2 states, but the recording has 6"):
        split_states("cluster=1", steps_of([3, 3]), lambda: np.zeros(2))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """An agent with memory that runs to the right, and its recording."""
    path = tmp_path_factory.mktemp("runner")
    policy = tiny_policy()
    with torch.no_grad():
        policy.fc_policy.bias[[7, 8]] += 3
    save_agent(path / "model_0.pth", policy)
    assert record.main([*map(str, (
        "--model_file", path / "model_0.pth", "--logdir", path, "--num_episodes", NUM_EPISODES,
        "--param_name", "tiny", "--env_name", "fruitbot", "--seed", 5, "--precision", "float32",
        "--device", "cpu", "--no_videos", "--no_action_noise"))]) == 0
    return path


def make(runner, file, *more):
    return steering_vectors.main([*map(str, (
        "--agent_file", runner / "model_0.pth", "--interpreting_params_name", "tiny", "--data_dir",
        runner / "data", "--num_episodes", NUM_EPISODES, "--save_dir", runner / "analysis",
        "--device", "cpu", "--vector_file", file, *more))])


def test_states_are_those_of_their_rows(runner):
    folder = RolloutFolder(runner / "data")
    steps = folder.all_steps(range(NUM_EPISODES))
    rows = np.array([3, 4, folder.episode(0).frames.shape[0] + 2])
    frames, entering, levels = read_states(folder, NUM_EPISODES, rows, steps)
    first, second = folder.episode(0), folder.episode(1)
    np.testing.assert_array_equal(frames, [*first.frames[3:5], second.frames[2]])
    np.testing.assert_array_equal(entering, [*first.hidden_states[3:5], second.hidden_states[2]])
    assert levels.tolist() == steps["level_seed"][rows].tolist()


def test_a_vector_of_all_states_is_the_difference_of_the_recorded_means(runner, tmp_path, capsys):
    assert make(runner, tmp_path / "v.npz", "--split", "action=upright", "--num_states", 10**6) == 0
    found = read_vectors(tmp_path / "v.npz")["hidden_state"]
    episodes = [RolloutFolder(runner / "data").episode(k) for k in range(NUM_EPISODES)]
    states = np.concatenate([each.hidden_states[1:-1] for each in episodes])
    jumped = np.concatenate([each.steps["action"][:-1] for each in episodes]) == 8
    np.testing.assert_allclose(found.vector, states[jumped].mean(axis=0)
                               - states[~jumped].mean(axis=0), atol=1e-5)
    assert found.about == "action=upright" and found.modes == ("easy",)
    assert set(found.levels) == {int(each.steps["level_seed"][0]) for each in episodes}
    assert f"{jumped.sum()} states with action=upright" in capsys.readouterr().out


def test_vectors_of_all_layers_probes_and_scales_are_made(runner, tmp_path):
    several, probed = tmp_path / "all.npz", tmp_path / "probe.npz"
    assert make(runner, several, "--split", "value=0.3", "--layer", "all", "--scale", "rms",
                "--num_states", 5) == 0
    found = read_vectors(several)
    assert {"embedder.block1.conv", MAP, "gru"} <= set(found)
    assert not {"fc_policy", "hidden_state"} & set(found)
    assert {vector.scale for vector in found.values()} == {"rms"}
    assert make(runner, probed, "--split", "value=0.3", "--layer", "gru", "--method", "probe",
                "--scale", "unit") == 0
    probe = read_vectors(probed)["gru"]
    assert probe.kind == "probe" and np.linalg.norm(probe.vector) == pytest.approx(1)
    # The value is linear in the state, so its probe finds the weights of the value head.
    head = load_agent(runner / "model_0.pth").fc_value.weight[0].detach().numpy()
    assert probe.vector @ head / np.linalg.norm(head) > 0.5


def compare(runner, output, *more):
    return compare_interventions.main([*map(str, (
        "--agent_file", runner / "model_0.pth", "--interpreting_params_name", "tiny", "--env_name",
        "fruitbot", "--num_episodes", 10, "--num_controls", 2, "--reference_size", 3, "--seed", 7,
        "--device", "cpu", "--output_dir", output, *more))])


@pytest.fixture(scope="module")
def steered(runner, tmp_path_factory):
    """A folder with a vector made from the recording, and the comparison of its effects."""
    path = tmp_path_factory.mktemp("steered")
    assert make(runner, path / "jump.npz", "--split", "action=upright", "--layer", "gru",
                "--scale", "rms") == 0
    assert compare(runner, path / "out", "--patch",
                   f"add@gru={path / 'jump.npz'},coefficient=-1") == 0
    return path, comparison_store(path / "out")


CONDITION = "add_gru_jump_coefficient_-1"


def test_a_vector_from_a_recording_is_compared_by_its_patch(steered, runner):
    path, folder = steered
    full = pd.read_csv(folder.file_of("effects"))
    assert full["condition"].unique().tolist() == [
        f"patch_{CONDITION}", f"control_000_{CONDITION}", f"control_001_{CONDITION}"]
    assert {"verdict", "median_effect", "smallest_effect", "norm", "relative"} <= set(full)
    text = folder.file_of("report").read_text()
    assert "2 controls of each list of patches" in text and "random directions" not in text
    # The steered condition equals episodes played in a scope with the vector.
    vector = read_vectors(path / "jump.npz")["gru"]
    policy, env = load_agent(runner / "model_0.pth"), EnvConfig("fruitbot", "easy")
    with patched(policy, [Add("gru", vector.vector, -1.0)], {"gru": np.ones(64)}) as scope:
        expected = collect_runs(sorted(play_episodes(
            policy, FLOAT32, env, list(enumerate(env.draw_levels(10, 7))), 7, 64,
            PlayOptions(keep_frames=False)), key=lambda episode: episode.number), scope)
    found, control, unaltered = (read_runs(folder, condition) for condition in (
        f"patch_{CONDITION}", f"control_001_{CONDITION}", "unaltered"))
    assert found.actions.tolist() == expected.actions.tolist() != unaltered.actions.tolist()
    np.testing.assert_allclose(found.values, expected.values, atol=1e-5)
    assert found.norm == pytest.approx(np.linalg.norm(vector.vector), rel=1e-4)
    assert found.moved != pytest.approx(expected.moved)  # in deviations of the reference set
    assert control.norm == pytest.approx(found.norm, rel=1e-4)
    settings = json.loads((path / "out" / "settings.json").read_text())
    assert settings["precision"] == "float32" and settings["reference"]["pictures"] == 3
    assert settings["conditions"][f"control_001_{CONDITION}"]["drawn"] == [{"permuted": 1}]


def test_another_vector_of_the_same_name_is_refused(steered, runner, capsys):
    path, folder = steered
    vector = read_vectors(path / "jump.npz")["gru"]
    try:
        save_vectors(path / "jump.npz", [vector.scaled("unit")])
        assert compare(runner, folder.path, "--patch",
                       f"add@gru={path / 'jump.npz'},coefficient=-1") == 2
        assert f"holds 'patch_{CONDITION}' of the conditions with other settings" in (
            capsys.readouterr().err)
    finally:
        save_vectors(path / "jump.npz", [vector])


@pytest.mark.parametrize(("patch", "more", "message"), [
    (f"zero@{MAP}", [], "names no channels of one layer"),
    ("add@gru=JUMP", ["--patch_controls", "others", "--control_vectors", "JUMP"],
     "2 controls need as many other vectors, but there are 1"),
    (f"add@{MAP}=JUMP", [], "a vector of the layer gru cannot be added to the layer emb")])
def test_patches_that_cannot_be_compared_are_refused(steered, runner, tmp_path, capsys, patch, more,
                                                     message):
    jump = str(steered[0] / "jump.npz")
    more = [str(each).replace("JUMP", jump) for each in ("--patch", patch, *more)]
    assert compare(runner, tmp_path / "out", *more) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_levels_that_a_vector_was_made_on_are_counted(steered):
    path, _ = steered
    levels = read_vectors(path / "jump.npz")["gru"].levels
    patch_lists = [(parse_patch(text),) for text in (
        f"add@gru={path / 'jump.npz'},coefficient=2", "zero@gru:3")]
    assert count_vector_levels(patch_lists, [*levels[:3], -1]) == 3
    assert count_vector_levels(patch_lists[1:], levels) == 0


# Vectors and their files

LAYERS = {"impala": ("embedder.block1.res2.resadd", MAP, "embedder.relu3", "embedder.relufc"),
          "nature": ("embedder.conv1", "embedder.relu2", "embedder.flatten", "embedder.relufc")}


def logits_with(policy, frames, *patches):
    with patched(policy, patches):
        return run_policy(policy, FLOAT32, frames, policy.initial_states(len(frames))).logits


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_subtracting_the_vector_at_its_picture_gives_the_logits_of_the_other(architecture,
                                                                             recurrent):
    policy = tiny_policy(recurrent=recurrent, architecture=architecture)
    shown, lacking = random_frames(2)
    layers = [*LAYERS[architecture], "gru" if recurrent else "fc_policy"]
    vectors = vectors_of_pairs(policy, layers, shown[None], lacking[None], [(5, 5)], "noise")
    other = logits_with(policy, lacking[None])
    assert (logits_with(policy, shown[None]) - other).abs().max() > 1e-2
    for layer in layers:
        vector = vectors[layer].vector
        steered = logits_with(policy, shown[None], Add(layer, vector, -1.0))
        torch.testing.assert_close(steered, other, atol=2e-5, rtol=0)
        assert vectors[layer].norms.tolist() == pytest.approx([np.linalg.norm(vector)])
        assert vectors[layer].pairs.tolist() == [[5, 5]]


def test_vectors_have_the_names_of_the_innermost_modules():
    found = vectors_of_pairs(tiny_policy(), ["embedder.block2.res1", f"{MAP}_out", "embedder"],
                             random_frames(1), random_frames(1, 1), [(0, 0)], "noise")
    assert [(name, vector.layer) for name, vector in found.items()] == [
        (MAP, MAP), ("embedder.relufc", "embedder.relufc")]


def test_squares_of_a_level_are_averaged_before_levels():
    policy = tiny_policy()
    shown, lacking = random_frames(5), random_frames(5, 1)
    pairs = [(4, 4), (2, 3), (4, 4), (4, 4), (2, 3)]
    found = vectors_of_pairs(policy, [MAP], shown, lacking, pairs, "noise", ["easy"])[MAP]
    single = np.stack([vectors_of_pairs(policy, [MAP], shown[[i]], lacking[[i]], [(0, 0)],
                                        "noise")[MAP].vector for i in range(5)])
    levels = single[[1, 4]].mean(axis=0), single[[0, 2, 3]].mean(axis=0)
    np.testing.assert_allclose(found.vector, np.mean(levels, axis=0), atol=1e-5)
    np.testing.assert_allclose(found.norms, [*map(np.linalg.norm, levels)], rtol=1e-5)
    assert found.pairs.tolist() == [[2, 3], [4, 4]]
    assert (found.levels, found.modes, found.kind) == ((2, 3, 4), ("easy",), PAIRS)


def test_classes_of_all_states_or_of_none_are_refused():
    for classes in (np.zeros(70), np.ones(70)):
        with pytest.raises(UserError, match="of the 70 states are in the class 'action=right'"):
            check_classes(classes, "action=right")


@pytest.fixture(scope="module")
def vectors():
    return vectors_of_pairs(tiny_policy(), [MAP, "gru"], random_frames(3), random_frames(3, 1),
                            [(k, k + 1) for k in range(3)], "noise", ["easy"])


def test_scales_are_norms_and_multiples_of_the_layers_size(vectors):
    vector = vectors[MAP]
    assert vector.scaled(AS_COMPUTED) is vector
    unit, rms = vector.scaled(UNIT), vector.scaled(RMS, 2.5)
    assert np.linalg.norm(unit.vector) == pytest.approx(1)
    assert np.sqrt(np.mean(rms.vector ** 2)) == pytest.approx(2.5)
    for scaled in (unit, rms):
        along = (scaled.vector * vector.vector).sum() / np.linalg.norm(vector.vector)
        assert along == pytest.approx(np.linalg.norm(scaled.vector))
    assert (unit.scale, rms.scale) == (UNIT, RMS)
    nothing = dataclasses.replace(vector, vector=0 * vector.vector)
    with pytest.raises(UserError, match="is 0, so it cannot be scaled to unit"):
        nothing.scaled(UNIT)


def same(a, b):
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name))
               for field in dataclasses.fields(a))


def test_files_hold_all_of_one_vector_or_of_all_layers(vectors, tmp_path):
    one, both = tmp_path / "one.npz", tmp_path / "both.npz"
    scaled = vectors[MAP].scaled(UNIT)
    save_vectors(one, [scaled])
    assert same(read_vectors(one)[MAP], scaled)
    with np.load(one, allow_pickle=False) as file:
        assert set(file.files) == {"vector", "pairs", "norms", "text"}
        text = json.loads(str(file["text"]))
    assert text["layer"] == MAP and text["versions"]["numpy"] == np.__version__
    save_vectors(both, list(vectors.values()))
    found = read_vectors(both)
    assert list(found) == [MAP, "gru"] and all(same(found[name], vectors[name]) for name in found)


def test_a_vector_of_another_agent_layer_or_shape_is_refused_and_both_are_said(vectors):
    vector, agent = vectors[MAP], weights_sha256(tiny_policy())
    vector.check_for(agent, MAP, (8, 16, 16))
    other = weights_sha256(tiny_policy(1))
    for arguments, own, wanted in (((other, MAP, (8, 16, 16)), agent, other),
                                   ((agent, "gru", (64,)), MAP, "gru"),
                                   ((agent, MAP, (64, 16, 16)), r"\(8, 16, 16\)",
                                    r"\(64, 16, 16\)")):
        with pytest.raises(UserError, match=f"{own} cannot be added to .* {wanted}"):
            vector.check_for(*arguments)


@pytest.mark.parametrize(("name", "array", "message"), [
    ("vector", np.full((32, 16, 16), np.nan, np.float32), "'vector' holds NaN"),
    ("vector", np.zeros((4, 4), np.float32), r"'vector' holds float32 \(4 x 4\)"),
    ("vector", np.array([{}], object), r"not a \.npz file of arrays"),
    ("norms", np.zeros(2, np.float32), r"'norms' holds float32 \(2\)"),
    ("text", np.array("{"), "damaged"),
    ("text", {"scale": "huge"}, "an unknown scale, 'huge'"),
    ("text", {"layer": "all"}, "it has no layer")])
def test_damaged_files_are_refused(vectors, tmp_path, name, array, message):
    path = tmp_path / "v.npz"
    save_vectors(path, [vectors[MAP]])
    content = dict(np.load(path, allow_pickle=False))
    if isinstance(array, dict):
        array = np.array(json.dumps(json.loads(str(content["text"])) | array))
    np.savez(path, **{**content, name: array})
    with pytest.raises(UserError, match=message):
        read_vectors(path)


def test_a_probes_weights_are_the_vector():
    weights = np.arange(64.0)
    vector = vector_of_probe(tiny_policy(), "gru", weights, [3, 3, 1], "reward soon")
    assert (vector.kind, vector.levels, vector.about) == (PROBE, (1, 3), "reward soon")
    assert vector.vector.tolist() == weights.tolist()
