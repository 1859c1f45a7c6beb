"""How the stages of a submitted experiment stand: from records, from what jobs leave, and from the
scheduler's list, without its accounting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common.errors import UserError
from pipeline.cluster.schedulers import ENDED, PENDING, SCHEDULERS, Entry
from pipeline.cluster.schedulers import RUNNING as RUNS
from pipeline.cluster.submission import Submitted, SubmittedFiles
from pipeline.records import DONE, FAILED, RUNNING, STOPPED, Experiment, Part, Record, Sitting
from pipeline.stage import Stage
from pipeline.summary import duration, print_columns

LONGEST = 70  # letters of a log's line
_TAIL = 4000  # bytes at the end of a log


@dataclasses.dataclass(frozen=True)
class StageStatus:
    """A line of the table.

    Attributes:
        stage: its name.
        state: done, runs, waits, stopped, failed, lost, not submitted, or the scheduler's word
            for how its last job ended.
        job: numbers of its jobs.
        time: that it has taken, or takes so far.
        progress: its result, what it waits for, or the last line of its log.
        is_lost: whether the scheduler has forgotten a job that has not ended.
    """

    stage: str
    state: str
    job: str
    time: str
    progress: str
    is_lost: bool = False


def status_of(name: str, record: Record | None, submitted: Submitted | None,
              sittings: Sequence[Sitting], entries: Sequence[Entry], line: str,
              waits: bool) -> StageStatus:
    """How a stage stands.

    Args:
        sittings: of its jobs, those of its shards first.
        entries: the scheduler's, of the jobs that were submitted for it.
        line: the last of its log.
        waits: whether a stage that it reads from is unfinished.
    """
    numbers = ", ".join(submitted.numbers) if submitted else ""
    here = [entry for entry in entries if entry.state != ENDED]
    shards = ""
    if submitted and submitted.shards:
        done = sum(sitting.status == DONE and sitting.shards == submitted.shards
                   for sitting in sittings)
        shards = f"{min(done, submitted.shards)} of {submitted.shards} shards done"
    if record is not None and record.status == DONE and not here:
        return StageStatus(name, "done", numbers, duration(record.seconds), record.result)
    running = [entry for entry in here if entry.state == RUNS]
    if running:
        return StageStatus(name, "runs", numbers, running[0].time, shards or
                           "; ".join(filter(None, (running[0].host, line))))
    if here:
        why = "; ".join(sorted({entry.why for entry in here if entry.state == PENDING} - {""}))
        return StageStatus(name, "waits", numbers, "", "; ".join(filter(None, (shards, why))))
    if submitted is None:
        state = {None: "not submitted", RUNNING: "was interrupted"}.get(
            record and record.status, record and record.status)
        return StageStatus(name, state, "", duration(record.seconds) if record else "", line)
    own = [sitting for sitting in sittings if sitting.job in submitted.numbers
           or sitting.job.partition("_")[0] in submitted.numbers]
    for status in (FAILED, STOPPED):
        if any(sitting.status == status for sitting in own):
            return StageStatus(name, status, numbers, "", shards or line)
    bad = [entry.word for entry in entries if entry.word not in ("completed", "completing", "done")]
    if bad:
        return StageStatus(name, bad[-1], numbers, "", shards or line)
    if entries or (not own and waits):  # it ends just now, or went with those that it waited for
        return StageStatus(name, "ended" if entries else "not run", numbers, "", shards)
    return StageStatus(name, "lost", numbers, "", shards or line, is_lost=True)


def print_status(experiment: Experiment, stages: Sequence[Stage],
                 sources: dict[str, Sequence[str]]) -> int:
    """Print how every stage stands; returns the exit status.

    Args:
        sources: the stages that a stage reads from.

    Raises:
        UserError: if the scheduler does not answer.
    """
    files = SubmittedFiles(experiment)
    submitted = {stage.name: files.read(stage.name) for stage in stages}
    systems = {each.system for each in submitted.values() if each is not None}
    listed = {system: SCHEDULERS[system].listed() for system in systems}
    rows, unfinished = [], set()
    for number, stage in enumerate(stages, 1):
        jobs, record = submitted[stage.name], experiment.record(stage.name)
        parts = [Part(stage.name)]
        if jobs and jobs.shards:
            parts = [*Part(stage.name, jobs.shards).of_shards(), Part(stage.name, jobs.shards)]
        sittings = [sitting for part in parts if (sitting := experiment.sitting(part)) is not None]
        entries = [entry for entry in listed[jobs.system] if entry.job in jobs.numbers
                   ] if jobs else []
        row = status_of(stage.name, record, jobs, sittings, entries,
                        last_line(experiment, number, stage.name),
                        bool(unfinished & set(sources[stage.name])))
        rows.append(row)
        if row.state != "done":
            unfinished.add(stage.name)
    print_columns([("stage", "", "job", "time", "progress"),
                   *((row.stage, row.state, row.job, row.time, row.progress) for row in rows)],
                  right=(3,))
    lost = next((row for row in rows if row.is_lost), None)
    if lost:
        system = SCHEDULERS[submitted[lost.stage].system].name
        raise UserError(f"{system} knows nothing of job {lost.job} of the stage {lost.stage}, "
                        "which has not ended; --submit submits it again, and it goes on")
    return 0


def last_line(experiment: Experiment, number: int, stage: str) -> str:
    """The last line of a stage's log; "" if it has none."""
    path = experiment.path / experiment.log_name(number, stage)
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return line if len(line) <= LONGEST else f"{line[:LONGEST - 3]}..."
