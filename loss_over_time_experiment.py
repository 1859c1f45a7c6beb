"""Measure how a simulator's loss grows with the simulated step, see ``LossOptions``.

The simulator is compared with baselines: the last initial frame, the mean frame of the training
episodes, the simulator with the actions of another window, and a constant policy. The fidelity
card adds PSNR, SSIM and further controls (docs/fidelity.md); with --life_starts the agent also
continues from recorded frames in the simulator and in the real game. --random_starts,
--event_starts and --equal_view_levels measure what the simulator generates (worlds.json).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch

from agents.agent_file import load_agent
from agents.object_masks import ObjectPainter, recorded_without
from agents.provenance import agent_sha256
from agents.replay import level_states, recorded_game
from common.cli import count, from_zero, whole
from common.errors import UserError
from common.files import sha256
from common.game_constants import pixels_per_square
from common.options import SaveDirOptions, command, option, redefine
from common.progress import with_progress
from common.results import ResultStore
from common.video import write_strip
from envs.objects import objects_of
from generative import dream_life, world_card
from generative.card_tables import print_card, print_summary
from generative.config import LossOverTimeConfig, SimulatorConfig, TrainingConfig
from generative.dataset import RecordedWorlds, RolloutDataset
from generative.fidelity import FidelityCard, ObjectFrames, OtherAgent
from generative.figures import plot_card, plot_losses, plot_objects
from generative.flags import TRAINING_FLAGS, TrainSimulatorOptions
from generative.loss_over_time import (
    LOSS_OVER_TIME,
    LossOverTime,
    Means,
    choose_windows,
    fit_means,
    loss_over_time,
    truth_and_imagination,
)
from generative.loss_tables import comparisons, table_of
from generative.networks import LatentSampler
from generative.realism import FEWEST_FRAMES
from generative.runs import leakage_reason, run_of
from generative.simulator import Simulator
from generative.world_contents import check_squares, recorded_worlds
from generative.world_simulations import Simulations
from generative.world_tables import as_json, print_tables

NUM_STRIPS = 8
STRIDE = 2  # every other step
STRIP_HEIGHT = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions(SaveDirOptions, TrainSimulatorOptions):
    """Measure how a simulator's loss grows with the simulated step, on episodes held out of
    training."""

    hidden: ClassVar[Collection[str]] = tuple(
        name for name in TRAINING_FLAGS if name != "gen_mod_exp_name")

    model_file: Path = redefine(TrainSimulatorOptions, "model_file", default=dataclasses.MISSING,
                                help="simulator file to measure")
    num_batches: int | None = option(None, "number of batches of held-out windows", type=count,
                                     key="analysis.loss_over_time.num_batches")
    sample_latents: bool = option(
        False, "sample the latent variables instead of taking the most likely values")
    unseen: bool = option(False, "use windows of all episodes, for a recording on which the "
                                 "simulator was not trained")
    train_data_dir: Path | None = option(
        None, "recording from which the mean frame and the mean policy are computed; if not given, "
              "the episodes that are not held out, or with --unseen the half of the episodes "
              "without the window")
    rendered_worlds: bool = option(
        False, "simulate the windows in their recorded worlds (record.py --worlds); by default, a "
               "simulator with worlds samples them")
    compare_model_file: Path | None = option(
        None, "file of a second simulator of the same agent, evaluated on the same windows")
    other_agent_file: Path | None = option(
        None, "file of an agent that was not used in training, evaluated on the same frames")
    life_starts: int = option(
        0, "number of starts from which the agent continues in the simulator and in the real game; "
           "0 for no such comparison", type=from_zero)
    random_starts: int = option(
        0, f"number of random starts to compare with recorded starts, at least {FEWEST_FRAMES}; 0 "
           "for no such comparison", type=from_zero)
    event_starts: int = option(
        0, "number of recorded frames, and of level starts for --equal_view_levels, from which "
           "worlds are sampled to compare deaths, coins and contents with the game; 0 for no such "
           "comparison", type=from_zero)
    num_worlds: int = option(16, "number of worlds sampled for each of these frames",
                             type=whole(2, 10**4))
    equal_view_levels: int = option(
        20000, "number of levels from which contents beyond equal views are counted; 0 to leave "
               "this out", type=from_zero)
    output_dir: Path | None = option(
        None, "new output folder; if not given, a folder in <save_dir>/loss_over_time named by "
              "--gen_mod_exp_name, or else by the time")

    def new_store(self) -> ResultStore:
        """Return the output folder.

        Raises:
            UserError: if it exists.
        """
        name = (self.gen_mod_exp_name if "gen_mod_exp_name" in self.given
                else time.strftime("%Y%m%d_%H%M%S"))
        output = self.output_dir or self.parameters.folders.loss_over_time / name
        if output.exists():
            raise UserError(f"{output} already exists; delete it or choose another --output_dir")
        store = ResultStore(output, LOSS_OVER_TIME)
        store.check_replaceable()
        return store

    @property
    def batch(self) -> int:
        """Number of windows per batch."""
        return self.parameters.get(TrainingConfig).batch_size


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A simulator and the windows on which it is measured.

    Attributes:
        simulator: the simulator.
        dataset: all windows of the recording.
        held_out, train: numbers of the windows that were held out of training, and of those that
            were not; with --unseen, both are all windows.
        windows: the chosen held-out windows.
        worlds: recorded worlds of the windows; None if the simulator samples them.
        draw: choice of the latent variables.
        settings: settings that the choice of windows depends on.
        title: description of the windows for figures.
    """

    simulator: Simulator
    dataset: RolloutDataset
    held_out: np.ndarray
    train: np.ndarray
    windows: np.ndarray
    worlds: RecordedWorlds | None
    draw: LatentSampler
    settings: dict[str, Any]
    title: str


