"""Submitting the stages of an experiment: what has to be submitted, and doing it.

In the output folder lie::

    pipeline/submitted_<stage>.json   the jobs of a stage that were submitted last
    logs/jobs/<stage>-<job>.out       what a job said; what its stage said is in the stage's log
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.config import typed
from common.description import read_description
from common.errors import UserError
from common.files import save_json
from pipeline.cluster.config import ClusterConfig, Resources
from pipeline.cluster.schedulers import ENDED, RUNNING, TASK, Entry, Job, Scheduler
from pipeline.records import Experiment
from pipeline.runner import CONTINUE, LEAVE, SKIP, Decision

REPORT = "report"  # the job that writes the page when the others have ended
JOB_LOGS = Path("logs") / "jobs"
SETTLED, KEPT, LEFT, SUBMIT = "settled", "kept", "left", "submit"


@dataclasses.dataclass(frozen=True)
class SubmittedJob:
    """A job, or an array of jobs.

    Attributes:
        number: that the scheduler gave it.
        tasks: of the array; empty if it is none.
        after: numbers of the jobs that it waits for.
    """

    number: str
    tasks: tuple[int, ...]
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Submitted:
    """The jobs of a stage that were submitted together, the last of which completes it.

    Attributes:
        system: "slurm" or "lsf".
        shards: into which the stage is divided; 0 if it is not.
        jobs: one, or an array and what joins its shards.
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


