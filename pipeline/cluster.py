"""Cluster jobs: resource requests (``hyperparams/cluster.yml``), and commands of the schedulers.

A ``Scheduler`` object holds the options of a job, the names of its states, and the command that
requeues it. A job receives SIGUSR1 when its time is nearly up, and SIGTERM when it is cancelled.
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
from collections.abc import Iterable, Sequence
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
_OPTIONAL = ("gpus", "tasks", "dependencies")  # options are omitted if one of these is empty


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


@dataclasses.dataclass(frozen=True)
class Entry:
    """A job, or a task of a job array, in the scheduler's list.

    Attributes:
        job: ID of the job or of its array.
        task: index in the array; 0 for a single job.
        state: QUEUED, RUNNING, DONE, or FAILED for all other jobs that have ended.
        word: the scheduler's name of the state, in lower case.
        why: the scheduler's reason why the job is pending, or "".
        never: whether its dependencies can never be satisfied.
        time: elapsed run time, in the scheduler's format.
        host: host on which it runs, or "".
    """

    job: str
    task: int
    state: str
    word: str
    why: str = ""
    never: bool = False
    time: str = ""
    host: str = ""


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Commands of a scheduler, and rules for parsing the output of the commands.

    Attributes:
        name: name of the scheduler.
        program: program that submits a job.
        options: options of a job, in groups of words with placeholders. A group is omitted if it
            contains a placeholder in ``_OPTIONAL`` whose value is empty.
        user_options: name of the field of the cluster file that holds further options.
        conditions: three texts: a dependency on the success of job ``{}``, a dependency on the end
            of job ``{}``, and the separator of several dependencies.
        log_names: suffixes of the names of logs, for a job and for an array task.
        wrap: prefix of the last argument, which contains the job's command line.
        number: regular expression that finds the job ID in the output of ``program``.
        queue: command that lists the user's jobs, including ended ones. It prints a line per job:
            job, task, state, time, host and reason, separated by |.
        waiting: names of the states of pending jobs.
        running: names of the states of running jobs.
        succeeded: names of the states of jobs that have succeeded; all other jobs have failed.
        cancel: program that cancels jobs.
        requeue: command that requeues job ``{}``; empty if ``requeue_status`` is enough.
        requeue_status: exit status of a job that is requeued.
        job_variables: environment variables with the job's ID; the first one that is set is used.
        task_variable: environment variable with the index of the array task.
    """

    name: str
    program: str
    options: tuple[tuple[str, ...], ...]
    user_options: str
    conditions: tuple[str, str, str]
    log_names: tuple[str, str]
    wrap: str
    number: str
    queue: tuple[str, ...]
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    succeeded: tuple[str, ...]
    cancel: str
    requeue: tuple[str, ...]
    requeue_status: int
    job_variables: tuple[str, ...]
    task_variable: str

    def submission(self, job: Job, config: ClusterConfig) -> list[str]:
        """Return the command that submits a job."""
        succeeded, ended, separator = self.conditions
        condition = ended if job.whatever else succeeded
        tasks = ",".join(map(str, job.tasks))
        fields = {
            "name": job.name, "tasks": tasks, "index": f"[{tasks}]" if tasks else "",
            "log": f"{job.log}-{self.log_names[bool(tasks)]}.out",
            "minutes": math.ceil(seconds_of(job.resources.time) / 60), "cores": job.resources.cores,
            "memory_gb": job.resources.memory_gb, "gpus": job.resources.gpus,
            "signal": TIME_IS_UP.name.removeprefix("SIG"), "stop_seconds": config.stop_seconds,
            "stop_minutes": math.ceil(config.stop_seconds / 60),
            "dependencies": separator.join(map(condition.format, job.after))}
        command = [self.program]
        for group in self.options:
            if all(fields[name] for name in _OPTIONAL if f"{{{name}}}" in " ".join(group)):
                command += [word.format(**fields) for word in group]
        line = shlex.join(job.command).replace(TASK, f'"${self.task_variable}"')
        return [*command, *getattr(config, self.user_options), f"{self.wrap}exec {line}"]

    def parse_number(self, answer: str) -> str | None:
        """Return the ID of a submitted job; None if ``answer`` contains none."""
        match = re.search(self.number, answer, re.MULTILINE)
        return match[1] if match else None

    def parse_queue(self, answer: str) -> list[Entry]:
        """Parse the output of the command ``queue``."""
        entries = []
        for line in re.findall(r"^\d.*\|.*$", answer, re.MULTILINE):
            job, task, word, time, host, why = (
                "" if cell.strip() in ("-", "None") else cell.strip()
                for cell in line.split("|", 5))
            state = (QUEUED if word in self.waiting else RUNNING if word in self.running else
                     DONE if word in self.succeeded else FAILED)
            entries.append(Entry(
                job, int(task) if task.isdecimal() else 0, state, word.lower(),
                why if state == QUEUED else "",
                re.search("never ?satisfied", why, re.IGNORECASE) is not None, time,
                host if state == RUNNING else ""))
        return entries

    def is_here(self) -> bool:
        """Return whether the scheduler's programs are installed on this machine."""
        return shutil.which(self.program) is not None

    def check(self) -> None:
        """Raise UserError if the scheduler is not installed on this machine."""
        if not self.is_here():
            raise UserError(f"there is no {self.program} on this machine; submit from a machine of "
                            f"a {self.name} cluster")

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
        answer = self._run(self.submission(job, config))
        number = None if answer.returncode else self.parse_number(answer.stdout)
        if number is None:
            raise UserError(f"{self.program} refuses {job.name}: {_in_one_line(answer)}")
        return number

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; jobs that have ended already are ignored."""
        self._run([self.cancel, *jobs])

    def requeue_job(self, job: str) -> int:
        """Requeue a job whose time is up, and return the status with which it must exit. (LSF
        requeues jobs that exit with this status.)"""
        if self.requeue:
            subprocess.run([word.format(job) for word in self.requeue])
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
        "Slurm", "sbatch",
        (("--parsable", "--job-name={name}", "--output={log}", "--open-mode=append",
          "--time={minutes}", "--nodes=1", "--ntasks=1", "--cpus-per-task={cores}",
          "--mem={memory_gb}G"),
         ("--gpus={gpus}",), ("--signal=B:{signal}@{stop_seconds}", "--requeue"),
         ("--array={tasks}",),
         ("--dependency={dependencies}", "--kill-on-invalid-dep=yes")),
        "slurm_options", conditions=("afterok:{}", "afterany:{}", ","),
        log_names=("%j", "%A_%a"), wrap="--wrap=",
        number=r"\A(\d+)(?:;\S+)?\s*\Z",  # in a federation, the cluster follows after a semicolon
        queue=("squeue", "--me", "--noheader", "--array", "--states=all",
               "--format=%F|%K|%T|%M|%N|%r"),
        waiting=("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                 "SPECIAL_EXIT"),
        running=("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT",
                 "STOPPED"),
        succeeded=("COMPLETED", "COMPLETING"),
        cancel="scancel", requeue=("scontrol", "requeue", "{}"),
        requeue_status=128 + signal.SIGTERM,
        job_variables=("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
        task_variable="SLURM_ARRAY_TASK_ID"),
    # According to the LSF 10.1 manual; tested on the outputs shown there, not on a cluster.
    "lsf": Scheduler(
        "LSF", "bsub",
        (("-J", "{name}{index}", "-o", "{log}", "-W", "{minutes}", "-n", "{cores}",
          "-R", "span[hosts=1] rusage[mem={memory_gb}GB/host]"),
         ("-gpu", "num={gpus}"), ("-wa", "{signal}", "-wt", "{stop_minutes}", "-r", "-Q", "75"),
         ("-w", "{dependencies}", "-ti")),
        "lsf_options", conditions=("done({})", "ended({})", " && "),
        log_names=("%J", "%J_%I"), wrap="",
        number=r"^Job <(\d+)> is submitted to ",
        queue=("bjobs", "-a", "-noheader", "-o",
               "jobid jobindex stat run_time first_host pend_reason delimiter='|'"),
        waiting=("PEND", "PROV", "PSUSP", "WAIT", "FWD_PEND"),
        running=("RUN", "USUSP", "SSUSP", "UNKWN"), succeeded=("DONE",),
        cancel="bkill", requeue=(), requeue_status=75,
        job_variables=("LSB_JOBID",), task_variable="LSB_JOBINDEX")}
