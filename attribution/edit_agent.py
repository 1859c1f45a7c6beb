"""Ablate features of a layer of an agent, and write an edited agent file, which every script reads.

By default, the file stores the edit, which is applied to the layer's output during the forward
pass. With --in_weights, the weights are changed instead, where this is equivalent, and the file has
the plain published layout.
"""
# Random edits of the same size are controls: they permute the channels of the edit's directions,
# with the same permutation for all directions. Their strength is chosen such that the norm of their
# change, averaged over frames, equals that of the edit.
#
# Letters in shape comments: N frames, C channels of the layer, M channels by sign, F directions, R
# rank of an edit, O output channels of a module, P cells.

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from agents.agent_file import load_agent, read_origin, save_agent
from agents.edits import Edit, with_edits
from agents.layers import all_layers, find_layer
from agents.networks import L2Pool, Policy
from agents.provenance import agent_digests, agent_sha256
from agents.reference_set import activations_of
from attribution.layers import find_bottlenecks
from attribution.recordings import Recording
from attribution.results import load_features
from common.cli import (
    Parser,
    add_log_flag,
    add_output_file_flag,
    check_output,
    seed,
    set_up_logging,
    whole,
)
from common.errors import UserError, script_main
from interventions.controls import NEAR

_NUM_DRAWN = 500  # number of tried permutations of the channels


def pool_behind(policy: Policy, layer: str) -> str:
    """Return the path of the L2 pool that reads a layer.

    The published edits project directions out of the pool's output, because they change the weights
    of the convolution after it.

    Raises:
        UserError: if another module reads the layer.
    """
    name, module = _module_behind(policy, layer)
    if not isinstance(module, L2Pool):
        raise UserError(f"there is no L2 pool behind {layer}, but {name}; leave --behind_pool out")
    return name


def in_weights(policy: Policy, edit: Edit) -> Policy:
    """Return a copy of an agent with an edit merged into its weights.

    The module that reads the layer has, for each of its outputs and each cell, a weight vector over
    the layer's channels. It is multiplied by I - s P, with strength s and the projection P onto the
    edit's directions.

    Raises:
        UserError: if the layer is not read by a single linear module, or the edit depends on the
            sign of activations.
    """
    channels = find_layer(policy, edit.layer).shape[0]
    name, module = _module_behind(policy, edit.layer)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        raise UserError(f"{edit.layer} is read by {name}, which is no linear map alone, so that "
                        "the edit is none of weights; leave --in_weights out, or give "
                        "--behind_pool if it is an L2 pool")
    if edit.signed(channels):
        raise UserError(f"the features of {edit.layer} are of activations of both signs, which "
                        "are no linear function of them, so that the edit is none of weights; "
                        "leave --in_weights out")
    edited = copy.deepcopy(policy)
    weight = edited.get_parameter(f"{name}.weight")
    basis = edit.basis.to(weight)  # (C, R)
    with torch.no_grad():
        by_channel = weight.view(len(weight), channels, -1)  # (O, C, P)
        along = torch.einsum("ocp,cr->orp", by_channel, basis)
        by_channel -= edit.strength * torch.einsum("orp,cr->ocp", along, basis)
    return edited


def _module_behind(policy: Policy, layer: str) -> tuple[str, nn.Module]:
    """Return the name of the embedder's next module, which reads a layer, and the module.

    Outputs that a residual unit also reads are followed only by a ReLU or a sum, so a convolution
    or a linear module is the only reader.
    """
    names = [each.name for each in all_layers(policy) if each.name.startswith("embedder.")]
    for name in names[names.index(layer) + 1:] if layer in names else []:
        module = policy.get_submodule(name)
        if not isinstance(module, nn.Flatten):  # flattening changes no values
            return name, module
    raise UserError(f"{layer} is not read by one map of the embedder alone, so that an edit of it "
                    "is none of weights; leave --in_weights out")


@dataclasses.dataclass(frozen=True)
class RandomEdit:
    """A control of an edit.

    Attributes:
        edit: the random edit.
        relative: ratio between the sizes of the control's and the original edit's changes at the
            same strength; the control's strength was divided by it.
    """

    edit: Edit
    relative: float

    @property
    def near(self) -> bool:
        """Whether the sizes of both changes differ by at most a quarter at the same strength."""
        return abs(self.relative - 1) <= NEAR


class ChangeSizes:
    """Computes the sizes of the changes that edits of a layer cause in given frames.

    Args:
        activations: activations of the layer (N, C, …).
        signed: whether directions treat positive and negative activations as separate channels.
    """

    def __init__(self, activations: Tensor, signed: bool):
        self.channels = activations.shape[1]
        cells = activations.flatten(2).double() if activations.ndim > 2 else (
            activations.double().unsqueeze(2))  # (N, C, P)
        if signed:
            cells = torch.cat([cells.relu(), (-cells).relu()], dim=1)
        self._products = cells @ cells.mT  # (N, M, M)

    def of(self, edit: Edit) -> float:
        """Compute the Euclidean norm of an edit's change, averaged over frames."""
        basis, back = edit.basis.double(), edit.back(self.channels).double()
        along = basis.T @ self._products @ basis  # (N, R, R)
        squares = (along * (back.T @ back)).sum(dim=(1, 2)).clamp(min=0)
        return abs(edit.strength) * float(squares.sqrt().mean())


