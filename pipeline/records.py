"""Read and write the records of an experiment's stages.

Files in the output folder::

    pipeline/experiment.json     preset and name; marks the folder as an output of the pipeline
    pipeline/stage_<stage>.json  record of a stage, see ``Record``
    pipeline/digests*.json       cached checksums of files with size and modification time; one
                                 file for the pipeline, and one per cluster job
    pipeline/*.lock              locks, held while the pipeline or one of its stages runs
    pipeline/job_<part>.json     last attempt of a cluster job, see ``JobAttempt``
    logs/<number>_<part>.log     output of all attempts at a stage, or at a part of it
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
from pathlib import Path, PurePath
from typing import TextIO

from common.config import typed
from common.errors import UserError
from common.files import atomic_path, is_sha256, read_description, save_json
from common.locks import UNSUPPORTED, open_lock

# States of a stage, of a part of it and of a job, in local runs and on clusters.
NOT_RUN = "not run"
QUEUED = "queued"  # waits in the queue of a scheduler
RUNNING = "running"  # in files, also after the process was killed
INTERRUPTED = "interrupted"  # ended without a record, for example because it was killed
STOPPED = "stopped"  # by a signal, after its work had been saved
FAILED = "failed"
LOST = "lost"  # the scheduler does not list its job, which has not ended
DONE = "done"
SECONDS_TO_WAIT = 60  # longest wait for processes that a killed pipeline has left running
MAX_NUMBER = 1e15  # of seconds or bytes in a record
SECONDS_TO_BEGIN = 1800  # longest wait for the checksums computed by the first job of an array

logger = logging.getLogger(__name__)


def state_of_exit(status: int) -> str:
    """Return the state of a stage whose script has ended with an exit status."""
    return DONE if status == 0 else STOPPED if status > 128 else FAILED


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Everything that the results of a stage depend on.

    Attributes:
        script: module name of the script.
        argv: flags of the script, with placeholders.
        parameters: parameters that the script depends on, by dotted name.
        inputs: checksum of every input file, by name.
        code: checksum of each module of the repository that the script runs, by name.
        versions: versions of the packages that affect the results.
    """

    script: str
    argv: tuple[str, ...]
    parameters: dict[str, object]
    inputs: dict[str, str]
    code: dict[str, str]
    versions: dict[str, str]

    @property
    def key(self) -> str:
        """Digest of all attributes; equal for equal cache keys."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True)
                              .encode()).hexdigest()

    def difference(self, earlier: CacheKey) -> str:
        """Describe how this cache key differs from an earlier one.

        If the scripts differ, only this is stated. Otherwise, the first changed package version,
        module, parameter and input, and all changed flags follow, separated by semicolons.
        """
        if self.script != earlier.script:
            return f"the script is {self.script} now"
        kinds = (("version of", earlier.versions, self.versions),
                 ("module", earlier.code, self.code),
                 ("parameter", earlier.parameters, self.parameters),
                 ("input", earlier.inputs, self.inputs))
        changes = [change for kind in kinds if (change := _describe_change(*kind))]
        if self.argv != earlier.argv:
            words = sorted(set(self.argv) ^ set(earlier.argv))
            changes.append(f"its flags have changed: {', '.join(words)}")
        return "; ".join(changes)


def _describe_change(kind: str, old: Mapping, new: Mapping) -> str:
    """Describe the first entry that differs between two mappings; "" if they are equal.

    Args:
        kind: kind of the entries; the values of the kinds "module" and "input" are checksums.
    """
    changed = sorted(name for name in old.keys() | new.keys()
                     if old.get(name, "not given") != new.get(name, "not given"))
    if not changed:
        return ""
    name, more = changed[0], f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    if kind in ("module", "input"):  # values are checksums
        change = "is new" if name not in old else "is gone" if name not in new else "has changed"
    else:
        change = f"was {old.get(name, 'not given')} and is {new.get(name, 'not given')}"
    return f"the {kind} {name} {change}{more}"


@dataclasses.dataclass(frozen=True)
class Record:
    """Record of the last run of a stage.

    Attributes:
        status: RUNNING (also after the run was killed), DONE, STOPPED or FAILED.
        key: digest of ``basis``.
        basis: cache key of the results.
        outputs: checksum of every output file, by path relative to the output folder; empty unless
            the stage is done.
        seconds: wall time in seconds over all attempts except killed ones.
        bytes: total size of the outputs in bytes.
        result: short summary of the result; empty unless the stage is done.
        exit_status: exit status of the last attempt; None while it runs.
        log: path of the log relative to the output folder.
        date: start of the last attempt.
        why: reason for running the stage, and changes that were accepted since.
        begun: time at which the stage was started from scratch, in seconds since the epoch.
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

    def __post_init__(self):
        if self.status not in (RUNNING, DONE, STOPPED, FAILED):
            raise UserError(f"the status of a stage cannot be '{self.status}'")
        if not all(0 <= number < MAX_NUMBER for number in (self.seconds, self.bytes, self.begun)):
            raise UserError("seconds, bytes and begun must be numbers from 0")
        for name, digest in self.outputs.items():
            path = PurePath(name)
            if not is_sha256(digest) or path.is_absolute() or ".." in path.parts:
                raise UserError(f"'{name}' is not a file with a checksum")


