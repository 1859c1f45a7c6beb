"""The spatial simulator: camera, state, both passes, training and files."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    FLOAT32,
    ROOT,
    assert_same,
    progress_of,
    read_video,
    record_arguments,
    simulator_settings,
)

import record
import record_gen_samples
import saliency_experiments
from agents.agent_file import load_agent
from common.config import save_settings
from common.errors import UserError
from common.parameters import ParameterSet
from generative import export, fit_camera
from generative.batches import align, true_camera, true_phase
from generative.camera import motion_costs, moved_phase, phase_between, phase_maps, shift
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.fit_camera import CameraTraining
from generative.losses import simulator_losses
from generative.networks import LatentSampler, clamp_image
from generative.published import save_published
from generative.runs import PROGRESS_NAME, open_simulator
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import UNSIGNED, coloured, full_colour, state_maps
from generative.simulator import Simulator, stack
from generative.spatial import split_state
from generative.spatial_layers import PatchBasis, Refinement
from generative.training import SimulatorTraining

TINY = ParameterSet("tiny-spatial")
CONFIG = dataclasses.replace(TINY.get(SimulatorConfig), pixels_per_square=64 / 13)
MODE = LatentSampler("mode")
AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"  # solves levels, so episodes are short
COINRUN = ("--env_name", "coinrun", "--no_videos")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Episodes of CoinRun with the player's positions."""
    logdir = tmp_path_factory.mktemp("positions")
    assert record.main(record_arguments(AGENT, logdir, 6, *COINRUN, "--positions")) == 0
    return logdir / "data"


@pytest.fixture(scope="module")
def dataset(recording):
    return RolloutDataset(recording, CONFIG.num_init_steps, CONFIG.num_sim_steps)


@pytest.fixture(scope="module")
def batch(dataset):
    inside = [number for number in range(5, len(dataset), 9)
              if not dataset[number].terminals.any() and dataset[number].frames[0].any()]
    return align(dataset.batch(inside[:3]), CONFIG)


@pytest.fixture
def simulator(dataset):
    torch.manual_seed(0)
    simulator = Simulator(CONFIG, load_agent(AGENT))
    simulator.basis.fit(dataset.batch(np.arange(0, len(dataset), 7)).frames[2].float() / 255)
    with torch.no_grad():  # move away from the initial values, where many gradients vanish
        for parameter in simulator.trainable_parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return simulator.eval()


def settings_for(recording, **changes):
    return simulator_settings("tiny-spatial", AGENT, recording, **changes)


# The camera

def test_shifting_by_whole_and_half_pixels():
    images = torch.rand(2, 3, 64, 64)
    view, inside = shift(images, torch.tensor([[3.0, -2.0], [0.5, 0.0]]))
    torch.testing.assert_close(view[0, :, 2:, :61], images[0, :, :62, 3:])
    torch.testing.assert_close(view[1, :, :, :63], (images[1, :, :, :63] + images[1, :, :, 1:]) / 2)
    # The border is repeated where the image is unknown.
    torch.testing.assert_close(view[0, :, 2:, 61:], images[0, :, :62, -1:].expand(3, 62, 3))
    assert (inside[0, 0, 2:, :61] == 1).all() and (inside[0, 0, :2] == 0).all()
    assert (inside[0, 0, :, 61:] == 0).all()
    middle, _ = shift(images, torch.zeros(2, 2), 24)
    torch.testing.assert_close(middle, images[:, :, 20:44, 20:44])


