"""Probe atlas: which labels can be decoded from the hidden state, and which of them are not
decodable from the current frame.

Representations, all for the same steps; a PCA is fitted on training levels only::

    hidden_state       state that leaves the step
    embedding          output of the embedder for the current frame
    last_map           last convolutional map (PCA)
    frame              pixels of the current frame (PCA)
    untrained          hidden state of an agent with random weights, run on the same episodes
    action_position    last action (one-hot) and position of the player
    current            embedding, last action and position together

The score of the hidden state is compared with that of the best of BASELINES, see ``probe_label``.
Each representation has a linear probe and a network with one hidden layer. The validation part of
the levels (``penalty``) is used to choose the penalty (linear probe), the number of epochs
(network), the better probe of each representation, and the best baseline.

Layout of the folder that ``analysis/probe_atlas.py`` writes::

    scores/<label>.csv    one row per representation and kind of probe, see ``probe_label``
    beyond/<label>.csv    one row: hidden state compared with the best baseline
    weights/<label>.npz   weights of the linear probe of the hidden state, and level seeds of the
                          three parts; no file if the label is an action
    atlas.csv             rows of all files scores/<label>.csv
    beyond.csv            rows of all files beyond/<label>.csv, see ``with_claims``
    skipped.csv           labels that were not probed, with the reasons
    report.md, actions_ahead.png, beyond_the_frame.png

Letters in shape comments: N examples, F features of a representation, D hidden units.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from sklearn.decomposition import PCA

from agents.layers import all_layers
from agents.networks import Policy
from agents.reference_set import activations_of
from agents.rollout_files import POSITION_COLUMNS
from analysis.memory.labels import JUMPS, RIGHT, Examples
from common.game_constants import NUM_ACTIONS
from common.progress import with_progress
from interventions.direction_folders import SCORES
from interventions.probes import Parts, Probe, compare_probes, probe
from stats.bootstrap import ClusterBootstrap
from stats.significance import LEVEL, holm

HIDDEN, EMBEDDING, LAST_MAP, FRAME = "hidden_state", "embedding", "last_map", "frame"
UNTRAINED, ACTION_POSITION, CURRENT = "untrained", "action_position", "current"
BASELINES = (FRAME, LAST_MAP, EMBEDDING, ACTION_POSITION, CURRENT)
LINEAR, NETWORK = "linear", "network"
STEPS_AHEAD = (1, 2, 3, 5, 8, 12, 20, 30, 50)
STEPS_SINCE_VIEW = (4, 8, 16)
NUM_COMPONENTS = 128
PCA_EXAMPLES = 3000  # maximum number of frames that a PCA is fitted to
MIN_LEVELS = 3  # minimum number of levels with, and without, the property in each part
RESAMPLINGS = 10_000  # allows p-values that remain small after Holm's correction
_FRAMES_PER_BATCH = 512


@dataclasses.dataclass(frozen=True)
class Label:
    """A quantity to decode.

    Attributes:
        name: name in tables and files.
        group: title under which the report lists this label and similar ones.
        target: value at each example, float64 (N,); NaN where it is unknown.
        metric: metric of its probes: "auc" for a property, "accuracy" for an action, "r2" for a
            number.
    """

    name: str
    group: str
    target: np.ndarray
    metric: str

    @property
    def known(self) -> np.ndarray:
        return np.isfinite(self.target)

    def subset(self, rows: np.ndarray) -> Label:
        """Return the label with values at the given rows only, an index array or a mask."""
        return dataclasses.replace(self, target=self.target[rows])

    def problem(self, levels: np.ndarray, parts: Parts) -> str:
        """Return the reason why the label cannot be probed; "" if it can be.

        Args:
            levels: level of each example (N,).
            parts: split of the examples.
        """
        for name, part in vars(parts).items():
            rows = part & self.known
            target = self.target[rows]
            if self.metric == "auc":
                numbers = [len(np.unique(levels[rows][target == value])) for value in (0, 1)]
                if min(numbers) < MIN_LEVELS:
                    return (f"the property is present in {numbers[1]} and absent in {numbers[0]} "
                            f"levels of the {name} part")
            elif len(np.unique(levels[rows])) < MIN_LEVELS or target.std() == 0:
                return f"the label is unknown or constant in the {name} part"
        return ""


def labels_of(examples: Examples, rows: np.ndarray) -> Iterator[Label]:
    """Yield all labels of the atlas, with values at the given rows of the examples.

    They describe the kinds of object (in view, ahead, offset, left the view), the player, the
    episode, and the agent's own actions at later steps.

    Args:
        examples: steps of whole episodes.
        rows: indices of the rows to probe, int (rows,).
    """
    table = examples.labels
    kinds = [name.removesuffix("_in_view") for name in table if name.endswith("_in_view")]

    def label(name: str, group: str, values: np.ndarray) -> Label:
        target = values[rows].astype(np.float64)
        known = target[np.isfinite(target)]
        return Label(name, group, target, "auc" if np.isin(known, (0, 1)).all() else "r2")

    for kind in kinds:
        yield label(f"{kind}_in_view", "object in view", table[f"{kind}_in_view"].to_numpy())
        yield label(f"{kind}_ahead", "object in view", examples.ahead(kind))
        for axis in ("dx", "dy"):
            name = f"{kind}_{axis}"
            yield label(name, "offset of the object", table[name].to_numpy())
    for kind in kinds:
        for k in STEPS_SINCE_VIEW:
            yield label(f"{kind}_left_view_{k}", "object that left the view",
                        examples.left_view(kind, k))
    of_kinds = {f"{kind}_{suffix}" for kind in kinds for suffix in ("in_view", "dx", "dy")}
    for name in table:
        if name not in of_kinds:
            yield label(name, "player and episode", table[name].to_numpy())
    for k in STEPS_AHEAD:
        actions = examples.action_ahead(k)
        for name, values in (("action", actions), ("jump", JUMPS[actions]),
                             ("right", RIGHT[actions])):
            target = np.where(actions < 0, np.nan, values)[rows]
            yield Label(f"{name}_ahead_{k}", "own action ahead", target,
                        "accuracy" if name == "action" else "auc")


def untrained_copy(policy: Policy, seed: int) -> Policy:
    """Return a copy of an agent with random weights (PyTorch's default initialisation). A trained
    initial state ``init_hx`` is kept."""
    other = copy.deepcopy(policy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in other.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return other


def representations_of(policy: Policy, examples: Examples, rows: np.ndarray, train: np.ndarray,
                       seed: int) -> dict[str, np.ndarray]:
    """Compute all representations of the given rows of the examples.

    Args:
        policy: the recorded agent.
        examples: steps of whole episodes.
        rows: ascending indices of the rows to probe, int (rows,).
        train: whether each of these rows is on a training level, bool (rows,).
        seed: seed of the untrained agent and of the PCA.

    Returns:
        Features by name of the representation, float32 (rows, F).
    """
    last_map = [layer.name for layer in all_layers(policy) if layer.is_map][-1]
    rng = np.random.default_rng(seed)
    fit = np.sort(rng.permutation(rows[train])[:PCA_EXAMPLES])
    frames = examples.frames(fit)
    pca = {FRAME: _fit_pca(frames.reshape(len(fit), -1), seed),
           LAST_MAP: _fit_pca(activations_of(policy, frames, [last_map])[last_map].cpu().flatten(1)
                              .numpy(), seed)}
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in (EMBEDDING, LAST_MAP, FRAME)}
    batches = np.array_split(rows, -(-len(rows) // _FRAMES_PER_BATCH))
    for batch in with_progress(batches, len(batches), "batch"):
        frames = examples.frames(batch)
        outputs = activations_of(policy, frames, ["embedder", last_map])
        chunks[EMBEDDING].append(outputs["embedder"].cpu().numpy())
        chunks[LAST_MAP].append(pca[LAST_MAP].transform(outputs[last_map].cpu().flatten(1).numpy()))
        chunks[FRAME].append(pca[FRAME].transform(np.float32(frames.reshape(len(frames), -1))))
    untrained = hidden_states_of(untrained_copy(policy, seed), examples)[rows]
    found = {HIDDEN: examples.hidden_out[rows],
             **{name: np.concatenate(parts) for name, parts in chunks.items()},
             UNTRAINED: untrained, ACTION_POSITION: _action_position(examples)[rows]}
    # Both blocks of columns get the same mean variance, so that the penalty treats them alike.
    scale = [found[name] / np.sqrt(found[name][train].var(axis=0).mean() + 1e-12)
             for name in (EMBEDDING, ACTION_POSITION)]
    return {**found, CURRENT: np.concatenate(scale, axis=1)}


def _fit_pca(features: np.ndarray, seed: int) -> PCA:
    number = min(NUM_COMPONENTS, *features.shape)
    return PCA(number, svd_solver="randomized", iterated_power=3, random_state=seed).fit(
        np.float32(features))


@torch.no_grad()
def hidden_states_of(policy: Policy, examples: Examples) -> np.ndarray:
    """Run an agent on the recorded frames of all examples; return the state that leaves each step
    (N, D)."""
    states = []
    episodes = np.unique(examples.episode)
    for episode in with_progress(episodes, len(episodes), "episode"):
        frames = examples.frames(np.flatnonzero(examples.episode == episode))
        embeddings = activations_of(policy, frames, ["embedder"])["embedder"][:, None]
        states.append(policy.sequence(embeddings, policy.initial_states(1), None)
                      .hidden_states[:, 0].cpu().numpy())
    return np.concatenate(states)


def _action_position(examples: Examples) -> np.ndarray:
    """Return features of the last action and of the player's position, float32 (N, F).

    The action is one-hot, and all 0 at the first step of an episode. Both coordinates of the
    position are divided by their standard deviations, and left out if they were not recorded.
    """
    last = np.where(examples.step > 0, np.roll(examples.actions, 1), -1)
    parts = [last[:, None] == np.arange(NUM_ACTIONS)]
    steps = examples.folder.all_steps(np.unique(examples.episode))
    if set(POSITION_COLUMNS) <= set(steps):
        position = steps.loc[steps["done"] == 0, list(POSITION_COLUMNS)].to_numpy()
        parts.append(position / (position.std(axis=0) + 1e-12))
    return np.concatenate(parts, axis=1, dtype=np.float32)


def probe_label(label: Label, representations: Mapping[str, np.ndarray], levels: np.ndarray,
                parts: Parts, seed: int, hidden_units: int, num_shuffles: int
                ) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray | None]:
    """Probe every representation for a label, and compare the hidden state with the baselines.

    Args:
        label: the label.
        representations: features by name (N, F).
        levels: level of each example (N,).
        parts: split of the examples.
        seed: seed of probes, shuffles and bootstrap.
        hidden_units: number of hidden units of the networks.
        num_shuffles: number of shuffles per probe.

    Returns:
        Rows of ``scores/<label>.csv``; the row of ``beyond/<label>.csv``; and the weights of the
        linear probe of the hidden state (D,), or None for the label "action".
    """
    known = label.known
    target, levels, parts = label.target[known], levels[known], parts[known]
    facts = {"num_examples": int(known.sum()), "num_levels": len(np.unique(levels))}
    probes: dict[tuple[str, str], Probe] = {}
    rows = []
    for name, features in representations.items():
        for kind, units in ((LINEAR, 0), (NETWORK, hidden_units)):
            probes[name, kind] = found = probe(
                features[known], target, levels, seed, regression=label.metric == "r2",
                num_shuffles=num_shuffles, hidden_units=units, parts=parts)
            scores = found.scores[found.scores["metric"] == label.metric]
            rows.append({"label": label.name, "group": label.group, "representation": name,
                         "probe": kind, **scores.iloc[0].to_dict(), "held_out": found.held_out,
                         **facts})
    table = pd.DataFrame(rows)[list(SCORES)]
    best = _better(table[table["representation"] == HIDDEN])
    other = _better(table[table["representation"].isin(BASELINES)])
    difference, p = compare_probes(
        probes[HIDDEN, best.probe], probes[other.representation, other.probe], label.metric,
        ClusterBootstrap(levels[parts.test], seed, RESAMPLINGS))
    beyond = pd.DataFrame([{
        "label": label.name, "group": label.group, "metric": label.metric, "probe": best.probe,
        "hidden_state": best.score, "low_95_hidden": best.low_95, "high_95_hidden": best.high_95,
        "baseline": other.representation, "baseline_probe": other.probe,
        "baseline_score": other.score, "difference": difference.value, "low_95": difference.low,
        "high_95": difference.high, "p": p, **facts}])
    return table, beyond, None if label.metric == "accuracy" else probes[HIDDEN, LINEAR].weights


def _better(rows: pd.DataFrame):
    """Return the row of the probe with the best score on the validation part."""
    return next(rows.sort_values("held_out", ascending=False, kind="stable").itertuples())


def with_claims(beyond: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the columns ``p_holm`` (p-values corrected by Holm's method for all
    labels) and ``claimed`` (whether the interval of ``difference`` lies above 0 and ``p_holm`` is
    at most 0.05)."""
    p_holm = holm(beyond["p"].to_numpy())
    return beyond.assign(p_holm=p_holm, claimed=(beyond["low_95"] > 0) & (p_holm <= LEVEL))


def better_probes(atlas: pd.DataFrame) -> pd.DataFrame:
    """Return one row per label and representation: that of the kind of probe with the better score
    on the validation part."""
    order = atlas.sort_values("held_out", ascending=False, kind="stable")
    return order.drop_duplicates(["label", "representation"]).sort_index()


def split_of(levels: np.ndarray, parts: Parts) -> dict[str, np.ndarray]:
    """Return the level seeds in each part of a split, by name of the part."""
    return {name: np.unique(levels[part]) for name, part in vars(parts).items()}


def checked_labels(labels: Sequence[Label], levels: np.ndarray, parts: Parts
                   ) -> tuple[list[Label], pd.DataFrame]:
    """Return the labels that can be probed, and a table of the others with the reasons."""
    problems = [label.problem(levels, parts) for label in labels]
    return ([label for label, problem in zip(labels, problems) if not problem],
            pd.DataFrame([(label.name, problem) for label, problem in zip(labels, problems)
                          if problem], columns=["label", "reason"]))
