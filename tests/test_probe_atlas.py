"""Probe atlas and pushes along probe directions: only planted effects are found."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, refusal, tiny_policy
from sklearn.metrics import roc_auc_score

import record
from agents.agent_file import load_agent, save_agent
from agents.layers import STATE
from agents.replay import recorded_game
from agents.testbed import BASELINE, Condition, Testbed
from analysis import level_labels, probe_atlas, probe_interventions
from analysis.memory.labels import read_examples
from analysis.memory.probe_atlas import (
    BASELINES,
    CURRENT,
    HIDDEN,
    LINEAR,
    NETWORK,
    UNTRAINED,
    Label,
    better_probes,
    hidden_states_of,
    labels_of,
    probe_label,
    representations_of,
    with_claims,
)
from analysis.memory.probe_interventions import (
    COVARIANCE,
    OPEN_OUTCOMES,
    PROBE,
    closed_outcome_list,
    closed_outcomes,
    head_outcomes,
    open_loop,
    pushes,
    swaps,
    unit_directions,
)
from interventions.patches import Add
from interventions.probes import compare_probes, probe, split_levels
from stats.bootstrap import ClusterBootstrap

NUM_LEVELS, STEPS = 60, 12


@pytest.fixture(scope="module")
def agent(shared):
    """An agent without memory that runs and jumps to the right whatever it sees; its embedder is
    fast."""
    def make(folder):
        policy = tiny_policy(recurrent=False, architecture="nature")
        with torch.no_grad():
            policy.fc_policy.weight.zero_()
            policy.fc_policy.bias[[7, 8]] += 30
        save_agent(folder / "model_0.pth", policy)
        return folder / "model_0.pth"
    return shared("runner", make)


@pytest.fixture(scope="module")
def run(agent, shared):
    """A recording of the agent that runs to the right, with labels and a probe atlas."""
    def make(folder):
        assert record.main([
            "--model_file", str(agent), "--logdir", str(folder), "--num_episodes", "55",
            "--param_name", "tiny", "--env_name", "coinrun", "--distribution_mode", "hard",
            "--seed", "0", "--precision", "float32", "--device", "cpu", "--no_action_noise",
            "--no_videos"]) == 0
        assert level_labels.main(["--data_dir", str(folder / "data"), "--output_dir",
                                  str(folder / "labels")]) == 0
        make_atlas(agent, folder)
        return folder
    return shared("probe_atlas", make)


def inputs(agent, folder):
    return ["--agent_file", str(agent), "--data_dir", str(folder / "data"), "--labels_dir",
            str(folder / "labels"), "--device", "cpu"]


def make_atlas(agent, folder):
    """Probe fewer labels than usual, with networks that train for fewer epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.memory.probe_atlas.STEPS_AHEAD", (1, 50))
        patch.setattr("interventions.probes.MAX_EPOCHS", 4)
        assert probe_atlas.main([
            *inputs(agent, folder), "--num_examples", "500", "--hidden_units", "4",
            "--num_shuffles", "0", "--output_dir", str(folder / "atlas")]) == 0


@pytest.fixture(scope="module")
def examples(run, agent):
    return read_examples(run / "data", run / "labels", agent)


