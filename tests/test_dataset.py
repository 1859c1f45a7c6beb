"""Windows of recorded rollouts: alignment, borders, ends of episodes, and damaged files."""

import os
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import GOLDEN, write_recording

from agents.rollout_files import RolloutFolder, RolloutWriter
from common.errors import UserError
from generative.dataset import RolloutDataset

DATA = GOLDEN / "dataset" / "data"
FIRST_ROWS = [0, 12, 19, 39, 44, 47]  # of the six episodes; 77 rows in total
STRADDLING = [row for end in FIRST_ROWS[1:] for row in range(end - 3, end)]
FIELDS = {"actions": "action", "rewards": "reward", "values": "value", "terminals": "terminal",
          "hidden_states": "hx"}


@pytest.fixture(scope="module")
def published_labels():
    return RolloutDataset(DATA, 3, 6, terminal_absorbing=False)


@pytest.fixture(scope="module")
def dataset():
    return RolloutDataset(DATA, 3, 6)


@pytest.fixture
def copy(tmp_path):
    """A copy of the data that a test may modify."""
    return shutil.copytree(DATA, tmp_path / "data")


def corner(window):
    """Return a pixel of each frame, whose value counts the frames."""
    return window.frames[:, -1, -1, -1].tolist()


def test_windows_within_an_episode_are_the_golden_ones(published_labels):
    golden = np.load(GOLDEN / "dataset" / "items.npz", allow_pickle=False)
    for row in set(range(69)) - set(STRADDLING):
        window = published_labels[row]
        for ours, theirs in FIELDS.items():
            np.testing.assert_array_equal(getattr(window, ours).numpy(), golden[theirs][row],
                                          err_msg=ours)
        np.testing.assert_allclose(window.frames[:, 0, 0, 0], golden["ims_pixel_first"][row])
        np.testing.assert_allclose(window.frames[:, -1, -1, -1], golden["ims_pixel_last"][row])


@pytest.mark.parametrize("row", STRADDLING)
def test_a_window_over_a_border_shows_the_next_episode_from_its_first_frame(dataset, row):
    number = sum(row >= first for first in FIRST_ROWS)  # number of the next episode
    folder = RolloutFolder(DATA)
    episode = folder.episode(number)
    window, shown = dataset[row], min(len(episode.frames), 6)
    np.testing.assert_array_equal(window.frames[2:2 + shown],
                                  np.moveaxis(episode.frames[:shown], -1, 1))
    assert not window.frames[:2].any() and not window.frames[2 + shown:].any()
    for name, column in (("actions", "action"), ("rewards", "reward"), ("values", "value"),
                         ("terminals", "done")):
        filled = [int(name == "terminals")] * (6 - shown)
        np.testing.assert_allclose(getattr(window, name), np.float32(
            [0, 0, *episode.steps[column][:shown], *filled]), err_msg=name)
    states = episode.hidden_states[:7]
    np.testing.assert_array_equal(window.hidden_states[2:2 + len(states)], states)
    assert not window.hidden_states[:2].any()
    assert not window.hidden_states[2 + len(states):].any()


def test_the_last_episode_is_filled_like_the_others_and_has_no_border_windows(dataset):
    assert len(dataset) == 74
    assert corner(dataset[73]) == [86, 87, 88, 0, 0, 0, 0, 0]
    assert dataset[73].terminals.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    with pytest.raises(IndexError):
        dataset[74]


def test_terminal_stays_after_the_end_unless_the_published_labels_are_asked_for(
        dataset, published_labels):
    assert dataset[6].terminals.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert published_labels[6].terminals.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert dataset[6].rewards.tolist() == [0, 0, 0, 0, 0, 10, 0, 0]


def test_a_batch_is_its_windows_with_time_first(dataset):
    numbers = [68, 3, 10, 43, 73, 3]
    batch = dataset.batch(numbers)
    assert batch.positions is None
    for name, tensor in batch.tensors().items():
        expected = torch.stack([getattr(dataset[i], name) for i in numbers], dim=1)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_split_shares_no_frame_and_depends_on_the_seed_alone(dataset):
    split, again = dataset.split(0.4, seed=1), RolloutDataset(DATA, 3, 6).split(0.4, seed=1)
    np.testing.assert_array_equal(split.train, again.train)
    np.testing.assert_array_equal(split.held_out, again.held_out)
    assert sorted([*split.train, *split.held_out]) == list(range(74))

    # The first pixel of a frame encodes the episode, except in black frames.
    def seen(numbers):
        frames = dataset.batch(numbers).frames.flatten(0, 1)[:, 0, 0, 0]
        return set(frames.tolist()) - {0}

    assert len(seen(split.held_out)) == 2 and not seen(split.train) & seen(split.held_out)
    assert any(not np.array_equal(split.held_out, dataset.split(0.4, seed).held_out)
               for seed in range(2, 6))


