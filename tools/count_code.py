"""Count the code of each package of the project.

    python -m tools.count_code

Columns: number of tracked Python files (without links), lines, statements, lines per statement, and
lines of docstrings. Tests count as a separate package and are excluded from the total.
"""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
SCRIPTS, TESTS = "(scripts)", "tests"


def count(source: str) -> tuple[int, int, int]:
    """Return the numbers of lines, statements and docstring lines of a module."""
    tree = ast.parse(source)
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docstrings = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented)
                  and ast.get_docstring(node, clean=False) is not None]
    statements = len([node for node in ast.walk(tree) if isinstance(node, ast.stmt)])
    documentation = sum((node.end_lineno or 0) - node.lineno + 1 for node in docstrings)
    return source.count("\n"), statements - len(docstrings), documentation


def count_packages(root: Path) -> dict[str, np.ndarray]:
    """Count modules, lines, statements and docstring lines (4,) of each package in a repository."""
    names = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, check=True,
                           capture_output=True, text=True).stdout.split("\0")
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, int))
    for path in map(Path, filter(None, names)):
        if not (root / path).is_symlink() and (root / path).is_file():
            package = path.parts[0] if len(path.parts) > 1 else SCRIPTS
            totals[package] += (1, *count((root / path).read_text()))
    return dict(totals)


def main() -> None:
    packages = count_packages(ROOT)
    rows = sorted((name, numbers) for name, numbers in packages.items() if name != TESTS)
    rows += [("all but tests", sum((numbers for _, numbers in rows), np.zeros(4, int)))]
    rows += [(TESTS, packages[TESTS])] if TESTS in packages else []
    print(f"{'package':<15}{'modules':>8}{'lines':>8}{'statements':>12}{'per statement':>15}"
          f"{'docstrings':>12}")
    for name, (modules, lines, statements, docstrings) in rows:
        print(f"{name:<15}{modules:>8}{lines:>8}{statements:>12}"
              f"{lines / max(statements, 1):>15.2f}{docstrings:>12}")


if __name__ == "__main__":
    main()
