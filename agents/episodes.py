"""Play whole episodes on chosen levels, summarise them, and render them as videos.

Each episode draws its actions from its own random generator. It therefore does not depend on how
many episodes are played at a time or in which order they end.
Because rounding depends on the batch size, the agent always runs on batches of the same size, which
are padded if fewer episodes are in progress.

Letters in shape comments: L rows of an episode, N episodes in progress, T frames of a video, H W C
a frame, D hidden state, A actions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agents.acting import draw_actions, run_policy
from agents.hooks import active_patches, batch_info
from agents.networks import Policy, PolicyOutput
from agents.patch import BatchInfo
from common.config import check_entries
from common.devices import Compute
from common.errors import UserError
from common.files import read_description
from common.progress import with_progress
from common.video import mark_action, side_by_side
from envs.procgen_env import EnvConfig, LevelEdit, LevelSlots
from stats.significance import share

FRAMES_PER_BATCH = 16
FILM_SIZE = 256  # pixels per side
Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution

Watch = Callable[[int, int, Callable[[], bytes | None]], None]
"""Callback before each step of an episode. Its arguments are the number of the episode, the number
of steps taken, and a function that returns the current state of the level."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """Data of one episode.

    The last row is the terminal step, with ``dones`` true, the final reward and a black frame. Each
    reward is in the row of the frame that follows the action, so the first reward is 0.

    Attributes:
        number: number of the episode, as passed to ``play_episodes``.
        level_seed: seed of the level.
        frames: uint8 (L, H, W, C); empty if not kept.
        hidden_states: float32 (L + 1, D); row t enters the agent at frame t, row t + 1 leaves it.
            Changes by ``PlayOptions.alter_state`` are not included.
        log_probs: log-probabilities from which the actions were drawn, float32 (L, A).
        values: value estimates, float32 (L,).
        actions: int64 (L,); the action in the last row is never taken.
        rewards: float32 (L,).
        dones: bool (L,).
        level_complete: whether the game counts the level as solved.
        person_views: L larger images of the level, each uint8 (512, 512, C); empty if not kept.
        positions: x and y of the player in squares, float32 (L, 2), or (L, 0) if not kept; NaN in
            the last row.
    """

    number: int
    level_seed: int
    frames: np.ndarray
    hidden_states: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    level_complete: bool
    person_views: list[np.ndarray]
    positions: np.ndarray

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())

    @property
    def length(self) -> int:
        """Environment steps taken."""
        return len(self.rewards) - 1


class _OpenEpisode:
    """Data of an episode in progress."""

    def __init__(self, number: int, level_seed: int, seed: int, hidden: np.ndarray):
        self.number = number
        self.level_seed = level_seed
        self.rng = np.random.default_rng([seed, number])
        self.reward, self.ended = 0.0, False  # returned by the last step, with the current frame
        self.hidden_states = [hidden]
        self.rows: list[tuple] = []
        self.person_views: list[np.ndarray] = []

    def close(self, level_complete: bool) -> Episode:
        frames, log_probs, values, actions, rewards, dones, positions = map(
            np.array, zip(*self.rows))
        return Episode(self.number, self.level_seed, frames, np.array(self.hidden_states),
                       log_probs, values, actions, rewards.astype(np.float32), dones,
                       level_complete, self.person_views, positions.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """Options for playing episodes, and for the data that are kept.

    Attributes:
        greedy: take the most likely action instead of sampling one.
        alter_logits: optional function that maps the policy's logits (N, A), and the batch
            metadata, to the logits that actions are sampled from.
        alter_state: optional function that maps the hidden states (N, D) that enter a step, and the
            batch metadata, to the states (N, D) that the agent uses instead.
        edit: optional edit of every level before it is played.
        edit_every_step: repeat the edit after every step, see ``LevelSlots``.
        keep_frames: keep the frames; otherwise ``Episode.frames`` is empty.
        keep_person_views: keep ``Episode.person_views``, 0.8 MB per step and episode in progress.
        keep_positions: keep the player's positions, which takes 0.15 ms per step.
    """

    greedy: bool = False
    alter_logits: Callable[[Tensor, BatchInfo], Tensor] | None = None
    alter_state: Callable[[Tensor, BatchInfo], Tensor] | None = None
    edit: LevelEdit | None = None
    edit_every_step: bool = False
    keep_frames: bool = True
    keep_person_views: bool = False
    keep_positions: bool = False


DEFAULT_OPTIONS = PlayOptions()


def play_episodes(policy: Policy, compute: Compute, config: EnvConfig,
                  levels: Sequence[tuple[int, int]], seed: int, num_slots: int,
                  options: PlayOptions = DEFAULT_OPTIONS,
                  watch: Watch | None = None) -> Iterator[Episode]:
    """Play one episode on each level and yield the episodes as they end.

    Every forward pass has batch metadata. They include the player's square and facing only if an
    active patch needs metadata.

    Args:
        policy: the agent.
        compute: device, precision and memory layout.
        config: the game.
        levels: pairs of episode number and level seed.
        seed: seed of the random actions, used together with the episode number.
        num_slots: number of episodes played at a time.
        options: how to act, how to edit the levels, and which data to keep.
        watch: optional callback, called before every step.
    """
    num_slots = min(num_slots, len(levels))
    slots = LevelSlots(config, num_slots, options.keep_person_views, options.edit,
                       options.edit_every_step)
    initial = policy.initial_states(1)[0]  # (D,)
    hidden = policy.initial_states(num_slots)  # (N, D)
    waiting = iter(levels)
    playing: dict[int, _OpenEpisode] = {}  # episodes in progress by slot

    def start(slot: int) -> None:
        entry = next(waiting, None)
        if entry is not None:
            slots.start(slot, entry[1])
            hidden[slot] = initial
            playing[slot] = _OpenEpisode(*entry, seed, initial.cpu().numpy())

    try:
        for slot in range(num_slots):
            start(slot)
        while playing:
            active = sorted(playing)
            info = BatchInfo(*np.array([(playing[slot].number, len(playing[slot].rows),
                                         playing[slot].level_seed) for slot in active]).T)
            need_positions = any(patches.need_info for patches in active_patches(policy))
            positions = np.full((len(active), 3), np.nan)  # y, x, facing; NaN in the last row
            for i, slot in enumerate(active if options.keep_positions or need_positions else ()):
                player = slots.player(slot)
                if player is not None:
                    positions[i] = player["y"], player["x"], player["is_reflected"]
            if need_positions:
                squares = np.where(np.isnan(positions), -1, positions).astype(np.int64)
                info = dataclasses.replace(info, square=squares[:, :2], facing=squares[:, 2])
            entering = hidden[active]
            if options.alter_state is not None:
                entering = options.alter_state(entering, info)
            output = _run_in_batches(policy, compute, slots.frames[active], entering, info)
            hidden[active] = output.hidden_states
            logits = output.logits
            if options.alter_logits is not None:
                logits = options.alter_logits(logits, info)
            log_probs = torch.log_softmax(logits, dim=-1)
            if options.greedy:
                chosen = log_probs.argmax(dim=-1)
            else:
                draws = torch.tensor([playing[slot].rng.random() for slot in active])
                chosen = draw_actions(log_probs, draws.to(log_probs))
            hidden_out, log_probs_out, values, actions = (
                x.cpu().numpy() for x in (output.hidden_states, log_probs, output.values, chosen))

            for i, slot in enumerate(active):
                episode = playing[slot]
                episode.hidden_states.append(hidden_out[i])
                episode.rows.append((
                    slots.frames[slot].copy() if options.keep_frames else (), log_probs_out[i],
                    values[i], actions[i], episode.reward, episode.ended,
                    positions[i, 1::-1] if options.keep_positions else ()))
                if options.keep_person_views:
                    episode.person_views.append(slots.person_view(slot))
                if episode.ended:
                    del playing[slot]
                    yield episode.close(bool(slots.level_complete[slot]))
                    start(slot)
                else:
                    if watch is not None:
                        watch(episode.number, len(episode.rows) - 1,
                              functools.partial(slots.state, slot))
                    episode.reward, episode.ended = slots.step(slot, actions[i])
    finally:
        slots.close()


def _run_in_batches(policy: Policy, compute: Compute, frames: np.ndarray, hidden: Tensor,
                    info: BatchInfo) -> PolicyOutput:
    """Run one step on frames (N, H, W, C) and states (N, D) in batches of FRAMES_PER_BATCH.

    The last batch is padded with empty rows.
    """
    number = len(frames)
    missing = -number % FRAMES_PER_BATCH
    frames = np.concatenate([frames, np.zeros((missing, *frames.shape[1:]), frames.dtype)])
    hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
    info = info.padded(missing)
    outputs = []
    for begin in range(0, len(frames), FRAMES_PER_BATCH):
        rows = slice(begin, begin + FRAMES_PER_BATCH)
        with batch_info(policy, info[rows]):
            outputs.append(run_policy(policy, compute, frames[rows], hidden[rows]))
    return PolicyOutput(*(torch.cat([getattr(output, name) for output in outputs])[:number]
                          for name in ("logits", "values", "hidden_states")))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Summary of episodes, one per level, with 95 % confidence intervals.

    Attributes:
        num_episodes: number of episodes.
        success_rate, success_interval: fraction of levels that the game counts as solved, and its
            Wilson interval (Wilson 1927).
        mean_return, return_interval: mean sum of raw rewards, with an interval by the normal
            approximation (None for a single episode).
        mean_length: mean number of environment steps.
    """

    num_episodes: int
    success_rate: float
    success_interval: tuple[float, float]
    mean_return: float
    return_interval: tuple[float, float] | None
    mean_length: float

    def __str__(self) -> str:
        interval = ""
        if self.return_interval:
            interval = " ({:.2f} to {:.2f})".format(*self.return_interval)
        return (f"success rate {100 * self.success_rate:.1f} % "
                f"(95 % interval {100 * self.success_interval[0]:.1f} to "
                f"{100 * self.success_interval[1]:.1f}), mean return {self.mean_return:.2f}"
                f"{interval}, mean length {self.mean_length:.1f} steps over "
                f"{self.num_episodes} levels")


