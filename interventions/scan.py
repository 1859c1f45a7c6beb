"""Effect scans: the effect on an outcome of patching every layer, channel or cell in turn.

The activations of a part are replaced by 0 (``zero``), by their mean over reference frames
(``mean``), or by the activations in a paired frame (``interchange``). The last kind is activation
patching; applied cell by cell, it is the causal trace of Meng et al. 2022, "Locating and editing
factual associations in GPT". ``run_scan`` ranks the parts on some levels and tests the strongest on
others, to avoid selection bias.

Layout of ``analysis/scan/``::

    settings.json        settings of the study
    parts/<layer>.csv    effect of each part of a layer on the levels for ranking, see Scan.table
    strongest.csv        effects of the strongest parts on the levels for testing, see Scan.test
    report.md, scan.png  report and figure

Letters in shape comments: N frames, P patched passes, S parts, L levels, C H W a map, U units,
D hidden units, A actions.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from agents.hooks import disabled
from agents.layers import ALL, find_layer, layers_named
from agents.networks import Policy, PolicyOutput
from agents.reference_set import ReferenceSet, random_steps
from common.config import typed
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.game_constants import ACTION_NAMES
from common.palette import BLUE, DPI
from common.parameters import one_of, positive
from common.progress import Progress
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table
from interventions.comparison import Testbed
from interventions.partial_forward import PartialForward, Prefix
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import FLIPS_PER_COMPARISON, MIN_FLIPS, check_starts
from stats.forest_plot import effect_style, forest_plot
from stats.report import format_interval, format_number, format_p
from stats.significance import LEVEL, holm, sign_flip_p

PASSES_PER_BATCH = 128
KINDS = ("zero", "mean", "interchange")
UNITS = ("layer", "channel", "cell")

Outcome = Callable[[PolicyOutput, np.ndarray], Tensor]
"""Maps the output of P passes and the number of the frame of each pass (P,) to one value per pass
(P,)."""


OUTCOMES: dict[str, Outcome] = {
    "value": lambda output, frames: output.values,
    "entropy": lambda output, frames: -(output.log_probs.exp() * output.log_probs).sum(dim=-1),
    **{name: lambda output, frames, action=action: output.log_probs[:, action]  # type: ignore
       for action, name in enumerate(ACTION_NAMES)}}
"""Outcomes by name: value estimate, entropy of the policy in nats, and the log-probability of each
action under the action's name."""