def test_the_motion_between_two_frames_is_found():
    torch.manual_seed(0)
    world = torch.nn.functional.avg_pool2d(torch.rand(1, 3, 160, 160), 5, 1, 2)
    frame = world[:, :, 40:104, 40:104]
    for right, down in ((0, 0), (2, -5), (-3, 7)):
        later = world[:, :, 40 + down:104 + down, 40 + right:104 + right].clone()
        later[:, :, 26:38, 27:37] = frame[:, :, 26:38, 27:37]  # the player stays where it is
        lowest = int(motion_costs(frame, later).argmin())
        # A point at x in the first frame appears at x - motion in the next.
        assert (lowest % 7 - 3, lowest // 7 - 8) == (right, down)


def test_recorded_positions_say_how_frames_move(dataset):
    """Frames shifted back by the recorded camera displacement match the first frame better."""
    numbers = np.arange(0, len(dataset), 11)
    batch = align(dataset.batch(numbers), CONFIG)
    camera = true_camera(batch, 64 / 13)
    moved, alive = camera[-1, :, 2:], batch.terminals[-1] == 0
    fast = alive & (moved.abs().amax(dim=1) > 2)
    assert fast.sum() >= 5
    errors = []
    for factor in (1.0, 0.0, -1.0):
        view, inside = shift(batch.images[0, fast], factor * moved[fast])
        error = (view - batch.images[-1, fast]).square() * (inside > 0.99)
        errors.append(float(error.sum() / (inside > 0.99).sum()))
    assert errors[0] < 0.6 * min(errors[1:])
    torch.testing.assert_close(camera[:, :, :2].cumsum(dim=0)[-1] - camera[0, :, :2],
                               camera[-1, :, 2:])


def test_the_phase_follows_the_players_position(batch):
    """Moved by the displacement, the phase and its maps are those of the later position."""
    scale = 64 / 13
    displacement = true_camera(batch, scale)[-1, :, 2:]
    phase = moved_phase(true_phase(batch), displacement, scale)
    later = dataclasses.replace(batch, positions=batch.positions[-2:])
    torch.testing.assert_close(phase, true_phase(later), atol=1e-3, rtol=0)
    maps = phase_maps(true_phase(batch), displacement, scale)
    torch.testing.assert_close(maps[:, 0, 0, 0], phase[:, 0])
    right, down = 8 * 5 / scale, 8 * 3 / scale  # the cell in row 3 and column 5
    position = batch.positions[-1] + torch.tensor([right, -down])
    angles = 2 * np.pi * torch.stack([position[:, 0], -position[:, 1]])  # (2, B)
    expected = [wave(times * angle) for angle in angles for times in (1, 2)
                for wave in (torch.cos, torch.sin)]
    expected += [wave(2 * np.pi * axis) for wave in (torch.cos, torch.sin)
                 for axis in displacement.T]
    torch.testing.assert_close(maps[:, :, 3, 5], torch.stack(expected, dim=1), atol=5e-3, rtol=0)
    assert not phase_maps(phase, displacement, 0.0).any()
    fine = phase_maps(true_phase(batch), displacement, scale, size=32)
    torch.testing.assert_close(fine[:, :, ::4, ::4], maps, atol=1e-4, rtol=0)


def test_the_change_of_phase_is_the_motion_within_a_square(batch):
    scale = 64 / 13
    later = dataclasses.replace(batch, positions=batch.positions[1:])
    turned = phase_between(true_phase(batch), true_phase(later))
    still = torch.tensor([1.0, 0, 1, 0]).expand(len(turned), -1)
    moved = true_camera(batch, scale)[1, :, :2]
    torch.testing.assert_close(turned, moved_phase(still, moved, scale), atol=1e-3, rtol=0)


# The state

def test_all_components_of_a_patch_give_the_image_back():
    images = torch.rand(40, 3, 64, 64)
    basis = PatchBasis(192, 3)
    basis.fit(images)
    torch.testing.assert_close(basis.images(basis.coefficients(images)), images, atol=1e-4, rtol=0)
    coefficients = basis.coefficients(images).transpose(0, 1).flatten(1)  # (K, …)
    torch.testing.assert_close(coefficients.std(dim=1), torch.ones(192), atol=0.02, rtol=0)
    few = PatchBasis(20, 3)
    few.fit(images)
    assert 0 < (few.images(few.coefficients(images)) - images).square().mean() < images.var()


def test_the_state_is_cell_by_cell_with_the_camera_behind(simulator, batch):
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE)
    assert start.env_h.shape == (3, CONFIG.deter_dim)
    state = split_state(start.env_h, CONFIG)
    assert torch.equal(state.flat(), start.env_h)
    channels = CONFIG.canvas_channels + CONFIG.memory_channels + CONFIG.scene_channels
    cell = start.env_h[:, (3 * 8 + 5) * channels:(3 * 8 + 6) * channels]  # row 3, column 5
    expected = torch.cat([state.canvas, state.memory, state.scene], dim=1)[:, :, 3, 5]
    assert torch.equal(cell, expected)
    blocks = start.env_h[:, 64 * channels:].unflatten(1, (-1, CONFIG.fine_channels or 0))[:, :1024]
    assert torch.equal(blocks[:, 20 * 32 + 7], state.fine[:, :, 20, 7])
    assert (state.camera.started == 0).all() and (state.camera.displacement == 0).all()
    later = split_state(simulator.imagine(start, MODE, 3)[2].env_h, CONFIG)
    assert (later.camera.started == 1).all() and (later.camera.displacement != 0).all()
    assert torch.equal(later.canvas, state.canvas) and torch.equal(
        later.camera.phase, state.camera.phase)
    assert not torch.equal(later.scene, state.scene)


