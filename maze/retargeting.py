"""Retargeting: set a cell in channels that follow the cheese; test if the mouse goes to the square
that the cell shows.

The cheese is removed, and every square that the mouse can reach is a separate target. Controls set
other channels at the same cell, and the same channels at other cells. Each run adds a condition to
the folder; a killed run resumes after its last finished level.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.layers import Layer
from agents.networks import Policy
from common.cli import controls_or_none, whole
from common.errors import UserError
from common.options import command, option, redefine
from common.palette import BLUE, DPI, VERMILION
from common.progress import with_progress
from common.results import ResultStore
from common.tables import markdown_table
from envs.maze.state import MazeState, game_of
from interventions.controls import CHANNELS, controls_of
from interventions.flags import REFERENCE_SIZE
from interventions.partial_forward import PartialForward
from interventions.patches import SetTo
from maze.field.fields import reference_frames
from maze.options import AgentOptions, MazeOptions
from maze.studies.channels import ChannelsOptions, write_nothing_chosen
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


def _targets(text: str) -> int | None:
    return None if text == "all" else whole(1, 10**6)(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetargetingOptions(ChannelsOptions, AgentOptions):
    """Retargeting: set a cell in channels that follow the cheese; test if the mouse goes to the
    square that the cell shows."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=100)
    value: float = option(5.5, "value of the target's cell in the channels")
    others: float | None = option(
        None, "value of the channels' other cells, such as -0.2; unchanged if not given")
    targets: int | None = option(
        "all", "target squares of a level: all reachable squares, or N at random", type=_targets,
        metavar="all / N")
    move_cheese: bool = option(False, "add a condition in which the cheese is moved to the target")
    num_controls: int = option(19, "number of controls of each kind; 0: no tests",
                               type=controls_or_none)
    control_targets: int = option(
        2, "number of targets per level on which controls are measured", type=whole(1, 1000))
    output_dir: Path = redefine(AgentOptions, "output_dir",
                                default=Path("analysis/maze/retargeting"))


def retarget(options: RetargetingOptions) -> dict[str, pd.DataFrame]:
    """Measure all targets under the patch, write the results to ``options.output_dir``, and return
    the tables of targets by condition; empty for a dry run, or if no channel was chosen."""
    policy = options.load_agent()
    if not np.isfinite([options.value, options.others or 0]).all():
        raise UserError("--value and --others must be finite numbers")
    layer, channels = options.find_channels(policy)
    states = options.choose_levels()
    patch = CellPatch(channels, (options.value,) * len(channels), options.others)
    condition = condition_name(patch, options.value, options.num_controls)
    if options.dry_run:
        print(f"condition {condition}; levels:", *(state.level_seed for state in states))
        return {}
    store = options.open_store(RETARGETING_FILES, {
        "layer": layer.name, "targets": options.targets,
        "control_targets": options.control_targets, "seed": options.seed}, states=states)
    if not channels:
        write_nothing_chosen(store, layer)
        return {}
    controls = draw_controls(options, policy, layer, channels, states)
    patches = {condition: patch, **({MOVED_CHEESE: None} if options.move_cheese else {})}
    tables, tried = measure(options, store, PartialForward(policy, options.compute, layer.name),
                            layer, patches, controls, states)
    for name, table in tables.items():
        tested = (compare_controls(table, tried, options.seed) if controls and name == condition
                  else pd.DataFrame())
        write_condition(store, name, layer, table, tested, options.seed)
    print(f"wrote {', '.join(str(store.file_of('targets', name)) for name in tables)}")
    return tables


def draw_controls(options: RetargetingOptions, policy: Policy, layer: Layer,
                  channels: Sequence[int], states: Sequence[MazeState]) -> list[CellPatch]:
    """Return patches of the same cell in other channels."""
    if not options.num_controls:
        return []
    reference = reference_frames(game_of(states), {state.level_seed for state in states},
                                 REFERENCE_SIZE, options.seed)
    set_cell = SetTo(layer.name, channels=tuple(channels), cells=((0, 0),), value=options.value)
    controls = []
    for control in controls_of(policy, [set_cell], options.num_controls, options.seed, reference,
                               CHANNELS):
        drawn: Any = control.patches[0]
        values = np.asarray(drawn.value)[list(drawn.channels), 0, 0]
        controls.append(CellPatch(drawn.channels, tuple(values.tolist()), options.others))
    return controls


