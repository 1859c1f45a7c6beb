"""Deciding which stages of an experiment have to run, and running them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX
from common.locks import LOCK_NAME
from common.shards import NOTES_NAME
from common.signals import STOP_SIGNALS
from pipeline.child import Torchrun, run_stage
from pipeline.code_closure import code_of
from pipeline.records import (
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    Basis,
    Experiment,
    Part,
    Record,
    Sitting,
    find,
    matches,
)
from pipeline.stage import MADE_BY, PathResolver, Stage

SKIP, CONTINUE, RUN, LEAVE = "skip", "continue", "run", "leave"
NOT_RUN = "it has not been run yet"
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_OF_CLOCKS = 2  # by which times of files may be off
EARLIER = "_earlier"  # behind the name of a folder that is set aside
MODULE_ROOMS = ("maze", "attribution", "generative")  # whose scripts are run as modules


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether to run, continue or skip a stage, and why.

    Attributes:
        action: SKIP, CONTINUE, RUN (from its start) or LEAVE (it was not asked for).
        basis: None where it is not known yet.
    """

    action: str
    why: str
    basis: Basis | None = None


@dataclasses.dataclass(frozen=True)
class StageOutcome:
    """Result of a stage in this call."""

    stage: Stage
    decision: Decision
    status: int
    record: Record | None


