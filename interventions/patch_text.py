"""Patches as text: command-line and YAML syntax, and opening them for an agent.

The command-line syntax is::

    kind@layer[:channels][=value]{,option=value}

    zero@embedder.block2.res1.resadd:55
    set@embedder.block2.res1.resadd:8,55,70-77=2.3,cell=5.10,others=-0.2
    add@embedder.block2.res1.resadd=vectors/cheese_0.npz,coefficient=-1,steps=0:20
    interchange@embedder.block2.res1.resadd:55,source=7/8
    swap@hidden_state=10:12,5:None,directions=analysis/hx_analysis_precomp,num_episodes=4000

A YAML file holds a list of mappings with the keys ``kind``, ``layer``, ``channels``, ``value`` and
the options. In such a file, a list of values is a sweep. The file then defines several lists of
patches, one for each combination of values. A flat list of ``channels`` is one set of
channels; a list of lists is a sweep.

Every patch takes ``cell`` (row.column from the top left, several separated by ``/``), ``steps``
(from:to, which excludes ``to``) and ``levels``. ``_TYPES`` lists the value and further options of
each kind. ``interventions.maze_words`` holds the options for mazes.
``source`` of ``interchange`` names n levels: the level with seed s takes the entries from the first
frame of source s mod n, numbered from 0.
``swap`` applies changes along direction 10 to direction 12 instead, and removes those along 5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import interventions.patches as kinds
from agents.agent_file import weights_sha256
from agents.hooks import ActivePatches
from agents.layers import layers_named
from agents.networks import Policy
from agents.patch import Patch
from agents.reference_set import activations_of
from common.errors import UserError, nearest
from common.files import MAX_REASON, check_nested, read_array, read_bytes
from interventions.hidden_states_folder import matrix_files
from interventions.maze_words import MAZE_WORDS
from interventions.patches import Opening, OpenOption
from interventions.projector import Swap
from interventions.vectors import read_vectors

logger = logging.getLogger(__name__)

MAX_LISTS = 1000
MAX_SOURCES = 1000  # each source level is a game that is started
MAX_NAME = 80
_MAX_NUMBERS = 100_000  # maximum length of a range
_USAGE = "kind@layer[:channels][=value]{,option=value}, such as zero@embedder.block2.res1.resadd:55"
_PATCH = re.compile(r"""
    ([^@]*)@([^:=,]*)                                        # kind, layer
    (?: :([^=,]* (?:,\s*\d+(?:-\d+)?\s*(?=[,=]|$))*) )?      # channels
    (?: =((?: [^,] | ,(?![^,=]*=) )*) )?                     # value: up to the first option
    ((?: ,[^,=]*=[^,]* )*)                                   # options
    """, re.VERBOSE)
_FLOAT = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"

_Form = tuple[str, Callable[[str], Any]]
"""Text form of a value: description of the expected text, for messages; and a function from text to
value, which raises ValueError or KeyError for invalid text."""


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError
    return match


def _parse_number(text: str) -> float:
    return float(_match(_FLOAT, text)[0])


def _parse_numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in re.split("[,/]", text):
        first, last = _match(r"(\d{1,10})(?:-(\d{1,10}))?", part.strip()).groups()
        if not 0 <= int(last or first) - int(first) < _MAX_NUMBERS:
            raise ValueError
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _parse_steps(text: str) -> tuple[int, int | None]:
    begin, end = _match(r"(\d{1,9})?:(\d{1,9})?", text).groups()
    if end and int(begin or 0) >= int(end):
        raise ValueError
    return int(begin or 0), int(end) if end else None


def _parse_cells(text: str) -> tuple[tuple[int, int], ...]:
    cells = [_match(r"(\d{1,3})\.(\d{1,3})", part) for part in text.split("/")]
    return tuple((int(cell[1]), int(cell[2])) for cell in cells)


def _parse_pairs(text: str) -> tuple[tuple[int, int | None], ...]:
    pairs = [_match(r"(\d{1,9}):(\d{1,9}|[Nn]one)", pair).groups() for pair in text.split(",")]
    return tuple((int(source), int(target) if target.isdigit() else None)
                 for source, target in pairs)


def _choice(*names: str) -> _Form:
    return " or ".join(names), dict(zip(names, names)).__getitem__


def _value(expected: str, pattern: str, parse: Callable[[str], Any] = _parse_number) -> _Form:
    """Return description and parser of the text that gives the value of a patch.

    Args:
        expected: description of the expected text, for messages.
        pattern: regular expression, in which each named group is a field of the patch.
        parse: function from the text of a group to the value of the field.
    """
    return expected, lambda text: {
        name: parse(group) for name, group in _match(pattern, text).groupdict().items()
        if group is not None}


_NUMBER: _Form = "a number", _parse_number
_NUMBERS: _Form = ("whole numbers and ranges such as 8,55,70-77, in options 8/55/70-77",
                   _parse_numbers)
_WHOLE: _Form = "a whole number from 0", lambda text: int(_match(r"\d{1,9}", text)[0])
_YES_NO: _Form = "yes or no", {"yes": True, "no": False}.__getitem__
_OPTIONS: dict[str, _Form] = {  # options that every patch takes
    "cell": ("row.column from the top left, such as 5.10, or several, 5.10/5.11", _parse_cells),
    "steps": ("from:to, such as 0:20, which excludes step 20", _parse_steps),
    "levels": _NUMBERS}
_VECTOR = _value("the .npz file of a steering vector", r"(?P<vector>.+\.npz)", Path)
# Class, text form of the value (None if the patch takes no value), and further options by name.
_Type = tuple[type[Patch], _Form | None, dict[str, _Form]]
_TYPES: dict[str, _Type] = {cls.kind: (cls, value, options) for cls, value, options in (
    (kinds.Zero, None, {}),
    (kinds.SetTo, _value(
        "a number, or an .npy file of numbers that fit the layer",
        rf"(?P<value>{_FLOAT}|.+\.npy)",
        lambda text: Path(text) if text.endswith(".npy") else _parse_number(text)),
        {"others": _NUMBER, "override": _YES_NO}),
    (kinds.Mean, None, {"over": _choice("cells", "channels")}),
    (kinds.Resample, None, {"draw": _choice("joint", "channel"), "seed": _WHOLE}),
    (kinds.Noise, _value(
        "sigma: a number, or a multiple of each channel's standard deviation, such as 0.5sd",
        rf"(?P<sigma>{_FLOAT})(?P<reference_sd>sd)?",
        lambda text: text == "sd" or _parse_number(text)),
        {"draw": _choice("once", "picture"), "seed": _WHOLE}),
    (kinds.Add, _VECTOR, {"coefficient": _NUMBER}),
    (kinds.Multiply, _value(
        "a number, or positive:a,negative:b",
        rf"(?:positive:)?(?P<positive>{_FLOAT})(?:,negative:(?P<negative>{_FLOAT}))?"), {}),
    (kinds.Project, _VECTOR, {"to": (
        "a number or mean", lambda text: text if text == kinds.MEAN else _parse_number(text))}),
    (kinds.Clamp, _value(
        "low:high, of which one may be left out",
        rf"(?=.*\d)(?P<low>{_FLOAT})?:(?P<high>{_FLOAT})?"), {}),
    (kinds.Shift, _value(
        "down.right in cells, such as 0.-2", r"(?P<down>-?\d{1,3})\.(?P<right>-?\d{1,3})", int),
        {}),
    (kinds.Interchange, None, {}),
    (Swap, _value("pairs of directions such as 10:12 or 10:12,5:None", "(?P<pairs>.+)",
                  _parse_pairs),
     {"directions": ("a folder", Path), "num_episodes": _WHOLE, "random_directions": _WHOLE,
      "direction_type": _choice("ica", "pca")}))}


def parse_patch(text: str) -> Patch:
    """Parse a patch in the command-line syntax.

    Raises:
        UserError: if a part does not parse; the message names it and the expected syntax.

    Example::

        >>> patch = parse_patch("multiply@embedder.block2:3-5=0.5")
        >>> with patched(policy, [patch]):
        ...     values = policy(recording.episode(0).frames[:8]).values
    """
    where = f"the patch '{text}'"
    match = _PATCH.match(text)
    if match is None:
        raise UserError(f"{where} has no @; a patch is {_USAGE}")
    if remainder := text[match.end():].strip(","):
        raise UserError(f"{where}: '{remainder}' is neither a channel nor an option with a value, "
                        "such as steps=0:20")
    *heads, options = match.groups()
    names = ("kind", "layer", "channels", "value")
    entries = {name: entry for name, entry in zip(names, heads) if entry is not None}
    for option in options.split(",")[1:]:
        name, _, setting = (part.strip() for part in option.partition("="))
        if name in entries:
            raise UserError(f"{where} has '{name}' twice")
        entries[name] = setting
    return _make_patch({name: entry.strip() for name, entry in entries.items()}, where)


def _make_patch(entries: Mapping[str, str], where: str) -> Patch:
    """Create a patch from a mapping with the keys of the YAML syntax.

    Args:
        entries: texts by key.
        where: description of the origin, for messages.
    """
    for name in ("kind", "layer"):
        if not entries.get(name):
            raise UserError(f"{where} names no {name}; a patch is {_USAGE}")
    kind, layer = entries["kind"], entries["layer"]
    if kind not in _TYPES:
        raise UserError(f"{where}: there is no kind '{kind}'{nearest(kind, _TYPES)}")
    cls, value, options = _TYPES[kind]
    if value and not entries.get("value"):
        raise UserError(f"{where} lacks its value: {kind} takes {value[0]}, as in "
                        f"{kind}@layer=value")
    if "value" in entries and not value:
        raise UserError(f"{where} has the value '{entries['value']}', but {kind} takes no value")
    forms = {"channels": _NUMBERS, **({"value": value} if value else {}), **_OPTIONS, **options}
    fields: dict[str, Any] = {}
    words = []
    for name, entry in entries.items():
        if name in forms:
            expected, parse = forms[name]
            try:
                parsed = parse(entry)
            except (ValueError, KeyError):
                raise UserError(f"{where}: '{entry}' as {name} is not {expected}") from None
            fields |= parsed if name == "value" else {"cells" if name == "cell" else name: parsed}
        elif name in _GAME_OPTIONS:
            words.append((name, entry))
        elif name not in ("kind", "layer"):
            raise UserError(f"{where}: {kind} has no option '{name}'"
                            f"{nearest(name, [*forms, *_GAME_OPTIONS])}")
    parts = [f"{kind}@{layer}" + "".join(mark + entries[name] for name, mark in (
        ("channels", ":"), ("value", "=")) if name in entries)]
    parts += [f"{name}={entry}" for name, entry in entries.items()
              if name not in ("kind", "layer", "channels", "value")]
    return cls(layer, **fields, words=tuple(words), text=",".join(parts))


def read_patch_file(path: Path) -> list[tuple[Patch, ...]]:
    """Read the lists of patches of a YAML file: one, or several if the file has sweeps.

    Raises:
        UserError: if the file is missing or damaged, or a part is invalid; the message names it.
    """
    text = read_bytes(path, "patch file")
    try:
        # All values stay text: 5.10 must not become a float, nor 1:20 a base-60 integer.
        content = yaml.load(text.decode(), Loader=yaml.BaseLoader)
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"the patch file {path} is not valid YAML: {reason}") from None
    check_nested(content, path)
    if not isinstance(content, list) or not content or not all(
            isinstance(entries, dict) for entries in content):
        raise UserError(f"the patch file {path} must hold a list of patches, each a mapping with "
                        "a kind and a layer")
    places = [f"{path}, patch {number}" for number in range(1, len(content) + 1)]
    sweeps = [_sweeps(entries, where) for entries, where in zip(content, places)]
    number = math.prod(len(texts) for texts_by_key in sweeps for texts in texts_by_key.values())
    if number > MAX_LISTS:
        raise UserError(f"the sweeps of {path} define {_in_words(number)} lists of patches, "
                        f"more than {MAX_LISTS}; divide the file into several")
    return list(itertools.product(*(
        [_make_patch(dict(zip(texts, choice)), where)
         for choice in itertools.product(*texts.values())]
        for texts, where in zip(sweeps, places))))


def _in_words(number: int) -> str:
    return str(number) if number < 10**12 else "more than 10^12"


def _sweeps(entries: dict, where: str) -> dict[str, list[str]]:
    """Return the values of each key of a patch: one, or several if they are a sweep.

    Args:
        entries: entries of a patch file by key; a sweep is a list of values.
        where: place of the mapping, for messages.
    """
    choices = {}
    for key, value in entries.items():
        is_set = key == "channels" and isinstance(value, list) and not any(
            isinstance(channels, list) for channels in value)
        values = [value] if is_set or not isinstance(value, list) else value
        lists = [text if key == "channels" and isinstance(text, list) else [text]
                 for text in values]
        if not lists or not all(isinstance(text, str) for texts in lists for text in texts):
            raise UserError(f"{where}: '{key}' must be one value, or a list of values, which is a "
                            "sweep")
        choices[key] = [",".join(texts) for texts in lists]
    return choices


def patch_list_name(patches: Sequence[Patch]) -> str:
    """Return the name of a list of patches in folder names, reports and figures.

    Names longer than MAX_NAME are truncated and end in a checksum, which keeps them unique.
    """
    name = ""
    for patch in patches:
        text = patch.text.replace("embedder.", "")
        for path in _paths_of(patch):
            text = text.replace(str(path), path.stem)
        name += "+" * bool(name) + re.sub(r"[^A-Za-z0-9.-]+", "_", text)
    if len(name) <= MAX_NAME:
        return name
    checksum = hashlib.sha256(str([patch.text for patch in patches]).encode()).hexdigest()[:8]
    return f"{name[:MAX_NAME - 9]}_{checksum}"


def files_of(patch: Patch) -> list[Path]:
    """Return the files that a patch names; none once the patch has been opened."""
    if isinstance(patch, Swap) and isinstance(patch.directions, Path):
        return list(matrix_files(patch.directions, patch.num_episodes).values())
    return _paths_of(patch)


def _paths_of(patch: Patch) -> list[Path]:
    return [value for value in vars(patch).values() if isinstance(value, Path)]


def open_patches(patches: Sequence[Patch], opening: Opening) -> list[Patch]:
    """Prepare patches for an agent: read the files that they name, apply their options, and attach
    the reference set to those that need it.

    Args:
        patches: patches as parsed from text.
        opening: agent, game and reference frames for which the patches are opened.

    Raises:
        UserError: if the agent has no such layer, channel or cell; a file is missing, damaged, or
            belongs to another agent, layer or shape; or an option does not apply here.
    """
    return [_open_patch(patch, opening) for patch in patches]


def _open_patch(patch: Patch, opening: Opening) -> Patch:
    opened = dataclasses.replace(patch, is_open=True)
    for layer in layers_named(opening.policy, patch.layer):
        opened.select(opening.policy, layer)
    if isinstance(opened, kinds.Add | kinds.Project) and isinstance(opened.vector, Path):
        vectors = vectors_for(opened.vector, patch.layer, opening.policy)
        opened = dataclasses.replace(opened, vector=vectors)
    if isinstance(opened, kinds.SetTo) and isinstance(opened.value, Path):
        opened = dataclasses.replace(opened, value=read_array(opened.value))
    if isinstance(opened, Swap):
        opened = opened.opened(opening.policy)
    for name, text in patch.words:
        opened = _GAME_OPTIONS[name](opened, text, opening)
    reference: dict[str, Any] = {"reference": opening.reference()} if opened.needs_reference else {}
    return dataclasses.replace(opened, **reference)


def vectors_for(path: Path, layer_name: str, policy: Policy) -> dict[str, np.ndarray]:
    """Read the steering vectors of a file for one layer, or for all layers if the name is ``all``.

    Returns:
        Vectors, float32, in the shape of their layer, by name of the layer.

    Raises:
        UserError: if the file is missing or damaged, or a vector belongs to another agent, layer or
            shape.
    """
    by_layer, agent, vectors = read_vectors(path), weights_sha256(policy), {}
    for layer in layers_named(policy, layer_name):
        # A vector of another layer is checked, too, because the error message names both layers.
        vector = by_layer.get(layer.name, next(iter(by_layer.values())))
        vector.check_for(agent, layer.name, layer.shape)
        vectors[layer.name] = vector.vector
    return vectors


def _open_source(patch: Patch, text: str, opening: Opening) -> Patch:
    """Apply the option ``source``: take the entries from the first frames of source levels."""
    from envs.procgen_env import MAX_LEVEL, LevelSlots  # the simulator runs without Procgen
    if not isinstance(patch, kinds.Interchange):
        raise UserError(f"source={text} is an option of interchange; {patch.kind} does not have "
                        "it")
    if opening.env is None:
        raise UserError(f"source={text} names levels of the game, which the simulator does not "
                        "have; leave the patch out")
    try:
        levels = _parse_numbers(text)
    except ValueError:
        raise UserError(f"source={text} is not {_NUMBERS[0]}") from None
    layer, *others = layers_named(opening.policy, patch.layer)
    if len(levels) > MAX_SOURCES:
        raise UserError(f"source={text} names {len(levels)} levels; name at most {MAX_SOURCES}")
    if others or max(levels) >= MAX_LEVEL:
        raise UserError(f"source={text} needs a single layer, not {patch.layer}" if others else
                        f"source={text}: levels are numbered 0 to {MAX_LEVEL - 1}")
    slots = LevelSlots(opening.env, len(levels), edit=opening.edit)
    for slot, level in enumerate(levels):
        slots.start(slot, level)
    frames = slots.frames.copy()
    slots.close()
    outputs = activations_of(opening.policy, frames, [layer.name])[layer.name]
    return dataclasses.replace(patch, pairs=lambda info: outputs[info.level % len(outputs)])


_GAME_OPTIONS: dict[str, OpenOption] = {"source": _open_source, **MAZE_WORDS}


def warn_of_unused(active: ActivePatches) -> None:
    """Log a warning for each patch that never acted on a frame and has a text form."""
    for patch in active.never_applied():
        if patch.text:
            logger.warning("the patch %s never acted on any frame", patch.text)
