"""run_pipeline.py: skips valid stages, explains why stages run, and survives being killed."""

import dataclasses
import fcntl
import html
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from html.parser import HTMLParser
from multiprocessing import forkserver
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import PATIENCE, ROOT, start, wait_for
from PIL import Image

import run_pipeline
from common.errors import UserError
from common.files import save_json, sha256
from common.options import parser_of
from generative.saliency.gradients import WITHOUT_ENV_GRADS
from interventions.comparison import comparison_store
from pipeline import code_closure
from pipeline import stage as stage_module
from pipeline.outputs import is_named
from pipeline.patterns import contents, find
from pipeline.presets import load_preset, read_hyperparams
from pipeline.records import CacheKey, Digests, Experiment, Record
from pipeline.report import PAGE_NAME, REPORT, TEMPLATES, render_document
from pipeline.report_contents import Check, attribution_checks, card_checks
from pipeline.runner import Pipeline
from pipeline.stage import HYPERPARAMS, PathResolver
from pipeline.stage_files import all_stages, page_of
from pipeline.summaries import count
from stats.effects import check_starts
from stats.report import format_interval
from tools import pictures
from tools.browser import chromium
from tools.compare_outputs import digests

NAME = "<img src=x onerror=alert(1)> & 'it'"
STAGES = all_stages(load_preset("tiny"), NAME)
NAMES = [stage.name for stage in STAGES]


def arguments(folder, *more):
    return ["--preset", "tiny", "--output_dir", str(folder), "--exp_name", NAME, *more]


# A sitecustomize.py: each process logs the files below FOLDERS that it opens to read or to write.
NOTING = """\
import os, sys
def note(event, args):
    if event == "open" and isinstance(args[0], str) and args[0].startswith(FOLDERS):
        file = os.open(f"{NOTES}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        kind = "reads" if args[2] & os.O_ACCMODE == os.O_RDONLY else "writes"
        os.write(file, f"{kind} {args[0]}\\n".encode())
        os.close(file)
sys.addaudithook(note)

os.fsync = lambda file: None  # no test simulates a power failure

import matplotlib.figure
save = matplotlib.figure.Figure.savefig
def save_small(figure, path, **more):  # few pixels; other tests look at the figures
    figure.set_layout_engine("none")
    if "effects" not in str(path):
        figure.clear()
    save(figure, path, **{**more, "dpi": 30})
matplotlib.figure.Figure.savefig = save_small

from matplotlib.backends.backend_agg import FigureCanvasAgg
draw = FigureCanvasAgg.draw
def draw_rotation_once(canvas):  # all frames of a rotating figure are its first one
    if not getattr(canvas, "is_drawn", False):
        draw(canvas)
        canvas.is_drawn = any(axes.name == "3d" for axes in canvas.figure.axes)
FigureCanvasAgg.draw = draw_rotation_once
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """A folder with the logs of the processes that wrote ``finished``."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, notes):
    """An output folder that no test may change."""
    folder = tmp_path_factory.mktemp("pipeline") / "output"
    site = tmp_path_factory.mktemp("site")
    folders = (f"{folder}/", *(f"{ROOT / name}/" for name in ("hyperparams", "web", "pretrained")))
    (site / "sitecustomize.py").write_text(f"FOLDERS, NOTES = {folders}, '{notes}'\n{NOTING}")
    with pytest.MonkeyPatch.context() as patch:
        # For a new fork server, which tests that run stages again share.
        forkserver._forkserver._stop()
        patch.setenv("PYTHONPATH", str(site))
        patch.setenv("OMP_NUM_THREADS", "1")
        assert run_pipeline.main(arguments(folder, "--parallel", "2")) == 0
        yield folder


@pytest.fixture
def output(finished, tmp_path):
    """A copy of ``finished``, in which large files are hard links; stages replace such files, and
    tests use ``overwrite``."""
    def copy(source, target):
        is_large = Path(source).suffix in (".npy", ".pt", ".pth", ".mp4")
        return (os.link if is_large else shutil.copy2)(source, target)
    return shutil.copytree(finished, tmp_path / "output", copy_function=copy)


def overwrite(path, content):
    path.unlink()
    path.write_bytes(content)


@pytest.fixture
def run(capsys):
    """A function that runs the pipeline, which must succeed, and returns its output."""
    def run(folder, *more):
        capsys.readouterr()
        assert run_pipeline.main(arguments(folder, *more)) == 0
        return capsys.readouterr().out
    return run


@pytest.fixture
def refused(capsys):
    """A function that runs the pipeline, which must refuse, and returns the error message."""
    def run(folder, *more):
        capsys.readouterr()
        assert run_pipeline.main(arguments(folder, *more)) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]
    return run


@pytest.fixture
def change_parameters(monkeypatch):
    """A function that changes parameters in the YAML file, as the pipeline reads them."""
    def merged(values, changes):
        return {**values, **{key: merged(values.get(key, {}), value) if isinstance(value, dict)
                             else value for key, value in changes.items()}}

    def change(**changes):
        contents = read_hyperparams()
        sets = contents[HYPERPARAMS / "interpreting_configs.yml"]
        sets["tiny-whole"] = merged(sets["tiny-whole"], changes)
        monkeypatch.setattr(run_pipeline, "read_hyperparams", lambda: contents)
    return change


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the project's code, which the pipeline takes for the code of the stages."""
    for path in ROOT.rglob("*.py"):
        if not {"tests", "node_modules", ".venv"} & set(path.relative_to(ROOT).parts):
            copy = tmp_path / "project" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy, follow_symlinks=False)
    monkeypatch.setattr(code_closure, "ROOT", tmp_path / "project")
    return tmp_path / "project"


