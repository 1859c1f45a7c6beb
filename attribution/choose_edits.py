"""Choose edits that blind an agent to hazards, see ``ChooseEditsOptions``.

For each hazard, the script selects the levels on which the agent fails because of the hazard when
the hazard is invisible. On these levels it ablates each feature of each layer alone, then the best
feature together with each other feature of its layer, and so on while the result improves. It
writes an agent file with the edit that has the largest rise in failures caused by the hazard minus
the rise in other failures.

The best of many edits looks better than it is, and better than a single random edit. With
--num_controls, the same search is repeated with random features: the directions of a layer's
features with permuted channels, each edit being rescaled to change the layer as much. Each search
writes an agent file, control_<number>_blind_to_<hazard>.pth, which attribution.failure_causes
compares with the edit (--control_files).

candidates.csv has one row per tried edit, with the columns hazard, control (number of the random
features; -1 for the features), layer, features (numbers of the features ablated together, from 0),
strength, levels (number of levels), by_hazard_before and by_hazard (failures caused by the hazard,
without and with the edit), by_others_before and by_others (failures by other causes), and chosen
(whether the edit was written).

Measure the effects of the edits on other levels, with attribution.failure_causes. A killed run
resumes after the last episode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.agent_file import load_agent, read_origin, save_agent
from agents.edits import Edit, with_edits
from agents.episodes import SOLVED
from agents.provenance import agent_digests, agent_sha256
from agents.reference_set import activations_of
from agents.testbed import Condition, Testbed
from attribution.config import ANALYSES
from attribution.editing import ChangeSizes
from attribution.failures.causes import (
    PlayedLevelsOptions,
    agent_conditions,
    find_hazards,
    invisible_hazards,
    play_condition,
    policy_of,
)
from attribution.failures.results import ORIGINAL, failure_files
from attribution.layers import find_bottlenecks
from attribution.results import (
    FEATURES_SCRIPT,
    LayerFeatures,
    finished_layers,
    load_features,
    read_features,
)
from common.cli import check_output, count, from_zero
from common.errors import UserError
from common.files import read_bytes, versions
from common.options import command, option, redefine
from common.results import ResultStore
from common.tables import write_table
from envs.objects import GameObject
from interventions.flags import REFERENCE_SIZE

PLAYED, TABLE = "played", "candidates.csv"  # names in the output folder
MakeEdit = Callable[[str, Sequence[int], float], Edit]  # see edit_of
MIN_LEVELS = 10  # with fewer failures because of the invisible hazard, all levels are used


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseEditsOptions(PlayedLevelsOptions):
    """Choose edits that blind an agent to hazards of its game."""

    agent_file: Path = option(help="agent to edit")
    hazards: tuple[str, ...] = option(help="hazards to blind the agent to, such as saw; one edit "
                                           "is chosen per hazard", metavar="HAZARD")
    layers: tuple[str, ...] | None = option(
        None, "short names of the layers to edit; if not given, all layers with features and cells",
        metavar="LAYER")
    num_features: int = option(
        2, "maximum number of features of a layer that are ablated together", type=count)
    strengths: tuple[float, ...] = option(
        (1.0, 2.0), "strengths of the edits: 1 removes the features, 2 reverses their sign")
    features_dir: Path = option(ANALYSES / "features",
                                "features of the agent, from python -m attribution.features")
    num_episodes: int = redefine(
        PlayedLevelsOptions, "num_episodes", default=160,
        help="number of candidate levels; edits are tried on the levels that the agent fails "
             "because of the hazard when it is invisible")
    num_controls: int = option(
        0, "number of repetitions of the search with random features; claims need at least 19",
        type=from_zero)
    seed: int = redefine(
        PlayedLevelsOptions, "seed", default=1,
        help="seed of levels and actions; give attribution.failure_causes a different seed, so "
             "that it plays other levels")
    output_dir: Path = option(ANALYSES / "edits", "folder to write to")

    def load_features(self, original: Condition, game: str) -> dict[str, LayerFeatures]:
        """Read the features of the layers to edit, by short name of the layer.

        Args:
            original: condition of the unedited agent.
            game: name of the game.
        """
        names = self.layers or sorted(
            name for name in finished_layers(self.features_dir)
            if read_features(self.features_dir, name).facts["stride"])
        if not names:
            raise UserError(f"{self.features_dir} holds no features of a layer with a spatial map; "
                            f"find them with {FEATURES_SCRIPT}")
        agents = {*agent_digests(self.agent_file), original_agent(self.agent_file)}
        return {bottleneck.name: load_features(self.features_dir, bottleneck, agents, game)
                for bottleneck in find_bottlenecks(policy_of(original), names)}

    def output_files(self, hazards: Sequence[GameObject]) -> dict[tuple[str, int], Path]:
        """Return the files of edited agents by hazard and number of the control (-1: no control).

        Raises:
            UserError: if a file of the output folder exists that this script did not write.
        """
        check_output(self.output_dir / TABLE,
                     lambda path: b"by_hazard_before" in read_bytes(path).partition(b"\n")[0],
                     self.overwrite, "--output_dir")
        files = {(hazard.name, control): self.output_dir / file_name(hazard.name, control)
                 for hazard in hazards for control in range(-1, self.num_controls)}
        for path in files.values():
            check_output(path, lambda path: read_origin(path).edited_from is not None,
                         self.overwrite, "--output_dir")
        return files


def choose_edits(options: ChooseEditsOptions) -> pd.DataFrame:
    """Write the edited agents, and return the table of all tried edits."""
    if not np.isfinite(options.strengths).all():
        raise UserError("--strengths must be numbers, not NaN or infinity")
    config = options.env_config(options.agent_file).unseen_levels()
    hazards = find_hazards(options.hazards, config.env_name)
    files = options.output_files(hazards)
    [original] = agent_conditions([options.agent_file], [ORIGINAL], options.compute.device)
    features = options.load_features(original, config.env_name)
    testbed = options.testbed(original, config)
    makers = edit_makers(options, features, testbed)
    rows = []
    for hazard in hazards:
        store = ResultStore(options.output_dir / PLAYED / hazard.name,
                            failure_files(config.env_name))
        store.open({
            "agent_sha256": agent_sha256(options.agent_file), "features_sha256": {
                name: of_layer.checksum for name, of_layer in features.items()},
            "env": vars(config), "num_episodes": options.num_episodes, "seed": options.seed,
            "precision": options.compute.precision, "versions": versions(), "conditions": {}},
            options.overwrite)
        for control, make in makers.items():
            best, trials = search_edits(options, original, features, hazard, testbed,
                                        functools.partial(play, store, testbed), make,
                                        "edited" if control < 0 else f"control_{control:03d}")
            rows += [{"hazard": hazard.name, "control": control, **trial,
                      "features": " ".join(map(str, trial["features"])), "chosen": trial is best}
                     for trial in trials]
            save_edited(files[hazard.name, control], options.agent_file, make(
                best["layer"], best["features"], best["strength"]))
            report(files[hazard.name, control], best, hazard.name)
        store.finish()
    table = pd.DataFrame(rows)
    write_table(options.output_dir / TABLE, table)
    return table


def edit_makers(options: ChooseEditsOptions, features: Mapping[str, LayerFeatures],
                testbed: Testbed) -> dict[int, MakeEdit]:
    """Return the functions that make edits with the features (-1), and with random features by
    number of the control."""
    makers: dict[int, MakeEdit] = {-1: functools.partial(edit_of, features)}
    if not options.num_controls:
        return makers
    reference = testbed.reference(REFERENCE_SIZE, options.seed)
    activations = activations_of(testbed.policy, reference.frames, [
        of_layer.settings["layer"] for of_layer in features.values()], reference.hidden_states)
    return makers | {control: random_features(features, activations, options.seed, control)
                     for control in range(options.num_controls)}


def original_agent(agent_file: Path) -> str:
    """Return the checksum of the unedited agent of an agent file."""
    return read_origin(agent_file).edited_from or agent_sha256(agent_file)


def save_edited(path: Path, agent_file: Path, edit: Edit) -> None:
    """Write an agent with an edit to ``path``."""
    save_agent(path, with_edits(load_agent(agent_file), [edit]), origin=dataclasses.replace(
        read_origin(agent_file), edited_from=original_agent(agent_file)))


def file_name(hazard: str, control: int) -> str:
    """Return the name of the edited agent's file; ``control`` is -1 if the features are its own."""
    name = f"blind_to_{hazard}.pth"
    return name if control < 0 else f"control_{control:03d}_{name}"