def test_the_fine_memory_sees_its_neighbourhood_and_is_drawn_in_place(simulator, batch):
    h = simulator.start_from(simulator.encode(batch.initial_images), MODE).env_h
    state = split_state(h, CONFIG)
    fine = state.fine.clone()
    fine[:, :, 20, 9] += 0.5
    changed = dataclasses.replace(state, fine=fine).flat()
    action = torch.nn.functional.one_hot(batch.actions[0], CONFIG.action_space_size).float()
    z = torch.ones(3, 1, 1)
    with torch.no_grad():
        moved = [split_state(simulator.cell.advance(z, action, each), CONFIG).fine
                 for each in (h, changed)]
        images = [simulator.decoder.refine(torch.zeros(3, 3, 64, 64), torch.zeros(3, 12, 32, 32),
                                           torch.zeros(3, CONFIG.spatial_width, 8, 8), each)
                  for each in (state.fine, fine)]
    reached = torch.nonzero((moved[1] - moved[0]).abs().amax(dim=(0, 1)))
    assert reached.amin(dim=0).tolist() == [15, 4] and reached.amax(dim=0).tolist() == [25, 14]
    drawn = torch.nonzero((images[1] - images[0]).abs().amax(dim=(0, 1)))
    assert drawn.amin(dim=0).tolist() == [34, 12] and drawn.amax(dim=0).tolist() == [47, 25]


def test_the_scene_moves_with_the_level(simulator, batch):
    """The contribution of the scene to the canvas is shifted by the camera's displacement."""
    h = simulator.start_from(simulator.encode(batch.initial_images), MODE).env_h
    state = split_state(h, CONFIG)
    for layer in (simulator.decoder.out, simulator.decoder.refine.layers[-1]):
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)  # only the view of canvas and scene remains
    camera = dataclasses.replace(state.camera,
                                 displacement=torch.tensor([[3.0, -2.0]]).expand(3, 2))
    moved = dataclasses.replace(state, camera=camera)
    other = dataclasses.replace(moved, scene=state.scene.roll(1, dims=0))
    z = torch.ones(3, 1, 1)
    with torch.no_grad():
        here, there, changed = (simulator.decoder(each.flat(), z)[0]
                                for each in (state, moved, other))
    torch.testing.assert_close(there[:, :, 2:, :61], here[:, :, :62, 3:], atol=1e-4, rtol=0)
    assert (there - changed).abs().max() > 1e-3


def test_the_refinement_corrects_each_pixel_where_it_is():
    """With one layer that returns minus the image's channels, the refined image is 0."""
    refine, images = Refinement(3, 16, 2), torch.rand(2, 3, 64, 64)
    layer = torch.nn.Conv2d(34, 12, kernel_size=1, bias=False)
    refine.layers = torch.nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.zero_()[range(12), range(12)] = -1.0
        refined = refine(images, torch.rand(2, 12, 32, 32), torch.rand(2, 16, 8, 8),
                         torch.rand(2, 2, 32, 32))
    assert refined.abs().max() < 1e-6


def test_a_negative_value_is_no_error_where_the_image_is_black(simulator, batch):
    with torch.no_grad():
        simulation = simulator(batch, MODE)
    raw = torch.where(batch.images == 0, -0.5, batch.images)
    assert (raw < 0).any()
    simulation = dataclasses.replace(simulation, raw_images=raw, images=clamp_image(raw))
    assert not simulator_losses(simulation, batch, CONFIG).image.any()


def test_the_agents_loss_does_not_move_clamped_values(simulator, batch):
    simulation = simulator(batch, MODE)
    (gradient,) = torch.autograd.grad(simulation.hidden_states.sum(), simulation.raw_images)
    clamped = (simulation.raw_images < 0) | (simulation.raw_images > 1)
    assert clamped.any() and gradient[~clamped].any() and not gradient[clamped].any()


