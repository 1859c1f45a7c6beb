"""python -m common.doctor: its facts are those of the machine, and name no folder of the user's."""

import platform
import shutil
from importlib import metadata
from pathlib import Path

import torch
from conftest import ROOT

from common import doctor
from common.devices import resolve_compute


def test_facts_are_those_of_this_machine(capsys):
    doctor.main()
    printed = capsys.readouterr().out
    facts = dict(line.split(": ", 1) for line in printed.splitlines())
    assert list(facts) == list(doctor.FACTS)
    assert "unknown (" not in printed
    assert facts["Python"].startswith(platform.python_version())
    for name in ("torch", "numpy", "scikit-learn"):
        assert f"{name} {metadata.version(name)}" in facts["packages"]
    compute = resolve_compute()
    assert facts["precision"].startswith(f"{compute.precision} on {compute.device.type}")
    assert (facts["GPUs"] == "none that torch finds") == (not torch.cuda.is_available())
    free = shutil.disk_usage(".").free / 2**30
    assert abs(float(facts["disk"].split()[0]) - free) < 5
    assert str(ROOT) not in printed and str(Path.home()) not in printed


def test_packages_that_are_missing_or_of_another_version_are_named(tmp_path):
    requirements = tmp_path / "requirements.txt"
    version = torch.__version__.split("+")[0]
    requirements.write_text("# pins\nnumpy==0.1\n\nno-such-package==1.0\n"
                            f"torch=={version}\nprocgen==0.0; python_version < '3'\n")
    assert doctor.packages(requirements) == (
        f"numpy {metadata.version('numpy')} (required: ==0.1), no-such-package missing "
        f"(required: ==1.0), torch {metadata.version('torch')}")
