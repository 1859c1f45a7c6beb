"""Attribute an agent's outputs to the features of its layers, along trajectories of a recording.

A killed run goes on behind the last trajectory; more layers and outputs can be added later.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.acting import run_policy
from clarity.attributing.clarity_files import (
    ACTIVATIONS,
    Attributed,
    AttributionFolder,
    FeaturesFolder,
    LayerFeatures,
    Trajectories,
    finished_layers,
    quantiles,
)
from clarity.attributing.flags import (
    Opened,
    add_agent_flags,
    add_output_flags,
    add_steps_flag,
)
from clarity.attributing.integration import GAUSS, RIGHT, RULES, Attributor, Integration
from clarity.attributing.layers import Cut
from clarity.attributing.recordings import (
    CHOICES,
    FAILURES,
    IN_ORDER,
    Recording,
    check_finite_frames,
)
from clarity.attributing.reduction import cells_first
from common.cli import Parser, count, from_zero, set_up_logging
from common.errors import UserError, script_main
from common.files import versions
from common.outputs import POLICY, PUBLISHED_POLICY, VALUE, Output, outputs_named
from common.progress import Progress

FRAMES_A_PASS = 64
NUM_REFERENCE = 1024  # observations over which an output's deviation is taken
PUBLISHED = Integration(10, RIGHT, None)


def tolerance(text: str) -> float:
    """A share above 0, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must lie above 0 and not above 1, not '{text}'")
    return value


def parser() -> Parser:
    flags = Parser(__doc__)
    add_agent_flags(flags)
    flags.add_argument("--features_dir", type=Path,
                       default=Path("analysis") / "clarity" / "features",
                       help="folder of python -m clarity.features; its layers if --layers is not "
                            "given")
    flags.add_argument("--outputs", nargs="+", metavar="OUTPUT", default=[VALUE],
                       help="scalars to attribute: value, log_prob_right, log_prob_any_right, "
                            f"taken and others; {POLICY}: all log-probabilities of actions and "
                            f"directions; {PUBLISHED_POLICY}: all logits and their sums")
    flags.add_argument("--num_trajectories", type=count, default=8,
                       help="trajectories, each of consecutive episodes")
    flags.add_argument("--num_steps", type=count, default=512, help="steps of a trajectory")
    flags.add_argument("--episodes", type=from_zero, nargs="+", metavar="EPISODE",
                       help="numbers of the recorded episodes that trajectories are made of, in "
                            "this order; all of them if not given")
    flags.add_argument("--choose", choices=CHOICES, default=IN_ORDER,
                       help=f"{FAILURES}: episodes with the smallest sum of rewards first")
    add_steps_flag(flags)
    flags.add_argument("--integration", choices=RULES, default=GAUSS,
                       help="nodes of the integral: those of Gauss and Legendre, or right ends of "
                            "equal parts")
    flags.add_argument("--tolerance", type=tolerance, default=Integration().tolerance,
                       help="error of an integral, as a share of output minus baseline, above "
                            "which it is refined")
    flags.add_argument("--published_mode", action="store_true",
                       help="as published: 10 right ends, no refinement, logits where --outputs "
                            f"has {POLICY}; for comparison")
    add_output_flags(flags, "attribution")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    set_up_logging(args.log_level)
    opened = Opened(args, None if args.layers else finished_layers(args.features_dir))
    outputs, integration = asked(args)
    places = opened.recording.trajectories(args.num_trajectories, args.num_steps, args.choose,
                                           args.episodes)
    features = {cut.name: features_of(args.features_dir, cut, opened) for cut in opened.cuts}
    described = (f"{len(places)} trajectories of {', '.join(map(str, map(len, places)))} steps; "
                 f"layers: {', '.join(features)}; outputs: "
                 + ", ".join(output.name for output in outputs))
    if args.dry_run:
        print(described)
        return
    if len(places) < args.num_trajectories:
        print(f"the recording has episodes for {len(places)} of {args.num_trajectories} "
              "trajectories")
    folder = AttributionFolder(args.output_dir)
    folder.open({
        **opened.description, "num_trajectories": args.num_trajectories,
        "num_steps": args.num_steps, "choose": args.choose, "episodes": args.episodes,
        "seed": args.seed, **vars(integration), "published_mode": args.published_mode,
        "versions": versions()}, args.overwrite)
    if not folder.trajectories_file.exists():
        folder.add_trajectories(steps_of(opened, places))
    deviations = deviations_of(opened, outputs, args.seed)
    for cut in opened.cuts:
        folder.open_layer(features[cut.name], {
            "features_dir": str(args.features_dir), "layer": cut.layer.name,
            "place": features[cut.name].settings["place"], "partial": cut.partial})
        waiting = [output for output in outputs
                   if not folder.summary_file(cut.name, output.name).exists()]
        attribute_layer(opened, cut, features[cut.name], waiting, integration, places,
                        np.array([deviations[output.name] for output in waiting]), folder)
        for output in waiting:
            folder.add_summary(cut.name, output.name, summary_of(
                folder, cut.name, output.name, len(places), deviations[output.name],
                integration.tolerance))
        print(said(cut.name, [folder.summary(cut.name, output.name) for output in outputs]))
    print(f"wrote {args.output_dir}: {described}")


