"""Reports on an experiment: tables in the terminal, and ``report/index.html``.

The page opens from disk. It links to the files written by the stages, and lists missing ones.
"""

from __future__ import annotations

import collections
import datetime
import os
import re
import string
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import markupsafe
from PIL import Image

from common.documents import render_markdown
from common.errors import UserError
from common.files import atomic_path, versions
from common.page_files import templates
from common.video import write_poster
from generative.saliency.gradients import COUNTERFACTUAL
from pipeline.records import DONE, NOT_RUN, Digests, Experiment, Record, state_of_exit
from pipeline.report_contents import (
    CHECKS_OF,
    TABLES,
    draw_training_curve,
    write_saliency_strips,
)
from pipeline.runner import CONTINUE, RUN, SKIPPED, UP_TO_DATE, Decision, Pipeline
from pipeline.runner import NOT_RUN as FIRST_RUN
from pipeline.stage import Stage
from pipeline.stage_files import Files, Page

REPORT = Path("report")
PAGE_NAME = "index.html"
TEMPLATES = Path(__file__).parent / "templates"
WIDE = 2.2  # least ratio of width to height of a film in its own row, or of an image that is
# scrolled on a phone


def write_report(experiment: Experiment, stages: Sequence[Stage], page: Page, running: str = "",
                 digests: Digests | None = None) -> Path:
    """Write the page from the contents of the output folder; returns its path.

    Other files in the folder of the report are kept, except strips of saliency from earlier runs.

    Args:
        experiment: output folder with the records.
        stages: all stages, in order.
        page: contents of the page.
        running: if further stages will run, a sentence that says so.
        digests: known checksums of the files; read from the output folder if not given.

    Raises:
        UserError: if the folder of the report is a symbolic link.
    """
    output, folder = experiment.path, experiment.path / REPORT
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link; remove it, so that the report can be "
                        "written")
    folder.mkdir(parents=True, exist_ok=True)
    records = {stage.name: experiment.record(stage.name) for stage in stages}
    digests = digests or experiment.digests(check=False)
    changed = {name: file for name, record in records.items()
               if record and (file := _changed_output(output, record, digests))}
    results = {name: f"({name}: {changed[name]} was changed after it had been written)"
               if name in changed else record.result if record else ""
               for name, record in records.items()}
    done = {name for name, record in records.items()
            if record and record.status == DONE and name not in changed}
    for stage, kind, suffix in (("saliency", "saliency", ""),
                                ("counterfactual_maps", "counterfactual", COUNTERFACTUAL)):
        for strip in folder.glob(f"{kind}_*.png"):  # samples of an earlier run
            if re.fullmatch(rf"{kind}_\d{{5,}}\.png", strip.name):
                strip.unlink()
        if stage in done:
            write_saliency_strips(output, folder, kind, suffix)
    if "evaluate" in done:
        draw_training_curve(output, page.agent_file)
    pages = templates(TEMPLATES)
    name = experiment.description().get("name", "")

    def part(files: Files) -> dict[str, Any]:
        return _part(output, files, done, records.keys(), changed)

    sections = []
    for section in page.sections:
        stage, table = TABLES.get(section.section, ("", None))
        checking, checks = CHECKS_OF.get(section.section, ("", None))
        needed = [name for _, name, *_ in string.Formatter().parse(section.answer)
                  if name in records]
        unfinished = [name for name in needed if name not in done and name not in changed]
        answer = section.answer.format_map(collections.defaultdict(str, results))
        sections.append((section, {
            "answer": f"Not finished yet: {', '.join(unfinished)}." if unfinished else
            answer[:1].upper() + answer[1:], "figure": part(section.figure),
            "tools": [part(files) for files in section.tools if files.stage in records],
            "more": [part(files) for files in section.more if files.stage in records],
            "checks": checks(output) if checks and checking in done else [],
            "table": table(output) if table and stage in done else None}))
    for document in _documents(output, page, done):
        text = pages.get_template("document.html.j2").render(
            title=name, back=(PAGE_NAME, f"Back to the experiment {name}"),
            body=render_document(output, document))
        _write(folder / _page_of(output, document), text)
    opening = [shown for shown in map(part, page.opening) if shown["media"]]
    total = sum(record.seconds for record in records.values() if record)
    _write(folder / PAGE_NAME, pages.get_template("report.html.j2").render(
        name=name, preset=experiment.description().get("preset", ""),
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}", sections=sections, opening=opening,
        page=page, running=running, rows=[
            {**_row(output, name, record), **({"status": "changed", "result": results[name]}
                                              if name in changed else {})}
            for name, record in records.items()], total=duration(total),
        versions=versions()))
    return folder / PAGE_NAME


def _changed_output(output: Path, record: Record, digests: Digests) -> str:
    """Return the first output that is missing or was changed since the stage was done, or ""."""
    return next((name for name, digest in record.outputs.items()
                 if not (output / name).is_file() or digests.of(output / name) != digest), "")