def made_up(seed=0):
    """Return levels (N,), a split of them, noise (N, 6), and a random generator."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(np.arange(NUM_LEVELS) + 7, STEPS)
    return levels, split_levels(levels, 0), rng.normal(size=(len(levels), 6)), rng


def test_a_network_decodes_what_a_linear_probe_cannot():
    levels, parts, noise, _ = made_up()
    target = noise[:, 0] * noise[:, 1] > 0
    auc = {units: probe(noise, target, levels, 0, num_shuffles=1, hidden_units=units, parts=parts)
           .scores.set_index("metric").loc["auc"] for units in (0, 32)}
    assert auc[0]["score"] < 0.65 < 0.9 < auc[32]["score"]
    assert abs(auc[32]["shuffled"] - 0.5) < 0.1
    found = probe(noise, 50 + 9 * noise[:, 0] ** 2, levels, 0, regression=True, num_shuffles=0,
                  hidden_units=32, parts=parts)
    assert found.scores["score"].item() > 0.6 and found.weights is None


def test_the_difference_of_two_probes_is_paired():
    levels, parts, noise, rng = made_up()
    target = noise[:, 0] + 0.3 * rng.normal(size=len(levels)) > 0
    knows, half, knows_not = (probe(entries, target, levels, 0, num_shuffles=0, parts=parts)
                              for entries in (noise, noise + [2, 0, 0, 0, 0, 0] * rng.normal(
                                  size=noise.shape), noise[:, 1:]))
    bootstrap = ClusterBootstrap(levels[parts.test], 0)
    same, p = compare_probes(knows, knows, "auc", bootstrap)
    assert (same.value, same.low, same.high, p) == (0, 0, 0, 1)
    for other in (half, knows_not):
        difference, p = compare_probes(knows, other, "auc", bootstrap)
        scores = [found.scores.set_index("metric")["score"]["auc"] for found in (knows, other)]
        assert difference.value == pytest.approx(scores[0] - scores[1])
        assert 0 < difference.low < difference.value < difference.high and p < 0.01
        back, again = compare_probes(other, knows, "auc", bootstrap)
        assert (back.value, again) == (pytest.approx(-difference.value), p)


def test_p_values_of_the_bootstrap_are_right_under_the_null():
    rng = np.random.default_rng(0)
    p = [ClusterBootstrap(np.arange(40), seed, 500).p_of(lambda draws: draws @ rng.normal(size=40))
         for seed in range(200)]
    assert np.mean(np.array(p) < 0.05) < 0.1 and np.mean(p) == pytest.approx(0.5, abs=0.07)


@pytest.mark.parametrize("kind", [LINEAR, NETWORK])
def test_the_identity_of_a_level_helps_no_probe(kind):
    """The label is constant per level and the state identifies the level: no probe generalises."""
    levels, parts, _, rng = made_up()
    place = levels - levels.min()
    identity = np.eye(NUM_LEVELS)[place] + 0.01 * rng.normal(size=(len(levels), NUM_LEVELS))
    target = rng.permutation(np.arange(NUM_LEVELS) % 2)[place].astype(float)
    entries = {name: identity if name == HIDDEN else identity[:, :1]
               for name in (HIDDEN, *BASELINES)}
    table, beyond, _ = probe_label(Label("level", "planted", target, "auc"), entries, levels, parts,
                                   0, 8, 0)
    row = table[(table["representation"] == HIDDEN) & (table["probe"] == kind)].iloc[0]
    assert row["low_95"] < 0.5 < row["high_95"]
    assert not with_claims(beyond)["claimed"].any()


def test_a_planted_unit_is_found_beyond_the_frame_and_noise_is_not(run, agent, examples):
    policy, rng = load_agent(agent), np.random.default_rng(0)
    planted, noise = (rng.integers(0, 2, len(examples)).astype(float) for _ in range(2))
    hidden = np.concatenate([examples.hidden_out, np.float32(planted)[:, None]], axis=1)
    rows = np.sort(rng.permutation(len(examples))[:900])
    levels = examples.level[rows]
    parts = split_levels(levels, 0)
    representations = representations_of(policy, dataclasses.replace(examples, hidden_out=hidden),
                                         rows, parts.train, 0)
    found = {}
    for name, values in (("planted", planted), ("noise", noise)):
        label = Label(name, "planted", values[rows], "auc")
        assert not label.problem(levels, parts)
        found[name] = probe_label(label, representations, levels, parts, 0, 8, 1)
    beyond = with_claims(pd.concat([found["planted"][1], found["noise"][1]])).set_index("label")
    assert beyond.loc["planted", "hidden_state"] > 0.99 and beyond.loc["planted", "claimed"]
    assert beyond.loc["planted", "baseline_score"] < 0.65
    assert not beyond.loc["noise", "claimed"] and beyond.loc["noise", "hidden_state"] < 0.65
    scores = found["planted"][0].set_index(["representation", "probe"])
    assert set(scores.index) == {(name, kind) for name in representations
                                 for kind in (LINEAR, NETWORK)}
    assert abs(scores.loc[(HIDDEN, LINEAR), "shuffled"] - 0.5) < 0.15
    weights = found["planted"][2]
    assert np.abs(weights).argmax() == len(weights) - 1 and weights[-1] > 0
    # The score on the test part is the plain AUC.
    auc = roc_auc_score(planted[rows][parts.test], hidden[rows][parts.test] @ weights)
    assert scores.loc[(HIDDEN, LINEAR), "score"] == pytest.approx(auc)


def test_labels_and_representations_are_those_of_the_steps(agent, examples):
    rows = np.arange(3, len(examples), 5)
    labels = {label.name: label for label in labels_of(examples, rows)}
    table = examples.labels.iloc[rows]
    ahead = (table["saw_dx"] > 0) & (table["saw_dx"] <= 4)
    np.testing.assert_array_equal(labels["saw_ahead"].target, ahead)
    assert labels["saw_dx"].metric == "r2" and labels["on_ground"].metric == "auc"
    assert not (ahead & (table["saw_in_view"] == 0)).any() and ahead.any()
    later = labels["action_ahead_5"]
    same = examples.episode[np.minimum(rows + 5, len(examples) - 1)] == examples.episode[rows]
    np.testing.assert_array_equal(later.known, same & (rows + 5 < len(examples)))
    np.testing.assert_array_equal(later.target[later.known],
                                  examples.actions[rows[later.known] + 5])
    jump = labels["jump_ahead_5"]
    np.testing.assert_array_equal(jump.known, later.known)
    np.testing.assert_array_equal(jump.target[jump.known],
                                  np.isin(later.target[later.known], (2, 5, 8)))
    features = representations_of(load_agent(agent), examples, rows, rows % 2 == 0, 0)
    # Without memory, the hidden state is the embedding.
    np.testing.assert_allclose(features[HIDDEN], features["embedding"], atol=1e-5)
    assert features[UNTRAINED].shape == features[HIDDEN].shape
    assert features[CURRENT].shape[1] == (features["embedding"].shape[1]
                                          + features["action_position"].shape[1])
    first = examples.step[rows] == 0
    assert (features["action_position"][first, :15] == 0).all()
    assert (features["action_position"][~first, :15].argmax(axis=1)
            == examples.actions[rows[~first] - 1]).all()
    np.testing.assert_allclose(hidden_states_of(load_agent(agent), examples),
                               examples.hidden_out, atol=1e-5)


def test_an_agent_without_memory_knows_nothing_beyond_the_frame(run, agent, capsys):
    folder = run / "atlas"
    beyond, atlas = pd.read_csv(folder / "beyond.csv"), pd.read_csv(folder / "atlas.csv")
    assert len(beyond) > 20 and not beyond["claimed"].any()
    best = better_probes(atlas).set_index(["label", "representation"])
    assert len(best) == len(beyond) * atlas["representation"].nunique()
    assert best.loc[("saw_in_view", HIDDEN), "held_out"] == max(atlas[
        (atlas["label"] == "saw_in_view") & (atlas["representation"] == HIDDEN)]["held_out"])
    skipped = pd.read_csv(folder / "skipped.csv")
    assert not set(skipped["label"]) & set(beyond["label"])
    text = (folder / "report.md").read_text()
    assert f"0 of {len(beyond)} labels" in text and "`on_ground`" in text
    assert (folder / "actions_ahead.png").stat().st_size > 10_000
    before = (folder / "atlas.csv").read_bytes()
    (folder / "beyond" / "on_ground.csv").unlink()  # a killed run computes the missing label only
    capsys.readouterr()
    make_atlas(agent, run)
    assert "on_ground (1 of 1)" in capsys.readouterr().out
    assert (folder / "atlas.csv").read_bytes() == before


def jumping_agent(agent, examples):
    """Return an agent that jumps if the unit of its state that varies most is large, and this
    unit. The agent's value is the unit with the next lower index."""
    policy, unit = load_agent(agent), int(examples.hidden_out.std(axis=0).argmax())
    with torch.no_grad():
        policy.fc_policy.weight.zero_()
        policy.fc_policy.weight[8, unit], policy.fc_policy.weight[7, unit] = 2, -2
        policy.fc_value.weight.zero_()
        policy.fc_value.bias.zero_()
        policy.fc_value.weight[0, unit - 1] = 1
    return policy, unit


