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
from agents.config import GameOptions
from agents.episodes import (
    SOLVED,
    UNFINISHED,
    EpisodeState,
    PlayOptions,
    Run,
    play_episodes,
)
from agents.failures import TIMEOUT
from agents.networks import Policy, blind_policy
from agents.provenance import agent_sha256
from agents.testbed import Testbed
from analysis.decision_films import film
from analysis.decision_results import (
    CONTROL,
    DECISIONS,
    FAILURES,
    GROUPS,
    NOT_MEASURED,
    OUTCOMES,
    RANDOM_FAILURES,
    STATE,
    STRIDE,
    UNKNOWN,
    Case,
    curves,
    decide,
    halved,
    headline,
    plot,
    point_of_no_return,
    rate,
    report_of,
    shares,
    summary,
)
from common.cli import count, environments, from_zero, seed, whole
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.game_constants import NUM_ACTIONS
from common.options import ComputeOptions, ShardOptions, command, option
from common.palette import DPI
from common.progress import with_progress
from common.results import ResultStore
from common.shards import WHOLE
from common.video import write_video
from envs.coin import GAME
from envs.level_state import LevelState
from envs.objects import (
    GameObject,
    SingleObject,
    hazards_of,
    in_view,
    removed,
    single_objects,
)
from envs.procgen_env import EnvConfig, StateView
from envs.real_game import RealGame
from stats.effects import check_starts

WINDOW = 32  # states that may contain the decision
HORIZON = 64  # steps after which a continuation counts as saved
MAX_STEPS = 500  # longer episodes are left out
LEVELS_AT_A_TIME = 64
LEVELS_PER_EPISODE = 100  # levels after which the search for a failure is given up
# Fields of a state that only store the last action; the next step overwrites them.
_LAST_ACTION = {"step": ("action",), "drawing": (
    "last_move_action", "move_action", "special_action", "action_vx", "action_vy", "action_vrot")}
