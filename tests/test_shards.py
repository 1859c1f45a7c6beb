"""Work divided among jobs: the shards' notes, and recordings of real rollouts."""

import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, at_work_in, bytes_of_files, killed_at, record_arguments

import record
from agents import rollout_files
from agents.rollout_files import EpisodeArrays, RolloutFolder, RolloutWriter, join_recording
from common.errors import UserError
from common.shards import Shard, ShardNotes


@pytest.fixture
def run(agent_path, tmp_path):
    """Records 12 episodes like the fixture ``recording``, to a folder that is given back."""
    def run_script(*more, status=0):
        assert record.main(record_arguments(agent_path, tmp_path / "shards", 12, *more)) == status
        return tmp_path / "shards" / "data"
    return run_script


@pytest.mark.parametrize(("batch_size", "parts"), [(1, 1), (1, 3), (4, 3), (7, 2), (4, 9)])
def test_whole_batches_are_dealt_to_one_shard_each(batch_size, parts):
    items = list(range(25))
    batches = [items[begin:begin + batch_size] for begin in range(0, 25, batch_size)]
    dealt = [Shard(part + 1, parts).of(items, batch_size) for part in range(parts)]
    assert sorted(item for own in dealt for item in own) == items
    for own in dealt:  # the division of what a shard has is that of the whole
        for begin in range(0, len(own), batch_size):
            assert own[begin:begin + batch_size] in batches


def test_shards_give_the_recording_of_one_run(recording, run, agent_path, tmp_path, capsys):
    data = run("--shard", "2/3")
    assert {path.name for path in data.glob("episode_*")} == {
        f"episode_{number:05d}" for number in (1, 4, 7, 10)}
    with killed_at(RolloutWriter, "add", 3):
        run("--shard", "3/3", status=130)
    assert not (data / "idx_to_episode.csv").exists()
    for more, words in (
            (["--join"], f"{data} lacks shards 1/3, 3/3, which have not been run to the end; run "
                         "them with --shard 1/3 and so on"),
            ([], "lacks shards 1/3, 3/3"),
            (["--shard", "1/4"], f"{data} holds shards of 3, to which --shard 1/4 does not belong; "
                                 "choose another --logdir, or delete the folder"),
            (["--shard", "1/3", "--seed", "4"], "holds shard 2/3 with another seed"),
            (["--shard", "1/3", "--num_episodes", "13"], "with another num_episodes"),
            (["--shard", "3/3", "--overwrite"], "throw away what shards have written")):
        before = bytes_of_files(data)
        run(*more, status=2)
        lines = capsys.readouterr().err.splitlines()
        assert words in lines[-1]
        assert bytes_of_files(data) == before
    run("--shard", "3/3")
    run("--shard", "1/3")
    run("--join", "--num_episodes", "11", status=2)
    assert "have recorded 12 episodes, not 11" in capsys.readouterr().err
    unjoined = shutil.copytree(data, tmp_path / "unjoined")
    run("--join")
    assert bytes_of_files(data) == bytes_of_files(recording / "data")
    run("--join")
    run("--shard", "2/3")  # repeated by a batch system after all
    run()
    assert bytes_of_files(data) == bytes_of_files(recording / "data")
    assert RolloutFolder(unjoined).index()["episode"].nunique() == 12  # whoever reads it joins it
    assert bytes_of_files(unjoined) == bytes_of_files(data)
    run("--join", "--num_episodes", "13", status=2)
    assert "holds no shards that could be joined" in capsys.readouterr().err


@pytest.mark.slow
def test_a_shard_that_is_killed_is_repeated(recording, run, agent_path, tmp_path):
    for part in (2, 1):
        data = run("--shard", f"{part}/3")
    begun = subprocess.Popen([sys.executable, "record.py", *record_arguments(
        agent_path, data.parent, 12, "--shard", "3/3")], cwd=ROOT, stdout=subprocess.DEVNULL)
    while len(list(data.glob("episode_*"))) < 9:
        assert begun.poll() is None
        time.sleep(0.005)
    begun.kill()
    begun.wait()
    run("--join", status=2)
    run("--shard", "3/3")
    run("--join")
    assert bytes_of_files(data) == bytes_of_files(recording / "data")


def test_shards_keep_away_from_other_work(run, tmp_path, capsys):
    data = tmp_path / "shards" / "data"
    data.mkdir(parents=True)
    with at_work_in(data) as words:  # a run without shards
        run("--shard", "1/3", status=2)
        assert words in capsys.readouterr().err
    assert [path.name for path in data.iterdir()] == [".lock"]  # of the killed one
    own = data / ".shards" / "1_of_3"
    own.mkdir(parents=True)
    with at_work_in(own) as words:
        run("--shard", "1/3", status=2)
        assert words in capsys.readouterr().err
    shutil.rmtree(data)
    data.mkdir()
    (data / "thesis.txt").write_text("precious")
    run("--shard", "1/3", status=2)
    assert "holds other data" in capsys.readouterr().err


