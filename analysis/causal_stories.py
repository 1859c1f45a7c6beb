"""Causal stories: pages about the influences of components of the hidden state."""

# Layout of the folder:
#
#     index.md                     list of behaviours, how to read the pages, and their limitations
#     behaviour_<cc>.md, all.md    one page per behaviour, and one for all samples
#     <page>_samples.png           frames of a few samples
#     <page>_influences.png        the most consistent influences
#     ic_<ii>.png                  frames in which a component is highest and lowest

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.influence_sentences import BehaviourInfluences, describe_samples, influence_sentence
from analysis.influences.comparison import COMPARISON_FILES, WITH, WITHOUT
from analysis.influences.consistency import ALL_SAMPLES, MIN_EFFECT, Group, file_stem
from analysis.influences.correlation import extreme_rows
from analysis.influences.gradients import Inputs, members
from analysis.parameters import AnalysisOptions
from common.cli import count, seed
from common.errors import UserError
from common.options import command, option
from common.palette import BLUE, DARK_GREY, DPI, VERMILION
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Entry, File, Schema
from common.tables import markdown_escaped, with_minus
from common.video import mark_action
from envs.objects import action_labels
from generative.config import SaliencyConfig
from generative.sample_files import SampleFolder
from interventions.flags import DirectionOptions

INDEX_NAME = "index.md"
PAGE_FILES = Schema(
    "pages of causal_stories.py", "analysis/causal_stories.py", replaced=True,
    results={"pages": Entry("{}.md", File()), "figures": Entry("{}.png", File())})
_FRAME = 0.95  # inches, side of a frame
_CHARTED = 12  # largest number of influences in a figure
_SHOWN_OF_COMPONENT = 8  # largest number of frames in each row of the figure of a component
# Marker, colour and vertical offset of each kind of gradient.
_MARKERS = {WITH: ("o", BLUE, -0.12), WITHOUT: ("^", VERMILION, 0.12)}


