"""Events in simulations: deaths, coins and ends, compared with the game from the same starts.

Letters in shape comments: M worlds per start.
"""

from __future__ import annotations

import numpy as np
import torch

import generative.realism as realism
from agents.frames import to_frames
from common.errors import UserError
from generative.batches import in_batches
from generative.dataset import RolloutDataset
from generative.dream_life import BATCH, BEFORE_END, TIME_LIMIT, play_from
from generative.world_simulations import Simulations
from generative.world_tables import Table, event_probability
from stats.association import ratio
from stats.bootstrap import ClusterBootstrap

HORIZON, LONG = 16, 64  # actions
PRECISION = 0.8
_LAST = 16  # frames of a long rollout that are compared


def choose_starts(dataset: RolloutDataset, windows: np.ndarray, number: int, seed: int,
                  ) -> tuple[np.ndarray, np.ndarray]:
    """Draw windows, half of them 4 to 12 actions before the end of their episode.

    Args:
        windows: numbers of the windows to draw from; those that begin before their episode are
            left out.
        number: number of windows; fewer if there are not enough.

    Returns:
        Numbers of the windows, int64 (N,), and whether each was drawn because the end is near, bool
        (N,).

    Raises:
        UserError: if there is no window to draw from.
    """
    places = [dataset.place(window) for window in windows.tolist()]
    lengths = {episode: dataset.folder.array_files(episode).frames.shape[0]
               for episode in {place.episode for place in places}}
    frames = np.array([place.frame for place in places])
    last = np.array([lengths[place.episode] for place in places]) - 1
    order = np.random.default_rng(seed).permutation(len(windows))
    order = order[frames[order] >= dataset.num_init_steps - 1]
    near = np.isin(last - frames, BEFORE_END) & (last < TIME_LIMIT)
    chosen = order[near[order]][:number // 2]
    others = order[~np.isin(order, chosen)][:number - len(chosen)]
    if not len(order):
        raise UserError(f"{dataset.folder.path} has no window in which events can be measured; "
                        "record more episodes")
    return (windows[np.concatenate([chosen, others])],
            np.arange(len(chosen) + len(others)) < len(chosen))


def own_actions(card: Simulations, starts: np.ndarray, near_end: np.ndarray,
                num_worlds: int) -> Table:
    """Compare deaths and coins within HORIZON of the agent's most likely actions with the game.

    The frequencies that are calibrated are those of one outcome drawn in each world, because
    ``realism.calibration`` knows the sampling error of frequencies. The expected numbers are sums
    of probabilities.

    Args:
        starts: numbers of windows (N,).
        near_end: whether the recorded episode ends soon, bool (N,).
        num_worlds: M.
    """
    deaths, coins = [], []
    repeated = np.repeat(starts, num_worlds)
    seeds = np.arange(len(repeated)) + card.first_seed
    for rows in in_batches(np.arange(len(repeated)), card.batch_size):
        start = card.recorded_start(card.batch(card.dataset, repeated[rows]),
                                    torch.from_numpy(seeds[rows]))
        end, death = card.hazards(card.simulate(start, HORIZON + 1))
        died = event_probability(end, death)[-1]
        deaths.append(died)
        coins.append(event_probability(end, end)[-1] - died)
    predicted = {name: np.concatenate(parts).reshape(-1, num_worlds).clip(0, 1)
                 for name, parts in (("death", deaths), ("coin", coins))}  # (N, M)
    drawn = np.random.default_rng(card.seed).random((len(starts), num_worlds))
    below, above = predicted["death"], predicted["death"] + predicted["coin"]
    sampled = {"death": drawn < below, "coin": (drawn >= below) & (drawn < above)}
    real = _real_events(card, starts, HORIZON)
    episodes = card.dataset.episodes_of(starts)
    table: Table = {"worlds_per_start": num_worlds}
    for group, rows in (("all", near_end | True), ("near_end", near_end),
                        ("anywhere", ~near_end)):
        table[group] = {"starts": int(rows.sum()), "episodes": len(set(episodes[rows]))}
        for name in predicted if rows.any() else ():
            frequency = (sampled[name] if num_worlds > 1 else predicted[name]).mean(axis=1)
            expected, occurred = predicted[name].mean(axis=1)[rows], real[name][rows]
            measured = vars(realism.calibration(
                frequency[rows], occurred, episodes[rows],
                num_worlds if num_worlds > 1 else None, card.seed))
            bootstrap = ClusterBootstrap(episodes[rows], card.seed)
            table[group][name] = {
                "real": int(occurred.sum()), "expected": float(expected.sum()), **measured,
                "expected_over_real": ratio(expected, occurred, episodes[rows], bootstrap),
                "probability_if_it_occurs": ratio(expected * occurred, occurred,
                                                  episodes[rows], bootstrap),
                "probability_otherwise": ratio(expected * ~occurred, ~occurred,
                                               episodes[rows], bootstrap)}
    return table


def recorded_actions(card: Simulations) -> Table:
    """Measure how well deaths are predicted at their step, given the recorded actions.

    The windows are evenly spaced, see ``Simulations.spaced``, so deaths have their natural rate. A
    case is a step before or at the end of the episode, and its score is the largest probability of
    a death at this step, the one before and the one after. Steps one or two before a death do not
    count, because their scores include its neighbourhood.
    """
    data = card.with_steps(HORIZON + 2)
    starts = card.spaced(data.num_init_steps - 1)
    parts, ends = [], []
    for part in in_batches(starts, card.batch_size):
        batch = card.batch(data, part)
        start = card.recorded_start(batch, torch.from_numpy(part))
        end, death = card.hazards(card.simulate(start, HORIZON + 2, batch.actions))
        score = np.maximum(np.maximum(death[:-2], death[1:-1]), death[2:])  # steps 1 to HORIZON
        terminal = batch.terminals.cpu().numpy()[1:-1] > 0
        at = np.where(terminal.any(axis=0), terminal.argmax(axis=0), HORIZON)  # (B,)
        coin = (batch.rewards.cpu().numpy()[1:-1] * terminal > 0).any(axis=0)
        late = [data.place(number).frame + 1 + step >= TIME_LIMIT
                for number, step in zip(part.tolist(), at.tolist())]
        dies = terminal.any(axis=0) & ~coin & ~np.array(late)
        steps = np.arange(HORIZON)[:, None]
        label = dies & (steps == at)
        ends_next = ~terminal.any(axis=0) & (batch.terminals[-1].cpu().numpy() > 0)
        counts = np.where(dies, label | (steps < at - 2),
                          (steps <= at) & (~ends_next | (steps < HORIZON - 2)))
        parts.append(tuple(values[counts] for values in np.broadcast_arrays(
            score, label, data.episodes_of(part))))
        ended = event_probability(end, end)
        until = np.where(terminal.any(axis=0), np.minimum(at + 2, HORIZON + 1), HORIZON)
        ends.append((ended[until, np.arange(len(part))], dies, coin,
                     data.episodes_of(part)))
    scores, labels, episodes = map(np.concatenate, zip(*parts))
    ended, dies, coin, of_window = map(np.concatenate, zip(*ends))
    bootstrap = ClusterBootstrap(of_window, card.seed)
    return {"windows": len(starts), "deaths": len(set(of_window[dies])),
            "windows_with_a_death": int(dies.sum()), "cases": len(scores),
            "share_of_deaths": float(labels.mean()),
            "auc_of_a_death": realism.auc(scores, labels, episodes, card.seed),
            f"recall_at_precision_{PRECISION}": realism.recall_at_precision(
                scores, labels, episodes, PRECISION, card.seed),
            "probability_of_an_end": {
                name: ratio(ended * rows, rows, of_window, bootstrap)
                for name, rows in (("with_a_death", dies), ("with_a_coin", coin),
                                   ("without_an_end", ~dies & ~coin))}}


def long_rollouts(card: Simulations, starts: np.ndarray) -> Table:
    """Compare LONG of the agent's own actions with the game, in one world per start.

    Static rollouts and black pixels are measured in rollouts that probably have not ended, and
    in recorded windows of the same length that have not.
    """
    rows: list[tuple] = []
    for part in in_batches(starts, card.batch_size):
        start = card.recorded_start(card.batch(card.dataset, part), torch.from_numpy(part))
        steps = card.simulate(start, LONG + 1)
        end, _ = card.hazards(steps)
        ended = event_probability(end, end)[-1]
        rows.append((ended, ended < 0.5, *_motion(
            to_frames(torch.stack([steps[0].images, *(step.images for step in steps[-_LAST:])],
                                  dim=1)))))
    ended, lives, static, first, last = map(np.concatenate, zip(*rows))
    data = card.with_steps(LONG + 1)
    recorded = []
    for part in in_batches(starts, card.batch_size):
        batch = card.batch(data, part)
        frames = to_frames(batch.images.transpose(0, 1))
        recorded.append((~(batch.terminals > 0).any(dim=0).cpu().numpy(), *_motion(
            np.concatenate([frames[:, :1], frames[:, -_LAST:]], axis=1))))
    still_lives, real_static, real_first, real_last = map(np.concatenate, zip(*recorded))
    real = _real_events(card, starts, LONG)["end"]
    episodes = card.dataset.episodes_of(starts)
    bootstrap = ClusterBootstrap(episodes, card.seed)

    def pair(generated, of_generated, of_game, game) -> Table:
        return {"simulator": ratio(generated * of_generated, of_generated, episodes, bootstrap),
                "game": ratio(game * of_game, of_game, episodes, bootstrap)}

    everywhere = np.ones(len(starts), bool)
    return {"starts": len(starts), "not_ended": int(lives.sum()),
            "game_not_ended": int(still_lives.sum()),
            "ended": {**pair(ended, everywhere, everywhere, real),
                      "difference": card.mean(ended - real, episodes)},
            "static": pair(static, lives, still_lives, real_static),
            "black_at_0": pair(first, everywhere, everywhere, real_first),
            f"black_at_{LONG}": pair(last, lives, still_lives, real_last)}


def _real_events(card: Simulations, starts: np.ndarray, horizon: int) -> dict[str, np.ndarray]:
    """Return whether the game ends within ``horizon`` of the agent's most likely actions from
    windows (N,), and whether by a death or with a coin, bool (N,) each."""
    events: dict[str, list] = {"end": [], "coin": [], "death": []}
    for part in in_batches(starts, BATCH):
        places = [card.dataset.place(number) for number in part.tolist()]
        _, rewards, ends = play_from(card.simulator.agent, card.compute, card.dataset.folder,
                                     places, horizon)
        at = np.array([place.frame for place in places]) + np.arange(horizon + 1)[:, None]
        coin = (ends & (rewards > 0)).any(axis=0)
        events["end"].append(ends.any(axis=0))
        events["coin"].append(coin)
        events["death"].append((ends & (at < TIME_LIMIT)).any(axis=0) & ~coin)
    return {name: np.concatenate(parts) for name, parts in events.items()}


def _motion(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return whether the last _LAST frames of rollouts (B, 1 + _LAST, H, W, C) are static, and the
    shares of black pixels in the first and the last frame (B,)."""
    return (realism.static_rollouts(frames, _LAST), realism.black_share(frames[:, 0]),
            realism.black_share(frames[:, -1]))
