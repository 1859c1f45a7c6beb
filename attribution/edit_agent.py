"""Ablate features of a layer of an agent, and write an edited agent file, which all scripts accept.

By default, the file stores the edit, which is applied to the layer's output during the forward
pass. With --in_weights, the weights of the linear module after the layer are changed instead, with
the same effect, and the file has the plain published layout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from agents.agent_file import load_agent, read_origin, save_agent
from agents.edits import Edit, with_edits
from agents.provenance import agent_digests, agent_sha256
from agents.reference_set import activations_of
from attribution.editing import in_weights, pool_behind, random_edits
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
                       help="ablate random directions instead: the same entries at permuted "
                            "channels, rescaled to cause a change of the same size; needs "
                            "--data_dir")
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
                            f"than {args.data_dir}; give the recording of the features as "
                            "--data_dir")
        rows = recording.read(features.observations)
        activations = activations_of(policy, rows.frames, [layer], rows.entering)[layer]
        [control] = random_edits(edit, activations, 1, args.random_directions)
        edit = control.edit
        removed = (f"random directions instead of {removed} (at the strength of the edit, they "
                   f"would change the layer {control.relative:.2f} times as much; their strength "
                   "was rescaled to make both changes equally large)")
    edited = in_weights(policy, edit) if args.in_weights else with_edits(policy, [edit])
    save_agent(args.output, edited, origin=dataclasses.replace(origin, edited_from=root))
    print(f"wrote {args.output}: {args.agent_file} without {removed}, strength {edit.strength:g}, "
          f"{'in its weights' if args.in_weights else 'as an edit'}")


if __name__ == "__main__":
    raise SystemExit(main())
