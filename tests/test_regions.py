"""Cheese that is moved to a region of the maze when a level starts, in training and playing."""

import contextlib
import itertools
import json
import struct

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import FLOAT32, assert_same, record_arguments, small_policy, tiny_config, tiny_policy
from scipy.stats import chisquare

import evaluate
import record
import train
from agents.agent_file import AgentOrigin, agent_files, save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.goal_places import CheeseRegion, cheese_region
from agents.run_folder import TrainSettings
from agents.training import TrainingRun
from common.config import load_settings
from common.errors import UserError
from common.options import parse
from envs.level_state import LevelState
from envs.maze.grid import WALL
from envs.maze.state import WORLD_DIMS, MazeState, draw, stock_state
from envs.procgen_env import EnvConfig, LevelSlots, ProcgenVectorEnv

EASY = EnvConfig("maze", "easy")
ACTIONS = {(0, -1): 1, (-1, 0): 3, (1, 0): 5, (0, 1): 7}  # by (rows, columns) of a move
STEPS_AN_UPDATE = 8 * 32


@contextlib.contextmanager
def environments(config, num_envs, edit=None, seed=0):
    with contextlib.closing(ProcgenVectorEnv(config, num_envs, seed, edit=edit)) as env:
        yield env


def mazes_of(env):
    return [MazeState.parse(state) for state in env.get_state()]


def cheese_of(data):
    return MazeState.parse(data).grid.cheese


def with_level(state, seed):
    """Return a state with another level seed."""
    at = LevelState.parse(state).offset("current_level_seed")
    return state[:at] + struct.pack("<i", seed) + state[at + 4:]


@pytest.mark.parametrize("mode", WORLD_DIMS)
@pytest.mark.parametrize("size", [1, 5])
def test_the_cheese_is_in_its_region_and_all_else_is_stock(mode, size):
    config = EnvConfig("maze", mode, use_backgrounds=True)
    with environments(config, 30, CheeseRegion(size)) as env, environments(config, 30) as stock:
        frames, stock_frames = env.observe().frames, stock.observe().frames
        states, originals = env.get_state(), mazes_of(stock)
    for data, original, frame, stock_frame in zip(states, originals, frames, stock_frames):
        grid, old = MazeState.parse(data).grid, original.grid
        (cheese,) = grid.cheeses
        row, column = grid.inner(cheese)
        assert min(row, column) >= grid.maze_dim - size and (row, column) != (0, 0)
        assert max(row, column) < grid.maze_dim and old.is_free[cheese]
        assert data == original.with_cheese(cheese).to_bytes()  # only the cheese has changed
        assert np.array_equal(frame, draw([MazeState.parse(data)])[0])
        assert mode == "memory" or (cheese == old.cheese) == np.array_equal(frame, stock_frame)
    assert sum(cheese_of(data) != original.grid.cheese
               for data, original in zip(states, originals)) > 10


def test_the_cheese_is_decided_by_level_and_size_alone():
    """The position does not depend on the environment or on the order of levels."""
    edit = CheeseRegion(5)
    with environments(EASY, 12, edit) as env:
        env.observe()
        states = env.get_state()
    slots = LevelSlots(EASY, 1, edit=edit)
    for state in reversed(states):
        level = MazeState.parse(state).level_seed
        slots.start(0, level)
        assert np.array_equal(slots.frames[0], draw([MazeState.parse(state)])[0])
        assert cheese_of(edit(stock_state("easy", level).to_bytes())) == cheese_of(state)
        assert edit(state) == state  # editing twice has no further effect
    slots.close()
    large = stock_state("easy", 6).to_bytes()
    by_level, other_size = ([cheese_of(CheeseRegion(size)(with_level(large, level)))
                             for level in range(40)] for size in (5, 6))
    assert len(set(by_level)) > 8 and by_level != other_size


def test_every_free_square_of_the_region_is_equally_likely(size=3):
    large = stock_state("easy", 6)
    grid = large.grid
    squares = {square for square in grid.squares()
               if grid.region(size)[square] and square != grid.start}
    data, edit = large.to_bytes(), CheeseRegion(size)
    found = [cheese_of(edit(with_level(data, level))) for level in range(20 * len(squares))]
    counts = [found.count(square) for square in squares]
    assert sum(counts) == len(found)
    assert chisquare(counts).pvalue > 1e-3


