"""Effects of steering vectors on forks: at the decision square, and over the whole field.

Vectors are added at one layer, or at all. The passes of a picture share what comes before it.

Letters in shape comments: N forks, n of them at a time, B pictures, D draws (the vectors, then
their controls), A arms, K outcomes, … a layer's shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.hooks import patched
from agents.layers import ALL, layers_named
from agents.networks import Policy, PolicyOutput
from common.devices import Compute
from interventions.controls import OTHERS, controls_of
from interventions.partial_forward import PartialForward
from interventions.patches import Add
from interventions.vectors import SteeringVector
from maze.field.fields import (
    NO_MEMORY,
    START,
    Field,
    difference,
    frame_source,
    grouped,
    vector_field,
)
from maze.field.outcomes import at_decisions, decision_steps, outcomes
from maze.level.state import MazeState
from maze.studies.vectors import (
    FIXED,
    MEAN,
    OTHER,
    Thing,
    differences,
    pictures_of,
    repeated,
    source_level,
)
from stats.effects import Outcome

MAX_AT_A_TIME = 64  # forks
_MAX_ENTRIES = 1 << 21  # of the vectors of those; every control has as many
_TO_OTHER_LEVEL = "distance_to_other_level"
SIZES = ("in_std", "norm", "relative")

DECISIONS = (
    Outcome("p_cheese", "P(cheese) at the decision square", probability=True),
    Outcome("p_corner", "P(corner) at the decision square", probability=True),
    Outcome("p_other", "P(other) at the decision square", probability=True),
    Outcome("log_odds", "log-odds cheese : corner"),
    Outcome("entropy", "entropy of the five directions (nats)"),
    Outcome("value", "value at the decision square"),
    Outcome("direction_changed", "share with another likeliest direction", probability=True),
)
_FIELDS = (
    Outcome("mean_total_variation", "mean total variation from the unpatched field",
            probability=True),
    Outcome("path_cheese", "path probability of the cheese", probability=True),
    Outcome("path_corner", "path probability of the corner", probability=True),
    Outcome("into_walls", "probability of moving into walls", probability=True),
    Outcome("stay", "probability of staying", probability=True),
)
_EXACT = (
    Outcome("exact_cheese", "exact P(cheese reached)", probability=True),
    Outcome("exact_cheese_first", "exact P(cheese before region)", probability=True),
    Outcome("exact_region_first", "exact P(region before cheese)", probability=True),
    Outcome("expected_steps", "expected steps of an episode"),
)


def field_outcomes(thing: Thing | None, exact: bool) -> tuple[Outcome, ...]:
    """The outcomes of fields.

    Args:
        thing: of whose pair the other level's field is compared with, too.
        exact: whether fields of both facings are made, for exact probabilities.
    """
    other = () if thing is None else (Outcome(
        _TO_OTHER_LEVEL, f"mean total variation from {thing.label}", probability=True),)
    return (*_FIELDS, *other, *(_EXACT if exact else ()))


@dataclasses.dataclass(frozen=True)
class Term:
    """Where the vectors come from.

    Attributes:
        thing: that they are about; None for FIXED.
        source: see ``maze.studies.vectors``.
    """

    thing: Thing | None
    source: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms that add the same vectors at the same layer.

    Attributes:
        name: of its folder.
        layer: a name, or ALL.
        terms: vectors that are added together.
        arms: names.
        labels: of the arms.
        coefficients: of the terms, for each arm.
        contrast: name and label of the departure from additivity, for a group of three arms: two
            terms alone, and both.
    """

    name: str
    layer: str
    terms: tuple[Term, ...]
    arms: tuple[str, ...]
    labels: tuple[str, ...]
    coefficients: tuple[tuple[float, ...], ...]
    contrast: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """Outcomes of a group on some forks.

    Attributes:
        before: without patches, float64 (N, K).
        after: of each draw and arm, float64 (D, A, N, K).
        sizes: of the change, SIZES, float64 (D, A, N, 3).
    """

    before: np.ndarray
    after: np.ndarray
    sizes: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """The forks of several parts, one behind the other."""
        return cls(np.concatenate([part.before for part in parts]),
                   *(np.concatenate([getattr(part, name) for part in parts], axis=2)
                     for name in ("after", "sizes")))