class SubmittedFiles:
    """The files that tell which jobs were submitted, in the folder of an experiment."""

    def __init__(self, experiment: Experiment):
        self._folder = experiment.path / "pipeline"

    def read(self, stage: str) -> Submitted | None:
        """The jobs of a stage; None if there are none, or their file is damaged."""
        try:
            return typed(Submitted, read_description(self._file(stage)), stage)
        except UserError:
            return None

    def save(self, stage: str, submitted: Submitted) -> None:
        save_json(self._file(stage), dataclasses.asdict(submitted))

    def _file(self, stage: str) -> Path:
        return self._folder / f"submitted_{stage}.json"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a stage stands before anything is submitted.

    Attributes:
        name: of the stage.
        decision: what a run of the pipeline would do.
        sources: the stages that it reads from.
        shards: into how many it is to be divided; 1: not at all.
        done: the shards that are done already, of as many.
        submitted: its jobs of an earlier submission.
    """

    name: str
    decision: Decision
    sources: tuple[str, ...]
    shards: int = 1
    done: frozenset[int] = frozenset()
    submitted: Submitted | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """The action that is taken for a stage.

    Attributes:
        name: of the stage.
        action: SETTLED: it is done and valid; KEPT: its jobs wait or run already; LEFT: it was
            not asked for; SUBMIT.
        why: in words.
        after: stages whose last job it waits for.
        shards: into which it is divided; 0 if it is not.
        tasks: the shards that are to be done.
        cancels: numbers of jobs that wait in vain, and are cancelled before.
    """

    name: str
    action: str
    why: str
    after: tuple[str, ...] = ()
    shards: int = 0
    tasks: tuple[int, ...] = ()
    cancels: tuple[str, ...] = ()


def plan(standings: Iterable[Standing], entries: Sequence[Entry]) -> list[Step]:
    """Decide which stages are submitted, and which jobs are in the queue already.

    A job that runs is kept. One that waits is kept if all that it waits for has ended well, or
    waits or runs itself; else it would wait in vain, and is replaced.

    Args:
        standings: of every stage, in order.
        entries: the scheduler's list.
    """
    alive = {entry.job: entry for entry in entries if entry.state != ENDED}
    at_work = {entry.job for entry in entries if entry.state == RUNNING}
    hopeless = {entry.job for entry in alive.values() if entry.never}
    steps, last = {}, {}  # by stage; the number of its last job
    ended_well, kept = set(), set()  # numbers of jobs
    for each in standings:
        submitted, action = each.submitted, each.decision.action
        jobs = [job for job in submitted.jobs if job.number in alive] if submitted else []
        if action == SKIP:
            ended_well |= set(submitted.numbers) if submitted else set()
            steps[each.name] = Step(each.name, SETTLED, each.decision.why)
            continue
        if submitted and len(each.done) == submitted.shards > 0:
            ended_well.add(submitted.jobs[0].number)
        own = {job.number for job in jobs}
        after = tuple(name for name in dict.fromkeys(each.sources)
                      if name in steps and steps[name].action in (KEPT, SUBMIT))
        fine = not own & hopeless and all(set(job.after) <= ended_well | kept | own
                                          for job in jobs)
        if fine and jobs and jobs[0] == submitted.jobs[0]:  # it waits for all that it reads, too
            fine = {last.get(name, "to be submitted") for name in after} <= set(jobs[0].after)
        if own and submitted.last in own and (fine or own & at_work):
            numbers = ", ".join(sorted(own & at_work or own, key=int))
            verb = "runs" if own & at_work else "waits"
            steps[each.name] = Step(each.name, KEPT, f"{verb} as job {numbers}")
            kept |= set(submitted.numbers)
            last[each.name] = submitted.last
        elif action == LEAVE:
            steps[each.name] = Step(each.name, LEFT, each.decision.why)
        else:
            divided = each.shards if each.shards > 1 else 0
            steps[each.name] = Step(
                each.name, SUBMIT, each.decision.why, after, divided,
                tuple(sorted(set(range(1, divided + 1)) - each.done)),
                tuple(job.number for job in jobs))
    return list(steps.values())


@dataclasses.dataclass(frozen=True)
class JobMaker:
    """Makes the jobs of a stage.

    Attributes:
        name: of the experiment.
        command: words that begin the command line of every job.
        system: "slurm" or "lsf".
        config: what is asked for.
        folder: for what jobs say.
    """

    name: str
    command: tuple[str, ...]
    system: str
    config: ClusterConfig
    folder: Path

    def of_stage(self, step: Step, asked: Resources, after: Sequence[str]) -> list[Job]:
        """A job; or an array of jobs and one that joins their shards, which waits for the array
        once that has a number. Without shards to do there is no array."""
        command = (*self.command, "--only", step.name, "--in_job", self.system,
                   "--max_sittings", str(self.config.max_sittings))
        if asked.processes > 1:
            command += ("--processes", str(asked.processes),
                        "--seconds_to_stop", str(self.config.stop_seconds))
        if not step.shards:
            return [self._job(step.name, command, asked, after)]
        jobs = [self._job(step.name, (*command, "--shard", f"{TASK}/{step.shards}"), asked, after,
                          tasks=step.tasks)] if step.tasks else []
        return [*jobs, self._job(f"{step.name}_join", (*command, "--join", str(step.shards)),
                                 asked, () if jobs else after)]

    def of_report(self, asked: Resources, after: Sequence[str]) -> Job:
        """The job that writes the report, whatever has become of the others."""
        asked = dataclasses.replace(asked, gpus=0, processes=1)
        return self._job(REPORT, (*self.command, "--report"), asked, after, whatever=True)

    def _job(self, name: str, command: tuple[str, ...], asked: Resources, after: Sequence[str],
             **more) -> Job:
        shown = re.sub(r"[^\w.-]+", "_", f"{self.name}-{name}")
        return Job(shown, command, asked, self.folder / name, tuple(after), **more)


class Submitter:
    """Submits the jobs of a plan in order, or shows them.

    Args:
        resources: of each stage that is to be submitted, by name.
        of_report: what the job asks for that writes the report.
    """

    def __init__(self, scheduler: Scheduler, files: SubmittedFiles,
                 resources: dict[str, Resources], of_report: Resources, maker: JobMaker):
        self._scheduler, self._maker, self._files = scheduler, maker, files
        self._resources, self._of_report = resources, of_report

    def submit(self, steps: Sequence[Step]) -> None:
        """Submit, and say what was.

        Raises:
            UserError: if a job is refused; it says which ones were submitted before.
        """
        made: list[str] = []
        old_report = self._files.read(REPORT)
        vain = [number for step in steps for number in step.cancels]
        if any(step.action == SUBMIT for step in steps) and old_report:
            vain += old_report.numbers
        if vain:
            self._scheduler.cancel(vain)
        self._maker.folder.mkdir(parents=True, exist_ok=True)
        try:
            for step in steps:
                if step.action == SUBMIT:
                    after = self._after(step.after)
                    jobs = self._maker.of_stage(step, self._resources[step.name], after)
                    numbers = self._submit_stage(step, jobs)
                    made.append(f"{step.name} ({', '.join(numbers)})")
                    print(f"{step.name}: submitted as {_named(step, numbers)}, because {step.why}",
                          flush=True)
                elif step.action in (KEPT, SETTLED):
                    print(f"{step.name}: {step.why}")
            if made:
                job = self._maker.of_report(self._of_report, self._all(steps))
                self._save(REPORT, 0, [job], [self._scheduler.submit(job, self._maker.config)])
        except UserError as error:
            raise UserError(f"{error}; " + (
                f"submitted before it: {', '.join(made)}; the same command submits the rest"
                if made else "nothing was submitted")) from None
        print("nothing is left to submit" if not made else
              "--status shows what becomes of them, with the flags that were given here")

    def show(self, steps: Sequence[Step]) -> None:
        """Say what would be submitted, with the command lines; <stage> stands for a number."""
        for step in steps:
            if step.action != SUBMIT:
                print(f"{step.name}: {step.why}")
                continue
            print(f"{step.name} would be submitted: {step.why}")
            if step.cancels:
                print(f"    {shlex.join(self._scheduler.cancelling(step.cancels))}")
            waits_for = [self._files.read(name).last if other.action == KEPT else f"<{name}>"
                         for name in step.after for other in steps if other.name == name]
            jobs = self._maker.of_stage(step, self._resources[step.name], waits_for)
            if len(jobs) > 1:
                jobs[1] = dataclasses.replace(jobs[1], after=(f"<array of {step.name}>",))
            for job in jobs:
                print(f"    {shlex.join(self._scheduler.submission(job, self._maker.config))}")

    def _after(self, names: Iterable[str]) -> list[str]:
        return [self._files.read(name).last for name in names]

    def _all(self, steps: Sequence[Step]) -> list[str]:
        return self._after(step.name for step in steps if step.action in (KEPT, SUBMIT))

    def _submit_stage(self, step: Step, jobs: list[Job]) -> list[str]:
        """Submit the jobs of a stage, all or none."""
        numbers: list[str] = []
        for place, job in enumerate(jobs):
            if numbers:
                jobs[place] = job = dataclasses.replace(job, after=(numbers[-1],))
            try:
                numbers.append(self._scheduler.submit(job, self._maker.config))
            except UserError:
                if numbers:
                    self._scheduler.cancel(numbers)
                raise
        self._save(step.name, step.shards, jobs, numbers)
        return numbers

    def _save(self, name: str, shards: int, jobs: Sequence[Job], numbers: Sequence[str]) -> None:
        self._files.save(name, Submitted(self._maker.system, shards, tuple(
            SubmittedJob(number, job.tasks, job.after) for number, job in zip(numbers, jobs))))


def shards_to_do(decision: Decision, asked: int, submitted: Submitted | None,
                 experiment: Experiment, stage: str) -> tuple[int, frozenset[int]]:
    """Into how many shards a stage is divided, and which of them are done.

    What was begun in as many goes on in as many, whatever is asked for now.
    """
    if decision.action != CONTINUE:
        return asked, frozenset()
    shards = submitted.shards if submitted and experiment.has_shards(stage) else asked
    return shards, frozenset(experiment.shards_done(stage, shards, decision.basis.key))


def _named(step: Step, numbers: Sequence[str]) -> str:
    if not step.shards:
        return f"job {numbers[0]}"
    if len(numbers) == 1:
        return f"job {numbers[0]}, which joins its {step.shards} shards"
    tasks = ", ".join(map(str, step.tasks))
    return f"jobs {numbers[0]} (shards {tasks} of {step.shards}) and {numbers[1]}, which joins them"
