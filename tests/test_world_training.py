"""Training of simulators with worlds: outcomes, rare ends, the camera, and the prior."""

import copy
import dataclasses
import os
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, ROOT, assert_same, progress_of, record_arguments, simulator_settings
from torch.nn import functional

import record
from agents.agent_file import load_agent
from common.config import save_settings
from common.errors import UserError
from common.parameters import ParameterSet
from generative import fit_camera, fit_outcomes, train_prior
from generative.batches import align, true_camera
from generative.camera import CameraState
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.losses import outcome_entropy
from generative.networks import LatentSampler
from generative.prior import _parts
from generative.published import save_published
from generative.runs import open_simulator
from generative.simulator import Simulator, stack
from generative.spatial_decoder import OutcomeHead
from generative.squares import World
from generative.training import SimulatorTraining
from generative.world_data import fit_worlds

AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
SQUARE = 64 / 13
MODE = LatentSampler("mode")
WORLDS = {"world_squares": 39, "prior_widths": (8, 8, 8, 8)}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("worlds")
    assert record.main(record_arguments(AGENT, logdir, 6, "--env_name", "coinrun", "--no_videos",
                                        "--worlds")) == 0
    return logdir / "data"


def settings_for(recording, training=None, **changes):
    return simulator_settings("tiny-spatial", AGENT, recording, training, WORLDS, **changes)


@pytest.fixture(scope="module")
def run(recording, tmp_path_factory):
    """A short training run, whose checkpoint the tests of later stages open."""
    run = SimulatorTraining(tmp_path_factory.mktemp("run") / "run",
                            settings_for(recording, max_batches=4), FLOAT32)
    assert run.train() == 0
    return run


@pytest.fixture
def simulator(run):
    simulator = open_simulator(run.newest_checkpoint, AGENT, SimulatorConfig(), FLOAT32)
    torch.manual_seed(0)
    with torch.no_grad():  # away from the initial values, where many gradients vanish
        for name, parameter in simulator.named_parameters():
            if not name.startswith("agent."):
                parameter.add_(0.02 * torch.randn_like(parameter))
    return simulator


@pytest.fixture(scope="module")
def dataset(recording, run):
    config = run.simulator.config
    dataset = RolloutDataset(recording, config.num_init_steps, config.num_sim_steps)
    _, worlds = fit_worlds(dataset.folder, dataset.episodes.tolist(), 39, run.simulator.squares)
    dataset.attach_worlds(worlds)
    return dataset


@pytest.fixture(scope="module")
def batch(dataset, run):
    return align(dataset.batch(dataset.windows_with_worlds[2:5]), run.simulator.config)


@pytest.mark.slow
def test_a_stopped_run_with_worlds_goes_on_to_the_same_weights(recording, tmp_path):
    settings = settings_for(recording, {"death_copies": 3, "coin_copies": 2}, max_batches=4)
    whole = SimulatorTraining(tmp_path / "whole", settings, FLOAT32)
    before = {name: tensor.clone() for name, tensor in whole.simulator.state_dict().items()}
    assert whole.train() == 0
    first = dataclasses.replace(settings, max_batches=2)
    assert SimulatorTraining(tmp_path / "parts", first, FLOAT32).train() == 0
    resumed = SimulatorTraining(tmp_path / "parts", settings, FLOAT32)
    assert resumed.train() == 0
    pd.testing.assert_frame_equal(*(progress_of(tmp_path / name) for name in ("whole", "parts")),
                                  check_exact=True)
    assert_same(*({name: tensor for name, tensor in run.simulator.state_dict().items()}
                  for run in (whole, resumed)))
    trained = whole.simulator.state_dict()
    changed = {name.split(".")[0] for name in before
               if not torch.equal(before[name], trained[name])}
    assert changed == {"encoder", "env_converter", "hidden_converter", "action_converter", "cell",
                       "decoder"}  # neither prior, templates, basis nor agent


def test_a_run_takes_what_fits_from_a_simulator_of_another_game(run, recording, tmp_path):
    torch.manual_seed(5)
    other = Simulator(dataclasses.replace(run.simulator.config, square_classes=4, object_looks=()),
                      load_agent(AGENT))
    other.prior.trained.fill_(1)
    other.squares.templates.uniform_()
    save_published(tmp_path / "other.pt", other)
    settings = settings_for(recording, max_batches=1, transfer_from=str(tmp_path / "other.pt"))
    found = SimulatorTraining(tmp_path / "run", settings, FLOAT32).simulator
    assert torch.equal(found.squares.templates, run.simulator.squares.templates)
    assert not found.prior.is_trained
    own, others = found.state_dict(), other.state_dict()
    taken = [name for name in own if not name.startswith(("agent.", "squares.", "prior.trained"))
             and own[name].shape == others[name].shape]
    assert {name.split(".")[0] for name in taken} >= {"encoder", "cell", "decoder", "basis",
                                                      "prior"}
    assert all(torch.equal(own[name], others[name]) for name in taken)


