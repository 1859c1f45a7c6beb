"""Facts about all games, compared with the real games: keys, objects, hazards and cameras."""

import contextlib
import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from agents.episodes import Evaluation
from common.errors import UserError
from common.game_constants import ACTION_LABELS, GAMES, pixels_per_square
from common.video import mark_action
from envs.env_config import GAMES_OF_MODE, EnvConfig
from envs.level_state import LevelState
from envs.objects import GameObject, action_labels, objects_of, undrawn
from envs.procgen_env import LevelSlots, StateView
from generative.saliency.gradients import saliency_functions
from generative.sampling import manual_actions

STAY = 4
NEW_GAMES = ("heist", "jumper", "caveflyer", "climber", "bigfish", "bossfight", "dodgeball",
             "fruitbot", "miner", "starpilot", "chaser", "plunder")
# Kinds that few frames show.
RARE = {"caveflyer": {"goal", "bullet", "enemy"}, "dodgeball": {"enemy_ball"},
        "fruitbot": {"present"}, "chaser": {"enemy"},
        "plunder": {"panel", "explosion"}, "starpilot": {"enemy_bullet"}}


def played(game, mode, level, steps, every=1):
    """Return states of random play on a level."""
    rng, states = np.random.default_rng(level), []
    with contextlib.closing(LevelSlots(EnvConfig(game, mode), 1)) as slots:
        slots.start(0, level)
        for step in range(steps):
            if step % every == 0:
                states.append(LevelState.parse(slots.state(0)))
            if slots.step(0, int(rng.integers(0, 15)))[1]:
                break
    return states


def entities(state):
    """Count the entities by type, speed and place, without the player."""
    return Counter(tuple(np.round([entity[name] for name in ("type", "vx", "vy", "x", "y")], 2))
                   for entity in state.entities if entity["type"])


@pytest.mark.parametrize("game", GAMES)
def test_keys_are_named_if_they_do_something(game):
    """Fails if a key of a game has the name of another, or no name."""
    states = [state for level in (0, 1) for state in played(game, "easy", level, 13, 6)]
    changed = set()
    with contextlib.closing(LevelSlots(EnvConfig(game, "easy"), 1)) as slots:
        for state in states:
            after = {}
            for action in (STAY, *range(9, 15)):
                slots.restore(0, state.to_bytes())
                if not slots.step(0, action)[1]:
                    after[action] = entities(LevelState.parse(slots.state(0)))
            changed |= {action for action, found in after.items() if found != after.get(STAY)}
    labels = action_labels(game)
    assert changed == {action for action in range(9, 15) if labels[action] != no_effect(action)}
    assert len(set(labels)) == 15


def no_effect(action):
    return f"no effect ({action})"


@pytest.mark.parametrize("game", ["coinrun", "maze"])
def test_keys_without_effect_do_the_same_as_no_move(game):
    """Fails if a key is named "no effect" although the game, the player included, goes on
    otherwise."""
    with contextlib.closing(LevelSlots(EnvConfig(game, "hard"), 1)) as slots:
        for state in played(game, "hard", 0, 30, 5):
            after = []
            for action in (STAY, *range(9, 15)):
                slots.restore(0, state.to_bytes())
                for _ in range(3):
                    slots.step(0, action)
                after.append({name: np.asarray(value).tolist() for name, value in
                              LevelState.parse(slots.state(0)).fields().items()
                              if name not in ("step.action", "drawing.special_action")})
            assert after == [after[0]] * len(after)
    assert action_labels(game)[9:] == tuple(map(no_effect, range(9, 15)))
    assert action_labels("")[9] == "action 9"


def test_actions_have_different_marks_and_numbers_force_them():
    """Fails if two actions look alike in films."""
    marks = {mark_action(np.zeros((64, 64, 3), np.uint8), action).tobytes()
             for action in range(15)}
    assert len(marks) == 15
    assert manual_actions(["9", "4"]) == (ACTION_LABELS[9], "null")
    with pytest.raises(UserError, match="--manual_action"):
        manual_actions(["15"])


def test_actions_have_the_names_of_their_game():
    """Fails if a key has a number of another game, or a mistake does not name the nearest action.
    """
    assert manual_actions(["fire", "Fire_backwards", "jump"], action_labels("starpilot")) == (
        ACTION_LABELS[9], ACTION_LABELS[10], "up")
    assert manual_actions(["throw key"], action_labels("fruitbot")) == (ACTION_LABELS[9],)
    with pytest.raises(UserError, match=r"'fir' \(did you mean 'fire'\?\)"):
        manual_actions(["fir"], action_labels("starpilot"))
    with pytest.raises(UserError, match="unknown --manual_action 'fire'"):
        manual_actions(["fire"], action_labels("coinrun"))
    functions = saliency_functions(["fire_w", "left", "leftwards"], (), "ica",
                                   action_labels("starpilot"))
    assert [(function.name, function.action) for function in functions] == [
        ("fire_w", 11), ("left", 1), ("leftwards", None)]


