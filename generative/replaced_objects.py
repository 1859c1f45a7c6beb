"""Does the effect of a replaced object occur in the real game?

In recorded views, an object is replaced by what the prior generates in its place
(``generative.filling``). The simulator predicts what this changes for the agent, which plays with
its most likely actions. Both worlds, with and without the change, are rebuilt in the level of the
view, and the agent plays there from the recorded state. An effect *occurs* if it has the same sign
and at least half the size in the game; a world that cannot be rebuilt counts as a failure.

The control is how often the same effect occurs if a random part of the view of the same shape is
filled instead, where a filling that differs was found. ``rebuilding`` is the effect of rebuilding
alone: the unchanged world, rebuilt, against the recorded level.

The same command resumes a killed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import ndimage

from agents.replay import level_states, recorded_game
from common.cli import count, whole
from common.errors import UserError
from common.files import versions
from common.game_constants import FRAME_SIZE
from common.options import command, option
from common.palette import BLUE, DARK_GREY, DPI, VERMILION
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table
from common.video import side_by_side, write_video
from envs.level_state import LevelState
from generative.beyond_report import UNITS
from generative.beyond_results import LEAST, TITLES
from generative.dataset import RolloutDataset
from generative.filling import fill, filled_start
from generative.flags import SimulatorOptions
from generative.rebuilding import Rebuilder
from generative.rebuilt_play import aligned, occurs, play, without_touching
from generative.recorded_views import RecordedView, choose_views
from generative.runs import leakage_reason
from generative.squares import World
from generative.start_worlds import check_prior, world_seeds
from generative.surroundings import AIMS, Rollouts, View, certain, effects
from generative.world_contents import name_classes, recorded_worlds
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

REPLACED = ("coin", "saw", "enemy_left", "enemy_right", "lava", "box")  # kinds of object
NUM_CONTROLS = 2
FEW_LEVELS = 10
ALL = "all"
QUANTITIES = {
    "size": "size of the effect in the simulator", "rebuilt": "both worlds are rebuilt",
    "occurs": "the effect occurs in the game",
    "control": "it occurs after a random change of the view", "difference": "occurs minus control",
    "by_rebuilding": "it occurs between the rebuilt and the recorded level (which differ beyond "
                     "the view)"}
_SCALE, _FRAMES_PER_SECOND = 3, 4
_TRIES, _CONTROL_TRIES = 8, 32  # fillings that are drawn until one differs from what was there
_PLAYER = 1.5  # squares from the player's centre within which nothing is replaced
_REPLACED, _PLACE = 21, 22  # random streams; parts of seeds
ROW = {"view": int, "episode": int, "frame": int, "level_seed": int, "near_end": bool,
       "kind": str, "num_squares": int, "filled_with": str, "aim": str, "effect": float,
       "step": int, "rebuilt": float, "real": float, "occurs": float,
       "control": float, "rebuilding": float}
SUMMARY = {"aim": str, "quantity": str, "counterfactuals": int, "levels": int, "mean": float,
           "low_95": float, "high_95": float}
REPLACEMENTS = Schema(
    "replaced objects", "python -m generative.replaced_objects",
    items={"view": Entry("views/{:0>5}.csv", Table(ROW, exact=True)),
           "film": Entry("films/view_{:0>5}.mp4", File())},
    results={"table": Entry("replaced.csv", Table(ROW)),
             "summary": Entry("summary.csv", Table(SUMMARY)),
             "report": Entry("report.md", Text()),
             "figure": Entry("effects.png", File())},
    informative=("versions", "agent_file", "model_file", "data_dir"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplacedOptions(SimulatorOptions):
    """Replace objects in recorded views by what the prior generates there, and verify the effects
    in the real game."""

    num_views: int = option(150, "recorded views, each of another episode", type=count)
    num_steps: int = option(16, "actions within which the effect must occur", type=whole(4, 64))
    unseen: bool = option(False, "state that the simulator was not trained on these levels, if "
                                 "this is unknown")
    output_dir: Path = option(Path("replaced_objects"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


class Replacements:
    """Replacements in the views of a recording.

    Args:
        classes: numbers of the classes of each kind of object.
    """

    def __init__(self, options: ReplacedOptions, dataset: RolloutDataset, rebuilder: Rebuilder,
                 simulator, classes: dict[str, np.ndarray]):
        self._options, self._dataset, self._rebuilder = options, dataset, rebuilder
        self._simulator, self._classes = simulator, classes
        self._game = recorded_game(dataset.folder)

    def measure(self, number: int, place: RecordedView
                ) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
        """Replace an object in a view.

        Returns:
            A row for each aim; no rows if nothing can be replaced there. And frames by title,
            uint8 (T, 1, H, W, C); none if no effect is large enough or a world is not rebuilt.
        """
        options, simulator, folder = self._options, self._simulator, self._dataset.folder
        compute = options.compute
        (seed,) = world_seeds([(options.seed, _REPLACED, number)]).tolist()
        view = View.recorded(simulator, compute, folder, place, seed, options.num_steps,
                             options.batch_size)
        num_init = simulator.config.num_init_steps
        frames = folder.array_files(place.episode).frames.rows(
            place.frame - num_init + 1, place.frame + 1)
        images = torch.from_numpy(frames).to(compute.device)[:, None].float() / 255
        with compute.autocast():
            vectors = simulator.encode(images).float()
        rng = np.random.default_rng([options.seed, _PLACE, number])
        world = certain(view.world)
        chosen = self._object(world, view, rng)
        if chosen is None:
            return pd.DataFrame(columns=list(ROW)), {}
        kind, hole = chosen

        def filled(draw: Callable[[], np.ndarray], tries: range) -> tuple[View, World] | None:
            """Draw holes until a filling differs, and return the view with its new start, and the
            world."""
            for attempt in tries:
                mask = draw()
                seeds = world_seeds([(options.seed, _REPLACED, number, attempt)])
                with compute.autocast():
                    new, changed = fill(simulator, images, vectors, view.world,
                                        torch.from_numpy(mask)[None], seeds)
                    start = filled_start(simulator, new.float(), changed, vectors)
                if (changed.squares[0].argmax(dim=-1)[mask] != world.squares[0][mask]).any():
                    start = dataclasses.replace(start, agent_hidden=view.start.agent_hidden,
                                                action=view.start.action)
                    return dataclasses.replace(view, start=start), certain(changed)
            return None

        first = filled(lambda: hole, range(_TRIES))
        if first is None:
            return pd.DataFrame(columns=list(ROW)), {}
        changed_view, changed = first
        base, found = view.simulate(world), changed_view.simulate(changed)
        worlds = [world, changed]
        for control in range(NUM_CONTROLS):
            first_try = _TRIES + _CONTROL_TRIES * control
            other = filled(lambda: self._moved(hole, view, rng),
                           range(first_try, first_try + _CONTROL_TRIES))
            if other is not None:
                worlds.append(other[1])
        real, shown = self._played(view, worlds, place)
        names = {int(name): kind for kind, numbers in self._classes.items() for name in numbers}
        with_what = sorted({names.get(int(name), "other") for name in np.unique(
            changed.squares[0].cpu().numpy()[hole])})
        rows = []
        for aim in AIMS:
            (effect,), (step,) = effects(aim, found, base)
            in_game = {number: effects(aim, played, real[0])[0].item()
                       for number, played in real.items() if number > 0 and 0 in real}
            controls = [occurs(effect, in_game.get(number, np.nan))
                        for number in range(2, len(worlds))]
            rows.append({
                "view": number,
                "level_seed": int(folder.steps(place.episode)["level_seed"].iloc[0]),
                **dataclasses.asdict(place), "kind": kind, "num_squares": int(hole.sum()),
                "filled_with": " ".join(with_what), "aim": aim, "effect": effect,
                "step": int(step), "rebuilt": float(1 in in_game),
                "real": in_game.get(1, np.nan), "occurs": occurs(effect, in_game.get(1, np.nan)),
                "control": np.mean(controls) if controls else np.nan,
                "rebuilding": effects(aim, real[0], real[-1])[0].item() if 0 in real else np.nan})
        table = pd.DataFrame(rows)[list(ROW)]
        films = {}
        if {0, 1} <= shown.keys() and is_effect(table).any():
            films = {"as it is, imagined": view.films(world)[0], "game": shown[0],
                     "replaced, imagined": changed_view.films(changed)[0], "game ": shown[1]}
        return table, films

    def _object(self, world: World, view: View, rng: np.random.Generator
                ) -> tuple[str, np.ndarray] | None:
        """Draw a kind in view, and return it and the squares of its nearest object, bool (n, n)."""
        squares = world.squares[0].cpu().numpy()
        places = self._places(view)  # (2, n)
        far = np.maximum(abs(places[1])[:, None], abs(places[0]))
        visible = (far < FRAME_SIZE / 2 - view.pixels_per_square / 2) & (
            far > _PLAYER * view.pixels_per_square)
        groups = [(kind, np.isin(squares, numbers) & visible)
                  for kind, numbers in self._classes.items() if kind in REPLACED]
        groups = [(kind, mask) for kind, mask in groups if mask.any()]
        if not groups:
            return None
        kind, mask = groups[rng.integers(len(groups))]
        labels, _ = ndimage.label(mask, np.ones((3, 3)))
        nearest = labels.ravel()[np.where(mask, far, np.inf).argmin()]
        return kind, labels == nearest

    def _places(self, view: View) -> np.ndarray:
        """Return the centres of columns and rows, in pixels from the middle of the view (2, n)."""
        num, size = view.world.squares.shape[1], view.pixels_per_square
        corner = view.world.corner[0].cpu().numpy()
        return corner[:, None] + size * (np.arange(num) + 0.5) - FRAME_SIZE / 2

    def _moved(self, hole: np.ndarray, view: View, rng: np.random.Generator) -> np.ndarray:
        """Move a hole to a random place in view that neither touches it nor the player."""
        places, size = self._places(view), view.pixels_per_square
        far = np.maximum(abs(places[1])[:, None], abs(places[0]))
        allowed = (far < FRAME_SIZE / 2 - size / 2) & (far > _PLAYER * size) & ~(
            ndimage.binary_dilation(hole, np.ones((3, 3))))
        rows, columns = np.nonzero(hole)
        for _ in range(200):
            down, right = rng.integers(-12, 13, 2)
            at = rows + down, columns + right
            if min(at[0].min(), at[1].min()) >= 0 and max(at[0].max(), at[1].max()) < len(
                    hole) and allowed[at].all():
                moved = np.zeros_like(hole)
                moved[at] = True
                return moved
        return allowed & (rng.random(hole.shape) < hole.sum() / max(allowed.sum(), 1))

    def _played(self, view: View, worlds: list[World], place: RecordedView
                ) -> tuple[dict[int, Rollouts], dict[int, np.ndarray]]:
        """Play in the game: in the worlds (W), and in the recorded level, which has the key -1.
        Worlds that cannot be rebuilt are left out; objects that would touch the player, too.

        Returns:
            What the agent does, and the frames, uint8 (T, 1, H, W, C), by number of the world.
        """
        folder, options = self._dataset.folder, self._options
        [(_, state)] = level_states(folder, place.episode, [place.frame])
        hidden = folder.array_files(place.episode).hidden_states.rows(
            place.frame, place.frame + 1)[0]
        states: dict[int, LevelState] = {-1: state}
        size = self._simulator.squares.pixels_per_square
        for number, world in enumerate(worlds):
            with contextlib.suppress(UserError):
                world = without_touching(view, aligned(world, state, size), state)
                states[number] = self._rebuilder.build(world, state).state
        played, frames = play(self._simulator.agent, options.compute, self._game,
                              list(states.values()), hidden, options.num_steps)
        return ({number: played[[slot]] for slot, number in enumerate(states)},
                {number: frames[:, [slot]] for slot, number in enumerate(states)})


def replace_objects(options: ReplacedOptions) -> pd.DataFrame:
    """Replace an object in each view, and return the summary.

    Raises:
        UserError: if simulator, agent and recording do not fit together.
    """
    simulator = options.open_simulator()
    squares = simulator.squares
    if squares is None:
        raise UserError("this simulator has no worlds, so nothing can be replaced in them")
    check_prior(simulator)
    dataset = RolloutDataset(Path(options.parameters.common.data_dir),
                             simulator.config.num_init_steps, options.num_steps)
    dataset.check_agent(options.agent_file, simulator.agent.policy)
    views = choose_views(dataset, options.num_views, options.seed)
    numbers = np.flatnonzero(np.isin(dataset.episodes_of(np.arange(len(dataset))),
                                     [view.episode for view in views]))
    store = ResultStore(options.output_dir, REPLACEMENTS)
    store.open({
        **options.origin, "data_dir": options.parameters.common.data_dir,
        "recording_sha256": dataset.folder.sha256(options.check_contents),
        "why_perhaps_trained_on": leakage_reason(options.model_file, dataset, numbers,
                                                 assured=options.unseen),
        "num_views": options.num_views, "num_steps": options.num_steps, "seed": options.seed,
        "precision": options.compute.precision, "versions": versions()}, options.overwrite)
    study = Replacements(options, dataset, Rebuilder(simulator, recorded_game(dataset.folder)),
                         simulator, name_classes(
                             dataset, recorded_worlds(simulator, dataset, numbers), squares))
    tables = []
    for number, place in enumerate(with_progress(iter(views), len(views), "view")):
        if not store.has("view", number):
            found, films = study.measure(number, place)
            if films:
                with store.file("film", number) as path:
                    write_video(path, side_by_side(films, _SCALE), _FRAMES_PER_SECOND)
            store.write("view", number, value=found)
        tables.append(store.read("view", number))
    table = pd.concat([part for part in tables if len(part)], ignore_index=True)
    summary = summarise(table, options.seed)
    store.write("table", value=table)
    store.write("summary", value=summary)
    store.write("report", value=report(table, summary))
    with store.file("figure") as path:
        plot(table).savefig(path, dpi=DPI, format="png")
    store.finish()
    print(headline(summary))
    return summary


def is_effect(table: pd.DataFrame) -> pd.Series:
    """Return whether the imagined effects are large enough to count."""
    return table["effect"].abs() >= table["aim"].map(LEAST)


def headline(summary: pd.DataFrame) -> str:
    """Return the answer in a sentence."""
    every = summary[summary["aim"] == ALL].set_index("quantity")
    if not len(every):
        return "No replacement has an effect that is large enough."
    shares = {}
    for name in every.index.intersection(["occurs", "control"]):
        mean, low, high = 100 * every.loc[name, ["mean", "low_95", "high_95"]].to_numpy(float)
        shares[name] = format_interval(mean, low, high, ".0f")
    few = int(every["levels"].iloc[0])
    text = (f"Of {int(every['counterfactuals'].iloc[0])} effects in {few} levels, "
            f"{shares['occurs']} % occur in the game")
    if "control" in shares:
        text += (f", and after random changes of the view, {shares['control']} % of the "
                 f"{int(every.loc['control', 'counterfactuals'])} with such a change")
    return text + (" (too few levels to tell)." if few < FEW_LEVELS else ".")


def report(table: pd.DataFrame, summary: pd.DataFrame) -> str:
    """Format the report."""
    return "\n\n".join([
        "# Does the effect of a replaced object occur in the real game?",
        f"{table['view'].nunique()} recorded views with an object that the prior replaces. Effects "
        f"that are smaller than {', '.join(f'{LEAST[aim]:g} ({TITLES[aim]})' for aim in AIMS)} in "
        "the simulator do not count.",
        headline(summary), "\n".join(markdown_table(
            ("the agent", "quantity", "mean", "effects", "levels"),
            [(TITLES.get(row.aim, row.aim), QUANTITIES[row.quantity],
              format_interval(row.mean, row.low_95, row.high_95, ".2f"), str(row.counterfactuals),
              str(row.levels)) for row in summary.itertuples()]))]) + "\n"


def plot(table: pd.DataFrame) -> Figure:
    """Plot the effects in the game against those in the simulator, a panel for each aim."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, aim in zip(figure.subplots(1, len(AIMS)), AIMS):
        part = table[table["aim"] == aim]
        for rows, colour, label in (
                (part[~is_effect(part)], DARK_GREY, "too small to count"),
                (part[is_effect(part) & (part["occurs"] > 0)], BLUE, "occurs"),
                (part[is_effect(part) & (part["occurs"] == 0)], VERMILION, "does not occur")):
            axes.scatter(rows["effect"], rows["real"], s=14, color=colour, label=label)
        axes.axline((0, 0), slope=1, color=DARK_GREY, linewidth=0.8)
        axes.set(title=f"the agent {TITLES[aim]}", xlabel="in the simulator",
                 ylabel=f"in the game ({UNITS[aim]})")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def summarise(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return shares of the counterfactuals with an effect, for each aim and all, with 95 %
    intervals over levels. Without a control filling, a counterfactual enters neither ``control``
    nor ``difference``."""
    table = table[is_effect(table)]
    table = table.assign(
        size=table["effect"].abs(), difference=table["occurs"] - table["control"],
        by_rebuilding=[occurs(row.effect, row.rebuilding) for row in table.itertuples()])
    rows = []
    for aim, part in (*table.groupby("aim", sort=False), (ALL, table)):
        for name in QUANTITIES if len(part) else ():
            known = part.dropna(subset=[name]) if name in ("control", "difference") else part
            if not len(known):
                continue
            values = known[name].to_numpy(float)
            levels = known["level_seed"].to_numpy()
            low, high = ClusterBootstrap(levels, seed).interval(values[None])[:, 0]
            rows.append((aim, name, len(known), len(set(levels)), values.mean(), low, high))
    return pd.DataFrame(rows, columns=list(SUMMARY))


main = command(ReplacedOptions, replace_objects)

if __name__ == "__main__":
    raise SystemExit(main())
