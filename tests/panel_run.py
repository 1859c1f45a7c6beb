"""A small run for the tests of the interpretability panel, in the format of the earlier stages and
with numbers that can be computed by hand."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from agents.rollout_files import POSITION_COLUMNS, EpisodeArrays, RolloutFolder, RolloutWriter
from analysis.behaviours import BEHAVIOUR_FILES
from analysis.decision_results import DECISIONS
from analysis.memory.sparse_report import EXAMPLE_SIZE, FEATURE_DREAMS
from common.files import save_json, sha256
from common.results import ResultStore
from common.step_results import StepResults
from common.video import strip, write_video
from generative.saliency.files import SaliencyArrays, SaliencyFolder
from generative.sample_files import SampleArrays, SampleFolder, SampleOrigin, open_samples
from interventions.direction_folders import SPARSE_FEATURES
from interventions.hidden_states_folder import hidden_state_results

NUM_SAMPLES, NUM_SWAPPED, NUM_STEPS, NUM_RECORDED = 9, 4, 5, 300
FRAME = 64
NUM_EPISODES, BEHAVIOUR_SAMPLES = 7, 6
UNALTERED, SWAPPED = "informed_init", "informed_init_swapped_<i>0<b>_to_\"1\"&amp;,#%"
READ_AT = 2
START = 34  # frame of its episode at which the first sample starts
AGENT = "0" * 64  # digest of the agent
TYPES = ("value", "action", "hx_direction_1_ica", "value_without_env_grads")
TITLES = ("value", "most likely action", "IC 1", "value, without environment gradients")
LACKING = (5, "action")  # a sample, and the saliency type that it lacks
RED_OF_MAPS = (130, 250)  # red of the state's maps; green and blue are as in the pixel maps
BEHAVIOURS = np.array([2, -1, 0, 2, 2, 0])
DREAMS = "dreams/penalty_1"  # relative to the folder of the run
EXAMPLES = ((200, 30, 40), (40, 200, 30), (30, 40, 200))  # colours of the examples of feature 7
# Features as the page reads them: 7 has a name, 3 is never active on held-out levels, and 120 has
# no dream. The dream of feature 3 is sample 2 of DREAMS.
FEATURES = [
    {"number": 7, "name": "not wall in view", "label": "wall in view", "auc": [0.25, 0.2, 0.3],
     "frequency": 0.06, "kl": [0.02, 0.01, 0.03], "kl_control": 0.004,
     "success": [-0.3, -0.4, -0.2], "success_controls": [-0.05, 0.1], "claimed": True,
     "dream": {"step": 3, "score": 3.5, "recorded_score": 2.5, "dreamed": True, "active": False,
               "others_active": 0.5, "sample": NUM_SAMPLES + NUM_SWAPPED}},
    {"number": 120, "name": "", "label": "on ground", "auc": [0.625, None, None],
     "frequency": 0.5, "kl": [0.005, 0.004, 0.006], "kl_control": 0.003,
     "success": [0.01, -0.02, 0.04], "success_controls": [-0.05, 0.1], "claimed": False,
     "dream": None},
    {"number": 3, "name": "", "label": "", "auc": [None, None, None], "frequency": 0.0,
     "kl": [0.001, 0.0, 0.002], "kl_control": 0.003, "success": [0.0, -0.01, 0.01],
     "success_controls": [-0.05, 0.1], "claimed": False,
     "dream": {"step": 3, "score": 1.5, "recorded_score": 2.0, "dreamed": False, "active": True,
               "others_active": 0.25, "sample": NUM_SAMPLES + NUM_SWAPPED + 2}}]

# Coordinates are s = W (p / (2, 1, 1)), with p = (hx - mean) / std and the unmixing matrix W.
MATRICES = {"mean": [1, 0, 0, 0], "std": [2, 1, 1, 1], "components": np.eye(4),
            "variances": [4, 1, 1, 1], "unmixing": [[1, 0, 0], [0, 2, 0], [1, 0, 1]],
            "mixing": [[1, 0, 0], [0, 0.5, 0], [-1, 0, 1]]}


def coordinates(hx: np.ndarray) -> np.ndarray:
    """Return the coordinates (…, 3) of states (…, 4), by formulas derived by hand."""
    first = (hx[..., 0] - 1) / 4
    return np.stack([first, 2 * hx[..., 1], first + hx[..., 2]], axis=-1)


def coordinate_gradients(of_states: np.ndarray) -> np.ndarray:
    """Convert gradients with respect to states (…, 4) to gradients with respect to coordinates
    (…, 3), where hx_0 = 4 s_0 + 1, hx_1 = s_1 / 2 and hx_2 = s_2 - s_0."""
    g = of_states
    return np.stack([4 * g[..., 0] - g[..., 2], g[..., 1] / 2, g[..., 2]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Run:
    """Folder and arrays of a run.

    Attributes:
        folder: root folder of the run.
        samples: arrays of the two folders of samples, concatenated (13, 5, …).
        gradients: gradients with respect to hidden states by saliency type; NaN where missing
            (13, 5, 4).
        recorded: independent coordinates of the recorded states (300, 3).
        positions: positions of the player at the recorded states (300, 2); None if not recorded.
    """

    folder: Path
    samples: SampleArrays
    gradients: dict[str, np.ndarray]
    recorded: np.ndarray
    positions: np.ndarray | None

    @property
    def coordinates(self) -> np.ndarray:
        return coordinates(self.samples.hidden_states)

    def arguments(self, *more: str) -> list[str]:
        """Return the flags of export_panel.py."""
        return ["--interpreting_params_name", "tiny", "--generated_data_dir", str(self.folder),
                "--samples", UNALTERED, SWAPPED, "--save_dir", str(self.folder), "--num_episodes",
                str(NUM_EPISODES), "--num_behaviour_samples", str(BEHAVIOUR_SAMPLES), *more]


def write_run(folder: Path, with_recording: bool = False) -> Run:
    """Write a run that is always the same, with or without the recording of its starts."""
    rng = np.random.default_rng(0)
    total = NUM_SAMPLES + NUM_SWAPPED

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(total, NUM_STEPS, *shape)).astype(np.float32)

    # Every step of every sample has its own colour: red encodes the sample, green the step.
    frames = np.zeros((total, NUM_STEPS, FRAME, FRAME, 3), dtype=np.uint8)
    frames[..., 0] = (15 * np.arange(total))[:, None, None, None]
    frames[..., 1] = (50 * np.arange(NUM_STEPS))[:, None, None]
    logits = 2 * normal(15)
    samples = SampleArrays(
        frames, normal(), rng.random((total, NUM_STEPS), dtype=np.float32), 3 * normal(),
        normal(4), logits - np.log(np.exp(logits).sum(axis=2, keepdims=True)), normal(6),
        rng.normal(size=(total, 8)).astype(np.float32), rng.integers(0, 9, (total, NUM_STEPS)))
    gradients = {name: normal(4) for name in TYPES}
    gradients[LACKING[1]][LACKING[0]] = np.nan
    for name in TYPES[1:]:
        gradients[name][NUM_SAMPLES:] = np.nan
    for of_type in gradients.values():
        of_type[:, READ_AT + 1:] = np.where(np.isnan(of_type[:, READ_AT + 1:]), np.nan, 0)

    hidden = hidden_state_results(folder / "hx_analysis_precomp", NUM_EPISODES)
    hidden.path.mkdir(parents=True)
    recorded = rng.normal(size=(NUM_RECORDED, 3)).astype(np.float32)
    for name, matrix in {**MATRICES, "sources": recorded}.items():
        np.save(hidden.file(name), np.asarray(matrix, dtype=np.float32))
    save_json(hidden.settings_file, {"agent_sha256": AGENT})
    checksums = {path.name: sha256(path) for path in map(hidden.file, MATRICES)}
    positions = _record(folder) if with_recording else None
    description = {"agent_file": "runs/a/model.pth", "recording_sha256": RolloutFolder(
        folder / "recording").sha256(), "data_dir": str(folder / "recording"), "data_recording": {
        "env": {"env_name": "coinrun", "distribution_mode": "hard"}}} if with_recording else {}
    _write_samples(folder / UNALTERED, range(NUM_SAMPLES), None, samples, gradients, checksums,
                   description)
    _write_samples(folder / SWAPPED, range(NUM_SAMPLES, total), {"unaltered": UNALTERED}, samples,
                   gradients, checksums, {})
    behaviours = StepResults(folder / "combined_agent_env_hx_analysis_precomp", BEHAVIOUR_FILES,
                                  BEHAVIOUR_SAMPLES)
    behaviours.path.mkdir()
    np.save(behaviours.file("per_sample"), BEHAVIOURS)
    save_json(behaviours.settings_file, {"samples": str(folder / UNALTERED),
                                         "sample_numbers": list(range(BEHAVIOUR_SAMPLES))})
    return Run(folder, samples, gradients, recorded, positions)


def _record(folder: Path) -> np.ndarray:
    """Write the recording of the recorded states, and return positions of the player (300, 2).
    The last step of an episode repeats the position before it, as in figures. Frames are blue,
    and greener with each step.
    """
    writer = RolloutWriter(folder / "recording", {"positions": True})
    rng, shown = np.random.default_rng(1), []
    for number, rows in enumerate(np.array_split(np.arange(NUM_RECORDED), NUM_EPISODES)):
        length = len(rows)
        positions = np.round(10 * rng.random((length, 2)), 2)
        positions[-1] = np.nan
        shown += [*positions[:-1], positions[-2]]
        steps = pd.DataFrame({"level_seed": number, "episode_step": np.arange(length), "done": 0,
                              "reward": 0.0, "value": 0.0, "action": 0,
                              **dict(zip(POSITION_COLUMNS, positions.T))})
        frames = np.zeros((length, FRAME, FRAME, 3), np.uint8)
        frames[..., 1], frames[..., 2] = 5 * np.arange(length)[:, None, None], 200
        writer.add(number, EpisodeArrays(frames, np.zeros((length + 1, 4), np.float32),
                                         np.zeros((length, 15), np.float32), steps))
    writer.finish()
    save_json(hidden_state_results(folder / "hx_analysis_precomp", NUM_EPISODES).settings_file,
              {"agent_sha256": AGENT, "data_dir": str(folder / "recording")})
    return np.array(shown)


def _write_samples(path: Path, chosen: range, swap: dict | None, samples: SampleArrays,
                   gradients: dict[str, np.ndarray], checksums: dict[str, str],
                   description: dict) -> None:
    writer = open_samples(path, {"swap": swap, "agent_sha256": AGENT, **description})
    saliency = SaliencyFolder(path)
    for number, place in enumerate(chosen):
        writer.add(number, SampleArrays(*(getattr(samples, field.name)[place] for field in
                                          dataclasses.fields(SampleArrays))),
                   SampleOrigin(number, number, number % NUM_EPISODES, START + number)
                   if description else SampleOrigin(number))
        for index, name in enumerate(TYPES):
            of_states = gradients[name][place]
            if np.isnan(of_states).any():
                continue
            # Blue encodes the saliency type; red and green are those of the frame.
            processed = samples.frames[place].copy()
            processed[..., 2] = 80 + 50 * index
            of_map = None
            if swap is None:  # swapped samples lack maps, as with a vector simulator
                of_map = np.stack([processed] * len(RED_OF_MAPS))
                of_map[..., 0] = np.reshape(RED_OF_MAPS, (-1, 1, 1, 1))
            saliency.add(number, name, SaliencyArrays(
                np.zeros((NUM_STEPS, 3, FRAME, FRAME)), of_states, np.zeros((NUM_STEPS, 6)),
                processed, of_map))
            direction = "direction" in name
            saliency.write("description", number, name, value={
                "function": name, "common_timesteps": [READ_AT],
                "matrices_sha256": checksums if direction else None})


def saliency_folder(run: Run, name: str = UNALTERED) -> SaliencyFolder:
    return SaliencyFolder(run.folder / name)


def sample_folder(run: Run, name: str = UNALTERED) -> SampleFolder:
    return SampleFolder(run.folder / name)


def write_features(run: Run) -> list[str]:
    """Write FEATURES in the formats of analysis/sparse_features.py and analysis/feature_dreams.py,
    and return flags of export_panel.py."""
    features = ResultStore(run.folder / "features", SPARSE_FEATURES)
    features.open({"agent_sha256": AGENT})
    rows, effects, dreams = [], [], []
    for rank, each in enumerate(FEATURES, 1):
        of_label = dict(zip(("auc", "low_95", "high_95"), each["auc"]))
        rows.append({
            "dictionary": "sae_128", "feature": each["number"], "frequency": each["frequency"],
            "mean_activation": 1.0, "label": each["label"].replace(" ", "_") or "no label",
            **of_label, "p": 0.5, "p_holm": 1.0, "base": 0.5, "precision": 0.5,
            "named": bool(each["name"]), "named_shuffled": False, "rank": rank,
            **dict(zip(("kl", "kl_low", "kl_high"), each["kl"])), "kl_control": each["kl_control"]})
        for outcome, factor in (("length", 100), ("success", 1)):
            effects.append({
                "condition": f"feature_{each['number']}", "outcome": outcome,
                "claimed": each["claimed"], **{name: factor * value for name, value in zip(
                    ("effect", "low_95", "high_95", "control_low", "control_high"),
                    (*each["success"], *each["success_controls"]))}})
        if dream := each["dream"]:
            dreams.append({**dream, "feature": each["number"], "rank": rank, "label": "wall",
                           "sample": dream["sample"] - NUM_SAMPLES - NUM_SWAPPED,
                           "active": float(dream["active"])})
    table = pd.DataFrame(rows).sort_values("feature")
    others = table.assign(dictionary="pca", rank=np.nan, kl=np.nan, named=True)
    features.write("features", value=pd.concat([others, table]))
    features.write("effects", value=pd.DataFrame(effects))
    features.write("sae", value={
        "atoms": np.eye(4, dtype=np.float32), "centre": np.zeros(4, np.float32),
        "num_active": np.array(1), "encoder": None, "bias": None, "signed": np.array(False)})
    frames = [np.full((FRAME, FRAME, 3), colour, np.uint8) for colour in EXAMPLES]
    with features.file("examples", 7) as path:
        strip([frames[:2], frames[2:]], EXAMPLE_SIZE).save(path, "PNG")
    starts = ResultStore(run.folder / "dreams", FEATURE_DREAMS)
    starts.open({"agent_sha256": AGENT, "step": 3, "sae_sha256": sha256(features.file_of("sae"))})
    starts.write("dreams", value=pd.DataFrame(dreams))
    starts.write("starts", value=pd.DataFrame({"penalty": [1.0, 1.0, 0.0]}))
    shutil.copytree(run.folder / UNALTERED, run.folder / DREAMS)
    return ["--samples", UNALTERED, SWAPPED, DREAMS, "--features_dir", str(features.path),
            "--dreams_dir", str(starts.path)]


def write_decisions(run: Run) -> list[str]:
    """Write a failure with a fatal decision, one without, a solved episode and a failure without a
    film, as analysis/decisions.py does, and return flags of export_panel.py."""
    store = ResultStore(run.folder / "decisions", DECISIONS)
    store.open({"agent_sha256": AGENT})
    row = {"group": "failures", "number": 5, "level_seed": 8, "cause": "enemy_left",
           "class": "wrong", "before_end": 3.0, "action": 4.0, "best_action": 7.0,
           "best_rate": 0.75, "taken_rate": 0.125}
    lost = {**row, "number": 7, "cause": "lava", "class": "unavoidable", **dict.fromkeys(
        ("before_end", "action", "best_action", "best_rate", "taken_rate"), np.nan)}
    store.write("decisions", value=pd.DataFrame([
        row, lost, {**row, "group": "solved", "number": 6}, {**row, "number": 9}]))
    for number, length in ((5, 3), (7, 6)):
        with store.file("films", f"failures_{number}") as path:
            write_video(path, np.zeros((length, 32, 32, 3), np.uint8), fps=1)
    return ["--decisions_dir", str(store.path)]
