"""Inputs of the scripts of cross-correlation and cross-causation."""

from __future__ import annotations

import argparse

from analysis.behaviours.files import BEHAVIOUR_FILES
from analysis.influences.gradients import InfluenceReader, Inputs
from analysis.parameters.config import BehavioursConfig
from common.errors import UserError
from common.parameters import ParameterSet
from common.step_results import StepResults
from generative.config import SaliencyConfig
from generative.flags import samples_of
from interventions.config import DirectionFilesConfig
from interventions.flags import directions_folder


def open_inputs(args: argparse.Namespace, parameters: ParameterSet) -> Inputs:
    """The samples, directions and behaviours that the flags of ``add_influence_flags`` name.

    Raises:
        UserError: naming what is missing, damaged or does not fit.
    """
    numbers = parameters.get(SaliencyConfig).ids("sample_ids")
    if not numbers:
        raise UserError("there is nothing to do without samples: see --sample_ids")
    behaviours = None
    if not args.no_behaviours:
        behaviours = StepResults(
            args.behaviours_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
            parameters.get(BehavioursConfig).num_samples)
        if not behaviours.file("per_sample").exists():
            raise UserError(f"there is no file {behaviours.file('per_sample')}; "
                            f"{behaviours.schema.script} writes it, or give --no_behaviours")
    inputs = Inputs.read(samples_of(args, parameters), numbers,
                         directions_folder(args, parameters),
                         parameters.get(DirectionFilesConfig).num_episodes, behaviours)
    alone = sum(len(rows) == 1 for rows in inputs.groups.values())
    print(f"{len(numbers)} samples, {len(inputs.groups)} behaviours"
          + (f", {alone} of them with one sample" if alone else ""), flush=True)
    return inputs


def open_reader(inputs: Inputs, parameters: ParameterSet) -> InfluenceReader:
    """The reader of these samples' saliency.

    Raises:
        UserError: see ``InfluenceReader``.
    """
    return InfluenceReader(inputs.samples, inputs.coordinates, inputs.projector, inputs.matrices,
                           parameters.get(SaliencyConfig))
