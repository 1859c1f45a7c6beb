"""Run the whole experiment, from training to a page with all results. Stages that are up to date
are skipped, interrupted stages are resumed, and stages whose code, parameters or inputs have
changed run again. With --submit, the stages run as cluster jobs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.cli import Parser, count
from common.config import yaml_given
from common.errors import UserError, nearest, script_main
from common.shards import shard
from pipeline.cluster import CLUSTER_FILE, SCHEDULERS, TIME_IS_UP, load_cluster
from pipeline.presets import load_preset, read_hyperparams
from pipeline.process import torchrun_arguments
from pipeline.records import Experiment, Part
from pipeline.report import print_plan, print_table, write_report
from pipeline.runner import Pipeline
from pipeline.stage import ROOT, PathResolver
from pipeline.stage_files import all_stages, page_of
from pipeline.submission import Submitter, print_status

FORBIDDEN = set("/\\\0")


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--preset", required=True,
                       help="preset in hyperparams/pipeline.yml, such as demo, full, maze or "
                            "attribution, or section:NAME for the shipped agent with the sizes of "
                            "a parameter set in hyperparams/interpreting_configs.yml")
    flags.add_argument("--output_dir", type=Path,
                       help="output folder; <preset>_output if not given")
    flags.add_argument("--exp_name", help="name of the experiment; the preset's name if not given")
    flags.add_argument("--agent_file", type=Path,
                       help="analyse this agent instead of the preset's, without training one")
    flags.add_argument("--model_file", type=Path,
                       help="use this simulator instead of the preset's, without training one")
    which = flags.add_mutually_exclusive_group()
    which.add_argument("--from", dest="first", metavar="STAGE",
                       help="start at this stage, regardless of the state of earlier stages")
    which.add_argument("--only", nargs="+", metavar="STAGE", help="run only these stages")
    which.add_argument("--accept", nargs="+", metavar="STAGE",
                       help="run nothing, and mark the results of these stages as valid, after a "
                            "change that does not affect them")
    flags.add_argument("--force", action="store_true",
                       help="run the selected stages again, regardless of their records")
    flags.add_argument("--dry_run", action="store_true",
                       help="print which stages would run and why, and run nothing")
    flags.add_argument("--check_contents", action="store_true",
                       help="read every file again; otherwise a file of the same size and "
                            "modification time counts as unchanged")
    flags.add_argument("--report", action="store_true",
                       help="run nothing, and write the page of results from finished stages")
    cluster = flags.add_argument_group("on a cluster")
    cluster.add_argument("--submit", choices=sorted(SCHEDULERS),
                         help="submit the stages that are neither done nor submitted, one job per "
                              "stage; with --dry_run print the commands")
    cluster.add_argument("--status", action="store_true",
                         help="print the status of the stages and their jobs, and run nothing")
    cluster.add_argument("--cluster_file", type=Path, default=CLUSTER_FILE,
                         help="YAML file of the jobs' resource requests: time, memory, cores, GPUs")
    job = flags.add_argument_group("flags of the jobs that --submit creates")
    job.add_argument("--in_job", choices=sorted(SCHEDULERS),
                     help="run the stage of --only as a job of this scheduler, concurrently "
                          "with jobs of other stages, and write no page")
    job.add_argument("--shard", type=shard, metavar="I/N",
                     help="compute the I-th of the N shards of the stage")
    job.add_argument("--join", type=count, metavar="N", help="join the N shards of the stage")
    job.add_argument("--processes", type=count, default=1,
                     help="number of local processes that torchrun starts for the stage")
    job.add_argument("--seconds_to_stop", type=count, default=600,
                     help="seconds between a stop signal and the kill signal of torchrun")
    job.add_argument("--max_sittings", type=count, default=1,
                     help="maximum number of times that the job is started, if it runs out of "
                          "time")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    if args.accept and (args.force or args.dry_run):
        flags.error("--accept runs nothing; give it without --force and --dry_run")
    if args.submit and (args.accept or args.force):
        flags.error("--submit resumes existing work; give it without --accept and --force")
    if (args.in_job or args.shard or args.join) and not (
            args.in_job and args.only and len(args.only) == 1):
        flags.error("a job runs one stage; give --in_job, and --only with one stage")
    hyperparams = read_hyperparams()
    with yaml_given(hyperparams):
        return run(args, hyperparams)


def run(args: argparse.Namespace, hyperparams: dict[Path, dict]) -> int:
    """Run, submit or report stages as the flags specify, and return the exit status.

    Args:
        args: parsed flags.
        hyperparams: contents of the parameter files, by path.
    """
    preset = load_preset(args.preset, args.agent_file, args.model_file)
    plain = args.preset.replace(":", "_")
    name = args.exp_name or plain
    if FORBIDDEN & set(name) or name.startswith("."):
        raise UserError(f"--exp_name is part of folder names and cannot be '{name}'")
    output = args.output_dir or Path(f"{plain}_output")
    stages = all_stages(preset, name)
    experiment = Experiment(output)
    experiment.check(args.preset)
    part = Part(args.only[0], args.shard.parts if args.shard else args.join or 0,
                args.shard.part if args.shard else 0) if args.in_job else None
    pipeline = Pipeline(experiment, stages, PathResolver(output, preset.given_files),
                        chosen([stage.name for stage in stages], args.first,
                               args.accept or args.only),
                        hyperparams, args.force, args.check_contents, part)
    if args.status:
        print_status(experiment, stages, pipeline.sources)
        return 0
    description = {"preset": args.preset, "name": name}
    if args.submit:
        return submit(args, pipeline, description)
    if args.dry_run:
        print_plan(pipeline)
        return 0
    if (part is not None or args.report) and not experiment.description():
        raise UserError(f"nothing has been run in {output} yet")
    if part is not None:
        return run_job(args, pipeline, part)
    if args.report:
        with experiment.opened_by_job("report"):
            print(f"open {write_report(experiment, stages, page_of(preset)).absolute()}")
        return 0
    with experiment.opened(description):
        if args.accept:
            print(*pipeline.accept(), sep="\n")
            return 0
        outcomes = list(pipeline.run())
        page = write_report(experiment, stages, page_of(preset))
    print_table(experiment, outcomes)
    print(f"\nopen {page.absolute()}")
    *_, (_, _, status) = outcomes
    return status


def submit(args: argparse.Namespace, pipeline: Pipeline, description: dict) -> int:
    """Submit the stages that are neither done nor submitted, and return the exit status.

    With --dry_run, only the commands are printed.

    Args:
        args: parsed flags.
        pipeline: the stages.
        description: settings of the experiment, which are stored in its folder.
    """
    experiment = pipeline.experiment
    command = [sys.executable, str(ROOT / "run_pipeline.py"), "--preset", args.preset,
               "--output_dir", str(experiment.path), "--exp_name", description["name"]]
    for flag, file in (("--agent_file", args.agent_file), ("--model_file", args.model_file)):
        command += [] if file is None else [flag, str(file)]
    submitter = Submitter(pipeline, command, args.submit, description["name"],
                          load_cluster(args.cluster_file, pipeline.stages))
    if args.dry_run:
        submitter.submit(submitter.plan(), dry_run=True)
        return 0
    SCHEDULERS[args.submit].check()
    with experiment.opened_by_job("submit"):
        experiment.describe(description)
        plans = submitter.plan()
        pipeline.digests.save()
        submitter.submit(plans)
    return 0


def run_job(args: argparse.Namespace, pipeline: Pipeline, part: Part) -> int:
    """Run the part of a stage that this cluster job computes, and return the exit status.

    The job is requeued if its time is up before the part is done, until it has been started
    --max_sittings times.
    """
    experiment, scheduler = pipeline.experiment, SCHEDULERS[args.in_job]
    job = scheduler.own_job()
    with experiment.opened_by_job(part.name):
        status = pipeline.run_part(job, torchrun_arguments(
            args.processes, args.seconds_to_stop) if args.processes > 1 else None)
        attempt = experiment.attempt(part)
    if status > 128 and TIME_IS_UP in pipeline.received and attempt is not None:
        if attempt.number < args.max_sittings:
            print(f"the time of job {job} is up; it is continued when {scheduler.name} starts it "
                  "again", flush=True)
            return scheduler.requeue_job(job)
        print(f"the time of job {job} is up after {attempt.number} attempts; submit it again to "
              "continue", file=sys.stderr)
    return status


def chosen(names: list[str], first: str | None, only: list[str] | None) -> set[str]:
    """Return the names of the stages that the flags select.

    Args:
        names: names of all stages, in order.
        first: value of --from; None if not given.
        only: value of --only or --accept; None if not given.

    Raises:
        UserError: if there is no such stage; the message names the nearest one.
    """
    for name in [first] if first else only or []:
        if name not in names:
            raise UserError(f"there is no stage '{name}'{nearest(name, names)}")
    return set(only or names[names.index(first) if first else 0:])


if __name__ == "__main__":
    raise SystemExit(main())
