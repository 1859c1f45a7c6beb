"""Presets of the whole experiment: the one reader of ``hyperparams/pipeline.yml``.

The meaning of each value is in the YAML beside it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from common.parameters import parameter_sets

ROOT = Path(__file__).parent.parent
HYPERPARAMS = ROOT / "hyperparams"
PRESETS_FILE = HYPERPARAMS / "pipeline.yml"
AGENT, SIMULATOR, MAZE_AGENT = "{agent}", "{simulator}", "{maze agent}"  # places of stages' flags
SECTION = "section"  # the preset of section:NAME, for every set of interpreting_configs.yml


def read_hyperparams() -> dict[Path, dict]:
    """The contents of all files of parameters, as they are now.

    Raises:
        UserError: if one is damaged.
    """
    return {path: read_yaml(path) for path in sorted(HYPERPARAMS.rglob("*.yml"))}


@dataclasses.dataclass(frozen=True)
class AgentTrainingPreset:
    """Training of the agent."""

    param_name: str
    num_levels: int
    num_timesteps: int
    num_checkpoints: int
    val_interval: int


@dataclasses.dataclass(frozen=True)
class SimulatorTrainingPreset:
    """Training of the simulator, beyond the parameter set."""

    max_batches: int
    batch_size: int | None
    num_sim_steps: int | None


@dataclasses.dataclass(frozen=True)
class Interventions:
    """Which alterations are counted, on how many levels."""

    num_episodes: int
    directions: str | None
    num_controls: int


@dataclasses.dataclass(frozen=True)
class OptimisedStarts:
    """Starts that are made to order."""

    targets: tuple[str, ...]
    num_starts: int
    iterations: int
    num_recorded: int


@dataclasses.dataclass(frozen=True)
class MazePieces:
    """Sizes of the piece on a maze agent that is shown beside the experiment."""

    agent_file: str
    num_mazes: int


@dataclasses.dataclass(frozen=True)
class Preset:
    """One preset."""

    parameters: str
    agent_file: str | None
    model_file: str | None
    env_name: str
    distribution_mode: str
    seed: int
    agent_training: AgentTrainingPreset | None
    simulator_training: SimulatorTrainingPreset | None
    evaluated_levels: int
    rendered_episodes: int
    recorded_episodes: int | None
    recording_param_name: str
    recorded_videos: bool
    manual_action_starts: int
    optimised_starts: OptimisedStarts
    interventions: Interventions
    mazes: MazePieces | None

    def __post_init__(self):
        for what, file, training in (("agent", self.agent_file, self.agent_training),
                                     ("simulator", self.model_file, self.simulator_training)):
            if file is None and training is None:
                raise UserError(f"a preset needs a file of its {what}, or {what}_training")

    @property
    def given_files(self) -> dict[str, Path | None]:
        """Files by the places that stand for them; None where a stage makes it."""
        files = {AGENT: self.agent_file, SIMULATOR: self.model_file}
        if self.mazes is not None:
            files[MAZE_AGENT] = self.mazes.agent_file
        return {place: None if file is None else ROOT / file for place, file in files.items()}


@dataclasses.dataclass(frozen=True)
class MazePreset:
    """Preset of the studies of maze agents, whose numbers fill the table of findings."""

    agent_files: tuple[str, ...]
    distribution_mode: str
    seed: int
    region: int
    evaluated_levels: int
    behaviour_forks: int
    steering_forks: int
    num_controls: int
    source_forks: int
    layer_forks: int
    field_forks: int
    channel_mazes: int
    retargeted_mazes: int
    scrubbed_mazes: int
    drawn_mazes: int
    films: int
    exact: bool
    page: bool

    def __post_init__(self):
        if not self.agent_files or len(self.agents) < len(self.agent_files):
            raise UserError("agent_files must name agents, each in a folder or with a file name of "
                            "its own")

    @property
    def agents(self) -> dict[str, Path]:
        """The agents' files by name: that of their folder if the file is ``model.pth``."""
        files = [ROOT / file for file in self.agent_files]
        return {file.parent.name if file.name == "model.pth" else file.stem: file
                for file in files}

    @property
    def given_files(self) -> dict[str, Path | None]:
        """As of ``Preset``."""
        return {place_of(name): file for name, file in self.agents.items()}


@dataclasses.dataclass(frozen=True)
class AttributionPreset:
    """Preset of the studies of one agent that fill the table of the article on RL vision."""

    parameters: str
    agent_file: str | None
    model_file: str | None
    env_name: str
    distribution_mode: str
    use_backgrounds: bool
    seed: int
    recording_param_name: str

    @property
    def given_files(self) -> dict[str, Path | None]:
        """As of ``Preset``, without a simulator if none is given.

        Raises:
            UserError: if there is no agent.
        """
        if self.agent_file is None:
            raise UserError("this preset has no agent of its own; give one with --agent_file")
        files = {AGENT: self.agent_file, SIMULATOR: self.model_file}
        return {place: ROOT / file for place, file in files.items() if file is not None}


AnyPreset = Preset | MazePreset | AttributionPreset


def place_of(agent: str) -> str:
    """The place that stands for the file of one of several agents."""
    return f"{{agent {agent}}}"


def load_preset(name: str, agent_file: Path | None = None, model_file: Path | None = None,
                path: Path = PRESETS_FILE) -> AnyPreset:
    """A preset.

    Args:
        name: of the preset; or section:NAME, for a set of ``interpreting_configs.yml``.
        agent_file: analysed instead of the preset's; no agent is trained then. Without
            ``model_file`` a simulator is trained around it, if the preset needs one.
        model_file: simulator that is used instead; none is trained then.

    Raises:
        UserError: if there is none, naming the nearest; or a key or a value is wrong.
    """
    presets = read_yaml(path)
    known = {f"{SECTION}:{each}": SECTION for each in parameter_sets()}
    known |= {each: each for each in presets if each != SECTION}
    if name not in known:
        raise UserError(f"there is no preset '{name}'{nearest(name, known)}")
    values = presets[known[name]]
    if known[name] == SECTION and isinstance(values, dict):
        values = {**values, "parameters": name.removeprefix(f"{SECTION}:")}
    kind = _kind_of(values)
    if kind is MazePreset and model_file is not None:
        raise UserError(f"the preset '{name}' has no simulator; leave --model_file out")
    for file, flag in ((agent_file, "--agent_file"), (model_file, "--model_file")):
        if file is not None and not file.is_file():
            raise UserError(f"there is no file {file}; see {flag}")
    preset = typed(kind, values, f"{path.name}, '{known[name]}'")
    if isinstance(preset, MazePreset):
        return preset if agent_file is None else dataclasses.replace(
            preset, agent_files=(str(agent_file.absolute()),))
    trains = isinstance(preset, Preset)
    if agent_file is not None:
        preset = dataclasses.replace(
            preset, agent_file=str(agent_file.absolute()), model_file=None,
            **({"agent_training": None, "simulator_training":
                preset.simulator_training or SimulatorTrainingPreset(0, None, None)}
               if trains else {}))
    if model_file is not None:
        preset = dataclasses.replace(preset, model_file=str(model_file.absolute()),
                                     **({"simulator_training": None} if trains else {}))
    return preset


def _kind_of(values: object) -> type[AnyPreset]:
    """The kind of a preset, which one of its keys tells."""
    if isinstance(values, dict):
        for key, kind in (("agent_files", MazePreset), ("use_backgrounds", AttributionPreset)):
            if key in values:
                return kind
    return Preset
