"""Steering vectors: what they are, their files, and what they do to an agent."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import FLOAT32, random_frames, tiny_policy

from agents.acting import run_policy
from agents.agent_file import weights_sha256
from agents.hooks import patched
from agents.networks import build_policy
from common.errors import UserError
from interventions.patches import Add
from interventions.vectors import (
    AS_COMPUTED,
    PAIRS,
    PROBE,
    RMS,
    UNIT,
    check_classes,
    read_vectors,
    save_vectors,
    vector_of_probe,
    vectors_of_pairs,
)

MAP = "embedder.block2.res1.resadd"
LAYERS = {"impala": ("embedder.block1.res2.resadd", MAP, "embedder.relu3", "embedder.relufc"),
          "nature": ("embedder.conv1", "embedder.relu2", "embedder.flatten", "embedder.relufc")}


def policy_of(architecture, recurrent, seed=0):
    torch.manual_seed(seed)
    policy = build_policy(architecture, 64, recurrent, learned_initial_state=True)
    with torch.no_grad():
        policy.fc_policy.weight *= 100
    return policy


def logits_with(policy, frames, *patches):
    with patched(policy, patches):
        return run_policy(policy, FLOAT32, frames, policy.initial_states(len(frames))).logits


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_subtracting_the_vector_at_its_picture_gives_the_logits_of_the_other(architecture,
                                                                             recurrent):
    policy, (shown, lacking) = policy_of(architecture, recurrent), random_frames(2)
    layers = [*LAYERS[architecture], "gru" if recurrent else "fc_policy"]
    vectors = vectors_of_pairs(policy, layers, shown[None], lacking[None], [(5, 5)], "noise")
    other = logits_with(policy, lacking[None])
    assert (logits_with(policy, shown[None]) - other).abs().max() > 1e-2
    for layer in layers:
        vector = vectors[layer].vector
        steered = logits_with(policy, shown[None], Add(layer, vector, -1.0))
        torch.testing.assert_close(steered, other, atol=2e-5, rtol=0)
        assert vectors[layer].norms.tolist() == pytest.approx([np.linalg.norm(vector)])
        assert vectors[layer].pairs.tolist() == [[5, 5]]


def test_vectors_have_the_names_of_the_innermost_modules():
    found = vectors_of_pairs(tiny_policy(), ["embedder.block2.res1", f"{MAP}_out", "embedder"],
                             random_frames(1), random_frames(1, 1), [(0, 0)], "noise")
    assert [(name, vector.layer) for name, vector in found.items()] == [
        (MAP, MAP), ("embedder.relufc", "embedder.relufc")]


def test_squares_of_a_level_are_averaged_before_levels():
    policy = tiny_policy()
    shown, lacking = random_frames(5), random_frames(5, 1)
    pairs = [(4, 4), (2, 3), (4, 4), (4, 4), (2, 3)]
    found = vectors_of_pairs(policy, [MAP], shown, lacking, pairs, "noise", ["easy"])[MAP]
    single = np.stack([vectors_of_pairs(policy, [MAP], shown[[i]], lacking[[i]], [(0, 0)],
                                        "noise")[MAP].vector for i in range(5)])
    levels = single[[1, 4]].mean(axis=0), single[[0, 2, 3]].mean(axis=0)
    np.testing.assert_allclose(found.vector, np.mean(levels, axis=0), atol=1e-5)
    np.testing.assert_allclose(found.norms, [np.linalg.norm(each) for each in levels], rtol=1e-5)
    assert found.pairs.tolist() == [[2, 3], [4, 4]]
    assert (found.levels, found.modes, found.kind) == ((2, 3, 4), ("easy",), PAIRS)


def test_classes_of_all_states_or_of_none_are_refused():
    for classes in (np.zeros(70), np.ones(70)):
        with pytest.raises(UserError, match="of the 70 states are in the class 'action=right'"):
            check_classes(classes, "action=right")


@pytest.fixture(scope="module")
def vectors():
    return vectors_of_pairs(tiny_policy(), [MAP, "gru"], random_frames(3), random_frames(3, 1),
                            [(k, k + 1) for k in range(3)], "noise", ["easy"])


def test_scales_are_norms_and_multiples_of_the_layers_size(vectors):
    vector = vectors[MAP]
    assert vector.scaled(AS_COMPUTED) is vector
    unit, rms = vector.scaled(UNIT), vector.scaled(RMS, 2.5)
    assert np.linalg.norm(unit.vector) == pytest.approx(1)
    assert np.sqrt(np.mean(rms.vector ** 2)) == pytest.approx(2.5)
    for each in (unit, rms):
        cosine = (each.vector * vector.vector).sum() / np.linalg.norm(vector.vector)
        assert cosine == pytest.approx(np.linalg.norm(each.vector))
    assert (unit.scale, rms.scale) == (UNIT, RMS)
    nothing = dataclasses.replace(vector, vector=0 * vector.vector)
    with pytest.raises(UserError, match="is 0, so it cannot be scaled to unit"):
        nothing.scaled(UNIT)


def same(a, b):
    return all(np.array_equal(getattr(a, field.name), getattr(b, field.name))
               for field in dataclasses.fields(a))


def test_files_hold_all_of_one_vector_or_of_all_layers(vectors, tmp_path):
    one, both = tmp_path / "one.npz", tmp_path / "both.npz"
    scaled = vectors[MAP].scaled(UNIT)
    save_vectors(one, [scaled])
    assert same(read_vectors(one)[MAP], scaled)
    with np.load(one, allow_pickle=False) as file:
        assert set(file.files) == {"vector", "pairs", "norms", "text"}
        text = json.loads(str(file["text"]))
    assert text["layer"] == MAP and text["versions"]["numpy"] == np.__version__
    save_vectors(both, list(vectors.values()))
    found = read_vectors(both)
    assert list(found) == [MAP, "gru"] and all(same(found[name], vectors[name]) for name in found)


def test_a_vector_of_another_agent_layer_or_shape_is_refused_and_both_are_said(vectors):
    vector, agent = vectors[MAP], weights_sha256(tiny_policy())
    vector.check_for(agent, MAP, (32, 16, 16))
    other = weights_sha256(tiny_policy(1))
    for arguments, own, wanted in (((other, MAP, (32, 16, 16)), agent, other),
                                   ((agent, "gru", (64,)), MAP, "gru"),
                                   ((agent, MAP, (64, 16, 16)), r"\(32, 16, 16\)",
                                    r"\(64, 16, 16\)")):
        with pytest.raises(UserError, match=f"{own} cannot be added to .* {wanted}"):
            vector.check_for(*arguments)


@pytest.mark.parametrize(("name", "array", "message"), [
    ("vector", np.full((32, 16, 16), np.nan, np.float32), "'vector' holds NaN"),
    ("vector", np.zeros((4, 4), np.float32), r"'vector' holds float32 \(4 x 4\)"),
    ("vector", np.array([{}], object), r"not a \.npz file of arrays"),
    ("norms", np.zeros(2, np.float32), r"'norms' holds float32 \(2\)"),
    ("text", np.array("{"), "damaged"),
    ("text", {"scale": "huge"}, "the scale 'huge', of which at least one is unknown"),
    ("text", {"layer": "all"}, "it has no layer")])
def test_damaged_files_are_refused(vectors, tmp_path, name, array, message):
    path = tmp_path / "v.npz"
    save_vectors(path, [vectors[MAP]])
    content = dict(np.load(path, allow_pickle=False))
    if isinstance(array, dict):
        array = np.array(json.dumps(json.loads(str(content["text"])) | array))
    np.savez(path, **{**content, name: array})
    with pytest.raises(UserError, match=message):
        read_vectors(path)


def test_a_probes_weights_are_the_vector():
    weights = np.arange(64.0)
    vector = vector_of_probe(tiny_policy(), "gru", weights, [3, 3, 1], "reward soon")
    assert (vector.kind, vector.levels, vector.about) == (PROBE, (1, 3), "reward soon")
    assert vector.vector.tolist() == weights.tolist()
