"""Maps of one output in recorded frames, and changes of the output in the real game.

There are two kinds of map: saliency through the simulator, and attributions to layers. A simulation
starts at the latent vector of the recorded frame and the frames before it; its step 0 shows the
recorded frame. The output is read at step 0 or ``lag`` steps later, and differentiated with respect
to the image of step 0. The predictions of the maps are tested in the real game, by hiding an object
or a part of the frame from the agent.

Letters in shape comments: N frames, B a batch, H W a map's grid, C image channels, K kinds of
object, D hidden state, L lags, R renderings of a frame, M maps, P points of a curve.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from agents.acting import run_policy
from agents.layers import Layer
from agents.networks import Policy
from agents.outputs import Output
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from attribution.checking.object_files import rendered_without
from attribution.integrated_gradients import Integration, LayerIntegratedGradients
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames
from common.devices import Compute
from common.game_constants import FRAME_SIZE
from common.progress import Progress
from envs.objects import GameObject
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from generative.dataset import RolloutDataset
from generative.frozen_agent import FrozenAgent
from generative.saliency.gradients import SaliencyFunction, SaliencyPass, saliency_maps
from generative.simulator import Simulator

PIXELS = Bottleneck("pixels", Layer("pixels", (3, FRAME_SIZE, FRAME_SIZE), 1, 0.0))
SALIENCY, TIMES_IMAGE = "saliency", "saliency times image"
BLOCK = 8  # side in pixels of the blocks of a frame that are replaced or compared
POINTS = 9  # points per curve, including both ends
_FRAMES_PER_BATCH, _WINDOWS_PER_BATCH = 32, 8


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """Maps of one kind in all frames.

    Attributes:
        name: name with the lag, for tables.
        lag: number of steps after the frame at which the output is read.
        bottleneck: layer whose cells the map covers; ``PIXELS`` for saliency.
        values: contributions to the output, float64 (N, H, W).
    """

    name: str
    lag: int
    bottleneck: Bottleneck
    values: np.ndarray

    @property
    def is_attribution(self) -> bool:
        return self.bottleneck is not PIXELS

    @property
    def blocks(self) -> np.ndarray:
        """Sums over blocks of the frame (N, 8, 8); cell i of a layer with stride s covers the
        pixels s i to s (i + 1) - 1, as in ``Layer.cell``."""
        size = FRAME_SIZE // BLOCK
        return self.values.reshape(len(self.values), size, -1, size,
                                   self.values.shape[2] // size).sum(axis=(2, 4))


def attribution_maps(policy: Policy, compute: Compute, bottlenecks: Sequence[Bottleneck],
                     output: Output, recorded: RecordedFrames) -> list[Map]:
    """Compute integrated gradients of an output in recorded frames, one map per layer."""
    maps = []
    for bottleneck in bottlenecks:
        attributor = LayerIntegratedGradients(policy, compute, bottleneck, [output],
                                              Integration(tolerance=None))
        values = []
        for begin in range(0, len(recorded.frames), _FRAMES_PER_BATCH):
            rows = slice(begin, begin + _FRAMES_PER_BATCH)
            prefix = attributor.run_prefix(recorded.frames[rows], recorded.entering[rows])
            values.append(attributor.attribute(prefix, recorded.actions[rows],
                                               np.ones(1)).values[0].sum(axis=1, dtype=np.float64))
        maps.append(Map(f"attribution to {bottleneck.name}", 0, bottleneck,
                        np.concatenate(values)))
    return maps


def simulated_maps(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                   windows: np.ndarray, function: SaliencyFunction, lags: Sequence[int],
                   kernel_size: int, sigma: float) -> list[Map]:
    """Compute saliency (summed over colours and smoothed) and saliency times the image.

    Args:
        simulator: the simulator with its agent.
        compute: device and precision.
        dataset: dataset of the recording.
        windows: numbers of the windows of which each frame is the last initial frame (N,).
        function: output to differentiate.
        lags: numbers of steps after the frame at which the output is read.
        kernel_size, sigma: parameters of the smoothing; see ``saliency_maps``.

    Returns:
        Two maps per lag.
    """
    values: dict[tuple[int, str], list[np.ndarray]] = {
        (lag, name): [] for lag in lags for name in (SALIENCY, TIMES_IMAGE)}
    for begin in range(0, len(windows), _WINDOWS_PER_BATCH):
        batch = dataset.batch(windows[begin:begin + _WINDOWS_PER_BATCH])
        images = batch.frames[:dataset.num_init_steps].to(compute.device).float() / 255
        with torch.no_grad(), compute.autocast():
            vectors = simulator.encode(images)
        for lag in lags:
            saliency = SaliencyPass(simulator, compute, vectors[:, None], [function], (lag,),
                                    lag + 1)
            gradients = saliency.gradients(function).images[:, 0].numpy()  # (B, C, H, W)
            image = saliency.unperturbed_images()[:, 0].numpy()
            values[lag, SALIENCY].append(saliency_maps(gradients, kernel_size, sigma))
            values[lag, TIMES_IMAGE].append((gradients * image).sum(axis=1))
    return [Map(f"{name}, {lag} steps later" if lag else name, lag, PIXELS,
                np.concatenate(parts).astype(np.float64)) for (lag, name), parts in values.items()]


@contextlib.contextmanager
def with_agent(simulator: Simulator, policy: Policy) -> Iterator[None]:
    """Context manager: replace the agent inside a simulator by one of the same architecture."""
    agent = simulator.agent
    simulator.agent = FrozenAgent(policy, agent.policy.hidden_state_size,
                                  agent.policy.fc_policy.out_features)
    try:
        yield
    finally:
        simulator.agent = agent


def hide_objects(policy: Policy, compute: Compute, folder: RolloutFolder, places: np.ndarray,
                 entering: np.ndarray, kinds: Sequence[GameObject], output: Output,
                 lags: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hide each kind of object from the agent in one frame of the real game, and continue playing.

    The game state is not changed: only that frame is rendered without the kind, which may change
    the agent's hidden state, its most likely actions and so the rest of the episode. The output is
    read ``lag`` steps later, or in the last frame if the episode has ended earlier.

    Args:
        policy: the agent.
        compute: device and precision.
        folder: the recording.
        places: episode and row of each frame (N, 2); rows of an episode are adjacent and ascending.
        entering: hidden states before each frame (N, D).
        kinds: kinds of object.
        output: output that is read.
        lags: numbers of steps after the frame.

    Returns:
        Masks of each kind, bool (N, K, H, W); changes of the output at each lag, float64 (L, N, K),
        0 where a kind is not in view; and whether the episode with nothing hidden ends before the
        last lag, bool (N,).

    Raises:
        UserError: if the recording cannot be replayed.
    """
    config, masks, changes, ended = recorded_game(folder), [], [], []
    for hidden_state, (state, pictures) in zip(entering, rendered_without(folder, places, kinds)):
        seen = pictures.masks.any(axis=(1, 2))
        values, over = _play_on(
            policy, compute, config, state.to_bytes(),
            np.concatenate([pictures.frame[None], pictures.without[seen]]), hidden_state, output,
            max(lags))
        change = np.zeros((len(lags), len(kinds)))
        change[:, seen] = values[list(lags), 1:] - values[list(lags), :1]
        masks.append(pictures.masks)
        changes.append(change)
        ended.append(over)
    return np.stack(masks), np.stack(changes, axis=1), np.array(ended)


