"""Comparison of saliency through the simulator with attributions: which kind of map more often
predicts correctly what happens in the real game?

A simulation starts at the bottleneck vector that is encoded from the recorded frame and the frames
before it; step 0 of the simulation shows the recorded frame. The output is read at step 0 or
``lag`` steps later, and differentiated with respect to the image of step 0. The predictions of both
kinds of map are tested by hiding an object in the real game, or a part of the recorded frame, from
the agent.

In the same frames, both kinds of map are scored by three measures:

- deletion and insertion of blocks of the frame, for outputs at step 0
- rank correlation with the maps of agents with randomised weights, in some of the frames
- share of objects for which the output changes with the predicted sign when the object is hidden in
  the real game; the prediction is the opposite of the sign of the map's sum over the object

The share of correct signs in each frame, over all kinds of object, is also tested with
``stats.effects``: each map against 0.5, and saliency through the simulator against attributions in
the same frames. Controls are the maps of other frames, obtained by a cyclic shift.

Letters in shape comments: N frames, B frames of a batch, K kinds of object, M maps, H W grid of a
map, C image channels, D hidden units, L lags, R renderings of a frame, P points of a curve.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.acting import run_policy
from agents.layers import Layer
from agents.networks import Policy
from agents.outputs import Output
from agents.replay import recorded_game
from agents.rollout_files import RolloutFolder
from attribution.checking.check import cell_attributions, format_rows
from attribution.checking.deletion import (
    COMPARISON,
    KINDS,
    POINTS,
    areas_under,
    compare_areas,
    ranks_of,
)
from attribution.checking.object_removal import changes_without
from attribution.checking.object_scores import cells_of
from attribution.integrated_gradients import Integration
from attribution.layers import Bottleneck
from attribution.recordings import RecordedFrames
from common.devices import Compute
from common.game_constants import FRAME_SIZE
from common.palette import COLOURS, DARK_GREY
from common.progress import with_progress
from common.tables import markdown_escaped, markdown_table
from envs.level_state import LevelState
from envs.objects import GameObject
from envs.procgen_env import EnvConfig, ProcgenVectorEnv
from generative.dataset import RolloutDataset
from generative.saliency.gradients import SaliencyFunction, SaliencyPass, saliency_maps
from generative.simulator import Simulator
from generative.start_worlds import sampled_world
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, compare_conditions
from stats.forest_plot import forest_plot
from stats.report import bold, format_p, format_range
from stats.significance import LEVEL

PIXELS = Bottleneck("pixels", Layer("pixels", (3, FRAME_SIZE, FRAME_SIZE), 1, 0.0))
SALIENCY, TIMES_IMAGE = "saliency", "saliency times image"
BLOCK = 8  # side in pixels of the blocks of a frame that are replaced or compared
_WINDOWS_PER_BATCH = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """Maps of one kind, one per frame.

    Attributes:
        name: name of the kind of map, with the lag, for tables.
        lag: number of steps after the frame at which the output is read.
        bottleneck: layer whose cells the map covers; ``PIXELS`` for saliency.
        values: values of the maps, float64 (N, H, W).
    """

    name: str
    lag: int
    bottleneck: Bottleneck
    values: np.ndarray

    @property
    def is_attribution(self) -> bool:
        return self.bottleneck is not PIXELS

    @property
    def blocks(self) -> np.ndarray:
        """Sums of the values over blocks of the frame (N, 8, 8). Cell i of a layer with stride s
        is taken to cover the pixels s i to s (i + 1) - 1, as in ``Layer.cell``."""
        size = FRAME_SIZE // BLOCK
        return self.values.reshape(len(self.values), size, -1, size,
                                   self.values.shape[2] // size).sum(axis=(2, 4))


def attribution_maps(policy: Policy, compute: Compute, bottlenecks: Sequence[Bottleneck],
                     output: Output, recorded: RecordedFrames) -> list[Map]:
    """Compute integrated gradients of an output in recorded frames, with baseline zero and summed
    over channels; one ``Map`` per layer."""
    return [Map(f"attribution to {bottleneck.name}", 0, bottleneck, cell_attributions(
        policy, compute, bottleneck, output, recorded, Integration(tolerance=None)))
            for bottleneck in bottlenecks]


def simulated_maps(simulator: Simulator, compute: Compute, dataset: RolloutDataset,
                   windows: np.ndarray, function: SaliencyFunction, lags: Sequence[int],
                   kernel_size: int, sigma: float) -> list[Map]:
    """Compute two kinds of map through the simulator: the gradient with respect to the image of
    step 0, summed over colours and smoothed; and the gradient times the image, summed over colours.

    Args:
        simulator: the simulator with its agent.
        compute: device and precision.
        dataset: dataset of the recording.
        windows: index of the dataset window that has each frame as its last initial frame (N,).
        function: output to differentiate.
        lags: numbers of steps after the frame at which the output is read.
        kernel_size, sigma: parameters of the smoothing; see ``saliency_maps``.

    Returns:
        Two maps per lag.
    """
    values: dict[tuple[int, str], list[np.ndarray]] = {
        (lag, name): [] for lag in lags for name in (SALIENCY, TIMES_IMAGE)}
    for begin in range(0, len(windows), _WINDOWS_PER_BATCH):
        batch = dataset.batch(windows[begin:begin + _WINDOWS_PER_BATCH])
        images = batch.frames[:dataset.num_init_steps].to(compute.device).float() / 255
        with torch.no_grad(), compute.autocast():
            vectors = simulator.encode(images)
        world = None
        if simulator.squares is not None:
            numbers = torch.from_numpy(windows[begin:begin + _WINDOWS_PER_BATCH])
            world = sampled_world(simulator, vectors, images[-1], numbers)
        for lag in lags:
            saliency = SaliencyPass(simulator, compute, (vectors[:, None], world), [function],
                                    (lag,), lag + 1)
            gradients = saliency.gradients(function).images[:, 0].numpy()  # (B, C, H, W)
            image = saliency.unperturbed_images()[:, 0].numpy()
            values[lag, SALIENCY].append(saliency_maps(gradients, kernel_size, sigma))
            values[lag, TIMES_IMAGE].append((gradients * image).sum(axis=1))
    return [Map(f"{name}, {lag} steps later" if lag else name, lag, PIXELS,
                np.concatenate(parts).astype(np.float64)) for (lag, name), parts in values.items()]


def hide_objects(policy: Policy, compute: Compute, folder: RolloutFolder, places: np.ndarray,
                 entering: np.ndarray, kinds: Sequence[GameObject], output: Output,
                 lags: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hide each kind of object from the agent in one frame of the real game, and continue playing.

    The game state is not changed; only that frame is rendered without the kind. The changed frame
    may change the agent's hidden state and its most likely actions, and thus the rest of the
    episode. The output is read at each lag, or in the last frame if the episode has ended earlier.

    Args:
        policy: the agent.
        compute: device and precision.
        folder: the recording.
        places: episode and row of each frame (N, 2); rows of an episode are adjacent and ascending.
        entering: hidden states before each frame (N, D).
        kinds: kinds of object.
        output: output that is read.
        lags: numbers of steps after the frame.

    Returns:
        Masks of each kind, bool (N, K, 64, 64); changes of the output at each lag, float64
        (L, N, K), 0 where a kind is not in view; and whether the episode with nothing hidden ends
        before the last lag, bool (N,).

    Raises:
        UserError: if the recording cannot be replayed.
    """
    config, ended = recorded_game(folder), []

    def run(number: int, state: LevelState, frames: np.ndarray) -> np.ndarray:
        values, over = _play_on(policy, compute, config, state.to_bytes(), frames,
                                entering[number], output, max(lags))
        ended.append(over)
        return values[list(lags)]

    masks, changes = changes_without(folder, places, kinds, run)
    return masks, changes, np.array(ended)


