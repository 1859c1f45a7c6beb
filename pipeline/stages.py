"""Stages of the main experiment, with their scripts, inputs, outputs and parameters.

Flags and file names can contain placeholders, see ``pipeline.stage``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from agents import rollout_files
from agents.config import load_agent_config
from agents.rollout_files import RolloutFolder
from agents.run_folder import newest_run, read_log
from agents.training import RESUME_NAME
from analysis.influences.comparison import COMPARISON_FILES
from analysis.influences.comparison import claims_summary as influences_summary
from analysis.parameters import BehavioursConfig
from common.config import SETTINGS_NAME, check_entries
from common.files import read_array, read_description, read_json
from common.parameters import ParameterSet, flattened
from common.results import ResultStore
from generative import sample_files
from generative.config import RecordConfig, SaliencyConfig, SimulatorConfig, TrainingConfig
from generative.runs import checkpoints, newest_simulator_run, read_progress
from generative.saliency import files as saliency_files
from generative.saliency.gradients import WITHOUT_ENV_GRADS
from interventions.comparison import comparison_store
from interventions.config import DirectionFilesConfig, SwapConfig
from pipeline.attribution_stages import attribution_stages
from pipeline.maze_stages import maze_stages, pieces
from pipeline.memory_stages import (
    FEATURE_SAMPLES,
    feature_flags,
    memory_stages,
    memory_studies,
)
from pipeline.presets import (
    AGENT,
    ROOT,
    SIMULATOR,
    AnyPreset,
    AttributionPreset,
    MazePreset,
    MemoryPreset,
    Preset,
)
from pipeline.records import find
from pipeline.stage import (
    FOLDERS,
    OUTPUT,
    PAGE,
    TRAIN_AGENT,
    TRAIN_SIMULATOR,
    Stage,
    agent_experiment,
    behaviour_agreement,
    from_start,
    hidden_state_variance,
    number_of,
    object_parameters,
    recording_parameters,
    simulator_experiment,
    success_rate,
)
from stats.effects import claims_summary

SAMPLES = f"{OUTPUT}/samples/informed_init"


def _below(folder: str, patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{folder}/{pattern}" for pattern in patterns)


# Saliency files in the samples' folders, with and without gradients through the environment.
_ENDING = f"!samples/informed_init/sample_*/*{WITHOUT_ENV_GRADS}.*"
DATA_OF_MAPS = (*_below("samples/informed_init", saliency_files.DATA_PATTERNS), _ENDING)
MAPS = (*_below("samples/informed_init", (*saliency_files.DATA_PATTERNS,
                                          saliency_files.VIDEO_PATTERN)), _ENDING)
DATA_OF_MAPS_WITHOUT, MAPS_WITHOUT = (
    tuple(re.sub(r"\.(?=\w+$)", f"{WITHOUT_ENV_GRADS}.", pattern) for pattern in patterns[:-1])
    for patterns in (DATA_OF_MAPS, MAPS))
# Files that several stages read, by the stage that writes them.
ROLLOUTS = {"record": _below("rollouts/data", rollout_files.PATTERNS)}
SIMULATED = {"simulate": _below("samples/informed_init", sample_files.PATTERNS)}
DIRECTIONS = {"hidden_states": (f"{FOLDERS.hidden_states}/*.*",)}
BEHAVIOURS = {"behaviours": (f"{FOLDERS.behaviours}/*.*",)}
CORRELATIONS = (str(FOLDERS.correlations), str(FOLDERS.correlation_plots))
COMPARISONS = (str(FOLDERS.comparison), str(FOLDERS.comparison_plots))


def resumed_agent(_argv: list[str], folder: Path) -> list[str] | None:
    """Return the flags that resume the agent's training; None if nothing was saved."""
    saved = sorted(agent_experiment(folder).glob(f"*/{RESUME_NAME}"))
    return ["--resume", str(saved[-1].parent)] if saved else None


def resumed_simulator(argv: list[str], folder: Path) -> list[str] | None:
    """Return the flags that resume the simulator's training; None if there is no checkpoint."""
    run = newest_simulator_run(simulator_experiment(folder))
    if run is None or not checkpoints(run):
        return None
    return [*argv[:2], "--resume", str(run)]  # the first two words give the agent file


