"""Submit the stages of an experiment as jobs, and report their status.

Files in the output folder::

    pipeline/submitted_<stage>.json   last submitted job of a stage
    logs/jobs/<stage>-<job>.out       output of a job; the output of the script is in the stage log
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from common.config import typed
from common.errors import UserError
from common.files import read_description, save_json
from pipeline.cluster import SCHEDULERS, TASK, ClusterConfig, Entry, Job
from pipeline.records import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOST,
    NOT_RUN,
    QUEUED,
    RUNNING,
    STOPPED,
    Experiment,
    JobAttempt,
    Part,
    Record,
)
from pipeline.report import duration, print_columns
from pipeline.runner import CONTINUE, SKIPPED, UP_TO_DATE, Decision, Pipeline
from pipeline.stage import Stage

REPORT = "report"  # name of the job that writes the page when all other jobs have ended
JOB_LOGS = Path("logs") / "jobs"
LONGEST = 70  # maximum number of characters shown of a log line


@dataclasses.dataclass(frozen=True)
class Submitted:
    """The last submitted job of a stage.

    Attributes:
        system: name of the scheduler, "slurm" or "lsf".
        job: ID of the job, or of the job array, in the scheduler.
        shards: number of shards of the stage; 0 if it is not divided.
        after: IDs of the jobs that it waits for.
    """

    system: str
    job: str
    shards: int = 0
    after: tuple[str, ...] = ()


def read_submitted(experiment: Experiment, stage: str) -> Submitted | None:
    """Return the submitted job of a stage; None if its file is missing or damaged."""
    try:
        return typed(Submitted, read_description(_submitted_file(experiment, stage)), stage)
    except UserError:
        return None


def _submitted_file(experiment: Experiment, stage: str) -> Path:
    return experiment.folder / f"submitted_{stage}.json"


def is_kept(submitted: Submitted, entries: Iterable[Entry], after: Iterable[str]) -> bool:
    """Return whether a submitted job need not be submitted again.

    A running job is kept. A queued job is kept if it waits for every unfinished stage that it
    reads, and can still be started; otherwise it would wait forever, or start too early.

    Args:
        submitted: the job.
        entries: the job, or the tasks of the job array, in the scheduler's list.
        after: IDs of the jobs of unfinished stages whose output the stage reads.
    """
    states = {entry.state for entry in entries}
    return RUNNING in states or (
        QUEUED in states and not any(entry.is_hopeless for entry in entries)
        and set(after) <= set(submitted.after))


class Submitter:
    """Submits the stages of an experiment as jobs with dependencies, or prints the commands.

    Args:
        pipeline: the stages and their records.
        command: first words of the command line of every job.
        system: name of the scheduler, "slurm" or "lsf".
        name: name of the experiment, the prefix of all job names.
        config: resource requests.
        dry_run: submit nothing and print the commands; <stage> stands for a job ID.
    """

    def __init__(self, pipeline: Pipeline, command: Sequence[str], system: str, name: str,
                 config: ClusterConfig, dry_run: bool = False):
        self._pipeline, self._experiment = pipeline, pipeline.experiment
        self._command, self._system, self._name = tuple(command), system, name
        self._config, self._scheduler, self._dry_run = config, SCHEDULERS[system], dry_run

    def submit(self) -> None:
        """Submit every selected stage that is neither valid nor queued nor running, and the report
        job, and print the jobs.

        Raises:
            UserError: if a job is refused; earlier jobs stay submitted.
        """
        plan = list(self._pipeline.plan())
        if not self._dry_run:
            self._pipeline.digests.save()
        earlier = {name: submitted for name in (*(stage.name for stage, _ in plan), REPORT)
                   if (submitted := read_submitted(self._experiment, name)) is not None
                   and submitted.system == self._system}
        entries = self._scheduler.list_jobs() if earlier and self._scheduler.is_here() else []
        jobs: dict[str, str] = {}  # IDs of the jobs of unfinished stages
        is_any = False
        for stage, decision in plan:
            after = [jobs[name] for name in dict.fromkeys(self._pipeline.sources(stage))
                     if name in jobs]
            submitted = earlier.get(stage.name)
            own = [entry for entry in entries if submitted and entry.job == submitted.job]
            if decision.action == UP_TO_DATE:
                print(f"{stage.name}: {decision.why}")
            elif submitted and is_kept(submitted, own, after):
                jobs[stage.name] = submitted.job
                runs = any(entry.state == RUNNING for entry in own)
                print(f"{stage.name}: {'runs' if runs else 'waits'} as job {submitted.job}")
            elif decision.action != SKIPPED:
                if submitted and any(entry.state == QUEUED for entry in own):
                    self._cancel(submitted.job)
                shards, tasks = self.shards_left(stage, decision, submitted)
                job = self.job(stage, shards, tasks, after)
                is_any, jobs[stage.name] = True, self._submit(stage.name, job, shards)
                print(f"{stage.name}: {'would be ' * self._dry_run}submitted as job "
                      f"{jobs[stage.name]}, because {decision.why}", flush=True)
        if is_any:
            if REPORT in earlier:
                self._cancel(earlier[REPORT].job)
            self._submit(REPORT, self.report_job([*jobs.values()]))
        print("run this again with --status to see their progress" if is_any else
              "nothing is left to submit")

    def shards_left(self, stage: Stage, decision: Decision,
                    submitted: Submitted | None) -> tuple[int, tuple[int, ...]]:
        """Return the number of shards of a stage, 0 if it is not divided, and the shards to submit.

        If all shards are complete, the last one is submitted again, because its job joins them.

        Args:
            stage: the stage.
            decision: decision of the pipeline about the stage.
            submitted: the stage's last submitted job, or None.
        """
        shards, done = self._config.resources(stage).shards, frozenset[int]()
        if decision.action == CONTINUE:
            if submitted and self._experiment.shard_files(stage.name):
                shards = submitted.shards  # the partial results are divided in this way
            done = self._experiment.shards_done(stage.name, shards, decision.key)
        if shards <= 1:
            return 0, ()
        return shards, tuple(sorted(set(range(1, shards + 1)) - done)) or (shards,)

    def job(self, stage: Stage, shards: int, tasks: tuple[int, ...], after: Sequence[str]) -> Job:
        """Return the job of a stage; or, for a divided stage, the job array of some shards.

        Args:
            stage: the stage.
            shards: number of its shards; 0 if it is not divided.
            tasks: shards to compute.
            after: IDs of the jobs that it waits for.
        """
        resources = self._config.resources(stage)
        argv = ["--only", stage.name, "--in_job", self._system,
                "--max_sittings", str(self._config.max_sittings)]
        if resources.processes > 1:
            argv += ["--processes", str(resources.processes),
                     "--seconds_to_stop", str(self._config.stop_seconds)]
        if shards:
            argv += ["--shard", f"{TASK}/{shards}"]
        return Job(self._job_name(stage.name), (*self._command, *argv), resources,
                   self._experiment.path / JOB_LOGS / stage.name, tuple(after), tasks=tasks)

    def report_job(self, after: Sequence[str]) -> Job:
        """Return the job that writes the report. It also runs if jobs that it waits for fail."""
        return Job(self._job_name(REPORT), (*self._command, "--report"),
                   dataclasses.replace(self._config.cpu, gpus=0),
                   self._experiment.path / JOB_LOGS / REPORT, tuple(after), whatever=True)

    def _job_name(self, name: str) -> str:
        return re.sub(r"[^\w.-]+", "_", f"{self._name}-{name}")

    def _submit(self, name: str, job: Job, shards: int = 0) -> str:
        """Submit a job and record it, or print the command; returns the job's ID."""
        if self._dry_run:
            print(f"    {shlex.join(self._scheduler.submission(job, self._config))}")
            return f"<{name}>"
        job.log.parent.mkdir(parents=True, exist_ok=True)
        number = self._scheduler.submit(job, self._config)
        save_json(_submitted_file(self._experiment, name), dataclasses.asdict(
            Submitted(self._system, number, shards, job.after)))
        return number

    def _cancel(self, job: str) -> None:
        if self._dry_run:
            print(shlex.join([self._scheduler.cancel, job]))
        else:
            self._scheduler.cancel_jobs([job])


