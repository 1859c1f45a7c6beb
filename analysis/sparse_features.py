"""Train sparse autoencoders on the hidden states of a recorded agent, and compare them with other
dictionaries with the same number of active features.

The report contains the reconstruction error, the effects of the reconstruction on policy and
success rate, feature names, and ablation effects. Features are named after the label of the level
state that they predict best. The strongest features are ablated in the real game, and compared with
random directions. A killed run resumes after the last finished dictionary or condition.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.agent_file import load_agent
from agents.layers import STATE
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from analysis.memory.dictionaries import (
    FIXED,
    RANDOM,
    STATES,
    AutoencoderTraining,
    Dictionary,
    fixed_dictionary,
    train_autoencoder,
)
from analysis.memory.labels import Examples, add_recording_flags, read_examples
from analysis.memory.sparse_features import (
    SplitStates,
    ablation_conditions,
    binary_labels,
    name_features,
    score_ablations,
    score_dictionary,
    splice,
    strongest_features,
    top_examples,
)
from analysis.memory.sparse_report import (
    ABLATIONS,
    EXAMPLE_SIZE,
    SPARSE_FEATURES,
    plot_dictionaries,
    report,
    signed_label,
)
from common.cli import Parser, add_compute_flags, count, environments, seed, set_up_logging, whole
from common.devices import Compute, resolve_compute
from common.errors import UserError, script_main
from common.files import versions
from common.results import ResultStore
from common.video import strip
from interventions.comparison import (
    Testbed,
    chosen_outcomes,
    outcomes_named,
    outcomes_of,
    read_runs,
    real_levels,
)
from interventions.flags import patched_precision
from interventions.probes import exchanged_levels, split_levels
from stats.effects import (
    DIVERGENCE,
    Condition,
    check_starts,
    compare_conditions,
    paired_effects,
)
from stats.forest_plot import plot_effects
from stats.report import report as effects_report
from stats.significance import holm
from stats.study import BASELINE, measure_conditions

EXAMPLES_PER_ROW = 8
_OUTCOMES = outcomes_named("success", "length", DIVERGENCE)
_PLAY = 1  # random stream of the played levels; part of the generator's seed


def parser() -> Parser:
    flags = Parser(__doc__)
    add_recording_flags(flags)
    flags.add_argument("--sizes", type=count, nargs="+", default=[256, 512],
                       help="numbers of features of the sparse autoencoders; features of the first "
                            "size are ablated")
    flags.add_argument("--num_active", type=count, default=8,
                       help="number of active features per state, of all dictionaries")
    flags.add_argument("--num_steps", type=count, default=AutoencoderTraining.num_steps,
                       help="training steps of each sparse autoencoder")
    flags.add_argument("--num_features", type=count, default=20,
                       help="number of features to ablate")
    flags.add_argument("--num_controls", type=whole(2, 1000), default=19,
                       help="number of random directions to compare ablations with; claims need at "
                            "least 19")
    flags.add_argument("--num_levels", type=count, default=100,
                       help="number of levels to play, per reconstruction, ablation and control")
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played in parallel")
    flags.add_argument("--seed", type=seed, default=0, help="seed of all random choices")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/memory/sparse_features"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    check_starts(args.num_levels, "--num_levels")
    compute = resolve_compute(args.device, args.gpu_device, patched_precision(
        args.precision, [STATE]))
    policy = load_agent(args.agent_file, compute.device)
    examples = read_examples(args.data_dir, args.labels_dir, args.agent_file)
    data = SplitStates(torch.from_numpy(examples.hidden_out).to(compute.device), examples.level,
                       split_levels(examples.level, args.seed))
    testbed = unrecorded_levels(policy, compute, examples, args)
    store = ResultStore(args.output_dir, SPARSE_FEATURES)
    store.open({
        "agent_file": args.agent_file.name, "agent_sha256": agent_sha256(args.agent_file),
        "data_dir": str(args.data_dir), "recording_sha256": examples.folder.sha256(),
        "labels_dir": str(args.labels_dir), "precision": compute.precision,
        **{name: getattr(args, name) for name in (
            "sizes", "num_active", "num_steps", "num_features", "num_controls", "num_levels",
            "seed")}, **testbed.settings, "versions": versions()}, args.overwrite)

    names = [f"sae_{size}" for size in args.sizes]
    names += [f"{kind}_{args.sizes[0]}" if kind in (RANDOM, STATES) else kind for kind in FIXED]
    dictionaries = {}
    for name in names:
        arrays = store.compute("dictionary", name, function=functools.partial(
            fit_dictionary, name, data, args))
        dictionaries[name] = Dictionary.of_arrays(arrays).on(compute.device)
    main_name = f"sae_{args.sizes[0]}"
    sae = dictionaries[main_name]
    dictionaries[f"{main_name}_pursuit"] = sae.by_pursuit()

    labels = binary_labels(examples)
    exchanged = exchanged_levels(data.levels, data.parts, np.random.default_rng(args.seed))
    shuffled = labels.iloc[exchanged].reset_index(drop=True)
    features = pd.concat([
        store.compute("names", name, function=functools.partial(
            named_features, name, dictionary, (labels, shuffled), data, args.seed))
        for name, dictionary in dictionaries.items()], ignore_index=True)
    chosen = strongest_features(sae, policy, data, args.num_features)
    if not len(chosen):
        raise UserError("no feature of the sparse autoencoder affects the policy; train it for "
                        "more --num_steps")
    ablated = score_ablations(sae, policy, data, chosen, args.seed)
    features = features.merge(ablated.assign(dictionary=main_name), how="left",
                              on=["dictionary", "feature"])
    titles = {row.feature: f"{row.feature}: " + (
        signed_label(row.label, row.auc) if row.named else "unnamed")
        for row in features[features["rank"].notna()].itertuples()}
    splices = [Condition(f"splice_{name}", name, "splice", value=[splice(dictionary, policy)])
               for name, dictionary in dictionaries.items()]
    ablations = ablation_conditions(sae, policy, chosen, titles, data, args.num_controls,
                                    args.seed)
    std = {STATE: data.train.std(dim=0)}
    measure_conditions(store, "arm", [BASELINE, *splices, *ablations],
                       lambda arm: vars(testbed.run(arm.value or [], std)))

    scores = pd.DataFrame([{"dictionary": name, "size": dictionary.size,
                            **score_dictionary(dictionary, policy, data, args.seed)}
                           for name, dictionary in dictionaries.items()])
    named = features.groupby("dictionary")[["named", "named_shuffled"]].mean()
    scores = scores.merge(named, on="dictionary").merge(
        spliced_success(store, splices, args.seed), on="dictionary")
    effects = ablation_effects(store, ablations, args.seed)
    description = (
        f"{args.agent_file.name} on {args.num_levels} real levels of "
        f"{recorded_game(examples.folder).env_name}, the same for every condition; actions drawn "
        "from the policy")
    store.write("dictionaries", value=scores)
    store.write("features", value=features)
    store.write("sae", value=sae.arrays())
    store.write("effects", value=effects)
    store.write("effects_report", value=effects_report(effects, _OUTCOMES, ABLATIONS,
                                                       f"{description}."))
    with store.file("effects_figure") as path:
        plot_effects(path, effects, _OUTCOMES, f"{ABLATIONS.title}\n{description}",
                     ABLATIONS.controls)
    with store.file("figure") as path:
        plot_dictionaries(path, scores)
    activations = sae.encode(data.test).cpu().numpy()
    for feature in chosen.tolist():
        write_examples(store, examples, data, feature, activations[:, feature])
    text = report(scores, features, effects, main_name, (
        f"{len(examples)} states of {len(np.unique(examples.level))} levels: "
        f"{data.parts.train.sum()} to fit dictionaries, {data.parts.penalty.sum()} to choose "
        f"labels and features, {data.parts.test.sum()} to test. At most {args.num_active} features "
        f"are active in a state. In the real game: {description}."))
    store.write("report", value=text)
    print(text)


def fit_dictionary(name: str, data: SplitStates,
                   args: argparse.Namespace) -> dict[str, np.ndarray | None]:
    """Fit a dictionary to the training states, and return its arrays.

    Args:
        name: kind of the dictionary, followed by its size if the kind can have any size, such as
            ``sae_256`` or ``pca``.
    """
    kind, _, size = name.partition("_")
    states = data.train.cpu()
    if kind in FIXED:
        return fixed_dictionary(kind, states.numpy(), int(size or 0), args.num_active,
                                args.seed).arrays()
    return train_autoencoder(states, int(size), args.num_active, args.seed,
                             AutoencoderTraining(args.num_steps)).arrays()


def unrecorded_levels(policy: Policy, compute: Compute, examples: Examples,
                      args: argparse.Namespace) -> Testbed:
    """Return a testbed of levels that were not recorded, drawn from ``EnvConfig.unseen_levels`` of
    the recording's game.

    Raises:
        UserError: if a recorded level is drawn.
    """
    env = recorded_game(examples.folder).unseen_levels()
    play_seed = int(np.random.SeedSequence([args.seed, _PLAY]).generate_state(1)[0])
    testbed = real_levels(policy, compute, env, args.num_levels, play_seed, args.num_envs, None, {})
    if set(testbed.levels) & set(examples.level.tolist()):
        raise UserError("some of the levels to play were recorded; choose another --seed")
    return testbed


def named_features(name: str, dictionary: Dictionary, labels: Sequence[pd.DataFrame],
                   data: SplitStates, seed: int) -> pd.DataFrame:
    """Return the table of ``name_features`` with two further columns: ``dictionary`` (``name``) and
    ``named_shuffled`` (whether the feature is named if labels are shuffled between levels).

    Args:
        name: name of the dictionary.
        dictionary: the dictionary.
        labels: labels of all states, see ``binary_labels``, and these labels after shuffling.
        data: states.
        seed: seed of the tests.
    """
    activations = dictionary.encode(data.states).cpu().numpy()
    table, control = (name_features(activations, some, data.levels, data.parts, seed)
                      for some in labels)
    return table.assign(dictionary=name, named_shuffled=control["named"])


def outcomes_under(store: ResultStore, conditions: list[Condition]
                   ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Read the K outcomes _OUTCOMES on N levels, unaltered (N, K) and under each of A conditions
    (A, N, K), and the size of the change of the hidden state by name of the condition, see
    ``ArmRuns.moved``."""
    columns = [place for place, outcome in enumerate(chosen_outcomes(False))
               if outcome in _OUTCOMES]
    unaltered = read_runs(store, BASELINE.name)
    runs = [read_runs(store, condition.name) for condition in conditions]
    before, *after = (outcomes_of(arm, unaltered, False)[:, columns] for arm in (unaltered, *runs))
    return before, np.stack(after), {condition.name: float(arm.moved)
                                     for condition, arm in zip(conditions, runs)}


