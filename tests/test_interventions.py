"""Altering the agent's hidden state: in the real environment, and counted."""

import dataclasses
import json

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
from PIL import Image
from scipy.stats import permutation_test

import compare_interventions
import record
from agents.acting import load_action_noise, run_policy
from agents.agent_file import load_agent, save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.hooks import patched
from agents.networks import to_images
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.files import sha256
from common.palette import BLUE, VERMILION
from envs.procgen_env import EnvConfig, LevelSlots
from interventions.comparison import (
    ArmRuns,
    chosen_outcomes,
    compare,
    comparison_store,
    divergence,
    divergence_over_time,
    outcomes_of,
    read_runs,
)
from interventions.patches import ChangeState
from interventions.projector import Projector
from stats.bootstrap import ClusterBootstrap
from stats.effects import (
    Condition,
    Outcome,
    claims_summary,
    compare_conditions,
    with_claims,
    with_verdicts,
)
from stats.report import PATCHES, report
from stats.significance import holm, sign_flip_p

NUM_EPISODES = 12  # in the names of the projector's files, set `tiny`
REAL = [outcome.name for outcome in chosen_outcomes(simulated=False)]


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    return save_projector(tmp_path_factory.mktemp("golden") / "m", golden_projector())


def swap_flags(matrices, taken, put, *more):
    return ["--interpreting_params_name", "tiny", "--precomputed_analysis_data_path",
            str(matrices), "--swap_directions_from", *map(str, taken), "--swap_directions_to",
            *map(str, put), "--no_videos", *map(str, more)]


# The real environment.


@pytest.mark.parametrize(("taken", "put", "from_step"), [
    ([10, 5], [12, None], 0), ([3], [None], 2)])
def test_recorded_states_satisfy_the_definition_row_by_row(agent_path, tmp_path, taken, put,
                                                           from_step):
    projector = golden_projector()
    folder = save_projector(tmp_path / "m", projector)
    more = ["--alter_from_step", from_step] if from_step else []
    assert record.main(record_arguments(agent_path, tmp_path, 2, *swap_flags(
        folder, taken, put, *more))) == 0
    data = RolloutFolder(tmp_path / "data")
    policy, noise = load_agent(agent_path), load_action_noise("fruitbot")
    for number in range(2):
        episode = data.episode(number)
        states = torch.from_numpy(np.array(episode.hidden_states))
        unaltered = run_policy(policy, FLOAT32, np.array(episode.frames),
                               states[:-1]).hidden_states
        change, stored = unaltered - states[:-1], states[1:] - states[:-1]
        by_coordinates = projector.change(change, "ica")
        amounts = by_coordinates[:, taken]
        expected = change.clone()
        directions = projector.directions("ica")
        for column, (source, target) in enumerate(zip(taken, put)):
            expected -= amounts[:, [column]] * directions[source]
            if target is not None:
                expected += amounts[:, [column]] * directions[target]
        expected[:from_step] = change[:from_step]
        torch.testing.assert_close(stored, expected, atol=1e-3, rtol=1e-3)
        assert (change - expected).abs().max() > 0.01
        with torch.no_grad():  # what is read off the altered state
            logits, values = policy.fc_policy(states[1:]), policy.fc_value(states[1:])[:, 0]
        np.testing.assert_allclose(values, episode.steps["value"], atol=1e-3)
        np.testing.assert_allclose(torch.log_softmax(noise(logits), dim=-1), episode.log_probs,
                                   atol=1e-3)
    swap = data.description()["swap"]
    assert (swap["from"], swap["to"], swap["direction_type"]) == (taken, put, "ica")
    assert swap["from_step"] == from_step
    assert swap["matrices_sha256"]["hx_mu_12.npy"] == sha256(folder / "hx_mu_12.npy")


