"""Scopes: layers are patched and cached inside a scope, and unchanged outside."""

import functools

import numpy as np
import pytest
import torch
from conftest import FLOAT32, random_frames, small_policy, tiny_policy

from agents import acting
from agents.acting import embed_frames, run_policy
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import batch_info, cached, patched
from agents.layers import all_layers, find_layer
from agents.networks import to_images
from agents.patch import PADDING, Apply, BatchInfo
from common.errors import UserError
from envs.procgen_env import EnvConfig
from interventions.patches import Add, Clamp, Multiply, Noise, Project, SetTo, Zero

LAYER = "embedder.block2.res1.resadd"
BOTH = pytest.mark.parametrize(("architecture", "recurrent"), [
    ("impala", True), ("nature", False), ("clear", True)])


def frames_of(number):
    return torch.from_numpy(random_frames(number))


def run(policy, frames):
    return run_policy(policy, FLOAT32, frames, policy.initial_states(len(frames)))


def assert_untouched(policy):
    assert "_hook_stack" not in vars(policy)
    assert not any(module._forward_hooks for module in policy.modules())


# Layers.

@BOTH
@torch.no_grad()
def test_layers_are_the_outputs_in_the_order_of_their_computation(architecture, recurrent):
    policy, seen = small_policy(architecture, recurrent), []
    for name, module in policy.named_modules():  # all modules, including containers
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.append(
            (name, output)) if isinstance(output, torch.Tensor) else None)
    run(policy, frames_of(1))
    layers, firsts = all_layers(policy), {}
    for name, output in seen:
        if name != "hidden_state":  # it returns its input
            firsts.setdefault((output.data_ptr(), output.shape), (name, output))
    names = [layer.name for layer in layers]
    order = [name for name, _ in seen if name in names]
    assert order == names and len(set(names)) == len(names)
    assert {name for name, _ in firsts.values()} <= set(names)
    shapes = dict(seen)
    for layer in layers:
        assert shapes[layer.name].numel() == np.prod(layer.shape)
        assert tuple(shapes[layer.name].shape)[-len(layer.shape):] == layer.shape
    for name, output in seen:  # names of whole blocks work, too
        innermost = find_layer(policy, f"{name}_out") if name and name != "gru.gru" else layers[-1]
        if name:
            assert shapes[innermost.name] is output or name in names


def test_squares_have_the_cells_of_both_mappings():
    layer = find_layer(small_policy(), LAYER)
    for row, column in ((0, 0), (24, 24), (12, 3), (20, 7)):
        assert layer.cell(row, column, 25) == tuple(
            int((place + 0.5) * 64 / 25 / 4) for place in (24 - row, column))
        middle = [(place + 0.5) * 64 / 25 - 0.5 for place in (24 - row, column)]
        centred = layer.cell(row, column, 25, "centred")
        assert all(abs(4 * cell - pixel) <= 2 or (cell == 15 and pixel > 62)
                   for cell, pixel in zip(centred, middle))
    conv2 = find_layer(small_policy("nature"), "embedder.conv2")
    assert conv2.cell(24, 0, 25) == (0, 0) and conv2.cell(0, 24, 25) == (5, 5)
    with pytest.raises(UserError, match=r"no square 25\.0: rows and columns go from 0 to 24"):
        layer.cell(25, 0, 25)
    with pytest.raises(UserError, match="gru has no cells"):
        find_layer(small_policy(), "gru").cell(0, 0, 25)


# Scopes.

@torch.no_grad()
def test_functions_by_layer_name_map_outputs_in_the_layers_own_shape():
    policy, frames, shapes = small_policy(), frames_of(5), []
    flip = functools.partial(torch.flip, dims=(-1,))

    def noted_flip(output):
        shapes.append(tuple(output.shape))
        return flip(output)

    with cached(policy, [LAYER]) as plain:
        run(policy, frames)
    with (patched(policy, {LAYER: noted_flip, "fc_value": lambda output: output + 2}) as scope,
          cached(policy, [LAYER, "fc_value"], before=True) as before,
          cached(policy, [LAYER, "fc_value"]) as after):
        values = run(policy, frames).values
    assert shapes == [plain[LAYER].shape] and len(shapes[0]) == 4
    assert torch.equal(after[LAYER], flip(plain[LAYER]))
    assert torch.equal(after["fc_value"], before["fc_value"] + 2)
    assert torch.equal(after["fc_value"][:, 0], values)
    assert [size.layer for size in scope.changes()] == [LAYER, "fc_value"]
    assert_untouched(policy)


