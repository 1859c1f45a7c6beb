"""Realism of generated frames, calibration of events, and contents beyond equal views."""

import contextlib
import dataclasses
import itertools
from dataclasses import astuple

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from common.errors import UserError
from envs.equal_views import contents_beyond, layout_key, oracle_probabilities, start_layouts
from envs.level_state import ENTITY, LevelState
from envs.procgen_env import EnvConfig, LevelSlots, StateView
from generative import realism
from generative.realism import (
    auc,
    black_share,
    calibration,
    classifier_auc,
    decompose,
    fair_squared_error,
    known_colours,
    neighbour_difference,
    recall_at_precision,
    relative_skill,
    static_rollouts,
)

COINRUN = EnvConfig("coinrun", "hard")
LEVELS = range(300)
LAVA, BARRIER, EMPTY, SAW, ENEMY, CRATE = 17, 19, 100, 2, 5, 20
EPOCHS = 6


def started(levels, of) -> list:
    """Return ``of(slots)`` for the start of each level."""
    with contextlib.closing(LevelSlots(COINRUN, 1)) as slots:
        found = []
        for level in levels:
            slots.start(0, level)
            found.append(of(slots))
    return found


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """Start frames of 320 real levels, uint8 (320, H, W, C)."""
    return np.stack(started(range(320), lambda slots: slots.frames[0].copy()))


@pytest.fixture(scope="module")
def states() -> list[LevelState]:
    return [LevelState.parse(data) for data in started(LEVELS, lambda slots: slots.state(0))]


@pytest.fixture(scope="module")
def marked(frames) -> np.ndarray:
    """The second half of the frames with a small white square, which no real frame has."""
    changed = frames[160:].copy()
    changed[:, 10:18, 40:48] = 255
    return changed


def test_a_classifier_finds_what_real_frames_lack_and_only_that(frames, marked):
    real = classifier_auc(frames[:160], frames[160:], 0, EPOCHS)
    assert 0.3 < real.value < 0.7
    assert real.low < 0.5 < real.high
    assert classifier_auc(frames[:160], marked, 0, EPOCHS).low > 0.9


def test_a_classifier_is_tested_on_the_last_quarter_and_trained_on_the_first_half(frames, marked):
    memorised = marked.copy()
    memorised[120:] = frames[280:]  # the marks are in training and validation frames only
    assert classifier_auc(frames[:160], memorised, 0, EPOCHS).low < 0.5
    unseen = frames[160:].copy()
    unseen[120:] = marked[120:]
    assert classifier_auc(frames[:160], unseen, 0, EPOCHS).low < 0.6


def test_a_classifier_depends_on_its_seed_alone(frames):
    results = []
    for seed, others in ((3, 0), (3, 1), (4, 1)):
        torch.manual_seed(others)
        before = torch.get_rng_state()
        results.append(classifier_auc(frames[:100], frames[100:200], seed, 2))
        assert torch.equal(before, torch.get_rng_state())
    assert results[0] == results[1] != results[2]


def test_auc_equals_that_of_scikit_learn_with_ties_and_clusters():
    rng = np.random.default_rng(0)
    scores, outcomes = rng.integers(0, 6, 90) / 5, rng.random(90) < 0.3
    clusters = rng.permutation(90) * 7
    once = auc(scores, outcomes, clusters, 1)
    assert once.value == pytest.approx(roc_auc_score(outcomes, scores))
    assert once.low < once.value < once.high
    # Copies of each case in its cluster add nothing; as cases of their own they seem to.
    copies = [np.repeat(values, 9) for values in (scores, outcomes, clusters)]
    assert astuple(auc(*copies, 1)) == pytest.approx(astuple(once))
    apart = auc(*copies[:2], np.arange(810), 1)
    assert apart.high - apart.low < (once.high - once.low) / 2
    assert np.isnan(auc(scores, np.zeros(90, bool), clusters, 1).value)


def test_recall_counts_what_a_precise_threshold_finds():
    scores = np.array([9, 8, 7, 6, 5, 4, 3, 3])
    outcomes = np.array([1, 1, 0, 1, 1, 0, 0, 1], bool)

    def recall(precision):
        return recall_at_precision(scores, outcomes, np.arange(8), precision, 0).value

    assert recall(0.8) == 0.8  # 4 of 5 at a threshold of 5; 3 of 4 before
    assert recall(0.81) == 0.4
    assert recall(0.6) == 1
    assert recall_at_precision(-scores, outcomes, np.arange(8), 0.7, 0).value == 0
    assert np.isnan(recall_at_precision(scores, outcomes | True, np.arange(8), 0.7, 0).value)
    rng = np.random.default_rng(0)
    outcomes = rng.random(600) < 0.2
    blind = recall_at_precision(rng.random(600), outcomes, np.arange(600), 0.8, 0)
    good = recall_at_precision(outcomes + rng.normal(size=600) / 4, outcomes, np.arange(600),
                               0.8, 0)
    assert blind.value < 0.05 and 0.9 < good.low < good.value < good.high


