"""Convert a published agent of "Understanding RL Vision" (a joblib file) to an agent file.

The file is read with a restricted reader that accepts only arrays of numbers, so no code in it is
executed. It holds two dictionaries: ``args``, the training arguments, and ``params``, the tensors
by their names in the network of Hilton et al. (2020). Convolution kernels have the shape (height,
width, in, out), dense kernels (in, out), and the first dense layer reads the last map flattened in
the order row, column, channel.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from agents.agent_file import AgentOrigin, load_agent, save_agent
from agents.networks import Policy, build_policy
from attribution.joblib_arrays import read_joblib
from common.cli import Parser, add_log_flag, add_output_file_flag, check_output, set_up_logging
from common.errors import UserError, nearest, script_main
from common.files import MAX_WEIGHT
from common.game_constants import NUM_ACTIONS

WHAT = "published checkpoint"
# Published names of our modules. Tensors are called kernel and bias, in heads w and b.
LAYERS = {
    **{f"embedder.conv{name}": f"pi/{name}/conv2d" for name in ("1a", "2a", "2b", "3a", "4a")},
    "embedder.fc1": "pi/dense", "embedder.fc": "pi/dense_1"}
HEADS = {"fc_policy": "pi", "fc_value": "vf"}


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("checkpoint", type=Path, help="published joblib file, such as coinrun.jd")
    add_output_file_flag(flags, required=True, help="agent file to write, such as model.pth")
    add_log_flag(flags)
    return flags


def same_weights(policy: Policy, other: Policy) -> bool:
    """Return whether two agents have equal parameters."""
    own, others = policy.state_dict(), other.state_dict()
    return own.keys() == others.keys() and all(torch.equal(own[name], others[name])
                                               for name in own)


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    policy, origin = read_published(args.checkpoint)
    check_output(args.output, lambda path: same_weights(load_agent(path), policy), args.overwrite)
    save_agent(args.output, policy, origin=origin)
    backgrounds = " --use_backgrounds" if origin.use_backgrounds else ""
    print(f"wrote {args.output}; to measure it:\n"
          f"    python evaluate.py --model_file {args.output} --env_name coinrun "
          f"--distribution_mode hard{backgrounds}")


def read_published(path: Path) -> tuple[Policy, AgentOrigin]:
    """Read the policy in a published checkpoint, and its provenance.

    Raises:
        UserError: if the file is missing, damaged or contains code, or if the agent has another
            network, a memory, or other actions or tensors; the message names the entry.
    """
    content = read_joblib(path, WHAT)
    for name in ("args", "params"):
        if not isinstance(content.get(name), dict):
            raise UserError(f"the {WHAT} {path} has no dictionary '{name}'")
    args, params = content["args"], content["params"]
    if args.get("cnn") != "clear":
        raise UserError(f"the {WHAT} {path} holds the network '{args.get('cnn')}' (entry 'cnn'), "
                        "not 'clear'")
    if args.get("use_lstm"):
        raise UserError(f"the {WHAT} {path} holds an agent with an LSTM (entry 'use_lstm'), which "
                        "is no network of ours")
    policy = build_policy("clear", 1, recurrent=False, learned_initial_state=False)
    policy.load_state_dict(_weights(params, policy, path))
    return policy, _origin(args)


def _published_name(key: str) -> str:
    """Return the name in a published file of one of our tensors."""
    module, _, kind = key.rpartition(".")
    if module in HEADS:
        return f"ppo2_model/{HEADS[module]}/{kind[0]}:0"
    return f"ppo2_model/{LAYERS[module]}/{kind.replace('weight', 'kernel')}:0"


def _weights(params: dict, policy: Policy, path: Path) -> dict[str, torch.Tensor]:
    names = {key: _published_name(key) for key in policy.state_dict()}
    for name in params:
        if name not in names.values():
            raise UserError(f"the {WHAT} {path} holds a tensor '{name}' that the network has not"
                            f"{nearest(str(name), names.values())}")
    actions = params.get(names["fc_policy.bias"])
    if isinstance(actions, np.ndarray) and actions.shape != (NUM_ACTIONS,):
        raise UserError(f"the agent in the {WHAT} {path} has {actions.size} actions; Procgen's "
                        f"games have {NUM_ACTIONS}")
    weights = {}
    for key, expected in policy.state_dict().items():
        tensor = params.get(names[key])
        if not isinstance(tensor, np.ndarray) or tensor.dtype.kind != "f":
            raise UserError(f"the {WHAT} {path} has no tensor '{names[key]}'")
        converted = _our_layout(key, tensor) if tensor.ndim == expected.ndim else tensor
        if converted.shape != tuple(expected.shape):
            raise UserError(f"in the {WHAT} {path} the tensor '{names[key]}' has the shape "
                            f"{tensor.shape}, which does not fit the network")
        if not (np.abs(tensor) <= MAX_WEIGHT).all():
            raise UserError(f"in the {WHAT} {path} the tensor '{names[key]}' holds NaN, infinity "
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


def _origin(args: dict) -> AgentOrigin:
    """Return the provenance of a published agent. Arguments of unexpected type are left out;
    published Procgen agents use the defaults, backgrounds and hard mode."""
    def number(name: str) -> float | None:
        value = args.get(name)
        return float(value) if isinstance(value, int | float) else None

    scaled = args.get("reward_processing", "none") != "none"
    return AgentOrigin(
        reward_scale=None if scaled else number("reward_scale"),
        use_backgrounds=True if args.get("env_kind") == "procgen" else None,
        gamma=number("gamma"), lmbda=number("lambda"))


if __name__ == "__main__":
    raise SystemExit(main())
