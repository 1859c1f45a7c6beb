"""Draw what each independent component of the agent's state does to its value and to the logits of
its actions: the read-out weights in the space of the components."""

from __future__ import annotations

from pathlib import Path

import common as _common  # noqa: F401  # isort: skip  (chooses the backend of matplotlib)
import numpy as np
from matplotlib.figure import Figure

from analysis.hidden_states.readout import Readout, readout
from analysis.plotting.matrices import Names, Panel, plot_matrices, signed_scale
from analysis.results.output import Output, draw_jobs
from common.agent_file import load_agent
from common.cli import Parser
from common.errors import script_main
from common.files import sha256
from common.game_constants import ACTION_LABELS
from common.palette import BLUE, DPI, VERMILION
from generative.flags import add_simulator_flags, read_simulator_flags
from interventions.config import DirectionFilesConfig
from interventions.flags import add_direction_flags, directions_folder
from interventions.projector import Projector

TABLE_NAME = "read_out_weights.csv"
OUTPUT = Output("figures of plot_value_and_action_weights.py", ("*.png", TABLE_NAME))
_UNIT = "per standard deviation of the component"


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "accepted for the published commands; no effect here",
                        model_file_required=False)
    add_direction_flags(flags)
    flags.add_argument("--output_dir", type=Path, help="folder to write to; "
                       "<save_dir>/value_and_action_weights if not given")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = read_simulator_flags(parser(), argv)
    output = args.output_dir or parameters.folders.readout
    OUTPUT.check(output)
    policy = load_agent(args.agent_file)
    num_episodes = parameters.get(DirectionFilesConfig).num_episodes
    precomputed = directions_folder(args, parameters)
    projector, matrices = Projector.load_for(policy.hidden_state_size, precomputed, num_episodes)
    weights = readout(policy, projector)
    title = (f"{args.agent_file.name}: {len(weights.value)} independent components of the states "
             f"in {num_episodes} episodes")
    with OUTPUT.replaced(output, {
            "agent_file": str(args.agent_file), "agent_sha256": sha256(args.agent_file),
            "precomp_dir": str(precomputed), "num_episodes": num_episodes,
            "matrices_sha256": matrices}) as temporary:
        weights.table(ACTION_LABELS).to_csv(temporary / TABLE_NAME, index=False,
                                            float_format="%.6g")
        draw_jobs(temporary, [
            ("action_weights.png", lambda path: plot_actions(path, weights, title)),
            ("action_weights_by_ic.png", lambda path: plot_action_bars(path, weights, title)),
            ("value_weights.png", lambda path: plot_value(path, weights, title))])
    strongest = int(np.abs(weights.value).argmax())
    print(f"wrote 3 figures and {TABLE_NAME} to {output}; IC {strongest} moves the value most, by "
          f"{weights.value[strongest]:+.3g} {_UNIT}")


def plot_actions(path: Path, weights: Readout, title: str) -> None:
    """Heat map of all actions and components."""
    plot_matrices(path, [Panel(weights.preferences, "logit less the mean of all logits")],
                  Names(ACTION_LABELS, _numbers(weights), "action", "IC"),
                  signed_scale([weights.preferences], f"nats {_UNIT}", square=False), 1,
                  f"Read-out weights of the policy\n{title}")


def plot_action_bars(path: Path, weights: Readout, title: str) -> None:
    """A panel for each component, a bar for each action."""
    preferences = weights.preferences
    num_ics = len(weights.value)
    columns = min(num_ics, 4)
    rows = -(-num_ics // columns)
    figure = Figure(figsize=(3.6 * columns, 1.9 * rows + 1.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for component, axes in enumerate(panels.flat):
        if component >= num_ics:
            axes.axis("off")
            continue
        _draw_bars(axes, preferences[:, component])
        axes.set_title(f"IC {component}", fontsize=9)
        axes.set_xticks(range(len(ACTION_LABELS)), ACTION_LABELS, rotation=90, fontsize=6)
        axes.tick_params(axis="x", labelbottom=component + columns >= num_ics)
    figure.supxlabel("action", fontsize=9)
    figure.supylabel(f"nats {_UNIT}", fontsize=9)
    figure.suptitle("Read-out weights of the policy: logits less the mean of all logits; blue "
                    f"raises, orange lowers\n{title}", fontsize=10)
    figure.savefig(path, dpi=DPI)


def plot_value(path: Path, weights: Readout, title: str) -> None:
    """A bar for each component."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, weights.value)
    axes.set_xticks(range(len(weights.value)), _numbers(weights))
    axes.set(xlabel="IC", ylabel=f"value (discounted, scaled rewards)\n{_UNIT}")
    axes.set_title(f"Read-out weights of the value; blue raises, orange lowers\n{title}",
                   fontsize=10)
    figure.savefig(path, dpi=DPI)


def _draw_bars(axes, values: np.ndarray) -> None:
    axes.bar(range(len(values)), values,
             color=[BLUE if value >= 0 else VERMILION for value in values])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)


def _numbers(weights: Readout) -> list[str]:
    return [str(i) for i in range(len(weights.value))]


if __name__ == "__main__":
    raise SystemExit(main())
