"""Build the interpretability panel, see ``PanelOptions``."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from agents.rollout_files import RolloutFolder
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.decision_results import DECISIONS
from analysis.memory.sparse_report import FEATURE_DREAMS
from analysis.panel_contents import gather, read_failures
from analysis.panel_files import PanelFolder, write_panel
from analysis.parameters import BehavioursConfig
from common.cli import count
from common.errors import UserError
from common.options import LogOptions, command, option
from common.results import ResultStore, Schema
from common.step_results import StepResults
from generative.flags import GeneratedDataOptions
from generative.sample_files import SampleFolder
from interventions.direction_folders import SPARSE_FEATURES
from interventions.flags import DirectionOptions
from interventions.hidden_states_folder import hidden_state_results

PAGE = Schema("panel of export_panel.py", "export_panel.py", results=PanelFolder.FILES,
              replaced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PanelOptions(GeneratedDataOptions, DirectionOptions, LogOptions):
    """Build the interpretability panel: a folder with a page that shows simulated samples, step by
    step, with their saliency and the agent's hidden state. The page works from disk and from any
    web server.
    """

    exp_name: str = option("Interpretability panel",
                           "name of the experiment, used as the title of the page")
    samples: tuple[str, ...] = option(("informed_init",), "names of the sample folders to show",
                                      metavar="FOLDER")
    data_dir: Path | None = option(
        None, "recording from which the informed starts were taken; its frames are shown next to "
              "the simulated ones. By default the recording that the metadata of the samples "
              "name, if it exists")
    num_samples: int | None = option(
        None, "maximum number of samples per folder; all if not given", type=count)
    behaviours_dir: Path | None = option(
        None, "folder of the behaviour analysis; "
              "<save_dir>/combined_agent_env_hx_analysis_precomp if not given")
    num_behaviour_samples: int | None = option(
        None, "number of samples in the behaviour analysis, as in its file names; the panel shows "
              "no behaviours if these files are missing",
        type=count, key="analysis.combined_agent_env_hx.num_samples")
    features_dir: Path | None = option(
        None, "output folder of analysis/sparse_features.py, to show a page per sparse feature")
    dreams_dir: Path | None = option(
        None, "output folder of analysis/feature_dreams.py with these features; to show its "
              "samples as well, give it as --generated_data_dir, and penalty_1 as --samples")
    decisions_dir: Path | None = option(
        None, "output folder of analysis/decisions.py, to show the films of fatal decisions")
    max_states: int = option(
        20000, "maximum number of recorded states in the scatter plot, evenly spaced", type=count)
    output_dir: Path | None = option(None, "output folder; <save_dir>/panel if not given")

    def behaviours(self) -> StepResults | None:
        """Return the behaviours to show, or None if they are missing and were not asked for."""
        results = StepResults.open(
            self.behaviours_dir or self.parameters.folders.behaviours, BEHAVIOUR_FILES,
            self.parameters.get(BehavioursConfig).num_samples, "--num_behaviour_samples",
            self.parameters.is_given(BehavioursConfig, "num_samples"))
        is_required = {"behaviours_dir", "num_behaviour_samples"} & self.given
        if is_required or results.file("per_sample").exists():
            return results
        print(f"behaviours are not shown: there is no file {results.file('per_sample')}")
        return None


def export_panel(options: PanelOptions) -> Path:
    """Write the panel, and return its page."""
    output = PanelFolder(options.output_dir or options.parameters.folders.panel)
    store = ResultStore(output.path, PAGE)
    store.check_replaceable()
    folders = [SampleFolder(options.generated_data / name) for name in options.samples]
    hidden = hidden_state_results(options.directions_folder, options.direction_episodes)
    behaviours = options.behaviours()
    if options.dreams_dir and not options.features_dir:
        raise UserError("--dreams_dir holds starts of sparse features; give --features_dir as well")
    features, dreams = (ResultStore(path, schema) if path else None for path, schema in (
        (options.features_dir, SPARSE_FEATURES), (options.dreams_dir, FEATURE_DREAMS)))
    begin = time.perf_counter()
    recordings = find_recordings(folders, options.data_dir)
    content = gather(options.exp_name, folders, options.num_samples, hidden, behaviours,
                     options.max_states, recordings, (features, dreams) if features else None)
    decisions = ResultStore(options.decisions_dir, DECISIONS) if options.decisions_dir else None
    if decisions:
        agent = folders[0].description().get("agent_sha256")
        content = dataclasses.replace(content, failures=read_failures(decisions, agent))
    lacking = int((~content.has_saliency.all(axis=1)).sum())
    print(f"{content.num_samples} samples with {len(content.types)} saliency types; {lacking} "
          "samples lack some", flush=True)
    with store.replace({
            "exp_name": options.exp_name,
            "samples": {str(folder.path): folder.description() for folder in folders},
            "num_samples": content.num_samples, "precomp_dir": str(hidden.path),
            "num_episodes": hidden.number, "hidden_states": hidden.settings(),
            "behaviours": behaviours.settings() if behaviours else None,
            "features": features.settings() if features else None,
            "dreams": dreams.settings() if dreams else None,
            "decisions": decisions.settings() if decisions else None,
            "saliency_types": [of_type.name for of_type in content.types],
            "recorded_frames": sorted(recordings),
            "max_states": options.max_states}) as temporary:
        write_panel(temporary, content)
    print(f"wrote {output.path} in {time.perf_counter() - begin:.0f} s; open "
          f"{output.page_file.absolute()}")
    return output.page_file


def find_recordings(folders: list[SampleFolder], data_dir: Path | None
                    ) -> dict[str, RolloutFolder]:
    """Return the recordings from which samples start, by name of the folder of samples.

    Folders with random starts, and folders whose recording is not available, are left out.

    Args:
        folders: folders of samples.
        data_dir: the recording; None for the recording named in the metadata of the samples.

    Raises:
        UserError: if ``data_dir`` is not the recording of the samples.
    """
    recordings = {}
    for folder in folders:
        description = folder.description()
        checksum, name = description.get("recording_sha256"), folder.path.name
        if not checksum:
            continue
        recording = RolloutFolder(data_dir or Path(description["data_dir"]))
        if recording.index_file.is_file() and recording.sha256() == checksum:
            recordings[name] = recording
        elif data_dir:
            raise UserError(f"{data_dir} is not the recording from which the samples in "
                            f"{folder.path} start; give {description['data_dir']}")
        else:
            print(f"recorded frames of {name} are not shown: {recording.path} does not exist or "
                  "has changed; give --data_dir")
    return recordings


main = command(PanelOptions, export_panel)

if __name__ == "__main__":
    raise SystemExit(main())
