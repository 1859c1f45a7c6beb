"""Choose edits that blind an agent to hazards of its game: for each hazard the features that go
with it are taken out, one layer and strength at a time, levels are played, and the edit that makes
the agent fail most by this hazard, and least by others, is written as an agent file.

What the edits do must be counted on other levels, by clarity.failure_causes. A killed run continues
after the last episode.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import torch

from clarity.attributing.clarity_files import LayerFeatures
from clarity.attributing.flags import features_of
from clarity.attributing.layers import Cut, find_cuts
from clarity.checking.object_files import ObjectsFolder
from clarity.editing.candidates import Candidate, candidates_for, compared
from clarity.failing.arms import FailureArm, original_and_edited, play_arm
from clarity.failing.causes import what_is_known
from clarity.failing.files import ORIGINAL, SOLVED, CausesFolder
from common.agent_file import load_agent, read_origin, save_agent
from common.cli import (
    Parser,
    add_compute_flags,
    add_env_flags,
    count,
    env_config,
    environments,
    seed,
    set_up_logging,
)
from common.devices import resolve_compute
from common.edits import Edit, with_edits
from common.errors import UserError, nearest, script_main
from common.files import sha256, versions
from common.game_objects import hazards_of
from common.networks import Policy
from common.tables import write_table
from interventions.effects import Arm

PLAYED, TABLE = "played", "candidates.csv"  # in the folder


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="agent to edit")
    flags.add_argument("--hazards", nargs="+", required=True, metavar="HAZARD",
                       help="what it is to be blind to, such as saw: for each an edit is chosen")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="layers to edit, by their short names; those whose features have "
                            "scores if not given")
    flags.add_argument("--num_features", type=count, default=2,
                       help="most features of a layer that are taken out together")
    flags.add_argument("--strengths", type=float, nargs="+", default=[1.0, 2.0],
                       help="of the edits: 1 takes the features out, 2 turns their sign around")
    flags.add_argument("--features_dir", type=Path, default=Path("analysis/clarity/features"),
                       help="its features, from python -m clarity.features")
    flags.add_argument("--objects_dir", type=Path, default=Path("analysis/clarity/objects"),
                       help="their scores, from python -m clarity.objects")
    flags.add_argument("--num_episodes", type=count, default=100,
                       help="levels that are played with each edit")
    add_env_flags(flags)
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="episodes played at a time")
    flags.add_argument("--seed", type=seed, default=1,
                       help="of levels and actions; give another one to clarity.failure_causes, "
                            "whose levels must be others")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/clarity/edits"),
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
    config = env_config(args).unseen_levels()
    known = [kind.name for kind in hazards_of(config.env_name)]
    hazards = list(dict.fromkeys(args.hazards))
    for name in hazards:
        if name not in known:
            raise UserError(f"{config.env_name} has no hazard '{name}'" + (
                nearest(name, known) if known else f": {what_is_known(config.env_name)}"))
    policy, origin = load_agent(args.agent_file, compute.device), read_origin(args.agent_file)
    checksum = sha256(args.agent_file)
    root = origin.edited_from or checksum
    objects = ObjectsFolder(args.objects_dir)
    cuts = {cut.name: cut for cut in find_cuts(policy, args.layers or objects.layers())}
    features = {name: features_of(args.features_dir, cut, {checksum, root}, config.env_name)
                for name, cut in cuts.items()}
    scores = {name: scores_of(objects, each) for name, each in features.items()}
    candidates = [each for name in hazards for each in candidates_for(
        name, scores, args.num_features, dict.fromkeys(args.strengths))]
    edits = {each.label: edit_of(each, cuts, features) for each in candidates}
    edited = {each.label: features[each.layer] for each in candidates}
    arms = [original_and_edited([args.agent_file], [ORIGINAL], compute.device)[0],
            *(arm_of(label, policy, edits[label], checksum, each.checksum)
              for label, each in edited.items())]
    levels = list(enumerate(config.draw_levels(args.num_episodes, args.seed)))
    folder = CausesFolder(args.output_dir / PLAYED, config.env_name)
    folder.open({"env": vars(config), "num_episodes": args.num_episodes, "seed": args.seed,
                 "precision": compute.precision, "versions": versions(),
                 "arms": {each.arm.name: each.made for each in arms}}, args.overwrite)
    for each in arms:
        play_arm(each, folder, compute, config, levels, args.seed, args.num_envs)
    folder.finish_shard()
    ended = {each.arm.label: folder.episodes(each.arm.name)["cause"].to_numpy(str)
             for each in arms}
    table = compared(candidates, ended, ended[ORIGINAL], SOLVED)
    write_table(args.output_dir / TABLE, table)
    for row, each in zip(table.itertuples(), candidates):
        if row.chosen:
            path = args.output_dir / f"blind_to_{each.hazard}.pth"
            save_agent(path, with_edits(load_agent(args.agent_file), [edits[each.label]]),
                       origin=dataclasses.replace(origin, edited_from=root))
            print(f"wrote {path}: without {each.layer}'s features {row.features}, strength "
                  f"{each.strength:g}: fails {row.by_hazard} of {row.levels} levels by "
                  f"{each.hazard} ({row.by_hazard_before} before) and {row.by_others} by others "
                  f"({row.by_others_before})")


def scores_of(objects: ObjectsFolder, features: LayerFeatures) -> pd.DataFrame:
    """The scores of a layer's features.

    Raises:
        UserError: if they are of other features, missing or damaged.
    """
    if not objects.has(features.name, features.checksum):
        raise UserError(f"{objects.path} has no scores of these features of {features.name}; "
                        "python -m clarity.objects makes them")
    return objects.scores(features.name)


def edit_of(candidate: Candidate, cuts: dict[str, Cut],
            features: dict[str, LayerFeatures]) -> Edit:
    """The edit that a candidate stands for."""
    directions = features[candidate.layer].reducer.directions[list(candidate.features)]
    return Edit(cuts[candidate.layer].layer.name, torch.from_numpy(directions),
                candidate.strength)


def arm_of(label: str, policy: Policy, edit: Edit, agent: str, features: str) -> FailureArm:
    """The agent with an edit, as an arm.

    Args:
        agent, features: checksums.
    """
    return FailureArm(Arm(f"edited_{label}", label, label, control=False),
                      lambda: with_edits(policy, [edit]),
                      {"agent_sha256": agent, "features_sha256": features})


if __name__ == "__main__":
    raise SystemExit(main())