@dataclasses.dataclass(frozen=True)
class Part:
    """A whole stage, or the part of it that a single job runs.

    Attributes:
        stage: name of the stage.
        shards: number of shards that the stage is divided into; 0 if it is not divided.
        shard: number of the shard, from 1; 0 for a whole stage, or for joining its shards.
    """

    stage: str
    shards: int = 0
    shard: int = 0

    @property
    def name(self) -> str:
        """Name of the part for file names."""
        suffix = f"_shard_{self.shard}" if self.shard else "_join" if self.shards else ""
        return f"{self.stage}{suffix}"

    @property
    def argv(self) -> tuple[str, ...]:
        """Flags that select the part."""
        join = ("--join",) if self.shards else ()
        return ("--shard", f"{self.shard}/{self.shards}") if self.shard else join


@dataclasses.dataclass(frozen=True)
class JobAttempt:
    """Last attempt of a job at a stage or a shard.

    Attributes:
        job: ID of the job in the scheduler.
        number: number of the attempt, from 1; the scheduler can requeue a job.
        status: see ``Record``; of a job that joins the shards after its own, that of its own.
        shards: number of shards of the stage; 0 if it is not divided.
        key: digest of the cache key of a shard, as in ``Record``; empty for a whole stage.
        seconds: wall time in seconds over all attempts at a shard except killed ones; 0 for a whole
            stage.
    """

    job: str
    number: int
    status: str
    shards: int
    key: str = ""
    seconds: float = 0.0


class Digests:
    """Cache of SHA-256 checksums; files with unchanged size and modification time are not re-read.

    Args:
        cache_file: cache file that this process reads and writes.
        others: cache files of other processes, which are only read.
        check: ignore cached checksums, and read every file once.
    """

    def __init__(self, cache_file: Path, others: Iterable[Path] = (), check: bool = False):
        self._cache_file = cache_file
        self._known: dict[str, list] = {}
        self._own: dict[str, list] = {}
        for path in () if check else (*others, cache_file):
            with contextlib.suppress(UserError):  # checksums can always be recomputed
                cached = {name: known for name, known in read_description(path).items()
                          if isinstance(known, list) and list(map(type, known)) == [int, int, str]
                          and is_sha256(known[2])}
                self._known |= cached
                if path == cache_file:
                    self._own = cached

    def of(self, path: Path) -> str:
        """Return the checksum of a file."""
        name, status = str(path.absolute()), path.stat()
        known = self._known.get(name)
        if not known or known[:2] != [status.st_size, status.st_mtime_ns]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known = self._known[name] = self._own[name] = [
                status.st_size, status.st_mtime_ns, digest]
        return known[2]

    def save(self) -> None:
        """Write the cache file."""
        with atomic_path(self._cache_file) as temporary:
            temporary.write_text(json.dumps(self._own), encoding="utf-8")