@torch.no_grad()
def _play_on(policy: Policy, compute: Compute, config: EnvConfig, state: bytes, shown: np.ndarray,
             entering: np.ndarray, output: Output, last: int) -> tuple[np.ndarray, bool]:
    """Play from a state that is shown to the agent by renderings (R, H, W, C).

    Returns:
        Outputs at steps 0 to ``last`` (last + 1, R), and whether the episode of the first rendering
        has ended.
    """
    number = len(shown)
    hidden = torch.from_numpy(entering).expand(number, -1).to(compute.device)
    frames, over, outputs = shown.copy(), np.zeros(number, dtype=bool), []
    with contextlib.closing(ProcgenVectorEnv(config, number, 0, 0)) as env:
        env.observe()
        env.set_state([state] * number)
        env.observe()
        for step in range(last + 1):
            result = run_policy(policy, compute, frames, hidden)
            actions = result.logits.argmax(dim=-1)
            outputs.append(output(result, actions).double().cpu().numpy())
            if step == last:
                break
            env.act(actions.to(torch.int32).cpu().numpy())
            observation = env.observe()
            over |= observation.first
            frames[~over] = observation.frames[~over]
            going = torch.from_numpy(~over).to(hidden.device)
            hidden = torch.where(going.unsqueeze(-1), result.hidden_states, hidden)
    return np.stack(outputs), bool(over[0])


@torch.no_grad()
def frame_deletion_curves(policy: Policy, compute: Compute, recorded: RecordedFrames,
                          scores: Sequence[np.ndarray], output: Output) -> np.ndarray:
    """Compute deletion and insertion curves over blocks of the frame (Petsiuk et al. 2018, "RISE",
    section 3.3).

    Blocks are replaced by the mean frame (deletion) or restored (insertion), in descending order of
    their scores.

    Args:
        policy: the agent.
        compute: device and precision.
        recorded: N recorded frames.
        scores: M arrays of block scores (N, 8, 8), one per order.
        output: output of the agent.

    Returns:
        Output along the deletion and the insertion curve, float64 (N, M, 2, P).
    """
    side = FRAME_SIZE // BLOCK
    mean = recorded.frames.mean(axis=0)
    changed = np.round(np.linspace(0, side**2, POINTS)).astype(int)
    curves = np.empty((len(recorded.frames), len(scores), 2, POINTS))
    with Progress(len(curves), "frame of deletion") as progress:
        for number, frame in enumerate(recorded.frames):
            ranks = np.stack([np.argsort(np.argsort(-score[number].ravel(), kind="stable"))
                              for score in scores])  # (M, blocks)
            gone = ranks[:, None] < changed[:, None]  # (M, P, blocks)
            hidden = np.stack([gone, ~gone], axis=1).reshape(-1, side, side)
            pixels = hidden.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)[..., None]
            frames = np.where(pixels, mean, frame).round().astype(np.uint8)
            entering, actions = (
                torch.from_numpy(array[number:number + 1]).to(compute.device).expand(
                    len(frames), *array.shape[1:])
                for array in (recorded.entering, recorded.actions))
            values = output(run_policy(policy, compute, frames, entering), actions)
            curves[number] = values.double().cpu().numpy().reshape(curves.shape[1:])
            progress.update(number + 1)
    return curves
