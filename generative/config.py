"""Parameters of the simulator and of what is done with it.

The one reader of ``hyperparams/interpreting_configs.yml``; the meaning and unit of each value is
in the YAML beside it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from common.config import read_yaml, typed
from common.errors import UserError, nearest

INTERPRETING_CONFIG_FILE = (Path(__file__).parent.parent / "hyperparams"
                            / "interpreting_configs.yml")
BASE_SET = "defaults"
CLUSTERINGS = ("agglomerative", "hdbscan", "kmeans")
SAMPLE_STARTS = ("informed_init", "rand_init")  # folders of samples


@dataclasses.dataclass(frozen=True)
class SimulatorConfig:
    """Sizes and loss weights; the defaults are the published ones.

    Attributes:
        num_init_steps: frames from which a simulation starts; at least 2, because the action
            taken at the last but one enters the first simulated step.
        num_sim_steps: simulated steps; the first one has the last initial frame as its label.
        stoch_discrete: K, classes of each latent variable.
        stoch_dim: S, latent variables of a step.
        env_h_stoch_size: size of z; must be ``stoch_dim * stoch_discrete``.
        agent_hidden_size: D, hidden state of the agent inside; None: that of the agent it is
            given, any other agent being refused if it is a number.
        action_space_size: A.
        deter_dim: H, deterministic state of the environment.
        initializer_rnn_hidden_size: GRU over the initial frames.
        layer_norm: whether the layers around the cell's GRU and the decoder's reward and terminal
            heads normalise; the GRU itself always does.
        hidden_dim: M, hidden layers of the cell.
        image_channels: C.
        cnn_depth: d, width of the image decoder.
        reward_decoder_layers: hidden layers of the reward head.
        terminal_decoder_layers: hidden layers of the terminal head.
        kl_weight: factor of the KL loss.
        kl_balance: share of the KL loss that trains the prior.
        bottleneck_loss_weight: factor of the bottleneck loss.
        bottleneck_vec_size: V, dimensions of the unit sphere's space.
        env_update_penalty_weight: factor of the norm of h's change.
    """

    num_init_steps: int = 3
    num_sim_steps: int = 32
    stoch_discrete: int = 32
    stoch_dim: int = 32
    env_h_stoch_size: int = 1024
    agent_hidden_size: int | None = None
    action_space_size: int = 15
    deter_dim: int = 512
    initializer_rnn_hidden_size: int = 512
    layer_norm: bool = True
    hidden_dim: int = 1000
    image_channels: int = 3
    cnn_depth: int = 48
    reward_decoder_layers: int = 4
    terminal_decoder_layers: int = 4
    kl_weight: float = 12.0
    kl_balance: float = 0.8
    bottleneck_loss_weight: float = 100.0
    bottleneck_vec_size: int = 128
    env_update_penalty_weight: float = 0.5

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and value is not None and value < 1:
                raise UserError(f"{field.name} must be above 0, not {value}")
        for name in ("kl_weight", "bottleneck_loss_weight", "env_update_penalty_weight"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.num_init_steps < 2:
            raise UserError("num_init_steps must be at least 2, not 1")
        if not 0 <= self.kl_balance <= 1:
            raise UserError(f"kl_balance must lie between 0 and 1, not {self.kl_balance}")
        if self.env_h_stoch_size != self.stoch_dim * self.stoch_discrete:
            raise UserError(f"env_h_stoch_size must be stoch_dim * stoch_discrete = "
                            f"{self.stoch_dim * self.stoch_discrete}, not {self.env_h_stoch_size}")

    @property
    def window_length(self) -> int:
        """Frames of a window of data."""
        return self.num_init_steps + self.num_sim_steps - 1


def positive(config, *names: str) -> None:
    """Check that these fields are above 0.

    Raises:
        UserError: naming the field.
    """
    for name in names:
        if not getattr(config, name) > 0:
            raise UserError(f"{name} must be above 0, not {getattr(config, name)}")


def share_of_an_end(config, name: str) -> None:
    """Check that a field is a share that can be taken at both ends of a quantity.

    Raises:
        UserError: naming the field.
    """
    if not 0 < getattr(config, name) <= 0.5:
        raise UserError(f"{name} must be above 0 and at most 0.5, not {getattr(config, name)}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a value is one of these.

    Raises:
        UserError: naming the nearest.
    """
    if value not in choices:
        raise UserError(f"unknown {name} '{value}'{nearest(value, choices)}")


