"""Write the page of mazes: a folder with a page on which one edits a maze and sees how agents act
in it, with and without patches. It opens from disk; the networks run in the browser."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from common.cli import Parser
from common.errors import UserError, script_main
from common.output_folder import Output
from maze.field.page_export import (
    MazePageFolder,
    PageAgent,
    PageLevel,
    check_agent,
    check_level,
    write_page,
)
from maze.level.search import chosen_levels
from maze.level.state import WORLD_DIMS, MazeState

OUTPUT = Output("page of maze/page.py", MazePageFolder.PATTERNS)


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, nargs="+", required=True, metavar="FILE",
                       help="agents that the page lets one choose from; without memory, IMPALA")
    flags.add_argument("--name", nargs="+", metavar="NAME",
                       help="names of the agents; by default those of their files, or of their "
                            "folders where the file is called model.pth")
    flags.add_argument("--distribution_mode", nargs="+", default=["easy", "hard"],
                       choices=tuple(WORLD_DIMS), help="of the mazes on the page")
    flags.add_argument("--levels", nargs="+", default=["0-99"], metavar="LEVELS",
                       help="level files, folders of them, and level seeds such as 0-99,795, which "
                            "the page offers to begin with")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/maze/page"),
                       help="folder to write to; an earlier page there is replaced")
    flags.add_argument("--dry_run", action="store_true", help="print the levels and stop")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    begin = time.perf_counter()
    output = MazePageFolder(args.output_dir)
    OUTPUT.check(output.path)
    agents = agents_of(args.agent_file, args.name)
    levels = levels_of(args.levels, args.distribution_mode)
    if args.dry_run:
        print("\n".join(f"{level.state.distribution_mode} {level.name}" for level in levels))
        return
    modes = dict.fromkeys([*args.distribution_mode,
                           *(level.state.distribution_mode for level in levels)])
    with OUTPUT.replaced(output.path, {
            "agents": {agent.name: agent_sha256(path)
                       for agent, path in zip(agents, args.agent_file, strict=True)},
            "levels": args.levels, "modes": list(modes)}) as temporary:
        write_page(temporary, agents, levels, list(modes))
    size = sum(path.stat().st_size for path in output.path.rglob("*") if path.is_file())
    print(f"wrote {output.path} ({size / 1e6:.1f} MB) in {time.perf_counter() - begin:.0f} s; open "
          f"{output.page_file.absolute()}")


def agents_of(paths: Sequence[Path], names: Sequence[str] | None) -> list[PageAgent]:
    """The agents, with the names that were given, or those of their files.

    Raises:
        UserError: if the page cannot run one, or two have the same name.
    """
    if names is None:
        names = [path.absolute().parent.name if path.stem == "model" else path.stem
                 for path in paths]
    if len(names) != len(paths):
        raise UserError(f"--name has {len(names)} names, but --agent_file {len(paths)} files")
    again = [name for name, times in Counter(names).items() if times > 1]
    if again:
        raise UserError(f"two agents are called '{again[0]}'; give each another --name")
    agents = []
    for path, name in zip(paths, names):
        policy = load_agent(path)
        check_agent(policy, path)
        agents.append(PageAgent(name, path.name, policy))
    return agents


def levels_of(sources: Sequence[str], modes: Sequence[str]) -> list[PageLevel]:
    """The levels of seeds, in each mode, and of level files, by their seeds.

    Raises:
        UserError: if the page cannot draw one, or a source holds none.
    """
    states: list[MazeState] = []
    for mode in dict.fromkeys(modes):
        # A level file has a mode of its own, and comes once.
        states += chosen_levels([source for source in sources if mode == modes[0]
                                 or not Path(source).exists()], mode)
    levels: list[PageLevel] = []
    times: Counter = Counter()
    for state in states:
        key = state.distribution_mode, state.level_seed
        times[key] += 1
        name = f"{state.level_seed}" + (f"_{times[key]}" if times[key] > 1 else "")
        check_level(state, name)
        levels.append(PageLevel(name, state))
    return levels


if __name__ == "__main__":
    raise SystemExit(main())