def asked(args: argparse.Namespace) -> tuple[tuple[Output, ...], Integration]:
    """The outputs and the integration of the flags."""
    if not args.published_mode:
        return outputs_named(args.outputs), Integration(args.integrate_steps, args.integration,
                                                        args.tolerance)
    return outputs_named([PUBLISHED_POLICY if name == POLICY else name for name in args.outputs]
                         ), PUBLISHED


def features_of(path: Path, cut: Cut, opened: Opened) -> LayerFeatures:
    """The features of a layer of this agent.

    Raises:
        UserError: if they are missing, damaged, or of another agent, game or layer.
    """
    features = FeaturesFolder(path, cut.name).read()
    again = "; give --features_dir of this agent, or find them with python -m clarity.features"
    for key, what in (("agent_sha256", "agent"), ("game", "game")):
        found, ours = features.settings.get(key), opened.description[key]
        if found != ours:
            raise UserError(f"the features in {path / cut.name} are of the {what} "
                            f"{str(found)[:12]}, and this one is {str(ours)[:12]}{again}")
    if (features.settings.get("layer") != cut.layer.name
            or features.mean_activations.shape != cut.shape):
        raise UserError(f"the features in {path / cut.name} are of the layer "
                        f"{features.settings.get('layer')} with "
                        f"{features.mean_activations.shape} activations, not of {cut.layer.name} "
                        f"with {cut.shape}{again}")
    return features


def steps_of(opened: Opened, places: Sequence[np.ndarray]) -> Trajectories:
    """What happened along trajectories, and what the agent made of it."""
    recording = opened.recording
    values, log_probs, columns, behind = [], [], [], []
    for trajectory in places:
        for begin in range(0, len(trajectory), FRAMES_A_PASS):
            rows = recording.rows(trajectory[begin:begin + FRAMES_A_PASS])
            output = run_policy(opened.policy, opened.compute, rows.frames,
                                torch.from_numpy(rows.entering).to(opened.compute.device))
            values.append(output.values.cpu().numpy())
            log_probs.append(output.log_probs.cpu().numpy())
        columns += [step_columns(recording, some) for some in np.split(
            trajectory, np.flatnonzero(np.diff(trajectory[:, 0])) + 1)]
        episode, row = trajectory[-1]
        last = recording.steps(int(episode)).iloc[row + 1]
        behind.append(0.0 if last["done"] else float(last["value"]))
    steps = np.concatenate(places)
    return Trajectories(
        np.array([len(each) for each in places]), steps[:, 0], steps[:, 1],
        *(np.concatenate(column) for column in zip(*columns)), np.concatenate(values),
        np.concatenate(log_probs), np.array(behind))


def step_columns(recording: Recording, places: np.ndarray) -> tuple[np.ndarray, ...]:
    """Level seed, action, reward that it earned and whether it ended the episode, of steps of one
    episode (T, 2)."""
    table, rows = recording.steps(int(places[0, 0])), places[:, 1]
    return (table["level_seed"].to_numpy()[rows], table["action"].to_numpy()[rows],
            table["reward"].to_numpy()[rows + 1], table["done"].to_numpy()[rows + 1])


def deviations_of(opened: Opened, outputs: Sequence[Output], seed: int) -> dict[str, float]:
    """Deviation of each output over observations of the recording, by its name."""
    found = []
    places = opened.recording.observations(NUM_REFERENCE, seed)
    for begin in range(0, len(places), FRAMES_A_PASS):
        rows = opened.recording.rows(places[begin:begin + FRAMES_A_PASS])
        output = run_policy(opened.policy, opened.compute, rows.frames,
                            torch.from_numpy(rows.entering).to(opened.compute.device))
        actions = torch.from_numpy(rows.actions).to(opened.compute.device)
        found.append(torch.stack([each(output, actions) for each in outputs]).double().cpu())
    return dict(zip((output.name for output in outputs),
                    torch.cat(found, dim=1).numpy().std(axis=1).tolist()))