def test_a_frozen_encoder_keeps_start_vectors(recording, tmp_path):
    run = SimulatorTraining(tmp_path / "run",
                            settings_for(recording, {"freeze_encoder": True}, max_batches=2),
                            FLOAT32)
    before = {name: tensor.clone() for name, tensor in run.simulator.state_dict().items()}
    assert run.train() == 0
    after = run.simulator.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before
               if name.startswith("encoder."))
    assert any(not torch.equal(before[name], after[name]) for name in before
               if name.startswith("decoder."))
    resumed = SimulatorTraining(run.folder, settings_for(
        recording, {"freeze_encoder": True}, max_batches=3), FLOAT32)
    assert resumed.train() == 0


def test_both_passes_agree_in_a_world(simulator, batch):
    camera = true_camera(batch, SQUARE)
    nowhere = torch.zeros(camera.shape[:2], dtype=torch.bool)
    with torch.no_grad():
        whole = simulator(batch, MODE, true_camera=(camera, nowhere))
        start = simulator.start_from(simulator.encode(batch.initial_images), MODE,
                                     world=batch.world)
        start = dataclasses.replace(start, agent_hidden=batch.first_hidden)
        steps = stack(start, simulator.imagine(start, MODE, true_actions=batch.actions))
    for name in ("raw_images", "rewards", "terminal_logits", "death_logits", "env_h"):
        torch.testing.assert_close(getattr(whole, name), getattr(steps, name), atol=2e-4, rtol=1e-3,
                                   msg=name)


def test_a_world_beyond_the_canvas_is_seen(simulator, batch):
    """Squares outside the first view change later frames, but not the first one."""
    changed = batch.world.squares.clone()
    changed[:, :, 28:] = (changed[:, :, 28:] + 1) % len(simulator.squares.templates)
    camera = true_camera(batch, SQUARE)
    camera[..., 2] = 30.0 * torch.arange(len(camera))[:, None]  # the camera moves to the right
    images = []
    with torch.no_grad():
        for squares in (batch.world.squares, changed):
            one = dataclasses.replace(batch, world=dataclasses.replace(batch.world,
                                                                       squares=squares))
            images.append(simulator(one, MODE, true_camera=(
                camera, torch.ones(camera.shape[:2], dtype=torch.bool))).images)
    differences = (images[0] - images[1]).abs().amax(dim=(2, 3, 4))
    assert (differences[0] < 1e-6).all() and (differences[2] > 0.01).all()


# Outcomes

def test_outcomes_are_a_softmax_of_death_coin_and_neither(run, batch):
    torch.manual_seed(1)
    head = OutcomeHead(run.simulator.config)
    width = 5 * run.simulator.config.spatial_width + run.simulator.config.motion_dim
    with torch.no_grad():
        head.out[-1].weight.mul_(50)
        features, images = torch.randn(6, width), torch.rand(6, 3, 64, 64)
        _, terminal, death = head(features, images)
        _, *logits = head.out(head.features(features) + head.see(images[:, :, 20:44, 20:44])).T
    expected = torch.stack([*logits, torch.zeros(6)], dim=-1).log_softmax(dim=-1)
    torch.testing.assert_close(functional.logsigmoid(death), expected[:, 0])
    torch.testing.assert_close(functional.logsigmoid(-terminal), expected[:, 2])

    @dataclasses.dataclass
    class Outcomes:
        terminal_logits: torch.Tensor
        death_logits: torch.Tensor

    ends = torch.tensor([1.0, 1, 1, 0, 0, 1])
    rewards = torch.tensor([0.0, 10, 0, 0, 0, 10])
    labels = dataclasses.replace(batch, terminals=ends[:, None], rewards=rewards[:, None])
    entropy = outcome_entropy(Outcomes(terminal[:, None], death[:, None]), labels)[:, 0]
    classes = torch.tensor([0, 1, 0, 2, 2, 1])
    torch.testing.assert_close(entropy, -expected[torch.arange(6), classes], atol=1e-4, rtol=1e-3)


