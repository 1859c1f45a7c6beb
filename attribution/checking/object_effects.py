"""Effects of single objects on later outputs of the agent, measured in the real game.

A *pair* is a recorded frame, at row t of an episode, and an object in view. The *total effect* of
the object at lag k is the change of an output at row t + k if the object is removed from the game
for good at row t; everything that follows from this counts, except that the recorded actions are
repeated. The *direct effect* is the change if the recorded frames from row t on are rendered
without the object; the game itself, and so the agent's way, stays as recorded. In both cases the
agent enters row t with its recorded hidden state, and the game's random generators continue from
their recorded states. An effect is the output without the object minus the output with it. Lags at
which either episode has ended have no effect (NaN).

Letters in shape comments: N pairs, I initial frames of a simulation, K largest lag, L lags,
H W C a frame, D hidden units, J outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from agents.acting import run_policy
from agents.networks import Policy
from agents.outputs import Output
from agents.replay import level_states, recorded_game
from attribution.recordings import Recording
from common.devices import Compute
from envs.level_state import LevelState
from envs.objects import GameObject, SingleObject, single_objects
from envs.procgen_env import EnvConfig, ProcgenVectorEnv, StateView

TOTAL, DIRECT = EFFECTS = ("total", "direct")
MIN_PIXELS = 3  # fewest visible pixels of an object; a coin has four to seven
_RANDOM_ROWS, _LAST_ROWS, _END = 12, 3, 24  # candidate rows of an episode; see choose_pairs


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A recorded frame and an object in view.

    Attributes:
        episode, row: episode and row of the frame.
        thing: the object.
        states: level states of rows ``row`` - I + 1 to the last row at which an effect is measured.
        initial: number of initial frames I.
    """

    episode: int
    row: int
    thing: SingleObject
    states: Sequence[LevelState]
    initial: int

    @property
    def state(self) -> LevelState:
        """Level state of the frame."""
        return self.states[self.initial - 1]


@dataclasses.dataclass(frozen=True, eq=False)
class Replays:
    """Frames of pairs with and without their objects.

    Attributes:
        initial: recorded frames of rows t - I + 1 to t, uint8 (I, N, H, W, C).
        initial_undrawn: the same frames without the object, uint8 (I, N, H, W, C).
        recorded: recorded frames of rows t to t + K, uint8 (K + 1, N, H, W, C).
        undrawn: the same frames without the object (direct effect), uint8 (K + 1, N, H, W, C).
        removed: frames of the game without the object (total effect), uint8 (K + 1, N, H, W, C).
        going, removed_going: whether the recorded episode, and that without the object, still goes
            on at each row, bool (K + 1, N). Frames of rows after the end are meaningless.
        apart: distance between the player's positions with and without the object, in squares,
            float64 (K + 1, N); meaningless after the end of either episode.
        entering: recorded hidden states before row t, float32 (N, D).
        actions: recorded actions of rows t - 1 to t + K, int64 (K + 2, N); 0 after the end.
    """

    initial: np.ndarray
    initial_undrawn: np.ndarray
    recorded: np.ndarray
    undrawn: np.ndarray
    removed: np.ndarray
    going: np.ndarray
    removed_going: np.ndarray
    apart: np.ndarray
    entering: np.ndarray
    actions: np.ndarray

    @property
    def masks(self) -> np.ndarray:
        """Pixels of the object in each initial frame, bool (I, N, H, W)."""
        return (self.initial != self.initial_undrawn).any(axis=-1)

    @property
    def both_going(self) -> np.ndarray:
        """Whether each effect can be measured at each row, bool (2, K + 1, N)."""
        return np.stack([self.going & self.removed_going, self.going])


def choose_pairs(recording: Recording, episode: int, kinds: Sequence[GameObject], initial: int,
                 last_lag: int, seed: int) -> list[Pair]:
    """Choose at most one frame with an object of each kind in an episode.

    Candidates are random rows; three of the last 24 rows that have all lags are added, because some
    objects, such as CoinRun's coin, are seen at the end only. Kinds share a frame where possible,
    beginning with the kind that the fewest candidates show. The object is drawn among those of the
    kind that show at least ``MIN_PIXELS`` pixels.

    Args:
        recording: the recording.
        episode: number of the episode.
        kinds: kinds of object.
        initial: I, number of initial frames.
        last_lag: K, largest lag.
        seed: seed of the draws.

    Raises:
        UserError: if the recording cannot be replayed.
    """
    length = recording.lengths[episode]
    rows = np.arange(initial - 1, length - 1)  # the episode goes on for at least one more step
    if not len(rows):
        return []
    rng = np.random.default_rng([seed, episode])
    ends = rng.permutation(rows[-_END:-last_lag])[:_LAST_ROWS]
    candidates = np.union1d(rng.permutation(rows)[:_RANDOM_ROWS], ends)
    needed = np.unique(np.clip(candidates[:, None] + np.arange(1 - initial, last_lag + 1), 0,
                               length - 1))
    states = dict(level_states(recording.folder, episode, needed.tolist()))
    seen: dict[str, dict[int, list[Pair]]] = {}
    with contextlib.closing(StateView(recorded_game(recording.folder))) as view:
        for row in candidates.tolist():
            following = [states[other] for other in range(row - initial + 1, min(
                row + last_lag + 1, length))]
            frame = view.draw(states[row].to_bytes())
            for kind in kinds:
                for thing in single_objects(states[row], kind):
                    undrawn = view.draw(thing.undrawn_in(states[row]).to_bytes())
                    if (undrawn != frame).any(axis=-1).sum() >= MIN_PIXELS and all(
                            thing.is_known_in(state) for state in following):
                        seen.setdefault(kind.name, {}).setdefault(row, []).append(
                            Pair(episode, row, thing, following, initial))
    chosen: list[Pair] = []
    for by_row in sorted(seen.values(), key=len):
        shared = [pair.row for pair in chosen if pair.row in by_row]
        row = shared[0] if shared else int(rng.choice(list(by_row)))
        chosen.append(by_row[row][rng.integers(len(by_row[row]))])
    return chosen


