"""Analysis of the bottleneck vectors, from which simulations start: files, tests of uniformity on
the unit sphere, and figures.

Layout of ``analysis/bottleneck_vec_analysis_precomp/``, as published except for the files marked *;
N is the number of simulated samples of each kind (informed, random), with one row per sample::

    lv_inf_pca_N                principal coordinates of the informed vectors (N, P)
    pcomponents_lv_inf_N        principal components of the informed vectors (P, V)
    lv_rand_pca_projected_N     random vectors projected onto these components (N, P)
    tsne_lv_inf_N, tsne_lv_rand_N       coordinates of both kinds on one t-SNE map (N, 2)
    clusters_lv_inf_N           cluster of each informed vector, -1 for none (N,)
    cluster_means_lv_inf_N      mean principal coordinates of each of C clusters (C, P)
    mu_lv_inf_N *               mean of the informed vectors (V,)
    pc_variances_lv_inf_N *     variances along the principal components (P,)
    cosines_lv_inf_N *, cosines_lv_rand_N *     cosines between pairs of vectors, at most a million
    aux_lv_N.csv *              one row per sample: start (informed_init or rand_init), sample,
                                sum_of_reward, ends, mean_value, cluster (-1 for none, and for
                                random vectors)
    pca_data_lv_inf_N, pca_data_lv_rand_projected_N     copies of lv_inf_pca_N and of
                                lv_rand_pca_projected_N under the names that published scripts read
    lv_inf_aux_data_N.csv       table for the published scripts, with one row per informed sample:
                                sum_of_reward, ends, mean_value, cluster

All files without a suffix here are ``.npy`` files. The settings file ``settings_N.json`` also holds
the uniformity statistics. A published folder may have the coordinates under either of two names,
``lv_inf_pca_N`` or ``pca_data_lv_inf_N``; both are read.

Letters in shape comments: V dimensions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import betaln
from scipy.stats import chi2

from analysis.clustering import NO_CLUSTER, embed
from analysis.decomposition import Standardizer
from analysis.figures import (
    TSNE_NAMES,
    Colourings,
    Figures,
    Variances,
    can_draw,
    central_frames,
    colour_by_cluster,
    draw_clusters,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.parameters import BottleneckConfig
from analysis.state_maps import SampleAnalysis, SampleRun
from analysis.state_plots import Category, Plane, Quantity
from analysis.steps import ENDED, SimulatedSteps, choose_samples, read_simulated_steps
from common.errors import UserError
from common.palette import BLUE, VERMILION
from common.schemas import Array, Entry, Npy, Schema, Table
from common.step_results import STEP_SETTINGS, StepResult, StepResults
from generative.config import SAMPLE_STARTS
from generative.sample_files import SampleFolder

COSINE_VECTORS = 1_400  # number of vectors whose pairs are stored: just under a million pairs
UNIFORM = "uniform on the sphere"
KINDS = {"informed": VERMILION, "random": BLUE}  # colours, in the order of SAMPLE_STARTS
_OUTCOMES = {"sum_of_reward": float, "ends": float, "mean_value": float, "cluster": int}
BOTTLENECK_FILES = Schema(
    "results for {} samples", "analysis/bottleneck_vec_analysis_precompute.py", items={
        "principal": Entry("lv_inf_pca_{}.npy", Npy(Array(np.floating, "N P")),
                           fallback="published_principal"),
        "published_principal": Entry("pca_data_lv_inf_{}.npy", Npy(Array(np.floating, "N P"))),
        "components": Entry("pcomponents_lv_inf_{}.npy", Npy(Array(np.floating, "P V"))),
        "random": Entry("lv_rand_pca_projected_{}.npy", Npy(Array(np.floating, "N P")),
                        fallback="published_random"),
        "published_random": Entry("pca_data_lv_rand_projected_{}.npy",
                                  Npy(Array(np.floating, "N P"))),
        "tsne": Entry("tsne_lv_inf_{}.npy", Npy(Array(np.floating, "N T"))),
        "random_tsne": Entry("tsne_lv_rand_{}.npy", Npy(Array(np.floating, "N T"))),
        "clusters": Entry("clusters_lv_inf_{}.npy", Npy(Array(np.integer, "N"))),
        "cluster_means": Entry("cluster_means_lv_inf_{}.npy", Npy(Array(np.floating, "C P"))),
        "mean": Entry("mu_lv_inf_{}.npy", Npy(Array(np.floating, "V"))),
        "variances": Entry("pc_variances_lv_inf_{}.npy", Npy(Array(np.floating, "P"))),
        "cosines": Entry("cosines_lv_inf_{}.npy", Npy(Array(np.floating, "pairs"))),
        "random_cosines": Entry("cosines_lv_rand_{}.npy", Npy(Array(np.floating, "pairs"))),
        "table": Entry("aux_lv_{}.csv", Table({"start": str, "sample": int, **_OUTCOMES}, gaps=(),
                                              exact=True, whole=True)),
        "published_table": Entry("lv_inf_aux_data_{}.csv", Table(_OUTCOMES, gaps=(), exact=True,
                                                                 whole=True))},
    settings_name="settings_{}.json", flag="--precomp_dir", setting_types=STEP_SETTINGS)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Normalise vectors (N, V) to unit length, float64 (N, V)."""
    return vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)


