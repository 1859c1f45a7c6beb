"""Interventions on the agent's hidden state in the real environment, and their statistics."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    FLOAT32,
    bytes_of_files,
    colours_of,
    figures_drawn,
    golden_projector,
    record_arguments,
    save_projector,
    tiny_policy,
)
from scipy.stats import permutation_test

import compare_interventions
import record
from agents.acting import load_action_noise, run_policy
from agents.agent_file import load_agent
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import patched
from agents.layers import STATE
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import sha256
from common.palette import BLUE, VERMILION
from envs.procgen_env import EnvConfig
from interventions import comparison
from interventions.conditions import swap_conditions
from interventions.controls import controls_of
from interventions.patch_text import open_patches, parse_patch
from interventions.patches import Add, Opening
from interventions.projector import Projector, Swap
from stats.bootstrap import ClusterBootstrap
from stats.effects import (
    Condition,
    Outcome,
    claims_summary,
    compare_conditions,
    with_claims,
    with_verdicts,
)
from stats.forest_plot import FIRST_OUTCOMES
from stats.report import PATCHES, report
from stats.significance import holm, sign_flip_p

REAL = [outcome.name for outcome in comparison.chosen_outcomes(simulated=False)]


@pytest.mark.parametrize(("taken", "put", "more"), [
    ([10, 5], [12, None], []), ([3], [None], ["--alter_from_step", 2]),
    ([0], [None], ["--random_directions", 7])])
def test_recorded_states_satisfy_the_definition_row_by_row(agent_path, matrices, tmp_path, taken,
                                                           put, more):
    assert record.main(record_arguments(
        agent_path, tmp_path, 1, "--interpreting_params_name", "tiny", "--no_videos",
        "--precomputed_analysis_data_path", str(matrices), "--swap_directions_from",
        *map(str, taken), "--swap_directions_to", *map(str, put), *map(str, more))) == 0
    projector, from_step = golden_projector(), 2 if "--alter_from_step" in more else 0
    if "--random_directions" in more:
        projector = projector.turned(7)
    data = RolloutFolder(tmp_path / "data")
    policy, noise = load_agent(agent_path), load_action_noise("fruitbot")
    episode = data.episode(0)
    states = torch.from_numpy(np.array(episode.hidden_states))
    unaltered = run_policy(policy, FLOAT32, np.array(episode.frames), states[:-1]).hidden_states
    change, stored = unaltered - states[:-1], states[1:] - states[:-1]
    amounts = projector.change(change, "ica")[:, taken]
    expected, directions = change.clone(), projector.directions("ica")
    for column, (source, target) in enumerate(zip(taken, put)):
        expected -= amounts[:, [column]] * directions[source]
        if target is not None:
            expected += amounts[:, [column]] * directions[target]
    expected[:from_step] = change[:from_step]
    torch.testing.assert_close(stored, expected, atol=1e-3, rtol=1e-3)
    assert (change - expected).abs().max() > 0.01
    with torch.no_grad():  # outputs computed from the altered state
        logits, values = policy.fc_policy(states[1:]), policy.fc_value(states[1:])[:, 0]
    np.testing.assert_allclose(values, episode.steps["value"], atol=1e-3)
    np.testing.assert_allclose(torch.log_softmax(noise(logits), dim=-1), episode.log_probs,
                               atol=1e-3)
    swap = data.description()["swap"]
    assert (swap["from"], swap["to"], swap["direction_type"]) == (taken, put, "ica")
    assert (swap["from_step"], swap.get("random_directions")) == (
        from_step, 7 if "--random_directions" in more else None)
    assert swap["matrices_sha256"]["hx_mu_12.npy"] == sha256(matrices / "hx_mu_12.npy")


def test_flags_of_a_swap_stand_for_a_patch(agent_path, matrices, tmp_path):
    """The patch stores the checksums of its directions and has controls, too."""
    text = f"swap@hidden_state=10:12,5:None,directions={matrices},num_episodes=12"
    flags = ("--precomputed_analysis_data_path", str(matrices), "--swap_directions_from", "10",
             "5", "--swap_directions_to", "12", "None")
    episodes = {}
    for name, more in (("flags", flags), ("patch", ("--patch", text)), ("unaltered", ())):
        assert record.main(record_arguments(
            agent_path, tmp_path / name, 1, "--interpreting_params_name", "tiny", "--no_videos",
            *more)) == 0
        data = RolloutFolder(tmp_path / name / "data")
        episodes[name] = np.array(data.episode(0).hidden_states)[:5]
        if name == "patch":
            digests = data.description()["patches"]["files_sha256"]
            assert digests[str(matrices / "hx_mu_12.npy")] == sha256(matrices / "hx_mu_12.npy")
    np.testing.assert_array_equal(episodes["flags"], episodes["patch"])
    assert np.abs(episodes["flags"] - episodes["unaltered"]).max() > 0.01
    policy = load_agent(agent_path)
    [swap] = open_patches([parse_patch(text)], Opening(policy, None, None))
    controls = controls_of(policy, [swap], 2, 0)
    assert [[patch.name for patch in control.patches] for control in controls] == [
        ["random_0_0_1_to_2_None"], ["random_1_0_1_to_2_None"]]


def test_swaps_that_differ_in_numbers_only_share_the_controls_of_their_pattern():
    swaps = [Swap(STATE, pairs=pairs, directions=golden_projector()) for pairs in (
        ((10, 12), (5, None)), ((3, 4),), ((7, 1),))]
    found = [(condition.name, condition.pattern, condition.control)
             for condition in swap_conditions(swaps, 2, golden_projector().std).conditions]
    assert found == [
        ("ic_10_5_to_12_None", "0_1_to_2_None", False), ("ic_3_to_4", "0_to_1", False),
        ("ic_7_to_1", "0_to_1", False), *((f"random_00{turn}_{pattern}", pattern, True)
                                         for pattern in ("0_1_to_2_None", "0_to_1")
                                         for turn in range(2))]


def test_random_directions_are_as_large_as_the_components():
    golden = golden_projector()
    turned = golden.turned(1)
    states = golden.mean + torch.randn(500, golden.num_ics, generator=torch.Generator(
        ).manual_seed(0)) @ golden.directions("ica")  # coordinates of variance 1
    before, after = (each.coordinates(states, "ica") for each in (golden, turned))
    torch.testing.assert_close(after.square().sum(dim=1), before.square().sum(dim=1), rtol=1e-3,
                               atol=1e-3)
    assert (after.std(dim=0) - 1).abs().max() < 0.15
    assert (after - before).abs().mean() > 0.5
    torch.testing.assert_close(turned.change(turned.directions("ica"), "ica"),
                               torch.eye(golden.num_ics), atol=1e-3, rtol=0)
    assert torch.equal(golden.turned(1).unmixing, turned.unmixing)
    assert not torch.allclose(golden.turned(2).unmixing, turned.unmixing, atol=0.1)


def test_the_size_of_an_alteration_is_in_standard_deviations():
    policy = tiny_policy()
    move = torch.tensor([6.0, 4.0, *62 * [0.0]])
    std = torch.tensor([2.0, 1.0, *62 * [1.0]])
    with patched(policy, [Add(STATE, move)], {STATE: std}) as scope, torch.no_grad():
        policy.step(torch.rand(3, 64), torch.zeros(3, 64))
    assert scope.total_change()[0] == pytest.approx(5)


def runs_of(actions, ends=None, values=None, rewards=None):
    """Return runs with given lists of actions; values and rewards are 0 if not given."""
    lengths = np.array([len(each) for each in actions])
    total = lengths.sum()

    def steps(given):
        return np.zeros(total, np.float32) if given is None else np.float32(np.concatenate(given))
    return comparison.ConditionRuns(
        np.arange(len(actions)), lengths,
        np.zeros(len(actions), np.float32) if ends is None else np.float32(ends),
        np.concatenate(actions), steps(values), steps(rewards), np.array(0.0))


def test_outcomes_are_those_counted_by_hand():
    unaltered = runs_of([[7, 7, 7, 7], [8, 4]])
    altered = runs_of([[7, 7, 5], [8, 14, 1]], ends=[1, 0], values=[[1, 2, 6], [0, 0, 3]],
                      rewards=[[0, 0, 10], [0, 0, 0]])
    found = {name: column.tolist() for name, column in
             zip(REAL, comparison.outcomes_of(altered, unaltered, simulated=False).T)}
    third = 1 / 3
    assert found == {
        "success": [1, 0], "return": [10, 0], "length": [3, 3], "value": [3, 1],
        "first_jump": [2, 0], "divergence": [0.5, 2 * third], "share_downleft": [0, 0],
        "share_left": [0, third], "share_upleft": [0, 0], "share_down": [0, 0],
        "share_null": [0, 0], "share_up": [third, 0], "share_downright": [0, 0],
        "share_right": [2 * third, 0], "share_upright": [0, third], "share_other": [0, third]}
    never = runs_of([[7, 7, 7], [0, 3]])
    found = comparison.outcomes_of(never, unaltered, simulated=False)
    assert found[:, REAL.index("first_jump")].tolist() == [3, 2]


def test_divergence_counts_while_one_of_a_pair_is_going():
    a, b = runs_of([[7, 7, 8], [1]]), runs_of([[7, 5], [1]])
    differs, counted = comparison.divergence(a, b)
    assert differs.tolist() == [[False, True, True], [False, False, False]]
    assert counted.tolist() == [[True, True, True], [True, False, False]]
    over_time = comparison.divergence_over_time([Condition("x", "x", "p", False)], {"x": a}, b)
    assert over_time["pairs"].tolist() == [2, 1, 1]
    assert over_time["unaltered_going"].tolist() == [2, 1, 0]
    assert over_time["share"].tolist() == [0, 1, 1]
    assert not comparison.divergence(a, a)[0].any()


def test_holm_is_the_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1, 1])


def test_sign_flips_agree_with_all_of_them():
    differences = np.array([[1.0, 1], [2, 1], [-0.5, 0], [3, 1], [1, 1], [0.5, -1], [1, 1]])
    exact = permutation_test((differences,), np.sum, permutation_type="samples", axis=0,
                             vectorized=True, n_resamples=np.inf).pvalue
    assert exact.min() < 0.1
    np.testing.assert_allclose(sign_flip_p(differences, 50_000, 0), exact, atol=0.01)
    assert sign_flip_p(np.zeros((10, 1)), 1000, 0) == [1]
    # The observed signs count as one of the assignments, so p is never 0.
    assert sign_flip_p(np.ones((60, 1)), 999, 0) == [pytest.approx(0.001)]


def test_corrected_test_keeps_its_level_and_interval_its_coverage():
    """The 600 experiments of 20 comparisons have no effects."""
    rng = np.random.default_rng(5)
    shape = 60, 600 * 20
    differences = rng.standard_t(4, shape) - rng.standard_t(4, shape)
    p = np.concatenate([sign_flip_p(differences[:, begin:begin + 20], 1000, seed)
                        for seed, begin in enumerate(range(0, shape[1], 20))])
    assert 0.04 < (p <= 0.05).mean() < 0.056
    families = np.apply_along_axis(holm, 1, p.reshape(600, 20)).min(axis=1)
    assert 0.005 < (families <= 0.05).mean() < 0.08
    some, bootstrap = differences[:, :1000], ClusterBootstrap(np.arange(60), 0)
    low, high = bootstrap.interval(some.T, np.ones(some.T.shape, bool))
    assert 0.92 < ((low <= 0) & (high >= 0)).mean() < 0.97
    mean = bootstrap.interval_of(lambda draws: draws @ some[:, 0] / 60)
    np.testing.assert_allclose(mean, (low[0], high[0]))


def effects(directions, controls):
    """Return a table of highly significant effects, given by condition and outcome."""
    rows = []
    for control, values in ((False, directions), (True, controls)):
        for place, outcomes in enumerate(values):
            name = f"{'random' if control else 'ic'}_{place}"
            rows += [(name, name, "p", control, f"o{number}", effect)
                     for number, effect in enumerate(outcomes)]
    table = pd.DataFrame(rows, columns=["condition", "label", "pattern", "control", "outcome",
                                        "effect"])
    return table.assign(p=1e-9, low_95=table["effect"] - 1e-6, high_95=table["effect"] + 1e-6)


def test_an_effect_must_exceed_the_controls_in_size_whatever_its_sign():
    controls = -np.linspace(0.1, 2, 20)[:, None]
    table = with_claims(effects([[1.95], [-2.1], [2.1], [-0.5]], controls)).set_index("condition")
    assert table.loc[["ic_0", "ic_1", "ic_2", "ic_3"], "claimed"].tolist() == [
        False, True, True, False]
    assert table.loc["ic_0", "p_control"] == pytest.approx(2 / 21)
    assert table.loc["ic_1", "p_control"] == pytest.approx(1 / 21)
    assert table.loc["ic_0", ["control_low", "control_high"]].tolist() == [-2, -0.1]


DECISIONS = (Outcome("p_right", "P(right)", probability=True), Outcome("entropy", "entropy (nats)"),
             Outcome("value", "value"))
CONDITIONS = [*(Condition(f"ic_{k}", f"x {k}", "p", False) for k in range(4)),
              *(Condition(f"random_{k}", "r", "p", True) for k in range(19))]


@pytest.fixture(scope="module")
def decisions():
    """Random outcomes on 40 levels, before and after 23 changes of different sizes."""
    rng = np.random.default_rng(2)
    before = rng.normal(size=(40, 3))
    sizes = rng.uniform(0.2, 2, (len(CONDITIONS), 1, 3))
    after = before + sizes * rng.standard_t(4, (len(CONDITIONS), 40, 3))
    return before, after  # (N, K), (conditions, N, K)


def test_effects_of_random_sign_are_rarely_claimed(decisions):
    """The 30 tables have no effect on average."""
    (before, after), rng, claimed = decisions, np.random.default_rng(0), 0
    for number in range(30):
        signs = 2 * rng.integers(0, 2, (len(before), 1)) - 1
        table = compare_conditions(CONDITIONS, DECISIONS, before, before + signs * (after - before),
                                   number, verdicts=False)
        claimed += table["claimed"][~table["control"]].any()
    assert claimed <= 4


def test_a_made_up_effect_is_found(decisions):
    before, after = decisions[0], decisions[1].copy()
    signs = 2 * np.random.default_rng(0).integers(0, 2, (len(before), 1)) - 1
    after = before + signs * (after - before)
    after[0, :, 0] += 2 * np.abs(after - before)[..., 0].max()
    after[0, :, 2] = before[:, 2]
    table = compare_conditions(CONDITIONS, DECISIONS, before, after, 0)
    found = table[table["condition"] == "ic_0"].set_index("outcome")
    assert found["verdict"].tolist()[::2] == ["claimed", "nothing"]
    number = table["claimed"][~table["control"]].sum()
    assert claims_summary(table).startswith(f"{number} of 12 tested effects (4 alterations, 3 ")
    assert table[table["control"]]["claimed"].mean() < 0.05  # the rule applied to controls


def test_rows_of_a_level_are_drawn_and_flipped_together(decisions):
    before, after = decisions
    once = compare_conditions(CONDITIONS, DECISIONS, before, after, 0, verdicts=False)
    levels = np.repeat(np.arange(40), 3)
    thrice = (np.repeat(before, 3, axis=0), np.repeat(after, 3, axis=1))
    again = compare_conditions(CONDITIONS, DECISIONS, *thrice, 0, levels, verdicts=False)
    pd.testing.assert_frame_equal(once, again)
    verdicts = ["verdict", "smallest_effect", "median_effect", "median_low_95", "median_high_95"]
    pd.testing.assert_frame_equal(with_verdicts(once, DECISIONS, before, after, 0)[verdicts],
                                  with_verdicts(again, DECISIONS, *thrice, 0, levels)[verdicts])
    with pytest.raises(UserError, match="at least 10 levels or starts, not 9"):
        compare_conditions(CONDITIONS, DECISIONS, thrice[0][:27], thrice[1][:, :27], 0, levels[:27])
    thrice[1][4, 3, 2] = np.nan
    with pytest.raises(UserError, match="the outcome value of the condition random_0 is NaN"):
        compare_conditions(CONDITIONS, DECISIONS, *thrice, 0, levels)


def test_nothing_is_an_interval_within_the_margin_and_not_a_large_p():
    rng = np.random.default_rng(1)
    outcomes = (Outcome("p", "p", probability=True), Outcome("value", "value"))
    before = np.stack([rng.random(100), rng.normal(10, 1, 100)], axis=1)
    spread = np.array([[0.1, 1.0], [0.5, 5.0], [0.1, 1.0]])  # by condition and outcome
    shift = np.array([[0, 0], [0, 0], [0.1, 1]])
    noise = rng.normal(size=(3, 100, 2))
    noise -= noise.mean(axis=1, keepdims=True)
    after = before + spread[:, None] * noise + shift[:, None]
    conditions = [Condition(f"ic_{k}", f"x {k}", "p", False) for k in range(3)]
    controls = [Condition(f"random_{k}", "r", "p", True) for k in range(2)]
    after = np.concatenate([after, after[:2]])
    moved = dict.fromkeys((condition.name for condition in (*conditions, *controls)), 1.0)
    table = compare_conditions([*conditions, *controls], outcomes, before, after, 0,
                               moved=moved).set_index(["condition", "outcome"])
    # With 2 controls nothing can be claimed, not even the shift of the third condition.
    assert table["verdict"].iloc[:6].tolist() == ["nothing", "nothing", *["undecided"] * 4]
    assert table.loc[("ic_1", "p"), "p"] > 0.5
    assert table.loc[("ic_0", "p"), "margin"] == 0.05
    assert table.loc[("ic_0", "value"), "margin"] == pytest.approx(0.05 * before[:, 1].mean())
    smallest = table.loc["ic_1"]["smallest_effect"]
    np.testing.assert_allclose(
        smallest, 2.8016 * (after[1] - before).std(axis=0, ddof=1) / 10, rtol=1e-4)
    text = report(table.reset_index(), outcomes, PATCHES, "Made up.")
    assert "0 claimed, 2 nothing, 4 undecided" in text and "random directions" not in text


def test_the_smallest_effect_is_found_in_four_of_five_runs():
    differences = np.random.default_rng(0).normal(0.0196, 0.14, (400, 500))
    assert 0.75 < (sign_flip_p(differences, 1000, 0) <= 0.05).mean() < 0.85
    outcomes = [Outcome(str(k), "") for k in range(10)]
    conditions = [Condition("ic", "x", "p"),
                  *(Condition(f"r{k}", "r", "p", True) for k in range(2))]
    before, after = np.zeros((400, 10)), np.stack([differences[:, :10]] * 3)
    smallest = compare_conditions(conditions, outcomes, before, after, 0)["smallest_effect"]
    assert smallest.mean() == pytest.approx(0.0196, rel=0.03)  # 0.02 in P(cheese), 400 forks


def test_medians_have_the_interval_of_their_paired_difference():
    rng = np.random.default_rng(0)
    for number in (59, 60):
        before = rng.normal(size=number) * 100  # spread far larger than the effect
        after = before + 1 + 0.01 * rng.normal(size=number)
        bootstrap = ClusterBootstrap(np.arange(number), 0)
        low, high = bootstrap.interval_of_medians(after[None], before[None])[:, 0]
        assert 0.95 < low < 1 < high < 1.05
        drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), 2000)
        expected = [np.median(np.repeat(after, n)) - np.median(np.repeat(before, n)) for n in drawn]
        assert [low, high] == pytest.approx(np.quantile(expected, (0.025, 0.975)))
        # For a single sample: the median of an even number is the mean of the two middle values.
        single = bootstrap.interval_of_medians(after[None], 0 * before[None])[:, 0]
        medians = [np.median(np.repeat(after, n)) for n in drawn]
        assert single == pytest.approx(np.quantile(medians, (0.025, 0.975)))


def arguments(agent_path, matrices, output, *more):
    """Return flags of the script; a later flag overrides an earlier one."""
    return [*map(str, (
        "--agent_file", agent_path, "--interpreting_params_name", "tiny",
        "--precomputed_analysis_data_path", matrices, "--env_name", "leaper", "--num_episodes",
        10, "--num_controls", 2, "--ablations", "frozen", "--seed", 11, "--precision", "float32",
        "--device", "cpu", "--output_dir", output, *more))]


@pytest.fixture(scope="module")
def compared_and_drawn(agent_path, matrices, tmp_path_factory):
    """A comparison computed by two shards, and its figures."""
    path = tmp_path_factory.mktemp("compared") / "out"
    with figures_drawn() as figures:
        for more in (["--shard", "2/2"], ["--shard", "1/2"], ["--join"]):
            assert compare_interventions.main(arguments(
                agent_path, matrices, path, "--directions", 1, *more)) == 0
    return comparison.comparison_store(path), figures


@pytest.fixture(scope="module")
def compared(compared_and_drawn):
    return compared_and_drawn[0]


def test_conditions_are_what_is_played_on_the_same_levels(compared, agent_path):
    policy, env = load_agent(agent_path), EnvConfig("leaper", "easy")
    levels = env.draw_levels(10, 11)
    swap = Swap(STATE, pairs=[(1, None)], directions=golden_projector(), steps=(1, None))
    for condition, patches in (("unaltered", []), ("ic_1_to_None", [swap])):
        with patched(policy, patches):
            episodes = sorted(play_episodes(policy, FLOAT32, env, list(enumerate(levels)), 11, 64,
                                            PlayOptions(keep_frames=False)),
                              key=lambda episode: episode.number)
        runs = comparison.read_runs(compared, condition)
        assert runs.starts.tolist() == levels and runs.rewards.any()
        assert runs.lengths.tolist() == [episode.length for episode in episodes]
        assert runs.ends.tolist() == [episode.level_complete for episode in episodes]
        for name, kept in (("actions", slice(None, -1)), ("rewards", slice(1, None)),
                           ("values", slice(None, -1))):
            np.testing.assert_allclose(getattr(runs, name), np.concatenate(
                [getattr(episode, name)[kept] for episode in episodes]), atol=1e-5)
        assert (runs.moved > 0) == bool(patches)


def test_the_figure_shows_the_table_of_effects(compared_and_drawn):
    compared, figures = compared_and_drawn
    figure = figures[compared.file_of("figure").name]
    table, course = (pd.read_csv(compared.file_of(name)) for name in ("effects", "divergence"))
    rows = table[~table["control"]]
    panels = [axes for axes in figure.axes if axes.axison]
    changed = set(table["outcome"][table["effect"] != 0])
    outcomes = [outcome for outcome in comparison.chosen_outcomes(simulated=False)
                if outcome.name in changed][:FIRST_OUTCOMES]  # there is one condition
    assert len(panels) == len(outcomes) + 2
    for outcome in comparison.chosen_outcomes(simulated=False):
        assert (outcome.label in figure.get_suptitle()) == (outcome.name not in changed)
    assert claims_summary(table) in " ".join(figure.get_suptitle().split())  # the answer
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["IC 1 frozen"]
    for axes, outcome in zip(panels, outcomes):
        assert axes.get_title() == outcome.label
        shown = rows[rows["outcome"] == outcome.name]
        marks = axes.lines[1:]  # the first line marks zero
        np.testing.assert_allclose([line.get_xdata() for line in marks[::2]],
                                   shown[["low_95", "high_95"]], rtol=1e-4)
        np.testing.assert_allclose([line.get_xdata()[0] for line in marks[1::2]], shown["effect"],
                                   rtol=1e-4)
        assert colours_of(marks[1::2]) == [
            VERMILION if claimed else BLUE for claimed in shown["claimed"]]
        controls = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
        np.testing.assert_allclose(controls, shown[["control_low", "control_high"]], rtol=1e-4,
                                   atol=1e-9)
    assert len(panels[-1].lines) == course["condition"].nunique()


def test_everything_is_written(compared):
    table, course = (pd.read_csv(compared.file_of(name)) for name in ("effects", "divergence"))
    distance = next(key.rpartition("_")[2] for key in table["condition"]
                    if key.startswith("random"))
    conditions = {"ic_1_to_None", *(f"random_00{turn}_frozen_{distance}" for turn in range(2))}
    assert set(table["condition"]) == set(course["condition"]) == conditions
    assert len(table) == len(conditions) * len(REAL) and not table.isna().any().any()
    assert course["share"].between(0, 1).all()
    text = compared.file_of("report").read_text()
    assert "nan" not in text and "Nothing can be claimed with fewer than 19 controls" in text
    assert text.count("| IC 1 frozen |") == 4  # three tables of outcomes and one of sizes
    settings = json.loads((compared.path / "settings.json").read_text())
    moved = table.set_index("condition")["moved"]
    assert settings["conditions"][f"random_001_frozen_{distance}"] == {
        "ablation": "frozen", "turned_by_seed": 1, "distance": float(distance)}
    np.testing.assert_allclose(moved, float(distance), rtol=0.26)


@pytest.mark.slow
def test_directions_are_added_to_a_finished_run(compared, agent_path, matrices, tmp_path):
    path = tmp_path / "more"
    shutil.copytree(compared.path, path)
    before = bytes_of_files(path / "conditions")
    assert compare_interventions.main(arguments(
        agent_path, matrices, path, "--directions", 0, 1)) == 0
    assert bytes_of_files(path / "conditions").items() > before.items()
    times = {file: file.stat().st_mtime_ns for file in (path / "conditions").rglob("*")}
    assert compare_interventions.main(arguments(
        agent_path, matrices, path, "--directions", 1, 0)) == 0
    assert times == {file: file.stat().st_mtime_ns for file in (path / "conditions").rglob("*")}


@pytest.mark.slow
def test_shards_compare_patches_and_directions_in_the_simulator_as_one_run(
        agent_path, simulator_file, recording, matrices, tmp_path):
    (tmp_path / "conditions.yml").write_text(
        "- {kind: multiply, layer: embedder.block2.res1.resadd, channels: [3, 6], value: -1}\n")

    def run(folder, *more):
        assert compare_interventions.main(arguments(
            agent_path, matrices, tmp_path / folder, "--directions", 0, "--in_simulator",
            "--model_file", simulator_file, "--data_dir", recording / "data", "--patch_file",
            tmp_path / "conditions.yml", "--reference_size", 3, *more)) == 0
        return comparison.comparison_store(tmp_path / folder)

    one = run("one")
    for more in (["--shard", "2/2"], ["--shard", "1/2"], ["--join"]):
        run("shards", *more)
    assert bytes_of_files(tmp_path / "shards") == bytes_of_files(tmp_path / "one")
    name = "multiply_block2.res1.resadd_3_6_-1"
    unaltered, out, multiplied = (comparison.read_runs(one, condition) for condition in (
        "unaltered", "ic_0_to_None", f"patch_{name}"))
    assert len(set(unaltered.lengths)) == 1
    assert np.abs(out.values - unaltered.values).max() > 0.01
    assert np.abs(multiplied.values - unaltered.values).max() > 1e-4
    table = pd.read_csv(one.file_of("effects"))
    outcomes = comparison.chosen_outcomes(simulated=True)
    assert set(table["outcome"]) == {outcome.name for outcome in outcomes}
    assert table[~table["control"]]["condition"].unique().tolist() == [
        "ic_0_to_None", f"patch_{name}"]
    assert table["pattern"].nunique() == 2 and (table["num_controls"] >= 1).all()
    drawn, other = (one.settings()["conditions"][f"control_00{k}_{name}"]["drawn"][0]["channels"]
                    for k in range(2))
    assert drawn != other and not {3, 8} & {*drawn, *other}


def test_matrices_of_another_agent_are_refused(agent_path, tmp_path, capsys):
    small = save_projector(tmp_path / "small", Projector(
        torch.zeros(3), torch.ones(3), torch.eye(3), torch.ones(3), torch.eye(3), torch.eye(3)))
    assert compare_interventions.main(arguments(agent_path, small, tmp_path / "out", "--directions",
                                                0)) == 2
    assert "have 3 hidden units, but the agent has 64" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
