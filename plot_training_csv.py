"""Plot training curves, see ``PlotTrainingOptions``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agents.run_folder import newest_run, read_log
from agents.training_plots import plot_comparison, plot_everything, plot_for_figure
from common.errors import UserError
from common.options import Options, command, option
from generative.figures import plot_simulator
from generative.runs import newest_simulator_run, read_progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotTrainingOptions(Options):
    """Plot the training curves of an agent or a simulator."""

    datapath: Path = option(help="folder of a run of train.py or train_gen_model.py; or folder of "
                                 "an experiment, whose newest run is plotted")
    beside: Path | None = option(
        None, "folder of another agent's run, to compare the returns of the two runs "
              "(plot_beside.png in the folder of the first)")


def plot_training(options: PlotTrainingOptions) -> Path:
    """Plot training curves, and return the folder of the run, which holds the plots."""
    simulator_folder = newest_simulator_run(options.datapath)
    if simulator_folder is not None:
        log = read_progress(simulator_folder)
        title = f"{simulator_folder.parent.name}, {log['batches'].iloc[-1]:,} batches"
        if "held_out_loss" in log:
            title = (f"Loss on held-out episodes: {log['held_out_loss'].iloc[0]:.3g} at first, "
                     f"{log['held_out_loss'].iloc[-1]:.3g} at last\n{title}")
        if options.beside:
            raise UserError(f"--beside compares runs of agents, but {options.datapath} is a run "
                            "of a simulator")
        plot_simulator(log, simulator_folder / "plot.png", title)
        return simulator_folder
    folder = newest_run(options.datapath)
    log = read_log(folder)
    experiment = re.sub(r"_\d\d-\d\d-\d{4}.*", "", folder.name).replace("_", " ")
    title = f"{folder.parent.name}, {experiment}, {log['timesteps'].iloc[-1]:,} steps"
    plot_everything(log, folder / "plot.png", title)
    plot_for_figure(log, folder / "plot_for_fig.png", title)
    if options.beside:
        other = newest_run(options.beside)
        if other.resolve() == folder.resolve():
            raise UserError(f"--beside gives {folder}, which is also the run of --datapath; give "
                            "another run")
        names = name_of(folder), name_of(other)
        if len(set(names)) == 1:
            names = str(folder), str(other)
        plot_comparison(dict(zip(names, (log, read_log(other)))), folder / "plot_beside.png")
    return folder


def name_of(folder: Path) -> str:
    """Return the name of a run's experiment; for a folder that is not called seed_*, its own name.
    """
    return folder.parent.name if folder.name.startswith("seed_") else folder.name


main = command(PlotTrainingOptions, plot_training)

if __name__ == "__main__":
    raise SystemExit(main())
