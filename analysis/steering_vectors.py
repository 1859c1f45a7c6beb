"""Compute a steering vector from recorded states: the difference between the mean outputs of a
layer for two classes of states, or the weights of a linear probe that separates the classes.

The vector can be added to the layer's output, for example with compare_interventions.py --patch
add@gru=vectors/right.npz,coefficient=-1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.layers import find_layer, layers_named
from agents.reference_set import ReferenceSet, activations_of
from agents.rollout_files import RolloutFolder
from analysis.steps import check_episodes
from common.cli import (
    Parser,
    add_compute_flags,
    add_output_file_flag,
    add_parameter_set_flag,
    check_output,
    count,
    seed,
)
from common.devices import resolve_compute
from common.errors import UserError, nearest, script_main
from common.game_constants import ACTION_LABELS, NUM_ACTIONS
from generative.flags import add_data_flag
from interventions.config import DirectionFilesConfig
from interventions.flags import add_direction_flags, directions_folder
from interventions.hidden_states_folder import hidden_state_results
from interventions.probes import probe
from interventions.vectors import (
    AS_COMPUTED,
    RMS,
    SCALES,
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


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="file of the recorded agent")
    add_parameter_set_flag(flags)
    add_data_flag(flags)
    add_direction_flags(flags)
    flags.add_argument("--split", required=True, metavar="WORD=VALUE",
                       help="split of the states into two classes. " + "; ".join(WORDS.values()))
    flags.add_argument("--layer", default="hidden_state",
                       help="layer of the agent, or 'all' for one vector per layer")
    flags.add_argument("--method", choices=(MEANS, PROBE), default=MEANS,
                       help="means: difference between the means of the two classes; probe: "
                            "weights of a logistic regression trained on some of the levels")
    flags.add_argument("--scale", choices=SCALES, default=AS_COMPUTED,
                       help="unit: scale the vector to norm 1; rms: scale it to the root mean "
                            "square of the layer's outputs")
    flags.add_argument("--num_states", type=count, default=1000,
                       help="largest number of randomly drawn states per class")
    add_output_file_flag(flags, "--vector_file", required=True, help="file to write, <name>.npz")
    flags.add_argument("--seed", type=seed, default=0,
                       help="seed of the choice of states and of the probe")
    add_compute_flags(flags, in_parameter_set=True)
    flags.set_defaults(precision="float32")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, _, parameters = parser().read(argv)
    common = parameters.common
    if args.vector_file.suffix != ".npz":
        raise UserError(f"--vector_file must end in .npz, unlike {args.vector_file}")
    check_output(args.vector_file, lambda path: bool(read_vectors(path)), args.overwrite,
                 "--vector_file")
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    if compute.bfloat16:
        raise UserError("--precision bfloat16 would lose most digits of a difference of two "
                        "outputs; leave it at float32")
    policy = load_agent(args.agent_file, compute.device)
    layers = [layer.name for layer in layers_named(policy, args.layer)]
    folder = RolloutFolder(Path(common.data_dir))
    num_episodes = parameters.get(DirectionFilesConfig).num_episodes
    folder.check_agent(args.agent_file)

    check_episodes(folder, num_episodes)
    steps = folder.all_steps(range(num_episodes))
    clusters = hidden_state_results(directions_folder(args, parameters), num_episodes)
    split = split_states(args.split, steps, lambda: clusters.read("clusters"))
    check_classes(split.is_in, args.split)
    split = split.some(args.num_states, args.seed)
    frames, entering, levels = read_states(folder, num_episodes, split.rows, steps)
    modes = [folder.description()["env"]["distribution_mode"]] if folder.description() else []
    if args.method == MEANS:
        of_layers = vectors_of_classes(policy, layers, frames, entering, split.is_in, levels,
                                       args.split, modes)
    else:
        of_layers = {}
        for layer in layers:
            outputs = activations_of(policy, frames, [layer], entering)[layer].cpu().numpy()
            result = probe(outputs, split.is_in, levels, args.seed, num_shuffles=0)
            scores = ", ".join(f"{row.metric} {row.score:.3f} ({row.low_95:.3f} to "
                               f"{row.high_95:.3f}, without the layer {row.base:.3f})"
                               for row in result.scores.itertuples())
            assert result.weights is not None  # the probe is linear
            print(f"{layer}: scores of the probe on held-out levels: {scores}")
            of_layers[layer] = vector_of_probe(policy, layer, result.weights, levels, args.split,
                                               modes)
    some = np.random.default_rng(args.seed).permutation(len(frames))[:MAX_REFERENCE]
    reference = ReferenceSet(frames[some], entering[some])
    vectors = [of_layers[layer].scaled(
        args.scale, reference.rms(policy, find_layer(policy, layer)) if args.scale == RMS else None)
        for layer in layers]
    save_vectors(args.vector_file, vectors)

    print(f"{split.is_in.sum()} states with {args.split} and {(~split.is_in).sum()} others, of "
          f"{len(np.unique(levels))} levels")
    for vector in vectors:
        print(f"{vector.layer}: norm {np.linalg.norm(vector.vector):.3g}")
    print(f"wrote {args.vector_file}")


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


def split_states(text: str, steps: pd.DataFrame, clusters: Callable[[], np.ndarray]) -> Split:
    """Split the non-terminal steps of a recording into two classes.

    Args:
        text: value of --split: ``action=``, ``value=``, ``reward=`` or ``cluster=`` and a value;
            WORDS has an example of each.
        steps: steps of all episodes, from ``RolloutFolder.all_steps``.
        clusters: function that reads the cluster of each step, -1 for none; called only for a split
            by cluster.

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
        is_in = np.isin(steps["action"], [_action(name) for name in value.split(",")])
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


def _action(name: str) -> int:
    if name.isdecimal() and int(name) < NUM_ACTIONS:
        return int(name)
    if name not in ACTION_LABELS:
        raise UserError(f"there is no action '{name}'{nearest(name, ACTION_LABELS)}; numbers from "
                        f"0 to {NUM_ACTIONS - 1} are also accepted")
    return ACTION_LABELS.index(name)


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
        folder: folder of the recording.
        num_episodes: number of episodes.
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


if __name__ == "__main__":
    raise SystemExit(main())
