"""Do the effects of worlds from ``generative.beyond`` occur in the real game?

The most plausible world of a view, its smallest change for an aim, and random worlds of about equal
plausibility are rebuilt in the level of the view. Objects that would touch the player are left out,
because the recorded agent is alive. The agent plays there with its most likely actions, from the
recorded state. An effect *occurs* if changed and plausible world differ there with the same sign
and at least half the size, by the same definition (``surroundings.effects``). A world that cannot
be rebuilt counts as a failure. The control is how often the same effect occurs in the random
worlds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import seed
from common.errors import UserError
from common.files import sha256, versions
from common.options import ComputeOptions, command, option
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table
from common.tables import markdown_table
from common.video import side_by_side, write_video
from envs.level_state import LevelState
from envs.procgen_env import EnvConfig
from generative.beyond_results import (
    BEYOND,
    CHANGED,
    CONTROL,
    PLAUSIBLE,
    TITLES,
    stored_worlds,
    with_measures,
)
from generative.config import SimulatorConfig
from generative.dataset import WindowPlace
from generative.rebuilding import Rebuilder
from generative.rebuilt_play import effect_at, occurs, play
from generative.runs import open_simulator
from generative.squares import World
from generative.surroundings import View, effects
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

VERIFIED = {"view": int, "level_seed": int, "aim": str, "imagined": float, "real": float,
            "real_at_step": float, "rebuilt": float, "occurs": float, "occurs_at_step": float,
            "control": float, "controls_rebuilt": float}
SUMMARY = {"aim": str, "quantity": str, "counterfactuals": int, "levels": int, "mean": float,
           "low_95": float, "high_95": float}
VERIFICATION = Schema("verified worlds beyond the view", "python -m generative.beyond_verification",
                      items={"view": Entry("views/{:0>5}.csv", Table(VERIFIED, exact=True)),
                             "film": Entry("films/view_{:0>5}.mp4", File())},
                      results={"table": Entry("verified.csv", Table(VERIFIED)),
                               "summary": Entry("summary.csv", Table(SUMMARY))})
ALL = "all"
_BATCH = 16  # worlds that are simulated at a time
_SCALE, _FRAMES_PER_SECOND = 4, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyBeyondOptions(ComputeOptions):
    """Rebuild the worlds of generative.beyond in the real game, and play there."""

    agent_file: Path = option(help="agent of the search")
    model_file: Path = option(help="simulator of the search")
    data_dir: Path = option(help="recording of the views")
    beyond_dir: Path = option(Path("beyond"), "folder of generative.beyond")
    as_read: bool = option(False, "also rebuild objects that would touch the player at the start")
    seed: int = option(0, "seed of the bootstrap", type=seed)
    output_dir: Path = option(Path("beyond_verification"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


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
    game = recorded_game(folder)
    rebuilder = Rebuilder(simulator, game)
    store = ResultStore(options.output_dir, VERIFICATION)
    store.open({"beyond": settings, "as_read": options.as_read, "seed": options.seed,
                "versions": versions()}, options.overwrite)
    numbers, tables = sorted(int(key) for key in found.keys("counterfactuals")), []
    for number in with_progress(iter(numbers), len(numbers), "view"):
        if not store.has("view", number):
            rows = with_measures(found.read("counterfactuals", number))
            rows, stored = rows[rows["is_effect"]], stored_worlds(found, number)
            table = pd.DataFrame(columns=list(VERIFIED))
            if len(rows):
                (episode, frame), seeds = rows[["episode", "frame"]].values[0], stored[0].seeds
                view = View.recorded(simulator, compute, folder, WindowPlace(episode, frame),
                                     int(seeds[0]), settings["num_steps"], _BATCH)
                [(_, state)] = level_states(folder, episode, [frame])
                table, films = verified(
                    view, rebuilder, game, state, rows, stored, options.as_read)
                with store.file("film", number) as path:
                    write_video(path, side_by_side(films, _SCALE), _FRAMES_PER_SECOND)
            store.write("view", number, value=table[list(VERIFIED)])
        tables.append(store.read("view", number))
    tables = [part for part in tables if len(part)]
    if not tables:
        raise UserError(f"no effect in {options.beyond_dir} is large enough to be verified; search "
                        "beyond more views")
    table = pd.concat(tables, ignore_index=True)
    summary = summarise(table, options.seed)
    store.write("table", value=table)
    store.write("summary", value=summary)
    store.finish()
    print("\n".join(markdown_table(("aim", "quantity", "mean", "counterfactuals"), [
        (TITLES.get(row.aim, row.aim), row.quantity,
         format_interval(row.mean, row.low_95, row.high_95, ".2f"), str(row.counterfactuals))
        for row in summary.itertuples()])))
    return summary


def verified(view: View, rebuilder: Rebuilder, game: EnvConfig, state: LevelState,
             rows: pd.DataFrame, stored: tuple[World, np.ndarray, np.ndarray], as_read: bool
             ) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """Rebuild the worlds of one view, and play there.

    Args:
        state: level state that the view shows.
        rows: counterfactuals of the view, from ``with_measures``.
        stored: see ``stored_worlds``.
        as_read: also build objects that touch the player.

    Returns:
        The table; and films, uint8 (T, rows, H, W, C), by title. They are black where a world
        cannot be rebuilt, and after the end of an episode.
    """
    worlds, kinds, aims = stored
    used = np.flatnonzero(np.isin(kinds, (PLAUSIBLE, CHANGED, CONTROL))
                          & np.isin(aims, ["", *rows["aim"]]))
    states = {}
    for number in used.tolist():
        with contextlib.suppress(UserError):
            states[number] = rebuilder.build(worlds[[number]], state, as_read).state
    place = {number: slot for slot, number in enumerate(states)}  # of a world among the played
    hidden = view.start.agent_hidden[0].cpu().numpy()
    played, frames = play(view.simulator.agent, view.compute, game,
                          list(states.values()) or [state], hidden, view.num_steps)

    def real(aim: str, step: int, number: int) -> tuple[float, float]:
        """Return the largest effect of a world and that at a step, NaN if it is not rebuilt."""
        if 0 not in place or number not in place:
            return np.nan, np.nan
        pair = played[[place[number]]], played[[place[0]]]
        return effects(aim, *pair)[0].item(), effect_at(aim, step, *pair).item()

    lines, changed = [], []
    for row in rows.itertuples():
        [number], controls = (np.flatnonzero((kinds == kind) & (aims == row.aim)).tolist()
                              for kind in (CHANGED, CONTROL))
        changed.append(number)
        largest, at_step = real(row.aim, row.step, number)
        others = [real(row.aim, row.step, control)[0] for control in controls]
        lines.append({
            "view": row.view, "level_seed": row.level_seed, "aim": row.aim,
            "imagined": row.effect, "real": largest, "real_at_step": at_step,
            "rebuilt": float(not np.isnan(largest)), "occurs": occurs(row.effect, largest),
            "occurs_at_step": occurs(row.effect, at_step),
            "control": np.mean([occurs(row.effect, other) for other in others]),
            "controls_rebuilt": np.mean(~np.isnan(others))})
    imagined, _, _ = view.films(worlds[[0, *changed]])
    black = np.zeros_like(frames[:, 0])
    films = [np.stack([frames[:, place[number]] if number in place else black
                       for number in numbers], axis=1) for numbers in ([0] * len(rows), changed)]
    return pd.DataFrame(lines), {
        "most plausible: imagined": imagined[:, [0] * len(rows)], "rebuilt": films[0],
        f"{', '.join(TITLES[aim] for aim in rows['aim'])}: imagined": imagined[:, 1:],
        "rebuilt ": films[1]}


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
        if aim != ALL and known["real"].nunique() > 2:
            rows.append((aim, "rank correlation", len(known), len(set(known["level_seed"])),
                         spearmanr(known["imagined"], known["real"]).statistic, np.nan, np.nan))
    return pd.DataFrame(rows, columns=list(SUMMARY))


main = command(VerifyBeyondOptions, verify)

if __name__ == "__main__":
    raise SystemExit(main())
