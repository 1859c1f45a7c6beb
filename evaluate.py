"""Evaluate an agent, see ``EvaluateOptions``."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.agent_file import load_agent, read_origin
from agents.episodes import Episode, PlayOptions, play_episodes, summarise
from agents.failures import attribute_failures, causes_of, unknown_hazards
from agents.goal_places import GoalEdit, GoalGameOptions, goal_described, words_of
from agents.networks import Policy, blind_policy
from agents.provenance import agent_sha256
from agents.reference_set import played_reference
from agents.similarity import compare_agents, format_similarity
from common.cli import count, environments, output_file, seed, whole
from common.devices import Compute
from common.errors import UserError
from common.files import read_description, save_json, versions
from common.game_constants import NUM_ACTIONS
from common.options import ComputeOptions, OutputFileOptions, command, option
from common.progress import with_progress
from envs.coin import END
from envs.procgen_env import EnvConfig, draw_new_levels
from interventions.flags import PatchOptions, patched_precision
from interventions.patch_text import patch_list_name
from stats.significance import share


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(GoalGameOptions, PatchOptions, OutputFileOptions, ComputeOptions):
    """Evaluate an agent: success rate and mean return, by default on levels that it was not trained
    on."""

    ignored: ClassVar = ("num_threads",)

    agent_file: Path = option(help="agent file to evaluate", names=("--agent_file", "--model_file"))
    num_episodes: int = option(1000, "number of levels to play, one episode each", type=count)
    training_levels: bool = option(
        False, "play the levels of --start_level and --num_levels instead of unseen levels")
    new_first_frames: bool = option(
        False, "leave out unseen levels whose first frame is that of a level of --start_level and "
               "--num_levels; many easy levels look alike")
    greedy: bool = option(False, "take the most likely action instead of sampling one")
    num_envs: int = option(64, "number of episodes played at a time", type=environments)
    seed: int = option(0, "seed of the levels and actions", type=seed)
    causes: bool = option(False, "also report causes of failures: the hazard without which the "
                                 "last step would not have ended the episode")
    output: Path | None = option(None, "also write the result to this file, as JSON",
                                 type=output_file)
    other_agent: Path | None = option(
        None, "second agent file; also report KL divergences between the policies and CKA of the "
              "layers, on one frame per level from episodes of the first agent")
    num_compared: int = option(500, "number of levels on which the agents are compared",
                               type=whole(2, 100_000))


def evaluate_agent(options: EvaluateOptions) -> dict[str, Any]:
    """Play the levels, print the result and return it, as it is stored in the output file."""
    options.check_output(lambda path: {"agent_sha256", "success_rate"}
                         <= read_description(path).keys())
    compute = options.compute_in(patched_precision(options.precision, options.patch_list))
    config, edit = options.game(options.agent_file)
    if options.new_first_frames and (options.training_levels or options.cheese_region
                                     or options.coin not in (None, END)):
        raise UserError("--new_first_frames chooses unseen levels by their unedited first frames; "
                        "leave --training_levels, --cheese_region and --coin out")
    new = (draw_new_levels(config, options.num_episodes, options.seed)
           if options.new_first_frames else None)
    if not options.training_levels:
        config = config.unseen_levels()
    policy = load_agent(options.agent_file, compute.device)
    other = load_agent(options.other_agent, compute.device) if options.other_agent else None
    levels = list(enumerate(config.draw_levels(options.num_episodes, options.seed) if new is None
                            else new[0]))
    if new is not None:
        print(f"left out: the first frame of {new[1]:.1%} of the drawn unseen levels is that of "
              "a known level")
    result = {
        "agent_file": options.agent_file.name, "agent_sha256": agent_sha256(options.agent_file),
        "env": vars(config), **goal_described(edit), "seed": options.seed,
        "greedy": options.greedy, "new_first_frames": options.new_first_frames,
        **({} if new is None else {"share_left_out": new[1]}), "precision": compute.precision,
        "versions": versions(),
        **play_levels(options, policy, compute, config, levels, edit)}
    if options.env_name is None and read_origin(options.agent_file).env_name is None:
        warn_of_wrong_game(options, compute, config, [level for _, level in levels[:100]], edit,
                           result)
    if options.other_agent and other:
        result["alike"] = {
            "other_agent_sha256": agent_sha256(options.other_agent), **compare_agents(
                policy, other, compute, config, options.num_compared, options.seed, edit)}
        print(f"compared with {options.other_agent} on {options.num_compared} frames: "
              f"{format_similarity(result['alike'])}")
    if options.output:
        save_json(options.output, result)
        print(f"wrote {options.output}")
    return result


def play_levels(options: EvaluateOptions, policy: Policy, compute: Compute, config: EnvConfig,
                levels: Sequence[tuple[int, int]], edit: GoalEdit | None) -> dict[str, Any]:
    """Play levels, given as pairs of number and level seed; print and return the statistics, the
    causes of failures, and the description of the patches."""
    measured = [level for _, level in levels]
    patches = options.open_patch_list(policy, config, lambda size, seed: played_reference(
        policy, compute, config, measured, size, seed, edit), edit)
    started = time.monotonic()
    causes: Counter[str] = Counter()
    with patches.scope(policy) as scope:
        play = functools.partial(
            play_episodes, policy, compute, config, levels, options.seed, options.num_envs,
            PlayOptions(greedy=options.greedy, edit=edit, keep_frames=False))

        def with_causes() -> Iterator[Episode]:
            for episode in attribute_failures(config, play):
                causes.update([episode.cause] if episode.cause else [])
                yield episode

        episodes = with_causes() if options.causes else play()
        result = summarise(with_progress(episodes, len(levels), "episode"))
    steps = result.mean_length * result.num_episodes
    with_patches = f", with {patch_list_name(options.patch_list)}" if options.patch_list else ""
    print(f"{options.agent_file} on {words_of(config, edit)}{with_patches}: "
          f"{result.describe(config.env_name)}; {steps / (time.monotonic() - started):.0f} steps/s")
    described = {**patches.metadata, **dataclasses.asdict(result)}
    if options.patch_list:
        described["moved"] = [dataclasses.asdict(size) for size in scope.changes()]
    if options.causes:
        described["causes"] = {cause: {
            "failures": causes[cause], "rate": causes[cause] / len(levels),
            "interval": share(causes[cause], len(levels))[1:]}
            for cause in causes_of(config.env_name)}
        print_causes(described["causes"], config.env_name)
    return described


def warn_of_wrong_game(options: EvaluateOptions, compute: Compute, config: EnvConfig,
                       levels: Sequence[int], edit: GoalEdit | None,
                       result: Mapping[str, Any]) -> None:
    """Compare an agent whose game is assumed with a random agent, on some of the levels."""
    random = summarise(play_episodes(
        compute.place(blind_policy(np.zeros(NUM_ACTIONS))), compute, config,
        list(enumerate(levels)), options.seed, options.num_envs,
        PlayOptions(edit=edit, keep_frames=False)))
    print(f"a random agent: {random.describe(config.env_name)}")
    if (result["return_interval"] or [result["mean_return"]])[0] <= random.mean_return:
        print(f"the agent is not clearly better than a random agent, so {config.env_name} looks "
              "like the wrong game; choose another with --env_name (and --distribution_mode, "
              "--use_backgrounds or --no_backgrounds)")


def print_causes(causes: Mapping[str, Mapping[str, Any]], game: str) -> None:
    """Print the table of the causes of failures."""
    if unknown_hazards(game):
        print(unknown_hazards(game))
    print("cause of failure levels  % (95 % interval)")
    for cause, row in causes.items():
        low, high = row["interval"]
        print(f"{cause:16} {row['failures']:6}  {100 * row['rate']:.2f} ({100 * low:.2f} to "
              f"{100 * high:.2f})")


main = command(EvaluateOptions, evaluate_agent)

if __name__ == "__main__":
    raise SystemExit(main())
