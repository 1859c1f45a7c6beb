"""Compute a steering vector from recorded states: the difference between the mean outputs of a
layer for two classes of states, or the weights of a linear probe that separates the classes.

The vector can be added to the layer's output, for example with compare_interventions.py --patch
add@gru=vectors/right.npz,coefficient=-1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from agents.agent_file import load_agent
from agents.layers import find_layer, layers_named
from agents.networks import Policy
from agents.reference_set import ReferenceSet, activations_of
from agents.rollout_files import RolloutFolder
from analysis.state_splits import WORDS, States, read_states, split_states
from analysis.steps import check_episodes
from common.cli import (
    Parser,
    add_compute_flags,
    add_output_file_flag,
    add_parameter_set_flag,
    check_output,
    count,
    seed,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from generative.flags import add_data_flag
from interventions.config import DirectionFilesConfig
from interventions.flags import add_direction_flags, directions_folder
from interventions.hidden_states_folder import hidden_state_results
from interventions.probes import probe
from interventions.vectors import (
    AS_COMPUTED,
    RMS,
    SCALES,
    SteeringVector,
    check_classes,
    read_vectors,
    save_vectors,
    vector_of_probe,
    vectors_of_classes,
)

MEANS, PROBE = "means", "probe"
MAX_REFERENCE = 200  # number of states from which the RMS of a layer's outputs is computed


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="file of the recorded agent")
    add_parameter_set_flag(flags)
    add_data_flag(flags)
    add_direction_flags(flags)
    flags.add_argument("--split", required=True, metavar="WORD=VALUE",
                       help="how to split states into two classes. " + "; ".join(WORDS.values()))
    flags.add_argument("--layer", default="hidden_state",
                       help="layer of the agent, or 'all' for one vector per layer")
    flags.add_argument("--method", choices=(MEANS, PROBE), default=MEANS,
                       help="means: difference between the means of the two classes; probe: "
                            "weights of a logistic regression trained on some of the levels")
    flags.add_argument("--scale", choices=SCALES, default=AS_COMPUTED,
                       help="unit: scale the vector to norm 1; rms: scale it to the root mean "
                            "square of the layer's outputs")
    flags.add_argument("--num_states", type=count, default=1000,
                       help="largest number of randomly drawn states per class")
    add_output_file_flag(flags, "--vector_file", required=True, help="file to write, <name>.npz")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of the choice of states and of the probe")
    add_compute_flags(flags, in_parameter_set=True)
    flags.set_defaults(precision="float32")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    common = parameters.common
    if args.vector_file.suffix != ".npz":
        raise UserError(f"--vector_file must end in .npz, unlike {args.vector_file}")
    check_output(args.vector_file, lambda path: bool(read_vectors(path)), args.overwrite,
                 "--vector_file")
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    if compute.bfloat16:
        raise UserError("--precision bfloat16 would lose most digits of a difference of two "
                        "outputs; leave it at float32")
    policy = load_agent(args.agent_file, compute.device)
    layers = [layer.name for layer in layers_named(policy, args.layer)]
    folder = RolloutFolder(Path(common.data_dir))
    num_episodes = parameters.get(DirectionFilesConfig).num_episodes
    folder.check_agent(args.agent_file)

    check_episodes(folder, num_episodes)
    steps = folder.all_steps(range(num_episodes))
    clusters = hidden_state_results(directions_folder(args, parameters), num_episodes)
    split = split_states(args.split, steps, lambda: clusters.read("clusters"))
    check_classes(split.is_in, args.split)
    split = split.some(args.num_states, args.seed)
    states = read_states(folder, num_episodes, split.rows, steps)
    modes = [folder.description()["env"]["distribution_mode"]] if folder.description() else []
    vectors = made(args, policy, layers, states, split.is_in, modes)
    save_vectors(args.vector_file, vectors)

    print(f"{split.is_in.sum()} states with {args.split} and {(~split.is_in).sum()} others, of "
          f"{len(np.unique(states.levels))} levels")
    for vector in vectors:
        print(f"{vector.layer}: norm {np.linalg.norm(vector.vector):.3g}")
    print(f"wrote {args.vector_file}")


def made(args: argparse.Namespace, policy: Policy, layers: list[str], states: States,
         is_in: np.ndarray, modes: list[str]) -> list[SteeringVector]:
    """Compute the scaled steering vector of each layer.

    Args:
        args: flags of the script.
        policy: the recorded agent.
        layers: names of the layers.
        states: inputs of the agent at n states.
        is_in: whether each state is in the first class, bool (n,).
        modes: distribution modes of the recorded environment.
    """
    if args.method == MEANS:
        vectors = vectors_of_classes(policy, layers, states.frames, states.entering, is_in,
                                     states.levels, args.split, modes)
    else:
        vectors = {layer: of_probe(args, policy, layer, states, is_in, modes) for layer in layers}
    some = np.random.default_rng(args.seed).permutation(len(is_in))[:MAX_REFERENCE]
    reference = ReferenceSet(states.frames[some], states.entering[some])
    return [vectors[layer].scaled(args.scale, reference.rms(policy, find_layer(policy, layer))
                                  if args.scale == RMS else None) for layer in layers]


def of_probe(args: argparse.Namespace, policy: Policy, layer: str, states: States,
             is_in: np.ndarray, modes: list[str]) -> SteeringVector:
    """Fit a probe to the outputs of one layer, print its scores, and return its weights as a
    steering vector; for arguments see ``made``."""
    outputs = activations_of(policy, states.frames, [layer], states.entering)[layer]
    found = probe(outputs.cpu().numpy(), is_in, states.levels, args.seed, num_shuffles=0)
    scores = ", ".join(f"{row.metric} {row.score:.3f} ({row.low_95:.3f} to {row.high_95:.3f}, "
                       f"without the layer {row.base:.3f})" for row in found.scores.itertuples())
    print(f"{layer}: a probe has on other levels {scores}")
    return vector_of_probe(policy, layer, found.weights, states.levels, args.split, modes)


if __name__ == "__main__":
    raise SystemExit(main())
