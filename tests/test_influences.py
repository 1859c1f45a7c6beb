"""Cross-correlation, cross-causation, their consistency, and causal stories, on planted data."""

import dataclasses
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, figures_drawn, golden_projector, refusal, tiny_policy
from PIL import Image
from torch import nn

import plot_value_and_action_weights
import xcorr_and_xcaus_plots
from agents.outputs import ANSWERS
from analysis import causal_stories, dynamics_grads_consistency_plots
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.influence_sentences import (
    MOST_LISTED,
    BehaviourInfluences,
    influence_sentence,
)
from analysis.influences.comparison import COMPARISON_FILES, claims_summary
from analysis.influences.consistency import (
    ALL_SAMPLES,
    AVERAGES,
    LEVEL,
    MEAN,
    agreements,
    matrix_agreements,
    mean_products,
)
from analysis.influences.correlation import CORRELATION_FILES
from analysis.influences.gradients import Influences, readout_gradient
from common.results import ResultStore
from common.step_results import StepResults
from common.tables import markdown_escaped
from generative.saliency.files import SaliencyArrays, SaliencyFolder
from generative.saliency.gradients import WITHOUT_ENV_GRADS
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, open_samples
from interventions.hidden_states_folder import matrix_files
from interventions.projector import Projector

pytestmark = pytest.mark.usefixtures("coarse_figures")
NUM_SAMPLES, NUM_STEPS, STEP, UNITS, COPIES, EPISODES = 64, 5, 2, 4, 3, 12
NAME = "jumps | <b>high</b> [over](http://x) *saws*\n# and more"
LABELS = np.repeat([1, 0, -1], [30, 1, 33])  # behaviour 0 has one sample


def comparison_of(analysis):
    return ResultStore(analysis / "dyn_grad_comparison_data", COMPARISON_FILES)


def correlations_of(analysis):
    return ResultStore(analysis / "cross_corr_and_causation_plot_data", CORRELATION_FILES)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# Correlation.

def test_mean_products_equal_a_direct_sum():
    earlier, later = normal(5, 7, 3), normal(5, 7, 2, seed=1)
    for lag in (0, 2, 6):
        expected = np.zeros((3, 2))
        for sample in range(5):
            for t in range(7 - lag):
                expected += np.outer(earlier[sample, t], later[sample, t + lag])
        np.testing.assert_allclose(mean_products(earlier, later, lag),
                                   expected / (5 * (7 - lag)), atol=1e-12)


# Consistency. The sources are 0, 1 and 2 of five components; the target is 3 unless stated.

def planted(seed, num_samples=240, num_ics=5, step=3, **parts):
    """Return influences without any link except the given parts; the rest is noise.

    Args:
        parts: ``cause``: effect of IC 0 on IC 3 at lag 1, and its gradient; ``common``: size of a
            common cause of IC 1 at lag 1 and IC 3; ``steady``: gradient of IC 3 with respect to
            IC 1 that is the same in all samples and has no effect; ``idle``: likewise for IC 2,
            which is uncorrelated with IC 3.
    """
    rng = np.random.default_rng(seed)
    sources = rng.normal(size=(num_samples, step + 2, num_ics))
    gradients = 0.3 * rng.normal(size=(num_samples, step + 1, num_ics, num_ics))
    gradients[:, 0] = np.eye(num_ics)
    earlier = sources[:, step - 1]
    if "cause" in parts:
        sources[:, step, 3] += parts["cause"] * earlier[:, 0]
        gradients[:, 1, 0, 3] = parts["cause"] + 0.1 * rng.normal(size=num_samples)
    if "common" in parts:
        shared = parts["common"] * rng.normal(size=num_samples)
        earlier[:, 1] += shared
        sources[:, step, 3] += shared
    if "steady" in parts:
        gradients[:, 1, 1, 3] = parts["steady"]
    if "idle" in parts:
        gradients[:, 1, 2, 3] = parts["idle"]
    return Influences(step, tuple(range(step + 1)), (), gradients.astype(np.float32), sources,
                      sources)


def claims(influences, groups=None, num_shuffles=400):
    found = agreements(influences, groups or {}, num_shuffles, seed=0)[ALL_SAMPLES]
    return {tuple(place) for place in np.argwhere(found.claimed).tolist()}


