"""Run the whole experiment, from training to a page that ties it together. What is done and still
valid is skipped, what was interrupted goes on, and what has changed is made again."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.cli import Parser
from common.config import yaml_given
from common.errors import UserError, nearest, script_main
from pipeline.presets import load_preset, read_hyperparams
from pipeline.records import Experiment
from pipeline.report import write_report
from pipeline.runner import Pipeline
from pipeline.sections import page_of
from pipeline.stage import PathResolver
from pipeline.stages import all_stages
from pipeline.summary import print_plan, print_table

FORBIDDEN = set("/\\\0")


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--preset", required=True,
                       help="one of hyperparams/pipeline.yml (demo, full, tiny, maze), or "
                            "section:NAME for the shipped agent in the sizes of a parameter set "
                            "of hyperparams/interpreting_configs.yml")
    flags.add_argument("--output_dir", type=Path,
                       help="folder to write to; <preset>_output if not given")
    flags.add_argument("--exp_name", help="name of the experiment; the preset's if not given")
    flags.add_argument("--agent_file", type=Path,
                       help="analyse this agent instead of the preset's and train none")
    flags.add_argument("--model_file", type=Path,
                       help="use this simulator instead of the preset's and train none")
    which = flags.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", metavar="STAGE",
                       help="begin with this stage, whatever has become of those before")
    which.add_argument("--only", nargs="+", metavar="STAGE", help="run only these stages")
    which.add_argument("--accept", nargs="+", metavar="STAGE",
                       help="run nothing, and record that these stages are valid as they are, "
                            "after a change that does not matter to them")
    flags.add_argument("--force", action="store_true",
                       help="run the chosen stages again, whatever their records say")
    flags.add_argument("--dry_run", action="store_true",
                       help="say what would be run and why, and run nothing")
    flags.add_argument("--check_contents", action="store_true",
                       help="read every file again; else one whose size and time of change are "
                            "as they were counts as unchanged")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    if args.accept and (args.force or args.dry_run):
        flags.error("--accept runs nothing; give it without --force and --dry_run")
    hyperparams = read_hyperparams()
    with yaml_given(hyperparams):
        return run(args, hyperparams)


def run(args: argparse.Namespace, hyperparams: dict[Path, dict]) -> int:
    """Run the chosen stages with these contents of the parameter files; returns the status."""
    preset = load_preset(args.preset, args.agent_file, args.model_file)
    plain = args.preset.replace(":", "_")
    name = args.exp_name or plain
    if FORBIDDEN & set(name) or name.startswith("."):
        raise UserError(f"--exp_name is in the names of folders; choose another than '{name}'")
    output = args.output_dir or Path(f"{plain}_output")
    stages = all_stages(preset, name)
    experiment = Experiment(output)
    experiment.check(args.preset)
    pipeline = Pipeline(experiment, stages, PathResolver(output, preset),
                        chosen([stage.name for stage in stages], args.first,
                               args.accept or args.only),
                        hyperparams, args.force, args.check_contents)
    if args.dry_run:
        print_plan(pipeline)
        return 0
    with experiment.opened({"preset": args.preset, "name": name}):
        if args.accept:
            for sentence in pipeline.accept():
                print(sentence)
            return 0
        outcomes = list(pipeline.run())
        page = write_report(experiment, stages, page_of(preset))
    print_table(outcomes)
    print(f"\nopen {page.absolute()}")
    return outcomes[-1].status


def chosen(names: list[str], first: str | None, only: list[str] | None) -> set[str]:
    """The stages that were asked for.

    Raises:
        UserError: if there is no such stage, naming the nearest.
    """
    for name in [first] if first else only or []:
        if name not in names:
            raise UserError(f"there is no stage '{name}'{nearest(name, names)}")
    return set(only or names[names.index(first) if first else 0:])


if __name__ == "__main__":
    raise SystemExit(main())
