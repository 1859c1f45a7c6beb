"""Scores of dictionaries of the hidden state, names of their features, and ablation of features.

Levels are split into three parts (``interventions.probes.split_levels``). Dictionaries are fitted
on the first. On the second, each feature is assigned the label that its activation predicts best,
and the features with the strongest effect on the policy are selected for ablation. All numbers are
measured on the third part, or in the real game on further levels.

- A feature is *named* after its label if the AUC of its activation on the third part differs from
  0.5 by at least ``NAME_MARGIN``, its 95 % interval excludes 0.5, and its p-value, corrected by
  Holm's method over all features of the dictionary, is at most 0.05. A feature with an AUC
  below 0.5 is named after the absence of the label. The p-value comes from a sign-flip test over
  levels of the covariance between rank and label. As a control, the whole procedure is repeated
  with labels that were shuffled between levels.
- *Ablation* of a feature subtracts its activation times its atom from the state. On recorded
  states, controls subtract the same amount along random directions with the covariance of the
  states. In the real game, all features share their controls, see ``ablation_conditions``.

Letters in shape comments: N states, D units, F features, K labels, A actions, C directions, E
levels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from agents.layers import STATE
from agents.networks import Policy
from agents.patch import Apply, Patch
from agents.similarity import kl_divergence
from agents.testbed import Condition
from analysis.memory.dictionaries import Dictionary, random_directions
from analysis.memory.labels import JUMPS, LEFT, RIGHT, Examples
from interventions.probes import Parts, auc_of_draws
from stats.bootstrap import ClusterBootstrap, by_episode
from stats.effects import FLIPS_PER_COMPARISON, MIN_FLIPS
from stats.significance import LEVEL, holm, sign_flip_p

NAME_MARGIN = 0.2  # smallest distance of the AUC from 0.5 for a name
NO_LABEL = "no label"
MIN_LEVELS = 5  # minimum number of levels per part with positive (and negative) examples
NUM_DIRECTIONS = 999  # controls of an ablation on recorded states
SOON, EARLIER = 8, 8  # steps, see ``binary_labels``
_DIRECTIONS_AT_A_TIME = 50
ABLATION = "ablation"  # pattern of the conditions of ``ablation_conditions``
_IN_VIEW = "_in_view"


def binary_labels(examples: Examples) -> pd.DataFrame:
    """Return the labels that features may be named after: 0, 1 or NaN (N, K).

    Each kind of object has three labels: ``<kind>_in_view``, ``<kind>_ahead`` (see
    ``Examples.ahead``) and ``<kind>_left_view`` (see ``Examples.left_view``, with k = EARLIER). The
    other labels describe the player's motion and contact with the ground, whether the player jumped
    in the last SOON steps, whether the episode ends within SOON steps, whether and why it fails,
    and the action at this step.
    """
    labels = examples.labels
    columns: dict[str, np.ndarray] = {}
    for name in labels:
        if name.endswith(_IN_VIEW):
            kind = name.removesuffix(_IN_VIEW)
            columns[name] = labels[name].to_numpy()
            columns[f"{kind}_ahead"] = examples.ahead(kind)
            columns[f"{kind}_left_view"] = examples.left_view(kind, EARLIER)
        elif name == "on_ground" or name.startswith("fails"):
            columns[name] = labels[name].to_numpy()
    for name, direction in (("velocity_x", "right"), ("velocity_y", "up")):
        if name in labels:
            columns[f"moves_{direction}"] = labels[name].gt(0.01)
    if "velocity_y" in labels:
        columns["falls"] = labels["velocity_y"].lt(-0.01)
    if "steps_since_jump" in labels:
        columns["jumped"] = labels["steps_since_jump"].le(SOON)
    columns["ends_soon"] = labels["steps_to_end"].le(SOON)
    for name, actions in (("jump", JUMPS), ("right", RIGHT), ("left", LEFT)):
        columns[f"action_{name}"] = actions[examples.actions]
    return pd.DataFrame(columns).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SplitStates:
    """States of a recording, split by level.

    Attributes:
        states: hidden states on the policy's device (N, D).
        levels: level of each state, int64 (N,).
        parts: split of the states into three parts: the first to fit dictionaries (``train``), the
            second to choose labels and features (``penalty``), the third to test (``test``).
    """

    states: Tensor
    levels: np.ndarray
    parts: Parts

    @functools.cached_property
    def train(self) -> Tensor:
        return self.states[self.parts.train]

    @functools.cached_property
    def chosen_on(self) -> Tensor:
        return self.states[self.parts.penalty]

    @functools.cached_property
    def test(self) -> Tensor:
        return self.states[self.parts.test]

    @property
    def test_levels(self) -> np.ndarray:
        return self.levels[self.parts.test]

    def random_directions(self, number: int, seed: int | tuple[int, ...]) -> Tensor:
        """Draw vectors from a Gaussian with the covariance of the training states, and return them
        scaled to norm 1 (number, D)."""
        centred = (self.train - self.train.mean(dim=0)).cpu().numpy()
        return torch.from_numpy(random_directions(
            centred, number, np.random.default_rng(seed))).to(self.states)


def policy_kl(policy: Policy, states: Tensor, altered: Tensor) -> Tensor:
    """Compute KL(policy at ``states`` ‖ policy at ``altered``), in nats.

    Args:
        policy: the agent.
        states, altered: states that the heads read (…, N, D).

    Returns:
        KL(intact ‖ altered) (…, N).
    """
    intact, other = (torch.log_softmax(policy.fc_policy(read), dim=-1)
                     for read in (states, altered))
    return kl_divergence(intact, other).clamp(min=0)


@torch.no_grad()
def score_dictionary(dictionary: Dictionary, policy: Policy, data: SplitStates,
                     seed: int) -> dict[str, float]:
    """Measure how well a dictionary reconstructs held-out states.

    Args:
        dictionary: the dictionary.
        policy: the agent.
        data: states; the third part is reconstructed.
        seed: seed of the bootstrap and of the random directions.

    Returns:
        Scores by name:

        - ``variance_explained``, ``variance_low``, ``variance_high``: 1 minus the squared error of
          the reconstructions divided by that of the training mean, and its interval
        - ``l0``: mean number of active features
        - ``dead``: share of features that are active in none of these states
        - ``kl``, ``kl_low``, ``kl_high``: mean KL divergence of the policy, in nats, if its heads
          read the reconstructions, and its interval
        - ``kl_random``: the same with errors of equal norm in random directions
        - ``kl_recovered``: 1 minus ``kl`` divided by the KL divergence if every state is replaced
          by the training mean
    """
    states, levels = data.test, data.test_levels
    mean = data.train.mean(dim=0)
    activations = dictionary.encode(states)
    reconstructed = dictionary.decode(activations)
    errors = (states - reconstructed).square().sum(dim=1)
    deviations = (states - mean).square().sum(dim=1)
    noise = errors.sqrt().unsqueeze(1) * data.random_directions(len(states), seed)
    kl, kl_random, kl_mean = (policy_kl(policy, states, altered).cpu().numpy() for altered in (
        reconstructed, states + noise, mean.expand_as(states)))
    bootstrap = ClusterBootstrap(levels, seed)
    sums = by_episode(levels, torch.stack([errors, deviations]).cpu().numpy())  # (E, 2)

    def explained(draws: np.ndarray) -> np.ndarray:
        drawn = draws @ sums
        return 1 - drawn[:, 0] / drawn[:, 1]

    low, high = bootstrap.interval_of(explained)
    kl_low, kl_high = bootstrap.interval(kl[None])[:, 0]
    active = activations != 0
    return {"variance_explained": float(explained(np.ones((1, len(sums))))[0]),
            "variance_low": low, "variance_high": high,
            "l0": float(active.sum(dim=1).float().mean()),
            "dead": float((~active.any(dim=0)).float().mean()),
            "kl": float(kl.mean()), "kl_low": kl_low, "kl_high": kl_high,
            "kl_random": float(kl_random.mean()),
            "kl_recovered": float(1 - kl.mean() / kl_mean.mean())}


def label_auc(activations: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute the AUC of every feature for every label; ties count half.

    Args:
        activations: activations (N, F).
        labels: 0, 1, or NaN for examples that are left out (N, K).

    Returns:
        AUC, float64 (F, K); NaN for labels with a single class.
    """
    auc = np.full((activations.shape[1], labels.shape[1]), np.nan)
    known, group = np.unique(~np.isnan(labels), axis=1, return_inverse=True)
    for number, rows in enumerate(known.T):
        columns = np.flatnonzero(group.reshape(-1) == number)
        ranks = rankdata(activations[rows], axis=0)  # (n, F)
        of_label = labels[rows][:, columns].astype(np.float64)
        positive = of_label.sum(axis=0)
        pairs = positive * (rows.sum() - positive)
        wins = ranks.T @ of_label - positive * (positive + 1) / 2
        auc[:, columns] = np.divide(wins, pairs, out=np.full(wins.shape, np.nan), where=pairs > 0)
    return auc


