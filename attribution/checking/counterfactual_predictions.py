"""Predictions of the effects of objects from counterfactual maps, which know no exact objects.

A counterfactual map holds, for every block of cells of the view, the mean effect of fillings of the
block by the prior; see ``generative.counterfactual``. The prediction for an object is the mean of
the map over the blocks that the box around the object's visible pixels touches. The simulations are
otherwise those of ``effect_predictions``: recorded hidden states and actions, worlds rendered by
the game. *Sampled world*: the squares in view are read off the last initial frame, and the prior
samples the others, so that nothing comes from the level state.

Baselines show the same blocks in black instead: *emptied*, in the same simulations, frames and
world; and the *frame repeated*, to the agent alone.

Letters in shape comments: see ``effect_predictions``; R rows, each a hole of a pair with one
filling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agents.networks import to_images
from agents.outputs import Output
from attribution.checking.effect_predictions import (
    FRAMES_PER_BATCH,
    Scene,
    frame_repeated,
    read_outputs,
    read_world,
    world_seed,
)
from common.devices import Compute
from generative.camera import PATCH
from generative.counterfactual import blocks_of_cells, filled_starts
from generative.networks import LatentSampler
from generative.simulator import Simulator, Start
from generative.start_worlds import sampled_world, world_seeds

SIZES = {2: "2 x 2 cells", 1: "single cells"}  # of blocks
FILLINGS = 4  # of each block
COUNTERFACTUAL = tuple(f"simulator: counterfactual, {name}" for name in SIZES.values())
EMPTIED = tuple(f"simulator: {name} emptied" for name in SIZES.values())
SAMPLED = tuple(f"{name[0]}, sampled world" for name in (COUNTERFACTUAL, EMPTIED))
BLACK = tuple(f"pixels: {name} in black, frame repeated" for name in SIZES.values())
COUNTERFACTUAL_METHODS = (*COUNTERFACTUAL, *EMPTIED, *SAMPLED, *BLACK)
_MODE = LatentSampler("mode")
_ROWS_PER_BATCH = 32


def touched_blocks(mask: np.ndarray, size: int) -> np.ndarray:
    """Return the numbers of the blocks of ``size`` x ``size`` cells that the box around a mask,
    bool (64, 64), touches; see ``blocks_of_cells``."""
    ranges = []
    for axis in (1, 0):
        places = np.flatnonzero(mask.any(axis=axis)) // (PATCH * size)
        ranges.append(np.arange(places[0], places[-1] + 1))
    return (ranges[0][:, None] * (mask.shape[1] // (PATCH * size)) + ranges[1]).ravel()


@torch.no_grad()
def counterfactual_predictions(simulator: Simulator, compute: Compute, outputs: Sequence[Output],
                               lags: Sequence[int], scene: Scene) -> np.ndarray:
    """Predict effects by filling the blocks that objects touch.

    Args:
        simulator: the simulator with its agent; it needs worlds and a trained prior.
        compute, outputs, lags, scene: see ``simulator_predictions``.

    Returns:
        Predictions of COUNTERFACTUAL_METHODS, float64 (M, J, L, N).
    """
    replays, device = scene.replays, compute.device
    images = to_images(torch.from_numpy(replays.initial).flatten(0, 1).to(device),
                       False).unflatten(0, replays.initial.shape[:2])
    result = {name: np.zeros((len(outputs), len(lags), len(scene.pairs)))
              for name in COUNTERFACTUAL_METHODS}
    holes = {size: [(pair, block) for pair, mask in enumerate(replays.masks[-1])
                    for block in touched_blocks(mask, size)] for size in SIZES}
    for number, size in enumerate(SIZES):
        every = np.array(holes[size])
        result[BLACK[number]] = mean_of_pairs(_blackened(
            simulator, compute, outputs, lags, scene, images[-1], every, size), every[:, 0])
    for begin in range(0, len(scene.pairs), FRAMES_PER_BATCH):
        chosen = np.arange(begin, min(begin + FRAMES_PER_BATCH, len(scene.pairs)))
        batch = _Fillings(simulator, compute, outputs, lags, scene, chosen, images[:, chosen])
        for number, size in enumerate(SIZES):
            own = [(pair - begin, block) for pair, block in holes[size] if pair in chosen]
            runs = [(COUNTERFACTUAL[number], batch.rendered, FILLINGS),
                    (EMPTIED[number], batch.rendered, 0)]
            if not number:
                runs += [(SAMPLED[0], batch.sampled, FILLINGS), (SAMPLED[1], batch.sampled, 0)]
            for name, start, fillings in runs:
                effects = batch.effects(start, np.array(own), size, fillings)
                result[name][..., chosen] = mean_of_pairs(effects, np.array(own)[:, 0])
    return np.stack([result[name] for name in COUNTERFACTUAL_METHODS])


def mean_of_pairs(effects: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Average effects (J, L, R) over the rows of each pair (R,), as (J, L, N)."""
    of_pair = pairs == np.unique(pairs)[:, None]  # (N, R)
    return effects @ (of_pair / of_pair.sum(axis=1, keepdims=True)).T


