"""Tables, checks and pictures that the report makes of the results of stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw, ImageFont

from agents.run_folder import read_log
from agents.training_plots import plot_for_figure
from attribution.checking.agent_checks import CHECK_FILES
from common.config import check_entries
from common.files import atomic_path, read_description
from common.results import ResultStore
from common.video import strip
from generative.card_tables import SUMMARY_STEPS, card_rows
from generative.fidelity import PSNR, PSNR_MOVING, SSIM
from generative.figures import LABELS
from generative.loss_over_time import (
    CONSTANT_POLICY,
    LAST_FRAME,
    LOSS_OVER_TIME,
    PERSISTENCE,
    POLICY_KL,
    SIMULATOR,
    VALUE_CORRELATION,
)
from generative.saliency.files import SaliencyFolder
from generative.saliency.gradients import coloured, suffix_of, title_of
from interventions.comparison import comparison_store
from pipeline.stage import FOLDERS, ROOT
from stats.effects import claims_summary
from stats.report import format_interval

TRAINING_CURVE = Path("report") / "training_curve.png"  # of the analysed agent
STRIP_SAMPLES = 3
STRIP_FUNCTIONS, STRIP_HEIGHT, STRIP_LABELS = 3, 128, 84  # functions; pixels


def card_table(output: Path) -> dict[str, Any]:
    """Return the fidelity card with the baselines of each measure."""
    table = ResultStore(output / "loss_over_time", LOSS_OVER_TIME).read("table")
    steps = [step for step in SUMMARY_STEPS if (table["step"] == step).any()]
    return {"caption": "The fidelity card by simulated step, with 95 % intervals over episodes. "
            "Rows with a dash are baselines.",
            "header": ["measure", *steps], "text_columns": 1, "folded": [],
            "rows": [list(row) for row in card_rows(table, steps)]}


def effects_table(output: Path) -> dict[str, Any]:
    """Return the table of the effects of each direction on each outcome."""
    table = comparison_store(output / FOLDERS.interventions).read("effects")
    summary = claims_summary(table)
    table = table[~table["control"]]
    rows: dict[bool, list] = {True: [], False: []}
    for row in table.itertuples():
        rows[row.claimed].append([
            row.label, row.outcome.replace("_", " "), f"{row.unaltered:.3g}", f"{row.altered:.3g}",
            f"{row.effect:+.3g} ({row.low_95:+.3g} to {row.high_95:+.3g})", f"{row.p_holm:.2g}",
            f"{row.p_control:.2g}"])
    return {
        "caption": f"{summary[:1].upper()}{summary[1:]}. Means without and with the "
        "alteration, the change with its 95 % interval, its corrected p, and the share of random "
        "directions with as large a change.",
        "header": ["alteration", "outcome", "unaltered", "altered", "change", "p (Holm)",
                   "p (controls)"],
        "text_columns": 2, "rows": rows[True], "folded": rows[False],
        "folded_caption": f"The {len(rows[False])} effects that are not claimed"}


def card_rows_at_step(output: Path) -> tuple[int, pd.DataFrame]:
    """Return a step early enough for all simulators, and the card's rows of this step by kind and
    predictor."""
    table = ResultStore(output / "loss_over_time", LOSS_OVER_TIME).read("table")
    step = max(step for step in SUMMARY_STEPS[:-1] if (table["step"] == step).any())
    return step, table[table["step"] == step].set_index(["kind", "predictor"]).sort_index()


class Check(NamedTuple):
    """A check of a result: whether it passed, or None if it cannot be told, and what was found."""

    passed: bool | None
    text: str


_BASELINES = (  # title, kind, best baseline, whether larger is better, number of decimals
    ("PSNR (dB)", PSNR, LAST_FRAME, True, 1),
    ("PSNR of moving objects (dB)", PSNR_MOVING, LAST_FRAME, True, 1),
    ("SSIM", SSIM, LAST_FRAME, True, 2),
    ("policy KL (nats)", POLICY_KL, CONSTANT_POLICY, False, 2),
    ("value correlation", VALUE_CORRELATION, PERSISTENCE, True, 2))


def card_checks(output: Path) -> list[Check]:
    """Compare measures of the simulator with the baseline that a sceptic would name.

    A check passes if the simulator is better and the intervals do not overlap. If they overlap, it
    cannot be told.
    """
    step, rows = card_rows_at_step(output)
    checks = []
    for title, kind, baseline, is_higher, digits in _BASELINES:
        if not {(kind, SIMULATOR), (kind, baseline)} <= set(rows.index):
            continue
        own, other = (rows.loc[kind, name] for name in (SIMULATOR, baseline))
        passed = bool(is_higher == (own["mean"] > other["mean"]))
        overlap = max(own["low_95"], other["low_95"]) <= min(own["high_95"], other["high_95"])
        texts = [format_interval(row["mean"], row["low_95"], row["high_95"], f".{digits}f")
                 for row in (own, other)]
        checks.append(Check(None if overlap else passed, f"{title} at step {step}: {texts[0]}; "
                            f"{LABELS[baseline]}: {texts[1]}"))
    return checks


def attribution_checks(output: Path) -> list[Check]:
    """Return the verdicts of the checks of attributions, from their report."""
    text = ResultStore(output / "analysis" / "attribution" / "checks", CHECK_FILES).read("report")
    checks = []
    for title, verdict in re.findall(r"^- \[(.+)\]\(#\w+\) (.+)$", text, re.MULTILINE):
        exceptions = re.search(r"in \d+ of \d+ cases", verdict)
        passed = False if exceptions else True if ": yes, in all" in verdict else None
        checks.append(Check(passed, f"{title} {re.sub('; exceptions: [^.]*', '', verdict)}"))
    return checks


TABLES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {  # by section
    "simulator": ("loss_over_time", card_table),
    "interventions": ("interventions", effects_table)}
CHECKS_OF: dict[str, tuple[str, Callable[[Path], list[Check]]]] = {  # by section
    "simulator": ("loss_over_time", card_checks),
    "attribution": ("attribution_checks", attribution_checks)}


def draw_training_curve(output: Path, agent_file: str | None) -> None:
    """Plot the training curve of the analysed agent, from the log next to its file.

    Args:
        output: output folder.
        agent_file: file of the agent; None for the agent that was trained here.
    """
    if agent_file is None:
        logs = sorted((output / "agent").glob("**/log.csv"))
    else:
        logs = list((ROOT / agent_file).parent.glob("log.csv"))
    if logs:
        log = read_log(logs[-1].parent)
        plot_for_figure(log, output / TRAINING_CURVE, f"{log['timesteps'].iloc[-1]:,} steps")


def write_saliency_strips(output: Path, folder: Path, kind: str, suffix: str) -> None:
    """Write image strips of the first samples, up to the step at which the saliency is evaluated:
    frames above the maps of several functions.

    Args:
        folder: folder of the strips.
        kind: first word of their names.
        suffix: suffix of the functions, one of ``gradients.SUFFIXES``, or "".
    """
    files = SaliencyFolder(output / "samples" / "informed_init")
    kinds = {"function": str, "common_timesteps": list}
    for number in files.samples.numbers()[:STRIP_SAMPLES]:
        described = [check_entries(read_description(path), kinds, path, kinds)
                     for path in sorted(files.samples.sample_folder(number).glob("saliency_*.json"))
                     if suffix_of(path.stem) == suffix]
        steps = {each["function"]: 1 + max(each["common_timesteps"]) for each in described}
        functions = sorted(steps, key=lambda name: (("value", "action", name).index(name), name))[
            :STRIP_FUNCTIONS]
        if functions:
            length = max(steps[name] for name in functions)
            rows = {"frame": files.samples.sample(number).frames[:length],
                    **{title_of(name): files.saliency(number, name + suffix).processed[:length]
                       for name in functions}}
            with atomic_path(folder / f"{kind}_{number:05d}.png") as temporary:
                _labelled(rows).save(temporary)


def _labelled(rows: dict[str, np.ndarray]) -> Image.Image:
    """Arrange frames in a strip, with a name for each row, numbers of the steps and a scale.

    Args:
        rows: frames of each row by its name, uint8 (T, H, W, C).
    """
    image = strip([list(frames) for frames in rows.values()], STRIP_HEIGHT)
    gap, font = STRIP_HEIGHT // 32, ImageFont.load_default(size=20)
    whole = Image.new("RGB", (image.width + STRIP_LABELS, image.height + 56), (255, 255, 255))
    whole.paste(image, (STRIP_LABELS, 28))
    draw = ImageDraw.Draw(whole)
    for place, name in enumerate(rows):
        draw.text((8, 28 + (place + 0.5) * (STRIP_HEIGHT + gap)), name, (0, 0, 0), font,
                  anchor="lm")
    for step in range(len(next(iter(rows.values())))):
        draw.text((STRIP_LABELS + (step + 0.5) * (STRIP_HEIGHT + gap), 4), f"step {step}",
                  (0, 0, 0), font, anchor="mt")
    shades = coloured(np.linspace(-1, 1, 200)[None, None], np.full((1, 1, 200, 3), 255), 1.0)
    whole.paste(Image.fromarray(shades[0]).resize((120, 16)), (62, whole.height - 20))
    for x, text in ((8, "lowers"), (190, "raises; full colour: the row's largest 0.5 %")):
        draw.text((x, whole.height - 12), text, (0, 0, 0), ImageFont.load_default(size=15),
                  anchor="lm")
    return whole
