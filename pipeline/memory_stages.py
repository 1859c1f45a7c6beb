"""Stages that study the memory of a recurrent agent, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from agents import rollout_files
from analysis.memory.lesion_results import LESIONS
from analysis.memory.probe_atlas import PROBE_ATLAS
from analysis.memory.probe_interventions import PROBE_INTERVENTIONS
from analysis.memory.sparse_report import SPARSE_FEATURES
from analysis.memory.table import CLAIMS
from common.results import ResultStore, Schema, Table
from pipeline.attribution_stages import RECORDING, recording_without_noise
from pipeline.presets import AGENT, SIMULATOR, MemoryPreset, MemoryStudies, Preset
from pipeline.stage import (
    OUTPUT,
    Stage,
    from_start,
    number_of,
    object_parameters,
)
from stats.effects import claims_summary

ROOM = "analysis/memory"  # relative to the output folder
LABELS, LESIONED, ATLAS, PUSHES, FEATURES, DREAMS, TABLE = (f"{ROOM}/{name}" for name in (
    "level_labels", "lesions", "probe_atlas", "probe_interventions", "sparse_features",
    "feature_dreams", "table"))


def memory_stages(preset: MemoryPreset, exp_name: str) -> tuple[Stage, ...]:
    """Return the stages of the preset ``memory``.

    Args:
        preset: preset of the experiment.
        exp_name: name of the experiment, the agent's column in the table of claims.
    """
    record = recording_without_noise(
        "memory_record", preset, preset.memory_episodes,
        ("--env_name", preset.env_name, "--distribution_mode", preset.distribution_mode))
    return record, *memory_studies(preset, preset.memory, (record.name, RECORDING), exp_name)


def memory_studies(preset: Preset | MemoryPreset, studies: MemoryStudies,
                   recording: tuple[str, str], exp_name: str) -> tuple[Stage, ...]:
    """Return the stages that study a recording.

    Args:
        preset: preset of the experiment.
        studies: sizes of the studies.
        recording: (stage name, folder) of the recording.
        exp_name: name of the experiment, the agent's column in the table of claims.
    """
    seed, objects = ("--seed", str(preset.seed)), object_parameters(preset.env_name)
    recorder, folder_of_recording = recording
    data = ("--data_dir", f"{OUTPUT}/{folder_of_recording}/data")
    recorded = {recorder: tuple(f"{folder_of_recording}/data/{pattern}"
                                for pattern in rollout_files.PATTERNS)}
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
    dreams = () if not studies.dream_iterations or SIMULATOR not in preset.given_files else (
        study("feature_dreams", "analysis.feature_dreams",
              (*inputs, "--model_file", SIMULATOR, "--interpreting_params_name",
               preset.parameters, "--features_dir", f"{OUTPUT}/{FEATURES}", *features,
               "--iterations", str(studies.dream_iterations), "--num_recorded",
               str(studies.recorded_starts), "--best_of", str(studies.recorded_starts // 2)),
              DREAMS, number_of(f"{DREAMS}/penalty_*/sample_*", "starts"),
              {**labelled, **sparse}, (AGENT, SIMULATOR)),)
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
        *dreams,
        Stage("memory_table", "analysis.memory_table",
              ("--studies", f"{OUTPUT}/{ROOM}", "--labels", exp_name, "--output_dir",
               f"{OUTPUT}/{TABLE}"), (f"{TABLE}/*",),
              lambda output: CLAIMS.summary(output / TABLE),
              needs={"memory_lesions": tables[:1], **atlas, "probe_interventions": tables[2:3],
                     **sparse, **({"feature_dreams": tables[4:]} if dreams else {})},
              clears=(TABLE,), continued=from_start))


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


def _variance(output: Path) -> str:
    """Report the variance that sparse features explain; used as ``Stage.result``."""
    table = ResultStore(output / FEATURES, SPARSE_FEATURES).read("dictionaries")
    row = table[table["dictionary"].str.startswith("sae")].iloc[0]
    return (f"sparse features explain {row['variance_explained']:.0%} of the hidden state's "
            f"variance, and {row['success']:.0%} of levels are solved with the reconstruction "
            "spliced in")
