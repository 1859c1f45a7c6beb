"""Effects of steering vectors on forks: at the decision square and over the whole field.

Vectors are added to the output of one layer, or of all layers, with several coefficients
(:class:`ConditionGroup`). Outcomes, such as the probability of the step to the cheese, are measured
without vectors, with them, and with control vectors (:class:`Experiment`); effects of vectors and
controls are then compared (:func:`compare_groups`). For a single layer, all forward passes of a
frame share the computation up to this layer.

A result folder contains::

    decisions/<group>/<number>.npz    outcomes of a batch of forks at their decision squares;
                                      <number> is the index of the batch's first fork
    fields/<group>/<number>.npz       outcomes over the field of fork <number>
    choosing/<group>/<number>.npz     outcomes of the forks on which layer and coefficient are
                                      chosen; see :class:`Measurements` for the arrays
    vectors/<name>.npz                steering vectors
    decisions.csv                     a row per condition and fork
    effects.csv, field_effects.csv    a row per condition and outcome

Symbols in shapes: N forks, n forks per batch, B frames, D sets of vectors (the steering vectors,
then each control), A conditions of a group, K outcomes; dots (…) stand for a layer's shape.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.hooks import patched
from agents.layers import ALL, layers_named
from agents.networks import Policy, PolicyOutput
from common.devices import Compute
from common.results import Array, Entry, File, Npz, Schema, Table, Text
from envs.maze.state import MazeState
from interventions.controls import GAUSSIAN, OTHERS, PERMUTED, controls_of
from interventions.partial_forward import PartialForward
from interventions.patches import Add
from interventions.vectors import SteeringVector
from maze.field.fields import (
    NO_MEMORY,
    START,
    difference,
    fields_by_facing,
    frame_source,
    frames_at,
    grouped,
    vector_field,
)
from maze.field.outcomes import at_decisions, decision_steps, outcomes
from maze.studies.vectors import FIXED, MEAN, OTHER, VectorKind, level_vectors, source_level
from stats.effects import Condition, Outcome, compare_conditions, with_verdicts

CONTROL_KINDS = {PERMUTED: "the vectors' cells permuted within each channel",
                 GAUSSIAN: "Gaussian vectors of the same norm",
                 OTHERS: "vectors of levels with the cheese or corner elsewhere"}
MAX_FORKS = 64  # per batch
_MAX_ENTRIES = 1 << 21  # maximum number of entries of the steering vectors of a batch
_TO_OTHER_LEVEL = "distance_to_other_level"
SIZES = ("in_std", "norm", "relative")  # fields of ``agents.hooks.ChangeSize``

DECISION_OUTCOMES = (
    Outcome("p_cheese", "P(cheese) at the decision square", probability=True),
    Outcome("p_corner", "P(corner) at the decision square", probability=True),
    Outcome("p_other", "P(other) at the decision square", probability=True),
    Outcome("log_odds", "log-odds cheese : corner"),
    Outcome("entropy", "entropy of the five directions (nats)"),
    Outcome("value", "value at the decision square"),
    Outcome("direction_changed", "share with another most likely direction", probability=True),
)
_FIELD_OUTCOMES = (
    Outcome("mean_total_variation", "mean total variation from the unpatched field",
            probability=True),
    Outcome("path_cheese", "path probability of the cheese", probability=True),
    Outcome("path_corner", "path probability of the corner", probability=True),
    Outcome("into_walls", "probability of moving into walls", probability=True),
    Outcome("stay", "probability of staying", probability=True),
)
_EXACT_OUTCOMES = (
    Outcome("exact_cheese", "exact P(cheese reached)", probability=True),
    Outcome("exact_cheese_first", "exact P(cheese before region)", probability=True),
    Outcome("exact_region_first", "exact P(region before cheese)", probability=True),
    Outcome("expected_steps", "expected steps of an episode"),
)

DECISIONS, FIELDS, CHOOSING = "decisions", "fields", "choosing"  # entries of the schema
_EFFECTS = Table(
    {"condition": str, "label": str, "control": bool, "outcome": str,
     **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                      "p_control"), float), "claimed": bool,
     **dict.fromkeys(("median_unaltered", "median_altered"), float), "verdict": str},
    ("median_unaltered", "median_altered"))
STEERING_FILES = Schema(
    "effects of steering vectors", "python -m maze.steering", items={
        **{name: Entry(f"{name}/{{}}/{{}}.npz", Npz({
            "before": Array(np.float64, "N K", finite=False),
            "after": Array(np.float64, "D A N K", finite=False),
            "sizes": Array(np.float64, f"D A N {len(SIZES)}", finite=False)}))
           for name in (DECISIONS, FIELDS, CHOOSING)},
        "vectors": Entry("vectors/{}.npz", File())},
    results={
        "table": Entry("decisions.csv", Table()),
        "effects": Entry("effects.csv", _EFFECTS),
        "field_effects": Entry("field_effects.csv", _EFFECTS, optional=True),
        "figure": Entry("effects.png", File()), "report": Entry("report.md", Text()),
        "field_figure": Entry("field_effects.png", File(), optional=True),
        "curves": Entry("coefficients.png", File(), optional=True)},
    setting_types={"levels": list})


def field_outcomes(kind: VectorKind | None, exact: bool) -> tuple[Outcome, ...]:
    """Return the outcomes that are measured over fields.

    Args:
        kind: kind of vector, or None. A vector is the difference of activations between a level
            and a changed level (without cheese, for example). If the kind is given, the outcomes
            include the distance from the field of the changed level.
        exact: whether to include exact probabilities, which need fields with both facings.
    """
    other = () if kind is None else (Outcome(
        _TO_OTHER_LEVEL, f"mean total variation from {kind.label}", probability=True),)
    return (*_FIELD_OUTCOMES, *other, *(_EXACT_OUTCOMES if exact else ()))


@dataclasses.dataclass(frozen=True)
class VectorSource:
    """Kind of a vector and the levels from which it is computed.

    Attributes:
        kind: kind of the vector; None for FIXED.
        source: a source of levels in :func:`maze.studies.vectors.source_level`, MEAN, or FIXED.
    """

    kind: VectorKind | None
    source: str

    @property
    def fixed_name(self) -> str:
        """Key of vectors that are shared by all levels, in ``Experiment.fixed``."""
        return "given" if self.kind is None else f"{self.kind.name}_mean"


@dataclasses.dataclass(frozen=True)
class ConditionGroup:
    """Conditions that add the same vectors at the same layer, with different coefficients.

    Attributes:
        layer: name of a layer, or ALL.
        sources: sources of the vectors that are added together.
        conditions: conditions; the value of each is a tuple with a coefficient per source.
        contrast: optional condition for the interaction of two vectors; ``conditions`` are then the
            first vector, the second vector, and both.
    """

    name: str
    layer: str
    sources: tuple[VectorSource, ...]
    conditions: tuple[Condition[tuple[float, ...]], ...]
    contrast: Condition | None = None


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Outcomes of forks without steering vectors and under each condition of a group
    (``ConditionGroup``).

    Attributes:
        before: outcomes without vectors, float64 (N, K).
        after: outcomes with each set of vectors, under each condition, float64 (D, A, N, K).
        sizes: sizes of the change of the layer's output, see SIZES, averaged over frames and
            summed over layers, float64 (D, A, N, 3).
    """

    before: np.ndarray
    after: np.ndarray
    sizes: np.ndarray

    @classmethod
    def concatenate(cls, parts: Sequence[Measurements]) -> Measurements:
        """Concatenate measurements along the forks."""
        return cls(np.concatenate([part.before for part in parts]),
                   np.concatenate([part.after for part in parts], axis=2),
                   np.concatenate([part.sizes for part in parts], axis=2))


