"""Environment states, bottleneck vectors, behaviours and Jacobians: methods on planted data, and
outputs of the scripts."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import figures_drawn, refusal
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from analysis import (
    behaviour_stability,
    bottleneck_vec_analysis_plotting,
    bottleneck_vec_analysis_precompute,
    combined_agent_env_hx_analysis_plotting,
    combined_agent_env_hx_analysis_precompute,
    env_h_analysis_plotting,
    env_h_analysis_precompute,
    jacobian_analysis_plotting,
    jacobian_analysis_precompute,
)
from analysis.behaviour_stability import (
    CONTROL,
    NOT_DRAWN,
    SAMPLES,
    agreements,
    counts,
    draws_of,
    stability_schema,
    without_behaviours,
)
from analysis.behaviours import BEHAVIOUR_FILES, behaviour_features, most_common
from analysis.behaviours import draw_figures as draw_behaviours
from analysis.bottleneck_vectors import (
    BOTTLENECK_FILES,
    pairwise_cosines,
    sample_outcomes,
    uniform_cosine_density,
    uniformity,
)
from analysis.bottleneck_vectors import draw_figures as draw_bottleneck
from analysis.decomposition import principal_components
from analysis.env_states import ENV_STATE_FILES
from analysis.env_states import draw_figures as draw_env
from analysis.jacobians import JACOBIAN_FILES, features_of, read_jacobians
from analysis.jacobians import draw_figures as draw_jacobians
from analysis.parameters import BehavioursConfig, BottleneckConfig, EnvHiddenConfig, JacobianConfig
from analysis.steps import read_simulated_steps
from common.errors import UserError
from common.files import save_json
from common.parameters import ParameterSet
from common.step_results import StepResults
from generative.saliency.files import SaliencyArrays, SaliencyFolder
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, open_samples

pytestmark = pytest.mark.usefixtures("coarse_figures")
NUM_SAMPLES, NUM_STEPS, KINDS = 24, 6, 3
UNITS, ENV_UNITS, VECTOR = 12, 20, 8
COMPONENTS = [f"hx_direction_{i}_ica" for i in range(2)]


def kind_of(number):
    """Return the planted behaviour of a sample."""
    return number * 7 % KINDS


def write_samples(path, random_start=False):
    """Write samples of planted kinds, each with its own states, colour, action and value."""
    writer = open_samples(path, {"kind": "test", "random_start": random_start,
                                 "agent_sha256": "a" * 64})
    planted = np.random.default_rng(99)
    agent_centres, env_centres = (6 * planted.normal(size=(KINDS, units))
                                  for units in (UNITS, ENV_UNITS))
    for number in range(NUM_SAMPLES):
        rng, kind = np.random.default_rng([number, random_start]), kind_of(number)
        vector = rng.normal(size=VECTOR) if random_start else (
            8 * np.eye(VECTOR)[kind] + rng.normal(size=VECTOR))
        drift = np.arange(NUM_STEPS)[:, None] * 0.2 * env_centres[kind]
        frames = np.zeros((NUM_STEPS, 64, 64, 3), np.uint8)
        frames[..., kind] = 60 + 7 * number
        frames[:, :, :8] = 255
        writer.add(number, SampleArrays(
            frames=frames, rewards=np.full(NUM_STEPS, 0.5 * kind, np.float32),
            terminals=np.linspace(0, 0.9 * (kind == 2), NUM_STEPS, dtype=np.float32),
            values=(kind + 0.1 * rng.normal(size=NUM_STEPS)).astype(np.float32),
            hidden_states=(agent_centres[kind] + 0.3 * rng.normal(size=(NUM_STEPS, UNITS))),
            log_probs=np.zeros((NUM_STEPS, 15)),
            env_h=env_centres[kind] + drift + 0.3 * rng.normal(size=(NUM_STEPS, ENV_UNITS)),
            bottleneck_vec=vector / np.linalg.norm(vector),
            actions=np.full(NUM_STEPS, 2 + 3 * kind, np.int64)),
            SampleOrigin(number))


def write_saliency(path):
    """Write gradients of the planted kinds, 0 after step 2, at which components are evaluated."""
    writer = SaliencyFolder(path)
    centres = np.random.default_rng(98).normal(size=(KINDS, 2, UNITS + ENV_UNITS))
    for number in range(NUM_SAMPLES):
        for component, function in enumerate(COMPONENTS):
            rng = np.random.default_rng([number, component])
            gradients = np.zeros((NUM_STEPS, UNITS + ENV_UNITS))
            gradients[:3] = (centres[kind_of(number), component]
                             + 0.1 * rng.normal(size=(3, UNITS + ENV_UNITS)))
            gradients *= 10.0 ** rng.integers(-2, 3)  # of very different sizes
            writer.add(number, function, SaliencyArrays(
                np.zeros((NUM_STEPS, 3, 8, 8)), gradients[:, :UNITS], gradients[:, UNITS:],
                np.zeros((NUM_STEPS, 8, 8, 3))))
            writer.write("description", number, function, value={"common_timesteps": [2]})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of both sets of samples; the informed ones have saliency."""
    root = tmp_path_factory.mktemp("generated")
    write_samples(root / "informed_init")
    write_samples(root / "rand_init", random_start=True)
    write_saliency(root / "informed_init")
    return root