def test_a_region_without_a_free_square_is_refused_in_a_sentence():
    state = stock_state("easy", 6)
    with pytest.raises(UserError, match="level 6 has no free square for the cheese"):
        CheeseRegion(1)(state.with_cheese(state.grid.squares()[5])
                        .with_cells({state.grid.corner: WALL}).to_bytes())


@pytest.mark.parametrize("config", [EnvConfig("maze", "easy", 0, 1), EnvConfig("bigfish", "hard")])
def test_an_edit_that_changes_nothing_changes_nothing(config):
    """Frames, rewards, ends of episodes and drawn levels are the same as without an edit."""
    calls, rng, starts = [], np.random.default_rng(0), 0

    def same(state):
        calls.append(state)
        return state

    with environments(config, 5, same) as edited, environments(config, 5) as plain:
        for _ in range(300):
            ours, stock = edited.observe(), plain.observe()
            for name in ("frames", "rewards", "first"):
                assert np.array_equal(getattr(ours, name), getattr(stock, name))
            starts += ours.first.sum()
            actions = rng.integers(15, size=5).astype(np.int32)
            edited.act(actions)
            plain.act(actions)
        edited.observe()
        plain.observe()
        assert edited.get_state() == plain.get_state()
    assert 5 < starts <= len(calls) <= starts + 5


def test_reward_and_flags_of_the_step_that_ended_an_episode_stay_as_they_were():
    """The mouse walks to the moved cheese; the next level is edited before its first frame."""
    edit = CheeseRegion(15)
    with environments(EASY, 6, edit, seed=4) as env:
        env.observe()
        grids = [state.grid for state in mazes_of(env)]
        moves = [[ACTIONS[b.row - a.row, b.column - a.column] for a, b in itertools.pairwise(
            grid.path(grid.start, grid.cheese))] for grid in grids]
        for step in range(max(map(len, moves))):
            env.act(np.array([row[step] if step < len(row) else 4 for row in moves], np.int32))
            observation = env.observe()
            ends = np.array([step + 1 == len(row) for row in moves])
            assert np.array_equal(observation.first, ends)
            assert np.array_equal(observation.rewards, 10.0 * ends)
            infos, states = env._env.get_info(), env.get_state()
            for i in np.flatnonzero(ends):
                maze = MazeState.parse(states[i])
                assert infos[i]["prev_level_complete"] == 1
                assert maze.level_seed != infos[i]["prev_level_seed"]
                assert edit(states[i]) == states[i]
                assert np.array_equal(observation.frames[i], draw([maze])[0])


def test_an_edit_on_which_procgen_would_end_the_process_is_refused():
    slots = LevelSlots(EASY, 1, edit=lambda state: state[:-4] + bytes(4))
    with pytest.raises(UserError, match="no end mark"):
        slots.start(0, 3)
    slots.close()


def settings_of(**changes):
    config = tiny_config()
    return TrainSettings("t", "tiny", EnvConfig("maze", "easy", 0, 60), config, 0,
                         2 * STEPS_AN_UPDATE, 1, 1, "", "float32", 2, **changes)


def assert_cheese_in(states, size):
    for state in states:
        grid = MazeState.parse(state).grid
        assert grid.region(size)[grid.cheese]


def test_a_run_with_regions_stops_and_resumes_exactly(tmp_path):
    settings = settings_of(cheese_region=3, val_cheese_region=1)
    whole, half = (TrainingRun(tmp_path / name, settings, FLOAT32, CheeseRegion(3), CheeseRegion(1))
                   for name in ("whole", "half"))
    assert whole.train() == 0
    half._advance()
    assert_cheese_in(half.collector.env.get_state(), 3)
    assert_cheese_in(half.val_collector.env.get_state(), 1)
    half.save()
    del half  # releases its lock
    assert train.main(["--resume", str(tmp_path / "half"), "--device", "cpu"]) == 0
    weights, logs = zip(*((torch.load(agent_files(folder)[-1], weights_only=True),
                           pd.read_csv(folder / "log.csv").drop(columns="wall_time"))
                          for folder in (whole.folder, tmp_path / "half")))
    assert_same(*weights)
    pd.testing.assert_frame_equal(*logs, check_exact=True)
    assert logs[0]["num_episodes"].iloc[-1] > logs[0]["num_episodes"].iloc[0] > 0


