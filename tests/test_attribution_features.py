"""Features of a layer: least-squares fit, factorisation, order and stability, and examples."""

import numpy as np
import pytest
from conftest import small_policy
from scipy.optimize import nnls as scipys_nnls

from attribution import feature_directions as features_module
from attribution.feature_directions import (
    ACTIVATIONS,
    LayerSamples,
    find_features,
    spatial_examples,
    stability,
    stable_matching,
    thumbnail_examples,
)
from attribution.layers import find_bottlenecks
from attribution.reduction import Reducer, nnls, split_activations, split_signs
from common.errors import UserError

NUM, CHANNELS, GRID = 40, 6, 6  # observations, channels, cells per side


@pytest.mark.parametrize(("number", "slots"), ((8, 32), (1, 5), (12, 16)))
def test_least_squares_are_those_of_scipy(number, slots):
    rng = np.random.default_rng(0)
    directions = rng.random((number, slots))**3
    rows = rng.normal(size=(200, slots))
    rows[0], rows[1] = 0, -1
    expected = np.stack([scipys_nnls(directions.T, row)[0] for row in rows])
    found = nnls(rows, directions)
    assert (found > 0).sum() not in (0, found.size)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(nnls(rows[7:8], directions), found[7:8], rtol=1e-12)


def test_directions_that_make_up_each_other_still_give_the_best_fit():
    rng = np.random.default_rng(0)
    directions = rng.random((4, 9))
    rows = rng.random((500, 9))
    best = nnls(rows, directions) @ directions
    noise = 1e-10 * rng.normal(size=directions.shape)  # comparable to rounding errors
    more = np.concatenate([directions, directions[:2], directions[:1] + directions[1:2],
                           directions + noise])
    found = nnls(rows, more)
    np.testing.assert_allclose(found @ more, best, atol=1e-7)
    assert found.max() < 10


def test_slots_are_by_the_sign_of_the_activation():
    activations = np.array([[2.0, -3.0, 0.0]], np.float32)
    values = np.array([[-1.0, 5.0, 4.0]], np.float32)
    assert split_signs(values, activations, True).tolist() == [[-1, 0, 4, 0, 5, 0]]
    assert split_signs(values, activations, False).tolist() == [[-1, 5, 4]]
    assert split_activations(activations, True).tolist() == [[2, 0, 0, 0, 3, 0]]


def test_what_directions_make_up_is_found_again_and_the_residual_is_the_rest():
    rng = np.random.default_rng(0)
    directions = np.array([[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.25, 0, 0, 0.75]], np.float32)
    activations = np.where(np.arange(3) < 2, 1.0, -1.0)[None].repeat(20, 0).astype(np.float32)
    weights = rng.normal(size=20)
    values = np.zeros((20, 3), np.float32)
    values[:, :2] = 0.5 * weights[:, None]
    values[:, 2] = 0.75 * weights
    found = Reducer(directions, True).attributions(values, activations)
    np.testing.assert_allclose(found[:, 0], weights, atol=1e-6)
    # Only the last of the second direction's two slots is non-zero: least squares of one entry.
    np.testing.assert_allclose(found[:, 1], weights * 0.75**2 / (0.75**2 + 0.25**2), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), values.sum(axis=1), atol=1e-6)