def test_colours_are_known_if_a_reference_frame_has_them(frames):
    assert known_colours(frames[:20], frames[:20]).tolist() == [1] * 20
    strange = frames[:20].copy()
    strange[:, :16] = 255, 0, 255
    assert known_colours(strange, frames[:20]).tolist() == [0.75] * 20
    assert (known_colours(frames[:20] ^ 1, frames[:20]) == 1).all()  # the last bits do not matter
    assert known_colours(frames[:20] ^ 8, frames[:20]).mean() < 0.9


def test_noise_has_larger_and_blur_smaller_neighbour_differences(frames):
    noise = np.random.default_rng(0).integers(0, 256, frames[:20].shape, np.uint8)
    blur = frames[:20].astype(float).reshape(20, 32, 2, 32, 2, 3).mean(axis=(2, 4))
    blur = blur.repeat(2, axis=1).repeat(2, axis=2).astype(np.uint8)
    real = neighbour_difference(frames[:20])
    assert (neighbour_difference(blur) < real).all() and real.mean() < 20
    assert (neighbour_difference(noise) > 80).all()
    ramp = np.zeros((1, 8, 8, 3), np.uint8)
    ramp += 4 * np.arange(8, dtype=np.uint8)[:, None]  # columns
    assert neighbour_difference(ramp).tolist() == [2]  # 4 across, 0 down


def test_black_pixels_are_dark_in_all_channels():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    frames[0] = 7
    assert (black_share(frames) == 1).all()
    frames[1, :, :2, 2] = 8
    assert black_share(frames).tolist() == [1, 0.5]


def test_rollouts_are_static_if_their_last_frames_hardly_change(frames):
    moving = np.stack([np.roll(frames[0], step, axis=1) for step in range(24)])
    still = np.repeat(frames[:1], 24, axis=0)
    flicker = still.copy()
    flicker[1::2] ^= 1  # a change of 1
    freezing = np.concatenate([moving[:8], np.repeat(moving[8:9], 16, axis=0)])
    thawing = freezing[::-1]
    found = static_rollouts(np.stack([moving, still, flicker, thawing, freezing]))
    assert found.tolist() == [False, True, False, False, True]
    assert not static_rollouts(np.stack([moving, freezing]), last=20).any()


def played(worlds: int | None, bias: float = 0, number: int = 800, seed: int = 0):
    """Return forecasts and outcomes of events with true probabilities q, and q; the forecaster's
    probabilities are q to the power 1 - ``bias``."""
    rng = np.random.default_rng(seed)
    q = rng.beta(0.6, 2.4, number)
    forecast = q**(1 - bias)
    if worlds is not None:
        forecast = rng.binomial(worlds, forecast) / worlds
    return forecast, rng.random(number) < q, q


@pytest.mark.parametrize("worlds", [None, 4, 16])
def test_a_perfect_forecaster_is_calibrated(worlds):
    forecast, outcomes, q = played(worlds)
    card = calibration(forecast, outcomes, np.arange(len(q)), worlds, 0)
    assert card.expected_over_real.low < 1 < card.expected_over_real.high
    assert card.excess_reliability.low < 0 < card.excess_reliability.high
    assert abs(card.excess_reliability.value) < 0.2 * card.reliability + 0.001
    # The skill in the limit of many worlds is that of the true probabilities.
    limit = calibration(q, outcomes, np.arange(len(q)), None, 0).skill.value
    assert card.fair_skill.value == pytest.approx(limit, abs=0.03)
    if worlds == 4:
        assert card.skill.value < limit - 0.1
        assert card.reliability > 0.01  # although nothing is wrong
    assert card.auc.value == pytest.approx(roc_auc_score(outcomes, forecast))


@pytest.mark.parametrize("bias", [-1, 0.5])
def test_biased_probabilities_show_in_every_measure_of_calibration(bias):
    forecast, outcomes, q = played(16, bias)
    card = calibration(forecast, outcomes, np.arange(len(q)), 16, 0)
    assert card.excess_reliability.low > 0.005
    assert card.expected_over_real.value == pytest.approx(forecast.sum() / outcomes.sum())
    assert not card.expected_over_real.low < 1 < card.expected_over_real.high
    assert card.brier.value == pytest.approx(np.mean((forecast - outcomes)**2))
    assert card.fair_skill.high < calibration(q, outcomes, np.arange(len(q)), None, 0).skill.value


