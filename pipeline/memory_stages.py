"""Stages that study the memory of a recurrent agent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from agents import rollout_files
from analysis.memory.lesion_results import LESIONS
from analysis.memory.probe_atlas import PROBE_ATLAS
from analysis.memory.probe_interventions import PROBE_INTERVENTIONS
from analysis.memory.sparse_report import FEATURE_DREAMS, SPARSE_FEATURES
from analysis.memory.table import CLAIMS
from common.parameters import ParameterSet
from common.results import ResultStore, Schema, Table
from generative import sample_files
from interventions.scan_study import SCANNED
from pipeline.attribution_stages import RECORDING, recording_without_noise
from pipeline.presets import AGENT, SIMULATOR, MemoryPreset, MemoryStudies, Preset
from pipeline.stage import (
    FOLDERS,
    OUTPUT,
    PAGE,
    Stage,
    from_start,
    hidden_state_variance,
    number_of,
    object_parameters,
)
from stats.effects import claims_summary

ROOM = "analysis/memory"  # relative to the output folder
LABELS, LESIONED, ATLAS, PUSHES, FEATURES, DREAMS, TABLE = (f"{ROOM}/{name}" for name in (
    "level_labels", "lesions", "probe_atlas", "probe_interventions", "sparse_features",
    "feature_dreams", "table"))
FEATURE_SAMPLES = f"{DREAMS}/penalty_1"
PATCHING = f"{ROOM}/patching"  # one subfolder for channels, and one for cells
CELL_LEVELS = 20  # number of levels on which cells are patched; few, because cells are many
PANEL_EPISODES = 100  # largest number of episodes from which the panel's directions are computed


def memory_stages(preset: MemoryPreset, exp_name: str) -> tuple[Stage, ...]:
    """Return the stages of the preset ``memory``, in the order in which they run.

    Args:
        preset: preset of the experiment.
        exp_name: name of the experiment, the agent's column in the table of claims.
    """
    record = recording_without_noise(
        "memory_record", preset, preset.memory_episodes,
        ("--env_name", preset.env_name, "--distribution_mode", preset.distribution_mode))
    recording = (record.name, RECORDING)
    return (record, *memory_studies(preset, preset.memory, recording, exp_name),
            *_feature_panel(preset, recording, exp_name))


def memory_studies(preset: Preset | MemoryPreset, studies: MemoryStudies,
                   recording: tuple[str, str], exp_name: str) -> tuple[Stage, ...]:
    """Return the stages that study the agent's memory in a recording.

    Args:
        preset: preset of the experiment.
        studies: sizes of the studies.
        recording: (stage name, folder) of the recording.
        exp_name: name of the experiment, the agent's column in the table of claims.
    """
    seed, objects = ("--seed", str(preset.seed)), object_parameters(preset.env_name)
    data, recorded = _data_of(recording)
    labelled = {**recorded, "memory_labels": (f"{LABELS}/**/*.*",)}
    inputs = ("--agent_file", AGENT, *data)
    labels = ("--labels_dir", f"{OUTPUT}/{LABELS}")
    controls = ("--num_controls", str(studies.num_controls))
    features = ("--num_features", str(studies.features))
    atlas, sparse = {"probe_atlas": (f"{ATLAS}/**/*.*",)}, {
        "sparse_features": (f"{FEATURES}/**/*.*",)}

    def study(name: str, script: str, argv: tuple[str, ...], folder: str,
              result: Callable[[Path], str], needs: Mapping[str, tuple[str, ...]],
              files: tuple[str, ...] = (AGENT,)) -> Stage:
        return Stage(name, script, (*argv, *seed, "--output_dir", f"{OUTPUT}/{folder}"),
                     (f"{folder}/**/*.*",), result, needs=needs, files=files,
                     parameters=objects, clears=(folder,))

    lesions = study(
        "memory_lesions", "analysis.memory_lesions",
        (*inputs, *controls, "--num_levels", str(studies.played_levels),
         *(("--lesions", *studies.lesions) if studies.lesions else ())), LESIONED,
        _claims(LESIONED, LESIONS), recorded)
    if not studies.examples:
        return (lesions,)
    dreams = () if not _has_dreams(preset) else (
        study("feature_dreams", "analysis.feature_dreams",
              (*inputs, "--model_file", SIMULATOR, "--interpreting_params_name",
               preset.parameters, "--features_dir", f"{OUTPUT}/{FEATURES}", *features,
               "--iterations", str(studies.dream_iterations), "--num_recorded",
               str(studies.recorded_starts)),
              DREAMS, number_of(f"{DREAMS}/penalty_*/sample_*", "starts"),
              {**labelled, **sparse}, (AGENT, SIMULATOR)),)
    patching = tuple(
        study(f"patching_{unit}s", "compare_interventions",
              ("--agent_file", AGENT, "--env_name", preset.env_name, "--distribution_mode",
               preset.distribution_mode, "--interpreting_params_name", preset.parameters, "--scan",
               f"interchange@all={unit},outcome=value", "--num_episodes", str(levels)),
              f"{PATCHING}/{unit}s", functools.partial(_estimated, unit), {})
        for unit, levels in (("channel", studies.played_levels), ("cell", CELL_LEVELS)))
    tables = tuple(f"{folder}/**/*.csv" for folder in (LESIONED, ATLAS, PUSHES, FEATURES, DREAMS))
    return (
        Stage("memory_labels", "analysis.level_labels",
              (*data, "--output_dir", f"{OUTPUT}/{LABELS}"), (f"{LABELS}/**/*.*",),
              number_of(f"{LABELS}/labels_*.npz", "labelled episodes"), needs=recorded,
              parameters=objects, clears=(LABELS,)),
        lesions,
        study("probe_atlas", "analysis.probe_atlas",
              (*inputs, *labels, "--num_examples", str(studies.examples)), ATLAS,
              _decoded, labelled),
        study("probe_interventions", "analysis.probe_interventions",
              (*inputs, *labels, "--atlas_dir", f"{OUTPUT}/{ATLAS}", *controls, "--num_episodes",
               str(studies.played_levels)), PUSHES, _claims(PUSHES, PROBE_INTERVENTIONS),
              {**labelled, **atlas}),
        study("sparse_features", "analysis.sparse_features",
              (*inputs, *labels, *controls, *features, "--num_steps",
               str(studies.autoencoder_steps), "--num_levels", str(studies.played_levels)),
              FEATURES, _variance, labelled),
        *dreams, *patching,
        Stage("memory_table", "analysis.memory_table",
              ("--studies", f"{OUTPUT}/{ROOM}", "--labels", exp_name, "--output_dir",
               f"{OUTPUT}/{TABLE}"), (f"{TABLE}/*",),
              lambda output: CLAIMS.summary(output / TABLE),
              needs={"memory_lesions": tables[:1], **atlas, "probe_interventions": tables[2:3],
                     **sparse, **({"feature_dreams": tables[4:]} if dreams else {})},
              parameters=objects, clears=(TABLE,), continued=from_start))


def feature_flags(preset: Preset | MemoryPreset
                  ) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the flags of export_panel.py for sparse features, and patterns of the files to read.

    The patterns are given by name of the stage that writes the files. Both results are empty if the
    preset computes no features.
    """
    if preset.memory is None or not preset.memory.examples:
        return (), {}
    flags: tuple[str, ...] = ("--features_dir", f"{OUTPUT}/{FEATURES}")
    needs = {"sparse_features": _files(FEATURES, SPARSE_FEATURES, "features", "effects", "sae",
                                       "examples")}
    if _has_dreams(preset):
        flags += ("--dreams_dir", f"{OUTPUT}/{DREAMS}")
        needs["feature_dreams"] = (
            *_files(DREAMS, FEATURE_DREAMS, "dreams", "starts"),
            *(f"{FEATURE_SAMPLES}/{pattern}" for pattern in sample_files.PATTERNS))
    return flags, needs


