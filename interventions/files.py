"""Files of ``analysis/interventions/``: runs with and without an altered hidden state.

Layout::

    settings.json                       what made the runs
    arms/<arm>/starts.npy, lengths.npy, ends.npy, actions.npy, values.npy, rewards.npy, moved.npy,
               norm.npy, relative.npy   the runs of an arm, see ArmRuns
    effects.csv                         a row for each arm and outcome
    effects.md                          the same to read, and what may be claimed
    action_divergence.csv               a row for each arm and step
    effects.png

Arms can be divided among shards; settings and tables follow when the shards are joined.

Letters in shapes: N runs, S steps of all runs, concatenated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.results import Array, Entry, File, NpyFolder, ResultStore, Schema, Table, Text

_ARM = NpyFolder({
    "starts": Array(np.int64, "N"), "lengths": Array(np.int64, "N"),
    "ends": Array(np.float32, "N"), "actions": Array(np.int64, "S"),
    "values": Array(np.float32, "S"), "rewards": Array(np.float32, "S"),
    "moved": Array(np.float64), "norm": Array(np.float64, optional=True),
    "relative": Array(np.float64, optional=True)})
COMPARISON = Schema(
    "arms", "compare_interventions.py", items={"arm": Entry("arms/{}", _ARM)},
    results={
        "effects": Entry("effects.csv", Table({  # the columns that are read again
            "label": str, "outcome": str, "control": bool, "unaltered": float, "altered": float,
            "effect": float, "low_95": float, "high_95": float, "p_holm": float,
            "num_controls": float, "p_control": float, "claimed": bool})),
        "divergence": Entry("action_divergence.csv", Table()),
        "report": Entry("effects.md", Text()), "figure": Entry("effects.png", File())},
    informative=("versions", "agent_file", "model_file", "data_dir"),
    growing="arms", growing_items="arm")


@dataclasses.dataclass(frozen=True)
class ArmRuns:
    """The runs of one arm: with one alteration of the hidden state, or with none.

    Attributes:
        starts: level seeds, or numbers of the simulations' starts, int64 (N,).
        lengths: steps of each run, at least 1, int64 (N,).
        ends: 1 where the game counts the level as solved, else 0; in the simulator, which does
            not know, the largest predicted probability that the episode ends. float32 (N,).
        actions: the agent's, int64 (S,).
        values: its value estimates, float32 (S,).
        rewards: that its actions brought, float32 (S,).
        moved: how far the alteration moved a state in a step, in standard deviations of its
            units: mean Euclidean norm, float64 (). The sum over its patches, where there are
            several.
        norm, relative: the same in the units' own size, and as a share of the norm of the state,
            float64 (); None where they were not measured.

    Raises:
        UserError: if the arrays do not fit each other, or hold NaN or infinity.
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

    def __post_init__(self):
        _ARM.converted(vars(self))
        if len(self.actions) != self.lengths.sum():
            raise UserError(f"actions of an arm has {len(self.actions)} steps, but its lengths "
                            f"come to {self.lengths.sum()}")
        if (self.lengths < 1).any():
            raise UserError("an arm has a run without a step")


def comparison_store(path: Path) -> ResultStore:
    """The folder of a comparison."""
    return ResultStore(path, COMPARISON)


def read_runs(store: ResultStore, arm: str) -> ArmRuns:
    """Read the runs of an arm.

    Raises:
        UserError: naming the folder or file that is missing or damaged.
    """
    arrays = store.read("arm", arm)
    try:
        return ArmRuns(**arrays)
    except UserError as error:
        raise UserError(f"{store.file_of('arm', arm)} is damaged: {error}") from None
