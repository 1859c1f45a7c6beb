"""Causes of failure: detection in the real game, counts per condition, and output files."""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, killed_at, refusal, small_policy
from scipy.stats import binomtest

import evaluate
import record
from agents.agent_file import save_agent
from agents.edits import Edit, with_edits
from agents.episodes import SOLVED, PlayOptions, play_episodes
from agents.failures import (
    ENDED,
    MULTIPLE,
    OTHER,
    STEPS_PER_STATE,
    TIMEOUT,
    FailureAttributor,
    attribute_failures,
    causes_of,
    recorded_causes,
)
from agents.networks import Policy
from agents.object_masks import ObjectPainter
from agents.rollout_files import RolloutFolder
from agents.testbed import Condition, Testbed
from attribution import failure_causes
from attribution.failure_causes import NUM_FRAMES, last_frames_of
from attribution.failures import causes
from attribution.failures.results import (
    blindness,
    effects,
    failure_files,
    label_words,
    rates,
)
from common.errors import UserError
from common.files import read_json
from common.results import ResultStore
from common.video import mark_action
from envs.level_state import LevelState
from envs.objects import hazards_of, in_view
from envs.procgen_env import MAX_LEVEL, EnvConfig, LevelSlots
from stats.significance import mcnemar_p

HARD = EnvConfig("coinrun", "hard")
HOP, RIGHT, STILL = 8, 7, 4  # actions: jump to the right; go to the right; none
# Causes of death of an agent that always hops to the right, by (seed, number of steps) of hard
# CoinRun levels. A person determined in the frames what its feet or its front touch.
KILLED = {"saw": (43, 31), "enemy_left": (20, 20), "enemy_right": (22, 50), "lava": (29, 67),
          MULTIPLE: (51, 31)}  # last: a saw and an enemy at the same place


def driven(config: EnvConfig, seed: int, action: int, edit=None, every: int = 1, again=False):
    """Repeat an action until failure; return the states every `every` steps, and the steps."""
    with contextlib.closing(LevelSlots(config, 1, edit=edit, edit_every_step=again)) as slots:
        slots.start(0, seed)
        states, steps, ended = [], 0, False
        while not ended:
            if steps % every == 0:
                states.append(slots.state(0))
            ended, steps = slots.step(0, action)[1], steps + 1
        assert not slots.level_complete[0]
    return states, steps


@pytest.fixture(scope="module")
def attributor():
    with contextlib.closing(FailureAttributor(HARD)) as found:
        yield found


@pytest.mark.parametrize(("cause", "level"), KILLED.items(), ids=list(KILLED))
def test_the_cause_is_what_a_scripted_agent_runs_into(cause, level, attributor):
    seed, length = level
    states, steps = driven(HARD, seed, HOP, every=STEPS_PER_STATE)
    assert steps == length
    left = steps - STEPS_PER_STATE * (len(states) - 1)
    before = attributor.before_last(states[-1], [HOP] * left)
    assert attributor.cause(before, HOP) == cause
    with pytest.raises(UserError, match="does not continue"):
        attributor.cause(states[0], HOP)  # this step does not end the episode


def test_an_agent_that_stands_still_runs_out_of_time(attributor):
    states, steps = driven(EnvConfig("coinrun", "easy"), 1, STILL, every=STEPS_PER_STATE)
    assert steps == 1000
    left = steps - STEPS_PER_STATE * (len(states) - 1)
    before = attributor.before_last(states[-1], [STILL] * left)
    assert attributor.cause(before, STILL) == TIMEOUT


