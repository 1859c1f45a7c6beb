"""Vector fields of an agent on maze levels, with and without patches, and their differences.

A killed run resumes after its last finished field; more levels and arms (lists of patches) can be
added to a finished run. Each shard computes the fields of its levels; --join then writes the
tables, figures and films.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from agents.agent_file import agent_files
from agents.layers import layers_named
from common.cli import Parser, from_zero, whole
from common.errors import UserError, script_main
from common.shards import WHOLE, add_shard_flags
from interventions.flags import OpenedPatches, add_patch_flags, open_arm, patch_arms
from maze.field.fields import MEMORIES, START, reference_frames
from maze.field.plots import (
    Style,
    draw_arm,
    over_arms,
    over_checkpoints,
    over_cheese,
    write_film,
)
from maze.field.results import (
    FIELDS_FILES,
    UNPATCHED,
    FieldOptions,
    add_arm,
    fields_of_arm,
    moved_table,
    outcome_table,
)
from maze.level.flags import add_agent_flags, add_output_flags, levels_of, open_store, start
from maze.level.grid import describe
from maze.level.patch_words import marked_squares, register_maze_words
from maze.level.state import WORLD_DIMS, MazeState, as_played, draw, game_of
from maze.studies.vectors import add_own_vector_flags, own_vectors

_PRINTED = ("mean_total_variation", "p_cheese", "p_corner", "exact_cheese", "facing_variation")
COEFFICIENTS, CHECKPOINTS, CHEESE = "coefficients", "checkpoints", "cheese"


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to analyse", num_mazes=10)
    add_own_vector_flags(flags)
    add_patch_flags(flags)
    flags.add_argument("--facing", default="0", choices=("0", "1", "both"),
                       help="facing of the mouse: 0 for left, 1 for right; both: compute both "
                            "fields and, for agents without memory, exact probabilities")
    flags.add_argument("--memory", default=START, choices=MEMORIES,
                       help="recurrent state of agents with a GRU: the state at an episode's "
                            "start, or the state after walking to the square")
    flags.add_argument("--region", type=whole(1, max(WORLD_DIMS.values())), default=5,
                       help="number of rows and columns of the top right region, for exact "
                            "probabilities")
    flags.add_argument("--num_pictures", type=from_zero, default=20,
                       help="number of levels, in order, for which figures are drawn")
    flags.add_argument("--components", action="store_true",
                       help="draw an arrow for each direction instead of the net arrow")
    flags.add_argument("--margin", action="store_true", help="also draw the walls around the maze")
    flags.add_argument("--films", nargs="+", default=[],
                       choices=(COEFFICIENTS, CHECKPOINTS, CHEESE),
                       help="films of the levels with figures. coefficients: one image per arm; "
                            "checkpoints: one per agent file in the agent's folder; cheese: one "
                            "per square of the cheese")
    flags.add_argument("--num_stills", type=from_zero, default=0,
                       help="number of stills of each film to write side by side as an image")
    add_output_flags(flags, "fields")
    add_shard_flags(flags, "the levels")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, compute, policy = start(parser(), argv)
    levels = by_name(levels_of(args))
    env = game_of(levels.values())
    register_maze_words()
    patches = patch_arms(args)
    steered = {name.replace(" ", "_"): patch
               for name, patch in own_vectors(args, policy, [*levels.values()]).items()}
    arms = [UNPATCHED, *steered, *patches]
    if COEFFICIENTS in args.films and len(arms) < 3:
        raise UserError(f"--films {COEFFICIENTS} needs several arms: give several --vectors, "
                        "or --patch_file with a list of coefficients")
    checkpoints = agent_files(args.agent_file.parent)
    if CHECKPOINTS in args.films and len(checkpoints) < 2:
        raise UserError(f"--films {CHECKPOINTS} needs the agent files model_<steps>.pth of a run "
                        f"next to {args.agent_file}; there are {len(checkpoints)}")
    if args.dry_run:
        print(*(f"{name}: {describe(state.grid)}" for name, state in levels.items()),
              f"arms: {', '.join(arms)}", sep="\n")
        return
    facings = (0, 1) if args.facing == "both" else (int(args.facing),)
    store = open_store(FIELDS_FILES, args, compute, {
        "facing": args.facing, "memory": args.memory, "region": args.region,
        "components": args.components, "margin": args.margin}, args.shard,
        {"levels": list(levels), "arms": arms}, args.join,
        [("field", arm, level) for arm in arms for level in levels])
    all_levels = [*levels.values()]
    levels = {name: levels[name] for name in args.shard.of(list(levels))}
    options = FieldOptions(policy, compute, facings, args.memory)
    reference = functools.cache(functools.partial(
        reference_frames, env, {state.level_seed for state in all_levels}))
    by_arm, moved = {}, []
    for name in arms:
        opened = OpenedPatches([steered[name]], {"own_vector": name, "layer": args.layer}
                               ) if name in steered else open_arm(
            patches.get(name, ()), args, policy, env, reference,
            functools.partial(as_played, all_levels))
        std = {layer.name: reference(args.reference_size, args.reference_seed).std(policy, layer)
               for patch in opened.patches for layer in layers_named(policy, patch.layer)}
        add_arm(store, name, opened.metadata)
        by_arm[name], sizes = fields_of_arm(store, name, opened.patches, levels, options, std)
        moved += sizes
    store.finish()
    if args.shard != WHOLE:
        print(f"the fields of {len(levels)} levels in {len(arms)} arms are in {store.path}")
        return
    table, sizes = outcome_table(by_arm, levels, args.region), moved_table(moved)
    store.write("moved", value=sizes)
    store.write("differences", value=table)
    for row in sizes[sizes["pictures"] == 0].itertuples():
        print(f"{row.arm}: the patch at {row.layer} never acted on any frame")
    style = Style(args.components, args.margin)
    drawn = list(levels)[:args.num_pictures]
    views = {name: draw([levels[name]], person_view=True)[0] for name in drawn}
    for arm, fields in by_arm.items():
        marked = marked_squares(patches.get(arm, ()))
        draw_arm(store, arm, fields, by_arm[UNPATCHED], views,
                 dataclasses.replace(style, marked=marked))
    for film, name in itertools.product(args.films, drawn):
        stills = store.file_of("stills", film, name) if args.num_stills else None
        if not store.has("film", film, name) or (stills and not stills.exists()):
            figures = {  # generators, of which only the chosen one runs
                COEFFICIENTS: over_arms(by_arm, name, views[name], style),
                CHECKPOINTS: over_checkpoints(checkpoints, levels[name], options, views[name],
                                              style),
                CHEESE: over_cheese(levels[name], options, style)}[film]
            write_film(store.file_of("film", film, name), figures, stills, args.num_stills)
    means = table.groupby("arm", sort=False)[list(_PRINTED)].mean()
    print(f"{means.to_string()}\nwrote {store.file_of('differences')} and the fields of "
          f"{len(levels)} levels in {len(arms)} arms")


def by_name(states: Sequence[MazeState]) -> dict[str, MazeState]:
    """Return levels by their names in files: the level seed, followed by ``_2``, ``_3`` and so on
    for further levels with the same seed."""
    named: dict[str, MazeState] = {}
    for state in states:
        times = sum(other.level_seed == state.level_seed for other in named.values())
        named[f"{state.level_seed}_{times + 1}" if times else str(state.level_seed)] = state
    return named


if __name__ == "__main__":
    raise SystemExit(main())
