"""The result store: random values of every schema of the project are read as written. Kills, shards
and damage are tested on an example schema that uses every format."""

import contextlib
import dataclasses
import errno
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, at_work_in
from conftest import bytes_of_files as all_bytes

from common.errors import UserError
from common.files import atomic_folder, atomic_path, sha256
from common.results import (
    Array,
    Entry,
    File,
    Journal,
    Json,
    Npy,
    NpyFolder,
    Npz,
    ResultStore,
    Schema,
    Table,
    Text,
)
from common.shards import WHOLE, Shard
from common.step_results import StepResults

PACKAGES = ("agents", "analysis", "attribution", "generative", "interventions", "maze")
SCRIPTS = [path for path in ROOT.glob("*.py") if not path.is_symlink()]
# Uses every format, unlike the schemas of the project.
EXAMPLE = Schema(
    "examples", "example.py", items={
        "arrays": Entry("arrays/{}/{}.npz", Npz({
            "before": Array(np.float32, "N K"), "after": Array(np.float64, "A N K", finite=False),
            "more": Array(np.int64, "A 3", optional=True)})),
        "array": Entry("array_{}.npy", Npy(Array(np.float32, "N 2"))),
        "folder": Entry("folders/{}", NpyFolder({"x": Array(np.int64, "N"), "y": Array(bool)})),
        "table": Entry("tables/{}.csv", Table(
            {"name": str, "value": float, "count": int, "is_control": bool}, exact=True)),
        "facts": Entry("facts_{}.json", Json()),
        "log": Entry("log_{}.jsonl", Journal({"number": int, "path": list}))},
    results={"report": Entry("report.md", Text()), "figure": Entry("figure.png", File()),
             "rows": Entry("rows.csv", Table({"value": float}))})


def bytes_of_files(folder):
    """Return the bytes of every file below a folder by path, except locks."""
    return {path: content for path, content in all_bytes(folder).items()
            if not path.endswith(".lock")}


def all_schemas():
    """Return every schema of the project by module and name."""
    found = {"example": EXAMPLE}
    for path in sorted((*SCRIPTS, *(path for package in PACKAGES
                                    for path in (ROOT / package).rglob("*.py")))):
        if re.search(r"^[A-Z_]+ = (Schema|\w*_schema)\(", path.read_text(), re.MULTILINE):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            content = vars(importlib.import_module(name))
            found.update({f"{name}.{key}": value for key, value in content.items()
                          if isinstance(value, Schema)})
    return {name: schema for number, (name, schema) in enumerate(found.items())
            if schema not in list(found.values())[:number]}  # skip imported ones


EVERY_SCHEMA = all_schemas()
REPLACED = next(schema for schema in EVERY_SCHEMA.values() if schema.replaced and any(
    "{}" in entry.path for entry in schema.results.values()))
STEPWISE = {name: schema for name, schema in EVERY_SCHEMA.items() if "{}" in schema.settings_name}
SCHEMAS = {name: schema for name, schema in EVERY_SCHEMA.items()
           if not schema.replaced and name not in STEPWISE}


