"""Build the interpretability panel: a folder with a page that shows simulated samples, step by
step, with their saliency and the agent's hidden state. The page works from disk and from any web
server."""

from __future__ import annotations

import time
from pathlib import Path

from agents.rollout_files import RolloutFolder
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.memory.sparse_report import FEATURE_DREAMS, SPARSE_FEATURES
from analysis.panel_contents import gather
from analysis.panel_files import PanelFolder, write_panel
from analysis.parameters import BehavioursConfig, add_analysis_flags
from common.cli import Parser, count
from common.errors import UserError, script_main
from common.results import ResultStore, Schema
from common.step_results import StepResults
from generative.flags import add_generated_data_flag
from generative.sample_files import SampleFolder
from interventions.flags import (
    add_direction_folder_flag,
    add_direction_number_flag,
    direction_episodes,
    directions_folder,
)
from interventions.hidden_states_folder import hidden_state_results

PAGE = Schema("panel of export_panel.py", "export_panel.py", results=PanelFolder.FILES,
              replaced=True)


def parser() -> Parser:
    flags = Parser(__doc__)
    add_analysis_flags(flags)
    flags.add_argument("--exp_name", default="Interpretability panel",
                       help="name of the experiment, used as the title of the page")
    add_generated_data_flag(flags)
    flags.add_argument("--samples", nargs="+", default=["informed_init"], metavar="FOLDER",
                       help="names of the sample folders to show")
    flags.add_argument("--data_dir", type=Path,
                       help="recording from which the informed starts were taken; its frames are "
                            "shown next to the simulated ones. By default the recording that "
                            "the metadata of the samples name, if it exists")
    flags.add_argument("--num_samples", type=count, default=None,
                       help="maximum number of samples per folder; all if not given")
    add_direction_folder_flag(flags)
    add_direction_number_flag(flags)
    flags.add_argument("--behaviours_dir", type=Path, help="folder of the behaviour analysis; "
                       "<save_dir>/combined_agent_env_hx_analysis_precomp if not given")
    flags.add_argument("--num_behaviour_samples", type=count,
                       key="analysis.combined_agent_env_hx.num_samples",
                       help="number of samples in the behaviour analysis, as in its file names; "
                            "the panel shows no behaviours if these files are missing")
    flags.add_argument("--features_dir", type=Path,
                       help="output folder of analysis/sparse_features.py, to show a page per "
                            "sparse feature")
    flags.add_argument("--dreams_dir", type=Path,
                       help="output folder of analysis/feature_dreams.py with these features; to "
                            "show its samples as well, give it as --generated_data_dir, and "
                            "penalty_1 as --samples")
    flags.add_argument("--max_states", type=count, default=20000,
                       help="maximum number of recorded states in the scatter plot, evenly spaced")
    flags.add_argument("--output_dir", type=Path,
                       help="output folder; <save_dir>/panel if not given")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args, explicit, parameters = parser().read(argv)
    output = PanelFolder(args.output_dir or parameters.folders.panel)
    store = ResultStore(output.path, PAGE)
    store.check_replaceable()
    generated = Path(parameters.common.generated_data_dir)
    folders = [SampleFolder(generated / name) for name in args.samples]
    hidden = hidden_state_results(directions_folder(args, parameters),
                                  direction_episodes(args, parameters))
    results = StepResults.open(
        args.behaviours_dir or parameters.folders.behaviours, BEHAVIOUR_FILES,
        parameters.get(BehavioursConfig).num_samples, "--num_behaviour_samples",
        parameters.is_given(BehavioursConfig, "num_samples"))
    behaviours: StepResults | None = results
    is_required = {"behaviours_dir", "num_behaviour_samples"} & explicit
    if not is_required and not results.file("per_sample").exists():
        print(f"behaviours are not shown: there is no file {results.file('per_sample')}")
        behaviours = None
    if args.dreams_dir and not args.features_dir:
        raise UserError("--dreams_dir holds starts of sparse features; give --features_dir as well")
    features, dreams = (path and ResultStore(path, schema) for path, schema in (
        (args.features_dir, SPARSE_FEATURES), (args.dreams_dir, FEATURE_DREAMS)))
    begin = time.perf_counter()
    recordings = find_recordings(folders, args.data_dir)
    content = gather(args.exp_name, folders, args.num_samples, hidden, behaviours, args.max_states,
                     recordings, (features, dreams) if features else None)
    lacking = int((~content.has_saliency.all(axis=1)).sum())
    print(f"{content.num_samples} samples with {len(content.types)} saliency types; {lacking} "
          "samples lack some", flush=True)
    with store.replace({
            "exp_name": args.exp_name,
            "samples": {str(folder.path): folder.description() for folder in folders},
            "num_samples": content.num_samples, "precomp_dir": str(hidden.path),
            "num_episodes": hidden.number, "hidden_states": hidden.settings(),
            "behaviours": behaviours.settings() if behaviours else None,
            "features": features.settings() if features else None,
            "dreams": dreams.settings() if dreams else None,
            "saliency_types": [of_type.name for of_type in content.types],
            "recorded_frames": sorted(recordings), "max_states": args.max_states}) as temporary:
        write_panel(temporary, content)
    print(f"wrote {output.path} in {time.perf_counter() - begin:.0f} s; open "
          f"{output.page_file.absolute()}")


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


if __name__ == "__main__":
    raise SystemExit(main())
