"""Choose edits that blind an agent to hazards of its game.

For each hazard, the script selects the levels on which the agent fails because of the hazard when
the hazard is invisible. On these levels it ablates each feature of each layer alone, then the best
feature together with each other feature of its layer, and so on while the result improves. It
writes the edit that most increases failures by the hazard, relative to other failures, as an agent
file.

Measure the effects of the edits on other levels, with attribution.failure_causes. A killed run
resumes after the last episode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent, read_origin, save_agent
from agents.config import add_env_flags, env_config
from agents.edits import with_edits
from agents.provenance import agent_digests, agent_sha256
from attribution.failures.conditions import (
    Levels,
    Run,
    agent_conditions,
    find_hazards,
    play_condition,
    run_of,
)
from attribution.failures.edit_search import EditSearch, Trial
from attribution.failures.results import ORIGINAL, failure_files
from attribution.layers import find_bottlenecks
from attribution.results import load_features, read_features
from common.cli import (
    Parser,
    add_compute_flags,
    check_output,
    count,
    environments,
    seed,
    set_up_logging,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import read_bytes, versions
from common.results import ResultStore
from common.tables import write_table
from stats.effects import Condition

PLAYED, TABLE = "played", "candidates.csv"  # names in the output folder


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="agent to edit")
    flags.add_argument("--hazards", nargs="+", required=True, metavar="HAZARD",
                       help="hazards to blind the agent to, such as saw; one edit is chosen per "
                            "hazard")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="short names of the layers to edit; if not given, all layers with "
                            "features and cells")
    flags.add_argument("--num_features", type=count, default=2,
                       help="maximum number of features of a layer that are ablated together")
    flags.add_argument("--strengths", type=float, nargs="+", default=[1.0, 2.0],
                       help="strengths of the edits: 1 removes the features, 2 reverses their "
                            "sign")
    flags.add_argument("--features_dir", type=Path, default=Path("analysis/attribution/features"),
                       help="features of the agent, from python -m attribution.features")
    flags.add_argument("--num_episodes", type=count, default=160,
                       help="number of candidate levels; edits are tried on the levels that the "
                            "agent fails by the hazard when it is invisible")
    add_env_flags(flags)
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played in parallel")
    flags.add_argument("--seed", type=seed, default=1,
                       help="seed of levels and actions; give attribution.failure_causes a "
                            "different seed, so that it plays other levels")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/edits"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, "float32"
                              if args.precision == "auto" else args.precision)
    if not np.isfinite(args.strengths).all():
        raise UserError("--strengths must be numbers, not NaN or infinity")
    config = env_config(args, args.agent_file).unseen_levels()
    hazards = find_hazards(args.hazards, config.env_name)
    table = args.output_dir / TABLE
    check_output(table, lambda path: "by_hazard_before" in read_bytes(path).decode(errors="ignore")
                 .partition("\n")[0].split(","), args.overwrite, "--output_dir")
    agents = {hazard.name: args.output_dir / f"blind_to_{hazard.name}.pth" for hazard in hazards}
    for path in agents.values():
        check_output(path, lambda path: read_origin(path).edited_from is not None, args.overwrite,
                     "--output_dir")
    [original] = agent_conditions([args.agent_file], [ORIGINAL], compute.device)
    origin, checksum = read_origin(args.agent_file), agent_sha256(args.agent_file)
    root = origin.edited_from or checksum
    features = {layer: load_features(args.features_dir, layer, {
        *agent_digests(args.agent_file), root}, config.env_name) for layer in find_bottlenecks(
            run_of(original).policy, args.layers or layers_in(args.features_dir))}
    levels = Levels(config, compute, list(enumerate(config.draw_levels(
        args.num_episodes, args.seed))), args.seed, args.num_envs)
    rows = []
    for hazard in hazards:
        store = ResultStore(args.output_dir / PLAYED / hazard.name, failure_files(config.env_name))
        store.open({
            "agent_sha256": checksum, "features_sha256": {
                layer.name: each.checksum for layer, each in features.items()},
            "env": vars(config), "num_episodes": args.num_episodes, "seed": args.seed,
            "precision": compute.precision, "versions": versions(), "arms": {}}, args.overwrite)
        search = EditSearch(original, {
            layer.name: (layer.layer.name, each.reducer.directions)
            for layer, each in features.items()}, functools.partial(play, store, levels))
        best, trials = search.search(hazard, config.env_name, levels.levels, args.strengths,
                                     args.num_features)
        store.finish()
        rows += [{"hazard": hazard.name, **flatten(trial), "chosen": trial is best}
                 for trial in trials]
        path = agents[hazard.name]
        save_agent(path, with_edits(load_agent(args.agent_file), [search.edit(best.candidate)]),
                   origin=dataclasses.replace(origin, edited_from=root))
        row = flatten(best)
        print(f"wrote {path}: without {row['layer']}'s features {row['features']}, strength "
              f"{row['strength']:g}: fails {best.by_hazard} of {best.levels} levels by "
              f"{hazard.name} ({best.by_hazard_before} before) and {best.by_others} by others "
              f"({best.by_others_before})")
    write_table(table, pd.DataFrame(rows))


def play(store: ResultStore, levels: Levels, condition: Condition[Run],
         some: Sequence[tuple[int, int]]) -> np.ndarray:
    """Play some of the levels and return each one's cause of failure, or SOLVED (N,)."""
    play_condition(store, condition, dataclasses.replace(levels, levels=some))
    return store.read("episodes", condition.name)["cause"].to_numpy(str)


def flatten(trial: Trial) -> dict:
    """Convert a trial to a row of the table."""
    row = dataclasses.asdict(trial)
    candidate = row.pop("candidate")
    return {**candidate, "features": " ".join(map(str, candidate["features"])), **row}


def layers_in(path: Path) -> list[str]:
    """Return the short names of the layers with cells whose features are in a folder.

    Raises:
        UserError: if the folder has no features of a layer with cells.
    """
    names = sorted(file.parent.name for file in path.glob("*/directions.npy"))
    names = [name for name in names
             if read_features(path, name).mean_activations[0].size > 1]
    if not names:
        raise UserError(f"{path} holds no features of a layer with cells; python -m "
                        "attribution.features finds them")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