def started(output, stage):
    """Return a process that has started to run a stage again."""
    process = start("run_pipeline.py", *arguments(output, "--only", stage, "--force"))
    wait_for(lambda: Experiment(output).record(stage).status == "running", process)
    return process


def planned(text):
    """Return the stages that a dry run would run or continue, with the reasons."""
    return dict(re.findall(r"^(\w+) would (?:run|be continued): (.*)$", text, re.MULTILINE))


def made(text):
    """Return the stages that were run or continued, with the reasons."""
    return dict(re.findall(r"^(\w+): (?:runs|continues), because (.*)$", text, re.MULTILINE))


def test_dry_run_runs_nothing_and_tells_all(run, tmp_path):
    text = run(tmp_path / "new", "--dry_run")
    assert list(planned(text)) == NAMES
    assert set(planned(text).values()) == {"it has not been run yet"}
    assert all(f"python -m {stage.script} " in text for stage in STAGES)
    assert not list(tmp_path.iterdir())


def test_second_run_skips_everything_wherever_the_folder_lies(run, output):
    before = digests(output)
    records = [path.read_bytes() for path in sorted(output.glob("pipeline/stage_*.json"))]
    text = run(output)
    assert not made(text) and text.count(": up to date, valid since") == len(NAMES)
    assert [path.read_bytes() for path in sorted(output.glob("pipeline/stage_*.json"))] == records
    assert digests(output) == before
    assert not list(output.rglob(".lock"))  # although forked stages end without atexit


@pytest.mark.parametrize(("changes", "expected"), [
    ({"analysis": {"saliency": {"sigma": 3.0}}},
     dict.fromkeys(("saliency", "saliency_without_env_grads"),
                   "the parameter analysis.saliency.sigma was 5.0 and is 3.0")),
    ({"gen_model": {"lr": 0.01}},
     {"train_simulator": "the parameter gen_model.lr was 0.0005 and is 0.01"})])
def test_a_changed_parameter_invalidates_what_depends_on_it(run, finished, change_parameters,
                                                            changes, expected):
    change_parameters(**changes)
    found = planned(run(finished, "--dry_run"))
    direct = {name: why for name, why in found.items() if not why.startswith("it reads the output")}
    assert direct == expected
    readers = set(expected)
    for stage in STAGES:  # stages that read their outputs, and so on
        sources = {*stage.needs, *(("train_simulator",) if "{simulator}" in stage.files else ())}
        if sources & readers:
            readers.add(stage.name)
    assert set(found) == readers


