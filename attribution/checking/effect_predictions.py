"""Predictions of the effects of objects on outputs of the agent, from the agent alone and through
the simulator.

The *agent alone* sees the recorded frame of row t. Its predictions are those of four methods, at
the pixels and at a layer: the gradient, the gradient times the input, integrated gradients from a
baseline of zero (Sundararajan et al. 2017), and occlusion, which sets the object's pixels, or the
cells of the layer that they touch, to zero. They explain the output at row t, for the action that
was recorded there, and do not depend on the lag. Without backgrounds,
zero is the colour of the game's empty squares, so occlusion of pixels nearly removes the object. A
fifth prediction depends on the lag, but on no model of the environment: the *repeated frame* is
shown to the agent k + 1 times, with and without occlusion of the object's pixels; the output is
that for the action recorded at row t + k.

*Through the simulator*, the output is read in the simulated step of row t + k. The simulation
starts from the initial frames, which end at row t, in the world that the game renders around row t,
with the agent's recorded hidden state before row t, and follows the recorded actions, like the game
in which effects are measured. Nothing else is taken from later rows. The world comes from the level
state of row t: it holds what lies around the view, and the places and velocities of objects, which
the agent alone does not see. A world holds objects as squares, apart from the frames. So a
gradient with respect to the initial frames passes through the encoder alone and misses what the
simulator knows about an object from its square. The methods are therefore:

- gradient, and gradient times input, with respect to the initial frames
- gradient times the removal of the object, from the initial frames and from the squares in view:
  the linear part of the finite difference below
- finite difference: the simulation without the object in the initial frames, minus the simulation
  with it; and the same without the object in the frames and the squares
- *saliency*, as in ``generative.saliency``: gradient, and gradient times image, with respect to the
  image that the agent sees at row t. It reaches later steps through the agent's memory and, by way
  of the agent's actions, through the environment. Here, actions have their recorded values.

Maps are not smoothed. A prediction from a map is minus its sum over the object's pixels, in all
initial frames where the map covers them.

Letters in shape comments: N pairs, B frames, F the frame of each pair, I initial frames, K largest
lag, L lags, J outputs, M methods, H W C a frame or layer, D hidden units, S nodes of a path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from agents.networks import Policy, PolicyOutput, to_images
from agents.outputs import Output
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from attribution.checking.object_effects import Pair, Replays
from attribution.checking.object_scores import cells_of
from attribution.integrated_gradients import Integration
from attribution.layers import Bottleneck
from common.devices import Compute
from common.game_constants import FRAME_SIZE
from envs.wide_view import WorldView
from generative.networks import LatentSampler, straight_through
from generative.rendered_worlds import RenderedWorlds, world_of_images
from generative.simulator import Simulator, Start, Step
from generative.squares import World
from interventions.partial_forward import PartialForward

PIXELS = "pixels"
GRADIENT, TIMES_INPUT, INTEGRATED, OCCLUSION = AGENT_METHODS = (
    "gradient", "gradient x input", "integrated gradients", "occlusion")
SIMULATOR_METHODS = (
    "simulator: gradient", "simulator: gradient x input", "simulator: gradient x removal",
    "simulator: finite difference (frames)", "simulator: finite difference",
    "simulator: saliency", "simulator: saliency x image")
FRAMES_DIFFERENCE, DIFFERENCE = SIMULATOR_METHODS[3:5]  # equal without worlds
REPEATED = "pixels: occlusion, frame repeated"
_MARGIN = 6  # squares beyond the view in which an object's squares are removed
NODES = 16  # nodes of integrated gradients
_MODE = LatentSampler("mode")
FRAMES_PER_BATCH = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """Pairs with all inputs of the predictions.

    Attributes:
        pairs: the pairs (N).
        replays: their frames.
        frames: index of the first pair with the same frame as each pair, int64 (N,).
        worlds, worlds_without: rendered worlds with and without the object (N); None if the
            simulator has no worlds.
        game: name of the game.
    """

    pairs: Sequence[Pair]
    replays: Replays
    frames: np.ndarray
    worlds: RenderedWorlds | None
    worlds_without: RenderedWorlds | None
    game: str

    @classmethod
    def of(cls, pairs: Sequence[Pair], replays: Replays, folder: RolloutFolder,
           view: WorldView | None) -> Scene:
        """Render the worlds of pairs with a view; None for no worlds."""
        first: dict[tuple[int, int], int] = {}
        frames = np.array([first.setdefault((pair.episode, pair.row), number)
                           for number, pair in enumerate(pairs)])
        with_object = without = None
        if view is not None:
            clock = [pair.row for pair in pairs]
            with_object = RenderedWorlds.of_states(view, [pair.state for pair in pairs], clock)
            without = RenderedWorlds.of_states(
                view, [pair.thing.removed_from(pair.state) for pair in pairs], clock)
        return cls(pairs, replays, frames, with_object, without, recorded_game(folder).env_name)


def agent_names(bottlenecks: Sequence[Bottleneck]) -> tuple[str, ...]:
    """Return the names of the methods of the agent alone."""
    sites = (PIXELS, *(bottleneck.name for bottleneck in bottlenecks))
    return (*(f"{site}: {method}" for site in sites for method in AGENT_METHODS), REPEATED)


def agent_predictions(policy: Policy, compute: Compute, bottlenecks: Sequence[Bottleneck],
                      outputs: Sequence[Output], lags: Sequence[int], scene: Scene) -> np.ndarray:
    """Predict effects from the agent alone.

    Args:
        policy: the agent.
        compute: device and precision.
        bottlenecks: layers with a spatial map.
        outputs: J outputs.
        lags: lags.
        scene: N pairs.

    Returns:
        Predictions, float64 (M, J, L, N), in the order of ``agent_names``.
    """
    replays = scene.replays
    entering = torch.from_numpy(replays.entering).to(compute.device)
    actions = torch.from_numpy(replays.actions[1]).to(compute.device)
    images = to_images(torch.from_numpy(replays.recorded[0]).to(compute.device),
                       compute.channels_last)
    masks = torch.from_numpy(replays.masks[-1])

    def see(points: Tensor, rows: Tensor) -> PolicyOutput:
        with compute.autocast():
            embeddings = policy.embed(points)
        return policy.step(embeddings.float(), entering[rows])

    parts = [_site_predictions(see, images, masks, outputs, actions, scene.frames)]
    for bottleneck in bottlenecks:
        forward = PartialForward(policy, compute, bottleneck.layer.name)
        with torch.no_grad():
            prefix = forward.run_to(replays.recorded[0], entering)

        def resume(points: Tensor, rows: Tensor, prefix=prefix) -> PolicyOutput:
            return prefix.run_from(points, rows)

        cells = torch.from_numpy(cells_of(replays.masks[-1], bottleneck))
        parts.append(_site_predictions(resume, prefix.activations.float(), cells, outputs, actions,
                                       scene.frames))
    now = np.concatenate(parts)[:, :, None]
    return np.concatenate([np.repeat(now, len(lags), axis=2), frame_repeated(
        policy, compute, images, masks, outputs, lags, replays)[None]])


@torch.no_grad()
def frame_repeated(policy: Policy, compute: Compute, images: Tensor, masks: Tensor,
                    outputs: Sequence[Output], lags: Sequence[int], replays: Replays) -> np.ndarray:
    """Show the same frames to the agent up to the largest lag, with and without the object.

    Args:
        images: frames (N, C, H, W).
        masks: the objects' pixels, bool (N, H, W).

    Returns:
        Outputs without the object, minus outputs with it, float64 (J, L, N).
    """
    actions = torch.from_numpy(replays.actions[1:]).to(images.device)
    without = images * ~masks.to(images.device)[:, None]
    values = []
    for points in (without, images):
        hidden = torch.from_numpy(replays.entering).to(images.device)
        with compute.autocast():
            embeddings = policy.embed(points)
        steps = []
        for taken in actions:
            result = policy.step(embeddings.float(), hidden)
            hidden = result.hidden_states
            steps.append(torch.stack([output(result, taken) for output in outputs]))
        values.append(torch.stack(steps, dim=1)[:, list(lags)].double())
    return (values[0] - values[1]).cpu().numpy()


def _site_predictions(run: Callable[[Tensor, Tensor], PolicyOutput], points: Tensor, masks: Tensor,
                      outputs: Sequence[Output], actions: Tensor, frames: np.ndarray) -> np.ndarray:
    """Predict effects from the pixels or from a layer.

    Args:
        run: maps inputs (R, C, H, W) and the indices of their pairs (R,) to the agent's outputs.
        points: inputs of the pairs' frames (N, C, H, W).
        masks: the objects' pixels or cells, bool (N, H, W).
        outputs: J outputs.
        actions: recorded actions (N,).
        frames: see ``Scene`` (N,).

    Returns:
        Predictions of AGENT_METHODS, float64 (4, J, N).
    """
    masks = masks.to(points.device)[:, None]  # (N, 1, H, W)
    shares, weights = (torch.from_numpy(numbers).to(points) for numbers in
                       Integration().nodes(NODES))
    maps = points.new_zeros(3, len(outputs), *points.shape)
    for frame in np.unique(frames).tolist():
        rows = torch.full((1 + NODES,), frame, device=points.device)
        along = torch.cat([shares, shares.new_ones(1)]).reshape(-1, *[1] * (points.ndim - 1))
        path = (along * points[frame]).requires_grad_()
        with torch.enable_grad():
            result = run(path, rows)
            values = [output(result, actions[rows]).sum() for output in outputs]
        for number, value in enumerate(values):
            (gradient,) = torch.autograd.grad(value, path, retain_graph=True)
            mean = (weights.reshape(along[1:].shape) * gradient[:-1]).sum(dim=0)
            maps[:, number, frame] = torch.stack([gradient[-1], gradient[-1] * points[frame],
                                                  mean * points[frame]])
    sums = (maps[:, :, frames] * masks).flatten(3).sum(dim=-1, dtype=torch.float64)
    with torch.no_grad():
        rows = torch.arange(len(points), device=points.device)
        without, before = (
            torch.stack([output(result, actions) for output in outputs]).double() for result in (
                run(points * ~masks, rows), run(points, rows)))
    return torch.cat([-sums, (without - before)[None]]).cpu().numpy()


def simulator_predictions(simulator: Simulator, compute: Compute, outputs: Sequence[Output],
                          lags: Sequence[int], scene: Scene) -> np.ndarray:
    """Predict effects through the simulator, with the agent inside it.

    Args:
        simulator: the simulator with its agent.
        compute: device and precision.
        outputs: J outputs.
        lags: lags.
        scene: N pairs.

    Returns:
        Predictions of SIMULATOR_METHODS, float64 (M, J, L, N).
    """
    replays, count = scene.replays, len(scene.pairs)
    images, without = (to_images(torch.from_numpy(frames).flatten(0, 1).to(compute.device),
                                 False).unflatten(0, frames.shape[:2])
                       for frames in (replays.initial, replays.initial_undrawn))
    result = np.zeros((len(SIMULATOR_METHODS), len(outputs), len(lags), count))
    unique = np.unique(scene.frames)
    for begin in range(0, len(unique), FRAMES_PER_BATCH):
        chosen = unique[begin:begin + FRAMES_PER_BATCH]
        pairs = np.flatnonzero(np.isin(scene.frames, chosen))
        batch = _Simulations(simulator, compute, outputs, lags, scene, chosen, images)
        own = np.searchsorted(chosen, scene.frames[pairs])  # row of each pair's frame in the batch
        result[:, :, :, pairs] = batch.predict(pairs, own, without[:, pairs])
    return result


def world_seed(pair: Pair) -> int:
    """Return the seed of what lies beyond the world around a pair's frame."""
    return 1000003 * pair.episode + pair.row