def arguments(data, save_dir, *more):
    return ["--interpreting_params_name", "tiny", "--generated_data_dir", str(data), "--save_dir",
            str(save_dir), "--num_samples", str(NUM_SAMPLES), *map(str, more)]


ENV = (env_h_analysis_precompute.main, ("--n_clusters", 3))
BEHAVIOURS = (combined_agent_env_hx_analysis_precompute.main, ("--n_clusters", 4))
BOTTLENECK = (bottleneck_vec_analysis_precompute.main, ("--n_clusters", 3))
JACOBIAN = (jacobian_analysis_precompute.main, ("--n_clusters", 3, "--grad_timestep", 1))


@pytest.fixture(scope="module")
def precomputed(data, tmp_path_factory):
    """The results folder of all four analyses."""
    save_dir = tmp_path_factory.mktemp("analysis")
    for main, more in (ENV, BEHAVIOURS, BOTTLENECK, JACOBIAN):
        assert main(arguments(data, save_dir, *more)) == 0
    return save_dir


def folder_function(name, schema):
    return lambda save_dir: StepResults(save_dir / name, schema, NUM_SAMPLES)


env_folder = folder_function("env_analysis_precomp", ENV_STATE_FILES)
behaviours_folder = folder_function("combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES)
bottleneck_folder = folder_function("bottleneck_vec_analysis_precomp", BOTTLENECK_FILES)
jacobians_folder = folder_function("jacob_analysis_precomp", JACOBIAN_FILES)


ENV_CONFIG = ParameterSet("tiny").get(EnvHiddenConfig)
JACOBIAN_CONFIG = ParameterSet("tiny", {"analysis.jacobian.grad_timestep": 1}).get(JacobianConfig)
KIND = np.array([kind_of(number) for number in range(NUM_SAMPLES)])


# Methods.

def test_features_are_both_states_and_their_changes():
    agent = np.array([[[1], [4], [9], [16], [25]]], np.float32)
    env = np.array([[[0], [-1], [0], [5], [3]]], np.float32)
    found = behaviour_features(agent, env, (2, 3))
    # Columns: agent, environment, their changes over two steps, and over three. The changes over
    # two steps at steps 0 and 1 are those from 0 to 2; over three at steps 0 to 2, from 0 to 3.
    np.testing.assert_array_equal(found, [
        [1, 0, 8, 0, 15, 5], [4, -1, 8, 0, 15, 5], [9, 0, 8, 0, 15, 5],
        [16, 5, 12, 6, 15, 5], [25, 3, 16, 3, 21, 4]])
    # Changes do not reach into another sample.
    agent = np.array([[[0], [0]], [[100], [101]]], np.float32)
    found = behaviour_features(agent, np.zeros((2, 2, 0), np.float32), (2, 4, 6))
    np.testing.assert_array_equal(found[:, 1:], [[0] * 3, [0] * 3, [1] * 3, [1] * 3])


@pytest.mark.parametrize(("labels", "behaviour"), [
    ([3, 1, 1, 2, 0, 0, 0, 0], 1),       # later steps do not vote
    ([4, 2, 2, 4, 1], 4), ([2, 4, 4, 2, 1], 2),      # ties: the first label wins
    ([-1, -1, -1, -1, 5], 5), ([-1, 6, -1, 2, 2], 2),      # noise does not vote,
    ([-1] * 5 + [3] * 3, -1),      # unless there is nothing else
    ([0, -1, -1, -1, -1], 0), ([1, 0], 1)])
def test_a_sample_shows_the_most_common_cluster_of_its_first_five_steps(labels, behaviour):
    assert most_common(np.array([labels, labels])).tolist() == [behaviour] * 2


def uniform(number, dimensions, seed):
    vectors = np.random.default_rng(seed).normal(size=(number, dimensions))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("number", "dimensions"), [(40, 8), (60, 64)])
