"""Counterfactual maps of samples, with the shipped simulator and the real game."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from conftest import SHIPPED, SHIPPED_AGENT, SHIPPED_SIMULATOR, refusal
from PIL import Image
from torch.nn import functional

import record_gen_samples
import saliency_experiments
from analysis.panel_contents import _saliency_type
from generative.counterfactual import blocks_of_cells, variance_shares
from generative.filling import fill, initial_images, squares_of_cells
from generative.networks import LatentSampler
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import END, SaliencyFunction
from generative.spatial import split_state
from generative.start_worlds import world_seeds
from pipeline.report_contents import write_saliency_strips
from pipeline.summaries import fillings

MODE = LatentSampler("mode")
LAST, FILLINGS, BLOCK, SEED = 5, 2, 4, 3  # block: the lower right quarter of the view
PLACE = 3


@pytest.fixture(scope="module")
def simulator(shipped_simulator):
    return shipped_simulator


@pytest.fixture(scope="module")
def samples(hard_recording, tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    assert record_gen_samples.main([*map(str, (
        *SHIPPED, "--data_dir", hard_recording.path,
        "--data_save_dir", folder, "--num_samples", 3, "--num_sim_steps", LAST + 2, "--seed", 1,
        "--precision", "float32", "--device", "cpu", "--no_videos"))]) == 0
    return folder / "informed_init"


def arguments(samples, *more, model=SHIPPED_SIMULATOR):
    return [*map(str, (
        "--agent_file", SHIPPED_AGENT, "--model_file", model, "--samples_dir", samples,
        "--sample_ids", "0", "2", "--common_timesteps", LAST, "--seed", SEED, "--device", "cpu",
        "--no_videos",
        "--difference_demo_sample_ids", "0 to 0", "--batch_size", 2, *more))]


COUNTERFACTUAL = ("--counterfactual", "--num_fillings", FILLINGS, "--block_size", BLOCK,
                  "--saliency_func_type", "value", "action", "end")


@pytest.fixture(scope="module")
def folder(samples, tmp_path_factory):
    copy = shutil.copytree(samples, tmp_path_factory.mktemp("maps") / "informed_init")
    # Not the agent's own actions.
    np.save(copy / "sample_00002" / "actions.npy", np.array([4, 7, 0, 5, 1, 8, 2]))
    assert saliency_experiments.main(arguments(copy, *COUNTERFACTUAL)) == 0
    return SaliencyFolder(copy)


def test_effects_are_those_of_single_simulations(folder, simulator):
    """One filling of one block of the second sample, step by step with the public functions."""
    sample, world = folder.samples.sample(2), folder.samples.worlds([2])
    vector = torch.from_numpy(sample.bottleneck_vec)[None]
    actions = torch.from_numpy(sample.actions)[:, None]
    cells = torch.zeros(1, 8, 8, dtype=torch.bool)
    cells[:, 4:, 4:] = True
    with torch.no_grad():
        start = simulator.start_from(vector, MODE, world=world)
        before = simulator.imagine(start, MODE, LAST + 1, true_actions=actions)
        images = initial_images(simulator, before[0].images, start)
        hole = squares_of_cells(simulator, world, cells)
        stored = {name: folder.read("effects", 2, f"{name}_counterfactual")
                  for name in ("value", "end")}
        assert stored["value"].shape == (LAST + 1, 4, FILLINGS)
        for number in range(FILLINGS):
            seeds = world_seeds([(SEED, 2, 2, PLACE, number)])
            new, filled = fill(simulator, images, vector, world, hole, seeds)
            camera = split_state(start.env_h, simulator.config).camera
            own = split_state(simulator.start_from(new, MODE, world=filled).env_h,
                              simulator.config)
            after = simulator.imagine(dataclasses.replace(
                start, env_h=dataclasses.replace(own, camera=camera).flat(), world=filled), MODE,
                LAST + 1, true_actions=actions)
            for step in (0, LAST):
                for name, of_step in (("value", lambda one: one.values),
                                      ("end", lambda one: one.terminal_logits.sigmoid())):
                    expected = float(of_step(after[step]) - of_step(before[step]))
                    assert stored[name][step, PLACE, number] == pytest.approx(expected, abs=3e-5)
    assert np.abs(stored["value"]).max() > 0.01


def test_maps_show_blocks_where_they_are_in_the_level(folder, simulator):
    effects = folder.read("effects", 0, "value_counterfactual")
    maps = folder.read("images", 0, "value_counterfactual").sum(axis=1)
    assert maps.shape == (LAST + 2, 64, 64) and not maps[LAST + 1].any()
    blocks = -effects.mean(axis=2).reshape(-1, 2, 2)
    np.testing.assert_allclose(maps[0], np.kron(blocks[0], np.ones((32, 32))), atol=1e-5)
    state = split_state(torch.from_numpy(folder.samples.sample(0).env_h),
                        simulator.config)
    right, down = state.camera.displacement[LAST].round().int().tolist()
    assert abs(right) + abs(down) > 3  # the camera has moved
    for y, x in np.ndindex(2, 2):
        row, column = 32 * y + 16 - down, 32 * x + 16 - right  # middle of the block
        if 0 <= row < 64 and 0 <= column < 64:
            assert maps[LAST, row, column] == pytest.approx(blocks[LAST, y, x], rel=1e-3)


def test_maps_are_written_once_next_to_gradients(folder, samples, tmp_path, capsys):
    copy = shutil.copytree(folder.path, tmp_path / "samples" / "informed_init")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*counterfactual*")}
    assert saliency_experiments.main(arguments(copy, *COUNTERFACTUAL)) == 0
    text = capsys.readouterr().out
    assert "map similarity, counterfactual: the maps of 3 functions" in text
    assert "of the variance in a sample is due to the filling rather than the block" in text
    assert saliency_experiments.main(arguments(
        copy, "--saliency_func_type", "value", "action")) == 0
    assert "num_fillings" not in SaliencyFolder(copy).description(0, "value")  # as before
    assert "with gradients through the environment: the maps of 2 functions" in (
        capsys.readouterr().out)
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*counterfactual*")}
    effects = np.stack([folder.read("effects", number, "value_counterfactual")[LAST]
                        for number in (0, 2)])  # (samples, M, K)
    assert fillings(tmp_path, "samples/informed_init").startswith(
        f"a filled block changes the value by {np.abs(effects.mean(axis=2)).mean():.2g}, and ")
    heights = {}
    for kind, suffix in (("saliency", ""), ("counterfactual", "_counterfactual")):
        write_saliency_strips(tmp_path, tmp_path, kind, suffix)
        heights[kind] = {Image.open(path).height for path in tmp_path.glob(f"{kind}_*.png")}
    [rows], [more_rows] = heights.values()  # frame and 2 functions; frame and 3 functions
    assert more_rows / rows == pytest.approx(4 / 3, abs=0.05)
    error = refusal(saliency_experiments.main, arguments(
        copy, *COUNTERFACTUAL, "--num_fillings", FILLINGS + 1), capsys)
    assert "computed with another num_fillings" in error


@pytest.mark.parametrize(("more", "message"), [
    (("--without_env_grads",), "exclude each other"),
    (("--saliency_func_type", "value_delta"), "there is none of value_delta")])
def test_maps_that_do_not_exist_are_refused(samples, capsys, more, message):
    assert message in refusal(saliency_experiments.main,
                              arguments(samples, *COUNTERFACTUAL, *more), capsys)


def test_the_panel_names_counterfactual_maps():
    titles = [_saliency_type(name, (4,))[1].title for name in (
        "value", "value_counterfactual", "value_without_env_grads")]
    assert titles == ["value", "value, counterfactual", "value, without environment gradients"]


def test_end_is_the_probability_that_the_episode_has_ended(simulator):
    steps = [dataclasses.make_dataclass("Step", ["terminal_logits"])(torch.tensor([x, 0.0]))
             for x in (-1.0, 2.0)]
    torch.testing.assert_close(SaliencyFunction(END)(steps, (0, 1), None), torch.tensor(
        [(1 / (1 + np.e) + 1 / (1 + np.exp(-2))) / 2, 0.5], dtype=torch.float32))


def test_blocks_cover_the_view_once():
    for size in (1, 2, 4, 8):
        blocks = blocks_of_cells(size)
        assert len(blocks) == (8 // size) ** 2 and (blocks.sum(dim=0) == 1).all()
        pooled = functional.avg_pool2d(blocks[:, None].float(), size)
        assert (pooled.flatten(1).max(dim=1).values == 1).all()
    assert blocks_of_cells(2)[1, 0, 2] and blocks_of_cells(2)[4, 2, 0]


def test_shares_of_the_variance_add_up():
    generator = torch.Generator().manual_seed(0)
    of_block = 3 * torch.randn(4000, 1, generator=generator)
    of_filling = torch.randn(4000, 16, generator=generator)
    assert float(variance_shares(of_block + of_filling)) == pytest.approx(0.1, abs=0.01)
    assert float(variance_shares(of_filling)) == pytest.approx(15 / 16, abs=0.01)
    assert float(variance_shares(of_block.expand(-1, 16))) == pytest.approx(0, abs=1e-6)
