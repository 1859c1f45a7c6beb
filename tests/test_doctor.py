"""python -m common.doctor: its facts are those of the machine, and name no folder of the user's."""

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from conftest import ROOT

from common import doctor
from common.devices import resolve_compute


def test_facts_are_those_of_this_machine(tmp_path):
    result = subprocess.run([sys.executable, "-m", "common.doctor"], cwd=tmp_path, text=True,
                            capture_output=True, timeout=120,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    facts = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(facts) == list(doctor.FACTS)
    assert "cannot be found out" not in result.stdout
    assert facts["Python"].startswith(platform.python_version())
    versions = dict(each.split(" ") for each in facts["packages"].split(", "))
    for name in ("torch", "numpy", "scikit-learn"):
        assert versions[name] == metadata.version(name)
    assert any(name.startswith("procgen") for name in versions)
    compute = resolve_compute()
    assert facts["precision"].startswith(f"{compute.precision} on {compute.device.type}")
    if compute.device.type == "cpu":
        flags = Path("/proc/cpuinfo").read_text()
        assert all(name in flags for name in re.findall(r"has (\w+_bf16)", facts["precision"]))
        assert ("neither" in facts["precision"]) == (not compute.bfloat16)
    assert (facts["GPUs"] == "none that torch finds") == (not torch.cuda.is_available())
    assert facts["threads"].startswith("torch 1, ") and facts["threads"].endswith("THREADS 1")
    free = shutil.disk_usage(tmp_path).free / 2**30
    assert abs(float(facts["disk"].split()[0]) - free) < 1
    assert str(ROOT) not in result.stdout and str(Path.home()) not in result.stdout


def test_packages_that_are_missing_or_of_another_version_are_named(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# pins\nnumpy==0.1\n\nno-such-package==1.0\n"
                            f"torch=={torch.__version__.split('+')[0]}\n"
                            "procgen==0.0; python_version < '3'\n")
    versions, others = doctor.packages(requirements)
    assert versions == {"numpy": metadata.version("numpy"), "no-such-package": "",
                        "torch": metadata.version("torch")}
    assert others == [f"numpy {metadata.version('numpy')}, not 0.1",
                      "no-such-package missing, not 1.0"]


def test_venv_is_up_to_date_when_make_would_not_build_it(tmp_path):
    for age, name in enumerate(("requirements.txt", "setup.py")):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    assert doctor.state_of_venv(tmp_path) == "there is none; make builds it"
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").write_text("")
    assert doctor.state_of_venv(tmp_path) == "up to date, but this is another Python"
    os.utime(tmp_path / ".venv" / "installed", (1000, 1000))
    assert doctor.state_of_venv(tmp_path) == "older than setup.py; make builds it again"


def test_browser_is_the_one_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.chromium() is None
    assert doctor.FACTS["Chromium"]().startswith("none: the tests of the pages are skipped")
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho Chromium 99\n")
    program.chmod(0o755)
    assert doctor.FACTS["Chromium"]() == "Chromium 99"


def test_a_fact_that_cannot_be_found_out_says_why(monkeypatch, tmp_path, capsys):
    """Here git is missing, and the file of the requirements."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "ROOT", tmp_path / "project")
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "commit: cannot be found out (FileNotFoundError" in printed
    assert "packages: cannot be found out (FileNotFoundError" in printed
    assert "~/project/requirements.txt" in printed and str(tmp_path) not in printed
