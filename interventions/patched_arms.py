"""Patched arms that are compared: each list of patches, and its controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from agents.agent_file import weights_sha256
from agents.layers import layers_named
from agents.networks import Policy
from agents.patch import Array, Patch
from agents.reference_set import ReferenceSet
from common.errors import UserError
from common.files import sha256
from interventions.controls import OTHERS, controls_of
from interventions.patch_text import Opening, PatchArm, files_of, open_patches, to_text
from interventions.vectors import SteeringVector, read_vectors
from stats.effects import Arm


@dataclasses.dataclass(frozen=True)
class PatchedArm:
    """An arm and what makes it.

    Attributes:
        patches: opened, in order.
        made: what makes it, for the settings.
        matched: see ``Control``.
    """

    arm: Arm
    patches: tuple[Patch, ...]
    made: dict
    matched: bool = True


def patched_arms(asked: Sequence[PatchArm], opening: Opening, num_controls: int, seed: int,
                 kind: str | None, vector_files: Sequence[Path]) -> list[PatchedArm]:
    """Every list of patches, then the controls of each.

    Args:
        seed: of the controls.
        kind: of the controls, one of ``interventions.controls.KINDS``; None for those of each kind
            of patch.
        vector_files: of other vectors, for controls of the kind OTHERS.

    Raises:
        UserError: if patches cannot be opened, or have no such controls.
    """
    if (kind == OTHERS) != bool(vector_files):
        raise UserError(f"--patch_controls {OTHERS} takes the files of other vectors, and only it "
                        "does; give --control_vectors with it")
    arms, controls = [], []
    for each in asked:
        patches = open_patches(each.patches, opening)
        texts = [*map(to_text, each.patches)]
        named = [path for patch in each.patches for path in files_of(patch)]
        files = {str(path): sha256(path) for path in (*named, *vector_files)}
        arm = Arm(f"patch_{each.name}", each.name, each.name, control=False)
        arms.append(PatchedArm(arm, tuple(patches), {"patches": texts, "files_sha256": files}))
        others = [_by_layer(path, opening.policy, patches) for path in vector_files]
        for number, control in enumerate(controls_of(opening.policy, patches, num_controls, seed,
                                                     opening.reference(), kind, others)):
            controls.append(PatchedArm(
                Arm(f"control_{number:03d}_{each.name}", f"control {number}", each.name,
                    control=True),
                control.patches,
                {"patches": texts, "files_sha256": files, "drawn": list(control.drawn),
                 "matched": control.matched}, control.matched))
    return arms + controls


def _by_layer(path: Path, policy: Policy, patches: Sequence[Patch]) -> dict[str, Array]:
    """The vectors of a file at the layers that are patched."""
    found, agent = read_vectors(path), weights_sha256(policy)
    for patch in patches:
        for layer in layers_named(policy, patch.layer):
            found.get(layer.name, next(iter(found.values()))).check_for(agent, layer.name,
                                                                        layer.shape)
    return {name: vector.vector for name, vector in found.items()}


def standard_deviations(arms: Sequence[PatchedArm], policy: Policy,
                        reference: ReferenceSet) -> dict[str, Array]:
    """Of the units of all layers that are patched, by layer."""
    layers = {layer.name: layer for each in arms for patch in each.patches
              for layer in layers_named(policy, patch.layer)}
    return {name: reference.std(policy, layer) for name, layer in layers.items()}


def levels_of_vectors(asked: Sequence[PatchArm], measured: Collection[int]) -> int:
    """Number of the measured levels on which a vector was made."""
    vectors: list[SteeringVector] = [
        vector for each in asked for patch in each.patches for path in files_of(patch)
        if path.suffix == ".npz" for vector in read_vectors(path).values()]
    return len(set(measured) & {level for vector in vectors for level in vector.levels})


def unmatched(arms: Sequence[PatchedArm]) -> str:
    """A sentence's end that says of which arms controls are not as large as they should be."""
    found = {}
    for each in arms:
        if not each.matched:
            found[each.arm.pattern] = found.get(each.arm.pattern, 0) + 1
    return "".join(f"; {number} controls of {name} are the nearest there are, with a change that "
                   "is not as large within a quarter" for name, number in found.items())
