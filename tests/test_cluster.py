"""Stages as cluster jobs: resource requests, submission, command lines, and status."""

import dataclasses
import importlib
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import run_pipeline
from common import signals
from common.errors import UserError
from common.options import parser_of
from pipeline.cluster import (
    CLUSTER_FILE,
    SCHEDULERS,
    Entry,
    load_cluster,
    seconds_of,
)
from pipeline.presets import load_preset
from pipeline.process import Scripts
from pipeline.records import (
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    CacheKey,
    Digests,
    Experiment,
    JobAttempt,
    Part,
    Record,
)
from pipeline.runner import Pipeline
from pipeline.stage import PathResolver, Stage
from pipeline.stage_files import all_stages
from pipeline.submission import Submitted, Submitter, is_kept, read_submitted, status_of

STAGES = all_stages(load_preset("tiny"), "tiny")
CONFIG = load_cluster(CLUSTER_FILE, STAGES)
SLURM, LSF = SCHEDULERS["slurm"], SCHEDULERS["lsf"]
NO_RECORD = CacheKey("script", (), {}, {}, {}, {})


STAGE = {stage.name: stage for stage in STAGES}


def job(number, *after, shards=0):
    return Submitted("slurm", number, shards, after)


def waiting(number, why="Dependency"):
    return Entry(number, QUEUED, "pending", why)


def running(number):
    return Entry(number, RUNNING, "running", "", "1:02", "node1")


# Submission

@pytest.mark.parametrize(("after", "entries", "needed", "expected"), [
    ([], [], [], False),  # the job has ended
    ([], [Entry("2", FAILED, "failed")], [], False),
    (["1"], [waiting("2")], ["1"], True),
    (["1"], [waiting("2")], [], True),  # what it waits for is done
    (["1"], [waiting("2")], ["7"], False),  # the other stage was submitted again, as job 7
    ([], [waiting("2")], ["7"], False),  # it would start before its input is written again
    (["1"], [waiting("2", "DependencyNeverSatisfied")], [], False),
    (["1"], [running("2"), waiting("2", "DependencyNeverSatisfied")], ["7"], True)])
def test_a_job_is_kept_while_it_runs_or_waits_for_all_that_it_reads(after, entries, needed,
                                                                    expected):
    assert is_kept(job("2", *after), entries, needed) == expected


# Command lines

def submitter(system, **changes):
    pipeline = SimpleNamespace(experiment=Experiment(Path("out")), stages=STAGES)
    return Submitter(pipeline, ("python", "run pipeline.py"), system, "a b",
                     dataclasses.replace(CONFIG, **changes))


def test_slurm_gets_resources_signal_and_dependencies():
    made = submitter("slurm").job(STAGE["train_agent"], 0, (), ["7", "8"])
    assert SLURM.submission(made, CONFIG) == [
        "sbatch", "--parsable", "--job-name=a_b-train_agent",
        "--output=out/logs/jobs/train_agent-%j.out", "--open-mode=append", "--time=1440",
        "--nodes=1", "--ntasks=1", "--cpus-per-task=8", "--mem=32G", "--gpus=1",
        "--signal=B:USR1@600", "--requeue", "--dependency=afterok:7,afterok:8",
        "--kill-on-invalid-dep=yes",
        "--wrap=exec python 'run pipeline.py' --only train_agent --in_job slurm --max_sittings 50"]
    config = dataclasses.replace(CONFIG, slurm_options=("--partition=long",))
    assert SLURM.submission(made, config)[-2] == "--partition=long"
    command = SLURM.submission(submitter("slurm").report_job(["7", "9"]), CONFIG)
    assert "--dependency=afterany:7,afterany:9" in command
    assert not any("gpus" in word or "array" in word for word in command)
    assert command[-1] == "--wrap=exec python 'run pipeline.py' --report"


def test_lsf_gets_resources_signal_and_dependencies():
    made = submitter("lsf", stages={"train_agent": {"time": "90 s"}}).job(
        STAGE["train_agent"], 0, (), ["7", "8"])
    config = dataclasses.replace(CONFIG, stop_lead="80 s", lsf_options=("-q", "gpu"))
    assert LSF.submission(made, config) == [
        "bsub", "-J", "a_b-train_agent", "-o", "out/logs/jobs/train_agent-%J.out", "-W", "2",
        "-n", "8", "-R", "span[hosts=1] rusage[mem=32GB/host]", "-gpu", "num=1", "-wa", "USR1",
        "-wt", "2", "-r", "-Q", "75", "-w", "done(7) && done(8)", "-ti", "-q", "gpu",
        "exec python 'run pipeline.py' --only train_agent --in_job lsf --max_sittings 50"]
    report = LSF.submission(submitter("lsf").report_job(["7", "9"]), CONFIG)
    assert report[report.index("-w") + 1] == "ended(7) && ended(9)" and "-gpu" not in report


