"""Whole runs of train_gen_model.py: output files, what remains unchanged, and resuming."""

import dataclasses
import itertools
import math
import os
import re
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import (
    FLOAT32,
    assert_same,
    figures_drawn,
    progress_of,
    read_video,
    record_arguments,
    refusal,
    simulator_settings,
    tiny_policy,
)

import plot_training_csv
import record
import train_gen_model
from agents.agent_file import load_agent, save_agent
from agents.provenance import agent_sha256
from common import parameters
from common.devices import Compute
from common.errors import NonFiniteLoss, UserError
from common.parameters import ParameterSet
from common.progress import Progress
from generative import export
from generative.batches import BatchOrder, BatchReader, align
from generative.config import RecordConfig, SimulatorConfig, TrainingConfig
from generative.dataset import RolloutDataset
from generative.losses import LossScales, PixelWeights, count_colours, simulator_losses
from generative.networks import LatentSampler
from generative.published import published_state, save_published
from generative.runs import (
    COLUMNS,
    checkpoints,
    leakage_reason,
    open_simulator,
    prune_checkpoints,
    training_episodes,
)
from generative.simulator import Simulator, stack
from generative.training import SimulatorTraining

TINY = ParameterSet("tiny")


def arguments(agent_path, recording, root, *more):
    return ["--agent_file", str(agent_path), "--data_dir", str(recording / "data"),
            "--log_dir_base", str(root), "--interpreting_params_name", "tiny", "--gen_mod_exp_name",
            "t", "--seed", "4", "--log_interval", "2", "--save_interval", "4", "--max_batches", "5",
            "--precision", "float32", "--device", "cpu", *more]


def settings_for(agent_path, recording, **changes):
    return simulator_settings("tiny", agent_path, recording / "data", **changes)


def run_folder(root):
    (folder,) = (root / "results" / "t").iterdir()
    return folder


def newest(folder):
    content = torch.load(checkpoints(folder)[-1], weights_only=True)
    del content["wall_time"]
    return content


