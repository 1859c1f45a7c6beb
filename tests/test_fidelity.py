"""The fidelity card: PSNR and SSIM by region, action controls, another agent, and outcomes."""

import functools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import FLOAT32, ROOT, tiny_policy
from sklearn.metrics import cohen_kappa_score

import loss_over_time_experiment as script
from agents.agent_file import load_agent, save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.recording import write_episode
from agents.rollout_files import RolloutWriter
from common.game_constants import pixels_per_square
from envs.procgen_env import EnvConfig
from generative import dream_life, fidelity
from generative.config import SimulatorConfig
from generative.dataset import RolloutDataset
from generative.dream_life import COIN, DEATH, NEITHER
from generative.fidelity import (
    FidelityCard,
    OtherAgent,
    measure_frames,
    measure_kept_objects,
    region_masks,
    remembered_mask,
    ssim_map,
)
from generative.loss_over_time import (
    ACTION_CONTROLS,
    LAST_FRAME,
    MEAN_FRAME,
    NOOP_ACTIONS,
    PREDICTORS,
    SHIFTED_ACTIONS,
    SHUFFLED_ACTIONS,
    SIMULATOR,
    Means,
    control_actions,
    loss_over_time,
)
from generative.loss_tables import table_of
from generative.networks import LatentSampler
from generative.runs import open_simulator

AGENT = ROOT / "pretrained" / "coinrun_hard" / "model.pth"
MODEL = ROOT / "pretrained" / "coinrun_hard_simulator" / "model.pt"
SCALE = pixels_per_square("coinrun", "hard")
MODE = LatentSampler("mode")
STEPS, NUM_INIT = 12, 3
NUM_LIVES = 400
GREY = torch.full((3, 64, 64), 0.5)
MEANS = Means(GREY[None], torch.full((1, 15), 1 / 15))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Hard levels of CoinRun, played by the shipped agent's most likely actions, with positions."""
    folder = tmp_path_factory.mktemp("played") / "data"
    config = EnvConfig("coinrun", "hard")
    levels = list(enumerate(config.draw_levels(6, 16)))
    writer = RolloutWriter(folder, {"env": vars(config), "positions": True})
    for episode in play_episodes(load_agent(AGENT), FLOAT32, config, levels, 0, 6,
                                 PlayOptions(greedy=True, keep_positions=True)):
        write_episode(writer, episode, with_video=False, worlds={})
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def dataset(played):
    return RolloutDataset(played, NUM_INIT, STEPS)


@pytest.fixture(scope="module")
def windows(dataset):
    """Random windows; some reach the end of an episode, some straddle two episodes."""
    return np.random.default_rng(0).permutation(len(dataset))[10:30]


@pytest.fixture(scope="module")
def simulator():
    return open_simulator(MODEL, AGENT, SimulatorConfig(), FLOAT32)


def card_of(dataset, **more):
    return FidelityCard(SCALE, lambda numbers: dataset.batch(numbers).positions, **more)


@pytest.fixture(scope="module")
def result(simulator, dataset, windows):
    return loss_over_time(simulator, dataset, windows, 16, MEANS, MODE, FLOAT32,
                          card=card_of(dataset))


def frames_of(dataset, windows):
    return dataset.batch(windows).frames[NUM_INIT - 1:].float() / 255


@functools.cache
def whole_windows(dataset):
    """Return the windows within a single episode, its terminal frame excluded."""
    inside = [number for number in range(len(dataset))
              if dataset.place(number).frame >= NUM_INIT - 1
              and not dataset[number].terminals.any()]
    return np.array(inside)


# PSNR and SSIM

def test_true_frames_score_50_db(dataset):
    truth = frames_of(dataset, whole_windows(dataset)[:8])
    found = measure_frames(truth, truth, {})
    assert found["psnr"].numpy() == pytest.approx(50)
    assert found["ssim"].numpy() == pytest.approx(1)
    nearly = measure_frames(truth + 0.001, truth, {})  # equal when rounded to 8 bits
    assert (nearly["mse"] == 0).all() and nearly["psnr"].numpy() == pytest.approx(50)