def uniformity(vectors: np.ndarray) -> dict[str, float]:
    """Test whether vectors (N, V) come from the uniform distribution on the sphere.

    The vectors are scaled to unit length; S is the matrix of their second moments. For uniform
    vectors and large N, both statistics follow chi² distributions: Rayleigh's statistic N V |mean|²
    with V degrees of freedom, and Bingham's statistic (1974) N V (V + 2) / 2 (tr(S²) - 1 / V) with
    (V - 1)(V + 2) / 2 degrees of freedom. At any N, each statistic has the mean of its chi²
    distribution and (N - 1) / N times the variance. See Mardia and Jupp, Directional Statistics,
    10.4.

    Returns:
        - ``num_vectors``: N
        - ``mean_norm``: norm of the mean vector, 1 if all vectors are equal
        - ``uniform_mean_norm``: root mean square of this norm for uniform vectors
        - ``effective_dimensions``: 1 / tr(S²), which is V if all directions are equally frequent
          and 1 if all vectors lie on one axis
        - ``uniform_effective_dimensions``: inverse of the expected tr(S²) for uniform vectors
        - ``rayleigh``, ``rayleigh_p``: statistic and p-value of Rayleigh's test of a zero mean
        - ``bingham``, ``bingham_p``: statistic and p-value of Bingham's test of S = I / V
    """
    x = unit_vectors(vectors)
    n, d = x.shape
    square_of_mean = float((x.mean(axis=0) ** 2).sum())
    square_of_moments = float(((x.T @ x / n) ** 2).sum())
    rayleigh = n * d * square_of_mean
    bingham = n * d * (d + 2) / 2 * (square_of_moments - 1 / d)
    return {
        "num_vectors": n, "mean_norm": square_of_mean ** 0.5, "uniform_mean_norm": n ** -0.5,
        "effective_dimensions": 1 / square_of_moments,
        "uniform_effective_dimensions": 1 / (1 / n + (1 - 1 / n) / d),
        "rayleigh": rayleigh, "rayleigh_p": float(chi2.sf(rayleigh, d)),
        "bingham": bingham, "bingham_p": float(chi2.sf(bingham, (d - 1) * (d + 2) / 2))}


def pairwise_cosines(vectors: np.ndarray, most_vectors: int) -> np.ndarray:
    """Compute the cosines between all pairs of the first ``most_vectors`` vectors.

    Args:
        vectors: vectors (N, V).
        most_vectors: largest number of vectors to use.

    Returns:
        Cosines, float32 (pairs,).
    """
    x = unit_vectors(vectors[:most_vectors])
    return (x @ x.T)[np.triu_indices(len(x), 1)].astype(np.float32)


def uniform_cosine_density(cosines: np.ndarray, dimensions: int) -> np.ndarray:
    """Compute the probability density of the cosine between two uniform unit vectors.

    Args:
        cosines: cosines at which the density is evaluated, of any shape.
        dimensions: dimension V of the vectors.

    Returns:
        Densities, with the shape of ``cosines``.
    """
    exponent = (dimensions - 3) / 2
    # (1 - c²)^exponent; its integral is the beta function B(1/2, (V - 1) / 2).
    logs = exponent * np.log1p(-cosines ** 2) - betaln(0.5, (dimensions - 1) / 2)
    return np.exp(logs)


