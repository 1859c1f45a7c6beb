"""Patches written down: on the command line, and as YAML.

A patch is text::

    kind @ layer [: channels] [= value] {, word = value}

    zero@embedder.block2.res1.resadd:55
    set@embedder.block2.res1.resadd:8,55,70-77=2.3,cell=5.10,others=-0.2
    add@embedder.block2.res1.resadd=vectors/cheese_0.npz,coefficient=-1,steps=0:20

The same in YAML is a list of mappings with the keys ``kind``, ``layer``, ``channels``, ``value``
and the words. There a list of values is a sweep, which makes an arm each; a plain list of
``channels`` is one set of channels, and a list of lists a sweep.

Words for what one game alone has are registered by the room that knows it, see ``register_word``.
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
from typing import TYPE_CHECKING, Any

import yaml

from agents.agent_file import weights_sha256
from agents.hooks import ActivePatches
from agents.layers import ALL, layers_named
from agents.networks import Policy
from agents.patch import Patch
from agents.reference_set import ReferenceSet
from common.errors import UserError, nearest
from common.files import MAX_REASON, check_nested, read_array, read_bytes
from interventions import patches as kinds
from interventions.vectors import read_vectors

if TYPE_CHECKING:
    from envs.procgen_env import EnvConfig, LevelEdit

logger = logging.getLogger(__name__)

MAX_ARMS = 1000
MAX_NAME = 80
_PLACE = ("kind", "layer", "channels", "value")
_NUMBERS = r"\d+(?:-\d+)?"
_MAX_NUMBERS = 100_000  # of a list


@dataclasses.dataclass(frozen=True)
class PatchArm:
    """A list of patches that are applied together.

    Attributes:
        patches: in order.
    """

    patches: tuple[Patch, ...]

    @property
    def name(self) -> str:
        """For folders, reports and figures."""
        return short_name(self.patches)


@dataclasses.dataclass(frozen=True)
class Opening:
    """Agent, game and reference pictures for which patches are opened.

    Attributes:
        policy: that they will act on.
        env: the game, or None in the simulator.
        reference: makes the reference set; called if a patch needs one.
        edit: of every level before it is played, if there is one.
    """

    policy: Policy
    env: EnvConfig | None
    reference: Callable[[], ReferenceSet]
    edit: LevelEdit | None = None


OpenWord = Callable[[Patch, str, Opening], Patch]
"""A patch, a word's value and what the patch is opened for, to the patch with what the word
says."""

_registered: dict[str, OpenWord] = {}


def register_word(name: str, open_word: OpenWord) -> None:
    """Let every kind of patch take a further word.

    Args:
        open_word: see there; it raises a ``UserError`` for a value, kind or game that the word is
            not for.
    """
    _registered[name] = open_word


@dataclasses.dataclass(frozen=True)
class _Word:
    """A word of a kind: the field of the patch, and the way there and back."""

    field: str
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("a number")
    return value


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError("a whole number from 0")
    return int(text)


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Of ``8,55,70-77``; ``/`` in place of the comma."""
    numbers: list[int] = []
    for part in re.split("[,/]", text):
        if not re.fullmatch(_NUMBERS, part.strip()):
            raise ValueError("whole numbers and ranges such as 8,55,70-77 (a word has / for ,)")
        first, _, last = part.strip().partition("-")
        if int(last or first) - int(first) + len(numbers) >= _MAX_NUMBERS:
            raise ValueError(f"at most {_MAX_NUMBERS} numbers")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError("ranges from a smaller to a larger number")
    return tuple(numbers)


def _cells(text: str) -> tuple[tuple[int, int], ...]:
    parts = [re.fullmatch(r"(\d{1,3})\.(\d{1,3})", part) for part in text.split("/")]
    if not all(parts):
        raise ValueError("row.column from the top left, such as 5.10, or several, 5.10/5.11")
    return tuple((int(part[1]), int(part[2])) for part in parts)


def _steps(text: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"(\d{1,9})?:(\d{1,9})?", text)
    if not found or (found[2] and int(found[1] or 0) >= int(found[2])):
        raise ValueError("from:to, such as 0:20, the first step and the one it ends before")
    return int(found[1] or 0), int(found[2]) if found[2] else None


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text
    return read


def _yes_or_no(text: str) -> bool:
    return _one_of("yes", "no")(text) == "yes"


def _shown(value: float) -> str:
    """A number with all digits that it needs."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _ranges(numbers: Sequence[int]) -> str:
    """The numbers with ``-`` for three or more that follow each other."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in run]
        parts += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return "/".join(parts)


