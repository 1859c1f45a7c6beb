"""The result store, over every schema that the project declares.

Values are drawn at random for each entry. A run opens a folder, computes two or three items of each
entry, and writes the results. What holds for one schema must hold for all.
"""

import contextlib
import errno
import functools
import importlib
import itertools
import os

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, at_work_in
from conftest import bytes_of_files as all_bytes

from common.errors import UserError
from common.files import sha256
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

PACKAGES = ("agents", "analysis", "attribution", "generative", "interventions", "maze")
# Uses every format; the declared schemas need not.
EXAMPLE = Schema(
    "examples", "example.py", items={
        "arrays": Entry("arrays/{}/{}.npz", Npz({
            "before": Array(np.float32, "N K"), "after": Array(np.float64, "A N K", finite=False),
            "more": Array(np.int64, "A 3", optional=True)})),
        "array": Entry("array_{}.npy", Npy(Array(np.float32, "N 2"))),
        "folder": Entry("folders/{}", NpyFolder({"x": Array(np.int64, "N"), "y": Array(bool)})),
        "table": Entry("tables/{}.csv", Table(
            {"name": str, "value": float, "count": int, "is_control": bool}, exact=True)),
        "facts": Entry("facts_{}.json", Json())},
    results={"report": Entry("report.md", Text()), "figure": Entry("figure.png", File()),
             "rows": Entry("rows.csv", Table({"value": float}))})


def bytes_of_files(folder):
    """Bytes of every file below a folder by its path, but for the lock of this process."""
    return {path: content for path, content in all_bytes(folder).items()
            if not path.endswith(".lock")}


def schemas():
    """Every schema in the packages, by its module and name."""
    found = {"example": EXAMPLE}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "Schema(" in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                content = vars(importlib.import_module(name))
                found.update({f"{name}.{key}": value for key, value in content.items()
                              if isinstance(value, Schema)})
    return found


SCHEMAS = schemas()


@pytest.fixture(params=SCHEMAS)
def schema(request):
    return SCHEMAS[request.param]


class Run:
    """A script that writes random results of a schema to a folder.

    Items are divided among shards one by one. The value of an item depends on its key alone.
    """

    def __init__(self, schema, path):
        self.schema, self.store = schema, ResultStore(path, schema)
        self.computed = []
        self.keys = {name: keys_of(entry) for name, entry in schema.items.items()}
        self.settings = {"seed": 1, "agent_sha256": "a" * 64, "versions": {"numpy": "1"}}
        if schema.growing:
            self.settings[schema.growing] = {
                key: {"made_by": key} for (key,) in self.keys[schema.growing_items]}

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
                self.store.compute(name, *key, function=functools.partial(
                    self._compute, name, key))
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
    """Keys of three items of an entry, or of its only file."""
    number = entry.path.count("{}")
    return [tuple(f"{place}{part}" for part in range(number))
            for place in ("a", "b", "c")[:3 if number else 1]]


def value_of(form, seed):
    """A random value of a format; the same for the same seed."""
    rng = np.random.default_rng(list(seed.encode()))
    if isinstance(form, Npz | NpyFolder):
        sizes = {dim: int(rng.integers(1, 5)) for field in form.fields.values()
                 for dim in field.dims.split() if not dim.isdigit()}
        return {name: _array(field, sizes, rng) for name, field in form.fields.items()}
    if isinstance(form, Npy):
        return _array(form.array, {dim: 3 for dim in form.array.dims.split()}, rng)
    if isinstance(form, Table):
        return pd.DataFrame({name: [_cell(kind, rng) for _ in range(3)]
                             for name, kind in form.columns.items()})
    if isinstance(form, Journal):
        return [{name: _cell(kind, rng) for name, kind in form.fields.items()} for _ in range(3)]
    if isinstance(form, Json):
        return {"value": float(rng.random())} if form.cls is dict else [1, 2]
    return seed * 3 if isinstance(form, Text) else seed.encode() * 3


