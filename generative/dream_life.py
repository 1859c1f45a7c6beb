"""Outcomes when the agent continues a recording in the simulator ("dream") and in the real game.

Both worlds start from the same recorded frames, half of which lie shortly before the end of an
episode. The agent starts with the recorded hidden state and takes its most likely action at every
step.

Letters in shape comments: N starts, T steps, E episodes, D agent hidden state, A actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from agents.acting import run_policy
from agents.replay import recorded_game, replay
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.progress import with_progress
from envs.procgen_env import LevelSlots
from generative.dataset import RolloutDataset, WindowPlace
from generative.networks import Draw
from generative.simulator import Simulator, stack
from stats.bootstrap import ClusterBootstrap, by_episode

COIN, DEATH, NEITHER = OUTCOMES = ("coin", "death", "neither")
HORIZONS = (16, 32)  # numbers of actions
BEFORE_END = range(4, 13)  # actions between a start and the recorded end
BATCH = 20  # starts per batch
TIME_LIMIT = 1000  # steps after which Procgen ends an episode
POSITIVE = 0.1  # threshold of a positive reward at the end of a dream, in units of the coin reward


@dataclasses.dataclass(frozen=True)
class Life:
    """Outcome of one start in one world.

    Attributes:
        outcome: the first of ``OUTCOMES`` to happen.
        step: number of actions until the outcome; the horizon if it is ``neither``.
        actions: actions that the agent took, int64 (at most T,).
    """

    outcome: str
    step: int
    actions: np.ndarray

    def within(self, horizon: int) -> str:
        """Outcome within ``horizon`` actions."""
        return self.outcome if self.step <= horizon else NEITHER


@dataclasses.dataclass(frozen=True)
class LifeStart(WindowPlace):
    """A recorded frame from which both worlds start, and at which the agent first acts.

    Attributes:
        near_end: whether the frame was chosen because the recorded episode ends soon after it.
    """

    near_end: bool = False


def choose_starts(dataset: RolloutDataset, episodes: Sequence[int], number: int,
                  seed: int) -> list[LifeStart]:
    """Draw starts, half of them 4 to 12 actions before the end of a recorded episode.

    Args:
        episodes: numbers on disk of the episodes to draw from.
        number: number of starts; each frame is drawn at most once.

    Raises:
        UserError: if the episodes have too few frames.
    """
    rng, first = np.random.default_rng(seed), dataset.num_init_steps - 1
    near: list[LifeStart] = []
    anywhere: list[LifeStart] = []
    for episode in episodes:
        last = dataset.folder.array_files(episode).frames.shape[0] - 1  # terminal row
        anywhere += [LifeStart(episode, frame) for frame in range(first, last)]
        if last < TIME_LIMIT:
            near += [LifeStart(episode, last - steps, near_end=True) for steps in BEFORE_END
                     if last - steps >= first]
    num_near = number // 2
    if len(near) < num_near or len(anywhere) < number:
        raise UserError(f"{dataset.folder.path} has only {len(anywhere)} frames to start from, "
                        f"{len(near)} of them shortly before an end; lower --life_starts")
    chosen = [near[i] for i in rng.permutation(len(near))[:num_near].tolist()]
    taken = {(start.episode, start.frame) for start in chosen}
    others = [start for start in anywhere if (start.episode, start.frame) not in taken]
    return chosen + [others[i] for i in rng.permutation(len(others))[:number - num_near].tolist()]


def coin_reward(dataset: RolloutDataset, episodes: Sequence[int]) -> float:
    """Return the largest reward of recorded episodes, which is the reward of their coin.

    Raises:
        UserError: if no reward is above 0.
    """
    largest = max(float(dataset.folder.steps(episode)["reward"].max()) for episode in episodes)
    if largest <= 0:
        raise UserError(f"{dataset.folder.path} has no rewarded episode, so life in the dream has "
                        "no coin to reach; leave out --life_starts")
    return largest


@torch.no_grad()
def live_in_dream(simulator: Simulator, folder: RolloutFolder, starts: Sequence[LifeStart],
                  draw: Draw, reward: float, compute: Compute) -> list[Life]:
    """Let the agent play in the simulator.

    A coin is a simulated reward of at least half of ``reward``, or an end with a positive reward. A
    death is an end (probability of at least 0.5) without a positive reward.

    Args:
        reward: reward of a recorded coin.
    """
    horizon, num_init = max(HORIZONS), simulator.config.num_init_steps
    frames, hidden, entering = [], [], []
    for start in starts:
        files = folder.array_files(start.episode)
        frames.append(files.frames.rows(start.frame - num_init + 1, start.frame + 1))
        hidden.append(files.hidden_states.rows(start.frame, start.frame + 1)[0])
        entering.append(int(folder.steps(start.episode)["action"].iloc[start.frame - 1]))
    images = torch.from_numpy(np.stack(frames, axis=1)).to(compute.device).float() / 255
    with compute.autocast():
        begin = dataclasses.replace(
            simulator.start_from(simulator.encode(images), draw),
            agent_hidden=torch.from_numpy(np.stack(hidden)).to(compute.device),
            action=simulator.one_hot_actions(torch.tensor(entering, device=compute.device)))
        dream = stack(begin, simulator.imagine(begin, draw, horizon + 1))
    rewards, ends = dream.rewards.float().cpu().numpy(), dream.terminals.float().cpu().numpy()
    actions = dream.own_actions.argmax(dim=-1).cpu().numpy()  # (T + 1, N)
    return [_read_life(rewards[:, n] / reward, ends[:, n], actions[:, n])
            for n in range(len(starts))]


def _read_life(rewards: np.ndarray, ends: np.ndarray, actions: np.ndarray) -> Life:
    """Find the first outcome in a simulation whose step t shows the frame after t actions.

    Args:
        rewards: rewards in units of the coin's reward (T + 1,).
        ends: probability that the episode ends (T + 1,).
    """
    happens = np.flatnonzero((rewards >= 0.5) | (ends >= 0.5))
    if not len(happens):
        return Life(NEITHER, len(rewards) - 1, actions[:-1])
    step = int(happens[0])
    return Life(COIN if rewards[step] > POSITIVE else DEATH, step, actions[:step])


@contextlib.contextmanager
def games_at(folder: RolloutFolder, places: Sequence[WindowPlace],
             ) -> Iterator[tuple[LevelSlots, torch.Tensor]]:
    """Replay recorded episodes, each up to the frame given by its place.

    Yields:
        The games, and the agent's recorded hidden states before these frames (N, D).

    Raises:
        UserError: if a replay deviates from the recorded frames; the message names episode and
            step.
    """
    slots = LevelSlots(recorded_game(folder), len(places))
    try:
        states = []
        for slot, place in enumerate(places):
            for _ in replay(slots, slot, folder, place.episode, place.frame):
                pass
            hidden_states = folder.array_files(place.episode).hidden_states
            states.append(hidden_states.rows(place.frame, place.frame + 1)[0])
        yield slots, torch.from_numpy(np.stack(states))
    finally:
        slots.close()


@torch.no_grad()
def live_in_game(simulator: Simulator, folder: RolloutFolder, starts: Sequence[LifeStart],
                 compute: Compute) -> list[Life]:
    """Let the agent play in the real game, which is replayed up to each start.

    Raises:
        UserError: if a replay deviates from the recorded frames; the message names episode and
            step.
    """
    policy, horizon = simulator.agent.policy, max(HORIZONS)
    actions: list[list[int]] = [[] for _ in starts]
    outcomes: dict[int, tuple[str, int]] = {}
    with games_at(folder, starts) as (slots, states):
        hidden = states.to(compute.device)  # (N, D)
        for step in range(1, horizon + 1):
            output = run_policy(policy, compute, slots.frames.copy(), hidden)
            hidden = output.hidden_states
            chosen = output.log_probs.argmax(dim=-1).tolist()
            for slot in [slot for slot in range(len(starts)) if slot not in outcomes]:
                actions[slot].append(chosen[slot])
                reward, ended = slots.step(slot, chosen[slot])
                if reward > 0:
                    outcomes[slot] = COIN, step
                elif ended:
                    late = starts[slot].frame + step >= TIME_LIMIT
                    outcomes[slot] = NEITHER if late else DEATH, step
    return [Life(*outcomes.get(slot, (NEITHER, horizon)), np.array(taken, np.int64))
            for slot, taken in enumerate(actions)]


def compare_lives(simulator: Simulator, dataset: RolloutDataset, starts: Sequence[LifeStart],
                  draw: Draw, reward: float, compute: Compute) -> pd.DataFrame:
    """Let the agent play in both worlds from all starts.

    Returns:
        A row per start: ``episode``, ``frame``, ``near_end``; for each world (``real``, ``dream``)
        the outcome within each horizon, the ``step`` of the first outcome and the ``actions``,
        separated by spaces; and ``diverges``, the number of actions before the first difference,
        infinite if the actions are equal until one of the lives ends.

    Raises:
        UserError: see ``live_in_game``.
    """
    rows = []
    begins = range(0, len(starts), BATCH)
    for begin in with_progress(begins, len(begins), "batch"):
        part = starts[begin:begin + BATCH]
        worlds = {"real": live_in_game(simulator, dataset.folder, part, compute),
                  "dream": live_in_dream(simulator, dataset.folder, part, draw, reward, compute)}
        for number, start in enumerate(part):
            row = dataclasses.asdict(start)
            for world, lives in worlds.items():
                life = lives[number]
                row |= {f"{world}_{horizon}": life.within(horizon) for horizon in HORIZONS}
                row |= {f"{world}_step": life.step,
                        f"{world}_actions": " ".join(map(str, life.actions))}
            row["diverges"] = divergence(*(worlds[world][number].actions for world in worlds))
            rows.append(row)
    return pd.DataFrame(rows)


def divergence(actions: np.ndarray, others: np.ndarray) -> float:
    """Number of equal actions before the first difference of two sequences; infinite if none."""
    shared = min(len(actions), len(others))
    differs = np.flatnonzero(actions[:shared] != others[:shared])
    return float(differs[0]) if len(differs) else math.inf


def summarize(table: pd.DataFrame, seed: int) -> dict:
    """Confusion, agreement and Cohen's kappa of the outcomes, and the actions of both worlds.

    Args:
        table: table from ``compare_lives``.

    Returns:
        For each group of starts (``all``, ``near_end``, ``anywhere``): per horizon, the
        ``confusion`` (rows are real outcomes, columns dreamt outcomes), ``agreement`` and ``kappa``
        with 95 % intervals over episodes (None where undefined); ``actions``, the share of each
        action in each world; ``action_difference``, half the sum of their absolute differences; and
        ``median_divergence``, None if more than half of the lives never diverge.
    """
    return {name: _summary_of(rows, seed) for name, rows in (
        ("all", table), ("near_end", table[table["near_end"]]),
        ("anywhere", table[~table["near_end"]])) if len(rows)}


def _summary_of(table: pd.DataFrame, seed: int) -> dict:
    episodes = table["episode"].to_numpy()
    bootstrap = ClusterBootstrap(episodes, seed)
    summary: dict[str, Any] = {"starts": len(table), "episodes": bootstrap.num_episodes}
    for horizon in HORIZONS:
        real, dream = (table[f"{world}_{horizon}"].map(OUTCOMES.index).to_numpy()
                       for world in ("real", "dream"))
        cells = np.eye(len(OUTCOMES)**2)[real * len(OUTCOMES) + dream]  # (N, 9)
        confusion = cells.sum(axis=0).reshape(len(OUTCOMES), -1).astype(int)
        summary[f"within_{horizon}"] = {
            "confusion": {name: dict(zip(OUTCOMES, row.tolist()))
                          for name, row in zip(OUTCOMES, confusion)},
            **{name: _estimate(statistic, cells, episodes, bootstrap)
               for name, statistic in (("agreement", agreement), ("kappa", cohens_kappa))}}
    shares = {world: action_shares(table[f"{world}_actions"]) for world in ("real", "dream")}
    median = float(np.sort(table["diverges"].to_numpy())[(len(table) - 1) // 2])
    return {**summary, "actions": {world: share.tolist() for world, share in shares.items()},
            "action_difference": float(abs(shares["real"] - shares["dream"]).sum() / 2),
            "median_divergence": median if math.isfinite(median) else None}


def _estimate(statistic: Callable[[np.ndarray], np.ndarray], cells: np.ndarray,
                   episodes: np.ndarray, bootstrap: ClusterBootstrap) -> dict:
    """Evaluate a function of the confusion matrix, with its 95 % interval over episodes.

    Args:
        cells: cell of the matrix that each start belongs to, one-hot (N, 9).
    """
    sums = by_episode(episodes, cells.T)  # (E, 9)
    ends = (np.full(2, np.nan) if bootstrap.num_episodes < 2 else
            bootstrap.interval_of(lambda draws: statistic(draws @ sums)))
    return {"value": _number(float(statistic(cells.sum(axis=0)))),
            "interval_95": [_number(end) for end in ends]}


def agreement(confusion: np.ndarray) -> np.ndarray:
    """Share on the diagonal (…,) of flattened confusion matrices (…, 9)."""
    matrix = confusion.reshape(*confusion.shape[:-1], len(OUTCOMES), -1)
    return np.trace(matrix, axis1=-2, axis2=-1) / matrix.sum(axis=(-2, -1))


def cohens_kappa(confusion: np.ndarray) -> np.ndarray:
    """Cohen's kappa (…,) of flattened confusion matrices (…, 9) (Cohen 1960); NaN where chance
    agreement is 1."""
    matrix = confusion.reshape(*confusion.shape[:-1], len(OUTCOMES), -1)
    total = matrix.sum(axis=(-2, -1))
    chance = (matrix.sum(axis=-1) * matrix.sum(axis=-2)).sum(axis=-1) / total**2
    return np.divide(agreement(confusion) - chance, 1 - chance,
                     out=np.full(np.shape(chance), np.nan), where=chance < 1)


def action_shares(actions: pd.Series) -> np.ndarray:
    """Share of each action (A,) in strings of numbers separated by spaces."""
    taken = [int(action) for text in actions for action in text.split()]
    return np.bincount(taken, minlength=NUM_ACTIONS) / max(len(taken), 1)


def print_lives(summary: dict) -> None:
    """Print the outcomes of both worlds and their agreement."""
    for name, group in summary.items():
        print(f"life in the dream, starts {name.replace('_', ' ')} ({group['starts']} of "
              f"{group['episodes']} episodes)")
        for horizon in HORIZONS:
            within = group[f"within_{horizon}"]
            measured = ", ".join(
                f"{what} {estimate['value']:.2f} ({estimate['interval_95'][0]:.2f} to "
                f"{estimate['interval_95'][1]:.2f})" if None not in (estimate["value"],
                                                                 *estimate["interval_95"])
                else f"{what} not defined"
                for what, estimate in within.items() if what != "confusion")
            print(f"within {horizon} actions: {measured}; real outcomes in rows, dreamt ones in "
                  "columns")
            print(pd.DataFrame(within["confusion"]).T.to_string())
        median = group["median_divergence"]
        print("first action that differs: " + (
            "in over half of the lives none does" if median is None else
            f"number {int(median) + 1} in the median") +
            f"; distributions of actions differ by {group['action_difference']:.3f}")


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
