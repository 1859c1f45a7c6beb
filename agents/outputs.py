"""Named scalar outputs of an agent at one step: the targets of gradients and attributions.

Saliency and influence analyses use only the outputs in ``ANSWERS``; attributions use all outputs.

Letters in shape comments: … any leading dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agents.networks import PolicyOutput
from common.errors import UserError, nearest
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES, NUM_ACTIONS

VALUE, TAKEN, STILL = "value", "taken", "still"
POLICY = "policy"  # stands for the log-probabilities of actions and directions
PUBLISHED_POLICY = "published_policy"  # stands for the logits and their sums by direction
_LEFTWARDS = [ACTION_NAMES.index(name) for name in ("downleft", "left", "upleft")]
# Functions of an agent's values (…,) and log_probs (…, A).
ANSWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    VALUE: lambda values, log_probs: values,
    "action": lambda values, log_probs: log_probs.max(dim=-1).values,
    "leftwards": lambda values, log_probs: log_probs[..., _LEFTWARDS].mean(dim=-1),
    "jumping_up": lambda values, log_probs: log_probs[..., ACTION_NAMES.index("up")],
    "jumping_right": lambda values, log_probs: log_probs[..., ACTION_NAMES.index("upright")],
}
_NUMBERS = range(NUM_ACTIONS)
# Action numbers by name and by direction; an action such as "upleft" has two directions.
_ALONE = {**{name: [number] for number, name in enumerate(ACTION_NAMES)},
          "other": list(_NUMBERS[len(ACTION_NAMES):])}
_DIRECTIONS = {
    **{name: [number for number in _NUMBERS if ACTION_DIRECTIONS[number][axis] == sign]
       for name, axis, sign in (("left", 0, -1), ("right", 0, 1), ("up", 1, 1), ("down", 1, -1))},
    STILL: [number for number in _NUMBERS if ACTION_DIRECTIONS[number] == (0, 0)]}
# Action numbers of each output, by its name. The output is the logarithm of their total
# probability. Direction "left" is called "any_left", because there is also an action "left".
_LOG_PROBS = {
    **{f"log_prob_{name}": numbers for name, numbers in _ALONE.items()},
    **{"log_prob_still" if name == STILL else f"log_prob_any_{name}": numbers
       for name, numbers in _DIRECTIONS.items()}}
_LOGITS = {
    **{f"logit_{number}": [number] for number in _NUMBERS},
    **{"logit_sum_none" if name == STILL else f"logit_sum_{name}": numbers
       for name, numbers in _DIRECTIONS.items()}}
_GROUPS = {POLICY: tuple(_LOG_PROBS), PUBLISHED_POLICY: tuple(_LOGITS)}


@dataclasses.dataclass(frozen=True)
class Output:
    """Scalar output of an agent.

    Attributes:
        name: one of the names that ``output_names`` returns.
    """

    name: str

    def __call__(self, output: PolicyOutput, actions: Tensor) -> Tensor:
        """Compute the scalar at every leading index.

        Args:
            output: outputs of the agent, with leading dimensions (…).
            actions: actions taken, int64 (…,).

        Returns:
            Scalars (…,): values in the unit of the training rewards, log-probabilities in nats,
            or logits.
        """
        if self.name in ANSWERS:
            return ANSWERS[self.name](output.values, output.log_probs)
        if self.name == TAKEN:
            return output.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        if self.name in _LOG_PROBS:
            return torch.logsumexp(output.log_probs[..., _LOG_PROBS[self.name]], dim=-1)
        return output.logits[..., _LOGITS[self.name]].sum(dim=-1)


def output_names() -> tuple[str, ...]:
    """Return the names of all outputs.

    - ``value``;
    - ``log_prob_<action>``;
    - ``log_prob_any_<direction>`` and ``log_prob_still``: log of the total probability of the
      actions in a direction, and of those in none;
    - ``taken``: log-probability of the action taken;
    - the other names in ``ANSWERS``;
    - ``logit_<number>`` of an action, and ``logit_sum_<direction>``.
    """
    return (VALUE, *_LOG_PROBS, TAKEN, *(name for name in ANSWERS if name != VALUE), *_LOGITS)


def outputs_named(names: Sequence[str]) -> tuple[Output, ...]:
    """Return the outputs with the given names, without duplicates.

    Args:
        names: output names; ``policy`` stands for all log-probabilities of actions and directions,
            ``published_policy`` for all logits and their sums by direction.

    Raises:
        UserError: if there is no such output; the message suggests a name or lists all.
    """
    known = output_names()
    expanded: list[str] = []
    for name in names:
        if name not in known and name not in _GROUPS:
            raise UserError(f"there is no output '{name}'{nearest(name, (*_GROUPS, *known))}")
        expanded += _GROUPS.get(name, (name,))
    return tuple(map(Output, dict.fromkeys(expanded)))
