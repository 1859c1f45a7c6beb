"""Compare the agent's value with the returns that follow: is it optimistic, and where?

Every fourth recorded frame: the agent's value against the discounted return that follows in the
game. A value above the mean return is *optimistic*. From some frames, drawn at random, the agent
also plays on in worlds that the simulator's prior generates beyond the view; there, returns are
those of ``--num_steps`` actions, with the value of the last state, in the simulator and in the
game. In the simulator, the agent takes its most likely actions.

Values and returns are in the game's unit of reward, and intervals are over levels. Record without
action noise, because the value predicts the return of the agent's own actions. The same command
resumes a killed run.

Letters in shape comments: N frames, T steps, B worlds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from agents.agent_file import read_origin
from agents.replay import level_states, recorded_game
from agents.rollout_files import RolloutFolder
from common.cli import count
from common.errors import UserError
from common.options import command, option, redefine
from common.palette import BLUE, DARK_GREY, DPI, VERMILION
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table, with_minus
from envs.objects import GameObject, in_view, objects_of
from generative.dataset import RolloutDataset
from generative.recorded_views import RecordedView, ViewOptions
from generative.start_worlds import world_seeds
from generative.surroundings import Rollouts
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.report import format_interval

EVERY = 4  # frames
ALL, START, NOTHING = "all frames", "first frames", "none of them"
SHOWN = ("coin", "cheese", "saw", "enemy", "lava")  # kinds of object, by the first word of a name
BINS = 10  # groups of frames with similar values
FEW_LEVELS = 10
QUANTITIES = {
    "value": "value", "return": "return that follows in the game",
    "optimism": "value minus this return",
    "explained": "share of the variance of returns that the value explains (a constant: 0)",
    "steps": "return of {} actions and value after them, in the game",
    "imagined": "the same, in the simulator (mean of {} worlds)",
    "spread": "standard deviation of the imagined returns over the worlds",
    "missing": "return of {} actions, in the game minus in the simulator",
    "gap": "value minus return of {} actions, in the game",
    "imagined_gap": "value minus return of {} actions, in the simulator"}
# Quantities that are measured where there are simulations.
_SIMULATED = ("steps", "imagined", "spread", "missing", "gap", "imagined_gap")
_WORLDS, _FRAMES = 31, 32  # random streams; parts of seeds
FRAMES = {"level_seed": int, "episode": int, "frame": int, "value": float, "return": float,
          "steps": float, "shown": str}
VIEW = {"view": int, "level_seed": int, "episode": int, "frame": int, "imagined": float,
        "spread": float}
SUMMARY = {"shown": str, "quantity": str, "frames": int, "levels": int, "mean": float,
           "low_95": float, "high_95": float}
EXPECTED = Schema(
    "expected returns", "python -m analysis.expected_returns",
    items={"frames": Entry("frames.csv", Table(FRAMES, exact=True)),
           "view": Entry("views/{:0>5}.csv", Table(VIEW, exact=True))},
    results={"summary": Entry("summary.csv", Table(SUMMARY)),
             "report": Entry("report.md", Text()), "figure": Entry("expected_returns.png", File())},
    informative=("versions", "agent_file", "model_file", "data_dir"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedOptions(ViewOptions):
    """Compare the agent's value with the returns that follow, in the game and in the simulator."""

    num_views: int = redefine(ViewOptions, "num_views", default=200,
                              help="recorded frames from which the agent also plays on in worlds")
    num_steps: int = redefine(ViewOptions, "num_steps", help="actions that are simulated")
    num_worlds: int = option(16, "worlds that are generated beyond each of these frames",
                             type=count)
    output_dir: Path = option(Path("expected_returns"), "folder to write to")

    def places(self, dataset: RolloutDataset) -> list[RecordedView]:
        """Draw from all frames that are compared, so that longer episodes have more."""
        every = [RecordedView(episode, frame, False) for episode in dataset.folder.finished()
                 for frame in compared(dataset.folder, episode)
                 if frame >= dataset.num_init_steps - 1]
        if len(every) < self.num_views:
            raise UserError(f"{dataset.folder.path} has only {len(every)} frames to begin in; "
                            "lower --num_views or record more episodes")
        rng = np.random.default_rng([self.seed, _FRAMES])
        return [every[i] for i in rng.choice(len(every), self.num_views, replace=False)]