def test_recording_with_random_directions_says_so(agent_path, matrices, tmp_path):
    argv = record_arguments(agent_path, tmp_path, 1, *swap_flags(
        matrices, [0], ["None"], "--random_directions", 7))
    assert record.main(argv) == 0
    data = RolloutFolder(tmp_path / "data")
    assert data.description()["swap"]["random_directions"] == 7
    states = torch.from_numpy(np.array(data.episode(0).hidden_states))
    held = golden_projector().turned(7).change(states - states[0], "ica")[:, 0]
    torch.testing.assert_close(held, torch.zeros(len(held)), atol=5e-3, rtol=0)
    assert golden_projector().change(states - states[0], "ica")[:, 0].abs().max() > 0.1


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
    with patched(policy, [ChangeState(lambda entering, leaving: leaving + move)],
                 {"hidden_state": std}) as scope, torch.no_grad():
        policy.step(torch.rand(3, 64), torch.zeros(3, 64))
    assert scope.total_change()[0] == pytest.approx(5)


# What a run gives.


def runs_of(actions, ends=None, values=None, rewards=None):
    """Runs from lists of actions; values and rewards are 0 if not given."""
    lengths = np.array([len(each) for each in actions])
    total = lengths.sum()

    def steps(given):
        return np.zeros(total, np.float32) if given is None else np.float32(np.concatenate(given))
    return ArmRuns(np.arange(len(actions)), lengths,
                   np.zeros(len(actions), np.float32) if ends is None else np.float32(ends),
                   np.concatenate(actions), steps(values), steps(rewards), np.array(0.0))


def test_outcomes_are_those_counted_by_hand():
    unaltered = runs_of([[7, 7, 7, 7], [8, 4]])
    altered = runs_of([[7, 7, 5], [8, 14, 1]], ends=[1, 0], values=[[1, 2, 6], [0, 0, 3]],
                      rewards=[[0, 0, 10], [0, 0, 0]])
    found = {name: column.tolist() for name, column in
             zip(REAL, outcomes_of(altered, unaltered, simulated=False).T)}
    third = 1 / 3
    assert found == {
        "success": [1, 0], "return": [10, 0], "length": [3, 3], "value": [3, 1],
        "first_jump": [2, 0], "divergence": [0.5, 2 * third], "share_downleft": [0, 0],
        "share_left": [0, third], "share_upleft": [0, 0], "share_down": [0, 0],
        "share_null": [0, 0], "share_up": [third, 0], "share_downright": [0, 0],
        "share_right": [2 * third, 0], "share_upright": [0, third], "share_other": [0, third]}
    never = runs_of([[7, 7, 7], [0, 3]])
    assert outcomes_of(never, unaltered, False)[:, REAL.index("first_jump")].tolist() == [3, 2]


def test_divergence_counts_while_one_of_a_pair_is_going():
    a, b = runs_of([[7, 7, 8], [1]]), runs_of([[7, 5], [1]])
    differs, counted = divergence(a, b)
    assert differs.tolist() == [[False, True, True], [False, False, False]]
    assert counted.tolist() == [[True, True, True], [True, False, False]]
    over_time = divergence_over_time([Condition("x", "x", "p", False)], {"x": a}, b)
    assert over_time["pairs"].tolist() == [2, 1, 1]
    assert over_time["unaltered_going"].tolist() == [2, 1, 0]
    assert over_time["share"].tolist() == [0, 1, 1]
    assert not divergence(a, a)[0].any()


# Statistics.


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
    # The observed differences count as one of the assignments, so p is never 0.
    assert sign_flip_p(np.ones((60, 1)), 999, 0) == [pytest.approx(0.001)]


