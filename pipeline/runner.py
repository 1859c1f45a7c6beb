"""Decide which stages of an experiment must run, and run them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from common.errors import Stopped, UserError
from common.folders import is_temporary
from common.locks import LOCK_NAME
from common.shards import NOTES_NAME
from pipeline.code_closure import code_of
from pipeline.outputs import is_named
from pipeline.patterns import contents, find, matches, remove, unmatched
from pipeline.process import Script, Scripts, finish, step
from pipeline.records import (
    DONE,
    RUNNING,
    STOPPED,
    CacheKey,
    Experiment,
    JobAttempt,
    Part,
    Record,
    state_of_exit,
)
from pipeline.stage import MADE_BY, PathResolver, Stage

UP_TO_DATE, CONTINUE, RUN, SKIPPED = "up to date", "continue", "run", "skipped"
NOT_RUN = "it has not been run yet"
SECONDS_OF_CLOCKS = 2  # tolerance of modification times, for clocks that differ


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision whether to run, continue or skip a stage.

    Attributes:
        action: UP_TO_DATE, CONTINUE, RUN (from scratch) or SKIPPED (not selected).
        why: reason for the decision.
        basis: cache key of the stage; None if it is not known yet.
    """

    action: str
    why: str
    basis: CacheKey | None = None

    @property
    def key(self) -> str:
        """Digest of the cache key; "" if there is none."""
        return self.basis.key if self.basis else ""


NOT_SELECTED = Decision(SKIPPED, "not selected")