class Run:
    """A script that writes random results of a schema to a folder.

    Items are divided among shards one by one. The value of an item depends only on its key.
    """

    def __init__(self, schema, path):
        self.schema, self.store = schema, ResultStore(path, schema)
        self.computed = []
        self.keys = {name: keys_of(entry) for name, entry in schema.items.items()}
        self.settings = {"seed": 1, "agent_sha256": "a" * 64, "versions": {"numpy": "1"}}
        if schema.growing:
            self.settings[schema.growing] = {
                key: {"made_by": key} for (key,) in self.keys[schema.growing_items[0]]}

    def __call__(self, shard=WHOLE, overwrite=False, join=False, **settings):
        divided = {"parts": list(self.keys)}
        self.store.open({**self.settings, **settings}, overwrite, shard, divided, join)
        if not self.store.is_open:
            return
        items = [(name, key) for name, keys in self.keys.items() for key in keys]
        for name, key in shard.of(items):
            entry = self.schema.items[name]
            if isinstance(entry.format, Journal):
                self._extend(name, key, value_of(entry.format, f"{name} {key}"))
            elif isinstance(entry.format, File):
                if not self.store.has(name, *key):
                    self.store.write(name, *key, value=self._compute(name, key))
            else:
                self.store.compute(name, *key, function=functools.partial(self._compute, name, key))
        if shard == WHOLE:
            for name, entry in self.schema.results.items():
                for key in keys_of(entry):
                    self.store.write(name, *key, value=value_of(entry.format, name))
        self.store.finish()

    def _compute(self, name, key):
        self.computed.append((name, key))
        return value_of(self.schema.items[name].format, f"{name} {key}")

    def _extend(self, name, key, rows):
        for row in rows[len(self.store.rows(name, *key)):]:
            self.computed.append((name, key))
            self.store.append(name, *key, row=row)


def keys_of(entry):
    """Return the keys of three items of an entry, or of its only file."""
    places = re.findall(r"{.*?}", entry.path)
    # Only numbers are padded with zeros.
    keys = [[f"{item if '0' in place else 'abc'[item]}{part}" for part, place in enumerate(places)]
            for item in range(3 if places else 1)]
    return [tuple([*key[:-1], entry.choices[item % len(entry.choices)]] if entry.choices else key)
            for item, key in enumerate(keys)]


def value_of(form, seed):
    """Return a random value of a format, which depends only on the seed."""
    rng = np.random.default_rng(list(seed.encode()))
    if isinstance(form, Npz | NpyFolder | Npy):
        fields = {"": form.array} if isinstance(form, Npy) else form.fields
        sizes = {dim: int(rng.integers(1, 5)) for field in fields.values()
                 for dim in field.dims.split()}
        if "lengths" in fields:  # each run has one step
            sizes["S"] = sizes["N"]
        arrays = {name: _array(field, sizes, rng) for name, field in fields.items()}
        if "lengths" in arrays:
            arrays["lengths"][:] = 1
        return arrays[""] if isinstance(form, Npy) else arrays
    if isinstance(form, Table):
        return pd.DataFrame({name: [_cell(kind, rng) for _ in range(3)]
                             for name, kind in form.columns.items()})
    if isinstance(form, Journal):
        return [{name: _cell(kind, rng) for name, kind in form.fields.items()} for _ in range(3)]
    if isinstance(form, Json) and dataclasses.is_dataclass(form.cls):
        return form.cls(*[()] * len(dataclasses.fields(form.cls)))
    if isinstance(form, Json):
        needed = {name: "text" if form.kinds[name] is str else
                  0.5 if form.kinds[name] == float | None else [] for name in form.needed}
        return {"value": float(rng.random()), **needed} if form.cls is dict else [1, 2]
    return seed * 3 if isinstance(form, Text) else seed.encode() * 3


def _array(field, sizes, rng):
    shape = tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in field.dims.split())
    values = rng.random(shape)
    if issubclass(field.dtype, np.str_):
        return np.full(shape, "name")
    if field.dtype in (bool, np.bool_):
        return values > 0.5
    return np.asarray(values * 9).astype({
        np.floating: np.float32, np.integer: np.int64, np.number: np.float32}.get(
            field.dtype, field.dtype))


def _cell(kind, rng):
    return {int: int(rng.integers(9)), float: float(rng.random()), bool: bool(rng.integers(2)),
            str: "text", list: [[1, 2], [3, 4]], dict: {"a": 0.5}}[kind]


def same(read, value):
    """Return whether a value that was read equals the one that was written."""
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(read, value)
    elif isinstance(value, pd.DataFrame):
        pd.testing.assert_frame_equal(read, value[list(read.columns)], check_exact=False, rtol=1e-5)
    elif isinstance(value, dict) and any(isinstance(each, np.ndarray) for each in value.values()):
        assert read.keys() == value.keys()
        for name in value:
            np.testing.assert_array_equal(read[name], value[name])
    else:
        assert read == value
    return True


