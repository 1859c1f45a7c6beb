"""Command lines of Slurm and LSF, and what their answers say.

A job is told by SIGUSR1 that its time is nearly up, and by SIGTERM that it is cancelled.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from common.errors import UserError
from pipeline.cluster.config import ClusterConfig, Resources

TIME_IS_UP = signal.SIGUSR1
QUEUE_AGAIN = 75  # exit status of a job whose scheduler starts it again then
PENDING, RUNNING, ENDED = "queued", "running", "ended"
TASK = "@task@"  # in the words of a command, and safe in a shell: number of the array's task
SECONDS_TO_ANSWER = 120
# The schedulers' words for states. A job that is COMPLETING is about to end.
SLURM_WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
               "SPECIAL_EXIT")
SLURM_RUNS = ("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT",
              "STOPPED")
LSF_WAITS = ("PEND", "PROV", "PSUSP", "WAIT", "FWD_PEND")
LSF_RUNS = ("RUN", "USUSP", "SSUSP", "UNKWN")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, or an array of jobs, as it is submitted.

    Attributes:
        name: shown by the scheduler.
        command: the words of its command line; ``TASK`` may be in them.
        resources: of each job of the array.
        log: file for what it says.
        after: numbers of the jobs that it waits for.
        whatever: wait until these have ended; else until they have ended well.
        tasks: of the array, in order; empty if it is none.
    """

    name: str
    command: tuple[str, ...]
    resources: Resources
    log: Path
    after: tuple[str, ...] = ()
    whatever: bool = False
    tasks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A job, or one of an array, in the scheduler's list.

    Attributes:
        job: number of the job or of its array.
        task: of the array; 0 if it is none.
        state: PENDING, RUNNING or ENDED.
        word: the scheduler's own for the state, in small letters.
        why: it waits, or ""; the scheduler's words.
        never: it waits for what will not happen.
        time: that it has run, as the scheduler writes it.
        host: where it runs, or "".
    """

    job: str
    task: int
    state: str
    word: str
    why: str = ""
    never: bool = False
    time: str = ""
    host: str = ""


class Scheduler(abc.ABC):
    """A scheduler: the part that Slurm and LSF share."""

    name: ClassVar[str]
    program: ClassVar[str]  # that submits
    queue: ClassVar[tuple[str, ...]]  # command that lists the jobs, ended ones among them

    @abc.abstractmethod
    def submission(self, job: Job, config: ClusterConfig) -> list[str]:
        """The command that submits a job."""

    @abc.abstractmethod
    def number(self, answer: str) -> str | None:
        """The number of a submitted job; None if there is none in the answer."""

    @abc.abstractmethod
    def entries(self, answer: str) -> list[Entry]:
        """The jobs in the answer to ``queue``."""

    @abc.abstractmethod
    def cancelling(self, jobs: Sequence[str]) -> list[str]:
        """The command that cancels jobs."""

    @abc.abstractmethod
    def queue_again(self, job: str) -> int:
        """Let a job whose time is up begin again later.

        Returns:
            The exit status with which the job ends.
        """

    @abc.abstractmethod
    def own_job(self) -> str:
        """The number of the job that this process is."""

    def nothing_listed(self, answer: subprocess.CompletedProcess) -> bool:
        """Whether an answer to ``queue`` with a status other than 0 says that there are no jobs."""
        return False

    def is_here(self) -> bool:
        """Whether this machine has the scheduler's programs."""
        return shutil.which(self.program) is not None

    def check(self) -> None:
        """Raises:
            UserError: if the scheduler is not here.
        """
        if not self.is_here():
            raise UserError(f"there is no {self.program} on this machine; submit from one that "
                            f"belongs to a cluster with {self.name}")

    def listed(self) -> list[Entry]:
        """The jobs of this user that the scheduler still knows.

        Raises:
            UserError: if it does not answer.
        """
        answer = self._run(self.queue)
        if answer.returncode and not self.nothing_listed(answer):
            raise UserError(f"{self.queue[0]} says: {_said(answer)}")
        return self.entries(answer.stdout)

    def submit(self, job: Job, config: ClusterConfig) -> str:
        """Submit a job; returns its number.

        Raises:
            UserError: if it is refused.
        """
        answer = self._run(self.submission(job, config))
        number = None if answer.returncode else self.number(answer.stdout)
        if number is None:
            raise UserError(f"{self.program} refuses {job.name}: {_said(answer)}")
        return number

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs that wait; those that are gone already do no harm."""
        self._run(self.cancelling(jobs))

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess:
        self.check()
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            raise UserError(f"{command[0]} has not answered for {SECONDS_TO_ANSWER} seconds; try "
                            "again later") from None


class Slurm(Scheduler):
    """Slurm, as tried with 22.05; accounting is not needed."""

    name, program = "Slurm", "sbatch"
    queue = ("squeue", "--me", "--noheader", "--array", "--states=all",
             "--format=%i|%T|%M|%N|%r")

    def submission(self, job: Job, config: ClusterConfig) -> list[str]:
        asked = job.resources
        dependency = "afterany" if job.whatever else "afterok"
        return [
            "sbatch", "--parsable", f"--job-name={job.name}",
            f"--output={job.log}-{'%A_%a' if job.tasks else '%j'}.out", "--open-mode=append",
            f"--time={math.ceil(asked.seconds / 60)}", "--nodes=1", "--ntasks=1",
            f"--cpus-per-task={asked.cores}", f"--mem={asked.memory_gb}G",
            *([f"--gpus={asked.gpus}"] if asked.gpus else []),
            f"--signal=B:{TIME_IS_UP.name.removeprefix('SIG')}@{config.stop_seconds}", "--requeue",
            *([f"--array={','.join(map(str, job.tasks))}"] if job.tasks else []),
            *([f"--dependency={dependency}:{':'.join(job.after)}", "--kill-on-invalid-dep=yes"]
              if job.after else []),
            *config.slurm_options,
            f"--wrap=exec {_line(job.command, '$SLURM_ARRAY_TASK_ID')}"]

    def number(self, answer: str) -> str | None:
        match = re.match(r"(\d+)(;\S+)?\s*$", answer)  # a federation's cluster comes behind it
        return match[1] if match else None

    def entries(self, answer: str) -> list[Entry]:
        found = []
        for line in re.findall(r"^\d.*\|.*$", answer, re.MULTILINE):
            job, word, time, host, why = (part.strip() for part in line.split("|", 4))
            number, _, task = job.partition("_")
            state = (PENDING if word in SLURM_WAITS else RUNNING if word in SLURM_RUNS
                     else ENDED)
            waits = state == PENDING and why != "None"
            found.append(Entry(number, int(task) if task.isdecimal() else 0, state,
                               word.lower(), why if waits else "", "NeverSatisfied" in why, time,
                               host if state == RUNNING else ""))
        return found

    def cancelling(self, jobs: Sequence[str]) -> list[str]:
        return ["scancel", *jobs]

    def queue_again(self, job: str) -> int:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        if answer.returncode:
            print(f"scontrol does not start job {job} again: {_said(answer)}", flush=True)
        return 128 + signal.SIGTERM

    def own_job(self) -> str:
        array, task = (os.environ.get(f"SLURM_ARRAY_{each}_ID") for each in ("JOB", "TASK"))
        return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")


class Lsf(Scheduler):
    """LSF, by the manual of 10.1; tested on answers as it gives them, not on a cluster."""

    name, program = "LSF", "bsub"
    queue = ("bjobs", "-a", "-noheader", "-o",
             "jobid jobindex stat run_time first_host pend_reason delimiter='|'")

    def submission(self, job: Job, config: ClusterConfig) -> list[str]:
        asked, condition = job.resources, "ended" if job.whatever else "done"
        tasks = f"[{','.join(map(str, job.tasks))}]" if job.tasks else ""
        waits = " && ".join(f"{condition}({number})" for number in job.after)
        return [
            "bsub", "-J", f"{job.name}{tasks}",
            "-o", f"{job.log}-{'%J_%I' if job.tasks else '%J'}.out",
            "-W", str(math.ceil(asked.seconds / 60)), "-n", str(asked.cores),
            "-R", f"span[hosts=1] rusage[mem={asked.memory_gb}GB/host]",
            *(["-gpu", f"num={asked.gpus}"] if asked.gpus else []),
            "-wa", TIME_IS_UP.name.removeprefix("SIG"),
            "-wt", str(math.ceil(config.stop_seconds / 60)), "-r", "-Q", str(QUEUE_AGAIN),
            *(["-w", waits, "-ti"] if job.after else []),
            *config.lsf_options,
            f"exec {_line(job.command, '$LSB_JOBINDEX')}"]

    def number(self, answer: str) -> str | None:
        match = re.search(r"^Job <(\d+)> is submitted to ", answer, re.MULTILINE)
        return match[1] if match else None

    def entries(self, answer: str) -> list[Entry]:
        found = []
        for line in re.findall(r"^\d.*\|.*$", answer, re.MULTILINE):
            job, task, word, time, host, why = (part.strip() for part in line.split("|", 5))
            state = (PENDING if word in LSF_WAITS else RUNNING if word in LSF_RUNS
                     else ENDED)
            why = why if state == PENDING and why != "-" else ""
            found.append(Entry(job, int(task) if task.isdecimal() else 0, state, word.lower(), why,
                               "never satisfied" in why, "" if time == "-" else time,
                               host if state == RUNNING else ""))
        return found

    def nothing_listed(self, answer: subprocess.CompletedProcess) -> bool:
        return bool(re.match(r"No (unfinished )?job found", answer.stderr))

    def cancelling(self, jobs: Sequence[str]) -> list[str]:
        return ["bkill", *jobs]

    def queue_again(self, job: str) -> int:
        return QUEUE_AGAIN

    def own_job(self) -> str:
        job, task = os.environ.get("LSB_JOBID", ""), os.environ.get("LSB_JOBINDEX", "0")
        return job if task == "0" else f"{job}_{task}"


SCHEDULERS: dict[str, Scheduler] = {"slurm": Slurm(), "lsf": Lsf()}


def _line(words: Sequence[str], task: str) -> str:
    """Words as the shell reads them, with the variable that holds the array's task."""
    return shlex.join(words).replace(TASK, f'"{task}"')


def _said(answer: subprocess.CompletedProcess) -> str:
    """The words of a program in one line."""
    text = " ".join(f"{answer.stderr} {answer.stdout}".split())
    return (text or f"nothing, with exit status {answer.returncode}")[:500].rstrip(".")