def test_the_constant_rate_has_no_skill_and_no_events_no_measure():
    _, outcomes, _ = played(None)
    constant = np.full(len(outcomes), outcomes.mean())
    card = calibration(constant, outcomes, np.arange(len(outcomes)), None, 0)
    assert card.skill.value == pytest.approx(0) and card.auc.value == 0.5
    assert card.reliability == pytest.approx(0) and card.resolution == pytest.approx(0)
    never = calibration(constant, np.zeros_like(outcomes), np.arange(len(outcomes)), 16, 0)
    assert np.isnan([never.expected_over_real.value, never.skill.value, never.auc.value]).all()


def test_the_decomposition_adds_up_to_the_brier_score_of_averaged_probabilities():
    forecast, outcomes, _ = played(None)
    reliability, resolution, uncertainty = decompose(forecast, outcomes)
    parts = np.array_split(np.argsort(forecast), realism.BINS)
    score = sum(((forecast[part].mean() - outcomes[part])**2).sum() for part in parts)
    assert reliability - resolution + uncertainty == pytest.approx(score / len(forecast))
    tied = np.repeat([0, 0.5, 1], 100)  # equal probabilities share a bin in any order
    events = np.arange(300) % 4 == 0
    order = np.random.default_rng(0).permutation(300)
    assert decompose(tied, events) == pytest.approx(decompose(tied[order], events[order]))
    assert decompose(tied, events)[0] == pytest.approx((0.25**2 + 0.25**2 + 0.75**2) / 3)


def test_intervals_resample_clusters():
    forecast, outcomes, _ = played(16, number=200)
    copies = [np.repeat(values, 6) for values in (forecast, outcomes, np.arange(200))]
    together = calibration(*copies, 16, 0).skill
    once = calibration(forecast, outcomes, np.arange(200), 16, 0).skill
    assert astuple(together) == pytest.approx(astuple(once))
    apart = calibration(*copies[:2], np.arange(1200), 16, 0).skill
    assert apart.high - apart.low < (together.high - together.low) / 2


def test_fair_errors_do_not_depend_on_the_number_of_worlds():
    rng = np.random.default_rng(0)
    q = rng.random(200_000)
    outcomes = rng.random(len(q)) < q
    expected = np.mean(q * (1 - q))
    for worlds in (2, 5):
        frequencies = rng.binomial(worlds, q) / worlds
        assert fair_squared_error(frequencies, outcomes, worlds).mean() == pytest.approx(
            expected, abs=0.003)
        assert np.mean((frequencies - outcomes)**2) > expected + 0.02


def test_skill_is_relative_to_the_frequencies_among_equal_views():
    rng = np.random.default_rng(0)
    layout = rng.integers(0, 40, 3000)
    q = rng.beta(1, 3, 40)[layout]
    contents = rng.random(3000) < q
    oracle, others = oracle_probabilities([bytes([number]) for number in layout],
                                          {"saw": contents})

    def skill(probabilities, worlds):
        return relative_skill(probabilities, contents, np.arange(3000), worlds,
                              (oracle["saw"], others), 0)["relative_skill"]

    perfect = skill(rng.binomial(16, q) / 16, 16)
    assert perfect.low < 1 < perfect.high and perfect.low > 0.8
    half = skill(rng.binomial(16, (q + 3 * q.mean()) / 4) / 16, 16)
    assert 0.3 < half.value < 0.6  # 1 - (1 - 1/4)**2
    assert skill(np.full(3000, contents.mean()), None).value == pytest.approx(0, abs=0.01)
    with pytest.raises(UserError, match="no case has two other levels"):
        relative_skill(q, contents, np.arange(3000), None, (oracle["saw"], 0 * others), 0)


def test_the_oracles_skill_does_not_depend_on_the_number_of_levels():
    rng = np.random.default_rng(0)
    layout = np.arange(9000) // 3  # two others with the same key
    q = rng.beta(0.5, 0.5, 3000)[layout]
    contents = rng.random(9000) < q
    oracle = oracle_probabilities(layout.tolist(), {"saw": contents})
    clusters = layout % 200
    skills = relative_skill(q, contents, clusters, None, (oracle[0]["saw"], oracle[1]), 0)
    assert skills["skill"].value == pytest.approx(0.5, abs=0.03)
    assert skills["oracle_skill"].value == pytest.approx(0.5, abs=0.03)
    assert np.mean((oracle[0]["saw"] - contents)**2) > 0.17  # a skill below .32


def test_the_oracle_leaves_the_level_itself_out():
    keys = [b"a", b"b", b"a", b"a", b"c", b"c"]
    saws = np.array([True, True, False, True, False, True])
    frequencies, others = oracle_probabilities(keys, {"saw": saws})
    np.testing.assert_array_equal(frequencies["saw"], [0.5, np.nan, 1, 0.5, 1, 0])
    np.testing.assert_array_equal(others, [2, 0, 2, 2, 1, 1])
    with pytest.raises(UserError, match="6 keys"):
        oracle_probabilities(keys, {"saw": saws[:5]})


