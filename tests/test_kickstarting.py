"""Kickstarting: what the teacher sees, its part of the loss, and whole runs with a teacher."""

import dataclasses
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import (
    FLOAT32,
    assert_same,
    log_of,
    tiny_config,
    tiny_policy,
    train_arguments,
    trained_run,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from agents.acting import reset_hidden, run_policy
from agents.agent_file import load_agent, save_agent
from agents.kickstarting import Teacher, kickstart_losses, remaining_weight
from agents.networks import ImpalaEmbedder, NatureEmbedder, Policy
from agents.ppo import Collector, Rollout, ppo_losses, update
from agents.run_folder import TrainSettings
from agents.training import TrainingRun
from common.errors import UserError
from common.files import sha256
from envs.procgen_env import EnvConfig


def a_teacher(hidden: int | None = 48) -> Policy:
    """An untrained agent of another width than the student's, with strong opinions."""
    torch.manual_seed(7)
    policy = Policy(ImpalaEmbedder(40, (8, 16, 16)), hidden)
    with torch.no_grad():
        policy.fc_policy.weight *= 600
    return policy


@pytest.fixture(scope="module")
def teacher_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "model_99.pth"
    save_agent(path, a_teacher(), {})
    return path


def play(policy, n_steps=64, n_envs=8):
    worker = Collector(EnvConfig("fruitbot", "easy"), policy, FLOAT32, n_envs, 5, 2)
    rollout = Rollout(n_steps, n_envs, (64, 64, 3), policy.hidden_state_size, FLOAT32.device)
    worker.play(40)  # so that episodes end in the middle
    return worker, rollout


@pytest.mark.parametrize("kind", ["wide memory", "no memory", "nature"])
def test_teacher_follows_the_student_with_a_memory_of_its_own(kind):
    """Two rollouts, against the teacher run by itself one step after the other."""
    policy = {"wide memory": lambda: a_teacher(), "no memory": lambda: a_teacher(None),
              "nature": lambda: Policy(NatureEmbedder(128), 24)}[kind]()
    worker, rollout = play(tiny_policy())
    teacher = Teacher(policy, 8, FLOAT32)
    hidden, starts = policy.initial_states(8), 0
    for _ in range(2):
        worker.play(64, rollout)
        guidance = teacher.follow(rollout.frames, rollout.masks, tiny_config(), 0.0)
        for t in range(64):
            first = rollout.masks[t] == 0
            starts += int(first.sum())
            output = run_policy(policy, FLOAT32, rollout.frames[t],
                                reset_hidden(policy, hidden, first))
            hidden = output.hidden_states
            torch.testing.assert_close(guidance.log_probs[t], output.log_probs, atol=1e-4, rtol=0)
            torch.testing.assert_close(guidance.values[t], output.values, atol=1e-4, rtol=1e-4)
    assert starts > 3


def test_with_the_student_as_its_own_teacher_the_loss_is_the_entropy_and_its_gradient_zero():
    policy = tiny_policy()
    worker, rollout = play(policy)
    rollout.masks[0] = 0  # both begin with the first state of an episode
    worker.hidden = policy.initial_states(8)
    worker.play(64, rollout)
    guidance = Teacher(load_from(policy), 8, FLOAT32).follow(
        rollout.frames, rollout.masks, tiny_config(kickstart_coef=2.0), 0.0)
    embeddings = policy.embed(rollout.frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255)
    output = policy.sequence(embeddings.unflatten(0, (64, 8)), rollout.hidden, rollout.masks)
    losses = kickstart_losses(output, guidance.log_probs, guidance.values)
    entropy = -(output.log_probs.exp() * output.log_probs).sum(-1).mean()
    assert losses["distillation_loss"].item() == pytest.approx(entropy.item(), rel=1e-5)
    assert abs(losses["teacher_kl"].item()) < 1e-6 and losses["value_distance"].item() < 1e-8
    gradients = torch.autograd.grad(
        guidance.policy_weight * losses["distillation_loss"], list(policy.parameters()),
        retain_graph=True, allow_unused=True)
    scale = torch.autograd.grad(entropy, policy.fc_policy.weight)[0].norm()
    assert max(g.norm() for g in gradients if g is not None) < 1e-3 * scale


def load_from(policy: Policy) -> Policy:
    """A copy of a policy."""
    twin = tiny_policy(seed=1)
    twin.load_state_dict(policy.state_dict())
    return twin


def test_update_steps_down_the_weighted_sum_of_both_losses():
    config = tiny_config(recurrent=False, mini_batch_per_epoch=1, normalize_adv=False,
                         grad_clip_norm=1e9, kickstart_coef=4.0, kickstart_until=0.5,
                         kickstart_value_coef=0.6)
    policy = tiny_policy(recurrent=False)
    worker, rollout = play(policy)
    worker.play(64, rollout)
    guidance = Teacher(a_teacher(), 8, FLOAT32).follow(rollout.frames, rollout.masks, config, 0.125)
    images = rollout.frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255
    output = policy(images, torch.zeros(512, 0), torch.ones(512))
    expected_distillation = -(guidance.log_probs.flatten(0, 1).exp() * output.log_probs).sum(1)
    distance = 0.5 * (output.values - guidance.values.flatten()) ** 2
    extra = torch.autograd.grad(3.0 * expected_distillation.mean() + 0.45 * distance.mean(),
                                list(policy.parameters()))
    steps = []
    for given in (guidance, None):
        twin = tiny_policy(recurrent=False)
        summary = update(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rollout, config,
                         FLOAT32, torch.Generator().manual_seed(0), given)
        steps.append([a.detach() - b.detach()
                      for a, b in zip(twin.parameters(), policy.parameters())])
        if given is not None:
            assert summary.distillation_loss == pytest.approx(
                expected_distillation.mean().item(), rel=1e-5)
            teacher = torch.distributions.Categorical(logits=guidance.log_probs.flatten(0, 1))
            student = torch.distributions.Categorical(logits=output.logits)
            kl = torch.distributions.kl_divergence(teacher, student).mean().item()
            assert summary.teacher_kl == pytest.approx(kl, rel=1e-4) and kl > 0.1
        else:
            assert np.isnan(summary.teacher_kl)
    for taught, alone, gradient in zip(*steps, extra):
        torch.testing.assert_close(taught - alone, -0.1 * gradient, atol=2e-5, rtol=1e-3)


def test_weights_fall_linearly_to_zero():
    config = tiny_config(kickstart_until=0.4)
    assert [remaining_weight(config, x) for x in (0, 0.1, 0.2, 0.4, 0.7)] == pytest.approx(
        [1, 0.75, 0.5, 0, 0])
    assert remaining_weight(tiny_config(kickstart_until=0.0), 0.0) == 0


def test_diagnostics_of_an_update_are_the_specified_ones():
    policy = tiny_policy(recurrent=False)
    torch.manual_seed(0)
    output = policy(torch.rand(30, 3, 64, 64), torch.zeros(30, 0), torch.ones(30))
    actions = torch.randint(0, 15, (30,))
    taken = output.log_probs.gather(1, actions.unsqueeze(1)).squeeze(1).detach()
    old = taken + torch.linspace(-0.5, 0.5, 30)
    losses = ppo_losses(output, actions, old, output.values.detach(), torch.ones(30),
                        torch.zeros(30), 0.2)
    ratio = torch.exp(taken - old)
    assert losses["clip_fraction"].item() == pytest.approx(
        ((ratio - 1).abs() > 0.2).float().mean().item())
    assert losses["approx_kl"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item(),
                                                    rel=1e-4)


def settings_for(teacher_file, updates, **changes):
    config = tiny_config(**{"kickstart_coef": 2.0, "kickstart_until": 1.0, "n_steps": 16,
                            **changes})
    return TrainSettings("t", "tiny", EnvConfig("fruitbot", "easy"), config, 0,
                         updates * config.n_envs * config.n_steps, 1, 3, "", "float32", 2,
                         str(teacher_file), sha256(teacher_file) if teacher_file else "")


def test_coefficient_of_zero_gives_the_numbers_of_a_run_without_teacher(teacher_file, tmp_path):
    measured = TrainingRun(tmp_path / "zero", settings_for(teacher_file, 3, kickstart_coef=0.0),
                           FLOAT32)
    alone = TrainingRun(tmp_path / "alone", settings_for("", 3), FLOAT32)
    assert measured.train() == alone.train() == 0
    assert_same(dict(measured.policy.state_dict()), dict(alone.policy.state_dict()))
    pd.testing.assert_frame_equal(log_of(tmp_path / "zero"), log_of(tmp_path / "alone"),
                                  check_exact=True)
    assert figures_of(tmp_path / "zero", "teacher_kl") and not any(
        figures_of(tmp_path / "alone", "teacher_kl"))


def figures_of(folder, name):
    events = EventAccumulator(str(folder)).Reload()
    return [event.value for event in events.Scalars(name)] if (
        name in events.Tags()["scalars"]) else []


@pytest.mark.slow
def test_student_comes_to_agree_with_its_teacher(teacher_file, tmp_path):
    """Share of frames with the same likeliest action, in environments neither was trained on: with
    a teacher it rises by more than five standard errors over environments, without it does not."""
    changes = {"learning_rate": 1e-3, "epoch": 4, "entropy_coef": 0.0, "n_steps": 64}
    taught = TrainingRun(tmp_path / "taught", settings_for(teacher_file, 8, **changes), FLOAT32)
    alone = TrainingRun(tmp_path / "alone", settings_for("", 8, **changes), FLOAT32)
    before = agreement(taught.policy, teacher_file)
    assert taught.train() == alone.train() == 0
    gain = agreement(taught.policy, teacher_file) - before
    error = gain.std(ddof=1) / len(gain) ** 0.5
    assert gain.mean() > max(5 * error, 0.2)
    assert (agreement(alone.policy, teacher_file) - before).mean() < gain.mean() / 2
    kl = figures_of(tmp_path / "taught", "teacher_kl")
    assert len(kl) == 8 and kl[-1] < 0.7 * kl[0]


def agreement(policy, teacher_file) -> np.ndarray:
    """By environment (16,), on frames that random actions lead to."""
    driver = tiny_policy(seed=3)
    worker, rollout = play(driver, 64, 16)
    worker.play(64, rollout)
    outputs = [Teacher(each, 16, FLOAT32).follow(rollout.frames, rollout.masks, tiny_config(), 0)
               for each in (load_from(policy), load_agent(teacher_file))]
    chosen = [output.log_probs.argmax(-1) for output in outputs]
    return (chosen[0] == chosen[1]).float().mean(0).numpy()


def arguments(logdir, teacher_file, num_updates=8):
    return train_arguments(logdir, num_updates, "--teacher_file", str(teacher_file))


@pytest.fixture(scope="module")
def undisturbed(teacher_file, tmp_path_factory):
    logdir = tmp_path_factory.mktemp("undisturbed")
    assert train.main(arguments(logdir, teacher_file)) == 0
    return trained_run(logdir)


def test_a_run_resumes_with_the_memory_of_its_teacher(teacher_file, tmp_path):
    """Exactly, and without that memory it would end elsewhere."""
    settings = dataclasses.replace(settings_for(teacher_file, 4), seed=4)
    run = TrainingRun(tmp_path / "a", settings, FLOAT32)
    run._one_update()
    run.save()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    state = torch.load(tmp_path / "b" / "resume.pth", weights_only=True)
    assert state["teacher_hidden"].abs().max() > 0.01
    state["teacher_hidden"] = torch.zeros_like(state["teacher_hidden"])
    torch.save(state, tmp_path / "b" / "resume.pth")
    runs = [run, *(TrainingRun(tmp_path / name, settings, FLOAT32) for name in "ab")]
    for each in runs:
        each._one_update()
    whole, resumed, without = (each.policy.fc_policy.weight for each in runs)
    assert torch.equal(resumed, whole) and not torch.equal(without, whole)


def test_run_says_how_it_was_kickstarted(undisturbed, teacher_file):
    card = (undisturbed / "model_card.md").read_text()
    assert sha256(teacher_file) in card and "`model_99.pth`" in card
    assert "first 70 % of the run" in card and "from 3 to 0" in card
    settings = yaml.safe_load((undisturbed / "hyperparameters.yml").read_text())
    assert settings["teacher_sha256"] == sha256(teacher_file)
    assert [round(x, 4) for x in figures_of(undisturbed, "kickstart_coef")] == pytest.approx(
        [3 * (1 - k / 5.6) for k in range(6)], abs=1e-3)
    assert len(figures_of(undisturbed, "distillation_loss")) == 6
    for name in ("approx_kl", "clip_fraction", "explained_variance", "grad_norm", "learning_rate"):
        assert len(figures_of(undisturbed, name)) == 8, name


def test_progress_line_has_the_distances_to_the_teacher(teacher_file, tmp_path, capsys):
    assert train.main(arguments(tmp_path, teacher_file, 1)) == 0
    assert re.search(r"distillation loss \d\.\d{3}, KL to the teacher \d\.\d{3}",
                     capsys.readouterr().err)


def test_run_without_a_teacher_says_so(tmp_path):
    run = TrainingRun(tmp_path, settings_for("", 1), FLOAT32)
    run.save()
    assert "from random weights, without a teacher" in (tmp_path / "model_card.md").read_text()


def other_actions(content):
    weights = content["model_state_dict"]
    weights["fc_policy.weight"], weights["fc_policy.bias"] = torch.zeros(7, 48), torch.zeros(7)


def other_frames(content):
    content["model_state_dict"]["embedder.fc.weight"] = torch.zeros(40, 16 * 10 * 10)


@pytest.mark.parametrize("change, message", [
    (other_actions, "has 7 actions; Procgen's games have 15"),
    (other_frames, "for frames of another size than 64 x 64"),
    (None, "there is no agent file")])
def test_a_teacher_that_cannot_teach_is_refused(change, message, teacher_file, tmp_path, capsys):
    if change is not None:
        content = torch.load(teacher_file, weights_only=True)
        change(content)
        torch.save(content, tmp_path / "model_1.pth")
    assert train.main(arguments(tmp_path, tmp_path / "model_1.pth")) == 2
    assert message in one_line(capsys)
    assert not list(tmp_path.glob("procgen/**/*"))


def one_line(capsys) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_resumed_run_wants_the_same_teacher_until_its_say_has_ended(teacher_file, tmp_path,
                                                                    capsys):
    own = shutil.copy(teacher_file, tmp_path / "model_5.pth")
    settings = settings_for(own, 2, kickstart_until=0.5)
    run = TrainingRun(tmp_path / "run", settings, FLOAT32)
    run.save()
    own.write_bytes(teacher_file.read_bytes()[:5000])
    assert train.main(["--resume", str(tmp_path / "run")]) == 2
    assert "truncated or not a torch file" in one_line(capsys)
    save_agent(own, a_teacher(32), {})
    assert train.main(["--resume", str(tmp_path / "run")]) == 2
    assert "not the file that this run began with" in one_line(capsys)
    own.unlink()
    assert train.main(["--resume", str(tmp_path / "run")]) == 2
    assert "there is no agent file" in one_line(capsys)
    shutil.copy(teacher_file, own)
    run._one_update()
    run.save()
    own.unlink()  # half of the run is over, and the teacher's weight is 0
    assert train.main(["--resume", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("changes, message", [
    ({"kickstart_coef": -1.0}, "kickstart_coef must not be negative"),
    ({"kickstart_value_coef": float("nan")}, "kickstart_value_coef must not be negative"),
    ({"kickstart_until": 1.5}, "kickstart_until must lie between 0 and 1"),
    ({"kickstart_until": -0.1}, "kickstart_until must lie between 0 and 1")])
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
