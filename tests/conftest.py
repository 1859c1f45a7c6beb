"""Shared fixtures and helpers: real Procgen and real networks, on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import record
from agents.agent_file import load_agent, save_agent, weights_sha256
from agents.config import load_agent_config
from agents.networks import ClearEmbedder, ImpalaEmbedder, NatureEmbedder, Policy, build_policy
from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter
from common.config import save_settings
from common.devices import Compute
from common.files import TEMPORARY_SUFFIX, save_json, sha256
from common.locks import FolderLock
from common.parameters import ParameterSet
from generative import prior
from generative.config import SimulatorConfig, TrainingConfig
from generative.losses import LossScales
from generative.published import save_published
from generative.runs import SimulatorRunSettings, checkpoint_name, open_simulator
from generative.simulator import Simulator
from interventions import resampling
from interventions.controls import matched_sets
from interventions.hidden_states_folder import hidden_state_results
from interventions.projector import Projector, matrix_files
from interventions.tracking import NUM_PERMUTATIONS, Tracker

# No test simulates a power failure, and fsync would make thousands of small files slow.
os.fsync = lambda file: None

# Worlds are generated in fewer steps than by default, which takes a third of the time.
DEFAULT_STEPS = {name: getattr(prior, name) for name in ("_WORLD_STEPS", "_START_STEPS")}
prior._WORLD_STEPS, prior._START_STEPS = 2, 2

_save_figure = Figure.savefig


def save_coarsely(figure, path, **more):
    """Save a figure with few pixels and no layout, which takes a fifth of the time."""
    figure.set_layout_engine("none")
    _save_figure(figure, path, **{**more, "dpi": 40})


Figure.savefig = save_coarsely

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
FLOAT32 = Compute(torch.device("cpu"), bfloat16=False)
SHIPPED_AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
SHIPPED_SIMULATOR = ROOT / "pretrained" / "coinrun_hard_simulator" / "model.pt"
SHIPPED = "--agent_file", SHIPPED_AGENT, "--model_file", SHIPPED_SIMULATOR  # flags
CHANGE, LOW, HIGH = 6, 1, 7  # step at which counting_policy changes its action, and both actions
PATIENCE = 600  # seconds after which a test that hangs fails; no machine is this slow
# Test files that take longest, longest first. They run first, so that no worker is still busy with
# one of them when the others are idle.
LONGEST_FIRST = ("test_slurm", "test_pipeline", "test_training", "test_maze_table",
                 "test_distributed", "test_pages_common", "test_world_card", "test_dream_page",
                 "test_maze_page", "test_gen_model_training", "test_optimise_start",
                 "test_attribution_page", "test_fidelity", "test_beyond", "test_probe_atlas",
                 "test_maze_channels", "test_world_training", "test_world_samples",
                 "test_panel_page", "test_saliency_checks", "test_decisions", "test_state_analyses",
                 "test_watching", "test_interventions", "test_loss_over_time", "test_results",
                 "test_memory_lesions", "test_public_names", "test_maze_steering",
                 "test_sparse_features", "test_influences", "test_worlds", "test_commands",
                 "test_maze_worlds", "test_explained_failure", "test_scan", "test_foreign_data",
                 "test_spatial", "test_scripts", "test_realism", "test_editing", "test_failing",
                 "test_attribution_scripts", "test_coin", "test_simulator", "test_psychometrics",
                 "test_maze_behaviour", "test_hidden_analysis", "test_replaced_objects",
                 "test_level_labels")


def pytest_collection_modifyitems(items):
    """Run the longest files first."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """Search for garbage rarely, and not among the imported modules, which takes a tenth of the
    time of the tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def golden_weight(key: str, shape: list[int]) -> torch.Tensor:
    """Return the weights of a parameter for which the golden numbers were computed."""
    rng = np.random.RandomState(zlib.crc32(key.encode()))
    x = rng.standard_normal(shape).astype(np.float32)
    if len(shape) >= 2:
        x = x / np.sqrt(np.prod(shape[1:]))
    elif key.endswith("weight"):
        x = 1 + 0.1 * x
    else:
        x = 0.1 * x
    return torch.from_numpy(x.astype(np.float32))


