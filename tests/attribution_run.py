"""A small run of the attribution scripts, for the tests of the attribution page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import record
from agents.rollout_files import RolloutFolder
from attribution import attribute as attribute_script
from attribution import edit_agent, features, page
from attribution.page_files import AttributionPageFolder
from attribution.results import INPUT, AttributionStore
from attribution.trajectories import Trajectories

LAYERS = ("block3", "embedder.relufc")  # a layer with cells and a layer of units
OUTPUTS = ("value", "log_prob_any_right")  # the second output only at block3
NUM_FEATURES = 5
NUM_STEPS = 110
LAGS = 3  # memory steps of the first output at block3


@dataclasses.dataclass(frozen=True)
class AttributionRun:
    """Run folder and agent file of an attribution run."""

    folder: Path
    agent: Path

    @property
    def recording(self) -> RolloutFolder:
        return RolloutFolder(self.folder / "data")

    @property
    def attributions(self) -> AttributionStore:
        return AttributionStore(self.folder / "attribution")

    def read(self, entry: str, *key: object) -> SimpleNamespace:
        """Return the arrays of an item of the attributions."""
        return SimpleNamespace(**self.attributions.read(entry, *key))

    @property
    def steps(self) -> Trajectories:
        return self.attributions.trajectories()

    def arguments(self, output: Path, *more: str) -> list[str]:
        """Return the command-line arguments of attribution.page."""
        return ["--agent_file", str(self.agent), "--data_dir", str(self.recording.path),
                "--features_dir", str(self.folder / "features"), "--attribution_dir",
                str(self.attributions.path), "--output_dir", str(output), *more]


def write_run(folder: Path, agent: Path) -> AttributionRun:
    """Record fruitbot, extract features, and attribute outputs along two trajectories."""
    play(folder, agent)
    assert features.main([
        "--agent_file", str(agent), "--data_dir", str(folder / "data"), "--device", "cpu",
        "--layers", *LAYERS, "--num_observations", "80", "--nmf_features",
        str(NUM_FEATURES), "--output_dir", str(folder / "features")]) == 0
    attribute(folder, agent, LAYERS[:1], OUTPUTS[:1], "--memory_steps", str(LAGS))
    attribute(folder, agent, LAYERS[:1], OUTPUTS, "--gradient_activation")
    attribute(folder, agent, (INPUT, *LAYERS[1:]), OUTPUTS[:1])
    return AttributionRun(folder, agent)


def write_edited(run: AttributionRun, folder: Path) -> AttributionRun:
    """Write a run of an agent with three features ablated, on the same levels and features."""
    agent = folder / "edited.pth"
    assert edit_agent.main(["--agent_file", str(run.agent), "--features_dir",
                            str(run.folder / "features"), "--layer", LAYERS[0], "--features", "0",
                            "1", "2", "--output", str(agent)]) == 0
    play(folder, agent)
    (folder / "features").symlink_to(run.folder / "features")
    attribute(folder, agent, LAYERS[:1], OUTPUTS, "--gradient_activation")
    attribute(folder, agent, (INPUT, *LAYERS[1:]), OUTPUTS[:1])
    return AttributionRun(folder, agent)


def play(folder: Path, agent: Path) -> None:
    assert record.main([
        "--model_file", str(agent), "--logdir", str(folder), "--num_episodes", "6",
        "--param_name", "tiny", "--env_name", "fruitbot", "--seed", "3", "--precision", "float32",
        "--device", "cpu", "--no_action_noise", "--no_videos"]) == 0


def attribute(folder: Path, agent: Path, layers: Sequence[str], outputs: Sequence[str],
              *more: str) -> None:
    assert attribute_script.main([
        "--agent_file", str(agent), "--data_dir", str(folder / "data"), "--device", "cpu",
        "--features_dir", str(folder / "features"), "--layers", *layers, "--outputs", *outputs,
        "--num_trajectories", "2", "--num_steps", str(NUM_STEPS), "--output_dir",
        str(folder / "attribution"), "--tolerance", "0.05", *more]) == 0


def exported(run: AttributionRun, output: Path, *more: str) -> AttributionPageFolder:
    """Export the page of a run."""
    assert page.main(run.arguments(output, *more)) == 0
    return AttributionPageFolder(output)


def refused(run: AttributionRun, output: Path, capsys, *more: str) -> str:
    """Return the error message of attribution.page, and check that it leaves no output."""
    before = sorted(output.rglob("*")) if output.exists() else None
    assert page.main(run.arguments(output, *more)) == 2
    assert (sorted(output.rglob("*")) if output.exists() else None) == before
    assert not list(output.parent.glob(".*partial*"))
    return capsys.readouterr().err.strip().splitlines()[-1]


def hues(count: int) -> np.ndarray:
    """Return unit colour vectors of features (count, 3), independently of the page's code."""
    anchors = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1], [1, 0, 1]], float)
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    found = []
    for f in range(count):
        n, d = divmod(6 * f / count, 1)
        weight = 1 - np.sin(np.pi * (1 - d) / 2) if n % 2 else np.sin(np.pi * d / 2)
        colour = (1 - weight) * anchors[int(n)] + weight * anchors[(int(n) + 1) % 6]
        found.append(colour / np.linalg.norm(colour))
    return np.array(found)
