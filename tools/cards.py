"""Keep the fidelity cards of the shipped simulator, and the tables of documents that show them.

    python -m tools.cards NAME=FOLDER ...   store results of loss_over_time_experiment.py as cards
    python -m tools.cards                   write the tables of the documents again

A card is ``pretrained/coinrun_hard_simulator/card/NAME.csv``, the rows of ``loss_over_time.csv``
that documents show, with ``NAME.json``, which has the measured files, the recording, and the
outcomes of --life_starts, if there are any. In documents, a table lies between
``<!-- card: NAME -->`` and ``<!-- end -->``. A test fails if a table differs from its card, or if a
card was measured with another simulator than the shipped one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from common.errors import UserError, script_main
from common.files import read_json, save_json
from common.results import ResultStore
from common.tables import markdown_table, write_table
from generative.card_tables import (
    CARD_COLUMNS,
    CARDS,
    card_kinds,
    document_table,
    read_card,
)
from generative.dream_life import COIN, DEATH, END
from generative.loss_over_time import LOSS_OVER_TIME
from stats.report import format_interval

ROOT = Path(__file__).parent.parent
HORIZON = 16  # actions
_BLOCK = re.compile(r"(<!-- card: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
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
    settings, table = store.settings(), store.read("table")
    lives = store.read("lives_summary") if store.has("lives_summary") else {}
    facts = {key: settings[key] for key in _FACTS}
    facts |= {"windows": len(settings["windows"]), "episodes": len(set(settings["episodes"])),
              "ends": {group: {"starts": lives[group]["starts"],
                               **lives[group][f"within_{HORIZON}"]}
                       for group in _GROUPS if group in lives}}
    folder.mkdir(exist_ok=True)
    rows = [(row.kind, row.predictor) in card_kinds() for row in table.itertuples()]
    write_table(folder / f"{name}.csv", table.loc[rows, list(CARD_COLUMNS)])
    save_json(folder / f"{name}.json", facts)


def render_card(name: str, folder: Path = CARDS) -> str:
    """Format a card as Markdown: its measurement, the table of frames and agent outputs, and, if
    ends were measured, the table of ends."""
    table, facts = read_card(folder / f"{name}.csv"), read_json(folder / f"{name}.json")
    lines = [
        f"{facts['windows']} windows of {facts['episodes']} episodes, {facts['action_noise']}, in "
        f"{'rendered' if facts['rendered_worlds'] else 'sampled'} worlds:", "",
        *document_table(table)]
    if facts["ends"]:
        starts, found = (", ".join(parts) for parts in zip(*(
            (f"{ends['starts']} starts {_GROUPS[group]}",
             f"{ends['confusion'][DEATH][DEATH]} of {ends[DEATH]['real']} deaths from starts "
             f"{_GROUPS[group]}") for group, ends in facts["ends"].items())))
        lines += [
            f"Ends within {HORIZON} of the agent's most likely actions ({starts}):", "",
            *markdown_table(
                ("starts", "event", "real", "expected", "expected / real", "Brier score",
                 "Brier skill", "reliability above a perfect one", "AUC"),
                [(_GROUPS[group], event, *_ends(ends[event]))
                 for group, ends in facts["ends"].items() for event in (COIN, DEATH, END)]),
            "If only ends with a probability of at least .5 in one step count, these also occur in "
            f"the simulator: {found}.", ""]
    return "\n".join(lines) + "\n"


def _ends(judged: dict[str, Any]) -> list[str]:
    """Format the measures of one kind of end, see ``dream_life.judge_ends``."""
    cells = [str(judged["real"]), f"{judged['expected']:.1f}"]
    for measure, digits in (("expected_over_real", 2), ("brier", 3), ("skill", 2),
                            ("excess_reliability", 3), ("auc", 2)):
        low, high = judged[measure]["interval_95"]
        cells.append(format_interval(judged[measure]["value"], low, high, f".{digits}f", ""))
    return cells


def update(text: str) -> str:
    """Return a document with the tables of all cards that it shows."""
    return _BLOCK.sub(lambda block: block[1] + render_card(block[2]) + block[3], text)


def documents() -> list[Path]:
    """Return the documents that may show a card."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@script_main
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="*", metavar="NAME=FOLDER")
    for card in parser.parse_args(argv).cards:
        name, equals, results = card.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise UserError(f"'{card}' is not of the form NAME=FOLDER")
        store_card(name, Path(results))
    for document in documents():
        text = document.read_text(encoding="utf-8")
        if (changed := update(text)) != text:
            document.write_text(changed, encoding="utf-8")
            print(f"wrote {document.relative_to(ROOT)}")


if __name__ == "__main__":
    raise SystemExit(main())
