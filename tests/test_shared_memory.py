"""Sums over processes in memory that they share, here by threads and with processes' timing."""

import threading
import time

import torch

from common.shared_memory import SharedSum

LIKE = (torch.zeros(3), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(()))


def test_late_processes_are_waited_for_before_the_sum_and_before_it_is_read():
    """Three processes, whose shares of the columns are not the same, and of which one is late at
    every point; twice, with other numbers in the same memory."""
    generator = torch.Generator().manual_seed(0)
    numbers = [[[torch.randn(like.shape, generator=generator) for like in LIKE]
                for _ in range(3)] for _ in range(2)]
    barrier = threading.Barrier(3, timeout=20)
    rows = torch.full((4, SharedSum.length(LIKE)), torch.nan)

    def run(rank):
        def wait():
            time.sleep(.1 * (rank == 1))
            barrier.wait()
            time.sleep(.1 * (rank == 1))

        sums = SharedSum(rows, rank, LIKE, wait)
        for each in numbers:
            sums.add_up(each[rank])

    expected = [[sum(parts) for parts in zip(*each)] for each in numbers]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, sums in zip(numbers, expected):
        for own in each:
            torch.testing.assert_close(own, sums, rtol=1e-6, atol=1e-6)
        for own in each[1:]:
            torch.testing.assert_close(own, each[0], rtol=0, atol=0)
