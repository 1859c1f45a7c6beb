"""Count the code of each package of the project.

    python -m tools.count_code

Columns: number of tracked Python files (without links), lines, statements, lines per statement, and
lines of docstrings. Tests count as a separate package and are excluded from the total.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pandas as pd

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


def count_packages(root: Path) -> pd.DataFrame:
    """Count modules, lines, statements and docstring lines of each package in a repository."""
    names = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, check=True,
                           capture_output=True, text=True).stdout.split("\0")
    paths = [Path(name) for name in filter(None, names)]
    rows = [(path.parts[0] if len(path.parts) > 1 else SCRIPTS, 1,
             *count((root / path).read_text()))
            for path in paths if (root / path).is_file() and not (root / path).is_symlink()]
    columns = ["package", "modules", "lines", "statements", "docstrings"]
    return pd.DataFrame(rows, columns=columns).groupby("package").sum()


def main() -> None:
    packages = count_packages(ROOT)
    table = packages.drop(TESTS, errors="ignore")
    table.loc["all but tests"] = table.sum()
    table = pd.concat([table, packages[packages.index == TESTS]])
    table.insert(3, "per statement", (table["lines"] / table["statements"].clip(lower=1)).round(2))
    print(table.rename_axis(None).to_string())


if __name__ == "__main__":
    main()
