"""Command-line flags of the scripts that attribute."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.acting import run_policy
from agents.agent_file import load_agent, read_origin
from agents.networks import Policy, PolicyOutput
from agents.provenance import agent_digests, agent_sha256
from attribution.attributing.attribution_files import INPUT, FeaturesFolder, LayerFeatures
from attribution.attributing.integration import MAX_STEPS, Integration
from attribution.attributing.layers import Cut, find_cuts
from attribution.attributing.recordings import Recording
from common.cli import Parser, add_check_contents_flag, add_compute_flags, seed, whole
from common.devices import Compute, resolve_compute
from common.errors import UserError


def add_agent_flags(parser: Parser) -> None:
    """Flags of the agent, its recording and its layers."""
    parser.add_argument("--agent_file", type=Path, required=True,
                        help="agent whose outputs are attributed")
    parser.add_argument("--data_dir", type=Path, required=True,
                        help="recording of this agent: the data folder of record.py; its own "
                             "policy, --no_action_noise, is what one wants to see")
    add_check_contents_flag(parser)
    parser.add_argument("--layers", nargs="+", metavar="LAYER",
                        help="layers to attribute to, by their short names (block1, block2, block3 "
                             "of IMPALA) or paths; all short names if not given; input is the "
                             "frame itself, which attribution.attribute gives gradients of")
    parser.add_argument("--allow_partial", action="store_true",
                        help="also attribute to layers that a part of the network goes around, "
                             "which leaves that part out")


def tolerance(text: str) -> float:
    """A share above 0, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must lie above 0 and not above 1, not '{text}'")
    return value


def add_integral_flags(parser: Parser) -> None:
    """Flags of the integrals' precision."""
    parser.add_argument("--integrate_steps", type=whole(1, MAX_STEPS), default=Integration().steps,
                        help="nodes of a path's integral at first")
    parser.add_argument("--tolerance", type=tolerance, default=Integration().tolerance,
                        help="error of an integral, as a share of output minus baseline, above "
                             "which it is refined")


def add_output_flags(parser: Parser, name: str) -> None:
    """Flags that say where to write and how to compute.

    Args:
        name: of the folder.
    """
    parser.add_argument("--seed", type=seed, default=0, help="of all that is drawn")
    parser.add_argument("--output_dir", type=Path, default=Path("analysis") / "attribution" / name,
                        help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="throw away what is there")
    parser.add_argument("--dry_run", action="store_true",
                        help="say what would be computed, and stop")
    add_compute_flags(parser)
    parser.set_defaults(precision="float32")


class Opened:
    """An agent, its recording and its layers, as :func:`add_agent_flags` ask for them.

    Attributes:
        policy, compute: the agent, and where it runs.
        recording: of it.
        cuts: its layers.
        wants_frame: whether the frame itself is among them.
        agents: digests under which results name the agent.
        features_of: digests of the agent files whose features may be this agent's: its own, and
            that of the agent that it was edited from.
        description: what they are, for settings.

    Raises:
        UserError: if any of it is missing or damaged, or they do not belong together.
    """

    policy: Policy
    compute: Compute
    recording: Recording
    cuts: tuple[Cut, ...]
    wants_frame: bool
    agents: frozenset[str]
    features_of: frozenset[str]

    def __init__(self, args: argparse.Namespace, layers: list[str] | None = None):
        if args.precision == "bfloat16":
            raise UserError("in bfloat16 attributions do not add up to the output; leave "
                            "--precision at float32")
        self.compute = resolve_compute(args.device, args.gpu_device, "float32")
        self.policy = load_agent(args.agent_file, self.compute.device)
        self.policy.requires_grad_(False)
        self.agents = agent_digests(args.agent_file)
        self.features_of = self.agents | frozenset(
            {read_origin(args.agent_file).edited_from} - {None})
        self.recording = Recording(args.data_dir, self.policy, args.agent_file,
                                   args.check_contents)
        asked = args.layers or layers
        self.wants_frame = INPUT in (asked or ())
        self.cuts = find_cuts(
            self.policy, None if asked is None else [name for name in asked if name != INPUT],
            args.allow_partial)
        self.description = {
            "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
            "recording_sha256": self.recording.sha256, "game": self.recording.game}

    def features(self, path: Path, cut: Cut) -> LayerFeatures:
        """The features of one of the layers, from the folder of all layers; see ``features_of``."""
        return features_of(path, cut, self.features_of, self.recording.game)

    def run(self, places: np.ndarray) -> tuple[PolicyOutput, Tensor]:
        """The agent's output on rows of the recording (B, 2), and the actions taken (B,)."""
        rows = self.recording.rows(places)
        return (run_policy(self.policy, self.compute, rows.frames,
                           torch.from_numpy(rows.entering).to(self.compute.device)),
                torch.from_numpy(rows.actions).to(self.compute.device))


def features_of(path: Path, cut: Cut, agents: Collection[str], game: str | None = None
                ) -> LayerFeatures:
    """The features of a layer.

    Args:
        agents: checksums of the agent files whose features they may be.
        game: that they must be of, if given.

    Raises:
        UserError: if they are missing, damaged, or of another agent, game or layer.
    """
    features = FeaturesFolder(path, cut.name).read()
    again = "; give --features_dir of this agent, or find them with python -m attribution.features"
    found = str(features.settings.get("agent_sha256"))
    if found not in agents:
        raise UserError(f"the features in {path / cut.name} are of the agent {found[:12]}, and "
                        f"this one is {' or '.join(sorted(each[:12] for each in agents))}{again}")
    if game not in (None, features.settings.get("game")):
        raise UserError(f"the features in {path / cut.name} are of the game "
                        f"{features.settings.get('game')}, and this one is {game}{again}")
    if (features.settings.get("layer") != cut.layer.name
            or features.mean_activations.shape != cut.shape):
        raise UserError(f"the features in {path / cut.name} are of the layer "
                        f"{features.settings.get('layer')} with "
                        f"{features.mean_activations.shape} activations, not of {cut.layer.name} "
                        f"with {cut.shape}{again}")
    return features
