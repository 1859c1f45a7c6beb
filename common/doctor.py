"""Report of this machine and installation, for bug reports.

    python -m common.doctor

It runs even if packages are broken or missing, and names them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
GIB = 2**30


def chromium() -> str | None:
    """Return the path of the browser for tests of web pages, or None if none is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def packages(requirements: Path) -> str:
    """List the required packages with their installed versions, separated by commas.

    The required version is added if another or none is installed.

    Args:
        requirements: file of lines ``name==version``; lines with a marker for another Python
            version are ignored.
    """
    from packaging.requirements import Requirement

    lines = [line for line in requirements.read_text().splitlines() if line[:1] not in ("", "#")]
    entries = []
    for required in map(Requirement, lines):
        if required.marker is None or required.marker.evaluate():
            try:
                version = metadata.version(required.name)
                is_pinned = required.specifier.contains(version)
            except metadata.PackageNotFoundError:
                version, is_pinned = "missing", False
            entries.append(f"{required.name} {version}"
                           + ("" if is_pinned else f" (required: {required.specifier})"))
    return ", ".join(entries)


def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                          capture_output=True).stdout.strip() or "not a git checkout"


def _processor() -> str:
    match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return (f"{match[1] if match else platform.machine()}, {len(os.sched_getaffinity(0))} of "
            f"{os.cpu_count()} processors for this process, {memory:.1f} GiB of memory")


def _gpus() -> str:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda})"
                     for gpu in gpus) or "none that torch finds"


def _precision() -> str:
    import torch

    from common.devices import bfloat16_features, resolve_compute

    compute = resolve_compute()
    features = bfloat16_features(torch.cpu.get_capabilities())
    return (f"{compute.precision} on {compute.device.type} by default; bfloat16 features of the "
            f"processor: {', '.join(features) or 'none'}")


def _threads() -> str:
    import numba
    import torch

    return (f"torch {torch.get_num_threads()}, numba {numba.get_num_threads()}, "
            f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}")


def _procgen() -> str:
    from procgen import ProcgenGym3Env

    env = ProcgenGym3Env(num=1, env_name="coinrun")
    frames = env.observe()[1]["rgb"]
    env.close()
    return f"plays: a frame of {frames.shape[1]} x {frames.shape[2]} pixels"


def _disk() -> str:
    usage = shutil.disk_usage(".")
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in the current folder"


def _browser() -> str:
    program = chromium()
    if program is None:
        return "none, so tests of web pages are skipped; install it with apt-get install chromium"
    return subprocess.run([program, "--version"], text=True, capture_output=True,
                          timeout=60).stdout.strip()


FACTS: dict[str, Callable[[], str]] = {
    "commit": _commit,
    "Python": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
    "system": platform.platform,
    "processor": _processor,
    "GPUs": _gpus,
    "precision": _precision,
    "threads": _threads,
    "Procgen": _procgen,
    "disk": _disk,
    "Chromium": _browser,
    "packages": lambda: packages(ROOT / "requirements.txt"),
}


def main() -> None:
    """Print the report; entries that cannot be determined show the reason."""
    for name, find in FACTS.items():
        try:
            fact = find()
        except Exception as error:  # the report must also describe broken installations
            fact = f"unknown ({type(error).__name__}: {error})"
        # Messages of broken packages contain their paths.
        print(f"{name}: {fact.replace(str(Path.home()), '~')}")


if __name__ == "__main__":
    main()
