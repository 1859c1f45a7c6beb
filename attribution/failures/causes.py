"""Conditions under which failures are counted: the original agent, edited agents, invisible hazards
and controls. ``agents.failures`` determines the causes of the failures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.config import GameOptions
from agents.edits import Edit, with_edits
from agents.failures import unknown_hazards
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.reference_set import ReferenceSet, activations_of
from agents.testbed import Condition, Testbed
from attribution.editing import ChangeSizes, random_edits
from attribution.failures.results import ORIGINAL, episodes_table
from common.cli import count, environments, seed
from common.devices import Compute
from common.errors import UserError, nearest
from common.options import ComputeOptions, option
from common.progress import Progress
from common.results import ResultStore
from envs.level_state import LevelState
from envs.objects import GameObject, hazards_of, invisible
from envs.procgen_env import EnvConfig, LevelEdit


def policy_of(condition: Condition) -> Policy:
    """Return the agent of a condition, which must have one."""
    assert condition.policy is not None
    return condition.policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayedLevelsOptions(GameOptions, ComputeOptions):
    """Options of a script that plays the same levels under several conditions."""

    num_episodes: int = option(1000, "number of levels, each played once per condition",
                               type=count)
    num_envs: int = option(64, "number of episodes played in parallel", type=environments)
    seed: int = option(0, "seed of levels, actions, controls and confidence intervals", type=seed)
    overwrite: bool = option(False, "delete the previous contents of the folder")

    @functools.cached_property
    def compute(self) -> Compute:
        """Device and precision; "auto" is float32.

        Raises:
            UserError: if there is no such device.
        """
        return self.compute_in("float32" if self.precision == "auto" else self.precision)

    def testbed(self, original: Condition, config: EnvConfig) -> Testbed:
        """Draw the levels.

        Args:
            original: condition of the original agent.
            config: the game.
        """
        return Testbed(policy_of(original), self.compute, config, config.draw_levels(
            self.num_episodes, self.seed), self.seed, self.num_envs, causes=True)


def label_agents(files: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return the labels of agent files; by default the file names without their suffix.

    Raises:
        UserError: unless there is a different label for each file.
    """
    labels = [path.stem for path in files] if labels is None else list(labels)
    if not len(set(labels)) == len(labels) == len(files):
        raise UserError(f"--labels must give {len(files)} different names to the agent files, not "
                        f"{', '.join(labels)}")
    return labels


def agent_conditions(files: Sequence[Path], labels: Sequence[str],
                     device: torch.device) -> list[Condition[float]]:
    """Load agents, and return one condition per agent.

    Args:
        files: agent files, the original agent first, then edited agents.
        labels: labels of the agents.
        device: device of the agents.

    Raises:
        UserError: if a file is missing or is not an agent file.
    """
    return [Condition(f"edited_{label}" if number else ORIGINAL, label, label,
                      policy=load_agent(path, device),
                      settings={"agent_sha256": agent_sha256(path)})
            for number, (path, label) in enumerate(zip(files, labels))]


def edits_between(original: Policy, edited: Policy) -> tuple[Edit, ...]:
    """Return the edits that an edited agent has in addition to those of the original agent; an
    empty tuple if the agents' weights differ, or the edited agent does not have the original's
    edits first."""
    first = len(original.edits)
    weights, own = edited.state_dict(), original.state_dict()
    is_extended = weights.keys() == own.keys() and all(
        torch.equal(weights[name], own[name]) for name in own) and all(
        (edit.layer, edit.strength) == (other.layer, other.strength)
        and torch.equal(edit.directions, other.directions)
        for edit, other in zip(edited.edits, original.edits))
    return edited.edits[first:] if is_extended else ()