def test_frames_shifted_by_one_pixel_score_about_20_db(dataset):
    truth = frames_of(dataset, whole_windows(dataset)[::40])
    shifted = torch.cat([truth[..., :1], truth[..., :-1]], dim=-1)
    assert 17 < measure_frames(shifted, truth, {})["psnr"].mean() < 23
    half = measure_frames(truth / 2, torch.zeros_like(truth), {})
    error = np.square(np.round(truth.numpy() / 2 * 255) / 255).mean(axis=(2, 3, 4))
    np.testing.assert_allclose(half["psnr"], -10 * np.log10(error), rtol=1e-4)


def test_ssim_is_that_of_scikit_image(dataset):
    from skimage.metrics import structural_similarity

    truth = frames_of(dataset, whole_windows(dataset)[::40])[:, 0]
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.normal(size=truth.shape)).float() * 0.1
    for images in (truth.roll(1, dims=-1), (truth + noise).clamp(0, 1), truth.flip(0)):
        found = ssim_map(images, truth).mean(dim=(-2, -1))
        for image, label, similarity in zip(images, truth, found):
            expected = structural_similarity(
                image.double().numpy(), label.double().numpy(), gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False, data_range=1, channel_axis=0)
            assert float(similarity) == pytest.approx(expected, abs=1e-6)


def test_regions_divide_a_frame(dataset):
    truth = frames_of(dataset, whole_windows(dataset)[:4])
    in_memory = torch.zeros(*truth.shape[:2], 64, 64, dtype=torch.bool)
    moving = in_memory.clone()
    in_memory[..., :20] = True
    moving[..., 10:30] = True
    images = truth.clone()
    images[..., :10] = 1 - truth[..., :10]  # remembered; columns 10 to 29 are moving objects
    images[..., 40:] += 0.1
    found = measure_frames(images, truth, region_masks(in_memory, moving))
    errors = (fidelity.to_8_bits(images) - fidelity.to_8_bits(truth)).square().mean(dim=2)
    for kind, columns in (("remembered", slice(0, 10)), ("revealed", slice(30, 64))):
        expected = -10 * errors[..., columns].mean(dim=(-2, -1)).clamp(min=1e-5).log10()
        np.testing.assert_allclose(found[f"psnr_{kind}"], expected, atol=1e-3)
    assert found["psnr_moving"].numpy() == pytest.approx(50)
    similarity = torch.stack([ssim_map(*map(fidelity.to_8_bits, pair))
                              for pair in zip(images, truth)])[..., :5]  # columns 5 to 9
    np.testing.assert_allclose(found["ssim_remembered"], similarity.mean(dim=(-2, -1)), atol=1e-6)
    empty = measure_frames(images, truth, region_masks(torch.ones_like(in_memory), None))
    assert empty["psnr_revealed"].isnan().all() and "psnr_moving" not in empty


# Remembered pixels

def test_remembered_pixels_of_a_planted_displacement():
    still = torch.zeros(3, 1, 2)
    still[1, 0] = torch.tensor([-2., 0])  # one initial frame is two squares to the left
    steps = torch.tensor([[0., 0], [3, 0], [0, 1], [math.nan, math.nan]]).unsqueeze(1)
    found = remembered_mask(still, steps, scale=4.0, size=64)[:, 0]
    assert found[0].all()  # the edge of the frame does not erode the mask
    # 12 pixels to the right: columns 52 to 63 are new, and 51 is eroded.
    assert found[1, :, :51].all() and not found[1, :, 51:].any()
    # 4 pixels up: rows 0 to 3 are new, and 4 is eroded.
    assert found[2, 5:].all() and not found[2, :5].any()
    assert not found[3].any()
    # Another initial frame showed the view two squares to the left.
    assert remembered_mask(still, torch.tensor([[[-2., 0]]]), 4.0, 64).all()


