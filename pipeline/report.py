"""The page that ties an experiment together: ``report/index.html``, which opens from disk.

It refers to files where the stages have written them, and says what is missing.
"""

from __future__ import annotations

import dataclasses
import datetime
import html
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import jinja2
import markdown
import markupsafe
import numpy as np

from common.description import read_description
from common.errors import UserError
from common.files import atomic_path, versions
from common.tables import read_table
from common.video import write_poster, write_strip
from generative.loss_over_time import IMAGE_MSE, SHOWN_COLUMNS, TABLE_NAME
from generative.saliency.files import SaliencyFolder
from interventions.files import InterventionsFolder
from pipeline.presets import Preset
from pipeline.records import DONE, Experiment
from pipeline.stages import FOLDERS, Stage
from pipeline.summary import duration, figures

REPORT = Path("report")
PAGE_NAME = "index.html"
TEMPLATES = Path(__file__).parent / "templates"
PAGE, DOCUMENT = "report.html.j2", "document.html.j2"
STRIP_SAMPLES, STRIP_FUNCTIONS, STRIP_HEIGHT = 3, 3, 96
SHOWN_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Files:
    """Files of a stage that a section shows; Markdown becomes a page of the report.

    Attributes:
        stage: that writes them.
        patterns: in the output folder; the first files of each are shown.
        caption: what is to be seen.
        limit: at most so many of each pattern.
        newest: show the last ones instead of the first.
    """

    stage: str
    patterns: tuple[str, ...]
    caption: str
    limit: int = 1
    newest: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page: a question, and the files that answer it.

    Attributes:
        answered_by: the stage whose result is beside the title at the head of the page.
        text: what was asked and done.
        look_for: how to read what is shown.
        parts: what is shown.
    """

    anchor: str
    title: str
    answered_by: str
    text: str
    look_for: str
    parts: tuple[Files, ...]


SECTIONS = (
    Section("agent", "The agent", "evaluate", (
        "An agent with a memory learns by trial and error (PPO) to play levels that are generated "
        "for each episode. It sees frames of 64 x 64 pixels, and its hidden state is what it "
        "remembers."), (
        "Look for a return on unseen levels that rises with that on training levels and stays "
        "near it, and for episodes in which the agent makes for its goal."), (
        Files("plot_agent", ("agent/**/plot_for_fig.png",),
              "Training curve: the return on levels it trains on and on levels it never saw."),
        Files("render", ("videos/*_strip.png",), "Moments of one episode of the agent that is "
              "analysed below; the mark shows the action."),
        Files("render", ("videos/*_person.mp4",), "Episodes on levels it has not seen.", 3))),
    Section("simulator", "The simulator", "simulate", (
        "A differentiable copy of the environment, with the agent frozen inside, is trained on "
        "recorded episodes. Once it is good enough, one can ask by gradients what caused what."), (
        "Look for imagined objects that stay where the truth has them, and for nine futures "
        "that differ as the forced actions do."), (
        Files("plot_simulator", ("simulator/**/plot.png",), "Training: each term of the loss."),
        Files("train_simulator", ("simulator/**/recons_v_preds/*.mp4",),
              "From left to right: the truth, its reconstruction, and what the simulator imagines "
              "from a few first frames and the actions.", newest=True),
        Files("simulate", ("samples/informed_init/videos/*.mp4",), "Rollouts imagined from "
              "recorded frames. Arrow: action; blue box: probability that the episode ends; green "
              "box: reward.", 3),
        Files("simulate_at_random", ("samples/rand_init/videos/*.mp4",),
              "Rollouts imagined from nowhere.", 3),
        Files("simulate_actions", ("samples/manual_actions/videos/start_*.mp4",),
              "One start, nine futures: each action is forced where it points."))),
    Section("loss", "How long imagination stays true", "loss_over_time", (
        "The loss on held-out episodes against the simulated step, beside three predictors that "
        "any simulator must beat: the last frame, the mean frame, and itself with the actions of "
        "another episode."), (
        "Look for a curve of the simulator below all others: where it meets one of them, its "
        "images say no more than that predictor's."), (
        Files("loss_over_time", ("loss_over_time/*plot.png",), "Each kind of loss."),
        Files("loss_over_time", ("loss_over_time/truth_above_imagination_*.png",),
              "Above: recorded frames. Below: imagined ones.", 3))),
    Section("hidden", "What the hidden state looks like", "hidden_states", (
        "The hidden states of all recorded steps, seen along their principal and independent "
        "components, and as a map in which neighbours stay neighbours (t-SNE)."), (
        "Look for colours that form regions: there the hidden state tells values, actions or "
        "situations apart, and mixed colours mean that it does not."), (
        Files("plot_hidden_states", (f"{FOLDERS.hidden_state_plots}/variance_explained.png",),
              "How many components hold how much of the variance."),
        Files("plot_hidden_states", tuple(f"{FOLDERS.hidden_state_plots}/{name}.png" for name in (
            "pca_value", "pca_cluster", "tsne_value", "tsne_cluster", "tsne_action", "paths")),
              "Embeddings; the title of each says what its colours are."),
        Files("plot_hidden_states", (f"{FOLDERS.hidden_state_plots}/rotating_cluster.gif",),
              "Three components, turning."))),
    Section("saliency", "What raises value, actions and directions", "saliency", (
        "Gradients through the simulator say which pixels, had they been different, would have "
        "raised a number that is read off the agent some steps later: its value, the chance of "
        "its action, a direction of its hidden state. Blue raises, red lowers."), (
        "Look for colour on what matters in the game, such as obstacles and rewards, and for "
        "rows that differ: each should show what its own function depends on."), (
        Files("saliency", ("report/saliency_*.png",), "From top to bottom: what the agent sees, "
              "then the saliency of its value, of its action and of one direction.",
              STRIP_SAMPLES),
        Files("saliency", ("samples/informed_init/sample_*/sample_*_saliency_value.mp4",),
              "Saliency of the value, as films.", 3),
        Files("saliency", (f"{FOLDERS.saliency_demonstration}/sample_*/*.mp4",),
              "Beside the frames: saliency with gradients through the environment, without, and "
              "the difference.", 2))),
    Section("states", "Environment, behaviours, starts", "behaviours", (
        "The same maps of the simulated environment's states, of behaviours (clusters of what "
        "agent and environment do together), of the vectors from which simulations start, and of "
        "how the components of the hidden state depend on earlier states."), (
        "Look for behaviours of many samples in which few actions prevail, and for regions of "
        "one colour in the maps."), (
        Files("plot_env_states", (f"{FOLDERS.env_state_plots}/tsne_value.png",
                                  f"{FOLDERS.env_state_plots}/tsne_cluster.png"),
              "States of the simulated environment (t-SNE)."),
        Files("plot_behaviours", (f"{FOLDERS.behaviour_plots}/behaviours_overview.png",),
              "Behaviours: samples, steps and actions of each."),
        Files("plot_bottleneck_vectors", (f"{FOLDERS.bottleneck_plots}/variance_spectrum.png",
                                          f"{FOLDERS.bottleneck_plots}/cosines.png"),
              "Vectors that the encoder gives, beside random ones: how far from uniform they are."),
        Files("plot_jacobians", (f"{FOLDERS.jacobian_plots}/tsne_*cluster.png",
                                 f"{FOLDERS.jacobian_plots}/variance_explained.png"),
              "Gradients of the components in each sample (t-SNE), and their variance."))),
    Section("causes", "What causes what", "consistency", (
        "Correlation says what goes together; gradients through the simulator say what brings "
        "about what. An influence is claimed where both agree, sample by sample, beyond chance."), (
        "Look for pairs that are strong in both pictures with the same sign; what is strong "
        "in the correlations alone may have a common cause."), (
        Files("correlations", (f"{FOLDERS.correlation_plots}/xcorr_all.png",
                               f"{FOLDERS.correlation_plots}/xcaus_all.png"),
              "Cross-correlation of the components some steps apart, and cross-causation."),
        Files("consistency", (f"{FOLDERS.comparison_plots}/all_t-1.png",),
              "Gradients beside correlations, and where they agree, one step apart."),
        Files("readout_weights", (f"{FOLDERS.readout}/value_weights.png",
                                  f"{FOLDERS.readout}/action_weights.png"),
              "What each component does to the value and to the actions."),
        Files("causal_stories", (f"{FOLDERS.stories}/index.md",),
              "Causal stories: a page a behaviour, with what is claimed and what is not."))),
    Section("interventions", "What changes when a direction is altered", "interventions", (
        "The agent plays the same unseen levels with and without a direction of its hidden state. "
        "An effect is claimed only if it is clear in itself and larger than those of random "
        "directions of equal size."), (
        "Look for intervals that leave out zero and lie beyond the grey of the random "
        "directions."), (
        Files("interventions", (f"{FOLDERS.interventions}/effects.png",),
              "Effects with their 95 % intervals; grey: random directions."),
        Files("interventions", (f"{FOLDERS.interventions}/effects.md",),
              "All effects, and what may be claimed."))),
    Section("panel", "The interpretability panel", "panel", (
        "Scrub through simulated rollouts while seeing what the agent sees, what its hidden state "
        "does and what caused it."), (
        "Look for steps at which a component moves, and for what the saliency marks at the "
        "steps before."), (
        Files("panel", (f"{FOLDERS.panel}/index.html",), "It opens in the browser, from disk."),)),
)


@dataclasses.dataclass(frozen=True)
class Medium:
    """A file that is shown.

    Attributes:
        kind: picture, film or link.
        source: its address, as seen from the page.
        name: of the file, or of the document.
        poster: address of the picture that is shown until a film plays; "" if there is none.
    """

    kind: str
    source: str
    name: str
    poster: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """Files with their caption; ``missing`` says why there are none."""

    caption: str
    media: list[Medium]
    missing: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table under a section.

    Attributes:
        caption: what it shows.
        header: names of the columns, of which the first are text.
        rows: of cells.
        text_columns: number of the columns that hold text.
        folded: rows that are shown on request.
        folded_caption: what they are.
    """

    caption: str
    header: list[str]
    rows: list[list[str]]
    text_columns: int
    folded: list[list[str]] = dataclasses.field(default_factory=list)
    folded_caption: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A stage in the table of stages."""

    name: str
    status: str
    seconds: str
    size: str
    result: str
    why: str
    date: str
    log: Medium | None


def write_report(experiment: Experiment, stages: Sequence[Stage], preset: Preset) -> Path:
    """Write the page from what lies in the output folder; returns its path."""
    folder = experiment.path / REPORT
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = {stage.name for stage in stages
            if (record := experiment.record(stage.name)) and record.status == DONE}
    if "saliency" in done:
        _write_saliency_strips(experiment.path, folder)
    names = {stage.name for stage in stages}
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True,
                                   undefined=jinja2.StrictUndefined, trim_blocks=True,
                                   lstrip_blocks=True)
    name = experiment.description().get("name", "")
    sections = [(section, [_part(experiment.path, files, done, names) for files in section.parts],
                 _table(experiment.path, section.anchor, done),
                 experiment.record(section.answered_by).result
                 if section.answered_by in done else "") for section in SECTIONS]
    for document in _documents(experiment.path, done):
        page = templates.get_template(DOCUMENT).render(
            name=name, body=_rendered(experiment.path, document))
        _write(folder / _page_of(experiment.path, document), page)
    _write(folder / PAGE_NAME, templates.get_template(PAGE).render(
        name=name, preset=experiment.description().get("preset", ""),
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}", sections=sections,
        agent_file=preset.agent_file, model_file=preset.model_file,
        both_trained=preset.agent_training is not None and preset.simulator_training is not None,
        rows=[_row(experiment, stage) for stage in stages],
        total=duration(sum(record.seconds for stage in stages
                           if (record := experiment.record(stage.name)))),
        versions=versions()))
    return folder / PAGE_NAME


def _write(path: Path, page: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _part(output: Path, files: Files, done: set[str], names: set[str]) -> Part:
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
    """The address of a new picture of a film; "" if the film is damaged."""
    poster = Path("posters") / film.relative_to(output).with_suffix(".jpg")
    try:
        write_poster(output / REPORT / poster, film)
    except UserError:
        return ""
    return quote(str(poster))


def _documents(output: Path, done: set[str]) -> list[Path]:
    """The Markdown files in the folders of those that sections show."""
    shown = [path for section in SECTIONS for files in section.parts if files.stage in done
             for pattern in files.patterns for path in output.glob(pattern)]
    return sorted({document for path in shown if path.suffix == ".md"
                   for document in path.parent.glob("*.md")})


def _page_of(output: Path, document: Path) -> str:
    """The name of the page that shows a Markdown file."""
    folder = document.relative_to(output).parent
    return f"{'_'.join(folder.parts)}_{document.stem}.html"


def _rendered(output: Path, document: Path) -> markupsafe.Markup:
    """A Markdown file of an analysis as HTML; its links lead from the report's folder."""
    def relinked(match: re.Match) -> str:
        attribute, address = match.groups()
        target = (document.parent / unquote(html.unescape(address))).resolve()
        if target.suffix == ".md" and target.is_file():
            moved = _page_of(output.resolve(), target)
        else:
            moved = os.path.relpath(target, (output / REPORT).resolve())
        return f'{attribute}="{html.escape(quote(moved))}"'

    text = re.sub("<", "&lt;", document.read_text())  # it holds names that somebody chose
    page = markdown.markdown(text, extensions=["tables"])
    return markupsafe.Markup(re.sub(r'(src|href)="(?!#|[a-z]+:)([^"]*)"', relinked, page))