def test_corrected_test_keeps_its_level_and_interval_its_coverage():
    """600 experiments of 20 comparisons in which nothing happens."""
    rng = np.random.default_rng(5)
    shape = 60, 600 * 20
    differences = rng.standard_t(4, shape) - rng.standard_t(4, shape)
    p = np.concatenate([sign_flip_p(differences[:, begin:begin + 20], 2000, seed)
                        for seed, begin in enumerate(range(0, shape[1], 20))])
    assert 0.04 < (p <= 0.05).mean() < 0.056
    families = np.apply_along_axis(holm, 1, p.reshape(600, 20)).min(axis=1)
    assert 0.005 < (families <= 0.05).mean() < 0.08
    some = differences[:, :1000]
    low, high = ClusterBootstrap(np.arange(60), 0).interval(some.T, np.ones(some.T.shape, bool))
    assert 0.92 < ((low <= 0) & (high >= 0)).mean() < 0.97
    bootstrap = ClusterBootstrap(np.arange(60), 0)
    mean = bootstrap.interval_of(lambda draws: draws @ some[:, 0] / 60)
    np.testing.assert_allclose(mean, (low[0], high[0]))


def effects(directions, controls):
    """A table of effects that beat zero beyond doubt, one outcome a column."""
    rows = []
    for control, values in ((False, directions), (True, controls)):
        for arm, outcomes in enumerate(values):
            name = f"{'random' if control else 'ic'}_{arm}"
            rows += [(name, name, "p", control, f"o{number}", effect)
                     for number, effect in enumerate(outcomes)]
    table = pd.DataFrame(rows, columns=["arm", "label", "pattern", "control", "outcome", "effect"])
    return table.assign(p=1e-9, low_95=table["effect"] - 1e-6, high_95=table["effect"] + 1e-6)


def test_an_effect_must_exceed_the_controls_in_size_whatever_its_sign():
    controls = -np.linspace(0.1, 2, 20)[:, None]
    table = with_claims(effects([[1.95], [-2.1], [2.1], [-0.5]], controls)).set_index("arm")
    assert table.loc[["ic_0", "ic_1", "ic_2", "ic_3"], "claimed"].tolist() == [
        False, True, True, False]
    assert table.loc["ic_0", "p_control"] == pytest.approx(2 / 21)
    assert table.loc["ic_1", "p_control"] == pytest.approx(1 / 21)
    assert table.loc["ic_0", ["control_low", "control_high"]].tolist() == [-2, -0.1]


def test_arms_without_other_controls_or_of_few_starts_are_not_compared():
    arm = Condition("x", "IC x out", "p", False)
    for number, message in ((10, "IC x out has no other control"),
                            (9, "at least 10 levels or starts, not 9")):
        runs = runs_of([[7]] * number)
        with pytest.raises(UserError, match=message):
            compare([arm], {"x": runs}, runs, False, 0)


DECISIONS = (Outcome("p_right", "P(right)", probability=True), Outcome("entropy", "entropy (nats)"),
             Outcome("value", "value"))
ARMS = [*(Condition(f"ic_{k}", f"x {k}", "p", False) for k in range(4)),
        *(Condition(f"random_{k}", "r", "p", True) for k in range(19))]


@pytest.fixture(scope="module")
def decisions():
    """Outcomes of a random network on the first frames of 40 levels, and with noise of 23 kinds in
    its embedding."""
    config, policy = EnvConfig("coinrun", "easy"), tiny_policy()
    slots = LevelSlots(config, 40)
    for slot, level in enumerate(config.draw_levels(40, 5)):
        slots.start(slot, level)
    with torch.no_grad():
        embeddings = policy.embed(to_images(torch.from_numpy(slots.frames.copy())))
        slots.close()
        noise = torch.randn(1 + len(ARMS), 1, embeddings.shape[1],
                            generator=torch.Generator().manual_seed(2))
        noise[0] = 0
        found = []
        for each in noise:
            output = policy.step(embeddings + each, policy.initial_states(40))
            p = output.log_probs.exp()
            found.append(torch.stack([p[:, 6:9].sum(dim=1), -(p * output.log_probs).sum(dim=1),
                                      output.values], dim=1).double().numpy())
    return found[0], np.stack(found[1:])  # (N, K), (arms, N, K)


