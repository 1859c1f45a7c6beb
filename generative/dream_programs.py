"""A simulator and its agent as programs that the dream page runs, see ``common.traced``.

A step of a dream runs ``cell``, which moves the state on; ``decode``, which draws it; ``agent``,
whose hidden state sees the image; and ``heads``, which read the hidden state. Hence the page can
change the hidden state before the heads read it. In simulators with worlds, ``paint`` draws a world
once, ``surround`` takes a step of sampling the squares that are not known, and ``repaint`` restarts
a dream with other squares in view.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.traced import Program, trace
from generative.camera import CameraState
from generative.filling import paint_scenery, touched_cells, with_cells
from generative.networks import clamp_image
from generative.prior_networks import EMBEDDING, NUM_GLOBALS
from generative.simulator import Simulator, Start
from generative.spatial import SpatialStart, split_state
from generative.sprites import SpriteStates
from generative.squares import Scenery, World, world_phase

WORLD_FIELDS = ("squares", "corner", "places", "velocities", "looks", "clock")  # that are drawn


def check_simulator(simulator: Simulator) -> None:
    """Raise UserError if the page cannot run a simulator."""
    if not simulator.config.is_spatial:
        raise UserError("the dream page needs a simulator with the spatial architecture, but this "
                        "one has the architecture vector")
    if simulator.agent.policy.edits:
        raise UserError("this agent has edits, which the dream page cannot apply")


def round_weights(simulator: Simulator) -> None:
    """Round the weights of a simulator to half precision, in place, but not those of its agent.

    The weights in files from ``generative.export`` are rounded already.
    """
    with torch.no_grad():
        for name, tensor in simulator.state_dict().items():
            if not name.startswith("agent.") and tensor.is_floating_point():
                tensor.copy_(tensor.half())


def dream_programs(simulator: Simulator, start: Start) -> dict[str, Program]:
    """Trace the programs of a simulator with float32 weights on the CPU.

    Args:
        start: any start (1 row).
    """
    world, image = start.world, torch.zeros(1, simulator.config.image_channels, 64, 64)
    given: dict[str, Tensor] = {}
    programs: dict[str, Program] = {}
    if world is not None:
        assert simulator.squares is not None
        painted = _paint(simulator, **{name: getattr(world, name) for name in WORLD_FIELDS})
        given = {**painted, "corner": world.corner, "step": torch.tensor(0)}
        programs["paint"] = trace(lambda **fields: _paint(simulator, **fields), **{
            name: getattr(world, name) for name in WORLD_FIELDS})

    def cell(h: Tensor, action: Tensor, **scenery: Tensor) -> dict[str, Tensor]:
        return {"h": simulator.cell.advance(start.z, action, h, *_scenery(scenery))}

    def decode(h: Tensor, **scenery: Tensor) -> dict[str, Tensor]:
        raw, reward, terminal, *death = simulator.decoder(h, start.z, *_scenery(scenery))
        return {"frame": clamp_image(raw), "reward": reward, "end": torch.sigmoid(terminal),
                **({"death": torch.sigmoid(death[0])} if death else {})}

    def agent(frame: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": simulator.agent.step(frame, hidden).hidden_states}

    def heads(hidden: Tensor) -> dict[str, Tensor]:
        policy = simulator.agent.policy
        return {"log_probs": torch.log_softmax(policy.fc_policy(hidden), dim=-1),
                "value": policy.fc_value(hidden)}

    programs |= {"cell": trace(cell, h=start.env_h, action=start.action, **given),
                 "decode": trace(decode, h=start.env_h, **given),
                 "agent": trace(agent, frame=image, hidden=start.agent_hidden),
                 "heads": trace(heads, hidden=start.agent_hidden)}
    return programs


def is_surrounded(simulator: Simulator) -> bool:
    """Return whether a trained prior samples what lies beyond the view."""
    return simulator.squares is not None and bool(
        simulator.config.pixels_per_square) and simulator.prior.is_trained


def world_programs(simulator: Simulator, start: Start) -> dict[str, Program]:
    """Trace the programs that change worlds; none without a prior that samples what lies beyond the
    view.

    Args:
        start: any start (1 row).
    """
    if not is_surrounded(simulator):
        return {}
    return {"surround": _surround_program(simulator),
            "repaint": _repaint_program(simulator, start)}


def _surround_program(simulator: Simulator) -> Program:
    """Trace a step of ``WorldPrior.sample`` with a given camera."""
    prior, num = simulator.prior.worlds, simulator.prior.worlds.num_squares

    def surround(x: Tensor, squares: Tensor, known: Tensor, camera: Tensor, time: Tensor,
                 share: Tensor, sharpness: Tensor) -> dict[str, Tensor]:
        x = torch.where(known > 0, prior.embed(squares), x)
        x, _, sampled = prior.euler_step(x, known, camera, torch.ones(1, 1), time, share,
                                         sharpness)
        return {"x": x, "squares": torch.where(known.permute(0, 2, 3, 1) > 0, squares, sampled)}

    # The traced operations do not depend on the values.
    return trace(surround, x=torch.randn(1, EMBEDDING, num, num),
                 squares=torch.rand(1, num, num, prior.num_classes),
                 known=torch.zeros(1, 1, num, num), camera=torch.randn(1, NUM_GLOBALS),
                 time=torch.tensor([0.5]), share=torch.tensor(0.5), sharpness=torch.tensor(1.0))


def _repaint_program(simulator: Simulator, start: Start) -> Program:
    """Trace ``filling.repaint``: from initial frames, the camera, a hole, and the drawn worlds
    before and after it is filled, to painted frames and the state before the first step.

    Args:
        start: any start in a world (1 row).
    """
    config, squares, world = simulator.config, simulator.squares, start.world
    converter = simulator.env_converter
    assert squares is not None and world is not None and isinstance(converter, SpatialStart)
    drawn = _paint(simulator, **{name: getattr(world, name) for name in WORLD_FIELDS})
    del drawn["first"]

    def repaint(images: Tensor, displacements: Tensor, h: Tensor, velocity: Tensor, hole: Tensor,
                corner: Tensor, **scenery: Tensor) -> dict[str, Tensor]:
        before, after = (_scenery({**{name: scenery[f"{when}_{name}"] for name in drawn},
                                   "corner": corner, "first": corner})[0]
                         for when in ("before", "after"))
        painted = paint_scenery(simulator, images, displacements, corner, hole > 0, before, after)
        vectors, others = simulator.encode(torch.cat([images, painted], dim=1)).split(1)
        own = World.of(world.squares, corner)
        mixed = with_cells(vectors, others, touched_cells(simulator, own, hole > 0))
        camera = CameraState(split_state(h, config).camera.motion,
                             world_phase(own, squares.pixels_per_square), velocity,
                             torch.zeros(1, 2), torch.zeros(1, 1))
        return {"images": painted, "h": converter.state(mixed, camera).flat()}

    num = config.num_init_steps
    return trace(repaint, images=torch.rand(num, 1, config.image_channels, 64, 64),
                 displacements=torch.zeros(num, 1, 2), h=start.env_h,
                 velocity=torch.zeros(1, 2), hole=torch.zeros(1, *world.squares.shape[1:3]),
                 corner=world.corner, **{f"{when}_{name}": tensor for when in ("before", "after")
                                         for name, tensor in drawn.items()})


def _paint(simulator: Simulator, **fields: Tensor) -> dict[str, Tensor]:
    """Draw a world, see ``Simulator.scenery``; return the fields of ``Scenery`` and, if there are
    any, of ``SpriteStates``."""
    scenery = simulator.scenery(World.of(**fields))
    sprites = vars(scenery.sprites) if scenery.sprites else {}
    return {"image": scenery.image, "first": scenery.first, **sprites}


def _scenery(parts: dict[str, Any]) -> list[Scenery]:
    """Return the scenery of the arrays of ``_paint``, corner and step; none without arrays."""
    if not parts:
        return []
    own = {field.name for field in dataclasses.fields(Scenery)}
    sprites = {name: tensor for name, tensor in parts.items() if name not in own}
    return [Scenery(**{name: tensor for name, tensor in parts.items() if name in own},
                    sprites=SpriteStates(**sprites) if sprites else None)]
