"""Stages submitted to a real Slurm cluster, which these tests start."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from cluster import slurm

import run_pipeline
from pipeline.cluster import CLUSTER_FILE
from pipeline.records import Experiment, Part
from tools.compare_outputs import digests

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not())]

STAGES = ("train_agent", "plot_agent", "record", "train_simulator")
SECONDS = 900  # time limit of a stage on a busy machine


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a cluster with two nodes, of which the second has a GPU."""
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield {**found, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory):
    """Resource requests of the jobs: one node and a short time each."""
    content = yaml.safe_load(CLUSTER_FILE.read_text())
    for kind in ("training", "gpu", "cpu"):
        content[kind] |= {"time": "30 min", "memory_gb": 1, "cores": slurm.CORES}
    content |= {"stop_lead": "60 s", "stages": {
        "record": {"shards": 2, "gpus": 0}, "train_simulator": {"gpus": 0}}}
    file = tmp_path_factory.mktemp("settings") / "cluster.yml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def pipeline(environment, monkeypatch, capsys):
    """A function that runs run_pipeline.py, which must succeed, and returns its output."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(folder, *more):
        capsys.readouterr()
        status = run_pipeline.main(["--preset", "tiny", "--output_dir", str(folder), *more])
        said = "".join(capsys.readouterr())
        assert status == 0, said
        return said
    return run


def ask(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True,
                          check=True).stdout


def wait(condition, what, pause=1.0):
    """Wait until a condition returns a true value, and return this value."""
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, what()
        time.sleep(pause)
    return found


class Watch:
    """Observer of the jobs of an experiment, which can stop their processes at a given moment."""

    def __init__(self, environment, folder):
        self.environment, self.folder = environment, folder

    def said(self):
        queue = ask(self.environment, "squeue", "--all", "--array", "--states=all")
        return queue + "".join(f"\n{path.name}:\n{path.read_text(errors='replace')[-3000:]}"
                               for path in sorted(self.folder.glob("logs/**/*")) if path.is_file())

    def job(self, stage):
        """Return the number of the job that was last submitted for a stage."""
        text = (self.folder / "pipeline" / f"submitted_{stage}.json").read_text()
        return re.search(r'"job": "(\d+)"', text)[1]

    def state(self, job):
        return ask(self.environment, "squeue", "--noheader", "--states=all", f"--jobs={job}",
                   "--format=%T").strip()

    def hold_in_loop(self, log):
        """Stop the process that writes a log as soon as it defers signals, and return its id."""
        process = wait(lambda: self._deferring(log), self.said, 0.1)
        os.kill(process, signal.SIGSTOP)
        return process

    def _deferring(self, log):
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "fd" / "1") == str(self.folder / "logs" / log) and (
                        in_mask(entry, "SigCgt", signal.SIGTERM)):
                    return int(entry.name)
            except OSError:
                continue
        return None

    def until_done(self):
        wait(lambda: not ask(self.environment, "squeue", "--noheader"), self.said)


def in_mask(process, name, number):
    """Return whether a signal is in a mask of /proc/<process>/status."""
    mask = re.search(rf"^{name}:\t(\w+)$", (process / "status").read_text(), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_stages_survive_scancel_and_time_limits_to_the_numbers_of_one_machine(
        environment, pipeline, cluster_file, tmp_path):
    """train_agent is cancelled, train_simulator reaches its time limit, and record is an array."""
    output = tmp_path / "output"
    watch, record = Watch(environment, output), Experiment(output).record
    submit = ("--cluster_file", str(cluster_file), "--only", *STAGES, "--submit", "slurm")

    text = pipeline(output, *submit)
    assert re.findall(r"^(\w+): submitted as job", text, re.MULTILINE) == [*STAGES]
    train, plot = watch.job("train_agent"), watch.job("plot_agent")
    for job, gpus in ((train, "gres:gpu:1"), (plot, None)):
        found = ask(environment, "scontrol", "show", "job", job)
        assert re.findall(r"TresPerJob=(\S+)", found) == ([gpus] if gpus else [])
    watch.hold_in_loop("01_train_agent.log")
    text = pipeline(output, "--status")
    assert re.search(rf"^train_agent +running +{train} +\d+:\d\d +node2", text, re.MULTILINE)
    assert re.search(rf"^plot_agent +queued +{plot} +Dependency$", text, re.MULTILINE)
    text = pipeline(output, *submit)
    assert text.endswith("nothing is left to submit\n") and watch.job("train_agent") == train

    ask(environment, "scancel", train)  # continues the process, and signals it to stop
    wait(lambda: watch.state(train) == "CANCELLED", watch.said)
    assert (record("train_agent").status, record("train_agent").exit_status) == ("stopped", 143)
    assert list(output.glob("agent/**/model_256.pth")), "the update was not finished and saved"
    assert not list(output.glob("agent/**/model_512.pth"))
    assert re.search(r"^train_agent +stopped", pipeline(output, "--status"), re.MULTILINE)
    watch.until_done()  # dependent jobs are gone, and the report is written
    assert (output / "report" / "index.html").exists()

    text = pipeline(output, *submit)
    assert "train_agent: submitted" in text and "because an earlier run was stopped" in text
    process = watch.hold_in_loop("06_train_simulator.log")
    job = watch.job("train_simulator")
    ran = re.search(r"RunTime=00:(\d\d)", ask(environment, "scontrol", "show", "job", job))[1]
    ask(environment, "scontrol", "update", f"JobId={job}", f"TimeLimit={int(ran) + 2}")
    wait(lambda: in_mask(Path(f"/proc/{process}"), "ShdPnd", signal.SIGTERM), watch.said)
    os.kill(process, signal.SIGCONT)
    wait(lambda: watch.state(job) == "PENDING", watch.said)
    assert record("train_simulator").status == "stopped"
    ask(environment, "scontrol", "update", f"JobId={job}", "TimeLimit=30")
    watch.until_done()
    assert Experiment(output).attempt(Part("train_simulator")).number == 2, watch.said()
    assert {name: record(name).status for name in STAGES} == dict.fromkeys(STAGES, "done"), (
        watch.said())
    assert (output / "logs" / "05_record_shard_2.log").exists()

    text = pipeline(output, *submit)
    assert text.endswith("nothing is left to submit\n") and text.count("valid since") == len(STAGES)
    alone = tmp_path / "alone"
    pipeline(alone, "--only", *STAGES)
    found, expected = digests(output), digests(alone)
    stopped_after = {name for name in found if re.search(r"batch_?0*[01]\.", name)}
    assert len(stopped_after) == 2  # the checkpoint of the stop, and its video
    cards = {name for name in expected if name.endswith("model_card.md")}  # they contain the time
    assert {name for name in found.keys() | expected.keys()
            if found.get(name) != expected.get(name)} <= stopped_after | cards
    assert len(expected) > 50
