"""A stage of an experiment: its script, inputs, outputs, and how it resumes.

Flags and file names can contain placeholders. ``{output}`` is the output folder. ``{agent}`` and
``{simulator}`` are the analysed agent and the simulator, which an earlier stage may train.
``{page}``, ``{maze page}``, ``{attribution page}`` and ``{dream page}`` are the built web pages.
All other placeholders stand for files given by a preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agents.acting import load_action_noise
from agents.agent_file import agent_files
from agents.config import load_agent_config
from agents.run_folder import newest_run
from agents.training import RESUME_NAME
from analysis.panel_files import PanelFolder
from attribution.page_files import AttributionPageFolder
from common.config import SETTINGS_NAME
from common.errors import UserError
from common.parameters import AnalysisFolders, ParameterSet, flattened
from envs.objects import objects_of
from generative.dream_page_files import DreamPageFolder
from generative.runs import EPISODES_NAME, checkpoints, newest_simulator_run
from interventions.config import SwapConfig
from maze.field.page_export import MazePageFolder
from pipeline.patterns import find

ROOT = Path(__file__).parent.parent
HYPERPARAMS = ROOT / "hyperparams"
FOLDERS = AnalysisFolders(Path("analysis"))  # relative to the output folder
AGENT, SIMULATOR = "{agent}", "{simulator}"
# Folders of the built pages by placeholder.
PAGES = {"{page}": PanelFolder, "{maze page}": MazePageFolder,
         "{attribution page}": AttributionPageFolder, "{dream page}": DreamPageFolder}
TRAIN_AGENT, TRAIN_SIMULATOR = "train_agent", "train_simulator"
MADE_BY = {AGENT: TRAIN_AGENT, SIMULATOR: TRAIN_SIMULATOR}

# Maps flags and output folder to the flags that resume an interrupted stage; None to restart it.
Continuation = Callable[[list[str], Path], "list[str] | None"]


def same_command(argv: list[str], _folder: Path) -> list[str] | None:
    """Return the flags unchanged: the script detects completed work itself and resumes."""
    return argv


def from_start(_argv: list[str], _folder: Path) -> list[str] | None:
    """Return None: the script starts from scratch, because it is quick or writes all files at the
    end."""
    return None


def resumed_agent(_argv: list[str], folder: Path) -> list[str] | None:
    """Return the flags that resume the agent's training; None if nothing was saved."""
    saved = sorted(agent_experiment(folder).glob(f"*/{RESUME_NAME}"))
    return ["--resume", str(saved[-1].parent)] if saved else None


def resumed_simulator(argv: list[str], folder: Path) -> list[str] | None:
    """Return the flags that resume the simulator's training; None if there is no checkpoint."""
    run = newest_simulator_run(simulator_experiment(folder))
    if run is None or not checkpoints(run):
        return None
    return [*argv[:2], "--resume", str(run)]  # the first two words give the agent file


# Continuations by the value of `resume` in files of stages.
CONTINUATIONS: dict[str | bool, Continuation] = {
    True: same_command, False: from_start, "agent": resumed_agent, "simulator": resumed_simulator}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One run of one script.

    Attributes:
        name: name of the stage.
        script: module name of the script.
        argv: flags of the script, with placeholders.
        outputs: glob patterns of the output files, relative to the output folder; at least one
            file matches each. A pattern that begins with "!" excludes files.
        result: function that summarises the result, given the output folder.
        needs: glob patterns of input files written by earlier stages, by stage.
        files: placeholders of other input files: an agent, SIMULATOR, or a page in PAGES.
        parameters: parameters that the script depends on in addition to its flags, by dotted name.
        clears: glob patterns of paths to delete before a run from scratch; ``outputs`` if empty.
        continued: function that returns the flags to resume the stage after an interruption.
        max_shards: largest number of shards; if above 1, the script takes --shard and --join.
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
    """Resolver of the placeholders in flags and file names.

    Args:
        output: output folder.
        given_files: paths of files that no stage creates, such as a shipped agent, by placeholder;
            None for files that a stage creates.
    """

    def __init__(self, output: Path, given_files: Mapping[str, Path | None]):
        self._output, self._given = output, given_files

    def sources(self, files: Sequence[str]) -> list[str]:
        """Return the names of the stages that create the given files.

        Args:
            files: placeholders of files; files that no stage creates are ignored.
        """
        return [MADE_BY[file] for file in files if self._given.get(file, file) is None]

    def fill_in(self, argv: Sequence[str]) -> list[str]:
        """Replace the placeholders in flags, except placeholders of files that do not exist yet."""
        words = (str(self._path(word) or word) if word in self._given else word for word in argv)
        return [word.replace("{output}", str(self._output)) for word in words]

    def files(self, names: Sequence[str]) -> list[tuple[str, Path]]:
        """Return the files behind placeholders, all files of a page, and the settings and lists of
        training episodes next to agents and simulators.

        Args:
            names: placeholders.

        Returns:
            Name and path of each file. The name does not depend on the file's location.

        Raises:
            UserError: if a file is missing.
        """
        named_paths = []
        for name in names:
            if name in PAGES:
                page = PAGES[name].built()
                named_paths += [(f"{name}, {path.relative_to(page)}", path)
                                for path in find(page, ["**/*"])]
                continue
            path = self._path(name)
            if path is None or not path.is_file():
                made_by = " ".join(self.sources([name]))
                raise UserError(f"there is no {name.strip('{}')} "
                                + (f"yet; run {made_by} first" if made_by else f"file {path}"))
            named_paths.append((name, path))
            named_paths += [(f"{name}, {beside.name}", beside) for beside in (
                path.with_name(SETTINGS_NAME), path.with_name(EPISODES_NAME)) if beside.is_file()]
        return named_paths

    def _path(self, place: str) -> Path | None:
        """Return the file behind a placeholder; None if no stage has created it yet."""
        files: list[Path] = []
        if (given := self._given[place]) is not None:
            return given
        if place == SIMULATOR:
            run = newest_simulator_run(simulator_experiment(self._output))
            files = checkpoints(run) if run else []
        else:
            with contextlib.suppress(UserError):
                files = agent_files(newest_run(agent_experiment(self._output)))
        return files[-1] if files else None


def object_parameters(game: str) -> dict[str, object]:
    """Return the entries of ``hyperparams/game_objects.yml`` for a game, by dotted name, as
    parameters of a stage."""
    section, kinds = f"game_objects.{game}", objects_of(game)
    return {section: [kind.name for kind in kinds], **flattened(
        {kind.name: dataclasses.asdict(kind) for kind in kinds}, f"{section}.")}


def recording_parameters(game: str, param_name: str, values: ParameterSet) -> dict[str, object]:
    """Return the parameters that record.py reads from YAML files, by dotted name.

    They are the action noise of the game, the kinds of object in it, the swap of directions in the
    agent's hidden state, and the number of episodes played in parallel.

    Args:
        game: name of the game.
        param_name: parameter set in ``procgen/config.yml``.
        values: parameter set of the analyses.
    """
    return {**flattened(vars(load_action_noise(game)), "action_noise."), **object_parameters(game),
            **values.named(SwapConfig), "agent.n_envs": load_agent_config(param_name).n_envs}


def agent_experiment(output: Path) -> Path:
    """Return the folder with the training runs of the agent, given the output folder."""
    return next(iter(sorted(output.glob("agent/procgen/*/*"))), output / "agent")


def simulator_experiment(output: Path) -> Path:
    """Return the folder with the training runs of the simulator, given the output folder."""
    return next(iter(sorted(output.glob("simulator/results/*"))), output / "simulator")
