"""Labels of recorded steps, computed in the real game: file format, writer and reader.

Layout of a folder of labels, which ``analysis/level_labels.py`` writes::

    labels_00000.npz     labels of one episode: names (K,), labels float32 (L, K), see
                         ``envs.labels.state_labels``; cause of the failure, see
                         ``agents.failures.causes_of``, or "solved"
    episodes.csv         one row per episode: episode, level_seed, length (steps), cause
    distribution.csv     one row per label: label, known (share of the steps with a value), mean,
                         std, minimum, maximum

Letters in shape comments: L steps of an episode, without the terminal row; N steps of all
episodes; K labels; D hidden units; A actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.episodes import SOLVED
from agents.failures import FailureAttributor
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from common.game_constants import ACTION_DIRECTIONS
from common.options import ComputeOptions, Options, option
from common.results import Array, Entry, Npz, ResultStore, Schema, Table
from envs.labels import ON_GROUND, label_names, state_labels
from envs.objects import hazards_of

LEVEL_LABELS = Schema("level labels", "analysis/level_labels.py", items={
    "labels": Entry("labels_{:0>5}.npz", Npz({
        "names": Array(np.str_, "K"), "labels": Array(np.float32, "L K", finite=False),
        "cause": Array(np.str_)}))},
    results={"episodes": Entry("episodes.csv", Table(
                 {"episode": int, "level_seed": int, "length": int, "cause": str})),
             "distribution": Entry("distribution.csv", Table({"label": str, "mean": float}))})
AHEAD = 4.0  # cells to the right of the player in which an object counts as ahead
RIGHT, JUMPS = np.transpose(ACTION_DIRECTIONS) > 0  # masks of actions to the right, and up (A,)
LEFT = np.transpose(ACTION_DIRECTIONS)[0] < 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingOptions(Options):
    """Options of the recording that a study of an agent reads."""

    agent_file: Path = option(help="file of the recorded agent")
    data_dir: Path = option(help="data folder of the recording, from record.py --no_action_noise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledRecordingOptions(RecordingOptions, ComputeOptions):
    """Options of a study that reads a recording with labels."""

    labels_dir: Path = option(Path("analysis/memory/level_labels"),
                              "labels of the recording, from analysis/level_labels.py")
    overwrite: bool = option(False, "delete the previous contents of the folder")

    @functools.cached_property
    def examples(self) -> Examples:
        """Steps of the recording; see ``read_examples``."""
        return read_examples(self.data_dir, self.labels_dir, self.agent_file)


def label_episodes(folder: RolloutFolder, episodes: Sequence[int]
                   ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Replay episodes of a recording in the real game, and compute the labels of their steps.

    Args:
        folder: the recording.
        episodes: numbers of the episodes.

    Yields:
        Number of an episode, and the arrays of ``LEVEL_LABELS``.

    Raises:
        UserError: if a frame differs from the recording, or an episode ends earlier; see
            ``agents.replay.level_states``.
    """
    config = recorded_game(folder)
    names = label_names(config.env_name)
    with contextlib.closing(FailureAttributor(config)) as attributor:
        for episode in episodes:
            actions = folder.steps(episode)["action"].to_numpy()[:-1]
            rows = []
            for _, state in level_states(folder, episode, range(len(actions))):
                labels = state_labels(state)
                rows.append([labels[name] for name in names])
            cause = attributor.cause(state.to_bytes(), int(actions[-1]))
            yield episode, {"names": np.array(names), "labels": np.array(rows, np.float32),
                            "cause": np.array(cause or SOLVED)}


def describe_labels(labels: pd.DataFrame) -> pd.DataFrame:
    """Summarise the distribution of each label over the steps at which it has a value.

    Args:
        labels: one row per step and one column per label; NaN for a missing value.

    Returns:
        Table ``distribution.csv``, see the module docstring.
    """
    summary = labels.agg(["mean", "std", "min", "max"]).T
    return pd.DataFrame({
        "label": labels.columns, "known": labels.notna().mean().to_numpy(),
        **{name: summary[column].to_numpy() for name, column in (
            ("mean", "mean"), ("std", "std"), ("minimum", "min"), ("maximum", "max"))}})


