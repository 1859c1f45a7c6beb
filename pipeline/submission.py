"""Submit the stages of an experiment as jobs, and report their status.

Files in the output folder::

    pipeline/submitted_<stage>.json   last submitted jobs of a stage
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
from pipeline.cluster import (
    SCHEDULERS,
    TASK,
    ClusterConfig,
    Entry,
    Job,
    Resources,
)
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
SETTLED, KEPT, LEFT, SUBMIT = "settled", "kept", "left", "submit"
LONGEST = 70  # maximum number of characters shown of a log line


@dataclasses.dataclass(frozen=True)
class SubmittedJob:
    """A submitted job or job array.

    Attributes:
        number: ID in the scheduler.
        tasks: indices of the array tasks; empty for a single job.
        after: IDs of the jobs that it waits for.
    """

    number: str
    tasks: tuple[int, ...]
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Submitted:
    """The jobs of a stage that were submitted together; the last one completes the stage.

    Attributes:
        system: name of the scheduler, "slurm" or "lsf".
        shards: number of shards of the stage; 0 if it is not divided.
        jobs: a single job, or a job array and the job that joins its shards.
    """

    system: str
    shards: int
    jobs: tuple[SubmittedJob, ...]

    @property
    def last(self) -> str:
        """ID of the last job, which completes the stage."""
        return self.jobs[-1].number

    @property
    def numbers(self) -> tuple[str, ...]:
        """IDs of all jobs."""
        return tuple(job.number for job in self.jobs)


def read_submitted(experiment: Experiment, stage: str) -> Submitted | None:
    """Return the submitted jobs of a stage; None if their file is missing or damaged."""
    try:
        return typed(Submitted, read_description(_submitted_file(experiment, stage)), stage)
    except UserError:
        return None


def _submitted_file(experiment: Experiment, stage: str) -> Path:
    return experiment.folder / f"submitted_{stage}.json"


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """State of a stage before a submission, and the planned action.

    Attributes:
        name: name of the stage.
        decision: decision of the pipeline about the stage.
        sources: stages whose output this stage reads.
        shards: number of shards to divide it into; 0 or 1 for an undivided stage.
        done: numbers of the shards that are already complete.
        submitted: jobs of an earlier submission; None if there are none.
        action: SETTLED (complete and valid), KEPT (its jobs are already queued or running), LEFT
            (not selected) or SUBMIT (to be submitted).
        why: reason for the action.
        after: stages whose last job this stage waits for.
        tasks: numbers of the shards to compute.
        cancels: IDs of jobs to cancel first, because they would wait forever.
    """

    name: str
    decision: Decision
    sources: tuple[str, ...]
    shards: int = 0
    done: frozenset[int] = frozenset()
    submitted: Submitted | None = None
    action: str = ""
    why: str = ""
    after: tuple[str, ...] = ()
    tasks: tuple[int, ...] = ()
    cancels: tuple[str, ...] = ()


def plan_submission(stages: Iterable[StagePlan], entries: Sequence[Entry]) -> list[StagePlan]:
    """Decide which stages to submit, and which jobs in the queue to keep.

    A running job is kept. A queued job is kept if all jobs that it waits for have succeeded, or are
    queued or running themselves; otherwise it would wait forever, and is replaced.

    Args:
        stages: state of every stage, in order.
        entries: jobs in the scheduler's list.
    """
    alive = {entry.job for entry in entries if entry.state in (QUEUED, RUNNING)}
    running = {entry.job for entry in entries if entry.state == RUNNING}
    hopeless = {entry.job for entry in entries if entry.never} & alive
    plans: dict[str, StagePlan] = {}
    last: dict[str, str] = {}  # ID of the last job of a stage
    succeeded: set[str] = set()  # IDs of jobs
    kept: set[str] = set()
    for stage in stages:
        submitted, why = stage.submitted, stage.decision.why
        numbers = set(submitted.numbers) if submitted else set()
        if stage.decision.action == UP_TO_DATE:
            succeeded |= numbers
            plans[stage.name] = dataclasses.replace(stage, action=SETTLED, why=why)
            continue
        jobs = [job for job in submitted.jobs if job.number in alive] if submitted else []
        if submitted and len(stage.done) == submitted.shards > 0:
            succeeded.add(submitted.jobs[0].number)
        own = {job.number for job in jobs}
        after = tuple(name for name in dict.fromkeys(stage.sources)
                      if name in plans and plans[name].action in (KEPT, SUBMIT))
        is_fine = not own & hopeless and all(
            set(job.after) <= succeeded | kept | own for job in jobs)
        if is_fine and submitted and jobs and jobs[0] == submitted.jobs[0]:
            # The first job must wait for every stage that recomputes one of its inputs.
            is_fine = {last.get(name, "to be submitted") for name in after} <= set(jobs[0].after)
        if submitted and submitted.last in own and (is_fine or own & running):
            why = (f"{'runs' if own & running else 'waits'} as job "
                   + ", ".join(sorted(own & running or own, key=int)))
            plans[stage.name] = dataclasses.replace(stage, action=KEPT, why=why)
            kept |= numbers
            last[stage.name] = submitted.last
        elif stage.decision.action == SKIPPED:
            plans[stage.name] = dataclasses.replace(stage, action=LEFT, why=why)
        else:
            shards = stage.shards if stage.shards > 1 else 0
            plans[stage.name] = dataclasses.replace(
                stage, action=SUBMIT, why=why, after=after, shards=shards,
                tasks=tuple(sorted(set(range(1, shards + 1)) - stage.done)),
                cancels=tuple(job.number for job in jobs))
    return list(plans.values())


class Submitter:
    """Submits the stages of an experiment as jobs with dependencies, or prints the commands.

    Args:
        pipeline: the stages and their records.
        command: first words of the command line of every job.
        system: name of the scheduler, "slurm" or "lsf".
        name: name of the experiment, the prefix of all job names.
        config: resource requests.
    """

    def __init__(self, pipeline: Pipeline, command: Sequence[str], system: str, name: str,
                 config: ClusterConfig):
        self._pipeline, self._experiment = pipeline, pipeline.experiment
        self._command, self._system, self._name = tuple(command), system, name
        self._config, self._scheduler = config, SCHEDULERS[system]
        self._resources = {stage.name: config.resources(stage) for stage in pipeline.stages}
        self._submitted: dict[str, Submitted] = {}

    def plan(self) -> list[StagePlan]:
        """Decide what to submit, from the records and, if jobs were submitted, the scheduler's
        list."""
        stages = []
        for stage, decision in self._pipeline.plan():
            submitted = read_submitted(self._experiment, stage.name)
            if submitted is not None and submitted.system != self._system:
                submitted = None
            shards, done = self._resources[stage.name].shards, frozenset[int]()
            if decision.action == CONTINUE:
                if submitted and self._experiment.shard_files(stage.name):
                    shards = submitted.shards  # the partial results are divided in this way
                done = self._experiment.shards_done(stage.name, shards, decision.key)
            stages.append(StagePlan(stage.name, decision, tuple(self._pipeline.sources(stage)),
                                    shards, done, submitted))
        is_asked = self._scheduler.is_here() and any(plan.submitted for plan in stages)
        return plan_submission(stages, self._scheduler.list_jobs() if is_asked else [])

    def submit(self, plans: Sequence[StagePlan], dry_run: bool = False) -> None:
        """Submit the stages of a plan and the report job, and print the jobs.

        Args:
            plans: result of ``plan``.
            dry_run: submit nothing and print the commands; <stage> stands for a job ID.

        Raises:
            UserError: if a job is refused; earlier jobs stay submitted.
        """
        hopeless = [number for plan in plans for number in plan.cancels]
        report = read_submitted(self._experiment, REPORT)
        is_any = any(plan.action == SUBMIT for plan in plans)
        if report and is_any:
            hopeless += report.numbers
        if hopeless and dry_run:
            print(shlex.join([self._scheduler.cancel, *hopeless]))
        elif hopeless:
            self._scheduler.cancel_jobs(hopeless)
        for plan in plans:
            if plan.action == SUBMIT:
                jobs = self.jobs(plan, self._last_jobs(plan.after))
                numbers = self._submit(plan.name, plan.shards, jobs, dry_run)
                print(f"{plan.name}: {'would be ' * dry_run}submitted as job "
                      f"{' and '.join(numbers)}, because {plan.why}", flush=True)
            elif plan.action != LEFT:
                print(f"{plan.name}: {plan.why}")
        if is_any:
            unfinished = [plan.name for plan in plans if plan.action in (KEPT, SUBMIT)]
            self._submit(REPORT, 0, [self.report_job(self._last_jobs(unfinished))], dry_run)
        print("run this again with --status to see their progress" if is_any else
              "nothing is left to submit")

    def _submit(self, name: str, shards: int, jobs: list[Job], dry_run: bool) -> tuple[str, ...]:
        """Submit all jobs of a stage, or none if one is refused; each waits for its predecessor.

        Args:
            name: name of the stage.
            shards: number of shards of the stage; 0 if it is not divided.
            jobs: jobs in the order of their execution.
            dry_run: print the commands instead of submitting the jobs.

        Returns:
            The IDs of the jobs.
        """
        records: list[SubmittedJob] = []
        for job in jobs:
            if records:
                job = dataclasses.replace(job, after=(records[-1].number,))
            number = f"<{name}>"
            if dry_run:
                print(f"    {shlex.join(self._scheduler.submission(job, self._config))}")
            else:
                job.log.parent.mkdir(parents=True, exist_ok=True)
                try:
                    number = self._scheduler.submit(job, self._config)
                except UserError:
                    if records:
                        self._scheduler.cancel_jobs([record.number for record in records])
                    raise
            records.append(SubmittedJob(number, job.tasks, job.after))
        submitted = self._submitted[name] = Submitted(self._system, shards, tuple(records))
        if not dry_run:
            save_json(_submitted_file(self._experiment, name), dataclasses.asdict(submitted))
        return submitted.numbers

    def jobs(self, plan: StagePlan, after: Sequence[str]) -> list[Job]:
        """Return the jobs of a stage: a single job; or, for a divided stage, a job array for the
        remaining shards, if any, and a job that joins the shards.

        ``_submit`` makes the joining job wait for the array.

        Args:
            plan: plan of the stage.
            after: IDs of the jobs that the first job waits for.
        """
        resources = self._resources[plan.name]
        argv: tuple[str, ...] = ("--only", plan.name, "--in_job", self._system, "--max_sittings",
                                 str(self._config.max_sittings))
        if resources.processes > 1:
            argv += ("--processes", str(resources.processes),
                     "--seconds_to_stop", str(self._config.stop_seconds))
        if not plan.shards:
            return [self._job(plan.name, argv, resources, after)]
        jobs = [self._job(plan.name, (*argv, "--shard", f"{TASK}/{plan.shards}"), resources, after,
                          tasks=plan.tasks)] if plan.tasks else []
        return [*jobs, self._job(f"{plan.name}_join", (*argv, "--join", str(plan.shards)),
                                 resources, () if jobs else after)]

    def report_job(self, after: Sequence[str]) -> Job:
        """Return the job that writes the report. It also runs if jobs that it waits for fail.

        Args:
            after: IDs of the jobs that it waits for.
        """
        return self._job(REPORT, ("--report",), dataclasses.replace(self._config.cpu, gpus=0),
                         after, whatever=True)

    def _job(self, name: str, argv: tuple[str, ...], resources: Resources, after: Sequence[str],
             tasks: tuple[int, ...] = (), whatever: bool = False) -> Job:
        return Job(re.sub(r"[^\w.-]+", "_", f"{self._name}-{name}"), (*self._command, *argv),
                   resources, self._experiment.path / JOB_LOGS / name, tuple(after), whatever,
                   tasks)

    def _last_jobs(self, stages: Iterable[str]) -> list[str]:
        jobs = (self._submitted.get(stage) or read_submitted(self._experiment, stage)
                for stage in stages)
        return [submitted.last for submitted in jobs if submitted is not None]


# Status


def status_of(record: Record | None, submitted: Submitted | None,
              attempts: Sequence[JobAttempt], entries: Sequence[Entry], line: str,
              waits: bool) -> tuple[str, str, str]:
    """Return the state of a stage, its run time and its progress.

    ``pipeline.records`` lists the states. If a job has failed without a record, the progress is the
    scheduler's name for its state. NOT_RUN includes jobs that the scheduler has dropped because
    another stage did not succeed.

    Args:
        record: record of the stage; None if there is none.
        submitted: submitted jobs of the stage; None if there are none.
        attempts: last attempts of the stage's jobs, shards first.
        entries: submitted jobs of the stage in the scheduler's list.
        line: last line of the stage's log.
        waits: whether the stage reads the output of an unfinished stage.
    """
    alive = [entry for entry in entries if entry.state in (QUEUED, RUNNING)]
    if record is not None and record.status == DONE and not alive:
        return DONE, duration(record.seconds), record.result
    is_divided = submitted is not None and submitted.shards > 0
    progress = line
    if submitted is not None and is_divided:
        done = [attempt for attempt in attempts
                if attempt.status == DONE and attempt.shards == submitted.shards]
        progress = f"{min(len(done), submitted.shards)} of {submitted.shards} shards done"
    running = [entry for entry in alive if entry.state == RUNNING]
    if running:
        hosts = [] if is_divided else [running[0].host]
        return RUNNING, running[0].time, "; ".join(filter(None, [*hosts, progress]))
    if alive:
        reasons = sorted({entry.why for entry in alive})
        return QUEUED, "", "; ".join(filter(None, [progress if is_divided else "", *reasons]))
    if submitted is None:
        if record is None:
            return NOT_RUN, "", line
        state = INTERRUPTED if record.status == RUNNING else record.status
        return state, duration(record.seconds), line
    own = [attempt.status for attempt in attempts
           if attempt.job.partition("_")[0] in submitted.numbers]
    for state in (FAILED, STOPPED):
        if state in own:
            return state, "", progress
    if bad := [entry.word for entry in entries if entry.state == FAILED]:
        return FAILED, "", "; ".join(filter(None, [bad[-1], progress]))
    if entries or (not own and waits):  # just ending, or dropped because a dependency failed
        return INTERRUPTED if entries else NOT_RUN, "", progress if is_divided else ""
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
        shards, numbers = (submitted.shards, submitted.numbers) if submitted else (0, ())
        parts = [*Part(stage.name, shards).of_shards(), Part(stage.name, shards)]
        attempts = [attempt for part in parts if (attempt := experiment.attempt(part)) is not None]
        state, time, progress = status_of(
            experiment.record(stage.name), submitted, attempts,
            [entry for entry in listed[submitted.system] if entry.job in numbers
             ] if submitted else [],
            last_line(experiment.path / f"logs/{number:02d}_{stage.name}.log"),
            bool(unfinished.intersection(sources(stage))))
        rows.append((stage.name, state, ", ".join(numbers), time, progress))
        if state != DONE:
            unfinished.add(stage.name)
        if submitted and state == LOST and not lost:
            lost = (f"{SCHEDULERS[submitted.system].name} does not list job "
                    f"{', '.join(numbers)} of the stage {stage.name}, which has not ended; "
                    "--submit submits it again, and it is resumed")
    print_columns(rows)
    if lost:
        raise UserError(lost)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, truncated; "" if there is none."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
    return textwrap.shorten(lines[-1], LONGEST, placeholder="...") if lines else ""
