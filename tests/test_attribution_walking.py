"""Trajectories of a recording, and advantages along them."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write_recording

import record
from agents.agent_file import load_agent, read_origin
from agents.rollout_files import RolloutFolder
from agents.run_folder import TrainSettings
from attribution.recordings import Recording
from attribution.trajectories import (
    AUTO,
    FAILURES,
    LAMBDA,
    AdvantageSettings,
    advantages_of,
    best_of_episodes,
    calibration_of,
    estimated_scale,
    failed_ends,
    find_advantage_settings,
    gather_trajectories,
    normalising_scale,
    select_episodes,
    value_spikes,
)
from common.config import load_settings
from common.errors import UserError
from envs.rewards import RewardNormalizer

LENGTHS = [6, 4, 9, 5]  # including terminal rows, for 5, 3, 8 and 4 steps
GAMMA = 0.9
PRETRAINED = Path(__file__).parents[1] / "pretrained"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> RolloutFolder:
    """A recording of four episodes; the second has no rewards."""
    path = tmp_path_factory.mktemp("recording") / "data"
    write_recording(path, LENGTHS)
    folder, rng = RolloutFolder(path), np.random.default_rng(5)
    for number, length in enumerate(LENGTHS):
        steps = folder.steps(number)
        steps["reward"] = np.round(rng.uniform(0.1, 2, length), 2) * (number != 1)
        steps.loc[0, "reward"] = 0
        steps["done"] = steps["done"].astype(int)
        steps.to_csv(folder.steps_file(number))
    return folder


def test_trajectories_are_consecutive_episodes_without_terminal_rows_and_are_cut(folder):
    steps = gather_trajectories(folder, 2, 10)
    # The first trajectory has episodes 0 and 1 and two steps of episode 2; the second, episode 3.
    assert steps.episode.tolist() == [0] * 5 + [1] * 3 + [2] * 2 + [3] * 4
    assert steps.row.tolist() == [*range(5), *range(3), *range(2), *range(4)]
    assert steps.trajectory.tolist() == [0] * 10 + [1] * 4
    assert steps.bounds.tolist() == [0, 10, 14]
    assert np.flatnonzero(steps.ended).tolist() == [4, 7, 13]
    rows = [folder.steps(number) for number in range(4)]
    assert steps.earned[:5].tolist() == pytest.approx(rows[0]["reward"][1:].tolist())
    assert steps.earned[9] == pytest.approx(rows[2]["reward"][2])
    assert steps.next_value[[4, 9]].tolist() == pytest.approx([0, rows[2]["value"][2]])
    assert steps.level.tolist() == steps.episode.tolist()
    np.testing.assert_array_equal(steps.log_probs[5:8], folder.episode(1).log_probs[:3])
    part = steps.part(1)
    assert (len(part), part.bounds.tolist(), part.episode[0]) == (4, [0, 4], 3)


def test_advantages_are_the_sum_written_out_over_three_episodes_and_a_cut(folder):
    steps = gather_trajectories(folder, 2, 10)
    scale, expected = 0.5, []
    for number, last in enumerate((5, 3, 2)):
        rows = folder.steps(number)
        reward, value, done = (rows[name].to_numpy(float) for name in ("reward", "value", "done"))
        deltas = [scale * reward[t + 1] + (0 if done[t + 1] else GAMMA * value[t + 1]) - value[t]
                  for t in range(last)]
        expected += [sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[t:]))
                     for t in range(last)]
    # The next trajectory has no effect.
    np.testing.assert_allclose(advantages_of(steps, scale, GAMMA)[:10], expected, atol=1e-6)


def test_failures_come_first_when_they_are_asked_for(folder):
    assert select_episodes(folder) == [0, 1, 2, 3]
    assert select_episodes(folder, choose=FAILURES) == [1, 0, 2, 3]
    assert select_episodes(folder, (3, 1)) == [3, 1]
    with pytest.raises(UserError, match=r"has 4 finished episodes, but lacks \[7\]"):
        select_episodes(folder, (7,))


def test_rewards_are_scaled_as_in_training():
    """The scale is the standard deviation of the trainer's running return."""
    rng = np.random.default_rng(0)
    rows, normalizer = [], RewardNormalizer(1)
    for episode in range(200):
        length = int(rng.integers(5, 60))
        rewards = rng.random(length) * (rng.random(length) < 0.1)
        rewards[0] = 0
        rows.append(pd.DataFrame({"episode": episode, "reward": rewards}))
        for t in range(1, length):
            normalizer(rewards[t:t + 1], np.array([t == length - 1]))
    scale = 1 / np.sqrt(normalizer.variance)
    assert normalizer.scale == pytest.approx(scale, rel=1e-6)
    assert normalising_scale(pd.concat(rows, ignore_index=True)) == pytest.approx(scale, rel=1e-3)
    assert normalising_scale(pd.DataFrame({"episode": [0, 0], "reward": [0.0, 0]})) == 1


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
    for factor, slope, is_off in ((1, 1, False), (1 / 5, 5, True)):
        rows = recording_of_values(lambda to_come, factor=factor: to_come * factor)
        found = calibration_of(rows, 1.0, GAMMA)
        assert (found.slope, found.r2) == (pytest.approx(slope), pytest.approx(1))
        assert found.is_off == is_off and not calibration_of(rows, factor, GAMMA).is_off
    flat = calibration_of(recording_of_values(lambda to_come: 0 * to_come), 1.0, GAMMA)
    assert np.isnan(flat.slope) and flat.is_off
    # Two episodes, of which one failed, do not determine the slope, as its interval shows.
    rows = recording_of_values(lambda to_come: to_come, episodes=2)
    rows.loc[rows["episode"] == 1, "reward"] = 0
    uncertain = calibration_of(rows, 1.0, GAMMA)
    assert uncertain.low_95 == 0 and uncertain.high_95 == pytest.approx(1)
    assert uncertain.slope < 0.9 and not uncertain.is_off