def replay_pairs(recording: Recording, pairs: Sequence[Pair], last_lag: int) -> Replays:
    """Render the frames of pairs with and without their objects.

    Args:
        recording: the recording.
        pairs: the pairs (N).
        last_lag: K, largest lag; at most that of ``choose_pairs``.
    """
    config = recorded_game(recording.folder)
    initial, count = pairs[0].initial, len(pairs)
    shape = (count, *recording.read(np.array([[pairs[0].episode, 0]])).frames.shape[1:])
    frames, undrawn = np.zeros((2, initial + last_lag, *shape), np.uint8)
    going = np.zeros((last_lag + 1, count), bool)
    actions, entering = np.zeros((last_lag + 2, count), np.int64), []
    with contextlib.closing(StateView(config)) as view:
        for number, pair in enumerate(pairs):
            states = pair.states[:initial + last_lag]
            rows = np.arange(pair.row - initial + 1, pair.row - initial + 1 + len(states))
            recorded = recording.read(np.stack([np.full(len(rows), pair.episode), rows], axis=1))
            frames[:len(rows), number] = recorded.frames
            going[:len(rows) - initial + 1, number] = True
            entering.append(recorded.entering[initial - 1])
            if initial > 1:
                actions[:len(rows) - initial + 2, number] = recorded.actions[initial - 2:]
            else:
                actions[1:len(rows) + 1, number] = recorded.actions
            for place, state in enumerate(states):
                undrawn[place, number] = view.draw(pair.thing.undrawn_in(state).to_bytes())
    removed, removed_going, positions = _play_without(config, pairs, actions[1:-1])
    own = np.zeros((last_lag + 1, count, 2))
    for number, pair in enumerate(pairs):
        for lag, state in enumerate(pair.states[initial - 1:initial + last_lag]):
            own[lag, number] = state.player["x"], state.player["y"]
    return Replays(frames[:initial], undrawn[:initial], frames[initial - 1:],
                   undrawn[initial - 1:], removed, going, removed_going,
                   np.hypot(*np.moveaxis(positions - own, -1, 0)), np.stack(entering), actions)


def _play_without(config: EnvConfig, pairs: Sequence[Pair], actions: np.ndarray
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Play on from the frames of pairs, without their objects.

    Args:
        config: the game.
        pairs: the pairs (N).
        actions: actions of rows t to t + K - 1, int64 (K, N).

    Returns:
        Frames, uint8 (K + 1, N, H, W, C); whether the episode still goes on, bool (K + 1, N); and
        the player's positions in squares, float64 (K + 1, N, 2).
    """
    frames, going, positions = [], [np.ones(len(pairs), bool)], []
    with contextlib.closing(ProcgenVectorEnv(config, len(pairs), 0, 0)) as env:
        env.observe()
        env.set_state([pair.thing.removed_from(pair.state).to_bytes() for pair in pairs])
        for step in range(len(actions) + 1):
            observation = env.observe()
            frames.append(observation.frames)
            if step:
                going.append(going[-1] & ~observation.first)
            players = [LevelState.parse(state).player for state in env.get_state()]
            positions.append([(float(player["x"]), float(player["y"])) for player in players])
            if step < len(actions):
                env.act(actions[step].astype(np.int32))
    return np.stack(frames), np.stack(going), np.array(positions)


@torch.no_grad()
def measure_effects(policy: Policy, compute: Compute, replays: Replays, outputs: Sequence[Output],
                    lags: Sequence[int]) -> np.ndarray:
    """Measure the effects of objects on outputs of the agent.

    Args:
        policy: the agent.
        compute: device and precision.
        replays: frames of N pairs.
        outputs: J outputs; those that depend on an action read the recorded one.
        lags: lags.

    Returns:
        Total and direct effects, float64 (2, J, L, N); NaN where an episode has ended.
    """
    values = np.stack([_outputs(policy, compute, frames, replays, outputs)[:, list(lags)]
                       for frames in (replays.removed, replays.undrawn, replays.recorded)])
    return np.where(replays.both_going[:, None, list(lags)], values[:2] - values[2], np.nan)


def _outputs(policy: Policy, compute: Compute, frames: np.ndarray, replays: Replays,
             outputs: Sequence[Output]) -> np.ndarray:
    """Show frames (K + 1, N, H, W, C) to the agent, and return its outputs (J, K + 1, N)."""
    hidden = torch.from_numpy(replays.entering).to(compute.device)
    actions = torch.from_numpy(replays.actions[1:]).to(compute.device)
    values = []
    for shown, taken in zip(frames, actions):
        result = run_policy(policy, compute, shown, hidden)
        hidden = result.hidden_states
        values.append(torch.stack([output(result, taken) for output in outputs]))
    return torch.stack(values, dim=1).double().cpu().numpy()
