"""A whole training run: collect, validate, update, log, save, stop, resume.

A run is a pure function of its settings: on a CPU, stopping it anywhere and resuming it gives
the same weights and the same log as leaving it alone. On several processes
(``common.distributed``), which share the environments, it gives those of one process, up to the
rounding of sums.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.acting import draw_actions, reset_hidden, run_policy
from agents.agent_file import (
    ADAM_EPS,
    AgentOrigin,
    agent_file_name,
    load_agent,
    load_optimizer_state,
    load_weights,
    save_agent,
)
from agents.config import AgentConfig
from agents.kickstarting import Teacher
from agents.model_card import save_model_card
from agents.networks import Policy, PolicyOutput, build_policy
from agents.ppo import Rollout, UpdateSummary, update
from agents.training_log import COLUMNS, LOG_NAME, LogRow, episode_figures
from common.config import check_seed
from common.devices import Compute
from common.distributed import SINGLE, Distributed
from common.errors import NonFiniteLoss, UserError
from common.files import load_tensors, save_tensors, sha256
from common.locks import FolderLock, claim_folder
from common.metrics_log import MetricsLog
from common.progress import Progress
from common.saved_state import check_generator, check_like, check_optimizer
from common.settings import SETTINGS_NAME, save_settings
from common.signals import deferred_signals
from envs.procgen_env import (
    EnvConfig,
    EpisodeStatistics,
    LevelEdit,
    ProcgenVectorEnv,
    RewardNormalizer,
)

RESUME_NAME = "resume.pth"
SECONDS_BETWEEN_SAVES = 600
# Figures of an update for TensorBoard alone: the columns of log.csv are fixed.
DIAGNOSTICS = ("approx_kl", "clip_fraction", "explained_variance", "grad_norm",
               "distillation_loss", "teacher_kl")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything that decides a run's numbers, and a little that decides only its speed.

    Attributes:
        env: game and training levels; validation uses the levels outside.
        agent: the parameter set, named ``param_name`` in the YAML.
        seed: of the weights, the levels drawn, the actions and the minibatches.
        num_timesteps: environment steps of the whole run; the learning rate reaches 0 there.
        num_checkpoints: agent files kept, evenly spaced.
        val_interval: updates between two validation rollouts.
        model_file: agent file whose weights the run starts from, or "".
        teacher_file: agent file of a teacher (kickstarting), or "".
        teacher_sha256: checksum of that file, or "".
        keep_optimizer: whether the run starts from the optimiser's state in ``model_file`` too.
        precision: float32 or bfloat16.
        num_threads: threads that step the environments; does not change the numbers.
        cheese_region, val_cheese_region: size of the region that the cheese of training and of
            validation is put into, 0 for anywhere; for maze alone.
    """

    exp_name: str
    param_name: str
    env: EnvConfig
    agent: AgentConfig
    seed: int
    num_timesteps: int
    num_checkpoints: int
    val_interval: int
    model_file: str
    precision: str
    num_threads: int
    teacher_file: str = ""
    teacher_sha256: str = ""
    keep_optimizer: bool = False
    cheese_region: int = 0
    val_cheese_region: int = 0

    def __post_init__(self):
        for name in ("num_timesteps", "num_checkpoints", "val_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.keep_optimizer and not self.model_file:
            raise UserError("--keep_optimizer needs a --model_file with the optimiser's state")
        check_seed(self.seed)


class Worker:
    """Environments, with the agent's hidden state in each of them.

    Args:
        num_envs: N of all processes, among whom they are divided; those of this one are M.
        seed: of the levels and actions of all N, which do not depend on the number of processes.
        edit: of new levels.
    """

    def __init__(self, env_config: EnvConfig, policy: Policy, compute: Compute, num_envs: int,
                 seed: int, num_threads: int, edit: LevelEdit | None = None,
                 world: Distributed = SINGLE):
        self.policy = policy
        self.compute = compute
        self.world = world
        self.num_envs = num_envs
        self.own = world.local_slice(num_envs)
        own_envs = self.own.stop - self.own.start
        self.env = ProcgenVectorEnv(env_config, own_envs, seed, num_threads, edit)
        if world.is_distributed:
            self.env.set_state(_new_states(env_config, num_envs, seed, num_threads)[self.own])
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same on any device
        self.hidden = policy.initial_states(own_envs)  # (M, D)
        self.statistics = EpisodeStatistics(num_envs)
        self.normalizer = RewardNormalizer(num_envs)
        self.observation = self.env.observe()

    def play(self, n_steps: int, rollout: Rollout | None = None, normalize: bool = False) -> None:
        """Take ``n_steps`` steps in every environment, storing them in ``rollout`` if given."""
        if rollout is not None:
            rollout.hidden.copy_(self.hidden)
        earned = torch.zeros(2, n_steps, len(self.hidden))  # rewards, and 1 where an episode ended
        for t in range(n_steps):
            frames, first, output = self._run()
            self.hidden = output.hidden_states
            draws = torch.rand(self.num_envs, generator=self.generator)[self.own]
            actions = draw_actions(output.log_probs, draws.to(self.compute.device))
            self.env.act(actions.to("cpu", torch.int32).numpy())
            if rollout is not None:  # stored while the environments step
                rollout.frames[t] = frames
                rollout.masks[t] = 1 - first.float()
                rollout.actions[t] = actions
                rollout.log_probs[t] = output.log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
                rollout.values[t] = output.values
            self.observation = self.env.observe()
            earned[0, t] = torch.from_numpy(self.observation.rewards)
            earned[1, t] = torch.from_numpy(self.observation.first)
        everyones = self.world.gather(earned, self.num_envs, dim=2).numpy()  # (2, T, N)
        for t, (rewards, ended) in enumerate(zip(everyones[0], everyones[1] == 1)):
            self.statistics.update(rewards, ended)
            if rollout is not None:
                if normalize:
                    rewards = self.normalizer(rewards, ended)
                rollout.rewards[t] = torch.from_numpy(rewards[self.own])
                rollout.ended[t] = torch.from_numpy(ended[self.own])
        if rollout is not None:
            rollout.values[n_steps] = self._run()[2].values

    def _run(self) -> tuple[Tensor, Tensor, PolicyOutput]:
        """Frames and episode starts on the device, and the outputs of the policy."""
        frames = torch.from_numpy(self.observation.frames).to(self.compute.device)
        first = torch.from_numpy(self.observation.first).to(self.compute.device)
        hidden_in = reset_hidden(self.policy, self.hidden, first)
        return frames, first, run_policy(self.policy, self.compute, frames, hidden_in)

    def state_dict(self) -> dict:
        """The state of all environments, in order; complete at rank 0 alone."""
        states = self.world.gather_list(self.env.get_state())
        return {"env": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states],
                "generator": self.generator.get_state(),
                "hidden": self.world.gather(self.hidden.cpu(), self.num_envs),
                "statistics": self.statistics.state_dict(),
                "normalizer": self.normalizer.state_dict()}

    def check_state_dict(self, state, where: str, optional: frozenset[str] = frozenset()) -> None:
        """Refuse what ``load_state_dict`` cannot take.

        Args:
            optional: entries that may be missing.

        Raises:
            UserError: naming the entry.
        """
        needed = {"env", "generator", "hidden", "statistics", "normalizer"}
        if not isinstance(state, dict) or not needed - optional <= set(state) <= needed:
            raise UserError(f"{where} is no state of a set of environments")
        env = state["env"]
        if not isinstance(env, list) or not all(
                isinstance(each, Tensor) and each.dtype == torch.uint8 and each.ndim == 1
                for each in env):
            raise UserError(f"{where}: 'env' is no list of states of environments")
        if len(env) != self.num_envs:
            raise UserError(f"{where}: 'env': there are {len(env)} states for {self.num_envs} "
                            "environments")
        try:
            self.env.check_states(_bytes_of(env[self.own]))
        except UserError as error:
            raise UserError(f"{where}: 'env': {error}") from None
        check_generator(state["generator"], self.generator, f"{where}: 'generator'")
        check_like(state["hidden"], self.policy.initial_states(self.num_envs).cpu(),
                   f"{where}: 'hidden'")
        self.statistics.check_state_dict(state["statistics"], f"{where}: 'statistics'")
        if "normalizer" in state:
            self.normalizer.check_state_dict(state["normalizer"], f"{where}: 'normalizer'")

    def load_state_dict(self, state: dict) -> None:
        self.env.set_state(_bytes_of(state["env"][self.own]))
        self.generator.set_state(state["generator"])
        self.hidden = state["hidden"][self.own].to(self.compute.device)
        self.statistics.load_state_dict(state["statistics"])
        if "normalizer" in state:  # validation has none, but for files of before
            self.normalizer.load_state_dict(state["normalizer"])
        self.observation = self.env.observe()