def false_claims(before, after, seed):
    """Whether an effect is claimed in each of 60 tables in which nothing happens on average."""
    rng, found = np.random.default_rng(seed), []
    for number in range(60):
        signs = 2 * rng.integers(0, 2, (len(before), 1)) - 1
        table = compare_conditions(ARMS, DECISIONS, before, before + signs * (after - before),
                                   number, verdicts=False)
        found.append(table["claimed"][~table["control"]].any())
    return sum(found)


def test_flipped_outcomes_of_a_random_network_are_rarely_claimed(decisions):
    before, after = decisions
    assert np.abs(after - before).mean(axis=(0, 1)).min() > 0.01
    assert false_claims(before, after, 0) <= 6


def test_a_made_up_effect_on_outcomes_of_a_random_network_is_found(decisions):
    before, after = decisions
    rng = np.random.default_rng(0)
    signs = 2 * rng.integers(0, 2, (len(before), 1)) - 1
    after = before + signs * (after - before)
    after[0, :, 0] += 2 * (after - before)[0, :, 0].std()
    after[0, :, 2] = before[:, 2]
    table = compare_conditions(ARMS, DECISIONS, before, after, 0)
    found = table[table["arm"] == "ic_0"].set_index("outcome")
    assert found["verdict"].tolist() == ["claimed", "nothing", "nothing"]
    assert found["claimed"].tolist() == [True, False, False]
    number = table["claimed"][~table["control"]].sum()
    assert claims_summary(table).startswith(f"{number} of 12 tested effects (4 alterations, 3 ")
    assert claims_summary(table.assign(num_controls=18)).startswith("none of 12 effects can be")
    claimed = table[table["control"]]["claimed"].mean()  # the rule, with controls as directions
    assert claimed < 0.05


def test_rows_of_a_level_are_drawn_and_flipped_together(decisions):
    before, after = decisions
    once = compare_conditions(ARMS, DECISIONS, before, after, 0, verdicts=False)
    levels = np.repeat(np.arange(40), 3)
    thrice = (np.repeat(before, 3, axis=0), np.repeat(after, 3, axis=1))
    again = compare_conditions(ARMS, DECISIONS, *thrice, 0, levels, verdicts=False)
    pd.testing.assert_frame_equal(once, again)
    verdicts = ["verdict", "smallest_effect", "median_effect", "median_low_95", "median_high_95"]
    pd.testing.assert_frame_equal(
        with_verdicts(once, DECISIONS, before, after, 0)[verdicts],
        with_verdicts(again, DECISIONS, *thrice, 0, levels)[verdicts])
    with pytest.raises(UserError, match="at least 10 levels or starts, not 9"):
        compare_conditions(ARMS, DECISIONS, thrice[0][:27], thrice[1][:, :27], 0, levels[:27])
    thrice[1][4, 3, 2] = np.nan
    with pytest.raises(UserError, match="the outcome value of the arm random_0 is NaN"):
        compare_conditions(ARMS, DECISIONS, *thrice, 0, levels)