def test_frames_shifted_by_the_camera_match(dataset):
    """Remembered pixels equal pixels of the last initial frame, shifted as the positions moved."""
    windows = whole_windows(dataset)[::7]
    batch = dataset.batch(windows)
    truth = frames_of(dataset, windows)
    initial, later = (batch.positions[part] for part in (slice(NUM_INIT - 1, NUM_INIT),
                                                         slice(NUM_INIT - 1, None)))
    mask = remembered_mask(initial, later, SCALE, 64)
    moved = ((later - initial) * torch.tensor([SCALE, -SCALE])).round().long()
    errors = {True: [], False: []}
    for step, window in np.argwhere(moved.abs().sum(dim=-1).numpy() > 3):
        right, down = moved[step, window].tolist()
        rows, columns = mask[step, window].nonzero(as_tuple=True)
        places = rows + down, columns + right
        assert min(map(torch.min, places)) >= 0 and max(map(torch.max, places)) <= 63
        label = truth[step, window][:, rows, columns]
        for shifted, (row, column) in ((True, places), (False, (rows, columns))):
            errors[shifted].append((truth[0, window][:, row, column] - label).square().mean())
    assert len(errors[True]) > 50
    assert np.mean(errors[True]) < 0.015
    assert np.mean(errors[False]) > 4 * np.mean(errors[True])


def test_positions_that_were_not_recorded_are_replayed(dataset, windows):
    found = script.replay_positions(dataset, windows[:8])(windows[2:6])
    np.testing.assert_allclose(found, dataset.batch(windows[2:6]).positions, rtol=1e-6)


# Objects

def test_objects_are_kept_that_were_in_view_at_the_start_and_still_are():
    truth = torch.zeros(3, 2, 3, 64, 64)
    without = torch.zeros(3, 2, 1, 3, 64, 64)
    truth[:, :, :, 10:14, 10:14] = 1  # an object in all frames
    without[:, 1] = truth[:, 1].unsqueeze(1)  # in window 1, it is of another kind
    without[1:, 1, :, :, 10:14, 10:14] = 0  # that kind only occurs at the first step
    images = truth.clone()
    images[1] *= 0.5 ** 0.5 + 0.01  # a squared error of less than half
    images[2] = 0
    found = measure_kept_objects(("coin",), images, truth, without, None)["kept_coin"]
    assert found[:, 0].tolist() == [1, 1, 0]
    assert found[:, 1].isnan().all()
    out_of_memory = torch.ones(3, 2, 64, 64, dtype=torch.bool)
    out_of_memory[1, :, 10:14] = False
    found = measure_kept_objects(("coin",), images, truth, without, out_of_memory)["kept_coin"]
    assert found[0, 0] == 1 and found[1, 0].isnan() and found[2, 0] == 0


# Measurements on windows

def test_card_excludes_ends_and_windows_that_begin_before_their_episode(result, dataset):
    included = np.isfinite(result.fidelity[SIMULATOR, "psnr"])
    for n, number in enumerate(result.windows.tolist()):
        ended = dataset[number].terminals[NUM_INIT - 1:].cumsum(0).numpy() > 0
        begins = dataset.place(number).frame >= NUM_INIT - 1
        assert (included[:, n] == (~ended & begins)).all()
    assert not included.all() and included[:, included.any(axis=0)].mean() > 0.5
    truth = frames_of(dataset, result.windows)
    expected = measure_frames(GREY.expand_as(truth), truth, {})["psnr"].numpy()
    rows = table_of(result, seed=0).query("kind == 'psnr' and predictor == @MEAN_FRAME")
    np.testing.assert_allclose(
        rows["mean"], np.nanmean(np.where(included, expected, np.nan), axis=1), rtol=1e-5)


def test_actions_matter_to_the_simulator(result):
    """The simulator is worse with the actions of another window, late actions, or no actions."""
    table = table_of(result, seed=0).set_index(["step", "kind", "predictor"])["mean"].sort_index()
    last = STEPS - 1
    scores = table[last, "psnr"]
    assert scores[SIMULATOR] > scores[SHUFFLED_ACTIONS] + 1
    assert scores[SIMULATOR] > scores[MEAN_FRAME] + 2
    for predictor, least in ((SHUFFLED_ACTIONS, 1), (NOOP_ACTIONS, 1), (SHIFTED_ACTIONS, 0.2)):
        assert table[last, "psnr_margin", predictor] > least
        assert table[last, "psnr_margin", predictor] == pytest.approx(
            scores[SIMULATOR] - scores[predictor], abs=1e-4)
    assert table[0, "psnr", LAST_FRAME] == pytest.approx(50)
    errors = table.xs("mse", level="kind")
    np.testing.assert_allclose(table.xs("psnr_of_mean_error", level="kind").reindex(errors.index),
                               -10 * np.log10(errors.clip(lower=1e-5)), rtol=1e-6)


