"""Starts made to order compared with recorded starts, in the simulator and in the real game.

Of each order the best start counts (score less penalty). Its ``score`` is the target in deviations
from the mean over recorded starts, simulated, with the sign of the aim. An order is a row of the
statistics of ``stats.effects``, and those of one target are drawn together. Outcomes:

- ``score``: less that of the best of ``best_of`` recorded starts that no search began from. The
  controls are the best of as many recorded starts, drawn again from all of them.
- ``percentile``: in the real game. The recording of the recorded start that is nearest to the found
  one is replayed up to it, then the agent plays on; what the target is at the step, as a share of
  the recorded values that it exceeds (in the direction of the aim), less 0.5. Arm ``recorded``
  starts from the best of the recorded starts itself. The controls are the starts of the same arm in
  another order's place: the start found for order i + j, read by the target of order i, for every j
  that gives each order another target.

Letters in shape comments: O orders, K starts of each, N recorded starts, G targets, V vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from agents.hooks import cached
from agents.networks import to_images
from agents.replay import recorded_game, replay
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from envs.procgen_env import LevelSlots
from generative.dataset import WindowPlace
from generative.frozen_agent import FrozenAgent
from generative.networks import PresetDraw
from generative.sample_files import SampleFolder
from generative.start_optimisation.objectives import Answers, rollout
from generative.start_optimisation.recorded_starts import layers_of, read
from generative.start_optimisation.search import SearchContext
from stats.effects import MIN_STARTS, Condition, Outcome, compare_conditions
from stats.significance import share

QUANTILE = 0.999  # of recorded values, beyond which a start is extreme
LEAST = 0.01  # deviations, by which it must be: units that saturate differ by rounding
SHOWN = 0.95  # percentile from which the real game shows the target
NUM_DRAWS = 8  # of the latents, for each best start
SCORE = Outcome("score", "score, less that of the best recorded start (deviations)")
PERCENTILE = Outcome("percentile", "percentile in the real game", probability=True)
RECORDED = "recorded"  # arm of the best recorded starts
NUM_SUBSETS = 20  # of recorded starts, as controls
_DRAWS, _SUBSETS = 2, 3  # streams of random numbers, beside the seed


@dataclasses.dataclass(frozen=True)
class Counted:
    """Everything that is counted.

    Attributes:
        starts: a row for each penalty, order and start, see ``starts.csv``. Columns about the real
            game and drawn latents are empty but for the best start of an order, which ``best``
            marks.
        effects: the table of ``compare_conditions`` for outcomes ``score`` and ``percentile``; None
            with fewer than ``MIN_STARTS`` targets, which have no interval.
    """

    starts: pd.DataFrame
    effects: pd.DataFrame | None


def count(ctx: SearchContext, folders: dict[float, SampleFolder], recording: RolloutFolder | None,
          batch_size: int, seed: int) -> Counted:
    """Read all targets in all found starts, and count.

    Args:
        folders: of the samples, by penalty.
        recording: that the recorded starts come from; None leaves the real game out.
    """
    parts, scores, percentiles = [], {}, {}
    for penalty, folder in folders.items():
        table, best = _of_penalty(ctx, folder, penalty, batch_size)
        vectors = folder.stacked_field("bottleneck_vec")[best]  # (O, V)
        _add_draws(ctx, table, best, vectors, seed)
        scores[penalty] = _scores(ctx, _targets(ctx, vectors, batch_size))  # (O, O)
        if recording is not None:
            percentiles[penalty] = _add_real(ctx, table, best, recording)
        parts.append(table)
    recorded = np.array([ctx.scores(order)[-ctx.best_of:].argmax() for order in
                         range(len(ctx.orders))]) + len(ctx.starts.windows) - ctx.best_of
    table = pd.concat(parts, ignore_index=True)
    if recording is not None:
        percentiles[RECORDED], _ = _real_percentiles(ctx, recorded, recording)
        own = np.diag(percentiles[RECORDED])
        table["recorded_percentile"] = np.where(table["best"], own[table["order"]], np.nan)
    return Counted(table, _effects(ctx, scores, percentiles, seed))


def _of_penalty(ctx: SearchContext, folder: SampleFolder, penalty: float,
                batch_size: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows of ``starts.csv``, and the sample of the best start of each order (O,)."""
    vectors = folder.stacked_field("bottleneck_vec", range(len(ctx.orders) * ctx.num_starts))
    values = _targets(ctx, vectors, batch_size)  # (O K, G)
    on = torch.from_numpy(vectors)
    excess = ctx.density.excess(on).numpy()
    terminals = folder.stacked_field("terminals", range(len(vectors)))[:, :ctx.plan.step + 1]
    away = excess + -np.log1p(-np.minimum(terminals.astype(np.float64), 1 - 1e-7)).sum(axis=1)
    (nearest,), (cosine,) = (part.T for part in ctx.density.nearest(on, 1))
    rows, best = [], []
    for number, order in enumerate(ctx.orders):
        column, scale, recorded = ctx.columns[number], ctx.scale(number), ctx.scores(number)
        real = scale.score(ctx.starts.real[:, column].astype(np.float64), order.sign)
        begins, samples = ctx.begins(number), list(ctx.numbers(number))
        score = scale.score(values[samples, column].astype(np.float64), order.sign)
        best.append(samples[int(np.argmax(score - penalty * away[samples]))])
        for begin, sample, own in zip(begins, samples, score):
            value, place = float(values[sample, column]), nearest[sample]
            rows.append({
                "penalty": penalty, "order": number, "target": order.target.name,
                "aim": order.aim, "sample": sample, "best": sample == best[-1], "value": value,
                "score": own, "begin_score": recorded[begin],
                "recorded_score": recorded[-ctx.best_of:].max(),
                "beyond_best": own > recorded[-ctx.best_of:].max() + LEAST,
                "beyond_simulated": own > np.quantile(recorded, QUANTILE) + LEAST,
                "beyond_real": own > np.quantile(real, QUANTILE) + LEAST,
                "excess": excess[sample], "typical": excess[sample] == 0,
                "end": terminals[sample].max(),
                "nearest_window": ctx.starts.windows[place],
                "nearest_episode": ctx.starts.episodes[place],
                "nearest_frame": ctx.starts.frames[place], "nearest_cosine": cosine[sample],
                "nearest_score": recorded[place]})
    return pd.DataFrame(rows), np.array(best)


