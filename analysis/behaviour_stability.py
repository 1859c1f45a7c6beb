"""Test whether behaviours are stable across samples: find them in random subsets (draws) of the
samples with each clustering method, and compare the draws.

Writes the agreement of every pair of draws (adjusted Rand index) for the samples and for a control
without behaviours, and the number of behaviours in each draw. Pass the method with the highest
agreement to combined_agent_env_hx_analysis_precompute.py as --clustering.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.behaviour_draws import (
    DATA,
    SAMPLES,
    agreements,
    counts,
    draws_of,
    labels_of_draw,
    report,
    stability_schema,
    without_behaviours,
)
from analysis.behaviours import add_behaviour_flags, read_features
from analysis.parameters import BehavioursConfig
from analysis.state_maps import SampleAnalysis
from common.cli import Parser, count, seed
from common.errors import UserError, script_main
from common.results import ResultStore
from common.step_results import StepResult


def parser() -> Parser:
    flags = Parser(__doc__)
    add_behaviour_flags(flags, "behaviour_stability")
    flags.add_argument("--n_clusters", type=count,
                       key="analysis.combined_agent_env_hx.n_clusters", help="number of clusters")
    flags.add_argument("--num_draws", type=count, default=10, help="number of draws, at least 2")
    flags.add_argument("--share", type=float, default=0.8,
                       help="share of the samples in each draw, below 1")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of all random choices except those of t-SNE")
    flags.add_argument("--overwrite", action="store_true",
                       help="replace the results for this number of samples")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().read(argv)[0]
    if args.num_draws < 2:
        raise UserError(f"--num_draws must be at least 2, not {args.num_draws}: draws are compared")
    if not 0 < args.share < 1:
        raise UserError(f"--share must lie between 0 and 1, not be {args.share}")
    analysis = SampleAnalysis(parser(), argv, BehavioursConfig, stability_schema(args.num_draws),
                              "behaviour_stability")
    config, results = analysis.config, analysis.results
    results.check_new(args.overwrite)
    rows, settings = read_features(analysis)
    num_samples = len(analysis.numbers)
    features = rows.reshape(num_samples, -1, rows.shape[1])
    tsne_seed = analysis.start(**settings, num_draws=args.num_draws, share=args.share).tsne_seed
    draws = draws_of(num_samples, args.share, args.num_draws, args.seed)
    labels: dict[str, list[np.ndarray]] = {}
    for data in DATA:
        states = features if data == SAMPLES else without_behaviours(features, config, args.seed)
        labels[data] = []
        for number, draw in enumerate(draws):
            name = f"{data}_{number}"

            def cluster(name: str = name, states: np.ndarray = states,
                        draw: np.ndarray = draw) -> StepResult:
                return ({name: labels_of_draw(states, draw, config, args.seed, tsne_seed)},
                        {"samples": len(draw)})

            labels[data].append(results.step(name, cluster)[name])
    agreement = pd.DataFrame([each for data in DATA for each in agreements(data, labels[data])])
    numbers = pd.concat([counts(data, labels[data]) for data in DATA])
    text = report(agreement, numbers, config, args.share)
    store = ResultStore(results.path, results.schema)
    for name, value in (("agreement", agreement), ("draws", numbers), ("report", text)):
        store.write(name, results.number, value=value)
    results.finish()  # last, so that a folder that contains settings is complete
    print(text)


if __name__ == "__main__":
    raise SystemExit(main())
