"""Read-out weights of the agent in the space of its independent components (ICs): the change
of logits and value for one unit of an IC, a standard deviation over the recorded states.

Letters in shape comments: A actions, I ICs, D hidden units.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import torch

from agents.networks import Policy
from analysis.influences.gradients import ic_name
from interventions.projector import Projector

VALUE_ROW = "value"


@dataclasses.dataclass(frozen=True)
class Readout:
    """The weights.

    Attributes:
        policy: of the logits (A, I).
        value: of the value estimate (I,).
    """

    policy: np.ndarray
    value: np.ndarray

    @property
    def preferences(self) -> np.ndarray:
        """``policy`` less its mean over the actions (A, I): what is added to all logits alike
        changes no probability."""
        return self.policy - self.policy.mean(axis=0)

    def table(self, action_names: tuple[str, ...]) -> pd.DataFrame:
        """A row for each action, and one for the value; columns ``output``, ``kind`` (logit,
        preference or value), then the ICs."""
        ics = [ic_name(i) for i in range(len(self.value))]
        rows = [[name, kind, *weights] for kind, matrix in (
            ("logit", self.policy), ("preference", self.preferences))
            for name, weights in zip(action_names, matrix)]
        rows.append([VALUE_ROW, "value", *self.value])
        return pd.DataFrame(rows, columns=["output", "kind", *ics])


@torch.no_grad()
def readout(policy: Policy, projector: Projector) -> Readout:
    """The weights of both heads times the change of the hidden units for a unit of each IC.

    These are the columns of the inverse map from hidden units to ICs, not rows of the map: to raise
    one IC and leave the others as they are, the state has to move along such a column.
    """
    return Readout(projector.gradient(policy.fc_policy.weight, "ica").numpy(),
                   projector.gradient(policy.fc_value.weight, "ica")[0].numpy())
