"""python -m generative.optimise_start: the search, its comparisons, and output files."""

import copy
import dataclasses
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, figures_drawn, golden_projector, refusal, save_simulator

from agents.agent_file import load_agent
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import cached
from agents.recording import steps_table
from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter
from common.errors import UserError
from common.game_constants import ACTION_NAMES
from common.parameters import ParameterSet
from envs.procgen_env import EnvConfig
from generative import optimise_start
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset, WindowPlace
from generative.dream_life import play_from
from generative.frozen_agent import FrozenAgent
from generative.networks import LatentSampler, on_unit_sphere
from generative.runs import open_simulator
from generative.sample_files import SampleFolder
from generative.sampling import imagined_from
from generative.simulator import Simulator
from generative.spatial import with_phase
from generative.squares import world_phase
from generative.start_optimisation import evaluation
from generative.start_optimisation import paired as paired_starts
from generative.start_optimisation.objectives import (
    MAXIMISE,
    MINIMISE,
    Objective,
    RecordedDensity,
    RecordedStarts,
    Rollouts,
    drawn_windows,
    log_normaliser,
    rollout,
    targets_named,
)
from generative.start_optimisation.prior_starts import PriorStarts, prior_loss
from generative.start_optimisation.search import (
    NOISE,
    SearchContext,
    SearchPlan,
    in_noise,
    in_vectors,
    search,
)
from tools.compare_outputs import digests

STEP, NUM_STEPS, NUM_STARTS = 2, 4, 2  # the first two from the set `tiny`
POOL, BEST_OF, ITERATIONS = 10, 14, 2  # the searches evaluate BEST_OF starts of 24 recorded ones
TARGETS = ["value", "log_prob_any_left", "hx_direction_1_pca", "embedder.block3.res2.resadd:3"]


@pytest.fixture(scope="module")
def arguments(simulator_file, agent_path, recording, matrices):
    """A function that returns flags of the script; a later flag overrides an earlier one."""
    def argv(folder, *more):
        return [*map(str, (
            "--agent_file", agent_path, "--model_file", simulator_file,
            "--interpreting_params_name", "tiny", "--data_dir", recording / "data",
            "--precomp_dir", matrices, "--targets", *TARGETS, "--num_starts", NUM_STARTS,
            "--iterations", ITERATIONS, "--num_recorded", 24, "--seed", 5, "--device", "cpu",
            "--output_dir", folder, *more))]
    return argv


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """A run with both aims: its output folder, which no test may change, and its figure."""
    folder = tmp_path_factory.mktemp("optimised") / "output"
    with figures_drawn() as figures:
        assert optimise_start.main(arguments(folder, "--aims", "maximise", "minimise")) == 0
    return folder, figures["targets.png"]


@pytest.fixture(scope="module")
def worlds_files(agent_path, tmp_path_factory):
    """Files of untrained simulators with worlds, the first with a prior that counts as trained."""
    config, files = ParameterSet("tiny-spatial").get(SimulatorConfig), []
    for trained in (True, False):
        torch.manual_seed(0)
        simulator = Simulator(dataclasses.replace(
            config, pixels_per_square=64 / 13, world_squares=23, square_classes=6,
            prior_widths=(8, 8, 8, 8)), load_agent(agent_path))
        simulator.squares.templates.copy_(torch.rand_like(simulator.squares.templates))
        with torch.no_grad():  # move away from the initial values
            for parameter in simulator.trainable_parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            for parameter in simulator.prior.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            simulator.prior.trained.fill_(float(trained))
        files.append(save_simulator(tmp_path_factory.mktemp("worlds"), agent_path, simulator))
    return files


@pytest.fixture(scope="module")
def worlds_simulator(worlds_files, agent_path):
    return open_simulator(worlds_files[0], agent_path, SimulatorConfig(), FLOAT32)


@pytest.fixture(scope="module")
def noise_arguments(arguments, worlds_files):
    """Flags of a run with a simulator with worlds, and without the real game."""
    def argv(folder, *more):
        return arguments(folder, "--model_file", worlds_files[0], "--interpreting_params_name",
                         "tiny-spatial", "--step", STEP, "--num_sim_steps", NUM_STEPS,
                         "--targets", "value", "hidden_state:5", *more)
    return argv


@pytest.fixture(scope="module")
def in_noise_finished(noise_arguments, tmp_path_factory):
    """A search in noise, which no test may change."""
    folder = tmp_path_factory.mktemp("noise") / "output"
    assert optimise_start.main(noise_arguments(folder)) == 0
    return folder


def named(policy, *names):
    return targets_named(names, policy, [0], "ica", golden_projector())


def vectors(num, seed=0, size=16):
    return on_unit_sphere(torch.randn(num, size, generator=torch.Generator().manual_seed(seed)))


# Gradients

