"""Checksums of the modules of the repository that a script imports, directly or indirectly.

Imports are found in syntax trees, without importing anything, and include those inside functions.
Comments, docstrings and formatting do not affect the checksums.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path

from common.errors import UserError
from common.files import versions
from pipeline.stage import ROOT

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTED_AS = {"scikit-learn": "sklearn", "procgen-mirror": "procgen"}


def code_of(scripts: Iterable[str]) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Return checksums of the code that each script runs, and versions of the packages it imports.

    Args:
        scripts: module names, such as "analysis.causal_stories"; symbolic links are resolved.

    Returns:
        A pair of mappings by script. The first maps the dotted name of each module of the
        repository that the script runs to the SHA-256 of the module's syntax tree. The second holds
        the versions of Python and of the packages that affect numerical results and that these
        modules import, directly or indirectly.

    Raises:
        UserError: if a file is not valid Python.
    """
    module = functools.cache(_module)  # each file is read once per call
    known, codes = versions(), {}
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
        codes[script] = dict(sorted(digests.items())), _needed(packages, known)
    return codes


def _module(name: str) -> tuple[str | None, set[str]]:
    """Return the checksum of a module, and the names that it imports.

    The checksum is None for names that are not modules of the repository, which are third-party
    packages or attributes of a module. Importing an attribute counts as importing its module.
    """
    parent, _, _ = name.rpartition(".")
    imported = {parent} - {""}  # the __init__ of the parent package runs first
    file = _file(name)
    if file is None:
        return None, imported
    target, root = file.resolve(), ROOT.resolve()
    if file.is_symlink() and target.is_relative_to(root):
        return None, {".".join(target.relative_to(root).with_suffix("").parts)}
    try:
        digest, imports = _read(file.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{file} is not valid Python: {error}") from None
    package = name if file.name == "__init__.py" else parent
    for source, names in imports:
        base = resolve_name(source, package)
        imported |= {base, *(f"{base}.{attribute}" for attribute in names)}
    return digest, imported


def _file(module: str) -> Path | None:
    """Return the file of a module; None if the module is not in the repository."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_name(f"{path.name}.py"), path / "__init__.py")
                 if file.is_file()), None)


@functools.cache
def _read(content: bytes) -> tuple[str, list[tuple[str, list[str]]]]:
    """Return the checksum of a module, and its imports: pairs of module and imported names.

    Imports for type checkers are left out.
    """
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    imports: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append(("." * node.level + (node.module or ""),
                            [alias.name for alias in node.names]))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports


def _needed(packages: set[str], known: dict[str, str]) -> dict[str, str]:
    """Select the versions of Python, the imported packages and their requirements.

    Args:
        packages: imported packages.
        known: versions of the packages that affect numerical results.
    """
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
