"""Run the whole experiment, see ``PipelineOptions``."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.cli import count
from common.config import yaml_given
from common.devices import num_jobs
from common.errors import Stopped, UserError, nearest
from common.options import Options, command, option
from common.shards import Shard, shard
from common.tables import format_count
from pipeline.cluster import CLUSTER_FILE, SCHEDULERS, TIME_IS_UP, load_cluster
from pipeline.presets import OWN_SUFFIXES, Preset, load_preset, read_hyperparams
from pipeline.process import torchrun_arguments
from pipeline.records import Experiment, Part
from pipeline.report import print_plan, print_table, write_report
from pipeline.runner import CONTINUE, RUN, Decision, Pipeline
from pipeline.stage import ROOT, PathResolver, Stage
from pipeline.stage_files import all_stages, page_of
from pipeline.submission import Submitter, print_status

FORBIDDEN = set("/\\\0")
SECONDS_BETWEEN_PAGES = 45


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions(Options):
    """Run the whole experiment, from training to a page with all results. Stages that are up to
    date are skipped, interrupted stages are resumed, and stages whose code, parameters or inputs
    have changed run again. With --submit, the stages run as cluster jobs.
    """

    preset: str = option(
        help="preset in hyperparams/pipeline.yml, such as demo, full, maze or attribution; "
             "section:NAME for the shipped agent with the sizes of a parameter set in "
             "hyperparams/interpreting_configs.yml; or a YAML file with a preset of your own")
    output_dir: Path | None = option(None, "output folder; <preset>_output if not given")
    exp_name: str | None = option(None, "name of the experiment; the preset's name if not given")
    agent_file: Path | None = option(
        None, "analyse this agent instead of the preset's, without training one")
    model_file: Path | None = option(
        None, "use this simulator instead of the preset's, without training one")
    first: str | None = option(
        None, "start at this stage, regardless of the state of earlier stages", names=("--from",),
        metavar="STAGE")
    only: tuple[str, ...] | None = option(None, "run only these stages", metavar="STAGE")
    accept: tuple[str, ...] | None = option(
        None, "run nothing, and mark the results of these stages as valid, after a change that "
              "does not affect them", metavar="STAGE")
    parallel: int = option(
        1, "number of stages that run at the same time; each gets an equal share of the cores",
        type=count)
    force: bool = option(False, "run the selected stages again, regardless of their records")
    dry_run: bool = option(False, "print which stages would run and why, and run nothing")
    check_contents: bool = option(
        False, "read every file again; otherwise a file of the same size and modification time "
               "counts as unchanged")
    report: bool = option(
        False, "run nothing, and write the page of results from finished stages")
    submit: str | None = option(
        None, "submit the stages that are neither done nor submitted, one job per stage; with "
              "--dry_run print the commands", choices=sorted(SCHEDULERS))
    status: bool = option(
        False, "print the status of the stages and their jobs, and run nothing")
    cluster_file: Path = option(
        CLUSTER_FILE, "YAML file of the jobs' resource requests: time, memory, cores, GPUs")
    in_job: str | None = option(
        None, "run the stage of --only as a job of this scheduler, concurrently with jobs of other "
              "stages, and write no page; this and the following flags are those of the jobs that "
              "--submit creates", choices=sorted(SCHEDULERS))
    shard: Shard | None = option(
        None, "compute the I-th of the N shards of the stage, and join all if it is the last one",
        type=shard, metavar="I/N")
    processes: int = option(1, "number of local processes that torchrun starts for the stage",
                            type=count)
    seconds_to_stop: int = option(
        600, "seconds between a stop signal and the kill signal of torchrun", type=count)
    max_sittings: int = option(
        1, "maximum number of times that the job is started, if it runs out of time", type=count)

    def __post_init__(self):
        super().__post_init__()
        if sum(value is not None for value in (self.first, self.only, self.accept)) > 1:
            raise UserError("give only one of --from, --only and --accept")
        if self.accept and (self.force or self.dry_run):
            raise UserError("--accept runs nothing; give it without --force and --dry_run")
        if self.submit and (self.accept or self.force):
            raise UserError("--submit resumes existing work; give it without --accept and --force")
        if (self.in_job or self.shard) and not (
                self.in_job and self.only and len(self.only) == 1):
            raise UserError("a job runs one stage; give --in_job, and --only with one stage")


def run(options: PipelineOptions) -> None:
    """Run, submit or report stages.

    Raises:
        Stopped: if a stage failed or was stopped.
    """
    hyperparams = read_hyperparams()
    with yaml_given(hyperparams):
        status = _run(options, hyperparams)
    if status:
        raise Stopped(status)


def _run(options: PipelineOptions, hyperparams: dict[Path, dict]) -> int:
    """Run, submit or report stages with the given contents of the parameter files, by path."""
    preset = load_preset(options.preset, options.agent_file, options.model_file)
    plain = options.preset.replace(":", "_")
    if plain.endswith(OWN_SUFFIXES):
        plain = Path(plain).stem
    name = options.exp_name or plain
    if FORBIDDEN & set(name) or name.startswith("."):
        raise UserError(f"--exp_name is part of folder names and cannot be '{name}'")
    output = options.output_dir or Path(f"{plain}_output")
    stages = all_stages(preset, name)
    experiment = Experiment(output)
    experiment.check(options.preset)
    part = None
    if options.in_job and options.only:
        chosen_shard = (options.shard.parts, options.shard.part) if options.shard else ()
        part = Part(options.only[0], *chosen_shard)
    pipeline = Pipeline(experiment, stages, PathResolver(output, preset.given_files),
                        chosen([stage.name for stage in stages], options.first,
                               options.accept or options.only),
                        hyperparams, options.force, options.check_contents, part)
    if options.status:
        print_status(experiment, stages, pipeline.sources)
        return 0
    description = {"preset": options.preset, "name": name}
    if options.submit:
        return submit(options, pipeline, description)
    if options.dry_run:
        print_plan(pipeline)
        return 0
    if (part is not None or options.report) and not experiment.description():
        raise UserError(f"nothing has been run in {output} yet")
    if part is not None:
        return run_job(options, pipeline, part)
    if options.report:
        with experiment.opened_by_job("report"):
            print(f"open {write_report(experiment, stages, page_of(preset)).absolute()}")
        return 0
    with experiment.opened(description):
        if options.accept:
            print(*pipeline.accept(), sep="\n")
            return 0
        outcomes = run_stages(pipeline, preset, options.parallel)
        page = write_report(experiment, stages, page_of(preset))
    print_table(experiment, outcomes)
    print(f"\nopen {page.absolute()}")
    return next((status for _, _, status in outcomes if status), 0)


def run_stages(pipeline: Pipeline, preset: Preset,
               parallel: int = 1) -> list[tuple[Stage, Decision, int]]:
    """Run the stages; meanwhile, write the page again after a stage at intervals.

    Args:
        pipeline: the stages.
        preset: preset of the stages.
        parallel: number of stages that run at the same time.

    Returns:
        See ``Pipeline.run``; in the order of the stages.
    """
    experiment, page = pipeline.experiment, page_of(preset)
    if parallel > 1:  # read by the libraries that the processes of the stages load
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_jobs() // parallel))
    outcomes, begun, written = [], time.monotonic(), -math.inf
    for outcome in pipeline.run(parallel):
        outcomes.append(outcome)
        _, decision, status = outcome
        now = time.monotonic()
        is_recent = now - written < SECONDS_BETWEEN_PAGES
        if decision.action not in (RUN, CONTINUE) or status or is_recent:
            continue
        path = write_report(experiment, pipeline.stages, page, progress(
            pipeline.stages, [stage.name for stage, *_ in outcomes],
            preset.settings.get("seconds") or {}, now - begun), pipeline.digests)
        if written < 0:
            print(f"\nopen {path.absolute()}; it grows as stages finish", flush=True)
        written = time.monotonic()
    return sorted(outcomes, key=lambda outcome: pipeline.stages.index(outcome[0]))


def progress(stages: Sequence[Stage], finished: Sequence[str], usual: Mapping[str, float],
             seconds: float) -> str:
    """Say how many stages are finished, and how long the others will take.

    Args:
        stages: all stages.
        finished: names of the finished stages.
        usual: usual run times of stages on some machine, in seconds; may be empty.
        seconds: time that the finished stages have taken on this machine.
    """
    sentence = f"{len(finished)} of {len(stages)} stages are finished."
    if len(finished) == len(stages):
        return ""
    past = sum(usual.get(name, 0) for name in finished)
    if not past:
        return sentence
    left = seconds / past * sum(usual.get(stage.name, 0) for stage in stages
                                if stage.name not in finished)
    return f"{sentence} About {format_count(max(round(left / 60), 1), 'minutes')} left."


def submit(options: PipelineOptions, pipeline: Pipeline, description: dict) -> int:
    """Submit the stages that are neither done nor submitted, and return the exit status.

    With --dry_run, only the commands are printed.

    Args:
        pipeline: the stages.
        description: settings of the experiment, which are stored in its folder.
    """
    assert options.submit is not None
    experiment = pipeline.experiment
    words = [sys.executable, str(ROOT / "run_pipeline.py"), "--preset", options.preset,
             "--output_dir", str(experiment.path), "--exp_name", description["name"]]
    for flag, file in (("--agent_file", options.agent_file), ("--model_file", options.model_file)):
        words += [] if file is None else [flag, str(file)]
    submitter = Submitter(pipeline, words, options.submit, description["name"],
                          load_cluster(options.cluster_file, pipeline.stages), options.dry_run)
    if options.dry_run:
        submitter.submit()
        return 0
    SCHEDULERS[options.submit].check()
    with experiment.opened_by_job("submit"):
        experiment.describe(description)
        submitter.submit()
    return 0


def run_job(options: PipelineOptions, pipeline: Pipeline, part: Part) -> int:
    """Run the part of a stage that this cluster job computes, and return the exit status.

    The job is requeued if its time is up before the part is done, until it has been started
    --max_sittings times.
    """
    assert options.in_job is not None
    experiment, scheduler = pipeline.experiment, SCHEDULERS[options.in_job]
    job = scheduler.own_job()
    with experiment.opened_by_job(part.name):
        status = pipeline.run_part(job, torchrun_arguments(
            options.processes, options.seconds_to_stop) if options.processes > 1 else None)
        attempt = experiment.attempt(part)
    if status > 128 and TIME_IS_UP in pipeline.scripts.received and attempt is not None:
        if attempt.number < options.max_sittings:
            print(f"the time of job {job} is up; it is continued when {scheduler.name} starts it "
                  "again", flush=True)
            return scheduler.requeue_job(job)
        print(f"the time of job {job} is up after {attempt.number} attempts; submit it again to "
              "continue", file=sys.stderr)
    return status


def chosen(names: list[str], first: str | None, only: tuple[str, ...] | None) -> set[str]:
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


main = command(PipelineOptions, run)

if __name__ == "__main__":
    raise SystemExit(main())
