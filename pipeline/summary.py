"""Terminal output of the pipeline: the plan before a run, the table after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.records import DONE, Record
from pipeline.runner import CONTINUE, LEAVE, RUN, SKIP, Pipeline, StageOutcome
from pipeline.stage import MADE_BY

WOULD = {SKIP: "would be skipped", CONTINUE: "would go on", RUN: "would run", LEAVE: "is left"}
DID = {SKIP: "skipped", CONTINUE: "continued", RUN: "ran", LEAVE: "left"}


def print_plan(pipeline: Pipeline) -> None:
    """Say what would be done, why, and with which command."""
    unknown = {}
    for stage, decision in pipeline.plan():
        print(f"{stage.name} {WOULD[decision.action]}: {decision.why}")
        if decision.action in (CONTINUE, RUN):
            command = pipeline.command(stage)
            print(f"    {command}")
            unknown |= {mark: name for mark, name in MADE_BY.items() if mark in command}
    for mark, name in unknown.items():
        print(f"{mark} stands for the file that {name} will write")


def print_table(outcomes: Sequence[StageOutcome]) -> None:
    """A line a stage: what was done, time, size, result, and why."""
    rows = [("stage", "", "time", "size", "result", "because")]
    for outcome in outcomes:
        rows.append((outcome.stage.name, what_was_done(outcome), *figures(outcome.record),
                     outcome.decision.why))
    print()
    print_columns(rows, right=(2, 3))


def print_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of cells in columns.

    Args:
        right: places of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.rjust(width) if place in right else cell.ljust(width)
                        for place, (cell, width) in enumerate(zip(row, widths))).rstrip())


def what_was_done(outcome: StageOutcome) -> str:
    return "stopped" if outcome.status > 128 else "failed" if outcome.status else (
        DID[outcome.decision.action])


def figures(record: Record | None) -> tuple[str, str, str]:
    """Time, size and result of a stage as far as they are known."""
    if record is None:
        return "", "", ""
    return (duration(record.seconds), size(record.bytes) if record.status == DONE else "",
            record.result)


def duration(seconds: float) -> str:
    """Such as 4.2 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(number: int) -> str:
    """Such as 12.3 MB."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"
