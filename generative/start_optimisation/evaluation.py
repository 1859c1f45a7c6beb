"""Compare optimised starts with their controls, in the simulator and in the real game, and report.

Only the best start of each objective, by score minus penalty, is compared. Its ``score`` is the
deviation of the simulated target from the mean over recorded starts, in standard deviations and
with the sign of the objective. In the statistics of ``stats.effects``, each objective is a row, and
objectives of one group of targets (see ``paired``) are resampled together. Each penalty is one
condition of this comparison. There are up to four outcomes:

- ``score``: the score, minus the score of the best of ``best_of`` recorded starts from which no
  search began; by default, they are as many as the starts that the searches evaluated.
- ``gain``: the score, minus the score of the best start from which the searches for the objective
  began.
- ``over_prior``, with a trained prior: the score, minus the score of the best of as many random
  samples of the prior as the searches for the objective evaluated; none of these samples took part
  in the search.
- ``percentile``: percentile in the real game. The recording is replayed up to the recorded start
  nearest to the optimised start; then the agent continues. In a search over vectors, recorded
  starts from which searches may begin are excluded. The outcome is the share of recorded values
  that are lower than the target at the step (higher if the objective minimises the target; equal
  values count half), minus 0.5. Two further conditions use other starts instead: ``recorded`` the
  best recorded start, and ``beginning`` the best start from which the searches began (in noise: the
  recorded start nearest to it).

A control of the first three outcomes is the best of an equal number of starts redrawn from all
recorded starts, or from all samples of the prior. A control of the percentile shifts the starts of
a condition by j objectives: the target of objective i is read in the start of objective i + j.
There is a control for every shift j that gives each objective the start of another target.

Letters in shape comments: O objectives, K starts of each, N recorded starts, G targets, P samples
of the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from agents.hooks import cached
from agents.rollout_files import RolloutFolder
from common.palette import BLUE, DARK_GREY, DPI, GREEN, ORANGE, VERMILION
from common.tables import markdown_table
from generative.batches import divide
from generative.dream_life import play_from
from generative.saliency.gradients import title_of
from generative.sample_files import SampleFolder
from generative.start_optimisation.objectives import (
    AIMS,
    TYPICAL_SHARE,
    Rollouts,
    layers_of,
    read,
    rollout,
)
from generative.start_optimisation.paired import (
    LEAST,
    SHOWN,
    compare_pairs,
    find_moved,
    paired_report,
)
from generative.start_optimisation.prior_starts import prior_loss
from generative.start_optimisation.search import NOISE, VECTOR, SearchContext
from generative.start_worlds import on
from stats.effects import MIN_STARTS, Condition, Outcome, compare_conditions
from stats.report import bold, format_interval, format_p, format_range, format_share
from stats.significance import LEVEL

QUANTILE = 0.999  # quantile of recorded values above which a start is extreme
SCORE = Outcome("score", "score, less that of the best recorded start (deviations)")
GAIN = Outcome("gain", "score, less that of the beginning of the search (deviations)")
OVER_PRIOR = Outcome("over_prior", "score, less that of random samples of the prior (deviations)")
PERCENTILE = Outcome("percentile", "percentile in the real game", probability=True)
RECORDED, BEGINNING = "recorded", "beginning"  # conditions of starts that are not optimised
NUM_SUBSETS = 20  # subsets of starts that serve as controls
_SUBSETS = 3  # random stream; part of the generator's seed
_COLOURS = (BLUE, VERMILION, ORANGE)
_CONDITIONS = {RECORDED: "best recorded start", BEGINNING: "beginning of the search"}
_TITLES = {SCORE.name: "the best recorded start, in deviations",
           GAIN.name: "the beginning of the search, in deviations",
           OVER_PRIOR.name: "the best random prior sample, in deviations",
           PERCENTILE.name: "0.5, percentile in the real game"}


def evaluate(context: SearchContext, folders: dict[float, SampleFolder],
             recording: RolloutFolder | None, batch_size: int, seed: int,
             ) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame | None]:
    """Compute all targets in rollouts from the optimised starts, and compare with the controls.

    Args:
        folders: sample folders by penalty.
        recording: rollouts that contain the recorded starts; None leaves out the real game.
        batch_size: number of rollouts per batch.

    Returns:
        Three tables. The first is ``starts.csv``, with a row for each penalty, objective and start.
        Its column ``best`` marks the best start of each objective with each penalty; the columns
        about the real game are NaN for all other starts. The second is the table of
        ``compare_pairs``. The third is the table of ``compare_conditions`` for all outcomes;
        ``percentile`` needs a recording. It is None with fewer than ``MIN_STARTS`` groups of
        targets, which are too few for an interval.
    """
    tables: list[pd.DataFrame] = []
    scores, percentiles = {}, {}
    for penalty, folder in folders.items():
        condition, table = f"penalty {penalty:g}", _table_of(context, folder, penalty, batch_size)
        is_best = table["best"]
        best_samples = table["sample"][is_best].tolist()
        values, _ = _targets(context, folder, best_samples, batch_size)
        scores[condition] = context.scores(values)  # (O, O)
        if recording is not None:
            rows = pd.Index(context.starts.windows).get_indexer(table["nearest_window"][is_best])
            percentiles[condition], ended = _real_percentiles(context, rows, recording)
            table.loc[is_best, "real_percentile"] = np.diag(percentiles[condition])
            table.loc[is_best, "ended"] = ended.astype(float)
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    if recording is not None:
        best = context.recorded_scores[context.pool:].argmax(axis=0) + context.pool  # (O,)
        for condition, rows, column in ((RECORDED, best, "recorded_percentile"),
                                        (BEGINNING, _recorded_begins(context), "begin_percentile")):
            percentiles[condition], _ = _real_percentiles(context, rows, recording)
            own = np.diag(percentiles[condition])
            table[column] = np.where(table["best"], own[table["order"]], np.nan)
    return (table, compare_pairs(table, context.groups, seed),
            compare_with_controls(context, scores, percentiles, seed))


def _recorded_begins(context: SearchContext) -> np.ndarray:
    """Return the rows (O,) of the best recorded starts from which searches began.

    In noise, they are the recorded starts nearest to the best beginnings.
    """
    if context.space == VECTOR:
        return np.array([context.begins(number)[0] for number in range(len(context.objectives))])
    vectors = torch.cat([vectors[:1] for vectors, _ in context.begin_starts])
    return context.nearest(vectors.cpu().numpy(), 1)[0][:, 0]


def _table_of(context: SearchContext, folder: SampleFolder, penalty: float,
              batch_size: int) -> pd.DataFrame:
    """Return the rows of ``starts.csv`` for one penalty.

    Args:
        folder: samples of the optimised starts with this penalty.
    """
    starts, objectives = context.starts, context.objectives
    samples = np.arange(len(objectives) * context.num_starts)
    order = samples // context.num_starts  # objective of each sample (O K,)
    vectors = folder.stacked_field("bottleneck_vec", samples.tolist())
    values, losses = _targets(context, folder, samples.tolist(), batch_size)  # (O K, G), (O K,)
    excess = context.density.excess(torch.from_numpy(vectors)).numpy()  # (O K,)
    terminals = folder.stacked_field("terminals", samples.tolist())[:, :context.plan.step + 1]
    away = excess + -np.log1p(-np.minimum(terminals.astype(np.float64), 1 - 1e-7)).sum(axis=1)
    (nearest,), (cosine,) = (part.T for part in context.nearest(vectors, 1))
    score = context.scores(values)[samples, order]
    best = (score - penalty * away).reshape(-1, context.num_starts).argmax(axis=1)  # (O,)
    begin_scores = np.concatenate([context.begin_scores(number)
                                   for number in range(len(objectives))])  # (O K,)
    recorded = context.recorded_scores  # (N, O)
    best_recorded = recorded[-context.best_of:].max(axis=0)[order]
    simulated, real = (np.quantile(scores, QUANTILE, axis=0)[order]
                       for scores in (recorded, context.scores(starts.real)))
    table = pd.DataFrame({
        "penalty": penalty, "order": order,
        "target": [objectives[number].target.name for number in order],
        "aim": [objectives[number].aim for number in order], "sample": samples,
        "best": samples % context.num_starts == best[order],
        "value": values[samples, context.columns[order]].astype(float), "score": score,
        "moved": find_moved(context, folder),
        "begin_score": begin_scores, "best_begin_score": begin_scores[order * context.num_starts],
        "recorded_score": best_recorded,
        "beyond_best": score > best_recorded + LEAST,
        "beyond_simulated": score > simulated + LEAST, "beyond_real": score > real + LEAST,
        "excess": excess, "typical": excess == 0, "end": terminals.max(axis=1),
        "nearest_window": starts.windows[nearest], "nearest_episode": starts.episodes[nearest],
        "nearest_frame": starts.frames[nearest], "nearest_cosine": cosine,
        "nearest_score": recorded[nearest, order]})
    if context.prior is not None and context.prior_scores is not None:
        fresh = context.prior.loss[context.pool:]
        table["prior_score"] = context.prior_scores[context.pool:].max(axis=0)[order]
        table["prior_loss"] = losses
        table["prior_percentile"] = [(fresh < loss).mean() for loss in losses]
        rows = recorded[context.pool:].argmax(axis=0) + context.pool  # (O,)
        world = on(context.worlds(rows), context.compute)
        assert world is not None
        losses = prior_loss(context.simulator, torch.from_numpy(starts.vectors[rows]).to(
            context.compute.device), world)
        table["recorded_prior_percentile"] = np.array([
            (fresh < loss).mean() for loss in losses])[order]
    return table


@torch.no_grad()
def _targets(context: SearchContext, folder: SampleFolder, samples: Sequence[int],
             batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate B samples again, and read all targets (B, G).

    Returns:
        The targets, and the samples' prior losses (B,), which are NaN without a trained prior.
    """
    targets, step, compute = context.targets, context.plan.step, context.compute
    values, losses = [], []
    for batch in divide(samples, batch_size):
        vectors = torch.from_numpy(folder.stacked_field("bottleneck_vec", batch)).to(compute.device)
        world = on(folder.worlds(batch), compute)
        _, rollouts = rollout(context.simulator, compute, vectors, step + 1, layers_of(targets),
                              world)
        values.append(read(targets, rollouts, step))
        losses.append(np.full(len(batch), np.nan) if context.prior is None or world is None
                      else prior_loss(context.simulator, vectors, world))
    return np.concatenate(values), np.concatenate(losses)


