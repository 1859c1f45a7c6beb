"""The steps of simulated samples that are analysed, and the simulated quantities at each of them.

Letters in shape comments: M samples, T steps of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from generative.sample_files import SampleFolder

ENDED = 0.5  # probability of a terminal above which an episode counts as ended


def chosen_samples(folder: SampleFolder, num_samples: int, flag: str = "num_samples") -> list[int]:
    """Numbers of the first ``num_samples`` samples.

    Args:
        flag: that says how many, for the message.

    Raises:
        UserError: if there are fewer, saying how many.
    """
    numbers = folder.numbers()
    if len(numbers) < num_samples:
        raise UserError(f"{num_samples} simulated samples are asked for, but {folder.path} holds "
                        f"only {len(numbers)}; record more, or give --{flag} {len(numbers)}")
    return numbers[:num_samples]


def simulated_states(folder: SampleFolder, field: str, numbers: Sequence[int]) -> np.ndarray:
    """``hidden_states`` or ``env_h`` of samples, one below the other (M * T, units).

    Raises:
        UserError: see ``SampleFolder.stacked``.
    """
    states = folder.stacked_field(field, numbers)  # (M, T, units)
    return states.reshape(-1, states.shape[-1])


@dataclasses.dataclass(frozen=True)
class SimulatedSteps:
    """Simulated quantities at each step of several samples, all (M * T,).

    Attributes:
        sample: number of the sample.
        step: of the sample, from 0.
        value: the agent's.
        reward: in the unit of the recorded data.
        terminal: probability that the episode ends at this step.
        action: that entered the step, -1 where it is not known.
        num_samples: M.
    """

    sample: np.ndarray
    step: np.ndarray
    value: np.ndarray
    reward: np.ndarray
    terminal: np.ndarray
    action: np.ndarray
    num_samples: int

    @property
    def num_steps(self) -> int:
        """Of one sample, T."""
        return len(self.sample) // self.num_samples

    def by_sample(self, values: np.ndarray) -> np.ndarray:
        """Numbers for each step (M * T,) as (M, T)."""
        return values.reshape(self.num_samples, -1)


def simulated_steps(folder: SampleFolder, numbers: Sequence[int]) -> SimulatedSteps:
    """The steps of these samples.

    Raises:
        UserError: see ``SampleFolder.stacked``.
    """
    value, reward, terminal = (folder.stacked_field(field, numbers)
                               for field in ("values", "rewards", "terminals"))
    action = folder.stacked_field("actions", numbers)
    num_samples, num_steps = value.shape
    for name, array in (("rewards", reward), ("terminals", terminal), ("actions", action)):
        if array.shape != value.shape:
            raise UserError(f"the samples of {folder.path} have {num_steps} values each, but "
                            f"{array.shape[1]} {name}; record them again")
    return SimulatedSteps(
        sample=np.repeat(np.asarray(numbers), num_steps),
        step=np.tile(np.arange(num_steps), num_samples), value=value.ravel(),
        reward=reward.ravel(), terminal=terminal.ravel(), action=action.ravel(),
        num_samples=num_samples)
