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
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
GIB = 2**30


def chromium() -> str | None:
    """Return the path of the browser that tests of the pages use, or None if none is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def packages(requirements: Path) -> tuple[dict[str, str], list[str]]:
    """Compare the installed packages with a requirements file.

    Args:
        requirements: file of lines ``name==version``; lines with a marker for another Python
            version are ignored.

    Returns:
        Installed version by package ("" if missing), and a description of each package whose
        version differs from the required one.
    """
    from packaging.requirements import Requirement

    versions, others = {}, []
    for line in requirements.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate():
            try:
                versions[asked.name] = metadata.version(asked.name)
            except metadata.PackageNotFoundError:
                versions[asked.name] = ""
            if not asked.specifier.contains(versions[asked.name] or "0"):
                others.append(f"{asked.name} {versions[asked.name] or 'missing'}, not "
                              f"{str(asked.specifier).removeprefix('==')}")
    return versions, others


def state_of_venv(root: Path) -> str:
    """Describe whether a folder's ``.venv`` exists and is newer than its requirements."""
    made = root / ".venv" / "installed"
    if not made.exists():
        return "there is none; make builds it"
    newer = [name for name in ("requirements.txt", "setup.py")
             if (root / name).stat().st_mtime > made.stat().st_mtime]
    if newer:
        return f"older than {' and '.join(newer)}; make builds it again"
    inside = Path(sys.prefix).resolve() == (root / ".venv").resolve()
    return "up to date" + ("" if inside else ", but this is another Python")


def _commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                               capture_output=True)
    return described.stdout.strip() or "not a git checkout"


def _packages() -> str:
    versions, _ = packages(ROOT / "requirements.txt")
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def _unlike_requirements() -> str:
    _, others = packages(ROOT / "requirements.txt")
    return "; ".join(others) or "none"


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return (f"{found[1] if found else platform.machine()}, {len(os.sched_getaffinity(0))} of "
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
    if compute.device.type == "cuda":
        why = f"the GPU has {'' if compute.bfloat16 else 'no '}bfloat16 in hardware"
    else:
        why = f"the processor has {' and '.join(features) or 'neither amx_bf16 nor avx512_bf16'}"
    return f"{compute.precision} on {compute.device.type} where none is chosen: {why}"


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
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free where this is run"


def _browser() -> str:
    program = chromium()
    if program is None:
        return "none: the tests of the pages are skipped; apt-get install chromium"
    version = subprocess.run([program, "--version"], text=True, capture_output=True, timeout=60)
    return version.stdout.strip() or f"{Path(program).name} does not say its version"


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
    ".venv": lambda: state_of_venv(ROOT),
    "packages": _packages,
    "not as in requirements.txt": _unlike_requirements,
}


def facts() -> dict[str, str]:
    """Return all facts by name; if a fact cannot be determined, its value is the reason."""
    found = {}
    for name, find in FACTS.items():
        try:
            found[name] = find()
        except Exception as error:  # the report must also describe broken installations
            found[name] = f"cannot be found out ({type(error).__name__}: {error})"
    return found


def main() -> int:
    for name, fact in facts().items():
        # Messages of broken packages contain their paths.
        print(f"{name}: {fact.replace(str(Path.home()), '~')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
