"""``attribution.features`` and ``attribution.attribute`` on a real recording."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FLOAT32, bytes_of_files, killed_at, record_arguments, small_policy

import record
from agents.acting import run_policy
from agents.agent_file import load_agent, save_agent
from agents.hooks import cached
from agents.rollout_files import RolloutFolder
from attribution import attribute, features
from attribution.feature_directions import SUBDIVISIONS
from attribution.results import FEATURES, AttributionStore, read_features
from attribution.trajectories import gather_trajectories
from common.results import ResultStore
from interventions.hidden_states_folder import hidden_state_results

NUM_OBSERVATIONS = 160
MADE = ("--outputs", "value", "taken", "--layers", "input", "block3", "hidden_state")


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model_0.pth"
    save_agent(path, small_policy())
    return path


@pytest.fixture(scope="module")
def data(agent, tmp_path_factory) -> Path:
    """A recording of eight episodes of the agent."""
    logdir = tmp_path_factory.mktemp("recording")
    assert record.main(record_arguments(agent, logdir, 8, "--no_action_noise", "--no_videos")) == 0
    return logdir / "data"


def features_arguments(agent, data, folder, *more) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(data), "--output_dir", str(folder),
            "--num_observations", str(NUM_OBSERVATIONS), "--nmf_features", "3", "--device", "cpu",
            "--seed", "1", "--layers", *(more or ("block3", "hidden_state"))]


def attribution_arguments(agent, data, features_dir, folder, *more) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(data), "--features_dir",
            str(features_dir), "--output_dir", str(folder), "--num_trajectories", "2",
            "--num_steps", "80", "--device", "cpu", *more]


def attributed(*arguments) -> AttributionStore:
    """Return attributions along one trajectory."""
    assert attribute.main(attribution_arguments(*arguments, "--num_trajectories", "1")) == 0
    return AttributionStore(arguments[3])


@pytest.fixture(scope="module")
def found(agent, data, tmp_path_factory) -> Path:
    """A folder of features of a layer with cells and of the hidden state."""
    folder = tmp_path_factory.mktemp("features") / "out"
    assert features.main(features_arguments(agent, data, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def made(agent, data, found, tmp_path_factory) -> Path:
    """A folder of attributions of two outputs to these features, and of plain gradients."""
    folder = tmp_path_factory.mktemp("attribution") / "out"
    assert attribute.main(attribution_arguments(agent, data, found, folder, *MADE)) == 0
    return folder


def test_features_of_a_recording_are_written_and_read(found, data):
    read = read_features(found, "block3")
    assert read.reducer.directions.shape == (3, 5) and not read.reducer.signed
    assert read.number == 3 and read.mean_activations.shape == (5, 8, 8)
    assert read.facts["stride"] == 8 and read.facts["first_pixel"] == 0
    assert read.facts["value_deviation"] > 0 and not read.facts["partial"]
    store = ResultStore(found / "block3", FEATURES)
    for item in (*(("spatial_examples", f"{each:g}") for each in SUBDIVISIONS),
                 ("thumbnail_examples",)):
        assert store.read(*item)["observations"].max() < NUM_OBSERVATIONS
    units = read_features(found, "hidden_state")
    assert units.reducer.signed and units.reducer.directions.shape == (3, 24)

    # Observations are spread evenly over the episodes, without terminal rows.
    lengths = RolloutFolder(data).index()["episode"].value_counts().sort_index().to_numpy() - 1
    counts = np.bincount(read.observations[:, 0], minlength=len(lengths))
    assert len(np.unique(read.observations, axis=0)) == counts.sum() == NUM_OBSERVATIONS
    assert (read.observations[:, 1] < lengths[read.observations[:, 0]]).all()
    spare = counts[counts < lengths]
    assert np.ptp(spare) <= 1 and counts.max() - spare.min() <= 1


def test_attributions_along_trajectories_add_up_to_what_the_agent_said(made, data, agent):
    folder = AttributionStore(made)
    assert folder.layers() == ["block3", "hidden_state"]
    steps = folder.trajectories()
    np.testing.assert_array_equal(steps.row, gather_trajectories(RolloutFolder(data), 2, 80).row)
    part, episodes = steps.part(1), {}
    for number in set(part.episode):
        episodes[number] = RolloutFolder(data).episode(number)
    at = list(zip(part.episode, part.row))
    run = run_policy(load_agent(agent), FLOAT32, np.stack([episodes[e].frames[r] for e, r in at]),
                     torch.from_numpy(np.stack([episodes[e].hidden_states[r] for e, r in at])))
    for layer, grid in (("block3", (8, 8)), ("hidden_state", (1, 1))):
        for output, said in (("value", run.values),
                             ("taken", run.log_probs[np.arange(len(at)), part.action])):
            read = folder.read("attributions", layer, output, 1)
            assert read["cells"].shape == (80, *grid, 4)
            np.testing.assert_allclose(read["output"], said.numpy(), atol=1e-5)
            change = read["output"] - read["baseline"]
            allowed = 0.01 * np.maximum(
                np.abs(change), 0.1 * folder.read("summary", layer, output)["deviation"]) + 1e-5
            assert (np.abs(read["totals"].sum(axis=1) - change) <= allowed).all()
            np.testing.assert_allclose(read["cells"].astype(np.float64).sum(axis=(1, 2)),
                                       read["totals"], atol=2e-3 * np.abs(read["totals"]).max())
        activations = folder.read("activations", layer, 1)["cells"]
        assert activations.shape == (80, *grid, 3) and (activations >= 0).all()
    summary = folder.read("summary", "block3", "value")
    assert summary["frames"] == 160 and summary["above"] == 0 and summary["gap_99"] <= 0.01


@pytest.mark.slow
def test_killed_shards_and_a_join_attribute_as_one_run(found, agent, data, tmp_path, capsys):
    output, alone = tmp_path / "out", tmp_path / "alone"

    def run(folder, *more):
        return attribute.main(attribution_arguments(
            agent, data, found, folder, "--layers", "input", "hidden_state", "--num_trajectories",
            "3", "--num_steps", "3", "--memory_steps", "2", "--gradient_activation", *more))

    assert run(alone) == 0
    with killed_at(ResultStore, "write", 6):  # after the first trajectory
        assert run(output, "--shard", "1/2") == 130
    kept = {path: path.stat().st_mtime_ns for path in output.rglob("traj*0.npz")}
    assert kept and run(output, "--shard", "1/2") == 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    other = shutil.copytree(found, tmp_path / "other")
    directions = ResultStore(other / "hidden_state", FEATURES).file_of("directions")
    np.save(directions, 2 * np.load(directions))
    assert run(output, "--shard", "2/2", "--features_dir", str(other)) == 2
    assert "with another features" in capsys.readouterr().err
    assert run(output, "--shard", "2/2") == run(output, "--join") == 0
    assert bytes_of_files(output) == bytes_of_files(alone)
    # Shards also divide the missing items of a finished folder.
    (output / "hidden_state" / "value" / "memory_2" / "trajectory_00002.npz").unlink()
    assert run(output, "--shard", "2/2") == 0
    assert run(output, "--join") == 2
    assert "out lacks shards 1/2, which" in capsys.readouterr().err
    assert run(output, "--shard", "1/2") == run(output, "--join") == 0
    assert bytes_of_files(output) == bytes_of_files(alone)


def test_attributions_over_time_are_written_and_read(agent, data, found, tmp_path):
    folder = attributed(agent, data, found, tmp_path / "out", "--layers", "block3",
                        "--memory_steps", "3", "--num_steps", "30")
    assert folder.lags("block3", "value") == [3] and folder.outputs("block3") == ["value"]
    read = folder.read("over_time", "block3", "value", 3, 0)
    plain = folder.read("attributions", "block3", "value", 0)
    assert read["totals"].shape == (30, 3, 4)
    np.testing.assert_allclose(read["output"], plain["output"], atol=1e-4)
    change = read["output"] - read["baseline"]
    np.testing.assert_allclose(read["totals"].sum(axis=(1, 2)) + read["older"], change,
                               atol=0.01 * np.abs(change).max())
    rows = folder.trajectories().row
    assert (read["totals"][rows == 0, 1:] == 0).all() and (read["older"][rows < 3] == 0).all()
    assert (read["totals"][rows > 1] != 0).any(axis=(0, 2)).all() and read["older"][rows == 5].any()


def test_gradients_by_the_frame_and_times_activations_are_those_of_torch(agent, data, found,
                                                                          tmp_path):
    folder = attributed(agent, data, found, tmp_path / "out", "--layers", "input", "block3",
                        "--outputs", "value", "taken", "--gradient_activation", "--num_steps", "20")
    assert folder.layers() == ["block3"] and folder.outputs("input") == ["taken", "value"]
    assert "gap_median" not in folder.read("summary", "input", "value")
    steps, policy = folder.trajectories(), load_agent(agent)
    reducer = read_features(found, "block3").reducer
    for at in (0, 13):
        episode, row = RolloutFolder(data).episode(int(steps.episode[at])), int(steps.row[at])
        image = torch.from_numpy(episode.frames[row]).permute(2, 0, 1)[None].float().div(
            255).requires_grad_()
        with cached(policy, ["embedder.relu3"], graph=True) as kept:
            run = policy.step(policy.embed(image), torch.from_numpy(episode.hidden_states[[row]]))
        layer = kept["embedder.relu3"]
        activations = np.moveaxis(layer.detach().numpy(), 1, -1).reshape(64, -1)
        for output, scalar in (("value", run.values[0]),
                               ("taken", run.log_probs[0, int(steps.action[at])])):
            by_frame, by_layer = torch.autograd.grad(scalar, (image, layer), retain_graph=True)
            stored = folder.read("gradients", output, 0)
            ours = stored["gradients"][at].astype(np.float32) * stored["largest"][at]
            np.testing.assert_allclose(ours, by_frame[0].permute(1, 2, 0).numpy(),
                                       atol=1e-3 * by_frame.abs().max().item())
            assert stored["output"][at] == pytest.approx(scalar.item(), abs=1e-4)
            gradients = np.moveaxis(by_layer.numpy(), 1, -1).reshape(64, -1)
            expected = reducer.attributions(gradients * activations, activations)
            read = folder.read("gradient_activation", "block3", output, 0)
            np.testing.assert_allclose(read["cells"][at].reshape(64, -1), expected,
                                       atol=2e-3 * np.abs(expected).max())
            np.testing.assert_allclose(read["totals"][at], expected.sum(axis=0),
                                       atol=1e-4 * np.abs(expected).sum())


def test_independent_components_are_the_features_of_the_hidden_state(agent, data, tmp_path):
    units, num = 12, 4
    rng = np.random.default_rng(0)
    components = np.linalg.qr(rng.normal(size=(units, units)))[0].astype(np.float32)
    matrix = rng.normal(size=(num, num)).astype(np.float32)
    std = rng.random(units).astype(np.float32) + 0.5
    variances = np.linspace(2, 0.1, units).astype(np.float32)
    written = hidden_state_results(tmp_path / "hx", 7)
    written.path.mkdir()
    for name, array in {"mean": np.zeros(units, np.float32), "std": std,
                        "components": components, "variances": variances,
                        "unmixing": np.linalg.inv(matrix), "mixing": matrix}.items():
        np.save(written.file(name), array)
    assert features.main(features_arguments(
        agent, data, tmp_path / "out", "hidden_state", "--precomp_dir", str(tmp_path / "hx"),
        "--num_episodes", "7", "--nmf_features", "8")) == 0
    read = read_features(tmp_path / "out", "hidden_state")
    directions = (matrix.T @ (np.sqrt(variances[:num])[:, None] * components[:num])) * std
    for name, direction in zip(read.facts["names"], read.reducer.directions, strict=True):
        _, number, sign = name.split()
        signed = directions[int(number)] * (1 if sign == "+" else -1)
        slots = np.concatenate([np.maximum(signed, 0), np.maximum(-signed, 0)])
        np.testing.assert_allclose(direction, slots / slots.sum(), atol=1e-5)
    assert sorted(read.facts["names"]) == sorted(
        f"IC {number} {sign}" for number in range(num) for sign in "+−")
    attribution_of = read.facts["attribution"]
    assert attribution_of == sorted(attribution_of, reverse=True)


def test_published_mode_has_ten_right_ends_and_logits(agent, data, found, tmp_path):
    folder = attributed(agent, data, found, tmp_path / "out", "--layers", "block3",
                        "--published_mode", "--num_steps", "4", "--outputs", "policy")
    assert all(name.startswith("logit_") for name in folder.outputs("block3"))
    read = folder.read("attributions", "block3", "logit_sum_right", 0)
    assert (read["steps"] == 10).all() and folder.settings()["rule"] == "right"


def test_a_mean_baseline_of_the_features_is_that_of_the_attributions(agent, data, tmp_path):
    arguments = features_arguments(agent, data, tmp_path / "features", "block3")
    assert features.main([*arguments, "--baseline", "mean", "--integrate_steps", "1"]) == 0
    read = read_features(tmp_path / "features", "block3")
    assert read.facts["gap_99"] <= read.settings["tolerance"] == 0.01  # one node was refined
    arrays = attributed(agent, data, tmp_path / "features", tmp_path / "out", "--num_steps", "4"
                        ).read("attributions", "block3", "value", 0)
    policy = load_agent(agent)
    mean = torch.from_numpy(read.mean_activations).flatten()[None]
    embedding = policy.embedder.relufc(policy.embedder.fc(mean))
    episode = RolloutFolder(data).episode(0)
    said = policy.step(embedding, torch.from_numpy(episode.hidden_states[:1])).values
    np.testing.assert_allclose(arrays["baseline"][0], said.item(), atol=1e-5)


@pytest.mark.parametrize(("file", "changes", "words"), [
    ("data/recording.json", {"agent_sha256": "f" * 64}, "was recorded with an agent other than"),
    ("data/recording.json", {"swap": {"name": "1_to_2"}}, "swapped directions"),
    ("found/block3/settings.json", {"agent_sha256": "f" * 64}, "to the agent ffffffffffff"),
    ("found/block3/settings.json", {"layer": "relu9"}, "to the layer relu9"),
    ("found/block3/directions.npy", np.full((3, 4), 0.25, np.float32), "do not fit each other"),
    ("found/block3/directions.npy", np.full((3, 5), 0.2, np.float32), "with the checksum"),
    ("data/episode_00003/lp.npy", None, "with another source recording"),
    ("", ("--layers", "embedder.block1.res1.relu1"), "bypasses the layer"),
    ("", ("--episodes", "99"), "but lacks [99]"), ("", ("--precision", "bfloat16"), "float32")])
def test_what_does_not_belong_together_is_refused(file, changes, words, agent, data, found, made,
                                                  tmp_path, capsys):
    for name, folder in (("data", data), ("found", found), ("made", made)):
        shutil.copytree(folder, tmp_path / name)
    if file.endswith(".json"):
        content = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**content, **changes}))
    elif file:
        np.save(tmp_path / file, np.load(tmp_path / file) - 1 if changes is None else changes)
    before = bytes_of_files(tmp_path / "made")
    more = () if file else changes
    assert attribute.main(attribution_arguments(agent, tmp_path / "data", tmp_path / "found",
                                                tmp_path / "made", *more)) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert {name: content for name, content in bytes_of_files(tmp_path / "made").items()
            if name in before} == before


def test_killed_features_resume_to_the_same_files(agent, data, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "FRAMES_PER_PART", 64)
    whole, killed = (features_arguments(agent, data, tmp_path / name, "block3")
                     for name in ("whole", "killed"))
    assert features.main(whole) == 0
    with killed_at(ResultStore, "write", 6):  # after the parts are written
        assert features.main(killed) == 130
    assert features.main(killed) == 0
    assert bytes_of_files(tmp_path / "killed") == bytes_of_files(tmp_path / "whole")