def smooth(simulator, start, choices, vector, reference, world=None):
    """Evaluate the simulator as a smooth function of its start vector and world.

    Discrete choices have no slope. Therefore, the choices of a given simulation are kept, and
    changes of the tensor through which a choice passes its gradient are added to them.

    Args:
        start, choices: start and steps of the simulation from which the choices are taken.
        reference: the tensors that pass gradients, at the unchanged vector; None to compute them.

    Returns:
        Value, log-probabilities and state of the last step, and the tensors that pass gradients.
    """
    passed = []

    def choose(choice, soft):
        passed.append(soft)
        return choice + soft - (soft if reference is None else reference[len(passed) - 1])

    policy = simulator.agent.policy
    env = simulator.env_converter(vector)
    h, z_logits = env.split([simulator.config.deter_dim, simulator.config.env_h_stoch_size], -1)
    z = choose(start.z, torch.softmax(z_logits.unflatten(-1, simulator.cell.latent_shape), -1))
    scenery = []
    if world is not None:
        phase = world_phase(world, simulator.squares.pixels_per_square)
        h, scenery = with_phase(h, phase, simulator.config), [simulator.scenery(world)]
    hidden = torch.tanh(simulator.hidden_converter(vector))
    action = choose(start.action, torch.log_softmax(simulator.action_converter(vector), -1))
    for step in choices:
        h = simulator.cell.advance(z, simulator.cell.action_input(action), h, *scenery)
        z = choose(step.z, torch.softmax(simulator.cell.prior_logits(h), -1))
        image = choose(step.images, simulator.decoder(h, z, *scenery)[0])
        hidden = policy.gru.gru(policy.embed(image)[None], hidden[None])[0][0]
        log_probs = torch.log_softmax(policy.fc_policy(hidden), -1)
        action = choose(step.own_actions, log_probs)
    return (policy.fc_value(hidden)[0, 0], log_probs[0], hidden[0]), passed


@pytest.mark.parametrize(("name", "read"), [
    ("value", lambda values, log_probs, states: values),
    ("log_prob_up", lambda values, log_probs, states: log_probs[ACTION_NAMES.index("up")]),
    ("hidden_state:5", lambda values, log_probs, states: states[5])])
