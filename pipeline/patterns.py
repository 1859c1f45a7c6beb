"""Files and folders of an output folder that match glob patterns."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path


def matches(folder: Path, patterns: Collection[str]) -> list[Path]:
    """Return the sorted paths in a folder that match any of the glob patterns.

    Args:
        patterns: patterns relative to the folder; a pattern that begins with "!" excludes paths.
    """
    found = {path for pattern in patterns if not pattern.startswith("!")
             for path in folder.glob(pattern)}
    # Searched last, so that no file that a running stage writes meanwhile is missing here only.
    excluded = {path for pattern in patterns if pattern.startswith("!")
                for path in folder.glob(pattern[1:])}
    return sorted(found - excluded)


def find(folder: Path, patterns: Collection[str]) -> list[Path]:
    """Return the files that match patterns, see ``matches``, without hidden (unfinished) files."""
    return [path for path in matches(folder, patterns) if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def unmatched(folder: Path, patterns: Collection[str]) -> str | None:
    """Return the first pattern that no file matches, or None."""
    return next((pattern for pattern in patterns
                 if not pattern.startswith("!") and not find(folder, [pattern])), None)


def contents(folder: Path, patterns: Collection[str]) -> dict[Path, float]:
    """Return the modification times of all files and links that match patterns or lie below a path
    that does, unfinished ones included.

    Other stages may run: a file or folder that disappears in the meantime is left out.
    """
    found = {}
    for top in matches(folder, patterns):
        below = (() if top.is_symlink() else  # os.walk passes over folders that disappear
                 [Path(parent, name) for parent, folders, files in os.walk(top)
                  for name in (*folders, *files)])
        for path in (top, *below):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    found[path] = status.st_mtime
    return found


def remove(folder: Path, patterns: Collection[str]) -> None:
    """Delete all paths that match patterns, including unfinished work in matching folders."""
    for path in reversed(matches(folder, patterns)):  # contents of a folder before the folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
