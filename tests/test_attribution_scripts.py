"""``attribution.features`` and ``attribution.attribute`` on a real recording."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FLOAT32, killed_at, record_arguments, small_policy

import record
from agents.acting import run_policy
from agents.agent_file import load_agent, save_agent
from agents.hooks import cached
from agents.networks import ImpalaEmbedder, Policy
from agents.rollout_files import RolloutFolder
from attribution import attribute, features
from attribution.feature_directions import SUBDIVISIONS
from attribution.results import FEATURES, AttributionStore, read_features
from attribution.trajectories import gather_trajectories
from common.files import sha256
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
    """The data folder of 8 episodes of that agent."""
    logdir = tmp_path_factory.mktemp("recording")
    assert record.main(record_arguments(agent, logdir, 8, "--no_action_noise",
                                        "--no_videos")) == 0
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
    """Attributions along one trajectory."""
    assert attribute.main(attribution_arguments(*arguments, "--num_trajectories", "1")) == 0
    return AttributionStore(arguments[3])


@pytest.fixture(scope="module")
def found(agent, data, tmp_path_factory) -> Path:
    """A folder of features of one map and of the hidden state."""
    folder = tmp_path_factory.mktemp("features") / "out"
    assert features.main(features_arguments(agent, data, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def made(agent, data, found, tmp_path_factory) -> Path:
    """A folder of attributions of two outputs to them, and of gradients by the frame."""
    folder = tmp_path_factory.mktemp("attribution") / "out"
    assert attribute.main(attribution_arguments(agent, data, found, folder, *MADE)) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file()}


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
    assert not list((found / "hidden_state").glob("examples*"))
    assert not list(found.rglob(".parts*"))

    # Observations are spread evenly over the episodes, without terminal rows.
    recording = RolloutFolder(data)
    lengths = recording.index()["episode"].value_counts().sort_index().to_numpy() - 1
    counts = np.bincount(read.observations[:, 0], minlength=len(lengths))
    assert counts.sum() == NUM_OBSERVATIONS and len(np.unique(read.observations, axis=0)) == 160
    assert (read.observations[:, 1] < lengths[read.observations[:, 0]]).all()
    spare = counts[counts < lengths]
    assert np.ptp(spare) <= 1 and counts.max() - spare.min() <= 1

def test_attributions_along_trajectories_add_up_to_what_the_agent_said(made, data, agent):
    folder = AttributionStore(made)
    assert folder.layers() == ["block3", "hidden_state"]
    steps, policy = folder.trajectories(), load_agent(agent)
    expected = gather_trajectories(RolloutFolder(data), 2, 80)
    np.testing.assert_array_equal(steps.row, expected.row)
    episodes = {number: RolloutFolder(data).episode(number) for number in set(steps.episode)}
    for layer, grid in (("block3", (8, 8)), ("hidden_state", (1, 1))):
        part = steps.part(1)
        at = list(zip(part.episode, part.row))
        run = run_policy(policy, FLOAT32, np.stack([episodes[e].frames[r] for e, r in at]),
                         torch.from_numpy(np.stack([episodes[e].hidden_states[r] for e, r in at])))
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


def test_more_can_be_added_to_what_is_there(made, found, agent, data, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    before = contents(folder)
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/taken/*")}
    assert attribute.main([*attribution_arguments(agent, data, found, folder), "--outputs", "taken",
                           "log_prob_up", "--layers", "hidden_state"]) == 0
    after = contents(folder)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert {name: after[name] for name in before} == before
    assert {name.rpartition("/")[0] for name in after.keys() - before.keys()} == {
        "hidden_state/log_prob_up"}


def test_shards_and_a_join_attribute_as_one_run(found, agent, data, tmp_path, capsys):
    output, alone = tmp_path / "out", tmp_path / "alone"

    def run(folder, *more):
        return attribute.main(attribution_arguments(
            agent, data, found, folder, "--layers", "input", "hidden_state", "--num_trajectories",
            "3", "--num_steps", "3", "--memory_steps", "2", "--gradient_activation", *more))

    def written():
        return {path: path.stat().st_mtime_ns for path in output.rglob("trajectory_*")}

    assert run(alone) == 0
    with killed_at(ResultStore, "write", 3):
        assert run(output, "--shard", "1/2") == 130
    pieces = written()
    assert len(pieces) == 2
    other = shutil.copytree(found, tmp_path / "other")
    directions = ResultStore(other / "hidden_state", FEATURES).file_of("directions")
    np.save(directions, 2 * np.load(directions))
    for more, words in ((["--join"], "out lacks shards 1/2, 2/2"),
                        (["--shard", "2/2", "--memory_steps", "1"], "with another memory_steps"),
                        (["--shard", "2/2", "--features_dir", str(other)],
                         "with another features")):
        assert run(output, *more) == 2
        assert words in capsys.readouterr().err
    for part, numbers in ((1, [0, 2]), (2, [0, 1, 2])):
        assert run(output, "--shard", f"{part}/2") == 0
        pieces, before = written(), pieces
        assert before.items() < pieces.items()
        assert {path.relative_to(output) for path in pieces} == {
            path.relative_to(alone) for number in numbers
            for path in alone.rglob(f"trajectory_{number:05d}.npz")}
    assert not list(output.rglob("settings.json"))  # the join's
    assert run(output, "--join") == run(output, "--shard", "2/2") == 0
    assert written() == pieces and contents(output) == contents(alone)

    # Shards also divide what a finished folder lacks.
    (output / "hidden_state" / "value" / "memory_2" / "trajectory_00002.npz").unlink()
    assert run(output, "--shard", "2/2") == 0
    assert run(output, "--join") == 2
    assert "out lacks shards 1/2" in capsys.readouterr().err
    assert run(output, "--shard", "1/2") == run(output, "--join") == 0
    assert contents(output) == contents(alone)


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
                                                                          tmp_path, capsys):
    folder = attributed(agent, data, found, tmp_path / "out", "--layers", "input", "block3",
                        "--outputs", "value", "taken", "--gradient_activation", "--num_steps",
                        "20")
    assert "no completeness check" in capsys.readouterr().out
    assert folder.layers() == ["block3"] and folder.outputs("input") == ["taken", "value"]
    assert "gap_median" not in folder.read("summary", "input", "value")
    steps, policy = folder.trajectories(), load_agent(agent)
    reducer = read_features(found, "block3").reducer
    for at in (0, 13):
        episode = RolloutFolder(data).episode(int(steps.episode[at]))
        row = int(steps.row[at])
        image = torch.from_numpy(episode.frames[row]).permute(2, 0, 1)[None].float().div(
            255).requires_grad_()
        with cached(policy, ["embedder.relu3"], graph=True) as kept:
            run = policy.step(policy.embed(image), torch.from_numpy(episode.hidden_states[[row]]))
        layer = kept["embedder.relu3"]
        for output, scalar in (("value", run.values[0]),
                               ("taken", run.log_probs[0, int(steps.action[at])])):
            by_frame, by_layer = torch.autograd.grad(scalar, (image, layer), retain_graph=True)
            stored = folder.read("gradients", output, 0)
            ours = stored["gradients"][at].astype(np.float32) * stored["largest"][at]
            np.testing.assert_allclose(ours, by_frame[0].permute(1, 2, 0).numpy(),
                                       atol=1e-3 * by_frame.abs().max().item())
            assert stored["output"][at] == pytest.approx(scalar.item(), abs=1e-4)
            activations = layer.detach().numpy()
            products = np.moveaxis(by_layer.numpy() * activations, 1, -1).reshape(64, -1)
            expected = reducer.attributions(
                products, np.moveaxis(activations, 1, -1).reshape(64, -1))
            read = folder.read("gradient_activation", "block3", output, 0)
            np.testing.assert_allclose(read["cells"][at].reshape(64, -1), expected,
                                       atol=2e-3 * np.abs(expected).max())
            np.testing.assert_allclose(read["totals"][at], expected.sum(axis=0),
                                       atol=1e-4 * np.abs(expected).sum())


def test_independent_components_are_the_features_of_the_hidden_state(agent, data, tmp_path,
                                                                     capsys):
    units, num = 12, 4
    rng = np.random.default_rng(0)
    components = np.linalg.qr(rng.normal(size=(units, units)))[0].astype(np.float32)
    matrix = rng.normal(size=(num, num)).astype(np.float32)
    written = hidden_state_results(tmp_path / "hx", 7)
    written.path.mkdir()
    std = rng.random(units).astype(np.float32) + 0.5
    variances = np.linspace(2, 0.1, units).astype(np.float32)
    for name, array in {"mean": np.zeros(units, np.float32), "std": std,
                        "components": components, "variances": variances,
                        "unmixing": np.linalg.inv(matrix), "mixing": matrix}.items():
        np.save(written.file(name), array)
    flags = ("--precomp_dir", str(tmp_path / "hx"), "--num_episodes", "7")
    assert features.main(features_arguments(agent, data, tmp_path / "out", "hidden_state", *flags,
                                            "--nmf_features", "8")) == 0
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
    assert set(read.settings["components"]) == {f"{stem}_7.npy" for stem in (
        "hx_mu", "hx_std", "pcomponents", "pc_loading_variances", "ica_unmixing_matrix_hx",
        "ica_mixing_matrix_hx")}
    capsys.readouterr()
    assert features.main(features_arguments(agent, data, tmp_path / "out", "hidden_state", *flags,
                                            "--nmf_features", "9", "--overwrite")) == 2
    assert "4 components make 8 features of the layer hidden_state" in capsys.readouterr().err


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


def test_dry_runs_write_nothing(agent, data, found, tmp_path, capsys):
    assert features.main([*features_arguments(agent, data, tmp_path / "a"), "--dry_run"]) == 0
    assert attribute.main([*attribution_arguments(agent, data, found, tmp_path / "b"),
                             "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "160 observations of 8 episodes" in said and "2 trajectories of 80, 80 steps" in said
    assert features.main([*features_arguments(agent, data, tmp_path / "a"), "--dry_run",
                          "--num_observations", "100000"]) == 0
    assert "frames, fewer than the 100000" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def copied(folder: Path, copy: Path, file: str, **changes) -> Path:
    """A copy of a folder in which a JSON file has other values."""
    shutil.copytree(folder, copy)
    (copy / file).write_text(json.dumps({**json.loads((copy / file).read_text()), **changes}))
    return copy


@pytest.fixture(scope="module")
def damaged(agent, data, found, made, tmp_path_factory) -> dict[str, Path]:
    """Files and folders that do not belong to the agent, its recording or its features."""
    path = tmp_path_factory.mktemp("damaged")
    paths = {name: path / name for name in ("other.pth", "memoryless.pth", "infinite.pth")}
    policy = load_agent(agent)
    with torch.no_grad():
        policy.fc_value.bias += 1
        save_agent(paths["other.pth"], policy)
        for name, parameter in policy.embedder.named_parameters():
            if name.startswith(("block1", "block2")) and name.endswith("weight"):
                parameter.fill_(1e6)
    save_agent(paths["infinite.pth"], policy)
    save_agent(paths["memoryless.pth"], Policy(ImpalaEmbedder(12, (4, 6, 5)), None))
    for name, changes in {
            "swapped": {"swap": {"name": "1_to_2"}}, "units": {}, "again": {},
            "by_memoryless": {"agent_sha256": sha256(paths["memoryless.pth"])},
            "by_infinite": {"agent_sha256": sha256(paths["infinite.pth"])}}.items():
        paths[name] = copied(data, path / name, "recording.json", **changes)
    length = len(np.load(data / "episode_00003" / "ob.npy"))
    np.save(paths["units"] / "episode_00003" / "hx.npy", np.zeros((length + 1, 7), np.float32))
    np.save(paths["again"] / "episode_00003" / "lp.npy",
            np.load(data / "episode_00003" / "lp.npy") - 1)
    for name, changes in {"of_agent": {"agent_sha256": "f" * 64}, "of_layer": {"layer": "relu9"},
                          "moved": {}, "fewer": {}}.items():
        paths[name] = copied(found, path / name, "block3/settings.json", **changes)
    np.save(paths["moved"] / "block3" / "directions.npy", np.full((3, 5), 0.2, np.float32))
    np.save(paths["fewer"] / "block3" / "directions.npy", np.full((3, 4), 0.25, np.float32))
    return {"agent": agent, "data": data, "found": found, "made": made, **paths}


@pytest.mark.parametrize(("script", "changed", "more", "words"), (
    (features, {"agent": "other.pth"}, (), "was recorded with another agent than"),
    (features, {"data": "swapped"}, (), "swapped directions"),
    (features, {"data": "units"}, (), "frames and 7 hidden units, not "),
    (features, {}, ("input",), "the layer 'input' is the frame itself"),
    (features, {"agent": "infinite.pth", "data": "by_infinite"}, ("block3",),
     "activations of the layer block3 are NaN or infinite in row "),
    (attribute, {"agent": "memoryless.pth", "data": "by_memoryless"}, ("--memory_steps", "3"),
     "--memory_steps is for agents with memory"),
    (attribute, {"found": "of_agent"}, (), "of the agent ffffffffffff"),
    (attribute, {"found": "of_layer"}, (), "of the layer relu9"),
    (attribute, {"found": "fewer"}, (), "do not fit each other"),
    (attribute, {"found": "moved", "out": "made"}, (), "are of features with the checksum"),
    (attribute, {"data": "again", "out": "made"}, (), "episode 3 changed"),
    (attribute, {}, ("--layers", "embedder.block1.res1.relu1"), "bypasses the layer"),
    (attribute, {}, ("--episodes", "99"), "without [99]"),
    (attribute, {}, ("--precision", "bfloat16"), "float32")))
def test_refusals_are_one_sentence_and_change_nothing(script, changed, more, words, damaged,
                                                      tmp_path, capsys):
    paths = {name: {**damaged, "out": tmp_path / "out"}[changed.get(name, name)]
             for name in ("agent", "data", "found", "out")}
    before = contents(paths["out"])
    if script is features:
        del paths["found"]
    arguments = features_arguments if script is features else attribution_arguments
    assert script.main(arguments(*paths.values(), *more)) == 2
    message = capsys.readouterr().err
    assert words in message and message.splitlines()[-1].startswith("error: ")
    written = {name for name in contents(paths["out"]).keys() - before.keys()
               if not name.endswith((".lock", "settings.json"))}
    assert not written


@pytest.mark.parametrize("script", (features, attribute))
def test_a_killed_run_resumes_and_ends_with_the_same_files(script, agent, data, found, tmp_path,
                                                           monkeypatch):
    monkeypatch.setattr(features, "FRAMES_PER_PART", 64)

    def run(name):
        if script is features:
            return features.main(features_arguments(agent, data, tmp_path / name, "block3"))
        return attribute.main(attribution_arguments(
            agent, data, found, tmp_path / name, "--layers", "block3", "--num_steps", "6"))

    assert run("whole") == 0
    for call in (4, 6):  # features: behind the parts; attributions: a trajectory, the summary
        with killed_at(ResultStore, "write", call):
            assert run("killed") == 130
        assert not list((tmp_path / "killed").rglob("summary.json"))
        assert list((tmp_path / "killed").rglob("*00000.npz"))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("traj*0.npz")}
    assert run("killed") == 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
