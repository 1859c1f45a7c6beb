"""Controls of patches: properties that they share with the patch, and random draws."""

import numpy as np
import pytest
from conftest import FLOAT32, FULL, tiny_policy

from agents.acting import run_policy
from agents.hooks import patched
from agents.layers import find_layer
from agents.reference_set import ReferenceSet, activations_of
from common.errors import UserError
from interventions.controls import (
    CELLS,
    CHANNELS,
    GAUSSIAN,
    OTHERS,
    channel_sizes,
    controls_of,
    matched_sets,
)
from interventions.patches import Add, Multiply, Project, SetTo, Zero

MAP = "embedder.block2.res1.resadd"  # (32, 16, 16)
POLICY = tiny_policy(channels=FULL)


@pytest.fixture(scope="module")
def reference():
    rng = np.random.default_rng(0)
    return ReferenceSet(rng.integers(0, 256, (12, 64, 64, 3), dtype=np.uint8))


def vector(seed=0, shape=(32, 16, 16)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(a, b):
    return all(np.array_equal(a.patches[0].vector[layer], b.patches[0].vector[layer])
               for layer in a.patches[0].vector)


def test_permuted_vectors_have_the_entries_of_each_channel():
    patch = Add(MAP, vector(), -2.0, steps=(0, 20))
    controls = controls_of(POLICY, [patch], 20, 1)
    seen = np.stack([control.patches[0].vector[MAP] for control in controls])
    assert seen.shape == (20, 32, 16, 16) and len(np.unique(seen, axis=0)) == 20
    np.testing.assert_array_equal(np.sort(seen.reshape(20, 32, -1)),
                                  np.broadcast_to(np.sort(vector().reshape(32, -1)), (20, 32, 256)))
    assert abs(np.corrcoef(seen[0].ravel(), vector().ravel())[0, 1]) < 0.05
    first = controls[0].patches[0]
    assert (first.coefficient, first.steps, first.layer) == (-2, (0, 20), MAP)
    again = controls_of(POLICY, [patch], 5, 1)  # additional controls do not change the first ones
    assert all(same(a, b) for a, b in zip(again, controls))
    assert not same(controls_of(POLICY, [patch], 1, 2)[0], controls[0])


def test_permutations_stay_within_the_channels_and_cells_of_the_patch():
    cells = tuple((row, 3) for row in range(10))
    for patch in (Add(MAP, vector(), channels=(4, 9), cells=cells),
                  Project(MAP, vector(), channels=(4, 9), cells=cells)):
        drawn = controls_of(POLICY, [patch], 2, 0)[0].patches[0].vector[MAP]
        changed = np.argwhere(drawn != vector())
        assert set(changed[:, 0]) == {4, 9} and set(changed[:, 2]) == {3}
        np.testing.assert_array_equal(np.sort(drawn[4, :10, 3]), np.sort(vector()[4, :10, 3]))
    with pytest.raises(UserError, match="changes a single entry"):
        controls_of(POLICY, [Add("gru", 1.0, channels=(3,))], 2, 0)


def test_gaussian_vectors_have_the_norm_and_nothing_else():
    drawn = controls_of(POLICY, [Add(MAP, vector())], 3, 0, kind=GAUSSIAN)
    for control in drawn:
        found = control.patches[0].vector[MAP]
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(vector()))
        assert abs(np.corrcoef(found.ravel(), vector().ravel())[0, 1]) < 0.05
    assert len({control.patches[0].vector[MAP][0, 0, 0] for control in drawn}) == 3


def test_patches_together_are_drawn_together(reference):
    by_layer = {MAP: vector(), "gru": vector(shape=(64,))}
    patches = [Add(MAP, by_layer), Add("gru", lambda rows: np.stack([by_layer["gru"]] * 2)),
               Zero(MAP, channels=(2,))]
    [control, _] = controls_of(POLICY, patches, 2, 0, reference)
    assert set(control.patches[0].vector) == {MAP}
    found = control.patches[1].vector["gru"](None)
    assert found.shape == (2, 64) and np.array_equal(found[0], found[1])  # the same permutation
    assert sorted(found[0]) == sorted(by_layer["gru"])
    assert control.patches[2].channels != (2,) and "channels" in control.drawn[2]


def test_other_vectors_are_taken_as_they_are():
    others = [vector(k) for k in range(1, 4)]
    drawn = controls_of(POLICY, [Add(MAP, vector(), 2.0)], 3, 0, kind=OTHERS, others=others)
    assert all(control.patches[0].vector is other for control, other in zip(drawn, others))
    with pytest.raises(UserError, match="4 controls need as many other vectors, but there are 3"):
        controls_of(POLICY, [Add(MAP, vector())], 4, 0, kind=OTHERS, others=others)


def moved(patch, reference):
    """Return the size of a patch's change, measured on the reference frames."""
    layer = find_layer(POLICY, patch.layer)
    std = {layer.name: reference.std(POLICY, layer)}
    with patched(POLICY, [patch], std) as scope:
        run_policy(POLICY, FLOAT32, reference.frames, POLICY.initial_states(12))
    return scope.total_change()[0]