def expected_returns(options: ExpectedOptions) -> pd.DataFrame:
    """Measure values and returns, and return the summary.

    Raises:
        UserError: if the agent's discount or reward scale is unknown; see also
            ``ViewOptions.open_views``.
    """
    views, origin = options.open_views(), read_origin(options.agent_file)
    gamma, scale = origin.gamma, origin.reward_scale
    if gamma is None or scale is None:
        raise UserError(f"{options.agent_file} does not tell the discount and the reward scale of "
                        "the training; write them with agents.import_policy")
    store, folder = ResultStore(options.output_dir, EXPECTED), views.dataset.folder
    settings = {**views.settings, "num_worlds": options.num_worlds}
    store.open(settings, options.overwrite)
    frames = store.compute("frames", function=lambda: recorded_returns(
        folder, gamma, scale, options.num_steps))
    reward = max(folder.steps(episode)["reward"].max() for episode in folder.finished())
    for number in with_progress(range(len(views.places)), len(views.places), "view"):
        if not store.has("view", number):
            view = views.view(number, _WORLDS)
            seeds = world_seeds([(options.seed, _WORLDS, number, world)
                                 for world in range(options.num_worlds)])
            returns = imagined_returns(view.simulate(view.worlds(view.noise(seeds))), reward, gamma,
                                       scale)
            store.write("view", number, value=pd.DataFrame([{
                **views.origin(number), "imagined": returns.mean(), "spread": returns.std()}])[
                    list(VIEW)])
    imagined = pd.concat([store.read("view", number) for number in range(len(views.places))])
    table = frames.merge(imagined, how="left", on=["level_seed", "episode", "frame"])
    summary = summarise(table, options.seed)
    store.write("summary", value=summary)
    store.write("report", value=report(table, summary, settings))
    with store.file("figure") as path:
        draw(path, table, summary, options)
    store.finish()
    print(answer(summary))
    return summary


def compared(folder: RolloutFolder, episode: int) -> range:
    """Return the rows of an episode whose values are compared; the last row shows no level."""
    return range(0, len(folder.steps(episode)) - 1, EVERY)


def recorded_returns(folder: RolloutFolder, gamma: float, scale: float, num_steps: int
                     ) -> pd.DataFrame:
    """Return values, returns, and what is in view, in the frames that are compared.

    Args:
        gamma, scale: discount and reward scale of the agent's training.
        num_steps: actions of the returns in the column ``steps``, which include the value of the
            last state unless the episode has ended.
    """
    kinds = [kind for kind in objects_of(recorded_game(folder).env_name) if word_of(kind) in SHOWN]
    tables = []
    for episode in with_progress(iter(folder.finished()), len(folder.finished()), "episode"):
        steps, rows = folder.steps(episode), compared(folder, episode)
        rewards, values = steps["reward"].to_numpy(), steps["value"].to_numpy() / scale
        shown = {row: " ".join(sorted({word_of(kind) for kind in kinds if in_view(state, kind)}))
                 for row, state in level_states(folder, episode, rows)}
        after = [values[row + num_steps] if row + num_steps < len(rewards) - 1 else 0.0
                 for row in rows]
        tables.append(pd.DataFrame({
            "level_seed": steps["level_seed"].iloc[0], "episode": episode, "frame": rows,
            "value": values[rows], "return": [discounted(rewards[row + 1:], gamma) for row in rows],
            "steps": [discounted([*rewards[row + 1:][:num_steps], last], gamma)
                      for row, last in zip(rows, after)],
            "shown": [shown[row] or NOTHING for row in rows]}))
    return pd.concat(tables, ignore_index=True)


