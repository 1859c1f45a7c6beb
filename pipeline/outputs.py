"""Names of the files that the scripts of stages write.

A stage that was interrupted has no record of its outputs. Before it starts from scratch, the
pipeline deletes only files with these names. Outputs that a script replaces as a whole list their
files in ``settings.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path, PurePath

from agents.rollout_files import RECORDING
from agents.run_folder import CARD_NAME, LOG_NAME
from agents.training import RESUME_NAME
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.bottleneck_vectors import BOTTLENECK_FILES
from analysis.env_states import ENV_STATE_FILES
from analysis.jacobians import JACOBIAN_FILES
from analysis.memory.labels import LEVEL_LABELS
from analysis.memory.lesion_results import LESIONS
from analysis.memory.probe_interventions import PROBE_INTERVENTIONS
from analysis.memory.sparse_report import FEATURE_DREAMS
from attribution.checking.agent_checks import CHECK_FILES
from attribution.checking.object_scores import OBJECT_FILES
from attribution.failures.results import FAILURES
from attribution.results import ATTRIBUTIONS, FEATURES
from common.config import SETTINGS_NAME
from common.errors import UserError
from common.files import read_description
from common.schemas import SETTINGS_NAME as STORE_SETTINGS
from common.schemas import Entry, File, Schema
from common.video import RENDERING
from generative.runs import EPISODES_NAME, PROGRESS_NAME
from generative.saliency.files import SALIENCY
from generative.sample_files import SAMPLES
from generative.start_optimisation.search import OPTIMISED_STARTS
from generative.world_data import WORLDS_NAME
from interventions.comparison import COMPARISON
from interventions.direction_folders import PROBE_ATLAS, SPARSE_FEATURES
from interventions.hidden_states_folder import HIDDEN_STATE_FILES
from interventions.scan_study import SCANNED
from maze.field.results import FIELDS_FILES
from maze.studies.behaviour import BEHAVIOUR_FILES as MAZE_BEHAVIOUR_FILES
from maze.studies.channels import CHANNEL_FILES
from maze.studies.retargeting import RETARGETING_FILES
from maze.studies.scrubbing import SCRUBBING_FILES
from maze.studies.steering import STEERING_FILES
from pipeline.stage import Stage


def _named(*paths: str) -> Schema:
    """Return a schema with files of these paths; ``{:0>1}`` stands for a number."""
    return Schema("", "", items={path: Entry(path, File()) for path in paths})


_EVENTS = "events.out.tfevents.{}"  # of TensorBoard
# Schemas by script and folder; folders are relative to the one that the stage clears.
_SCHEMAS: dict[str, Mapping[str, Schema]] = {
    "train": {"procgen/{}/{}/{}/": _named(
        LOG_NAME, CARD_NAME, SETTINGS_NAME, RESUME_NAME, "model_{:0>1}.pth", _EVENTS)},
    "train_gen_model": {"results/{}/{}/": _named(
        PROGRESS_NAME, SETTINGS_NAME, WORLDS_NAME, EPISODES_NAME,
        "model_epoch{:0>1}_batch{:0>1}.pt", "recons_v_preds/batch_{:0>7}.mp4", _EVENTS)},
    "plot_training_csv": {  # next to the logs
        "agent/procgen/{}/{}/{}/": _named("plot.png", "plot_for_fig.png"),
        "simulator/results/{}/{}/": _named("plot.png")},
    "render": {"": RENDERING},
    "record": {"data/": RECORDING},
    "record_gen_samples": {"": SAMPLES},
    "saliency_experiments": {"": SALIENCY, "samples/informed_init/": SALIENCY},
    "generative.optimise_start": {"": OPTIMISED_STARTS},
    "compare_interventions": {"": COMPARISON, "./": SCANNED},
    "analysis.hidden_analysis_precompute": {"": HIDDEN_STATE_FILES},
    "analysis.env_h_analysis_precompute": {"": ENV_STATE_FILES},
    "analysis.combined_agent_env_hx_analysis_precompute": {"": BEHAVIOUR_FILES},
    "analysis.behaviour_stability": {"": _named(
        "behaviours_samples_{:0>1}_{:0>1}.npy", "behaviours_control_{:0>1}_{:0>1}.npy",
        "behaviour_agreement_{:0>1}.csv", "behaviour_draws_{:0>1}.csv",
        "behaviour_stability_{:0>1}.md", "settings_{:0>1}.json")},
    "analysis.bottleneck_vec_analysis_precompute": {"": BOTTLENECK_FILES},
    "analysis.jacobian_analysis_precompute": {"": JACOBIAN_FILES},
    "analysis.level_labels": {"": LEVEL_LABELS},
    "analysis.memory_lesions": {"": LESIONS},
    "analysis.probe_atlas": {"": PROBE_ATLAS},
    "analysis.probe_interventions": {"": PROBE_INTERVENTIONS},
    "analysis.sparse_features": {"": SPARSE_FEATURES},
    "analysis.feature_dreams": {"": FEATURE_DREAMS},
    "attribution.features": {"{}/": FEATURES},
    "attribution.attribute": {"": ATTRIBUTIONS},
    "attribution.objects": {"": OBJECT_FILES},
    "attribution.checks": {"": CHECK_FILES},
    "attribution.failure_causes": {"": FAILURES},
    "attribution.edit_agent": {"": _named("without_{}.pth")},
    "attribution.choose_edits": {"": _named("candidates.csv", "blind_to_{}.pth"),
                                 "played/{}/": FAILURES},
    "maze.fields": {"": FIELDS_FILES},
    "maze.behaviour": {"": MAZE_BEHAVIOUR_FILES},
    "maze.steering": {"": STEERING_FILES},
    "maze.channels": {"": CHANNEL_FILES},
    "maze.retargeting": {"": RETARGETING_FILES},
    "maze.scrubbing": {"": SCRUBBING_FILES},
    "maze.rollouts": {"": _named(STORE_SETTINGS, "film_{}.mp4", "film_{}.gif", "level_{}.json",
                                 "episodes.csv")}}


def is_named(stage: Stage, output: Path, path: Path) -> bool:
    """Return whether a file has a name that the script of a stage gives to its files.

    Args:
        stage: the stage.
        output: output folder.
        path: the file, relative to the output folder.
    """
    name = path.as_posix()
    roots = [root for root in stage.clears if "*" not in root and name.startswith(f"{root}/")]
    inner = PurePath(name.removeprefix(f"{roots[0]}/") if roots else name)
    return (name in stage.outputs or _is_listed(output, path)
            or any(entry.names(inner) for entry in _entries(stage.script)))


@functools.cache
def _entries(script: str) -> list[Entry]:
    """Return the entries of a script's schemas, with paths relative to the cleared folder."""
    return [dataclasses.replace(entry, path=(folder + entry.path).removeprefix("./"))
            for folder, schema in _SCHEMAS.get(script, {}).items()
            for entry in (Entry(schema.settings_name, File()), *schema.items.values(),
                          *schema.results.values())]


def _is_listed(output: Path, path: Path) -> bool:
    """Return whether the settings of an output that was replaced as a whole list a file."""
    for folder in path.parents:
        with contextlib.suppress(UserError):
            settings = read_description(output / folder / STORE_SETTINGS)
            files = settings.get("files")
            if "made_by" in settings and isinstance(files, list):
                return path.relative_to(folder).as_posix() in {STORE_SETTINGS, *map(str, files)}
    return False