def _real_percentiles(context: SearchContext, rows: np.ndarray,
                      recording: RolloutFolder) -> tuple[np.ndarray, np.ndarray]:
    """Replay recordings up to recorded starts, let the agent continue, and compute percentiles.

    Args:
        rows: rows of the recorded starts, one per objective (O,).

    Returns:
        Percentiles (O, O), with a row per start and a column per objective; and whether the episode
        ended before the step (O,).
    """
    unique, place = np.unique(rows, return_inverse=True)
    targets, step, agent = context.targets, context.plan.step, context.simulator.agent
    places = [context.dataset.place(int(window)) for window in context.starts.windows[unique]]
    with cached(agent.policy, layers_of(targets), graph=True) as activations:
        outputs, _, ends = play_from(agent, context.compute, recording, places, step)
    values = read(targets, Rollouts.of(outputs, activations, agent.policy), step)[place]  # (O, G)
    percentiles = []
    for objective, column in zip(context.objectives, context.columns):
        sign = AIMS[objective.aim]
        recorded = sign * context.starts.real[:, column]
        percentiles.append([(recorded < value).mean() + (recorded == value).mean() / 2
                            for value in sign * values[:, column]])
    return np.array(percentiles).T, ends.any(axis=0)[place]


def compare_with_controls(context: SearchContext, scores: dict[str, np.ndarray],
                          percentiles: dict[str, np.ndarray], seed: int) -> pd.DataFrame | None:
    """Estimate the effects of optimised starts on all outcomes.

    Args:
        scores: scores of the best starts, by condition ("penalty 0.1" and so on). Each array (O, O)
            has a row per start and a column per objective.
        percentiles: percentiles in the real game, by condition, including the conditions
            ``RECORDED`` and ``BEGINNING``; arrays as in ``scores``.

    Returns:
        The table of ``compare_conditions``; None with fewer than ``MIN_STARTS`` groups of targets.
    """
    columns, groups, pool = context.columns, context.groups, context.pool  # (O,), (O,)
    if len(set(groups)) < MIN_STARTS:
        return None
    recorded, prior = context.recorded_scores, context.prior_scores  # (N, O), (P, O)
    searched = recorded if prior is None or context.space == VECTOR else prior
    references = [(SCORE, recorded, slice(pool, None)), (GAIN, searched, slice(pool))]
    if prior is not None:
        references.append((OVER_PRIOR, prior, slice(pool, None)))
    outcomes = []
    for outcome, reference, rows in references:
        rng, size = np.random.default_rng([seed, _SUBSETS]), len(reference[rows])
        controls = {f"control {number}": reference[rng.permutation(len(reference))[:size]].max(
            axis=0) for number in range(1, NUM_SUBSETS + 1)}
        outcomes.append((outcome, reference[rows].max(axis=0), {
            (condition, control): values for condition, matrix in scores.items()
            for control, values in {"": np.diag(matrix), **controls}.items()}))
    if percentiles:
        number = np.arange(len(columns))
        # Cyclic shifts of objectives that give each objective another target; 0 for its own.
        shifts = [0, *(shift for shift in number if (np.roll(columns, -shift) != columns).all())]
        outcomes.append((PERCENTILE, np.full(len(columns), 0.5), {
            (condition, f"control {shift}" if shift else ""): matrix[(number + shift) % len(matrix),
                                                                     number]
            for condition, matrix in percentiles.items() for shift in shifts}))
    tables = []
    for outcome, before, after in outcomes:
        conditions: list[Condition] = [
            Condition(f"{name}, {control}" if control else name, name, name, bool(control))
            for name, control in after]
        tables.append(compare_conditions(conditions, [outcome], before[:, None],
                                         np.stack(list(after.values()))[..., None], seed, groups))
    return pd.concat(tables, ignore_index=True)