def write_shards(path, num_episodes, parts):
    """Pieces and notes of shards, by the writer, of tiny random episodes."""
    for part in range(1, parts + 1):
        own = Shard(part, parts)
        writer = RolloutWriter(path, {"kind": "test"}, shard=own, num_episodes=num_episodes)
        for number in own.of(range(num_episodes)):
            if not writer.has(number):
                writer.add(number, random_episode(number))
        writer.finish()


def write_whole(path, num_episodes):
    """The same episodes by one process."""
    writer = RolloutWriter(path, {"kind": "test"})
    for number in range(num_episodes):
        writer.add(number, random_episode(number))
    writer.finish()


def random_episode(number):
    rng = np.random.default_rng(number)
    steps = pd.DataFrame({"level_seed": number, "episode_step": np.arange(3), "done": [0, 0, 1],
                          "reward": 0.0, "value": rng.normal(size=3), "action": 4})
    return EpisodeArrays(rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8),
                         np.zeros((4, 8), np.float32), np.zeros((3, 15), np.float32), steps)


def test_a_recording_is_extended_by_shards(tmp_path):
    write_whole(tmp_path / "one", 9)
    write_whole(tmp_path / "more", 4)
    write_shards(tmp_path / "more", 9, 2)
    steps = join_recording(tmp_path / "more").all_steps(range(9))
    assert steps["global_step"].tolist() == list(range(27))
    assert bytes_of_files(tmp_path / "more") == bytes_of_files(tmp_path / "one")


def test_a_join_that_is_killed_anywhere_is_repeated(tmp_path, monkeypatch):
    """Killed before each of its renamings and deletions, it leaves what another join completes."""
    write_shards(tmp_path / "pieces", 4, 2)
    expected = shutil.copytree(tmp_path / "pieces", tmp_path / "expected")
    join_recording(expected)
    for name in (*(f"data_gen_model_0000{number}.csv" for number in range(4)),
                 "idx_to_episode.csv", "recording.json"):
        assert (expected / name).is_file()
    assert not list(expected.glob(".*"))
    moments = 0
    for owner, method in ((os, "replace"), (os, "rename"), (type(expected), "unlink")):
        for call in range(1, 100):
            data = shutil.copytree(tmp_path / "pieces", tmp_path / f"{method}_{call}")
            try:
                with killed_at(owner, method, call):
                    join_recording(data)
                break  # it is not called so often
            except KeyboardInterrupt:
                moments += 1
                assert join_recording(data).index()["episode"].nunique() == 4
                assert bytes_of_files(data) == bytes_of_files(expected)
    assert moments > 10


def test_many_processes_join_at_once(tmp_path, monkeypatch):
    """As threads, which share more than processes: each waits for the others before every write."""
    write_shards(tmp_path / "pieces", 6, 3)
    expected = shutil.copytree(tmp_path / "pieces", tmp_path / "expected")
    join_recording(expected)
    data, errors, together = tmp_path / "pieces", [], threading.Barrier(4)
    replace = os.replace

    def meet(*args):
        try:
            together.wait(timeout=0.2)
        except threading.BrokenBarrierError:
            together.reset()
        replace(*args)

    def join():
        try:
            RolloutFolder(data)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(os, "replace", meet)
    threads = [threading.Thread(target=join) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert bytes_of_files(data) == bytes_of_files(expected)


def test_a_join_goes_on_where_another_one_has_written_in_between(tmp_path, monkeypatch):
    write_shards(tmp_path / "pieces", 4, 2)
    expected = shutil.copytree(tmp_path / "pieces", tmp_path / "expected")
    join_recording(expected)
    data, read = tmp_path / "pieces", rollout_files.read_bytes

    def read_later(path):
        monkeypatch.setattr(rollout_files, "read_bytes", read)
        with killed_at(ShardNotes, "remove", 1), pytest.raises(KeyboardInterrupt):
            join_recording(data)  # the other one, which has deleted what is to be read
        return read(path)

    monkeypatch.setattr(rollout_files, "read_bytes", read_later)
    join_recording(data)
    assert bytes_of_files(data) == bytes_of_files(expected)


def test_pieces_that_vanished_or_are_damaged_are_named(tmp_path):
    write_shards(tmp_path, 4, 2)
    waiting = tmp_path / ".steps_00001.csv"
    content = waiting.read_text()
    for damaged in (content[:60], content.replace("\n1,1,1,1,", "\n1,1,1,x,"), "", "episode\n1\n"):
        waiting.write_text(damaged)
        with pytest.raises(UserError, match=r"steps_00001\.csv is damaged"):
            RolloutFolder(tmp_path)
    waiting.write_text(content)
    shutil.rmtree(tmp_path / "episode_00002")
    with pytest.raises(UserError, match=r"episode_00002/ob\.npy"):
        RolloutFolder(tmp_path)
    assert ShardNotes(tmp_path).exist()


def test_shards_with_other_settings_are_found_when_they_are_joined(tmp_path):
    """Two that begin at the same moment may not see each other."""
    write_shards(tmp_path, 4, 2)
    note = tmp_path / ".shards" / "2_of_2" / "shard.json"
    note.write_text(note.read_text().replace('"test"', '"other"'))
    with pytest.raises(UserError, match=r"shard 2/2 in .* has other settings than the rest"):
        RolloutFolder(tmp_path)
