"""Kinds of object in the real games: entities and cells, ends of episodes, and masks."""

import contextlib
import dataclasses

import numpy as np
import pytest

from agents.object_masks import ObjectPainter
from common.errors import UserError
from envs.level_state import ENTITY, LevelState
from envs.objects import (
    hazards_of,
    in_view,
    invisible,
    objects_of,
    removed,
    single_objects,
    undrawn,
)
from envs.procgen_env import EnvConfig, LevelSlots, StateView

GAMES = ("coinrun", "leaper", "ninja", "maze")
RIGHT, STAY = 7, 4
BARRIER, EMPTY = 19, 100
CELL = 64 / 13  # side of a cell of CoinRun, in pixels


def kind_of(game: str, name: str):
    return next(kind for kind in objects_of(game) if kind.name == name)


def played(game: str, mode: str, level: int, steps: int, every: int) -> list[LevelState]:
    """Return states of random play on a level."""
    rng, found = np.random.default_rng(level), []
    with contextlib.closing(LevelSlots(EnvConfig(game, mode), 1)) as slots:
        slots.start(0, level)
        for step in range(steps):
            if step % every == 0:
                found.append(LevelState.parse(slots.state(0)))
            if slots.step(0, int(rng.choice([1, 2, 3, 5, 7, 7, 8, 8])))[1]:
                break
    return found


@pytest.fixture(scope="module")
def states() -> dict[str, list[LevelState]]:
    """States of real levels, by game."""
    return {game: [state for level in (1, 4, 5)
                   for state in played(game, "hard", level, 40, 8)] for game in GAMES}


def goes_on(state: LevelState, *actions: int) -> tuple[float, bool]:
    """Take actions from a state; return the last reward, and whether the episode ended."""
    config = EnvConfig(state.game, ("easy", "hard")[state.options["distribution_mode"]])
    with contextlib.closing(LevelSlots(config, 1, edit=lambda _: state.to_bytes())) as slots:
        slots.start(0, 0)
        for action in actions:
            reward, ended = slots.step(0, action)
            if ended:
                break
    return reward, ended


def drawn(state: LevelState) -> np.ndarray:
    with contextlib.closing(StateView(EnvConfig(state.game, "hard"))) as view:
        return view.draw(state.to_bytes())


def entity(state: LevelState, kind, x: float, y: float) -> np.ndarray:
    """Return an entity of a kind at a place, as generated levels contain it."""
    found = np.zeros(1, ENTITY)
    found[0] = state.player
    for name, value in {"type": kind.entity_types[0], "image_type": kind.entity_types[0],
                        "image_theme": 0, "render_z": 0, "smart_step": 0, "rx": 0.5, "ry": 0.5,
                        "x": x, "y": y, "vx": {None: 0, "left": -0.05, "right": 0.05}[kind.moving],
                        "vy": 0}.items():
        found[name] = value
    return found


def with_one(state: LevelState, kind, x: float, y: float) -> LevelState:
    """Add an object of a kind to a state at a place, in front of other objects."""
    if kind.entity_types:
        return dataclasses.replace(state, entities=np.concatenate(
            [entity(state, kind, x, y), state.entities]))
    grid = state.grid.copy()
    grid[int(y), int(x)] = kind.cells[-1]
    return dataclasses.replace(state, grid=grid)


@pytest.fixture(scope="module")
def plain(states) -> LevelState:
    """A state of CoinRun with the player on an empty floor, in the middle of the view."""
    state = states["coinrun"][0]
    grid = np.full_like(state.grid, EMPTY)
    grid[:8] = 15
    player = np.array([state.player])
    player["x"], player["y"], player["vx"], player["vy"] = 20.5, 8.58, 0, 0
    drawing = state.drawing.copy()
    drawing["center_x"], drawing["center_y"] = 20.5, 8.58
    return dataclasses.replace(state, grid=grid, entities=player, drawing=drawing)


def test_real_levels_are_made_of_these_kinds(states):
    others = {"coinrun": {BARRIER, EMPTY}, "leaper": {EMPTY}, "ninja": {EMPTY}, "maze": {EMPTY}}
    for game, some in states.items():
        kinds = objects_of(game)
        known = {number for kind in kinds for number in (*kind.entity_types, *kind.trails)}
        cells = {number for kind in kinds for number in kind.cells}
        assert {int(number) for state in some for number in state.entities["type"]} <= known
        found = {int(number) for state in some for number in np.unique(state.grid)}
        assert found - others[game] == cells
    assert objects_of("no game") == () == hazards_of("no game")