@torch.no_grad()
def _targets(ctx: SearchContext, vectors: np.ndarray, batch_size: int,
             uniform: np.ndarray | None = None) -> np.ndarray:
    """All targets in rollouts from vectors (B, V): (B, G).

    Args:
        uniform: random numbers for the latents, see ``PresetDraw`` (draws, B, S).
    """
    targets, step, found = _all_targets(ctx), ctx.plan.step, []
    for begin in range(0, len(vectors), batch_size):
        some = slice(begin, begin + batch_size)
        draw = None if uniform is None else PresetDraw(torch.from_numpy(uniform[:, some]).to(
            ctx.compute.device))
        _, answers = rollout(ctx.simulator, ctx.compute,
                             torch.from_numpy(vectors[some]).to(ctx.compute.device), step + 1,
                             layers_of(targets), draw)
        found.append(read(targets, answers, step))
    return np.concatenate(found)


def _all_targets(ctx: SearchContext) -> list:
    """Targets in the order of the columns."""
    by_column = {column: order.target for column, order in zip(ctx.columns, ctx.orders)}
    return [by_column[column] for column in sorted(by_column)]


def _scores(ctx: SearchContext, values: np.ndarray) -> np.ndarray:
    """Targets (O, G) of the orders' starts as scores: row the start, column the order (O, O)."""
    return np.stack([ctx.scale(number).score(values[:, ctx.columns[number]].astype(np.float64),
                                              order.sign)
                     for number, order in enumerate(ctx.orders)], axis=1)


