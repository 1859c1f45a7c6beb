"""Results of an analysis on disk: arrays, and the settings that made them.

Each analysis has a module that says what its files are called and hold; what is common to all is
here. Results for several numbers N of episodes or samples lie side by side in one folder, with N in
the names, and ``settings_N.json``, which is ours, says what made them and how each step went.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.description import read_description
from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    atomic_path,
    check_finite,
    make_temporary_folder,
    read_array,
    save_json,
)

MATRIX, VECTOR, LABELS = (np.floating, 2), (np.floating, 1), (np.integer, 1)


class ResultFolder:
    """Names and readers of the results for one number of episodes or samples.

    Attributes of the class:
        script: that writes them.
        kinds: of each array what its file is called, without the number, and its type and number of
            dimensions.
    """

    script: ClassVar[str]
    kinds: ClassVar[dict[str, tuple[str, tuple[type, int]]]]

    def __init__(self, path: Path, number: int):
        self.path, self.number = Path(path), number

    @property
    def settings_file(self) -> Path:
        return self.path / f"settings_{self.number}.json"

    def file(self, name: str) -> Path:
        """The file of an array."""
        return self.path / f"{self.kinds[name][0]}_{self.number}.npy"

    def has(self, name: str) -> bool:
        """Whether an array is there to be read.

        A published folder, which says nothing of what made it, lacks what is ours alone. A file
        that one of ours lacks is no gap, but an error of its reader.
        """
        return self.file(name).exists() or self.settings_file.exists()

    def read(self, name: str) -> np.ndarray:
        """An array.

        Raises:
            UserError: if its file is missing or damaged, or holds something else.
        """
        return read_array(self.file(name), *self.kinds[name][1], self.script)

    def store(self, name: str, values: np.ndarray) -> None:
        """Write an array."""
        with atomic_path(self.file(name)) as temporary:
            np.save(temporary, values, allow_pickle=False)

    def read_finite(self, name: str, num_rows: int | None = None) -> np.ndarray:
        """An array without NaN, with so many rows if they are given.

        Raises:
            UserError: see ``read``; or if it is not so.
        """
        array = self.read(name)
        if num_rows is not None and len(array) != num_rows:
            raise UserError(f"{self.file(name)} has {len(array)} rows, not {num_rows} as the data "
                            "given; give the data that was analysed")
        check_finite(array, self.file(name), "write it again")
        return array

    def settings(self) -> dict:
        """Settings that made the arrays; empty for published ones, which do not store them."""
        return read_description(self.settings_file)

    def at(self, path: Path) -> ResultFolder:
        """The same names in another folder."""
        return type(self)(path, self.number)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one step of an analysis.

    Attributes:
        arrays: by their names in the folder.
        facts: how it went, for the settings file.
    """

    arrays: dict[str, np.ndarray]
    facts: dict


class ResultWriter:
    """Collects the results of the steps in a hidden folder and moves them into place at the end.

    A killed run continues after the last step it finished, if it is asked for the same again. Old
    results are removed before new ones take their places, so that no reader ever finds a mixture
    of both: at worst it misses a file.

    Args:
        folder: where the results belong.
        description: what makes them.
        report: called after each step with its name and its seconds.

    Attributes:
        facts: of each step so far.
    """

    def __init__(self, folder: ResultFolder, description: dict,
                 report: Callable[[str, float], None]):
        self.folder, self._report = folder, report
        self.description = json.loads(json.dumps(description))  # as it looks after a round trip
        self.facts: dict[str, dict] = {}
        self._seconds: dict[str, float] = {}
        working = folder.path / f".{folder.number}{TEMPORARY_SUFFIX}"
        self._working = folder.at(working)
        make_temporary_folder(working)
        if self._working.settings() != self.description:
            shutil.rmtree(working)
            working.mkdir()
        save_json(self._working.settings_file, self.description)

    def step(self, name: str, compute: Callable[[], Result]) -> dict[str, np.ndarray]:
        """The arrays of a step: computed and stored, or read if an earlier run did that."""
        record_file = self._working.path / f"step_{name}.json"
        record = read_description(record_file)
        if record:
            arrays = {array: self._working.read(array) for array in record["arrays"]}
        else:
            begin = time.perf_counter()
            result = compute()
            arrays = result.arrays
            for array, values in arrays.items():
                self._working.store(array, values)
            record = {"arrays": list(arrays), "facts": result.facts,
                      "seconds": round(time.perf_counter() - begin, 2)}
            save_json(record_file, record)
        self._seconds[name], self.facts[name] = record["seconds"], record["facts"]
        self._report(name, record["seconds"])
        return arrays

    def finish(self) -> list[Path]:
        """Move everything into place, the settings last; returns the files."""
        arrays = sorted(path for path in self._working.path.iterdir() if path.suffix != ".json")
        self.folder.settings_file.unlink(missing_ok=True)
        for path in arrays:
            (self.folder.path / path.name).unlink(missing_ok=True)
        written = []
        for path in arrays:
            written.append(self.folder.path / path.name)
            os.replace(path, written[-1])
        save_json(self.folder.settings_file,
                  {**self.description, "steps": self.facts, "seconds": self._seconds})
        shutil.rmtree(self._working.path)
        return [*written, self.folder.settings_file]
