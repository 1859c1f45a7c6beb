"""The code that a stage runs, as the pipeline records it."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from pipeline import code_closure
from pipeline.code_closure import code_of

PROJECT = {
    "script.py": '"""A script."""\nimport torch.nn\nfrom room import table\n\n\n'
                 'def main():\n    """Run it."""\n    from room.late import chair\n',
    "room/__init__.py": "from . import deep\n",
    "room/table.py": "import room.deep.lamp as lamp  # a comment\n\nLEGS = 4\n",
    "room/late.py": "from .deep.drawer import chair\n",
    "room/deep/__init__.py": "",
    "room/deep/lamp.py": "import scipy.ndimage\n",
    "room/deep/drawer.py": "chair = 1\n",
    "room/unused.py": "import sklearn\n"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(code_closure, "ROOT", tmp_path)
    return tmp_path


def code(script="script"):
    return code_of([script])[script]


def test_every_kind_of_import_is_followed(project):
    modules, versions = code()
    assert list(modules) == ["room", "room.deep", "room.deep.drawer", "room.deep.lamp",
                                   "room.late", "room.table", "script"]
    assert {"python", "torch", "scipy", "numpy"} <= set(versions)  # scipy requires numpy
    assert "scikit-learn" not in versions


@pytest.mark.parametrize(("name", "before", "after", "changed"), [
    ("script.py", "A script.", "Another description.", []),
    ("script.py", '    """Run it."""\n', "", []),
    ("room/table.py", "# a comment", "", []),
    ("room/table.py", "\n\n", "\n\n\n\n", []),
    ("room/unused.py", "sklearn", "torch", []),
    ("room/table.py", "LEGS = 4", "LEGS = 3", ["room.table"]),
    ("room/table.py", "LEGS = 4", "LEGS = 4\n'LEGS'", ["room.table"])])
def test_only_what_is_run_counts(project, name, before, after, changed):
    old, _ = code()
    text = (project / name).read_text()
    assert before in text
    (project / name).write_text(text.replace(before, after))
    new, _ = code()
    assert [each for each in new if new[each] != old[each]] == changed


@pytest.mark.slow
def test_all_that_python_imports_for_a_real_script_is_found():
    loaded = subprocess.run(
        [sys.executable, "-c", "import analysis.causal_stories, json, sys\n"
         "print(json.dumps([name for name, module in sys.modules.items()\n"
         f"    if (getattr(module, '__file__', None) or '').startswith({str(ROOT)!r} + '/')\n"
         "    and '/site-packages/' not in module.__file__]))"],
        cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(json.loads(loaded.stdout))
    assert len(loaded) > 40
    assert loaded <= set(code("analysis.causal_stories")[0])
