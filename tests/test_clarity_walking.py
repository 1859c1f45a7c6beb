"""Advantages along trajectories, their unit, and bookmarks."""

import numpy as np
import pandas as pd
import pytest

from clarity.attributing.clarity_files import Trajectories
from clarity.walking.advantages import (
    LAMBDA,
    advantages_of,
    calibration_of,
    scale_of_rewards,
)
from clarity.walking.bookmarks import best_of_episodes, failures, spikes, stretches
from common.env import RewardNormalizer

GAMMA = 0.9
EPISODES = [5, 3, 2, 4]  # steps of each; the third one goes on behind its trajectory


def trajectories(seed=5) -> Trajectories:
    """Two: episodes 0 and 1 and the beginning of 2, and episode 3. Episode 1 brings nothing."""
    rng = np.random.default_rng(seed)
    episode = np.repeat(np.arange(4), EPISODES)
    row = np.concatenate([np.arange(length) for length in EPISODES])
    done = np.zeros(14, bool)
    done[[4, 7, 13]] = True
    reward = rng.uniform(0.1, 2, 14) * (episode != 1)
    return Trajectories(np.array([10, 4]), episode, row, episode + 100, rng.integers(0, 15, 14),
                        reward, done, rng.normal(size=14), rng.normal(size=(14, 15)),
                        np.array([1.7, 0.0]))


def test_advantages_are_the_sum_written_out_over_three_episodes_and_a_cut():
    steps, scale, expected = trajectories(), 0.5, []
    for first, last, behind in ((0, 5, 0), (5, 8, 0), (8, 10, 1.7), (10, 14, 0)):
        values = [*steps.value[first:last], behind]
        rewards = scale * steps.reward[first:last]
        deltas = [reward + GAMMA * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
        expected += [sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[t:]))
                     for t in range(len(deltas))]
    np.testing.assert_allclose(advantages_of(steps, scale, GAMMA), expected, atol=1e-9)


def test_rewards_are_scaled_as_in_training():
    """By the deviation of the trainer's own running return."""
    rng = np.random.default_rng(0)
    rows, normalizer = [], RewardNormalizer(1)
    for episode in range(200):
        length = int(rng.integers(5, 60))
        rewards = rng.random(length) * (rng.random(length) < 0.1)
        rewards[0] = 0
        rows.append(pd.DataFrame({"episode": episode, "reward": rewards}))
        for t in range(1, length):
            normalizer(rewards[t:t + 1], np.array([t == length - 1]))
    found = scale_of_rewards(pd.concat(rows, ignore_index=True))
    assert found == pytest.approx(1 / np.sqrt(normalizer.variance), rel=1e-3)
    assert scale_of_rewards(pd.DataFrame({"episode": [0, 0], "reward": [0.0, 0]})) == 1


def recording_of_values(values_of, length=40, episodes=30) -> pd.DataFrame:
    rng, rows = np.random.default_rng(1), []
    for episode in range(episodes):
        reward = np.zeros(length)
        reward[-1] = rng.uniform(1, 9)
        to_come = np.array([reward[-1] * GAMMA ** (length - 2 - t) for t in range(length - 1)])
        rows.append(pd.DataFrame({
            "episode": episode, "reward": reward, "value": [*values_of(to_come), 99.0],
            "done": [0] * (length - 1) + [1]}))
    return pd.concat(rows, ignore_index=True)


def test_calibration_finds_values_of_another_unit():
    right = calibration_of(recording_of_values(lambda to_come: to_come), 1.0, GAMMA)
    assert (right.slope, right.r2) == (pytest.approx(1), pytest.approx(1))
    assert (right.is_off, right.num_steps) == (False, 30 * 39)
    small = calibration_of(recording_of_values(lambda to_come: to_come / 5), 1.0, GAMMA)
    assert small.slope == pytest.approx(5) and small.is_off
    assert not calibration_of(recording_of_values(lambda to_come: to_come / 5), 0.2, GAMMA).is_off
    noise = np.random.default_rng(2)
    constant = calibration_of(recording_of_values(
        lambda to_come: to_come.mean() + noise.normal(0, 0.01, len(to_come))), 1.0, GAMMA)
    assert constant.slope == pytest.approx(1, abs=0.1) and constant.r2 < 0.9
    flat = calibration_of(recording_of_values(lambda to_come: 0 * to_come), 1.0, GAMMA)
    assert np.isnan(flat.slope) and flat.is_off


def test_episodes_end_with_their_trajectory():
    assert stretches(trajectories()) == [slice(0, 5), slice(5, 8), slice(8, 10), slice(10, 14)]


def test_the_best_steps_are_one_an_episode():
    steps = trajectories()
    scores = np.full(14, -1.0)
    scores[[1, 3, 6, 11, 12]] = 2, 5, 3, 4, 4
    assert best_of_episodes(scores, steps, 16).tolist() == [3, 11, 6]  # nothing in the third
    assert best_of_episodes(scores, steps, 2).tolist() == [3, 11]


def test_spikes_are_within_episodes_and_failures_bring_nothing():
    steps = trajectories()
    found = spikes(steps)
    assert found[2] == pytest.approx(abs(steps.value[2] - (steps.value[1] + steps.value[3]) / 2))
    assert np.flatnonzero(found == 0).tolist() == [0, 4, 5, 7, 8, 9, 10, 13]
    assert failures(steps, 16).tolist() == [7]
    steps.reward[:] = 0
    assert failures(steps, 2).tolist() == [4, 7]  # and not the one that goes on
    assert failures(steps, 16).tolist() == [4, 7, 13]
