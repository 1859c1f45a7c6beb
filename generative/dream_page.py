"""The dream page: act in the simulator of an agent, next to the agent, see ``DreamPageOptions``.

The page opens from disk. Agent and simulator run in the browser, as programs that
``common.traced`` has traced.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.agent_file import read_origin
from agents.frames import to_frames
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.cli import count, from_zero
from common.devices import Compute
from common.errors import UserError
from common.files import sha256
from common.game_constants import ACTION_DIRECTIONS
from common.options import LogOptions, command, option
from common.results import ResultStore, Schema
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.dream_page_files import (
    COMPONENT,
    FEATURE,
    PROBE,
    READOUT,
    Axis,
    DreamPageFolder,
    write_page,
)
from generative.dream_programs import (
    check_simulator,
    dream_programs,
    round_weights,
    world_programs,
)
from generative.dream_starts import (
    PageStart,
    optimised_page_starts,
    recorded_page_starts,
    sampled_page_starts,
)
from generative.runs import open_simulator
from generative.simulated_game import MODE
from generative.simulator import Simulator
from interventions.direction_folders import feature_directions, probe_directions

NUM_COMPONENTS = 8  # principal components of the hidden state
_DREAMS, _STEPS = 12, 12  # number and length of the dreams whose states replace recorded ones
PAGE = Schema("page of generative.dream_page", "python -m generative.dream_page",
              results=DreamPageFolder.FILES, replaced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DreamPageOptions(LogOptions):
    """Write a page in which you act in the agent's simulator, or watch the agent act in it."""

    agent_file: Path = option(help="the agent")
    model_file: Path = option(help="simulator with this agent inside")
    data_dir: Path | None = option(None, "recording of the agent, from record.py, for starts with "
                                         "what followed in the game")
    num_recorded: int = option(50, "largest number of recorded starts, one per episode", type=count)
    num_sampled: int = option(50, "number of starts that the simulator's prior samples",
                              type=from_zero)
    optimised_dir: Path | None = option(None, "output folder of generative.optimise_start, for "
                                              "starts optimised for a target")
    num_optimised: int = option(20, "largest number of these starts, one per objective", type=count)
    num_steps: int = option(60, "largest number of recorded frames per start", type=count)
    features_dir: Path | None = option(None, "output folder of analysis/sparse_features.py, for "
                                             "sliders along sparse features")
    num_features: int = option(8, "number of sparse features, the strongest first", type=count)
    atlas_dir: Path | None = option(None, "output folder of analysis/probe_atlas.py, for sliders "
                                          "along the directions of linear probes")
    labels: tuple[str, ...] | None = option(
        None, "labels of the atlas whose directions are used; if not given, each kind of object "
              "ahead of the player, the velocities, and the steps to the end")
    seed: int = option(0, "seed of the random draws", type=from_zero)
    output_dir: Path = option(Path("dream_page"), "folder to write to; an earlier page there is "
                                                  "replaced")


def build_page(options: DreamPageOptions) -> Path:
    """Write the page, and return the path of its HTML file."""
    begin = time.perf_counter()
    output = DreamPageFolder(options.output_dir)
    store = ResultStore(output.path, PAGE)
    store.check_replaceable()
    simulator = open_simulator(options.model_file, options.agent_file, SimulatorConfig(),
                               Compute(torch.device("cpu"), bfloat16=False))
    check_simulator(simulator)
    round_weights(simulator)
    other = other_directions(options)
    starts, hidden = [], None
    game = read_origin(options.agent_file).env_name or ""
    if options.data_dir is not None:
        dataset = RolloutDataset(options.data_dir, simulator.config.num_init_steps, 1)
        dataset.check_agent(options.agent_file, simulator.agent.policy)
        starts = recorded_page_starts(simulator, dataset, options.num_recorded,
                                      options.num_steps, options.seed)
        game = dataset.folder.game or game
        hidden = np.concatenate([dataset.folder.array_files(start.truth.episode).hidden_states.rows(
            1, start.truth.frame + 1) for start in starts if start.truth])
    if options.optimised_dir is not None:
        starts += optimised_page_starts(simulator, options.optimised_dir, options.num_optimised,
                                        options.agent_file, options.model_file)
    starts += sampled_page_starts(simulator, options.num_sampled, options.seed)
    if not starts:
        raise UserError("the page has no starts; give --data_dir, --optimised_dir or "
                        "--num_sampled")
    if hidden is None:
        hidden = imagined_states(simulator, starts)
    names = {"agent": _name(options.agent_file), "simulator": _name(options.model_file),
             "game": game}
    with store.replace({
            "agent_sha256": agent_sha256(options.agent_file),
            "model_sha256": sha256(options.model_file), "seed": options.seed,
            "num_starts": len(starts)}) as temporary:
        write_page(DreamPageFolder(temporary), names, simulator,
                   dream_programs(simulator, starts[0].start),
                   world_programs(simulator, starts[0].start), starts,
                   first_frames(simulator, starts),
                   hidden_axes(simulator.agent.policy, hidden, other))
    size = sum(path.stat().st_size for path in output.path.rglob("*") if path.is_file())
    print(f"wrote {output.path} ({len(starts)} starts, {size / 1e6:.1f} MB) in "
          f"{time.perf_counter() - begin:.0f} s; open {output.page_file.absolute()}")
    return output.page_file


