"""Training with several processes: equality with one process, division of work, and stopping."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import (
    FLOAT32,
    PATIENCE,
    ROOT,
    log_of,
    progress_of,
    start,
    tiny_config,
    tiny_policy,
    trained_run,
    wait_for,
)
from distributed_runs import (
    BATCHES,
    GRADIENTS,
    ROUNDS,
    STEPS_PER_UPDATE,
    UPDATES,
    WAYS,
    agent_arguments,
    make_all,
    parameters_of,
    simulator_arguments,
)

import train_gen_model
from agents.agent_file import agent_files
from agents.ppo import Collector, minibatches
from agents.run_folder import TrainSettings
from agents.training import RESUME_NAME, TrainingRun
from common import distributed
from common.config import load_settings
from common.distributed import Distributed
from common.errors import UserError
from common.shared_memory import SharedSum
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig
from generative.networks import LatentSampler
from generative.runs import SimulatorRunSettings, checkpoints
from generative.training import SimulatorTraining

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            "tests/distributed_runs.py"]


@contextlib.contextmanager
def by_torchrun(*argv):
    """Run ``distributed_runs.py`` with two processes, which are stopped at the end of the block."""
    process = subprocess.Popen([*TORCHRUN, *map(str, argv)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()  # torchrun then ends its processes
        process.wait(timeout=PATIENCE)


def rank_process(torchrun, rank):
    """Return the process id of a rank that torchrun started."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    (found,) = (int(child) for child in children if f"\0RANK={rank}\0".encode()
                in Path(f"/proc/{child}/environ").read_bytes())
    return found


@pytest.fixture(scope="module")
def by_one(agent_path, recording, tmp_path_factory):
    """The folder of ``make_all``, run with one process."""
    folder = tmp_path_factory.mktemp("one")
    assert make_all(folder, agent_path, recording / "data") == 0
    return folder


@pytest.fixture(scope="module")
def by_two(agent_path, recording, tmp_path_factory):
    """The folder of ``make_all`` and of sums of gradients, run with two processes, and the exit
    status, output and errors of torchrun."""
    folder = tmp_path_factory.mktemp("two")
    with by_torchrun("all", folder, agent_path, recording / "data") as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert all(file.exists() for file in sums_of(folder)), errors
    return folder, process.returncode, output, errors


def sums_of(folder):
    """Return the files with the sums of gradients of both processes."""
    return [folder / f"rank{rank}" for rank in range(2)]


@pytest.fixture(scope="module")
def summed(by_two):
    """Sums of gradients of each of two processes."""
    return [torch.load(file) for file in sums_of(by_two[0])]


def simulator_run(folder):
    (run,) = (folder / "results" / "t").iterdir()
    return run


def weights(path):
    return torch.load(path, weights_only=True)["model_state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", "feed-forward"])
def test_two_processes_train_the_agent_that_one_trains(kind, by_one, by_two):
    runs = [trained_run(folder / kind) for folder in (by_one, by_two[0])]
    one, two = map(log_of, runs)
    assert one["num_episodes"].iloc[1] > 0
    np.testing.assert_allclose(two[:2], one[:2], rtol=1e-5, atol=1e-5)
    first, second = (weights(agent_files(run)[0]) for run in runs)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-5)
    # Both play the same levels, with the same actions and ends of episodes.
    counted = [name for name in one if "episode" in name and name != "mean_episode_value"]
    pd.testing.assert_frame_equal(two[counted], one[counted])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulator", "spatial"])
def test_two_processes_train_the_simulator_that_one_trains(kind, by_one, by_two):
    one, two = (progress_of(simulator_run(folder / kind)) for folder in (by_one, by_two[0]))
    np.testing.assert_allclose(two[:1], one[:1], rtol=1e-3, atol=1e-5)
    own = [name for name in one if not name.startswith("held_out")]
    np.testing.assert_allclose(two[own][:2], one[own][:2], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-2)


SUMMED = (torch.zeros(3), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(()))