def test_windows_with_rare_ends_are_repeated_and_weighted_back(recording, dataset, run):
    config = run.simulator.config
    other = RolloutDataset(recording, config.num_init_steps, config.num_sim_steps)
    numbers = other.attach_worlds(dataset.worlds, death_copies=5, coin_copies=2)
    windows = other.batch(np.unique(numbers))
    batch = align(windows, config)
    first = (batch.terminals.cumsum(dim=0) == 1) & (batch.terminals > 0)
    coin = (first & (batch.rewards > 0)).any(dim=0)
    death = first.any(dim=0) & ~coin
    assert coin.any()  # the agent reaches some coins
    copies = np.unique(numbers, return_counts=True)[1]
    assert (copies == np.where(coin, 2, np.where(death, 5, 1))).all()
    torch.testing.assert_close(batch.outcome_weights, torch.from_numpy(1 / copies).float())


# The camera

def test_only_the_camera_is_fitted_and_start_vectors_stay(recording, run, tmp_path):
    frozen = dataclasses.replace(run.settings, training=dataclasses.replace(
        run.settings.training, freeze_encoder=True))
    source = tmp_path / "frozen"
    source.mkdir()
    (source / "model.pt").write_bytes(run.newest_checkpoint.read_bytes())
    save_settings(source, frozen)
    fitted = tmp_path / "fitted" / "model.pt"
    assert fit_camera.main([
        "--agent_file", str(AGENT), "--model_file", str(source / "model.pt"), "--data_dir",
        str(recording), "--num_windows", "40", "--num_batches", "5", "--output", str(fitted),
        "--device", "cpu"]) == 0
    states = [open_simulator(path, AGENT, SimulatorConfig(), FLOAT32).state_dict()
              for path in (source / "model.pt", fitted)]
    changed = {".".join(name.split(".")[:2]) for name in states[0]
               if not torch.equal(states[0][name], states[1][name])}
    assert changed == {"env_converter.motion", "cell.camera"}


def test_the_fitted_camera_sees_what_the_training_pass_sees(run, dataset, batch):
    training = fit_camera.CameraTraining(run.simulator.eval(), FLOAT32)
    windows = training.windows(dataset, dataset.windows_with_worlds[2:5])
    known = torch.ones(batch.actions.shape, dtype=torch.bool)
    with torch.no_grad():
        expected = run.simulator(batch, MODE, true_camera=(true_camera(batch, SQUARE), known))
        predicted, _ = training.predict(windows.rows(torch.arange(3)), known.T)
    torch.testing.assert_close(predicted.transpose(0, 1), expected.camera, atol=5e-3, rtol=0)


# Outcomes

def test_outcomes_are_fitted_to_what_the_simulation_shows(run, dataset, batch):
    windows = dataset.windows_with_worlds[2:5]
    weights = np.array([1.0, 2.0, 4.0])
    found = fit_outcomes.examples(run.simulator.eval(), FLOAT32, dataset, windows, weights)
    with torch.no_grad():
        start = run.simulator.start_from(run.simulator.encode(batch.initial_images), MODE,
                                         world=batch.world)
        simulated = stack(start, run.simulator.imagine(start, MODE, len(batch.actions),
                                                       true_actions=batch.actions))
        _, *logits = found.judged(run.simulator.decoder.outcome).unbind(dim=-1)
    alive = batch.terminals.cumsum(dim=0) - batch.terminals == 0
    torch.testing.assert_close(torch.logaddexp(*logits), simulated.terminal_logits[alive],
                               atol=2e-2, rtol=0)  # crops have 8 bits
    assert torch.equal(found.rewards, batch.rewards[alive])
    assert torch.equal(found.outcomes > 0, batch.terminals[alive] > 0)
    steps = alive.sum(dim=0).double()
    torch.testing.assert_close(found.weights.double().sum(),
                               (steps * torch.from_numpy(weights)).sum())


def test_windows_with_an_end_are_half_of_those_drawn_and_weighted_back(dataset):
    numbers = dataset.windows_with_worlds
    ends = dataset.end_inside
    for number in numbers:
        assert ends[number] == (dataset.batch([number]).terminals[
            dataset.num_init_steps:] > 0).any().item()
    drawn, weights = fit_outcomes.draw_windows(dataset, numbers, 8, np.random.default_rng(0))
    assert np.isin(drawn, numbers).all() and len(set(drawn)) == 8
    assert ends[drawn].sum() == 4
    for end in (True, False):
        assert weights[ends[drawn] == end].sum() == pytest.approx((ends[numbers] == end).sum())


