"""Jobs of a cluster: what they request (``hyperparams/cluster.yml``), and the schedulers' commands.

A scheduler is a table: the options of a job, the words for its states, and how a job goes back to
the queue. A job is told by SIGUSR1 that its time is nearly up, and by SIGTERM that it is
cancelled.
"""

from __future__ import annotations

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

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from pipeline.presets import HYPERPARAMS, PRESETS_FILE, SECTION, load_preset
from pipeline.stage import TRAIN_AGENT, TRAIN_SIMULATOR, Stage
from pipeline.stages import all_stages

CLUSTER_FILE = HYPERPARAMS / "cluster.yml"
TRAINING = (TRAIN_AGENT, TRAIN_SIMULATOR)
_TIME = re.compile(r"(?=.)(?:(\d+) ?d)? ?(?:(\d+) ?h)? ?(?:(\d+) ?min)? ?(?:(\d+) ?s)?")
_SECONDS = (86400, 3600, 60, 1)
_LEAST = {"memory_gb": 1, "cores": 1, "gpus": 0, "processes": 1, "shards": 1}

TIME_IS_UP = signal.SIGUSR1
PENDING, RUNNING, ENDED = "queued", "running", "ended"
TASK = "@task@"  # placeholder in a command, safe in a shell: the index of the array's task
SECONDS_TO_ANSWER = 120
_OPTIONAL = ("gpus", "tasks", "dependencies")  # an option is left out where its field is empty


# Requests


@dataclasses.dataclass(frozen=True)
class Resources:
    """Requests of one job of a stage."""

    time: str
    memory_gb: int
    cores: int
    gpus: int
    processes: int
    shards: int

    @property
    def seconds(self) -> int:
        return seconds_of(self.time, "time")


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """Requests that differ for one stage; None where they do not."""

    time: str | None = None
    memory_gb: int | None = None
    cores: int | None = None
    gpus: int | None = None
    processes: int | None = None
    shards: int | None = None


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Contents of the cluster file, whose comments explain each value."""

    stop_lead: str
    max_sittings: int
    slurm_options: tuple[str, ...]
    lsf_options: tuple[str, ...]
    training: Resources
    gpu: Resources
    cpu: Resources
    stages: dict[str, Exceptions]

    @property
    def stop_seconds(self) -> int:
        """Seconds before its end at which a job is told to stop."""
        return seconds_of(self.stop_lead, "stop_lead")

    def resources(self, stage: Stage) -> Resources:
        """Return the requests of a job; ``shards`` is the number that the stage is divided into.

        Raises:
            UserError: if a stage other than a training is to have several processes.
        """
        kind = (self.training if stage.name in TRAINING else
                self.gpu if takes_device(stage.script) else self.cpu)
        changes = vars(self.stages.get(stage.name, Exceptions()))
        resources = dataclasses.replace(kind, **{
            name: value for name, value in changes.items() if value is not None})
        if resources.processes > 1 and stage.name not in TRAINING:
            raise UserError(f"the stage {stage.name} cannot have {resources.processes} processes; "
                            f"only {' and '.join(TRAINING)} can")
        return dataclasses.replace(resources, shards=min(resources.shards, stage.max_shards))


def takes_device(script: str) -> bool:
    """Whether a script computes on a GPU where there is one: it has the flag ``--device``."""
    flags = importlib.import_module(script).parser()
    return any(action.dest == "device" for action in flags._actions)


def load_cluster(path: Path, stages: Iterable[Stage]) -> ClusterConfig:
    """Read the requests to a cluster.

    Args:
        stages: stages of the experiment.

    Raises:
        UserError: if a key is unknown, or a value is of the wrong type or out of range.
    """
    content = read_yaml(path)
    _check_times(content, path.name)
    config: ClusterConfig = typed(ClusterConfig, content, path.name)
    lead = seconds_of(config.stop_lead, f"{path.name}: 'stop_lead'")
    groups: dict[str, Resources | Exceptions] = {
        f"'{name}'": getattr(config, name) for name in ("training", "gpu", "cpu")}
    groups |= {f"'stages', '{name}'": changes for name, changes in config.stages.items()}
    for name, group in groups.items():
        where = f"{path.name}: {name}"
        for key, least in _LEAST.items():
            if (value := getattr(group, key)) is not None and value < least:
                raise UserError(f"{where}: '{key}' must be at least {least}, not {value}")
        if group.time is not None and seconds_of(group.time, f"{where}: 'time'") <= lead:
            raise UserError(f"{where}: 'time' must be longer than 'stop_lead', {config.stop_lead}, "
                            f"not {group.time}")
    if config.max_sittings < 1:
        raise UserError(f"{path.name}: 'max_sittings' must be at least 1, not "
                        f"{config.max_sittings}")
    unknown = config.stages.keys() - {stage.name for stage in stages}
    if unknown:
        known = {stage.name for preset in read_yaml(PRESETS_FILE) if preset != SECTION
                 for stage in all_stages(load_preset(preset), preset)}
        for name in sorted(map(str, unknown - known)):
            raise UserError(f"{path.name}: 'stages' names no stage '{name}'{nearest(name, known)}")
    return config


def _check_times(content: object, where: str) -> None:
    """Reject unquoted times; YAML reads 24:00:00 as an integer."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if key in ("time", "stop_lead") and isinstance(value, int | float):
            raise _not_a_time(f"{where}: '{key}'", value)
        separator = ", " if where.endswith("'") else ": "
        _check_times(value, f"{where}{separator}'{key}'")


