"""Effects at decision squares of multiplying the positive and negative parts of channels.

Letters in shape comments: N forks, K outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.acting import run_policy
from agents.hooks import patched
from agents.layers import Layer
from agents.networks import Policy
from agents.reference_set import ReferenceSet
from common.devices import Compute
from common.errors import UserError
from common.progress import with_progress
from interventions.controls import controls_of
from interventions.patches import Multiply
from maze.field.fields import STAY, frame_source, grouped
from maze.field.outcomes import AT_DECISION, at_decisions, decision_steps
from maze.level.state import MazeState
from stats.effects import Condition, Outcome, check_starts, compare_conditions

OUTCOMES = (Outcome("p_cheese", "P(cheese)", probability=True),
            Outcome("p_corner", "P(corner)", probability=True),
            Outcome("p_other", "P(other)", probability=True),
            Outcome("log_odds", "log-odds of cheese against corner"),
            Outcome("value", "value estimate (return)"),
            Outcome("stay", "P(stay)", probability=True))
EFFECT_COLUMNS = {  # of the table of effects
    "arm": str, "label": str, "pattern": str, "control": bool, "moved": float, "outcome": str,
    **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                     "control_low", "control_high"), float), "num_controls": int,
    "p_control": float, "claimed": bool,
    **dict.fromkeys(("median_unaltered", "median_altered", "median_effect", "median_low_95",
                     "median_high_95", "margin"), float), "verdict": str, "smallest_effect": float}
_TAKEN = [AT_DECISION.index(outcome.name) for outcome in OUTCOMES[:-1]]


def factor(text: str) -> tuple[float, float]:
    """Factors of the positive and negative parts, from ``2`` (both), or as a patch has it from
    ``positive:2,negative:0``, of which one that is left out is 1.

    Raises:
        ValueError: if it is neither.
    """
    number = r"-?\d+(?:\.\d+)?"
    if re.fullmatch(number, text):
        return float(text), float(text)
    parts = dict(re.findall(f"(positive|negative):({number})(?:,|$)", text))
    if ",".join(f"{name}:{value}" for name, value in parts.items()) != text or not parts:
        raise ValueError(f"'{text}'")
    return float(parts.get("positive", 1)), float(parts.get("negative", 1))


class Decisions:
    """The pictures of the decision squares of forks, and what an agent does there.

    Args:
        states: levels, of which those that are no forks are left out.

    Attributes:
        states: the forks.

    Raises:
        UserError: if there are fewer than 10.
    """

    def __init__(self, policy: Policy, compute: Compute, states: Sequence[MazeState]):
        self.policy, self.compute = policy, compute
        self.states, steps, frames = [], [], []
        for state in states:
            try:
                steps.append(decision_steps(state.grid))
            except UserError:
                continue
            self.states.append(state)
            square = np.array([state.grid.decision_square()])
            frames.append(frame_source(state)(square, np.zeros(1, np.int64)))
        check_starts(len(self.states))
        self._steps, self._frames = np.array(steps), np.concatenate(frames)

    def outcomes(self) -> np.ndarray:
        """OUTCOMES, float64 (N, K); patches of open scopes act on them."""
        output = run_policy(self.policy, self.compute, self._frames,
                            self.policy.initial_states(len(self._frames)))
        logs = grouped(output.log_probs.cpu().numpy())
        found = at_decisions(logs, output.values.cpu().numpy(), *self._steps.T)[:, _TAKEN]
        probs = np.exp(logs)
        return np.column_stack([found, probs[:, STAY] / probs.sum(axis=1)])


def effects(decisions: Decisions, layer: Layer, sets: Sequence[Sequence[int]],
            factors: Sequence[tuple[float, float]], reference: ReferenceSet, num_controls: int,
            seed: int) -> pd.DataFrame:
    """The effect of each factor on each set of channels, and on random sets of equal change.

    Args:
        sets: channels of the layer.
        factors: of their positive and negative parts.
        reference: pictures of other levels, on which the size of a change is measured.
        num_controls: random sets a factor and set.
        seed: of the random sets, the bootstrap and the sign flips.

    Returns:
        The table of ``stats.effects.compare_conditions``, with EFFECT_COLUMNS.

    Raises:
        UserError: if so many random sets cannot be drawn.
    """
    policy = decisions.policy
    std = {layer.name: reference.std(policy, layer)}
    arms, moved, after = [], {}, []
    for channels in sets:
        for positive, negative in factors:
            patch = Multiply(layer.name, channels=tuple(channels), positive=positive,
                             negative=negative)
            name = _name(channels, positive, negative)
            controls = controls_of(policy, [patch], num_controls, seed, reference)
            made = [(Condition(name, name, name, False), (patch,)), *(
                (Condition(f"{name} control {number}", "channels " + ",".join(
                    map(str, control.drawn[0]["channels"])), name, True), control.patches)
                for number, control in enumerate(controls))]
            for arm, patches in with_progress(made, len(made), "arm"):
                with patched(policy, patches, std) as scope:
                    after.append(decisions.outcomes())
                arms.append(arm)
                moved[arm.name] = scope.changes()[0].in_std
    before, after = decisions.outcomes(), np.stack(after)
    return compare_conditions(arms, OUTCOMES, before, after, seed, moved=moved)


def _name(channels: Sequence[int], positive: float, negative: float) -> str:
    what = (f"times {positive:g}" if positive == negative else
            f"positive part times {positive:g}, negative {negative:g}")
    return f"channels {' '.join(map(str, channels))} {what}"
