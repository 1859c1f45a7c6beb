"""Forward passes resumed after a layer, the effect scan, and a channel planted in a network."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, FULL, planted_policy, random_frames, refusal, tiny_policy

import compare_interventions
from agents.acting import run_policy
from agents.agent_file import save_agent
from agents.hooks import patched
from agents.layers import all_layers, find_layer
from agents.networks import ARCHITECTURES, build_policy
from agents.reference_set import ReferenceSet, activations_of
from common.game_constants import ACTION_NAMES
from common.results import ResultStore
from interventions.circuits import GREEDY, LayerCircuits, circuit_table, summary
from interventions.partial_forward import PartialForward
from interventions.patches import Zero
from interventions.scan import (
    OUTCOMES,
    Part,
    Scan,
    ScanFrames,
    effect_maps,
    estimate,
    parts_of,
    scan,
    strongest,
)
from interventions.scan_study import SCANNED, agreement

LAYER = "embedder.block2.res1.resadd"
PLANTED = 7  # channel of that layer
WORLD = 16  # squares per side, each as large as a cell of that layer
LEFT, RIGHT = 1, 7  # actions


def assert_equal_outputs(a, b, **tolerance):
    for name in ("logits", "values", "hidden_states"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name),
                                   **tolerance or {"atol": 0, "rtol": 0})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("recurrent", [True, False])
@torch.no_grad()
def test_a_resumed_pass_is_the_full_one_at_every_layer(architecture, recurrent):
    policy = build_policy(architecture, 64, recurrent, learned_initial_state=False)
    attributes = set(vars(policy))
    frames, entering = random_frames(3), torch.rand(3, policy.hidden_state_size)
    full = run_policy(policy, FLOAT32, frames, entering)
    for layer in all_layers(policy):
        half = PartialForward(policy, FLOAT32, layer.name).run_to(frames, entering)
        assert_equal_outputs(half.run_from(), full)
        altered = half.activations.clone()
        altered[:, 0] = 0
        with patched(policy, [Zero(layer.name, channels=(0,))]):
            expected = run_policy(policy, FLOAT32, frames, entering)
        assert_equal_outputs(half.run_from(altered), expected)
    assert set(vars(policy)) == attributes and not policy._forward_hooks


@torch.no_grad()
def test_rows_of_a_resumed_pass_belong_to_the_pictures_that_are_named():
    policy = tiny_policy(channels=FULL)
    frames, entering = random_frames(4), torch.rand(4, 64)
    full = run_policy(policy, FLOAT32, frames, entering)
    which = torch.tensor([2, 0, 2, 3, 1])
    # A layer before the GRU and inside a residual unit, whose skip connection is restored, too.
    half = PartialForward(policy, FLOAT32, "embedder.block3.res2.conv1").run_to(frames, entering)
    output = half.run_from(half.activations[which], which)
    torch.testing.assert_close(output.logits, full.logits[which], atol=1e-5, rtol=0)
    torch.testing.assert_close(output.hidden_states, full.hidden_states[which], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["zero", "mean", "interchange"])
def test_scanned_effects_are_those_of_full_patched_passes(kind, monkeypatch):
    monkeypatch.setattr("interventions.scan.PASSES_PER_BATCH", 3)
    policy, frames, paired = tiny_policy(channels=FULL), random_frames(5), random_frames(5, 1)
    entering = torch.rand(5, 64)
    reference = ReferenceSet(random_frames(6, 2))
    parts = [Part(LAYER, 3), Part("gru", 9), Part(LAYER, None, (2, 15)), Part(LAYER),
             Part("embedder.block1.res1.conv1", 4, (0, 31))]
    found = scan(policy, FLOAT32, parts, ScanFrames(frames, np.arange(5), paired, entering),
                 OUTCOMES[ACTION_NAMES[4]], kind, reference)
    full = run_policy(policy, FLOAT32, frames, entering).log_probs[:, 4].numpy()
    np.testing.assert_allclose(found.unpatched, full, atol=1e-5)
    for part, effects, norms in zip(parts, found.effects, found.norms):
        own = activations_of(policy, frames, [part.layer], entering)[part.layer]
        other = activations_of(policy, paired, [part.layer], entering)[part.layer]
        mean = activations_of(policy, reference.frames, [part.layer])[part.layer].mean(dim=0)
        source = {"zero": torch.zeros_like(own), "mean": mean.expand_as(own),
                  "interchange": other}[kind]
        expected = own.clone()
        for picture in range(5):
            for channel in range(own.shape[1]) if part.channel is None else [part.channel]:
                where = (picture, channel, *(part.cell or ()))
                expected[where] = source[where]
        np.testing.assert_allclose(norms, (expected - own).flatten(1).norm(dim=1), atol=1e-4)
        half = PartialForward(policy, FLOAT32, part.layer).run_to(frames, entering)
        after = half.run_from(expected).log_probs[:, 4].numpy()
        np.testing.assert_allclose(effects, after - full, atol=2e-5)


def test_effects_are_tested_by_level():
    """Four similar frames of a level count as one. Effects of opposite sign in 8 and 4 levels are
    not significant, although 32 against 16 independent frames would be."""
    parts = [Part(LAYER, 0), Part(LAYER, 1)]
    levels = np.repeat(np.arange(12), 4)
    effects = np.stack([np.where(levels < 8, 1.0, -1.0), np.full(48, 0.5)])
    effects += 0.01 * np.random.default_rng(0).normal(size=effects.shape)
    table = Scan(parts, levels, np.zeros(48), effects, effects).test(0)
    assert table["p"][0] > 0.1 > 0.001 > table["p_holm"][1]
    assert table["low_95"][0] < 0 < 0.6 < table["high_95"][0] and table["low_95"][1] > 0.4
    assert strongest(table, 2) == parts[::-1] and (table["num_levels"] == 12).all()


def test_agreement_is_that_of_the_ranks_in_each_frame():
    parts, rng = [Part(LAYER, channel) for channel in range(20)], np.random.default_rng(0)
    effects = rng.normal(size=(20, 40))
    result = Scan(parts, np.repeat(np.arange(10), 4), np.zeros(40), effects, effects)
    (same,) = agreement(result, np.exp(effects) * np.linspace(1, 9, 40), 0).itertuples()
    assert (same.layer, same.parts) == (LAYER, 20)
    assert (same.rank_correlation, same.low_95, same.high_95) == pytest.approx((1, 1, 1))
    assert 0.5 < same.of_means < 1  # the scale differs between frames
    (opposite,) = agreement(result, -effects, 0).itertuples()
    assert opposite.rank_correlation == pytest.approx(-1)
    (unrelated,) = agreement(result, rng.normal(size=(20, 40)), 0).itertuples()
    assert unrelated.low_95 < 0 < unrelated.high_95 < 0.3
    half = np.where(np.arange(40) < 20, 0, effects)  # undefined in half of the frames
    (defined,) = agreement(result, half, 0).itertuples()
    assert defined.rank_correlation == pytest.approx(1)


@pytest.fixture(scope="module")
def steered():
    """An agent that goes left or right, towards a bright red square. All other channels of
    ``LAYER`` depend only on green and blue."""
    policy = planted_policy(PLANTED, (1.0, 0.0, 0.0))
    column = torch.arange(64) % 8
    with torch.no_grad():
        policy.embedder.block1.conv.weight[:, 0] = 0  # only the planted channel reads red
        policy.embedder.block1.conv.weight[0, 0, 1, 1] = 1
        policy.fc_policy.weight[LEFT, :64] = 3.0 * (column < 4)
        policy.fc_policy.weight[RIGHT, :64] = 3.0 * (column >= 4)
    return policy


def spotted(levels, squares):
    """Return frames of random levels with a bright red square at (row from the bottom, column);
    None for no square."""
    frames = []
    for level, square in zip(levels, squares):
        frame = np.random.default_rng(level).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        frame[:, :, 0] //= 16  # red is nearly black
        if square is not None:
            row, column = square
            bottom = 64 - 4 * row
            frame[bottom - 4:bottom, 4 * column:4 * column + 4, 0] = 255
        frames.append(frame)
    return np.stack(frames)


def frames_with_spots(first_level, num):
    """Return frames whose square is outside the middle columns, and the outcome: the probability
    of going to the side of the square."""
    rng, levels = np.random.default_rng(first_level), np.arange(first_level, first_level + num)
    columns = rng.choice([0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14], num)
    squares = list(zip(rng.integers(1, 15, num), columns))
    actions = torch.from_numpy(np.where(columns < 8, LEFT, RIGHT))
    return (ScanFrames(spotted(levels, squares), levels, spotted(levels, [None] * num)),
            lambda output, pictures: output.log_probs.exp().gather(
                1, actions[pictures][:, None])[:, 0])


def test_the_scan_finds_the_planted_channel_alone_on_other_levels(steered):
    def scanned(parts, first_level):
        return scan(steered, FLOAT32, parts, *frames_with_spots(first_level, 12), "interchange")

    first = scanned(parts_of(steered, [LAYER], "channel"), 0)
    best = strongest(first.table(), 3)
    assert best[0] == Part(LAYER, PLANTED)
    assert np.abs(np.delete(first.effects, PLANTED, axis=0)).max() < 1e-5
    table = scanned(best, 50).test(0)
    assert table["channel"][0] == PLANTED and table["effect"][0] < -0.2
    assert table["high_95"][0] < 0 and table["p_holm"][0] < 0.01
    assert (table["p"][1:] > 0.05).all()


def test_the_scan_maps_the_cell_of_the_red_square(steered):
    square = (9, 3)
    frame = ScanFrames(spotted([3], [square]), np.array([3]), spotted([3], [None]))
    row, column = find_layer(steered, LAYER).cell(*square, WORLD)
    later = "embedder.block3.conv"
    parts = parts_of(steered, [LAYER, later], "cell")
    maps = effect_maps(scan(steered, FLOAT32, parts, frame, OUTCOMES["left"],
                            "interchange").table())
    assert maps[LAYER].shape == maps[later].shape == (16, 16)
    for found in maps.values():
        rows, columns = np.nonzero(np.abs(found) > 1e-4)
        assert found[rows, columns].max() < 0
        assert np.abs(rows - row).max() <= 1 and np.abs(columns - column).max() <= 1


def run_scan(agent_file, folder, *more):
    return compare_interventions.main([*map(str, (
        "--agent_file", agent_file, "--env_name", "fruitbot", "--distribution_mode", "easy",
        "--interpreting_params_name", "tiny", "--num_episodes", 20, "--device", "cpu",
        "--reference_size", 2, "--output_dir", folder, *more))])


@pytest.mark.slow
def test_a_scan_of_channels_and_one_of_cells_are_written(steered, tmp_path, capsys):
    save_agent(tmp_path / "model.pth", steered)
    assert run_scan(tmp_path / "model.pth", tmp_path / "channels", "--scan",
                    f"zero@{LAYER}=channel,outcome=right,report=4") == 0
    assert "strongest of 32 parts: block2.res1.resadd:7, " in capsys.readouterr().out
    store = ResultStore(tmp_path / "channels", SCANNED)
    ranked, tested = store.read("parts", LAYER), pd.read_csv(store.file_of("strongest"))
    assert len(ranked) == 32
    assert [Part(LAYER, int(channel)) for channel in tested["channel"]] == strongest(ranked, 4)
    assert "block2.res1.resadd:" in store.read("report")
    assert store.read("agreement", LAYER)["parts"][0] == 32
    assert not list(store.path.glob("circuits*"))
    assert run_scan(tmp_path / "model.pth", tmp_path / "cells", "--scan",
                    "interchange@embedder.block3.res1=cell") == 0
    table = pd.read_csv(tmp_path / "cells" / "parts" / "embedder.block3.res1.resadd.csv")
    assert len(table) == 8 * 8 and (table["effect"] == table["absolute"]).all()
    assert (tmp_path / "cells" / "circuits.png").is_file()
    words = "at least 20 levels or starts, 10 in each half, not 19; increase --num_episodes"
    assert words in refusal(
        lambda argv: run_scan(tmp_path / "model.pth", tmp_path / "few", *argv),
        ["--scan", f"zero@{LAYER}=channel", "--num_episodes", 19], capsys)
    report = (tmp_path / "cells" / "report.md").read_text()
    assert report.count("| embedder.block3.res1.resadd | 64 |") == 2


@pytest.mark.parametrize("kind", ["zero", "mean", "interchange"])
def test_estimates_are_gradients_times_changes_of_the_parts(kind, monkeypatch):
    monkeypatch.setattr("interventions.scan.PASSES_PER_BATCH", 3)
    policy, frames, entering = tiny_policy(channels=FULL), random_frames(5), torch.rand(5, 64)
    # Paired frames hardly differ, so the effects of interchange are nearly linear.
    paired = np.clip(frames.astype(int) + 1, 0, 255).astype(np.uint8)
    reference = ReferenceSet(random_frames(6, 2))
    parts = [Part(LAYER, 3), Part("gru", 9), Part(LAYER, None, (2, 15)), Part("hidden_state"),
             Part("embedder.block1.res1.conv1", 4), Part("embedder.fc"), Part("fc_policy")]
    arguments = (policy, FLOAT32, parts, ScanFrames(frames, np.arange(5), paired, entering),
                 OUTCOMES["value"], kind, reference)
    estimates = estimate(*arguments)
    for part, found in zip(parts, estimates):
        forward = PartialForward(policy, FLOAT32, part.layer)
        own, other = (forward.run_to(images, entering).activations.detach()
                      for images in (frames, paired))
        source = {"zero": torch.zeros_like(own), "interchange": other,
                  "mean": reference.mean(policy, find_layer(policy, part.layer)).expand_as(own)}
        with torch.enable_grad():
            altered = own.clone().requires_grad_()
            values = forward.run_to(frames, entering).run_from(altered).values
        if part.layer == "fc_policy":
            assert not found.any()
            continue
        (gradient,) = torch.autograd.grad(values.sum(), altered)
        expected = (gradient * (source[kind] - own))[part.entries].reshape(5, -1).sum(dim=1)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    if kind == "interchange":
        effects = scan(*arguments).effects
        scale = np.abs(effects).max(axis=1, keepdims=True)
        assert (np.abs(estimates - effects) <= 0.2 * scale).all() and (scale[:-1] > 0).all()


def test_a_circuit_is_the_planted_channel_and_random_circuits_lack_it(steered):
    ranking, outcome = frames_with_spots(0, 12)
    testing, of_testing = frames_with_spots(50, 12)
    parts = parts_of(steered, [LAYER], "channel")
    circuits = LayerCircuits(steered, FLOAT32, parts, ranking, outcome)
    assert circuits.greedy_order(3)[0] == PLANTED
    without, alone, rest = circuits.errors([PLANTED, *range(6)], [1, 7])
    assert without.min() > 0.05 and max(alone.max(), rest.max()) < 1e-5
    (others,) = circuits.errors([0, 1, 2], [3])[1:]
    np.testing.assert_allclose(others, without, atol=1e-5)

    # The testing frames have an outcome of their own, because their squares differ.
    table = circuit_table(steered, FLOAT32, parts, testing, testing, of_testing, 0)
    greedy = table[table["order"] == GREEDY].set_index("size")
    assert list(greedy.index) == [1, 2, 4, 8, 16, 32]
    assert (greedy["faithfulness"] > 0.999).all() and (greedy["low_95"] > 0.999).all()
    (row,) = summary(table).itertuples()
    assert (row.size, row.parts) == (16, 32) and row.low_95 > 0.999
    random = table[(table["size"] == 16) & (table["order"] != GREEDY)]["faithfulness"]
    assert (row.random_median, row.random_max) == (random.median(), random.max())
    assert random.min() < 0.01  # those that lack the planted channel
    assert table[table["size"] == 32]["faithfulness"].min() > 0.999
