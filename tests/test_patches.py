"""Patches of layers: effect of each kind on an output, patches as text, and the scripts."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import FLOAT32, random_frames, record_arguments, small_policy

import evaluate
import record
import record_gen_samples
from agents.acting import embed_frames
from agents.agent_file import load_agent, weights_sha256
from agents.hooks import batch_info, cached, patched
from agents.layers import find_layer, layers_named
from agents.networks import to_images
from agents.patch import Apply, BatchInfo
from agents.reference_set import ReferenceSet
from agents.rollout_files import RolloutFolder
from common.errors import UserError
from envs.maze.state import MazeState, draw, stock_state
from envs.procgen_env import EnvConfig, LevelSlots
from generative.sample_files import SampleFolder
from interventions import patches as kinds
from interventions.patch_text import (
    open_patches,
    parse_patch,
    patch_list_name,
    read_patch_file,
)
from interventions.patches import Opening
from interventions.vectors import PROBE, SteeringVector, save_vectors

LAYER = "embedder.block2.res1.resadd"
SHAPE = (6, 16, 16)  # of the layer in small_policy
ONE = (4,)  # a single channel


def rows_of(number):
    """Return batch metadata of three episodes on two levels."""
    numbers = np.arange(number)
    return BatchInfo(numbers % 3, numbers // 3, numbers % 2)


@torch.no_grad()
def outputs(policy, frames, layers):
    """Return the outputs of layers without patches, as numpy arrays."""
    with cached(policy, layers) as activations:
        policy.embed(to_images(torch.from_numpy(frames)))
    return {name: tensor.numpy() for name, tensor in activations.items()}


REFERENCE = random_frames(5, seed=1)
SOURCES = random_frames(2, seed=2)  # one per level
PAIRS = random_frames(3, seed=3)  # one per episode
V = np.float32(np.random.default_rng(4).normal(size=SHAPE))
PER_CHANNEL = np.float32([1, -2, 3, 0.5, -1, 2])


def noise(*seed):
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def shifted(a, means, down, right):
    result = np.broadcast_to(means[..., None, None], a.shape).copy()
    size = a.shape[-1]
    for i in range(size):
        for j in range(size):
            if 0 <= i - down < size and 0 <= j - right < size:
                result[..., i, j] = a[..., i - down, j - right]
    return result


def project(a, v, axes, to=0.0):
    v = np.broadcast_to(v, a.shape[1:])
    unit = v / np.sqrt((v**2).sum(axis=tuple(axis - 1 for axis in axes), keepdims=True))
    return a + (to - (a * unit).sum(axis=axes, keepdims=True)) * unit


def set_cells(a):
    result = np.full_like(a, -0.2)
    result[..., 2, 3] = 2.5
    return result


# Each kind and its formula, which returns the patched activations from those of the batch (a,
# shape (N, K, H, W)), the channels k, the activations r, s and p of REFERENCE, SOURCES and PAIRS,
# and the batch metadata.
FORMULAS = {
    "zero": (lambda **where: kinds.Zero(**where), lambda a, k, r, s, p, rows: 0 * a),
    "set a number": (lambda **where: kinds.SetTo(value=2.5, **where),
                     lambda a, k, r, s, p, rows: 0 * a + 2.5),
    "set an array": (lambda **where: kinds.SetTo(value=V[0], **where),
                     lambda a, k, r, s, p, rows: 0 * a + V[0]),
    "set a cell": (lambda **where: kinds.SetTo(value=2.5, cells=((2, 3),), others=-0.2, **where),
                   lambda a, k, r, s, p, rows: set_cells(a)),
    "mean of cells": (lambda **where: kinds.Mean(reference=reference(), **where),
                      lambda a, k, r, s, p, rows: 0 * a + r[:, k].mean(axis=0)),
    "mean of channels": (
        lambda **where: kinds.Mean(reference=reference(), over="channels", **where),
        lambda a, k, r, s, p, rows: 0 * a + r[:, k].mean(axis=(0, 2, 3))[:, None, None]),
    "resample": (lambda **where: kinds.Resample(
                     sources=lambda level, number, seed: SOURCES[[level] * number], **where),
                 lambda a, k, r, s, p, rows: s[rows.level][:, k]),
    "noise once": (lambda **where: kinds.Noise(sigma=0.3, seed=7, **where),
                   lambda a, k, r, s, p, rows: a + np.float32(0.3) * noise(7)[k]),
    "noise a picture": (
        lambda **where: kinds.Noise(sigma=0.5, reference_sd=True, reference=reference(),
                                    draw="picture", seed=7, **where),
        lambda a, k, r, s, p, rows: a + 0.5 * r.std(axis=(0, 2, 3))[k, None, None] * np.stack(
            [noise(7, *each)[k] for each in zip(rows.episode, rows.step)])),
    "add": (lambda **where: kinds.Add(vector=V, coefficient=-1.5, **where),
            lambda a, k, r, s, p, rows: a - np.float32(1.5) * V[k]),
    "multiply": (lambda **where: kinds.Multiply(positive=2, negative=-0.5, **where),
                 lambda a, k, r, s, p, rows: np.where(a > 0, 2 * a, np.float32(-0.5) * a)),
    "project": (lambda **where: kinds.Project(vector=V, to=3.0, **where),
                lambda a, k, r, s, p, rows: project(a, V[k], (1, 2, 3), 3.0)),
    "project to the mean": (
        lambda **where: kinds.Project(vector=V, to="mean", reference=reference(), **where),
        lambda a, k, r, s, p, rows: project(
            a, V[k], (1, 2, 3),
            (r[:, k] * V[k]).sum(axis=(1, 2, 3)).mean() / np.sqrt((V[k]**2).sum()))),
    "project in cells": (lambda **where: kinds.Project(vector=PER_CHANNEL, **where),
                         lambda a, k, r, s, p, rows: project(
                             a, PER_CHANNEL[k, None, None], (1,))),
    "clamp": (lambda **where: kinds.Clamp(low=-0.1, high=0.2, **where),
              lambda a, k, r, s, p, rows: np.clip(a, np.float32(-0.1), np.float32(0.2))),
    "shift": (lambda **where: kinds.Shift(down=2, right=-3, reference=reference(), **where),
              lambda a, k, r, s, p, rows: shifted(a, r[:, k].mean(axis=(0, 2, 3)), 2, -3)),
    "interchange": (lambda **where: kinds.Interchange(
                        pairs=lambda rows: PAIRS[rows.episode], **where),
                    lambda a, k, r, s, p, rows: p[rows.episode][:, k]),
    "function": (lambda **where: Apply(function=torch.sin, **where),
                 lambda a, k, r, s, p, rows: np.sin(a))}


def reference():
    return ReferenceSet(REFERENCE)


@pytest.fixture(scope="module")
def known():
    """Activations of the frames from which patches take values."""
    policy = small_policy()
    return [outputs(policy, frames, [LAYER])[LAYER] for frames in (REFERENCE, SOURCES, PAIRS)]


@pytest.mark.parametrize(("number", "channels"), [(7, None), (3, ONE), (1500, ONE)])
@torch.no_grad()
def test_every_kind_is_its_formula(known, number, channels):
    policy, rows = small_policy(), rows_of(number)
    chosen = list(range(SHAPE[0]) if channels is None else channels)
    frames = random_frames(number)
    # 1500 frames are split into two batches, for every kind.
    for name in FORMULAS if number < 1500 else ("interchange",):
        make, formula = FORMULAS[name]
        with (patched(policy, [make(layer=LAYER, channels=channels)]) as scope,
              cached(policy, [LAYER], before=True) as before,
              cached(policy, [LAYER]) as after, batch_info(policy, rows)):
            embed_frames(policy, torch.from_numpy(frames), FLOAT32)
        a = before[LAYER].numpy()
        expected = a.copy()
        expected[:, chosen] = formula(a[:, chosen], chosen, *known, rows)
        np.testing.assert_allclose(after[LAYER], expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not np.allclose(a, expected, atol=1e-3), name
        (size,) = scope.changes()
        delta = np.sqrt(((expected - a)**2).sum(axis=(1, 2, 3)))
        assert size.pictures == number, name
        assert size.norm == pytest.approx(delta.mean(), rel=1e-3), name
        assert size.relative == pytest.approx(
            (delta / np.sqrt((a**2).sum(axis=(1, 2, 3)))).mean(), rel=1e-3), name


@torch.no_grad()
def test_one_vector_a_layer_is_added_to_all_of_them():
    policy, frames = small_policy(), torch.from_numpy(random_frames(1))
    names = [layer.name for layer in layers_named(policy, "all")]
    vectors = {name: np.full(find_layer(policy, name).shape, 0.25, np.float32) for name in names}
    with (patched(policy, [kinds.Add("all", vectors, coefficient=-2.0)]),
          cached(policy, names, before=True) as before, cached(policy, names) as after):
        policy.step(embed_frames(policy, frames, FLOAT32), policy.initial_states(1))
    assert {"embedder.block1.conv", "embedder.relufc", "gru"} <= set(names)
    assert not {"fc_policy", "fc_value", "hidden_state"} & set(names)
    for name in names:
        torch.testing.assert_close(after[name], before[name] - 0.5)


@torch.no_grad()
def test_channels_of_a_resampled_layer_may_have_a_source_each():
    policy, rows = small_policy(), rows_of(4)
    asked = []

    def sources(level, number, seed):
        asked.append((level, number, seed))
        return random_frames(number, seed=level)

    patch = kinds.Resample(LAYER, sources, draw="channel", channels=(1, 5), seed=3)
    with (patched(policy, [patch]), cached(policy, [LAYER]) as after, batch_info(policy, rows)):
        embed_frames(policy, torch.from_numpy(random_frames(4)), FLOAT32)
    assert asked == [(0, 2, 3), (1, 2, 3)]  # once per level
    for row, level in enumerate(rows.level):
        source = outputs(policy, random_frames(2, seed=level), [LAYER])[LAYER]
        np.testing.assert_allclose(after[LAYER][row, 1], source[0, 1], atol=1e-5)
        np.testing.assert_allclose(after[LAYER][row, 5], source[1, 5], atol=1e-5)


def test_a_reference_set_has_the_moments_of_its_pictures(known):
    policy, pictures = small_policy(), known[0]
    layer = find_layer(policy, LAYER)
    found = reference()
    np.testing.assert_allclose(found.mean(policy, layer), pictures.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(found.std(policy, layer), pictures.std(axis=0), atol=1e-5)
    np.testing.assert_allclose(found.channel_stds(policy, layer)[:, 0],
                               pictures.std(axis=(0, 2, 3)), atol=1e-5)
    assert found.rms(policy, layer) == pytest.approx(np.sqrt((pictures**2).mean()), rel=1e-4)
    assert np.array_equal(found.drawn(5, 3, 1), found.drawn(5, 3, 1))
    assert not np.array_equal(found.drawn(5, 9, 1), found.drawn(6, 9, 1))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: kinds.Zero(LAYER, channels=(6,)), "no channel 6: its channels are numbered 0 to 5"),
    (lambda: kinds.Zero(LAYER, cells=((3, 16),)), "no cell 3.16: its rows go from 0 to 15"),
    (lambda: kinds.Add(LAYER, V[:, :5]), "the vector has the shape"),
    (lambda: kinds.Add(LAYER, V * np.nan), "the vector holds NaN"),
    (lambda: kinds.Mean(LAYER), "mean needs a reference set"),
    (lambda: kinds.Project(LAYER, 0 * V), "is 0 in the entries"),
    (lambda: kinds.Interchange(LAYER), "interchange needs paired frames")])
def test_a_patch_that_does_not_fit_is_refused_before_any_pass(make, message):
    policy = small_policy()
    with pytest.raises(UserError, match=message), patched(policy, [make()]):
        pass
    assert "_hook_stack" not in vars(policy)


def test_setting_an_entry_twice_needs_to_be_meant():
    policy, at = small_policy(), {"channels": (1, 2), "cells": ((0, 0),)}
    first = kinds.SetTo(LAYER, 1.0, **at)
    clash = kinds.SetTo("embedder.block2.res1", 2.0)
    with pytest.raises(UserError, match="two patches set the same"), patched(
            policy, [first, clash]):
        pass
    for second in (kinds.SetTo(LAYER, 2.0, channels=(3,)), kinds.Zero(LAYER),
                   kinds.SetTo(LAYER, 2.0, channels=(1,), cells=((0, 1),)),
                   dataclasses.replace(clash, override=True)):
        with patched(policy, [first, second]):
            pass


# Text and YAML.

TEXTS = [
    "zero@embedder.block2.res1.resadd:55",
    "set@embedder.block2.res1.resadd:8,55,70-77=2.3,cell=5.10,others=-0.2",
    "set@fc=numbers.npy,override=yes",
    "mean@a,over=channels,levels=1/3/5-9",
    "resample@embedder.block2.res1.resadd:7,8,42,draw=channel,seed=3",
    "noise@a=0.5sd,draw=picture,seed=1",
    "add@embedder.block2.res1.resadd=vectors/cheese_0.npz,coefficient=-1,steps=0:20",
    "multiply@embedder.block2.res1.resadd:55=positive:2,negative:0",
    "multiply@gru=-0.3333333333333333,steps=5:",
    "project@a=v.npz,to=mean", "clamp@a=0:", "clamp@a=-1.5:2", "shift@a=1.-2",
    "interchange@a:3,source=7/8"]


def test_a_patch_keeps_its_text():
    assert [parse_patch(text).text for text in TEXTS] == TEXTS


def test_text_says_where_and_what():
    patch = parse_patch("set@embedder.block2.res1.resadd:8,55,70-72=2.3,cell=5.10/6.11,steps=:20")
    assert (patch.layer, patch.channels) == (LAYER, (8, 55, 70, 71, 72))
    assert (patch.value, patch.cells, patch.steps) == (2.3, ((5, 10), (6, 11)), (0, 20))
    assert parse_patch("multiply@a=positive:2,negative:0").negative == 0
    assert parse_patch("noise@a=0.5sd").reference_sd


@pytest.mark.parametrize(("text", "message"), [
    ("zero", "has no @"), ("zerro@a", "did you mean 'zero'"), ("zero@a=3", "zero takes no value"),
    ("zero@a:9-3", "'9-3' as channels"), ("set@a", "lacks its value: set takes a number"),
    ("set@a=inf", "'inf' as value is not a numb"), ("set@a=1,cel=3.1", "did you mean 'cell'"),
    ("zero@a,steps=5:3", "'5:3' as steps is not from:to"),
    ("zero@a,steps=1:2,steps=3:4", "has 'steps' twice")])
def test_what_does_not_parse_is_pointed_at(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_patch(text)
    assert text in str(error.value)


def test_lists_in_a_file_are_sweeps_and_channels_are_one_set(tmp_path):
    file = tmp_path / "patches.yml"
    file.write_text("""
