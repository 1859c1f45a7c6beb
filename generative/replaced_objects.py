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
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import ndimage
from torch import Tensor

from agents.replay import level_states
from common.errors import UserError
from common.game_constants import FRAME_SIZE
from common.options import command, option, redefine
from common.palette import BLUE, DARK_GREY, DPI, VERMILION
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import markdown_table
from common.video import side_by_side, write_video
from envs.level_state import LevelState
from generative.beyond_report import UNITS
from generative.beyond_results import LEAST, TITLES
from generative.filling import filled_start, generate, repaint
from generative.rebuilding import Rebuilder
from generative.rebuilt_play import occurs, play
from generative.recorded_views import RecordedViews, ViewOptions
from generative.squares import World
from generative.start_worlds import world_seeds
from generative.surroundings import AIMS, TURN, VALUE, Rollouts, View, certain, effects
from stats.association import rank_correlation
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

REPLACED = ("coin", "saw", "enemy_left", "enemy_right", "lava", "box")  # kinds of object
NUM_CONTROLS = 2
FEW_LEVELS = 10
ALL = "all"
SHARES = {
    "size": "size of the effect in the simulator", "rebuilt": "both worlds are rebuilt",
    "occurs": "the effect occurs in the game",
    "control": "it occurs after a random change of the view", "difference": "occurs minus control",
    "by_rebuilding": "it occurs between the rebuilt and the recorded level (which differ beyond "
                     "the view)"}
RANKS = {
    "effect": "rank correlation of all imagined effects with those in the game",
    "at_once": "rank correlation of the effects at step 0, which the agent alone shows"}
