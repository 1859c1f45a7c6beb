"""Retargeting: set a cell in channels that follow the cheese; test if the mouse goes to the square
that the cell shows.

The cheese is removed, and every square that the mouse can reach is a separate target. Controls set
other channels at the same cell, and the same channels at other cells. Each run adds an arm to the
folder; a killed run resumes after its last finished level.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.cli import Parser, controls_or_none, whole
from common.errors import UserError, script_main
from common.palette import BLUE, DPI, VERMILION
from common.progress import with_progress
from common.tables import markdown_table
from interventions.controls import CHANNELS, controls_of
from interventions.flags import REFERENCE_SIZE
from interventions.partial_forward import PartialForward
from interventions.patches import SetTo
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, levels_of, open_store, start
from maze.level.state import game_of
from maze.studies.channels import (
    add_channel_flags,
    find_map,
    parse_channels,
    write_nothing_chosen,
)
from maze.studies.retargeting import (
    MOVED_CHEESE,
    PATCHED,
    RETARGETING_FILES,
    UNPATCHED,
    CellPatch,
    RetargetedLevel,
    compare_controls,
    draw_targets,
    means_by_part,
)
from stats.report import format_interval, format_p, format_range


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to analyse", num_mazes=100)
    add_channel_flags(flags)
    flags.add_argument("--value", type=float, default=5.5,
                       help="value of the target's cell in the channels")
    flags.add_argument("--others", type=float,
                       help="value of the channels' other cells, such as -0.2; unchanged if not "
                            "given")
    flags.add_argument("--targets", default="all", type=_targets, metavar="all / N",
                       help="target squares of a level: all reachable squares, or N at random")
    flags.add_argument("--move_cheese", action="store_true",
                       help="add an arm in which the cheese is moved to the target")
    flags.add_argument("--num_controls", type=controls_or_none, default=19,
                       help="number of controls of each kind; 0: no tests")
    flags.add_argument("--control_targets", type=whole(1, 1000), default=2,
                       help="number of targets per level on which controls are measured")
    add_output_flags(flags, "retargeting")
    return flags


def _targets(text: str) -> int | None:
    return None if text == "all" else whole(1, 10**6)(text)


@script_main
def main(argv: list[str] | None = None) -> None:
    args, compute, policy = start(parser(), argv)
    if not np.isfinite([args.value, args.others or 0]).all():
        raise UserError("--value and --others must be finite numbers")
    layer = find_map(policy, args.layer)
    channels = parse_channels(args.channels, args.strongest, policy, layer)
    states = levels_of(args)
    env, seeds = game_of(states), [state.level_seed for state in states]
    patch = CellPatch(channels, (args.value,) * len(channels), args.others)
    arm = arm_name(patch, args.value, args.num_controls)
    if args.dry_run:
        print(f"arm {arm}; levels: {' '.join(map(str, seeds))}")
        return
    store = open_store(RETARGETING_FILES, args, compute, {
        "layer": layer.name, "targets": args.targets, "control_targets": args.control_targets,
        "seed": args.seed}, states=states)
    if not channels:
        write_nothing_chosen(store, layer)
        return
    controls = []
    if args.num_controls:
        reference = reference_frames(env, set(seeds), REFERENCE_SIZE, args.seed)
        set_cell = SetTo(layer.name, channels=channels, cells=((0, 0),), value=args.value)
        for control in controls_of(policy, [set_cell], args.num_controls, args.seed, reference,
                                   CHANNELS):
            drawn: Any = control.patches[0]
            values = np.asarray(drawn.value)[list(drawn.channels), 0, 0]
            controls.append(CellPatch(drawn.channels, tuple(values.tolist()), args.others))
    forward = PartialForward(policy, compute, layer.name)
    patches = {arm: patch, **({MOVED_CHEESE: None} if args.move_cheese else {})}
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in patches}
    tried = []
    for state in with_progress(states, len(states), "level"):
        level = RetargetedLevel(forward, layer, state)
        rng = np.random.default_rng([args.seed, state.level_seed])
        targets = draw_targets(level.grid, args.targets, rng)
        some = [targets[place] for place in np.sort(
            rng.permutation(len(targets))[:args.control_targets])]
        for name, parts in tables.items():
            parts.append(store.compute("levels", name, state.level_seed, function=functools.partial(
                level.measure_targets, targets, patches[name])))
        if controls:
            tried.append(store.compute(
                "controls", arm, state.level_seed, function=functools.partial(
                    level.measure_controls, some, patch, controls, rng)))
    for name, parts in tables.items():
        table = pd.concat(parts, ignore_index=True)
        means = means_by_part(table, args.seed)
        tested = (compare_controls(table, pd.concat(tried, ignore_index=True), args.seed)
                  if controls and name == arm else pd.DataFrame())
        store.write("parts", name, value=means)
        if len(tested):
            store.write("effects", name, value=tested)
        store.write("report", name, value=report(name, layer.name, table, means, tested))
        with store.file("figure", name) as temporary:
            plot(temporary, name, means)
        store.write("targets", name, value=table)
        print(f"{name}: {len(table)} targets of {len(states)} levels, path probability "
              f"{table['path_unpatched'].mean():.3f} unpatched and "
              f"{table['path_patched'].mean():.3f} patched, exact probability "
              f"{table['exact_unpatched'].mean():.3f} and {table['exact_patched'].mean():.3f}")
    print(f"wrote {', '.join(str(store.file_of('targets', name)) for name in tables)}")


def arm_name(patch: CellPatch, value: float, num_controls: int) -> str:
    """Return the name of a patch's folder, such as ``55_to_5.5``.

    The name contains the channels, the value, and options that differ from the defaults. A long
    list of channels is replaced by the number of channels and a digest.

    Args:
        patch: patch of the target's cell.
        value: value of the cell.
        num_controls: number of controls of each kind.
    """
    end = (f"_to_{value:g}" + ("" if patch.others is None else f"_others_{patch.others:g}")
           + ("" if num_controls == 19 else f"_controls_{num_controls}"))
    name = "_".join(map(str, patch.channels)) + end
    if len(name) <= 100:
        return name
    return f"{len(patch.channels)}_channels_{hashlib.sha256(name.encode()).hexdigest()[:8]}{end}"


def report(arm: str, layer: str, targets: pd.DataFrame, parts: pd.DataFrame,
           tested: pd.DataFrame) -> str:
    """Return the report on one patch as Markdown.

    Args:
        arm: name of the patch's folder.
        layer: name of the patched layer.
        targets: measurements of the targets, see ``TARGET_COLUMNS``.
        parts: means over groups of targets, from ``means_by_part``.
        tested: comparison with controls, from ``compare_controls``; empty without controls.
    """
    lines = [
        f"# Retargeting: {arm}", "",
        f"{len(targets)} targets in {targets['seed'].nunique()} levels, whose cheese was removed. "
        f"Patched at {layer}. Path: normalised path probability. Exact: probability of reaching "
        "the target within an episode. Intervals: 95 %, over levels.", "",
        *markdown_table(
            ("by", "part", "outcome", "targets", "unpatched", "patched", "change (95 %)", "ratio",
             "larger at"),
            [(row.by, row.part, row.outcome, str(row.targets), f"{row.unpatched:.3f}",
              f"{row.patched:.3f}", format_interval(row.effect, row.low_95, row.high_95, "+.3f"),
              f"{row.ratio:.2f}", f"{row.share_larger:.0%}") for row in parts.itertuples()])]
    if tested.empty:
        return "\n".join([*lines, "Controls were measured on fewer than 10 levels, or not at all, "
                          "so nothing is claimed.", ""])
    lines += ["## Against controls", "", "Path probability at some targets of each level.", "",
              *markdown_table(
                  ("compared", "change (95 %)", "p (Holm)", "controls' changes", "p (controls)",
                   "verdict"),
                  [(row.label, format_interval(row.effect, row.low_95, row.high_95, "+.3f"),
                    format_p(row.p_holm), format_range(row.control_low, row.control_high, ".3f"),
                    format_p(row.p_control), row.verdict)
                   for row in tested[~tested["control"]].itertuples()])]
    return "\n".join(lines)


def plot(path: Path, arm: str, parts: pd.DataFrame) -> None:
    """Draw the path probabilities, and exact ones if measured, without and with the patch: by the
    target's distance from the path to the corner, and by the size of the maze.

    Args:
        path: file to write.
        arm: name of the patch's folder, for the title.
        parts: means over groups of targets, from ``means_by_part``.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    outcomes = [name for name in ("path", "exact") if (parts["outcome"] == name).any()]
    panels = figure.subplots(len(outcomes), 2, squeeze=False, sharey=True)
    for row, outcome in zip(panels, outcomes):
        for axes, by in zip(row, ("off the corner's path", "rows of the maze")):
            part = parts[(parts["by"] == by) & (parts["outcome"] == outcome)]
            places = np.arange(len(part))
            axes.plot(places, part[UNPATCHED], "o-", color=BLUE, label=UNPATCHED)
            axes.errorbar(places, part[PATCHED],
                          np.array([part["effect"] - part["low_95"],
                                    part["high_95"] - part["effect"]]),
                          fmt="o-", color=VERMILION, label="patched (bars: 95 % of the change)")
            axes.set_xticks(places, part["part"])
            axes.set(xlabel=f"squares {by}" if by.startswith("off") else by, ylim=(0, 1.02),
                     ylabel=f"{outcome} probability")
            axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=9)
    figure.suptitle(f"Retargeting: {arm}")
    figure.savefig(path, dpi=DPI, format="png")


if __name__ == "__main__":
    raise SystemExit(main())