def test_nothing_is_left_in_the_picture_once_no_kind_is_drawn(states):
    for game in ("coinrun", "ninja", "maze", "leaper"):
        for state in states[game][::6]:
            for kind in objects_of(game):
                state = undrawn(state, kind)
            assert not drawn(state)[:, 3:].any(), game  # ninja shows the jump's charge there


def test_touching_a_hazard_ends_the_episode_and_nothing_else_does(states):
    for game in ("coinrun", "leaper", "ninja", "maze"):
        state = states[game][0]
        place = float(state.player["x"]), float(state.player["y"])
        for kind in objects_of(game):
            if kind.name in ("agent", "wall"):
                continue
            reward, ended = goes_on(with_one(state, kind, *place), STAY)
            assert (ended and reward == 0) == kind.hazard, (game, kind.name)
            assert (reward > 0) == (kind.name in ("coin", "finish", "goal", "cheese"))
            if kind.hazard:
                saved = removed(with_one(state, kind, *place), kind, within=3)
                assert goes_on(saved, STAY) == (0, False), (game, kind.name)


def test_only_what_is_near_is_taken_away(plain):
    for name in ("saw", "enemy_left", "lava", "box"):
        kind = kind_of("coinrun", name)
        near, far = with_one(plain, kind, 22.5, 8.5), with_one(plain, kind, 25.6, 8.5)
        assert removed(near, kind, within=3).to_bytes() != near.to_bytes()
        assert removed(far, kind, within=3).to_bytes() == far.to_bytes(), name
        assert removed(far, kind).to_bytes() != far.to_bytes()
    saw, lava = kind_of("coinrun", "saw"), kind_of("coinrun", "lava")
    one = with_one(with_one(plain, saw, 21.5, 8.5), lava, 24.5, 8.5)
    reward, ended = goes_on(one, *[RIGHT] * 20)
    assert ended and reward == 0
    assert goes_on(removed(one, lava), *[RIGHT] * 20)[1]
    assert goes_on(removed(removed(one, saw), lava), *[RIGHT] * 20) == (0, False)
    with pytest.raises(UserError, match="the player"):
        removed(plain, kind_of("coinrun", "agent"))


def test_an_invisible_saw_has_no_pixel_and_still_kills(plain):
    saw = kind_of("coinrun", "saw")
    state = with_one(plain, saw, 22.5, 8.5)
    hidden = invisible(state, saw)
    assert (drawn(state) != drawn(plain)).any()
    assert np.array_equal(drawn(hidden), drawn(plain))
    assert goes_on(hidden, *[RIGHT] * 20)[1] and not goes_on(plain, *[RIGHT] * 20)[1]
    changed = hidden.entities != state.entities
    assert changed.sum() == 1 and (hidden.entities["alpha"] == 0).sum() == 1
    with pytest.raises(UserError, match="lava of coinrun consists of cells"):
        invisible(plain, kind_of("coinrun", "lava"))


def test_enemies_are_two_kinds_and_their_trails_go_with_them(plain):
    left, right = kind_of("coinrun", "enemy_left"), kind_of("coinrun", "enemy_right")
    both = with_one(with_one(plain, left, 17.5, 8.5), right, 23.5, 8.5)
    with contextlib.closing(LevelSlots(EnvConfig("coinrun", "hard"), 1,
                                       edit=lambda _: both.to_bytes())) as slots:
        slots.start(0, 0)
        for _ in range(6):
            slots.step(0, STAY)
        state = LevelState.parse(slots.state(0))
    enemies = state.entities[state.entities["type"] == 5]
    assert sorted(np.sign(enemies["vx"])) == [-1, 1]
    assert (state.entities["type"] == 59).sum() > 6
    trails = state.entities["type"] == 59
    hidden = invisible(state, left).entities["alpha"][trails] == 0
    np.testing.assert_array_equal(hidden, state.entities["x"][trails] < 20)
    picture = drawn(invisible(invisible(state, left), right))
    empty = dataclasses.replace(state, entities=state.entities[state.entities["type"] == 0])
    assert np.array_equal(picture, drawn(empty))


def test_what_is_out_of_view_has_no_pixel(states):
    shown = set()
    for game, some in states.items():
        with contextlib.closing(ObjectPainter(EnvConfig(game, "hard"), objects_of(game))
                                ) as painter:
            for state in some[::2]:
                for kind, mask in zip(painter.kinds, painter.draw(state).masks):
                    assert in_view(state, kind) or np.array_equal(
                        drawn(state), drawn(undrawn(state, kind)))
                    if mask.any():
                        shown.add((game, kind.name))
    assert {("coinrun", name) for name in ("saw", "wall", "agent")} <= shown
    assert {("leaper", kind.name) for kind in objects_of("leaper")} <= shown
    assert {("ninja", name) for name in ("fire", "wall", "agent")} <= shown


