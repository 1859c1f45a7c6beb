"""Results and figures of the scripts of the analyses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.parameters.config import MapConfig
from common.array_folders import ResultFolder, ResultWriter
from common.errors import UserError
from common.files import versions
from common.output_folder import Output
from common.progress import with_progress
from generative.sample_files import SampleFolder

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
