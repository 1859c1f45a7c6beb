"""Damaged files of every kind: each reader accepts the file or fails with one clear sentence.

All damage is drawn with fixed seeds. Readers raise nothing but ``UserError`` and ``OSError``.
"""

import io
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import tiny_policy

from agents.agent_file import load_agent, save_agent
from common import files
from common.config import read_yaml
from common.errors import UserError
from common.tables import read_table

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
