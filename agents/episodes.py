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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agents.acting import batch_sizes, draw_actions, run_policy
from agents.hooks import active_patches, batch_info
from agents.networks import Policy, PolicyOutput
from agents.patch import NO_LEVEL, BatchInfo
from common.config import check_entries
from common.devices import Compute
from common.errors import UserError
from common.files import read_description
from common.game_constants import GOAL_GAMES
from common.video import mark_action, side_by_side
from envs.procgen_env import EnvConfig, LevelEdit, LevelSlots
from envs.real_game import RealGame
from stats.significance import share

FILM_SIZE = 256  # pixels per side
Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution

SOLVED, FAILED, UNFINISHED = "solved", "failed", "unfinished"  # see ``Episode.end``

Watch = Callable[[int, int, Callable[[], bytes | None]], None]
"""Callback before each step of an episode. Its arguments are the number of the episode, the number
of steps taken, and a function that returns the current state of the level."""


class Game(Protocol):
    """Environment of N slots, each of which plays one episode: the real game or a simulator.

    Attributes:
        is_simulated: whether this is a simulator. Its frames are float images (N, C, H, W) in
            [0, 1] instead of uint8 (N, H, W, C), and its episodes end only at ``max_steps``.
    """

    is_simulated: bool

    def reset(self, slots: Sequence[int], levels: Sequence[int]
              ) -> tuple[Tensor, Sequence[float]] | None:
        """Begin episodes, and return the states that enter the agent (N, D), and the rewards that
        come with the first frames; None for the agent's own initial state and no rewards."""

    def observe(self, slots: Sequence[int]) -> np.ndarray | Tensor:
        """Return the current frames."""

    def step(self, slots: Sequence[int], actions: Sequence[int]) -> Sequence[tuple[float, bool]]:
        """Take a step in each slot, and return its reward, and whether it ended the episode."""

    def get_state(self, slot: int) -> Any:
        """Return the state of a slot; None after the end of an episode."""

    def set_state(self, slot: int, state: Any) -> None:
        """Continue an episode in a slot from a state."""

    def result(self, slot: int) -> float:
        """Return whether the slot's episode has ended with the level solved. In a simulator, return
        the largest probability so far that the episode ends."""

    def close(self) -> None:
        """Free the slots."""


@dataclasses.dataclass(frozen=True)
class EpisodeState:
    """State in the middle of an episode, from which it can be continued.

    Attributes:
        level_seed: seed of the level.
        step: number of steps taken so far.
        state: state of the game, see ``Game.get_state``.
        hidden: hidden state that enters the agent, float32 (D,).
    """

    level_seed: int
    step: int
    state: Any
    hidden: np.ndarray


class Run(NamedTuple):
    """An episode to play.

    Attributes:
        number: number of the episode.
        start: seed of the level, number of a simulated start, or a state to continue from.
        actions: actions that replace the first actions of the agent.
        stream: number of the stream of random actions; None for ``number``. Runs with the same
            stream draw the same random number at the same step, counted from their start.
    """

    number: int
    start: int | EpisodeState
    actions: Sequence[int] = ()
    stream: int | None = None


