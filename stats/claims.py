"""Published claims and our own measurements of them, as a table on disk.

``findings.csv`` has one row per measured number, ``table.md`` one row per published claim, and
``findings.png``, if any number is tested, one panel per tested row.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common.files import atomic_path
from common.palette import BLUE, DPI, VERMILION
from common.tables import markdown_escaped, read_table, write_table
from stats.significance import LEVEL, holm

COLUMNS = 4
TITLE_WIDTH = 34  # characters of a line
_COLUMNS = {"agent": str, "row": int, "primary": bool, "claimed": bool}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table.

    Attributes:
        published: the claim, with numbers and how many levels they are of.
        measured: how it is measured here.
    """

    published: str
    measured: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """A number of ours.

    Attributes:
        row: of the table, from 1.
        levels: over which levels or frames, in words.
        measure: in words.
        value, low_95, high_95: with its interval, NaN without. Of an effect: its size.
        num_levels: how many levels or frames.
        base: the same of the base rate, or without the alteration; NaN where there is none.
        p_holm: corrected p within the study, NaN where there is none.
        altered: of an effect, the number with the alteration.
        p: uncorrected.
        p_control: share of controls with as large an effect.
        primary: whether it is the row's one number that is tested over the whole table.
        shown: whether the table's cell gives it.
        holds: whether it is as the claim says, by its interval; None where that is not asked.
    """

    row: int
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

    def text(self) -> str:
        """The number in a few words."""
        numbers = (f"{_short(self.base)} to {_short(self.altered)}" if np.isfinite(self.altered)
                   else _short(self.value))
        ends = ("" if np.isnan(self.low_95)
                else f"{_short(self.low_95)} to {_short(self.high_95)}")
        if np.isfinite(self.altered):
            ends = f"change {self.value:+.3g}" + (f", {ends}" if ends else "")
        elif np.isfinite(self.base):
            ends += f"; base {_short(self.base)}"
        verdict = "" if self.holds is None else ": **holds**" if self.holds else ": does not hold"
        return f"{self.measure}: {numbers}" + (f" ({ends})" if ends else "") + verdict


def _short(number: float) -> str:
    is_count = number >= 2 and float(number).is_integer()
    return f"{number:.0f}" if is_count else f"{number:.3f}"


class FindingsFolder:
    """Names, writer and reader.

    Args:
        path: the folder.
        claims: by row.
        script: that writes it, for messages.
        letter: before the numbers of the rows.
    """

    def __init__(self, path: Path, claims: Mapping[int, Claim], script: str, letter: str = ""):
        self.path, self._claims, self._script, self._letter = Path(path), claims, script, letter
        self.findings_file = self.path / "findings.csv"
        self.table_file = self.path / "table.md"
        self.figure_file = self.path / "findings.png"

    def save(self, found: Mapping[str, Sequence[Finding]], reasons: Mapping[str, Mapping[int, str]],
             notes: Sequence[str]) -> None:
        """Write the files.

        Args:
            found: findings by agent.
            reasons: of each agent, why a row has none.
            notes: sentences below the table.
        """
        table = findings_table(found)
        write_table(self.findings_file, table)
        with atomic_path(self.table_file) as temporary:
            temporary.write_text(markdown(self._claims, found, reasons, table, notes,
                                          self._letter), encoding="utf-8")
        self.figure_file.unlink(missing_ok=True)  # of an earlier table
        if table["primary"].any():
            with atomic_path(self.figure_file) as temporary:
                plot_findings(temporary, table, self._letter)

    def result(self) -> str:
        """How many rows have a number, and how many primary ones are claimed, in words."""
        table = read_table(self.findings_file, _COLUMNS, (), self._script)
        primary = table[table["primary"]]
        return (f"{table['row'].nunique()} of {len(self._claims)} rows have numbers"
                + (f"; {primary['claimed'].sum()} of {len(primary)} tested numbers are claimed"
                   if len(primary) else ""))