def test_tests_of_uniformity_hold_their_level(number, dimensions):
    found = pd.DataFrame([uniformity(uniform(number, dimensions, seed)) for seed in range(500)])
    for test in ("rayleigh_p", "bingham_p"):
        for level in (0.05, 0.5):  # more than 3.5 standard errors are one draw in 2000
            share = (found[test] < level).mean()
            assert abs(share - level) < 3.5 * (level * (1 - level) / 500) ** 0.5 + 0.01
    assert (found["mean_norm"] ** 2).mean() == pytest.approx(
        found["uniform_mean_norm"][0] ** 2, rel=0.1)
    assert 1 / (1 / found["effective_dimensions"]).mean() == pytest.approx(
        found["uniform_effective_dimensions"][0], rel=0.01)


def test_vectors_that_are_not_uniform_are_found_out():
    vectors = uniform(300, 16, seed=0)
    towards = uniformity(vectors + 0.15 * np.eye(16)[0])  # a mean, and hardly any anisotropy
    assert towards["rayleigh_p"] < 1e-6
    assert towards["mean_norm"] > 1.3 * towards["uniform_mean_norm"]
    stretched = uniformity(vectors * np.linspace(0.5, 1.5, 16))  # anisotropy, but no mean
    assert stretched["bingham_p"] < 1e-9 and stretched["rayleigh_p"] > 0.01
    assert stretched["effective_dimensions"] < 0.95 * stretched["uniform_effective_dimensions"]
    same = uniformity(np.repeat(vectors[:1], 50, axis=0))
    assert same["mean_norm"] == pytest.approx(1) == same["effective_dimensions"]


def test_cosines_of_uniform_vectors_have_the_density_that_is_drawn():
    cosines = pairwise_cosines(uniform(900, 16, seed=1), 900)
    assert len(cosines) == 900 * 899 / 2
    shares, edges = np.histogram(cosines, 40, range=(-0.8, 0.8), density=True)
    np.testing.assert_allclose(shares, uniform_cosine_density((edges[1:] + edges[:-1]) / 2, 16),
                               atol=0.04)


def test_components_of_wide_and_of_many_states_are_those_of_an_exact_decomposition(monkeypatch):
    rng = np.random.default_rng(4)
    states = (rng.normal(size=(150, 6)) * [9, 7, 5, 4, 3, 2]) @ rng.normal(size=(6, 300))
    states = (states + 5 + 0.1 * rng.normal(size=states.shape)).astype(np.float32)
    exact = PCA(6, svd_solver="full").fit(states.astype(np.float64))
    total = exact.explained_variance_.sum() / exact.explained_variance_ratio_.sum()
    monkeypatch.setattr("analysis.decomposition.PIECE_ROWS", 40)
    for wide in (200, 1000):
        monkeypatch.setattr("analysis.decomposition.WIDE", wide)
        fit = principal_components(states, 6)
        np.testing.assert_allclose(fit.variances, exact.explained_variance_, rtol=1e-3)
        np.testing.assert_allclose(np.abs((fit.components * exact.components_).sum(axis=1)), 1,
                                   atol=1e-4)
        np.testing.assert_allclose(fit.singular_values, exact.singular_values_, rtol=1e-3)
        assert fit.total_variance == pytest.approx(total, rel=1e-3)
    held = np.cumsum(exact.explained_variance_) / total
    assert [fit.number_for(share) for share in (*held - 1e-4, 1.0)] == [1, 2, 3, 4, 5, 6, 6]
    with pytest.raises(UserError, match="none of the 3 units varies"):
        principal_components(np.ones((9, 3), np.float32), 2)


