"""Optimisation of starts, see ``OptimiseStartOptions``.

The search varies the noise from which the prior of the simulator generates a start and its world
or, without a trained prior, start vectors.

The same command resumes a killed run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from agents.reference_set import game_name
from common.cli import count
from common.devices import Compute
from common.errors import UserError
from common.options import command, option
from envs.objects import action_labels
from generative.config import SaliencyConfig
from generative.saliency.gradients import DIRECTION
from generative.simulator import Simulator
from generative.start_optimisation.objectives import AIMS, MAXIMISE, Target, targets_named
from generative.start_optimisation.run import FinishedSearch, SearchOptions, run_search
from generative.start_optimisation.search import OPTIMISED_STARTS
from interventions.flags import DirectionIdsOptions, DirectionOptions

_CHOSEN = 4  # random stream; part of the generator's seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiseStartOptions(SearchOptions, DirectionIdsOptions, DirectionOptions):
    """Optimise starts of the simulator for targets, by gradients through the rollout."""

    targets: tuple[str, ...] = option(
        ("value",),
        "one or several targets: outputs of the agent (value, log_prob_up, policy for all "
        "log-probabilities), directions of its hidden state (hx_direction_3, hx_direction_3_pca, "
        "hx_direction for all of --direction_ids), units (hidden_state:12, "
        "embedder.block3.res2.resadd:5; a layer name alone for all of its units), and changes of "
        "the action (from_left_to_up: the log-probability of left in the previous step plus that "
        "of up in this step)", metavar="TARGET")
    aims: tuple[str, ...] = option((MAXIMISE,), "maximise the targets, minimise them, or both",
                                   choices=tuple(AIMS))
    num_targets: int | None = option(
        None, "number of targets to draw at random; all if not given", type=count)
    output_dir: Path | None = option(
        None, "output folder; <generated_data_dir>/made_to_order if not given")


def optimise_start(options: OptimiseStartOptions) -> FinishedSearch:
    """Search for starts, or resume the search; see ``run_search``."""
    def choose(simulator: Simulator, compute: Compute) -> tuple[tuple[Target, ...], dict]:
        targets, matrices = chosen_targets(options, simulator, compute)
        return targets, {"matrices_sha256": matrices}

    folder = options.output_dir or options.generated_data / "made_to_order"
    search = run_search(options, folder, OPTIMISED_STARTS, choose, options.aims)
    store = search.store
    print(f"wrote {options.num_starts} starts for each of {len(search.context.objectives)} "
          f"objectives and their evaluation to {store.path}; read {store.file_of('report').name} "
          "first")
    return search


def chosen_targets(options: OptimiseStartOptions, simulator: Simulator, compute: Compute
                   ) -> tuple[tuple[Target, ...], dict | None]:
    """Return the targets, and the checksums of the direction files; None if no target is a
    direction."""
    settings, projector, matrices = options.parameters.get(SaliencyConfig), None, None
    policy = simulator.agent.policy
    if any(name.startswith(DIRECTION) for name in options.targets):
        projector, matrices = options.load_projector(policy, options.agent_file)
        projector = projector.on(compute.device)
    targets = targets_named(options.targets, policy, settings.ids("direction_ids"),
                            settings.direction_type, projector,
                            action_labels(game_name(options.agent_file,
                                                    options.parameters.common.data_dir)))
    if options.num_targets is not None:
        if options.num_targets > len(targets):
            raise UserError(f"--num_targets is {options.num_targets}, but --targets names only "
                            f"{len(targets)}")
        drawn = np.random.default_rng([options.seed, _CHOSEN]).permutation(len(targets))
        targets = tuple(targets[number] for number in sorted(drawn[:options.num_targets]))
    return targets, matrices


main = command(OptimiseStartOptions, optimise_start)

if __name__ == "__main__":
    raise SystemExit(main())
