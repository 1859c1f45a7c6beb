"""Analysis of the agent's hidden states: results, figures, and readout weights of the heads.

``interventions.hidden_states_folder`` declares the files. Readout weights are given in coordinates
of independent components (ICs): the change of logits and value per unit of an IC, which is one
standard deviation over the recorded states.

Letters in shape comments: N states, A actions, I ICs, D hidden units, P principal components.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.networks import Policy
from analysis.clustering import find_outliers
from analysis.decomposition import (
    factorise,
    independent_components,
    principal_components,
    source_signals,
)
from analysis.figures import (
    TSNE_NAMES,
    Colourings,
    Figures,
    Variances,
    colour_by_cluster,
    describe_members,
    draw_clusters,
    draw_paths,
    draw_planes,
    draw_space,
    read_clusters,
)
from analysis.heatmaps import Heatmap, Names, plot_matrices, signed_scale
from analysis.influences.gradients import ic_name
from analysis.parameters import AgentHiddenConfig
from analysis.state_maps import StateMap, pca_result
from analysis.state_plots import Category, Plane, Quantity
from analysis.steps import RecordedSteps
from common.game_constants import ACTION_LABELS
from common.palette import BLUE, VERMILION
from common.step_results import StepResult, StepResults
from interventions.projector import Projector

logger = logging.getLogger(__name__)


def analyse(states: np.ndarray, simulated: np.ndarray | None, config: AgentHiddenConfig,
            state_map: StateMap) -> None:
    """Compute all steps of the analysis.

    PCA and ICA are fitted without outliers; every state is projected. Clusters and t-SNE use the
    principal coordinates that hold 95 % of the variance, not divided by their standard deviations;
    NMF uses the states as recorded, not standardised.

    Args:
        states: recorded states, float32 (N, D).
        simulated: simulated states to project on the same components, float32 (M, D), or None.
        config: parameters of the analysis.
        state_map: computes the shared steps and stores the results.

    Raises:
        UserError: if there are too few states.
    """
    results, seed = state_map.results, state_map.seed
    scale = state_map.scale(states, "hidden unit")
    standardised = scale.standardise(states)

    def find_kept() -> StepResult:
        outliers = find_outliers(standardised, config.outlier_max_k, seed)
        retention = 1 - outliers.mask.mean()
        return ({"kept": ~outliers.mask, "retention": np.array(retention)},
                {"neighbours": outliers.ks, "outliers": int(outliers.mask.sum()),
                 "retained": float(retention)})

    kept = results.step("kept", find_kept)["kept"]

    def find_components() -> StepResult:
        fit = principal_components(standardised[kept], config.n_components_pca, seed)
        arrays, facts = pca_result(fit, standardised)
        arrays["singular_values"] = fit.singular_values
        if simulated is not None:
            arrays["generated"] = fit.coordinates(scale.standardise(simulated))
        return arrays, facts

    arrays = results.step("pca", find_components)
    principal = arrays["principal"]
    number = results.facts["pca"]["components_for_95_percent"]
    leading = np.ascontiguousarray(principal[:, :number])
    results.step("ica", lambda: _ica(principal, kept, arrays["variances"], config, seed))
    state_map.clusters(leading, principal)
    state_map.tsne(leading)
    results.step("nmf", lambda: _nmf(states, config, seed))


def _ica(principal: np.ndarray, kept: np.ndarray, variances: np.ndarray,
         config: AgentHiddenConfig, seed: int) -> StepResult:
    k = config.n_components_ica
    fit = independent_components(principal[kept, :k], variances[:k], config.ica_max_iter,
                                 config.ica_tol, seed)
    _warn_unless_converged("ICA", fit.converged, fit.iterations, "ica_max_iter", "ica_tol")
    return ({"unmixing": fit.unmixing, "mixing": fit.mixing,
             "sources": source_signals(principal[:, :k], variances[:k], fit.unmixing)},
            {"iterations": fit.iterations, "converged": fit.converged})


def _nmf(states: np.ndarray, config: AgentHiddenConfig, seed: int) -> StepResult:
    fit = factorise(states, config.n_components_nmf, config.nmf_max_iter, config.nmf_tol, seed)
    _warn_unless_converged("NMF", fit.converged, fit.iterations, "nmf_max_iter", "nmf_tol")
    return ({"nmf": fit.weights, "nmf_components": fit.factors, "nmf_min": fit.minimum},
            {"iterations": fit.iterations, "converged": fit.converged,
             "relative_error": fit.relative_error})


def _warn_unless_converged(what: str, converged: bool, iterations: int, most: str,
                           tolerance: str) -> None:
    if not converged:
        logger.warning("%s has not converged in %d iterations; raise %s or %s", what, iterations,
                       most, tolerance)


def draw_figures(results: StepResults, steps: RecordedSteps, num_paths: int, seed: int) -> Figures:
    """Draw all figures of the analysis.

    Args:
        results: precomputed results; simulated states are drawn if there are any.
        steps: steps of the same episodes.
        num_paths: number of episodes whose trajectories are drawn.
        seed: seed of the drawing order and of the choice of these episodes.

    Raises:
        UserError: if a file is missing or damaged, or belongs to other episodes.
    """
    num_states = len(steps.action)
    principal = results.read("principal", num_states)  # (N, P)
    variances = Variances(results, principal)
    labels, num_clusters = read_clusters(results, num_states)
    title = f"{num_states} hidden states of {results.number} episodes"
    space = Plane(principal[:, :3], variances.axis_names, title)
    if results.other_number is not None:
        simulated = results.read("generated")
        space = dataclasses.replace(
            space, others=simulated[:, :3], others_name="simulated",
            title=f"{title}, {len(simulated)} simulated ones of {results.other_number} samples in "
                  "black")
    plane = space.dimensions(2)
    recorded = dataclasses.replace(plane, others=None, title=title)
    tsne = Plane(results.read("tsne", num_states)[:, :2], TSNE_NAMES[:2], title)
    colourings = colour_recorded_steps(results, steps, labels, num_clusters)

    def describe_episode(episode: int) -> str:
        rows = steps.episode == episode
        return f"{rows.sum()} steps, {'rewarded' if steps.rewarded[rows].any() else 'no reward'}"

    yield from draw_planes({"pca": plane, "tsne": tsne}, colourings, seed)
    yield from draw_space(space, colourings, ("cluster", "value"), seed)
    yield from variances.draw(title)
    yield from draw_paths(recorded, steps.episode, "episode", num_paths, describe_episode, seed)
    yield from draw_clusters(
        (recorded, tsne), labels, range(num_clusters), lambda cluster: describe_members(
            labels == cluster, steps.episode, "episode", steps.value, steps.action))


def colour_recorded_steps(results: StepResults, steps: RecordedSteps, labels: np.ndarray,
                          num_clusters: int) -> Colourings:
    """Return the colourings of recorded steps.

    Args:
        results: precomputed results.
        steps: recorded steps.
        labels: cluster of each state (N,).
        num_clusters: number of clusters.
    """
    num_states = len(labels)
    weights = (results.read("nmf", num_states)
               * np.linalg.norm(results.read("nmf_components"), axis=1))
    sources = np.abs(results.read("sources", num_states))
    return {
        "entropy": Quantity(steps.entropy, "entropy of the policy (nats)"),
        "likeliest_action": Category(steps.likeliest_action, "most likely action", ACTION_LABELS),
        "action": Category(steps.action, "action taken", ACTION_LABELS),
        "cluster": colour_by_cluster(labels, num_clusters),
        "nmf_factor": Category(weights.argmax(axis=1), "strongest NMF factor",
                               tuple(f"factor {i}" for i in range(weights.shape[1])),
                               numbered=True),
        "ic_factor": Category(sources.argmax(axis=1), "strongest IC",
                              tuple(f"IC {i}" for i in range(sources.shape[1])),
                              numbered=True),
        "episode_length": Quantity(steps.length, "length of the episode (steps)"),
        "part_of_episode": Quantity(steps.part, "part of the episode (0 first, 1 last step)"),
        "done": Category(steps.done.astype(int), "last step", ("before it", "last step")),
        "value": Quantity(steps.value, "value estimate"),
        "episode_rewarded": Category(steps.rewarded.astype(int), "reward in the episode",
                                     ("none", "some")),
        "reward": Quantity(steps.reward, "reward of the step"),
        **{name: Quantity(values, f"{name[-1]} of the player (cells)")
           for name, values in steps.positions.items()},
    }


VALUE_ROW = "value"


@dataclasses.dataclass(frozen=True)
class Readout:
    """Readout weights of policy and value in IC coordinates.

    Attributes:
        policy: weights of the logits (A, I).
        value: weights of the value estimate (I,).
    """

    policy: np.ndarray
    value: np.ndarray

    @property
    def preferences(self) -> np.ndarray:
        """``policy`` minus its mean over the actions (A, I), since adding a constant to all logits
        does not change the probabilities."""
        return self.policy - self.policy.mean(axis=0)

    def table(self, action_names: tuple[str, ...]) -> pd.DataFrame:
        """Return a table with the columns ``output``, ``kind`` (logit, preference or value) and one
        per IC; two rows per action, and one for the value."""
        ics = [ic_name(i) for i in range(len(self.value))]
        rows = [[name, kind, *weights] for kind, matrix in (
            ("logit", self.policy), ("preference", self.preferences))
            for name, weights in zip(action_names, matrix)]
        rows.append([VALUE_ROW, "value", *self.value])
        return pd.DataFrame(rows, columns=["output", "kind", *ics])


@torch.no_grad()
def readout(policy: Policy, projector: Projector) -> Readout:
    """Compute the readout weights of both heads in IC coordinates.

    They are the weights of a head times the change of the hidden units per unit of an IC, which is
    a column of the inverse of the map from hidden units to ICs, not a row of the map: to raise one
    IC and keep the others constant, the state has to move along this column.
    """
    return Readout(projector.gradient(policy.fc_policy.weight, "ica").numpy(),
                   projector.gradient(policy.fc_value.weight, "ica")[0].numpy())


UNIT = "per standard deviation of the component"


def plot_actions(weights: Readout, title: str) -> Figure:
    """Draw a heat map of the policy's readout weights, one row per action, one column per IC."""
    return plot_matrices([Heatmap(weights.preferences, "logit less the mean of all logits")],
                  Names(ACTION_LABELS, _numbers(weights), "action", "IC"),
                  signed_scale([weights.preferences], f"nats {UNIT}", square=False), 1,
                  f"Read-out weights of the policy\n{title}")


