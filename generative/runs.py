"""Run folders of simulators: contents, checkpoints and loading.

A run's folder ``<log_dir_base>/results/<gen_mod_exp_name>/<YYYYmmdd_HHMMSS>/`` holds::

    model_epoch<e>_batch<b>.pt    checkpoints: the simulator, and the state to resume from
    progress.csv                  losses and other metrics, next to TensorBoard events
    hyperparameters.yml           the resolved settings
    recons_v_preds/*.mp4          truth, reconstruction and imagination side by side
    training_episodes.txt         episodes used in training, one per line: ``sha256:`` and the
                                  digest (``agents.provenance``), or, for simulators whose digests
                                  were not stored, ``level:`` and the seed of the level
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_digests
from common.config import SETTINGS_NAME, load_settings
from common.devices import Compute
from common.errors import UserError
from common.files import atomic_path, read_bytes
from common.metrics_log import read_metrics
from generative.config import SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset
from generative.losses import LossScales, SimulatorLosses
from generative.published import load_published, save_published
from generative.simulator import Simulator

PROGRESS_NAME = "progress.csv"
EPISODES_NAME = "training_episodes.txt"
TERMS = tuple(field.name for field in dataclasses.fields(SimulatorLosses)
              if field.name != "camera")  # terms of both architectures
MEASURES = ("loss", *(f"loss_{name}" for name in TERMS), "kl_nats", "posterior_entropy",
            "prior_entropy", "vector_distance")
COLUMNS = ("batches", "epoch", "wall_time", "frames_per_second", "waiting_for_data",
           "gradient_norm", *MEASURES, *(f"held_out_{name}" for name in MEASURES))


def measures_of(config: SimulatorConfig) -> tuple[str, ...]:
    """Return the names of the metrics that are logged for training and for held-out batches."""
    return (*MEASURES, "loss_camera") if config.is_spatial else MEASURES


def columns_of(config: SimulatorConfig) -> tuple[str, ...]:
    """Return the columns of ``progress.csv``.

    They are COLUMNS and, in the spatial architecture, the camera's loss on training and on held-out
    batches.
    """
    measures = measures_of(config)
    return (*COLUMNS[:-2 * len(MEASURES)], *measures,
            *(f"held_out_{name}" for name in measures))


@dataclasses.dataclass(frozen=True)
class SimulatorRunSettings:
    """All settings that affect the results of a run.

    Attributes:
        agent_sha256: digest of the agent, see ``agents.provenance``.
        model_file: simulator file whose weights the run starts from, or "".
        precision: float32 or bfloat16.
        max_batches: maximum number of batches; 0 for no limit.
        simulator: sizes and loss weights of the simulator.
        num_episodes: number of recorded episodes, which determines the episodes that are held out;
            None before the data has been opened.
        transfer_from: simulator file of another game or agent, some of whose weights the run starts
            from, see ``generative.published.transfer``, or "".
    """

    exp_name: str
    agent_file: str
    agent_sha256: str
    model_file: str
    data_dir: str
    seed: int
    precision: str
    max_batches: int
    simulator: SimulatorConfig
    training: TrainingConfig
    loss_scales: LossScales
    num_episodes: int | None = None
    transfer_from: str = ""


def checkpoint_name(epoch: int, batch: int) -> str:
    """Return the file name of the checkpoint after ``batch`` batches of an epoch."""
    return f"model_epoch{epoch}_batch{batch}.pt"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first."""
    numbers = {(int(match[1]), int(match[2])): path for path in folder.glob("model_*.pt")
             if (match := re.fullmatch(r"model_epoch(\d+)_batch(\d+)\.pt", path.name))}
    return [numbers[number] for number in sorted(numbers)]


def prune_checkpoints(folder: Path, keep_newest: int, keep_hours: float) -> None:
    """Delete old checkpoints.

    Args:
        keep_newest: number of newest checkpoints to keep.
        keep_hours: interval in hours; the first checkpoint in every interval is kept, too.
    """
    kept_slots = set()
    for path in checkpoints(folder)[:-keep_newest]:
        slot = int(path.stat().st_mtime / (keep_hours * 3600))
        if slot in kept_slots:
            path.unlink()
        kept_slots.add(slot)


def newest_simulator_run(folder: Path) -> Path | None:
    """Return ``folder`` if it is a run, otherwise the newest run inside it, or None."""
    if (folder / PROGRESS_NAME).is_file():
        return folder
    logs = sorted(folder.glob(f"*/{PROGRESS_NAME}"), key=lambda path: path.stat().st_mtime)
    return logs[-1].parent if logs else None


def read_progress(folder: Path) -> pd.DataFrame:
    """Read a run's ``progress.csv``.

    Raises:
        UserError: if the file is missing, damaged or still empty.
    """
    return read_metrics(folder / PROGRESS_NAME, COLUMNS)


def new_run_folder(log_dir_base: str, exp_name: str) -> Path:
    """Return the path of the folder of a run that starts now; the folder is not created.

    Args:
        log_dir_base: folder that contains ``results``.
        exp_name: name of the experiment, a folder inside ``results``.
    """
    return Path(log_dir_base) / "results" / exp_name / time.strftime("%Y%m%d_%H%M%S")


def run_of(model_file: Path) -> SimulatorRunSettings | None:
    """Read the settings of a simulator file's run; return None for a file without settings.

    Raises:
        UserError: if the settings are damaged.
    """
    if not (model_file.parent / SETTINGS_NAME).is_file():
        return None
    return load_settings(model_file.parent, SimulatorRunSettings)


