"""record_gen_samples.py: samples equal simulations from the starts that the files name."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from conftest import (
    bytes_of_files,
    golden_projector,
    killed_at,
    read_video,
    refusal,
    tiny_policy,
)

import record_gen_samples
from agents.hooks import patched
from agents.layers import STATE
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.video import mark_reward, mark_terminal
from generative.dataset import RolloutDataset
from generative.networks import LatentSampler, PresetDraw
from generative.sample_files import SampleArrays, SampleFolder
from generative.simulator import stack
from interventions.projector import Swap

MODE = LatentSampler("mode")
NUM_SAMPLES = 7
FIELDS = [field.name for field in dataclasses.fields(SampleArrays)]


@pytest.fixture(scope="module")
def run(simulator_file, agent_path, recording):
    """A function that runs the script and returns its exit status; later flags win."""
    def run_script(save_dir, *more, videos=False):
        return record_gen_samples.main([*map(str, (
            "--agent_file", agent_path, "--model_file", simulator_file,
            "--interpreting_params_name", "tiny", "--data_dir", recording / "data",
            "--data_save_dir", save_dir, "--num_samples", NUM_SAMPLES, "--seed", "5", "--precision",
            "float32", "--device", "cpu", *([] if videos else ["--no_videos"]), *more))])
    return run_script


def swap_flags(matrices, taken, put):
    return ["--batch_size", 2, "--precomputed_analysis_data_path", matrices,
            "--swap_directions_from", *taken, "--swap_directions_to", *put]


TAKEN, PUT = [10, 5], [12, None]  # directions


@pytest.fixture(scope="module")
def by_shards(run, matrices, tmp_path_factory):
    """A folder of samples without and with a swap, recorded by shards, one of which was killed in
    the middle of a batch."""
    save_dir = tmp_path_factory.mktemp("informed")
    with killed_at(SampleFolder, "add", 2):
        assert run(save_dir, *swap_flags(matrices, TAKEN, PUT), "--shard", "2/2") == 130
    for more in ("--shard", "2/2"), ("--shard", "1/2"), ("--join",):
        assert run(save_dir, *swap_flags(matrices, TAKEN, PUT), *more) == 0
    return save_dir


@pytest.fixture(scope="module")
def informed(by_shards):
    return SampleFolder(by_shards / "informed_init")


def assert_same(found, expected):
    """Assert that two samples are equal up to rounding."""
    for field in FIELDS:
        a, b = (getattr(arrays, field).astype(np.float64) for arrays in (found, expected))
        np.testing.assert_allclose(a, b, err_msg=field, atol=1 if field == "frames" else 1e-4)


def first(arrays, number):
    return SampleArrays(*(getattr(arrays, field)[:number] for field in FIELDS))


def assert_simulated(found, simulation):
    """Assert that samples equal a simulation (T, B, …), computed without gradients."""
    images = simulation.images.permute(1, 0, 3, 4, 2).numpy()
    np.testing.assert_allclose(found.frames, images * 255, atol=0.55)
    for field in ("rewards", "terminals", "values", "hidden_states", "log_probs", "env_h"):
        np.testing.assert_allclose(getattr(found, field),
                                   getattr(simulation, field).transpose(0, 1), atol=1e-4)
    np.testing.assert_allclose(found.bottleneck_vec, simulation.start.bottleneck_vec, atol=1e-4)
    np.testing.assert_array_equal(found.actions, simulation.actions.argmax(dim=-1).T)


# Starts

def test_files_have_the_published_layout(informed):
    sizes = {"ims": (4, 64, 64, 3), "rews": (4,), "dones": (4,), "agent_values": (4,),
             "agent_hs": (4, 64), "agent_logprobs": (4, 15), "env_hs": (4, 48),
             "bottleneck_vec": (16,), "actions": (4,)}
    types = {"ims": np.uint8, "actions": np.int64}
    assert {path.name for path in informed.path.iterdir()} == {
        "recording.json", *(f"sample_{number:05d}" for number in range(NUM_SAMPLES))}
    assert informed.description()["interpreting_params_name"] == "tiny"
    folder = informed.sample_folder(3)
    assert {path.name for path in folder.iterdir()} == {
        "origin.json", *(f"{name}.npy" for name in sizes)}
    for name, size in sizes.items():
        array = np.load(folder / f"{name}.npy", allow_pickle=False)
        assert array.shape == size and array.dtype == types.get(name, np.float32), name


@torch.no_grad()
def test_samples_are_what_the_simulator_does_from_their_windows(informed, simulator, recording):
    dataset = RolloutDataset(recording / "data", 3, 4)
    samples = informed.stacked()
    origins = [informed.origin(number) for number in range(NUM_SAMPLES)]
    assert len({origin.window for origin in origins}) == NUM_SAMPLES
    frames = dataset.batch([origin.window for origin in origins]).frames[:3]
    start = simulator.start_from(simulator.encode(frames.to(torch.float32) / 255), MODE)
    assert_simulated(samples, stack(start, simulator.imagine(start, MODE, 4)))
    assert len(np.unique(samples.actions)) > 2  # the agent takes different actions
    assert samples.hidden_states.std(axis=0).mean() > 0.01  # its states differ
    for origin, shown in zip(origins, frames[-1]):
        episode = RolloutFolder(recording / "data").episode(origin.episode)
        np.testing.assert_array_equal(episode.frames[origin.frame], shown.permute(1, 2, 0))


def test_a_sample_depends_on_seed_and_number_alone(informed, run, tmp_path):
    assert run(tmp_path, "--num_samples", 3, "--batch_size", 1) == 0
    folder = SampleFolder(tmp_path / "informed_init")
    assert_same(folder.stacked(), first(informed.stacked(), 3))
    assert run(tmp_path, "--batch_size", 2) == 0  # continues
    assert_same(folder.stacked(), informed.stacked())
    assert [folder.origin(number) for number in range(NUM_SAMPLES)] == [
        informed.origin(number) for number in range(NUM_SAMPLES)]
    assert run(tmp_path / "other", "--seed", 6, "--num_samples", 3) == 0
    other = SampleFolder(tmp_path / "other" / "informed_init")
    assert {other.origin(number).window for number in range(3)} != {
        informed.origin(number).window for number in range(3)}


def test_drawn_latents_follow_the_seed_whatever_the_batch(run, tmp_path):
    runs = {}
    for name, more in (("a", ["--batch_size", 3]), ("b", ["--batch_size", 1, "--num_samples", 4]),
                       ("c", ["--seed", 6])):
        assert run(tmp_path / name, "--recording_rand_init", "--sample_latents", *more) == 0
        runs[name] = SampleFolder(tmp_path / name / "rand_init").stacked()
    assert_same(first(runs["a"], 4), runs["b"])
    assert np.abs(runs["a"].env_h - runs["c"].env_h).max() > 0.1
    assert run(tmp_path / "modal", "--recording_rand_init") == 0
    modal = SampleFolder(tmp_path / "modal" / "rand_init").stacked()
    np.testing.assert_array_equal(modal.bottleneck_vec, runs["a"].bottleneck_vec)
    assert np.abs(modal.env_h - runs["a"].env_h).max(axis=(1, 2)).min() > 0.01


def test_preset_numbers_draw_each_class_as_often_as_is_probable():
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    logits = probs.log().expand(1000, 2, 5)
    uniform = torch.arange(1000).div(1000).unsqueeze(-1).expand(1000, 2)
    draw = PresetDraw(torch.stack([uniform, uniform.flip(0)]))
    drawn, again = draw(logits), draw(logits)
    torch.testing.assert_close(drawn.mean(dim=(0, 1)), probs, atol=2e-3, rtol=0)
    assert torch.equal(again, drawn.flip(0))
    with pytest.raises(StopIteration):
        draw(logits)


def test_random_starts_lie_on_the_sphere_and_need_no_data(run, simulator, tmp_path):
    assert run(tmp_path, "--recording_rand_init", "--data_dir", tmp_path / "missing") == 0
    folder = SampleFolder(tmp_path / "rand_init")
    vectors = folder.stacked_field("bottleneck_vec")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (vectors @ vectors.T)[~np.eye(NUM_SAMPLES, dtype=bool)].max() < 0.95
    assert folder.origin(2) == dataclasses.replace(folder.origin(2), start=2, window=None,
                                                   episode=None, frame=None, manual_action=None)
    with torch.no_grad():
        start = simulator.start_from(torch.from_numpy(vectors), MODE)
        assert_simulated(folder.stacked(), stack(start, simulator.imagine(start, MODE, 4)))


# Actions

def test_recorded_actions_are_those_that_followed_the_start(informed, run, recording, tmp_path):
    assert run(tmp_path, "--use_recorded_actions", "--num_sim_steps", 6) == 0
    folder = SampleFolder(tmp_path / "recorded_actions")
    samples = folder.stacked()
    np.testing.assert_allclose(samples.bottleneck_vec, informed.stacked_field("bottleneck_vec"),
                               atol=1e-6)
    for number in range(NUM_SAMPLES):
        origin = folder.origin(number)
        assert origin == informed.origin(number)
        taken = RolloutFolder(recording / "data").steps(origin.episode)["action"]
        taken = dict(enumerate(taken))  # outside the episode: 0
        assert samples.actions[number].tolist() == [
            taken.get(frame, 0) for frame in range(origin.frame - 1, origin.frame + 5)]


def test_each_of_the_nine_actions_is_forced_from_the_same_start(run, simulator, tmp_path):
    assert run(tmp_path, "--manual_action", "pattern", "--num_samples", 2, "--batch_size", 4) == 0
    folder = SampleFolder(tmp_path / "manual_actions")
    samples = folder.stacked()
    assert samples.actions.tolist() == [[action] * 5 for _ in range(2) for action in range(9)]
    for number in range(18):
        origin = folder.origin(number)
        assert (origin.start, origin.manual_action) == (number // 9, ACTION_NAMES[number % 9])
        assert origin.window == folder.origin(9 * origin.start).window
    for start in range(2):
        vectors = samples.bottleneck_vec[9 * start:9 * start + 9]
        assert np.abs(vectors - vectors[0]).max() < 1e-6
    with torch.no_grad():
        start = simulator.start_from(torch.from_numpy(samples.bottleneck_vec), MODE)
        forced = torch.arange(9).repeat(5, 2)
        assert_simulated(samples, stack(start, simulator.imagine(
            start, MODE, 5, true_actions=forced)))
    assert run(tmp_path / "two", "--manual_action", "upright", "left") == 0
    two = SampleFolder(tmp_path / "two" / "manual_actions")
    assert two.origin(3) == folder.origin(10) and two.origin(2) == folder.origin(17)
    assert_same(two.stacked([2, 3]), folder.stacked([17, 10]))


# Videos

@pytest.mark.parametrize(("mark", "values", "colour", "corner"), [
    (mark_terminal, (0, 0.5, 1), 2, np.s_[:20, :20]),
    (mark_reward, (0, 5, 10), 1, np.s_[:20, 100:]),
    (mark_reward, (0, -5, -10), 0, np.s_[:20, 100:])])
def test_boxes_are_filled_as_far_as_the_prediction_goes(mark, values, colour, corner):
    shares = []
    for value in values:
        inside = mark(np.full((120, 120, 3), 77, np.uint8), value)[corner][2:-2, 2:-2]
        filled = ~(inside == 255).all(axis=-1)
        assert filled.all(axis=1).tolist() == sorted(filled.any(axis=1))  # filled from below
        assert (inside[filled].argmax(axis=1) == colour).all()
        shares.append(filled.mean())
    assert shares == [0, 0.5, 1]


def test_videos_show_the_sample(run, tmp_path):
    assert run(tmp_path, "--manual_action", "pattern", "--num_samples", 1, videos=True) == 0
    folder = SampleFolder(tmp_path / "manual_actions")
    assert {path.name for path in folder.file_of("video", 0).parent.iterdir()} == {
        "start_00000.mp4", *(f"sample_{number:05d}.mp4" for number in range(9))}
    grid, right = (read_video(folder.file_of(*key)) for key in (("start_video", 0), ("video", 7)))
    assert grid.shape == (5, 576, 576, 3) and right.shape == (5, 192, 192, 3)
    inner = np.s_[..., 40:140, 50:140, :]  # next to the marks
    pictures = folder.stacked().frames.repeat(3, axis=2).repeat(3, axis=3)[inner]
    for shown in (right, grid[:, 192:384, 384:]):
        likeness = [np.corrcoef(shown[inner].ravel(), picture.ravel())[0, 1]
                    for picture in pictures]
        assert np.argmax(likeness) == 7 and max(likeness) > 0.7


# Swaps

def test_one_run_and_killed_shards_record_the_same_pair_from_the_same_starts(
        by_shards, run, simulator, matrices, tmp_path):
    assert run(tmp_path, *swap_flags(matrices, TAKEN, PUT)) == 0
    assert bytes_of_files(tmp_path) == bytes_of_files(by_shards)
    name = "informed_init_swapped_10_5_to_12_None"
    plain, swapped = SampleFolder(tmp_path / "informed_init"), SampleFolder(tmp_path / name)
    assert plain.description()["swap"] is None
    assert swapped.description()["swap"]["unaltered"] == "informed_init"
    without, altered = plain.stacked(), swapped.stacked()
    np.testing.assert_array_equal(without.bottleneck_vec, altered.bottleneck_vec)

    projector = golden_projector()
    with torch.no_grad():
        start = simulator.start_from(torch.from_numpy(altered.bottleneck_vec), MODE)
        swap = Swap(STATE, pairs=tuple(zip(TAKEN, PUT)), directions=projector)
        with patched(simulator.agent.policy, [swap]):
            expected = stack(start, simulator.imagine(start, MODE, 4))
    assert_simulated(altered, expected)
    # In the first step the agent sees the same frame, so the change of its state can be compared.
    np.testing.assert_array_equal(without.frames[:, 0], altered.frames[:, 0])
    before, after = (projector.change(torch.from_numpy(arrays.hidden_states[:, 0])
                                      - start.agent_hidden, "ica") for arrays in (without, altered))
    moved = before.clone()
    moved[:, 12] += before[:, 10]
    moved[:, [10, 5]] = 0
    torch.testing.assert_close(after, moved, atol=1e-3, rtol=1e-3)
    assert (before - moved).abs().max() > 0.1


def test_swap_is_not_rounded_to_bfloat16():
    policy, inputs = tiny_policy(), torch.rand(5, 64, generator=torch.Generator().manual_seed(0))
    swap = Swap(STATE, pairs=[(10, 10)], directions=golden_projector())  # moves nothing
    states = []
    for patches in ([], [swap]):
        with patched(policy, patches), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            states.append(policy.step(inputs, inputs).hidden_states)
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)


# Mistakes

def test_samples_with_other_settings_are_refused_by_name(informed, run, capsys):
    for more, words in ((["--num_sim_steps", 3], "another number of steps"),
                        (["--sample_latents"], "another sample_latents")):
        assert words in refusal(lambda argv: run(informed.path.parent, *argv), more, capsys)


@pytest.mark.parametrize(("more", "words"), [
    (["--manual_action", "lef"], "unknown --manual_action 'lef'"),
    (["--swap_directions_from", "1", "2", "--swap_directions_to", "3"],
     "2 directions to swap from, but 1 to swap to"),
    (["--swap_directions_from", "16", "--swap_directions_to", "3"], "no ica direction 16"),
    (["--num_samples", "99999"], "windows to start from, fewer than the 99999"),
    (["--use_recorded_actions", "--manual_action", "up"], "exclude each other")])
def test_mistakes_are_one_sentence_and_leave_nothing(run, matrices, tmp_path, capsys, more, words):
    argv = "--precomputed_analysis_data_path", matrices, *more
    assert words in refusal(lambda argv: run(tmp_path / "s", *argv), argv, capsys)
    assert not (tmp_path / "s").exists()


def test_published_samples_say_nothing_of_actions(informed, tmp_path):
    shutil.copytree(informed.path, tmp_path / "copy")
    folder = SampleFolder(tmp_path / "copy")
    (folder.sample_folder(1) / "actions.npy").unlink()
    (folder.sample_folder(1) / "origin.json").unlink()
    assert folder.sample(1).actions.tolist() == [-1] * 4
    assert folder.stacked_field("actions")[0].min() >= 0
    with pytest.raises(UserError, match=r"no file .*origin\.json"):
        folder.origin(1)
