"""The agent's value against the returns that follow, in the game and in the simulator."""

import numpy as np
import pandas as pd
import pytest
from conftest import SHIPPED

from agents.replay import level_states
from analysis import expected_returns as script
from analysis.expected_returns import (
    ALL,
    EVERY,
    START,
    imagined_returns,
    recorded_returns,
    summarise,
)
from envs.objects import in_view, objects_of
from generative.surroundings import Rollouts

GAMMA, STEPS = 0.9, 6


def test_returns_of_recorded_frames(hard_recording):
    table = recorded_returns(hard_recording, GAMMA, 2.0, STEPS)
    episode = int(table["episode"].iloc[-1])
    rows, steps = table[table["episode"] == episode], hard_recording.steps(episode)
    last = len(steps) - 1
    assert steps["reward"].iloc[last] == 10 and not steps["reward"].iloc[:last].any()
    assert rows["frame"].tolist() == list(range(0, last, EVERY))
    np.testing.assert_allclose(rows["value"], steps["value"].iloc[rows["frame"]] / 2)
    left = last - rows["frame"].to_numpy()  # actions to the coin
    np.testing.assert_allclose(rows["return"], 10 * GAMMA ** (left - 1))
    later = steps["value"].to_numpy()[np.minimum(rows["frame"] + STEPS, last)] / 2
    np.testing.assert_allclose(rows["steps"], np.where(
        left <= STEPS, 10 * GAMMA ** (left - 1), GAMMA**STEPS * later))
    [coin] = [kind for kind in objects_of("coinrun") if kind.name == "coin"]
    shown = {row: in_view(state, coin) for row, state in level_states(
        hard_recording, episode, rows["frame"].tolist())}
    assert {row: "coin" in words.split() for row, words in zip(rows["frame"], rows["shown"])} == (
        shown)
    assert set(shown.values()) == {True, False}


def test_returns_of_simulations():
    """A coin after two actions, a death, and no end."""
    alive = np.array([[1, 1, 1], [1, 1, 1], [0, 0.25, 1.0]])
    death = np.array([[0, 0, 0], [0, 0, 0], [0, 0.75, 0.0]])
    values = np.full((3, 3), 8.0)
    rollouts = Rollouts(values, values, alive, death, np.zeros((3, 3, 2)))
    np.testing.assert_allclose(imagined_returns(rollouts, 10.0, GAMMA, 2.0), [
        10 * GAMMA, 0.25 * GAMMA**2 * 4, GAMMA**2 * 4])


def test_planted_optimism_is_found_where_it_is():
    rng, number = np.random.default_rng(0), 400
    returns = 10.0 * (rng.random(number) < 0.7)
    is_saw = rng.random(number) < 0.5
    table = pd.DataFrame({
        "level_seed": np.arange(number) // 2, "frame": np.arange(number) % 2, "return": returns,
        "value": returns + 2 * is_saw, "steps": returns, "imagined": np.nan,
        "shown": np.where(is_saw, "coin saw", "none of them")})
    rows = summarise(table, 0).set_index(["shown", "quantity"])
    found = rows["mean"]
    assert found["saw", "optimism"] == found["coin", "optimism"] == pytest.approx(2)
    assert found["none of them", "optimism"] == 0
    assert rows.loc[(ALL, "optimism"), "low_95"] > 0.8
    assert rows.loc[(START, "optimism"), "frames"] == 200
    assert found["saw", "explained"] == pytest.approx(1)  # a constant difference explains all
    constant = summarise(table.assign(value=7.0), 0).set_index(["shown", "quantity"])
    assert constant.loc[(ALL, "explained"), "mean"] == pytest.approx(0, abs=1e-9)
    assert "gap" not in {quantity for _, quantity in rows.index}  # no simulations


def test_the_script_plays_on_and_resumes(hard_recording, tmp_path, monkeypatch):
    def arguments(*more):
        return [*map(str, (
            *SHIPPED, "--data_dir", hard_recording.path, "--output_dir", tmp_path / "out",
            "--num_views", 4, "--num_worlds", 2, "--num_steps", STEPS, "--precision", "float32",
            "--device", "cpu", "--unseen", *more))]

    assert script.main(arguments()) == 0
    summary = pd.read_csv(tmp_path / "out" / "summary.csv")
    rows = summary.set_index(["shown", "quantity"])
    assert rows.loc[(ALL, "imagined_gap"), "frames"] == 4
    assert 2 < rows.loc[(ALL, "imagined"), "mean"] <= 11
    report = (tmp_path / "out" / "report.md").read_text()
    assert "the agent is" in report and "too few levels to tell" in report
    (tmp_path / "out" / "views" / "00002.csv").unlink()
    places, real = [], script.imagined_returns
    monkeypatch.setattr(script, "imagined_returns", lambda *arguments: (
        places.append(1), real(*arguments))[1])
    assert script.main(arguments()) == 0
    assert len(places) == 1
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out" / "summary.csv"), summary)