def test_a_push_along_the_unit_that_causes_jumps_makes_the_agent_jump(agent, examples):
    (policy, unit), norm = jumping_agent(agent, examples), 0.7
    units = np.roll(np.eye(policy.hidden_state_size), -unit, axis=0)
    conditions = pushes({"causal": {PROBE: units[0]}, "inert": {PROBE: units[2]}}, norm, 19, 0)
    assert [np.linalg.norm(condition.value) for condition in conditions] == pytest.approx(
        [norm] * len(conditions))
    states, levels = examples.hidden_out, examples.level
    label = Label("causal", "planted", np.float64(states[:, unit] > states[:, unit].mean()), "auc")
    table = open_loop(policy, states, levels, conditions,
                      list(swaps([label], states, 19, 0)), 0)
    rows = table[~table["control"]].set_index(
        ["about", "method", "sense", "outcome"]).sort_index()
    assert rows.loc[("causal", PROBE, "more", "jump"), "claimed"]
    assert rows.loc[("causal", PROBE, "less", "jump"), "effect"] < 0
    assert rows.loc[("causal", PROBE, "more", "jump"), "ratio_to_random"] > 3
    assert rows.loc[("causal", PROBE, "more", "jump"), "ratio_to_swap"] > 0
    assert rows.loc[("inert", PROBE, "more"), "effect"].abs().max() < 1e-9
    assert (rows.loc[("causal", PROBE, "more", "jump"), "effect"]
            / rows.loc[("causal", "swap", "more", "jump"), "effect"]
            == pytest.approx(rows.loc[("causal", PROBE, "more", "jump"), "ratio_to_swap"]))
    env = recorded_game(examples.folder)
    testbed = Testbed(policy, FLOAT32, env, [901, 902, 903], num_slots=4, causes=True)
    jump = [outcome.name for outcome in closed_outcome_list(env.env_name)].index("jump")

    def play(push):
        return closed_outcomes(testbed, Condition("push", patches=[
            Add(STATE, vector=push.astype(np.float32))]))

    still = closed_outcomes(testbed, BASELINE)
    np.testing.assert_array_equal(play(norm * units[2]), still)
    assert play(3 * units[0])[:, jump].mean() > still[:, jump].mean() + 0.1
    assert ((still[:, 0] == 1) | (still[:, 5:].sum(axis=1) == 1)).all()  # failures have causes


