r"""How much of a world is left after it is rebuilt in the real game?

    python -m benchmarks.rebuild --agent_file <agent> --model_file <simulator> \
        --data_dir <recording>/data

For frames of a recording with level seeds: squares and objects of the game's own worlds that are
right after the round trip; and, for worlds that the prior samples around the frames, the similarity
of the game's render to the imagined view.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import numpy as np
import torch

from agents.frames import as_images
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import Parser
from common.devices import Compute
from common.errors import UserError, script_main
from envs.level_state import LevelState
from envs.objects import moving_objects
from envs.procgen_env import StateView
from envs.rebuild import keys_of
from envs.wide_view import WorldView
from generative.config import SimulatorConfig
from generative.rebuilding import Rebuilder
from generative.rendered_worlds import RenderedWorlds, world_of_images
from generative.runs import open_simulator
from generative.squares import World
from generative.start_worlds import sampled_world, world_seeds
from generative.world_contents import draw_worlds

CPU = Compute(torch.device("cpu"), bfloat16=False)
_NEAR = 0.2  # squares by which the place of an object may differ


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--agent_file", type=Path, required=True)
    flags.add_argument("--model_file", type=Path, required=True)
    flags.add_argument("--data_dir", type=Path, required=True)
    flags.add_argument("--num_frames", type=int, default=200)
    return flags


def objects_near(state: LevelState, num: int) -> list[tuple]:
    """Return kind, place relative to the player, and theme of the objects within the world."""
    x, y = float(state.player["x"]), float(state.player["y"])
    return [(thing.kind, thing.image_theme, thing.x - x, thing.y - y)
            for thing in moving_objects(state)
            if max(abs(np.floor(thing.x) - np.floor(x)), abs(np.floor(thing.y) - np.floor(y)))
            <= num // 2]


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    """Return the PSNR of two frames in dB, at most 50, without the player in the middle."""
    error = np.square(first.astype(float) - second) / 255 ** 2
    error[24:40, 24:40] = np.nan
    return float(-10 * np.log10(max(np.nanmean(error), 1e-5)))


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    simulator = open_simulator(args.model_file, args.agent_file, SimulatorConfig(), CPU)
    folder = RolloutFolder(args.data_dir)
    game, num = recorded_game(folder), simulator.config.world_squares
    assert simulator.squares is not None and num is not None
    rebuilder, shown = Rebuilder(simulator, game), StateView(game)
    init = simulator.config.num_init_steps
    rng = np.random.default_rng(0)
    right, total, found, objects, extra = 0, 0, 0, 0, 0
    similar: dict[str, list[float]] = {"recorded": [], "sampled": []}
    refused = 0
    with contextlib.closing(WorldView(game)) as view:
        for episode in folder.finished()[:args.num_frames]:
            length = len(folder.steps(episode))
            if length <= init:
                continue
            row = int(rng.integers(init - 1, length - 1))
            [(_, state)] = level_states(folder, episode, [row])
            frames = folder.array_files(episode).frames.rows(row - init + 1, row + 1)
            images = as_images(frames, 1)[:, None]
            vectors, seeds = simulator.encode(images), world_seeds([(7, episode)])
            true = world_of_images(simulator, vectors,
                                   RenderedWorlds.of_states(view, [state], [row]),
                                   game.env_name, seeds)
            sampled: World = sampled_world(simulator, vectors, images[-1], seeds)
            built = rebuilder.build(true, state).state
            same = keys_of(state, num) == keys_of(built, num)
            right, total = right + int(same.sum()), total + same.size
            before, after = objects_near(state, num), objects_near(built, num)
            found += sum(any(thing[:2] == other[:2] and abs(thing[2] - other[2]) < _NEAR
                             and abs(thing[3] - other[3]) < _NEAR for other in after)
                         for thing in before)
            objects, extra = objects + len(before), extra + len(after)
            similar["recorded"].append(psnr(shown.draw(state), shown.draw(built)))
            try:
                again = rebuilder.build(sampled, state).state
            except UserError:
                refused += 1
                continue
            imagined = draw_worlds(simulator.squares, sampled, 64)[0]
            similar["sampled"].append(psnr(imagined, shown.draw(again)))
    print(f"{len(similar['recorded'])} frames: {100 * right / total:.2f} % of {total} squares and "
          f"{found} of {objects} objects are right ({extra} are built)")
    for name, values in similar.items():
        print(f"{name}: PSNR of the view {np.median(values):.1f} dB (median), {min(values):.1f} "
              "(lowest)")
    print(f"{refused} sampled worlds cannot be rebuilt")


if __name__ == "__main__":
    raise SystemExit(main())