def _row(experiment: Experiment, stage: Stage) -> Row:
    record = experiment.record(stage.name)
    if record is None:
        return Row(stage.name, "not run", "", "", "", "", "", None)
    log = experiment.path / record.log
    return Row(stage.name, record.status, *figures(record), record.why, record.date,
               _medium(experiment.path, log) if log.is_file() else None)


def _table(output: Path, section: str, done: set[str]) -> Table | None:
    """The table of a section that has one."""
    if section == "loss" and "loss_over_time" in done:
        return _loss_table(output)
    if section == "interventions" and "interventions" in done:
        return _effects_table(output)
    return None


def _loss_table(output: Path) -> Table:
    """The image error of each predictor at the first steps."""
    table = read_table(output / "loss_over_time" / TABLE_NAME, SHOWN_COLUMNS)
    table = table[(table["kind"] == IMAGE_MSE) & table["step"].between(1, SHOWN_STEPS)]
    means = table.pivot(index="predictor", columns="step", values="mean")
    means = means.reindex(table["predictor"].unique())
    return Table("Mean squared error of the image by simulated step.",
                 ["predictor", *map(str, means.columns)],
                 [[name.replace("_", " "), *(f"{value:.4f}" for value in row)]
                  for name, row in zip(means.index, means.to_numpy())], 1)


def _effects_table(output: Path) -> Table:
    """Table of the effect of each direction on each outcome."""
    table = InterventionsFolder(output / FOLDERS.interventions).effects()
    table = table[~table["control"]]
    rows = [[row.label, row.outcome.replace("_", " "), f"{row.unaltered:.3g}", f"{row.altered:.3g}",
             f"{row.effect:+.3g} ({row.low_95:+.3g} to {row.high_95:+.3g})", f"{row.p_holm:.2g}",
             f"{row.p_control:.2g}"] for row in table.itertuples()]
    claimed = [row for row, is_claimed in zip(rows, table["claimed"]) if is_claimed]
    others = [row for row, is_claimed in zip(rows, table["claimed"]) if not is_claimed]
    return Table(
        f"{len(claimed)} of {len(rows)} effects are claimed. Means without and with the "
        "alteration, the change with its 95 % interval, its corrected p, and the share of random "
        "directions with as large a change.",
        ["alteration", "outcome", "unaltered", "altered", "change", "p (Holm)", "p (controls)"],
        claimed, 2, others, f"The {len(others)} effects that are not claimed")


def _write_saliency_strips(output: Path, folder: Path) -> None:
    """Pictures of the first samples, step by step: frames above what raises what."""
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
