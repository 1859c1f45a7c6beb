"""Optimise starts of the simulator for targets, by gradients through the rollout.

The search varies the noise from which the prior of the simulator generates a start and its world
or, without a trained prior, start vectors.

Targets are outputs of the agent (value, log_prob_up, policy for all log-probabilities), directions
of its hidden state (hx_direction_3, hx_direction_3_pca, hx_direction for all of --direction_ids),
units (hidden_state:12, embedder.block3.res2.resadd:5; a layer name alone for all of its units), and
changes of the action (from_left_to_up: the log-probability of "left" in the previous step plus that
of "up" in this step). The same command resumes a killed run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from common.cli import Parser, count
from common.devices import Compute
from common.errors import UserError, script_main
from common.parameters import ParameterSet
from generative.config import SaliencyConfig
from generative.flags import open_directions
from generative.saliency.gradients import DIRECTION
from generative.simulator import Simulator
from generative.start_optimisation.objectives import AIMS, MAXIMISE, Target, targets_named
from generative.start_optimisation.run import add_search_flags, run_search
from generative.start_optimisation.search import OPTIMISED_STARTS
from interventions.flags import (
    add_direction_flags,
    add_direction_ids_flag,
    add_direction_type_flag,
)

_CHOSEN = 4  # random stream; part of the generator's seed


def parser() -> Parser:
    flags = Parser(__doc__)
    add_search_flags(flags)
    flags.add_argument("--targets", nargs="+", default=["value"], metavar="TARGET",
                       help="one or several targets, see above")
    flags.add_argument("--aims", nargs="+", choices=AIMS, default=[MAXIMISE],
                       help="maximise the targets, minimise them, or both")
    flags.add_argument("--num_targets", type=count,
                       help="number of targets to draw at random; all if not given")
    add_direction_ids_flag(flags, "--direction_ids", "directions that hx_direction stands for")
    add_direction_type_flag(flags)
    add_direction_flags(flags)
    flags.add_argument("--output_dir", type=Path,
                       help="output folder; <generated_data_dir>/made_to_order if not given")
    return flags


@script_main
def main(argv: list[str] | None = None) -> int:
    args, explicit, parameters = parser().read(argv, data_flags=("data_dir",))

    def choose(simulator: Simulator, compute: Compute) -> tuple[tuple[Target, ...], dict]:
        targets, matrices = chosen_targets(args, parameters, simulator, compute)
        return targets, {"matrices_sha256": matrices}

    folder = args.output_dir or Path(parameters.common.generated_data_dir) / "made_to_order"
    search = run_search(args, explicit, parameters, folder, OPTIMISED_STARTS, choose)
    if isinstance(search, int):
        return search
    store = search.store
    print(f"wrote {args.num_starts} starts for each of {len(search.context.objectives)} objectives "
          f"and their evaluation to {store.path}; read {store.file_of('report').name} first")
    return 0


def chosen_targets(args: argparse.Namespace, parameters: ParameterSet, simulator: Simulator,
                   compute: Compute) -> tuple[tuple[Target, ...], dict | None]:
    """Return the targets selected by the flags, and the checksums of the direction files.

    The checksums are None if no target is a direction.
    """
    settings, projector, matrices = parameters.get(SaliencyConfig), None, None
    if any(name.startswith(DIRECTION) for name in args.targets):
        projector, matrices = open_directions(args, parameters, simulator, compute)
    targets = targets_named(args.targets, simulator.agent.policy, settings.ids("direction_ids"),
                            settings.direction_type, projector)
    if args.num_targets is not None:
        if args.num_targets > len(targets):
            raise UserError(f"--num_targets is {args.num_targets}, but --targets names only "
                            f"{len(targets)}")
        drawn = np.random.default_rng([args.seed, _CHOSEN]).permutation(len(targets))
        targets = tuple(targets[number] for number in sorted(drawn[:args.num_targets]))
    return targets, matrices


if __name__ == "__main__":
    raise SystemExit(main())
