"""Channels that follow the cheese: tracking scores, effects of scaling them, and layer probes.

Channels are chosen by their tracking scores on one set of levels and reported on another. The
positive and negative parts of the chosen channels are multiplied by factors at the decision squares
of forks. The effect is compared with the effect of multiplying random channels whose outputs change
as much.

Letters in shape comments: K outcomes, Q squares of a level.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from agents.acting import run_policy
from agents.hooks import cached, patched
from agents.layers import Layer, all_layers, find_layer
from agents.networks import Policy
from agents.reference_set import ReferenceSet, activations_of
from common.cli import whole
from common.devices import Compute
from common.errors import UserError
from common.options import Options, option
from common.progress import with_progress
from common.results import Entry, File, ResultStore, Schema, Table, Text
from common.tables import read_table
from envs.maze.grid import FORK, WALL, Square, kind_of
from envs.maze.state import MazeState
from interventions.controls import controls_of
from interventions.patch_text import parse_patch
from interventions.patches import Multiply, Zero
from interventions.probes import probe
from interventions.tracking import SCORES, Tracker
from maze.field.fields import STAY, both_facings, frame_source, frames_at, grouped
from maze.field.outcomes import AT_DECISION, Chain, at_decisions, decision_steps
from maze.studies.vectors import LAYER
from stats.effects import Condition, Outcome, check_starts, compare_conditions

# ---------------------------------------------------------------------------- files and constants

SCRIPT = "python -m maze.channels"
CHANNELS_FILE = Path("analysis/maze/channels/channels.csv")
NOTHING_NAME = "nothing.md"  # written instead of a study's results if no channel was chosen
CHEESE, MOUSE, A_WALL = "cheese", "mouse", "wall"
OBJECTS = (CHEESE, MOUSE, A_WALL)
CHOOSING, REPORTING = "choosing", "reporting"  # sets of levels
PUBLISHED, CENTRED = "published", "centred"  # mappings of squares to cells
_MAPPINGS: dict[str, tuple[Any, ...]] = {  # by object
    CHEESE: (PUBLISHED, CENTRED), MOUSE: (PUBLISHED,), A_WALL: (PUBLISHED,)}
OUTCOMES = (Outcome("p_cheese", "P(cheese)", probability=True),
            Outcome("p_corner", "P(corner)", probability=True),
            Outcome("p_other", "P(other)", probability=True),
            Outcome("log_odds", "log-odds of cheese against corner"),
            Outcome("value", "value estimate (return)"),
            Outcome("stay", "P(stay)", probability=True))
SQUARES_PER_LEVEL = 16  # example squares per level for probes
FREE_CELL, CHEESE_CELL, MOUSE_CELL = "square is free", "cheese in the cell", "mouse in the cell"
GOT_CHEESE = "will get the cheese"

TRACKING_COLUMNS = {
    "set": str, "layer": str, "thing": str, "mapping": str, "channel": int,
    **dict.fromkeys((*SCORES, "at", "elsewhere", *(f"{name}_threshold" for name in SCORES)), float),
    "tracks": bool, "num_levels": int, "num_squares": int}
EFFECT_COLUMNS = {
    "condition": str, "label": str, "pattern": str, "control": bool, "moved": float, "outcome": str,
    **dict.fromkeys(("unaltered", "altered", "effect", "low_95", "high_95", "p", "p_holm",
                     "control_low", "control_high"), float), "num_controls": int,
    "p_control": float, "claimed": bool,
    **dict.fromkeys(("median_unaltered", "median_altered", "median_effect", "median_low_95",
                     "median_high_95", "margin"), float), "verdict": str, "smallest_effect": float}
PROBE_COLUMNS = {
    "layer": str, "target": str, "metric": str,
    **dict.fromkeys(("score", "low_95", "high_95", "base", "shuffled", "penalty"), float),
    "num_levels": int}
CHANNEL_FILES = Schema(
    "tracking scores", SCRIPT, items={
        "scores": Entry("steps/{}.csv", Table(TRACKING_COLUMNS, exact=True, whole=True)),
        "effects": Entry("effects.csv", Table(EFFECT_COLUMNS, exact=True, whole=True)),
        "probes": Entry("probes.csv", Table(PROBE_COLUMNS, exact=True, whole=True))},
    results={"report": Entry("report.md", Text()), "figure": Entry("channels.png", File()),
             "channels": Entry("channels.csv", Table({**TRACKING_COLUMNS, "chosen": bool},
                                                     exact=True))})


# ------------------------------------------------------------------------------ tracking scores


def frames_with(thing: str, state: MazeState) -> tuple[np.ndarray, np.ndarray, list[Square]]:
    """Render a level with an object on each of its squares, and without the object.

    The cheese or a wall is placed on every free square except the mouse's, in a level without other
    cheese. The mouse is placed on every free square. There is no frame without a mouse, so
    :func:`tracking_scores` compares the activations for each square with their mean over squares.

    Returns:
        Frames with the object, uint8 (Q, 64, 64, 3); the frame without it, uint8 (1, 64, 64, 3),
        which is missing for the mouse, (0, 64, 64, 3); and the squares.
    """
    bare = state.with_cheese(None)
    grid = bare.grid
    at_start = np.array([grid.mouse]), np.array([grid.facing])
    without = frame_source(bare)(*at_start)
    if thing == MOUSE:
        squares = grid.squares()
        frames = frame_source(bare)(np.array(squares), np.full(len(squares), grid.facing))
        return frames, without[:0], squares
    squares = [square for square in grid.squares() if square != grid.mouse]
    edited = (bare.with_cheese(square) if thing == CHEESE else bare.with_cells({square: WALL})
              for square in squares)
    return np.concatenate([frame_source(level)(*at_start) for level in edited]), without, squares


def tracking_scores(policy: Policy, compute: Compute, layers: Sequence[Layer],
                    states: Sequence[MazeState], name: str, seed: int) -> pd.DataFrame:
    """Compute the tracking scores of all channels of some layers for each object.

    Args:
        layers: convolutional layers.
        states: levels, each with at least 3 free squares.

    Returns:
        A row per layer, object, mapping of squares to cells, and channel; see TRACKING_COLUMNS.
    """
    trackers = {(layer.name, thing, mapping): Tracker(layer.shape, seed) for layer in layers
                for thing, mappings in _MAPPINGS.items() for mapping in mappings}
    for state in with_progress(states, len(states), "level"):
        for thing, mappings in _MAPPINGS.items():
            frames, without, squares = frames_with(thing, state)
            shown = np.concatenate([frames, without])
            with cached(policy, [layer.name for layer in layers]) as activations:
                run_policy(policy, compute, shown, policy.initial_states(len(shown)))
            for layer, mapping in itertools.product(layers, mappings):
                maps = activations[layer.name].float().numpy()
                cells = [layer.cell(*square, state.grid.world_dim, mapping) for square in squares]
                trackers[layer.name, thing, mapping].add(
                    maps[:len(squares)], maps[-1] if len(without) else maps.mean(axis=0),
                    np.array(cells))
    tables = [tracker.table().assign(set=name, layer=layer_name, thing=thing, mapping=mapping)
              for (layer_name, thing, mapping), tracker in trackers.items()]
    return pd.concat(tables, ignore_index=True)[list(TRACKING_COLUMNS)]


def choose_channels(scores: pd.DataFrame, number: int) -> list[tuple[str, int]]:
    """Choose channels that track the cheese, as pairs of layer and channel, best contrast first.

    All scores of a chosen channel exceed their chance thresholds, and its contrast is larger for
    the cheese than for a wall.

    Args:
        scores: scores on one set of levels, from :func:`tracking_scores`.
        number: maximum number of channels per layer.
    """
    published = scores[scores["mapping"] == PUBLISHED]
    cheese, wall = (published[published["thing"] == thing].set_index(["layer", "channel"])
                    for thing in (CHEESE, A_WALL))
    chosen = cheese[cheese["tracks"]
                    & (cheese["contrast"] > wall["contrast"].reindex(cheese.index))]
    chosen = chosen.sort_values("contrast", ascending=False, kind="stable")
    return chosen.groupby("layer", sort=False).head(number).index.tolist()


# -------------------------------------------------------------------- channels of further studies


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelsOptions(Options):
    """Options that choose a layer and some of its channels."""

    layer: str = option(LAYER, "layer of the channels")
    channels: tuple[str, ...] = option(
        (str(CHANNELS_FILE),), "numbers and ranges such as 7,8,42-44, or a channels.csv of python "
                               "-m maze.channels, for the channels of the layer that were chosen "
                               "there", metavar="CHANNELS")
    strongest: int | None = option(
        None, "use only the N channels of a channels.csv with the largest contrast of the cheese",
        type=whole(1, 10**4), metavar="N")

    def find_channels(self, policy: Policy) -> tuple[Layer, tuple[int, ...]]:
        """Return the layer and its channels; see :func:`parse_channels`.

        Raises:
            UserError: see :func:`find_map` and :func:`parse_channels`.
        """
        layer = find_map(policy, self.layer)
        return layer, parse_channels(self.channels, self.strongest, policy, layer)


def find_map(policy: Policy, name: str) -> Layer:
    """Find a convolutional layer by name.

    Raises:
        UserError: if the agent does not have the layer, or the layer is not convolutional.
    """
    layer = find_layer(policy, name)
    if not layer.is_map:
        maps = [other.name for other in all_layers(policy) if other.is_map]
        raise UserError(f"{layer.name} has no cells: its output is {layer.shape[0]} units; choose "
                        f"a convolutional layer, such as {LAYER if LAYER in maps else maps[-1]}")
    return layer


def parse_channels(texts: Sequence[str], strongest: int | None, policy: Policy, layer: Layer
                   ) -> tuple[int, ...]:
    """Return the given channels, ascending; empty if no channel was chosen.

    Args:
        texts: ``--channels``: lists of channels, or paths of ``channels.csv``.
        strongest: maximum number of channels from each ``channels.csv``, by contrast on the levels
            on which they were chosen; None for all chosen channels.

    Raises:
        UserError: if a text is not a list of channels, the layer does not have a channel, or a file
            is missing or damaged, or has no scores of the layer.
    """
    channels: set[int] = set()
    for text in texts:
        if text.endswith(".csv"):
            table = read_table(Path(text), {"set": str, "layer": str, "channel": int,
                                            "contrast": float, "chosen": bool}, ("contrast",),
                               SCRIPT)
            table = table[(table["set"] == CHOOSING) & (table["layer"] == layer.name)]
            if table.empty:
                raise UserError(f"{text} has no scores of {layer.name}; give --channels as "
                                "numbers, or another --layer")
            chosen = table[table["chosen"]].sort_values("contrast", ascending=False, kind="stable")
            channels |= set(map(int, chosen["channel"][:strongest]))
        else:
            channels |= set(parse_patch(f"zero@{layer.name}:{text}").channels or ())
    if channels:
        Zero(layer.name, channels=tuple(sorted(channels))).select(policy, layer)  # checks them
    return tuple(sorted(channels))


def write_nothing_chosen(store: ResultStore, layer: Layer) -> None:
    """Write the note ``nothing.md``, which says that no channel was chosen, and print it."""
    text = f"No channel of {layer.name} was chosen as following the cheese, so none was patched."
    store.write("nothing", value=text + "\n")
    print(text)


# ----------------------------------------------------------------------------- multiplied channels


class Decisions:
    """Frames at the decision squares of forks, and the agent's outcomes there.

    Args:
        states: levels; levels that are not forks are left out.

    Raises:
        UserError: if there are fewer than 10 forks.
    """

    def __init__(self, policy: Policy, compute: Compute, states: Sequence[MazeState]):
        self.policy, self.compute = policy, compute
        self.states = [state for state in states if kind_of(state.grid) == FORK]
        check_starts(len(self.states), "--num_mazes")
        self._steps = np.array([decision_steps(state.grid) for state in self.states])
        self._frames = frames_at(self.states, [state.grid.decision_square()
                                               for state in self.states])

    def outcomes(self) -> np.ndarray:
        """Measure OUTCOMES under the active patches, float64 (N, K)."""
        output = run_policy(self.policy, self.compute, self._frames,
                            self.policy.initial_states(len(self._frames)))
        logs = grouped(output.log_probs.cpu().numpy())
        values = at_decisions(logs, output.values.cpu().numpy(), *self._steps.T)
        probs = np.exp(logs)
        stay = probs[:, STAY] / probs.sum(axis=1)
        return np.column_stack([np.delete(values, AT_DECISION.index("entropy"), axis=1), stay])


def multiply_channels(decisions: Decisions, layer: Layer, sets: Sequence[Sequence[int]],
                      factors: Sequence[tuple[float, float]], reference: ReferenceSet,
                      num_controls: int, seed: int) -> pd.DataFrame:
    """Compute the effects of multiplying sets of channels, and random sets, by each factor.

    Args:
        factors: pairs of factors, for the positive and the negative part of the activations.
        reference: frames of other levels, on which the size of a change is measured.
        num_controls: number of random sets per factor and set.
        seed: seed of the random sets, the bootstrap and the sign flips.

    Returns:
        The table of ``stats.effects.compare_conditions``, see EFFECT_COLUMNS.

    Raises:
        UserError: if ``num_controls`` is less than 2, or not enough random sets can be drawn.
    """
    policy, std = decisions.policy, {layer.name: reference.std(decisions.policy, layer)}
    conditions: list[Condition] = []
    for channels in sets:
        for positive, negative in factors:
            patch = Multiply(layer.name, channels=tuple(channels), positive=positive,
                             negative=negative)
            by = (f"times {positive:g}" if positive == negative else
                  f"positive part times {positive:g}, negative {negative:g}")
            name = f"channels {' '.join(map(str, channels))} {by}"
            conditions.append(Condition(name, name, name, value=(patch,)))
            for number, control in enumerate(controls_of(policy, [patch], num_controls, seed,
                                                         reference)):
                drawn = ",".join(map(str, control.drawn[0]["channels"]))
                conditions.append(Condition(f"{name} control {number}", f"channels {drawn}", name,
                                            control=True, value=control.patches))
    after, moved = [], {}
    for condition in with_progress(conditions, len(conditions), "condition"):
        with patched(policy, condition.value or (), std) as patches:
            after.append(decisions.outcomes())
        moved[condition.name] = patches.total_change()[0]
    return compare_conditions(conditions, OUTCOMES, decisions.outcomes(), np.stack(after), seed,
                              moved=moved)


# ------------------------------------------------------------------------------------------ probes


def draw_got_cheese(policy: Policy, compute: Compute, states: Sequence[MazeState],
                    seed: int) -> np.ndarray | None:
    """Draw for each level whether an episode ends with the cheese, bool (N,).

    Sampling from the exact probability is equivalent to playing an episode. Returns None for agents
    with memory.

    Args:
        states: N levels with one cheese each.
    """
    if policy.recurrent:
        return None
    exact = [Chain.of(both_facings(policy, compute, state)).reaching(
        [state.grid.cheese], state.timeout - state.time)[0]
        for state in with_progress(states, len(states), "level")]
    return np.random.default_rng(seed).random(len(exact)) < np.array(exact)


def probe_layers(policy: Policy, layers: Sequence[Layer], states: Sequence[MazeState],
                 got: np.ndarray | None, seed: int, num_shuffles: int) -> pd.DataFrame:
    """Fit linear probes of each target to each layer; train, select and test them on different
    levels.

    The mouse is on a random free square, except for "will get the cheese", where it is on its
    square in ``states``. Three targets are properties of a square: whether it is free, has the
    cheese, or has the mouse. Their examples are SQUARES_PER_LEVEL squares of each maze: the
    cheese's square, the mouse's square, and random others. Their probes read the channels of the
    cell that shows the square. The other targets are the row and column of cheese and mouse (R²)
    and "will get the cheese"; their probes read the whole layer. Targets with too few levels of one
    outcome are left out.

    Args:
        layers: convolutional layers.
        states: levels with one cheese each.
        got: labels from :func:`draw_got_cheese`; None leaves out "will get the cheese".
        seed: seed of squares, splits, shuffles and bootstrap.
        num_shuffles: number of probes with shuffled labels.

    Returns:
        A row per layer, target and metric; see PROBE_COLUMNS.
    """
    rng, levels = np.random.default_rng(seed), np.arange(len(states))
    mice, picked = zip(*(_draw_squares(state, rng) for state in states))
    frames = {"anywhere": frames_at(states, mice),
              "start": frames_at(states, [state.grid.mouse for state in states])}
    level_of = np.repeat(levels, SQUARES_PER_LEVEL)
    examples = list(zip(level_of, (square for squares in picked for square in squares)))
    labels: Mapping[str, list] = {
        FREE_CELL: [states[level].grid.is_free[square] for level, square in examples],
        CHEESE_CELL: [square == states[level].grid.cheese for level, square in examples],
        MOUSE_CELL: [square == mice[level] for level, square in examples],
        **{f"{whose}'s {axis}": [square[place] for square in squares]
           for place, axis in enumerate(("row", "column"))
           for whose, squares in (("cheese", [state.grid.cheese for state in states]),
                                  ("mouse", mice))},
        **({} if got is None else {GOT_CHEESE: list(got)})}
    tables = []
    for layer in with_progress(layers, len(layers), "layer"):
        maps = {where: activations_of(policy, shown, [layer.name])[layer.name].cpu().numpy()
                for where, shown in frames.items() if where == "anywhere" or got is not None}
        world_dim = states[0].grid.world_dim
        cells = np.stack([maps["anywhere"][level][(slice(None), *layer.cell(
            square.row, square.column, world_dim))] for level, square in examples])
        for target, values in labels.items():
            is_coordinate = "'s " in target
            activations, level = ((cells, level_of) if len(values) == len(examples) else
                                  (maps["start" if target == GOT_CHEESE else "anywhere"], levels))
            try:
                fitted = probe(activations, np.array(values, float if is_coordinate else bool),
                               level, seed, regression=is_coordinate, num_shuffles=num_shuffles)
            except UserError as error:  # too few levels of one outcome
                print(f"no probe of '{target}': {error}")
                continue
            tables.append(fitted.scores.assign(layer=layer.name, target=target,
                                               penalty=fitted.penalty, num_levels=len(states)))
    return pd.concat(tables, ignore_index=True)[list(PROBE_COLUMNS)]


def _draw_squares(state: MazeState, rng: np.random.Generator) -> tuple[Square, list[Square]]:
    """Draw a square for the mouse and the example squares of a level."""
    grid = state.grid
    free = grid.squares(without_cheese=True)
    mouse = free[rng.integers(len(free))]
    inside = [grid.world(row, column) for row, column in np.ndindex(grid.maze_dim, grid.maze_dim)]
    others = [square for square in inside if square not in (mouse, grid.cheese)]
    number = SQUARES_PER_LEVEL - 2
    drawn = rng.choice(len(others), number, replace=len(others) < number)
    squares = [grid.cheese, mouse, *(others[place] for place in drawn)]
    # Random order, because shuffling exchanges the labels of equal positions between levels.
    return mouse, [squares[place] for place in rng.permutation(SQUARES_PER_LEVEL)]
