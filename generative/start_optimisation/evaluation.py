"""Optimised starts compared with recorded starts, in the simulator and in the real game.

Only the best start of each objective, by score minus penalty, is compared. Its ``score`` is the
simulated target in standard deviations from its mean over recorded starts, with the sign of the
objective. In the statistics of ``stats.effects``, each objective is a row, and objectives with the
same target are resampled together. Outcomes:

- ``score``: score minus the score of the best of ``best_of`` recorded starts from which no search
  began. Each control is the best of as many recorded starts, redrawn from all recorded starts.
- ``percentile``: percentile in the real game. The recording is replayed up to the recorded start
  nearest to the optimised start, then the agent continues; the outcome is the share of the recorded
  values that the target at the step exceeds (in the objective's direction), minus 0.5. The arm
  ``recorded`` uses the best recorded start instead. Each control swaps the starts of the same arm
  between objectives: the target of objective i is read in the start of objective i + j, for every j
  that gives each objective another target.

Letters in shape comments: O objectives, K starts of each, N recorded starts, G targets, V vector,
P plays, T steps, D agent hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from agents.hooks import cached
from agents.networks import to_images
from agents.rollout_files import RolloutFolder
from common.devices import Compute
from generative.dataset import WindowPlace
from generative.dream_life import games_at
from generative.frozen_agent import FrozenAgent
from generative.networks import PresetDraw
from generative.sample_files import SampleFolder
from generative.start_optimisation.objectives import Rollouts, Target, rollout
from generative.start_optimisation.recorded_starts import layers_of, read
from generative.start_optimisation.search import SearchContext
from stats.effects import MIN_STARTS, Condition, Outcome, compare_conditions

QUANTILE = 0.999  # quantile of recorded values above which a start is extreme
LEAST = 0.01  # smallest excess that counts, in deviations: saturated units differ by rounding
SHOWN = 0.95  # percentile from which the target counts as shown in the real game
NUM_DRAWS = 8  # draws of the latents for each best start
SCORE = Outcome("score", "score, less that of the best recorded start (deviations)")
PERCENTILE = Outcome("percentile", "percentile in the real game", probability=True)
RECORDED = "recorded"  # arm of the best recorded starts
NUM_SUBSETS = 20  # subsets of the recorded starts that serve as controls
_DRAWS, _SUBSETS = 2, 3  # random streams; part of the generators' seeds


def evaluate(context: SearchContext, folders: dict[float, SampleFolder],
             recording: RolloutFolder | None, batch_size: int, seed: int,
             ) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Read all targets in all optimised starts and compare these starts with recorded starts.

    Args:
        folders: sample folders by penalty.
        recording: rollouts that contain the recorded starts; None leaves out the real game.

    Returns:
        The table ``starts.csv``, with a row for each penalty, objective and start: ``best`` marks
        the best start of an objective, and only this start has values in the columns about the real
        game and drawn latents. And the table of ``compare_conditions`` for the outcomes ``score``
        and ``percentile``; None with fewer than ``MIN_STARTS`` targets, too few for an interval.
    """
    tables: list[pd.DataFrame] = []
    scores: dict[float | str, np.ndarray] = {}
    percentiles: dict[float | str, np.ndarray] = {}
    for penalty, folder in folders.items():
        table = _table_of(context, folder, penalty, batch_size)
        is_best = table["best"]
        vectors = folder.stacked_field("bottleneck_vec")[table["sample"][is_best]]  # (O, V)
        scores[penalty] = _scores(context, _targets(context, vectors, batch_size))  # (O, O)
        table.loc[is_best, "score_drawn"] = _drawn_scores(context, vectors, seed)
        if recording is not None:
            rows = pd.Index(context.starts.windows).get_indexer(table["nearest_window"][is_best])
            percentiles[penalty], ended = _real_percentiles(context, rows, recording)
            table.loc[is_best, "real_percentile"] = np.diag(percentiles[penalty])
            table.loc[is_best, "ended"] = ended.astype(float)
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    if recording is not None:
        pool = len(context.starts.windows) - context.best_of
        best = np.array([context.scores(number)[pool:].argmax()
                         for number in range(len(context.objectives))]) + pool
        percentiles[RECORDED], _ = _real_percentiles(context, best, recording)
        own = np.diag(percentiles[RECORDED])
        table["recorded_percentile"] = np.where(table["best"], own[table["order"]], np.nan)
    return table, compare_with_recorded(context, scores, percentiles, seed)


