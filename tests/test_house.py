"""Modules: imports between packages, modules that do not need Procgen, and length."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT

from tools.mutations import read_mutations

# Packages that each package may import in addition to itself, from the bottom to the top. Names of
# packages that do not exist have no effect.
BELOW = {"common": set(), "envs": {"common"}, "stats": {"common"}}
BELOW["agents"] = {"common", "envs", "stats"}
BELOW["interventions"] = {"agents", *BELOW["agents"]}
BELOW["generative"] = {"interventions", *BELOW["interventions"]}
for _room in ("analysis", "maze", "attribution"):
    BELOW[_room] = {"generative", *BELOW["generative"]}
BELOW["pipeline"] = set(BELOW)
BELOW["tools"] = set(BELOW)
BELOW["benchmarks"] = {*BELOW, None}  # None: scripts of the root, which they run
ROOMS = frozenset(BELOW)
TRAINING = {"agents.training", "agents.ppo"}  # in agents; only scripts and benchmarks use them


def modules() -> dict[str, Path]:
    """Return the file of every module except tests, by dotted name; scripts are named ``x``."""
    files = {path.stem: path for path in ROOT.glob("*.py") if not path.is_symlink()}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    del files["setup"]
    return files


def imported(path: Path, known) -> set[str]:
    """Return the modules among ``known`` that a file imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name for name in names if name in known}
    return found


MODULES = modules()


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: imported(path, MODULES) - {name} for name, path in MODULES.items()}


def room(module: str) -> str | None:
    """Return the package of a module; None for a script of the root."""
    first = module.partition(".")[0]
    return first if first in ROOMS else None


@pytest.mark.parametrize("name", sorted(ROOMS & set(map(room, MODULES))))
def test_a_room_imports_the_rooms_below_it_alone(name):
    wrong = {(module, other) for module in MODULES if room(module) == name
             for other in imports()[module] if room(other) not in {name, *BELOW[name]}}
    assert not wrong, sorted(wrong)


def test_scripts_import_no_other_script():
    scripts = {module for module, path in MODULES.items() if path.parent == ROOT
               or 'if __name__ == "__main__":' in path.read_text()}
    assert {"train", "maze.levels", "attribution.page"} <= scripts
    wrong = {(module, other) for module in MODULES if room(module) not in ("benchmarks", "tools")
             for other in imports()[module] & scripts}
    assert not wrong, sorted(wrong)


def test_no_module_has_more_than_500_lines():
    assert not [module for module, path in MODULES.items()
                if len(path.read_text().splitlines()) > 500]


def test_no_function_has_more_than_eight_parameters():
    """The published ``run``, which users' scripts call, is the only exception."""
    long = {(module, node.name) for module, path in MODULES.items()
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            if len(node.args.args + node.args.kwonlyargs)
            - (node.args.args[:1] != [] and node.args.args[0].arg in ("self", "cls")) > 8}
    assert long == {("attribution.published_run", "run")}


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checking count, too."""
    graphlib.TopologicalSorter(imports()).prepare()  # raises CycleError, which names the modules


def test_simulator_and_analyses_know_nothing_of_the_agents_training():
    wrong = {(module, other) for module in MODULES if room(module) in ("generative", "analysis")
             for other in imports()[module] & TRAINING}
    assert not wrong, sorted(wrong)
    assert set(MODULES) >= TRAINING


def test_tests_share_helpers_and_import_neither_tests_nor_benchmarks():
    tests = {path.stem: path for path in (ROOT / "tests").glob("*.py")}
    banned = {name for name in tests if name.startswith("test_")} | {
        module for module in MODULES if room(module) == "benchmarks"}
    wrong = {(name, other) for name, path in tests.items() for other in imported(path, banned)}
    assert not wrong, sorted(wrong)


def test_networks_videos_and_saliency_need_no_procgen():
    code = ("import sys, agents.networks, common.video, stats.effects, "
            "generative.simulator, generative.saliency.gradients\n"
            "names = {'procgen', 'gym', 'envs.procgen_env'} & set(sys.modules)\n"
            "sys.exit(', '.join(names) or None)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


def test_archives_are_written_by_one_function():
    """numpy's own writer prints a traceback on a full disk, see ``save_arrays``."""
    writers = {name for name, path in modules().items()
               if "np.savez" in path.read_text().replace("``np.savez", "")}
    assert writers == {"common.schemas"}


def test_every_mutation_fits_the_code():
    for mutation in read_mutations():
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
