"""What lies beyond a recorded view: worlds generated there from noise, and what the agent does.

All worlds of a view share the recorded frames, the state of the agent, and the squares in view, so
whatever differs in their simulations is caused by squares that the agent has not seen. Worlds that
move on draw what lies beyond them from the same seed, so simulations are deterministic.

Letters in shape comments: B worlds, T steps, n squares per side of a world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from agents.frames import to_frames
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.game_constants import ACTION_DIRECTIONS, FRAME_SIZE
from generative.batches import divide
from generative.dataset import WindowPlace
from generative.networks import LatentSampler
from generative.prior import camera_globals
from generative.simulator import Simulator, Start
from generative.spatial import split_state
from generative.squares import World
from generative.start_optimisation.prior_starts import TIMES
from generative.start_worlds import read_places, recorded_starts
from generative.world_tables import event_probability

DEATH, TURN, VALUE = AIMS = ("death", "turn", "value")
TURN_STEPS = 4  # steps over which the horizontal direction is averaged
PERSISTS = 0.8  # share of an effect that is left when squares are put back
OCCURS = 0.5  # share of an effect from which it counts as the same effect
_MODE = LatentSampler("mode")
_MARGIN = 0.5  # squares between the view and what is generated, so that no object reaches into it
_PARENTS, _CHILDREN = 4, 12  # of the evolution strategy
_LARGEST_REDRAWN = 9  # squares per side of a rectangle whose noise is redrawn
_BLOCK = 3  # squares per side of the blocks that are put back together
_MOST_PARTS = 48  # parts of a change that are tried one by one, at most


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What the agent does in simulations of B worlds; step 0 shows the recorded frame.

    Attributes:
        values: the agent's values (T, B).
        right: expected horizontal direction of the action, from -1 for left to 1 (T, B).
        alive: probability that the episode has not ended (T, B).
        death: probability that the episode has ended by a death (T, B).
        moved: displacement of the camera since step 0, pixels to the right and down (T, B, 2).
    """

    values: np.ndarray
    right: np.ndarray
    alive: np.ndarray
    death: np.ndarray
    moved: np.ndarray

    def __getitem__(self, rows) -> Rollouts:
        """Select worlds."""
        return Rollouts(*(array[:, rows] for array in vars(self).values()))


