"""Stored results: fidelity cards, claims, tables of documents, and findings read from them."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from agents.provenance import agent_sha256
from common.errors import UserError
from common.files import sha256
from common.results import ResultStore
from generative.card_tables import CARD_KINDS, CARDS, card_finding, read_card
from generative.loss_over_time import LOSS_OVER_TIME
from stats.claims import Finding
from tools import tables

NAMES = sorted(path.stem for path in CARDS.glob("*.csv"))


def test_tables_of_documents_are_the_stored_ones():
    """To write them again: python -m tools.tables."""
    shown = "".join(path.read_text(encoding="utf-8") for path in tables.documents())
    for document in tables.documents():
        text = document.read_text(encoding="utf-8")
        assert tables.update(text) == text, document
    assert NAMES and all(f"<!-- card: {name} -->" in shown for name in NAMES)
    assert all(f"<!-- claims: {name} -->" in shown for name in tables.CLAIMS)
    assert shown.count("<!-- end -->") == len(tables._BLOCK.findall(shown))


def test_model_cards_have_the_numbers_of_their_evaluations():
    files = sorted(tables.PRETRAINED.glob("*/evaluation*.json"))
    for file in files:
        measured = json.loads(file.read_text())
        low, high = (f"{100 * end:.1f}" for end in measured["success_interval"])
        numbers = (f"{100 * measured['success_rate']:.1f} % ({low} to {high}) | "
                   f"{measured['mean_length']:.1f} steps |")
        rows = [line for line in (file.parent / "README.md").read_text().splitlines()
                if f"(`{file.name}`)" in line]
        assert len(rows) == 1 and rows[0].endswith(numbers), file
    assert len(files) == 8


def test_the_document_has_the_comparison_of_searches_for_edits():
    table = pd.read_csv(tables.PRETRAINED / "coinrun_hard" / "results" / "saw_edits.csv")
    gains = 100 * table.set_index("search")["gain"]
    random = gains[gains.index.str.startswith("random features")]
    better = int((random >= gains["features"]).sum())
    text = " ".join((tables.ROOT / "docs" / "attribution.md").read_text().split())
    for quoted in (f"{gains['features']:.1f} points", f"{gains['shipped edit']:.1f} points",
                   f"−{-random.min():.1f} to {random.max():.1f} (median {random.median():.1f})",
                   f"{better} of them", f"p = {1 + better}/{1 + len(random)}"):
        assert quoted in text


@pytest.mark.parametrize("name", sorted(tables.CLAIMS))
def test_documents_show_the_verdicts_on_claims(name):
    """The verdicts are computed from intervals and p-values, and not only stored."""
    claims, file = tables.CLAIMS[name]
    table = pd.read_csv(file)
    tested = table[table["primary"]]
    assert (tested["claimed"] == ((tested["low_95"] > 0) | (tested["high_95"] < 0))
            & (tested["p_table"] <= 0.05) & (tested["p_control"] <= 0.05)).all()
    lines = claims.verdicts(table)
    assert len(lines) == len(claims.claims) + 3  # header, rule, empty line
    assert sum("✗" in line for line in lines) == {"maze": 3, "attribution": 1}[name]
    table.loc[table["primary"] | table["holds"].notna(), ["claimed", "holds"]] = [False, np.nan]
    assert not any("✓" in line for line in claims.verdicts(table))


def test_claims_are_stored_as_documents_show_them(tmp_path):
    """A table of claims that was just computed is stored with its shown numbers."""
    claims, _ = tables.CLAIMS["maze"]
    findings = {"agent": [
        Finding("forks", "P(cheese)", -0.5, -0.6, -0.4, 9, base=0.7, altered=0.2, p=0.001,
                p_control=0.04, primary=True, shown=True, row=6),
        Finding("forks", "not shown", 0.1, 0.0, 0.2, 9, row=6)]}
    claims.write(claims.store(tmp_path / "maze"), {}, findings, {"agent": {}})
    tables.store_claims(tmp_path / "maze", tmp_path / "results" / "claims.csv")
    stored = pd.read_csv(tmp_path / "results" / "claims.csv")
    assert stored["measure"].tolist() == ["P(cheese)"]
    [row] = [line for line in claims.verdicts(stored) if line.startswith("| 6 ")]
    assert row.endswith("| P(cheese) | ✓ -0.500 (0.700) |")
    with pytest.raises(UserError, match="holds no table of claims"):
        tables.store_claims(tmp_path, tmp_path / "claims.csv")


@pytest.mark.parametrize("name", NAMES)
def test_cards_were_measured_with_the_shipped_files(name):
    """After a new simulator is shipped, its card must be measured."""
    facts = json.loads((CARDS / f"{name}.json").read_text())
    assert facts["model_sha256"] == sha256(ROOT / "pretrained/coinrun_hard_simulator/model.pt")
    assert facts["agent_sha256"] == agent_sha256(ROOT / "pretrained/coinrun_hard/model.pth")
    assert facts["unseen"] and facts["action_noise"] == name.replace("_", " action ")
    assert "/" not in (CARDS / f"{name}.json").read_text()  # no path of the measuring machine


def test_every_number_of_a_card_has_an_interval_and_the_agent_has_baselines():
    for name in NAMES:
        table = read_card(CARDS / f"{name}.csv")
        assert set(zip(table["kind"], table["predictor"])) == CARD_KINDS
        assert (table["low_95"] <= table["mean"] + 1e-6).all()
        assert (table["mean"] <= table["high_95"] + 1e-6).all()


def test_a_wrong_number_in_a_document_or_in_a_card_is_noticed(tmp_path):
    text = tables.update(f"<!-- card: {NAMES[0]} -->\n<!-- end -->\nafter\n")
    assert tables.update(text) == text and tables.render_card(NAMES[0]) in text
    table = read_card(CARDS / f"{NAMES[0]}.csv")
    psnr = table.query("kind == 'psnr' and predictor == 'simulator' and step == 5")["mean"].item()
    assert f"| {psnr:.1f} (" in text
    assert tables.update(text.replace(f"| {psnr:.1f} (", f"| {psnr + 1:.1f} (")) == text
    for path in CARDS.glob(f"{NAMES[0]}.*"):
        shutil.copy(path, tmp_path)
    table.loc[table["kind"] == "psnr", "mean"] += 1
    table.to_csv(tmp_path / f"{NAMES[0]}.csv", index=False)
    assert tables.render_card(NAMES[0], tmp_path) != tables.render_card(NAMES[0])


@pytest.fixture
def measured(tmp_path):
    """A folder like that of loss_over_time_experiment.py, with made-up numbers."""
    rows = [(step, predictor, kind, 0.5, 0.4, 0.6) for step in range(17)
            for kind, predictor in (*sorted(CARD_KINDS), ("image", "simulator"))]
    estimate = {"value": 0.5, "interval_95": [0.4, 0.6]}
    event = {"real": 3, "expected": 2.0, **dict.fromkeys(
        ("expected_over_real", "brier", "skill", "excess_reliability", "auc"), estimate)}
    within = {"coin": event, "death": event, "end": event, "confusion": {"death": {"death": 1}}}
    store = ResultStore(tmp_path / "measured", LOSS_OVER_TIME)
    facts = dict.fromkeys(tables._FACTS, "x") | {"rendered_worlds": False, "seed": 0}
    with store.replace({**facts, "data_dir": "/home/me", "windows": [4, 5, 6],
                        "episodes": [1, 1, 2]}) as folder:
        written = ResultStore(folder, LOSS_OVER_TIME)
        written.write("table", value=pd.DataFrame(rows, columns=[
            "step", "predictor", "kind", "mean", "low_95", "high_95"]))
        written.write("lives_summary", value={
            group: {"starts": 7, "within_16": within} for group in ("anywhere", "near_end")})
    return store.path


def test_results_are_stored_as_cards(measured, tmp_path):
    tables.store_card("mine", measured, tmp_path / "cards")
    table = read_card(tmp_path / "cards" / "mine.csv")
    assert set(zip(table["kind"], table["predictor"])) == CARD_KINDS
    assert "/home/me" not in (tmp_path / "cards" / "mine.json").read_text()
    text = tables.render_card("mine", tmp_path / "cards")
    assert "3 windows of 2 episodes, x, in sampled worlds" in text
    assert "| policy KL (nats) | 0.50 (0.40 to 0.60) |" in text
    for starts in ("anywhere", "4 to 12 steps before an end"):
        assert (f"- From 7 starts {starts}, the simulator expects 2.0 coins (real: 3; Brier skill: "
                "0.50 (0.40 to 0.60)) and 2.0 deaths (real: 3, of which 1 occur)") in text


def test_findings_state_their_baselines():
    table = read_card(CARDS / "without_noise.csv")
    means = table[table["step"] == 5].set_index(["kind", "predictor"])["mean"]
    text = card_finding(table, {"windows": 3, "action_noise": "without action noise"}, 5)
    for key in (("psnr", "simulator"), ("psnr", "last_frame")):
        assert f"{means[key]:.1f}" in text
    assert f"(constant policy: {means['policy_kl', 'constant_policy']:.2f})" in text
    assert np.isfinite(means).all()


@pytest.mark.parametrize("argument", ["quiet", "../x=folder"])
def test_arguments_are_checked(argument, capsys):
    assert tables.main([argument]) == 2
    assert "not of the form NAME=FOLDER" in capsys.readouterr().err


def test_folders_without_results_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*settings\.json"):
        tables.store_card("mine", tmp_path / "none", tmp_path / "cards")
