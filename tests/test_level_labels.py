"""Labels of recorded steps, compared with the real game."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from conftest import killed_at, record_arguments, small_policy

import record
from agents.agent_file import save_agent
from agents.episodes import SOLVED
from agents.failures import recorded_causes
from agents.object_masks import ObjectPainter
from agents.replay import level_states
from agents.rollout_files import RolloutFolder
from analysis import level_labels
from analysis.memory.labels import LEVEL_LABELS, read_examples
from common.errors import UserError
from common.results import ResultStore
from envs.labels import ON_GROUND, label_names, labelled_kinds, state_labels
from envs.level_state import LevelState
from envs.procgen_env import GAMES_OF_MODE, EnvConfig, LevelSlots, StateView

STILL, UP, RIGHT, HOP = 4, 5, 7, 8
MOVES = (1, 2, 5, 7, 7, 7, 8, 8, 8)


def played(game: str, level: int, steps: int = 120, mode: str = "hard") -> list[LevelState]:
    """Return states of random play on a level, mostly to the right."""
    rng, states = np.random.default_rng(level), []
    with contextlib.closing(LevelSlots(EnvConfig(game, mode), 1)) as slots:
        slots.start(0, level)
        for _ in range(steps):
            states.append(LevelState.parse(slots.state(0)))
            if slots.step(0, int(rng.choice(MOVES)))[1]:
                break
    return states


def after(view: StateView, state: LevelState, action: int) -> LevelState | None:
    """Return the state after an action; None if it ends the episode."""
    view.set(state.to_bytes())
    return None if view.step(action)[0] else LevelState.parse(view.state())


def charge(state: LevelState) -> float:
    """Return the strength of the jump that ninja's player is charging."""
    return float(np.frombuffer(state.tail, "<f4")[6])


@pytest.mark.parametrize("game", GAMES_OF_MODE["easy"])
def test_every_game_has_the_labels_of_its_names(game):
    labels = state_labels(played(game, 1, 2, "easy")[-1])
    assert tuple(labels) == label_names(game)
    assert "agent_dx" not in labels and {"velocity_x", "velocity_y"} <= set(labels)
    assert (ON_GROUND in labels) == (game in ("coinrun", "ninja"))


@pytest.mark.parametrize("game", ["coinrun", "ninja"])
def test_the_velocity_is_the_displacement_unless_an_obstacle_stopped_the_player(game):
    blocked, steps = 0, 0
    for level in range(4):
        states = played(game, level)
        for before, now in itertools.pairwise(states):
            labels = state_labels(now)
            moved = [now.player[axis] - before.player[axis] for axis in "xy"]
            velocity = [labels["velocity_x"], labels["velocity_y"]]
            blocked += not np.allclose(velocity, moved, atol=1e-4)
            steps += 1
    assert steps > 100 and blocked < 0.2 * steps


@pytest.mark.parametrize(("game", "levels"), [("coinrun", range(8)), ("ninja", range(4))])
def test_a_jump_starts_exactly_when_the_player_is_on_the_ground(game, levels):
    """In coinrun a jump lifts the player at once; in ninja it is charged first."""
    found = {True: 0, False: 0}
    with contextlib.closing(StateView(EnvConfig(game, "hard"))) as view:
        for state in [state for level in levels for state in played(game, level)]:
            up, still = after(view, state, UP), after(view, state, STILL)
            if up is None or still is None:
                continue
            jumps = (charge(up) > 0 if game == "ninja"
                     else up.player["vy"] > still.player["vy"])
            on_ground = state_labels(state)[ON_GROUND] == 1
            assert jumps == on_ground
            found[on_ground] += 1
    assert min(found.values()) > 30


def test_the_player_stands_on_boxes(monkeypatch):
    """Without boxes in the rule, a jump from a box would be missed."""
    on_box = [state for level in range(12) for state in played("coinrun", level)
              if np.frombuffer(state.tail, "<i4")[4] and state.player["vy"] == 0]
    assert on_box
    monkeypatch.setattr("envs.labels._GROUND_CELLS", {"coinrun": ()})
    assert all(state_labels(state)[ON_GROUND] for state in on_box)


