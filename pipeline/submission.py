"""Submit the stages of an experiment as jobs, and report their status.

Files in the output folder::

    pipeline/submitted_<stage>.json   last submitted jobs of a stage
    logs/jobs/<stage>-<job>.out       output of a job; the output of the script is in the stage log
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from common.config import typed
from common.errors import UserError
from common.files import read_description, save_json
from pipeline.cluster import (
    ENDED,
    PENDING,
    RUNNING,
    SCHEDULERS,
    TASK,
    ClusterConfig,
    Entry,
    Job,
    Resources,
)
from pipeline.records import DONE, FAILED, STOPPED, Experiment, JobAttempt, Part, Record
from pipeline.records import RUNNING as INTERRUPTED
from pipeline.report import duration, print_columns
from pipeline.runner import CONTINUE, SKIPPED, UP_TO_DATE, Decision, Pipeline
from pipeline.stage import Stage

REPORT = "report"  # name of the job that writes the page when all others have ended
JOB_LOGS = Path("logs") / "jobs"
SETTLED, KEPT, LEFT, SUBMIT = "settled", "kept", "left", "submit"
LONGEST = 70  # maximum number of characters shown of a log line
_TAIL = 4000  # number of bytes read at the end of a log


@dataclasses.dataclass(frozen=True)
class SubmittedJob:
    """A submitted job or job array.

    Attributes:
        number: number in the scheduler.
        tasks: indices of the array tasks; empty for a single job.
        after: numbers of the jobs that it waits for.
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
        return self.jobs[-1].number

    @property
    def numbers(self) -> tuple[str, ...]:
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
        sources: stages whose output it reads.
        shards: number of shards to divide it into; 0 or 1 for an undivided stage.
        done: numbers of the shards that are already complete.
        submitted: jobs of an earlier submission; None if there are none.
        action: SETTLED: complete and valid; KEPT: its jobs are already queued or running; LEFT: not
            selected; SUBMIT: to be submitted.
        why: reason for the action.
        after: stages whose last job it waits for.
        tasks: numbers of the shards to compute.
        cancels: numbers of jobs to cancel first, because they would wait forever.
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
    alive = {entry.job for entry in entries if entry.state != ENDED}
    running = {entry.job for entry in entries if entry.state == RUNNING}
    hopeless = {entry.job for entry in entries if entry.never} & alive
    plans: dict[str, StagePlan] = {}
    last: dict[str, str] = {}  # number of the last job of a stage
    succeeded: set[str] = set()  # numbers of jobs
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
            # It waits for every stage that recomputes one of its inputs.
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


def shards_to_do(decision: Decision, shards: int, submitted: Submitted | None,
                 experiment: Experiment, stage: str) -> tuple[int, frozenset[int]]:
    """Return the number of shards of a stage, and the numbers of the complete shards.

    A stage that was started in shards is resumed with the same number of shards.

    Args:
        decision: decision of the pipeline about the stage.
        shards: requested number of shards.
        submitted: jobs of an earlier submission; None if there are none.
        experiment: output folder with the records.
        stage: name of the stage.
    """
    if decision.action != CONTINUE:
        return shards, frozenset()
    if submitted and experiment.shard_files(stage):
        shards = submitted.shards
    return shards, frozenset(experiment.shards_done(stage, shards, decision.key))


