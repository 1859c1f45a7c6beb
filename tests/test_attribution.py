"""Attribution to layers: bottleneck layers, positions of their cells, and integrated gradients."""

import dataclasses

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from conftest import FLOAT32, small_policy
from torch import nn

from agents.acting import run_policy
from agents.hooks import cached
from agents.networks import ClearEmbedder, ImpalaEmbedder, NatureEmbedder, Policy, to_images
from agents.outputs import output_names, outputs_named
from attribution.integrated_gradients import (
    RIEMANN_RIGHT,
    IntegratedGradientsOverTime,
    Integration,
    LayerIntegratedGradients,
    completeness_errors,
)
from attribution.layers import find_bottlenecks
from attribution.reduction import Reducer, flatten_cells
from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES

NUM = 5  # frames
VALUE = outputs_named(["value"])
DEFAULT = Integration()
AGENTS = {
    "impala": lambda: ImpalaEmbedder(16, (4, 6, 5)),
    "wide": lambda: ImpalaEmbedder(16, (8, 12, 12)),
    "nature": lambda: NatureEmbedder(16), "clear": lambda: ClearEmbedder(16)}


def agent(embedder: str, recurrent: bool, seed: int = 0) -> Policy:
    """Return an untrained agent with biases, so that no output is proportional to an input."""
    torch.manual_seed(seed)
    policy = Policy(AGENTS[embedder](), 12 if recurrent else None)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
        policy.fc_policy.weight *= 100
    return policy


def frames_of(policy: Policy, num: int = NUM, seed: int = 0):
    """Return random frames of 8 x 8 coloured blocks, entering states, and actions."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (num, 8, 8, 3), dtype=np.uint8)
    return (small.repeat(8, axis=1).repeat(8, axis=2),
            rng.uniform(-1, 1, (num, policy.hidden_state_size)).astype(np.float32),
            rng.integers(0, 15, num))


def attributed(policy, bottleneck, outputs=VALUE, integration=DEFAULT, num=NUM, baseline=None):
    frames, entering, actions = frames_of(policy, num)
    attributor = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs, integration,
                                          baseline)
    return attributor.attribute(attributor.run_prefix(frames, entering), actions,
                                np.ones(len(outputs)))


def test_cuts_are_found_in_the_network_and_not_by_name():
    def is_cut(name):
        return not find_bottlenecks(policy, [name], allow_bypassed=True)[0].bypassed

    policy = agent("impala", True)
    names = ("block1.conv", "block2.res1.relu1", "block2.res1.conv2", "block2.res1.resadd",
             "block3.res2.relu2", "fc")
    assert [is_cut(f"embedder.{name}") for name in names] == [True, False, False, True, False, True]
    assert is_cut("gru") and is_cut("hidden_state")

    class Around(nn.Module):
        """An embedder with a skip connection from the frame to the embedding."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.output_dim = inner, inner.output_dim

        def forward(self, x):
            return self.inner(x) + x.mean(dim=(1, 2, 3)).unsqueeze(1)

    policy.embedder = Around(policy.embedder)
    assert not is_cut("embedder.inner.block2.res2.resadd") and is_cut("gru")


@pytest.mark.parametrize("embedder", ("wide", "nature", "clear"))
def test_a_cell_is_centred_on_the_pixels_that_it_depends_on(embedder):
    """Compare with the centre of mass of |d cell / d pixel| over channels and random frames."""
    policy = agent(embedder, False)
    pixels = torch.rand(24, 3, 64, 64, requires_grad=True)
    bottlenecks, places = find_bottlenecks(policy), torch.arange(64, dtype=torch.float64)
    with cached(policy, [each.layer.name for each in bottlenecks], graph=True) as kept:
        policy.embed(pixels)
    for bottleneck in bottlenecks:
        layer, (_, height, width) = bottleneck.layer, bottleneck.shape
        row, column = (height + 1) // 2, width // 2
        cell = kept[layer.name][..., row, column]
        (gradient,) = torch.autograd.grad(cell.sum(), pixels, retain_graph=True)
        weights = gradient.abs().double().sum(dim=(0, 1))
        for axis, cell in ((1, row), (0, column)):
            centre = (weights.sum(dim=axis) * places).sum() / weights.sum()
            assert abs(centre - layer.first_pixel - layer.stride * cell) < layer.stride / 4


def test_integration_rules_are_those_of_their_names():
    positions, weights = Integration(3).nodes(3)  # three Gauss nodes integrate degree 5 exactly
    assert weights @ positions**5 == pytest.approx(1 / 6) and weights @ positions**6 != (
        pytest.approx(1 / 7, rel=1e-4))
    right, equal = Integration(rule=RIEMANN_RIGHT).nodes(4)
    assert right.tolist() == [0.25, 0.5, 0.75, 1] and equal.tolist() == [0.25] * 4


@pytest.mark.parametrize(("embedder", "recurrent", "name"), (
    ("impala", True, "block2"), ("clear", False, "4a")))
