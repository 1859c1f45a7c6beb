"""Jacobians: gradients of the agent's components with respect to the states at an earlier step.

Letters in shape comments: M samples, k components of the agent's state, D units of the agent's
state, E of the environment's, F = k (D + E) features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from analysis.methods.components import Standardizer
from analysis.parameters.config import JacobianConfig
from analysis.results.steps import PrincipalStep, clusters_result, principal_step, tsne_result
from common.errors import UserError
from common.progress import with_progress
from common.step_results import StepResult, StepResults
from generative.saliency.files import SaliencyFolder


@dataclasses.dataclass(frozen=True)
class Jacobians:
    """Gradients of every component, in every sample.

    Attributes:
        agent: with respect to the agent's state, float32 (M, k, D).
        env: with respect to the environment's state, float32 (M, k, E).
    """

    agent: np.ndarray
    env: np.ndarray

    def features(self) -> np.ndarray:
        """One row a sample: all of ``agent``, then all of ``env``, each divided by its root mean
        square in that sample (M, F).

        Gradients of some samples are a hundred times as large as those of most, and components of
        them as they are would show these few alone. ``sizes`` keeps what is divided by.
        """
        parts = []
        for part in (self.agent, self.env):
            rows = part.reshape(len(part), -1)
            size = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
            parts.append((rows / np.where(size > 0, size, 1)).astype(np.float32))
        return np.concatenate(parts, axis=1)

    @property
    def sizes(self) -> np.ndarray:
        """Root mean square over the units of the gradient of each component (M, 2, k), with
        respect to the agent's state first."""
        return np.stack([np.sqrt((part.astype(np.float64) ** 2).mean(axis=2))
                         for part in (self.agent, self.env)], axis=1).astype(np.float32)


def read_jacobians(folder: SaliencyFolder, numbers: Sequence[int], functions: Sequence[str],
                   step: int) -> Jacobians:
    """The gradients of functions with respect to the states at a step.

    Args:
        numbers: of the samples.
        functions: names of the saliency of the components.
        step: of the samples, from 0.

    Raises:
        UserError: naming a file that is missing, damaged or too short, or holds NaN; or if all
            gradients are 0, as after the step at which the components are read.
    """
    parts: dict[str, list[np.ndarray]] = {"hidden_states": [], "env_h": []}
    for function in with_progress(functions, len(functions), "component"):
        for field, of_field in parts.items():
            gradients = folder.stacked_field(field, function, numbers)  # (M, T, units)
            example = folder.file_of(field, numbers[0], function)
            if gradients.shape[1] <= step:
                raise UserError(f"grad_timestep is {step}, but {example} has only "
                                f"{gradients.shape[1]} steps, counted from 0")
            of_field.append(gradients[:, step])
    agent, env = (np.stack(of_field, axis=1) for of_field in parts.values())
    if not agent.any() and not env.any():
        read_at = folder.description(numbers[0], functions[0]).get("common_timesteps")
        where = f", for they are read at step {max(read_at)}" if read_at else ""
        raise UserError(f"all gradients with respect to the states at grad_timestep {step} are 0: "
                        f"the components do not depend on these{where}; choose an earlier step")
    return Jacobians(agent, env)


def analyse(jacobians: Jacobians, config: JacobianConfig, seed: int, tsne_seed: int,
            results: StepResults) -> None:
    """Find the principal components of the samples' Jacobians, and cluster and map the principal
    coordinates that hold 95 % of the variance.

    The features are centred, but not divided by their standard deviations: that a unit has little
    influence is a result.

    Args:
        seed: of every random choice but those of t-SNE.
        results: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few samples for what is asked for.
    """
    features = jacobians.features()
    mean = results.step("sizes", lambda: (
        {"sizes": jacobians.sizes, "mean": features.mean(axis=0)}, {}))["mean"]
    scale = Standardizer(mean, np.ones_like(mean), ())
    principal = principal_step(features, scale, config, seed, results)
    results.step("clusters", lambda: _clusters(principal, config, seed))
    results.step("tsne", lambda: tsne_result(principal.holding, config.n_components_tsne,
                                             tsne_seed))


def _clusters(principal: PrincipalStep, config: JacobianConfig, seed: int) -> StepResult:
    arrays, facts = clusters_result(principal.holding, config.clustering, config.n_clusters, seed,
                                    principal.coordinates)
    return {**arrays, "per_sample": arrays["clusters"]}, facts
