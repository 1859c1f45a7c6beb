"""Which decision caused the failure?

For each failed episode of an agent of CoinRun, the last WINDOW states are restored in the real
game. From a state, every distinct action is taken, and the agent then plays on, many times with
different random draws. A continuation is *saved* if it takes the coin, or is alive after HORIZON
steps. The *point of no return* is the last state in which an action exists whose continuations are
saved with a rate of at least SAVABLE; the action that the agent took there is the *fatal* one.

The best of several estimates is biased upwards. The action is therefore chosen on a few
continuations, and its rate, like that of the action taken, is measured on fresh ones. All actions
of a state draw the same random numbers, so their continuations are pairs.

Actions are the same if they lead to the same state of the game: CoinRun distinguishes about six of
Procgen's 15 actions on the ground, and three in the air.

Every STRIDE-th state of the window is measured, then the states between the last savable one and
the next one. Controls are windows of solved episodes, which end at a random step, and failures of
random actions, which also continue with random actions.

A killed run resumes after the last finished episode, and shards divide the episodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import agent_title, load_agent
from agents.episodes import SOLVED, UNFINISHED, PlayOptions
from agents.failures import TIMEOUT
from agents.networks import Policy, blind_policy
from agents.testbed import Testbed
from analysis.decision_films import film
from analysis.decision_results import (
    CONTROL,
    DECISIONS,
    FAILURES,
    GROUPS,
    RANDOM_FAILURES,
    Case,
    curves,
    decide,
    halved,
    headline,
    plot,
    report_of,
    shares,
    summary,
)
from analysis.decision_trials import (
    MAX_STEPS,
    WINDOW,
    ContinuationOptions,
    DecisionStudy,
)
from common.cli import count, from_zero
from common.devices import Compute
from common.game_constants import NUM_ACTIONS
from common.options import ShardOptions, command, option
from common.palette import DPI
from common.progress import with_progress
from common.results import ResultStore
from common.shards import WHOLE
from common.video import write_video
from envs.coin import GAME
from envs.procgen_env import EnvConfig
from stats.effects import check_starts

LEVELS_AT_A_TIME = 64
LEVELS_PER_EPISODE = 100  # levels after which the search for a failure is given up


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionOptions(ContinuationOptions, ShardOptions):
    """Find the decision that caused each failure of an agent of CoinRun, by forcing every action in
    the last states of the episode and continuing from there."""

    num_failures: int = option(100, "number of failures on unseen levels", type=count)
    num_controls: int = option(30, "number of solved episodes, and of failures of random actions",
                               type=from_zero)
    output_dir: Path = option(Path("analysis/decisions"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def measure_decisions(options: DecisionOptions) -> pd.DataFrame | None:
    """Measure all episodes, write all files and return the table of decisions; None for a shard.

    Raises:
        UserError: if the game is not CoinRun, or there are too few failures.
    """
    config, compute = options.unseen_levels(), options.compute
    check_starts(options.num_failures, "--num_failures")
    policies = {RANDOM_FAILURES: blind_policy(np.zeros(NUM_ACTIONS))}
    policies[FAILURES] = policies[CONTROL] = load_agent(options.agent_file, compute.device)
    numbers = {FAILURES: options.num_failures, CONTROL: options.num_controls,
               RANDOM_FAILURES: options.num_controls}
    store = ResultStore(options.output_dir, DECISIONS)
    store.open({**options.settings(config), **numbers}, options.overwrite, options.shard, numbers,
               options.join)
    cases = find_cases(store, policies, compute, config, numbers, options)
    studies = {group: DecisionStudy(policy, compute, config, options)
               for group, policy in policies.items()}
    # Failures and controls alternate, so that a run that is stopped has some of each.
    order = sorted((place / len(found), group, place) for group, found in cases.items()
                   for place in range(len(found)))
    todo = [(group, cases[group][place]) for _, group, place in order]
    for group, case in with_progress(iter(options.shard.of(todo)), len(todo), "episode"):
        key = f"{group}_{case.number}"
        table = store.compute("states", key, function=functools.partial(
            studies[group].measure, case))
        if group == FAILURES and not store.has("films", key):
            with store.file("films", key) as path:
                write_video(path, film(config, case, table), fps=4)
    for study in studies.values():
        study.close()
    store.finish()
    return write_results(store, options, config, cases) if options.shard == WHOLE else None


def find_cases(store: ResultStore, policies: Mapping[str, Policy], compute: Compute,
               config: EnvConfig, numbers: Mapping[str, int], options: DecisionOptions
               ) -> dict[str, list[Case]]:
    """Return the episodes of each group: the first ones in the order of the drawn levels.

    Every shard finds all of them.

    Args:
        numbers: numbers of episodes by group.
    """
    for groups in ((FAILURES, CONTROL), (RANDOM_FAILURES,)):
        if not all(store.has("cases", group) for group in groups):
            wanted = {group: numbers[group] for group in groups}
            for group, cases in play_cases(policies[groups[0]], compute, config, wanted,
                                           options).items():
                store.write("cases", group, value=[dataclasses.asdict(case) for case in cases])
    return {group: [Case(**case) for case in store.read("cases", group)] for group in GROUPS}


def play_cases(policy: Policy, compute: Compute, config: EnvConfig, wanted: Mapping[str, int],
               options: DecisionOptions) -> dict[str, list[Case]]:
    """Play levels until there are enough episodes of each group, or LEVELS_PER_EPISODE times as
    many levels have been played.

    Args:
        wanted: number of episodes by group: CONTROL, and FAILURES or RANDOM_FAILURES.
    """
    found: dict[str, list[Case]] = {group: [] for group in wanted}
    num_levels = 0
    while (any(len(found[group]) < number for group, number in wanted.items())
           and num_levels < LEVELS_PER_EPISODE * max(wanted.values())):
        levels = config.draw_levels(num_levels + LEVELS_AT_A_TIME, options.seed)
        testbed = Testbed(policy, compute, config, levels, options.seed, options.num_envs,
                          options=PlayOptions(keep_frames=False, max_steps=MAX_STEPS), causes=True)
        episodes = testbed.episodes(numbers=range(num_levels, len(levels)))
        for episode in sorted(episodes, key=lambda episode: episode.number):
            is_solved = episode.end == SOLVED
            group = next((group for group in wanted if is_solved == (group == CONTROL)), None)
            if (group is None or episode.end in (UNFINISHED, TIMEOUT)
                    or len(found[group]) >= wanted[group]):
                continue
            last = episode.length - 1
            if is_solved:
                rng = np.random.default_rng([options.seed, episode.number])
                last = int(rng.integers(min(WINDOW, episode.length) - 1, episode.length))
            found[group].append(dataclasses.replace(Case.of(episode), last=last))
        num_levels = len(levels)
    return found


def write_results(store: ResultStore, options: DecisionOptions, config: EnvConfig,
                  cases: Mapping[str, Sequence[Case]]) -> pd.DataFrame:
    """Write the tables, the report and the figure; return the table of decisions."""
    states = {(group, case.number): store.read("states", f"{group}_{case.number}")
              for group, found in cases.items() for case in found}
    table = pd.DataFrame([
        {"group": group, **decide(states[group, case.number], case),
         "class_of_half": decide(halved(states[group, case.number]), case)["class"]}
        for group, found in cases.items() for case in found])
    over_time, classes = curves(states, cases, options.seed), shares(table)
    means = summary(table, options.seed)
    store.write("decisions", value=table)
    store.write("shares", value=classes)
    store.write("curves", value=over_time)
    store.write("summary", value=means)
    title = agent_title(options.agent_file)
    store.write("report", value=report_of(
        table, classes, means, f"{title} on unseen levels of {GAME} ({config.distribution_mode})",
        options.num_tried, options.num_fresh))
    with store.file("figure") as path:
        plot(table, classes, over_time, title).savefig(path, dpi=DPI)
    print(f"{headline(table)}\nwrote {store.file_of('report')}")
    return table


main = command(DecisionOptions, measure_decisions)

if __name__ == "__main__":
    raise SystemExit(main())
