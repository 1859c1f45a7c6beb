"""Record episodes while an agent plays.

Letters in shape comments: L rows of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent, weights_sha256
from agents.episodes import Episode, play_episodes
from agents.rollout_files import POSITION_COLUMNS, EpisodeArrays, RolloutFolder, RolloutWriter
from agents.world_files import RenderedWorld
from common.devices import Compute
from common.files import versions
from common.parameters import BASE_SET, PARAMETER_SET
from common.progress import with_progress
from common.video import enlarge, mark_action
from envs.level_state import LevelState
from envs.objects import moving_objects
from envs.procgen_env import EnvConfig
from envs.wide_view import WorldView

VIDEO_SCALE = 3
# Steps between two recorded worlds of an episode; odd, so that objects that alternate between two
# images show both.
WORLD_INTERVAL = 7
MAX_UNWRITTEN = 64  # finished episodes kept in memory while writing is slower than playing
_NUM_SLOTS = 16


def record(agent_file: str | Path, env: EnvConfig, folder: str | Path, *, num_episodes: int = 10,
           seed: int = 0, overwrite: bool = False) -> RolloutFolder:
    """Record how an agent plays, without action noise, and return the recording.

    A recording of the same agent, game and seed is continued. ``record.py`` has further options,
    such as action noise, patches, rendered worlds, videos and shards; its recordings open in the
    same way.

    Args:
        agent_file: the agent.
        env: game and range of levels.
        folder: folder of the recording, the ``data`` folder of scripts.
        num_episodes: number of levels, one episode each.
        seed: seed of levels and actions.
        overwrite: delete the previous contents of the folder.

    Raises:
        UserError: if the agent file is missing or damaged, or the folder contains something else.

    Example::

        >>> env = EnvConfig("coinrun", "hard")
        >>> recording = record("pretrained/coinrun_hard/model.pth", env, "new", num_episodes=1)
        >>> episode = recording.episode(0)  # arrays frames, hidden_states, log_probs; table steps
    """
    policy = load_agent(agent_file)
    compute = Compute(policy.device, bfloat16=False)
    writer = RolloutWriter(Path(folder), recording_settings(
        agent_file, weights_sha256(policy), env, seed, compute.precision), overwrite)
    levels = [(number, level) for number, level in enumerate(env.draw_levels(num_episodes, seed))
              if not writer.has(number)]
    episodes = play_episodes(policy, compute, env, levels, seed, _NUM_SLOTS)
    write_episodes(writer, with_progress(episodes, len(levels), "episode"), False, None)
    writer.finish()
    return writer.folder


def recording_settings(agent_file: str | Path, digest: str, env: EnvConfig, seed: int,
                       precision: str) -> dict:
    """Return the settings of a recording without action noise.

    Args:
        digest: ``weights_sha256`` of the agent.
    """
    return {"agent_file": Path(agent_file).name, "agent_sha256": digest, "env": vars(env),
            "seed": seed, "precision": precision, "log_probs_of": "the policy",
            "action_noise": None, "swap": None, PARAMETER_SET: BASE_SET, "versions": versions()}


def write_episodes(writer: RolloutWriter, episodes: Iterator[Episode], with_videos: bool,
                   worlds: WorldRecorder | None) -> tuple[int, int]:
    """Write episodes while the agent plays, and return the numbers of frames and of solved levels.
    """
    frames, solved = 0, 0
    pool = ThreadPoolExecutor(1)
    pending: list[Future] = []
    try:
        for episode in episodes:
            pending.append(pool.submit(write_episode, writer, episode, with_videos,
                                       worlds.take(episode.number) if worlds else {}))
            while len(pending) > MAX_UNWRITTEN or (pending and pending[0].done()):
                pending.pop(0).result()
            frames += len(episode.actions)
            solved += bool(episode.level_complete)
        for future in pending:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return frames, solved


def write_episode(writer: RolloutWriter, episode: Episode, with_video: bool,
                  worlds: dict[int, RenderedWorld]) -> None:
    """Write an episode, its worlds by row, and a video of its enlarged frames with the actions
    marked."""
    video = None
    if with_video:
        video = (mark_action(enlarge(frame, VIDEO_SCALE), action)
                 for frame, action in zip(episode.frames, episode.actions))
    writer.add(episode.number, EpisodeArrays(episode.frames, episode.hidden_states,
                                             episode.log_probs, steps_table(episode)), video,
               worlds)


def steps_table(episode: Episode) -> pd.DataFrame:
    """Return the rows of an episode's CSV without the columns episode and global_step."""
    return pd.DataFrame({
        "level_seed": episode.level_seed, "episode_step": np.arange(len(episode.actions)),
        "done": episode.dones.astype(int), "reward": episode.rewards, "value": episode.values,
        "action": episode.actions, **dict(zip(POSITION_COLUMNS, episode.positions.T))})


class WorldRecorder:
    """Callback of ``play_episodes`` that renders the world of every WORLD_INTERVAL-th row.

    Args:
        config: the game.

    Raises:
        UserError: if worlds of the game cannot be rendered.
    """

    def __init__(self, config: EnvConfig):
        self._view = WorldView(config)
        self._worlds: dict[int, dict[int, RenderedWorld]] = {}  # by episode and row

    def __call__(self, number: int, row: int, state_of: Callable[[], bytes | None]) -> None:
        if row % WORLD_INTERVAL or (data := state_of()) is None:
            return
        state = LevelState.parse(data)
        if not self._worlds:
            self._view.check(state)
        self._worlds.setdefault(number, {})[row] = RenderedWorld(
            self._view.draw(state), moving_objects(state))

    def take(self, number: int) -> dict[int, RenderedWorld]:
        """Return the worlds of an episode by row, and forget them."""
        return self._worlds.pop(number, {})