def _name(file: Path) -> str:
    return file.absolute().parent.name if file.stem == "model" else file.stem


@torch.no_grad()
def first_frames(simulator: Simulator, starts: Sequence[PageStart]) -> np.ndarray:
    """Return the first frame of each start, uint8 (N, 64, 64, 3)."""
    images: list[Tensor] = [simulator.imagine(start.start, MODE, 1)[0].images for start in starts]
    return to_frames(torch.cat(images))


@torch.no_grad()
def imagined_states(simulator: Simulator, starts: Sequence[PageStart]) -> np.ndarray:
    """Return hidden states (N, D) of dreams from some of the starts, in which the agent acts."""
    return torch.cat([step.hidden_states for start in starts[:_DREAMS]
                      for step in simulator.imagine(start.start, MODE, _STEPS)]).numpy()


def other_directions(options: DreamPageOptions) -> dict[tuple[str, str], np.ndarray]:
    """Return the directions (D,) of probes and sparse features, by kind and title.

    Raises:
        UserError: if they belong to another agent.
    """
    found = {}
    if options.atlas_dir is not None:
        found[PROBE] = probe_directions(options.atlas_dir, options.agent_file, options.labels)
    if options.features_dir is not None:
        found[FEATURE] = feature_directions(options.features_dir, options.agent_file,
                                            options.num_features)
    return {(kind, name): vector for kind, vectors in found.items()
            for name, vector in vectors.items()}


def hidden_axes(policy: Policy, hidden: np.ndarray, other: Mapping[tuple[str, str], np.ndarray]
                ) -> list[Axis]:
    """Return directions of the hidden state: those that raise the value, the logits of going right
    against left, and of going up; principal components; and other directions.

    Args:
        hidden: hidden states (N, D).
        other: directions (D,) by kind and title.
    """
    right, up = np.array(ACTION_DIRECTIONS).T
    weight = policy.fc_policy.weight.detach().numpy()
    axes = {(READOUT, "raises the value"): policy.fc_value.weight.detach().numpy()[0],
            (READOUT, "right rather than left"):
                weight[right > 0].mean(0) - weight[right < 0].mean(0),
            (READOUT, "up rather than not"): weight[up > 0].mean(0) - weight[up <= 0].mean(0)}
    centred = hidden - hidden.mean(axis=0)
    _, sizes, components = np.linalg.svd(centred, full_matrices=False)
    shares = sizes ** 2 / max((sizes ** 2).sum(), 1e-12)  # equal states have no variance
    for i in range(min(NUM_COMPONENTS, len(components))):
        axes[COMPONENT, f"PC {i + 1} ({100 * shares[i]:.0f} % of variance)"] = components[i]
    found = []
    for (kind, name), vector in {**axes, **other}.items():
        vector = vector / np.linalg.norm(vector)
        along = hidden @ vector
        found.append(Axis(kind, name, vector, float(along.mean()), float(along.std())))
    return found


main = command(DreamPageOptions, build_page)

if __name__ == "__main__":
    raise SystemExit(main())