def test_nothing_is_an_interval_within_the_margin_and_not_a_large_p():
    rng = np.random.default_rng(1)
    outcomes = (Outcome("p", "p", probability=True), Outcome("value", "value"))
    before = np.stack([rng.random(100), rng.normal(10, 1, 100)], axis=1)
    spread = np.array([[0.1, 1.0], [0.5, 5.0], [0.1, 1.0]])  # of the differences
    shift = np.array([[0, 0], [0, 0], [0.1, 1]])
    noise = rng.normal(size=(3, 100, 2))
    noise -= noise.mean(axis=1, keepdims=True)
    after = before + spread[:, None] * noise + shift[:, None]
    arms = [Condition(f"ic_{k}", f"x {k}", "p", False) for k in range(3)]
    controls = [Condition(f"random_{k}", "r", "p", True) for k in range(2)]
    after = np.concatenate([after, after[:2]])
    moved = dict.fromkeys((arm.name for arm in (*arms, *controls)), 1.0)
    table = compare_conditions([*arms, *controls], outcomes, before, after, 0,
                               moved=moved).set_index(["arm", "outcome"])
    # 2 controls can claim nothing, not even the shift of the third arm.
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
    differences = np.random.default_rng(0).normal(0.0196, 0.14, (400, 1000))
    assert 0.77 < (sign_flip_p(differences, 2000, 0) <= 0.05).mean() < 0.83
    outcomes = [Outcome(str(k), "") for k in range(10)]
    arms = [Condition("ic", "x", "p"), *(Condition(f"r{k}", "r", "p", True) for k in range(2))]
    before, after = np.zeros((400, 10)), np.stack([differences[:, :10]] * 3)
    smallest = compare_conditions(arms, outcomes, before, after, 0)["smallest_effect"]
    assert smallest.mean() == pytest.approx(0.0196, rel=0.03)  # 0.02 in P(cheese), 400 forks


def test_medians_have_the_interval_of_their_paired_difference():
    rng = np.random.default_rng(0)
    for number in (59, 60):
        before = rng.normal(size=number) * 100  # far wider than the effect
        after = before + 1 + 0.01 * rng.normal(size=number)
        bootstrap = ClusterBootstrap(np.arange(number), 0)
        low, high = bootstrap.interval_of_medians(after[None], before[None])[:, 0]
        assert 0.95 < low < 1 < high < 1.05
        drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), 2000)
        expected = [np.median(np.repeat(after, n)) - np.median(np.repeat(before, n))
                    for n in drawn]
        assert [low, high] == pytest.approx(np.quantile(expected, (0.025, 0.975)))
        # Of one side alone, the middle of two values counts where the draws are even.
        single = bootstrap.interval_of_medians(after[None], 0 * before[None])[:, 0]
        medians = [np.median(np.repeat(after, n)) for n in drawn]
        assert single == pytest.approx(np.quantile(medians, (0.025, 0.975)))


@pytest.mark.parametrize(("changes", "message"), [
    ({"lengths": np.array([2])}, r"'lengths' holds int64 \(1\), not int64 \(2\)"),
    ({"lengths": np.array([2, 2])}, "actions of an arm has 3 steps, but its lengths come to 4"),
    ({"lengths": np.array([3, 0])}, "a run has no step"),
    ({"values": np.array([0, np.nan, 0], np.float32)}, "'values' holds NaN or infinity")])
def test_runs_that_do_not_fit_are_refused(tmp_path, changes, message):
    store = comparison_store(tmp_path)
    store.open({"arms": {}})
    with pytest.raises(UserError, match=message):
        store.write("arm", "x", value=vars(dataclasses.replace(runs_of([[7, 7], [8]]), **changes)))


# The script.


def arguments(agent_path, matrices, output, *more):
    """A later flag wins over an earlier one."""
    return [*map(str, (
        "--agent_file", agent_path, "--interpreting_params_name", "tiny",
        "--precomputed_analysis_data_path", matrices, "--env_name", "starpilot", "--num_episodes",
        10, "--num_controls", 2, "--directions", 0, "--seed", 3, "--precision", "float32",
        "--device", "cpu", "--output_dir", output, *more))]


@pytest.fixture(scope="module")
def compared_and_drawn(agent_path, matrices, tmp_path_factory):
    path = tmp_path_factory.mktemp("compared") / "out"
    with figures_drawn() as figures:
        assert compare_interventions.main(arguments(
            agent_path, matrices, path, "--directions", "1", "--swaps", "3:5")) == 0
    return comparison_store(path), figures


@pytest.fixture(scope="module")
def compared(compared_and_drawn):
    return compared_and_drawn[0]