def test_saliency_with_respect_to_the_state_is_drawn_where_its_cell_is():
    """Memory has the coordinates of the view; canvas and scene move with the level."""
    states = torch.zeros(3, CONFIG.deter_dim)
    split_state(states, CONFIG).camera.displacement[:] = torch.tensor([[0, 0], [5, -3], [0.5, 60]])
    states.requires_grad_()
    state = split_state(states, CONFIG)
    for part in ("memory", "fine", "canvas", "scene"):
        cell = getattr(state, part)[:, :, 2, 7]  # row and column
        (gradient,) = torch.autograd.grad((3 * cell[:, 0] - 4 * cell[:, 1]).sum(), states,
                                          retain_graph=True)
        expected = np.zeros((2, 3, 64, 64))
        if part == "memory":
            expected[1, :, 16:24, 56:] = 5
        elif part == "fine":
            expected[1, :, 4:6, 14:16] = 5
        else:
            expected[0, 0, 16:24, 56:] = expected[0, 1, 19:27, 51:59] = 5  # the third is above
        maps = state_maps(gradient.numpy(), states.detach().numpy(), CONFIG)
        np.testing.assert_allclose(maps, expected, atol=1e-4)


def test_saliency_files_and_videos_draw_the_state(simulator, recording, tmp_path):
    """The video's last two columns show the maps that are computed from the stored arrays."""
    model, samples = tmp_path / "model.pt", tmp_path / "informed_init"
    save_published(model, simulator)
    save_settings(tmp_path, settings_for(recording, simulator=vars(CONFIG)))
    flags = [*map(str, ("--agent_file", AGENT, "--model_file", model, "--precision", "float32",
                        "--interpreting_params_name", "tiny-spatial", "--device", "cpu"))]
    assert record_gen_samples.main([
        *flags, "--data_dir", str(recording), "--data_save_dir", str(tmp_path), "--num_samples",
        "1", "--no_videos"]) == 0
    assert saliency_experiments.main([
        *flags, "--samples_dir", str(samples), "--sample_ids", "0", "--saliency_func_type",
        "value", "--difference_demo_sample_ids", "0", "to", "0"]) == 0
    folder = SaliencyFolder(samples)
    sample, saliency = folder.samples.sample(0), folder.saliency(0, "value")
    maps = state_maps(saliency.env_h, sample.env_h, CONFIG)
    assert all(of_part[0].any() for of_part in maps)
    assert split_state(torch.from_numpy(sample.env_h), CONFIG).camera.displacement.any()
    frames = read_video(folder.video_file(0, "value"))[:, -256:]  # below the titles
    assert frames.shape[2] == 4 * 256
    columns = np.split(frames[:, ::4, 512::4].astype(int), 2, axis=2)
    for part, (of_part, drawn) in enumerate(zip(maps, saliency.processed_states, strict=True)):
        np.testing.assert_array_equal(drawn, coloured(of_part, sample.frames,
                                                      full_colour(of_part), UNSIGNED))
        errors = [np.abs(column - drawn[:len(frames)]).mean() for column in columns]
        assert errors[part] < 0.5 * errors[1 - part], errors


def test_the_first_step_shows_the_last_initial_frame_before_training(dataset):
    """Encoder and start pass on the leading components."""
    config = dataclasses.replace(CONFIG, patch_components=24, canvas_channels=16,
                                 bottleneck_vec_size=17 * 64, deter_dim=64 * 22 + 2 * 1024 + 16)
    torch.manual_seed(1)
    simulator = Simulator(config, load_agent(AGENT)).eval()
    simulator.basis.fit(dataset.batch(np.arange(0, len(dataset), 3)).frames[2].float() / 255)
    batch = align(dataset.batch(np.arange(5, len(dataset), 29)), config)
    with torch.no_grad():
        images = simulator(batch, MODE).images
    errors = (images[0] - batch.initial_images[-1]).square().mean(dim=(1, 2, 3))
    other = (images[0] - batch.initial_images[-1].roll(1, dims=0)).square().mean(dim=(1, 2, 3))
    psnr = float((-10 * errors.log10()).median())
    assert psnr > 20 > float((-10 * other.log10()).median()) + 3


# The two passes

