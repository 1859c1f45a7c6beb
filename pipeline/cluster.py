"""Cluster jobs: resource requests (``hyperparams/cluster.yml``), and commands of the schedulers.

A ``Scheduler`` object holds the commands that submit, list, cancel and requeue jobs. A job receives
SIGUSR1 when its time is nearly up, and SIGTERM when it is cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from common.options import parser_of
from pipeline.presets import PRESETS_FILE, SECTION, load_preset
from pipeline.records import DONE, FAILED, QUEUED, RUNNING
from pipeline.stage import HYPERPARAMS, TRAIN_AGENT, TRAIN_SIMULATOR, Stage
from pipeline.stage_files import all_stages

CLUSTER_FILE = HYPERPARAMS / "cluster.yml"
TRAINING = (TRAIN_AGENT, TRAIN_SIMULATOR)
_LEAST = {"memory_gb": 1, "cores": 1, "gpus": 0, "processes": 1, "shards": 1}

TIME_IS_UP = signal.SIGUSR1
TASK = "@task@"  # shell-safe placeholder in a command for the index of the array task
SECONDS_TO_ANSWER = 120


# Requests


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resource requests of one job of a stage.

    Attributes:
        time: time limit, such as "1 h 30 min".
        memory_gb: memory in GB.
        cores: number of CPU cores.
        gpus: number of GPUs.
        processes: number of processes of a training run; 1 for other stages.
        shards: number of jobs that the stage is divided into; if above 1, another job joins their
            results.
    """

    time: str
    memory_gb: int
    cores: int
    gpus: int
    processes: int
    shards: int


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Contents of the cluster file.

    Attributes:
        stop_lead: time between the stop signal and the end of a job, such as "10 min".
        max_sittings: maximum number of starts of a job, which is requeued when its time is up.
        slurm_options, lsf_options: further options of sbatch and bsub for every job.
        training: requests for training the agent and the simulator.
        gpu: requests for other stages that can use a GPU.
        cpu: requests for all remaining stages.
        stages: values that override ``training``, ``gpu`` or ``cpu``, by name of the stage.
    """

    stop_lead: str
    max_sittings: int
    slurm_options: tuple[str, ...]
    lsf_options: tuple[str, ...]
    training: Resources
    gpu: Resources
    cpu: Resources
    stages: dict[str, dict]

    @property
    def stop_seconds(self) -> int:
        """Seconds between the stop signal and the end of a job."""
        return seconds_of(self.stop_lead)

    def resources(self, stage: Stage) -> Resources:
        """Return the resource requests of a stage's jobs, with at most ``max_shards`` shards.

        Raises:
            UserError: if several processes are requested for a stage that is not in TRAINING.
        """
        group = (self.training if stage.name in TRAINING else
                 self.gpu if takes_device(stage.script) else self.cpu)
        resources = self.apply_overrides(stage.name, group)
        if resources.processes > 1 and stage.name not in TRAINING:
            raise UserError(f"the stage {stage.name} cannot have {resources.processes} processes; "
                            f"only {' and '.join(TRAINING)} can")
        return dataclasses.replace(resources, shards=min(resources.shards, stage.max_shards))

    def apply_overrides(self, stage: str, group: Resources) -> Resources:
        """Return the resource requests of a stage: those of its group (``training``, ``gpu`` or
        ``cpu``), with the values that ``stages`` gives for this stage."""
        return typed(Resources, {**vars(group), **self.stages.get(stage, {})},
                     f"'stages', '{stage}'")


def takes_device(script: str) -> bool:
    """Return whether a script can use a GPU, that is, has the flag ``--device``."""
    actions = parser_of(importlib.import_module(script).main.options)._actions
    return any(action.dest == "device" for action in actions)


def load_cluster(path: Path, stages: Iterable[Stage]) -> ClusterConfig:
    """Read the resource requests of cluster jobs.

    Args:
        path: YAML file with the requests.
        stages: stages of the experiment.

    Raises:
        UserError: if a key is unknown, or a value is of the wrong type or out of range.
    """
    config: ClusterConfig = typed(ClusterConfig, read_yaml(path), path.name)
    groups = {f"'{name}'": getattr(config, name) for name in ("training", "gpu", "cpu")}
    groups |= {f"'stages', '{name}'": config.apply_overrides(name, config.cpu)
               for name in config.stages}
    for where, group in groups.items():
        for key, least in _LEAST.items():
            if getattr(group, key) < least:
                raise UserError(f"{path.name}: {where}: '{key}' must be at least {least}, not "
                                f"{getattr(group, key)}")
        if seconds_of(group.time) <= config.stop_seconds:
            raise UserError(f"{path.name}: {where}: 'time' must be longer than 'stop_lead', "
                            f"{config.stop_lead}, not {group.time}")
    known = {stage.name for stage in stages} | {
        stage.name for preset in read_yaml(PRESETS_FILE) if preset != SECTION and config.stages
        for stage in all_stages(load_preset(preset), preset)}
    for name in sorted(config.stages.keys() - known):
        raise UserError(f"{path.name}: 'stages' names no stage '{name}'{nearest(name, known)}")
    return config


def seconds_of(text: str) -> int:
    """Convert a time such as "1 h 30 min" to seconds.

    Raises:
        UserError: if the text is not a time.
    """
    with contextlib.suppress(ValueError):
        if (seconds := int(pd.Timedelta(text).total_seconds())) > 0:
            return seconds
    raise UserError("a time in the cluster file has a form such as 2 d, 36 h, 1 h 30 min or 90 s, "
                    f"not {text}")


# Schedulers


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, or a job array, to submit.

    Attributes:
        name: name of the job in the scheduler.
        command: command line as a list of words, which may contain ``TASK``.
        resources: resource requests of the job, or of each job of the array.
        log: path of the log, without the scheduler's suffix.
        after: IDs of the jobs that it waits for.
        whatever: whether these jobs only need to end; if False, they must succeed.
        tasks: indices of the array tasks, in ascending order; empty for a single job.
    """

    name: str
    command: tuple[str, ...]
    resources: Resources
    log: Path
    after: tuple[str, ...] = ()
    whatever: bool = False
    tasks: tuple[int, ...] = ()

    @property
    def minutes(self) -> int:
        """Time limit in minutes, rounded up."""
        return math.ceil(seconds_of(self.resources.time) / 60)

    @property
    def indices(self) -> str:
        """Indices of the array tasks, separated by commas; "" for a single job."""
        return ",".join(map(str, self.tasks))

    def line(self, task_variable: str) -> str:
        """Return the command line for a shell that knows the array index as a variable."""
        return shlex.join(self.command).replace(TASK, f'"${task_variable}"')