def plot_action_bars(weights: Readout, title: str) -> Figure:
    """Draw the policy's readout weights as bars, one panel per IC, one bar per action."""
    preferences = weights.preferences
    num_ics = len(weights.value)
    columns = min(num_ics, 4)
    rows = -(-num_ics // columns)
    figure = Figure(figsize=(3.6 * columns, 1.9 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for component, axes in enumerate(panels.flat):
        if component >= num_ics:
            axes.axis("off")
            continue
        _draw_bars(axes, preferences[:, component])
        axes.set_title(f"IC {component}", fontsize=9)
        axes.set_xticks(range(len(ACTION_LABELS)), ACTION_LABELS, rotation=90, fontsize=6)
        axes.tick_params(axis="x", labelbottom=component + columns >= num_ics)
    figure.supxlabel("action", fontsize=9)
    figure.supylabel(f"nats {UNIT}", fontsize=9)
    figure.suptitle("Read-out weights of the policy: logits less the mean of all logits; blue "
                    f"raises, orange lowers\n{title}", fontsize=10)
    return figure


def plot_value(weights: Readout, title: str) -> Figure:
    """Draw the readout weights of the value as bars, one per IC."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, weights.value)
    axes.set_xticks(range(len(weights.value)), _numbers(weights))
    axes.set(xlabel="IC", ylabel=f"value (discounted, scaled rewards)\n{UNIT}")
    axes.set_title(f"Read-out weights of the value; blue raises, orange lowers\n{title}",
                   fontsize=10)
    return figure


def _draw_bars(axes, values: np.ndarray) -> None:
    axes.bar(range(len(values)), values,
             color=[BLUE if value >= 0 else VERMILION for value in values])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)


def _numbers(weights: Readout) -> list[str]:
    return [str(i) for i in range(len(weights.value))]
