"""Scaling of each stage's duration with the amount of work, and speedup by a second process.

Each script is run from the command line, with one thread, for three amounts of work. A straight
line fitted to the durations gives the time to start the script and the time per unit of work. The
largest amount is then split between two processes if the work can be divided: training scripts run
on two ranks of torchrun, others as two parallel shards, which are then joined. The result is
printed as a Markdown table. Durations are wall times, so the machine must be otherwise idle.

    python -m benchmarks.growth                    everything, about 20 minutes on two cores
    python -m benchmarks.growth record             one stage, after preparing its inputs
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import AGENT, ROOT, SIMULATOR, parts_to_measure, say

RECORDED, SIMULATED = 120, 32  # episodes and samples that later stages read
_INPUTS = f"--agent_file {AGENT} --interpreting_params_name demo --data_dir {{work}}/recorded/data"
_SIMULATED = f"{_INPUTS} --model_file {SIMULATOR} --no_videos"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage and its command line.

    Attributes:
        unit: name of the unit of work, in the plural.
        sizes: measured amounts of work, in these units.
        arguments: arguments of the script, with the placeholders {size} for the amount, {folder}
            for a new output folder, and {work} for the folder with the inputs.
        division: how two processes share the work, "ranks" (of a training run) or "shards"; None
            if the work cannot be divided.
    """

    unit: str
    sizes: tuple[int, int, int]
    arguments: str
    division: str | None = "shards"


STAGES = {
    "train": Stage(
        "environment steps", (8192, 16384, 24576),
        "--env_name coinrun --distribution_mode easy --param_name demo --num_timesteps {size} "
        "--val_interval 100 --seed 0 --num_threads 1 --logdir {folder}", "ranks"),
    "evaluate": Stage(
        "levels", (64, 128, 256),
        f"--agent_file {AGENT} --env_name coinrun --distribution_mode hard --num_episodes {{size}}",
        None),
    "record": Stage(
        "episodes", (64, 128, 256),
        f"--agent_file {AGENT} --distribution_mode hard --num_episodes {{size}} --no_videos "
        "--logdir {folder}"),
    "train_gen_model": Stage(
        "batches of 12 windows", (10, 20, 40),
        f"{_INPUTS} --max_batches {{size}} --log_dir_base {{folder}}", "ranks"),
    "record_gen_samples": Stage(
        "samples", (48, 96, 192),
        f"{_SIMULATED} --num_samples {{size}} --generated_data_dir {{folder}}"),
    "saliency_experiments": Stage(
        "samples of two functions", (6, 12, 24),
        f"{_SIMULATED} --samples_dir {{folder}}/informed_init --saliency_func_type value action "
        "--sample_ids 0 to {size}"),
}


def command(script: str, size: int, folder: Path, *more: str, num_ranks: int = 1) -> list[str]:
    """Return the command line that runs a stage.

    Args:
        script: name of the script, a key of STAGES.
        size: amount of work.
        folder: new output folder, next to the inputs.
        more: further arguments.
        num_ranks: number of processes of a training run, started by torchrun if above 1.
    """
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    arguments = STAGES[script].arguments.format(size=size, folder=folder, work=folder.parent)
    return [*launcher, f"{script}.py", *arguments.split(), *more]


def seconds_of(*commands: list[str]) -> float:
    """Run commands in parallel, and return the wall time in seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    running = [subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
               for arguments in commands]
    assert not any([process.wait() for process in running]), commands
    return time.perf_counter() - begin


def measure(script: str, work: Path) -> None:
    """Measure a stage and print its row of the table.

    Args:
        script: name of the script, a key of STAGES.
        work: folder that contains the inputs, and in which output folders are created.
    """
    stage = STAGES[script]

    def new_folder(name: str) -> Path:
        folder = work / f"{script}_{name}"
        if script == "saliency_experiments":  # writes into the folder of samples
            shutil.copytree(work / "samples", folder)
        return folder

    times = [seconds_of(command(script, size, new_folder(str(size)))) for size in stage.sizes]
    slope, fixed = np.polyfit(stage.sizes, times, 1)
    speedup, size, folder = "cannot be divided", stage.sizes[-1], new_folder("two")
    if stage.division == "ranks":
        speedup = f"{times[-1] / seconds_of(command(script, size, folder, num_ranks=2)):.2f}"
    elif stage.division == "shards":
        together = seconds_of(*(command(script, size, folder, "--shard", f"{part}/2")
                                for part in (1, 2)))
        together += seconds_of(command(script, size, folder, "--join"))
        speedup = f"{times[-1] / together:.2f}"
    measured = ", ".join(f"{size}: {seconds:.1f} s" for size, seconds in zip(stage.sizes, times))
    say(f"| `{script}.py` | {measured} ({stage.unit}) | {fixed:.1f} s | "
        f"{1000 * slope:.3g} s | {speedup} |")


def main() -> None:
    scripts = parts_to_measure(__doc__, STAGES)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        seconds_of(command("record", RECORDED, work / "recorded"))
        seconds_of(command("record_gen_samples", SIMULATED, work / "samples"))
        say("| script | time | to start | 1 000 units | two processes, times as fast |\n"
            "| --- | --- | --- | --- | --- |")
        for script in scripts:
            measure(script, work)


if __name__ == "__main__":
    main()
