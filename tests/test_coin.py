"""Coin of CoinRun placed elsewhere (``--coin``), and the study of coin or wall."""

import contextlib
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, record_arguments, tiny_policy
from scipy.stats import chisquare

import evaluate
import record
import train
from agents.agent_file import AgentOrigin, agent_files, read_origin, save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.goal_places import GoalGameOptions
from agents.networks import Embedder, Policy, blind_policy
from agents.replay import recorded_game, recorded_levels, replay
from agents.rollout_files import RolloutFolder
from analysis import coin_or_wall
from analysis.coin_or_wall import (
    LOGITS,
    NEVER,
    edit_of,
    first_touch,
    marked_squares,
    variants,
)
from analysis.coin_results import BEHIND, NOT_BEHIND, RIGHTWARD, SETTINGS, SIGHT_END
from common.errors import UserError
from envs.coin import ANYWHERE, NONE, START, CoinPlace, coin_of, coin_squares, last_column
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots, first_states

HARD = EnvConfig("coinrun", "hard")
LEVELS = range(30)
RIGHT, LEFT = 7, 1


@pytest.fixture(scope="module")
def stock():
    return [state for state, _ in first_states(HARD, LEVELS)]


@pytest.mark.parametrize("place", [ANYWHERE, NONE, START, "9"])
def test_only_the_coin_moves_and_a_second_edit_changes_nothing(stock, place):
    edit = CoinPlace(place)
    for data in stock:
        edited, old, new = edit(data), LevelState.parse(data), LevelState.parse(edit(data))
        squares = [tuple(square) for square in coin_squares(old).tolist()]
        assert edit(edited) == edited and coin_of(old) == squares[-1]
        assert squares[-1][1] == last_column(old) == last_column(new)
        assert np.isin(old.grid[new.grid != old.grid], (1, 100)).all()
        if place == NONE:
            assert coin_of(new) is None
        elif place == START:
            assert coin_of(new) == (1, 1) and new.player["x"] == 4.5
        else:
            assert coin_of(new) in squares
        if place == "9":
            assert coin_of(new)[1] == min([s[1] for s in squares if s[1] >= 10],
                                          default=last_column(old))
        if place != START:
            assert (new.entities == old.entities).all()


def test_every_square_on_the_way_is_equally_likely_and_none_is_a_hazard(stock):
    state = LevelState.parse(stock[7])  # has pits with saws
    squares = coin_squares(state)
    saws = {(int(e["y"]), int(e["x"])) for e in state.entities if e["type"] == 2}
    assert len(saws) > 8 and not saws & set(map(tuple, squares.tolist()))
    assert not [row for row, column in squares if row == 1 and column > 4]
    found = []
    for level in range(20 * len(squares)):
        step = state.step.copy()
        step["current_level_seed"] = level
        moved = CoinPlace(ANYWHERE)(dataclasses.replace(state, step=step).to_bytes())
        found.append(coin_of(LevelState.parse(moved)))
    counts = [found.count(tuple(square)) for square in squares.tolist()]
    assert sum(counts) == len(found) and chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("places, is_there", [([START], True), ([START, NONE], False)])
def test_the_moved_coin_gives_the_reward_and_ends_the_level(places, is_there):
    with contextlib.closing(LevelSlots(HARD, 1, edit=edit_of(places, 30))) as slots:
        slots.start(0, 3)
        steps = [slots.step(0, LEFT)]
        while not steps[-1][1]:
            steps.append(slots.step(0, LEFT))
        assert (len(steps) < 20) == is_there == bool(slots.level_complete[0])
        assert steps[-1] == (10.0 * is_there, True)
        assert sum(reward for reward, _ in steps[:-1]) == 0


def test_a_blind_player_takes_the_coin_only_if_it_lies_on_its_way():
    """The way is that in the same level without a coin."""
    levels = list(enumerate(LEVELS))
    marks = marked_squares(HARD, levels, (ANYWHERE,))
    with_coin, without = ({
        episode.number: episode for episode in play_episodes(
            blind_policy(LOGITS[RIGHTWARD]), FLOAT32, HARD, levels, 0, 16, PlayOptions(
                edit=edit_of([place], 80), keep_frames=False, keep_positions=True))}
        for place in (ANYWHERE, NONE))
    taken = [number for number in marks if with_coin[number].level_complete]
    assert 3 < len(taken) < len(levels) - 3
    for number, mark in marks.items():
        touched = first_touch(without[number].positions, mark)
        assert touched == (with_coin[number].length if number in taken else NEVER)


def test_variants_of_the_end_differ_in_coin_and_wall(stock):
    data = CoinPlace(NONE)(stock[4])
    states = [LevelState.parse(state) for _, state in variants(data, SIGHT_END, (1, 3))]
    assert [coin_of(state) for state in states] == [None, end := coin_of(
        LevelState.parse(stock[4])), None, end]
    last = last_column(LevelState.parse(data))
    assert [last_column(state) - last for state in states] == [0, 0, 8, 8]


