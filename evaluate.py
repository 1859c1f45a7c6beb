"""Evaluate an agent: success rate and mean return, by default on levels that it was not trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from agents.agent_file import load_agent
from agents.config import add_env_flags, env_config
from agents.episodes import Episode, PlayOptions, evaluate, play_episodes
from agents.failures import attribute_failures, causes_of, unknown_hazards
from agents.provenance import agent_sha256
from agents.reference_set import played_reference
from agents.similarity import compare_agents, format_similarity
from common.cli import (
    Parser,
    add_compute_flags,
    add_output_file_flag,
    add_published_flags,
    check_output,
    count,
    environments,
    seed,
    set_up_logging,
    whole,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import read_description, save_json, versions
from common.progress import with_progress
from envs.procgen_env import draw_new_levels
from interventions.flags import add_patch_flags, open_arm, patch_arm, patched_precision
from interventions.patch_text import arm_name
from maze.level.patch_words import register_maze_words
from maze.level.regions import (
    add_cheese_region_flag,
    cheese_region,
    region_described,
    words_of,
)
from stats.significance import share


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", "--model_file", dest="agent_file", type=Path,
                       required=True, help="agent file to evaluate")
    flags.add_argument("--num_episodes", type=count, default=1000,
                       help="number of levels to play, one episode each")
    add_env_flags(flags)
    add_cheese_region_flag(flags, of_agent=True)
    flags.add_argument("--training_levels", action="store_true",
                       help="play the levels of --start_level and --num_levels instead of unseen "
                            "levels")
    flags.add_argument("--new_first_frames", action="store_true",
                       help="leave out unseen levels whose first frame is that of a level of "
                            "--start_level and --num_levels; many easy levels look alike")
    flags.add_argument("--greedy", action="store_true",
                       help="take the most likely action instead of sampling one")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played at a time")
    flags.add_argument("--seed", type=seed, default=0, help="seed of the levels and actions")
    flags.add_argument("--causes", action="store_true",
                       help="also report causes of failures: the hazard without which the last "
                            "step would not have ended the episode")
    add_output_file_flag(flags, help="also write the result to this file, as JSON")
    flags.add_argument("--other_agent", type=Path,
                       help="second agent file; also report KL divergences between the policies "
                            "and CKA of the layers, on one frame per level from episodes of the "
                            "first agent")
    flags.add_argument("--num_compared", type=whole(2, 100_000), default=500,
                       help="number of levels on which the agents are compared")
    add_patch_flags(flags)
    add_compute_flags(flags)
    add_published_flags(flags, ("num_threads",))
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_output(args.output, lambda path: {"agent_sha256", "success_rate"}
                 <= read_description(path).keys(), args.overwrite)
    register_maze_words()
    arm = patch_arm(args)
    compute = resolve_compute(args.device, args.gpu_device, patched_precision(args.precision, arm))
    config = env_config(args, args.agent_file)
    if args.new_first_frames and (args.training_levels or args.cheese_region):
        raise UserError("--new_first_frames chooses unseen levels by their unedited first frames; "
                        "leave --training_levels and --cheese_region out")
    new = draw_new_levels(config, args.num_episodes, args.seed) if args.new_first_frames else None
    if not args.training_levels:
        config = config.unseen_levels()
    edit = cheese_region(config, args.cheese_region, args.agent_file)
    policy = load_agent(args.agent_file, compute.device)
    other = args.other_agent and load_agent(args.other_agent, compute.device)
    levels = list(enumerate(config.draw_levels(args.num_episodes, args.seed) if new is None
                            else new[0]))
    measured = [level for _, level in levels]
    patches = open_arm(arm, args, policy, config, lambda size, seed: played_reference(
        policy, compute, config, measured, size, seed, edit), edit)
    started = time.monotonic()
    with patches.scope(policy) as scope:
        play = functools.partial(
            play_episodes, policy, compute, config, levels, args.seed, args.num_envs,
            PlayOptions(greedy=args.greedy, edit=edit, keep_frames=False))
        causes: Counter[str] = Counter()

        def with_causes() -> Iterator[Episode]:
            for episode, cause, _ in attribute_failures(config, play):
                causes.update([cause] if cause else [])
                yield episode

        episodes = with_causes() if args.causes else play()
        result = evaluate(with_progress(episodes, len(levels), "episode"))
    similarity = {} if other is None else {"alike": {
        "other_agent_sha256": agent_sha256(args.other_agent),
        **compare_agents(policy, other, compute, config, args.num_compared, args.seed, edit)}}
    if new is not None:
        print(f"left out: the first frame of {new[1]:.1%} of the drawn unseen levels is that of "
              "a known level")
    steps = result.mean_length * result.num_episodes
    with_patches = f", with {arm_name(arm)}" if arm else ""
    print(f"{args.agent_file} on {words_of(config, edit)}{with_patches}: "
          f"{result}; {steps / (time.monotonic() - started):.0f} steps/s")
    failures: dict = {}
    if args.causes:
        failures = {"causes": {cause: {
            "failures": causes[cause], "rate": causes[cause] / len(levels),
            "interval": share(causes[cause], len(levels))[1:]}
            for cause in causes_of(config.env_name)}}
        if unknown_hazards(config.env_name):
            print(unknown_hazards(config.env_name))
        print("cause of failure levels  % (95 % interval)")
        for cause, row in failures["causes"].items():
            low, high = row["interval"]
            print(f"{cause:16} {row['failures']:6}  {100 * row['rate']:.2f} ({100 * low:.2f} to "
                  f"{100 * high:.2f})")
    if similarity:
        print(f"compared with {args.other_agent} on {args.num_compared} frames: "
              f"{format_similarity(similarity['alike'])}")
    if args.output:
        save_json(args.output, {
            "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
            "env": vars(config), **region_described(edit), "seed": args.seed,
            "greedy": args.greedy, "new_first_frames": args.new_first_frames,
            **({} if new is None else {"share_left_out": new[1]}),
            "precision": compute.precision, **patches.metadata, **similarity,
            **({"moved": [dataclasses.asdict(size) for size in scope.changes()]} if arm else {}),
            **dataclasses.asdict(result), **failures, "versions": versions()})
        print(f"wrote {args.output}")


if __name__ == "__main__":
    raise SystemExit(main())