def test_a_new_run_has_the_regions_of_its_flags_and_its_card_says_so(tmp_path):
    assert train.main([
        "--exp_name", "t", "--env_name", "maze", "--param_name", "tiny", "--num_timesteps", "1",
        "--device", "cpu", "--precision", "float32", "--seed", "4", "--cheese_region", "3",
        "--val_cheese_region", "1", "--logdir", str(tmp_path)]) == 0
    (folder,) = (tmp_path / "procgen" / "maze" / "t").iterdir()
    state = torch.load(folder / "resume.pth", weights_only=True)
    for name, size in (("train", 3), ("val", 1)):
        assert_cheese_in([each.numpy().tobytes() for each in state[name]["env"]], size)
    assert ("In training the cheese lay in the last 3 rows and columns of the maze, in validation "
            "in the last 1 rows") in (folder / "model_card.md").read_text()


def test_run_folders_without_a_region_or_a_width_mean_anywhere_and_one(tmp_path):
    settings = settings_of()
    run = TrainingRun(tmp_path, settings, FLOAT32)
    file = tmp_path / "hyperparameters.yml"
    content = yaml.safe_load(file.read_text())
    assert content.pop("cheese_region") == content.pop("val_cheese_region") == 0
    assert content["agent"].pop("width") == 1
    file.write_text(yaml.safe_dump(content))
    assert load_settings(run.folder, TrainSettings) == settings


@pytest.mark.parametrize("script", [train, record])
def test_regions_of_other_games_are_refused_in_a_sentence(script, agent_path, tmp_path, capsys):
    agent = [] if script is train else ["--agent_file", str(agent_path)]
    assert script.main([*agent, "--logdir", str(tmp_path / "out"), "--device", "cpu", "--env_name",
                        "coinrun", "--cheese_region", "5"]) == 2
    assert "no cheese in coinrun" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode, largest", [("easy", 15), ("exploration", 25)])
def test_larger_worlds_take_larger_regions(mode, largest):
    config = EnvConfig("maze", mode)
    assert cheese_region(config, largest) == CheeseRegion(largest)
    assert cheese_region(config, 0) is None
    with pytest.raises(UserError, match=f"between 0 and {largest}"):
        cheese_region(config, largest + 1)


@pytest.mark.parametrize("flags, game, mode, backgrounds, region", [
    (["--env_name", "maze"], "maze", "hard", True, 3),
    (["--no_backgrounds"], "maze", "hard", False, 3),
    (["--distribution_mode", "easy", "--cheese_region", "0"], "maze", "easy", True, 0),
    (["--env_name", "fruitbot"], "fruitbot", "easy", False, 0)])
def test_an_agent_plays_what_it_was_trained_on_unless_flags_say_otherwise(
        flags, game, mode, backgrounds, region, tmp_path):
    path = tmp_path / "agent.pth"
    save_agent(path, tiny_policy(), origin=AgentOrigin(
        use_backgrounds=True, env_name="maze", distribution_mode="hard", cheese_region=3))
    options = parse(evaluate.EvaluateOptions, ["--model_file", str(path), *flags])
    assert options.game(path) == (EnvConfig(game, mode, use_backgrounds=backgrounds),
                                  CheeseRegion(region) if region else None)


def test_playing_takes_the_same_region(tmp_path, capsys):
    """In evaluation and recording, a level has the same cheese."""
    level, policy, agent_path = 0, small_policy("nature"), tmp_path / "model_0.pth"
    save_agent(agent_path, policy)
    maze = MazeState.parse(CheeseRegion(1)(stock_state("easy", level).to_bytes()))
    assert maze.grid.cheese != stock_state("easy", level).grid.cheese
    flags = ["--env_name", "maze", "--start_level", str(level), "--num_levels", "1",
             "--cheese_region", "1"]
    assert record.main(record_arguments(agent_path, tmp_path, 1, "--no_videos", *flags)) == 0
    assert json.loads((tmp_path / "data" / "recording.json").read_text())["cheese_region"] == 1
    frames = np.load(tmp_path / "data" / "episode_00000" / "ob.npy")
    assert np.array_equal(np.moveaxis(frames[0], 0, -1), draw([maze])[0])

    env = EnvConfig("maze", "easy", level, 1)
    (episode,) = play_episodes(policy, FLOAT32, env, [(0, level)], 3, 1,
                               PlayOptions(edit=CheeseRegion(1)))
    assert evaluate.main(["--agent_file", str(agent_path), "--output",
                          str(tmp_path / "result.json"), "--num_episodes", "1", "--num_envs", "1",
                          "--device", "cpu", "--precision", "float32", "--seed", "3",
                          "--training_levels", *flags]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["cheese_region"], result["mean_length"]) == (1, episode.length)
    assert "on easy maze, cheese in the last 1 rows and columns" in capsys.readouterr().out
