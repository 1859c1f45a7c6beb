"""Measure how a simulator's loss grows with the simulated step, on episodes held out of training.

The simulator is compared with baselines: the last initial frame, the mean frame of the training
episodes, the simulator with the actions of another window, and a constant policy. The fidelity
card adds PSNR, SSIM and further controls (docs/fidelity.md); with --life_starts the agent also
continues from recorded frames in the simulator and in the real game. --random_starts,
--event_starts and --equal_view_levels measure what the simulator generates (worlds.json).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from agents.agent_file import load_agent
from agents.object_masks import ObjectPainter, recorded_without
from agents.provenance import agent_sha256
from agents.replay import recorded_game, replayed
from common.cli import Parser, add_save_dir_flag, count, from_zero, whole
from common.devices import resolve_compute
from common.errors import UserError, script_main
from common.files import sha256
from common.game_constants import pixels_per_square
from common.progress import with_progress
from common.results import ResultStore
from common.video import write_strip
from envs.objects import objects_of
from generative import dream_life, world_card
from generative.card_tables import print_card, print_summary
from generative.config import LossOverTimeConfig, SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset
from generative.fidelity import FidelityCard, ObjectFrames, OtherAgent
from generative.figures import plot_card, plot_losses, plot_objects
from generative.flags import add_simulator_flags
from generative.loss_over_time import (
    LOSS_OVER_TIME,
    Means,
    choose_windows,
    fit_means,
    loss_over_time,
    truth_and_imagination,
)
from generative.loss_tables import comparisons, table_of
from generative.networks import LatentSampler
from generative.realism import FEWEST_FRAMES
from generative.runs import leakage_reason, open_simulator, run_of
from generative.simulator import Simulator
from generative.world_contents import check_squares, recorded_worlds
from generative.world_simulations import Simulations
from generative.world_tables import as_json, print_tables

NUM_STRIPS = 8
STRIDE = 2  # every other step
STRIP_HEIGHT = 128


def parser() -> Parser:
    flags = Parser(__doc__)
    add_simulator_flags(flags, "simulator file to measure", model_file_required=True,
                        shown=("gen_mod_exp_name",))
    add_save_dir_flag(flags)
    flags.add_argument("--num_batches", type=count, key="analysis.loss_over_time.num_batches",
                       help="number of batches of held-out windows")
    flags.add_argument("--sample_latents", action="store_true",
                       help="sample the latent variables instead of taking the most likely values")
    flags.add_argument("--unseen", action="store_true",
                       help="use windows of all episodes, for a recording on which the simulator "
                            "was not trained")
    flags.add_argument("--train_data_dir", type=Path,
                       help="recording from which the mean frame and the mean policy are computed; "
                            "if not given, the episodes that are not held out, or with --unseen "
                            "the half of the episodes without the window")
    flags.add_argument("--rendered_worlds", action="store_true",
                       help="simulate the windows in their recorded worlds (record.py --worlds); "
                            "by default, a simulator with worlds samples them")
    flags.add_argument("--compare_model_file", type=Path,
                       help="file of a second simulator of the same agent, evaluated on the same "
                            "windows")
    flags.add_argument("--other_agent_file", type=Path,
                       help="file of an agent that was not used in training, evaluated on the same "
                            "frames")
    flags.add_argument("--life_starts", type=from_zero, default=0,
                       help="number of starts from which the agent continues in the simulator and "
                            "in the real game; 0 for no such comparison")
    flags.add_argument("--random_starts", type=from_zero, default=0,
                       help=f"number of random starts to compare with recorded starts, at least "
                            f"{FEWEST_FRAMES}; 0 for no such comparison")
    flags.add_argument("--event_starts", type=from_zero, default=0,
                       help="number of recorded frames, and of level starts for "
                            "--equal_view_levels, from which worlds are sampled to compare deaths, "
                            "coins and contents with the game; 0 for no such comparison")
    flags.add_argument("--num_worlds", type=whole(2, 10**4), default=16,
                       help="number of worlds sampled for each of these frames")
    flags.add_argument("--equal_view_levels", type=from_zero, default=20000,
                       help="number of levels from which contents beyond equal views are counted; "
                            "0 to leave this out")
    flags.add_argument("--output_dir", type=Path,
                       help="new output folder; if not given, a folder in "
                            "<save_dir>/loss_over_time named by --gen_mod_exp_name, or else by "
                            "the time")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, explicit, parameters = parser().read(argv)
    common, config = parameters.common, parameters.get(SimulatorConfig)
    compute = resolve_compute(common.device, common.gpu_device, args.precision)
    session = (args.gen_mod_exp_name if "gen_mod_exp_name" in explicit
               else time.strftime("%Y%m%d_%H%M%S"))
    output = args.output_dir or parameters.folders.loss_over_time / session
    if output.exists():
        raise UserError(f"{output} already exists; delete it or choose another --output_dir")
    output_store = ResultStore(output, LOSS_OVER_TIME)
    output_store.check_replaceable()

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
    dataset.check_agent(args.agent_file, simulator.agent.policy)
    split = dataset.split(training.held_out_fraction, split_seed)
    num_batches = parameters.get(LossOverTimeConfig).num_batches
    batch_size = parameters.get(TrainingConfig).batch_size
    held_out, train = split.held_out, split.train
    if args.unseen:
        held_out = train = np.arange(len(dataset))
    doubt = leakage_reason(args.model_file, dataset, held_out, assured=args.unseen)
    worlds = recorded_worlds(simulator, dataset, held_out) if args.rendered_worlds else None
    if worlds:
        held_out = np.intersect1d(held_out, dataset.attach_worlds(worlds))
    noise = describe_noise(dataset)
    print(f"recorded episodes: {noise}", flush=True)
    windows = choose_windows(held_out, num_batches * batch_size, args.seed)
    num_episodes = len(set(dataset.episodes_of(windows).tolist()))
    print(f"{len(windows)} of {len(held_out)} held-out windows, showing {num_episodes} "
          f"episodes (at most {num_batches} batches of {batch_size} are used)", flush=True)
    if doubt:
        print(f"the simulator may have been trained on these episodes: {doubt}", flush=True)

    means = training_means(args, dataset, train, simulator)
    draw = LatentSampler("sample" if args.sample_latents else "mode",
                      torch.Generator(compute.device).manual_seed(args.seed))
    objects = frames_without_objects(dataset)
    other_simulator = args.compare_model_file and open_simulator(
        args.compare_model_file, args.agent_file, config, compute)
    other_agent = args.other_agent_file and OtherAgent(
        load_agent(args.other_agent_file, compute.device), dataset, compute)
    if other_simulator and worlds:
        check_squares(simulator, other_simulator)
    card = FidelityCard(*find_camera(dataset, windows), other_simulator, other_agent, objects)
    result = loss_over_time(simulator, dataset, windows, batch_size, means, draw, compute, card)
    table = table_of(result, args.seed)
    compared = comparisons(result, args.seed)
    shown = result.windows[result.counted.all(axis=0)][:NUM_STRIPS]
    films = truth_and_imagination(simulator, dataset, shown, draw, compute) if len(shown) else ()
    life = None
    if args.life_starts:
        episodes = sorted(set(dataset.episodes_of(held_out).tolist()))
        starts = dream_life.choose_starts(dataset, episodes, args.life_starts, args.seed)
        life = dream_life.compare_lives(simulator, dataset, starts, draw,
                                        dream_life.coin_reward(dataset, episodes), compute,
                                        args.rendered_worlds, args.seed)
        lives = dream_life.summarize(life, args.seed)
    generated = world_card.measure(
        Simulations(simulator, dataset, held_out, draw, compute, args.seed, batch_size, worlds),
        args.random_starts, args.event_starts, args.num_worlds, args.equal_view_levels)

    settings = {
        "model_file": str(args.model_file), "model_sha256": sha256(args.model_file),
        "agent_file": str(args.agent_file), "agent_sha256": agent_sha256(args.agent_file),
        "data_dir": common.data_dir,
        "recording_sha256": dataset.folder.sha256(args.check_contents),
        "held_out_fraction": training.held_out_fraction, "split_seed": split_seed,
        "unseen": args.unseen, "action_noise": noise, "rendered_worlds": args.rendered_worlds,
        "train_data_dir": str(args.train_data_dir or ""),
        **describe_file(args.compare_model_file, "compare_model"),
        **describe_file(args.other_agent_file, "other_agent"),
        "why_perhaps_trained_on": doubt, "seed": args.seed, "latents": draw.how,
        "precision": compute.precision, "num_init_steps": num_init_steps,
        "num_sim_steps": config.num_sim_steps, "batch_size": batch_size,
        "num_batches": num_batches, "objects": list(objects.kinds) if objects else [],
        "windows": result.windows.tolist(),
        "action_windows": result.action_windows.tolist(),
        "episodes": result.episodes.tolist(),
        "comparisons": compared}
    with output_store.replace(settings) as folder:
        result.save(folder)
        store = ResultStore(folder, LOSS_OVER_TIME)
        store.write("table", value=table)
        title = (f"{len(windows)} windows of {num_episodes} held-out episodes, {noise}, each up to "
                 "its end; bands: 95 % intervals")
        plot_losses(table, store.file_of("plot"), title)
        if objects:
            plot_objects(table, objects.kinds, store.file_of("objects_plot"), title)
        plot_card(table, store.file_of("card_plot"),
                  f"fidelity card: {title}, terminal frames excluded")
        if generated:
            store.write("worlds", value=as_json(generated.tables))
            if generated.samples is not None:
                generated.samples.save(store.file_of("world_samples"))
        if life is not None:
            store.write("lives", value=life)
            store.write("lives_summary", value=lives)
        for window, truth, imagined in zip(shown.tolist(), *films):
            moments = slice(0, None, STRIDE)
            write_strip(store.file_of("strip", f"{window:06d}"),
                        [list(truth[moments]), list(imagined[moments])], STRIP_HEIGHT)
    print_summary(table, compared)
    print_card(table)
    if life is not None:
        dream_life.print_lives(lives)
    if generated:
        print_tables(generated.tables)
    print(f"wrote {output}")


def training_means(args: argparse.Namespace, dataset: RolloutDataset, train: np.ndarray,
                   simulator: Simulator) -> Means:
    """Compute the mean frame and mean policy of the training episodes.

    Args:
        train: windows of the evaluated recording that the simulator was trained on; with --unseen,
            all of its windows.

    Raises:
        UserError: if the training recording is the evaluated one, or was made by another agent.
    """
    policy = simulator.agent.policy
    if args.train_data_dir is None:
        return fit_means(dataset, train, policy, args.seed, crossed=args.unseen)
    if args.train_data_dir.resolve() == dataset.folder.path.resolve():
        raise UserError(f"--train_data_dir {args.train_data_dir} is the evaluated recording; leave "
                        "it out")
    training = RolloutDataset(args.train_data_dir, dataset.num_init_steps, 1)
    training.check_agent(args.agent_file, policy)
    return fit_means(training, np.arange(len(training)), policy, args.seed)


def describe_noise(dataset: RolloutDataset) -> str:
    """Return whether the recording was made with action noise, for messages and titles."""
    description = dataset.folder.description()
    if "action_noise" not in description:
        return "it is not known whether with action noise"
    if not description["action_noise"]:
        return "without action noise"
    share = description.get("action_noise_share", 1)
    return "with action noise" + (f" in {share:.0%} of the episodes" if share < 1 else "")


def describe_file(path: Path | None, name: str) -> dict[str, str]:
    """Return path and checksum of an optional file as settings; {} without a file."""
    return {} if path is None else {f"{name}_file": str(path), f"{name}_sha256": sha256(path)}


def find_camera(dataset: RolloutDataset, windows: np.ndarray
                ) -> tuple[float | None, Callable[[np.ndarray], torch.Tensor | None] | None]:
    """Return the camera's scale in pixels per square, and a function that looks up positions.

    The results are the fields ``scale`` and ``positions`` of ``FidelityCard``. If the camera does
    not move, return (0, None). If its movement is not known, print the reason and return (None,
    None).

    Args:
        dataset: the recorded windows.
        windows: numbers of the windows whose positions may be needed.
    """
    try:
        game = recorded_game(dataset.folder)
        scale = pixels_per_square(game.env_name, game.distribution_mode)
        if scale is None:
            raise UserError(f"the motion of the camera in {game.env_name} "
                            f"({game.distribution_mode}) has not been verified")
        if scale == 0:
            return scale, None
        if dataset.has_positions:
            return scale, lambda numbers: dataset.batch(numbers).positions
        print("the player's positions were not recorded (record.py --positions); replaying the "
              "levels to find them", flush=True)
        return scale, replay_positions(dataset, windows)
    except UserError as error:
        print(f"remembered and newly revealed pixels are not measured: {error}", flush=True)
        return None, None


def replay_positions(dataset: RolloutDataset, windows: np.ndarray
                     ) -> Callable[[np.ndarray], torch.Tensor | None]:
    """Find the player's positions at all frames of windows by replaying their episodes.

    Returns:
        Function from the numbers of B windows (B,) to positions (frames, B, 2), as in
        ``Windows.positions``.

    Raises:
        UserError: see ``agents.replay.replayed``.
    """
    positions = {}
    for number in with_progress(windows.tolist(), len(windows), "replay"):
        place = dataset.place(number)
        begin = place.frame - dataset.num_init_steps + 1
        last = dataset.folder.array_files(place.episode).frames.shape[0] - 1  # terminal row
        rows = range(max(begin, 0), min(begin + dataset.window_length, last))
        positions[number] = np.full((dataset.window_length, 2), np.nan, np.float32)
        for row, state in replayed(dataset.folder, place.episode, rows):
            positions[number][row - begin] = state.player["x"], state.player["y"]
    return lambda numbers: torch.from_numpy(
        np.stack([positions[number] for number in numbers.tolist()], axis=1))


def frames_without_objects(dataset: RolloutDataset) -> ObjectFrames | None:
    """Return a provider that renders recorded frames in the game without each kind of object.

    If this is not possible, print the reason and return None.
    """
    try:
        config = recorded_game(dataset.folder)
    except UserError as error:
        print(f"objects are not measured: {error}", flush=True)
        return None
    kinds = objects_of(config.env_name)
    if not kinds:
        print("objects are not measured: hyperparams/game_objects.yml has no table of "
              f"{config.env_name}", flush=True)
        return None
    painter = ObjectPainter(config, kinds)

    def of(windows: np.ndarray) -> np.ndarray:
        batch, first = dataset.batch(windows), dataset.num_init_steps - 1
        labels = batch.frames[first:].numpy()  # (T, B, C, H, W)
        shown = (batch.terminals[first:].cumsum(dim=0) == 0).sum(dim=0).tolist()  # steps, (B,)
        frames = np.repeat(labels[:, :, None], len(kinds), axis=2)
        for number, (place, steps) in enumerate(zip(map(dataset.place, windows.tolist()), shown)):
            frames[:steps, number] = recorded_without(
                dataset.folder, painter, place.episode, place.frame, labels[:steps, number])
        return frames

    return ObjectFrames(tuple(kind.name for kind in kinds), of,
                        tuple(kind.changes_place for kind in kinds))


if __name__ == "__main__":
    raise SystemExit(main())