def test_outcomes_of_the_heads_are_means_over_levels(agent, examples):
    policy, unit = jumping_agent(agent, examples)
    states, levels = examples.hidden_out[:200], examples.level[:200]
    with torch.no_grad():
        logits = policy.fc_policy(torch.from_numpy(states)).double()
    probs = torch.softmax(logits, dim=-1).numpy()
    found = head_outcomes(policy, states, levels)
    for row, level in zip(found, np.unique(levels), strict=True):
        chosen = levels == level
        expected = [probs[chosen][:, [2, 5, 8]].sum(axis=1).mean(),
                    probs[chosen][:, [6, 7, 8]].sum(axis=1).mean(),
                    states[chosen, unit - 1].mean(), 0]
        np.testing.assert_allclose(row, expected, atol=1e-5)
    pushed = head_outcomes(policy, states, levels, lambda own: own + np.eye(own.shape[1])[unit - 1])
    names = [outcome.name for outcome in OPEN_OUTCOMES]
    np.testing.assert_allclose(pushed - found, np.tile(np.eye(4)[names.index("value")],
                                                       (len(found), 1)), atol=1e-5)


def test_directions_point_to_more_of_the_label():
    _, _, noise, rng = made_up()
    target = 2 * noise[:, 0] + 0.1 * rng.normal(size=len(noise))
    target[:100] = np.nan
    units = unit_directions(Label("x", "planted", target, "r2"), noise, np.eye(6)[1])
    np.testing.assert_array_equal(units[PROBE], np.eye(6)[1])
    assert units[COVARIANCE][0] > 0.98 and np.linalg.norm(units[COVARIANCE]) == pytest.approx(1)


def test_pushes_run_as_a_script_and_labels_can_be_added(run, agent, tmp_path, capsys):
    arguments = [*inputs(agent, run), "--atlas_dir", str(run / "atlas"), "--num_controls", "2",
                 "--num_episodes", "10", "--methods", "probe", "--output_dir",
                 str(tmp_path / "out")]
    assert probe_interventions.main([*arguments, "--labels", "saw_ahead"]) == 0
    capsys.readouterr()
    assert probe_interventions.main([*arguments, "--labels", "saw_ahead", "velocity_y"]) == 0
    assert "random" not in capsys.readouterr().out.split("open loop")[0]  # played before
    effects = pd.read_csv(tmp_path / "out" / "effects.csv")
    assert set(effects["about"].dropna()) == {"saw_ahead", "velocity_y"}
    assert (effects["effect"] == 0).all()  # the policy of this agent does not read its state
    opened = pd.read_csv(tmp_path / "out" / "open_loop.csv")
    assert (opened[opened["outcome"] == "jump"]["effect"].abs() < 1e-9).all()
    assert (opened[opened["outcome"] == "value"]["effect"].abs() > 1e-6).all()
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Ratios in the real game" in text and "full swap" in text
    reason = refusal(probe_interventions.main, [*arguments, "--labels", "sawahead"], capsys)
    assert "has no direction for label 'sawahead'" in reason and "saw_ahead" in reason
