"""Store measured results next to the shipped files, and copy them into the tables of documents.

    python -m tools.tables NAME=FOLDER ...   store results, and write the tables of documents again
    python -m tools.tables                   write the tables of documents again

Documents contain a table between ``<!-- KIND: NAME -->`` and ``<!-- end -->``:

    card: NAME      fidelity card, ``pretrained/coinrun_hard_simulator/card/NAME.csv``: the rows of
                    ``loss_over_time.csv`` that documents show. ``NAME.json`` has the measured
                    files, the recording, and the outcomes of --life_starts, if there are any.
    claims: NAME    verdicts on published claims; NAME is maze or attribution. The file has the
                    numbers that ``table.md`` of ``python -m NAME.table`` shows.
    table: FILE     a CSV file below ``pretrained/``, cell by cell

FOLDER is the output of loss_over_time_experiment.py, or of maze.table or attribution.table if NAME
is maze or attribution. A test fails if a table differs from its file, or if a card was measured
with another simulator than the shipped one.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd

import attribution.claims
import maze.studies.claims
from common.errors import UserError, script_main
from common.files import read_json, save_json
from common.results import ResultStore
from common.tables import markdown_table, write_table
from generative.card_tables import (
    CARD_COLUMNS,
    CARD_KINDS,
    CARDS,
    document_table,
    read_card,
)
from generative.dream_life import COIN, DEATH
from generative.loss_over_time import LOSS_OVER_TIME
from stats.claims import FINDINGS_NAME, ClaimsTable
from stats.report import format_interval

ROOT = Path(__file__).parent.parent
HORIZON = 16  # actions
PRETRAINED = ROOT / "pretrained"
CLAIMS: dict[str, tuple[ClaimsTable, Path]] = {
    "maze": (maze.studies.claims.CLAIMS, PRETRAINED / "maze_confined/results/claims.csv"),
    "attribution": (attribution.claims.CLAIMS, PRETRAINED / "coinrun_hard/results/claims.csv")}
CLAIMS_COLUMNS = ("agent", "row", "measure", "value", "low_95", "high_95", "base", "change",
                  "p_table", "p_control", "primary", "claimed", "holds")
_BLOCK = re.compile(r"(<!-- (card|claims|table): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FACTS = ("model_sha256", "agent_sha256", "action_noise", "unseen", "rendered_worlds", "seed",
          "num_init_steps", "num_sim_steps", "precision")
_GROUPS = {"anywhere": "anywhere", "near_end": "4 to 12 steps before an end"}


def store_card(name: str, results: Path, folder: Path = CARDS) -> None:
    """Store the results of a measurement as a card.

    Args:
        name: name of the card.
        results: output folder of ``loss_over_time_experiment.py``.
        folder: folder of the cards.

    Raises:
        UserError: if the folder has no results.
    """
    store = ResultStore(results, LOSS_OVER_TIME)
    settings, table = store.settings(*_FACTS), store.read("table")
    lives = store.read("lives_summary") if store.has("lives_summary") else {}
    facts = {key: settings[key] for key in _FACTS}
    facts |= {"windows": len(settings["windows"]), "episodes": len(set(settings["episodes"])),
              "ends": {group: {"starts": lives[group]["starts"],
                               **lives[group][f"within_{HORIZON}"]}
                       for group in _GROUPS if group in lives}}
    folder.mkdir(exist_ok=True)
    rows = [(row.kind, row.predictor) in CARD_KINDS for row in table.itertuples()]
    write_table(folder / f"{name}.csv", table.loc[rows, list(CARD_COLUMNS)])
    save_json(folder / f"{name}.json", facts)


def render_card(name: str, folder: Path = CARDS) -> str:
    """Format a card as Markdown: its measurement, the table of frames and agent outputs, and, if
    they were measured, coins and deaths."""
    table, facts = read_card(folder / f"{name}.csv"), read_json(folder / f"{name}.json")
    lines = [
        f"{facts['windows']} windows of {facts['episodes']} episodes, {facts['action_noise']}, in "
        f"{'rendered' if facts['rendered_worlds'] else 'sampled'} worlds:", "",
        *document_table(table)]
    if facts["ends"]:
        lines += [f"Coins and deaths within {HORIZON} of the agent's most likely actions (a death "
                  "*occurs* in the simulator if its probability reaches .5 in one step):", "",
                  *(_ends(group, ends) for group, ends in facts["ends"].items()), ""]
    return "\n".join(lines) + "\n"


def store_claims(results: Path, file: Path) -> None:
    """Store the shown numbers of a table of claims.

    Args:
        results: output folder of ``maze.table`` or ``attribution.table``.
        file: CSV file to write.

    Raises:
        UserError: if the folder has no ``findings.csv``, or an older one.
    """
    try:
        table = pd.read_csv(results / FINDINGS_NAME)
        shown = table.loc[table["shown"].astype(bool), list(CLAIMS_COLUMNS)]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{results} holds no table of claims: {error}") from None
    file.parent.mkdir(exist_ok=True)
    write_table(file, shown)


def render_file(file: Path) -> str:
    """Format a CSV file as Markdown."""
    with file.open(encoding="utf-8", newline="") as text:
        header, *rows = csv.reader(text)
    return "\n".join(markdown_table(header, rows)) + "\n"


def _rendered(block: re.Match[str]) -> str:
    begin, kind, name, end = block.groups()
    if kind == "card":
        table = render_card(name)
    elif kind == "claims":
        claims, file = CLAIMS[name]
        table = "\n".join(claims.verdicts(pd.read_csv(file))) + "\n"
    else:
        table = render_file(PRETRAINED / name)
    return f"{begin}\n{table}{end}"


def _ends(group: str, ends: dict[str, Any]) -> str:
    """Compare the coins and deaths of a group of starts with the game in a sentence."""
    skill = ends[COIN]["skill"]
    low, high = skill["interval_95"]
    return (f"- From {ends['starts']} starts {_GROUPS[group]}, the simulator expects "
            f"{ends[COIN]['expected']:.1f} coins (real: {ends[COIN]['real']}; Brier skill: "
            f"{format_interval(skill['value'], low, high, '.2f')}) and "
            f"{ends[DEATH]['expected']:.1f} deaths (real: {ends[DEATH]['real']}, of which "
            f"{ends['confusion'][DEATH][DEATH]} occur)")


def update(text: str) -> str:
    """Return a document with its tables as stored."""
    return _BLOCK.sub(_rendered, text)


def documents() -> list[Path]:
    """Return the documents that may show tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
            *sorted(PRETRAINED.glob("*/README.md"))]


@script_main
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", metavar="NAME=FOLDER")
    for argument in parser.parse_args(argv).results:
        name, equals, folder = argument.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise UserError(f"'{argument}' is not of the form NAME=FOLDER")
        if name in CLAIMS:
            store_claims(Path(folder), CLAIMS[name][1])
        else:
            store_card(name, Path(folder))
    for document in documents():
        text = document.read_text(encoding="utf-8")
        if (changed := update(text)) != text:
            document.write_text(changed, encoding="utf-8")
            print(f"wrote {document.relative_to(ROOT)}")


if __name__ == "__main__":
    raise SystemExit(main())
