"""Records of the stages of an experiment: reader and writer.

In the output folder lie::

    pipeline/experiment.json     preset and name; says that the folder is the pipeline's
    pipeline/stage_<stage>.json  the record of a stage, see ``Record``
    pipeline/digests*.json       checksums of files, by path, size and time of change: those that
                                 the pipeline has computed, and those of each job of a cluster
    pipeline/*.lock              held while the pipeline, and a stage of it, runs
    pipeline/report.json         names of the files of the report
    pipeline/job_<part>.json     how a job of a cluster does its part of a stage, see ``Sitting``
    logs/<number>_<part>.log     what the stage said, sitting after sitting
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from common.config import typed
from common.description import read_description
from common.errors import UserError
from common.files import atomic_path, save_json
from common.locks import UNSUPPORTED, open_lock

RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
SECONDS_TO_WAIT = 60  # for what a killed pipeline has left running
SECONDS_TO_BEGIN = 1800  # at most, for the checksums of what an array's first job reads
_BLOCK = 1 << 20

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Basis:
    """Everything that the results of a stage depend on.

    Attributes:
        script: its module.
        argv: its flags, before places are filled in.
        parameters: those that it depends on, by their dotted names.
        inputs: checksum of every file that it reads, by name.
        code: checksum of each module of the repository that it runs, by name; empty in records
            of before code was recorded.
        versions: of the packages that decide its numbers.
    """

    script: str
    argv: tuple[str, ...]
    parameters: dict[str, object]
    inputs: dict[str, str]
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal bases."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True)
                              .encode()).hexdigest()

    def difference(self, earlier: Basis) -> str:
        """The first change of each kind from an earlier basis, in words."""
        if not earlier.code:
            return "it was made before code was recorded"
        if self.script != earlier.script:
            return f"the script is {self.script} now"
        kinds = (("version of", earlier.versions, self.versions, True),
                 ("module", earlier.code, self.code, False),
                 ("parameter", earlier.parameters, self.parameters, True),
                 ("flag", _flags(earlier.argv), _flags(self.argv), True),
                 ("input", earlier.inputs, self.inputs, False))
        return "; ".join(filter(None, (_change(*kind) for kind in kinds))) or (
            "the order of its flags is another")


def _change(kind: str, old: dict, new: dict, tell: bool) -> str:
    """The first name whose value differs, with the values if they are to be told, or ""."""
    changed = sorted(name for name in old.keys() | new.keys()
                     if (name in old, old.get(name)) != (name in new, new.get(name)))
    if not changed:
        return ""
    name = changed[0]
    how = (f"was {old.get(name, 'not given')} and is {new.get(name, 'not given')}" if tell else
           "is new" if name not in old else "is gone" if name not in new else "has changed")
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the {kind} {name} {how}{more}"


def _flags(argv: Iterable[str]) -> dict[str, str]:
    """The values of each flag, as one text."""
    found: dict[str, str] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag = word
            found[flag] = ""
        else:
            found[flag] = f"{found.get(flag, '')} {word}".strip()
    return found


@dataclasses.dataclass(frozen=True)
class Record:
    """A stage as it was last run.

    Attributes:
        status: one of RUNNING (or killed), DONE, STOPPED, FAILED.
        key: of ``basis``.
        outputs: checksum of every file that it has written, by name in the output folder; empty
            unless it is done.
        seconds: of all its sittings but those that were killed.
        bytes: of the outputs.
        result: in a few words; empty unless it is done.
        exit_status: of its last sitting; None while it runs.
        log: name of its log in the output folder.
        date: when its last sitting began.
        why: reason for which it ran, and what was accepted since.
        begun: when it began from its start, in seconds since the epoch; 0 in older records.
        earlier: files of an earlier training, set aside until this one is complete, by name in
            the output folder.
    """

    status: str
    key: str
    basis: Basis
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
    """All of a stage, or what one of several jobs does of it.

    Attributes:
        stage: its name.
        shards: into how many the stage is divided; 0 if it is not.
        shard: which of them, from 1; 0: what joins them, or a stage that is not divided.
    """

    stage: str
    shards: int = 0
    shard: int = 0

    @property
    def name(self) -> str:
        """As it is in the names of files."""
        if not self.shards:
            return self.stage
        return f"{self.stage}_shard_{self.shard}" if self.shard else f"{self.stage}_join"

    @property
    def argv(self) -> tuple[str, ...]:
        """The flags that tell the script of it."""
        if not self.shards:
            return ()
        return ("--shard", f"{self.shard}/{self.shards}") if self.shard else ("--join",)

    def of_shards(self) -> list[Part]:
        """The shards that belong together."""
        return [Part(self.stage, self.shards, shard) for shard in range(1, self.shards + 1)]


@dataclasses.dataclass(frozen=True)
class Sitting:
    """The last time that a job did its part of a stage.

    Attributes:
        job: its number at the scheduler.
        number: how often this job has begun; its scheduler can begin it again.
        host: where it ran.
        date: when it began.
        status: as of a ``Record``.
        exit_status: None while it runs.
        shards: into how many the stage is divided; 0 if it is not.
        key: of what the shard was made of, as of a ``Record``; empty for other parts.
        seconds: of all sittings of the shard that were not killed; 0 for other parts.
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
    """Paths below a folder that match patterns, sorted; "!" begins a pattern that excludes."""
    found: set[Path] = set()
    for pattern in patterns:
        if pattern.startswith("!"):
            found -= set(folder.glob(pattern[1:]))
        else:
            found |= set(folder.glob(pattern))
    return sorted(found)