def test_arms_are_what_is_played_on_the_same_levels(compared, agent_path):
    levels = list(enumerate(EnvConfig("starpilot", "easy").draw_levels(10, 3)))
    step = golden_projector().swapped_step([1], [None], "ica", "cpu")
    policy = load_agent(agent_path)
    for arm, patches in (("unaltered", []),
                         ("ic_1_to_None", [ChangeState(step, steps=(1, None))])):
        with patched(policy, patches):
            episodes = sorted(play_episodes(policy, FLOAT32, EnvConfig("starpilot", "easy"),
                                            levels, 3, 64, PlayOptions(keep_frames=False)),
                              key=lambda episode: episode.number)
        runs = read_runs(compared, arm)
        assert runs.starts.tolist() == [level for _, level in levels]
        assert runs.lengths.tolist() == [episode.length for episode in episodes]
        assert runs.ends.tolist() == [episode.level_complete for episode in episodes]
        assert runs.actions.tolist() == [action for episode in episodes
                                         for action in episode.actions[:-1]]
        assert runs.rewards.any()
        assert runs.rewards.tolist() == [reward for episode in episodes
                                         for reward in episode.rewards[1:]]
        np.testing.assert_allclose(runs.values, np.concatenate(
            [episode.values[:-1] for episode in episodes]), atol=1e-5)
    moved = [read_runs(compared, arm).moved for arm in ("unaltered", "ic_1_to_None")]
    assert moved[0] == 0 < moved[1]


def test_the_figure_shows_the_table_of_effects(compared_and_drawn):
    compared, figures = compared_and_drawn
    figure = figures[compared.file_of("figure").name]
    table, course = (pd.read_csv(compared.file_of(name)) for name in ("effects", "divergence"))
    rows = table[~table["control"]]
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == len(REAL) + 2
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "IC 1 out", "IC 3 to 5"]
    for axes, outcome in zip(panels, chosen_outcomes(simulated=False)):
        assert axes.get_title() == outcome.label
        shown = rows[rows["outcome"] == outcome.name]
        zero, *marks = axes.lines
        assert set(zero.get_xdata()) == {0}
        intervals, effects = marks[::2], marks[1::2]
        np.testing.assert_allclose([line.get_xdata() for line in intervals],
                                   shown[["low_95", "high_95"]], rtol=1e-4)
        np.testing.assert_allclose([line.get_xdata()[0] for line in effects], shown["effect"],
                                   rtol=1e-4)
        assert colours_of(effects) == colours_of(intervals) == [
            VERMILION if claimed else BLUE for claimed in shown["claimed"]]
        controls = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
        np.testing.assert_allclose(controls, shown[["control_low", "control_high"]], rtol=1e-4,
                                   atol=1e-9)
    _, over_time = panels[-2:]
    assert len(over_time.lines) == course["arm"].nunique()
    assert np.asarray(Image.open(compared.file_of("figure"))).std() > 10


def test_everything_is_written(compared):
    table = pd.read_csv(compared.file_of("effects"))
    arms = ["ic_1_to_None", "ic_3_to_5",
            *(f"random_{k:03d}_0_to_{to}" for to in (None, 1) for k in range(2))]
    assert sorted(set(table["arm"])) == sorted(arms)
    assert len(table) == len(arms) * len(REAL)
    assert not table.isna().any().any()
    text = compared.file_of("report").read_text()
    assert "nan" not in text
    assert "Nothing can be claimed with fewer than 19 controls" in text
    assert text.count("| IC 3 to 5 |") == 4  # three tables of outcomes and one of sizes
    course = pd.read_csv(compared.file_of("divergence"))
    assert course["share"].between(0, 1).all() and set(course["arm"]) == set(arms)
    settings = json.loads((compared.path / "settings.json").read_text())
    assert settings["arms"]["random_001_0_to_1"] == {"from": [0], "to": [1], "turned_by_seed": 1}


