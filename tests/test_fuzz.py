"""Damaged files of every kind: each reader keeps its promise or says in one sentence why not.

All damage is drawn by fixed seeds. Nothing but a ``UserError`` or an ``OSError`` leaves a reader.
"""

import io
import json
import os
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import ROOT, tiny_policy

from agents.agent_file import load_agent, save_agent
from common.config import read_yaml
from common.errors import UserError, script_main
from common.files import (
    MAX_DEPTH,
    MAX_WEIGHT,
    load_tensors,
    open_array,
    read_array,
    read_description,
)
from common.metrics_log import MetricsLog, read_metrics
from common.tables import read_table

KINDS = {"number": int, "fraction": float, "truth": bool, "name": str}


def array_bytes(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype == object)
    return file.getvalue()


def tensor_bytes(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


ODD_VALUES = [None, True, -1, 2**70, 1e300, float("nan"), float("inf"), "", "x" * 5000, "\udcff",
              [], {}, nested(MAX_DEPTH + 5), {"": {"": []}}]
ODD_TENSORS = [
    torch.zeros(()), torch.zeros(0), torch.zeros(2, 64), torch.full((64,), float("nan")),
    torch.full((15,), 1e30), torch.zeros(1).expand(10**9, 10**3), torch.zeros(64, device="meta"),
    torch.eye(64).to_sparse(), torch.arange(64), torch.zeros(64, dtype=torch.complex64),
    torch.zeros(64, dtype=torch.bool), torch.zeros(192, 64, dtype=torch.float16)]
VALID = {
    "array": [array_bytes(np.arange(60, dtype=np.float32).reshape(12, 5)),
              array_bytes(np.asfortranarray(np.ones((3, 4)))), array_bytes(np.ones(7, np.int64))],
    "tensors": [tensor_bytes({"model_state_dict": {"a": torch.rand(3, 4)}, "flag": True})],
    "json": [json.dumps({"format": 1, "env": {"levels": [1, 2.5, None]}, "name": "x"}).encode()],
    "yaml": [yaml.safe_dump({"seed": 3, "env": {"name": "maze", "rate": 0.5},
                             "day": "2024-02-28"}).encode(),
             (ROOT / "hyperparams" / "procgen" / "config.yml").read_bytes()],
    "table": [pd.DataFrame({"number": range(9), "fraction": np.linspace(0, 1, 9),
                            "truth": [True, False, True] * 3, "name": list("abcdefghi")}
                           ).to_csv(index=False).encode(),
              b'number,fraction,truth,name\n1,2,0,"a"\n'],
}
OTHER_KINDS = [b"", b"\0" * 100, b"\xff\xfe" + b"a\0" * 40, b"PK\x03\x04", b"%PDF-1.4",
               b"[" * 10**5, b"{\"a\":" * 10**4, b"a: " * 1000, b"- " * 10**4,
               b"\x93NUMPY" + b"\xff" * 50,
               b"\x93NUMPY\x01\x00\xff\xff{", b"&a [*a, *a]", b"a: &a [*a]", b"a: !!int ''",
               b"a: !!timestamp x", b"a: !!python/object/apply:os.getpid []", b"a: 2023-02-31",
               b"1: 2", b"number,fraction,truth,name\n" + b"9" * 5000 + b",1,1,a\n",
               b"number,number,fraction,truth,name\n1,1,1,1,a\n", b"\"" * 999, b"true", b"[1]",
               b"1e999"]
VALUES_IN_TEXT = [b"nan", b"inf", b"-1", b"1e400", b"9" * 400, b"2023-13-45", b"!!", b"&x ", b"*x",
                  b"{", b"[", b",", b"\"", b"\n", b"\r", b"\t", b"\0", b"\xff", b": ",
                  b"True", b"0x"]


def damaged(kind, rng):
    """The bytes of a file of a kind with one or more things wrong, or of another kind."""
    way = rng.integers(7)
    if way == 0:
        others = [content for valid in VALID.values() for content in valid] + OTHER_KINDS
        return others[rng.integers(len(others))]
    content = bytearray(VALID[kind][rng.integers(len(VALID[kind]))])
    if way == 1:  # bits
        for place in rng.integers(len(content), size=rng.integers(1, 9)):
            content[place] ^= 1 << rng.integers(8)
    elif way == 2:
        del content[rng.integers(len(content)):]
    elif way == 3:
        place = rng.integers(len(content))
        content[place:place] = VALUES_IN_TEXT[rng.integers(len(VALUES_IN_TEXT))]
    elif way == 4:
        begin, end = sorted(rng.integers(len(content), size=2))
        content[begin:end] = rng.bytes(rng.integers(20))
    elif way == 5:  # in the header, if there is one
        content[rng.integers(min(len(content), 130))] = rng.integers(256)
    else:
        return odd(kind, rng)
    return bytes(content)


def odd(kind, rng):
    """A whole file of a kind that holds something unexpected."""
    value = ODD_VALUES[rng.integers(len(ODD_VALUES))]
    if kind == "json":
        return json.dumps([{"a": value}, value, [value]][rng.integers(3)]).encode()
    if kind == "yaml":
        return yaml.safe_dump({"a": value} if rng.integers(2) else value).encode()
    if kind == "tensors":
        tensor = ODD_TENSORS[rng.integers(len(ODD_TENSORS))]
        return tensor_bytes([{"a": tensor}, {"a": {"b": [tensor, value]}}, [tensor], tensor,
                             {"a": value}][rng.integers(5)])
    if kind == "array":
        return array_bytes([np.array([{}]), np.array("text"), np.zeros(3, ">f4"), np.zeros((0, 5)),
                            np.zeros(2, [("a", "f4")]), np.array(3.5), np.zeros((2, 2), complex),
                            np.array(["2024"], "datetime64[D]")][rng.integers(8)])
    row = [str(each)[:50] for each in rng.choice(np.array(
        ["1", "0.5", "True", "x", "", "nan", "1e300", "-1e40", "99999999999999999999", "1.5", " "]),
        size=rng.integers(1, 7))]
    return b"number,fraction,truth,name\n1,1,1,a\n" + ",".join(row).encode() + b"\n"


def check_array(path):
    array = read_array(path)
    assert array.dtype.kind in "biuf" and array.nbytes < path.stat().st_size
    assert read_array(path, np.float32, 2).shape == open_array(path, np.float32, 2).shape


def tensors_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    return ([each for item in value for each in tensors_of(item)] if isinstance(value, list)
            else [value] if isinstance(value, torch.Tensor) else [])


def check_tensors(path):
    content = load_tensors(path, "file")
    assert isinstance(content, dict)
    for tensor in tensors_of(content):
        assert tensor.clone().nelement() <= path.stat().st_size


def check_mapping(read):
    def check(path):
        content = read(path)
        assert isinstance(content, dict) and all(isinstance(key, str) for key in content)
        repr(content)
        json.dumps(content, default=str)
    return check


def check_table(path):
    table = read_table(path, KINDS)
    assert list(table) == list(KINDS)
    if len(table):
        assert table["truth"].dtype == bool
        assert np.isfinite(table[["number", "fraction"]].to_numpy(np.float32)).all()
        assert (table["number"].astype(np.int64) == table["number"]).all()
        assert all(isinstance(name, str) for name in table["name"])


READERS = {"array": check_array, "tensors": check_tensors, "json": check_mapping(read_description),
           "yaml": check_mapping(read_yaml), "table": check_table}


def keeps_its_promise(check, path):
    """Whether the file is taken; it fails with nothing but an error that a script reports."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(path)
    except UserError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 700 and str(path) in message
        return False
    except OSError:
        return False
    return True


@pytest.mark.parametrize("num_files", [100, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_read_right_or_refused(kind, num_files, tmp_path):
    rng = np.random.default_rng(sorted(READERS).index(kind))
    path = tmp_path / "file"
    for content in VALID[kind]:
        path.write_bytes(content)
        if kind != "array" or content is VALID["array"][0]:
            assert keeps_its_promise(READERS[kind], path)
    taken = 0
    for _ in range(num_files):
        path.write_bytes(damaged(kind, rng))
        taken += keeps_its_promise(READERS[kind], path)
    assert taken < num_files / 2  # the damage is damage


def test_agents_with_a_changed_entry_are_refused_or_play(tmp_path):
    rng = np.random.default_rng(7)
    path = tmp_path / "model_1.pth"
    save_agent(path, tiny_policy(), {})
    whole = torch.load(path, weights_only=True)
    frames, hidden, masks = torch.rand(2, 3, 64, 64), torch.zeros(2, 64), torch.ones(2)
    for number in range(120):
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
        assert all((each.abs() <= MAX_WEIGHT).all() for each in policy.state_dict().values())
        with torch.no_grad():
            assert torch.isfinite(policy(frames, hidden, masks).logits).all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_agents_with_absurd_weights_do_not_play(value, tmp_path):
    policy = tiny_policy()
    with torch.no_grad():
        policy.fc_policy.weight[3, 4] = value
    save_agent(tmp_path / "model_1.pth", policy, {})
    with pytest.raises(UserError, match=r"model_1\.pth the tensor 'fc_policy\.weight' holds NaN"):
        load_agent(tmp_path / "model_1.pth")


@pytest.mark.parametrize("damage", [
    b"", b"\0\xff", b"a,b\n1,2\n", b"steps,loss\n1,2,3\n", b"steps,loss\nx,2\n",
    b"steps,loss\n1.5,2\n", b"loss,steps\n1,2\n", b"steps,loss\n1,1e300\n",
    b'steps,loss\n1,"' + b"9" * 10**6], ids=range(9))
def test_damaged_logs_are_neither_shown_nor_extended(damage, tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(damage)
    if not damage.startswith(b"loss"):
        with pytest.raises(UserError):
            read_metrics(path, ("steps", "loss"))
    with pytest.raises(UserError):
        MetricsLog(path, ("steps", "loss"), resume_at=5)
    assert path.read_bytes() == damage


def test_a_pipe_is_no_file_to_wait_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_array, lambda path: open_array(path, np.float32, 2), read_yaml,
                 lambda path: load_tensors(path, "agent file"),
                 lambda path: read_table(path, KINDS), load_agent):
        with pytest.raises(UserError, match="there is no"):
            read(tmp_path / "pipe")
    assert read_description(tmp_path / "pipe") == {}


def test_a_header_that_asks_for_more_than_the_file_holds_allocates_nothing(tmp_path):
    path = tmp_path / "huge.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False,
                                                    "shape": (10**9, 10**6)})
    with pytest.raises(UserError, match="bytes, not"):
        read_array(path)


def test_a_path_that_the_locale_cannot_print_is_printed_escaped(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert script_main(lambda argv: print("wrote \xe9\udcff"))([]) == 0
    screen.flush()
    assert screen.buffer.getvalue() == b"wrote \\xe9\\udcff\n"
