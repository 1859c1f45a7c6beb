"""Objectives: scalar outputs of the agent at a step of a simulated or real rollout.

Letters in shape comments: T steps, B rollouts, A actions, D agent hidden state, U units of a layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from agents.hooks import ActivationCache, cached
from agents.layers import STATE, Layer, find_layer
from agents.networks import Policy, PolicyOutput
from agents.outputs import POLICY, TAKEN, Output, output_names, outputs_named
from common.devices import Compute
from common.errors import UserError, nearest
from common.game_constants import ACTION_NAMES
from generative.networks import Draw, LatentSampler
from generative.saliency.gradients import DIRECTION, checked_directions, saliency_functions
from generative.simulator import Simulator, Step
from interventions.projector import DirectionType, Projector

MAXIMISE, MINIMISE = "maximise", "minimise"
AIMS = {MAXIMISE: 1.0, MINIMISE: -1.0}  # sign of the target in the objective
_NO_OUTPUTS = ("logit_", TAKEN)  # prefixes of outputs that a simulated step does not have
_MOVE = re.compile(r"from_(\w+)_to_(\w+)")


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The agent's outputs at the steps of rollouts.

    Attributes:
        values: the agent's values (T, B).
        log_probs: log-probabilities of the agent's actions (T, B, A).
        hidden_states: the agent's hidden states after each step (T, B, D).
        units: units of each layer by name; of a feature map, the spatial mean of each channel
            (T, B, U).
    """

    values: Tensor
    log_probs: Tensor
    hidden_states: Tensor
    units: dict[str, Tensor]

    @classmethod
    def of(cls, steps: Sequence[Step | PolicyOutput], activations: ActivationCache,
           policy: Policy) -> Rollouts:
        """Stack steps, simulated or real, during which the outputs of layers were cached."""
        units = {}
        for name in activations:
            shape = find_layer(policy, name).shape
            units[name] = torch.stack([output.float().reshape(-1, shape[0], math.prod(shape[1:]))
                                       .mean(dim=-1) for output in activations.calls(name)])
        values, log_probs, hidden_states = (
            torch.stack([getattr(step, name) for step in steps]).float()
            for name in ("values", "log_probs", "hidden_states"))
        return cls(values, log_probs, hidden_states, units)


def rollout(simulator: Simulator, compute: Compute, vectors: Tensor, num_steps: int,
            layers: tuple[str, ...] = (), draw: Draw | None = None,
            ) -> tuple[list[Step], Rollouts]:
    """Simulate from vectors (B, V), with gradients of all outputs with respect to them.

    Args:
        layers: names of the layers whose units are read.
        draw: sampler of the latents; None for the most likely latents.
    """
    draw = draw or LatentSampler("mode")
    policy = simulator.agent.policy
    with compute.autocast(), cached(policy, layers, graph=True) as activations:
        steps = simulator.imagine(simulator.start_from(vectors, draw, detached=False), draw,
                                  num_steps)
    return steps, Rollouts.of(steps, activations, policy)


@dataclasses.dataclass(frozen=True)
class OutputTarget:
    """An output of the agent's heads."""

    first_step: ClassVar[int] = 0
    layers: ClassVar[tuple[str, ...]] = ()

    output: Output

    @property
    def name(self) -> str:
        return self.output.name

    def __call__(self, rollouts: Rollouts, step: int) -> Tensor:
        # Log-probabilities are valid logits: log-softmax does not change them.
        at = PolicyOutput(rollouts.log_probs[step], rollouts.values[step],
                          rollouts.hidden_states[step])
        return self.output(at, at.logits.argmax(dim=-1))


@dataclasses.dataclass(frozen=True)
class DirectionTarget:
    """Coordinate of the hidden state along a direction."""

    first_step: ClassVar[int] = 0
    layers: ClassVar[tuple[str, ...]] = ()

    number: int
    direction_type: DirectionType
    projector: Projector

    @property
    def name(self) -> str:
        return f"{DIRECTION}_{self.number}_{self.direction_type}"

    def __call__(self, rollouts: Rollouts, step: int) -> Tensor:
        along = self.projector.coordinates(rollouts.hidden_states[step], self.direction_type)
        return along[..., self.number]