def test_parallel_pass_equals_sequential_pass_with_gradients(simulator, batch):
    def sequential():
        start = simulator.start_from(simulator.encode(batch.initial_images), MODE)
        start = dataclasses.replace(start, agent_hidden=batch.first_hidden)
        return stack(start, simulator.imagine(start, MODE, true_actions=batch.actions,
                                              true_images=batch.images))

    gradients, simulations = [], []
    for simulation in (simulator(batch, MODE), sequential()):
        simulator.zero_grad()
        (simulation.images.square().sum() + simulation.values.sum() + simulation.rewards.sum()
         + simulation.terminals.sum()).backward()
        simulations.append(simulation)
        gradients.append({name: parameter.grad.clone() for name, parameter
                          in simulator.named_parameters() if parameter.grad is not None})
    for field in dataclasses.fields(simulations[0]):
        if field.name not in ("start", "camera"):
            found, expected = (getattr(each, field.name) for each in simulations)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=field.name)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 2e-3 * gradient.norm(), name
    idle = {name for name, parameter in simulator.named_parameters()
            if parameter.requires_grad and name not in gradients[0]}
    assert all(name.startswith(("action_converter", "hidden_converter")) for name in idle)


def test_gradients_reach_every_step_and_flow_through_the_camera(simulator, batch):
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE, detached=False)
    steps = simulator.imagine(start, MODE, 4)
    wanted = [start.bottleneck_vec, *(tensor for step in steps[:3] for tensor in (
        step.actions, step.env_h, step.images, step.hidden_states))]
    gradients = torch.autograd.grad(steps[3].values.sum(), wanted)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    first = split_state(gradients[2], CONFIG).camera  # gradient of the first step's state
    assert (first.displacement != 0).all()


def test_actions_without_env_grads_have_none(simulator, batch):
    start = simulator.start_from(simulator.encode(batch.initial_images), MODE)
    steps = simulator.imagine(start, MODE, 3, without_env_grads=True)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(steps[2].images.sum(), steps[0].own_actions)


def test_a_camera_that_stands_still_needs_no_networks(batch):
    config = dataclasses.replace(CONFIG, pixels_per_square=0.0)
    simulator = Simulator(config, load_agent(AGENT)).eval()
    simulator.basis.fit(batch.images.flatten(0, 1))
    with torch.no_grad():
        simulation = simulator(batch, MODE)
        moving = Simulator(CONFIG, load_agent(AGENT))
    camera = split_state(simulation.env_h[-1], simulator.config).camera
    assert not any(part.any() for part in vars(camera).values())
    assert {name.rsplit(".", 2)[0] for name in moving.state_dict()} - {
        name.rsplit(".", 2)[0] for name in simulator.state_dict()} >= {"cell.camera"}
    canvas = simulator.basis.padded(split_state(simulation.start.env_h, config).canvas)
    view = simulator.basis.coefficients(simulator.basis.images(canvas))
    # Therefore, cell and decoder can skip the shift.
    torch.testing.assert_close(view, canvas, atol=1e-3, rtol=0)


# Losses

def test_true_motion_takes_the_place_of_the_predicted_one(simulator, batch):
    camera = true_camera(batch, 64 / 13)
    where = torch.zeros(camera.shape[:2], dtype=torch.bool)
    where[[1, 2], 0] = where[:, 2] = True
    with torch.no_grad():
        forced = simulator(batch, MODE, true_camera=(camera, where))
        free = simulator(batch, MODE)
    states = split_state(forced.env_h.flatten(0, 1), CONFIG).camera
    placed = states.displacement.unflatten(0, (-1, 3))
    torch.testing.assert_close(placed[where], camera[..., 2:][where])
    torch.testing.assert_close(placed[3, 0], camera[2, 0, 2:] + forced.camera[3, 0, :2])
    torch.testing.assert_close(forced.env_h[:, 1], free.env_h[:, 1])
    assert not torch.equal(forced.camera[where], camera[where])  # the loss compares predictions


