"""Changes of the output in the real game when an object, or a part of the picture, is hidden from
the agent.

Letters in shape comments: N frames, K kinds of object, H W C a frame, L lags, M orders, P points of
a curve, B blocks of a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from agents.acting import run_policy
from agents.networks import Policy
from agents.outputs import Output
from agents.replay import ObjectPainter, recorded_game, replayed
from agents.rollout_files import RolloutFolder
from attribution.recordings import RecordedFrames
from attribution.through_simulator.maps import BLOCK
from common.devices import Compute
from common.game_constants import FRAME_SIZE
from common.progress import Progress
from envs.objects import GameObject
from envs.procgen_env import EnvConfig, ProcgenVectorEnv

POINTS = 9  # of a curve, both ends among them
_FRAMES_A_PASS = 256


@dataclasses.dataclass(frozen=True)
class RealChanges:
    """Frames with single kinds of object hidden.

    Attributes:
        masks: pixels of each kind, bool (N, K, H, W).
        changes: of the output at each lag, float64 (L, N, K); 0 where a kind is not seen.
        ended: whether the episode was over before the last lag, with nothing hidden, bool (N,).
    """

    masks: np.ndarray
    changes: np.ndarray
    ended: np.ndarray


def hidden_objects(policy: Policy, compute: Compute, folder: RolloutFolder, places: np.ndarray,
                   entering: np.ndarray, kinds: Sequence[GameObject], output: Output,
                   lags: Sequence[int]) -> RealChanges:
    """Hide each kind from the agent in one frame of the real game, and let it play on.

    The game itself stays as it is: only the picture of that frame is drawn without the kind, with
    which the agent's state, its likeliest actions and so the rest of the episode may change. The
    output is that of the real frame ``lag`` steps later; where an episode has ended before, that
    of its last frame.

    Args:
        places: episode and row of each frame (N, 2), those of an episode together, ascending.
        entering: hidden states that enter (N, D).

    Raises:
        UserError: if the recording cannot be played again.
    """
    config = recorded_game(folder)
    masks, changes, ended = [], [], []
    borders = np.flatnonzero(np.diff(places[:, 0])) + 1
    with (contextlib.closing(ObjectPainter(config, kinds)) as painter,
          Progress(len(places), "frame with hidden objects") as progress):
        for some in np.split(places, borders):
            for _, state in replayed(folder, int(some[0, 0]), some[:, 1].tolist()):
                pictures = painter.draw(state)
                seen = pictures.masks.any(axis=(1, 2))
                shown = np.concatenate([pictures.frame[None], pictures.without[seen]])
                found, over = _played(policy, compute, config, state.to_bytes(), shown,
                                      entering[len(masks)], output, max(lags))
                change = np.zeros((len(lags), len(kinds)))
                change[:, seen] = found[list(lags), 1:] - found[list(lags), :1]
                masks.append(pictures.masks)
                changes.append(change)
                ended.append(over)
                progress.update(len(masks))
    return RealChanges(np.stack(masks), np.stack(changes, axis=1), np.array(ended))


@torch.no_grad()
def _played(policy: Policy, compute: Compute, config: EnvConfig, state: bytes, shown: np.ndarray,
            entering: np.ndarray, output: Output, last: int) -> tuple[np.ndarray, bool]:
    """The output at steps 0 to ``last`` (last + 1, R) when the agent sees pictures (R, H, W, C) of
    a state, and whether the episode of the first one has ended."""
    number = len(shown)
    hidden = torch.from_numpy(entering).expand(number, -1).to(compute.device)
    frames, over, outputs = shown.copy(), np.zeros(number, dtype=bool), []
    with contextlib.closing(ProcgenVectorEnv(config, number, 0, 0)) as env:
        env.observe()
        env.set_state([state] * number)
        env.observe()
        for step in range(last + 1):
            found = run_policy(policy, compute, frames, hidden)
            actions = found.logits.argmax(dim=-1)
            outputs.append(output(found, actions).double().cpu().numpy())
            if step == last:
                break
            env.act(actions.to(torch.int32).cpu().numpy())
            observation = env.observe()
            over |= observation.first
            frames[~over] = observation.frames[~over]
            going = torch.from_numpy(~over).to(hidden.device)
            hidden = torch.where(going.unsqueeze(-1), found.hidden_states, hidden)
    return np.stack(outputs), bool(over[0])


@torch.no_grad()
def deletion_curves(policy: Policy, compute: Compute, rows: RecordedFrames,
                    scores: Sequence[np.ndarray],
                    output: Output) -> np.ndarray:
    """The output while blocks of the frame go to the mean frame, or come from it, those with the
    largest score first (Petsiuk et al. 2018, "RISE", section 3.3).

    Args:
        scores: of the blocks, by order (M of (N, 8, 8)).

    Returns:
        float64 (N, M, 2, P): deletion and insertion.
    """
    side = FRAME_SIZE // BLOCK
    mean = rows.frames.mean(axis=0)
    changed = np.round(np.linspace(0, side**2, POINTS)).astype(int)
    curves = np.empty((len(rows.frames), len(scores), 2, POINTS))
    with Progress(len(curves), "frame of deletion") as progress:
        for number, frame in enumerate(rows.frames):
            ranks = np.stack([np.argsort(np.argsort(-each[number].ravel(), kind="stable"))
                              for each in scores])  # (M, B)
            gone = ranks[:, None] < changed[:, None]  # (M, P, B)
            hidden = np.stack([gone, ~gone], axis=1).reshape(-1, side, side)
            pixels = hidden.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)[..., None]
            pictures = np.where(pixels, mean, frame).round().astype(np.uint8)
            curves[number] = _outputs(policy, compute, pictures, rows.entering[number],
                                      rows.actions[number], output).reshape(curves.shape[1:])
            progress.update(number + 1)
    return curves


def _outputs(policy: Policy, compute: Compute, pictures: np.ndarray, entering: np.ndarray,
             action: int, output: Output) -> np.ndarray:
    """The output on pictures (R, H, W, C), with one state entering: (R,)."""
    found = []
    for begin in range(0, len(pictures), _FRAMES_A_PASS):
        some = pictures[begin:begin + _FRAMES_A_PASS]
        states = torch.from_numpy(entering).expand(len(some), -1).to(compute.device)
        answer = run_policy(policy, compute, some, states)
        actions = torch.full((len(some),), int(action), device=compute.device)
        found.append(output(answer, actions).double().cpu().numpy())
    return np.concatenate(found)