@dataclasses.dataclass(frozen=True)
class Episode:
    """Data of one episode, or of its part from an ``EpisodeState`` on.

    The last row is the terminal step, with ``dones`` true, the final reward and a black frame. Each
    reward is in the row of the frame that follows the action, so the first reward is 0. After
    ``max_steps`` the last row is an ordinary frame, with ``dones`` false.

    Attributes:
        number: number of the episode, as passed to ``play_episodes``.
        level_seed: seed of the level; ``NO_LEVEL`` in a simulator.
        frames: uint8 (L, H, W, C); empty if not kept.
        hidden_states: float32 (L + 1, D); row t enters the agent at frame t, row t + 1 leaves it.
            Changes by ``PlayOptions.alter_state`` are not included.
        log_probs: log-probabilities from which the actions were drawn, float32 (L, A).
        values: value estimates, float32 (L,).
        actions: int64 (L,); the action in the last row is never taken.
        rewards: float32 (L,).
        dones: bool (L,).
        level_complete: whether the game counts the level as solved; in a simulator, the largest
            probability that the episode ends.
        person_views: L larger images of the level, each uint8 (512, 512, C); empty if not kept.
        positions: x and y of the player in squares, float32 (L, 2), or (L, 0) if not kept; NaN in
            the last row.
        cause: cause of the failure, and
        in_view: number of steps with each kind of hazard in view, from
            ``agents.failures.attribute_failures``; None and empty without it.
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
    level_complete: float
    person_views: list[np.ndarray]
    positions: np.ndarray
    cause: str | None = None
    in_view: tuple[int, ...] = ()

    @property
    def end(self) -> str:
        """SOLVED; UNFINISHED after ``max_steps``; or else ``cause``, or FAILED if it is unknown."""
        if not self.dones[-1]:
            return UNFINISHED
        return SOLVED if self.level_complete else self.cause or FAILED

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())

    @property
    def length(self) -> int:
        """Environment steps taken."""
        return len(self.rewards) - 1


class _OpenEpisode:
    """Data of an episode in progress."""

    def __init__(self, run: Run, level_seed: int, seed: int, hidden: np.ndarray):
        self.number, self.actions, start = run.number, run.actions, run.start
        self.level_seed = level_seed
        self.first_step = start.step if isinstance(start, EpisodeState) else 0
        self.rng = np.random.default_rng([seed, self.number if run.stream is None else run.stream])
        self.reward, self.ended = 0.0, False  # returned by the last step, with the current frame
        self.hidden_states = [hidden]
        self.rows: list[tuple] = []
        self.person_views: list[np.ndarray] = []

    def close(self, level_complete: float) -> Episode:
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
        max_steps: maximum number of actions per episode; None for no limit.
        edit: optional edit of every level before it is played.
        edit_every_step: repeat the edit after every step, see ``LevelSlots``.
        keep_outputs: keep the hidden states and log-probabilities; otherwise they are empty.
        keep_frames: keep the frames; otherwise ``Episode.frames`` is empty.
        keep_person_views: keep ``Episode.person_views``, 0.8 MB per step and episode in progress.
        keep_positions: keep the player's positions, which takes 0.15 ms per step.
    """

    greedy: bool = False
    alter_logits: Callable[[Tensor, BatchInfo], Tensor] | None = None
    alter_state: Callable[[Tensor, BatchInfo], Tensor] | None = None
    max_steps: int | None = None
    edit: LevelEdit | None = None
    edit_every_step: bool = False
    keep_outputs: bool = True
    keep_frames: bool = True
    keep_person_views: bool = False
    keep_positions: bool = False


DEFAULT_OPTIONS = PlayOptions()


def play_episodes(policy: Policy, compute: Compute, game: EnvConfig | Game,
                  runs: Sequence[tuple[int, int] | Run], seed: int, num_slots: int,
                  options: PlayOptions = DEFAULT_OPTIONS,
                  watch: Watch | None = None) -> Iterator[Episode]:
    """Play episodes and yield them as they end.

    Every forward pass has batch metadata. They include the player's square and facing only if an
    active patch needs metadata.

    Args:
        policy: the agent.
        compute: device, precision and memory layout.
        game: the real game, or an environment with at least ``num_slots`` slots.
        runs: fields of ``Run``; number and level seed suffice.
        seed: seed of the random actions, used together with the stream of the run.
        num_slots: number of episodes played at a time.
        options: how to act, how to edit the levels, and which data to keep.
        watch: optional callback, called before every step.
    """
    num_slots = min(num_slots, len(runs))
    env: Game = game if not isinstance(game, EnvConfig) else RealGame(
        game, num_slots, options.keep_person_views, options.edit, options.edit_every_step)
    sizes = batch_sizes(policy, compute)
    hidden = policy.initial_states(num_slots)  # (N, D)
    waiting = (Run(*run) for run in runs)
    playing: dict[int, _OpenEpisode] = {}  # episodes in progress by slot
    try:
        while True:
            free = [slot for slot in range(num_slots) if slot not in playing]
            _start(policy, env, dict(zip(free, waiting)), hidden, seed, playing)
            if not playing:
                break
            active = sorted(playing)
            info = BatchInfo(*np.array([
                (episode.number, episode.first_step + len(episode.rows), episode.level_seed)
                for _, episode in sorted(playing.items())]).T)
            need_positions = any(patches.need_info for patches in active_patches(policy))
            positions = np.full((len(active), 3), np.nan)  # y, x, facing; NaN in the last row
            if isinstance(env, RealGame) and (options.keep_positions or need_positions):
                positions = env.players(active)
                if need_positions:
                    squares = np.where(np.isnan(positions), -1, positions).astype(np.int64)
                    info = dataclasses.replace(info, square=squares[:, :2], facing=squares[:, 2])
            entering = hidden[active]
            if options.alter_state is not None:
                entering = options.alter_state(entering, info)
            frames = env.observe(active)
            output = _run_in_batches(policy, compute, frames, entering, info, sizes)
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
                episode, num_taken = playing[slot], len(playing[slot].rows)
                if num_taken < len(episode.actions):
                    actions[i] = episode.actions[num_taken]
                if options.keep_outputs:
                    episode.hidden_states.append(hidden_out[i])
                episode.rows.append((
                    np.array(frames[i]) if options.keep_frames else (),
                    log_probs_out[i] if options.keep_outputs else (),
                    values[i], actions[i], episode.reward, episode.ended,
                    positions[i, 1::-1] if options.keep_positions else ()))
                if options.keep_person_views and isinstance(env, RealGame):
                    episode.person_views.append(env.person_view(slot))
                if episode.ended or num_taken == options.max_steps:
                    del playing[slot]
                    yield episode.close(env.result(slot))
                elif watch is not None:
                    watch(episode.number, num_taken, functools.partial(env.get_state, slot))
            going = [i for i, slot in enumerate(active) if slot in playing]
            slots = [active[i] for i in going]
            for slot, result in zip(slots, env.step(slots, actions[going].tolist())):
                playing[slot].reward, playing[slot].ended = result
    finally:
        if isinstance(game, EnvConfig):
            env.close()