def report(path: Path, best: Mapping[str, Any], hazard: str) -> None:
    """Print the best edit of a search, which was written to ``path``."""
    print(f"wrote {path}: features {', '.join(map(str, best['features']))} of {best['layer']} "
              f"ablated at strength {best['strength']:g}; fails {best['by_hazard']} of "
              f"{best['levels']} levels because of {hazard} (before the edit: "
              f"{best['by_hazard_before']}) and {best['by_others']} for other causes (before: "
              f"{best['by_others_before']})")


def play(store: ResultStore, testbed: Testbed, condition: Condition,
         numbers: Sequence[int]) -> np.ndarray:
    """Play some of the levels under a condition, unless the results are stored.

    Args:
        store: open store of episodes.
        testbed: the levels.
        condition: the condition.
        numbers: numbers of the levels to play (N,).

    Returns:
        Cause of failure of each level, or SOLVED (N,).
    """
    play_condition(store, condition, testbed, numbers)
    return store.read("episodes", condition.name)["cause"].to_numpy(str)


def edit_of(features: Mapping[str, LayerFeatures], layer: str, numbers: Sequence[int],
            strength: float) -> Edit:
    """Return the edit that ablates features of a layer.

    Args:
        features: features by short name of the layer.
        layer: short name of the layer.
        numbers: numbers of the features, from 0.
        strength: 1 removes the features, 2 reverses their sign.
    """
    directions = features[layer].reducer.directions[list(numbers)]
    return Edit(features[layer].settings["layer"], torch.from_numpy(directions), strength)