_WORDS = {
    "cell": _Word("cells", _cells, lambda cells: "/".join(f"{i}.{j}" for i, j in cells)),
    "steps": _Word("steps", _steps, lambda steps: f"{steps[0]}:"
                   + ("" if steps[1] is None else str(steps[1]))),
    "levels": _Word("levels", _whole_numbers, _ranges)}
_SEED = _Word("seed", _whole, str)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of patch as text.

    Attributes:
        patch: its class.
        takes: the value that it needs, in words; None for none.
        read: the value to fields of the class.
        write: a patch to the value.
        words: of its own.
    """

    patch: type[Patch]
    takes: str | None = None
    read: Callable[[str], dict] = lambda text: {}
    write: Callable[[Any], str] = lambda patch: ""
    words: Mapping[str, _Word] = dataclasses.field(default_factory=dict)


def _read_set(text: str) -> dict:
    return {"value": Path(text) if text.endswith(".npy") else _number(text)}


def _read_multiply(text: str) -> dict:
    both = re.fullmatch(r"positive:([^,]+),negative:([^,]+)", text)
    if both:
        return {"positive": _number(both[1]), "negative": _number(both[2])}
    return {"positive": _number(text)}


def _write_multiply(patch: kinds.Multiply) -> str:
    if patch.negative is None:
        return _shown(patch.positive)
    return f"positive:{_shown(patch.positive)},negative:{_shown(patch.negative)}"


def _read_vector(text: str) -> dict:
    if not text.endswith(".npz"):
        raise ValueError("an .npz file of a steering vector")
    return {"vector": Path(text)}


def _read_clamp(text: str) -> dict:
    low, colon, high = text.partition(":")
    if not colon or not (low or high):
        raise ValueError("low:high, of which one may be left out")
    return {"low": _number(low) if low else None, "high": _number(high) if high else None}


def _read_shift(text: str) -> dict:
    found = re.fullmatch(r"(-?\d{1,3})\.(-?\d{1,3})", text)
    if not found:
        raise ValueError("down.right in cells, such as 0.-2")
    return {"down": int(found[1]), "right": int(found[2])}


def _bound(value: float | None) -> str:
    return "" if value is None else _shown(value)


_VECTOR = "the .npz file of a steering vector"
KINDS = {kind.patch.kind: kind for kind in (
    _Kind(kinds.Zero),
    _Kind(kinds.SetTo, "a number, or an .npy file of numbers that fit the layer", _read_set,
          lambda patch: str(patch.value) if isinstance(patch.value, Path) else _shown(patch.value),
          {"others": _Word("others", _number, _shown),
           "override": _Word("override", _yes_or_no, lambda value: "yes" if value else "no")}),
    _Kind(kinds.Mean, words={"over": _Word("over", _one_of("cells", "channels"), str)}),
    _Kind(kinds.Resample, words={"draw": _Word("draw", _one_of("joint", "channel"), str),
                                 "seed": _SEED}),
    _Kind(kinds.Noise, "sigma, a number, or with sd behind it of standard deviations of the "
          "channel (0.5sd)",
          lambda text: {"sigma": _number(text.removesuffix("sd")),
                        "reference_sd": text.endswith("sd")},
          lambda patch: _shown(patch.sigma) + ("sd" if patch.reference_sd else ""),
          {"draw": _Word("draw", _one_of("once", "picture"), str), "seed": _SEED}),
    _Kind(kinds.Add, _VECTOR, _read_vector, lambda patch: str(patch.vector),
          {"coefficient": _Word("coefficient", _number, _shown)}),
    _Kind(kinds.Multiply, "a number, or positive:a,negative:b", _read_multiply, _write_multiply),
    _Kind(kinds.Project, _VECTOR, _read_vector, lambda patch: str(patch.vector),
          {"to": _Word("to", lambda text: text if text == kinds.MEAN else _number(text),
                       lambda to: to if to == kinds.MEAN else _shown(to))}),
    _Kind(kinds.Clamp, "low:high, of which one may be left out", _read_clamp,
          lambda patch: f"{_bound(patch.low)}:{_bound(patch.high)}"),
    _Kind(kinds.Shift, "down.right in cells, such as 0.-2", _read_shift,
          lambda patch: f"{patch.down}.{patch.right}"),
    _Kind(kinds.Interchange))}


def parse_patch(text: str) -> Patch:
    """The patch that a text means.

    Raises:
        UserError: pointing at the part that does not parse, or saying what the kind takes.
    """
    where = f"the patch '{text}'"
    kind, at, rest = text.partition("@")
    if not at:
        raise UserError(f"{where} has no @; a patch is kind@layer[:channels][=value]"
                        "{,word=value}, such as zero@embedder.block2.res1.resadd:55")
    head, *parts = rest.split(",")
    place, has_value, value = head.partition("=")
    layer, has_channels, channels = place.partition(":")
    entries = {"kind": kind.strip(), "layer": layer.strip()}
    words: dict[str, str] = {}
    for part in parts:
        word, equals, of_word = part.partition("=")
        if has_channels and not has_value and re.fullmatch(_NUMBERS, word.strip()):
            channels, has_value, value = f"{channels},{word}", equals, of_word
        elif equals:
            if word.strip() in words:
                raise UserError(f"{where} has the word '{word.strip()}' twice")
            words[word.strip()] = of_word.strip()
        elif has_value and not words:
            value += f",{part}"
        else:
            raise UserError(f"{where}: '{part}' is neither a channel nor a word with a value, such "
                            "as steps=0:20")
    if has_channels:
        entries["channels"] = channels.strip()
    if has_value:
        entries["value"] = value.strip()
    if clash := set(words) & set(_PLACE):
        raise UserError(f"{where} has no word '{clash.pop()}'; its place is in "
                        "kind@layer:channels=value")
    return _patch_of({**entries, **words}, where)


def to_text(patch: Patch) -> str:
    """The text of a patch, as ``parse_patch`` takes it."""
    entries = to_entries(patch)
    text = f"{entries.pop('kind')}@{entries.pop('layer')}"
    if "channels" in entries:
        text += f":{entries.pop('channels')}"
    if "value" in entries:
        text += f"={entries.pop('value')}"
    return ",".join([text, *(f"{word}={value}" for word, value in entries.items())])


def to_entries(patch: Patch) -> dict[str, str]:
    """A patch as a mapping of YAML.

    Raises:
        UserError: if it is one that only Python can make.
    """
    patch = patch.written or patch
    kind = KINDS.get(patch.kind)
    value = getattr(patch, "vector", getattr(patch, "value", 0.0))
    if kind is None or patch.conditions or not isinstance(value, float | int | Path):
        raise UserError(f"a patch of {patch.layer} of the kind {patch.kind} that was made in "
                        "Python cannot be written down")
    entries = {"kind": patch.kind, "layer": patch.layer}
    if patch.channels is not None:
        entries["channels"] = _ranges(patch.channels).replace("/", ",")
    if kind.takes:
        entries["value"] = kind.write(patch)
    defaults = {field.name: field.default for field in dataclasses.fields(patch)}
    for name, word in {"cell": _WORDS["cell"], **kind.words, **_WORDS}.items():
        if (value := getattr(patch, word.field)) != defaults[word.field]:
            entries[name] = word.write(value)
    return {**entries, **dict(patch.words)}


def _patch_of(entries: Mapping[str, str], where: str) -> Patch:
    """The patch of a mapping of texts."""
    for name in ("kind", "layer"):
        if not entries.get(name):
            raise UserError(f"{where} names no {name}; a patch is kind@layer, such as "
                            "zero@embedder.block2.res1.resadd:55")
    kind = KINDS.get(entries["kind"])
    if kind is None:
        raise UserError(f"{where}: there is no kind '{entries['kind']}'"
                        f"{nearest(entries['kind'], KINDS)}")
    name = kind.patch.kind
    takes = f"{name} takes " + (f"{kind.takes}, as in {name}@layer=value" if kind.takes
                                else "no value")
    if kind.takes and not entries.get("value"):
        raise UserError(f"{where} lacks its value: {takes}")
    if "value" in entries and not kind.takes:
        raise UserError(f"{where} has the value '{entries['value']}', but {takes}")

    def read(part: str, reader: Callable[[str], Any]) -> Any:
        try:
            return reader(entries[part])
        except ValueError as error:
            raise UserError(f"{where}: '{entries[part]}' as {part} is not {error}") from None

    fields, words = {}, {**_WORDS, **kind.words}
    if "channels" in entries:
        fields["channels"] = read("channels", _whole_numbers)
    if kind.takes:
        fields |= read("value", kind.read)
    others = []
    for word, value in entries.items():
        if word in words:
            fields[words[word].field] = read(word, words[word].read)
        elif word in _registered:
            others.append((word, value))
        elif word not in _PLACE:
            raise UserError(f"{where}: {name} has no word '{word}'"
                            f"{nearest(word, [*words, *_registered])}")
    return kind.patch(entries["layer"], **fields, words=tuple(others))


def read_patch_file(path: Path) -> list[PatchArm]:
    """The arms of a YAML file: one, or several where it has sweeps.

    Raises:
        UserError: if the file is missing or damaged; or naming the part that is wrong.
    """
    try:
        # Everything stays text, so that 5.10 is no number and 1:20 no time of day.
        content = yaml.load(read_bytes(path, "patch file").decode(), Loader=yaml.BaseLoader)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise UserError(f"the patch file {path} is not valid YAML: {reason}") from None
    check_nested(content, path)
    if not isinstance(content, list) or not content or not all(
            isinstance(each, dict) for each in content):
        raise UserError(f"the patch file {path} must hold a list of patches, each a mapping with "
                        "a kind and a layer")
    options = [_variants(entries, f"{path}, patch {number}")
               for number, entries in enumerate(content, 1)]
    if math.prod(map(len, options)) > MAX_ARMS:
        raise UserError(f"the sweeps of {path} make {math.prod(map(len, options))} arms, more "
                        f"than {MAX_ARMS}; divide it into several files")
    return [PatchArm(patches) for patches in itertools.product(*options)]


def _variants(entries: dict, where: str) -> list[Patch]:
    """The patches of a mapping, several if it has sweeps."""
    choices = []
    for key, value in entries.items():
        is_set = key == "channels" and isinstance(value, list) and not any(
            isinstance(each, list) for each in value)
        values = [value] if is_set or not isinstance(value, list) else value
        texts = [",".join(each) if key == "channels" and isinstance(each, list) else each
                 for each in values]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: '{key}' must be one value, or a list of values, which is a "
                            "sweep")
        choices.append([(key, text) for text in texts])
    return [_patch_of(dict(choice), where) for choice in itertools.product(*choices)]


def to_yaml(patches: Sequence[Patch]) -> str:
    """The text of a YAML file with these patches, as ``read_patch_file`` takes it."""
    return yaml.safe_dump([to_entries(patch) for patch in patches], sort_keys=False)


def short_name(patches: Sequence[Patch]) -> str:
    """A name of a list of patches that may be that of a file; longer ones are cut, and told apart
    by a checksum."""
    texts = []
    for patch in patches:
        text = to_text(patch).replace("embedder.", "")
        for path in files_of(patch):
            text = text.replace(str(path), path.stem)
        texts.append(text)
    name = "+".join(re.sub(r"[^A-Za-z0-9.-]+", "_", text) for text in texts)
    if len(name) <= MAX_NAME:
        return name
    checksum = hashlib.sha256(str([*map(to_text, patches)]).encode()).hexdigest()[:8]
    return f"{name[:MAX_NAME - 9]}_{checksum}"


def files_of(patch: Patch) -> list[Path]:
    """The files that a patch names."""
    patch = patch.written or patch
    values = getattr(patch, "vector", None), getattr(patch, "value", None)
    return [value for value in values if isinstance(value, Path)]


def open_patches(patches: Sequence[Patch], opening: Opening) -> list[Patch]:
    """Read what patches name and find what their words mean, for one agent.

    Raises:
        UserError: if a layer, channel or cell is none of the agent's, a file is missing or damaged
            or of another agent, layer or shape, or a word means nothing here.
    """
    return [_opened(patch, opening) for patch in patches]


def _opened(patch: Patch, opening: Opening) -> Patch:
    policy = opening.policy
    opened = dataclasses.replace(patch, written=patch.written or patch)
    for layer in layers_named(policy, patch.layer):
        opened.select(policy, layer)
    if isinstance(patch, kinds.Add | kinds.Project) and isinstance(patch.vector, Path):
        opened = dataclasses.replace(opened, vector=_vector(patch, policy))
    if isinstance(patch, kinds.SetTo) and isinstance(patch.value, Path):
        opened = dataclasses.replace(opened, value=read_array(patch.value))
    for word, value in patch.words:
        opened = _registered[word](opened, value, opening)
    if opened.needs_reference:
        opened = dataclasses.replace(opened, reference=opening.reference())
    return opened


def warn_of_unused(scope: ActivePatches) -> None:
    """Say which of the patches that were written down was never in force."""
    for patch in scope.never_applied():
        if patch.kind in KINDS:
            logger.warning("the patch %s was never in force", to_text(patch))


def _vector(patch: kinds.Add | kinds.Project, policy: Policy) -> Any:
    """The numbers of a vector's file, by layer."""
    found, agent = read_vectors(patch.vector), weights_sha256(policy)
    vectors = {}
    for layer in layers_named(policy, patch.layer):
        # A file of one layer is compared with the layer that is asked for, which names both.
        vector = found.get(layer.name, next(iter(found.values())))
        vector.check_for(agent, layer.name, layer.shape)
        vectors[layer.name] = vector.vector
    return vectors if patch.layer == ALL else next(iter(vectors.values()))
