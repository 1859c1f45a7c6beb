"""Do the effects of worlds from ``generative.beyond`` occur in the real game?

The most plausible world of a view, its smallest change for an aim, and random worlds of about equal
plausibility are rebuilt in the level of the view. The agent plays there with its most likely
actions, from the recorded state. An effect *occurs* if changed and plausible world differ there
with the same sign and at least half the size, by the same definition (``surroundings.effects``). A
world that cannot be rebuilt counts as a failure. The control is how often the same effect occurs in
the random worlds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr

from agents.networks import to_images
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import seed
from common.devices import Compute
from common.errors import UserError
from common.files import sha256, versions
from common.game_constants import ACTION_DIRECTIONS, FRAME_SIZE, square_size
from common.options import ComputeOptions, command, option
from common.progress import with_progress
from common.results import Entry, ResultStore, Schema, Table
from common.tables import markdown_table
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig, LevelSlots
from generative.beyond import BEYOND, CHANGED, CONTROL, PLAUSIBLE, stored_worlds
from generative.beyond_report import TITLES, with_measures
from generative.config import SimulatorConfig
from generative.frozen_agent import FrozenAgent
from generative.rebuilding import Rebuilder
from generative.runs import open_simulator
from generative.squares import World
from generative.surroundings import DEATH, OCCURS, TURN, TURN_STEPS, Rollouts, effects
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

VERIFIED = {"view": int, "level_seed": int, "aim": str, "imagined": float, "real": float,
            "real_at_step": float, "rebuilt": float, "occurs": float, "occurs_at_step": float,
            "control": float, "controls_rebuilt": float}
SUMMARY = {"aim": str, "quantity": str, "counterfactuals": int, "levels": int, "mean": float,
           "low_95": float, "high_95": float}
VERIFICATION = Schema("verified worlds beyond the view", "python -m generative.beyond_verification",
                      items={"view": Entry("views/{:0>5}.csv", Table(VERIFIED, exact=True))},
                      results={"table": Entry("verified.csv", Table(VERIFIED)),
                               "summary": Entry("summary.csv", Table(SUMMARY))})
ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyBeyondOptions(ComputeOptions):
    """Rebuild the worlds of generative.beyond in the real game, and play there."""

    agent_file: Path = option(help="agent of the search")
    model_file: Path = option(help="simulator of the search")
    data_dir: Path = option(help="recording of the views")
    beyond_dir: Path = option(Path("beyond"), "folder of generative.beyond")
    seed: int = option(0, "seed of the bootstrap", type=seed)
    output_dir: Path = option(Path("beyond_verification"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def play(agent: FrozenAgent, compute: Compute, config: EnvConfig, states: Sequence[LevelState],
         hidden: np.ndarray, num_steps: int) -> Rollouts:
    """Play the agent's most likely actions in level states.

    Args:
        states: level states (B), whose frame is step 0.
        hidden: hidden state that enters the agent there (D,).
        num_steps: number of actions.

    Returns:
        What the agent does; ``moved`` is in squares, y up, and NaN after the end.
    """
    directions = np.array([right for right, _ in ACTION_DIRECTIONS], float)
    shape = num_steps + 1, len(states)
    values, right, moved = np.zeros(shape), np.zeros(shape), np.full((*shape, 2), np.nan)
    alive, death = np.ones(shape), np.zeros(shape)
    state = torch.from_numpy(hidden).to(compute.device).expand(len(states), -1)
    with contextlib.closing(LevelSlots(config, len(states))) as slots, torch.no_grad():
        for slot, level in enumerate(states):
            slots.restore(slot, level.to_bytes())
        for t in range(num_steps + 1):
            images = to_images(torch.from_numpy(slots.frames.copy()).to(compute.device),
                               compute.channels_last)
            with compute.autocast():
                output = agent.step(images, state)
            state, log_probs = output.hidden_states, output.log_probs.float().cpu().numpy()
            values[t] = output.values.float().cpu().numpy()
            right[t] = np.exp(log_probs[:, :len(directions)]) @ directions
            for slot in np.flatnonzero(alive[t]):
                player = slots.player(slot)
                assert player is not None
                moved[t, slot] = player["x"], player["y"]
                if t < num_steps:
                    reward, ended = slots.step(slot, int(log_probs[slot].argmax()))
                    alive[t + 1:, slot] = not ended
                    death[t + 1:, slot] = ended and reward <= 0
    return Rollouts(values, right, alive, death, moved)


def occurs(imagined: float, real: float) -> float:
    """Return 1.0 if a real effect has the sign and at least half the size of an imagined one, and
    otherwise, or if it is NaN, 0.0."""
    return float(real * np.sign(imagined) >= OCCURS * abs(imagined))


def effect_at(aim: str, step: int, changed: Rollouts, plausible: Rollouts) -> np.ndarray:
    """Return the effects (B,) that ``effects`` would return if they were largest at a step."""
    if aim == DEATH:
        return effects(aim, changed, plausible)[0]
    last = step + (TURN_STEPS if aim == TURN else 1)
    return effects(aim, *(Rollouts(*(array[step:last] for array in vars(found).values()))
                          for found in (changed, plausible)))[0]


def verify(options: VerifyBeyondOptions) -> pd.DataFrame:
    """Verify all counterfactuals with an effect, and return the summary.

    Raises:
        UserError: if the folder of the search is of another agent, simulator or recording.
    """
    found = ResultStore(options.beyond_dir, BEYOND)
    settings = found.settings("model_sha256", "num_steps", "recording_sha256")
    compute, folder = options.compute, RolloutFolder(options.data_dir)
    if (settings["model_sha256"] != sha256(options.model_file)
            or settings["recording_sha256"] != folder.sha256()):
        raise UserError(f"{options.beyond_dir} was written with another simulator or recording")
    simulator = open_simulator(options.model_file, options.agent_file, SimulatorConfig(), compute)
    folder.check_agent(options.agent_file)
    rebuilder = Rebuilder(simulator, recorded_game(folder))
    store = ResultStore(options.output_dir, VERIFICATION)
    store.open({"beyond": settings, "seed": options.seed, "versions": versions()},
               options.overwrite)
    numbers, tables = sorted(int(key) for key in found.keys("counterfactuals")), []
    for number in with_progress(iter(numbers), len(numbers), "view"):
        if not store.has("view", number):
            rows = with_measures(found.read("counterfactuals", number))
            rows = rows[rows["is_effect"]]
            store.write("view", number, value=verified(
                rebuilder, simulator.agent, compute, folder, rows, stored_worlds(found, number),
                settings["num_steps"])[list(VERIFIED)])
        tables.append(store.read("view", number))
    table = pd.concat([part for part in tables if len(part)], ignore_index=True)
    summary = summarise(table, options.seed)
    store.write("table", value=table)
    store.write("summary", value=summary)
    store.finish()
    print("\n".join(markdown_table(("aim", "quantity", "mean", "counterfactuals"), [
        (TITLES.get(row.aim, row.aim), row.quantity,
         format_interval(row.mean, row.low_95, row.high_95, ".2f"), str(row.counterfactuals))
        for row in summary.itertuples()])))
    return summary


def aligned(world: World, state: LevelState, pixels_per_square: float) -> World:
    """Shift a world (1 row) by a whole square where the simulator believes that the player is on
    the other side of a border between squares, so that its middle square contains the player."""
    num = world.squares.shape[1]
    believed = (FRAME_SIZE / 2 - world.corner[0].cpu().numpy()) / pixels_per_square - num // 2
    true = np.array([state.player["x"], -state.player["y"]], float)  # to the right and down
    error = (believed - true + 0.5) % 1 - 0.5
    shift = (np.floor(true + error) - np.floor(true)).astype(int)
    return dataclasses.replace(world, **{
        name: getattr(world, name).roll((shift[1], shift[0]), dims=(1, 2))
        for name in ("squares", "places", "velocities", "looks")})


def verified(rebuilder: Rebuilder, agent: FrozenAgent, compute: Compute, folder: RolloutFolder,
             rows: pd.DataFrame, stored: tuple[World, np.ndarray, np.ndarray], num_steps: int
             ) -> pd.DataFrame:
    """Rebuild the worlds of one view, and play there.

    Args:
        rows: counterfactuals of the view, from ``with_measures``.
        stored: see ``stored_worlds``.
    """
    if not len(rows):
        return pd.DataFrame(columns=list(VERIFIED))
    (worlds, kinds, aims), (episode, frame) = stored, rows[["episode", "frame"]].iloc[0].tolist()
    [(_, state)] = level_states(folder, episode, [frame])
    hidden = folder.array_files(episode).hidden_states.rows(frame, frame + 1)[0]
    used = np.flatnonzero(np.isin(kinds, (PLAUSIBLE, CHANGED, CONTROL))
                          & np.isin(aims, ["", *rows["aim"]]))
    game = recorded_game(folder)
    states, size = {}, square_size(game.env_name, game.distribution_mode)
    assert size is not None
    for number in used.tolist():
        with contextlib.suppress(UserError):
            states[number] = rebuilder.build(aligned(worlds[[number]], state, size), state).state
    played = None
    if 0 in states:
        played = play(agent, compute, game, list(states.values()), hidden, num_steps)
    place = {number: slot for slot, number in enumerate(states)}  # of a world in ``played``

    def real(aim: str, step: int, number: int) -> tuple[float, float]:
        """Return the largest effect of a world and that at a step, NaN if it is not rebuilt."""
        if played is None or number not in place:
            return np.nan, np.nan
        pair = played[[place[number]]], played[[place[0]]]
        return effects(aim, *pair)[0].item(), effect_at(aim, step, *pair).item()

    lines = []
    for row in rows.itertuples():
        [changed], controls = (np.flatnonzero((kinds == kind) & (aims == row.aim)).tolist()
                               for kind in (CHANGED, CONTROL))
        largest, at_step = real(row.aim, row.step, changed)
        others = [real(row.aim, row.step, number)[0] for number in controls]
        lines.append({
            "view": row.view, "level_seed": row.level_seed, "aim": row.aim,
            "imagined": row.effect, "real": largest, "real_at_step": at_step,
            "rebuilt": float(not np.isnan(largest)), "occurs": occurs(row.effect, largest),
            "occurs_at_step": occurs(row.effect, at_step),
            "control": np.mean([occurs(row.effect, other) for other in others]),
            "controls_rebuilt": np.mean(~np.isnan(others))})
    return pd.DataFrame(lines)


def summarise(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the shares of effects that occur, for each aim and all, with 95 % intervals over
    levels; and the rank correlation of imagined and real effects."""
    table = table.assign(difference=table["occurs"] - table["control"])
    rows = []
    for aim, part in (*table.groupby("aim", sort=False), (ALL, table)):
        levels = part["level_seed"].to_numpy()
        for name in ("rebuilt", "controls_rebuilt", "occurs", "control", "difference",
                     "occurs_at_step"):
            values = part[name].to_numpy(float)
            low, high = ClusterBootstrap(levels, seed).interval(values[None])[:, 0]
            rows.append((aim, name, len(part), len(set(levels)), values.mean(), low, high))
        known = part.dropna(subset=["real"])
        if aim != ALL and len(known) > 2:
            rows.append((aim, "rank correlation", len(known), len(set(known["level_seed"])),
                         spearmanr(known["imagined"], known["real"]).statistic, np.nan, np.nan))
    return pd.DataFrame(rows, columns=list(SUMMARY))


main = command(VerifyBeyondOptions, verify)

if __name__ == "__main__":
    raise SystemExit(main())
