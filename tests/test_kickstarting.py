"""Kickstarting: inputs of the teacher, its term of the loss, and whole runs with a teacher."""

import dataclasses
import re
import shutil

import pytest
import torch
from conftest import FLOAT32, refusal, tiny_config, tiny_policy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from agents.acting import reset_hidden, run_policy
from agents.agent_file import save_agent
from agents.kickstarting import Teacher, remaining_weight
from agents.networks import ImpalaEmbedder, Policy
from agents.ppo import Collector, Rollout, ppo_losses, update
from agents.run_folder import TrainSettings
from agents.training import TrainingRun
from common.cli import set_up_logging
from common.files import sha256
from envs.procgen_env import EnvConfig


def a_teacher(hidden: int | None = 48) -> Policy:
    """Return an untrained agent with a peaked policy and another width than the student."""
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
    worker.play(40)  # so that episodes end during the rollout
    return worker, rollout


@pytest.mark.parametrize("kind", ["wide memory", "no memory"])
def test_teacher_follows_the_student_with_a_memory_of_its_own(kind):
    """Compare two rollouts with the teacher run separately, step by step."""
    policy = a_teacher(48 if kind == "wide memory" else None)
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


def test_update_steps_down_the_weighted_sum_of_both_losses():
    config = tiny_config(recurrent=False, mini_batch_per_epoch=1, normalize_adv=False,
                         grad_clip_norm=1e9, kickstart_coef=4.0, kickstart_until=0.5,
                         kickstart_value_coef=0.6)
    policy = tiny_policy(recurrent=False, architecture="nature")
    worker, rollout = play(policy, n_steps=32)
    worker.play(32, rollout)
    guidance = Teacher(a_teacher(), 8, FLOAT32).follow(rollout.frames, rollout.masks, config, 0.125)
    images = rollout.frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255
    output = policy(images, torch.zeros(256, 0), torch.ones(256))
    expected_distillation = -(guidance.log_probs.flatten(0, 1).exp() * output.log_probs).sum(1)
    distance = 0.5 * (output.values - guidance.values.flatten()) ** 2
    extra = torch.autograd.grad(3.0 * expected_distillation.mean() + 0.45 * distance.mean(),
                                list(policy.parameters()))
    steps = []
    for given in (guidance, None):
        twin = tiny_policy(recurrent=False, architecture="nature")
        summary = update(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rollout, config,
                         FLOAT32, torch.Generator().manual_seed(0), given)
        steps.append([a.detach() - b.detach()
                      for a, b in zip(twin.parameters(), policy.parameters())])
        if given is not None:
            assert summary["distillation_loss"] == pytest.approx(
                expected_distillation.mean().item(), rel=1e-5)
            teacher = torch.distributions.Categorical(logits=guidance.log_probs.flatten(0, 1))
            student = torch.distributions.Categorical(logits=output.logits)
            kl = torch.distributions.kl_divergence(teacher, student).mean().item()
            assert summary["teacher_kl"] == pytest.approx(kl, rel=1e-4) and kl > 0.1
        else:
            assert "teacher_kl" not in summary
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


def figures_of(folder, name):
    events = EventAccumulator(str(folder)).Reload()
    return [event.value for event in events.Scalars(name)] if (
        name in events.Tags()["scalars"]) else []


def test_a_run_resumes_with_the_memory_of_its_teacher(teacher_file, tmp_path):
    """The resumed run is exact; without the memory, its weights would differ."""
    settings = dataclasses.replace(settings_for(teacher_file, 4), seed=4)
    run = TrainingRun(tmp_path / "a", settings, FLOAT32)
    run._advance()
    run.save()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    state = torch.load(tmp_path / "b" / "resume.pth", weights_only=True)
    assert state["teacher_hidden"].abs().max() > 0.01
    state["teacher_hidden"] = torch.zeros_like(state["teacher_hidden"])
    torch.save(state, tmp_path / "b" / "resume.pth")
    runs = [run, *(TrainingRun(tmp_path / name, settings, FLOAT32) for name in "ab")]
    for each in runs:
        each._advance()
    whole, resumed, without = (each.policy.fc_policy.weight for each in runs)
    assert torch.equal(resumed, whole) and not torch.equal(without, whole)


def test_run_says_how_it_was_kickstarted(teacher_file, tmp_path, capsys):
    set_up_logging("info")
    settings = settings_for(teacher_file, 4, kickstart_coef=3.0, kickstart_until=0.7)
    assert TrainingRun(tmp_path, settings, FLOAT32).train() == 0
    card = (tmp_path / "model_card.md").read_text()
    assert sha256(teacher_file) in card and "`model_99.pth`" in card
    assert "first 70 % of the run" in card and "from 3 to 0" in card
    assert figures_of(tmp_path, "kickstart_coef") == pytest.approx(
        [3 * (1 - k / 2.8) for k in range(3)])
    assert len(figures_of(tmp_path, "distillation_loss")) == 3
    for name in ("approx_kl", "clip_fraction", "explained_variance", "grad_norm", "learning_rate"):
        assert len(figures_of(tmp_path, name)) == 4, name
    assert re.search(r"distillation loss \d\.\d{3}, KL to the teacher \d\.\d{3}",
                     capsys.readouterr().err)


def test_resumed_run_wants_the_same_teacher_until_its_say_has_ended(teacher_file, tmp_path, capsys):
    own = shutil.copy(teacher_file, tmp_path / "model_5.pth")
    settings = settings_for(own, 2, kickstart_until=0.5)
    run = TrainingRun(tmp_path / "run", settings, FLOAT32)
    run.save()
    save_agent(own, a_teacher(32), {})
    assert "not the file that this run started with" in refusal(
        train.main, ["--resume", tmp_path / "run"], capsys)
    shutil.copy(teacher_file, own)
    run._advance()
    run.save()
    own.unlink()  # half of the run is over, and the teacher's weight is 0
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
