"""Tracking scores, resampling and probes, compared with plain loops on synthetic activations."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import scrub, track
from sklearn.metrics import log_loss, roc_auc_score

from common.errors import UserError
from interventions.probes import _wins, probe, split_levels
from interventions.resampling import OTHER, SAME, Target, channel_changes, draw_sources, resampled
from interventions.tracking import SCORES

# Tracking.

def made_up_levels(num_levels=4, size=6, channels=3, seed=0):
    """Yield synthetic levels: channel 1 has a bump at the cell of the tracked object, channel 2 is
    constant, and the others are noise. Levels have different numbers of squares."""
    rng = np.random.default_rng(seed)
    for number in range(num_levels):
        num = 8 + number
        cells = rng.integers(0, size, (num, 2))
        without = rng.normal(size=(channels, size, size)).astype(np.float32)
        activations = without + 0.3 * rng.normal(size=(num, channels, size, size)).astype("f4")
        activations[np.arange(num), 1, cells[:, 0], cells[:, 1]] += 3
        activations[:, 2] = without[2] = 0.7
        yield activations, without, cells


def scores_by_loops(levels):
    """Compute hit rate, contrast and specificity of each channel with plain loops."""
    levels = list(levels)
    _, num_channels, height, width = levels[0][0].shape
    table = []
    for channel in range(num_channels):
        hits, rows = [], []
        for activations, without, cells in levels:
            for maps, (row, column) in zip(activations, cells):
                change = maps[channel] - without[channel]
                best = np.unravel_index(change.argmax(), change.shape)
                hits.append(change.max() > change.min() and abs(best[0] - row) <= 1
                            and abs(best[1] - column) <= 1)
                rows += [(i, j, i - row, j - column, float(maps[channel, i, j]))
                         for i in range(height) for j in range(width)]
        frame = pd.DataFrame(rows, columns=["i", "j", "di", "dj", "a"])
        is_here = (frame["di"] == 0) & (frame["dj"] == 0)
        contrast = frame["a"][is_here].mean() - frame["a"][~is_here].mean()
        spread = frame["a"].std(ddof=0)
        frame["a"] -= frame.groupby(["i", "j"])["a"].transform("mean")
        between = (frame.groupby(["di", "dj"])["a"].transform("mean") ** 2).sum()
        total = (frame["a"] ** 2).sum()
        table.append((np.mean(hits), contrast / max(spread, 1e-3),
                      between / total if total > 1e-6 else 0))
    return np.array(table)


def test_tracking_scores_are_those_of_plain_loops():
    found = track(made_up_levels(), seed=0)
    np.testing.assert_allclose(found[[*SCORES]], scores_by_loops(made_up_levels()), atol=1e-5)
    assert (found["num_levels"] == 4).all() and (found["num_squares"] == 8 + 9 + 10 + 11).all()
    assert found["tracks"].tolist() == [False, True, False] and found["hit_rate"][1] == 1


def test_thresholds_are_the_largest_scores_of_permuted_squares():
    levels = list(made_up_levels())
    rng = np.random.default_rng(5)
    for _, _, cells in levels:
        cells[:] = cells[rng.permutation(len(cells))]
    largest = scores_by_loops(levels).max(axis=0)
    found = track(made_up_levels(), seed=5, num_permutations=1)
    np.testing.assert_allclose(found.loc[0, [f"{name}_threshold" for name in SCORES]].tolist(),
                               largest, atol=1e-5)


def made_up_targets(num=12, sources=5, channels=10, seed=0):
    """Return targets whose outcome is the change of channel 2, plus a small weight times that of
    channel 7. Channel 2 encodes the feature; the other channels are noise of the same size."""
    generator = torch.Generator().manual_seed(seed)

    def maps(*lead):
        return torch.randn((*lead, channels, 4, 4), generator=generator)

    targets = []
    for level in range(num):
        activations = maps(2)
        activations[:, 2] = 2.0 * level
        same, other = maps(sources), maps(sources)
        same[:, 2] = 2.0 * level + 0.1 * torch.randn((sources, 4, 4), generator=generator)
        other[:, 2] = 2.0 * level + 4 * torch.randn((sources, 1, 1), generator=generator)

        def measure(taken, before=activations):
            moved = (taken - before).abs().mean(dim=(1, 3, 4))  # (k, C)
            return (moved[:, [2]] + 0.05 * moved[:, [7]]).numpy()

        targets.append(Target(level, activations, same, other, measure))
    return targets


STD = torch.ones(10, 4, 4)


def test_the_channel_that_carries_the_feature_is_supported_and_another_is_not():
    targets = made_up_targets()
    found = scrub(targets, [2], ["moved"], STD, seed=0, num_sets=7)
    table = found.contrasts(0)
    chosen = table[~table["control"]].iloc[0]
    assert chosen["p_holm"] < 0.01 and chosen["low_95"] > 1
    # At least 19 random sets are needed.
    assert chosen["p_control"] == 1 / 8 and not chosen["supported"]
    means = found.conditions(0).set_index(["channels", "feature"])["mean"]
    assert means["hypothesis", SAME] < 0.1 < 1 < means["hypothesis", OTHER]
    assert 0 < means["random", OTHER] < 0.1
    noise = scrub(targets, [5], ["moved"], STD, seed=0, num_sets=7).contrasts(0)
    assert noise.loc[~noise["control"], "effect"].item() < 0


def test_the_double_contrast_is_that_of_plain_arithmetic():
    found = scrub(made_up_targets(), [2, 3], ["moved"], STD, seed=0, num_sets=19)
    contrast = (found.chosen[OTHER] - found.chosen[SAME])[:, 0]
    randoms = (found.random[OTHER] - found.random[SAME])[:, :, 0]
    table = found.contrasts(0).set_index("condition")
    assert table.loc["hypothesis", "effect"] == pytest.approx(
        np.mean(contrast - randoms.mean(axis=0)))
    number = int(np.abs(randoms.mean(axis=1)).argmax())
    others = np.delete(randoms, number, axis=0)
    assert table.loc[f"random_{number:02d}", "effect"] == pytest.approx(
        np.mean(randoms[number] - others.mean(axis=0)), rel=1e-6)
    assert table.loc["hypothesis", "supported"]


def test_resampled_channels_come_from_one_source_or_from_one_each():
    activations, sources = torch.zeros(3, 4, 2, 2), torch.arange(1.0, 6)[:, None, None, None]
    sources = sources.expand(5, 4, 2, 2)
    joint = resampled(activations, sources, [1, 3], "joint", np.random.default_rng(0))
    assert not joint[:, :, [0, 2]].any() and not activations.any()
    assert joint[:, 0, 1, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(joint[:, :, 1], joint[:, :, 3])
    apart = resampled(activations, sources, [1, 3], "channel", np.random.default_rng(0))
    assert sorted(apart[:, 0, 1, 0, 0].tolist()) == [1, 2, 3, 4, 5]
    assert not torch.equal(apart[:, :, 1], apart[:, :, 3])
    by_picture = torch.arange(3.0)[None, :, None, None, None].expand(5, 3, 4, 2, 2)
    taken = resampled(activations, by_picture, [1], "joint", np.random.default_rng(0))
    assert taken[:, :, 1, 0, 0].tolist() == [[0, 1, 2]] * 5


def test_random_sets_are_matched_in_size_over_all_sources():
    targets = made_up_targets()
    std = STD.clone()
    std[[2, 4, 5, 8, 9]] = 0.01  # these channels move a hundred times as far
    std[6] = 0  # the size of a constant channel is undefined
    changes = channel_changes(targets, std)
    loop = np.mean([((source - target.activations)[:, 3] / std[3]).square().sum(dim=(1, 2)).mean()
                    for target in targets for source in (*target.same, *target.other)])
    assert changes[:, 3].mean() == pytest.approx(float(loop), rel=1e-5)
    assert not changes[:, 6].any()
    found = scrub(targets, [0], ["moved"], std, seed=0, num_sets=4)
    assert found.sets[0] == (0,) and sorted(found.sets[1:]) == [(1,), (3,), (6,), (7,)]
    assert found.matched.sum() == 3 and found.moved[1 + found.matched.argmin()] == 0
    np.testing.assert_allclose(found.moved[1:][found.matched], found.moved[0], rtol=0.25)


def test_sources_have_the_wanted_feature_or_none_is_drawn():
    features = np.random.default_rng(0).integers(0, 4, 50)

    def propose(rng):
        number = int(rng.integers(60))
        return None if number >= 50 else (features[number], number)

    rng = np.random.default_rng(1)
    assert (features[draw_sources(propose, 3, True, 5, 500, rng)] == 3).all()
    assert (features[draw_sources(propose, 3, False, 5, 500, rng)] != 3).all()
    with pytest.raises(UserError, match=r"only 0 of 5 sources with the same feature .* 100 tries"):
        draw_sources(propose, 9, True, 5, 100, rng)


def made_up_probing(num_levels=60, a_level=4, seed=0):
    """Return maps (N, 3, 4, 4), a class that depends on entry (1, 2, 3), a number that is
    proportional to this entry up to noise, and levels."""
    rng = np.random.default_rng(seed)
    levels = np.repeat(np.arange(num_levels) + 100, a_level)
    activations = rng.normal(size=(len(levels), 3, 4, 4)).astype(np.float32) + 5
    number = activations[:, 1, 2, 3].astype(float)
    return activations, number > 5, 2 * number + 0.1 * rng.normal(size=len(levels)), levels


def test_what_is_there_is_read_and_what_is_shuffled_is_not():
    activations, label, _, levels = made_up_probing(num_levels=200)
    parts = split_levels(levels, 0)
    used = [set(levels[part]) for part in (parts.train, parts.penalty, parts.test)]
    assert [len(part) for part in used] == [120, 40, 40] and len(set.union(*used)) == 200
    scores = probe(activations, label, levels, 0).scores.set_index("metric")
    assert scores.loc["accuracy", "score"] > 0.9 > 0.6 > scores.loc["accuracy", "base"]
    assert scores.loc["auc", "score"] > 0.98
    assert scores.loc["log_loss", "score"] < 0.3 < scores.loc["log_loss", "base"]
    assert (scores.loc[["accuracy", "auc"], "shuffled"] - 0.5).abs().max() < 0.15
    assert (scores["low_95"] <= scores["score"]).all()
    assert (scores["score"] <= scores["high_95"]).all()


def test_scores_are_those_of_scikit_learn_on_the_test_part():
    activations, label, number, levels = made_up_probing()
    test = split_levels(levels, 0).test
    found = probe(activations, label, levels, 0, num_shuffles=0)
    scores = found.scores.set_index("metric")["score"]
    margin = (activations[test] * found.weights).sum(axis=(1, 2, 3)) + found.intercept
    probability = 1 / (1 + np.exp(-margin))
    assert scores["accuracy"] == np.mean((margin > 0) == label[test])
    assert scores["auc"] == pytest.approx(roc_auc_score(label[test], margin))
    assert scores["log_loss"] == pytest.approx(log_loss(label[test], probability), rel=1e-3)
    found = probe(activations, number, levels, 0, regression=True, num_shuffles=0)
    predicted = (activations[test] * found.weights).sum(axis=(1, 2, 3)) + found.intercept
    mean = number[split_levels(levels, 0).train].mean()
    expected = 1 - np.sum((number[test] - predicted) ** 2) / np.sum((number[test] - mean) ** 2)
    assert found.scores["score"].item() == pytest.approx(expected, abs=1e-6)
    assert found.scores["score"].item() > 0.95 and found.scores["base"].item() == 0


def test_auc_between_levels_adds_up_to_that_of_all_examples():
    rng = np.random.default_rng(0)
    level, positive = rng.integers(0, 5, 80), rng.random(80) < 0.4
    scores = rng.integers(0, 6, 80) / 6  # with ties
    wins, positives, negatives = _wins(scores, positive, level)
    counts = np.array([2, 0, 1, 3, 1])
    weights = counts[level]
    expected = roc_auc_score(positive, scores, sample_weight=weights)
    assert counts @ wins @ counts / (counts @ positives * (counts @ negatives)) == pytest.approx(
        expected)


def test_several_classes_are_told_apart_and_one_unseen_in_training_counts_as_wrong():
    activations, _, number, levels = made_up_probing(num_levels=200)
    classes = np.digitize(number, np.quantile(number, [0.3, 0.7]))
    found = probe(activations, classes, levels, 0, num_shuffles=1)
    scores = found.scores.set_index("metric")["score"]
    assert scores["accuracy"] > 0.85 and scores["auc"] > 0.95
    assert found.weights.shape == (3, 3, 4, 4)
    test = split_levels(levels, 0).test
    classes[test] = 7
    unseen = probe(activations, classes, levels, 0, num_shuffles=0)
    unseen = unseen.scores.set_index("metric")["score"]
    assert unseen["accuracy"] == 0 and unseen["log_loss"] > 30 and np.isnan(unseen["auc"])
