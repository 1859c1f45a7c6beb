"""Lesions of the hidden state: arithmetic, agents with and without memory, and the script."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    CHANGE,
    FLOAT32,
    HIGH,
    LOW,
    counting_policy,
    record_arguments,
    small_policy,
    tiny_policy,
)

import record
from agents.agent_file import load_agent, save_agent
from agents.episodes import PlayOptions, play_episodes
from agents.patch import BatchInfo
from agents.rollout_files import RolloutFolder
from agents.similarity import kl_divergence
from analysis import memory_lesions
from analysis.memory.lesion_results import last_above, reach_of
from analysis.memory.lesions import (
    COPY,
    DELAY,
    FREEZE,
    RESET,
    SWAP,
    Donors,
    Lesion,
    LesionedMemory,
    Windows,
    attribution_over_time,
    choose_windows,
    read_states,
    rotation,
    run_windows,
)
from common.errors import UserError
from envs.procgen_env import EnvConfig
from stats.association import rank_correlations

DELAYED = 3
LESIONS = [Lesion(kind, once, DELAYED if kind == DELAY else 0)
           for kind in (RESET, SWAP, DELAY, COPY) for once in (True, False)] + [Lesion(FREEZE)]
BEGINS = np.array([4, 9, 5, 12])
LEVELS = np.array([7, 7, 8, 9])
BEFORE, STEPS, LENGTH = 4, 6, 18
GAME = EnvConfig("fruitbot", "easy")


def without_memory(policy):
    """Change the agent's GRU so that it ignores the entering state."""
    with torch.no_grad():
        gru, size = policy.gru.gru, policy.hidden_state_size
        gru.weight_hh_l0.zero_()
        gru.weight_ih_l0[size:2 * size] = 0
        gru.bias_ih_l0[size:2 * size] = -100
    return policy


def without_heads(policy):
    with torch.no_grad():
        policy.fc_policy.weight.zero_()
    return policy


@torch.no_grad()
def played(policy, embeddings, lesion=None, begin=0, donor=None):
    """Compute the states that enter each step of an episode, before the lesion, and the
    log-probabilities, in a plain loop."""
    states, log_probs = [policy.initial_state()], []
    for t, embedding in enumerate(embeddings):
        entering = states[t]
        if lesion is not None and (t == begin if lesion.once else t >= begin):
            entering = {RESET: states[0], COPY: entering, SWAP: donor[t],
                        FREEZE: states[begin - 1], DELAY: states[t - lesion.delay]}[lesion.kind]
        output = policy.step(embedding[None], entering[None])
        states.append(output.hidden_states[0])
        log_probs.append(output.logits[0].double().log_softmax(dim=-1))
    return torch.stack(states[:-1]), torch.stack(log_probs)