def _add_draws(ctx: SearchContext, table: pd.DataFrame, best: np.ndarray, vectors: np.ndarray,
               seed: int) -> None:
    """Add the mean score of the best starts when latents are drawn, the same draws for all."""
    shape = ctx.plan.step + 2, NUM_DRAWS, ctx.simulator.config.stoch_dim
    uniform = np.random.default_rng([seed, _DRAWS]).random(shape, np.float32)
    drawn = _targets(ctx, vectors.repeat(NUM_DRAWS, axis=0), NUM_DRAWS * 4,
                     np.tile(uniform, (1, len(vectors), 1)))
    scores = np.diag(_scores(ctx, drawn.reshape(len(vectors), NUM_DRAWS, -1).mean(axis=1)))
    table["score_drawn"] = np.nan
    table.loc[table["sample"].isin(best), "score_drawn"] = scores


def _add_real(ctx: SearchContext, table: pd.DataFrame, best: np.ndarray,
              recording: RolloutFolder) -> np.ndarray:
    """Add what the real game shows of the best starts; returns all percentiles (O, O)."""
    chosen = table[table["sample"].isin(best)]
    rows = pd.Index(ctx.starts.windows).get_indexer(chosen["nearest_window"])
    percentiles, ended = _real_percentiles(ctx, rows, recording)
    table["real_percentile"], table["ended"] = np.nan, np.nan
    table.loc[chosen.index, "real_percentile"] = np.diag(percentiles)
    table.loc[chosen.index, "ended"] = ended.astype(float)
    return percentiles


def _real_percentiles(ctx: SearchContext, rows: np.ndarray,
                      recording: RolloutFolder) -> tuple[np.ndarray, np.ndarray]:
    """Percentiles in the real game from recorded starts (O,), row the start and column the order
    (O, O), and whether the episode ended before the step (O,)."""
    unique, place = np.unique(rows, return_inverse=True)
    targets = _all_targets(ctx)
    answers, ended = play_on(
        ctx.simulator.agent, ctx.compute, recording,
        [ctx.dataset.place(int(window)) for window in ctx.starts.windows[unique]],
        ctx.plan.step, layers_of(targets))
    values = read(targets, answers, ctx.plan.step)[place]  # (O, G)
    columns = []
    for number, order in enumerate(ctx.orders):
        recorded = order.sign * ctx.starts.real[:, ctx.columns[number]]
        own = order.sign * values[:, ctx.columns[number]]
        columns.append([(recorded < each).mean() + (recorded == each).mean() / 2 for each in own])
    return np.array(columns).T, ended[place]


def _effects(ctx: SearchContext, scores: dict, percentiles: dict, seed: int) -> pd.DataFrame | None:
    """Effects of all arms; see the module."""
    orders = range(len(ctx.orders))
    if len(set(ctx.columns)) < MIN_STARTS:
        return None
    recorded = np.stack([ctx.scores(number) for number in orders])  # (O, N)
    rng = np.random.default_rng([seed, _SUBSETS])
    subsets = [rng.permutation(recorded.shape[1])[:ctx.best_of] for _ in range(NUM_SUBSETS)]
    drawn = {f"control {number}": recorded[:, subset].max(axis=1)
             for number, subset in enumerate(subsets, start=1)}
    values = {name: {"": np.diag(matrix), **drawn} for name, matrix in scores.items()}
    tables = [_compared(ctx, SCORE, recorded[:, -ctx.best_of:].max(axis=1), values, seed)]
    if percentiles:
        values = {name: {f"control {shift}" if shift else "": _shifted(matrix, shift)
                         for shift in (0, *_shifts(ctx))} for name, matrix in percentiles.items()}
        tables.append(_compared(ctx, PERCENTILE, np.full(len(orders), 0.5), values, seed))
    return pd.concat(tables, ignore_index=True)