@contextlib.contextmanager
def interrupted(call, error=KeyboardInterrupt):
    """Raise an error at the n-th renaming of a file or folder, or appending of a row."""
    calls = itertools.count(1)

    def failing(act):
        def count(*args, **more):
            if next(calls) == call:
                raise error
            return act(*args, **more)
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace))
        patch.setattr(os, "rename", failing(os.rename))
        patch.setattr("common.results.append_or_nothing", failing(
            vars(importlib.import_module("common.files"))["append_or_nothing"]))
        yield


@pytest.fixture
def whole(tmp_path):
    """A finished run, and the bytes of its files."""
    run = Run(EXAMPLE, tmp_path / "whole")
    run()
    return run, bytes_of_files(tmp_path / "whole")


@pytest.mark.parametrize("name", SCHEMAS)
def test_values_come_back_from_files_of_their_names(name, tmp_path):
    run = Run(SCHEMAS[name], tmp_path)
    run()
    for name, keys in run.keys.items():
        for key in keys:
            value = value_of(run.schema.items[name].format, f"{name} {key}")
            assert same(run.store.read(name, *key), value)
    for entry in (*run.schema.items.values(), *run.schema.results.values()):
        assert list(run.store.path.glob(entry.pattern()))
    assert all(map(run.store.ownership(), map(Path, bytes_of_files(tmp_path))))
    assert run.store.settings()["seed"] == 1
    run(overwrite=True)  # all files are recognised


@pytest.mark.parametrize(("schema", "name"), [
    ("agents.rollout_files.RECORDING", "data_gen_model_notes.csv"),
    ("agents.rollout_files.RECORDING", "data_gen_model_000001.csv"),
    ("agents.rollout_files.RECORDING", "episode_00001/mine.npy"),
    ("agents.rollout_files.RECORDING", "sample_best_of.mp4"),
    ("agents.rollout_files.RECORDING", ".shards/1_of_2/mine.txt"),
    ("generative.sample_files.SAMPLES", "sample_00000/mine.npy"),
    ("analysis.memory.sparse_report.OPTIMISED_STARTS", "penalty_1/.mine"),
    ("analysis.memory.sparse_report.OPTIMISED_STARTS", "penalty_1/sample_00000/mine.npy"),
    ("interventions.comparison.COMPARISON", "conditions/mine/starts.npy"),
    ("analysis.memory.probe_interventions.PROBE_INTERVENTIONS", "conditions/mine.npy"),
    ("maze.field.results.FIELDS_FILES", "films/.hidden.mp4")])
def test_names_that_resemble_an_output_are_not_overwritten(schema, name, tmp_path):
    run = Run(SCHEMAS[schema], tmp_path / "out")
    run()
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=f"{re.escape(name)} does not belong to"):
        run(overwrite=True)
    with contextlib.suppress(UserError):  # shards that are not joined
        run()
    assert path.read_text() == "mine"


def test_results_that_others_have_added_are_kept_on_resuming(tmp_path):
    schema = Schema("x", "example.py", results={
        "number": Entry("number_{:0>5}.csv", File()), "part": Entry("part_{}.csv", File(),
                                                                    choices=("a", "b"))})
    store = ResultStore(tmp_path, schema)
    store.open({"seed": 1})
    store.write("number", 3, value=b"")
    store.write("part", "a", value=b"")
    for name in ("number_best.csv", "part_c.csv"):
        (tmp_path / name).write_text("mine")
    store.open({"seed": 1})
    assert bytes_of_files(tmp_path).keys() == {"settings.json", "number_best.csv", "part_c.csv"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")],
                         ids=["killed", "full disk"])
