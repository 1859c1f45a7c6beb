"""Result folder with the fields of several conditions on the same levels; a condition is a list of
patches.

Existing fields are read; missing ones are computed and written.

Layout::

    settings.json                   settings of the run
    differences.csv                 a row of outcomes per condition and level, see outcomes.py
    moved.csv                       a row per condition, patch and layer: mean size of the change
    <condition>/patches.json        metadata of the condition's patches
    <condition>/field_<level>.npz   field of a level; <level> is its seed, followed by _2, _3 and so
                                    on for further levels with the same seed
    <condition>/field_<level>_facing_1.npz
                                    field with facing 1, if both facings are requested
    <condition>/field_<level>.png   figure of the field, or of its change by the patches
    <condition>/maps_<level>.png    value and probability of reaching each square
    films/<film>_<level>.mp4        film over coefficients, checkpoints or squares of the cheese
    films/<film>_<level>.png        stills of the film side by side, if requested

An ``.npz`` file contains these arrays, for n squares and p patches (a patch of several layers
counts once per layer):

- ``squares``: inner row and column, int16 (n, 2);
- ``log_probs`` (n, 15), ``probs`` of left, down, up, right, stay (n, 5), ``values`` (n,), float32;
- ``rows``: the world from top to bottom, one string per row as in a level file, with the mouse
  where the episode starts;
- ``maze_dim``, and ``level_facing``, the facing at the start of the episode;
- ``facing`` and ``memory`` of the field;
- ``moved_layers``: the layer of each patch (p,);
- ``moved``: for each patch, the number of frames on which it acted, and the mean sizes ``in_std``,
  ``norm`` and ``relative`` of its change (p, 4).

Levels can be divided among shards. Each shard writes its fields; tables, figures and settings are
written when the shards are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from agents.hooks import ChangeSize, patched
from agents.networks import Policy
from agents.patch import Patch
from common.devices import Compute
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.progress import with_progress
from common.results import Array, Entry, File, Json, Npz, ResultStore, Schema, Table
from common.shards import first_difference
from envs.maze.grid import Grid, kind_of
from envs.maze.state import MazeState
from maze.field.fields import MEMORIES, NO_MEMORY, Field, difference, vector_field
from maze.field.outcomes import AT_DECISION, EXACT, OF_CHANGE, OF_FIELD, outcomes

Fields = tuple[Field, ...]
"""Fields of one level, one per facing."""
UNPATCHED = "unpatched"  # the condition without patches
OUTCOMES = (*AT_DECISION, *OF_FIELD, *EXACT, *OF_CHANGE)
_COLUMNS = {"condition": str, "level": str, "seed": int, "maze_dim": int, "kind": str,
            "squares": int, **dict.fromkeys((*OUTCOMES, "facing_variation"), float)}
_SIZES = ("in_std", "norm", "relative")  # sizes in a ChangeSize
FIELDS_FILES = Schema(
    "fields", "python -m maze.fields", items={
        "patches": Entry("{}/patches.json", Json()),
        "field": Entry("{}/field_{}.npz", Npz({
            "squares": Array(np.int16, "N 2"),
            "log_probs": Array(np.float32, f"N {NUM_ACTIONS}", finite=False),
            "probs": Array(np.float32, "N 5"), "values": Array(np.float32, "N"),
            "rows": Array(np.str_, "R"), "maze_dim": Array(np.int64),
            "level_facing": Array(np.int64), "facing": Array(np.int64), "memory": Array(np.str_),
            "moved_layers": Array(np.str_, "P"),
            "moved": Array(np.float64, "P 4", finite=False)})),
        "field_figure": Entry("{}/field_{}.png", File()),
        "maps_figure": Entry("{}/maps_{}.png", File()),
        "film": Entry("films/{}_{}.mp4", File()), "stills": Entry("films/{}_{}.png", File())},
    results={
        "moved": Entry("moved.csv", Table({
            "condition": str, "patch": int, "layer": str, "pictures": int,
            **dict.fromkeys(_SIZES, float)})),
        "differences": Entry("differences.csv", Table(_COLUMNS, whole=True))})


def write_field(store: ResultStore, condition: str, key: str, field: Field,
                moved: Sequence[ChangeSize] = ()) -> None:
    """Write a field, and the sizes of the changes that the patches made.

    Args:
        key: name of the level, followed by ``_facing_1`` for a second facing.
        moved: size of each patch's change, from ``ActivePatches.changes``.
    """
    grid = field.grid
    sizes = [[size.pictures, *(getattr(size, name) for name in _SIZES)] for size in moved]
    store.write("field", condition, key, value={
        "squares": field.squares - grid.margin, "log_probs": field.log_probs,
        "probs": field.probs, "values": field.values, "rows": np.array(grid.to_rows()),
        "maze_dim": grid.maze_dim, "level_facing": grid.facing, "facing": field.facing,
        "memory": field.memory,
        "moved_layers": np.array([size.layer for size in moved], np.str_),
        "moved": np.array(sizes, np.float64).reshape(-1, 1 + len(_SIZES))})


def read_field(store: ResultStore, condition: str, key: str) -> tuple[Field, list[ChangeSize]]:
    """Read a field and the size of each patch's change; arguments as for :func:`write_field`.

    Raises:
        UserError: if the file is missing or damaged.
    """
    arrays = store.read("field", condition, key)
    try:
        grid = Grid.from_rows([str(row) for row in arrays["rows"]], int(arrays["maze_dim"]),
                              int(arrays["level_facing"]))
        field = Field(grid, arrays["squares"].astype(np.int64) + grid.margin,
                      arrays["log_probs"], arrays["values"], int(arrays["facing"]),
                      str(arrays["memory"]))
        squares = {tuple(square) for square in field.squares.tolist()}
        if (field.facing not in (0, 1) or field.memory not in (NO_MEMORY, *MEMORIES)
                or np.isnan(field.log_probs).any()
                or len(squares.intersection(grid.squares(without_cheese=True)))
                != len(field.squares)):
            raise UserError("its arrays are inconsistent")
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"the field {store.file_of('field', condition, key)} is damaged: {error}"
                        ) from None
    moved = [ChangeSize(str(layer), int(pictures), *sizes) for layer, (pictures, *sizes) in zip(
        arrays["moved_layers"], arrays["moved"].tolist(), strict=True)]
    return field, moved


def add_condition(store: ResultStore, condition: str, patches: dict) -> None:
    """Record the patches of a condition before its fields are written.

    Args:
        patches: metadata of the patches, ``OpenedPatches.metadata``.

    Raises:
        UserError: if the folder has a condition of this name with other patches.
    """
    if first_difference(store.compute("patches", condition, function=lambda: patches), patches, ()):
        raise UserError(f"{store.path / condition} holds fields with other patches; give the "
                        "condition another name, choose another --output_dir, or give --overwrite")


@dataclasses.dataclass(frozen=True)
class FieldOptions:
    """Agent and options for computing fields.

    Attributes:
        policy, compute, memory: as in ``vector_field``.
        facings: facings of the mouse; a field is computed for each.
    """

    policy: Policy
    compute: Compute
    facings: tuple[int, ...]
    memory: str

    def field(self, state: MazeState, facing: int | None = None) -> Field:
        """Compute the field of a level with a facing; by default with the first of ``facings``."""
        return vector_field(self.policy, self.compute, state, memory=self.memory,
                            facing=self.facings[0] if facing is None else facing)


def fields_of_condition(store: ResultStore, condition: str, patches: Sequence[Patch],
                        levels: Mapping[str, MazeState], options: FieldOptions,
                        std: Mapping[str, Tensor]) -> tuple[dict[str, Fields], list[dict]]:
    """Return the fields of a condition by level; missing fields are computed and written.

    Args:
        levels: levels by name.
        std: standard deviations of the units of the patched layers, by layer, in which the size
            ``in_std`` of a change is measured.

    Returns:
        The fields, and the sizes of the patches' changes for :func:`moved_table`.

    Raises:
        UserError: if a field in the folder is damaged or belongs to another level of the same name.
    """
    fields, moved = {}, []
    for name, state in with_progress(levels.items(), len(levels), "level"):
        sides = []
        for facing in options.facings:
            key = f"{name}_facing_{facing}" if facing and len(options.facings) > 1 else name
            if not store.has("field", condition, key):
                with patched(options.policy, patches, std) as scope:
                    field = options.field(state, facing)
                write_field(store, condition, key, field, scope.changes())
            field, sizes = read_field(store, condition, key)
            if field.grid.to_rows() != state.grid.to_rows():
                raise UserError(f"{store.file_of('field', condition, key)} belongs to another "
                                f"level than the requested level with seed {state.level_seed}; "
                                "choose another --output_dir, or give --overwrite")
            sides.append(field)
            moved += [{"condition": condition, "patch": number, **dataclasses.asdict(size)}
                      for number, size in enumerate(sizes)]
        fields[name] = tuple(sides)
    return fields, moved


def moved_table(moved: Sequence[Mapping]) -> pd.DataFrame:
    """Return the table ``moved.csv``, with a row per condition, patch and layer: the number of
    frames on which the patch acted, and the mean sizes of its change over these frames.

    Args:
        moved: sizes of changes, from :func:`fields_of_condition`.
    """
    keys = ["condition", "patch", "layer"]
    table = pd.DataFrame(moved, columns=[*keys, "pictures", *_SIZES])
    weighted = table.assign(**{name: table[name] * table["pictures"] for name in _SIZES})
    sums = weighted.groupby(keys, sort=False, as_index=False).sum()
    sums[[*_SIZES]] = sums[[*_SIZES]].div(sums["pictures"].clip(lower=1), axis=0)
    return sums


def outcome_table(fields: Mapping[str, Mapping[str, Fields]], levels: Mapping[str, MazeState],
                  region: int) -> pd.DataFrame:
    """Compute the outcomes of all fields.

    Args:
        fields: fields by condition and level, including the condition UNPATCHED.
        levels: levels by name.
        region: number of rows and columns of the top right region.

    Returns:
        A row per condition and level: ``condition``, ``level`` (name of the level), ``seed``,
        ``maze_dim``, ``kind`` (kind of the level), ``squares`` (number of squares), OUTCOMES, and
        ``facing_variation``, the mean total variation between the fields of both facings, or NaN
        if only one was computed.
    """
    rows = []
    for condition, by_level in fields.items():
        for name, sides in by_level.items():
            state = levels[name]
            unpatched = None if condition == UNPATCHED else fields[UNPATCHED][name][0]
            rows.append({
                "condition": condition, "level": name, "seed": state.level_seed,
                "maze_dim": state.grid.maze_dim, "kind": kind_of(state.grid),
                "squares": len(sides[0].squares),
                **outcomes(sides[0], unpatched,
                           sides[1] if len(sides) > 1 and sides[0].memory == NO_MEMORY else None,
                           region, state.timeout - state.time),
                "facing_variation": difference(*sides).mean_total_variation
                if len(sides) > 1 else np.nan})
    return pd.DataFrame(rows)
