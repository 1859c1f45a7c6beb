"""Write causal stories: for each behaviour, a page with its samples and with the influences on
components and on the agent's outputs for which gradients and correlations agree."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from analysis.behaviour_pages import PAGE_FILES, BehaviourPages
from analysis.influences.comparison import COMPARISON_FILES
from analysis.influences.gradients import Inputs
from analysis.parameters import add_story_flags
from common.cli import Parser, count, seed
from common.errors import UserError, script_main
from common.results import ResultStore
from generative.config import SaliencyConfig
from generative.sample_files import SampleFolder
from interventions.config import DirectionFilesConfig
from interventions.flags import directions_folder


def named(text: str) -> tuple[int, str]:
    """argparse type: the number and name of a behaviour, such as ``3=jumps``."""
    match = re.fullmatch(r"\s*(\d+)\s*=\s*(\S.*?)\s*", text, re.DOTALL)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must be a number and a name, such as 3=jumps, not {text}")
    return int(match[1]), match[2]


def _once(named: list[tuple[int, str]]) -> dict[int, str]:
    """Return the names by behaviour number; raise if a number occurs twice."""
    names = dict(named)
    if len(names) < len(named):
        raise UserError("--behaviour_names gives two names to one behaviour")
    return names


def parser() -> Parser:
    flags = Parser(__doc__)
    add_story_flags(flags)
    flags.add_argument("--comparison_dir", type=Path, help="folder of the tables and matrices of "
                       "dynamics_grads_consistency_plots.py; <save_dir>/dyn_grad_comparison_data "
                       "if not given")
    flags.add_argument("--comparison_plots_dir", type=Path, help="folder of the figures of that "
                       "script, which pages link to; <save_dir>/dyn_grad_comparison_plots if not "
                       "given")
    flags.add_argument("--output_dir", type=Path,
                       help="folder for the pages; <save_dir>/causal_stories if not given")
    flags.add_argument("--num_films", type=count, default=5,
                       help="number of samples shown per behaviour")
    flags.add_argument("--behaviour_names", type=named, nargs="+", default=[],
                       metavar="NUMBER=NAME", help="names of behaviours to show on the pages")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of the choice of samples that are shown")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    names = _once(args.behaviour_names)
    folders = parameters.folders
    output = args.output_dir or folders.stories
    store = ResultStore(output, PAGE_FILES)
    store.check_replaceable()
    comparison = ResultStore(args.comparison_dir or folders.comparison, COMPARISON_FILES)
    settings = comparison.settings()
    numbers = comparison.read("sample_ids").tolist()
    samples = SampleFolder(args.samples_dir or Path(settings["samples_dir"]))
    inputs = Inputs.read(samples, numbers, directions_folder(args, parameters),
                         parameters.get(DirectionFilesConfig).num_episodes, None)
    if inputs.matrices != settings["matrices_sha256"]:
        raise UserError(f"the comparison in {comparison.path} was made with other directions than "
                        "those in --precomp_dir")
    share = parameters.get(SaliencyConfig).extrema_threshold
    pages = BehaviourPages(comparison, samples.stacked(numbers), inputs.coordinates.ics,
                       share, args.num_films, names,
                       args.comparison_plots_dir or folders.comparison_plots, args.seed)
    with store.replace({
            "comparison": settings, "num_films": args.num_films, "extrema_threshold": share,
            "behaviour_names": {str(key): name for key, name in names.items()},
            "seed": args.seed}) as temporary:
        written = pages.write(temporary, output)
    print(f"wrote {len(written)} pages to {output}; begin with {output / written[-1].name}")


if __name__ == "__main__":
    raise SystemExit(main())
