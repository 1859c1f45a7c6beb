"""Causes of failed episodes, and the conditions under which failures are counted.

Procgen reports whether a level is solved, but not why an episode ended. The cause of a failed
episode is the hazard whose removal lets the episode continue after its last action. The last step
is therefore repeated in copies of the level, each without the hazards of one kind near the player:
if the episode continues in a copy, that kind is the cause.

The state of a level is read only every few steps, which is much cheaper than at every step. The
state before a failure is restored by replaying the actions since the last state that was read.

The conditions are the original agent, edited agents, invisible hazards and controls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.edits import Edit, with_edits
from agents.episodes import Episode, PlayOptions, play_episodes
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.reference_set import ReferenceSet, activations_of
from agents.replay import recorded_game, replayed
from agents.rollout_files import RolloutFolder
from attribution.editing import ChangeSizes, random_edits
from attribution.failures.results import ORIGINAL, SOLVED, episodes_table
from common.devices import Compute
from common.errors import UserError, nearest
from common.progress import Progress
from common.results import ResultStore
from envs.level_state import LevelState
from envs.objects import GAME_OBJECTS_FILE, GameObject, hazards_of, in_view, invisible, removed
from envs.procgen_env import EnvConfig, LevelEdit, StateView
from stats.effects import Condition

TIMEOUT = "timeout"
MULTIPLE = "multiple"  # removing all kinds of hazard prevents the failure, but no single kind does
OTHER = "other"  # removing all kinds of hazard does not prevent the failure
ENDED = "ended"  # the hazards of the game are not known
NEAR = 3.0  # distance from the player in cells within which hazards are removed
STEPS_PER_STATE = 16  # steps of an episode between two states that are read


def causes_of(game: str) -> tuple[str, ...]:
    """Return all possible causes of failure in a game, its hazards first."""
    names = [kind.name for kind in hazards_of(game)]
    return (*names, MULTIPLE, TIMEOUT, OTHER) if names else (ENDED, TIMEOUT)


def unknown_hazards(game: str) -> str:
    """Return a note if the hazards of a game are not known; otherwise an empty string."""
    return "" if hazards_of(game) else (
        f"{GAME_OBJECTS_FILE.name} has no table of hazards of {game}, so its causes of failure are "
        f"{TIMEOUT} and {ENDED}.")


class FailureAttributor(StateView):
    """Finds the causes of failures by replaying steps in a copy of the level.

    Args:
        config: configuration of the game.
    """

    def __init__(self, config: EnvConfig):
        super().__init__(config)
        self._hazards = hazards_of(config.env_name)

    def before_last(self, state: bytes, actions: Sequence[int]) -> bytes:
        """Return the state before the last action of an episode, by replaying all actions but the
        last from an earlier state.

        Args:
            state: state of the level before the first of the actions.
            actions: actions up to the end of the episode.

        Raises:
            UserError: if the episode ends before the last action.
        """
        self.set(state)
        for action in actions[:-1]:
            self._check(not self.step(action)[0])
        return self.state()

    def cause(self, before: bytes, action: int) -> str | None:
        """Determine the cause of a failure.

        Args:
            before: state before the step that ended the episode.
            action: action of this step.

        Returns:
            One of ``causes_of``; None if the step solves the level.

        Raises:
            UserError: if the episode does not end when the step is repeated.
        """
        state = LevelState.parse(before, self._game)
        ended, solved = self._step_from(before, action)
        self._check(ended)
        if solved:
            return None
        if state.step["cur_time"] + 1 >= state.step["timeout"]:
            return TIMEOUT
        if not self._hazards:
            return ENDED
        for kind in self._hazards:
            if self._saves([kind], state, before, action):
                return kind.name
        return MULTIPLE if self._saves(self._hazards, state, before, action) else OTHER

    def _saves(self, kinds: Sequence[GameObject], state: LevelState, before: bytes,
               action: int) -> bool:
        """Return whether the step no longer ends the episode, or solves the level, if all nearby
        hazards of the given kinds are removed.

        Args:
            kinds: kinds of hazard.
            state, before: state before the step, parsed and as bytes.
            action: action of the step.
        """
        for kind in kinds:
            state = removed(state, kind, NEAR)
        without = state.to_bytes()
        return without != before and (
            self._step_from(without, action) in ((False, False), (True, True)))

    def _step_from(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Take a step from a state; return whether it ends the episode, and whether it solves the
        level."""
        self.set(state)
        return self.step(action)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise UserError(f"a level of {self._game} does not continue from its state as it did "
                            "before; was it played with another version of Procgen?")


