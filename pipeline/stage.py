"""A stage of an experiment: its script, inputs, outputs, and how it resumes.

Flags and file names can contain placeholders. ``{output}`` is the output folder. ``{agent}`` and
``{simulator}`` are the analysed agent and the simulator, which an earlier stage may train.
``{page}``, ``{maze page}`` and ``{attribution page}`` are the built web pages. All other
placeholders stand for files given by a preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from agents.acting import load_action_noise
from agents.agent_file import agent_files
from agents.config import load_agent_config
from agents.run_folder import newest_run
from analysis.panel_files import PanelFolder
from attribution.page_files import AttributionPageFolder
from common.config import SETTINGS_NAME, check_entries
from common.errors import UserError
from common.files import read_array, read_description
from common.parameters import AnalysisFolders, ParameterSet, flattened
from common.tables import format_count, read_table
from envs.objects import objects_of
from generative.runs import EPISODES_NAME, checkpoints, newest_simulator_run
from interventions.config import SwapConfig
from maze.field.page_export import MazePageFolder
from pipeline.presets import (
    AGENT,
    SIMULATOR,
    AnyPreset,
    AttributionPreset,
    MemoryPreset,
    Preset,
)
from pipeline.records import find

FOLDERS = AnalysisFolders(Path("analysis"))  # relative to the output folder
OUTPUT, PAGE = "{output}", "{page}"
MAZE_PAGE, ATTRIBUTION_PAGE = "{maze page}", "{attribution page}"
# Folders of the built pages by placeholder.
PAGES = {PAGE: PanelFolder, MAZE_PAGE: MazePageFolder, ATTRIBUTION_PAGE: AttributionPageFolder}
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
        files: placeholders of other input files: AGENT, SIMULATOR, a maze agent, or a page in
            PAGES.
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
        preset: preset of the experiment, which names the files that no stage creates, such as a
            shipped agent.
    """

    def __init__(self, output: Path, preset: AnyPreset):
        self._output, self._given = output, preset.given_files

    def sources(self, files: Sequence[str]) -> list[str]:
        """Return the names of the stages that create the given files.

        Args:
            files: placeholders of files; files that no stage creates are ignored.
        """
        return [MADE_BY[file] for file in files if self._given.get(file, file) is None]

    def fill_in(self, argv: Sequence[str]) -> list[str]:
        """Replace the placeholders in flags, except placeholders of files that do not exist yet."""
        words = (str(self._path(word) or word) if word in self._given else word for word in argv)
        return [word.replace(OUTPUT, str(self._output)) for word in words]

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


def recording_parameters(preset: Preset | AttributionPreset | MemoryPreset) -> dict[str, object]:
    """Return the parameters that record.py reads from YAML files, by dotted name.

    They are the action noise of the game, the kinds of object in it, the swap of directions in the
    agent's hidden state, and the number of episodes played in parallel.
    """
    return {**flattened(vars(load_action_noise(preset.env_name)), "action_noise."),
            **object_parameters(preset.env_name),
            **ParameterSet(preset.parameters).named(SwapConfig),
            "agent.n_envs": load_agent_config(preset.recording_param_name).n_envs}


def agent_experiment(output: Path) -> Path:
    """Return the folder with the training runs of the agent, given the output folder."""
    return next(iter(sorted(output.glob("agent/procgen/*/*"))), output / "agent")


def simulator_experiment(output: Path) -> Path:
    """Return the folder with the training runs of the simulator, given the output folder."""
    return next(iter(sorted(output.glob("simulator/results/*"))), output / "simulator")


def number_of(pattern: str, unit: str) -> Callable[[Path], str]:
    """Return a ``Stage.result`` that counts the files matching a pattern.

    Args:
        pattern: glob pattern relative to the output folder.
        unit: noun for the files, in the plural.
    """
    return lambda output: format_count(len(list(output.glob(pattern))), unit)


def success_rate(path: str) -> Callable[[Path], str]:
    """Return a ``Stage.result`` that reports the success rate of an evaluated agent.

    Args:
        path: output file of evaluate.py, relative to the output folder.
    """
    kinds = {"success_rate": float}
    return lambda output: "{:.1f} % of levels solved".format(100 * check_entries(
        read_description(output / path), kinds, path, kinds)["success_rate"])


def hidden_state_variance(output: Path) -> str:
    """Count the principal components that hold 95 % of the hidden state's variance; used as
    ``Stage.result``."""
    (file,) = (output / FOLDERS.hidden_states).glob("pc_loading_variances_*.npy")
    variances = read_array(file)
    enough = int((np.cumsum(variances) / variances.sum() < 0.95).sum()) + 1
    return f"{enough} components hold 95 % of the variance"


def behaviour_agreement(method: str) -> Callable[[Path], str]:
    """Return a ``Stage.result`` that reports the mean agreement of behaviours between draws of the
    samples.

    Args:
        method: clustering method.
    """
    def summarise(output: Path) -> str:
        (file,) = (output / FOLDERS.behaviour_stability).glob("behaviour_agreement_*.csv")
        table = read_table(file, {"data": str, "method": str, "adjusted_rand": float})
        means = table[table["method"] == method].groupby("data")["adjusted_rand"].mean()
        return (f"adjusted Rand index {means['samples']:.2f} between draws of the samples "
                f"({means['control']:.2f} without behaviours)")
    return summarise
