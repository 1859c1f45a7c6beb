"""Interventions along directions of the hidden state that represent labels.

A push adds a vector of fixed Euclidean norm to the state that leaves a step, to increase or
decrease the decoded value of a label. Its direction is either the weights of the linear probe, or
the covariance of the state with the label, which for a property is parallel to the difference
between the two class means (Haufe et al. 2014). The controls are pushes of the same norm in random
directions. The norm is given in standard deviations of the state along a random direction.

*Open loop*: pushes are applied to recorded states of levels that no probe was trained on, and only
the heads run. Pushes are compared with a full swap, which replaces the state by a randomly drawn
recorded state. If the label is a property, the drawn state has (or lacks) it; if the label is a
number, its value at the drawn state is in the upper (or lower) quarter. The controls of swaps draw
from all states. *Closed loop*: the agent plays, and is pushed at every step.

Layout of the folder that ``analysis/probe_interventions.py`` writes::

    conditions/<condition>.npy    outcomes of all levels under the push <condition>, see
                                  ``closed_outcomes``
    open_loop.csv                 effects on recorded states, see ``with_ratios``
    effects.csv                   effects in the real game, see ``with_ratios``
    report.md, effects.png

Letters in shape comments: N states, D hidden units, A actions, E levels, K outcomes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.failures import causes_of, failure_outcomes
from agents.layers import STATE
from agents.networks import Policy
from agents.similarity import kl_divergence
from agents.testbed import Condition, Testbed
from analysis.memory.labels import JUMPS, RIGHT
from analysis.memory.probe_atlas import Label
from common.results import Entry, Table
from common.tables import markdown_table
from interventions.comparison import outcomes_named
from interventions.patches import Add
from stats.bootstrap import by_episode
from stats.effects import Outcome, compare_conditions
from stats.report import Wording, bold, format_interval, format_number
from stats.study import study_schema

PROBE, COVARIANCE, SWAP, PUSH = "probe", "covariance", "swap", "push"
METHODS = (PROBE, COVARIANCE)
MORE, LESS = "more", "less"
WORDING = Wording("Pushes of the hidden state along probe directions", "random directions",
                  "directions with no larger effect than random ones", " of equal size",
                  "How far a state is moved in a step")
PROBE_INTERVENTIONS = study_schema(
    "pushes along probe directions", "analysis/probe_interventions.py",
    open_loop=Entry("open_loop.csv", Table({"condition": str, "effect": float})))
OPEN_OUTCOMES = (
    Outcome("jump", "probability of a jump", probability=True),
    Outcome("right", "probability of moving right", probability=True),
    Outcome("value", "value estimate (return)"),
    Outcome("kl", "KL divergence from the unaltered policy (nats)"))
Change = Callable[[np.ndarray], np.ndarray]
"""Map states (N, D) to the states that replace them (N, D)."""


def unit_directions(label: Label, states: np.ndarray, weights: np.ndarray,
                    methods: Sequence[str] = METHODS) -> dict[str, np.ndarray]:
    """Return a unit vector (D,) per method, pointing towards larger values of the label.

    Args:
        label: label of the states.
        states: hidden states of training levels (N, D).
        weights: weights of the linear probe of the label (D,).
        methods: directions to return: PROBE (the weights) or COVARIANCE (the covariance of the
            states with the label).
    """
    target = label.target[label.known] - label.target[label.known].mean()
    vectors = {PROBE: weights, COVARIANCE: target @ states[label.known]}
    return {method: vectors[method] / np.linalg.norm(vectors[method]) for method in methods}


def typical_size(states: np.ndarray) -> float:
    """Return the standard deviation of states (N, D) along a random direction: the root mean
    square of the standard deviations of the units."""
    return float(np.sqrt(states.var(axis=0, dtype=np.float64).mean()))


def pushes(directions: Mapping[str, Mapping[str, np.ndarray]], norm: float, num_controls: int,
           seed: int) -> list[Condition[np.ndarray]]:
    """Return pushes along and against each direction, and the random pushes that serve as controls.

    Args:
        directions: unit vectors (D,), by label and method.
        norm: Euclidean norm of a push.
        num_controls: number of random directions.
        seed: seed of the random directions; each depends only on the seed and its index.
    """
    conditions = [_push(
        f"{sense}_{label}_{method}", f"{sense} {label} ({method})", sign * norm * unit,
        {"label": label, "method": method, "sense": sense, "norm": norm})
        for label, units in directions.items() for method, unit in units.items()
        for sense, sign in ((MORE, 1), (LESS, -1))]
    size = next(len(unit) for units in directions.values() for unit in units.values())
    for number in range(num_controls):
        drawn = np.random.default_rng([seed, number]).standard_normal(size)
        conditions.append(_push(
            f"random_{number:03d}", f"random {number}", norm * drawn / np.linalg.norm(drawn),
            {"random": number, "seed": seed, "norm": norm}, control=True))
    return conditions


def _push(name: str, label: str, vector: np.ndarray, settings: Mapping, control: bool = False
          ) -> Condition[np.ndarray]:
    return Condition(name, label, PUSH, control, vector, settings,
                     patches=[Add(STATE, vector=vector.astype(np.float32))])


def swaps(labels: Sequence[Label], states: np.ndarray, num_controls: int, seed: int
          ) -> Iterator[Condition[Change]]:
    """Yield swaps to states with larger and with smaller values of each label, and their controls.

    Args:
        labels: labels of the states.
        states: hidden states to draw from (N, D).
        num_controls: number of controls, which draw from all states.
        seed: seed of the draws.
    """
    def drawn(donors: np.ndarray, *seeds: int) -> Change:
        rng = [seed, *seeds]
        return lambda own: donors[np.random.default_rng(rng).integers(len(donors), size=len(own))]

    for label in labels:
        low, high = np.quantile(label.target[label.known], (0.25, 0.75))
        low, high = (0, 1) if label.metric == "auc" else (low, high)
        for sense, chosen in ((MORE, label.target >= high), (LESS, label.target <= low)):
            yield Condition(f"swap_{sense}_{label.name}", f"swap: {sense} {label.name}", SWAP,
                            value=drawn(states[chosen]),
                            settings={"label": label.name, "method": SWAP, "sense": sense})
    for number in range(num_controls):
        yield Condition(f"swap_random_{number:03d}", f"swap {number}", SWAP, True,
                        drawn(states, 1, number), {"random": number})


@torch.no_grad()
def head_outcomes(policy: Policy, states: np.ndarray, levels: np.ndarray,
                  change: Change | None = None) -> np.ndarray:
    """Compute OPEN_OUTCOMES from the heads at altered states, averaged per level.

    Args:
        policy: the agent.
        states: recorded states that leave a step, float32 (N, D).
        levels: level of each state (N,).
        change: alteration of the states; None for unaltered states.

    Returns:
        Outcomes, float64 (E, K), by ascending seed of the level.
    """
    def heads(states: np.ndarray) -> tuple[Tensor, np.ndarray]:
        read = torch.as_tensor(np.float32(states), device=policy.device)
        log_probs = torch.log_softmax(policy.fc_policy(read).double(), dim=-1)
        return log_probs, policy.fc_value(read)[:, 0].double().cpu().numpy()

    before, _ = heads(states)
    after, values = heads(states if change is None else change(states))
    probs, kl = (tensor.cpu().numpy() for tensor in (after.exp(), kl_divergence(before, after)))
    sums = by_episode(levels, np.stack([
        probs[:, JUMPS].sum(axis=1), probs[:, RIGHT].sum(axis=1), values, kl,
        np.ones(len(levels))]))
    return sums[:, :-1] / sums[:, -1:]


def open_loop(policy: Policy, states: np.ndarray, levels: np.ndarray,
              push_conditions: Sequence[Condition[np.ndarray]],
              swap_conditions: Sequence[Condition[Change]], seed: int) -> pd.DataFrame:
    """Compute the effects of pushes and swaps on recorded states.

    Args:
        policy: the agent.
        states: recorded states (N, D).
        levels: level of each state (N,).
        push_conditions, swap_conditions: interventions and controls.
        seed: seed of the bootstrap and the sign flips.

    Returns:
        The table of ``with_ratios``.
    """
    changes: list[Change | None] = [
        *(functools.partial(np.add, condition.value) for condition in push_conditions),
        *(condition.value for condition in swap_conditions)]
    conditions: list[Condition] = [*push_conditions, *swap_conditions]
    table = compare_conditions(
        conditions, OPEN_OUTCOMES, head_outcomes(policy, states, levels),
        np.stack([head_outcomes(policy, states, levels, change) for change in changes]), seed,
        verdicts=False)
    return with_ratios(table, conditions)


def closed_outcome_list(game: str) -> tuple[Outcome, ...]:
    """Return the outcomes of an episode in the real game, in the order of ``closed_outcomes``."""
    return (*outcomes_named("success", "return", "length"),
            Outcome("jump", "share of jumps", probability=True),
            Outcome("right", "share of moves to the right", probability=True),
            *failure_outcomes(game))


def closed_outcomes(testbed: Testbed, condition: Condition[np.ndarray]) -> np.ndarray:
    """Play all levels of a testbed with causes, with a push at every step.

    Returns:
        Outcomes, float64 (E, K), in the order of the levels.
    """
    [played] = testbed.play([condition])
    assert testbed.env is not None
    causes = causes_of(testbed.env.env_name)
    return np.array([[
        episode.level_complete, episode.total_reward, episode.length,
        JUMPS[episode.actions[:-1]].mean(), RIGHT[episode.actions[:-1]].mean(),
        *(episode.cause == name for name in causes)] for episode in played.episodes], np.float64)


def with_ratios(table: pd.DataFrame, conditions: Sequence[Condition]) -> pd.DataFrame:
    """Add the definition of each intervention, and its effect relative to controls and swaps.

    Args:
        table: table from ``stats.effects.compare_conditions``.
        conditions: the compared conditions.

    Returns:
        The table with further columns: ``about`` (name of the label), ``method``, ``sense`` (MORE
        or LESS, for larger or smaller values of the label), ``random`` (mean absolute effect of the
        controls of the same kind on the same outcome) and ``ratio_to_random`` (absolute effect
        divided by ``random``). If there are swaps, also ``swap`` (effect on the same outcome of the
        swap of the same label and sense) and ``ratio_to_swap`` (effect divided by ``swap``; NaN if
        the interval of the swap's effect includes 0).
    """
    settings = {condition.name: condition.settings for condition in conditions}
    table = table.assign(**{
        name: [settings[row.condition].get(key, "") for row in table.itertuples()]
        for name, key in (("about", "label"), ("method", "method"), ("sense", "sense"))})
    controls = table[table["control"]]
    random = controls["effect"].abs().groupby([controls["pattern"], controls["outcome"]]).mean()
    table["random"] = [random[row.pattern, row.outcome] for row in table.itertuples()]
    table["ratio_to_random"] = _ratio(table["effect"].abs(), table["random"])
    keys = ["about", "sense", "outcome"]
    full = table[~table["control"] & (table["pattern"] == SWAP)].set_index(keys)
    if len(full):
        rows = full.reindex(pd.MultiIndex.from_frame(table[keys]))
        is_clear = (rows["low_95"] > 0) | (rows["high_95"] < 0)
        table["swap"] = rows["effect"].to_numpy()
        table["ratio_to_swap"] = _ratio(table["effect"],
                                        table["swap"].where(is_clear.to_numpy()))
    return table


def _ratio(values: pd.Series, others: pd.Series) -> pd.Series:
    return values / others.where(others != 0)


def ratio_tables(table: pd.DataFrame, outcomes: Sequence[Outcome]) -> list[str]:
    """Format, for each outcome, the effects with their ratios as lines of Markdown.

    Args:
        table: table from ``with_ratios``.
        outcomes: outcomes to show.
    """
    lines, has_swaps = [], "swap" in table
    for outcome in outcomes:
        rows = table[~table["control"] & (table["outcome"] == outcome.name)]
        title = outcome.label[0].upper() + outcome.label[1:]
        unaltered = format_number(rows["unaltered"].iloc[0])
        lines += [f"### {title} (unaltered: {unaltered})", "", *markdown_table(
            ("alteration", "change (95 %)", "controls: mean size", "ratio to controls",
             *(("full swap", "ratio to the swap") if has_swaps else ())),
            [(row.label, bold(format_interval(row.effect, row.low_95, row.high_95, "+.2g"),
                              row.claimed),
              *(format_number(getattr(row, name), ".2g")
                for name in ("random", "ratio_to_random",
                             *(("swap", "ratio_to_swap") if has_swaps else ()))))
             for row in rows.itertuples()])]
    return lines