def _sbatch(job: Job, config: ClusterConfig) -> list[str]:
    """Return the command that submits a job to Slurm."""
    resources, condition = job.resources, "afterany" if job.whatever else "afterok"
    dependencies = ",".join(f"{condition}:{number}" for number in job.after)
    return [
        "sbatch", "--parsable", f"--job-name={job.name}",
        f"--output={job.log}-{'%A_%a' if job.tasks else '%j'}.out", "--open-mode=append",
        f"--time={job.minutes}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={resources.cores}",
        f"--mem={resources.memory_gb}G", *([f"--gpus={resources.gpus}"] if resources.gpus else []),
        f"--signal=B:USR1@{config.stop_seconds}", "--requeue",
        *([f"--array={job.indices}"] if job.tasks else []),
        *([f"--dependency={dependencies}", "--kill-on-invalid-dep=yes"] if job.after else []),
        *config.slurm_options,
        f"--wrap=exec {job.line('SLURM_ARRAY_TASK_ID')}"]


def _bsub(job: Job, config: ClusterConfig) -> list[str]:
    """Return the command that submits a job to LSF, which requeues it if its exit status is 75."""
    resources, condition = job.resources, "ended" if job.whatever else "done"
    dependencies = " && ".join(f"{condition}({number})" for number in job.after)
    return [
        "bsub", "-J", f"{job.name}[{job.indices}]" if job.tasks else job.name,
        "-o", f"{job.log}-{'%J_%I' if job.tasks else '%J'}.out", "-W", f"{job.minutes}",
        "-n", f"{resources.cores}",
        "-R", f"span[hosts=1] rusage[mem={resources.memory_gb}GB/host]",
        *(["-gpu", f"num={resources.gpus}"] if resources.gpus else []),
        "-wa", "USR1", "-wt", f"{math.ceil(config.stop_seconds / 60)}", "-r", "-Q", "75",
        *(["-w", dependencies, "-ti"] if job.after else []), *config.lsf_options,
        f"exec {job.line('LSB_JOBINDEX')}"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A job, or a task of a job array, in the scheduler's list.

    Attributes:
        job: ID of the job or of its array.
        state: QUEUED, RUNNING, DONE, or FAILED for all other jobs that have ended.
        word: the scheduler's name of the state, in lower case.
        why: the scheduler's reason why a queued job is pending, or "".
        time: elapsed run time, in the scheduler's format.
        host: host on which it runs, or "".
    """

    job: str
    state: str
    word: str
    why: str = ""
    time: str = ""
    host: str = ""

    @property
    def is_hopeless(self) -> bool:
        """Whether the job is queued, but its dependencies can never be satisfied."""
        return re.search("never ?satisfied", self.why, re.IGNORECASE) is not None


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Commands of a scheduler, and rules for parsing the output of the commands.

    Attributes:
        name: name of the scheduler.
        submission: function that returns the command that submits a job.
        number: regular expression that finds the job ID in the output of this command.
        queue: command that lists the user's jobs, including ended ones. It prints a line per job:
            job, state, time, host and reason, separated by |.
        states: QUEUED, RUNNING or DONE by the scheduler's names of states; jobs in all other states
            have failed.
        cancel: program that cancels jobs.
        requeue: command that requeues a job, without its ID; empty if ``requeue_status`` is enough.
        requeue_status: exit status of a job that is requeued.
        job_variables: environment variables with the job's ID; the first one that is set is used.
        task_variable: environment variable with the index of the array task.
    """

    name: str
    submission: Callable[[Job, ClusterConfig], list[str]]
    number: str
    queue: tuple[str, ...]
    states: Mapping[str, str]
    cancel: str
    requeue: tuple[str, ...]
    requeue_status: int
    job_variables: tuple[str, ...]
    task_variable: str

    def parse_number(self, answer: str) -> str | None:
        """Return the ID of a submitted job; None if ``answer`` contains none."""
        match = re.search(self.number, answer, re.MULTILINE)
        return match[1] if match else None

    def parse_queue(self, answer: str) -> list[Entry]:
        """Parse the output of the command ``queue``."""
        entries = []
        for line in re.findall(r"^\d.*\|.*$", answer, re.MULTILINE):
            job, word, time, host, why = (
                "" if cell.strip() in ("-", "None") else cell.strip()
                for cell in line.split("|", 4))
            state = self.states.get(word, FAILED)
            entries.append(Entry(job, state, word.lower(), why if state == QUEUED else "", time,
                                 host if state == RUNNING else ""))
        return entries

    def is_here(self) -> bool:
        """Return whether the scheduler's programs are installed on this machine."""
        return shutil.which(self.queue[0]) is not None

    def check(self) -> None:
        """Raise UserError if the scheduler is not installed on this machine."""
        if not self.is_here():
            raise UserError(f"there is no {self.queue[0]} on this machine; use a machine of a "
                            f"{self.name} cluster")

    def list_jobs(self) -> list[Entry]:
        """Return the jobs of this user that the scheduler still lists.

        Raises:
            UserError: if the scheduler fails or does not answer.
        """
        answer = self._run(self.queue)
        if answer.returncode and not re.match(r"No (unfinished )?job found", answer.stderr):
            raise UserError(f"{self.queue[0]} failed: {_in_one_line(answer)}")
        return self.parse_queue(answer.stdout)

    def submit(self, job: Job, config: ClusterConfig) -> str:
        """Submit a job; returns its ID.

        Raises:
            UserError: if the scheduler refuses the job.
        """
        command = self.submission(job, config)
        answer = self._run(command)
        number = None if answer.returncode else self.parse_number(answer.stdout)
        if number is None:
            raise UserError(f"{command[0]} refuses {job.name}: {_in_one_line(answer)}")
        return number

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; jobs that have ended already are ignored."""
        self._run([self.cancel, *jobs])

    def requeue_job(self, job: str) -> int:
        """Requeue a job whose time is up, and return the status with which it must exit."""
        if self.requeue:
            subprocess.run([*self.requeue, job])
        return self.requeue_status

    def own_job(self) -> str:
        """Return the ID of the job that runs this process, such as "12", or "12_3" for task 3
        of a job array."""
        job = next(filter(None, map(os.environ.get, self.job_variables)), "")
        task = os.environ.get(self.task_variable, "0")
        return job if task == "0" else f"{job}_{task}"

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.check()
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            raise UserError(f"{command[0]} has not answered for {SECONDS_TO_ANSWER} seconds; try "
                            "again later") from None


def _in_one_line(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a program as a single line."""
    text = " ".join(f"{answer.stderr} {answer.stdout}".split())
    return (text or f"nothing, with exit status {answer.returncode}")[:500].rstrip(".")


SCHEDULERS = {
    # Tested with Slurm 22.05; accounting is not needed. COMPLETING jobs have succeeded.
    "slurm": Scheduler(
        "Slurm", _sbatch,
        number=r"\A(\d+)(?:;\S+)?\s*\Z",  # in a federation, the cluster follows after a semicolon
        queue=("squeue", "--me", "--noheader", "--array", "--states=all",
               "--format=%F|%T|%M|%N|%r"),
        states={**dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
                                 "RESV_DEL_HOLD", "SPECIAL_EXIT"), QUEUED),
                **dict.fromkeys(("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING",
                                 "STAGE_OUT", "STOPPED"), RUNNING),
                "COMPLETED": DONE, "COMPLETING": DONE},
        cancel="scancel", requeue=("scontrol", "requeue"),
        requeue_status=128 + signal.SIGTERM,
        job_variables=("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
        task_variable="SLURM_ARRAY_TASK_ID"),
    # According to the LSF 10.1 manual; tested on the outputs shown there, not on a cluster.
    "lsf": Scheduler(
        "LSF", _bsub, number=r"^Job <(\d+)> is submitted to ",
        queue=("bjobs", "-a", "-noheader", "-o",
               "jobid stat run_time first_host pend_reason delimiter='|'"),
        states={**dict.fromkeys(("PEND", "PROV", "PSUSP", "WAIT", "FWD_PEND"), QUEUED),
                **dict.fromkeys(("RUN", "USUSP", "SSUSP", "UNKWN"), RUNNING), "DONE": DONE},
        cancel="bkill", requeue=(), requeue_status=75,
        job_variables=("LSB_JOBID",), task_variable="LSB_JOBINDEX")}
