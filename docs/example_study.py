"""Does the agent's value fall when the coin is hidden? An example of a complete study.

AGENT=pretrained/coinrun_hard/model.pth
python record.py --agent_file $AGENT --num_episodes 40 --no_action_noise --logdir example
python docs/example_study.py --agent_file $AGENT --data_dir example/data
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from agents import RolloutFolder, level_states, load_agent
from agents.replay import recorded_game
from common.cli import seed
from common.options import ComputeOptions, command, option
from common.results import ResultStore
from envs import StateView, in_view, objects_of, undrawn
from stats.effects import Condition, Outcome, check_starts
from stats.report import Wording
from stats.study import run_study, study_schema

STUDY = study_schema("values without the coin", "docs/example_study.py")
OUTCOMES = [Outcome("value", "value estimate (return)")]
WORDING = Wording("Is the value lower without the coin?", "random places", equal=" in the frame, "
                  "which change by as much", alike="places that are no better than random ones")
MIN_PIXELS = 4  # smallest number of pixels that hiding the coin changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenCoinOptions(ComputeOptions):
    """Measure how the agent's value changes when the coin is not drawn."""

    agent_file: Path = option(help="the recorded agent")
    data_dir: Path = option(help="recording; a level counts if its coin comes into view")
    seed: int = option(0, "seed of the random places and of the bootstrap", type=seed)
    output_dir: Path = option(Path("analysis/hidden_coin"), "folder to write to")
    overwrite: bool = option(False, "delete the previous contents of the folder")


def hidden_coins(recording: RolloutFolder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each level, the first frame with the coin in view, uint8 (N, 64, 64, 3); what
    hiding the coin adds to it, int64 (N, 64, 64, 3); and the hidden state that enters the agent."""
    view, rows = StateView(recorded_game(recording)), []
    [coin] = [kind for kind in objects_of("coinrun") if kind.name == "coin"]
    for number in recording.index()["episode"].unique():
        episode = recording.episode(number)
        for row, state in level_states(recording, number, range(len(episode.frames) - 1)):
            change = view.draw(undrawn(state, coin)).astype(int) - episode.frames[row]
            if in_view(state, coin) and change.any(axis=-1).sum() >= MIN_PIXELS:
                rows.append((episode.frames[row], change, episode.hidden_states[row]))
                break
    check_starts(len(rows))
    frames, changes, states = map(np.stack, zip(*rows))
    return frames, changes, states


def changed(frames: np.ndarray, changes: np.ndarray, shift: Sequence[int]) -> np.ndarray:
    """Return frames with a shifted change, whose sign is reversed where the sum leaves 0..255."""
    moved = np.roll(changes, shift, axis=(1, 2))
    outside = (frames + moved < 0) | (frames + moved > 255)
    return np.clip(frames + np.where(outside, -moved, moved), 0, 255).astype(np.uint8)


def random_places(frames: np.ndarray, changes: np.ndarray, seed: int) -> list[list[int]]:
    """Return the 19 of 200 random shifts that change the frames most nearly as much as hiding."""
    shifts = np.random.default_rng(seed).integers(10, 54, (200, 2)).tolist()
    sizes = np.array([np.abs(changed(frames, changes, shift).astype(int) - frames).mean()
                      for shift in ([0, 0], *shifts)])
    return [shifts[place] for place in np.argsort(abs(sizes[1:] - sizes[0]))[:19]]


def measure(options: HiddenCoinOptions) -> pd.DataFrame:
    """Measure the value with and without the coin, and return the table of effects."""
    recording = RolloutFolder(options.data_dir)
    recording.check_agent(options.agent_file)
    policy = load_agent(options.agent_file, options.compute.device)
    frames, changes, states = hidden_coins(recording)
    shifts = random_places(frames, changes, options.seed)
    conditions = [Condition("drawn", "drawn", "hidden"),
                  Condition("hidden", "coin not drawn", "hidden", value=[0, 0]),
                  *(Condition(f"control_{number}", f"random place {number}", "hidden", True, shift)
                    for number, shift in enumerate(shifts))]
    store = ResultStore(options.output_dir, STUDY)
    store.open({"recording_sha256": recording.sha256(), "seed": options.seed,
                "conditions": {condition.name: {"shift": condition.value}
                               for condition in conditions}}, options.overwrite)

    @torch.no_grad()
    def values(condition: Condition) -> np.ndarray:
        seen = frames if condition.value is None else changed(frames, changes, condition.value)
        return policy(seen, states).values.cpu().double().numpy()[:, None]

    return run_study(store, conditions, OUTCOMES, values, options.seed, WORDING,
                     f"{options.agent_file.name} on {len(frames)} levels")


main = command(HiddenCoinOptions, measure)

if __name__ == "__main__":
    raise SystemExit(main())
