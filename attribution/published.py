"""Convert a published agent of "Understanding RL Vision", see ``ConvertOptions``.

The joblib file holds two dictionaries: ``args``, the training arguments, and ``params``, the
tensors by their names in the network of Hilton et al. (2020). Convolution kernels have the shape
(height, width, in, out), dense kernels (in, out), and the first dense layer reads the last map
flattened in the order row, column, channel.

A joblib file is a pickle, and a pickle can call any function by name. The reader here resolves the
few names that a file of weights needs to classes that only store their arguments, and rejects any
other name, so no code in the file is executed. The bytes of an array follow its pickled description
in the file (``joblib.numpy_pickle.NumpyArrayWrapper``).
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from agents.agent_file import AgentOrigin, load_agent, save_agent, weights_sha256
from agents.networks import Policy, build_policy
from common.cli import output_file
from common.errors import UserError, nearest
from common.files import MAX_REASON, MAX_WEIGHT, check_nested, read_bytes
from common.game_constants import GAMES
from common.options import LogOptions, OutputFileOptions, command, option

WHAT = "published checkpoint"
_KERNEL, _HEAD = ("kernel", "bias"), ("w", "b")
# Published names of tensors, by their names in our networks.
NAMES = {f"{module}.{own}": f"ppo2_model/{published}/{name}:0" for module, published, names in (
    *((f"embedder.conv{layer}", f"pi/{layer}/conv2d", _KERNEL)
      for layer in ("1a", "2a", "2b", "3a", "4a")),
    ("embedder.fc1", "pi/dense", _KERNEL), ("embedder.fc", "pi/dense_1", _KERNEL),
    ("fc_policy", "pi", _HEAD), ("fc_value", "vf", _HEAD))
    for own, name in zip(("weight", "bias"), names)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(OutputFileOptions, LogOptions):
    """Convert a published agent of "Understanding RL Vision" (a joblib file) to an agent file."""

    checkpoint: Path = option(help="published joblib file, such as coinrun.jd",
                              names=("checkpoint",))
    output: Path = option(help="agent file to write, such as model.pth", type=output_file)


def convert(options: ConvertOptions) -> Policy:
    """Write the agent, and return it."""
    policy, origin = read_published(options.checkpoint)
    options.check_output(lambda path: weights_sha256(load_agent(path)) == weights_sha256(policy))
    save_agent(options.output, policy, origin=origin)
    print(f"wrote {options.output}; to measure it:\n"
          f"    python evaluate.py --model_file {options.output}")
    return policy


def read_published(path: Path) -> tuple[Policy, AgentOrigin]:
    """Read a published checkpoint, and convert it to an agent of this project.

    Returns:
        The agent, and the facts about its training that agent files store.

    Raises:
        UserError: if the file is missing, damaged or contains code, or if the agent's network is
            not ``clear``, is recurrent, or has other actions or tensors; the message names the
            entry.
    """
    content = read_joblib(path, WHAT)
    for name in ("args", "params"):
        if not isinstance(content.get(name), dict):
            raise UserError(f"the {WHAT} {path} has no dictionary '{name}'")
    args, params = content["args"], content["params"]
    if args.get("cnn") != "clear" or args.get("use_lstm") not in (None, False, 0):
        raise UserError(f"the {WHAT} {path} holds the network '{args.get('cnn')}' (entry 'cnn'), "
                        f"with use_lstm={args.get('use_lstm')!r}, not 'clear' without an LSTM")
    policy = build_policy("clear", 1, recurrent=False, learned_initial_state=False)
    policy.load_state_dict(_weights(params, policy, path))
    # Arguments of unexpected type are left out. The article's Procgen agents were trained with
    # backgrounds on hard levels, which the file does not say.
    numbers = {name: float(value) for name, value in args.items()
               if isinstance(value, int | float) and math.isfinite(value)}
    scaled = str(args.get("reward_processing", "none")) != "none"
    is_procgen = args.get("env_kind") == "procgen" and args.get("env_name") in GAMES
    return policy, AgentOrigin(
        reward_scale=None if scaled else numbers.get("reward_scale"),
        use_backgrounds=True if is_procgen else None,
        gamma=numbers.get("gamma"), lmbda=numbers.get("lambda"),
        env_name=str(args["env_name"]) if is_procgen else None,
        distribution_mode="hard" if is_procgen else None)


def _weights(params: dict, policy: Policy, path: Path) -> dict[str, torch.Tensor]:
    for name in params:
        if name not in NAMES.values():
            raise UserError(f"the {WHAT} {path} holds a tensor '{name}' that the network lacks"
                            f"{nearest(str(name), NAMES.values())}")
    weights = {}
    for key, expected in policy.state_dict().items():
        tensor = params.get(NAMES[key])
        if not isinstance(tensor, np.ndarray) or tensor.dtype.kind != "f":
            raise UserError(f"the {WHAT} {path} has no tensor '{NAMES[key]}'")
        converted = _our_layout(key, tensor) if tensor.ndim == expected.ndim else tensor
        if converted.shape != tuple(expected.shape):
            raise UserError(f"in the {WHAT} {path} the tensor '{NAMES[key]}' has the shape "
                            f"{tensor.shape}, which does not fit the network")
        if not (np.abs(tensor) <= MAX_WEIGHT).all():
            raise UserError(f"in the {WHAT} {path} the tensor '{NAMES[key]}' holds NaN, infinity "
                            f"or a number beyond {MAX_WEIGHT:.0e}")
        weights[key] = torch.from_numpy(np.ascontiguousarray(converted, dtype=np.float32))
    return weights


def _our_layout(key: str, tensor: np.ndarray) -> np.ndarray:
    """Permute the dimensions of a published tensor to PyTorch's order."""
    if tensor.ndim == 4:
        return tensor.transpose(3, 2, 0, 1)
    if key == "embedder.fc1.weight" and len(tensor) == 4 * 4 * 32:
        by_channel = tensor.reshape(4, 4, 32, -1).transpose(2, 0, 1, 3)  # was row, column, channel
        return by_channel.reshape(len(tensor), -1).T
    return tensor.T


