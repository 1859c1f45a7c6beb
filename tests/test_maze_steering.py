"""Steering vectors on forks, their controls and claims, and films of conditions side by side."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, read_video, tiny_policy
from PIL import Image

from agents.acting import run_policy
from agents.agent_file import save_agent
from agents.hooks import patched
from agents.layers import ALL, all_layers, layers_named
from common.results import ResultStore
from envs.maze.levels import Filters, find_levels, save_levels
from envs.maze.state import stock_state
from interventions.controls import GAUSSIAN, OTHERS, PERMUTED
from interventions.patches import Add
from interventions.vectors import read_vectors
from maze import rollouts, steering
from maze.field.fields import both_facings, difference, frames_at, grouped, vector_field
from maze.field.outcomes import AT_DECISION, at_decision_square, at_decisions, decision_steps
from maze.field.outcomes import outcomes as outcomes_of_field
from maze.studies.steering import (
    DECISION_OUTCOMES,
    STEERING_FILES,
    ConditionGroup,
    Experiment,
    Measurements,
    VectorSource,
    compare_groups,
    field_outcomes,
    strongest,
)
from maze.studies.vectors import (
    CHEESE,
    MEAN,
    OFFSET,
    OTHER,
    OWN,
    SAME_SQUARE,
    TOP_RIGHT,
    level_vectors,
    mean_vectors,
    source_level,
)
from stats.effects import Condition

LAYER = "embedder.block2.res1.resadd"
FORKS = Filters(kind="fork", size=(3, 9))


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(recurrent=False)


@pytest.fixture(scope="module")
def forks():
    return find_levels("easy", range(1000), 4, FORKS)


@pytest.fixture(scope="module")
def pool():
    return [stock_state("easy", seed) for seed in range(5000, 5030)]


def experiment(policy, pool=(), kinds=(), num_controls=0, fixed=None, exact=False):
    std = {layer.name: torch.ones(layer.shape) for layer in all_layers(policy)}
    return Experiment(policy, FLOAT32, pool, fixed or {}, std, kinds, num_controls, 0, 5, exact)


def condition(*coefficients):
    name = " ".join(f"{c:+g}" for c in coefficients)
    return Condition(name, name, "", value=coefficients)


def group_of(layer=LAYER, source=OWN, coefficients=(-1.0,)):
    return ConditionGroup("group", layer, (VectorSource(CHEESE, source),),
                          tuple(map(condition, coefficients)))


@pytest.mark.parametrize("layer", (LAYER, "embedder.relufc"))
def test_taking_its_own_vector_out_gives_what_the_agent_does_without_the_cheese(policy, layer):
    """The vector is computed on the same frame, because the mouse starts on the decision square."""
    states = [state for state in (stock_state("easy", seed) for seed in range(60))
              if FORKS.accept(state.grid)
              and state.grid.decision_square() == state.grid.start][:3]
    assert len(states) == 3
    found = experiment(policy).at_decision_squares(group_of(layer), states)
    without = [state.with_cheese(None) for state in states]
    output = run_policy(policy, FLOAT32, frames_at(without, [s.grid.start for s in without]),
                        policy.initial_states(3))
    steps = np.array([decision_steps(state.grid) for state in states])
    expected = at_decisions(grouped(output.log_probs.numpy()), output.values.numpy(), *steps.T)
    np.testing.assert_allclose(found.after[0, 0, :, :-1], expected, atol=2e-4)
    assert np.abs(found.before[:, :-1] - expected).max() > 0.01


@pytest.mark.parametrize("layer", (LAYER, ALL))
def test_conditions_and_controls_are_those_of_patched_passes(policy, forks, layer):
    """Resumed forward passes give the same outcomes and sizes as full ones with a patch."""
    group = group_of(layer, coefficients=(-1.0, 0.5))
    ours = experiment(policy, kinds=(PERMUTED,), num_controls=2)
    found = ours.at_decision_squares(group, forks)
    assert found.after.shape == (3, 2, len(forks), len(DECISION_OUTCOMES))
    names = [each.name for each in layers_named(policy, layer)]
    vectors = level_vectors(policy, names, CHEESE, forks)
    for number, state in enumerate(forks):
        one = {name: values[number] for name, values in vectors.items()}
        for place, coefficient in enumerate((-1.0, 0.5)):
            with patched(policy, [Add(layer, vector=one, coefficient=coefficient)],
                         {name: np.ones_like(value) for name, value in one.items()}) as scope:
                field = vector_field(policy, FLOAT32, state)
            expected = list(at_decision_square(field).values())
            np.testing.assert_allclose(found.after[0, place, number, :-1], expected, rtol=2e-4,
                                       atol=2e-4)
            if layer != ALL:
                np.testing.assert_allclose(found.sizes[0, place, number, 1],
                                           scope.total_change()[1], rtol=1e-5)
    unpatched = [list(at_decision_square(vector_field(policy, FLOAT32, state)).values())
                 for state in forks]
    np.testing.assert_allclose(found.before[:, :-1], unpatched, rtol=2e-3, atol=2e-4)
    # A permuted vector has the same norm and another effect, and it does not depend on whether
    # forks are measured one by one.
    np.testing.assert_allclose(found.sizes[1, :, :, 1], found.sizes[0, :, :, 1], rtol=1e-4)
    assert (np.abs(found.after[1:, 0] - found.after[0, 0]).max(axis=(1, 2)) > 1e-3).all()
    alone = ours.at_decision_squares(group, forks[1:2])
    np.testing.assert_allclose(alone.after[:, :, 0], found.after[:, :, 1], rtol=2e-3, atol=2e-4)


def test_fields_of_a_condition_are_those_of_a_patched_agent(policy, forks):
    state = min(forks, key=lambda state: state.grid.maze_dim)
    wanted = field_outcomes(CHEESE, exact=True)
    found = experiment(policy, exact=True).over_field(group_of(), state, wanted)
    vector = level_vectors(policy, [LAYER], CHEESE, [state])[LAYER][0]
    with patched(policy, [Add(LAYER, vector=vector, coefficient=-1.0)]):
        sides = both_facings(policy, FLOAT32, state)
    unpatched = vector_field(policy, FLOAT32, state)
    without = vector_field(policy, FLOAT32, state.with_cheese(None))
    expected = outcomes_of_field(sides[0], unpatched, sides[1])
    expected["distance_to_other_level"] = difference(without, sides[0]).mean_total_variation
    np.testing.assert_allclose(found.after[0, 0, 0], [expected[each.name] for each in wanted],
                               rtol=5e-4, atol=2e-4)
    place = [each.name for each in wanted].index("distance_to_other_level")
    assert found.before[0, place] == pytest.approx(
        difference(without, unpatched).mean_total_variation, abs=1e-4)


def test_vectors_come_from_levels_with_the_cheese_where_the_source_says(forks, pool):
    seeds = {state.level_seed for state in pool}
    for state in forks:
        assert source_level(CHEESE, OWN, state, pool, 0) is state
        place = np.array(state.grid.cheese)
        for source, far in ((SAME_SQUARE, 0), (f"{OFFSET}1", 1), (f"{OFFSET}3", 3)):
            level = source_level(CHEESE, source, state, pool, 0)
            assert np.abs(np.array(level.grid.cheese) - place).max() == far
            assert level.level_seed in seeds and level.grid.mouse == level.grid.start
        drawn = [source_level(CHEESE, OTHER, state, pool, 0, draw).grid.cheese
                 for draw in range(30)]
        assert len(set(drawn)) > 10 and state.grid.cheese not in drawn
        level = source_level(TOP_RIGHT, SAME_SQUARE, state, pool, 0)
        assert level.grid.maze_dim == state.grid.maze_dim and level.level_seed in seeds
    assert source_level(TOP_RIGHT, f"{OFFSET}12", forks[0], pool, 0) is None


def test_each_source_adds_its_own_vectors(policy, forks, pool):
    fixed = {"cheese_mean": mean_vectors(policy, [LAYER], CHEESE, pool)}
    ours = experiment(policy, pool, (OTHERS,), 2, fixed)
    for source in (SAME_SQUARE, MEAN):
        vector = (fixed["cheese_mean"][LAYER].vector if source == MEAN else level_vectors(
            policy, [LAYER], CHEESE, [source_level(CHEESE, source, forks[0], pool, 0)])[LAYER][0])
        found = ours.at_decision_squares(group_of(source=source), forks[:1])
        assert found.sizes[0, 0, 0, 1] == pytest.approx(np.linalg.norm(vector), rel=1e-4)
    for draw in (1, 2):
        other = source_level(CHEESE, OTHER, forks[0], pool, 0, draw)
        assert found.sizes[draw, 0, 0, 1] == pytest.approx(np.linalg.norm(
            level_vectors(policy, [LAYER], CHEESE, [other])[LAYER]), rel=1e-4)


def made_up(num=40, num_controls=19, kinds=2, seed=0, effect=-0.5) -> Measurements:
    """Return outcomes with a single effect, on P(cheese), and noise in every condition."""
    rng = np.random.default_rng(seed)
    before = rng.uniform(0.4, 0.8, (num, len(DECISION_OUTCOMES)))
    after = before + rng.normal(0, 0.02, (1 + kinds * num_controls, 1, num, len(DECISION_OUTCOMES)))
    after[0, 0, :, 0] += effect
    return Measurements(before, after, np.ones((*after.shape[:3], 3)))


def test_a_planted_effect_is_claimed_and_nothing_else():
    table = compare_groups([group_of()], [made_up()], (PERMUTED, GAUSSIAN), 19, DECISION_OUTCOMES,
                           0)
    effects = table[~table["control"]].set_index("outcome")
    assert effects.index[effects["claimed"]].tolist() == ["p_cheese"]
    assert effects["effect"]["p_cheese"] == pytest.approx(-0.5, abs=0.02)
    assert effects["median_effect"]["p_cheese"] == pytest.approx(-0.5, abs=0.1)
    assert set(effects.drop("p_cheese")["verdict"][["p_corner", "p_other"]]) == {"nothing"}
    assert table.groupby("controls")["condition"].nunique().to_dict() == {
        PERMUTED: 19, GAUSSIAN: 19}


def test_an_effect_that_one_kind_of_controls_has_too_is_not_claimed():
    found = made_up()
    found.after[20:, 0, :, 0] -= 0.5  # controls of the second kind
    table = compare_groups([group_of()], [found], (PERMUTED, GAUSSIAN), 19, DECISION_OUTCOMES, 0)
    row = table[~table["control"]].set_index("outcome").loc["p_cheese"]
    assert row["p_permuted"] == pytest.approx(0.05) and row["p_gaussian"] > 0.05
    assert row["p_control"] == row["p_gaussian"] and not row["claimed"]


def test_the_interaction_is_the_departure_from_the_sum():
    rng = np.random.default_rng(0)
    before = rng.normal(size=(12, len(DECISION_OUTCOMES)))
    one, other, extra = rng.normal(size=(3, 20, 12, len(DECISION_OUTCOMES)))
    both = one + other - before + extra
    found = Measurements(before, np.stack([one, other, both], axis=1), np.ones((20, 3, 12, 3)))
    group = ConditionGroup("g", LAYER, (VectorSource(CHEESE, OWN), VectorSource(TOP_RIGHT, OWN)),
                           (condition(-1.0, 0.0), condition(0.0, 1.0), condition(-1.0, 1.0)),
                           Condition("sum", "sum", ""))
    table = compare_groups([group], [found], (PERMUTED,), 19, DECISION_OUTCOMES, 0)
    contrast = table[table["condition"] == "sum"]["effect"].to_numpy()
    np.testing.assert_allclose(contrast, extra[0].mean(axis=0), atol=1e-9)


def test_the_strongest_condition_of_each_source_is_chosen():
    weak, strong = (dataclasses.replace(made_up(effect=0), before=made_up().before)
                    for _ in range(2))
    place = [outcome.name for outcome in DECISION_OUTCOMES].index("log_odds")
    strong.after[0, 0, :, place] -= 3
    groups = [dataclasses.replace(group_of(), name=name) for name in ("weak", "strong")]
    [chosen] = strongest(groups, [weak, strong])
    assert chosen.name == "strong" and chosen.conditions == (condition(-1.0),)


@pytest.fixture(scope="module")
def agent(tmp_path_factory, policy):
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    save_agent(path, policy, {})
    return path


def arguments(agent, folder, *more):
    return ["--agent_file", str(agent), "--device", "cpu", "--num_mazes", "12", "--size", "3:7",
            "--num_controls", "2", "--num_fields", "10", "--num_sources", "20",
            "--coefficients", "-1", "1", "--num_vectors", "1", "--output_dir", str(folder), *more]


def test_tables_vector_files_and_choice_of_a_run(agent, tmp_path):
    folder, later = tmp_path / "steering", tmp_path / "later"
    assert steering.main(arguments(agent, folder)) == 0
    table = pd.read_csv(folder / "decisions.csv")
    assert list(table) == ["condition", "seed", *AT_DECISION, "direction_changed"]
    assert len(table) == 3 * 12
    assert np.isclose(table[["p_cheese", "p_corner", "p_other"]].sum(axis=1), 1).all()
    effects = ResultStore(folder, STEERING_FILES).read("effects")
    assert len(effects) == 2 * 3 * len(DECISION_OUTCOMES)
    [path] = (folder / "vectors").glob("cheese_*.npz")
    assert read_vectors(path)[LAYER].pairs[0, 0] == table["seed"][0]
    assert steering.main([*arguments(agent, later), "--vector", str(path), "--choose_on", "3",
                          "--num_fields", "0"]) == 0
    table = pd.read_csv(later / "effects.csv")
    assert len(set(table.loc[~table["control"], "label"]) & {"fixed -1", "fixed +1"}) == 1
    settings = json.loads((later / "settings.json").read_text())
    assert len(settings["levels"]) == 12 and len(settings["choosing"]) == 3
    assert not set(settings["levels"]) & set(settings["choosing"])
    assert "chosen on 3 other forks" in (later / "report.md").read_text()


def test_two_vectors_are_composed(agent, tmp_path):
    assert steering.main([*arguments(agent, tmp_path), "--compose", "--num_fields", "0"]) == 0
    table = pd.read_csv(tmp_path / "effects.csv")
    assert table[~table["control"]]["label"].unique().tolist() == [
        "cheese -1", "top right +1", "both", "interaction"]


@pytest.mark.slow
def test_films_show_every_condition_with_the_same_random_numbers(agent, tmp_path):
    folder, level = tmp_path / "films", find_levels("easy", range(100), 1, Filters(size=(5, 5)))[0]
    save_levels(tmp_path / "level.json", [
        level.with_cheese(level.grid.neighbours(level.grid.start)[0])])
    assert rollouts.main([
        "--agent_file", str(agent), "--device", "cpu", "--levels", str(tmp_path / "level.json"),
        "--output_dir", str(folder), "--vectors", "cheese", "--patch", f"multiply@{LAYER}=1",
        "--max_steps", "20", "--gif"]) == 0
    table = pd.read_csv(folder / "episodes.csv").set_index("condition")
    # A patch that changes nothing plays the same episode.
    nothing = table.drop(["unpatched", "cheese -1"]).iloc[0]
    assert nothing.tolist() == table.loc["unpatched"].tolist()
    film = folder / f"film_{level.level_seed}.mp4"
    frames = read_video(film)
    assert len(frames) == min(20, table["steps"].max()) and frames[0].shape[1] == 3 * 256
    with Image.open(film.with_suffix(".gif")) as animated:
        shown = np.asarray(animated.convert("RGB"), np.float64)
    assert np.abs(shown - frames[0]).mean() < 6 < np.abs(shown - frames[0][::-1]).mean()