class _Passes:
    """Passes of the same pictures (B), each with something added at one layer, or at all."""

    def __init__(self, policy: Policy, compute: Compute, layer: str, frames: np.ndarray,
                 std: Mapping[str, Tensor]):
        self._policy, self._compute, self._frames, self._std = policy, compute, frames, std
        self._half = None
        if layer != ALL:
            self._half = PartialForward(policy, compute, layer).run_to(frames)
            self._layer = self._half.forward.layer.name

    def unpatched(self) -> PolicyOutput:
        return self._half.run_from() if self._half is not None else self._whole()

    def with_added(self, added: Mapping[str, Tensor]) -> tuple[PolicyOutput, np.ndarray]:
        """The output with numbers (B, …) added, by layer, and the sizes of the change (B, 3)."""
        if self._half is None:
            with patched(self._policy, [Add(ALL, vector=added)], self._std) as scope:
                output = self._whole()
            return output, np.tile(scope.total_change(), (len(self._frames), 1))
        activations, change = self._half.activations.float(), added[self._layer]
        std = self._std[self._layer]
        in_std = torch.where(std > 0, change / std, torch.zeros_like(change))
        in_std, norm, whole = (values.flatten(1).norm(dim=1).double()
                               for values in (in_std, change, activations))
        relative = torch.where(whole > 0, norm / whole, torch.zeros_like(norm))
        return (self._half.run_from(activations + change),
                torch.stack([in_std, norm, relative], dim=1).cpu().numpy())

    def _whole(self) -> PolicyOutput:
        return run_policy(self._policy, self._compute, self._frames,
                          self._policy.initial_states(len(self._frames)))


