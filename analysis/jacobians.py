"""Jacobians: how the agent's components at a later step depend on the states at an earlier one.

Letters in shape comments: M samples, k components of the agent's state, D units of the agent's
state, E of the environment's, F = k (D + E) features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from analysis.components import Scale
from analysis.result_files import Result, ResultWriter
from analysis.result_steps import clusters_result, principal_step, scale_from, tsne_result
from common.errors import UserError
from common.progress import with_progress
from generative.config import JacobianConfig
from generative.saliency_files import SaliencyFolder


@dataclasses.dataclass(frozen=True)
class Jacobians:
    """Gradients of every component, in every sample.

    Attributes:
        agent: with respect to the agent's state, float32 (M, k, D).
        env: with respect to the environment's state, float32 (M, k, E).
    """

    agent: np.ndarray
    env: np.ndarray

    @property
    def features(self) -> np.ndarray:
        """One row a sample: all of ``agent``, then all of ``env`` (M, F)."""
        samples = len(self.agent)
        return np.concatenate([self.agent.reshape(samples, -1), self.env.reshape(samples, -1)],
                              axis=1)

    @property
    def sizes(self) -> np.ndarray:
        """Root mean square over the units of the gradient of each component (M, 2, k), with
        respect to the agent's state first."""
        return np.stack([np.sqrt((part.astype(np.float64) ** 2).mean(axis=2))
                         for part in (self.agent, self.env)], axis=1).astype(np.float32)

    def scale(self) -> Scale:
        """Mean of each feature, and one standard deviation for all of the agent's features and one
        for all of the environment's: that a unit has little influence is a result, which dividing
        it by its own standard deviation would hide."""
        deviations = []
        for part in (self.agent, self.env):
            std = float(np.sqrt(part.var(axis=0, dtype=np.float64).mean()))
            deviations.append(np.full(part[0].size, std if std > 0 else 1.0, dtype=np.float32))
        return Scale(self.features.mean(axis=0, dtype=np.float64).astype(np.float32),
                     np.concatenate(deviations), ())


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
            example = folder.array_file(numbers[0], function, field)
            if gradients.shape[1] <= step:
                raise UserError(f"grad_timestep is {step}, but {example} has only "
                                f"{gradients.shape[1]} steps, counted from 0")
            at_step = gradients[:, step]
            (wrong,) = np.nonzero(~np.isfinite(at_step).all(axis=1))
            if len(wrong):
                file = folder.array_file(numbers[wrong[0]], function, field)
                raise UserError(f"{file} holds NaN or infinity; make this saliency again")
            of_field.append(at_step)
    agent, env = (np.stack(of_field, axis=1) for of_field in parts.values())
    if not agent.any() and not env.any():
        read_at = folder.description(numbers[0], functions[0]).get("common_timesteps")
        where = f", for they are read at step {max(read_at)}" if read_at else ""
        raise UserError(f"all gradients with respect to the states at grad_timestep {step} are 0: "
                        f"the components do not depend on these{where}; choose an earlier step")
    return Jacobians(agent, env)


def analyse(jacobians: Jacobians, config: JacobianConfig, seed: int, tsne_seed: int,
            writer: ResultWriter) -> None:
    """Find the principal components of the samples' Jacobians, and cluster and map the principal
    coordinates that hold 95 % of the variance.

    Args:
        seed: of every random choice but those of t-SNE.
        writer: gets the results; steps that it has are not computed again.

    Raises:
        UserError: if there are too few samples for what is asked for.
    """
    found = writer.step("scale", lambda: _scale(jacobians))
    held = principal_step(jacobians.features, scale_from(found), config, seed, writer).holding
    writer.step("clusters", lambda: _clusters(held, config, seed))
    writer.step("tsne", lambda: tsne_result(held, config.n_components_tsne, tsne_seed))


def _scale(jacobians: Jacobians) -> Result:
    scale = jacobians.scale()
    return Result({"mean": scale.mean, "std": scale.std, "sizes": jacobians.sizes},
                  {"std_agent": float(scale.std[0]), "std_env": float(scale.std[-1])})


def _clusters(rows: np.ndarray, config: JacobianConfig, seed: int) -> Result:
    result = clusters_result(rows, config.clustering, config.n_clusters, seed)
    result.arrays["per_sample"] = result.arrays["clusters"]
    return result
