"""Conversion of published agents of "Understanding RL Vision", which must not execute code."""

import os
import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
from conftest import FLOAT32, ROOT, refusal

from agents.acting import run_policy
from agents.agent_file import AgentOrigin, load_agent, read_origin, save_agent
from attribution import published
from envs.procgen_env import EnvConfig, ProcgenVectorEnv

SHAPES = {"pi/1a/conv2d": (7, 7, 3, 16), "pi/2a/conv2d": (5, 5, 16, 32),
          "pi/2b/conv2d": (5, 5, 32, 32), "pi/3a/conv2d": (5, 5, 32, 32),
          "pi/4a/conv2d": (5, 5, 32, 32), "pi/dense": (512, 256), "pi/dense_1": (256, 512)}
ARGS = {"cnn": "clear", "use_lstm": 0, "env_name": "coinrun", "env_kind": "procgen",
        "gamma": 0.99, "lambda": 0.9, "reward_scale": 1.0, "reward_processing": "none"}


def random_checkpoint() -> dict:
    rng, params = np.random.default_rng(0), {}

    def add(name, shape, kernel, bias):
        size = np.sqrt(np.prod(shape[:-1]))
        params[f"ppo2_model/{name}/{kernel}:0"] = np.float32(rng.normal(size=shape) / size * 1.4)
        params[f"ppo2_model/{name}/{bias}:0"] = np.float32(rng.normal(size=shape[-1]) / 4)

    for name, shape in SHAPES.items():
        add(name, shape, "kernel", "bias")
    add("pi", (512, 15), "w", "b")
    add("vf", (512, 1), "w", "b")
    return {"args": dict(ARGS), "params": params, "time": 1.5}


def refused(checkpoint: Path, capsys) -> str:
    output = checkpoint.parent / "refused.pth"
    line = refusal(published.main, [checkpoint, "--output", output], capsys)
    assert not output.exists()
    return line