def test_masks_of_a_hand_made_level_are_right(plain):
    """The view is 13 cells wide and centred on the player."""
    kinds = {kind.name: kind for kind in objects_of("coinrun")}
    state = plain
    places = {"coin": (23.5, 9.5), "saw": (17.5, 8.5), "box": (25.5, 8.5), "lava": (18.5, 12.5),
              "enemy_left": (22.5, 12.5), "enemy_right": (16.5, 13.5)}
    for name, place in places.items():
        state = with_one(state, kinds[name], *place)
    with contextlib.closing(ObjectPainter(EnvConfig("coinrun", "hard"), objects_of("coinrun"))
                            ) as painter:
        found = dict(zip(kinds, painter.draw(state).masks))
        hidden = with_one(with_one(plain, kinds["coin"], 23.5, 9.5), kinds["box"], 23.5, 9.5)
        covered = dict(zip(kinds, painter.draw(hidden).masks))
        boxed = dict(zip(kinds, painter.draw(with_one(plain, kinds["box"], 23.5, 9.5)).masks))
        nothing = dict(zip(kinds, painter.draw(plain).masks))
    for name, (x, y) in {**places, "agent": (20.5, 8.58)}.items():
        rows, columns = np.nonzero(found[name])
        middle = 32 + (x - 20.5) * CELL, 32 - (y - 8.58) * CELL
        assert rows.size and abs(columns.mean() + 0.5 - middle[0]) < 1, name
        assert abs(rows.mean() + 0.5 - middle[1]) < 2, name  # a saw fills half of its cell
        reach = 1.2 * CELL / 2 + 1
        assert max(abs(columns + 0.5 - middle[0]).max(), abs(rows + 0.5 - middle[1]).max()) < reach
    floor = 32 + 0.58 * CELL
    assert found["wall"][int(np.ceil(floor)):].all() and not found["wall"][:int(floor)].any()
    np.testing.assert_array_equal(covered["box"], boxed["box"])
    assert not covered["coin"].any(), "what is hidden is no part of a mask"
    assert [name for name, mask in nothing.items() if mask.any()] == ["wall", "agent"]


def test_a_single_object_is_removed_and_others_stay(plain):
    saw, coin, lava = (kind_of("coinrun", name) for name in ("saw", "coin", "lava"))
    state = plain
    for kind, x, y in ((saw, 18.5, 8.5), (saw, 23.5, 8.5), (saw, 50.5, 8.5), (coin, 22.5, 10.5),
                       (lava, 16.5, 9.5), (lava, 17.5, 9.5), (lava, 25.5, 9.5)):
        state = with_one(state, kind, x, y)
    whole = drawn(state)
    for kind, number in ((saw, 2), (coin, 1), (lava, 2)):  # one saw is out of view
        things = single_objects(state, kind)
        assert len(things) == number
        pixels = [(drawn(thing.undrawn_in(state)) != whole).any(axis=-1) for thing in things]
        assert all(mask.any() for mask in pixels) and np.sum(pixels, axis=0).max() == 1
        alone = (drawn(undrawn(state, kind)) != whole).any(axis=-1)
        np.testing.assert_array_equal(np.any(pixels, axis=0), alone)
        for thing in things:
            np.testing.assert_array_equal(drawn(thing.removed_from(state)),
                                          drawn(thing.undrawn_in(state)))


def test_only_the_removed_hazard_no_longer_kills(plain):
    saw = kind_of("coinrun", "saw")
    hit = with_one(plain, saw, 20.5, 8.5)
    (near,) = single_objects(hit, saw)
    assert near.is_known_in(hit) and not near.is_known_in(with_one(hit, saw, 28.5, 8.5))
    assert goes_on(hit, STAY) == (0, True)
    assert goes_on(near.undrawn_in(hit), STAY) == (0, True)
    assert goes_on(near.removed_from(hit), STAY) == (0, False)


def test_an_object_is_followed_while_it_moves(plain):
    enemy = kind_of("coinrun", "enemy_right")
    state = with_one(with_one(plain, enemy, 17.5, 8.5), enemy, 24.5, 8.5)
    last = max(single_objects(state, enemy), key=lambda thing: thing.rank)
    others = [kind for kind in objects_of("coinrun") if kind.name == "enemy_left"]
    moved = with_one(dataclasses.replace(state, entities=state.entities[1:]), others[0], 19.5, 8.5)
    assert last.is_known_in(moved)  # enemies that turn around stay the same objects
    before = [float(entity["x"]) for entity in state.entities if entity["type"] == 5]
    gone = last.removed_from(state)
    after = [float(entity["x"]) for entity in gone.entities if entity["type"] == 5]
    assert after[0] == before[0] and after[1] < 0