def random_features(features: Mapping[str, LayerFeatures], activations: Mapping[str, Tensor],
                    seed: int, control: int) -> MakeEdit:
    """Return a function like ``edit_of`` for random features.

    The channels of all directions of a layer are permuted in the same way, so the angles between
    them stay. The strength is rescaled such that the layer's output changes as much as by the edit
    of the features themselves.

    Args:
        features: features by short name of the layer.
        activations: activations of the layers in some frames (N, C, …), by path of the layer.
        seed, control: seed and number of the permutations.
    """
    rng = np.random.default_rng([seed, control])
    orders = {name: torch.from_numpy(rng.permutation(of_layer.reducer.directions.shape[1]))
              for name, of_layer in features.items()}

    def make(layer: str, numbers: Sequence[int], strength: float) -> Edit:
        edit = edit_of(features, layer, numbers, strength)
        outputs = activations[edit.layer]
        sizes = ChangeSizes(outputs, edit.signed(outputs.shape[1]))
        permuted = dataclasses.replace(edit, directions=edit.directions[:, orders[layer]])
        own, other = sizes.of(edit), sizes.of(permuted)
        return dataclasses.replace(permuted, strength=strength * own / other) if other else permuted

    return make


def search_edits(options: ChooseEditsOptions, original: Condition,
                 features: Mapping[str, LayerFeatures], hazard: GameObject, testbed: Testbed,
                 play: Callable[[Condition, Sequence[int]], np.ndarray],
                 make: MakeEdit, prefix: str
                 ) -> tuple[dict, list[dict]]:
    """Search for the edit that blinds the agent to a hazard.

    Each feature of each layer is ablated alone at each strength. Then the best feature is ablated
    at its best strength together with each other feature of its layer, and so on while the result
    improves, up to ``options.num_features`` features. The best edit has the largest rise in
    failures caused by the hazard minus the rise in other failures.

    Args:
        original: condition of the unedited agent.
        features: features by short name of the layer.
        hazard: the hazard.
        testbed: candidate levels. Edits are tried on those that the agent fails because of the
            hazard when the hazard is invisible. If the agent fails fewer than MIN_LEVELS for this
            reason, or the hazard cannot be made invisible, edits are tried on all levels.
        play: function that plays N levels under a condition, and returns the cause of failure of
            each, or SOLVED (N,); levels are given by their numbers.
        make: function that returns the edit for a layer, numbers of features and a strength.
        prefix: first part of the names of the conditions.

    Returns:
        The trial of the best edit, and all trials. A trial is a dict with the columns of
        ``candidates.csv``, in which ``features`` is a tuple.
    """
    tried: Sequence[int] = range(testbed.num_runs)
    before = play(original, tried)
    assert testbed.env is not None
    if not hazard.cells:  # hazards drawn from cells cannot be made invisible
        [hidden] = invisible_hazards([hazard.name], testbed.env.env_name, original, None)
        needed = play(hidden, tried) == hazard.name
        if needed.sum() >= MIN_LEVELS:
            tried, before = np.flatnonzero(needed).tolist(), before[needed]

    def try_edit(layer: str, numbers: tuple[int, ...], strength: float) -> dict:
        label = f"{layer}_{'_'.join(map(str, numbers))}_strength_{strength:g}"
        edited = with_edits(policy_of(original), [make(layer, numbers, strength)])
        after = play(Condition(f"{prefix}_{label}", label, label, policy=edited), tried)
        hazard_before, hazard_after = ((causes == hazard.name).sum() for causes in (before, after))
        return {"layer": layer, "features": numbers, "strength": strength, "levels": len(tried),
                "by_hazard_before": hazard_before, "by_hazard": hazard_after,
                "by_others_before": (before != SOLVED).sum() - hazard_before,
                "by_others": (after != SOLVED).sum() - hazard_after}

    trials = [try_edit(layer, (number,), strength) for layer, of_layer in features.items()
              for number in range(of_layer.number) for strength in dict.fromkeys(options.strengths)]
    best = max(trials, key=margin_of)
    for _ in range(options.num_features - 1):
        more = [try_edit(best["layer"], tuple(sorted((*best["features"], number))),
                         best["strength"])
                for number in range(features[best["layer"]].number)
                if number not in best["features"]]
        trials += more
        better = max(more, key=margin_of, default=best)
        if margin_of(better) <= margin_of(best):
            break
        best = better
    return best, trials


def margin_of(trial: Mapping[str, int]) -> int:
    """Return the rise in failures caused by the hazard minus the rise in other failures."""
    return (trial["by_hazard"] - trial["by_hazard_before"]
            - (trial["by_others"] - trial["by_others_before"]))


main = command(ChooseEditsOptions, choose_edits)

if __name__ == "__main__":
    raise SystemExit(main())
