"""The recipes of docs/your_agent.md, run as they stand there, at small sizes."""

import importlib
import re
import shlex

import numpy as np
import pytest
import torch
from conftest import ROOT, random_frames
from foreign_networks import CleanAgent, seeded

pytestmark = pytest.mark.slow

SMALL = {"--num_episodes": "2", "--max_batches": "1"}
DOCUMENT = (ROOT / "docs" / "your_agent.md").read_text()


def section(title):
    """Return the blocks of code in a section of the document, as pairs of language and text."""
    [text] = [part for part in DOCUMENT.split("\n## ") if part.startswith(title)]
    return re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)


def run_commands(block):
    """Run the lines of an sh block with smaller numbers."""
    for line in block.splitlines():
        _, *words = shlex.split(line)
        for flag, value in SMALL.items():
            if flag in words:
                words[words.index(flag) + 1] = value
        words = [str(ROOT / word) if word.startswith("pretrained/") else word for word in words]
        name = words.pop(0).removesuffix(".py")
        name = words.pop(0) if name == "-m" else name
        words += [] if name in NO_DEVICE else ["--device", "cpu"]
        words += ["--interpreting_params_name", "tiny"] if name == "train_gen_model" else []
        assert importlib.import_module(name).main(words) == 0, line


NO_DEVICE = ("agents.import_policy", "agents.hdf5", "attribution.page")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cleanrl(folder):
    torch.save(seeded(CleanAgent()).state_dict(), "agent.cleanrl_model")
    [(_, commands)] = section("I have a CleanRL agent")
    run_commands(commands)
    assert list(folder.rglob("index.html")) and list(folder.rglob("model_epoch*.pt"))


def test_stable_baselines(folder):
    sb3 = pytest.importorskip("stable_baselines3")
    (_, commands), (_, code) = section("I have a Stable-Baselines3 agent")
    exec(code.replace('"pretrained/', f'"{ROOT}/pretrained/'), variables := {})
    assert variables["frame"].shape == (64, 64, 3)
    model = sb3.PPO("CnnPolicy", variables["env"], device="cpu")
    model.save("ppo.zip")
    run_commands(commands)
    assert (folder / "sb3_rollouts" / "data" / "recording.json").is_file()


def test_module(folder):
    (_, code), (_, commands) = section("I have a module")
    (folder / "my_agent.py").write_text("import torch\ntorch.manual_seed(0)\n" + code)
    run_commands(commands)
    assert list(folder.rglob("model_epoch*.pt"))


def test_frames(folder):
    pytest.importorskip("h5py")
    np.savez("episodes.npz", frames=random_frames(40), actions=np.arange(40) % 15,
             rewards=np.zeros(40), ends=np.arange(40) % 20 == 19)
    (_, importing), (_, sharing) = section("I have frames and actions")
    run_commands(importing)
    run_commands(sharing)
    original, copy = (sorted((folder / name / "data").rglob("*.npy")) for name in ("foreign",
                                                                                   "copy"))
    assert [path.read_bytes() for path in original] == [path.read_bytes() for path in copy]
