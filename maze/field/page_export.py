"""The page of mazes on disk: the format of its data, and their writer.

Layout::

    index.html, maze.js, maze.css       the page, as `make web` built it
    settings.json                       what made the folder (common/output_folder.py)
    data/manifest.js                    names of agents, their layers, modes, levels
    data/stamps_easy.js                 the stamps of a mode, arrays as in ``Stamps``
    data/agent_00.js                    weights of an agent, by their names in its file

Files of data are scripts (see ``common/page_files.py``). The content of ``manifest`` is plain, that
of the others is arrays; weights are float32 in their own layouts. Agents are numbered from 0.

``web/maze/lib/data.js`` is the reader; ``web/maze/lib/network.js`` computes what
``agents/networks.py`` does, and is compared with it by a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import weights_sha256
from agents.layers import all_layers
from agents.networks import ImpalaEmbedder, Policy
from common.errors import UserError
from common.game_constants import ACTION_LABELS
from common.page_files import PageFolder, data_script, encoded
from maze.field.stamps import Stamps
from maze.level.state import WORLD_DIMS, MazeState

FORMAT = 2  # that web/maze/lib/data.js reads


class MazePageFolder(PageFolder):
    """Names in one folder."""

    PAGE = "maze"

    def stamps_file(self, distribution_mode: str) -> Path:
        return self.data_file(f"stamps_{distribution_mode}")

    def agent_file(self, number: int) -> Path:
        return self.data_file(f"agent_{number:02d}")


@dataclasses.dataclass(frozen=True)
class PageAgent:
    """An agent on the page.

    Attributes:
        name: for people; each has another.
        file: its name on disk.
        policy: a feed-forward IMPALA, see :func:`check_agent`.
    """

    name: str
    file: str
    policy: Policy


@dataclasses.dataclass(frozen=True)
class PageLevel:
    """A level that the page offers, under a name."""

    name: str
    state: MazeState


def check_agent(policy: Policy, path: Path) -> None:
    """See that the page can run an agent.

    Raises:
        UserError: if it has a memory, edits, or another network than IMPALA.
    """
    if policy.edits:
        raise UserError(f"the agent in {path} is an edited one, and the page runs its weights "
                        "alone; python -m maze.fields shows it")
    if policy.recurrent:
        raise UserError(f"the agent in {path} remembers (it has a GRU), and the page shows agents "
                        "without memory, for which a square says all; python -m maze.fields shows "
                        "this one")
    if not isinstance(policy.embedder, ImpalaEmbedder):
        raise UserError(f"the agent in {path} is no IMPALA network, and the page runs these "
                        "alone; python -m maze.fields shows this one")


def check_level(state: MazeState, name: str) -> None:
    """See that the page can draw a level.

    Raises:
        UserError: if it has a background, or its view moves with the mouse.
    """
    if state.use_backgrounds:
        raise UserError(f"level {name} has a background picture, and the page puts frames together "
                        "from stamps, on black; python -m maze.fields shows this one")
    if state.distribution_mode not in ("easy", "hard"):
        raise UserError(f"level {name} is one of {state.distribution_mode} mode, whose view moves "
                        "with the mouse, so the page cannot draw it; it takes easy and hard levels")


def write_page(path: Path, agents: Sequence[PageAgent], levels: Sequence[PageLevel],
               modes: Sequence[str]) -> None:
    """Write the page and its data into a folder that is there.

    Args:
        agents, levels: that were checked.
        modes: of the mazes that can be drawn, those of the levels among them; the first one is
            shown at the start.
    """
    folder = MazePageFolder(path)
    folder.copy_page()

    def write(file: Path, content: dict) -> None:
        file.write_bytes(data_script(file, content))

    write(folder.data_file("manifest"), {
        "format": FORMAT, "actions": ACTION_LABELS,
        "agents": [{
            "name": agent.name, "file": agent.file, "sha256": weights_sha256(agent.policy),
            "layers": [dataclasses.asdict(layer) for layer in all_layers(agent.policy)]}
            for agent in agents],
        "modes": [{"name": mode, "world_dim": WORLD_DIMS[mode]} for mode in modes],
        "levels": [{
            "name": level.name, "mode": level.state.distribution_mode,
            "maze_dim": level.state.grid.maze_dim, "facing": level.state.grid.facing,
            "rows": level.state.grid.to_rows()} for level in levels]})
    for mode in modes:
        write(folder.stamps_file(mode), encoded(**dataclasses.asdict(Stamps.of(mode))))
    for number, agent in enumerate(agents):
        write(folder.agent_file(number), encoded(**{
            name: tensor.detach().cpu().float().numpy()
            for name, tensor in agent.policy.state_dict().items()}))