def test_late_processes_are_waited_for_before_the_sum_and_before_it_is_read():
    """Three processes have unequal shares of the columns, and at every point one of them is late.
    The second round uses other numbers in the same memory."""
    generator = torch.Generator().manual_seed(0)
    numbers = [[[torch.randn(like.shape, generator=generator) for like in SUMMED]
                for _ in range(3)] for _ in range(2)]
    barrier = threading.Barrier(3, timeout=PATIENCE)
    rows = torch.full((4, SharedSum.length(SUMMED)), torch.nan)

    def run(rank):
        def wait():
            time.sleep(.1 * (rank == 1))
            barrier.wait()
            time.sleep(.1 * (rank == 1))

        sums = SharedSum(rows, rank, SUMMED, wait)
        for each in numbers:
            sums.add_up(each[rank])

    expected = [[sum(parts) for parts in zip(*each)] for each in numbers]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, sums in zip(numbers, expected):
        for own in each:
            torch.testing.assert_close(own, sums, rtol=1e-6, atol=1e-6)
        for own in each[1:]:
            torch.testing.assert_close(own, each[0], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_added_up_in_any_layout_and_where_a_process_has_none(way, summed):
    for number in range(ROUNDS):
        parts = [[parameter.grad for parameter in parameters_of(rank, number)] for rank in range(2)]
        names = list(GRADIENTS)
        if number == ROUNDS - 1:
            names, parts = names[1:], [own[1:] for own in parts]
        for found in summed:
            for name, total, *own in zip(names, found[way, number], *parts, strict=True):
                present = [gradient for gradient in own if gradient is not None]
                expected = sum(present) if present else None
                assert (total is None) == (expected is None), name
                if present:
                    torch.testing.assert_close(total, expected, rtol=0, atol=0, msg=name)


@pytest.mark.slow
def test_gradients_lie_in_shared_memory_where_all_processes_see_it(summed):
    for found in summed:
        assert [found[way] for way in WAYS] == [True, False, False]


@pytest.mark.slow
def test_processes_leave_together_and_then_no_signal_stops_them(by_two):
    _, status, _, errors = by_two
    assert status == 0, errors


@pytest.mark.slow
def test_one_process_alone_writes_and_speaks(by_two):
    folder, _, output, errors = by_two
    assert output.count("training on cpu in float32 by 2 processes") == 4
    assert output.count("finished after") == 4 and errors.count("KL to the teacher") <= 4
    for kind in ("recurrent", "feed-forward"):
        run = trained_run(folder / kind)
        assert len(list(run.glob("events.out.tfevents.*"))) == 1
        assert len(agent_files(run)) == UPDATES and (run / "model_card.md").is_file()


def test_processes_play_levels_of_their_own_and_together_those_of_one():
    policy, config = tiny_policy(), EnvConfig("bigfish", "easy")  # an idle fish is soon eaten
    whole, *parts = (Collector(config, policy, FLOAT32, 8, 5, 1, world=world)
                     for world in (Distributed(), Distributed(0, 2), Distributed(1, 2)))
    levels = [[set() for _ in range(8)] for _ in range(2)]
    for step in range(120):
        for seen, workers in zip(levels, ([whole], parts)) if step % 10 == 0 else ():
            states = [state for worker in workers for state in worker.env.get_state()]
            for each, state in zip(seen, states):
                each.add(int(LevelState.parse(state).step["current_level_seed"]))
        frames = [np.concatenate([worker.env.observe().frames for worker in workers])
                  for workers in ([whole], parts)]
        assert np.array_equal(*frames)
        for worker in (whole, *parts):
            worker.env.act(np.full(len(worker.hidden), 4, dtype=np.int32))
    assert levels[0] == levels[1]
    first, second = (set().union(*half) for half in (levels[1][:4], levels[1][4:]))
    assert len(first) > 4 and len(second) > 4 and not first & second


@pytest.mark.parametrize("recurrent", [True, False])
def test_processes_divide_the_minibatches_of_one(recurrent):
    config = tiny_config(recurrent=recurrent, mini_batch_size=100)

    def steps(rank, size):
        return [[index for micro_batch in step for index in micro_batch.tolist()] for step in
                minibatches(config, torch.Generator().manual_seed(3), Distributed(rank, size))]

    own = config.n_envs // 2
    for whole, *parts in zip(steps(0, 1), steps(0, 2), steps(1, 2)):
        found = [index // own * config.n_envs + index % own + rank * own if not recurrent
                 else index + rank * own for rank, part in enumerate(parts) for index in part]
        assert sorted(found) == sorted(whole)
    if recurrent:
        assert any(step == [] for step in steps(0, 2))


def test_a_part_of_a_batch_gets_the_draws_that_it_gets_in_the_whole():
    logits = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))

    def draws(logits, part):
        draw = LatentSampler("sample", torch.Generator().manual_seed(1), part)
        return torch.stack([draw(logits) for _ in range(3)], dim=1)

    whole = draws(logits, None)
    for part in (slice(0, 2), slice(2, 5)):
        assert torch.equal(draws(logits[part], (part, 5)), whole[part])


def settings(**changes):
    return TrainSettings("t", "tiny", EnvConfig("fruitbot", "easy"), tiny_config(**changes), 0,
                         STEPS_PER_UPDATE, 1, 3, "", "float32", 1)