def map_dimensions(number: int) -> None:
    """Check the dimensions of a t-SNE map.

    Raises:
        UserError: if such a map cannot be drawn.
    """
    if number not in (2, 3):
        raise UserError(f"n_components_tsne must be 2 or 3, not {number}")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How a simulator is trained."""

    log_interval: int
    save_interval: int
    keep_newest: int
    keep_hours: float
    lr: float
    batch_size: int
    epochs: int
    held_out_fraction: float
    terminal_absorbing: bool

    def __post_init__(self):
        positive(self, "log_interval", "save_interval", "keep_newest", "keep_hours", "lr",
                 "batch_size", "epochs", "held_out_fraction")


@dataclasses.dataclass(frozen=True)
class SwapConfig:
    """Directions of the hidden space to take out, and where to put the same amount back."""

    swap_directions_from: tuple[int, ...] | None
    swap_directions_to: tuple[int | None, ...] | None

    def __post_init__(self):
        taken, put = self.swap_directions_from or (), self.swap_directions_to or ()
        if len(taken) != len(put):
            raise UserError(f"swap_directions_from has {len(taken)} directions, but "
                            f"swap_directions_to has {len(put)}")


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """Which samples are simulated."""

    rand_init: bool
    max_samples: int

    def __post_init__(self):
        positive(self, "max_samples")


@dataclasses.dataclass(frozen=True)
class AgentHiddenConfig:
    """Analysis of the agent's hidden states."""

    informed_or_random_init: str
    num_episodes: int
    num_generated_samples: int
    num_epi_paths: int
    n_components_pca: int
    n_components_tsne: int
    n_components_nmf: int
    n_components_ica: int
    n_clusters: int
    clustering: str
    nmf_max_iter: int
    nmf_tol: float
    ica_max_iter: int
    ica_tol: float
    outlier_max_k: int

    def __post_init__(self):
        positive(self, *(field.name for field in dataclasses.fields(self)
                         if field.type in ("int", "float")))
        one_of("informed_or_random_init", self.informed_or_random_init, SAMPLE_STARTS)
        one_of("clustering", self.clustering, CLUSTERINGS)
        if self.n_components_ica > self.n_components_pca:
            raise UserError(f"n_components_ica is {self.n_components_ica}, more than the "
                            f"{self.n_components_pca} of n_components_pca")
        map_dimensions(self.n_components_tsne)
        if self.outlier_max_k < 6:
            raise UserError(f"outlier_max_k must be at least 6, not {self.outlier_max_k}, because "
                            "the smallest number of neighbours below it is 5")


@dataclasses.dataclass(frozen=True)
class MapConfig:
    """What the analyses of simulated samples have in common: principal components, clusters and a
    t-SNE map.

    Attributes:
        num_samples: simulated samples.
    """

    num_samples: int
    n_components_pca: int
    n_components_tsne: int
    n_clusters: int
    clustering: str

    def __post_init__(self):
        positive(self, "num_samples", "n_clusters")
        one_of("clustering", self.clustering, CLUSTERINGS)
        map_dimensions(self.n_components_tsne)
        if self.n_components_pca < 2:
            raise UserError(f"n_components_pca must be at least 2, not {self.n_components_pca}")


@dataclasses.dataclass(frozen=True)
class EnvHiddenConfig(MapConfig):
    """Analysis of the environment's states."""

    num_epi_paths: int

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_epi_paths")


@dataclasses.dataclass(frozen=True)
class BottleneckConfig(MapConfig):
    """Analysis of the bottleneck vectors."""


@dataclasses.dataclass(frozen=True)
class BehavioursConfig(MapConfig):
    """Analysis of behaviours: the agent's and the environment's states together."""

    n_components_env: int
    timestep_differences: tuple[int, ...]

    def __post_init__(self):
        super().__post_init__()
        positive(self, "n_components_env")
        if min(self.timestep_differences, default=1) < 1:
            raise UserError("timestep_differences must be above 0, but holds "
                            f"{min(self.timestep_differences)}")


@dataclasses.dataclass(frozen=True)
class JacobianConfig(MapConfig):
    """Analysis of the gradients of independent components."""

    grad_timestep: int

    def __post_init__(self):
        super().__post_init__()
        if self.grad_timestep < 0:
            raise UserError(f"grad_timestep must not be negative, but is {self.grad_timestep}")


@dataclasses.dataclass(frozen=True)
class LossOverTimeConfig:
    """Loss against simulated step."""

    num_batches: int

    def __post_init__(self):
        positive(self, "num_batches")


def id_list(text: str, what: str) -> tuple[int, ...]:
    """The numbers that are meant by "33 39 56 84", or by "0 to 100", which ends before 100.

    Args:
        what: the name of the list, for the message.

    Raises:
        UserError: if it is neither, or names a number twice.
    """
    bounds = re.fullmatch(r"\s*(\d+)\s+to\s+(\d+)\s*", text)
    if bounds:
        return tuple(range(int(bounds[1]), int(bounds[2])))
    words = text.split()
    if not words or not all(re.fullmatch(r"\d+", word) for word in words):
        raise UserError(f"{what} must be numbers, or a range such as 0 to 100, not '{text}'")
    numbers = tuple(map(int, words))
    for number in numbers:
        if numbers.count(number) > 1:
            raise UserError(f"{what} names {number} more than once")
    return numbers