def with_cell(state: LevelState, column: int, row: int, value: int) -> LevelState:
    grid = state.grid.copy()
    grid[row, column] = value
    return dataclasses.replace(state, grid=grid)


def with_entity(state: LevelState, kind: int, x: float, y: float) -> LevelState:
    entity = np.zeros(1, ENTITY)
    entity["x"], entity["y"], entity["type"], entity["image_type"] = x, y, kind, kind
    return dataclasses.replace(state, entities=np.concatenate([entity, state.entities]))


def test_levels_with_equal_keys_show_equal_squares(states):
    """Moves the squares of a level into the state of another one, which has another theme."""
    def squares(state: LevelState) -> LevelState:
        return dataclasses.replace(state, entities=np.array([state.player]))

    first: dict[bytes, LevelState] = {}
    equal = different = 0
    with contextlib.closing(StateView(COINRUN)) as view:
        for state in states:
            plain = squares(state)
            key = layout_key(plain)
            other = first.setdefault(key, plain)
            if other is not plain:
                moved = dataclasses.replace(other, grid=plain.grid)
                assert (view.draw(moved.to_bytes()) == view.draw(other.to_bytes())).all()
                equal += 1
        some = list(first.values())
        for one, other in itertools.pairwise(some):
            moved = dataclasses.replace(one, grid=other.grid)
            different += (view.draw(moved.to_bytes()) != view.draw(one.to_bytes())).any()
    assert equal > 100 and different == len(some) - 1 > 10


def test_keys_tell_what_is_in_view_apart_and_ignore_what_is_not(states):
    state = dataclasses.replace(states[0], entities=np.array([states[0].player]))
    key, last = layout_key(state), 7  # the view shows columns 0 to 7
    empty = with_cell(state, last, 6, EMPTY)
    assert layout_key(with_cell(empty, last, 6, LAVA)) != layout_key(empty)
    assert layout_key(with_cell(empty, last, 6, BARRIER)) == layout_key(empty)  # it is not drawn
    assert layout_key(with_cell(state, last + 1, 6, LAVA)) == key
    assert layout_key(with_entity(state, SAW, 0.5, 0.5)) != key
    assert layout_key(with_entity(state, SAW, 7.5, 6.5)) != key
    assert layout_key(with_entity(state, SAW, 8.5, 6.5)) == key
    saw, crate, moved = (layout_key(with_entity(state, kind, x, 6.5))
                         for kind, x in ((SAW, 5.5), (CRATE, 5.5), (SAW, 6.5)))
    assert len({saw, crate, moved}) == 3
    two = with_entity(with_entity(state, SAW, 5.5, 6.5), CRATE, 4.5, 6.5)
    assert layout_key(two) == layout_key(  # the order of the entities does not matter
        with_entity(with_entity(state, CRATE, 4.5, 6.5), SAW, 5.5, 6.5))


def test_contents_lie_within_thirteen_columns_to_the_right_of_the_view(states):
    grid = np.full_like(states[0].grid, EMPTY)
    bare = dataclasses.replace(states[0], grid=grid, entities=np.array([states[0].player]))
    assert not any(contents_beyond(bare).values())
    for name, kind in (("saw", SAW), ("enemy", ENEMY), ("crate", CRATE)):
        for column, there in ((7, False), (8, True), (20, True), (21, False)):
            found = contents_beyond(with_entity(bare, kind, column + 0.5, 30.5))
            assert found == {**contents_beyond(bare), name: there}, (name, column)
    for column, there in ((7, False), (8, True), (20, True), (21, False)):
        assert contents_beyond(with_cell(bare, column, 0, LAVA))["pit"] == there
    assert contents_beyond(with_entity(bare, SAW, 21.5, 30.5), squares=14)["saw"]


def test_layouts_of_real_levels_repeat_and_say_something_about_what_follows(states):
    keys, contents = start_layouts(COINRUN, LEVELS)
    assert keys == [layout_key(state) for state in states]
    assert 20 < len(set(keys)) < len(keys) / 2
    shares = {name: values.mean() for name, values in contents.items()}
    assert set(shares) == {"pit", "saw", "enemy", "crate"}
    # In 55 000 levels: .055, .40, .25, .49.
    assert 0 < shares["pit"] < 0.15 < shares["enemy"] < 0.35 < shares["crate"] < 0.65
    assert list(contents["saw"]) == [contents_beyond(state)["saw"] for state in states]
    with pytest.raises(UserError, match="leaper are not listed"):
        start_layouts(EnvConfig("leaper", "hard"), [0])
