"""Choose edits that blind an agent to hazards of its game.

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

import argparse
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
from agents.config import add_env_flags, env_config
from agents.edits import Edit, with_edits
from agents.provenance import agent_digests, agent_sha256
from agents.reference_set import activations_of, played_reference
from attribution.editing import ChangeSizes
from attribution.failures.causes import (
    Levels,
    Run,
    agent_conditions,
    find_hazards,
    invisible_hazards,
    play_condition,
    run_of,
)
from attribution.failures.results import ORIGINAL, SOLVED, failure_files
from attribution.layers import find_bottlenecks
from attribution.results import (
    FEATURES_SCRIPT,
    LayerFeatures,
    finished_layers,
    load_features,
    read_features,
)
from common.cli import (
    Parser,
    add_compute_flags,
    check_output,
    count,
    environments,
    from_zero,
    seed,
    set_up_logging,
)
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import read_bytes, versions
from common.results import ResultStore
from common.tables import write_table
from envs.objects import GameObject
from interventions.flags import REFERENCE_SIZE
from stats.effects import Condition

PLAYED, TABLE = "played", "candidates.csv"  # names in the output folder
MIN_LEVELS = 10  # with fewer failures because of the invisible hazard, all levels are used


def parser() -> Parser:
    flags = Parser(__doc__)
    flags.add_argument("--agent_file", type=Path, required=True, help="agent to edit")
    flags.add_argument("--hazards", nargs="+", required=True, metavar="HAZARD",
                       help="hazards to blind the agent to, such as saw; one edit is chosen per "
                            "hazard")
    flags.add_argument("--layers", nargs="+", metavar="LAYER",
                       help="short names of the layers to edit; if not given, all layers with "
                            "features and cells")
    flags.add_argument("--num_features", type=count, default=2,
                       help="maximum number of features of a layer that are ablated together")
    flags.add_argument("--strengths", type=float, nargs="+", default=[1.0, 2.0],
                       help="strengths of the edits: 1 removes the features, 2 reverses their "
                            "sign")
    flags.add_argument("--features_dir", type=Path, default=Path("analysis/attribution/features"),
                       help="features of the agent, from python -m attribution.features")
    flags.add_argument("--num_episodes", type=count, default=160,
                       help="number of candidate levels; edits are tried on the levels that the "
                            "agent fails because of the hazard when it is invisible")
    flags.add_argument("--num_controls", type=from_zero, default=0,
                       help="number of repetitions of the search with random features; claims need "
                            "at least 19")
    add_env_flags(flags)
    flags.add_argument("--num_envs", type=environments, default=64,
                       help="number of episodes played in parallel")
    flags.add_argument("--seed", type=seed, default=1,
                       help="seed of levels and actions; give attribution.failure_causes a "
                            "different seed, so that it plays other levels")
    flags.add_argument("--output_dir", type=Path, default=Path("analysis/attribution/edits"),
                       help="folder to write to")
    flags.add_argument("--overwrite", action="store_true",
                       help="delete the previous contents of the folder")
    add_compute_flags(flags)
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    compute = resolve_compute(args.device, args.gpu_device, "float32"
                              if args.precision == "auto" else args.precision)
    if not np.isfinite(args.strengths).all():
        raise UserError("--strengths must be numbers, not NaN or infinity")
    config = env_config(args, args.agent_file).unseen_levels()
    hazards = find_hazards(args.hazards, config.env_name)
    table = args.output_dir / TABLE
    check_output(table, lambda path: b"by_hazard_before" in read_bytes(path).partition(b"\n")[0],
                 args.overwrite, "--output_dir")
    agents = {(hazard.name, control): args.output_dir / file_name(hazard.name, control)
              for hazard in hazards for control in range(-1, args.num_controls)}
    for path in agents.values():
        check_output(path, lambda path: read_origin(path).edited_from is not None, args.overwrite,
                     "--output_dir")
    [original] = agent_conditions([args.agent_file], [ORIGINAL], compute.device)
    origin, checksum = read_origin(args.agent_file), agent_sha256(args.agent_file)
    root = origin.edited_from or checksum
    names = args.layers or sorted(name for name in finished_layers(args.features_dir)
                                  if read_features(args.features_dir, name).facts["stride"])
    if not names:
        raise UserError(f"{args.features_dir} holds no features of a layer with a spatial map; "
                        f"find them with {FEATURES_SCRIPT}")
    features = {bottleneck.name: load_features(args.features_dir, bottleneck, {
        *agent_digests(args.agent_file), root}, config.env_name)
                for bottleneck in find_bottlenecks(run_of(original).policy, names)}
    levels = Levels(config, compute, list(enumerate(config.draw_levels(
        args.num_episodes, args.seed))), args.seed, args.num_envs)

    @functools.cache
    def activations() -> dict[str, Tensor]:
        reference = played_reference(run_of(original).policy, compute, config,
                                     [level for _, level in levels.levels], REFERENCE_SIZE,
                                     args.seed)
        return activations_of(run_of(original).policy, reference.frames, [
            of_layer.settings["layer"] for of_layer in features.values()], reference.hidden_states)

    rows = []
    for hazard in hazards:
        store = ResultStore(args.output_dir / PLAYED / hazard.name, failure_files(config.env_name))
        store.open({
            "agent_sha256": checksum, "features_sha256": {
                name: of_layer.checksum for name, of_layer in features.items()},
            "env": vars(config), "num_episodes": args.num_episodes, "seed": args.seed,
            "precision": compute.precision, "versions": versions(), "arms": {}}, args.overwrite)
        for control in range(-1, args.num_controls):
            make = functools.partial(edit_of, features) if control < 0 else random_features(
                features, activations(), args.seed, control)
            best, trials = search_edits(args, original, features, hazard, levels,
                                        functools.partial(play, store, levels), make,
                                        "edited" if control < 0 else f"control_{control:03d}")
            rows += [{"hazard": hazard.name, "control": control, **trial,
                      "features": " ".join(map(str, trial["features"])), "chosen": trial is best}
                     for trial in trials]
            path = agents[hazard.name, control]
            save_agent(path, with_edits(load_agent(args.agent_file), [make(
                best["layer"], best["features"], best["strength"])]),
                       origin=dataclasses.replace(origin, edited_from=root))
            report(path, best, hazard.name)
        store.finish()
    write_table(table, pd.DataFrame(rows))


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


def play(store: ResultStore, levels: Levels, condition: Condition[Run],
         some: Sequence[tuple[int, int]]) -> np.ndarray:
    """Play some of the levels under a condition, unless the results are stored.

    Args:
        store: open store of episodes.
        levels: settings for playing levels.
        condition: the condition.
        some: pairs of the number and the level seed of N levels.

    Returns:
        Cause of failure of each level, or SOLVED (N,).
    """
    play_condition(store, condition, dataclasses.replace(levels, levels=some))
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
                    seed: int, control: int) -> Callable[[str, Sequence[int], float], Edit]:
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


def search_edits(args: argparse.Namespace, original: Condition[Run],
                 features: Mapping[str, LayerFeatures], hazard: GameObject, levels: Levels,
                 play: Callable[[Condition[Run], Sequence[tuple[int, int]]], np.ndarray],
                 make: Callable[[str, Sequence[int], float], Edit], prefix: str
                 ) -> tuple[dict, list[dict]]:
    """Search for the edit that blinds the agent to a hazard.

    Each feature of each layer is ablated alone at each strength. Then the best feature is ablated
    at its best strength together with each other feature of its layer, and so on while the result
    improves, up to ``args.num_features`` features. The best edit has the largest rise in failures
    caused by the hazard minus the rise in other failures.

    Args:
        args: the parsed flags.
        original: condition of the unedited agent.
        features: features by short name of the layer.
        hazard: the hazard.
        levels: candidate levels. Edits are tried on those that the agent fails because of the
            hazard when the hazard is invisible. If the agent fails fewer than MIN_LEVELS for this
            reason, or the hazard cannot be made invisible, edits are tried on all levels.
        play: function that plays N levels under a condition, and returns the cause of failure of
            each, or SOLVED (N,); levels are pairs of number and level seed.
        make: function that returns the edit for a layer, numbers of features and a strength.
        prefix: first part of the names of the conditions.

    Returns:
        The trial of the best edit, and all trials. A trial is a dict with the columns of
        ``candidates.csv``, in which ``features`` is a tuple.
    """
    tried, before = levels.levels, play(original, levels.levels)
    if not hazard.cells:  # hazards drawn from cells cannot be made invisible
        [hidden] = invisible_hazards([hazard.name], levels.config.env_name, original, None)
        needed = play(hidden, tried) == hazard.name
        if needed.sum() >= MIN_LEVELS:
            tried, before = [tried[place] for place in np.flatnonzero(needed)], before[needed]

    def try_edit(layer: str, numbers: tuple[int, ...], strength: float) -> dict:
        label = f"{layer}_{'_'.join(map(str, numbers))}_strength_{strength:g}"
        edited = with_edits(run_of(original).policy, [make(layer, numbers, strength)])
        after = play(Condition(f"{prefix}_{label}", label, label, value=Run(edited)), tried)
        hazard_before, hazard_after = ((causes == hazard.name).sum() for causes in (before, after))
        return {"layer": layer, "features": numbers, "strength": strength, "levels": len(tried),
                "by_hazard_before": hazard_before, "by_hazard": hazard_after,
                "by_others_before": (before != SOLVED).sum() - hazard_before,
                "by_others": (after != SOLVED).sum() - hazard_after}

    trials = [try_edit(layer, (number,), strength) for layer, of_layer in features.items()
              for number in range(of_layer.number) for strength in dict.fromkeys(args.strengths)]
    best = max(trials, key=margin_of)
    for _ in range(args.num_features - 1):
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


if __name__ == "__main__":
    raise SystemExit(main())