class StateSampler:
    """``watch`` callback of ``play_episodes`` that reads the states of levels at some steps, keeps
    the last state of each episode, and estimates the number of steps with hazards in view.

    Args:
        game: name of the game.

    Attributes:
        last: pair of the step at which the last state was read and this state, by the episode's
            number.
        in_view: estimated number of steps with a hazard of each kind in view, by the episode's
            number. The estimate is STEPS_PER_STATE times the number of read states with such a
            hazard.
    """

    def __init__(self, game: str):
        self._game, self._hazards = game, hazards_of(game)
        self.last: dict[int, tuple[int, bytes]] = {}
        self.in_view: dict[int, np.ndarray] = {}

    def __call__(self, number: int, step: int, read: Callable[[], bytes]) -> None:
        # The offset by the episode's number samples all steps equally often over many episodes.
        sampled = (step + number) % STEPS_PER_STATE == 0
        if step == 0:
            self.in_view[number] = np.zeros(len(self._hazards), int)
        if step and not sampled:
            return
        self.last[number] = step, read()
        if sampled and self._hazards:
            level = LevelState.parse(self.last[number][1], self._game)
            self.in_view[number] += [STEPS_PER_STATE * in_view(level, kind)
                                     for kind in self._hazards]


def attribute_failures(config: EnvConfig, play: Callable[..., Iterator[Episode]]
                       ) -> Iterator[tuple[Episode, str | None, list[int]]]:
    """Play episodes, and yield each with the cause of its failure as soon as it ends.

    Args:
        config: configuration of the game.
        play: ``play_episodes`` with all arguments bound except ``watch``.

    Yields:
        The episode; the cause of its failure, one of ``causes_of``, or None if the level was
        solved; and for each kind of hazard, in the order of ``hazards_of``, the estimated number of
        steps with such a hazard in view, see ``StateSampler``.
    """
    sampler = StateSampler(config.env_name)
    with contextlib.closing(FailureAttributor(config)) as attributor:
        for episode in play(watch=sampler):
            cause = None
            step, state = sampler.last.pop(episode.number)
            if not episode.level_complete:
                actions = episode.actions[step:-1].tolist()
                cause = attributor.cause(attributor.before_last(state, actions), actions[-1])
            yield episode, cause, sampler.in_view.pop(episode.number).tolist()


def recorded_causes(folder: RolloutFolder, episodes: Iterable[int]) -> dict[int, str]:
    """Find the causes of the failed episodes of a recording by replaying it in the real game.

    Every frame is compared with the recording, which takes 0.3 ms per step.

    Args:
        folder: the recording.
        episodes: numbers of finished episodes; see ``RolloutFolder.finished``.

    Returns:
        Cause by episode number; episodes that solved their level are left out.

    Raises:
        UserError: if a frame or the end of an episode differs from the recording; see
            ``agents.replay.replayed``.
    """
    causes = {}
    with contextlib.closing(FailureAttributor(recorded_game(folder))) as attributor:
        for episode in episodes:
            actions = folder.steps(episode)["action"]
            last = len(actions) - 2  # the row before the terminal row
            [(_, state)] = replayed(folder, episode, [last])
            cause = attributor.cause(state.to_bytes(), int(actions.iloc[last]))
            if cause is not None:
                causes[episode] = cause
    return causes


@dataclasses.dataclass(frozen=True)
class Run:
    """Agent and level edit of a condition.

    Attributes:
        policy: the agent.
        edit: optional edit of every level, before its first step.
        edit_every_step: whether the level edit is repeated after every step.
        moved: mean norm of the change that the agent's edits cause in a layer; NaN without edits.
    """

    policy: Policy
    edit: LevelEdit | None = None
    edit_every_step: bool = False
    moved: float = math.nan