def planted(overlapping: bool, signed: bool) -> tuple[LayerSamples, np.ndarray]:
    """Return attributions composed of three directions, and the directions, largest share first."""
    rng = np.random.default_rng(1)
    slots = 2 * CHANNELS if signed else CHANNELS
    directions = np.zeros((3, slots))
    for number, some in enumerate(((0, 1), (1, 2), (3, 4)) if overlapping else ((0,), (2,), (3,))):
        directions[number, some] = (0.7, 0.3)[:len(some)]
    if signed:  # the last direction has negative activations
        directions[2] = np.roll(directions[2], CHANNELS)
    directions /= directions.sum(axis=1, keepdims=True)
    size = (NUM, GRID, GRID)
    weights = rng.gamma(1, np.array([1, 8, 3]), (*size, 3)) * (rng.random((*size, 3)) < 0.3)
    positive = rng.random(size)[..., None] < 0.5
    weights[..., 2:] *= ~positive  # the last direction only lowers the value
    rows = np.where(positive, 1, -1) * (weights @ directions)
    if signed:
        negative = weights[..., 2:] > 0  # a channel has one sign per cell
        of_last = directions[2, CHANNELS:] > 0
        activations = np.where(negative & of_last, -1.0, 1.0)
        rows[..., :CHANNELS] *= activations > 0
        rows = rows[..., :CHANNELS] + rows[..., CHANNELS:]
    else:
        activations = np.ones((*size, CHANNELS))
    held = LayerSamples("layer", *(np.moveaxis(array, -1, 1).astype(np.float32)
                           for array in (rows, activations)), np.repeat(np.arange(10), NUM // 10))
    return held, directions[[1, 2, 0]]


@pytest.mark.parametrize(("overlapping", "signed"), ((False, False), (True, False), (False, True)))
def test_planted_features_are_found_in_the_order_of_their_attribution(overlapping, signed):
    held, expected = planted(overlapping, signed)
    reducer, facts = find_features(held, 3, seed=0)
    assert held.signed == signed
    # Overlapping directions are determined only up to parts that can move between them.
    np.testing.assert_allclose(reducer.directions, expected, atol=0.08 if overlapping else 1e-3)
    assert facts["explained"] > 0.999 and facts["residual_share"] < 0.02
    assert facts["attribution"] == sorted(facts["attribution"], reverse=True)
    total = np.abs(held.attributions).sum() / NUM
    assert sum(facts["attribution"]) == pytest.approx(total, rel=0.02)
    assert min(facts["stability"]) > 0.95
    np.testing.assert_allclose(reducer.directions.sum(axis=1), 1, rtol=1e-6)
    again, _ = find_features(held, 3, seed=0)
    np.testing.assert_array_equal(again.directions, reducer.directions)
    if not overlapping and not signed:  # kind=ACTIVATIONS factorises activations
        swapped = LayerSamples("layer", np.roll(held.attributions, 1, axis=1),
                               np.abs(held.attributions), held.episodes)
        found = find_features(swapped, 3, seed=0, kind=ACTIVATIONS)[0].directions
        assert {tuple(row) for row in found.round(2)} == {tuple(row) for row in expected.round(2)}


def test_rows_that_are_held_out_are_not_fitted_to(monkeypatch):
    held, _ = planted(overlapping=True, signed=False)
    asked = []
    take = features_module._Rows.take
    monkeypatch.setattr(features_module._Rows, "take",
                        lambda self, numbers: asked.append(set(numbers)) or take(self, numbers))
    monkeypatch.setattr(features_module, "MAX_ROWS", 500)
    _, facts = find_features(held, 3, seed=0)
    tested, fitted = asked[0], asked[1]
    assert len(fitted) == facts["fitted_rows"] == 500
    assert len(tested) == facts["rows"] - 500 and not tested & fitted


def test_a_layer_that_nothing_reads_or_that_is_too_small_is_refused():
    held, _ = planted(overlapping=False, signed=False)
    dead = LayerSamples("block9", 0 * held.attributions, held.activations, held.episodes)
    for bad, number, words in (
            (dead, 3, "block9 has 0 non-zero rows of attributions in 40 observations"),
            (held, 7, "has 6 slots, too few for 7 features"),
            (LayerSamples("x", held.attributions[:1] * (np.arange(36).reshape(6, 6) < 5),
                  held.activations[:1], held.episodes[:1]), 3, "3 features need 30")):
        with pytest.raises(UserError, match=words):
            find_features(bad, number, seed=0)


def test_stability_follows_features_whatever_their_order_in_the_halves():
    directions = np.eye(3, 6, dtype=np.float32)
    other = directions.copy()
    other[1, 4] = 1
    assert stability(directions, directions[[2, 0, 1]], other[[1, 2, 0]]) == pytest.approx(
        [1, np.sqrt(0.5), 1])


def bottleneck():
    return find_bottlenecks(small_policy(), ["block3"])[0]  # 8 x 8 cells of 8 pixels


def test_each_place_shows_the_observation_that_is_strongest_there():
    found = np.zeros((128, 1, 8, 8), np.float32)
    for cell in range(64):
        found[64 + cell, 0, cell // 8, cell % 8] = 1 + cell
    examples = spatial_examples(found, bottleneck(), 1)
    np.testing.assert_array_equal(examples.observations[0].ravel(), 64 + np.arange(64))
    np.testing.assert_array_equal(examples.strengths[0].ravel(), 1 + np.arange(64))
    # Cell 3 is centred on pixel 24 and is 8 pixels wide.
    assert examples.boxes[0, 3, 0].tolist() == [20, -4, 28, 4]


def test_no_observation_is_shown_too_often_and_weaker_claims_take_their_next_best():
    """With 64 cells and 640 observations, each observation may be shown once."""
    found = np.zeros((640, 1, 8, 8), np.float32)
    found[5, 0] = 10 + np.arange(64).reshape(8, 8)
    found[6, 0] = 5
    examples = spatial_examples(found, bottleneck(), 1)
    assert examples.observations[0, 7, 7] == 5, "the strongest claim"
    assert examples.observations[0, 0, 0] == 6, "of equal ones the first"
    assert np.bincount(examples.observations[0].ravel()).max() == 1


def test_finer_grids_are_interpolated_with_held_edges():
    found = np.arange(8, dtype=np.float32)[None, None, :, None] * np.ones((1, 1, 1, 8), np.float32)
    fine = spatial_examples(found, bottleneck(), 2)
    np.testing.assert_allclose(fine.strengths[0, :, 0],
                               np.clip((np.arange(16) + 0.5) / 2 - 0.5, 0, 7))


def test_thumbnails_show_the_strongest_with_at_most_four_at_a_cell():
    found = np.zeros((30, 1, 8, 8), np.float32)
    found[:, 0, 6, 2] = 100 - np.arange(30)  # all observations have the same best cell
    found[:, 0, 1, 5] = 50 - np.arange(30)  # and the same second best
    found[:, 0, 0, 7] = 20
    examples = thumbnail_examples(found, bottleneck())
    assert examples.observations.shape == (1, 16) and examples.boxes.shape == (1, 16, 4)
    shown = dict(zip(examples.observations[0].tolist(), examples.boxes[0].tolist()))
    assert {number for number, box in shown.items() if box == [44, 12, 52, 20]} == {0, 1, 2, 3}
    assert {number for number, box in shown.items() if box == [4, 36, 12, 44]} == {4, 5, 6, 7}
    assert {8, 9, 10, 11} <= set(shown)
    tops = examples.boxes[0, :, 0].reshape(4, 4)
    assert (np.diff(tops.max(axis=1)) >= 0).all(), "rows from top to bottom"
    assert (np.diff(examples.boxes[0, :, 1].reshape(4, 4), axis=1) >= 0).all(), "left to right"
    few = thumbnail_examples(found[:5], bottleneck())
    assert few.observations.shape == (1, 5), "fewer observations, fewer patches"


def test_matching_is_stable():
    rng = np.random.default_rng(0)
    claims = rng.integers(0, 6, (30, 9)).astype(float)  # with many ties
    got = stable_matching(claims, 3)
    assert np.bincount(got[got >= 0], minlength=9).tolist() == [3] * 9 and (got == -1).sum() == 3
    for one in range(30):
        wish = claims[one, got[one]] if got[one] >= 0 else -1
        for other in np.flatnonzero(claims[one] > wish):
            assert claims[got == other, other].min() >= claims[one, other]
