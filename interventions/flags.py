"""Flags of directions of the hidden state, of swaps along them, and of patches of any layer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.hooks import ActivePatches, patched
from agents.networks import Policy
from agents.patch import Patch
from agents.reference_set import MIN_FRAMES, ReferenceSet
from common.cli import EachTime, OneText, Parser, add_save_dir_flag, count, from_zero, seed, whole
from common.errors import UserError
from common.files import sha256
from common.parameters import ParameterSet
from interventions.patch_text import (
    Opening,
    arm_name,
    files_of,
    open_patches,
    parse_patch,
    read_patch_file,
    to_text,
    warn_of_unused,
)

if TYPE_CHECKING:
    from envs.procgen_env import EnvConfig, LevelEdit

REFERENCE_SIZE = 50  # the published one


def add_direction_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """Add the flags that choose the matrices of directions of the hidden space.

    Args:
        num_episodes_flag: name of the flag, if ``--num_episodes`` means other episodes.
    """
    add_save_dir_flag(parser)
    add_direction_folder_flag(parser)
    add_direction_number_flag(parser, num_episodes_flag)


def add_direction_folder_flag(parser: Parser) -> None:
    """Add --precomp_dir, the folder with the matrices of directions."""
    parser.add_argument("--precomp_dir", "--precomputed_analysis_data_path", type=Path,
                        help="folder of hidden_analysis_precompute.py; "
                             "<save_dir>/hx_analysis_precomp if not given")


def add_direction_number_flag(parser: Parser, name: str = "--num_episodes") -> None:
    """Add the flag for the number of episodes that directions were computed from."""
    parser.add_argument(name, type=count, key="analysis.agent_h.num_episodes",
                        help="recorded episodes that the directions were computed from, which is "
                             "in the names of their files")


def add_direction_ids_flag(parser: Parser, name: str, help: str) -> None:
    """Add a flag for the ids of directions."""
    parser.add_argument(name, nargs="+", action=OneText, metavar="ID", help=help,
                        key="analysis.saliency.direction_ids")


def add_direction_type_flag(parser: Parser) -> None:
    """Add --saliency_direction_type."""
    parser.add_argument("--saliency_direction_type", choices=("ica", "pca"),
                        key="analysis.saliency.direction_type",
                        help="independent or principal components")


def directions_folder(args: argparse.Namespace, parameters: ParameterSet) -> Path:
    """Return the folder of ``add_direction_flags``."""
    return args.precomp_dir or parameters.folders.hidden_states


def direction(text: str) -> int | None:
    """argparse type: the number of a direction, or None."""
    return None if text.lower() == "none" else int(text)


def add_swap_flags(parser: Parser, num_episodes_flag: str = "--num_episodes") -> None:
    """Add the flags of swaps of directions; see ``add_direction_flags``."""
    parser.add_argument("--swap_directions_from", type=int, nargs="+", metavar="DIRECTION",
                        key="gen_model.swap_directions_from",
                        help="directions of the hidden space to take out of every change of the "
                             "agent's state")
    parser.add_argument("--swap_directions_to", type=direction, nargs="+", metavar="DIRECTION",
                        key="gen_model.swap_directions_to",
                        help="for each of them the direction that gets the same amount instead, "
                             "or None")
    parser.add_argument("--random_directions", type=seed, metavar="SEED",
                        help="swap in random directions of equal size instead, drawn by this seed")
    add_direction_flags(parser, num_episodes_flag)


def add_alter_from_flag(parser: Parser, default: int) -> None:
    """Add --alter_from_step, at which alterations in the real environment begin."""
    parser.add_argument("--alter_from_step", type=from_zero, default=default,
                        help="first step of an episode at which the hidden state is altered; 0 "
                             "alters the first change too, which comes from the learned first "
                             "state, far from all others, so that a direction that is taken out "
                             "stays there")


def add_patch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that patch layers of the agent."""
    parser.add_argument("--patch", action=EachTime, default=[], metavar="PATCH",
                        help="a patch of a layer, kind@layer[:channels][=value]{,option=value}, "
                             "such as zero@embedder.block2.res1.resadd:55, or "
                             "interchange@embedder.block2.res1.resadd:55,source=7/8, which takes "
                             "the channel from the first frames of other levels; several are "
                             "applied in order")
    parser.add_argument("--patch_file", type=Path,
                        help="the same as YAML: a list of mappings with kind, layer, channels, "
                             "value and the options")
    parser.add_argument("--reference_size", type=whole(MIN_FRAMES, 10_000),
                        default=REFERENCE_SIZE,
                        help="frames of other levels over which a patch takes means and spreads")
    parser.add_argument("--reference_seed", type=seed, default=0, help="seed of these frames")


