"""Tables that compare published claims with our own measurements.

``findings.csv`` has one row per measured number. ``table.md`` begins with a table that has one row
per published claim, and shows one number per agent and whether the claim holds. Below it, a section
per claim lists all numbers. ``findings.png`` has one panel per tested claim; it is written only if
a number is tested. ``settings.json`` names the studies.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.errors import UserError
from common.palette import BLUE, DPI, VERMILION
from common.results import Entry, File, ResultStore, Schema, Text
from common.tables import (
    format_count,
    markdown_escaped,
    markdown_table,
    read_table,
    write_table,
)
from stats.forest_plot import legend_mark, name_rows
from stats.significance import LEVEL, holm

FINDINGS_NAME, TABLE_NAME, FIGURE_NAME = "findings.csv", "table.md", "findings.png"
COLUMNS = 4
TITLE_WIDTH = 34  # characters per line
_COLUMNS = {"agent": str, "row": int, "primary": bool, "claimed": bool}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published claim, one row of the table.

    Attributes:
        published: the claim and, after a colon, the published numbers and number of levels.
        measured: description of our measurement, and limitations of the verdict.
        tested: whether the finding marked as ``primary`` tests the claim itself.
        is_null: whether the claim is that there is no effect.
    """

    published: str
    measured: str
    tested: bool = True
    is_null: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A measured number.

    Attributes:
        levels: description of the levels or frames of the measurement.
        measure: description of the measured quantity.
        value, low_95, high_95: the number, or the size of an effect, and the ends of its 95 %
            interval; ends are NaN if there is no interval.
        num_levels: number of levels, frames or agents.
        base: number without the intervention, or chance level; NaN if neither exists.
        p_holm: p-value corrected within the study; NaN without a test.
        altered: number with the intervention; NaN if ``value`` is not an effect.
        p: uncorrected p-value; NaN without a test.
        p_control: p-value from the comparison with controls, see ``stats.effects``; NaN
            without controls.
        primary: whether this is the one number that tests its claim. The p-values of an agent's
            primary numbers are corrected together.
        shown: whether the number is shown in ``table.md``.
        holds: whether the claim holds, judged by the interval; None if not judged.
        row: number of the claim, counted from 1.
    """

    row: int = dataclasses.field(default=0, kw_only=True)  # the first column
    levels: str
    measure: str
    value: float
    low_95: float
    high_95: float
    num_levels: int
    base: float = np.nan
    p_holm: float = np.nan
    altered: float = np.nan
    p: float = np.nan
    p_control: float = np.nan
    primary: bool = False
    shown: bool = False
    holds: bool | None = None

    @classmethod
    def of_effect(cls, levels: str, measure: str, effect: Any, num_levels: int = 0,
                  **more: Any) -> Finding:
        """Return the finding for an effect.

        Args:
            levels, measure, num_levels: attributes of the finding.
            effect: row of a table from ``stats.effects.compare_conditions``.
            more: further attributes.
        """
        return cls(levels, measure, effect.effect, effect.low_95, effect.high_95, num_levels,
                   effect.unaltered, effect.p_holm, effect.altered, effect.p, effect.p_control,
                   **more)


def _short(number: float) -> str:
    """Format integers from 2 on without decimals, and all other numbers with three decimals."""
    return f"{number:.{0 if number >= 2 and float(number).is_integer() else 3}f}"


Reader = Callable[..., Iterable[Finding]]


def read_rows(readers: Iterable[tuple[int, Reader]], *studies: Any) -> list[Finding]:
    """Return the findings of several claims, with the number of the claim in ``Finding.row``.

    Args:
        readers: pairs of a claim's number and the function that yields the claim's findings.
        studies: positional arguments of each of these functions.
    """
    return [dataclasses.replace(finding, row=row) for row, read in readers
            for finding in read(*studies)]


def agent_names(folders: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return the names of agents, which are the columns of a table.

    Args:
        folders: folder of studies of each agent.
        labels: given names; None for the names of the folders.

    Raises:
        UserError: if there are more or fewer names than folders, or a name is repeated.
    """
    names = list(labels or [folder.resolve().name for folder in folders])
    if len(names) != len(folders) or len(set(names)) < len(names):
        raise UserError(f"--labels must give {len(folders)} different names, one per agent, not "
                        f"{', '.join(names)}")
    return names


