"""Effects of lesions of an agent's hidden state.

On recorded frames, the divergence of the policy and the change of the value are measured at each
step after the lesion. Their courses over the steps are compared with those after random changes of
the same size, and with that of the attribution of an action to earlier frames. In the real game,
the success rate, the return, the length of episodes and the failures by cause are compared with
those of the intact agent on the same levels with the same random draws. Controls change the state
at random by the same amount. A killed run resumes after the last finished condition.
"""

# Letters in shape comments: A conditions, N windows or levels, K steps after a lesion.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.agent_file import load_agent
from agents.episodes import SOLVED
from agents.failures import FAILS_BY, failure_outcomes
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from agents.similarity import kl_divergence
from agents.testbed import BASELINE, Condition, Testbed
from analysis.memory.labels import RecordingOptions
from analysis.memory.lesion_results import (
    LESIONS,
    POLICY,
    TESTED_STEPS,
    VALUE,
    curves_of,
    open_loop_report,
    plot_curves,
    reach_of,
)
from analysis.memory.lesions import (
    COPY,
    DELAY,
    FREEZE,
    RESET,
    SWAP,
    Donors,
    Lesion,
    LesionedMemory,
    Windows,
    attribution_over_time,
    choose_windows,
    read_states,
    run_windows,
)
from common.cli import count, environments, seed, whole
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.options import ComputeOptions, command, option
from common.palette import DPI
from common.progress import with_progress
from common.results import ResultStore
from envs.procgen_env import EnvConfig
from interventions.comparison import outcomes_named
from stats.effects import Outcome, check_starts, claims_summary, compare_conditions
from stats.forest_plot import plot_effects
from stats.report import Wording, report
from stats.study import measure_conditions

WORDING = Wording(
    "Lesions of the agent's memory", "random changes",
    "lesions with no larger effect than random changes", " of the same size",
    "Size of the change of the hidden state per step")
NAMES = ("reset_once", "swap_once", "delay_once", "freeze", "reset_always", "swap_always",
         "delay_always")
REFERENCE_SHARE = 0.25  # share of the levels that serve as reference, see ``read_windows``


