"""The table of findings on maze agents, and the preset that computes it."""

import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from conftest import figures_drawn, small_policy
from PIL import Image

import run_pipeline
from agents.agent_file import save_agent
from maze import behaviour, series, steering, table
from maze.studies import claims
from maze.studies.claims import CLAIMS, StudiesFolder, findings_of
from maze.studies.series import VECTOR_EFFECT
from pipeline.presets import load_preset
from pipeline.stage_files import all_stages
from stats.claims import Finding, findings_table
from stats.significance import holm


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model.pth"
    save_agent(path, small_policy(recurrent=False), {})
    return path


@pytest.fixture(scope="module")
def studies(agent, tmp_path_factory):
    """The folder of studies of an agent: an evaluation, and steering on 12 forks."""
    folder = tmp_path_factory.mktemp("studies") / "small"
    assert steering.main([
        "--agent_file", str(agent), "--device", "cpu", "--num_mazes", "12", "--size", "3:7",
        "--num_controls", "2", "--num_fields", "0", "--coefficients", "-1", "1",
        "--output_dir", str(folder / claims.STEERING)]) == 0
    (folder / claims.EVALUATED).mkdir()
    (folder / claims.EVALUATED / "region.json").write_text(json.dumps({
        "success_rate": 0.9, "success_interval": [0.8, 0.95], "num_episodes": 100}))
    return folder


def test_numbers_of_the_table_are_those_of_the_studies(studies, tmp_path, capsys):
    assert table.main(["--studies", str(studies), "--output_dir", str(tmp_path)]) == 0
    assert "small: numbers in 3 of 18 rows" in capsys.readouterr().out
    found = pd.read_csv(tmp_path / "findings.csv")
    steered = pd.read_csv(studies / claims.STEERING / "effects.csv")
    for row, label, outcome in ((6, "own -1", "p_cheese"), (7, "own +1", "log_odds")):
        [mine] = found[(found["row"] == row) & found["primary"]].itertuples()
        [theirs] = steered[(steered["label"] == label) & (steered["outcome"] == outcome)
                           & ~steered["control"]].itertuples()
        np.testing.assert_allclose(
            [mine.base, mine.altered, mine.value, mine.low_95, mine.high_95, mine.p_control],
            [theirs.unaltered, theirs.altered, theirs.effect, theirs.low_95, theirs.high_95,
             theirs.p_control], rtol=1e-5)
        assert mine.num_levels == 12
    summary, *details = (tmp_path / "table.md").read_text().split("\n## ")
    lines = [line for line in summary.splitlines()[2:] if line.startswith("|")]
    numbers = [int(line.split("|")[1]) for line in lines]
    assert numbers == list(range(1, 19)) == list(CLAIMS.claims)
    assert ": 0.900 (0.800 to 0.950)<br>not tested |" in lines[0]
    assert "not measured" in lines[2] and "differ only in R" in details[2]
    assert "retargeting has not been run to its end" in details[15]
    [mine] = found[(found["row"] == 6) & found["primary"]].itertuples()
    assert f"{mine.value:+.3f} (" in lines[5] and "holds**" not in lines[6].replace("does not", "")
    with Image.open(tmp_path / "findings.png") as picture:
        assert picture.width > 160  # two panels


@pytest.mark.slow
def test_a_series_of_agents_fills_row_3(studies, agent, tmp_path, capsys):
    """Three agents play the same levels. Success first rises with an agent's number, then falls."""
    played = tmp_path / "played"
    assert behaviour.main(["--agent_file", str(agent), "--device", "cpu", "--num_mazes", "24",
                           "--size", "3:7", "--region", "2", "--exact", "--output_dir",
                           str(played)]) == 0
    rows = pd.read_csv(played / "episodes.csv")
    outside = np.flatnonzero(~rows["cheese_in_region"])
    assert 6 < len(outside) < len(rows)
    folders, shares = [], []
    for number in (1, 2, 3):
        folders.append(tmp_path / f"agent_{number}")
        shutil.copytree(played, folders[-1] / "behaviour")
        rows["got_cheese"] = False
        rows.loc[outside[:2 * number], "got_cheese"] = True
        shares.append(2 * number / len(outside))
        rows.to_csv(folders[-1] / "behaviour" / "episodes.csv", index=False)
    shutil.copytree(studies / claims.STEERING, folders[1] / claims.STEERING)
    given = ["--studies", *map(str, folders), "--numbers"]

    column = tmp_path / "column"
    output = ["--output_dir", str(column / claims.SERIES)]
    with figures_drawn() as figures:
        assert series.main([*given, "1", "5", "10", *output]) == 0
    [panel] = figures["series.png"].axes
    assert len(panel.get_legend().texts) == 3
    assert "1.00" in figures["series.png"].get_suptitle()  # the strongest correlation
    assert "and gets the cheese, 3 agents: 1.00" in capsys.readouterr().out
    table_of = pd.read_csv(column / claims.SERIES / "series.csv").set_index(["measure", "number"])
    success = table_of.loc["gets the cheese"].query("agent != 'all agents'")
    np.testing.assert_allclose(success["value"], shares, rtol=1e-5)
    assert (success["num_levels"] == len(outside)).all() and list(success.index) == [1, 5, 10]
    steered = pd.read_csv(studies / claims.STEERING / "effects.csv")
    [effect] = steered[(steered["label"] == "own -1") & (steered["outcome"] == "p_cheese")
                       & ~steered["control"]]["effect"]
    assert table_of.loc[VECTOR_EFFECT]["value"].to_dict() == {5.0: pytest.approx(effect)}
    exact = rows["exact_cheese"].to_numpy()[outside]
    np.testing.assert_allclose(table_of.loc["exact probability"]["value"], exact.mean(), rtol=1e-5)
    first, *others = [finding for finding in findings_of(StudiesFolder(column))[0]
                      if finding.row == 3]
    assert (first.value, first.num_levels, first.holds) == (1, 3, None) and len(others) == 6

    assert series.main([*given, "10", "5", "1", *output]) == 0
    assert findings_of(StudiesFolder(column))[0][0].value == -1
    assert series.main([*given, "10", "5", "1", "--by", "steps", *output]) == 0
    assert findings_of(StudiesFolder(column))[0] == []

    assert series.main([*given, "1", "2", *output]) == 2
    assert "a number for each folder" in capsys.readouterr().err
    rows.assign(seed=rows["seed"] + 1).to_csv(folders[1] / "behaviour" / "episodes.csv",
                                              index=False)
    assert series.main([*given, "1", "5", "10", *output]) == 2
    assert "different levels" in capsys.readouterr().err


