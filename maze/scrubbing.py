"""Causal scrubbing: test whether channels matter only through the position of the cheese.

With the mouse on a sample of squares of each level, channels are resampled from other levels, with
the cheese at the same square or at another one. The change of the field is compared with the change
caused by resampling random channels. A killed run resumes after its last finished level.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.layers import Layer
from agents.networks import Policy
from common.cli import count, whole
from common.options import command, option, redefine
from common.palette import BLUE, DPI, VERMILION
from common.progress import with_progress
from common.results import ResultStore
from common.tables import format_count, markdown_table, with_minus
from envs.maze.grid import FORK
from envs.maze.state import MazeState, game_of
from interventions.controls import matched_sets
from interventions.flags import REFERENCE_SIZE
from interventions.partial_forward import PartialForward
from interventions.resampling import (
    MIN_SOURCES,
    NUM_SETS,
    OTHER,
    SAME,
    Scrubbing,
    Target,
    channel_changes,
    collect_scrubbing,
    scrub_target,
    sizes_moved,
)
from maze.field.fields import reference_frames
from maze.options import AgentOptions, MazeOptions
from maze.studies.channels import ChannelsOptions, write_nothing_chosen
from maze.studies.scrubbing import OUTCOMES, SCRUBBING_FILES, SourcePool, make_target
from stats.effects import check_starts
from stats.report import bold, format_interval, format_p, warn_of_few_controls

DRAWS: dict[str, Literal["joint", "channel"]] = {"joint": "joint", "per_channel": "channel"}
_FEATURES = {"same": "the same square", "other": "another square"}
_SETS = {"hypothesis": "these channels", "random": "random channels"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScrubbingOptions(ChannelsOptions, AgentOptions):
    """Causal scrubbing: test whether channels matter only through the position of the cheese."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=200)
    kind: str | None = redefine(MazeOptions, "kind", default=FORK)
    sources: str = option(
        "joint", "take all channels from one level, or each channel from its own level",
        choices=tuple(DRAWS))
    num_sources: int = option(
        MIN_SOURCES, "number of source levels with the cheese at the same square, and of source "
                     "levels with the cheese at another square", type=whole(MIN_SOURCES, 1000))
    num_controls: int = option(
        NUM_SETS, "number of random sets of channels; a claim needs at least 19",
        type=whole(2, 1000))
    num_squares: int = option(
        16, "number of random squares of a level's field to measure, in addition to the decision "
            "square; all squares if there are fewer", type=count)
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/scrubbing"))


def scrub_channels(options: ScrubbingOptions) -> pd.DataFrame | None:
    """Measure the changes caused by resampling, write the results to ``options.output_dir``, and
    return the double contrasts; None for a dry run, or if no channel was chosen."""
    policy = options.load_agent()
    layer, channels = options.find_channels(policy)
    states = options.choose_levels()
    seeds = [state.level_seed for state in states]
    check_starts(len(seeds), "--num_mazes")
    if options.dry_run:
        print(f"channels {_text(channels)}; levels: {' '.join(map(str, seeds))}")
        return None
    store = options.open_store(SCRUBBING_FILES, {
        "layer": layer.name, "channels": list(channels), "sources": options.sources,
        "num_sources": options.num_sources, "num_controls": options.num_controls,
        "num_squares": options.num_squares, "seed": options.seed}, states=states)
    if not channels:
        write_nothing_chosen(store, layer)
        return None
    forward = PartialForward(policy, options.compute, layer.name)
    pool = SourcePool(game_of(states), set(seeds), options.seed)
    target_of = functools.partial(make_target, forward, pool=pool, num_sources=options.num_sources,
                                  num_squares=options.num_squares, seed=options.seed)
    drawn = store.compute("sets", function=lambda: draw_sets(
        options, policy, layer, channels, states, target_of))
    sets = [tuple(map(int, text.split())) for text in drawn["channels"]]

    def scrub(place: int, state: MazeState) -> pd.DataFrame:
        values = scrub_target(target_of(state), sets, (options.seed, place),
                              DRAWS[options.sources])
        return pd.DataFrame([
            {"seed": state.level_seed, "set": name, "channels": _text(chosen), "feature": feature,
             **dict(zip(OUTCOMES, map(float, outcomes)))}
            for feature, by_set in zip((SAME, OTHER), np.asarray(values))  # (2, sets, M)
            for name, chosen, outcomes in zip(drawn["set"], sets, by_set)])

    table = pd.concat([
        store.compute("levels", place, state.level_seed,
                      function=functools.partial(scrub, place, state))
        for place, state in enumerate(with_progress(states, len(states), "level"))],
        ignore_index=True)
    outcomes = table[list(OUTCOMES)].to_numpy().reshape(len(states), 2, len(sets), -1)
    scrubbing = collect_scrubbing(seeds, outcomes, tuple(OUTCOMES), sets,
                                  drawn["moved"].to_numpy(), drawn["matched"].to_numpy()[1:])
    return write_results(store, layer, channels, table, drawn, scrubbing, options.seed)


