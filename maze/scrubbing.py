"""Causal scrubbing: test whether channels matter only through the position of the cheese.

With the mouse on a sample of squares of each level, channels are resampled from other levels, with
the cheese at the same square or at another one. The change of the field is compared with the change
caused by resampling random channels. A killed run resumes after its last finished level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.cli import Parser, count, whole
from common.errors import script_main
from common.palette import BLUE, DPI, VERMILION
from common.progress import with_progress
from common.tables import markdown_table
from interventions.controls import matched_sets
from interventions.flags import REFERENCE_SIZE
from interventions.partial_forward import PartialForward
from interventions.resampling import (
    MIN_SOURCES,
    NUM_SETS,
    OTHER,
    SAME,
    channel_changes,
    collect_scrubbing,
    scrub_target,
    sizes_moved,
)
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, levels_of, open_store, start
from maze.level.grid import FORK
from maze.level.state import MazeState, game_of
from maze.studies.channels import (
    add_channel_flags,
    find_map,
    parse_channels,
    write_nothing_chosen,
)
from maze.studies.scrubbing import OUTCOMES, SCRUBBING_FILES, SourcePool, make_target
from stats.effects import check_starts
from stats.report import bold, format_interval, format_p, warn_of_few_controls

DRAWS: dict[str, Literal["joint", "channel"]] = {"joint": "joint", "per_channel": "channel"}
_FEATURES = {"same": "the same square", "other": "another square"}
_SETS = {"hypothesis": "these channels", "random": "random channels"}


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to analyse", num_mazes=200)
    flags.set_defaults(kind=FORK)
    add_channel_flags(flags)
    flags.add_argument("--sources", default="joint", choices=tuple(DRAWS),
                       help="take all channels from one level, or each channel from its own level")
    flags.add_argument("--num_sources", type=whole(MIN_SOURCES, 1000), default=MIN_SOURCES,
                       help="number of source levels with the cheese at the same square, and of "
                            "source levels with the cheese at another square")
    flags.add_argument("--num_controls", type=whole(2, 1000), default=NUM_SETS,
                       help="number of random sets of channels; a claim needs at least 19")
    flags.add_argument("--num_squares", type=count, default=16,
                       help="number of random squares of a level's field to measure, in addition "
                            "to the decision square; all squares if there are fewer")
    add_output_flags(flags, "scrubbing")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, compute, policy = start(parser(), argv)
    layer = find_map(policy, args.layer)
    channels = parse_channels(args.channels, args.strongest, policy, layer)
    states = levels_of(args)
    env, seeds = game_of(states), [state.level_seed for state in states]
    check_starts(len(seeds), "--num_mazes")
    if args.dry_run:
        print(f"channels {_text(channels)}; levels: {' '.join(map(str, seeds))}")
        return
    store = open_store(SCRUBBING_FILES, args, compute, {
        "layer": layer.name, "channels": list(channels), "sources": args.sources,
        "num_sources": args.num_sources, "num_controls": args.num_controls,
        "num_squares": args.num_squares, "seed": args.seed}, states=states)
    if not channels:
        write_nothing_chosen(store, layer)
        return
    forward = PartialForward(policy, compute, layer.name)
    pool = SourcePool(env, set(seeds), args.seed)
    target_of = functools.partial(make_target, forward, pool=pool, num_sources=args.num_sources,
                                  num_squares=args.num_squares, seed=args.seed)

    def draw_sets() -> pd.DataFrame:
        std = reference_frames(env, set(seeds), REFERENCE_SIZE, args.seed).std(policy, layer)
        changes = channel_changes(map(target_of, with_progress(states, len(states), "level")), std)
        random, _, matched = matched_sets(changes, channels, args.num_controls, args.seed)
        sets = [channels, *random]
        return pd.DataFrame({
            "set": ["hypothesis", *(f"random_{number:02d}" for number in range(len(random)))],
            "channels": list(map(_text, sets)), "moved": sizes_moved(changes, sets),
            "matched": [True, *matched]})

    def scrub(place: int, state: MazeState) -> pd.DataFrame:
        values = scrub_target(target_of(state), sets, (args.seed, place), DRAWS[args.sources])
        return pd.DataFrame([
            {"seed": state.level_seed, "set": name, "channels": _text(chosen), "feature": feature,
             **dict(zip(OUTCOMES, map(float, outcomes)))}
            for feature, by_set in zip((SAME, OTHER), np.asarray(values))  # (2, sets, M)
            for name, chosen, outcomes in zip(drawn["set"], sets, by_set)])

    drawn = store.compute("sets", function=draw_sets)
    sets = [tuple(map(int, text.split())) for text in drawn["channels"]]
    table = pd.concat([
        store.compute("levels", place, state.level_seed,
                      function=functools.partial(scrub, place, state))
        for place, state in enumerate(with_progress(states, len(states), "level"))],
        ignore_index=True)
    outcomes = table[list(OUTCOMES)].to_numpy().reshape(len(states), 2, len(sets), -1)
    scrubbing = collect_scrubbing(seeds, outcomes, tuple(OUTCOMES), sets,
                                  drawn["moved"].to_numpy(), drawn["matched"].to_numpy()[1:])
    conditions, contrasts = scrubbing.conditions(args.seed), scrubbing.contrasts(args.seed)
    store.write("conditions", value=conditions)
    store.write("contrasts", value=contrasts)
    store.write("report", value=report(layer.name, _text(channels), len(states), drawn, conditions,
                                       contrasts))
    with store.file("figure") as temporary:
        plot(temporary, f"Channels {_text(channels)} of {layer.name}", conditions, contrasts)
    store.write("table", value=table)
    print(f"channels {_text(channels)}: double contrast of the total variation "
          f"{contrasts['effect'].iloc[0]:+.4f}\nwrote {store.file_of('table')}")


def _text(channels: Sequence[int]) -> str:
    return " ".join(map(str, channels))


def report(layer: str, channels: str, num_levels: int, sets: pd.DataFrame,
           conditions: pd.DataFrame, contrasts: pd.DataFrame) -> str:
    """Return the report as Markdown.

    Args:
        layer: name of the layer.
        channels: the tested channels, as text.
        num_levels: number of target levels.
        sets: table of the sets of channels, with ``moved`` and ``matched``.
        conditions, contrasts: tables from ``interventions.resampling.Scrubbing``.
    """
    own = contrasts[~contrasts["control"]]
    num = int(own["num_controls"].min())
    lines = [
        f"# Causal scrubbing of channels {channels} of {layer}", "",
        "Hypothesis: the channels matter only through the cheese's square. In "
        f"{num_levels} levels, the channels are resampled from other levels, with the cheese at "
        f"the same square or at another one; {num} random sets of as many channels are resampled "
        "in the same way. Intervals: 95 %, over levels. The published norm shrinks with the size "
        "of a maze and is not a total variation; it is given for comparison with published "
        "numbers.", "",
        "The Euclidean norm of the change, in standard deviations, is "
        f"{sets['moved'].iloc[0]:.3g} for these channels and {sets['moved'].iloc[1:].min():.3g} to "
        f"{sets['moved'].iloc[1:].max():.3g} for the random sets; for "
        f"{int(sets['matched'].iloc[1:].sum())} of {num} random sets, the two differ by at most a "
        "quarter.", "",
        *markdown_table(
            ("outcome", "channels", "cheese at", "mean (95 %)"),
            [(OUTCOMES[row.outcome], _SETS[row.channels], _FEATURES[row.feature],
              format_interval(row.mean, row.low_95, row.high_95, ".4f"))
             for row in conditions.sort_values("outcome", key=lambda names: names.map(
                 list(OUTCOMES).index), kind="stable").itertuples()])]
    lines += ["## Double contrast", "", "Change with the cheese at another square minus change "
              "with the cheese at the same square, for these channels minus random channels. "
              "**Supported**: claimed (interval without 0, p (Holm) and p (controls) at most "
              "0.05) and above 0.", "",
              *markdown_table(
                  ("outcome", "other - same: random", "other - same: these",
                   "double contrast (95 %)", "p (Holm)", "p (controls)", "supported"),
                  [(OUTCOMES[row.outcome], f"{row.unaltered:.4f}", f"{row.altered:.4f}",
                    format_interval(row.effect, row.low_95, row.high_95, "+.4f"),
                    format_p(row.p_holm), format_p(row.p_control),
                    bold("yes") if row.supported else "no") for row in own.itertuples()])]
    claimed = contrasts.loc[contrasts["control"], "claimed"]
    return "\n".join([
        *lines, f"The same rule claims {claimed.sum()} of {len(claimed)} contrasts of the random "
        "sets, each compared with all other random sets.",
        *warn_of_few_controls(num, "random sets"), ""])


def plot(path: Path, title: str, conditions: pd.DataFrame, contrasts: pd.DataFrame) -> None:
    """Draw each outcome under the four conditions of ``Scrubbing``, with its double contrast.

    Args:
        path: file to write.
        title: title of the figure.
        conditions, contrasts: tables from ``interventions.resampling.Scrubbing``.
    """
    figure = Figure(figsize=(3.2 * len(OUTCOMES), 4), layout="constrained")
    panels = figure.subplots(1, len(OUTCOMES), squeeze=False)[0]
    own = contrasts[~contrasts["control"]].set_index("outcome")
    for axes, (outcome, label) in zip(panels, OUTCOMES.items()):
        part = conditions[conditions["outcome"] == outcome]
        for shift, (channels, colour) in enumerate((("hypothesis", VERMILION), ("random", BLUE))):
            rows = part[part["channels"] == channels]
            axes.errorbar(np.arange(2) + 0.08 * shift, rows["mean"],
                          np.array([rows["mean"] - rows["low_95"],
                                    rows["high_95"] - rows["mean"]]),
                          fmt="o-", color=colour, label=_SETS[channels])
        axes.set_xticks(np.arange(2) + 0.04, [_FEATURES[feature] for feature in rows["feature"]])
        axes.set_title(f"{label}\ndouble contrast {own.loc[outcome, 'effect']:+.3f}", fontsize=9)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI, format="png")


if __name__ == "__main__":
    raise SystemExit(main())
