"""Recognise files that are not agent files of tensors, so that messages can name their kind."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch

from common.errors import shortened

_HEAD = 100_000  # bytes in which texts of a format are looked for
_REBUILD = "rebuild the network in torch, copy the weights, and save its state_dict()"
_SAVE = "save the state_dict() of the original module instead"
_BEGINNINGS = (
    (b"\x89HDF\r\n", f"an HDF5 file, as Keras writes: {_REBUILD}"),
    (b"\x93NUMPY", f"a single NumPy array (.npy): {_REBUILD}"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it first"),
    (b"version https://git-lfs", "a pointer of Git LFS: fetch the file with git lfs pull"),
    (b"<", "a web page: download the file itself"),
    (b"{", "a text file of JSON, not weights"))
_TABLE_END = bytes.fromhex("57fb808b247547db")  # of a TensorFlow .index file
_TENSORFLOW = f"of a TensorFlow checkpoint: {_REBUILD}"
_TRUNCATED = "truncated: the end of its archive is missing; copy the file again"
_PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


def open_archive(data: bytes) -> zipfile.ZipFile | None:
    """Open the contents of a file as a zip archive; None if they are not one."""
    try:
        return zipfile.ZipFile(io.BytesIO(data)) if data.startswith(b"PK\x03\x04") else None
    except (zipfile.BadZipFile, ValueError, OSError):
        return None


def folder_kind(path: Path) -> str:
    """Return the kind of a folder that was given as an agent file, and what to do."""
    names = {entry.name for entry in path.iterdir()}
    if {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"} & names:
        return f"a JAX checkpoint (Orbax): {_REBUILD}"
    if "saved_model.pb" in names:
        return f"a TensorFlow model: {_REBUILD}"
    if {"rllib_checkpoint.json", "algorithm_state.pkl"} & names:
        return f"an RLlib checkpoint: {_SAVE}"
    return "a folder: give the file with the weights"


def file_kind(data: bytes, name: str) -> str:
    """Return the kind of a file that is not a torch file of tensors, and what to do; or "".

    Args:
        data: content of the file.
        name: its name, which alone identifies a file of raw numbers.
    """
    archive, head = open_archive(data), data[:_HEAD]
    if not data:
        return "empty: copy the file again"
    if archive is not None:
        return _archive_kind(archive, data)
    if data.startswith(b"PK\x03\x04"):
        return _TRUNCATED
    if data.startswith(b"model_checkpoint_path") or data.endswith(_TABLE_END) or (
            ".data-0" in name):
        return f"a part {_TENSORFLOW}"
    if b"joblib.numpy_pickle" in head:
        return ("a joblib file: python -m attribution.published converts agents of Understanding "
                "RL Vision")
    for beginning, kind in _BEGINNINGS:
        if data.startswith(beginning):
            return kind
    if data[8:9] == b"{" and b'"dtype"' in head:
        return ("a safetensors file; convert it: torch.save(safetensors.torch.load_file(FILE), "
                "'model.pth')")
    if data.startswith(_PICKLES):
        return ("a Python pickle, which would run code: load it in the program that wrote it, and "
                "save the state_dict() of its module with torch.save")
    if data[:1] and (0x80 <= data[0] <= 0x9f or 0xdc <= data[0] <= 0xdf) and (
            b"kernel" in head or b"params" in head):
        return f"a JAX file (Flax's msgpack): {_REBUILD}"
    if b"pytorch" in data[:64] or b"onnx" in data[:64].lower():
        return f"an ONNX program: {_SAVE}"
    return ""


def _archive_kind(archive: zipfile.ZipFile, data: bytes) -> str:
    names = archive.namelist()
    if any("/code/__torch__" in name for name in names):
        return f"a TorchScript archive, which is a program: {_SAVE}"
    if names and all(name.endswith(".npy") for name in names):
        return f"a NumPy archive (.npz), as JAX programs write: {_REBUILD}"
    if {"model.weights.h5", "saved_model.pb"} & set(names):
        return f"a model of Keras or TensorFlow: {_REBUILD}"
    if not any(name.endswith("data.pkl") for name in names):
        return "a zip archive that neither torch nor Stable-Baselines3 wrote"
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # a damaged file can raise almost any exception
        return ""
    if not classes:
        return ""
    listed = shortened(", ".join(sorted(classes)[:3]))
    if all(name.startswith(("numpy.", "argparse.", "collections.", "pathlib.", "_codecs."))
           for name in classes):
        return (f"a checkpoint that also holds values other than tensors ({listed}): save only "
                "the state_dict()")
    return (f"a whole pickled module or object ({listed}), which would run code: save its "
            "state_dict() instead")
