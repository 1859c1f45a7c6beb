"""Damaged files of every kind: each reader accepts the file or fails with one clear sentence.

All damage is drawn with fixed seeds. Readers raise nothing but ``UserError`` and ``OSError``.
"""

import contextlib
import gc
import io
import json
import os
import re
import resource
import signal
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import tiny_policy

from agents.agent_file import load_agent, save_agent
from agents.episodes import read_evaluation
from agents.provenance import file_sha256, is_digest
from agents.rollout_files import RECORDING, RolloutFolder
from agents.world_files import read_world
from analysis.influences.comparison import COMPARISON_FILES
from analysis.jacobians import JACOBIAN_FILES
from attribution.checking.agent_checks import SUMMARY
from attribution.checking.object_scores import OBJECT_FILES, read_names
from attribution.page import read_labels
from attribution.published import read_joblib
from attribution.results import ATTRIBUTIONS, finished_layers, read_features
from common import files
from common.cli import Parser
from common.config import read_yaml
from common.errors import UserError
from common.files import (
    load_tensors,
    named_errors,
    read_array,
    read_arrays,
    read_json,
    save_json,
    save_tensors,
)
from common.parameters import id_list
from common.results import ResultStore, Table, Text
from common.schemas import Array, Npz, save_arrays
from common.tables import read_table, write_table
from common.video import write_poster
from envs.procgen_env import EnvConfig
from generative.sample_files import SampleFolder
from generative.squares import square_images
from generative.world_data import read_worlds
from interventions.patch_text import open_patches, parse_patch, read_patch_file
from interventions.patches import Opening
from interventions.vectors import read_vectors
from pipeline.report import render_document

KINDS = {"number": int, "fraction": float, "truth": bool, "name": str}
HEADER = b"number,fraction,truth,name\n"


def saved(save, content, **options):
    """Return the bytes that ``save`` writes."""
    file = io.BytesIO()
    if save is torch.save:
        save(content, file)
    else:
        save(file, content, **options)
    return file.getvalue()


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def header_of_a_huge_array():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False,
                                                "shape": (10**9, 10**6)})
    return file.getvalue()


ODD_VALUES = [None, True, -1, 2**70, 1e300, float("nan"), float("inf"), "", "x" * 5000, "\udcff",
              [], {}, nested(files.MAX_DEPTH + 5), {"": {"": []}}]
ODD_TENSORS = [
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 64), torch.full((64,), float("nan")),
    torch.full((15,), 1e30), torch.zeros(1).expand(10**9, 10**3), torch.zeros(64, device="meta"),
    torch.eye(64).to_sparse(), torch.arange(64), torch.zeros(64, dtype=torch.complex64),
    torch.zeros(64, dtype=torch.bool), torch.zeros(192, 64, dtype=torch.float16)]
VALID = {
    "array": saved(np.save, np.arange(60, dtype=np.float32).reshape(12, 5)),
    "tensors": saved(torch.save, {"model_state_dict": {"a": torch.rand(3, 4)}, "flag": True}),
    "json": json.dumps({"format": 1, "env": {"levels": [1, 2.5, None]}, "name": "x"}).encode(),
    "yaml": yaml.safe_dump({"seed": 3, "env": {"name": "maze", "rate": 0.5}}).encode(),
    "table": pd.DataFrame({"number": range(9), "fraction": np.linspace(0, 1, 9),
                           "truth": [True, False, True] * 3, "name": list("abcdefghi")}
                          ).to_csv(index=False).encode()}
# Intact files with unexpected content.
ODD = {
    "array": [header_of_a_huge_array(), *(saved(np.save, array, allow_pickle=True) for array in (
        np.array([{}]), np.array("text"), np.zeros(3, ">f4"), np.zeros(2, [("a", "f4")]),
        np.zeros((2, 2), complex), np.array(["2024"], "datetime64[D]")))],
    "tensors": [*(saved(torch.save, {"a": {"b": [tensor]}}) for tensor in ODD_TENSORS),
                *(saved(torch.save, {"a": value}) for value in ODD_VALUES),
                saved(torch.save, [1]), saved(torch.save, torch.zeros(3))],
    "json": [json.dumps(content).encode() for value in ODD_VALUES for content in (
        {"a": value}, value, [value])],
    "yaml": [*(yaml.safe_dump(content).encode() for value in ODD_VALUES for content in (
        {"a": value}, value)), b"&a [*a, *a]", b"a: &a [*a]", b"a: !!int ''", b"a: !!timestamp x",
             b"a: !!python/object/apply:os.getpid []", b"a: 2023-02-31", b"1: 2"],
    "table": [HEADER + b"1,1,1,a\n" + row for row in (
        b"9" * 5000 + b",1,1,a\n", b"1.5,1,1,a\n", b"1,1e300,1,a\n", b"1,nan,1,a\n", b"1,1,x,a\n",
        b"1,1\n", b"1,1,1,a,5\n", b"99999999999999999999,1,1,a\n")]}
