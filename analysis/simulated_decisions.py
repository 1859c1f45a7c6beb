"""Does the simulator know which action would have prevented a failure?

At the point of no return of each failure that ``analysis/decisions.py`` measured, the simulator
starts from the recorded frames, in worlds whose surroundings its prior samples. Every distinct
action is forced there, and the agent plays on inside the simulator. An action's simulated rate is
the mean, over worlds, of one minus the largest probability that the episode ends; a simulation with
the reward of a coin counts as saved. It is compared with the rate of saved continuations in the
real game, and so is the policy's probability of the action, as a baseline that needs no simulator.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd

from agents.agent_file import load_agent
from agents.provenance import agent_sha256
from analysis.decision_results import (
    DECISIONS,
    FAILURES,
    NOT_MEASURED,
    Case,
    point_of_no_return,
    rate,
)
from analysis.decision_trials import recorded_start
from common.cli import count, seed, whole
from common.config import typed
from common.errors import UserError
from common.files import sha256, versions
from common.options import ComputeOptions, command, option
from common.progress import with_progress
from common.results import Entry, ResultStore, Schema, Table
from common.tables import markdown_table
from envs.procgen_env import EnvConfig
from generative.config import SimulatorConfig
from generative.runs import open_simulator
from generative.simulated_game import survival_of_actions
from generative.start_worlds import check_prior
from stats.association import rank_correlations
from stats.bootstrap import ClusterBootstrap
from stats.report import format_interval

ACTION = {"number": int, "step": int, "action": int, "probability": float, "real": float,
          "simulated": float}
SIMULATED_DECISIONS = Schema(
    "simulated decisions", "analysis/simulated_decisions.py", items={
        "actions": Entry("actions/{}.csv", Table(ACTION, exact=True))},
    results={"agreement": Entry("agreement.csv", Table({"score": str, "mean": float}))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedDecisionOptions(ComputeOptions):
    """Compare the simulator with the real game: which action would have prevented a failure?"""

    agent_file: Path = option(help="agent of the study of decisions")
    model_file: Path = option(help="simulator that was trained with this agent")
    decisions_dir: Path = option(Path("analysis/decisions"), "folder of analysis/decisions.py")
    num_worlds: int = option(8, "number of sampled worlds per action", type=count)
    num_steps: int = option(16, "number of simulated steps", type=whole(1, 64))
    seed: int = option(0, "seed of worlds, actions and bootstrap", type=seed)
    output_dir: Path = option(Path("analysis/simulated_decisions"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def compare_decisions(options: SimulatedDecisionOptions) -> pd.DataFrame:
    """Simulate every action at each point of no return, and return the table of agreement.

    Raises:
        UserError: if the decisions are of another agent, or the simulator cannot sample worlds.
    """
    decisions, compute = ResultStore(options.decisions_dir, DECISIONS), options.compute
    settings = decisions.settings("agent_sha256", "env")
    digest = agent_sha256(options.agent_file)
    if settings["agent_sha256"] != digest:
        raise UserError(f"{options.decisions_dir} holds decisions of another agent than "
                        f"{options.agent_file}")
    simulator = open_simulator(options.model_file, options.agent_file, SimulatorConfig(), compute)
    if simulator.squares is not None:
        check_prior(simulator)
    policy = load_agent(options.agent_file, compute.device)
    config = typed(EnvConfig, settings["env"], f"{decisions.settings_file}, 'env'")
    store = ResultStore(options.output_dir, SIMULATED_DECISIONS)
    store.open({"agent_sha256": digest, "simulator_sha256": sha256(options.model_file),
                "decisions": settings, "num_worlds": options.num_worlds,
                "num_steps": options.num_steps, "seed": options.seed,
                "precision": compute.precision, "versions": versions()}, options.overwrite)
    tables = []
    cases = [Case(**case) for case in decisions.read("cases", FAILURES)]
    for case in with_progress(iter(cases), len(cases), "failure"):
        states = decisions.read("states", f"{FAILURES}_{case.number}")
        step = point_of_no_return(states)
        state = states[(states["step"] == step) & (states["tried"] != NOT_MEASURED)]
        if step < simulator.config.num_init_steps or len(state) < 2:
            continue
        if not store.has("actions", case.number):
            start = recorded_start(policy, compute, config, case, step,
                                   simulator.config.num_init_steps)
            simulated = survival_of_actions(
                simulator, compute, start, state["action"].tolist(), num_worlds=options.num_worlds,
                num_steps=options.num_steps, seed=options.seed, number=case.number)
            real = state["fresh"].where(state["fresh"] != NOT_MEASURED, state["tried"]).map(rate)
            store.write("actions", case.number, value=state.assign(
                number=case.number, real=real, simulated=simulated)[list(ACTION)])
        tables.append(store.read("actions", case.number))
    table = agreement(pd.concat(tables), options.seed)
    store.write("agreement", value=table)
    store.finish()
    print("\n".join(markdown_table(("score", "quantity", "mean", "states"), [
        (row.score, row.quantity, format_interval(row.mean, row.low_95, row.high_95, ".2f"),
         str(row.num_levels)) for row in table.itertuples()])))
    return table


def agreement(actions: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return, for the simulator and for the policy as scores of actions, means over states with
    95 % bootstrap intervals over levels.

    Returns:
        Rows with ``score``, ``quantity``, ``mean``, ``low_95``, ``high_95`` and ``num_levels``.
        Quantities: Spearman's rank correlation with the real rate over the actions of a state; how
        often the action with the highest score is the best one, and for ``chance``, the mean of one
        over the number of actions; and the real rate of the action with the highest score, and for
        ``chance``, the mean over actions.
    """
    rows = []
    states = [state for _, state in actions.groupby("number")]
    for score in ("simulated", "probability", "chance", "real"):
        values: dict[str, list[float]] = {"rank correlation": [], "names the best action": [],
                                          "real rate of the action": []}
        for state in states:
            real, size = state["real"].to_numpy(), len(state)
            best = real == real.max()
            chosen = np.full(size, 1 / size)
            if score != "chance":
                given = state[score].to_numpy()
                chosen = np.where(given == given.max(), 1.0, 0.0)
                chosen /= chosen.sum()
                values["rank correlation"].append(float(rank_correlations(given, real)))
            values["names the best action"].append(float((chosen * best).sum()))
            values["real rate of the action"].append(float((chosen * real).sum()))
        for name, numbers in values.items():
            known = np.array([number for number in numbers if not np.isnan(number)])
            if len(known) > 1:
                low, high = ClusterBootstrap(np.arange(len(known)), seed).interval(known[None])
                rows.append((score, name, known.mean(), low[0], high[0], len(known)))
    return pd.DataFrame(rows, columns=["score", "quantity", "mean", "low_95", "high_95",
                                       "num_levels"])


main = command(SimulatedDecisionOptions, compare_decisions)

if __name__ == "__main__":
    raise SystemExit(main())
