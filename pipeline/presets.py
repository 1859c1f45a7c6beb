"""Presets of ``run_pipeline.py``. Only this module reads ``hyperparams/pipeline.yml``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from common.parameters import parameter_sets

ROOT = Path(__file__).parent.parent
HYPERPARAMS = ROOT / "hyperparams"
PRESETS_FILE = HYPERPARAMS / "pipeline.yml"
AGENT, SIMULATOR, MAZE_AGENT = "{agent}", "{simulator}", "{maze agent}"  # placeholders in flags
SECTION = "section"  # preset of --preset section:NAME, for every NAME in interpreting_configs.yml


def read_hyperparams() -> dict[Path, dict]:
    """Read the current contents of all parameter files, by path.

    Raises:
        UserError: if a file is damaged.
    """
    return {path: read_yaml(path) for path in sorted(HYPERPARAMS.rglob("*.yml"))}


@dataclasses.dataclass(frozen=True)
class AgentTrainingPreset:
    """Settings for training the agent.

    Attributes:
        param_name: parameter set in ``procgen/config.yml``.
        num_levels: number of training levels; 0 for no limit.
        num_timesteps: number of environment steps.
        num_checkpoints: number of agent files, evenly spaced.
        val_interval: number of updates between two validation rollouts.
    """

    param_name: str
    num_levels: int
    num_timesteps: int
    num_checkpoints: int
    val_interval: int


@dataclasses.dataclass(frozen=True)
class SimulatorTrainingPreset:
    """Settings for training the simulator, which override the parameter set.

    Attributes:
        max_batches: maximum number of batches; 0 to train for the parameter set's epochs.
        batch_size, num_sim_steps: batch size and number of simulated steps; None for the value of
            the parameter set.
    """

    max_batches: int
    batch_size: int | None
    num_sim_steps: int | None


@dataclasses.dataclass(frozen=True)
class Interventions:
    """Interventions on directions of the hidden state, on real levels.

    Attributes:
        num_episodes: number of levels, played once per ablation and control.
        directions: numbers of the directions, such as "0 to 3"; None for those of the parameter
            set.
        ablations: kinds of ablation, from ``interventions.ablations.ABLATIONS``.
        num_controls: number of random directions per kind of ablation and distance.
    """

    num_episodes: int
    directions: str | None
    ablations: tuple[str, ...]
    num_controls: int


@dataclasses.dataclass(frozen=True)
class OptimisedStarts:
    """Latent optimisation of start vectors of the simulator.

    Attributes:
        targets: targets to maximise, see generative.optimise_start --help.
        num_starts: number of starts per objective.
        iterations: number of optimisation steps.
        num_recorded: number of recorded starts; the searches begin from about half of them, and
            the others are used for comparison.
    """

    targets: tuple[str, ...]
    num_starts: int
    iterations: int
    num_recorded: int


@dataclasses.dataclass(frozen=True)
class MemoryStudies:
    """Studies of the agent's memory.

    Attributes:
        lesions: names of the lesions, see analysis/memory_lesions.py --help; None for all.
        examples: maximum number of recorded steps that are probed; 0 for lesions only.
        played_levels: number of levels that are played under each lesion, each change along a
            probe direction and each ablation, and on which channels are patched.
        num_controls: number of random changes per kind of intervention.
        autoencoder_steps: training steps of each sparse autoencoder.
        features: number of sparse features that are ablated, and for which starts are optimised.
        dream_iterations: number of optimisation steps of a start; 0 for no starts.
        recorded_starts: number of recorded starts, see ``OptimisedStarts.num_recorded``.
    """

    lesions: tuple[str, ...] | None
    examples: int
    played_levels: int
    num_controls: int
    autoencoder_steps: int
    features: int
    dream_iterations: int
    recorded_starts: int


@dataclasses.dataclass(frozen=True)
class MazePieces:
    """Settings of the part of the main experiment that studies a maze agent.

    Attributes:
        agent_file: file of the maze agent.
        num_mazes: number of mazes whose fields are drawn.
    """

    agent_file: str
    num_mazes: int


@dataclasses.dataclass(frozen=True)
class Preset:
    """Preset of the main experiment.

    Attributes:
        parameters: parameter set in ``interpreting_configs.yml``.
        agent_file: agent to analyse, relative to the repository; None to train one.
        model_file: simulator, relative to the repository; None to train one from scratch.
        env_name, distribution_mode: game and mode.
        seed: seed of the stages; stages that need other levels add 1 or 2.
        agent_training: training of the agent; None for no training.
        simulator_training: training of the simulator, which starts from ``model_file`` if given;
            None for no training.
        evaluated_levels: number of levels on which the agent is evaluated.
        rendered_episodes: number of episodes rendered as videos.
        recorded_episodes: number of recorded episodes; None for as many as the analysis of hidden
            states uses.
        recording_param_name: parameter set in ``procgen/config.yml`` whose ``n_envs`` is the number
            of episodes recorded in parallel.
        recorded_videos: whether to write videos of recorded episodes.
        manual_action_starts: number of recorded starts that are simulated with nine fixed actions.
        optimised_starts: latent optimisation of start vectors.
        interventions: interventions on the hidden state.
        stability_draws: number of subsets of the samples in which behaviours are found again; 0 to
            leave this out.
        mazes: study of a maze agent; None to leave it out.
        memory: studies of the agent's memory; None to leave them out.
    """

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
    stability_draws: int
    mazes: MazePieces | None
    memory: MemoryStudies | None = None

    @property
    def given_files(self) -> dict[str, Path | None]:
        """Paths of the agent and simulator files by placeholder; None if a stage creates it."""
        files = {AGENT: self.agent_file, SIMULATOR: self.model_file,
                 **({MAZE_AGENT: self.mazes.agent_file} if self.mazes else {})}
        return {place: None if file is None else ROOT / file for place, file in files.items()}


@dataclasses.dataclass(frozen=True)
class MazePreset:
    """Preset of the studies of maze agents that fill the table of findings.

    Attributes:
        agent_files: files of the agents, relative to the repository.
        distribution_mode: mode of the maze game.
        seed: seed of all stages.
        region: number of rows and columns of the region in which the cheese lay when a confined
            agent was trained; used for all agents.
        evaluated_levels: number of levels for each position of the cheese.
        behaviour_forks, steering_forks: numbers of mazes with a fork for the studies of behaviour
            and of steering.
        num_controls: number of controls of each kind.
        source_forks: number of forks for the study of vectors of other levels.
        layer_forks: number of forks for steering at each layer alone, and at all layers at once.
        field_forks: number of forks whose entire fields are compared.
        channel_mazes: number of mazes for choosing channels.
        retargeted_mazes, scrubbed_mazes: number of mazes for retargeting and for resampling.
        drawn_mazes: number of mazes whose fields are drawn.
        films: number of mazes with videos.
        exact: compute exact probabilities; possible only for agents without memory.
        page: export the maze page; possible only for agents without memory.
    """

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
            raise UserError("agent_files must not be empty, and the agents must differ in their "
                            "file names, or in their folders if the files are called model.pth")

    @property
    def agents(self) -> dict[str, Path]:
        """Agent files by name. An agent is named after its file, or after its folder if the file is
        called ``model.pth``."""
        files = [ROOT / file for file in self.agent_files]
        return {file.parent.name if file.name == "model.pth" else file.stem: file
                for file in files}

    @property
    def given_files(self) -> dict[str, Path | None]:
        """See ``Preset.given_files``."""
        return {place_of(name): file for name, file in self.agents.items()}


@dataclasses.dataclass(frozen=True)
class AttributionPreset:
    """Preset of the studies of one agent that fill the table of claims of "Understanding RL
    Vision".

    Attributes:
        parameters: parameter set in ``interpreting_configs.yml``.
        agent_file: agent to analyse, relative to the repository; None if the user must give one.
        model_file: simulator for saliency maps; None for no maps.
        env_name, distribution_mode: game and mode.
        use_backgrounds: whether the game draws background images.
        seed: see ``Preset``.
        recording_param_name: see ``Preset``.
    """

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
        """See ``Preset.given_files``; the simulator is omitted if none is given.

        Raises:
            UserError: if the preset has no agent.
        """
        if self.agent_file is None:
            raise UserError("this preset names no agent; give one with --agent_file")
        files = {AGENT: self.agent_file, SIMULATOR: self.model_file}
        return {place: ROOT / file for place, file in files.items() if file is not None}


@dataclasses.dataclass(frozen=True)
class MemoryPreset:
    """Preset of the studies of one recurrent agent's memory.

    Attributes:
        parameters: parameter set in ``interpreting_configs.yml``.
        agent_file: agent to analyse, relative to the repository.
        model_file: simulator in which starts are optimised; None for no starts.
        env_name, distribution_mode: game and mode.
        seed: seed of all stages.
        recording_param_name: see ``Preset``.
        memory_episodes: number of episodes that are recorded, without action noise.
        memory: the studies.
    """

    parameters: str
    agent_file: str
    model_file: str | None
    env_name: str
    distribution_mode: str
    seed: int
    recording_param_name: str
    memory_episodes: int
    memory: MemoryStudies

    @property
    def given_files(self) -> dict[str, Path | None]:
        """See ``Preset.given_files``; the simulator is omitted if none is given."""
        files = {AGENT: self.agent_file, SIMULATOR: self.model_file}
        return {place: ROOT / file for place, file in files.items() if file is not None}


AnyPreset = Preset | MazePreset | AttributionPreset | MemoryPreset


def place_of(agent: str) -> str:
    """Return the placeholder for the file of one of several agents, given the agent's name."""
    return f"{{agent {agent}}}"