@pytest.mark.slow
def test_the_study_finds_nothing_in_a_blind_agent(tmp_path):
    """Two shards play the conditions, and are then joined."""
    agent = tmp_path / "blind.pth"
    save_agent(agent, blind_policy(LOGITS[RIGHTWARD]), origin=AgentOrigin(
        env_name="coinrun", distribution_mode="hard"))
    flags = ["--agent_file", str(agent), "--num_episodes", "12", "--max_steps", "40", "--num_envs",
             "12", "--device", "cpu", "--output_dir", str(tmp_path / "study")]
    for part in (["--shard", "1/2"], ["--shard", "2/2"], ["--join"]):
        assert coin_or_wall.main([*flags, *part]) == 0
    table = pd.read_csv(tmp_path / "study" / "effects.csv").set_index(["condition", "outcome"])
    assert np.allclose(table.loc[["anywhere_none", "behind_not", "coin_behind"], "effect"], 0)
    assert not table.drop("behind_ordinary", level="condition")["claimed"].any()
    assert table.loc[("anywhere_none", "passed"), "altered"] > 0
    assert table.loc[("behind_ordinary", "taken"), "altered"] == 0
    assert table.loc[("behind_not", "right"), "altered"] == pytest.approx(1)
    assert "takes it before the end in" in (tmp_path / "study" / "report.md").read_text()


class CoinSeeker(Embedder):
    """Numbers of gold pixels in the left half and in the right half of the image (N, 2)."""

    def __init__(self):
        super().__init__(2, {})

    def forward(self, images):
        red, green, blue = images.movedim(1, 0)  # each (N, H, W)
        gold = ((red > 0.9) & (green > 0.7) & (green < 0.9) & (blue < 0.2)).float()
        return torch.stack([half.sum(dim=(1, 2)) for half in (gold[:, :, :32], gold[:, :, 32:])],
                           dim=1)


def test_the_study_sees_that_a_planted_agent_goes_for_the_coin_and_values_it():
    """The agent goes left if there is gold on the left, and else runs to the right and jumps."""
    policy = Policy(CoinSeeker(), None)
    with torch.no_grad():
        policy.fc_policy.weight[:], policy.fc_policy.bias[:] = 0, -100
        policy.fc_policy.bias[[RIGHT, 8]], policy.fc_policy.weight[LEFT, 0] = 0, 1000
        policy.fc_value.weight[:] = 1
    options = coin_or_wall.CoinOptions(agent_file="none", max_steps=50, num_envs=12)
    levels = list(enumerate(LEVELS[:12]))
    behind, not_behind, none = (coin_or_wall.play(policy, FLOAT32, HARD, levels, SETTINGS[name],
                                                  options) for name in (BEHIND, NOT_BEHIND, NONE))
    assert behind[0]["passed"].mean() == 1 and not_behind[0]["passed"].mean() < 0.2
    values = none[1].pivot(index=["sight", "number"], columns="variant", values="value").loc["end"]
    assert len(values) > 2 and (values["coin"] > values["no coin"]).all()
    assert (values["no wall, coin"] > values["no wall, no coin"]).all()
    assert np.allclose(values["no coin"], values["no wall, no coin"])


@pytest.mark.parametrize("script", [train, record])
def test_a_coin_in_other_games_is_refused_in_a_sentence(script, agent_path, tmp_path, capsys):
    agent = [] if script is train else ["--agent_file", str(agent_path)]
    flags = [*agent, "--logdir", str(tmp_path / "out"), "--device", "cpu"]
    assert script.main([*flags, "--env_name", "maze", "--coin", "none"]) == 2
    assert "no coin in maze" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="N at least 2, not '1'"):
        GoalGameOptions(coin="1")


def test_a_recording_keeps_the_place_of_the_coin_and_can_be_replayed(tmp_path, capsys):
    agent = tmp_path / "model_0.pth"
    save_agent(agent, tiny_policy(), origin=AgentOrigin(
        env_name="coinrun", distribution_mode="hard", coin=START))
    flags = ["--env_name", "coinrun", "--start_level", "5", "--num_levels", "1"]
    assert record.main(record_arguments(agent, tmp_path, 1, "--no_videos", *flags)) == 0
    folder = RolloutFolder(tmp_path / "data")
    assert folder.description()["coin"] == START
    slots = recorded_levels(folder)[1]
    assert len(list(replay(slots, 0, folder, 0, 5))) == 6  # raises if a frame differs
    slots.close()
    with pytest.raises(UserError, match="coin"):
        recorded_game(folder)
    assert evaluate.main(["--agent_file", str(agent), "--num_episodes", "1", "--device", "cpu",
                          "--coin", "12", "--output", str(tmp_path / "result.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["coin"] == "12"
    assert "on hard coinrun, coin 12 squares from the start" in capsys.readouterr().out


def test_a_trained_agent_knows_where_the_coin_was(tmp_path):
    assert train.main([
        "--exp_name", "t", "--env_name", "coinrun", "--param_name", "tiny", "--num_timesteps", "1",
        "--device", "cpu", "--precision", "float32", "--seed", "4", "--coin", "none", "--logdir",
        str(tmp_path)]) == 0
    (folder,) = (tmp_path / "procgen" / "coinrun" / "t").iterdir()
    assert read_origin(agent_files(folder)[-1]).coin == NONE
    card = (folder / "model_card.md").read_text()
    assert "Levels have no coin." in card and "--coin none" in card