def module_of_layout(layout: dict[str, list[int]]) -> torch.nn.Module:
    """Return a module with parameters of these names and shapes, registered in this order."""
    root = torch.nn.Module()
    for key, shape in layout.items():
        *parents, name = key.split(".")
        module = root
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, torch.nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    assert [key for key, _ in root.named_parameters()] == list(layout)
    return root


def golden_projector() -> Projector:
    arrays = np.load(GOLDEN / "projector.npz", allow_pickle=False)
    return Projector(*(torch.from_numpy(arrays[name]) for name in (
        "hx_mu", "hx_std", "pcomponents", "pc_loading_variances", "ica_unmixing_matrix",
        "ica_mixing_matrix")))


def save_projector(folder, projector):
    """Save the matrices of a projector as results of 12 episodes of the agent of ``agent_path``,
    and return the folder."""
    folder.mkdir()
    save_json(hidden_state_results(folder, 12).settings_file,
              {"agent_sha256": weights_sha256(tiny_policy())})
    for name, path in matrix_files(folder, 12).items():
        np.save(path, getattr(projector, name).numpy())
    return folder


def write_recording(path, lengths):
    """Write random rollouts to a folder with `RolloutWriter`, and return the episodes."""
    rng = np.random.default_rng(0)
    writer, episodes = RolloutWriter(path, {"kind": "test"}), []
    for number, length in enumerate(lengths):
        steps = pd.DataFrame({"level_seed": number, "episode_step": np.arange(length),
                              "done": 0, "reward": 0.0, "value": rng.normal(size=length),
                              "action": rng.integers(0, 15, length)})
        steps.loc[length - 1, "done"] = 1
        episodes.append(EpisodeArrays(
            rng.integers(1, 256, (length, 64, 64, 3), dtype=np.uint8),
            rng.normal(size=(length + 1, 64)).astype(np.float32),
            rng.normal(size=(length, 15)).astype(np.float32), steps))
        writer.add(number, episodes[-1])
    return episodes


def random_frames(number, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, 64, 64, 3), dtype=np.uint8)


def simulator_settings(name, agent_file, data, training=None, simulator=None, **changes):
    """Return the settings of a run of train_gen_model.py on 6 episodes with a parameter set."""
    parameters = ParameterSet(name)
    return dataclasses.replace(SimulatorRunSettings(
        "t", str(agent_file), sha256(agent_file), "", str(data), 4, "float32", 6,
        dataclasses.replace(parameters.get(SimulatorConfig), **(simulator or {})),
        dataclasses.replace(parameters.get(TrainingConfig),
                            **{"log_interval": 2, **(training or {})}),
        LossScales()), **changes)


def progress_of(folder: Path) -> pd.DataFrame:
    """Return the log of a simulator run without the columns that depend on the machine."""
    return pd.read_csv(folder / "progress.csv").drop(
        columns=["wall_time", "frames_per_second", "waiting_for_data"])


def tiny_config(**changes):
    """Return the agent's parameter set `tiny`, with changes."""
    return dataclasses.replace(load_agent_config("tiny"), **changes)


FULL = (16, 32, 32)  # numbers of channels of the published IMPALA networks


def tiny_policy(seed: int = 0, recurrent: bool = True, architecture: str = "impala",
                channels: tuple[int, int, int] = (4, 8, 8)) -> Policy:
    """Return an untrained agent that takes different actions in different states. IMPALA networks
    have few channels, which takes a tenth of the time."""
    torch.manual_seed(seed)
    policy = build_policy(architecture, 64, recurrent, learned_initial_state=True)
    if architecture == "impala" and channels != FULL:
        policy.embedder = ImpalaEmbedder(policy.embedder.output_dim, channels)
        policy.embedder.fc.weight.data *= 4  # so that the state depends on the frame
    with torch.no_grad():
        policy.fc_policy.weight *= 100
    return policy


