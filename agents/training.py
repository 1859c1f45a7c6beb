"""Training runs: collect, validate, update, log, save, stop and resume. The algorithm is in
``agents.ppo``.

A run is a pure function of its settings: on a CPU, stopping it anywhere and resuming it gives
the same weights and, except for wall times, the same log as an uninterrupted run. Several processes
(``common.distributed``) share the environments, and reproduce a run of a single process up to
rounding of sums.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.agent_file import (
    ADAM_EPS,
    AgentOrigin,
    agent_file_name,
    load_agent,
    load_optimizer_state,
    load_weights,
    save_agent,
)
from agents.kickstarting import Teacher
from agents.networks import build_policy
from agents.ppo import Collector, Rollout, update
from agents.run_folder import COLUMNS, LOG_NAME, TrainSettings, episode_figures, save_model_card
from common.devices import Compute
from common.distributed import SINGLE, Distributed
from common.errors import NonFiniteLoss, UserError
from common.files import load_tensors, save_tensors, sha256
from common.training import SECONDS_BETWEEN_SAVES, Run, restoring
from envs.coin import END
from envs.procgen_env import LevelEdit
from envs.rewards import EpisodeStatistics

RESUME_NAME = "resume.pth"
# Metrics of an update in log.csv, whose columns are fixed; TensorBoard also shows the others.
LOGGED = {"policy_loss": "policy_loss", "value_loss": "value_loss", "entropy": "entropy_loss"}


class TrainingRun(Run):
    """Training run in a folder.

    Args:
        folder: the run's folder. If it holds a resumable run, that run is resumed; otherwise a new
            run starts. If the folder belongs to another run, a number is appended to the name of
            the new run's folder. The attribute ``folder`` is the folder in use.
        settings: settings of the run. In a resumed run, a larger ``num_timesteps`` stretches the
            remaining learning-rate schedule.
        edit, val_edit: edits of new levels in training and in validation, which place the goal;
            each is given if, and only if, the settings have a region of the cheese or a place of
            the coin.
        world: the group of training processes; each creates a ``TrainingRun`` for the same folder.

    Raises:
        FolderInUse: if another process uses the folder of the run to resume.
        UserError: if a file to start from cannot be used, or the processes cannot share the
            environments evenly.
        ValueError: if a level edit is missing, or given without a place of the goal.
    """

    work = "update"

    def __init__(self, folder: Path, settings: TrainSettings, compute: Compute,
                 edit: LevelEdit | None = None, val_edit: LevelEdit | None = None,
                 world: Distributed = SINGLE):
        for size, level_edit in ((settings.cheese_region, edit),
                                 (settings.val_cheese_region, val_edit)):
            if (bool(size) or settings.coin != END) != (level_edit is not None):
                raise ValueError("a level edit must be given if, and only if, the settings have "
                                 "a cheese region or a place of the coin")
        agent = settings.agent
        if agent.n_envs % world.world_size:
            raise UserError(f"{world.world_size} processes cannot share the {agent.n_envs} "
                            f"environments of the parameter set '{settings.param_name}' evenly; "
                            f"start a number of processes that divides {agent.n_envs}")
        resume = folder / RESUME_NAME
        super().__init__(folder, compute, world, resume.exists())
        self.settings, self.num_steps, self.updates = settings, settings.num_timesteps, 0
        if world.is_distributed:
            self._seconds_between_saves = 0
        random.seed(settings.seed)
        np.random.seed(settings.seed % 2**32)
        torch.manual_seed(settings.seed)
        self.policy = build_policy(agent.architecture, agent.hidden_state_size, agent.recurrent,
                                   agent.learned_initial_state, agent.width)
        state = None
        if world.broadcast(resume.exists()):
            state = self._on_device(load_tensors(resume, "resume file"))
        source = Path(settings.model_file) if settings.model_file and state is None else None
        if source is not None:
            start = load_agent(source)
            if start.edits:
                raise UserError(f"{source} is an edited agent, and training does not support "
                                "edits; start from the agent that was edited")
            load_weights(self.policy, start.state_dict(), source)
        compute.place(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=agent.learning_rate,
                                          eps=ADAM_EPS)
        if source is not None and settings.keep_optimizer:
            self.optimizer.load_state_dict({
                **self.optimizer.state_dict(),
                "state": load_optimizer_state(source, self.policy)})
        # Independent random streams for minibatches, and for levels and actions of each collector.
        minibatch_seed, train_seed, val_seed = map(
            int, np.random.SeedSequence(settings.seed).generate_state(3))
        self.minibatch_generator = torch.Generator().manual_seed(minibatch_seed)
        self.collector, self.val_collector = (
            Collector(env, self.policy, compute, agent.n_envs, seed, settings.num_threads,
                      level_edit, world)
            for env, seed, level_edit in ((settings.env, train_seed, edit),
                                          (settings.env.unseen_levels(), val_seed, val_edit)))
        if state is not None:
            with restoring(resume):
                self._load_state_dict(state)
                self._resume(state["timesteps"], state["wall_time"], state.get("ranks", 1), resume)
        self.teacher = self._open_teacher(state)
        self.rollout = Rollout(agent.n_steps, len(self.collector.hidden),
                               self.collector.observation.frames.shape[1:],
                               self.policy.hidden_state_size, compute.device)
        self._open(settings, LOG_NAME, COLUMNS)
        if self.updates and self._is_checkpoint and not self._is_saved:
            self.save()  # the last session ended before it wrote the agent file

    def _open_teacher(self, state: dict | None) -> Teacher | None:
        """Return the teacher; None without a teacher, or if its losses have weight 0 from now on.

        Args:
            state: contents of the resume file; None for a new run.

        Raises:
            UserError: if the file is missing, not an agent file, or has changed during the run.
        """
        settings = self.settings
        if not settings.teacher_file or not self._is_kickstarted:
            return None
        path = Path(settings.teacher_file)
        policy = load_agent(path)
        if sha256(path) != settings.teacher_sha256:
            raise UserError(f"the teacher {path} is not the file that this run started with: its "
                            "checksum differs")
        teacher = Teacher(policy, len(self.collector.hidden), self.compute)
        if state is not None and "teacher_hidden" in state:
            teacher.hidden = state["teacher_hidden"][self.collector.own]
        return teacher

    @property
    def _is_kickstarted(self) -> bool:
        """Whether the update that begins now uses the run's teacher."""
        return self.steps < self.settings.agent.kickstart_until * self.num_steps

    def state_dict(self) -> dict:
        """Return the state from which the run can be resumed; complete on rank 0 only."""
        optional: dict = {"ranks": self.world.world_size} if self.world.is_distributed else {}
        if self.teacher is not None:
            optional["teacher_hidden"] = self.world.gather(self.teacher.hidden.cpu(),
                                                           self.settings.agent.n_envs)
        val = _collector_state(self.val_collector)
        del val["normalizer"]  # validation does not normalise rewards
        return {**optional,
                "model_state_dict": self.policy.state_dict(),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "timesteps": self.steps, "updates": self.updates,
                "wall_time": self.wall_time,
                "minibatch_generator": self.minibatch_generator.get_state(),
                "train": _collector_state(self.collector), "val": val}

    def _load_state_dict(self, state: dict) -> None:
        self.policy.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.updates = state["updates"]
        self.minibatch_generator.set_state(state["minibatch_generator"])
        _load_collector(self.collector, state["train"])
        _load_collector(self.val_collector, state["val"])

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second in this session."""
        return (self.steps - self._session_steps) / max(
            time.monotonic() - self._session_start, 1e-9)

    def _advance(self) -> str:
        """Collect a rollout, validate if due, update the policy, and return a progress message."""
        settings, agent = self.settings, self.settings.agent
        progress = self.steps / self.num_steps
        learning_rate = agent.learning_rate * max(0.0, 1 - progress)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

        self.collector.play(agent.n_steps, self.rollout, agent.normalize_rew)
        if self.updates % settings.val_interval == 0:
            self.val_collector.play(agent.n_steps)
        guidance = None
        if self.teacher is not None and self._is_kickstarted:
            guidance = self.teacher.follow(self.rollout.frames, self.rollout.masks, agent, progress)
        metrics = update(self.policy, self.optimizer, self.rollout, agent, self.compute,
                         self.minibatch_generator, guidance, self.world)
        for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
            if not math.isfinite(metrics[name]):
                raise NonFiniteLoss(
                    f"the {name} became {metrics[name]} after {self.steps} time steps; "
                    f"training stopped, and the last checkpoint in {self.folder} was kept")
        self.steps += agent.n_envs * agent.n_steps
        self.updates += 1
        metrics["learning_rate"] = learning_rate
        if guidance is not None:
            metrics["kickstart_coef"] = guidance.policy_weight
        return self._log(metrics)

    def _log(self, metrics: dict[str, float]) -> str:
        """Append a row to the log, and return a message for the progress bar."""
        values = self.world.gather(self.rollout.values[:-1], self.settings.agent.n_envs, dim=1)
        train, val = self.collector.statistics, self.val_collector.statistics
        row = {"timesteps": self.steps, "wall_time": self.wall_time,
               "num_episodes": train.num_episodes, "num_episodes_val": val.num_episodes,
               "mean_episode_value": float(values.mean()),
               **{f"mean_{column}": metrics.pop(name) for name, column in LOGGED.items()},
               **episode_figures(train), **episode_figures(val, "val_")}
        self._append({name: row[name] for name in COLUMNS}, metrics)
        parts = [_recent_mean("return", row["mean_episode_rewards"], train),
                 _recent_mean("on unseen levels", row["val_mean_episode_rewards"], val)]
        if "teacher_kl" in metrics:
            parts.append(f"distillation loss {metrics['distillation_loss']:.3f}, "
                         f"KL to the teacher {metrics['teacher_kl']:.3f}")
        return ", ".join(parts)

    def save(self) -> None:
        """Write the resume file, an agent file and the model card.

        The order matters: a run resumes from the resume file and then writes a missing agent file.
        """
        self._save_state()
        if self.world.is_main:
            agent, env = self.settings.agent, self.settings.env
            save_agent(self._agent_file, self.policy, self.optimizer.state_dict(), AgentOrigin(
                self.collector.normalizer.scale if agent.normalize_rew else 1.0,
                env.use_backgrounds, agent.gamma, agent.lmbda, env_name=env.env_name,
                distribution_mode=env.distribution_mode,
                cheese_region=self.settings.cheese_region, coin=self.settings.coin))
            save_model_card(self.folder, self.settings, self.steps, self.wall_time)

    def _write_state(self) -> None:
        """Write the resume file.

        torchrun kills processes that keep running for long after a stop signal. Distributed runs
        therefore spend up to 1 % of their time on saving: if updates are long, they save after
        every update.
        """
        start = time.monotonic()
        state = self.state_dict()
        if self.world.is_main:
            save_tensors(self.folder / RESUME_NAME, state)
        if self.world.is_distributed:
            self._seconds_between_saves = min(SECONDS_BETWEEN_SAVES,
                                              100 * (time.monotonic() - start))

    @property
    def _agent_file(self) -> Path:
        return self.folder / agent_file_name(self.steps)

    @property
    def _is_saved(self) -> bool:
        return self.world.broadcast(super()._is_saved and self._agent_file.exists())

    @property
    def _is_checkpoint(self) -> bool:
        """Whether the last update passed a time step at which an agent file is due."""
        settings = self.settings
        before = self.steps - settings.agent.n_envs * settings.agent.n_steps
        return (before * settings.num_checkpoints // self.num_steps
                < self.steps * settings.num_checkpoints // self.num_steps)


def _recent_mean(name: str, mean: float, statistics: EpisodeStatistics) -> str:
    """Format a mean over the last episodes, with their number while the window is not full."""
    number = len(statistics.recent_returns)
    return f"{name} {mean:.2f}" + (f" ({number} episodes)" if number < statistics.WINDOW else "")


def _collector_state(collector: Collector) -> dict:
    """Return a collector's state, gathered from all processes; complete on rank 0 only."""
    states = collector.world.gather_list(collector.env.get_state())
    return {"env": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states],
            "generator": collector.generator.get_state(),
            "hidden": collector.world.gather(collector.hidden.cpu(), collector.num_envs),
            "statistics": collector.statistics.state_dict(),
            "normalizer": collector.normalizer.state_dict()}


def _load_collector(collector: Collector, state: dict) -> None:
    collector.env.set_state(_to_bytes(state["env"][collector.own]))
    collector.generator.set_state(state["generator"])
    collector.hidden = state["hidden"][collector.own]
    collector.statistics.load_state_dict(state["statistics"])
    if "normalizer" in state:
        collector.normalizer.load_state_dict(state["normalizer"])
    collector.observation = collector.env.observe()


def _to_bytes(states: list[Tensor]) -> list[bytes]:
    return [state.numpy().tobytes() for state in states]