def match_controls(conditions: Sequence[Condition[float]], reference: ReferenceSet, number: int,
                   seed: int) -> tuple[list[Condition[float]], list[Condition[float]]]:
    """Measure the sizes of edits, and draw random edits of the same size as controls.

    The edits of an agent are those of ``edits_between``; an agent without any has no controls.

    Args:
        conditions: conditions of the agents, the original first.
        reference: frames on which sizes are measured.
        number: number of controls per edited agent.
        seed: seed of the controls.

    Returns:
        The conditions, whose values are the sizes of their edits: the mean norm over frames of the
        change of an edit's layer, summed over the edits, NaN if not measured; and the controls of
        all edited agents, with the sizes of the edits that they belong to.
    """
    original = policy_of(conditions[0])
    sized, controls = [conditions[0]], []
    for condition in conditions[1:]:
        edits = edits_between(original, policy_of(condition))
        outputs = activations_of(original, reference.frames, [edit.layer for edit in edits],
                                 reference.hidden_states) if edits else {}
        moved = sum(ChangeSizes(outputs[edit.layer], edit.signed(outputs[edit.layer].shape[1])
                                ).of(edit) for edit in edits) if edits else math.nan
        sized.append(dataclasses.replace(condition, value=moved))
        candidates = [random_edits(edit, outputs[edit.layer], number, seed) for edit in edits]
        for place, group in enumerate(zip(*candidates)):
            drawn = [control.edit for control in group]
            controls.append(Condition(
                f"control_{place:03d}_{condition.label}", f"control {place}", condition.pattern,
                control=True, matched=all(control.near for control in group),
                value=moved, policy=with_edits(original, drawn),
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


def invisible_hazards(names: Sequence[str], game: str, original: Condition[float],
                      pattern: str | None) -> list[Condition[float]]:
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
    conditions: list[Condition[float]] = []
    for kind in find_hazards(names, game):
        if kind.cells:
            raise UserError(f"{kind.name} of {game} consists of cells, which cannot act while they "
                            "are invisible")
        label = f"invisible {kind.name}"
        conditions.append(Condition(
            f"invisible_{kind.name}", label, pattern or label,
            policy=original.policy, edit=hide_hazard(game, kind),
            edit_every_step=bool(kind.moving or kind.trails),
            settings={**original.settings, "invisible": kind.name}))
    return conditions


def hide_hazard(game: str, kind: GameObject) -> LevelEdit:
    """Return a level edit that makes the hazard ``kind`` of a game invisible. The edit must be
    repeated after every step if the hazard leaves a trail, or becomes another kind of object when
    it turns around."""
    def hide(state: bytes) -> bytes:
        level = LevelState.parse(state, game)
        if kind.moving:  # first show all: some turned around and are now another kind
            entities = level.entities.copy()
            entities["alpha"][np.isin(entities["type"], kind.entity_types)] = 1
            level = dataclasses.replace(level, entities=entities)
        return invisible(level, kind).to_bytes()

    return hide


def play_condition(store: ResultStore, condition: Condition, testbed: Testbed,
                   numbers: Sequence[int] | None = None) -> None:
    """Play levels under a condition, unless its episodes are stored.

    Finished episodes are appended to a journal, from which an interrupted run resumes.

    Args:
        store: open store with the schema of ``failure_files``.
        condition: the condition.
        testbed: the levels, with causes of failures.
        numbers: numbers of the levels to play; None for all.
    """
    name = condition.name
    if not store.has("episodes", name):
        numbers = range(testbed.num_runs) if numbers is None else numbers
        played = {row["level"] for row in store.rows("played", name)}
        missing = [number for number in numbers if number not in played]
        with Progress(len(numbers), "episode", len(played)) as progress:
            for episode in testbed.episodes(condition, missing):
                store.append("played", name, row={
                    "level": episode.number, "level_seed": episode.level_seed,
                    "cause": episode.end, "length": episode.length,
                    "return": episode.total_reward, "in_view": list(episode.in_view)})
                progress.update(progress.done + 1)
        assert testbed.env is not None
        store.write("episodes", name, value=episodes_table(store.rows("played", name),
                                                           testbed.env.env_name))
        print(f"{name}: {len(missing)} episodes", flush=True)
    store.remove("played", name)