def compute(run: SampleRun) -> None:
    """Find the principal components of informed vectors, project random vectors on them, cluster
    the informed vectors, compute one t-SNE map of both kinds, and test both for uniformity on the
    sphere.

    The vectors are centred but not divided by standard deviations, because their variances are part
    of the result. Clusters use the principal coordinates that explain 95 % of the variance of the
    informed vectors. The t-SNE map uses all P coordinates, because random vectors also vary along
    later ones.

    Raises:
        UserError: if samples are missing, damaged or too few, or if the vectors of the two kinds
            differ in dimension.
    """
    numbers, random_samples = run.numbers, run.options.random_samples
    random_numbers = choose_samples(random_samples, len(numbers))
    informed = run.samples.stacked_field("bottleneck_vec", numbers)
    random = random_samples.stacked_field("bottleneck_vec", random_numbers)
    if informed.shape != random.shape:
        raise UserError(f"the vectors of {run.samples.path} have {informed.shape[1]} dimensions, "
                        f"but those of {random_samples.path} have {random.shape[1]}; take samples "
                        "of the same simulator")
    steps = (read_simulated_steps(run.samples, numbers),
             read_simulated_steps(random_samples, random_numbers))
    print(f"{len(informed)} informed and {len(random)} random vectors", flush=True)
    state_map = run.start(
        random_samples=str(random_samples.path),
        random_samples_made_by=random_samples.description(), random_sample_numbers=random_numbers)
    results = run.results
    results.step("uniformity", lambda: (
        {"cosines": pairwise_cosines(informed, COSINE_VECTORS),
         "random_cosines": pairwise_cosines(random, COSINE_VECTORS)},
        {start: uniformity(vectors)
         for start, vectors in zip(SAMPLE_STARTS, (informed, random))}))
    mean = results.step("mean", lambda: ({"mean": informed.mean(axis=0)}, {}))["mean"]
    scale = Standardizer(mean, np.ones_like(mean), ())
    coordinates, components, leading = state_map.principal(informed, scale)
    projected = results.step("random", lambda: (
        {"random": scale.standardise(random) @ components.T}, {}))["random"]
    labels = state_map.clusters(leading, coordinates)

    def map_both() -> StepResult:
        places, num_fitted = embed(np.concatenate([coordinates, projected]),
                                   run.config.n_components_tsne, state_map.tsne_seed)
        return ({"tsne": places[:len(informed)], "random_tsne": places[len(informed):]},
                {"fitted_states": num_fitted})

    results.step("tsne", map_both)
    table = pd.concat([sample_outcomes(of_start).assign(
        start=start, cluster=labels if start == SAMPLE_STARTS[0] else NO_CLUSTER)
        for start, of_start in zip(SAMPLE_STARTS, steps)], ignore_index=True)
    results.step("table", lambda: ({"table": table}, {}))
    results.step("published", lambda: (
        {"published_principal": coordinates, "published_random": projected,
         "published_table": table[table["start"] == SAMPLE_STARTS[0]]}, {}))


def sample_outcomes(steps: SimulatedSteps) -> pd.DataFrame:
    """Summarise samples in a table with one row each: ``sample`` (number), ``sum_of_reward``,
    ``ends`` (1 if the terminal probability exceeds ENDED at any step, else 0) and ``mean_value``
    (mean value estimate over the steps)."""
    return pd.DataFrame({
        "sample": steps.by_sample(steps.sample)[:, 0],
        "sum_of_reward": steps.by_sample(steps.reward).sum(axis=1),
        "ends": (steps.by_sample(steps.terminal) > ENDED).any(axis=1).astype(int),
        "mean_value": steps.by_sample(steps.value).mean(axis=1)})


def draw_figures(results: StepResults, samples: SampleFolder, steps: SimulatedSteps,
                 config: BottleneckConfig, seed: int) -> Figures:
    """Draw the figures of the bottleneck vectors: projections, clusters and tests of uniformity.

    Args:
        results: precomputed results.
        samples: folder of the informed samples.
        config: ignored; the figures of all analyses are drawn with the same arguments.

    Raises:
        UserError: if a file is missing or damaged.
    """
    number = results.number
    principal, random = results.read("principal", number), results.read("random", number)  # (N, P)
    table = results.read("table")[:number] if results.has("table") else sample_outcomes(steps)
    variances = Variances(results, principal)
    what = f"{number} informed bottleneck vectors"
    title = f"{what}, {number} random ones in black"
    space = Plane(principal[:, :3], variances.axis_names, title, random[:, :3], "random",
                  others_in_view=True, unit="vectors")
    planes = {"pca": space.dimensions(2)}
    if can_draw("the t-SNE map", results, "tsne", "random_tsne"):
        planes["tsne"] = Plane(
            results.read("tsne", number)[:, :2], TSNE_NAMES[:2], title,
            results.read("random_tsne", number)[:, :2], "random", others_in_view=True,
            unit="vectors")
    colourings: Colourings = {
        "sum_of_reward": Quantity(table["sum_of_reward"].to_numpy(), "sum of reward of the sample"),
        "ends": Category(table["ends"].to_numpy(), "end of the sample", ("continues", "ends")),
        "mean_value": Quantity(table["mean_value"].to_numpy(), "mean value of the sample")}
    yield from variances.draw(what)
    if can_draw("the figures of the tests of uniformity", results, "cosines",
                "random_cosines"):
        statistics = results.settings()["steps"]["uniformity"]
        dimensions = results.read("components").shape[1]
        yield "variance_spectrum.png", plot_spectrum(principal, random, dimensions, statistics)
        yield "cosines.png", plot_cosines(results.read("cosines"), results.read("random_cosines"),
                                          dimensions, statistics)
    if can_draw("the clusters", results, "clusters", "cluster_means"):
        labels, num_clusters = read_clusters(results, number)
        colourings["cluster"] = colour_by_cluster(labels, num_clusters)
        means = results.read("cluster_means")

        def note(cluster: int) -> str:
            members = table[labels == cluster]
            return (f"{len(members)} of {number} informed vectors "
                    f"({100 * len(members) / number:.1f} %); mean value "
                    f"{members['mean_value'].mean():.2f}, mean sum of reward "
                    f"{members['sum_of_reward'].mean():.2f}, {100 * members['ends'].mean():.0f} % "
                    "end")

        yield from draw_space(space, colourings, ("cluster",), seed)
        yield from draw_clusters(
            tuple(planes.values()), labels, num_clusters, note,
            lambda cluster: central_frames(samples, labels == cluster, principal, means[cluster],
                                           table["sample"].to_numpy(), np.zeros(number, int)))
    yield from draw_planes(planes, colourings, seed)