def attribute_layer(opened: Opened, cut: Cut, features: LayerFeatures,
                    outputs: Sequence[Output], integration: Integration,
                    places: Sequence[np.ndarray], deviations: np.ndarray,
                    folder: AttributionFolder) -> None:
    """Write the attributions to one layer, trajectory by trajectory, and the activations.

    Args:
        outputs: K of them.
        places: of each trajectory episode and row of its steps (T, 2).
        deviations: of the outputs (K,).
    """
    if not outputs:
        return
    attributor = Attributor(opened.policy, opened.compute, cut, outputs, integration,
                            features.mean_activations
                            if features.settings["baseline"] == "mean" else None)
    names = [output.name for output in outputs]
    with Progress(sum(map(len, places)), f"{cut.name} step") as progress:
        for number, trajectory in enumerate(places):
            if not all(folder.file(cut.name, name, number).exists()
                       for name in (*names, ACTIVATIONS)):
                activations, attributed = along(opened, attributor, features, trajectory,
                                                deviations)
                folder.add_activations(cut.name, number, activations)
                for name, each in zip(names, attributed):
                    folder.add(cut.name, name, number, each)
            progress.update(progress.done + len(trajectory))


def along(opened: Opened, attributor: Attributor, features: LayerFeatures,
          trajectory: np.ndarray, deviations: np.ndarray) -> tuple[np.ndarray, list[Attributed]]:
    """Activations of features (T, H, W, F) and attributions of each output along a trajectory of
    places (T, 2).

    Raises:
        UserError: if a number is not finite; its frame is named.
    """
    cut, reducer = attributor.cut, features.reducer
    all_activations: list[np.ndarray] = []
    pieces: list[list[Attributed]] = [[] for _ in attributor.outputs]
    for begin in range(0, len(trajectory), FRAMES_A_PASS):
        batch = trajectory[begin:begin + FRAMES_A_PASS]
        rows = opened.recording.rows(batch)
        begun = attributor.begin(rows.frames, rows.entering)
        held = begun.activations.cpu().numpy().reshape(len(batch), *cut.shape)
        check_finite_frames(held, batch, f"activations of the layer {cut.name}")
        held = cells_first(held)
        shape = (len(batch), *cut.shape[1:], -1)
        all_activations.append(reducer.activations(held).reshape(shape).astype(np.float16))
        found = attributor.attribute(begun, rows.actions, deviations)
        for number, values in enumerate(found.values):
            check_finite_frames(values, batch, f"attributions to the layer {cut.name}")
            coefficients, residual = reducer.attributions(cells_first(values), held)
            cells = np.concatenate([coefficients, residual[:, None]], axis=1).reshape(shape)
            pieces[number].append(Attributed(
                cells.astype(np.float16), cells.sum(axis=(1, 2)).astype(np.float32),
                found.outputs[number], found.baselines[number], found.gaps[number],
                found.steps[number]))
    return np.concatenate(all_activations), [Attributed(**{
        name: np.concatenate([getattr(each, name) for each in some]) for name in vars(some[0])})
        for some in pieces]


def summary_of(folder: AttributionFolder, layer: str, output: str, number: int, deviation: float,
               allowed: float | None) -> dict:
    """How the attributions of an output came out in all trajectories."""
    gaps = np.concatenate([folder.attributed(layer, output, each).gap for each in range(number)])
    return {"deviation": deviation, "frames": len(gaps), **quantiles(gaps),
            "above": int((gaps > (Integration().tolerance if allowed is None else allowed)).sum())}


def said(layer: str, summaries: Sequence[dict]) -> str:
    """The errors of a layer's attributions, in a line."""
    frames = sum(each["frames"] for each in summaries)
    return (f"{layer}: gap median {max(each['gap_median'] for each in summaries):.2%}, 99 % "
            f"{max(each['gap_99'] for each in summaries):.2%} of the worst output; above the "
            f"tolerance in {sum(each['above'] for each in summaries)} of {frames} frames and "
            "outputs")


if __name__ == "__main__":
    raise SystemExit(main())