@pytest.mark.parametrize(("system", "array", "log", "task"), [
    ("slurm", "--array=1,3", "--output=out/logs/jobs/saliency-%A_%a.out", "$SLURM_ARRAY_TASK_ID"),
    ("lsf", "a_b-saliency[1,3]", "out/logs/jobs/saliency-%J_%I.out", "$LSB_JOBINDEX")])
def test_a_stage_that_divides_is_an_array(system, array, log, task):
    made = submitter(system).job(STAGE["saliency"], 4, (1, 3), ["7"])
    line = SCHEDULERS[system].submission(made, CONFIG)
    assert array in line and log in line
    assert line[-1].endswith(f'--max_sittings 50 --shard "{task}"/4')


def test_training_on_several_gpus_is_told_how_many_processes():
    made = submitter("slurm", stop_lead="5 min", stages={
        "train_agent": {"gpus": 4, "processes": 4}}).job(STAGE["train_agent"], 0, (), [])
    assert made.command[-4:] == ("--processes", "4", "--seconds_to_stop", "300")
    assert "--gpus=4" in SLURM.submission(made, CONFIG)


# Answers of the schedulers

def test_slurm_answers_are_understood():
    assert SLURM.parse_number("1234\n") == "1234" and SLURM.parse_number("1234;cluster\n") == "1234"
    assert SLURM.parse_number("Submitted batch job 1234\n") is None
    found = SLURM.parse_queue(
        "4|COMPLETED|0:05|node2|None\n4|RUNNING|0:03|node2|None\n"
        "5|PENDING|0:00||DependencyNeverSatisfied\n6|PENDING|0:00||Priority\n"
        "7|COMPLETING|0:01|node1|None\n8|PENDING|0:00||BeginTime\n")
    assert found == [Entry("4", DONE, "completed", "", "0:05"),
                     Entry("4", RUNNING, "running", "", "0:03", "node2"),
                     Entry("5", QUEUED, "pending", "DependencyNeverSatisfied", "0:00"),
                     Entry("6", QUEUED, "pending", "Priority", "0:00"),
                     Entry("7", DONE, "completing", "", "0:01"),
                     Entry("8", QUEUED, "pending", "BeginTime", "0:00")]


def test_lsf_answers_are_understood():
    """The answers are those in the command reference of LSF 10.1."""
    assert LSF.parse_number("Job <3456> is submitted to queue <normal>.\n") == "3456"
    assert LSF.parse_number("Job <3457> is submitted to default queue <normal>.\n") == "3457"
    assert LSF.parse_number("Memory reservation is (MB): 16\n"
                            "Job <3458> is submitted to queue <n>.\n") == "3458"
    assert LSF.parse_number("Request aborted by esub. Job not submitted.\n") is None
    found = LSF.parse_queue(
        "3456|RUN|62 second(s)|hostA|-\n"
        "3457|PEND|0 second(s)|-|Job dependency condition not satisfied;\n"
        "3458|PEND|0 second(s)|-|Dependency condition invalid or never satisfied;\n"
        "3459|DONE|9 second(s)|hostB|-\n3459|EXIT|9 second(s)|hostB|-\n"
        "3460|PSUSP|0 second(s)|-|-\n3461|SSUSP|5 second(s)|hostA|-\n")
    assert [(entry.job, entry.state, entry.is_hopeless) for entry in found] == [
        ("3456", RUNNING, False), ("3457", QUEUED, False), ("3458", QUEUED, True),
        ("3459", DONE, False), ("3459", FAILED, False), ("3460", QUEUED, False),
        ("3461", RUNNING, False)]
    assert (found[0].time, found[0].host, found[3].word) == ("62 second(s)", "hostA", "done")


# The cluster file

@pytest.mark.parametrize(("text", "seconds"), [("2 d", 172800), ("1 h 30 min", 5400), ("90s", 90)])
def test_times_are_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("cores: 8", "core: 8", "cluster.yml: 'training': unknown key 'core' (did you mean 'cores'?)"),
    ("time: 24 h", "time: 24:00:00", "'training': 'time' must be a str, not 86400"),
    ("time: 24 h", "time: 5 min", "'time' must be longer than 'stop_lead', 10 min, not 5 min"),
    ("stages: {}", "stages: {saliensy: {cores: 1}}",
     "'stages' names no stage 'saliensy' (did you mean 'saliency'?)")])
