"""Public names of the packages: lazy imports, checks of frames, examples, and the notebook."""

import ast
import contextlib
import dataclasses
import doctest
import importlib
import io
import json
import pkgutil
import re
import runpy
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, tiny_policy

from agents import RolloutFolder, as_frames, as_images, load_agent, record
from common.errors import UserError
from envs import EnvConfig
from generative import imagine, load_simulator

PACKAGES = ("agents", "envs", "interventions", "generative", "attribution")
AGENT = "pretrained/coinrun_hard/model.pth"
NOTEBOOK = ROOT / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def folder(shared):
    """A folder with the shipped agents and simulators, and a recording of two episodes."""
    def make(path):
        (path / "pretrained").symlink_to(ROOT / "pretrained")
        record(str(ROOT / AGENT), EnvConfig("coinrun", "hard"), str(path / "recording"),
               num_episodes=2)
        return path
    return shared("public_names", make)


def exported() -> dict[str, object]:
    """Return the public objects by name."""
    return {name: getattr(importlib.import_module(package), name) for package in PACKAGES
            for name in importlib.import_module(package).__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_lists_of_public_names_agree(package):
    """Python reads one list, ``from … import *`` another, and type checkers a third."""
    module = importlib.import_module(package)
    for_types = [node for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text()))
                 if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.name: node.module for block in for_types for node in block.body
             for alias in node.names}
    assert names.keys() == set(module.__all__) <= set(dir(module))
    for name, home in names.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    assert not names.keys() & {found.name for found in pkgutil.iter_modules(module.__path__)}
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'recrod'"):
        _ = module.recrod


def test_packages_import_their_modules_on_first_use():
    code = (f"import sys, {', '.join(PACKAGES)}\n"
            "heavy = {'torch', 'pandas', 'procgen', 'matplotlib'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
            "from agents import load_agent\n"
            "assert 'agents.agent_file' in sys.modules and 'generative.runs' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


FRAMES = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)


@pytest.mark.parametrize("frames", [
    FRAMES, np.moveaxis(FRAMES, -1, 1), FRAMES / 255, np.float32(FRAMES / 255), list(FRAMES),
    FRAMES[:, ::-1][:, ::-1], torch.tensor(FRAMES), torch.tensor(FRAMES).movedim(-1, 1) / 255])
def test_all_forms_of_frames_are_understood(frames):
    images = as_images(frames, 1)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, torch.tensor(FRAMES).permute(0, 3, 1, 2) / 255)
    np.testing.assert_array_equal(as_frames(frames), FRAMES)
    assert as_images(frames[0]).shape == (3, 64, 64)
    policy = tiny_policy()
    torch.testing.assert_close(policy(frames).logits, policy(FRAMES).logits)


def test_images_keep_gradients():
    images = torch.rand(1, 3, 64, 64, requires_grad=True)
    tiny_policy()(images).values.sum().backward()
    assert images.grad.abs().max() > 0


@pytest.mark.parametrize(("frames", "message"), [
    (np.float32(FRAMES), "float frames must lie between 0 and 1, not between 0 and 255; frames "
                         "from 0 to 255 must be uint8, or be divided by 255"),
    (FRAMES / 128 - 1, "not between -1 and 0.99.*; undo the normalisation"),
    (np.int64(FRAMES), "must be uint8 from 0 to 255, or float from 0 to 1, not int64"),
    (np.uint16(FRAMES), "not int64"), (FRAMES > 3, "not bool"), (FRAMES.astype(str), "not <U3"),
    (np.full(FRAMES.shape, np.nan), "not between nan and nan"),
    (FRAMES[0], r"the shape \(N, 64, 64, 3\) or \(N, 3, 64, 64\), not \(64, 64, 3\)"),
    (FRAMES[..., 0], r"not \(2, 64, 64\)"), (FRAMES[:, :60], r"not \(2, 60, 64, 3\)"),
    (FRAMES[None], r"not \(1, 2, 64, 64, 3\)")])
def test_errors_say_what_frames_must_be(frames, message):
    with pytest.raises(UserError, match=message):
        as_images(frames, 1)


def test_recordings_of_notebooks_are_those_of_the_script(folder):
    """Paths are strings, and the script continues the recording instead of refusing it."""
    import record as script
    argv = ["--agent_file", str(ROOT / AGENT), "--logdir", str(folder / "script"), "--no_videos",
            "--num_episodes", "2", "--no_action_noise", "--precision", "float32", "--device", "cpu",
            "--env_name", "coinrun", "--distribution_mode", "hard", "--seed", "0"]
    assert script.main(argv) == 0
    ours, scripts = (RolloutFolder(folder / name) for name in ("recording", "script/data"))
    assert ours.description() == scripts.description()
    assert ours.sha256() == scripts.sha256()


