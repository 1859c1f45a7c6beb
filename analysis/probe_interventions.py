"""Effects of pushing the agent's hidden state along the directions of probes.

The directions come from analysis/probe_atlas.py. A killed run resumes after the last finished
push; a finished run can be extended with more labels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from agents.replay import recorded_game
from agents.testbed import BASELINE, Testbed
from analysis.memory.labels import Examples, LabelledRecordingOptions
from analysis.memory.probe_atlas import Label, labels_of
from analysis.memory.probe_interventions import (
    METHODS,
    OPEN_OUTCOMES,
    PROBE_INTERVENTIONS,
    WORDING,
    closed_outcome_list,
    closed_outcomes,
    open_loop,
    pushes,
    ratio_tables,
    swaps,
    typical_size,
    unit_directions,
    with_ratios,
)
from common.cli import count, environments, seed, whole
from common.errors import UserError
from common.files import versions
from common.options import command, option
from common.results import ResultStore
from envs.objects import hazards_of
from envs.procgen_env import EnvConfig
from interventions.direction_folders import PROBE_ATLAS
from stats.effects import Condition, check_starts, claims_summary, compare_conditions
from stats.study import measure_conditions, write_effects


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeInterventionsOptions(LabelledRecordingOptions):
    """Push the agent's hidden state along directions that represent labels, such as a saw ahead of
    the player, and measure actions, success and failures. Pushes of the same size in random
    directions are the controls. On recorded states, pushes are also compared with full swaps of
    the state."""

    atlas_dir: Path = option(Path("analysis/memory/probe_atlas"),
                             "probes of the hidden state, from analysis/probe_atlas.py")
    labels: tuple[str, ...] | None = option(
        None, "labels of the atlas whose directions are used; if not given, each hazard ahead of "
              "the player, the velocities, and the steps to the end")
    methods: tuple[str, ...] = option(
        METHODS, "probe: the weights of the linear probe; covariance: the covariance of the state "
                 "with the label", choices=METHODS)
    size: float = option(2.0, "norm of a push, in standard deviations of the state along a random "
                              "direction")
    num_controls: int = option(19, "number of random directions; claims need at least 19",
                               type=whole(2, 1000))
    num_episodes: int = option(200, "number of levels to play per push; none of them was recorded",
                               type=count)
    num_envs: int = option(64, "number of episodes played in parallel", type=environments)
    seed: int = option(0, "seed of levels, actions, random directions and bootstrap", type=seed)
    output_dir: Path = option(Path("analysis/memory/probe_interventions"), "folder to write to")


@dataclasses.dataclass(frozen=True)
class ProbeDirections:
    """Directions of an atlas, and the recorded states that the probes were trained and tested on.

    Attributes:
        weights: weights of the linear probe, by label.
        train, test: whether each recorded step was used for training and for testing, bool (N,).
    """

    labels: list[Label]
    weights: Mapping[str, np.ndarray]
    train: np.ndarray
    test: np.ndarray
    seed: int

    @classmethod
    def read(cls, options: ProbeInterventionsOptions) -> ProbeDirections:
        """Read the directions of the chosen labels.

        Raises:
            UserError: if the atlas belongs to another agent or recording, or lacks a label.
        """
        examples, atlas = options.examples, ResultStore(options.atlas_dir, PROBE_ATLAS)
        made_with = atlas.settings("agent_sha256", "recording_sha256")
        if (made_with["agent_sha256"], made_with["recording_sha256"]) != (
                agent_sha256(options.agent_file), examples.folder.sha256()):
            raise UserError(f"{options.atlas_dir} holds probes of another agent or recording; run "
                            f"{PROBE_ATLAS.script} with this agent and recording")
        names = options.labels or default_labels(recorded_game(examples.folder).env_name, atlas)
        found = {label.name: label for label in labels_of(examples, np.arange(len(examples)))}
        if unknown := [name for name in names if not atlas.has("weights", name)]:
            raise UserError(f"{options.atlas_dir} has no direction for label '{unknown[0]}'; "
                            f"available: {', '.join(atlas.keys('weights'))}")
        items = {name: atlas.read("weights", name) for name in names}
        train, test = (np.isin(examples.level, items[names[0]][part]) for part in ("train", "test"))
        return cls([found[name].subset(train) for name in names],
                   {name: item["weights"] for name, item in items.items()}, train, test,
                   made_with["seed"])


def measure_pushes(options: ProbeInterventionsOptions) -> pd.DataFrame:
    """Write the effects of all pushes, and return the table of those in the real game."""
    check_starts(options.num_episodes, "--num_episodes")
    compute, examples = options.compute, options.examples
    policy = load_agent(options.agent_file, compute.device)
    env, directions = recorded_game(examples.folder), ProbeDirections.read(options)
    states = examples.hidden_out[directions.train]
    conditions = pushes(
        {label.name: unit_directions(label, states, directions.weights[label.name],
                                     options.methods) for label in directions.labels},
        options.size * typical_size(states), options.num_controls, options.seed)
    levels = unrecorded_levels(env, examples, options)
    store = open_store(options, env, directions.seed, conditions)
    opened = open_loop(policy, examples.hidden_out[directions.test],
                       examples.level[directions.test], conditions,
                       list(swaps(directions.labels, states, options.num_controls, options.seed)),
                       options.seed)
    store.write("open_loop", value=opened)
    testbed = Testbed(policy, compute, env, levels, options.seed, options.num_envs, causes=True)
    measure_conditions(store, "condition", [BASELINE, *conditions],
                       functools.partial(closed_outcomes, testbed))
    outcomes = closed_outcome_list(env.env_name)
    before, *after = (store.read("condition", condition.name)
                      for condition in (BASELINE, *conditions))
    table = with_ratios(compare_conditions(conditions, outcomes, before, np.stack(after),
                                           options.seed), conditions)
    description = (
        f"{options.agent_file.name} on {len(levels)} levels of {env.env_name} "
        f"({env.distribution_mode}), pushed at every step by {options.size:g} standard deviations")
    write_effects(store, table, outcomes, WORDING, description, appendix="\n".join([
        "## Ratios in the real game", "", *ratio_tables(table, outcomes[:5]),
        "## Open loop: recorded states of levels that no probe was trained on", "",
        f"{directions.test.sum()} states of {len(np.unique(examples.level[directions.test]))} "
        f"levels. **Bold**: claimed by the rule above; {claims_summary(opened)}.", "",
        *ratio_tables(opened, OPEN_OUTCOMES)]))
    print(f"open loop: {claims_summary(opened)}; real game: {claims_summary(table)}; wrote "
          f"{store.file_of('report')}")
    return table


def unrecorded_levels(env: EnvConfig, examples: Examples, options: ProbeInterventionsOptions
                      ) -> list[int]:
    """Draw the seeds of levels that were not recorded."""
    recorded = set(examples.folder.all_steps(np.unique(examples.episode))["level_seed"])
    drawn = env.draw_levels(options.num_episodes + len(recorded), options.seed)
    return [level for level in drawn if level not in recorded][:options.num_episodes]


def open_store(options: ProbeInterventionsOptions, env: EnvConfig, atlas_seed: int,
               conditions: Sequence[Condition]) -> ResultStore:
    """Open the output folder with the settings of the study."""
    store = ResultStore(options.output_dir, PROBE_INTERVENTIONS)
    store.open({"agent_file": options.agent_file.name,
                "agent_sha256": agent_sha256(options.agent_file),
                "recording_sha256": options.examples.folder.sha256(), "env": vars(env),
                "atlas_seed": atlas_seed, "size": options.size, "seed": options.seed,
                "num_episodes": options.num_episodes, "precision": options.compute.precision,
                "versions": versions(),
                "conditions": {condition.name: condition.settings for condition in conditions}},
               options.overwrite)
    return store


def default_labels(game: str, atlas: ResultStore) -> list[str]:
    """Return those default labels (each hazard of the game ahead of the player, the velocities, and
    the steps to the end) that have a direction in the atlas.

    Raises:
        UserError: if no default label has one.
    """
    names = [*(f"{kind.name}_ahead" for kind in hazards_of(game)), "velocity_x", "velocity_y",
             "steps_to_end"]
    names = [name for name in names if atlas.has("weights", name)]
    if not names:
        raise UserError(f"{atlas.path} has no direction for any default label; give --labels")
    return names


main = command(ProbeInterventionsOptions, measure_pushes)

if __name__ == "__main__":
    raise SystemExit(main())