def test_what_no_known_hazard_explains_is_other_and_games_without_a_table_just_end(monkeypatch):
    states, _ = driven(HARD, KILLED["saw"][0], HOP, every=30)
    monkeypatch.setattr("agents.failures.hazards_of", lambda game: tuple(
        kind for kind in hazards_of(game) if kind.name == "lava"))
    with contextlib.closing(FailureAttributor(HARD)) as of_lava:
        assert of_lava.cause(states[-1], HOP) == OTHER
    monkeypatch.undo()
    bigfish = EnvConfig("bigfish", "hard")
    states, _ = driven(bigfish, 3, 7)
    with contextlib.closing(FailureAttributor(bigfish)) as found:
        assert found.cause(states[-1], 7) == "fish"
    monkeypatch.setattr("agents.failures.hazards_of", lambda game: ())
    with contextlib.closing(FailureAttributor(bigfish)) as found:
        assert found.cause(states[-1], 7) == ENDED


def test_an_invisible_enemy_kills_and_has_no_pixel_nor_a_trail(attributor):
    seed, length = KILLED["enemy_left"]
    kind = next(kind for kind in hazards_of("coinrun") if kind.name == "enemy_left")
    hide = causes.hide_hazard("coinrun", kind)
    hidden, steps = driven(HARD, seed, HOP, hide, again=True)
    shown, _ = driven(HARD, seed, HOP)
    assert steps == length and attributor.cause(hidden[-1], HOP) == "enemy_left"
    with contextlib.closing(ObjectPainter(HARD, [kind])) as painter:
        pixels = [[painter.draw(LevelState.parse(state)).masks.sum() for state in states[::4]]
                  for states in (hidden, shown)]
    assert not any(pixels[0]) and max(pixels[1]) > 4
    # An enemy that has turned around is visible again.
    state = LevelState.parse(hidden[-1])
    turned = state.entities.copy()
    turned["vx"] = abs(turned["vx"])
    again = LevelState.parse(hide(dataclasses.replace(state, entities=turned).to_bytes())).entities
    of_kind = again[np.isin(again["type"], kind.entity_types)]
    assert len(of_kind) and (of_kind["alpha"] == 1).all()


def hopping() -> Policy:
    """Return an untrained agent that mostly hops to the right."""
    policy = small_policy("nature", recurrent=False)
    with torch.no_grad():
        policy.fc_policy.weight *= 0.02
        policy.fc_policy.bias[HOP] = 4
    return policy


LEVELS = list(enumerate(HARD.draw_levels(8, 5)))


def test_episodes_are_played_as_without_looking_and_have_the_cause_of_every_state(monkeypatch):
    play = functools.partial(play_episodes, hopping(), FLOAT32, HARD, LEVELS, 1, 4)
    plain = {episode.number: episode for episode in play()}
    found = {}  # cause and steps in view, by the steps between states that are read
    for every in (1, STEPS_PER_STATE):
        monkeypatch.setattr("agents.failures.STEPS_PER_STATE", every)
        found[every] = {}
        for episode in attribute_failures(HARD, play):
            np.testing.assert_array_equal(episode.actions, plain[episode.number].actions)
            assert (episode.cause is None) == plain[episode.number].level_complete
            found[every][episode.number] = episode.cause, list(episode.in_view)
    exact, sampled = found.values()
    assert all(exact[number][0] == sampled[number][0] for number in exact)
    assert len({cause for cause, _ in exact.values()}) > 1
    # With all states, the steps in view are exact.
    number, level = LEVELS[0]
    with contextlib.closing(LevelSlots(HARD, 1)) as slots:
        slots.start(0, level)
        seen = np.zeros(len(hazards_of("coinrun")), int)
        for action in plain[number].actions[:-1]:
            state = LevelState.parse(slots.state(0))
            seen += [in_view(state, kind) for kind in hazards_of("coinrun")]
            slots.step(0, int(action))
    assert seen.tolist() == exact[number][1]


def test_every_step_has_the_same_chance_to_be_looked_at(monkeypatch):
    """The same episode is played sixteen times; each of its steps is examined in one of them."""
    levels = [(number, KILLED["saw"][0]) for number in range(STEPS_PER_STATE)]
    play = functools.partial(play_episodes, hopping(), FLOAT32, HARD, levels, 1, 4,
                             PlayOptions(greedy=True))
    sampled = np.array([episode.in_view for episode in attribute_failures(HARD, play)])
    monkeypatch.setattr("agents.failures.STEPS_PER_STATE", 1)
    exact = np.array([episode.in_view for episode in attribute_failures(HARD, play)])
    assert (exact == exact[0]).all() and exact[0].any()
    np.testing.assert_array_equal(sampled.sum(axis=0), exact.sum(axis=0))