class Experiment:
    """An output folder with the records of its stages.

    Attributes:
        path: output folder.
        folder: folder of the records.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.folder = self.path / "pipeline"
        self.stage_lock_file = self.folder / "stage.lock"
        self._pipeline_lock_file = self.folder / "pipeline.lock"
        self._busy = f"another run_pipeline.py is using {path}; wait for it or stop it"

    def description(self) -> dict:
        """Return preset and name of the experiment; empty if nothing has been run here."""
        return read_description(self.folder / "experiment.json")

    def check(self, preset: str) -> None:
        """Raise UserError if the folder contains another preset's experiment, or other data."""
        recorded = self.description().get("preset")
        if recorded is None and self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} holds other data; choose another --output_dir")
        if recorded not in (None, preset):
            raise UserError(f"{self.path} holds the experiment of the preset '{recorded}'; choose "
                            "another --output_dir, or delete it")

    def describe(self, description: dict) -> None:
        """Mark the folder as the output folder of an experiment.

        Args:
            description: preset and name of the experiment.
        """
        if self.description() != description:
            save_json(self.folder / "experiment.json", description)

    def digests(self, check: bool, part: str = "") -> Digests:
        """Open the cache of checksums.

        Args:
            check: ignore cached checksums.
            part: name of the part of a stage (``Part.name``) whose own cache file stores new
                checksums; "" for the pipeline's cache file.
        """
        own = self.folder / (f"digests_{part}.json" if part else "digests.json")
        return Digests(own, sorted(self.folder.glob("digests*.json")), check)

    @contextlib.contextmanager
    def opened(self, description: dict) -> Iterator[None]:
        """Context manager: lock the folder for this pipeline, and wait for stages that still run.

        Args:
            description: preset and name of the experiment.

        Raises:
            UserError: if another pipeline is running, or a stage is still running after a minute.
        """
        self.describe(description)
        with _locked(self._pipeline_lock_file, 0, self._busy):
            with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy):
                pass
            yield

    @contextlib.contextmanager
    def opened_by_job(self, part: str) -> Iterator[None]:
        """Context manager: lock a part of a stage exclusively, and the folder with a lock that
        cluster jobs share, so that no local pipeline can start.

        Args:
            part: name of the part of a stage (``Part.name``).

        Raises:
            UserError: if another job still runs this part after a minute, or a pipeline is running.
        """
        busy = f"another job is running {part} in {self.path}; wait for it or cancel it"
        with (_locked(self._pipeline_lock_file, 0, self._busy, shared=True),
              _locked(self.folder / f"job_{part}.lock", SECONDS_TO_WAIT, busy)):
            yield

    @contextlib.contextmanager
    def stage_lock(self) -> Iterator[TextIO]:
        """Context manager: hold the lock of running stages; yields the locked file.

        Stages can briefly outlive a killed pipeline.
        """
        with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy, shared=True) as file:
            yield file

    @contextlib.contextmanager
    def beginning(self, stage: str) -> Iterator[None]:
        """Context manager: let one job of an array at a time decide whether to start the stage
        from scratch, so that later jobs see the decision and do not start it again."""
        with _locked(self.folder / f"begin_{stage}.lock", SECONDS_TO_BEGIN,
                     f"another job is still preparing {stage}; submit it again later"):
            os.listdir(self.folder)  # makes a network file system refresh its directory cache
            yield

    def record(self, stage: str) -> Record | None:
        """Return the record of a stage; None if it is missing or damaged."""
        try:
            return typed(Record, read_description(self.folder / f"stage_{stage}.json"), stage)
        except UserError:
            return None

    def save(self, stage: str, record: Record) -> None:
        save_json(self.folder / f"stage_{stage}.json", dataclasses.asdict(record))

    def recorded_outputs(self) -> set[Path]:
        """Return all output files named in records, even in records of stages that no longer exist.
        """
        names = (path.stem.removeprefix("stage_") for path in self.folder.glob("stage_*.json"))
        return {self.path / name for record in filter(None, map(self.record, names))
                for name in record.outputs}

    def last_at_work(self, stage: str) -> float:
        """Return the time at which a stage or a part of it last ran, in seconds since the epoch.

        It is the modification time of the logs, which running stages touch continually.
        """
        pattern = re.compile(rf"\d+_{re.escape(stage)}(_shard_\d+|_join)?\.log")
        return max((path.stat().st_mtime for path in self.path.glob("logs/*.log")
                    if pattern.fullmatch(path.name)), default=0.0)

    def attempt(self, part: Part) -> JobAttempt | None:
        """Return the last attempt at a part of a stage; None if its file is missing or damaged."""
        try:
            return typed(JobAttempt, read_description(self.folder / f"job_{part.name}.json"),
                         part.name)
        except UserError:
            return None

    def save_attempt(self, part: Part, attempt: JobAttempt) -> None:
        save_json(self.folder / f"job_{part.name}.json", dataclasses.asdict(attempt))

    def shard_attempts(self, stage: str, shards: int) -> dict[int, JobAttempt]:
        """Return the last attempts at the shards of a stage that is divided into ``shards``
        shards, by shard."""
        attempts = {shard: self.attempt(Part(stage, shards, shard))
                    for shard in range(1, shards + 1)}
        return {shard: attempt for shard, attempt in attempts.items()
                if attempt is not None and attempt.shards == shards}

    def shards_done(self, stage: str, shards: int, key: str) -> frozenset[int]:
        """Return the numbers of the completed shards of a stage.

        Args:
            stage: name of the stage.
            shards: number of shards that the stage is divided into.
            key: digest of the cache key; shards that were completed with another key are excluded.
        """
        return frozenset(
            shard for shard, attempt in self.shard_attempts(stage, shards).items()
            if (attempt.status, attempt.key) == (DONE, key))

    def shard_files(self, stage: str) -> list[Path]:
        """Return the files that record attempts at the shards of a stage."""
        return list(self.folder.glob(f"job_{stage}_shard_*.json"))


@contextlib.contextmanager
def _locked(path: Path, seconds: float, busy: str, shared: bool = False) -> Iterator[TextIO]:
    """Context manager: hold a lock, released by the system when the process ends; yields its file.

    Args:
        path: lock file.
        seconds: longest time to wait for the lock.
        busy: error message if the lock is still held then.
        shared: acquire a shared lock instead of an exclusive one.

    Raises:
        UserError: if the lock is not free in time, or its file is not a regular file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    with open_lock(path) as file:
        end = time.monotonic() + seconds
        while not _try_lock(file, kind):
            if time.monotonic() >= end:
                raise UserError(busy)
            time.sleep(0.1)
        yield file


def _try_lock(file: TextIO, kind: int) -> bool:
    """Try to lock a file without blocking; returns whether the lock was acquired.

    On a file system without locks, a warning is logged and the result is True.

    Args:
        kind: operation of ``fcntl.flock``.
    """
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("%s is on a file system without locks; make sure that no other process "
                       "runs stages there", file.name)
    return True