def patch_arms(args: argparse.Namespace) -> dict[str, tuple[Patch, ...]]:
    """Return the arms of ``add_patch_flags`` by name: one of all ``--patch``, and those of the
    file.

    Raises:
        UserError: if a patch does not parse, or two arms are the same.
    """
    arms = [tuple(map(parse_patch, args.patch))] if args.patch else []
    arms += read_patch_file(args.patch_file) if args.patch_file else []
    names = [arm_name(arm) for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the patches {name} are asked for twice")
    return dict(zip(names, arms))


def patch_arm(args: argparse.Namespace) -> tuple[Patch, ...]:
    """Return the patches of a script that plays one arm; none without the flags.

    Raises:
        UserError: if there are several arms, or a patch does not parse.
    """
    arms = patch_arms(args)
    if len(arms) > 1:
        raise UserError(f"--patch and --patch_file mean {len(arms)} arms, and here is room for "
                        "one; leave sweeps out, or give one of the flags alone")
    return next(iter(arms.values()), ())


def patched_precision(precision: str, patches: Collection) -> str:
    """Return ``--precision`` of a script with patches: float32 by default, because the difference
    of two activations loses most of its digits in bfloat16."""
    return "float32" if patches and precision == "auto" else precision


@dataclasses.dataclass(frozen=True)
class OpenedPatches:
    """The patches of a script, opened for its agent.

    Attributes:
        patches: for ``agents.hooks.patched``.
        metadata: an entry for the settings of what is written; empty without patches.
    """

    patches: list[Patch]
    metadata: dict

    @contextlib.contextmanager
    def scope(self, policy: Policy, *before: Patch) -> Iterator[ActivePatches]:
        """Apply the patches, after others; warn at the end of each patch that never acted."""
        with patched(policy, [*before, *self.patches]) as active:
            yield active
        warn_of_unused(active)


def open_arm(patches: Sequence[Patch], args: argparse.Namespace, policy: Policy,
             env: EnvConfig | None, reference: Callable[[int, int], ReferenceSet],
             edit: LevelEdit | None = None) -> OpenedPatches:
    """Open the patches of a script.

    Args:
        args: with the flags of ``add_patch_flags``.
        env: the game; None in the simulator.
        reference: maps a size and a seed to a reference set; called if a patch needs one.
        edit: edit of every level before it is played.

    Raises:
        UserError: see ``interventions.patch_text.open_patches``.
    """
    if not patches:
        return OpenedPatches([], {})
    references = []

    @functools.cache
    def make_reference() -> ReferenceSet:
        references.append(reference(args.reference_size, args.reference_seed))
        return references[0]

    opened = open_patches(patches, Opening(policy, env, make_reference, edit))
    with patched(policy, opened):  # refuses what does not fit before anything is written
        pass
    metadata = {"name": arm_name(patches), "patches": [*map(to_text, patches)],
                "reference": references[0].description if references else None,
                "files_sha256": {str(path): sha256(path) for patch in patches
                                 for path in files_of(patch)}}
    return OpenedPatches(opened, {"patches": metadata})
