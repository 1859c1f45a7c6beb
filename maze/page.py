"""The maze page: edit mazes, patch agents, and watch them walk with and without the patches.

The page opens from disk; the networks run in the browser. The first level that it shows is the one
of up to 20 forks on which subtracting the cheese vector changes the first agent's probability of
reaching the cheese most.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import load_agent
from agents.hooks import patched
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.devices import resolve_compute
from common.errors import UserError
from common.options import Options, command, option
from common.results import ResultStore, Schema
from envs.maze.grid import FORK, kind_of
from envs.maze.levels import chosen_levels
from envs.maze.state import WORLD_DIMS, MazeState
from interventions.patches import Add
from maze.field.fields import vector_field
from maze.field.outcomes import Chain
from maze.field.page_export import MazePageFolder, Start, check_agent, write_page
from maze.studies.vectors import CHEESE, LAYER, level_vectors

MAX_CANDIDATES = 20  # forks on which the effect of the cheese vector is computed
PAGE = Schema("page of maze/page.py", "maze/page.py", results=MazePageFolder.FILES, replaced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageOptions(Options):
    """Write the maze page: edit mazes, patch agents, and watch them walk with and without the
    patches."""

    agent_file: tuple[Path, ...] = option(
        help="agents to choose from on the page: IMPALA networks without memory", metavar="FILE")
    name: tuple[str, ...] | None = option(
        None, "names of the agents; by default the names of their files, or of their folders for "
              "files called model.pth", metavar="NAME")
    distribution_mode: tuple[str, ...] = option(
        ("easy", "hard"), "distribution modes of the mazes on the page",
        choices=tuple(WORLD_DIMS))
    levels: tuple[str, ...] = option(
        ("0-99",), "levels to choose from on the page: level files, folders of level files, and "
                   "level seeds such as 0-99,795", metavar="LEVELS")
    output_dir: Path = option(Path("analysis/maze/page"),
                              "folder to write to; an earlier page there is replaced")
    dry_run: bool = option(False, "print the levels and exit")


def build_page(options: PageOptions) -> Path | None:
    """Write the page, and return the path of its HTML file; None for a dry run."""
    begin = time.perf_counter()
    output = MazePageFolder(options.output_dir)
    store = ResultStore(output.path, PAGE)
    store.check_replaceable()
    agents = load_agents(options.agent_file, options.name)
    levels = load_levels(options.levels, options.distribution_mode)
    if options.dry_run:
        print("\n".join(f"{state.distribution_mode} {name}" for name, state in levels))
        return None
    modes = dict.fromkeys([*options.distribution_mode,
                           *(state.distribution_mode for _, state in levels)])
    start = choose_start(next(iter(agents.values())), levels)
    with store.replace({
            "agents": {name: agent_sha256(path)
                       for name, path in zip(agents, options.agent_file, strict=True)},
            "levels": options.levels, "modes": list(modes)}) as temporary:
        write_page(MazePageFolder(temporary), agents, options.agent_file, levels, list(modes),
                   start)
    size = sum(path.stat().st_size for path in output.path.rglob("*") if path.is_file())
    if start.patches:
        print(f"the page opens on level {start.name}, where the patch {start.patches[0]} changes "
              f"P(cheese) from {start.before:.3f} to {start.after:.3f}")
    print(f"wrote {output.path} ({size / 1e6:.1f} MB) in {time.perf_counter() - begin:.0f} s; open "
          f"{output.page_file.absolute()}")
    return output.page_file


def load_agents(paths: Sequence[Path], names: Sequence[str] | None) -> dict[str, Policy]:
    """Load the agents of the page; return them by name.

    Args:
        names: names of the agents; None for the names of their files, or of their folders for files
            called model.pth.

    Raises:
        UserError: if the page cannot run an agent, two agents have the same name, or there are not
            as many names as files.
    """
    if names is None:
        names = [path.absolute().parent.name if path.stem == "model" else path.stem
                 for path in paths]
    if len(names) != len(paths):
        raise UserError(f"--name has {len(names)} names, but --agent_file {len(paths)} files")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise UserError(f"two agents are called '{twice[0]}'; give each another --name")
    agents = {}
    for path, name in zip(paths, names):
        agents[name] = load_agent(path)
        check_agent(agents[name], path)
    return agents


def choose_start(policy: Policy, levels: Sequence[tuple[str, MazeState]]) -> Start:
    """Choose the level that the page opens on, and the patch that it opens with.

    Candidates are the first ``MAX_CANDIDATES`` forks in the first level's mode. The choice is the
    fork with the largest change of the exact probability of reaching the cheese when the fork's own
    cheese vector is subtracted. Without forks, the page opens on the first level, without a patch.

    Args:
        policy: the first agent of the page.
        levels: names and levels.
    """
    first_name, first = levels[0]
    candidates = [(name, state) for name, state in levels
                  if state.distribution_mode == first.distribution_mode
                  and kind_of(state.grid) == FORK][:MAX_CANDIDATES]
    compute = resolve_compute("cpu", precision="float32")

    def p_cheese(state: MazeState) -> float:
        fields = [vector_field(policy, compute, state, facing=facing) for facing in (0, 1)]
        return float(Chain.of(fields).reaching([state.grid.cheese])[0])

    starts = []
    for name, state in candidates:
        [vector] = level_vectors(policy, [LAYER], CHEESE, [state])[LAYER]
        with patched(policy, [Add(LAYER, vector, CHEESE.coefficient)]):
            after = p_cheese(state)
        patch = f"add@{LAYER}={CHEESE.name},coefficient={CHEESE.coefficient:g}"
        starts.append(Start(name, state.distribution_mode, (patch,), p_cheese(state), after))
    return max(starts, key=lambda start: abs(start.after - start.before),
               default=Start(first_name, first.distribution_mode))


def load_levels(sources: Sequence[str], modes: Sequence[str]) -> list[tuple[str, MazeState]]:
    """Load levels given by seeds, in each mode, and by level files; return pairs of name and level.

    The name is the level seed, followed by ``_2``, ``_3`` and so on for further levels of the same
    mode with the same seed.

    Args:
        sources: level files, folders of level files, and level seeds such as 0-99,795.
        modes: distribution modes of the levels given by seed.

    Raises:
        UserError: if the page cannot draw a level, or a source contains no level.
    """
    states: list[MazeState] = []
    for mode in dict.fromkeys(modes):
        # A level file has its own mode and is loaded once.
        states += chosen_levels([source for source in sources if mode == modes[0]
                                 or not Path(source).exists()], mode)
    levels, times = [], Counter[tuple[str, int]]()
    for state in states:
        key = state.distribution_mode, state.level_seed
        times[key] += 1
        name = f"{state.level_seed}" + (f"_{times[key]}" if times[key] > 1 else "")
        if state.use_backgrounds:
            raise UserError(f"level {name} has a background image, which the page cannot draw; "
                            "python -m maze.fields can")
        if state.distribution_mode not in ("easy", "hard"):
            raise UserError(f"level {name} has {state.distribution_mode} mode, whose view moves "
                            "with the mouse; the page takes easy and hard levels")
        levels.append((name, state))
    return levels


main = command(PageOptions, build_page)

if __name__ == "__main__":
    raise SystemExit(main())
