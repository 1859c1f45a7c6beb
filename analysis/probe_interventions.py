"""Push the agent's hidden state along directions that represent labels, such as a saw ahead of the
player, and measure actions, success and failures. Pushes of the same size in random
directions are the controls. On recorded states, pushes are also compared with full swaps of the
state.

The directions come from analysis/probe_atlas.py. A killed run resumes after the last finished
push; a finished run can be extended with more labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from analysis.memory.labels import add_recording_flags, read_examples
from analysis.memory.probe_atlas import PROBE_ATLAS, labels_of
from analysis.memory.probe_interventions import (
    METHODS,
    OPEN_OUTCOMES,
    PROBE_INTERVENTIONS,
    WORDING,
    closed_outcome_list,
    closed_outcomes,
    open_loop,
    pushes,
    ratio_tables,
    swaps,
    typical_size,
    unit_directions,
    with_ratios,
)
from common.cli import Parser, add_compute_flags, count, environments, seed, set_up_logging, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.results import ResultStore
from envs.objects import hazards_of
from stats.effects import check_starts, claims_summary, compare_conditions
from stats.study import BASELINE, measure_conditions, write_effects


def parser() -> Parser:
    flags = Parser(__doc__)
    add_recording_flags(flags)
    flags.add_argument("--atlas_dir", type=Path, default=Path("analysis/memory/probe_atlas"),
                       help="probes of the hidden state, from analysis/probe_atlas.py")
    flags.add_argument("--labels", nargs="+",
                       help="labels of the atlas whose directions are used; if not given, each "
                            "hazard ahead of the player, the velocities, and the steps to the end")
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS),
                       help="probe: the weights of the linear probe; covariance: the covariance "
                            "of the state with the label")
    flags.add_argument("--size", type=float, default=2.0,
                       help="norm of a push, in standard deviations of the state along a random "
                            "direction")
    flags.add_argument("--num_controls", type=whole(2, 1000), default=19,
                       help="number of random directions; claims need at least 19")
    flags.add_argument("--num_episodes", type=count, default=200,
                       help="number of levels to play per push; none of them was recorded")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played in parallel")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of levels, actions, random directions and bootstrap")
    flags.add_argument("--output_dir", type=Path,
                       default=Path("analysis/memory/probe_interventions"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, args.precision)
    check_starts(args.num_episodes, "--num_episodes")
    digest, policy = agent_sha256(args.agent_file), load_agent(args.agent_file, compute.device)
    examples = read_examples(args.data_dir, args.labels_dir, args.agent_file)
    env, atlas = recorded_game(examples.folder), ResultStore(args.atlas_dir, PROBE_ATLAS)
    made_with = atlas.settings("agent_sha256", "recording_sha256")
    if (made_with["agent_sha256"], made_with["recording_sha256"]) != (
            digest, examples.folder.sha256()):
        raise UserError(f"{args.atlas_dir} holds probes of another agent or recording; run "
                        f"{PROBE_ATLAS.script} with this agent and recording")
    names = args.labels or default_labels(env.env_name, atlas)
    found = {label.name: label for label in labels_of(examples, np.arange(len(examples)))}
    if unknown := [name for name in names if not atlas.has("weights", name)]:
        raise UserError(f"{args.atlas_dir} has no direction for label '{unknown[0]}'; available: "
                        f"{', '.join(atlas.keys('weights'))}")
    items = {name: atlas.read("weights", name) for name in names}
    train = np.isin(examples.level, items[names[0]]["train"])
    states, size = examples.hidden_out, args.size * typical_size(examples.hidden_out[train])
    labels = [found[name].subset(train) for name in names]
    conditions = pushes(
        {label.name: unit_directions(label, states[train], items[label.name]["weights"],
                                     args.methods) for label in labels},
        size, args.num_controls, args.seed)
    recorded = set(examples.folder.all_steps(np.unique(examples.episode))["level_seed"])
    drawn = env.draw_levels(args.num_episodes + len(recorded), args.seed)
    levels = list(enumerate([level for level in drawn if level not in recorded]
                            [:args.num_episodes]))
    store = ResultStore(args.output_dir, PROBE_INTERVENTIONS)
    store.open({"agent_file": args.agent_file.name, "agent_sha256": digest,
                "recording_sha256": examples.folder.sha256(), "env": vars(env),
                "atlas_seed": made_with["seed"], "size": args.size, "seed": args.seed,
                "num_episodes": args.num_episodes, "precision": compute.precision,
                "versions": versions(),
                "arms": {condition.name: condition.settings for condition in conditions}},
               args.overwrite)
    test = np.isin(examples.level, items[names[0]]["test"])
    opened = open_loop(policy, states[test], examples.level[test], conditions,
                       list(swaps(labels, states[train], args.num_controls, args.seed)), args.seed)
    store.write("open_loop", value=opened)
    measure_conditions(store, "arm", [BASELINE, *conditions], lambda condition: closed_outcomes(
        policy, compute, env, levels, args.seed, args.num_envs, condition.value))
    outcomes = closed_outcome_list(env.env_name)
    before, *after = (store.read("arm", condition.name) for condition in (BASELINE, *conditions))
    table = with_ratios(compare_conditions(conditions, outcomes, before, np.stack(after),
                                           args.seed), conditions)
    description = (f"{args.agent_file.name} on {len(levels)} levels of {env.env_name} "
                   f"({env.distribution_mode}), pushed at every step by {args.size:g} standard "
                   "deviations")
    write_effects(store, table, outcomes, WORDING, description)
    text = store.read("report") + "\n".join([
        "## Ratios in the real game", "", *ratio_tables(table, outcomes[:5]),
        "## Open loop: recorded states of levels that no probe was trained on", "",
        f"{test.sum()} states of {len(np.unique(examples.level[test]))} levels. **Bold**: claimed "
        f"by the rule above; {claims_summary(opened)}.", "",
        *ratio_tables(opened, OPEN_OUTCOMES)])
    store.write("report", value=text)
    print(f"open loop: {claims_summary(opened)}; real game: {claims_summary(table)}; wrote "
          f"{store.file_of('report')}")


def default_labels(game: str, atlas: ResultStore) -> list[str]:
    """Return those default labels (each hazard of the game ahead of the player, the velocities, and
    the steps to the end) that have a direction in the atlas.

    Raises:
        UserError: if no default label has one.
    """
    names = [*(f"{kind.name}_ahead" for kind in hazards_of(game)), "velocity_x", "velocity_y",
             "steps_to_end"]
    names = [name for name in names if atlas.has("weights", name)]
    if not names:
        raise UserError(f"{atlas.path} has no direction for any default label; give --labels")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
