"""Reports on an experiment: tables in the terminal, and ``report/index.html``.

The page opens from disk. It links to the files written by the stages, and lists missing ones.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import html
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote
from xml.etree.ElementTree import Element

import jinja2
import markdown
import markupsafe
import numpy as np
from markdown.inlinepatterns import InlineProcessor
from markdown.treeprocessors import Treeprocessor

from agents.run_folder import read_log
from agents.training_plots import plot_for_figure
from common.errors import UserError
from common.files import atomic_path, read_description, versions
from common.results import ResultStore
from common.video import write_poster, write_strip
from generative.loss_over_time import LOSS_OVER_TIME
from generative.loss_tables import IMAGE_MSE
from generative.saliency.files import SaliencyFolder
from interventions.comparison import comparison_store
from pipeline.presets import ROOT
from pipeline.records import DONE, Experiment, Record
from pipeline.runner import CONTINUE, RUN, SKIPPED, UP_TO_DATE, Pipeline, StageOutcome
from pipeline.sections import STRIP_SAMPLES, TRAINING_CURVE, Files, Page, Section
from pipeline.stage import MADE_BY, Stage
from pipeline.stages import FOLDERS
from stats.effects import claims_summary

REPORT = Path("report")
PAGE_NAME = "index.html"
TEMPLATES = Path(__file__).parent / "templates"
PAGE, DOCUMENT = "report.html.j2", "document.html.j2"
STRIP_FUNCTIONS, STRIP_HEIGHT = 3, 96
SHOWN_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Medium:
    """A file that the page shows.

    Attributes:
        kind: "picture", "film" or "link".
        source: URL relative to the page.
        name: name of the file or document.
        poster: URL of the image that is shown before a video plays; "" if there is none.
    """

    kind: str
    source: str
    name: str
    poster: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """Files with a caption.

    Attributes:
        caption: what the files show.
        media: the files.
        missing: reason why there are no files; "" if there are some.
    """

    caption: str
    media: list[Medium]
    missing: str


@dataclasses.dataclass(frozen=True)
class SectionContent:
    """Contents of a section of the page.

    Attributes:
        answer: sentence with the results of this run.
        figure: see ``Section``.
        tools: see ``Section``.
        more: see ``Section``.
        table: table of the section; None if it has none.
    """

    answer: str
    figure: Part
    tools: list[Part]
    more: list[Part]
    table: Table | None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in a section.

    Attributes:
        caption: what the table shows.
        header: names of the columns; columns with text come first.
        rows: rows of cells.
        text_columns: number of columns with text.
        folded: further rows, shown on request.
        folded_caption: caption of the further rows.
    """

    caption: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int
    folded: list[list[str]] = dataclasses.field(default_factory=list)
    folded_caption: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of the table of stages."""

    name: str
    status: str
    seconds: str
    size: str
    result: str
    why: str
    date: str
    log: Medium | None


def write_report(experiment: Experiment, stages: Sequence[Stage], page: Page) -> Path:
    """Write the page from the contents of the output folder; returns its path.

    Files of an earlier report are deleted; other files in its folder are kept.

    Raises:
        UserError: if the folder of the report is a symbolic link.
    """
    folder = experiment.path / REPORT
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, which the report is not written through; remove it")
    folder.mkdir(parents=True, exist_ok=True)
    experiment.remove_report(folder)
    others = set(folder.rglob("*"))
    done = {stage.name: record.result for stage in stages
            if (record := experiment.record(stage.name)) and record.status == DONE}
    if "saliency" in done:
        _write_saliency_strips(experiment.path, folder)
    if "evaluate" in done:
        _draw_training_curve(experiment.path, page.agent_file)
    names = {stage.name for stage in stages}
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True,
                                   undefined=jinja2.StrictUndefined, trim_blocks=True,
                                   lstrip_blocks=True)
    name = experiment.description().get("name", "")
    results = {name: done.get(name, f"({name} is not finished)") for name in names}
    sections = [(section, _content(experiment.path, section, done, names, results))
                for section in page.sections]
    opening = [part for files in page.opening
               if (part := _part(experiment.path, files, done, names)).media]
    for document in _documents(experiment.path, page, done):
        text = templates.get_template(DOCUMENT).render(
            name=name, body=render_document(experiment.path, document))
        _write(folder / _page_of(experiment.path, document), text)
    _write(folder / PAGE_NAME, templates.get_template(PAGE).render(
        name=name, preset=experiment.description().get("preset", ""),
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}", sections=sections, opening=opening,
        page=page,
        rows=[_row(experiment, stage) for stage in stages],
        total=duration(sum(record.seconds for stage in stages
                           if (record := experiment.record(stage.name)))),
        versions=versions()))
    experiment.note_report(set(folder.rglob("*")) - others)
    return folder / PAGE_NAME


def _write(path: Path, page: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _content(output: Path, section: Section, done: Collection[str], names: set[str],
             results: Mapping[str, str]) -> SectionContent:
    """Return the contents of a section for the stages of this preset.

    Args:
        output: output folder.
        section: the section.
        done: names of the stages that are done.
        names: names of all stages of the preset.
        results: result of each stage, by name.
    """
    def parts(files: Sequence[Files]) -> list[Part]:
        return [_part(output, each, done, names) for each in files if each.stage in names]

    answer = section.answer.format_map(collections.defaultdict(str, results))
    return SectionContent(answer[:1].upper() + answer[1:],
                          _part(output, section.figure, done, names), parts(section.tools),
                          parts(section.more), _table(output, section.anchor, done))


def _part(output: Path, files: Files, done: Collection[str], names: set[str]) -> Part:
    if files.stage not in names:
        return Part(files.caption, [], "This preset does not make it.")
    if files.stage not in done:
        return Part(files.caption, [], f"Not made yet: the stage {files.stage} is not finished. "
                    f"Run it with --only {files.stage}.")
    media = []
    for pattern in files.patterns:
        found = sorted(output.glob(pattern))
        for path in found[-files.limit:] if files.newest else found[:files.limit]:
            media.append(_medium(output, path))
    return Part(files.caption, media, "" if media else
                f"The stage {files.stage} has written nothing of the kind.")


def _medium(output: Path, path: Path) -> Medium:
    kind = {".mp4": "film", ".png": "picture", ".gif": "picture"}.get(path.suffix, "link")
    if path.suffix == ".md":
        name = path.parent.name if path.stem == "index" else path.stem
        return Medium(kind, quote(_page_of(output, path)), name.replace("_", " "))
    name = path.parent.name if path.name == PAGE_NAME else path.name
    poster = _poster(output, path) if kind == "film" else ""
    return Medium(kind, quote(os.path.relpath(path, output / REPORT)), name, poster)


def _poster(output: Path, film: Path) -> str:
    """Write the poster image of a video; returns its URL, or "" if the video is damaged."""
    poster = Path("posters") / film.relative_to(output).with_suffix(".jpg")
    try:
        write_poster(output / REPORT / poster, film)
    except UserError:
        return ""
    return quote(str(poster))


def _documents(output: Path, page: Page, done: Collection[str]) -> list[Path]:
    """Return the Markdown files that sections show, and all others in the same folders."""
    shown = [path for section in page.sections for files in section.files
             if files.stage in done
             for pattern in files.patterns for path in output.glob(pattern)]
    return sorted({document for path in shown if path.suffix == ".md"
                   for document in path.parent.glob("*.md")})


def _page_of(output: Path, document: Path) -> str:
    """Return the file name of the page that shows a Markdown file."""
    folder = document.relative_to(output).parent
    return f"{'_'.join(folder.parts)}_{document.stem}.html"


def render_document(output: Path, document: Path) -> markupsafe.Markup:
    """Convert a Markdown file of an analysis to HTML.

    The file contains names chosen by users. Therefore, embedded HTML is shown as text, except for
    line breaks and anchors. Links are made relative to the report's folder; links and images with a
    scheme, such as ``https:``, are shown as text.
    """
    reader = markdown.Markdown(extensions=["tables"])
    reader.preprocessors.deregister("html_block")
    for name in ("html", "autolink", "automail"):
        reader.inlinePatterns.deregister(name)
    reader.inlinePatterns.register(_OwnMarkup(_OwnMarkup.PATTERN, reader), "own markup", 90)
    reader.treeprocessors.register(_Links(output, document), "links", 1)
    return markupsafe.Markup(reader.convert(document.read_text()))


class _OwnMarkup(InlineProcessor):
    """Parse the embedded HTML that reports contain: line breaks and anchors."""

    PATTERN = r'<br>|<a id="([a-z0-9_-]+)"></a>'

    def handleMatch(self, m: re.Match, data: str) -> tuple[Element, int, int]:
        element = Element("a", id=m[1]) if m[1] else Element("br")
        return element, m.start(0), m.end(0)


class _Links(Treeprocessor):
    """Convert links of a document to those of its page, and external links to text."""

    def __init__(self, output: Path, document: Path):
        super().__init__()
        self._output, self._document = output.resolve(), document

    def run(self, root: Element) -> None:
        for element in root.iter():
            name = {"a": "href", "img": "src"}.get(element.tag, "")
            target = element.get(name)
            if target is None:  # an anchor without a link
                continue
            address = self._moved(html.unescape(target))
            if address is not None:
                element.set(name, address)
                continue
            element.text = element.get("alt") or element.text
            element.tag = "span"
            element.attrib.clear()

    def _moved(self, address: str) -> str | None:
        """Return the link for the page; None unless it leads to a file in the document's folder
        or below it."""
        if address.startswith("#"):
            return address
        path = unquote(address.partition("#")[0])
        if not re.fullmatch(r"[\w .-]+(/[\w .-]+)*", path):  # no scheme, no host, no root
            return None
        target = (self._document.parent / path).resolve()
        if target.suffix == ".md" and target.is_file():
            moved = _page_of(self._output, target)
        else:
            moved = os.path.relpath(target, self._output / REPORT)
        return quote(moved) + address[len(address.partition("#")[0]):]


def _row(experiment: Experiment, stage: Stage) -> Row:
    record = experiment.record(stage.name)
    if record is None:
        return Row(stage.name, "not run", "", "", "", "", "", None)
    log = experiment.path / record.log
    return Row(stage.name, record.status, *figures(record), record.why, record.date,
               _medium(experiment.path, log) if log.is_file() else None)


def _table(output: Path, section: str, done: Collection[str]) -> Table | None:
    """Return the table of a section; None if it has none."""
    if section == "simulator" and "loss_over_time" in done:
        return _loss_table(output)
    if section == "interventions" and "interventions" in done:
        return _effects_table(output)
    return None


def _loss_table(output: Path) -> Table:
    """Return the table of the image error of each predictor at the first steps."""
    table = ResultStore(output / "loss_over_time", LOSS_OVER_TIME).read("table")
    table = table[(table["kind"] == IMAGE_MSE) & table["step"].between(1, SHOWN_STEPS)]
    means = table.pivot(index="predictor", columns="step", values="mean")
    means = means.reindex(table["predictor"].unique())
    return Table("Mean squared error of the image by simulated step.",
                 ["predictor", *map(str, means.columns)],
                 [[name.replace("_", " "), *(f"{value:.4f}" for value in row)]
                  for name, row in zip(means.index, means.to_numpy())], 1)


def _effects_table(output: Path) -> Table:
    """Return the table of the effects of each direction on each outcome."""
    table = comparison_store(output / FOLDERS.interventions).read("effects")
    table = table[~table["control"]]
    rows = [[row.label, row.outcome.replace("_", " "), f"{row.unaltered:.3g}", f"{row.altered:.3g}",
             f"{row.effect:+.3g} ({row.low_95:+.3g} to {row.high_95:+.3g})", f"{row.p_holm:.2g}",
             f"{row.p_control:.2g}"] for row in table.itertuples()]
    claimed = [row for row, is_claimed in zip(rows, table["claimed"]) if is_claimed]
    others = [row for row, is_claimed in zip(rows, table["claimed"]) if not is_claimed]
    return Table(
        f"{claims_summary(table)}. Means without and with the "
        "alteration, the change with its 95 % interval, its corrected p, and the share of random "
        "directions with as large a change.",
        ["alteration", "outcome", "unaltered", "altered", "change", "p (Holm)", "p (controls)"],
        claimed, 2, others, f"The {len(others)} effects that are not claimed")


def _draw_training_curve(output: Path, agent_file: str | None) -> None:
    """Plot the training curve of the analysed agent, from the log next to its file.

    Args:
        output: output folder.
        agent_file: file of the agent; None for the agent that was trained here.
    """
    if agent_file is None:
        runs = sorted((output / "agent").glob("**/log.csv"))
        folder = runs[-1].parent if runs else None
    else:
        folder = (ROOT / agent_file).parent
    if folder is not None and (folder / "log.csv").is_file():
        log = read_log(folder)
        plot_for_figure(log, output / TRAINING_CURVE, f"{log['timesteps'].iloc[-1]:,} steps")


def _write_saliency_strips(output: Path, folder: Path) -> None:
    """Write image strips of the first samples: frames above the saliency of several functions."""
    files = SaliencyFolder(output / "samples" / "informed_init")
    for number in files.samples.numbers()[:STRIP_SAMPLES]:
        described = sorted(files.samples.sample_folder(number).glob("saliency_*.json"))
        names = [read_description(path)["function"] for path in described]
        names.sort(key=lambda name: (name != "value", name != "action", name))
        if names:
            rows = [files.samples.sample(number).frames,
                    *(files.saliency(number, name).processed
                      for name in names[:STRIP_FUNCTIONS])]
            write_strip(folder / f"saliency_{number:05d}.png",
                        [list(np.asarray(row)) for row in rows], STRIP_HEIGHT)


# Tables in the terminal


def print_plan(pipeline: Pipeline) -> None:
    """Print what each stage would do, why, and the equivalent command."""
    verbs = {UP_TO_DATE: "is up to date", CONTINUE: "would be continued", RUN: "would run",
             SKIPPED: "is skipped"}
    placeholders: dict[str, str] = {}
    for stage, decision in pipeline.plan():
        print(f"{stage.name} {verbs[decision.action]}: {decision.why}")
        if decision.action in (CONTINUE, RUN):
            command = pipeline.command(stage)
            print(f"    {command}")
            placeholders |= {place: name for place, name in MADE_BY.items() if place in command}
    for place, name in placeholders.items():
        print(f"{place} stands for the file that {name} will write")


def print_table(outcomes: Sequence[StageOutcome]) -> None:
    """Print one line per stage: action, time, size, result and reason."""
    verbs = {UP_TO_DATE: "up to date", CONTINUE: "continued", RUN: "ran", SKIPPED: "skipped"}
    rows = [("stage", "", "time", "size", "result", "because")]
    for outcome in outcomes:
        verb = ("stopped" if outcome.status > 128 else "failed" if outcome.status else
                verbs[outcome.decision.action])
        rows.append((outcome.stage.name, verb, *figures(outcome.record), outcome.decision.why))
    print()
    print_columns(rows, right=(2, 3))


def print_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print rows of cells in aligned columns.

    Args:
        rows: rows of cells.
        right: indices of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.rjust(width) if place in right else cell.ljust(width)
                        for place, (cell, width) in enumerate(zip(row, widths))).rstrip())


def figures(record: Record | None) -> tuple[str, str, str]:
    """Return time, size and result of a stage; "" for values that are not known."""
    if record is None:
        return "", "", ""
    return (duration(record.seconds), size(record.bytes) if record.status == DONE else "",
            record.result)


def duration(seconds: float) -> str:
    """Format a duration in seconds, such as 4.2 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(number: int) -> str:
    """Format a number of bytes, such as 12.3 MB."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"
