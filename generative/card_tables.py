"""The fidelity card as tables: a row per predictor or kind, and a column per simulated step.

Cells have 95 % intervals over episodes (in documents, only those of the simulator), and the agent's
measures have their baselines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from common.tables import markdown_table, read_table
from generative.fidelity import (
    KEPT,
    OBJECT_SHOWN,
    OTHER_POLICY_KL,
    OTHER_VALUE_CORRELATION,
    PSNR,
    PSNR_MARGIN,
    PSNR_MOVING,
    PSNR_OF_MEAN_ERROR,
    PSNR_REMEMBERED,
    PSNR_REVEALED,
    SSIM,
    SSIM_REMEMBERED,
)
from generative.figures import LABELS, TITLES_OF_AGENT
from generative.loss_over_time import (
    CONSTANT_POLICY,
    IMAGE_MSE,
    LAST_FRAME,
    MEAN_FRAME,
    PERSISTENCE,
    POLICY_KL,
    SIMULATOR,
    VALUE_CORRELATION,
)
from stats.report import format_interval

CARDS = Path(__file__).parent.parent / "pretrained" / "coinrun_hard_simulator" / "card"
CARD_COLUMNS = {"step": int, "predictor": str, "kind": str, "mean": float, "low_95": float,
                "high_95": float}
SUMMARY_STEPS = (1, 2, 5, 10)
CARD_STEPS = (0, 1, 2, 5, 10, 15, 16, 32)
DOCUMENT_STEPS = (1, 5, 10, 16)
CARD_TITLES = {PSNR: "all pixels", PSNR_REMEMBERED: "remembered pixels",
               PSNR_REVEALED: "newly revealed pixels", PSNR_MOVING: "moving objects",
               PSNR_OF_MEAN_ERROR: "of the mean error", SSIM: "SSIM, all pixels",
               SSIM_REMEMBERED: "SSIM, remembered pixels"}
# Rows of the card in documents and reports: title, kind, predictor and number of decimals.
_ROWS = (
    ("PSNR (dB)", PSNR, SIMULATOR, 1), ("– last frame repeated", PSNR, LAST_FRAME, 1),
    ("– mean frame", PSNR, MEAN_FRAME, 1),
    ("PSNR of remembered pixels (dB)", PSNR_REMEMBERED, SIMULATOR, 1),
    ("– last frame repeated", PSNR_REMEMBERED, LAST_FRAME, 1),
    ("PSNR of moving objects (dB)", PSNR_MOVING, SIMULATOR, 1),
    ("– last frame repeated", PSNR_MOVING, LAST_FRAME, 1),
    ("SSIM", SSIM, SIMULATOR, 2), ("– last frame repeated", SSIM, LAST_FRAME, 2),
    ("policy KL (nats)", POLICY_KL, SIMULATOR, 2),
    ("– constant policy", POLICY_KL, CONSTANT_POLICY, 2),
    ("– policy of step 0", POLICY_KL, PERSISTENCE, 2),
    ("value correlation", VALUE_CORRELATION, SIMULATOR, 2),
    ("– value of step 0", VALUE_CORRELATION, PERSISTENCE, 2))
CARD_KINDS = {(kind, predictor) for _, kind, predictor, _ in _ROWS}


def read_card(path: Path) -> pd.DataFrame:
    """Read the rows of a card that ``tools.tables`` has stored."""
    return read_table(path, CARD_COLUMNS, ("low_95", "high_95"))


def card_finding(table: pd.DataFrame, facts: Mapping[str, Any], step: int) -> str:
    """Describe a card in a sentence, with the baselines of both measures.

    Args:
        table: rows of the card, see ``read_card``.
        facts: facts of its measurement, as stored by ``tools.tables``.
    """
    means = table[table["step"] == step].set_index(["kind", "predictor"])["mean"]
    return (
        f"In {facts['windows']} unseen windows, {facts['action_noise']}, PSNR is "
        f"{means[PSNR, SIMULATOR]:.1f} dB at step {step} (last frame: "
        f"{means[PSNR, LAST_FRAME]:.1f}), and the policy's KL divergence is "
        f"{means[POLICY_KL, SIMULATOR]:.2f} nats (constant policy: "
        f"{means[POLICY_KL, CONSTANT_POLICY]:.2f}).")


def cells(table: pd.DataFrame, kind: str, predictor: str, steps: Iterable[int],
          digits: int) -> list[str]:
    """Format a measure of a predictor at each of the given steps; "" where it was not measured.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    rows = table[(table["kind"] == kind) & (table["predictor"] == predictor)].set_index("step")
    rows = rows.reindex(list(steps))
    return [format_interval(mean, low, high, f".{digits}f", "") for mean, low, high
            in rows[["mean", "low_95", "high_95"]].itertuples(index=False)]