def _start(policy: Policy, env: Game, runs: Mapping[int, Run], hidden: Tensor, seed: int,
           playing: dict[int, _OpenEpisode]) -> None:
    """Begin runs in free slots; set their rows of ``hidden`` (N, D), and add them to ``playing``.
    """
    new = {slot: run.start for slot, run in runs.items() if isinstance(run.start, int)}
    first = env.reset(list(new), list(new.values())) if new else None
    hidden[list(new)] = policy.initial_states(len(new)) if first is None else first[0]
    for slot, run in runs.items():
        start = run.start
        if isinstance(start, EpisodeState):
            env.set_state(slot, start.state)
            hidden[slot] = torch.from_numpy(start.hidden)
            level = start.level_seed
        else:
            level = NO_LEVEL if env.is_simulated else start
        playing[slot] = _OpenEpisode(run, level, seed, hidden[slot].clone().cpu().numpy())
    if first is not None:
        for slot, reward in zip(new, first[1]):
            playing[slot].reward = reward


def _run_in_batches(policy: Policy, compute: Compute, frames: np.ndarray | Tensor, hidden: Tensor,
                    info: BatchInfo, sizes: tuple[int, int]) -> PolicyOutput:
    """Run one step on frames (N, H, W, C) and states (N, D) in batches of ``batch_sizes``.

    The last batch is padded with empty rows. Simulated images (N, C, H, W) form a single batch.
    """
    if isinstance(frames, Tensor):
        with batch_info(policy, info):
            return run_policy(policy, compute, frames, hidden)
    number = len(frames)
    multiple, largest = sizes
    missing = -number % multiple
    frames = np.concatenate([frames, np.zeros((missing, *frames.shape[1:]), frames.dtype)])
    hidden = torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])])
    info = info.padded(missing)
    outputs = []
    for begin in range(0, len(frames), largest):
        rows = slice(begin, begin + largest)
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
        return self.describe()

    def describe(self, game: str | None = None) -> str:
        """Describe the summary in words; the return comes first in games in which more than
        success is rewarded."""
        success = (f"success rate {100 * self.success_rate:.1f} % "
                   f"(95 % interval {100 * self.success_interval[0]:.1f} to "
                   f"{100 * self.success_interval[1]:.1f})")
        mean = f"mean return {self.mean_return:.2f}"
        if self.return_interval:
            mean += " ({:.2f} to {:.2f})".format(*self.return_interval)
        first, second = ((success, mean) if game is None or game in GOAL_GAMES
                         else (mean, success))
        return (f"{first}, {second}, mean length {self.mean_length:.1f} steps over "
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