@torch.no_grad()
def _play_on(policy: Policy, compute: Compute, config: EnvConfig, state: bytes, shown: np.ndarray,
             entering: np.ndarray, output: Output, last: int) -> tuple[np.ndarray, bool]:
    """Play R copies of a level. At the first step, each copy shows the agent a given rendering.

    Args:
        policy: the agent.
        compute: device and precision.
        config: configuration of the game.
        state: state of the level.
        shown: rendering of the state that is shown in each copy, uint8 (R, 64, 64, 3).
        entering: hidden state before the first step (D,).
        output: output that is read.
        last: number of steps.

    Returns:
        Outputs at steps 0 to ``last`` (last + 1, R), and whether the episode of the first rendering
        has ended.
    """
    number = len(shown)
    hidden = torch.from_numpy(entering).expand(number, -1).to(compute.device)
    frames, over, outputs = shown.copy(), np.zeros(number, dtype=bool), []
    with contextlib.closing(ProcgenVectorEnv(config, number, 0, 0)) as env:
        env.observe()
        env.set_state([state] * number)
        env.observe()
        for step in range(last + 1):
            result = run_policy(policy, compute, frames, hidden)
            actions = result.logits.argmax(dim=-1)
            outputs.append(output(result, actions).double().cpu().numpy())
            if step == last:
                break
            env.act(actions.to(torch.int32).cpu().numpy())
            observation = env.observe()
            over |= observation.first
            frames[~over] = observation.frames[~over]
            going = torch.from_numpy(~over).to(hidden.device)
            hidden = torch.where(going.unsqueeze(-1), result.hidden_states, hidden)
    return np.stack(outputs), bool(over[0])


