"""Steering vectors: directions at a layer of the policy, and their file ``<name>.npz``.

A vector is added to a layer's output with a coefficient. It is computed from activations as

- the mean difference between paired frames that differ in the object of interest, with one pair per
  level, or per square of the level (Turner et al. 2023, "Activation Addition"; Mini et al. 2023);
- the difference between the means of two classes of states, such as states before one action and
  all other states;
- or the weights of a linear probe.

If the vector of a single pair is added with coefficient -1 while the policy sees the frame with the
object, the policy's output is the same as for the frame without the object. This holds at every
layer that no skip connection bypasses.

Letters in shape comments: N pairs of levels, P pairs of frames, B frames, C channels, H W cells of
a layer's map, D units of the hidden state. A layer's shape, *shape, is (C, H, W) or (units,).
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.agent_file import weights_sha256
from agents.frames import as_frames, as_images
from agents.layers import find_layer
from agents.networks import Policy
from agents.reference_set import activations_of
from common.errors import UserError
from common.files import atomic_path, read_arrays, versions
from common.schemas import Array, NpyFolder

PAIRS, CLASS_MEANS, PROBE = "pairs", "class means", "probe"  # kinds
AS_COMPUTED, UNIT, RMS = "as computed", "unit", "rms"  # scales
SCALES = (AS_COMPUTED, UNIT, RMS)
FRAMES_PER_BATCH = 64  # all layers take 2 MB per frame, 10 MB in the wide network
_WHAT = "steering vector"
_TEXT = {"kind": str, "scale": str, "agent": str, "about": str, "levels": list, "modes": list,
         "versions": dict}


@dataclasses.dataclass(frozen=True)
class SteeringVector:
    """A direction at one layer of one agent.

    Attributes:
        layer: name of the layer to whose output it is added.
        vector: the direction, float32, of the layer's shape.
        pairs: seeds of the levels with and without the object of interest, int64 (N, 2); empty if
            the kind is not PAIRS.
        norms: Euclidean norm of the difference of each pair before scaling, float32 (N,).
        kind: PAIRS, CLASS_MEANS or PROBE.
        agent: ``weights_sha256`` of the agent.
        about: the object or class of interest.
        levels: seeds of all levels that the vector was computed from.
        modes: distribution modes of these levels.
        scale: one of SCALES, see ``scaled``.
        versions: versions of the packages that computed it.

    Raises:
        UserError: if the shapes of the arrays are inconsistent, a value is NaN or infinite, or the
            kind or scale is unknown.
    """

    layer: str
    vector: np.ndarray
    pairs: np.ndarray
    norms: np.ndarray
    kind: str
    agent: str
    about: str
    levels: tuple[int, ...]
    modes: tuple[str, ...]
    scale: str = AS_COMPUTED
    versions: Mapping[str, str] = dataclasses.field(default_factory=versions)

    def __post_init__(self):
        dims = "C H W" if self.vector.ndim == 3 else "units"
        form = NpyFolder({"vector": Array(np.float32, dims), "pairs": Array(np.int64, "N 2"),
                          "norms": Array(np.float32, "N")})
        form.check({name: getattr(self, name) for name in form.fields})
        if self.kind not in (PAIRS, CLASS_MEANS, PROBE) or self.scale not in SCALES:
            raise UserError(f"it has an unknown kind, '{self.kind}', or an unknown scale, "
                            f"'{self.scale}'")

    def scaled(self, scale: str, rms: float | None = None) -> SteeringVector:
        """Return the same direction with another norm.

        Args:
            scale: UNIT: Euclidean norm 1. RMS: the root mean square of the entries equals that of
                the layer's outputs, so that coefficients are relative to typical outputs.
                AS_COMPUTED: unchanged.
            rms: root mean square of the layer's outputs, for RMS.

        Raises:
            UserError: if the vector is 0, which has no direction.
        """
        norm = float(np.linalg.norm(self.vector.astype(np.float64)))
        if scale == AS_COMPUTED:
            return self
        if not norm:
            raise UserError(f"the vector at {self.layer} is 0, so it cannot be scaled to {scale}; "
                            "the frames that it was computed from do not differ at this layer")
        size = 1.0 if scale == UNIT else rms * np.sqrt(self.vector.size)
        return dataclasses.replace(self, scale=scale,
                                   vector=np.asarray(self.vector * (size / norm), np.float32))

    def check_for(self, agent: str, layer: str, shape: Sequence[int]) -> None:
        """Check that the vector can be added to a layer of an agent.

        Args:
            agent: ``weights_sha256`` of the agent.
            layer: name of the layer.
            shape: shape of the layer.

        Raises:
            UserError: if the vector belongs to another agent or layer, or has another shape.
        """
        for what, own, wanted in (("the agent with the checksum", self.agent, agent),
                                  ("the layer", self.layer, layer),
                                  ("a layer of the shape", self.vector.shape, tuple(shape))):
            if own != wanted:
                raise UserError(f"a vector of {what} {own} cannot be added to {what} {wanted}; "
                                "compute one for the latter")


def save_vectors(path: Path, vectors: Sequence[SteeringVector]) -> None:
    """Write the vectors of one or several layers to a file ``<name>.npz``.

    Equal vectors give identical bytes. The arrays are ``vector``, ``pairs``, ``norms``, and
    ``text``, a JSON object with all other attributes. For several layers, the names ``vector`` and
    ``norms`` have the suffix ``@<layer>``, and ``layer`` in ``text`` is "all".
    """
    first, several = vectors[0], len(vectors) > 1
    arrays = {"pairs": first.pairs}
    for vector in vectors:
        suffix = f"@{vector.layer}" if several else ""
        arrays |= {f"vector{suffix}": vector.vector, f"norms{suffix}": vector.norms}
    text = {name: getattr(first, name) for name in _TEXT}
    text["layer"] = "all" if several else first.layer
    arrays["text"] = np.array(json.dumps(text))
    with atomic_path(Path(path)) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            # A fixed date, because numpy's own writer would store the current date.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())


def read_vectors(path: Path) -> dict[str, SteeringVector]:
    """Read the vectors of a file, by name of the layer.

    Raises:
        UserError: if the file is missing or damaged, or holds NaN.
    """
    arrays = read_arrays(path, _WHAT)
    try:
        text = json.loads(str(arrays["text"]))
        for name, kind in _TEXT.items():
            if not isinstance(text[name], kind):
                raise UserError(f"its {name} is {text[name]!r}")
        fields: dict[str, Any] = {name: tuple(text[name]) if kind is list else text[name]
                                  for name, kind in _TEXT.items()}
        if text["layer"] != "all":
            arrays |= {f"{name}@{text['layer']}": arrays[name] for name in ("vector", "norms")}
        layers = [name.removeprefix("vector@") for name in arrays if name.startswith("vector@")]
        if not layers:
            raise UserError("it has no layer")
        return {layer: SteeringVector(layer, arrays[f"vector@{layer}"], arrays["pairs"],
                                      arrays[f"norms@{layer}"], **fields) for layer in layers}
    except (UserError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the {_WHAT} {path} is damaged ({type(error).__name__}: "
                        f"{str(error)[:200]}); compute it again") from None


def steering_vector(policy: Policy, layer: str, shown: np.ndarray, lacking: np.ndarray,
                    levels: Sequence[int] | np.ndarray | None = None,
                    about: str = "") -> SteeringVector:
    """Compute the mean difference of a layer's activations between paired frames.

    Args:
        policy: the agent; one with a memory is in its initial state.
        layer: name of the layer.
        shown: P frames with the object of interest, see ``agents.frames.as_images``.
        lacking: the same frames without it.
        levels: seed of each frame's level (P,), so that every level has the same weight; None for
            unknown levels, where every pair has the same weight.
        about: name of the object, for files.

    Raises:
        UserError: if there is no such layer, or the frames do not fit together.

    Example::

        >>> shown, lacking = recording.episode(0).frames[:4], recording.episode(1).frames[:4]
        >>> steering = steering_vector(policy, "embedder.block2", shown, lacking)
        >>> with patched(policy, {steering.layer: lambda a: a - torch.tensor(steering.vector)}):
        ...     values = policy(shown).values
    """
    shown, lacking = (as_frames(as_images(frames, 1)) for frames in (shown, lacking))
    seeds = np.arange(len(shown)) if levels is None else np.asarray(levels, np.int64)
    if not 0 < len(shown) == len(lacking) == len(seeds):
        raise UserError(f"a steering vector needs pairs of frames, but there are {len(shown)} "
                        f"frames with the object, {len(lacking)} without, and {len(seeds)} levels")
    [vector] = vectors_of_pairs(policy, [layer], shown, lacking, np.stack([seeds, seeds], axis=1),
                                about).values()
    if levels is None:
        vector = dataclasses.replace(vector, levels=(), pairs=vector.pairs[:0],
                                     norms=vector.norms[:0])
    return vector


def vectors_of_pairs(policy: Policy, layers: Sequence[str], shown: np.ndarray,
                     lacking: np.ndarray, pairs: np.ndarray, about: str,
                     modes: Sequence[str] = ()) -> dict[str, SteeringVector]:
    """Compute the mean difference between paired frames at several layers.

    Rows with the same pair of seeds are frames of the same levels, with the player on different
    squares. Such rows are averaged first, so that every pair of levels has the same weight. An
    agent with a memory is in its initial state.

    Args:
        policy: the agent.
        layers: names of the layers. The keys of the result are the names of the layers' modules, so
            several names of one module give one entry.
        shown: frames with the object of interest, uint8 (P, 64, 64, 3).
        lacking: frames without it, uint8 (P, 64, 64, 3).
        pairs: seeds of the two levels of each pair of frames (P, 2).
        about: the object of interest.
        modes: distribution modes of the levels.
    """
    layers = _innermost(policy, layers)
    pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    levels, group = np.unique(pairs, axis=0, return_inverse=True)
    means: dict[str, list[np.ndarray]] = {layer: [] for layer in layers}  # one per pair of levels
    for number in range(len(levels)):
        rows = np.flatnonzero(group.reshape(-1) == number)
        sums = {layer: np.zeros(find_layer(policy, layer).shape) for layer in layers}
        for part in np.array_split(rows, -(-2 * len(rows) // FRAMES_PER_BATCH)):
            [(_, outputs)] = outputs_at(policy, layers,
                                        np.concatenate([shown[part], lacking[part]]))
            for layer in layers:
                with_object, without = np.split(outputs[layer].astype(np.float64), 2)
                sums[layer] += (with_object - without).sum(axis=0)
        for layer in layers:
            means[layer].append(sums[layer] / len(rows))
    return {layer: SteeringVector(
        layer, np.asarray(np.mean(means[layer], axis=0), np.float32), levels,
        np.array([np.linalg.norm(mean) for mean in means[layer]], np.float32), PAIRS,
        weights_sha256(policy), about, tuple(np.unique(levels).tolist()), tuple(modes))
        for layer in layers}


def vectors_of_classes(policy: Policy, layers: Sequence[str],
                       frames: np.ndarray, entering: np.ndarray, is_in: np.ndarray,
                       levels: np.ndarray, about: str,
                       modes: Sequence[str] = ()) -> dict[str, SteeringVector]:
    """Compute the mean output over a class of states minus that over all others, at several layers.

    Args:
        policy: the agent.
        layers: names of the layers. The keys of the result are the names of the layers' modules, so
            several names of one module give one entry.
        frames: uint8 (B, 64, 64, 3).
        entering: hidden states of the agent before these frames, float32 (B, D).
        is_in: whether each state is in the class, bool (B,); see ``check_classes``.
        levels: seed of the level of each frame (B,).
        about: description of the class.
        modes: distribution modes of the levels.
    """
    layers, is_in = _innermost(policy, layers), np.asarray(is_in, dtype=bool)
    sums = {layer: np.zeros((2, *find_layer(policy, layer).shape)) for layer in layers}
    for rows, outputs in outputs_at(policy, layers, frames, entering):
        for layer in layers:
            for which in (False, True):
                chosen = outputs[layer][is_in[rows] == which]
                sums[layer][int(which)] += chosen.sum(axis=0, dtype=np.float64)
    num_in = is_in.sum()
    return {layer: SteeringVector(
        layer, np.asarray(inside / num_in - outside / (len(is_in) - num_in), np.float32),
        np.zeros((0, 2), np.int64), np.zeros(0, np.float32), CLASS_MEANS, weights_sha256(policy),
        about, tuple(np.unique(levels).tolist()), tuple(modes))
        for layer, (outside, inside) in sums.items()}


def vector_of_probe(policy: Policy, layer: str, weights: np.ndarray, levels: np.ndarray,
                    about: str, modes: Sequence[str] = ()) -> SteeringVector:
    """Return the weights of a linear probe as a steering vector.

    Args:
        policy: the agent.
        layer: name of the layer that the probe reads.
        weights: weight of each entry of the layer's unscaled output, of the layer's shape.
        levels: seeds of the levels that the probe was trained on.
        about: description of the label that the probe predicts.
        modes: distribution modes of the levels.
    """
    [layer] = _innermost(policy, [layer])
    return SteeringVector(layer, np.asarray(weights, np.float32), np.zeros((0, 2), np.int64),
                          np.zeros(0, np.float32), PROBE, weights_sha256(policy), about,
                          tuple(np.unique(levels).tolist()), tuple(modes))


def check_classes(is_in: np.ndarray, about: str) -> None:
    """Check that there are states inside and outside a class.

    Args:
        is_in: whether each state is in the class, bool (B,).
        about: description of the class, for the message.

    Raises:
        UserError: if all states are in the class, or none.
    """
    if is_in.all() or not is_in.any():
        raise UserError(f"{'all' if is_in.any() else 'none'} of the {len(is_in)} states are in the "
                        f"class '{about}', so there are no states to compare with; use another "
                        "class or more states")


def outputs_at(policy: Policy, layers: Sequence[str], frames: np.ndarray,
               entering: np.ndarray | None = None
               ) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Compute outputs of layers in batches of frames.

    Args:
        policy: the agent.
        layers: names of the layers.
        frames: uint8 (B, 64, 64, 3).
        entering: hidden states of the agent before these frames (B, D); by default initial states.

    Yields:
        Slice of the frames in the batch, and each layer's outputs for them, float32
        (batch, *shape).
    """
    for begin in range(0, len(frames), FRAMES_PER_BATCH):
        rows = slice(begin, begin + FRAMES_PER_BATCH)
        outputs = activations_of(policy, frames[rows], layers,
                                 None if entering is None else entering[rows])
        yield rows, {layer: values.cpu().numpy() for layer, values in outputs.items()}


def _innermost(policy: Policy, layers: Sequence[str]) -> list[str]:
    """Return the name of each layer's innermost module, without duplicates."""
    return list(dict.fromkeys(find_layer(policy, name).name for name in layers))