class Submitter:
    """Submitter of the stages of an experiment with their dependencies; can print the commands.

    Args:
        pipeline: the stages and their records.
        command: first words of the command line of every job.
        system: name of the scheduler, "slurm" or "lsf".
        name: name of the experiment, which job names begin with.
        config: resource requests.
    """

    def __init__(self, pipeline: Pipeline, command: Sequence[str], system: str, name: str,
                 config: ClusterConfig):
        self._pipeline, self._experiment = pipeline, pipeline.experiment
        self._command, self._system, self._name = tuple(command), system, name
        self._config, self._scheduler = config, SCHEDULERS[system]
        self._resources = {stage.name: config.resources(stage) for stage in pipeline.stages}

    def plan(self) -> list[StagePlan]:
        """Decide what to submit, from the records and the scheduler's list."""
        stages = []
        for stage, decision in self._pipeline.plan():
            submitted = read_submitted(self._experiment, stage.name)
            if submitted is not None and submitted.system != self._system:
                submitted = None
            shards, done = shards_to_do(decision, self._resources[stage.name].shards, submitted,
                                        self._experiment, stage.name)
            stages.append(StagePlan(stage.name, decision, tuple(self._pipeline.sources(stage)),
                                    shards, done, submitted))
        return plan_submission(
            stages, self._scheduler.list_jobs() if self._scheduler.is_here() else [])

    def submit(self, plans: Sequence[StagePlan]) -> None:
        """Submit the stages of a plan and the report job, and print the submitted jobs.

        Raises:
            UserError: if a job is refused; the message names the jobs that were submitted before.
        """
        submitted: list[str] = []
        useless = [number for plan in plans for number in plan.cancels]
        report = read_submitted(self._experiment, REPORT)
        if report and any(plan.action == SUBMIT for plan in plans):
            useless += report.numbers
        if useless:
            self._scheduler.cancel_jobs(useless)
        (self._experiment.path / JOB_LOGS).mkdir(parents=True, exist_ok=True)
        try:
            for plan in plans:
                if plan.action == SUBMIT:
                    numbers = self._submit(plan.name, plan.shards,
                                           self.jobs(plan, self._last_jobs(plan.after)))
                    submitted.append(f"{plan.name} ({', '.join(numbers)})")
                    print(f"{plan.name}: submitted as {_described(plan, numbers)}, because "
                          f"{plan.why}", flush=True)
                elif plan.action != LEFT:
                    print(f"{plan.name}: {plan.why}")
            if submitted:
                others = [plan.name for plan in plans if plan.action in (KEPT, SUBMIT)]
                self._submit(REPORT, 0, [self.report_job(self._last_jobs(others))])
        except UserError as error:
            raise UserError(f"{error}; " + (
                f"submitted before it: {', '.join(submitted)}; the same command submits the rest"
                if submitted else "nothing was submitted")) from None
        print("nothing is left to submit" if not submitted else
              "--status shows their progress, with the flags that were given here")

    def _submit(self, name: str, shards: int, jobs: list[Job]) -> list[str]:
        """Submit all jobs of a stage, or none if one is refused; each waits for its predecessor.

        Returns:
            The numbers of the jobs.
        """
        numbers: list[str] = []
        records = []
        for job in jobs:
            if numbers:
                job = dataclasses.replace(job, after=(numbers[-1],))
            try:
                numbers.append(self._scheduler.submit(job, self._config))
            except UserError:
                if numbers:
                    self._scheduler.cancel_jobs(numbers)
                raise
            records.append(SubmittedJob(numbers[-1], job.tasks, job.after))
        save_json(_submitted_file(self._experiment, name), dataclasses.asdict(
            Submitted(self._system, shards, tuple(records))))
        return numbers

    def show(self, plans: Sequence[StagePlan]) -> None:
        """Print what would be submitted, with the commands; <stage> stands for a job number."""
        kept = {plan.name for plan in plans if plan.action == KEPT}
        for plan in plans:
            if plan.action != SUBMIT:
                print(f"{plan.name}: {plan.why}")
                continue
            print(f"{plan.name} would be submitted: {plan.why}")
            if plan.cancels:
                print(f"    {shlex.join([self._scheduler.cancel, *plan.cancels])}")
            after = [*self._last_jobs([name for name in plan.after if name in kept]),
                     *(f"<{name}>" for name in plan.after if name not in kept)]
            for place, job in enumerate(self.jobs(plan, after)):
                if place:
                    job = dataclasses.replace(job, after=(f"<array of {plan.name}>",))
                print(f"    {shlex.join(self._scheduler.submission(job, self._config))}")

    def jobs(self, plan: StagePlan, after: Sequence[str]) -> list[Job]:
        """Return the jobs of a stage.

        They are a single job; or, for a divided stage, a job array for the remaining shards, if
        any, and a job that joins the shards. ``_submit`` makes the latter wait for the array.

        Args:
            plan: plan of the stage.
            after: numbers of the jobs that the first job waits for.
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
        """Return the job that writes the report, regardless of whether the others succeed."""
        return self._job(REPORT, ("--report",), dataclasses.replace(self._config.cpu, gpus=0),
                         after, whatever=True)

    def _job(self, name: str, argv: tuple[str, ...], resources: Resources, after: Sequence[str],
             tasks: tuple[int, ...] = (), whatever: bool = False) -> Job:
        return Job(re.sub(r"[^\w.-]+", "_", f"{self._name}-{name}"), (*self._command, *argv),
                   resources, self._experiment.path / JOB_LOGS / name, tuple(after), whatever,
                   tasks)

    def _last_jobs(self, stages: Iterable[str]) -> list[str]:
        return [submitted.last for stage in stages
                if (submitted := read_submitted(self._experiment, stage)) is not None]


def _described(plan: StagePlan, numbers: Sequence[str]) -> str:
    if not plan.shards:
        return f"job {numbers[0]}"
    if len(numbers) == 1:
        return f"job {numbers[0]}, which joins its {plan.shards} shards"
    tasks = ", ".join(map(str, plan.tasks))
    return f"jobs {numbers[0]} (shards {tasks} of {plan.shards}) and {numbers[1]}, which joins them"


# Status


def status_of(record: Record | None, submitted: Submitted | None,
              attempts: Sequence[JobAttempt], entries: Sequence[Entry], line: str,
              waits: bool) -> tuple[str, str, str]:
    """Return the state of a stage, its run time and its progress.

    The state is done, runs, waits, stopped, failed, was interrupted, ended, not run, lost (a job
    that has not ended is missing in the scheduler's list), not submitted, or the scheduler's name
    for the final state of the last job.

    Args:
        record: record of the stage; None if there is none.
        submitted: submitted jobs of the stage; None if there are none.
        attempts: last attempts of its jobs, shards first.
        entries: its submitted jobs in the scheduler's list.
        line: last line of its log.
        waits: whether a stage whose output it reads is unfinished.
    """
    waiting_or_running = [entry for entry in entries if entry.state != ENDED]
    progress = line
    if submitted and submitted.shards:
        done = sum(attempt.status == DONE and attempt.shards == submitted.shards
                   for attempt in attempts)
        progress = f"{min(done, submitted.shards)} of {submitted.shards} shards done"
    if record is not None and record.status == DONE and not waiting_or_running:
        return "done", duration(record.seconds), record.result
    running = [entry for entry in waiting_or_running if entry.state == RUNNING]
    if running:
        is_whole = submitted is None or not submitted.shards
        return "runs", running[0].time, "; ".join(filter(None, (
            running[0].host if is_whole else "", progress)))
    if waiting_or_running:
        reasons = {entry.why for entry in waiting_or_running if entry.state == PENDING} - {""}
        shards = progress if submitted and submitted.shards else ""
        return "waits", "", "; ".join(filter(None, (shards, *sorted(reasons))))
    if submitted is None:
        if record is None:
            return "not submitted", "", line
        state = "was interrupted" if record.status == INTERRUPTED else record.status
        return state, duration(record.seconds), line
    own = [attempt.status for attempt in attempts
           if attempt.job.partition("_")[0] in submitted.numbers]
    for status in (FAILED, STOPPED):
        if status in own:
            return status, "", progress
    bad = [entry.word for entry in entries if entry.word not in ("completed", "completing", "done")]
    if bad:
        return bad[-1], "", progress
    if entries or (not own and waits):  # just ending, or dropped because a dependency failed
        return "ended" if entries else "not run", "", progress if submitted.shards else ""
    return "lost", "", progress


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
            last_line(experiment.path / experiment.log_name(number, stage.name)),
            bool(unfinished.intersection(sources(stage))))
        rows.append((stage.name, state, ", ".join(numbers), time, progress))
        if state != "done":
            unfinished.add(stage.name)
        if submitted and state == "lost" and not lost:
            lost = (f"{SCHEDULERS[submitted.system].name} knows nothing of job "
                    f"{', '.join(numbers)} of the stage {stage.name}, which has not ended; "
                    "--submit submits it again, and it is resumed")
    print_columns(rows, right=(3,))
    if lost:
        raise UserError(lost)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log, truncated; "" if there is none."""
    if not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return line if len(line) <= LONGEST else f"{line[:LONGEST - 3]}..."