def _compared(ctx: SearchContext, outcome: Outcome, before: np.ndarray,
              values: dict[object, dict[str, np.ndarray]], seed: int) -> pd.DataFrame:
    """Effects on one outcome.

    Args:
        before: of each order (O,).
        values: by arm, of the arm itself ("") and of its controls (O,).
    """
    arms, after = [], []
    for name, found in values.items():
        label = name if name == RECORDED else f"penalty {name:g}"
        for control, each in found.items():
            arms.append(Condition(f"{label}, {control}" if control else label, label, label,
                                  bool(control)))
            after.append(each[:, None])
    return compare_conditions(arms, [outcome], before[:, None], np.stack(after), seed,
                              np.array(ctx.columns))


def _shifts(ctx: SearchContext) -> list[int]:
    """Numbers of orders by which starts are moved to other targets."""
    columns = np.array(ctx.columns)
    return [shift for shift in range(1, len(columns))
            if (np.roll(columns, -shift) != columns).all()]


def _shifted(matrix: np.ndarray, shift: int) -> np.ndarray:
    """Each order's target in the start of the order so many places further."""
    number = np.arange(len(matrix))
    return matrix[(number + shift) % len(matrix), number]


def share_text(values: pd.Series) -> str:
    """A share with Wilson's 95 % interval (1927), as text."""
    found, low, high = share(int(values.astype(bool).sum()), len(values))
    return (f"{100 * found:.0f} % ({100 * low:.0f} to {100 * high:.0f}; "
            f"{round(found * len(values))} of {len(values)})")


def play_on(agent: FrozenAgent, compute: Compute, folder: RolloutFolder,
            places: Sequence[WindowPlace], step: int,
            layers: tuple[str, ...]) -> tuple[Answers, np.ndarray]:
    """Replay recordings up to a frame each, and let the agent take its likeliest actions then.

    The state that enters at the frame is the recorded one.

    Args:
        step: last step, counted from the frame, as a simulation's are.

    Returns:
        The answers (T, P), those at the last frame again where an episode ended before; and whether
        it did, bool (P,).

    Raises:
        UserError: if a replay shows other frames than the recording, naming episode and step.
    """
    slots = LevelSlots(recorded_game(folder), len(places))
    hidden = np.zeros((len(places), agent.policy.hidden_state_size), np.float32)
    try:
        for slot, place in enumerate(places):
            for _ in replay(slots, slot, folder, place.episode, place.frame):
                pass
            states = folder.array_files(place.episode).hidden_states
            hidden[slot] = states.rows(place.frame, place.frame + 1)[0]
        return _played(agent, compute, slots, torch.from_numpy(hidden).to(compute.device), step,
                       layers)
    finally:
        slots.close()


@torch.no_grad()
def _played(agent: FrozenAgent, compute: Compute, slots: LevelSlots, hidden: torch.Tensor,
            step: int, layers: tuple[str, ...]) -> tuple[Answers, np.ndarray]:
    """Where an episode has ended, the agent sees its last frame again, in the same state."""
    frames, ended, outputs = slots.frames.copy(), np.zeros(len(hidden), dtype=bool), []
    with compute.autocast(), cached(agent.policy, layers, graph=True) as activations:
        for t in range(step + 1):
            images = to_images(torch.from_numpy(frames.copy()).to(compute.device),
                               compute.channels_last)
            outputs.append(agent.step(images, hidden))
            if t == step:
                break
            actions = outputs[-1].log_probs.argmax(dim=-1).tolist()
            for slot in np.flatnonzero(~ended):
                ended[slot] = slots.step(slot, actions[slot])[1]
            going = torch.from_numpy(~ended)
            frames[~ended] = slots.frames[~ended]
            hidden = torch.where(going.unsqueeze(-1).to(hidden.device), outputs[-1].hidden_states,
                                 hidden)
    return Answers.of(outputs, activations, agent.policy), ended