def test_features_of_jacobians_keep_proportions():
    agent, env = np.array([[[3.0, 0], [0, 4]]] * 2), np.array([[[1.0], [-1]], [[0.0], [0]]])
    agent[1] *= 100
    np.testing.assert_allclose(features_of(agent, env), [[1.2, 0, 0, 1.6, 1, -1],
                                                         [1.2, 0, 0, 1.6, 0, 0]], rtol=1e-6)


# Outputs of the scripts.

@pytest.mark.parametrize(("folder", "stems", "tables"), [
    (env_folder, "pca_data_env pcomponents_env clusters_env cluster_means_env tsne_env mu_env "
                 "std_env pc_variances_env", []),
    (behaviours_folder, "clusters_combined_agent_env_hx tsne_combined_agent_env_hx "
                        "cluster_means_combined_agent_env_hx clusters_per_sample "
                        "mu_combined_agent_env_hx std_combined_agent_env_hx "
                        "pca_data_combined_agent_env_hx pcomponents_combined_agent_env_hx "
                        "pc_variances_combined_agent_env_hx", []),
    (bottleneck_folder, "lv_inf_pca pcomponents_lv_inf lv_rand_pca_projected tsne_lv_inf "
                        "tsne_lv_rand clusters_lv_inf cluster_means_lv_inf mu_lv_inf "
                        "pc_variances_lv_inf cosines_lv_inf cosines_lv_rand pca_data_lv_inf "
                        "pca_data_lv_rand_projected", ["aux_lv", "lv_inf_aux_data"]),
    (jacobians_folder, "clusters_jacob cluster_means_jacob tsne_jacob clusters_per_sample "
                       "pca_data_jacob pcomponents_jacob mu_jacob pc_variances_jacob sizes_jacob",
     [])])
def test_files_have_their_published_names(precomputed, folder, stems, tables):
    results = folder(precomputed)
    assert {path.name for path in results.path.iterdir()} == {
        f"settings_{NUM_SAMPLES}.json", *(f"{stem}_{NUM_SAMPLES}.npy" for stem in stems.split()),
        *(f"{table}_{NUM_SAMPLES}.csv" for table in tables)}
    settings = results.settings()
    assert settings["sample_numbers"] == list(range(NUM_SAMPLES))
    assert settings["samples_made_by"]["kind"] == "test" and settings["versions"]["hdbscan"]


def test_environment_states_are_projected_and_grouped_by_kind(precomputed, data):
    folder = env_folder(precomputed)
    states = SampleFolder(data / "informed_init").stacked_field("env_h").reshape(-1, ENV_UNITS)
    z = (states - states.mean(axis=0)) / states.std(axis=0)
    np.testing.assert_allclose(z @ folder.read("components").T, folder.read("principal"), atol=1e-3)
    np.testing.assert_allclose(folder.read("principal").var(axis=0, ddof=1),
                               folder.read("variances"), rtol=1e-2)
    labels = folder.read("clusters")
    assert adjusted_rand_score(np.repeat(KIND, NUM_STEPS), labels) == 1
    assert folder.read("cluster_means").shape[1] == folder.read("principal").shape[1]
    for cluster, mean in enumerate(folder.read("cluster_means")):
        members = folder.read("principal")[labels == cluster]
        np.testing.assert_allclose(mean, members.mean(axis=0), atol=1e-4)


def test_behaviours_use_the_environments_components_of_the_same_samples(precomputed, data):
    folder = behaviours_folder(precomputed)
    agent = SampleFolder(data / "informed_init").stacked_field("hidden_states")
    env = env_folder(precomputed).read("principal")[:, :8].reshape(NUM_SAMPLES, NUM_STEPS, 8)
    features = behaviour_features(agent, env, (1, 2))  # differences of the set `tiny`
    np.testing.assert_allclose(folder.read("mean"), features.mean(axis=0), atol=1e-4)
    found = folder.read("per_sample")
    assert adjusted_rand_score(KIND[found >= 0], found[found >= 0]) > 0.9
    assert (found >= 0).mean() > 0.8