def run_of(condition: Condition[Run]) -> Run:
    """Return the agent and level edit of a condition, which must have them."""
    assert condition.value is not None
    return condition.value


@dataclasses.dataclass(frozen=True)
class Levels:
    """Levels that are played under every condition, and settings for playing them.

    Attributes:
        config: configuration of the game.
        compute: device and precision.
        levels: number and level seed of each episode.
        seed: seed of the actions.
        num_envs: number of episodes played in parallel.
    """

    config: EnvConfig
    compute: Compute
    levels: Sequence[tuple[int, int]]
    seed: int
    num_envs: int

    def play(self, condition: Condition[Run], levels: Sequence[tuple[int, int]],
             keep_frames: bool = False) -> Callable[..., Iterator[Episode]]:
        """Return ``play_episodes`` with all arguments bound except ``watch``.

        Args:
            condition: condition under which the levels are played.
            levels: number and level seed of each episode.
            keep_frames: whether episodes keep their frames.
        """
        run = run_of(condition)
        options = PlayOptions(edit=run.edit, edit_every_step=run.edit_every_step,
                              keep_frames=keep_frames)
        return functools.partial(play_episodes, run.policy, self.compute, self.config, levels,
                                 self.seed, self.num_envs, options)


def label_agents(files: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return the labels of agent files; by default the file names without their suffix.

    Raises:
        UserError: if the number of labels is wrong, or two labels are the same.
    """
    labels = [path.stem for path in files] if labels is None else list(labels)
    if len(set(labels)) != len(files):
        raise UserError(f"--labels must give {len(files)} different names to the agent files, not "
                        f"{', '.join(labels)}")
    return labels


def agent_conditions(files: Sequence[Path], labels: Sequence[str],
                     device: torch.device) -> list[Condition[Run]]:
    """Load agents, and return one condition per agent.

    Args:
        files: agent files, the original agent first, then edited agents.
        labels: labels of the agents.
        device: device of the agents.

    Raises:
        UserError: if a file is missing or is not an agent file.
    """
    return [Condition(f"edited_{label}" if number else ORIGINAL, label, label,
                      value=Run(load_agent(path, device)),
                      settings={"agent_sha256": agent_sha256(path)})
            for number, (path, label) in enumerate(zip(files, labels))]


def edits_between(original: Policy, edited: Policy) -> tuple[Edit, ...]:
    """Return the edits that an edited agent has in addition to those of the original agent; none if
    the two agents differ in their weights or in the original's edits."""
    first = len(original.edits)
    weights, own = edited.state_dict(), original.state_dict()
    is_extended = weights.keys() == own.keys() and all(
        torch.equal(weights[name], own[name]) for name in own) and all(
        (edit.layer, edit.strength) == (other.layer, other.strength)
        and torch.equal(edit.directions, other.directions)
        for edit, other in zip(edited.edits, original.edits))
    return edited.edits[first:] if is_extended else ()


def match_controls(conditions: Sequence[Condition[Run]], reference: ReferenceSet, number: int,
                   seed: int) -> tuple[list[Condition[Run]], list[Condition[Run]]]:
    """Measure the sizes of edits, and draw random edits of the same size as controls.

    Args:
        conditions: conditions of the agents, the original first.
        reference: frames on which sizes are measured.
        number: number of controls per edited agent.
        seed: seed of the controls.

    Returns:
        The conditions with the sizes of their edits (``Run.moved``), and the controls of all edited
        agents.
    """
    original = run_of(conditions[0]).policy
    sized, controls = [conditions[0]], []
    for condition in conditions[1:]:
        edits = edits_between(original, run_of(condition).policy)
        outputs = activations_of(original, reference.frames, [edit.layer for edit in edits],
                                 reference.hidden_states) if edits else {}
        moved = sum(ChangeSizes(outputs[edit.layer], edit.signed(outputs[edit.layer].shape[1])
                                ).of(edit) for edit in edits) if edits else math.nan
        sized.append(dataclasses.replace(
            condition, value=dataclasses.replace(run_of(condition), moved=moved)))
        candidates = [random_edits(edit, outputs[edit.layer], number, seed) for edit in edits]
        for place, group in enumerate(zip(*candidates)):
            drawn = [control.edit for control in group]
            controls.append(Condition(
                f"control_{place:03d}_{condition.label}", f"control {place}", condition.pattern,
                control=True, matched=all(control.near for control in group),
                value=Run(with_edits(original, drawn), moved=moved),
                settings={**condition.settings, "control": place,
                          "strengths": [edit.strength for edit in drawn]}))
    return sized, controls


def find_hazards(names: Sequence[str], game: str) -> list[GameObject]:
    """Return the hazards of a game with the given names.

    Raises:
        UserError: if the game has no hazard of a given name.
    """
    hazards = {kind.name: kind for kind in hazards_of(game)}
    for name in names:
        if name not in hazards:
            raise UserError(f"{game} has no hazard '{name}'" + (
                nearest(name, hazards) if hazards else f": {unknown_hazards(game)}"))
    return [hazards[name] for name in dict.fromkeys(names)]


def invisible_hazards(names: Sequence[str], game: str, original: Condition[Run],
                      pattern: str | None) -> list[Condition[Run]]:
    """Return one condition per hazard in which the original agent plays while the hazard is
    invisible: the hazard is not rendered, but still acts.

    Args:
        names: names of the hazards.
        game: name of the game.
        original: condition of the original agent.
        pattern: ``Condition.pattern`` of the controls with which the conditions are compared; None
            without controls.

    Raises:
        UserError: if the game has no such hazard, or the hazard cannot be made invisible.
    """
    conditions = []
    for kind in find_hazards(names, game):
        if kind.cells:
            raise UserError(f"{kind.name} of {game} is drawn from cells, which cannot be "
                            "invisible and act")
        label = f"invisible {kind.name}"
        conditions.append(Condition(
            f"invisible_{kind.name}", label, pattern or label,
            value=dataclasses.replace(run_of(original), edit=hide_hazard(game, kind),
                                      edit_every_step=bool(kind.moving or kind.trails)),
            settings={**original.settings, "invisible": kind.name}))
    return conditions


def hide_hazard(game: str, kind: GameObject) -> LevelEdit:
    """Return a level edit that makes a hazard invisible. The edit must be repeated after every step
    if the hazard leaves a trail, or becomes another kind of object when it turns around."""
    def hide(state: bytes) -> bytes:
        level = LevelState.parse(state, game)
        if kind.moving:  # show entities that have turned around and so are of another kind now
            entities = level.entities.copy()
            entities["alpha"][np.isin(entities["type"], kind.entity_types)] = 1
            level = dataclasses.replace(level, entities=entities)
        return invisible(level, kind).to_bytes()

    return hide


def play_condition(store: ResultStore, condition: Condition[Run], levels: Levels) -> None:
    """Play the levels under a condition, unless its episodes are stored.

    Finished episodes are appended to a journal, from which an interrupted run resumes.

    Args:
        store: open store with the schema of ``failure_files``.
        condition: the condition.
        levels: the levels, and settings for playing them.
    """
    name, game = condition.name, levels.config.env_name
    if not store.has("episodes", name):
        played = {row["level"] for row in store.rows("played", name)}
        missing = [level for level in levels.levels if level[0] not in played]
        with Progress(len(levels.levels), "episode", len(played)) as progress:
            play = levels.play(condition, missing)
            for episode, cause, in_view in (attribute_failures(levels.config, play) if missing
                                            else ()):
                store.append("played", name, row={
                    "level": episode.number, "level_seed": episode.level_seed,
                    "cause": cause or SOLVED, "length": episode.length,
                    "return": episode.total_reward, "in_view": in_view})
                progress.update(progress.done + 1)
        store.write("episodes", name, value=episodes_table(store.rows("played", name), game))
        print(f"{name}: {len(missing)} episodes", flush=True)
    store.remove("played", name)
