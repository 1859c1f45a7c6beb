"""Options for directions of the hidden state, their swaps, and patches of layers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agents.hooks import ActivePatches, patched
from agents.layers import STATE
from agents.networks import Policy
from agents.patch import Patch
from agents.reference_set import MIN_FRAMES, ReferenceSet
from common.cli import OneText, count, from_zero, seed, whole
from common.errors import UserError
from common.files import sha256
from common.options import Options, ParameterOptions, SaveDirOptions, option
from common.step_results import StepResults
from interventions.config import DirectionFilesConfig, DirectionsConfig, SwapConfig
from interventions.hidden_states_folder import HIDDEN_STATE_FILES
from interventions.patch_text import (
    files_of,
    open_patches,
    parse_patch,
    patch_list_name,
    read_patch_file,
    warn_of_unused,
)
from interventions.patches import Opening
from interventions.projector import Projector, Swap

if TYPE_CHECKING:
    from envs.procgen_env import EnvConfig, LevelEdit

REFERENCE_SIZE = 50  # published value


def direction(text: str) -> int | None:
    """argparse type: the number of a direction, or None."""
    return None if text.lower() == "none" else int(text)


def _num_directions_option() -> Any:
    return option(None, "number of recorded episodes that the directions were computed from; part "
                        "of their file names", type=count, key="analysis.agent_h.num_episodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectionFolderOptions(SaveDirOptions):
    """Options that select the folder with the directions of the hidden space.

    Attributes:
        num_episodes_option: name of the option for the number of episodes that the directions were
            computed from.
    """

    num_episodes_option: ClassVar[str] = "num_episodes"

    precomp_dir: Path | None = option(
        None, "results folder of hidden_analysis_precompute.py; by default "
              "<save_dir>/hx_analysis_precomp",
        names=("--precomp_dir", "--precomputed_analysis_data_path"))

    @property
    def directions_folder(self) -> Path:
        """Folder of the directions."""
        return self.precomp_dir or self.parameters.folders.hidden_states

    @property
    def direction_episodes(self) -> int:
        """Number of episodes that the directions were computed from; if it was not given, that of
        the only directions in the folder.

        Raises:
            UserError: if the folder holds directions for other numbers only.
        """
        return StepResults.open(
            self.directions_folder, HIDDEN_STATE_FILES,
            self.parameters.get(DirectionFilesConfig).num_episodes, f"--{self.num_episodes_option}",
            self.parameters.is_given(DirectionFilesConfig, "num_episodes")).number

    def load_projector(self, policy: Policy, agent_file: Path) -> tuple[Projector, dict[str, str]]:
        """Return the projector onto the directions, and the checksums of their files.

        Raises:
            UserError: see ``Projector.load_for``.
        """
        return Projector.load_for(policy.hidden_state_size, self.directions_folder,
                                  self.direction_episodes, agent_file)

    def make_swap(self, pairs: str, from_step: int | None = None, kind: str = "ica",
                  random: int | None = None) -> Swap:
        """Return the patch of a swap of these directions, not opened.

        Flags of swaps are aliases of the text of this patch, see ``interventions.patch_text``.

        Args:
            pairs: text such as 10:12,5:None.
            from_step: first step of an episode that is altered, from 0; None for no limit.
            kind: "ica" or "pca".
            random: seed of the random directions that replace the components, or None.
        """
        options = {"directions": self.directions_folder, "num_episodes": self.direction_episodes,
                   "direction_type": kind, "random_directions": random,
                   "steps": None if from_step is None else f"{from_step}:"}
        swap = parse_patch(f"swap@{STATE}={pairs}" + "".join(
            f",{name}={value}" for name, value in options.items() if value is not None))
        assert isinstance(swap, Swap)
        return swap


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectionOptions(DirectionFolderOptions):
    """Options that select the files with the directions of the hidden space."""

    num_episodes: int | None = _num_directions_option()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayedDirectionOptions(DirectionFolderOptions):
    """``DirectionOptions`` for scripts in which ``num_episodes`` has another meaning."""

    num_episodes_option: ClassVar[str] = "num_direction_episodes"

    num_direction_episodes: int | None = _num_directions_option()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectionIdsOptions(ParameterOptions):
    """Options that select directions by their type and numbers, which may be a range."""

    direction_ids: str | None = option(
        None, "numbers of the directions that hx_direction stands for, or a range such as 0 to 16, "
              "which excludes 16",
        key="analysis.saliency.direction_ids", nargs="+", action=OneText, metavar="ID")
    saliency_direction_type: str | None = option(
        None, "type of the directions: independent or principal components",
        choices=("ica", "pca"), key="analysis.saliency.direction_type")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapOptions(DirectionFolderOptions):
    """Options that define a swap of directions."""

    swap_directions_from: tuple[int, ...] | None = option(
        None, "directions of the hidden space to remove from every change of the agent's state",
        key="gen_model.swap_directions_from", metavar="DIRECTION")
    swap_directions_to: tuple[int | None, ...] | None = option(
        None, "for each direction of --swap_directions_from, the direction that gets the same "
              "amount instead, or None", type=direction, key="gen_model.swap_directions_to",
        metavar="DIRECTION")
    random_directions: int | None = option(
        None, "replace the directions of the swap by random directions of equal size, drawn with "
              "this seed", type=seed, metavar="SEED")

    def swap(self, from_step: int | None = None) -> Swap | None:
        """Return the patch that the options stand for, not opened; None for no swap.

        Args:
            from_step: first step of an episode that is altered, from 0; None for no limit.

        Raises:
            UserError: if the options contradict each other.
        """
        swap = self.parameters.get(SwapConfig)
        taken, put = swap.swap_directions_from or (), swap.swap_directions_to or ()
        if len(taken) != len(put):
            raise UserError(f"{len(taken)} directions to swap from, but {len(put)} to swap to")
        if taken:
            return self.make_swap(
                ",".join(f"{source}:{target}" for source, target in zip(taken, put)), from_step,
                self.parameters.get(DirectionsConfig).direction_type, self.random_directions)
        if self.random_directions is not None:
            raise UserError("--random_directions replaces the directions of a swap, so it needs "
                            "--swap_directions_from and --swap_directions_to")
        return None

    def open_swap(self, policy: Policy, from_step: int | None = None) -> Swap | None:
        """Return the opened patch of the options, see ``swap`` and ``Swap.opened``."""
        swap = self.swap(from_step)
        return swap and swap.opened(policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlterFromOptions(Options):
    """Options for the alteration of the hidden state in the real environment."""

    alter_from_step: int = option(
        0, "first step of an episode at which the hidden state is altered. With 0, the change in "
           "the first step is altered, too, so the coordinate along a removed direction keeps its "
           "value in the learned initial state, which differs a lot from later states",
        type=from_zero)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchOptions(Options):
    """Options that define patches of the agent's layers."""

    patch: tuple[str, ...] = option(
        (), "patch of a layer, kind@layer[:channels][=value]{,option=value}, such as "
            "zero@embedder.block2.res1.resadd:55, or "
            "interchange@embedder.block2.res1.resadd:55,source=7/8, which takes the channel from "
            "the first frames of other levels; repeat the flag to apply several patches in order",
        action="append", metavar="PATCH")
    patch_file: Path | None = option(None, "YAML file with patches: a list of mappings with kind, "
                                           "layer, channels, value and options")
    reference_size: int = option(
        REFERENCE_SIZE, "number of frames of other levels from which patches compute means and "
                        "standard deviations", type=whole(MIN_FRAMES, 10_000))
    reference_seed: int = option(0, "seed that selects the reference frames", type=seed)

    @functools.cached_property
    def patch_lists(self) -> dict[str, tuple[Patch, ...]]:
        """Lists of patches by name. All of ``patch`` is one list; a patch file can define several.

        Raises:
            UserError: if a patch does not parse, or the patch file is missing or damaged.
        """
        patch_lists = [tuple(map(parse_patch, self.patch))] if self.patch else []
        patch_lists += read_patch_file(self.patch_file) if self.patch_file else []
        return {patch_list_name(patch_list): patch_list for patch_list in patch_lists}

    @property
    def patch_list(self) -> tuple[Patch, ...]:
        """The patches of a script that applies only one list of patches; may be empty.

        Raises:
            UserError: if there are several lists, or a patch does not parse.
        """
        if len(self.patch_lists) > 1:
            raise UserError(f"--patch and --patch_file define {len(self.patch_lists)} lists of "
                            "patches, but this script plays only one; use a file without sweeps, "
                            "and only one of the two flags")
        return next(iter(self.patch_lists.values()), ())

    def open_patch_list(self, policy: Policy, env: EnvConfig | None,
                        reference: Callable[[int, int], ReferenceSet],
                        edit: LevelEdit | None = None, patches: Sequence[Patch] | None = None
                        ) -> OpenedPatches:
        """Open a list of patches, see ``interventions.patch_text.open_patches``.

        Args:
            env: configuration of the game; None in the simulator.
            reference: function that maps a size and a seed to a reference set; called only if a
                patch needs one.
            edit: edit applied to every level before it is played; None for no edit.
            patches: the patches; those of ``patch_list`` if None.

        Raises:
            UserError: see ``interventions.patch_text.open_patches`` and ``agents.hooks.patched``.
        """
        patches = self.patch_list if patches is None else patches
        if not patches:
            return OpenedPatches([], {})
        references = []

        @functools.cache
        def make_reference() -> ReferenceSet:
            references.append(reference(self.reference_size, self.reference_seed))
            return references[0]

        opened = open_patches(patches, Opening(policy, env, make_reference, edit))
        with patched(policy, opened):  # raises for patches that do not fit, before output exists
            pass
        metadata = {"name": patch_list_name(patches), "patches": [patch.text for patch in patches],
                    "reference": references[0].description if references else None,
                    "files_sha256": {str(path): sha256(path) for patch in patches
                                     for path in files_of(patch)}}
        return OpenedPatches(opened, {"patches": metadata})


def patched_precision(precision: str, patches: Collection) -> str:
    """Return the precision of a script that may apply patches.

    With patches, "auto" becomes "float32", because the difference of two activations loses most of
    its digits in bfloat16.

    Args:
        precision: value of ``--precision``.
        patches: patches of the script; may be empty.
    """
    return "float32" if patches and precision == "auto" else precision


@dataclasses.dataclass(frozen=True)
class OpenedPatches:
    """The patches of a script, opened for its agent.

    Attributes:
        patches: opened patches, for ``agents.hooks.patched``.
        metadata: entry for the settings of the script's output; empty without patches.
    """

    patches: list[Patch]
    metadata: dict

    @contextlib.contextmanager
    def scope(self, policy: Policy, *before: Patch) -> Iterator[ActivePatches]:
        """Apply the patches inside the ``with`` block.

        On exit, a warning is logged for each patch that never acted.

        Args:
            policy: the agent.
            before: patches to apply before the opened patches.

        Yields:
            The active patches.
        """
        with patched(policy, [*before, *self.patches]) as active:
            yield active
        warn_of_unused(active)