@pytest.mark.parametrize("strength", [0.8, -0.8])
def test_a_planted_cause_is_claimed_and_nothing_else(strength):
    influences = planted(0, cause=strength)
    assert claims(influences) == {(1, 0, 3)}
    found = agreements(influences, {}, 400, seed=0)[ALL_SAMPLES]
    assert found.agreement[1, 0, 3] > 0.65 and found.steadiness[1, 0, 3] > 0.99
    assert found.gradients[1, 0, 3] == pytest.approx(strength, abs=0.05)
    assert found.effects[1, 0, 3] == pytest.approx(0.8 / np.sqrt(1.64), abs=0.1)
    (variance, covariance), _ = np.cov(influences.sources[:, 2, 0], influences.targets[:, 3, 3])
    assert found.explained[1, 0, 3] == pytest.approx(found.medians[1, 0, 3] * variance / covariance)
    assert found.p_corrected[1, 0, 3] == pytest.approx(1 / 401)


@pytest.mark.parametrize("parts", [
    {"common": 1.5},  # gradients of either sign
    {"common": 1.5, "steady": 0.02},  # one sign, but negligible
    {"common": 1.5, "steady": -0.5},  # opposite to the correlation
    {"idle": 0.8}])  # a gradient, but uncorrelated states
def test_mere_correlations_and_idle_gradients_are_not_claimed(parts):
    for seed in range(5):
        influences = planted(seed, **parts)
        if "common" in parts:
            together = mean_products(influences.sources, influences.sources, 1)[1, 3]
            assert together > 0.4  # correlated in one of four pairs of steps
        found = agreements(influences, {}, 400, seed=0)[ALL_SAMPLES]
        assert not found.claimed.any()
        if "steady" not in parts:  # by the p-values alone
            assert found.agreement[1, 1:3, 3].min() > 0.35 and (found.p_corrected > LEVEL).all()


def test_a_cause_is_claimed_beside_a_common_cause_and_in_its_own_behaviour_alone():
    first, second = planted(1, cause=0.9), planted(2, common=1.5)
    both = Influences(3, (0, 1, 2, 3), (), *(np.concatenate([getattr(each, field)
                                          for each in (first, second)])
                                          for field in ("gradients", "targets", "sources")))
    rows = {4: np.arange(240), 7: np.arange(240, 480)}
    found = agreements(both, rows, 400, seed=0)
    assert np.argwhere(found[4].claimed).tolist() == [[1, 0, 3]] and not found[7].claimed.any()
    alone = agreements(first, {}, 400, seed=0)[ALL_SAMPLES]
    for field in ("gradients", "medians", "correlations", "agreement", "effects", "steadiness"):
        np.testing.assert_allclose(getattr(found[4], field), getattr(alone, field), err_msg=field)


def test_one_exploding_sample_decides_no_claim():
    """The gradient of one sample changes the sign of the mean, or makes a small mean large."""
    influences = planted(0, cause=0.8)
    influences.gradients[7, 1, 0, 3] = -1000.0
    found = agreements(influences, {}, 400, seed=0)[ALL_SAMPLES]
    assert found.gradients[1, 0, 3] < -3 and found.medians[1, 0, 3] == pytest.approx(0.8, abs=0.05)
    assert np.argwhere(found.claimed).tolist() == [[1, 0, 3]]
    assert found.effects[1, 0, 3] == pytest.approx(0.8 / np.sqrt(1.64), abs=0.1)
    assert found.outliers[1, 0, 3] == found.outlier_samples[1] == pytest.approx(1 / 240)

    small = planted(0, cause=0.01)
    small.gradients[:, 1, 0, 3] = 0.01
    earlier, later = small.sources[:, 2, 0], small.sources[:, 3, 3]
    later[:] = np.sign(earlier) * np.abs(later)  # correlated for another reason
    small.gradients[np.argmax(earlier), 1, 0, 3] = 1000
    found = agreements(small, {}, 400, seed=0)[ALL_SAMPLES]
    assert found.p_corrected[1, 0, 3] <= LEVEL and found.gradients[1, 0, 3] > 4
    assert found.effects[1, 0, 3] < 0.1 and not found.claimed[1, 0, 3]


def test_summary_counts_influences_on_others_and_on_itself_apart(compared):
    table = comparison_of(compared / "analysis").read("table")
    is_tested, is_itself = table["samples"] >= 8, table["source"] == table["target"]
    others, itself = table[is_tested & ~is_itself], table[is_tested & is_itself]
    assert 0 < others["claimed"].sum() < len(others)
    assert claims_summary(table) == (
        f"{others['claimed'].sum()} of {len(others)} tested influences of a component on others or "
        f"on outputs are claimed ({itself['claimed'].sum()} of {len(itself)} on itself); "
        f"{(~is_tested).sum()} in behaviours with fewer than 8 samples are not tested")