# Status


def status_of(record: Record | None, submitted: Submitted | None,
              attempts: Sequence[JobAttempt], entries: Sequence[Entry], line: str,
              waits: bool) -> tuple[str, str, str]:
    """Return the state of a stage, its run time and its progress.

    ``pipeline.records`` lists the states. If a job has failed without a record, the progress is the
    scheduler's name for its state. NOT_RUN includes jobs that the scheduler has dropped because
    another stage did not succeed.

    Args:
        record: the stage's record, or None.
        submitted: the stage's last submitted job, or None.
        attempts: last attempts at the stage and at its shards.
        entries: the job, or the tasks of the job array, in the scheduler's list.
        line: last line of the stage's log.
        waits: whether the stage reads the output of an unfinished stage.
    """
    states = {entry.state for entry in entries}
    if record is not None and record.status == DONE and not states & {QUEUED, RUNNING}:
        return DONE, duration(record.seconds), record.result
    if submitted is None:
        if record is None:
            return NOT_RUN, "", line
        state = INTERRUPTED if record.status == RUNNING else record.status
        return state, duration(record.seconds), line
    progress = line
    if submitted.shards:
        done = sum(attempt.status == DONE for attempt in attempts if attempt.key)
        progress = f"{done} of {submitted.shards} shards done"
    if RUNNING in states:
        running = next(entry for entry in entries if entry.state == RUNNING)
        host = "" if submitted.shards else running.host
        return RUNNING, running.time, "; ".join(filter(None, [host, progress]))
    if QUEUED in states:
        reasons = sorted({entry.why for entry in entries})
        return QUEUED, "", "; ".join(filter(None, [
            progress if submitted.shards else "", *reasons]))
    own = {attempt.status for attempt in attempts
           if attempt.job.partition("_")[0] == submitted.job}
    for state in (FAILED, STOPPED):
        if state in own:
            return state, "", progress
    if bad := [entry.word for entry in entries if entry.state == FAILED]:
        return FAILED, "", "; ".join(filter(None, [bad[-1], progress]))
    if entries or (not own and waits):  # just ending, or dropped because a dependency failed
        return (INTERRUPTED if entries else NOT_RUN), "", progress if submitted.shards else ""
    return LOST, "", progress


