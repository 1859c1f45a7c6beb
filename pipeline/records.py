"""Records of the stages of an experiment: reader and writer.

Files in the output folder::

    pipeline/experiment.json     preset and name; marks the folder as the pipeline's
    pipeline/stage_<stage>.json  the record of a stage, see ``Record``
    pipeline/digests*.json       checksums of files, by path, size and modification time: those
                                 that the pipeline has computed, and those of each job of a cluster
    pipeline/*.lock              held while the pipeline, or a stage of it, runs
    pipeline/report.json         names of the files of the report
    pipeline/job_<part>.json     last attempt of a job of a cluster, see ``JobAttempt``
    logs/<number>_<part>.log     output of the stage, attempt after attempt
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from common.config import typed
from common.errors import UserError
from common.files import atomic_path, read_description, save_json
from common.locks import UNSUPPORTED, open_lock

RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
SECONDS_TO_WAIT = 60  # for processes that a killed pipeline has left running
SECONDS_TO_BEGIN = 1800  # at most, for the checksums that an array's first job computes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Everything that the results of a stage depend on.

    Attributes:
        script: module of the script.
        argv: flags of the script, with placeholders.
        parameters: parameters that it depends on, by dotted name.
        inputs: checksum of every file that it reads, by name.
        code: checksum of each module of the repository that it runs, by name; empty in records
            that were written before code was recorded.
        versions: versions of the packages that decide its numbers.
    """

    script: str
    argv: tuple[str, ...]
    parameters: dict[str, object]
    inputs: dict[str, str]
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Digest; equal for equal cache keys."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True)
                              .encode()).hexdigest()

    def difference(self, earlier: CacheKey) -> str:
        """Describe the first change of each kind since an earlier cache key."""
        if not earlier.code:
            return "it was made before code was recorded"
        if self.script != earlier.script:
            return f"the script is {self.script} now"
        kinds = (("version of", earlier.versions, self.versions, True),
                 ("module", earlier.code, self.code, False),
                 ("parameter", earlier.parameters, self.parameters, True),
                 ("flag", _flags(earlier.argv), _flags(self.argv), True),
                 ("input", earlier.inputs, self.inputs, False))
        return "; ".join(filter(None, (_describe_change(*kind) for kind in kinds))) or (
            "the order of its flags is another")


def _describe_change(kind: str, old: Mapping, new: Mapping, with_values: bool) -> str:
    """Describe the first name whose value differs, or return ""."""
    changed = sorted(name for name in old.keys() | new.keys()
                     if (name in old, old.get(name)) != (name in new, new.get(name)))
    if not changed:
        return ""
    name = changed[0]
    change = (f"was {old.get(name, 'not given')} and is {new.get(name, 'not given')}"
              if with_values else "is new" if name not in old else "is gone" if name not in new
              else "has changed")
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the {kind} {name} {change}{more}"


def _flags(argv: Iterable[str]) -> dict[str, str]:
    """Values of each flag, as one text."""
    values: dict[str, str] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag = word
        values[flag] = "" if word == flag else f"{values.get(flag, '')} {word}".strip()
    return values


@dataclasses.dataclass(frozen=True)
class Record:
    """A stage as it was last run.

    Attributes:
        status: one of RUNNING (or killed), DONE, STOPPED, FAILED.
        key: digest of ``basis``.
        basis: cache key of the results.
        outputs: checksum of every file that it has written, by name in the output folder; empty
            unless it is done.
        seconds: wall time over all attempts except those that were killed.
        bytes: size of the outputs.
        result: result in a few words; empty unless it is done.
        exit_status: exit status of its last attempt; None while it runs.
        log: name of its log in the output folder.
        date: start of its last attempt.
        why: reason for which it ran, and what was accepted since.
        begun: when it was started from scratch, in seconds since the epoch; 0 in older records.
        earlier: files of an earlier training, set aside until this one is complete, by name in
            the output folder.
    """

    status: str
    key: str
    basis: CacheKey
    outputs: dict[str, str]
    seconds: float
    bytes: int
    result: str
    exit_status: int | None
    log: str
    date: str
    why: str
    begun: float = 0.0
    earlier: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """A whole stage, or the part of it that one of several jobs does.

    Attributes:
        stage: name of the stage.
        shards: number of shards that the stage is divided into; 0 if it is not.
        shard: number of the shard, from 1; 0 for the job that joins them, or for a whole stage.
    """

    stage: str
    shards: int = 0
    shard: int = 0

    @property
    def name(self) -> str:
        """Name of the part in file names."""
        if not self.shards:
            return self.stage
        return f"{self.stage}_shard_{self.shard}" if self.shard else f"{self.stage}_join"

    @property
    def argv(self) -> tuple[str, ...]:
        """Flags that select the part."""
        if not self.shards:
            return ()
        return ("--shard", f"{self.shard}/{self.shards}") if self.shard else ("--join",)

    def of_shards(self) -> list[Part]:
        """Return all shards of the stage."""
        return [Part(self.stage, self.shards, shard) for shard in range(1, self.shards + 1)]


