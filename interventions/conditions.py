"""Conditions of a comparison: swapped directions of the hidden state, and patched layers, each with
its controls. ``interventions.ablations`` has those that ablate directions.

On the command line, the swap ``10:12`` applies the change along direction 10 to direction 12
instead, and ``10:12,5:None`` also removes the change along direction 5.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from torch import Tensor

from agents.layers import STATE, Layer, layers_named
from agents.networks import Policy
from agents.patch import Patch
from agents.testbed import BASELINE, Condition, Testbed
from common.cli import count
from common.devices import Compute
from common.errors import UserError
from common.files import sha256
from common.options import ParameterOptions, option, redefine
from envs.procgen_env import EnvConfig
from interventions.ablations import ABLATIONS, MEAN, RESAMPLE
from interventions.comparison import ConditionSet, compare, play_runs
from interventions.controls import KINDS, OTHERS, controls_of
from interventions.flags import DirectionIdsOptions, PatchOptions
from interventions.patch_text import (
    files_of,
    open_patches,
    parse_patch,
    vectors_for,
)
from interventions.patches import Opening
from interventions.projector import Swap
from interventions.scan_study import ScanOptions
from interventions.vectors import read_vectors

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionOptions(PatchOptions, ParameterOptions):
    """Options that define interventions and their controls."""

    directions: str | None = redefine(
        DirectionIdsOptions, "direction_ids",
        help="independent components to ablate, one at a time: numbers, or a range such as 0 to "
             "16, which excludes 16")
    ablations: tuple[str, ...] = option(
        (MEAN, RESAMPLE), "kinds of ablation of the components: mean (the component's mean), "
                          "resample (its values in recorded states) or frozen (as published: the "
                          "value that it has when the ablation begins)", choices=ABLATIONS)
    swaps: tuple[str, ...] = option(
        (), "swaps of components: 10:12 applies the change along component 10 to component 12 "
            "instead; 10:12,5:None also removes component 5", metavar="FROM:TO")
    num_controls: int = option(
        20, "number of random controls of each kind of intervention; with fewer than 19, no effect "
            "can be claimed", type=count)
    patch_controls: str | None = option(
        None, "kind of the controls of patches: the vector with permuted cells, a Gaussian vector "
              "of the same norm, --control_vectors, other channels, or other cells; the default "
              "depends on the kind of patch", choices=KINDS)
    control_vectors: tuple[Path, ...] = option(
        (), "steering vectors of other pairs, for --patch_controls others", metavar="FILE")
    scan: ScanOptions | None = option(
        None, "instead of comparing runs, patch every part of a layer in turn in single frames. "
              "KIND: zero, mean (over reference frames) or interchange (entries from a frame of "
              "another level). LAYER: a name, or all. PART: layer, channel or cell. Options follow "
              "after commas: outcome=value (or entropy, or the name of an action such as right, "
              "for its log-probability) and report=20. Parts are ranked on half of the "
              "--num_episodes levels; the 20 strongest are tested on the other half. "
              "Example: zero@embedder.block2.res1.resadd=channel,outcome=right",
        type=ScanOptions.parse, metavar="KIND@LAYER=PART")

    @property
    def references(self) -> tuple[int, int]:
        """Size and seed of the reference set."""
        return self.reference_size, self.reference_seed

    @property
    def alters_directions(self) -> bool:
        """Whether directions are altered: if patches are given, only if an option of directions is
        also given."""
        return not self.scan and (not self.patch_lists or bool(
            self.given & {"directions", "ablations", "swaps"}))

    @property
    def ablates_directions(self) -> bool:
        """Whether directions are also ablated, not only swapped."""
        return not self.patch_lists or bool(self.given & {"directions", "ablations"})


def swap_conditions(swaps: Sequence[Swap], num_controls: int, std: Tensor) -> ConditionSet:
    """Return the conditions of opened swaps of independent components, and their controls.

    Swaps that differ only in the numbers of their components share their controls
    (``Condition.pattern``).

    Args:
        num_controls: number of controls of each pattern of swaps.
        std: standard deviations of the hidden units (D,).
    """
    def condition(name: str, label: str, swap: Swap) -> Condition:
        taken, put = map(list, zip(*swap.pairs))
        settings = {"from": taken, "to": put, "turned_by_seed": swap.random_directions}
        return Condition(name, label, swap.pattern.name, swap.random_directions is not None,
                         patches=[swap], settings=settings)

    patterns = {swap.pattern.name: swap.pattern for swap in swaps}
    conditions = [condition(f"ic_{swap.name}", ", ".join(
        f"IC {source} out" if target is None else f"IC {source} to {target}"
        for source, target in swap.pairs), swap) for swap in swaps]
    conditions += [condition(f"random_{turn:03d}_{name}", f"random {turn}",
                             dataclasses.replace(pattern, random_directions=turn))
                   for name, pattern in patterns.items() for turn in range(num_controls)]
    return ConditionSet(conditions, {STATE: std}, {},
                        f"{num_controls} random directions of equal variance as controls of swaps")


def patch_conditions(options: ConditionOptions, testbed: Testbed, seed: int) -> ConditionSet:
    """Return one condition per list of patches, then the controls of each.

    Args:
        testbed: real levels or simulated starts on which the conditions are compared.
        seed: seed of the controls.

    Raises:
        UserError: if patches cannot be opened, or cannot have controls of the requested kind.
    """
    kind, vector_files = options.patch_controls, options.control_vectors
    if (kind == OTHERS) != bool(vector_files):
        raise UserError(f"--patch_controls {OTHERS} and --control_vectors require each other")
    policy, reference = testbed.policy, functools.cache(
        lambda: testbed.reference(*options.references))
    opening = Opening(policy, testbed.env, reference, testbed.edit)
    conditions: list[Condition] = []
    controls: list[Condition] = []
    layers: dict[str, Layer] = {}
    for name, patch_list in options.patch_lists.items():
        patches = open_patches(patch_list, opening)
        named = [path for patch in patch_list for path in files_of(patch)]
        settings = {"patches": [patch.text for patch in patch_list],
                    "files_sha256": {str(path): sha256(path) for path in (*named, *vector_files)}}
        conditions.append(Condition(f"patch_{name}", name, name, patches=patches,
                                    settings=settings))
        layers |= {layer.name: layer for patch in patches
                   for layer in layers_named(policy, patch.layer)}
        others = [{layer: vector for patch in patch_list
                   for layer, vector in vectors_for(path, patch.layer, policy).items()}
                  for path in vector_files]
        for number, control in enumerate(controls_of(
                policy, patches, options.num_controls, seed, reference(), kind, others)):
            controls.append(Condition(
                f"control_{number:03d}_{name}", f"control {number}", name, True,
                settings={**settings, "drawn": list(control.drawn), "matched": control.matched},
                matched=control.matched, patches=control.patches))
    patterns = [control.pattern for control in controls if not control.matched]
    description = f"{options.num_controls} controls of each list of patches" + "".join(
        f"; {patterns.count(name)} controls of {name} are not matched: the size of their change "
        "differs by more than a quarter" for name in dict.fromkeys(patterns))
    if num_levels := count_vector_levels(options.patch_lists.values(), testbed.levels):
        warning = (f"a vector was computed on {num_levels} of these levels, so effects on them do "
                   "not show that it generalises; use another --seed to draw other levels")
        logger.warning(warning)
        description += f"; {warning}"
    return ConditionSet(conditions + controls,
                        {name: reference().std(policy, layer) for name, layer in layers.items()},
                        {"reference": reference().description, "patch_controls": kind},
                        description)


def count_vector_levels(patch_lists: Iterable[Sequence[Patch]], levels: Collection[int]) -> int:
    """Count the levels that were also used to compute a steering vector of the patches.

    Args:
        patch_lists: lists of patches.
        levels: seeds of the levels.
    """
    vectors = [vector for patch_list in patch_lists for patch in patch_list
               for path in files_of(patch) if path.suffix == ".npz"
               for vector in read_vectors(path).values()]
    return len(set(levels) & {level for vector in vectors for level in vector.levels})


def compare_patches(policy: Policy, env: EnvConfig, patches: Mapping[str, Sequence[Patch | str]],
                    *, num_levels: int = 50, num_controls: int = 19, reference_size: int = 200,
                    seed: int = 0) -> pd.DataFrame:
    """Compare patches with no patch, and with random controls of the same kind, on real levels.

    The same levels are played under every condition, with the same random numbers.

    Args:
        policy: the agent.
        env: game and range of levels.
        patches: list of patches of each condition, by the condition's name; patches may be texts,
            see ``interventions.patch_text``.
        num_levels: number of levels, at least 10.
        num_controls: number of controls of each condition, at least 2; with fewer than 19, no
            effect can be claimed.
        reference_size: number of frames of other levels from which the sizes of changes, means and
            standard deviations are computed.
        seed: seed of levels, actions and controls.

    Returns:
        A row per condition and outcome, see ``stats.effects.compare_conditions``.

    Raises:
        UserError: if a patch is invalid or can have no controls, or there are too few levels or
            controls.

    Example::

        >>> env, patches = EnvConfig("coinrun", "easy"), {"no 5": ["zero@embedder.block2:5"]}
        >>> table = compare_patches(policy, env, patches, num_levels=10, num_controls=2,
        ...                         reference_size=8)
        >>> effects = table[~table["control"]].set_index("outcome")["effect"]
    """
    testbed = Testbed(policy, Compute(policy.device, bfloat16=False), env,
                      env.draw_levels(num_levels, seed), seed)
    reference = testbed.reference(reference_size, seed)
    conditions: list[Condition] = []
    for name, patch_list in patches.items():
        opened = open_patches([parse_patch(patch) if isinstance(patch, str) else patch
                               for patch in patch_list], Opening(policy, env, lambda: reference))
        conditions.append(Condition(name, name, name, False, patches=opened))
        conditions += [
            Condition(f"control {number} of {name}", f"control {number}", name, True,
                      patches=control.patches, matched=control.matched)
            for number, control in enumerate(controls_of(policy, opened, num_controls, seed,
                                                         reference))]
    std = {layer.name: reference.std(policy, layer) for condition in conditions
           for patch in condition.patches for layer in layers_named(policy, patch.layer)}
    runs = {condition.name: play_runs(testbed, condition, std)
            for condition in (BASELINE, *conditions)}
    return compare(conditions, runs, runs[BASELINE.name], False, seed, verdicts=True)