def read_world(simulator: Simulator, scene: Scene, rendered: RenderedWorlds | None,
               rows: np.ndarray, vectors: Tensor) -> World | None:
    """Read the worlds of pairs off their renderings.

    Args:
        rendered: worlds of all pairs of the scene; None without worlds.
        rows: indices of the pairs (R,).
        vectors: their bottleneck vectors (R, V).
    """
    if rendered is None:
        return None
    part = RenderedWorlds(rendered.images[rows], rendered.positions[rows],
                          [rendered.objects[row] for row in rows], rendered.clock[rows])
    return world_of_images(simulator, vectors, part, scene.game,
                           torch.tensor([world_seed(scene.pairs[row]) for row in rows]))


def read_outputs(steps: Sequence[Step], taken: Tensor, outputs: Sequence[Output],
                 lags: Sequence[int]) -> Tensor:
    """Return the outputs of simulated steps (J, L, R).

    Args:
        taken: actions that outputs refer to, for each step (K + 1, R).
    """
    return torch.stack([torch.stack([output(
        PolicyOutput(steps[lag].log_probs, steps[lag].values, steps[lag].hidden_states),
        taken[lag]) for lag in lags]) for output in outputs])


class _Simulations:
    """Simulations from B frames.

    Args:
        simulator, compute, outputs, lags, scene: see ``simulator_predictions``.
        chosen: indices of the first pairs of the frames (B,).
        images: initial frames of all pairs (I, N, C, H, W).
    """

    def __init__(self, simulator: Simulator, compute: Compute, outputs: Sequence[Output],
                 lags: Sequence[int], scene: Scene, chosen: np.ndarray, images: Tensor):
        self.simulator, self.compute, self.outputs = simulator, compute, outputs
        self.lags, self.scene, self.images = lags, scene, images[:, chosen]
        with torch.no_grad(), compute.autocast():
            self.vectors = simulator.encode(self.images)
        self.world = read_world(simulator, scene, scene.worlds, chosen, self.vectors)
        self.chosen = chosen

    def _start(self, images: Tensor, world: World | None, rows: np.ndarray) -> Start:
        """Start from initial frames (I, R, C, H, W), with the recorded hidden states of pairs."""
        start = self.simulator.start_from(self.simulator.encode(images), _MODE, world=world)
        hidden = torch.from_numpy(self.scene.replays.entering[rows]).to(images.device)
        return dataclasses.replace(start, agent_hidden=hidden)

    def _imagine(self, start: Start, rows: np.ndarray, own_actions: bool = False) -> list[Step]:
        """Simulate with the recorded actions of pairs, to the largest lag.

        Args:
            own_actions: let gradients pass through the agent's own action to the next step.
        """
        actions = torch.from_numpy(self.scene.replays.actions[:, rows]).to(start.env_h.device)
        num_steps = max(self.lags) + 1
        if not own_actions:
            return self.simulator.imagine(start, _MODE, num_steps, true_actions=actions[:num_steps])
        taken = iter(self.simulator.one_hot_actions(actions))
        start = dataclasses.replace(start, action=next(taken))
        return self.simulator.imagine(
            start, _MODE, num_steps,
            choose=lambda log_probs: straight_through(next(taken), log_probs))

    def _read(self, steps: Sequence[Step], rows: np.ndarray) -> Tensor:
        """Return the outputs of simulated steps (J, L, R)."""
        taken = torch.from_numpy(self.scene.replays.actions[1:, rows]).to(steps[0].values.device)
        return read_outputs(steps, taken, self.outputs, self.lags)

    def predict(self, pairs: np.ndarray, own: np.ndarray, without: Tensor) -> np.ndarray:
        """Predict the effects of R pairs with these frames.

        Args:
            pairs: indices of the pairs (R,).
            own: index of each pair's frame among the B frames (R,).
            without: initial frames without the object (I, R, C, H, W).

        Returns:
            Predictions, float64 (M, J, L, R).
        """
        images, world = self.images[:, own], self.world
        masks = torch.from_numpy(self.scene.replays.masks[:, pairs]).to(images.device)[:, :, None]
        squares = None if world is None else world.squares[own]
        gone = squares
        if world is not None and squares is not None:
            read = read_world(self.simulator, self.scene, self.scene.worlds_without, pairs,
                              self.vectors[own])
            assert read is not None
            near = self._in_view(read)[..., None]
            gone = torch.where(near, read.squares.to(squares), squares)
        with self.compute.autocast():
            by_frames, by_squares = self._gradients(own_actions=False)
            saliency, shown = self._saliency()
            runs = []
            for frames, at in ((images, squares), (without, squares), (without, gone)):
                placed = None if world is None or at is None else dataclasses.replace(
                    world[own], squares=at)
                with torch.no_grad():
                    runs.append(self._read(self._imagine(self._start(frames, placed, pairs), pairs),
                                           pairs))
        before, frames_alone, both = runs
        at_frames = by_frames[:, :, :, own]  # (J, L, I, R, C, H, W)
        removal = _total(at_frames * (without - images), 2)
        if squares is not None and gone is not None and by_squares is not None:
            removal = removal + (by_squares[:, :, own] * (gone - squares)).flatten(3).sum(
                dim=-1, dtype=torch.float64)
        at_image = saliency[:, :, own] * masks[-1]
        return torch.stack([
            -_total(at_frames * masks, 2), -_total(at_frames * masks * images, 2), removal,
            (frames_alone - before).double(), (both - before).double(),
            -at_image.flatten(3).sum(dim=-1, dtype=torch.float64),
            -(at_image * shown[own]).flatten(3).sum(dim=-1, dtype=torch.float64)]).cpu().numpy()

    def _in_view(self, world: World) -> Tensor:
        """Return the squares in view, and those at most _MARGIN squares away, bool (R, n, n). At
        the edge of a world, squares may be generated."""
        assert self.simulator.squares is not None
        size, number = self.simulator.squares.pixels_per_square, world.squares.shape[1]
        first = world.corner[:, :, None] + size * torch.arange(number, device=world.corner.device)
        reach = _MARGIN * size
        inside = (first + size > -reach) & (first < FRAME_SIZE + reach)  # (R, 2, n)
        return inside[:, 1, :, None] & inside[:, 0, None]

    def _gradients(self, own_actions: bool) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of each output and lag with respect to the initial frames
        (J, L, I, B, C, H, W) and to the squares (J, L, B, n, n, K); None without worlds."""
        with torch.enable_grad():
            images, world = self.images.clone().requires_grad_(), self.world
            leaves = [images]
            if world is not None:
                leaves.append(world.squares.float().clone().requires_grad_())
                world = dataclasses.replace(world, squares=leaves[1])
            steps = self._imagine(self._start(images, world, self.chosen), self.chosen, own_actions)
            totals = self._read(steps, self.chosen).sum(dim=-1)  # (J, L)
        found = [torch.autograd.grad(total, leaves, retain_graph=True)
                 for total in totals.flatten()]
        by_leaf = [torch.stack(gradients).unflatten(0, totals.shape).float()
                   for gradients in zip(*found)]
        return by_leaf[0], by_leaf[1] if len(by_leaf) > 1 else None

    def _saliency(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of each output and lag with respect to the images of the first step
        (J, L, B, C, H, W), and these images (B, C, H, W)."""
        with torch.enable_grad():
            with torch.no_grad():
                start = self._start(self.images, self.world, self.chosen)
            # Without a leaf that requires a gradient there would be no graph.
            start = dataclasses.replace(start, env_h=start.env_h.clone().requires_grad_())
            steps = self._imagine(start, self.chosen, own_actions=True)
            totals = self._read(steps, self.chosen).sum(dim=-1)
        gradients = [torch.autograd.grad(total, steps[0].images, retain_graph=True)[0]
                     for total in totals.flatten()]
        return (torch.stack(gradients).unflatten(0, totals.shape).float(),
                steps[0].images.detach().float())


def _total(values: Tensor, dim: int) -> Tensor:
    """Sum values (J, L, I, R, C, H, W) over initial frames, colours and pixels, float64
    (J, L, R)."""
    return values.sum(dim=dim).flatten(3).sum(dim=-1, dtype=torch.float64)