@pytest.mark.parametrize("game", ["coinrun", "ninja", "leaper", "maze"])
def test_kinds_in_view_are_those_whose_pixels_change_when_they_are_not_drawn(game):
    kinds = labelled_kinds(game)
    agree, total = 0, 0
    with contextlib.closing(ObjectPainter(EnvConfig(game, "hard"), kinds)) as painter:
        for state in [state for level in range(4) for state in played(game, level)[::6]]:
            labels = state_labels(state)
            for kind, mask in zip(kinds, painter.draw(state).masks):
                seen = labels[f"{kind.name}_in_view"] == 1
                if not kind.trails:
                    assert seen or not mask.any()  # every drawn kind is in view
                assert np.isnan(labels[f"{kind.name}_dx"]) != seen
                agree, total = agree + (seen == mask.any()), total + 1
    assert agree > 0.9 * total  # the others are occluded, trails, or less than a pixel in the view


def test_the_offset_is_that_of_the_nearest_object():
    counts = set()
    for state in [state for level in range(12) for state in played("coinrun", level)[::10]]:
        labels, player = state_labels(state), state.player
        saws = state.entities[state.entities["type"] == 2]
        distances = np.hypot(saws["x"] - player["x"], saws["y"] - player["y"])
        if labels["saw_in_view"]:
            assert np.hypot(labels["saw_dx"], labels["saw_dy"]) == pytest.approx(distances.min())
            counts.add(min((distances < 6).sum(), 2))
        else:
            assert not (distances < 6).any()
    assert counts >= {1, 2}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A recording of an untrained agent that mostly hops to the right, and its labels."""
    path = tmp_path_factory.mktemp("labels")
    policy = small_policy("nature")
    with torch.no_grad():
        policy.fc_policy.weight *= 0.02
        policy.fc_policy.bias[HOP] = 3
    save_agent(path / "model.pth", policy)
    assert record.main(record_arguments(
        path / "model.pth", path, 12, "--no_videos", "--positions", "--no_action_noise",
        "--env_name", "coinrun", "--distribution_mode", "hard", "--num_levels", "0")) == 0
    assert level_labels.main(["--data_dir", str(path / "data"),
                              "--output_dir", str(path / "labels")]) == 0
    return path


@pytest.fixture(scope="module")
def examples(labelled):
    return read_examples(labelled / "data", labelled / "labels", labelled / "model.pth")


def test_examples_are_the_recorded_steps_with_the_labels_of_their_states(labelled, examples):
    folder, begin = RolloutFolder(labelled / "data"), 0
    causes = recorded_causes(folder, folder.finished())
    assert causes
    for episode in folder.finished():
        arrays = folder.episode(episode)
        length = len(arrays.steps) - 1
        rows = slice(begin, begin + length)
        begin += length
        assert (examples.episode[rows] == episode).all()
        assert (examples.level[rows] == arrays.steps["level_seed"].iloc[0]).all()
        for values, expected in (
                (examples.step, np.arange(length)),
                (examples.hidden_out, arrays.hidden_states[1:-1]),
                (examples.actions, arrays.steps["action"][:-1]),
                (examples.labels["steps_to_end"], np.arange(length, 0, -1))):
            np.testing.assert_array_equal(values[rows], expected)
        np.testing.assert_array_equal(examples.frames(np.arange(rows.start, rows.stop)),
                                      arrays.frames[:-1])
        labels = examples.labels[rows]
        for row, state in level_states(folder, episode, [0, length // 2, length - 1]):
            for name, value in state_labels(state).items():
                np.testing.assert_equal(labels[name].iloc[row], np.float32(value))
        assert (labels["fails"] == (episode in causes)).all()
        for hazard in ("saw", "enemy_left", "enemy_right", "lava"):
            assert (labels[f"fails_by_{hazard}"] == (causes.get(episode) == hazard)).all()
    assert begin == len(examples) == len(examples.labels)
    rows = np.random.default_rng(0).permutation(len(examples))[:7]
    np.testing.assert_array_equal(examples.frames(rows),
                                  np.concatenate([examples.frames(rows[i:i + 1])
                                                  for i in range(7)]))


def test_earlier_and_later_values_stay_within_their_episode(examples):
    """Compare with a slow loop over the steps."""
    in_view = examples.labels["saw_in_view"].to_numpy()
    ground = examples.labels[ON_GROUND].to_numpy()
    same = examples.episode[:, None] == examples.episode
    left_view = set()
    for k in (1, 2, 3, 8):
        expected = {"before": [], "ahead": [], "left": []}
        for row in range(len(examples)):
            has_past = row >= k and same[row, row - k]
            has_future = row + k < len(examples) and same[row, row + k]
            expected["before"].append(in_view[row - k] if has_past else np.nan)
            expected["ahead"].append(examples.actions[row + k] if has_future else -1)
            left = np.nan
            if has_past and in_view[row - k] and not in_view[row - k + 1:row + 1].any():
                left = 1
            elif has_past and not in_view[row - k] and not in_view[row]:
                left = 0
            expected["left"].append(left)
        np.testing.assert_array_equal(examples.before("saw_in_view", k), expected["before"])
        np.testing.assert_array_equal(examples.action_ahead(k), expected["ahead"])
        np.testing.assert_array_equal(examples.left_view("saw", k), expected["left"])
        left_view |= set(expected["left"])
    assert left_view >= {0, 1}
    np.testing.assert_array_equal(examples.action_ahead(0), examples.actions)
    np.testing.assert_array_equal(examples.before("saw_in_view", 0), in_view)
    since = [next((row - earlier for earlier in range(row - 1, -1, -1) if same[row, earlier]
                   and examples.actions[earlier] in (2, 5, 8) and ground[earlier]), np.nan)
             for row in range(len(examples))]
    np.testing.assert_array_equal(examples.labels["steps_since_jump"], since)


def test_the_tables_describe_the_episodes_and_labels(labelled, examples):
    store = ResultStore(labelled / "labels", LEVEL_LABELS)
    episodes, distribution = store.read("episodes"), store.read("distribution")
    assert episodes["length"].sum() == len(examples)
    assert (episodes["cause"] != SOLVED).sum() == examples.labels.groupby(
        examples.episode)["fails"].first().sum()
    means = examples.labels[list(distribution["label"])].mean()
    np.testing.assert_allclose(distribution["mean"], means, rtol=1e-4)
    assert tuple(distribution["label"]) == label_names("coinrun")


def test_a_killed_run_and_shards_equal_one_run(labelled, tmp_path):
    def contents(path):
        return {file.name: file.read_bytes() for file in path.glob("*.*")
                if file.name != ".lock"}

    expected = contents(labelled / "labels")

    def label(folder, *more):
        return level_labels.main(["--data_dir", str(labelled / "data"),
                                  "--output_dir", str(tmp_path / folder), *more])

    with killed_at(ResultStore, "write", 3):
        assert label("killed") == 130
    assert label("killed") == 0 and contents(tmp_path / "killed") == expected
    for part in ("2/2", "1/2"):
        assert label("shards", "--shard", part) == 0
    assert label("shards", "--join") == 0 and contents(tmp_path / "shards") == expected


def test_labels_of_another_recording_or_agent_are_refused(labelled, tmp_path, capsys):
    save_agent(tmp_path / "other.pth", small_policy())
    with pytest.raises(UserError, match="an agent other than"):
        read_examples(labelled / "data", labelled / "labels", tmp_path / "other.pth")
    ResultStore(tmp_path / "labels", LEVEL_LABELS).open({"recording_sha256": "another"})
    with pytest.raises(UserError, match="labels of a different recording"):
        read_examples(labelled / "data", tmp_path / "labels", labelled / "model.pth")
    assert level_labels.main(["--data_dir", str(labelled / "data"),
                              "--output_dir", str(tmp_path / "labels")]) == 2
    assert "another" in capsys.readouterr().err