def draw_sets(options: ScrubbingOptions, policy: Policy, layer: Layer, channels: tuple[int, ...],
              states: Sequence[MazeState], target_of: Callable[[MazeState], Target]
              ) -> pd.DataFrame:
    """Draw random sets of channels that change as much as the tested ones.

    Returns:
        A row per set, that of the tested channels first.
    """
    std = reference_frames(game_of(states), {state.level_seed for state in states}, REFERENCE_SIZE,
                           options.seed).std(policy, layer)
    changes = channel_changes(map(target_of, with_progress(states, len(states), "level")), std)
    random, _, matched = matched_sets(changes, channels, options.num_controls, options.seed)
    sets = [channels, *random]
    return pd.DataFrame({
        "set": ["hypothesis", *(f"random_{number:02d}" for number in range(len(random)))],
        "channels": list(map(_text, sets)), "moved": sizes_moved(changes, sets),
        "matched": [True, *matched]})


def write_results(store: ResultStore, layer: Layer, channels: Sequence[int], table: pd.DataFrame,
                  sets: pd.DataFrame, scrubbing: Scrubbing, seed: int) -> pd.DataFrame:
    """Write tables, report and figure, and return the double contrasts.

    Args:
        table: outcomes by level, set and feature.
        sets: the sets of channels, from :func:`draw_sets`.
    """
    conditions, contrasts = scrubbing.conditions(seed), scrubbing.contrasts(seed)
    store.write("conditions", value=conditions)
    store.write("contrasts", value=contrasts)
    store.write("report", value=report(layer.name, _text(channels), table["seed"].nunique(), sets,
                                       conditions, contrasts))
    with store.file("figure") as temporary:
        plot(temporary, f"Channels {_text(channels)} of {layer.name}", conditions, contrasts)
    store.write("table", value=table)
    print(f"channels {_text(channels)}: double contrast of the total variation "
          f"{contrasts['effect'].iloc[0]:+.4f}\nwrote {store.file_of('table')}")
    return contrasts


def _text(channels: Sequence[int]) -> str:
    return " ".join(map(str, channels))


def report(layer: str, channels: str, num_levels: int, sets: pd.DataFrame,
           conditions: pd.DataFrame, contrasts: pd.DataFrame) -> str:
    """Return the report as Markdown.

    Args:
        channels: the tested channels, as text.
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
        effect = with_minus(f"{own.loc[outcome, 'effect']:+.3f}")
        axes.set_title(f"{label}\ndouble contrast {effect}", fontsize=9)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=9)
    figure.suptitle(f"{own['supported'].sum()} of {format_count(len(own), 'outcomes')} support the "
                    f"hypothesis\n{title}")
    figure.savefig(path, dpi=DPI, format="png")


main = command(ScrubbingOptions, scrub_channels)

if __name__ == "__main__":
    raise SystemExit(main())