@dataclasses.dataclass(frozen=True, kw_only=True)
class LesionOptions(RecordingOptions, ComputeOptions):
    """Measure the effects of lesions of an agent's hidden state: reset, swap or delay it at one
    step or at every step, or freeze it from a step on."""

    lesions: tuple[str, ...] = option(
        NAMES, f"lesions to measure; choices: {', '.join(NAMES)}", choices=NAMES, metavar="LESION")
    num_episodes: int = option(400, "maximum number of recorded episodes to read", type=count)
    windows_per_episode: int = option(2, "maximum number of windows per recorded episode",
                                      type=count)
    num_steps: int = option(32, "number of steps after a lesion, in recorded episodes",
                            type=whole(2, 256))
    num_levels: int = option(100, "number of levels that are played under each lesion", type=count)
    num_controls: int = option(19, "number of random changes of the same size per lesion; claims "
                                   "need at least 19", type=whole(2, 1000))
    delay: int = option(4, "delay of the state in steps", type=whole(1, 64))
    num_envs: int = option(64, "number of episodes played in parallel", type=environments)
    seed: int = option(0, "seed of levels, actions, steps of lesions, controls and intervals",
                       type=seed)
    output_dir: Path = option(Path("analysis/memory/lesions"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def measure_lesions(options: LesionOptions) -> pd.DataFrame:
    """Measure all lesions, write all files, and return the table of effects in the real game."""
    compute = options.compute
    check_starts(options.num_levels, "--num_levels")
    policy = compute.place(load_agent(options.agent_file, compute.device))
    folder = RolloutFolder(options.data_dir)
    folder.check_agent(options.agent_file)
    game = recorded_game(folder)
    conditions = make_conditions(options.lesions, options.delay, options.num_controls)
    store = ResultStore(options.output_dir, LESIONS)
    store.open({
        "agent_file": options.agent_file.name, "agent_sha256": agent_sha256(options.agent_file),
        "data_dir": str(options.data_dir), "data_sha256": folder.sha256(), "env": vars(game),
        **{name: getattr(options, name) for name in (
            "num_episodes", "windows_per_episode", "num_steps", "num_levels", "num_controls",
            "delay", "seed")}, "lesions": list(options.lesions),
        "precision": compute.precision, "versions": versions()}, options.overwrite)
    store.compute("open_loop", function=lambda: measure_open_loop(
        policy, compute, folder, conditions, options))
    testbed = Testbed(policy, compute, game, game.draw_levels(options.num_levels, options.seed),
                      options.seed, options.num_envs, causes=True)
    measure_conditions(store, "episodes", [BASELINE, *conditions], ClosedLoop(testbed, store))
    return write_results(store, conditions, game, options)


def make_conditions(chosen: Sequence[str], delay: int, num_controls: int
                    ) -> list[Condition[Lesion]]:
    """Return the lesions, a swap of the state with a copy of itself as a check, and the controls of
    each lesion, in this order.

    Args:
        chosen: names of the lesions, a subset of NAMES.
        delay: delay of the state in steps.
        num_controls: number of controls per lesion.
    """
    steps = f"{delay} step{'s' if delay > 1 else ''}"
    lesions = {
        "reset_once": ("reset once", Lesion(RESET, once=True)),
        "swap_once": ("swapped once", Lesion(SWAP, once=True)),
        "delay_once": (f"delayed by {steps} once", Lesion(DELAY, once=True, delay=delay)),
        "freeze": ("frozen from a step on", Lesion(FREEZE)),
        "reset_always": ("reset at every step", Lesion(RESET)),
        "swap_always": ("swapped at every step", Lesion(SWAP)),
        "delay_always": (f"delayed by {steps} at every step", Lesion(DELAY, delay=delay))}
    lesions = {name: lesion for name, lesion in lesions.items() if name in chosen}
    conditions = [Condition(name, label, name, value=lesion)
                  for name, (label, lesion) in lesions.items()]
    copy = Condition("copy", "swapped with a copy at every step", conditions[-1].pattern,
                     value=Lesion(COPY))  # compared with the controls of the last lesion
    controls = [Condition(f"control_{k:03d}_{name}", f"control {k} of {label}", name, control=True,
                          value=dataclasses.replace(lesion, control=k))
                for name, (label, lesion) in lesions.items() for k in range(num_controls)]
    return [*conditions, copy, *controls]


def lesion_of(condition: Condition[Lesion]) -> Lesion:
    """Return the lesion of a condition, which must not be the baseline."""
    assert condition.value is not None
    return condition.value


def measure_open_loop(policy: Policy, compute: Compute, folder: RolloutFolder,
                      conditions: Sequence[Condition[Lesion]], options: LesionOptions
                      ) -> dict[str, np.ndarray]:
    """Measure the divergence of the policy and the change of the value on recorded frames under
    each condition, and the attribution of actions to earlier frames.

    Args:
        policy: the agent.
        compute: device and precision.
        folder: the recording.
        conditions: conditions from ``make_conditions``; a control must come after its lesion.

    Returns:
        Arrays of the entry ``open_loop`` for A conditions, N windows and K steps:

        - ``kl``: KL(intact policy ‖ policy under the condition) at each step, in nats (A, N, K)
        - ``value``: absolute change of the value at each step, in the unit of the return (A, N, K)
        - ``moved``: mean size of the change of the state per changed step (A,)
        - ``attribution``: result of ``attribution_over_time`` (N, K + 1)
        - ``levels``: level seed of each window (N,)

    Raises:
        UserError: if too few recorded levels are long enough.
    """
    windows, donors, mean, std = read_windows(policy, compute, folder, options)
    check_starts(len(np.unique(windows.levels)), "--num_episodes")
    intact, values, entering = run_windows(policy, windows)
    copies = Donors(list(entering), windows.levels, windows.first)
    initial, kl, changes = policy.initial_states(1)[0], [], []
    moved: dict[str, float] = {}
    for condition in with_progress(conditions, len(conditions), "lesion"):
        lesion = lesion_of(condition)
        alter = LesionedMemory(lesion, windows.begin, initial, std,
                               copies if lesion.kind == COPY else donors,
                               None if lesion.once else moved.get(condition.pattern))
        lesioned, lesioned_values, _ = run_windows(policy, windows, alter)
        kl.append(kl_divergence(intact, lesioned).cpu().numpy())
        changes.append((lesioned_values - values).abs().cpu().numpy())
        moved[condition.name] = alter.moved.sum() / alter.num_steps.sum()
    return {"kl": np.stack(kl), "value": np.stack(changes), "moved": np.array([*moved.values()]),
            "levels": windows.levels,
            "attribution": attribution_over_time(policy, windows, entering, mean)}


def read_windows(policy: Policy, compute: Compute, folder: RolloutFolder,
                 options: LesionOptions
                 ) -> tuple[Windows, Donors, Tensor, Tensor]:
    """Read windows of a recording.

    Args:
        policy, compute, folder: see ``measure_open_loop``.

    Returns:
        Windows; donor states, from all episodes outside the reference levels; and the mean
        embedding and the standard deviations of the hidden units, both from the reference levels.

    Raises:
        UserError: if no episode outside the reference levels is long enough.
    """
    episodes = folder.index()["episode"].unique()[:options.num_episodes].tolist()
    steps = {episode: folder.steps(episode) for episode in episodes}
    levels = np.array([steps[episode]["level_seed"].iloc[0] for episode in episodes])
    names = np.random.default_rng(options.seed).permutation(np.unique(levels))
    in_reference = np.isin(levels, names[:max(round(REFERENCE_SHARE * len(names)), 1)])
    num_before = options.delay
    begins = choose_windows([len(steps[episode]) - 1 for episode in episodes], num_before,
                            options.num_steps, options.windows_per_episode, options.seed)
    reference, states, parts = [], [], []
    for episode, level, begin, is_reference in zip(
            with_progress(episodes, len(episodes), "episode"), levels, begins, in_reference):
        embeddings, entering = read_states(policy, compute, folder, episode)
        if is_reference:
            reference.append((embeddings, entering))
            continue
        states.append(entering)
        actions = steps[episode]["action"].to_numpy()
        parts += [((level, first, actions[first + options.num_steps - 1]),
                   (embeddings[first - num_before:first + options.num_steps],
                    entering[first - num_before])) for first in begin]
    if not parts:
        raise UserError(f"no held-out episode of {folder.path} has "
                        f"{num_before + options.num_steps} steps; record longer episodes, or use "
                        "fewer --num_steps")
    numbers, tensors = ([part[i] for part in parts] for i in range(2))
    level, begin, action = np.array(numbers).T
    embedded, entering = (torch.stack(column) for column in zip(*tensors))
    windows = Windows(level, begin, action, embedded, entering, num_before)
    mean, std = (torch.cat(tensors) for tensors in zip(*reference))
    return (windows, Donors(states, levels[~in_reference], seed=options.seed), mean.mean(dim=0),
            std.std(dim=0))


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """Function that plays the same levels of the real game under each condition.

    Attributes:
        testbed: the levels, with causes of failures.
        store: store that keeps the states of the intact agent.
    """

    testbed: Testbed
    store: ResultStore

    def __call__(self, condition: Condition[Lesion]) -> pd.DataFrame:
        """Play all levels under a condition, and return its table ``episodes``.

        BASELINE must be played first: it stores the states of the intact agent for the lesions.
        """
        if condition.value is None:
            [played] = self.testbed.play([condition])
            states = [episode.hidden_states[:-1] for episode in played.episodes]
            self.store.write("states", value={"states": np.concatenate(states),
                                              "lengths": np.array([*map(len, states)])})
            return played.table.assign(moved=0.0, changed_steps=0)
        donors, std, begin = self._intact
        lesion = condition.value
        alter = LesionedMemory(
            lesion, begin if lesion.once or lesion.kind == FREEZE else np.zeros_like(begin),
            self.testbed.policy.initial_states(1)[0], std, donors, self._size_of(condition))
        [played] = self.testbed.play([dataclasses.replace(condition, alter_state=alter)])
        return played.table.assign(moved=alter.moved / np.maximum(alter.num_steps, 1),
                                   changed_steps=alter.num_steps)

    def _size_of(self, condition: Condition[Lesion]) -> float | None:
        """Return the argument ``size`` of ``LesionedMemory`` for a condition."""
        if not condition.control or lesion_of(condition).once:
            return None
        return mean_change(self.store.read("episodes", condition.pattern))

    @functools.cached_property
    def _intact(self) -> tuple[Donors, Tensor, np.ndarray]:
        """Donors and standard deviations of the units, from the states of the intact agent; and
        the random first step of the lesion in each episode (N,)."""
        arrays = self.store.read("states")
        states = torch.from_numpy(arrays["states"]).to(self.testbed.compute.device)
        last = arrays["lengths"] - 2  # last step before the terminal frame
        begin = np.random.default_rng(self.testbed.seed).integers(np.minimum(last, 1), last + 1)
        return (Donors(states.split(arrays["lengths"].tolist()), np.array(self.testbed.levels),
                       seed=self.testbed.seed), states.std(dim=0), begin)


def mean_change(table: pd.DataFrame) -> float:
    """Return the mean size of the change of the state per changed step in a table ``episodes``, 0
    if no step was changed."""
    steps = table["changed_steps"]
    return float((table["moved"] * steps).sum() / max(steps.sum(), 1))


def outcomes_of(game: EnvConfig) -> list[Outcome]:
    """Return the outcomes of episodes: success, return, length, and whether the episode fails
    from each of the causes in ``agents.failures.causes_of``."""
    return [*outcomes_named("success", "return", "length"), *failure_outcomes(game.env_name)]


def values_of(table: pd.DataFrame, outcomes: Sequence[Outcome]) -> np.ndarray:
    """Return the outcomes of the episodes in a table ``episodes``, float64 (N, outcomes)."""
    by_name = {"success": table["cause"] == SOLVED, "return": table["return"],
               "length": table["length"]}
    return np.stack([
        by_name[outcome.name] if outcome.name in by_name
        else table["cause"] == outcome.name.removeprefix(FAILS_BY)
        for outcome in outcomes], axis=1).astype(float)


def write_results(store: ResultStore, conditions: Sequence[Condition[Lesion]], game: EnvConfig,
                  options: LesionOptions) -> pd.DataFrame:
    """Compute and write all tables, the report and the figures, print the claims, and return the
    table of effects in the real game.

    Args:
        store: open store with all items.
        conditions: conditions from ``make_conditions``.
        game: the game.
    """
    measured = store.read("open_loop")
    kl, levels = measured["kl"].astype(float), measured["levels"]
    tested = [step for step in TESTED_STEPS if step <= kl.shape[2]]
    at_steps = [Outcome(f"kl_{step}", f"KL at step {step} (nats)") for step in tested]
    after = kl[:, :, np.array(tested) - 1]
    open_loop = compare_conditions(
        conditions, at_steps, np.zeros_like(after[0]), after, options.seed, levels,
        {condition.name: moved for condition, moved in zip(conditions, measured["moved"])},
        verdicts=False)
    effects_of_lesions = {POLICY: kl, VALUE: measured["value"].astype(float)}
    curves = curves_of(conditions, effects_of_lesions, measured["attribution"], levels,
                       options.seed)
    reach = reach_of([condition.name for condition in conditions], effects_of_lesions,
                     measured["attribution"].astype(float), levels, options.seed)

    outcomes = outcomes_of(game)
    tables = {condition.name: store.read("episodes", condition.name)
              for condition in (BASELINE, *conditions)}
    before, *values = (values_of(table, outcomes) for table in tables.values())
    moved = {name: mean_change(table) for name, table in tables.items()}
    effects = compare_conditions(conditions, outcomes, before, np.stack(values), options.seed,
                                 moved=moved)
    name, num_recorded = f"{game.env_name} ({game.distribution_mode})", len(np.unique(levels))
    description = f"{options.agent_file.name} on {len(before)} levels of {name}"
    for entry, value in (("effects", effects), ("open_loop_effects", open_loop),
                         ("curves", curves), ("reach", reach)):
        store.write(entry, value=value)
    text = (report(effects, outcomes, WORDING, f"{description}.") + "\n"
            + open_loop_report(open_loop, reach, kl.shape[1:], num_recorded))
    store.write("report", value=text)
    with store.file("figure") as path:
        plot_effects(path, effects, outcomes, WORDING, description)
    with store.file("kl_figure") as path:
        title = f"{options.agent_file.name} on {num_recorded} levels of {name}"
        plot_curves(curves, title).savefig(path, dpi=DPI)
    for row in effects[effects["claimed"] & ~effects["control"]].itertuples():
        print(f"{row.label}: {row.outcome} {row.unaltered:.3g} to {row.altered:.3g}")
    print(f"{claims_summary(effects)}; wrote {store.file_of('report')} and the tables next to it")
    return effects


main = command(LesionOptions, measure_lesions)

if __name__ == "__main__":
    raise SystemExit(main())
