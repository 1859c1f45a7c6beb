"""Colours, axis format and saving of figures of training curves."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

from common.files import atomic_path
from common.palette import BLUE, DARK_GREY, DPI, VERMILION

TRAINING, VALIDATION, OTHER = BLUE, VERMILION, DARK_GREY
STEPS = EngFormatter(sep="")  # 500k, 2M


def save(figure: plt.Figure, path: Path, title: str) -> None:
    """Set the title of a figure, write it atomically, close it and print the path."""
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
    plt.close(figure)
    print(f"wrote {path}")