def findings_table(found: Mapping[str, Sequence[Finding]]) -> pd.DataFrame:
    """A row a finding: ``agent``, the attributes of ``Finding``, and for primary ones ``p_table``,
    after Holm's correction over the agent's table, and ``claimed``: the interval leaves 0 out,
    ``p_table`` and ``p_control`` are at most 0.05."""
    tables = []
    for agent, numbers in found.items():
        table = pd.DataFrame([dataclasses.asdict(each) for each in numbers],
                             columns=[field.name for field in dataclasses.fields(Finding)])
        table.insert(0, "agent", agent)
        primary = table["primary"].astype(bool)
        table["p_table"] = np.nan
        if primary.any():
            table.loc[primary, "p_table"] = holm(table.loc[primary, "p"].to_numpy())
        table["claimed"] = (primary & ((table["low_95"] > 0) | (table["high_95"] < 0))
                            & (table["p_table"] <= LEVEL) & (table["p_control"] <= LEVEL))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def markdown(claims: Mapping[int, Claim], found: Mapping[str, Sequence[Finding]],
             reasons: Mapping[str, Mapping[int, str]], table: pd.DataFrame, notes: Sequence[str],
             letter: str = "") -> str:
    """The table as Markdown, a row a claim and a column an agent; see ``FindingsFolder``."""
    names = " | ".join(map(markdown_escaped, found))
    lines = [f"| # | published | measured here as | {names} |",
             "| --- " * (3 + len(found)) + "|"]
    for row, claim in claims.items():
        cells = []
        for agent in found:
            mine = table[(table["agent"] == agent) & (table["row"] == row)]
            cells.append(_cell(mine) if len(mine) else
                         f"no number: {reasons[agent].get(row, 'it has not been run')}")
        texts = (each.replace("|", "\\|") for each in (claim.published, claim.measured, *cells))
        lines.append(" | ".join((f"| {letter}{row}", *texts)) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in notes)])


def _cell(rows: pd.DataFrame) -> str:
    parts = []
    names = [field.name for field in dataclasses.fields(Finding)]
    for row in rows[rows["shown"].astype(bool)].itertuples():
        text = Finding(**{name: getattr(row, name) for name in names}).text()
        if row.primary:
            text = (f"**{text}**, p = {row.p_table:.2g}, controls {row.p_control:.2g}: "
                    + ("**claimed**" if row.claimed else "not claimed"))
        parts.append(text)
    return "<br>".join(parts)


def plot_findings(path: Path, table: pd.DataFrame, letter: str) -> None:
    """A panel a row of the table in which an agent has a primary number.

    Args:
        table: of ``findings_table``, with at least one primary number.
        letter: before the numbers of the rows.
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
    panels[0, 0].set_ylim(len(agents) - 0.5, -0.5)
    for axes in panels.flat[len(rows):]:
        axes.axis("off")
    figure.legend(handles=[_mark("claimed", True), _mark("not claimed (bars: 95 %)", False)],
                  loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=DPI)


def _plot_row(axes: Axes, part: pd.DataFrame, agents: list[str], number: str) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    for each in part.itertuples():
        place = agents.index(each.agent)
        axes.plot([each.low_95, each.high_95], [place, place], linewidth=1.4,
                  color=_style(each.claimed)["color"])
        axes.plot(each.value, place, markersize=5, **_style(each.claimed))
    axes.set_yticks(np.arange(len(agents)), agents, fontsize=9)
    measure = in_common(list(dict.fromkeys(part["measure"])))
    axes.set_title(textwrap.fill(f"{number}: {measure}", TITLE_WIDTH), fontsize=9)
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def in_common(texts: list[str]) -> str:
    """Texts in one: words that are not the same in all, such as numbers of channels, are dots."""
    return " ".join(words[0] if len(set(words)) == 1 else "…"
                    for words in zip(*(text.split() for text in texts)))


def _style(claimed: bool) -> dict:
    return {"color": VERMILION, "marker": "D"} if claimed else {
        "color": BLUE, "marker": "o", "markerfacecolor": "white"}


def _mark(label: str, claimed: bool) -> Line2D:
    return Line2D([], [], linewidth=1.4, markersize=6, label=label, **_style(claimed))