def report(context: SearchContext, starts: pd.DataFrame, pairs: pd.DataFrame,
           effects: pd.DataFrame | None, real_game: bool) -> str:
    """Format the report as Markdown.

    Args:
        starts, pairs, effects: tables from ``evaluate``.
        real_game: whether the starts were compared in the real game.
    """
    best = starts[starts["best"]]
    by_penalty = {penalty: best[best["penalty"] == penalty] for penalty in best["penalty"].unique()}
    titles = [f"penalty {penalty:g}" for penalty in by_penalty]
    number, step = len(context.starts.windows), context.plan.step

    def shares(column: str) -> list[str]:
        return [format_share(rows[column]) for rows in by_penalty.values()]

    def medians(column: str) -> list[str]:
        return [f"{rows[column].median():.2f}" for rows in by_penalty.values()]

    def beyond(column: str) -> list[str]:
        return [format_share(rows["score"] > rows[column] + LEAST) for rows in by_penalty.values()]

    if context.space == NOISE:
        space = (f"the noise of the prior, whose norm is kept. Searches begin from the best of "
                 f"{context.pool} random samples of the prior")
        penalty = "The penalty grows with the probability that the simulated episode has ended."
    else:
        space = (f"vectors on the unit sphere. Searches begin from the best of {context.pool} "
                 "recorded starts, and keep their worlds")
        penalty = ("The penalty grows with the distance from recorded starts and with the "
                   "probability that the simulated episode has ended.")
    rows = [
        (f"beyond the {100 * QUANTILE:.1f} % quantile of recorded starts, simulated",
         *shares("beyond_simulated")),
        (f"beyond the {100 * QUANTILE:.1f} % quantile of recorded values", *shares("beyond_real")),
        (f"beyond the best of {context.best_of} recorded starts", *shares("beyond_best")),
        ("beyond the beginning of the search", *beyond("best_begin_score")),
        ("searches that returned another start than their beginning",
         *(format_share(starts["moved"][starts["penalty"] == penalty]) for penalty in by_penalty)),
        ("typical start", *shares("typical")),
        ("the simulated episode has ended by the step (probability of 0.5 or more)",
         *(format_share(rows["end"] >= 0.5) for rows in by_penalty.values())),
        ("score, median", *medians("score")),
        ("score at the beginning of the search, median", *medians("best_begin_score")),
        ("score of the best recorded start, median", *medians("recorded_score")),
        ("score of the nearest recorded start, median", *medians("nearest_score"))]
    prior_text = []
    if context.prior is not None:
        random = len(context.prior.seeds) - context.pool
        rows[4:4] = [(f"beyond the best of {random} random prior samples", *beyond("prior_score"))]
        rows += [("score of the best random prior sample, median", *medians("prior_score")),
                 ("prior loss: percentile among random prior samples, median",
                  *medians("prior_percentile")),
                 ("prior loss of the best recorded start: the same percentile, median",
                  *medians("recorded_prior_percentile"))]
        prior_text = [
            f"The {random} random prior samples took no part in any search. The searches for an "
            f"objective also evaluated {random} starts: {context.pool} candidates to begin from, "
            f"and {context.num_starts} starts in each of {context.plan.iterations} iterations. The "
            "prior loss is the error of the prior when it denoises a start: a high percentile "
            "means that few random prior samples are as improbable under the prior.", ""]
    lines = [
        "# Optimised starts", "",
        f"There are {len(context.objectives)} objectives with {context.num_starts} starts each, "
        f"optimised for {context.plan.iterations} iterations through {step + 1} simulated steps. "
        f"Targets are read at step {step}, counted from 0. The search varies {space}. Their "
        f"results are compared with the best of these, and with the best of {context.best_of} "
        "recorded starts from which no search began. The searches for an objective evaluated "
        f"{context.num_evaluated} starts. A score is the deviation of the simulated "
        f"target from its mean over all {number} recorded starts, in standard deviations, with the "
        "sign of the aim. For each objective, only the start with the highest score minus penalty "
        f"counts. {penalty}", "",
        "Nothing is sampled: latents take their most likely class, and the agent takes its most "
        "likely action, so a start has one rollout. Both pass straight-through gradients, which "
        "are biased, so the best start of each search is kept, not the last.", "",
        "## Comparison in the simulator", "",
        f"A score is beyond another if it is larger by more than {LEAST}, because saturated units "
        "differ by rounding. A start is typical if its density among recorded start vectors is "
        f"above that of {100 * TYPICAL_SHARE:.0f} % of them. Intervals of shares are Wilson's 95 % "
        "intervals.", "", *prior_text, *markdown_table(("", *titles), rows)]
    if number * (1 - QUANTILE) < 1:
        lines += [f"With {number} recorded starts the {100 * QUANTILE:.1f} % quantile lies between "
                  "the largest two.", ""]
    if real_game:
        first = next(iter(by_penalty.values()))
        others = [first["recorded_percentile"], first["begin_percentile"]]
        near = ("" if context.space == NOISE else
                ", except the starts from which searches may begin")
        lines += ["## In the real game", "",
                  "The recording is replayed up to the recorded start that is nearest to the "
                  f"optimised start{near}; then the agent continues. A target counts as shown if "
                  f"its value at step {step} is beyond {100 * SHOWN:.0f} % of the recorded values; "
                  f"{100 * (1 - SHOWN):.0f} % would be by chance.", "",
                  *markdown_table(("", *titles, *_CONDITIONS.values()), [
                      ("shown", *(format_share(rows["real_percentile"] >= SHOWN)
                                  for rows in by_penalty.values()),
                       *(format_share(values >= SHOWN) for values in others)),
                      ("percentile, median", *medians("real_percentile"),
                       *(f"{values.median():.2f}" for values in others)),
                      ("ended before the step", *shares("ended"), "", "")])]
    return "\n".join([*lines, *paired_report(pairs), *_effects(effects), *_objectives(best), ""])


