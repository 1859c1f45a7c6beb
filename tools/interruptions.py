"""Kill the pipeline at random times and resume it; the results must equal those of an uninterrupted
run.

    python -m tools.interruptions --output_dir FOLDER --kills 20
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.cli import Parser, count, seed
from common.errors import script_main
from pipeline.presets import ROOT
from tools.compare_outputs import differences, digests

START_SECONDS = 5  # time until a killed stage is resumed


def parser() -> argparse.ArgumentParser:
    flags = Parser(__doc__)
    flags.add_argument("--preset", default="tiny", help="preset for run_pipeline.py")
    flags.add_argument("--output_dir", type=Path, required=True,
                       help="new folder for the interrupted and the uninterrupted experiment")
    flags.add_argument("--kills", type=count, default=20, help="number of kills")
    flags.add_argument("--seed", type=seed, default=0, help="seed of the random times")
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
            # Finished stages are skipped, so even short times reach all parts of the run.
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
    lines = differences(killed, alone)
    print("\n  ".join([f"{len(digests(alone))} files; {len(lines)} differ", *lines]))
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
