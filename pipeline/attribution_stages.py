"""Stages that attribute the agent's outputs to features of its layers."""

from __future__ import annotations

from pathlib import Path

from agents import rollout_files
from attribution.checking.agent_checks import OBJECTS as OBJECT_CHECK
from attribution.claims import CLAIMS
from attribution.config import AttributionConfig, FailureCausesConfig
from attribution.failures.results import ANY, FAILURES, ORIGINAL
from common.parameters import ParameterSet
from common.results import ResultStore
from envs.objects import hazards_of, objects_of
from pipeline.presets import AGENT, SIMULATOR, AttributionPreset, MemoryPreset, Preset
from pipeline.stage import (
    ATTRIBUTION_PAGE,
    OUTPUT,
    Stage,
    from_start,
    number_of,
    object_parameters,
    recording_parameters,
)

ROOM = "analysis/attribution"  # relative to the output folder
RECORDING = "attribution_rollouts"  # recorded without action noise, unlike the simulator's data
DATA = f"{OUTPUT}/{RECORDING}/data"
FEATURES, OTHERS, ATTRIBUTION, OBJECTS, CHECKS, MAPS, PAGE, EDITS, CAUSES, TABLE = (
    f"{ROOM}/{name}" for name in (
        "features", "features_of_activations", "attribution", "objects", "checks",
        "saliency_checks", "page", "edits", "causes", "table"))