def measure_loss(options: LossOptions) -> Path:
    """Write losses, fidelity card and figures, and return their folder."""
    store = options.new_store()
    evaluation = choose_evaluation(options)
    objects = frames_without_objects(evaluation.dataset)
    result = measure_windows(options, evaluation, objects)
    table, compared = table_of(result, options.seed), comparisons(result, options.seed)
    shown = result.windows[result.counted.all(axis=0)][:NUM_STRIPS]
    films = truth_and_imagination(
        evaluation.simulator, evaluation.dataset, shown, evaluation.draw,
        options.compute) if len(shown) else ()
    life = compare_lives(options, evaluation) if options.life_starts else None
    generated = world_card.measure(
        Simulations(evaluation.simulator, evaluation.dataset, evaluation.held_out, evaluation.draw,
                    options.compute, options.seed, options.batch, evaluation.worlds),
        options.random_starts, options.event_starts, options.num_worlds, options.equal_view_levels)
    lives = None if life is None else dream_life.summarize(life, options.seed)
    settings = describe(options, evaluation, result, objects)
    with store.replace({**settings, "comparisons": compared}) as folder:
        temporary = ResultStore(folder, LOSS_OVER_TIME)
        result.save(folder)
        write_figures(temporary, table, evaluation.title, objects)
        if generated:
            temporary.write("worlds", value=as_json(generated.tables))
            if generated.samples is not None:
                generated.samples.save(temporary.file_of("world_samples"))
        if life is not None:
            temporary.write("lives", value=life)
            temporary.write("lives_summary", value=lives)
        for window, truth, imagined in zip(shown.tolist(), *films):
            moments = slice(0, None, STRIDE)
            write_strip(temporary.file_of("strip", f"{window:06d}"),
                        [list(truth[moments]), list(imagined[moments])], STRIP_HEIGHT)
    print_summary(table, compared)
    print_card(table)
    if lives is not None:
        dream_life.print_lives(lives)
    if generated:
        print_tables(generated.tables)
    print(f"wrote {store.path}")
    return store.path


def choose_evaluation(options: LossOptions) -> Evaluation:
    """Open the simulator and the recording, and choose held-out windows.

    Raises:
        UserError: if the recording or an option does not fit the simulator.
    """
    simulator, config = options.open_simulator(), options.parameters.get(
        SimulatorConfig)
    num_init_steps = simulator.config.num_init_steps
    if options.num_initializing_steps not in (None, num_init_steps):
        raise UserError(f"--num_initializing_steps is {options.num_initializing_steps}, but this "
                        f"simulator was trained with {num_init_steps}; leave it out")
    run = run_of(options.model_file)
    training = run.training if run else options.parameters.get(TrainingConfig)
    split_seed = run.seed if run else options.seed
    dataset = RolloutDataset(Path(options.parameters.common.data_dir), num_init_steps,
                             config.num_sim_steps, training.terminal_absorbing)
    dataset.check_agent(options.agent_file, simulator.agent.policy)
    split = dataset.split(training.held_out_fraction, split_seed)
    num_batches = options.parameters.get(LossOverTimeConfig).num_batches
    held_out, train = split.held_out, split.train
    if options.unseen:
        held_out = train = np.arange(len(dataset))
    doubt = leakage_reason(options.model_file, dataset, held_out, assured=options.unseen)
    worlds = recorded_worlds(simulator, dataset, held_out) if options.rendered_worlds else None
    if worlds:
        held_out = np.intersect1d(held_out, dataset.attach_worlds(worlds))
    noise = describe_noise(dataset)
    print(f"recorded episodes: {noise}", flush=True)
    windows = choose_windows(held_out, num_batches * options.batch, options.seed)
    num_episodes = len(set(dataset.episodes_of(windows).tolist()))
    print(f"{len(windows)} of {len(held_out)} held-out windows, showing {num_episodes} "
          f"episodes (at most {num_batches} batches of {options.batch} are used)", flush=True)
    if doubt:
        print(f"the simulator may have been trained on these episodes: {doubt}", flush=True)
    draw = LatentSampler("sample" if options.sample_latents else "mode",
                         torch.Generator(options.compute.device).manual_seed(options.seed))
    return Evaluation(
        simulator, dataset, held_out, train, windows, worlds, draw, {
            "held_out_fraction": training.held_out_fraction, "split_seed": split_seed,
            "action_noise": noise, "why_perhaps_trained_on": doubt,
            "num_init_steps": num_init_steps, "num_sim_steps": config.num_sim_steps,
            "num_batches": num_batches},
        f"{len(windows)} windows of {num_episodes} held-out episodes, {noise}, each up to its end; "
        "bands: 95 % intervals")


