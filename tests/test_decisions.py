"""The study of the decision that caused a failure, with planted decisions in the real game."""

import contextlib
import dataclasses
import filecmp
import itertools
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
from conftest import FLOAT32

from agents.agent_file import AgentOrigin, save_agent
from agents.episodes import SOLVED
from agents.networks import blind_policy
from agents.provenance import agent_sha256
from analysis import decision_trials, decisions, simulated_decisions
from analysis.decision_results import (
    BLIND,
    DECISIONS,
    DIVIDED,
    NO_DECISION,
    UNAVOIDABLE,
    UNLUCKY,
    WRONG,
    Case,
    decide,
    halved,
    point_of_no_return,
    state_rates,
)
from analysis.decision_trials import DecisionStudy
from analysis.decisions import DecisionOptions
from analysis.simulated_decisions import agreement
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.results import ResultStore
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots, StateView, first_states
from generative.imagining import imagine
from generative.simulated_game import RecordedStart, survival_of_actions

pytestmark = pytest.mark.usefixtures("short")
HARD = EnvConfig("coinrun", "hard")
NULL, RIGHT, JUMP_RIGHT = 4, 7, 8
OPTIONS = DecisionOptions(agent_file="none", num_tried=2, num_fresh=2, num_envs=16)


def always(*actions):
    """Return an agent that draws from some actions, whatever it sees."""
    return blind_policy(np.where(np.isin(np.arange(NUM_ACTIONS), actions), 0.0, -100.0))


def walk(level):
    """Return the states of a player that runs to the right and jumps at random until the episode
    ends, its actions, and whether it takes the coin."""
    rng = np.random.default_rng(level)
    with contextlib.closing(LevelSlots(HARD, 1)) as slots:
        slots.start(0, level)
        states, actions, ended = [], [], False
        while not ended and len(states) < 150:
            states.append(slots.state(0))
            actions.append(int(rng.choice([RIGHT, JUMP_RIGHT])))
            ended = slots.step(0, actions[-1])[1]
        return states, actions, not ended or bool(slots.level_complete[0])


def is_saved(view, state, action, then):
    """Return whether a player survives who takes an action, and then another one again and again.
    """
    view.set(state)
    for taken in [action] + [then] * (decision_trials.HORIZON - 1):
        ended, solved = view.step(taken)
        if ended:
            return solved
    return True


def last_savable(view, states, then):
    """Return the last step from which any action saves the player, and whether all earlier steps of
    the window are like it; the reference, by exhaustion."""
    window = range(max(0, len(states) - decision_trials.WINDOW), len(states))
    saved = [any(is_saved(view, states[step], action, then) for action in range(9))
             for step in window]
    if not any(saved):
        return -1, True
    last = max(np.flatnonzero(saved))
    return window[last], all(saved[:last])


@pytest.fixture
def short(monkeypatch):
    """Shorten windows and continuations."""
    monkeypatch.setattr(decision_trials, "WINDOW", 20)
    monkeypatch.setattr(decision_trials, "HORIZON", 24)


@pytest.fixture(scope="module")
def walks():
    """States of walks that end with the player's death, and the episodes, by level."""
    found = {level: walk(level) for level in range(24)}
    return {level: (states, Case(level, level, "saw", len(states) - 1, actions))
            for level, (states, actions, survives) in found.items() if not survives}


@pytest.fixture(scope="module")
def view():
    return StateView(HARD)


def test_the_study_finds_the_step_at_which_a_planted_walk_became_fatal(walks, view):
    """The agent stands still, but the episode runs into a hazard: the last step at which the player
    could be saved is known by exhaustion, and the agent never takes the action taken there."""
    study, found = DecisionStudy(always(NULL), FLOAT32, HARD, OPTIONS), []
    for states, case in walks.values():
        expected, is_prefix = last_savable(view, states, NULL)
        if expected < 0 or not is_prefix:
            continue
        table = study.measure(case)
        assert point_of_no_return(table) == expected
        row = decide(table, case)
        assert row["class"] in (UNLUCKY, BLIND) and row["regret"] == 1
        assert row["probability"] < 1e-6 and row["before_end"] == case.last - expected
        found.append(row["before_end"])
        if len(found) == 3:
            break
    assert len(found) == 3 and max(found) > min(found)