def usable_labels(labels: np.ndarray, levels: np.ndarray, parts: Parts) -> np.ndarray:
    """Return which labels have positive and negative examples in at least MIN_LEVELS levels of the
    second and of the third part, bool (K,).

    Args:
        labels: 0, 1 or NaN (N, K).
        levels: level of each example (N,).
        parts: split of the examples.
    """
    enough = np.ones(labels.shape[1], bool)
    for part in (parts.penalty, parts.test):
        for value in (0, 1):
            has = by_episode(levels[part], (labels[part] == value).T) > 0  # (E, K)
            enough &= has.sum(axis=0) >= MIN_LEVELS
    return enough


def name_features(activations: np.ndarray, labels: pd.DataFrame, levels: np.ndarray, parts: Parts,
                  seed: int) -> pd.DataFrame:
    """Choose a label for each feature on the second part of the levels, and test it on the third.

    Args:
        activations: activations of all states (N, F).
        labels: table of 0, 1 and NaN (N, K).
        levels: level of each state (N,).
        parts: split of the states.
        seed: seed of the sign flips and of the bootstrap.

    Returns:
        A row per feature; all numbers are from the third part:

        - ``feature``: number of the feature
        - ``frequency``: share of states in which the feature is active
        - ``mean_activation``: mean activation when active
        - ``label``: label chosen on the second part; NO_LABEL for a feature whose activation is
          constant there, or if no label is usable, see ``usable_labels``
        - ``auc``, ``p``, ``p_holm``: AUC of the activation for the label, and its p-values
        - ``low_95``, ``high_95``: interval of the AUC; NaN if the AUC or the p-value already rules
          out a name
        - ``named``: whether the feature is named after the label
        - ``base``: share of states with the label
        - ``precision``: share of states with the label among those in which the feature is active
    """
    values = labels.to_numpy()
    usable = np.flatnonzero(usable_labels(values, levels, parts))
    chosen_on = activations[parts.penalty]
    tested, tested_levels = activations[parts.test], levels[parts.test]
    active = tested != 0
    count = active.sum(axis=0)
    table = pd.DataFrame({
        "feature": np.arange(tested.shape[1]), "frequency": active.mean(axis=0),
        "mean_activation": tested.sum(axis=0) / np.maximum(count, 1), "label": NO_LABEL,
        "auc": np.nan, "low_95": np.nan, "high_95": np.nan, "p": 1.0, "base": np.nan,
        "precision": np.nan})
    varying = np.flatnonzero((chosen_on != chosen_on[0]).any(axis=0))
    of_label = np.zeros((len(tested), 0))
    if len(usable) and len(varying):
        distance = np.abs(label_auc(chosen_on[:, varying], values[parts.penalty][:, usable]) - 0.5)
        columns = usable[distance.argmax(axis=1)]
        of_label = values[parts.test][:, columns]  # (n, features)
        for feature, target in zip(varying, of_label.T):
            when_active = target[active[:, feature] & ~np.isnan(target)]
            table.loc[feature, ["auc", "base", "precision"]] = [
                label_auc(tested[:, [feature]], target[:, None])[0, 0], np.nanmean(target),
                when_active.mean() if len(when_active) else np.nan]
        table.loc[varying, "label"] = labels.columns[columns]
        table.loc[varying, "p"] = _auc_p(tested[:, varying], of_label, tested_levels, seed)
    table["p_holm"] = holm(table["p"].to_numpy())
    candidates = (np.abs(table["auc"] - 0.5) >= NAME_MARGIN) & (table["p_holm"] <= LEVEL)
    for feature, target in zip(varying, of_label.T):
        if candidates[feature]:
            rows = ~np.isnan(target)
            table.loc[feature, ["low_95", "high_95"]] = ClusterBootstrap(
                tested_levels[rows], seed).interval_of(auc_of_draws(
                    tested[rows, feature], target[rows] == 1, tested_levels[rows]))
    table["named"] = candidates & ((table["low_95"] > 0.5) | (table["high_95"] < 0.5))
    return table


