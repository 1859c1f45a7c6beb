"""Directions in the agent's hidden space: principal and independent components.

With the state standardised, z = (hx - mu) / sigma, principal coordinates are p = z C^T (rows of C
are the components), and independent coordinates are s = (p_k / std_k) W^T with the first k
principal coordinates, divided by their standard deviations, and the unmixing matrix W.

Letters in shape comments: D hidden units, P principal components, k independent components.
"""

from __future__ import annotations

import dataclasses
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
from interventions.hidden_states_folder import MATRICES, hidden_state_results, matrix_files

DirectionType = Literal["pca", "ica"]


@dataclasses.dataclass(frozen=True)
class Projector:
    """Maps states, changes of state and gradients to coordinates along directions, and back.

    Attributes:
        mean: mu (D,).
        std: sigma (D,); none is 0.
        components: C, orthonormal rows (P, D).
        variances: of the principal coordinates (P,).
        unmixing: W (k, k).
        mixing: its inverse (k, k).

    Raises:
        UserError: if the shapes do not fit, a value is not finite, or a unit does not vary.
    """

    mean: Tensor
    std: Tensor
    components: Tensor
    variances: Tensor
    unmixing: Tensor
    mixing: Tensor

    def __post_init__(self):
        units = len(self.mean)
        num_pcs, num_ics = len(self.components), len(self.unmixing)
        expected = {"mean": (units,), "std": (units,), "components": (num_pcs, units),
                    "variances": (num_pcs,), "unmixing": (num_ics, num_ics),
                    "mixing": (num_ics, num_ics)}
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape:
                raise UserError(f"the projector's {name} has the shape {tuple(tensor.shape)}, "
                                f"not {shape}")
            if not torch.isfinite(tensor).all():
                raise UserError(f"the projector's {name} holds NaN or infinity")
        if num_ics > num_pcs:
            raise UserError(f"the projector has {num_ics} independent components, more than its "
                            f"{num_pcs} principal ones")
        for name, tensor in (("std", self.std), ("variances", self.variances[:num_ics])):
            if (tensor <= 0).any():
                raise UserError(f"the projector's {name} number {int((tensor <= 0).nonzero()[0])} "
                                "is not above 0")

    @classmethod
    def load(cls, folder: Path, num_episodes: int) -> Projector:
        """Read the matrices of ``analysis/hidden_analysis_precompute.py``.

        Raises:
            UserError: naming a missing or damaged file.
        """
        files = hidden_state_results(folder, num_episodes)
        return cls(**{name: torch.from_numpy(np.asarray(files.read(name), dtype=np.float32))
                      for name in MATRICES})

    @classmethod
    def load_for(cls, num_units: int, folder: Path, num_episodes: int,
                 agent: Path | str | None) -> tuple[Projector, dict[str, str]]:
        """The same for an agent with this many hidden units, with the files' checksums by name.

        Args:
            agent: its file or digest, see ``agents.provenance.check_agent``.

        Raises:
            UserError: see ``load``; or if the matrices are another agent's.
        """
        projector = cls.load(folder, num_episodes)
        if len(projector.mean) != num_units:
            raise UserError(f"the directions in {folder} are those of {len(projector.mean)} hidden "
                            f"units, but the agent has {num_units}")
        found_for = hidden_state_results(folder, num_episodes).settings().get("agent_sha256")
        check_agent(found_for, agent, f"the directions in {folder} were found",
                    "find this agent's with analysis/hidden_analysis_precompute.py")
        files = matrix_files(folder, num_episodes).values()
        return projector, {path.name: sha256(path) for path in files}

    def on(self, device: torch.device | str) -> Projector:
        """The same with its matrices on a device."""
        return Projector(**{field.name: getattr(self, field.name).to(device)
                            for field in dataclasses.fields(self)})

    def turned(self, seed: int) -> Projector:
        """A projector with random directions of equal size instead of the independent components.

        The axes s of the independent coordinates become Q s with an orthogonal Q drawn evenly by
        the seed (Haar measure). Over the states the components were made of, independent
        coordinates have variance 1 and are uncorrelated, and the same holds for the random ones:
        taking one out removes as much of that variance as taking out an independent component.

        Raises:
            UserError: if there is only one component, which cannot be turned.
        """
        if self.num_ics < 2:
            raise UserError("random directions need at least 2 independent components, but the "
                            "projector has only one")
        drawn = ortho_group.rvs(self.num_ics, random_state=np.random.default_rng(seed))
        turn = torch.from_numpy(drawn).to(self.unmixing)  # (k, k)
        return dataclasses.replace(self, unmixing=turn @ self.unmixing,
                                   mixing=self.mixing @ turn.T)

    @property
    def num_ics(self) -> int:
        return len(self.unmixing)

    def coordinates(self, hx: Tensor, kind: DirectionType) -> Tensor:
        """States (…, D) to coordinates (…, P) or (…, k)."""
        return self.change(hx - self.mean, kind)

    def change(self, delta: Tensor, kind: DirectionType) -> Tensor:
        """Changes of state (…, D) to the changes of the coordinates they make."""
        principal = (delta / self.std) @ self.components.T
        if kind == "pca":
            return principal
        return (principal[..., :self.num_ics] / self._pc_std()) @ self.unmixing.T

    def gradient(self, gradient: Tensor, kind: DirectionType) -> Tensor:
        """Gradients with respect to hx (…, D) to gradients with respect to the coordinates."""
        return gradient @ self.directions(kind).T

    def directions(self, kind: DirectionType) -> Tensor:
        """Change of hx for one unit of each coordinate, as rows: (P, D) or (k, D).

        These are columns of the inverse map. The ICs are not orthogonal, so they differ from the
        rows of the forward map.
        """
        if kind == "pca":
            return self.components * self.std
        scaled = self._pc_std().unsqueeze(1) * self.components[:self.num_ics]  # (k, D)
        return (self.mixing.T @ scaled) * self.std

    def swap(self, delta: Tensor, taken: list[int], put: list[int | None],
             kind: DirectionType) -> Tensor:
        """Take the part of a change along some directions out and put it back along others.

        All pairs act at once on the same change.

        Args:
            delta: changes of hx (…, D).
            taken: directions to take out.
            put: for each of them the direction that gets the same amount instead; None for none.

        Returns:
            Changes (…, D).

        Raises:
            UserError: if the lists differ in length, or there is no such direction.
        """
        directions = self.directions(kind)
        if len(taken) != len(put):
            raise UserError(f"{len(taken)} directions to swap from, but {len(put)} to swap to")
        for number in (*taken, *put):
            if number is not None and not 0 <= number < len(directions):
                raise UserError(f"there is no {kind} direction {number}: they are numbered 0 to "
                                f"{len(directions) - 1}")
        amounts = self.change(delta, kind)
        for source, target in zip(taken, put):
            amount = amounts[..., source:source + 1]
            delta = delta - amount * directions[source]
            if target is not None:
                delta = delta + amount * directions[target]
        return delta

    def swapped_step(self, taken: list[int], put: list[int | None], kind: DirectionType,
                     device: torch.device | str) -> HiddenChange:
        """A swap as simulator and real environment apply it: to the change of the agent's state
        in a step.

        Args:
            taken, put, kind: see ``swap``.
            device: where the states are.

        Returns:
            (state that enters a step, state that leaves it), each (B, D), to the state to leave
            with: what entered and the swapped change.

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