def _feature_panel(preset: MemoryPreset, recording: tuple[str, str],
                   exp_name: str) -> tuple[Stage, ...]:
    """Return the stages that show sparse features in the interpretability panel.

    The panel shows simulations from starts that are optimised for each feature. If the preset
    optimises no starts, the result is empty.
    """
    flags, of_features = feature_flags(preset)
    if "feature_dreams" not in of_features:
        return ()
    data, recorded = _data_of(recording)
    shared = ("--interpreting_params_name", preset.parameters, *data, "--save_dir",
              f"{OUTPUT}/{FOLDERS.save_dir}", "--num_episodes",
              str(min(PANEL_EPISODES, preset.memory_episodes)))
    return (
        Stage("hidden_states", "analysis.hidden_analysis_precompute",
              (*shared, "--no_generated_samples", "--seed", str(preset.seed), "--overwrite"),
              (f"{FOLDERS.hidden_states}/*.*",), hidden_state_variance, needs=recorded,
              parameters=ParameterSet(preset.parameters).flattened("analysis.agent_h.",
                                                                   "analysis.tsne_seed"),
              clears=(str(FOLDERS.hidden_states),)),
        Stage("panel", "export_panel",
              ("--exp_name", exp_name, *shared, "--generated_data_dir", f"{OUTPUT}/{DREAMS}",
               "--samples", "penalty_1", *flags),
              (f"{FOLDERS.panel}/**/*.*",),
              number_of(f"{FOLDERS.panel}/data/feature_*.js", "features"),
              needs={**recorded, "hidden_states": (f"{FOLDERS.hidden_states}/*.*",),
                     **of_features},
              files=(PAGE,), parameters=object_parameters(preset.env_name),
              clears=(str(FOLDERS.panel),), continued=from_start))