def test_attributions_are_captums_on_the_rest_of_the_network(embedder, recurrent, name):
    policy = agent(embedder, recurrent)
    (bottleneck,) = find_bottlenecks(policy, [name])
    frames, entering, actions = frames_of(policy)
    outputs = outputs_named(["value", "taken", "log_prob_any_left"])
    found = attributed(policy, bottleneck, outputs, Integration(8, tolerance=None))
    after = {"block2": ("block3", "relu3"), "4a": ("pool4",)}[name]
    last = ("fc1", "relufc1", "fc", "relufc") if embedder == "clear" else ("fc", "relufc")

    def tail(number):
        def scalar(activations, states, taken):
            for module in (*after, "flatten", *last):
                activations = getattr(policy.embedder, module)(activations)
            return outputs[number](policy.step(activations, states), taken)
        return scalar

    with cached(policy, [bottleneck.layer.name]) as kept:
        policy.embed(to_images(torch.from_numpy(frames)))
    for number in range(len(outputs)):
        oracle = IntegratedGradients(tail(number)).attribute(
            kept[bottleneck.layer.name], n_steps=8, method="gausslegendre",
            additional_forward_args=(torch.from_numpy(entering), torch.from_numpy(actions)))
        np.testing.assert_allclose(found.values[number], oracle.detach().numpy(), rtol=1e-4,
                                   atol=1e-5 * float(oracle.abs().max()))


@pytest.mark.parametrize(("embedder", "recurrent"), (("wide", True), ("clear", False)))
def test_features_and_residual_add_up_to_what_the_layer_changes(embedder, recurrent):
    policy, rng = agent(embedder, recurrent), np.random.default_rng(1)
    frames, entering, actions = frames_of(policy, 2)
    outputs = outputs_named(["value", "log_prob_right"])
    run = run_policy(policy, FLOAT32, frames, torch.from_numpy(entering))
    expected = [scalar(run, torch.from_numpy(actions)).numpy() for scalar in outputs]
    for bottleneck in find_bottlenecks(policy)[-2:] + find_bottlenecks(policy, ["hidden_state"]):
        found = attributed(policy, bottleneck, outputs, num=2)
        np.testing.assert_allclose(found.outputs, expected, rtol=1e-4, atol=1e-5)
        head = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs, Integration())
        prefix = head.run_prefix(frames, entering)
        held = prefix.activations.numpy().reshape(2, *bottleneck.shape)
        empty = dataclasses.replace(prefix, activations=torch.zeros_like(prefix.activations))
        np.testing.assert_allclose(found.baselines, head.outputs_at(empty, actions), atol=1e-6)
        signed = bool((held < 0).any())
        directions = rng.random((4, bottleneck.shape[0] * (1 + signed))).astype(np.float32)
        reducer = Reducer(directions / directions.sum(axis=1, keepdims=True), signed)
        for values, change in zip(found.values, found.outputs - found.baselines):
            cells = reducer.attributions(flatten_cells(values), flatten_cells(held))
            raw = values.reshape(2, -1).sum(axis=1, dtype=np.float64)
            np.testing.assert_allclose(cells.reshape(2, -1).sum(axis=1), raw, rtol=1e-6, atol=1e-7)
            assert (np.abs(raw - change) <= 0.01 * np.maximum(np.abs(change), 0.1) + 1e-6).all()
        assert (found.errors <= 0.01).all()


def test_a_frame_alone_is_what_it_is_in_a_batch_and_outputs_do_not_depend_on_each_other():
    policy = agent("impala", True)
    (bottleneck,) = find_bottlenecks(policy, ["embedder.block3.res1.resadd"])
    outputs = outputs_named(["value", "log_prob_up", "log_prob_right", "taken"])
    found = attributed(policy, bottleneck, outputs)
    assert len(np.unique(found.steps)) > 2, "nothing was refined"
    frames, entering, actions = frames_of(policy)
    for number, frame in ((0, 1), (2, 3)):
        alone = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs[number:number + 1],
                                         Integration())
        single = alone.attribute(alone.run_prefix(frames[[frame]], entering[[frame]]),
                                 actions[[frame]], np.ones(1))
        assert single.steps[0, 0] == found.steps[number, frame]
        np.testing.assert_allclose(single.values[0, 0], found.values[number, frame],
                                   atol=1e-5 * np.abs(found.values[number, frame]).max())


def test_refinement_goes_on_until_gaps_are_small_and_counts_its_nodes():
    policy = agent("impala", True)
    (bottleneck,) = find_bottlenecks(policy, ["block2"])
    coarse, fine, truth = (attributed(policy, bottleneck, integration=integration) for integration
                           in (Integration(4, tolerance=None), Integration(4),
                               Integration(128, tolerance=None)))
    assert (coarse.steps == 4).all() and coarse.errors.max() > 0.01 >= fine.errors.max()
    assert (fine.steps[coarse.errors > 0.01] > 4).all()
    errors = [np.abs(each.values - truth.values).sum() for each in (coarse, fine)]
    assert errors[1] < errors[0]


def walked(policy, num=5):
    """Return frames, hidden states and values of an episode, computed step by step, and actions."""
    frames, _, actions = frames_of(policy, num)
    states, values = [policy.initial_state().detach()[None]], []
    for frame in frames:
        run = run_policy(policy, FLOAT32, frame[None], states[-1])
        states.append(run.hidden_states)
        values.append(run.values.item())
    return frames, torch.cat(states), np.array(values), actions