@pytest.mark.parametrize("game", NEW_GAMES)
def test_kinds_cover_what_the_game_draws(game):
    """Masks by rendering. Fails if a kind has the types of another, or a kind is missing."""
    seen, left, total = Counter(), [], 0
    kinds = objects_of(game)
    with contextlib.closing(StateView(EnvConfig(game, "easy"))) as view:
        for level in range(4):
            for state in played(game, "easy", level, 40, 13)[1:]:  # the first shows the border
                frame, empty = view.draw(state), state
                for kind in kinds:
                    empty = undrawn(empty, kind)
                    seen[kind.name] += (view.draw(undrawn(state, kind)) != frame).any()
                left.append((view.draw(empty) > 60).any(axis=-1))
                total += int((frame > 60).any(axis=-1).sum())
    display = np.all(left, axis=0)  # the same in all frames, such as fruitbot's progress bar
    assert (np.array(left) & ~display).sum() < 0.1 * total
    assert {kind.name for kind in kinds if not seen[kind.name]} <= RARE.get(game, set())


@pytest.mark.parametrize("game", [game for game in NEW_GAMES if game != "miner"])
def test_hazards_end_the_episode_and_others_do_not(game):
    """Fails if a kind that kills is not marked, or a harmless one is. Entities are moved onto the
    player; those that solve the level end the episode with a reward."""
    outcomes = {}
    steps = 140 if game == "chaser" else 60  # its enemies hatch later, and are food for a while
    states = [state for level in range(6) for state in played(game, "easy", level, steps, 12)]
    with contextlib.closing(LevelSlots(EnvConfig(game, "easy"), 1)) as slots:
        for state in states:
            for kind in objects_of(game):
                rows = np.flatnonzero(np.isin(state.entities["type"], kind.entity_types))
                if kind.is_player or not len(rows) or len(outcomes.get(kind.name, [])) > 8:
                    continue
                moved = state.entities.copy()
                for name in ("x", "y"):
                    moved[name][rows[0]] = state.player[name]
                slots.restore(0, dataclasses.replace(state, entities=moved).to_bytes())
                results = [slots.step(0, STAY)]
                if not results[0][1]:
                    results.append(slots.step(0, STAY))
                died = results[-1][1] and sum(reward for reward, _ in results) <= 2.5
                outcomes.setdefault(kind.name, []).append(died)
    kinds: dict[str, GameObject] = {kind.name: kind for kind in objects_of(game)}
    for name, died in outcomes.items():
        assert (np.mean(died) > 0.15) == kinds[name].hazard, (name, died)
    assert outcomes


@pytest.mark.parametrize(("mode", "game"), [
    (mode, game) for mode, games in GAMES_OF_MODE.items() for game in games])
def test_the_camera_moves_as_the_states_say(mode, game):
    """Fails if the size of a square, or whether the camera follows, is wrong in a mode."""
    states = [state for level in range(3) for state in played(game, mode, level, 25)]
    found: dict[str, set[float]] = {"x": set(), "y": set()}
    for before, after in itertools.pairwise(states):
        for axis, scales in found.items():
            step = float(after.player[axis] - before.player[axis])
            if 0.02 < abs(step) < 2:  # farther between levels
                first, second = (float(np.ravel(state.world[f"{axis}_off"])[0])
                                 for state in (before, after))
                scales.add((second - first) / step)
    unit, scale = float(np.ravel(states[0].world["unit"])[0]), pixels_per_square(game, mode)
    expected = {axis: 0.0 if scale == 0 or (scale is None and axis == "x") else unit
                for axis in found}
    for axis, scales in found.items():
        np.testing.assert_allclose(list(scales), expected[axis], atol=0.1)
    assert any(found.values())
    assert scale in (0, None) or scale == pytest.approx(unit, rel=1e-4)


def test_the_return_leads_where_success_is_not_everything():
    result = Evaluation(4, 0.0, (0.0, 0.5), 3.2, (1.0, 5.0), 9.0)
    assert result.describe("starpilot").startswith("mean return 3.20 (1.00 to 5.00), success rate")
    assert result.describe("coinrun").startswith("success rate") and str(result).startswith("succ")
