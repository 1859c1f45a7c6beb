"""Vector fields of an agent on maze levels, with and without patches, and their differences.

A killed run resumes after its last finished field; more levels and conditions (lists of patches)
can be added to a finished run. Each shard computes the fields of its levels; --join then writes the
tables, figures and films.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from agents.agent_file import agent_files
from agents.layers import layers_named
from agents.networks import Policy
from agents.patch import Patch
from common.cli import from_zero
from common.errors import UserError
from common.options import ShardOptions, command, option, redefine
from common.results import ResultStore
from common.shards import WHOLE
from envs.maze.grid import describe
from envs.maze.state import MazeState, as_played, draw, game_of
from interventions.flags import OpenedPatches, PatchOptions
from interventions.maze_words import marked_squares
from maze.field.fields import MEMORIES, START, reference_frames
from maze.field.plots import (
    Style,
    draw_condition,
    over_checkpoints,
    over_cheese,
    over_conditions,
    write_film,
)
from maze.field.results import (
    FIELDS_FILES,
    UNPATCHED,
    FieldOptions,
    Fields,
    add_condition,
    fields_of_condition,
    moved_table,
    outcome_table,
)
from maze.options import AgentOptions, MazeOptions, RegionOptions
from maze.studies.vectors import OwnVectorOptions

_PRINTED = ("mean_total_variation", "p_cheese", "p_corner", "exact_cheese", "facing_variation")
COEFFICIENTS, CHECKPOINTS, CHEESE = "coefficients", "checkpoints", "cheese"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldStudyOptions(OwnVectorOptions, PatchOptions, RegionOptions, AgentOptions,
                        ShardOptions):
    """Vector fields of an agent on maze levels, with and without patches, and their
    differences."""

    num_mazes: int = redefine(MazeOptions, "num_mazes", default=10)
    facing: str = option(
        "0", "facing of the mouse: 0 for left, 1 for right; both: compute both fields and, for "
             "agents without memory, exact probabilities", choices=("0", "1", "both"))
    memory: str = option(
        START, "recurrent state of agents with a GRU: the state at an episode's start, or the "
               "state after walking to the square", choices=MEMORIES)
    num_pictures: int = option(20, "number of levels, in order, for which figures are drawn",
                               type=from_zero)
    components: bool = option(False, "draw an arrow for each direction instead of the net arrow")
    margin: bool = option(False, "also draw the walls around the maze")
    films: tuple[str, ...] = option(
        (), "films of the levels with figures. coefficients: one image per condition; checkpoints: "
            "one per agent file in the agent's folder; cheese: one per square of the cheese",
        choices=(COEFFICIENTS, CHECKPOINTS, CHEESE))
    num_stills: int = option(
        0, "number of stills of each film to write side by side as an image", type=from_zero)
    output_dir: Path = redefine(AgentOptions, "output_dir", default=Path("analysis/maze/fields"))

    def field_options(self, policy: Policy) -> FieldOptions:
        """Return the options of a single field."""
        facings = (0, 1) if self.facing == "both" else (int(self.facing),)
        return FieldOptions(policy, self.compute, facings, self.memory)


def compute_fields(options: FieldStudyOptions) -> pd.DataFrame | None:
    """Compute fields, write them, tables, figures and films to ``options.output_dir``, and return
    the outcomes by condition and level; None for a dry run, or for one of several shards."""
    policy = options.load_agent()
    all_levels = by_name(options.choose_levels())
    patches = options.patch_lists
    steered = {name.replace(" ", "_"): patch for name, patch in options.own_vectors(
        policy, [*all_levels.values()]).items()}
    conditions = [UNPATCHED, *steered, *patches]
    checkpoints = check_films(options, len(conditions))
    if options.dry_run:
        print(*(f"{name}: {describe(state.grid)}" for name, state in all_levels.items()),
              f"conditions: {', '.join(conditions)}", sep="\n")
        return None
    store = options.open_store(FIELDS_FILES, {
        "facing": options.facing, "memory": options.memory, "region": options.region,
        "components": options.components, "margin": options.margin}, options.shard,
        {"levels": list(all_levels), "conditions": conditions}, options.join,
        [("field", condition, level) for condition in conditions for level in all_levels])
    by_condition, moved = fields_by_condition(options, policy, store, conditions, steered,
                                               patches, all_levels)
    store.finish()
    levels = {name: all_levels[name] for name in options.shard.of(list(all_levels))}
    if options.shard != WHOLE:
        print(f"the fields of {len(levels)} levels in {len(conditions)} conditions are in "
              f"{store.path}")
        return None
    table, sizes = outcome_table(by_condition, levels, options.region), moved_table(moved)
    store.write("moved", value=sizes)
    store.write("differences", value=table)
    for row in sizes[sizes["pictures"] == 0].itertuples():
        print(f"{row.condition}: the patch at {row.layer} never acted on any frame")
    draw_all(options, policy, store, patches, by_condition, levels, checkpoints)
    means = table.groupby("condition", sort=False)[list(_PRINTED)].mean()
    print(f"{means.to_string()}\nwrote {store.file_of('differences')} and the fields of "
          f"{len(levels)} levels in {len(conditions)} conditions")
    return table


def check_films(options: FieldStudyOptions, num_conditions: int) -> list[Path]:
    """Return the agent files for the films of checkpoints.

    Raises:
        UserError: if the films need more conditions or agent files.
    """
    if COEFFICIENTS in options.films and num_conditions < 3:
        raise UserError(f"--films {COEFFICIENTS} needs several conditions: give several --vectors, "
                        "or --patch_file with a list of coefficients")
    checkpoints = agent_files(options.agent_file.parent)
    if CHECKPOINTS in options.films and len(checkpoints) < 2:
        raise UserError(f"--films {CHECKPOINTS} needs the agent files model_<steps>.pth of a run "
                        f"next to {options.agent_file}; there are {len(checkpoints)}")
    return checkpoints


def fields_by_condition(options: FieldStudyOptions, policy: Policy, store: ResultStore,
                        conditions: Sequence[str], steered: Mapping[str, Patch],
                        patches: Mapping[str, Sequence[Patch]], all_levels: Mapping[str, MazeState]
                        ) -> tuple[dict[str, dict[str, Fields]], list[dict]]:
    """Compute the missing fields of the shard's levels, and return all of them by condition, and
    the sizes of the patches' changes.

    Args:
        steered: patches that add each level's own vector, by condition.
    """
    states = [*all_levels.values()]
    levels = {name: all_levels[name] for name in options.shard.of(list(all_levels))}
    env = game_of(states)
    reference = functools.cache(functools.partial(
        reference_frames, env, {state.level_seed for state in states}))
    by_condition, moved = {}, []
    for name in conditions:
        opened = OpenedPatches([steered[name]], {"own_vector": name, "layer": options.layer}
                               ) if name in steered else options.open_patch_list(
            policy, env, reference, functools.partial(as_played, states), patches.get(name, ()))
        std = {layer.name: reference(options.reference_size, options.reference_seed).std(
                   policy, layer)
               for patch in opened.patches for layer in layers_named(policy, patch.layer)}
        add_condition(store, name, opened.metadata)
        by_condition[name], sizes = fields_of_condition(store, name, opened.patches, levels,
                                                        options.field_options(policy), std)
        moved += sizes
    return by_condition, moved


def draw_all(options: FieldStudyOptions, policy: Policy, store: ResultStore,
             patches: Mapping[str, Sequence[Patch]], by_condition: Mapping[str, dict[str, Fields]],
             levels: Mapping[str, MazeState], checkpoints: Sequence[Path]) -> None:
    """Draw figures and films of the first levels; arguments as in :func:`fields_by_condition`."""
    style = Style(options.components, options.margin)
    drawn = list(levels)[:options.num_pictures]
    views = {name: draw([levels[name]], person_view=True)[0] for name in drawn}
    for condition, fields in by_condition.items():
        marked = marked_squares(patches.get(condition, ()))
        draw_condition(store, condition, fields, by_condition[UNPATCHED], views,
                       dataclasses.replace(style, marked=marked))
    for film, name in itertools.product(options.films, drawn):
        stills = store.file_of("stills", film, name) if options.num_stills else None
        if not store.has("film", film, name) or (stills and not stills.exists()):
            figures = {  # generators, of which only the chosen one runs
                COEFFICIENTS: over_conditions(by_condition, name, views[name], style),
                CHECKPOINTS: over_checkpoints(checkpoints, levels[name],
                                              options.field_options(policy), views[name], style),
                CHEESE: over_cheese(levels[name], options.field_options(policy), style)}[film]
            write_film(store.file_of("film", film, name), figures, stills, options.num_stills)


def by_name(states: Sequence[MazeState]) -> dict[str, MazeState]:
    """Return levels by their names in files: the level seed, followed by ``_2``, ``_3`` and so on
    for further levels with the same seed."""
    named: dict[str, MazeState] = {}
    for state in states:
        times = sum(other.level_seed == state.level_seed for other in named.values())
        named[f"{state.level_seed}_{times + 1}" if times else str(state.level_seed)] = state
    return named


main = command(FieldStudyOptions, compute_fields)

if __name__ == "__main__":
    raise SystemExit(main())
