"""Directions in the agent's hidden space: principal and independent components.

With the standardised state z = (hx - mu) / sigma, the principal coordinates are p = z C^T, where
the rows of C are the components. The independent coordinates are s = (p_k / std_k) W^T, with the
first k principal coordinates p_k, their standard deviations std_k, and the unmixing matrix W.

Letters in shape comments: D hidden units, P principal components, k independent components, B
states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor

from agents.networks import HiddenChange
from agents.provenance import check_agent
from common.errors import UserError
from common.files import sha256
from interventions.hidden_states_folder import (
    MATRICES,
    MATRIX_ARRAYS,
    hidden_state_results,
    matrix_files,
)

DirectionType = Literal["pca", "ica"]


@dataclasses.dataclass(frozen=True)
class Projector:
    """Linear map from hidden states, their changes and gradients to coordinates along directions.

    Attributes:
        mean: mean state mu (D,).
        std: standard deviations sigma of the units, all positive (D,).
        components: principal components C, orthonormal rows (P, D).
        variances: variances of the principal coordinates (P,).
        unmixing: unmixing matrix W (k, k).
        mixing: inverse of W (k, k).
    """

    mean: Tensor
    std: Tensor
    components: Tensor
    variances: Tensor
    unmixing: Tensor
    mixing: Tensor

    @classmethod
    def load(cls, folder: Path, num_episodes: int) -> Projector:
        """Read the matrices written by ``analysis/hidden_analysis_precompute.py``.

        Args:
            folder: results folder of that script.
            num_episodes: number of episodes that they were computed from.

        Raises:
            UserError: if a file is missing or damaged (the message names it), the shapes are
                inconsistent, or a standard deviation or variance is not positive.
        """
        files = hidden_state_results(folder, num_episodes)
        arrays = {name: np.asarray(files.read(name), dtype=np.float32) for name in MATRICES}
        MATRIX_ARRAYS.check(arrays)
        num_ics = len(arrays["unmixing"])
        if num_ics > len(arrays["variances"]) or (arrays["variances"][:num_ics] <= 0).any() or (
                arrays["std"] <= 0).any():
            raise UserError(f"the directions in {folder} have a standard deviation or variance "
                            "that is not above 0, or more independent than principal components")
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    @classmethod
    def load_for(cls, num_units: int, folder: Path, num_episodes: int,
                 agent: Path | str | None) -> tuple[Projector, dict[str, str]]:
        """Read the matrices, and check that they belong to an agent.

        Args:
            num_units: number of hidden units of the agent.
            folder: see ``load``.
            num_episodes: see ``load``.
            agent: file or digest of the agent, see ``agents.provenance.check_agent``.

        Returns:
            The projector, and the SHA-256 of its files by file name.

        Raises:
            UserError: see ``load``; or if the matrices belong to another agent.
        """
        projector = cls.load(folder, num_episodes)
        if len(projector.mean) != num_units:
            raise UserError(f"the directions in {folder} have {len(projector.mean)} hidden units, "
                            f"but the agent has {num_units}")
        stored = hidden_state_results(folder, num_episodes).settings().get("agent_sha256")
        check_agent(stored, agent, f"the directions in {folder} were computed",
                    "compute this agent's with analysis/hidden_analysis_precompute.py")
        files = matrix_files(folder, num_episodes).values()
        return projector, {path.name: sha256(path) for path in files}

    def on(self, device: torch.device | str) -> Projector:
        """Return a copy of the projector with its matrices on a device."""
        return Projector(**{field.name: getattr(self, field.name).to(device)
                            for field in dataclasses.fields(self)})

    def turned(self, seed: int) -> Projector:
        """Return a projector whose independent components are rotated at random.

        The independent coordinates s become Q s, with a random orthogonal matrix Q (Haar measure).
        Over the states that the components were computed from, independent coordinates are
        uncorrelated with variance 1, and so are the rotated ones: removing a random direction
        removes as much of that variance as removing an independent component.

        Args:
            seed: seed of the rotation.

        Raises:
            UserError: if there is only one component, which cannot be rotated.
        """
        if self.num_ics < 2:
            raise UserError("random directions need at least 2 independent components, but the "
                            "projector has only one")
        drawn = ortho_group.rvs(self.num_ics, random_state=np.random.default_rng(seed))
        turn = torch.from_numpy(drawn).to(self.unmixing)  # (k, k)
        return dataclasses.replace(self, unmixing=turn @ self.unmixing,
                                   mixing=self.mixing @ turn.T)

    def reordered(self, number: int) -> Projector:
        """Return a projector whose independent component 0 is component ``number``."""
        order = [number, *(other for other in range(self.num_ics) if other != number)]
        return dataclasses.replace(self, unmixing=self.unmixing[order],
                                   mixing=self.mixing[:, order])

    @property
    def lengths(self) -> Tensor:
        """Length of a unit step along each independent component: the Euclidean norm of the change
        of hx, in standard deviations of the units (k,)."""
        return (self.directions("ica") / self.std).norm(dim=1)

    @property
    def num_ics(self) -> int:
        return len(self.unmixing)

    def check_numbers(self, numbers: Iterable[int | None], kind: DirectionType) -> None:
        """Raise UserError if there is no direction with one of the numbers; None is ignored."""
        num_directions = self.num_ics if kind == "ica" else len(self.components)
        for number in numbers:
            if number is not None and not 0 <= number < num_directions:
                raise UserError(f"there is no {kind} direction {number}: they are numbered 0 to "
                                f"{num_directions - 1}")

    def coordinates(self, hx: Tensor, kind: DirectionType) -> Tensor:
        """Map states (…, D) to coordinates: (…, P) for "pca", (…, k) for "ica"."""
        return self.change(hx - self.mean, kind)

    def change(self, delta: Tensor, kind: DirectionType) -> Tensor:
        """Map changes of state (…, D) to changes of coordinates: (…, P) for "pca", (…, k) for
        "ica"."""
        principal = (delta / self.std) @ self.components.T
        if kind == "pca":
            return principal
        return (principal[..., :self.num_ics] / self._pc_std()) @ self.unmixing.T

    def gradient(self, gradient: Tensor, kind: DirectionType) -> Tensor:
        """Map gradients with respect to hx (…, D) to gradients with respect to the coordinates:
        (…, P) for "pca", (…, k) for "ica"."""
        return gradient @ self.directions(kind).T

    def directions(self, kind: DirectionType) -> Tensor:
        """Return the change of hx per unit of each coordinate, as rows: (P, D) for "pca", (k, D)
        for "ica".

        These are the columns of the inverse map. They differ from the rows of the forward map,
        because states are standardised and, for "ica", the components are not orthogonal.
        """
        if kind == "pca":
            return self.components * self.std
        scaled = self._pc_std().unsqueeze(1) * self.components[:self.num_ics]  # (k, D)
        return (self.mixing.T @ scaled) * self.std

    def swap(self, delta: Tensor, taken: list[int], put: list[int | None],
             kind: DirectionType) -> Tensor:
        """Remove the part of a change along some directions, and add it along others.

        All pairs act simultaneously on the same change.

        Args:
            delta: changes of hx (…, D).
            taken: directions to remove.
            put: for each removed direction, the direction that gets the same amount instead, or
                None.
            kind: type of the directions.

        Returns:
            Swapped changes (…, D).

        Raises:
            UserError: if the lists differ in length, or there is no such direction.
        """
        directions = self.directions(kind)
        if len(taken) != len(put):
            raise UserError(f"{len(taken)} directions to swap from, but {len(put)} to swap to")
        self.check_numbers((*taken, *put), kind)
        amounts = self.change(delta, kind)
        for source, target in zip(taken, put):
            amount = amounts[..., source:source + 1]
            delta = delta - amount * directions[source]
            if target is not None:
                delta = delta + amount * directions[target]
        return delta

    def swapped_step(self, taken: list[int], put: list[int | None], kind: DirectionType,
                     device: torch.device | str) -> HiddenChange:
        """Return a function that swaps directions in the change of the agent's state in a step.

        Both the simulator and the real environment apply swaps in this way.

        Args:
            taken: see ``swap``.
            put: see ``swap``.
            kind: see ``swap``.
            device: device of the states.

        Returns:
            Function that maps the states that enter and leave a step, (B, D) each, to the altered
            state (B, D): the entering state plus the swapped change.

        Raises:
            UserError: see ``swap``.
        """
        units = torch.eye(len(self.mean))
        matrix = self.swap(units, taken, put, kind).to(device)  # (D, D); a swap is linear

        def step(entering: Tensor, leaving: Tensor) -> Tensor:
            with torch.autocast(entering.device.type, enabled=False):
                return entering + (leaving - entering) @ matrix

        return step

    def _pc_std(self) -> Tensor:
        return self.variances[:self.num_ics].sqrt()