@pytest.mark.parametrize("parts", [{}, {"common": 1.5}])
def test_the_level_holds_over_repeated_draws(parts):
    """At most one draw in twenty may have any corrected p-value below the level."""
    hits = np.zeros(2)
    for seed in range(60):
        influences = planted(1000 + seed, num_samples=40, num_ics=4, **parts)
        found = agreements(influences, {0: np.arange(20), 1: np.arange(20, 40)}, 99, seed).values()
        hits += [any((each.p_corrected <= LEVEL).any() for each in found),
                 any((each.matrix_p_corrected <= LEVEL).any() for each in found)]
    assert hits.max() <= 8  # 3 are expected; 9 or more have a probability of 0.3 %


def test_whole_matrices_agree_when_planted_and_not_on_their_diagonals():
    rng = np.random.default_rng(5)
    gradients = rng.normal(size=(1, 2, 8, 8))
    alike = gradients * rng.uniform(0.5, 2, size=gradients.shape)
    share, p, corrected = matrix_agreements(gradients, alike, 200, seed=0)
    np.testing.assert_allclose(share, 1)
    assert (corrected == 1 / 201).all() and (p == 1 / 201).all()
    other = rng.normal(size=gradients.shape)
    other[..., np.arange(8), np.arange(8)] = gradients[..., np.arange(8), np.arange(8)]
    share, p, corrected = matrix_agreements(gradients, other, 200, seed=0)
    assert (np.abs(share - 0.5) < 0.2).all() and (corrected > LEVEL).all()
    assert (corrected > p).all()  # corrected for two lags


def test_small_behaviours_are_not_tested_but_hold_no_nan():
    influences = planted(3, cause=0.8)
    found = agreements(influences, {0: np.array([5]), 1: np.arange(7)}, 100, seed=0)
    for group in (0, 1):
        for field in dataclasses.fields(found[group]):
            assert np.isfinite(getattr(found[group], field.name)).all(), field.name
        assert (found[group].p_corrected == 1).all() and not found[group].claimed.any()
    np.testing.assert_allclose(found[0].gradients, influences.gradients[5], rtol=1e-5)


# Readout weights.

def test_read_out_weights_are_finite_differences_of_logits_and_value():
    policy, projector = tiny_policy(), golden_projector()
    logits, value = plot_value_and_action_weights.readout(policy, projector)
    state = torch.randn(64, generator=torch.Generator().manual_seed(0))
    moved = state + projector.directions("ica")  # a step of 1 along each coordinate
    change = projector.coordinates(moved, "ica") - projector.coordinates(state, "ica")
    torch.testing.assert_close(change, torch.eye(projector.num_ics), atol=1e-3, rtol=0)
    with torch.no_grad():
        np.testing.assert_allclose(
            logits.T, (policy.fc_policy(moved) - policy.fc_policy(state)).numpy(), atol=1e-3)
        np.testing.assert_allclose(
            value, (policy.fc_value(moved) - policy.fc_value(state))[:, 0].numpy(), atol=1e-3)