@dataclasses.dataclass(frozen=True)
class SaliencyConfig:
    """Samples that are recorded for saliency, the directions they can be swapped along, and
    what is computed of them.

    The lists of numbers are text; ``ids`` reads it.
    """

    num_sim_steps: int
    num_sim_steps_manual_actions: int
    direction_type: str
    direction_ids: str
    func_type: tuple[str, ...]
    common_timesteps: tuple[int, ...]
    sample_ids: str
    difference_demo_sample_ids: str
    batch_size: int
    perturbation_scale: float
    combine_samples_not_iterate: bool
    gaussian_kernel_size: int
    sigma: float
    extrema_threshold: float

    def __post_init__(self):
        positive(self, "num_sim_steps", "num_sim_steps_manual_actions", "batch_size",
                 "gaussian_kernel_size", "sigma")
        share_of_an_end(self, "extrema_threshold")
        one_of("direction_type", self.direction_type, ("ica", "pca"))
        if self.gaussian_kernel_size % 2 == 0:
            raise UserError(f"gaussian_kernel_size must be odd, not {self.gaussian_kernel_size}")
        if self.perturbation_scale < 0:
            raise UserError("perturbation_scale must not be negative, but is "
                            f"{self.perturbation_scale}")
        for name in ("func_type", "common_timesteps"):
            if not getattr(self, name):
                raise UserError(f"{name} must not be empty")
        if min(self.common_timesteps) < 0:
            raise UserError("common_timesteps must not be negative, but holds "
                            f"{min(self.common_timesteps)}")
        for name in ("direction_ids", "sample_ids", "difference_demo_sample_ids"):
            self.ids(name)

    def ids(self, name: str) -> tuple[int, ...]:
        """The numbers in the field ``name``."""
        return id_list(getattr(self, name), name)


@dataclasses.dataclass(frozen=True)
class XplotsConfig:
    """Cross-causation among samples in which an independent component is extreme."""

    extrema_threshold: float

    def __post_init__(self):
        share_of_an_end(self, "extrema_threshold")


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """What is done with a trained simulator, by method."""

    tsne_seed: int
    save_dir: str
    agent_h: AgentHiddenConfig
    env_h: EnvHiddenConfig
    combined_agent_env_hx: BehavioursConfig
    bottleneck: BottleneckConfig
    jacobian: JacobianConfig
    loss_over_time: LossOverTimeConfig
    saliency: SaliencyConfig
    xplots: XplotsConfig


@dataclasses.dataclass(frozen=True)
class InterpretingConfig:
    """One parameter set.

    Attributes:
        simulator, training, swap: together the section ``gen_model``.
    """

    device: str
    gpu_device: int
    data_dir: str
    log_dir_base: str
    generated_data_dir: str
    simulator: SimulatorConfig
    training: TrainingConfig
    swap: SwapConfig
    record: RecordConfig
    analysis: AnalysisConfig

    def __post_init__(self):
        one_of("device", self.device, ("auto", "gpu", "cpu"))


_GEN_MODEL = {"simulator": SimulatorConfig, "training": TrainingConfig, "swap": SwapConfig}


def parameter_sets(path: Path = INTERPRETING_CONFIG_FILE) -> list[str]:
    """The names of the parameter sets."""
    return list(read_yaml(path))


def load_interpreting_config(name: str, overrides: dict | None = None,
                             path: Path = INTERPRETING_CONFIG_FILE) -> InterpretingConfig:
    """Return the parameter set ``name``.

    Args:
        overrides: values that win over the set's, nested as in the YAML.

    Raises:
        UserError: if there is no such set (naming the nearest), or a key is unknown or missing,
            or a value is of the wrong type or out of range.
    """
    sets = read_yaml(path)
    for needed in (BASE_SET, name):
        if needed not in sets:
            raise UserError(f"there is no parameter set '{needed}' in {path.name}"
                            f"{nearest(needed, sets)}")
    source = f"{path.name}, '{name}'"
    values = sets[BASE_SET]
    for changes in (sets[name], overrides or {}):
        values = _merged(values, changes, source)
    gen_model = values.pop("gen_model", None)
    if not isinstance(gen_model, dict):
        raise UserError(f"{source}: the key 'gen_model' is missing")
    section = f"{source}, 'gen_model'"
    for part, cls in _GEN_MODEL.items():
        names = [field.name for field in dataclasses.fields(cls)]
        found = {key: gen_model.pop(key) for key in names if key in gen_model}
        values[part] = typed(cls, found, section)
    if gen_model:
        known = [field.name for cls in _GEN_MODEL.values() for field in dataclasses.fields(cls)]
        key = str(next(iter(gen_model)))
        raise UserError(f"{section}: unknown key '{key}'{nearest(key, known)}")
    return typed(InterpretingConfig, values, source)


def _merged(values: dict, changes: dict, source: str) -> dict:
    """``values`` with ``changes``, section by section; ``changes`` may only name what is there."""
    if not isinstance(changes, dict):
        raise UserError(f"{source} must hold a mapping of names to values")
    merged = dict(values)
    for key, value in changes.items():
        if key not in values:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), values)}")
        if isinstance(values[key], dict):
            value = _merged(values[key], value, f"{source}, '{key}'")
        merged[key] = value
    return merged