def _effects(table: pd.DataFrame | None) -> list[str]:
    if table is None:
        return ["## What may be claimed", "", "Nothing: intervals need at least "
                f"{MIN_STARTS} groups of targets.", ""]
    return ["## What may be claimed", "",
            "Means and medians over objectives, with 95 % bootstrap intervals over groups of "
            "targets. An effect is **claimed** if its interval excludes 0 and both p (Holm) and "
            f"p (controls) are at most {LEVEL}. Controls of the score: the best start of each of "
            f"{NUM_SUBSETS} other draws of the starts that it is compared with. Controls of the "
            "percentile: the starts of other objectives.", "", *markdown_table(
                ("condition", "compared with", "mean", "median", "p (Holm)", "controls",
                 "p (controls)", "verdict"),
                [(_CONDITIONS.get(row.condition, row.condition), _TITLES[row.outcome],
                  format_interval(row.effect, row.low_95, row.high_95, "+.3g"),
                  format_interval(row.median_effect, row.median_low_95, row.median_high_95,
                                  "+.3g"),
                  format_p(row.p_holm), format_range(row.control_low, row.control_high),
                  format_p(row.p_control), bold(row.verdict, row.claimed))
                 for row in table[~table["control"]].itertuples()])]


def _objectives(best: pd.DataFrame) -> list[str]:
    """Format the table of objectives, with a row for each objective and penalty."""
    rows = []
    for row in best.sort_values(["order", "penalty"], ascending=[True, False]).itertuples():
        real = getattr(row, "real_percentile", np.nan)
        rows.append((f"[{row.aim} {title_of(row.target)}](pictures/order_{row.order:03d}.png)",
                     f"{row.penalty:g}", f"[{row.sample}](penalty_{row.penalty:g}/videos/"
                     f"sample_{row.sample:05d}.mp4)", f"{row.value:.3g}", f"{row.score:.2f}",
                     f"{row.best_begin_score:.2f}", f"{row.recorded_score:.2f}",
                     "yes" if row.typical else f"{row.excess:.2f}",
                     f"{row.nearest_episode}, {row.nearest_frame} ({row.nearest_cosine:.2f})",
                     "" if np.isnan(real) else f"{real:.2f}"))
    return ["## Objectives", "", *markdown_table(
        ("objective", "penalty", "video", "target", "score", "beginning", "best recorded",
         "typical, or excess",
         "nearest: episode, frame (cosine)", "percentile in the real game"), rows)]


