"""Ablate features of a layer of an agent, see ``EditAgentOptions``.

By default, the agent file stores the edit, which is applied to the layer's output during the
forward pass. With --in_weights, the weights of the linear module after the layer are changed
instead, with the same effect, and the file has the plain published layout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from agents.agent_file import load_agent, read_origin, save_agent
from agents.edits import Edit, with_edits
from agents.networks import Policy
from agents.provenance import agent_digests, agent_sha256
from agents.reference_set import activations_of
from attribution.config import ANALYSES
from attribution.editing import RandomEdit, in_weights, pool_behind, random_edits
from attribution.layers import find_bottlenecks
from attribution.recordings import Recording
from attribution.results import LayerFeatures, load_features
from common.cli import output_file, seed, whole
from common.errors import UserError
from common.options import LogOptions, OutputFileOptions, command, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditAgentOptions(OutputFileOptions, LogOptions):
    """Ablate features of a layer of an agent, and write an edited agent file, which all scripts
    accept."""

    agent_file: Path = option(help="agent to edit")
    features_dir: Path = option(ANALYSES / "features",
                                "features of the agent, from python -m attribution.features")
    layer: str = option(help="short name (such as block3) or path of the layer to edit")
    features: tuple[int, ...] = option(help="numbers of the features to ablate, counted from 0",
                                       type=whole(0, 1000), metavar="NUMBER")
    strength: float = option(
        1.0, "share of the features that is removed; 1 removes them, 2 reverses their sign")
    random_directions: int | None = option(
        None, "ablate random directions instead: the same entries at permuted channels, rescaled "
              "to cause a change of the same size; needs --data_dir", type=seed, metavar="SEED")
    data_dir: Path | None = option(
        None, "recording in which the features were found; the size of the change by random "
              "directions is measured on its frames")
    in_weights: bool = option(
        False, "change the weights of the module that reads the layer; possible only if a single "
               "linear module reads it")
    behind_pool: bool = option(
        False, "ablate the features in the output of the L2 pool after the layer, where the "
               "published edits apply; equivalent for features of a single channel")
    output: Path = option(help="agent file to write, such as model_edited.pth", type=output_file)


def edit_agent(options: EditAgentOptions) -> Policy:
    """Write the edited agent, and return it."""
    options.check_output(lambda path: read_origin(path).edited_from is not None)
    policy, origin = load_agent(options.agent_file), read_origin(options.agent_file)
    root = origin.edited_from or agent_sha256(options.agent_file)
    [bottleneck] = find_bottlenecks(policy, [options.layer], allow_bypassed=True)
    features = load_features(options.features_dir, bottleneck,
                             {*agent_digests(options.agent_file), root})
    if max(options.features) >= features.number:
        raise UserError(f"there is no feature {max(options.features)} of {bottleneck.name}: they "
                        f"are numbered 0 to {features.number - 1}")
    path = bottleneck.layer.name
    edit = Edit(pool_behind(policy, path) if options.behind_pool else path,
                torch.from_numpy(features.reducer.directions[list(options.features)]),
                options.strength)
    removed = f"features {', '.join(map(str, options.features))} of {bottleneck.name}"
    if options.random_directions is not None:
        control = random_edit(options, policy, features, edit)
        edit = control.edit
        removed = (f"random directions instead of {removed} (at the strength of the edit, they "
                   f"would change the layer {control.relative:.2f} times as much; their strength "
                   "was rescaled to make both changes equally large)")
    edited = in_weights(policy, edit) if options.in_weights else with_edits(policy, [edit])
    save_agent(options.output, edited, origin=dataclasses.replace(origin, edited_from=root))
    print(f"wrote {options.output}: {options.agent_file} without {removed}, strength "
          f"{edit.strength:g}, {'in its weights' if options.in_weights else 'as an edit'}")
    return edited


def random_edit(options: EditAgentOptions, policy: Policy, features: LayerFeatures, edit: Edit
                ) -> RandomEdit:
    """Draw random directions whose ablation changes the layer as much as an edit does.

    Raises:
        UserError: if there is no recording, or the features were found in another one.
    """
    assert options.random_directions is not None
    if options.data_dir is None:
        raise UserError("--random_directions needs --data_dir, the recording that the features "
                        "were found in")
    recording = Recording(options.data_dir, policy, options.agent_file)
    if features.settings.get("recording_sha256") != recording.sha256:
        raise UserError(f"the features in {options.features_dir} were found in another recording "
                        f"than {options.data_dir}; give the recording of the features as "
                        "--data_dir")
    rows = recording.read(features.observations)
    activations = activations_of(policy, rows.frames, [edit.layer], rows.entering)[edit.layer]
    [control] = random_edits(edit, activations, 1, options.random_directions)
    return control


main = command(EditAgentOptions, edit_agent)

if __name__ == "__main__":
    raise SystemExit(main())
