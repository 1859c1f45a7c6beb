"""saliency_experiments.py: copies, maps and files; test_simulator.py tests golden gradients."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import FLOAT32, golden_projector, killed_at, read_video, refusal, save_projector
from PIL import Image

import record_gen_samples
import saliency_experiments
from common.parameters import ParameterSet
from generative.config import SaliencyConfig
from generative.networks import LatentSampler, on_unit_sphere
from generative.saliency.files import SaliencyArrays, SaliencyFolder
from generative.saliency.gradients import (
    FRAME_SHARE,
    WITHOUT_ENV_GRADS,
    SaliencyFunction,
    SaliencyPass,
    coloured,
    full_colour,
    saliency_functions,
    saliency_maps,
    smoothgrad_starts,
    specificity,
)
from generative.sample_files import SampleFolder
from generative.simulator import stack

MODE = LatentSampler("mode")
NUM_SAMPLES, NUM_STEPS, NUM_COPIES = 6, 4, 3  # from the set `tiny`
COMMON, SCALE = 2, 0.05  # common timestep and perturbation scale of `tiny`
NAMES = ["value", "action", "hx_direction_0_ica", "hx_direction_1_ica"]
FIELDS = [field.name for field in dataclasses.fields(SaliencyArrays)]
GRADIENTS = FIELDS[:3]


@pytest.fixture(scope="module")
def recorded(simulator_file, agent_path, tmp_path_factory):
    """A folder of samples that no test may change."""
    folder = tmp_path_factory.mktemp("samples")
    assert record_gen_samples.main([*map(str, (
        "--agent_file", agent_path, "--model_file", simulator_file, "--interpreting_params_name",
        "tiny", "--data_save_dir", folder, "--num_samples", NUM_SAMPLES, "--recording_rand_init",
        "--seed", 5, "--precision", "float32", "--device", "cpu", "--no_videos"))]) == 0
    return folder / "rand_init"


@pytest.fixture
def samples(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "informed_init")
    return tmp_path / "informed_init"


@pytest.fixture
def run(simulator_file, agent_path, matrices, tmp_path):
    """A function that runs the script and returns its exit status; later flags win."""
    def run_script(samples, *more, videos=False):
        return saliency_experiments.main([*map(str, (
            "--agent_file", agent_path, "--model_file", simulator_file,
            "--interpreting_params_name", "tiny", "--samples_dir", samples,
            "--precomputed_analysis_data_path", matrices, "--difference_demo_dir",
            tmp_path / "demo", "--difference_demo_sample_ids", "0", "to", "0", "--seed", 5,
            "--device", "cpu", *([] if videos else ["--no_videos"]), *more))])
    return run_script


def vectors(num, seed=0):
    return on_unit_sphere(torch.randn(num, 16, generator=torch.Generator().manual_seed(seed)))


def one_pass(simulator, copies, names):
    functions = saliency_functions(names, [], "ica")
    found = SaliencyPass(simulator, FLOAT32, copies, functions, [COMMON], NUM_STEPS,
                         coordinates=golden_projector().coordinates)
    return [found.gradients(function) for function in functions]


def relative_difference(found, expected):
    """Return the norm of the difference, relative to that of `expected`, which must not be 0."""
    assert found.shape == expected.shape and expected.norm() > 0
    return float((found - expected).norm() / expected.norm())


def assert_close(pairs):
    """Assert that pairs of gradients are equal up to rounding, which depends on batch size and
    processor. In few of them, it may switch a ReLU and cause a larger difference."""
    found = [relative_difference(*pair) for pair in pairs]
    assert np.quantile(found, 0.5, method="lower") < 1e-5 and max(found) < 0.01, found


# Gradients

def test_samples_that_share_a_pass_do_not_mix(simulator):
    copies = vectors(6).unflatten(0, (2, 3))
    both = one_pass(simulator, copies, NAMES)
    assert_close([
        (getattr(gradients, field)[row], getattr(alone, field)[0]) for row in range(2)
        for gradients, alone in zip(both, one_pass(simulator, copies[row:row + 1], NAMES))
        for field in GRADIENTS])


def test_copies_are_moved_a_little_and_depend_on_seed_and_number_alone():
    (vector,) = vectors(1)
    copies = smoothgrad_starts(vector, 500, 0.01, 5, 33)
    torch.testing.assert_close(copies.norm(dim=1), torch.ones(500))
    torch.testing.assert_close(copies[0], vector)
    assert abs((copies[1:] - vector).std() - 0.01) < 0.0005
    assert torch.equal(smoothgrad_starts(vector, 3, 0.01, 5, 33), copies[:3])
    assert torch.equal(smoothgrad_starts(vector, 1, 0.01, 5, 33), copies[:1])
    for seed, number in ((6, 33), (5, 34)):
        other = smoothgrad_starts(vector, 3, 0.01, seed, number)
        assert (other[1:] - copies[1:3]).abs().min() > 0
    # Noisy copies are not normalised: the noise per dimension does not depend on their number.
    (long,) = on_unit_sphere(torch.ones(1, 400))
    assert abs((smoothgrad_starts(long, 9, 1e-3, 0, 0)[1:] - long).std() - 1e-3) < 1e-4


def test_names_of_functions():
    names = [function.name for function in saliency_functions(
        ["hx_direction", "hx_direction_3", "hx_direction_7_pca", "value", "value"], [3, 1], "ica")]
    assert names == ["hx_direction_3_ica", "hx_direction_1_ica", "hx_direction_7_pca", "value"]
    published = ParameterSet("defaults").get(SaliencyConfig)
    functions = saliency_functions(published.func_type, published.ids("direction_ids"), "ica")
    assert len(functions) == 18 and functions[-1] == SaliencyFunction("hx_direction", 15, "ica")


# Images

def test_blue_raises_red_lowers_and_nothing_shows_the_faint_frame():
    maps = np.zeros((2, 8, 8), np.float32)
    maps[0, :3], maps[0, 5:], maps[1, 0] = 2, -2, 1
    frames = np.full((2, 8, 8, 3), 100, np.uint8)
    picture = coloured(maps, frames, full_colour(maps)).astype(int)
    red, green, blue = picture[0, 0, 0], picture[0, 4, 4], picture[0, 7, 7]
    assert red[2] > red[0] + 150 and blue[0] > blue[2] + 150  # positive blue, negative red
    assert (green == round(255 - FRAME_SHARE * 155)).all()
    half = picture[1, 0, 0]  # half the saliency has half the colour, at any step
    assert np.abs(half - (red + green) / 2).max() <= 1
    assert full_colour(0 * maps) == 1 and (coloured(0 * maps, frames, 1.0) == green).all()


def test_full_colour_is_reached_by_few_pixels_of_the_steps_that_count():
    maps = np.zeros((10, 20, 20), np.float32)
    maps[3] = np.linspace(-1, 1, 400).reshape(20, 20)
    assert 0.98 < full_colour(maps) < 1
    assert full_colour(maps, 3 * maps) > 2.5  # over both maps


def test_maps_are_channel_sums_smoothed_as_a_gaussian_does():
    gradients = np.zeros((1, 3, 20, 20), np.float32)
    gradients[0, :, 10, 12] = 1, 2, -5
    (smooth,) = saliency_maps(gradients, 5, 1.5)
    assert smooth.sum() == pytest.approx(-2, rel=1e-5)
    assert np.argwhere(smooth).min(axis=0).tolist() == [8, 10]
    assert np.argwhere(smooth).max(axis=0).tolist() == [12, 14]
    assert smooth[10, 12] / smooth[11, 12] == pytest.approx(np.exp(1 / 2 / 1.5**2), rel=1e-4)
    assert smooth[10, 12] / smooth[10, 14] == pytest.approx(np.exp(4 / 2 / 1.5**2), rel=1e-4)
    np.testing.assert_allclose(saliency_maps(np.ones_like(gradients), 5, 5.0), 3, rtol=1e-5)
    border = np.zeros_like(gradients)
    border[0, 0, 1, 12] = 1  # the border reflects row 1 but does not repeat row 0
    (smooth,) = saliency_maps(border, 5, 1.5)
    expected = 2 * np.exp(-1 / 2 / 1.5**2) / (1 + np.exp(-4 / 2 / 1.5**2))
    assert smooth[0, 12] / smooth[1, 12] == pytest.approx(expected, rel=1e-4)


# Files

def test_files_of_killed_shards_hold_the_gradients_of_the_samples(run, samples, simulator):
    untouched = {path: path.read_bytes() for path in samples.rglob("*.npy")}
    argv = samples, "--sample_ids", 1, 4, "--batch_size", 1
    with killed_at(SaliencyFolder, "add", 2):
        assert run(*argv, "--shard", "2/2") == 130
    for more in ("--shard", "2/2"), ("--shard", "1/2"), ("--join",):
        assert run(*argv, *more) == 0
    folder, source = SaliencyFolder(samples), SampleFolder(samples)
    assert all(path.read_bytes() == content for path, content in untouched.items())
    sizes = {"images": (4, 3, 64, 64), "hidden_states": (4, 64), "env_h": (4, 48),
             "processed": (4, 64, 64, 3)}
    for number in (1, 4):
        new = {path.name for path in source.sample_folder(number).iterdir()} - {
            path.name for path in source.sample_folder(0).iterdir()}
        assert new == {text for name in NAMES for text in (
            *(f"grad_{kind}_{name}.npy" for kind in ("ims", "hx", "env_h", "processed_ims")),
            f"saliency_{name}.json")} | {"specificity.json"}
        sample = source.sample(number)
        copies = smoothgrad_starts(torch.from_numpy(sample.bottleneck_vec), NUM_COPIES, SCALE, 5,
                                  number)
        for name, expected in zip(NAMES, one_pass(simulator, copies[None], NAMES)):
            found = folder.saliency(number, name)
            for field, size in sizes.items():
                assert getattr(found, field).shape == size
            assert found.processed_states is None  # vector states have no positions
            assert_close([(torch.from_numpy(getattr(found, field)), getattr(expected, field)[0])
                          for field in GRADIENTS])
            maps = saliency_maps(found.images, 5, 5.0)
            np.testing.assert_array_equal(found.processed, coloured(maps, sample.frames,
                                                                    full_colour(maps)))
            description = folder.description(number, name)
            assert (description["function"], description["precision"]) == (name, "float32")
            assert description["common_timesteps"] == [COMMON]
            assert bool(description["matrices_sha256"]) == name.startswith("hx_direction")
        specific = folder.read("specificity", number, "")
        assert sorted(specific.functions) == sorted(NAMES)
        for step, correlation in enumerate(specific.correlations):
            pixels = [folder.saliency(number, name).images[step].ravel() for name in NAMES]
            if step > COMMON:  # after the step at which functions are evaluated
                assert correlation is None and not np.any(pixels)
            else:
                assert correlation == pytest.approx(np.mean([
                    abs(np.corrcoef(*pair)[0, 1]) for pair in itertools.combinations(pixels, 2)]),
                    rel=1e-4)
    stacked = folder.stacked_field("env_h", "value", [4, 1])
    np.testing.assert_array_equal(stacked[1], folder.saliency(1, "value").env_h)


def test_specificity_is_one_for_one_map_and_small_for_many():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(1, 2, 3, 16, 16))
    np.testing.assert_allclose(specificity(one * np.array([1, -2, 0.1])[:, None, None, None, None]
                                           + 0.5), 1)
    others = rng.normal(size=(5, 2, 3, 16, 16))
    assert (specificity(others) < 0.06).all()
    others[:, 1] = 0  # a step on which nothing depends
    others[0, 0] = 0  # and a function that depends on nothing
    found = specificity(others)
    assert found[0] < 0.06 and np.isnan(found[1])
    assert found[0] == pytest.approx(specificity(others[1:])[0])


def test_mean_of_samples_is_a_sample_of_its_own(run, samples, simulator):
    assert run(samples, "--combine_samples_not_iterate", "--sample_ids", 1, 5, 3) == 0
    path = samples.parent / "informed_init_mean_of_1_5_3"
    vectors_used = SampleFolder(samples).stacked_field("bottleneck_vec", [1, 3, 5])
    mean = vectors_used.mean(axis=0)
    sample = SampleFolder(path).sample(0)
    np.testing.assert_allclose(sample.bottleneck_vec, mean / np.linalg.norm(mean), atol=1e-6)
    with torch.no_grad():
        start = simulator.start_from(torch.from_numpy(sample.bottleneck_vec)[None], MODE)
        simulation = stack(start, simulator.imagine(start, MODE, NUM_STEPS))
    np.testing.assert_allclose(sample.values, simulation.values[:, 0], atol=1e-4)
    assert SampleFolder(path).numbers() == [0]
    copies = smoothgrad_starts(torch.from_numpy(sample.bottleneck_vec), NUM_COPIES, SCALE, 5, 0)
    for name, expected in zip(NAMES, one_pass(simulator, copies[None], NAMES)):
        found = SaliencyFolder(path).saliency(0, name)
        assert_close([(torch.from_numpy(found.images), expected.images[0])])
    assert not list(samples.rglob("grad_*"))


def test_videos_show_frame_and_saliency(run, samples):
    assert run(samples, "--sample_ids", 3, "--saliency_func_type", "value", videos=True) == 0
    folder = SaliencyFolder(samples)
    frames = read_video(folder.video_file(3, "value"))[:, -256:]  # below the titles
    assert frames.shape == (COMMON + 1, 256, 512, 3)  # later maps are empty
    sample, saliency = folder.samples.sample(3), folder.saliency(3, "value")
    inner = np.s_[:, :200, 60:250]  # next to the arrow
    for shown, pictures in ((frames[:, :, :256], sample.frames),
                            (frames[:, :, 256:], saliency.processed)):
        large = pictures[:COMMON + 1].repeat(4, axis=1).repeat(4, axis=2)
        assert np.corrcoef(shown[inner].ravel(), large[inner].ravel())[0, 1] > 0.7


def test_demonstration_shows_frame_with_without_and_difference(run, samples, tmp_path):
    few = ("--sample_ids", "0", "to", "3", "--saliency_func_type", "value")
    assert run(samples, *few, "--without_env_grads") == 0
    for more in ("--shard", "1/2"), ("--shard", "2/2"), ("--join",):
        assert run(samples, *few, "--difference_demo_sample_ids", "1", "to", "9", *more) == 0
    demo = SaliencyFolder(tmp_path / "demo")
    assert {path.name for path in demo.samples.path.iterdir()} == {"sample_00001", "sample_00002"}
    plain, without = (demo.saliency(1, "value" + ending) for ending in ("", WITHOUT_ENV_GRADS))
    for found, ending in ((plain, ""), (without, WITHOUT_ENV_GRADS)):
        in_sample = SaliencyFolder(samples).saliency(1, "value" + ending)
        assert_close([(torch.from_numpy(found.images), torch.from_numpy(in_sample.images))])
    assert np.abs(plain.images - without.images).max() > 0.01 * np.abs(plain.images).max()
    maps = saliency_maps(plain.images, 5, 5.0), saliency_maps(without.images, 5, 5.0)
    sample, full = SampleFolder(samples).sample(1), full_colour(*maps)
    expected = (plain.processed, without.processed, coloured(maps[0] - maps[1], sample.frames,
                                                             full))
    for step in range(NUM_STEPS):
        picture = np.asarray(Image.open(demo.file_of("difference", 1, step)))[-256:]
        for column, shown in enumerate(expected, 1):
            np.testing.assert_array_equal(picture[::4, 256 * column:256 * column + 256:4],
                                          shown[step])
    np.testing.assert_array_equal(coloured(maps[1], sample.frames, full), without.processed)


def test_saliency_of_other_settings_is_refused_unless_overwritten(run, samples, capsys):
    few = ("--sample_ids", 0, "--saliency_func_type", "value")
    assert run(samples, *few) == 0
    before = SaliencyFolder(samples).saliency(0, "value")
    for more, words in ((["--seed", 6], "another seed"),
                        (["--common_timesteps", 1], "another common_timesteps")):
        assert words in refusal(lambda argv: run(samples, *argv), [*few, *more], capsys)
    assert run(samples, *few, "--common_timesteps", 1, "--overwrite") == 0
    after = SaliencyFolder(samples).saliency(0, "value")
    assert before.images[COMMON].any() and not after.images[COMMON].any()


# Mistakes

@pytest.mark.parametrize(("more", "words"), [
    (["--saliency_func_type", "valu"], "(did you mean 'value'?)"),
    (["--direction_ids", "16"], "no ica direction 16: they are numbered 0 to 15"),
    (["--sample_ids", "5", "6", "9"],
     "no sample 6, one of 2 missing; its 6 samples have numbers from 0 to 5"),
    (["--common_timesteps", "4"], "has 4 steps, too few for step 4 of common_timesteps"),
    (["--combine_samples_not_iterate", "--shard", "1/2"], "leave one of them out")])
def test_mistakes_are_one_sentence_and_leave_nothing(run, samples, capsys, more, words):
    before = sorted(samples.parent.rglob("*"))
    assert words in refusal(lambda argv: run(samples, *argv), more, capsys)
    assert sorted(samples.parent.rglob("*")) == before


def test_samples_of_another_simulator_are_refused_and_published_ones_are_not(run, samples, capsys):
    few = ("--sample_ids", 0, "--saliency_func_type", "value")
    description = json.loads((samples / "recording.json").read_text())
    for key, flag in (("model_sha256", "--model_file"), ("agent_sha256", "--agent_file")):
        (samples / "recording.json").write_text(json.dumps({**description, key: "0" * 64}))
        assert f"were recorded with another {flag}" in refusal(
            lambda argv: run(samples, *argv), few, capsys)
    (samples / "recording.json").unlink()
    assert run(samples, *few) == 0


def test_samples_with_other_actions_are_pointed_out(run, samples, capsys):
    few = ("--sample_ids", 0, 1, "--saliency_func_type", "value")
    assert run(samples, *few) == 0
    assert "do not lead to the recorded frames" not in capsys.readouterr().out
    for number in (0, 1):
        file = SampleFolder(samples).sample_folder(number) / "ims.npy"
        np.save(file, 255 - np.load(file))
    assert run(samples, *few, "--overwrite") == 0
    assert "in 2 samples, such as sample 0, the agent's own actions do not lead to" in (
        capsys.readouterr().out)


def test_a_gradient_that_is_not_finite_is_named_and_not_stored(run, samples, tmp_path, capsys):
    projector = golden_projector()
    save_projector(tmp_path / "m", dataclasses.replace(projector, std=projector.std * 1e-40))
    argv = ("--saliency_func_type", "hx_direction_0_ica", "--precomputed_analysis_data_path",
            tmp_path / "m")
    assert "in sample 0 holds NaN" in refusal(lambda argv: run(samples, *argv), argv, capsys)
    assert not list(samples.glob("sample_*/*saliency*"))
