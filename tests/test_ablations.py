"""Ablations of components of the hidden state: definitions, matched controls, planted effects."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import golden_projector, tiny_policy
from test_memory_lesions import CHANGE, HIGH, LOW, counting_policy

import compare_interventions
from agents.agent_file import save_agent
from agents.hooks import batch_info, patched
from agents.patch import BatchInfo
from agents.provenance import weights_sha256
from common.errors import UserError
from common.files import save_json
from interventions import comparison
from interventions.ablations import ABLATIONS, FROZEN, MEAN, RESAMPLE, ablation_conditions
from interventions.hidden_states_folder import hidden_state_results, matrix_files
from interventions.projector import Projector

BATCH, STEPS = 3, 5


def test_random_directions_have_the_length_of_the_component():
    golden = golden_projector()
    states = golden.mean + torch.randn(500, golden.num_ics, generator=torch.Generator(
        ).manual_seed(0)) @ golden.directions("ica")  # coordinates of variance 1
    for number in range(4):
        drawn = []
        for seed in range(3):
            turned = golden.turned_to_length(float(golden.lengths[number]), seed)
            assert turned.lengths[0] == pytest.approx(float(golden.lengths[number]), rel=1e-3)
            coordinates = turned.coordinates(states, "ica")
            assert (coordinates.std(dim=0) - 1).abs().max() < 0.15
            torch.testing.assert_close(turned.change(turned.directions("ica"), "ica"),
                                       torch.eye(golden.num_ics), atol=1e-3, rtol=0)
            drawn.append(coordinates[:, 0])
        alike = torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs()
        assert alike.max() < 0.9
    longest = float(golden.variances[:golden.num_ics].max().sqrt())
    assert golden.turned_to_length(2 * longest, 0).lengths[0] == pytest.approx(longest, rel=1e-3)


def states_of(patches, policy, embeddings):
    """Return the states that leave the steps under patches, (T, B, D)."""
    hidden, states = policy.initial_states(BATCH), []
    with patched(policy, patches), torch.no_grad():
        for step, embedding in enumerate(embeddings):
            info = BatchInfo(np.arange(BATCH), np.full(BATCH, step), np.array([70, 71, 72]))
            with batch_info(policy, info):
                hidden = policy.step(embedding, hidden).hidden_states
            states.append(hidden)
    return torch.stack(states)


@pytest.mark.parametrize("kind", ABLATIONS)
@pytest.mark.parametrize("control", [False, True])
def test_coordinates_are_set_as_defined(kind, control):
    policy, golden = tiny_policy(), golden_projector()
    embeddings = torch.randn(STEPS, BATCH, 64, generator=torch.Generator().manual_seed(1))
    sources = np.random.default_rng(0).normal(size=(50, golden.num_ics))
    made = ablation_conditions([2], [kind], 2, golden, sources, "cpu", 1, 5).conditions
    condition = made[2 if control else 0]
    assert condition.control == control and len(made) == 3
    turned = golden.turned_to_length(float(golden.lengths[2]), 1) if control else golden
    place = 0 if control else 2
    before, after = (states_of(patches, policy, embeddings) for patches in ([], condition.value))
    assert torch.equal(before[0], after[0])  # step 0 is not ablated
    first = turned.coordinates(after, "ica")[:, :, place]  # (T, B)
    expected = torch.zeros(STEPS - 1, BATCH)
    if kind == FROZEN:  # a control is held at the value of the component
        expected = golden.coordinates(before[0], "ica")[:, 2].expand(STEPS - 1, -1)
    if kind == RESAMPLE:
        recorded = sources @ golden.mixing.double().numpy().T @ turned.unmixing[place].numpy()
        rows = [[np.random.default_rng([5, level]).integers(50) + step for level in (70, 71, 72)]
                for step in range(1, STEPS)]
        expected = torch.from_numpy(recorded[np.array(rows) % 50]).float()
        if not control:
            np.testing.assert_allclose(recorded, sources[:, 2], atol=1e-3)
    torch.testing.assert_close(first[1:], expected, atol=2e-3, rtol=0)
    others = turned.coordinates(after[1], "ica") - turned.coordinates(before[1], "ica")
    others[:, place] = 0
    assert others.abs().max() < 1e-3  # in the first ablated step, nothing else changes


def test_components_of_similar_length_share_controls_that_move_the_state_as_far():
    golden = golden_projector()
    made = ablation_conditions(range(golden.num_ics), [MEAN], 2, golden, None, "cpu", 1, 0
                               ).conditions
    controls = {condition.pattern for condition in made if condition.control}
    assert {condition.pattern for condition in made} == controls
    assert len(controls) < golden.num_ics
    for condition in made[:golden.num_ics]:
        own = float(golden.lengths[condition.settings["component"]])
        [length] = {other.settings["length"] for other in made
                    if other.control and other.pattern == condition.pattern}
        assert abs(length / own - 1) <= 0.25
    with pytest.raises(UserError, match="no ica direction 99"):
        ablation_conditions([99], [MEAN], 2, golden, None, "cpu", 1, 0)
    with pytest.raises(UserError, match="the component 3 is given twice"):
        ablation_conditions([3, 3], [MEAN], 2, golden, None, "cpu", 1, 0)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Ablations of the counting agent, whose actions depend on unit 0 only: the table and the
    folder. Components are units, and the recorded count is that of step 20 on."""
    path = tmp_path_factory.mktemp("counted")
    policy = counting_policy()
    save_agent(path / "agent.pth", policy, {})
    units = torch.eye(policy.hidden_state_size)
    mean = torch.zeros(len(units))
    mean[0] = 0.9
    projector = Projector(mean, torch.full_like(mean, 0.05), units, torch.ones_like(mean), units,
                          units)
    (path / "m").mkdir()
    save_json(hidden_state_results(path / "m", 12).settings_file,
              {"agent_sha256": weights_sha256(policy)})
    for name, file in matrix_files(path / "m", 12).items():
        np.save(file, getattr(projector, name).numpy())
    np.save(hidden_state_results(path / "m", 12).file("sources"),
            np.zeros((30, len(units)), np.float32))
    assert compare_interventions.main(list(map(str, (
        "--agent_file", path / "agent.pth", "--interpreting_params_name", "tiny",
        "--precomputed_analysis_data_path", path / "m", "--env_name", "fruitbot",
        "--num_episodes", 10, "--num_controls", 2, "--directions", 0, 1, "--ablations", *ABLATIONS,
        "--precision", "float32", "--device", "cpu", "--output_dir", path / "out")))) == 0
    return comparison.comparison_store(path / "out")


