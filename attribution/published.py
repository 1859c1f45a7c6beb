"""Convert a published agent of "Understanding RL Vision" (a joblib file) to an agent file.

The file is read by a reader that admits nothing but arrays of numbers, so no code in it runs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from agents.agent_file import load_agent, save_agent
from agents.networks import Policy
from attribution.published_agents.conversion import read_published
from common.cli import Parser, add_log_flag, add_output_file_flag, check_output, set_up_logging
from common.errors import script_main


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("checkpoint", type=Path, help="published joblib file, such as coinrun.jd")
    add_output_file_flag(flags, required=True, help="agent file to write, such as model.pth")
    add_log_flag(flags)
    return flags


def same_weights(policy: Policy, other: Policy) -> bool:
    """Whether two agents have the same tensors."""
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


if __name__ == "__main__":
    raise SystemExit(main())
