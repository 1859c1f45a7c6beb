"""The code that a script runs: the modules of the repository that it imports, by content.

Found by reading syntax trees, without importing anything. Imports inside functions count; comments,
docstrings and the layout of lines do not.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path

from common.errors import UserError
from common.files import versions
from pipeline.presets import ROOT

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTED_AS = {"scikit-learn": "sklearn", "procgen-mirror": "procgen"}


@dataclasses.dataclass(frozen=True)
class Code:
    """The code that a script runs.

    Attributes:
        modules: SHA-256 of the syntax tree of each module of the repository, by dotted name.
        versions: of Python and of the packages that decide numbers which these modules import,
            directly or through one another.
    """

    modules: dict[str, str]
    versions: dict[str, str]


def code_of(scripts: Iterable[str]) -> dict[str, Code]:
    """The code of scripts and of all that they import, those inside functions included.

    Args:
        scripts: their modules, such as "analysis.causal_stories"; a link counts as what it leads
            to.

    Raises:
        UserError: if a file is no valid Python.
    """
    module = functools.cache(_module)  # as the files are during this call
    known, found = versions(), {}
    for script in scripts:
        digests, packages, seen, waiting = {}, set(), set(), {script}
        while waiting:
            name = waiting.pop()
            seen.add(name)
            digest, imported = module(name)
            if digest is not None:
                digests[name] = digest
            elif not imported:
                packages.add(name)
            waiting |= imported - seen
        found[script] = Code(dict(sorted(digests.items())), _needed(packages, known))
    return found


def _module(name: str) -> tuple[str | None, set[str]]:
    """A module's checksum, and all that it imports.

    What is no module of the repository has no checksum: a package from elsewhere, or a name in a
    module, which imports that module.
    """
    parent, _, _ = name.rpartition(".")
    imported = {parent} - {""}  # whose __init__ is run before
    file = _file(name)
    if file is None:
        return None, imported
    target, root = file.resolve(), ROOT.resolve()
    if file.is_symlink() and target.is_relative_to(root):
        return None, {".".join(target.relative_to(root).with_suffix("").parts)}
    try:
        digest, imports = _read(file.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{file} is no valid Python: {error}") from None
    package = name if file.name == "__init__.py" else parent
    for source, names in imports:
        base = resolve_name(source, package)
        imported |= {base, *(f"{base}.{each}" for each in names)}
    return digest, imported


def _file(module: str) -> Path | None:
    """The file of a module of the repository."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_name(f"{path.name}.py"), path / "__init__.py")
                 if file.is_file()), None)


@functools.cache
def _read(content: bytes) -> tuple[str, list[tuple[str, list[str]]]]:
    """A module's checksum, and what it imports: the names from each module."""
    tree = ast.parse(content)
    imports: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(each.name, []) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append(("." * node.level + (node.module or ""),
                            [each.name for each in node.names]))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports


def _needed(packages: set[str], known: dict[str, str]) -> dict[str, str]:
    """Of known versions, those of the packages that are imported and of what these require."""
    waiting = [name for name in known if _IMPORTED_AS.get(name, name) in packages]
    needed = {"python"}
    while waiting:
        name = waiting.pop()
        if name in known and name not in needed:
            needed.add(name)
            waiting += _requirements(name)
    return {name: version for name, version in known.items() if name in needed}


@functools.cache
def _requirements(package: str) -> list[str]:
    """Return the names of the packages that a package requires."""
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in metadata.requires(package) or ()
            if "extra ==" not in requirement]
