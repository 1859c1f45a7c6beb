"""Presets of ``run_pipeline.py``: the settings of files of stages, see ``pipeline.stage_files``.

``hyperparams/pipeline.yml`` holds the presets. A preset names its file of stages, and settings that
differ from the defaults there. The user can write a file with a preset of his own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from common.config import read_yaml
from common.errors import UserError, nearest
from common.parameters import parameter_sets
from pipeline.stage import AGENT, HYPERPARAMS, ROOT, SIMULATOR

PRESETS_FILE, STAGES = HYPERPARAMS / "pipeline.yml", HYPERPARAMS / "stages"
SECTION = "section"  # preset of --preset section:NAME, for every NAME in interpreting_configs.yml
OWN_SUFFIXES = (".yml", ".yaml")  # of files with a preset of the user's own
_FILES = ("_file", "_files")  # ends of the names of settings that are files
_FILE_KEYS = ("settings", "let", "stages", "report")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A preset.

    Attributes:
        file: file of the stages.
        settings: values of all settings, by name.
    """

    file: Path
    settings: dict[str, Any]

    @property
    def agents(self) -> dict[str, str]:
        """Files of the agents in the setting ``agent_files``, by name. An agent is named after its
        file, or after its folder if the file is called ``model.pth``.

        Raises:
            UserError: if there are no agents, or two of the same name.
        """
        files = self.settings.get("agent_files", ())
        named = {path.parent.name if path.name == "model.pth" else path.stem: file
                 for file in files for path in [ROOT / file]}
        if len(named) < len(files) or ("agent_files" in self.settings and not files):
            raise UserError("agent_files must not be empty, and the agents must differ in their "
                            "file names, or in their folders if the files are called model.pth")
        return named

    @property
    def files(self) -> dict[str, str | None]:
        """Files of agents and the simulator by placeholder; None if a stage creates the file. The
        simulator is omitted if there is none."""
        settings = self.settings
        files: dict[str, str | None] = {
            f"{{agent {name}}}": file for name, file in self.agents.items()}
        if "agent_file" in settings:
            files[AGENT] = settings["agent_file"]
        if settings.get("model_file") or settings.get("simulator_training"):
            files[SIMULATOR] = settings["model_file"]
        if settings.get("maze_agent_file"):
            files["{maze agent}"] = settings["maze_agent_file"]
        return files

    @property
    def given_files(self) -> dict[str, Path | None]:
        """Paths of the files in ``files``.

        Raises:
            UserError: if there is no agent.
        """
        files = self.files
        if AGENT in files and files[AGENT] is None and not self.settings.get("agent_training"):
            raise UserError("this preset names no agent; give one with --agent_file")
        return {place: None if file is None else ROOT / file for place, file in files.items()}


def read_hyperparams() -> dict[Path, dict]:
    """Read the current contents of all parameter files, by path.

    Raises:
        UserError: if a file is damaged.
    """
    return {path: read_yaml(path) for path in sorted(HYPERPARAMS.rglob("*.yml"))}


def load_preset(name: str, agent_file: Path | None = None, model_file: Path | None = None,
                **changes: Any) -> Preset:
    """Load a preset, with another agent or simulator if files are given.

    Args:
        name: name of the preset; section:NAME for the parameter set NAME of
            ``interpreting_configs.yml``; or a YAML file with a preset, to which the paths of files
            in it are relative.
        agent_file: agent to analyse instead of the preset's; no agent is trained then. Without
            ``model_file``, a preset that can train a simulator does so, and other presets leave out
            the stages that need one.
        model_file: simulator to use instead of the preset's; no simulator is trained then.
        changes: values of settings that replace the preset's.

    Raises:
        UserError: if there is no such preset (the message suggests the nearest name), a key or a
            value is invalid, a file is missing, or ``model_file`` is given for a preset without a
            simulator.
    """
    if name.endswith(OWN_SUFFIXES):
        path, source, values = Path(name), name, read_yaml(Path(name))
        values = {key: _below(value, path.parent) if key.endswith(_FILES) else value
                  for key, value in values.items()}
    else:
        path, presets = PRESETS_FILE, read_yaml(PRESETS_FILE)
        known = {f"{SECTION}:{parameter_set}": SECTION for parameter_set in parameter_sets()}
        known |= {preset: preset for preset in presets if preset != SECTION}
        if name not in known:
            raise UserError(f"there is no preset '{name}'{nearest(name, known)}")
        source, values = f"{path.name}, '{known[name]}'", presets[known[name]]
        if known[name] == SECTION and isinstance(values, dict):
            values = {**values, "parameters": name.removeprefix(f"{SECTION}:")}
    if not isinstance(values, dict) or not isinstance(values.get("stages"), str):
        raise UserError(f"{source}: 'stages' must name a file of stages, such as "
                        f"{STAGES.name}/main.yml")
    file = stages_file(values["stages"], path.parent)
    defaults = read_stages_file(file).get("settings", {})
    settings = _override(defaults, {key: value for key, value in {**values, **changes}.items()
                                    if key != "stages"}, source)
    if model_file is not None and "model_file" not in settings:
        raise UserError(f"the preset '{name}' has no simulator; leave --model_file out")
    for given, flag in ((agent_file, "--agent_file"), (model_file, "--model_file")):
        if given is not None and not given.is_file():
            raise UserError(f"there is no file {given}; see {flag}")
    if agent_file is not None:
        training = settings.get("simulator_training") or defaults.get("simulator_training")
        other = {"agent_file": str(agent_file.absolute()), "agent_training": None,
                 "agent_files": [str(agent_file.absolute())], "model_file": None,
                 "simulator_training": training, "findings": None}
        settings |= {key: value for key, value in other.items() if key in settings}
    if model_file is not None:
        settings["model_file"] = str(model_file.absolute())
        if "simulator_training" in settings:
            settings["simulator_training"] = None
    return Preset(file, settings)


def _below(files: Any, folder: Path) -> Any:
    """Return a file, or the files in a list, as absolute paths, given paths relative to a folder.
    """
    if isinstance(files, list):
        return [_below(file, folder) for file in files]
    return str((folder / files).absolute()) if isinstance(files, str) else files


def stages_file(name: str, folder: Path) -> Path:
    """Return the path of a file of stages: a name in STAGES, or a path relative to ``folder``."""
    return folder / name if name.endswith(OWN_SUFFIXES) else STAGES / f"{name}.yml"


def read_stages_file(file: Path) -> dict:
    """Return the contents of a file of stages.

    Raises:
        UserError: if the file has an unknown section.
    """
    content = read_yaml(file)
    for key in content:
        if key not in _FILE_KEYS:
            raise UserError(f"{file.name}: unknown key '{key}'{nearest(key, _FILE_KEYS)}")
    return content


def _override(defaults: dict, values: dict, source: str) -> dict:
    """Return the default settings with other values, section by section.

    Raises:
        UserError: if a setting is unknown or of another type than its default, where null is
            allowed for every setting.
    """
    settings = dict(defaults)
    for key, value in values.items():
        if key not in defaults:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), defaults)}")
        default = defaults[key]
        if isinstance(default, dict) and isinstance(value, dict):
            value = _override(default, value, f"{source}, '{key}'")
        elif None not in (default, value) and type(value) is not type(default):
            raise UserError(f"{source}: '{key}' must be like {default!r}, not {value!r}")
        settings[key] = value
    return settings