def test_a_changed_byte_invalidates_what_reads_it(run, output):
    run(output)  # stores all checksums
    changed = "rollouts/data/episode_00003/ob.npy"
    content = bytearray((output / changed).read_bytes())
    content[-100] ^= 1
    overwrite(output / changed, content)
    found = planned(run(output, "--dry_run"))
    assert found["record"] == f"its output {changed} was changed"
    assert {name for name, why in found.items() if "the output of record," in why} == {
        stage.name for stage in STAGES if "record" in stage.needs}
    found = planned(run(output, "--from", "train_simulator", "--dry_run"))
    assert found["train_simulator"] == f"the input {changed} has changed"
    assert "evaluate" not in found
    # A file with the same size and modification time counts as unchanged, as documented.
    unchanged = output / "evaluation.json"
    stat = unchanged.stat()
    unchanged.write_bytes(bytes(stat.st_size))
    os.utime(unchanged, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "evaluate" not in planned(run(output, "--dry_run"))
    assert "evaluation.json was changed" in planned(
        run(output, "--dry_run", "--check_contents"))["evaluate"]


# Prefixes of the parameters of each YAML file; the others belong to the parameter set.
PARAMETERS = {"action_noise.yml": "action_noise.", "config.yml": "agent.",
              "game_objects.yml": "game_objects."}


def declares(stage, yaml):
    """Return whether a stage declares that it depends on a YAML file of parameters."""
    begins = tuple(PARAMETERS.values())
    return any(name.startswith(PARAMETERS[yaml]) if yaml in PARAMETERS else
               not name.startswith(begins) for name in stage.parameters)


def test_a_stage_opens_what_it_declares_alone(finished, notes):
    """Otherwise a change would not make the stage run again, and a cluster job could read a file
    that another stage is writing."""
    written_by = {path: stage.name for stage in STAGES for path in find(finished, stage.outputs)}
    places, seen = PathResolver(finished, load_preset("tiny").given_files), set()
    for file in notes.iterdir():
        noted = [line.split(" ", 1) for line in file.read_text().splitlines()]
        logs = [Path(path).stem for kind, path in noted
                if kind == "writes" and Path(path).parent == finished / "logs"]
        if len(logs) != 1:  # the pipeline, or a helper process of a stage
            continue
        (stage,) = (stage for stage in STAGES if stage.name == logs[0].partition("_")[2])
        declared = {path for patterns in stage.needs.values() for path in find(finished, patterns)
                    } | {path for _, path in places.files(stage.files)}
        for path in {Path(path) for kind, path in noted if kind == "reads"} - declared:
            if path.parent.is_relative_to(HYPERPARAMS):
                assert declares(stage, path.name), (stage.name, path)
            elif path.is_file() and (path in written_by or not path.is_relative_to(finished)):
                assert written_by.get(path) == stage.name, (stage.name, path)
        seen.add(stage.name)
    assert seen == set(NAMES)


@pytest.mark.parametrize("preset", [
    "demo", "attribution", "tiny", "maze", "memory", "questions"])
def test_every_stage_that_can_read_the_kinds_of_object_declares_them(preset):
    stages = all_stages(load_preset(preset), NAME)
    code = code_closure.code_of({stage.script for stage in stages})
    for stage in stages:
        reads = "envs.objects" in code[stage.script][0] and (
            stage.script != "evaluate" or "--causes" in stage.argv)
        assert declares(stage, "game_objects.yml") == reads, stage.name


def test_a_stage_gets_the_parameters_that_its_record_tells(run, output, change_parameters):
    """The YAML file has other values at the time when the stage could read it."""
    change_parameters(analysis={"saliency": {"num_sim_steps": 3}})
    assert made(run(output, "--only", "simulate_at_random")) == {
        "simulate_at_random": "the parameter analysis.saliency.num_sim_steps was 4 and is 3"}
    assert len(np.load(output / "samples" / "rand_init" / "sample_00000" / "ims.npy")) == 3


def test_changed_code_invalidates_what_runs_it(run, finished, project):
    module = project / "generative" / "loss_over_time.py"
    text = module.read_text()
    _, _, rest = text.removeprefix('"""').partition('"""')
    module.write_text(f'"""Another description."""{rest}# and a comment')
    assert not planned(run(finished, "--dry_run"))
    module.write_text(f"{text}\nADDED = 1\n")
    assert planned(run(finished, "--dry_run")) == dict.fromkeys(
        ("plot_agent", "plot_simulator", "loss_over_time"),
        "the module generative.loss_over_time has changed")


def test_another_version_or_page_invalidates_what_depends_on_it(run, finished, monkeypatch,
                                                                tmp_path):
    page = shutil.copytree(stage_module.PanelFolder.built(), tmp_path / "page")
    monkeypatch.setattr(stage_module.PanelFolder, "built", lambda: page)
    assert not planned(run(finished, "--dry_run"))
    with open(page / "index.html", "a") as file:
        file.write("<!-- more -->")
    assert planned(run(finished, "--dry_run")) == {
        "panel": "the input {page}, index.html has changed"}
    found = code_closure.versions()
    monkeypatch.setattr(code_closure, "versions", lambda: {**found, "hdbscan": "9"})
    plan = planned(run(finished, "--dry_run"))
    reason = f"the version of hdbscan was {found['hdbscan']} and is 9"
    assert plan["hidden_states"] == plan["env_states"] == plan["bottleneck_vectors"] == reason
    assert not {"train_agent", "record", "train_simulator", "simulate"} & set(plan)


def test_accepted_stages_are_valid_or_go_on_and_lack_nothing(run, refused, output, project):
    experiment = Experiment(output)
    stopped = experiment.record("loss_over_time")
    experiment.save("loss_over_time", dataclasses.replace(stopped, status="stopped", outputs={}))
    with open(project / "common" / "files.py", "a") as file:
        file.write("ADDED = 1\n")
    video = next((output / "videos").glob("*.mp4"))
    video.rename(output / "elsewhere.mp4")
    assert (f"render cannot be accepted: its output videos/{video.name} is missing"
            in refused(output, "--accept", "evaluate", "render"))
    (output / "elsewhere.mp4").rename(video)
    said = run(output, "--accept", *NAMES)
    change = "although the module common.files has changed"
    assert said.count(f"is valid now, {change}") == len(NAMES) - 1
    assert f"loss_over_time can be continued now, {change}" in said
    assert planned(run(output, "--dry_run")) == {"loss_over_time": "an earlier run was stopped"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "pattern", "number", "asked"), [
    ("train_agent", "agent/**/model_256.pth", 1, signal.SIGKILL),
    ("record", "rollouts/data/episode_*", 3, signal.SIGTERM)])
def test_killed_or_stopped_stage_goes_on_to_the_same_numbers(run, output, finished, stage, pattern,
                                                             number, asked):
    process = started(output, stage)
    wait_for(lambda: len(list(output.glob(pattern))) >= number, process)
    process.send_signal(asked)
    process.communicate()
    if asked == signal.SIGTERM:
        assert process.returncode == 128 + asked
    how = "stopped" if asked == signal.SIGTERM else "interrupted"
    again = [stage, "plot_agent"] if stage == "train_agent" else [stage]  # both use the same folder
    assert made(run(output, "--only", *again))[stage] == f"an earlier run was {how}"
    for earlier in output.glob("*_until_*"):
        shutil.rmtree(earlier)
    assert digests(output, finished) == digests(finished)


def test_a_file_that_no_stage_wrote_is_not_deleted(refused, output):
    """Unrecorded files of a killed stage are recognised by their names, and by modification times
    during its run."""
    experiment, folder = Experiment(output), output / "analysis" / "attribution" / "table"
    files = folder / ".hidden", folder / "findings.png", folder / "notes.csv"
    during = experiment.last_at_work("attribution_table")
    done = experiment.record("attribution_table")
    pipeline = Pipeline(experiment, STAGES, PathResolver(output, load_preset("tiny").given_files),
                        {"evaluate", "attribution_table"}, {}, force=True)
    for record in (done, dataclasses.replace(done, status="running", outputs={})):
        experiment.save("attribution_table", record)
        for file in files:
            file.write_text("my thoughts")
        for file in (*files[::2], *folder.glob("[ft]*.[cm]*"), folder / "settings.json"):
            os.utime(file, (during, during))
        os.utime(files[1], (0, 0))  # a copy of an old file
        for file in files:
            with pytest.raises(UserError, match=re.escape(f"{file} was not written by the pipe")):
                list(pipeline.run())
            assert experiment.record("attribution_table") == record
            assert "--force" not in experiment.record("evaluate").why  # no stage has run
            file.unlink()
    (folder / "link").symlink_to(output / "evaluation.json")
    assert "link was not written" in refused(output, "--only", "attribution_table", "--force")


