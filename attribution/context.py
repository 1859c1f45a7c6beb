"""Command-line flags of the attribution scripts, and the agent and recording that they select.

Letters in shape comments: B or N frames, H W grid of a layer, F features.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.agent_file import load_agent, read_origin
from agents.networks import PolicyOutput
from agents.provenance import agent_digests, agent_sha256
from attribution.integrated_gradients import MAX_STEPS, Integration
from attribution.layers import Bottleneck, find_bottlenecks
from attribution.recordings import Recording, batches, check_finite_frames
from attribution.reduction import flatten_cells
from attribution.results import INPUT, LayerFeatures, load_features
from common.cli import Parser, add_check_contents_flag, add_compute_flags, seed, whole
from common.devices import resolve_compute
from common.errors import UserError
from interventions.partial_forward import PartialForward


def add_agent_flags(parser: Parser) -> None:
    """Add the flags of the agent, its recording and its layers."""
    parser.add_argument("--agent_file", type=Path, required=True,
                        help="agent whose outputs are attributed")
    parser.add_argument("--data_dir", type=Path, required=True,
                        help="recording of this agent: the data folder of record.py, preferably "
                             "with --no_action_noise")
    add_check_contents_flag(parser)
    parser.add_argument("--layers", nargs="+", metavar="LAYER",
                        help="short names (block1, block2, block3 of IMPALA) or paths of the "
                             "layers; if not given, all layers with short names; input is the "
                             "frame itself, for which attribution.attribute computes gradients")
    parser.add_argument("--allow_partial", action="store_true",
                        help="also attribute to layers bypassed by a skip connection; the bypass "
                             "is then ignored")


def add_integral_flags(parser: Parser) -> None:
    """Add the flags ``--integrate_steps`` and ``--tolerance`` of the numerical integration."""
    parser.add_argument("--integrate_steps", type=whole(1, MAX_STEPS), default=Integration().steps,
                        help="initial number of nodes per path")
    parser.add_argument("--tolerance", type=float, default=Integration().tolerance,
                        help="relative completeness error above which a path is refined")


def add_output_flags(parser: Parser, name: str) -> None:
    """Add the flags of the seed, the output folder, dry runs, and the device; the default precision
    is float32.

    Args:
        parser: the parser.
        name: name of the default output folder in analysis/attribution.
    """
    parser.add_argument("--seed", type=seed, default=0, help="seed of all random draws")
    parser.add_argument("--output_dir", type=Path, default=Path("analysis") / "attribution" / name,
                        help="folder to write to")
    parser.add_argument("--overwrite", action="store_true",
                        help="delete the previous contents of the folder")
    parser.add_argument("--dry_run", action="store_true",
                        help="print what would be computed, and stop")
    add_compute_flags(parser)
    parser.set_defaults(precision="float32")


class AttributionContext:
    """An agent, its recording and its layers, selected by the flags of :func:`add_agent_flags`.

    Args:
        args: the parsed flags.
        layers: names of layers to use if the flags name none; None for all layers with short names.

    Attributes:
        policy: the agent.
        compute: device and precision of the agent; always float32.
        recording: recording of the agent.
        bottlenecks: the selected layers.
        wants_frame: whether the frame itself is also selected.
        agents: checksums that identify the agent in stored results.
        provenance: identification of agent and recording, for stored settings.

    Raises:
        UserError: if the flags choose bfloat16, a file is missing or damaged, agent and recording
            do not belong together, or a layer cannot be attributed to (see
            :func:`find_bottlenecks`).
    """

    def __init__(self, args: argparse.Namespace, layers: list[str] | None = None):
        if args.precision == "bfloat16":
            raise UserError("in bfloat16, attributions do not sum to the change of the output from "
                            "the baseline; leave --precision at float32")
        self.compute = resolve_compute(args.device, args.gpu_device, "float32")
        self.policy = load_agent(args.agent_file, self.compute.device)
        self.agents = agent_digests(args.agent_file)
        origin = read_origin(args.agent_file).edited_from
        self._feature_agents = {*self.agents, *([origin] if origin else [])}
        self.recording = Recording(args.data_dir, self.policy, args.agent_file,
                                   args.check_contents)
        names = args.layers or layers
        self.wants_frame = INPUT in (names or ())
        self.bottlenecks = find_bottlenecks(
            self.policy, None if names is None else [name for name in names if name != INPUT],
            args.allow_partial)
        self.provenance = {
            "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
            "recording_sha256": self.recording.sha256, "game": self.recording.game}

    def features(self, path: Path, bottleneck: Bottleneck) -> LayerFeatures:
        """Read the features of a layer, which were found in this agent or, if this agent is edited,
        in the original.

        Args:
            path: folder of the features of all layers.
            bottleneck: the layer.

        Raises:
            UserError: see :func:`load_features`.
        """
        return load_features(path, bottleneck, self._feature_agents, self.recording.game)

    def run(self, frame_ids: np.ndarray) -> tuple[PolicyOutput, Tensor]:
        """Run the agent on recorded frames.

        Args:
            frame_ids: episode and row of each frame (B, 2).

        Returns:
            Output of the agent, and the recorded actions (B,).
        """
        batch = self.recording.read(frame_ids)
        return (run_policy(self.policy, self.compute, batch.frames,
                           torch.from_numpy(batch.entering).to(self.compute.device)),
                torch.from_numpy(batch.actions).to(self.compute.device))


def feature_activations(context: AttributionContext, bottleneck: Bottleneck,
                        features: LayerFeatures, places: np.ndarray) -> np.ndarray:
    """Compute the activations of features in recorded frames.

    Args:
        context: the agent and its recording.
        bottleneck: the layer.
        features: features of the layer.
        places: episode and row of each frame (N, 2).

    Returns:
        Activations, float32 (N, H, W, F).

    Raises:
        UserError: if an activation is not finite; the message names its frame.
    """
    forward = PartialForward(context.policy, context.compute, bottleneck.layer.name)
    activations = []
    with torch.no_grad():
        for batch in batches(places):
            rows = context.recording.read(batch)
            maps = forward.run_to(rows.frames, torch.from_numpy(rows.entering)).activations.cpu(
                ).numpy().reshape(len(batch), *bottleneck.shape)
            check_finite_frames(maps, batch, f"activations of the layer {bottleneck.name}")
            activations.append(features.reducer.activations(flatten_cells(maps)).astype(
                np.float32).reshape(len(batch), *bottleneck.shape[1:], -1))
    return np.concatenate(activations)