def test_the_cameras_loss_trains_the_camera_and_images_do_not(simulator, batch):
    simulator.train()
    simulation = simulator(batch, MODE)
    losses = simulator_losses(simulation, batch, CONFIG, true_camera=true_camera(batch, 64 / 13))
    camera = list(simulator.cell.camera.parameters())
    by_image = torch.autograd.grad(losses.image.sum(), camera, retain_graph=True, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in by_image)
    start = simulator.env_converter.motion[-1].weight
    *by_motion, by_start = torch.autograd.grad(losses.camera.sum(), [*camera, start],
                                               retain_graph=True)
    assert all(gradient.any() for gradient in by_motion)
    assert by_start.any(dim=1).all()  # also for the rows of velocity and phase
    errors = (simulation.camera - true_camera(batch, 64 / 13)).abs()
    errors = torch.cat([errors[:1, :, :2], errors[1:, :, 2:]])
    knee = 0.1
    expected = torch.where(errors < knee, errors.square() / (2 * knee), errors - knee / 2)
    expected = expected.sum(dim=-1)
    phase = split_state(simulation.start.env_h, CONFIG).camera.phase
    expected[0] += (phase - true_phase(batch)).square().sum(dim=-1)
    torch.testing.assert_close(losses.camera, CONFIG.camera_loss_weight * expected)


def test_nothing_counts_after_the_end_if_so_asked(simulator, dataset):
    ends = [number for number in range(len(dataset))
            if dataset[number].terminals[3:5].tolist() == [0, 1]][:2]
    batch = align(dataset.batch(ends), CONFIG)
    assert batch.terminals[:, 0].tolist() == [0, 0, 1, 1, 1]
    with torch.no_grad():
        simulation = simulator(batch, MODE)
        plain = simulator_losses(simulation, batch, CONFIG, true_camera=true_camera(batch, 64 / 13))
    masked = plain.until_end(batch.terminals)
    assert (plain.image > 0).all()
    assert torch.equal(masked.image[:2], plain.image[:2]) and (masked.image[2:] == 0).all()
    for name in ("reward", "terminal"):
        found, expected = getattr(masked, name), getattr(plain, name)
        assert torch.equal(found[:3], expected[:3]) and (found[3:] == 0).all()
    assert (masked.camera[2:] == 0).all()


def test_the_agent_acts_in_every_nth_window_and_stands_for_all(simulator, batch):
    acting = slice(1, None, 2)
    with torch.no_grad():
        all_windows, some = simulator(batch, MODE), simulator(batch, MODE, agent_windows=acting)
        full = simulator_losses(all_windows, batch, CONFIG).agent_state
        part = simulator_losses(some, batch, CONFIG, agent_windows=acting).agent_state
    torch.testing.assert_close(some.values, all_windows.values[:, acting])
    # The loss is scaled by 3 / 2: of three windows, every second one from the first on is two.
    torch.testing.assert_close(part[:, 1], 1.5 * full[:, 1])
    assert not part[:, [0, 2]].any()


# Training

@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_weights_and_is_exported(recording, tmp_path):
    settings = settings_for(recording, max_batches=8)
    whole = SimulatorTraining(tmp_path / "whole", settings, FLOAT32)
    assert whole.train() == 0
    first = dataclasses.replace(settings, max_batches=4)
    assert SimulatorTraining(tmp_path / "parts", first, FLOAT32).train() == 0
    resumed = SimulatorTraining(tmp_path / "parts", settings, FLOAT32)
    assert resumed.train() == 0
    logs = [progress_of(tmp_path / name) for name in ("whole", "parts")]
    pd.testing.assert_frame_equal(*logs, check_exact=True)
    assert {"loss_camera", "held_out_loss_camera"} <= set(logs[0])
    saved = []
    for run in (whole, resumed):
        content = torch.load(run.newest_checkpoint, weights_only=True)
        del content["wall_time"]
        saved.append(content)
    assert_same(*saved)
    small = tmp_path / "shipped" / "model.pt"
    assert export.main(["--model_file", str(whole.newest_checkpoint), "--output", str(small)]) == 0
    states = [open_simulator(path, AGENT, SimulatorConfig(), FLOAT32).state_dict()
              for path in (whole.newest_checkpoint, small)]
    for name, exact in states[0].items():
        torch.testing.assert_close(states[1][name], exact, rtol=1e-3, atol=1e-5, msg=name)


def test_checkpoints_hold_the_average_of_the_weights(recording, tmp_path):
    run = SimulatorTraining(tmp_path, settings_for(
        recording, training={"average_decay": 0.2}, max_batches=3), FLOAT32)
    average = [parameter.detach().clone() for parameter in run.simulator.trainable_parameters()]
    step, decays = run._run_step, (1 / 10, 2 / 11, 0.2)  # the third one is the maximum

    def averaging(**windows):
        figures = step(**windows)
        for mean, parameter in zip(average, run.simulator.trainable_parameters()):
            mean.lerp_(parameter.detach(), 1 - decays[run.steps])
        return figures

    run._run_step = averaging
    assert run.train() == 0
    opened = open_simulator(run.newest_checkpoint, AGENT, CONFIG, FLOAT32)
    names = [name for name, parameter in run.simulator.named_parameters()
             if parameter.requires_grad]
    for name, expected, trained in zip(names, average, run.simulator.trainable_parameters()):
        torch.testing.assert_close(opened.get_parameter(name), expected)
        assert not torch.equal(trained, expected)