- {kind: add, layer: x, value: v/c.npz, coefficient: [-3, 0.5], steps: 1:20}
- {kind: zero, layer: y, channels: [1, 2, 5-7], cell: 5.10}
- {kind: zero, layer: z, channels: [[1, 2], [3]]}
""")
    patch_lists = read_patch_file(file)
    assert [patch.text for patch in patch_lists[1]] == [
        "add@x=v/c.npz,coefficient=-3,steps=1:20", "zero@y:1,2,5-7,cell=5.10", "zero@z:3"]
    assert [patch_list_name(patch_list) for patch_list in patch_lists] == [
        f"add_x_c_coefficient_{coefficient}_steps_1_20+zero_y_1_2_5-7_cell_5.10+zero_z_{channels}"
        for coefficient in ("-3", "0.5") for channels in ("1_2", "3")]


def test_vectors_come_from_files_of_this_agent_and_layer(tmp_path):
    policy, file = small_policy(), tmp_path / "v.npz"

    def save(**changes):
        save_vectors(file, [dataclasses.replace(SteeringVector(
            LAYER, V, np.zeros((0, 2), np.int64), np.zeros(0, np.float32), PROBE,
            weights_sha256(policy), "a test", (), ()), **changes)])

    save()
    opening = Opening(policy, None, reference)
    (opened,) = open_patches([parse_patch(f"add@{LAYER}={file}")], opening)
    assert np.array_equal(opened.vector[LAYER], V)
    with pytest.raises(UserError, match=r"the layer .*resadd cannot be added to the layer .*conv1"):
        open_patches([parse_patch(f"add@embedder.block2.res1.conv1={file}")], opening)
    save(agent="another")
    with pytest.raises(UserError, match="another cannot be added"):
        open_patches([parse_patch(f"add@{LAYER}={file}")], opening)


def test_interchange_takes_entries_from_the_first_frames_of_source_levels():
    policy, env = small_policy(), EnvConfig("coinrun", "easy")
    text = f"interchange@{LAYER}:1,4,source=7/8"
    (opened,) = open_patches([parse_patch(text)], Opening(policy, env, reference))
    assert opened.text == text
    slots = LevelSlots(env, 2)
    for slot, level in enumerate((7, 8)):
        slots.start(slot, level)
    sources = outputs(policy, slots.frames, [LAYER])[LAYER]
    slots.close()
    frames, info = random_frames(3), BatchInfo(np.arange(3), np.arange(3), np.array([4, 6, 9]))
    with (patched(policy, [opened]), cached(policy, [LAYER], before=True) as before,
          cached(policy, [LAYER]) as after, batch_info(policy, info), torch.no_grad()):
        embed_frames(policy, torch.from_numpy(frames), FLOAT32)
    expected = before[LAYER].numpy().copy()
    expected[:, [1, 4]] = sources[[0, 0, 1]][:, [1, 4]]
    np.testing.assert_allclose(after[LAYER], expected, atol=1e-5)


# Options for mazes.

def maze_opening(mode="easy", edit=None):
    return Opening(small_policy(), EnvConfig("maze", mode), reference, edit)


def test_a_square_is_its_cell_and_the_way_is_that_of_the_level():
    level, opening = 3, maze_opening()
    grid = stock_state("easy", level).grid
    (opened,) = open_patches([parse_patch(f"zero@{LAYER},square=2.3/2.3,mapping=centred")], opening)
    layer = find_layer(opening.policy, LAYER)
    assert opened.cells == (layer.cell(2, 3, 15, "centred"),)
    path, free = grid.path(grid.start, grid.cheese), grid.squares()
    rows = BatchInfo(0 * np.arange(len(free)), np.arange(len(free)), np.full(len(free), level),
                np.array(free), np.arange(len(free)) % 2)
    first = ".".join(map(str, free[4]))
    for word, expected in (("at=path", [square in path for square in free]),
                           ("at=off_path", [square not in path for square in free]),
                           (f"squares={first}", [square == free[4] for square in free]),
                           ("facing=1", [number % 2 == 1 for number in range(len(free))])):
        (opened,) = open_patches([parse_patch(f"zero@{LAYER},{word}")], opening)
        assert opened.applies_to(rows).tolist() == expected, word
    level = next(level for level in range(99) if stock_state("easy", level).grid.kind() == "fork")
    grid = stock_state("easy", level).grid
    (opened,) = open_patches([parse_patch(f"zero@{LAYER},at=decision_square")], opening)
    rows = dataclasses.replace(rows, square=np.array(free), level=np.full(len(free), level))
    assert opened.applies_to(rows).tolist() == [square == grid.decision_square() for square in free]
    blind = dataclasses.replace(rows, square=None)
    with pytest.raises(UserError, match="depends on the mouse"):
        opened.applies_to(blind)

    def moved(data):  # cheese on the first free square above the start
        state = MazeState.parse(data)
        return state.with_cheese(state.grid.neighbours(state.grid.start)[0]).to_bytes()

    (opened,) = open_patches([parse_patch(f"zero@{LAYER},at=path")], maze_opening(edit=moved))
    start = stock_state("easy", level).grid.start
    on = opened.applies_to(dataclasses.replace(rows, square=np.array(
        [start] * (len(free) - 1) + [grid.corner])))
    assert on.tolist() == [True] * (len(free) - 1) + [False]


def test_sources_with_the_same_cheese_show_it_at_the_same_square():
    target = stock_state("easy", 3)
    row, column = target.grid.cheese
    size = 64 / 15
    pixels = np.s_[int((14 - row) * size) + 2:int((15 - row) * size) - 1,
                   int(column * size) + 2:int((column + 1) * size) - 1]
    shown = draw([target])[0][pixels].astype(int)
    for word, differs in (("same_cheese", False), ("other_cheese", True)):
        (opened,) = open_patches([parse_patch(f"resample@{LAYER},condition={word}")],
                                 maze_opening())
        frames = opened.sources(3, 4, 0)
        assert frames.shape == (4, 64, 64, 3) and len(np.unique(frames, axis=0)) == 4
        assert np.array_equal(frames, opened.sources(3, 4, 0))
        for frame in frames:
            assert (np.abs(frame[pixels].astype(int) - shown).max() > 60) == differs


@pytest.mark.parametrize(("text", "message"), [
    ("square=15.0", "rows and columns go from 0 to 14"),
    ("at=nowhere", "at=nowhere is not a valid option"),
    ("condition=same_cheese", "zero has none"), ("facing=2", "facing=2 is not a valid option")])
def test_words_of_mazes_are_checked(text, message):
    opening, patch = maze_opening(), parse_patch(f"zero@{LAYER},{text}")
    with pytest.raises(UserError, match=message):
        open_patches([patch], opening)
    with pytest.raises(UserError, match="works only in maze, not in coinrun"):
        open_patches([patch], dataclasses.replace(opening, env=EnvConfig("coinrun", "easy")))


# The scripts.

def evaluate_arguments(agent_path, tmp_path, *more):
    return [*map(str, (
        "--model_file", agent_path, "--env_name", "fruitbot", "--num_episodes", 2, "--num_envs", 2,
        "--output", tmp_path / "out.json", "--device", "cpu", "--reference_size", 2, *more))]


def test_an_evaluation_with_patches_says_so(agent_path, tmp_path, capsys):
    patch = "mean@hidden_state,steps=0:3"
    never = "zero@embedder.block1.conv,steps=100000:"
    source = "interchange@embedder.block2.res1.resadd:1,steps=0:2,source=3/4"
    assert evaluate.main(evaluate_arguments(agent_path, tmp_path, "--patch", patch, "--patch",
                                            never, "--patch", source)) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["patches"]["patches"] == [patch, never, source]
    assert result["patches"]["reference"]["pictures"] == 2
    assert result["precision"] == "float32"
    assert [size["pictures"] for size in result["moved"]] == [6, 0, 4]
    error = capsys.readouterr().err
    assert f"{never} never acted on any frame" in error and f"{patch} was never" not in error


def test_recorded_states_are_those_of_the_patch(agent_path, tmp_path):
    argv = record_arguments(agent_path, tmp_path, 2, "--patch", "set@gru:3=0.5,steps=2:",
                            "--no_videos")
    assert record.main(argv) == 0
    data = RolloutFolder(tmp_path / "data")
    assert data.description()["patches"]["patches"] == ["set@gru:3=0.5,steps=2:"]
    policy = load_agent(agent_path)
    for number in range(2):
        states = np.array(data.episode(number).hidden_states)
        assert (states[3:, 3] == 0.5).all() and (states[:3, 3] != 0.5).all()
        with torch.no_grad():
            values = policy.fc_value(torch.from_numpy(states[1:]))[:, 0]
        np.testing.assert_allclose(values, data.episode(number).steps["value"], atol=1e-4)


def test_patches_act_on_simulated_frames_and_give_a_pair(simulator_file, agent_path, recording,
                                                         tmp_path, capsys):
    assert record_gen_samples.main([*map(str, (
        "--agent_file", agent_path, "--model_file", simulator_file, "--interpreting_params_name",
        "tiny", "--data_dir", recording / "data", "--data_save_dir", tmp_path, "--num_samples", 3,
        "--no_videos", "--device", "cpu", "--patch", "set@gru:3=0.5,steps=1:3"))]) == 0
    plain = SampleFolder(tmp_path / "informed_init")
    altered = SampleFolder(tmp_path / "informed_init_patched_set_gru_3_0.5_steps_1_3")
    assert "with the patches" in capsys.readouterr().out
    assert altered.description()["patches"]["patches"] == ["set@gru:3=0.5,steps=1:3"]
    assert "patches" not in plain.description()
    states = altered.stacked().hidden_states  # (N, T, D)
    assert ((states[..., 3] == 0.5) == np.array([False, True, True, False])).all()
    np.testing.assert_array_equal(states[:, 0], plain.stacked().hidden_states[:, 0])