class _SteeredPass:
    """Forward passes of the same B frames, with vectors added at one layer or at all layers."""

    def __init__(self, policy: Policy, compute: Compute, layer: str, frames: np.ndarray,
                 std: Mapping[str, Tensor]):
        self._policy, self._num_frames, self._std = policy, len(frames), std
        self._run_all = functools.partial(run_policy, policy, compute, frames,
                                          policy.initial_states(len(frames)))
        self._prefix = (None if layer == ALL
                        else PartialForward(policy, compute, layer).run_to(frames))

    def unpatched(self) -> PolicyOutput:
        return self._prefix.run_from() if self._prefix else self._run_all()

    def with_added(self, added: Mapping[str, Tensor]) -> tuple[PolicyOutput, np.ndarray]:
        """Add vectors (B, …) by layer; return the output and the sizes of the change (B, 3)."""
        if self._prefix is None:
            with patched(self._policy, [Add(ALL, vector=added)], self._std) as patches:
                output = self._run_all()
            return output, np.tile(patches.total_change(), (self._num_frames, 1))
        layer = self._prefix.forward.layer.name
        activations, change, std = (self._prefix.activations.float(), added[layer],
                                    self._std[layer])
        in_std = torch.where(std > 0, change / std, torch.zeros_like(change))
        in_std, norm, total = (values.flatten(1).norm(dim=1).double()
                               for values in (in_std, change, activations))
        relative = torch.where(total > 0, norm / total, torch.zeros_like(norm))
        return (self._prefix.run_from(activations + change),
                torch.stack([in_std, norm, relative], dim=1).cpu().numpy())


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Agent, vectors and controls whose effects are measured.

    Attributes:
        policy: agent; recurrent agents are in their initial state.
        pool: levels from which vectors of other levels are computed.
        fixed: vectors shared by all levels, by ``VectorSource.fixed_name`` and layer.
        std: standard deviations of layers' units over a reference set, by layer.
        control_kinds: kinds of controls, a subset of CONTROL_KINDS.
        region: number of rows and columns of the top right region, for exact probabilities.
        exact: whether exact probabilities are measured over fields.
    """

    policy: Policy
    compute: Compute
    pool: Sequence[MazeState]
    fixed: Mapping[str, Mapping[str, SteeringVector]]
    std: Mapping[str, Tensor]
    control_kinds: Sequence[str]
    num_controls: int
    seed: int
    region: int
    exact: bool

    def max_forks(self, group: ConditionGroup) -> int:
        """Return the number of forks per batch, limited by the memory for their vectors."""
        entries = sum(math.prod(layer.shape) for layer in layers_named(self.policy, group.layer))
        return max(1, min(MAX_FORKS, _MAX_ENTRIES // entries))

    @torch.no_grad()
    def at_decision_squares(self, group: ConditionGroup, states: Sequence[MazeState]
                            ) -> Measurements:
        """Measure DECISION_OUTCOMES of several forks under a group and its controls."""
        frames = frames_at(states, [state.grid.decision_square() for state in states])
        steps = np.array([decision_steps(state.grid) for state in states])  # (n, 2)
        passes = _SteeredPass(self.policy, self.compute, group.layer, frames, self.std)
        likeliest = grouped(passes.unpatched().log_probs.cpu().numpy()).argmax(axis=1)

        def measure(output: PolicyOutput) -> np.ndarray:
            logs = grouped(output.log_probs.cpu().numpy())
            return np.column_stack([
                at_decisions(logs, output.values.cpu().numpy(), *steps.T),
                logs.argmax(axis=1) != likeliest])

        return self._measure(group, states, passes, np.arange(len(states)), measure)

    @torch.no_grad()
    def over_field(self, group: ConditionGroup, state: MazeState,
                   chosen: Sequence[Outcome]) -> Measurements:
        """Measure outcomes of the field of one fork under a group and its controls.

        Args:
            chosen: outcomes to measure, a subset of ``field_outcomes``.
        """
        grid, source = state.grid, frame_source(state)
        squares = np.array(grid.squares(without_cheese=True))
        facings = (0, 1) if self.exact else (0,)
        frames = np.concatenate([source(squares, np.full(len(squares), facing))
                                 for facing in facings])
        passes = _SteeredPass(self.policy, self.compute, group.layer, frames, self.std)
        memory, kind = START if self.policy.recurrent else NO_MEMORY, group.sources[0].kind
        other = None
        if kind and any(outcome.name == _TO_OTHER_LEVEL for outcome in chosen):
            other = vector_field(self.policy, self.compute, kind.pair(state)[kind.changed])

        def fields(output: PolicyOutput):
            return fields_by_facing(grid, squares, output.log_probs.cpu().numpy(),
                                    output.values.cpu().numpy(), facings, memory)

        unpatched = fields(passes.unpatched())

        def measure(output: PolicyOutput) -> np.ndarray:
            sides = fields(output)
            values = outcomes(sides[0], unpatched[0], sides[1] if self.exact else None,
                              self.region, state.timeout - state.time)
            if other is not None:
                values[_TO_OTHER_LEVEL] = difference(other, sides[0]).mean_total_variation
            return np.array([[values[outcome.name] for outcome in chosen]])

        return self._measure(group, [state], passes, np.zeros(len(frames), np.int64), measure)

    def _measure(self, group: ConditionGroup, states: Sequence[MazeState], passes: _SteeredPass,
                 fork: np.ndarray, measure: Callable[[PolicyOutput], np.ndarray]) -> Measurements:
        """Measure outcomes without vectors, with the vectors of each condition, and with controls.

        Args:
            states: the n forks.
            fork: index of the fork that each frame shows (B,).
            measure: function from the output to the outcomes (n, K).
        """
        before, after, sizes = measure(passes.unpatched()), [], []
        for vectors in self._draws(group, states):
            on_device = [{name: torch.tensor(values, device=self.policy.device)
                          for name, values in by_layer.items()} for by_layer in vectors]
            for condition in group.conditions:
                added = {name: torch.stack([
                    c * by_layer[name] for c, by_layer in zip(condition.value or (), on_device)
                    ]).sum(dim=0)[fork] for name in vectors[0]}
                output, size = passes.with_added(added)
                after.append(measure(output))
                sizes.append([size[fork == number].mean(axis=0) for number in range(len(states))])
        shape = -1, len(group.conditions), len(states)
        return Measurements(before.astype(np.float64),
                            np.array(after, np.float64).reshape(*shape, before.shape[1]),
                            np.array(sizes, np.float64).reshape(*shape, len(SIZES)))

    def _draws(self, group: ConditionGroup, states: Sequence[MazeState]
               ) -> Iterator[list[Mapping[str, np.ndarray]]]:
        """Yield sets of vectors: the steering vectors, then each control. A set is a list with one
        dict per source of the group, which holds the vectors (n, …) by layer."""
        own = [self._vectors(source, group.layer, states) for source in group.sources]
        yield [*own]
        for kind in self.control_kinds:
            columns = []
            for place, (source, vectors) in enumerate(zip(group.sources, own)):
                elsewhere = dataclasses.replace(source, source=OTHER)
                others = [] if kind != OTHERS else [
                    self._vectors(elsewhere, group.layer, states, draw)
                    for draw in range(1, self.num_controls + 1)]
                seed = int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0])
                columns.append(controls_of(
                    self.policy, [Add(group.layer, vector=vectors)], self.num_controls, seed,
                    kind=kind, others=others))
            for row in zip(*columns):
                yield [control.patches[0].vector for control in row]

    def _vectors(self, source: VectorSource, layer: str, states: Sequence[MazeState],
                 draw: int = 0) -> dict[str, np.ndarray]:
        """Return the vectors of a source, one per fork (n, …), by layer."""
        names = [named.name for named in layers_named(self.policy, layer)]
        if source.kind is None or source.source in (MEAN, FIXED):
            fixed = self.fixed[source.fixed_name]
            return {name: np.repeat(fixed[name].vector[None], len(states), axis=0)
                    for name in names}
        levels = [source_level(source.kind, source.source, state, self.pool, self.seed, draw)
                  for state in states]
        return level_vectors(self.policy, names, source.kind,
                             [level for level in levels if level is not None])


# ---------------------------------------------------------------------------------------- effects


def compare_groups(groups: Sequence[ConditionGroup], measured: Sequence[Measurements],
                   kinds: Sequence[str], num_controls: int, chosen: Sequence[Outcome], seed: int
                   ) -> pd.DataFrame:
    """Compute the effect of each condition, and of its controls, on each outcome.

    A condition is compared with each kind of controls separately. Its effect is claimed if every
    comparison claims it, and its ``p_control`` is the largest p-value of these comparisons.

    Args:
        measured: measurements of each of ``groups``: first with the steering vectors, then with
            ``num_controls`` controls of each kind, in the order of ``kinds``.
        chosen: outcomes to compare.

    Returns:
        The table of ``stats.effects.compare_conditions`` with additional columns: ``controls``, the
        kind of a control; ``norm`` and ``relative``, mean sizes of the change; and ``p_<kind>``,
        the ``p_control`` of a condition in the comparison with one kind of controls.

    Raises:
        UserError: if there are fewer than 10 forks, fewer than 2 controls of a kind, or an outcome
            is NaN or infinite.
    """
    before, pairs = measured[0].before, list(zip(groups, measured))
    directions = [result for pair in pairs for result in _results(*pair)]
    controls = {kind: [result for pair in pairs for number in range(num_controls)
                       for result in _results(*pair, 1 + place * num_controls + number,
                                              f"{kind}_{number:02d}")]
                for place, kind in enumerate(kinds)}
    own, others = [], []
    for kind, drawn in controls.items():
        conditions, values, sizes = zip(*directions, *drawn)
        table = compare_conditions(
            conditions, chosen, before, np.stack(values), seed, moved={
                condition.name: float(size[0]) for condition, size in zip(conditions, sizes)},
            verdicts=False)
        own.append(table[~table["control"]].reset_index(drop=True))
        others.append(table[table["control"]].assign(controls=kind))
    worst = pd.concat(own).groupby(level=0).agg({
        "control_low": "min", "control_high": "max", "num_controls": "min", "p_control": "max",
        "claimed": "min"})
    by_kind = {f"p_{kind}": table["p_control"] for kind, table in zip(kinds, own)}
    table = pd.concat([own[0].assign(**by_kind).assign(**worst), *others], ignore_index=True)
    conditions, values, sizes = zip(*directions, *itertools.chain(*controls.values()))
    table = with_verdicts(table, chosen, before, np.stack(values), seed)
    for place, name in enumerate(SIZES[1:], start=1):
        table[name] = table["condition"].map({condition.name: size[place]
                                              for condition, size in zip(conditions, sizes)})
    return table


def _results(group: ConditionGroup, measured: Measurements, draw: int = 0, control: str = ""
             ) -> list[tuple[Condition, np.ndarray, np.ndarray]]:
    """Return the conditions of one set of vectors, then the contrast if there is one, with their
    results.

    Args:
        draw: index of the set of vectors; 0 for the steering vectors.
        control: name of the control; empty for the steering vectors.

    Returns:
        Conditions with their outcomes (N, K) and the mean sizes of their change (3,), see SIZES.
    """
    conditions: list[Condition] = [*group.conditions]
    after = [*measured.after[draw]]
    sizes = [*measured.sizes[draw].mean(axis=1)]
    if group.contrast is not None:
        one, other, both = after
        # Unpatched outcomes plus the interaction: joint effect minus the sum of the single effects.
        after.append(measured.before + both - one - other + measured.before)
        conditions.append(group.contrast)
        sizes.append(sizes[-1])
    return [(Condition(f"{condition.name}_{control}" if control else condition.name,
                       f"{condition.label}, {control}" if control else condition.label,
                       condition.name, bool(control)), values, size)
            for condition, values, size in zip(conditions, after, sizes)]


def strongest(groups: Sequence[ConditionGroup], measured: Sequence[Measurements]
              ) -> list[ConditionGroup]:
    """Return, for each combination of sources, a group with one condition: the one with the largest
    absolute mean change of the log-odds.
    """
    place = [outcome.name for outcome in DECISION_OUTCOMES].index("log_odds")
    best: dict[tuple[VectorSource, ...], tuple[float, ConditionGroup]] = {}
    for group, result in zip(groups, measured):
        changes = np.abs((result.after[0] - result.before)[..., place].mean(axis=1))
        for change, condition in zip(changes, group.conditions):
            if group.sources not in best or change > best[group.sources][0]:
                best[group.sources] = change, dataclasses.replace(
                    group, conditions=(condition,), contrast=None)
    return [group for _, group in best.values()]


def decisions_table(groups: Sequence[ConditionGroup], measured: Sequence[Measurements],
                    seeds: Sequence[int]) -> pd.DataFrame:
    """Return the table ``decisions.csv``, with a row per condition and fork.

    The columns are ``condition``, the name of the condition; ``seed``, the level seed of the fork;
    and DECISION_OUTCOMES. Rows of the unpatched agent come first.

    Args:
        measured: measurements of each group at decision squares.
    """
    names = [outcome.name for outcome in DECISION_OUTCOMES]
    parts = [("unpatched", measured[0].before)]
    for group, result in zip(groups, measured):
        parts += zip((condition.name for condition in group.conditions), result.after[0])
    return pd.concat([pd.DataFrame(values, columns=names).assign(condition=name, seed=seeds)[
        ["condition", "seed", *names]] for name, values in parts], ignore_index=True)