def counting_policy():
    """Return an agent whose unit 0 counts the steps of an episode by h' = 0.9 h + 0.1, from h = 0.
    It takes action LOW before step CHANGE and action HIGH from then on, whatever it sees. Its
    embedder is fast."""
    policy = tiny_policy(architecture="nature")
    with torch.no_grad():
        policy.init_hx[0] = 0
        gru = policy.gru.gru
        for gate, bias in ((0, 0.0), (1, float(np.log(9))), (2, 20.0)):  # r, z = 0.9, n = 1
            row = gate * policy.hidden_state_size
            for weight in (gru.weight_ih_l0, gru.weight_hh_l0):
                weight[row] = 0
            gru.bias_ih_l0[row], gru.bias_hh_l0[row] = bias, 0
        policy.fc_policy.weight.zero_()
        policy.fc_policy.bias.fill_(-2000)
        policy.fc_policy.bias[LOW] = 0
        policy.fc_policy.weight[HIGH, 0], policy.fc_policy.bias[HIGH] = 1000, -500
    return policy


def small_policy(architecture: str = "impala", recurrent: bool = True) -> Policy:
    """Return a small untrained agent: 4, 6 and 5 channels in IMPALA, and a GRU of 12 units."""
    torch.manual_seed(3)
    embedder = {"impala": lambda: ImpalaEmbedder(16, (4, 6, 5)),
                "nature": lambda: NatureEmbedder(16),
                "clear": lambda: ClearEmbedder(16)}[architecture]()
    policy = Policy(embedder, 12 if recurrent else None)
    with torch.no_grad():
        policy.fc_policy.weight *= 100
    return policy


def track(levels, seed: int, num_permutations: int = NUM_PERMUTATIONS) -> pd.DataFrame:
    """Return the tracking scores of levels, each given as arguments of ``Tracker.add``."""
    levels = list(levels)
    tracker = Tracker(levels[0][1].shape, seed, num_permutations)
    for level in levels:
        tracker.add(*level)
    return tracker.table()


def scrub(targets, channels, outcomes, std, seed: int,
          num_sets: int = resampling.NUM_SETS) -> resampling.Scrubbing:
    """Scrub channels and matched random sets in each target, as ``maze.scrubbing`` does."""
    changes = resampling.channel_changes(targets, std)
    random, _, matched = matched_sets(changes, channels, num_sets, seed)
    sets = [tuple(channels), *random]
    found = np.stack([resampling.scrub_target(target, sets, [seed, place])
                      for place, target in enumerate(targets)])
    return resampling.collect_scrubbing([target.level for target in targets], found, outcomes, sets,
                                        resampling.sizes_moved(changes, sets), matched)