@pytest.fixture(scope="module")
def undisturbed(agent_path, recording, tmp_path_factory):
    """A finished run of 5 batches."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert train_gen_model.main(arguments(agent_path, recording, root)) == 0
    return run_folder(root)


def test_run_writes_what_the_format_says(undisturbed, agent_path):
    log = pd.read_csv(undisturbed / "progress.csv")
    assert tuple(log.columns) == COLUMNS
    assert log["batches"].tolist() == [2, 4]
    assert np.isfinite(log.to_numpy()).all()
    terms = [name for name in log if name.startswith("loss_")]
    assert len(terms) == 9
    np.testing.assert_allclose(log[terms].sum(axis=1), log["loss"], rtol=1e-4)
    assert (log["posterior_entropy"] <= 8 * math.log(8) + 1e-3).all()
    settings = yaml.safe_load((undisturbed / "hyperparameters.yml").read_text())
    assert settings["agent_sha256"] == agent_sha256(agent_path)
    assert settings["simulator"]["cnn_depth"] == 4
    assert list(undisturbed.glob("events.out.tfevents.*"))
    (model_file, *_), data = checkpoints(undisturbed), RolloutDataset(settings["data_dir"], 3, 3)
    split = data.split(settings["training"]["held_out_fraction"], settings["seed"])
    assert leakage_reason(model_file, data, split.held_out) == ""
    assert "were used in training" in leakage_reason(model_file, data, split.train)
    assert [path.name for path in checkpoints(undisturbed)] == [
        f"model_epoch0_batch{batch}.pt" for batch in (4, 5)]
    assert [path.name for path in sorted((undisturbed / "recons_v_preds").iterdir())] == [
        f"batch_{number:07d}.mp4" for number in (4, 5)]
    assert {"gen_model_state_dict", "optimizer_state_dict"} <= newest(undisturbed).keys()


def test_videos_show_truth_reconstruction_and_imagination(agent_path, recording, tmp_path):
    """Weights are large, so that reconstruction and imagination look different."""
    run = SimulatorTraining(tmp_path, settings_for(agent_path, recording, max_batches=1), FLOAT32)
    with torch.no_grad():
        for name, weight in run.simulator.named_parameters():
            if weight.ndim > 1 and not name.startswith("agent."):
                weight *= 2
    run.train()
    (video_file,) = (tmp_path / "recons_v_preds").iterdir()
    video = read_video(video_file).astype(float)
    assert video.shape == (5, 16 + 4 * 128, 3 * 128, 3)
    shown = video[:, 16:].reshape(5, 4, 64, 2, 3, 64, 2, 3).mean(axis=(3, 6))
    shown = dict(zip(("truth", "reconstruction", "imagination"), np.moveaxis(shown, 3, 0)))

    sizes = TINY.get(SimulatorConfig)
    dataset = RolloutDataset(recording / "data", sizes.num_init_steps, sizes.num_sim_steps)
    recorded = dataset.batch(range(len(dataset))).frames[-5:, :, :, ::8, ::8].numpy()
    recorded = np.moveaxis(recorded, 2, -1)  # (T, N, H, W, C), subsampled
    windows = [np.abs(recorded - shown["truth"][:, [row], ::8, ::8]).mean(axis=(0, 2, 3, 4))
               .argmin() for row in range(4)]
    assert len(set(windows)) == 4
    batch = align(dataset.batch(windows), sizes)
    simulator = open_simulator(checkpoints(tmp_path)[-1], agent_path, sizes, FLOAT32)
    draw = LatentSampler("mode")
    start = simulator.start_from(simulator.encode(batch.initial_images), draw)
    expected = {"truth": batch.images, "reconstruction": simulator(batch, draw).images,
                "imagination": stack(start, simulator.imagine(
                    start, draw, true_actions=batch.actions)).images}
    for name, column in shown.items():
        errors = {other: float((images.permute(0, 1, 3, 4, 2) * 255 - column).abs().mean())
                  for other, images in expected.items()}
        assert min(errors, key=errors.get) == name and errors[name] < 10, (name, errors)


def test_plot_is_drawn_from_the_log(undisturbed):
    with figures_drawn() as figures:
        assert plot_training_csv.main(["--datapath", str(undisturbed.parent)]) == 0
    log = pd.read_csv(undisturbed / "progress.csv")
    assert f"{log['held_out_loss'].iloc[-1]:.3g} at last" in figures["plot.png"].get_suptitle()
    panels = {axes.get_title(): axes for axes in figures["plot.png"].axes}
    assert len(panels) == 12
    lines = panels["image loss of a window"].lines
    for (raw, smooth), column in zip(zip(lines[::2], lines[1::2]), (
            "loss_image", "held_out_loss_image")):
        np.testing.assert_array_equal(raw.get_xdata(), log["batches"])
        np.testing.assert_array_equal(raw.get_ydata(), log[column])
        assert smooth.get_ydata()[-1] == pytest.approx(log[column].mean())  # fewer than 20 rows
    assert [line.get_label() for line in lines[1::2]] == ["training episodes", "held-out episodes"]


@pytest.mark.parametrize("stop", [0, 3])
def test_signal_saves_and_stops(undisturbed, agent_path, recording, tmp_path, monkeypatch, capsys,
                                stop):
    """The run stops before its first batch, or between two rows of the log; the next row is the
    mean of all its batches."""
    train_on, enter = SimulatorTraining.one_batch, Progress.__enter__

    def begin(progress):
        if stop == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return enter(progress)

    def signalled(run, windows):
        if run.steps == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_on(run, windows)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "__enter__", begin)
        patch.setattr(SimulatorTraining, "one_batch", signalled)
        assert train_gen_model.main(arguments(agent_path, recording, tmp_path)
                                    ) == 128 + signal.SIGTERM
    assert "--resume" in capsys.readouterr().out
    folder = run_folder(tmp_path)
    assert [path.name for path in checkpoints(folder)] == [
        f"model_epoch0_batch{stop}.pt"]
    assert train_gen_model.main(["--agent_file", str(agent_path), "--resume", str(folder),
                                 "--device", "cpu"]) == 0
    pd.testing.assert_frame_equal(progress_of(folder), progress_of(undisturbed), check_exact=True)
    assert_same(newest(folder), newest(undisturbed))


@pytest.mark.slow
def test_bfloat16_follows_float32(agent_path, recording, tmp_path):
    losses = []
    for bfloat16 in (False, True):
        folder = tmp_path / str(bfloat16)
        compute = Compute(torch.device("cpu"), bfloat16)
        settings = settings_for(agent_path, recording, max_batches=2)
        assert SimulatorTraining(folder, settings, compute).train() == 0
        losses.append(progress_of(folder)[["loss", "held_out_loss"]].to_numpy())
    assert not np.array_equal(*losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_steps_that_a_gpu_repeats_give_the_numbers_of_single_ones(agent_path, recording, tmp_path,
                                                                  monkeypatch, bfloat16):
    compute = Compute(torch.device("cuda", 0), bfloat16)
    training = {"log_interval": 1, "lr_decay": "cosine", "open_loop_share": 0.5,
                "image_rarity": 0.5}
    settings = settings_for(agent_path, recording, max_batches=8, training=training)
    assert SimulatorTraining(tmp_path / "repeated", settings, compute).train() == 0
    monkeypatch.setattr("generative.training.GraphedFunction", lambda function, *_: function)
    assert SimulatorTraining(tmp_path / "single", settings, compute).train() == 0
    logs = [progress_of(tmp_path / name) for name in ("repeated", "single")]
    for name in ("loss", "gradient_norm", "held_out_loss", "kl_nats"):
        found, expected = (log[name].to_numpy() for log in logs)
        assert len(found) == 8 and len(set(expected)) == 8
        np.testing.assert_allclose(found, expected, rtol=2e-2 if bfloat16 else 2e-3)


def test_loss_scales_act(agent_path, recording, tmp_path):
    rows = []
    for name, scales in (("plain", LossScales()),
                         ("scaled", LossScales(obs=2, hx=3, reward=5, done=7, kl=11))):
        settings = settings_for(agent_path, recording, max_batches=1, loss_scales=scales,
                                training={"log_interval": 1})
        SimulatorTraining(tmp_path / name, settings, FLOAT32).train()
        rows.append(progress_of(tmp_path / name).iloc[0])
    for term, factor in (("image", 2), ("agent_state", 3), ("reward", 5), ("terminal", 7),
                         ("kl", 11), ("update", 1)):
        assert rows[1][f"loss_{term}"] == pytest.approx(factor * rows[0][f"loss_{term}"], rel=1e-4)
    assert rows[1]["kl_nats"] == pytest.approx(rows[0]["kl_nats"], rel=1e-4)
    assert rows[0]["loss_kl"] == pytest.approx(5 * 12 * rows[0]["kl_nats"], rel=1e-4)


def test_weights_of_pixels_act_on_the_image_alone(agent_path, recording):
    simulator = Simulator(TINY.get(SimulatorConfig), load_agent(agent_path))
    config = simulator.config
    dataset = RolloutDataset(recording / "data", config.num_init_steps, config.num_sim_steps)
    batch = align(dataset.batch([0, 5]), config)
    with torch.no_grad():
        simulation = simulator(batch, LatentSampler("mode"))
    plain = simulator_losses(simulation, batch, config)
    weights = torch.ones(*batch.images.shape[:2], 64, 64)
    weights[..., 32:, :] = 3
    for given, factor in ((None, 1), (weights, 3)):
        found = simulator_losses(simulation, batch, config, pixel_weights=given)
        errors = 0.5 * (simulation.raw_images - batch.images).square()
        above, below = (half.sum((2, 3, 4)) for half in errors.split(32, dim=3))
        torch.testing.assert_close(found.image, above + factor * below)
        for name in ("agent_state", "kl", "reward", "terminal", "bottleneck"):
            assert torch.equal(getattr(found, name), getattr(plain, name))


def test_rare_colours_weigh_more_and_all_pixels_one_on_average(recording):
    dataset = RolloutDataset(recording / "data", 3, 5)
    windows = np.arange(0, len(dataset), 3)
    shares = count_colours(dataset, windows, seed=0)
    assert shares.sum() == pytest.approx(1)
    images = dataset.batch(windows).frames[2].float() / 255  # the frames whose colours were counted
    red, green, blue = (images * 255 // 32).long().unbind(1)
    _, counts = ((red * 8 + green) * 8 + blue).unique(return_counts=True)
    np.testing.assert_allclose(sorted(shares[shares > 0]), sorted(counts / counts.sum()), rtol=1e-5)
    assert (PixelWeights(shares, 0)(images) == 1).all()
    weights = PixelWeights(shares, 0.5)(images)
    assert weights.shape == (len(windows), 64, 64)
    assert weights.mean() == pytest.approx(1, abs=1e-3)
    common = shares.argmax()
    is_common = (red * 8 + green) * 8 + blue == common
    assert weights[is_common].max() < weights[~is_common].min() and weights.max() > 2


@pytest.mark.parametrize(("share", "expected"), [
    (0.0, None), (0.5, [True, True, False, False]), (1.0, [True] * 4)])
def test_the_asked_share_of_windows_is_simulated_from_the_prior(agent_path, recording, tmp_path,
                                                                monkeypatch, share, expected):
    seen = []
    forward = Simulator.forward

    def watched(simulator, batch, draw, open_loop=None, **more):
        seen.append(None if open_loop is None else open_loop.tolist())
        return forward(simulator, batch, draw, open_loop, **more)

    monkeypatch.setattr(Simulator, "forward", watched)
    settings = settings_for(agent_path, recording, max_batches=1,
                            training={"open_loop_share": share})
    SimulatorTraining(tmp_path, settings, FLOAT32).train()
    assert seen[0] == expected


@pytest.mark.slow
def test_learning_rate_falls_to_nothing_and_goes_on_where_it_was(agent_path, recording, tmp_path):
    training = {"lr_decay": "cosine", "image_rarity": 0.5, "save_interval": 3}
    settings = settings_for(agent_path, recording, training=training)
    run = SimulatorTraining(tmp_path / "whole", settings, FLOAT32)
    rates = []
    run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    assert run.train() == 0
    expected = 0.5 * settings.training.lr * (1 + np.cos(np.pi * np.arange(6) / 6))
    np.testing.assert_allclose(rates, expected)
    assert settings_for(agent_path, recording).training.lr_at(5, 6) == settings.training.lr
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    checkpoints(tmp_path / "half")[-1].unlink()
    assert SimulatorTraining(tmp_path / "half", settings, FLOAT32).train() == 0
    assert_same(newest(tmp_path / "half"), newest(tmp_path / "whole"))


def test_non_finite_loss_stops_with_the_last_good_file_kept(agent_path, recording, tmp_path):
    settings = settings_for(agent_path, recording, max_batches=2)
    assert SimulatorTraining(tmp_path, settings, FLOAT32).train() == 0
    saved = {path: path.read_bytes() for path in checkpoints(tmp_path)}
    rows = (tmp_path / "progress.csv").read_text()
    run = SimulatorTraining(tmp_path, dataclasses.replace(settings, max_batches=4), FLOAT32)
    with torch.no_grad():
        run.simulator.cell.prior_out.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="became nan, the loss nan, after 2 batches"):
        run.train()
    assert {path: path.read_bytes() for path in checkpoints(tmp_path)} == saved
    assert (tmp_path / "progress.csv").read_text() == rows


def test_recording_must_not_have_grown(undisturbed, agent_path, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    settings = (folder / "hyperparameters.yml").read_text()
    (folder / "hyperparameters.yml").write_text(
        re.sub("num_episodes: [0-9]+", "num_episodes: 8", settings))
    assert "started with 8, so other episodes would be held out" in refusal(
        train_gen_model.main, ["--agent_file", agent_path, "--resume", folder], capsys)


def test_training_goes_on_from_a_simulator_file_and_keeps_its_unused_tensors(
        agent_path, recording, tmp_path):
    simulator = Simulator(settings_for(agent_path, recording).simulator, load_agent(agent_path))
    unused = {key: torch.rand(tensor.shape) for key, tensor in published_state(simulator).items()
              if key.startswith("conv_out.") or ".vecobs." in key}
    save_published(tmp_path / "model.pt", simulator, unused)
    run = SimulatorTraining(tmp_path / "run", settings_for(
        agent_path, recording, model_file=str(tmp_path / "model.pt"), max_batches=1), FLOAT32)
    assert_same(dict(run.simulator.state_dict()), dict(simulator.state_dict()))
    assert run.train() == 0
    written = newest(tmp_path / "run")["gen_model_state_dict"]
    assert unused and all(torch.equal(written[key], tensor) for key, tensor in unused.items())


def test_opening_uses_the_sizes_beside_the_file(undisturbed, agent_path, tmp_path):
    """Without such a file, the sizes given by the caller are used, which do not fit here."""
    other = ParameterSet("defaults").get(SimulatorConfig)
    file = checkpoints(undisturbed)[-1]
    assert open_simulator(file, agent_path, other, FLOAT32).config.cnn_depth == 4
    with pytest.raises(UserError, match="does not fit"):
        open_simulator(shutil.copy(file, tmp_path / "alone.pt"), agent_path, other, FLOAT32)


def test_export_is_small_and_opens_to_the_same_simulator(undisturbed, agent_path, tmp_path):
    source, small = checkpoints(undisturbed)[-1], tmp_path / "shipped" / "model.pt"
    assert export.main(["--model_file", str(source), "--output", str(small)]) == 0
    assert small.stat().st_size < 0.2 * source.stat().st_size
    opened = [open_simulator(path, agent_path, TINY.get(SimulatorConfig), FLOAT32)
              for path in (source, small)]
    assert training_episodes(source) == training_episodes(small) is not None
    states = [simulator.state_dict() for simulator in opened]
    for (name, exact), half in zip(states[0].items(), states[1].values()):
        torch.testing.assert_close(half, exact, rtol=1e-3, atol=1e-6, msg=name)
    assert export.main(["--model_file", str(source), "--output", str(small)]) == 0  # repeated


def test_export_overwrites_no_file_of_a_run(undisturbed, tmp_path, capsys):
    source = shutil.copy(checkpoints(undisturbed)[-1], tmp_path)
    shutil.copy(undisturbed / "hyperparameters.yml", tmp_path)
    other = tmp_path / "shipped" / "hyperparameters.yml"
    other.parent.mkdir()
    other.write_text("seed: 5\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for output, words in ((tmp_path / "model.pt", "in the folder of a run"),
                          (other.parent / "model.pt", "next to the hyperparameters.yml of")):
        assert words in refusal(export.main, ["--model_file", source, "--output", output], capsys)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_checkpoints_are_kept_by_number_and_by_age(tmp_path):
    """The two newest checkpoints and the first one in each block of three hours are kept."""
    ages = [9, 8, 7, 5, 4, 3, 2, 1, 0]
    for number, age in enumerate(ages):
        path = tmp_path / f"model_epoch0_batch{number}.pt"
        path.touch()
        time = 9 * 3600 * 100 - age * 3600 + 1800  # the newest lies in the block's first hour
        os.utime(path, (time, time))
    prune_checkpoints(tmp_path, keep_newest=2, keep_hours=3)
    kept = [ages[int(path.stem.removeprefix("model_epoch0_batch"))]
            for path in checkpoints(tmp_path)]
    assert kept == [9, 5, 3, 1, 0]


def test_epochs_shuffle_every_window_once():
    order = BatchOrder(np.arange(100, 123), 5, seed=3)
    assert order.batches_per_epoch == 4
    epochs = [np.concatenate([order[4 * epoch + i] for i in range(4)]) for epoch in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == 20 and set(epoch) <= set(range(100, 123))
    assert not np.array_equal(*epochs)
    assert np.array_equal(BatchOrder(np.arange(100, 123), 5, seed=3)[6], order[6])
    assert not np.array_equal(BatchOrder(np.arange(100, 123), 5, seed=4)[6], order[6])


def test_reader_gives_the_batches_in_order(recording):
    dataset = RolloutDataset(recording / "data", 3, 5)
    order = BatchOrder(np.arange(20), 4, seed=0)
    reader = BatchReader(dataset, order, 3, torch.device("cpu"))
    try:
        batches = list(itertools.islice(reader, 6))
    finally:
        reader.close()
    assert len(batches) == 6
    for number, windows in enumerate(batches, 3):
        assert_same(vars(windows), vars(dataset.batch(order[number])))


def test_published_values_are_the_defaults():
    published = ParameterSet("defaults")
    assert published.get(SimulatorConfig) == SimulatorConfig()
    training, common, samples = (published.get(section) for section in (
        TrainingConfig, parameters.CommonConfig, RecordConfig))
    assert (training.log_interval, training.save_interval, training.lr, training.batch_size,
            training.epochs) == (10, 10000, 0.0005, 2, 1000)
    assert (common.data_dir, common.log_dir_base, common.generated_data_dir) == (
        "data/", "generative/", "generative/rec_gen_mod_data/")
    assert (samples.rand_init, samples.max_samples) == (False, 6000)


@pytest.mark.parametrize(("more", "message"), [
    (["--model_file", "nowhere.pt"], "no simulator file nowhere.pt"),
    (["--model_file", "a.pt", "--transfer_from", "b.pt"], "or --transfer_from, for another one"),
    (["--batch_size", "100000"], "only .* windows to train on"),
    (["--loss_scale_kl", "-1"], "loss_scale_kl must be a number from 0 up"),
    (["--resume", "nowhere"], "nowhere holds no run to resume")])
def test_bad_input_is_one_sentence(agent_path, recording, tmp_path, capsys, more, message):
    argv = [*arguments(agent_path, recording, tmp_path), *more]
    assert re.search(message, refusal(train_gen_model.main, argv, capsys))
    assert not (tmp_path / "results").exists()


def test_the_first_state_of_a_feed_forward_agent_is_not_learned(tmp_path):
    """The agent ignores it, and its large error would shape the bottleneck vectors."""
    agent = tmp_path / "agent.pth"
    save_agent(agent, tiny_policy(recurrent=False), {})
    assert record.main(record_arguments(agent, tmp_path, 6)) == 0
    settings = settings_for(agent, tmp_path, max_batches=1, training={"log_interval": 1})
    run = SimulatorTraining(tmp_path / "run", settings, FLOAT32)
    before = run.simulator.hidden_converter.state_dict()["0.weight"].clone()
    assert run.train() == 0
    assert (progress_of(run.folder)["loss_first_hidden"] == 0).all()
    assert torch.equal(run.simulator.hidden_converter.state_dict()["0.weight"], before)


def test_the_width_of_the_start_networks_is_a_parameter():
    config = dataclasses.replace(TINY.get(SimulatorConfig), converter_width=5)
    converter = Simulator(config, tiny_policy()).action_converter
    sizes = [layer.out_features for layer in [*converter][::2]]
    assert sizes == [5, 5, config.action_space_size]