def test_every_file_of_a_stage_has_a_name_of_its_script(finished):
    """The pipeline deletes no other files of interrupted stages."""
    for stage in STAGES:
        names = [*map(Path, Experiment(finished).record(stage.name).outputs)]
        assert names and all(is_named(stage, finished, name) for name in names), stage.name
        for name in names:
            for other in ("notes.txt", f".{name.name}", "mine/notes.csv"):
                assert not is_named(stage, finished, name.parent / other), stage.name


@pytest.mark.slow
def test_a_killed_training_keeps_its_predecessor_and_ends_with_the_pipeline(output):
    (agent,) = output.glob("agent/**/model_512.pth")
    content = agent.read_bytes()
    process = started(output, "train_agent")
    wait_for(lambda: list(output.glob("agent/**/log.csv")), process)
    process.kill()
    process.wait()
    (earlier,) = output.glob("agent_until_*")
    assert (earlier / agent.relative_to(output / "agent")).read_bytes() == content
    end = time.monotonic() + PATIENCE
    with open(Experiment(output).stage_lock_file) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < end, "the stage runs on"
                time.sleep(0.1)
    assert not list(output.glob("agent/**/model_512.pth")), "the stage ran to its end"


def test_only_from_and_force_choose_stages(run, finished):
    last = NAMES[-2:]
    found = planned(run(finished, "--from", last[0], "--force", "--dry_run"))
    assert list(found) == last
    text = run(finished, "--only", "record", "--dry_run")
    assert "evaluate is skipped: not selected" in text
    assert "record is up to date" in text


def test_files_that_a_running_stage_deletes_are_left_out(tmp_path):
    """The check before one stage starts looks at the folders of stages that run."""
    (tmp_path / "own" / "kept").mkdir(parents=True)
    (tmp_path / "own" / "kept" / "file").touch()
    is_done = threading.Event()

    def write_and_delete():
        for number in itertools.count():
            folder = tmp_path / "own" / f"{number}"
            folder.mkdir()
            (folder / "file").touch()
            shutil.rmtree(folder)
            if is_done.is_set():
                return

    thread = threading.Thread(target=write_and_delete)
    thread.start()
    try:
        found = [contents(tmp_path, ["own"]) for _ in range(2000)]
    finally:
        is_done.set()
        thread.join()
    assert all(tmp_path / "own" / "kept" / "file" in paths for paths in found)


def test_files_that_a_running_stage_writes_are_excluded(tmp_path, monkeypatch):
    glob = Path.glob

    def written_after(folder, pattern):
        found = list(glob(folder, pattern))
        (tmp_path / f"map_{len(found)}_without_env_grads").touch()
        return found

    (tmp_path / "map").touch()
    monkeypatch.setattr(Path, "glob", written_after)
    for patterns in (["map*", "!*_without_env_grads"], ["!*_without_env_grads", "map*"]):
        assert find(tmp_path, patterns) == [tmp_path / "map"]


@pytest.mark.slow
def test_a_failure_lets_the_stages_that_run_at_the_same_time_end(run, output, finished, capsys):
    """Later, the failed stage and a stage that lacks an output run, and their readers do not."""
    (checkpoint,) = output.glob("simulator/**/*.pt")
    good = checkpoint.read_bytes()
    overwrite(checkpoint, b"damaged")
    (output / "evaluation.json").unlink()
    two = "--only", "evaluate", "simulate_at_random", "--parallel", "2"
    assert run_pipeline.main(arguments(output, *two)) == 2
    text, errors = capsys.readouterr()
    assert "simulate_at_random failed (exit status 2)" in errors
    assert text.index("simulate_at_random: runs") < text.index("evaluate: wrote")
    assert "simulate_at_random: error: " in text  # every line begins with its stage
    assert [Experiment(output).record(name).status for name in two[1:3]] == ["done", "failed"]
    overwrite(checkpoint, good)
    (removed,) = output.glob("analysis/attribution/edits/without_*.pth")
    removed.unlink()
    assert made(run(output, "--parallel", "2")) == {
        "simulate_at_random": "the input {simulator} has changed",
        "attribution_edit": f"its output {removed.relative_to(output)} is missing"}
    assert digests(output, finished) == digests(finished)


@pytest.mark.parametrize(("more", "sentence"), [
    (["--from", "recrod"], "no stage 'recrod' (did you mean 'record'?)"),
    (["--preset", "demoo"], "no preset 'demoo' (did you mean 'demo'?)"),
    (["--exp_name", "a/b"], "--exp_name is part of folder names"),
    (["--only", "evaluate"], "run train_agent first"),
    (["--only", "simulate"], "simulate reads the output of record, which is not finished; run "
                             "record first")])
def test_mistakes_are_one_sentence(refused, tmp_path, more, sentence):
    assert sentence in refused(tmp_path / "new", *more)


@pytest.mark.parametrize(("unit", "of_one"), [
    ("edited agents", "1 edited agent"), ("files of data", "1 file of data"),
    ("layers with named features", "1 layer with named features")])
def test_results_of_stages_count_one_file_in_the_singular(unit, of_one, tmp_path):
    assert count(tmp_path, "*.pth", unit) == f"0 {unit}"
    (tmp_path / "a.pth").touch()
    assert count(tmp_path, "*.pth", unit) == of_one
    (tmp_path / "b.pth").touch()
    assert count(tmp_path, "*.pth", unit) == f"2 {unit}"