def test_the_head_learns_outcomes_and_keeps_its_best_weights(run):
    generator = torch.Generator().manual_seed(0)
    head = copy.deepcopy(run.simulator.decoder.outcome)
    num = 3000
    crops = torch.randint(256, (num, 3, 24, 24), generator=generator, dtype=torch.uint8)
    dies = torch.rand(num, generator=generator) < 0.2
    crops[dies, :, 8:16, 8:16] = 255  # the player touches something white
    examples = fit_outcomes.OutcomeExamples(
        torch.randn(num, head.features.in_features, generator=generator).half(), crops,
        torch.where(dies, fit_outcomes.DIES, fit_outcomes.SURVIVES), torch.zeros(num),
        torch.where(dies, 0.1, 1.0))
    train_on, held_out = (examples.rows(rows) for rows in (slice(0, 2500), slice(2500, num)))
    measured = fit_outcomes.train(head, train_on, held_out, 60, 3e-3, generator)
    assert fit_outcomes.measure(head, held_out) == pytest.approx(min(measured))
    assert min(measured)[1] > 0.97
    with torch.no_grad():
        chance = held_out.judged(head)[:, 1].sigmoid()
    share = (0.1 * dies.sum() / (0.1 * dies.sum() + (~dies).sum())).item()
    mean = ((chance * held_out.weights).sum() / held_out.weights.sum()).item()
    assert mean == pytest.approx(share, rel=0.5)  # calibrated to the weighted frequency


def test_only_the_outcomes_are_fitted(run, noisy_recording, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_outcomes, "_HELD_OUT", 40)
    fitted = tmp_path / "fitted" / "model.pt"
    argv = ["--agent_file", str(AGENT), "--model_file", str(run.newest_checkpoint), "--data_dir",
            str(noisy_recording.path), "--num_windows", "60", "--num_batches", "20", "--output",
            str(fitted), "--device", "cpu"]
    assert fit_outcomes.main(argv) == 0
    states = [open_simulator(path, AGENT, SimulatorConfig(), FLOAT32).state_dict()
              for path in (run.newest_checkpoint, fitted)]
    changed = {".".join(name.split(".")[:2]) for name in states[0]
               if not torch.equal(states[0][name], states[1][name])}
    assert changed == {"decoder.outcome"}


# The prior

@pytest.fixture
def trained(simulator):
    simulator.prior.trained.fill_(1)
    return simulator


def test_known_squares_stay_when_a_world_moves_on(trained):
    prior, num = trained.prior, 39
    classes = torch.randint(0, prior.worlds.num_classes, (2, num, num))
    world = World.of(functional.one_hot(classes, prior.worlds.num_classes).float(),
                     torch.full((2, 2), 32 - SQUARE * 19.3), seeds=torch.tensor([3, 4]))
    still = torch.zeros(2, 2)
    camera = CameraState(torch.zeros(2, 7), torch.tensor([[1.0, 0, 1, 0]] * 2), still,
                         torch.tensor([[0.0, 10.0], [60.0, 0.0]]), torch.ones(2, 1))
    moved = prior.continued(world, camera, SQUARE)
    assert torch.equal(moved.squares[0], world.squares[0])  # the view is not near the edge
    step = int(moved.origin[1, 0])
    assert step > 10 and moved.origin[1, 1] == 0
    assert torch.equal(moved.squares[1, :, :num - step], world.squares[1, :, step:])
    assert not torch.equal(moved.squares[1, :, num - step:], world.squares[1, :, :step])
    views = [trained.squares(trained.squares.paint(one), camera.displacement)
             for one in (world, moved)]
    torch.testing.assert_close(*views, atol=1e-4, rtol=0)


def test_noise_depends_on_seed_and_place_only(trained):
    squares, *others = _parts(trained.prior.place_noise(
        torch.tensor([5, 5, 6]), torch.tensor([[0, 0], [7, -3], [0, 0]])))
    for at in (squares, *others):
        assert torch.equal(at[0, ..., :36, 7:], at[1, ..., 3:, :32])
        assert not torch.equal(at[0], at[2])
    for at in (squares, others[0]):
        assert abs(at.mean()) < 0.03 and abs(at.std() - 1) < 0.03


@pytest.mark.parametrize("name", ["squares", "places"])
def test_random_starts_are_differentiable_in_the_noise(trained, name):
    seeds = torch.arange(2 if name == "squares" else 6)
    trained.squares.sprites.images.clamp_(min=0.1)  # not all looks of enemies were recorded
    noise = trained.prior.noise(seeds)
    leaf = getattr(noise, name).clone().requires_grad_()

    def value(part):
        vectors, world = trained.sample_starts(dataclasses.replace(noise, **{name: part}), seeds)
        start = trained.start_from(vectors, MODE, detached=False, world=world)
        steps = trained.imagine(start, MODE, 3, true_actions=torch.full((3, len(seeds)), 7))
        # Not the clamped images, whose gradient is 1 by definition, and nothing that sees them.
        return torch.stack([step.raw_images.mean() + step.rewards.mean() for step in steps]).sum()

    [gradient] = torch.autograd.grad(value(leaf), leaf)
    assert gradient.norm() > 1e-3
    direction = gradient / gradient.norm()
    with torch.no_grad():
        size = 0.003
        change = (value(leaf + size * direction) - value(leaf - size * direction)) / (2 * size)
    torch.testing.assert_close(change, gradient.norm(), rtol=0.05, atol=1e-5)