def print_status(experiment: Experiment, stages: Sequence[Stage],
                 sources: Callable[[Stage], Sequence[str]]) -> None:
    """Print the status of every stage, from the records and a single query of the scheduler.

    Args:
        experiment: output folder with the records.
        stages: all stages, in order.
        sources: function that returns the stages whose output a stage reads.

    Raises:
        UserError: if the scheduler does not answer, or has lost a job.
    """
    jobs = {stage.name: read_submitted(experiment, stage.name) for stage in stages}
    listed = {system: SCHEDULERS[system].list_jobs()
              for system in {submitted.system for submitted in jobs.values() if submitted}}
    rows, lost = [("stage", "", "job", "time", "progress")], ""
    unfinished: set[str] = set()
    for number, stage in enumerate(stages, 1):
        submitted = jobs[stage.name]
        shards, job = (submitted.shards, submitted.job) if submitted else (0, "")
        whole = experiment.attempt(Part(stage.name, shards))
        attempts = [*experiment.shard_attempts(stage.name, shards).values(),
                    *([whole] if whole else [])]
        state, time, progress = status_of(
            experiment.record(stage.name), submitted, attempts,
            [entry for entry in listed[submitted.system] if entry.job == job] if submitted else [],
            last_line(experiment.path / f"logs/{number:02d}_{stage.name}.log"),
            bool(unfinished.intersection(sources(stage))))
        rows.append((stage.name, state, job, time, progress))
        if state != DONE:
            unfinished.add(stage.name)
        if submitted and state == LOST and not lost:
            lost = (f"{SCHEDULERS[submitted.system].name} does not list job {job} of the stage "
                    f"{stage.name}, which has not ended; --submit submits it again, and it is "
                    "resumed")
    print_columns(rows)
    if lost:
        raise UserError(lost)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, truncated; "" if there is none."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
    return textwrap.shorten(lines[-1], LONGEST, placeholder="...") if lines else ""
