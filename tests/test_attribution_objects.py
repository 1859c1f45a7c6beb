"""Object masks of recordings, scores and names of features, and the script ``objects``."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import small_policy
from sklearn.metrics import roc_auc_score

from agents.replay import replayed
from agents.rollout_files import RolloutFolder
from attribution import objects
from attribution.checking.object_files import (
    OBJECT_FILES,
    read_names,
    rendered_without,
    unpacked,
)
from attribution.checking.object_scores import (
    cells_of,
    hallucinations,
    object_scores,
    score_difference,
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


def test_recorded_frames_are_played_again_from_seed_and_actions(box_run):
    folder = RolloutFolder(box_run / "data")
    length = len(folder.steps(2)) - 1
    rows = [0, length // 2, length - 1]
    states = dict(replayed(folder, 2, rows))
    assert list(states) == rows
    places = np.array([(2, row) for row in rows])
    frames = folder.episode(2).frames
    for row, (_, pictures) in zip(rows, rendered_without(folder, places, objects_of("coinrun"))):
        assert np.array_equal(pictures.frame, frames[row])
        assert pictures.masks.any(axis=(1, 2)).sum() >= 3
        assert pictures.without.shape == (len(objects_of("coinrun")), 64, 64, 3)


def test_a_recording_that_the_game_does_not_repeat_is_refused(box_run, tmp_path):
    length = len(RolloutFolder(box_run / "data").steps(1)) - 1
    frames = changed(box_run, tmp_path / "frames")
    array = np.load(frames.episode_folder(1) / "ob.npy")
    array[4, 0, 20, 20] ^= 1
    np.save(frames.episode_folder(1) / "ob.npy", array)
    assert len(list(replayed(frames, 1, [0, 3]))) == 2  # what lies before is as it was
    actions = changed(box_run, tmp_path / "actions")
    steps = pd.read_csv(actions.steps_file(1))
    steps.loc[2:6, "action"] = 4
    steps.to_csv(actions.steps_file(1), index=False)
    description = json.loads(frames.description_file.read_text())
    options = changed(box_run, tmp_path / "options", env={
        **description["env"], "use_backgrounds": True},
        versions={**description["versions"], "procgen-mirror": "0.0.1"})
    for folder, words in (
            (frames, "episode 1 differs from the real game at step 4; likely its frames, actions"),
            (options, r"at step 0; likely it was made with other versions: procgen-mirror 0\.0\.1"),
            (actions, "episode 1 differs"),
            (changed(box_run, tmp_path / "edited", cheese_region=5), "edited"),
            (changed(box_run, tmp_path / "unknown", env=None), "which game")):
        with pytest.raises(UserError, match=words):
            list(replayed(folder, 1, range(length)))
    with pytest.raises(UserError, match=f"there is none in row {length}"):
        list(replayed(RolloutFolder(box_run / "data"), 1, [length]))


def test_a_pixel_touches_the_cell_whose_centre_is_nearest():
    for architecture in ("impala", "nature", "clear"):
        for bottleneck in find_bottlenecks(small_policy(architecture)):
            centres = bottleneck.centres()
            rng = np.random.default_rng(0)
            for row, column in rng.integers(0, 64, (20, 2)):
                mask = np.zeros((64, 64), bool)
                mask[row, column] = True
                [(i, j)] = np.argwhere(cells_of(mask, bottleneck))
                for pixel, cell in ((row, i), (column, j)):
                    assert abs(centres[cell] - pixel) == np.abs(centres - pixel).min()
            both = np.zeros((2, 64, 64), bool)
            both[1, 3:40, 60] = True
            found = cells_of(both, bottleneck)
            assert found.shape == (2, *bottleneck.shape[1:]) and not found[0].any()
            assert found[1].any(axis=0).sum() == 1


def planted(number=240, side=6, seed=0):
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
    scores = object_scores(activations, touched, episodes, seed=0)
    assert scores.auc[0, 0] > 0.95 and scores.auc[3, 1] > 0.8
    assert abs(scores.auc[1, 1] - 0.5) < 0.03, "a place is no object"
    assert np.abs(scores.auc[2, :2] - 0.5).max() < 0.03
    assert np.isnan(scores.auc[:, 2]).all(), "always at one place"
    assert scores.best.tolist()[0] == 0 and scores.best.tolist()[3] == 1
    assert scores.named.tolist() == [True, False, False, True]
    known = ~np.isnan(scores.auc)
    assert (scores.low[known] <= scores.auc[known] + 1e-9).all()
    assert (scores.auc[known] <= scores.high[known] + 1e-9).all()
    assert np.abs(scores.chance[known] - 0.5).max() < 0.02
    assert scores.score[0] == pytest.approx(scores.auc[range(4), scores.best].mean())
    assert scores.score[1] < scores.score[0] < scores.score[2]
    assert 0.5 < scores.score_chance < 0.55 < scores.score[0]


def test_scores_are_the_weighted_area_under_the_roc():
    activations, touched, episodes = planted(60)
    scores = object_scores(activations, touched, episodes, seed=0)
    for kind in range(2):
        share = touched[..., kind].mean(axis=0)
        weights = np.where(touched[..., kind], 1 - share, share)
        for feature in range(4):
            expected = roc_auc_score(touched[..., kind].ravel(), activations[..., feature].ravel(),
                                     sample_weight=weights.ravel())
            assert scores.auc[feature, kind] == pytest.approx(expected, abs=2e-3)


def test_scores_of_two_kinds_of_features_are_compared_in_the_same_frames():
    rng = np.random.default_rng(0)
    episodes = np.repeat(np.arange(12), 10)
    touched = rng.random((120, 4, 4, 2)) < 0.2
    noise = rng.random((2, 120, 4, 4, 2))
    value, low, high = score_difference(touched + noise[0], 0.3 * touched + noise[1], touched,
                                        episodes, seed=0)
    scores = [object_scores(each, touched, episodes, seed=0).score[0]
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
    found = hallucinations(activations, touched, episodes, seed=0)
    assert found.threshold == np.quantile(activations, 0.99, method="higher") > 1.1
    assert found.rate == 15 and 0 <= found.low < 15 < found.high
    assert found.frames.tolist() == [51, 120], "one an episode, strongest first"
    assert found.cells.tolist() == [[7, 0], [0, 5]] and found.strengths.tolist() == [30, 25]
    none = hallucinations(activations, np.ones_like(touched), episodes, seed=0)
    assert (none.rate, len(none.frames)) == (0, 0)


def arguments_of(agent: Path, run: Path, folder: Path, *more: str) -> list[str]:
    return ["--agent_file", str(agent), "--data_dir", str(run / "data"), "--device", "cpu",
            "--features_dir", str(run / "features"), "--num_observations", "120", "--output_dir",
            str(folder), *more]


def test_a_planted_feature_is_named_by_its_object(box_agent, box_run, tmp_path, capsys):
    arguments = arguments_of(box_agent, box_run, tmp_path / "objects")
    assert objects.main([*arguments, "--dry_run"]) == 0
    assert not (tmp_path / "objects").exists()
    assert objects.main(arguments) == 0
    assert "block3: object score" in capsys.readouterr().out
    store = ResultStore(tmp_path / "objects", OBJECT_FILES)
    assert store.keys("names") == ["block3"]
    kinds = store.settings()["kinds"]
    assert kinds == [kind.name for kind in objects_of("coinrun")]
    arrays = store.read("masks")
    observations, masks = arrays["observations"], unpacked(arrays["masks"])
    assert masks.shape == (120, len(kinds), 64, 64) and len(observations) == 120
    again = np.stack([pictures.masks for _, pictures in rendered_without(
        RolloutFolder(box_run / "data"), observations[:9], objects_of("coinrun"))])
    np.testing.assert_array_equal(masks[:9], again)
    [feature] = read_names(store, "block3")["features"]
    assert feature["name"] == "box" and feature["score"] > 0.85
    assert feature["low_95"] > feature["chance_high"]
    table = store.read("scores", "block3")
    best = table.sort_values("auc").dropna().iloc[-1]
    assert len(table) == len(kinds) and best["kind"] == "box"
    assert feature["score"] == pytest.approx(best["auc"], rel=1e-5)
    listed = store.read("hallucinations", "block3")
    assert bool(len(listed)) == bool(feature["hallucinations"])
    assert (listed["activation"] > listed["threshold"]).all()
    for row in listed.itertuples():
        [frame] = np.flatnonzero((observations == (row.episode, row.row)).all(axis=1))
        assert not masks[frame, kinds.index(row.kind), 8 * row.cell_row:8 * row.cell_row + 4,
                         8 * row.cell_column:8 * row.cell_column + 4].any()
    before = {path: path.read_bytes() for path in (tmp_path / "objects").rglob("*.*")}
    store.file_of("names", "block3").unlink()
    assert objects.main(arguments) == 0  # as after a kill
    assert before == {path: path.read_bytes() for path in before}
    assert not store.has("compared", "block3")
    assert objects.main([*arguments, "--other_features_dir", str(box_run / "features")]) == 0
    assert store.read("compared", "block3")["difference"] == 0


def test_units_and_other_games_and_agents_are_refused(box_agent, box_run, tmp_path, capsys):
    description = json.loads(RolloutFolder(box_run / "data").description_file.read_text())
    other = tmp_path / "other"
    changed(box_run, other / "data", env={**description["env"], "env_name": "bigfish"})
    shutil.copytree(box_run / "features", other / "features")
    settings = other / "features" / "block3" / "settings.json"
    settings.write_text(settings.read_text().replace('"agent_sha256": "', '"agent_sha256": "0'))
    for run, more, words in (
            (box_run, ("--layers", "hidden_state"), "give --layers with cells"),
            (other, (), "has no objects of bigfish"),
            (box_run, ("--features_dir", str(other / "features")), "are of the agent 0")):
        assert objects.main(arguments_of(box_agent, run, tmp_path / "objects", *more)) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "objects").exists()
