"""Resolved settings of a run, stored beside its results as YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import yaml

from common.config import read_yaml, typed
from common.files import atomic_path, versions

SETTINGS_NAME = "hyperparameters.yml"

Settings = TypeVar("Settings")


def save_settings(folder: Path, settings) -> None:
    """Write a dataclass of settings and the versions used."""
    content = {**dataclasses.asdict(settings), "versions": versions()}
    with atomic_path(folder / SETTINGS_NAME) as temporary:
        temporary.write_text(yaml.safe_dump(content, sort_keys=False))


def load_settings(folder: Path, cls: type[Settings]) -> Settings:
    """Read settings that :func:`save_settings` wrote.

    Raises:
        UserError: if the file is missing or does not hold ``cls``; the key is named.
    """
    path = folder / SETTINGS_NAME
    content = read_yaml(path)
    content.pop("versions", None)
    return typed(cls, content, str(path))