def _auc_p(activations: np.ndarray, labels: np.ndarray, levels: np.ndarray,
           seed: int) -> np.ndarray:
    """Compute p-values (F,) of a sign-flip test over levels that the AUC of each feature is 0.5.

    The AUC minus 0.5 is proportional to the sum of (rank - mean rank) * (label - mean label) over
    all examples. The test flips the signs of the levels' contributions to this sum at random.

    Args:
        activations: activations (N, F).
        labels: label of each feature: 0, 1, or NaN for examples that are left out (N, F).
        levels: level of each example (N,).
    """
    products = np.zeros(activations.shape)
    for column, label in enumerate(labels.T):
        rows = ~np.isnan(label)
        ranks = rankdata(activations[rows, column])
        products[rows, column] = (ranks - ranks.mean()) * (label[rows] - label[rows].mean())
    sums = by_episode(levels, products.T)  # (E, F)
    return sign_flip_p(sums, max(MIN_FLIPS, FLIPS_PER_COMPARISON * sums.shape[1]), seed)


@torch.no_grad()
def ablation_kl(policy: Policy, states: Tensor, amounts: Tensor, directions: Tensor) -> Tensor:
    """Compute KL(policy in the original state ‖ policy in the altered state), in nats.

    Altered states are the states minus ``amounts`` times one direction.

    Args:
        policy: the agent.
        states: states (N, D).
        amounts: amount to subtract from each state (N,).
        directions: unit vectors (C, D).

    Returns:
        KL divergences (C, N).
    """
    result = states.new_zeros(len(directions), len(states))
    rows = torch.nonzero(amounts).squeeze(1)
    for begin in range(0, len(directions), _DIRECTIONS_AT_A_TIME):
        some = directions[begin:begin + _DIRECTIONS_AT_A_TIME]
        altered = states[rows] - amounts[rows, None] * some.unsqueeze(1)  # (c, n, D)
        result[begin:begin + len(some), rows] = policy_kl(policy, states[rows], altered)
    return result


