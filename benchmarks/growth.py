"""Scaling of each stage's duration with the amount of work, and speedup by a second process.

Each script is run from the command line with one thread on three sizes; a straight line fitted to
the durations gives the cost of starting the script and the cost per unit of work. The largest size
is then divided among two processes: two parallel shards, or two ranks of torchrun for trainings. A
Markdown table is printed. Durations are wall times, so the machine must be otherwise idle.

    python -m benchmarks.growth                    everything, about 20 minutes on two cores
    python -m benchmarks.growth record             one stage, after preparing its inputs
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import AGENT, ROOT, SIMULATOR, parser_of, say

SET = ("--interpreting_params_name", "demo")
INSIDE = ("--agent_file", str(AGENT), *SET)
RECORDED, SIMULATED = 120, 32  # episodes and samples that later stages read


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage and its command line.

    Attributes:
        script: name of the script in the root folder, without suffix.
        unit: unit of work, in the plural.
        sizes: measured amounts of work, in these units.
        arguments: returns the arguments for a size and a new output folder.
        torchrun: whether two processes share a training by torchrun; otherwise each runs a shard.
        divides: whether the work can be divided among processes.
    """

    script: str
    unit: str
    sizes: tuple[int, int, int]
    arguments: Callable[[int, Path], Sequence[str]]
    torchrun: bool = False
    divides: bool = True


def stages(work: Path) -> dict[str, Stage]:
    """Return all stages by name.

    Args:
        work: folder with the recording and the samples that stages read.
    """
    data, samples = work / "recorded" / "data", work / "simulated"
    simulated = (*INSIDE, "--model_file", str(SIMULATOR), "--data_dir", str(data))
    return {
        "train": Stage("train", "environment steps", (8192, 16384, 24576), lambda n, folder: (
            "--env_name", "coinrun", "--distribution_mode", "easy", "--param_name", "demo",
            "--num_timesteps", str(n), "--val_interval", "100", "--seed", "0", "--num_threads",
            "1", "--logdir", str(folder)), torchrun=True),
        "evaluate": Stage("evaluate", "levels", (64, 128, 256), lambda n, folder: (
            "--model_file", str(AGENT), "--env_name", "coinrun", "--distribution_mode", "hard",
            "--num_episodes", str(n)), divides=False),
        "record": Stage("record", "episodes", (64, 128, 256), lambda n, folder: (
            "--model_file", str(AGENT), "--distribution_mode", "hard", "--num_episodes", str(n),
            "--no_videos", "--logdir", str(folder))),
        "train_gen_model": Stage("train_gen_model", "batches of 12 windows", (10, 20, 40),
                                 lambda n, folder: (
            *INSIDE, "--data_dir", str(data), "--max_batches", str(n), "--log_dir_base",
            str(folder)), torchrun=True),
        "record_gen_samples": Stage("record_gen_samples", "samples", (48, 96, 192),
                                    lambda n, folder: (
            *simulated, "--num_samples", str(n), "--no_videos", "--generated_data_dir",
            str(folder))),
        "saliency_experiments": Stage("saliency_experiments", "samples of two functions",
                                      (6, 12, 24), lambda n, folder: (
            *simulated, "--samples_dir", str(copied(samples, folder)), "--saliency_func_type",
            "value", "action", "--sample_ids", "0", "to", str(n), "--no_videos")),
    }


def copied(samples: Path, folder: Path) -> Path:
    """Copy the samples, to which saliency is added, unless another shard has already done so."""
    target = folder / "samples"
    if not target.exists():
        subprocess.run(["cp", "-r", str(samples), str(target)], check=True)
    return target


def command(stage: Stage, size: int, folder: Path, *more: str,
            processes: int = 1) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone",
                     f"--nproc_per_node={processes}"]
    return [*launcher, f"{stage.script}.py", *stage.arguments(size, folder), *more]


def seconds_of(*commands: Sequence[str]) -> float:
    """Run commands in parallel, and return the wall time in seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    running = [subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE) for arguments in commands]
    for process, arguments in zip(running, commands, strict=True):
        _, error = process.communicate()
        assert process.returncode == 0, f"{' '.join(arguments)}: {error.decode()[-2000:]}"
    return time.perf_counter() - begin


def measure(name: str, stage: Stage, work: Path) -> None:
    """Measure a stage and print its row of the table."""
    times = []
    for size in stage.sizes:
        folder = work / f"{name}_{size}"
        folder.mkdir()
        times.append(seconds_of(command(stage, size, folder)))
    slope, fixed = np.polyfit(stage.sizes, times, 1)
    gained = "cannot be divided"
    if stage.divides:
        folder, size = work / f"{name}_two", stage.sizes[-1]
        folder.mkdir()
        if stage.torchrun:
            together = seconds_of(command(stage, size, folder, processes=2))
        else:
            together = seconds_of(*(command(stage, size, folder, "--shard", f"{part}/2")
                                    for part in (1, 2)))
            together += seconds_of(command(stage, size, folder, "--join"))
        gained = f"{times[-1] / together:.2f}"
    measured = ", ".join(f"{size}: {seconds:.1f} s" for size, seconds in zip(stage.sizes, times))
    say(f"| `{stage.script}.py` | {measured} ({stage.unit}) | {fixed:.1f} s | "
          f"{1000 * slope:.3g} s | {gained} |")


def main() -> None:
    names = tuple(stages(Path()))
    part = parser_of(__doc__, names).parse_args().part
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        known = stages(work)
        (work / "samples").mkdir()
        seconds_of(command(known["record"], RECORDED, work / "recorded"))
        seconds_of(command(known["record_gen_samples"], SIMULATED, work / "samples"))
        (work / "samples" / "informed_init").rename(work / "simulated")
        say("| script | time | to start | 1 000 units | two processes, times as fast |\n"
            "| --- | --- | --- | --- | --- |")
        for stage in (part,) if part else names:
            measure(stage, known[stage], work)


if __name__ == "__main__":
    main()