def test_folders_with_other_contents_are_refused(refused, tmp_path, finished):
    assert "holds the experiment of the preset 'tiny'" in refused(finished, "--preset", "demo")
    (tmp_path / "thesis.tex").touch()
    assert "holds other data" in refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def check_stages(found):
    """Check that stages only need earlier ones, use known flags, and have enough levels."""
    names = [stage.name for stage in found]
    assert len(set(names)) == len(names)
    for number, stage in enumerate(found):
        assert set(stage.needs) <= set(names[:number]), stage.name
        flags = parser_of(importlib.import_module(stage.script).main.options)
        given = flags.parse_args(list(stage.argv))
        if stage.script in ("compare_interventions", "attribution.failure_causes"):
            check_starts(given.num_episodes)


@pytest.mark.parametrize(("name", "is_trained"), [
    ("demo", True), ("full", True), ("tiny", True), ("section:tiny", False),
    ("section:defaults", False)])
def test_every_preset_and_set_has_its_stages(name, is_trained):
    preset = load_preset(name)
    stages = all_stages(preset, name)
    check_stages(stages)
    names = [stage.name for stage in stages]
    settings = preset.settings
    assert ("train_agent" in names) == (settings["agent_training"] is not None) == is_trained
    if not is_trained:
        assert settings["parameters"] == name.removeprefix("section:")
    played = stages[names.index("interventions")].argv
    place = played.index("--ablations") + 1
    ablations = settings["interventions"]["ablations"]
    assert [*played[place:place + len(ablations)]] == ablations
    # The fidelity card of loss_over_time needs positions.
    assert "--positions" in stages[names.index("record")].argv
    # The stages are too slow for the demo.
    assert ("saliency_checks" in names) == (name not in ("demo", "tiny"))
    assert ("attribution_activation_features" in names) == (name != "demo")


@pytest.mark.parametrize(("name", "agent", "maps"), [
    ("maze", None, False), ("maze-tiny", None, False), ("attribution", None, True),
    ("attribution", Path(__file__), False), ("attribution-backgrounds", Path(__file__), False)])
def test_presets_of_one_agent_have_their_stages(name, agent, maps):
    found = all_stages(load_preset(name, agent_file=agent), name)
    check_stages(found)
    assert ("saliency_checks" in [stage.name for stage in found]) == maps
    shown = {stage.name for stage in found if "--use_backgrounds" in stage.argv}
    assert shown == ({"attribution_record", "attribution_edit", "failure_causes"}
                     if name == "attribution-backgrounds" else set())


def test_an_agent_that_is_given_is_not_trained():
    with pytest.raises(UserError, match="give one with --agent_file"):
        _ = load_preset("attribution-backgrounds").given_files
    given = load_preset("full", agent_file=Path(__file__)).settings
    assert given["agent_training"] is None and given["simulator_training"]["batch_size"] == 28
    assert load_preset("demo", agent_file=Path(__file__)).settings["model_file"] is None
    # Full-size numbers are quoted only for small runs of the shipped agent.
    assert page_of(load_preset("demo")).findings and not page_of(load_preset("full")).findings
    assert not page_of(load_preset("demo", agent_file=Path(__file__))).findings


def test_a_preset_can_be_a_file(run, tmp_path, monkeypatch):
    """Of stages of the project, or of stages of one's own, which read each other's outputs."""
    (tmp_path / "my.yml").write_text("stages: maze\nagent_files: [a/model.pth, b.pth]\nfilms: 0\n")
    preset = load_preset(str(tmp_path / "my.yml"))
    assert preset.given_files["{agent b}"] == tmp_path / "b.pth"
    stages = all_stages(preset, "x")
    check_stages(stages)
    names = [stage.name for stage in stages]
    assert "a_fields" in names and "b_fields" in names and "a_rollouts" not in names
    (tmp_path / "own.yml").write_text(OWN_STAGES)
    (tmp_path / "my.yml").write_text("stages: own.yml\nlevels: 9\nagent_file: agent.pth\n")
    (tmp_path / "agent.pth").touch()
    monkeypatch.chdir(tmp_path)
    text = run(tmp_path / "out", "--preset", "my.yml", "--dry_run")
    assert list(planned(text)) == ["play", "again"]
    assert "evaluate --model_file " in text and "--num_episodes 10 --output" in text
    stages = all_stages(load_preset("my.yml"), "x")
    assert stages[1].needs == {"play": ("play.json",)} and "--use_backgrounds" in stages[0].argv


OWN_STAGES = """
settings: {agent_file: agent.pth, levels: 4, optional: null}
let: {more: "${levels + 1}"}
stages:
- stage: play
  script: evaluate
  options: {model_file: "${agent}", num_episodes: "${more}", output: "${output}/play.json",
            use_backgrounds: true, causes: false, env_name: "${optional}"}
  outputs: [play.json]
  result: {success_rate: play.json}
- stage: left_out
  if: optional
  script: evaluate
  result: {success_rate: play.json}
- for: name
  in: [again]
  stages:
  - stage: ${name}
    script: evaluate
    needs: [play, left_out]
    outputs: [again.json]
    result: {success_rate: again.json}
"""


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("levels: 9", "levls: 9", "my.yml: unknown key 'levls' (did you mean 'levels'?)"),
    ("levels: 9", "levels: nine", "my.yml: 'levels' must be like 4, not 'nine'"),
    ("stages: own", "stages: owm", "owm.yml"),
    ("${levels + 1}", "${level + 1}", "'level + 1': 'level' is undefined"),
    ("${levels + 1}", "${levels.__class__}", "access to attribute '__class__'"),
    ("[play, left_out]", "[plays]", "stage 'again': 'needs' names no earlier stage 'plays' (did"),
    ("success_rate: again", "success: again", "unknown 'success' (did you mean 'success_rate'?)"),
    ("outputs: [again", "output: [again", "unknown key 'output' (did you mean 'outputs'?)"),
    ("outputs: [again", "outputs: [5, again", "expected a text or a list of texts, not [5, "),
    ("script: evaluate\n    needs", "needs", "stage 'again': the key 'script' is missing"),
    ("- for: name", "- 5\n- for: name", "'stages' must be a list of mappings"),
    ("outputs: [again", "outputs: [../again", "'../again.json' is not in the output folder")])
