"""What the scripts of cross-correlation and cross-causation begin with."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.behaviours.files import BehavioursFolder
from analysis.influences.gradients import InfluenceReader, Inputs
from common.errors import UserError
from generative.cli import samples_of
from generative.config import InterpretingConfig

SECTION = "combined_agent_env_hx"  # of the YAML, which the number of samples is of


def open_inputs(args: argparse.Namespace, config: InterpretingConfig) -> Inputs:
    """The samples, directions and behaviours that the flags of ``add_influence_flags`` name.

    Raises:
        UserError: naming what is missing, damaged or does not fit.
    """
    save_dir = Path(config.analysis.save_dir)
    numbers = config.analysis.saliency.ids("sample_ids")
    if not numbers:
        raise UserError("there is nothing to do without samples: see --sample_ids")
    behaviours = None
    if not args.no_behaviours:
        behaviours = BehavioursFolder(
            args.behaviours_dir or save_dir / "combined_agent_env_hx_analysis_precomp",
            config.analysis.combined_agent_env_hx.num_samples)
        if not behaviours.file("per_sample").exists():
            raise UserError(f"there is no file {behaviours.file('per_sample')}; "
                            f"{behaviours.script} writes it, or give --no_behaviours")
    inputs = Inputs.read(samples_of(args, config), numbers,
                         args.precomp_dir or save_dir / "hx_analysis_precomp",
                         config.analysis.agent_h.num_episodes, behaviours)
    alone = sum(len(rows) == 1 for rows in inputs.groups.values())
    print(f"{len(numbers)} samples, {len(inputs.groups)} behaviours"
          + (f", {alone} of them with one sample" if alone else ""), flush=True)
    return inputs


def open_reader(inputs: Inputs, config: InterpretingConfig) -> InfluenceReader:
    """The reader of these samples' saliency.

    Raises:
        UserError: see ``InfluenceReader``.
    """
    return InfluenceReader(inputs.samples, inputs.coordinates, inputs.projector, inputs.matrices,
                           config.analysis.saliency)