@dataclasses.dataclass(frozen=True)
class ScanFrames:
    """Frames in which a scan patches parts.

    Attributes:
        frames: uint8 (N, H, W, 3).
        levels: seed of the level of each frame, int64 (N,).
        paired: source frame of each frame for ``interchange``, uint8 (N, H, W, 3); None for the
            other kinds.
        entering: recurrent states before the step, shared by the two frames of a pair (N, D); None
            for initial states.
    """

    frames: np.ndarray
    levels: np.ndarray
    paired: np.ndarray | None = None
    entering: Tensor | None = None

    def __getitem__(self, index: slice | np.ndarray) -> ScanFrames:
        return ScanFrames(self.frames[index], self.levels[index],
                          None if self.paired is None else self.paired[index],
                          None if self.entering is None else self.entering[index])


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer's output: all of it, a channel (or unit), a cell, or one channel in a cell.

    Attributes:
        layer: name of the layer.
        channel: number of the channel or unit; None for all.
        cell: row from the top and column of the cell; None for all.
    """

    layer: str
    channel: int | None = None
    cell: tuple[int, int] | None = None

    @property
    def entries(self) -> tuple:
        """Index of the part in activations (N, C, H, W) or (N, U)."""
        channel = slice(None) if self.channel is None else self.channel
        return (slice(None), channel, *(self.cell or ()))

    @property
    def label(self) -> str:
        """Name for reports and figures, in the syntax of patches."""
        return (self.layer.removeprefix("embedder.")
                + ("" if self.channel is None else f":{self.channel}")
                + ("" if self.cell is None else f",cell={self.cell[0]}.{self.cell[1]}"))


def parts_of(policy: Policy, layers: Sequence[str], unit: str) -> list[Part]:
    """Return the parts of some layers: each whole layer, each channel or unit, or each cell.

    Args:
        layers: names of the layers.
        unit: kind of the parts, one of UNITS.

    Raises:
        UserError: if the policy has no such layer, or cells are requested of a layer that is not
            convolutional.
    """
    parts = []
    for layer in (find_layer(policy, name) for name in layers):
        if unit == "layer":
            parts.append(Part(layer.name))
        elif unit == "channel":
            parts += [Part(layer.name, channel) for channel in range(layer.shape[0])]
        elif not layer.is_map:
            raise UserError(f"{layer.name} has no cells: its output is {layer.shape[0]} units; "
                            "scan its channels, or a convolutional layer")
        else:
            parts += [Part(layer.name, None, (row, column))
                      for row, column in np.ndindex(layer.shape[1], layer.shape[2])]
    return parts


@dataclasses.dataclass(frozen=True)
class Scan:
    """Effects of patched parts on an outcome.

    Attributes:
        parts: the S patched parts.
        levels: seed of the level of each frame (N,).
        unpatched: outcome of each frame without a patch, float64 (N,).
        effects: patched minus unpatched outcome, float64 (S, N).
        norms: Euclidean norm of the change of the layer's output, float64 (S, N).
    """

    parts: Sequence[Part]
    levels: np.ndarray
    unpatched: np.ndarray
    effects: np.ndarray
    norms: np.ndarray

    def table(self) -> pd.DataFrame:
        """Return one row per part, with means over frames.

        Columns: ``layer``, ``channel``, ``row`` and ``column`` (missing if the part has all of
        them); mean ``unpatched`` outcome, ``effect``, ``absolute`` effect, and ``norm`` of the
        change.
        """
        table = pd.DataFrame(
            [(part.layer, part.channel, *(part.cell or (None, None))) for part in self.parts],
            columns=["layer", "channel", "row", "column"])
        table[["channel", "row", "column"]] = table[["channel", "row", "column"]].astype("Int64")
        table["unpatched"] = self.unpatched.mean()
        table["effect"] = self.effects.mean(axis=1)
        table["absolute"] = np.abs(self.effects).mean(axis=1)
        table["norm"] = self.norms.mean(axis=1)
        return table

    def test(self, seed: int) -> pd.DataFrame:
        """Test the effects of parts that were chosen on other levels.

        Args:
            seed: seed of the bootstrap and the sign flips.

        Returns:
            The result of ``table`` with ``low_95`` and ``high_95`` (bootstrap over levels), ``p``
            (two-sided sign-flip test on the levels' means), ``p_holm`` (corrected over the parts),
            and ``num_levels``.

        Raises:
            UserError: if there are fewer than 10 levels.
        """
        table, num_levels = self.table(), len(np.unique(self.levels))
        check_starts(num_levels)
        table["low_95"], table["high_95"] = ClusterBootstrap(self.levels, seed).interval(
            self.effects)
        means = by_episode(self.levels, self.effects) / by_episode(
            self.levels, np.ones((1, len(self.levels))))  # (L, S)
        num_flips = max(MIN_FLIPS, FLIPS_PER_COMPARISON * len(self.parts))
        table["p"] = sign_flip_p(means, num_flips, seed)
        table["p_holm"] = holm(table["p"])
        table["num_levels"] = num_levels
        return table


def effect_maps(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return maps of the mean effect of each cell by layer, float64 (H, W).

    Args:
        table: result of ``Scan.table``.
    """
    cells = table[table["row"].notna()].groupby("layer", sort=False)
    return {layer: rows.pivot(index="row", columns="column", values="effect").to_numpy(float)
            for layer, rows in cells}


def strongest(table: pd.DataFrame, number: int) -> list[Part]:
    """Return the parts with the largest absolute mean effects, largest first.

    Args:
        table: result of ``Scan.table``.
        number: number of parts.
    """
    order = table["effect"].abs().sort_values(ascending=False, kind="stable").index[:number]
    return [Part(row.layer, None if pd.isna(row.channel) else int(row.channel),
                 None if pd.isna(row.row) else (int(row.row), int(row.column)))
            for row in table.loc[order].itertuples()]


def scan(policy: Policy, compute: Compute, parts: Sequence[Part], frames: ScanFrames,
         outcome: Outcome, kind: str = "zero", reference: ReferenceSet | None = None) -> Scan:
    """Patch each part in each frame, and measure the outcome.

    Modules before a layer are run once per frame.

    Args:
        policy: the agent.
        compute: device and precision.
        parts: parts to patch, one at a time.
        frames: frames in which the parts are patched, with pairs for ``interchange``.
        outcome: outcome to measure in each pass.
        kind: replacement of the part's entries, one of KINDS.
        reference: frames of other levels, for ``mean``.
    """
    by_layer: dict[str, list[int]] = {}
    for place, part in enumerate(parts):
        by_layer.setdefault(part.layer, []).append(place)
    num = len(frames.frames)
    unpatched, effects, norms = np.empty(num), *np.empty((2, len(parts), num))
    with torch.no_grad(), Progress(len(parts) * num, "patched pass") as progress:
        for layer, members in by_layer.items():
            forward = PartialForward(policy, compute, layer)
            source = torch.zeros(())
            if kind == "mean" and reference is not None:
                source = reference.mean(policy, forward.layer)
            for begin in range(0, num, PASSES_PER_BATCH):
                chosen = np.arange(begin, min(num, begin + PASSES_PER_BATCH))
                batch = frames[chosen]
                prefix = forward.run_to(batch.frames, batch.entering)
                if kind == "interchange" and batch.paired is not None:
                    with disabled(policy):
                        source = forward.run_to(batch.paired, batch.entering).activations
                replacement = source.to(prefix.activations).expand_as(prefix.activations)
                before = outcome(prefix.run_from(), chosen).double().cpu().numpy()
                unpatched[chosen] = before
                parts_per_batch = max(1, PASSES_PER_BATCH // len(chosen))
                for first in range(0, len(members), parts_per_batch):
                    rows = np.array(members[first:first + parts_per_batch])
                    after, sizes = _run_patched(prefix, replacement,
                                                [parts[row] for row in rows], outcome, chosen)
                    effects[np.ix_(rows, chosen)] = after - before
                    norms[np.ix_(rows, chosen)] = sizes
                    progress.update(progress.done + after.size)
    return Scan(list(parts), np.asarray(frames.levels), unpatched, effects, norms)


def _run_patched(prefix: Prefix, replacement: Tensor, parts: Sequence[Part], outcome: Outcome,
                 chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Measure the outcome, and the norm of the layer's change, with each part patched in each
    frame, (S, N) each.

    Args:
        prefix: forward pass of the frames up to the layer.
        replacement: replacement of the whole layer's output (N, …).
        parts: parts of the layer.
        outcome: outcome to measure.
        chosen: numbers of the frames (N,).
    """
    shape = len(parts), len(chosen)
    patched = prefix.activations.repeat(len(parts), *(1,) * (prefix.activations.ndim - 1))
    sizes = []
    for part, activations in zip(parts, patched.split(len(chosen))):
        change = replacement[part.entries] - activations[part.entries]  # (N, …)
        sizes.append(change.float().reshape(len(chosen), -1).norm(dim=1))
        activations[part.entries] = replacement[part.entries]
    rows = torch.arange(len(chosen), device=patched.device).repeat(len(parts))
    after = outcome(prefix.run_from(patched, rows), np.tile(chosen, len(parts)))
    return after.double().cpu().numpy().reshape(shape), torch.stack(sizes).double().cpu().numpy()


# The study


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
    """Rank all parts on half of the levels, test the strongest on the other half, and write the
    results.

    Layers whose results are already in the folder are not scanned again.

    Args:
        store: result store of the folder.
        options: options of the scan.
        testbed: real levels to play.
        compute: device and precision.
        references: size and seed of the reference set, for ``mean``.
        settings: settings of the folder in addition to those of the testbed and the options;
            must include ``seed``.
        overwrite: whether to delete the previous contents of the folder.

    Raises:
        UserError: if there is no such layer, or there are fewer than 20 levels.
    """
    check_starts(len(testbed.levels) // 2, "--num_episodes")
    policy, seed, outcome = testbed.policy, settings["seed"], OUTCOMES[options.outcome]
    layers = [layer.name for layer in layers_named(policy, options.layer)
              if layer.is_map or options.unit != "cell" or options.layer != ALL]
    parts = {layer: parts_of(policy, [layer], options.unit) for layer in layers}
    store.open({**dataclasses.asdict(options), **testbed.settings, **settings,
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

    table = pd.concat([store.compute("parts", layer, function=functools.partial(
        lambda selected: scan_parts(selected, frames[:half]).table(), parts[layer]))
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
    """Return the report as Markdown.

    Args:
        title: title of the report.
        labels: labels of the tested parts.
        table: effects of all parts on the first half of the levels.
        tested: effects of the tested parts on the second half.
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