@dataclasses.dataclass(frozen=True)
class Study:
    """Settings with which effects of vectors are measured.

    Attributes:
        policy, compute: the agent; one with a memory is in its initial state.
        pool: levels that vectors of other levels are made of.
        fixed: vectors that all levels share, by the name of their thing (None for FIXED), then by
            layer.
        std: standard deviations of layers' units over a reference set, by layer.
        kinds: of controls, see ``interventions.controls``.
        num_controls: of each kind.
        seed: of controls and sources.
        region: rows of the top right region, for exact probabilities.
        exact: whether fields give exact probabilities.
    """

    policy: Policy
    compute: Compute
    pool: Sequence[MazeState]
    fixed: Mapping[str | None, Mapping[str, SteeringVector]]
    std: Mapping[str, Tensor]
    kinds: Sequence[str]
    num_controls: int
    seed: int
    region: int
    exact: bool

    def at_a_time(self, group: Group) -> int:
        """Forks whose decision squares are measured at a time."""
        entries = sum(math.prod(layer.shape) for layer in layers_named(self.policy, group.layer))
        return max(1, min(MAX_AT_A_TIME, _MAX_ENTRIES // entries))

    @torch.no_grad()
    def at_decision_squares(self, group: Group, states: Sequence[MazeState]) -> Measured:
        """DECISIONS of forks."""
        frames = pictures_of(states, [state.grid.decision_square() for state in states])
        steps = np.array([decision_steps(state.grid) for state in states])  # (n, 2)
        passes = _Passes(self.policy, self.compute, group.layer, frames, self.std)

        def measured(output: PolicyOutput) -> tuple[np.ndarray, np.ndarray]:
            logs = grouped(output.log_probs.cpu().numpy())
            return (at_decisions(logs, output.values.cpu().numpy(), *steps.T),
                    logs.argmax(axis=1))

        before, likeliest = measured(passes.unpatched())
        after, sizes = [], []
        for output, size in self._arms(group, passes, states, np.arange(len(states))):
            found, now_likeliest = measured(output)
            after.append(np.column_stack([found, now_likeliest != likeliest]))
            sizes.append(size)
        return self._measured(group, np.column_stack([before, np.zeros(len(states))]), after,
                              sizes)

    @torch.no_grad()
    def over_field(self, group: Group, state: MazeState,
                   wanted: Sequence[Outcome]) -> Measured:
        """Outcomes of the field of one fork."""
        grid, source = state.grid, frame_source(state)
        squares = np.array(grid.squares(without_cheese=True))
        facings = (0, 1) if self.exact else (0,)
        frames = np.concatenate([source(squares, np.full(len(squares), side)) for side in facings])
        passes = _Passes(self.policy, self.compute, group.layer, frames, self.std)
        memory = START if self.policy.recurrent else NO_MEMORY
        other = None
        if any(outcome.name == _TO_OTHER_LEVEL for outcome in wanted):
            thing = group.terms[0].thing
            other = vector_field(self.policy, self.compute, thing.pair(state)[thing.changed])

        def fields(output: PolicyOutput) -> list[Field]:
            logs, values = output.log_probs.cpu().numpy(), output.values.cpu().numpy()
            return [Field(grid, squares, *side, facing, memory) for facing, *side in zip(
                facings, np.split(logs, len(facings)), np.split(values, len(facings)))]

        unpatched = fields(passes.unpatched())

        def measured(sides: Sequence[Field]) -> list[float]:
            found = outcomes(sides[0], unpatched[0], sides[1] if self.exact else None,
                             min(self.region, grid.world_dim), state.timeout - state.time)
            if other is not None:
                found[_TO_OTHER_LEVEL] = difference(other, sides[0]).mean_total_variation
            return [found[outcome.name] for outcome in wanted]

        after, sizes = [], []
        same = np.zeros(len(frames), np.int64)
        for output, size in self._arms(group, passes, [state], same):
            after.append([measured(fields(output))])
            sizes.append(size.mean(axis=0, keepdims=True))
        return self._measured(group, np.array([measured(unpatched)]), after, sizes)

    def _measured(self, group: Group, before: np.ndarray, after: Sequence,
                  sizes: Sequence) -> Measured:
        after, sizes = (np.array(values, np.float64).reshape(
            -1, len(group.coefficients), *np.shape(values)[1:]) for values in (after, sizes))
        return Measured(before.astype(np.float64), after, sizes)

    def _arms(self, group: Group, passes: _Passes, states: Sequence[MazeState],
              level: np.ndarray) -> Iterator[tuple[PolicyOutput, np.ndarray]]:
        """The output and the sizes of each arm, draw by draw.

        Args:
            level: which of the forks each picture is of (B,).
        """
        for vectors in self._draws(group, states):
            vectors = [{name: torch.tensor(values, device=self.policy.device)
                        for name, values in each.items()} for each in vectors]
            for coefficients in group.coefficients:
                yield passes.with_added({
                    name: sum(c * each[name] for c, each in zip(coefficients, vectors))[level]
                    for name in vectors[0]})

    def _draws(self, group: Group, states: Sequence[MazeState]
               ) -> Iterator[list[Mapping[str, np.ndarray]]]:
        """The vectors of each term (n, …) by layer, then those of each control."""
        own = [self._vectors(term, group.layer, states) for term in group.terms]
        yield own
        for kind in self.kinds:
            columns = []
            for place, (term, vectors) in enumerate(zip(group.terms, own)):
                others = [] if kind != OTHERS else [
                    self._vectors(dataclasses.replace(term, source=OTHER), group.layer, states,
                                  draw) for draw in range(1, self.num_controls + 1)]
                seed = int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0])
                columns.append(controls_of(
                    self.policy, [Add(group.layer, vector=vectors)], self.num_controls, seed,
                    kind=kind, others=others))
            for row in zip(*columns):
                yield [control.patches[0].vector for control in row]

    def _vectors(self, term: Term, layer: str, states: Sequence[MazeState],
                 draw: int = 0) -> dict[str, np.ndarray]:
        """The vector for each fork (n, …), by layer."""
        names = [each.name for each in layers_named(self.policy, layer)]
        if term.source in (MEAN, FIXED):
            fixed = self.fixed[term.thing and term.thing.name]
            return repeated({name: fixed[name] for name in names}, len(states))
        return differences(self.policy, names, term.thing, [
            source_level(term.thing, term.source, state, self.pool, self.seed, draw)
            for state in states])
