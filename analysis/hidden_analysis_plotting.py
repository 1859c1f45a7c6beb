"""Draw what hidden_analysis_precompute.py has found in the agent's hidden states."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from analysis.hidden_figures import Figures
from analysis.hidden_files import HiddenStatesFolder
from analysis.hidden_states import recorded_steps
from common.cli import Parser, count, seed
from common.errors import UserError, script_main
from common.files import atomic_folder, save_json, versions
from common.rollout_files import RolloutFolder
from generative.cli import add_hidden_analysis_flags, parse

SETTINGS_NAME = "settings.json"


def parser() -> Parser:
    flags = Parser(__doc__)
    add_hidden_analysis_flags(flags)
    flags.add_argument("--num_epi_paths", type=count,
                       help="episodes whose paths are drawn; the parameter set's if not given")
    flags.add_argument("--output_dir", type=Path,
                       help="folder to write to; <save_dir>/hx_plots if not given")
    flags.add_argument("--seed", type=seed, default=0,
                       help="of the episodes whose paths are drawn and of what is drawn on top")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, config = parse(parser(), argv)
    agent_h = config.analysis.agent_h
    save_dir = Path(config.analysis.save_dir)
    output = args.output_dir or save_dir / "hx_plots"
    if output.exists() and any(output.iterdir()) and not (output / SETTINGS_NAME).exists():
        raise UserError(f"{output} holds other data; choose another --output_dir")
    if agent_h.num_epi_paths > agent_h.num_episodes:
        raise UserError(f"num_epi_paths is {agent_h.num_epi_paths}, more than the "
                        f"{agent_h.num_episodes} episodes")

    num_samples = None if args.no_generated_samples else agent_h.num_generated_samples
    folder = HiddenStatesFolder(args.precomp_dir or save_dir / "hx_analysis_precomp",
                                agent_h.num_episodes, num_samples)
    figures = Figures(folder, recorded_steps(RolloutFolder(Path(config.data_dir)),
                                             agent_h.num_episodes), args.seed)
    begin = time.perf_counter()
    with atomic_folder(output) as temporary:
        names = figures.draw(temporary, agent_h.num_epi_paths)
        save_json(temporary / SETTINGS_NAME, {
            "precomp_dir": str(folder.path), "num_episodes": agent_h.num_episodes,
            "num_generated_samples": num_samples, "num_epi_paths": agent_h.num_epi_paths,
            "data_dir": config.data_dir, "seed": args.seed, "precomputed": folder.settings(),
            "versions": versions()})
        shutil.rmtree(output, ignore_errors=True)  # an earlier drawing
    print(f"wrote {len(names)} figures to {output} in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