@BOTH
@torch.no_grad()
def test_without_patches_outputs_are_bit_identical(architecture, recurrent):
    policy, frames = small_policy(architecture, recurrent), frames_of(5)
    before = run(policy, frames)
    names = [layer.name for layer in all_layers(policy)]
    with patched(policy, []), cached(policy, names) as activations:
        inside = run(policy, frames)
    for output in (inside, run(policy, frames)):
        assert torch.equal(output.logits, before.logits)
        assert torch.equal(output.values, before.values)
        assert torch.equal(output.hidden_states, before.hidden_states)
    assert torch.equal(activations["fc_policy"], before.logits)
    assert torch.equal(activations["hidden_state"], before.hidden_states)
    assert_untouched(policy)


@torch.no_grad()
def test_scopes_end_with_an_exception_and_leave_the_others_as_they_were():
    policy, frames = small_policy(), frames_of(2)
    plain = run(policy, frames).logits
    with patched(policy, [Multiply("fc_policy", 2.0)]):
        with pytest.raises(KeyboardInterrupt), patched(policy, [Zero("fc_policy")]):
            raise KeyboardInterrupt
        assert torch.equal(run(policy, frames).logits, 2 * plain)
        with pytest.raises(UserError), patched(policy, [Zero("fc_policy"), Zero("nothing")]):
            pass
        assert torch.equal(run(policy, frames).logits, 2 * plain)
    assert torch.equal(run(policy, frames).logits, plain)
    assert_untouched(policy)


@torch.no_grad()
def test_patches_act_outer_first_and_in_order_and_recordings_see_the_result():
    policy, frames = small_policy(), frames_of(2)
    plain = run(policy, frames).logits
    with (cached(policy, ["fc_policy"]) as outer, patched(policy, [Add("fc_policy", 1.0)]),
          cached(policy, ["fc_policy"], before=True) as computed,
          patched(policy, [Multiply("fc_policy", 3.0), Add("fc_policy", -2.0)]),
          cached(policy, ["fc_policy_out"]) as inner):
        logits = run(policy, frames).logits
    expected = (plain + 1) * 3 - 2
    assert torch.equal(logits, expected)
    assert torch.equal(outer["fc_policy"], expected)
    assert torch.equal(inner["fc_policy_out"], expected)
    assert torch.equal(computed["fc_policy"], plain)


@torch.no_grad()
def test_recordings_come_back_in_the_order_of_the_pictures():
    policy, frames = small_policy(), frames_of(1500)
    with cached(policy, [LAYER, "embedder.relufc"]) as activations:
        embeddings = embed_frames(policy, frames, FLOAT32)  # in two batches
        again = embed_frames(policy, frames[:3], FLOAT32)
    assert torch.equal(activations["embedder.relufc"], torch.cat([embeddings, again]))
    assert [len(call) for call in activations.calls(LAYER)] == [1500, 3]
    with cached(policy, [LAYER]) as alone:
        policy.embed(to_images(frames[1498:]))
    torch.testing.assert_close(activations.calls(LAYER)[0][1498:], alone[LAYER])


@torch.no_grad()
def test_what_is_recorded_or_computed_is_never_written_into():
    policy, frames = small_policy(), frames_of(2)
    with cached(policy, ["embedder.block2.maxpool"]) as plain:
        run(policy, frames)
    kept = plain["embedder.block2.maxpool"].clone()
    # With a graph the tensor itself is kept, not a copy.
    with (cached(policy, ["embedder.block2.maxpool"], before=True, graph=True) as computed,
          patched(policy, [SetTo("embedder.block2.maxpool", 9.0, channels=(1,))])):
        run(policy, frames)
    assert torch.equal(plain["embedder.block2.maxpool"], kept)
    assert torch.equal(computed["embedder.block2.maxpool"], kept)


