"""Effects of steering vectors: the statistics, the report and the figures.

Letters in shape comments: N forks, A arms, D draws, K outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.palette import BLUE, DPI, VERMILION
from interventions.controls import GAUSSIAN, OTHERS, PERMUTED
from maze.studies.steering import DECISIONS, Group, Measured
from stats.bootstrap import ClusterBootstrap
from stats.effects import Condition, Outcome, compare_conditions, with_verdicts
from stats.report import Wording, report

KINDS = {PERMUTED: "the vectors' cells permuted within each channel",
         GAUSSIAN: "Gaussian vectors of the same norm",
         OTHERS: "vectors of levels with the thing elsewhere"}
WORDING = Wording("Steering vectors at decision squares", "controls",
                  "vectors that are no better than controls", " of each kind",
                  "How far the layer's output is moved at a picture")
FIELD_WORDING = Wording("Steering vectors over whole fields", WORDING.controls, WORDING.alike,
                        WORDING.equal, WORDING.size)


def effects(groups: Sequence[Group], measured: Sequence[Measured], kinds: Sequence[str],
            num_controls: int, outcomes: Sequence[Outcome], seed: int) -> pd.DataFrame:
    """The effect of each arm and control on each outcome.

    An arm is compared with each kind of controls by itself. It is claimed if it is with all of
    them, and its ``p_control`` is the largest one.

    Args:
        measured: of each group; the first draw is the vectors, then ``num_controls`` of each kind.
        seed: of bootstrap and sign flips.

    Returns:
        The table of ``stats.effects.with_verdicts``, with a column ``controls`` (kind, of
        controls), ``norm`` and ``relative`` (mean sizes), and ``p_<kind>`` for arms.

    Raises:
        UserError: if there are fewer than 10 forks, or 2 controls.
    """
    before = measured[0].before
    directions = [_arms(group, found, 0, "") for group, found in zip(groups, measured)]
    judged, tables, controls = [], [], []
    for place, kind in enumerate(kinds):
        of_kind = [_arms(group, found, 1 + place * num_controls + number, f"{kind}_{number:02d}")
                   for group, found in zip(groups, measured) for number in range(num_controls)]
        arms, moved, after = _joined([*directions, *of_kind])
        table = compare_conditions(arms, outcomes, before, after, seed, moved=moved,
                                   verdicts=False)
        judged.append(table[~table["control"]].reset_index(drop=True))
        tables.append(table[table["control"]].assign(controls=kind))
        controls += of_kind
    first = judged[0].copy()
    for kind, each in zip(kinds, judged):
        first[f"p_{kind}"] = each["p_control"]
    for name, join in (("control_low", min), ("control_high", max), ("num_controls", min),
                       ("p_control", max), ("claimed", min)):
        first[name] = [join(values) for values in zip(*(each[name] for each in judged))]
    table = pd.concat([first, *tables], ignore_index=True)
    arms, moved, after = _joined([*directions, *controls])
    table = with_verdicts(table, outcomes, before, after, seed)
    for number, name in enumerate(("norm", "relative"), start=1):
        table[name] = table["arm"].map({
            arm.name: size for each in (*directions, *controls)
            for arm, size in zip(each[0], each[1][:, number])})
    return table


_Arms = tuple[list[Condition], np.ndarray, np.ndarray]
"""Arms, their mean sizes (A, 3), and outcomes (A, N, K)."""


def _arms(group: Group, measured: Measured, draw: int, control: str) -> _Arms:
    """The arms of a group in one draw, and the contrast.

    Args:
        control: name of the draw; empty for the vectors themselves.
    """
    names = list(zip(group.arms, group.labels))
    after, sizes = measured.after[draw], measured.sizes[draw].mean(axis=1)
    if group.contrast is not None:
        one, other, both = after
        # As far from the unpatched outcomes as both are from the sum of each alone.
        departure = measured.before + both - one - other + measured.before
        names.append(group.contrast)
        after, sizes = np.stack([*after, departure]), np.stack([*sizes, sizes[-1]])
    return ([Condition(f"{name}_{control}", f"{label}, {control}", name, True) if control else
             Condition(name, label, name, False) for name, label in names], sizes, after)


def _joined(parts: Sequence[_Arms]) -> tuple[list[Condition], dict[str, float], np.ndarray]:
    arms = [arm for part in parts for arm in part[0]]
    sizes = np.concatenate([part[1] for part in parts])[:, 0]
    return arms, dict(zip((arm.name for arm in arms), sizes.tolist())), np.concatenate(
        [part[2] for part in parts])


def decisions_table(groups: Sequence[Group], measured: Sequence[Measured],
                    seeds: Sequence[int]) -> pd.DataFrame:
    """A row for each arm and fork, the unpatched one first: ``arm``, ``seed`` and DECISIONS."""
    names = [outcome.name for outcome in DECISIONS]
    parts = [("unpatched", measured[0].before)]
    for group, found in zip(groups, measured):
        parts += zip(group.arms, found.after[0])
    return pd.concat([pd.DataFrame(values, columns=names).assign(arm=arm, seed=seeds)[
        ["arm", "seed", *names]] for arm, values in parts], ignore_index=True)


def strongest(groups: Sequence[Group], measured: Sequence[Measured]) -> list[Group]:
    """Of the groups with the same sources, the arm with the largest mean change of the log-odds:
    a group of one arm each."""
    place = [outcome.name for outcome in DECISIONS].index("log_odds")
    best: dict[tuple, tuple[float, Group, int]] = {}
    for group, found in zip(groups, measured):
        changes = np.abs((found.after[0] - found.before)[..., place].mean(axis=1))
        arm = int(changes.argmax())
        if group.terms not in best or changes[arm] > best[group.terms][0]:
            best[group.terms] = float(changes[arm]), group, arm
    return [Group(group.name, group.layer, group.terms, (group.arms[arm],), (group.labels[arm],),
                  (group.coefficients[arm],)) for _, group, arm in best.values()]


def write_report(path: Path, parts: Sequence[tuple[pd.DataFrame, Sequence[Outcome], Wording, str]],
                 kinds: Sequence[str]) -> None:
    """Write the report: one of ``stats.report`` for each table, and what the parts
    say. The tables are families of their own in Holm's correction."""
    texts = []
    for table, outcomes, wording, what in parts:
        texts.append(report(table, outcomes, wording, f"{what} Controls: " + ", and ".join(
            KINDS[kind] for kind in kinds) + ". An arm is compared with each kind by itself, and "
            "p (controls) is the largest of them."))
    path.write_text("\n".join(texts))