@dataclasses.dataclass(frozen=True)
class JobAttempt:
    """The last attempt of a job at its part of a stage.

    Attributes:
        job: the scheduler's number.
        number: number of this attempt; the scheduler can start a job again.
        host: where it ran.
        date: when it began.
        status: as in ``Record``.
        exit_status: None while it runs.
        shards: number of shards of the stage; 0 if it is not divided.
        key: digest of the cache key of the shard, as in ``Record``; empty for other parts.
        seconds: wall time over all attempts at the shard that were not killed; 0 for other parts.
    """

    job: str
    number: int
    host: str
    date: str
    status: str
    exit_status: int | None
    shards: int
    key: str
    seconds: float


def matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return paths below a folder that match patterns, sorted; "!" begins an excluding pattern."""
    paths: set[Path] = set()
    for pattern in patterns:
        if pattern.startswith("!"):
            paths -= set(folder.glob(pattern[1:]))
        else:
            paths |= set(folder.glob(pattern))
    return sorted(paths)


def find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files among ``matches``, except hidden ones, which are unfinished."""
    return [path for path in matches(folder, patterns) if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)]


class Digests:
    """SHA-256 of files. A file of the same size and modification time is not read again.

    Args:
        cache_file: file that keeps them.
        others: other such files, one per process that writes them.
        check: read every file once, whatever is cached.
    """

    def __init__(self, cache_file: Path, others: Iterable[Path] = (), check: bool = False):
        self._cache_file = cache_file
        self._known: dict[str, list] = {}
        self._own: dict[str, list] = {}
        for path in () if check else (*others, cache_file):
            with contextlib.suppress(UserError):  # they can always be computed again
                self._known |= (cached := read_description(path))
                if path == cache_file:
                    self._own = cached

    def of(self, path: Path) -> str:
        """Return the checksum of a file."""
        stat, name = path.stat(), str(path.absolute())
        known = self._known.get(name)
        if not known or known[:2] != [stat.st_size, stat.st_mtime_ns]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known = self._known[name] = self._own[name] = [stat.st_size, stat.st_mtime_ns, digest]
        return known[2]

    def save(self) -> None:
        with atomic_path(self._cache_file) as temporary:
            temporary.write_text(json.dumps(self._own))