def test_the_first_imagined_step_shows_the_last_initial_frame(folder):
    """Frames are in their order, and the actions of a recording fit its rows."""
    simulator = load_simulator(str(ROOT / "pretrained/coinrun_hard_simulator/model.pt"),
                               str(ROOT / AGENT))
    episode = RolloutFolder(str(folder / "recording")).episode(0)
    row, num_steps = 12, 6
    actions = episode.steps["action"].to_numpy()
    initial, truth = episode.frames[row - 2:row + 1], episode.frames[row:row + num_steps]
    dream = imagine(simulator, initial, num_steps=num_steps,
                    actions=actions[row - 1:row - 1 + num_steps])
    frame = dream.frames[0].astype(float)
    own, *others = (np.abs(frame - other).mean() for other in (truth[0], initial[0], truth[1]))
    assert own < 0.7 * min(others)
    both = imagine(simulator, np.stack([initial, episode.frames[:3]]), num_steps=num_steps,
                   actions=actions[row - 1:row - 1 + num_steps])
    assert np.abs(both.frames[0].astype(int) - dream.frames).max() <= 2  # other rounding
    for frames, chosen, message in (
            (initial[:2], None, "starts from 3 frames, not 2"),
            (initial, [0.5] * num_steps, "whole numbers of the shape"),
            (initial, [15] * num_steps, "from 0 to 14, not 15 to 15")):
        with pytest.raises(UserError, match=message):
            imagine(simulator, frames, num_steps=num_steps, actions=chosen)


def test_examples_of_public_names_run(folder, tmp_path, monkeypatch):
    """The published ``run``, which starts scripts for minutes, has its own tests."""
    (tmp_path / "pretrained").symlink_to(ROOT / "pretrained")
    (tmp_path / "recording").symlink_to(folder / "recording")
    monkeypatch.chdir(tmp_path)
    policy = load_agent(AGENT)
    simulator = load_simulator("pretrained/coinrun_hard_simulator/model.pt", AGENT)
    names = {**exported(), "np": np, "torch": torch, "policy": policy, "simulator": simulator,
             "recording": RolloutFolder("recording")}
    runner = doctest.DocTestRunner()
    for name, value in exported().items():
        if name == "run":
            continue
        example = doctest.DocTestParser().get_doctest(value.__doc__, dict(names), name, name, 0)
        assert 2 <= len(example.examples) <= 3, name
        output = []
        assert runner.run(example, out=output.append).failed == 0, "".join(output)


@pytest.mark.slow
def test_the_example_study_claims_that_the_hidden_coin_lowers_the_value(tmp_path, folder):
    """Fails if the coin stays in the frame, or frames and hidden states are not of one step."""
    recording = record(str(ROOT / AGENT), EnvConfig("coinrun", "hard"),
                       str(tmp_path / "recording"), num_episodes=20)
    study = runpy.run_path(str(ROOT / "docs" / "example_study.py"))
    options = study["HiddenCoinOptions"](
        agent_file=ROOT / AGENT, data_dir=tmp_path / "recording", output_dir=tmp_path / "study")
    table = study["measure"](options).set_index("condition")
    recorded = np.concatenate([recording.steps(number)["value"] for number in range(20)])
    drawn = np.load(tmp_path / "study" / "conditions" / "drawn.npy")
    assert np.abs(drawn - recorded).min(axis=1).max() < 2e-5
    assert table.loc["hidden", "claimed"] and table.loc["hidden", "effect"] < -0.1
    assert not table["claimed"].drop("hidden").any()
    assert (tmp_path / "study" / "effects.png").exists()
    few = dataclasses.replace(options, output_dir=tmp_path / "few", data_dir=folder / "recording")
    with pytest.raises(UserError, match=r"at least 10 levels or starts, not [012]"):
        study["measure"](few)


def test_the_notebook_uses_public_names_only():
    allowed = {"numpy", "matplotlib.pyplot", "torch", "os", "pathlib"}
    for cell in code_cells():
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.module not in allowed:
                assert node.module in PACKAGES
                assert {alias.name for alias in node.names} <= {
                    *importlib.import_module(node.module).__all__}


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"]
            if cell["cell_type"] == "code"]


def test_the_notebook_has_stored_outputs():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr"
                   for output in outputs)
    text = json.dumps([{kind: value for kind, value in output.get("data", {}).items()
                        if kind != "image/png"} or output.get("text") for output in outputs])
    assert not re.search(r"/(work|home|root|tmp|usr)/|steps/s|it/s|0x[0-9a-f]{6}", text)
    assert NOTEBOOK.stat().st_size < 1_000_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    (tmp_path / "pretrained").symlink_to(ROOT / "pretrained")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in code_cells():
        assert len(cell["source"]) <= 20
        printed = [output["text"] for output in cell["outputs"] if "text" in output]
        with contextlib.redirect_stdout(io.StringIO()) as out, plt.rc_context():
            exec("".join(cell["source"]), names)
        assert bool(out.getvalue()) == bool(printed)
    plt.close("all")
    assert names["error"] < 0.02  # completeness of the attributions to the value
    difference = (names["after"] - names["before"]).abs().sum(dim=-1) / 2
    assert difference.shape == (32, 11) and 0.05 < difference.max() < 0.5
    assert names["change"][names["most"]].min() > 0.1  # without saws, the agent expects more
    for (recorded, imagined, ends), frames, dream in zip(
            names["lines"], names["rows"][::2], names["rows"][1::2]):
        assert np.abs(recorded[0] - imagined[0]) < 1 and ends[-1] > 0.5 > ends[:8].max()
        assert np.abs(frames.astype(float) - dream).mean() < 30  # from 0 to 255
    assert names["dreams"].frames.shape == (5, 40, 64, 64, 3)
    assert 0.5 < names["same"] < 1
