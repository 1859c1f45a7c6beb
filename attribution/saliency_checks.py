"""Check saliency maps through the simulator beside attributions to layers: which of the two is
right more often about the real game?

Deletion and insertion, weights drawn again, and objects hidden in the real game, for both kinds of
map in the same recorded frames. Everything is written at the end.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from agents.outputs import ANSWERS, VALUE, outputs_named
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from attribution.checking.object_files import kinds_in
from attribution.checking.object_removal import objects_table
from attribution.checking.randomisation import (
    randomisation_table,
    randomise,
    rank_correlations,
    stages_of,
)
from attribution.layers import find_bottlenecks
from attribution.recordings import RecordedFrames, Recording
from attribution.through_simulator.comparison import compared, deletion_table
from attribution.through_simulator.maps import Map, attribution_maps, simulated_maps, with_agent
from attribution.through_simulator.real_changes import deletion_curves, hidden_objects
from attribution.through_simulator.report import plot, report
from common.cli import Parser, count
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256
from common.results import Entry, File, ResultStore, Schema
from common.tables import write_table
from generative.config import SaliencyConfig, SimulatorConfig
from generative.dataset import RolloutDataset
from generative.flags import add_simulator_flags, read_simulator_flags
from generative.runs import open_simulator
from generative.saliency.gradients import SaliencyFunction
from generative.start_optimisation.recorded_starts import drawn_windows

RANDOM_ORDERS = 2
CHECKS = Schema("checks of saliency maps (attribution.saliency_checks)",
                "python -m attribution.saliency_checks", results={
                    "tables": Entry("{}.csv", File()), "figures": Entry("{}.png", File()),
                    "reports": Entry("{}.md", File())}, replaced=True)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file", model_file_required=True)
    flags.set_defaults(precision="float32")
    flags.add_argument("--layers", nargs="+", metavar="LAYER", default=["block2", "block3"],
                       help="layers of the attributions, by short names or paths")
    flags.add_argument("--output", default=VALUE, choices=ANSWERS, help="output that is explained")
    flags.add_argument("--num_frames", type=count, default=300, help="recorded frames, at most")
    flags.add_argument("--num_randomised", type=count, default=48,
                       help="of them, for the maps of agents whose weights are drawn again")
    flags.add_argument("--output_dir", type=Path,
                       default=Path("analysis") / "attribution" / "saliency_checks",
                       help="folder to write to")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = read_simulator_flags(parser(), argv)
    common, saliency = parameters.common, parameters.get(SaliencyConfig)
    lags = tuple(dict.fromkeys((0, saliency.common_timesteps[-1])))
    store = ResultStore(args.output_dir, CHECKS)
    store.check_replaceable()
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    simulator = open_simulator(args.model_file, args.agent_file, parameters.get(SimulatorConfig),
                               compute)
    policy, checksum = simulator.agent.policy, agent_sha256(args.agent_file)
    bottlenecks = [bottleneck for bottleneck in find_bottlenecks(policy, args.layers)
                   if bottleneck.layer.is_map]
    if not bottlenecks:
        raise UserError("--layers names no layer with cells; block2 and block3 are some")
    recording = Recording(Path(common.data_dir), policy, args.agent_file,
                          args.check_contents)
    config = recorded_game(recording.folder)
    kinds = kinds_in(config)
    dataset = RolloutDataset(Path(common.data_dir), simulator.config.num_init_steps, max(lags) + 1)
    windows = drawn_windows(dataset, args.num_frames, 0, args.seed)
    where = [dataset.place(int(window)) for window in windows]
    places = np.array([(place.episode, place.frame) for place in where])
    order = np.lexsort(places.T[::-1])
    windows, places = windows[order], places[order]
    rows, episodes = recording.read(places), places[:, 0]
    (output,) = outputs_named([args.output])
    function, smoothing = SaliencyFunction(args.output), (saliency.gaussian_kernel_size,
                                                          saliency.sigma)

    def all_maps(agent, some: slice) -> list[Map]:
        few = RecordedFrames(rows.frames[some], rows.entering[some], rows.actions[some])
        with with_agent(simulator, agent):
            return [*attribution_maps(agent, compute, bottlenecks, output, few),
                    *simulated_maps(simulator, compute, dataset, windows[some], function, lags,
                                    *smoothing)]

    maps = all_maps(policy, slice(None))
    real = hidden_objects(policy, compute, recording.folder, places, rows.entering, kinds, output,
                          lags)
    changes = dict(zip(lags, real.changes))
    objects = []
    for one in maps:
        table = objects_table(real.masks, changes[one.lag], one.values, one.bottleneck,
                              [kind.name for kind in kinds], episodes, args.seed)
        table.insert(0, "lag", one.lag)
        table.insert(0, "map", one.name)
        objects.append(table)
    now = [one for one in maps if one.lag == 0]
    rng = np.random.default_rng([args.seed, 5])
    scores = [*(one.blocks for one in now),
              *(rng.random(now[0].blocks.shape) for _ in range(RANDOM_ORDERS))]
    curves = deletion_curves(policy, compute, rows, scores, output)
    tables = {"agreement": compared(maps, real.masks, changes, episodes, args.seed),
              "objects": pd.concat(objects, ignore_index=True),
              "deletion": deletion_table([one.name for one in now], curves, len(now), episodes,
                                         args.seed),
              "randomisation": randomised(all_maps, maps, policy, episodes, args)}
    what = (f"{len(places)} frames of {len(set(episodes.tolist()))} episodes, output "
            f"{output.name}, read in the frame and {max(lags)} steps later; in "
            f"{real.ended.sum()} of them the episode ends before.")
    with store.replace({
            "agent_sha256": checksum, "model_sha256": sha256(args.model_file),
            "recording_sha256": recording.sha256, "seed": args.seed, "output": output.name,
            "num_frames": args.num_frames, "lags": lags}) as folder:
        for name, table in tables.items():
            write_table(folder / f"{name}.csv", table)
        plot(folder / "checks.png", tables, curves, [one.name for one in now])
        (folder / "report.md").write_text(report(what, tables))
    print(f"wrote {args.output_dir / 'report.md'}")


def randomised(all_maps, maps: list[Map], policy, episodes: np.ndarray, args) -> pd.DataFrame:
    """Rank correlations of |maps| with those of agents of which more and more is random."""
    some = slice(0, args.num_randomised)
    stages, found, changed = stages_of(policy), [], policy
    for number, (_, paths) in enumerate(stages):
        changed = randomise(changed, paths, args.seed + number).requires_grad_(False)
        found.append([rank_correlations(np.abs(own.values[some]), np.abs(other.values))
                      for own, other in zip(maps, all_maps(changed, some))])
    tables = []
    for place, one in enumerate(maps):
        table = randomisation_table(np.stack([each[place] for each in found]),
                                    [name for name, _ in stages], episodes[some], args.seed)
        table.insert(0, "map", one.name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


if __name__ == "__main__":
    raise SystemExit(main())