class Experiment:
    """An output folder with the records of its stages.

    Attributes:
        path: the output folder.
        folder: the folder of the records.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.folder = self.path / "pipeline"
        self._report_file = self.folder / "report.json"
        self.stage_lock_file = self.folder / "stage.lock"
        self._pipeline_lock_file = self.folder / "pipeline.lock"
        self._busy = f"another run_pipeline.py is at work in {path}; wait for it or stop it"

    def description(self) -> dict:
        """Return preset and name; empty if nothing has been run here."""
        return read_description(self.folder / "experiment.json")

    def check(self, preset: str) -> None:
        """Raise UserError if the folder holds another experiment, or other data."""
        found = self.description().get("preset")
        if found is None and self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} holds other data; choose another --output_dir")
        if found not in (None, preset):
            raise UserError(f"{self.path} holds the experiment of the preset '{found}'; choose "
                            "another --output_dir, or delete it")

    def describe(self, description: dict) -> None:
        """Mark the folder as that of an experiment."""
        if self.description() != description:
            save_json(self.folder / "experiment.json", description)

    def digests(self, check: bool, part: str = "") -> Digests:
        """Return the checksums that are known.

        Args:
            check: forget them.
            part: part whose file keeps the checksums that are computed; the pipeline's if empty.
        """
        own = self.folder / (f"digests_{part}.json" if part else "digests.json")
        return Digests(own, sorted(self.folder.glob("digests*.json")), check)

    @contextlib.contextmanager
    def opened(self, description: dict) -> Iterator[None]:
        """Keep other processes from running stages here, and wait until none does.

        Raises:
            UserError: if one does.
        """
        self.describe(description)
        with _locked(self._pipeline_lock_file, 0, self._busy):
            with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy):
                pass
            yield

    @contextlib.contextmanager
    def opened_by_job(self, part: str) -> Iterator[None]:
        """Keep other jobs from this part of a stage, and everything but jobs from the folder.

        Raises:
            UserError: if one is at work.
        """
        busy = f"another job is at work on {part} in {self.path}; wait for it or cancel it"
        with (_locked(self._pipeline_lock_file, 0, self._busy, shared=True),
              _locked(self.folder / f"job_{part}.lock", SECONDS_TO_WAIT, busy)):
            yield

    @contextlib.contextmanager
    def stage_lock(self) -> Iterator[TextIO]:
        """Held by running stages, which can outlive a killed pipeline for a moment; yields the
        locked file."""
        with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy, shared=True) as file:
            yield file

    @contextlib.contextmanager
    def beginning(self, stage: str) -> Iterator[None]:
        """One job of an array at a time decides whether to start the stage from scratch."""
        with _locked(self.folder / f"begin_{stage}.lock", SECONDS_TO_BEGIN,
                     f"another job has not begun with {stage} yet"):
            os.listdir(self.folder)  # makes a network file system look for other nodes' files
            yield

    def log_name(self, number: int, stage: str) -> str:
        return f"logs/{number:02d}_{stage}.log"

    def record(self, stage: str) -> Record | None:
        """Return the record of a stage; None if there is none, or a damaged one."""
        try:
            content = read_description(self.folder / f"stage_{stage}.json")
            content.pop("versions", None)  # written before code was recorded
            content["basis"] = CacheKey(**{**content["basis"],
                                           "argv": tuple(content["basis"]["argv"])})
            return typed(Record, content, stage)
        except (UserError, KeyError, TypeError):
            return None

    def save(self, stage: str, record: Record) -> None:
        save_json(self.folder / f"stage_{stage}.json", dataclasses.asdict(record))

    def recorded_outputs(self) -> set[Path]:
        """Return all files in the records, including those of stages that no preset has now."""
        names = (path.stem.removeprefix("stage_") for path in self.folder.glob("stage_*.json"))
        return {self.path / name for record in filter(None, map(self.record, names))
                for name in record.outputs}

    def last_at_work(self, stage: str) -> float:
        """Return when a stage or a part of it last ran, in seconds since the epoch. A running
        stage touches its log all the time."""
        pattern = re.compile(rf"\d+_{re.escape(stage)}(_shard_\d+|_join)?\.log")
        return max((path.stat().st_mtime for path in self.path.glob("logs/*.log")
                    if pattern.fullmatch(path.name)), default=0.0)

    def attempt(self, part: Part) -> JobAttempt | None:
        """Return the last attempt of a job; None if there was none, or its file is damaged."""
        try:
            return typed(JobAttempt, read_description(self.folder / f"job_{part.name}.json"),
                         part.name)
        except UserError:
            return None

    def save_attempt(self, part: Part, attempt: JobAttempt) -> None:
        save_json(self.folder / f"job_{part.name}.json", dataclasses.asdict(attempt))

    def shards_done(self, stage: str, shards: int, key: str) -> set[int]:
        """Return the shards of a stage that jobs have completed for this cache key."""
        attempts = {part.shard: self.attempt(part) for part in Part(stage, shards).of_shards()}
        return {shard for shard, attempt in attempts.items() if attempt is not None
                and (attempt.status, attempt.shards, attempt.key) == (DONE, shards, key)}

    def shard_files(self, stage: str) -> list[Path]:
        """Return the files of the attempts at shards of a stage."""
        return list(self.folder.glob(f"job_{stage}_shard_*.json"))

    def note_report(self, files: Iterable[Path]) -> None:
        """Keep the names of the files of the report."""
        save_json(self._report_file, {"files": sorted(
            str(path.relative_to(self.path)) for path in files if path.is_file())})

    def remove_report(self, folder: Path) -> None:
        """Delete the noted files in the report's folder, and no others."""
        try:
            names = read_description(self._report_file).get("files", [])
        except UserError:
            return
        for path in folder.rglob("*"):
            if str(path.relative_to(self.path)) in names and not path.is_dir():
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path, seconds: float, busy: str, shared: bool = False) -> Iterator[TextIO]:
    """Hold a lock, which the system releases however the process ends; yields its file.

    Args:
        seconds: time to wait for it.
        busy: message if it is not free by then.
        shared: let others hold it as well who also share it.

    Raises:
        UserError: if it is not free; if its file is no regular file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(busy) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                logger.warning("%s is on a file system without locks: make sure that nobody else "
                               "runs stages there", path.parent)
                break
        yield file
