"""Fields of several arms, that is with several lists of patches, on the same levels.

What is on disk already is read; what is not is computed and written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from agents.agent_file import load_agent
from agents.hooks import Patch
from agents.networks import Policy
from agents.reference_set import ReferenceSet
from agents.scopes import Size, patched
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from common.results import ResultStore
from envs.procgen_env import EnvConfig
from maze.field.decisions import outcomes
from maze.field.differences import difference
from maze.field.fields import NO_MEMORY, WALKED, Field, frame_source, vector_field
from maze.field.files import UNPATCHED, key_of, read_field, write_field
from maze.field.plots import Panel, Style, compared, field_figure, plot_fields, plot_maps
from maze.field.reaching import Chain, path_probability
from maze.level.environment import draw, stock_state
from maze.level.grid import Grid
from maze.level.state import MazeState

Fields = tuple[Field, ...]
"""Of one level, one a facing."""


def kind_of(grid: Grid) -> str:
    """The kind of a level; ``none`` where cheese or corner cannot be reached."""
    try:
        return grid.kind()
    except UserError:
        return "none"


@dataclasses.dataclass(frozen=True)
class Look:
    """Settings with which fields of an agent are computed.

    Attributes:
        policy, compute, memory: as in ``vector_field``.
        facings: of the mouse, a field each.
    """

    policy: Policy
    compute: Compute
    facings: tuple[int, ...]
    memory: str

    def at(self, state: MazeState, facing: int | None = None) -> Field:
        """The field of a level; of the first facing if none is given."""
        return vector_field(self.policy, self.compute, state, memory=self.memory,
                            facing=self.facings[0] if facing is None else facing)


def reference_pictures(env: EnvConfig, without: Collection[int], size: int,
                       seed: int) -> ReferenceSet:
    """Pictures of random levels of maze, with the mouse on a random free square.

    Args:
        without: level seeds that are measured, of which none is used.
    """
    seeds = [number for number in env.draw_levels(size + len(without), seed)
             if number not in without][:size]
    rng = np.random.default_rng(seed)
    frames = []
    for number in seeds:
        state = stock_state(env.distribution_mode, number, env.use_backgrounds)
        square = rng.permutation(state.grid.squares(without_cheese=True))[:1]
        frames.append(frame_source(state)(square, np.zeros(1, np.int64))[0])
    return ReferenceSet(np.stack(frames), description={
        "of": "levels that are not measured, the mouse anywhere", "seed": seed})


def fields_of_arm(store: ResultStore, arm: str, patches: Sequence[Patch],
                  levels: Mapping[str, MazeState], look: Look, std: Mapping[str, Tensor]
                  ) -> tuple[dict[str, Fields], list[dict]]:
    """The fields of an arm by level, those of them that the folder lacks being computed.

    Args:
        patches: opened for the agent.
        std: standard deviations of the patched layers' units, in which it is measured how far the
            patches move them.

    Returns:
        The fields, and how far the patches moved their outputs, for :func:`moved_table`.

    Raises:
        UserError: if the folder has another level of the same name.
    """
    found, moved = {}, []
    for name, state in with_progress(levels.items(), len(levels), "level"):
        sides = []
        for facing in look.facings:
            key = key_of(name, facing, look.facings)
            if not store.has("field", arm, key):
                with patched(look.policy, patches, std) as scope:
                    field = look.at(state, facing)
                write_field(store, arm, key, field, scope.moved())
            field, sizes = read_field(store, arm, key)
            if field.grid.to_rows() != state.grid.to_rows():
                raise UserError(f"{store.file_of('field', arm, key)} is of another level "
                                f"than the one of seed {state.level_seed} that is asked for; "
                                "choose another --output_dir, or give --overwrite")
            sides.append(field)
            moved += [{"arm": arm, "patch": number, **dataclasses.asdict(size)}
                      for number, size in enumerate(sizes)]
        found[name] = tuple(sides)
    return found, moved


def moved_table(moved: Sequence[Mapping]) -> pd.DataFrame:
    """A row for each patch of an arm: how far it moved its output, as means over all pictures.

    Args:
        moved: from :func:`fields_of_arm`.
    """
    sizes = [field.name for field in dataclasses.fields(Size)]
    table = pd.DataFrame(moved, columns=["arm", "patch", *sizes])
    rows = []
    for key, part in table.groupby(["arm", "patch", "layer"], sort=False):
        total = part["pictures"].sum()
        means = {name: (part[name] * part["pictures"]).sum() / max(total, 1)
                 for name in ("in_std", "norm", "relative")}
        rows.append({**dict(zip(("arm", "patch", "layer"), key)), "pictures": total, **means})
    return pd.DataFrame(rows, columns=table.columns)


def outcome_table(found: Mapping[str, Mapping[str, Fields]], levels: Mapping[str, MazeState],
                  region: int) -> pd.DataFrame:
    """A row for each arm and level."""
    rows = []
    for arm, fields in found.items():
        for name, sides in fields.items():
            state = levels[name]
            unpatched = None if arm == UNPATCHED else found[UNPATCHED][name][0]
            exact = len(sides) > 1 and sides[0].memory == NO_MEMORY
            rows.append({
                "arm": arm, "level": name, "seed": state.level_seed,
                "maze_dim": state.grid.maze_dim, "kind": kind_of(state.grid),
                "squares": len(sides[0].squares),
                **outcomes(sides[0], unpatched, sides[1] if exact else None,
                           min(region, state.grid.world_dim), state.timeout - state.time),
                "facing_variation": difference(*sides).mean_total_variation
                if len(sides) > 1 else np.nan})
    return pd.DataFrame(rows)


def draw_arm(store: ResultStore, arm: str, fields: Mapping[str, Fields],
             unpatched: Mapping[str, Fields], views: Mapping[str, np.ndarray],
             style: Style) -> None:
    """The pictures of an arm that the folder lacks."""
    for name, view in with_progress(views.items(), len(views), "level"):
        sides = fields[name]
        grid = sides[0].grid
        panel = Panel(arm, grid, sides[0], view)
        if not store.has("field_figure", arm, name):
            panels = [panel] if arm == UNPATCHED else compared(
                Panel(UNPATCHED, grid, unpatched[name][0], view), panel)
            plot_fields(store.file_of("field_figure", arm, name), panels, style, f"level {name}")
        if not store.has("maps_figure", arm, name):
            plot_maps(store.file_of("maps_figure", arm, name), grid, maps_of(sides), style,
                      f"level {name}, {arm}")


def maps_of(sides: Fields) -> dict[str, np.ndarray]:
    """Value, path probability and, with both facings, the exact probability of each square."""
    field = sides[0]
    reached = field.grid.distances(field.grid.mouse) >= 0
    maps = {"value": field.map(field.values)}
    if field.memory != WALKED:
        maps["path probability"] = field.map([
            path_probability(field, tuple(square)) if reached[tuple(square)] else np.nan
            for square in field.squares.tolist()])
    if len(sides) > 1 and field.memory == NO_MEMORY:
        squares = field.grid.squares()
        exact = np.full(reached.shape, np.nan)
        exact[tuple(np.array(squares).T)] = Chain.of(sides).reaching(squares)
        maps["exact probability of reaching it"] = exact
    return maps


def over_arms(found: Mapping[str, Mapping[str, Fields]], level: str, view: np.ndarray,
              style: Style) -> Iterator[Figure]:
    """A level's field of each arm beside the one without patches, and their difference."""
    grid = found[UNPATCHED][level][0].grid
    original = Panel(UNPATCHED, grid, found[UNPATCHED][level][0], view)
    for arm, fields in found.items():
        if arm != UNPATCHED:
            yield field_figure(compared(original, Panel(arm, grid, fields[level][0], view)), style,
                               f"level {level}")


def over_checkpoints(files: Sequence[Path], state: MazeState, look: Look, view: np.ndarray,
                     style: Style) -> Iterator[Figure]:
    """A level's field by each of several agent files."""
    for path in files:
        field = dataclasses.replace(look, policy=load_agent(path, look.compute.device)).at(state)
        yield field_figure([Panel(path.stem, state.grid, field, view)], style)


def over_cheese(state: MazeState, look: Look, style: Style) -> Iterator[Figure]:
    """A level's field with the cheese on each of its squares but the mouse's."""
    for square in state.grid.squares():
        if square != state.grid.mouse:
            moved = state.with_cheese(square)
            yield field_figure([Panel(f"cheese at {square}", moved.grid, look.at(moved),
                                      draw([moved], person_view=True)[0])], style)