def test_a_recordings_failures_have_the_causes_that_playing_found(tmp_path, capsys):
    save_agent(tmp_path / "model.pth", hopping())
    common = ["--agent_file", str(tmp_path / "model.pth"), "--distribution_mode", "hard",
              "--num_episodes", "6", "--seed", "5", "--device", "cpu", "--precision", "float32"]
    assert record.main([*common, "--logdir", str(tmp_path), "--param_name", "tiny",
                        "--no_action_noise", "--no_videos"]) == 0
    folder = RolloutFolder(tmp_path / "data")
    found = recorded_causes(folder, folder.finished())
    assert evaluate.main([*common, "--causes", "--output", str(tmp_path / "evaluation.json"),
                          "--num_levels", "0"]) == 0
    counted = read_json(tmp_path / "evaluation.json")["causes"]
    values = list(found.values())
    assert {cause: row["failures"] for cause, row in counted.items()} == {
        cause: values.count(cause) for cause in causes_of("coinrun")}
    assert values and "cause of failure" in capsys.readouterr().out

    path = folder.steps_file(0)
    steps = pd.read_csv(path)
    steps.loc[:9, "action"] = STILL
    steps.to_csv(path, index=False)
    with pytest.raises(UserError, match="episode 0 differs"):
        recorded_causes(folder, [0])


def test_mcnemars_test_is_the_exact_one():
    rng = np.random.default_rng(0)
    differences = rng.choice([-1.0, 0.0, 1.0], (60, 5), p=[0.1, 0.7, 0.2])
    differences[:, 4] = 0
    expected = [binomtest(int((column > 0).sum()), int(np.count_nonzero(column))).pvalue
                for column in differences.T[:4]]
    assert mcnemar_p(differences) == pytest.approx([*expected, 1])


def failures(rates, num_levels: int, seed: int) -> pd.DataFrame:
    """Return causes of failure at two rates; conditions with the same seed share the draws."""
    draws = np.random.default_rng(seed).random(num_levels)
    first, second = rates
    return pd.DataFrame({"cause": np.select([draws < first, draws > 1 - second], ["saw", "lava"],
                                            SOLVED), "in_view_saw": 16})


