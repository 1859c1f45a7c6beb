"""At what distance does an agent of CoinRun see an object, and by which cue?

Flat corridors with a single object are built through the level state (``envs.corridor``). The agent
is made to walk towards the object, or to stand at a distance from it, while its policy and value
are read at each step: P(jump) against the distance is a psychometric function, which
``psychometric_results`` fits. The look of an object and its nature can be of different kinds.

From the same states the agent also plays on, and a script jumps once and runs on: the distances
from which the script succeeds are those at which a jump is right.

A killed run resumes after the last finished condition, and shards divide the conditions.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.agent_file import agent_title, load_agent
from agents.episodes import Episode, PlayOptions
from agents.networks import Policy, blind_policy
from agents.provenance import agent_sha256
from agents.testbed import Condition, Testbed
from analysis.memory.lesions import RESET, Lesion, LesionedMemory
from analysis.psychometric_results import (
    BLIND,
    EDITED,
    INTACT,
    LESIONED,
    MOVED,
    PLAY,
    PLAYED,
    PLAYS,
    PSYCHOMETRICS,
    RESET_ALWAYS,
    SCRIPT,
    WALK,
    WALKED,
    WALKS,
    Setting,
    effects,
    headline,
    plot,
    report_of,
    successes,
    thresholds,
)
from analysis.questions import QuestionOptions
from common.cli import count
from common.devices import Compute
from common.errors import UserError, nearest
from common.game_constants import ACTION_DIRECTIONS, NUM_ACTIONS
from common.options import ShardOptions, command, option
from common.palette import DPI
from common.results import ResultStore
from common.shards import WHOLE
from envs.corridor import (
    COLUMN,
    ENEMY,
    ENEMY_SPEED,
    FLOOR,
    PIT,
    REACH,
    SPEED,
    Corridor,
    ground_theme,
)
from envs.procgen_env import EnvConfig, first_states
from stats.effects import check_starts

JUMPS = np.transpose(ACTION_DIRECTIONS)[1] == 1
RIGHT, UPRIGHT, STAY = (ACTION_DIRECTIONS.index(way) for way in ((1, 0), (1, 1), (0, 0)))
WALK_STEPS = 20  # steps until the player has passed the near edge
STAND_STEPS = 4  # steps for which the player stands before its policy is read
STAND_GAPS = np.arange(0, 6, 0.5)
PLAY_STEPS = 96
START_GAP = 8.0  # squares at which every walk and play begins
NUM_ROTATIONS = 5
ON_GROUND = 0.01


def gap_of(text: str) -> float:
    """argparse type: squares between the player and the object, at most START_GAP."""
    value = float(text)
    if not 0 <= value <= START_GAP:
        raise argparse.ArgumentTypeError(f"must be from 0 to {START_GAP:g}, not {text}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsychometricOptions(QuestionOptions, ShardOptions):
    """Measure at what distance an agent of CoinRun jumps at saws, enemies, crates and pits in
    corridors with a single object, and whether it reacts to the object's look or place."""

    edited_file: Path | None = option(
        None, "edited agent to compare, for example from attribution.choose_edits")
    conditions: tuple[str, ...] | None = option(
        None, "walks and plays to measure, named like their files, for example walks/intact_saw "
              "plays/script_saw; all by default")
    releases: tuple[float, ...] = option(
        (8, 6, 5, 4, 2, 1, 0.5, 0), "squares from which agent and script also go on in corridors "
        "with a saw, an enemy, a crate or a pit; 8 alone is the fastest", type=gap_of)
    num_episodes: int = option(60, "number of unseen levels, whose themes the corridors have",
                               type=count)
    output_dir: Path = option(Path("analysis/psychometrics"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def measure_psychometrics(options: PsychometricOptions) -> pd.DataFrame | None:
    """Measure all conditions, write all files and return the table of thresholds; None for a shard.

    Raises:
        UserError: if the game is not CoinRun, there are too few levels, or there is no condition of
            a given name.
    """
    config, compute = options.unseen_levels(), options.compute
    check_starts(options.num_episodes, "--num_episodes")
    agents = [load_agent(path, compute.device)
              for path in (options.agent_file, options.edited_file) if path is not None]
    levels = config.draw_levels(options.num_episodes, options.seed)
    players = Players(agents[0], agents[1] if len(agents) > 1 else None, compute, config,
                      tuple(levels), options.seed, options.num_envs, options.releases)
    units = players.conditions(options.conditions)
    store = ResultStore(options.output_dir, PSYCHOMETRICS)
    store.open({
        **options.settings(config), "num_episodes": len(levels), "releases": list(options.releases),
        "edited_sha256": options.edited_file and agent_sha256(options.edited_file)},
        options.overwrite, options.shard,
        {"conditions": [f"{entry} {name}" for entry, name in units]}, options.join)
    for entry, name in options.shard.of(units):
        if not store.has(entry, name):
            table = players.walks(WALKS[name]) if entry == WALK else players.plays(PLAYS[name])
            store.write(entry, name, value=table)
            column = "jump" if entry == WALK else "success"
            print(f"{entry} {name}: mean of {column} {table[column].mean():.3f}", flush=True)
    store.finish()
    return write_results(store, units, options) if options.shard == WHOLE else None


@dataclasses.dataclass(frozen=True)
class Players:
    """The agent and its altered versions in the corridors of some levels.

    Attributes:
        policy, edited: the agent, and an edited agent.
        levels: level seeds, which also draw the themes.
        num_slots: number of corridors played in parallel.
        releases: squares from which agent and script also go on, see ``Setting.releases``.
    """

    policy: Policy
    edited: Policy | None
    compute: Compute
    config: EnvConfig
    levels: tuple[int, ...]
    seed: int
    num_slots: int
    releases: tuple[float, ...] = ()

    def has(self, player: str) -> bool:
        """Return whether there is such a player: an edited agent, and a memory to change."""
        return {EDITED: self.edited is not None, RESET_ALWAYS: self.policy.recurrent,
                MOVED: self.policy.recurrent}.get(player, True)

    def conditions(self, chosen: Sequence[str] | None) -> list[tuple[str, str]]:
        """Return entry and key of the conditions with the given names; None for all.

        Raises:
            UserError: if there is no condition of a name.
        """
        units = {f"{entry}s/{name}": (entry, name)
                 for entry, settings in ((WALK, WALKS), (PLAY, PLAYS))
                 for name, setting in settings.items() if self.has(setting.player)}
        for name in chosen or ():
            if name not in units:
                raise UserError(f"--conditions: this agent has no '{name}'{nearest(name, units)}")
        return [unit for name, unit in units.items() if chosen is None or name in chosen]

    def walks(self, setting: Setting) -> pd.DataFrame:
        """Read the policy while the player walks to the object, or stands in front of it.

        Returns:
            A row per level and step, with the columns ``number``, ``level_seed``, ``ground`` (theme
            of the ground) and ``step``; ``gap``: squares between the player's front and the
            object's near edge; ``jump``: probability of the actions that jump; and ``value``. Steps
            off the ground or past the edge are left out, but the player may stand on the edge of a
            pit. Of a standing player, only the last step at each distance is read.
        """
        if not setting.stands:
            return self._read(setting.player, setting.scene, RIGHT, WALK_STEPS)
        lead = ENEMY_SPEED * STAND_STEPS if setting.scene.kind == ENEMY else 0
        tables = [self._read(setting.player, dataclasses.replace(setting.scene, gap=gap + lead,
                                                              speed=0), STAY, STAND_STEPS)
                  for gap in STAND_GAPS]
        table = pd.concat(tables, ignore_index=True)
        return table[table["step"] == STAND_STEPS].reset_index(drop=True)

    def _read(self, player: str, scene: Corridor, action: int, num_steps: int) -> pd.DataFrame:
        tables, last = [], -2 * REACH[0] if scene.kind == PIT else 0
        for condition in self._altered(player, scene, [action] * num_steps):
            rows: list[tuple] = []
            for episode in self._play([condition], num_steps)[0]:
                jump = np.exp(episode.log_probs)[:, JUMPS].sum(axis=1)
                gap = gaps(episode.positions, scene)
                rows += [(episode.number, episode.level_seed, self._grounds[episode.number], step,
                          gap[step], jump[step], episode.values[step])
                         for step in np.flatnonzero(grounded(episode.positions) & (gap >= last))]
            tables.append(pd.DataFrame(rows, columns=list(WALKED)))
        return tables[0].assign(**{name: np.mean([table[name] for table in tables], axis=0)
                                   for name in ("jump", "value")})

    def plays(self, setting: Setting) -> pd.DataFrame:
        """Play on from one or several distances: the agent by itself, or a script that jumps once.

        Returns:
            A row per level and distance, with the columns ``number``, ``level_seed`` and ``step``
            (steps walked before); ``gap`` (see ``walks``) at this step; ``success`` and ``died``;
            and ``takeoff``: gap at the start of the jump that passes the object's near edge, NaN
            if there is none.
        """
        scene, rows = setting.scene, []
        closing = SPEED + (ENEMY_SPEED if scene.kind == ENEMY else 0)
        walks = sorted({0, *(int((START_GAP - gap) / closing) for gap in self.releases
                             if setting.releases)})
        jump = [UPRIGHT] + [RIGHT] * PLAY_STEPS if setting.player == SCRIPT else []
        conditions = [self._altered(setting.player, scene, [RIGHT] * walked + jump)[0]
                      for walked in walks]
        for walked, episodes in zip(walks, self._play(conditions, PLAY_STEPS)):
            for episode in episodes:
                gap = gaps(episode.positions, scene)
                solved = bool(episode.level_complete)
                rows.append((episode.number, episode.level_seed, walked, gap[walked] if len(gap)
                             > walked else np.nan, int(solved), int(episode.dones[-1]
                             and not solved), takeoff(episode.positions, gap)))
        return pd.DataFrame(rows, columns=list(PLAYED))

    def _play(self, conditions: Sequence[Condition], num_steps: int) -> list[Sequence[Episode]]:
        testbed = Testbed(
            self.policy, self.compute, self.config, self.levels, self.seed, self.num_slots,
            options=PlayOptions(keep_frames=False, keep_positions=True, max_steps=num_steps))
        return [played.episodes for played in testbed.play(conditions)]

    def _altered(self, player: str, scene: Corridor, actions: list[int]) -> list[Condition]:
        """Return the conditions over which a player is averaged; only MOVED has several."""
        policy = {EDITED: self.edited, BLIND: self._blind, SCRIPT: self._blind}.get(player)
        edit: dict[str, Any] = {"edit": scene, "edit_every_step": scene.repeated,
                                "policy": policy, "actions": actions}
        if player == RESET_ALWAYS:
            return [Condition(player, **edit, alter_state=self._lesion())]
        if player == MOVED:
            return [Condition(player, **edit, alter_state=self._lesion(control))
                    for control in range(NUM_ROTATIONS)]
        return [Condition(player, **edit)]

    @functools.cached_property
    def _grounds(self) -> list[int]:
        return [ground_theme(data) for data, _ in first_states(self.config, self.levels)]

    @functools.cached_property
    def _blind(self) -> Policy:
        return blind_policy([0.0 if action in (RIGHT, UPRIGHT) else -100.0
                             for action in range(NUM_ACTIONS)])

    def _lesion(self, control: int | None = None) -> LesionedMemory:
        """Return a reset of the hidden state at every step, or a random change of equal size."""
        std, size = self._scale
        return self._reset(std) if control is None else self._reset(std, size, control)

    def _reset(self, std: Tensor, size: float | None = None, control: int | None = None
               ) -> LesionedMemory:
        return LesionedMemory(
            Lesion(RESET, control=control), np.zeros(len(self.levels), np.int64),
            self.policy.initial_states(1)[0], std, size=size)

    @functools.cached_property
    def _scale(self) -> tuple[Tensor, float]:
        """Standard deviations of the hidden units in the walks of LESIONED, and the mean size of
        the changes by a reset at every step."""
        walks: list[Condition] = [Condition(INTACT, edit=scene, actions=[RIGHT] * WALK_STEPS)
                                  for scene in LESIONED]
        states = [episode.hidden_states for episodes in self._play(walks, WALK_STEPS)
                  for episode in episodes]
        std = torch.from_numpy(np.concatenate(states).std(axis=0)).to(self.compute.device)
        resets = [self._reset(std) for _ in walks]
        for walk, reset in zip(walks, resets):
            self._play([dataclasses.replace(walk, alter_state=reset)], WALK_STEPS)
        return std, (sum(reset.moved.sum() for reset in resets)
                     / sum(reset.num_steps.sum() for reset in resets))


def gaps(positions: np.ndarray, scene: Corridor) -> np.ndarray:
    """Return the squares between the player's front and the object's near edge at each step.

    Args:
        positions: x and y of the player's centre at each step (L, 2).
        scene: the corridor; without an object, the edge is where the object would be.
    """
    speed = ENEMY_SPEED if scene.kind == ENEMY else 0
    return COLUMN - speed * np.arange(len(positions)) - positions[:, 0] - REACH[0]


def grounded(positions: np.ndarray) -> np.ndarray:
    """Return whether the player stands on the ground at each step; False after its death."""
    return np.abs(positions[:, 1] - FLOOR - REACH[1]) < ON_GROUND


def takeoff(positions: np.ndarray, gap: np.ndarray) -> float:
    """Return the gap at the start of the jump that passes the object's near edge, NaN if there is
    none; see ``gaps``."""
    high = positions[:, 1] > FLOOR + REACH[1] + 1
    passed = np.flatnonzero(high & (gap < 0))
    if not len(passed):
        return np.nan
    grounded = np.flatnonzero(~high[:passed[0]])
    return float(gap[grounded[-1]]) if len(grounded) else np.nan


def write_results(store: ResultStore, units: list[tuple[str, str]], options: PsychometricOptions
                  ) -> pd.DataFrame:
    """Write the tables, the report and the figure; return the table of thresholds."""
    walks, plays = ({name: store.read(entry, name) for entry, name in units if entry == wanted}
                    for wanted in (WALK, PLAY))
    table, success = thresholds(walks, options.seed), successes(plays)
    differences = effects(walks, plays, options.seed)
    for entry, value in (("thresholds", table), ("success", success), ("effects", differences)):
        store.write(entry, value=value)
    title = agent_title(options.agent_file)
    store.write("report", value=report_of(table, success, differences, (
        f"{title} in corridors with the themes of {options.num_episodes} unseen levels")))
    with store.file("figure") as path:
        plot(walks, plays, table, title, options.seed).savefig(path, dpi=DPI)
    print(f"{headline(table, success, differences)}\nwrote {store.file_of('report')}")
    return table


main = command(PsychometricOptions, measure_psychometrics)

if __name__ == "__main__":
    raise SystemExit(main())