def test_bottleneck_vectors_are_projected_and_measured(precomputed, data):
    folder = bottleneck_folder(precomputed)
    informed, random = (SampleFolder(data / start).stacked_field("bottleneck_vec")
                        for start in ("informed_init", "rand_init"))
    for vectors, name in ((informed, "principal"), (random, "random")):
        expected = (vectors - informed.mean(axis=0)) @ folder.read("components").T
        np.testing.assert_allclose(folder.read(name), expected, atol=1e-5)
    assert adjusted_rand_score(KIND, folder.read("clusters")) > 0.9
    found = folder.settings()["steps"]["uniformity"]
    assert found["informed_init"]["rayleigh_p"] < 1e-3 < 0.01 < found["rand_init"]["rayleigh_p"]
    assert found["informed_init"]["bingham_p"] < 1e-3 < 0.01 < found["rand_init"]["bingham_p"]
    table = folder.read("table")
    assert table["start"].tolist() == ["informed_init"] * 24 + ["rand_init"] * 24
    np.testing.assert_allclose(table["sum_of_reward"], np.tile(3.0 * KIND, 2))
    np.testing.assert_array_equal(table["ends"], np.tile(KIND == 2, 2))
    np.testing.assert_allclose(table["mean_value"], np.tile(KIND, 2), atol=0.2)
    np.testing.assert_array_equal(table["cluster"], [*folder.read("clusters"), *[-1] * 24])
    for name in ("principal", "random"):
        np.testing.assert_array_equal(folder.read(f"published_{name}"), folder.read(name))
    for_published = folder.read("published_table")
    pd.testing.assert_frame_equal(for_published, table[:24][for_published.columns])


def test_jacobians_are_grouped_by_kind_whatever_their_size(precomputed, data):
    folder, saliency = jacobians_folder(precomputed), SaliencyFolder(data / "informed_init")
    agent, env = read_jacobians(saliency, range(NUM_SAMPLES), COMPONENTS, 1)
    for number in (3, 0, 11):
        for component, function in enumerate(COMPONENTS):
            arrays = saliency.saliency(number, function)
            np.testing.assert_array_equal(agent[number, component], arrays.hidden_states[1])
            np.testing.assert_array_equal(env[number, component], arrays.env_h[1])
    features = features_of(agent, env)
    for part, gradients in enumerate((agent, env)):
        np.testing.assert_allclose(folder.read("sizes")[:, part],
                                   np.sqrt((gradients ** 2).mean(axis=2)), rtol=1e-5)
    np.testing.assert_allclose(folder.read("principal"),
                               (features - features.mean(axis=0)) @ folder.read("components").T,
                               atol=1e-4)
    assert adjusted_rand_score(KIND, folder.read("clusters")) > 0.9
    np.testing.assert_array_equal(folder.read("per_sample"), folder.read("clusters"))


# Behaviours in random draws of the samples.

def test_draws_agree_on_the_samples_that_are_in_both():
    # Rows of each draw: agglomerative, hdbscan, kmeans. Both draws contain samples 1 to 4. The
    # first method finds the same groups with other numbers, the second crosses them, and the third
    # leaves the second pair unassigned, which also counts as a group.
    first = np.array([[0, 0, 0, 1, 1, NOT_DRAWN], [0, 0, 0, 1, 1, NOT_DRAWN],
                      [0, 0, 0, 1, 1, NOT_DRAWN]])
    second = np.array([[NOT_DRAWN, 1, 1, 0, 0, 2], [NOT_DRAWN, 0, 1, 0, 1, 0],
                       [NOT_DRAWN, 0, 0, -1, -1, 0]])
    found = agreements(SAMPLES, [first, second])
    assert found[["method", "draw", "other_draw", "shared_samples"]].to_numpy().tolist() == [
        ["agglomerative", 0, 1, 4], ["hdbscan", 0, 1, 4], ["kmeans", 0, 1, 4]]
    # Crossed 2 x 2 table: 0 pairs agree; 2 / 3 are expected by chance, and 2 is the maximum.
    assert found["adjusted_rand"].tolist() == pytest.approx([1, -0.5, 1])
    numbers = counts(SAMPLES, [first, second]).set_index(["method", "draw"])
    assert numbers.loc[("agglomerative", 1), "behaviours"] == 3
    assert numbers.loc[("kmeans", 1), ["behaviours", "in_none"]].tolist() == [1, 0.4]
    # Without samples in both, draws would seem to agree perfectly.
    assert all(np.intersect1d(*draws_of(4, 0.51, 2, seed)).size for seed in range(20))


