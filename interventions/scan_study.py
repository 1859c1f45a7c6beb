"""Effect-scan study: rank the parts on some levels, and test the strongest on others.

Testing on other levels avoids selection bias in the reported effects.

Layout of ``analysis/scan/``::

    settings.json        settings of the study
    parts/<layer>.csv    effect of each part of a layer on the levels for ranking, see Scan.table
    strongest.csv        effects of the strongest parts on other levels, see Scan.test
    report.md, scan.png  report and figure
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.layers import ALL, layers_named
from agents.reference_set import random_steps
from common.config import typed
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.game_constants import ACTION_NAMES
from common.palette import BLUE, DPI
from common.parameters import one_of, positive
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table
from interventions.comparison import Playground
from interventions.scan import (
    KINDS,
    UNITS,
    Outcome,
    Part,
    Scan,
    ScanFrames,
    effect_maps,
    entropy,
    log_prob_of,
    parts_of,
    scan,
    strongest,
    value,
)
from stats.effects import check_starts
from stats.forest_plot import effect_style, forest_plot
from stats.report import format_interval, format_number, format_p
from stats.significance import LEVEL

OUTCOMES: dict[str, Outcome] = {"value": value, "entropy": entropy, **{
    name: log_prob_of(action) for action, name in enumerate(ACTION_NAMES)}}
SCANNED = Schema(
    "scanned parts", "compare_interventions.py --scan", items={
        "parts": Entry("parts/{}.csv", Table({"layer": str, **dict.fromkeys(
            ("channel", "row", "column", "unpatched", "effect", "absolute", "norm"), float)},
            exact=True))},
    results={"strongest": Entry("strongest.csv", Table({"layer": str, "effect": float})),
             "report": Entry("report.md", Text()), "figure": Entry("scan.png", File())})


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """Options of a scan, with the text form ``kind@layer[=unit]{,option=value}``.

    Attributes:
        kind: replacement of entries, one of KINDS.
        layer: name of a layer, or "all".
        unit: size of the parts, one of UNITS.
        outcome: name of the outcome, one of OUTCOMES.
        report: number of parts to report.
    """

    kind: str
    layer: str
    unit: str = "channel"
    outcome: str = "value"
    report: int = 20

    def __post_init__(self):
        one_of("kind", self.kind, KINDS)
        one_of("unit", self.unit, UNITS)
        one_of("outcome", self.outcome, tuple(OUTCOMES))
        positive(self, "report")

    @classmethod
    def parse(cls, text: str) -> ScanOptions:
        """Parse a scan such as ``mean@embedder.block2.res1.resadd=channel,outcome=right``.

        Raises:
            UserError: if the text does not parse; the message shows the expected syntax.
        """
        match = re.fullmatch(r"([^@]*)@([^=,]+)(?:=([^=,]+))?((?:,[^,=]*=[^,=]*)*)", text)
        if match is None:
            raise UserError(f"--scan {text} is not kind@layer=unit, such as "
                            "zero@embedder.block2.res1.resadd=channel, with options such as "
                            "outcome=entropy after commas")
        kind, layer, unit, options = match.groups()
        settings = {"kind": kind, "layer": layer, **({"unit": unit} if unit else {}),
                    **dict(option.split("=") for option in options.split(",")[1:])}
        if settings.get("report", "").isdecimal():
            settings["report"] = int(settings["report"])
        return typed(cls, settings, f"--scan {text}")


def sample_frames(playground: Playground, compute: Compute, seed: int) -> ScanFrames:
    """Play one episode per level, and sample the frame of a random step from each.

    Each frame is paired with the frame of another level in the same half.
    """
    assert playground.env is not None  # the simulator has no levels
    levels = np.array(playground.levels)
    steps = [(episode.frames[step], episode.hidden_states[step]) for episode, step in random_steps(
        playground.policy, compute, playground.env, list(enumerate(playground.levels)), seed,
        "scan", playground.edit)]
    frames, entering = map(np.stack, zip(*steps))
    paired = [np.roll(half, 1, axis=0) for half in np.split(frames, [len(frames) // 2])]
    return ScanFrames(frames, levels, np.concatenate(paired), torch.from_numpy(entering))


def run_scan(store: ResultStore, options: ScanOptions, playground: Playground, compute: Compute,
             references: tuple[int, int], settings: Mapping[str, Any], overwrite: bool) -> None:
    """Rank all parts on half of the levels, test the strongest on the rest, and write the results.

    Layers whose results are already in the folder are not scanned again.

    Args:
        store: result store of the folder.
        options: options of the scan.
        playground: real levels to play.
        references: size and seed of the reference set, for ``mean``.
        settings: settings of the folder in addition to those of the playground and the options;
            must include ``seed``.
        overwrite: whether to delete the previous contents of the folder.

    Raises:
        UserError: if there is no such layer, or there are fewer than 20 levels.
    """
    check_starts(len(playground.levels) // 2, "--num_episodes")
    policy, seed, outcome = playground.policy, settings["seed"], OUTCOMES[options.outcome]
    layers = [layer.name for layer in layers_named(policy, options.layer)
              if layer.is_map or options.unit != "cell" or options.layer != ALL]
    parts = {layer: parts_of(policy, [layer], options.unit) for layer in layers}
    store.open({**dataclasses.asdict(options), **playground.settings, **settings,
                "references": references, "versions": versions()}, overwrite)
    frames = sample_frames(playground, compute, seed)
    half = len(frames.frames) // 2
    mean = playground.reference(*references) if options.kind == "mean" else None
    is_interchange = options.kind == "interchange"

    def scan_parts(some: Sequence[Part], on: ScanFrames) -> Scan:
        result = scan(policy, compute, some, on, outcome, options.kind, mean)
        if is_interchange:  # signed effects cancel, because each frame is both source and target
            result = dataclasses.replace(result, effects=np.abs(result.effects))
        return result

    table = pd.concat([store.compute("parts", layer, function=functools.partial(
        lambda some: scan_parts(some, frames[:half]).table(), parts[layer]))
        for layer in layers], ignore_index=True)
    best = strongest(table, options.report)
    tested = scan_parts(best, frames[half:]).test(seed)
    if is_interchange:
        tested[["p", "p_holm"]] = np.nan
    title = (f"{options.kind.capitalize()} patches of each {options.unit} of {options.layer}: "
             f"{'absolute ' * is_interchange}effect on {options.outcome}")
    labels = [part.label for part in best]
    store.write("strongest", value=tested)
    store.write("report", value=_report(title, labels, table, tested))
    with store.file("figure") as temporary:
        _plot(temporary, title, labels, table, tested)
    print(f"strongest of {len(table)} parts: {labels[0]}, {tested['effect'][0]:+.3g} on other "
          f"levels; wrote {store.file_of('report')}, strongest.csv and scan.png")


def _report(title: str, labels: Sequence[str], table: pd.DataFrame,
            tested: pd.DataFrame) -> str:
    """Return the report as Markdown."""
    return "\n".join([
        f"# {title}", "",
        f"{len(table)} parts were patched one at a time and ranked by the absolute mean effect. "
        f"The {len(tested)} strongest were tested on {tested['num_levels'].iloc[0]} other levels: "
        "mean over levels of patched minus unpatched outcome, with a 95 % bootstrap interval. p: "
        f"two-sided sign-flip test; p (Holm): corrected for these {len(tested)} parts; none for "
        "absolute effects, which are never negative. There are no controls: a part with an effect "
        "need not have a larger one than random parts; compare it with --patch.", "",
        *markdown_table(
            ("part", "unpatched", "effect (95 %)", "p", "p (Holm)", "mean absolute effect",
             "norm of the change"),
            [(label, format_number(row.unpatched),
              format_interval(row.effect, row.low_95, row.high_95, "+.3g"), format_p(row.p),
              format_p(row.p_holm), format_number(row.absolute), format_number(row.norm))
             for label, row in zip(labels, tested.itertuples())])])


def _plot(path: Path, title: str, labels: Sequence[str], table: pd.DataFrame,
          tested: pd.DataFrame) -> None:
    """Plot the tested effects, and all effects: one map of cells, or one row, per layer."""
    maps = effect_maps(table)
    figure = Figure(figsize=(7 + 3.2 * max(len(maps), 1.5), 1.5 + 0.24 * max(len(labels), 10)),
                    layout="constrained")
    forest, *panels = figure.subplots(1, 1 + max(len(maps), 1))
    forest.axvline(0, color="black", linewidth=0.8)
    forest_plot(forest, tested, labels,
                [effect_style(False, row.p_holm) for row in tested.itertuples()])
    forest.set_title(f"strongest parts on other levels (95 %; filled: p (Holm) <= {LEVEL})",
                     fontsize=9)
    largest = table["effect"].abs().max() or 1.0
    for axes, (layer, effects) in zip(panels, maps.items()):
        image = axes.imshow(effects, cmap="RdBu_r", vmin=-largest, vmax=largest)
        axes.set_title(layer.removeprefix("embedder."), fontsize=9)
    if maps:
        figure.colorbar(image, ax=panels, label="mean effect")
    else:
        layers = list(dict.fromkeys(table["layer"]))
        panels[0].plot(table["effect"], table["layer"].map(layers.index), "|", color=BLUE)
        panels[0].set_yticks(range(len(layers)),
                             [layer.removeprefix("embedder.") for layer in layers], fontsize=8)
        panels[0].set_ylim(len(layers) - 0.5, -0.5)
        panels[0].set_title("mean effects of all parts", fontsize=9)
        panels[0].grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=DPI)