OTHER_KINDS = [b"", b"\0" * 100, b"\xff\xfe" + b"a\0" * 40, b"PK\x03\x04", b"[" * 10**5,
               b"{\"a\":" * 10**4, b"- " * 10**4, b"\x93NUMPY" + b"\xff" * 50,
               b"\x93NUMPY\x01\x00\xff\xff{", b"number," + HEADER, b"\"" * 999, b"1e999"]
INSERTED = [b"nan", b"-1", b"1e400", b"9" * 400, b"!!", b"&x ", b"{", b"[", b",", b"\"", b"\n",
            b"\0", b"\xff", b": "]


def damaged(kind, rng):
    """Return the bytes of a valid file of a kind, with random damage."""
    content = bytearray(VALID[kind])
    way = rng.integers(3)
    if way == 0:  # flip bits
        for place in rng.integers(len(content), size=rng.integers(1, 9)):
            content[place] ^= 1 << rng.integers(8)
    elif way == 1:
        del content[rng.integers(len(content)):]
    else:  # in the header, if there is one
        place = rng.integers(min(len(content), 130))
        content[place:place + 1] = INSERTED[rng.integers(len(INSERTED))]
    return bytes(content)


def check_array(path):
    array = files.read_array(path)
    assert array.dtype.kind in "biuf" and array.nbytes < path.stat().st_size
    assert files.open_array(path, array.dtype.type, array.ndim).shape == array.shape


def tensors_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    return ([each for item in value for each in tensors_of(item)] if isinstance(value, list)
            else [value] if isinstance(value, torch.Tensor) else [])


def check_tensors(path):
    content = files.load_tensors(path, "file")
    assert isinstance(content, dict)
    for tensor in tensors_of(content):
        assert tensor.clone().nelement() <= path.stat().st_size


def check_mapping(read):
    def check(path):
        content = read(path)
        assert isinstance(content, dict) and all(isinstance(key, str) for key in content)
        json.dumps(content, default=str)
    return check


def check_table(path):
    table = read_table(path, KINDS)
    assert list(table) == list(KINDS)
    if len(table):
        assert table["truth"].dtype == bool
        assert np.isfinite(table[["number", "fraction"]].to_numpy(np.float32)).all()
        assert (table["number"].astype(np.int64) == table["number"]).all()


READERS = {"array": check_array, "tensors": check_tensors, "table": check_table,
           "json": check_mapping(files.read_description), "yaml": check_mapping(read_yaml)}


