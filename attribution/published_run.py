"""The published function ``run(checkpoint_path, output_dir=…)``, implemented with this project's
scripts.

The keywords of ``rl_clarity.run`` (Hilton et al. 2020) are supported where they apply; others raise
an error that gives the reason. The given dictionaries are not modified.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.agent_file import load_agent, read_origin
from agents.rollout_files import RolloutFolder
from attribution.layers import short_names
from attribution.results import INPUT
from common.errors import UserError, nearest

# Published keywords that are not supported, with the reasons.
_LEFT_OUT = {
    "obs_every": "observations are drawn evenly from all episodes",
    "full_resolution": "the page shows what the agent sees",
    "temp_files": "the recording stays in the output folder and is reused",
    "op_is_one_of": "layers are chosen by name, see --layers of attribution.attribute",
    "bottleneck_only": "only layers that no part of the network bypasses are used",
    "attr_max_paths": "the sums along the straight path are exact, and the article uses no other",
    "attr_single_channels": "the page shows features, and a feature may be one channel",
    "numpy_precision": "totals are stored exactly", "inline_js": "the page is a folder of files",
    "inline_large_json": "the page is a folder of files",
    "scrub_range": "the published range is used",
    "action_combos": "actions are chosen by name, see --outputs of attribution.attribute",
    "action_group_fns": "actions are grouped by direction, see --outputs of attribution.attribute"}


def run(checkpoint_path: str | Path, *, output_dir: str | Path,
        load_kwargs: Mapping | None = None, trajectories_kwargs: Mapping | None = None,
        observations_kwargs: Mapping | None = None, layer_kwargs: Mapping | None = None,
        attr_policy: bool = False, attr_integrate_steps: int = 16, nmf_features: int = 8,
        trajectory_bookmarks: int = 16, gae_gamma: float | None = None,
        gae_lambda: float | None = None, env_name: str = "coinrun",
        distribution_mode: str = "hard", use_backgrounds: bool | None = None,
        **others: object) -> Path:
    """Record an agent, find features, compute attributions, and build the page.

    Existing results in the folder are reused, and a killed call resumes when it is repeated.

    Args:
        checkpoint_path: published checkpoint (``.jd``), which is converted, or an agent file.
        output_dir: folder for all results.
        load_kwargs: ``resample`` (True), whether to record episodes that are missing; if False, the
            recording in the folder is used as it is.
        trajectories_kwargs: ``num_envs``, number of trajectories (8), and ``num_steps``, steps per
            trajectory (512).
        observations_kwargs: ``num_envs`` (32) and ``num_obs`` (128), whose product is the number of
            observations.
        layer_kwargs: ``name_contains_one_of``, strings of which the short name of a layer must
            contain one; ``discard_first_n`` (0), number of layers to drop from the beginning of
            this selection; ``input_layer_include`` (False), whether to also show gradients with
            respect to the frame.
        attr_policy: also attribute the log-probabilities of actions and directions.
        attr_integrate_steps: initial number of nodes per integration path.
        nmf_features: number of features per layer.
        trajectory_bookmarks: maximum number of frames in each list of bookmarks.
        gae_gamma, gae_lambda: discount and lambda of the advantages; by default those of the agent.
        env_name, distribution_mode, use_backgrounds: game and mode; backgrounds are by default as
            in the agent file.
        **others: unsupported keywords, which raise an error.

    Returns:
        Path of the page.

    Raises:
        UserError: if a keyword is not supported, ``layer_kwargs`` selects no layer, or a file
            cannot be read.
    """
    folder = Path(output_dir)
    _with_defaults(others, {})
    loading = _with_defaults(load_kwargs, {"resample": True})
    trajectories = _with_defaults(trajectories_kwargs, {"num_envs": 8, "num_steps": 512})
    observations = _with_defaults(observations_kwargs, {"num_envs": 32, "num_obs": 128})
    filters = _with_defaults(layer_kwargs, {"name_contains_one_of": None, "discard_first_n": 0,
                                            "input_layer_include": False})
    agent = Path(checkpoint_path)
    if agent.suffix != ".pth":
        agent = folder / "model.pth"
        if not agent.exists():
            _call("attribution.published", checkpoint=checkpoint_path, output=agent)
    layers = _select_layers(agent, filters)
    if use_backgrounds is None:
        use_backgrounds = bool(read_origin(agent).use_backgrounds)
    needed = trajectories["num_envs"] * trajectories["num_steps"]
    data, episodes = RolloutFolder(folder / "recording" / "data"), 32
    while loading["resample"]:
        _call("record", agent_file=agent, logdir=data.path.parent, num_episodes=episodes,
              env_name=env_name, distribution_mode=distribution_mode, no_action_noise=True,
              no_videos=True, use_backgrounds=use_backgrounds)
        if len(data.index()) - episodes >= needed:
            break
        episodes *= 2
    inputs = {"agent_file": agent, "data_dir": data.path}
    _call("attribution.features", **inputs, layers=layers,
          num_observations=observations["num_envs"] * observations["num_obs"],
          nmf_features=nmf_features, output_dir=folder / "features")
    inputs["features_dir"] = folder / "features"
    _call("attribution.attribute", **inputs,
          layers=[*([INPUT] if filters["input_layer_include"] else []), *layers],
          outputs=["value", *(["policy"] if attr_policy else [])],
          num_trajectories=trajectories["num_envs"], num_steps=trajectories["num_steps"],
          integrate_steps=attr_integrate_steps, output_dir=folder / "attribution")
    _call("attribution.page", **inputs, attribution_dir=folder / "attribution",
          bookmarks=trajectory_bookmarks, gamma=gae_gamma, lmbda=gae_lambda,
          output_dir=folder / "page")
    return folder / "page" / "index.html"


def _call(script: str, **values: Any) -> None:
    """Call a script's function with options."""
    main = importlib.import_module(script).main
    main.function(main.options(**values))


def _with_defaults(values: Mapping | None, defaults: Mapping) -> dict:
    """Fill in the defaults of missing keywords.

    Args:
        values: given keywords; None for none.
        defaults: all supported keywords, with their defaults.

    Raises:
        UserError: if a keyword is unknown or unsupported; for an unsupported one, the message gives
            the reason.
    """
    for name in values or {}:
        if name in _LEFT_OUT:
            raise UserError(f"the keyword '{name}' is not supported: {_LEFT_OUT[name]}")
        if name not in defaults:
            raise UserError(f"there is no keyword '{name}'"
                            f"{nearest(name, defaults) if defaults else ''}")
    return {**defaults, **(values or {})}


def _select_layers(agent: Path, filters: Mapping) -> list[str]:
    """Return the short names of the layers selected by the published filters.

    Args:
        agent: agent file.
        filters: ``name_contains_one_of`` and ``discard_first_n``, see ``layer_kwargs`` of ``run``.

    Raises:
        UserError: if the filters select no layer.
    """
    names, words = list(short_names(load_agent(agent))), filters["name_contains_one_of"]
    words = [words] if isinstance(words, str) else words
    selected = [name for name in names if words is None or any(word in name for word in words)
                ][filters["discard_first_n"]:]
    if not selected:
        raise UserError(f"'layer_kwargs' selects no layer of {', '.join(names)}; change its "
                        "filters")
    return selected