def test_a_run_stopped_at_any_write_resumes_to_identical_bytes(whole, error, tmp_path):
    for call in itertools.count(1):
        run = Run(EXAMPLE, tmp_path / f"stopped_{call}")
        try:
            with interrupted(call, error):
                run()
        except (KeyboardInterrupt, OSError):
            before = list(run.computed)
            run()
            assert bytes_of_files(run.store.path) == whole[1]
            items = [item for item in run.computed if item[0] != "log"]
            assert len(items) - len(set(items)) <= 1, "more than the interrupted item was repeated"
            assert before == run.computed[:len(before)]
        else:
            break
    assert call > len(EXAMPLE.items)


def test_finished_items_are_kept_and_old_results_are_removed(whole):
    run, files = whole
    run.computed.clear()
    run.store.open(run.settings)
    for entry in run.schema.results.values():
        assert not list(run.store.path.glob(entry.pattern()))
    run()
    assert not run.computed and bytes_of_files(run.store.path) == files


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)], ids=str)
def test_shards_in_any_order_repeated_and_killed_equal_one_run(whole, tmp_path, order):
    run = Run(EXAMPLE, tmp_path / "shards")
    for part in order:
        with contextlib.suppress(KeyboardInterrupt), interrupted(order[0] + 3):
            run(Shard(part, 3))
    with pytest.raises(UserError, match="not joined; run this with --join"):
        run()
    for part in (*order, order[0]):
        run(Shard(part, 3))
    run(join=True)
    assert bytes_of_files(run.store.path) == whole[1]
    run(Shard(order[1], 3))  # as if a batch system repeated the job
    assert bytes_of_files(run.store.path) == whole[1]


def test_joining_names_missing_shards(tmp_path):
    run = Run(EXAMPLE, tmp_path / "shards")
    run(Shard(2, 3))
    with contextlib.suppress(KeyboardInterrupt), interrupted(2):
        run(Shard(1, 3))
    for refused, words in ((dict(join=True), "lacks shards 1/3, 3/3"),
                           (dict(shard=Shard(1, 4)), "is divided into 3 shards"),
                           (dict(shard=Shard(1, 3), seed=2), "with another seed"),
                           (dict(shard=Shard(1, 3), overwrite=True), "would delete the files")):
        before = bytes_of_files(run.store.path)
        with pytest.raises(UserError, match=words):
            run(**refused)
        assert bytes_of_files(run.store.path) == before
    for name, entry in EXAMPLE.results.items():
        with pytest.raises(UserError, match="holds shards that are not joined"):
            run.store.read(name, *keys_of(entry)[0])


def test_other_settings_are_refused_by_name_and_overwritten_on_request(whole):
    run, files = whole
    with pytest.raises(UserError, match=r"with another seed; choose another --.*give --overwrite"):
        run(seed=2)
    assert bytes_of_files(run.store.path) == files
    run(versions={"numpy": "2"})
    run.computed.clear()
    run(overwrite=True, seed=2)
    assert run.computed and run.store.settings()["seed"] == 2