def named(text: str) -> tuple[int, str]:
    """argparse type: number and name of a behaviour, such as ``3=jumps``."""
    match = re.fullmatch(r"\s*(\d+)\s*=\s*(\S.*?)\s*", text, re.DOTALL)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must be a number and a name, such as 3=jumps, not {text}")
    return int(match[1]), match[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoriesOptions(DirectionOptions, AnalysisOptions):
    """Write causal stories, one page per behaviour. A page shows some samples of the behaviour, and
    lists influences of components of the hidden state on one another and on the agent's outputs. An
    influence is claimed only if the gradients agree with the correlations."""

    samples_dir: Path | None = option(None, "folder of the samples; if not given, the folder that "
                                            "the comparison used")
    comparison_dir: Path | None = option(
        None, "folder of the tables and matrices of dynamics_grads_consistency_plots.py; "
              "<save_dir>/dyn_grad_comparison_data if not given")
    comparison_plots_dir: Path | None = option(
        None, "folder of the figures of that script, which pages link to; "
              "<save_dir>/dyn_grad_comparison_plots if not given")
    output_dir: Path | None = option(None, "folder for the pages; <save_dir>/causal_stories if not "
                                           "given")
    num_films: int = option(5, "number of samples shown per behaviour", type=count)
    behaviour_names: tuple[tuple[int, str], ...] = option(
        (), "names of behaviours to show on the pages", type=named, metavar="NUMBER=NAME")
    seed: int = option(0, "seed of the choice of samples that are shown", type=seed)


def write_stories(options: StoriesOptions) -> Path:
    """Write all pages, and return the path of the index."""
    names, folders = dict(options.behaviour_names), options.parameters.folders
    output = options.output_dir or folders.stories
    store = ResultStore(output, PAGE_FILES)
    store.check_replaceable()
    comparison = ResultStore(options.comparison_dir or folders.comparison, COMPARISON_FILES)
    settings = comparison.settings(*COMPARISON_FILES.setting_types)
    numbers = comparison.read("sample_ids").tolist()
    samples = SampleFolder(options.samples_dir or Path(settings["samples_dir"]))
    inputs = Inputs.read(samples, numbers, options.directions_folder, options.direction_episodes,
                         None)
    if inputs.matrices != settings["matrices_sha256"]:
        raise UserError(f"the comparison in {comparison.path} was made with other directions than "
                        "those in --precomp_dir")
    share = options.parameters.get(SaliencyConfig).extrema_threshold
    pages = BehaviourPages(comparison, samples, inputs.coordinates.ics,
                           share, options.num_films, names,
                           options.comparison_plots_dir or folders.comparison_plots, options.seed)
    with store.replace({
            "comparison": settings, "num_films": options.num_films, "extrema_threshold": share,
            "behaviour_names": {str(key): name for key, name in names.items()},
            "seed": options.seed}) as temporary:
        written = pages.write(temporary, output)
    index = output / written[-1].name
    print(f"wrote {len(written)} pages to {output}; begin with {index}")
    return index


class BehaviourPages:
    """Writer of the pages with causal stories, one page per behaviour.

    Letters in shape comments: I independent components (ICs).

    Args:
        comparison: results of dynamics_grads_consistency_plots.py.
        samples: folder of the samples of the comparison.
        ics: coordinates of the ICs in the samples of the comparison, in its order (M, T, I).
        share: fraction of all steps counted as extreme at each end of a component's range; the
            frames that illustrate the component are chosen from these steps.
        num_films: number of samples of each behaviour that are shown.
        names: names that the user gave to behaviours, by behaviour number.
        plots: folder with the figures of the comparison; pages link to the figures that exist.

    Raises:
        UserError: if the comparison is damaged or belongs to other samples, or if ``names``
            contains a behaviour that no sample shows.
    """

    def __init__(self, comparison: ResultStore, samples: SampleFolder, ics: np.ndarray,
                 share: float, num_films: int, names: Mapping[int, str], plots: Path, seed: int):
        self._settings = comparison.settings(*COMPARISON_FILES.setting_types)
        self._table, self._matrices = comparison.read("table"), comparison.read("matrix_table")
        self._numbers, labels = comparison.read("sample_ids"), comparison.read("behaviours")
        if not len(self._numbers) == len(labels) == len(ics):
            raise UserError(f"{comparison.path} is damaged: for {len(ics)} samples, it has "
                            f"{len(self._numbers)} sample numbers and {len(labels)} behaviours")
        self._in_none = int((labels < 0).sum())
        self._groups: dict[Group, np.ndarray] = {
            ALL_SAMPLES: np.arange(len(labels)), **members(labels)}
        for unknown in names.keys() - self._groups.keys():
            raise UserError(f"--behaviour_names names behaviour {unknown}, which no sample shows")
        self._samples, self._ics, self._share = samples.stacked(self._numbers.tolist()), ics, share
        self._action_labels = action_labels(samples.game)
        self._num_films, self._names, self._plots = num_films, names, plots
        self._rng = np.random.default_rng(seed)
        self._step = self._settings["saliency_step"]
        self._influences = {group: BehaviourInfluences(
            self._table[self._table["behaviour"] == str(group)],
            self._matrices[self._matrices["behaviour"] == str(group)], self._settings["level"],
            self._settings["min_samples"]) for group in self._groups}

    def write(self, folder: Path, final: Path) -> list[Path]:
        """Write all pages and figures.

        Args:
            final: final location of this folder, from which relative links are computed.

        Returns:
            Paths of the pages, the index last.
        """
        components = sorted({int(name.split()[1]) for influences in self._influences.values()
                             for name in influences.components()})
        for component in with_progress(components, len(components), "component"):
            self._draw_component(folder / _component_name(component), component)
        pages = []
        for group in with_progress(self._groups, len(self._groups), "page"):
            pages.append(folder / f"{file_stem(group)}.md")
            pages[-1].write_text(self._page(group, folder, final), encoding="utf-8")
        pages.append(folder / INDEX_NAME)
        pages[-1].write_text(self._index(), encoding="utf-8")
        return pages

    def _title(self, group: int | str) -> str:
        if isinstance(group, str):
            return "All samples"
        name = self._names.get(group)
        return f"Behaviour {group}" + (f": {markdown_escaped(name)}" if name else "")

    def _page(self, group: int | str, folder: Path, final: Path) -> str:
        influences, rows, stem = self._influences[group], self._groups[group], file_stem(group)
        films = np.sort(self._rng.permutation(rows)[:self._num_films])
        plain = "all samples" if group == ALL_SAMPLES else f"behaviour {group}"
        plot_films(folder / f"{stem}_samples.png", self._marked_frames(films),
                   [f"sample {number}" for number in self._numbers[films]],
                   f"{plain.capitalize()}: {len(films)} of {len(rows)}, drawn at random; the mark "
                   "is the action that led to the frame")
        parts = [f"# {self._title(group)}\n", f"[All behaviours]({INDEX_NAME})\n",
                 "## Samples\n",
                 describe_samples(rows, self._samples, self._ics, self._step,
                                  self._action_labels) + "\n",
                 f"![Steps of {len(films)} samples]({stem}_samples.png)\n"]
        if influences.testable:
            chart = influences.best(influences.variants[0]).head(_CHARTED)
            others = [influences.counterpart(row) for _, row in chart.iterrows()]
            plot_influences(folder / f"{stem}_influences.png", chart, others, influences.variants,
                            f"{chart['claimed'].sum()} of the {len(chart)} most consistent "
                            f"influences in {plain} ({len(rows)} samples) are claimed")
            parts += ["## Most consistent influences\n",
                      f"![Agreement of gradients and deviations]({stem}_influences.png)\n"]
        for variant in influences.variants:
            parts += [f"## {variant.capitalize()} gradients through the environment\n",
                      influences.text(variant)]
        if len(influences.variants) == 1:
            parts.append("Gradients without paths through the environment were not analysed.\n")
        shown = influences.components()
        if shown:
            parts.append("## What these components look like\n")
            parts += [f"![Where {name} is highest and lowest]"
                      f"({_component_name(int(name.split()[1]))})\n" for name in shown]
        links = [f"[lag {lag}]({quote(Path(os.path.relpath(path, final)).as_posix())})"
                 for lag in range(self._step + 1)
                 if (path := self._plots / f"{stem}_t-{lag}.png").exists()]
        if links:
            parts.append("Gradients next to correlations: " + ", ".join(links) + ".\n")
        return "\n".join(parts)

    def _marked_frames(self, rows: np.ndarray) -> np.ndarray:
        """Return the frames of the samples at ``rows``, with recorded actions marked, uint8
        (samples, T, height, width, 3)."""
        return np.stack([[mark_action(frame, action) if action >= 0 else frame
                          for frame, action in zip(self._samples.frames[row],
                                                   self._samples.actions[row])] for row in rows])

    def _index(self) -> str:
        settings = self._settings
        first = next(iter(self._influences.values())).variants
        lines = [
            "# Causal stories\n",
            f"{len(self._numbers)} simulated samples; {len(self._groups) - 1} behaviours"
            + (f"; {self._in_none} samples without a behaviour" if self._in_none else "") + ". "
            f"Targets are read at step {self._step}, sources up to {self._step} steps earlier.\n",
            "| | samples | " + " | ".join(f"claimed of tested, {kind} environment gradients"
                                          for kind in first) + " | most consistent claim |",
            "| --- | --- |" + " --- |" * (len(first) + 1)]
        for group, influences in self._influences.items():
            counts = [f"{len(influences.claims(kind))} of {influences.num_tested(kind)}"
                      if influences.testable else "not tested" for kind in first]
            claims = influences.claims(first[0])
            best = "–" if claims.empty else influence_sentence(claims.iloc[0], None).split("**")[1]
            lines.append(f"| [{self._title(group)}]({file_stem(group)}.md) | "
                         f"{influences.num_samples} | {' | '.join(counts)} | {best} |")
        lines += [
            "", "The table counts influences of a component on other components and on the "
            "agent's outputs; influences of a component on itself are on the pages.\n",
            "## How to read them\n",
            "An influence is claimed if four conditions hold. First, the gradient has the sign of "
            "the product of the deviations of source and target from their medians in more samples "
            "than when the sources are shuffled among the samples. Second, the p-value of this "
            f"test is at most {settings['level']}, corrected for all pairs, lags and behaviours "
            f"({settings['num_shuffles']} shuffles). "
            "Third, the median gradient has the sign of the cross-correlation. Fourth, one "
            f"standard deviation of the source moves the target by at least {MIN_EFFECT} of the "
            "target's standard deviation. Components (ICs) are directions of the agent's hidden "
            "state; their sign is arbitrary. The target of an influence at lag k is read k "
            "steps after its source.\n",
            "## Limitations\n",
            "Gradients are those of the learned simulator, not of the game, and hold for small "
            "changes around the simulated states. The influence of a component on an output in the "
            "same step is its readout weight and needs no simulator. An influence may pass through "
            "other components. An influence that is not claimed may still exist: the tests miss "
            "small effects, and effects in behaviours with few samples. Gradients with and without "
            "paths through the environment are tested separately. Samples are treated as "
            "independent, although some start in the same recorded episode. " + (
                "Influences on the agent's outputs are computed from its readout weights alone, in "
                "the same step." if settings["answers_from"] != "saliency" else
                "Influences on the agent's outputs come from the gradients of its outputs."
                if settings["answers"] else
                "Influences on the agent's outputs were not analysed.") + "\n"]
        return "\n".join(lines)

    def _draw_component(self, path: Path, component: int) -> None:
        values = self._ics[..., component]  # (M, T)
        lowest, highest = extreme_rows(values.ravel(), self._share)
        rows_of = [self._spread(rows, values.shape[1]) for rows in (highest[::-1], lowest)]
        number = min(map(len, rows_of))
        frames, notes = [], []
        for rows in rows_of:
            samples, steps = np.divmod(rows[:number], values.shape[1])
            frames.append(self._samples.frames[samples, steps])
            notes.append([with_minus(f"sample {self._numbers[sample]}\nstep {step}: "
                                     f"{values[sample, step]:+.1f}")
                          for sample, step in zip(samples, steps)])
        plot_component(path, frames, notes,
                       f"IC {component}: steps of different samples among the {len(highest)} "
                       f"highest and lowest of {values.size}\n(in standard deviations of the "
                       "recorded states; the state after the frame was seen)")

    def _spread(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        """Select the first row of each sample, for at most _SHOWN_OF_COMPONENT samples. Rows are
        indices into the M * T steps of all samples, and keep their order."""
        _, first = np.unique(rows // num_steps, return_index=True)
        return rows[np.sort(first)[:_SHOWN_OF_COMPONENT]]


def _component_name(component: int) -> str:
    return f"ic_{component:02d}.png"


def plot_films(path: Path, films: np.ndarray, labels: Sequence[str], title: str) -> None:
    """Draw the frames of samples, one sample per row.

    Args:
        films: frames of the samples, uint8 (samples, T, height, width, 3).
    """
    figure, panels = _frames(*films.shape[:2])
    for row, (film, label) in enumerate(zip(films, labels)):
        _draw_row(panels[row], film, label)
    for step, axes in enumerate(panels[-1]):
        axes.set_xlabel(str(step), fontsize=8)
    figure.supxlabel("simulated step", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_component(path: Path, frames: Sequence[np.ndarray], notes: Sequence[Sequence[str]],
                   title: str) -> None:
    """Draw frames in which a component is highest (first row) and lowest (second row).

    Args:
        frames: frames of each of the two rows, uint8 (frames per row, height, width, 3).
        notes: for each row, the captions below its frames.
    """
    figure, panels = _frames(2, len(frames[0]))
    for axes, of_row, label, words in zip(panels, frames, ("highest", "lowest"), notes):
        _draw_row(axes, of_row, label)
        for panel, note in zip(axes, words):
            panel.set_xlabel(note, fontsize=6)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_influences(path: Path, rows: pd.DataFrame, others: Sequence[pd.Series | None],
                    kinds: Sequence[str], title: str) -> None:
    """Draw the sign agreement of influences for both kinds of gradient. Markers of claimed
    influences are filled.

    Args:
        rows: rows of ``agreement.csv``, one per influence, all with the same kind of gradient.
        others: rows of the same influences for the other kind of gradient, None if not computed.
        kinds: kinds of gradient that were computed, WITH or WITHOUT paths through the environment.
    """
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, ((_, row), other) in enumerate(zip(rows.iterrows(), others)):
        for influence in (row, other):
            if influence is not None:
                marker, colour, offset = _MARKERS[influence["env_grads"]]
                axes.plot(influence["agreement"], place + offset, marker=marker, color=colour,
                          markersize=7,
                          markerfacecolor=colour if influence["claimed"] else "white")
    axes.axvline(0.5, color=DARK_GREY, linestyle=":")
    axes.set_yticks(range(len(rows)), [
        f"{row['source']} {'raises' if row['median_gradient'] > 0 else 'lowers'} {row['target']}, "
        f"lag {row['lag']}, effect {row['effect']:.2f}" for _, row in rows.iterrows()], fontsize=8)
    axes.set(xlim=(0, 1.02), ylim=(len(rows) - 0.4, -0.6),
             xlabel="share of the samples in which gradient and deviations agree; dotted: chance")
    axes.grid(axis="x", alpha=0.3)
    handles = []
    for claimed, kind in itertools.product((True, False), kinds):
        marker, colour, _ = _MARKERS[kind]
        handles.append(Line2D([], [], linestyle="", marker=marker, color=colour,
                              markerfacecolor=colour if claimed else "white",
                              label=f"{kind} gradients through the environment, "
                                    f"{'claimed' if claimed else 'not claimed'}"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def _frames(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(max(_FRAME * columns + 0.9, 6.5), (_FRAME + 0.12) * rows + 1),
                    layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _draw_row(panels: Sequence[Axes], frames: np.ndarray, label: str) -> None:
    for axes, frame in zip(panels, frames):
        axes.imshow(frame, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
    panels[0].set_ylabel(label, fontsize=7)


main = command(StoriesOptions, write_stories)

if __name__ == "__main__":
    raise SystemExit(main())