def all_stages(preset: AnyPreset, exp_name: str) -> tuple[Stage, ...]:
    """Return all stages of an experiment, in the order in which they run.

    Args:
        preset: preset of the experiment.
        exp_name: name of the experiment.
    """
    if isinstance(preset, MazePreset):
        return maze_stages(preset)
    if isinstance(preset, AttributionPreset):
        return tuple(attribution_stages(preset, ParameterSet(preset.parameters), exp_name))
    if isinstance(preset, MemoryPreset):
        return memory_stages(preset, exp_name)
    build = _Builder(preset, ParameterSet(preset.parameters), exp_name)
    return (*build.agent(), *build.recording(), *build.simulator(), *build.simulations(),
            *build.hidden_states(), *build.maps(), *build.saliency(), *build.influences(),
            *build.optimised_starts(), *build.interventions(),
            *attribution_stages(preset, ParameterSet(preset.parameters), exp_name),
            *(memory_studies(preset, preset.memory, ("record", "rollouts"), exp_name)
              if preset.memory else ()),
            *build.panel(),
            *pieces(preset.mazes, preset.seed))


class _Builder:
    """Builder of the stages of an experiment; each public method returns consecutive stages."""

    def __init__(self, preset: Preset, parameters: ParameterSet, exp_name: str):
        self._preset, self._parameters, self._exp_name = preset, parameters, exp_name
        self._sizes = {}  # sizes of the simulator, for published files that do not store them
        if preset.model_file and not (ROOT / preset.model_file).with_name(SETTINGS_NAME).is_file():
            self._sizes = parameters.named(SimulatorConfig)
        # Flags shared by several scripts.
        self._seed = ("--seed", str(preset.seed))
        self._game = ("--env_name", preset.env_name,
                      "--distribution_mode", preset.distribution_mode)
        self._inside = ("--agent_file", AGENT)
        self._set = ("--interpreting_params_name", preset.parameters)
        self._data = ("--data_dir", f"{OUTPUT}/rollouts/data")
        self._analyses = ("--save_dir", f"{OUTPUT}/{FOLDERS.save_dir}")
        self._precomputed = ("--precomputed_analysis_data_path",
                             f"{OUTPUT}/{FOLDERS.hidden_states}")
        self._simulated = (*self._inside, "--model_file", SIMULATOR, *self._set, *self._data,
                           *self._seed)
        self._of_samples = (*self._set, *self._analyses, "--samples_dir", SAMPLES)

    def _of(self, *prefixes: str) -> dict[str, object]:
        """Return the parameters whose dotted names begin with one of the prefixes, by name."""
        return self._parameters.flattened(*prefixes)

    def agent(self) -> list[Stage]:
        training = self._preset.agent_training
        if training is None:
            return []
        experiment = f"{OUTPUT}/agent/procgen/{self._preset.env_name}/{self._exp_name}"
        return [
            Stage(TRAIN_AGENT, "train",
                  ("--exp_name", self._exp_name, *self._game, "--param_name", training.param_name,
                   "--num_levels", str(training.num_levels),
                   "--num_timesteps", str(training.num_timesteps),
                   "--num_checkpoints", str(training.num_checkpoints),
                   "--val_interval", str(training.val_interval), *self._seed,
                   "--logdir", f"{OUTPUT}/agent"),
                  ("agent/**/*.*",), _return_on_unseen_levels, clears=("agent",),
                  parameters=flattened(vars(load_agent_config(training.param_name)), "agent."),
                  continued=resumed_agent),
            Stage("plot_agent", "plot_training_csv", ("--datapath", experiment),
                  ("agent/**/plot*.png",), _newest("agent/**/plot_for_fig.png"),
                  needs={TRAIN_AGENT: ("agent/**/log.csv",)}, continued=from_start)]

    def recording(self) -> list[Stage]:
        preset = self._preset
        number = preset.recorded_episodes or self._parameters.get(DirectionFilesConfig).num_episodes
        return [
            Stage("evaluate", "evaluate",
                  ("--model_file", AGENT, *self._game,
                   "--num_episodes", str(preset.evaluated_levels), *self._seed,
                   "--output", f"{OUTPUT}/evaluation.json"),
                  ("evaluation.json",), success_rate("evaluation.json"), files=(AGENT,),
                  continued=from_start),
            Stage("render", "render",
                  ("--model_file", AGENT, *self._game, "--num_eps", str(preset.rendered_episodes),
                   "--strip", *self._seed, "--vid_dir", f"{OUTPUT}/videos"),
                  ("videos/*.*",), number_of("videos/*.mp4", "videos"), files=(AGENT,),
                  clears=("videos",), continued=from_start),
            Stage("record", "record",
                  ("--model_file", AGENT, *self._set, *self._game, "--param_name",
                   preset.recording_param_name, "--num_episodes", str(number), *self._seed,
                   "--positions",  # for remembered pixels in the fidelity card
                   *(("--worlds",) if self._parameters.get(SimulatorConfig).world_squares else ()),
                   *(() if preset.recorded_videos else ("--no_videos",)),
                   "--logdir", f"{OUTPUT}/rollouts"),
                  ("rollouts/**/*.*",), _episodes, files=(AGENT,), clears=("rollouts",),
                  parameters=recording_parameters(preset),
                  max_shards=number)]

    def simulator(self) -> list[Stage]:
        training = self._preset.simulator_training
        if training is None:
            return []
        start = () if self._preset.model_file is None else (SIMULATOR,)
        return [
            Stage(TRAIN_SIMULATOR, "train_gen_model",
                  (*self._inside, *(("--model_file", *start) if start else ()), *self._set,
                   *self._data, *self._seed, "--max_batches", str(training.max_batches),
                   *_optional_flag("--batch_size", training.batch_size),
                   *_optional_flag("--num_sim_steps", training.num_sim_steps),
                   "--log_dir_base", f"{OUTPUT}/simulator",
                   "--gen_mod_exp_name", self._exp_name),
                  ("simulator/**/*.*",), _held_out_loss, needs=ROLLOUTS, files=(AGENT, *start),
                  parameters={**self._parameters.named(SimulatorConfig),
                              **self._parameters.named(TrainingConfig),
                              **object_parameters(self._preset.env_name)}, clears=("simulator",),
                  continued=resumed_simulator),
            Stage("plot_simulator", "plot_training_csv",
                  ("--datapath", f"{OUTPUT}/simulator/results/{self._exp_name}"),
                  ("simulator/**/plot.png",), _newest("simulator/**/plot.png"),
                  needs={TRAIN_SIMULATOR: ("simulator/**/progress.csv",)}, continued=from_start)]

    def simulations(self) -> list[Stage]:
        stages, number = [], self._parameters.get(RecordConfig).max_samples
        for name, folder, size, more in (
                ("simulate", "informed_init", "record.max_samples", ()),
                ("simulate_at_random", "rand_init", "record.max_samples",
                 ("--recording_rand_init",)),
                ("simulate_actions", "manual_actions", "record.rand_init",
                 ("--manual_action", "pattern",
                  "--num_samples", str(self._preset.manual_action_starts)))):
            stages.append(Stage(
                name, "record_gen_samples",
                (*self._simulated, "--data_save_dir", f"{OUTPUT}/samples", *more),
                (f"samples/{folder}/**/*.*",), number_of(f"samples/{folder}/sample_*", "samples"),
                needs={} if folder == "rand_init" else ROLLOUTS, files=(AGENT, SIMULATOR),
                parameters={**self._of(size, "analysis.saliency.num_sim_steps"),
                            **self._parameters.named(SwapConfig), **self._sizes,
                            **object_parameters(self._preset.env_name)},
                clears=(f"samples/{folder}",),
                max_shards=1 if folder == "manual_actions" else number))
        return [*stages, Stage(
            "loss_over_time", "loss_over_time_experiment",
            (*self._simulated, "--output_dir", f"{OUTPUT}/loss_over_time"),
            ("loss_over_time/*.*",), _beaten, needs=ROLLOUTS, files=(AGENT, SIMULATOR),
            parameters={**self._sizes, **self._of(
                "gen_model.num_sim_steps", "gen_model.batch_size", "gen_model.held_out_fraction",
                "gen_model.terminal_absorbing", "analysis.loss_over_time."),
                **object_parameters(self._preset.env_name)},
            clears=("loss_over_time",), continued=from_start)]

    def hidden_states(self) -> list[Stage]:
        flags = (*self._set, *self._data, *self._analyses, *self._seed)
        return [
            Stage("hidden_states", "analysis.hidden_analysis_precompute",
                  (*flags, "--generated_data_dir", f"{OUTPUT}/samples", "--overwrite"),
                  (f"{FOLDERS.hidden_states}/*.*",), hidden_state_variance,
                  needs={**ROLLOUTS, **SIMULATED},
                  parameters=self._of("analysis.agent_h.", "analysis.tsne_seed"),
                  clears=(str(FOLDERS.hidden_states),)),
            Stage("plot_hidden_states", "analysis.hidden_analysis_plotting", flags,
                  (f"{FOLDERS.hidden_state_plots}/**/*.*",),
                  number_of(f"{FOLDERS.hidden_state_plots}/**/*.png", "figures"),
                  needs={**ROLLOUTS, **DIRECTIONS}, parameters=self._of("analysis.agent_h.num_"),
                  clears=(str(FOLDERS.hidden_state_plots),), continued=from_start)]

    def maps(self) -> list[Stage]:
        return [
            *self._map("env_states", "env_h_analysis", FOLDERS.env_states,
                       FOLDERS.env_state_plots, "env_h", SIMULATED),
            *self._map("behaviours", "combined_agent_env_hx_analysis",
                       FOLDERS.behaviours, FOLDERS.behaviour_plots, "combined_agent_env_hx",
                       {**SIMULATED, "env_states": (f"{FOLDERS.env_states}/*.*",)},
                       also=("analysis.env_h.num_samples",)),
            *self._stability(),
            *self._map("bottleneck_vectors", "bottleneck_vec_analysis",
                       FOLDERS.bottleneck, FOLDERS.bottleneck_plots, "bottleneck",
                       {**SIMULATED, "simulate_at_random": _below("samples/rand_init",
                                                                  sample_files.PATTERNS)},
                       more=("--generated_data_dir", f"{OUTPUT}/samples"))]

    def _stability(self) -> list[Stage]:
        folder, section = FOLDERS.behaviour_stability, "analysis.combined_agent_env_hx."
        if not self._preset.stability_draws:
            return []
        return [Stage(
            "behaviour_stability", "analysis.behaviour_stability",
            (*self._of_samples, *self._seed, "--num_draws", str(self._preset.stability_draws),
             "--overwrite"), (f"{folder}/*.*",),
            behaviour_agreement(self._parameters.get(BehavioursConfig).clustering),
            needs={**SIMULATED, "env_states": (f"{FOLDERS.env_states}/*.*",)},
            parameters=self._of(section, "analysis.tsne_seed", "analysis.env_h.num_samples"),
            clears=(str(folder),))]

    def _map(self, name: str, script: str, precomputed: Path, plots: Path, section: str,
             needs: Mapping[str, tuple[str, ...]], also: tuple[str, ...] = (),
             more: tuple[str, ...] = ()) -> list[Stage]:
        """Return the stages that analyse simulated samples and plot the results.

        Args:
            name: name of the analysis.
            script: common prefix of the two scripts' names.
            precomputed: folder of the results.
            plots: folder of the figures.
            section: section of the parameters.
            needs: see ``Stage``.
            also: prefixes of further parameters.
            more: further flags.
        """
        parameters = self._of(f"analysis.{section}.", "analysis.tsne_seed", *also)
        flags = (*self._of_samples, *self._seed)
        return [
            Stage(name, f"analysis.{script}_precompute", (*flags, *more, "--overwrite"),
                  (f"{precomputed}/*.*",), _clusters(precomputed),
                  needs=needs, parameters=parameters, clears=(str(precomputed),)),
            Stage(f"plot_{name}", f"analysis.{script}_plotting", flags,
                  (f"{plots}/**/*.*",), number_of(f"{plots}/**/*.png", "figures"),
                  needs={**SIMULATED, name: (f"{precomputed}/*.*",)},
                  parameters=parameters, clears=(str(plots),), continued=from_start)]

    def saliency(self) -> list[Stage]:
        stages, settings = [], self._parameters.get(SaliencyConfig)
        max_shards = 1 if settings.combine_samples_not_iterate else len(settings.ids("sample_ids"))
        demonstration = str(FOLDERS.saliency_demonstration)
        for name, maps, folders, more in (
                ("saliency", MAPS, (demonstration,),
                 ("--difference_demo_dir", f"{OUTPUT}/{demonstration}")),
                ("saliency_without_env_grads", MAPS_WITHOUT, (), ("--without_env_grads",))):
            stages.append(Stage(
                name, "saliency_experiments",
                (*self._simulated, "--samples_dir", SAMPLES, *more, *self._precomputed),
                (*maps, *(f"{folder}/**/*.*" for folder in folders)),
                _maps_and_specificity(maps),
                needs={**SIMULATED, **DIRECTIONS}, files=(AGENT, SIMULATOR),
                parameters={**self._of("analysis.saliency.", "analysis.agent_h.num_episodes"),
                            **self._sizes, **object_parameters(self._preset.env_name)},
                clears=(*maps, *folders), max_shards=max_shards))
        return [*stages, *self._map(
            "jacobians", "jacobian_analysis", FOLDERS.jacobians, FOLDERS.jacobian_plots,
            "jacobian", {**SIMULATED, "saliency": DATA_OF_MAPS},
            also=("analysis.saliency.direction_",))]

    def influences(self) -> list[Stage]:
        """Return the stages that measure influences of components on each other and the agent."""
        needs = {**SIMULATED, **DIRECTIONS, **BEHAVIOURS, "saliency": DATA_OF_MAPS}
        parameters = self._of("analysis.saliency.", "analysis.xplots.",
                              "analysis.agent_h.num_episodes",
                              "analysis.combined_agent_env_hx.num_samples")
        return [
            Stage("correlations", "xcorr_and_xcaus_plots", self._of_samples,
                  tuple(f"{folder}/**/*.*" for folder in CORRELATIONS),
                  number_of(f"{FOLDERS.correlation_plots}/*.png", "figures"),
                  needs=needs, parameters=parameters,
                  clears=CORRELATIONS, continued=from_start),
            Stage("consistency", "analysis.dynamics_grads_consistency_plots",
                  (*self._of_samples, *self._inside, *self._seed),
                  tuple(f"{folder}/**/*.*" for folder in COMPARISONS),
                  lambda output: influences_summary(ResultStore(
                      output / FOLDERS.comparison, COMPARISON_FILES).read("table")),
                  needs={**needs, "saliency_without_env_grads": DATA_OF_MAPS_WITHOUT},
                  files=(AGENT,), parameters=parameters,
                  clears=COMPARISONS, continued=from_start),
            Stage("causal_stories", "analysis.causal_stories", (*self._of_samples, *self._seed),
                  (f"{FOLDERS.stories}/**/*.*",), number_of(f"{FOLDERS.stories}/*.md", "pages"),
                  needs={**SIMULATED, **DIRECTIONS,
                         "consistency": tuple(f"{folder}/**/*.*" for folder in COMPARISONS)},
                  parameters=self._of("analysis.saliency.extrema_threshold",
                                      "analysis.agent_h.num_episodes"),
                  clears=(str(FOLDERS.stories),), continued=from_start),
            Stage("readout_weights", "plot_value_and_action_weights",
                  (*self._inside, *self._set, *self._analyses, *self._precomputed),
                  (f"{FOLDERS.readout}/*.*",), number_of(f"{FOLDERS.readout}/*.png", "figures"),
                  needs=DIRECTIONS, files=(AGENT,),
                  parameters=self._of("analysis.agent_h.num_episodes"),
                  clears=(str(FOLDERS.readout),), continued=from_start)]

    def optimised_starts(self) -> list[Stage]:
        starts, folder = self._preset.optimised_starts, "samples/made_to_order"
        return [Stage(
            "optimise_start", "generative.optimise_start",
            (*self._simulated, "--targets", *starts.targets, "--num_starts",
             str(starts.num_starts), "--iterations", str(starts.iterations), "--num_recorded",
             str(starts.num_recorded),
             *self._precomputed, "--output_dir", f"{OUTPUT}/{folder}"),
            (f"{folder}/**/*.*",), number_of(f"{folder}/penalty_*/sample_*", "starts"),
            needs={**ROLLOUTS, **DIRECTIONS}, files=(AGENT, SIMULATOR),
            parameters={**self._of("analysis.saliency.num_sim_steps",
                                   "analysis.saliency.common_timesteps",
                                   "analysis.saliency.direction_",
                                   "analysis.agent_h.num_episodes"), **self._sizes,
                        **object_parameters(self._preset.env_name)},
            clears=(folder,))]

    def interventions(self) -> list[Stage]:
        preset = self._preset.interventions
        return [Stage(
            "interventions", "compare_interventions",
            (*self._inside, *self._set, *self._game, "--num_episodes", str(preset.num_episodes),
             *_optional_flag("--directions", preset.directions),
             "--ablations", *preset.ablations,
             "--num_controls", str(preset.num_controls),
             "--seed", str(self._preset.seed + 1),  # not the levels of the recordings
             *self._precomputed, "--output_dir", f"{OUTPUT}/{FOLDERS.interventions}"),
            (f"{FOLDERS.interventions}/**/*.*",),
            lambda output: claims_summary(
                comparison_store(output / FOLDERS.interventions).read("effects")),
            needs=DIRECTIONS, files=(AGENT,),
            parameters={**self._of("analysis.agent_h.num_episodes",
                                   "analysis.saliency.direction_ids"),
                        **object_parameters(self._preset.env_name)},
            clears=(str(FOLDERS.interventions),), max_shards=preset.num_controls)]

    def panel(self) -> list[Stage]:
        number = self._parameters.get(BehavioursConfig).num_samples
        features, of_features = feature_flags(self._preset)
        if "feature_dreams" in of_features:
            features += ("--samples", "informed_init", f"../{FEATURE_SAMPLES}")
        return [Stage(
            "panel", "export_panel",
            ("--exp_name", self._exp_name, *self._set, *self._analyses,
             "--generated_data_dir", f"{OUTPUT}/samples", "--data_dir", f"{OUTPUT}/rollouts/data",
             "--num_behaviour_samples", str(number), *features),
            (f"{FOLDERS.panel}/**/*.*",),
            number_of(f"{FOLDERS.panel}/data/pictures_*.js", "samples"),
            needs={**ROLLOUTS, **SIMULATED, **DIRECTIONS, **BEHAVIOURS, "saliency": DATA_OF_MAPS,
                   "saliency_without_env_grads": DATA_OF_MAPS_WITHOUT, **of_features},
            files=(PAGE,), parameters={**self._of("analysis.agent_h.num_episodes"),
                                       **object_parameters(self._preset.env_name)},
            clears=(str(FOLDERS.panel),), continued=from_start)]


