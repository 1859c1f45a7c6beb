"""Every script: start by path, from other folders, and next to folders named like packages."""

import argparse
import json
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
from conftest import PATIENCE, ROOT, tiny_policy

import evaluate
import saliency_experiments
from agents.agent_file import AgentOrigin, save_agent
from analysis import steering_vectors
from attribution import edit_agent
from common.cli import Parser, set_up_logging
from common.errors import UserError
from common.files import save_json
from common.options import parse
from common.parameters import ParameterSet
from interventions.vectors import save_vectors, vectors_of_pairs

# Older names, used in a README of the experiment, which are links to scripts.
LINKS = {
    **{f"{name}_{part}.py": f"analysis/{name}_{part}.py"
       for name in ("hidden_analysis", "env_h_analysis", "bottleneck_vec_analysis")
       for part in ("precompute", "plotting")},
    "loss_over_time_exp.py": "loss_over_time_experiment.py",
    "record_informinit_gen_samples.py": "record_gen_samples.py",
    "saliency_exps.py": "saliency_experiments.py",
    "sml_analysis_precompute.py": "analysis/combined_agent_env_hx_analysis_precompute.py"}
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in (ROOT, *(ROOT / room for room in ("agents", "analysis", "maze",
                                                    "attribution", "generative")))
    for path in folder.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
FLAGS_FILE = ROOT / "tests" / "data" / "flags.json"
ROOMS = ("agents", "analysis", "attribution", "common", "generative", "interventions", "maze",
         "pipeline", "benchmarks", "tests")