def edit_csv(path, change):
    table = pd.read_csv(path)
    change(table)
    table.to_csv(path, index=False)


def edit_array(path, change):
    np.save(path, change(np.load(path)))


def set_value(column, row, value):
    def change(table):
        if isinstance(value, str):
            table[column] = table[column].astype(object)
        table.loc[row, column] = value
    return change


CSV = "data_gen_model_00002.csv"


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: (d / "idx_to_episode.csv").unlink(), "no idx_to_episode.csv"),
    (lambda d: edit_csv(d / "idx_to_episode.csv", set_value("global_step", slice(30, None), 90)),
     r"idx_to_episode.csv has a gap: after global_step 29 comes 90"),
    (lambda d: edit_csv(d / "idx_to_episode.csv", set_value("episode", slice(39, None), 7)),
     r"idx_to_episode.csv has a gap: after episode 2 comes 7"),
    (lambda d: edit_csv(d / CSV, lambda t: t.drop(index=5, inplace=True)), f"{CSV} does not fit"),
    (lambda d: edit_csv(d / CSV, set_value("done", 4, 1.0)), f"{CSV}: 'done'"),
    (lambda d: edit_csv(d / CSV, set_value("action", 4, 15.0)), f"{CSV} has the action 15"),
    (lambda d: os.truncate(d / "episode_00002" / "ob.npy", 5000), "00002/ob.npy is damaged"),
    (lambda d: edit_array(d / "episode_00002" / "ob.npy", lambda a: a.astype(np.float32)),
     "episode_00002/ob.npy holds float32"),
    (lambda d: edit_array(d / "episode_00002" / "hx.npy", lambda a: a[:, :32]),
     r"episode_00002/hx.npy has the shape \(21, 32\)"),
    (lambda d: [edit_array(d / "episode_00002" / name, lambda a: a[:-1])
                for name in ("ob.npy", "hx.npy", "lp.npy")],
     r"episode_00002/ob.npy has the shape \(19,")])
def test_damaged_data_is_refused_when_it_is_opened_naming_the_file(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError) as error:
        RolloutDataset(copy, 3, 6)
    assert re.search(message, str(error.value)), error.value


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_states_that_are_no_numbers_are_refused_when_they_are_read(copy, value):
    def put(values):
        values[4, 3] = value
        return values

    edit_array(copy / "episode_00002" / "hx.npy", put)
    dataset = RolloutDataset(copy, 3, 6)
    dataset.batch([0, 12])
    with pytest.raises(UserError, match=r"episode_00002/hx\.npy holds NaN or infinity"):
        dataset.batch([0, 20, 12])


def test_done_may_be_text_as_in_published_recordings(copy, dataset):
    """The published reader accepts several spellings of booleans, even within one file."""
    for number, (no, yes) in enumerate((("False", "True"), ("0.0", "1.0"), ("0", "True"))):
        def change(table, no=no, yes=yes):
            table["done"] = table["done"].map({0.0: no, 1.0: yes})
        edit_csv(copy / f"data_gen_model_{number:05d}.csv", change)
    edit_csv(copy / CSV, set_value("done", 3, "0.0"))
    read = RolloutDataset(copy, 3, 6)
    everything = range(len(dataset))
    assert torch.equal(read.batch(everything).terminals, dataset.batch(everything).terminals)
    edit_csv(copy / CSV, set_value("done", 3, "perhaps"))
    with pytest.raises(UserError, match=f"{CSV} is damaged: the column done"):
        RolloutDataset(copy, 3, 6)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: os.truncate(d / "episode_00001" / "lp.npy", 300), r"episode_00001/lp\.npy is dam"),
    (lambda d: (d / "data_gen_model_00001.csv").unlink(), "no file .*steps_00001")])
def test_a_recording_whose_episodes_are_damaged_is_not_extended(tmp_path, damage, message):
    write_recording(tmp_path / "data", lengths=[10, 12, 9])
    damage(tmp_path / "data")
    before = (tmp_path / "data" / "idx_to_episode.csv").read_bytes()
    with pytest.raises(UserError, match=message):
        RolloutWriter(tmp_path / "data", {"kind": "test"})
    assert (tmp_path / "data" / "idx_to_episode.csv").read_bytes() == before


def test_a_file_that_shrinks_in_use_is_refused(copy):
    dataset = RolloutDataset(copy, 3, 6)
    os.truncate(copy / "episode_00002" / "ob.npy", 5000)
    with pytest.raises(UserError, match=r"episode_00002/ob\.npy has become shorter"):
        dataset[25]


def test_a_window_longer_than_the_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="77 frames, fewer than the 78 of a window"):
        RolloutDataset(DATA, 3, 76)
    assert len(RolloutDataset(DATA, 3, 75)) == 74
    write_recording(tmp_path / "data", lengths=[3])
    with pytest.raises(UserError, match="too short for 3 initial frames"):
        RolloutDataset(tmp_path / "data", 3, 1)
