"""Arms of a count of failures: the original agent, edited ones, invisible hazards, and controls;
and how one is played."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.edits import Edit, with_edits
from agents.episodes import PlayOptions, play_episodes
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.reference_set import ReferenceSet, activations_of
from attribution.editing.random_edits import ChangeSizes, RandomEdit, random_edits
from attribution.failing.causes import what_is_known
from attribution.failing.files import ORIGINAL, CausesFolder
from attribution.failing.playing import with_fates
from common.devices import Compute
from common.errors import UserError, nearest
from common.progress import Progress
from envs.level_state import LevelState
from envs.objects import GameObject, hazards_of, invisible
from envs.procgen_env import EnvConfig, LevelEdit
from stats.effects import Condition


@dataclasses.dataclass(frozen=True)
class FailureArm:
    """An arm and what makes it.

    Attributes:
        arm: name, label, and the edited agent whose controls it is compared with.
        policy: makes the agent that plays.
        made: what makes the arm, for the settings.
        level_edit: of every level.
        every_step: whether it is made again after every step.
        moved: mean norm of what its edits change in a layer; NaN without edits.
        near: whether a control's size was near, see ``RandomEdit``.
    """

    arm: Condition
    policy: Callable[[], Policy]
    made: dict
    level_edit: LevelEdit | None = None
    every_step: bool = False
    moved: float = math.nan
    near: bool = True


def labels_of(files: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Labels of agent files: those given, else their names.

    Raises:
        UserError: if there are not as many, or two are the same.
    """
    labels = [path.stem for path in files] if labels is None else list(labels)
    if len(labels) != len(files):
        raise UserError(f"there are {len(labels)} --labels for {len(files)} agent files")
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two agents are called '{label}'; give --labels that differ")
    return labels


def original_and_edited(files: Sequence[Path], labels: Sequence[str],
                        device: torch.device) -> list[FailureArm]:
    """The first agent, and the others.

    Raises:
        UserError: if a file is missing or no agent.
    """
    arms = []
    for number, (path, label) in enumerate(zip(files, labels)):
        policy = load_agent(path, device)
        name = f"edited_{label}" if number else ORIGINAL
        arms.append(FailureArm(Condition(name, label, label, control=False),
                               lambda policy=policy: policy, {"agent_sha256": agent_sha256(path)}))
    return arms


def edits_between(original: Policy, edited: Policy) -> tuple[Edit, ...]:
    """The edits that one agent has beyond another; none if their weights differ."""
    found, own = edited.state_dict(), original.state_dict()
    if found.keys() != own.keys() or not all(torch.equal(found[name], own[name]) for name in own):
        return ()
    first = len(original.edits)
    if [_key(edit) for edit in edited.edits[:first]] != [_key(edit) for edit in original.edits]:
        return ()
    return edited.edits[first:]


def _key(edit: Edit) -> tuple:
    return edit.layer, edit.strength, edit.directions.numpy().tobytes()


def with_controls(arms: Sequence[FailureArm], reference: ReferenceSet, number: int,
                  seed: int) -> tuple[list[FailureArm], list[FailureArm]]:
    """The arms with the sizes of their edits, and the controls of those that have any.

    Args:
        arms: the original first.
        reference: pictures on which sizes are measured.
        number: of controls of each edited agent.
        seed: of the controls.
    """
    original = arms[0].policy()
    sized, controls = [arms[0]], []
    for each in arms[1:]:
        edits = edits_between(original, each.policy())
        if not edits:
            sized.append(each)
            continue
        outputs = activations_of(original, reference.frames, [edit.layer for edit in edits],
                                 reference.hidden_states)
        sizes = {edit: ChangeSizes(outputs[edit.layer],
                                   edit.signed(outputs[edit.layer].shape[1])) for edit in edits}
        sized.append(dataclasses.replace(
            each, moved=sum(sizes[edit].of(edit) for edit in edits)))
        columns = [random_edits(edit, outputs[edit.layer], number, seed) for edit in edits]
        controls += [_control(original, each, place, drawn, sized[-1].moved)
                     for place, drawn in enumerate(zip(*columns))]
    return sized, controls