def _blackened(simulator: Simulator, compute: Compute, outputs: Sequence[Output],
               lags: Sequence[int], scene: Scene, images: Tensor, holes: np.ndarray, size: int
               ) -> np.ndarray:
    """Return the effects (J, L, R) of blocks in black on the agent alone; see
    ``_Fillings.effects`` for the holes."""
    pairs, blocks = holes.T
    replays = dataclasses.replace(scene.replays, entering=scene.replays.entering[pairs],
                                  actions=scene.replays.actions[:, pairs])
    masks = blocks_of_cells(size)[torch.from_numpy(blocks)].repeat_interleave(
        PATCH, dim=1).repeat_interleave(PATCH, dim=2)
    return frame_repeated(simulator.agent.policy, compute, images[pairs], masks, outputs, lags,
                          replays)


class _Fillings:
    """Simulations of B pairs with filled blocks.

    Args:
        simulator, compute, outputs, lags, scene: see ``simulator_predictions``.
        chosen: indices of the pairs (B,).
        images: their initial frames (I, B, C, H, W).

    Attributes:
        rendered, sampled: starts in rendered and in sampled worlds (B rows).
    """

    def __init__(self, simulator: Simulator, compute: Compute, outputs: Sequence[Output],
                 lags: Sequence[int], scene: Scene, chosen: np.ndarray, images: Tensor):
        self._simulator, self._compute, self._outputs = simulator, compute, outputs
        self._lags, self._images = lags, images
        self._pairs = [scene.pairs[number] for number in chosen]
        self._actions = torch.from_numpy(scene.replays.actions[:, chosen]).to(compute.device)
        hidden = torch.from_numpy(scene.replays.entering[chosen]).to(compute.device)
        with compute.autocast():
            vectors = simulator.encode(images).float()
            seeds = torch.tensor([world_seed(pair) for pair in self._pairs])
            self.rendered, self.sampled = (dataclasses.replace(
                simulator.start_from(vectors, _MODE, world=world), agent_hidden=hidden)
                for world in (read_world(simulator, scene, scene.worlds, chosen, vectors),
                              sampled_world(simulator, vectors, images[-1], seeds)))

    def effects(self, start: Start, holes: np.ndarray, size: int, fillings: int) -> np.ndarray:
        """Compute the mean effects of fillings (J, L, R).

        Args:
            start: one of the attributes.
            holes: number of the pair and of the block of each hole (R, 2).
            size: size of the blocks.
            fillings: number of fillings of each hole; 0 to empty it.
        """
        before = self._simulate(start, np.arange(len(self._pairs)))
        rows = np.repeat(holes, max(fillings, 1), axis=0)
        seeds = world_seeds([
            (self._pairs[pair].episode, self._pairs[pair].row, size, block, number % fillings)
            for number, (pair, block) in enumerate(rows.tolist())]) if fillings else None
        cells = blocks_of_cells(size)[torch.from_numpy(rows[:, 1])].to(self._compute.device)
        parts = []
        for begin in range(0, len(rows), _ROWS_PER_BATCH):
            part = slice(begin, begin + _ROWS_PER_BATCH)
            of_pair = rows[part, 0]
            with self._compute.autocast():
                filled = filled_starts(self._simulator, self._images, start,
                                       torch.from_numpy(of_pair).to(self._compute.device),
                                       cells[part], None if seeds is None else seeds[part])
            parts.append(self._simulate(filled, of_pair) - before[..., of_pair])
        effects = np.concatenate(parts, axis=-1)
        return effects.reshape(*effects.shape[:2], len(holes), -1).mean(axis=-1)

    def _simulate(self, start: Start, pairs: np.ndarray) -> np.ndarray:
        """Simulate with the recorded actions of pairs (R,), and return the outputs (J, L, R)."""
        actions = self._actions[:, torch.from_numpy(pairs).to(self._actions.device)]
        num_steps = max(self._lags) + 1
        with self._compute.autocast():
            steps = self._simulator.imagine(start, _MODE, num_steps,
                                            true_actions=actions[:num_steps])
        return read_outputs(steps, actions[1:], self._outputs, self._lags).double().cpu().numpy()