def test_every_older_name_is_a_link_to_its_script():
    found = {str(path.relative_to(ROOT)): os.readlink(path) for path in ROOT.glob("*.py")
             if path.is_symlink()}
    assert found == LINKS
    assert all((ROOT / name).is_file() for name in LINKS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_all_of_its_flags(script, monkeypatch, capsys):
    """Scripts are run by path, with their own folder first on the import path, as in Python."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(sys, "path", [str((ROOT / script).resolve().parent), *sys.path])
    parsers = []
    explain = Parser.print_help
    monkeypatch.setattr(Parser, "print_help",
                        lambda self, file=None: (parsers.append(self), explain(self, file)))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert stop.value.code == 0
    (parser,) = parsers
    assert all(action.help for action in parser._actions)
    output = capsys.readouterr()
    assert "usage:" in output.out and not output.err
    flags = describe(parser)
    if os.environ.get("UPDATE_FLAGS"):
        FLAGS_FILE.write_text(json.dumps({**json.loads(FLAGS_FILE.read_text()), script: flags},
                                         indent=1, sort_keys=True) + "\n")
    assert flags == json.loads(FLAGS_FILE.read_text())[script]


def describe(parser):
    """Describe each flag, hidden ones included: required or default, numbers of values, choices.

    ``UPDATE_FLAGS=1 pytest -n 0 tests/test_scripts.py`` writes the descriptions to a file.
    """
    result = {}
    for action in parser._actions:
        default = ("required" if action.required else "from parameters"
                   if "(default: from the parameter set)" in action.help else
                   f"default {action.default}".replace(f"{ROOT}/", ""))
        result[" ".join(action.option_strings) or action.dest] = ", ".join(filter(None, [
            default, action.nargs is not None and f"values {action.nargs}",
            action.choices and f"of {' '.join(map(str, action.choices))}",
            action.help == argparse.SUPPRESS and "hidden"]))
    return result


def test_scripts_start_from_anywhere(tmp_path):
    for name in (*ROOMS, "analysis/interventions"):  # outputs may have names of packages
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    started = {
        "by its older name": (ROOT, ["hidden_analysis_precompute.py"]),
        "by path, from elsewhere": (tmp_path, [str(ROOT / "maze" / "levels.py")])}
    processes = {name: subprocess.Popen([sys.executable, *words, "--help"], cwd=folder, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                 for name, (folder, words) in started.items()}
    for name, process in processes.items():
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "usage:" in output, (name, errors)


FRAMES = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)


def evaluated(path, agent):
    return evaluate.main(["--model_file", str(agent), "--num_episodes", "2", "--env_name",
                          "fruitbot", "--device", "cpu", "--output", str(path)])


def edited(path, agent):
    return edit_agent.main(["--agent_file", str(agent), "--layer", "block3", "--features", "0",
                            "--features_dir", "nowhere", "--output", str(path)])


def steered(path, agent):
    return steering_vectors.main(["--agent_file", str(agent), "--split", "action=up", "--data_dir",
                                  "nowhere", "--vector_file", str(path)])


def save_edited(path, policy):
    save_agent(path, policy, origin=AgentOrigin(edited_from="another"))


@pytest.mark.parametrize(("run", "save_own", "flag"), [
    (evaluated, lambda path, _: path.write_text('{"agent_sha256": "a", "success_rate": 1}'),
     "--output"),
    (edited, save_edited, "--output"),
    (steered, lambda path, policy: save_vectors(path, list(vectors_of_pairs(
        policy, ["gru"], FRAMES, FRAMES[::-1], [(0, 1), (1, 2)], "noise").values())),
     "--vector_file")])
def test_a_script_replaces_only_files_of_its_own(run, save_own, flag, agent_path, tmp_path, capsys):
    path = tmp_path / "file.npz"
    for content in (b"a thesis", agent_path.read_bytes()):
        path.write_bytes(content)
        assert run(path, agent_path) == 2
        assert (f"error: {path} exists, and this script did not write it; choose another {flag}, "
                "or give --overwrite") in capsys.readouterr().err
        assert path.read_bytes() == content
    save_own(path, tiny_policy())
    run(path, agent_path)
    assert "did not write it" not in capsys.readouterr().err
    if run is evaluated:
        assert json.loads(path.read_text())["num_episodes"] == 2
    for make in (lambda: path.symlink_to(agent_path), lambda: os.mkfifo(path)):
        path.unlink()
        make()
        with pytest.raises(SystemExit) as stop:
            run(path, agent_path)
        assert stop.value.code == 2
        assert f"{path} is a folder, a link, a pipe or a device" in capsys.readouterr().err
        assert path.is_symlink() or not path.is_file()


@pytest.mark.parametrize(("recorded", "more", "expected", "reason"), [
    ({"samples": "tiny", "data": "demo"}, [], "tiny", "with which {}/samples was recorded"),
    ({"generated": "tiny", "data": "demo"}, [], "tiny", "{}/generated/informed_init was"),
    ({"samples": None, "data": "demo"}, [], "demo", "{}/data was recorded"),
    ({"samples": "tiny"}, ["--interpreting_params_name", "demo"], "demo", ""),
    ({"samples": None, "data": None}, [], "defaults", "{0}/samples and {0}/data name none"),
    ({}, [], "defaults", "no set and no data are given"),
    ({"data": "tinny"}, [], None, "{}/data/recording.json names the parameter set 'tinny', which "
     "interpreting_configs.yml does not have (did you mean 'tiny'?)")])
def test_scripts_use_the_parameter_set_recorded_with_their_data(recorded, more, expected, reason,
                                                                tmp_path, capsys):
    argv = ["--agent_file", "a.pth", "--model_file", "m.pt", *more]
    for name, parameter_set in recorded.items():
        argv += [{"samples": "--samples_dir", "generated": "--generated_data_dir",
                  "data": "--data_dir"}[name], str(tmp_path / name)]
        folder = tmp_path / name / ("informed_init" if name == "generated" else "")
        save_json(folder / "recording.json", {
            "seed": 0, **({"interpreting_params_name": parameter_set} if parameter_set else {})})
    if expected is None:
        with pytest.raises(UserError) as error:
            _ = parse(saliency_experiments.SaliencyOptions, argv).parameters
        assert reason.format(tmp_path) in str(error.value)
        return
    set_up_logging("info")
    parameters = parse(saliency_experiments.SaliencyOptions, argv).parameters
    assert parameters.name == expected
    assert parameters.flattened("analysis") == ParameterSet(expected).flattened("analysis")
    lines = capsys.readouterr().err.splitlines()
    if more:
        assert lines == []
    else:
        assert len(lines) == 1 and lines[0].startswith(f"parameters: set {expected}, ")
        assert reason.format(tmp_path) in lines[0]
