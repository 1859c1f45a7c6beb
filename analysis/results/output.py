"""Settings and output folders of the scripts of the analyses."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from analysis.parameters.config import MapConfig
from common.array_folders import ResultFolder, ResultWriter
from common.description import read_description
from common.errors import UserError
from common.files import atomic_folder, remove_folder, save_json, unnamed_file, versions
from common.progress import with_progress
from generative.sample_files import SampleFolder

SETTINGS_NAME = "settings.json"
Job = tuple[str, Callable[[Path], None]]
"""The name of a figure's file, and what draws it there."""


def check_results(folder: ResultFolder, what: str, overwrite: bool) -> None:
    """See that no results are in the way.

    Args:
        what: the results are for a number of: "episodes" or "samples".

    Raises:
        UserError: if there are some and they are not to be replaced.
    """
    if folder.settings_file.exists() and not overwrite:
        raise UserError(f"{folder.path} holds the results for {folder.number} {what} already; "
                        "choose another --precomp_dir, or give --overwrite")


def description_of(config: MapConfig, seed: int, tsne_seed: int, samples: SampleFolder,
                   numbers: Sequence[int]) -> dict:
    """Description of the results of an analysis of simulated samples."""
    return {"parameters": dataclasses.asdict(config), "seed": seed, "tsne_seed": tsne_seed,
            "samples": str(samples.path), "samples_made_by": samples.description(),
            "sample_numbers": list(numbers)}


def reporting_writer(folder: ResultFolder, description: dict) -> ResultWriter:
    """A writer that says how long each step took."""
    return ResultWriter(folder, {**description, "versions": versions()},
                        lambda step, seconds: print(f"{step}: {seconds:.2f} s", flush=True))


def finish(writer: ResultWriter) -> None:
    """Move the results into place and say where they are."""
    for path in writer.finish():
        print(f"wrote {path}")


@dataclasses.dataclass(frozen=True)
class Output:
    """A kind of folder that a script writes whole and replaces whole.

    Its settings name the kind and the files that were written. Those of an older output do
    not; it counts as of any kind that writes nothing but files of such names.

    Attributes:
        kind: what it holds and which script makes it, for the settings and for messages.
        patterns: of ``Path.glob``, of all files beside the settings.
    """

    kind: str
    patterns: tuple[str, ...] = ("*.png", "*.gif")

    def check(self, folder: Path, flag: str = "--output_dir") -> None:
        """See that this output can be written to a folder.

        Args:
            flag: that chooses it, for the message.

        Raises:
            UserError: if the folder holds anything but an earlier output of this kind.
        """
        way_out = f"choose another {flag}"
        if folder.is_symlink():
            raise UserError(f"{folder} is a link, which cannot be replaced; {way_out}")
        if not folder.exists() or not any(folder.iterdir()):
            return
        settings = read_description(folder / SETTINGS_NAME)
        if not settings:
            raise UserError(f"{folder} holds other data; {way_out}")
        kind = settings.get("made_by", self.kind)
        if kind != self.kind:
            raise UserError(f"{folder} holds the {kind}, not the {self.kind}; {way_out}")
        names = map(glob.escape, settings["files"]) if "files" in settings else self.patterns
        other = unnamed_file(folder, (SETTINGS_NAME, *names))
        if other:
            raise UserError(f"{other} is none of the {self.kind}, which would be replaced; move "
                            f"it elsewhere, or {way_out}")

    @contextlib.contextmanager
    def replaced(self, folder: Path, settings: dict) -> Iterator[Path]:
        """Yield a hidden folder that takes the place of an earlier output if the body succeeds.

        Args:
            settings: what the output depends on; stored with it.
        """
        with atomic_folder(folder) as temporary:
            yield temporary
            files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")
                           if path.is_file())
            save_json(temporary / SETTINGS_NAME, {"made_by": self.kind, **settings,
                                                  "versions": versions(), "files": files})
            if folder.exists():
                self.check(folder)
                remove_folder(folder)


def draw_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Draw figures into a folder."""
    for name, job in with_progress(jobs, len(jobs), "figure"):
        job(folder / name)


def draw(output: Output, path: Path, jobs: Sequence[Job], folder: ResultFolder,
         settings: dict) -> None:
    """Draw figures into a folder, in the place of an earlier drawing, and say how many.

    Args:
        output: what the figures are.
        path: where they belong.
        folder: what was precomputed.
        settings: what else the drawing depends on.
    """
    begin = time.perf_counter()
    with output.replaced(path, {
            "precomp_dir": str(folder.path), "number": folder.number, **settings,
            "precomputed": folder.settings()}) as temporary:
        draw_jobs(temporary, jobs)
    print(f"wrote {len(jobs)} figures to {path} in {time.perf_counter() - begin:.0f} s")