def test_a_failure_that_no_action_prevents_is_unavoidable(walks, view, monkeypatch):
    """In the last steps of some walks, for example of falls, every action comes too late."""
    monkeypatch.setattr(decision_trials, "WINDOW", 4)
    study = DecisionStudy(always(NULL), FLOAT32, HARD, OPTIONS)
    doomed = (case for states, case in walks.values() if last_savable(view, states, NULL)[0] < 0)
    for case in itertools.islice(doomed, 3):
        row = decide(study.measure(case), case)
        assert row["class"] == UNAVOIDABLE and "before_end" not in row
        assert row["num_lost"] == row["num_states"] == 4
    assert next(doomed, None)


def test_the_hazard_is_seen_once_it_overlaps_the_view(walks):
    study = DecisionStudy(always(NULL), FLOAT32, HARD, OPTIONS)
    num_seen, num_unseen = 0, 0
    for _, case in walks.values():
        moments = study.replay(case)
        killers = study.killers(moments[case.last], case)
        if not all(hasattr(killer, "rank") and killer.kind.name == "saw" for killer in killers):
            continue
        for moment in moments.values():
            state = LevelState.parse(moment.start.state)
            saws = state.entities[state.entities["type"] == 2][[k.rank for k in killers]]
            gaps = [abs(saws[axis] - state.drawing[f"center_{axis}"]) - saws[f"r{axis}"]
                    for axis in "xy"]
            seen = bool((np.max(gaps, axis=0) <= state.world["view_dim"] / 2).any())
            assert decision_trials._in_view(moment.start.state, killers) == seen
            num_seen, num_unseen = num_seen + seen, num_unseen + (not seen)
    assert num_seen > 20 and num_unseen > 0


def test_actions_of_a_group_have_the_same_future_and_others_do_not(walks, view):
    study = DecisionStudy(always(NULL), FLOAT32, HARD, OPTIONS)
    rng, sizes = np.random.default_rng(0), set()

    def future(state, action):
        view.set(state)
        frames = []
        for taken in [action, *actions]:
            frames.append(view.step(taken)[0] or view.draw(view.state()).tobytes())
            if frames[-1] is True:
                break
        return frames

    for level in list(walks)[:3]:
        for state in walks[level][0][2::9]:
            actions = rng.integers(0, NUM_ACTIONS, 6).tolist()
            groups = study.distinct_actions(state)
            assert sorted(itertools.chain(*groups)) == list(range(NUM_ACTIONS))
            futures = [[future(state, action) for action in group] for group in groups]
            assert all(other == group[0] for group in futures for other in group)
            sizes.add(len(groups))
    assert 3 < max(sizes) <= 9


def test_actions_are_judged_on_fresh_draws_that_all_actions_of_a_state_share(walks, monkeypatch):
    plays, play = [], decision_trials.play_episodes

    def watched(policy, compute, game, runs, *others):
        plays.append(runs)
        return play(policy, compute, game, runs, *others)

    monkeypatch.setattr(decision_trials, "play_episodes", watched)
    monkeypatch.setattr(decisions, "WINDOW", 9)
    study = DecisionStudy(always(RIGHT, JUMP_RIGHT, NULL), FLOAT32, HARD, OPTIONS)
    table = study.measure(next(iter(walks.values()))[1])
    streams = {}
    for run in itertools.chain(*plays):
        if run.stream is not None:
            streams.setdefault((run.start.step, run.actions[0]), []).append(run.stream)
    for step, state in table.groupby("step"):
        taken = streams[step, state.loc[state["taken"] == 1, "action"].iloc[0]]
        number = OPTIONS.num_tried + OPTIONS.num_fresh
        assert len(set(taken[:number])) == number  # further runs are those without the hazard
        for action in state["action"]:
            assert set(streams.get((step, action), [])) <= set(taken)
    assert len({stream for found in streams.values() for stream in found}) == number * len(
        table.groupby("step"))