def _array(field, sizes, rng):
    shape = tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in field.dims.split())
    values = rng.random(shape)
    if issubclass(field.dtype, np.str_):
        return np.full(shape, "name")
    if field.dtype is bool:
        return values > 0.5
    return np.asarray(values * 9).astype({
        np.floating: np.float32, np.integer: np.int64, np.number: np.float32}.get(
            field.dtype, field.dtype))


def _cell(kind, rng):
    return {int: int(rng.integers(9)), float: float(rng.random()), bool: bool(rng.integers(2)),
            str: "text", list: [[1, 2], [3, 4]], dict: {"a": 0.5}}[kind]


def same(read, value):
    """Whether a value that was read is the one that was written."""
    if isinstance(value, pd.DataFrame):
        pd.testing.assert_frame_equal(read, value[list(read.columns)], check_exact=False,
                                      rtol=1e-5)
    elif isinstance(value, dict) and any(isinstance(each, np.ndarray) for each in value.values()):
        assert read.keys() == value.keys()
        for name in value:
            np.testing.assert_array_equal(read[name], value[name])
    elif isinstance(value, np.ndarray):
        np.testing.assert_array_equal(read, value)
    else:
        assert read == value
    return True


@contextlib.contextmanager
def interrupted(call, error=KeyboardInterrupt):
    """Fail when a file or a folder is to get its name, or a row is appended, for the n-th time."""
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
def whole(schema, tmp_path):
    """A finished run, and the bytes of its files."""
    run = Run(schema, tmp_path / "whole")
    run()
    return run, bytes_of_files(tmp_path / "whole")


def test_values_come_back_from_files_of_their_names(whole):
    run, files = whole
    for name, keys in run.keys.items():
        for key in keys:
            value = value_of(run.schema.items[name].format, f"{name} {key}")
            assert same(run.store.read(name, *key), value)
    for entry in (*run.schema.items.values(), *run.schema.results.values()):
        assert list(run.store.path.glob(entry.pattern()))
    assert set(files) == {
        str(path.relative_to(run.store.path)) for pattern in run.schema.patterns()
        for path in run.store.path.glob(pattern)}
    assert run.store.settings()["seed"] == 1


def test_a_run_killed_at_any_write_resumes_to_identical_bytes(schema, whole, tmp_path):
    for call in itertools.count(1):
        run = Run(schema, tmp_path / f"killed_{call}")
        try:
            with interrupted(call):
                run()
        except KeyboardInterrupt:
            before = list(run.computed)
            run()
            assert bytes_of_files(run.store.path) == whole[1]
            repeated = len(run.computed) - len(set(run.computed)) if not any(
                isinstance(entry.format, Journal) for entry in schema.items.values()) else 0
            assert repeated <= 1, "more than the interrupted item was computed again"
            assert before == run.computed[:len(before)]
        else:
            break
    assert call > len(run.schema.items)


def test_a_full_disk_is_named_and_the_run_resumes(schema, whole, tmp_path):
    for call in itertools.count(1):
        run = Run(schema, tmp_path / f"full_{call}")
        try:
            with interrupted(call, OSError(errno.ENOSPC, "No space left on device")):
                run()
        except OSError as error:
            assert "No space left" in str(error)
            run()
            assert bytes_of_files(run.store.path) == whole[1]
        else:
            break


def test_finished_items_are_kept_and_old_results_are_removed(whole):
    run, files = whole
    run.computed.clear()
    run.store.open(run.settings)
    for entry in run.schema.results.values():
        assert not list(run.store.path.glob(entry.pattern()))
    run()
    assert not run.computed and bytes_of_files(run.store.path) == files


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))), ids=str)
def test_shards_in_any_order_repeated_and_killed_equal_one_run(schema, whole, tmp_path, order):
    run = Run(schema, tmp_path / "shards")
    for part in order:
        with contextlib.suppress(KeyboardInterrupt), interrupted(order[0] + 3):
            run(Shard(part, 3))
    with pytest.raises(UserError, match="not joined; run this with --join"):
        run()
    for part in (*order, order[0]):
        run(Shard(part, 3))
    run(join=True)
    assert bytes_of_files(run.store.path) == whole[1]
    run(Shard(order[1], 3))  # by a batch system, once more
    assert bytes_of_files(run.store.path) == whole[1]