def _has_dreams(preset: Preset | MemoryPreset) -> bool:
    studies = preset.memory
    return bool(studies and studies.examples and studies.dream_iterations
                and SIMULATOR in preset.given_files)


def _data_of(recording: tuple[str, str]) -> tuple[tuple[str, str], dict[str, tuple[str, ...]]]:
    """Return the flag that names a recording, and patterns of the recording's files, by stage.

    Args:
        recording: (stage name, folder) of the recording.
    """
    stage, folder = recording
    return ("--data_dir", f"{OUTPUT}/{folder}/data"), {
        stage: tuple(f"{folder}/data/{pattern}" for pattern in rollout_files.PATTERNS)}


def _files(folder: str, schema: Schema, *names: str) -> tuple[str, ...]:
    """Return glob patterns of the settings and of entries of a result folder."""
    return tuple(f"{folder}/{name}" for name in (
        schema.settings_name, *(schema.entry(name).pattern() for name in names)))


def _claims(folder: str, schema: Schema) -> Callable[[Path], str]:
    """Return a ``Stage.result`` that counts the claimed effects of a study."""
    columns = Table({"label": str, "outcome": str, "control": bool, "claimed": bool,
                     "num_controls": float})
    return lambda output: claims_summary(
        ResultStore(output / folder, schema).read("effects", form=columns))


def _decoded(output: Path) -> str:
    """Count the labels that are decodable beyond the current frame; used as ``Stage.result``."""
    table = ResultStore(output / ATLAS, PROBE_ATLAS).read("comparison")
    return (f"{table['claimed'].sum()} of {len(table)} labels are decoded better from the hidden "
            "state than from the best baseline without memory")


def _estimated(unit: str, output: Path) -> str:
    """Report how well first-order estimates rank patches; used as ``Stage.result``."""
    store = ResultStore(output / PATCHING / f"{unit}s", SCANNED)
    ranks = pd.concat([store.read("agreement", layer) for layer in store.keys("agreement")])
    of_means = ranks["of_means"].dropna()
    return (f"rank correlation of the effects of {unit}s with their first-order estimates: median "
            f"{of_means.median():.2f} of {len(of_means)} layers ({of_means.min():.2f} to "
            f"{of_means.max():.2f})")


def _variance(output: Path) -> str:
    """Report the variance that sparse features explain; used as ``Stage.result``."""
    table = ResultStore(output / FEATURES, SPARSE_FEATURES).read("dictionaries")
    row = table[table["dictionary"].str.startswith("sae")].iloc[0]
    return (f"sparse features explain {row['variance_explained']:.0%} of the hidden state's "
            f"variance, and {row['success']:.0%} of levels are solved with the reconstruction "
            "spliced in")
