"""Whole runs of train.py: output files, and equality of resumed and uninterrupted runs."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import (
    FLOAT32,
    GOLDEN,
    STEPS_PER_UPDATE,
    assert_same,
    at_work_in,
    colours_of,
    figures_drawn,
    golden_weight,
    log_of,
    module_of_layout,
    refusal,
    tiny_config,
    tiny_policy,
    train_arguments,
    trained_run,
)

import plot_training_csv
import train
from agents.agent_file import AgentOrigin, agent_files, load_agent, read_origin, save_agent
from agents.episodes import PlayOptions, play_episodes, summarise
from agents.run_folder import TrainSettings
from agents.training import TrainingRun
from common.errors import NonFiniteLoss, UserError
from common.options import parse
from common.palette import BLUE, VERMILION
from envs.procgen_env import EnvConfig, ProcgenVectorEnv

SHORT_UPDATE = 8 * 16  # steps of an update of _settings


def weights_of(folder):
    return torch.load(agent_files(folder)[-1], weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("undisturbed")
    assert train.main(train_arguments(logdir, 8)) == 0
    return trained_run(logdir)


def test_run_writes_what_the_format_says(undisturbed):
    log = pd.read_csv(undisturbed / "log.csv")
    assert ",".join(log.columns) == (
        "timesteps,wall_time,num_episodes,num_episodes_val,max_episode_rewards,"
        "mean_episode_rewards,min_episode_rewards,max_episode_len,mean_episode_len,"
        "min_episode_len,mean_episode_value,mean_policy_loss,mean_value_loss,mean_entropy_loss,"
        "val_max_episode_rewards,val_mean_episode_rewards,val_min_episode_rewards,"
        "val_max_episode_len,val_mean_episode_len,val_min_episode_len")
    assert log["timesteps"].tolist() == [STEPS_PER_UPDATE * k for k in range(1, 9)]
    last = log.iloc[-1]
    for prefix in ("", "val_"):
        for name in ("episode_rewards", "episode_len"):
            low, mean, high = (last[f"{prefix}{kind}_{name}"] for kind in ("min", "mean", "max"))
            assert low < mean < high  # the published code wrote the maximum for all three
    validations = log["num_episodes_val"].diff().fillna(1) > 0
    assert validations.tolist() == [True, False, False, True, False, False, True, False]
    assert [path.name for path in agent_files(undisturbed)] == [
        f"model_{STEPS_PER_UPDATE * k}.pth" for k in range(1, 9)]
    settings = yaml.safe_load((undisturbed / "hyperparameters.yml").read_text())
    assert settings["seed"] == 4
    assert settings["agent"]["n_envs"] == 8
    assert list(undisturbed.glob("events.out.tfevents.*"))


def test_learning_rate_falls_linearly(undisturbed):
    rates = [torch.load(path, weights_only=True)["optimizer_state_dict"]["param_groups"][0]["lr"]
             for path in agent_files(undisturbed)]
    assert rates == pytest.approx([0.0005 * (1 - k / 8) for k in range(8)])


def change_state(change):
    def damage(path):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)
    return damage


def level_of_another_game(state):
    with contextlib.closing(ProcgenVectorEnv(EnvConfig("heist", "easy"), 1, 0)) as env:
        state["val"]["env"][0] = torch.frombuffer(bytearray(env.get_state()[0]), dtype=torch.uint8)


RESUME_DAMAGE = {
    "an agent": (lambda path: shutil.copy(agent_files(path.parent)[-1], path),
                 "resume.pth, which does not fit it: "),
    "no environments": (change_state(lambda s: s["train"].pop("env")), "KeyError: 'env'"),
    "level of another game": (change_state(level_of_another_game), "its game is heist, not fruit"),
    "fewer levels": (change_state(lambda s: s["train"]["env"].pop()), "7 states for 8"),
    "generator": (change_state(lambda s: s["minibatch_generator"].zero_()), "RuntimeError: "),
    "log": (lambda path: (path.parent / "log.csv").write_bytes(b"\x00\xff,1\n2"), "log.csv is dam"),
}


@pytest.mark.parametrize("name", RESUME_DAMAGE)
def test_what_a_run_cannot_go_on_from_is_refused_in_a_sentence(name, undisturbed, tmp_path, capsys):
    damage, message = RESUME_DAMAGE[name]
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    damage(folder / "resume.pth")
    files = {path.name for path in folder.iterdir()}
    argv = ["--resume", folder, "--num_timesteps", 9 * STEPS_PER_UPDATE]
    assert re.search(message, refusal(train.main, argv, capsys))
    assert {path.name for path in folder.iterdir()} <= files | {"hyperparameters.yml"}


@pytest.mark.parametrize(("number", "changes"), [
    (signal.SIGTERM, {}), (signal.SIGINT, {}),
    (signal.SIGUSR2, {"recurrent": False})])
def test_signal_saves_and_stops(number, changes, tmp_path):
    whole = TrainingRun(tmp_path / "whole", _settings(3 * SHORT_UPDATE, **changes), FLOAT32)
    assert whole.train() == 0
    run = TrainingRun(tmp_path / "stopped", whole.settings, FLOAT32)
    update = run._advance

    def signal_during_update():
        os.kill(os.getpid(), number)
        return update()

    run._advance = signal_during_update
    assert run.train() == 128 + number
    assert [path.name for path in agent_files(run.folder)] == [f"model_{SHORT_UPDATE}.pth"]
    # A row after the last checkpoint and a truncated row must be removed.
    with open(run.folder / "log.csv", "a") as file:
        file.write("999999,1,2,3\n51")
    again = TrainingRun(tmp_path / "stopped", whole.settings, FLOAT32)
    assert again.train() == 0
    pd.testing.assert_frame_equal(log_of(run.folder), log_of(whole.folder), check_exact=True)
    assert_same(weights_of(run.folder), weights_of(whole.folder))


def test_seed_decides_weights_and_levels(tmp_path):
    runs = [TrainingRun(tmp_path / str(seed), dataclasses.replace(_settings(), seed=seed), FLOAT32)
            for seed in (4, 5)]
    one, other = ((run.policy.fc_policy.weight, run.collector.env.get_state()) for run in runs)
    assert not torch.equal(one[0], other[0]) and one[1] != other[1]


def test_training_goes_on_from_an_agent_file(undisturbed, tmp_path):
    source = shutil.copy(agent_files(undisturbed)[-1], tmp_path / "model_1.pth")
    settings = _settings(SHORT_UPDATE, str(source))
    run = TrainingRun(tmp_path / "run", settings, FLOAT32)
    assert_same(dict(run.policy.state_dict()), dict(load_agent(source).state_dict()))
    assert run.train() == 0
    source.unlink()  # a resumed run uses its own weights
    again = TrainingRun(tmp_path / "run", settings, FLOAT32)
    assert_same(dict(again.policy.state_dict()), dict(run.policy.state_dict()))


LAYOUT = json.loads((GOLDEN / "checkpoint_layout.json").read_text())["agent"]


def moments(optimizer, module):
    """Return the first moments of the optimiser by parameter name."""
    return {name: optimizer.state[parameter]["exp_avg"]
            for name, parameter in module.named_parameters()}


def test_published_scripts_go_on_from_our_agent_files(tmp_path):
    run = TrainingRun(tmp_path / "run", _settings(SHORT_UPDATE, architecture="impala"), FLOAT32)
    assert run.train() == 0
    content = weights_of(run.folder)
    theirs = module_of_layout(LAYOUT)
    optimizer = torch.optim.Adam(theirs.parameters())
    theirs.load_state_dict(content["model_state_dict"])
    optimizer.load_state_dict(content["optimizer_state_dict"])
    resumed = TrainingRun(run.folder, run.settings, FLOAT32)
    expected = moments(resumed.optimizer, resumed.policy)
    assert moments(optimizer, theirs).keys() == expected.keys()
    for name, moment in moments(optimizer, theirs).items():
        assert moment.any() and torch.equal(moment, expected[name]), name

    save_agent(tmp_path / "weights_alone.pth", tiny_policy())
    weights_alone = torch.load(tmp_path / "weights_alone.pth", weights_only=True)
    optimizer = torch.optim.Adam(theirs.parameters())
    optimizer.load_state_dict(weights_alone["optimizer_state_dict"])
    assert not optimizer.state and optimizer.param_groups[0]["eps"] == 1e-5


def published_checkpoint(path):
    """Write an older recurrent file: no ``init_hx``, integer step counts, few options of Adam."""
    layout = {key: shape for key, shape in LAYOUT.items() if key != "init_hx"}
    weights = {key: golden_weight(key, shape) for key, shape in layout.items()}
    state = {i: {"step": 28584, "exp_avg": golden_weight(f"mean {key}", shape) / 1000,
                 "exp_avg_sq": golden_weight(f"square {key}", shape) ** 2}
             for i, (key, shape) in enumerate(layout.items())}
    group = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0, "amsgrad": False,
             "params": list(range(len(layout)))}
    torch.save({"model_state_dict": weights,
                "optimizer_state_dict": {"state": state, "param_groups": [group]}}, path)
    return path


def test_training_goes_on_from_the_optimiser_of_a_published_file(tmp_path):
    path = published_checkpoint(tmp_path / "model_1.pth")
    published = functools.partial(_settings, SHORT_UPDATE, str(path), architecture="impala")
    settings = dataclasses.replace(published(), keep_optimizer=True)
    run = TrainingRun(tmp_path / "run", settings, FLOAT32)
    parameters = dict(run.policy.named_parameters())
    for key in LAYOUT:
        entry = run.optimizer.state.get(parameters[key])
        if key == "init_hx":
            assert entry is None
        else:
            expected = golden_weight(f"mean {key}", LAYOUT[key]) / 1000
            assert torch.equal(entry["exp_avg"], expected), key
            assert torch.equal(entry["exp_avg_sq"], golden_weight(f"square {key}", LAYOUT[key])**2)
    assert run.train() == 0
    taken = run.optimizer.state[parameters["init_hx"]]["step"]
    assert taken > 0 and run.optimizer.state[parameters["fc_value.bias"]]["step"] == 28584 + taken
    card = (run.folder / "model_card.md").read_text()
    command = re.search(r"^    python train.py (.*)$", card, re.MULTILINE)[1]
    options = parse(train.TrainOptions, shlex.split(command))
    repeated = {**options.values, **vars(options.env_config())}
    given = {**dataclasses.asdict(settings), **dataclasses.asdict(settings.env),
             "agent_file": Path(path.name), "teacher_file": None}
    for name in repeated.keys() & given.keys() - {"num_threads"}:
        assert repeated[name] == given[name], name

    without = TrainingRun(tmp_path / "other", published(), FLOAT32)
    assert not without.optimizer.state


def test_an_optimiser_that_does_not_fit_is_refused(tmp_path):
    path = published_checkpoint(tmp_path / "model_1.pth")
    content = torch.load(path, weights_only=True)
    optimizer = content["optimizer_state_dict"]
    state = optimizer["state"]
    state[31], state[35] = state[35], state[31]
    settings = dataclasses.replace(
        _settings(SHORT_UPDATE, str(path), architecture="impala"), keep_optimizer=True)
    for saved, message in ((optimizer, "does not fit the tensor 'embedder.fc.bias'"),
                           ({}, "has no optimiser state for its 40 parameters")):
        torch.save({**content, "optimizer_state_dict": saved}, path)
        with pytest.raises(UserError, match=message):
            TrainingRun(tmp_path / "run", settings, FLOAT32)
    assert not (tmp_path / "run").exists()


def test_validation_plays_the_levels_outside_the_training_range(tmp_path):
    settings = dataclasses.replace(_settings(), env=EnvConfig("fruitbot", "easy", 5, 10))
    run = TrainingRun(tmp_path, settings, FLOAT32)
    assert run.collector.env.config.levels == range(5, 15)
    assert run.val_collector.env.config.levels.start == 15


def test_feed_forward_impala_and_clear_agents_train(tmp_path):
    for name, changes in (("ff", {"recurrent": False}), ("impala", {"architecture": "impala"}),
                          ("clear", {"architecture": "clear", "recurrent": False})):
        settings = _settings(num_timesteps=SHORT_UPDATE, **changes)
        run = TrainingRun(tmp_path / name, settings, FLOAT32)
        before = {k: v.clone() for k, v in run.policy.state_dict().items()}
        assert run.train() == 0
        after = run.policy.state_dict()
        assert all(not torch.equal(before[key], after[key]) for key in before)


def _settings(num_timesteps=4 * SHORT_UPDATE, model_file="", **changes):
    config = tiny_config(**{"n_steps": 16, **changes})
    return TrainSettings("t", "tiny", EnvConfig("fruitbot", "easy"), config, 0, num_timesteps, 1, 3,
                         model_file, "float32", 2)


def test_agent_files_hold_the_unit_of_the_values(tmp_path):
    """Files contain the factor of reward normalisation, or 1, and gamma and lambda."""
    run = TrainingRun(tmp_path / "scaled", _settings(gamma=0.98), FLOAT32)
    run.save()
    assert read_origin(agent_files(run.folder)[-1]).reward_scale is None  # no reward yet
    run.collector.normalizer(np.arange(8.0), np.zeros(8, bool))
    run.collector.normalizer(np.zeros(8), np.ones(8, bool))
    scale = 1 / np.sqrt(run.collector.normalizer.variance)
    run.save()
    assert read_origin(agent_files(run.folder)[-1]) == AgentOrigin(
        pytest.approx(scale), False, 0.98, 0.95, None, "fruitbot", "easy", 0, "end")
    resumed = TrainingRun(tmp_path / "scaled", run.settings, FLOAT32)
    assert resumed.collector.normalizer.scale == pytest.approx(scale)
    raw = TrainingRun(tmp_path / "raw", _settings(normalize_rew=False), FLOAT32)
    raw.save()
    assert read_origin(agent_files(raw.folder)[-1]).reward_scale == 1


def test_non_finite_loss_stops_with_the_last_good_files_kept(tmp_path):
    run = TrainingRun(tmp_path, _settings(), FLOAT32)
    run.save()
    [saved] = [path.read_bytes() for path in agent_files(tmp_path)]
    resume = (tmp_path / "resume.pth").read_bytes()
    with torch.no_grad():
        run.policy.fc_value.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="became nan after 0 time steps"):
        run.train()
    assert [path.read_bytes() for path in agent_files(tmp_path)] == [saved]
    assert (tmp_path / "resume.pth").read_bytes() == resume


def test_a_run_that_stops_where_an_older_agent_file_lies_is_saved(tmp_path):
    """A kill can leave the agent file of a step and the resume file of an earlier step."""
    run = TrainingRun(tmp_path, _settings(), FLOAT32)
    run.save()
    run._advance()
    stale = tmp_path / f"model_{SHORT_UPDATE}.pth"
    shutil.copy(tmp_path / "model_0.pth", stale)
    run.num_steps = SHORT_UPDATE
    assert run.train() == 0
    assert TrainingRun(tmp_path, _settings(), FLOAT32).steps == SHORT_UPDATE
    assert_same(dict(load_agent(stale).state_dict()), dict(run.policy.state_dict()))


def test_runs_of_one_name_have_folders_of_their_own(tmp_path):
    runs = [TrainingRun(tmp_path / "run", _settings(), FLOAT32) for _ in range(2)]
    with at_work_in(_made(tmp_path / "run_3")):
        runs.append(TrainingRun(tmp_path / "run", _settings(), FLOAT32))
    assert [run.folder.name for run in runs] == ["run", "run_2", "run_4"]


def _made(folder):
    folder.mkdir()
    return folder


def test_plots_are_drawn_from_the_log(undisturbed, capsys):
    with figures_drawn() as figures:
        assert plot_training_csv.main(["--datapath", str(undisturbed.parent)]) == 0
    printed = capsys.readouterr().out
    log = pd.read_csv(undisturbed / "log.csv")
    assert list(figures) == ["plot.png", "plot_for_fig.png"]
    everything, for_figure = figures["plot.png"].axes, figures["plot_for_fig.png"].axes
    last = f"at last: {log['mean_episode_rewards'].iloc[-1]:.2f} on training levels"
    assert all(last in figure.get_suptitle() for figure in figures.values())
    assert len(everything) == 8 and everything[0].get_title().startswith("return")
    assert [axes.get_title() for axes in everything].count("") == 0
    mean, low, high, unseen = everything[0].lines[:4]
    for line, column in ((mean, "mean"), (low, "min"), (high, "max"), (unseen, "val_mean"),
                         *zip(for_figure[0].lines, ("mean", "val_mean"))):
        np.testing.assert_array_equal(line.get_xdata(), log["timesteps"])
        np.testing.assert_array_equal(line.get_ydata(), log[f"{column}_episode_rewards"])
    assert colours_of([mean, unseen]) == colours_of(for_figure[0].lines) == [BLUE, VERMILION]
    assert all(str(undisturbed / name) in printed for name in figures)


def test_two_runs_are_drawn_beside_each_other(undisturbed, tmp_path):
    log = pd.read_csv(undisturbed / "log.csv")
    (tmp_path / "mine").mkdir()
    shutil.copy(undisturbed / "log.csv", tmp_path / "mine")
    (tmp_path / "other").mkdir()
    log.assign(mean_episode_rewards=log["mean_episode_rewards"] + 1).to_csv(
        tmp_path / "other" / "log.csv", index=False)
    flags = ["--datapath", str(tmp_path / "mine"), "--beside", str(tmp_path / "other")]
    with figures_drawn() as figures:
        assert plot_training_csv.main(flags) == 0
    [axes] = figures["plot_beside.png"].axes
    mine, other = axes.lines
    np.testing.assert_allclose(other.get_ydata() - mine.get_ydata(), 1)
    # At the start, the running mean covers only half a window.
    assert mine.get_ydata()[0] == pytest.approx(log["mean_episode_rewards"][:5].mean())
    assert [text.get_text() for text in axes.get_legend().texts] == ["mine", "other"]


@pytest.mark.slow
def test_ppo_learns(tmp_path):
    """After half a minute on one level, the return is far above that of the untrained agent."""
    env = EnvConfig("starpilot", "easy", start_level=0, num_levels=1)
    config = tiny_config(n_envs=32, n_steps=64, epoch=3)
    settings = TrainSettings("t", "tiny", env, config, 0, 24 * 32 * 64, 1, 1000, "", "float32", 2)
    run = TrainingRun(tmp_path, settings, FLOAT32)

    def play():
        levels = [(number, 0) for number in range(60)]
        return summarise(play_episodes(run.policy, FLOAT32, env, levels, 1, 60,
                                      PlayOptions(keep_frames=False)))

    untrained = play()
    run.train()
    trained = play()
    assert trained.return_interval[0] > untrained.return_interval[1] + 1