def test_control_actions():
    actions = torch.tensor([[1, 5], [2, 6], [3, 7]])
    found = control_actions(actions)
    assert found[SHIFTED_ACTIONS].tolist() == [[1, 5], [1, 5], [2, 6]]
    assert (found[NOOP_ACTIONS] == 4).all() and found[NOOP_ACTIONS].shape == actions.shape


# Another agent

def test_another_agent_enters_with_its_own_state(dataset, windows):
    policy = tiny_policy(seed=3)
    other = OtherAgent(policy, dataset, FLOAT32)
    (early, *_) = [n for n in windows.tolist() if 5 < dataset.place(n).frame < 30]
    chosen = np.array([early])
    found = other.states_entering(chosen)
    for number, state in zip(chosen.tolist(), found):
        place = dataset.place(number)
        frames = np.load(dataset.folder.episode_folder(place.episode) / "ob.npy")
        hidden = policy.initial_states(1)
        with torch.no_grad():
            for frame in frames[:place.frame]:
                image = torch.from_numpy(frame).float().unsqueeze(0) / 255
                hidden = policy.step(policy.embed(image), hidden).hidden_states
        np.testing.assert_allclose(state, hidden[0], atol=1e-5)
    recorded = dataset.batch(chosen).hidden_states[NUM_INIT - 1]
    own = OtherAgent(load_agent(AGENT), dataset, FLOAT32).states_entering(chosen)
    np.testing.assert_allclose(own, recorded, atol=1e-3)


# Outcomes in the game and in the simulator

def test_life_in_the_game_goes_on_as_recorded(simulator, dataset):
    """The recorded agent also took the most likely actions."""
    starts = dream_life.choose_starts(dataset, dataset.episodes.tolist(), 10, seed=0)
    assert sum(start.near_end for start in starts) == 5
    lives = dream_life.live_in_game(simulator, dataset.folder, starts, FLOAT32)
    for start, life in zip(starts, lives):
        steps = dataset.folder.steps(start.episode)
        left = len(steps) - 1 - start.frame
        assert not start.near_end or 4 <= left <= 12
        recorded = steps["action"].iloc[start.frame:start.frame + min(left, 32)]
        assert life.actions.tolist() == recorded.tolist()
        ended = COIN if steps["reward"].iloc[-1] > 0 else DEATH
        assert (life.outcome, life.step) == ((ended, left) if left <= 32 else (NEITHER, 32))
        assert life.within(left - 1) == NEITHER


def test_dreamt_outcomes_are_read_off_rewards_and_ends():
    quiet, actions = np.zeros(33), np.arange(33)

    def life(rewards, ends):
        found = dream_life._read_life(quiet + rewards, quiet + ends, actions)
        return found.outcome, found.step, len(found.actions)

    at = np.eye(33)
    assert life(0, 0) == (NEITHER, 32, 32)
    assert life(0.6 * at[5], 0.9 * at[6]) == (COIN, 5, 5)
    assert life(0.4 * at[5], 0.4 * at[6]) == (NEITHER, 32, 32)
    assert life(0.3 * at[7], 0.8 * at[7]) == (COIN, 7, 7)
    assert life(0.02 * at[7], 0.8 * at[7]) == (DEATH, 7, 7)
    assert life(0.9 * at[9], 0.8 * at[7]) == (DEATH, 7, 7)