@dataclasses.dataclass(frozen=True)
class Examples:
    """Steps of recorded episodes with their labels, without terminal rows.

    The steps of an episode are consecutive rows, in order.

    Attributes:
        folder: the recording.
        level: seed of each step's level, int64 (N,).
        episode: number of each step's episode, int64 (N,).
        step: step within the episode, from 0, int64 (N,).
        hidden_out: hidden state that leaves the agent at each frame, float32 (N, D).
        actions: actions, int64 (N,).
        labels: float32 table with one row per step. In addition to the labels of
            ``envs.labels.state_labels``, it has ``steps_to_end`` (number of actions up to the end
            of the episode, 1 at the last step), ``fails`` (whether the episode fails) and, for each
            hazard, ``fails_by_<hazard>`` (whether this hazard causes the failure). Games with
            ``on_ground`` also have ``steps_since_jump``: number of steps since the last earlier
            step at which a jump action was taken on the ground, NaN before the first.
    """

    folder: RolloutFolder
    level: np.ndarray
    episode: np.ndarray
    step: np.ndarray
    hidden_out: np.ndarray
    actions: np.ndarray
    labels: pd.DataFrame

    def __len__(self) -> int:
        return len(self.step)

    def before(self, name: str, k: int) -> np.ndarray:
        """Return the value of a label k steps earlier in the same episode, float32 (N,); NaN at the
        first k steps of an episode."""
        values = self.labels[name].to_numpy()
        return np.where(self.step >= k, values[np.maximum(np.arange(len(self)) - k, 0)],
                        np.float32(np.nan))

    def action_ahead(self, k: int) -> np.ndarray:
        """Return the action k steps later in the same episode, int64 (N,); -1 at the last k
        steps of an episode."""
        later = np.minimum(np.arange(len(self)) + k, len(self) - 1)
        return np.where(self.labels["steps_to_end"] > k, self.actions[later], -1)

    def ahead(self, kind: str) -> np.ndarray:
        """Return whether the nearest object of a kind in view is to the right of the player, by at
        most AHEAD cells, bool (N,); False if none is in view."""
        dx = self.labels[f"{kind}_dx"].to_numpy()
        return (dx > 0) & (dx <= AHEAD)

    def left_view(self, kind: str, k: int) -> np.ndarray:
        """Return whether a kind of object that is out of view now was in view k steps ago.

        Args:
            kind: name of the kind of object.
            k: number of steps, at least 1.

        Returns:
            Float32 (N,): 1 if the kind was in view k steps ago and at no step since, 0 if it is in
            view neither now nor k steps ago, otherwise NaN.
        """
        earlier = self.before(f"{kind}_in_view", k)
        since = np.stack([self.before(f"{kind}_in_view", steps) for steps in range(k)])
        values = np.full(len(self), np.nan, np.float32)
        values[(earlier == 1) & (since == 0).all(axis=0)] = 1
        values[(earlier == 0) & (since[0] == 0)] = 0
        return values

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """Read the frames of the given rows, uint8 (rows, 64, 64, 3).

        Args:
            rows: indices of the rows, in any order, int (rows,).
        """
        rows = np.asarray(rows)
        frames = np.empty((len(rows), *self.folder.array_files(int(self.episode[0])).frames
                           .shape[1:]), np.uint8)
        for episode in np.unique(self.episode[rows]):
            places = np.flatnonzero(self.episode[rows] == episode)
            steps = self.step[rows[places]]
            first = int(steps.min())
            file = self.folder.array_files(int(episode)).frames
            frames[places] = file.rows(first, int(steps.max()) + 1)[steps - first]
        return np.moveaxis(frames, 1, -1)


def read_examples(data_dir: Path, labels_dir: Path, agent_file: Path) -> Examples:
    """Read the steps of a recording and their labels.

    Args:
        data_dir: the recording, made without action noise.
        labels_dir: labels of the recording, from ``analysis/level_labels.py``.
        agent_file: the agent that was recorded.

    Raises:
        UserError: if the recording was made with another agent, or the labels belong to another
            recording; or if a file is missing or damaged.
    """
    folder, store = RolloutFolder(data_dir), ResultStore(labels_dir, LEVEL_LABELS)
    folder.check_agent(agent_file)
    if store.settings().get("recording_sha256") != folder.sha256():
        raise UserError(f"{labels_dir} holds labels of a different recording; run "
                        f"{LEVEL_LABELS.script} with {data_dir}")
    lengths = folder.index()["episode"].value_counts().sort_index() - 1
    game, causes, tables, hidden = recorded_game(folder).env_name, [], [], []
    for episode, length in lengths.items():
        stored = store.read("labels", episode)
        if len(stored["labels"]) != length:
            raise UserError(f"{store.file_of('labels', episode)} has {len(stored['labels'])} "
                            f"steps, but the episode has {length}")
        causes.append(str(stored["cause"]))
        tables.append(pd.DataFrame(stored["labels"], columns=stored["names"]))
        hidden.append(folder.array_files(episode).hidden_states.rows(1, length + 1))
    steps = folder.all_steps(lengths.index)
    steps = steps[np.arange(len(steps)) != np.repeat(
        (lengths + 1).cumsum().to_numpy() - 1, lengths + 1)]
    step = steps["episode_step"].to_numpy()
    actions = steps["action"].to_numpy()
    labels = pd.concat(tables, ignore_index=True)
    if ON_GROUND in labels:
        labels["steps_since_jump"] = _steps_since(
            JUMPS[actions] & (labels[ON_GROUND].to_numpy() == 1), step)
    labels["steps_to_end"] = np.float32(np.repeat(lengths.to_numpy(), lengths) - step)
    cause = np.repeat(causes, lengths)
    labels["fails"] = np.float32(cause != SOLVED)
    for kind in hazards_of(game):
        labels[f"fails_by_{kind.name}"] = np.float32(cause == kind.name)
    return Examples(folder, steps["level_seed"].to_numpy(), steps["episode"].to_numpy(), step,
                    np.concatenate(hidden), actions, labels)


def _steps_since(event: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Count the steps since the last earlier event in the same episode.

    Args:
        event: whether the event happens at each step, bool (N,).
        step: step within the episode (N,).

    Returns:
        Float32 (N,); NaN before the first event of the episode.
    """
    rows = np.arange(len(event))
    last = np.maximum.accumulate(np.where(event, rows, -1))  # up to and including each step
    last = np.concatenate([[-1], last[:-1]])
    return np.where(last >= rows - step, rows - last, np.nan).astype(np.float32)