@torch.no_grad()
def frame_deletion_curves(policy: Policy, compute: Compute, recorded: RecordedFrames,
                          scores: Sequence[np.ndarray], output: Output) -> np.ndarray:
    """Compute deletion and insertion curves over blocks of the frame (Petsiuk et al. 2018, "RISE",
    section 3.3).

    Blocks are replaced by the mean frame (deletion) or restored (insertion), in descending order of
    their scores.

    Args:
        policy: the agent.
        compute: device and precision.
        recorded: N recorded frames.
        scores: M arrays of block scores (N, 8, 8), one per order.
        output: output of the agent.

    Returns:
        Output along the deletion and the insertion curve, float64 (N, M, 2, P).
    """
    side = FRAME_SIZE // BLOCK
    mean = recorded.frames.mean(axis=0)
    changed = np.round(np.linspace(0, side**2, POINTS)).astype(int)
    curves = np.empty((len(recorded.frames), len(scores), 2, POINTS))
    for number, frame in enumerate(with_progress(recorded.frames, len(curves),
                                                 "deletion frame")):
        ranks = ranks_of(np.stack([score[number] for score in scores]))  # (M, blocks)
        gone = ranks[:, None] < changed[:, None]  # (M, P, blocks)
        hidden = np.stack([gone, ~gone], axis=1).reshape(-1, side, side)
        pixels = hidden.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)[..., None]
        frames = np.where(pixels, mean, frame).round().astype(np.uint8)
        entering, actions = (
            torch.from_numpy(array[number:number + 1]).to(compute.device).expand(
                len(frames), *array.shape[1:])
            for array in (recorded.entering, recorded.actions))
        values = output(run_policy(policy, compute, frames, entering), actions)
        curves[number] = values.double().cpu().numpy().reshape(curves.shape[1:])
    return curves


NUM_SHIFTS = 20
AGREEMENT = Outcome("agreement", "share of hidden objects whose sign is right", probability=True)
CHANCE = "chance"


def agreements(maps: Map, masks: np.ndarray, changes: np.ndarray, shift: int = 0) -> np.ndarray:
    """Compute the share of kinds of object in each frame whose effect has the sign that a map
    predicts. Only kinds whose hiding changes the output are counted.

    Args:
        maps: maps of the frames.
        masks: masks of the objects, bool (N, K, 64, 64).
        changes: changes of the output at the map's lag when each object is hidden (N, K).
        shift: number of frames by which the maps are cyclically shifted.

    Returns:
        Share of correct signs per frame (N,); NaN where no kind is counted.
    """
    cells = cells_of(masks, maps.bottleneck)  # (N, K, H, W)
    predicted = -(np.roll(maps.values, shift, axis=0)[:, None] * cells).sum(axis=(2, 3))
    counted = changes != 0
    right = ((np.sign(predicted) == np.sign(changes)) & counted).sum(axis=1)
    number = counted.sum(axis=1)
    return np.divide(right, number, out=np.full(len(right), np.nan), where=number > 0)