def _control(original: Policy, of: FailureArm, number: int, drawn: Sequence[RandomEdit],
             moved: float) -> FailureArm:
    edits = [each.edit for each in drawn]
    return FailureArm(
        Condition(f"control_{number:03d}_{of.arm.label}", f"control {number}", of.arm.pattern,
            control=True),
        lambda: with_edits(original, edits),
        {**of.made, "control": number, "strengths": [edit.strength for edit in edits]},
        moved=moved, near=all(each.near for each in drawn))


def hazards_named(names: Sequence[str], game: str) -> list[GameObject]:
    """Hazards of a game by name.

    Raises:
        UserError: if it has none of this name.
    """
    hazards = {kind.name: kind for kind in hazards_of(game)}
    for name in names:
        if name not in hazards:
            raise UserError(f"{game} has no hazard '{name}'" + (
                nearest(name, hazards) if hazards else f": {what_is_known(game)}"))
    return [hazards[name] for name in dict.fromkeys(names)]


def invisible_hazards(names: Sequence[str], game: str, original: FailureArm,
                      pattern: str | None) -> list[FailureArm]:
    """The original agent on levels in which a hazard is drawn no more but acts.

    Args:
        pattern: of the controls that they are compared with; None for none.

    Raises:
        UserError: if the game has no such hazard, or it cannot be invisible.
    """
    arms = []
    for kind in hazards_named(names, game):
        if kind.cells:
            raise UserError(f"{kind.name} of {game} is drawn from cells, which cannot be "
                            "invisible and act")
        label = f"invisible {kind.name}"
        arms.append(dataclasses.replace(
            original, arm=Condition(f"invisible_{kind.name}", label, pattern or label,
                                    control=False),
            made={**original.made, "invisible": kind.name}, level_edit=hiding(game, kind),
            every_step=bool(kind.moving or kind.trails)))
    return arms


def hiding(game: str, kind: GameObject) -> LevelEdit:
    """Makes a hazard invisible: at the level's start, or after every step if it may turn around,
    so that it becomes another kind, or draws a trail."""
    def hide(state: bytes) -> bytes:
        level = LevelState.parse(state, game)
        if kind.moving:  # those that have turned around since are seen again
            entities = level.entities.copy()
            entities["alpha"][np.isin(entities["type"], kind.entity_types)] = 1
            level = dataclasses.replace(level, entities=entities)
        return invisible(level, kind).to_bytes()

    return hide


def play_arm(each: FailureArm, folder: CausesFolder, compute: Compute, config: EnvConfig,
             levels: Sequence[tuple[int, int]], seed: int, num_envs: int) -> None:
    """Play the levels of an arm that a folder does not hold yet, and print the speed.

    Args:
        levels: number and seed of each.
        seed: of the actions.
        num_envs: episodes played at a time.
    """
    if folder.has(each.arm.name):
        return
    begun = folder.begun(each.arm.name)
    left = [level for level in levels if level[0] not in begun]
    started, steps = time.monotonic(), 0
    if left:
        episodes = functools.partial(
            play_episodes, each.policy(), compute, config, left, seed, num_envs,
            PlayOptions(edit=each.level_edit, edit_every_step=each.every_step,
                        keep_frames=False))
        with Progress(len(levels), "episode", len(begun)) as progress:
            for _, fate in with_fates(config, episodes):
                folder.add(each.arm.name, fate)
                steps += fate.length
                progress.update(progress.done + 1)
    folder.finish(each.arm.name)
    rate = steps / max(time.monotonic() - started, 1e-9)
    print(f"{each.arm.name}: {len(left)} episodes, {rate:.0f} steps/s", flush=True)