def measure(options: RetargetingOptions, store: ResultStore, forward: PartialForward, layer: Layer,
            patches: Mapping[str, CellPatch | None], controls: Sequence[CellPatch],
            states: Sequence[MazeState]) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Measure targets of all levels, and controls at some of them.

    Args:
        patches: patches by condition, that of the options first; None: the cheese is moved.

    Returns:
        Tables of targets by condition; and the table of controls, empty without controls.
    """
    condition, patch = next(iter(patches.items()))
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in patches}
    tried = []
    for state in with_progress(states, len(states), "level"):
        level = RetargetedLevel(forward, layer, state)
        rng = np.random.default_rng([options.seed, state.level_seed])
        targets = draw_targets(level.grid, options.targets, rng)
        some = [targets[place] for place in np.sort(
            rng.permutation(len(targets))[:options.control_targets])]
        for name, parts in tables.items():
            parts.append(store.compute("levels", name, state.level_seed, function=functools.partial(
                level.measure_targets, targets, patches[name])))
        if controls:
            assert patch is not None
            tried.append(store.compute(
                "controls", condition, state.level_seed, function=functools.partial(
                    level.measure_controls, some, patch, controls, rng)))
    return ({name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()},
            pd.concat(tried, ignore_index=True) if tried else pd.DataFrame())


def write_condition(store: ResultStore, condition: str, layer: Layer, table: pd.DataFrame,
                    tested: pd.DataFrame, seed: int) -> None:
    """Write tables, report and figure of a condition, and print its mean outcomes.

    Args:
        tested: comparison with controls; may be empty.
    """
    means = means_by_part(table, seed)
    store.write("parts", condition, value=means)
    if len(tested):
        store.write("effects", condition, value=tested)
    store.write("report", condition, value=report(condition, layer.name, table, means, tested))
    with store.file("figure", condition) as temporary:
        plot(temporary, condition, means)
    store.write("targets", condition, value=table)
    print(f"{condition}: {len(table)} targets of {table['seed'].nunique()} levels, path "
          f"probability {table['path_unpatched'].mean():.3f} unpatched and "
          f"{table['path_patched'].mean():.3f} patched, exact probability "
          f"{table['exact_unpatched'].mean():.3f} and {table['exact_patched'].mean():.3f}")


def condition_name(patch: CellPatch, value: float, num_controls: int) -> str:
    """Return the name of a patch's folder, such as ``55_to_5.5``.

    The name contains the channels, the value, and options that differ from the defaults. A long
    list of channels is replaced by the number of channels and a digest.

    Args:
        patch: patch of the target's cell.
        value: value of the cell.
    """
    end = (f"_to_{value:g}" + ("" if patch.others is None else f"_others_{patch.others:g}")
           + ("" if num_controls == 19 else f"_controls_{num_controls}"))
    name = "_".join(map(str, patch.channels)) + end
    if len(name) <= 100:
        return name
    return f"{len(patch.channels)}_channels_{hashlib.sha256(name.encode()).hexdigest()[:8]}{end}"


def report(condition: str, layer: str, targets: pd.DataFrame, parts: pd.DataFrame,
           tested: pd.DataFrame) -> str:
    """Return the report on one patch as Markdown.

    Args:
        condition: name of the patch's folder.
        targets: measurements of the targets, see ``TARGET_COLUMNS``.
        parts: means over groups of targets, from ``means_by_part``.
        tested: comparison with controls, from ``compare_controls``; empty without controls.
    """
    lines = [
        f"# Retargeting: {condition}", "",
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


def plot(path: Path, condition: str, parts: pd.DataFrame) -> None:
    """Draw the path probabilities, and exact ones if measured, without and with the patch: by the
    target's distance from the path to the corner, and by the size of the maze.

    Args:
        condition: name of the patch's folder, for the title.
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
    every = parts.iloc[0]  # the group of all targets
    name = condition.replace("_", " ")
    figure.suptitle(f"{name}: the patch changes the {every['outcome']} probability of its target "
                    f"from {every[UNPATCHED]:.2f} to {every[PATCHED]:.2f}")
    figure.savefig(path, dpi=DPI, format="png")


main = command(RetargetingOptions, retarget)

if __name__ == "__main__":
    raise SystemExit(main())
