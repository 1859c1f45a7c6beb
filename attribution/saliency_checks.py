"""Compare predictions with the effects of removed objects, see ``SaliencyChecksOptions``.

For recorded frames and objects in view, the object is removed, and the agent's value and the
log-probability of its recorded action are read some steps later. See
``attribution.checking.object_effects`` (effects), ``effect_predictions`` (predictors) and
``prediction_scores`` (scores). Worlds of simulators with worlds are rendered by the game.

Results of each group of levels are stored, so that an interrupted run resumes. The folder holds::

    settings.json           settings
    levels/<number>.npz     measured and predicted effects of each group of levels
    pairs.csv               numbers of pairs
    scores.csv              scores of all predictors
    differences.csv         paired differences between predictors
    randomisation.csv       signs of predictions with random weights
    checks.png, report.md   figure and report
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from agents.outputs import TAKEN, VALUE, outputs_named
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from attribution.checking.counterfactual_predictions import (
    COUNTERFACTUAL,
    COUNTERFACTUAL_METHODS,
    SAMPLED,
    counterfactual_predictions,
)
from attribution.checking.effect_predictions import (
    SIMULATOR_METHODS,
    Scene,
    agent_names,
    agent_predictions,
    simulator_predictions,
)
from attribution.checking.object_effects import (
    Pair,
    choose_pairs,
    measure_effects,
    replay_pairs,
)
from attribution.checking.object_scores import kinds_in
from attribution.checking.prediction_report import plot, randomisation_table, report
from attribution.checking.prediction_scores import (
    BASELINES,
    Effects,
    pair_counts,
    score_predictions,
)
from attribution.checking.randomisation import cascade
from attribution.config import ANALYSES
from attribution.layers import Bottleneck, find_bottlenecks, short_names
from attribution.recordings import Recording
from common.cli import count
from common.devices import Compute
from common.errors import UserError
from common.files import sha256
from common.options import command, option, redefine
from common.palette import DPI
from common.progress import with_progress
from common.results import Array, Entry, File, Npz, ResultStore, Schema, Table, Text
from envs.wide_view import WorldView
from generative.filling import check_worlds
from generative.flags import SimulatorOptions
from generative.frozen_agent import FrozenAgent
from generative.rendered_worlds import check_rendering
from generative.simulator import Simulator

LAGS = (0, 1, 2, 4, 8)
OUTPUTS = (VALUE, TAKEN)
DRAWS = 4  # agents with random weights
_LEVELS_PER_GROUP = 4
_WALL = "wall"
_GROUP = Npz({
    "levels": Array(np.int64, "N"), "rows": Array(np.int64, "N"), "kinds": Array(np.str_, "N"),
    "effects": Array(np.float64, f"2 {len(OUTPUTS)} {len(LAGS)} N", finite=False),
    "apart": Array(np.float64, f"{len(LAGS)} N"),
    "predictions": Array(np.float64, f"M {len(OUTPUTS)} {len(LAGS)} N"),
    "randomised": Array(np.float64, f"X M {len(OUTPUTS)} {len(LAGS)} R")})
CHECKS = Schema(
    "checks of saliency maps (attribution.saliency_checks)",
    "python -m attribution.saliency_checks",
    items={"group": Entry("levels/{:0>5}.npz", _GROUP)}, results={
        **{name: Entry(f"{name}.csv", Table({})) for name in (
            "pairs", "scores", "differences", "randomisation")},
        "figure": Entry("checks.png", File()), "report": Entry("report.md", Text())})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaliencyChecksOptions(SimulatorOptions):
    """Which map predicts the game? Compare predictions of the agent alone, and through the
    simulator, with the effects of objects that are removed from the real game."""

    hidden: ClassVar[Collection[str]] = (*SimulatorOptions.hidden, "batch_size")

    layers: tuple[str, ...] | None = option(
        None, "short names or paths of layers from which the agent alone predicts; if not given, "
              "the second layer with a short name, such as block2 of IMPALA", metavar="LAYER")
    num_pairs: int = option(
        600, "number of pairs of a frame and an object; all levels of the recording are used if "
             "they have fewer", type=count)
    num_randomised: int = option(
        40, "number of these pairs for which agents with random weights predict, too")
    counterfactual: bool = option(
        False, "also predict from counterfactual maps of simulators with worlds and a trained "
               "prior, which takes longer than everything else")
    overwrite: bool = option(False, "delete the previous contents of the output folder")
    output_dir: Path = option(ANALYSES / "saliency_checks", "folder to write to")
    precision: str = redefine(SimulatorOptions, "precision", default="float32")


class Study:
    """Measurement and prediction of effects.

    Args:
        simulator: the simulator with its agent, which is replaced while agents with random weights
            predict.
        compute: device and precision.
        recording: the recording.
        layers: layers from which the agent alone predicts.
        num_draws: X, number of agents with random weights.
        seed: seed of all random draws.
        fills: whether to predict from counterfactual maps as well.

    Attributes:
        names: names of the predictors (M,).
    """

    def __init__(self, simulator: Simulator, compute: Compute, recording: Recording,
                 layers: Sequence[Bottleneck], num_draws: int, seed: int, fills: bool = False):
        self._simulator, self._compute, self._recording = simulator, compute, recording
        self._layers, self._seed, self._own = layers, seed, simulator.agent
        self._outputs = outputs_named(OUTPUTS)
        policy = simulator.agent.policy
        sizes = policy.hidden_state_size, policy.fc_policy.out_features
        self._random = [FrozenAgent(list(cascade(policy, seed + 1000 * draw))[-1], *sizes)
                        for draw in range(num_draws)]
        self.game = recorded_game(recording.folder)
        self.kinds = [kind for kind in kinds_in(self.game)
                      if kind.name != _WALL and not kind.is_player]
        self._fills = fills
        self.names = (*agent_names(layers), *SIMULATOR_METHODS,
                      *COUNTERFACTUAL_METHODS * self._fills)

    def group(self, episodes: Sequence[int], num_pairs: int, num_randomised: int
              ) -> dict[str, np.ndarray]:
        """Measure and predict the effects of objects in a group of levels.

        Args:
            episodes: numbers of the episodes.
            num_pairs: maximum number of pairs, N.
            num_randomised: number of these pairs for which random agents predict, R.

        Returns:
            The arrays of a group's file.
        """
        recording, shape = self._recording, (len(OUTPUTS), len(LAGS))
        pairs = [pair for episode in episodes for pair in choose_pairs(
            recording, episode, self.kinds, self._simulator.config.num_init_steps, max(LAGS),
            self._seed)][:num_pairs]
        few = pairs[:num_randomised]
        arrays = {
            "levels": np.array([pair.episode for pair in pairs], np.int64),
            "rows": np.array([pair.row for pair in pairs], np.int64),
            "kinds": np.array([pair.thing.kind.name for pair in pairs], np.str_),
            "effects": np.zeros((2, *shape, 0)), "apart": np.zeros((len(LAGS), 0)),
            "predictions": np.zeros((len(self.names), *shape, 0)),
            "randomised": np.zeros((len(self._random), len(self.names), *shape, 0))}
        if pairs:
            scene = self._scene(pairs)
            arrays |= {
                "effects": measure_effects(self._own.policy, self._compute, scene.replays,
                                           self._outputs, LAGS),
                "apart": np.maximum.accumulate(scene.replays.apart)[list(LAGS)],
                "predictions": self._predictions(self._own, scene)}
        if few and self._random:
            scene = self._scene(few)
            arrays["randomised"] = np.stack([self._predictions(agent, scene)
                                             for agent in self._random])
        return arrays

    def _scene(self, pairs: Sequence[Pair]) -> Scene:
        replays = replay_pairs(self._recording, pairs, max(LAGS))
        if self._simulator.squares is None:
            return Scene.of(pairs, replays, self._recording.folder, None)
        with contextlib.closing(WorldView(self.game)) as view:
            return Scene.of(pairs, replays, self._recording.folder, view)

    def _predictions(self, agent: FrozenAgent, scene: Scene) -> np.ndarray:
        """Return the predictions of an agent (M, J, L, N)."""
        self._simulator.agent = agent
        given = self._compute, self._outputs, LAGS, scene
        parts = [agent_predictions(agent.policy, self._compute, self._layers, self._outputs, LAGS,
                                   scene),
                 simulator_predictions(self._simulator, *given)]
        if self._fills:
            parts.append(counterfactual_predictions(self._simulator, *given))
        return np.concatenate(parts)


def compare_predictions(options: SaliencyChecksOptions) -> ResultStore:
    """Write effects, scores, figure and report, and return their folder."""
    simulator = options.open_simulator()
    if options.counterfactual:
        check_worlds(simulator)
    policy = simulator.agent.policy
    names = options.layers or tuple(short_names(policy))[1:2]
    layers = [layer for layer in find_bottlenecks(policy, names) if layer.layer.is_map]
    if not layers:
        raise UserError("--layers names no layer with a spatial map; give block2 or block3, "
                        "for example")
    recording = Recording(Path(options.parameters.common.data_dir), policy, options.agent_file,
                          options.check_contents)
    study = Study(simulator, options.compute, recording, layers,
                  DRAWS if options.num_randomised else 0, options.seed, options.counterfactual)
    if simulator.squares is not None:
        check_rendering(simulator, recording.folder)
    store = ResultStore(options.output_dir, CHECKS)
    store.open({
        "agent_sha256": agent_sha256(options.agent_file),
        "model_sha256": sha256(options.model_file), "recording_sha256": recording.sha256,
        "seed": options.seed, "layers": names, "num_pairs": options.num_pairs,
        "num_randomised": options.num_randomised, "lags": LAGS,
        "precision": options.compute.precision,
        **({"counterfactual": True} if options.counterfactual else {})}, options.overwrite)
    arrays = gather_groups(store, study, list(recording.lengths), options.num_pairs,
                           options.num_randomised)
    if not len(arrays["levels"]):
        raise UserError(f"no frame in {recording.folder.path} shows an object of a kind in "
                        f"{', '.join(kind.name for kind in study.kinds)}")
    frames = len(np.unique(np.stack([arrays["levels"], arrays["rows"]]), axis=1).T)
    write_scores(
        store, study, arrays, agent_names(layers), options.seed,
        f"{len(arrays['levels'])} pairs in {frames} frames of {len(np.unique(arrays['levels']))} "
        f"levels of {study.game.env_name}, mode {study.game.distribution_mode}."
        + (" The simulator's worlds are rendered by the game." if simulator.squares else ""))
    print(f"wrote {options.output_dir / 'report.md'}")
    return store


def gather_groups(store: ResultStore, study: Study, episodes: Sequence[int], num_pairs: int,
                  num_randomised: int) -> dict[str, np.ndarray]:
    """Compute the missing groups of levels, and return the arrays of all groups, concatenated over
    pairs; see ``Study.group``."""
    groups: list[dict[str, np.ndarray]] = []
    parts = [episodes[begin:begin + _LEVELS_PER_GROUP]
             for begin in range(0, len(episodes), _LEVELS_PER_GROUP)]
    done = 0
    for number, part in enumerate(with_progress(parts, len(parts), "group")):
        groups.append(store.compute("group", number, function=functools.partial(
            study.group, part, num_pairs - done, max(num_randomised - done, 0))))
        done += len(groups[-1]["levels"])
        if done >= num_pairs:
            break
    return {name: np.concatenate([group[name] for group in groups], axis=-1)
            for name in groups[0]}


def write_scores(store: ResultStore, study: Study, arrays: dict[str, np.ndarray],
                 alone: Sequence[str], seed: int, description: str) -> None:
    """Score the predictions, and write tables, figure and report.

    Args:
        arrays: result of ``gather_groups``.
        alone: names of the predictors that use the agent alone.
        description: sentence on the pairs.
    """
    data = Effects(arrays["levels"], arrays["kinds"], arrays["effects"], arrays["apart"],
                   dict(zip(study.names, arrays["predictions"])), OUTPUTS, LAGS)
    scores, differences = score_predictions(data, [
        *itertools.product(SIMULATOR_METHODS, (*alone, *BASELINES)),
        *itertools.product(alone, BASELINES)], seed)
    if set(COUNTERFACTUAL_METHODS) <= set(study.names):
        # A family of comparisons of its own, so that it does not change what is claimed of others.
        maps = *COUNTERFACTUAL, SAMPLED[0]
        others = [name for name in study.names if name not in maps]
        _, more = score_predictions(
            data, list(itertools.product(maps, (*others, *BASELINES))), seed)
        differences = pd.concat([differences, more], ignore_index=True)
    tables = {"pairs": pair_counts(data), "scores": scores, "differences": differences,
              "randomisation": randomisation_table(data, arrays["randomised"], seed)}
    for name, table in tables.items():
        store.write(name, value=table)
    with store.file("figure") as path:
        plot(scores, OUTPUTS).savefig(path, dpi=DPI, format="png")
    store.write("report", value=report(description, tables, OUTPUTS))


main = command(SaliencyChecksOptions, compare_predictions)

if __name__ == "__main__":
    raise SystemExit(main())