def measure_windows(options: LossOptions, evaluation: Evaluation, objects: ObjectFrames | None
                    ) -> LossOverTime:
    """Compute the losses of the simulator and of the baselines, and the fidelity card."""
    simulator, dataset = evaluation.simulator, evaluation.dataset
    means = training_means(options, evaluation)
    other_simulator = (options.open_simulator(model_file=options.compare_model_file)
                       if options.compare_model_file else None)
    other_agent = OtherAgent(
        load_agent(options.other_agent_file, options.compute.device), dataset,
        options.compute) if options.other_agent_file else None
    if other_simulator and evaluation.worlds:
        check_squares(simulator, other_simulator)
    card = FidelityCard(*find_camera(dataset, evaluation.windows), other_simulator, other_agent,
                        objects)
    return loss_over_time(simulator, dataset, evaluation.windows, options.batch, means,
                          evaluation.draw, options.compute, card)


def compare_lives(options: LossOptions, evaluation: Evaluation) -> pd.DataFrame:
    """Compare how the agent continues in the simulator and in the real game."""
    dataset = evaluation.dataset
    episodes = sorted(set(dataset.episodes_of(evaluation.held_out).tolist()))
    starts = dream_life.choose_starts(dataset, episodes, options.life_starts, options.seed)
    return dream_life.compare_lives(
        evaluation.simulator, dataset, starts, evaluation.draw,
        dream_life.coin_reward(dataset, episodes), options.compute, options.rendered_worlds,
        options.seed)


def describe(options: LossOptions, evaluation: Evaluation, result: LossOverTime,
             objects: ObjectFrames | None) -> Mapping[str, Any]:
    """Return the settings of the output folder."""
    return {
        "model_file": str(options.model_file), "model_sha256": sha256(options.model_file),
        "agent_file": str(options.agent_file), "agent_sha256": agent_sha256(options.agent_file),
        "data_dir": options.parameters.common.data_dir,
        "recording_sha256": evaluation.dataset.folder.sha256(options.check_contents),
        **evaluation.settings, "unseen": options.unseen,
        "rendered_worlds": options.rendered_worlds,
        "train_data_dir": str(options.train_data_dir or ""),
        **describe_file(options.compare_model_file, "compare_model"),
        **describe_file(options.other_agent_file, "other_agent"),
        "seed": options.seed, "latents": evaluation.draw.how,
        "precision": options.compute.precision, "batch_size": options.batch,
        "objects": list(objects.kinds) if objects else [], "windows": result.windows.tolist(),
        "action_windows": result.action_windows.tolist(), "episodes": result.episodes.tolist()}


def write_figures(store: ResultStore, table: pd.DataFrame, title: str,
                  objects: ObjectFrames | None) -> None:
    """Write the table and its figures."""
    store.write("table", value=table)
    plot_losses(table, store.file_of("plot"), title)
    if objects:
        plot_objects(table, objects.kinds, store.file_of("objects_plot"), title)
    plot_card(table, store.file_of("card_plot"),
              f"fidelity card: {title}, terminal frames excluded")


def training_means(options: LossOptions, evaluation: Evaluation) -> Means:
    """Compute the mean frame and mean policy of the training episodes.

    Raises:
        UserError: if the training recording is the evaluated one, or was made by another agent.
    """
    dataset, policy = evaluation.dataset, evaluation.simulator.agent.policy
    if options.train_data_dir is None:
        return fit_means(dataset, evaluation.train, policy, options.seed, crossed=options.unseen)
    if options.train_data_dir.resolve() == dataset.folder.path.resolve():
        raise UserError(f"--train_data_dir {options.train_data_dir} is the evaluated recording; "
                        "leave it out")
    training = RolloutDataset(options.train_data_dir, dataset.num_init_steps, 1)
    training.check_agent(options.agent_file, policy)
    return fit_means(training, np.arange(len(training)), policy, options.seed)


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
        UserError: see ``agents.replay.level_states``.
    """
    positions = {}
    for number in with_progress(windows.tolist(), len(windows), "replay"):
        place = dataset.place(number)
        begin = place.frame - dataset.num_init_steps + 1
        last = dataset.folder.array_files(place.episode).frames.shape[0] - 1  # terminal row
        rows = range(max(begin, 0), min(begin + dataset.window_length, last))
        positions[number] = np.full((dataset.window_length, 2), np.nan, np.float32)
        for row, state in level_states(dataset.folder, place.episode, rows):
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


main = command(LossOptions, measure_loss)

if __name__ == "__main__":
    raise SystemExit(main())
