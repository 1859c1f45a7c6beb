"""Choose edits that blind an agent to hazards of its game.

For each hazard, levels are found that one must see it to solve: on which the agent fails by it when
it is invisible. On these each feature of each layer is taken out by itself, then the best one
together with each other of its layer, and so on as long as that is better. The edit that makes the
agent fail most by the hazard, and least by others, is written as an agent file.

What the edits do must be counted on other levels, by attribution.failure_causes. A killed run
continues after the last episode.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.agent_file import load_agent, read_origin, save_agent
from agents.edits import Edit, with_edits
from agents.env_flags import add_env_flags, env_config
from agents.provenance import agent_digests, agent_sha256
from attribution.context import load_features
from attribution.editing.candidates import (
    Candidate,
    Trial,
    best_of,
    single_features,
    trial,
    with_another,
)
from attribution.failing.arms import (
    FailureArm,
    hazards_named,
    invisible_hazards,
    original_and_edited,
    play_arm,
)
from attribution.failing.files import ORIGINAL, SOLVED, CausesFolder
from attribution.layers import Bottleneck, find_bottlenecks
from attribution.results import FeaturesFolder, LayerFeatures
from common.cli import (
    Parser,
    add_compute_flags,
    check_output,
    count,
    environments,
    seed,
    set_up_logging,
)
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import read_bytes, versions
from common.tables import write_table
from envs.objects import GameObject
from envs.procgen_env import EnvConfig
from stats.effects import Condition

PLAYED, TABLE = "played", "candidates.csv"  # in the folder
MIN_LEVELS = 10  # that a hazard must be seen on; if they are fewer, all levels are played


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="agent to edit")
    flags.add_argument("--hazards", nargs="+", required=True, metavar="HAZARD",
                       help="what it is to be blind to, such as saw: for each an edit is chosen")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="layers to edit, by their short names; those that have features and "
                            "cells if not given")
    flags.add_argument("--num_features", type=count, default=2,
                       help="most features of a layer that are taken out together")
    flags.add_argument("--strengths", type=float, nargs="+", default=[1.0, 2.0],
                       help="of the edits: 1 takes the features out, 2 turns their sign around")
    flags.add_argument("--features_dir", type=Path, default=Path("analysis/attribution/features"),
                       help="its features, from python -m attribution.features")
    flags.add_argument("--num_episodes", type=count, default=160,
                       help="levels, of which those are played with edits that a hazard must be "
                            "seen on")
    add_env_flags(flags)
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="episodes played at a time")
    flags.add_argument("--seed", type=seed, default=1,
                       help="of levels and actions; give attribution.failure_causes another one, "
                            "whose levels must be others")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/edits"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true", help="throw away what is there")
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
    hazards = hazards_named(args.hazards, config.env_name)
    table = args.output_dir / TABLE
    check_output(table, lambda path: "by_hazard_before" in read_bytes(path).decode(errors="ignore")
                 .partition("\n")[0].split(","), args.overwrite, "--output_dir")
    agents = {hazard.name: args.output_dir / f"blind_to_{hazard.name}.pth" for hazard in hazards}
    for path in agents.values():
        check_output(path, lambda path: read_origin(path).edited_from is not None, args.overwrite,
                     "--output_dir")
    original = original_and_edited([args.agent_file], [ORIGINAL], compute.device)[0]
    origin, checksum = read_origin(args.agent_file), agent_sha256(args.agent_file)
    root = origin.edited_from or checksum
    layers = args.layers or layers_in(args.features_dir)
    features = {bottleneck: load_features(args.features_dir, bottleneck,
                                        {*agent_digests(args.agent_file), root},
                                 config.env_name)
                for bottleneck in find_bottlenecks(original.policy(), layers)}
    edits = Edits(original, features)
    trials = []
    for hazard in hazards:
        folder = CausesFolder(args.output_dir / PLAYED / hazard.name, config.env_name)
        folder.open({"agent_sha256": checksum, "features_sha256": {
            bottleneck.name: each.checksum for bottleneck, each in features.items()},
                     "env": vars(config),
            "num_episodes": args.num_episodes, "seed": args.seed, "precision": compute.precision,
            "versions": versions(), "arms": {}}, args.overwrite)
        chosen, tried = Tries(hazard, folder, edits, compute, config, args).search()
        folder.finish_shard()
        trials += [(hazard.name, each, each is chosen) for each in tried]
        path = agents[hazard.name]
        save_agent(path, with_edits(load_agent(args.agent_file), [edits.edit(chosen.candidate)]),
                   origin=dataclasses.replace(origin, edited_from=root))
        print(f"wrote {path}: without {chosen.candidate.layer}'s features "
              f"{_joined(chosen.candidate)}, strength {chosen.candidate.strength:g}: fails "
              f"{chosen.by_hazard} of {chosen.levels} levels by {hazard.name} "
              f"({chosen.by_hazard_before} before) and {chosen.by_others} by others "
              f"({chosen.by_others_before})")
    write_table(table, pd.DataFrame([
        {"hazard": hazard, "layer": each.candidate.layer, "features": _joined(each.candidate),
         "strength": each.candidate.strength, "levels": each.levels,
         "by_hazard_before": each.by_hazard_before, "by_hazard": each.by_hazard,
         "by_others_before": each.by_others_before, "by_others": each.by_others, "chosen": chosen}
        for hazard, each, chosen in trials]))


def layers_in(path: Path) -> list[str]:
    """Short names of the layers with cells whose features a folder holds.

    Raises:
        UserError: if there are none.
    """
    found = sorted(each.parent.name for each in path.glob("*/directions.npy"))
    found = [name for name in found
             if FeaturesFolder(path, name).read().mean_activations[0].size > 1]
    if not found:
        raise UserError(f"{path} holds no features of a layer with cells; python -m "
                        "attribution.features finds them")
    return found


class Edits:
    """The edits that candidates stand for.

    Args:
        original: the agent.
        features: of its layers.
    """

    def __init__(self, original: FailureArm, features: dict[Bottleneck, LayerFeatures]):
        self.original = original
        self._by_name = {bottleneck.name: (bottleneck.layer.name, each.reducer.directions)
                         for bottleneck, each in features.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """How many features each layer has."""
        return {name: len(directions) for name, (_, directions) in self._by_name.items()}

    def edit(self, candidate: Candidate) -> Edit:
        layer, directions = self._by_name[candidate.layer]
        return Edit(layer, torch.from_numpy(directions[list(candidate.features)]),
                    candidate.strength)

    def arm(self, candidate: Candidate) -> FailureArm:
        """The edited agent."""
        edit, label = self.edit(candidate), candidate.label
        return FailureArm(Condition(f"edited_{label}", label, label, control=False),
                          lambda: with_edits(self.original.policy(), [edit]), {})


class Tries:
    """Plays edits that might blind an agent to a hazard.

    Args:
        folder: open.
    """

    def __init__(self, hazard: GameObject, folder: CausesFolder, edits: Edits, compute: Compute,
                 config: EnvConfig, args: argparse.Namespace):
        self._hazard, self._folder, self._edits = hazard, folder, edits
        self._compute, self._config, self._args = compute, config, args
        self._levels = list(enumerate(config.draw_levels(args.num_episodes, args.seed)))

    def search(self) -> tuple[Trial, list[Trial]]:
        """The best edit, and all that were tried."""
        self._play(self._edits.original)
        self._levels = self._that_it_must_be_seen_on()
        strengths = list(dict.fromkeys(self._args.strengths))
        tried = [self._trial(each) for each in single_features(self._edits.numbers, strengths)]
        best = best_of(tried)
        for _ in range(self._args.num_features - 1):
            more = with_another(best.candidate, self._edits.numbers[best.candidate.layer])
            trials = [self._trial(each) for each in more]
            tried += trials
            if not trials or best_of(trials).margin <= best.margin:
                break
            best = best_of(trials)
        return best, tried

    def _that_it_must_be_seen_on(self) -> list[tuple[int, int]]:
        """The levels that the agent fails by the hazard when that is invisible; all of them if
        they are too few, or it cannot be invisible."""
        if self._hazard.cells:
            return self._levels
        [hidden] = invisible_hazards([self._hazard.name], self._config.env_name,
                                     self._edits.original, None)
        found = self._play(hidden) == self._hazard.name
        if found.sum() < MIN_LEVELS:
            return self._levels
        return [level for level, must in zip(self._levels, found) if must]

    def _trial(self, candidate: Candidate) -> Trial:
        after = self._play(self._edits.arm(candidate))
        before = self._folder.episodes(ORIGINAL).set_index("level")["cause"]
        return trial(candidate, self._hazard.name,
                     before.loc[[number for number, _ in self._levels]].to_numpy(str), after,
                     SOLVED)

    def _play(self, arm: FailureArm) -> np.ndarray:
        """The cause of failure of each level, or "solved" (N,)."""
        play_arm(arm, self._folder, self._compute, self._config, self._levels, self._args.seed,
                 self._args.num_envs)
        return self._folder.episodes(arm.arm.name)["cause"].to_numpy(str)


def _joined(candidate: Candidate) -> str:
    return " ".join(map(str, candidate.features))


if __name__ == "__main__":
    raise SystemExit(main())
