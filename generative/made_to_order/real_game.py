"""The real game from a recorded start: the recording is replayed up to it, then the agent plays on.

Letters in shape comments: P plays, T steps, D agent hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agents.networks import to_images
from agents.replay import recorded_game, replay
from agents.rollout_files import RolloutFolder
from agents.scopes import cached
from common.devices import Compute
from envs.procgen_env import LevelSlots
from generative.agent_inside import AgentInside
from generative.dataset import WindowPlace
from generative.made_to_order.targets import Answers


def play_on(agent: AgentInside, compute: Compute, folder: RolloutFolder,
            places: Sequence[WindowPlace], step: int,
            layers: tuple[str, ...]) -> tuple[Answers, np.ndarray]:
    """Replay recordings up to a frame each, and let the agent take its likeliest actions then.

    The state that enters at the frame is the recorded one.

    Args:
        step: last step, counted from the frame, as a simulation's are.

    Returns:
        The answers (T, P), those at the last frame again where an episode ended before; and whether
        it did, bool (P,).

    Raises:
        UserError: if a replay shows other frames than the recording, naming episode and step.
    """
    slots = LevelSlots(recorded_game(folder), len(places))
    hidden = np.zeros((len(places), agent.policy.hidden_state_size), np.float32)
    try:
        for slot, place in enumerate(places):
            for _ in replay(slots, slot, folder, place.episode, place.frame):
                pass
            states = folder.array_files(place.episode).hidden_states
            hidden[slot] = states.rows(place.frame, place.frame + 1)[0]
        return _played(agent, compute, slots, torch.from_numpy(hidden).to(compute.device), step,
                       layers)
    finally:
        slots.close()


@torch.no_grad()
def _played(agent: AgentInside, compute: Compute, slots: LevelSlots, hidden: torch.Tensor,
            step: int, layers: tuple[str, ...]) -> tuple[Answers, np.ndarray]:
    """Where an episode has ended, the agent sees its last frame again, in the same state."""
    frames, ended, outputs = slots.frames.copy(), np.zeros(len(hidden), dtype=bool), []
    with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
        for t in range(step + 1):
            images = to_images(torch.from_numpy(frames.copy()).to(compute.device),
                               compute.channels_last)
            outputs.append(agent.step(images, hidden))
            if t == step:
                break
            actions = outputs[-1].log_probs.argmax(dim=-1).tolist()
            for slot in np.flatnonzero(~ended):
                ended[slot] = slots.step(slot, actions[slot])[1]
            going = torch.from_numpy(~ended)
            frames[~ended] = slots.frames[~ended]
            hidden = torch.where(going.unsqueeze(-1).to(hidden.device), outputs[-1].hidden_states,
                                 hidden)
    return Answers.of(outputs, activations, agent.policy), ended