def test_joining_names_missing_shards(schema, tmp_path):
    run = Run(schema, tmp_path / "shards")
    run(Shard(2, 3))
    for refused, words in ((dict(join=True), "lacks shards 1/3, 3/3"),
                           (dict(shard=Shard(1, 4)), "holds shards of 3"),
                           (dict(shard=Shard(1, 3), seed=2), "with another seed"),
                           (dict(shard=Shard(1, 3), overwrite=True), "throw away what shards")):
        before = bytes_of_files(run.store.path)
        with pytest.raises(UserError, match=words):
            run(**refused)
        assert bytes_of_files(run.store.path) == before
    if schema.results:
        with pytest.raises(UserError, match=r"--join|there is no"):
            run.store.read(next(iter(schema.results)))


def test_other_settings_are_refused_by_name_and_overwritten_on_request(whole):
    run, files = whole
    with pytest.raises(UserError, match=r"with another seed; choose another --.*give --overwrite"):
        run(seed=2)
    assert bytes_of_files(run.store.path) == files
    run(versions={"numpy": "2"})
    run.computed.clear()
    run(overwrite=True, seed=2)
    assert run.computed and run.store.settings()["seed"] == 2


def test_foreign_folders_and_files_are_left_alone(schema, whole, tmp_path):
    run, files = whole
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds other data"):
        Run(schema, tmp_path / "foreign")()
    assert bytes_of_files(tmp_path / "foreign") == {"thesis.tex": b"mine"}
    (run.store.path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.tex is no part of"):
        run(overwrite=True)
    assert bytes_of_files(run.store.path) == {**files, "thesis.tex": b"mine"}


def test_a_second_writer_is_refused(schema, tmp_path):
    (tmp_path / "busy").mkdir()
    with at_work_in(tmp_path / "busy") as words, pytest.raises(UserError, match=words):
        Run(schema, tmp_path / "busy")()
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
    everything = [(name, key, entry) for name, entry in (
        *run.schema.items.items(), *run.schema.results.items())
        for key in keys_of(entry) if not isinstance(entry.format, Text | File)
        and getattr(entry.format, "columns", True)]
    for name, key, entry in everything:
        path = run.store.file_of(name, *key)
        path = min(path.iterdir()) if entry.format.is_folder else path
        content = path.read_bytes()
        path.write_bytes(DAMAGES[damage](content))
        # A table or journal may be shorter and still be one.
        may_be_read = damage in ("truncated", "empty") and isinstance(
            entry.format, Table | Journal)
        try:
            run.store.read(name, *key)
            assert may_be_read
        except UserError as error:
            assert str(path) in str(error) or str(path.parent) in str(error)
        path.unlink()
        with pytest.raises(UserError) as raised:
            run.store.read(name, *key)
        assert str(path) in str(raised.value)
        path.write_bytes(content)


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
    schema = Schema("arms", "example.py", {"arm": Entry("arms/{}.json", Json())}, growing="arms",
                    growing_items="arm")
    store = ResultStore(tmp_path / "out", schema)
    store.open({"arms": {"a": {"seed": 1}}})
    store.write("arm", "a", value={"x": 1})
    store.open({"arms": {"b": {"seed": 2}}})
    assert store.settings()["arms"] == {"a": {"seed": 1}, "b": {"seed": 2}}
    assert store.keys("arm") == ["a"]
    with pytest.raises(UserError, match="holds 'a' of the arms, but made otherwise"):
        store.open({"arms": {"a": {"seed": 3}}})
    store.open({"arms": {"b": {"seed": 4}}})  # of which nothing was written


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
