"""Files of the dream page: data format and writer.

Layout::

    index.html, dream.js, dream.css     the page, as `make web` built it
    settings.json                       settings that the folder was written with
    data/manifest.js                    plain JSON, see below
    data/programs.js                    programs by name, see ``generative.dream_programs``
    data/worlds.js                      programs that change worlds; missing if nothing lies beyond
                                        the view
    data/start_000.js                   arrays of a start: h, action (A,), hidden and, with a world,
                                        squares, places, velocities, looks, corner and clock (see
                                        ``squares.World``), known, frames and displacements (see
                                        ``PageStart``); if it is recorded, also truth, an image of
                                        TILES frames per row

Data files are scripts (see ``common/page_files.py``). A program consists of its description (see
``common.traced.Program``) and its constants by number. ``manifest`` contains

- ``format``: version of the data format;
- ``agent``, ``simulator``, ``game``: names;
- ``actions``, ``directions``: name and direction of each action;
- ``starts``: for each start seed; if it is recorded, episode, frame, level, actions, values and end
  of what followed, see ``dream_starts.Truth``; if it is optimised, aim, target and step, see
  ``dream_starts.Aim``;
- ``previews``: image of the first frames of all starts, TILES per row;
- ``axes``: directions of the hidden state, [{"kind", "name", "vector" (D,), "mean", "sd"}], see
  ``Axis``;
- ``world``: null, or settings with which the page samples squares, see ``_world_settings``.

``web/dream/lib/data.js`` reads these files.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from common.game_constants import ACTION_DIRECTIONS
from common.page_files import PageFolder, data_script, packed
from common.traced import Program
from envs.objects import action_labels
from generative.camera import FASTEST
from generative.dream_programs import WORLD_FIELDS
from generative.dream_starts import PageStart
from generative.prior import BORDER_MARGIN, MANY_LOOKS, TURNS
from generative.prior_networks import EMBEDDING, LAST_SHARPNESS
from generative.simulator import Simulator
from generative.sprites import AFTER_TURN, CLOCK_PERIOD

FORMAT = 3  # version that web/dream/lib/data.js reads
TILES = 10  # frames per row of an image of frames
READOUT, COMPONENT, PROBE, FEATURE = "readout", "component", "probe", "feature"  # kinds of axes


class DreamPageFolder(PageFolder):
    """Folder of a dream page."""

    PAGE = "dream"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A direction of the hidden state.

    Attributes:
        kind: READOUT, COMPONENT, PROBE or FEATURE.
        vector: direction of length 1 (D,).
        mean, sd: mean and standard deviation of recorded hidden states along it; of imagined ones
            if there is no recording.
    """

    kind: str
    name: str
    vector: np.ndarray
    mean: float
    sd: float


def write_page(folder: DreamPageFolder, names: dict[str, str], simulator: Simulator,
               programs: dict[str, Program], changing: dict[str, Program],
               starts: Sequence[PageStart], previews: np.ndarray, axes: Sequence[Axis]) -> None:
    """Write the page and its data into an existing folder.

    Args:
        names: names of ``agent``, ``simulator`` and ``game``.
        programs, changing: programs by name, see ``generative.dream_programs``; the latter change
            worlds.
        previews: first frames of all starts, uint8 (N, 64, 64, 3).
    """
    folder.copy_page()

    def write(name: str, content: dict) -> None:
        path = folder.data_file(name)
        path.write_bytes(data_script(path, content))

    write("manifest", {
        "format": FORMAT, **names, "actions": action_labels(names["game"]),
        "directions": ACTION_DIRECTIONS,
        "starts": [_described(start) for start in starts], "previews": frames_image(previews),
        "axes": [{**dataclasses.asdict(axis), "vector": axis.vector.astype(float).tolist()}
                 for axis in axes],
        "world": _world_settings(simulator) if changing else None})
    write("programs", {name: _program(program) for name, program in programs.items()})
    if changing:
        write("worlds", {name: _program(program) for name, program in changing.items()})
    for number, start in enumerate(starts):
        write(f"start_{number:03d}", {
            "arrays": packed(**_arrays(start)),
            "truth": None if start.truth is None else frames_image(start.truth.frames)})


def frames_image(frames: np.ndarray) -> str:
    """Return frames, uint8 (N, 64, 64, 3), as a URL of an image with TILES frames per row."""
    rows = -(-len(frames) // TILES)
    filled = np.zeros((rows * TILES, *frames.shape[1:]), np.uint8)
    filled[:len(frames)] = frames
    height, width = frames.shape[1:3]
    tiles = filled.reshape(rows, TILES, height, width, 3).swapaxes(1, 2)
    stream = io.BytesIO()
    Image.fromarray(tiles.reshape(rows * height, TILES * width, 3)).save(
        stream, "WEBP", lossless=True)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _program(program: Program) -> dict:
    return {**program.description(), "constants": packed(**{
        str(number): array for number, array in program.constants.items()})}


def _described(start: PageStart) -> dict:
    found: dict[str, object] = {"seed": start.seed}
    truth = start.truth
    if start.aim is not None:
        found |= dataclasses.asdict(start.aim)
    if truth is not None:
        found |= {"episode": truth.episode, "frame": truth.frame, "level": truth.level,
                  "actions": truth.actions.tolist(), "values": truth.values.tolist(),
                  "end": truth.end}
    return found


def _arrays(start: PageStart) -> dict[str, np.ndarray]:
    """Return the arrays of a start; float16 where that is exact."""
    first, world = start.start, start.start.world
    arrays = {"h": first.env_h, "action": first.action, "hidden": first.agent_hidden}
    if world is not None:
        arrays |= {name: getattr(world, name) for name in WORLD_FIELDS}
        arrays["known"] = torch.from_numpy(start.known)[None]
    found: dict[str, np.ndarray] = {}
    if start.frames is not None:
        found["frames"] = start.frames
        arrays["displacements"] = torch.from_numpy(start.displacements)[None]
    for name, tensor in arrays.items():
        array = tensor[0].numpy().astype(np.float32)
        half = array.astype(np.float16)
        found[name] = half if np.array_equal(half, array) else array
    return found


def _world_settings(simulator: Simulator) -> dict:
    """Return the settings of worlds: numbers of squares per side and of channels of their noise,
    their size in pixels, and the constants of ``generative.prior``."""
    assert simulator.squares is not None
    prior = simulator.prior
    return {
        "squares": prior.worlds.num_squares, "channels": EMBEDDING,
        "size": simulator.squares.pixels_per_square, "margin": BORDER_MARGIN, "fastest": FASTEST,
        "times": prior.world_times.tolist(), "sharpness": LAST_SHARPNESS, "looks": MANY_LOOKS,
        "turns": TURNS, "kept": AFTER_TURN, "period": CLOCK_PERIOD,
        "empty": simulator.squares.empty_class, "frames": simulator.config.num_init_steps}