class Pipeline:
    """The stages of an experiment, in their order, over its output folder.

    Args:
        stages: all of them.
        chosen: names of those that were asked for.
        hyperparams: contents of the YAML files of parameters that the stages were made from;
            their scripts get the same.
        force: run these again, whatever their records say.
        check_contents: read every file, even if size and time of change are as they were.
        part: of a stage that a job of a cluster does, which is the only one chosen then; other
            jobs may run other stages meanwhile.
    """

    def __init__(self, experiment: Experiment, stages: Sequence[Stage], places: PathResolver,
                 chosen: set[str], hyperparams: dict[Path, dict], force: bool = False,
                 check_contents: bool = False, part: Part | None = None):
        self.experiment, self.stages, self._places = experiment, stages, places
        self._chosen, self._force, self._hyperparams = chosen, force, hyperparams
        self._part, self.received = part, []  # signals that asked to stop
        self._digests = experiment.digests(check_contents, part.name if part else "")
        # As it is now: the process that stages are forked from imports it when the first begins.
        self._code = code_of({stage.script for stage in stages})

    def plan(self) -> Iterator[tuple[Stage, Decision]]:
        """Decide about every stage, without running any.

        What a stage that would run will write is not known, so all that reads it is said to run,
        too; it is skipped after all if the contents come out the same.
        """
        unsettled: dict[str, str] = {}  # stages that would run, and how
        for stage in self.stages:
            source = next((name for name in self.sources(stage) if name in unsettled), None)
            if stage.name not in self._chosen:
                decision = Decision(LEAVE, "not asked for")
            elif source is not None:
                decision = Decision(
                    RUN, NOT_RUN if self.experiment.record(stage.name) is None else
                    f"it reads what {source} writes, which would be {unsettled[source]}")
            else:
                decision = self.decide(stage)
            if decision.action in (RUN, CONTINUE):
                unsettled[stage.name] = ("made again" if decision.action == RUN
                                         else "completed")
            yield stage, decision

    def run(self) -> Iterator[StageOutcome]:
        """Do it; ends with the first stage that does not finish.

        Raises:
            UserError: if a file that no stage has written lies where one would be made again.
        """
        for stage, decision in self.plan():  # before the work, not hours later
            if decision.action == RUN:
                self._check_files(stage)
        for stage in self.stages:
            if stage.name not in self._chosen:
                yield StageOutcome(stage, Decision(LEAVE, "not asked for"), 0,
                              self.experiment.record(stage.name))
                continue
            decision = self.decide(stage)
            if decision.action == SKIP:
                print(f"\n{stage.name}: skipped, {decision.why}", flush=True)
                yield StageOutcome(stage, decision, 0, self.experiment.record(stage.name))
                continue
            status = self._run(stage, decision)
            yield StageOutcome(stage, decision, status, self.experiment.record(stage.name))
            if status:
                return
        self._digests.save()

    def run_part(self, job: str, torchrun: Torchrun | None = None) -> int:
        """Do the part of its stage that a job has got, unless that is done; returns the status.

        Of the jobs of an array the first one decides whether the stage begins from its start. A
        shard has a ``Sitting`` instead of a record; the job that joins them completes the record.

        Args:
            job: its number at the scheduler.
            torchrun: how the script runs in several processes.

        Raises:
            UserError: if shards are to be joined that are not done, or what is read is not there.
        """
        part, last = self._part, self.experiment.sitting(self._part)
        now = Sitting(job, last.number + 1 if last is not None and last.job == job else 1,
                      socket.gethostname(), _now(), RUNNING, None, part.shards, "", 0.0)
        (stage,) = (stage for stage in self.stages if stage.name == part.stage)
        try:
            if part.shard:
                now = self._run_shard(stage, now)
            else:
                self.experiment.save_sitting(part, now)
                status = self._run_whole(stage, torchrun)
                now = dataclasses.replace(now, status=_meaning(status), exit_status=status)
        except BaseException as error:
            now = dataclasses.replace(now, status=FAILED,
                                      exit_status=2 if isinstance(error, UserError) else 1)
            raise
        finally:
            self.experiment.save_sitting(part, now)
        return now.exit_status

    def _run_whole(self, stage: Stage, torchrun: Torchrun | None) -> int:
        part, decision = self._part, self.decide(stage)
        if decision.action == SKIP:
            print(f"{stage.name}: skipped, {decision.why}", flush=True)
            return 0
        if part.shards:
            lacking = {shard.shard for shard in part.of_shards()} - self.experiment.shards_done(
                stage.name, part.shards, decision.basis.key)
            if decision.action != CONTINUE or lacking:
                why = (f"shard {min(lacking)} of {part.shards} is not done" if lacking
                       else decision.why)
                raise UserError(f"the shards of {stage.name} cannot be joined: {why}; submit the "
                                "stage again")
        return self._run(stage, decision, torchrun)

    def _run_shard(self, stage: Stage, now: Sitting) -> Sitting:
        """Run or continue a shard; returns its sitting."""
        part = self._part
        with self.experiment.beginning(stage.name):
            decision = self.decide(stage)
            if decision.action != SKIP:
                argv, record = self._begin(stage, decision)
            self._digests.save()
            last = self.experiment.sitting(part)  # none if the stage has just begun
        now = dataclasses.replace(now, key=decision.basis.key)
        if last is not None and (last.shards, last.key) == (now.shards, now.key):
            now = dataclasses.replace(now, seconds=last.seconds)
        else:
            last = None
        if decision.action == SKIP or (last is not None and last.status == DONE):
            print(f"{part.name}: skipped, it is done", flush=True)
            return dataclasses.replace(now, status=DONE, exit_status=0)
        self.experiment.save_sitting(part, now)
        verb = "runs" if last is None else "continues"
        status, seconds = self._say_and_run(stage, verb, record.why, argv)
        return dataclasses.replace(now, status=_meaning(status), exit_status=status,
                                   seconds=round(now.seconds + seconds, 1))

    def accept(self) -> Iterator[str]:
        """Record that the chosen stages are valid as they are, without running them.

        A stage that was interrupted goes on when it is run next, in spite of what has changed.

        Yields:
            A sentence a stage.

        Raises:
            UserError: if one has not been run or lacks an output; then none is accepted.
        """
        accepted, now = [], _now()
        for stage in self.stages:
            if stage.name in self._chosen:
                decision = self.decide(stage)
                accepted.append((stage, decision, self._accepted(stage, decision, now)))
        for stage, decision, record in accepted:
            if decision.action == RUN:
                self.experiment.save(stage.name, record)
                what = "is valid now" if record.status == DONE else "can go on now"
                yield f"{stage.name} {what}, although {decision.why}"
            else:
                yield f"{stage.name} needs no --accept: {decision.why}"
        self._digests.save()

    def _accepted(self, stage: Stage, decision: Decision, now: str) -> Record:
        """The record of a stage as if it had been made of what is there now."""
        record = self.experiment.record(stage.name)
        if record is None:
            raise UserError(f"{stage.name} cannot be accepted: {NOT_RUN}")
        folder = self.experiment.path
        lacking = next((name for name in record.outputs if not (folder / name).is_file()), None)
        if record.status == DONE:
            lacking = lacking or _unmatched(folder, stage.outputs)
        if lacking:
            raise UserError(f"{stage.name} cannot be accepted: its output {lacking} is missing")
        record = dataclasses.replace(
            record, key=decision.basis.key, basis=decision.basis,
            why=f"{record.why}; accepted on {now} although {decision.why}")
        return self._with_outputs(stage, record) if record.status == DONE else record

    def decide(self, stage: Stage) -> Decision:
        """Compare the record of a stage with what it would be made of now.

        Raises:
            UserError: if something that it reads is not there.
        """
        record, basis = self.experiment.record(stage.name), self._basis(stage)
        if record is None:
            return Decision(RUN, NOT_RUN, basis)
        if self._force:
            return Decision(RUN, "of --force", basis)
        if record.key != basis.key:
            return Decision(RUN, basis.difference(record.basis), basis)
        if record.status != DONE:
            how = {RUNNING: "was interrupted", STOPPED: "was stopped"}.get(
                record.status, f"failed with exit status {record.exit_status}")
            return Decision(CONTINUE, f"an earlier run {how}", basis)
        for name, digest in record.outputs.items():
            path = self.experiment.path / name
            if not path.is_file():
                return Decision(RUN, f"its output {name} is missing", basis)
            if self._digests.of(path) != digest:
                return Decision(RUN, f"its output {name} is not as it left it", basis)
        return Decision(SKIP, f"valid since {record.date}", basis)

    def save_checksums(self) -> None:
        """Keep the checksums that deciding has taken."""
        self._digests.save()

    def command(self, stage: Stage) -> str:
        """The command line that does the same."""
        room = stage.script.partition(".")[0]
        script = (["-m", stage.script] if room in MODULE_ROOMS
                  else [f"{stage.script.replace('.', '/')}.py"])
        return shlex.join(["python", *script, *self._places.fill_in(stage.argv)])

    def sources(self, stage: Stage) -> list[str]:
        """The stages whose output a stage reads."""
        return [*stage.needs, *self._places.sources(stage.files)]

    def _basis(self, stage: Stage) -> Basis:
        inputs = {}
        for source, patterns in stage.needs.items():
            record = self.experiment.record(source)
            if record is None or record.status != DONE:
                raise UserError(f"{stage.name} reads what {source} writes, which is not finished; "
                                f"run {source} first, for example with --from {source}")
            lacking = _unmatched(self.experiment.path, patterns)
            if lacking:
                raise UserError(f"{stage.name} reads {lacking} in {self.experiment.path}, but "
                                f"there is none; make it again with --only {source}")
            inputs.update((str(path.relative_to(self.experiment.path)), self._digests.of(path))
                          for path in find(self.experiment.path, patterns))
        for name, path in self._places.files(stage.files):
            inputs[name] = self._digests.of(path)
        code = self._code[stage.script]
        return Basis(stage.script, stage.argv, stage.parameters, inputs, code.modules,
                     code.versions)

    def _run(self, stage: Stage, decision: Decision, torchrun: Torchrun | None = None) -> int:
        """Run or continue a stage, with its record before and after; returns its status."""
        experiment, part = self.experiment, self._part
        argv, record = self._begin(stage, decision)
        if part is not None and part.shards:
            sittings = map(experiment.sitting, part.of_shards())
            record = dataclasses.replace(record, seconds=sum(each.seconds for each in sittings))
        verb = "continues" if decision.action == CONTINUE else "runs"
        status, seconds = self._say_and_run(stage, verb, record.why, argv, torchrun)
        record = dataclasses.replace(record, exit_status=status, status=_meaning(status),
                                     seconds=round(record.seconds + seconds, 1))
        if status == 0:
            record = self._with_outputs(stage, record)
        experiment.save(stage.name, record)
        if status == 0 and record.earlier:
            self._remove_earlier(stage, record)
            experiment.save(stage.name, dataclasses.replace(record, earlier=()))
        self._digests.save()
        return status

    def _files_of(self, stage: Stage) -> list[Path]:
        """All files and links where a stage writes, hidden ones included."""
        found = [inner for path in matches(self.experiment.path, stage.clears or stage.outputs)
                 for inner in (path, *(() if path.is_symlink() else path.rglob("*")))]
        return [path for path in found if path.is_symlink() or not path.is_dir()]

    def _check_files(self, stage: Stage) -> None:
        """See that the stages have written all that is cleared when one begins from its start.

        What an unfinished stage has written is not recorded; it was changed while that ran.

        Raises:
            UserError: naming another file.
        """
        experiment = self.experiment
        own = experiment.recorded_outputs()
        for each in self.stages:
            record = experiment.record(each.name)
            if record is not None and record.status != DONE:
                begun = record.begun - SECONDS_OF_CLOCKS
                end = experiment.last_at_work(each.name) + SECONDS_OF_CLOCKS
                own.update(path for path in self._files_of(each)
                           if begun <= path.lstat().st_mtime <= end)
        for path in self._files_of(stage):
            name = path.relative_to(experiment.path)
            temporary = any(part.startswith(".") and (
                TEMPORARY_SUFFIX in part or part == LOCK_NAME or part.startswith(NOTES_NAME))
                for part in name.parts)
            if path.is_symlink() or not (temporary or path in own):
                raise UserError(f"{path} was not written by the pipeline, and {stage.name} would "
                                "delete it when it runs again; move it elsewhere")

    def _set_aside(self, stage: Stage, last: Record | None) -> Sequence[str]:
        """Rename what an earlier training has left, until its successor is complete.

        Returns:
            The names of the files that are set aside, now or before.

        Raises:
            UserError: if there is no room for them.
        """
        folder = self.experiment.path
        found = [path for path in matches(folder, stage.clears) if path.is_dir()]
        if last is None or last.status != DONE or not found or stage.name not in MADE_BY.values():
            return last.earlier if last is not None else ()
        self._remove_earlier(stage, last)  # of a run that was killed when it was complete
        moves = [(path, path.with_name(f"{path.name}{EARLIER}")) for path in found]
        for _, aside in moves:
            if aside.is_symlink() or aside.exists():
                raise UserError(f"{aside} is where {stage.name} sets aside what it made before; "
                                "move it elsewhere")
        names = [str(aside.relative_to(folder) / file.relative_to(path)) for path, aside in moves
                 for file in path.rglob("*") if file.is_file()]
        self.experiment.save(stage.name, dataclasses.replace(last, earlier=tuple(names)))
        for path, aside in moves:
            os.rename(path, aside)
            print(f"{stage.name}: what it made before is kept in {aside} until the new training "
                  "is complete", flush=True)
        return names

    def _remove_earlier(self, stage: Stage, record: Record) -> None:
        """Delete the files of an earlier training, but no others that lie beside them."""
        folder = self.experiment.path
        for name in stage.clears:
            aside = folder / f"{name}{EARLIER}"
            if aside.is_symlink():
                continue
            for path in sorted(aside.rglob("*"), reverse=True):  # files before their folders
                if str(path.relative_to(folder)) in record.earlier:
                    path.unlink()
                elif path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
                    path.rmdir()
            with contextlib.suppress(OSError):  # it is not empty, or not there
                aside.rmdir()

    def _begin(self, stage: Stage, decision: Decision) -> tuple[list[str], Record]:
        """Say in its record that a stage runs, and clear what it makes from its start.

        Returns:
            The flags of its script, and the record.

        Raises:
            UserError: if a file that no stage has written would be cleared.
        """
        experiment = self.experiment
        argv, earlier = self._places.fill_in(stage.argv), 0.0
        continued, last = None, experiment.record(stage.name)
        begun, set_aside = time.time(), last.earlier if last is not None else ()
        if decision.action == CONTINUE:
            earlier = last.seconds
            continued = stage.continued(argv, experiment.path)
            if experiment.has_shards(stage.name) and not (self._part and self._part.shards):
                continued = None  # what shards have made goes on in as many alone
        if continued is None:
            self._check_files(stage)
            set_aside = self._set_aside(stage, last)
            _remove(experiment.path, stage.clears or stage.outputs)
            experiment.forget_shards(stage.name)
        else:
            begun = last.begun
        record = Record(RUNNING, decision.basis.key, decision.basis, {}, earlier, 0, "", None,
                        self._log_of(stage), _now(), decision.why, begun, tuple(set_aside))
        if decision.action == CONTINUE and self._part is not None and self._part.shards:
            record = dataclasses.replace(record, why=last.why)
        experiment.save(stage.name, record)
        more = self._part.argv if self._part is not None else ()
        return [*(argv if continued is None else continued), *more], record

    def _log_of(self, stage: Stage) -> str:
        return self.experiment.log_name(self.stages.index(stage) + 1,
                                        self._part.name if self._part else stage.name)

    def _say_and_run(self, stage: Stage, verb: str, why: str, argv: list[str],
                     torchrun: Torchrun | None = None) -> tuple[int, float]:
        """Run a stage's script, or a part of its work; returns its status and its seconds."""
        name = self._part.name if self._part else stage.name
        print(f"\n{name}: {verb}, because {why}", flush=True)
        begin, log = time.monotonic(), self.experiment.path / self._log_of(stage)
        status = self._run_script(stage.script, argv, log, torchrun)
        if status:
            what = ("was stopped" if _meaning(status) == STOPPED else
                    f"failed (exit status {status})")
            print(f"{name} {what}; its log is {log}", file=sys.stderr)
        return status, time.monotonic() - begin

    def _with_outputs(self, stage: Stage, record: Record) -> Record:
        folder = self.experiment.path
        lacking = _unmatched(folder, stage.outputs)
        if lacking:
            raise RuntimeError(f"{stage.name} has written nothing that matches {lacking}")
        files = find(folder, stage.outputs)
        return dataclasses.replace(
            record, outputs={str(path.relative_to(folder)): self._digests.of(path)
                             for path in files},
            bytes=sum(path.stat().st_size for path in files), result=stage.result(folder))

    def _run_script(self, module: str, argv: list[str], log_file: Path,
                    torchrun: Torchrun | None = None) -> int:
        """Run a script's ``main`` in a process of its own, showing its log as it grows.

        Returns:
            Its exit status; 128 + the signal's number if a signal ended it.
        """
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(log_file, "a") as log:
            log.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {module} {shlex.join(argv)}\n")
        # The scripts are imported once; each stage is a fork of the process that has done it. The
        # signals of a cancelled job would end that process first, so a job does without.
        context = multiprocessing.get_context("spawn" if self._part else "forkserver")
        context.set_forkserver_preload(sorted({stage.script for stage in self.stages
                                               if stage.name in self._chosen}))
        process = context.Process(target=run_stage, args=(self.experiment.path, module, argv,
                                                          log_file, self._hyperparams, torchrun))
        passed_on = signal.SIGTERM if self._part else None
        with open(log_file, "rb") as log, _passing_signals_to(process, passed_on) as received:
            log.seek(0, os.SEEK_END)
            process.start()
            if received:  # before there was a process to pass it on to
                os.kill(process.pid, passed_on or received[0])
            running = True
            while running:
                running = process.is_alive()
                sys.stdout.write(log.read().decode(errors="replace"))
                sys.stdout.flush()
                os.utime(log_file)  # says until when it was at work, even if this is killed
                process.join(SECONDS_BETWEEN_LOOKS)
        self.received += received
        status = process.exitcode
        if status < 0:
            print(f"{module} was ended by signal {-status}", file=sys.stderr)
        if torchrun is not None and status and received:  # torchrun has a status of its own then
            return 128 + signal.SIGTERM
        return 128 - status if status < 0 else status or (128 + received[0] if received else 0)


@contextlib.contextmanager
def _passing_signals_to(process: multiprocessing.Process,
                        as_signal: int | None = None) -> Iterator[list[int]]:
    """Hand the signals that ask to stop on to a process; they are noted in the list.

    Args:
        as_signal: what they become; None: they stay what they are.
    """
    received: list[int] = []

    def pass_on(number, _frame):
        received.append(number)
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, as_signal or number)

    previous = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def _meaning(status: int) -> str:
    """The status of a record, for a script's exit status."""
    return DONE if status == 0 else STOPPED if status > 128 else FAILED


def _unmatched(folder: Path, patterns: Sequence[str]) -> str | None:
    """The first pattern that no file matches, or None."""
    return next((pattern for pattern in patterns
                 if not pattern.startswith("!") and not find(folder, [pattern])), None)


def _remove(folder: Path, patterns: Sequence[str]) -> None:
    """Delete what matches, unfinished work in its folders included."""
    for path in reversed(matches(folder, patterns)):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