def compare_agreements(maps: Sequence[Map], masks: np.ndarray, changes: Mapping[int, np.ndarray],
                       episodes: np.ndarray, seed: int) -> pd.DataFrame:
    """Test the agreement of each map against 0.5, and of each saliency map against each
    attribution map, in frames in which some hidden object changes the output at every lag.

    Args:
        maps: the maps.
        masks: masks of the objects, bool (N, K, 64, 64).
        changes: changes of the output when each object is hidden (N, K), by lag. Attributions
            explain the output in the frame itself; they are compared at every lag.
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes, and of the sign-flip tests.

    Returns:
        The table of ``stats.effects.compare_conditions``, whose p-values are corrected over all
        comparisons, without the columns ``label`` and ``pattern``. Additional columns are ``map``,
        ``compared_with``, ``lag``, and the shares of correct signs ``right`` (of ``map``) and
        ``other`` (of ``compared_with``). ``altered`` is the difference ``right`` - ``other``, and
        ``unaltered`` is 0. A control is the same difference with the maps of other frames.
    """
    shifts = (0, *np.unique(np.linspace(0, len(episodes), NUM_SHIFTS + 2)[1:-1].astype(int)))
    counted = np.all([(change != 0).any(axis=1) for change in changes.values()], axis=0)
    conditions: list[Condition] = []
    after, facts = [], []
    for lag, change in changes.items():
        shares = {kind: np.stack([agreements(kind, masks, change, shift)[counted]
                                  for shift in shifts])
                  for kind in maps if kind.lag == lag or kind.is_attribution}
        others = {CHANCE: np.full((len(shifts), counted.sum()), 0.5),
                  **{kind.name: share for kind, share in shares.items() if kind.is_attribution}}
        for other, against in others.items():
            for kind, share in shares.items():
                if other != CHANCE and kind.is_attribution:
                    continue
                pair = f"{kind.name} against {other} at {lag}"
                for number, difference in enumerate(share - against):
                    conditions.append(Condition(f"{pair}, control {number}" if number else pair,
                                                pair, pair, number > 0))
                    after.append(difference[:, None])
                    facts.append((kind.name, other, lag, share[number].mean(),
                                  against[number].mean()))
    table = compare_conditions(conditions, [AGREEMENT], np.zeros((counted.sum(), 1)),
                               np.stack(after), seed, episodes[counted])
    named = pd.DataFrame(facts, columns=["map", "compared_with", "lag", "right", "other"])
    return pd.concat([named, table.drop(columns=["label", "pattern"])], axis=1)


def deletion_table(names: Sequence[str], curves: np.ndarray, episodes: np.ndarray,
                   seed: int) -> pd.DataFrame:
    """Compare deletion and insertion in the order of each map with random orders.

    Args:
        names: names of the maps (M,).
        curves: curves of the maps and then of random orders, float64 (N, orders, 2, P).
        episodes: episode of each frame (N,).
        seed: seed of the bootstrap over episodes.

    Returns:
        Table with columns ``map``, ``kind``, ``area`` and ``random_area`` (mean areas under the
        curves, in standard deviations of the output over the frames), and the columns of
        ``COMPARISON``.
    """
    deviation = max(float(curves[:, 0, 0, 0].std()), 1e-9)
    areas = areas_under(curves) / deviation  # (N, orders, 2)
    random = areas[:, len(names):].mean(axis=1)
    bootstrap = ClusterBootstrap(episodes, seed)
    return pd.DataFrame([
        (name, kind, *compare_areas(areas[:, place, number], random[:, number], kind, bootstrap))
        for place, name in enumerate(names) for number, kind in enumerate(KINDS)],
        columns=["map", "kind", "area", "random_area", *COMPARISON])