def by_hand(params: dict, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute logits and values with numpy, independently of the project's network."""
    def padded_windows(x, size):
        x = np.pad(x, ((0, 0), *[(size // 2, size // 2)] * 2, (0, 0)))
        return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))

    def convolve(x, name):
        kernel = params[f"ppo2_model/pi/{name}/conv2d/kernel:0"].astype(np.float64)
        windows = padded_windows(x, len(kernel))  # (N, H, W, C, size, size)
        out = np.einsum("nhwcij,ijco->nhwo", windows, kernel, optimize=True)
        return np.maximum(out + params[f"ppo2_model/pi/{name}/conv2d/bias:0"], 0)

    def pool(x):
        squares = [x[:, i::2, j::2] ** 2 for i in (0, 1) for j in (0, 1)]
        return np.sqrt(sum(squares) / 4 + 1e-8)

    def dense(x, name, kernel="kernel", bias="bias"):
        return (x @ params[f"ppo2_model/{name}/{kernel}:0"].astype(np.float64)
                + params[f"ppo2_model/{name}/{bias}:0"])

    x = pool(convolve(frames / 255, "1a"))
    x = pool(convolve(convolve(x, "2a"), "2b"))
    x = pool(convolve(pool(convolve(x, "3a")), "4a"))
    x = np.maximum(dense(x.reshape(len(x), -1), "pi/dense"), 0)
    x = np.maximum(dense(x, "pi/dense_1"), 0)
    return dense(x, "pi", "w", "b"), dense(x, "vf", "w", "b")[:, 0]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """An agent file, converted from a random checkpoint."""
    folder = tmp_path_factory.mktemp("published")
    joblib.dump(random_checkpoint(), folder / "coinrun.jd")
    assert published.main([str(folder / "coinrun.jd"), "--output", str(folder / "model.pth")]) == 0
    return folder / "model.pth"


def test_a_converted_agent_computes_what_the_published_network_does(converted):
    frames = np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    frames[1, :20] = 0
    policy = load_agent(converted)
    output = run_policy(policy, FLOAT32, frames, policy.initial_states(2))
    logits, values = by_hand(random_checkpoint()["params"], frames)
    assert np.ptp(values) > 1e-3 and np.abs(logits).max() > 0.1
    np.testing.assert_allclose(output.logits, logits, atol=1e-4)
    np.testing.assert_allclose(output.values, values, atol=1e-4)


def test_a_converted_file_says_what_is_known_of_its_training(converted, tmp_path):
    assert read_origin(converted) == AgentOrigin(1.0, True, 0.99, 0.9, env_name="coinrun",
                                                 distribution_mode="hard")
    content = random_checkpoint()
    content["args"] |= {"reward_processing": "normalize", "env_kind": "atari"}
    joblib.dump(content, tmp_path / "scaled.jd")
    assert published.main([str(tmp_path / "scaled.jd"), "--output", str(tmp_path / "a.pth")]) == 0
    assert read_origin(tmp_path / "a.pth") == AgentOrigin(None, None, 0.99, 0.9)
    save_agent(tmp_path / "b.pth", load_agent(converted))
    assert read_origin(tmp_path / "b.pth") == AgentOrigin()


class Code:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["params", "an array of objects", "a plain pickle"])
def test_code_in_a_checkpoint_is_named_and_never_runs(place, tmp_path, capsys):
    content, made = random_checkpoint(), tmp_path / "made"
    if place == "an array of objects":
        content["params"]["objects"] = np.array([Code(made)], dtype=object)
    else:
        content["params"]["x"] = Code(made)
    path = tmp_path / "hostile.jd"
    if place == "a plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        joblib.dump(content, path)
    message = refused(path, capsys)
    assert not made.exists()
    # In a plain pickle, arrays of numpy are also restored by calling a function.
    assert {"an array of objects": "an array of the type 'O8', which is no number",
            "a plain pickle": "_reconstruct'"}.get(place, "holds 'posix.mkdir'") in message
    assert "could be code" in message


@pytest.mark.parametrize(("content", "words"), [
    (b"\x80\x04cbuiltins\ngetattr\n.", "holds 'builtins.getattr'"),
    (b"\x80\x04cattribution.published\n_Refused\n.", "holds 'attribution.published._Refused'"),
    (b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper.read\n.",
     "holds 'joblib.numpy_pickle.NumpyArrayWrapper.read'"),
    (b"\x80\x04\x82\x01.", "joblib file"),
    # Attributes of an allowed class, a dtype with sub-arrays, and a class like an allowed one.
    (b"\x80\x03cnumpy\nndarray\nN}X\x04\x00\x00\x00evil\x4b\x01s\x86b.", "hostile.jd"),
    (b"\x80\x03cnumpy\ndtype\n(X\x02\x00\x00\x00f4tR(K\x03X\x01\x00\x00\x00<(X\x01\x00\x00\x00atN"
     b"NJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb.", "hostile.jd"),
    (b"\x80\x03ccollections\ndefaultdict\n)R}X\x03\x00\x00\x00popK\x01sb.", "hostile.jd")])
def test_other_names_are_refused_and_admitted_ones_cannot_be_altered(content, words, tmp_path,
                                                                     capsys):
    (tmp_path / "hostile.jd").write_bytes(content)
    assert words in refused(tmp_path / "hostile.jd", capsys)


def test_damaged_files_are_refused_in_one_sentence(tmp_path, capsys):
    joblib.dump(random_checkpoint(), tmp_path / "whole.jd")
    content, path = (tmp_path / "whole.jd").read_bytes(), tmp_path / "damaged.jd"
    for damaged in (b"", content[:5000], content[:-30], b"PK" + content):
        path.write_bytes(damaged)
        assert "truncated, compressed or not a joblib file" in refused(path, capsys)


@pytest.mark.parametrize(("changes", "words"), [
    ({"params": None}, "has no dictionary 'params'"),
    ({"cnn": "impala"}, "holds the network 'impala' (entry 'cnn')"),
    ({"use_lstm": 1}, "with use_lstm=1"),
    ({"pi/2c/conv2d/kernel": np.zeros((5, 5, 32, 32))}, "that the network lacks"),
    ({"pi/dense_1/bias": None}, "has no tensor 'ppo2_model/pi/dense_1/bias:0'"),
    ({"pi/dense/kernel": np.zeros((2048, 256))}, "kernel:0' has the shape (2048, 256)"),
    ({"pi/3a/conv2d/bias": np.full(32, np.nan)}, "'ppo2_model/pi/3a/conv2d/bias:0' holds NaN")])
def test_agents_of_another_kind_are_refused_by_the_entry(changes, words, tmp_path, capsys):
    content = random_checkpoint()
    for name, value in changes.items():
        of, key = ((content["params"], f"ppo2_model/{name}:0") if "/" in name
                   else (content["args"], name) if name in ARGS else (content, name))
        of.pop(key, None)
        if value is not None:
            of[key] = value
    joblib.dump(content, tmp_path / "wrong.jd")
    assert words in refused(tmp_path / "wrong.jd", capsys)


def test_the_real_published_agent_expects_a_coin(tmp_path):
    """The agent was trained with unscaled rewards, and gets the 10 points of nearly every level."""
    path = Path(os.environ.get("PUBLISHED_AGENTS", ROOT.parent / "shared" / "published"),
                "coinrun_clear.jd")
    if not path.is_file():
        pytest.skip("coinrun_clear.jd was not found; set PUBLISHED_AGENTS to its folder")
    assert published.main([str(path), "--output", str(tmp_path / "model.pth")]) == 0
    assert read_origin(tmp_path / "model.pth") == AgentOrigin(
        1.0, True, 0.999, 0.95, env_name="coinrun", distribution_mode="hard")
    policy = load_agent(tmp_path / "model.pth")
    frames = ProcgenVectorEnv(EnvConfig("coinrun", "hard", use_backgrounds=True), 16, 0
                              ).observe().frames
    values = run_policy(policy, FLOAT32, frames, policy.initial_states(16)).values
    assert (values > 7).all() and (values < 10.5).all()