def _write(path: Path, page: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _part(output: Path, files: Files, done: Collection[str], names: Collection[str],
          changed: Mapping[str, str]) -> dict[str, Any]:
    """Return the files of a section as values of the page template.

    The values are ``caption``, ``media`` (the files to show) and ``missing`` (the reason why there
    are no files, otherwise "").

    Args:
        output: output folder.
        files: files to show.
        done: names of the stages that are done.
        names: names of all stages of the preset.
        changed: output that was changed since a stage was done, by name of the stage; such stages
            are not shown.
    """
    media: list[dict[str, str]] = []
    missing = f"The stage {files.stage} has written no such file."
    if files.stage not in names:
        missing = "This preset does not include it."
    elif files.stage in changed:
        missing = (f"Not shown: {changed[files.stage]} was changed after the stage {files.stage} "
                   f"had written it. Run the stage again with --only {files.stage}.")
    elif files.stage not in done:
        missing = (f"Not available yet: the stage {files.stage} is not finished. Run it with "
                   f"--only {files.stage}.")
    else:
        for pattern in files.files:
            paths = sorted(path for path in output.glob(pattern) if path.is_file())
            media += [_medium(output, path) for path in
                      (paths[-files.limit:] if files.newest else paths[:files.limit])]
    return {"caption": files.caption, "media": media, "missing": "" if media else missing}


def _medium(output: Path, path: Path) -> dict[str, Any]:
    """Return the kind of a file, its URL relative to the page, its name, a video's poster, and
    whether an image is a plot, which is dimmed on a dark page, or too wide for a column."""
    kind = {".mp4": "film", ".png": "picture", ".gif": "picture"}.get(path.suffix, "link")
    name = path.parent.name if path.name in (PAGE_NAME, "index.md") else path.name
    source, poster = os.path.relpath(path, output / REPORT), ""
    if path.suffix == ".md":
        name, source = name.removesuffix(".md").replace("_", " "), _page_of(output, path)
    if kind == "film":
        poster = str(Path("posters") / path.relative_to(output).with_suffix(".jpg"))
        try:
            write_poster(output / REPORT / poster, path)
        except UserError:  # the video is damaged
            poster = ""
    medium: dict[str, Any] = {"kind": kind, "source": quote(source), "name": name,
                              "poster": quote(poster)}
    if kind == "picture" or poster:
        try:
            with Image.open(output / REPORT / poster if poster else path) as image:
                medium |= {"plot": "Matplotlib" in image.info.get("Software", ""),
                           "wide": image.width > WIDE * image.height}
        except (OSError, SyntaxError):  # the picture is damaged
            pass
    return medium


def _documents(output: Path, page: Page, done: Collection[str]) -> list[Path]:
    """Return the Markdown files that sections show, and all other Markdown files next to them."""
    shown = [path for section in page.sections
             for files in (section.figure, *section.tools, *section.more)
             if files.stage in done
             for pattern in files.files for path in output.glob(pattern) if path.is_file()]
    return sorted({document for path in shown if path.suffix == ".md"
                   for document in path.parent.glob("*.md") if document.is_file()})


def _page_of(output: Path, document: Path) -> str:
    """Return the file name of the page that shows a Markdown file."""
    return "_".join(document.relative_to(output).with_suffix(".html").parts)


def render_document(output: Path, document: Path) -> markupsafe.Markup:
    """Convert a Markdown file of an analysis to HTML, with links relative to the report's folder;
    see ``render_markdown``.

    Args:
        output: output folder.
        document: the Markdown file.
    """
    root = output.resolve()
    return render_markdown(document, lambda target: (
        _page_of(root, target) if target.suffix == ".md" and target.is_file()
        else os.path.relpath(target, root / REPORT)))


def _row(output: Path, name: str, record: Record | None) -> dict[str, Any]:
    """Return a row of the table of stages."""
    if record is None:
        unknown = dict.fromkeys(("seconds", "size", "result", "why", "date", "log"), "")
        return {**unknown, "name": name, "status": NOT_RUN}
    seconds, size, result = figures(record)
    log = output / record.log
    return {"name": name, "status": record.status, "seconds": seconds, "size": size,
            "result": result, "why": "" if record.why == FIRST_RUN else record.why,
            "date": record.date,
            "log": _medium(output, log) if log.is_file() else None}


# Tables in the terminal


def print_plan(pipeline: Pipeline) -> None:
    """Print for each stage whether it would run and why; if it would, also the command."""
    verbs = {UP_TO_DATE: "is up to date", CONTINUE: "would be continued", RUN: "would run",
             SKIPPED: "is skipped"}
    for stage, decision in pipeline.plan():
        print(f"{stage.name} {verbs[decision.action]}: {decision.why}")
        if decision.action in (CONTINUE, RUN):
            print(f"    {pipeline.command(stage)}")


def print_table(experiment: Experiment, outcomes: Sequence[tuple[Stage, Decision, int]]) -> None:
    """Print one line per stage: action, time, size, reason and result.

    Args:
        experiment: output folder with the records.
        outcomes: stages with decisions and exit statuses, from ``Pipeline.run``.
    """
    verbs = {UP_TO_DATE: "up to date", CONTINUE: "continued", RUN: "ran", SKIPPED: "skipped"}
    rows = [("stage", "", "time", "size", "because", "result")]
    for stage, decision, status in outcomes:
        verb = state_of_exit(status) if status else verbs[decision.action]
        record = experiment.record(stage.name)
        time, size, result = figures(record) if record else ("", "", "")
        rows.append((stage.name, verb, time, size, decision.why, result))
    print()
    print_columns(rows)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def figures(record: Record) -> tuple[str, str, str]:
    """Format wall time, size of the outputs and result of a stage; "" for unknown values.

    Args:
        record: record of the last run of the stage.
    """
    return (duration(record.seconds) if record.seconds else "",
            f"{record.bytes / 1e6:.1f} MB" if record.status == DONE else "", record.result)


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds, such as 2:05:00 or 1 day, 2:05:00."""
    return str(datetime.timedelta(seconds=round(seconds)))