def test_gradients_flow_through_patches():
    policy = small_policy()
    v = torch.randn(6, 16, 16)
    unit = v / v.norm()
    expected = {
        Add: lambda a, g: g, Multiply: lambda a, g: torch.where(a > 0, 2 * g, -1 * g),
        Project: lambda a, g: g - (g * unit).sum(dim=(1, 2, 3), keepdim=True) * unit,
        Clamp: lambda a, g: torch.where((a >= -0.1) & (a <= 0.1), g, torch.zeros_like(g)),
        SetTo: lambda a, g: torch.zeros_like(g)}
    for patch in (Add(LAYER, v), Multiply(LAYER, 2.0, -1.0), Project(LAYER, v),
                  Clamp(LAYER, -0.1, 0.1), SetTo(LAYER, 0.3)):
        with (cached(policy, [LAYER], before=True, graph=True) as before,
              patched(policy, [patch]), cached(policy, [LAYER], graph=True) as after):
            policy.embed(to_images(frames_of(2))).square().sum().backward(
                inputs=list(policy.parameters())[:1], retain_graph=True)
            a, b = before[LAYER], after[LAYER]
            b.requires_grad_()
            result = policy.embedder.block3(policy.embedder.block2.res2(b)).square().sum()
            (gradient,) = torch.autograd.grad(result, b, retain_graph=True)
            (through,) = torch.autograd.grad(b, a, gradient, allow_unused=True)
        through = torch.zeros_like(a) if through is None else through
        torch.testing.assert_close(through, expected[type(patch)](a, gradient),
                                   rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_patches_keep_the_precision_of_the_output():
    policy, frames = small_policy(), frames_of(2)
    with (patched(policy, [Add(LAYER, 0.5)]), cached(policy, [LAYER], before=True) as before,
          cached(policy, [LAYER]) as after, torch.autocast("cpu", torch.bfloat16)):
        policy.embed(to_images(frames))
    assert after[LAYER].dtype == before[LAYER].dtype == torch.bfloat16
    torch.testing.assert_close(after[LAYER], (before[LAYER].float() + 0.5).bfloat16())


# Steps and rows.

@torch.no_grad()
def test_a_patched_memory_is_carried_on():
    policy, frames = small_policy(), frames_of(3)
    half = Multiply("gru", 0.5)
    hidden = policy.initial_states(1)
    expected = hidden
    for frame in frames:
        with patched(policy, [half]):
            hidden = run_policy(policy, FLOAT32, frame[None], hidden).hidden_states
        expected = 0.5 * run_policy(policy, FLOAT32, frame[None], expected).hidden_states
        assert torch.equal(hidden, expected)
    embeddings = embed_frames(policy, frames, FLOAT32).unsqueeze(1)  # (T, 1, E)
    for layer in ("gru", "hidden_state"):
        with (patched(policy, [Multiply(layer, 0.5)]),
              pytest.raises(UserError, match=f"{layer} changes the state that enters")):
            policy.sequence(embeddings, policy.initial_states(1), None)
    with patched(policy, [Multiply("fc_value", 2.0)]):
        doubled = policy.sequence(embeddings, policy.initial_states(1), None).values
    assert torch.equal(doubled, 2 * policy.sequence(embeddings, policy.initial_states(1),
                                                    None).values)
    with patched(policy, [half]):  # allowed for a single step
        one = policy.sequence(embeddings[:1], policy.initial_states(1), None)
    torch.testing.assert_close(one.hidden_states[0], 0.5 * run(policy, frames[:1]).hidden_states)


@torch.no_grad()
def test_a_patch_that_depends_on_rows_needs_to_know_them():
    policy, frames = small_policy(), frames_of(4)
    numbers = np.arange(4)
    rows = BatchInfo(np.array([0, 1, PADDING, 2]), numbers, 10 * numbers)
    plain = run(policy, frames).values
    late = Zero("fc_value", steps=(1, 3))
    with patched(policy, [late]) as scope:
        with pytest.raises(UserError, match="needs metadata of each frame"):
            run(policy, frames)
        with (batch_info(policy, rows[:3]),
              pytest.raises(UserError, match="metadata for 3 frames, but the batch has 4")):
            run(policy, frames)
        with batch_info(policy, rows):
            values = run(policy, frames).values
        assert torch.equal(values, plain * torch.tensor([1, 0, 1, 1]))  # row 2 is empty
        assert scope.changes()[0].pictures == 1
    never = Zero("fc_value", levels=(5,))
    with patched(policy, [late, never]) as scope:
        assert scope.never_applied() == []  # no forward pass yet
        with batch_info(policy, rows), cached(policy, ["fc_value"]) as recording:
            run(policy, frames)
        assert scope.never_applied() == [never]
        assert len(recording["fc_value"]) == 3
        assert np.isnan(scope.total_change()[0])  # no standard deviations were given
    last = Zero("fc_value", levels=(30,), conditions=(lambda rows: rows.episode == 2,))
    with batch_info(policy, rows):  # in any order, for one block after the other
        for _ in range(2):
            with patched(policy, [last]):
                found = run(policy, frames).values
            assert torch.equal(found, plain * torch.tensor([1, 1, 1, 0]))
    assert_untouched(policy)


def test_patches_that_depend_on_rows_do_not_depend_on_how_many_play():
    policy = small_policy()
    levels = list(enumerate(EnvConfig("fruitbot", "easy").draw_levels(17, 3)))
    patches = [Noise(LAYER, 0.5, draw="picture", steps=(2, 30)),
               Zero("hidden_state", channels=(1,), levels=tuple(seed for _, seed in levels[::2])),
               Add("fc_policy", 1.0, channels=(7,), conditions=(
                   lambda rows: rows.square[:, 1] > 4,))]
    squares = {}

    def note(rows):
        squares.update(zip(zip(rows.episode, rows.step), rows.square[:, ::-1]))
        return np.ones(len(rows), bool)

    patches.append(Apply("fc_value", lambda a: a, conditions=(note,)))
    played = []
    for num_slots in (16, 17):
        with patched(policy, patches) as scope:
            episodes = sorted(play_episodes(policy, FLOAT32, EnvConfig("fruitbot", "easy"), levels,
                                            5, num_slots, PlayOptions(keep_frames=False,
                                                                      keep_positions=True)),
                              key=lambda episode: episode.number)
        played.append((episodes, [size.pictures for size in scope.changes()]))
    (some, pictures), (others, again) = played
    assert pictures == again
    assert pictures[0] == sum(min(episode.length + 1, 30) - 2 for episode in some)
    assert pictures[1] == sum(episode.length + 1 for episode in some[::2])
    assert 0 < pictures[2] < sum(episode.length + 1 for episode in some)
    for episode in some:
        places = np.floor(episode.positions[:-1])  # x and y
        assert (places == [squares[episode.number, step] for step in range(len(places))]).all()
    for a, b in zip(some, others):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.hidden_states, b.hidden_states)
        np.testing.assert_array_equal(a.log_probs, b.log_probs)
        assert ((a.hidden_states[1:, 1] == 0).all()) == (a.number % 2 == 0)


def test_batches_are_small_only_if_each_frame_keeps_its_bits(monkeypatch):
    """Fails if the sizes are not tried, or if patches take part in the trial."""
    monkeypatch.setattr(acting, "_SIZES", {})
    policy, frames = tiny_policy(), np.random.default_rng(5).integers(
        0, 256, (64, 64, 64, 3), dtype=np.uint8)
    with patched(policy, {"embedder": lambda output: pytest.fail("a patch was used")}):
        multiple, largest = acting.batch_sizes(policy, FLOAT32)
    found = [torch.cat([run_policy(
        policy, FLOAT32, frames[begin:begin + size], policy.initial_states(size)).values
        for begin in range(0, 48, size)]) for size in (16, multiple, min(largest, 48))]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    acting._SIZES.clear()
    policy.embedder.register_forward_hook(lambda _module, _inputs, output: output * len(output))
    assert acting.batch_sizes(policy, FLOAT32) == (acting.FRAMES_PER_BATCH,) * 2
