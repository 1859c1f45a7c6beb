"""Plot the agent's readout weights in the space of its independent components: the effect of each
component on the value and on the logits of the actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from analysis.hidden_states import UNIT, plot_action_bars, plot_actions, plot_value, readout
from analysis.state_maps import save_figures
from common.cli import Parser
from common.errors import script_main
from common.game_constants import ACTION_LABELS
from common.results import Entry, File, ResultStore, Schema, Table
from generative.flags import add_simulator_flags, read_simulator_flags
from interventions.config import DirectionFilesConfig
from interventions.flags import add_direction_flags, directions_folder
from interventions.projector import Projector

TABLE_NAME = "read_out_weights.csv"
FIGURES = Schema("figures of plot_value_and_action_weights.py", "plot_value_and_action_weights.py",
                 results={"figures": Entry("{}.png", File()), "table": Entry(TABLE_NAME, Table())},
                 replaced=True)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "accepted for the published commands; no effect here",
                        model_file_required=False)
    add_direction_flags(flags)
    flags.add_argument("--output_dir", type=Path, help="output folder; "
                       "<save_dir>/value_and_action_weights if not given")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = read_simulator_flags(parser(), argv)
    output = args.output_dir or parameters.folders.readout
    store = ResultStore(output, FIGURES)
    store.check_replaceable()
    policy = load_agent(args.agent_file)
    num_episodes = parameters.get(DirectionFilesConfig).num_episodes
    precomputed = directions_folder(args, parameters)
    projector, matrices = Projector.load_for(policy.fc_value.in_features, precomputed, num_episodes,
                                             args.agent_file)
    weights = readout(policy, projector)
    title = (f"{args.agent_file.name}: {len(weights.value)} independent components of the states "
             f"in {num_episodes} episodes")
    with store.replace({
            "agent_file": str(args.agent_file), "agent_sha256": agent_sha256(args.agent_file),
            "precomp_dir": str(precomputed), "num_episodes": num_episodes,
            "matrices_sha256": matrices}) as temporary:
        weights.table(ACTION_LABELS).to_csv(temporary / TABLE_NAME, index=False,
                                            float_format="%.6g")
        save_figures(temporary, (
            ("action_weights.png", plot_actions(weights, title)),
            ("action_weights_by_ic.png", plot_action_bars(weights, title)),
            ("value_weights.png", plot_value(weights, title))))
    strongest = int(np.abs(weights.value).argmax())
    print(f"wrote 3 figures and {TABLE_NAME} to {output}; IC {strongest} moves the value most, by "
          f"{weights.value[strongest]:+.3g} {UNIT}")


if __name__ == "__main__":
    raise SystemExit(main())