def attribution_stages(preset: Preset | AttributionPreset, parameters: ParameterSet,
                   exp_name: str) -> list[Stage]:
    """Return the attribution stages of a preset.

    They record the agent without action noise, extract features, compute attributions, check the
    attributions and saliency maps through the simulator, export the page, count the failures of the
    original and edited agents by cause, and write the table of published claims. Levels are drawn
    with three different seeds: for the recording, for choosing edits, and for counting failures.

    Args:
        preset: preset of the experiment.
        parameters: parameter set of the preset.
        exp_name: name of the experiment.
    """
    config, failing = parameters.get(AttributionConfig), parameters.get(FailureCausesConfig)
    has_simulator = isinstance(preset, Preset) or preset.model_file is not None
    hazards = {kind.name for kind in hazards_of(preset.env_name)}
    invisible = [name for name in failing.invisible if name in hazards]
    game = ("--env_name", preset.env_name, "--distribution_mode", preset.distribution_mode,
            *(("--use_backgrounds",) if isinstance(preset, AttributionPreset)
              and preset.use_backgrounds else ()))
    recorded = {"attribution_record": tuple(f"{RECORDING}/data/{pattern}"
                                        for pattern in rollout_files.PATTERNS)}
    seed = ("--seed", str(preset.seed))
    inputs = ("--agent_file", AGENT, "--data_dir", DATA)
    layers = ("--layers", *config.layers) if config.layers else ()
    attributed = (*inputs, "--features_dir", f"{OUTPUT}/{FEATURES}", "--attribution_dir",
                  f"{OUTPUT}/{ATTRIBUTION}")
    studied = {**recorded, "attribution_features": (f"{FEATURES}/**/*.*",),
               "attribution": (f"{ATTRIBUTION}/**/*.*",)}
    known, objects = bool(objects_of(preset.env_name)), object_parameters(preset.env_name)
    named = {"attribution_objects": (f"{OBJECTS}/**/*.*",)} if known else {}
    checks = [check for check in config.checks if known or check != OBJECT_CHECK]
    sizes = ("--num_observations", str(config.num_observations), "--nmf_features",
             str(config.nmf_features))
    blinded = [name for name in failing.hazards if name in hazards]
    edited = [f"blind_to_{name}.pth" for name in blinded] or [
        f"without_{failing.layer}_{failing.feature}.pth"]
    edit = Stage(
        "attribution_edit", "attribution.choose_edits",
        ("--agent_file", AGENT, *game, "--hazards", *blinded, "--features_dir",
         f"{OUTPUT}/{FEATURES}", "--num_episodes", str(failing.choosing_episodes), "--seed",
         str(preset.seed + 1), "--output_dir", f"{OUTPUT}/{EDITS}"),
        (f"{EDITS}/**/*.*",), number_of(f"{EDITS}/*.pth", "edited agents"),
        needs={"attribution_features": (f"{FEATURES}/**/*.*",)}, files=(AGENT,),
        clears=(EDITS,), parameters=objects) if blinded else Stage(
        "attribution_edit", "attribution.edit_agent",
        ("--agent_file", AGENT, "--features_dir", f"{OUTPUT}/{FEATURES}", "--layer",
         failing.layer, "--features", str(failing.feature), "--output",
         f"{OUTPUT}/{EDITS}/{edited[0]}"),
        (f"{EDITS}/*.pth",), number_of(f"{EDITS}/*.pth", "edited agents"),
        needs={"attribution_features": (f"{FEATURES}/**/*.*",)}, files=(AGENT,), clears=(EDITS,),
        continued=from_start)
    compared = known and config.compare_activations
    others = ("--other_features_dir", f"{OUTPUT}/{OTHERS}") if compared else ()
    return [
        recording_without_noise("attribution_record", preset, config.num_episodes, game),
        Stage("attribution_features", "attribution.features",
              (*inputs, *layers, *sizes, *seed, "--output_dir", f"{OUTPUT}/{FEATURES}"),
              (f"{FEATURES}/**/*.*",), number_of(f"{FEATURES}/*/directions.npy", "layers"),
              needs=recorded, files=(AGENT,), clears=(FEATURES,)),
        *([Stage("attribution_activation_features", "attribution.features",
                 (*inputs, *layers, *sizes, "--nmf_of", "activations", *seed, "--output_dir",
                  f"{OUTPUT}/{OTHERS}"),
                 (f"{OTHERS}/**/*.*",), number_of(f"{OTHERS}/*/directions.npy", "layers"),
                 needs=recorded, files=(AGENT,), clears=(OTHERS,))] if compared else []),
        Stage("attribution", "attribution.attribute",
              (*inputs, "--features_dir", f"{OUTPUT}/{FEATURES}", "--outputs", *config.outputs,
               "--num_trajectories", str(config.num_trajectories), "--num_steps",
               str(config.num_steps), *seed, "--output_dir", f"{OUTPUT}/{ATTRIBUTION}"),
              (f"{ATTRIBUTION}/**/*.*",), number_of(f"{ATTRIBUTION}/**/trajectory_*.npz",
                                                    "attributed trajectories"),
              needs={**recorded, "attribution_features": (f"{FEATURES}/**/*.*",)}, files=(AGENT,),
              clears=(ATTRIBUTION,), max_shards=config.num_trajectories),
        *([Stage("attribution_objects", "attribution.objects",
                 (*inputs, "--features_dir", f"{OUTPUT}/{FEATURES}", *others,
                  "--num_observations", str(config.num_masked), *seed, "--output_dir",
                  f"{OUTPUT}/{OBJECTS}"),
                 (f"{OBJECTS}/**/*.*",),
                 number_of(f"{OBJECTS}/*/names.json", "layers with named features"),
                 needs={**recorded, "attribution_features": (f"{FEATURES}/**/*.*",),
                        **({"attribution_activation_features": (f"{OTHERS}/**/*.*",)}
                           if compared else {})},
                 files=(AGENT,), clears=(OBJECTS,), parameters=objects)] if known else []),
        Stage("attribution_checks", "attribution.checks",
              (*attributed, "--checks", *checks, "--num_frames", str(config.num_checked), *seed,
               "--output_dir", f"{OUTPUT}/{CHECKS}"),
              (f"{CHECKS}/**/*.*",), number_of(f"{CHECKS}/*.csv", "checks"), needs=studied,
              files=(AGENT,), clears=(CHECKS,), parameters=objects),
        *([Stage("saliency_checks", "attribution.saliency_checks",
                 ("--agent_file", AGENT, "--model_file", SIMULATOR, "--interpreting_params_name",
                  preset.parameters, "--data_dir", DATA, "--num_pairs", str(config.num_maps), *seed,
                  "--output_dir", f"{OUTPUT}/{MAPS}"),
                 (f"{MAPS}/**/*.*",), number_of(f"{MAPS}/levels/*.npz", "groups of levels"),
                 needs=recorded, files=(AGENT, SIMULATOR), parameters=objects, clears=(MAPS,))]
          if known and config.num_maps and has_simulator else []),
        Stage("attribution_page", "attribution.page",
              (*attributed, "--objects_dir", f"{OUTPUT}/{OBJECTS}", "--checks_dir",
               f"{OUTPUT}/{CHECKS}", *(("--failure_causes",) if hazards else ()), "--exp_name",
               exp_name, "--output_dir", f"{OUTPUT}/{PAGE}"),
              (f"{PAGE}/**/*.*",), number_of(f"{PAGE}/data/*.js", "files of data"),
              needs={**studied, **named, "attribution_checks": (f"{CHECKS}/**/*.*",)},
              files=(AGENT, ATTRIBUTION_PAGE), clears=(PAGE,), continued=from_start,
              parameters=objects),
        edit,
        Stage("failure_causes", "attribution.failure_causes",
              ("--agent_file", AGENT, *(f"{OUTPUT}/{EDITS}/{file}" for file in edited), *game,
               "--num_episodes", str(failing.num_episodes), "--num_controls",
               str(failing.num_controls), "--num_films", str(failing.num_films),
               "--reference_size", str(failing.reference_size),
               *(("--invisible", *invisible) if invisible else ()), "--seed",
               str(preset.seed + 2), "--output_dir", f"{OUTPUT}/{CAUSES}"),
              (f"{CAUSES}/**/*.*",), failed, needs={edit.name: (f"{EDITS}/*.pth",)},
              files=(AGENT,), clears=(CAUSES,), parameters=objects,
              max_shards=1 + len(edited) * (1 + failing.num_controls) + len(invisible)),
        Stage("attribution_table", "attribution.table",
              ("--studies", f"{OUTPUT}/{ROOM}", "--labels", exp_name, *seed, "--output_dir",
               f"{OUTPUT}/{TABLE}"),
              (f"{TABLE}/*",), lambda output: CLAIMS.summary(output / TABLE),
              needs={**studied, **named, "attribution_checks": (f"{CHECKS}/**/*.*",),
                     "failure_causes": (f"{CAUSES}/*.csv",)},
              clears=(TABLE,), continued=from_start, parameters=objects)]


