"""Results of an analysis that is computed in steps.

A folder holds the results for several numbers N of episodes or samples, with N in the file names.
In the ``settings_name`` of the :class:`Schema`, ``{}`` stands for N. The settings file holds the
settings of the run and, for each step, its duration and its *facts*, such as the explained
variance. Published folders have no settings file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, read_description, save_json, versions
from common.folders import make_hidden_folder
from common.locks import LOCK_NAME, FolderLock
from common.results import ResultStore
from common.schemas import Schema

logger = logging.getLogger(__name__)

StepResult = tuple[dict[str, Any], dict]
"""Values computed by a step, by name of their entry, and facts for the settings file."""


# Types of the settings that are read back, see ``Schema.setting_types``.
STEP_SETTINGS = {"samples": str, "samples_made_by": dict, "sample_numbers": tuple[int, ...],
                 "steps": dict[str, dict]}


class StepResults:
    """Reader and writer of the results for one number of episodes or samples.

    New results are collected in a hidden folder and moved to their final paths at the end, so that
    readers never find a mixture of old and new results; at worst a file is missing. A killed run
    resumes after its last finished step if it is started again with the same settings.

    Args:
        path: the folder, which need not exist.
        schema: schema of the folder.
        number: number of episodes or samples, N.
        other_number: second number in the file names, if any.

    Attributes:
        facts: facts of each finished step, by name of the step.
    """

    def __init__(self, path: Path, schema: Schema, number: int, other_number: int | None = None):
        self.path, self.schema, self.number = Path(path), schema, number
        self.other_number = other_number
        self.key = number, other_number
        self.facts: dict[str, dict] = {}
        self._seconds: dict[str, float] = {}

    @classmethod
    def open(cls, path: Path, schema: Schema, number: int, flag: str, is_given: bool,
             other_number: int | None = None) -> StepResults:
        """Open results to read: those for ``number``, or, if the user did not choose it and the
        folder only holds the results for another number, those.

        Args:
            path, schema, number, other_number: see the class.
            flag: flag that sets the number, for messages.
            is_given: whether the user chose the number with this flag.

        Raises:
            UserError: if the folder holds results for other numbers only, and it is not clear which
                of them to read.
        """
        patterns = [re.escape(name).replace(re.escape("{}"), r"(\d+)") for name in (
            schema.settings_name, *(entry.path for entry in schema.items.values()))]
        numbers = sorted({int(match[1]) for file in Path(path).glob("[!.]*") for pattern in patterns
                          if (match := re.fullmatch(pattern, file.name)) and match.groups()})
        if numbers and number not in numbers:
            if is_given or len(numbers) > 1:
                raise UserError(f"{path} holds no {schema.what.format(number)}, but those for "
                                f"{' and '.join(map(str, numbers))}; give {flag} {numbers[-1]}")
            logger.info("reading the %s, because %s holds no others",
                        schema.what.format(numbers[0]), path)
            number = numbers[0]
        return cls(path, schema, number, other_number)

    @property
    def settings_file(self) -> Path:
        return self.path / self.schema.settings_name.format(self.number)

    def settings(self, *needed: str) -> dict:
        """Read the settings file; return {} for published results, which have none.

        Args:
            needed: settings that an existing file must have.

        Raises:
            UserError: if the file is damaged, or a setting is missing.
        """
        return self.schema.read_settings(self.settings_file, needed)

    def file(self, name: str) -> Path:
        """Return the path of an entry, or of its fallback if only that file exists."""
        entry = self.schema.entry(name)
        path = self.path / entry.path.format(*self.key)
        if entry.fallback and not path.exists() and (other := self.file(entry.fallback)).exists():
            return other
        return path

    def has(self, name: str) -> bool:
        """Return whether an entry exists or must exist.

        Published folders, which have no settings file, may lack entries. With a settings file, all
        entries must exist, and ``read`` reports a missing file as an error.
        """
        return self.file(name).exists() or self.settings_file.exists()

    def read(self, name: str, num_rows: int | None = None) -> Any:
        """Read an entry.

        Args:
            num_rows: required number of rows; None for any.

        Raises:
            UserError: if the file is missing or damaged, holds NaN, or has another number of rows.
        """
        path = self.file(name)
        value = self.schema.entry(name).read(path, self.schema.script)
        if num_rows is not None and len(value) != num_rows:
            raise UserError(f"{path} has {len(value)} rows, but the given data have {num_rows}; "
                            "give the data that were analysed")
        return value

    # Writing

    def check_new(self, overwrite: bool) -> None:
        """Raise UserError if results exist and ``overwrite`` is false."""
        if self.settings_file.exists() and not overwrite:
            raise UserError(f"{self.path} already holds the "
                            f"{self.schema.what.format(self.number)}; choose another "
                            f"{self.schema.flag}, or give --overwrite")

    def start(self, settings: dict) -> None:
        """Start a run, or resume a killed one.

        Args:
            settings: everything that the results depend on. Steps computed with other settings are
                deleted.

        Raises:
            FolderInUse: if another process computes the same results.
        """
        hidden = self.path / f".{self.number}{TEMPORARY_SUFFIX}"
        make_hidden_folder(hidden)
        self._lock = FolderLock(hidden)
        self._steps = ResultStore(hidden, self.schema)
        self._settings = json.loads(json.dumps(  # convert tuples to lists as JSON does
            {**settings, "versions": versions()}))
        settings_file = hidden / self.settings_file.name
        if read_description(settings_file) != self._settings:
            for path in hidden.iterdir():
                if path.name != LOCK_NAME:
                    path.unlink()
            save_json(settings_file, self._settings)

    def step(self, name: str, compute: Callable[[], StepResult]) -> dict[str, Any]:
        """Return the values of a step, which is computed unless an interrupted run finished it.

        Args:
            name: name of the step.
            compute: computes the values and facts of the step.

        Returns:
            Values of the step by the names of their entries.
        """
        record_file = self._steps.path / f"step_{name}.json"
        record = read_description(record_file)
        if record:
            # A run killed in `finish` has already moved some of the files.
            values = {entry: self._steps.read(entry, *self.key)
                      if self._steps.has(entry, *self.key) else self.read(entry)
                      for entry in record["arrays"]}
        else:
            begin = time.perf_counter()
            values, facts = compute()
            for entry, value in values.items():
                self._steps.write(entry, *self.key, value=value)
            record = {"arrays": list(values), "facts": facts,
                      "seconds": round(time.perf_counter() - begin, 2)}
            save_json(record_file, record)
        self.facts[name], self._seconds[name] = record["facts"], record["seconds"]
        print(f"{name}: {record['seconds']:.2f} s", flush=True)
        return values

    def finish(self) -> None:
        """Move all results to their final paths, write the settings, and print the paths."""
        records = {LOCK_NAME, self.settings_file.name,
                   *(f"step_{name}.json" for name in self.facts)}
        paths = sorted(path for path in self._steps.path.iterdir() if path.name not in records)
        self.settings_file.unlink(missing_ok=True)
        for path in paths:
            (self.path / path.name).unlink(missing_ok=True)
        for path in paths:
            os.replace(path, self.path / path.name)
        save_json(self.settings_file,
                  {**self._settings, "steps": self.facts, "seconds": self._seconds})
        shutil.rmtree(self._steps.path)
        for path in (*(self.path / path.name for path in paths), self.settings_file):
            print(f"wrote {path}")