_STREAMS = 10_000  # number of streams of random draws per state


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionOptions(GameOptions, ShardOptions, ComputeOptions):
    """Find the decision that caused each failure of an agent of CoinRun, by forcing every action in
    the last states of the episode and continuing from there."""

    agent_file: Path = option(help="agent that plays", names=("--agent_file", "--model_file"))
    num_failures: int = option(100, "number of failures on unseen levels", type=count)
    num_controls: int = option(30, "number of solved episodes, and of failures of random actions",
                               type=from_zero)
    num_tried: int = option(8, "number of continuations per action on which the best action is "
                               "chosen", type=whole(1, 1000))
    num_fresh: int = option(32, "number of fresh continuations of the best action and of the "
                                "action taken", type=whole(1, 1000))
    num_envs: int = option(64, "number of continuations played in parallel", type=environments)
    seed: int = option(0, "seed of levels, actions and bootstrap", type=seed)
    output_dir: Path = option(Path("analysis/decisions"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def measure_decisions(options: DecisionOptions) -> pd.DataFrame | None:
    """Measure all episodes, write all files and return the table of decisions; None for a shard.

    Raises:
        UserError: if the game is not CoinRun, or there are too few failures.
    """
    config, compute = options.env_config(options.agent_file).unseen_levels(), options.compute
    if config.env_name != GAME:
        raise UserError(f"the actions of {config.env_name} are not known; this study is of {GAME} "
                        "only")
    check_starts(options.num_failures, "--num_failures")
    policies = {RANDOM_FAILURES: blind_policy(np.zeros(NUM_ACTIONS))}
    policies[FAILURES] = policies[CONTROL] = load_agent(options.agent_file, compute.device)
    numbers = {FAILURES: options.num_failures, CONTROL: options.num_controls,
               RANDOM_FAILURES: options.num_controls}
    store = ResultStore(options.output_dir, DECISIONS)
    store.open({
        "agent_file": options.agent_file.name, "agent_sha256": agent_sha256(options.agent_file),
        "env": vars(config), **numbers, "num_tried": options.num_tried,
        "num_fresh": options.num_fresh, "seed": options.seed, "precision": compute.precision,
        "versions": versions()}, options.overwrite, options.shard, numbers, options.join)
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
            found[group].append(Case(episode.number, episode.level_seed, episode.cause or SOLVED,
                                     last, episode.actions[:-1].tolist()))
        num_levels = len(levels)
    return found


@dataclasses.dataclass(frozen=True)
class Moment:
    """A state of a case, with the policy (A,) and the value of the agent there."""

    start: EpisodeState
    probs: np.ndarray
    value: float


class DecisionStudy:
    """Continuations of an agent from states of its episodes.

    Args:
        policy: the agent that continues.
        options: numbers of continuations, and seed.
    """

    def __init__(self, policy: Policy, compute: Compute, config: EnvConfig,
                 options: DecisionOptions):
        self._policy, self._compute, self._options = policy, compute, options
        self._hazards = hazards_of(config.env_name)
        self._game, self._view = RealGame(config, options.num_envs), StateView(config)

    def measure(self, case: Case) -> pd.DataFrame:
        """Measure an episode.

        Returns:
            A row per measured state and distinct action, with the columns of STATE.

        Raises:
            UserError: if the episode cannot be played again.
        """
        moments = self.replay(case)
        steps = sorted(moments)
        killers = self.killers(moments[case.last], case) if case.cause != SOLVED else None
        table = self._judge(case, {step: moments[step] for step in steps[::-1][::STRIDE]}, killers)
        chosen = point_of_no_return(table)
        later = table["step"][table["step"] > chosen]
        bracket = range(chosen + 1, later.min()) if len(later) else ()
        if bracket:
            more = {step: moments[step] for step in bracket if step in moments}
            table = pd.concat([table, self._judge(case, more, killers)])
        table = table.sort_values(["step", "action"], ignore_index=True)
        chosen = point_of_no_return(table)
        if killers is not None and chosen >= 0:
            state = LevelState.parse(moments[chosen].start.state)
            for kind in self._causes(case):
                state = removed(state, kind)
            start = dataclasses.replace(moments[chosen].start, state=state.to_bytes())
            row = table.index[(table["step"] == chosen) & (table["taken"] == 1)][0]
            table.loc[row, "removed"] = self._continue(
                case, [(start, int(table.loc[row, "action"]))], self._fresh)[0]
        return table

    def replay(self, case: Case) -> dict[int, Moment]:
        """Play the recorded actions again, and return the states of the window by step.

        Raises:
            UserError: if the episode does not end as it did.
        """
        states: dict[int, bytes] = {}

        def watch(number: int, step: int, state_of) -> None:
            if case.last - WINDOW < step <= case.last:
                states[step] = state_of()

        [episode] = play_episodes(
            self._policy, self._compute, self._game, [Run(0, case.level_seed, case.actions)],
            self._options.seed, 1, PlayOptions(keep_frames=False, max_steps=len(case.actions)),
            watch)
        if not episode.dones[-1] or bool(episode.level_complete) != (case.cause == SOLVED):
            raise UserError(f"the episode on level {case.level_seed} does not end as before; was "
                            "it played with another version of Procgen?")
        return {step: Moment(EpisodeState(case.level_seed, step, state,
                                          episode.hidden_states[step]),
                             np.exp(episode.log_probs[step]), float(episode.values[step]))
                for step, state in states.items()}

    def killers(self, moment: Moment, case: Case) -> list[SingleObject | GameObject]:
        """Return the objects whose removal before the last step prevents the failure, each alone;
        or, if there is none, the kinds that are the cause."""
        state = LevelState.parse(moment.start.state)
        single: list[SingleObject | GameObject] = [
            thing for kind in self._hazards for thing in single_objects(state, kind)
            if self._step(thing.removed_from(state).to_bytes(), case.actions[-1])
            in ((False, False), (True, True))]
        return single or [*self._causes(case)]

    def _causes(self, case: Case) -> list[GameObject]:
        """Return the kinds of hazard that are the cause, in all directions of motion; all kinds if
        it is not a single one."""
        types = {kind.entity_types for kind in self._hazards if kind.name == case.cause}
        return [kind for kind in self._hazards if not types
                or (kind.entity_types in types and (kind.name == case.cause or kind.moving))]

    def distinct_actions(self, state: bytes) -> list[list[int]]:
        """Group Procgen's actions by the state to which they lead."""
        groups: dict[object, list[int]] = {}
        for action in range(NUM_ACTIONS):
            end = self._step(state, action)
            after = end if end[0] else _without_action(self._view.state())
            groups.setdefault(after, []).append(action)
        return list(groups.values())

    def close(self) -> None:
        """Free the environments."""
        self._game.close()
        self._view.close()

    @property
    def _fresh(self) -> range:
        return range(self._options.num_tried, self._options.num_tried + self._options.num_fresh)

    def _judge(self, case: Case, moments: Mapping[int, Moment], killers: Sequence | None
               ) -> pd.DataFrame:
        """Choose the best action in each state, and measure it and the action taken.

        Equal rates are decided in favour of the action taken, so other actions are not tried if all
        its continuations are saved.
        """
        rows = []
        for step, moment in moments.items():
            seen = UNKNOWN if killers is None else int(_in_view(moment.start.state, killers))
            for group in self.distinct_actions(moment.start.state):
                rows.append({
                    "step": step, "action": group[0], "actions": " ".join(map(str, group)),
                    "probability": float(moment.probs[group].sum()), "value": moment.value,
                    "hazard_in_view": seen, "taken": int(case.actions[step] in group), "best": 0,
                    "tried": NOT_MEASURED, "fresh": NOT_MEASURED, "removed": NOT_MEASURED})
        table = pd.DataFrame(rows)
        starts = [(moments[step].start, action)
                  for step, action in table[["step", "action"]].values]

        def play(rows: pd.Index, column: str, streams: range) -> None:
            if len(rows):
                table.loc[rows, column] = self._continue(case, [starts[row] for row in rows],
                                                         streams)

        tried = range(self._options.num_tried)
        play(taken := table.index[table["taken"] == 1], "tried", tried)
        is_perfect = table.loc[taken].set_index("step")["tried"].map(rate) == 1
        play(table.index[(table["taken"] == 0) & ~table["step"].map(is_perfect)], "tried", tried)
        order = table.assign(rate=table["tried"].map(rate)).sort_values(
            ["step", "rate", "taken", "probability"], ascending=False)
        table.loc[order.index[~order["step"].duplicated()], "best"] = 1
        play(table.index[(table["best"] | table["taken"]) == 1], "fresh", self._fresh)
        return table[list(STATE)]

    def _continue(self, case: Case, starts: Sequence[tuple[EpisodeState, int]], streams: range
                  ) -> list[str]:
        """Continue from each state with an action, once per stream of random draws.

        Returns:
            For each start, whether each continuation is saved, as a string of OUTCOMES.
        """
        runs = [Run(place * len(streams) + k, start, [int(action)],
                    (case.number * MAX_STEPS + start.step) * _STREAMS + stream)
                for place, (start, action) in enumerate(starts)
                for k, stream in enumerate(streams)]
        ends = {episode.number: episode.end for episode in play_episodes(
            self._policy, self._compute, self._game, runs, self._options.seed,
            self._options.num_envs, PlayOptions(keep_frames=False, keep_outputs=False,
                                                max_steps=HORIZON))}
        saved = [OUTCOMES[ends[run.number] in (SOLVED, UNFINISHED)] for run in runs]
        return ["".join(saved[begin:begin + len(streams)])
                for begin in range(0, len(saved), len(streams))]

    def _step(self, state: bytes, action: int) -> tuple[bool, bool]:
        """Take a step; return whether it ends the episode, and whether it solves the level."""
        self._view.set(state)
        return self._view.step(action)


def _without_action(data: bytes) -> bytes:
    """Return a state without the fields that only store the last action."""
    state = LevelState.parse(data)
    changes = {}
    for name, fields in _LAST_ACTION.items():
        changes[name] = getattr(state, name).copy()
        for field in fields:
            changes[name][field] = 0
    return dataclasses.replace(state, **changes).to_bytes()


def _in_view(data: bytes, killers: Sequence[SingleObject | GameObject]) -> bool:
    """Return whether any of the objects, or an object of any of the kinds, overlaps the view.

    Entities keep their rank, and can have turned around in the meantime.
    """
    state = LevelState.parse(data)
    seen = [thing for kind in hazards_of(state.game) for thing in single_objects(state, kind)]
    return any(
        in_view(state, killer) if isinstance(killer, GameObject) else any(
            thing.kind.entity_types == killer.kind.entity_types and thing.rank == killer.rank
            and (killer.rank >= 0 or bool((thing.cells & killer.cells).any())) for thing in seen)
        for killer in killers)


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