def make_windows(policy, seed=0):
    """Return windows of episodes of random embeddings, the embeddings, and the states."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(len(BEGINS), LENGTH, policy.embedder.output_dim, generator=generator)
    states = [played(policy, episode)[0] for episode in embeddings]
    first = BEGINS - BEFORE
    windows = Windows(
        LEVELS, BEGINS, np.array([0, 3, 7, 1]),
        torch.stack([episode[begin:begin + BEFORE + STEPS]
                     for episode, begin in zip(embeddings, first)]),
        torch.stack([episode[begin] for episode, begin in zip(states, first)]), BEFORE)
    return windows, embeddings, states


def kl_of(policy, windows, lesion, states):
    """Return the KL divergence after a lesion, and the function that applied it."""
    intact, _, entering = run_windows(policy, windows)
    donors = (Donors(list(entering), windows.levels, windows.first) if lesion.kind == COPY
              else Donors(states, windows.levels))
    alter = LesionedMemory(lesion, windows.begin, policy.initial_states(1)[0],
                           torch.ones(policy.hidden_state_size), donors)
    lesioned = run_windows(policy, windows, alter)[0]
    return kl_divergence(intact, lesioned).numpy(), alter


@pytest.mark.parametrize("lesion", LESIONS, ids=str)
def test_lesions_equal_a_plain_loop_over_steps(lesion):
    policy = small_policy()
    windows, embeddings, states = make_windows(policy)
    kl, alter = kl_of(policy, windows, lesion, states)
    donors = Donors(states, LEVELS)
    for number, (episode, begin) in enumerate(zip(embeddings, BEGINS)):
        donor = [donors.other(number, LEVELS[number], step) for step in range(LENGTH)]
        steps = slice(begin, begin + STEPS)
        before, after = (played(policy, episode, *more)[1][steps].double()
                         for more in ((), (lesion, begin, donor)))
        expected = kl_divergence(before, after).numpy()
        np.testing.assert_allclose(kl[number], expected, rtol=1e-3, atol=1e-9)
    assert (alter.num_steps == (1 if lesion.once else STEPS)).all()
    if lesion.kind == COPY:
        assert (kl == 0).all() and (alter.moved == 0).all()
    else:
        assert (kl.max(axis=1) > 1e-6).all() and (alter.moved > 0).all()


@pytest.mark.parametrize("policy", [
    small_policy(recurrent=False), without_memory(small_policy()), without_heads(small_policy())],
    ids=["feed-forward", "without memory", "without heads"])
def test_agents_that_do_not_use_their_memory_are_unaffected(policy):
    windows, _, states = make_windows(policy)
    for lesion in LESIONS:
        for control in (None, 0):
            kl, alter = kl_of(policy, windows, dataclasses.replace(lesion, control=control), states)
            assert (kl == 0).all() and (alter.num_steps > 0).all()
    entering = run_windows(policy, windows)[2]
    values = attribution_over_time(policy, windows, entering, torch.zeros(16))
    assert values.shape == (len(BEGINS), STEPS + 1) and (values[:, 1:] == 0).all()


def test_a_counter_is_set_back_by_the_steps_that_a_lesion_removes():
    policy = counting_policy()
    with torch.no_grad():  # the counter gradually shifts the policy between two actions
        policy.fc_policy.weight[HIGH, 0], policy.fc_policy.bias[HIGH] = 5, -2
    windows, _, states = make_windows(policy)

    def kl_by_counts(intact, lesioned):
        p, q = (torch.sigmoid(torch.tensor(5 * (1 - 0.9 ** count) - 2)) for count in
                (intact, lesioned))
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    k = np.arange(1, STEPS + 1)
    intact = BEGINS[:, None] + k
    for lesion, lesioned in (
            (Lesion(RESET, once=True), 0 * intact + k), (Lesion(RESET), 0 * intact + 1),
            (Lesion(DELAY, once=True, delay=DELAYED), intact - DELAYED),
            (Lesion(FREEZE), BEGINS[:, None] + 0 * k), (Lesion(SWAP), intact)):
        kl = kl_of(policy, windows, lesion, states)[0]
        np.testing.assert_allclose(kl, kl_by_counts(intact, lesioned), rtol=1e-3, atol=1e-6)


def test_controls_change_the_state_by_as_much_in_standard_deviations():
    std = torch.tensor([0.5, 2.0, 0.0, 1.0, 0.1])
    change = torch.randn(40, 5)
    turned = change @ rotation(std, 1)
    assert (turned[:, 2] == 0).all()
    varies = std > 0
    torch.testing.assert_close(*((values[:, varies] / std[varies]).norm(dim=1)
                                 for values in (change, turned)))
    assert not torch.allclose(rotation(std, 1), rotation(std, 2))

    hidden, initial, std = 0.05 * torch.randn(4, 12), torch.zeros(12), torch.linspace(0.2, 1, 12)
    info = BatchInfo(np.arange(4), np.zeros(4, int), LEVELS)

    def moved(control=None, size=None):
        alter = LesionedMemory(Lesion(RESET, control=control), np.zeros(4, int), initial, std,
                               size=size)
        assert alter(hidden, info).abs().max() <= 1  # range of states of a GRU
        return alter.moved

    for control in range(3):
        np.testing.assert_allclose(moved(control), moved(), rtol=1e-4)
        np.testing.assert_allclose(moved(control, 0.5), 0.5, rtol=1e-4)
        np.testing.assert_allclose(moved(control, 6), 6, rtol=0.01)  # some units reach the limit
    assert (moved(0, 1000) < 10).all()


def test_swapped_states_come_from_other_levels_at_the_same_step():
    states = [torch.full((length, 1), float(number)) + torch.arange(length)[:, None] / 1000
              for number, length in enumerate((30, 8, 20, 4))]
    donors = Donors(states, LEVELS)
    for step in range(40):
        for number, level in ((0, 7), (2, 8)):
            state = donors.other(number, level, step)
            giver = int(state)
            assert LEVELS[giver] != level
            others = [length for length, other in zip((30, 8, 20, 4), LEVELS) if other != level]
            expected = min(step, max(others) - 1)  # at most the end of the longest episode
            assert state.item() - giver == pytest.approx(expected / 1000, abs=1e-5)
    with pytest.raises(UserError, match="all episodes use level 7"):
        Donors(states[:2], LEVELS[:2]).other(0, 7, 0)


def test_windows_lie_within_their_episodes():
    begins = choose_windows([40, 10, 9, 3], 4, 6, 3, 0)
    assert [len(steps) for steps in begins] == [3, 1, 0, 0]
    assert begins[1] == [4] and all(4 <= step <= 34 for step in begins[0])


def test_reach_and_rank_correlation_of_curves():
    curves = np.array([[1, 0.5, 0.11, 0.09], [0, 0, 0, 0], [0.1, 0.2, 3, 2.0]])
    np.testing.assert_array_equal(last_above(curves), [3, 0, 4])
    np.testing.assert_allclose(rank_correlations(curves, curves[[0, 0, 0]]), [1, np.nan, -0.8])


def test_durations_are_those_of_the_output_and_of_random_changes():
    """The value reads a unit whose changes shrink by 0.9 per step, whatever changed it; the policy
    reads nothing. So the value recovers slowly, no faster or slower than after random changes."""
    policy = counting_policy()
    with torch.no_grad():
        policy.fc_policy.weight.zero_()
        policy.fc_value.weight.zero_()
        policy.fc_value.weight[0, 0] = 5
    windows, _, states = make_windows(policy)
    intact, values, _ = run_windows(policy, windows)
    names, effects = ["swap_once", "reset_once"], {"policy": [], "value": []}
    kinds = [Lesion(SWAP, once=True), Lesion(RESET, once=True)]
    for seed in range(2):
        names.append(f"control_{seed:03d}_reset_once")
        kinds.append(Lesion(RESET, once=True, control=seed))
    for lesion in kinds:
        alter = LesionedMemory(lesion, windows.begin, policy.initial_states(1)[0],
                               torch.ones(policy.hidden_state_size), Donors(states, LEVELS))
        log_probs, changed, _ = run_windows(policy, windows, alter)
        effects["policy"].append(kl_divergence(intact, log_probs).numpy())
        effects["value"].append((changed - values).abs().numpy())
    attribution = np.random.default_rng(0).random((len(BEGINS), STEPS + 1))
    table = reach_of(names, {name: np.stack(each) for name, each in effects.items()}, attribution,
                     LEVELS, 0).set_index(["curve", "output"])
    value = table.loc["reset_once", "value"]
    assert value["lag"] == STEPS and value["reach"] == STEPS
    columns = ["left", "left_low_95", "left_high_95", "control_left_low", "control_left_median",
               "control_left_high"]
    np.testing.assert_allclose(value[columns].astype(float), 0.9 ** (STEPS - 1), rtol=1e-3)
    assert (table.loc[["reset_once", "swap_once"]].loc[(slice(None), "policy"), "reach"] == 0).all()
    assert (table.loc["reset_once", "policy"][columns] == 0).all()
    assert np.isnan(table.loc["swap_once", "value"]["control_reach_low"])  # it has no controls here
    assert np.isnan(table.loc["attribution", "policy"]["control_left_high"])


def test_the_counting_agent_acts_as_the_lesion_lets_it_count():
    policy = counting_policy()
    levels = list(enumerate(GAME.draw_levels(4, 1)))
    begin = np.full(4, 9)
    donors = Donors([torch.zeros(1, 64)] * 4, np.arange(4))

    def actions(lesion=None):
        alter = lesion and LesionedMemory(lesion, begin if lesion.once else 0 * begin,
                                          policy.initial_states(1)[0], torch.ones(64), donors)
        for episode in play_episodes(policy, FLOAT32, GAME, levels, 0, 3,
                                     PlayOptions(alter_state=alter, keep_frames=False)):
            assert episode.length > 12
            yield episode.actions[:-1]

    for episode in actions():
        assert (episode == np.where(np.arange(len(episode)) < CHANGE, LOW, HIGH)).all()
    for episode in actions(Lesion(RESET)):
        assert (episode == LOW).all()
    for episode in actions(Lesion(RESET, once=True)):
        step = np.arange(len(episode))
        assert (episode == np.where((step < CHANGE) | ((step >= 9) & (step < 9 + CHANGE)), LOW,
                                    HIGH)).all()


def recorded(policy, folder):
    save_agent(folder / "agent.pth", policy, {})
    assert record.main([*record_arguments(folder / "agent.pth", folder, 16, "--no_action_noise")
                        ]) == 0
    return folder


@pytest.fixture(scope="module")
def counting(shared):
    return shared("counting", lambda folder: recorded(counting_policy(), folder))


@pytest.fixture(scope="module")
def feed_forward(shared):
    return shared("feed_forward", lambda folder: recorded(
        tiny_policy(recurrent=False, architecture="nature"), folder))


def run(folder, output, *more):
    return memory_lesions.main([
        "--agent_file", str(folder / "agent.pth"), "--data_dir", str(folder / "data"),
        "--num_steps", "8", "--num_levels", "10", "--num_controls", "2", "--device", "cpu",
        "--num_envs", "10", "--precision", "float32", "--output_dir", str(output), *more])


@pytest.mark.slow
def test_the_script_finds_that_the_counting_agent_needs_its_memory(counting, tmp_path):
    lesions = "--lesions", "freeze", "reset_always", "swap_always"
    assert run(counting, tmp_path, *lesions) == 0
    effects = pd.read_csv(tmp_path / "effects.csv").set_index(["condition", "outcome"])["effect"]
    tables = {path.stem: pd.read_csv(path) for path in (tmp_path / "episodes").glob("*.csv")}
    for condition in ("copy", "swap_always"):  # the counter does not depend on the level
        assert (effects[condition] == 0).all()
    before, after = tables["unaltered"], tables["reset_always"]
    assert effects["reset_always", "return"] == after["return"].mean() - before["return"].mean()
    assert effects["reset_always", "return"] != 0
    assert (tables["freeze"]["changed_steps"] > 0).all()
    table = pd.read_csv(tmp_path / "curves.csv")
    assert (table.loc[table["condition"] == "copy", "value"] == 0).all()
    curves = table[table["output"] == "policy"].set_index("condition")["value"]
    assert (curves["copy"] == 0).all() and curves["reset_always"].iloc[0] > 1
    assert (curves["swap_always"] < 1e-6).all()
    text = (tmp_path / "report.md").read_text()
    assert "Recorded frames" in text and "2 random changes" in text
    assert (tmp_path / "kl.png").stat().st_size > 1000
    written = (tmp_path / "episodes" / "copy.csv").stat().st_mtime_ns
    assert run(counting, tmp_path, *lesions) == 0
    assert (tmp_path / "episodes" / "copy.csv").stat().st_mtime_ns == written


@pytest.mark.slow
def test_the_script_finds_nothing_in_an_agent_without_memory(feed_forward, tmp_path):
    assert run(feed_forward, tmp_path, "--lesions", "reset_once", "reset_always") == 0
    for name in ("effects", "open_loop_effects"):
        table = pd.read_csv(tmp_path / f"{name}.csv")
        assert (table["effect"] == 0).all() and not table["claimed"].any()
    reach = pd.read_csv(tmp_path / "reach.csv")
    assert reach["reach"].eq(0).all() and reach["left"].eq(0).all()
    assert reach["output"].tolist() == ["policy", "value", "policy"]


def test_recorded_states_and_policies_are_reproduced(counting):
    folder = RolloutFolder(counting / "data")
    policy = load_agent(counting / "agent.pth")
    arrays = folder.episode(0)
    entering = read_states(policy, FLOAT32, folder, 0)[1]
    np.testing.assert_allclose(entering, arrays.hidden_states[:-2], atol=1e-4)
    options = memory_lesions.LesionOptions(agent_file="a", data_dir="d", num_steps=8, delay=2)
    windows = memory_lesions.read_windows(policy, FLOAT32, folder, options)[0]
    log_probs = run_windows(policy, windows)[0]
    episode_of = {int(folder.steps(number)["level_seed"].iloc[0]): number for number in range(16)}
    for number, level in enumerate(windows.levels):
        recorded_episode = folder.episode(episode_of[level])
        steps = slice(windows.begin[number], windows.begin[number] + 8)
        np.testing.assert_allclose(log_probs[number], recorded_episode.log_probs[steps], atol=0.1)
        assert windows.actions[number] == recorded_episode.steps["action"].iloc[steps.stop - 1]


def test_another_agents_recording_is_refused(counting, agent_path, tmp_path, capsys):
    assert memory_lesions.main(["--agent_file", str(agent_path), "--data_dir",
                                str(counting / "data"), "--output_dir", str(tmp_path / "new")]) == 2
    assert re.search("recorded with an agent other than", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
