"""Outcomes of an agent's runs, with and without an alteration, and their comparison.

Letters in shape comments: N starts, S steps of all runs, T steps of the longest run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES
from interventions.files import ArmRuns
from stats.effects import DIVERGENCE, Arm, Outcome, check_starts, compare_outcomes

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


def chosen_outcomes(simulated: bool) -> tuple[Outcome, ...]:
    """The outcomes that can be told."""
    return tuple(outcome for outcome in OUTCOMES
                 if (outcome.simulated if simulated else outcome.real))


def outcomes_of(runs: ArmRuns, unaltered: ArmRuns, simulated: bool) -> np.ndarray:
    """The outcomes of each run, in the order of ``chosen_outcomes``, float64 (N, outcomes).

    The step of the first jump is counted from 0, and is the run's length where it never jumps.
    ``divergence`` compares with the unaltered run from the same start, see ``divergence``.
    """
    num_runs = len(runs.starts)
    run = np.repeat(np.arange(num_runs), runs.lengths)  # (S,)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(run, values, num_runs) / runs.lengths

    first_jump = runs.lengths.copy()
    jumped = np.isin(runs.actions, _JUMPS)
    np.minimum.at(first_jump, run[jumped], _steps_of(runs)[jumped])
    differs, counted = divergence(runs, unaltered)
    found = {"success": runs.ends, "end": runs.ends,
             "return": np.bincount(run, runs.rewards, num_runs), "length": runs.lengths,
             "value": mean(runs.values), "first_jump": first_jump,
             DIVERGENCE: differs.sum(axis=1) / counted.sum(axis=1),
             "share_other": mean(runs.actions >= len(ACTION_NAMES)),
             **{f"share_{name}": mean(runs.actions == action)
                for action, name in enumerate(ACTION_NAMES)}}
    return np.stack([found[outcome.name] for outcome in chosen_outcomes(simulated)],
                    axis=1).astype(np.float64)


def divergence(runs: ArmRuns, unaltered: ArmRuns) -> tuple[np.ndarray, np.ndarray]:
    """Where two arms act differently.

    A step counts while at least one run of the pair is going, and the pair differs at it if the
    actions do, or if only one of the two is still going. Runs from the same start draw their
    actions with the same random numbers, so a pair without alteration never differs.

    Returns:
        Whether a pair differs and whether the step counts, bool (N, T) each.
    """
    num_steps = max(runs.lengths.max(), unaltered.lengths.max())
    a, b = (_padded_actions(each, num_steps) for each in (runs, unaltered))
    return a != b, (a >= 0) | (b >= 0)


def _steps_of(runs: ArmRuns) -> np.ndarray:
    """Number of each step in its run (S,)."""
    begins = np.cumsum(runs.lengths) - runs.lengths
    return np.arange(runs.lengths.sum()) - np.repeat(begins, runs.lengths)


def _padded_actions(runs: ArmRuns, num_steps: int) -> np.ndarray:
    """(N, T), -1 behind the end of a run."""
    padded = np.full((len(runs.starts), num_steps), -1)
    padded[np.repeat(np.arange(len(runs.starts)), runs.lengths), _steps_of(runs)] = runs.actions
    return padded


def compare(arms: Sequence[Arm], runs: Mapping[str, ArmRuns], unaltered: ArmRuns, simulated: bool,
            seed: int) -> pd.DataFrame:
    """The effect of each arm on each outcome.

    Args:
        arms: directions and controls.
        runs: of each arm, by its name.
        simulated: whether these are simulations.
        seed: of the bootstrap and the sign flips.

    Returns:
        The table that ``stats.effects.compare_outcomes`` describes.

    Raises:
        UserError: if arms have other starts than the unaltered one, there are fewer than
            MIN_STARTS, or a pattern has fewer than two controls.
    """
    check_starts(len(unaltered.starts))
    for arm in arms:
        if not np.array_equal(runs[arm.name].starts, unaltered.starts):
            raise UserError(f"the runs of {arm.name} do not have the starts of the unaltered ones "
                            f"({len(runs[arm.name].starts)} and {len(unaltered.starts)} runs)")
    before, after = outcomes_of_arms(arms, runs, unaltered, simulated)
    return compare_outcomes(arms, {arm.name: float(runs[arm.name].moved) for arm in arms},
                            chosen_outcomes(simulated), before, after, seed)


def outcomes_of_arms(arms: Sequence[Arm], runs: Mapping[str, ArmRuns], unaltered: ArmRuns,
                     simulated: bool) -> tuple[np.ndarray, np.ndarray]:
    """The outcomes of the unaltered runs (N, K) and of those of each arm (arms, N, K)."""
    return outcomes_of(unaltered, unaltered, simulated), np.stack(
        [outcomes_of(runs[arm.name], unaltered, simulated) for arm in arms])


def divergence_over_time(arms: Sequence[Arm], runs: Mapping[str, ArmRuns],
                         unaltered: ArmRuns) -> pd.DataFrame:
    """The share of pairs that differ at each step, see ``divergence``.

    Returns:
        The columns ``arm``, ``label``, ``control``, ``step``, ``pairs`` of which at least one
        run is going, ``unaltered_going``, and the ``share`` of the pairs that differ.
    """
    tables = []
    for arm in arms:
        differs, counted = divergence(runs[arm.name], unaltered)
        pairs = counted.sum(axis=0)
        tables.append(pd.DataFrame({
            "arm": arm.name, "label": arm.label, "control": arm.control,
            "step": np.arange(len(pairs)), "pairs": pairs,
            "unaltered_going": (unaltered.lengths[:, None] > np.arange(len(pairs))).sum(axis=0),
            "share": differs.sum(axis=0) / pairs}))
    return pd.concat(tables, ignore_index=True)
