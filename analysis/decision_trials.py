"""Continuations of an agent from the states of an episode, for ``analysis/decisions.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from agents.acting import run_policy
from agents.episodes import (
    SOLVED,
    UNFINISHED,
    Episode,
    EpisodeState,
    PlayOptions,
    Run,
    play_episodes,
)
from agents.networks import Policy, PolicyOutput
from analysis.decision_results import (
    NOT_MEASURED,
    OUTCOMES,
    STATE,
    STRIDE,
    UNKNOWN,
    Case,
    point_of_no_return,
    rate,
)
from analysis.questions import QuestionOptions
from common.cli import whole
from common.devices import Compute
from common.errors import UserError
from common.game_constants import NUM_ACTIONS
from common.options import option
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
from generative.simulated_game import RecordedStart

WINDOW = 32  # states that may contain the decision
HORIZON = 64  # steps after which a continuation counts as saved
MAX_STEPS = 500  # longer episodes are left out
# Fields of a state that only store the last action; the next step overwrites them.
_LAST_ACTION = {"step": ("action",), "drawing": (
    "last_move_action", "move_action", "special_action", "action_vx", "action_vy", "action_vrot")}
_STREAMS = 10_000  # number of streams of random draws per state


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinuationOptions(QuestionOptions):
    """Options of continuations from states of an episode."""

    num_tried: int = option(8, "number of continuations per action on which the best action is "
                               "chosen", type=whole(1, 1000))
    num_fresh: int = option(32, "number of fresh continuations of the best action and of the "
                                "action taken", type=whole(1, 1000))

    def settings(self, config: EnvConfig) -> dict[str, Any]:
        return {**super().settings(config), "num_tried": self.num_tried,
                "num_fresh": self.num_fresh}


@dataclasses.dataclass(frozen=True)
class Moment:
    """A state of a case, with the policy (A,) and the value of the agent there."""

    start: EpisodeState
    probs: np.ndarray
    value: float


def recorded_start(policy: Policy, compute: Compute, config: EnvConfig, case: Case, step: int,
                   num_frames: int) -> RecordedStart:
    """Play an episode again up to a step, and return its state there, with the last frames."""
    [episode] = play_episodes(policy, compute, config, [Run(0, case.level_seed, case.actions)], 0,
                              1, PlayOptions(max_steps=step))
    return RecordedStart(episode.frames[step + 1 - num_frames:step + 1],
                         episode.hidden_states[step], case.actions[step - 1])


class DecisionStudy:
    """Continuations of an agent from states of its episodes.

    Args:
        policy: the agent that continues.
        options: numbers of continuations, and seed.
    """

    def __init__(self, policy: Policy, compute: Compute, config: EnvConfig,
                 options: ContinuationOptions):
        self._policy, self._compute, self._options = policy, compute, options
        self._hazards = hazards_of(config.env_name)
        self._game, self._view = RealGame(config, options.num_envs), StateView(config)

    def measure(self, case: Case, moments: Mapping[int, Moment] | None = None) -> pd.DataFrame:
        """Measure an episode.

        Args:
            moments: result of ``replay``, if it is known.

        Returns:
            A row per measured state and distinct action, with the columns of STATE.

        Raises:
            UserError: if the episode cannot be played again.
        """
        moments = self.replay(case) if moments is None else moments
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
            [table.loc[row, "removed"]] = self.outcomes(
                case, [(start, [int(table.loc[row, "action"])])], self.fresh)
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
        or, if no single object is responsible, the kinds that are the cause."""
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

    @torch.no_grad()
    def see(self, moment: Moment, states: Iterable[LevelState]) -> PolicyOutput:
        """Run the agent on the frames of other states, with the hidden state of a moment."""
        frames = np.stack([self._view.draw(state) for state in states])
        hidden = torch.from_numpy(moment.start.hidden).to(self._compute.device)
        return run_policy(self._policy, self._compute, frames, hidden.repeat(len(frames), 1))

    def close(self) -> None:
        """Free the environments."""
        self._game.close()
        self._view.close()

    @property
    def tried(self) -> range:
        """Streams of the continuations on which actions are chosen."""
        return range(self._options.num_tried)

    @property
    def fresh(self) -> range:
        """Streams of the continuations on which chosen actions are measured."""
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
        starts = [(moments[step].start, [int(action)])
                  for step, action in table[["step", "action"]].values]

        def play(rows: pd.Index, column: str, streams: range) -> None:
            if len(rows):
                table.loc[rows, column] = self.outcomes(case, [starts[row] for row in rows],
                                                        streams)

        play(taken := table.index[table["taken"] == 1], "tried", self.tried)
        is_perfect = table.loc[taken].set_index("step")["tried"].map(rate) == 1
        others = (table["taken"] == 0) & ~table["step"].map(is_perfect)
        play(table.index[others], "tried", self.tried)
        order = table.assign(rate=table["tried"].map(rate)).sort_values(
            ["step", "rate", "taken", "probability"], ascending=False)
        table.loc[order.index[~order["step"].duplicated()], "best"] = 1
        play(table.index[(table["best"] | table["taken"]) == 1], "fresh", self.fresh)
        return table[list(STATE)]

    def outcomes(self, case: Case, starts: Sequence[tuple[EpisodeState, Sequence[int]]],
                 streams: Sequence[int]) -> list[str]:
        """Continue from each state with some actions, once per stream of random draws.

        Returns:
            For each start, whether each continuation is saved, as a string of OUTCOMES.
        """
        saved = [OUTCOMES[episode.end in (SOLVED, UNFINISHED)]
                 for episode in self._continue(case, starts, streams)]
        return ["".join(saved[begin:begin + len(streams)])
                for begin in range(0, len(saved), len(streams))]

    def actions_of_saved(self, case: Case, start: EpisodeState, actions: Sequence[int],
                         outcomes: str) -> list[int]:
        """Return the actions of the first saved one of fresh continuations, which must exist."""
        [episode] = self._continue(case, [(start, actions)],
                                   [self.fresh[outcomes.index(OUTCOMES[1])]])
        return episode.actions[:-1].tolist()

    def _continue(self, case: Case, starts: Sequence[tuple[EpisodeState, Sequence[int]]],
                  streams: Sequence[int]) -> list[Episode]:
        """Continue from each state with some actions, once per stream of random draws."""
        runs = [Run(place * len(streams) + k, start, actions,
                    (case.number * MAX_STEPS + start.step) * _STREAMS + stream)
                for place, (start, actions) in enumerate(starts)
                for k, stream in enumerate(streams)]
        return sorted(play_episodes(
            self._policy, self._compute, self._game, runs, self._options.seed,
            self._options.num_envs, PlayOptions(keep_frames=False, keep_outputs=False,
                                                max_steps=HORIZON)),
            key=lambda episode: episode.number)

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
