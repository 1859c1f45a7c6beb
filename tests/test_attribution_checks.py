"""Checks of attributions, and names of features, on an agent with known correct answers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import bytes_of_files, refusal, small_policy
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from agents.agent_file import load_agent
from agents.replay import level_states
from agents.rollout_files import RolloutFolder
from attribution import checks, objects
from attribution.checking import randomisation
from attribution.checking.agent_checks import CHECK_FILES, CHECKS
from attribution.checking.deletion import areas_under, compare_areas
from attribution.checking.object_removal import objects_table
from attribution.checking.object_scores import (
    OBJECT_FILES,
    cells_of,
    hallucinations,
    object_scores,
    read_names,
    score_difference,
    unpacked,
)
from attribution.checking.randomisation import cascade, randomise, stages_of
from attribution.layers import find_bottlenecks
from attribution.results import AttributionStore
from common.errors import UserError
from common.results import ResultStore
from envs.objects import objects_of
from stats.association import rank_correlation, ratio, slope
from stats.bootstrap import ClusterBootstrap

NUM_FRAMES = 60


def arguments_of(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device", "cpu",
            "--features_dir", str(run / "features"), "--output_dir", str(folder), *more]


def check_arguments(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return arguments_of(agent, run, folder, "--attribution_dir", str(run / "attribution"),
                        "--num_frames", str(NUM_FRAMES), *more)


@pytest.fixture(scope="module")
def made(box_agent, box_run, tmp_path_factory) -> ResultStore:
    store = ResultStore(tmp_path_factory.mktemp("checks") / "out", CHECK_FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomisation, "NUM_FRAMES", 24)
        patch.setattr(randomisation, "FIDELITY_FRAMES", 8)
        assert checks.main(check_arguments(box_agent, box_run, store.path)) == 0
    return store


def table_of(store: ResultStore, check: str) -> pd.DataFrame:
    return pd.read_csv(store.path / f"{check}.csv")


def test_the_checks_find_what_was_planted(made, box_run):
    [complete] = table_of(made, "completeness").itertuples()
    assert complete.met and complete.high < 1e-3 and complete.frames == 240

    deletion = table_of(made, "deletion")
    assert deletion[deletion["other"] == "random"]["above"].all()
    assert (deletion["high_95"] >= -1e-6).all(), "the right order is nowhere worse"

    raw = made.read("interventions", "block3", "value")
    everything = AttributionStore(box_run / "attribution").read_all(
        "attributions", "block3", "value", name="totals")
    assert len(raw["totals"]) == NUM_FRAMES and np.isin(raw["totals"], everything).all()
    [feature] = table_of(made, "interventions").itertuples()
    assert feature.slope == pytest.approx(1, abs=0.01) and feature.r2 > 0.999
    assert feature.expected > 0 and feature.low_95 <= feature.slope <= feature.high_95

    table = table_of(made, "objects").set_index("kind")
    box = table.loc["box"]
    assert box["agreement"] > 0.9 and box["above_chance"] and box["chance"] < box["agreement"]
    assert box["change"] > 0 and box["expected"] > 0 and box["attribution_sign"] < -0.9
    assert box["share"] > 0.3 and box["density_low_95"] > 2
    assert not (table.drop("box")["above_chance"].dropna() == True).any()  # noqa: E712

    [fidelity] = table_of(made, "fidelity").itertuples()
    assert fidelity.infidelity < 1e-3, "attributions to what is linear say all"

    random = table_of(made, "randomisation")
    assert random["drawn_again"].tolist() == ["heads", "fc", "block3", "block2", "block1"]
    assert random["correlation"].iloc[-1] < 0.5
    text = made.read("report")
    for check in CHECKS:
        assert f'<a id="{check}"></a>' in text and made.has(f"{check}_figure")
    assert "yes, in all 1 cases" in text


def test_attributions_of_the_wrong_sign_are_found_out(box_agent, box_run, tmp_path):
    """The signs of all attributions of a run are flipped."""
    wrong = shutil.copytree(box_run / "attribution", tmp_path / "attribution")
    for path in (wrong / "block3" / "value").glob("trajectory_*.npz"):
        with np.load(path) as found:
            arrays = dict(found)
        np.savez(path, **{**arrays, "cells": -arrays["cells"], "totals": -arrays["totals"]})
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    assert checks.main(check_arguments(box_agent, box_run, store.path, "--checks", "interventions",
                                       "objects", "--attribution_dir", str(wrong))) == 0
    [feature] = table_of(store, "interventions").itertuples()
    assert feature.slope == pytest.approx(-1, abs=0.01)
    box = table_of(store, "objects").set_index("kind").loc["box"]
    assert box["agreement"] < 0.1 and not box["above_chance"]
    assert "exceptions: block3, value" in store.read("report")


def test_checks_can_be_added_to_those_that_are_stored(box_agent, box_run, made, tmp_path):
    store = ResultStore(tmp_path / "out", CHECK_FILES)
    arguments = check_arguments(box_agent, box_run, store.path, "--checks", "deletion")
    assert checks.main(arguments) == 0
    raw = store.file_of("deletion", "block3", "value")
    written = raw.stat().st_mtime_ns
    assert checks.main([*arguments, "--layers", "block3"]) == 0
    assert raw.stat().st_mtime_ns == written
    # Results that belong to other features are recomputed.
    np.savez(raw, **{**np.load(raw), "of": np.array("0" * 64)})
    assert checks.main([*arguments, "interventions"]) == 0
    files, whole = (bytes_of_files(each.path) for each in (store, made))
    for name in ("deletion.csv", "interventions.csv", "raw/deletion/block3/value.npz",
                 "raw/interventions/block3/value.npz"):
        assert files[name] == whole[name]
    assert "objects.csv" not in files


@pytest.mark.parametrize(("name", "key", "words"), [
    ("settings.json", "recording_sha256", "belong to another recording"),
    ("block3/settings.json", "features_sha256", "give the matching --features_dir")])
def test_attributions_of_others_are_refused(box_agent, box_run, tmp_path, capsys, name, key, words):
    other = shutil.copytree(box_run / "attribution", tmp_path / "attribution")
    settings = json.loads((other / name).read_text())
    (other / name).write_text(json.dumps({**settings, key: "0" * 64}))
    arguments = check_arguments(box_agent, box_run, tmp_path / "out", "--attribution_dir", other)
    assert words in refusal(checks.main, arguments, capsys)


def test_randomisation_reinitialises_the_parts_from_the_top_and_no_others(box_agent):
    policy = load_agent(box_agent)
    stages, before = stages_of(policy), policy.state_dict()
    after = randomise(policy, stages[1][1], 0).state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "embedder.fc.weight", "embedder.fc.bias"}
    parts = [each.state_dict() for each in cascade(policy, 0)]
    assert len(parts) == len(stages)
    for number, part in enumerate(parts):
        for later, (_, paths) in enumerate(stages):
            for name in before:
                if name.rpartition(".")[0].startswith(tuple(paths)):
                    assert torch.equal(part[name], before[name]) == (later > number), name


def test_associations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    episodes, x = np.repeat(np.arange(12), 10), rng.normal(size=120)
    y, bootstrap = 2 * x + rng.normal(size=120), ClusterBootstrap(episodes, 0)
    for found, expected in (
            (rank_correlation(x, y, episodes, bootstrap), spearmanr(x, y).statistic),
            (slope(x, y, episodes, bootstrap), np.polyfit(x, y, 1)[0]),
            (ratio(x**2, y**2, episodes, bootstrap), (x**2).mean() / (y**2).mean())):
        assert found.value == pytest.approx(expected)
        assert found.low < found.value < found.high < found.low + 1


def test_agreement_of_objects_is_judged_against_their_cells_in_other_frames(box_agent):
    """Kind 0 changes the output through its own cells. Kind 1 changes it by a constant, although
    the cells have the same distribution. Kind 2 occurs in too few frames."""
    [bottleneck] = find_bottlenecks(load_agent(box_agent), ["block3"])
    rng, number = np.random.default_rng(1), 100
    masks = np.zeros((number, 3, 64, 64), bool)
    for frame in range(number):
        for kind, (row, column) in enumerate(rng.integers(0, 60, (2, 2))):
            masks[frame, kind, row:row + 3, column:column + 3] = True
    masks[:4, 2, 5:9, 5:9] = True
    attributions = rng.normal(size=(number, 8, 8))
    cell = np.clip(np.floor(np.arange(64) / 8 + 0.5), 0, 7).astype(int)  # cell of each pixel
    changes = np.zeros((number, 3))
    for frame in range(number):
        places = {(cell[i], cell[j]) for i, j in np.argwhere(masks[frame, 0])}
        changes[frame, 0] = -sum(attributions[frame, i, j] for i, j in places)
    changes[:, 1] = 1
    table = objects_table(masks, changes, attributions, bottleneck, ["coin", "saw", "lava"],
                          np.arange(number) // 10, seed=0).set_index("kind")
    coin, saw, lava = table.loc["coin"], table.loc["saw"], table.loc["lava"]
    assert coin["agreement"] == 1 and coin["above_chance"]
    assert coin["rank_correlation"] == pytest.approx(1)
    assert abs(coin["chance"] - 0.5) < 0.2
    assert not saw["above_chance"]
    assert np.isnan(lava["agreement"]) and lava["frames"] == 4
    assert coin["share"] / coin["area"] == pytest.approx(coin["density"])
    table = table.reset_index().assign(layer="block3", output="value")
    assert "in 1 of 2 cases; exceptions: block3, value, saw" in CHECKS["objects"].verdict(table)


# Object masks of recordings, scores and names of features

def changed(run: Path, folder: Path, **description) -> RolloutFolder:
    """Copy a recording and change its description."""
    shutil.copytree(run / "data", folder)
    file = RolloutFolder(folder).description_file
    file.write_text(json.dumps({**json.loads(file.read_text()), **description}))
    return RolloutFolder(folder)


def test_a_recording_that_the_game_does_not_repeat_is_refused(box_run, tmp_path):
    length = len(RolloutFolder(box_run / "data").steps(1)) - 1
    frames = changed(box_run, tmp_path / "frames")
    array = np.load(frames.episode_folder(1) / "ob.npy")
    array[4, 0, 20, 20] ^= 1
    np.save(frames.episode_folder(1) / "ob.npy", array)
    assert len(list(level_states(frames, 1, [0, 3]))) == 2  # frames before the change are accepted
    description = frames.description()
    for folder, words in (
            (frames, "episode 1 differs from the real game at step 4; likely its frames, actions"),
            (changed(box_run, tmp_path / "options", env={
                **description["env"], "use_backgrounds": True}, versions={
                **description["versions"], "procgen-mirror": "0.0.1"}),
             r"at step 0; likely it was recorded with other versions: procgen-mirror 0\.0\.1"),
            (changed(box_run, tmp_path / "edited", cheese_region=5), "edited"),
            (changed(box_run, tmp_path / "unknown", env=None), "which game")):
        with pytest.raises(UserError, match=words):
            list(level_states(folder, 1, range(length)))


def test_a_pixel_touches_the_cell_whose_centre_is_nearest():
    for bottleneck in find_bottlenecks(small_policy("clear")):
        layer = bottleneck.layer
        centres = layer.first_pixel + layer.stride * np.arange(bottleneck.shape[1])
        for row, column in np.random.default_rng(0).integers(0, 64, (20, 2)):
            mask = np.zeros((2, 64, 64), bool)
            mask[1, row, column] = True
            [(frame, i, j)] = np.argwhere(cells_of(mask, bottleneck))
            assert frame == 1
            for pixel, cell in ((row, i), (column, j)):
                assert abs(centres[cell] - pixel) == np.abs(centres - pixel).min()


def planted(number=160, side=6, seed=0):
    """Return activations of four features and masks of three kinds. Kind 0 occurs anywhere, kind 1
    only in the upper half, and kind 2 always at one place. Feature 0 is active on kind 0, feature 1
    in the whole upper half, feature 2 independently of the kinds, and feature 3 on kind 1."""
    rng = np.random.default_rng(seed)
    touched = np.zeros((number, side, side, 3), bool)
    touched[..., 0] = rng.random((number, side, side)) < 0.1
    touched[:, :3, :, 1] = rng.random((number, 3, side)) < 0.4
    touched[:, 2, 2, 2] = True
    noise = rng.random((number, side, side, 4))
    values = np.where(noise > 0.5, noise, 0)
    values[..., 0] += touched[..., 0]
    values[:, :3, :, 1] += 2
    values[..., 3] += 0.8 * touched[..., 1]
    return values.astype(np.float32), touched, np.arange(number) // 8


def test_scores_find_what_a_feature_goes_with_and_not_where_it_lies():
    activations, touched, episodes = planted()
    table, score = object_scores(activations, touched, list("abc"), episodes, seed=0)
    auc = table.pivot(index="feature", columns="kind", values="auc").to_numpy()
    assert auc[0, 0] > 0.95 and auc[3, 1] > 0.8
    assert abs(auc[1, 1] - 0.5) < 0.03, "a place is no object"
    assert np.abs(auc[2, :2] - 0.5).max() < 0.03
    assert np.isnan(auc[:, 2]).all(), "always at one place"
    known = table.dropna()
    is_above = known["low_95"] > known["chance_high"]
    assert known[is_above][["feature", "kind"]].to_numpy().tolist() == [[0, "a"], [3, "b"]]
    assert known["auc"].between(known["low_95"] - 1e-6, known["high_95"] + 1e-6).all()
    assert np.abs(known["chance"] - 0.5).max() < 0.02
    assert score[0] == pytest.approx(np.nanmax(auc, axis=1).mean())
    assert score[1] < score[0] < score[2] and 0.5 < score[3] < 0.55 < score[0]
    for kind in range(2):  # scores are weighted by position
        share = touched[..., kind].mean(axis=0)
        weights = np.where(touched[..., kind], 1 - share, share)
        for feature in range(4):
            expected = roc_auc_score(touched[..., kind].ravel(), activations[..., feature].ravel(),
                                     sample_weight=weights.ravel())
            assert auc[feature, kind] == pytest.approx(expected, abs=2e-3)


def test_scores_of_two_kinds_of_features_are_compared_in_the_same_frames():
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(12), 10)
    touched = rng.random((120, 4, 4, 2)) < 0.2
    noise = rng.random((2, 120, 4, 4, 2))
    value, low, high = score_difference(touched + noise[0], 0.3 * touched + noise[1], touched,
                                        episodes, seed=0)
    scores = [object_scores(activations, touched, ["a", "b"], episodes, seed=0)[1][0]
              for activations in (touched + noise[0], 0.3 * touched + noise[1])]
    assert value == pytest.approx(scores[0] - scores[1], abs=1e-6)
    assert 0.1 < low < value < high < low + 0.1
    same = score_difference(touched + noise[0], touched + noise[0], touched, episodes, seed=0)
    assert same.tolist() == [0, 0, 0], "both have the same draws"
    assert np.isnan(score_difference(noise[0], noise[1], np.zeros_like(touched), episodes,
                                     seed=0)).all()


def test_a_feature_that_is_active_without_its_object_is_listed():
    rng = np.random.default_rng(0)
    touched = np.zeros((200, 8, 8), bool)
    touched[:, 3, 3] = True
    activations = 0.1 * rng.random((200, 8, 8))
    activations[:, 3, 3] += 1
    activations[:, 3, 4] += 5  # the next cell
    activations[50, 7, 0], activations[51, 7, 0], activations[120, 0, 5] = 20, 30, 25
    episodes = np.arange(200) // 10
    observations = np.stack([episodes, np.arange(200)], axis=1)
    (rate, low, high), found = hallucinations(activations, touched, observations, seed=0)
    threshold = np.quantile(activations, 0.99, method="higher")
    assert rate == 15 and 0 <= low < 15 < high and threshold > 1.1
    assert found.to_numpy().tolist() == [  # one per episode, strongest first
        [5, 51, 7, 0, 30, threshold], [12, 120, 0, 5, 25, threshold]]
    (rate, *_), found = hallucinations(activations, np.ones_like(touched), observations, seed=0)
    assert (rate, len(found)) == (0, 0)


def test_a_planted_feature_is_named_by_its_object(box_agent, box_run, tmp_path):
    arguments = arguments_of(box_agent, box_run, tmp_path / "objects", "--num_observations", "120")
    assert objects.main(arguments) == 0
    store = ResultStore(tmp_path / "objects", OBJECT_FILES)
    kinds = store.settings()["kinds"]
    assert kinds == [kind.name for kind in objects_of("coinrun")]
    arrays = store.read("masks")
    observations, masks = arrays["observations"], unpacked(arrays["masks"])
    assert masks.shape == (120, len(kinds), 64, 64) and len(observations) == 120
    [feature] = read_names(store, "block3")["features"]
    assert feature["name"] == "box" and feature["score"] > 0.85
    assert feature["low_95"] > feature["chance_high"]
    table = store.read("scores", "block3")
    best = table.sort_values("auc").dropna().iloc[-1]
    assert len(table) == len(kinds) and best["kind"] == "box"
    assert feature["score"] == pytest.approx(best["auc"], rel=1e-5)
    listed = store.read("hallucinations", "block3")
    assert bool(len(listed)) == bool(feature["hallucinations"])
    for row in listed.itertuples():
        [frame] = np.flatnonzero((observations == (row.episode, row.row)).all(axis=1))
        assert not masks[frame, kinds.index(row.kind), 8 * row.cell_row:8 * row.cell_row + 4,
                         8 * row.cell_column:8 * row.cell_column + 4].any()
    assert objects.main([*arguments, "--other_features_dir", str(box_run / "features")]) == 0
    assert store.read("compared", "block3")["difference"] == 0


def test_the_better_order_falls_in_deletion_and_rises_in_insertion():
    rng = np.random.default_rng(0)
    others = areas_under(rng.normal(size=(40, 5)))
    bootstrap = ClusterBootstrap(np.arange(40) // 2, 0)
    for kind, sign in (("deletion", -1), ("insertion", 1)):
        *_, better, low, high, above = compare_areas(others + sign, others, kind, bootstrap)
        assert (better, low, high) == pytest.approx((1, 1, 1)) and above
        assert not compare_areas(others - sign, others, kind, bootstrap)[-1]