@dataclasses.dataclass(frozen=True)
class UnitTarget:
    """A unit of a layer, or the spatial mean of a channel of a feature map."""

    first_step: ClassVar[int] = 0

    layer: Layer
    unit: int

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.layer.name,)

    @property
    def name(self) -> str:
        return f"{self.layer.name}:{self.unit}"

    def __call__(self, rollouts: Rollouts, step: int) -> Tensor:
        return rollouts.units[self.layer.name][step, :, self.unit]


@dataclasses.dataclass(frozen=True)
class MoveTarget:
    """Sum of the log-probabilities of one action at the previous step and another at the step."""

    first_step: ClassVar[int] = 1
    layers: ClassVar[tuple[str, ...]] = ()

    before: int
    after: int

    @property
    def name(self) -> str:
        return f"from_{ACTION_NAMES[self.before]}_to_{ACTION_NAMES[self.after]}"

    def __call__(self, rollouts: Rollouts, step: int) -> Tensor:
        return (rollouts.log_probs[step - 1, :, self.before]
                + rollouts.log_probs[step, :, self.after])


Target = OutputTarget | DirectionTarget | UnitTarget | MoveTarget


@dataclasses.dataclass(frozen=True)
class Objective:
    """A target that is maximised or minimised; ``aim`` is a key of ``AIMS``."""

    target: Target
    aim: str

    @property
    def name(self) -> str:
        return f"{self.aim} {self.target.name}"

    @property
    def sign(self) -> float:
        return AIMS[self.aim]


def target_outputs() -> tuple[str, ...]:
    """Names of the outputs that can be targets."""
    return tuple(name for name in output_names() if not name.startswith(_NO_OUTPUTS))


def targets_named(names: Sequence[str], policy: Policy, direction_ids: Sequence[int],
                  direction_type: str,
                  projector: Projector | None) -> tuple[Target, ...]:
    """Parse the names of targets; duplicates are dropped.

    Args:
        names: outputs (``value``, ``log_prob_up``, ``policy`` for all log-probabilities);
            directions as in ``saliency_functions`` (``hx_direction`` for all ``direction_ids``);
            units as <layer>:<number>, or the name of a layer for all of its units;
            ``from_<action>_to_<action>``.
        projector: projector onto the directions; None if no target is a direction.

    Raises:
        UserError: if a target is unknown; the message suggests the nearest name.
    """
    targets: list[Target] = []
    for name in names:
        layer, colon, unit = name.partition(":")
        move = _MOVE.fullmatch(name)
        if projector is not None and name.startswith(DIRECTION):
            functions = saliency_functions([name], direction_ids, direction_type)
            targets += [DirectionTarget(number, kind, projector)
                        for number, kind in checked_directions(functions, projector)]
        elif move:
            for action in move.groups():
                if action not in ACTION_NAMES:
                    raise UserError(f"the target '{name}' has the unknown action '{action}'"
                                    f"{nearest(action, ACTION_NAMES)}")
            if move[1] == move[2]:
                raise UserError(f"the target '{name}' moves from an action to itself")
            targets.append(MoveTarget(*map(ACTION_NAMES.index, move.groups())))
        elif name == POLICY or name in target_outputs():
            targets += map(OutputTarget, outputs_named([name]))
        elif colon or "." in name or name in (STATE, "gru"):
            targets += _unit_targets(policy, name, layer, unit if colon else None)
        else:
            known = (*target_outputs(), POLICY, f"{DIRECTION}_0", f"{STATE}:0",
                     "from_left_to_right")
            raise UserError(f"there is no target '{name}'{nearest(name, known)}")
    return tuple({target.name: target for target in targets}.values())


def _unit_targets(policy: Policy, name: str, layer_name: str, unit: str | None) -> list[UnitTarget]:
    layer = find_layer(policy, layer_name)
    what = "channels" if layer.is_map else "units"
    if unit is None:
        return [UnitTarget(layer, number) for number in range(layer.shape[0])]
    if not re.fullmatch(r"\d+", unit) or int(unit) >= layer.shape[0]:
        raise UserError(f"the target '{name}' does not exist: the {what} of {layer.name} are "
                        f"numbered 0 to {layer.shape[0] - 1}")
    return [UnitTarget(layer, int(unit))]
