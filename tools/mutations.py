"""Apply each deliberate bug of tests/mutations.yml; at least one test named there must fail.

    python -m tools.mutations [--only WORDS] [--jobs N]

Each bug is applied to a copy of the repository, so the working tree remains unchanged. The exit
status is 1 if no test fails for one of the bugs, for example because pytest cannot run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "mutations.yml"
_NEXT_TO_ROOT = "shared"  # folder of published files, which tests read if it exists
_TESTS_FAILED = 1  # exit status of pytest


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A deliberate bug.

    Attributes:
        name: description of the bug.
        file: path in the repository.
        old, new: text that must occur exactly once, and its replacement.
        tests: arguments for pytest; at least one of these tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Apply the bug to the repository at ``root``.

        Raises:
            ValueError: if the text to replace does not occur exactly once.
        """
        path = root / self.file
        content = path.read_text()
        if content.count(self.old) != 1:
            raise ValueError(f"{self.name}: the text occurs {content.count(self.old)} times in "
                             f"{self.file}, not once")
        path.write_text(content.replace(self.old, self.new))


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """Read the list of mutations from a YAML file."""
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])})
            for entry in yaml.safe_load(path.read_text())]


def copy_tree(target: Path) -> Path:
    """Copy the repository's tracked and new files into a folder; return the path of the copy."""
    copy = target / "repository"
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                           cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, path = ROOT / name, copy / name
        if source.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, path, follow_symlinks=False)
    if (ROOT.parent / _NEXT_TO_ROOT).exists():
        (target / _NEXT_TO_ROOT).symlink_to(ROOT.parent / _NEXT_TO_ROOT)
    return copy


def is_found(mutation: Mutation) -> tuple[bool, str]:
    """Run a mutation's tests with the mutation; return whether a test fails, and the end of the
    output."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tree(Path(folder))
        mutation.apply(copy)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
             *mutation.tests],
            cwd=copy, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"})
    return run.returncode == _TESTS_FAILED, run.stdout[-2000:] + run.stderr[-1000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="",
                        help="apply only mutations whose names contain this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="number of mutations tested in parallel")
    args = parser.parse_args()
    mutations = [mutation for mutation in read_mutations() if args.only in mutation.name]
    missed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, (found, output) in zip(mutations, pool.map(is_found, mutations)):
            print(f"{'found ' if found else 'MISSED'} {mutation.name}", flush=True)
            if not found:
                missed += 1
                print(output, flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} mutations make their tests fail")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