def seconds_of(text: str, what: str) -> int:
    """Return the seconds of a time such as 1 h 30 min.

    Raises:
        UserError: saying how times are written.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = sum(int(number or 0) * unit for number, unit in zip(
        match.groups(), _SECONDS)) if match else 0
    if not seconds:
        raise _not_a_time(what, text)
    return seconds


def _not_a_time(what: str, value: object) -> UserError:
    return UserError(f"{what} must be a time such as 2 d, 36 h, 1 h 30 min or 90 s, not {value}")


# Schedulers


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, or an array of jobs, as it is submitted.

    Attributes:
        name: name that the scheduler shows.
        command: words of its command line; ``TASK`` may be in them.
        resources: requests of each job of the array.
        log: file for its output.
        after: numbers of the jobs that it waits for.
        whatever: wait until these have ended; otherwise until they have succeeded.
        tasks: tasks of the array, in order; empty for a single job.
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
        task: index in the array; 0 for a single job.
        state: PENDING, RUNNING or ENDED.
        word: the scheduler's own word for the state, in lower case.
        why: the scheduler's reason why it waits, or "".
        never: whether it waits for what will not happen.
        time: time that it has run, as the scheduler writes it.
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


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A scheduler: its commands, and how to read its answers.

    Attributes:
        name: name of the scheduler.
        program: program that submits a job.
        options: options of a job, in groups. A group is left out if one of its fields among
            ``_OPTIONAL`` is empty.
        user_options: key of the options of the cluster file.
        conditions: dependency on a job ``{}`` that succeeds, and on one that ends; what joins
            several of them.
        log_names: suffix of the log's name, of a job and of a task of an array.
        wrap: last word of the command, around the job's command line.
        number: pattern of the job's number in the answer.
        queue: command that lists the user's jobs, ended ones included: job, task, state, time,
            host and reason, with | between them.
        waiting, running: states; all others are those of jobs that have ended.
        cancel: program that cancels jobs.
        requeue: command that sends job ``{}`` back to the queue; empty if its exit status does.
        requeue_status: exit status of a job that goes back to the queue.
        job_variables: environment variables that hold a job's number; the first that is set.
        task_variable: environment variable with the index of an array's task.
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
            "minutes": math.ceil(job.resources.seconds / 60), "cores": job.resources.cores,
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
        """Return the number of a submitted job; None if there is none in the answer."""
        match = re.search(self.number, answer, re.MULTILINE)
        return match[1] if match else None

    def parse_queue(self, answer: str) -> list[Entry]:
        """Return the jobs in the answer to ``queue``."""
        entries = []
        for line in re.findall(r"^\d.*\|.*$", answer, re.MULTILINE):
            job, task, word, time, host, why = (
                "" if cell.strip() in ("-", "None") else cell.strip()
                for cell in line.split("|", 5))
            state = (PENDING if word in self.waiting else RUNNING if word in self.running
                     else ENDED)
            entries.append(Entry(
                job, int(task) if task.isdecimal() else 0, state, word.lower(),
                why if state == PENDING else "",
                re.search("never ?satisfied", why, re.IGNORECASE) is not None, time,
                host if state == RUNNING else ""))
        return entries

    def is_here(self) -> bool:
        """Whether this machine has the scheduler's programs."""
        return shutil.which(self.program) is not None

    def check(self) -> None:
        """Raise UserError if the scheduler is not here."""
        if not self.is_here():
            raise UserError(f"there is no {self.program} on this machine; submit from one that "
                            f"belongs to a cluster with {self.name}")

    def list_jobs(self) -> list[Entry]:
        """Return the jobs of this user that the scheduler still knows.

        Raises:
            UserError: if it does not answer.
        """
        answer = self._run(self.queue)
        if answer.returncode and not re.match(r"No (unfinished )?job found", answer.stderr):
            raise UserError(f"{self.queue[0]} says: {_in_one_line(answer)}")
        return self.parse_queue(answer.stdout)

    def submit(self, job: Job, config: ClusterConfig) -> str:
        """Submit a job; returns its number.

        Raises:
            UserError: if it is refused.
        """
        answer = self._run(self.submission(job, config))
        number = None if answer.returncode else self.parse_number(answer.stdout)
        if number is None:
            raise UserError(f"{self.program} refuses {job.name}: {_in_one_line(answer)}")
        return number

    def cancel_jobs(self, jobs: Sequence[str]) -> None:
        """Cancel waiting jobs; those that are gone already do no harm."""
        self._run([self.cancel, *jobs])

    def requeue_job(self, job: str) -> int:
        """Let a job whose time is up begin again later; returns the status to exit with."""
        if self.requeue:
            answer = subprocess.run([word.format(job) for word in self.requeue],
                                    capture_output=True, text=True)
            if answer.returncode:
                print(f"{self.requeue[0]} does not start job {job} again: {_in_one_line(answer)}",
                      flush=True)
        return self.requeue_status

    def own_job(self) -> str:
        """Return the number of the job that this process is."""
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
    """Return the output of a program in one line."""
    text = " ".join(f"{answer.stderr} {answer.stdout}".split())
    return (text or f"nothing, with exit status {answer.returncode}")[:500].rstrip(".")


SCHEDULERS = {
    # Tried with Slurm 22.05; accounting is not needed. A job that is COMPLETING is about to end.
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
        number=r"\A(\d+)(?:;\S+)?\s*\Z",  # a federation's cluster follows behind a semicolon
        queue=("squeue", "--me", "--noheader", "--array", "--states=all",
               "--format=%F|%K|%T|%M|%N|%r"),
        waiting=("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                 "SPECIAL_EXIT"),
        running=("RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT",
                 "STOPPED"),
        cancel="scancel", requeue=("scontrol", "requeue", "{}"),
        requeue_status=128 + signal.SIGTERM,
        job_variables=("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
        task_variable="SLURM_ARRAY_TASK_ID"),
    # By the manual of LSF 10.1; tested on answers as the manual prints them, not on a cluster.
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
        running=("RUN", "USUSP", "SSUSP", "UNKWN"),
        cancel="bkill", requeue=(), requeue_status=75,
        job_variables=("LSB_JOBID",), task_variable="LSB_JOBINDEX")}