def table_of(rates, probability=0.3, others=0.6, hazard_in_view=1):
    """Return the states of an episode with two actions: the best one, and the one taken."""
    rows = []
    for step, (best, taken) in rates.items():
        for action, share, chance in ((1, best, others), (7, taken, probability)):
            outcomes = ("+" * round(share * 8)).ljust(8, "-")
            rows.append({"step": step, "action": action, "actions": str(action),
                         "probability": chance, "value": 1.0, "hazard_in_view": hazard_in_view,
                         "taken": int(action == 7), "best": int(action == 1), "tried": outcomes,
                         "fresh": outcomes, "removed": "none"})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("changes, expected", [
    ({"hazard_in_view": 0}, BLIND), ({"probability": 0.2}, UNLUCKY), ({}, DIVIDED),
    ({"probability": 0.7}, WRONG), ({"probability": 0.2, "hazard_in_view": 0}, BLIND)])
def test_the_first_class_that_applies_counts(changes, expected):
    case = Case(0, 0, "saw", 9, [7] * 10)
    row = decide(table_of({1: (1, 1), 5: (0.5, 0.25), 9: (0.375, 0)}, **changes), case)
    assert row["class"] == expected
    assert (row["before_end"], row["best_rate"], row["taken_rate"]) == (4, 0.5, 0.25)


def test_windows_of_solved_episodes_have_no_decision_unless_their_end_is_lost():
    case = Case(0, 0, SOLVED, 9, [7] * 12)
    assert decide(table_of({5: (0.1, 0), 9: (1, 1)}), case)["class"] == NO_DECISION
    assert decide(table_of({5: (1, 1), 9: (0.25, 0.25)}), case)["class"] == DIVIDED
    assert decide(table_of({5: (0, 0), 9: (0, 0)}), case)["class"] == UNAVOIDABLE


def test_earlier_states_that_are_not_savable_are_reported():
    row = decide(table_of({1: (0, 0), 5: (0.375, 0), 9: (1, 0)}), Case(0, 0, "saw", 9, [7] * 10))
    assert (row["before_end"], row["reversals"], row["sure_reversals"]) == (0, 2, 1)


def test_the_value_of_a_state_is_the_mean_over_the_policy():
    rates = state_rates(table_of({3: (1, 0.5)}, probability=0.4, others=0.6))
    assert rates.loc[3, "v"] == pytest.approx(0.8) and rates.loc[3, "regret"] == 0.5


def test_half_of_the_fresh_continuations_are_the_first_ones():
    half = halved(table_of({3: (0.5, 0)}))["fresh"].tolist()
    assert half == ["++++", "----"]


def test_an_idle_environment_continues_from_a_state_as_a_new_one_does():
    states = [state for state, _ in first_states(HARD, (3, 8))]
    with contextlib.closing(LevelSlots(HARD, 1)) as used, contextlib.closing(
            LevelSlots(HARD, 1)) as new:
        used.start(0, 5)
        while not used.step(0, RIGHT)[1]:
            pass
        assert used.state(0) is None
        for state in states:
            for slots in (used, new):
                slots.restore(0, state)
            for step in range(20):
                results = [slots.step(0, 8 if step % 3 else RIGHT) for slots in (used, new)]
                assert results[0] == results[1] and used.state(0) == new.state(0)
                assert np.array_equal(used.frames, new.frames)


@pytest.mark.slow
def test_joined_shards_equal_one_run_and_every_failure_has_a_film(tmp_path, monkeypatch):
    for name, value in (("WINDOW", 9), ("HORIZON", 4), ("LEVELS_AT_A_TIME", 6),
                        ("MAX_STEPS", 200), ("check_starts", lambda number, flag: None)):
        for module in (decisions, decision_trials):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    agent = tmp_path / "blind.pth"
    save_agent(agent, always(RIGHT, JUMP_RIGHT), origin=AgentOrigin(
        env_name="coinrun", distribution_mode="hard"))
    flags = ["--agent_file", str(agent), "--num_failures", "3", "--num_controls", "1",
             "--num_tried", "1", "--num_fresh", "2", "--device", "cpu"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert decisions.main([*flags, "--output_dir", str(whole)]) == 0
    for part in (["--shard", "1/2"], ["--shard", "2/2"], ["--join"]):
        assert decisions.main([*flags, "--output_dir", str(parts), *part]) == 0
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()
             and not path.name.startswith(".")]
    assert filecmp.cmpfiles(whole, parts, map(str, files), shallow=False)[1:] == ([], [])
    table = pd.read_csv(whole / "decisions.csv")
    assert table["group"].value_counts().to_dict() == {"failures": 3, "solved": 1, "random": 1}
    films = sorted((whole / "films").iterdir())
    assert len(films) == 3
    with av.open(str(films[0])) as film:
        assert sum(1 for _ in film.decode(video=0)) == 11
    assert "Of 3 failures" in (whole / "report.md").read_text()


