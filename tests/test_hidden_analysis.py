"""Analyses of the agent's hidden states: methods on planted data, and outputs of the scripts."""

import re
import shutil

import numpy as np
import pytest
import torch
from conftest import figures_drawn, refusal
from matplotlib.colors import to_rgba_array
from PIL import Image
from sklearn.exceptions import ConvergenceWarning
from sklearn.manifold import trustworthiness
from sklearn.metrics import adjusted_rand_score

from agents.provenance import agent_sha256
from agents.rollout_files import RolloutFolder
from analysis import clustering, hidden_analysis_plotting, hidden_analysis_precompute
from analysis.decomposition import (
    factorise,
    independent_components,
    principal_components,
    standardizer_of,
)
from analysis.parameters import CLUSTERINGS
from analysis.steps import read_recorded_steps
from common.errors import UserError
from common.palette import COLOURS
from envs.objects import action_labels
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, open_samples
from interventions.hidden_states_folder import hidden_state_results
from interventions.projector import Projector

NUM_EPISODES, NUM_SAMPLES = 12, 6


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def blobs(sizes=(200, 80, 120, 40), dimensions=8):
    """Return points of well separated groups of unequal sizes, in random order, and labels."""
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = 12 * np.eye(len(sizes), dimensions)
    points = centres[labels] + 0.5 * rng.normal(size=(len(labels), dimensions))
    return points.astype(np.float32), labels


# Methods.

def test_independent_components_are_the_planted_sources_up_to_order_and_sign():
    rng = np.random.default_rng(2)
    sources = np.stack([rng.uniform(-1, 1, 4000), rng.laplace(size=4000),
                        np.sign(rng.normal(size=4000))], axis=1)
    states = (sources @ rng.normal(size=(3, 6))).astype(np.float32)
    states = standardizer_of(states).standardise(states)
    fit = principal_components(states, 3)
    principal = fit.coordinates(states)
    found, facts = independent_components(principal, np.ones(4000, bool), fit.variances, 1000, 1e-4,
                                          seed=0)
    assert facts["converged"] and facts["iterations"] < 1000
    agreement = np.abs(np.corrcoef(found["sources"].T, sources.T)[:3, 3:])
    assert sorted(agreement.argmax(axis=1)) == [0, 1, 2]
    assert agreement.max(axis=1).min() > 0.98
    np.testing.assert_allclose(found["unmixing"] @ found["mixing"], np.eye(3), atol=1e-5)
    with pytest.warns(ConvergenceWarning):
        _, facts = independent_components(principal, np.ones(4000, bool), fit.variances, 1, 1e-9,
                                          seed=0)
    assert not facts["converged"]


def far_groups(*sizes):
    """Return a large group and tight groups far from all others, and the group of each row."""
    crowd = normal(600, 6)
    groups = [100 * (i + 1) * np.eye(6)[i] + 0.01 * normal(size, 6, seed=i)
              for i, size in enumerate(sizes)]
    group = np.concatenate([np.full(600, -1), np.repeat(np.arange(len(sizes)), sizes)])
    return np.concatenate([crowd, *groups]).astype(np.float32), group


@pytest.mark.parametrize(("max_k", "ks", "largest_outlying_group"), [
    (6, (5,), 3), (7, (5,), 3), (8, (5, 7), 3), (10, (5, 7, 9), 4)])
def test_outliers_are_those_that_most_medians_find(max_k, ks, largest_outlying_group):
    """The medians of 5, 7 and 9 distances are the third, fourth and fifth smallest. In a group of
    4, the third smallest distance is small, and the others are large."""
    for size in (1, 3, 4, 5):
        states, group = far_groups(size)
        outliers, used = clustering.find_outliers(states, max_k, seed=0)
        assert used == ks
        assert outliers[group == 0].all() == (size <= largest_outlying_group), size
        assert outliers[group == 0].any() == outliers[group == 0].all()
        if size <= largest_outlying_group:
            assert not outliers[group == -1].any()
    with pytest.raises(UserError, match="too few for the"):
        clustering.find_outliers(states[:ks[-1]], max_k, seed=0)


