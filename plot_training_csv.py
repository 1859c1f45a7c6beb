"""Plot the training curve of a run, of an agent or of a simulator."""

from __future__ import annotations

import re
from pathlib import Path

from agents.training_log import newest_run, read_log
from agents.training_plots import plot_everything, plot_for_figure
from common.cli import Parser
from common.errors import script_main
from generative.runs import newest_simulator_run, read_progress
from generative.training_plots import plot_simulator


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--datapath", type=Path, required=True,
                       help="a run's folder, or its experiment's folder for the newest run; of "
                            "an agent (train.py) or of a simulator (train_gen_model.py)")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    simulator_folder = newest_simulator_run(args.datapath)
    if simulator_folder is not None:
        log = read_progress(simulator_folder)
        title = f"{simulator_folder.parent.name}, {log['batches'].iloc[-1]:,} batches"
        plot_simulator(log, simulator_folder / "plot.png", title)
        return
    folder = newest_run(args.datapath)
    log = read_log(folder)
    experiment = re.sub(r"_\d\d-\d\d-\d{4}.*", "", folder.name).replace("_", " ")
    title = f"{folder.parent.name}, {experiment}, {log['timesteps'].iloc[-1]:,} steps"
    plot_everything(log, folder / "plot.png", title)
    plot_for_figure(log, folder / "plot_for_fig.png", title)


if __name__ == "__main__":
    raise SystemExit(main())