def planted_policy(channel: int, colour: tuple[float, float, float]) -> Policy:
    """Return an untrained agent whose later layers read a single channel of
    ``embedder.block2.res1.resadd``. The channel is a linear function of a pixel's colour,
    max-pooled over cells. Unit u of ``embedder.fc`` is the channel at cell u of 8 x 8, and the
    weights of ``fc_policy`` are 0."""
    torch.manual_seed(0)
    policy = build_policy("impala", 64, False, learned_initial_state=False)
    embedder = policy.embedder
    with torch.no_grad():
        for block, kept in ((embedder.block1, 0), (embedder.block2, channel)):
            for unit in (block.res1, block.res2):  # they neither read nor change `kept`
                for conv in (unit.conv1, unit.conv2):
                    conv.weight[kept] = conv.weight[:, kept] = 0
        embedder.block1.conv.weight[0] = 0
        embedder.block2.conv.weight[:, 0] = embedder.block2.conv.weight[channel] = 0
        embedder.block1.conv.weight[0, :, 1, 1] = torch.tensor(colour)
        embedder.block2.conv.weight[channel, 0, 1, 1] = 1
        embedder.block3.conv.weight.zero_()
        embedder.block3.conv.weight[0, channel, 1, 1] = 1
        for unit in (embedder.block2.res2, embedder.block3.res1, embedder.block3.res2):
            unit.conv2.weight.zero_()
        embedder.fc.weight.zero_()
        embedder.fc.weight[:64, :64] = torch.eye(64)  # unit u: cell u of channel 0
        policy.fc_policy.weight.zero_()
    return policy


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Create objects that several test files use, once for all processes of pytest-xdist.

    ``shared(name, make)`` returns the result of ``make`` for a new folder. The first process
    that asks for it calls ``make``; the others wait.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def make_once(name, make):
        folder, result = root / f"shared_{name}", root / f"shared_{name}.pickle"
        with open(root / f"shared_{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())
    return make_once


@pytest.fixture(scope="session")
def panel_export(shared):
    from page_exports import export_panel_page
    return shared("panel", export_panel_page)


@pytest.fixture(scope="session")
def maze_export(shared):
    from page_exports import export_maze_page
    return shared("maze", export_maze_page)


@pytest.fixture(scope="session")
def attribution_export(shared):
    from page_exports import export_attribution_page
    return shared("attribution", export_attribution_page)


@pytest.fixture(scope="session")
def browser():
    """A headless browser; every page is opened in its own context."""
    from tools.browser import running_browser
    with running_browser() as running:
        yield running


@pytest.fixture(scope="session")
def agent_path(shared) -> Path:
    def make(folder):
        save_agent(folder / "model_0.pth", tiny_policy(), {})
        return folder / "model_0.pth"
    return shared("agent", make)


def record_arguments(agent_path: Path, logdir: Path, num_episodes: int, *more: str) -> list[str]:
    return ["--model_file", str(agent_path), "--logdir", str(logdir), "--num_episodes",
            str(num_episodes), "--param_name", "tiny", "--env_name", "fruitbot", "--seed", "3",
            "--precision", "float32", "--device", "cpu", *more]


STEPS_PER_UPDATE = 8 * 32  # of the parameter set "tiny"


def train_arguments(logdir: Path, num_updates: int, *more: str) -> list[str]:
    """Flags of train.py for short runs with the parameter set "tiny"."""
    return ["--exp_name", "t", "--env_name", "fruitbot", "--param_name", "tiny", "--seed", "4",
            "--num_timesteps", str(num_updates * STEPS_PER_UPDATE), "--num_checkpoints", "8",
            "--val_interval", "3", "--precision", "float32", "--device", "cpu",
            "--logdir", str(logdir), *more]


def trained_run(logdir: Path) -> Path:
    """Return the folder of the only run in a log folder of train.py."""
    (folder,) = (logdir / "procgen" / "fruitbot" / "t").iterdir()
    return folder


def log_of(run: Path) -> pd.DataFrame:
    """Return the log of a run without wall times."""
    return pd.read_csv(run / "log.csv").drop(columns="wall_time")


@pytest.fixture(scope="session")
def recording(agent_path, shared) -> Path:
    """A folder with a finished recording of 12 episodes, more than are played in parallel."""
    def make(folder):
        assert record.main(record_arguments(agent_path, folder, 12)) == 0
        return folder
    return shared("recording", make)


@pytest.fixture(scope="session")
def hard_recording(shared) -> RolloutFolder:
    """Six episodes of hard levels of CoinRun with worlds: the shipped agent's own play."""
    def make(folder):
        assert record.main(record_arguments(
            SHIPPED_AGENT, folder, 6, "--env_name", "coinrun", "--distribution_mode", "hard",
            "--no_videos", "--worlds", "--no_action_noise")) == 0
        return folder / "data"
    return RolloutFolder(shared("hard_recording", make))


@pytest.fixture(scope="session")
def shipped_simulator() -> Simulator:
    """The shipped simulator of CoinRun, which tests must not modify."""
    return open_simulator(SHIPPED_SIMULATOR, SHIPPED_AGENT, SimulatorConfig(), FLOAT32)


BEYOND_STEPS = 5
BEYOND_FLAGS = ("--num_views", "2", "--num_evaluations", "8", "--num_steps", str(BEYOND_STEPS),
                "--num_redrawn", "2", "--seed", "3", "--precision", "float32", "--device", "cpu",
                "--unseen")


@pytest.fixture(scope="session")
def beyond_study(hard_recording, shared) -> Path:
    """A finished study of two views of ``hard_recording``, of generative.beyond."""
    from generative import beyond

    def make(folder):
        assert beyond.main([*map(str, (*SHIPPED, "--data_dir", hard_recording.path, "--output_dir",
                                       folder / "beyond", *BEYOND_FLAGS))]) == 0
        return folder / "beyond"
    return shared("beyond_study", make)


@pytest.fixture(scope="session")
def noisy_recording(shared) -> RolloutFolder:
    """Ten episodes of hard levels of CoinRun with worlds. Half of them have action noise, so that
    some end in a death."""
    def make(folder):
        assert record.main(record_arguments(
            SHIPPED_AGENT, folder, 10, "--env_name", "coinrun", "--distribution_mode", "hard",
            "--seed", "8", "--no_videos", "--worlds", "--action_noise_share", "0.5")) == 0
        return folder / "data"
    return RolloutFolder(shared("noisy_recording", make))


@pytest.fixture
def all_steps(monkeypatch):
    """Generate worlds in as many steps as by default."""
    for name, steps in DEFAULT_STEPS.items():
        monkeypatch.setattr(prior, name, steps)


@pytest.fixture(scope="module")
def coarse_figures():
    """Draw few steps of rotations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.state_plots.SPACE_FRAMES", 3)
        yield


def save_simulator(folder: Path, agent_path: Path, simulator: Simulator | None = None) -> Path:
    """Write a simulator and its settings; by default, an untrained simulator with the parameter set
    `tiny` around an agent, whose weights are large, so that different starts look and end
    differently."""
    parameters = ParameterSet("tiny")
    if simulator is None:
        torch.manual_seed(1)
        simulator = Simulator(parameters.get(SimulatorConfig), load_agent(agent_path))
        with torch.no_grad():
            for name, weight in simulator.named_parameters():
                if weight.ndim > 1 and not name.startswith("agent."):
                    weight *= 2
    path = folder / checkpoint_name(0, 0)
    save_published(path, simulator)
    save_settings(folder, SimulatorRunSettings(
        "t", str(agent_path), sha256(agent_path), "", "", 0, "float32", 0, simulator.config,
        parameters.get(TrainingConfig), LossScales()))
    return path


@pytest.fixture(scope="session")
def simulator_file(agent_path, shared) -> Path:
    """Checkpoint of a simulator around the agent of ``agent_path``."""
    return shared("simulator", lambda folder: save_simulator(folder, agent_path))


@pytest.fixture
def simulator(simulator_file, agent_path) -> Simulator:
    """The simulator of ``simulator_file``, which a test may modify."""
    return open_simulator(simulator_file, agent_path, SimulatorConfig(), FLOAT32)


@pytest.fixture(scope="session")
def published_agent(shared) -> Path:
    """An agent file in the published layout, with the weights of the golden numbers."""
    def make(folder):
        layout = json.loads((GOLDEN / "checkpoint_layout.json").read_text())["agent"]
        path = folder / "model_80412672.pth"
        torch.save({"model_state_dict": {key: golden_weight(key, shape)
                                         for key, shape in layout.items()},
                    "optimizer_state_dict": {}}, path)
        return path
    return shared("published_agent", make)


@pytest.fixture(scope="session")
def matrices(shared) -> Path:
    """A folder with the matrices of the golden projector, for the agent of ``agent_path``."""
    return shared("matrices", lambda folder: save_projector(folder / "m", golden_projector()))


@pytest.fixture(scope="session")
def box_agent(shared) -> Path:
    """An agent that runs and jumps to the right in CoinRun. Its value is a constant minus a term
    that grows with the visible boxes. It reads a single channel of the last map, and the later
    layers are linear in that channel."""
    def make(folder):
        # A linear function of a pixel's colour, from 0 to 1, that is above 0 for boxes alone.
        policy = planted_policy(3, (5.2, -6.7, -1.2))
        with torch.no_grad():
            policy.embedder.block1.conv.bias[0] = -0.06
            for block in (policy.embedder.block2, policy.embedder.block3):
                block.conv.bias.zero_()
            policy.embedder.fc.bias.zero_()
            policy.fc_value.weight.fill_(-0.5)
            policy.fc_value.bias.fill_(5)
            policy.fc_policy.bias[[7, 8]] += 30
        save_agent(folder / "model_0.pth", policy)
        return folder / "model_0.pth"
    return shared("box_agent", make)


@pytest.fixture(scope="session")
def box_run(box_agent, shared) -> Path:
    """A folder with a recording of ``box_agent``, features of ``block3`` and attributions."""
    from attribution import attribute, features

    def make(folder):
        assert record.main([
            "--model_file", str(box_agent), "--logdir", str(folder), "--num_episodes", "10",
            "--param_name", "tiny", "--env_name", "coinrun", "--distribution_mode", "hard",
            "--seed", "0", "--precision", "float32", "--device", "cpu", "--no_action_noise",
            "--no_videos"]) == 0
        common = ["--agent_file", str(box_agent), "--data_dir", str(folder / "data"), "--device",
                  "cpu"]
        assert features.main([*common, "--layers", "block3", "--num_observations", "90",
                              "--nmf_features", "1", "--output_dir",
                              str(folder / "features")]) == 0
        assert attribute.main([
            *common, "--features_dir", str(folder / "features"), "--num_trajectories", "10",
            "--num_steps", "24", "--output_dir", str(folder / "attribution")]) == 0
        return folder
    return shared("box_run", make)


@contextlib.contextmanager
def figures_drawn():
    """Collect the figures that are saved in this context by file name, so that tests can check
    what they show."""
    figures, save = {}, Figure.savefig

    def keep(figure, path, **more):
        name = re.sub(rf"{re.escape(TEMPORARY_SUFFIX)}_\w+", "", Path(path).name)
        figures[name.removeprefix(".")] = figure
        save(figure, path, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield figures


def colours_of(artists):
    """Return the colours of lines or bars as "#RRGGBB"."""
    return [to_hex(artist.get_facecolor() if isinstance(artist, Patch) else artist.get_color())
            .upper() for artist in artists]


def assert_same(a, b):
    """Assert that two structures of tensors are equal."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def bytes_of_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, also of hidden ones, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file()}


@contextlib.contextmanager
def killed_at(owner: object, method: str, call: int) -> Iterator[None]:
    """Simulate a kill of the process: raise KeyboardInterrupt in the n-th call of a method."""
    calls, act = itertools.count(1), getattr(owner, method)

    def count(*args, **more):
        # A killed process does not run the finalizers of its locks.
        if sys._getframe(1).f_code.co_name != "_release" and next(calls) == call:
            raise KeyboardInterrupt
        return act(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, count)
        yield


@contextlib.contextmanager
def at_work_in(folder: Path) -> Iterator[str]:
    """Lock a folder in another process, and yield the words that name this process in errors."""
    context = multiprocessing.get_context("fork")
    is_locked = context.Event()

    def lock():
        own = FolderLock(folder)
        is_locked.set()
        own.check()
        time.sleep(PATIENCE)

    process = context.Process(target=lock)
    process.start()
    try:
        assert is_locked.wait(PATIENCE)
        yield f"process {process.pid} on {socket.gethostname()} is using {folder}"
    finally:
        process.kill()
        process.join()


def wait_for(condition, process):
    """Wait until a condition holds; fail if the process ends first."""
    end = time.monotonic() + PATIENCE
    while True:
        has_ended = process.poll() is not None  # before the condition, which its end may fulfil
        if condition():
            return
        assert not has_ended, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def start(script: str, *argv: str) -> subprocess.Popen:
    """Start a script in its own process, which obeys SIGINT even if the tests run in the
    background of a shell, where SIGINT is ignored."""
    return subprocess.Popen([sys.executable, script, *argv], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def read_video(path):
    """Return the frames of an mp4 file (T, H, W, 3)."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def refusal(main, argv, capsys) -> str:
    """Return the error message with which a script refuses its arguments."""
    capsys.readouterr()
    begin = "error: "
    try:
        status = main([str(word) for word in argv])
    except SystemExit as stop:  # argparse puts the script's name first
        status, begin = stop.code, r"\S+: error: "
    assert status == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert re.match(begin, last) and not any(line.startswith("error") for line in before)
    return last