def keeps_its_promise(kind, path):
    """Return whether the reader accepts the file; it may only raise errors that scripts report."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            READERS[kind](path)
    except UserError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 700 and str(path) in message
        return False
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_read_right_or_refused(kind, tmp_path):
    rng = np.random.default_rng(sorted(READERS).index(kind))
    path = tmp_path / "file"
    path.write_bytes(VALID[kind])
    assert keeps_its_promise(kind, path)
    for content in (*ODD[kind], *OTHER_KINDS, *VALID.values(),
                    *(damaged(kind, rng) for _ in range(60))):
        path.write_bytes(content)
        keeps_its_promise(kind, path)


def test_agents_with_a_changed_entry_are_refused_or_play(tmp_path):
    rng = np.random.default_rng(7)
    path = tmp_path / "model_1.pth"
    save_agent(path, tiny_policy(), {})
    whole = torch.load(path, weights_only=True)
    frames, hidden, masks = torch.rand(2, 3, 64, 64), torch.zeros(2, 64), torch.ones(2)
    for number in range(80):
        state, content = dict(whole["model_state_dict"]), dict(whole)
        key = list(state)[rng.integers(len(state))]
        if number % 4 == 0:
            state[key] = state[key][:rng.integers(len(state[key]) + 1)]
        elif number % 4 == 3:
            content["learned_initial_state"] = ODD_TENSORS[rng.integers(len(ODD_TENSORS))]
        else:
            odd_ones = ODD_TENSORS if number % 4 == 1 else ODD_VALUES
            state[key] = odd_ones[rng.integers(len(odd_ones))]
        torch.save({**content, "model_state_dict": state}, path)
        try:
            policy = load_agent(path)
        except UserError:
            continue
        assert all((weights.abs() <= files.MAX_WEIGHT).all()
                   for weights in policy.state_dict().values())
        with torch.no_grad():
            assert torch.isfinite(policy(frames, hidden, masks).logits).all()


@contextlib.contextmanager
def at_once(seconds=10):
    """Fail if the block takes longer than some seconds, also if it waits for a pipe."""
    def stop(*_):
        raise TimeoutError
    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


FILE_READERS = {
    "digest": lambda path: file_sha256([path]), "json": read_json, "yaml": read_yaml,
    "array": read_array, "arrays": lambda path: read_arrays(path, "file"),
    "tensors": lambda path: load_tensors(path, "file"), "patches": read_patch_file,
    "vectors": read_vectors, "document": lambda path: render_document(path.parent, path),
    "poster": lambda path: write_poster(path.with_name("poster.jpg"), path),
    "world": lambda path: read_world(path.parent, 8), "joblib": lambda path: read_joblib(path, "x")}


@pytest.mark.parametrize("name", FILE_READERS)
def test_pipes_and_devices_are_not_read(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", "/dev/zero"):
        path = tmp_path / "world_00008.png"
        path.symlink_to(target)
        with at_once(), pytest.raises(UserError):
            FILE_READERS[name](path)
        path.unlink()


def test_files_of_the_kernel_do_not_block(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(files.os, "open", lambda path, flags: opened.append(flags) or os.dup(0))
    for read in (files.read_bytes, read_array):
        with contextlib.suppress(UserError, OSError):
            read(tmp_path)
    assert len(opened) == 2 and all(flags & os.O_NONBLOCK for flags in opened)


NOTE = {"settings": {"divided": {"num_samples": 2, "batch_size": 1}}, "informative": [],
        "finished": True}


@pytest.mark.parametrize(("place", "note"), [
    ("999999_of_999999", NOTE), ("1_of_1", {**NOTE, "settings": {"divided": {
        "num_samples": 10**12, "batch_size": 1}}}),
    *(("1_of_1", {**NOTE, "settings": {"divided": divided}}) for divided in (
        5, [], {}, {"num_samples": "2"}, {"num_samples": -1}, {"num_samples": None})),
    *(("1_of_1", {**NOTE, key: value}) for key in NOTE for value in (5, None, "x", [[3]])),
    ("1_of_1", [])], ids=str)
def test_notes_of_shards_are_checked_before_any_work(place, note, tmp_path):
    folder = tmp_path / ".shards" / place
    folder.mkdir(parents=True)
    (folder / "shard.json").write_text(json.dumps(note))
    (tmp_path / "sample_00000").mkdir()
    for read in (SampleFolder, RolloutFolder):
        with at_once(), pytest.raises(UserError):
            read(tmp_path)


def test_sweeps_are_counted_before_they_are_built(tmp_path):
    numbers = [[str(number)] for number in range(1000)]
    (tmp_path / "a.yml").write_text(yaml.safe_dump([
        {"kind": "set", "layer": "x", "channels": numbers, "value": ["1"] * 1000,
         "seed": ["1"] * 1000}]))
    message = "define 1000000000 lists of patches, more than 1000;"
    with at_once(), pytest.raises(UserError, match=message):
        read_patch_file(tmp_path / "a.yml")
    opening = Opening(tiny_policy(), EnvConfig("maze", "easy"), lambda: None)
    patch = parse_patch("interchange@embedder.block2,source=0-99999")
    with at_once(), pytest.raises(UserError, match="names 100000 levels; name at most"):
        open_patches([patch], opening)


@pytest.mark.parametrize("text", ["9" * 5000, f"0 to {'9' * 5000}", "1 1", "x" * 5000])
def test_long_numbers_are_one_short_sentence(text):
    with pytest.raises(UserError) as raised:
        id_list(text, "--sample_ids")
    assert len(str(raised.value)) < 400


def test_channels_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.yml").write_text("- {kind: set, layer: x, channels: [{}]}")
    with pytest.raises(UserError, match="'channels' must be one value"):
        read_patch_file(tmp_path / "a.yml")


def test_long_values_of_flags_are_quoted_in_part(capsys):
    flags = Parser("")
    flags.add_argument("--device", choices=("cpu", "gpu"))
    with pytest.raises(SystemExit):
        flags.parse_args(["--device", "x" * 2000])
    assert 0 < len(capsys.readouterr().err) < 600


def test_a_full_disk_is_named_as_such(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device; [\d.]+ MB are free"), \
            named_errors(tmp_path / "a.npy"):
        raise OSError("663552 requested and 167808 written")  # numpy's error


LARGE = np.random.default_rng(0).random((1, 100, 100)).astype(np.float32)


@pytest.mark.parametrize("write", [
    lambda path: Npz({"a": Array(np.float32, "A B C")}).write(path, {"a": LARGE}),
    lambda path: save_arrays(path, {"a": LARGE}, compressed=True),
    lambda path: save_tensors(path, {"a": torch.from_numpy(LARGE)})],
    ids=["npz", "compressed", "tensors"])
def test_archives_that_do_not_fit_on_the_disk_leave_no_traceback(write, tmp_path, monkeypatch):
    """A file object that is left open fails again when it is deleted, which Python prints."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: unraisable.append(error.exc_value))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError):
            write(tmp_path / "a.npz")
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not unraisable


