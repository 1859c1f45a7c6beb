"""The table of findings on disk: ``findings.csv``, a row a number of ours, ``table.md``, a row a
published claim, and ``findings.png``, a panel a row with a tested number, if there is any."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from common.files import atomic_path
from common.tables import markdown_escaped, read_table, write_table
from interventions.effects import LEVEL, holm
from interventions.findings import Claim, Finding
from interventions.findings_figure import plot_findings

_COLUMNS = {"agent": str, "row": int, "primary": bool, "claimed": bool}


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
