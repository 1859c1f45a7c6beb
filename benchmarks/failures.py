"""Cost of knowing why episodes fail, of the checks of attributions, and of starts made to order.

    python -m benchmarks.failures                    all parts, about 20 minutes on two cores
    python -m benchmarks.failures causes             one part: causes, checks or starts
    python -m benchmarks.failures --num_frames 100   in small: checks of as many frames

``causes``: levels of the shipped agent, played with and without looking at causes, in turns; goal:
80 % of the speed. ``checks``: all checks of the value's attributions to two layers; goal: 1 000
frames in 10 minutes. ``starts``: a search for a start, at the sizes of the shipped simulator; goal:
5 seconds. Processor time is given beside wall time, which other work on the machine lengthens.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import record
from agents.agent_file import load_agent
from agents.episodes import PlayOptions, play_episodes
from attribution import attribute, checks, features
from attribution.checking.agent_checks import CHECKS
from attribution.failures.causes import attribute_failures
from benchmarks.measuring import Apart
from common.devices import resolve_compute
from envs.procgen_env import EnvConfig
from generative import optimise_start

AGENT = Path("pretrained/coinrun_hard/model.pth")
SIMULATOR = Path("pretrained/coinrun_hard_simulator/model.pt")
LAYERS = ("block2", "block3")
NUM_LEVELS, ROUNDS, AT_A_TIME = 256, 3, 64
NUM_FRAMES, FRAMES_AN_EPISODE = 1000, 60
NUM_STARTS = (1, 5)  # of one target: their difference is what a start costs
PARTS = ("causes", "checks", "starts")
SCRIPTS = {"record": record, "features": features, "attribution": attribute, "checks": checks,
           "optimise_start": optimise_start}


def run(module: str, arguments: list[str]) -> tuple[float, float]:
    """Seconds and processor seconds of a script."""
    start, cpu = time.perf_counter(), time.process_time()
    status = SCRIPTS[module].main(arguments)
    assert status == 0, f"{module} ended with {status}"
    return time.perf_counter() - start, time.process_time() - cpu


def apart(module: str, *arguments: str) -> tuple[float, float]:
    """The same in a process of its own."""
    work = Apart(functools.partial, run)
    try:
        return work(module, list(arguments))
    finally:
        work.close()


def measured(work: Callable[[], int]) -> tuple[int, float]:
    """Environment steps of some work, and its processor seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def measure_causes() -> None:
    compute = resolve_compute("cpu", 0, "auto")
    policy = load_agent(AGENT)
    config = EnvConfig("coinrun", "hard").unseen_levels()
    levels = list(enumerate(config.draw_levels(NUM_LEVELS, 0)))
    play = functools.partial(play_episodes, policy, compute, config, levels, 0, AT_A_TIME,
                             PlayOptions(keep_frames=False))
    rates: dict[str, list[float]] = {"evaluation": [], "with causes": []}
    for _ in range(ROUNDS):
        for name, work in (
                ("evaluation", lambda: sum(each.length for each in play())),
                ("with causes", lambda: sum(
                    outcome.length for _, outcome in attribute_failures(config, play)))):
            steps, seconds = measured(work)
            rates[name].append(steps / seconds)
    plain, looked_at = (max(each) for each in rates.values())
    print(f"{NUM_LEVELS} levels, steps in a second of processor time: {plain:.0f}, and with causes "
          f"{looked_at:.0f}, {100 * looked_at / plain:.0f} % (goal 80 %)", flush=True)


def measure_checks(data: Path, folder: Path, num_frames: int) -> None:
    agent = ("--agent_file", str(AGENT), "--data_dir", str(data), "--device", "cpu")
    of_features = ("--features_dir", str(folder / "features"))
    apart("features", *agent, "--layers", *LAYERS, "--num_observations", "512", "--output_dir",
          str(folder / "features"))
    apart("attribution", *agent, *of_features, "--num_trajectories", "4", "--num_steps",
          str(num_frames // 4), "--output_dir", str(folder / "attribution"))
    for check in CHECKS:
        seconds, cpu = apart("checks", *agent, *of_features, "--attribution_dir",
                             str(folder / "attribution"), "--checks", check, "--num_frames",
                             str(num_frames), "--output_dir", str(folder / f"checks_{check}"))
        print(f"{num_frames} frames, {check}: {seconds:.0f} s, {cpu:.0f} s of processor time",
              flush=True)
    seconds, cpu = apart("checks", *agent, *of_features, "--attribution_dir",
                         str(folder / "attribution"), "--num_frames", str(num_frames),
                         "--output_dir", str(folder / "checks"))
    print(f"{num_frames} frames, all checks: {seconds:.0f} s, {cpu:.0f} s of processor time "
          f"(goal {0.6 * num_frames:.0f} s)", flush=True)


def measure_starts(data: Path, folder: Path) -> None:
    found = []
    for number in NUM_STARTS:
        found.append(apart(
            "optimise_start", "--agent_file", str(AGENT), "--model_file", str(SIMULATOR),
            "--interpreting_params_name", "demo", "--data_dir", str(data), "--targets", "value",
            "--penalty", "1", "--num_recorded", "64", "--num_starts", str(number),
            "--no_real_game", "--no_videos", "--output_dir", str(folder / f"starts_{number}")))
    seconds, cpu = ((more - one) / (NUM_STARTS[1] - NUM_STARTS[0])
                    for one, more in zip(*found, strict=True))
    print(f"a start: {seconds:.1f} s, {cpu:.1f} s of processor time (goal 5 s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="all of them if not given")
    parser.add_argument("--num_frames", type=int, default=NUM_FRAMES)
    args = parser.parse_args()
    wanted = PARTS if args.part is None else (args.part,)
    if "causes" in wanted:
        measure_causes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if set(wanted) - {"causes"}:
            apart("record", "--model_file", str(AGENT), "--distribution_mode", "hard",
                  "--logdir", name, "--num_episodes",
                  str(args.num_frames // FRAMES_AN_EPISODE + 40), "--no_videos",
                  "--no_action_noise")
        if "checks" in wanted:
            measure_checks(folder / "data", folder, args.num_frames)
        if "starts" in wanted:
            measure_starts(folder / "data", folder)


if __name__ == "__main__":
    main()