def read_evaluation(path: Path, more: Mapping[str, object] | None = None) -> dict:
    """Read a file of ``evaluate.py --output``; return {} if it is missing.

    Args:
        more: types of further entries that it must have, see ``config.check_entries``.

    Raises:
        UserError: if the file is damaged; the message names the entry.
    """
    kinds = {"num_episodes": int, "success_rate": float, "success_interval": tuple[float, ...],
             **(more or {})}
    result = read_description(path)
    if result and len(check_entries(result, kinds, path, kinds)["success_interval"]) != 2:
        raise UserError(f"{path}: 'success_interval' must hold two numbers")
    return result


def summarise(episodes: Iterable[Episode]) -> Evaluation:
    """Compute success rate, mean return and mean length of one or more episodes."""
    episodes = list(episodes)
    n = len(episodes)
    successes = int(sum(episode.level_complete for episode in episodes))
    rate, low, high = share(successes, n)
    returns = np.array([episode.total_reward for episode in episodes])
    interval = None
    if n > 1:
        error = Z_95 * returns.std(ddof=1) / math.sqrt(n)
        interval = float(returns.mean() - error), float(returns.mean() + error)
    return Evaluation(
        n, rate, (low, high), float(returns.mean()), interval,
        float(np.mean([episode.length for episode in episodes])))