@torch.no_grad()
def strongest_features(dictionary: Dictionary, policy: Policy, data: SplitStates,
                       number: int) -> np.ndarray:
    """Return the numbers of the features whose ablation changes the policy most, by mean KL on the
    second part of the levels, int (features,), strongest first.

    Args:
        dictionary: the dictionary.
        policy: the agent.
        data: states.
        number: largest number of features; features without any effect are left out.
    """
    activations = dictionary.encode(data.chosen_on)
    strength = torch.stack([
        ablation_kl(policy, data.chosen_on, activations[:, feature], atom[None]).mean()
        for feature, atom in enumerate(dictionary.atoms)])
    order = strength.argsort(descending=True)[:number]
    return order[strength[order] > 0].cpu().numpy()


@torch.no_grad()
def score_ablations(dictionary: Dictionary, policy: Policy, data: SplitStates,
                    features: np.ndarray, seed: int) -> pd.DataFrame:
    """Compare the ablation of features on held-out recorded states with random directions.

    Args:
        dictionary: the dictionary.
        policy: the agent.
        data: states; the third part is altered.
        features: numbers of the features, strongest first, int (features,).
        seed: seed of the directions and of the bootstrap.

    Returns:
        A row per feature:

        - ``feature``, ``rank``: number of the feature, and its rank from 1
        - ``kl``, ``kl_low``, ``kl_high``: mean KL divergence over all states, and its interval
        - ``kl_control``: median of the mean KL divergence over NUM_DIRECTIONS random directions
        - ``p_kl``: (1 + number of these directions with at least this KL) / (1 + NUM_DIRECTIONS)
        - ``p_kl_holm``: ``p_kl`` corrected by Holm's method
        - ``kl_claimed``: whether ``p_kl_holm`` is at most 0.05
    """
    bootstrap, rows = ClusterBootstrap(data.test_levels, seed), []
    activations = dictionary.encode(data.test)
    directions = data.random_directions(NUM_DIRECTIONS, seed)
    for rank, feature in enumerate(features, 1):
        amounts = activations[:, feature]
        own, controls = (ablation_kl(policy, data.test, amounts, along).cpu().numpy()
                         for along in (dictionary.atoms[feature][None], directions))
        low, high = bootstrap.interval(own)[:, 0]
        of_controls = controls.mean(axis=1)
        rows.append((feature, rank, own.mean(), low, high, np.median(of_controls),
                     (1 + (of_controls >= own.mean()).sum()) / (1 + len(directions))))
    table = pd.DataFrame(rows, columns=["feature", "rank", "kl", "kl_low", "kl_high",
                                        "kl_control", "p_kl"])
    table["p_kl_holm"] = holm(table["p_kl"].to_numpy())
    table["kl_claimed"] = table["p_kl_holm"] <= LEVEL
    return table