def test_exact_neighbours_are_the_nearest_other_rows():
    rows = normal(300, 5)
    distances = np.linalg.norm(rows[:, None] - rows, axis=2)
    np.fill_diagonal(distances, np.inf)
    indices, found = clustering.nearest_neighbours(rows, 7, seed=0)
    np.testing.assert_array_equal(indices, distances.argsort(axis=1)[:, :7])
    np.testing.assert_allclose(found, np.sort(distances, axis=1)[:, :7], rtol=1e-4)


@pytest.mark.parametrize("fit_rows", [10_000, 150])
@pytest.mark.parametrize("method", CLUSTERINGS)
def test_clusters_are_the_planted_groups(method, fit_rows):
    points, labels = blobs()
    found, num_fitted = clustering.find_clusters(points, method, 4, seed=0, fit_rows=fit_rows)
    assert adjusted_rand_score(labels, found) == 1
    assert num_fitted == (440 if method == "kmeans" or fit_rows > 440 else 150)
    means = clustering.cluster_means(points, found)
    assert means.shape == (4, 8)
    for cluster in range(4):
        np.testing.assert_allclose(means[cluster], points[found == cluster].mean(axis=0), rtol=1e-4)


def test_hdbscan_leaves_noise_out_of_the_means_and_says_when_it_finds_nothing(caplog):
    points, labels = blobs()
    far = np.concatenate([points, [[300] * 8, [-300] * 8]]).astype(np.float32)
    found, _ = clustering.find_clusters(far, "hdbscan", 4, seed=0)
    assert found[-2:].tolist() == [clustering.NO_CLUSTER, clustering.NO_CLUSTER]
    assert adjusted_rand_score(labels, found[:-2]) > 0.98
    assert np.abs(clustering.cluster_means(far, found)).max() < 13
    even, _ = clustering.find_clusters(normal(40, 3), "hdbscan", 2, seed=0)
    assert (even == 0).all() and "hdbscan finds no cluster" in caplog.text


@pytest.mark.parametrize(("components", "fit_rows"), [(2, None), (2, 120), (3, None)])
def test_neighbours_stay_neighbours_on_the_map(components, fit_rows):
    points, _ = blobs((70, 40, 50, 20))
    places, num_fitted = clustering.embed(points, components, seed=0, fit_rows=fit_rows)
    assert places.shape == (180, components) and places.dtype == np.float32
    assert num_fitted == (fit_rows or 180)
    assert trustworthiness(points, places, n_neighbors=10) > 0.85
    again, _ = clustering.embed(points, components, seed=0, fit_rows=fit_rows)
    np.testing.assert_array_equal(again, places)
    with pytest.raises(UserError, match="at least 5 states"):
        clustering.embed(points[:4], components, seed=0)


def test_factors_give_back_planted_states():
    rng = np.random.default_rng(3)
    weights, factors = rng.exponential(size=(400, 3)), rng.exponential(size=(3, 10))
    weights[rng.random(weights.shape) < 0.5] = 0  # each factor is absent from many states
    states = (weights @ factors - 2).astype(np.float32)
    found, facts = factorise(states, 3, 2000, 1e-5, seed=0)
    assert facts["converged"] and facts["relative_error"] < 0.02
    assert (found["nmf"] >= 0).all() and (found["nmf_components"] >= 0).all()
    given_back = found["nmf"] @ found["nmf_components"] + found["nmf_min"]
    assert np.linalg.norm(given_back - states) / np.linalg.norm(states - states.min(axis=0)) \
        == pytest.approx(facts["relative_error"], rel=1e-2)
    with pytest.warns(ConvergenceWarning):
        assert not factorise(states, 3, 1, 1e-9, seed=0)[1]["converged"]
    with pytest.raises(UserError, match="no hidden unit varies"):
        factorise(np.ones((20, 5), np.float32), 2, 10, 1e-4, seed=0)


