"""The published call ``run(checkpoint_path, output_dir=…)``, as the scripts of this project.

Keywords are those of ``rl_clarity.run`` (Hilton et al. 2020) that still have a meaning; the others
are refused by name with the reason. Nothing is changed in the dictionaries that are given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from agents.agent_file import load_agent, read_origin
from agents.rollout_files import RolloutFolder
from attribution.layers import short_names
from attribution.results import INPUT
from common.errors import UserError, nearest

ROOT = Path(__file__).parents[1]
FIRST_EPISODES = 32
# Keywords that have no meaning here, and why.
_LEFT_OUT = {
    "obs_every": "observations are drawn evenly from all episodes",
    "full_resolution": "the page shows what the agent sees",
    "temp_files": "the recording stays in the output folder, and is used again",
    "op_is_one_of": "layers are named, see --layers of attribution.attribute",
    "bottleneck_only": "only layers that everything goes through are taken",
    "attr_max_paths": "the sums along the straight path are exact, and the article uses no other",
    "attr_single_channels": "the page shows features, and a feature may be one channel",
    "numpy_precision": "totals are written as they are", "inline_js": "the page is a folder",
    "inline_large_json": "the page is a folder", "scrub_range": "it is the published one",
    "action_combos": "actions are named", "action_group_fns": "groups are directions; see "
    "--outputs of attribution.attribute"}


def run(checkpoint_path: str | Path, *, output_dir: str | Path,
        load_kwargs: Mapping | None = None, trajectories_kwargs: Mapping | None = None,
        observations_kwargs: Mapping | None = None, layer_kwargs: Mapping | None = None,
        attr_policy: bool = False, attr_integrate_steps: int = 16, nmf_features: int = 8,
        trajectory_bookmarks: int = 16, gae_gamma: float | None = None,
        gae_lambda: float | None = None, env_name: str = "coinrun",
        distribution_mode: str = "hard", use_backgrounds: bool | None = None,
        start: Callable = subprocess.run, **others: object) -> Path:
    """Record an agent, find features, attribute, and build the page, by the project's scripts.

    What is in the folder is used again; after a kill, the same call goes on.

    Args:
        checkpoint_path: published checkpoint (``.jd``), which is converted, or an agent file.
        output_dir: folder for all of it.
        load_kwargs: ``resample``: False uses the recording that is there, and records none.
        trajectories_kwargs: ``num_envs`` trajectories (8) of ``num_steps`` (512).
        observations_kwargs: ``num_envs`` (32) times ``num_obs`` (128) observations.
        layer_kwargs: ``name_contains_one_of`` and ``discard_first_n``; ``input_layer_include``
            also shows gradients by the frame.
        attr_policy: also attribute the policy.
        env_name, distribution_mode, use_backgrounds: how it is played; of backgrounds, what the
            agent file says if not given.
        start: runs a command, as ``subprocess.run`` does.

    Returns:
        The page's file.

    Raises:
        UserError: if a keyword is left out here or unknown, or the checkpoint cannot be read.
        subprocess.CalledProcessError: if a script refuses; it has said why.
    """
    folder = Path(output_dir)
    _refuse(others, ())
    loading = _given(load_kwargs, {"resample": True})
    trajectories = _given(trajectories_kwargs, {"num_envs": 8, "num_steps": 512})
    observations = _given(observations_kwargs, {"num_envs": 32, "num_obs": 128})
    chosen = _given(layer_kwargs, {"name_contains_one_of": None, "discard_first_n": 0,
                                   "input_layer_include": False})

    def script(*words: object) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        start([sys.executable, "-m", *map(str, words)], check=True,
              env={**os.environ, "PYTHONPATH": path})

    agent = Path(checkpoint_path)
    if agent.suffix != ".pth":
        agent = folder / "model.pth"
        if not agent.exists():
            script("attribution.published", checkpoint_path, "--output", agent)
    layers = _layers(agent, chosen)
    if use_backgrounds is None:
        use_backgrounds = bool(read_origin(agent).use_backgrounds)
    wanted = trajectories["num_envs"] * trajectories["num_steps"]
    data, episodes = RolloutFolder(folder / "recording" / "data"), FIRST_EPISODES
    while loading["resample"]:
        script("record", "--model_file", agent, "--logdir", data.path.parent, "--num_episodes",
               episodes, "--env_name", env_name, "--distribution_mode", distribution_mode,
               "--no_action_noise", "--no_videos",
               *(["--use_backgrounds"] if use_backgrounds else []))
        if len(data.index()) - episodes >= wanted:
            break
        episodes *= 2
    inputs = ("--agent_file", agent, "--data_dir", data.path)
    script("attribution.features", *inputs, "--layers", *layers, "--num_observations",
           observations["num_envs"] * observations["num_obs"], "--nmf_features", nmf_features,
           "--output_dir", folder / "features")
    made = ("--features_dir", folder / "features")
    frame = [INPUT] if chosen["input_layer_include"] else []
    script("attribution.attribute", *inputs, *made, "--layers", *frame, *layers, "--outputs",
           "value", *(["policy"] if attr_policy else []),
           "--num_trajectories", trajectories["num_envs"],
           "--num_steps", trajectories["num_steps"], "--integrate_steps", attr_integrate_steps,
           "--output_dir", folder / "attribution")
    script("attribution.page", *inputs, *made, "--attribution_dir", folder / "attribution",
           "--bookmarks", trajectory_bookmarks, "--output_dir", folder / "page",
           *(["--gamma", gae_gamma] if gae_gamma is not None else []),
           *(["--lmbda", gae_lambda] if gae_lambda is not None else []))
    return folder / "page" / "index.html"


def _refuse(names: Mapping, known: tuple[str, ...]) -> None:
    """Refuse the first of some names.

    Raises:
        UserError: with the reason, if it was a published one.
    """
    for name in names:
        if name in _LEFT_OUT:
            raise UserError(f"'{name}' has no meaning here: {_LEFT_OUT[name]}")
        raise UserError(f"there is no keyword '{name}'{nearest(name, known) if known else ''}")


def _given(values: Mapping | None, defaults: dict) -> dict:
    """Defaults, with the values that are given."""
    values = values or {}
    _refuse({name: value for name, value in values.items() if name not in defaults},
            tuple(defaults))
    return {**defaults, **values}


def _layers(agent: Path, chosen: Mapping) -> list[str]:
    """Short names of the layers that the published filters leave.

    Raises:
        UserError: if they leave none.
    """
    names, words = list(short_names(load_agent(agent))), chosen["name_contains_one_of"]
    words = [words] if isinstance(words, str) else words
    left = [name for name in names if words is None or any(word in name for word in words)]
    left = left[chosen["discard_first_n"]:]
    if not left:
        raise UserError(f"no layer is left of {', '.join(names)}; change 'layer_kwargs'")
    return left
