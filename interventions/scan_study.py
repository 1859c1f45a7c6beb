"""Study of ``compare_interventions.py --scan``: rank all parts of some layers on half of the
levels, and test the strongest on the other half, to avoid selection bias.

The study also compares the effects with their first-order estimates, and for ``interchange`` finds
circuits, see ``interventions.circuits``. For ``interchange``, effects and estimates are absolute
values and have no p-values.

Layout of ``analysis/scan/``::

    settings.json          settings of the study
    parts/<layer>.csv      effect of each part of a layer on the levels for ranking, see Scan.table,
                           and its first-order estimate, see ``interventions.scan.estimate``
    agreement/<layer>.csv  rank correlation of effects and estimates, see ``agreement``
    circuits/<layer>.csv   faithfulness of circuits, see ``circuits.circuit_table``; only for
                           interchange, and for layers that no skip connection bypasses
    strongest.csv          effects of the strongest parts on the levels for testing, see Scan.test
    report.md, scan.png    report and figure
    circuits.png           faithfulness by size of the circuit, one panel per file in circuits/

Letters in shape comments: S parts of a layer, N frames.
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
from agents.testbed import Testbed
from common.config import typed
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.palette import BLUE, DPI
from common.parameters import one_of, positive
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table, with_minus
from interventions.circuits import MOST_PARTS, NUM_RANDOM, circuit_table, plot_circuits, summary
from interventions.partial_forward import PartialForward
from interventions.scan import (
    KINDS,
    OUTCOMES,
    UNITS,
    Part,
    Scan,
    ScanFrames,
    effect_maps,
    estimate,
    parts_of,
    scan,
    strongest,
)
from stats.association import rank_correlations
from stats.bootstrap import ClusterBootstrap
from stats.effects import check_starts
from stats.forest_plot import effect_style, forest_plot
from stats.report import format_interval, format_number, format_p
from stats.significance import LEVEL

SCANNED = Schema(
    "scanned parts", "compare_interventions.py --scan", items={
        "parts": Entry("parts/{}.csv", Table({"layer": str, **dict.fromkeys(
            ("channel", "row", "column", "unpatched", "effect", "absolute", "norm", "estimate"),
            float)}, exact=True)),
        "agreement": Entry("agreement/{}.csv", Table({"layer": str, "parts": int, **dict.fromkeys(
            ("rank_correlation", "low_95", "high_95", "of_means"), float)}, exact=True)),
        "circuits": Entry("circuits/{}.csv", Table({
            "layer": str, "order": str, "size": int, "parts": int, **dict.fromkeys(
                ("faithfulness", "low_95", "high_95"), float)}, exact=True))},
    results={"strongest": Entry("strongest.csv", Table({"layer": str, "effect": float})),
             "report": Entry("report.md", Text()), "figure": Entry("scan.png", File()),
             "circuits_figure": Entry("circuits.png", File(), optional=True)})


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """Options of a scan, with the text form ``kind@layer[=unit]{,option=value}``.

    Attributes:
        kind: replacement of entries, one of KINDS.
        layer: name of a layer, or "all".
        unit: kind of the parts, one of UNITS.
        outcome: name of the outcome, one of OUTCOMES.
        report: number of strongest parts to test and report.
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


