"""Causal scrubbing: do channels matter only through where the cheese is?

At every square of a level, channels are taken from other levels, with the cheese at the same square
or elsewhere, and how much the field changes is compared with random channels. A killed run goes on
after its last level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from common.cli import Parser, count, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import script_main
from common.files import versions
from common.progress import with_progress
from common.results import ResultStore
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
from maze.level.flags import add_agent_flags, add_output_flags, check_num_mazes, levels_of
from maze.level.grid import FORK
from maze.level.state import MazeState, game_of
from maze.studies.channel_sets import (
    add_channel_flags,
    channels_asked,
    map_layer,
    write_nothing_chosen,
)
from maze.studies.results import SCRUBBING_FILES
from maze.studies.scrub_report import plot, report
from maze.studies.scrubs import OUTCOMES, Sources, target_of
from stats.effects import check_starts

DRAWS = {"joint": "joint", "per_channel": "channel"}


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to look at", num_mazes=200)
    flags.set_defaults(kind=FORK)
    add_channel_flags(flags)
    flags.add_argument("--sources", default="joint", choices=tuple(DRAWS),
                       help="all channels from one level, or each from one of its own")
    flags.add_argument("--num_sources", type=whole(MIN_SOURCES, 1000), default=MIN_SOURCES,
                       help="levels with the cheese at the same square, and elsewhere")
    flags.add_argument("--num_controls", type=whole(2, 1000), default=NUM_SETS,
                       help="random sets of channels; at least 19 are needed to claim anything")
    flags.add_argument("--num_squares", type=count, default=16,
                       help="squares of a level's field that are looked at, beside the decision "
                            "square; all if there are no more")
    add_output_flags(flags, "scrubbing")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_num_mazes(args)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    layer = map_layer(policy, args.layer)
    channels = channels_asked(args.channels, args.strongest, policy, layer)
    states = levels_of(args)
    env, seeds = game_of(states), [state.level_seed for state in states]
    check_starts(len(set(seeds)))
    if args.dry_run:
        print(f"channels {_text(channels)}; levels: {' '.join(map(str, seeds))}")
        return
    store = ResultStore(args.output_dir, SCRUBBING_FILES)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "layer": layer.name, "channels": list(channels), "levels": seeds,
        "rows": [state.grid.to_rows() for state in states] if args.levels else None,
        "distribution_mode": env.distribution_mode, "use_backgrounds": env.use_backgrounds,
        "sources": args.sources, "num_sources": args.num_sources,
        "num_controls": args.num_controls, "num_squares": args.num_squares, "seed": args.seed,
        "precision": compute.precision, "versions": versions()}, args.overwrite)
    if not channels:
        write_nothing_chosen(store, layer)
        return
    cut = PartialForward(policy, compute, layer.name)
    sources = Sources(env, set(seeds), args.seed)
    make = functools.partial(target_of, cut, sources=sources, num_sources=args.num_sources,
                             num_squares=args.num_squares, seed=args.seed)

    def draw_sets() -> pd.DataFrame:
        std = reference_frames(env, set(seeds), REFERENCE_SIZE, args.seed).std(policy, layer)
        changes = channel_changes(map(make, with_progress(states, len(states), "level")), std)
        random, _, matched = matched_sets(changes, channels, args.num_controls, args.seed)
        sets = [channels, *random]
        return pd.DataFrame({
            "set": ["hypothesis", *(f"random_{number:02d}" for number in range(len(random)))],
            "channels": list(map(_text, sets)), "moved": sizes_moved(changes, sets),
            "matched": [True, *matched]})

    drawn = store.compute("sets", function=draw_sets)
    sets = [tuple(map(int, text.split())) for text in drawn["channels"]]
    table = pd.concat([
        store.compute("levels", place, state.level_seed, function=functools.partial(
            _level, make, state, drawn["set"], sets, (args.seed, place), DRAWS[args.sources]))
        for place, state in enumerate(with_progress(states, len(states), "level"))],
        ignore_index=True)
    found = table[list(OUTCOMES)].to_numpy().reshape(len(states), 2, len(sets), -1)
    scrubbing = collect_scrubbing(seeds, found, tuple(OUTCOMES), sets, drawn["moved"].to_numpy(),
                                  drawn["matched"].to_numpy()[1:])
    conditions, contrasts = scrubbing.conditions(args.seed), scrubbing.contrasts(args.seed)
    store.write("conditions", value=conditions)
    store.write("contrasts", value=contrasts)
    store.write("report", value=report(layer.name, _text(channels), len(states), drawn, conditions,
                                       contrasts))
    with store.file("figure") as temporary:
        plot(temporary, f"Channels {_text(channels)} of {layer.name}", conditions, contrasts)
    store.write("table", value=table)
    first = contrasts[~contrasts["control"]].iloc[0]
    print(f"channels {_text(channels)}: double contrast of the total variation "
          f"{first['effect']:+.4f} ({first['low_95']:.4f} to {first['high_95']:.4f}), "
          f"{'supported' if first['supported'] else 'not supported'}")
    print(f"wrote {store.file_of('table')}")


def _text(channels: Sequence[int]) -> str:
    return " ".join(map(str, channels))


def _level(make: functools.partial, state: MazeState, names: Sequence[str],
           sets: Sequence[tuple[int, ...]], seed: Sequence[int], draw: str) -> pd.DataFrame:
    """The outcomes of a level, a row for each feature of the sources and set of channels."""
    found = scrub_target(make(state), sets, seed, draw)  # (2, sets, M)
    rows = [{"seed": state.level_seed, "set": name, "channels": _text(channels),
             "feature": feature, **dict(zip(OUTCOMES, map(float, values)))}
            for feature, by_set in zip((SAME, OTHER), np.asarray(found))
            for name, channels, values in zip(names, sets, by_set)]
    return pd.DataFrame(rows)


if __name__ == "__main__":
    raise SystemExit(main())