def test_shards_give_the_comparison_of_one_run(agent_path, simulator_file, matrices, tmp_path):
    def run(folder, *more):
        return compare_interventions.main(arguments(
            agent_path, matrices, tmp_path / folder, "--directions", "0", "--in_simulator",
            "--model_file", simulator_file, "--recording_rand_init", *more))

    assert run("one") == run("shards", "--shard", "2/2") == 0
    assert {arm.name for arm in (tmp_path / "shards" / "arms").iterdir()} == {
        "ic_0_to_None", "random_001_0_to_None"}
    assert run("shards", "--shard", "1/2") == run("shards", "--join") == 0
    assert bytes_of_files(tmp_path / "shards") == bytes_of_files(tmp_path / "one")


def test_simulated_starts_are_compared_too(simulator_file, agent_path, recording, matrices,
                                           tmp_path):
    argv = arguments(agent_path, matrices, tmp_path / "sim", "--in_simulator", "--model_file",
                     simulator_file, "--data_dir", recording / "data", "--batch_size", 4)
    assert compare_interventions.main(argv) == 0
    folder = comparison_store(tmp_path / "sim")
    unaltered, out = (read_runs(folder, arm) for arm in ("unaltered", "ic_0_to_None"))
    assert unaltered.lengths.tolist() == [4] * 10
    assert np.abs(out.values - unaltered.values).max() > 0.01
    table = pd.read_csv(folder.file_of("effects"))
    assert set(table["outcome"]) == {each.name for each in chosen_outcomes(simulated=True)}


@pytest.mark.parametrize(("more", "message"), [
    (["--num_episodes", 9], "at least 10 levels or starts, not 9"),
    (["--num_controls", 1], "--num_controls must be at least 2"),
    (["--directions", "16"], "no ica direction 16: they are numbered 0 to 15"),
    (["--swaps", "3-5"], "--swaps takes pairs such as 10:12 or 10:12,5:None, not '3-5'"),
    (["--swaps", "0:None"], "the alteration ic_0_to_None is asked for twice"),
    (["--in_simulator"], "--in_simulator needs --model_file"),
    (["--num_direction_episodes", 77], "hx_mu_77.npy; analysis/hidden_analysis_precompute.py")])
def test_mistakes_are_one_sentence_and_write_nothing(agent_path, matrices, tmp_path, capsys, more,
                                                     message):
    output = tmp_path / "out"
    assert compare_interventions.main(arguments(agent_path, matrices, output, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not output.exists()


def test_matrices_of_another_agent_are_refused(agent_path, matrices, tmp_path, capsys):
    small = save_projector(tmp_path / "small", Projector(
        torch.zeros(3), torch.ones(3), torch.eye(3), torch.ones(3), torch.eye(3), torch.eye(3)))
    feed_forward = tmp_path / "model_0.pth"
    save_agent(feed_forward, tiny_policy(recurrent=False), {})
    for main, argv in (
            (compare_interventions.main, arguments(agent_path, small, tmp_path / "out")),
            (record.main, record_arguments(agent_path, tmp_path / "out", 1,
                                           *swap_flags(small, [0], [1])))):
        assert main(argv) == 2
        assert "those of 3 hidden units, but the agent has 64" in capsys.readouterr().err
    assert record.main(record_arguments(feed_forward, tmp_path / "out", 1,
                                        *swap_flags(matrices, [0], [1]))) == 2
    assert "those of 64 hidden units, but the agent has 256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("more", "message"), [
    (["--random_directions", "3"], "needs --swap_directions_from"),
    (["--swap_directions_from", "3"], "1 directions to swap from, but 0"),
    (["--swap_directions_from", "30", "--swap_directions_to", "None"], "no ica direction 30")])
def test_record_refuses_swaps_that_say_nothing(agent_path, matrices, tmp_path, capsys, more,
                                               message):
    argv = record_arguments(agent_path, tmp_path / "out", 1, "--interpreting_params_name", "tiny",
                            "--precomputed_analysis_data_path", str(matrices), *more)
    assert record.main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
