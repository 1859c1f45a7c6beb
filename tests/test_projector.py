"""Directions of the hidden space: coordinates, gradients and swaps."""

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_projector

from common.errors import UserError
from interventions.projector import Projector


@pytest.fixture(scope="module")
def golden():
    return {name: torch.from_numpy(array)
            for name, array in np.load(GOLDEN / "projector.npz", allow_pickle=False).items()}


@pytest.fixture(scope="module")
def projector():
    return golden_projector()


@pytest.mark.parametrize("kind", ["pca", "ica"])
def test_coordinates_and_gradients_are_the_golden_ones(golden, projector, kind):
    torch.testing.assert_close(projector.coordinates(golden["hx"], kind), golden[kind],
                               atol=1e-4, rtol=0)
    torch.testing.assert_close(projector.gradient(golden["hx"], kind), golden[f"grad_to_{kind}"],
                               atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["pca", "ica"])
def test_swapping_moves_the_amount_from_one_coordinate_to_the_other(golden, projector, kind):
    delta = golden["hx"][1:] - golden["hx"][:-1]
    before = projector.change(delta, kind)
    after = projector.change(projector.swap(delta, [(10, 12), (5, None)], kind), kind)
    expected = before.clone()
    expected[:, 10] = expected[:, 5] = 0
    expected[:, 12] += before[:, 10]
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)


def test_swap_does_what_hand_made_directions_say():
    identity = torch.eye(2)
    by_hand = Projector(torch.tensor([5.0, 5.0]), torch.tensor([2.0, 1.0]), identity,
                        torch.tensor([4.0, 1.0]), identity, identity)
    # A step of 1 along coordinate 0: 2, the std of the loading, times 2, the std of the unit.
    assert by_hand.directions("ica").tolist() == [[4.0, 0.0], [0.0, 1.0]]
    assert by_hand.swap(torch.tensor([8.0, 3.0]), [(0, 1)], "ica").tolist() == [0.0, 5.0]
    assert by_hand.swap(torch.tensor([8.0, 3.0]), [(0, None)], "ica").tolist() == [0.0, 3.0]


def test_matrices_are_read_by_their_published_names(golden, projector, tmp_path):
    names = {"mean": "hx_mu", "std": "hx_std", "components": "pcomponents",
             "variances": "pc_loading_variances", "unmixing": "ica_unmixing_matrix_hx",
             "mixing": "ica_mixing_matrix_hx"}
    for name in names.values():
        np.save(tmp_path / f"{name}_20.npy", golden[name.removesuffix("_hx")].numpy())
    loaded = Projector.load(tmp_path, 20)
    assert torch.equal(loaded.coordinates(golden["hx"], "ica"),
                       projector.coordinates(golden["hx"], "ica"))
    for name, array, message in (
            ("mean", golden["hx_mu"][:60], "'std' holds"),
            ("std", 0 * golden["hx_std"], "that is not above 0"),
            ("mixing", golden["ica_mixing_matrix"] * np.nan, "NaN")):
        file = tmp_path / f"{names[name]}_20.npy"
        whole = file.read_bytes()
        np.save(file, array.numpy())
        with pytest.raises(UserError, match=message):
            Projector.load(tmp_path, 20)
        file.write_bytes(whole)
    with pytest.raises(UserError, match=r"hx_mu_77.npy.*hidden_analysis_precompute"):
        Projector.load(tmp_path, 77)


def test_directions_that_do_not_exist_are_named(golden, projector):
    for pair, words in (((16, 0), "no ica direction 16"), ((0, -1), "no ica direction")):
        with pytest.raises(UserError, match=words):
            projector.swap(golden["hx"], [pair], "ica")