def effects(aim: str, changed: Rollouts, plausible: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Compute the effects of worlds.

    - ``death``: change of the probability of a death within the simulation.
    - ``turn``: largest change, over time, of the expected horizontal direction of the action,
      averaged over TURN_STEPS steps, in [-2, 2].
    - ``value``: largest change of the value at any step.

    Changes of direction and value are multiplied by the probabilities that the agent is alive in
    either world, because nothing can be compared after the end of an episode.

    Args:
        changed: simulations of B worlds.
        plausible: simulation of the world that they are compared with (1 world).

    Returns:
        Signed effects (B,), and the steps from which they are read, int64 (B,).
    """
    if aim == DEATH:
        change = changed.death[-1] - plausible.death[-1]
        return change, np.full(len(change), len(changed.death) - 1)
    alive = changed.alive * plausible.alive
    if aim == VALUE:
        change = (changed.values - plausible.values) * alive
    else:
        window = np.ones(TURN_STEPS) / TURN_STEPS
        difference = changed.right - plausible.right
        change = np.stack([np.convolve(row, window, "valid") for row in difference.T], axis=1)
        change = change * alive[TURN_STEPS - 1:]
    step = abs(change).argmax(axis=0)
    return change[step, np.arange(len(step))], step


def strength(aim: str, effect: np.ndarray) -> np.ndarray:
    """Return the size of effects as far as they have the aim: deaths must become more probable."""
    return effect if aim == DEATH else abs(effect)


def has_turned(changed: Rollouts, plausible: Rollouts, step: int) -> np.ndarray:
    """Return whether the horizontal direction, from a step of ``effects`` on, is the opposite one
    in the plausible world, bool (B,)."""
    steps = slice(step, step + TURN_STEPS)
    return changed.right[steps].mean(axis=0) * plausible.right[steps].mean(axis=0) < 0


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """A recorded frame from which the agent plays on in generated worlds.

    Attributes:
        simulator: simulator with a trained prior, on the device of ``compute``.
        images: initial frames in [0, 1] (I, 1, C, 64, 64).
        vectors: their bottleneck vectors (1, V).
        start: start of the simulation, with the recorded state and action of the agent (1 row).
        world: its world, as probabilities; valid where squares are given (1 row).
        given: given squares, bool (n, n): those in view, and a margin of half a square.
        camera: phase and velocity of the camera (1, NUM_GLOBALS).
        num_steps: number of actions that are simulated, so T = ``num_steps`` + 1.
        batch_size: worlds per batch.
    """

    simulator: Simulator
    compute: Compute
    images: Tensor
    vectors: Tensor
    start: Start
    world: World
    given: Tensor
    camera: Tensor
    num_steps: int
    batch_size: int

    @classmethod
    @torch.no_grad()
    def recorded(cls, simulator: Simulator, compute: Compute, folder: RolloutFolder,
                 place: WindowPlace, seed: int, num_steps: int, batch_size: int) -> View:
        """Read a recorded frame and the squares in view.

        Squares in view that are not recognised, such as those behind the player, are what the prior
        generates from noise of zeros.

        Args:
            seed: seed of what lies beyond the worlds.
        """
        frames, hidden, action = read_places(folder, [place], simulator.config.num_init_steps)
        images = frames.to(compute.device).float() / 255
        seeds = torch.tensor([seed], device=compute.device)
        with compute.autocast():
            vectors = simulator.encode(images).float()
            start = recorded_starts(
                simulator, vectors, images[-1], hidden.to(compute.device),
                action.to(compute.device), seeds)
        squares, world = simulator.squares, start.world
        assert squares is not None and world is not None
        size, num = squares.pixels_per_square, world.squares.shape[1]
        _, known = squares.read(images[-1], world.corner, num)
        camera = camera_globals(split_state(start.env_h, simulator.config).camera)
        noise = torch.zeros_like(simulator.prior.place_noise(seeds))
        near = world.corner[0, :, None] + size * torch.arange(num, device=known.device)
        close = (near < FRAME_SIZE + _MARGIN * size) & (near + size > -_MARGIN * size)  # (2, n)
        given = known[0] | (close[1][:, None] & close[0])
        world = simulator.prior.completed(world, known, camera, noise)
        return cls(simulator, compute, images, vectors, start, world, given, camera, num_steps,
                   batch_size)

    @property
    def pixels_per_square(self) -> float:
        assert self.simulator.squares is not None
        return self.simulator.squares.pixels_per_square

    def noise(self, seeds: Tensor) -> Tensor:
        """Draw the noise of random worlds with these seeds (B, E + 2, n, n)."""
        return self.simulator.prior.place_noise(seeds.to(self.compute.device))

    @torch.no_grad()
    def worlds(self, noise: Tensor, base: World | None = None,
               given: np.ndarray | None = None) -> World:
        """Generate worlds with certain classes from noise (B, E + 2, n, n).

        Args:
            base, given: a world (1 row) and squares of it, bool (n, n), that are given in addition
                to those in view; None for no others.
        """
        known, world = self.given, self.world
        if base is not None and given is not None:
            known = known | torch.from_numpy(given).to(known.device)
            world = base.as_probabilities(self.world.squares.shape[-1])
        parts = []
        for rows in noise.split(self.batch_size):
            with self.compute.autocast():
                parts.append(self.simulator.prior.completed(
                    world.repeat(len(rows)), known.expand(len(rows), -1, -1),
                    self.camera.expand(len(rows), -1), rows))
        return certain(joined(parts))

    @torch.no_grad()
    def simulate(self, world: World) -> Rollouts:
        """Let the agent play with its most likely actions in worlds with certain classes."""
        return self._simulated(world, False)[0]

    @torch.no_grad()
    def films(self, world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the frames, uint8 (T, B, H, W, C), the actions that led to them (T, B), and the
        probabilities that the episode has ended, from a simulation in worlds."""
        rollouts, steps = self._simulated(world, True)
        return (np.stack([to_frames(step.images) for step in steps]),
                np.stack([step.actions.argmax(dim=-1).cpu().numpy() for step in steps]),
                1 - rollouts.alive)

    def _simulated(self, world: World, keep: bool) -> tuple[Rollouts, list]:
        directions = torch.tensor([right for right, _ in ACTION_DIRECTIONS], dtype=torch.float32)
        columns: list[tuple[np.ndarray, ...]] = []
        kept: list = []
        for rows in divide(np.arange(len(world.seeds)), self.batch_size):
            start = dataclasses.replace(self.start, world=world[rows], **{
                name: tensor.expand(len(rows), *tensor.shape[1:])
                for name, tensor in vars(self.start).items() if name != "world"})
            with self.compute.autocast():
                steps = self.simulator.imagine(start, _MODE, self.num_steps + 1)
            end, death = (torch.stack(logits).float().sigmoid().cpu().numpy() for logits in (
                [step.terminal_logits for step in steps],
                [step.terminal_logits if step.death_logits is None else
                 step.death_logits.minimum(step.terminal_logits) for step in steps]))
            columns.append((
                torch.stack([step.values for step in steps]).float().cpu().numpy(),
                torch.stack([step.log_probs.float().exp().cpu()[:, :len(directions)] @ directions
                             for step in steps]).numpy(),
                np.cumprod(1 - end.astype(float), axis=0), event_probability(end, death),
                torch.stack([split_state(step.env_h, self.simulator.config).camera.displacement
                             for step in steps]).float().cpu().numpy()))
            if keep:
                kept += steps
        return Rollouts(*(np.concatenate(parts, axis=1) for parts in zip(*columns))), kept

    def seen(self, moved: np.ndarray) -> np.ndarray:
        """Return the squares beyond the view that come into view, bool (B, n, n), if the camera
        moves like this (T, B, 2)."""
        size, corner = self.pixels_per_square, self.world.corner[0].cpu().numpy()
        near = corner[:, None] + size * np.arange(len(self.given))  # (2, n)
        view = moved[..., None]  # (T, B, 2, 1)
        inside = (near + (1 + _MARGIN) * size > view) & (near - _MARGIN * size < view + FRAME_SIZE)
        shown = (inside[:, :, 1, :, None] & inside[:, :, 0, None]).any(axis=0)
        return shown & ~self.given.cpu().numpy()

    def distance(self, squares: np.ndarray) -> np.ndarray:
        """Return the distances (K,) of squares, bool (n, n) with K true ones, from the view's edge
        at the start, in squares: the larger one of both axes."""
        size, corner = self.pixels_per_square, self.world.corner[0].cpu().numpy()
        near = corner[:, None] + size * np.arange(len(squares))  # (2, n)
        gap = np.maximum(np.maximum(near - FRAME_SIZE, -near - size), 0) / size
        return np.maximum(gap[1][:, None], gap[0])[squares]

    @torch.no_grad()
    def losses(self, world: World) -> np.ndarray:
        """Compute the prior loss of worlds (B,): minus the pseudo-log-likelihood per square.

        It is the cross-entropy of the squares beyond the view when the prior denoises them, given
        the view, averaged over the times ``TIMES``. The noise is the same for all worlds. See
        ``start_optimisation.prior_starts``.
        """
        prior, given = self.simulator.prior.worlds, self.given
        fixed = self.noise(torch.zeros(1, dtype=torch.int64))[:, :prior.embedding.shape[1]]
        losses = []
        for rows in divide(np.arange(len(world.seeds)), self.batch_size):
            classes = world.squares[rows]
            squares, camera = prior.embed(classes), self.camera.expand(len(rows), -1)
            known = given.expand(len(rows), 1, -1, -1).to(squares)
            total = squares.new_zeros(len(rows))
            for time in TIMES:
                noisy = torch.where(known > 0, squares, torch.lerp(fixed, squares, time))
                with self.compute.autocast():
                    logits, _ = prior(noisy, known, camera, camera.new_ones(len(rows), 1),
                                      camera.new_full((len(rows),), time))
                entropy = functional.cross_entropy(logits.float().permute(0, 3, 1, 2), classes,
                                                   reduction="none")
                total += entropy[:, ~given].mean(dim=1) / len(TIMES)
            losses.append(total.cpu().numpy())
        return np.concatenate(losses)

    def objects(self, world: World) -> np.ndarray:
        """Return which squares hold an object that moves or changes its look, bool (B, n, n)."""
        sprites = self.simulator.squares.sprites if self.simulator.squares else None
        classes = world.squares.cpu().numpy()
        return np.zeros(classes.shape, bool) if sprites is None else classes >= sprites.first_class

    def differences(self, changed: World, plausible: World) -> np.ndarray:
        """Return which squares of worlds differ from those of one world, bool (B, n, n): their
        class or, for moving and animated objects, place, velocity or look."""
        fields = [(getattr(changed, name) != getattr(plausible, name)).cpu().numpy()
                  for name in ("squares", "places", "velocities", "looks")]
        return fields[0] | ((fields[1] | fields[2] | fields[3]) & self.objects(changed))


def certain(world: World) -> World:
    """Replace the probabilities of classes by the most probable ones."""
    return dataclasses.replace(world, squares=world.squares.argmax(dim=-1))


def joined(worlds: Sequence[World]) -> World:
    """Concatenate batches of worlds."""
    return World(*(torch.cat(parts) for parts in zip(*(vars(world).values() for world in worlds))))


def mixed(plausible: World, changed: World, masks: np.ndarray) -> World:
    """Return worlds that have the squares of ``changed`` where a mask is true.

    Args:
        plausible, changed: worlds (1 row each).
        masks: bool (B, n, n).
    """
    chosen = torch.from_numpy(masks).to(plausible.squares.device)
    world = plausible.repeat(len(masks))
    return dataclasses.replace(world, **{
        name: torch.where(chosen, getattr(changed, name), getattr(plausible, name))
        for name in ("squares", "places", "velocities", "looks")})


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Worlds of a search.

    Attributes:
        noise: noise from which they are generated (N, E + 2, n, n).
        scores: what the search maximises (N,).
        seen: squares whose noise is worth changing, bool (N, n, n); if a world has none, all
            squares are.
    """

    noise: Tensor
    scores: np.ndarray
    seen: np.ndarray

    def best(self, number: int, *others: Candidates) -> Candidates:
        """Return the best candidates of these and others, best first."""
        every = self, *others
        scores = np.concatenate([each.scores for each in every])
        order = np.argsort(-scores, kind="stable")[:number]
        return Candidates(torch.cat([each.noise for each in every])[order], scores[order],
                          np.concatenate([each.seen for each in every])[order])


def evolve(score: Callable[[Tensor], Candidates], first: Candidates, num_evaluations: int,
           rng: np.random.Generator) -> Candidates:
    """Search for the noise with the highest score by a (mu + lambda) evolution strategy.

    A child is a parent whose noise is redrawn in a random rectangle that is centred in a square
    which came into view in the parent's simulation. Redrawing keeps the distribution of the noise,
    unlike steps along gradients, so that worlds stay samples of the prior.

    Args:
        score: function that evaluates noise (B, E + 2, n, n).
        first: random candidates, which count as evaluations.
        num_evaluations: number of evaluations in all.

    Returns:
        The best candidate (1).
    """
    parents = first.best(_PARENTS)
    left = num_evaluations - len(first.scores)
    while left > 0:
        children = []
        for number in range(min(_CHILDREN, left)):
            parent = number % len(parents.scores)
            child = parents.noise[parent].clone()
            places = np.argwhere(parents.seen[parent])
            side = child.shape[-1]
            row, column = places[rng.integers(len(places))] if len(places) else rng.integers(
                side, size=2)
            height, width = rng.integers(1, _LARGEST_REDRAWN + 1, size=2)
            area = child[:, max(row - height // 2, 0):row + (height + 1) // 2,
                         max(column - width // 2, 0):column + (width + 1) // 2]
            area.copy_(torch.from_numpy(rng.standard_normal(tuple(area.shape))))
            children.append(child)
        parents = parents.best(_PARENTS, score(torch.stack(children)))
        left -= len(children)
    return parents.best(1)


def smallest_change(effect: Callable[[np.ndarray], np.ndarray], different: np.ndarray,
                    matters: np.ndarray, size: float) -> np.ndarray:
    """Put squares of a changed world back to the plausible one while the effect persists.

    First all squares go back that never came into view; then as many parts of the change as
    possible, which are first connected groups of squares, then blocks, then single squares. If a
    part has enough of the effect alone, it is all that is kept. Otherwise the parts go back in
    ascending order of the effect that is lost with each of them; bisection finds how many.

    Args:
        effect: function that returns the strengths (B,) of worlds in which the squares of masks,
            bool (B, n, n), are changed.
        different: squares that differ, bool (n, n).
        matters: squares that came into view, bool (n, n).
        size: strength of the whole change.

    Returns:
        Mask (n, n) of a change with at least PERSISTS of the effect.
    """
    least = PERSISTS * size
    kept = different & matters
    if not kept.any() or effect(kept[None])[0] < least:
        kept = different
    single = np.arange(kept.size).reshape(kept.shape)
    rows, columns = np.indices(kept.shape) // _BLOCK
    for labels in (ndimage.label(kept, np.ones((3, 3)))[0], len(kept) * rows + columns, single):
        parts = [kept & (labels == label) for label in np.unique(labels[kept])]
        if 1 < len(parts) <= _MOST_PARTS:
            kept = _fewest(effect, np.stack(parts), least)
    return kept


def _fewest(effect: Callable[[np.ndarray], np.ndarray], parts: np.ndarray,
            least: float) -> np.ndarray:
    """Return a union (n, n) of few of the parts, bool (K, n, n), whose effect is large enough, as
    that of all parts is; see ``smallest_change``."""
    alone = effect(parts)
    enough = np.flatnonzero(alone >= least)
    if len(enough):
        return parts[enough[parts[enough].sum(axis=(1, 2)).argmin()]]
    every = parts.any(axis=0)
    order = np.argsort(-effect(every & ~parts), kind="stable")
    unions = np.logical_or.accumulate(parts[order])  # of the parts that go back
    kept, low, high = every, 0, len(parts)  # numbers of parts that can go back, and cannot
    while high - low > 1:
        middle = (low + high) // 2
        rest = every & ~unions[middle - 1]
        if effect(rest[None])[0] >= least:
            kept, low = rest, middle
        else:
            high = middle
    return kept