def card_rows(table: pd.DataFrame, steps: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the rows of the card, the title first; measures that no step has are left out.

    Args:
        table: table from ``loss_tables.table_of``.
        steps: simulated steps, one column each.
    """
    rows = [(title, *cells(table, kind, predictor, steps, digits))
            for title, kind, predictor, digits in _ROWS]
    return [row for row in rows if any(row[1:])]


def document_table(table: pd.DataFrame) -> list[str]:
    """Return the lines of the card as a Markdown table, for documents; baselines have no intervals.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    rows = [(title, *(cell.partition(" ")[0] for cell in numbers)) if title.startswith("–")
            else (title, *numbers) for title, *numbers in card_rows(table, DOCUMENT_STEPS)]
    return markdown_table(("step", *map(str, DOCUMENT_STEPS)), rows)


def print_summary(table: pd.DataFrame, compared: Sequence[dict]) -> None:
    """Print image errors, agent measures and shown objects at the first steps, and comparisons with
    other predictors.

    Args:
        table: table from ``loss_tables.table_of``.
        compared: result of ``loss_tables.comparisons``.
    """
    for kind, title in ((IMAGE_MSE, "mean squared error of the image"), *TITLES_OF_AGENT.items()):
        print(f"{title} by simulated step, up to the end of the episode (95 % intervals)")
        _print_rows(table, [(name, kind, name) for name in LABELS], SUMMARY_STEPS,
                    5 if kind == IMAGE_MSE else 3)
    shown = _objects(table, OBJECT_SHOWN)
    if shown:
        print("share of the objects in view that the simulator shows")
        _print_rows(table, shown, SUMMARY_STEPS)
    for comparison in compared:
        if steps := comparison["steps"]:
            print(f"the simulator beats {comparison['predictor']} at {comparison['better']} of the "
                  f"{len(steps)} steps from {steps[0]} to {steps[-1]}; at {comparison['clearly']} "
                  "of them, the 95 % interval of the difference excludes 0")


def print_card(table: pd.DataFrame) -> None:
    """Print the fidelity card with 95 % intervals.

    It has PSNR and SSIM of the simulator, and the PSNR, policy divergence and value correlation of
    all predictors; the difference in PSNR between recorded and other actions at the last step; and,
    if objects were measured, the share of initial objects that the simulator still shows.

    Args:
        table: table from ``loss_tables.table_of``.
    """
    print("PSNR (dB) and SSIM of the simulator by simulated step; step 0 shows the last initial "
          "frame (95 % intervals)")
    _print_rows(table, [(title, kind, SIMULATOR) for kind, title in CARD_TITLES.items()],
                CARD_STEPS, 2)
    for kind, title in ((PSNR, "PSNR (dB) of all predictors"), *(
            (kind, f"{name}, {TITLES_OF_AGENT[measure]}") for name, kinds in (
                ("agent inside", (POLICY_KL, VALUE_CORRELATION)),
                ("agent not in training", (OTHER_POLICY_KL, OTHER_VALUE_CORRELATION)))
            for kind, measure in zip(kinds, (POLICY_KL, VALUE_CORRELATION)))):
        if (table["kind"] == kind).any():
            print(title)
            _print_rows(table, [(name, kind, name) for name in LABELS], CARD_STEPS, 2)
    kept = _objects(table, KEPT)
    if kept:
        print("share of the objects in view at the start that the simulator still shows")
        _print_rows(table, kept, CARD_STEPS, 2)
    margins = table[table["kind"] == PSNR_MARGIN]
    for row in margins[margins["step"] == margins["step"].max()].itertuples():
        print(f"PSNR with recorded actions minus {row.predictor} at step {row.step}: "
              f"{format_interval(row.mean, row.low_95, row.high_95, '+.2f')} dB")


def _objects(table: pd.DataFrame, prefix: str) -> list[tuple[str, str, str]]:
    """Return a row of the simulator for each kind of object that was measured."""
    return [(kind.removeprefix(prefix), kind, SIMULATOR) for kind in sorted(table["kind"].unique())
            if kind.startswith(prefix)]


def _print_rows(table: pd.DataFrame, rows: Sequence[tuple[str, str, str]], steps: Sequence[int],
                digits: int = 3) -> None:
    """Print the rows that were measured, given as title, kind and predictor, at the steps that any
    window reaches."""
    reached = [step for step in steps if (table["step"] == step).any()]
    frame = pd.DataFrame({title: cells(table, kind, predictor, reached, digits)
                          for title, kind, predictor in rows}, index=reached).T
    print(frame[(frame != "").any(axis=1)].to_string(index_names=False))
