"""Splits of recorded states into two classes by action, value, reward or cluster.

A split is given on the command line as ``action=right,upright``, ``value=0.2``, ``reward=8`` or
``cluster=3``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from agents.rollout_files import RolloutFolder
from analysis.steps import check_episodes
from common.errors import UserError, nearest
from common.game_constants import ACTION_LABELS, NUM_ACTIONS

NO_CLUSTER = -1
WORDS = {"action": "action=right,upright: states in which one of these actions was taken, against "
                   "all others",
         "value": "value=0.2: the fifth of the states with the largest values against that with "
                  "the smallest",
         "reward": "reward=8: a reward above 0 within the next 8 steps, against none",
         "cluster": "cluster=3: this cluster of hidden_analysis_precompute.py against the others"}


@dataclasses.dataclass(frozen=True)
class Split:
    """Recorded states in two classes.

    Attributes:
        rows: row indices of the states in the concatenated episodes, ascending (n,).
        is_in: whether each state is in the first class, bool (n,).
    """

    rows: np.ndarray
    is_in: np.ndarray

    def some(self, number: int, seed: int) -> Split:
        """Return a random subset with at most ``number`` states of each class."""
        rng = np.random.default_rng(seed)
        chosen = np.sort(np.concatenate([
            rng.permutation(np.flatnonzero(self.is_in == which))[:number]
            for which in (True, False)]))
        return Split(self.rows[chosen], self.is_in[chosen])


@dataclasses.dataclass(frozen=True)
class States:
    """Inputs of the agent at recorded states, in the order of their rows.

    Attributes:
        frames: frames, uint8 (n, 64, 64, 3).
        entering: hidden states that enter the agent with the frames, float32 (n, D).
        levels: level seeds, int64 (n,).
    """

    frames: np.ndarray
    entering: np.ndarray
    levels: np.ndarray


def split_states(text: str, steps: pd.DataFrame, clusters: Callable[[], np.ndarray]) -> Split:
    """Split the steps of a recording into two classes; terminal steps are left out.

    Args:
        text: split, in the form of one of WORDS.
        steps: steps of all episodes, from ``RolloutFolder.all_steps``.
        clusters: function that reads the cluster of each step, NO_CLUSTER for none.

    Raises:
        UserError: if the text cannot be parsed, or if there is no such action or cluster.
    """
    word, equals, value = text.partition("=")
    if word not in WORDS or not equals:
        raise UserError(f"there is no split '{text}'{nearest(word, WORDS)}; a split is such as "
                        f"{WORDS.get(word, WORDS['action'])}")
    counted = steps["done"].to_numpy() == 0
    if word == "action":
        is_in = np.isin(steps["action"], [_action(name) for name in value.split(",")])
    elif word == "value":
        share = _number(value, float, word)
        if not 0 < share <= 0.5:
            raise UserError(f"a split by value takes a share above 0 and up to 0.5, not {value}")
        values = steps["value"].to_numpy()
        low, high = np.quantile(values[counted], (share, 1 - share))
        is_in = values >= high
        counted &= is_in | (values <= low)
    elif word == "reward":
        is_in = _rewarded_within(steps, int(_number(value, int, word)))
    else:
        number, labels = _number(value, int, word), clusters()
        if len(labels) != len(steps):
            raise UserError(f"there are clusters of {len(labels)} states, but the recording has "
                            f"{len(steps)} of so many episodes; give --num_episodes and the "
                            "recording that were analysed")
        if number not in labels or number == NO_CLUSTER:
            raise UserError(f"there is no cluster {number}: they are numbered 0 to {labels.max()}")
        is_in = labels == number
        counted &= labels != NO_CLUSTER
    rows = np.flatnonzero(counted)
    return Split(rows, is_in[rows])


def _action(name: str) -> int:
    if name.isdecimal() and int(name) < NUM_ACTIONS:
        return int(name)
    if name not in ACTION_LABELS:
        raise UserError(f"there is no action '{name}'{nearest(name, ACTION_LABELS)}; numbers from "
                        f"0 to {NUM_ACTIONS - 1} will do, too")
    return ACTION_LABELS.index(name)


def _number(text: str, kind: type, word: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{word} takes a {'whole ' * (kind is int)}number, not '{text}'; a split "
                        f"is such as {WORDS[word]}") from None


def _rewarded_within(steps: pd.DataFrame, number: int) -> np.ndarray:
    """Return whether one of the next ``number`` steps of the same episode has a reward above 0.

    A reward is stored in the row of the frame it arrived with.
    """
    if number < 1:
        raise UserError(f"a split by reward takes at least 1 step, not {number}")
    rows = np.arange(len(steps))
    rewarded = np.where(steps["reward"] > 0, rows, len(steps) + number)
    upcoming = np.append(np.minimum.accumulate(rewarded[::-1])[::-1], len(steps) + number)[1:]
    episodes = steps["episode"].to_numpy()
    last = np.searchsorted(episodes, episodes, side="right") - 1  # last row of the same episode
    return upcoming <= np.minimum(rows + number, last)


def read_states(folder: RolloutFolder, num_episodes: int, rows: np.ndarray,
                steps: pd.DataFrame) -> States:
    """Read frames and entering hidden states at some steps of the first episodes.

    Args:
        folder: folder of the recording.
        num_episodes: number of episodes.
        rows: row indices of the steps, ascending (n,).
        steps: table of all steps of these episodes.

    Raises:
        UserError: if there are fewer episodes, or if a file is missing or damaged; the message
            names it.
    """
    check_episodes(folder, num_episodes)
    frames, entering, begin = [], [], 0
    for number in range(num_episodes):
        files = folder.array_files(number)
        length = files.log_probs.shape[0]
        inside = rows[(rows >= begin) & (rows < begin + length)] - begin
        begin += length
        if len(inside):
            episode = files.frames.rows(0, length)[inside]
            frames.append(np.moveaxis(episode, 1, -1))
            entering.append(files.hidden_states.rows(0, length)[inside])
    if begin != len(steps):
        raise UserError(f"the tables of {folder.path} have {len(steps)} rows for {begin} recorded "
                        "steps; record these episodes again")
    levels = steps["level_seed"].to_numpy()[rows].astype(np.int64)
    return States(np.concatenate(frames), np.concatenate(entering), levels)