def test_mistakes_in_a_file_of_stages_are_one_sentence(refused, tmp_path, old, new, sentence):
    for name, text in (("own.yml", OWN_STAGES), ("my.yml", "stages: own.yml\nlevels: 9\n")):
        (tmp_path / name).write_text(text.replace(old, new))
    assert sentence in refused(tmp_path / "out", "--preset", str(tmp_path / "my.yml"), "--dry_run")


# The report

def addresses(page):
    return [html.unescape(each) for each in re.findall(r'(?:src|href|poster)="([^"]+)"', page)]


def test_the_report_begins_with_the_answers_and_every_link_resolves(finished):
    page = (finished / REPORT / PAGE_NAME).read_text()
    found = addresses(page)
    files = [each for each in found if not each.startswith("#")]
    assert len(files) > 40
    for address in files:
        assert not address.startswith(("/", "http", "file")), address
        assert (finished / REPORT / unquote(address)).is_file(), address
    for address in set(found) - set(files):
        assert f'id="{address[1:]}"' in page
    head = page.partition("</nav>")[0]
    for name in ("evaluate", "loss_over_time", "behaviours", "consistency", "interventions"):
        assert Experiment(finished).record(name).result.lower() in head.lower()


def test_a_hostile_name_is_no_markup(finished):
    page = (finished / REPORT / PAGE_NAME).read_text()
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; " in page
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

    Reader().feed(page)
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert [attributes for tag, attributes in tags if tag == "script"] == [{}]  # the page's own
    assert page.count((TEMPLATES / "report.js").read_text().strip()) == 1
    sources = [attributes["src"] for tag, attributes in tags if tag in ("img", "video")]
    assert len(sources) > 10
    assert all(source.startswith(("../", "saliency_", "training_")) for source in sources)


HOSTILE = """# A report

<a id="deletion"></a> holds<br>`<b>saw</b>` [rows](#deletion) [next](other.md) ![curve](curve.png)

| name | link |
| --- | --- |
| [click](javascript:alert(1)) | [click](JaVa&#115;cript:alert(1)) [click](java\tscript:alert(1)) |
| ![seen](https://evil/x.png) | [click](//evil/x) [click](/etc/passwd) <https://evil> |

[click][a] [click](data:text/html,x) [click](vbscript:x) [click](jav%61script:alert(1))
<img src=x onerror=alert(1)>

<script>alert(1)</script>

Changes: -0.50 (-1 to -.2), on 2026-11-28 in t-0, with `--shift -1`.

[a]: javascript:alert(1)
"""