KINDS = "biuf"  # NumPy kinds: boolean, signed and unsigned integer, floating point


class _Refused(Exception):
    """Raised for an entry that is not accepted; the message is a noun phrase that names it."""


class _Inert:
    """Stand-in for classes to which the pickle only refers, such as ``numpy.ndarray``; rejects any
    state."""

    __slots__ = ()

    def __setstate__(self, state):
        raise _Refused(f"a state for a {type(self).__name__.strip('_')}")


class _Dtype(_Inert):
    """Stand-in for ``numpy.dtype``: type code and byte order."""

    __slots__ = ("code", "order")
    order: Literal["<", ">", "|", "="]

    def __init__(self, code: str, align: bool = False, copy: bool = False):
        self.code, self.order = str(code), "="

    def __setstate__(self, state: tuple):
        order, details = state[1], state[2:5]
        if any(detail is not None for detail in details) or order not in ("<", ">", "|", "="):
            raise _Refused(f"an array of the type '{self.code}' with fields")
        self.order = order

    def resolved(self) -> np.dtype:
        if self.code[:1] not in KINDS or not self.code[1:].isdigit():
            raise _Refused(f"an array of the type '{self.code}', which is no number")
        return np.dtype(self.code).newbyteorder(self.order)


class _ArrayWrapper(_Inert):
    """Stand-in for joblib's description of an array; the array's bytes follow it in the file."""

    __slots__ = ("dtype", "fortran_order", "is_padded", "shape")

    def __setstate__(self, state: dict):
        if state["subclass"] is not _Inert or not isinstance(state["dtype"], _Dtype):
            raise _Refused("an array of a custom class")
        self.dtype, self.shape = state["dtype"].resolved(), tuple(map(int, state["shape"]))
        self.fortran_order = state["order"] == "F"
        self.is_padded = state.get("numpy_array_alignment_bytes") is not None  # since joblib 1.2

    def read(self, file: io.BytesIO) -> np.ndarray:
        if self.is_padded:
            file.read(file.read(1)[0])
        content = file.read(math.prod(self.shape) * self.dtype.itemsize)
        array = np.frombuffer(content, self.dtype).reshape(
            self.shape, order="F" if self.fortran_order else "C")
        return array.astype(self.dtype.newbyteorder("="))


class _Scalar(_Inert):
    """Stand-in for a NumPy scalar, which is converted to a Python number."""

    __slots__ = ()

    def __new__(cls, dtype: _Dtype, content: bytes):
        return np.frombuffer(content, dtype.resolved(), count=1)[0].item()


class _Dictionary(dict):
    """Stand-in for a ``defaultdict``, without its default."""

    def __init__(self, default: type):
        super().__init__()

    def __setstate__(self, state):
        raise _Refused("a state for a dictionary")


_ACCEPTED = {
    ("joblib.numpy_pickle", "NumpyArrayWrapper"): _ArrayWrapper,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "scalar"): _Scalar,
    ("numpy._core.multiarray", "scalar"): _Scalar,
    ("collections", "defaultdict"): _Dictionary,
    ("builtins", "float"): _Inert,  # default factory of a defaultdict
}


class _Unpickler(pickle._Unpickler):  # in Python, because the C version cannot read array bytes
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._content = file

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ACCEPTED:
            raise _Refused(f"'{module}.{name}'")
        return _ACCEPTED[module, name]

    def load_build(self):
        super().load_build()
        if isinstance(self.stack[-1], _ArrayWrapper):
            self.stack[-1] = self.stack[-1].read(self._content)

    dispatch[pickle.BUILD[0]] = load_build


def read_joblib(path: Path, what: str) -> dict:
    """Read an uncompressed joblib file that holds a dictionary.

    Args:
        path: the file.
        what: kind of file, for error messages.

    Returns:
        Content of the file: dictionaries, lists, tuples, text, numbers and arrays of numbers.

    Raises:
        UserError: if the file is missing, damaged, not a dictionary, or contains anything else,
            such as code; the message names the rejected entry.
    """
    content = read_bytes(path, what)
    try:
        loaded = _Unpickler(io.BytesIO(content)).load()
    except _Refused as error:
        raise UserError(f"the {what} {path} holds {error}; nothing but arrays of numbers is read "
                        "from such a file, because any other entry could be code") from None
    except Exception as error:  # files of other formats can raise almost any exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        raise UserError(f"the {what} {path} is truncated, compressed or not a joblib file "
                        f"({reason})") from None
    if not isinstance(loaded, dict):
        raise UserError(f"the {what} {path} holds a {type(loaded).__name__}, not a dict")
    check_nested(loaded, path)
    return loaded


main = command(ConvertOptions, convert)

if __name__ == "__main__":
    raise SystemExit(main())