def test_the_control_keeps_each_coordinate_and_loses_what_samples_share():
    rng = np.random.default_rng(0)
    kind = np.arange(200) % 2
    # The principal components, sum and difference, are both large in samples of one kind.
    size = np.where(kind == 1, 3.0, 1.0)
    total, difference = ((-1.0) ** (np.arange(200) // every) * size for every in (2, 4))
    features = np.stack([total + difference / 2, total - difference / 2], axis=1)[:, None]
    features = np.repeat(features, 4, axis=1) + 0.01 * rng.normal(size=(200, 4, 2))
    config = BehavioursConfig(200, 2, 2, 2, "kmeans", 1, (1,))
    control = without_behaviours(features.astype(np.float32), config, seed=1)
    assert control.shape == features.shape
    # Trajectories of single samples stay intact, so the steps of a sample remain nearly equal.
    assert control.std(axis=1).max() < 0.1
    # The spread is that of the states, but the sizes of the components are no longer correlated.
    np.testing.assert_allclose(control.std(axis=(0, 1)), features.std(axis=(0, 1)), rtol=0.05)
    for states, least, most in ((features, 0.9, 1), (control, -0.2, 0.2)):
        sizes = np.abs(states[:, 0] @ np.array([[1, 1], [1, -1]]))
        assert least < np.corrcoef(sizes.T)[0, 1] < most


def test_the_published_command_finds_the_same_behaviours(precomputed, data, tmp_path, capsys):
    """Its --generated_data_dir is the folder of samples, and the recording must fit to them."""
    samples, recording = tmp_path / "recorded_informinit_gen_samples", tmp_path / "data"
    shutil.copytree(data / "informed_init", samples)
    argv = arguments(samples, precomputed, "--agent_env_data_dir", recording, "--n_clusters", 4,
                     "--precomp_dir", tmp_path / "behaviours")
    for digest, status in (("b", 2), ("a", 0)):
        save_json(recording / "recording.json", {"agent_sha256": digest * 64})
        assert combined_agent_env_hx_analysis_precompute.main(argv) == status
    assert "with an agent other than" in capsys.readouterr().err
    labels = [StepResults(folder, BEHAVIOUR_FILES, NUM_SAMPLES).read("per_sample") for folder in (
        tmp_path / "behaviours", precomputed / "combined_agent_env_hx_analysis_precomp")]
    np.testing.assert_array_equal(*labels)


def test_planted_behaviours_are_the_same_in_all_draws_and_the_controls_are_not(
        precomputed, data, tmp_path, capsys):
    command = arguments(data, precomputed, "--n_clusters", KINDS, "--num_env_samples", NUM_SAMPLES,
                        "--num_draws", 3, "--precomp_dir", tmp_path / "stability")
    assert behaviour_stability.main(command) == 0
    folder = StepResults(tmp_path / "stability", stability_schema(3), NUM_SAMPLES)
    table = pd.read_csv(folder.file("agreement"))
    assert len(table) == 2 * 3 * 3
    mean = table.groupby(["data", "method"])["adjusted_rand"].mean()
    assert mean[SAMPLES, "kmeans"] == mean[SAMPLES, "agglomerative"] == 1
    assert mean[CONTROL, "kmeans"] < 0.8
    labels = folder.read("samples_0")
    drawn = labels[2] != NOT_DRAWN
    assert drawn.sum() == round(0.8 * NUM_SAMPLES)
    assert adjusted_rand_score(KIND[drawn], labels[2][drawn]) == 1
    text = folder.file("report").read_text()
    assert "| kmeans | 3 to 3 | 0% to 0% | 1.00 (1.00 to 1.00) |" in text
    assert text.strip() in capsys.readouterr().out


@pytest.fixture(scope="module")
def drawn(precomputed, data, tmp_path_factory, coarse_figures):
    """The folder of figures of each analysis, and the figures by file name. The results are there
    for a single number of samples, which is therefore not given."""
    argv = arguments(data, precomputed)[:-2]
    found = {}
    for name, main in {"env": env_h_analysis_plotting.main,
                       "behaviours": combined_agent_env_hx_analysis_plotting.main,
                       "bottleneck": bottleneck_vec_analysis_plotting.main,
                       "jacobians": jacobian_analysis_plotting.main}.items():
        folder = tmp_path_factory.mktemp(name)
        with figures_drawn() as figures:
            assert main([*argv, "--output_dir", str(folder)]) == 0
        found[name] = folder, figures
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("analysis", "clusters", "num_other"), [
    ("env", "cluster_*", 16), ("behaviours", "behaviour_*", 18), ("bottleneck", "cluster_*", 12),
    ("jacobians", "cluster_*", 17)])
def test_all_figures_are_drawn_and_no_cluster_is_skipped(analysis, clusters, num_other, precomputed,
                                                         drawn):
    num_clusters = 3
    if analysis == "behaviours":
        num_clusters = len(behaviours_folder(precomputed).read("cluster_means"))
    folder, _ = drawn[analysis]
    figures = [path for path in folder.iterdir() if path.suffix != ".json"]
    assert len(list(folder.glob(clusters))) == num_clusters
    assert len(figures) == num_clusters + num_other, sorted(path.name for path in figures)
    for figure in figures:
        image = Image.open(figure)
        assert min(image.size) > 100 and np.asarray(image.convert("L")).std() > 5, figure


@pytest.fixture
def no_planes(monkeypatch):
    """Leave figures of all states empty, because other tests draw them."""
    for name in ("plot_plane", "plot_space"):
        monkeypatch.setattr(f"analysis.figures.{name}", lambda *_: None)


@pytest.mark.parametrize(("draw", "folder_of", "config", "ours", "figures"), [
    (draw_env, env_folder, ENV_CONFIG, ["mean", "std", "variances"], "pca_value.png"),
    (draw_behaviours, behaviours_folder, None,
     ["components", "variances", "principal", "mean", "std"], "tsne_behaviour.png"),
    (draw_jacobians, jacobians_folder, JACOBIAN_CONFIG,
     ["principal", "components", "mean", "variances", "sizes"], "tsne_value.png"),
    (draw_bottleneck, bottleneck_folder, None,
     ["principal", "random", "table", "published_table", "mean", "variances", "cosines",
      "random_cosines"], "pca_mean_value.png")])
def test_published_folders_are_drawn_without_our_additional_files(
        draw, folder_of, config, ours, figures, precomputed, data, tmp_path, no_planes):
    folder = folder_of(Path(shutil.copytree(precomputed, tmp_path / "copy")))
    samples = SampleFolder(data / "informed_init")
    steps = read_simulated_steps(samples, range(NUM_SAMPLES))
    outcomes = sample_outcomes(steps)  # not contained in the published bottleneck folder
    stored = bottleneck_folder(precomputed).read("table")[:NUM_SAMPLES]
    pd.testing.assert_frame_equal(outcomes, stored[outcomes.columns], check_exact=False,
                                  check_dtype=False)
    for name in ours:
        folder.file(name).unlink()
    folder.settings_file.unlink()
    assert figures in dict(draw(folder, samples, steps, config, 0))


@pytest.mark.slow
def test_the_figure_of_a_cluster_shows_its_own_states(precomputed, data, drawn):
    folder, samples = env_folder(precomputed), SampleFolder(data / "informed_init")
    labels = folder.read("clusters")
    _, figures = drawn["env"]
    for cluster in range(3):
        above, below = figures[f"cluster_{cluster:02d}.png"].subfigs
        members = np.flatnonzero(labels == cluster)
        for axes, name in zip(above.axes, ("principal", "tsne")):
            (points,) = axes.collections
            np.testing.assert_allclose(points.get_offsets(), folder.read(name)[members, :2])
        captions = [axes.get_title() for axes in below.axes]
        shown = [list(map(int, re.findall(r"\d+", caption))) for caption in captions]
        assert len({sample for sample, _ in shown}) == len(shown) == 8
        for (sample, step), axes in zip(shown, below.axes):
            assert labels[sample * NUM_STEPS + step] == cluster
            np.testing.assert_array_equal(axes.images[0].get_array(),
                                          samples.sample(sample).frames[step])


@pytest.mark.slow
def test_the_figure_of_a_behaviour_shows_its_own_samples(precomputed, data, drawn):
    folder, samples = behaviours_folder(precomputed), SampleFolder(data / "informed_init")
    per_sample, labels = folder.read("per_sample"), folder.read("clusters").reshape(24, 6)
    _, figures = drawn["behaviours"]
    for behaviour in range(len(folder.read("cluster_means"))):
        members = per_sample == behaviour
        _, below = figures[f"behaviour_{behaviour:02d}.png"].subfigs
        panels = np.reshape(below.axes, (-1, NUM_STEPS))
        for row in panels:
            sample = int(row[0].get_ylabel().split()[1])
            assert members[sample] or not members.any()
            for step, axes in enumerate(row):
                frame = axes.images[0].get_array()[-1, -1]  # away from the action's arrow
                np.testing.assert_array_equal(frame, samples.sample(sample).frames[step, -1, -1])
                framed = axes.spines["left"].get_edgecolor() != (1, 1, 1, 1)
                assert framed == (labels[sample, step] == behaviour)


# Bad input.

def test_environment_results_of_other_samples_are_refused(data, precomputed, tmp_path, capsys):
    main, _ = BEHAVIOURS
    more = ["--precomp_dir", tmp_path / "out", "--env_precomp_dir", env_folder(precomputed).path,
            "--num_env_samples", NUM_SAMPLES]
    other = shutil.copytree(data, tmp_path / "other")
    SampleFolder(other / "informed_init").settings_file.write_text('{"kind": "other"}')
    assert "does not hold the samples of" in refusal(
        main, [*arguments(other, precomputed), *more], capsys)
    few = StepResults(shutil.copytree(env_folder(precomputed).path, tmp_path / "env"),
                      ENV_STATE_FILES, 10)
    np.save(few.file("principal"), np.zeros((60, 16), np.float32))
    more[3], more[-1] = few.path, 10
    assert "of the states in 10 samples, but" in refusal(
        main, [*arguments(data, precomputed), *more], capsys)


def test_numbers_of_samples_without_results_are_refused(data, precomputed, tmp_path, capsys):
    """The message names the flag and the numbers that are there."""
    main, _ = BEHAVIOURS
    folder = shutil.copytree(env_folder(precomputed).path, tmp_path / "env")
    argv = [*arguments(data, precomputed), "--precomp_dir", tmp_path / "out", "--env_precomp_dir",
            folder]
    words = f"{folder} holds no results for {{}} samples, but those for {{}}; give "
    assert words.format(7, NUM_SAMPLES) + f"--num_env_samples {NUM_SAMPLES}" in refusal(
        main, [*argv, "--num_env_samples", 7], capsys)
    (folder / "pca_data_env_123.npy").touch()
    default = ParameterSet("tiny").get(EnvHiddenConfig).num_samples
    assert words.format(default, f"{NUM_SAMPLES} and 123") in refusal(main, argv, capsys)


def test_gradients_that_say_nothing_are_refused(data, tmp_path, capsys):
    main, _ = JACOBIAN
    for step, words in ((4, "at grad_timestep 4 are 0.*read at step 2"),
                        (6, "grad_timestep is 6, but .* has only 6 steps")):
        assert re.search(words, refusal(
            main, arguments(data, tmp_path, "--grad_timestep", step), capsys))
    assert not any(tmp_path.iterdir())


def test_published_parameters_are_the_defaults():
    for section, values in (
            (EnvHiddenConfig, (6000, 128, 2, 128, "agglomerative", 9)),
            (BehavioursConfig, (4000, 64, 3, 32, "hdbscan", 16, (2, 4, 6))),
            (BottleneckConfig, (1000, 128, 2, 100, "agglomerative")),
            (JacobianConfig, (4000, 128, 2, 32, "agglomerative", 3))):
        assert dataclasses.astuple(ParameterSet("defaults").get(section)) == values