def word_of(kind: GameObject) -> str:
    """Return the first word of the name of a kind: enemies that look left and right are one."""
    return kind.name.partition("_")[0]


def discounted(rewards: Sequence[float] | np.ndarray, gamma: float) -> float:
    """Return the discounted sum of rewards, of which the first is not discounted."""
    return float(np.sum(rewards * gamma ** np.arange(len(rewards))))


def imagined_returns(rollouts: Rollouts, reward: float, gamma: float, scale: float) -> np.ndarray:
    """Return the returns in B simulations (B,), with the values of their last states.

    Args:
        reward: reward at an end that is no death.
        gamma, scale: see ``recorded_returns``.
    """
    solved = np.clip(1 - rollouts.alive - rollouts.death, 0, None)  # until each step (T, B)
    discounts = gamma ** np.arange(len(solved))[:, None]
    gains = reward * (discounts[:-1] * np.diff(solved, axis=0)).sum(axis=0)
    return gains + discounts[-1] * rollouts.alive[-1] * rollouts.values[-1] / scale


def summarise(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return means of the quantities with intervals over levels, by what is in view.

    Args:
        table: ``recorded_returns``, with the columns of ``VIEW`` where there are simulations.
    """
    measures = table.assign(
        optimism=table["value"] - table["return"], gap=table["value"] - table["steps"],
        imagined_gap=table["value"] - table["imagined"],
        missing=table["steps"] - table["imagined"])
    rows = []
    for shown in (ALL, START, *SHOWN, NOTHING):
        here = measures[[shown in (ALL, words, *words.split()) or (shown == START and frame == 0)
                         for words, frame in zip(measures["shown"], measures["frame"])]]
        for quantity in QUANTITIES:
            of = here[here["imagined"].notna()] if quantity in _SIMULATED else here
            if of["level_seed"].nunique() < 2:
                continue
            bootstrap = ClusterBootstrap(of["level_seed"].to_numpy(), seed)
            if quantity == "explained":
                mean, (low, high) = explained(of, bootstrap)
            else:
                values = of[quantity].to_numpy()
                mean, (low, high) = values.mean(), bootstrap.interval(values[None])[:, 0]
            rows.append({"shown": shown, "quantity": quantity, "frames": len(of),
                         "levels": of["level_seed"].nunique(), "mean": mean, "low_95": low,
                         "high_95": high})
    return pd.DataFrame(rows)


def explained(table: pd.DataFrame, bootstrap: ClusterBootstrap) -> tuple[float, np.ndarray]:
    """Return 1 - var(return - value) / var(return), and its interval (2,); NaN if all returns are
    equal."""
    returns, errors = table["return"], table["return"] - table["value"]
    sums = by_episode(table["level_seed"].to_numpy(), np.stack([
        np.ones(len(table)), returns, returns**2, errors, errors**2]))  # (levels, 5)

    def share(draws: np.ndarray) -> np.ndarray:
        number, first, second, error, squared = (draws @ sums).T
        variance = second / number - (first / number)**2
        rest = squared / number - (error / number)**2
        return np.where(variance > 1e-9, 1 - rest / np.maximum(variance, 1e-9), np.nan)
    return float(share(np.ones((1, len(sums))))[0]), bootstrap.interval_of(share)


def answer(summary: pd.DataFrame) -> str:
    """Return the answer in a sentence."""
    def of(shown: str, quantity: str) -> pd.Series | None:
        rows = summary[(summary["shown"] == shown) & (summary["quantity"] == quantity)]
        return rows.iloc[0] if len(rows) else None

    def interval(row: pd.Series) -> str:
        return format_interval(row["mean"], row["low_95"], row["high_95"], "+.2f")

    whole, start = of(ALL, "optimism"), of(START, "optimism")
    assert whole is not None and start is not None
    few = " (too few levels to tell)" if whole["levels"] < FEW_LEVELS else ""
    verdict = ("optimistic" if whole["low_95"] > 0 else "pessimistic" if whole["high_95"] < 0 else
               "neither optimistic nor pessimistic")
    parts = [f"{shown} {interval(row)}" for shown in (*SHOWN, NOTHING)
             if (row := of(shown, "optimism")) is not None]
    return (f"On average, the agent is {verdict}: its value minus the return that follows is "
            f"{interval(whole)}{few}; in first frames, {interval(start)}. By what is in view: "
            f"{'; '.join(parts)}.")


def report(table: pd.DataFrame, summary: pd.DataFrame, settings: dict) -> str:
    """Format the report."""
    lines = ["# What future does the agent expect?", "",
             f"{len(table)} frames of {table['level_seed'].nunique()} levels; "
             f"{table['imagined'].notna().sum()} of them with {settings['num_worlds']} worlds that "
             "are generated beyond the view. In the game's unit of reward; intervals over levels.",
             "", answer(summary)]
    if settings["why_perhaps_trained_on"]:
        lines += ["", "The simulator may have been trained on these levels: "
                      f"{settings['why_perhaps_trained_on']}."]
    for shown, rows in summary.groupby("shown", sort=False):
        title = shown.capitalize() if shown in (ALL, START) else f"In view: {shown}"
        lines += ["", f"## {title}", "", *markdown_table(
            ("quantity", "mean", "frames", "levels"), [
                (QUANTITIES[row.quantity].format(settings[
                    "num_worlds" if row.quantity == "imagined" else "num_steps"]),
                 format_interval(row.mean, row.low_95, row.high_95, ".2f"), str(row.frames),
                 str(row.levels)) for row in rows.itertuples()])]
    return "\n".join([*lines, ""])


def draw(path: Path, table: pd.DataFrame, summary: pd.DataFrame, options: ExpectedOptions) -> None:
    """Draw returns against values, and the differences by what is in view."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    groups = pd.qcut(table["value"], BINS, labels=False, duplicates="drop")
    for _, part in table.groupby(groups):
        low, high = ClusterBootstrap(part["level_seed"].to_numpy(), options.seed).interval(
            part["return"].to_numpy()[None])[:, 0]
        left.plot([part["value"].mean()] * 2, [low, high], color=BLUE)
        left.plot(part["value"].mean(), part["return"].mean(), "o", color=BLUE)
    ends = [table["value"].min(), table["value"].max()]
    left.plot(ends, ends, color=DARK_GREY, linestyle=":", label="return = value")
    left.set(xlabel="value (tenths of the frames)", ylabel="mean return that follows",
             title="Does the value predict the return?")
    left.legend()
    names = [name for name in (ALL, START, *SHOWN, NOTHING) if name in set(summary["shown"])]
    for place, (quantity, colour, label) in enumerate((
            ("optimism", BLUE, "to the end, in the game"),
            ("gap", DARK_GREY, f"{options.num_steps} actions, in the game"),
            ("imagined_gap", VERMILION, f"{options.num_steps} actions, in the simulator"))):
        rows = summary[summary["quantity"] == quantity].set_index("shown")
        for height, name in enumerate(names):
            if name in rows.index:
                row, y = rows.loc[name], height + 0.22 * (place - 1)
                right.plot([row["low_95"], row["high_95"]], [y, y], color=colour)
                right.plot(row["mean"], y, "o", color=colour,
                           label=label if name == ALL else None)
    right.axvline(0, color=DARK_GREY, linestyle=":")
    right.set(yticks=range(len(names)), yticklabels=names,
              xlabel="value minus return: pessimistic < 0 < optimistic",
              title="Where is the agent optimistic?")
    right.invert_yaxis()
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    optimism = summary[(summary["shown"] == ALL) & (summary["quantity"] == "optimism")]
    for row in optimism.itertuples():
        figure.suptitle(with_minus("Value minus the return that follows, on average: "
                                   + format_interval(row.mean, row.low_95, row.high_95, "+.2f")))
    figure.savefig(path, dpi=DPI)


main = command(ExpectedOptions, expected_returns)

if __name__ == "__main__":
    raise SystemExit(main())