_SCALE, _FRAMES_PER_SECOND = 3, 4
_TRIES, _CONTROL_TRIES = 8, 24  # fillings of which the first ones that differ are used
_RECORDED = -1  # key of the recorded level among rebuilt worlds
_PLAYER = 1.5  # squares from the player's centre within which nothing is replaced
_REPLACED, _PLACE = 21, 22  # random streams; parts of seeds
ROW = {"view": int, "episode": int, "frame": int, "level_seed": int, "near_end": bool,
       "kind": str, "num_squares": int, "filled_with": str, "aim": str, "effect": float,
       "step": int, "at_once": float, "rebuilt": float, "real": float, "occurs": float,
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
class ReplacedOptions(ViewOptions):
    """Replace objects in recorded views by what the prior generates there, and verify the effects
    in the real game."""

    num_views: int = redefine(ViewOptions, "num_views", default=180)
    output_dir: Path = option(Path("replaced_objects"), "folder to write to")


@dataclasses.dataclass(frozen=True)
class Replacements:
    """Replacements in recorded views.

    Attributes:
        classes: numbers of the classes of each kind of object.
    """

    views: RecordedViews
    rebuilder: Rebuilder
    classes: dict[str, np.ndarray]

    def measure(self, number: int) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
        """Replace an object in a view.

        Returns:
            A row for each aim; no rows if nothing can be replaced there. And frames by title,
            uint8 (T, 1, H, W, C); none if no effect is large enough or a world is not rebuilt.
        """
        view, seed = self.views.view(number, _REPLACED), self.views.options.seed
        rng, world = np.random.default_rng([seed, _PLACE, number]), certain(view.world)
        kind, hole = self._object(view, world, rng)
        seeds = world_seeds([(seed, _REPLACED, number, i) for i in range(_TRIES + _CONTROL_TRIES)])
        first = [] if hole is None else self._filled(view, np.stack([hole] * _TRIES),
                                                     seeds[:_TRIES], 1)
        if hole is None or not first:
            return pd.DataFrame(columns=list(ROW)), {}
        holes = np.stack([self._moved(hole, view, rng) for _ in range(_CONTROL_TRIES)])
        others = self._filled(view, holes, seeds[_TRIES:], NUM_CONTROLS)
        [(changed_view, changed)] = first
        base, found = view.simulate(world), changed_view.simulate(changed)
        real, shown = self._played(view, number, [world, changed, *(other for _, other in others)])
        table = pd.DataFrame([{
            **self.views.origin(number), "kind": kind, "num_squares": int(hole.sum()),
            "filled_with": self._names(changed.squares[0].cpu().numpy()[hole]), "aim": aim,
            **_row(aim, found, base, real)} for aim in AIMS])[list(ROW)]
        films = {}
        if {0, 1} <= shown.keys() and is_effect(table).any():
            films = {"as it is, imagined": view.films(world)[0], "game": shown[0],
                     "replaced, imagined": changed_view.films(changed)[0], "game ": shown[1]}
        return table, films

    def _filled(self, view: View, holes: np.ndarray, seeds: Tensor, most: int
                ) -> list[tuple[View, World]]:
        """Fill holes, bool (B, n, n), of one world each, and return the first ``most`` fillings
        that differ from what was there: the view with its new start, and the world (1 row)."""
        simulator, found = view.simulator, []
        masks = torch.from_numpy(holes).to(view.vectors.device)
        with view.compute.autocast():
            worlds = generate(simulator, view.vectors.expand(len(holes), -1),
                              view.world.repeat(len(holes)), masks, seeds)
            was = view.world.squares.argmax(dim=-1)
            differs = (masks & (worlds.squares.argmax(dim=-1) != was)).flatten(1).any(dim=1)
            for row in differs.nonzero()[:most, 0].tolist():
                world = worlds[[row]]
                vectors = repaint(simulator, view.images, view.vectors, view.world, masks[[row]],
                                  world)
                start = filled_start(simulator, vectors.float(), world, view.vectors)
                found.append((dataclasses.replace(view, start=dataclasses.replace(
                    start, agent_hidden=view.start.agent_hidden, action=view.start.action)),
                    certain(world)))
        return found

    def _object(self, view: View, world: World, rng: np.random.Generator
                ) -> tuple[str, np.ndarray | None]:
        """Draw a kind of object in view, and return it and the squares of its nearest object, bool
        (n, n); None without an object."""
        squares, far = world.squares[0].cpu().numpy(), _distances(view)
        groups = [(kind, np.isin(squares, numbers) & _is_replaceable(view, far))
                  for kind, numbers in self.classes.items() if kind in REPLACED]
        groups = [(kind, mask) for kind, mask in groups if mask.any()]
        if not groups:
            return "", None
        kind, mask = groups[rng.integers(len(groups))]
        labels, _ = ndimage.label(mask, np.ones((3, 3)))
        return kind, labels == labels.ravel()[np.where(mask, far, np.inf).argmin()]

    def _moved(self, hole: np.ndarray, view: View, rng: np.random.Generator) -> np.ndarray:
        """Move a hole to a random place in view that neither touches it nor the player."""
        allowed = _is_replaceable(view, _distances(view)) & ~(
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

    def _names(self, squares: np.ndarray) -> str:
        """Return the kinds of objects that squares hold."""
        names = {int(name): kind for kind, numbers in self.classes.items() for name in numbers}
        return " ".join(sorted({names.get(int(name), "other") for name in squares}))

    def _played(self, view: View, number: int, worlds: list[World]
                ) -> tuple[dict[int, Rollouts], dict[int, np.ndarray]]:
        """Play in the game: in the worlds (W), and in the recorded level, which has the key -1.
        Worlds that cannot be rebuilt are left out.

        Returns:
            What the agent does, and the frames, uint8 (T, 1, H, W, C), by number of the world.
        """
        place = self.views.places[number]
        [(_, state)] = level_states(self.views.dataset.folder, place.episode, [place.frame])
        states: dict[int, LevelState] = {_RECORDED: state}
        for key, world in enumerate(worlds):
            with contextlib.suppress(UserError):
                states[key] = self.rebuilder.build(world, state).state
        hidden = view.start.agent_hidden[0].cpu().numpy()
        played, frames = play(view.simulator.agent, view.compute, self.views.game,
                              list(states.values()), hidden, view.num_steps)
        return ({key: played[[slot]] for slot, key in enumerate(states)},
                {key: frames[:, [slot]] for slot, key in enumerate(states)})


def _row(aim: str, found: Rollouts, base: Rollouts, real: dict[int, Rollouts]) -> dict:
    """Return the columns of a row that hold effects; see ``Replacements._played`` for ``real``."""
    (effect,), (step,) = effects(aim, found, base)
    in_game = {key: effects(aim, played, real[0])[0].item()
               for key, played in real.items() if 0 in real}
    controls = [occurs(effect, value) for key, value in in_game.items() if key > 1]
    outputs = {VALUE: "values", TURN: "right"}
    at_once = 0.0 if aim not in outputs else np.subtract(
        *(getattr(rollouts, outputs[aim])[0, 0] for rollouts in (found, base)))
    return {
        "effect": effect, "step": int(step), "at_once": at_once, "rebuilt": float(1 in in_game),
        "real": in_game.get(1, np.nan), "occurs": occurs(effect, in_game.get(1, np.nan)),
        "control": np.mean(controls) if controls else np.nan,
        "rebuilding": -in_game[_RECORDED] if in_game else np.nan}


def _distances(view: View) -> np.ndarray:
    """Return the distances of the squares from the middle of the view, in pixels: the larger one of
    both axes (n, n)."""
    num, size = view.world.squares.shape[1], view.pixels_per_square
    corner = view.world.corner[0].cpu().numpy()
    places = corner[:, None] + size * (np.arange(num) + 0.5) - FRAME_SIZE / 2  # (2, n)
    return np.maximum(abs(places[1])[:, None], abs(places[0]))


def _is_replaceable(view: View, far: np.ndarray) -> np.ndarray:
    """Return whether squares at these distances are in view, but not at the player, bool (n, n)."""
    size = view.pixels_per_square
    return (far < FRAME_SIZE / 2 - size / 2) & (far > _PLAYER * size)


def replace_objects(options: ReplacedOptions) -> pd.DataFrame:
    """Replace an object in each view, and return the summary.

    Raises:
        UserError: see ``ViewOptions.open_views``.
    """
    views = options.open_views()
    store = ResultStore(options.output_dir, REPLACEMENTS)
    store.open(views.settings, options.overwrite)
    study = Replacements(views, Rebuilder(views.simulator, views.game), views.classes())
    tables = []
    for number in with_progress(range(len(views.places)), len(views.places), "view"):
        if not store.has("view", number):
            found, films = study.measure(number)
            if films:
                with store.file("film", number) as path:
                    write_video(path, side_by_side(films, _SCALE), _FRAMES_PER_SECOND)
            store.write("view", number, value=found)
        tables.append(store.read("view", number))
    tables = [part for part in tables if len(part)]
    if not tables:
        raise UserError(f"no object in {len(views.places)} views of {views.dataset.folder.path} "
                        "could be replaced; raise --num_views")
    table = pd.concat(tables, ignore_index=True)
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
            [(TITLES.get(row.aim, row.aim), {**SHARES, **RANKS}[row.quantity],
              format_interval(row.mean, row.low_95, row.high_95, ".2f"), str(row.counterfactuals),
              str(row.levels)) for row in summary.itertuples()]))]) + "\n"


