"""Runs with and without an altered hidden state: writer and reader of ``analysis/interventions/``.

Layout::

    settings.json                       what made the runs
    arms/<arm>/starts.npy, lengths.npy, ends.npy, actions.npy, values.npy, rewards.npy, moved.npy,
               norm.npy, relative.npy   the runs of an arm, see ArmRuns
    effects.csv                         a row for each arm and outcome
    effects.md                          the same to read, and what may be claimed
    action_divergence.csv               a row for each arm and step
    effects.png

An arm gets its folder at once, so what lies under its final name is complete. Arms can be divided
among shards, see ``common.shards``; settings and tables follow when they are joined.

Letters in shape comments: N runs, S steps of all runs, one run behind the other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from common.description import read_description
from common.errors import UserError
from common.files import atomic_folder, read_array, save_json
from common.shards import WHOLE, Shard, ShardNotes, SharedFolder
from common.tables import read_table, write_table

# Type and dimensions of each field of ArmRuns.
_ARRAYS = {"starts": (np.int64, 1), "lengths": (np.int64, 1), "ends": (np.float32, 1),
           "actions": (np.int64, 1), "values": (np.float32, 1), "rewards": (np.float32, 1),
           "moved": (np.float64, 0), "norm": (np.float64, 0), "relative": (np.float64, 0)}
_LATER = ("norm", "relative")  # fields that folders we wrote at first do not have
_OF_STEPS = ("actions", "values", "rewards")
# Columns of effects.csv that are read again.
_EFFECTS = {"label": str, "outcome": str, "control": bool, "unaltered": float, "altered": float,
            "effect": float, "low_95": float, "high_95": float, "p_holm": float,
            "num_controls": float, "p_control": float, "claimed": bool}


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
        for name in ("lengths", "ends"):
            if len(getattr(self, name)) != len(self.starts):
                raise UserError(f"{name} of an arm has {len(getattr(self, name))} runs, but "
                                f"starts has {len(self.starts)}")
        for name in _OF_STEPS:
            if len(getattr(self, name)) != self.lengths.sum():
                raise UserError(f"{name} of an arm has {len(getattr(self, name))} steps, but its "
                                f"lengths come to {self.lengths.sum()}")
        if (self.lengths < 1).any():
            raise UserError("an arm has a run without a step")
        for name in _ARRAYS:
            if getattr(self, name) is not None and not np.isfinite(getattr(self, name)).all():
                raise UserError(f"{name} of an arm holds NaN or infinity")


class InterventionsFolder:
    """Names, writer and reader of one comparison.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.effects_file = self.path / "effects.csv"
        self.report_file = self.path / "effects.md"
        self.divergence_file = self.path / "action_divergence.csv"
        self.figure_file = self.path / "effects.png"
        self._settings_file = self.path / "settings.json"
        self._results = (self.effects_file, self.report_file, self.divergence_file,
                         self.figure_file)
        self._shared: SharedFolder | None = None

    def open(self, description: dict, overwrite: bool, shard: Shard = WHOLE,
             divided: dict | None = None) -> None:
        """Make the folder, or go on with the arms it holds; old results are removed.

        Args:
            description: what makes the runs of an arm, whichever arms there are, and under "arms"
                what makes each of them.
            overwrite: throw away what the folder holds.
            shard: which one this process runs.
            divided: of all shards, what ``join`` is to give back.

        Raises:
            UserError: see ``SharedFolder``; or if the folder holds an arm of the same name that
                was made otherwise.
        """
        known = {} if overwrite else read_description(self._settings_file).get("arms", {})
        known = {name: made for name, made in known.items() if self.has(name)}
        for name, made in description["arms"].items():
            if known.get(name, made) != json.loads(json.dumps(made)):
                raise UserError(f"{self.path} holds the arm {name}, but made otherwise (other "
                                "files or controls); choose another --output_dir, or give "
                                "--overwrite to throw it away")
        are_all = known.keys() == description["arms"].keys()
        description = {**description, "arms": {**known, **description["arms"]}}
        self._shared = SharedFolder(
            self._settings_file, description,
            ("settings.json", "arms/*/*.npy", *(path.name for path in self._results)), "arms",
            "--output_dir", overwrite,
            ("versions", "agent_file", "model_file", "data_dir", "arms"), shard, divided,
            is_done=lambda: are_all and self._are_joined())
        if self._shared.is_open:
            for path in self._results:
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that all arms of this process are there."""
        self._shared.finish()

    def join(self, make: Callable[[dict], None]) -> None:
        """Make one comparison of the arms that shards have run; nothing if it is one.

        Args:
            make: writes the results, given what all shards were opened with as ``divided``.

        Raises:
            UserError: naming a shard that is missing.
        """
        def write(settings: dict, through: Path) -> None:
            make(settings.pop("divided"))
            save_json(self._settings_file, settings, through=through)

        ShardNotes(self.path).join(write, self._are_joined)

    def _are_joined(self) -> bool:
        return all(path.exists() for path in (self._settings_file, *self._results))

    def has(self, arm: str) -> bool:
        """Whether an arm is complete on disk."""
        return self._arm_folder(arm).exists()

    def add(self, arm: str, runs: ArmRuns) -> None:
        """Store the runs of an arm in the folder, which is open.

        Raises:
            UserError: if the folder was deleted.
        """
        self._shared.check()
        with atomic_folder(self._arm_folder(arm)) as temporary:
            for name, (dtype, _) in _ARRAYS.items():
                if getattr(runs, name) is not None:
                    array = np.asarray(getattr(runs, name), dtype=dtype)
                    np.save(temporary / f"{name}.npy", array, allow_pickle=False)

    def runs(self, arm: str) -> ArmRuns:
        """The runs of an arm.

        Raises:
            UserError: naming the folder or file that is missing or damaged.
        """
        folder = self._arm_folder(arm)
        arrays = {name: read_array(folder / f"{name}.npy", *kind)
                  for name, kind in _ARRAYS.items()
                  if name not in _LATER or (folder / f"{name}.npy").exists()}
        try:
            return ArmRuns(**arrays)
        except UserError as error:
            raise UserError(f"{folder} is damaged: {error}") from None

    def effects(self) -> pd.DataFrame:
        """The effects, a row for each arm and outcome; figures of a comparison without controls
        may be missing.

        Raises:
            UserError: if the file is missing or damaged, or the arms of shards are not joined yet.
        """
        if ShardNotes(self.path).exist():
            raise UserError(f"{self.path} holds shards that are not joined; run "
                            "compare_interventions.py with --join")
        return read_table(self.effects_file, _EFFECTS, written_by="compare_interventions.py",
                          gaps=[name for name, kind in _EFFECTS.items() if kind is float])

    def save_table(self, path: Path, table: pd.DataFrame) -> None:
        """Write one of the CSV files."""
        write_table(path, table)

    def _arm_folder(self, arm: str) -> Path:
        return self.path / "arms" / arm
