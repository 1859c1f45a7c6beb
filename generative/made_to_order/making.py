"""Searching the starts of all orders and writing them as samples, as far as they are not there.

An order is searched by itself and its starts have their place in one batch, so what it gets does
not depend on other orders, nor on what was there already when the command was given.

Letters in shape comments: K starts of an order, N recorded starts, T simulated steps, B samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from common.devices import Compute
from common.progress import Progress
from common.signals import deferred_signals
from common.video import enlarge, mark_action, side_by_side, write_strip
from generative.dataset import RolloutDataset, Windows
from generative.made_to_order.files import MadeToOrderFolder
from generative.made_to_order.recorded_density import RecordedDensity
from generative.made_to_order.recorded_starts import RecordedStarts
from generative.made_to_order.search import Scale, SearchPlan, search
from generative.made_to_order.targets import Order
from generative.sample_files import SampleFolder, SampleOrigin, SampleWriter
from generative.sampling import FRAMES_PER_SECOND, VIDEO_SCALE, film, imagined_from
from generative.simulator import Simulator

STRIP_SIZE = 96  # pixels of a frame in a picture
NEAREST_IN_PICTURE = 3


@dataclasses.dataclass(frozen=True)
class Workshop:
    """All that a search needs beside its order.

    Attributes:
        dataset: recorded rollouts, with windows as long as the rollouts that are shown.
        starts: recorded ones.
        best_of: the last so many of them are those that found starts are compared with; searches
            begin from the others.
        density: of all recorded starts.
        num_starts: K.
        num_steps: of the rollouts that are stored.
    """

    simulator: Simulator
    compute: Compute
    dataset: RolloutDataset
    starts: RecordedStarts
    best_of: int
    density: RecordedDensity
    orders: tuple[Order, ...]
    columns: tuple[int, ...]
    plan: SearchPlan
    num_starts: int
    num_steps: int

    def scale(self, order: int) -> Scale:
        """Of an order's target over all recorded starts, simulated."""
        values = self.starts.simulated[:, self.columns[order]].astype(np.float64)
        return Scale(float(values.mean()), max(float(values.std()), 1e-9))

    def scores(self, order: int) -> np.ndarray:
        """Of the recorded starts, simulated (N,)."""
        values = self.starts.simulated[:, self.columns[order]].astype(np.float64)
        return self.scale(order).score(values, self.orders[order].sign)

    def begins(self, order: int) -> np.ndarray:
        """Recorded starts that the searches of an order begin from: the best of those that found
        ones are not compared with, each of another episode as far as there are so many. (K,)"""
        pool = len(self.starts.windows) - self.best_of
        ranked = np.argsort(-self.scores(order)[:pool], kind="stable")
        _, first = np.unique(self.starts.episodes[ranked], return_index=True)
        apart = np.sort(first)  # the best of each episode, best first
        rest = np.setdiff1d(np.arange(pool), apart)
        return ranked[np.concatenate([apart, rest])[:self.num_starts]]

    def numbers(self, order: int) -> range:
        """The samples of an order."""
        return range(order * self.num_starts, (order + 1) * self.num_starts)


def make(shop: Workshop, writer: SampleWriter, penalty: float, with_videos: bool) -> int:
    """Search and write what is not on disk yet, until the end or a signal to stop.

    Returns:
        0 when all is written, 128 + the signal's number when it was stopped.
    """
    waiting = [number for number in range(len(shop.orders))
               if not all(map(writer.has, shop.numbers(number)))]
    done = len(shop.orders) - len(waiting)
    with (deferred_signals("order") as received,
          Progress(len(shop.orders), "order", done) as progress):
        for number in waiting:
            if received:
                return 128 + received[0]
            begin = torch.from_numpy(shop.starts.vectors[shop.begins(number)])
            found = search(shop.simulator, shop.compute, shop.orders[number], begin,
                           shop.scale(number), shop.density, penalty, shop.plan)
            arrays = imagined_from(shop.simulator, shop.compute, found, shop.num_steps)
            for sample, each in zip(shop.numbers(number), arrays):
                if not writer.has(sample):
                    writer.add(sample, each, SampleOrigin(sample, None, None, None, None))
            done += 1
            progress.update(done)
        if with_videos:
            for number in range(len(shop.orders)):
                if received:
                    return 128 + received[0]
                _write_videos(shop, writer, shop.numbers(number))
    return 0


def _write_videos(shop: Workshop, writer: SampleWriter, numbers: Sequence[int]) -> None:
    missing = [number for number in numbers if not writer.folder.video_file(number).exists()]
    if not missing:
        return
    samples = writer.folder.stacked(missing)
    rows = shop.density.nearest(torch.from_numpy(samples.bottleneck_vec), 1)[0][:, 0]
    near = imagined_from(shop.simulator, shop.compute,
                         torch.from_numpy(shop.starts.vectors[rows]), shop.num_steps)
    windows = shop.dataset.batch(shop.starts.windows[rows])
    for place, number in enumerate(missing):
        columns = {"made to order": np.stack(list(film(writer.folder.sample(number)))),
                   "nearest, simulated": np.stack(list(film(near[place]))),
                   "nearest, as recorded": np.stack(list(_as_recorded(shop, windows, place)))}
        frames = side_by_side({title: each[:, None] for title, each in columns.items()}, 1)
        writer.add_video(number, frames, FRAMES_PER_SECOND)


def _as_recorded(shop: Workshop, windows: Windows, row: int) -> Iterator[np.ndarray]:
    """The recorded frames of the simulated steps, enlarged, with the action that entered each."""
    first = shop.dataset.num_init_steps - 1
    frames = windows.frames[first:, row].movedim(1, -1).numpy()  # (T, H, W, C)
    for frame, action in zip(frames, windows.actions[first - 1:, row].tolist()):
        yield mark_action(enlarge(frame, VIDEO_SCALE), action)


def write_picture(shop: Workshop, folder: MadeToOrderFolder, order: int,
                  best: dict[float, int]) -> None:
    """A strip of the best start of an order with each penalty, and those of the recorded starts
    that are nearest to the first of them.

    Args:
        best: sample by penalty.
    """
    samples = [SampleFolder(folder.samples(penalty)).sample(number)
               for penalty, number in best.items()]
    (rows,), _ = shop.density.nearest(torch.from_numpy(samples[0].bottleneck_vec[None]),
                                      min(NEAREST_IN_PICTURE, len(shop.starts.windows)))
    windows = shop.dataset.batch(shop.starts.windows[rows])
    shown = windows.frames[shop.dataset.num_init_steps - 1:].movedim(2, -1).numpy()  # (T, B, …)
    write_strip(folder.picture_file(order), [*(list(sample.frames) for sample in samples), *(
        list(shown[:, row]) for row in range(len(rows)))], STRIP_SIZE)