def test_gradient_of_the_start_vector_is_the_slope_of_a_smooth_surrogate(simulator, monkeypatch,
                                                                         name, read):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # compute everything in float64
    exact = copy.deepcopy(simulator).double()
    vector = vectors(1, seed=2).double().requires_grad_()
    steps, answers = rollout(exact, FLOAT32, vector, STEP + 1,
                                   ("hidden_state",) * name.startswith("hidden"))
    (target,) = named(exact.agent.policy, name)
    (gradient,) = torch.autograd.grad(target.read(answers, STEP).sum(), vector)
    with torch.no_grad():
        start = exact.start_from(vector, LatentSampler("mode"), detached=False)
        _, reference = smooth(exact, start, steps, vector, None)
        for direction in (gradient, vectors(1, seed=3).double()):
            move = 1e-6 * direction / direction.norm()
            above, below = (read(*smooth(exact, start, steps, vector + sign * move, reference)[0])
                            for sign in (1, -1))
            expected = (gradient * direction).sum() / direction.norm()
            assert abs((above - below) / 2e-6 - expected) < 1e-5 * gradient.norm()


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64_by_default")
def test_gradient_of_the_noise_is_the_slope_of_a_smooth_surrogate(worlds_simulator, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # compute everything in float64
    exact = copy.deepcopy(worlds_simulator).double()
    begin = in_noise(exact, torch.tensor([4]))
    noise = [tensor.double().requires_grad_() for tensor in begin.variables]
    vector, world = begin.starts(*noise)
    steps, answers = rollout(exact, FLOAT32, vector, STEP + 1, world=world)
    # The noise of places has no effect, because no class stands for an object.
    gradients = torch.autograd.grad(answers.values[STEP].sum(), noise[:-1])
    with torch.no_grad():
        start = exact.start_from(vector, LatentSampler("mode"), detached=False, world=world)
        _, reference = smooth(exact, start, steps, vector, None, world)
        for number, gradient in enumerate(gradients):
            assert gradient.norm() > 0
            move = 1e-8 * gradient / gradient.norm()  # small, because ReLUs have kinks
            places = (begin.starts(*(tensor + sign * move if other == number else tensor
                                     for other, tensor in enumerate(noise))) for sign in (1, -1))
            above, below = (smooth(exact, start, steps, moved, reference, around)[0][0]
                            for moved, around in places)
            assert (above - below) / 2e-8 == pytest.approx(float(gradient.norm()), rel=1e-3)


# A planted target: hidden unit 0 increases with the vector's projection on a direction

@pytest.fixture
def planted(simulator):
    """A simulator whose agent keeps its state, so that unit 0 depends on the start vector alone,
    and the direction along which unit 0 increases."""
    direction = vectors(1, seed=9)[0]
    with torch.no_grad():
        gru = simulator.agent.policy.gru.gru
        gru.weight_ih_l0.zero_()
        gru.weight_hh_l0.zero_()
        size = simulator.config.agent_hidden_size
        gru.bias_hh_l0[size:2 * size] = 20  # update gate: the state does not change
        for layer in list(simulator.hidden_converter)[::2]:
            layer.weight.zero_()
            layer.bias.zero_()
            layer.weight[0, 0] = 1
        simulator.hidden_converter[0].weight[0] = direction
    return simulator, direction


def recorded_around(centre, number=60):
    """Return vectors near a centre, from six episodes, and their density."""
    noise = torch.randn(number, len(centre), generator=torch.Generator().manual_seed(4))
    near = on_unit_sphere(centre + 0.1 * noise)
    return near, RecordedDensity.fit(near.numpy(), np.arange(number) % 6)


def found(planted, begin, density, penalty, aim=MAXIMISE, diversity=0.0, iterations=30):
    simulator, _ = planted
    (target,) = named(simulator.agent.policy, "hidden_state:0")
    (vectors,) = search(simulator, FLOAT32, Objective(target, aim), in_vectors(begin), (0.0, 0.3),
                        density, penalty, SearchPlan(1, iterations, 0.1, diversity))
    return vectors


def test_a_planted_target_is_reached_by_either_aim(planted):
    _, direction = planted
    begin, density = recorded_around(vectors(1, seed=1)[0])
    assert (begin[:3] @ direction).abs().max() < 0.7
    assert (found(planted, begin[:3], density, 0.0) @ direction).min() > 0.97
    assert (found(planted, begin[:3], density, 0.0, MINIMISE) @ direction).max() < -0.97


def test_penalty_keeps_starts_where_recorded_ones_lie(planted):
    _, direction = planted
    begin, density = recorded_around(vectors(1, seed=1)[0])
    free, kept = (found(planted, begin[:3], density, penalty) for penalty in (0.0, 2.0))
    assert density.excess(free).min() > 4
    assert density.excess(kept).max() < 0.2
    assert ((kept - begin[:3]) @ direction).min() > 0.02  # the target still increases


def test_penalty_keeps_the_simulated_episode_going(simulator):
    begin, density = recorded_around(vectors(1, seed=1)[0])
    everywhere = dataclasses.replace(density, typical=-1e9)
    (target,) = named(simulator.agent.policy, "value")

    def ends(start_vectors):
        with torch.no_grad():
            steps = rollout(simulator, FLOAT32, start_vectors, 2)[0]
        return sum(-torch.log(1 - torch.sigmoid(step.terminal_logits)) for step in steps)

    (kept,) = search(simulator, FLOAT32, Objective(target, MAXIMISE), in_vectors(begin[:3]),
                     (0.0, 1e9), everywhere, 1.0, SearchPlan(1, 15, 0.05, 0.0))  # no weight
    assert (ends(kept) < 0.8 * ends(begin[:3])).all()


def test_diversity_spreads_starts(planted):
    begin, density = recorded_around(vectors(1, seed=1)[0])
    close = on_unit_sphere(begin[:1] + 0.01 * vectors(3, seed=8))
    cosines = []
    for diversity in (0.0, 50.0):
        starts = found(planted, close, density, 0.0, diversity=diversity, iterations=10)
        cosines.append(float((starts @ starts.T)[~torch.eye(3, dtype=bool)].mean()))
    assert cosines[0] > 0.95 and cosines[1] < cosines[0] - 0.1, cosines


def test_the_best_vector_on_the_way_is_kept(planted):
    simulator, direction = planted
    _, density = recorded_around(direction)
    (target,) = named(simulator.agent.policy, "hidden_state:0")
    (wild,) = search(simulator, FLOAT32, Objective(target, MAXIMISE), in_vectors(direction[None]),
                     (0.0, 0.3), density, 0.0, SearchPlan(1, 4, 5.0, 0.0))  # all leave the optimum
    torch.testing.assert_close(wild[0], direction)


# Density of recorded starts

@pytest.mark.parametrize("dimensions", [3, 100, 104, 2048])
def test_kernels_are_densities(dimensions):
    cosines = (np.arange(200_000) + 0.5) / 100_000 - 1
    half = (dimensions - 1) / 2
    log_circle = math.log(2) + half * math.log(math.pi) - math.lgamma(half)  # area of the sphere
    for concentration in (0.5, 4.0, 60.0, 4096.0):  # of points with the same cosine
        log_densities = (concentration * cosines + log_normaliser(concentration, dimensions)
                         + log_circle + (half - 1) * np.log1p(-cosines**2))
        assert np.exp(log_densities).sum() * 1e-5 == pytest.approx(1, rel=1e-4)


def test_concentration_follows_the_spread_and_typical_is_what_most_recorded_starts_are():
    spread = {}
    for scale in (0.02, 0.5):
        near = on_unit_sphere(torch.ones(1, 8) + scale * torch.randn(
            400, 8, generator=torch.Generator().manual_seed(0)))
        density = RecordedDensity.fit(near.numpy(), np.arange(400) // 20)
        spread[scale] = density.concentration
        assert (density.log_density < density.typical).mean() == pytest.approx(0.05, abs=0.01)
        opposite = -on_unit_sphere(torch.ones(1, 8))
        assert density.excess(opposite) > 3 and density.excess(near).median() == 0
    assert spread[0.02] > 20 * spread[0.5]


def test_windows_of_an_episode_do_not_vouch_for_each_other():
    """Each episode is one point, repeated many times. If kernels of its own windows counted, the
    most likely kernel would be arbitrarily narrow."""
    points = vectors(20, seed=3, size=4).repeat_interleave(10, dim=0)
    density = RecordedDensity.fit(points.numpy(), np.repeat(np.arange(20), 10))
    assert density.concentration < 100
    with pytest.raises(UserError, match="belong to a single episode"):
        RecordedDensity.fit(points.numpy(), np.zeros(200))


# Targets

def test_targets_are_what_their_names_say(simulator):
    policy = simulator.agent.policy
    names = ["value", "log_prob_any_left", "hx_direction_1_pca", "hidden_state:5",
             "embedder.block1.conv:3", "from_left_to_up", "action"]
    targets = named(policy, *names)
    assert [target.name for target in targets] == names
    with torch.no_grad():
        start_vectors = vectors(3)
        _, answers = rollout(simulator, FLOAT32, start_vectors, STEP + 1,
                                       ("hidden_state", "embedder.block1.conv"))
        values = [target.read(answers, STEP) for target in targets]
        start = simulator.start_from(start_vectors, LatentSampler("mode"))
        steps = simulator.imagine(start, LatentSampler("mode"), STEP + 1)
        last = steps[STEP]
        with cached(policy, ["embedder.block1.conv"]) as activations:
            policy.embed(last.images)
    left, up = ACTION_NAMES.index("left"), ACTION_NAMES.index("up")
    expected = [
        last.values, last.log_probs[:, :3].logsumexp(dim=1),
        golden_projector().coordinates(last.hidden_states, "pca")[:, 1],
        last.hidden_states[:, 5], activations["embedder.block1.conv"][:, 3].mean(dim=(1, 2)),
        steps[STEP - 1].log_probs[:, left] + last.log_probs[:, up],
        last.log_probs.max(dim=1).values]
    for name, value, other in zip(names, values, expected):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=name)
    assert len(named(policy, "policy", "value", "value", "hidden_state")) == 15 + 1 + 64


# Searches and comparisons

def context_of(simulated, episodes, orders, best_of):
    number = len(episodes)
    starts = RecordedStarts(np.arange(number), np.array(episodes), np.zeros(number, int),
                            np.zeros((number, 16), np.float32), simulated, simulated)
    return SearchContext(None, FLOAT32, None, starts, best_of, None, orders,
                         SearchPlan(STEP, 3, 0.1, 0.0), 3, NUM_STEPS)


def test_searches_begin_from_the_best_of_the_starts_that_are_not_compared(simulator):
    (target,) = named(simulator.agent.policy, "value")
    simulated = np.array([[5.0], [4], [1], [3], [2], [9], [8], [7]], np.float32)
    orders = Objective(target, MAXIMISE), Objective(target, MINIMISE)
    context = context_of(simulated, [0, 0, 1, 1, 2, 3, 4, 5], orders, 3)
    # the best of each episode, the best episode first
    assert context.begins(0).tolist() == [0, 3, 4] and context.begins(1).tolist() == [2, 4, 1]
    assert context.recorded_scores[:, 0] == pytest.approx(-context.recorded_scores[:, 1])
    few = context_of(simulated, [0] * 8, orders, 3)
    assert few.begins(0).tolist() == [0, 1, 3]  # all from one episode


def test_a_planted_gain_is_claimed_and_none_where_there_is_none(simulator):
    rng = np.random.default_rng(0)
    targets = named(simulator.agent.policy, *(f"hidden_state:{unit}" for unit in range(24)))
    orders = tuple(Objective(target, MAXIMISE) for target in targets)
    simulated = rng.normal(size=(400, 24)).astype(np.float32)
    context = context_of(simulated, np.arange(400), orders, 200)
    best = context.recorded_scores[-200:].max(axis=0)
    at_random = rng.uniform(size=(24, 24))
    shown = at_random.copy()
    np.fill_diagonal(shown, rng.uniform(0.8, 1, 24))
    for gain, percentiles, claimed in ((1.0, shown, True), (0.0, at_random, False)):
        scores = np.diag(best + gain + 0.1 * rng.normal(size=24))
        table = evaluation.compare_with_controls(context, {"penalty 1": scores},
                                                 {"penalty 1": percentiles}, 3)
        own = table[~table["control"]].set_index("outcome")
        begin = context.recorded_scores[:200].max(axis=0)
        assert own.loc["gain", "effect"] == pytest.approx((np.diag(scores) - begin).mean())
        own = own.drop("gain")
        assert (own["claimed"] == claimed).all(), own
        assert own.loc["score", "effect"] == pytest.approx(gain, abs=0.1)
        assert own.loc["percentile", "effect"] == pytest.approx(np.diag(percentiles).mean() - 0.5)
        controls = table[table["control"]].groupby("outcome").size()
        assert controls["percentile"] == 23 and controls["score"] == evaluation.NUM_SUBSETS


# Paired tests over groups of targets

def test_log_probabilities_of_the_policy_are_one_group_of_targets(simulator):
    targets = named(simulator.agent.policy, "policy", "from_left_to_up", "log_prob_any_left",
                    "value", "hidden_state:5", "hx_direction_0_ica")
    orders = tuple(Objective(target, aim) for aim in (MAXIMISE, MINIMISE) for target in targets)
    simulated = np.zeros((4, len(targets)), np.float32)
    groups = context_of(simulated, [0, 1, 2, 3], orders, 2).groups
    assert len(targets) == 15 + 4 and len(set(groups)) == 4
    assert len(set(groups[:16])) == 1 and groups.tolist()[:19] == groups.tolist()[19:]


def paired(optimised, begin, groups):
    """Return the paired test of real percentiles of optimised starts and of their beginnings."""
    number = len(optimised)
    starts = pd.DataFrame({
        "penalty": 1.0, "best": True, "order": np.arange(number), "score": 0.0,
        "best_begin_score": np.tile([0.005, -0.005], number)[:number],  # rounding
        "recorded_score": -1.0,
        "real_percentile": np.where(optimised, 0.99, 0.5),
        "begin_percentile": np.where(begin, 0.99, 0.5)})
    pairs = paired_starts.compare_pairs(starts, np.asarray(groups), seed=0)
    return pairs.set_index(["outcome", "compared_with"])


def test_paired_tests_count_groups_and_find_planted_gains_alone():
    """All of 15 log-probabilities gain, but they are one group: no gain over groups is found."""
    shown, beginning = "shown in the real game", "beginning of the search"
    dependent = np.arange(32) < 15
    groups = np.where(dependent, 0, np.arange(32))
    pairs = paired(dependent, np.zeros(32, bool), groups)
    row = pairs.loc[shown, beginning]
    assert (row["groups"], row["better"], row["worse"], row["p"]) == (18, 1, 0, 1)
    assert row["difference"] == pytest.approx(1 / 18) and row["low_95"] <= 0 < row["high_95"]
    as_if_independent = paired(dependent, np.zeros(32, bool), np.arange(32)).loc[shown, beginning]
    assert as_if_independent["p"] < 1e-3

    independent = np.arange(32) >= 20
    row = paired(independent, np.zeros(32, bool), groups).loc[shown, beginning]
    assert (row["better"], row["worse"]) == (12, 0) and row["p"] == pytest.approx(2 / 2**12)
    assert row["low_95"] > 0.3 and row["p_holm"] < 0.01
    row = paired(np.zeros(32, bool), independent, groups).loc[shown, beginning]
    assert (row["better"], row["worse"]) == (0, 12) and row["high_95"] < -0.3
    scores = pairs.loc["higher simulated score"]
    assert (scores.loc[beginning, "better"], scores.loc[beginning, "worse"]) == (0, 0)
    assert scores.loc["best recorded start", "better"] == 18


def test_searches_that_return_their_beginning_are_told_from_those_that_moved(
        finished, in_noise_finished, arguments, noise_arguments, tmp_path):
    """Without iterations, no search can move."""
    for argv, others in ((arguments, finished[0]), (noise_arguments, in_noise_finished)):
        moved = pd.read_csv(others / "starts.csv")
        assert moved["moved"][moved["score"] > moved["begin_score"] + 0.01].all()
        assert moved["moved"].any()
        folder = tmp_path / others.parent.name
        assert optimise_start.main(argv(
            folder, "--iterations", 0, "--no_videos", "--no_real_game", "--penalty", 1,
            "--targets", "value", "hidden_state:5")) == 0
        table = pd.read_csv(folder / "starts.csv")
        assert not table["moved"].any()
        # Batches of other sizes round differently; how much depends on the machine.
        np.testing.assert_allclose(table["score"], table["begin_score"], rtol=5e-3, atol=5e-3)
        assert "| searches that returned another start than their beginning | 0 % (0 to" in (
            folder / "report.md").read_text()


# Searches in noise

def test_searches_in_noise_keep_every_norm_and_raise_the_score(worlds_simulator):
    begin = in_noise(worlds_simulator, torch.tensor([3, 7]))
    (target,) = named(worlds_simulator.agent.policy, "hidden_state:5")

    def value(noise):
        with torch.no_grad():
            vectors, world = begin.starts(*noise)
            return target.read(rollout(worlds_simulator, FLOAT32, vectors, STEP + 1, target.layers,
                                       world)[1], STEP)

    kept = search(worlds_simulator, FLOAT32, Objective(target, MAXIMISE), begin, (0.0, 0.1), None,
                  0.0, SearchPlan(STEP, 16, 0.1, 0.0))  # four steps of each of four variables
    assert (value(kept) > value(begin.variables)).all()
    for before, after in zip(begin.variables, kept):
        torch.testing.assert_close(after.flatten(1).norm(dim=1), before.flatten(1).norm(dim=1))
    for before, after in zip(begin.variables[:-1], kept):  # places have no effect without objects
        assert (after - before).flatten(1).norm(dim=1).max() > 0.01


def test_samples_hold_the_optimised_world(in_noise_finished, worlds_simulator):
    """A simulation from the files gives the frames, and the world is not that of the beginning."""
    folder = SampleFolder(in_noise_finished / "penalty_0")
    samples, world = folder.stacked(), folder.worlds(folder.numbers())
    vectors = torch.from_numpy(samples.bottleneck_vec)
    again = imagined_from(worlds_simulator, FLOAT32, vectors, NUM_STEPS, world)
    for sample, frames in zip(again, samples.frames):
        assert np.abs(sample.frames.astype(int) - frames).max() <= 1
    prior = worlds_simulator.prior
    with torch.no_grad():
        _, begin = worlds_simulator.sample_starts(prior.noise(world.seeds), world.seeds)
    table = pd.read_csv(in_noise_finished / "starts.csv")
    moved = table[table["penalty"] == 0].eval("score > begin_score + 0.001").to_numpy()
    assert moved.any()
    difference = (world.squares - begin.squares).abs().amax(dim=(1, 2, 3))
    assert difference[torch.from_numpy(moved)].max() > 0.01


def test_controls_took_no_part_in_the_search(in_noise_finished):
    with np.load(in_noise_finished / "prior.npz") as arrays:
        prior = PriorStarts(**arrays)
    table = pd.read_csv(in_noise_finished / "starts.csv")
    evaluated = POOL + NUM_STARTS * ITERATIONS
    assert evaluated == BEST_OF
    assert len(set(prior.seeds)) == len(prior.seeds) == POOL + evaluated
    with np.load(in_noise_finished / "recorded.npz") as arrays:
        recorded = arrays["simulated"]
    scores = (prior.simulated - recorded.mean(axis=0)) / recorded.std(axis=0)
    for row in table.itertuples():
        origin = SampleFolder(in_noise_finished / f"penalty_{row.penalty:g}").origin(row.sample)
        assert origin.world_seed in prior.seeds[:POOL]
        own = prior.seeds.tolist().index(origin.world_seed)
        assert row.begin_score == pytest.approx(scores[own, row.order], rel=1e-3, abs=1e-3)
        assert row.best_begin_score == pytest.approx(scores[:POOL, row.order].max(), rel=1e-3)
        assert row.prior_score == pytest.approx(scores[POOL:, row.order].max(), rel=1e-3)
        assert row.prior_percentile == pytest.approx(
            (prior.loss[POOL:] < row.prior_loss).mean())
    report = (in_noise_finished / "report.md").read_text()
    assert f"best of {evaluated} random prior samples" in report


def test_controls_of_a_planted_gain_over_the_prior(simulator):
    """The gain is claimed over the beginning, but not over the random samples, which reach it."""
    rng = np.random.default_rng(0)
    targets = named(simulator.agent.policy, *(f"hidden_state:{unit}" for unit in range(24)))
    context = context_of(rng.normal(size=(400, 24)).astype(np.float32), np.arange(400),
                         tuple(Objective(target, MAXIMISE) for target in targets), 200)
    simulated = rng.normal(size=(600, 24)).astype(np.float32)
    context = dataclasses.replace(context, space=NOISE, prior=PriorStarts(
        np.arange(600), simulated, np.zeros(600, np.float32)))
    begin, fresh = (context.prior_scores[rows].max(axis=0)
                    for rows in (slice(200), slice(200, None)))
    scores = np.diag(np.maximum(begin, fresh) + 0.01)
    table = evaluation.compare_with_controls(context, {"penalty 1": scores}, {}, 3)
    own = table[~table["control"]].set_index("outcome")["effect"]
    assert own["gain"] == pytest.approx((np.diag(scores) - begin).mean())
    assert own["over_prior"] == pytest.approx((np.diag(scores) - fresh).mean())


def test_implausible_starts_have_a_large_prior_loss(worlds_simulator):
    seeds = torch.arange(4)
    with torch.no_grad():
        vectors, world = worlds_simulator.sample_starts(worlds_simulator.prior.noise(seeds), seeds)
    typical = prior_loss(worlds_simulator, vectors, world)
    other = prior_loss(worlds_simulator, on_unit_sphere(torch.randn_like(vectors)), world)
    assert (other > typical).all()
    shuffled = world.squares.flatten(1, 2)[:, torch.randperm(23 * 23)].view_as(world.squares)
    other = prior_loss(worlds_simulator, vectors, dataclasses.replace(world, squares=shuffled))
    assert (other != typical).all()
    torch.testing.assert_close(prior_loss(worlds_simulator, vectors[2:], world[2:]), typical[2:])


def test_a_search_in_noise_that_was_stopped_ends_with_equal_files(in_noise_finished,
                                                                  noise_arguments, tmp_path):
    other = shutil.copytree(in_noise_finished, tmp_path / "other")
    for name in ("starts.csv", "report.md", "prior.npz"):
        (other / name).unlink()
    shutil.rmtree(other / "penalty_1" / "sample_00001")  # killed between two starts of an objective
    shutil.rmtree(other / "penalty_0" / "sample_00002")
    assert optimise_start.main(noise_arguments(other)) == 0
    assert digests(other) == digests(in_noise_finished)


@pytest.mark.parametrize("number", [None, 1])
def test_a_search_in_noise_needs_a_trained_prior(noise_arguments, simulator_file, worlds_files,
                                                 tmp_path, capsys, number):
    model = simulator_file if number is None else worlds_files[number]
    argv = noise_arguments(tmp_path / "out", "--search_space", "noise", "--model_file", model)
    assert "needs a simulator with worlds and a trained prior" in refusal(
        optimise_start.main, argv, capsys)
    assert not (tmp_path / "out").exists()


# The real game

@pytest.fixture(scope="module")
def greedy(agent_path, tmp_path_factory):
    """A recording of an agent that takes its most likely action, and the recorded episodes."""
    folder, config = tmp_path_factory.mktemp("greedy"), EnvConfig("fruitbot", "easy")
    writer = RolloutWriter(folder, {"env": vars(config)})
    episodes = list(play_episodes(load_agent(agent_path), FLOAT32, config, [(0, 3), (1, 8)], 0, 2,
                                  PlayOptions(greedy=True)))
    for episode in sorted(episodes, key=lambda each: each.number):
        writer.add(episode.number, EpisodeArrays(episode.frames, episode.hidden_states,
                                                 episode.log_probs, steps_table(episode)))
    return folder, sorted(episodes, key=lambda each: each.number)


def test_the_agent_plays_on_from_a_recorded_start_as_it_did(greedy, agent_path):
    folder, episodes = greedy
    agent = FrozenAgent(load_agent(agent_path), 64, 15)
    last = episodes[1].length - 1  # the last row that shows the level
    places = [WindowPlace(0, 5), WindowPlace(1, 0), WindowPlace(1, last - 1)]
    with cached(agent.policy, ["embedder.block1.conv"], graph=True) as activations:
        outputs, _, ends = play_from(agent, FLOAT32, RolloutFolder(folder), places, 3)
    answers = Rollouts.of(outputs, activations, agent.policy)
    assert ends.any(axis=0).tolist() == [False, False, True]
    for place, (episode, rows) in enumerate(((0, [5, 6, 7, 8]), (1, [0, 1, 2, 3]),
                                             (1, [last - 1, last, last, last]))):
        for name in ("values", "log_probs"):
            np.testing.assert_allclose(getattr(answers, name)[:, place],
                                       getattr(episodes[episode], name)[rows], atol=1e-3)
        np.testing.assert_allclose(answers.hidden_states[:, place],
                                   episodes[episode].hidden_states[np.array(rows) + 1], atol=1e-3)
    assert answers.units["embedder.block1.conv"].shape == (4, 3, 4)


def test_drawn_windows_have_their_initial_frames_and_reach_the_step(recording):
    dataset = RolloutDataset(recording / "data", 3, NUM_STEPS)
    lengths = dataset.folder.index().groupby("episode").size()
    windows = drawn_windows(dataset, 10**6, STEP, 5)
    places = [dataset.place(int(window)) for window in windows]
    assert len(set(windows.tolist())) == len(windows) == sum(
        max(length - 3 - STEP, 0) for length in lengths)
    assert min(place.frame for place in places) == 2
    assert min(lengths[place.episode] - 1 - place.frame for place in places) == STEP + 1
    assert drawn_windows(dataset, 7, STEP, 5).tolist() == windows[:7].tolist()


# The script

def test_tables_say_what_the_samples_hold(finished):
    folder, figure = finished
    table = pd.read_csv(folder / "starts.csv")
    assert len(table) == 2 * 2 * len(TARGETS) * NUM_STARTS  # penalties, aims
    recorded_arrays = np.load(folder / "recorded.npz")
    assert recorded_arrays["targets"].tolist() == TARGETS
    readers = {"value": lambda each: each.values[STEP],
               "log_prob_any_left": lambda each: np.logaddexp.reduce(each.log_probs[STEP, :3])}
    for row in table.itertuples():
        sample = SampleFolder(folder / f"penalty_{row.penalty:g}").sample(row.sample)
        if row.target in readers:
            assert row.value == pytest.approx(readers[row.target](sample), abs=1e-3)
        simulated = recorded_arrays["simulated"][:, TARGETS.index(row.target)]
        sign = 1 if row.aim == "maximise" else -1
        assert row.score == pytest.approx(
            sign * (row.value - simulated.mean()) / simulated.std(), rel=1e-3, abs=1e-3)
        assert row.score >= row.begin_score - row.penalty * 100 - 1e-3
        cosines = (recorded_arrays["vectors"] @ sample.bottleneck_vec)[POOL:]
        assert row.nearest_cosine == pytest.approx(cosines.max(), abs=1e-4)
        assert row.nearest_window == recorded_arrays["windows"][POOL:][cosines.argmax()]
        real = sign * recorded_arrays["real"][:, TARGETS.index(row.target)]
        assert row.beyond_real == (
            sign * row.value > np.quantile(real, 0.999) + evaluation.LEAST * simulated.std())
    free = table[table["penalty"] == 0]
    assert (free["score"] >= free["begin_score"] - 1e-3).all()  # the search may keep its start
    assert table.groupby(["penalty", "order"])["best"].sum().eq(1).all()
    best = table[table["best"]]
    assert best["real_percentile"].between(0, 1).all()
    assert best["begin_percentile"].between(0, 1).all()
    assert "prior_score" not in table  # there is no prior
    assert not table["real_percentile"][~table["best"]].notna().any()
    for penalty, line in zip((1, 0), (1, 2)):
        drawn = figure.axes[0].get_lines()[line].get_xdata()
        assert sorted(drawn) == pytest.approx(sorted(best[best["penalty"] == penalty]["score"]),
                                              rel=1e-4)


def test_report_counts_the_rows_of_the_table(finished):
    folder, _ = finished
    best = pd.read_csv(folder / "starts.csv")
    best = best[best["best"] & (best["penalty"] == 1)]
    text = (folder / "report.md").read_text()
    for title, truth in (("quantile of recorded starts, simulated", best["beyond_simulated"]),
                         (f"beyond the best of {BEST_OF} recorded starts",
                          best["score"] > best["recorded_score"] + evaluation.LEAST),
                         ("typical start", best["typical"]),
                         ("| shown |", best["real_percentile"] >= evaluation.SHOWN)):
        (line,) = [line for line in text.splitlines() if title in line and line.startswith("|")]
        assert f"; {truth.sum()} of {len(best)})" in line.split("|")[2], line
    title = "| 1 | shown in the real game | best recorded start |"
    (line,) = [line for line in text.splitlines() if line.startswith(title)]
    pairs = pd.read_csv(folder / "pairs.csv")
    assert line.split("|")[4].strip() == str(pairs["groups"].iloc[0]) == "4"
    assert "Nothing: intervals need at least 10 groups of targets" in text
    assert len(list((folder / "pictures").iterdir())) == 2 * len(TARGETS)
    films = list((folder / "penalty_1" / "videos").iterdir())
    assert len(films) == 2 * len(TARGETS) * NUM_STARTS


def test_a_run_that_was_stopped_ends_with_equal_files(finished, arguments, tmp_path):
    folder, _ = finished
    other = shutil.copytree(folder, tmp_path / "other")
    for name in ("starts.csv", "report.md", "pictures/order_002.png"):
        (other / name).unlink()
    shutil.rmtree(other / "penalty_1" / "sample_00005")  # killed between two starts of an objective
    for number in range(4, 8):
        shutil.rmtree(other / "penalty_0" / f"sample_{number:05d}")
    assert optimise_start.main(arguments(other, "--aims", "maximise", "minimise")) == 0
    assert digests(other) == digests(folder)


@pytest.mark.parametrize(("more", "sentence"), [
    (["--targets", "valu"], "there is no target 'valu' (did you mean 'value'?)"),
    (["--targets", "hidden_state:64"], "the target 'hidden_state:64' does not exist: the units of "
     "hidden_state are numbered 0 to 63"),
    (["--step", "4"], "there is no step 4: the 4 steps of a rollout are counted from 0"),
    (["--targets", "from_left_to_up", "--step", "0"], "--step must be at least 1"),
    (["--best_of", "23"], "--best_of 23 leaves 1 of the 24 recorded starts")])
def test_bad_input_is_one_sentence_and_leaves_nothing(arguments, tmp_path, capsys, more, sentence):
    assert sentence in refusal(optimise_start.main, arguments(tmp_path / "out", *more), capsys)
    assert not (tmp_path / "out").exists()
