"""Gradients between the independent components of the agent's state, compared with the components'
correlations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agents.agent_file import load_agent
from agents.outputs import ANSWERS
from analysis.influences.comparison import COMPARISON_FILES, WITH, WITHOUT, SignAgreementTable
from analysis.influences.consistency import LEVEL, MIN_EFFECT, MIN_SAMPLES, agreements
from analysis.influences.gradients import open_inputs, open_reader
from analysis.parameters import InfluenceOptions
from analysis.state_maps import figure_schema, save_figures
from common.cli import count, seed
from common.errors import UserError
from common.options import command, option
from common.results import ResultStore

FIGURES = figure_schema("analysis/dynamics_grads_consistency_plots.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsistencyOptions(InfluenceOptions):
    """Compare gradients between the independent components of the agent's state with the
    components' correlations: Jacobian, cross-correlation and sign agreement for each behaviour and
    lag, with and without gradients through the environment."""

    output_dir: Path | None = option(None, "folder for the figures; "
                                           "<save_dir>/dyn_grad_comparison_plots if not given")
    data_output_dir: Path | None = option(
        None, "folder for the tables and matrices; <save_dir>/dyn_grad_comparison_data if not "
              "given")
    only_with_env_grads: bool = option(False, "use only the gradients that include paths through "
                                              "the environment")
    agent_file: Path | None = option(
        None, "agent file; if the samples have no saliency of the agent's outputs, influences on "
              "the outputs are computed from the readout weights in this file, or left out if it "
              "is not given")
    num_shuffles: int = option(2000, "number of shuffles for the null distribution; the smallest "
                                     "possible p-value is 1 / (shuffles + 1)", type=count)
    seed: int = option(0, "seed of the shuffles", type=seed)


def compare_gradients(options: ConsistencyOptions) -> SignAgreementTable:
    """Write figures, tables and matrices, and return the comparison."""
    parameters = options.parameters
    plots = options.output_dir or parameters.folders.comparison_plots
    data = options.data_output_dir or parameters.folders.comparison
    figure_store, data_store = ResultStore(plots, FIGURES), ResultStore(data, COMPARISON_FILES)
    figure_store.check_replaceable()
    data_store.check_replaceable()
    if 1 / (options.num_shuffles + 1) > LEVEL:
        raise UserError(f"--num_shuffles is {options.num_shuffles}, too few for a p-value of "
                        f"{LEVEL}")
    inputs = open_inputs(options)
    reader = open_reader(inputs, parameters)
    variants = {WITH: False} if options.only_with_env_grads else {WITH: False, WITHOUT: True}
    answers = [name for name in ANSWERS
               if all(reader.has(name, without) for without in variants.values())]
    policy = None
    if not answers and options.agent_file:
        answers, policy = list(ANSWERS), load_agent(options.agent_file)
    print("influences on " + ", ".join(["ICs", *answers]) + (
        " (outputs through the readout weights only)" if policy else ""), flush=True)
    influences = {kind: reader.read(answers, without, policy)
                  for kind, without in variants.items()}
    comparison = SignAgreementTable(
        {kind: agreements(of_kind, inputs.groups, options.num_shuffles, options.seed)
         for kind, of_kind in influences.items()}, influences[WITH])
    settings = {**inputs.description(), "saliency_step": influences[WITH].step,
                "answers": answers, "answers_from": "read-out weights" if policy else "saliency",
                "num_shuffles": options.num_shuffles, "seed": options.seed, "level": LEVEL,
                "min_effect": MIN_EFFECT, "min_samples": MIN_SAMPLES}
    with data_store.replace(settings) as temporary:
        comparison.save(temporary, inputs.coordinates.numbers, inputs.labels)
    with figure_store.replace({**settings, "data": str(data)}) as temporary:
        number = save_figures(temporary, comparison.draw())
    for line in comparison.summary():
        print(line)
    print(f"wrote {number} figures to {plots}, tables and matrices to {data}")
    return comparison


main = command(ConsistencyOptions, compare_gradients)

if __name__ == "__main__":
    raise SystemExit(main())