def unconnected(size):
    """Return rank 0 of `size` processes without the others; broadcasts return its own values."""
    world = Distributed(0, size)
    world.broadcast = lambda value: value
    return world


def test_numbers_of_processes_that_cannot_share_are_refused(agent_path, recording, tmp_path,
                                                            monkeypatch, capsys):
    with pytest.raises(UserError, match="3 processes cannot share the 8 environments of the "
                                        "parameter set 'tiny' evenly"):
        TrainingRun(tmp_path / "run", settings(), FLOAT32, world=Distributed(0, 3))

    compared = []

    @contextlib.contextmanager
    def four():
        world = unconnected(4)
        world.require_same = compared.append
        yield world

    monkeypatch.setattr(distributed, "init_distributed", four)
    assert train_gen_model.main(simulator_arguments(tmp_path, agent_path, recording / "data")) == 2
    assert "4 processes cannot share a batch of 3 windows" in capsys.readouterr().err
    assert {"agent_file", "seed", "training"} <= compared[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "size", "words"), [
    (1, 1, None), (1, 2, "1 process and is resumed with 2: levels"), (2, 2, None),
    (2, 1, "2 processes and is resumed with 1: levels")])
def test_a_run_that_another_number_of_processes_saved_says_so(saved_by, size, words, by_one, by_two,
                                                              tmp_path, caplog):
    folder = {1: by_one, 2: by_two[0]}[saved_by]
    agent = shutil.copytree(trained_run(folder / "recurrent"), tmp_path / "agent")
    simulator = shutil.copytree(simulator_run(folder / "simulator"), tmp_path / "simulator")
    caplog.clear()
    TrainingRun(agent, load_settings(agent, TrainSettings), FLOAT32, world=unconnected(size))
    SimulatorTraining(simulator, load_settings(simulator, SimulatorRunSettings), FLOAT32,
                      unconnected(size))
    said = [message for message in caplog.messages if "was saved by" in message]
    files = (agent / RESUME_NAME, checkpoints(simulator)[-1]) if words else ()
    assert len(said) == len(files)
    assert all(message.startswith(f"{file} was saved by {words}")
               for message, file in zip(said, files))


@pytest.mark.slow
def test_processes_with_other_settings_are_refused_in_a_sentence(agent_path, tmp_path, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # normally started by torchrun
    processes = []
    for rank in range(2):
        for name, value in {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                            }.items():
            monkeypatch.setenv(name, str(value))
        processes.append(start("train.py", *agent_arguments(tmp_path, agent_path), "--seed",
                               str(7 + rank)))
    errors = "".join(process.communicate(timeout=PATIENCE)[1] for process in processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert "but seed is 7 in process 0 and 8 in process 1" in errors
    assert errors.count("\n") == 1, errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_stop_when_torchrun_is_killed(agent_path, tmp_path):
    """The system may kill torchrun if a job uses too much memory; the processes save first."""
    process = subprocess.Popen(
        [*TORCHRUN, "agent", *agent_arguments(tmp_path, agent_path), "--num_timesteps", "1000000"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(len(path.read_text().splitlines()) > 1
                             for path in tmp_path.rglob("log.csv")), process)
        ranks = [rank_process(process, rank) for rank in range(2)]
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + PATIENCE
    try:
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert (trained_run(tmp_path) / RESUME_NAME).is_file()
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_one_process_goes_on(by_one, agent_path, recording,
                                                                    tmp_path, capsys):
    with by_torchrun("simulator", *simulator_arguments(tmp_path, agent_path,
                                                       recording / "data")) as process:
        wait_for(lambda: any(len(path.read_text().splitlines()) > 1
                             for path in tmp_path.rglob("progress.csv")), process)
        os.kill(rank_process(process, 1), signal.SIGUSR1)
        output, errors = process.communicate(timeout=PATIENCE)
    batches = int(re.search(r"stopped after (\d+) batches", output)[1])
    assert f"exitcode  : {128 + signal.SIGUSR1}" in errors
    run = simulator_run(tmp_path)
    assert torch.load(checkpoints(run)[-1], weights_only=True)["batches"] == batches < BATCHES
    assert train_gen_model.main(["--agent_file", str(agent_path), "--resume", str(run),
                                 "--device", "cpu"]) == 0
    assert "was saved by 2 processes and is resumed with 1: levels" in capsys.readouterr().err
    expected = simulator_run(by_one / "simulator")
    np.testing.assert_allclose(progress_of(run), progress_of(expected), rtol=1e-3, atol=1e-2)
    assert "ranks" not in torch.load(checkpoints(run)[-1], weights_only=True)
