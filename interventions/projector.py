"""Directions in the agent's hidden space, principal and independent components, and their swaps.

With the standardised state z = (hx - mu) / sigma, the principal coordinates are p = z C^T, where
the rows of C are the components. The independent coordinates are s = (p_k / std_k) W^T, with the
first k principal coordinates p_k, their standard deviations std_k, and the unmixing matrix W.

Letters in shape comments: D hidden units, P principal components, k independent components, B
states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.stats import ortho_group
from torch import Tensor

from agents.agent_file import weights_sha256
from agents.layers import STATE
from agents.networks import Policy
from agents.patch import Patch, PatchContext, PatchFn, Selection
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
Pairs = Sequence[tuple[int, int | None]]
"""For each direction to remove, the direction that gets the same amount instead, or None."""


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

    def check_numbers(self, numbers: Sequence[int | None], kind: DirectionType) -> None:
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

    def swap(self, delta: Tensor, pairs: Pairs, kind: DirectionType) -> Tensor:
        """Remove the part of changes of hx (…, D) along some directions, and add it along others.

        All pairs act simultaneously on the same change.

        Raises:
            UserError: if there is no such direction.
        """
        directions = self.directions(kind)
        self.check_numbers([number for pair in pairs for number in pair], kind)
        amounts = self.change(delta, kind)
        for source, target in pairs:
            amount = amounts[..., source:source + 1]
            delta = delta - amount * directions[source]
            if target is not None:
                delta = delta + amount * directions[target]
        return delta

    def _pc_std(self) -> Tensor:
        return self.variances[:self.num_ics].sqrt()


@dataclasses.dataclass(frozen=True, eq=False)
class Swap(Patch):
    """Remove the part of every change of the hidden state along some directions, and add the same
    amounts along others.

    Attributes:
        pairs: see ``Pairs``.
        directions: the directions; before the patch is opened, the folder with their matrices.
        num_episodes: number of episodes that the matrices were computed from.
        direction_type: "ica" or "pca".
        random_directions: seed of the random directions that replace the independent components,
            see ``Projector.turned``; None for the components themselves.
        matrices_sha256: SHA-256 of the files of the matrices, by name, once the patch is opened.
    """

    kind: ClassVar[str] = "swap"

    pairs: Pairs
    directions: Projector | Path | None = None
    num_episodes: int = 0
    direction_type: DirectionType = "ica"
    random_directions: int | None = None
    matrices_sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def opened(self, policy: Policy) -> Swap:
        """Return the patch with the directions that its folder holds for an agent.

        Raises:
            UserError: if no folder is named; if the matrices are missing, damaged, or belong to
                another agent; or see ``matrix``.
        """
        if not isinstance(self.directions, Path) or not self.num_episodes:
            raise UserError("swap needs the results of hidden_analysis_precompute.py: name their "
                            "folder and number of episodes with directions= and num_episodes=")
        projector, checksums = Projector.load_for(
            policy.hidden_state_size, self.directions, self.num_episodes, weights_sha256(policy))
        opened = dataclasses.replace(self, directions=projector, matrices_sha256=checksums)
        opened.matrix()
        return opened

    def matrix(self) -> Tensor:
        """Return the matrix (D, D) that maps changes of the state, as rows, to swapped changes.

        Raises:
            UserError: if there is no such direction, or no random direction that replaces it.
        """
        projector = self.directions
        assert isinstance(projector, Projector)  # the patch is opened
        if self.random_directions is not None:
            if self.direction_type != "ica":
                raise UserError("random_directions replaces independent components, so "
                                "direction_type must be ica")
            projector = projector.turned(self.random_directions)
        return projector.swap(torch.eye(len(projector.mean)), self.pairs, self.direction_type)

    def bind(self, selection: Selection) -> PatchFn:
        if selection.layer.name != STATE or selection.channels is not None:
            raise UserError(f"swap changes the whole hidden state, so it is written swap@{STATE}, "
                            "without units")
        matrix = self.matrix().to(selection.policy.device)

        def change(entries: Tensor, context: PatchContext) -> Tensor:
            entering = context.state
            assert entering is not None  # the layer is the hidden state
            with torch.autocast(entering.device.type, enabled=False):
                return (entering + (entries.squeeze(2) - entering) @ matrix).unsqueeze(2)

        return change

    @property
    def pattern(self) -> Swap:
        """The swap of the components, numbered from 0 in order of first appearance."""
        numbers = dict.fromkeys(number for numbers in zip(*self.pairs) for number in numbers
                                if number is not None)
        new: dict[int | None, int] = dict(zip(numbers, range(len(numbers))))
        return dataclasses.replace(self, random_directions=None, pairs=tuple(
            (new[source], new.get(target)) for source, target in self.pairs))

    @property
    def name(self) -> str:
        """Name of the swap in file names, such as ``10_5_to_12_None``."""
        taken, put = zip(*self.pairs)
        name = "_".join(map(str, (*taken, "to", *put)))
        return name if self.random_directions is None else f"random_{self.random_directions}_{name}"

    @property
    def description(self) -> dict:
        """Settings of the swap, for metadata."""
        taken, put = map(list, zip(*self.pairs))
        random = {} if self.random_directions is None else {
            "random_directions": self.random_directions}
        return {"from": taken, "to": put, "direction_type": self.direction_type,
                "matrices_sha256": self.matrices_sha256, **random}
