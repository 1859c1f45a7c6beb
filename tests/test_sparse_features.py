"""analysis/sparse_features.py and analysis/feature_dreams.py: dictionaries, names of features,
reconstructions and ablations in the game, and starts that drive features."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    FLOAT32,
    record_arguments,
    refusal,
    save_simulator,
    small_policy,
    tiny_policy,
)
from sklearn.metrics import roc_auc_score

import record
from agents.agent_file import save_agent
from agents.hooks import patched
from agents.testbed import BASELINE, Condition, Testbed
from analysis import feature_dreams, level_labels, sparse_features
from analysis.memory.dictionaries import (
    FIXED,
    AutoencoderTraining,
    Dictionary,
    fixed_dictionary,
    matching_pursuit,
    top_k,
    train_autoencoder,
)
from analysis.memory.sparse_features import (
    NO_LABEL,
    SplitStates,
    ablate,
    ablation_conditions,
    label_auc,
    name_features,
    score_ablations,
    score_dictionary,
    splice,
    strongest_features,
    top_examples,
)
from common.results import ResultStore
from envs.procgen_env import EnvConfig
from interventions.comparison import play_runs
from interventions.direction_folders import SPARSE_FEATURES
from interventions.probes import Parts, exchanged_levels, split_levels

RNG = np.random.default_rng


def unit_rows(number, size, seed=0):
    rows = RNG(seed).normal(size=(number, size))
    return np.float32(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def identity(size):
    """Return a dictionary with two features per unit, for its positive and its negative part."""
    both = torch.cat([torch.eye(size), -torch.eye(size)])
    return Dictionary(both, torch.zeros(size), size, both, torch.zeros(2 * size))


def split(states, levels=None):
    levels = np.arange(len(states)) // 10 if levels is None else levels
    return SplitStates(torch.as_tensor(states), levels, split_levels(levels, 0))


def test_an_autoencoder_recovers_known_sparse_factors():
    rng, atoms = RNG(0), unit_rows(24, 16)
    active = rng.random((6000, 24)).argsort(axis=1) < 2
    states = np.float32((active * rng.uniform(1, 2, active.shape)) @ atoms + 3)
    found = train_autoencoder(torch.from_numpy(states), 32, 2, 0,
                              AutoencoderTraining(600, 256, 5e-3))
    cosines = torch.from_numpy(atoms) @ found.atoms.T
    assert cosines.max(dim=1).values.mean() > 0.9
    assert torch.allclose(found.atoms.norm(dim=1), torch.ones(32), atol=1e-5)
    errors = states - found.reconstruct(torch.from_numpy(states)).numpy()
    assert 1 - errors.var(axis=0).sum() / states.var(axis=0).sum() > 0.9
    assert ((found.encode(torch.from_numpy(states)) != 0).sum(dim=1) <= 2).all()


def test_atoms_of_random_data_resemble_no_factors():
    states = RNG(1).normal(size=(3000, 16)).astype(np.float32)
    found = train_autoencoder(torch.from_numpy(states), 32, 2, 0, AutoencoderTraining(200, 256))
    cosines = torch.from_numpy(unit_rows(24, 16)) @ found.atoms.T
    assert cosines.max(dim=1).values.mean() < 0.8


def test_only_the_largest_positive_outputs_are_kept():
    outputs = torch.tensor([[3.0, -1, 2, 1], [-1, -2, -3, 0.5]])
    assert top_k(outputs, 2).tolist() == [[3, 0, 2, 0], [0, 0, 0, 0.5]]


def test_matching_pursuit_of_orthonormal_atoms_keeps_the_largest_coordinates():
    states = torch.from_numpy(RNG(2).normal(size=(50, 6)).astype(np.float32))
    rotation = torch.linalg.qr(torch.from_numpy(RNG(3).normal(size=(6, 6)).astype(np.float32)))[0]
    coordinates = states @ rotation.T
    threshold = coordinates.abs().sort(dim=1, descending=True).values[:, 2:3]
    expected = torch.where(coordinates.abs() >= threshold, coordinates, 0)
    assert torch.allclose(matching_pursuit(states, rotation, 3), expected, atol=1e-4)
    assert (matching_pursuit(states, rotation, 3, signed=False) >= 0).all()


def test_matching_pursuit_finds_the_atoms_of_a_mixture_and_survives_equal_atoms():
    atoms = torch.from_numpy(np.concatenate([unit_rows(12, 30), unit_rows(12, 30)]))
    mixed = 2 * atoms[3] - 1.5 * atoms[7]
    found = matching_pursuit(mixed[None], atoms, 4)[0]
    assert torch.isfinite(found).all() and torch.allclose(found @ atoms, mixed, atol=1e-3)
    assert set(torch.nonzero(found.abs() > 0.01).flatten().tolist()) <= {3, 7, 15, 19}


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_dictionaries_reconstruct_states_with_unit_atoms(kind, recwarn):
    states = (RNG(4).laplace(size=(400, 5)) @ RNG(5).normal(size=(5, 8)) + 2).astype(np.float32)
    dictionary = fixed_dictionary(kind, states, 20, 5, 0)
    assert np.allclose(dictionary.atoms.norm(dim=1), 1, atol=1e-5)
    tensor = torch.from_numpy(states)
    activations = dictionary.encode(tensor)
    assert ((activations != 0).sum(dim=1) <= 5).all()
    error = (tensor - dictionary.decode(activations)).square().sum()
    assert error < (tensor - tensor.mean(dim=0)).square().sum()
    stored = Dictionary.of_arrays({name: array for name, array in dictionary.arrays().items()
                                   if array is not None})
    assert torch.equal(stored.reconstruct(tensor), dictionary.reconstruct(tensor))


def test_scores_count_dead_features_and_give_exact_reconstructions_no_divergence():
    policy = small_policy()
    data = split(RNG(6).uniform(-1, 1, (300, 12)).astype(np.float32))
    exact = identity(12)
    scores = score_dictionary(exact, policy, data, 0)
    assert scores["variance_explained"] == pytest.approx(1) and scores["kl"] < 1e-6
    assert scores["dead"] == 0 and scores["l0"] == pytest.approx(12)
    assert exact.bias is not None
    exact.bias[:6] = -5  # these features are never active
    scores = score_dictionary(exact, policy, data, 0)
    assert scores["dead"] == pytest.approx(6 / 24) and scores["kl"] > 0.01
    assert scores["variance_low"] < scores["variance_explained"] < scores["variance_high"] < 1
    assert scores["kl_low"] < scores["kl"] < scores["kl_high"]


def test_auc_equals_that_of_scikit_learn():
    rng = RNG(7)
    activations = np.round(rng.normal(size=(200, 3)), 1)
    labels = rng.integers(0, 2, (200, 3)).astype(np.float32)
    labels[:50, 1] = np.nan
    labels[:, 2] = 1
    auc = label_auc(activations, labels)
    for feature in range(3):
        for label in range(2):
            rows = ~np.isnan(labels[:, label])
            assert auc[feature, label] == pytest.approx(
                roc_auc_score(labels[rows, label], activations[rows, feature]))
    assert np.isnan(auc[:, 2]).all()


@pytest.fixture(scope="module")
def planted():
    """Return activations of 40 random features in 100 levels, and labels; one is feature 3."""
    rng, levels = RNG(8), np.repeat(np.arange(100), 20)
    activations = rng.exponential(size=(2000, 40)) * (rng.random((2000, 40)) < 0.2)
    activations += 0.3 * rng.random((100, 40))[levels]  # features vary between levels
    labels = pd.DataFrame({f"noise_{i}": rng.random(2000) < 0.3 for i in range(10)})
    labels["of_level"] = (rng.random(100) < 0.5)[levels]  # constant per level
    labels["planted"] = activations[:, 3] > 0.8
    return activations, labels.astype(np.float32), levels, split_levels(levels, 0)


def test_only_a_planted_label_is_a_name(planted):
    activations, labels, levels, parts = planted
    table = name_features(activations, labels, levels, parts, 0)
    assert table["feature"][table["named"]].tolist() == [3]
    row = table.loc[3]
    assert row["label"] == "planted" and row["auc"] == 1 and row["low_95"] == 1
    assert row["base"] == pytest.approx(labels["planted"][parts.test].mean())
    assert row["precision"] == pytest.approx(
        labels["planted"][parts.test][activations[parts.test, 3] > 0].mean())


def test_shuffled_labels_name_nothing(planted):
    activations, labels, levels, parts = planted
    exchanged = exchanged_levels(levels, parts, np.random.default_rng(0))
    shuffled = labels.iloc[exchanged].reset_index(drop=True)
    assert not name_features(activations, shuffled, levels, parts, 0)["named"].any()
    for part in (parts.train, parts.penalty, parts.test):  # labels remain within their part
        assert shuffled["planted"][part].mean() == pytest.approx(labels["planted"][part].mean())
    assert not (shuffled["planted"] == labels["planted"]).all()


def test_a_label_that_holds_in_few_levels_is_no_name(planted):
    activations, labels, levels, parts = planted
    rare = labels[["planted"]].where(pd.Series(levels < 3), 0)
    assert (name_features(activations, rare, levels, parts, 0)["label"] == NO_LABEL).all()


def test_no_number_of_the_tested_levels_depends_on_their_labels_for_the_choice(planted):
    activations, labels, levels, parts = planted
    changed = labels.copy()
    changed.loc[parts.test, "planted"] = np.float32(RNG(9).random(parts.test.sum()) < 0.5)
    table = name_features(activations, changed, levels, parts, 0)
    assert table["label"][3] == "planted" and not table["named"][3]


def test_ablation_of_the_direction_that_the_policy_reads_stands_out():
    policy = small_policy()
    with torch.no_grad():  # the heads read only unit 0
        policy.fc_policy.weight[:, 1:] = 0
    data = split(RNG(10).uniform(-1, 1, (600, 12)).astype(np.float32))
    dictionary = identity(12)
    chosen = strongest_features(dictionary, policy, data, 5)
    assert sorted(chosen) == [0, 12]  # all others have no effect
    table = score_ablations(dictionary, policy, data, np.array([0, 12, 4]), 0).set_index("feature")
    assert table["kl_claimed"].tolist() == [True, True, False]
    assert table["kl"][4] == 0 and table["kl"][0] > table["kl_control"][0] > 0
    assert table["p_kl"][0] == pytest.approx(1 / 1000) and table["p_kl"][4] == 1


@pytest.mark.parametrize("recurrent", [True, False])
def test_ablation_subtracts_a_feature_and_nothing_else(recurrent):
    policy = small_policy(recurrent=recurrent)
    size = policy.hidden_state_size
    hidden = torch.from_numpy(RNG(11).uniform(-1, 1, (4, size)).astype(np.float32))
    frames = torch.rand(4, 3, 64, 64)

    def states(*patches):
        with torch.no_grad(), patched(policy, patches):
            return policy.step(policy.embed(frames), hidden).hidden_states

    plain, dictionary = states(), identity(size)
    assert torch.equal(states(splice(dictionary, policy)), plain)
    for feature in (2, size + 2):
        altered = states(ablate(dictionary, policy, feature))
        expected = plain.clone()
        expected[:, 2] = plain[:, 2].clamp(max=0) if feature == 2 else plain[:, 2].clamp(min=0)
        assert torch.equal(altered, expected)
    along = torch.zeros(size)
    along[5] = 1
    moved = states(ablate(dictionary, policy, 2, along)) - plain
    assert torch.allclose(moved[:, 5], -plain[:, 2].relu(), atol=1e-6)
    assert not moved[:, torch.arange(size) != 5].any()


def test_controls_move_states_by_the_amounts_of_the_largest_feature():
    policy = small_policy()
    states = RNG(12).uniform(-0.1, 0.1, (300, 12)).astype(np.float32)
    states[:, 4] *= 5
    data = split(states)
    conditions = ablation_conditions(identity(12), policy, np.array([1, 4]), {1: "a", 4: "b"},
                                     data, 3, 0)
    assert [condition.control for condition in conditions] == [False] * 2 + [True] * 3
    (patch,) = conditions[2].patches
    moved = patch.function(data.test) - data.test
    assert torch.allclose(moved.norm(dim=1), data.test[:, 4].relu(), atol=1e-5)


def test_an_exact_reconstruction_changes_no_step_in_the_game():
    policy = tiny_policy()
    env = EnvConfig("fruitbot", "easy")
    testbed = Testbed(policy, FLOAT32, env, env.draw_levels(2, 0))
    size = policy.hidden_state_size
    std = {"hidden_state": torch.ones(size)}
    plain = play_runs(testbed, BASELINE, {})
    spliced = play_runs(testbed, Condition("x", patches=[splice(identity(size), policy)]), std)
    assert np.array_equal(plain.actions, spliced.actions) and spliced.moved == 0
    assert np.array_equal(plain.values, spliced.values)
    coarse = fixed_dictionary("random", RNG(0).normal(size=(50, size)).astype(np.float32), 8, 1, 0)
    assert play_runs(testbed, Condition("x", patches=[splice(coarse, policy)]), std).moved > 0


def test_examples_are_the_most_active_rows_of_different_episodes_first():
    activations = np.array([0, 5, 4, 3, 0, 1])
    episodes = np.array([0, 0, 0, 1, 1, 2])
    assert top_examples(activations, episodes, 3).tolist() == [1, 3, 5]
    assert top_examples(activations, episodes, 9).tolist() == [1, 3, 5, 2]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """An agent with a fast embedder; the studies read only its memory."""
    path = tmp_path_factory.mktemp("agent") / "model_0.pth"
    save_agent(path, tiny_policy(architecture="nature"))
    return path


@pytest.fixture(scope="module")
def recording(agent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    assert record.main(record_arguments(agent, folder, 12)) == 0
    return folder


@pytest.fixture(scope="module")
def simulator_file(agent, tmp_path_factory):
    return save_simulator(tmp_path_factory.mktemp("simulator"), agent)


@pytest.fixture(scope="module")
def arguments(recording, agent, tmp_path_factory):
    """Flags of analysis/sparse_features.py for a small study of the recorded agent."""
    folder = tmp_path_factory.mktemp("sparse")
    assert level_labels.main(["--data_dir", str(recording / "data"), "--output_dir",
                              str(folder / "labels")]) == 0
    return folder, [*map(str, (
        "--agent_file", agent, "--data_dir", recording / "data", "--labels_dir",
        folder / "labels", "--sizes", 24, "--num_active", 4, "--num_steps", 30, "--num_levels", 10,
        "--num_features", 2, "--num_controls", 2, "--device", "cpu", "--output_dir",
        folder / "features"))]


@pytest.fixture(scope="module")
def finished(arguments):
    folder, argv = arguments
    assert sparse_features.main(argv) == 0
    return folder / "features"


@pytest.mark.slow
def test_the_script_writes_all_files_and_resumes(arguments, finished):
    store = ResultStore(finished, SPARSE_FEATURES)
    dictionaries, features = store.read("dictionaries"), store.read("features")
    assert {"sae_24", "sae_24_pursuit", *FIXED} >= {
        name.removesuffix("_24") if name.partition("_")[0] in FIXED else name
        for name in dictionaries["dictionary"]}
    strong = features[features["rank"].notna()]
    assert 0 < len(strong) <= 2 and set(strong["dictionary"]) == {"sae_24"}
    assert len(store.keys("condition")) == 1 + len(dictionaries) + len(strong) + 2
    assert (finished / "dictionaries.png").exists() and (finished / "effects.png").exists()
    assert "Nothing can be claimed with fewer than 19" in store.read("effects_report")
    assert store.read("report").startswith("# Sparse features of the hidden state")
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    shutil.rmtree(finished / "conditions" / "splice_pca")
    _, argv = arguments
    assert sparse_features.main(argv) == 0
    after = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} <= {
        path for path in before if path.suffix == ".png"}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "sentence"), [
    (["--num_levels", "9"], "increase --num_levels"),
    (["--num_controls", "1"], "argument --num_controls: must be a whole number from 2"),
    (["--num_active", "5"], "choose another --output_dir")])
def test_unusable_flags_are_refused(arguments, finished, capsys, more, sentence):
    assert sentence in refusal(sparse_features.main, [*arguments[1], *more], capsys)


@pytest.mark.slow
def test_dreams_of_features_are_tested_in_the_game(finished, simulator_file, agent, recording,
                                                   tmp_path):
    assert feature_dreams.main([*map(str, (
        "--agent_file", agent, "--model_file", simulator_file, "--data_dir",
        recording / "data", "--interpreting_params_name", "tiny", "--features_dir", finished,
        "--num_starts", 2, "--iterations", 2, "--num_recorded", 24, "--device", "cpu",
        "--no_videos", "--output_dir", tmp_path))]) == 0
    store = ResultStore(tmp_path, feature_dreams.FEATURE_DREAMS)
    dreams = pd.read_csv(tmp_path / "dreams.csv")
    strong = ResultStore(finished, SPARSE_FEATURES).read("features")
    strong = strong[strong["rank"].notna()].sort_values("rank")
    assert dreams["feature"].tolist() == strong["feature"].tolist()
    assert dreams["active"].isin((0, 1)).all() and dreams["others_active"].between(0, 1).all()
    assert ((dreams["activation"] > 0) == (dreams["active"] == 1)).all()
    assert ((dreams["dream_activation"] > 0) == dreams["dreamed"]).all()
    assert "active in the real game near the start" in store.read("dreams_report")
    # The objective is an output of the encoder.
    sae = Dictionary.of_arrays(ResultStore(finished, SPARSE_FEATURES).read("sae"))
    assert sae.encoder is not None and sae.bias is not None
    states = torch.from_numpy(RNG(13).normal(size=(3, 64)).astype(np.float32))
    target = feature_dreams.linear_target("feature", sae.encoder[1], sae.bias[1], sae.centre)
    rollouts = type("Rollouts", (), {"hidden_states": states[None]})()
    assert torch.allclose(target.read(rollouts, 0),
                          (states - sae.centre) @ sae.encoder[1] + sae.bias[1], atol=1e-5)


@pytest.mark.slow
def test_features_of_another_agent_are_refused(finished, simulator_file, published_agent, recording,
                                               tmp_path, capsys):
    sentence = refusal(feature_dreams.main, [
        "--agent_file", published_agent, "--model_file", simulator_file, "--data_dir",
        recording / "data", "--features_dir", finished, "--output_dir", tmp_path / "out"], capsys)
    assert "were found" in sentence


def test_parts_of_a_split_share_no_level(planted):
    _, _, levels, parts = planted
    assert isinstance(parts, Parts)
    assert not set(levels[parts.train]) & set(levels[parts.test])
