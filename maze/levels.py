"""Mazes chosen by seed, by property or from files, edited, and written to level files."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw, ImageFont

from common.errors import UserError
from common.files import versions
from common.options import LogOptions, command, option
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table
from common.video import write_strip
from envs.maze.grid import FEATURES, fork_features
from envs.maze.levels import digest, load_text, save_levels
from envs.maze.state import MazeState, check_seeds, draw
from maze.options import EditOptions, MazeOptions

LEVEL_FILES = Schema(
    "levels", "python -m maze.levels", items={"level": Entry("level_{}.json", File())},
    results={"table": Entry("levels.csv", Table()), "picture": Entry("levels.png", File())})
MAX_PICTURES = 100  # maximum number of images in the contact sheet
_PICTURE_SIZE = 256  # pixels
_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelsOptions(EditOptions, MazeOptions, LogOptions):
    """Choose mazes by seed, by property or from files, edit them, and write them to level files."""

    text: Path | None = option(
        None, "text file with a maze, one line per row: # wall, . free, C cheese, M mouse",
        metavar="FILE")
    fields: bool = option(False, "print every field of the states by name, and write nothing")
    dry_run: bool = option(False, "print the levels, and write nothing")
    view: str = option(
        "person", "images in the contact sheet: the large images that people play with, or the "
                  "64 x 64 pixels that an agent sees", choices=("person", "agent"))
    output_dir: Path = option(Path("analysis/maze/levels"),
                              "folder for the level files, levels.csv and levels.png")
    overwrite: bool = option(False, "delete the previous contents of the output folder")


def row_of(state: MazeState) -> dict[str, object]:
    """Return a level's row of ``levels.csv`` by column, with squares in world coordinates.

    Columns that are undefined for the level are omitted. Kind and cheese are defined if there is
    exactly one cheese, and cheese and corner can be reached from the start. The decision square and
    the features are defined for forks only.
    """
    grid = state.grid
    row = {"level_seed": state.level_seed, "distribution_mode": state.distribution_mode,
           "maze_dim": grid.maze_dim}
    with contextlib.suppress(UserError):
        row |= {"kind": grid.kind(), "cheese_row": grid.cheese.row,
                "cheese_column": grid.cheese.column}
        decision = grid.decision_square()  # raises unless the level is a fork
        row |= {"decision_row": decision.row, "decision_column": decision.column,
                **fork_features(grid)}
    return {**row, "not_as_in_training": "; ".join(grid.departures_from_training())}


def table_of(states: list[MazeState]) -> pd.DataFrame:
    """Return the table ``levels.csv`` of all levels; rows and columns of squares are nullable
    integers."""
    columns = ("level_seed", "distribution_mode", "maze_dim", "kind", "cheese_row",
               "cheese_column", "decision_row", "decision_column", *FEATURES, "not_as_in_training")
    table = pd.DataFrame([row_of(state) for state in states], columns=columns)
    places = [name for name in columns if name.endswith(("_row", "_column"))]
    return table.astype(dict.fromkeys(places, "Int64"))


def print_fields(state: MazeState) -> None:
    """Print every field of a state by name, long fields abbreviated, and the maze."""
    print(f"level {state.level_seed}, {len(state.to_bytes())} bytes")
    for name, value in state.fields().items():
        print(f"  {name}: {textwrap.shorten(str(value), 80)}")
    print("\n".join(state.grid.to_rows()))


def labelled(state: MazeState, person_view: bool) -> np.ndarray:
    """Render a level with its seed as a label, uint8 (256, 256, 3).

    Args:
        person_view: whether to render the person view, the large image that people play with,
            instead of the agent's frame.
    """
    picture = Image.fromarray(draw([state], person_view)[0])
    picture = picture.resize((_PICTURE_SIZE, _PICTURE_SIZE), Image.Resampling.BOX if person_view
                             else Image.Resampling.NEAREST)
    pen, text = ImageDraw.Draw(picture), f"{state.level_seed}"
    font = ImageFont.load_default(18)
    pen.rectangle(pen.textbbox((4, 2), text, font=font), fill=(0, 0, 0))
    pen.text((4, 2), text, fill=(255, 255, 255), font=font)
    return np.asarray(picture)


def write(folder: Path, states: list[MazeState], person_view: bool, overwrite: bool) -> None:
    """Write level files, table and contact sheet.

    Args:
        person_view: whether the contact sheet shows person views instead of the agent's frames.

    Raises:
        UserError: if the folder holds other levels, or two levels have the same seed.
    """
    check_seeds(states)
    store = ResultStore(folder, LEVEL_FILES)
    store.open({"kind": "levels of maze", "num_levels": len(states),
                "levels_sha256": digest(states), "versions": versions()}, overwrite)
    for state in with_progress(states, len(states), "level"):
        save_levels(store.file_of("level", state.level_seed), [state])
    store.write("table", value=table_of(states))
    pictures = [labelled(state, person_view) for state in states[:MAX_PICTURES]]
    write_strip(store.file_of("picture"), [pictures[begin:begin + _IN_A_ROW] for begin in range(
        0, len(pictures), _IN_A_ROW)], _PICTURE_SIZE)
    print(f"wrote {len(states)} levels to {folder}")


def edit_levels(options: LevelsOptions) -> list[MazeState]:
    """Choose and edit levels, print or write them, and return them."""
    if options.text and options.levels:
        raise UserError("--text and --levels exclude each other")
    chosen = ([load_text(options.text, options.distribution_mode, options.use_backgrounds)]
              if options.text else options.choose_levels())
    states = [options.edit(state) for state in chosen]
    if options.fields:
        for state in states:
            print_fields(state)
    elif options.dry_run:
        print(table_of(states).iloc[:, :8].to_string(index=False, na_rep="-"))
    else:
        write(options.output_dir, states, options.view == "person", options.overwrite)
    return states


main = command(LevelsOptions, edit_levels)

if __name__ == "__main__":
    raise SystemExit(main())