def test_planted_component_matters_and_another_does_not(counted):
    table = pd.read_csv(counted.file_of("effects")).set_index(["arm", "outcome"])
    for kind, name in ((MEAN, "{}_mean"), (RESAMPLE, "{}_resample"), (FROZEN, "{}_to_None")):
        counts = comparison.read_runs(counted, f"ic_{name.format(0)}")
        never = kind == FROZEN  # held at the count of step 0
        for run in np.split(counts.actions, np.cumsum(counts.lengths)[:-1]):
            assert run[0] == LOW and (run[1:] == (LOW if never else HIGH)).all()
        other = table.loc[f"ic_{name.format(1)}"]
        assert (other["effect"] == 0).all() and (other["moved"] > 0).all()
        assert table.loc[f"ic_{name.format(0)}", "divergence"]["effect"] > 0
    before = comparison.read_runs(counted, "unaltered")
    assert (before.actions[:CHANGE] == LOW).all() and before.actions[CHANGE] == HIGH


def test_report_names_ablations_and_sizes(counted):
    text = counted.file_of("report").read_text()
    assert "| IC 0 at its mean |" in text and "| IC 1 frozen |" in text and "nan" not in text
    settings = json.loads((counted.path / "settings.json").read_text())
    assert settings["arms"]["ic_1_resample"] == {"ablation": RESAMPLE, "component": 1}
