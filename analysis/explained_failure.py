"""Explain one failure of an agent: the decision that caused it, what the agent saw and expected
there, and what would have had to be different.

The failure is replayed in the real game. From its last states, every action is tried, see
``analysis/decisions.py``; the last state that an action saves is the *point of no return*. There,
each object in view is hidden in the frame, which shows what the policy responds to, and removed
from the level, which shows what the outcome depends on. The episode is then played again with the
best action, and without the object whose removal saves most. With a simulator, the same actions
are also tried in imagined worlds that continue the frame.

``explain_failure.py`` is the script. It writes a page that opens from disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.agent_file import agent_title, load_agent
from agents.config import level_seed
from agents.episodes import (
    SOLVED,
    UNFINISHED,
    EpisodeState,
    PlayOptions,
    small_picture,
)
from agents.failures import TIMEOUT
from agents.networks import Policy
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from agents.testbed import Condition, Testbed
from analysis.decision_films import action_label, framed, plain_action
from analysis.decision_results import (
    OUTCOMES,
    Case,
    decide,
    point_of_no_return,
    rate,
)
from analysis.decision_trials import (
    MAX_STEPS,
    ContinuationOptions,
    DecisionStudy,
    Moment,
    recorded_start,
)
from analysis.failure_page import (
    EXPLAINED,
    IMAGINED_STEPS,
    NUM_WORLDS,
    OBJECT,
    Explanation,
    Film,
    named,
)
from common.cli import from_zero
from common.errors import UserError
from common.options import option, redefine
from common.results import ResultStore
from envs.level_state import LevelState
from envs.objects import SingleObject, objects_of, removed, single_objects, undrawn
from envs.procgen_env import EnvConfig, LevelSlots
from generative.config import SimulatorConfig
from generative.runs import open_simulator
from generative.simulated_game import RecordedStart, survival_of_actions
from generative.start_worlds import check_prior

TRIES = 32  # plays of a level, and number of levels played at a time, in search of a failure
LEAD, TAIL = 8, 48  # steps of a film before and after the point of no return
GROUND = ("wall",)  # kinds that are part of the level rather than objects in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(ContinuationOptions):
    """Explain one failure of an agent of CoinRun on one page: the fatal decision, what the agent
    saw and expected there, and the smallest change of the world or of one action that saves it,
    played in the real game."""

    agent_file: Path = redefine(ContinuationOptions, "agent_file", names=())
    level_seed: int | None = option(
        None, "level to explain, played until the agent fails; by default the first unseen level "
              "on which it fails", type=level_seed)
    data_dir: Path | None = option(None, "recording whose first failed episode is explained")
    episode: int | None = option(None, "episode of the recording", type=from_zero)
    model_file: Path | None = option(
        None, "simulator of this agent; without one, the page leaves out what the simulator "
              "expects")
    output_dir: Path = option(Path("explained_failure"), "folder to write to")


def explain(options: ExplainOptions) -> dict[str, Any]:
    """Explain a failure, write the page, and return the summary.

    Raises:
        UserError: if the game is not CoinRun, or there is no failure to explain.
    """
    store = ResultStore(options.output_dir, EXPLAINED)
    store.check_replaceable()
    config = options.check_game(game_of(options))
    policy = load_agent(options.agent_file, options.compute.device)
    case = find_failure(policy, config, options)
    print(f"level {case.level_seed}: failure by {case.cause} at step {case.last}", flush=True)
    with contextlib.closing(DecisionStudy(policy, options.compute, config, options)) as study:
        explanation = explanation_of(study, case, policy, config, options)
    with store.replace({**options.settings(config), "level_seed": case.level_seed}) as folder:
        explanation.write(folder, agent_title(options.agent_file))
    print(f"{explanation.answer}\nwrote {options.output_dir / 'index.html'}")
    return explanation.summary


def game_of(options: ExplainOptions) -> EnvConfig:
    """Return the game of the failure: that of the recording, or unseen levels of the agent's game.

    Raises:
        UserError: if options contradict each other, or the recording is one of another agent.
    """
    if options.data_dir is None:
        if options.episode is not None:
            raise UserError("--episode counts the episodes of a recording; give --data_dir")
        config = options.env_config(options.agent_file)
        return config if options.level_seed is not None else config.unseen_levels()
    if options.level_seed is not None:
        raise UserError("give either --level_seed or --data_dir")
    folder = RolloutFolder(options.data_dir)
    folder.check_agent(options.agent_file)
    return recorded_game(folder)


def find_failure(policy: Policy, config: EnvConfig, options: ExplainOptions) -> Case:
    """Return the failure that the options name.

    Raises:
        UserError: if the agent does not fail.
    """
    if options.data_dir is not None:
        found = recorded_failures(policy, config, options)
        message = (f"episode {options.episode} of {options.data_dir} is no failure" if
                   options.episode is not None else f"no episode of {options.data_dir} failed")
    elif options.level_seed is not None:
        found = played_failures(policy, config, [options.level_seed] * TRIES, options)
        message = f"the agent does not fail in {TRIES} episodes on level {options.level_seed}"
    else:
        levels = config.draw_levels(TRIES * TRIES, options.seed)
        found = (case for begin in range(0, len(levels), TRIES) for case in played_failures(
            policy, config, levels[begin:begin + TRIES], options))
        message = f"the agent does not fail on any of {len(levels)} levels"
    case = next(found, None)
    if case is None:
        raise UserError(f"{message} within {MAX_STEPS} steps")
    return case


def played_failures(policy: Policy, config: EnvConfig, levels: Sequence[int],
                    options: ExplainOptions, actions: Sequence[int] = ()) -> Iterator[Case]:
    """Play levels, and yield the failures in their order.

    Args:
        actions: actions that replace the agent's.
    """
    testbed = Testbed(policy, options.compute, config, levels, options.seed, options.num_envs,
                      options=PlayOptions(keep_frames=False, max_steps=MAX_STEPS), causes=True)
    episodes = testbed.episodes(Condition("played", actions=actions))
    for episode in sorted(episodes, key=lambda episode: episode.number):
        if episode.end not in (SOLVED, UNFINISHED, TIMEOUT):
            yield Case.of(episode)


def recorded_failures(policy: Policy, config: EnvConfig, options: ExplainOptions
                      ) -> Iterator[Case]:
    """Yield the failures of a recording, or of the chosen episode."""
    assert options.data_dir is not None
    folder = RolloutFolder(options.data_dir)
    numbers = folder.index()["episode"].unique() if options.episode is None else [options.episode]
    for number in numbers:
        steps = folder.steps(number)
        if steps["reward"].sum() <= 0:
            yield from played_failures(policy, config, [int(steps["level_seed"].iloc[0])], options,
                                       steps["action"].tolist()[:-1])


def explanation_of(study: DecisionStudy, case: Case, policy: Policy, config: EnvConfig,
                   options: ExplainOptions) -> Explanation:
    """Measure everything about a failure."""
    moments = study.replay(case)
    states = study.measure(case, moments)
    chosen = point_of_no_return(states)
    step = chosen if chosen >= 0 else int(states["step"].min())
    start = recorded_start(policy, options.compute, config, case, step, step + 1)
    at_step = states[states["step"] == step]
    best, taken = (at_step[at_step[name] == 1].iloc[0] for name in ("best", "taken"))
    moment = moments[step]
    things, objects, free = _objects(study, case, moment, [*map(int, taken["actions"].split())])
    films = [_film(config, case, step, "happened", "What happened", case.actions)]
    if chosen >= 0 and OUTCOMES[1] in best["fresh"]:
        films.append(_film(
            config, case, step, "action", f"Another action: {action_label(best['actions'])}",
            study.actions_of_saved(case, moment.start, [plain_action(best["actions"])],
                                   best["fresh"])))
    if len(objects) and rate(objects["saved"].iloc[0]) > rate(free):
        without = dataclasses.replace(moment.start, state=things[0].to_bytes())
        films.append(_film(
            config, case, step, "object", f"Without {named(objects.iloc[0])}",
            study.actions_of_saved(case, without, [], objects["saved"].iloc[0]),
            without.state))
    imagined, note = None, "no simulator was given (--model_file)"
    if options.model_file is not None:
        imagined, note = _imagined(options, start, at_step["action"].tolist())
    return Explanation(case, states, step, decide(states, case), objects, free, start.frames[-1],
                       films, imagined, note)


def _objects(study: DecisionStudy, case: Case, moment: Moment, taken: list[int]
             ) -> tuple[list[LevelState], pd.DataFrame, str]:
    """Hide and remove each object in view of a state, and all objects of a kind.

    Args:
        taken: the action taken, and those with the same effect.

    Returns:
        The states without the objects of each row, and the table ``Explanation.objects``. The
        removal that saves most comes first; it is chosen on few continuations and measured on fresh
        ones. And the outcomes of fresh continuations of the state as it is.
    """
    state, rows = LevelState.parse(moment.start.state), []
    [free] = study.outcomes(case, [(moment.start, [])], study.fresh)
    for kind in objects_of(state.game):
        if kind.is_player or kind.name in GROUND:
            continue
        singles = single_objects(state, kind)
        rows += [(kind.name.split("_")[0], *_offset(state, thing), 1, thing.undrawn_in(state),
                  thing.removed_from(state)) for thing in singles]
        if len(singles) > 1:
            nearest = min((_offset(state, thing) for thing in singles),
                          key=lambda place: np.hypot(*place))
            rows.append((kind.name.split("_")[0], *nearest, len(singles), undrawn(state, kind),
                         removed(state, kind)))
    if not rows:
        return [], pd.DataFrame(columns=list(OBJECT)), free
    table = pd.DataFrame(rows, columns=["kind", "right", "up", "number", "hidden", "without"])
    output = study.see(moment, table["hidden"])
    table["action"] = output.log_probs.exp()[:, taken].sum(dim=1).float().cpu()
    table["value"] = output.values.float().cpu()
    starts: list[tuple[EpisodeState, list[int]]] = [
        (dataclasses.replace(moment.start, state=without.to_bytes()), [])
        for without in table["without"]]
    table["saved"] = study.outcomes(case, starts, study.tried)
    table = table.assign(
        rate=table["saved"].map(rate), distance=np.hypot(table["right"], table["up"])).sort_values(
        ["rate", "number", "distance"], ascending=[False, True, True])
    first = table.index[0]
    [table.loc[first, "saved"]] = study.outcomes(case, [starts[first]], study.fresh)
    return [*table["without"]], table[list(OBJECT)].reset_index(drop=True), free


def _offset(state: LevelState, thing: SingleObject) -> tuple[float, float]:
    """Return how far an object lies to the right of the player and above it, in squares; for
    cells, the nearest one counts."""
    player = state.player
    if thing.rank >= 0:
        entity = state.entities[np.isin(state.entities["type"], thing.kind.entity_types)][
            thing.rank]
        return float(entity["x"] - player["x"]), float(entity["y"] - player["y"])
    rows, columns = np.nonzero(thing.cells)
    right, up = columns + 0.5 - player["x"], rows + 0.5 - player["y"]
    nearest = np.hypot(right, up).argmin()
    return float(right[nearest]), float(up[nearest])


def _film(config: EnvConfig, case: Case, step: int, name: str, title: str,
          actions: Sequence[int], state: bytes | None = None) -> Film:
    """Play a version of the episode from LEAD steps before a step on.

    Args:
        actions: actions from that step on; for the episode as it was, all actions.
        state: state that replaces that of the step.
    """
    if name != "happened":
        actions = [*case.actions[:step], *actions]
    frames, end = [], "lives on"
    with contextlib.closing(LevelSlots(config, 1, True)) as slots:
        slots.start(0, case.level_seed)
        for number, action in enumerate(actions[:step + TAIL]):
            if number == step and state is not None:
                slots.restore(0, state)
            if number >= step - LEAD:
                picture = small_picture(slots.person_view(0), action)
                frames.append(framed(picture) if number == step else picture)
            if slots.step(0, action)[1]:
                end = "takes the coin" if slots.level_complete[0] else "dies"
                frames += [frames[-1] // 2] * 3
                break
    missing = max(LEAD + 12 - len(frames), 0)
    return Film(name, title, end, [*frames, *[frames[-1]] * missing])


def _imagined(options: ExplainOptions, start: RecordedStart, actions: Sequence[int]
              ) -> tuple[pd.DataFrame | None, str]:
    """Try actions in imagined worlds that continue the frame.

    Args:
        start: the state, with all frames of the episode up to it.

    Returns:
        A row per distinct action: ``action``, and ``lives``, see ``survival_of_actions``. Or None,
        and the reason.
    """
    assert options.model_file is not None
    simulator = open_simulator(options.model_file, options.agent_file, SimulatorConfig(),
                               options.compute)
    if simulator.squares is not None:
        check_prior(simulator)
    number = simulator.config.num_init_steps
    if len(start.frames) <= number:
        return None, (f"the simulator starts from {number} frames after the first one, but the "
                      f"step is {len(start.frames) - 1}")
    lives = survival_of_actions(
        simulator, options.compute, start._replace(frames=start.frames[-number:]), actions,
        num_worlds=NUM_WORLDS, num_steps=IMAGINED_STEPS, seed=options.seed)
    return pd.DataFrame({"action": actions, "lives": lives}), ""