def _figure(*lines: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_title("\n".join(lines), fontsize=10, loc="left")
    return figure, axes


def plot_spectrum(informed: np.ndarray, random: np.ndarray, dimensions: int,
                  uniformity_of: dict[str, dict]) -> Figure:
    """Plot the variances of both kinds of vectors along the informed vectors' principal components.

    Args:
        informed, random: principal coordinates of the two kinds (N, P).
        dimensions: dimension V of the vectors.
        uniformity_of: results of ``uniformity`` by kind of start, informed vectors first.
    """
    figure, axes = _figure(
        f"{len(informed)} informed and {len(random)} random bottleneck vectors of {dimensions} "
        "dimensions",
        *(f"{what}: {of['effective_dimensions']:.1f} effective dimensions (uniform: "
          f"{of['uniform_effective_dimensions']:.1f}), Bingham's test p = {of['bingham_p']:.2g}"
          for what, of in zip(KINDS, uniformity_of.values())))
    numbers = np.arange(1, informed.shape[1] + 1)
    for coordinates, (what, colour) in zip((informed, random), KINDS.items()):
        axes.plot(numbers, coordinates.var(axis=0, ddof=1), color=colour, marker=".", label=what)
    axes.axhline(1 / dimensions, color="black", linestyle=":", label=UNIFORM)
    axes.set(xlabel="principal component of the informed vectors", yscale="log",
             ylabel="variance of the coordinate")
    axes.legend()
    return figure


def plot_cosines(informed: np.ndarray, random: np.ndarray, dimensions: int,
                 uniformity_of: dict[str, dict]) -> Figure:
    """Plot the cosines between pairs of vectors of each kind, and the density for uniform vectors.

    Args:
        informed, random: cosines of the two kinds (pairs,).
        dimensions: dimension V of the vectors.
        uniformity_of: results of ``uniformity`` by kind of start, informed vectors first.
    """
    figure, axes = _figure(
        f"{len(informed)} pairs of bottleneck vectors of each kind, {dimensions} dimensions",
        *(f"{what}: the mean vector has the length {of['mean_norm']:.3f} (uniform: "
          f"{of['uniform_mean_norm']:.3f}), Rayleigh's test p = {of['rayleigh_p']:.2g}"
          for what, of in zip(KINDS, uniformity_of.values())))
    both = np.concatenate([informed, random])
    edges = np.linspace(both.min(), both.max(), 120)
    for cosines, (what, colour) in zip((informed, random), KINDS.items()):
        axes.hist(cosines, edges, density=True, color=colour, alpha=0.5, label=what)
    middle = np.linspace(max(edges[0], -0.999), min(edges[-1], 0.999), 400)
    axes.plot(middle, uniform_cosine_density(middle, dimensions), color="black", linestyle=":",
              label=UNIFORM)
    axes.set(xlabel="cosine between two vectors", ylabel="density (1 per unit of the cosine)")
    axes.legend()
    return figure


BOTTLENECK = SampleAnalysis(BottleneckConfig, BOTTLENECK_FILES, "bottleneck", "bottleneck_plots",
                            compute, draw_figures)
