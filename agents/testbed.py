"""One testbed for all studies: an agent plays the same starts under several conditions.

The starts are levels, states in the middle of episodes, or simulated starts. All conditions draw
the same random numbers, so runs from the same start are pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from agents.episodes import (
    Episode,
    EpisodeState,
    Evaluation,
    Game,
    PlayOptions,
    Run,
    Watch,
    play_episodes,
    summarise,
)
from agents.failures import attribute_failures
from agents.hooks import ActivePatches, patched
from agents.networks import Policy
from agents.patch import Array, BatchInfo, Patch
from agents.reference_set import ReferenceSet, played_reference
from common.devices import Compute
from common.progress import with_progress
from envs.procgen_env import EnvConfig, LevelEdit
from stats import effects


@dataclasses.dataclass(frozen=True)
class Condition(effects.Condition[effects.Value]):
    """A condition of a study, and how the agent plays under it.

    Attributes:
        patches: patches of the agent.
        alter_state: change of the states that enter the agent, see ``PlayOptions``.
        edit, edit_every_step: edit of every level instead of the testbed's, see ``PlayOptions``.
        policy: agent that plays instead of the testbed's.
        actions: actions that replace the agent's first actions.

    Example::

        >>> patch = parse_patch("zero@embedder.block2:5")
        >>> condition = Condition("without channel 5", patches=[patch])
    """

    label: str = ""
    pattern: str = ""
    _: dataclasses.KW_ONLY
    patches: Sequence[Patch] = dataclasses.field(default=(), repr=False, compare=False)
    alter_state: Callable[[Tensor, BatchInfo], Tensor] | None = dataclasses.field(
        default=None, repr=False, compare=False)
    edit: LevelEdit | None = dataclasses.field(default=None, repr=False, compare=False)
    edit_every_step: bool = dataclasses.field(default=False, repr=False, compare=False)
    policy: Policy | None = dataclasses.field(default=None, repr=False, compare=False)
    actions: Sequence[int] = dataclasses.field(default=(), repr=False, compare=False)


BASELINE: Condition = Condition("unaltered", "unaltered")
WITHOUT_FRAMES = PlayOptions(keep_frames=False)


@dataclasses.dataclass(frozen=True)
class Played:
    """Runs under one condition.

    Attributes:
        condition: the condition.
        episodes: the runs, in the order of the starts.
        patches: the condition's patches, with the sizes of their changes.
    """

    condition: Condition
    episodes: Sequence[Episode]
    patches: ActivePatches

    @property
    def table(self) -> pd.DataFrame:
        """Table with a row per run: ``level`` (number of the run), ``level_seed``, ``cause`` (see
        ``Episode.end``), ``length`` (steps) and ``return`` (sum of rewards)."""
        return pd.DataFrame(
            [(episode.number, episode.level_seed, episode.end, episode.length,
              episode.total_reward) for episode in self.episodes],
            columns=["level", "level_seed", "cause", "length", "return"])


@dataclasses.dataclass(frozen=True)
class Testbed:
    """Starts from which an agent plays under several conditions, with the same random numbers.

    Play levels with and without a patch; then force each action in one state of the first level,
    and continue from it ten times::

        testbed = Testbed(policy, compute, EnvConfig("coinrun", "hard"), [3, 5, 8], causes=True)
        plain, patched = testbed.play([BASELINE, Condition("patched", patches=[patch])])
        trials = dataclasses.replace(testbed, starts=[*testbed.states({0: [20]}).values()],
                                     num_repeats=10)
        forced = trials.play([Condition(f"action {a}", actions=[a]) for a in range(NUM_ACTIONS)])
        {played.condition.name: played.table["return"].mean() for played in forced}

    Attributes:
        policy: the agent.
        compute: device and precision.
        game: the real game, or a simulator.
        starts: level seeds, numbers of simulated starts, or states to continue from.
        seed: seed of the random actions. Run k draws them from the stream (seed, k).
        num_slots: number of runs that are played in parallel.
        edit: edit of every level.
        num_repeats: number of runs per start, with different random actions; run k begins at
            ``starts[k // num_repeats]``.
        options: how to act, and which data to keep.
        causes: whether to find the causes of failures in the real game, see
            ``attribute_failures``.
        draw_reference: function that maps a size and a seed to a reference set; None to draw it
            from other levels.

    Example::

        >>> compute, env = Compute(policy.device, bfloat16=False), EnvConfig("coinrun", "hard")
        >>> testbed = Testbed(policy, compute, env, [3])
        >>> plain, forced = testbed.play([Condition("agent"), Condition("jumps", actions=[5])])
    """

    policy: Policy
    compute: Compute
    game: EnvConfig | Game
    starts: Sequence[int | EpisodeState]
    seed: int = 0
    num_slots: int = 64
    edit: LevelEdit | None = None
    num_repeats: int = 1
    options: PlayOptions = WITHOUT_FRAMES
    causes: bool = False
    draw_reference: Callable[[int, int], ReferenceSet] | None = None

    __test__: ClassVar[bool] = False  # pytest takes the name for a class of tests

    @property
    def env(self) -> EnvConfig | None:
        """Configuration of the real game; None in a simulator."""
        return self.game if isinstance(self.game, EnvConfig) else None

    @property
    def num_runs(self) -> int:
        """Number of runs under each condition."""
        return len(self.starts) * self.num_repeats

    def play(self, conditions: Sequence[Condition],
             std: Mapping[str, Array] | None = None) -> Iterator[Played]:
        """Play all starts under each condition, and yield the runs of one condition at a time.

        Adjacent conditions without patches that differ only in their ``actions`` share the slots.

        Args:
            conditions: the conditions.
            std: standard deviations of the units of patched layers, see ``patched``.
        """
        for _, group in itertools.groupby(conditions, key=_pass_of):
            members, num = list(group), self.num_runs
            runs = [run._replace(number=place * num + run.number, stream=run.number)
                    for place, condition in enumerate(members)
                    for run in self._runs(condition, range(num))]
            policy = members[0].policy or self.policy
            with patched(policy, members[0].patches, std) as active:
                episodes = sorted(with_progress(self._play(members[0], runs), len(runs), "episode"),
                                  key=lambda episode: episode.number)
            for place, condition in enumerate(members):
                own = episodes[place * num:(place + 1) * num]
                yield Played(condition, [dataclasses.replace(episode, number=number)
                                         for number, episode in enumerate(own)], active)

    def episodes(self, condition: Condition = BASELINE, numbers: Collection[int] | None = None
                 ) -> Iterator[Episode]:
        """Play under one condition, and yield the episodes as they end.

        Args:
            condition: the condition.
            numbers: numbers of the runs to play; None for all.
        """
        runs = self._runs(condition, range(self.num_runs) if numbers is None else numbers)
        with patched(condition.policy or self.policy, condition.patches):
            yield from self._play(condition, runs)

    def states(self, steps: Mapping[int, Collection[int]], condition: Condition = BASELINE
               ) -> dict[tuple[int, int], EpisodeState]:
        """Play some runs again, and return their states before some of their steps.

        Args:
            steps: numbers of steps, counted from the start of the run, by number of the run.
            condition: the condition under which the runs are played.

        Returns:
            States by number of the run and step, in the order of ``steps``.

        Raises:
            KeyError: if a run has no such step.
        """
        read: dict[tuple[int, int], Any] = {}

        def watch(number: int, step: int, state: Callable[[], Any]) -> None:
            if step in steps[number]:
                read[number, step] = state()

        last = max(max(of_run) for of_run in steps.values()) + 1
        options = dataclasses.replace(self.options, max_steps=last, keep_outputs=True)
        runs = {run.number: run for run in self._runs(condition, steps)}
        policy = condition.policy or self.policy
        with patched(policy, condition.patches):
            episodes = {episode.number: episode for episode in self._play(
                condition, list(runs.values()), options, watch)}
        return {(number, step): EpisodeState(
            episodes[number].level_seed, step + _step_of(runs[number].start), read[number, step],
            episodes[number].hidden_states[step])
            for number, of_run in steps.items() for step in of_run}

    @property
    def levels(self) -> list[int]:
        """Seeds of the levels; empty in a simulator."""
        return [] if self.env is None else [
            start if isinstance(start, int) else start.level_seed for start in self.starts]

    def reference(self, size: int, seed: int) -> ReferenceSet:
        """Draw a reference set of frames that these runs do not use."""
        if self.draw_reference is not None:
            return self.draw_reference(size, seed)
        assert isinstance(self.game, EnvConfig)
        return played_reference(self.policy, self.compute, self.game, self.levels, size, seed,
                                self.edit)

    def _runs(self, condition: Condition, numbers: Collection[int]) -> list[Run]:
        return [Run(number, self.starts[number // self.num_repeats], condition.actions)
                for number in numbers]

    def _play(self, condition: Condition, runs: Sequence[Run], options: PlayOptions | None = None,
              watch: Watch | None = None) -> Iterator[Episode]:
        """Play runs under a condition, whose patches are active; with causes unless there is a
        ``watch``."""
        play = functools.partial(
            play_episodes, condition.policy or self.policy, self.compute, self.game, runs,
            self.seed, self.num_slots, dataclasses.replace(
                options or self.options, alter_state=condition.alter_state,
                edit=condition.edit or self.edit, edit_every_step=condition.edit_every_step))
        if self.causes and watch is None and self.env is not None:
            return attribute_failures(self.env, play)
        return play(watch=watch)


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
    testbed = Testbed(policy, Compute(policy.device, bfloat16=False), env,
                      env.draw_levels(num_episodes, seed), seed,
                      options=dataclasses.replace(WITHOUT_FRAMES, greedy=greedy))
    return summarise(with_progress(testbed.episodes(), testbed.num_runs, "episode"))


def _pass_of(condition: Condition) -> tuple:
    """Return a key that is equal for conditions whose runs may share forward passes."""
    if condition.patches or condition.alter_state is not None:
        return (id(condition),)
    return id(condition.policy), id(condition.edit), condition.edit_every_step


def _step_of(start: int | EpisodeState) -> int:
    return start.step if isinstance(start, EpisodeState) else 0