def test_foreign_folders_and_files_are_left_alone(whole, tmp_path):
    run, files = whole
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds other data"):
        Run(EXAMPLE, tmp_path / "foreign")()
    assert bytes_of_files(tmp_path / "foreign") == {"thesis.tex": b"mine"}
    (run.store.path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex does not belong to"):
        run(overwrite=True)
    assert bytes_of_files(run.store.path) == {**files, "thesis.tex": b"mine"}


def test_a_second_writer_is_refused(tmp_path):
    (tmp_path / "busy").mkdir()
    with at_work_in(tmp_path / "busy") as words, pytest.raises(UserError, match=words):
        Run(EXAMPLE, tmp_path / "busy")()
    assert not bytes_of_files(tmp_path / "busy")


def test_a_deleted_folder_is_not_written_to(whole, tmp_path):
    run, _ = whole
    run.store.open(run.settings)
    run.store.path.rename(tmp_path / "moved")
    name = next(iter(run.keys))
    with pytest.raises(UserError, match="was deleted or moved"):
        run.store.write(name, *run.keys[name][0],
                        value=value_of(run.schema.items[name].format, "x"))


DAMAGES = {"truncated": lambda content: content[:len(content) // 2], "empty": lambda content: b"",
           "of another kind": lambda content: b"\x93\xff\0\n" * 40,
           "deep": lambda content: b"[" * 100_000 + b"\n"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_by_their_readers(whole, damage):
    run, _ = whole
    for name, entry in (*run.schema.items.items(), *run.schema.results.items()):
        if isinstance(entry.format, Text | File):
            continue
        key = keys_of(entry)[0]
        path = run.store.file_of(name, *key)
        if entry.format.is_folder:
            path = min(path.iterdir())
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
        # A shortened table or journal may still be valid.
        may_be_read = damage in ("truncated", "empty") and isinstance(entry.format, Table | Journal)
        try:
            run.store.read(name, *key)
            assert may_be_read
        except UserError as error:
            assert str(path) in str(error) or str(path.parent) in str(error)
        path.unlink()
        with pytest.raises(UserError) as raised:
            run.store.read(name, *key)
        assert str(path) in str(raised.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"before": np.zeros((2, 3, 1))}, r"'before' holds float32 \(2 x 3 x 1\), not .* \(N x K\)"),
    ({"after": np.zeros((1, 2, 4))}, r"'after' holds float64 \(1 x 2 x 4\), not .* \(A x 2 x 3\)"),
    ({"before": np.full((2, 3), np.nan)}, "'before' holds NaN or infinity"),
    ({"before": None}, "it has no array 'before'"),
    ({"other": np.zeros(1)}, "it has an unknown array 'other'")])
def test_arrays_that_do_not_fit_are_not_written(tmp_path, change, words):
    store = ResultStore(tmp_path / "out", EXAMPLE)
    store.open({"seed": 1, "versions": {}})
    arrays = {"before": np.zeros((2, 3)), "after": np.full((1, 2, 3), np.inf)}
    store.write("arrays", "a", "b", value=arrays)
    before = sha256(store.file_of("arrays", "a", "b"))
    with pytest.raises(UserError, match=words):
        store.write("arrays", "a", "b", value={**arrays, **change})
    assert sha256(store.file_of("arrays", "a", "b")) == before
    assert store.read("arrays", "a", "b")["before"].dtype == np.float32


def test_items_may_be_added_but_not_made_otherwise(tmp_path):
    schema = Schema("conditions", "example.py", {"condition": Entry("conditions/{}.json", Json())},
                    growing="conditions", growing_items=("condition",))
    store = ResultStore(tmp_path / "out", schema)
    store.open({"conditions": {"a": {"seed": 1}}})
    store.write("condition", "a", value={"x": 1})
    store.open({"conditions": {"b": {"seed": 2}}})
    assert store.settings()["conditions"] == {"a": {"seed": 1}, "b": {"seed": 2}}
    assert store.keys("condition") == ["a"]
    with pytest.raises(UserError, match="holds 'a' of the conditions with other settings"):
        store.open({"conditions": {"a": {"seed": 3}}})
    store.open({"conditions": {"b": {"seed": 4}}})  # nothing of b was written yet


def test_a_row_that_a_kill_cut_short_is_dropped(tmp_path):
    schema = Schema("levels", "example.py", {"levels": Entry("levels.jsonl", Journal(
        {"number": int, "path": list}))})
    store = ResultStore(tmp_path / "out", schema)
    store.open({})
    assert store.rows("levels") == []
    rows = [{"number": number, "path": [number]} for number in range(3)]
    for row in rows:
        store.append("levels", row=row)
    path = store.file_of("levels")
    path.write_bytes(path.read_bytes()[:-4])
    assert store.rows("levels") == rows[:2]
    store.append("levels", row=rows[2])
    assert store.rows("levels") == rows
    with pytest.raises(ValueError):
        store.append("levels", row={"number": "3", "path": []})
    path.write_text('{"number":1}\n' + path.read_text())
    with pytest.raises(UserError, match=r"levels\.jsonl is damaged: line 1 is not a row"):
        store.rows("levels")