def check_export(model_file: Path, output: Path) -> None:
    """Check that a simulator can be written to ``output`` with the settings of ``model_file``.

    Raises:
        UserError: if the settings are missing, or the folder of ``output`` belongs to a run or has
            other settings.
    """
    settings = model_file.parent / SETTINGS_NAME
    if not settings.is_file():
        raise UserError(f"there is no {settings}, which stores the simulator's sizes")
    exported = output.parent / SETTINGS_NAME
    if (output.parent.resolve() == settings.parent.resolve()
            or (output.parent / PROGRESS_NAME).exists()):
        raise UserError(f"{output} is in the folder of a run; choose another folder")
    if exported.exists() and exported.read_bytes() != settings.read_bytes():
        raise UserError(f"{output} is next to the {SETTINGS_NAME} of another run; choose another "
                        "folder")


def copy_settings(model_file: Path, output: Path) -> None:
    """Copy the settings and training episodes of a simulator file's run into the folder of
    ``output``, if it has none."""
    for name in (SETTINGS_NAME, EPISODES_NAME):
        source, exported = model_file.parent / name, output.parent / name
        if source.exists() and not exported.exists():
            shutil.copy(source, exported)


def save_changed_copy(simulator: Simulator, model_file: Path, output: Path) -> Path:
    """Write a changed simulator, and the settings of the file that it was read from."""
    save_published(output, simulator)
    copy_settings(model_file, output)
    print(f"wrote {output}")
    return output


def open_simulator(model_file: Path, agent_file: Path, otherwise: SimulatorConfig,
                   compute: Compute) -> Simulator:
    """Load a simulator with its agent for evaluation.

    Args:
        otherwise: sizes to use for a file without ``hyperparameters.yml`` next to it, such as a
            published one.

    Raises:
        UserError: if a file is missing or damaged, or the agent does not fit the simulator.
    """
    run = run_of(model_file)
    sizes = run.simulator if run else otherwise
    policy = load_agent(agent_file)
    check_agent_inside(run, agent_file)
    simulator = load_published(model_file, sizes, policy).simulator
    compute.place(simulator)
    return simulator.requires_grad_(False).eval()


def open_for_export(model_file: Path, agent_file: Path, output: Path, compute: Compute
                    ) -> tuple[SimulatorRunSettings, Simulator]:
    """Open a simulator of which a changed copy will be written to ``output``, and return the
    settings of its run and the simulator; see ``check_export`` and ``open_simulator``."""
    check_export(model_file, output)
    run = run_of(model_file)
    assert run is not None  # check_export has found its settings
    return run, open_simulator(model_file, agent_file, run.simulator, compute)


def check_agent_inside(run: SimulatorRunSettings | None, agent_file: Path) -> None:
    """Check that a run's simulator was trained with the given agent.

    Args:
        run: settings of the run; None for published simulators, which do not name their agent.

    Raises:
        UserError: if it was trained with another agent.
    """
    if run and run.agent_sha256 not in agent_digests(agent_file):
        raise UserError(f"{agent_file} is not the agent of this simulator, which was trained with "
                        f"{run.agent_file}")


def training_episodes(model_file: Path) -> set[str] | None:
    """Read on which episodes a simulator was trained.

    Returns:
        ``sha256:<digest>`` or ``level:<seed>`` of each episode, see ``EPISODES_NAME``; None if this
        is unknown.

    Raises:
        UserError: if the file cannot be read.
    """
    path = model_file.parent / EPISODES_NAME
    if not path.exists():
        return None
    return set(read_bytes(path, "list of training episodes").decode(errors="replace").split())


def save_training_episodes(folder: Path, dataset: RolloutDataset, train: np.ndarray,
                           start_file: Path | None) -> None:
    """Write the digests of the training episodes into a run's folder; nothing is written if those
    of the simulator that the run starts from are unknown.

    Args:
        train: numbers of the training windows.
        start_file: simulator file from which the run starts or is resumed; None for new weights.
    """
    episodes = training_episodes(start_file) if start_file else set()
    if episodes is not None:
        episodes |= {f"sha256:{digest}" for digest in _digests(dataset, train).values()}
        with atomic_path(folder / EPISODES_NAME) as temporary:
            temporary.write_text("".join(f"{episode}\n" for episode in sorted(episodes)))


def leakage_reason(model_file: Path, dataset: RolloutDataset, held_out: np.ndarray,
                   assured: bool = False) -> str:
    """Return why evaluated episodes may have been used in training, or "" if they were not.

    Args:
        held_out: numbers of the evaluated windows.
        assured: whether the user states that the episodes were not used. This is believed if the
            training episodes are unknown.
    """
    trained = training_episodes(model_file)
    if trained is None:
        return "" if assured else (f"there is no {EPISODES_NAME} next to the model file, so the "
                                   "episodes of its training are unknown")
    digests = _digests(dataset, held_out)
    shared = {number for number, digest in digests.items() if f"sha256:{digest}" in trained}
    if any(episode.startswith("level:") for episode in trained):
        shared |= {number for number in digests if "level:{}".format(
            dataset.folder.steps(number)["level_seed"].iloc[0]) in trained}
    return f"{len(shared)} of the {len(digests)} episodes were used in training" if shared else ""


def _digests(dataset: RolloutDataset, windows: np.ndarray) -> dict[int, str]:
    """Return the digests of the episodes that windows show, by the episode's number."""
    numbers = np.unique(dataset.episodes_of(windows)).tolist()
    found = dataset.folder.digests(numbers, *dataset.folder.stored_digests())
    return {number: str(found[str(number)][1]) for number in numbers}