def summary(table: pd.DataFrame, groups: Sequence[Group]) -> list[str]:
    """A sentence for each arm: the medians at its decision squares, or, of a contrast, the mean
    departures."""
    lines, contrasts = [], {group.contrast[0] for group in groups if group.contrast}
    for arm, rows in table[~table["control"]].groupby("arm", sort=False):
        rows = rows.set_index("outcome")
        parts = [f"{label} " + (f"{rows['effect'][name]:+.3f}" if arm in contrasts else
                                f"{rows['median_unaltered'][name]:.3f} to "
                                f"{rows['median_altered'][name]:.3f}")
                 + " (claimed)" * bool(rows["claimed"][name])
                 for name, label in (("p_cheese", "P(cheese)"), ("p_corner", "P(corner)"),
                                     ("p_other", "P(other)"))]
        which = "means" if arm in contrasts else "medians"
        lines.append(f"{rows['label'].iloc[0]}: {which}: {', '.join(parts)}; mean log-odds "
                     f"{rows['effect']['log_odds']:+.3g} ({rows['low_95']['log_odds']:.3g} to "
                     f"{rows['high_95']['log_odds']:.3g})")
    return lines


def plot_coefficients(path: Path, groups: Sequence[Group], measured: Sequence[Measured],
                      title: str, seed: int) -> None:
    """P(cheese), P(corner) and P(other) over the coefficient, a row of panels for each group:
    means with 95 % intervals over forks, medians, and the range of the controls' means."""
    shown = [outcome for outcome in DECISIONS if outcome.name.startswith("p_")]
    figure = Figure(figsize=(4 * len(shown), 2.6 * len(groups) + 0.8), layout="constrained")
    panels = figure.subplots(len(groups), len(shown), squeeze=False, sharex=True, sharey=True)
    bootstrap = ClusterBootstrap(np.arange(len(measured[0].before)), seed)
    for row, group, found in zip(panels, groups, measured):
        x = np.array([0.0, *(coefficient for coefficient, in group.coefficients)])
        order = np.argsort(x)
        for axes, outcome in zip(row, shown):
            place = DECISIONS.index(outcome)
            after = found.after[..., place]  # (D, A, N)
            before = np.broadcast_to(found.before[:, place], (len(after), 1, after.shape[2]))
            values = np.concatenate([before, after], axis=1)[:, order]
            low, high = bootstrap.interval(values[0])
            means = values.mean(axis=2)
            axes.fill_between(x[order], means[1:].min(axis=0), means[1:].max(axis=0),
                              color="#DDDDDD", label=f"range of {len(means) - 1} controls' means")
            axes.errorbar(x[order], means[0], yerr=np.abs([low, high] - means[0]), color=BLUE,
                          marker="o", markersize=4, capsize=2, label="mean, 95 %")
            axes.plot(x[order], np.median(values[0], axis=1), "D--", color=VERMILION, markersize=4,
                      linewidth=0.8, label="median")
            axes.set_title(f"{group.name}\n{outcome.label}", fontsize=8)
            axes.set_ylim(-0.02, 1.02)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("coefficient", fontsize=9)
    panels[0, 0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)