def evaluate(policy: Policy, env: EnvConfig, *, num_episodes: int = 100, seed: int = 0,
             greedy: bool = False) -> Evaluation:
    """Play levels with an agent, inside active ``patched`` blocks with these patches.

    ``evaluate.py`` has further options, such as causes of failures.

    Args:
        policy: the agent.
        env: game and range of levels; ``env.unseen_levels()`` are the levels beyond a range.
        num_episodes: number of levels, one episode each.
        seed: seed of levels and actions.
        greedy: take the most likely action instead of sampling one.

    Example::

        >>> env = EnvConfig("coinrun", "hard")
        >>> result = evaluate(policy, env, num_episodes=4)
        >>> assert 0 <= result.success_rate <= 1 and result.mean_length > 0
    """
    levels = list(enumerate(env.draw_levels(num_episodes, seed)))
    episodes = play_episodes(policy, Compute(policy.device, bfloat16=False), env, levels, seed,
                             FRAMES_PER_BATCH, PlayOptions(greedy=greedy, keep_frames=False))
    return summarise(with_progress(episodes, len(levels), "episode"))


def small_film(episode: Episode, max_steps: int) -> np.ndarray:
    """Resize an episode's 512-pixel views and mark the actions in them.

    Args:
        episode: episode played with ``keep_person_views``.
        max_steps: maximum number of frames T, counted from the first step; the terminal frame is
            left out.

    Returns:
        Frames, uint8 (T, FILM_SIZE, FILM_SIZE, 3).
    """
    return np.stack([small_picture(view, action) for view, action in zip(
        episode.person_views[:-1][:max_steps], episode.actions)])


def small_picture(view: np.ndarray, action: int) -> np.ndarray:
    """Resize a view (512, 512, 3) to (FILM_SIZE, FILM_SIZE, 3) and mark the action in it."""
    image = Image.fromarray(view).resize((FILM_SIZE, FILM_SIZE), Image.Resampling.BOX)
    return mark_action(np.asarray(image), action)


def last_steps(config: EnvConfig, level: int, actions: Sequence[int], number: int,
               edit: LevelEdit | None = None, edit_every_step: bool = False) -> np.ndarray:
    """Render the last steps of an episode as a video, uint8 (T, FILM_SIZE, FILM_SIZE, 3).

    Args:
        config: the game.
        level: seed of the level.
        actions: all actions taken in the episode.
        number: maximum number of steps.
        edit, edit_every_step: edit of the level, as in ``LevelSlots``.
    """
    film = []
    with contextlib.closing(LevelSlots(config, 1, True, edit, edit_every_step)) as slots:
        slots.start(0, level)
        for step, action in enumerate(actions):
            if step >= len(actions) - number:
                film.append(small_picture(slots.person_view(0), action))
            slots.step(0, action)
    return np.stack(film)


def side_by_side_films(films: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield frames that show several videos next to each other.

    A video that has ended keeps showing its last frame, darkened.

    Args:
        films: videos by title, each uint8 (T, FILM_SIZE, FILM_SIZE, 3).
    """
    longest = max(map(len, films.values()))
    columns = {name: np.concatenate([frames, np.repeat(frames[-1:] // 2, longest - len(frames),
                                                       axis=0)])[:, None]
               for name, frames in films.items()}
    return side_by_side(columns, 1)
