"""Results and figures of the scripts of the analyses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.parameters.config import MapConfig
from common.progress import with_progress
from common.results import ResultStore
from common.schemas import Entry, File, Schema
from common.step_results import StepResults
from generative.sample_files import SampleFolder

Job = tuple[str, Callable[[Path], None]]
"""The name of a figure's file, and what draws it there."""


def description_of(config: MapConfig, seed: int, tsne_seed: int, samples: SampleFolder,
                   numbers: Sequence[int]) -> dict:
    """Description of the results of an analysis of simulated samples."""
    return {"parameters": dataclasses.asdict(config), "seed": seed, "tsne_seed": tsne_seed,
            "samples": str(samples.path), "samples_made_by": samples.description(),
            "sample_numbers": list(numbers)}


def figure_schema(script: str) -> Schema:
    """Return the schema of a folder of figures that a script draws."""
    return Schema(f"figures of {Path(script).name}", script, replaced=True, results={
        "figures": Entry("{}.png", File()), "rotations": Entry("{}.gif", File())})


def draw_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Draw figures into a folder."""
    for name, job in with_progress(jobs, len(jobs), "figure"):
        job(folder / name)


def draw(schema: Schema, path: Path, jobs: Sequence[Job], results: StepResults,
         settings: dict) -> None:
    """Draw figures into a folder, in the place of an earlier drawing, and print how many.

    Args:
        schema: kind of the folder.
        path: the folder.
        results: what was precomputed.
        settings: what else the drawing depends on.
    """
    begin = time.perf_counter()
    with ResultStore(path, schema).replace({
            "precomp_dir": str(results.path), "number": results.number, **settings,
            "precomputed": results.settings()}) as temporary:
        draw_jobs(temporary, jobs)
    print(f"wrote {len(jobs)} figures to {path} in {time.perf_counter() - begin:.0f} s")