def load_preset(name: str, agent_file: Path | None = None, model_file: Path | None = None,
                path: Path = PRESETS_FILE) -> AnyPreset:
    """Load a preset, with another agent or simulator if files are given.

    Args:
        name: name of the preset, or section:NAME for the parameter set NAME of
            ``interpreting_configs.yml``.
        agent_file: agent to analyse instead of the preset's; no agent is trained then. Without
            ``model_file``, a ``Preset`` trains a simulator for it, and other presets leave out the
            stages that need one.
        model_file: simulator to use instead of the preset's; no simulator is trained then.
        path: YAML file with the presets.

    Raises:
        UserError: if there is no such preset (the message suggests the nearest name), a key or a
            value is invalid, a file is missing, or ``model_file`` is given for a preset without a
            simulator.
    """
    presets = read_yaml(path)
    known = {f"{SECTION}:{parameter_set}": SECTION for parameter_set in parameter_sets()}
    known |= {preset: preset for preset in presets if preset != SECTION}
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
    if agent_file is not None:
        preset = dataclasses.replace(preset, agent_file=str(agent_file.absolute()), model_file=None)
        if isinstance(preset, Preset):
            training = preset.simulator_training or SimulatorTrainingPreset(0, None, None)
            preset = dataclasses.replace(preset, agent_training=None, simulator_training=training)
    if model_file is not None:
        preset = dataclasses.replace(preset, model_file=str(model_file.absolute()))
        if isinstance(preset, Preset):
            preset = dataclasses.replace(preset, simulator_training=None)
    return preset


def _kind_of(values: object) -> type[AnyPreset]:
    """Return the class of a preset, determined by its keys."""
    keys = values if isinstance(values, dict) else ()
    return (MazePreset if "agent_files" in keys else
            AttributionPreset if "use_backgrounds" in keys else
            MemoryPreset if "memory_episodes" in keys else Preset)
