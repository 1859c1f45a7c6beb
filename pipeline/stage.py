"""A stage of an experiment: which script, what it reads and writes, how it goes on.

Flags and files are text with places in it: ``{output}`` is the output folder, ``{agent}`` the agent
file that is analysed and ``{simulator}`` the simulator, which earlier stages may have trained,
``{page}``, ``{maze page}`` and ``{attribution page}`` the pages as they were built, and others are
files that a preset gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agents.acting import load_action_noise
from agents.agent_file import agent_files
from agents.config import load_agent_config
from agents.run_folder import newest_run
from analysis.panel_files import PanelFolder
from attribution.page_files import AttributionPageFolder
from common.config import SETTINGS_NAME
from common.errors import UserError
from common.files import read_description
from common.parameters import ParameterSet, flattened
from envs.objects import objects_of
from generative.runs import checkpoints, newest_simulator_run
from interventions.config import SwapConfig
from maze.field.page_export import MazePageFolder
from pipeline.presets import AGENT, SIMULATOR, AnyPreset
from pipeline.records import find

OUTPUT, PAGE = "{output}", "{page}"
MAZE_PAGE, ATTRIBUTION_PAGE = "{maze page}", "{attribution page}"
# As they were built.
DEFAULTS = "defaults"  # the parameter set of scripts that are given none
PAGES = {PAGE: PanelFolder, MAZE_PAGE: MazePageFolder, ATTRIBUTION_PAGE: AttributionPageFolder}
TRAIN_AGENT, TRAIN_SIMULATOR = "train_agent", "train_simulator"
MADE_BY = {AGENT: TRAIN_AGENT, SIMULATOR: TRAIN_SIMULATOR}

# Flags that continue an interrupted stage, or None to begin again.
Continuation = Callable[[list[str], Path], "list[str] | None"]


def same_command(argv: list[str], _folder: Path) -> list[str] | None:
    """The script finds out itself what it has done already."""
    return argv


def from_start(_argv: list[str], _folder: Path) -> list[str] | None:
    """The script writes everything at its end, or is quick."""
    return None


@dataclasses.dataclass(frozen=True)
class Stage:
    """One run of one script.

    Attributes:
        name: of the stage.
        script: module of the script.
        argv: its flags, with places.
        outputs: patterns of the files that it writes, below the output folder; each of them is
            matched by a file at least.
        result: the outcome in a few words, from the output folder.
        needs: patterns of what it reads of what earlier stages have written, by stage.
        files: other files that it reads: AGENT, SIMULATOR, a page of PAGES.
        parameters: those that it depends on beyond its flags, by dotted name.
        clears: patterns of what is deleted before it runs again, if not ``outputs``.
        continued: how it goes on when it was interrupted.
        max_shards: into how many its work can be divided among jobs: its script takes --shard
            and --join if it is more than 1.
    """

    name: str
    script: str
    argv: tuple[str, ...]
    outputs: tuple[str, ...]
    result: Callable[[Path], str]
    needs: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    parameters: dict[str, object] = dataclasses.field(default_factory=dict)
    clears: tuple[str, ...] = ()
    continued: Continuation = same_command
    max_shards: int = 1


class PathResolver:
    """Fills in the places that flags and files name.

    Args:
        output: the output folder.
    """

    def __init__(self, output: Path, preset: AnyPreset):
        self._output, self._given = output, preset.given_files

    def sources(self, files: Sequence[str]) -> list[str]:
        """The stages that make files."""
        return [MADE_BY[file] for file in files if self._given.get(file, file) is None]

    def fill_in(self, argv: Sequence[str]) -> list[str]:
        """Flags as the script gets them; what is not there yet stays as it is."""
        filled = []
        for word in argv:
            if word in self._given:
                path = self._path(word)
                word = word if path is None else str(path)
            filled.append(word.replace(OUTPUT, str(self._output)))
        return filled

    def files(self, names: Sequence[str]) -> list[tuple[str, Path]]:
        """Files by the names that do not change with the place where they lie.

        Raises:
            UserError: if one is missing.
        """
        found = []
        for name in names:
            if name in PAGES:
                page = PAGES[name].built()
                found += [(f"{name}, {path.relative_to(page)}", path)
                          for path in find(page, ["**/*"])]
                continue
            path = self._path(name)
            if path is None or not path.is_file():
                made_by = " ".join(self.sources([name]))
                raise UserError(f"there is no {name.strip('{}')} "
                                + (f"yet; run {made_by} first" if made_by else f"file {path}"))
            found.append((name, path))
            settings = path.with_name(SETTINGS_NAME)
            if settings.is_file():  # sizes of a simulator; how an agent was trained
                found.append((f"{name}, {settings.name}", settings))
        return found

    def _path(self, place: str) -> Path | None:
        """The file of a place; None if no stage has made it yet."""
        given = self._given[place]
        if given is not None:
            return given
        if place == SIMULATOR:
            run = newest_simulator_run(simulator_experiment(self._output))
            files = checkpoints(run) if run else []
            return files[-1] if files else None
        try:
            return agent_files(newest_run(agent_experiment(self._output)))[-1]
        except (UserError, IndexError):
            return None


def object_parameters(game: str) -> dict[str, object]:
    """What ``hyperparams/game_objects.yml`` says of a game, by dotted names."""
    section, kinds = f"game_objects.{game}", objects_of(game)
    return {section: [kind.name for kind in kinds], **flattened(
        {kind.name: dataclasses.asdict(kind) for kind in kinds}, f"{section}.")}


def recording_parameters(param_name: str, env_name: str) -> dict[str, object]:
    """What record.py reads of the YAML files, by dotted names.

    Args:
        param_name: the set of ``hyperparams/procgen/config.yml`` whose n_envs it takes.
        env_name: the game, whose action noise it takes.
    """
    return {**flattened(vars(load_action_noise(env_name)), "action_noise."),
            **ParameterSet(DEFAULTS).named(SwapConfig),
            "agent.n_envs": load_agent_config(param_name).n_envs}


def agent_experiment(output: Path) -> Path:
    """The folder with the runs of the agent's training; its name says game and experiment."""
    return next(iter(sorted(output.glob("agent/procgen/*/*"))), output / "agent")


def simulator_experiment(output: Path) -> Path:
    """The folder with the runs of the simulator's training."""
    return next(iter(sorted(output.glob("simulator/results/*"))), output / "simulator")


def number_of(pattern: str, unit: str) -> Callable[[Path], str]:
    """The result of a stage that is the number of files of a pattern."""
    return lambda output: f"{len(list(output.glob(pattern)))} {unit}"


def success_rate(path: str) -> Callable[[Path], str]:
    """The result of a stage that evaluates an agent.

    Args:
        path: of what evaluate.py writes, below the output folder.
    """
    def result(output: Path) -> str:
        rate = read_description(output / path).get("success_rate")
        if not isinstance(rate, int | float):
            raise UserError(f"{output / path} has no success_rate; evaluate.py writes it")
        return f"{100 * rate:.1f} % of levels solved"

    return result