@dataclasses.dataclass(frozen=True)
class ClaimsTable:
    """Published claims, and the folder that compares them with our findings.

    Attributes:
        script: command that writes the folder, for messages.
        letter: prefix of the claims' numbers.
    """

    claims: Mapping[int, Claim]
    script: str
    notes: Sequence[str] = ()
    letter: str = ""

    def store(self, folder: Path) -> ResultStore:
        """Return the output folder of the table, locked for this process.

        Raises:
            UserError: if the folder may not be replaced, see ``ResultStore.check_replaceable``.
        """
        store = ResultStore(folder, Schema(
            f"table of {self.script.removeprefix('python -m ')}", self.script, results={
                "findings": Entry(FINDINGS_NAME, File()), "table": Entry(TABLE_NAME, Text()),
                "figure": Entry(FIGURE_NAME, File(), optional=True)}, replaced=True))
        store.check_replaceable()
        return store

    def write(self, store: ResultStore, settings: dict, findings: Mapping[str, Sequence[Finding]],
              reasons: Mapping[str, Mapping[int, str]]) -> None:
        """Replace ``findings.csv``, ``table.md`` and, if a number is tested, ``findings.png``.

        Args:
            store: output folder, from :meth:`store`.
            settings: folders of the studies, and further settings.
            reasons: reason why a claim has no finding, by agent and number of the claim.
        """
        table = findings_table(findings)
        with store.replace(settings) as folder:
            write_table(folder / FINDINGS_NAME, table)
            Text().write(folder / TABLE_NAME, self.markdown(findings, reasons, table))
            if table["primary"].any():
                plot_findings(folder / FIGURE_NAME, table, self.letter)

    def summary(self, folder: Path) -> str:
        """Return a summary of ``findings.csv``: counts of measured claims and claimed effects."""
        table = read_table(folder / FINDINGS_NAME, _COLUMNS, (), self.script)
        primary = table[table["primary"]]
        return (f"{table['row'].nunique()} of {len(self.claims)} rows have numbers"
                + (f"; {primary['claimed'].sum()} of {len(primary)} tested numbers are claimed"
                   if len(primary) else ""))

    def markdown(self, findings: Mapping[str, Sequence[Finding]],
                 reasons: Mapping[str, Mapping[int, str]], table: pd.DataFrame) -> str:
        """Format a table with one number per claim and agent, followed by a section per claim with
        all findings that have ``shown=True``.

        Args:
            findings, reasons: see :meth:`write`.
            table: table from :func:`findings_table`.
        """
        names = {agent: markdown_escaped(agent) for agent in findings}
        summary, details = [], []
        for row, claim in self.claims.items():
            cells, rows = [], []
            for agent, name in names.items():
                own = table[(table["agent"] == agent) & (table["row"] == row)]
                cells.append(_headline(claim, own))
                rows += [[name, *cells_of] for cells_of in _numbers(own)]
            summary.append([f"{self.letter}{row}", _escaped(claim.published), *cells])
            title, _, numbers = _escaped(claim.published).partition(": ")
            details += ["", f"## {self.letter}{row}. {title}", "",
                        *([f"Published: {numbers}.", ""] if numbers else []),
                        f"Measured here: {_escaped(claim.measured)}."]
            missing: dict[str, list[str]] = {}  # agents by reason
            for agent, name in names.items():
                if table[(table["agent"] == agent) & (table["row"] == row)].empty:
                    missing.setdefault(reasons[agent].get(row, "the measurement has not been run"),
                                       []).append(name)
            details += [f"\n{', '.join(agents)}: no number, because {reason}."
                        for reason, agents in missing.items()]
            if rows:
                filled = [any(column) for column in zip(*rows)]
                header, *rows = ([*itertools.compress(cells, filled)]
                                 for cells in (_NUMBER_COLUMNS, *rows))
                details += ["", *markdown_table(header, rows)]
        return "\n".join([*markdown_table(["#", "published claim", *names.values()], summary),
                          *(f"{note}\n" for note in self.notes), *details, ""])

    def verdicts(self, table: pd.DataFrame) -> list[str]:
        """Return the lines of a short Markdown table for documents, with the title of each claim
        and one number per agent, without its interval; ✓ marks numbers by which the claim holds,
        and ✗ numbers by which it does not.

        Args:
            table: shown rows of a table from :func:`findings_table`.
        """
        agents, lines = list(dict.fromkeys(table["agent"])), []
        for number, claim in self.claims.items():
            cells, measures = [], []
            for agent in agents:
                own = table[(table["agent"] == agent) & (table["row"] == number)]
                if own.empty:
                    cells.append("not measured")
                    continue
                row, holds = _judged(claim, own)
                measures.append(row["measure"])
                cells.append({None: "", True: "✓ ", False: "✗ "}[holds] + _value(row) + (
                    f" ({_short(row['base'])})" if np.isfinite(row["base"]) else ""))
            lines.append((f"{self.letter}{number}", _escaped(claim.published.partition(": ")[0]),
                          re.sub("(?: …)+", " …", _escaped(in_common(measures))), *cells))
        return markdown_table(("#", "published claim", "measure here",
                               *map(markdown_escaped, agents)), lines)


_NUMBER_COLUMNS = ("agent", "measure", "number", "interval", "reference", "verdict")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _headline(claim: Claim, rows: pd.DataFrame) -> str:
    """Format the table cell of a claim and an agent: measured number, and verdict."""
    shown = rows[rows["shown"].astype(bool)]
    if shown.empty:
        return "not measured"
    row, holds = _judged(claim, shown)
    verdict = "not tested" if holds is None else "**holds**" if holds else "**does not hold**"
    return f"{_escaped(row['measure'])}: {_value(row)}{_interval(row)}<br>{verdict}"