def test_a_planted_effect_is_claimed_and_no_effect_is_not():
    num_levels, drawn = 300, 20
    conditions = [Condition("edited_a", "a", "a", False),
                  Condition("edited_none", "none", "a", False),
                  Condition("invisible_saw", "invisible saw", "a", False),
                  Condition("edited_w", "w", "w", False),
                  *(Condition(f"control_{k}", f"control {k}", "a", True) for k in range(drawn))]
    of_saws = {"original": 0.02, "edited_a": 0.15, "edited_none": 0.02, "edited_w": 0.15,
               "invisible_saw": 0.3, **{f"control_{k}": 0.02 + 0.001 * k for k in range(drawn)}}
    found = {name: failures((rate, 0.05), num_levels, 0) for name, rate in of_saws.items()}
    moved = {condition.name: np.nan if condition.name in ("invisible_saw", "edited_w") else 1.0
             for condition in conditions}
    table = effects(conditions, moved, found, ("saw", "lava"), 0)
    claimed = set(table.loc[table["claimed"], ["label", "outcome"]].itertuples(
        index=False, name=None))
    assert claimed == {("a", "saw"), ("invisible saw", "saw")}
    rows = table.set_index(["label", "outcome"])
    assert rows.loc[("a", "saw"), "p_control"] == pytest.approx(1 / (1 + drawn))
    # Corrected over two edits and two causes; an invisible hazard is not an edit.
    assert rows.loc[("a", "saw"), "p_holm"] == pytest.approx(4 * rows.loc[("a", "saw"), "p"])
    assert rows.loc[("invisible saw", "saw"), "p_holm"] == pytest.approx(
        2 * rows.loc[("invisible saw", "saw"), "p"])
    assert np.isnan(rows.loc[("w", "saw"), "p_control"])  # an agent without controls

    blind = blindness(conditions[:2], {"saw": "invisible_saw"}, found, 0)
    counts = {name: (table["cause"] == "saw").sum() for name, table in found.items()}
    row = rates(conditions[:1], found, ("saw", "lava"), 0).iloc[0]
    assert (row["failures"], row["steps_in_view"]) == (counts["edited_a"], 16 * num_levels)
    assert row["per_1000"] == pytest.approx(1000 * counts["edited_a"] / (16 * num_levels))
    assert row["per_1000_low_95"] < row["per_1000"] < row["per_1000_high_95"]
    expected = (counts["edited_a"] - counts["original"]) / (
        counts["invisible_saw"] - counts["original"])
    assert blind["blindness"].tolist() == pytest.approx([expected, 0])
    assert blind["low_95"][0] < expected < blind["high_95"][0]
    [as_far] = blindness(conditions[2:3], {"saw": "invisible_saw"}, found, 0)[
        ["blindness", "low_95", "high_95"]].to_numpy()
    np.testing.assert_allclose(as_far, 1)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A folder with an agent, another agent and an edited one, and failure counts of the first
    two, computed by shards, one of which was killed."""
    folder = tmp_path_factory.mktemp("causes")
    policy = hopping()
    save_agent(folder / "model.pth", policy)
    save_agent(folder / "edited.pth", with_edits(policy, [
        Edit("embedder.relu3", torch.arange(64.0)[None])]))
    with torch.no_grad():
        policy.fc_policy.bias[RIGHT] = 5
    save_agent(folder / "walking.pth", policy)

    def run(*more):
        return failure_causes.main(arguments(folder, folder / "causes", *more))

    with killed_at(ResultStore, "append", 4):
        assert run("--shard", "2/2") == 130
    assert run("--shard", "2/2") == run("--shard", "1/2") == run("--join") == 0
    return folder


def arguments(folder, output, *more: str, other: str = "walking") -> list[str]:
    return ["--agent_file", str(folder / "model.pth"), str(folder / f"{other}.pth"),
            "--distribution_mode", "hard", "--num_episodes", "10", "--num_controls", "0",
            "--seed", "5", "--invisible", "saw", "--num_films", "1", "--reference_size", "2",
            "--device", "cpu", "--output_dir", str(output), *more]


@pytest.fixture
def played(monkeypatch) -> list:
    """A list that receives the agent of every condition that is played."""
    calls = []

    def play(policy, *rest, **more):
        calls.append(policy)
        return play_episodes(policy, *rest, **more)

    monkeypatch.setattr("agents.testbed.play_episodes", play)
    return calls


def results_in(folder) -> ResultStore:
    return ResultStore(folder / "causes", failure_files("coinrun"))


@pytest.mark.parametrize(("more", "levels"), [
    ((), EnvConfig("coinrun", "hard", 7, MAX_LEVEL - 7)),
    (("--training_levels",), EnvConfig("coinrun", "hard", 3, 4))])
def test_failures_are_counted_on_levels_that_were_not_trained_on_if_not_told_otherwise(
        more, levels, counted, tmp_path):
    with killed_at(ResultStore, "append", 3):
        assert failure_causes.main(arguments(counted, tmp_path / "causes", "--start_level", "3",
                                             "--num_levels", "4", *more)) == 130
    drawn = levels.draw_levels(10, 5)
    assert all(row["level_seed"] == drawn[row["level"]]
               for row in results_in(tmp_path).read("played", "original"))


def test_failures_are_counted_and_reported(counted):
    store = results_in(counted)
    rates = pd.read_csv(store.file_of("rates")).set_index(["condition", "cause"])
    for name in ("original", "edited_walking", "invisible_saw"):
        episodes = store.read("episodes", name)
        assert episodes["level"].tolist() == list(range(10))
        assert episodes["level_seed"].tolist() == HARD.draw_levels(10, 5)
        for cause in causes_of("coinrun"):
            assert rates.loc[(name, cause), "failures"] == (episodes["cause"] == cause).sum()
    text = store.read("report")
    assert store.has("last_frames") and "](failures.png)" in text
    films = [path.name for path in (store.path / "films").iterdir()]
    assert films and all(name in text for name in films)
    for line in text.splitlines():  # kinds of object in words
        assert line.startswith("- [") or "enemy_left" not in line
    assert "| enemy moving left |" in text
    assert label_words("without_block3_0") == "without feature 0 of block3"


def test_an_interrupted_condition_does_not_resume_with_another_agent(counted, tmp_path, capsys):
    with killed_at(ResultStore, "append", 14):
        assert failure_causes.main(arguments(counted, tmp_path / "causes")) == 130
    assert failure_causes.main(arguments(counted, tmp_path / "causes", "--labels", "model",
                                         "walking", other="edited")) == 2
    assert "holds 'edited_walking' of the causes of failure with other settings" in (
        capsys.readouterr().err)


@pytest.mark.parametrize(("more", "words"), [
    (["--labels", "model", "model", "walking"], "must give 2 different names to the agent files"),
    (["--num_controls", "1"], "--num_controls: must be 0, or at least 2")])
def test_unusable_flags_are_refused(counted, tmp_path, capsys, more, words):
    assert words in refusal(failure_causes.main, arguments(counted, tmp_path / "causes", *more),
                            capsys)


def test_controls_play_and_are_counted(counted, played, capsys):
    assert failure_causes.main(arguments(counted, counted / "causes", "--num_controls", "2",
                                         "--num_films", "0", other="edited")) == 0
    output = capsys.readouterr().out
    assert "control_001_edited" in output and "original:" not in output  # stored before
    assert [len(policy.edits) for policy in played] == [1, 1, 1]
    drawn = [policy.edits[0].directions.numpy() for policy in played]
    for one, other in itertools.combinations(drawn, 2):
        assert not np.array_equal(one, other)
        np.testing.assert_array_equal(np.sort(one), np.sort(other))
    store = results_in(counted)
    table = pd.read_csv(store.file_of("effects"))
    assert table["control"].sum() == 2 * len(causes_of("coinrun"))
    assert (table.loc[~table["control"], "num_controls"] == 2).all()
    assert "fewer than 19 controls" in store.read("report")


def test_the_last_frames_of_failures_are_those_that_the_actions_lead_to():
    policy = hopping()
    with torch.no_grad():
        policy.fc_policy.bias[HOP] = 2  # takes other actions, too
    number, level = LEVELS[2]
    [episode] = play_episodes(policy, FLOAT32, HARD, [LEVELS[2]], 5, 64)
    length = len(episode.actions) - 1
    [(title, shown, values)] = last_frames_of(
        Condition("original"),
        pd.DataFrame({"level": [number], "level_seed": [level], "cause": ["saw"]}),
        Testbed(policy, FLOAT32, HARD, [level for _, level in LEVELS], 5))
    assert title == f"saw: level {level}, steps {length - NUM_FRAMES} to {length - 1}"
    frames = []
    with contextlib.closing(LevelSlots(HARD, 1)) as slots:
        slots.start(0, level)
        for step, action in enumerate(episode.actions[:length]):
            frames.append(mark_action(slots.frames[0], action))
            assert slots.step(0, int(action))[1] == (step == length - 1)
    assert len(set(episode.actions[length - NUM_FRAMES:length])) > 1
    np.testing.assert_array_equal(shown, frames[-NUM_FRAMES:])
    np.testing.assert_array_equal(values, episode.values[length - NUM_FRAMES:length])
