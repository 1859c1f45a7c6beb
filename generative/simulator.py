"""The simulator: a learned environment together with the frozen agent.

It has two forward passes. ``forward`` is the training pass. With true actions, frames do not feed
back into the cell, so everything except the recurrences of cell and agent runs for all steps at
once. ``imagine`` runs step by step, as required when the agent sees the simulated frames and its
actions enter the environment.

The networks have two implementations, selected by ``SimulatorConfig.architecture``: the published
one, whose state is a vector (``generative.networks``), and one whose state is a grid
(``generative.spatial``).

Letters in shape comments: I initial frames, T simulated steps, B batch, C H W an image (elsewhere,
H is the deterministic state), S latent variables, K classes of each, D agent hidden state, A
actions, V bottleneck vector, E frame embedding, M hidden layer of the cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from agents.hooks import batch_info, refuse_patches
from agents.networks import Policy
from agents.patch import BatchInfo
from common.errors import UserError
from generative.batches import AlignedBatch, EnvState
from generative.camera import PHASE_DIM
from generative.config import GRID, SimulatorConfig
from generative.frozen_agent import FrozenAgent
from generative.networks import (
    BottleneckEncoder,
    Converter,
    Decoder,
    Draw,
    EnvironmentCell,
    FrameEmbedding,
    clamp_image,
    most_likely_action,
    on_unit_sphere,
)
from generative.prior import Prior, camera_globals, static_globals
from generative.prior_networks import PriorNoise
from generative.spatial import (
    NoEmbedding,
    PatchBasis,
    SpatialCell,
    SpatialEncoder,
    SpatialStart,
    split_state,
    with_phase,
)
from generative.spatial_decoder import SpatialDecoder
from generative.squares import (
    Scenery,
    SquareImages,
    World,
    square_images,
    world_corner,
    world_phase,
)

ALL_WINDOWS = slice(None)


@dataclasses.dataclass(frozen=True)
class Start:
    """Start of a simulation. Use ``dataclasses.replace`` to set a recorded state or action.

    Attributes:
        bottleneck_vec: unit vectors (B, V).
        env_h: deterministic state before the first step (B, H).
        z: one-hot latent variables before the first step (B, S, K).
        agent_hidden: the agent's hidden state before the first step (B, D).
        action_logits: predicted logits of the first step's input action (B, A).
        action: input action of the first step, one-hot (B, A).
        world: static surroundings; None in simulators without worlds.
    """

    bottleneck_vec: Tensor
    env_h: Tensor
    z: Tensor
    agent_hidden: Tensor
    action_logits: Tensor
    action: Tensor
    world: World | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One simulated step. Later steps are computed from these tensors, so ``torch.autograd.grad``
    can differentiate with respect to them.

    Attributes:
        actions: input actions of the step, one-hot (B, A).
        env_h: deterministic states (B, H).
        z: one-hot latent variables (B, S, K).
        prior_logits: logits of the prior of z (B, S, K).
        posterior_logits: logits of the posterior of z (B, S, K); None without true images.
        raw_images: decoded images before clamping, which enter the loss (B, C, H, W).
        images: images clamped to [0, 1], which the agent sees (B, C, H, W).
        rewards: predicted rewards in the unit of the data (B,).
        terminal_logits: logits of the end of the episode, before the sigmoid (B,).
        hidden_states: the agent's hidden states after the step (B, D).
        log_probs: log-probabilities of the agent's actions (B, A).
        values: the agent's values (B,).
        own_actions: the actions that the agent chooses, one-hot (B, A).
        death_logits: logits of an end without reward (B,); None in simulators without worlds.
    """

    actions: Tensor
    env_h: Tensor
    z: Tensor
    prior_logits: Tensor
    posterior_logits: Tensor | None
    raw_images: Tensor
    images: Tensor
    rewards: Tensor
    terminal_logits: Tensor
    hidden_states: Tensor
    log_probs: Tensor
    values: Tensor
    own_actions: Tensor
    death_logits: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation(Step):
    """All steps of a forward pass: the fields of ``Step`` with time first (T, B, …), and the start.

    Attributes:
        camera: predicted velocity (right, down), then displacement (right, down) of the camera,
            before ``true_camera`` replaces them in the state (T, B, 4); None in the vector
            architecture and from ``Simulator.imagine``.
    """

    start: Start
    camera: Tensor | None = None

    @property
    def terminals(self) -> Tensor:
        """Probability that the episode ends at each step (T, B)."""
        return torch.sigmoid(self.terminal_logits)