def _judged(claim: Claim, shown: pd.DataFrame) -> tuple[pd.Series, bool | None]:
    """Return the first number of an agent that tests a claim (or else the first number), and
    whether the claim holds; None if it is not tested."""
    primary = shown[shown["primary"].astype(bool) & claim.tested]
    judged = shown[shown["holds"].notna()]
    row = next(choices.iloc[0] for choices in (primary, judged, shown) if len(choices))
    if not pd.isna(row["holds"]):
        return row, bool(row["holds"])
    is_tested = claim.tested and row["primary"] and (row["claimed"] or not claim.is_null)
    return row, bool(row["claimed"]) != claim.is_null if is_tested else None


def _value(row: pd.Series) -> str:
    return f"{row['value']:+.3f}" if row["change"] else _short(row["value"])


def _interval(row: pd.Series) -> str:
    ends = _short(row["low_95"]), _short(row["high_95"])
    return "" if np.isnan(row["low_95"]) else f" ({' to '.join(ends)})"


def _numbers(rows: pd.DataFrame) -> Iterator[list[str]]:
    """Yield a table row for each shown number, without the column of the agent's name."""
    for _, row in rows[rows["shown"].astype(bool)].iterrows():
        verdict = "" if pd.isna(row["holds"]) else "holds" if row["holds"] else "does not hold"
        if row["primary"]:
            verdict = (f"{'claimed' if row['claimed'] else 'not claimed'} (p {row['p_table']:.2g}, "
                       f"controls {row['p_control']:.2g})")
        yield [_escaped(row["measure"]), _value(row), _interval(row).strip(" ()"),
               _short(row["base"]) if np.isfinite(row["base"]) else "", verdict]


def findings_table(findings: Mapping[str, Sequence[Finding]]) -> pd.DataFrame:
    """Return a table of all findings, with tests of the primary findings.

    Returns:
        A row per finding: ``agent``, the attributes of ``Finding``, ``p_table`` (p-value of primary
        findings after Holm's correction over the agent's table, otherwise NaN), ``claimed``
        (whether the finding is primary, its interval excludes 0, and ``p_table`` and ``p_control``
        are at most 0.05) and ``change`` (whether the number is a change by an intervention).
    """
    table = pd.DataFrame([{"agent": agent, **dataclasses.asdict(finding)}
                          for agent, numbers in findings.items() for finding in numbers],
                         columns=["agent", *(field.name for field in dataclasses.fields(Finding))])
    primary = table["primary"].astype(bool)
    table["p_table"] = table[primary].groupby("agent")["p"].transform(
        lambda p: holm(p.to_numpy()))
    table["claimed"] = (primary & ((table["low_95"] > 0) | (table["high_95"] < 0))
                        & (table["p_table"] <= LEVEL) & (table["p_control"] <= LEVEL))
    table["change"] = np.isfinite(table["altered"].astype(float))
    return table


def plot_findings(path: Path, table: pd.DataFrame, letter: str) -> None:
    """Plot the primary numbers, with one panel per claim.

    Args:
        table: table from ``findings_table``, with at least one primary number.
        letter: prefix of the claims' numbers.
    """
    primary = table[table["primary"].astype(bool)]
    agents = list(dict.fromkeys(table["agent"]))
    rows = sorted(primary["row"].unique())
    columns = min(COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.9 * columns + 1.2, lines * (1.2 + 0.26 * len(agents)) + 0.6),
                    layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, row in zip(panels.flat, rows):
        _plot_row(axes, primary[primary["row"] == row], agents, f"{letter}{row}")
    for axes in panels.flat[len(rows):]:
        axes.axis("off")
    figure.legend(handles=[legend_mark("claimed", **_style(True)),
                           legend_mark("not claimed (bars: 95 %)", **_style(False))],
                  loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(f"{primary['claimed'].sum()} of {format_count(len(primary), 'primary numbers')}"
                    f" of {format_count(len(agents), 'agents')} are claimed", fontsize=10)
    figure.savefig(path, dpi=DPI)


def _plot_row(axes: Axes, part: pd.DataFrame, agents: list[str], number: str) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    for finding in part.itertuples():
        y, style = agents.index(finding.agent), _style(finding.claimed)
        axes.plot([finding.low_95, finding.high_95], [y, y], linewidth=1.4, color=style["color"])
        axes.plot(finding.value, y, markersize=5, **style)
    name_rows(axes, agents)
    measure = in_common(list(dict.fromkeys(part["measure"])))
    axes.set_title(textwrap.fill(f"{number}: {measure}", TITLE_WIDTH), fontsize=9)
    axes.locator_params(axis="x", nbins=4)


def in_common(texts: list[str]) -> str:
    """Merge texts word by word, up to the length of the shortest; words that differ, such as
    channel numbers, become "…"."""
    return " ".join(words[0] if len(set(words)) == 1 else "…"
                    for words in zip(*(text.split() for text in texts)))


def _style(claimed: bool) -> dict:
    return {"color": VERMILION, "marker": "D"} if claimed else {
        "color": BLUE, "marker": "o", "markerfacecolor": "white"}
