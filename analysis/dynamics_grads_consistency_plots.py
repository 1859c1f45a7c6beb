"""Compare gradients between the independent components of the agent's state with the components'
correlations: Jacobian, cross-correlation and sign agreement for each behaviour and lag, with and
without gradients through the environment."""

from __future__ import annotations

from pathlib import Path

from agents.agent_file import load_agent
from agents.outputs import ANSWERS
from analysis.influences.comparison import COMPARISON_FILES, WITH, WITHOUT, SignAgreementTable
from analysis.influences.consistency import LEVEL, MIN_EFFECT, MIN_SAMPLES, agreements
from analysis.influences.gradients import open_inputs, open_reader
from analysis.parameters import add_influence_flags
from analysis.state_maps import figure_schema, save_figures
from common.cli import Parser, count, seed
from common.errors import UserError, script_main
from common.results import ResultStore

FIGURES = figure_schema("analysis/dynamics_grads_consistency_plots.py")


def parser() -> Parser:
    flags = Parser(__doc__)
    add_influence_flags(flags)
    flags.add_argument("--output_dir", type=Path, help="folder for the figures; "
                       "<save_dir>/dyn_grad_comparison_plots if not given")
    flags.add_argument("--data_output_dir", type=Path, help="folder for the tables and matrices; "
                       "<save_dir>/dyn_grad_comparison_data if not given")
    flags.add_argument("--only_with_env_grads", action="store_true",
                       help="use only the gradients that include paths through the environment")
    flags.add_argument("--agent_file", type=Path,
                       help="agent file; if the samples have no saliency of the agent's "
                            "outputs, influences on the outputs are computed from the readout "
                            "weights in this file, or left out if it is not given")
    flags.add_argument("--num_shuffles", type=count, default=2000,
                       help="number of shuffles for the null distribution; the smallest possible "
                            "p-value is 1 / (shuffles + 1)")
    flags.add_argument("--seed", type=seed, default=0, help="seed of the shuffles")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    plots = args.output_dir or parameters.folders.comparison_plots
    data = args.data_output_dir or parameters.folders.comparison
    figure_store, data_store = ResultStore(plots, FIGURES), ResultStore(data, COMPARISON_FILES)
    figure_store.check_replaceable()
    data_store.check_replaceable()
    if 1 / (args.num_shuffles + 1) > LEVEL:
        raise UserError(f"--num_shuffles is {args.num_shuffles}, too few for a p-value of {LEVEL}")
    inputs = open_inputs(args, parameters)
    reader = open_reader(inputs, parameters)
    variants = {WITH: False} if args.only_with_env_grads else {WITH: False, WITHOUT: True}
    answers = [name for name in ANSWERS
               if all(reader.has(name, without) for without in variants.values())]
    policy = None
    if not answers and args.agent_file:
        answers, policy = list(ANSWERS), load_agent(args.agent_file)
    print("influences on " + ", ".join(["ICs", *answers]) + (
        " (outputs through the readout weights only)" if policy else ""), flush=True)
    influences = {kind: reader.read(answers, without, policy)
                  for kind, without in variants.items()}
    comparison = SignAgreementTable(
        {kind: agreements(of_kind, inputs.groups, args.num_shuffles, args.seed)
         for kind, of_kind in influences.items()}, influences[WITH])
    settings = {**inputs.description(), "saliency_step": influences[WITH].step,
                "answers": answers, "answers_from": "read-out weights" if policy else "saliency",
                "num_shuffles": args.num_shuffles, "seed": args.seed, "level": LEVEL,
                "min_effect": MIN_EFFECT, "min_samples": MIN_SAMPLES}
    with data_store.replace(settings) as temporary:
        comparison.save(temporary, inputs.coordinates.numbers, inputs.labels)
    with figure_store.replace({**settings, "data": str(data)}) as temporary:
        number = save_figures(temporary, comparison.draw())
    for line in comparison.summary():
        print(line)
    print(f"wrote {number} figures to {plots}, tables and matrices to {data}")


if __name__ == "__main__":
    raise SystemExit(main())