def test_seeds_fix_objects_and_noise_places_them(trained):
    seeds = torch.tensor([1, 2])
    noise = trained.prior.noise(seeds)
    with torch.no_grad():
        _, world = trained.sample_starts(noise, seeds)
        _, again = trained.sample_starts(trained.prior.noise(seeds), seeds)
        _, other = trained.sample_starts(trained.prior.noise(seeds + 8), seeds + 8)
        _, moved = trained.sample_starts(dataclasses.replace(noise, places=-noise.places), seeds)
        _, shifted = trained.sample_starts(dataclasses.replace(
            noise, places=noise.places + 0.3), seeds)
    for name in ("squares", "places", "velocities", "looks", "clock"):
        assert torch.equal(getattr(world, name), getattr(again, name))
        assert not torch.equal(getattr(world, name), getattr(other, name))
    assert ((world.places >= 0) & (world.places <= 1)).all()
    assert 0.48 < world.places.mean() < 0.52  # uniform within the square
    speeds = world.velocities.abs().unique()
    torch.testing.assert_close(speeds, 0.75 ** torch.arange(3.0, -1, -1))
    torch.testing.assert_close(moved.places, world.places)  # in the opposite direction
    torch.testing.assert_close(moved.velocities, -world.velocities)
    assert torch.equal(moved.squares, world.squares) and torch.equal(moved.looks, world.looks)
    right = noise.places > 0
    assert (shifted.places > world.places)[right].all()


def test_the_prior_is_trained_by_one_command_that_resumes(recording, run, tmp_path, monkeypatch):
    output = tmp_path / "prior" / "model.pt"
    arguments = ["--agent_file", str(AGENT), "--model_file", str(run.newest_checkpoint),
                 "--data_dir", str(recording), "--device", "cpu", "--num_world_batches", "3",
                 "--num_start_batches", "3", "--batch_size", "4"]
    train_on = train_prior.PriorTraining._one_batch

    def signalled(training):
        os.kill(os.getpid(), signal.SIGTERM)
        return train_on(training)

    with monkeypatch.context() as patch:
        patch.setattr(train_prior.PriorTraining, "_one_batch", signalled)
        assert train_prior.main([*arguments, "--output", str(output)]) == 128 + signal.SIGTERM
    assert train_prior.main([*arguments, "--output", str(output)]) == 0
    simulator, before = (open_simulator(path, AGENT, SimulatorConfig(), FLOAT32)
                         for path in (output, run.newest_checkpoint))
    assert simulator.prior.is_trained and not before.prior.is_trained
    changed = {name.split(".")[0] for name, tensor in before.state_dict().items()
               if not torch.equal(tensor, simulator.state_dict()[name])}
    assert changed == {"prior"}
    assert not list(output.parent.glob("*.training.pt"))
    seeds = torch.arange(3)
    vectors, world = simulator.sample_starts(simulator.prior.noise(seeds), seeds)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(world.squares.sum(dim=-1), torch.ones(3, 39, 39))


# Rejected input

def test_untrained_priors_and_unsuitable_settings_are_refused(simulator, recording, tmp_path):
    with pytest.raises(UserError, match="prior of this simulator has not been trained"):
        simulator.sample_starts(simulator.prior.noise(torch.arange(1)), torch.arange(1))
    without = dataclasses.replace(ParameterSet("tiny-spatial").get(SimulatorConfig),
                                  pixels_per_square=SQUARE)
    with pytest.raises(UserError, match="no worlds"):
        Simulator(without, load_agent(AGENT)).sample_starts(None, torch.arange(1))
    for changes in ({"world_squares": 38}, {"world_squares": 13},
                    {"prior_widths": (8, 8, 8)}):
        with pytest.raises(UserError, match=r"world_squares|prior_widths"):
            dataclasses.replace(without, **{**WORLDS, **changes})
    plain = tmp_path / "plain"
    assert record.main(record_arguments(AGENT, plain, 3, "--env_name", "coinrun", "--no_videos",
                                        "--positions")) == 0
    with pytest.raises(UserError, match="record it with --worlds"):
        SimulatorTraining(tmp_path / "run", settings_for(plain / "data"), FLOAT32)
