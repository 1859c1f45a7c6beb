"""Measure how a simulator's loss grows with the simulated step, on episodes held out of training.

The simulator is compared with three predictors that it must beat: the last initial frame, the mean
frame of the training episodes, and the simulator with the actions of another window.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents.object_masks import ObjectPainter, recorded_without
from common.cli import Parser, add_save_dir_flag, count
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import atomic_folder, save_json, sha256, versions
from common.game_objects import objects_of
from common.replay import recorded_game
from common.video import write_strip
from generative.config import LossOverTimeConfig, SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset
from generative.flags import add_simulator_flags, read_simulator_flags
from generative.loss_over_time import (
    IMAGE_MSE,
    OBJECT_SHOWN,
    OBJECTS_PLOT_NAME,
    PLOT_NAME,
    PREDICTORS,
    SETTINGS_NAME,
    SIMULATOR,
    TABLE_NAME,
    BaselineComparison,
    ObjectFrames,
    choose_windows,
    comparisons,
    loss_over_time,
    mean_frame,
    strip_name,
    table_of,
    truth_and_imagination,
)
from generative.loss_over_time_figure import TITLES_OF_AGENT, plot_losses, plot_objects
from generative.runs import leakage_reason, open_simulator, run_of
from generative.straight_through import LatentSampler

SHOWN_STEPS = range(1, 11)
NUM_STRIPS = 8
STRIDE = 2  # every other step
STRIP_HEIGHT = 128


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file to measure", model_file_required=True)
    add_save_dir_flag(flags)
    flags.add_argument("--num_batches", type=count, key="analysis.loss_over_time.num_batches",
                       help="batches of held-out windows")
    flags.add_argument("--sample_latents", action="store_true",
                       help="draw the latent variables instead of taking the most likely ones")
    flags.add_argument("--output_dir", type=Path,
                       help="new folder to write to; if not given, <save_dir>/loss_over_time/ and "
                            "in it --gen_mod_exp_name, or the time if that is not given either")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, explicit, parameters = read_simulator_flags(parser(), argv)
    common, config = parameters.common, parameters.get(SimulatorConfig)
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    session = (args.gen_mod_exp_name if "gen_mod_exp_name" in explicit
               else time.strftime("%Y%m%d_%H%M%S"))
    output = args.output_dir or parameters.folders.loss_over_time / session
    if output.exists():
        raise UserError(f"{output} exists already; delete it or choose another --output_dir")

    simulator = open_simulator(args.model_file, args.agent_file, config, compute)
    run = run_of(args.model_file)
    num_init_steps = simulator.config.num_init_steps
    if args.num_initializing_steps not in (None, num_init_steps):
        raise UserError(f"--num_initializing_steps is {args.num_initializing_steps}, but this "
                        f"simulator was trained with {num_init_steps}; leave it out")
    training = run.training if run else parameters.get(TrainingConfig)
    split_seed = run.seed if run else args.seed
    dataset = RolloutDataset(Path(common.data_dir), num_init_steps, config.num_sim_steps,
                             training.terminal_absorbing)
    dataset.require_states(simulator.config.agent_hidden_size)
    split = dataset.split(training.held_out_fraction, split_seed)
    num_batches = parameters.get(LossOverTimeConfig).num_batches
    batch_size = parameters.get(TrainingConfig).batch_size
    windows = choose_windows(split.held_out, num_batches * batch_size, args.seed)
    doubt = leakage_reason(run, common.data_dir, len(dataset.episodes))
    num_episodes = len(set(dataset.episodes_of(windows).tolist()))
    print(f"{len(windows)} of {len(split.held_out)} held-out windows, showing {num_episodes} "
          f"episodes ({num_batches} batches of {batch_size} were asked for)", flush=True)
    if doubt:
        print(f"these episodes may have been trained on: {doubt}", flush=True)

    mean = mean_frame(dataset, split.train, args.seed)
    draw = LatentSampler("sample" if args.sample_latents else "mode",
                      torch.Generator(compute.device).manual_seed(args.seed))
    objects = frames_without_objects(dataset)
    result = loss_over_time(simulator, dataset, windows, batch_size, mean, draw, compute, objects)
    table = table_of(result, args.seed)
    compared = comparisons(result, args.seed)
    shown = result.windows[result.counted.all(axis=0)][:NUM_STRIPS]
    films = truth_and_imagination(simulator, dataset, shown, draw, compute) if len(shown) else ()

    with atomic_folder(output) as folder:
        result.save(folder)
        table.to_csv(folder / TABLE_NAME, index=False, float_format="%.6g")
        title = (f"{len(windows)} windows of {num_episodes} held-out episodes, each up to its end; "
                 "bands: 95 % intervals")
        plot_losses(table, folder / PLOT_NAME, title)
        if objects:
            plot_objects(table, objects.kinds, folder / OBJECTS_PLOT_NAME, title)
        for window, truth, imagined in zip(shown.tolist(), *films):
            moments = slice(0, None, STRIDE)
            write_strip(folder / strip_name(window), [list(truth[moments]),
                                                      list(imagined[moments])], STRIP_HEIGHT)
        save_json(folder / SETTINGS_NAME, {
            "model_file": str(args.model_file), "model_sha256": sha256(args.model_file),
            "agent_file": str(args.agent_file), "agent_sha256": sha256(args.agent_file),
            "data_dir": common.data_dir, "data_index_sha256": sha256(dataset.folder.index_file),
            "held_out_fraction": training.held_out_fraction, "split_seed": split_seed,
            "why_perhaps_trained_on": doubt, "seed": args.seed, "latents": draw.how,
            "precision": compute.precision, "num_init_steps": num_init_steps,
            "num_sim_steps": config.num_sim_steps, "batch_size": batch_size,
            "num_batches": num_batches, "objects": list(result.objects),
            "windows": result.windows.tolist(),
            "action_windows": result.action_windows.tolist(),
            "episodes": result.episodes.tolist(),
            "comparisons": [dataclasses.asdict(each) for each in compared],
            "versions": versions()})
    print_summary(table, compared)
    print(f"wrote {output}")


def frames_without_objects(dataset: RolloutDataset) -> ObjectFrames | None:
    """Recorded frames without each kind of object, from the real game; None, with a sentence that
    says why, where there are none."""
    try:
        config = recorded_game(dataset.folder)
    except UserError as error:
        print(f"objects are not measured: {error}", flush=True)
        return None
    kinds = objects_of(config.env_name)
    if not kinds:
        print(f"objects are not measured: there is no table of those of {config.env_name}",
              flush=True)
        return None
    painter = ObjectPainter(config, kinds)

    def of(windows: np.ndarray) -> np.ndarray:
        batch, first = dataset.batch(windows), dataset.num_init_steps - 1
        labels = batch.frames[first:].numpy()  # (T, B, C, H, W)
        shown = (batch.terminals[first:].cumsum(dim=0) == 0).sum(dim=0).tolist()  # steps, (B,)
        found = np.repeat(labels[:, :, None], len(kinds), axis=2)
        for number, (place, steps) in enumerate(zip(map(dataset.place, windows.tolist()), shown)):
            found[:steps, number] = recorded_without(
                dataset.folder, painter, place.episode, place.frame, labels[:steps, number])
        return found

    return ObjectFrames(tuple(kind.name for kind in kinds), of)


def print_summary(table: pd.DataFrame, compared: list[BaselineComparison]) -> None:
    """Each predictor's image error and what it does to the agent at the first steps, which
    predictors the simulator beats, and what it shows."""
    for kind, title in ((IMAGE_MSE, "mean squared error of the image"), *TITLES_OF_AGENT.items()):
        rows = table[(table["kind"] == kind) & table["step"].isin(SHOWN_STEPS)]
        means = rows.pivot(index="predictor", columns="step", values="mean").reindex(PREDICTORS)
        print(f"{title} by simulated step, up to the end of the episode")
        print(means.to_string(float_format="{:.5f}".format, index_names=False))
    rows = table[table["kind"].str.startswith(OBJECT_SHOWN) & (table["predictor"] == SIMULATOR)
                 & table["step"].isin(SHOWN_STEPS)]
    if len(rows):
        print("share of the objects in view that the simulator shows")
        shares = rows.assign(kind=rows["kind"].str.removeprefix(OBJECT_SHOWN)).pivot(
            index="kind", columns="step", values="mean")
        print(shares.to_string(float_format="{:.3f}".format, index_names=False))
    for each in compared:
        if each.steps:
            print(f"the simulator beats {each.predictor} at {each.better} of the "
                  f"{len(each.steps)} steps from {each.steps[0]} to {each.steps[-1]}, clearly "
                  f"(95 % interval of the difference) at {each.clearly}")


if __name__ == "__main__":
    raise SystemExit(main())
