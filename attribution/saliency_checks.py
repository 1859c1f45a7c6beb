"""Compare saliency maps through the simulator with attributions to layers: which of the two more
often predicts correctly what happens in the real game?

Both kinds of map are checked in the same recorded frames by deletion and insertion, by randomised
weights, and by objects hidden in the real game. Results are written only at the end.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.networks import Policy
from agents.outputs import ANSWERS, VALUE, outputs_named
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from attribution.checking.object_removal import objects_table
from attribution.checking.object_scores import kinds_in
from attribution.checking.randomisation import (
    cascade,
    randomisation_table,
    rank_correlations,
    stages_of,
)
from attribution.checking.saliency_comparison import (
    Map,
    attribution_maps,
    compare_agreements,
    deletion_table,
    frame_deletion_curves,
    hide_objects,
    plot,
    report,
    simulated_maps,
)
from attribution.layers import find_bottlenecks
from attribution.recordings import RecordedFrames, Recording
from common.cli import Parser, count
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256
from common.palette import DPI
from common.results import Entry, File, ResultStore, Schema
from common.tables import write_table
from generative.config import SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_simulator_flags
from generative.frozen_agent import FrozenAgent
from generative.runs import open_simulator
from generative.saliency.gradients import SaliencyFunction
from generative.start_optimisation.objectives import drawn_windows

RANDOM_ORDERS = 2  # random orders of blocks with which the maps' orders are compared
CHECKS = Schema("checks of saliency maps (attribution.saliency_checks)",
                "python -m attribution.saliency_checks", results={
                    "tables": Entry("{}.csv", File()), "figures": Entry("{}.png", File()),
                    "reports": Entry("{}.md", File())}, replaced=True)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file", model_file_required=True)
    flags.hide("batch_size")
    flags.set_defaults(precision="float32")
    flags.add_argument("--layers", nargs="+", metavar="LAYER", default=["block2", "block3"],
                       help="short names or paths of the layers to attribute to")
    flags.add_argument("--output", default=VALUE, choices=ANSWERS,
                       help="output that the maps explain")
    flags.add_argument("--num_frames", type=count, default=300,
                       help="maximum number of recorded frames")
    flags.add_argument("--num_randomised", type=count, default=48,
                       help="maximum number of these frames in which maps of agents with "
                            "randomised weights are also computed")
    flags.add_argument("--output_dir", type=Path,
                       default=Path("analysis") / "attribution" / "saliency_checks",
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    common, saliency = parameters.common, parameters.get(SaliencyConfig)
    lags = tuple(dict.fromkeys((0, saliency.common_timesteps[-1])))
    store = ResultStore(args.output_dir, CHECKS)
    store.check_replaceable()
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    policy = simulator.agent.policy
    layers = [layer for layer in find_bottlenecks(policy, args.layers) if layer.layer.is_map]
    if not layers:
        raise UserError("--layers names no layer with a spatial map; give block2 or block3, "
                        "for example")
    recording = Recording(Path(common.data_dir), policy, args.agent_file, args.check_contents)
    kinds = kinds_in(recorded_game(recording.folder))
    dataset = RolloutDataset(Path(common.data_dir), simulator.config.num_init_steps, max(lags) + 1)
    windows = drawn_windows(dataset, args.num_frames, 0, args.seed)
    frames = [dataset.place(int(window)) for window in windows]
    places = np.array([(frame.episode, frame.frame) for frame in frames])
    order = np.lexsort(places.T[::-1])
    windows, places = windows[order], places[order]
    recorded, episodes = recording.read(places), places[:, 0]
    (output,) = outputs_named([args.output])

    def maps_of(agent: Policy, rows: slice) -> list[Map]:
        part = RecordedFrames(recorded.frames[rows], recorded.entering[rows],
                              recorded.actions[rows])
        simulator.agent = FrozenAgent(agent, policy.hidden_state_size,
                                      policy.fc_policy.out_features)
        return [*attribution_maps(agent, compute, layers, output, part),
                *simulated_maps(simulator, compute, dataset, windows[rows],
                                SaliencyFunction(args.output), lags,
                                saliency.gaussian_kernel_size, saliency.sigma)]

    maps = maps_of(policy, slice(None))
    masks, changes, ended = hide_objects(policy, compute, recording.folder, places,
                                         recorded.entering, kinds, output, lags)
    by_lag = dict(zip(lags, changes))
    current = [saliency_map for saliency_map in maps if saliency_map.lag == 0]
    rng = np.random.default_rng([args.seed, 5])
    scores = [*(saliency_map.blocks for saliency_map in current),
              *(rng.random(current[0].blocks.shape) for _ in range(RANDOM_ORDERS))]
    curves = frame_deletion_curves(policy, compute, recorded, scores, output)
    some = slice(0, args.num_randomised)
    correlations = np.array([
        [rank_correlations(np.abs(own.values[some]), np.abs(other.values))
         for own, other in zip(maps, maps_of(agent.requires_grad_(False), some))]
        for agent in cascade(policy, args.seed)])  # (stages, maps, frames)
    stages = [stage for stage, _ in stages_of(policy)]
    names = [saliency_map.name for saliency_map in current]
    tables = {
        "agreement": compare_agreements(maps, masks, by_lag, episodes, args.seed),
        "objects": pd.concat({
            (saliency_map.name, saliency_map.lag): objects_table(
                masks, by_lag[saliency_map.lag], saliency_map.values, saliency_map.bottleneck,
                [kind.name for kind in kinds], episodes, args.seed)
            for saliency_map in maps}, names=["map", "lag"]).reset_index(["map", "lag"]),
        "deletion": deletion_table(names, curves, episodes, args.seed),
        "randomisation": pd.concat({
            saliency_map.name: randomisation_table(correlations[:, place], stages,
                                                   episodes[some], args.seed)
            for place, saliency_map in enumerate(maps)}, names=["map"]).reset_index("map")}
    description = (
        f"{len(places)} frames of {len(set(episodes.tolist()))} episodes, output {output.name}, "
        f"read in the frame and {max(lags)} steps later; in {ended.sum()} of these frames, the "
        "episode ends earlier.")
    with store.replace({
            "agent_sha256": agent_sha256(args.agent_file),
            "model_sha256": sha256(args.model_file), "recording_sha256": recording.sha256,
            "seed": args.seed, "output": output.name, "num_frames": args.num_frames,
            "lags": lags}) as folder:
        for name, table in tables.items():
            write_table(folder / f"{name}.csv", table)
        plot(tables, curves, names).savefig(folder / "checks.png", dpi=DPI)
        (folder / "report.md").write_text(report(description, tables),
                                           encoding="utf-8")
    print(f"wrote {args.output_dir / 'report.md'}")


if __name__ == "__main__":
    raise SystemExit(main())