def report(description: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Format the report of the comparison as Markdown.

    Args:
        description: a sentence that describes the frames and the output.
        tables: the tables ``agreement``, ``objects``, ``deletion`` and ``randomisation``.
    """
    agreement = tables["agreement"]
    return "\n".join([
        "# Saliency through the simulator and attributions: which is right about the real game?",
        "", markdown_escaped(description), "",
        "A simulation starts from the latent vector of a recorded frame and the two frames before "
        "it, and takes the most likely latents and the agent's most likely actions, so nothing is "
        "random. Its saliency at step 0 is compared with attributions in the recorded frame.",
        "", "## Objects hidden in the real game", "",
        "One kind of object is not rendered in one frame; the state of the game is unchanged, and "
        "the agent continues to play. A map is right if the change of the output has the sign "
        "opposite to that of the map in the object's pixels. Right: mean share of such hidden "
        "objects per frame; interval by bootstrap over episodes. A difference is **claimed** if "
        f"its interval excludes 0 and both p (Holm) and p (controls) are <= {LEVEL}; controls are "
        "the maps of other frames.", "",
        *markdown_table(
            ("map", "compared with", "steps later", "right", "other", "difference (95 %)",
             "controls", "p (Holm)", "p (controls)", "verdict"),
            [(row.map, row.compared_with, str(row.lag), f"{row.right:.3f}", f"{row.other:.3f}",
              f"{row.effect:+.3f} ({format_range(row.low_95, row.high_95, '+.3f')})",
              format_range(row.control_low, row.control_high, "+.3f"), format_p(row.p_holm),
              format_p(row.p_control), bold(row.verdict, row.claimed))
             for row in agreement[~agreement["control"]].itertuples()]),
        "By kind of object:", "",
        *_markdown(tables["objects"][[
            "map", "lag", "kind", "frames", "change", "agreement", "low_95", "high_95", "chance",
            "above_chance", "rank_correlation", "rank_low_95", "rank_high_95"]]),
        "## Deletion and insertion", "",
        f"Blocks of {BLOCK} x {BLOCK} pixels of the real frame are replaced by the mean frame "
        "(deletion) or restored (insertion), in descending order of the map. Areas under the "
        "curves are in standard deviations of the output; a map is better than random orders if "
        "the interval of the difference lies above 0.", "", *_markdown(tables["deletion"]),
        "## Randomised weights", "",
        "Rank correlation of |map| between the agent and copies with more and more randomised "
        "weights, from the heads downwards (Adebayo et al. 2018). In the simulator, only the "
        "agent is randomised.", "", *_markdown(tables["randomisation"])])


def _markdown(table: pd.DataFrame) -> list[str]:
    """Format a table as Markdown."""
    return markdown_table([name.replace("_", " ") for name in table], format_rows(table))


def plot(tables: Mapping[str, pd.DataFrame], curves: np.ndarray, names: Sequence[str]) -> Figure:
    """Plot the agreement, deletion and insertion curves, and correlations with maps of randomised
    agents.

    Args:
        tables: as for ``report``.
        curves: curves of the maps in ``names`` and then of random orders, float64
            (N, orders, 2, P).
        names: names of the maps (M,).
    """
    figure = Figure(figsize=(17, 5.2), layout="constrained")
    right, *falling, random = figure.subplots(1, 4)
    agreement = tables["agreement"]
    rows = agreement[(agreement["compared_with"] == CHANCE) & ~agreement["control"]].copy()
    # The table has differences from 0.5; the figure shows shares.
    rows[["low_95", "high_95", "control_low", "control_high"]] += 0.5
    forest_plot(right, rows, [f"{row.map.partition(',')[0]}, {row.lag} later" if row.lag
                              else row.map for row in rows.itertuples()], value="right")
    right.axvline(0.5, color=DARK_GREY, linewidth=0.8)
    right.set_title("share of hidden objects whose sign is right\n(bars: 95 %; grey: maps of other "
                    "frames)", fontsize=10)
    shares = np.linspace(0, 1, curves.shape[-1])
    for number, (axes, kind) in enumerate(zip(falling, KINDS)):
        for place, name in enumerate(names):
            axes.plot(shares, curves[:, place, number].mean(axis=0), color=COLOURS[place],
                      label=name)
        axes.plot(shares, curves[:, len(names):, number].mean(axis=(0, 1)), "--", color=DARK_GREY,
                  label="random order")
        axes.set_title(f"{kind}: output", fontsize=10)
        axes.set_xlabel("share of the frame")
    for place, (name, part) in enumerate(tables["randomisation"].groupby("map", sort=False)):
        random.plot(part["correlation"].to_numpy(), "o-", color=COLOURS[place % len(COLOURS)],
                    label=name)
        random.set_xticks(range(len(part)), part["drawn_again"], rotation=40, fontsize=8)
    random.axhline(0.5, color=DARK_GREY, linewidth=0.8)
    random.set_title("rank correlation with maps of random weights", fontsize=10)
    for axes in (falling[0], random):
        axes.legend(fontsize=8)
    return figure
