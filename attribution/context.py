"""Options of the attribution scripts, and the agent and recording that they select.

Letters in shape comments: B or N frames, H W grid of a layer, F features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from common.cli import seed, whole
from common.devices import Compute
from common.errors import UserError
from common.options import CheckContentsOptions, ComputeOptions, Options, option, redefine
from interventions.partial_forward import PartialForward


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionOptions(CheckContentsOptions, ComputeOptions):
    """Options of a script that attributes an agent's outputs in a recording."""

    agent_file: Path = option(help="agent whose outputs are attributed")
    data_dir: Path = option(help="recording of this agent: the data folder of record.py, "
                                 "preferably with --no_action_noise")
    layers: tuple[str, ...] | None = option(
        None, "short names (block1, block2, block3 of IMPALA) or paths of the layers; if not "
              "given, all layers with short names; input is the frame itself, for which "
              "attribution.attribute computes gradients", metavar="LAYER")
    allow_partial: bool = option(False, "also attribute to layers bypassed by a skip connection; "
                                        "the bypass is then ignored")
    seed: int = option(0, "seed of all random draws", type=seed)
    overwrite: bool = option(False, "delete the previous contents of the folder")
    dry_run: bool = option(False, "print what would be computed, and stop")
    precision: str = redefine(ComputeOptions, "precision", default="float32")

    @functools.cached_property
    def compute(self) -> Compute:
        """Device; the precision is float32.

        Raises:
            UserError: if there is no such device, or the options choose bfloat16.
        """
        if self.precision == "bfloat16":
            raise UserError("in bfloat16, attributions do not sum to the change of the output from "
                            "the baseline; leave --precision at float32")
        return self.compute_in("float32")

    def open_context(self, layers: Sequence[str] | None = None) -> AttributionContext:
        """Open the agent, its recording and the layers.

        Args:
            layers: names of layers to use if the options name none; None for all layers with short
                names.

        Raises:
            UserError: see ``compute`` and :class:`AttributionContext`.
        """
        return AttributionContext(
            self.agent_file, self.data_dir, self.compute, self.layers or layers,
            self.allow_partial, self.check_contents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegralOptions(Options):
    """Options of the numerical integration."""

    integrate_steps: int = option(Integration().steps, "initial number of nodes per path",
                                  type=whole(1, MAX_STEPS))
    tolerance: float = option(Integration().tolerance, "relative completeness error above which a "
                                                       "path is refined")


class AttributionContext:
    """An agent, its recording and some of its layers.

    Args:
        agent_file: the agent.
        data_dir: recording of the agent.
        compute: device; the precision must be float32.
        layers: short names or paths of the layers; INPUT is the frame itself; None for all layers
            with short names.
        allow_partial: also accept layers bypassed by a skip connection.
        check_contents: see ``CheckContentsOptions``.

    Attributes:
        policy: the agent.
        compute: device and precision of the agent.
        recording: recording of the agent.
        bottlenecks: the layers.
        wants_frame: whether the frame itself is also selected.
        agents: checksums that identify the agent in stored results.
        provenance: identification of agent and recording, for stored settings.

    Raises:
        UserError: if a file is missing or damaged, agent and recording do not belong together, or a
            layer cannot be attributed to (see :func:`find_bottlenecks`).
    """

    def __init__(self, agent_file: Path, data_dir: Path, compute: Compute,
                 layers: Sequence[str] | None = None, allow_partial: bool = False,
                 check_contents: bool = False):
        self.compute, self.policy = compute, load_agent(agent_file, compute.device)
        self.agents = agent_digests(agent_file)
        origin = read_origin(agent_file).edited_from
        self._feature_agents = {*self.agents, *([origin] if origin else [])}
        self.recording = Recording(data_dir, self.policy, agent_file, check_contents)
        self.wants_frame = INPUT in (layers or ())
        self.bottlenecks = find_bottlenecks(
            self.policy, None if layers is None else [name for name in layers if name != INPUT],
            allow_partial)
        self.provenance: dict[str, Any] = {
            "agent_file": agent_file.name, "agent_sha256": agent_sha256(agent_file),
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
