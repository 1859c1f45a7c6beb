"""Corridors of CoinRun with a single object, and the study of the distance at which agents jump."""

import contextlib
import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32

from agents.agent_file import AgentOrigin, load_agent, save_agent
from agents.networks import Embedder, Policy, blind_policy
from analysis import psychometrics
from analysis.psychometric_results import (
    BLIND,
    INTACT,
    PLAYS,
    PSYCHOMETRICS,
    SCENES,
    SCRIPT,
    WALKS,
    Setting,
    curve,
    fit_curve,
    plot,
    threshold_of,
    thresholds,
)
from analysis.psychometrics import RIGHT, UPRIGHT, Players, gaps, takeoff
from common.errors import UserError
from common.results import ResultStore
from envs.corridor import (
    COIN_LOOK,
    COLUMN,
    CRATE,
    ENEMY,
    FLOOR,
    INVISIBLE,
    PIT,
    REACH,
    SAW,
    SPEED,
    Corridor,
    theme_of,
)
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots, first_states

HARD = EnvConfig("coinrun", "hard")
LEVELS = tuple(range(12))
LOGITS = [0 if action in (RIGHT, UPRIGHT) else -100 for action in range(15)]
PIXELS = 64 / 13  # along a side of a square


@pytest.fixture(scope="module")
def stock():
    return [state for state, _ in first_states(HARD, LEVELS)]


def walk(scene: Corridor, level: int, actions: list[int]) -> tuple[np.ndarray, list[LevelState],
                                                                   float, bool]:
    """Take actions in a corridor until it ends; return frames and states before each action, the
    last reward, and whether the corridor ended."""
    frames, states = [], []
    with contextlib.closing(LevelSlots(HARD, 1, edit=scene,
                                       edit_every_step=scene.repeated)) as slots:
        slots.start(0, level)
        for action in actions:
            frames.append(slots.frames[0].copy())
            states.append(LevelState.parse(slots.state(0)))
            reward, ended = slots.step(0, action)
            if ended:
                break
    return np.stack(frames), states, reward, ended


@pytest.mark.parametrize("name", SCENES)
def test_a_corridor_shows_one_object_and_nothing_else(stock, name):
    """The frame differs from that of the empty corridor only where the object is."""
    scene = dataclasses.replace(SCENES[name], gap=1.5)
    empty = Corridor(gap=1.5, speed=SPEED)
    for level, data in enumerate(stock):
        assert scene(scene(data)) == scene(data)
        (shown, *_), [state], *_ = walk(scene, level, [RIGHT])
        (plain, *_), *_ = walk(empty, level, [RIGHT])
        rows, columns = np.nonzero((shown != plain).any(axis=-1))
        if name in ("nothing", "saw_invisible"):
            assert not len(rows)
            continue
        left = 32 + (COLUMN - state.player["x"]) * PIXELS
        top = 32 - (FLOOR + scene.above + scene.number * scene.size * (scene.kind != PIT)
                    - state.player["y"]) * PIXELS
        assert len(rows) and columns.min() >= left - 1.5
        assert columns.max() <= left + scene.width * PIXELS + 1
        assert rows.min() >= top - 1.5 and len(np.unique(plain[:28])) == 1  # black above


@pytest.mark.parametrize("scene, dies", [
    (Corridor(SAW), True), (Corridor(SAW, CRATE), True), (Corridor(SAW, INVISIBLE), True),
    (Corridor(ENEMY), True), (Corridor(PIT, number=2), True), (Corridor(SAW, above=2), False),
    (Corridor(CRATE, number=3), False), (Corridor(CRATE, SAW), False), (Corridor(), False)])
def test_the_nature_of_an_object_decides_who_dies(scene, dies):
    """A crate is no obstacle: the player walks past it. The coin lies at the end."""
    *_, reward, ended = walk(dataclasses.replace(scene, speed=SPEED), 3, [RIGHT] * 60)
    assert ended and reward == (0 if dies else 10)


@pytest.mark.parametrize("nature, look", [(SAW, CRATE), (SAW, ENEMY), (SAW, COIN_LOOK),
                                          (CRATE, SAW)])
def test_a_look_hides_the_nature_until_contact(nature, look):
    """At every step, the frame is that of an object whose nature is that of its look."""
    level = next(level for level in range(200) if not theme_of(CRATE, level)
                 and not theme_of(ENEMY, level))
    disguised = walk(Corridor(nature, look, speed=SPEED), level, [RIGHT] * 16)[0]
    real, plain = (walk(Corridor(kind, speed=SPEED), level, [RIGHT] * 16)[0]
                   for kind in (look if look != COIN_LOOK else CRATE, nature))
    assert (disguised[-8:] != plain[-8:]).any(axis=(1, 2, 3)).all()
    if look in (CRATE, SAW):  # an enemy would move, and a coin would be a cell
        assert (disguised == real).all()


