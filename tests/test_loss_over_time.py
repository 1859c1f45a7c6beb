"""Loss by simulated step: measures, choice of windows, and output files."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, figures_drawn, record_arguments, refusal
from PIL import Image

import loss_over_time_experiment
import record
from agents.provenance import agent_sha256
from common.config import save_settings
from common.errors import UserError
from common.files import sha256
from generative import card_tables, figures
from generative.dataset import RolloutDataset
from generative.fidelity import FidelityCard
from generative.loss_over_time import (
    CONSTANT_POLICY,
    LAST_FRAME,
    MEAN_FRAME,
    PERSISTENCE,
    PREDICTORS,
    RECORDED,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    VALUES,
    LossOverTime,
    Means,
    choose_windows,
    fit_means,
    loss_over_time,
)
from generative.loss_tables import comparisons, table_of
from generative.networks import LatentSampler
from generative.runs import (
    EPISODES_NAME,
    leakage_reason,
    open_simulator,
    run_of,
    save_training_episodes,
    training_episodes,
)

MODE = LatentSampler("mode")
STEPS = 5
BLACK = Means(torch.zeros(1, 3, 64, 64), torch.full((1, 15), 1 / 15))
SPLIT_SEED = 4
KINDS = ["image", "reward", "terminal", "agent_state", "kl", "policy_kl", "hidden_state_cosine"]


@pytest.fixture(scope="module")
def model_file(simulator_file, recording, dataset, split, tmp_path_factory):
    """A simulator whose files name the recording as its training data."""
    path = Path(shutil.copy(simulator_file, tmp_path_factory.mktemp("run")))
    save_settings(path.parent, dataclasses.replace(
        run_of(simulator_file), data_dir=str(recording / "data"), seed=SPLIT_SEED, num_episodes=12))
    save_training_episodes(path.parent, dataset, split.train, None)
    return path


@pytest.fixture(scope="module")
def simulator(model_file, agent_path):
    """A simulator with red and green outside [0, 1] before the clamp."""
    simulator = open_simulator(model_file, agent_path, run_of(model_file).simulator, FLOAT32)
    with torch.no_grad():
        simulator.decoder.image.layers[-1].bias += torch.tensor([0.7, -0.7, 0])
    return simulator


@pytest.fixture(scope="module")
def dataset(recording):
    return RolloutDataset(recording / "data", 3, STEPS)


@pytest.fixture(scope="module")
def split(dataset):
    return dataset.split(0.3, SPLIT_SEED)


@pytest.fixture(scope="module")
def means(dataset, split, simulator):
    return fit_means(dataset, split.train, simulator.agent.policy, seed=0)


@pytest.fixture(scope="module")
def mean(means):
    return means.frames[0]


@pytest.fixture(scope="module")
def result(simulator, dataset, split, means):
    """Losses on forty held-out windows, in batches of which the last is not full."""
    windows = choose_windows(split.held_out, 70, seed=0)[30:]
    assert len(windows) == 40
    return loss_over_time(simulator, dataset, windows, 16, means, MODE, FLOAT32)


def first_end(window):
    """Return the simulated step at which the recorded episode ends, or the last step."""
    ends = np.flatnonzero(window.terminals[2:].numpy())
    return int(ends[0]) if len(ends) else STEPS - 1


@torch.no_grad()
def imagined_alone(simulator, window, actions):
    initial = window.frames[:3].unsqueeze(1).float() / 255
    start = simulator.start_from(simulator.encode(initial), MODE)
    return simulator.imagine(start, MODE, STEPS, true_actions=actions[1:1 + STEPS].unsqueeze(1))


def direct_losses(steps, window):
    """Compute the losses of one window from the stored rows, by kind."""
    images = np.stack([step.images[0].numpy() for step in steps])
    frames = window.frames[2:].numpy() / 255
    rewards = np.array([float(step.rewards) for step in steps])
    terminals = np.array([float(step.terminal_logits) for step in steps])
    terminals = 1 / (1 + np.exp(-terminals))
    ended = window.terminals[2:].numpy()
    hidden = np.stack([step.hidden_states[0].numpy() for step in steps])
    return {"image": 0.5 * ((images - frames) ** 2).sum(axis=(1, 2, 3)),
            "reward": 0.5 * (rewards - window.rewards[2:].numpy()) ** 2,
            "terminal": -np.log(np.where(ended == 1, terminals, 1 - terminals)),
            "agent_state": 0.5 * ((hidden - window.hidden_states[3:].numpy()) ** 2).sum(axis=1)}


def some_windows(result):
    """Return positions of windows in which the episode ends, and of others."""
    ended = ~result.counted[-1]
    assert ended.any() and not ended.all()
    return [*np.flatnonzero(ended)[:3], *np.flatnonzero(~ended)[:3], len(result.windows) - 1]


@pytest.mark.parametrize("predictor", [SIMULATOR, SHUFFLED_ACTIONS])
def test_losses_are_those_of_each_window_imagined_alone(predictor, result, simulator, dataset):
    actions_of = result.windows if predictor == SIMULATOR else result.action_windows
    for n in some_windows(result):
        window = dataset[result.windows[n]]
        steps = imagined_alone(simulator, window, dataset[actions_of[n]].actions)
        expected = direct_losses(steps, window)
        until = first_end(window) + 1
        for kind, values in expected.items():
            np.testing.assert_allclose(result.losses[predictor, kind][:until, n], values[:until],
                                       rtol=1e-3, atol=1e-5, err_msg=kind)


@torch.no_grad()
def test_divergence_is_that_of_the_posterior_at_the_imagined_state(result, simulator, dataset):
    n = some_windows(result)[-2]
    window = dataset[result.windows[n]]
    for t, step in enumerate(imagined_alone(simulator, window, window.actions)):
        embedding = simulator.frame_embedding(window.frames[2 + t].unsqueeze(0).float() / 255)
        posterior = simulator.cell.posterior_logits(step.env_h,
                                                    simulator.cell.embedding_input(embedding))
        p, q = (torch.distributions.Categorical(logits=logits)
                for logits in (posterior, step.prior_logits))
        divergence = float(torch.distributions.kl_divergence(p, q).sum())
        assert result.losses[SIMULATOR, "kl"][t, n] == pytest.approx(divergence, rel=1e-3)


def test_steps_after_the_end_do_not_count_and_actions_are_shuffled(result, dataset):
    assert (result.windows != result.action_windows).all()
    assert sorted(result.windows) == sorted(result.action_windows)
    for n, number in enumerate(result.windows.tolist()):
        expected = np.arange(STEPS) <= first_end(dataset[number])
        assert (result.counted[:, n] == expected).all()
    for key, loss in result.losses.items():
        assert loss.shape == (STEPS, len(result.windows)) and loss.dtype == np.float32
        assert (np.isfinite(loss) == result.counted).all(), key


def test_last_frame_is_perfect_at_step_0_and_stays_as_it_is(result, dataset):
    loss = result.losses[LAST_FRAME, "image"]
    assert (loss[0] == 0).all()
    n = some_windows(result)[3]
    frames = dataset[result.windows[n]].frames[2:].numpy() / 255
    expected = 0.5 * ((frames - frames[0]) ** 2).sum(axis=(1, 2, 3))
    assert expected[1:].all()
    np.testing.assert_allclose(loss[:, n], expected, rtol=1e-4, atol=1e-6)


def test_mean_frame_is_that_of_the_training_episodes_only(result, recording, dataset, split, means,
                                                          mean):
    training = np.unique(dataset.episodes_of(split.train))
    assert len(training) == 12 - 4
    assert means.folds == {}
    frames = np.concatenate([np.load(recording / "data" / f"episode_{number:05}" / "ob.npy")
                             for number in training])
    np.testing.assert_allclose(mean.numpy(), frames.mean(axis=0) / 255, atol=1e-6)
    n = some_windows(result)[3]
    labels = dataset[result.windows[n]].frames[2:].numpy() / 255
    expected = 0.5 * ((labels - mean.numpy()) ** 2).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(result.losses[MEAN_FRAME, "image"][:, n], expected, rtol=1e-4)


def made_up(simulator_loss, other_loss, episodes):
    """Return results with given losses (T, N); `other_loss` is that of all other predictors."""
    simulator_loss, other_loss = (np.asarray(loss, np.float32)
                                  for loss in (simulator_loss, other_loss))
    losses = {(SIMULATOR, "image"): simulator_loss}
    losses |= {(name, "image"): other_loss for name in (SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME)}
    windows = np.arange(len(episodes))
    return LossOverTime(windows, np.roll(windows, -1), np.asarray(episodes),
                        np.isfinite(simulator_loss), losses)


def test_table_holds_means_over_what_counts():
    nan = np.nan
    result = made_up([[1, 3, 8], [2, nan, nan], [nan, nan, nan]],
                     [[6, 6, 6], [6, nan, nan], [nan, nan, nan]], [0, 1, 1])
    table = table_of(result, seed=0)
    assert table["step"].max() == 1  # no window reaches the last one
    rows = table[(table["predictor"] == SIMULATOR) & (table["kind"] == "image")]
    assert rows["windows"].tolist() == [3, 1] and rows["mean"].tolist() == [4, 2]
    assert rows["standard_deviation"].iloc[0] == pytest.approx(np.std([1, 3, 8], ddof=1))
    # Drawn with replacement: episode 0 twice, episode 1 twice, or both.
    assert rows[["low_95", "high_95"]].iloc[0].tolist() == [1, 5.5]
    assert rows[["low_95", "high_95"]].iloc[1].isna().all()  # one episode has no spread
    pixel = table[(table["predictor"] == SIMULATOR) & (table["kind"] == "image_mse")]
    assert pixel["mean"].iloc[0] == pytest.approx(4 * 2 / (3 * 64 * 64))


def test_comparison_counts_the_steps_at_which_the_simulator_is_better():
    better, worse, unclear = [1, 1, 1, 1], [4, 4, 4, 4], [0, 0, 0, 5.9]
    result = made_up([worse, worse, better, unclear, worse, better], [[2] * 4] * 6, [0, 1, 2, 3])
    found = comparisons(result, seed=0)
    assert found == [{"predictor": name, "steps": [2, 3, 4, 5], "better": 3, "clearly": 2}
                     for name in (SHUFFLED_ACTIONS, LAST_FRAME, MEAN_FRAME)]


# Measures of what matters to the agent

def test_a_frame_that_is_true_is_perfect_in_every_measure(result):
    """The last initial frame is the label of step 0."""
    assert np.abs(result.losses[LAST_FRAME, "policy_kl"][0]).max() < 1e-6
    np.testing.assert_allclose(result.losses[LAST_FRAME, "hidden_state_cosine"][0], 1, atol=1e-5)
    table = table_of(result, seed=0).set_index(["predictor", "kind", "step"])["mean"]
    assert table[LAST_FRAME, "value_correlation", 0] == pytest.approx(1, abs=1e-5)
    assert table[LAST_FRAME, "value_correlation", STEPS - 1] < 0.9999
    assert table[MEAN_FRAME, "policy_kl", 0] > 1e-4


@torch.no_grad()
def test_agent_is_shown_the_frames_of_each_predictor_from_the_recorded_state_on(
        result, simulator, dataset, mean):
    policy, n = simulator.agent.policy, some_windows(result)[3]
    window = dataset[result.windows[n]]
    imagined = imagined_alone(simulator, window, window.actions)
    frames = window.frames[2:].float() / 255
    shown = {RECORDED: frames, LAST_FRAME: frames[:1].expand_as(frames),
             MEAN_FRAME: mean.expand_as(frames), SIMULATOR: torch.cat([s.images for s in imagined])}
    outputs = {}
    for name, images in shown.items():
        hidden, outputs[name] = window.hidden_states[2:3], []
        for image in images:
            outputs[name].append(policy.step(policy.embed(image[None]), hidden))
            hidden = outputs[name][-1].hidden_states
    for t, true in enumerate(outputs[RECORDED]):
        assert result.losses[RECORDED, VALUES][t, n] == pytest.approx(float(true.values), abs=1e-4)
        p = torch.distributions.Categorical(logits=true.log_probs)
        for name in (LAST_FRAME, MEAN_FRAME, SIMULATOR):
            output = outputs[name][t]
            q = torch.distributions.Categorical(logits=output.log_probs)
            assert result.losses[name, "policy_kl"][t, n] == pytest.approx(
                float(torch.distributions.kl_divergence(p, q)), rel=1e-2, abs=1e-6)
            assert result.losses[name, "hidden_state_cosine"][t, n] == pytest.approx(float(
                torch.cosine_similarity(true.hidden_states, output.hidden_states)), abs=1e-4)
            assert result.losses[name, VALUES][t, n] == pytest.approx(float(output.values),
                                                                     abs=1e-4)


@torch.no_grad()
def test_agent_baselines_are_the_mean_policy_and_the_outputs_at_step_0(
        result, simulator, dataset, recording, split, means):
    policy, n = simulator.agent.policy, some_windows(result)[3]
    states = np.concatenate([np.load(recording / "data" / f"episode_{number:05}" / "hx.npy")[1:-1]
                             for number in np.unique(dataset.episodes_of(split.train))])
    expected = torch.softmax(policy.fc_policy(torch.from_numpy(states)), dim=-1).mean(dim=0)
    torch.testing.assert_close(means.policies[0], expected, atol=1e-5, rtol=1e-4)
    window, hidden, outputs = dataset[result.windows[n]], None, []
    hidden = window.hidden_states[2:3]
    for frame in window.frames[2:].float() / 255:
        outputs.append(policy.step(policy.embed(frame[None]), hidden))
        hidden = outputs[-1].hidden_states
    for t, output in enumerate(outputs):
        gains = {CONSTANT_POLICY: output.log_probs - expected.log(),
                 PERSISTENCE: output.log_probs - outputs[0].log_probs}
        for name, gain in gains.items():
            assert result.losses[name, "policy_kl"][t, n] == pytest.approx(
                float((output.log_probs.exp() * gain).sum()), rel=1e-2, abs=1e-5)
        assert result.losses[PERSISTENCE, VALUES][t, n] == pytest.approx(float(outputs[0].values),
                                                                        abs=1e-4)
    table = table_of(result, seed=0).set_index(["predictor", "kind", "step"])
    assert table.loc[(PERSISTENCE, "policy_kl", 0), "mean"] == pytest.approx(0, abs=1e-6)
    assert table.loc[(PERSISTENCE, "value_correlation", 0), "mean"] == pytest.approx(1, abs=1e-5)
    row = table.loc[(CONSTANT_POLICY, "policy_kl", STEPS - 1)]
    assert 0 < row["low_95"] < row["mean"] < row["high_95"]
    assert (CONSTANT_POLICY, "value_correlation", 0) not in table.index


def interval_of(table, predictor, kind, step):
    """Return the mean and both ends of the interval in a row of the table."""
    row = table.set_index(["predictor", "kind", "step"]).loc[(predictor, kind, step)]
    return row["mean"], row["low_95"], row["high_95"]


def test_agent_measures_are_printed_with_their_baselines_and_intervals(result, capsys):
    table = table_of(result, seed=0)
    card_tables.print_summary(table, comparisons(result, seed=0))
    printed = capsys.readouterr().out
    for kind, baselines in (("policy_kl", (CONSTANT_POLICY, PERSISTENCE)),
                            ("value_correlation", (PERSISTENCE,))):
        title = card_tables.TITLES_OF_AGENT[kind]
        block = printed.partition(f"{title} by simulated step")[2]
        for predictor in (SIMULATOR, LAST_FRAME, *baselines):
            line = next(line for line in block.splitlines() if line.startswith(predictor))
            assert "{:.3f} ({:.3f} to {:.3f})".format(
                *interval_of(table, predictor, kind, 2)) in line
    assert dict((row[0], row[2]) for row in card_tables.card_rows(table, (1, 2)))[
        "– constant policy"] == "{:.2f} ({:.2f} to {:.2f})".format(
            *interval_of(table, CONSTANT_POLICY, "policy_kl", 2))


def test_figures_show_the_baselines_of_the_agent_with_their_intervals(result, tmp_path):
    table = table_of(result, seed=0)
    with figures_drawn() as drawn:
        figures.plot_losses(table, tmp_path / "losses.png", "")
        figures.plot_card(table, tmp_path / "card.png", "")
    for figure, title in ((drawn["losses.png"], figures.TITLES_OF_AGENT["policy_kl"]),
                          (drawn["card.png"], figures.TITLES_OF_CARD["policy_kl"])):
        (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
        lines = {line.get_label(): line for line in axes.get_lines()}
        for predictor in (CONSTANT_POLICY, PERSISTENCE):
            rows = table[(table["kind"] == "policy_kl") & (table["predictor"] == predictor)]
            np.testing.assert_allclose(lines[figures.LABELS[predictor]].get_ydata(), rows["mean"])
        assert len(axes.collections) == len(lines)  # a band for each line
        legends = [legend for legend in (*figure.legends, *(
            axes.get_legend() for axes in figure.axes)) if legend]
        shown = [text.get_text() for legend in legends for text in legend.get_texts()]
        assert figures.LABELS[CONSTANT_POLICY] in shown and len(set(shown)) == len(shown)
    last = table[(table["kind"] == "image") & (table["step"] == table["step"].max())]
    for row in last[last["predictor"].isin((SIMULATOR, LAST_FRAME))].itertuples():  # the answer
        answer = f"{figures.LABELS[row.predictor]} {row.mean:.0f} ({row.low_95:.0f} to "
        assert answer in drawn["losses.png"].get_suptitle()


def test_no_window_is_predicted_by_the_means_of_its_own_episode(dataset, simulator, recording):
    means = fit_means(dataset, np.arange(len(dataset)), simulator.agent.policy, 0, crossed=True)
    episodes = np.unique(dataset.episodes_of(np.arange(len(dataset))))
    assert set(means.folds) == set(episodes.tolist()) and set(means.folds.values()) == {0, 1}
    for episode in episodes[:3]:
        others = [number for number in episodes.tolist()
                  if means.folds[number] != means.folds[episode]]
        assert 4 <= len(others) <= 8
        frames = np.concatenate([np.load(recording / "data" / f"episode_{number:05}" / "ob.npy")
                                 for number in others])
        frame, policy = means.of(np.array([episode]), torch.device("cpu"))
        np.testing.assert_allclose(frame[0], frames.mean(axis=0) / 255, atol=1e-6)
        assert float(policy.sum()) == pytest.approx(1, abs=1e-5)
    one = np.flatnonzero(dataset.episodes_of(np.arange(len(dataset))) == episodes[0])
    with pytest.raises(UserError, match="give --train_data_dir"):
        fit_means(dataset, one, simulator.agent.policy, 0, crossed=True)


def test_correlation_of_values_is_over_the_windows_that_reach_a_step():
    rng = np.random.default_rng(0)
    recorded = rng.normal(size=(2, 40)).astype(np.float32)
    recorded[1, 30:] = np.nan
    result = made_up(np.ones((2, 40)), np.ones((2, 40)), np.repeat(np.arange(20), 2))
    values = {name: recorded + rng.normal(size=recorded.shape).astype(np.float32)
              for name in PREDICTORS}
    values[MEAN_FRAME] = 0 * recorded + np.float32(0.1)
    result.losses.update({(name, VALUES): array
                          for name, array in {RECORDED: recorded, **values}.items()})
    table = table_of(result, seed=0)
    rows = table[table["kind"] == "value_correlation"].set_index(["predictor", "step"])
    for step, reached in ((0, 40), (1, 30)):
        row = rows.loc[SIMULATOR, step]
        assert row["windows"] == reached
        assert row["mean"] == pytest.approx(np.corrcoef(
            recorded[step, :reached], values[SIMULATOR][step, :reached])[0, 1], abs=1e-6)
        assert row["low_95"] < row["mean"] < row["high_95"] < row["low_95"] + 0.6
    assert MEAN_FRAME not in rows.index.levels[0]  # a constant has no correlation


@pytest.fixture(scope="module")
def leaper(agent_path, tmp_path_factory):
    """A recording of leaper, a game whose kinds of object are known."""
    logdir = tmp_path_factory.mktemp("leaper")
    assert record.main(record_arguments(agent_path, logdir, 6, "--env_name", "leaper",
                                        "--no_videos")) == 0
    return logdir


def test_objects_are_measured_on_the_pixels_that_they_take_up(simulator, leaper):
    dataset = RolloutDataset(leaper / "data", 3, STEPS)
    objects = loss_over_time_experiment.frames_without_objects(dataset)
    assert "car" in objects.kinds
    windows = np.random.default_rng(0).permutation(len(dataset))[:12]
    found = loss_over_time(simulator, dataset, windows, 5, BLACK, MODE, FLOAT32,
                           FidelityCard(objects=objects))
    without = objects.of(windows)  # (T, N, K, C, H, W)
    labels = dataset.batch(windows).frames[2:].numpy()
    in_view = (without != labels[:, :, None]).any(axis=(3, 4, 5)) & found.counted[..., None]
    assert in_view.any(axis=(0, 1)).sum() > 3
    assert not in_view[:, :, objects.kinds.index("car")].all()
    table = table_of(found, seed=0)
    for number, kind in enumerate(objects.kinds):
        error, shown = (found.losses[LAST_FRAME, f"{name}_{kind}"] for name in ("object", "shown"))
        assert (np.isfinite(error) == in_view[..., number]).all()
        assert (np.isfinite(shown) == in_view[..., number]).all()
        assert (shown[0][in_view[0, :, number]] == 1).all()
        assert (error[0][in_view[0, :, number]] == 0).all()
        for t, n in np.argwhere(in_view[..., number])[-3:]:
            truth, taken = labels[t, n] / 255, without[t, n, number] / 255
            mask = (truth != taken).any(axis=0)
            wrong = np.square(labels[0, n] / 255 - truth)[:, mask]
            limit = np.square(taken - truth)[:, mask].sum() / 2
            assert error[t, n] == pytest.approx(wrong.mean(), abs=1e-5)
            assert shown[t, n] == (wrong.sum() < limit)
        rows = table[(table["kind"] == f"shown_{kind}") & (table["predictor"] == LAST_FRAME)]
        assert rows["windows"].tolist() == [num for num in in_view[..., number].sum(axis=1) if num]


# The script

def run(agent_path, model_file, recording, *more):
    return loss_over_time_experiment.main([
        "--agent_file", str(agent_path), "--model_file", str(model_file), "--data_dir",
        str(recording / "data"), "--interpreting_params_name", "tiny", "--device", "cpu",
        "--precision", "float32", *map(str, more)])


@pytest.mark.slow
def test_script_writes_losses_table_plot_and_settings(
        agent_path, model_file, recording, dataset, split, mean, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(agent_path, model_file, recording, "--gen_mod_exp_name", "mine", "--num_batches",
               "3", "--num_sim_steps", "12") == 0
    folder = tmp_path / "analysis" / "loss_over_time" / "mine"
    expected = {f"loss_{kind}.npy" for kind in KINDS}
    expected |= {f"loss_{kind}_shuffled_actions.npy" for kind in KINDS}
    expected |= {f"loss_{kind}_{name}.npy" for name in ("last_frame", "mean_frame")
                 for kind in ("image", "policy_kl", "hidden_state_cosine")}
    expected |= {f"loss_{name}.npy" for name in (
        "policy_kl_constant_policy", "policy_kl_persistence", "hidden_state_cosine_persistence")}
    expected |= {f"agent_values_{name}.npy" for name in ("recorded", "persistence", *PREDICTORS)}
    objects = {path.name for path in folder.glob("*.npy")} - expected
    assert {"loss_object_barrier.npy", "loss_shown_fruit_last_frame.npy"} <= objects
    assert all(re.match("loss_(object|shown)_", name) for name in objects)
    strips = sorted(folder.glob("truth_above_imagination_*.png"))
    assert {path.name for path in folder.iterdir()} == expected | objects | {
        "loss_over_time_plot.png", "loss_over_time.csv", "settings.json", "fidelity.npz",
        "fidelity_card.png", "objects_over_time_plot.png", *(path.name for path in strips)}
    assert all(np.load(folder / name).shape == (12, 12) for name in expected)
    picture = np.asarray(Image.open(strips[0]))  # every other step of 12
    assert picture.shape == (2 * 132 - 4, 6 * 132 - 4, 3)
    window = dataset.batch([int(strips[0].stem.rpartition("_")[2])])
    shown = picture[:128, 132:260].reshape(64, 2, 64, 2, 3).mean((1, 3))  # truth of step 2
    recorded = window.frames[4, 0].permute(1, 2, 0).numpy()
    assert np.abs(shown - recorded).mean() < 5 < np.abs(picture[132:, 132:260] - picture[
        :128, 132:260].astype(float)).mean()
    table = pd.read_csv(folder / "loss_over_time.csv")
    losses = np.load(folder / "loss_agent_state.npy")
    rows = table[(table["predictor"] == SIMULATOR) & (table["kind"] == "agent_state")]
    np.testing.assert_allclose(rows["mean"], np.nanmean(losses[:len(rows)], axis=1), rtol=1e-4)

    settings = json.loads((folder / "settings.json").read_text())
    errors = dataset.batch(settings["windows"]).frames[2] / 255 - mean  # step 0
    np.testing.assert_allclose(np.load(folder / "loss_image_mean_frame.npy")[0],
                               0.5 * errors.square().sum(dim=(1, 2, 3)), rtol=1e-4)
    assert settings["model_sha256"] == sha256(model_file)
    assert settings["agent_sha256"] == agent_sha256(agent_path)
    assert settings["seed"] == 0 and settings["split_seed"] == SPLIT_SEED
    assert settings["why_perhaps_trained_on"] == ""
    assert not set(dataset.episodes_of(split.train)) & set(settings["episodes"])
    assert np.isin(settings["windows"], split.held_out).all()
    printed = capsys.readouterr().out
    assert f"12 of {len(split.held_out)} held-out windows" in printed
    assert "recorded episodes: with action noise" in printed
    assert settings["action_noise"] == "with action noise" and settings["train_data_dir"] == ""
    assert "beats mean_frame at" in printed and "of the 9 steps from 2 to 10" in printed


def test_episodes_used_in_training_are_recognised_by_their_contents(model_file, dataset, split,
                                                                    recording, tmp_path):
    """Whatever the folder is called, and however many episodes were added."""
    assert leakage_reason(model_file, dataset, split.held_out) == ""
    moved = RolloutDataset(shutil.copytree(recording / "data", tmp_path / "moved"), 3, STEPS)
    assert leakage_reason(model_file, moved, split.held_out) == ""
    trained, held_out = (set(dataset.episodes_of(part).tolist())
                         for part in (split.train, split.held_out))
    everything = np.arange(len(moved))
    for is_assured in (False, True):
        assert leakage_reason(model_file, moved, everything, is_assured) == (
            f"{len(trained)} of the {len(trained | held_out)} episodes were used in training")
    changed = next(iter(trained))
    file = moved.folder.files_of(changed)[0]
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert f"{len(trained) - 1} of the " in leakage_reason(model_file, moved, everything)
    level = dataset.folder.steps(min(held_out))["level_seed"].iloc[0]
    (tmp_path / EPISODES_NAME).write_text(f"level:{level}\nlevel:-5\n")
    assert leakage_reason(tmp_path / "model.pt", dataset, split.held_out) == (
        f"1 of the {len(held_out)} episodes were used in training")


def test_training_episodes_include_those_of_the_simulator_to_start_from(model_file, dataset, split,
                                                                        tmp_path):
    save_training_episodes(tmp_path, dataset, split.held_out, tmp_path / "unknown.pt")
    assert training_episodes(tmp_path / "model.pt") is None
    assert "the episodes of its training are unknown" in leakage_reason(
        tmp_path / "model.pt", dataset, split.held_out)
    assert leakage_reason(tmp_path / "model.pt", dataset, split.held_out, assured=True) == ""
    save_training_episodes(tmp_path, dataset, split.held_out, model_file)
    assert len(training_episodes(tmp_path / "model.pt")) == 12


def test_means_come_from_a_training_recording(agent_path, model_file, recording, leaper, tmp_path,
                                             simulator, capsys):
    """Another game's frames are easily told from those of the evaluated recording."""
    assert run(agent_path, model_file, recording, "--output_dir", tmp_path / "out", "--num_batches",
               1, "--num_sim_steps", 3, "--train_data_dir", leaper / "data") == 0
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["train_data_dir"] == str(leaper / "data")
    other = RolloutDataset(leaper / "data", 3, 1)
    means = fit_means(other, np.arange(len(other)), simulator.agent.policy, 0)
    data = RolloutDataset(recording / "data", 3, 3)
    errors = data.batch(settings["windows"]).frames[2] / 255 - means.frames[0]
    np.testing.assert_allclose(np.load(tmp_path / "out" / "loss_image_mean_frame.npy")[0],
                               0.5 * errors.square().sum(dim=(1, 2, 3)), rtol=1e-4)
    assert "is the evaluated recording" in refusal(
        lambda argv: run(agent_path, model_file, recording, *argv),
        ["--output_dir", tmp_path / "other", "--train_data_dir", recording / "data"], capsys)


def test_a_wrong_number_of_initial_frames_is_refused(agent_path, model_file, recording, tmp_path,
                                                     capsys):
    assert "--num_initializing_steps is 4, but this simulator was trained with 3" in refusal(
        lambda argv: run(agent_path, model_file, recording, *argv),
        ["--output_dir", tmp_path / "out", "--num_initializing_steps", 4], capsys)
    assert not (tmp_path / "out").exists()


def test_a_simulator_that_diverged_is_refused(simulator, dataset, split, means):
    broken = copy.deepcopy(simulator)
    with torch.no_grad():
        broken.decoder.reward[-1].bias.fill_(torch.inf)
    with pytest.raises(UserError, match=r"reward loss .* is not finite"):
        loss_over_time(broken, dataset, split.held_out[:3], 3, means, MODE, FLOAT32)