def _new_states(config: EnvConfig, num_envs: int, seed: int, num_threads: int) -> list[bytes]:
    """States of a new vector of environments. The levels that an environment plays depend on the
    number of environments beside it, so those of a part of them are read off the whole."""
    whole = ProcgenVectorEnv(config, num_envs, seed, num_threads)
    whole.observe()
    states = whole.get_state()
    whole.close()
    return states


def _bytes_of(states: list[Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in states]


class TrainingRun:
    """A run in its folder.

    Args:
        folder: the run's folder. If it holds a resumable run, that is continued; else the run is
            new, and the attribute ``folder`` has a number appended if another run has this name.
        settings: what to train. When continuing, a longer ``num_timesteps`` stretches the
            learning-rate schedule from there on.
        compute: where to compute.
        edit, val_edit: edits of new levels in training and in validation: those that the settings
            ask for.
        world: the processes that train together; each makes its own run in the same folder, into
            which rank 0 writes.

    Raises:
        FolderInUse: if another process is at work in the folder.
        UserError: if a file to start from cannot be used, or the processes cannot share the
            environments evenly.
    """

    def __init__(self, folder: Path, settings: TrainSettings, compute: Compute,
                 edit: LevelEdit | None = None, val_edit: LevelEdit | None = None,
                 world: Distributed = SINGLE):
        for size, given in ((settings.cheese_region, edit),
                            (settings.val_cheese_region, val_edit)):
            if bool(size) != (given is not None):
                raise ValueError("the edits of levels are not those that the settings ask for")
        num_envs = settings.agent.n_envs
        if num_envs % world.world_size:
            raise UserError(f"{world.world_size} processes cannot share the {num_envs} "
                            f"environments of the parameter set '{settings.param_name}' evenly; "
                            f"start a number of them that divides {num_envs}")
        self.folder = folder
        self.settings = settings
        self.compute = compute
        self.world = world
        self.timesteps = 0
        self.updates = 0
        self._elapsed = 0.0
        self._saved_at, self._seconds_to_save = time.monotonic(), 0.0

        _seed_everything(settings.seed)
        agent = settings.agent
        self.policy = build_policy(agent.architecture, agent.hidden_state_size, agent.recurrent,
                                   agent.learned_initial_state, agent.width)
        resume = folder / RESUME_NAME
        resumes = world.broadcast(resume.exists())
        lock = FolderLock(folder) if resumes and world.is_main else None
        state = load_tensors(resume, "resume file") if resumes else None
        if state is None and settings.model_file:
            source = Path(settings.model_file)
            began = load_agent(source)
            if began.edits:
                raise UserError(f"{source} is an edited agent, and training would leave its edits "
                                "out; begin with the agent that it was edited from")
            load_weights(self.policy, began.state_dict(), source)
        layout = torch.channels_last if compute.channels_last else torch.contiguous_format
        self.policy.to(compute.device, memory_format=layout)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=agent.learning_rate,
                                          eps=ADAM_EPS)
        if state is None and settings.keep_optimizer:
            self.optimizer.load_state_dict({
                **self.optimizer.state_dict(),
                "state": load_optimizer_state(Path(settings.model_file), self.policy)})
        # Independent streams: of the minibatches, and of each worker's levels and actions.
        minibatch_seed, train_seed, val_seed = map(
            int, np.random.SeedSequence(settings.seed).generate_state(3))
        self.minibatch_generator = torch.Generator().manual_seed(minibatch_seed)
        self.train_worker = Worker(settings.env, self.policy, compute, agent.n_envs, train_seed,
                                   settings.num_threads, edit, world)
        self.val_worker = Worker(settings.env.unseen_levels(), self.policy, compute, agent.n_envs,
                                 val_seed, settings.num_threads, val_edit, world)
        if state is not None:
            self._check_state_dict(state, str(resume))
        self.teacher = self._open_teacher(state)
        self.rollout = Rollout(agent.n_steps, len(self.train_worker.hidden),
                               self.train_worker.observation.frames.shape[1:],
                               self.policy.hidden_state_size, compute.device)
        self._resume_file_timesteps = -1  # at which the resume file was written
        if state is not None:
            self._load_state_dict(state)
            self._resume_file_timesteps = self.timesteps
            world.warn_if_world_size_changed(state.get("ranks", 1), resume)
        self._lock, self.log = None, None
        if world.is_main:
            self._lock = lock or claim_folder(folder, SETTINGS_NAME)
            self.folder = self._lock.folder
            save_settings(self.folder, settings)
            self.log = MetricsLog(self.folder / LOG_NAME, COLUMNS,
                                  None if state is None else self.timesteps)
        self.folder = world.broadcast(self.folder)
        self._session_start = time.monotonic()
        self._session_timesteps = self.timesteps

    def _open_teacher(self, state: dict | None) -> Teacher | None:
        """The teacher of this run, if it still has a weight at the step of ``state``.

        Raises:
            UserError: if the file is missing, no agent, or not the one that the run began with.
        """
        settings = self.settings
        timesteps = 0 if state is None else state["timesteps"]
        if not settings.teacher_file or not self._is_kickstarted(timesteps):
            return None
        path = Path(settings.teacher_file)
        policy = load_agent(path)
        if sha256(path) != settings.teacher_sha256:
            raise UserError(f"the teacher {path} is not the file that this run began with: its "
                            "checksum is another one")
        teacher = Teacher(policy, len(self.train_worker.hidden), self.compute)
        if state is not None and "teacher_hidden" in state:
            check_like(state["teacher_hidden"], policy.initial_states(settings.agent.n_envs).cpu(),
                       f"{self.folder / RESUME_NAME}: 'teacher_hidden'")
            own = self.train_worker.own
            teacher.hidden = state["teacher_hidden"][own].to(self.compute.device)
        return teacher

    def _is_kickstarted(self, timesteps: int) -> bool:
        """Whether the update that begins at this step has a teacher, if the run has one."""
        return timesteps < self.settings.agent.kickstart_until * self.settings.num_timesteps

    def state_dict(self) -> dict:
        """Everything needed to go on exactly where the run is; complete at rank 0 alone."""
        more = {} if not self.world.is_distributed else {"ranks": self.world.world_size}
        if self.teacher is not None:
            more["teacher_hidden"] = self.world.gather(self.teacher.hidden.cpu(),
                                                       self.settings.agent.n_envs)
        val = self.val_worker.state_dict()
        del val["normalizer"]  # validation does not scale its rewards
        return {**more,
                "model_state_dict": self.policy.state_dict(),
                "optimizer_state_dict": self.optimizer.state_dict(),
                "timesteps": self.timesteps, "updates": self.updates,
                "wall_time": self.wall_time,
                "minibatch_generator": self.minibatch_generator.get_state(),
                "train": self.train_worker.state_dict(), "val": val}

    def _check_state_dict(self, state: dict, where: str) -> None:
        """Refuse a file that this run cannot go on from, before any of it is used.

        Raises:
            UserError: naming the entry.
        """
        own = {"model_state_dict", "optimizer_state_dict", "timesteps", "updates", "wall_time",
               "minibatch_generator", "train", "val"}
        absent = sorted(own - state.keys())
        if absent:
            raise UserError(f"{where} has no '{absent[0]}', so no run can go on from it")
        numbers = {name: state[name] for name in ("timesteps", "updates", "wall_time")}
        check_like({**numbers, "ranks": state.get("ranks", 1)},
                   {"timesteps": 0, "updates": 0, "wall_time": 0.0, "ranks": 1}, where)
        check_like(state["model_state_dict"], self.policy.state_dict(),
                   f"{where}: 'model_state_dict'")
        check_optimizer(state["optimizer_state_dict"], self.optimizer,
                        f"{where}: 'optimizer_state_dict'")
        check_generator(state["minibatch_generator"], self.minibatch_generator,
                        f"{where}: 'minibatch_generator'")
        self.train_worker.check_state_dict(state["train"], f"{where}: 'train'")
        self.val_worker.check_state_dict(state["val"], f"{where}: 'val'",
                                         optional=frozenset({"normalizer"}))

    def _load_state_dict(self, state: dict) -> None:
        self.policy.load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.timesteps, self.updates = state["timesteps"], state["updates"]
        self._elapsed = state["wall_time"]
        self.minibatch_generator.set_state(state["minibatch_generator"])
        self.train_worker.load_state_dict(state["train"])
        self.val_worker.load_state_dict(state["val"])

    @property
    def wall_time(self) -> float:
        """Seconds of work in all sittings."""
        return self._elapsed + time.monotonic() - self._session_start

    @property
    def finished(self) -> bool:
        return self.timesteps >= self.settings.num_timesteps

    @property
    def steps_per_second(self) -> float:
        """Environment steps a second in this sitting."""
        taken = self.timesteps - self._session_timesteps
        return taken / max(time.monotonic() - self._session_start, 1e-9)

    def train(self) -> int:
        """Train until the end or until one of :data:`common.signals.STOP_SIGNALS` asks to stop.

        Returns:
            0 when the run is finished, 128 + the signal's number when it was stopped, in whichever
            process. Either way its state is saved.

        Raises:
            NonFiniteLoss: the last good checkpoint stays as it was.
            LostProcess: if another process has ended; what was saved before is kept.
        """
        try:
            with (deferred_signals("update", second_acts=not self.world.is_distributed) as received,
                  Progress(self.settings.num_timesteps, "step", self.timesteps,
                           first_message=True) as progress):
                if self.updates and self._is_checkpoint and not self._is_saved:
                    self.save()  # a kill or a full disk came between resume file and agent file
                while not self.finished:
                    stopped = self.world.max(max(received, default=0))
                    if stopped:
                        break
                    row, summary = self._one_update()
                    figures = [
                        _shown("return", row.mean_episode_rewards, self.train_worker.statistics),
                        _shown("on unseen levels", row.val_mean_episode_rewards,
                               self.val_worker.statistics)]
                    if math.isfinite(summary.teacher_kl):
                        figures.append(f"distillation loss {summary.distillation_loss:.3f}, "
                                       f"KL to the teacher {summary.teacher_kl:.3f}")
                    progress.update(row.timesteps, ", ".join(figures))
                    if self._is_checkpoint:
                        self.save()
                    elif self._is_save_due:
                        self._save_resume_file()
                if not self._is_saved:
                    self.save()
        finally:
            if self.log is not None:
                self.log.close()
        return 0 if self.finished else 128 + stopped

    def save(self) -> Path:
        """Write the state to resume from, and then an agent file.

        In this order, because a run goes on from the first alone, and then writes the second.
        """
        self._save_resume_file()
        path = self.folder / agent_file_name(self.timesteps)
        if self.world.is_main:
            agent, env = self.settings.agent, self.settings.env
            save_agent(path, self.policy, self.optimizer.state_dict(), AgentOrigin(
                self.train_worker.normalizer.scale if agent.normalize_rew else 1.0,
                env.use_backgrounds, agent.gamma, agent.lmbda, env_name=env.env_name,
                distribution_mode=env.distribution_mode,
                cheese_region=self.settings.cheese_region))
            save_model_card(self.folder, self.settings, self.timesteps, self.wall_time)
        return path

    def _save_resume_file(self) -> None:
        start = time.monotonic()
        state = self.state_dict()
        if self.world.is_main:
            save_tensors(self.folder / RESUME_NAME, state)
        self._resume_file_timesteps, self._saved_at = self.timesteps, time.monotonic()
        self._seconds_to_save = self._saved_at - start

    @property
    def _is_save_due(self) -> bool:
        """Whether so much work is unsaved that the resume file is written.

        torchrun kills processes that go on for long after a signal to stop, so several processes
        save as often as a hundredth of their time allows: after every update, where an update is
        so long that a stop could come too late.
        """
        wait = SECONDS_BETWEEN_SAVES
        if self.world.is_distributed:
            wait = min(wait, 100 * self._seconds_to_save)
        return self.world.broadcast(time.monotonic() - self._saved_at > wait)

    @property
    def _is_saved(self) -> bool:
        """Whether both files of ``save`` are of this step."""
        return self.world.broadcast(self._resume_file_timesteps == self.timesteps and (
            self.folder / agent_file_name(self.timesteps)).exists())

    @property
    def _is_checkpoint(self) -> bool:
        """Whether the last update passed a step at which an agent file is kept."""
        settings = self.settings
        before = self.timesteps - settings.agent.n_envs * settings.agent.n_steps
        return (before * settings.num_checkpoints // settings.num_timesteps
                < self.timesteps * settings.num_checkpoints // settings.num_timesteps)

    def _one_update(self) -> tuple[LogRow, UpdateSummary]:
        settings, agent = self.settings, self.settings.agent
        progress = self.timesteps / settings.num_timesteps
        remaining = max(0.0, 1 - progress)
        for group in self.optimizer.param_groups:
            group["lr"] = agent.learning_rate * remaining

        self.train_worker.play(agent.n_steps, self.rollout, agent.normalize_rew)
        if self.updates % settings.val_interval == 0:
            self.val_worker.play(agent.n_steps)
        guidance = None
        if self.teacher is not None and self._is_kickstarted(self.timesteps):
            guidance = self.teacher.follow(self.rollout.frames, self.rollout.masks, agent, progress)
        summary = update(self.policy, self.optimizer, self.rollout, agent, self.compute,
                         self.minibatch_generator, guidance, self.world)
        _check_finite(summary, self.timesteps, self.folder)
        self.timesteps += agent.n_envs * agent.n_steps
        self.updates += 1
        values = self.world.gather(self.rollout.values[:-1], agent.n_envs, dim=1)
        diagnostics = {name: getattr(summary, name) for name in DIAGNOSTICS}
        diagnostics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if guidance is not None:
            diagnostics["kickstart_coef"] = guidance.policy_weight
        row = LogRow(
            timesteps=self.timesteps, wall_time=self.wall_time,
            num_episodes=self.train_worker.statistics.num_episodes,
            num_episodes_val=self.val_worker.statistics.num_episodes,
            mean_episode_value=float(values.mean()),
            mean_policy_loss=summary.policy_loss, mean_value_loss=summary.value_loss,
            mean_entropy_loss=summary.entropy,
            **episode_figures(self.train_worker.statistics),
            **episode_figures(self.val_worker.statistics, "val_"))
        if self.world.is_main:
            self._lock.check()
            self.log.append(dataclasses.asdict(row), diagnostics)
        return row, summary


def _shown(name: str, mean: float, statistics: EpisodeStatistics) -> str:
    """A mean of recent episodes, with their number as long as there are few."""
    number = len(statistics.recent_returns)
    return f"{name} {mean:.2f}" + (f" ({number} episodes)" if number < statistics.WINDOW else "")


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_finite(summary: UpdateSummary, timesteps: int, folder: Path) -> None:
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        value = getattr(summary, name)
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the {name} became {value} after {timesteps} time steps; training "
                                f"stopped, and what was saved before in {folder} was kept")