def sample_frames(testbed: Testbed, compute: Compute, seed: int) -> ScanFrames:
    """Play one episode per level, and sample the frame of a random step from each.

    Each frame is paired with the frame of another level in the same half of the levels.

    Args:
        testbed: real levels to play.
        compute: device and precision.
        seed: seed of actions and steps.
    """
    assert testbed.env is not None  # the simulator has no levels
    levels = np.array(testbed.levels)
    steps = [(episode.frames[step], episode.hidden_states[step]) for episode, step in random_steps(
        testbed.policy, compute, testbed.env, list(enumerate(testbed.levels)), seed,
        "scan", testbed.edit)]
    frames, entering = map(np.stack, zip(*steps))
    paired = [np.roll(half, 1, axis=0) for half in np.split(frames, [len(frames) // 2])]
    return ScanFrames(frames, levels, np.concatenate(paired), torch.from_numpy(entering))


def run_scan(store: ResultStore, options: ScanOptions, testbed: Testbed, compute: Compute,
             references: tuple[int, int], settings: Mapping[str, Any], overwrite: bool) -> None:
    """Rank all parts on half of the levels, and test the strongest on the other half.

    Layers whose results are already in the folder are not scanned again.

    Args:
        store: result store of the folder.
        options: options of the scan.
        testbed: real levels to play.
        compute: device and precision.
        references: size and seed of the reference set, for ``mean``.
        settings: settings of the folder in addition to those of the options; must include
            ``seed``.
        overwrite: whether to delete the previous contents of the folder.

    Raises:
        UserError: if there is no such layer, it has no such parts, or there are fewer than 20
            levels.
    """
    check_starts(len(testbed.levels), "--num_episodes", halves=True)
    policy, seed, outcome = testbed.policy, settings["seed"], OUTCOMES[options.outcome]
    layers = [layer.name for layer in layers_named(policy, options.layer)
              if layer.is_map or options.unit != "cell" or options.layer != ALL]
    parts = {layer: parts_of(policy, [layer], options.unit) for layer in layers}
    store.open({**dataclasses.asdict(options), **settings,
                "references": references, "versions": versions()}, overwrite)
    frames = sample_frames(testbed, compute, seed)
    half = len(frames.frames) // 2
    mean = testbed.reference(*references) if options.kind == "mean" else None
    is_interchange = options.kind == "interchange"

    def scan_parts(selected: Sequence[Part], on: ScanFrames) -> Scan:
        result = scan(policy, compute, selected, on, outcome, options.kind, mean)
        if is_interchange:  # signed effects cancel, because each frame is both source and target
            result = dataclasses.replace(result, effects=np.abs(result.effects))
        return result

    def rank_parts(layer: str) -> pd.DataFrame:
        result = scan_parts(parts[layer], frames[:half])
        estimates = estimate(policy, compute, parts[layer], frames[:half], outcome, options.kind,
                             mean)
        if is_interchange:
            estimates = np.abs(estimates)
        store.write("agreement", layer, value=agreement(result, estimates, seed))
        return result.table().assign(estimate=estimates.mean(axis=1))

    table = pd.concat([store.compute("parts", layer, function=functools.partial(rank_parts, layer))
                       for layer in layers], ignore_index=True)
    agreements = pd.concat([store.read("agreement", layer) for layer in layers])
    circuits = [
        store.compute("circuits", layer, function=functools.partial(
            circuit_table, policy, compute, parts[layer], frames[:half], frames[half:], outcome,
            seed))
        for layer in layers
        if is_interchange and not PartialForward(policy, compute, layer).bypassed]
    best = strongest(table, options.report)
    tested = scan_parts(best, frames[half:]).test(seed)
    if is_interchange:
        tested[["p", "p_holm"]] = np.nan
    title = (f"{options.kind.capitalize()} patches of each {options.unit} of {options.layer}: "
             f"{'absolute ' * is_interchange}effect on {options.outcome}")
    labels = [part.label for part in best]
    store.write("strongest", value=tested)
    store.write("report", value=_report(title, labels, table, tested, agreements, circuits))
    with store.file("figure") as temporary:
        _plot(temporary, title, labels, table, tested)
    if circuits:
        with store.file("circuits_figure") as temporary:
            plot_circuits(temporary, pd.concat(circuits), f"{options.unit}s, {options.outcome}")
    print(f"strongest of {len(table)} parts: {labels[0]}, {tested['effect'][0]:+.3g} on other "
          f"levels; wrote {store.file_of('report')}, strongest.csv and scan.png")


def agreement(result: Scan, estimates: np.ndarray, seed: int) -> pd.DataFrame:
    """Compare the effects of the parts of a layer with their estimates.

    Args:
        result: effects of the S parts of one layer.
        estimates: estimated effects (S, N).
        seed: seed of the bootstrap over levels.

    Returns:
        One row with the columns:

        - ``layer``, and ``parts``, the number of its parts S.
        - ``rank_correlation``, ``low_95``, ``high_95``: Spearman's correlation over the parts in
          each frame, averaged over frames. The average leaves out frames in which all effects or
          all estimates are equal.
        - ``of_means``: Spearman's correlation of the means over frames.
    """
    of_frames = rank_correlations(result.effects.T, estimates.T)
    of_means = rank_correlations(result.effects.mean(axis=1), estimates.mean(axis=1))
    defined = np.isfinite(of_frames)
    low, high = ClusterBootstrap(result.levels, seed).interval(
        np.where(defined, of_frames, 0)[None], defined[None])
    return pd.DataFrame([{
        "layer": result.parts[0].layer, "parts": len(result.parts),
        "rank_correlation": of_frames[defined].mean() if defined.any() else np.nan,
        "low_95": low[0], "high_95": high[0],
        "of_means": float(of_means)}])


def _report(title: str, labels: Sequence[str], table: pd.DataFrame, tested: pd.DataFrame,
            agreements: pd.DataFrame, circuits: Sequence[pd.DataFrame]) -> str:
    """Return the report as Markdown.

    Args:
        title: title of the report.
        labels: labels of the tested parts.
        table: effects of all parts on the first half of the levels.
        tested: effects of the tested parts on the second half.
        agreements: agreement of effects and estimates by layer.
        circuits: faithfulness of the circuits of each layer.
    """
    return "\n".join([
        f"# {title}", "",
        f"{len(table)} parts were patched one at a time and ranked by the absolute mean effect. "
        f"The {len(tested)} strongest were tested on {tested['num_levels'].iloc[0]} other levels: "
        "mean over levels of patched minus unpatched outcome, with a 95 % bootstrap interval. p: "
        f"two-sided sign-flip test; p (Holm): corrected for these {len(tested)} parts; none for "
        "absolute effects, which are never negative. The scan has no controls, so an effect may be "
        "no larger than that of random parts; use --patch to compare a part with controls.", "",
        *markdown_table(
            ("part", "unpatched", "effect (95 %)", "p", "p (Holm)", "mean absolute effect",
             "norm of the change"),
            [(label, format_number(row.unpatched),
              format_interval(row.effect, row.low_95, row.high_95, "+.3g"), format_p(row.p),
              format_p(row.p_holm), format_number(row.absolute), format_number(row.norm))
             for label, row in zip(labels, tested.itertuples())]),
        "## First-order estimates", "",
        "One forward and one backward pass estimate the effects of all parts: gradient of the "
        "outcome, times the change of the part. Spearman's rank correlation of effects and "
        "estimates over the parts of a layer, in each frame (mean over frames) and of the means "
        "over frames:", "",
        *markdown_table(("layer", "parts", "in each frame (95 %)", "of the means"),
                        [(row.layer, str(row.parts), format_interval(
                            row.rank_correlation, row.low_95, row.high_95),
                          format_number(row.of_means))
                         for row in agreements.itertuples()]),
        *(_circuits_report(pd.concat(circuits)) if circuits else [])])


def _circuits_report(circuits: pd.DataFrame) -> list[str]:
    return [
        "## Circuits", "",
        "The policy runs on the paired frame, and the parts of a circuit receive their activations "
        "from the original frame. Faithfulness: 1 - mean error of the outcome / mean error without "
        "a circuit. Parts are chosen greedily on the levels for ranking, and tested on the others. "
        f"The table has circuits of half of the parts, but not more than {MOST_PARTS}; circuits.png"
        f" has all sizes. Random: {NUM_RANDOM} random circuits of the same size.", "",
        *markdown_table(("layer", "parts", "circuit", "faithfulness (95 %)", "random: median",
                         "random: maximum"),
                        [(row.layer, str(row.parts), str(row.size), format_interval(
                            row.faithfulness, row.low_95, row.high_95),
                          format_number(row.random_median), format_number(row.random_max))
                         for row in summary(circuits).itertuples()])]


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
    top = tested.iloc[0]
    effect = with_minus(format_interval(top["effect"], top["low_95"], top["high_95"], "+.3g"))
    figure.suptitle(f"Strongest on other levels: {labels[0]}, effect {effect}\n{title}",
                    fontsize=11)
    figure.savefig(path, dpi=DPI)