def _table_of(context: SearchContext, folder: SampleFolder, penalty: float,
              batch_size: int) -> pd.DataFrame:
    """Rows of ``starts.csv`` for one penalty."""
    vectors = folder.stacked_field("bottleneck_vec", range(
        len(context.objectives) * context.num_starts))
    values = _targets(context, vectors, batch_size)  # (O K, G)
    on = torch.from_numpy(vectors)
    excess = context.density.excess(on).numpy()  # (O K,)
    terminals = folder.stacked_field("terminals", range(len(vectors)))[:, :context.plan.step + 1]
    away = excess + -np.log1p(-np.minimum(terminals.astype(np.float64), 1 - 1e-7)).sum(axis=1)
    (nearest,), (cosine,) = (part.T for part in context.density.nearest(on, 1))
    rows = []
    for number, objective in enumerate(context.objectives):
        column, recorded = context.columns[number], context.scores(number)
        samples, best_recorded = list(context.numbers(number)), recorded[-context.best_of:].max()
        score = context.score(number, values[samples, column])  # (K,)
        real = context.score(number, context.starts.real[:, column])  # (N,)
        best = samples[int(np.argmax(score - penalty * away[samples]))]
        for begin, sample, own in zip(context.begins(number), samples, score):
            place = nearest[sample]
            rows.append({
                "penalty": penalty, "order": number, "target": objective.target.name,
                "aim": objective.aim, "sample": sample, "best": sample == best,
                "value": float(values[sample, column]), "score": own,
                "begin_score": recorded[begin], "recorded_score": best_recorded,
                "beyond_best": own > best_recorded + LEAST,
                "beyond_simulated": own > np.quantile(recorded, QUANTILE) + LEAST,
                "beyond_real": own > np.quantile(real, QUANTILE) + LEAST,
                "excess": excess[sample], "typical": excess[sample] == 0,
                "end": terminals[sample].max(),
                "nearest_window": context.starts.windows[place],
                "nearest_episode": context.starts.episodes[place],
                "nearest_frame": context.starts.frames[place], "nearest_cosine": cosine[sample],
                "nearest_score": recorded[place]})
    return pd.DataFrame(rows)


@torch.no_grad()
def _targets(context: SearchContext, vectors: np.ndarray, batch_size: int,
             uniform: np.ndarray | None = None) -> np.ndarray:
    """Simulate rollouts from vectors (B, V) and read all targets (B, G).

    Args:
        uniform: random numbers for the latents, see ``PresetDraw`` (draws, B, S); None for the most
            likely latents.
    """
    targets, step, values = _all_targets(context), context.plan.step, []
    for begin in range(0, len(vectors), batch_size):
        batch = slice(begin, begin + batch_size)
        draw = None if uniform is None else PresetDraw(torch.from_numpy(uniform[:, batch]).to(
            context.compute.device))
        _, rollouts = rollout(context.simulator, context.compute,
                              torch.from_numpy(vectors[batch]).to(context.compute.device),
                              step + 1, layers_of(targets), draw)
        values.append(read(targets, rollouts, step))
    return np.concatenate(values)


def _all_targets(context: SearchContext) -> list[Target]:
    """Targets in the order of the columns of ``context.starts``."""
    by_column = dict(zip(context.columns, context.objectives))
    return [by_column[column].target for column in sorted(by_column)]


def _scores(context: SearchContext, values: np.ndarray) -> np.ndarray:
    """Convert targets (O, G) to scores (O, O): a row per start, a column per objective."""
    return np.stack([context.score(number, values[:, column])
                     for number, column in enumerate(context.columns)], axis=1)


def _drawn_scores(context: SearchContext, vectors: np.ndarray, seed: int) -> np.ndarray:
    """Mean scores (O,) over drawn latents; all starts share the same draws."""
    shape = context.plan.step + 2, NUM_DRAWS, context.simulator.config.stoch_dim
    uniform = np.random.default_rng([seed, _DRAWS]).random(shape, np.float32)
    values = _targets(context, vectors.repeat(NUM_DRAWS, axis=0), NUM_DRAWS * 4,
                      np.tile(uniform, (1, len(vectors), 1)))
    return np.diag(_scores(context, values.reshape(len(vectors), NUM_DRAWS, -1).mean(axis=1)))


def _real_percentiles(context: SearchContext, rows: np.ndarray,
                      recording: RolloutFolder) -> tuple[np.ndarray, np.ndarray]:
    """Compute percentiles in the real game from recorded starts.

    Args:
        rows: rows of the recorded starts, one per objective (O,).

    Returns:
        Percentiles (O, O), with a row per start and a column per objective; and whether the episode
        ended before the step (O,).
    """
    unique, place = np.unique(rows, return_inverse=True)
    targets = _all_targets(context)
    rollouts, ended = play_on(
        context.simulator.agent, context.compute, recording,
        [context.dataset.place(int(window)) for window in context.starts.windows[unique]],
        context.plan.step, layers_of(targets))
    values = read(targets, rollouts, context.plan.step)[place]  # (O, G)
    percentiles = []
    for objective, column in zip(context.objectives, context.columns):
        recorded = objective.sign * context.starts.real[:, column]
        percentiles.append([(recorded < value).mean() + (recorded == value).mean() / 2
                            for value in objective.sign * values[:, column]])
    return np.array(percentiles).T, ended[place]


