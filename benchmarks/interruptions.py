"""Kill the pipeline at random moments and continue it: the numbers must be those of a run that was
left alone. ``python -m benchmarks.interruptions --kills 20``"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch
import yaml

from common.cli import Parser, count, seed
from common.errors import script_main
from pipeline.presets import ROOT

# What tells of time, and what is made of it: the simulator's file holds its wall time, too, and is
# compared without.
TIMES = {"wall_time", "frames_per_second", "waiting_for_data", "seconds", "versions",
         "model_sha256"}
START_SECONDS = 5  # until the stage that was killed goes on
NO_NUMBERS = ("logs", "pipeline", "report")
DATE = re.compile(r"\d{8}_\d{6}|\d\d-\d\d-\d{4}_\d\d-\d\d-\d\d")


def numbers(output: Path, moved_from: Path | None = None) -> dict[str, str]:
    """A checksum of everything in an output folder that tells neither of time nor of place.

    Args:
        moved_from: where the folder was when a part of it was written.
    """
    places = [str(each) for each in (output, moved_from) if each is not None]
    found = {}
    for path in sorted(output.rglob("*")):
        relative = path.relative_to(output)
        if (path.is_file() and relative.parts[0] not in NO_NUMBERS
                and not path.name.startswith(("events.", "plot."))):
            found[DATE.sub("DATE", str(relative))] = _checksum(path, places)
    return found


def _checksum(path: Path, places: list[str]) -> str:
    if path.suffix in (".pt", ".pth"):
        digest = hashlib.sha256()
        _add(digest, torch.load(path, weights_only=True, map_location="cpu"))
        return digest.hexdigest()
    content = path.read_bytes()
    if path.suffix == ".csv":
        table = pd.read_csv(path)
        content = table[[name for name in table if name not in TIMES]].to_csv().encode()
    elif path.suffix == ".json":
        content = json.dumps(_without_times(json.loads(content)), sort_keys=True).encode()
    elif path.suffix == ".yml":  # whose long lines are broken
        content = json.dumps(_without_times(yaml.safe_load(content)), sort_keys=True).encode()
    elif path.suffix not in (".md", ".html", ".js"):
        return hashlib.sha256(content).hexdigest()
    text = content.decode()
    for place in places:
        text = text.replace(place, "OUTPUT")
    return hashlib.sha256(DATE.sub("DATE", text).encode()).hexdigest()


def _without_times(value):
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in TIMES}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _add(digest, value) -> None:
    """Add nested values with their tensors to a checksum."""
    if isinstance(value, torch.Tensor):
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            if key not in TIMES:
                digest.update(str(key).encode())
                _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(digest, each)
    else:
        digest.update(repr(value).encode())


def parser() -> argparse.ArgumentParser:
    flags = Parser(__doc__)
    flags.add_argument("--preset", default="tiny", help="of run_pipeline.py")
    flags.add_argument("--output_dir", type=Path, required=True,
                       help="new folder for the two experiments")
    flags.add_argument("--kills", type=count, default=20, help="how often it is killed")
    flags.add_argument("--seed", type=seed, default=0, help="of the moments")
    return flags


def start(preset: str, output: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "run_pipeline.py"), "--preset", preset,
                             "--output_dir", str(output)], stdout=subprocess.DEVNULL)


@script_main
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    alone, killed = args.output_dir / "alone", args.output_dir / "killed"
    begin = time.monotonic()
    if start(args.preset, alone).wait():
        return 1
    whole = time.monotonic() - begin
    moments = random.Random(args.seed)
    print(f"left alone: {whole:.0f} s", flush=True)
    done = 0
    while done < args.kills:
        process = start(args.preset, killed)
        try:
            # What is done is skipped, so that short waits reach every part of the run.
            status = process.wait(moments.uniform(0, 2 * (whole / args.kills + START_SECONDS)))
            if status:
                return status
            print(f"it ended after {done} kills", flush=True)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
            records = {path.stem.removeprefix("stage_"): json.loads(path.read_text())["status"]
                       for path in (killed / "pipeline").glob("stage_*.json")}
            running = [name for name, state in records.items() if state != "done"]
            print(f"kill {done}: {len(records) - len(running)} stages done, in "
                  f"{', '.join(running) or 'none'}", flush=True)
    if start(args.preset, killed).wait():
        return 1
    expected, found = numbers(alone), numbers(killed)
    different = sorted(name for name in expected.keys() | found.keys()
                       if expected.get(name) != found.get(name))
    print(f"{len(expected)} files; {len(different)} differ" + "".join(
        f"\n  {name}" for name in different))
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
