"""Figure of losses over simulated steps.

The published loss_over_time_exp.py wrote a JSON file with a list of mean losses by name; in a later
version, the lists ``<name>_mean``, ``<name>_min`` and ``<name>_max``. Ours writes a table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.cli import check_output, output_file
from common.errors import UserError
from common.files import read_json
from common.options import OutputFileOptions, command, option
from common.palette import COLOURS, DPI
from common.results import ResultStore, Table
from generative.loss_over_time import KINDS, LOSS_OVER_TIME, SIMULATOR

_SOFTWARE = "plot_loss_over_time.py"  # in the metadata of the figures
_TABLE = Table({"step": int, "predictor": str, "kind": str, "mean": float, "low_95": float,
                "high_95": float})
_BAND = {"_min": "low", "_max": "high"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotLossOptions(OutputFileOptions):
    """Plot the losses that loss_over_time_experiment.py, or the published loss_over_time_exp.py,
    has measured, as lines over simulated steps."""

    presaved_data_path: Path = option(
        help="JSON file of the published script, or the folder of loss_over_time_experiment.py or "
             "the loss_over_time.csv in it")
    output: Path | None = option(None, "file to write; if not given, <name of the data>.png next "
                                       "to the data", type=output_file)


def plot_loss_over_time(options: PlotLossOptions) -> pd.DataFrame:
    """Write the figure, and return the losses; see ``read_losses``."""
    data = options.presaved_data_path
    if data.is_dir():
        data /= LOSS_OVER_TIME.entry("table").path
    path = options.output or data.with_suffix(".png")
    check_output(path, lambda found: _SOFTWARE.encode() in found.read_bytes(), options.overwrite)
    losses = read_losses(data)
    rows = losses[losses["kind"] == losses["kind"].iloc[0]]
    first, last = rows.iloc[0], rows.iloc[-1]
    title = (f"{first['kind']}: {first['mean']:.3g} at step {first['step']}, {last['mean']:.3g} "
             f"at step {last['step']}")
    draw_losses(losses, title).savefig(path, dpi=DPI, metadata={"Software": _SOFTWARE})
    print(f"wrote {path}")
    return losses


def read_losses(path: Path) -> pd.DataFrame:
    """Read losses: one row per ``kind`` and ``step`` with the ``mean``, and ``low`` and ``high``,
    the ends of the 95 % interval (table) or the extremes (JSON), NaN if unknown.

    Raises:
        UserError: if the file is missing or damaged, or does not hold losses.
    """
    if path.suffix == ".csv":
        table = ResultStore(path.parent, LOSS_OVER_TIME).read("table", form=_TABLE)
        table = table[(table["predictor"] == SIMULATOR) & table["kind"].isin(KINDS)]
        return table.rename(columns={"low_95": "low", "high_95": "high"})[
            ["kind", "step", "mean", "low", "high"]]
    content = read_json(path, "the published loss_over_time_exp.py")
    try:
        losses = {name: np.array(values, float) for name, values in content.items()}
    except (AttributeError, TypeError, ValueError):
        losses = {}
    shapes = {values.shape for values in losses.values()}
    if len(shapes) != 1 or len(shapes.pop()) != 1:
        raise UserError(f"{path} does not hold one list of losses per name, each with a number per "
                        "step, as the published loss_over_time_exp.py writes")
    rows = []
    for name, mean in losses.items():
        if name.endswith(tuple(_BAND)):
            continue
        kind = name.removesuffix("_mean")
        band = {column: losses.get(kind + suffix, np.nan) for suffix, column in _BAND.items()}
        rows.append(pd.DataFrame({"kind": kind, "step": np.arange(1, len(mean) + 1),
                                  "mean": mean, **band}))
    return pd.concat(rows, ignore_index=True)


def draw_losses(losses: pd.DataFrame, title: str) -> Figure:
    """Draw a line with a band per kind of loss; the scale is logarithmic if all means are above 0.

    Args:
        losses: result of ``read_losses``.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (kind, rows) in enumerate(losses.groupby("kind", sort=False)):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(rows["step"], rows["mean"], color=colour, label=kind,
                  linestyle="-" if number < len(COLOURS) else "--")
        axes.fill_between(rows["step"], rows["low"], rows["high"], color=colour, alpha=0.3,
                          linewidth=0)
    if (losses["mean"] > 0).all():
        axes.set_yscale("log")
    axes.set(xlabel="simulated step", ylabel="loss", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


main = command(PlotLossOptions, plot_loss_over_time)

if __name__ == "__main__":
    raise SystemExit(main())
