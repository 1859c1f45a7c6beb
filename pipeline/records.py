"""Records of the stages of an experiment: reader and writer.

In the output folder lie::

    pipeline/experiment.json     preset and name; says that the folder is the pipeline's
    pipeline/stage_<stage>.json  the record of a stage, see ``Record``
    pipeline/digests.json        checksums of files, by path, size and time of change
    pipeline/*.lock              held while the pipeline, and a stage of it, runs
    logs/<number>_<stage>.log    what the stage said, sitting after sitting
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.description import read_description
from common.errors import UserError
from common.files import atomic_path, save_json

RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
SECONDS_TO_WAIT = 60  # for what a killed pipeline has left running
_BLOCK = 1 << 20


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
        check: read every file once, whatever is kept of it.
    """

    def __init__(self, cache_file: Path, check: bool = False):
        self._cache_file = cache_file
        self._known = {}
        if not check:
            with contextlib.suppress(UserError):  # they can always be computed again
                self._known = read_description(cache_file)

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
        self._known[str(path.absolute())] = [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
        return digest.hexdigest()

    def save(self) -> None:
        with atomic_path(self._cache_file) as temporary:
            temporary.write_text(json.dumps(self._known))


class Experiment:
    """An output folder with the records of its stages."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._folder = self.path / "pipeline"
        self.stage_lock_file = self._folder / "stage.lock"

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

    def digests(self, check: bool) -> Digests:
        return Digests(self._folder / "digests.json", check)

    @contextlib.contextmanager
    def opened(self, description: dict) -> Iterator[None]:
        """Keep others from running stages here, and wait until nothing does any more.

        Raises:
            UserError: if somebody does.
        """
        save_json(self.description_file, description)
        busy = f"another run_pipeline.py is at work in {self.path}; wait for it or stop it"
        with _locked(self._folder / "pipeline.lock", 0, busy):
            with _locked(self.stage_lock_file, SECONDS_TO_WAIT, busy):
                pass
            yield

    @contextlib.contextmanager
    def stage_lock(self) -> Iterator[None]:
        """Held by a running stage, which can outlive a killed pipeline for a moment."""
        with _locked(self.stage_lock_file, SECONDS_TO_WAIT, "a stage runs already"):
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

    def save(self, stage: str, record: Record) -> None:
        save_json(self._record_file(stage), dataclasses.asdict(record))

    def _record_file(self, stage: str) -> Path:
        return self._folder / f"stage_{stage}.json"


@contextlib.contextmanager
def _locked(path: Path, seconds: float, busy: str) -> Iterator[None]:
    """Hold a lock, which the system releases however the process ends.

    Raises:
        UserError: ``busy``, if it is not free in so many seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(busy) from None
                time.sleep(0.1)
        yield