def test_documents_have_line_breaks_anchors_and_relative_links_alone(tmp_path):
    document = tmp_path / "analysis" / "study" / "report.md"
    document.parent.mkdir(parents=True)
    document.with_name("other.md").write_text("# Another")
    document.write_text(HOSTILE)
    page = str(render_document(tmp_path, document))
    assert addresses(page) == ["#deletion", "analysis_study_other.html",
                               "../analysis/study/curve.png"]
    assert '<a id="deletion"></a> holds<br />' in page
    assert "<code>&lt;b&gt;saw&lt;/b&gt;</code>" in page
    assert ("Changes: −0.50 (−1 to −.2), on 2026-11-28 in t-0, with <code>--shift -1</code>."
            in page)
    assert set(re.findall(r"<(\w+)", page)) <= {
        "h1", "p", "a", "br", "code", "img", "span", "table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("text", ["[" * 5000, "`" * 5000, "![" * 5000, "x\n" + "[[[[\n" * 2000,
                                  "[a](b) " * 400_000], ids=lambda text: text[:4])
def test_documents_that_take_long_to_convert_are_shown_as_they_are(text, tmp_path):
    document = tmp_path / "report.md"
    document.write_text(text + "<script>")
    begin = time.process_time()
    page = render_document(tmp_path, document)
    assert time.process_time() - begin < 5
    assert page.startswith("<pre>") and "<script>" not in page


@pytest.mark.parametrize("change", [
    {"status": "finished"}, {"seconds": float("nan")}, {"seconds": 1e300}, {"bytes": "9"},
    {"outputs": {"a": 3}}, {"outputs": {"../a": "0" * 64}}, {"basis": []}, {"basis": {"argv": 3}},
    {"outputs": ["a"]}, {"begun": -1}, {"why": None}], ids=str)
def test_damaged_records_count_as_missing(change, tmp_path):
    experiment = Experiment(tmp_path)
    basis = CacheKey("train", ("--seed",), {"lr": 1.5}, {"a": "0" * 64}, {}, {})
    record = Record("done", basis.key, basis, {"a": "0" * 64}, 1.5, 9, "", 0, "l", "d", "w", 1.0)
    experiment.save("train", record)
    assert experiment.record("train") == record
    save_json(tmp_path / "pipeline" / "stage_train.json", {**dataclasses.asdict(record), **change})
    assert experiment.record("train") is None


def test_damaged_checksums_are_computed_again(tmp_path):
    file = tmp_path / "a"
    file.write_text("x")
    stat = file.stat()
    for known in (4, [], [stat.st_size, stat.st_mtime_ns], [stat.st_size, stat.st_mtime_ns, 3],
                  [stat.st_size, stat.st_mtime_ns, "believe me"]):
        save_json(tmp_path / "digests.json", {str(file): known})
        assert Digests(tmp_path / "digests.json").of(file) == sha256(file)


def test_report_says_what_is_missing_and_shows_no_broken_picture(run, output):
    shutil.rmtree(output / "analysis" / "hx_plots")
    (output / "pipeline" / "stage_plot_hidden_states.json").unlink()
    run(output, "--only", "evaluate")
    page = (output / REPORT / PAGE_NAME).read_text()
    assert "the stage plot_hidden_states is not finished" in page
    for address in addresses(page):
        assert address.startswith("#") or (output / REPORT / unquote(address)).is_file(), address


def read_only(folder, pattern):
    """Return the table in the only file that matches a pattern."""
    (file,) = folder.glob(pattern)
    return pd.read_csv(file)


def test_report_has_the_numbers_of_the_stages(finished):
    """The numbers are computed here from the files, or are those of the preset."""
    rollouts = [len(np.load(file)) for file in finished.glob("rollouts/data/episode_*/lp.npy")]
    (variances,) = finished.glob("analysis/hx_analysis_precomp/pc_loading_variances_*.npy")
    shares = np.load(variances) / np.load(variances).sum()
    enough = next(number for number in range(1, 65) if shares[:number].sum() >= 0.95)
    quality = read_only(finished, "loss_over_time/loss_over_time.csv").query(
        "kind == 'psnr'").set_index(["step", "predictor"])
    step = max({1, 2, 5} & set(quality.index.get_level_values("step")))
    own, last = (quality.loc[(step, name)] for name in ("simulator", "last_frame"))
    influences = read_only(finished, "analysis/dyn_grad_comparison_data/agreement.csv")
    effects = read_only(finished, "analysis/interventions/effects.csv")
    effects = effects[effects["control"] == False]  # noqa: E712
    successes = effects[effects["outcome"] == "success"]
    largest = successes.loc[successes["effect"].abs().idxmax()]
    complete = read_only(finished, "analysis/attribution/checks/completeness.csv")["met"].all()
    deletion = read_only(finished, "analysis/attribution/checks/deletion.csv")
    better = deletion["above"][deletion["other"] == "random"].all()
    unseen = read_only(finished, "agent/**/log.csv")["val_mean_episode_rewards"].iloc[-1]
    held_out = read_only(finished, "simulator/**/progress.csv")["held_out_loss"].iloc[-1]
    played = json.loads((finished / "evaluation.json").read_text())
    expected = {
        "train_agent": f"return {unseen:.2f} on unseen levels",
        "evaluate": "{:.1f} % of {} levels solved ({:.1f} to {:.1f})".format(
            100 * played["success_rate"], played["num_episodes"],
            *(100 * limit for limit in played["success_interval"])),
        "render": "2 videos",
        "record": f"12 episodes, {sum(rollouts)} frames",
        "train_simulator": f"held-out loss {held_out:.4g}",
        "simulate": "6 samples", "simulate_at_random": "6 samples",
        "simulate_actions": "9 samples",
        "loss_over_time": f"PSNR is {own['mean']:.1f} ({own['low_95']:.1f} to "
                          f"{own['high_95']:.1f}) dB at step {step}, and {last['mean']:.1f} dB if "
                          "the last frame is repeated",
        "hidden_states": f"{enough} components hold 95 % of the variance",
        "env_states": "3 clusters",
        **{f"saliency{kind}": "map similarity is {:.2f} (36 maps)".format(np.mean([
               step for path in find(finished, [
               f"samples/informed_init/sample_*/specificity{kind}.json"])
               for step in json.loads(path.read_text())["correlations"] if step is not None]))
           for kind in ("", WITHOUT_ENV_GRADS)},
        "consistency": f"none of {len(influences)} influences is tested, because a test needs at "
                       "least 8 samples",
        "interventions": f"none of {len(effects)} effects can be claimed, because a claim needs "
                         "at least 19 controls; largest change of the success: "
                         "{}, {label}; controls {control_low:+.2f} to {control_high:+.2f}".format(
                             format_interval(*largest[["effect", "low_95", "high_95"]], "+.2f"),
                             **largest),
        "attribution_checks": f"{complete + better:d} of 2 checks of the attributions pass",
        "panel": "6 samples"}
    page = (finished / REPORT / PAGE_NAME).read_text()
    table = re.findall(r'<tr><td>(?:<a [^>]*>)?(\w+)(?:</a>)?</td>\s*<td>done</td>(?:<td class='
                       r'"number">[^<]*</td>){2}\s*<td[^>]*>(.*?)</td>', page)
    assert [name for name, _ in table] == NAMES
    assert {name: result for name, result in table if name in expected} == expected
    assert len(find(finished, ["report/saliency_*.png"])) == 3


def test_the_page_grows_while_stages_run(run, output, monkeypatch):
    pages = []
    write = run_pipeline.write_report

    def noted(*arguments):
        path = write(*arguments)
        pages.append(path.read_text())
        return path
    monkeypatch.setattr(run_pipeline, "write_report", noted)
    monkeypatch.setattr(run_pipeline, "SECONDS_BETWEEN_PAGES", 0)
    printed = run(output, "--only", "plot_agent", "plot_simulator", "--force")
    assert "index.html; it grows as stages finish" in printed
    counts = [re.findall(r"(\d+) of (\d+) stages are finished", page) for page in pages]
    places = [str(NAMES.index(name) + 1) for name in ("plot_agent", "plot_simulator")]
    assert counts == [*([(place, str(len(NAMES)))] for place in places), []]


def test_the_remaining_time_is_that_of_the_other_stages_on_this_machine():
    stages = all_stages(load_preset("tiny"), "tiny")[:3]
    first, second, third = (stage.name for stage in stages)
    usual = {first: 10, second: 20, third: 100}
    assert run_pipeline.progress(stages, [first, second], usual, 60.0) == (
        "2 of 3 stages are finished. About 3 minutes left.")  # 200 seconds
    assert run_pipeline.progress(stages, [first], {}, 60.0) == "1 of 3 stages are finished."
    assert not run_pipeline.progress(stages, [first, second, third], usual, 60.0)


def test_failed_checks_are_shown_as_failed(output):
    file = output / "loss_over_time" / "loss_over_time.csv"
    table = pd.read_csv(file)
    for kind, own, other in (("psnr", (9, 8, 10), (5, 4, 6)), ("ssim", (.1, 0, .2), (.5, .4, .6)),
                             ("policy_kl", (.3, .2, .4), (.5, .35, .7))):
        for predictor, numbers in (("simulator", own), ("last_frame", other),
                                   ("constant_policy", other)):
            rows = (table["kind"] == kind) & (table["predictor"] == predictor)
            table.loc[rows, ["mean", "low_95", "high_95"]] = numbers
    table.to_csv(file, index=False)
    found = {check.text.partition(" at step")[0]: check.passed for check in card_checks(output)}
    assert found["PSNR (dB)"] is True and found["SSIM"] is False
    assert found["policy KL (nats)"] is None  # the intervals overlap
    report = output / "analysis" / "attribution" / "checks" / "report.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("- [Do they add up?](#sum) Yes: yes, in all 2 cases.\n"
                      "- [Signs?](#objects) Right: in 1 of 2 cases; exceptions: block2, saw.\n"
                      "- [Slopes?](#slopes) Median 0.4.\n")
    assert attribution_checks(output) == [
        Check(True, "Do they add up? Yes: yes, in all 2 cases."),
        Check(False, "Signs? Right: in 1 of 2 cases."), Check(None, "Slopes? Median 0.4.")]


def test_report_folds_the_effects_that_are_not_claimed(run, output):
    file = comparison_store(output / "analysis" / "interventions").file_of("effects")
    effects = pd.read_csv(file)
    directions = effects.index[~effects["control"]]
    effects["claimed"] = effects.index.isin(directions[[1, 4]])
    effects["num_controls"] = 19
    effects.to_csv(file, index=False)
    run(output, "--report")
    page = (output / REPORT / PAGE_NAME).read_text()
    assert "analysis/interventions/effects.csv was changed after" in page
    assert "2 of 15 tested" not in page and "<td>changed</td>" in page
    run(output, "--accept", "interventions")
    run(output, "--only", "evaluate")
    section = (output / REPORT / PAGE_NAME).read_text().partition('id="interventions"')[2]
    shown, _, folded = section.partition("</section>")[0].partition("<details>")
    assert f"2 of {len(directions)} tested effects" in shown
    for part, rows in ((shown, directions[[1, 4]]), (folded, directions.delete([1, 4]))):
        labels = re.findall("<tr><td>(.*?)</td>", part)
        assert labels == [html.escape(label) for label in effects["label"][rows]]


# Figures of the documentation

@pytest.mark.slow
def test_pictures_show_what_the_pipeline_wrote(finished, tmp_path, capsys):
    assert pictures.main([str(finished), "--images_dir", str(tmp_path), "--component", "1"]) == 2
    assert "saliency_checks.png (this preset has no saliency_checks)" in capsys.readouterr().err
    expected = {picture.name for picture in pictures.PICTURES if not picture.browser}
    if chromium():
        expected |= {"panel.png", "attribution_page.png"}
    assert {path.name for path in tmp_path.iterdir()} == expected - {
        "saliency_checks.png", "imagined_worlds.gif"}
    (effects,) = finished.glob("analysis/interventions/effects.png")
    shown = np.asarray(Image.open(tmp_path / "interventions.png").convert("RGB")).astype(float)
    assert np.abs(shown - np.asarray(Image.open(effects).convert("RGB"))).mean() < 3


def numbers_in(text):
    return set(map(float, re.findall(r"\d+(?:\.\d+)?", text)))


def test_the_readme_has_numbers_of_the_documents():
    findings = (ROOT / "README.md").read_text(encoding="utf-8").partition(
        "## What was found")[2].partition("\n## ")[0]
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    quoted = numbers_in(re.sub(r"\]\([^)]*\)", "]", findings))  # without links
    assert len(quoted) > 10 and not quoted - numbers_in(documents)


FINDINGS = yaml.safe_load((ROOT / "pretrained" / "findings.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("section", FINDINGS)
def test_the_report_quotes_numbers_of_the_documents(section):
    page = page_of(load_preset("demo"))
    assert section in [shown.section for shown in page.sections]
    document = f"{FINDINGS[section]['document']}.md"
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    quoted = numbers_in(page.findings[section])
    assert not quoted - numbers_in(text)
    assert quoted or section == "attribution"


@pytest.mark.parametrize("section", ["saliency", "causes"])
def test_the_report_quotes_the_results_of_the_shipped_simulator(section):
    """Results of earlier simulators, in columns of their own, are not quoted."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = results.partition("## What depends on the simulator")[2].partition("\n- ")[0]
    shown = " ".join("|".join(line.split("|")[:2] + line.split("|")[4:])
                     if line.startswith("|") else line for line in text.splitlines())
    quoted = numbers_in(page_of(load_preset("demo")).findings[section])
    assert quoted and quoted <= numbers_in(shown)