@pytest.mark.parametrize("patch", [
    Zero(MAP, channels=(3, 8)), Multiply(MAP, -1.0, channels=(5,)),
    Zero("gru", channels=(1, 2, 3)), Add(MAP, vector(), channels=(2, 7, 11))])
def test_channels_are_as_many_others_with_a_change_of_the_same_size(patch, reference):
    controls = controls_of(POLICY, [patch], 6, 3, reference, CHANNELS)
    sets = {control.patches[0].channels for control in controls}
    assert len(sets) == 6
    own = moved(patch, reference)
    for control in controls:
        found = control.patches[0]
        assert len(found.channels) == len(patch.channels)
        assert set(found.channels).isdisjoint(patch.channels)
        assert control.drawn[0]["channels"] == list(found.channels)
        assert control.matched == (abs(moved(found, reference) / own - 1) <= 0.25)
    assert sum(control.matched for control in controls) >= 4


def test_matched_sets_are_within_a_quarter_and_else_the_nearest():
    sizes = np.array([[1.0, 4, 9, 16, 1.44, 0.81, 100]])  # squares of 1, 2, 3, 4, 1.2, 0.9, 10
    sets, relative, near = matched_sets(sizes, [0], 5, 0)
    assert {sets[0], sets[1]} == {(4,), (5,)} and near.tolist() == [True, True, False, False, False]
    assert sets[2:] == [(1,), (2,), (3,)] and relative[2:].tolist() == [2, 3, 4]
    # A set is never its own control, not even if there are too few other sets.
    sets, _, _ = matched_sets(sizes, [0, 1, 2, 3], 34, 0)
    assert len(set(sets)) == 34 and (0, 1, 2, 3) not in sets
    with pytest.raises(UserError, match=r"a patch of 4 of 7 channels: there are 34 other sets"):
        matched_sets(sizes, [0, 1, 2, 3], 35, 0)


def test_cells_are_others_of_those_to_choose_from():
    patch = SetTo(MAP, 5.5, channels=(7,), cells=((5, 10),), others=-0.2)
    controls = controls_of(POLICY, [patch], 20, 0)
    cells = {control.patches[0].cells for control in controls}
    assert len(cells) == 20 and ((5, 10),) not in cells
    first = controls[0].patches[0]
    assert (first.value, first.channels, first.others) == (5.5, (7,), -0.2)


def test_the_values_of_cells_go_with_them():
    own = ((0, 1), (5, 10))
    for value in (vector(), {MAP: vector()}, lambda rows: vector()[None]):
        for control in controls_of(POLICY, [SetTo(MAP, value, channels=(7,), cells=own)], 5, 0):
            [found] = control.patches
            values = found.value(None)[0] if callable(value) else found.value
            for cell, place in zip(found.cells, own, strict=True):
                assert values[(7, *cell)] == vector()[(7, *place)]


def test_a_set_value_goes_to_other_channels_in_their_standard_deviations(reference):
    patch = SetTo(MAP, 5.5, channels=(7, 3), cells=((5, 10),))
    layer = find_layer(POLICY, MAP)
    std = activations_of(POLICY, reference.frames, [MAP])[MAP].transpose(0, 1).reshape(32, -1).std(
        dim=1, correction=0).numpy()
    for control in controls_of(POLICY, [patch], 4, 0, reference, CHANNELS):
        found = control.patches[0]
        assert set(found.channels).isdisjoint((7, 3)) and found.cells == ((5, 10),)
        with patched(POLICY, [found]):
            pass  # the control fits the layer
        values = found.value[list(found.channels), 5, 10]
        np.testing.assert_allclose(values / std[list(found.channels)], 5.5 / std[[7, 3]], rtol=1e-3)
    assert layer.shape == found.value.shape


@pytest.mark.parametrize(("patch", "kind", "message"), [
    (Zero("all", channels=(3,)), None, "names no channels of one layer"),
    (Zero(MAP, channels=(3,)), GAUSSIAN, "zero at .* has no vector"),
    (Zero(MAP, channels=(3,)), CELLS, "zero at .* names no cells"),
    (Project(MAP, vector(), channels=(3, 4)), CHANNELS, "a projection at .* use 'permuted'"),
    (SetTo(MAP, lambda rows: 1.0, channels=(3,)), None, "differs from frame to frame")])
def test_controls_that_cannot_be_drawn_are_refused(patch, kind, message, reference):
    with pytest.raises(UserError, match=message):
        controls_of(POLICY, [patch], 2, 0, reference, kind)


def test_a_value_of_a_channel_that_never_varies_has_no_size():
    few = ReferenceSet(np.zeros((2, 64, 64, 3), np.uint8))
    with pytest.raises(UserError, match=r"a channel of .* that is set never varies"):
        controls_of(POLICY, [SetTo(MAP, 2.0, channels=(3,))], 2, 0, few)
    assert not channel_sizes(POLICY, Zero(MAP), find_layer(POLICY, MAP), few).any()