class Pipeline:
    """The stages of an experiment and their records in its output folder.

    Args:
        experiment: output folder with the records.
        stages: all stages, in order.
        places: resolver of placeholders in flags and file names.
        selected: names of the stages to run.
        hyperparams: contents of the YAML parameter files that the stages were created from; passed
            to their scripts.
        force: run the selected stages again even if their records are valid.
        check_contents: read every file, even if size and modification time are unchanged.
        part: part of the single selected stage that this cluster job runs; other jobs may run
            other stages at the same time.

    Attributes:
        digests: checksums of files.
        scripts: runner of the scripts.
    """

    def __init__(self, experiment: Experiment, stages: Sequence[Stage], places: PathResolver,
                 selected: set[str], hyperparams: dict[Path, dict], force: bool = False,
                 check_contents: bool = False, part: Part | None = None):
        self.experiment, self.stages, self._places = experiment, stages, places
        self._selected, self._force = selected, force
        self._part = part
        self.scripts = Scripts(experiment.path, hyperparams, None if part else sorted(
            {stage.script for stage in stages if stage.name in selected}))
        self.digests = experiment.digests(check_contents, part.name if part else "")
        # Read now: the fork server imports the code when the first stage starts.
        self._code = code_of({stage.script for stage in stages})

    def plan(self) -> Iterator[tuple[Stage, Decision]]:
        """Decide about every stage without running any.

        The output of a stage that would run is not known yet, so all stages that read it are
        planned to run as well; ``run`` skips them if the contents turn out to be unchanged.

        Yields:
            Each stage and its decision.
        """
        unsettled: dict[str, str] = {}  # stages that would run, and how their output changes
        for stage in self.stages:
            source = next((name for name in self.sources(stage) if name in unsettled), None)
            if stage.name not in self._selected:
                decision = NOT_SELECTED
            elif source is not None:
                decision = Decision(
                    RUN, NOT_RUN if self.experiment.record(stage.name) is None else
                    f"it reads the output of {source}, which would be {unsettled[source]}")
            else:
                decision = self.decide(stage)
            if decision.action in (RUN, CONTINUE):
                unsettled[stage.name] = "written again" if decision.action == RUN else "completed"
            yield stage, decision

    def run(self, parallel: int = 1) -> Iterator[tuple[Stage, Decision, int]]:
        """Run the selected stages that are not up to date, until one fails or is stopped.

        A stage starts as soon as the stages whose output it reads have finished.

        Args:
            parallel: number of stages that run at the same time. If one fails, the others are
                finished.

        Yields:
            Each stage, its decision, and its exit status, which is 0 if it was not run.

        Raises:
            Stopped: if a signal came when no stage was running.
            UserError: if a stage would delete a file that no stage has written, or an input is
                missing.
        """
        for stage, decision in self.plan():  # check before any work, not hours later
            if decision.action == RUN:
                self._check_files(stage)
        waiting, has_failed = list(self.stages), False
        running: dict[str, tuple[Stage, Decision, Script]] = {}
        with self.scripts.handled():
            try:
                while running or waiting:
                    is_stopping = has_failed or bool(self.scripts.received)
                    if is_stopping and not running:
                        break
                    unfinished = {*running, *(stage.name for stage in waiting)}
                    ready = None if is_stopping or len(running) == parallel else next(
                        (stage for stage in waiting if unfinished.isdisjoint(
                            self.sources(stage))), None)
                    if ready is not None:
                        waiting.remove(ready)
                        decision = (self.decide(ready) if ready.name in self._selected
                                    else NOT_SELECTED)
                        if decision.action in (RUN, CONTINUE):
                            running[ready.name] = ready, decision, self._run(
                                ready, decision, name=ready.name if parallel > 1 else "")
                            continue
                        if decision.action == UP_TO_DATE:
                            print(f"\n{ready.name}: up to date, {decision.why}", flush=True)
                        yield ready, decision, 0
                    for stage, decision, script in list(running.values()):
                        status = step(script)
                        if status is not None:
                            del running[stage.name]
                            has_failed = has_failed or status != 0
                            yield stage, decision, status
            finally:  # after an error, the other stages are finished and recorded
                for _, _, script in running.values():
                    finish(script)
        self.digests.save()
        if self.scripts.received and not has_failed:
            raise Stopped(128 + self.scripts.received[0])

    def run_part(self, job: str, torchrun: Sequence[str] | None = None) -> int:
        """Run this job's part of a stage, unless it is complete; returns the exit status.

        The first job of an array decides whether the stage starts from scratch. The result of a
        shard is stored in its ``JobAttempt``. The job that completes the last shard joins them,
        which completes the record of the stage.

        Args:
            job: ID of the job in the scheduler.
            torchrun: arguments from ``torchrun_arguments``; None for a single process.

        Raises:
            UserError: if an input is missing.
        """
        assert self._part is not None
        part, last = self._part, self.experiment.attempt(self._part)
        attempt = JobAttempt(job, last.number + 1 if last is not None and last.job == job else 1,
                             RUNNING, part.shards)
        (stage,) = (stage for stage in self.stages if stage.name == part.stage)
        if not part.shard:
            return self._run_whole(stage, attempt, torchrun)
        status, is_last = self._run_shard(stage, attempt)
        if not is_last:
            return status
        self._part = Part(stage.name, part.shards)
        with self.experiment.opened_by_job(self._part.name):
            return self._run_whole(stage, attempt)

    def _run_whole(self, stage: Stage, attempt: JobAttempt,
                   torchrun: Sequence[str] | None = None) -> int:
        """Run a stage that is not divided, or join its shards; returns the exit status."""
        assert self._part is not None
        self.experiment.save_attempt(self._part, attempt)
        status = 2
        try:
            decision = self.decide(stage)
            if decision.action == UP_TO_DATE:
                print(f"{stage.name}: up to date, {decision.why}", flush=True)
                status = 0
            else:
                with self.scripts.handled():
                    status = finish(self._run(stage, decision, torchrun))
        finally:
            self.experiment.save_attempt(self._part, dataclasses.replace(
                attempt, status=state_of_exit(status)))
        return status

    def _run_shard(self, stage: Stage, attempt: JobAttempt) -> tuple[int, bool]:
        """Run or continue a shard, unless it is complete.

        Args:
            stage: the stage.
            attempt: record of this attempt.

        Returns:
            The exit status, and whether this was the last shard, so that all can be joined.
        """
        assert self._part is not None
        part, experiment = self._part, self.experiment
        with experiment.beginning(stage.name):
            decision = self.decide(stage)
            if decision.action == UP_TO_DATE:
                print(f"{stage.name}: up to date, {decision.why}", flush=True)
                return 0, False
            argv, record = self._begin(stage, decision)
            self.digests.save()
            last = experiment.attempt(part)  # None if the stage was just started from scratch
        if last is not None and (last.shards, last.key) != (part.shards, decision.key):
            last = None
        seconds = last.seconds if last is not None else 0.0
        attempt = dataclasses.replace(attempt, key=decision.key, seconds=seconds)
        if last is not None and last.status == DONE:
            print(f"{part.name}: skipped, it is done", flush=True)
            status = 0
        else:
            experiment.save_attempt(part, attempt)
            with self.scripts.handled():
                status, more = finish(self._run_script(
                    stage, "runs" if last is None else "continues", record, argv))
            attempt = dataclasses.replace(attempt, seconds=round(seconds + more, 1))
        with experiment.beginning(stage.name):  # exactly one of the shards is the last one
            experiment.save_attempt(part, dataclasses.replace(
                attempt, status=state_of_exit(status)))
            decision = self.decide(stage)
            done = experiment.shards_done(stage.name, part.shards, decision.key)
        return status, decision.action == CONTINUE and len(done) == part.shards

    def accept(self) -> Iterator[str]:
        """Mark the selected stages as valid in spite of changed code, parameters, flags or inputs,
        without running them.

        An interrupted stage is continued in its next run, in spite of the changes.

        Yields:
            One sentence per stage, for the user.

        Raises:
            UserError: if a stage has not been run or an output is missing; then no stage is
                accepted.
        """
        decisions = [(stage, self.decide(stage)) for stage in self.stages
                     if stage.name in self._selected]
        records = [self._accepted(stage, decision) for stage, decision in decisions]
        for (stage, decision), record in zip(decisions, records):
            if decision.action == RUN:
                self.experiment.save(stage.name, record)
                state = "is valid now" if record.status == DONE else "can be continued now"
                yield f"{stage.name} {state}, although {decision.why}"
            else:
                yield f"{stage.name} needs no --accept: {decision.why}"
        self.digests.save()

    def _accepted(self, stage: Stage, decision: Decision) -> Record:
        """Return the record of a stage, changed as if the stage had run with the current inputs.

        Raises:
            UserError: if the stage has not been run, or an output is missing.
        """
        record, folder = self.experiment.record(stage.name), self.experiment.path
        if record is None or decision.basis is None:
            raise UserError(f"{stage.name} cannot be accepted: {NOT_RUN}")
        missing = next((name for name in record.outputs if not (folder / name).is_file()), None)
        if missing:
            raise UserError(f"{stage.name} cannot be accepted: its output {missing} is missing")
        record = dataclasses.replace(
            record, key=decision.basis.key, basis=decision.basis,
            why=f"{record.why}; accepted on {_now()} although {decision.why}")
        return self._with_outputs(stage, record) if record.status == DONE else record

    def decide(self, stage: Stage) -> Decision:
        """Decide whether a stage must run: compare its record with its current cache key, and its
        output files with their recorded checksums.

        Returns:
            The decision RUN, CONTINUE (after an interrupted or failed run) or UP_TO_DATE, with the
            reason and the cache key.

        Raises:
            UserError: if an input is missing.
        """
        record, basis = self.experiment.record(stage.name), self._cache_key(stage)
        if record is None:
            return Decision(RUN, NOT_RUN, basis)
        if self._force:
            return Decision(RUN, "--force is given", basis)
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
            if self.digests.of(path) != digest:
                return Decision(RUN, f"its output {name} was changed", basis)
        return Decision(UP_TO_DATE, f"valid since {record.date}", basis)

    def command(self, stage: Stage) -> str:
        """Return the command line that runs the script of a stage as the pipeline runs it."""
        return shlex.join(["python", "-m", stage.script, *self._places.fill_in(stage.argv)])

    def sources(self, stage: Stage) -> list[str]:
        """Return the names of the stages whose output a stage reads."""
        return [*stage.needs, *self._places.sources(stage.files)]

    def _cache_key(self, stage: Stage) -> CacheKey:
        inputs: dict[str, Path] = {}
        folder = self.experiment.path
        for source, patterns in stage.needs.items():
            record = self.experiment.record(source)
            if record is None or record.status != DONE:
                raise UserError(
                    f"{stage.name} reads the output of {source}, which is not finished; run "
                    f"{source} first, for example with --from {source}")
            missing = unmatched(folder, patterns)
            if missing:
                raise UserError(f"{stage.name} reads {missing} in {folder}, but no file matches; "
                                f"run {source} again with --only {source}")
            inputs |= {str(path.relative_to(folder)): path for path in find(folder, patterns)}
        inputs |= dict(self._places.files(stage.files))
        digests = {name: self.digests.of(path) for name, path in inputs.items()}
        return CacheKey(stage.script, stage.argv, stage.parameters, digests,
                        *self._code[stage.script])

    def _run(self, stage: Stage, decision: Decision, torchrun: Sequence[str] | None = None,
             name: str = "") -> Script:
        """Run or continue a stage, and update its record; see ``Scripts.run``."""
        experiment = self.experiment
        argv, record = self._begin(stage, decision)
        if self._part is not None and self._part.shards:
            attempts = experiment.shard_attempts(stage.name, self._part.shards).values()
            record = dataclasses.replace(
                record, seconds=sum(attempt.seconds for attempt in attempts))
        verb = "continues" if decision.action == CONTINUE else "runs"
        status, seconds = yield from self._run_script(stage, verb, record, argv, torchrun, name)
        record = dataclasses.replace(record, exit_status=status, status=state_of_exit(status),
                                     seconds=round(record.seconds + seconds, 1))
        if status == 0:
            record = self._with_outputs(stage, record)
        experiment.save(stage.name, record)
        self.digests.save()
        return status

    def _begin(self, stage: Stage, decision: Decision) -> tuple[list[str], Record]:
        """Record that a stage runs, and delete its outputs if it starts from scratch.

        Returns:
            Flags of the stage's script, and the new record.

        Raises:
            UserError: if a file would be deleted that no stage has written.
        """
        assert decision.basis is not None
        experiment, part = self.experiment, self._part
        is_divided = part is not None and part.shards > 0
        argv, continued = self._places.fill_in(stage.argv), None
        last, seconds, why, begun = experiment.record(stage.name), 0.0, decision.why, time.time()
        if decision.action == CONTINUE and last is not None:
            seconds = last.seconds
            if is_divided:
                why = last.why
            if is_divided or not experiment.shard_files(stage.name):
                # Partial results of shards can only be continued with the same number of shards.
                continued = stage.continued(argv, experiment.path)
        if continued is None:
            self._check_files(stage)
            if last is not None and last.status == DONE and stage.name in MADE_BY.values():
                self._set_aside(stage)
            remove(experiment.path, stage.clears or stage.outputs)
            for path in experiment.shard_files(stage.name):
                path.unlink(missing_ok=True)
        elif last is not None:
            begun = last.begun
        log = f"logs/{self.stages.index(stage) + 1:02d}_{part.name if part else stage.name}.log"
        record = Record(RUNNING, decision.basis.key, decision.basis, {}, seconds, 0, "", None, log,
                        _now(), why, begun)
        experiment.save(stage.name, record)
        return [*(argv if continued is None else continued), *(part.argv if part else ())], record

    def _run_script(self, stage: Stage, verb: str, record: Record, argv: list[str],
                    torchrun: Sequence[str] | None = None, name: str = "",
                    ) -> Generator[None, None, tuple[int, float]]:
        """Run the script of a stage or a part; see ``_run`` and ``Scripts.run``.

        Args:
            verb: "runs" or "continues", for the message.
            record: record of the run.

        Returns:
            The exit status and the wall time in seconds.
        """
        title = self._part.name if self._part else stage.name
        print(f"\n{title}: {verb}, because {record.why}", flush=True)
        begin, log = time.monotonic(), self.experiment.path / record.log
        status = yield from self.scripts.run(stage.script, argv, log, torchrun, name)
        if status:
            result = ("was stopped" if state_of_exit(status) == STOPPED else
                      f"failed (exit status {status})")
            print(f"{title} {result}; its log is {log}", file=sys.stderr)
        return status, time.monotonic() - begin

    def _with_outputs(self, stage: Stage, record: Record) -> Record:
        folder = self.experiment.path
        missing = unmatched(folder, stage.outputs)
        if missing:
            raise UserError(f"{stage.name} has written no file that matches {missing}")
        files = find(folder, stage.outputs)
        return dataclasses.replace(
            record, outputs={str(path.relative_to(folder)): self.digests.of(path)
                             for path in files},
            bytes=sum(path.stat().st_size for path in files), result=stage.result(folder))

    # Deletion of the outputs of a stage that starts from scratch

    def _contents(self, stage: Stage) -> dict[Path, float]:
        """Return what a stage deletes when it starts from scratch, with modification times."""
        return contents(self.experiment.path, stage.clears or stage.outputs)

    def _check_files(self, stage: Stage) -> None:
        """Check that all files that a stage would delete were written by stages.

        Files of an unfinished stage are not recorded. They are recognised by their names, see
        ``pipeline.outputs``, and by modification times within the stage's run.

        Raises:
            UserError: if there is another file; the message names it.
        """
        experiment = self.experiment
        own = experiment.recorded_outputs()
        for other in self.stages:
            record = experiment.record(other.name)
            if record is not None and record.status != DONE and record.begun:
                begun = record.begun - SECONDS_OF_CLOCKS
                end = experiment.last_at_work(other.name) + SECONDS_OF_CLOCKS
                own.update(path for path, modified in self._contents(other).items()
                           if begun <= modified <= end
                           and is_named(other, experiment.path,
                                        path.relative_to(experiment.path)))
        for path in self._contents(stage):
            name = path.relative_to(experiment.path)
            is_state = is_temporary(name) or any(
                part == LOCK_NAME or part.startswith(NOTES_NAME) for part in name.parts)
            if path.is_symlink() or not (is_state or path in own):
                raise UserError(f"{path} was not written by the pipeline, and {stage.name} would "
                                "delete it when it runs again; move it elsewhere")

    def _set_aside(self, stage: Stage) -> None:
        """Rename the folder of a complete training run, so that the next run does not delete it."""
        for path in matches(self.experiment.path, stage.clears):
            aside = path.with_name(f"{path.name}_until_{datetime.datetime.now():%Y%m%d_%H%M%S}")
            os.rename(path, aside)
            print(f"{stage.name}: its earlier output is kept in {aside}", flush=True)


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