def plot(table: pd.DataFrame) -> Figure:
    """Plot the effects in the game against those in the simulator, a panel for each aim."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
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
    counted = table[is_effect(table) & table["occurs"].notna()]
    figure.suptitle(f"{(counted['occurs'] > 0).sum()} of {len(counted)} effects of replacements in "
                    "the simulator also occur in the game", fontsize=11)
    return figure


def summarise(table: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return shares of the counterfactuals with an effect, for each aim and all, with 95 %
    intervals over levels; without a control filling, a counterfactual enters neither ``control``
    nor ``difference``. And rank correlations over all replacements, for each aim."""
    counted = table[is_effect(table)]
    counted = counted.assign(
        size=counted["effect"].abs(), difference=counted["occurs"] - counted["control"],
        by_rebuilding=[occurs(row.effect, row.rebuilding) for row in counted.itertuples()])
    rows: list[tuple] = []
    for aim, part in (*counted.groupby("aim", sort=False), (ALL, counted)):
        for name in SHARES:
            known = part.dropna(subset=[name])
            if len(known):
                levels, values = known["level_seed"].to_numpy(), known[name].to_numpy(float)
                low, high = ClusterBootstrap(levels, seed).interval(values[None])[:, 0]
                rows.append((aim, name, len(known), len(set(levels)), values.mean(), low, high))
    for aim, part in table.dropna(subset=["real"]).groupby("aim", sort=False):
        levels = part["level_seed"].to_numpy()
        for name in RANKS:
            found = rank_correlation(part[name].to_numpy(), part["real"].to_numpy(), levels,
                                     ClusterBootstrap(levels, seed))
            if not np.isnan(found.value):
                rows.append((aim, name, len(part), len(set(levels)), *vars(found).values()))
    return pd.DataFrame(rows, columns=list(SUMMARY))


main = command(ReplacedOptions, replace_objects)

if __name__ == "__main__":
    raise SystemExit(main())