@pytest.mark.parametrize("kind", [SAW, ENEMY, CRATE])
def test_gaps_are_those_of_the_game(kind):
    scene = Corridor(kind, speed=SPEED)
    _, states, *_ = walk(scene, 5, [RIGHT] * 12)
    positions = np.array([[state.player["x"], state.player["y"]] for state in states])
    edges = np.array([state.entities[np.isin(state.entities["type"], (2, 5, 20))][0]["x"] - 0.5
                      for state in states])
    assert np.allclose(gaps(positions, scene), edges - positions[:, 0] - REACH[0], atol=1e-4)
    assert 8 <= gaps(positions, scene)[0] < 8.5
    assert np.allclose(np.diff(positions[:, 0]), SPEED, atol=1e-5)


def test_takeoff_is_the_gap_at_which_the_passing_jump_starts():
    scene = Corridor(SAW, speed=SPEED)
    for actions, jump in (([RIGHT] * 11 + [UPRIGHT] + [RIGHT] * 20, 11), ([RIGHT] * 30, None)):
        _, states, *_ = walk(scene, 5, actions)
        positions = np.array([[state.player["x"], state.player["y"]] for state in states])
        gap = gaps(positions, scene)
        assert np.isnan(takeoff(positions, gap)) if jump is None else \
            takeoff(positions, gap) == gap[jump]


def test_a_fit_recovers_a_known_function_and_a_constant_has_no_threshold():
    rng = np.random.default_rng(0)
    gap = rng.uniform(-1, 8, 2000)
    true = np.array([1.3, np.log(0.15), 0.05, 0.9])
    jump = (rng.random(2000) < curve(gap, true)).astype(float)
    found = fit_curve(gap, jump)
    assert np.allclose(found[[0, 2, 3]], true[[0, 2, 3]], atol=0.08)
    threshold, slope = threshold_of(true, gap)
    assert curve(np.array([threshold]), true) == pytest.approx(0.5)
    assert slope == pytest.approx((curve(np.array([threshold - 1e-4]), true)[0] - 0.5) / 1e-4, 1e-2)
    assert threshold_of(found, gap)[0] == pytest.approx(threshold, abs=0.08)
    for constant in (0.2, 0.5):
        assert np.isnan(threshold_of(fit_curve(gap, np.full(2000, constant)), gap)[0])
    assert np.isnan(threshold_of(np.array([1.3, -2, 0.45, 0.55]), gap)[0])  # hardly rises
    falling = fit_curve(gap, 1 - jump)  # jumps only when the object is far away
    assert np.isnan(threshold_of(falling, gap)[0])


COLUMNS = slice(36, 44)  # pixels in front of the player in which the planted agent sees objects
SEES = (COLUMNS.stop - 0.5 - 32) / PIXELS - REACH[0]  # squares of free ground at which it jumps


class GapSeer(Embedder):
    """Whether the image shows something on the ground less than SEES squares ahead (N, 1)."""

    def __init__(self):
        super().__init__(1, {})

    def forward(self, images):
        ahead = images[:, :, 31:34, COLUMNS]
        return (ahead > 0.2).flatten(1).any(dim=1, keepdim=True).float()


def planted_agent() -> Policy:
    """Jump to the right if GapSeer sees something, and else run, with probability 0.998."""
    policy = Policy(GapSeer(), None)
    with torch.no_grad():
        policy.fc_policy.weight[:], policy.fc_policy.bias[:] = 0, -100
        policy.fc_policy.bias[RIGHT], policy.fc_policy.bias[UPRIGHT] = 0, -6
        policy.fc_policy.weight[UPRIGHT] = 12
    return policy.eval()


def players_of(policy: Policy) -> Players:
    return Players(policy, None, FLOAT32, HARD, LEVELS, 0, 16, (8, 0))


def test_a_planted_agent_jumps_at_its_distance_and_a_blind_one_at_none():
    players, tables = players_of(planted_agent()), {}
    for name, player, scene, stands in (
            ("intact_crate", INTACT, CRATE, False), ("intact_saw", INTACT, SAW, False),
            ("stands_crate", INTACT, CRATE, True), ("intact_pit_4", INTACT, "pit_4", False),
            ("intact_saw_up_2", INTACT, "saw_up_2", False), ("blind_saw", BLIND, SAW, False)):
        tables[name] = players.walks(Setting(player, SCENES[scene], stands))
    table = thresholds(tables, 0).set_index("condition")
    for name, inside in (("intact_crate", 0), ("stands_crate", 0), ("intact_saw", 0.1)):
        row = table.loc[name]  # a pixel is 0.2 squares; a saw's image begins inside its square
        assert row["threshold"] == pytest.approx(SEES - inside, abs=0.06), name
        assert row["low_95"] <= row["threshold"] <= row["high_95"] < row["low_95"] + 0.2
        assert row["near"] > 0.95 and row["far"] < 0.05 and row["slope"] > 1
    for name in ("intact_pit_4", "intact_saw_up_2", "blind_saw"):
        assert np.isnan(table.loc[name, "threshold"]), name
    assert np.allclose(tables["blind_saw"]["jump"], 0.5)
    assert (tables["stands_crate"]["step"] == psychometrics.STAND_STEPS).all()