def stack(start: Start, steps: Sequence[Step]) -> Simulation:
    """Stack the steps of ``Simulator.imagine`` over time.

    The stacked tensors are copies: a scalar computed from ``steps`` has no gradient with respect
    to them.
    """
    fields: dict[str, Any] = {
        name: None if tensor is None else torch.stack([getattr(step, name) for step in steps])
        for name, tensor in vars(steps[0]).items()}
    return Simulation(start=start, **fields)


class Simulator(nn.Module):
    """The generative model: a learned environment and a frozen agent.

    Args:
        config: settings of the simulator. If ``agent_hidden_size`` is None, the attribute
            ``config`` contains the hidden size of the agent instead.
        policy: a trained agent; its parameters are frozen in place.

    Raises:
        UserError: if the agent's sizes differ from those in ``config``, or ``pixels_per_square`` is
            None in the spatial architecture.
    """

    def __init__(self, config: SimulatorConfig, policy: Policy):
        super().__init__()
        hidden_size = config.agent_hidden_size or policy.hidden_state_size
        self.config = config = dataclasses.replace(config, agent_hidden_size=hidden_size)
        vec = config.bottleneck_vec_size
        self.encoder: BottleneckEncoder | SpatialEncoder
        self.env_converter: Converter | SpatialStart
        self.frame_embedding: FrameEmbedding | NoEmbedding
        self.cell: EnvironmentCell | SpatialCell
        self.decoder: Decoder | SpatialDecoder
        self.squares: SquareImages | None = None
        if config.is_spatial:
            if config.pixels_per_square is None:
                raise UserError("pixels_per_square must be a number for a spatial simulator: the "
                                "pixels that the camera moves per square of the level, 0 if it "
                                "stands still")
            basis = self.basis = PatchBasis(config.patch_components, config.image_channels)
            self.encoder = SpatialEncoder(config, basis)
            self.env_converter = SpatialStart(config, basis)
            if config.world_squares:
                self._add_worlds(config)
        else:
            self.encoder = BottleneckEncoder(config.image_channels,
                                             config.initializer_rnn_hidden_size, vec)
            self.env_converter = Converter(vec, config.deter_dim + config.env_h_stoch_size)
        self.hidden_converter = Converter(vec, hidden_size, config.converter_width)
        self.action_converter = Converter(vec, config.action_space_size, config.converter_width)
        if config.is_spatial:
            self.frame_embedding = NoEmbedding()
            self.cell = SpatialCell(config, basis, self.squares)
            self.decoder = SpatialDecoder(config, basis, self.squares)
        else:
            self.frame_embedding = FrameEmbedding(config.image_channels)
            self.cell = EnvironmentCell(config)
            self.decoder = Decoder(config)
        self.agent = FrozenAgent(policy, hidden_size, config.action_space_size)

    def _add_worlds(self, config: SimulatorConfig) -> None:
        """Create the images of squares and the prior, whose weights this module's training keeps.
        """
        if config.square_classes is None:
            raise UserError("square_classes must be a number for a simulator with worlds")
        assert config.world_squares
        full, half, quarter, start_width = config.prior_widths
        self.squares = square_images(config.square_classes, config.world_squares,
                                     config.square_size, config.object_looks or ())
        self.prior = Prior(config.world_squares, config.square_classes, (full, half, quarter),
                           config.bottleneck_vec_size // GRID ** 2, config.patch_components,
                           start_width, is_view=not config.pixels_per_square)
        self.prior.requires_grad_(False)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all networks except the agent and the prior, or none if the
        simulator is frozen, as by ``runs.open_simulator``."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def encode(self, initial_images: Tensor) -> Tensor:
        """Encode images (I, B, C, H, W) in [0, 1] as bottleneck vectors (B, V)."""
        return self.encoder(initial_images)

    def random_vectors(self, num: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw bottleneck vectors (num, V) uniformly from the unit sphere.

        Args:
            generator: source of the random numbers, on the CPU so that a seed gives the same
                vectors on every device; None for torch's default.
        """
        vectors = torch.randn(num, self.config.bottleneck_vec_size, generator=generator)
        return on_unit_sphere(vectors.to(next(self.parameters()).device))

    def sample_starts(self, noise: PriorNoise, seeds: Tensor) -> tuple[Tensor, World]:
        """Generate starts from noise, differentiably: bottleneck vectors (B, V) and their worlds.

        Args:
            noise: noise of the prior, see ``Prior.noise``.
            seeds: seeds of what lies beyond these worlds, int64 (B,).

        Raises:
            UserError: if the simulator has no worlds, or its prior is not trained.
        """
        prior, squares = self._trained_prior(), self.squares
        assert squares is not None
        given = None if self.config.pixels_per_square else static_globals(noise.globals)
        probabilities, camera = prior.worlds.sample(noise, prior.world_times, camera=given)
        corner = world_corner(camera[:, :PHASE_DIM], probabilities.shape[1],
                              squares.pixels_per_square)
        world = World.of(probabilities, corner, seeds=seeds, **prior.objects(noise, seeds))
        return prior.vectors(noise, world, self.scenery(world).first, camera), world

    def scenery(self, world: World) -> Scenery:
        """Draw worlds, and compute the coefficients of the views at the start."""
        assert self.squares is not None
        scenery = self.squares.paint(world)
        view = self.squares.view(scenery, torch.zeros_like(world.corner))
        return dataclasses.replace(scenery, first=self.basis.coefficients(view).float())

    def surroundings(self, images: Tensor, env_h: Tensor, seeds: Tensor | None = None) -> World:
        """Read the squares in view off images, and sample all others.

        Args:
            images: last initial frames (B, C, 64, 64) in [0, 1].
            env_h: states before the first step, which hold the camera's phase and velocity (B, H).
            seeds: seeds of the squares that are sampled, int64 (B,); None for 0.

        Raises:
            UserError: if the simulator has no worlds, or its prior is not trained.
        """
        prior, squares = self._trained_prior(), self.squares
        assert squares is not None and self.config.world_squares
        camera = split_state(env_h, self.config).camera
        num = self.config.world_squares
        corner = world_corner(camera.phase, num, squares.pixels_per_square)
        world, known = squares.read(images, corner.detach(), num, seeds)
        speeds = prior.objects(prior.noise(world.seeds), world.seeds)["velocities"].abs()
        world = dataclasses.replace(world, corner=corner, velocities=world.velocities * speeds,
                                    squares=functional.one_hot(
                                        world.squares, len(squares.templates)).to(corner))
        return prior.completed(world, known, camera_globals(camera))

    def _moved_on(self, world: World, scenery: Scenery, h: Tensor) -> tuple[World, Scenery]:
        """Let worlds move on after a step to states h (B, H), see ``Prior.continued``.

        Without a trained prior, or with a static camera, they stay where they are.
        """
        assert self.squares is not None
        if not self.prior.is_trained or not self.config.pixels_per_square:
            return world, scenery
        camera = split_state(h, self.config).camera
        moved = self.prior.continued(world, camera, self.squares.pixels_per_square)
        if moved is not world:
            scenery = dataclasses.replace(self.squares.paint(moved), first=scenery.first,
                                          step=scenery.step)
        return moved, scenery

    def _trained_prior(self) -> Prior:
        if self.squares is None:
            raise UserError("this simulator has no worlds, so it cannot sample surroundings")
        if not self.prior.is_trained:
            raise UserError("the prior of this simulator has not been trained; train it with "
                            "python -m generative.train_prior")
        return self.prior

    def start_from(self, bottleneck_vec: Tensor, draw: Draw, detached: bool = True,
                   world: World | None = None, images: Tensor | None = None,
                   seeds: Tensor | None = None) -> Start:
        """Predict the start of a simulation from bottleneck vectors (B, V).

        Args:
            draw: sampler of z before the first step.
            world: static surroundings, which also determine the phase of the camera. If None, a
                simulator with worlds samples them, see ``surroundings``.
            images: last initial frames (B, C, 64, 64) in [0, 1], off which the squares in view are
                read if ``world`` is None; None to read them off the canvas.
            seeds: seeds of the sampled surroundings, int64 (B,); None for 0.
            detached: predict the agent's state and the action from the detached vector, so that
                their losses do not train the encoder.
        """
        env_h, z_logits = self.env_converter(bottleneck_vec).split(
            [self.config.deter_dim, self.config.env_h_stoch_size], dim=-1)
        z = draw(z_logits.unflatten(-1, self.cell.latent_shape))  # (B, S, K)
        if self.squares is not None:
            if world is None:
                canvas = split_state(env_h, self.config).canvas
                images = self.basis.images(canvas) if images is None else images
                world = self.surroundings(images, env_h, seeds)
            env_h = with_phase(env_h, world_phase(world, self.squares.pixels_per_square),
                               self.config)
        vectors = bottleneck_vec.detach() if detached else bottleneck_vec
        action_logits = self.action_converter(vectors)  # (B, A)
        agent_hidden = self.agent.policy.to_state(self.hidden_converter(vectors))  # (B, D)
        return Start(bottleneck_vec, env_h, z, agent_hidden, action_logits,
                     most_likely_action(torch.log_softmax(action_logits, dim=-1)), world)

    def forward(self, batch: AlignedBatch, draw: Draw, open_loop: Tensor | None = None, *,
                vector_noise: Tensor | None = None,
                true_camera: tuple[Tensor, Tensor] | None = None,
                agent_windows: slice = ALL_WINDOWS) -> Simulation:
        """Run the training pass, with z from the posterior and recorded actions. The agent starts
        from its recorded hidden state.

        Args:
            batch: recorded windows, aligned with simulated steps.
            draw: sampler of z.
            open_loop: mask of the windows whose z is drawn from the prior, bool (B,); None for no
                window.
            vector_noise: noise (B, V) added to the bottleneck vectors, which are then normalised
                again.
            true_camera: recorded motion of the camera, see ``batches.true_camera`` (T, B, 4), and a
                mask of the steps in which it replaces the predicted motion, bool (T, B); ignored in
                the vector architecture.
            agent_windows: slice of the windows in which the agent acts. The agent's states,
                log-probabilities, values and actions are returned for these windows only.

        Raises:
            UserError: if any patch is active.
        """
        refuse_patches(self.agent.policy, "the training pass of a simulator")
        vectors = self.encode(batch.initial_images)
        if vector_noise is not None:
            vectors = on_unit_sphere(vectors + vector_noise)
        start = self.start_from(vectors, draw, world=batch.world)
        actions = self.one_hot_actions(batch.actions)  # (T, B, A)
        num_steps, num_windows = actions.shape[:2]

        action_inputs = self.cell.action_input(actions)  # (T, B, M)
        embeddings = self.frame_embedding(batch.images.flatten(0, 1))  # (T*B, E)
        embedding_inputs = self.cell.embedding_input(embeddings).unflatten(
            0, (num_steps, num_windows))  # (T, B, M)
        h, z = start.env_h, start.z
        all_h, all_z, all_posterior, all_camera = [], [], [], []
        given = () if start.world is None else (self.scenery(start.world),)
        for t in range(num_steps):
            now = [scenery.at_step(t) for scenery in given]
            h = self.cell.advance(z, action_inputs[t], h, *now)  # (B, H)
            if isinstance(self.cell, SpatialCell):
                all_camera.append(self.cell.camera_state(h))
                if true_camera is not None:
                    h = self.cell.with_camera(h, *(part[t] for part in true_camera))
            posterior = self.cell.posterior_logits(h, embedding_inputs[t])  # (B, S, K)
            z = draw(posterior if open_loop is None else
                     torch.where(open_loop[:, None, None], self.cell.prior_logits(h), posterior))
            all_h.append(h)
            all_z.append(z)
            all_posterior.append(posterior)
        env_h, latents = torch.stack(all_h), torch.stack(all_z)

        raw_images, rewards, terminal_logits, *deaths = (
            output.unflatten(0, (num_steps, num_windows))  # (T, B, C, H, W), (T, B), (T, B)
            for output in self.decoder(env_h.flatten(0, 1), latents.flatten(0, 1),
                                       *given))
        images = clamp_image(raw_images)
        # With a gradient of 1, the agent's loss would move clamped values without limit, because
        # the spatial architecture's image loss ignores the excess.
        seen = raw_images.clamp(0, 1) if self.config.is_spatial else images
        agent = self.agent.sequence(seen[:, agent_windows], batch.first_hidden[agent_windows])
        log_probs = agent.log_probs  # (T, B, A)
        return Simulation(
            start=start, actions=actions, env_h=env_h, z=latents,
            prior_logits=self.cell.prior_logits(env_h),
            posterior_logits=torch.stack(all_posterior), raw_images=raw_images, images=images,
            rewards=rewards, terminal_logits=terminal_logits, hidden_states=agent.hidden_states,
            log_probs=log_probs, values=agent.values, own_actions=most_likely_action(log_probs),
            death_logits=deaths[0] if deaths else None,
            camera=torch.stack(all_camera) if all_camera else None)

    def imagine(self, start: Start, draw: Draw, num_steps: int | None = None, *,
                true_actions: Tensor | None = None, true_images: Tensor | None = None,
                without_env_grads: bool = False, rows: BatchInfo | None = None,
                choose: Callable[[Tensor], Tensor] | None = None) -> list[Step]:
        """Simulate step by step, and return the T steps, for example from recorded frames::

            start = simulator.start_from(simulator.encode(images), draw)
            steps = simulator.imagine(start, draw)
            value = steps[4].values.mean()
            gradients = torch.autograd.grad(value, [step.images for step in steps[:5]])

        Args:
            start: start from ``start_from``, with the input action of the first step.
            draw: sampler of z.
            num_steps: T; None for ``config.num_sim_steps``.
            true_actions: input actions of the steps, int64 (T, B), which replace the start's
                action and the agent's own actions.
            true_images: recorded images (T, B, C, H, W) in [0, 1]; if given, z comes from the
                posterior, otherwise from the prior.
            without_env_grads: detach the action before it enters the environment.
            rows: batch metadata for patches of the agent, one row per simulation; the step number
                is set in every step.
            choose: function that maps the agent's log-probabilities to one-hot actions (B, A); None
                for its most likely action.

        Raises:
            ValueError: if ``true_actions`` or ``true_images`` have fewer than T steps.
        """
        num_steps = self.config.num_sim_steps if num_steps is None else num_steps
        for name, tensor in (("true_actions", true_actions), ("true_images", true_images)):
            if tensor is not None and len(tensor) < num_steps:
                raise ValueError(f"{name} has {len(tensor)} steps, fewer than {num_steps}")
        state = EnvState(start.env_h, start.z, start.world)
        hidden, action = start.agent_hidden, start.action
        steps = []
        for t in range(num_steps):
            if true_actions is not None:
                action = self.one_hot_actions(true_actions[t])
            input_action = action.detach() if without_env_grads else action  # (B, A)
            state, predicted = self.advance(state, input_action, draw,
                                            None if true_images is None else true_images[t])
            image = clamp_image(predicted["raw_images"])  # (B, C, H, W)
            with (batch_info(self.agent.policy, rows.at_step(t)) if rows
                  else contextlib.nullcontext()):
                agent = self.agent.step(image, hidden)
            hidden, log_probs = agent.hidden_states, agent.log_probs  # (B, D), (B, A)
            action = (choose or most_likely_action)(log_probs)  # (B, A)
            steps.append(Step(
                actions=input_action, images=image, hidden_states=hidden, log_probs=log_probs,
                values=agent.values, own_actions=action, **predicted))
        return steps

    def advance(self, state: EnvState, action: Tensor, draw: Draw,
                true_image: Tensor | None = None) -> tuple[EnvState, dict[str, Any]]:
        """Take a step with one-hot actions (B, A), without the agent: return the next state and the
        fields of ``Step`` that do not depend on the agent; see ``imagine`` for the arguments."""
        world, given = state.world, []
        if world is not None:
            given = [(state.scenery or self.scenery(world)).at_step(state.step)]
        h = self.cell.advance(state.z, self.cell.action_input(action), state.env_h, *given)
        if world is not None:
            world, given[0] = self._moved_on(world, given[0], h)
        prior, posterior = self.cell.prior_logits(h), None  # (B, S, K)
        if true_image is not None:
            embedding = self.frame_embedding(true_image)
            posterior = self.cell.posterior_logits(h, self.cell.embedding_input(embedding))
        z = draw(prior if posterior is None else posterior)
        # (B, C, H, W), (B,), (B,)
        raw_image, reward, terminal_logit, *death = self.decoder(h, z, *given)
        after = EnvState(h, z, world, given[0] if given else None, state.step + 1)
        return after, {
            "env_h": h, "z": z, "prior_logits": prior, "posterior_logits": posterior,
            "raw_images": raw_image, "rewards": reward, "terminal_logits": terminal_logit,
            "death_logits": death[0] if death else None}

    def one_hot_actions(self, actions: Tensor) -> Tensor:
        """Convert actions, int64 (…,), to one-hot vectors, float32 (…, A)."""
        return functional.one_hot(actions, self.config.action_space_size).to(torch.float32)
