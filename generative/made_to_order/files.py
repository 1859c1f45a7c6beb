"""Starts made to order on disk: names, writer and reader of one folder.

Layout::

    made_to_order.json        what made them
    recorded.npz              recorded starts, see RecordedStarts, with the names of the targets
    penalty_<p>/              a folder of samples, as of record_gen_samples.py, for each penalty:
                              order i has the samples from i * (starts of an order) on. Its videos
                              show each rollout beside the recorded start that is nearest to it,
                              simulated and as recorded
    pictures/order_<i>.png    the best start of order i with each penalty, and the recorded frames
                              nearest to it, one start a row
    starts.csv                a row for each penalty, order and start
    effects.csv               a row for each arm and outcome, see counting
    report.md, targets.png
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.description import open_described_folder
from common.errors import UserError
from common.files import atomic_path, read_arrays
from generative.made_to_order.recorded_starts import RecordedStarts

_PATTERNS = ("made_to_order.json", "recorded.npz", "penalty_*/*", "penalty_*/*/*",
             "pictures/order_*.png", "starts.csv", "effects.csv", "report.md", "targets.png")
_TARGETS = "targets"


def picture_name(order: int) -> str:
    """The picture of an order's best start, below the folder."""
    return f"pictures/order_{order:03d}.png"


class MadeToOrderFolder:
    """Names in a folder of starts made to order; opened for writing.

    Args:
        path: made if missing.
        description: of what makes the recorded starts. If the folder holds others, they must be
            the same.
        overwrite: throw away what the folder holds.

    Raises:
        UserError: see ``open_described_folder``.
    """

    def __init__(self, path: Path, description: dict, overwrite: bool = False):
        self.path = Path(path)
        self._lock = open_described_folder(
            self.path / "made_to_order.json", description, _PATTERNS, "starts made to order",
            "--output_dir", overwrite,
            informative=("versions", "data_dir", "agent_file", "model_file"))

    starts_file = property(lambda self: self.path / "starts.csv")
    effects_file = property(lambda self: self.path / "effects.csv")
    report_file = property(lambda self: self.path / "report.md")
    figure_file = property(lambda self: self.path / "targets.png")
    recorded_file = property(lambda self: self.path / "recorded.npz")

    def samples(self, penalty: float) -> Path:
        """The folder of samples that were searched with a penalty."""
        return self.path / f"penalty_{penalty:g}"

    def picture_file(self, order: int) -> Path:
        return self.path / picture_name(order)

    def save_recorded(self, starts: RecordedStarts, targets: Sequence[str]) -> None:
        """Write the recorded starts, with the names of the targets."""
        self._lock.check()
        with atomic_path(self.recorded_file) as temporary, open(temporary, "wb") as file:
            np.savez(file, **{field.name: getattr(starts, field.name)
                              for field in dataclasses.fields(starts)},
                     **{_TARGETS: np.array(targets)})

    def recorded(self, targets: Sequence[str]) -> RecordedStarts | None:
        """The recorded starts, if they are there already.

        Raises:
            UserError: if the file is damaged or has other targets.
        """
        if not self.recorded_file.exists():
            return None
        arrays = read_arrays(self.recorded_file, "file of recorded starts")
        names = [field.name for field in dataclasses.fields(RecordedStarts)]
        if set(arrays) != {*names, _TARGETS} or arrays[_TARGETS].tolist() != list(targets) or len(
                {len(arrays[name]) for name in names}) != 1:
            raise UserError(f"{self.recorded_file} is damaged; give --overwrite to make it again")
        return RecordedStarts(**{name: arrays[name] for name in names})