def recording_without_noise(name: str, preset: Preset | AttributionPreset | MemoryPreset,
                            num_episodes: int, game: tuple[str, ...]) -> Stage:
    """Return a stage that records the agent without action noise in the folder RECORDING.

    Args:
        name: name of the stage.
        preset: preset of the experiment.
        num_episodes: number of episodes.
        game: flags that choose the game.
    """
    return Stage(
        name, "record",
        ("--model_file", AGENT, "--interpreting_params_name", preset.parameters, *game,
         "--param_name", preset.recording_param_name, "--num_episodes", str(num_episodes),
         "--no_action_noise", "--no_videos", "--seed", str(preset.seed), "--logdir",
         f"{OUTPUT}/{RECORDING}"),
        (f"{RECORDING}/**/*.*",), number_of(f"{RECORDING}/data/episode_*", "episodes"),
        files=(AGENT,), clears=(RECORDING,), max_shards=num_episodes,
        parameters=recording_parameters(preset))


def failed(output: Path) -> str:
    """Summarise the failures of the unedited agent; used as ``Stage.result``."""
    rates = ResultStore(output / CAUSES, FAILURES).read("rates")
    own = rates[(rates["arm"] == ORIGINAL) & (rates["cause"] == ANY)].iloc[0]
    return f"the agent fails {own['failures']} of {own['levels']} levels"
