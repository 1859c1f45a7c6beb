"""The pages of the causal stories: Markdown and figures in one folder.

    index.md                     all behaviours, how to read the pages, what they do not say
    behaviour_<cc>.md, all.md    one a behaviour, and one of all samples
    <page>_samples.png           films of a few samples
    <page>_influences.png        the most consistent influences
    ic_<ii>.png                  what a component looks like
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np

from analysis.influences.consistency import ALL_SAMPLES, MIN_EFFECT, file_stem
from analysis.influences.correlation import extreme_rows, members
from analysis.influences.files import ComparisonFolder
from analysis.stories.figures import plot_component, plot_films, plot_influences
from analysis.stories.sentences import Story, facts_text, influence_sentence, sample_facts
from common.errors import UserError
from common.game_constants import ACTION_LABELS
from common.progress import with_progress
from common.schemas import Entry, File
from common.tables import markdown_escaped
from common.video import mark_action
from generative.sample_files import SampleArrays

INDEX_NAME = "index.md"
FILES = {"pages": Entry("{}.md", File()), "figures": Entry("{}.png", File())}
_CHARTED = 12
_SHOWN_OF_COMPONENT = 8


def samples_picture(group: int | str) -> str:
    """File with films of a few samples of a behaviour."""
    return f"{file_stem(group)}_samples.png"


class StoryPages:
    """Writes the pages.

    Args:
        comparison: the results of dynamics_grads_consistency_plots.py.
        samples: those that it looked at, in their order (M, T, …).
        ics: their coordinates (M, T, I).
        share: of all steps, at each end of a component, that show what it looks like.
        num_films: samples of a behaviour that are shown.
        names: of behaviours, by their numbers, as the reader gave them.
        plots: folder of the figures of the comparison, to which pages link if it is there.
        seed: of the samples that are shown.

    Raises:
        UserError: if the comparison is damaged, or is not of these samples.
    """

    def __init__(self, comparison: ComparisonFolder, samples: SampleArrays, ics: np.ndarray,
                 share: float, num_films: int, names: Mapping[int, str], plots: Path, seed: int):
        self._settings = comparison.settings()
        self._table, self._matrices = comparison.table(), comparison.matrix_table()
        self._numbers, labels = comparison.sample_ids(), comparison.behaviours()
        if not len(self._numbers) == len(labels) == len(ics):
            raise UserError(f"{comparison.path} is damaged: it names {len(self._numbers)} samples "
                            f"and {len(labels)} behaviours for {len(ics)} samples")
        self._in_none = int((labels < 0).sum())
        self._groups = {ALL_SAMPLES: np.arange(len(labels)), **members(labels)}
        unknown = sorted(set(names) - set(self._groups))
        if unknown:
            raise UserError(f"--behaviour_names names behaviour {unknown[0]}, which no sample "
                            "shows")
        self._samples, self._ics, self._share = samples, ics, share
        self._num_films, self._names, self._plots = num_films, names, plots
        self._rng = np.random.default_rng(seed)
        self._step = self._settings["saliency_step"]
        self._stories = {group: Story(
            self._table[self._table["behaviour"] == str(group)],
            self._matrices[self._matrices["behaviour"] == str(group)], self._settings["level"],
            self._settings["min_samples"]) for group in self._groups}

    def write(self, folder: Path, final: Path) -> list[Path]:
        """Write everything.

        Args:
            folder: to write to.
            final: where that will be, for links out of it.

        Returns:
            The pages.
        """
        components = sorted({int(name.split()[1]) for story in self._stories.values()
                             for name in story.components()})
        for component in with_progress(components, len(components), "component"):
            self._draw_component(folder / _component_name(component), component)
        pages = []
        for group in with_progress(self._groups, len(self._groups), "page"):
            pages.append(folder / f"{file_stem(group)}.md")
            pages[-1].write_text(self._page(group, folder, final))
        pages.append(folder / INDEX_NAME)
        pages[-1].write_text(self._index())
        return pages

    def _title(self, group: int | str) -> str:
        if group == ALL_SAMPLES:
            return "All samples"
        name = self._names.get(group)
        return f"Behaviour {group}" + (f": {markdown_escaped(name)}" if name else "")

    def _page(self, group: int | str, folder: Path, final: Path) -> str:
        story, rows, stem = self._stories[group], self._groups[group], file_stem(group)
        sample = self._samples
        facts = sample_facts(rows, sample.log_probs, sample.values, sample.terminals,
                             sample.rewards, self._ics, self._step)
        films = np.sort(self._rng.permutation(rows)[:self._num_films])
        plain = "all samples" if group == ALL_SAMPLES else f"behaviour {group}"
        plot_films(folder / samples_picture(group), self._marked_frames(films),
                   [f"sample {number}" for number in self._numbers[films]],
                   f"{plain.capitalize()}: {len(films)} of {len(rows)}, drawn at random; the mark "
                   "is the action that led to the frame")
        parts = [f"# {self._title(group)}\n", f"[All behaviours]({INDEX_NAME})\n",
                 "## Its samples\n",
                 facts_text(facts, self._step, ACTION_LABELS, group == ALL_SAMPLES) + "\n",
                 f"![Steps of {len(films)} samples]({samples_picture(group)})\n"]
        if story.testable:
            chart = story.best(story.variants[0], _CHARTED)
            others = [story.counterpart(row) for _, row in chart.iterrows()]
            plot_influences(folder / f"{stem}_influences.png", chart, others,
                            f"The {len(chart)} most consistent influences in {plain} "
                            f"({len(rows)} samples), claimed ones first")
            parts += ["## Its most consistent influences\n",
                      f"![Agreement of gradients and deviations]({stem}_influences.png)\n"]
        for variant in story.variants:
            parts += [f"## {variant.capitalize()} gradients through the environment\n",
                      story.text(variant)]
        if len(story.variants) == 1:
            parts.append("Gradients without those through the environment were not looked at.\n")
        shown = story.components()
        if shown:
            parts.append("## What these components look like\n")
            parts += [f"![Where {name} is highest and lowest]"
                      f"({_component_name(int(name.split()[1]))})\n" for name in shown]
        links = [f"[lag {lag}]({_relative(path, final)})"
                 for lag in range(self._step + 1)
                 if (path := self._plots / f"{stem}_t-{lag}.png").exists()]
        if links:
            parts.append("All gradients beside all correlations: " + ", ".join(links) + ".\n")
        return "\n".join(parts)

    def _marked_frames(self, rows: np.ndarray) -> np.ndarray:
        """The frames of some samples, with the actions where these are known."""
        return np.stack([[mark_action(frame, action) if action >= 0 else frame
                          for frame, action in zip(self._samples.frames[row],
                                                   self._samples.actions[row])] for row in rows])

    def _index(self) -> str:
        settings = self._settings
        first = next(iter(self._stories.values())).variants
        lines = [
            "# Causal stories\n",
            f"{len(self._numbers)} simulated samples; {len(self._groups) - 1} behaviours"
            + (f"; {self._in_none} of the samples in none of them" if self._in_none else "") + ". "
            f"Targets are read at step {self._step}, sources up to {self._step} steps earlier.\n",
            "| | samples | " + " | ".join(f"claimed of tested, {kind} environment gradients"
                                          for kind in first) + " | the most consistent of them |",
            "| --- | --- |" + " --- |" * (len(first) + 1)]
        for group, story in self._stories.items():
            counts = [f"{len(story.claims(kind))} of {story.num_tested(kind)}" if story.testable
                      else "not tested" for kind in first]
            claims = story.claims(first[0])
            best = "–" if claims.empty else influence_sentence(claims.iloc[0], None).split("**")[1]
            lines.append(f"| [{self._title(group)}]({file_stem(group)}.md) | "
                         f"{story.num_samples} | {' | '.join(counts)} | {best} |")
        lines += [
            "", "Counted are influences of a component on another one and on what the agent "
            "answers; what a component does to itself is on the pages.\n", "## How to read them\n",
            f"An influence is claimed if gradient and deviations from the median agree in sign in "
            f"more samples than they do when the sources are shuffled among the samples (corrected "
            f"p ≤ {settings['level']} for all pairs, lags and behaviours, "
            f"{settings['num_shuffles']} shuffles), if the median gradient has the sign of the "
            f"cross-correlation, and if one standard deviation of the source moves the target by "
            f"at least {MIN_EFFECT} of its own. Components (ICs) are directions of the agent's "
            "hidden state; their sign is arbitrary.\n",
            "## What they do not say\n",
            "Gradients are those of the learned simulator, not of the game, and hold for small "
            "changes around what happened. What a component does to an answer in the same step is "
            "its read-out weight and needs no simulator. An influence may pass through other "
            "components. A correlation that is not claimed may still be one: small effects and "
            "small behaviours do not get beyond chance. With gradients through the environment and "
            "without are two separate sets of tests. Samples count as independent, though some "
            "start in the same recorded episode. " + (
                "Influences on the agent's answers are those of its read-out weights alone, in the "
                "same step." if settings["answers_from"] != "saliency" else
                "Influences on the agent's answers come from the gradients of its answers."
                if settings["answers"] else
                "Influences on the agent's answers were not looked at.") + "\n"]
        return "\n".join(lines)

    def _draw_component(self, path: Path, component: int) -> None:
        values = self._ics[..., component]  # (M, T)
        found = extreme_rows(values.ravel(), self._share)
        top, bottom = (self._spread(rows, values.shape[1]) for rows in (
            found.top[::-1], found.bottom))
        number = min(len(top), len(bottom))
        frames, notes = [], []
        for rows in (top[:number], bottom[:number]):
            where = [divmod(int(row), values.shape[1]) for row in rows]
            frames.append(np.stack([self._samples.frames[sample, step] for sample, step in where]))
            notes.append([f"sample {self._numbers[sample]}\nstep {step}: "
                          f"{values[sample, step]:+.1f}" for sample, step in where])
        plot_component(path, *frames, notes,
                       f"IC {component}: steps of different samples among the {len(found.top)} "
                       f"highest and lowest of {values.size}\n(in standard deviations of the "
                       "recorded states; the state after the frame was seen)")

    def _spread(self, rows: np.ndarray, num_steps: int) -> list[int]:
        """The first rows of (M T,) that are of different samples."""
        chosen: dict[int, int] = {}
        for row in rows.tolist():
            chosen.setdefault(row // num_steps, row)
        return list(chosen.values())[:_SHOWN_OF_COMPONENT]


def _component_name(component: int) -> str:
    return f"ic_{component:02d}.png"


def _relative(path: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(path, folder)).as_posix())
