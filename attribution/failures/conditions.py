"""Conditions under which failures are counted: the original agent, edited agents, invisible hazards
and controls; and a function that plays the levels under a condition."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.edits import Edit, with_edits
from agents.episodes import Episode, PlayOptions, play_episodes
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.reference_set import ReferenceSet, activations_of
from attribution.editing import ChangeSizes, random_edits
from attribution.failures.causes import attribute_failures, unknown_hazards
from attribution.failures.results import ORIGINAL, SOLVED, episodes_table
from common.devices import Compute
from common.errors import UserError, nearest
from common.progress import Progress
from common.results import ResultStore
from envs.level_state import LevelState
from envs.objects import GameObject, hazards_of, invisible
from envs.procgen_env import EnvConfig, LevelEdit
from stats.effects import Condition


@dataclasses.dataclass(frozen=True)
class Run:
    """Agent and level edits of a condition.

    Attributes:
        policy: the agent.
        edits: further edits of the agent.
        edit: optional edit of every level.
        edit_every_step: whether the level edit is repeated after every step.
        moved: mean norm of the change that the agent's edits cause in a layer; NaN without edits.
    """

    policy: Policy
    edits: Sequence[Edit] = ()
    edit: LevelEdit | None = None
    edit_every_step: bool = False
    moved: float = math.nan

    def agent(self) -> Policy:
        """Return the agent with the further edits applied."""
        return with_edits(self.policy, self.edits) if self.edits else self.policy

    def options(self, keep_frames: bool = False) -> PlayOptions:
        return PlayOptions(edit=self.edit, edit_every_step=self.edit_every_step,
                           keep_frames=keep_frames)


def run_of(condition: Condition[Run]) -> Run:
    """Return the agent and level edits of a condition."""
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
        """Return ``play_episodes`` for the given levels with all arguments bound except ``watch``.
        """
        run = run_of(condition)
        return functools.partial(play_episodes, run.agent(), self.compute, self.config, levels,
                                 self.seed, self.num_envs, run.options(keep_frames))


def label_agents(files: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return the labels of agent files; by default the file names without their suffix.

    Raises:
        UserError: if the number of labels is wrong, or two labels are the same.
    """
    labels = [path.stem for path in files] if labels is None else list(labels)
    if len(labels) != len(files):
        raise UserError(f"there are {len(labels)} --labels for {len(files)} agent files")
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two agents are called '{label}'; give --labels that differ")
    return labels


def agent_conditions(files: Sequence[Path], labels: Sequence[str],
                     device: torch.device) -> list[Condition[Run]]:
    """Return one condition per agent: the original agent, which comes first, and edited agents.

    Raises:
        UserError: if a file is missing or is not an agent file.
    """
    conditions = []
    for number, (path, label) in enumerate(zip(files, labels)):
        conditions.append(Condition(
            f"edited_{label}" if number else ORIGINAL, label, label,
            value=Run(load_agent(path, device)), settings={"agent_sha256": agent_sha256(path)}))
    return conditions


def edits_between(original: Policy, edited: Policy) -> tuple[Edit, ...]:
    """Return the edits that an edited agent has in addition to the original; none if their weights
    or first edits differ."""
    weights, own = edited.state_dict(), original.state_dict()
    if weights.keys() != own.keys() or not all(
            torch.equal(weights[name], own[name]) for name in own):
        return ()
    first = len(original.edits)
    if list(map(_key, edited.edits[:first])) != list(map(_key, original.edits)):
        return ()
    return edited.edits[first:]


def _key(edit: Edit) -> tuple:
    return edit.layer, edit.strength, edit.directions.numpy().tobytes()


def match_controls(conditions: Sequence[Condition[Run]], reference: ReferenceSet, number: int,
                   seed: int) -> tuple[list[Condition[Run]], list[Condition[Run]]]:
    """Measure the sizes of edits, and draw random edits of the same size as controls.

    Args:
        conditions: conditions of the agents, the original first.
        reference: frames on which sizes are measured.
        number: number of controls per edited agent.
        seed: seed of the controls.

    Returns:
        The conditions with the sizes of their edits, and the controls of all edited agents.
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
            replaced = [control.edit for control in group]
            controls.append(Condition(
                f"control_{place:03d}_{condition.label}", f"control {place}", condition.pattern,
                control=True, matched=all(control.near for control in group),
                value=Run(original, replaced, moved=moved),
                settings={**condition.settings, "control": place,
                          "strengths": [edit.strength for edit in replaced]}))
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
    """Return conditions of the original agent with one hazard invisible, which is not rendered but
    still acts.

    Args:
        names: names of the hazards.
        game: name of the game.
        original: condition of the original agent.
        pattern: pattern of the controls with which the conditions are compared; None without
            controls.

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
    """Return a level edit that makes a hazard invisible. If the hazard can turn around, and so
    become another kind, or leaves a trail, the edit must be repeated after every step."""
    def hide(state: bytes) -> bytes:
        level = LevelState.parse(state, game)
        if kind.moving:  # make entities visible again that have since turned around
            entities = level.entities.copy()
            entities["alpha"][np.isin(entities["type"], kind.entity_types)] = 1
            level = dataclasses.replace(level, entities=entities)
        return invisible(level, kind).to_bytes()

    return hide


def play_condition(store: ResultStore, condition: Condition[Run], levels: Levels) -> None:
    """Play the levels under a condition, unless its episodes are stored, and print the speed.

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
        started, steps = time.monotonic(), 0
        with Progress(len(levels.levels), "episode", len(played)) as progress:
            play = levels.play(condition, missing)
            for _, outcome in attribute_failures(levels.config, play) if missing else ():
                store.append("played", name, row={
                    "level": outcome.number, "level_seed": outcome.level_seed,
                    "cause": outcome.cause or SOLVED, "length": outcome.length,
                    "return": float(outcome.total_reward), "in_view": list(outcome.in_view)})
                steps += outcome.length
                progress.update(progress.done + 1)
        store.write("episodes", name, value=episodes_table(store.rows("played", name), game))
        rate = steps / max(time.monotonic() - started, 1e-9)
        print(f"{name}: {len(missing)} episodes, {rate:.0f} steps/s", flush=True)
    store.remove("played", name)