def test_estimate_of_the_unit_is_that_of_the_values_at_rewarded_ends(unit=0.74):
    """This also holds if half of the episodes fail, so that values exceed the returns."""
    rows = recording_of_values(lambda to_come: unit * to_come, episodes=20)
    rows.loc[rows["episode"] % 2 == 0, "reward"] = 0
    assert estimated_scale(rows, GAMMA) == pytest.approx(unit, rel=1e-6)
    assert normalising_scale(rows) != pytest.approx(unit, rel=0.1)  # from this recording's rewards
    # The estimate from few rewarded ends is checked against the slope.
    rows = recording_of_values(lambda to_come: to_come, episodes=3)
    normalised = normalising_scale(rows)
    assert estimated_scale(rows, GAMMA) == 1 != normalised
    rows["value"] *= normalised
    assert estimated_scale(rows, GAMMA) == normalised


def test_success_of_a_shipped_agent_is_no_unexpected_failure(tmp_path):
    """In the unit of its agent file, the value one step before the cheese equals the reward."""
    file = PRETRAINED / "maze_anywhere" / "model.pth"
    assert record.main(["--model_file", str(file), "--env_name", "maze", "--num_episodes", "8",
                        "--seed", "5", "--no_action_noise", "--no_videos", "--logdir",
                        str(tmp_path)]) == 0
    recording = Recording(tmp_path / "data", load_agent(file), file)
    unit = find_advantage_settings(file, AUTO, recording.all_steps())
    run = load_settings(file.parent, TrainSettings).agent
    assert unit == AdvantageSettings(read_origin(file).reward_scale, run.gamma, run.lmbda)
    steps = gather_trajectories(recording.folder, 8, 1000)
    solved = steps.ended & (steps.earned > 0)
    assert solved.sum() >= 4
    advantages = advantages_of(steps, unit.reward_scale, unit.gamma, unit.lmbda)
    reward = 10 * unit.reward_scale
    assert np.abs(np.median(advantages[solved])) < 0.05 * reward
    assert not calibration_of(recording.all_steps(), unit.reward_scale, unit.gamma).is_off
    assert estimated_scale(recording.all_steps()) == pytest.approx(unit.reward_scale, rel=0.1)


def test_the_best_steps_are_one_an_episode(folder):
    steps = gather_trajectories(folder, 2, 10)
    scores = np.full(len(steps), -1.0)
    scores[[1, 3, 6, 11, 12]] = 2, 5, 3, 4, 4
    for most, best in ((16, [3, 11, 6]), (2, [3, 11])):  # none in the third episode
        assert best_of_episodes(scores, steps, most).tolist() == best


def test_spikes_are_within_episodes_and_failures_bring_nothing(folder):
    steps = gather_trajectories(folder, 2, 10)
    found = value_spikes(steps)
    assert found[2] == pytest.approx(abs(steps.value[2] - (steps.value[1] + steps.value[3]) / 2))
    assert np.flatnonzero(found == 0).tolist() == [0, 4, 5, 7, 8, 9, 10, 13]
    assert failed_ends(steps, 16).tolist() == [7]
    nothing = dataclasses.replace(steps, earned=np.zeros_like(steps.earned))
    assert failed_ends(nothing, 2).tolist() == [4, 7]