def compare_with_recorded(context: SearchContext, scores: dict[float | str, np.ndarray],
                          percentiles: dict[float | str, np.ndarray],
                          seed: int) -> pd.DataFrame | None:
    """Estimate the effects of all arms on the outcomes defined in the module's docstring.

    Args:
        scores: scores of the best starts (O, O), by penalty.
        percentiles: percentiles in the real game (O, O), by penalty and ``RECORDED``.

    Returns:
        The table of ``compare_conditions``; None with fewer than ``MIN_STARTS`` targets.
    """
    columns, numbers = np.array(context.columns), range(len(context.objectives))
    if len(set(context.columns)) < MIN_STARTS:
        return None
    recorded = np.stack([context.scores(number) for number in numbers])  # (O, N)
    rng = np.random.default_rng([seed, _SUBSETS])
    subsets = [rng.permutation(recorded.shape[1])[:context.best_of] for _ in range(NUM_SUBSETS)]
    controls = {f"control {number}": recorded[:, subset].max(axis=1)
                for number, subset in enumerate(subsets, start=1)}
    outcomes = [(SCORE, recorded[:, -context.best_of:].max(axis=1), {
        name: {"": np.diag(matrix), **controls} for name, matrix in scores.items()})]
    if percentiles:
        outcomes.append((PERCENTILE, np.full(len(numbers), 0.5), {
            name: {f"control {shift}" if shift else "": shifted(matrix, shift)
                   for shift in (0, *shifts(columns))} for name, matrix in percentiles.items()}))
    tables = []
    for outcome, before, values in outcomes:
        by_arm = {(name if isinstance(name, str) else f"penalty {name:g}", control): numbers_of_arm
                  for name, by_control in values.items()
                  for control, numbers_of_arm in by_control.items()}
        arms: list[Condition] = [
            Condition(f"{label}, {control}" if control else label, label, label, bool(control))
            for label, control in by_arm]
        tables.append(compare_conditions(arms, [outcome], before[:, None],
                                         np.stack(list(by_arm.values()))[..., None], seed,
                                         columns))
    return pd.concat(tables, ignore_index=True)


def shifts(columns: np.ndarray) -> list[int]:
    """Cyclic shifts of objectives that give each objective another target."""
    return [shift for shift in range(1, len(columns))
            if (np.roll(columns, -shift) != columns).all()]


def shifted(matrix: np.ndarray, shift: int) -> np.ndarray:
    """Read from a matrix (O, O) the target of each objective in the start of the objective
    ``shift`` places later (O,)."""
    number = np.arange(len(matrix))
    return matrix[(number + shift) % len(matrix), number]


def play_on(agent: FrozenAgent, compute: Compute, folder: RolloutFolder,
            places: Sequence[WindowPlace], step: int,
            layers: tuple[str, ...]) -> tuple[Rollouts, np.ndarray]:
    """Replay recordings, each up to a given frame, then let the agent take its most likely actions.

    The agent starts with the recorded hidden state.

    Args:
        places: episodes and frames (P places).
        step: last step; step 0 shows the given frame, as in a simulation.

    Returns:
        The outputs (T, P), which repeat the last frame of an episode that has ended; and whether
        the episode ended before the last step, bool (P,).

    Raises:
        UserError: if a replay deviates from the recorded frames; the message names episode and
            step.
    """
    with (torch.no_grad(), games_at(folder, places) as (slots, states), compute.autocast(),
          cached(agent.policy, layers, graph=True) as activations):
        hidden, frames = states.to(compute.device), slots.frames.copy()
        ended, outputs = np.zeros(len(places), dtype=bool), []
        for t in range(step + 1):
            images = to_images(torch.from_numpy(frames.copy()).to(compute.device),
                               compute.channels_last)  # (P, C, H, W)
            outputs.append(agent.step(images, hidden))
            if t == step:
                break
            actions = outputs[-1].log_probs.argmax(dim=-1).tolist()
            for slot in np.flatnonzero(~ended):
                ended[slot] = slots.step(slot, actions[slot])[1]
            continues = torch.from_numpy(~ended)
            frames[~ended] = slots.frames[~ended]
            hidden = torch.where(continues.unsqueeze(-1).to(hidden.device),
                                 outputs[-1].hidden_states, hidden)  # (P, D)
    return Rollouts.of(outputs, activations, agent.policy), ended