def test_mistakes_in_the_cluster_file_are_one_sentence(tmp_path, old, new, sentence):
    file = tmp_path / "cluster.yml"
    content = CLUSTER_FILE.read_text()
    assert old in content
    file.write_text(content.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_cluster(file, STAGES)


# run_pipeline.py --submit

def arguments(folder, *more):
    return ["--preset", "tiny", "--output_dir", str(folder), *more]


def test_dry_run_shows_every_command_and_writes_nothing(tmp_path, capsys, lsf):
    lsf.bsub(refused=0)
    lsf.stop()  # without submitted jobs, there is nothing to ask
    assert run_pipeline.main(arguments(tmp_path / "out", "--submit", "lsf", "--dry_run")) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+): would be submitted as job <\1>, because it has not "
                      "been run yet", text, re.MULTILINE) == [stage.name for stage in STAGES]
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("    bsub")]
    (panel,) = (line for line in lines if "tiny-panel" in line)
    assert panel[panel.index("-w") + 1] == " && ".join(
        f"done(<{name}>)" for name in ("record", "simulate", "hidden_states", "behaviours",
                                       "saliency", "saliency_without_env_grads"))
    assert f"{ROOT / 'run_pipeline.py'} --preset tiny --output_dir {tmp_path / 'out'}" in panel[-1]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def lsf(tmp_path, monkeypatch):
    """Programs that answer like LSF; ``lsf.bsub(number)`` lets bsub refuse the job of a number."""
    def program(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def bsub(refused):
        program("bsub", f"""echo x >> {tmp_path}/count
            number=$(wc -l < {tmp_path}/count)
            if [ $number = {refused} ]; then echo 'Job not submitted.' >&2; exit 255; fi
            echo "Job <$number> is submitted to queue <normal>." """)

    program("bjobs", "echo 'No job found' >&2; exit 255")
    program("bkill", f"echo $@ >> {tmp_path}/killed")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return SimpleNamespace(
        bsub=bsub, bjobs=lambda text: program("bjobs", f"echo '{text}'"),
        stop=lambda: program("bjobs", "echo 'LSF is down' >&2; exit 255"),
        submitted=lambda stage: read_submitted(Experiment(tmp_path / "out"), stage))


def test_a_refused_job_is_submitted_again_with_what_waits_for_it(tmp_path, capsys, lsf):
    argv = arguments(tmp_path / "out", "--submit", "lsf", "--only", "train_agent", "plot_agent",
                     "evaluate")
    lsf.bsub(refused=3)
    assert run_pipeline.main(argv) == 2
    assert capsys.readouterr().err == "error: bsub refuses tiny-evaluate: Job not submitted\n"
    assert lsf.submitted("plot_agent") == Submitted("lsf", "2", 0, ("1",))
    assert lsf.submitted("evaluate") is None
    # Queued jobs are not submitted again, and the report job comes last.
    lsf.bjobs("1|RUN|9 second(s)|hostA|-\n2|PEND|-|-|waits;")
    assert run_pipeline.main(argv) == 0
    assert lsf.submitted("evaluate") == Submitted("lsf", "4", 0, ("1",))
    assert lsf.submitted("report").after == ("1", "2", "4")
    assert not (tmp_path / "killed").exists()
    lsf.bjobs("2|PEND|-|-|waits;")  # the queue no longer lists job 1
    capsys.readouterr()
    assert run_pipeline.main(arguments(tmp_path / "out", "--status")) == 2
    said = capsys.readouterr()
    assert "LSF does not list job 1 of the stage train_agent, which has not ended" in said.err
    assert re.search(r"^plot_agent +queued +2 +waits;$", said.out, re.MULTILINE)
    # Job 2 waits in vain for job 1: it is cancelled, as is the report's, and both are replaced.
    assert run_pipeline.main(argv[:-1]) == 0
    assert (tmp_path / "killed").read_text() == "2\n5\n"
    assert lsf.submitted("plot_agent") == Submitted("lsf", "7", 0, ("6",))


# Status

def attempt(status, job="4", shards=0, key=""):
    return JobAttempt(job, 1, status, shards, key, 1.0)


def record(status, result=""):
    return Record(status, "key", NO_RECORD, {}, 60.0, 0, result, 0, "", "", "")


@pytest.mark.parametrize(("known", "expected"), [
    ({"record": record(DONE, "6 samples"), "submitted": job("4")}, ("done", "0:01:00",
                                                                    "6 samples")),
    ({"submitted": job("4"), "entries": [running("4")], "attempts": [attempt("running")],
      "line": "update 3"}, ("running", "1:02", "node1; update 3")),
    ({"submitted": job("4"), "entries": [waiting("4")]}, ("queued", "", "Dependency")),
    ({"submitted": job("4", shards=3), "entries": [running("4"), waiting("4")],
      "attempts": [attempt("done", "4_1", 3, "k"), attempt("running", "4_2", 3, "k"),
                   attempt("done", "3_3", 3)]},  # an earlier job has joined earlier shards
     ("running", "1:02", "1 of 3 shards done")),
    ({}, ("not run", "", "")),
    ({"submitted": job("4"), "attempts": [attempt("failed")], "record": record("failed"),
      "line": "error: no"}, ("failed", "", "error: no")),
    ({"submitted": job("4"), "attempts": [attempt("running")],
      "entries": [Entry("4", FAILED, "node_fail")]}, ("failed", "", "node_fail")),
    ({"submitted": job("4"), "attempts": [attempt("running")]}, ("lost", "", "")),
    ({"submitted": job("4"), "waits": True}, ("not run", "", ""))])
def test_status_says_how_a_stage_stands(known, expected):
    all_known = {"record": None, "submitted": None, "attempts": [], "entries": [], "line": "",
                 "waits": False, **known}
    assert status_of(**all_known) == expected


def test_a_request_to_stop_that_comes_on_two_ways_is_one(monkeypatch):
    """Processes of a cancelled job get the signal from the scheduler and from each other."""
    acted = []
    previous = signal.signal(signal.SIGTERM, lambda *_: acted.append("at once"))
    try:
        with signals.deferred_signals("update") as received:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            assert (received, acted) == ([signal.SIGTERM], [])
            monkeypatch.setattr(signals, "SECONDS_OF_ONE_REQUEST", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (received, acted) == ([signal.SIGTERM], ["at once"])
        with signals.deferred_signals("update", second_acts=False) as received:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert (received, acted) == ([signal.SIGTERM], ["at once"])
    finally:
        signal.signal(signal.SIGTERM, previous)


# Locks and files that jobs of one experiment share

def test_jobs_keep_checksums_beside_one_another(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    experiment = Experiment(tmp_path / "out")
    first, second = experiment.digests(False, "one"), experiment.digests(False, "two")
    digests = {"a": first.of(tmp_path / "a"), "b": second.of(tmp_path / "b")}
    first.save()
    second.save()
    found = experiment.digests(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", None)  # fails if a file is read again
        assert {name: found.of(tmp_path / name) for name in digests} == digests
    assert isinstance(found, Digests)


def test_jobs_run_beside_each_other_but_not_beside_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.records.SECONDS_TO_WAIT", 0)
    experiment = Experiment(tmp_path)
    with experiment.opened_by_job("record"), experiment.opened_by_job("saliency_shard_1"):
        with (pytest.raises(UserError, match="another job is running record"),
              experiment.opened_by_job("record")):
            pass
        with (pytest.raises(UserError, match=r"another run_pipeline\.py is using"),
              experiment.opened({})):
            pass
    with (experiment.opened({}), pytest.raises(UserError, match=r"another run_pipeline\.py"),
          experiment.opened_by_job("record")):
        pass


def test_shards_count_as_done_only_for_what_they_were_made_of(tmp_path):
    experiment = Experiment(tmp_path)
    for shard, (status, shards, key) in enumerate(
            [("done", 4, "k"), ("stopped", 4, "k"), ("done", 3, "k"), ("done", 4, "old")], 1):
        experiment.save_attempt(Part("saliency", 4, shard), attempt(status, "4_1", shards, key))
    assert experiment.shards_done("saliency", 4, "k") == {1}


def test_scripts_of_stages_that_divide_take_shards_and_join_them():
    dividing = {stage.name: stage.script for preset in ("full", "tiny", "maze", "attribution")
                for stage in all_stages(load_preset(preset), preset) if stage.max_shards > 1}
    assert {"record", "simulate", "saliency", "interventions"} <= dividing.keys()
    for script in set(dividing.values()):
        flags = parser_of(importlib.import_module(script).main.options)
        assert {"shard", "join"} <= {action.dest for action in flags._actions}, script


# Jobs at work

@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A function that runs a job of a stage with one file per shard, and returns the calls made."""
    experiment, ran = Experiment(tmp_path / "out"), []
    stage = Stage("cut", "evaluate", (), ("pieces/*.txt",), lambda _: "cut", max_shards=3)

    def run_script(_scripts, module, argv, log_file, *_):  # ends at the first step
        ran.append(" ".join(argv))
        (experiment.path / "pieces").mkdir(exist_ok=True)
        (experiment.path / "pieces" / f"{argv[-1].replace('/', '_')}.txt").touch()
        log_file.parent.mkdir(exist_ok=True)
        log_file.touch()  # as the script's output does
        yield from ()
        return run.statuses.get(ran[-1], 0)
    monkeypatch.setattr(Scripts, "run", run_script)

    def pipeline_of(part=None):
        return Pipeline(experiment, [stage], PathResolver(experiment.path, {}),
                        {"cut"}, {}, part=part)

    def run(shard):
        ran.clear()
        pipeline_of(Part("cut", 2, shard)).run_part("4")
        return list(ran)
    run.experiment, run.statuses, run.pipeline = experiment, {}, pipeline_of
    return run


def test_shards_run_once_in_any_order_and_the_last_one_joins_them(jobs):
    assert jobs(2) == ["--shard 2/2"] and jobs(2) == []
    jobs.statuses["--shard 1/2"] = 143
    assert jobs(1) == ["--shard 1/2"]
    assert jobs.experiment.attempt(Part("cut", 2, 1)).status == "stopped"
    jobs.statuses = {"--join": 2}
    assert jobs(1) == ["--shard 1/2", "--join"]
    assert jobs.experiment.attempt(Part("cut", 2, 1)).status == "done"
    assert jobs.experiment.attempt(Part("cut", 2, 1)).number == 2
    assert jobs.experiment.attempt(Part("cut", 2)).status == "failed"
    jobs.statuses = {}
    assert jobs(2) == ["--join"]
    made = jobs.experiment.record("cut")
    assert (made.status, made.why) == ("done", "it has not been run yet") and len(made.outputs) == 3
    assert jobs(2) == jobs(1) == []


def test_shards_begin_again_when_an_output_is_gone(jobs):
    """All shards run again, although each was complete; the first one deletes the old files."""
    for shard in (1, 2):
        jobs(shard)
    (jobs.experiment.path / "pieces" / "1_2.txt").unlink()
    assert jobs(2) == ["--shard 2/2"]
    assert [path.name for path in (jobs.experiment.path / "pieces").iterdir()] == ["2_2.txt"]
    assert jobs(1) == ["--shard 1/2", "--join"]


def test_a_stage_goes_on_in_as_many_shards_as_it_was_begun_in(jobs):
    def left(submitted):
        pipeline = jobs.pipeline()
        ((stage, decision),) = pipeline.plan()
        return Submitter(pipeline, (), "lsf", "x", CONFIG).shards_left(stage, decision, submitted)

    assert left(None) == (3, (1, 2, 3))
    jobs(1)
    assert left(job("4", shards=2)) == (2, (2,))
    jobs.statuses = {"--join": 2}
    jobs(2)
    assert left(job("4", shards=2)) == (2, (2,))  # its job joins the shards


@pytest.mark.parametrize(("received", "status", "attempts", "expected"), [
    ([signal.SIGUSR1], 143, 1, 75), ([signal.SIGUSR1], 143, 3, 143),
    ([signal.SIGTERM], 143, 1, 143),
    ([signal.SIGUSR1], 0, 1, 0), ([signal.SIGUSR1], 2, 1, 2)])
def test_a_job_begins_again_if_its_time_is_up_and_not_without_end(
        tmp_path, monkeypatch, received, status, attempts, expected):
    """LSF requeues a job that ends with exit status 75."""
    monkeypatch.setenv("LSB_JOBID", "12")
    experiment, part, jobs = Experiment(tmp_path), Part("train_agent"), []

    def run_part(job, torchrun):
        jobs.append(job)
        experiment.save_attempt(part, dataclasses.replace(attempt("stopped"), number=attempts))
        return status
    pipeline = SimpleNamespace(experiment=experiment, run_part=run_part,
                               scripts=SimpleNamespace(received=received))
    args = SimpleNamespace(in_job="lsf", processes=1, seconds_to_stop=60, max_sittings=3)
    assert run_pipeline.run_job(args, pipeline, part) == expected
    assert jobs == ["12"]