@pytest.mark.slow
def test_it_learns_how_the_camera_moves(recording, tmp_path):
    settings = settings_for(recording, max_batches=18, training={
        "log_interval": 3, "true_camera_share": 1.0, "batch_size": 8, "lr": 5e-3,
        "agent_every": 8})
    assert SimulatorTraining(tmp_path, settings, FLOAT32).train() == 0
    log = pd.read_csv(tmp_path / PROGRESS_NAME)
    for name in ("loss_camera", "loss_image"):
        assert log[name].iloc[-2:].mean() < 0.85 * log[name].iloc[0], name


def test_the_camera_alone_sees_what_it_sees_in_the_simulator(simulator, dataset, batch):
    inside = [number for number in range(5, len(dataset), 9)
              if not dataset[number].terminals.any() and dataset[number].frames[0].any()][:3]
    training = CameraTraining(simulator, FLOAT32)
    windows = training.windows(dataset, np.array(inside))
    camera = true_camera(batch, 64 / 13)
    known = torch.ones(camera.shape[:2], dtype=torch.bool)
    with torch.no_grad():
        expected = simulator(batch, MODE, true_camera=(camera, known))
        predicted, phase = training.predict(windows.rows(torch.arange(3)), known.T)
    torch.testing.assert_close(predicted.transpose(0, 1), expected.camera, atol=5e-3, rtol=0)
    torch.testing.assert_close(phase, split_state(expected.start.env_h, CONFIG).camera.phase,
                               atol=5e-3, rtol=0)


@pytest.mark.slow
def test_the_camera_alone_is_trained(recording, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fit_camera, "_HELD_OUT", 60)
    settings = settings_for(recording, max_batches=1)
    run = SimulatorTraining(tmp_path / "run", settings, FLOAT32)
    assert run.train() == 0
    fitted = tmp_path / "fitted" / "model.pt"
    assert fit_camera.main([
        "--agent_file", str(AGENT), "--model_file", str(run.newest_checkpoint), "--data_dir",
        str(recording), "--num_windows", "100", "--num_batches", "50", "--output", str(fitted),
        "--device", "cpu"]) == 0
    before, after = re.findall(r"median ([\d.]+)|, ([\d.]+) after", capsys.readouterr().out)
    assert float(after[1]) < 0.8 * float(before[0])
    states = [open_simulator(path, AGENT, SimulatorConfig(), FLOAT32).state_dict()
              for path in (run.newest_checkpoint, fitted)]
    changed = {name.rsplit(".", 2)[0] for name in states[0]
               if not torch.equal(states[0][name], states[1][name])}
    assert {name.split(".")[1] for name in changed} == {"phase", "velocity", "motion", "camera"}


# Rejected input

def test_recordings_without_positions_are_refused(tmp_path):
    assert record.main(record_arguments(AGENT, tmp_path, 3, *COINRUN)) == 0
    with pytest.raises(UserError, match=r"no positions .* record it with --positions"):
        SimulatorTraining(tmp_path / "run", settings_for(tmp_path / "data"), FLOAT32)
    still = settings_for(tmp_path / "data", simulator={"pixels_per_square": 0.0}, max_batches=1)
    assert SimulatorTraining(tmp_path / "still", still, FLOAT32).train() == 0


@pytest.mark.parametrize(("change", "message"), [
    ({"architecture": "spatal"}, "unknown architecture 'spatal'.*spatial"),
    ({"deter_dim": 512}, "deter_dim must be 64 .* = 2704 in the spatial architecture, not 512"),
    ({"stoch_dim": 2, "env_h_stoch_size": 2}, "no latent variables")])
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_simulator_whose_camera_is_open_is_refused():
    with pytest.raises(UserError, match="pixels_per_square must be a number"):
        Simulator(TINY.get(SimulatorConfig), load_agent(AGENT))
