"""run_pipeline.py: skips what is valid, says why it runs what it runs, survives being killed."""

import fcntl
import html
import re
import shutil
import signal
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from conftest import start, wait_for
from output_numbers import numbers

import run_pipeline
from common.parameters import ParameterSet
from interventions.files import InterventionsFolder
from pipeline.presets import load_preset
from pipeline.records import Experiment, find
from pipeline.report import PAGE_NAME, REPORT
from pipeline.stages import all_stages

NAME = "<img src=x onerror=alert(1)> & 'it'"
STAGES = all_stages(load_preset("tiny"), ParameterSet("tiny-whole"), NAME)
NAMES = [stage.name for stage in STAGES]


def arguments(folder, *more):
    return ["--preset", "tiny", "--output_dir", str(folder), "--exp_name", NAME, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An output folder that no test may change."""
    folder = tmp_path_factory.mktemp("pipeline") / "output"
    assert run_pipeline.main(arguments(folder)) == 0
    return folder


@pytest.fixture
def output(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "output")


@pytest.fixture
def run(capsys):
    """Runs the pipeline and gives what it said; it must end well."""
    def run(folder, *more):
        capsys.readouterr()
        assert run_pipeline.main(arguments(folder, *more)) == 0
        return capsys.readouterr().out
    return run


@pytest.fixture
def refused(capsys):
    """Runs the pipeline, which must refuse, and gives its one sentence."""
    def run(folder, *more):
        capsys.readouterr()
        assert run_pipeline.main(arguments(folder, *more)) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]
    return run


def started(output, stage):
    """A process that has begun to make a stage anew."""
    process = start("run_pipeline.py", *arguments(output, "--only", stage, "--force"))
    wait_for(lambda: Experiment(output).record(stage).status == "running", process)
    return process


def planned(text):
    """The stages that a dry run would run or continue, with the reasons."""
    return dict(re.findall(r"^(\w+) would (?:run|go on): (.*)$", text, re.MULTILINE))


def made(text):
    """The stages that were run or continued, with the reasons."""
    return dict(re.findall(r"^(\w+): (?:runs|continues), because (.*)$", text, re.MULTILINE))


def test_dry_run_runs_nothing_and_tells_all(run, tmp_path):
    text = run(tmp_path / "new", "--dry_run")
    assert list(planned(text)) == NAMES
    assert set(planned(text).values()) == {"it has not been run yet"}
    assert text.count("{agent} stands for the file that train_agent will write") == 1
    for stage in STAGES:
        assert f"python {stage.script.replace('.', '/')}.py " in text
    assert not list(tmp_path.iterdir())


def test_second_run_skips_everything_wherever_the_folder_lies(run, output):
    before = numbers(output)
    records = [path.read_bytes() for path in sorted(output.glob("pipeline/stage_*.json"))]
    text = run(output)
    assert not made(text) and text.count(": skipped, valid since") == len(NAMES)
    assert [path.read_bytes() for path in sorted(output.glob("pipeline/stage_*.json"))] == records
    assert numbers(output) == before


@pytest.mark.parametrize(("changes", "expected"), [
    ({"analysis.saliency.sigma": 3.0},
     dict.fromkeys(("saliency", "saliency_without_env_grads"),
                   "the parameter analysis.saliency.sigma was 5.0 and is 3.0")),
    ({"analysis.env_h.n_clusters": 2},
     {"env_states": "the parameter analysis.env_h.n_clusters was 3 and is 2"}),
    ({"record.max_samples": 5},
     {"simulate": "the parameter record.max_samples was 6 and is 5",
      "simulate_at_random": "the parameter record.max_samples was 6 and is 5"}),
    ({"gen_model.lr": 0.01},
     {"train_simulator": "the parameter gen_model.lr was 0.0005 and is 0.01"}),
    ({"analysis.loss_over_time.num_batches": 3},
     {"loss_over_time": "the parameter analysis.loss_over_time.num_batches was 2 and is 3"})])
def test_a_changed_parameter_invalidates_what_depends_on_it(run, finished, monkeypatch, changes,
                                                            expected):
    monkeypatch.setattr(run_pipeline, "ParameterSet", lambda name: ParameterSet(name, changes))
    found = planned(run(finished, "--dry_run"))
    direct = {name: why for name, why in found.items() if not why.startswith("it reads what")}
    assert direct == expected
    readers = set(expected)
    for stage in STAGES:  # whoever reads what these write, and so on
        sources = {*stage.needs, *(("train_simulator",) if "{simulator}" in stage.files else ())}
        if sources & readers:
            readers.add(stage.name)
    assert set(found) == readers


def test_a_changed_byte_invalidates_what_reads_it(run, output):
    run(output)  # which remembers all checksums
    changed = "rollouts/data/episode_00003/ob.npy"
    content = bytearray((output / changed).read_bytes())
    content[-100] ^= 1
    (output / changed).write_bytes(content)
    found = planned(run(output, "--dry_run"))
    assert found["record"] == f"its output {changed} is not as it left it"
    assert {name for name, why in found.items() if "record writes" in why} == {
        stage.name for stage in STAGES if "record" in stage.needs}
    found = planned(run(output, "--from", "train_simulator", "--dry_run"))
    assert found["train_simulator"] == f"the input {changed} has changed"
    assert "evaluate" not in found


def test_a_removed_output_is_made_again_and_what_reads_it_stays_valid(run, output, finished):
    removed = "samples/informed_init/sample_00002/grad_hx_value.npy"
    (output / removed).unlink()
    episode = "rollouts/data/episode_00007"
    shutil.rmtree(output / episode)
    assert made(run(output)) == {
        "record": f"its output {episode}/hx.npy is missing",
        "saliency": f"its output {removed} is missing"}
    assert numbers(output, finished) == numbers(finished)


@pytest.mark.parametrize(("stage", "pattern", "number", "asked"), [
    ("train_agent", "agent/**/model_512.pth", 1, signal.SIGKILL),
    ("record", "rollouts/data/episode_*", 3, signal.SIGKILL),
    ("record", "rollouts/data/episode_*", 3, signal.SIGTERM),
    ("train_simulator", "simulator/**/progress.csv", 1, signal.SIGKILL),
    ("simulate_actions", "samples/manual_actions/sample_*", 2, signal.SIGKILL),
    ("saliency", "samples/informed_init/sample_*/saliency_*.json", 6, signal.SIGKILL)])
def test_killed_or_stopped_stage_goes_on_to_the_same_numbers(run, output, finished, stage, pattern,
                                                             number, asked):
    process = started(output, stage)
    wait_for(lambda: len(list(output.glob(pattern))) >= number, process)
    process.send_signal(asked)
    _, errors = process.communicate()
    record = Experiment(output).record(stage)
    if asked == signal.SIGTERM:
        assert process.returncode == 128 + asked
        assert record.status == "stopped" and f"{stage} was stopped" in errors
    else:
        assert record.status == "running"
    how = "stopped" if asked == signal.SIGTERM else "interrupted"
    again = [stage, "plot_agent"] if stage == "train_agent" else [stage]  # in the same folder
    assert made(run(output, "--only", *again))[stage] == f"an earlier run was {how}"
    assert numbers(output, finished) == numbers(finished)
    assert Experiment(output).record(stage).status == "done"


def test_a_killed_pipeline_takes_its_stage_along(output):
    process = started(output, "train_agent")
    wait_for(lambda: list(output.glob("agent/**/log.csv")), process)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    with open(Experiment(output).stage_lock_file) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < end, "the stage runs on"
                time.sleep(0.1)
    assert not list(output.glob("agent/**/model_1024.pth")), "the stage ran to its end"


def test_only_from_and_force_choose_stages(run, output):
    assert made(run(output, "--only", "evaluate", "render", "--force")) == {
        "evaluate": "of --force", "render": "of --force"}
    last = NAMES[-2:]
    found = planned(run(output, "--from", last[0], "--force", "--dry_run"))
    assert list(found) == last
    text = run(output, "--only", "record", "--dry_run")
    assert "evaluate is left: not asked for" in text
    assert "record would be skipped" in text


def test_a_stage_that_fails_says_so_and_goes_on_later(run, output, refused, capsys):
    (checkpoint,) = output.glob("simulator/**/*.pt")
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(b"damaged")
    assert run_pipeline.main(arguments(output, "--only", "simulate_at_random")) == 2
    said = capsys.readouterr()
    assert "simulate_at_random failed (exit status 2)" in said.err
    assert "simulate_at_random" in said.out and "failed" in said.out
    assert Experiment(output).record("simulate_at_random").status == "failed"
    checkpoint.write_bytes(good)
    assert made(run(output)) == {
        "simulate_at_random": "the input {simulator} has changed"}


def test_what_is_needed_must_be_there(refused, tmp_path):
    assert "run train_agent first" in refused(tmp_path / "new", "--only", "evaluate")
    assert ("simulate reads what record writes, which is not finished; run record first"
            in refused(tmp_path / "new", "--only", "simulate"))


def test_mistakes_are_one_sentence(refused, tmp_path, finished):
    assert "no stage 'recrod' (did you mean 'record'?)" in refused(tmp_path, "--from", "recrod")
    assert "no preset 'demoo' (did you mean 'demo'?)" in refused(tmp_path, "--preset", "demoo")
    assert "there is no file nowhere.pth; see --agent_file" in refused(
        tmp_path, "--agent_file", "nowhere.pth")
    assert "--exp_name is in the names of folders" in refused(tmp_path, "--exp_name", "a/b")
    assert "holds the experiment of the preset 'tiny'" in refused(finished, "--preset", "demo")
    (tmp_path / "thesis.tex").touch()
    assert "holds other data" in refused(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_at_a_time_are_refused(refused, output):
    with open(output / "pipeline" / "pipeline.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run_pipeline.py is at work" in refused(output, "--only", "evaluate")


def test_every_preset_and_set_has_its_stages():
    for name in ("demo", "full", "tiny", "defaults", "demo"):
        preset = load_preset(name)
        stages = all_stages(preset, ParameterSet(preset.parameters), name)
        names = [stage.name for stage in stages]
        assert len(set(names)) == len(names)
        for number, stage in enumerate(stages):
            assert set(stage.needs) <= set(names[:number]), stage.name
            flags = __import__(stage.script, fromlist=["parser"]).parser()
            flags.parse_args(list(stage.argv))
        assert ("train_agent" in names) == (preset.agent_training is not None)
    given = load_preset("full", agent_file=Path(__file__))
    assert given.agent_training is None and given.simulator_training.batch_size == 28
    assert load_preset("demo", agent_file=Path(__file__)).model_file is None


# The report

def addresses(page):
    return [html.unescape(each) for each in re.findall(r'(?:src|href)="([^"]+)"', page)]


def test_every_link_of_the_report_resolves(finished):
    page = (finished / REPORT / PAGE_NAME).read_text()
    found = addresses(page)
    files = [each for each in found if not each.startswith("#")]
    assert len(files) > 40
    for address in files:
        assert not address.startswith(("/", "http", "file")), address
        assert (finished / REPORT / unquote(address)).is_file(), address
    for address in set(found) - set(files):
        assert f'id="{address[1:]}"' in page
    assert "missing" not in re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL)


def test_a_hostile_name_is_no_markup(finished):
    page = (finished / REPORT / PAGE_NAME).read_text()
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; " in page
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

    Reader().feed(page)
    assert len(tags) > 100
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert all(attributes["src"].startswith(("../", "saliency_")) for tag, attributes in tags
               if tag in ("img", "video"))
    assert not any(tag == "script" for tag, _ in tags)


def test_report_says_what_is_missing_and_shows_no_broken_picture(run, output):
    shutil.rmtree(output / "analysis" / "hx_plots")
    (output / "pipeline" / "stage_plot_hidden_states.json").unlink()
    run(output, "--only", "evaluate")
    page = (output / REPORT / PAGE_NAME).read_text()
    assert "the stage plot_hidden_states is not finished" in page
    for address in addresses(page):
        assert address.startswith("#") or (output / REPORT / unquote(address)).is_file(), address


def test_report_has_the_numbers_of_the_stages(finished):
    page = (finished / REPORT / PAGE_NAME).read_text()
    for stage in STAGES:
        assert html.escape(stage.result(finished)) in page, stage.name
        assert Experiment(finished).record(stage.name).result == stage.result(finished)
    assert len(find(finished, ["report/saliency_*.png"])) == 3


def test_report_begins_with_the_answers(finished):
    head = (finished / REPORT / PAGE_NAME).read_text().partition("</nav>")[0]
    record = Experiment(finished).record
    for name in ("evaluate", "loss_over_time", "behaviours", "consistency", "interventions"):
        assert record(name).result in head
    assert "the agent trained here" in head and "the simulator trained here" in head
    assert "short training" not in head


def test_report_folds_the_effects_that_are_not_claimed(run, output):
    file = InterventionsFolder(output / "analysis" / "interventions").effects_file
    effects = pd.read_csv(file)
    directions = effects.index[~effects["control"]]
    effects["claimed"] = effects.index.isin(directions[[1, 4]])
    effects.to_csv(file, index=False)
    run(output, "--only", "evaluate")
    section = (output / REPORT / PAGE_NAME).read_text().partition('id="interventions"')[2]
    shown, _, folded = section.partition("</section>")[0].partition("<details>")
    assert f"2 of {len(directions)} effects are claimed" in shown
    for part, rows in ((shown, directions[[1, 4]]), (folded, directions.delete([1, 4]))):
        cells = re.findall("<tr><td>(.*?)</td><td>(.*?)</td>", part)
        assert cells == [(html.escape(effects["label"][row]),
                          effects["outcome"][row].replace("_", " ")) for row in rows]
