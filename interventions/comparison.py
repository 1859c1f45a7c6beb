"""Comparison of an agent's runs with and without interventions: stored runs, outcomes, results.

Layout of ``analysis/interventions/``::

    settings.json                       settings of the runs
    conditions/<condition>/starts.npy, lengths.npy, ends.npy, actions.npy, values.npy, rewards.npy,
               moved.npy, norm.npy, relative.npy
                                        runs under one condition, see ConditionRuns
    effects.csv                         one row per condition and outcome
    effects.md                          report: the effects, and what may be claimed
    action_divergence.csv               one row per condition and step
    effects.png                         forest plot of the effects

Letters in shape comments: A conditions, N starts, S total number of steps (runs concatenated),
T steps of the longest run, K outcomes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.episodes import Episode
from agents.hooks import ActivePatches
from agents.patch import Array as Units
from agents.testbed import BASELINE, Condition, Testbed
from common.errors import UserError
from common.files import versions
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES
from common.results import Array, Entry, File, NpyFolder, ResultStore, Schema, Table, Text
from common.shards import WHOLE, Shard
from interventions.patch_text import warn_of_unused
from stats.effects import (
    DIVERGENCE,
    Outcome,
    claims_summary,
    compare_conditions,
)
from stats.report import DIRECTIONS, Wording
from stats.study import measure_conditions, write_effects


class _ConditionFolder(NpyFolder):
    """Folder format of ``ConditionRuns``: the number of steps must equal the sum of the runs'
    lengths."""

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().check(arrays)
        lengths, num_steps = arrays["lengths"], len(arrays["actions"])
        if (lengths < 1).any() or lengths.sum() != num_steps:
            raise UserError(f"the arrays of a condition have {num_steps} steps, but the lengths of "
                            f"its runs, which must be positive, sum to {lengths.sum()}")


_CONDITION = _ConditionFolder({
    "starts": Array(np.int64, "N"), "lengths": Array(np.int64, "N"),
    "ends": Array(np.float32, "N"), "actions": Array(np.int64, "S"),
    "values": Array(np.float32, "S"), "rewards": Array(np.float32, "S"),
    "moved": Array(np.float64), "norm": Array(np.float64, optional=True),
    "relative": Array(np.float64, optional=True)})
COMPARISON = Schema(
    "conditions", "compare_interventions.py",
    items={"condition": Entry("conditions/{}", _CONDITION)},
    results={
        "effects": Entry("effects.csv", Table({  # columns that are read back
            "label": str, "outcome": str, "control": bool, "unaltered": float, "altered": float,
            "effect": float, "low_95": float, "high_95": float, "p_holm": float,
            "num_controls": float, "p_control": float, "claimed": bool})),
        "divergence": Entry("action_divergence.csv", Table()),
        "report": Entry("effects.md", Text()), "figure": Entry("effects.png", File())},
    informative=("versions", "agent_file", "model_file", "data_dir"),
    growing="conditions", growing_items=("condition",))

_JUMPS = [action for action, (_, up) in enumerate(ACTION_DIRECTIONS) if up > 0]
OUTCOMES = (
    Outcome("success", "success rate", simulated=False, probability=True),
    Outcome("end", "largest predicted probability of the end", real=False, probability=True),
    Outcome("return", "return (sum of rewards)"),
    Outcome("length", "episode length (steps)", simulated=False),
    Outcome("value", "mean value estimate (return)"),
    Outcome("first_jump", "step of the first jump"),
    Outcome(DIVERGENCE, "share of steps with another action", probability=True),
    *(Outcome(f"share_{name}", f"share of action '{name}'", probability=True)
      for name in ACTION_NAMES),
    Outcome("share_other", "share of the other six actions", probability=True),
)


@dataclasses.dataclass(frozen=True)
class ConditionRuns:
    """Runs of the agent under one condition.

    Attributes:
        starts: level seeds, or indices of simulated starts, int64 (N,).
        lengths: number of steps of each run, at least 1, int64 (N,).
        ends: 1 if the game counts the level as solved, else 0, float32 (N,). In the simulator,
            where this is unknown: largest predicted probability that the episode ends.
        actions: actions of the agent, int64 (S,).
        values: value estimates of the agent, float32 (S,).
        rewards: rewards of the actions, float32 (S,).
        moved: Euclidean norm of a patch's change of a layer's output, in standard deviations of the
            units, averaged over the changed frames and summed over patches and layers, float64 ().
        norm: the same norm in the scale of the activations, float64 (); None if it was not
            measured.
        relative: the same norm as a fraction of the norm of the unpatched output, float64 (); None
            if it was not measured.
    """

    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    actions: np.ndarray
    values: np.ndarray
    rewards: np.ndarray
    moved: np.ndarray
    norm: np.ndarray | None = None
    relative: np.ndarray | None = None

    def padded_actions(self, num_steps: int) -> np.ndarray:
        """Return actions (N, ``num_steps``), padded with -1 after the end of a run.

        Args:
            num_steps: number of columns, at least the length of the longest run.
        """
        padded = np.full((len(self.starts), num_steps), -1)
        padded[np.arange(num_steps) < self.lengths[:, None]] = self.actions
        return padded


@dataclasses.dataclass(frozen=True)
class ConditionSet:
    """Conditions of one kind: interventions, then controls.

    Attributes:
        conditions: conditions, each with its patches.
        std: standard deviations of the units of each patched layer, by layer name.
        settings: settings that all conditions share, saved in the folder.
        controls: description of the controls, for the report.
        with_controls: function that maps the size of the change by each condition (``moved``), by
            name, to the conditions and their controls; None if ``conditions`` includes the
            controls.
    """

    conditions: list[Condition]
    std: Mapping[str, Units]
    settings: Mapping[str, Any]
    controls: str
    with_controls: Callable[[Mapping[str, float]], list[Condition]] | None = None


def comparison_store(path: Path) -> ResultStore:
    """Return the result store of a comparison folder."""
    return ResultStore(path, COMPARISON)


def read_runs(store: ResultStore, name: str) -> ConditionRuns:
    """Read the runs of a condition.

    Raises:
        UserError: if the folder or a file is missing or damaged; the message names it.
    """
    return ConditionRuns(**store.read("condition", name))


def play_runs(testbed: Testbed, condition: Condition, std: Mapping[str, Units]) -> ConditionRuns:
    """Play all starts of a testbed under a condition, and log patches that never acted.

    Args:
        std: standard deviations of the units of the layers in which ``ConditionRuns.moved`` is
        measured.
    """
    [played] = testbed.play([condition], std)
    warn_of_unused(played.patches)
    return collect_runs(played.episodes, played.patches, testbed.env is None)


def collect_runs(episodes: Sequence[Episode], active: ActivePatches,
                 simulated: bool = False) -> ConditionRuns:
    """Concatenate episodes to ``ConditionRuns``.

    Args:
        episodes: episodes by number.
        active: patches that were applied, with the sizes of their changes.
        simulated: whether the episodes are simulations. Each of their rows then is a step.
    """
    # In the game, the agent does not act in the last row; a step's reward is in the row after it.
    acts, rewarded = (slice(None), slice(None)) if simulated else (slice(-1), slice(1, None))
    return ConditionRuns(
        np.array([episode.number if simulated else episode.level_seed for episode in episodes],
                 dtype=np.int64),
        np.array([len(episode.actions[acts]) for episode in episodes]),
        np.array([episode.level_complete for episode in episodes], dtype=np.float32),
        *(np.concatenate(parts) for parts in zip(*(
            (episode.actions[acts], episode.values[acts], episode.rewards[rewarded])
            for episode in episodes))),
        *map(np.array, active.total_change()))


def chosen_outcomes(simulated: bool) -> tuple[Outcome, ...]:
    """Return the outcomes that can be measured in the simulator if ``simulated`` is true, otherwise
    those that can be measured in the real environment."""
    return tuple(outcome for outcome in OUTCOMES
                 if (outcome.simulated if simulated else outcome.real))


def outcomes_named(*names: str) -> tuple[Outcome, ...]:
    """Return the outcomes with the given names, in the order of OUTCOMES."""
    return tuple(outcome for outcome in OUTCOMES if outcome.name in names)


def outcomes_of(runs: ConditionRuns, unaltered: ConditionRuns, simulated: bool) -> np.ndarray:
    """Compute the outcomes of each run, in the order of ``chosen_outcomes``.

    The step of the first jump is counted from 0; if the agent never jumps, it is the run's length.
    The outcome DIVERGENCE compares each run with the unaltered run from the same start, see
    ``divergence``.

    Args:
        runs: runs under one condition.
        unaltered: runs without any intervention, from the same starts.
        simulated: whether the runs are simulations.

    Returns:
        Outcomes, float64 (N, K).
    """
    num_runs = len(runs.starts)
    run = np.repeat(np.arange(num_runs), runs.lengths)  # (S,)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(run, values, num_runs) / runs.lengths

    jumped = np.isin(runs.padded_actions(runs.lengths.max()), _JUMPS)
    first_jump = np.where(jumped.any(axis=1), jumped.argmax(axis=1), runs.lengths)
    differs, counted = divergence(runs, unaltered)
    by_name = {"success": runs.ends, "end": runs.ends,
               "return": np.bincount(run, runs.rewards, num_runs), "length": runs.lengths,
               "value": mean(runs.values), "first_jump": first_jump,
               DIVERGENCE: differs.sum(axis=1) / counted.sum(axis=1),
               "share_other": mean(runs.actions >= len(ACTION_NAMES)),
               **{f"share_{name}": mean(runs.actions == action)
                  for action, name in enumerate(ACTION_NAMES)}}
    return np.stack([by_name[outcome.name] for outcome in chosen_outcomes(simulated)],
                    axis=1).astype(np.float64)


def divergence(runs: ConditionRuns, unaltered: ConditionRuns) -> tuple[np.ndarray, np.ndarray]:
    """Mark the steps at which runs differ in their actions from the unaltered runs.

    A pair consists of the two runs from the same start. A step counts until both have ended. The
    pair differs at a step if the actions differ, or if only one of the runs has ended. Both runs
    sample their actions with the same random numbers, so two unaltered runs never differ.

    Returns:
        Two bool arrays (N, T): whether each pair differs at each step, and whether the step counts.
    """
    num_steps = max(runs.lengths.max(), unaltered.lengths.max())
    a, b = runs.padded_actions(num_steps), unaltered.padded_actions(num_steps)
    return a != b, (a >= 0) | (b >= 0)


def divergence_over_time(conditions: Sequence[Condition], runs: Mapping[str, ConditionRuns],
                         unaltered: ConditionRuns) -> pd.DataFrame:
    """Compute the share of pairs that differ at each step, see ``divergence``.

    Returns:
        One row per condition and step: ``condition``, ``label``, ``control``, ``step``, ``pairs``
        (number of pairs for which the step counts), ``unaltered_going`` (number of unaltered runs
        that have not ended) and ``share`` (share of the ``pairs`` that differ).
    """
    tables = []
    for condition in conditions:
        differs, counted = divergence(runs[condition.name], unaltered)
        pairs = counted.sum(axis=0)
        tables.append(pd.DataFrame({
            "condition": condition.name, "label": condition.label, "control": condition.control,
            "step": np.arange(len(pairs)), "pairs": pairs,
            "unaltered_going": (unaltered.lengths[:, None] > np.arange(len(pairs))).sum(axis=0),
            "share": differs.sum(axis=0) / pairs}))
    return pd.concat(tables, ignore_index=True)


def compare(conditions: Sequence[Condition], runs: Mapping[str, ConditionRuns],
            unaltered: ConditionRuns, simulated: bool, seed: int, verdicts: bool = False
            ) -> pd.DataFrame:
    """Compute the effect of each condition on each outcome.

    Args:
        conditions: interventions and controls.
        runs: runs by name of the condition.
        unaltered: runs without any intervention, from the same starts.
        simulated: whether the runs are simulations.
        seed: seed of the bootstrap and the sign flips.
        verdicts: see ``stats.effects.compare_conditions``.

    Returns:
        The table of ``stats.effects.compare_conditions``.

    Raises:
        UserError: if there are fewer than MIN_STARTS starts, or a kind of intervention
            (``Condition.pattern``) has fewer than two controls.
    """
    return compare_conditions(
        conditions, chosen_outcomes(simulated), outcomes_of(unaltered, unaltered, simulated),
        np.stack([outcomes_of(runs[condition.name], unaltered, simulated)
                  for condition in conditions]),
        seed, moved={condition.name: float(runs[condition.name].moved)
                     for condition in conditions}, verdicts=verdicts)


def run_comparison(store: ResultStore, testbed: Testbed, sets: Sequence[ConditionSet],
                   settings: Mapping[str, Any], description: str, wording: Wording,
                   overwrite: bool, shard: Shard) -> None:
    """Play the conditions whose runs are missing; if there are no shards, also write the results.

    Conditions whose controls depend on the size of their change are played first, by every shard
    that finds them missing.

    Args:
        store: result store of the folder.
        testbed: real levels or simulated starts.
        sets: conditions to compare.
        settings: settings of the folder in addition to those of the conditions; must include
            ``seed``.
        description: description of the runs, for report and figure.
        wording: terms for interventions and controls in the report.
        overwrite: delete the previous contents of the folder.
        shard: part of the conditions that this process plays.
    """
    std = {layer: values for group in reversed(sets) for layer, values in group.std.items()}

    def play(condition: Condition) -> dict[str, Any]:
        return vars(play_runs(testbed, condition, std))

    first = conditions_of(group for group in sets if group.with_controls)
    if overwrite or not all(store.has("condition", condition.name) for condition in first):
        _open_store(store, testbed, sets, settings, description, wording, overwrite, shard)
        overwrite = False
        for condition in first:
            if not store.has("condition", condition.name):
                store.write("condition", condition.name, value=play(condition))
    sets = [group if group.with_controls is None else dataclasses.replace(
        group, conditions=group.with_controls({
            condition.name: float(read_runs(store, condition.name).moved)
            for condition in group.conditions})) for group in sets]
    notes = _open_store(store, testbed, sets, settings, description, wording, overwrite, shard)
    measure_conditions(store, "condition", [BASELINE, *conditions_of(sets)], play, shard)
    if shard == WHOLE:
        write_joined_results(store, notes)


def conditions_of(sets: Iterable[ConditionSet]) -> list[Condition]:
    """Return the conditions of all sets."""
    return [condition for group in sets for condition in group.conditions]


def _open_store(store: ResultStore, testbed: Testbed, sets: Sequence[ConditionSet],
                settings: Mapping[str, Any], description: str, wording: Wording,
                overwrite: bool, shard: Shard) -> dict:
    """Open the store for conditions, and return the notes for ``write_joined_results``; see
    ``run_comparison``."""
    conditions = conditions_of(sets)
    names = [condition.name for condition in conditions]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"the alteration {repeated[0]} is given twice")
    notes = {"conditions": [{name: getattr(condition, name)
                             for name in ("name", "label", "pattern", "control")}
                            for condition in conditions],
             "simulated": testbed.env is None, "seed": settings["seed"],
             "what": "; ".join([description, *(group.controls for group in sets)]),
             "wording": dataclasses.asdict(wording)}
    store.open({**settings,
                **{name: value for group in reversed(sets)
                   for name, value in group.settings.items()}, "versions": versions(),
                "conditions": {condition.name: condition.settings
                               for condition in conditions_of(reversed(sets))}},
               overwrite, shard, notes)
    return notes


def write_joined_results(store: ResultStore, notes: Mapping[str, Any]) -> None:
    """Compare the runs in a folder, write tables, report and figure to it, and print the claims.

    With the wording DIRECTIONS, the table has no medians, no verdicts and no columns ``norm`` and
    ``relative``, to keep the format of the published tables.

    Args:
        store: result store of the folder.
        notes: notes stored by ``run_comparison`` in every shard: conditions, whether runs are
            simulated, seed, description and wording.
    """
    conditions = [Condition(**condition) for condition in notes["conditions"]]
    wording, simulated = Wording(**notes["wording"]), notes["simulated"]
    unaltered = read_runs(store, BASELINE.name)
    runs = {condition.name: read_runs(store, condition.name) for condition in conditions}
    table = compare(conditions, runs, unaltered, simulated, notes["seed"], wording != DIRECTIONS)
    over_time = divergence_over_time(conditions, runs, unaltered)
    if wording != DIRECTIONS:
        for size in ("norm", "relative"):
            if all(getattr(played, size) is not None for played in runs.values()):
                table[size] = [float(getattr(runs[name], size)) for name in table["condition"]]
    store.write("divergence", value=over_time)
    write_effects(store, table, chosen_outcomes(simulated), wording, notes["what"], over_time)
    for row in table[table["claimed"] & ~table["control"]].itertuples():
        print(f"{row.label}: {row.outcome} {row.unaltered:.3g} to {row.altered:.3g} (change "
              f"{row.effect:+.3g}, 95 % interval {row.low_95:.3g} to {row.high_95:.3g})")
    print(f"{claims_summary(table)}; wrote {store.file_of('report')} and the tables next to it")
