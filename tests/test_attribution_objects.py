"""Object masks of recordings, scores and names of features, and the script ``objects``."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import small_policy
from sklearn.metrics import roc_auc_score

from agents.replay import replayed
from agents.rollout_files import RolloutFolder
from attribution import objects
from attribution.checking.object_scores import (
    OBJECT_FILES,
    cells_of,
    hallucinations,
    object_scores,
    read_names,
    score_difference,
    unpacked,
)
from attribution.layers import find_bottlenecks
from common.errors import UserError
from common.results import ResultStore
from envs.objects import objects_of


def changed(run: Path, folder: Path, **description) -> RolloutFolder:
    """A copy of a recording with another description."""
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
    assert len(list(replayed(frames, 1, [0, 3]))) == 2  # what lies before is as it was
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
            list(replayed(folder, 1, range(length)))


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
    """Activations of four features and masks of three kinds: kind 0 anywhere, kind 1 in the upper
    half alone, kind 2 always at one place. Feature 0 goes with kind 0, feature 1 with the upper
    half whatever is there, feature 2 with nothing, feature 3 with kind 1."""
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
    for kind in range(2):  # weighted by position
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
    scores = [object_scores(each, touched, ["a", "b"], episodes, seed=0)[1][0]
              for each in (touched + noise[0], 0.3 * touched + noise[1])]
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
    activations[:, 3, 4] += 5  # beside it
    activations[50, 7, 0], activations[51, 7, 0], activations[120, 0, 5] = 20, 30, 25
    episodes = np.arange(200) // 10
    observations = np.stack([episodes, np.arange(200)], axis=1)
    (rate, low, high), found = hallucinations(activations, touched, observations, seed=0)
    threshold = np.quantile(activations, 0.99, method="higher")
    assert rate == 15 and 0 <= low < 15 < high and threshold > 1.1
    assert found.to_numpy().tolist() == [  # one an episode, strongest first
        [5, 51, 7, 0, 30, threshold], [12, 120, 0, 5, 25, threshold]]
    (rate, *_), found = hallucinations(activations, np.ones_like(touched), observations, seed=0)
    assert (rate, len(found)) == (0, 0)


def arguments_of(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device", "cpu",
            "--features_dir", str(run / "features"), "--num_observations", "120", "--output_dir",
            str(folder), *more]


def test_a_planted_feature_is_named_by_its_object(box_agent, box_run, tmp_path):
    arguments = arguments_of(box_agent, box_run, tmp_path / "objects")
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