def plot(path: Path, starts: pd.DataFrame) -> None:
    """Plot the score of each objective's optimised starts, and of the starts without optimisation.

    If the real game was played, a second panel shows the percentiles that the objectives' targets
    reach there.
    """
    best = starts[starts["best"]]
    penalties = best["penalty"].unique()
    first = best[best["penalty"] == penalties[0]].sort_values("recorded_score")
    order = first["order"].tolist()
    real = "real_percentile" in best
    figure = Figure(figsize=(15 if real else 8, 1.8 + 0.2 * len(order)), layout="constrained")
    panels = figure.subplots(1, 2 if real else 1, squeeze=False, sharey=True)[0]
    rows = np.arange(len(order))
    for axes, column, recorded, begin, label in zip(
            panels, ("score", "real_percentile"), ("recorded_score", "recorded_percentile"),
            ("best_begin_score", "begin_percentile"),
            ("score, in deviations of recorded starts",
             "percentile of the target in the real game (green: shown)")):
        axes.plot(first[recorded], rows, "|", label="best recorded start", color=DARK_GREY,
                  markersize=10, markeredgewidth=2)
        for penalty, colour in zip(penalties, _COLOURS):
            points = best[best["penalty"] == penalty].set_index("order").loc[order]
            axes.plot(points[column], rows, "o", color=colour, markersize=4,
                      label=f"optimised, penalty {penalty:g}")
        axes.plot(first[begin], rows, ".", label="beginning", color=DARK_GREY, markersize=4)
        if column == "score" and "prior_score" in first:
            axes.plot(first["prior_score"], rows, "|", label="best random prior sample",
                      color=GREEN, markersize=10, markeredgewidth=2)
        axes.set(xlabel=label, ylim=(-0.7, len(order) - 0.3))
        axes.grid(alpha=0.3)
    panels[0].set_yticks(rows, (first["aim"] + " " + first["target"].map(title_of)).tolist(),
                         fontsize=7)
    if real:
        panels[1].axvline(0.5, color=DARK_GREY, linewidth=0.8)
        panels[1].axvspan(SHOWN, 1, color=GREEN, alpha=0.15, linewidth=0)
        panels[1].set_xlim(-0.02, 1.02)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  fontsize=9)
    answer = [f"{(first['score'] > first['recorded_score']).sum()} of {len(first)} optimised "
              "starts score above the best recorded start"]
    if real:
        answer.append(f"in the real game, {(first['real_percentile'] >= SHOWN).sum()} of "
                      f"{first['real_percentile'].notna().sum()} show their target")
    figure.suptitle("; ".join(answer), fontsize=11)
    figure.savefig(path, dpi=DPI)