@pytest.mark.parametrize(("row", "change", "verdict"), (
    (6, {}, "**holds**"), (6, {"p": 0.9}, "**does not hold**"), (7, {}, "**does not hold**"),
    (7, {"p": 0.9}, "not tested"), (8, {}, "not tested"), (2, {"primary": False}, "not tested"),
    (2, {"primary": False, "holds": True}, "**holds**")))
def test_a_claim_holds_if_what_it_says_is_claimed(row, change, verdict, tmp_path):
    finding = Finding("", "x", 1.0, 0.5, 1.5, 10, 0.0, altered=1.0, p=0.001, p_control=0.04,
                      primary=True, shown=True, row=row)
    CLAIMS.write(CLAIMS.store(tmp_path), {},
                 {"a": [dataclasses.replace(finding, **change)]}, {"a": {}})
    line = (tmp_path / "table.md").read_text().splitlines()[row + 1]
    assert line.endswith(f"| x: +1.000 (0.500 to 1.500)<br>{verdict} |")


def test_one_test_a_row_is_corrected_over_the_table():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.001, 0.06, 12)
    found = [Finding("", "x", 1.0, 0.5, 1.5, 10, p=p[row - 6], p_control=0.05, primary=True,
                     row=row) for row in range(6, 18)]
    found += [Finding("", "more", 1.0, 0.5, 1.5, 10, p=1e-9, p_control=0.05, row=6)]
    made = findings_table({"a": found, "b": found[:1]})
    mine = made[(made["agent"] == "a") & made["primary"]]
    np.testing.assert_allclose(mine["p_table"], holm(p))
    assert mine["claimed"].tolist() == (holm(p) <= 0.05).tolist()
    assert not made[~made["primary"]]["claimed"].any()
    assert made[made["agent"] == "b"]["p_table"].item() == p[0]


@pytest.mark.parametrize("change", (
    {"p": 0.2}, {"p_control": 0.1}, {"low_95": -0.5}, {"p_control": np.nan}))
def test_nothing_is_claimed_that_one_condition_speaks_against(change):
    good = Finding("", "x", 1.0, 0.5, 1.5, 10, p=0.001, p_control=0.04, primary=True,
                   shown=True, row=6)
    made = findings_table({"a": [good], "b": [dataclasses.replace(good, **change)]})
    assert made["claimed"].tolist() == [True, False]


def test_every_study_of_the_preset_fills_rows_of_the_table():
    preset = load_preset("maze")
    stages = all_stages(preset, "x")
    names = {stage.name for stage in stages}
    for agent in preset.agents:
        for study in claims.STUDIES:
            assert f"{agent}_{study}" in names
    assert set(stages[-1].needs) < names


@pytest.mark.slow
def test_the_preset_fills_the_table_with_the_numbers_of_its_studies(agent, tmp_path, capsys,
                                                                   monkeypatch):
    """All studies run in order, with small sizes, on an untrained network."""
    small = load_preset("maze-tiny", agent, retargeted_mazes=1, page=False, channel_mazes=10,
                        behaviour_forks=12)
    monkeypatch.setattr(run_pipeline, "load_preset", lambda *_, **__: small)
    assert run_pipeline.main(["--preset", "maze-tiny", "--agent_file", str(agent),
                              "--output_dir", str(tmp_path)]) == 0
    folder = tmp_path / "analysis" / "maze" / agent.parent.name
    found, reasons = findings_of(StudiesFolder(folder))
    assert {each.row for each in found} | set(reasons) == set(range(1, 19))
    assert len({each.row for each in found}) >= 12
    assert "of 18 rows have numbers" in capsys.readouterr().out
    primary = {each.row: each for each in found if each.primary}
    for row, study, file, label, outcome in (
            (9, claims.SOURCES, "effects", "same_square -1", "p_cheese"),
            (10, claims.FIELDS, "field_effects", "own -1", "distance_to_other_level"),
            (11, claims.ALL_LAYERS, "effects", "own -0.05", "p_cheese"),
            (12, claims.TOP_RIGHT, "effects", "own +1", "p_corner"),
            (13, claims.BOTH, "effects", "interaction", "log_odds")):
        made = pd.read_csv(folder / study / f"{file}.csv")
        [theirs] = made[(made["label"] == label) & (made["outcome"] == outcome)
                        & ~made["control"]].itertuples()
        mine = primary[row]
        np.testing.assert_allclose([mine.value, mine.low_95, mine.high_95, mine.p],
                                   [theirs.effect, theirs.low_95, theirs.high_95, theirs.p])