def test_the_script_passes_where_a_jump_is_right_and_a_disguise_deceives():
    players = players_of(planted_agent())
    script = players.plays(Setting(SCRIPT, SCENES[SAW])).groupby("step")["success"].mean()
    assert script.loc[0] == 0 and script.iloc[-1] == 1  # it lands on the saw, or passes it
    seen, unseen = (players.plays(Setting(BLIND, SCENES[name], False)) for name in (SAW, "nothing"))
    assert seen["died"].mean() > 0.1 and not unseen["died"].any()
    own = players.plays(Setting(INTACT, SCENES[SAW]))
    first = own[own["step"] == 0]
    assert first["success"].mean() == 1
    assert first["takeoff"].between(SEES - 0.7, SEES + 0.2).mean() > 0.9
    hidden = players.plays(Setting(INTACT, SCENES["saw_invisible"]))
    assert set(hidden["step"]) == {0} and hidden["died"].mean() == 1


@pytest.mark.slow
def test_the_study_of_a_blind_agent_in_shards_finds_no_threshold(tmp_path, monkeypatch, capsys):
    """Joined shards equal a run with another number of slots; a run with fewer conditions reports
    these alone; an unknown one is refused."""
    agent, folder = tmp_path / "blind.pth", tmp_path / "study"
    save_agent(agent, blind_policy(LOGITS), origin=AgentOrigin(
        env_name="coinrun", distribution_mode="hard", use_backgrounds=False))
    walks = ["intact_nothing", "intact_saw", "intact_pit_4", "stands_nothing", "stands_saw"]
    plays = ["intact_saw", "script_saw", "script_enemy", "intact_saw_like_crate"]
    monkeypatch.setattr(psychometrics, "STAND_GAPS", np.arange(0, 2, 0.5))
    flags = ["--agent_file", str(agent), "--num_episodes", "10", "--num_envs", "10", "--device",
             "cpu", "--output_dir", str(folder), "--releases", "8", "0", "--conditions"]
    names = [f"walks/{name}" for name in walks] + [f"plays/{name}" for name in plays]
    for part in ("--shard=1/2", "--shard=1/2", "--shard=2/2", "--join"):
        assert psychometrics.main([*flags, *names, part]) == 0
    store = ResultStore(folder, PSYCHOMETRICS)
    assert {path.stem for path in (folder / "walks").iterdir()} == set(walks)
    assert {path.stem for path in (folder / "plays").iterdir()} == set(plays)
    table, effects = (pd.read_csv(store.file_of(name)) for name in ("thresholds", "effects"))
    assert set(table["condition"]) >= set(walks)
    assert table["threshold"].isna().all() and np.allclose(table["near"], 0.5, atol=1e-3)
    assert {"intact_nothing:intact_saw", "intact_saw:stands_saw"} <= set(effects["condition"])
    assert not effects["claimed"].any() and np.allclose(effects["effect"], 0, atol=1e-6)
    report = (folder / "report.md").read_text()
    assert "none (saw)" in report and "single jump passes the saw from" in report
    config = EnvConfig("coinrun", "hard")
    players = Players(load_agent(agent), None, FLOAT32, config, tuple(config.draw_levels(10, 0)), 0,
                      3, (8, 0))
    for entry, measured in (("walk", players.walks(WALKS["intact_saw"])),
                            ("play", players.plays(PLAYS["intact_saw"]))):
        assert store.file_of(entry, "intact_saw").read_text() == measured.to_csv(index=False)
    figure = plot({}, {name: store.read("play", name) for name in plays if "script" not in name},
                  thresholds({}, 0), "agent", 0)
    assert [panel.get_title() for panel in figure.axes] == ["deaths from 8 squares on"]
    assert psychometrics.main([*flags, "plays/intact_saw_like_crate", "plays/intact_saw"]) == 0
    answer = (folder / "report.md").read_text().split("\n")[4]
    assert answer.startswith("Deaths from 8 squares on: ") and "(too few levels" in answer
    assert psychometrics.main([*flags, "walks/intact_sow"]) == 2
    assert "no 'walks/intact_sow' (did you mean 'walks/intact_saw'?)" in capsys.readouterr().err


def test_other_games_are_refused_in_a_sentence(tmp_path, capsys):
    agent = tmp_path / "blind.pth"
    save_agent(agent, blind_policy(LOGITS), origin=AgentOrigin(env_name="maze"))
    assert psychometrics.main(["--agent_file", str(agent), "--env_name", "maze", "--output_dir",
                               str(tmp_path / "out")]) == 2
    assert "not of maze" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(UserError):
        Corridor()(b"nothing")