# The scripts.

@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A folder with a subfolder of six simulated samples of four steps."""
    root = tmp_path_factory.mktemp("samples")
    writer = open_samples(root / "informed_init", {"kind": "test"})
    for number in range(NUM_SAMPLES):
        rng = np.random.default_rng(number)
        writer.add(number, SampleArrays(
            np.zeros((4, 64, 64, 3), np.uint8), *np.zeros((3, 4), np.float32),
            rng.uniform(-1, 1, (4, 64)).astype(np.float32), np.zeros((4, 15), np.float32),
            np.zeros((4, 48), np.float32), np.zeros(16, np.float32), np.zeros(4, np.int64)),
            SampleOrigin(number))
    return root


def arguments(data, samples, precomputed, *more):
    return ["--interpreting_params_name", "tiny", "--data_dir", str(data), "--precomp_dir",
            str(precomputed), *(["--generated_data_dir", str(samples)] if samples else []), *more]


@pytest.fixture(scope="module")
def precomputed(recording, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis") / "hx_analysis_precomp"
    assert hidden_analysis_precompute.main(arguments(recording / "data", samples, folder)) == 0
    return hidden_state_results(folder, NUM_EPISODES, NUM_SAMPLES)


@pytest.fixture(scope="module")
def states(recording):
    """Hidden states of all episodes, without their initial states."""
    return np.concatenate([RolloutFolder(recording / "data").episode(number).hidden_states[1:]
                           for number in range(NUM_EPISODES)])


def test_files_have_their_published_names_and_say_what_they_are_of(precomputed, recording,
                                                                    agent_path):
    stems = ["hx_mu", "hx_std", "hx_pca", "pcomponents", "pc_loading_variances",
             "pc_singular_values", "ica_unmixing_matrix_hx", "ica_mixing_matrix_hx",
             "ica_source_signals_hx", "clusters_hx", "cluster_means_hx", "tsne_hx", "nmf_hx",
             "nmf_components_hx", "nmf_min_per_dim_hx", "hx_outlier_mask"]
    assert {path.name for path in precomputed.path.iterdir()} == {
        *(f"{stem}_12.npy" for stem in stems), "gen_hx_projected_real12_gen6.npy",
        "hx_outlier_retention_fraction.npy", "settings_12.json"}
    settings = precomputed.settings()
    assert settings["agent_sha256"] == agent_sha256(agent_path)
    assert settings["recording_sha256"] == RolloutFolder(recording / "data").sha256()


def test_the_projector_reads_the_matrices_and_gives_the_stored_coordinates(
        precomputed, states, samples):
    projector = Projector.load(precomputed.path, NUM_EPISODES)
    for kind, name in (("pca", "principal"), ("ica", "sources")):
        found = projector.coordinates(torch.from_numpy(states), kind).numpy()
        np.testing.assert_allclose(found, precomputed.read(name), atol=2e-3, err_msg=kind)
    simulated = SampleFolder(samples / "informed_init").stacked_field("hidden_states")
    found = projector.coordinates(torch.from_numpy(simulated.reshape(-1, 64)), "pca").numpy()
    np.testing.assert_allclose(found, precomputed.read("generated"), rtol=1e-3, atol=2e-3)
    # A step of 1 along each independent component changes only that coordinate.
    moved = projector.change(projector.directions("ica"), "ica")
    torch.testing.assert_close(moved, torch.eye(4), atol=1e-3, rtol=0)


def test_components_are_fitted_without_outliers_and_signals_vary_by_1(precomputed, states):
    kept = precomputed.read("kept")
    assert len(kept) / 2 < kept.sum() < len(kept)
    assert precomputed.read("retention") == pytest.approx(kept.mean())
    z = (states - precomputed.read("mean")) / precomputed.read("std")
    np.testing.assert_allclose(z.std(axis=0), 1, rtol=1e-3)
    principal, variances = precomputed.read("principal"), precomputed.read("variances")
    np.testing.assert_allclose(principal[kept][:, :16].var(axis=0, ddof=1), variances[:16],
                               rtol=1e-2)
    signals = precomputed.read("sources")[kept]
    np.testing.assert_allclose(np.cov(signals.T), np.eye(4), atol=0.02)


def test_clusters_and_factors_belong_to_the_states(precomputed, states):
    labels, means = precomputed.read("clusters"), precomputed.read("cluster_means")
    assert np.unique(labels).tolist() == [0, 1, 2, 3] and len(labels) == len(states)
    principal = precomputed.read("principal")
    assert means.shape == (4, principal.shape[1])
    shares = np.cumsum(precomputed.read("variances")) / precomputed.settings()["steps"]["pca"][
        "total_variance"]
    holding = np.ascontiguousarray(principal[:, :int((shares < 0.95).sum()) + 1])
    assert holding.shape[1] < principal.shape[1]
    expected, _ = clustering.find_clusters(holding, "agglomerative", 4, 0)
    np.testing.assert_array_equal(labels, expected)
    for cluster in range(4):
        members = precomputed.read("principal")[labels == cluster]
        np.testing.assert_allclose(means[cluster], members.mean(axis=0), atol=1e-4)
    assert precomputed.read("tsne").shape == (len(states), 2)
    settings = precomputed.settings()
    assert settings["parameters"]["n_clusters"] == 4 and settings["tsne_seed"] == 42
    assert settings["generated_numbers"] == list(range(NUM_SAMPLES))
    assert set(settings["seconds"]) == {"scale", "kept", "pca", "ica", "clusters", "tsne", "nmf"}


def test_too_few_episodes_or_samples_are_counted(recording, samples, tmp_path, capsys):
    for more, words in (
            (["--num_episodes", "40"], "40 episodes are requested, but .* holds only 12"),
            (["--num_generated_samples", "7"], "7 simulated samples .* holds only 6")):
        argv = arguments(recording / "data", samples, tmp_path / "out", *more)
        assert re.search(words, refusal(hidden_analysis_precompute.main, argv, capsys))
    assert not (tmp_path / "out").exists()


def test_nan_in_a_file_is_an_error_that_names_it(recording, samples, tmp_path, capsys):
    copy = shutil.copytree(samples, tmp_path / "samples")
    path = copy / "informed_init" / "sample_00002" / "agent_hs.npy"
    np.save(path, np.full_like(np.load(path), np.inf))
    assert "sample_00002 is damaged: 'agent_hs' holds NaN" in refusal(
        hidden_analysis_precompute.main, arguments(recording / "data", copy, tmp_path / "out"),
        capsys)


def test_a_constant_unit_and_a_dominant_direction_give_usable_matrices(recording, tmp_path, capsys):
    data = shutil.copytree(recording / "data", tmp_path / "data")
    for path in data.glob("episode_*/hx.npy"):
        states = np.load(path)
        states = 0.05 * states + states[:, :1]  # one direction has 95 % of the variance
        states[:, 9] = 0.25
        np.save(path, states)
    assert hidden_analysis_precompute.main(arguments(
        data, None, tmp_path / "out", "--no_generated_samples", "--num_episodes", "3")) == 0
    assert "hidden unit 9 does not vary" in capsys.readouterr().err
    assert Projector.load(tmp_path / "out", 3).std[9] == 1
    folder = hidden_state_results(tmp_path / "out", 3)
    for name in ("principal", "sources", "tsne", "nmf", "cluster_means"):
        assert np.isfinite(folder.read(name)).all(), name
    assert not list(folder.path.glob("gen_hx_projected*"))


def test_steps_are_those_of_the_states(recording):
    folder = RolloutFolder(recording / "data")
    steps = read_recorded_steps(folder, NUM_EPISODES)
    row = 0
    for number in range(NUM_EPISODES):
        episode = folder.episode(number)
        length = len(episode.log_probs)
        part = slice(row, row + length)
        probs = np.exp(episode.log_probs)
        np.testing.assert_allclose(steps.entropy[part], -(probs * np.log(probs)).sum(axis=1),
                                   rtol=1e-5)
        np.testing.assert_array_equal(steps.likeliest_action[part], probs.argmax(axis=1))
        np.testing.assert_array_equal(steps.action[part], episode.steps["action"])
        np.testing.assert_allclose(steps.value[part], episode.steps["value"])
        np.testing.assert_allclose(steps.part[part], np.arange(length) / (length - 1))
        assert (steps.length[part] == length).all() and (steps.episode[part] == number).all()
        assert steps.done[part].tolist() == [False] * (length - 1) + [True]
        assert (steps.rewarded[part] == (episode.steps["reward"] > 0).any()).all()
        row += length
    assert row == len(steps.reward)


@pytest.mark.slow
def test_all_figures_are_drawn(precomputed, recording, tmp_path, coarse_figures):
    output = tmp_path / "hx_plots"
    argv = [*arguments(recording / "data", None, precomputed.path), "--output_dir", str(output)]
    with figures_drawn() as figures:
        assert hidden_analysis_plotting.main(argv) == 0
    files = [path for path in output.iterdir() if path.suffix != ".json"]
    assert len(files) == 2 * 12 + 4 + 4  # 12 colourings of two planes, and other figures
    for file in files:
        image = Image.open(file)
        assert min(image.size) > 150 and np.asarray(image.convert("L")).std() > 5, file
    labels, variances = precomputed.read("clusters"), precomputed.read("variances")
    table = to_rgba_array(["#BBBBBB", *COLOURS])  # the first colour is for states without a cluster
    for plane, what in (("pca", "principal"), ("tsne", "tsne")):
        points, *_simulated = figures[f"{plane}_cluster.png"].axes[0].collections
        shown = np.column_stack([points.get_offsets(), points.get_facecolors()])
        expected = np.column_stack([precomputed.read(what)[:, :2], table[labels + 1]])
        np.testing.assert_array_equal(np.sort(shown.view("f8,f8,f8,f8,f8,f8"), axis=0),
                                      np.sort(expected.view("f8,f8,f8,f8,f8,f8"), axis=0))
    # More actions than colours: a panel for each, with its own states.
    recorded = read_recorded_steps(RolloutFolder(recording / "data"), NUM_EPISODES)
    actions, names = recorded["action"].to_numpy(), action_labels("fruitbot")
    assert len(np.unique(actions)) > len(COLOURS)
    panels = {axes.get_title(): axes.collections[0].get_offsets()
              for axes in figures["tsne_action.png"].axes if axes.get_title()}
    assert [*panels] == [f"{names[action]} ({(actions == action).sum()})"
                         for action in np.unique(actions)]
    for points, action in zip(panels.values(), np.unique(actions)):
        np.testing.assert_array_equal(points, precomputed.read("tsne")[actions == action, :2])
    places = precomputed.read("tsne")[:, :2]
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    np.fill_diagonal(distances, np.inf)
    alike = 100 * (actions[distances.argmin(axis=1)] == actions).mean()
    chance = 100 * ((np.unique(actions, return_counts=True)[1] / len(actions)) ** 2).sum()
    assert f"agree in {alike:.0f} % of cases (chance: {chance:.0f} %)" in figures[
        "tsne_action.png"].get_suptitle()
    bars = figures["variance_explained.png"].axes[0].patches
    heights = np.array([bar.get_height() for bar in bars])
    np.testing.assert_allclose(heights / heights[0], variances / variances[0], rtol=1e-5)


def test_figures_without_their_data_are_refused(recording, tmp_path, capsys):
    argv = [*arguments(recording / "data", None, tmp_path / "nowhere"), "--output_dir",
            str(tmp_path / "plots")]
    assert "hidden_analysis_precompute.py writes it" in refusal(
        hidden_analysis_plotting.main, argv, capsys)
    assert not (tmp_path / "plots").exists()
