"""Requests of jobs to a cluster: the one reader of ``hyperparams/cluster.yml``.

The meaning of each value is in the YAML beside it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from common.config import read_yaml, typed
from common.errors import UserError, nearest
from pipeline.presets import HYPERPARAMS, PRESETS_FILE, SECTION, load_preset
from pipeline.stage import TRAIN_AGENT, TRAIN_SIMULATOR, Stage
from pipeline.stages import all_stages

CLUSTER_FILE = HYPERPARAMS / "cluster.yml"
TRAINING = (TRAIN_AGENT, TRAIN_SIMULATOR)
_TIME = re.compile(r"(?=.)(?:(\d+) ?d)? ?(?:(\d+) ?h)? ?(?:(\d+) ?min)? ?(?:(\d+) ?s)?")
_SECONDS = (86400, 3600, 60, 1)
_LEAST = {"memory_gb": 1, "cores": 1, "gpus": 0, "processes": 1, "shards": 1}


@dataclasses.dataclass(frozen=True)
class Resources:
    """Requests of one job of a stage."""

    time: str
    memory_gb: int
    cores: int
    gpus: int
    processes: int
    shards: int

    @property
    def seconds(self) -> int:
        return seconds_of(self.time, "time")


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """Exceptions for one stage; None where there are none."""

    time: str | None = None
    memory_gb: int | None = None
    cores: int | None = None
    gpus: int | None = None
    processes: int | None = None
    shards: int | None = None


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """All that the file says."""

    stop_lead: str
    max_sittings: int
    slurm_options: tuple[str, ...]
    lsf_options: tuple[str, ...]
    training: Resources
    gpu: Resources
    cpu: Resources
    stages: dict[str, Exceptions]

    @property
    def stop_seconds(self) -> int:
        """Seconds before its end at which a job is told to stop."""
        return seconds_of(self.stop_lead, "stop_lead")

    def resources(self, stage: Stage) -> Resources:
        """Requests of a job of a stage; ``shards`` is the number that the stage is divided into.

        Raises:
            UserError: if a stage is to have several processes that is no training.
        """
        kind = (self.training if stage.name in TRAINING else
                self.gpu if takes_device(stage.script) else self.cpu)
        changes = vars(self.stages.get(stage.name, Exceptions()))
        found = dataclasses.replace(kind, **{
            name: value for name, value in changes.items() if value is not None})
        if found.processes > 1 and stage.name not in TRAINING:
            raise UserError(f"the stage {stage.name} cannot have {found.processes} processes; only "
                            f"{' and '.join(TRAINING)} can")
        return dataclasses.replace(found, shards=min(found.shards, stage.max_shards))


def takes_device(script: str) -> bool:
    """Whether a script computes on a GPU where there is one: it takes ``--device``."""
    flags = importlib.import_module(script).parser()
    return any(action.dest == "device" for action in flags._actions)


def load_cluster(path: Path, stages: Iterable[Stage]) -> ClusterConfig:
    """Read the requests to a cluster.

    Args:
        stages: of the experiment.

    Raises:
        UserError: if a key is unknown, or a value is of the wrong type or out of range.
    """
    content = read_yaml(path)
    _check_times(content, path.name)
    config = typed(ClusterConfig, content, path.name)
    lead = seconds_of(config.stop_lead, f"{path.name}: 'stop_lead'")
    parts = {f"'{name}'": getattr(config, name) for name in ("training", "gpu", "cpu")}
    parts |= {f"'stages', '{name}'": changes for name, changes in config.stages.items()}
    for name, part in parts.items():
        where = f"{path.name}: {name}"
        for key, least in _LEAST.items():
            if (value := getattr(part, key)) is not None and value < least:
                raise UserError(f"{where}: '{key}' must be at least {least}, not {value}")
        if part.time is not None and seconds_of(part.time, f"{where}: 'time'") <= lead:
            raise UserError(f"{where}: 'time' must be longer than 'stop_lead', {config.stop_lead}, "
                            f"not {part.time}")
    if config.max_sittings < 1:
        raise UserError(f"{path.name}: 'max_sittings' must be at least 1, not "
                        f"{config.max_sittings}")
    unknown = sorted(map(str, config.stages.keys() - {stage.name for stage in stages}))
    if unknown and (unknown := sorted(set(unknown) - (known := _known_stages()))):
        raise UserError(f"{path.name}: 'stages' names no stage '{unknown[0]}'"
                        f"{nearest(unknown[0], known)}")
    return config


def _check_times(content: object, where: str) -> None:
    """Refuse times that are numbers: YAML makes one of 24:00:00, too."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if key in ("time", "stop_lead") and isinstance(value, int | float):
            raise _no_time(f"{where}: '{key}'", value)
        separator = ", " if where.endswith("'") else ": "
        _check_times(value, f"{where}{separator}'{key}'")


def seconds_of(text: str, what: str) -> int:
    """The seconds of a time such as 1 h 30 min.

    Raises:
        UserError: saying how times are written.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = sum(int(number or 0) * unit for number, unit in zip(
        match.groups(), _SECONDS)) if match else 0
    if not seconds:
        raise _no_time(what, text)
    return seconds


def _no_time(what: str, value: object) -> UserError:
    return UserError(f"{what} must be a time such as 2 d, 36 h, 1 h 30 min or 90 s, not {value}")


def _known_stages() -> set[str]:
    """The names of the stages of all presets."""
    return {stage.name for preset in read_yaml(PRESETS_FILE) if preset != SECTION
            for stage in all_stages(load_preset(preset), preset)}