@pytest.mark.parametrize("answer", list(ANSWERS))
def test_gradients_of_answers_through_the_heads_are_finite_differences(answer):
    policy = tiny_policy().double()
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def answers(where):
        return ANSWERS[answer](policy.fc_value(where).squeeze(-1),
                               torch.log_softmax(policy.fc_policy(where), dim=-1))

    found = readout_gradient(policy, answer, states)
    direction = torch.randn(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        difference = (answers(states + 1e-6 * direction) - answers(states - 1e-6 * direction))
    torch.testing.assert_close(found @ direction, difference / 2e-6, atol=1e-5, rtol=1e-4)


# Saliency on disk: a smooth surrogate of the simulator in which IC 0 moves IC 1 through the
# environment, and ICs 2 and 3 have a common cause.

@pytest.fixture(scope="module")
def projector():
    rng = np.random.default_rng(7)
    rotation, _ = np.linalg.qr(rng.normal(size=(UNITS, UNITS)))
    unmixing = np.eye(UNITS) + 0.3 * rng.normal(size=(UNITS, UNITS))
    arrays = (rng.normal(size=UNITS), rng.uniform(0.5, 2, UNITS), rotation,
              np.array([3, 2, 1, 0.5]), unmixing, np.linalg.inv(unmixing))
    return Projector(*(torch.from_numpy(array).float() for array in arrays))


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(3)
    return nn.Linear(UNITS, 15).requires_grad_(False), nn.Linear(UNITS, 1).requires_grad_(False)


def surrogate(projector, noise, without_env_grads=False, moved=None):
    """Return the states (M, UNITS) of all steps.

    Args:
        moved: (IC, step, amount) of a change of one IC at one step; None for no change.
    """
    inner = 0.5 * torch.eye(UNITS)
    through_environment = torch.zeros(UNITS, UNITS)
    through_environment[0, 1] = 1.2
    directions = projector.directions("ica")
    state = (projector.mean + noise[:, 0] @ directions).requires_grad_()
    states = []
    for step in range(NUM_STEPS):
        if step:
            ics = projector.coordinates(states[-1], "ica")
            outer = ics.detach() if without_env_grads else ics
            following = torch.tanh(ics @ inner + outer @ through_environment) + noise[:, step]
            state = projector.mean + following @ directions
        if moved is not None and moved[1] == step:
            state = state + moved[2] * directions[moved[0]]
        states.append(state)
    return states


@pytest.fixture(scope="module")
def noise():
    rng = np.random.default_rng(11)
    noise = 0.5 * rng.normal(size=(NUM_SAMPLES, NUM_STEPS, UNITS))
    noise[..., 2:] += rng.normal(size=(NUM_SAMPLES, NUM_STEPS, 1))  # the common cause
    return torch.from_numpy(noise).float()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, projector, heads, noise):
    """A folder with samples, their saliency, directions and behaviours."""
    root = tmp_path_factory.mktemp("influences")
    precomputed = root / "analysis" / "hx_analysis_precomp"
    precomputed.mkdir(parents=True)
    for name, path in matrix_files(precomputed, EPISODES).items():
        np.save(path, getattr(projector, name).numpy())
    behaviours = StepResults(
        root / "analysis" / "combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES, NUM_SAMPLES)
    behaviours.path.mkdir()
    np.save(behaviours.file("per_sample"), LABELS)

    samples = root / "informed_init"
    writer, rng = open_samples(samples, {"kind": "test"}), np.random.default_rng(0)
    states = torch.stack(surrogate(projector, noise), dim=1).detach()
    log_probs = torch.log_softmax(heads[0](states), dim=-1).numpy()
    values = heads[1](states).squeeze(-1).numpy()
    for number in range(NUM_SAMPLES):
        writer.add(number, SampleArrays(
            rng.integers(0, 256, (NUM_STEPS, 20, 20, 3), np.uint8), np.zeros(NUM_STEPS),
            np.zeros(NUM_STEPS), values[number], states[number].numpy(), log_probs[number],
            np.zeros((NUM_STEPS, 8)), np.zeros(4), np.arange(NUM_STEPS) % 9),
            SampleOrigin(number))
    matrices = Projector.load_for(UNITS, precomputed, EPISODES, None)[1]
    for without in (False, True):
        write_surrogate_saliency(samples, projector, heads, noise, without, matrices)
    return root


def write_surrogate_saliency(samples, projector, heads, noise, without, matrices):
    writer = SaliencyFolder(samples)
    states = surrogate(projector, noise, without)
    ics = projector.coordinates(states[STEP], "ica")
    log_probs = torch.log_softmax(heads[0](states[STEP]), dim=-1)
    values = heads[1](states[STEP]).squeeze(-1)
    functions = {f"hx_direction_{i}_ica": ics[:, i] for i in range(UNITS)}
    functions |= {name: function(values, log_probs) for name, function in ANSWERS.items()}
    for name, scalars in functions.items():
        found = torch.autograd.grad(scalars.sum(), states, retain_graph=True,
                                    materialize_grads=True)
        gradients = torch.stack(found, dim=1).numpy() / COPIES  # as stored
        file_name = name + (WITHOUT_ENV_GRADS if without else "")
        for number in range(NUM_SAMPLES):
            writer.add(number, file_name, SaliencyArrays(
                np.zeros((NUM_STEPS, 3, 2, 2)), gradients[number], np.zeros((NUM_STEPS, 8)),
                np.zeros((NUM_STEPS, 2, 2, 3))))
            writer.write("description", number, file_name, value={
                "function": name, "common_timesteps": [STEP], "num_copies": COPIES,
                "without_env_grads": without,
                "matrices_sha256": matrices if name.startswith("hx") else None})


def arguments(root, *more):
    return ["--interpreting_params_name", "tiny", "--samples_dir", str(root / "informed_init"),
            "--save_dir", str(root / "analysis"), "--num_episodes", str(EPISODES),
            "--num_samples", str(NUM_SAMPLES), "--sample_ids", "0", "to", str(NUM_SAMPLES),
            "--common_timesteps", str(STEP), *more]


@pytest.fixture(scope="module")
def figures_of_correlation(folders):
    with figures_drawn() as figures:
        assert xcorr_and_xcaus_plots.main(arguments(folders)) == 0
    return figures


@pytest.fixture(scope="module")
def compared(folders, figures_of_correlation):
    """The same folders after all scripts have run."""
    assert dynamics_grads_consistency_plots.main(arguments(folders, "--num_shuffles", "300")) == 0
    assert causal_stories.main(story_arguments(folders, "--num_films", "2", "--behaviour_names",
                                               f"1={NAME}")) == 0
    return folders


def story_arguments(root, *more):
    return ["--interpreting_params_name", "tiny", "--save_dir", str(root / "analysis"),
            "--num_episodes", str(EPISODES), *more]


def test_jacobians_are_finite_differences_of_the_surrogate(compared, projector, noise):
    folder = correlations_of(compared / "analysis")
    amount = 1e-2
    for lag in (1, 2):
        stored = np.load(folder.file_of(MEAN, "clustall", lag))
        for source in range(UNITS):
            ends = [projector.coordinates(surrogate(
                projector, noise, moved=(source, STEP - lag, sign * amount))[STEP], "ica").detach()
                for sign in (1, -1)]
            differences = (ends[0] - ends[1]).mean(dim=0).numpy() / (2 * amount)
            np.testing.assert_allclose(stored[source], differences, atol=2e-3)
    assert np.load(folder.file_of(MEAN, "clustall", 1))[0, 1] > 0.3


def test_each_behaviour_gets_its_own_samples(compared, projector):
    folder = correlations_of(compared / "analysis")
    states = torch.from_numpy(SampleFolder(compared / "informed_init").stacked_field(
        "hidden_states"))
    ics = projector.coordinates(states, "ica").numpy()
    groups = {ALL_SAMPLES: np.arange(NUM_SAMPLES), 0: [30], 1: np.arange(30)}
    for group, rows in groups.items():
        for lag in range(NUM_STEPS):
            np.testing.assert_allclose(np.load(folder.file_of("products", group, lag)),
                                       mean_products(ics[rows], ics[rows], lag), atol=1e-5)
    assert not folder.file_of("products", ALL_SAMPLES, NUM_STEPS).exists()
    assert not folder.file_of("products", -1, 0).exists()


def test_extreme_samples_are_those_at_the_ends_at_the_saliency_step(compared, projector):
    folder = correlations_of(compared / "analysis")
    samples = SampleFolder(compared / "informed_init")
    ics = projector.coordinates(torch.from_numpy(samples.stacked_field("hidden_states")), "ica")
    for end, largest in (("top", True), ("bottom", False)):
        (row,) = ics[:, STEP, 2].topk(1, largest=largest).indices.tolist()  # 2 % of 64
        expected = np.stack([projector.gradient(torch.from_numpy(
            SaliencyFolder(samples.path).stacked_field(
                "hidden_states", f"hx_direction_{i}_ica", [row])[0, STEP - 2]), "ica").numpy()
            for i in range(UNITS)], axis=-1) * COPIES
        np.testing.assert_allclose(folder.read(MEAN, f"ic2_{end}", 2), expected, atol=1e-5)


def test_the_figures_of_correlation_show_the_matrices_in_one_order(compared,
                                                                   figures_of_correlation):
    folder = correlations_of(compared / "analysis")
    order = np.load(folder.file_of("order"))
    for name, group, lags in (
            ("xcorr_all", ALL_SAMPLES, range(5)), ("xcorr_behaviour_01", 1, range(5)),
            ("xcaus_behaviour_01", "clust1", range(1, STEP + 1))):
        panels = [axes for axes in figures_of_correlation[f"{name}.png"].axes if axes.images]
        averages = AVERAGES if "xcaus" in name else ["products"]
        assert len(panels) == len(lags) * len(averages)
        for (average, lag), axes in zip(itertools.product(averages, lags), panels):
            assert axes.get_title().split(" (")[0].split(", ")[0] == f"k = {lag}"
            np.testing.assert_array_equal(axes.images[0].get_array(),
                                          folder.read(average, group, lag)[order][:, order])
        found = [np.abs(folder.read(*key)) for key in itertools.product(
            averages[-1:], [group], lags)]  # the answer leaves out a component with itself
        lag, source, target = max(
            np.ndindex(len(found), *found[0].shape), key=lambda key: found[key[0]][key[1:]] * (
                key[1] != key[2]))
        title = figures_of_correlation[f"{name}.png"].get_suptitle().replace("\n", " ")
        assert f": {source} and {target}, " in title and f" (k = {lags[lag]}" in title
        for labels in panels[0].get_yticklabels(), panels[-1].get_xticklabels():
            assert [label.get_text() for label in labels] == [str(i) for i in order]
        assert not panels[1].get_yticklabels()  # the first panel of the row names its rows, too
    plots = compared / "analysis" / "cross_corr_and_causation_plots"
    settings = json.loads((plots / "settings.json").read_text())
    assert settings["lags"] == list(range(5)) and settings["lags_left_out"] == [5, 6, 7, 8, 9, 10]
    assert settings["samples_of_behaviours"] == {"0": 1, "1": 30}


def test_the_cause_through_the_environment_is_claimed_with_its_gradients_alone(compared):
    table = comparison_of(compared / "analysis").read("table")
    between = table[(table["behaviour"] == "all") & (table["source"] != table["target"])
                    & table["target"].str.startswith("IC")]
    claimed = between[between["claimed"]]
    assert set(zip(claimed["env_grads"], claimed["source"], claimed["target"])) == {
        ("with", "IC 0", "IC 1")}
    assert 1 in claimed["lag"].tolist()
    # The common cause leads to an equally strong correlation, which is not claimed.
    row = between[(between["source"] == "IC 2") & (between["target"] == "IC 3")
                  & (between["lag"] == 1) & (between["env_grads"] == "with")].iloc[0]
    assert row["cross_correlation"] > 0.3 and not row["claimed"]
    assert len(table) == 2 * 3 * (STEP * UNITS * UNITS + (STEP + 1) * UNITS * len(ANSWERS))
    small = table[table["behaviour"] == "0"]
    assert (small["samples"] == 1).all() and not small["claimed"].any()


def test_matrices_of_the_comparison_are_those_of_its_table(compared):
    folder = comparison_of(compared / "analysis")
    table = folder.read("table")
    for suffix, kind in (("", "with"), ("_without_env_grads", "without")):
        row = table[(table["behaviour"] == "1") & (table["env_grads"] == kind)
                    & (table["lag"] == 2) & (table["source"] == "IC 0")
                    & (table["target"] == "value")].iloc[0]
        place = 0, UNITS + list(ANSWERS).index("value")
        for average, column in (("mean", "gradient"), ("median", "median_gradient")):
            assert folder.read(average, 1, 2, suffix)[place] == pytest.approx(row[column], rel=1e-4)
        assert folder.read("agreement", 1, 2, suffix)[place] == pytest.approx(
            row["agreement"], rel=1e-4)
    matrices = folder.read("matrix_table")
    assert len(matrices) == 2 * 3 * STEP and matrices["agreement"].between(0, 1).all()


def check_pictures(folder):
    pictures = list(folder.rglob("*.png"))
    assert pictures
    for path in pictures:
        image = Image.open(path)
        assert min(image.size) > 80 and np.asarray(image.convert("L")).std() > 5, path.name


def test_pages_say_what_is_claimed_and_what_is_not(compared):
    stories = compared / "analysis" / "causal_stories"
    page = (stories / "all.md").read_text()
    with_grads, without = page.split("## Without gradients")
    assert "**IC 0 raises IC 1 at lag 1.**" in with_grads
    assert "It is not claimed without gradients through the environment" in with_grads
    assert "**Components on other components:** none is claimed" in without
    single = (stories / "behaviour_00.md").read_text()
    assert "Too few samples for a test (1, but at least 8 are needed); nothing is claimed" in single
    index = (stories / "index.md").read_text()
    methods = (ROOT / "docs" / "methods.md").read_text()
    for text in (index, methods.partition("When is an influence claimed?")[2]):
        assert text.count("four conditions hold") == 1
    assert "64 simulated samples; 2 behaviours; 33 samples without a behaviour" in index
    for path in (stories / "index.md", stories / "behaviour_01.md"):
        assert f"Behaviour 1: {markdown_escaped(NAME)}" in path.read_text()
    for path in stories.glob("*.md"):
        text = path.read_text()
        assert "nan" not in text.lower().split() and "<b>" not in text
        for link in re.findall(r"(?<!\\)\]\(([^)]+)\)", text):
            assert not Path(link).is_absolute() and (stories / link).exists(), (path.name, link)
    check_pictures(compared / "analysis")


def test_a_sentence_says_no_more_than_its_row(compared):
    table = comparison_of(compared / "analysis").read("table")
    row = table.iloc[0].copy()
    row[["source", "target", "median_gradient", "steadiness", "lag", "explained"]] = [
        "IC 3", "leftwards", -0.25, 0.7, 2, -0.5]
    text = influence_sentence(row, None)
    assert ("**IC 3 lowers the mean log-probability of going left at lag 2, on average.**"
            in text and "has the opposite sign" in text)
    row[["steadiness", "explained", "lag"]] = [0.95, 1.4, 0]
    text = influence_sentence(row, None)
    assert "going left at lag 0.**" in text and "more than their whole covariance" in text


def test_a_page_shows_every_component_that_its_text_names(compared):
    """This holds for the source of an influence on an output after a full list on components."""
    tables = comparison_of(compared / "analysis")
    row = tables.read("table").query("source != target").iloc[0]
    claimed = row.to_frame().T.loc[[row.name] * (MOST_LISTED + 1)].assign(claimed=True, samples=50)
    claimed["source"], claimed["agreement"] = "IC 1", 1.0
    claimed["target"] = [f"IC {number + 2}" for number in range(MOST_LISTED)] + ["value"]
    claimed.iloc[-1, claimed.columns.get_indexer(["source", "agreement"])] = "IC 40", 0.9
    matrices = tables.read("matrix_table").query("behaviour == @row.behaviour")
    found = BehaviourInfluences(claimed, matrices, 0.05, 8)
    named = set(re.findall(r"IC \d+", found.text(row["env_grads"])))
    assert {"IC 1", "IC 40"} < named == set(found.components())


def test_behaviours_and_environment_gradients_can_be_left_out(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamics_grads_consistency_plots, "save_figures", lambda *_: 0)
    copy = linked_copy(folders, tmp_path / "copy")
    shutil.rmtree(copy / "analysis" / "combined_agent_env_hx_analysis_precomp")
    samples = copy / "informed_init"
    for path in [*samples.glob(f"*/*{WITHOUT_ENV_GRADS}*"), *samples.glob("*/*_leftwards.*")]:
        path.unlink()
    output = tmp_path / "out"
    assert dynamics_grads_consistency_plots.main(arguments(
        copy, "--save_dir", str(output), "--precomp_dir",
        str(copy / "analysis" / "hx_analysis_precomp"), "--num_shuffles", "100", "--no_behaviours",
        "--only_with_env_grads")) == 0
    table = comparison_of(output).read("table")
    assert set(table["behaviour"]) == {"all"} and set(table["env_grads"]) == {"with"}
    assert "leftwards" not in set(table["target"]) and "value" in set(table["target"])
    assert causal_stories.main(story_arguments(copy, "--comparison_dir", str(
        output / "dyn_grad_comparison_data"), "--output_dir", str(tmp_path / "stories"))) == 0
    assert "were not analysed" in (tmp_path / "stories" / "all.md").read_text()


def linked_copy(folder, to):
    """Copy a folder of some thousand files with hard links. ``replace_array`` and the scripts
    replace files instead of changing them, so the original folder remains unchanged."""
    return shutil.copytree(folder, to, copy_function=os.link)


def replace_array(path, array):
    """Replace an array file without changing files that are linked to it."""
    path.unlink(missing_ok=True)
    np.save(path, array)


@pytest.mark.parametrize(("more", "words"), [
    (["--sample_ids", "0", "to", "70"], "has no sample 64, one of 6 missing"),
    (["--num_samples", "50"], "no results for 50 samples, but those for 64; give --num_samples 64"),
    (["--common_timesteps", "1"], "computed with another common_timesteps"),
    (["--common_timesteps", "5"], "have 5 steps, too few for step 5")])
def test_what_does_not_fit_is_said(folders, capsys, more, words):
    assert re.search(words, refusal(xcorr_and_xcaus_plots.main, arguments(folders, *more), capsys))


def test_files_that_do_not_belong_together_are_named(folders, tmp_path, capsys):
    copy = linked_copy(folders, tmp_path / "copy")
    main = xcorr_and_xcaus_plots.main
    path = copy / "informed_init" / "sample_00007" / "grad_hx_hx_direction_3_ica.npy"
    kept = np.load(path)
    path.unlink()
    message = refusal(main, arguments(copy), capsys)
    assert str(path) in message and "saliency_experiments.py writes it" in message
    replace_array(path, kept * 2)  # contradicts its JSON file
    assert "should be the identity matrix" in refusal(main, arguments(copy), capsys)
    replace_array(path, kept)
    mean = matrix_files(copy / "analysis" / "hx_analysis_precomp", EPISODES)["mean"]
    kept = np.load(mean)
    replace_array(mean, kept + 1)
    assert "computed with another directions file" in refusal(main, arguments(copy), capsys)
    replace_array(mean, kept)
    behaviours = StepResults(copy / "analysis" / "combined_agent_env_hx_analysis_precomp",
                             BEHAVIOUR_FILES, NUM_SAMPLES)
    replace_array(behaviours.file("per_sample"), LABELS[:-1])
    assert "63 behaviours, not one for each of 64" in refusal(main, arguments(copy), capsys)


def test_published_saliency_without_descriptions_counts_copies_as_the_yaml_says(
        folders, tmp_path, monkeypatch):
    monkeypatch.setattr(xcorr_and_xcaus_plots, "save_figures", lambda *_: 0)
    copy = linked_copy(folders, tmp_path / "copy")  # `tiny` has 3 copies, like these samples
    for path in copy.glob("informed_init/*/saliency_*.json"):
        path.unlink()
    assert xcorr_and_xcaus_plots.main(arguments(
        copy, "--no_behaviours", "--output_dir", str(tmp_path / "out"), "--data_output_dir",
        str(tmp_path / "data"))) == 0
    found = np.load(tmp_path / "data" / "xcaus_hx_clustall_t-1.npy")
    assert found[0, 1] > 0.3


def test_read_out_weights_are_listed(agent_path, matrices, tmp_path):
    assert plot_value_and_action_weights.main([
        "--agent_file", str(agent_path), "--interpreting_params_name", "tiny",
        "--precomputed_analysis_data_path", str(matrices), "--num_episodes", str(EPISODES),
        "--output_dir", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "read_out_weights.csv").read_text().splitlines()
    assert lines[0].startswith("output,kind,IC 0,IC 1,") and len(lines) == 1 + 15 + 15 + 1
    logits, value = plot_value_and_action_weights.readout(tiny_policy(), golden_projector())
    assert lines[2].split(",")[:2] == ["left", "logit"]
    np.testing.assert_allclose([float(x) for x in lines[2].split(",")[2:]], logits[1], rtol=1e-4)
    np.testing.assert_allclose([float(x) for x in lines[-1].split(",")[2:]], value, rtol=1e-4)


def test_answers_can_come_from_the_read_out_weights(folders, heads, projector, tmp_path, agent_path,
                                                    capsys, monkeypatch):
    """They are used if the answers have no saliency; an agent with other states is refused."""
    copy = linked_copy(folders, tmp_path / "copy")
    for name in ANSWERS:
        for path in copy.glob(f"informed_init/*/grad_hx_{name}*"):
            path.unlink()
    monkeypatch.setattr(dynamics_grads_consistency_plots, "save_figures", lambda *_: 0)
    main = dynamics_grads_consistency_plots.main
    argv = arguments(copy, "--agent_file", str(agent_path), "--num_shuffles", "50",
                     "--no_behaviours", "--only_with_env_grads")
    assert "the agent's heads read 64 units, but the samples' states have 4" in refusal(
        main, argv, capsys)
    monkeypatch.setattr(dynamics_grads_consistency_plots, "load_agent",
                        lambda _: SimpleNamespace(fc_policy=heads[0], fc_value=heads[1]))
    assert main([*argv, "--data_output_dir", str(tmp_path / "data")]) == 0
    folder = ResultStore(tmp_path / "data", COMPARISON_FILES)
    assert folder.settings()["answers_from"] == "read-out weights"
    values = SampleFolder(copy / "informed_init").stacked_field("values")
    np.testing.assert_allclose(
        folder.read(MEAN, ALL_SAMPLES, 0, "")[:, UNITS],
        projector.gradient(heads[1].weight, "ica")[0] / values.std(), rtol=1e-3)
    assert not folder.read(MEAN, ALL_SAMPLES, 1, "")[:, UNITS:].any()