_SPECIFICITY = {"correlations": tuple[float | None, ...]}


def _optional_flag(flag: str, value: object | None) -> tuple[str, ...]:
    """Return a flag and its value; () if the value is None."""
    return () if value is None else (flag, str(value))


def _maps_and_specificity(patterns: Sequence[str]) -> Callable[[Path], str]:
    """Return a ``Stage.result`` that reports the number of saliency maps and the map similarity,
    which is stored as "specificity"."""
    def result(output: Path) -> str:
        files = find(output, patterns)
        maps = sum(path.match("saliency_*.json") for path in files)
        steps = [step for path in files if path.match("specificity*.json")
                 for step in check_entries(read_json(path), _SPECIFICITY, path, _SPECIFICITY)[
                     "correlations"] if step is not None]
        return f"{maps} saliency maps" + (
            f"; map similarity (mean |r| between functions) {np.mean(steps):.2f}"
            if steps else "")
    return result


def _newest(pattern: str) -> Callable[[Path], str]:
    return lambda output: max(output.glob(pattern), key=lambda path: path.stat().st_mtime).name


def _return_on_unseen_levels(output: Path) -> str:
    last = read_log(newest_run(agent_experiment(output))).iloc[-1]
    return f"return {last['val_mean_episode_rewards']:.2f} on unseen levels"


def _episodes(output: Path) -> str:
    index = RolloutFolder(output / "rollouts" / "data").index()
    return f"{index['episode'].nunique()} episodes, {len(index)} frames"


def _held_out_loss(output: Path) -> str:
    run = newest_simulator_run(simulator_experiment(output))
    assert run is not None  # the stage has just written it
    log = read_progress(run)
    return f"held-out loss {log['held_out_loss'].iloc[-1]:.4g}"


def _beaten(output: Path) -> str:
    path = output / "loss_over_time" / "settings.json"
    kinds = {"comparisons": tuple[dict, ...]}
    compared = [check_entries(comparison, {"better": int, "steps": list}, path,
                              ("better", "steps"))
                for comparison in check_entries(read_description(path), kinds, path, kinds)[
                    "comparisons"]]
    better = ", ".join(str(comparison["better"]) for comparison in compared)
    return f"beats {len(compared)} predictors at {better} of {len(compared[0]['steps'])} steps"


def _clusters(folder: Path) -> Callable[[Path], str]:
    def count(output: Path) -> str:
        (file,) = (output / folder).glob("cluster_means_*.npy")
        return f"{len(read_array(file))} clusters"
    return count