@pytest.mark.parametrize("known", [["x", "y"], [1, "believe me"], [1.0, "0" * 64], 4, [1]])
def test_recorded_digests_of_another_form_are_not_believed(known):
    assert not is_digest(known) and is_digest([1, "0" * 64])


FACTS = {"grid": [4, 4], "signed": False, "stability": [None, 0.5], "stride": 8, "first_pixel": 0}


@pytest.mark.parametrize(("part", "change"), [
    ("settings", {"baseline": 3}), ("settings", {"found": []}), ("settings", {"place": "x"}),
    ("found", {"grid": 3}), ("found", {"grid": ["a", "b"]}), ("found", {"stability": 3}),
    ("found", {"signed": "no"}), ("found", {"explained": "most"}), ("found", {"names": [3]})])
def test_settings_of_features_are_typed(part, change, tmp_path):
    facts = {**FACTS, **(change if part == "found" else {})}
    save_json(tmp_path / "block2" / "settings.json", {
        "baseline": "zero", "place": 1, "found": facts, **(change if part == "settings" else {})})
    for read in (finished_layers, lambda path: read_features(path, "block2")):
        with pytest.raises(UserError, match=re.escape(min(change))):
            read(tmp_path)


def changes_of(content):
    """Yield copies of nested content in which one value has been replaced or removed."""
    yield from ODD_VALUES
    items = content.items() if isinstance(content, dict) else (
        enumerate(content) if isinstance(content, list) else ())
    for key, value in items:
        rest = {**content} if isinstance(content, dict) else [*content]
        del rest[key]
        yield rest
        for change in changes_of(value):
            changed = {**content} if isinstance(content, dict) else [*content]
            changed[key] = change
            yield changed


NUMBERS = dict.fromkeys(("score", "score_low_95", "score_high_95", "score_chance"), 0.5)
EVALUATION = {"num_episodes": 9, "success_rate": 0.5, "success_interval": [0.4, 0.6],
              "env": {"num_levels": 100}}
INTERVAL = {"gap_median": 0.1, "gap_99": 0.2, "gap_largest": 0.3}


def settings_reader(schema, *needed):
    return lambda path: schema.read_settings(path, needed)