def test_other_games_are_refused_in_a_sentence(tmp_path):
    agent = Path(tmp_path / "blind.pth")
    save_agent(agent, always(NULL), origin=AgentOrigin(env_name="ninja", distribution_mode="hard"))
    with pytest.raises(UserError, match="levels of coinrun, not of"):
        decisions.measure_decisions(dataclasses.replace(OPTIONS, agent_file=agent))


def test_simulated_rates_are_those_of_imagined_rollouts_with_the_forced_actions(simulator):
    """The seeds of worlds do not matter to this simulator, which has none."""
    frames = np.random.default_rng(0).integers(0, 256, (
        simulator.config.num_init_steps, 64, 64, 3), dtype=np.uint8)
    hidden = simulator.agent.policy.initial_states(1)[0].numpy()
    rates = survival_of_actions(simulator, FLOAT32, RecordedStart(frames, hidden, 3),
                                [RIGHT, NULL], num_worlds=2, num_steps=1, seed=0)
    expected = [1 - imagine(simulator, frames, num_steps=2, actions=[3, action]).terminals.max()
                for action in (RIGHT, NULL)]
    np.testing.assert_allclose(rates, expected, atol=1e-5)
    assert rates[0] != rates[1]


def test_agreement_is_1_for_a_simulator_that_ranks_as_the_game_does_and_chance_for_others():
    actions = pd.concat([pd.DataFrame({
        "number": number, "step": 5, "action": [1, 4, 7], "probability": [0.6, 0.3, 0.1],
        "real": real, "simulated": np.square(real)}) for number, real in enumerate(
            [[0.1, 0.5, 0.9], [0.9, 0.5, 0.1], [0.2, 0.8, 0.4]])])
    table = agreement(actions, 0).set_index(["score", "quantity"])["mean"]
    assert table["simulated", "rank correlation"] == 1
    assert table["probability", "rank correlation"] == pytest.approx((-1 + 1 - 0.5) / 3)
    assert table["simulated", "names the best action"] == 1
    assert table["probability", "names the best action"] == pytest.approx(1 / 3)
    assert table["chance", "names the best action"] == pytest.approx(1 / 3)
    assert table["chance", "real rate of the action"] == pytest.approx(0.5 - 0.1 / 9)


def test_decisions_are_simulated_with_the_agent_that_made_them(walks, agent_path, simulator_file,
                                                              tmp_path):
    store = ResultStore(tmp_path / "decisions", DECISIONS)
    store.open({"agent_sha256": agent_sha256(agent_path), "env": vars(HARD)})
    cases = [case for _, case in walks.values()][:2]
    store.write("cases", "failures", value=[dataclasses.asdict(case) for case in cases])
    for case in cases:
        store.write("states", f"failures_{case.number}", value=table_of({case.last: (1, 0)}))
    store.finish()
    flags = ["--model_file", str(simulator_file), "--decisions_dir", str(store.path), "--device",
             "cpu", "--num_worlds", "2", "--num_steps", "2", "--output_dir", str(tmp_path / "sim")]
    assert simulated_decisions.main(["--agent_file", str(agent_path), *flags]) == 0
    rows = pd.read_csv(tmp_path / "sim" / "actions" / f"{cases[0].number}.csv")
    assert rows["real"].tolist() == [1, 0] and rows["simulated"].between(0, 1).all()
    assert (tmp_path / "sim" / "agreement.csv").exists()
    other = tmp_path / "other.pth"
    save_agent(other, always(NULL))
    assert simulated_decisions.main(["--agent_file", str(other), *flags]) == 2