# Folders that are replaced as a whole

@pytest.fixture
def replaced(tmp_path):
    return ResultStore(tmp_path / "output", REPLACED)


def write_whole(store, seed=1, names=("a", "b")):
    """Write two files per entry, as a script does."""
    store.check_replaceable()
    with store.replace({"seed": seed}) as temporary:
        for entry in store.schema.results.values():
            number = entry.path.count("{}")
            for name in names if number else names[:1]:
                path = temporary / entry.path.format(*[name] * number)
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"{seed} {path.name}")


def test_a_replaced_folder_is_old_or_new_but_never_mixed(replaced, tmp_path):
    expected = {}
    for seed in (1, 2):
        write_whole(replaced, seed)
        expected[seed] = bytes_of_files(replaced.path)
    assert expected[2]["settings.json"] != expected[1]["settings.json"]
    for error, call in itertools.product((KeyboardInterrupt, OSError(errno.ENOSPC, "full")),
                                         (1, 2, 3)):
        write_whole(replaced, 1)
        with pytest.raises((KeyboardInterrupt, OSError, UserError)), interrupted(call, error):
            write_whole(replaced, 2)
        assert bytes_of_files(replaced.path) == expected[1]
        kept = tmp_path / "output_2"  # finished, but the earlier output could not be replaced
        assert kept.exists() == (isinstance(error, OSError) and call > 1)
        if kept.exists():
            assert bytes_of_files(kept) == expected[2]
            shutil.rmtree(kept)
        write_whole(replaced, 2)
        assert bytes_of_files(replaced.path) == expected[2]
        assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_only_an_output_of_the_same_kind_is_replaced(replaced):
    folder, kind = replaced.path, replaced.schema.what
    flag = f"choose another {replaced.schema.flag}"
    for settings, words in (({"made_by": "figures of another.py"},
                             f"holds the figures of another.py, not the {re.escape(kind)}"),
                            ({}, "holds other data")):
        path = folder / "plot.png"
        folder.mkdir()
        path.write_text("precious")
        (folder / "settings.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=f"{words}.*{flag}"):
            write_whole(replaced)
        assert path.read_text() == "precious"
        shutil.rmtree(folder)
    folder.symlink_to(folder.parent)
    with pytest.raises(UserError, match="is a link, which cannot be replaced"):
        write_whole(replaced)
    folder.unlink()
    folder.mkdir()  # from a version in which the package had another name
    (folder / "settings.json").write_text(json.dumps(
        {"made_by": "page of clarity.page", "files": ["index.html"]}))
    (folder / "index.html").write_text("old")
    ResultStore(folder, Schema("page of attribution.page", "", replaced=True)).check_replaceable()


def test_a_file_that_was_added_keeps_a_folder_from_being_replaced(replaced):
    write_whole(replaced, names=("old", "b[1]"))
    write_whole(replaced, names=("b[1]", "c"))  # replaced, not added to
    assert not list(replaced.path.rglob("*old*"))
    entry = next(entry for entry in replaced.schema.results.values() if "{}" in entry.path)
    added = replaced.path / entry.path.format(*["added"] * entry.path.count("{}"))
    added.write_text("precious")
    with pytest.raises(UserError, match=f"{re.escape(added.name)} does not belong to the"):
        write_whole(replaced)
    added.unlink()
    # A file may also be added while the script works; the finished work is kept then.
    kept = replaced.path.with_name("output_2")
    with pytest.raises(UserError, match=f"{re.escape(added.name)} does not belong to the.*; the "
                       f"new output is in {kept}$"), replaced.replace({}) as temporary:
        added.write_text("precious")
        (temporary / "work.png").write_text("hours")
    assert added.read_text() == "precious"
    assert (kept / "work.png").read_text() == "hours" and (kept / "settings.json").exists()
    assert not list(replaced.path.parent.glob("*partial*"))


@pytest.mark.slow
def test_a_second_writer_of_a_replaced_folder_is_refused_before_any_work(replaced, tmp_path):
    code = ("import sys, pathlib, test_results as t\n"
            "store = t.ResultStore(pathlib.Path(sys.argv[1]), t.REPLACED)\n"
            "store.check_replaceable()\n"
            "print('ready', flush=True)\n"
            "sys.stdin.read()\n"
            "t.write_whole(store, 1)")
    with subprocess.Popen([sys.executable, "-c", code, str(replaced.path)], text=True,
                          cwd=ROOT / "tests", env={**os.environ, "PYTHONPATH": str(ROOT)},
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(UserError, match=f"process {process.pid} on .* is using"):
            write_whole(replaced, 2)
        assert not replaced.path.exists()
        process.communicate()
    assert replaced.settings()["seed"] == 1
    write_whole(replaced, 2)
    assert replaced.settings()["seed"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.slow
def test_two_writers_of_a_file_do_not_mix_and_leftovers_of_killed_ones_are_removed(tmp_path):
    path = tmp_path / "table.csv"
    with atomic_path(path) as first:
        first.write_text("first")
        with atomic_path(path) as second:
            second.write_text("second")
        assert path.read_text() == "second" and first.read_text() == "first"
    assert path.read_text() == "first"
    with pytest.raises(OSError), atomic_folder(tmp_path / "one") as first:
        (first / "x").write_text("first")
        with atomic_folder(tmp_path / "one") as second:
            (second / "x").write_text("second")
    assert (tmp_path / "one" / "x").read_text() == "second"
    code = ("import pathlib, os, signal, sys, common.files as files\n"
            "with files.atomic_path(pathlib.Path(sys.argv[1]) / 'a.csv') as temporary:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert len(list(tmp_path.glob("*.partial*"))) == 1
    code = ("import pathlib, sys, common.files as files\n"
            "files.save_json(pathlib.Path(sys.argv[1]) / 'b.json', {})")
    with atomic_path(path):  # of a process that runs
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
        assert len(list(tmp_path.glob("*.partial*"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "one", "b.json"}


def test_texts_are_written_as_utf8_in_any_locale(tmp_path):
    code = ("import pathlib, sys, common.schemas as s\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "s.Text().write(folder / 'text', 'r\\xe4tsel \\u2264')\n"
            "s.Journal({'x': str}).write(folder / 'journal', [{'x': '\\u2264'}])\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, env={
        **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (tmp_path / "text").read_bytes().decode() == "rätsel ≤"


# Arrays that are computed in steps

@pytest.fixture
def stepwise(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 0)  # settings hold the seconds of each step
    return max(STEPWISE.values(), key=lambda schema: len({type(entry.format)
                                                          for entry in schema.items.values()}))


def analyse(schema, path, seed=1, number=5):
    """Compute all entries in three steps, and return the steps that were not already stored."""
    results, computed = StepResults(path, schema, number, 2), []
    names = list(schema.items)

    def compute(step):
        computed.append(step)
        return ({name: value_of(schema.items[name].format, f"{name} {seed}")
                 for name in names[step::3]}, {"number": step})

    results.start({"seed": seed})
    for step in range(3):
        values = results.step(str(step), functools.partial(compute, step))
        for name in names[step::3]:
            assert same(values[name], value_of(schema.items[name].format, f"{name} {seed}"))
    results.finish()
    return computed


def test_steps_that_were_killed_anywhere_resume_to_identical_bytes(stepwise, tmp_path):
    analyse(stepwise, tmp_path / "one")
    analyse(stepwise, tmp_path / "two", seed=2)
    first, second = bytes_of_files(tmp_path / "one"), bytes_of_files(tmp_path / "two")
    assert first.keys() == second.keys() == {"settings_5.json", *(
        entry.path.format(5, 2) for entry in stepwise.items.values())}
    for call in itertools.count(1, 5):
        path = shutil.copytree(tmp_path / "one", tmp_path / f"killed_{call}")
        try:
            with interrupted(call):
                analyse(stepwise, path, seed=2)
        except KeyboardInterrupt:
            visible = {name: content for name, content in bytes_of_files(path).items()
                       if "/" not in name}
            is_old = set(visible.items()) <= set(first.items())
            assert is_old or set(visible.items()) <= set(second.items())
            assert "settings_5.json" not in visible or visible == first
            finished = len(list(path.glob(".5.partial/step_*.json")))
            assert analyse(stepwise, path, seed=2) == list(range(finished, 3))
            assert bytes_of_files(path) == second
        else:
            break
    assert call > len(stepwise.items)


def test_steps_of_other_settings_are_computed_again_and_other_numbers_stay(stepwise, tmp_path):
    analyse(stepwise, tmp_path / "alone", seed=2)
    analyse(stepwise, tmp_path / "both", number=7)
    with contextlib.suppress(KeyboardInterrupt), interrupted(len(stepwise.items)):
        analyse(stepwise, tmp_path / "both")
    assert analyse(stepwise, tmp_path / "both", seed=2) == [0, 1, 2]
    files = bytes_of_files(tmp_path / "both")
    assert files.items() >= bytes_of_files(tmp_path / "alone").items()
    results = StepResults(tmp_path / "both", stepwise, 7, 2)
    assert results.settings()["seed"] == 1 and results.settings()["steps"]["2"] == {"number": 2}
    with pytest.raises(UserError, match=r"already holds the results for 7 .*; .* --overwrite"):
        results.check_new(overwrite=False)
    results.check_new(overwrite=True)


def test_a_second_writer_of_the_same_steps_is_refused(stepwise, tmp_path):
    hidden = tmp_path / ".5.partial"
    hidden.mkdir()
    with at_work_in(hidden) as words, pytest.raises(UserError, match=words):
        analyse(stepwise, tmp_path)
    assert not bytes_of_files(tmp_path)
    analyse(stepwise, tmp_path)


def test_gaps_and_arrays_of_other_data_are_named(stepwise, tmp_path):
    analyse(stepwise, tmp_path)
    results = StepResults(tmp_path, stepwise, 5, 2)
    name = next(name for name, entry in stepwise.items.items() if isinstance(entry.format, Npy)
                and not entry.fallback and entry.format.array.dims
                and entry.format.array.dtype is np.floating)
    path = results.file(name)
    assert path == tmp_path / stepwise.items[name].path.format(5, 2)
    with pytest.raises(UserError, match=r"rows, but the given data have 77"):
        results.read(name, 77)
    np.save(path, np.full_like(results.read(name), np.nan))
    with pytest.raises(UserError, match=f"'{re.escape(path.stem)}' holds NaN"):
        results.read(name)
    path.unlink()
    assert results.has(name)  # a gap next to settings is an error
    with pytest.raises(UserError, match=f"no file {re.escape(str(path))}; {stepwise.script}"):
        results.read(name)
    results.settings_file.unlink()  # like published folders
    assert not results.has(name)


def test_entries_of_published_folders_may_have_other_names(tmp_path):
    schema = Schema("results for {} samples", "a.py", {
        "x": Entry("x_{}.npy", Npy(Array(np.floating, "N")), fallback="y"),
        "y": Entry("y_{}.npy", Npy(Array(np.floating, "N")))}, settings_name="settings_{}.json")
    results = StepResults(tmp_path, schema, 3)
    assert results.file("x").name == "x_3.npy" and not results.has("x")
    np.save(tmp_path / "y_3.npy", np.ones(3))
    assert results.has("x") and results.read("x").sum() == 3
    np.save(tmp_path / "x_3.npy", np.zeros(3))
    assert results.read("x").sum() == 0