def spliced_success(store: ResultStore, splices: list[Condition], seed: int) -> pd.DataFrame:
    """Return the success rate if the hidden state is replaced by the reconstruction of each
    dictionary, and its change with an interval and a p-value corrected over all dictionaries."""
    before, after, _ = outcomes_under(store, splices)
    table = paired_effects(splices, _OUTCOMES[:1], before[:, :1], after[..., :1], seed)
    return pd.DataFrame({
        "dictionary": table["label"], "success_unaltered": table["unaltered"],
        "success": table["altered"], "success_change": table["effect"],
        "success_low": table["low_95"], "success_high": table["high_95"],
        "success_p_holm": holm(table["p"].to_numpy())})


def ablation_effects(store: ResultStore, ablations: list[Condition], seed: int) -> pd.DataFrame:
    """Return the effects of the ablations and their controls, see ``compare_conditions``."""
    before, after, moved = outcomes_under(store, ablations)
    return compare_conditions(ablations, _OUTCOMES, before, after, seed, moved=moved)


def write_examples(store: ResultStore, examples: Examples, data: SplitStates, feature: int,
                   activations: np.ndarray) -> None:
    """Write a contact sheet of the held-out frames in which a feature is most active; none if it is
    never active.

    Args:
        feature: number of the feature.
        activations: activations of the feature at the n states of ``data.test`` (n,).
    """
    rows = np.flatnonzero(data.parts.test)
    top = rows[top_examples(activations, examples.episode[rows], 2 * EXAMPLES_PER_ROW)]
    if len(top):
        frames = list(examples.frames(top))
        sheet = strip([frames[:EXAMPLES_PER_ROW], frames[EXAMPLES_PER_ROW:]], EXAMPLE_SIZE)
        with store.file("examples", feature) as path:
            sheet.save(path)


if __name__ == "__main__":
    raise SystemExit(main())
