"""Contents of the attribution page, gathered from attributions, features and their recording.

Letters in shape comments: N steps of all trajectories, T steps of one trajectory, H W grid of a
layer, F features.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from attribution.page_agent import AttributedAgent
from attribution.page_bookmarks import find_bookmarks, find_failures, find_opening
from attribution.page_files import (
    PageContent,
    PageOutput,
    kind_of,
    title_of,
)
from attribution.results import (
    ATTRIBUTION_SCRIPT,
)
from attribution.trajectories import (
    AdvantageSettings,
    Calibration,
    Trajectories,
    advantages_of,
    calibration_of,
)
from common.errors import UserError
from common.tables import finite_or_none


def gather(agent: AttributedAgent, experiment: str, settings: AdvantageSettings,
           labels: dict[str, dict[int, str]], num_bookmarks: int, with_causes: bool,
           reports: dict[str, str]) -> PageContent:
    """Gather the content of a page that shows one agent.

    Args:
        agent: the agent with its attributions.
        experiment: name of the experiment.
        settings: settings for computing advantages.
        labels: names that the user gave to features, by layer and number of the feature, from 0;
            see ``attribution.page.read_labels``.
        num_bookmarks: maximum number of steps in each list of bookmarks.
        with_causes: whether to replay failed episodes to determine their causes of failure.
        reports: URL of each check's section in the report, by check.
    """
    calibration = calibration_of(agent.recording.all_steps(), settings.reward_scale, settings.gamma)
    advantages = advantages_of(agent.steps, settings.reward_scale, settings.gamma, settings.lmbda)
    failures = find_failures(agent) if with_causes else []
    env = agent.recording.description.get("env") or {}
    backgrounds: dict[object, str] = {True: "backgrounds on", False: "backgrounds off"}
    game = ", ".join(filter(None, (env.get("env_name"), env.get("distribution_mode"),
                                   backgrounds.get(env.get("use_backgrounds")))))
    return PageContent(
        experiment, (agent,), (0,) * agent.steps.num_trajectories,
        game or "a game that the recording does not name",
        tuple(PageOutput(name, title_of(name, agent.action_labels), kind_of(name))
              for name in agent.outputs),
        tuple(map(agent.page_layer, agent.layers)), agent.steps, advantages.astype(np.float32),
        {**dataclasses.asdict(settings), **_describe(calibration)},
        find_bookmarks(agent, advantages, calibration.is_off, failures, num_bookmarks),
        {name: {**dict(enumerate(features.facts.get("names", ()))), **labels.get(name, {})}
         for name, features in agent.features.items()},
        failures, reports, agent.tolerance, agent.remembers,
        {"layer": agent.layers.index(agent.opening_layer()),
         **dict(zip(("trajectory", "step", "feature"), find_opening(agent, failures)))})


def _describe(calibration: Calibration) -> dict:
    numbers = {"slope": calibration.slope, "slope_low_95": calibration.low_95,
               "slope_high_95": calibration.high_95, "r2": calibration.r2}
    return {**{name: finite_or_none(value) for name, value in numbers.items()},
            "off": calibration.is_off}


def join_contents(content: PageContent, other: PageContent) -> PageContent:
    """Join the contents of two agents' pages, such as an original and an edited agent.

    The attributions of both must be reduced to the same features. The trajectories of the second
    agent follow those of the first, and bookmarks and failures are joined, too. All other entries,
    such as ``unit`` and ``start``, are the first agent's.

    Raises:
        UserError: if the second agent lacks an attribution that the first one has.
    """
    [agent], [other_agent] = content.agents, other.agents
    attributed = {(layer.name, other.outputs[output].name)
                  for layer in other.layers for output in layer.outputs}
    for layer in content.layers:
        for output in layer.outputs:
            name = content.outputs[output].name
            if (layer.name, name) not in attributed:
                raise UserError(f"{other_agent.name} has no attributions of {name} at "
                                f"{layer.name}, unlike {agent.name}; compute them with "
                                f"{ATTRIBUTION_SCRIPT}")
    count = content.steps.num_trajectories

    def shifted(steps: list[list]) -> list[list]:
        return [[trajectory + count, *values] for trajectory, *values in steps]

    causes = {failure["cause"]: list(failure["steps"]) for failure in content.failures}
    for failure in other.failures:
        causes.setdefault(failure["cause"], []).extend(shifted(failure["steps"]))
    later = dataclasses.replace(other.steps, trajectory=other.steps.trajectory + count)
    return dataclasses.replace(
        content, agents=(agent, other_agent),
        agent_of=content.agent_of + (1,) * other.steps.num_trajectories,
        steps=Trajectories(**{name: np.concatenate([array, vars(later)[name]])
                              for name, array in vars(content.steps).items()}),
        advantages=np.concatenate([content.advantages, other.advantages]),
        bookmarks=[*content.bookmarks, *(
            {**bookmark, "title": f"{other_agent.name}: {bookmark['title']}",
             "steps": shifted(bookmark["steps"])} for bookmark in other.bookmarks)],
        failures=[{"cause": cause, "steps": steps} for cause, steps in causes.items()])
