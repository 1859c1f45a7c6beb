"""Sparse autoencoders of an agent's hidden states, compared with other dictionaries.

The report contains the reconstruction error, the effects of the reconstruction on policy and
success rate, feature names, and ablation effects. Features are named after the label of the level
state that they predict best. The strongest features are ablated in the real game, and compared with
random directions. A killed run resumes after the last finished dictionary or condition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.agent_file import load_agent
from agents.layers import STATE
from agents.networks import Policy
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from agents.testbed import BASELINE, Condition, Testbed
from analysis.memory.dictionaries import (
    FIXED,
    RANDOM,
    STATES,
    AutoencoderTraining,
    Dictionary,
    fixed_dictionary,
    train_autoencoder,
)
from analysis.memory.labels import Examples, LabelledRecordingOptions
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
from analysis.memory.sparse_report import ABLATIONS, EXAMPLE_SIZE, plot_dictionaries, report
from common.cli import count, environments, seed, whole
from common.devices import Compute
from common.errors import UserError
from common.files import versions
from common.options import command, option
from common.results import ResultStore
from common.video import strip
from interventions.comparison import (
    chosen_outcomes,
    outcomes_named,
    outcomes_of,
    play_runs,
    read_runs,
)
from interventions.direction_folders import SPARSE_FEATURES, signed_label
from interventions.flags import patched_precision
from interventions.probes import exchanged_levels, split_levels
from stats.effects import (
    DIVERGENCE,
    check_starts,
    compare_conditions,
    paired_effects,
)
from stats.forest_plot import plot_effects
from stats.report import report as effects_report
from stats.significance import holm
from stats.study import measure_conditions

EXAMPLES_PER_ROW = 8
_OUTCOMES = outcomes_named("success", "length", DIVERGENCE)
_PLAY = 1  # random stream of the played levels; part of the generator's seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFeaturesOptions(LabelledRecordingOptions):
    """Train sparse autoencoders on the hidden states of a recorded agent, and compare them with
    other dictionaries with the same number of active features."""

    sizes: tuple[int, ...] = option(
        (256, 512), "numbers of features of the sparse autoencoders; features of the first size "
                    "are ablated", type=count)
    num_active: int = option(8, "number of active features per state, of all dictionaries",
                             type=count)
    num_steps: int = option(AutoencoderTraining.num_steps,
                            "training steps of each sparse autoencoder", type=count)
    num_features: int = option(20, "number of features to ablate", type=count)
    num_controls: int = option(19, "number of random directions to compare ablations with; claims "
                                   "need at least 19", type=whole(2, 1000))
    num_levels: int = option(100, "number of levels to play, per reconstruction, ablation and "
                                  "control", type=count)
    num_envs: int = option(64, "number of episodes played in parallel", type=environments)
    seed: int = option(0, "seed of all random choices", type=seed)
    output_dir: Path = option(Path("analysis/memory/sparse_features"), "folder to write to")

    @property
    def main_dictionary(self) -> str:
        """Name of the dictionary whose features are ablated."""
        return f"sae_{self.sizes[0]}"

    @functools.cached_property
    def compute(self) -> Compute:
        """Device, and the precision for patches; see ``patched_precision``."""
        return self.compute_in(patched_precision(self.precision, [STATE]))


def study_features(options: SparseFeaturesOptions) -> pd.DataFrame:
    """Run the study, write all files, and return the table of features."""
    check_starts(options.num_levels, "--num_levels")
    compute, examples = options.compute, options.examples
    policy = load_agent(options.agent_file, compute.device)
    data = SplitStates(torch.from_numpy(examples.hidden_out).to(compute.device), examples.level,
                       split_levels(examples.level, options.seed))
    testbed = unrecorded_levels(policy, options)
    store = open_store(options, testbed)
    dictionaries = fit_dictionaries(store, data, options)
    sae = dictionaries[options.main_dictionary]
    features = name_all_features(store, dictionaries, data, options)
    chosen = strongest_features(sae, policy, data, options.num_features)
    if not len(chosen):
        raise UserError("no feature of the sparse autoencoder affects the policy; train it for "
                        "more --num_steps")
    ablated = score_ablations(sae, policy, data, chosen, options.seed)
    features = features.merge(ablated.assign(dictionary=options.main_dictionary), how="left",
                              on=["dictionary", "feature"])
    titles = {row.feature: f"{row.feature}: " + (
        signed_label(row.label, row.auc) if row.named else "unnamed")
        for row in features[features["rank"].notna()].itertuples()}
    splices: list[Condition] = [
        Condition(f"splice_{name}", name, "splice", patches=[splice(dictionary, policy)])
        for name, dictionary in dictionaries.items()]
    ablations = ablation_conditions(sae, policy, chosen, titles, data, options.num_controls,
                                    options.seed)
    std = {STATE: data.train.std(dim=0)}
    measure_conditions(store, "condition", [BASELINE, *splices, *ablations],
                       lambda condition: vars(play_runs(testbed, condition, std)))
    scores = pd.DataFrame([{"dictionary": name, "size": dictionary.size,
                            **score_dictionary(dictionary, policy, data, options.seed)}
                           for name, dictionary in dictionaries.items()])
    named = features.groupby("dictionary")[["named", "named_shuffled"]].mean()
    scores = scores.merge(named, on="dictionary").merge(
        spliced_success(store, splices, options.seed), on="dictionary")
    store.write("dictionaries", value=scores)
    store.write("features", value=features)
    store.write("sae", value=sae.arrays())
    activations = sae.encode(data.test).cpu().numpy()
    for feature in chosen.tolist():
        write_examples(store, examples, data, feature, activations[:, feature])
    write_report(store, scores, features, ablation_effects(store, ablations, options.seed), data,
                 options)
    return features


def open_store(options: SparseFeaturesOptions, testbed: Testbed) -> ResultStore:
    """Open the output folder with the settings of the study."""
    store = ResultStore(options.output_dir, SPARSE_FEATURES)
    store.open({
        "agent_file": options.agent_file.name, "agent_sha256": agent_sha256(options.agent_file),
        "data_dir": str(options.data_dir), "recording_sha256": options.examples.folder.sha256(),
        "labels_dir": str(options.labels_dir), "precision": options.compute.precision,
        **{name: getattr(options, name) for name in (
            "sizes", "num_active", "num_steps", "num_features", "num_controls", "num_levels",
            "seed")}, "where": "real levels", "env": vars(testbed.env), "versions": versions()},
        options.overwrite)
    return store


def fit_dictionaries(store: ResultStore, data: SplitStates, options: SparseFeaturesOptions
                     ) -> dict[str, Dictionary]:
    """Fit all dictionaries, and return them by name. A dictionary in the store is read."""
    size = options.sizes[0]
    names = [f"sae_{number}" for number in options.sizes]
    names += [f"{kind}_{size}" if kind in (RANDOM, STATES) else kind for kind in FIXED]
    dictionaries = {}
    for name in names:
        arrays = store.compute("dictionary", name, function=functools.partial(
            fit_dictionary, name, data, options))
        dictionaries[name] = Dictionary.of_arrays(arrays).on(options.compute.device)
    main = options.main_dictionary
    return {**dictionaries, f"{main}_pursuit": dictionaries[main].by_pursuit()}


def fit_dictionary(name: str, data: SplitStates, options: SparseFeaturesOptions
                   ) -> dict[str, np.ndarray | None]:
    """Fit a dictionary to the training states, and return its arrays.

    Args:
        name: kind of the dictionary, followed by its size if the kind can have any size, such as
            ``sae_256`` or ``pca``.
    """
    kind, _, size = name.partition("_")
    states = data.train.cpu()
    if kind in FIXED:
        return fixed_dictionary(kind, states.numpy(), int(size or 0), options.num_active,
                                options.seed).arrays()
    return train_autoencoder(states, int(size), options.num_active, options.seed,
                             AutoencoderTraining(options.num_steps)).arrays()


def unrecorded_levels(policy: Policy, options: SparseFeaturesOptions) -> Testbed:
    """Return a testbed of levels that were not recorded, drawn from ``EnvConfig.unseen_levels`` of
    the recording's game.

    Raises:
        UserError: if a recorded level is drawn.
    """
    env = recorded_game(options.examples.folder).unseen_levels()
    play_seed = int(np.random.SeedSequence([options.seed, _PLAY]).generate_state(1)[0])
    testbed = Testbed(policy, options.compute, env, env.draw_levels(options.num_levels, play_seed),
                      play_seed, options.num_envs)
    if set(testbed.levels) & set(options.examples.level.tolist()):
        raise UserError("some of the levels to play were recorded; choose another --seed")
    return testbed


def name_all_features(store: ResultStore, dictionaries: Mapping[str, Dictionary],
                      data: SplitStates, options: SparseFeaturesOptions) -> pd.DataFrame:
    """Return the concatenated tables of ``named_features`` of all dictionaries."""
    labels = binary_labels(options.examples)
    exchanged = exchanged_levels(data.levels, data.parts, np.random.default_rng(options.seed))
    shuffled = labels.iloc[exchanged].reset_index(drop=True)
    return pd.concat([
        store.compute("names", name, function=functools.partial(
            named_features, name, dictionary, (labels, shuffled), data, options.seed))
        for name, dictionary in dictionaries.items()], ignore_index=True)


def named_features(name: str, dictionary: Dictionary, labels: Sequence[pd.DataFrame],
                   data: SplitStates, seed: int) -> pd.DataFrame:
    """Return the table of ``name_features`` with two further columns: ``dictionary`` (``name``) and
    ``named_shuffled`` (whether the feature is named if labels are shuffled between levels).

    Args:
        labels: labels of all states, see ``binary_labels``, and these labels after shuffling.
        data: states.
    """
    activations = dictionary.encode(data.states).cpu().numpy()
    table, control = (name_features(activations, some, data.levels, data.parts, seed)
                      for some in labels)
    return table.assign(dictionary=name, named_shuffled=control["named"])


def outcomes_under(store: ResultStore, conditions: list[Condition]
                   ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Read the K outcomes _OUTCOMES on N levels, unaltered (N, K) and under each of A conditions
    (A, N, K), and the size of the change of the hidden state by name of the condition, see
    ``ConditionRuns.moved``."""
    columns = [place for place, outcome in enumerate(chosen_outcomes(False))
               if outcome in _OUTCOMES]
    unaltered = read_runs(store, BASELINE.name)
    runs = [read_runs(store, condition.name) for condition in conditions]
    before, *after = (outcomes_of(played, unaltered, False)[:, columns]
                      for played in (unaltered, *runs))
    return before, np.stack(after), {condition.name: float(played.moved)
                                     for condition, played in zip(conditions, runs)}


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
        activations: activations of the feature at the n states of ``data.test`` (n,).
    """
    rows = np.flatnonzero(data.parts.test)
    top = rows[top_examples(activations, examples.episode[rows], 2 * EXAMPLES_PER_ROW)]
    if len(top):
        frames = list(examples.frames(top))
        sheet = strip([frames[:EXAMPLES_PER_ROW], frames[EXAMPLES_PER_ROW:]], EXAMPLE_SIZE)
        with store.file("examples", feature) as path:
            sheet.save(path)


def write_report(store: ResultStore, scores: pd.DataFrame, features: pd.DataFrame,
                 effects: pd.DataFrame, data: SplitStates, options: SparseFeaturesOptions) -> None:
    """Write the effects of the ablations, the figures and the report, and print the report."""
    examples = options.examples
    description = (
        f"{options.agent_file.name} on {options.num_levels} real levels of "
        f"{recorded_game(examples.folder).env_name}, the same for every condition; actions drawn "
        "from the policy")
    store.write("effects", value=effects)
    store.write("effects_report", value=effects_report(effects, _OUTCOMES, ABLATIONS,
                                                       f"{description}."))
    with store.file("effects_figure") as path:
        plot_effects(path, effects, _OUTCOMES, ABLATIONS, description)
    with store.file("figure") as path:
        plot_dictionaries(path, scores)
    text = report(scores, features, effects, options.main_dictionary, (
        f"{len(examples)} states of {len(np.unique(examples.level))} levels: "
        f"{data.parts.train.sum()} to fit dictionaries, {data.parts.penalty.sum()} to choose "
        f"labels and features, {data.parts.test.sum()} to test. At most {options.num_active} "
        f"features are active in a state. In the real game: {description}."))
    store.write("report", value=text)
    print(text)


main = command(SparseFeaturesOptions, study_features)


if __name__ == "__main__":
    raise SystemExit(main())