def splice(dictionary: Dictionary, policy: Policy) -> Patch:
    """Return the patch that replaces the hidden state by its reconstruction, at every step.

    The reconstructions for a recurrent agent are clipped to [-1, 1], the range of a GRU's states.
    Without clipping, states could grow from step to step without limit.
    """
    return Apply(STATE, lambda states: policy.clamp_states(dictionary.reconstruct(states)))


def ablate(dictionary: Dictionary, policy: Policy, feature: int,
           direction: Tensor | None = None) -> Patch:
    """Return the patch that subtracts the activation of a feature along a direction, at every step.

    States of a recurrent agent are clipped to [-1, 1], see ``splice``.

    Args:
        dictionary: the dictionary.
        policy: the agent.
        feature: number of the feature.
        direction: unit vector (D,); by default, the feature's atom, which ablates the feature.
    """
    along = dictionary.atoms[feature] if direction is None else direction

    def subtract(states: Tensor) -> Tensor:
        return policy.clamp_states(states - dictionary.encode(states)[:, feature, None] * along)

    return Apply(STATE, subtract)


def ablation_conditions(dictionary: Dictionary, policy: Policy, features: np.ndarray,
                        labels: Mapping[int, str], data: SplitStates, num_controls: int,
                        seed: int) -> list[Condition]:
    """Return a condition per feature, and the controls that all features share.

    Controls subtract random directions, scaled by the activations of the feature with the largest
    mean activation in the training states. In these states, no feature therefore moves states
    farther on average than its controls, and the test is conservative. This needs activations that
    are not negative.

    Args:
        dictionary: the dictionary.
        policy: the agent.
        features: numbers of the features to ablate, int (features,).
        labels: name of each feature in figures and reports, by number of the feature.
        data: states.
        num_controls: number of random directions.
        seed: seed of the directions.
    """
    means = dictionary.encode(data.train).mean(dim=0)[torch.as_tensor(features)]
    largest = int(features[int(means.argmax())])
    conditions: list[Condition] = [
        Condition(f"feature_{feature}", labels[feature], ABLATION,
                  patches=[ablate(dictionary, policy, feature)],
                  settings={"feature": int(feature)}) for feature in features]
    return conditions + [
        Condition(f"control_{number}", f"random direction {number}", ABLATION, control=True,
                  patches=[ablate(dictionary, policy, largest, direction)],
                  settings={"amounts_of": largest, "seed": seed})
        for number, direction in enumerate(data.random_directions(num_controls, (seed, 1)))]


def top_examples(activations: np.ndarray, episodes: np.ndarray, number: int) -> np.ndarray:
    """Return the indices of at most ``number`` rows with the largest activations of a feature.

    The strongest row of each episode comes before all further rows, so that the examples differ.
    Both groups are in descending order of activation. Rows without activation are left out.

    Args:
        activations: activations of the feature (N,).
        episodes: episode of each row (N,).
    """
    order = np.argsort(-activations, kind="stable")
    order = order[activations[order] > 0]
    _, first = np.unique(episodes[order], return_index=True)
    apart = np.sort(first)
    return order[np.concatenate([apart, np.setdiff1d(np.arange(len(order)), apart)])[:number]]