# Valid content of JSON files, and their readers.
RECORDS = {
    "evaluation": (EVALUATION, lambda path: read_evaluation(path, {"env": {"num_levels": int}})),
    "names": ({"features_sha256": "0", "features": [{"name": "coin", "kind": None, "score": 0.5}],
               **NUMBERS},
              lambda path: read_names(ResultStore(path.parents[1], OBJECT_FILES), "a")),
    "summary": ({"frames": 9, "above": 0, **INTERVAL}, lambda path: SUMMARY.read(path, "")),
    "labels": ({"a": {"1": "coin"}}, lambda path: read_labels(path, {"a": SimpleNamespace(
        number=2)})),
    "layer": ({"place": 1, "features_sha256": "0"},
              lambda path: ATTRIBUTIONS.entry("layer").read(path, "")),
    "comparison": ({"samples_dir": "x", "matrices_sha256": {"a": "0"}, "saliency_step": 1,
                    "level": 0.1, "min_samples": 2},
                   settings_reader(COMPARISON_FILES, *COMPARISON_FILES.setting_types)),
    "recording": ({"env": vars(EnvConfig("coinrun", "hard", 0, 100)), "seed": 1},
                  lambda path: {1, *map((RECORDING.read_settings(path).get("env") or {}).get,
                                        ("env_name", "distribution_mode", "use_backgrounds"))}),
    "jacobians": ({"parameters": {"grad_timestep": 1}, "functions": ["value"], "samples": "x",
                   "saliency_made_by": {"common_timesteps": [2]}, "steps": {"pca": {}}},
                  settings_reader(JACOBIAN_FILES, "parameters", "functions"))}


@pytest.mark.parametrize("name", RECORDS)
def test_changed_records_are_read_with_their_types_or_refused(name, tmp_path):
    content, read = RECORDS[name]
    path = tmp_path / "a" / "names.json"
    save_json(path, content)
    expected = read(path)
    assert expected
    refused = 0
    for changed in changes_of(content):
        save_json(path, changed)
        try:
            found = read(path)
        except UserError as error:
            assert path.name in str(error) and len(str(error)) < 700
            refused += 1
        else:
            assert type(found) is type(expected)
    assert refused > len(ODD_VALUES)


def worlds_file():
    """Return the arrays of a file of two worlds with 5 squares per side."""
    images = square_images(3, 5, 9.0, (2,))
    return {"pixels_per_square": np.float64(9), "object_looks": np.array([2]),
            **{f"images.{name}": tensor.numpy() for name, tensor in images.state_dict().items()},
            "episodes": np.zeros(2, np.int64), "rows": np.arange(2),
            **{name: np.zeros((2, 5, 5), dtype) for name, dtype in (
                ("squares", np.uint8), ("places", np.float16), ("velocities", np.float16),
                ("looks", np.uint8))},
            "positions": np.zeros((2, 2), np.float32), "moved": np.zeros((2, 2), np.float32)}


@pytest.mark.parametrize("name", worlds_file())
def test_changed_worlds_are_refused(name, tmp_path):
    path, whole = tmp_path / "worlds.npz", worlds_file()
    np.savez_compressed(path, **whole)
    assert read_worlds(path, 5, 10)[1].squares.shape == (2, 5, 5)
    array = np.asarray(whole[name])
    without = {key: value for key, value in whole.items() if key != name}
    for changed in (without, *({**whole, name: changed} for changed in (
            array[None], np.array({}), array.astype(str), np.zeros((3, 0, 7), array.dtype)))):
        np.savez_compressed(path, **changed)
        with pytest.raises(UserError, match=re.escape(str(path))):
            read_worlds(path, 5, 10)


def test_worlds_that_would_fill_the_memory_are_refused(tmp_path):
    path = tmp_path / "worlds.npz"
    np.savez_compressed(path, **{**worlds_file(), "more": np.zeros(2**26)})
    with pytest.raises(UserError, match="truncated or not"):
        read_worlds(path, 5, 10)


def test_tables_without_rows_have_the_types_of_their_columns(tmp_path):
    (tmp_path / "a.csv").write_bytes(HEADER)
    table = read_table(tmp_path / "a.csv", KINDS)
    assert not len(table[~table["truth"]]) and table["number"].dtype == int


def test_surrogates_are_written_escaped(tmp_path):
    write_table(tmp_path / "a.csv", pd.DataFrame({"name": ["\udcff"]}))
    Text().write(tmp_path / "a.md", "\udcff")
    Table().write(tmp_path / "b.csv", pd.DataFrame({"name": ["\udcff"]}))
    assert all(b"\\udcff" in path.read_bytes() for path in tmp_path.iterdir())
