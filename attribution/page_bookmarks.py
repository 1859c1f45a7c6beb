"""Notable steps of the attribution page: bookmarks, failures, and the step at which it opens."""

from __future__ import annotations

import functools

import numpy as np

from agents.failures import ENDED, MULTIPLE, OTHER, TIMEOUT, recorded_causes
from attribution.page_agent import AttributedAgent
from attribution.page_files import title_of
from attribution.results import INPUT
from attribution.trajectories import best_of_episodes, failed_ends, value_spikes

_WHY = {TIMEOUT: "Episodes that ended at the time limit.",
        MULTIPLE: "When the last step is replayed, the episode ends whichever single kind of "
                  "hazard is removed, but not if all nearby hazards are removed.",
        OTHER: "When the last step is replayed, the episode ends even if all nearby hazards are "
               "removed.",
        ENDED: "Failed episodes; the hazards of this game are not known."}


def find_opening(agent: AttributedAgent, failures: list[dict]
                 ) -> tuple[int, int, int | None]:
    """Return the trajectory, the step and the feature with which the page opens.

    The step is the last one of the first failed episode, and the feature is the one with the
    largest |attribution| in it. Without a failure, step and feature are those with the largest
    |attribution|. The feature is None if the opening layer has none.

    Args:
        agent: the agent with its attributions.
        failures: failed episodes by cause; see ``PageContent``.
    """
    steps = agent.steps
    known = [tuple(place) for failure in failures for place in failure["steps"]] or [
        steps.place(step) for step in failed_ends(steps, len(steps)).tolist()]
    layer = agent.opening_layer()
    if layer == INPUT:
        return *min(known, default=(0, 0)), None
    output = agent.outputs_at(layer)[0]
    sizes = np.concatenate([
        np.abs(agent.attribution(layer, output, number)["totals"].astype(np.float32)[:, :-1])
        for number in range(steps.num_trajectories)])  # (N, F)
    if known:
        trajectory, step = min(known)
    else:
        trajectory, step = steps.place(int(sizes.max(axis=1).argmax()))
    return trajectory, step, int(sizes[steps.bounds[trajectory] + step].argmax())


def find_bookmarks(agent: AttributedAgent, advantages: np.ndarray, is_off: bool,
                   failures: list[dict], most: int) -> list[dict]:
    """Return lists of notable steps, in the format of ``PageContent.bookmarks``; empty lists are
    left out.

    Args:
        agent: the agent with its attributions.
        advantages: advantage of each step (N,).
        is_off: whether values and rewards seem to have different units.
        failures: failed episodes by cause; see ``PageContent``.
        most: maximum number of steps in each list.
    """
    steps = agent.steps
    best = functools.partial(best_of_episodes, steps=steps, most=most)
    spikes = value_spikes(steps)
    badge, warning = ("", "") if not is_off else (
        " (unit uncertain)", " Values and rewards seem to have different units, so this list may "
        "be wrong; export the page with another --reward_scale.")
    lists = [
        (f"Worse than predicted{badge}", "The lowest advantages, one per episode: the return was "
         f"lower than predicted.{warning}", best(-advantages), advantages),
        (f"Better than predicted{badge}", "The highest advantages, one per episode: the return was "
         f"higher than predicted.{warning}", best(advantages), advantages),
        ("Value spikes", "Frames whose value differs most from that of the frames before and after "
         "them.", best(spikes), spikes),
        *((f"Failures: {failure['cause'].replace('_', ' ')}", _explain_cause(failure["cause"]),
           np.array([steps.bounds[trajectory] + step for trajectory, step in failure["steps"]]),
           None) for failure in failures),
        *([] if failures else [
            ("Episodes without a reward", "The last frames of these episodes.",
             failed_ends(steps, most), None)])]
    if agent.features:
        layer = agent.opening_layer()
        output = agent.outputs_at(layer)[0]
        gaps, residuals = _errors(agent, layer, output)
        what = f"{title_of(output, agent.action_labels)} at {layer}"
        lists += [
            ("Largest completeness errors", f"Frames in which the summed attribution of {what} "
             "differs most from the change of the output from its baseline, relative to that "
             "change.", best(gaps), gaps),
            ("Largest residuals", "Frames in which the residual has the largest share of the "
             f"|attribution| of {what}.", best(residuals), residuals)]
    return [{"title": title, "why": why,
             "steps": [[*steps.place(step), None if scores is None else float(scores[step])]
                       for step in chosen.tolist()]}
            for title, why, chosen, scores in lists if len(chosen)]


def _explain_cause(cause: str) -> str:
    """Return the page's explanation of a cause of failure."""
    return _WHY.get(cause, "When the last step is replayed in the real game without the nearby "
                           f"hazards of the kind {cause.replace('_', ' ')}, these episodes do not "
                           "end.")


def find_failures(agent: AttributedAgent) -> list[dict]:
    """Find the causes of failed episodes by replaying them, and return their last steps by cause,
    in the format of ``PageContent.failures``. Episodes that a trajectory cuts off are left out."""
    steps = agent.steps
    ends = np.flatnonzero(steps.ended)
    causes = recorded_causes(agent.recording.folder, np.unique(steps.episode[ends]).tolist())
    by_cause: dict[str, list] = {}
    for end in ends.tolist():
        if steps.episode[end] in causes:
            by_cause.setdefault(causes[steps.episode[end]], []).append(steps.place(end))
    return [{"cause": cause, "steps": by_cause[cause]} for cause in sorted(
        by_cause, key=lambda cause: (-len(by_cause[cause]), cause))]


def _errors(agent: AttributedAgent, layer: str, output: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the completeness error of an output at each step, and the share of the residual in the
    summed |attribution| to the layer, (N,) each."""
    errors, shares = [], []
    for trajectory in range(agent.steps.num_trajectories):
        arrays = agent.attribution(layer, output, trajectory)
        sizes = np.abs(arrays["cells"].astype(np.float32)).sum(axis=(1, 2))
        errors.append(arrays["gap"])
        shares.append(sizes[:, -1] / np.maximum(sizes.sum(axis=1), np.finfo(np.float32).tiny))
    return np.concatenate(errors), np.concatenate(shares)