def find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files that ``matches`` gives, without hidden ones, which are unfinished."""
    return [path for path in matches(folder, patterns) if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)]


class Digests:
    """SHA-256 of files. A file of the same size and time of change is not read again.

    Args:
        cache_file: where they are kept.
        others: other files that hold some, of which each process writes one.
        check: read every file once, whatever is kept of it.
    """

    def __init__(self, cache_file: Path, others: Iterable[Path] = (), check: bool = False):
        self._cache_file = cache_file
        self._known, self._own = {}, {}
        for path in () if check else (*others, cache_file):
            with contextlib.suppress(UserError):  # they can always be computed again
                found = read_description(path)
                self._known |= found
                if path == cache_file:
                    self._own = found

    def of(self, path: Path) -> str:
        """The checksum of a file."""
        stat = path.stat()
        known = self._known.get(str(path.absolute()))
        if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return known[2]
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        new = [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
        self._known[str(path.absolute())] = self._own[str(path.absolute())] = new
        return digest.hexdigest()

    def save(self) -> None:
        with atomic_path(self._cache_file) as temporary:
            temporary.write_text(json.dumps(self._own))


class Experiment:
    """An output folder with the records of its stages."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._folder = self.path / "pipeline"
        self._report_file = self._folder / "report.json"
        self.stage_lock_file = self._folder / "stage.lock"
        self._pipeline_lock_file = self._folder / "pipeline.lock"

    @property
    def description_file(self) -> Path:
        return self._folder / "experiment.json"

    def description(self) -> dict:
        """Preset and name; empty if nothing has been run here."""
        return read_description(self.description_file)

    def check(self, preset: str) -> None:
        """Check that the folder may be written to.

        Raises:
            UserError: if it holds another experiment, or something else.
        """
        found = self.description().get("preset")
        if found is None and self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} holds other data; choose another --output_dir")
        if found not in (None, preset):
            raise UserError(f"{self.path} holds the experiment of the preset '{found}'; choose "
                            "another --output_dir, or delete it")

    def describe(self, description: dict) -> None:
        """Say whose folder this is."""
        if self.description() != description:
            save_json(self.description_file, description)

    def digests(self, check: bool, part: str = "") -> Digests:
        """The checksums that are known.

        Args:
            check: forget them.
            part: whose file those that are computed go to; the pipeline's if empty.
        """
        own = self._folder / (f"digests_{part}.json" if part else "digests.json")
        return Digests(own, sorted(self._folder.glob("digests*.json")), check)

    @property
    def _busy(self) -> str:
        return f"another run_pipeline.py is at work in {self.path}; wait for it or stop it"

    @contextlib.contextmanager
    def opened(self, description: dict) -> Iterator[None]:
        """Keep others from running stages here, and wait until nothing does any more.

        Raises:
            UserError: if somebody does.
        """
        self.describe(description)
        with _locked(self._pipeline_lock_file, 0, self._busy):
            with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy):
                pass
            yield

    @contextlib.contextmanager
    def opened_by_job(self, part: str) -> Iterator[None]:
        """Keep other jobs from doing this part of a stage, and all others but jobs from running
        stages here.

        Raises:
            UserError: if somebody does.
        """
        busy = f"another job is at work on {part} in {self.path}; wait for it or cancel it"
        with (_locked(self._pipeline_lock_file, 0, self._busy, shared=True),
              _locked(self._folder / f"job_{part}.lock", SECONDS_TO_WAIT, busy)):
            yield

    @contextlib.contextmanager
    def stage_lock(self) -> Iterator[TextIO]:
        """Held by running stages, which can outlive a killed pipeline for a moment; gives the file
        that is locked."""
        with _locked(self.stage_lock_file, SECONDS_TO_WAIT, self._busy, shared=True) as file:
            yield file

    @contextlib.contextmanager
    def beginning(self, stage: str) -> Iterator[None]:
        """One job of an array at a time decides whether to begin the stage from its start."""
        with _locked(self._folder / f"begin_{stage}.lock", SECONDS_TO_BEGIN,
                     f"another job has not begun with {stage} yet"):
            os.listdir(self._folder)  # a network file system looks for other nodes' files then
            yield

    def log_name(self, number: int, stage: str) -> str:
        return f"logs/{number:02d}_{stage}.log"

    def record(self, stage: str) -> Record | None:
        """The record of a stage; None if it has none, or a damaged one."""
        try:
            content = read_description(self._record_file(stage))
            basis = content.pop("basis")
            basis["argv"] = tuple(basis["argv"])
            content.pop("versions", None)  # of before code was recorded
            return Record(basis=Basis(**basis), **content)
        except (UserError, KeyError, TypeError):
            return None

    def note_report(self, files: Iterable[Path]) -> None:
        """Keep the names of the files of the report."""
        save_json(self._report_file, {"files": sorted(
            str(path.relative_to(self.path)) for path in files if path.is_file())})

    def remove_report(self, folder: Path) -> None:
        """Delete the files in the report's folder that were noted, and no others."""
        try:
            names = read_description(self._report_file).get("files", [])
        except UserError:
            return
        for path in folder.rglob("*"):
            if str(path.relative_to(self.path)) in names and not path.is_dir():
                path.unlink()

    def recorded_outputs(self) -> set[Path]:
        """All files that the records name, also those of stages that the preset has no more."""
        names = (path.stem.removeprefix("stage_") for path in self._folder.glob("stage_*.json"))
        return {self.path / name for record in filter(None, map(self.record, names))
                for name in record.outputs}

    def last_at_work(self, stage: str) -> float:
        """When a stage or a part of it last ran, in seconds since the epoch: its logs are touched
        all the while."""
        pattern = re.compile(rf"\d+_{re.escape(stage)}(_shard_\d+|_join)?\.log")
        return max((path.stat().st_mtime for path in self.path.glob("logs/*.log")
                    if pattern.fullmatch(path.name)), default=0.0)

    def save(self, stage: str, record: Record) -> None:
        save_json(self._record_file(stage), dataclasses.asdict(record))

    def sitting(self, part: Part) -> Sitting | None:
        """The last sitting of a job; None if there was none, or its file is damaged."""
        try:
            return typed(Sitting, read_description(self._sitting_file(part)), part.name)
        except UserError:
            return None

    def save_sitting(self, part: Part, sitting: Sitting) -> None:
        save_json(self._sitting_file(part), dataclasses.asdict(sitting))

    def shards_done(self, stage: str, shards: int, key: str) -> set[int]:
        """The shards of a stage that jobs have done of what has this key."""
        found = {part.shard: self.sitting(part) for part in Part(stage, shards).of_shards()}
        return {shard for shard, sitting in found.items() if sitting is not None
                and (sitting.status, sitting.shards, sitting.key) == (DONE, shards, key)}

    def has_shards(self, stage: str) -> bool:
        """Whether jobs have begun with shards of a stage."""
        return bool(self._shard_files(stage))

    def forget_shards(self, stage: str) -> None:
        """Forget which shards of a stage are done."""
        for path in self._shard_files(stage):
            path.unlink(missing_ok=True)

    def _shard_files(self, stage: str) -> list[Path]:
        return list(self._folder.glob(f"job_{stage}_shard_*.json"))

    def _sitting_file(self, part: Part) -> Path:
        return self._folder / f"job_{part.name}.json"

    def _record_file(self, stage: str) -> Path:
        return self._folder / f"stage_{stage}.json"


@contextlib.contextmanager
def _locked(path: Path, seconds: float, busy: str, shared: bool = False) -> Iterator[TextIO]:
    """Hold a lock, which the system releases however the process ends; gives its file.

    Args:
        shared: let others hold it, too, who say the same.

    Raises:
        UserError: ``busy``, if it is not free in so many seconds; if its file is no regular one.
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
                logger.warning("%s is on a file system without locks: see that nobody else runs "
                               "stages there", path.parent)
                break
        yield file