def test_probabilities_of_ends_follow_from_the_steps():
    """Without death probabilities, ends with little reward are deaths."""
    ends = np.array([0, 0.5, 0.5, 0])
    actions, rewards = np.zeros(4, int), np.array([0, 0.02, 0.9, 0])
    life = dream_life._read_life(rewards, ends, actions)
    np.testing.assert_allclose(life.probabilities[DEATH], [0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(life.probabilities[COIN], [0, 0, 0.25, 0.25])
    life = dream_life._read_life(rewards, ends, actions, np.array([0.3, 0.2, 0.9, 0]))
    np.testing.assert_allclose(life.probabilities[DEATH], [0, 0.2, 0.45, 0.45])
    np.testing.assert_allclose(life.probabilities[COIN], [0, 0.3, 0.3, 0.3])


def lives(death, near_end=False, seed=0):
    """Return a table of lives whose deaths have a known probability in the game.

    Args:
        death: function that maps these probabilities (N,) to those of the simulator.
    """
    rng = np.random.default_rng(seed)
    true = rng.beta(0.5, 1, NUM_LIVES)
    real = np.where(rng.random(NUM_LIVES) < true, DEATH, NEITHER)
    table = pd.DataFrame({"episode": np.arange(NUM_LIVES) // 2, "near_end": near_end,
                          "real_actions": "7 7", "dream_actions": "7 4"})
    for horizon in dream_life.HORIZONS:
        table[f"real_{horizon}"] = real
        table[f"dream_{horizon}"] = NEITHER  # no step reaches the threshold
        table[f"dream_{DEATH}_{horizon}"] = death(true)
        table[f"dream_{COIN}_{horizon}"] = 0.0
    return table


def test_ends_are_judged_by_probabilities_not_only_by_a_threshold():
    """A calibrated simulator that never reaches the threshold is found to be calibrated, and wrong
    simulators are found to be wrong."""
    table = lives(lambda true: true)
    within = dream_life.summarize(table, seed=0)["all"]["within_16"]
    assert within["confusion"][DEATH][DEATH] == 0  # the threshold finds no death
    death = within[DEATH]
    assert death["real"] == (table["real_16"] == DEATH).sum()
    assert death["expected"] == pytest.approx(table["dream_death_16"].sum())
    low, high = death["expected_over_real"]["interval_95"]
    assert low < 1 < high
    assert death["skill"]["interval_95"][0] > 0.2 and death["auc"]["interval_95"][0] > 0.7
    low, high = death["excess_reliability"]["interval_95"]
    assert low <= 0 <= high
    assert within["end"]["brier"] == death["brier"]  # because there are no coins

    rare = dream_life.judge_ends(lives(lambda true: true / 4), 16, seed=0)[DEATH]
    assert rare["expected_over_real"].high < 0.3 and rare["excess_reliability"].low > 0
    assert rare["auc"].value == pytest.approx(death["auc"]["value"])  # the order is right
    rng = np.random.default_rng(1)
    noise = dream_life.judge_ends(lives(rng.permutation), 16, seed=0)[DEATH]
    assert noise["skill"].high < 0 and noise["auc"].low < 0.5 < noise["auc"].high


def test_lives_are_printed_with_intervals(capsys):
    dream_life.print_lives(dream_life.summarize(lives(lambda true: true), seed=0))
    printed = capsys.readouterr().out
    probabilities, threshold = (printed.index(text) for text in (
        "within 16 actions, probabilities of ends", "within 16 actions, outcomes decided by"))
    assert probabilities < threshold
    (line,) = [line for line in printed[probabilities:threshold].splitlines()
               if line.startswith(DEATH)]
    assert line.count(" to ") == 5
    assert "undefined" in printed  # measures of coins, which do not occur


def test_outcomes_are_summarized():
    rng = np.random.default_rng(0)
    real = rng.choice(dream_life.OUTCOMES, 60)
    dream = np.where(rng.random(60) < 0.7, real, rng.choice(dream_life.OUTCOMES, 60))
    table = pd.DataFrame({
        "episode": np.arange(60) // 2, "near_end": np.arange(60) < 30, "real_16": real,
        "dream_16": dream, "real_32": real, "dream_32": real,
        **{f"dream_{outcome}_{horizon}": 1.0 * (dream == outcome)
           for outcome in (COIN, DEATH) for horizon in (16, 32)},
        "real_actions": ["7 7"] * 60, "dream_actions": ["7"] * 20 + ["7 4"] * 40})
    found = dream_life.summarize(table, seed=0)["all"]
    kappa = found["within_16"]["kappa"]
    assert kappa["value"] == pytest.approx(cohen_kappa_score(real, dream))
    assert kappa["interval_95"][0] < kappa["value"] < kappa["interval_95"][1]
    assert found["within_16"]["agreement"]["value"] == pytest.approx((real == dream).mean())
    assert found["within_16"]["confusion"][COIN][DEATH] == ((real == COIN) & (dream == DEATH)).sum()
    assert found["within_16"]["end"]["expected"] == (dream != NEITHER).sum()
    assert found["within_32"]["kappa"]["value"] == 1
    assert found["median_divergence"] == 1
    assert found["actions"]["dream"][4] == 0.4 and found["actions"]["real"][7] == 1
    assert dream_life.summarize(table[:30], seed=0)["all"]["median_divergence"] is None


def test_a_dream_begins_with_the_recorded_state_and_action(simulator, dataset):
    start = dream_life.choose_starts(dataset, dataset.episodes.tolist(), 4, seed=0)[-1]
    (life,) = dream_life.live_in_dream(simulator, dataset.folder, [start], MODE, 10.0, FLOAT32)
    (number,) = [number for number in range(len(dataset))
                 if vars(dataset.place(number)) == {"episode": start.episode,
                                                    "frame": start.frame}
                 and not (dataset[number].frames[:NUM_INIT] == 0).all()]
    window = dataset[number]
    with torch.no_grad():
        images = window.frames[:NUM_INIT].unsqueeze(1).float() / 255
        begin = simulator.start_from(simulator.encode(images), MODE)
        first = simulator.imagine(begin, MODE, 1, true_actions=window.actions[
            NUM_INIT - 2].reshape(1, 1))[0]
        output = simulator.agent.step(first.images, window.hidden_states[NUM_INIT - 1:NUM_INIT])
    assert life.actions[0] == int(output.log_probs.argmax())


# The script

@pytest.mark.slow
def test_script_writes_the_card_and_the_lives(played, tmp_path, capsys):
    other, output = tmp_path / "other.pth", tmp_path / "out"
    save_agent(other, tiny_policy(seed=7), {})
    assert script.main([*map(str, (
        "--agent_file", AGENT, "--model_file", MODEL, "--data_dir", played,
        "--interpreting_params_name", "tiny", "--device", "cpu", "--precision", "float32",
        "--output_dir", output, "--unseen", "--num_sim_steps", 9, "--other_agent_file", other,
        "--compare_model_file", MODEL, "--life_starts", 2))]) == 0
    printed = capsys.readouterr().out
    assert "may have been trained on" not in printed
    assert f"8 of {len(RolloutDataset(played, 3, 9))} held-out windows" in printed
    table = pd.read_csv(output / "loss_over_time.csv")
    kinds = {"psnr", "ssim", "psnr_remembered", "psnr_revealed", "psnr_moving", "ssim_remembered",
             "mse", "psnr_of_mean_error", "psnr_margin", "other_policy_kl",
             "other_hidden_state_cosine", "other_value_correlation", "kept_agent", "kept_wall"}
    assert kinds <= set(table["kind"])
    rows = table[table["kind"] == "psnr"].groupby("predictor")["mean"]
    assert rows.groups.keys() == {*PREDICTORS, *ACTION_CONTROLS, "other_simulator"}
    with np.load(output / "fidelity.npz") as arrays:
        assert arrays["psnr/simulator"].shape == (9, 8)
        means = np.nanmean(arrays["psnr/simulator"], axis=1)
    found = rows.get_group(SIMULATOR)
    np.testing.assert_allclose(found, means[:len(found)], rtol=1e-5)
    np.testing.assert_allclose(rows.get_group("other_simulator"), found, rtol=1e-5)
    assert len(pd.read_csv(output / "life.csv")) == 2
    assert json.loads((output / "life.json").read_text()).keys() == {"all", "near_end", "anywhere"}
    settings = json.loads((output / "settings.json").read_text())
    assert settings["unseen"] and settings["other_agent_file"] == str(other)
