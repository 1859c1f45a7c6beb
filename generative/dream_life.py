"""Outcomes when the agent continues a recording in the simulator ("dream") and in the real game.

Both start from the same recorded frames, half of which lie shortly before the end of an episode.
The agent starts with the recorded hidden state and takes its most likely action at every step. If
the simulator has worlds, what lies beyond the view is sampled, or rendered by the game.

Letters in shape comments: N starts, T steps, C H W a frame, D agent hidden state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

import generative.realism as realism
from agents.networks import PolicyOutput, to_images
from agents.replay import recorded_game, replay
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.tables import finite_or_none
from envs.procgen_env import LevelSlots
from generative.batches import in_batches
from generative.dataset import RolloutDataset, WindowPlace
from generative.frozen_agent import FrozenAgent
from generative.networks import Draw
from generative.rendered_worlds import check_rendering, rendered_world
from generative.simulator import Simulator, stack
from generative.start_worlds import read_places, sampled_world, world_seeds
from generative.world_tables import Table, as_json, event_probability
from stats.association import estimate
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

COIN, DEATH, NEITHER = OUTCOMES = ("coin", "death", "neither")
END = "end"  # by a coin or a death
HORIZONS = (16, 32)  # numbers of actions
BEFORE_END = range(4, 13)  # actions between a start and the recorded end
BATCH = 20  # starts per batch
TIME_LIMIT = 1000  # steps after which Procgen ends an episode
POSITIVE = 0.1  # threshold of a positive reward at the end of a dream, in units of the coin reward
_JUDGED = {"expected / real": "expected_over_real", "Brier score": "brier",
           "Brier skill": "skill", "reliability above a perfect one": "excess_reliability",
           "AUC": "auc"}


@dataclasses.dataclass(frozen=True)
class Life:
    """Outcome of one start in the real game or in the simulator.

    Attributes:
        outcome: COIN or DEATH, whichever happens first, or NEITHER.
        step: number of actions until the outcome, or of all actions if the outcome is NEITHER.
        actions: actions that the agent took, int64 (at most T,).
        probabilities: probability that the life has ended with each of COIN and DEATH up to each
            step (T + 1,), by outcome.
    """

    outcome: str
    step: int
    actions: np.ndarray
    probabilities: dict[str, np.ndarray]

    def within(self, horizon: int) -> str:
        """Return the outcome if it occurred within ``horizon`` actions, otherwise NEITHER."""
        return self.outcome if self.step <= horizon else NEITHER


@dataclasses.dataclass(frozen=True)
class LifeStart(WindowPlace):
    """A recorded frame at which the agent begins to act, in the simulator and in the real game.

    Attributes:
        near_end: whether the frame was chosen because the recorded episode ends soon after it.
    """

    near_end: bool = False


def choose_starts(dataset: RolloutDataset, episodes: Sequence[int], number: int,
                  seed: int) -> list[LifeStart]:
    """Draw recorded frames, half of them 4 to 12 actions before the end of their episode.

    This half excludes episodes that the time limit ended.

    Args:
        dataset: the recorded episodes.
        episodes: numbers on disk of the episodes to draw from.
        number: number of starts; each frame is drawn at most once.
        seed: seed of the draws.

    Raises:
        UserError: if the episodes have too few frames.
    """
    rng, first = np.random.default_rng(seed), dataset.num_init_steps - 1
    near: list[LifeStart] = []
    anywhere: list[LifeStart] = []
    for episode in episodes:
        last = dataset.folder.array_files(episode).frames.shape[0] - 1  # terminal row
        anywhere += [LifeStart(episode, frame) for frame in range(first, last)]
        near += [LifeStart(episode, last - steps, near_end=True) for steps in BEFORE_END
                 if last - steps >= first and last < TIME_LIMIT]
    num_near = number // 2
    if len(near) < num_near or len(anywhere) < number:
        raise UserError(f"{dataset.folder.path} has only {len(anywhere)} frames to start from, "
                        f"{len(near)} of them shortly before an end; lower --life_starts")
    chosen = [near[i] for i in rng.permutation(len(near))[:num_near].tolist()]
    taken = {(start.episode, start.frame) for start in chosen}
    free = [start for start in anywhere if (start.episode, start.frame) not in taken]
    return chosen + [free[i] for i in rng.permutation(len(free))[:number - num_near].tolist()]


def coin_reward(dataset: RolloutDataset, episodes: Sequence[int]) -> float:
    """Return the largest reward of recorded episodes, which is the reward of a coin.

    Args:
        episodes: numbers on disk of the episodes.

    Raises:
        UserError: if no reward is above 0.
    """
    largest = max(float(dataset.folder.steps(episode)["reward"].max()) for episode in episodes)
    if largest <= 0:
        raise UserError(f"{dataset.folder.path} has no rewarded episode, so the reward of a coin "
                        "is unknown; leave out --life_starts")
    return largest


@torch.no_grad()
def live_in_dream(simulator: Simulator, folder: RolloutFolder, starts: Sequence[LifeStart],
                  draw: Draw, reward: float, compute: Compute, rendered_worlds: bool = False,
                  seed: int = 0) -> list[Life]:
    """Let the agent play in the simulator, and return one life per start.

    Simulators with worlds predict the probability of a death at each step. Without worlds, an end
    counts as a death at steps whose reward is at most ``POSITIVE`` times ``reward``, and otherwise
    as a coin. The outcome is decided at the first step at which the reward is at least half of
    ``reward``, or the episode ends with a probability of at least 0.5. It is the more probable kind
    of end at this step. Without such a step, it is NEITHER.

    Args:
        simulator: the simulator with its agent.
        folder: the recording.
        starts: recorded frames to start from.
        draw: sampler of the latent variables.
        reward: reward of a recorded coin.
        compute: device and precision.
        rendered_worlds: take surroundings from the game instead of sampling them; ignored without
            worlds.
        seed: seed of sampled surroundings.

    Raises:
        UserError: if the simulator or the recording does not have what its worlds need.
    """
    frames, hidden, first_actions = read_places(folder, starts, simulator.config.num_init_steps)
    images = frames.to(compute.device).float() / 255
    with compute.autocast():
        vectors = simulator.encode(images)
    world = None
    if simulator.squares is not None:
        seeds = world_seeds([(seed, start.episode, start.frame) for start in starts])
        if rendered_worlds:
            check_rendering(simulator, folder)
            world = rendered_world(simulator, vectors, folder, starts, seeds)
        else:
            world = sampled_world(simulator, vectors, images[-1], seeds)
    with compute.autocast():
        begin = dataclasses.replace(
            simulator.start_from(vectors, draw, world=world),
            agent_hidden=hidden.to(compute.device),
            action=simulator.one_hot_actions(first_actions.to(compute.device)))
        dream = stack(begin, simulator.imagine(begin, draw, max(HORIZONS) + 1))
    rewards, ends = dream.rewards.float().cpu().numpy(), dream.terminals.float().cpu().numpy()
    actions = dream.own_actions.argmax(dim=-1).cpu().numpy()  # (T + 1, N)
    deaths = (None if dream.death_logits is None
              else torch.sigmoid(dream.death_logits).float().cpu().numpy())
    return [_read_life(rewards[:, n] / reward, ends[:, n], actions[:, n],
                       None if deaths is None else deaths[:, n]) for n in range(len(starts))]


def _read_life(rewards: np.ndarray, ends: np.ndarray, actions: np.ndarray,
               deaths: np.ndarray | None = None) -> Life:
    """Determine the first outcome of a rollout whose step t shows the frame after t actions.

    Args:
        rewards: rewards in units of the coin's reward (T + 1,).
        ends: probability that the episode ends (T + 1,).
        actions: actions taken at the frames (T + 1,).
        deaths: probability that the episode ends with a death (T + 1,); None to tell the kinds of
            end apart by the reward.
    """
    if deaths is None:
        coins = rewards > POSITIVE
        deaths = ends * ~coins
    else:
        deaths = np.minimum(deaths, ends)
        coins = deaths < ends / 2
    probabilities = {DEATH: event_probability(ends[:, None], deaths[:, None])[:, 0],
                     COIN: event_probability(ends[:, None], (ends - deaths)[:, None])[:, 0]}
    happens = np.flatnonzero((rewards >= 0.5) | (ends >= 0.5))
    if not len(happens):
        return Life(NEITHER, len(rewards) - 1, actions[:-1], probabilities)
    step = int(happens[0])
    return Life(COIN if coins[step] else DEATH, step, actions[:step], probabilities)


@torch.no_grad()
def play_from(agent: FrozenAgent, compute: Compute, folder: RolloutFolder,
              places: Sequence[WindowPlace], num_actions: int,
              ) -> tuple[list[PolicyOutput], np.ndarray, np.ndarray]:
    """Replay recordings, each up to a given frame, then let the agent take its most likely actions.

    The agent starts with the recorded hidden states.

    Args:
        agent: the agent.
        compute: device and precision.
        folder: the recording.
        places: N episodes and frames.
        num_actions: T, number of actions that the agent takes.

    Returns:
        The agent's outputs, a list of T + 1; the rewards of the preceding actions (T + 1, N); and
        whether these actions ended the episode, bool (T + 1, N). Entry 0 belongs to the given
        frames, entry t to the frames after t actions. After the end of an episode, the outputs are
        those on the last frame before the end.

    Raises:
        UserError: if a replay deviates from the recorded frames; the message names episode and
            step.
    """
    rewards = np.zeros((num_actions + 1, len(places)))
    ends, ended, outputs = rewards > 0, np.zeros(len(places), dtype=bool), []
    with contextlib.closing(LevelSlots(recorded_game(folder), len(places))) as slots:
        states = []
        for slot, place in enumerate(places):
            for _ in replay(slots, slot, folder, place.episode, place.frame):
                pass
            hidden_states = folder.array_files(place.episode).hidden_states
            states.append(hidden_states.rows(place.frame, place.frame + 1)[0])
        hidden = torch.from_numpy(np.stack(states)).to(compute.device)  # (N, D)
        frames = slots.frames.copy()
        for t in range(num_actions + 1):
            images = to_images(torch.from_numpy(frames.copy()).to(compute.device),
                               compute.channels_last)  # (N, C, H, W)
            with compute.autocast():
                outputs.append(agent.step(images, hidden))
            if t == num_actions:
                break
            actions = outputs[-1].log_probs.argmax(dim=-1).tolist()
            for slot in np.flatnonzero(~ended):
                rewards[t + 1, slot], ends[t + 1, slot] = slots.step(slot, actions[slot])
            ended |= ends[t + 1]
            frames[~ended] = slots.frames[~ended]
            continues = torch.from_numpy(~ended).to(hidden.device)
            hidden = torch.where(continues.unsqueeze(-1), outputs[-1].hidden_states, hidden)
    return outputs, rewards, ends


def live_in_game(simulator: Simulator, folder: RolloutFolder, starts: Sequence[LifeStart],
                 compute: Compute) -> list[Life]:
    """Let the agent play in the real game, and return one outcome per start.

    The recording is replayed up to each start. The end of an episode at Procgen's time limit is
    not a death.

    Raises:
        UserError: see ``play_from``.
    """
    outputs, rewards, ends = play_from(simulator.agent, compute, folder, starts, max(HORIZONS))
    actions = torch.stack([output.log_probs.argmax(dim=-1) for output in outputs]).cpu().numpy()
    lives = []
    for slot, start in enumerate(starts):
        steps = slice(TIME_LIMIT - start.frame + 1)  # Procgen ends the episode then
        late = start.frame + np.arange(len(ends[steps])) >= TIME_LIMIT
        lives.append(_read_life((rewards[steps, slot] > 0) * 1.0, (ends[steps, slot] & ~late) * 1.0,
                                actions[steps, slot]))
    return lives


def compare_lives(simulator: Simulator, dataset: RolloutDataset, starts: Sequence[LifeStart],
                  draw: Draw, reward: float, compute: Compute, rendered_worlds: bool = False,
                  seed: int = 0) -> pd.DataFrame:
    """Let the agent play from each start in the real game and in the simulator, and return both
    outcomes.

    Args:
        draw, reward, rendered_worlds, seed: see ``live_in_dream``.

    Returns:
        Table with a row per start, and the columns:

        - ``episode``, ``frame``, ``near_end``: fields of the start.
        - ``real_16``, ``real_32``: outcome in the real game within each horizon.
        - ``real_step``: number of actions until the outcome, see ``Life``.
        - ``real_actions``: numbers of the actions, separated by spaces.
        - ``dream_16``, ``dream_32``, ``dream_step``, ``dream_actions``: the same in the simulator.
        - ``dream_coin_16``, ``dream_coin_32``, ``dream_death_16``, ``dream_death_32``: probability
          of the outcome in the simulator within each horizon.

    Raises:
        UserError: see ``play_from``.
    """
    rows = []
    for part in in_batches(starts, BATCH):
        worlds = {"real": live_in_game(simulator, dataset.folder, part, compute),
                  "dream": live_in_dream(simulator, dataset.folder, part, draw, reward, compute,
                                         rendered_worlds, seed)}
        for number, start in enumerate(part):
            row = dataclasses.asdict(start)
            for world, lives in worlds.items():
                life = lives[number]
                row |= {f"{world}_{horizon}": life.within(horizon) for horizon in HORIZONS}
                row |= {f"{world}_step": life.step,
                        f"{world}_actions": " ".join(map(str, life.actions))}
            row |= {f"dream_{outcome}_{horizon}": float(probabilities[horizon])
                    for outcome, probabilities in worlds["dream"][number].probabilities.items()
                    for horizon in HORIZONS}
            rows.append(row)
    return pd.DataFrame(rows)


def summarize(table: pd.DataFrame, seed: int) -> dict:
    """Compare the outcomes in the real game with the outcomes in the simulator.

    Args:
        table: table from ``compare_lives``.
        seed: seed of the bootstrap.

    Returns:
        Summary of each group of starts (``all``, ``near_end``, ``anywhere``):

        - ``starts``, ``episodes``: numbers of starts and episodes.
        - ``within_16``, ``within_32``: for each horizon, the measures of
          ``realism.calibration`` for the probabilities of a ``coin``, a ``death``, and an ``end``
          by either, with the numbers ``real`` and ``expected`` (the sum of the probabilities); and
          for the outcomes that a threshold of 0.5 per step decides, ``confusion`` (rows are real
          outcomes, columns outcomes in the simulator), and ``agreement`` and Cohen's ``kappa``.
          Intervals are 95 % intervals over episodes; None where undefined.
        - ``actions``: share of each action, in the real game and in the simulator.
        - ``median_divergence``: lower median, over starts, of the number of equal actions before
          the first difference; None if the actions of more than half of the starts never differ.
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
        within = as_json(judge_ends(table, horizon, seed))
        within["confusion"] = pd.DataFrame(confusion, OUTCOMES, OUTCOMES).to_dict("index")
        for name, statistic in (("agreement", agreement), ("kappa", cohens_kappa)):
            within[name] = as_json(estimate(statistic, cells.T, episodes, bootstrap))
        summary[f"within_{horizon}"] = within
    taken = [[np.array(text.split(), dtype=int) for text in table[f"{world}_actions"]]
             for world in ("real", "dream")]
    equal = sorted(next((step for step, (real, dream) in enumerate(zip(*pair)) if real != dream),
                        math.inf) for pair in zip(*taken))
    median = finite_or_none(equal[(len(equal) - 1) // 2])
    return {**summary, "median_divergence": median, "actions": {
        world: (np.bincount(actions, minlength=NUM_ACTIONS) / max(len(actions), 1)).tolist()
        for world, actions in zip(("real", "dream"), map(np.concatenate, taken))}}


def judge_ends(table: pd.DataFrame, horizon: int, seed: int) -> Table:
    """Judge the simulator's probabilities of ends by the outcomes in the real game.

    Args:
        table: table from ``compare_lives``.
        horizon: number of actions, one of HORIZONS.
        seed: seed of the bootstrap.

    Returns:
        For COIN, DEATH and END: ``real`` and ``expected`` numbers, and the measures of
        ``realism.calibration``.
    """
    outcomes = table[f"real_{horizon}"]
    coin, death = (table[f"dream_{outcome}_{horizon}"].to_numpy() for outcome in (COIN, DEATH))
    judged: Table = {}
    for name, probabilities, real in ((COIN, coin, outcomes == COIN),
                                      (DEATH, death, outcomes == DEATH),
                                      (END, coin + death, outcomes != NEITHER)):
        measured = realism.calibration(probabilities.clip(0, 1), real.to_numpy(),
                                       table["episode"].to_numpy(), None, seed)
        judged[name] = {"real": int(real.sum()), "expected": float(probabilities.sum()),
                        **vars(measured)}
    return judged


def agreement(confusion: np.ndarray) -> np.ndarray:
    """Compute the share on the diagonal (…,) of flattened confusion matrices (…, 9)."""
    return confusion[..., ::len(OUTCOMES) + 1].sum(axis=-1) / confusion.sum(axis=-1)


def cohens_kappa(confusion: np.ndarray) -> np.ndarray:
    """Compute Cohen's kappa (…,) of flattened confusion matrices (…, 9) (Cohen 1960); NaN where
    the agreement by chance is 1."""
    matrix = confusion.reshape(*confusion.shape[:-1], len(OUTCOMES), -1)
    total = matrix.sum(axis=(-2, -1))
    chance = (matrix.sum(axis=-1) * matrix.sum(axis=-2)).sum(axis=-1) / total**2
    return np.divide(agreement(confusion) - chance, 1 - chance,
                     out=np.full(np.shape(chance), np.nan), where=chance < 1)


def print_lives(summary: dict) -> None:
    """Print how well the ends in the simulator agree with those in the real game: first the
    probabilities, then the outcomes that a threshold decides."""
    for name, group in summary.items():
        print(f"life in the dream, starts {name.replace('_', ' ')} ({group['starts']} of "
              f"{group['episodes']} episodes)")
        for horizon in HORIZONS:
            within = group[f"within_{horizon}"]
            print(f"within {horizon} actions, probabilities of ends (95 % intervals over episodes)")
            print(pd.DataFrame({event: {
                "real number": str(within[event]["real"]),
                "expected number": f"{within[event]['expected']:.1f}",
                **{title: _interval(within[event][measure]) for title, measure in _JUDGED.items()}}
                for event in (COIN, DEATH, END)}).T.to_string())
            print(f"within {horizon} actions, outcomes decided by a probability of 0.5 in a step: "
                  + ", ".join(f"{measure} {_interval(within[measure])}"
                              for measure in ("agreement", "kappa"))
                  + "; real outcomes in rows, dreamt ones in columns")
            print(pd.DataFrame(within["confusion"]).T.to_string())
        print("median number of equal actions before the worlds differ: "
              f"{group['median_divergence']}")


def _interval(measured: dict) -> str:
    """Format an estimate from JSON."""
    low, high = measured["interval_95"]
    return format_interval(measured["value"], low, high, ".2f", "undefined")