def random_edits(edit: Edit, activations: Tensor, number: int, seed: int) -> list[RandomEdit]:
    """Draw random edits as controls of an edit; a larger number only appends further controls.

    Controls whose size differs by at most a quarter at the same strength come first, then the
    others in order of increasing difference.

    Args:
        edit: the edit.
        activations: activations of its layer in some frames (N, C, …), without the edit.
        number: number of controls.
        seed: seed of the random permutations.

    Raises:
        UserError: if the edit has no effect, or too few other directions have one.
    """
    sizes = ChangeSizes(activations, edit.signed(activations.shape[1]))
    size = sizes.of(edit)
    if not size:
        raise UserError(f"the edit of {edit.layer} changes nothing in {len(activations)} pictures, "
                        "so it has no controls of its size; edit other features")
    rng = np.random.default_rng(seed)
    controls, seen = [], {edit.directions.numpy().tobytes()}
    for _ in range(_NUM_DRAWN):
        directions = edit.directions[:, torch.from_numpy(rng.permutation(
            edit.directions.shape[1]))]
        key = directions.numpy().tobytes()
        if key in seen:
            continue
        seen.add(key)
        control = dataclasses.replace(edit, directions=directions)
        relative = sizes.of(control) / size
        if relative:
            controls.append(RandomEdit(dataclasses.replace(
                control, strength=edit.strength / relative), relative))
    if len(controls) < number:
        raise UserError(f"{number} controls cannot be drawn for the edit of {edit.layer}: there "
                        f"are {len(controls)} other directions that change anything; take fewer "
                        "--num_controls")
    controls.sort(key=lambda each: 0.0 if each.near else abs(np.log(each.relative)))
    return controls[:number]




def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="agent to edit")
    flags.add_argument("--features_dir", type=Path, default=Path("analysis/attribution/features"),
                       help="features of the agent, from python -m attribution.features")
    flags.add_argument("--layer", required=True,
                       help="short name (such as block3) or path of the layer to edit")
    flags.add_argument("--features", nargs="+", type=whole(0, 1000), required=True,
                       metavar="NUMBER", help="numbers of the features to ablate, counted from 0")
    flags.add_argument("--strength", type=float, default=1.0,
                       help="share of the features that is removed; 1 removes them, 2 reverses "
                            "their sign")
    flags.add_argument("--random_directions", type=seed, metavar="SEED",
                       help="ablate random directions instead, with the same entries at permuted "
                            "channels and a change of the same size; needs --data_dir")
    flags.add_argument("--data_dir", type=Path,
                       help="recording in which the features were found; the size of the change "
                            "by random directions is measured on its frames")
    flags.add_argument("--in_weights", action="store_true",
                       help="change the weights of the module that reads the layer; possible only "
                            "if a single linear module reads it")
    flags.add_argument("--behind_pool", action="store_true",
                       help="ablate the features in the output of the L2 pool after the layer, "
                            "where the published edits apply; equivalent for features of a single "
                            "channel")
    add_output_file_flag(flags, required=True, help="agent file to write, such as model_edited.pth")
    add_log_flag(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_output(args.output, lambda path: read_origin(path).edited_from is not None,
                 args.overwrite)
    policy, origin = load_agent(args.agent_file), read_origin(args.agent_file)
    root = origin.edited_from or agent_sha256(args.agent_file)
    [bottleneck] = find_bottlenecks(policy, [args.layer], allow_bypassed=True)
    features = load_features(args.features_dir, bottleneck, {*agent_digests(args.agent_file), root})
    if max(args.features) >= features.number:
        raise UserError(f"there is no feature {max(args.features)} of {bottleneck.name}: they are "
                        f"numbered 0 to {features.number - 1}")
    path = bottleneck.layer.name
    layer = pool_behind(policy, path) if args.behind_pool else path
    edit = Edit(layer, torch.from_numpy(features.reducer.directions[args.features]), args.strength)
    removed = f"features {', '.join(map(str, args.features))} of {bottleneck.name}"
    if args.random_directions is not None:
        if args.data_dir is None:
            raise UserError("--random_directions needs --data_dir, the recording that the features "
                            "were found in")
        recording = Recording(args.data_dir, policy, args.agent_file)
        if features.settings.get("recording_sha256") != recording.sha256:
            raise UserError(f"the features in {args.features_dir} were found in another recording "
                            f"than {args.data_dir}; give that one as --data_dir")
        rows = recording.read(features.observations)
        activations = activations_of(policy, rows.frames, [layer], rows.entering)[layer]
        [control] = random_edits(edit, activations, 1, args.random_directions)
        edit = control.edit
        removed = (f"random directions in the place of {removed} (changing {control.relative:.2f} "
                   "times as much at the same strength, the same at this one)")
    edited = in_weights(policy, edit) if args.in_weights else with_edits(policy, [edit])
    save_agent(args.output, edited, origin=dataclasses.replace(origin, edited_from=root))
    print(f"wrote {args.output}: {args.agent_file} without {removed}, strength {edit.strength:g}, "
          f"{'in its weights' if args.in_weights else 'as an edit'}")


if __name__ == "__main__":
    raise SystemExit(main())
