"""Dictionaries of an agent's hidden state: TopK sparse autoencoders, and dictionaries to compare
them with.

A dictionary approximates a state by a centre plus a combination of at most k atoms (unit vectors).
The coefficients are the activations of its features.

- A TopK sparse autoencoder (Makhzani and Frey 2013; Gao et al. 2024) computes the activations with
  a linear encoder, and keeps those of the k largest outputs that are positive. Centre, encoder and
  atoms are trained together.
- All other dictionaries have fixed atoms, and their coefficients are found by orthogonal matching
  pursuit (Pati et al. 1993). In each of k steps, the atom whose inner product with the residual is
  largest (in absolute value, if coefficients may be negative) is added, and all coefficients are
  refitted by least squares. For orthonormal atoms (units, principal components), this keeps the k
  coordinates of largest absolute value, which is optimal.

Letters in shape comments: N states, D units, F features (atoms), k active features.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from analysis.decomposition import factorise, independent_components, principal_components
from common.errors import UserError

UNITS, PCA, ICA, NMF, RANDOM, STATES = "units", "pca", "ica", "nmf", "random", "states"
FIXED = {UNITS: "units of the state", PCA: "principal components", ICA: "independent components",
         NMF: "non-negative factors of the states minus the per-unit minimum",
         RANDOM: "random directions with the covariance of the states",
         STATES: "centred states, drawn at random"}
_ROWS_AT_A_TIME = 4096
_LEAST_VARIANCE = 1e-6  # smallest variance of a component in use, relative to the first
_RIDGE = 1e-6  # added to the diagonal of Gram matrices, which are singular for equal atoms
_MAX_ITER = 200  # iterations of ICA and NMF
_NMF_STATES = 5000  # number of states that NMF is fitted to; all would take minutes


@dataclasses.dataclass(frozen=True)
class Dictionary:
    """A dictionary of hidden states.

    Attributes:
        atoms: unit vectors (F, D).
        centre: approximation of a state in which no feature is active (D,).
        num_active: k, the largest number of active features.
        encoder: weights of the encoder (F, D); None for matching pursuit.
        bias: bias of the encoder (F,); None for matching pursuit.
        signed: whether coefficients may be negative.
    """

    atoms: Tensor
    centre: Tensor
    num_active: int
    encoder: Tensor | None = None
    bias: Tensor | None = None
    signed: bool = True

    @property
    def size(self) -> int:
        """Number of features F."""
        return len(self.atoms)

    def encode(self, states: Tensor) -> Tensor:
        """Compute the activations of all features (N, F), at most k of which are not 0, for states
        (N, D)."""
        if self.encoder is None or self.bias is None:
            return torch.cat([matching_pursuit(part - self.centre, self.atoms, self.num_active,
                                               self.signed)
                              for part in states.split(_ROWS_AT_A_TIME)])
        outputs = functional.linear(states - self.centre, self.encoder, self.bias)
        return top_k(outputs, self.num_active)

    def decode(self, activations: Tensor) -> Tensor:
        """Decode activations (N, F) to states (N, D)."""
        return self.centre + activations @ self.atoms

    def reconstruct(self, states: Tensor) -> Tensor:
        """Approximate states (N, D) by at most k features."""
        return self.decode(self.encode(states))

    def on(self, device: torch.device | str) -> Dictionary:
        """Return the dictionary with its tensors on a device."""
        return dataclasses.replace(
            self, atoms=self.atoms.to(device), centre=self.centre.to(device),
            encoder=None if self.encoder is None else self.encoder.to(device),
            bias=None if self.bias is None else self.bias.to(device))

    def by_pursuit(self) -> Dictionary:
        """Return a dictionary with the same atoms that encodes states by non-negative matching
        pursuit."""
        return dataclasses.replace(self, encoder=None, bias=None, signed=False)

    def arrays(self) -> dict[str, np.ndarray | None]:
        """Return the attributes as arrays by name, to be stored; None for a missing one."""
        return {name: value.cpu().numpy() if isinstance(value, Tensor) else
                None if value is None else np.array(value) for name, value in vars(self).items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Dictionary:
        """Create a dictionary from stored arrays, of which ``encoder`` and ``bias`` may be missing.
        """
        tensors = {name: torch.from_numpy(arrays[name])
                   for name in ("atoms", "centre", "encoder", "bias") if name in arrays}
        return cls(num_active=int(arrays["num_active"]), signed=bool(arrays["signed"]), **tensors)


def top_k(outputs: Tensor, number: int) -> Tensor:
    """Return a copy of ``outputs`` (N, F) in which negative entries, and all but the ``number``
    largest entries of each row, are 0."""
    values, places = outputs.topk(min(number, outputs.shape[1]), dim=1)
    return torch.zeros_like(outputs).scatter(1, places, values.relu())


def matching_pursuit(states: Tensor, atoms: Tensor, number: int, signed: bool = True) -> Tensor:
    """Approximate centred states by at most ``number`` atoms, by orthogonal matching pursuit.

    Args:
        states: centred states (N, D).
        atoms: unit vectors (F, D).
        number: largest number of atoms per state.
        signed: whether coefficients may be negative. If not, atoms are chosen by the largest signed
            inner product instead of the largest absolute one, and negative coefficients are set to
            0 at the end.

    Returns:
        Coefficients (N, F).
    """
    chosen = torch.zeros(len(states), 0, dtype=torch.int64, device=states.device)
    residual, coefficients = states, states[:, :0]
    for _ in range(min(number, len(atoms))):
        products = residual @ atoms.T  # (N, F)
        products = products.abs() if signed else products
        best = products.scatter(1, chosen, -torch.inf).argmax(dim=1, keepdim=True)
        chosen = torch.cat([chosen, best], dim=1)
        basis = atoms[chosen]  # (N, i, D)
        gram = basis @ basis.mT + _RIDGE * torch.eye(chosen.shape[1], device=states.device)
        coefficients = torch.linalg.solve(gram, basis @ states.unsqueeze(-1)).squeeze(-1)  # (N, i)
        residual = states - (coefficients.unsqueeze(1) @ basis).squeeze(1)
    if not signed:
        coefficients = coefficients.relu()
    return states.new_zeros(len(states), len(atoms)).scatter(1, chosen, coefficients)


@dataclasses.dataclass(frozen=True)
class AutoencoderTraining:
    """Hyperparameters of the training of a sparse autoencoder.

    Attributes:
        num_steps: number of Adam steps.
        batch_size: number of states per batch.
        learning_rate: learning rate of Adam at the beginning; it decays linearly to a thousandth.
        dead_after: number of consecutive training states without activation after which a feature
            is dead.
        num_revived: largest number of dead features that reconstruct the residual of a state (k_aux
            of Gao et al.).
        auxiliary: weight of the loss of this reconstruction.
    """

    num_steps: int = 2000
    batch_size: int = 1024
    learning_rate: float = 2e-3
    dead_after: int = 20_000
    num_revived: int = 32
    auxiliary: float = 1 / 32


DEFAULT_TRAINING = AutoencoderTraining()


def train_autoencoder(states: Tensor, size: int, num_active: int, seed: int,
                      training: AutoencoderTraining = DEFAULT_TRAINING) -> Dictionary:
    """Train a TopK sparse autoencoder (Gao et al. 2024).

    For the training, the states are centred and divided by a common scale; the result applies to
    the original states. The centre acts as a tied bias: it is subtracted before the encoder and
    added after the decoder. The encoder begins as the transposed decoder; atoms keep norm 1. Dead
    features are trained to reconstruct the residual.

    Args:
        states: states of the training levels (N, D).
        size: number of features F.
        num_active: number of active features k.
        seed: seed of the initialisation and of the batches.
        training: hyperparameters.

    Raises:
        UserError: if no unit varies.
    """
    mean = states.mean(dim=0)
    scale = (states - mean).square().mean().sqrt()
    if not scale > 0:
        raise UserError(f"the {states.shape[1]} units are the same in all {len(states)} states, so "
                        "there is nothing to encode")
    inputs = (states - mean) / scale
    generator = torch.Generator().manual_seed(seed)
    atoms = functional.normalize(torch.randn(size, states.shape[1], generator=generator), dim=1)
    encoder, bias, centre = atoms.clone(), torch.zeros(size), torch.zeros(states.shape[1])
    parameters = [tensor.requires_grad_() for tensor in (atoms, encoder, bias, centre)]
    adam = torch.optim.Adam(parameters, lr=training.learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 1e-3, training.num_steps)
    unused = torch.zeros(size, dtype=torch.int64)  # states since the last activation
    for _ in range(training.num_steps):
        batch = inputs[torch.randint(len(inputs), (training.batch_size,), generator=generator)]
        outputs = functional.linear(batch - centre, encoder, bias)  # (B, F)
        activations = top_k(outputs, num_active)
        residual = batch - (centre + activations @ atoms)  # (B, D)
        loss = residual.square().mean()
        unused = torch.where((activations > 0).any(dim=0), 0, unused + len(batch))
        dead = torch.nonzero(unused > training.dead_after).squeeze(1)
        if len(dead):
            revived = top_k(outputs[:, dead], training.num_revived) @ atoms[dead]
            loss = loss + training.auxiliary * (residual.detach() - revived).square().mean()
        adam.zero_grad()
        loss.backward()
        with torch.no_grad():  # without the part of the gradient that changes the norm of an atom
            assert atoms.grad is not None
            atoms.grad -= (atoms.grad * atoms).sum(dim=1, keepdim=True) * atoms
            adam.step()
            atoms.copy_(functional.normalize(atoms, dim=1))
        decay.step()
    atoms, encoder, bias, centre = (tensor.detach() for tensor in parameters)
    # In units of the states: activations are multiplied by the scale.
    return Dictionary(atoms, mean + scale * centre, num_active, encoder, scale * bias)


def fixed_dictionary(kind: str, states: np.ndarray, size: int, num_active: int,
                     seed: int) -> Dictionary:
    """Return a dictionary whose coefficients are found by matching pursuit.

    Args:
        kind: a key of FIXED, which describes the kinds.
        states: states of the training levels, float32 (N, D).
        size: number of atoms of the kinds RANDOM and STATES; the others have at most D.
        num_active: number of active features k.
        seed: seed of the random draws.

    Raises:
        UserError: if no unit varies and the kind is PCA, ICA or NMF.
    """
    centre, signed = states.mean(axis=0, dtype=np.float64).astype(np.float32), True
    centred = states - centre
    rng = np.random.default_rng(seed)
    if kind == UNITS:
        atoms = np.eye(states.shape[1])
    elif kind == NMF:
        some = states[rng.permutation(len(states))[:_NMF_STATES]]
        arrays, _ = factorise(some, min(some.shape), _MAX_ITER, 1e-4, seed)
        atoms, centre, signed = arrays["nmf_components"], arrays["nmf_min"], False
    elif kind == RANDOM:
        atoms = random_directions(centred, size, rng)
    elif kind == STATES:
        atoms = centred[rng.permutation(len(centred))[:size]]
    else:
        principal = principal_components(centred, min(centred.shape), seed)
        kept = principal.variances > _LEAST_VARIANCE * principal.variances[0]
        atoms = principal.components[kept]
        if kind == ICA:
            variances = principal.variances[kept]
            arrays, _ = independent_components(
                centred @ atoms.T, np.ones(len(centred), bool), variances, _MAX_ITER, 1e-3, seed)
            atoms = (arrays["mixing"].T * np.sqrt(variances)) @ atoms
    norms = np.linalg.norm(atoms, axis=1, keepdims=True)
    atoms = (atoms / np.maximum(norms, 1e-12))[norms[:, 0] > 0]
    return Dictionary(torch.from_numpy(np.float32(atoms)), torch.from_numpy(centre), num_active,
                      signed=signed)


def random_directions(centred: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Draw unit vectors from a Gaussian with the covariance of centred states.

    Args:
        centred: states minus their mean (N, D).
        number: number of vectors.
        rng: random generator.

    Returns:
        Unit vectors, float32 (number, D).
    """
    root = np.linalg.qr(centred, mode="r")  # root.T @ root is the covariance times N
    drawn = rng.standard_normal((number, len(root))) @ root
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
