"""Files of the maze page: data format and writer.

Layout::

    index.html, maze.js, maze.css       the page, as `make web` built it
    settings.json                       settings that the folder was written with
    data/manifest.js                    plain JSON, see below
    data/stamps_easy.js                 stamps of a distribution mode, arrays as in ``Stamps``
    data/agent_00.js                    weights of an agent by their names in its file, float32 in
                                        PyTorch's layouts

Data files are scripts (see ``common/page_files.py``). Agents are numbered from 0. ``manifest``
contains

- ``format``: version of the data format;
- ``actions``: names of the actions;
- ``agents``: name, file, checksum, cheese region and layers (see ``agents.layers.Layer``) of each;
- ``modes``: name and ``world_dim`` of each;
- ``levels``: name, mode, ``maze_dim``, facing and rows of text of each;
- ``start``: level, mode and patches that the page shows first.

``web/maze/lib/data.js`` reads these files; ``web/maze/lib/network.js`` reimplements
``agents/networks.py``, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import read_origin, weights_sha256
from agents.layers import all_layers
from agents.networks import ImpalaEmbedder, Policy
from common.errors import UserError
from common.page_files import PageFolder, data_script, encoded
from envs.maze.state import WORLD_DIMS, MazeState
from envs.objects import action_labels
from maze.field.stamps import Stamps

FORMAT = 3  # version that web/maze/lib/data.js reads


class MazePageFolder(PageFolder):
    """Folder of a maze page."""

    PAGE = "maze"


@dataclasses.dataclass(frozen=True)
class Start:
    """First view of the page.

    Attributes:
        name, mode: name and distribution mode of the level.
        before, after: exact probability of reaching the cheese without and with the patches; NaN
            without patches.
    """

    name: str
    mode: str
    patches: tuple[str, ...] = ()
    before: float = math.nan
    after: float = math.nan


def check_agent(policy: Policy, path: Path) -> None:
    """Check that the page can run an agent.

    Raises:
        UserError: if the agent has a memory or edits, or its network is not IMPALA.
    """
    if policy.edits:
        raise UserError(f"the agent in {path} has edits, which the page cannot apply; "
                        "python -m maze.fields can")
    if policy.recurrent:
        raise UserError(f"the agent in {path} has a GRU, so its action does not depend on the "
                        "frame alone, as the page assumes; use python -m maze.fields")
    if not isinstance(policy.embedder, ImpalaEmbedder):
        raise UserError(f"the agent in {path} is not an IMPALA network, which the page requires; "
                        "use python -m maze.fields")


def write_page(folder: MazePageFolder, agents: dict[str, Policy], files: Sequence[Path],
               levels: Sequence[tuple[str, MazeState]], modes: Sequence[str], start: Start) -> None:
    """Write the page and its data into an existing folder.

    Args:
        agents: feed-forward IMPALA networks by name, see :func:`check_agent`.
        files: agent files, in the order of ``agents``.
        levels: levels with their names, as (name, level).
        modes: distribution modes that the page offers, including the modes of ``levels``.
        start: first view.
    """
    folder.copy_page()

    def write(name: str, content: dict) -> None:
        path = folder.data_file(name)
        path.write_bytes(data_script(path, content))

    write("manifest", {
        "format": FORMAT, "actions": action_labels("maze"),
        "agents": [{
            "name": name, "file": path.name, "sha256": weights_sha256(policy),
            "region": read_origin(path).cheese_region or 0,
            "layers": [dataclasses.asdict(layer) for layer in all_layers(policy)]}
            for (name, policy), path in zip(agents.items(), files, strict=True)],
        "modes": [{"name": mode, "world_dim": WORLD_DIMS[mode]} for mode in modes],
        "levels": [{
            "name": name, "mode": state.distribution_mode, "maze_dim": state.grid.maze_dim,
            "facing": state.grid.facing, "rows": state.grid.to_rows()}
            for name, state in levels],
        "start": {"level": start.name, "mode": start.mode, "patches": start.patches}})
    for mode in modes:
        write(f"stamps_{mode}", encoded(**dataclasses.asdict(Stamps.of(mode))))
    for number, policy in enumerate(agents.values()):
        write(f"agent_{number:02d}", encoded(**{
            name: tensor.detach().cpu().float().numpy()
            for name, tensor in policy.state_dict().items()}))
