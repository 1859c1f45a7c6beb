"""Ablations of components of the hidden state: definitions, matched controls, planted effects."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import CHANGE, HIGH, LOW, counting_policy, golden_projector, tiny_policy

import compare_interventions
from agents.agent_file import save_agent
from agents.hooks import batch_info, patched
from agents.patch import BatchInfo
from agents.provenance import weights_sha256
from common.errors import UserError
from common.files import save_json, sha256
from interventions import comparison
from interventions.ablations import ABLATIONS, FROZEN, MEAN, RESAMPLE, ablation_conditions
from interventions.hidden_states_folder import hidden_state_results, matrix_files
from interventions.projector import Projector

BATCH, STEPS = 3, 5


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


def conditions_of(directions, kinds, sources=None, distances=(1.0,)):
    """Return conditions from step 1 on, with two controls; ``distances`` are the measured ones."""
    ablations = ablation_conditions(directions, kinds, 2, golden_projector(), sources, 1, 5)
    return ablations.with_controls({condition.name: distance for condition, distance in zip(
        ablations.conditions, distances, strict=True)})


@pytest.mark.parametrize("kind", ABLATIONS)
def test_coordinates_are_set_as_defined(kind):
    policy, golden = tiny_policy(), golden_projector()
    embeddings = torch.randn(STEPS, BATCH, 64, generator=torch.Generator().manual_seed(1))
    sources = np.random.default_rng(0).normal(size=(50, golden.num_ics))
    ablation, *controls = conditions_of([2], [kind], sources, [0.7])
    before, after = (states_of(patches, policy, embeddings) for patches in ([], ablation.patches))
    assert torch.equal(before[0], after[0])  # step 0 is not ablated
    rows = [[np.random.default_rng([5, level]).integers(50) + step for level in (70, 71, 72)]
            for step in range(1, STEPS)]
    expected = {MEAN: torch.zeros(STEPS - 1, BATCH),
                RESAMPLE: torch.from_numpy(sources[np.array(rows) % 50, 2]).float(),
                FROZEN: golden.coordinates(before[0], "ica")[:, 2].expand(STEPS - 1, -1)}[kind]
    torch.testing.assert_close(golden.coordinates(after[1:], "ica")[..., 2], expected, atol=2e-3,
                               rtol=0)
    others = golden.change(after[1] - before[1], "ica")
    others[:, 2] = 0
    assert others.abs().max() < 1e-3  # in the first ablated step, nothing else changes

    changes = []
    for control in controls:
        moved = states_of(control.patches, policy, embeddings)
        assert torch.equal(before[0], moved[0])
        changes.append((moved[1] - before[1]) / golden.std)
        torch.testing.assert_close(changes[-1].norm(dim=1), torch.full((BATCH,), 0.64), rtol=1e-3,
                                   atol=0)
        turned = golden.turned(control.settings["turned_by_seed"])
        coordinates = turned.coordinates(before[1], "ica")[:, 0]
        if kind == MEAN:
            assert (turned.change(changes[-1] * golden.std, "ica")[:, 0] * coordinates < 0).all()
    assert not torch.allclose(*changes, atol=0.1)


def test_ablations_that_move_the_state_equally_far_share_controls():
    made = conditions_of([4, 0, 7, 2, 9], [MEAN], None, [1.0, 3.0, 1.2, 5.0, 0.0])
    shared = {}
    for condition in made:
        shared.setdefault(condition.pattern, []).append(condition)
    assert [[condition.settings.get("component") for condition in group if not condition.control]
            for group in shared.values()] == [[4, 7], [0], [2], [9]]
    for group, distance in zip(shared.values(), (1, 2.44, 5.96, 0)):
        controls = [condition for condition in group if condition.control]
        assert len(controls) == 2
        assert all(condition.settings["distance"] == distance for condition in controls)
    assert len({condition.name for condition in made}) == len(made)
    with pytest.raises(UserError, match="no ica direction 99"):
        conditions_of([99], [MEAN])
    with pytest.raises(UserError, match="the component 3 is given twice"):
        conditions_of([3, 3], [MEAN])


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
        "--num_episodes", 10, "--num_controls", 2, "--directions", 0, 1, "--ablations", MEAN,
        RESAMPLE, FROZEN, "--precision", "float32", "--device", "cpu", "--output_dir",
        path / "out")))) == 0
    return comparison.comparison_store(path / "out")


def test_planted_component_matters_and_another_does_not(counted):
    table = pd.read_csv(counted.file_of("effects")).set_index(["condition", "outcome"])
    # The recorded states have the coordinate 0 in all steps, which is the mean.
    for kind, name in ((MEAN, "{}_mean"), (RESAMPLE, "{}_resample"), (FROZEN, "{}_to_None")):
        counts = comparison.read_runs(counted, f"ic_{name.format(0)}")
        never = kind == FROZEN  # held at the count of step 0
        for run in np.split(counts.actions, np.cumsum(counts.lengths)[:-1]):
            assert run[0] == LOW and (run[1:] == (LOW if never else HIGH)).all()
        other = table.loc[f"ic_{name.format(1)}"]
        assert (other["effect"].drop("value") == 0).all() and (other["moved"] > 0).all()
        mine = table[table["pattern"] == other["pattern"].iloc[0]]
        moved = mine[mine["control"]]["moved"]
        np.testing.assert_allclose(moved, other["moved"].iloc[0], rtol=0.26)
        assert table.loc[f"ic_{name.format(0)}", "divergence"]["effect"] > 0
    before = comparison.read_runs(counted, "unaltered")
    assert (before.actions[:CHANGE] == LOW).all() and before.actions[CHANGE] == HIGH


def test_report_names_ablations_and_sizes(counted):
    text = counted.file_of("report").read_text()
    assert "| IC 0 at its mean |" in text and "| IC 1 frozen |" in text and "nan" not in text
    settings = json.loads((counted.path / "settings.json").read_text())
    assert settings["conditions"]["ic_1_mean"] == {"ablation": MEAN, "component": 1}
    assert settings["sources_sha256"] == sha256(
        hidden_state_results(counted.path.parent / "m", 12).file("sources"))
