"""Channels that follow the cheese: tracking scores of layers, and what the channels are good for.

Channels are chosen on one half of the levels and reported on the other. The positive and negative
parts of those of one layer are multiplied, and the effect at decision squares is compared with that
of random channels. Probes say what each layer holds. A killed run goes on.
"""

from __future__ import annotations

import argparse
import functools

import pandas as pd

from agents.agent_file import load_agent
from agents.layers import Layer, all_layers
from agents.networks import Policy
from agents.provenance import agent_sha256
from common.cli import Parser, count, from_zero, set_up_logging
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.results import ResultStore
from interventions.flags import REFERENCE_SIZE
from maze.field.fields import reference_frames
from maze.level.flags import add_agent_flags, add_output_flags, check_num_mazes, levels_of
from maze.level.state import game_of
from maze.studies.channel_report import plot, report
from maze.studies.channel_sets import LAYER, map_layer
from maze.studies.multiplied import Decisions, effects, factor
from maze.studies.probing import got_cheese, probes
from maze.studies.results import CHANNEL_FILES
from maze.studies.tracks import CHOOSING, REPORTING, choose, score


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags, "agent to look at", num_mazes=100)
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="maps to score and probe; if not given, those behind residual "
                            "additions, or all of a network without")
    flags.add_argument("--layer", default=LAYER, help="layer whose chosen channels are multiplied")
    flags.add_argument("--num_channels", type=count, default=11,
                       help="the most channels of a layer that are chosen")
    flags.add_argument("--factors", nargs="+", metavar="FACTOR",
                       default=["-3", "-1", "0", "2", "positive:0", "positive:2"],
                       help="that channels are multiplied by; positive:2,negative:0 doubles the "
                            "positive part and takes the negative one away")
    flags.add_argument("--num_controls", type=from_zero, default=19,
                       help="random sets of channels a factor")
    flags.add_argument("--num_shuffles", type=from_zero, default=2,
                       help="probes with shuffled labels")
    add_output_flags(flags, "channels")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_num_mazes(args)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    policy = load_agent(args.agent_file, compute.device)
    layers = layers_asked(policy, args)
    factors = factors_asked(args)
    args.num_mazes *= 2
    states = levels_of(args)
    env = game_of(states)
    half = len(states) // 2
    sets = {CHOOSING: states[:half], REPORTING: states[half:]}
    decisions = Decisions(policy, compute, sets[REPORTING])
    for state in states:
        state.grid.cheese  # noqa: B018  refuses none and several
    if args.dry_run:
        for name, of in sets.items():
            print(f"{name}: {' '.join(str(state.level_seed) for state in of)}")
        return
    store = ResultStore(args.output_dir, CHANNEL_FILES)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "levels": {name: [state.level_seed for state in of] for name, of in sets.items()},
        "distribution_mode": env.distribution_mode, "use_backgrounds": env.use_backgrounds,
        "layers": [layer.name for layer in layers], "layer": args.layer, "factors": args.factors,
        "num_forks": len(decisions.states),
        "num_channels": args.num_channels, "num_controls": args.num_controls,
        "num_shuffles": args.num_shuffles, "seed": args.seed, "precision": compute.precision,
        "versions": versions()}, args.overwrite)
    scores = pd.concat([
        store.compute("scores", name, function=functools.partial(
            score, policy, compute, layers, of, name, args.seed))
        for name, of in sets.items()], ignore_index=True)
    chosen = choose(scores[scores["set"] == CHOOSING], args.num_channels)
    scores["chosen"] = pd.MultiIndex.from_frame(scores[["layer", "channel"]]).isin(chosen)
    multiplied = [channel for layer, channel in chosen if layer == args.layer]
    table = pd.DataFrame()
    if multiplied:
        reference = reference_frames(env, {state.level_seed for state in states},
                                       REFERENCE_SIZE, args.seed)
        groups = [multiplied[:1], *([multiplied] if len(multiplied) > 1 else [])]
        table = store.compute("effects", function=lambda: effects(
            decisions, map_layer(policy, args.layer), groups, factors, reference,
            args.num_controls, args.seed))
    read = store.compute("probes", function=lambda: probes(
        policy, layers, states, got_cheese(policy, compute, states, args.seed), args.seed,
        args.num_shuffles))
    store.write("report", value=report(scores, args.layer, table, read, len(decisions.states)))
    with store.file("figure") as temporary:
        plot(temporary, scores, read)
    store.write("channels", value=scores)
    for layer in layers:
        print(f"{layer.name}: " + (", ".join(str(channel) for name, channel in chosen
                                             if name == layer.name) or "no channel")
              + " chosen as following the cheese")
    print(f"wrote {store.file_of('channels')}")


def layers_asked(policy: Policy, args: argparse.Namespace) -> list[Layer]:
    """The layers of ``--layers``, and that of ``--layer``, in order of computation.

    Raises:
        UserError: if one is no layer, or has no cells.
    """
    maps = [layer for layer in all_layers(policy) if layer.is_map]
    names = args.layers or ([layer.name for layer in maps if layer.name.endswith("resadd")]
                            or [layer.name for layer in maps])
    asked = {map_layer(policy, name).name for name in names}
    args.layer = map_layer(policy, args.layer).name
    return [layer for layer in maps if layer.name in asked | {args.layer}]


def factors_asked(args: argparse.Namespace) -> list[tuple[float, float]]:
    """The factors of positive and negative parts.

    Raises:
        UserError: if a text is none.
    """
    try:
        return [factor(text) for text in args.factors]
    except ValueError as error:
        raise UserError("--factors takes numbers such as -1, or positive:2,negative:0 for the "
                        f"two parts, not {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