def window_of(attributor, frames, states, row, lags):
    rows = row - np.arange(lags)
    prefix = attributor.run_prefix(frames, states[:-1].numpy()).activations
    is_there = torch.from_numpy(rows >= 0)[None]
    held = prefix[np.maximum(rows, 0)][None] * is_there.reshape(1, lags, *[1] * (prefix.ndim - 1))
    return held, is_there, states[max(rows[-1], 0)][None]


@pytest.mark.parametrize("name", ("block3", "embedder.block3.res1.resadd"))
def test_attributions_over_time_add_up_and_see_each_step_once(name):
    policy = agent("impala", True)
    (bottleneck,) = find_bottlenecks(policy, [name])
    frames, states, values, actions = walked(policy)
    over_time = IntegratedGradientsOverTime(policy, FLOAT32, bottleneck, VALUE, Integration())
    for row, lags in ((4, 3), (4, 1), (1, 3)):
        window = window_of(over_time, frames, states, row, lags)
        found = over_time.attribute_over_time(*window, actions[row:row + 1], np.ones(1))
        assert found.outputs[0, 0] == pytest.approx(values[row], abs=1e-5)
        state = policy.initial_state().detach()[None]
        for _ in range(min(lags, row + 1)):  # start of the path: the layer is 0 in every step
            empty = torch.zeros(1, *bottleneck.layer.shape)
            run = over_time._head.run_from(empty, (state,))
            state = run.hidden_states
        assert found.baselines[0, 0] == pytest.approx(run.values.item(), abs=1e-5)
        change = found.outputs - found.baselines
        sums = found.values.sum(axis=(2, 3, 4, 5)) + found.older
        np.testing.assert_allclose(sums, change, atol=0.01 * max(np.abs(change).max(), 0.1))
        assert (found.older == 0).all() == (row < lags)
        by_lag = np.abs(found.values).sum(axis=(0, 1, 3, 4, 5))
        assert (by_lag[:row + 1] > 0).all() and (by_lag[row + 1:] == 0).all()


def test_the_first_step_over_time_is_attributed_as_a_frame_is():
    policy = agent("impala", True)
    (bottleneck,) = find_bottlenecks(policy, ["block3"])
    frames, states, _, actions = walked(policy)
    outputs = outputs_named(["value", "taken"])
    over_time = IntegratedGradientsOverTime(policy, FLOAT32, bottleneck, outputs, Integration())
    found = over_time.attribute_over_time(*window_of(over_time, frames, states, 0, 1),
                                          actions[:1], np.ones(2))
    plain = LayerIntegratedGradients(policy, FLOAT32, bottleneck, outputs, Integration())
    expected = plain.attribute(plain.run_prefix(frames[:1], states[:1].numpy()), actions[:1],
                               np.ones(2))
    np.testing.assert_allclose(found.values[:, :, 0], expected.values, atol=1e-6)
    assert (found.older == 0).all() and (found.steps == expected.steps).all()


def test_a_gap_is_a_share_of_the_change_or_of_a_tenth_of_the_deviation():
    gaps = completeness_errors(np.array([[1.1, 0.1]]), np.array([[2.0, 1.0]]),
                               np.array([[1.0, 1.0]]), np.array([5.0]))
    np.testing.assert_allclose(gaps, [[0.1 / 1.0, 0.1 / 0.5]])


def test_outputs_are_what_their_names_say():
    policy = small_policy()
    frames, entering, actions = frames_of(policy, 3)
    run = run_policy(policy, FLOAT32, frames, torch.from_numpy(entering))
    probs, taken = run.log_probs.exp().numpy(), torch.from_numpy(actions)
    found = {scalar.name: scalar(run, taken).numpy() for scalar in outputs_named(output_names())}
    assert len(outputs_named(["policy"])) == 15
    lefts = [number for number, (x, _) in enumerate(ACTION_DIRECTIONS) if x < 0]
    downs = [number for number, (_, y) in enumerate(ACTION_DIRECTIONS) if y < 0]
    assert [ACTION_NAMES[number] for number in downs] == ["downleft", "down", "downright"]
    for name, of in ((*((name, [k]) for k, name in enumerate(ACTION_NAMES)),
                      ("other", range(9, 15)), ("any_left", lefts), ("still", [4, *range(9, 15)]))):
        np.testing.assert_allclose(found[f"log_prob_{name}"], np.log(probs[:, of].sum(axis=1)),
                                   rtol=1e-5)
    np.testing.assert_allclose(found["taken"], np.log(probs[np.arange(3), actions]), rtol=1e-5)
    np.testing.assert_allclose(found["logit_sum_down"], run.logits.numpy()[:, downs].sum(axis=1),
                               rtol=1e-5)
    np.testing.assert_allclose(found["value"], run.values.numpy())
    with pytest.raises(UserError, match="did you mean 'log_prob_upright'"):
        outputs_named(["log_prob_uprigt"])
