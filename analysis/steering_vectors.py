"""Steering vectors from recorded states.

The vector can be added to the layer's output, for example with compare_interventions.py --patch
add@gru=vectors/right.npz,coefficient=-1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.layers import find_layer, layers_named
from agents.networks import Policy
from agents.reference_set import ReferenceSet, activations_of, game_name
from agents.rollout_files import RolloutFolder
from analysis.steps import check_episodes
from common.cli import count, output_file, seed
from common.errors import UserError, nearest
from common.game_constants import ACTION_LABELS, action_number
from common.options import (
    ComputeOptions,
    OutputFileOptions,
    ParameterComputeOptions,
    command,
    option,
    redefine,
)
from envs.objects import action_labels
from generative.flags import DataOptions
from interventions.config import DirectionFilesConfig
from interventions.flags import DirectionOptions
from interventions.hidden_states_folder import hidden_state_results
from interventions.probes import probe
from interventions.vectors import (
    AS_COMPUTED,
    RMS,
    SCALES,
    SteeringVector,
    check_classes,
    read_vectors,
    save_vectors,
    vector_of_probe,
    vectors_of_classes,
)

# Help texts for --split, by the word in front of the equals sign.
WORDS = {"action": "action=right,upright: states in which one of these actions was taken, against "
                   "all others",
         "value": "value=0.2: the fifth of the states with the largest values, against the fifth "
                  "with the smallest",
         "reward": "reward=8: states followed by a reward above 0 within 8 steps, against all "
                   "others",
         "cluster": "cluster=3: states in this cluster of hidden_analysis_precompute.py, against "
                    "states in other clusters"}

MEANS, PROBE = "means", "probe"
MAX_REFERENCE = 200  # number of states from which the RMS of a layer's outputs is computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteeringVectorOptions(DataOptions, DirectionOptions, OutputFileOptions,
                            ParameterComputeOptions):
    """Compute a steering vector from recorded states: the difference between the mean outputs of a
    layer for two classes of states, or the weights of a linear probe that separates the
    classes."""

    output_option: ClassVar[str] = "vector_file"

    agent_file: Path = option(help="file of the recorded agent")
    split: str = option(help="split of the states into two classes. " + "; ".join(WORDS.values()),
                        metavar="WORD=VALUE")
    layer: str = option("hidden_state", "layer of the agent, or 'all' for one vector per layer")
    method: str = option(
        MEANS, "means: difference between the means of the two classes; probe: weights of a "
               "logistic regression trained on some of the levels", choices=(MEANS, PROBE))
    scale: str = option(AS_COMPUTED, "unit: scale the vector to norm 1; rms: scale it to the root "
                                     "mean square of the layer's outputs", choices=SCALES)
    num_states: int = option(1000, "largest number of randomly drawn states per class", type=count)
    vector_file: Path = option(help="file to write, <name>.npz", type=output_file)
    seed: int = option(0, "seed of the choice of states and of the probe", type=seed)
    precision: str = redefine(ComputeOptions, "precision", default="float32")


def compute_vectors(options: SteeringVectorOptions) -> list[SteeringVector]:
    """Compute and write one vector per layer, and return them."""
    if options.vector_file.suffix != ".npz":
        raise UserError(f"--vector_file must end in .npz, unlike {options.vector_file}")
    options.check_output(lambda path: bool(read_vectors(path)))
    if options.compute.bfloat16:
        raise UserError("--precision bfloat16 would lose most digits of a difference of two "
                        "outputs; leave it at float32")
    policy = load_agent(options.agent_file, options.compute.device)
    layers = [layer.name for layer in layers_named(policy, options.layer)]
    states = read_classes(options)
    of_layers = (vectors_of_classes(policy, layers, states.frames, states.entering, states.is_in,
                                    states.levels, options.split, states.modes)
                 if options.method == MEANS else
                 vectors_of_probes(policy, layers, states, options.split, options.seed))
    rng = np.random.default_rng(options.seed)
    some = rng.permutation(len(states.frames))[:MAX_REFERENCE]
    reference = ReferenceSet(states.frames[some], states.entering[some])
    vectors = [of_layers[layer].scaled(
        options.scale,
        reference.rms(policy, find_layer(policy, layer)) if options.scale == RMS else None)
        for layer in layers]
    save_vectors(options.vector_file, vectors)
    print(f"{states.is_in.sum()} states with {options.split} and {(~states.is_in).sum()} others, "
          f"of {len(np.unique(states.levels))} levels")
    for vector in vectors:
        print(f"{vector.layer}: norm {np.linalg.norm(vector.vector):.3g}")
    print(f"wrote {options.vector_file}")
    return vectors


@dataclasses.dataclass(frozen=True)
class ClassifiedStates:
    """Recorded states in two classes, as inputs of the agent.

    Attributes:
        frames, entering, levels: see ``read_states``.
        is_in: whether each state is in the class that the split names, bool (n,).
        modes: distribution mode of the levels, if known.
    """

    frames: np.ndarray
    entering: np.ndarray
    levels: np.ndarray
    is_in: np.ndarray
    modes: list[str]


def read_classes(options: SteeringVectorOptions) -> ClassifiedStates:
    """Read some of the states that ``--split`` selects.

    Raises:
        UserError: if the recording was made with another agent, or see ``split_states``.
    """
    folder = RolloutFolder(Path(options.parameters.common.data_dir))
    num_episodes = options.parameters.get(DirectionFilesConfig).num_episodes
    folder.check_agent(options.agent_file)
    check_episodes(folder, num_episodes)
    steps = folder.all_steps(range(num_episodes))
    clusters = hidden_state_results(options.directions_folder, num_episodes)
    split = split_states(options.split, steps, lambda: clusters.read("clusters"),
                         action_labels(game_name(options.agent_file, folder.path)))
    check_classes(split.is_in, options.split)
    split = split.some(options.num_states, options.seed)
    modes = [folder.description()["env"]["distribution_mode"]] if folder.description() else []
    return ClassifiedStates(*read_states(folder, num_episodes, split.rows, steps), split.is_in,
                            modes)


def vectors_of_probes(policy: Policy, layers: Sequence[str], states: ClassifiedStates,
                      split: str, seed: int) -> dict[str, SteeringVector]:
    """Train a linear probe of each layer, print its scores, and return its weights by layer."""
    vectors = {}
    for layer in layers:
        outputs = activations_of(policy, states.frames, [layer], states.entering)[layer]
        result = probe(outputs.cpu().numpy(), states.is_in, states.levels, seed, num_shuffles=0)
        scores = ", ".join(f"{row.metric} {row.score:.3f} ({row.low_95:.3f} to "
                           f"{row.high_95:.3f}, without the layer {row.base:.3f})"
                           for row in result.scores.itertuples())
        assert result.weights is not None  # the probe is linear
        print(f"{layer}: scores of the probe on held-out levels: {scores}")
        vectors[layer] = vector_of_probe(policy, layer, result.weights, states.levels, split,
                                         states.modes)
    return vectors


@dataclasses.dataclass(frozen=True)
class Split:
    """Recorded states in two classes.

    Attributes:
        rows: row indices of the n states in the concatenated episodes, ascending (n,).
        is_in: whether each state is in the class that the split names (with ``value``, the class of
            the largest values), bool (n,).
    """

    rows: np.ndarray
    is_in: np.ndarray

    def some(self, number: int, seed: int) -> Split:
        """Return a random subset with at most ``number`` states of each class."""
        rng = np.random.default_rng(seed)
        chosen = np.sort(np.concatenate([
            rng.permutation(np.flatnonzero(self.is_in == which))[:number]
            for which in (True, False)]))
        return Split(self.rows[chosen], self.is_in[chosen])


def split_states(text: str, steps: pd.DataFrame, clusters: Callable[[], np.ndarray],
                 action_words: Sequence[str] = ACTION_LABELS) -> Split:
    """Split the non-terminal steps of a recording into two classes.

    Args:
        text: value of --split: ``action=``, ``value=``, ``reward=`` or ``cluster=`` and a value;
            WORDS has an example of each.
        steps: steps of all episodes, from ``RolloutFolder.all_steps``.
        clusters: function that reads the cluster of each step, -1 for none; called only for a split
            by cluster.
        action_words: names of Procgen's actions in the game.

    Returns:
        The states of both classes; states in neither class are left out.

    Raises:
        UserError: if the text cannot be parsed, if its number is out of range, if there is no such
            action or cluster, or if the number of cluster labels is not the number of steps.
    """
    word, equals, value = text.partition("=")
    if word not in WORDS or not equals:
        raise UserError(f"there is no split '{text}'{nearest(word, WORDS)}; an example is "
                        f"{WORDS.get(word, WORDS['action'])}")
    counted = steps["done"].to_numpy() == 0
    if word == "action":
        actions = [action_number(name, action_words) for name in value.split(",")]
        is_in = np.isin(steps["action"], actions)
    elif word == "value":
        share = _number(value, float, word)
        if not 0 < share <= 0.5:
            raise UserError(f"a split by value takes a share above 0 and up to 0.5, not {value}")
        values = steps["value"].to_numpy()
        low, high = np.quantile(values[counted], (share, 1 - share))
        is_in = values >= high
        counted &= is_in | (values <= low)
    elif word == "reward":
        is_in = _rewarded_within(steps, int(_number(value, int, word)))
    else:
        number, labels = _number(value, int, word), clusters()
        if len(labels) != len(steps):
            raise UserError(f"there are clusters of {len(labels)} states, but the recording has "
                            f"{len(steps)}; give the recording and the --num_episodes that were "
                            "analysed")
        if number not in labels or number < 0:
            raise UserError(f"there is no cluster {number}: they are numbered 0 to {labels.max()}")
        is_in = labels == number
        counted &= labels >= 0
    rows = np.flatnonzero(counted)
    return Split(rows, is_in[rows])


def _number(text: str, kind: type, word: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{word} takes a {'whole ' * (kind is int)}number, not '{text}'; an "
                        f"example is {WORDS[word]}") from None


def _rewarded_within(steps: pd.DataFrame, number: int) -> np.ndarray:
    """Return for each step whether one of the next ``number`` steps of the same episode has a
    reward above 0, bool (steps,).

    A reward is stored in the row of the frame that it arrives with, so the row itself is excluded.
    """
    if number < 1:
        raise UserError(f"a split by reward takes at least 1 step, not {number}")
    rows = np.arange(len(steps))
    rewarded = np.where(steps["reward"] > 0, rows, len(steps) + number)
    upcoming = np.append(np.minimum.accumulate(rewarded[::-1])[::-1], len(steps) + number)[1:]
    episodes = steps["episode"].to_numpy()
    last = np.searchsorted(episodes, episodes, side="right") - 1  # last row of the same episode
    return upcoming <= np.minimum(rows + number, last)


def read_states(folder: RolloutFolder, num_episodes: int, rows: np.ndarray,
                steps: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the inputs of the agent at some steps of the first ``num_episodes`` episodes.

    Args:
        rows: row indices of the n steps in the concatenated episodes, ascending (n,).
        steps: table of all steps of these episodes.

    Returns:
        Frames, uint8 (n, 64, 64, 3); the hidden states before these frames were seen, with D
        units, float32 (n, D); and level seeds, int64 (n,).

    Raises:
        UserError: if a file is missing or damaged, or if tables and arrays differ in length.
    """
    frames, entering, begin = [], [], 0
    for number in range(num_episodes):
        files = folder.array_files(number)
        length = files.log_probs.shape[0]
        inside = rows[(rows >= begin) & (rows < begin + length)] - begin
        begin += length
        if len(inside):
            episode = files.frames.rows(0, length)[inside]
            frames.append(np.moveaxis(episode, 1, -1))
            entering.append(files.hidden_states.rows(0, length)[inside])
    if begin != len(steps):
        raise UserError(f"the tables of {folder.path} have {len(steps)} rows for {begin} recorded "
                        "steps; record these episodes again")
    levels = steps["level_seed"].to_numpy()[rows].astype(np.int64)
    return np.concatenate(frames), np.concatenate(entering), levels


main = command(SteeringVectorOptions, compute_vectors)

if __name__ == "__main__":
    raise SystemExit(main())
