"""Training on several processes ("ranks"), which torchrun starts and torch.distributed connects.

Every rank runs the same script. Of whatever a run has many of, environments or windows, each rank
works on a share, and what the others need goes to them in the order of the ranks, so that all of
them compute the same weights. A script without torchrun is a world of one rank, :data:`ALONE`,
whose methods give back what they are given.

Numbers travel from memory to memory through gloo, and between GPUs through NCCL; gradients of
ranks on the processors of one machine lie in memory that all of them see
(``common.shared_memory``). The environment variables that are read are torchrun's own: WORLD_SIZE,
RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and those that torch itself reads
to find torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.shared_memory import Memory, SharedSum, seen
from common.signals import STOP_SIGNALS, signal_at_death_of_parent

# For all processes to come together, which those of other machines may be late for.
_JOINING = datetime.timedelta(minutes=5)
# For a rank to wait on others that read or write files.
_WAITING = datetime.timedelta(minutes=30)
# For a GPU to wait on others. A dead process is noticed at once by gloo, but not by NCCL.
_GPU_WAITING = datetime.timedelta(minutes=5)
# Numbers of a gradient that is a message of its own: half a megabyte.
_LARGE = 2**17

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
_times_joined = itertools.count()


class LostRank(UserError):
    """Another rank has ended in the middle of the work."""

    def __init__(self):
        super().__init__("another process of this training has ended or cannot be reached, so "
                         "this one ends, too; what was saved before is kept")


class Ranks:
    """This process among those that train together.

    Args:
        rank: its number, from 0. Rank 0 alone writes files and messages.
        size: how many there are.
        local_rank: its number among those of this machine, and of its GPU.
        local_size: how many this machine has.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1):
        self.rank, self.size = rank, size
        self.local_rank, self._local_size = local_rank, local_size
        self._gpus: dist.ProcessGroup | None = None
        self._shared: tuple[list[torch.Size], SharedSum | None] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def launcher(self) -> str:
        """The words that start a script on as many processes, for messages."""
        if self.is_alone:
            return "python"
        if self._local_size != self.size:
            return "torchrun ..."
        return f"torchrun --standalone --nproc_per_node={self.size}"

    @property
    def in_words(self) -> str:
        """" by 4 processes", or nothing where there is one."""
        return "" if self.is_alone else f" by {self.size} processes"

    def connect_gpus(self, device: torch.device) -> None:
        """Let tensors on this rank's device travel, too; nothing to do for the CPU."""
        if device.type == "cuda" and not self.is_alone:
            torch.cuda.set_device(device)
            with _talking():
                self._gpus = dist.new_group(backend="nccl", timeout=_GPU_WAITING)

    def own(self, num: int) -> slice:
        """Which of ``num`` things are this rank's: as many as another's, or one more or less."""
        return self._share(self.rank, num)

    def _share(self, rank: int, num: int) -> slice:
        return slice(rank * num // self.size, (rank + 1) * num // self.size)

    def gather(self, own: Tensor, num: int, dim: int = 0) -> Tensor:
        """The things of all ranks, in order, from the own ones; without gradient.

        Args:
            own: as many along ``dim`` as ``own(num)`` says.
            num: how many all ranks have.
        """
        if self.is_alone:
            return own
        sizes = [len(range(num)[self._share(rank, num)]) for rank in range(self.size)]
        first = own.detach().movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))  # all must send as much
        padded[:len(first)] = first
        pieces = [torch.empty_like(padded) for _ in sizes]
        with _talking():
            dist.all_gather(pieces, padded, group=self._group(own))
        whole = torch.cat([piece[:size] for piece, size in zip(pieces, sizes)])
        return whole.movedim(0, dim).contiguous()

    def gather_with_own_gradient(self, own: Tensor, num: int) -> Tensor:
        """``gather`` along the first dimension, where the own things keep their gradient.

        If every rank takes the gradient of the same function of all things, the sum over the ranks
        is the whole gradient.
        """
        if self.is_alone:
            return own
        whole, part = self.gather(own, num), self.own(num)
        return torch.cat([whole[:part.start], own, whole[part.stop:]])

    def gather_list(self, own: list[Item]) -> list[Item]:
        """The items of all ranks, in order, at rank 0; elsewhere the own ones."""
        if self.is_alone:
            return own
        lists: list | None = [None] * self.size if self.is_first else None
        with _talking():
            dist.gather_object(own, lists)
        return [item for each in lists for item in each] if self.is_first else own

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same on each of them."""
        if self.is_alone:
            return tensor
        total = tensor.clone()
        with _talking():
            dist.all_reduce(total, group=self._group(total))
        return total

    def mean(self, figures: dict[str, Tensor], share: float) -> dict[str, Tensor]:
        """Means of named figures, each (), over all ranks.

        Args:
            share: weight of the own figures; those of all ranks add up to 1.
        """
        if self.is_alone:
            return figures
        means = self.sum(share * torch.stack(list(figures.values())))
        return {name: mean.clone() for name, mean in zip(figures, means)}

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up the gradients of all ranks in place.

        On processors of one machine they are added up in memory that the ranks share, elsewhere by
        messages. A rank that had nothing to do has no gradients, which count as 0; a parameter that
        no rank has a gradient of is left without.
        """
        if self.is_alone:
            return
        present = parameters[0].new_tensor([parameter.grad is not None for parameter in parameters])
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for parameter in parameters]
        shared = self._shared_sum([present, *parameters])
        (shared.add_up if shared else self._sum_by_messages)([present, *gradients])
        for parameter, gradient, ranks in zip(parameters, gradients, present.tolist()):
            parameter.grad = gradient if ranks else None

    def _sum_by_messages(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors' numbers by their sums over all ranks. Large ones travel from where
        they lie, all others in one message."""
        large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
        small = [tensor for tensor in tensors if tensor.numel() < _LARGE]
        together = torch.cat([tensor.flatten() for tensor in small])
        with _talking():
            group = self._group(together)
            messages = [dist.all_reduce(tensor, group=group, async_op=True)
                        for tensor in (together, *large)]
            for message in messages:
                message.wait()
        for tensor, summed in zip(small, together.split([tensor.numel() for tensor in small])):
            tensor.copy_(summed.view_as(tensor))

    def _shared_sum(self, like: Sequence[Tensor]) -> SharedSum | None:
        """For tensors of these shapes, or None where the ranks have no memory that all of them
        see."""
        if self._local_size != self.size or like[0].is_cuda:
            return None
        shapes = [tensor.shape for tensor in like]
        if self._shared is None or self._shared[0] != shapes:
            rows = self._share_memory(SharedSum.length(like), like[0].dtype)
            self._shared = shapes, rows if rows is None else SharedSum(
                rows, self.rank, like, _wait_for_all)
        return self._shared[1]

    def _share_memory(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """Numbers (ranks + 1, length) that all ranks see, or None if one of them cannot."""
        with contextlib.ExitStack() as stack:
            place = None
            if self.is_first:
                with contextlib.suppress(OSError):
                    memory = Memory((self.size + 1) * length * dtype.itemsize)
                    stack.callback(memory.close)
                    place = memory.path, memory.mark
            place, rows = self.of_first(place), None
            if place:
                with contextlib.suppress(OSError):
                    rows = torch.frombuffer(seen(*place), dtype=dtype).view(self.size + 1, length)
            return None if self.largest(rows is None) else rows

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        if self.is_alone:
            return number
        numbers = torch.tensor([number])
        with _talking():
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def of_first(self, value: Item) -> Item:
        """Rank 0's value: what it drew, decided or saw on its clock or disk."""
        if self.is_alone:
            return value
        values = [value]
        with _talking():
            dist.broadcast_object_list(values)
        return values[0]

    def require_same(self, settings: Mapping) -> None:
        """See that all ranks were given the same settings, which may be nested.

        Raises:
            UserError: naming one that differs, and its values.
        """
        if self.is_alone:
            return
        everyones: list = [None] * self.size
        with _talking():
            dist.all_gather_object(everyones, dict(_flat(settings)))
        for rank, theirs in enumerate(everyones):
            for name, expected in everyones[0].items():
                if theirs.get(name) != expected:
                    raise UserError(
                        f"the processes of one training must have the same settings, but {name} "
                        f"is {expected} in process 0 and {theirs.get(name)} in process {rank}; "
                        "start all of them with the same command, from the same files")

    def warn_of_another_number(self, saved_by: int, file: Path) -> None:
        """Say what is different if a run was saved by another number of ranks."""
        if saved_by != self.size:
            logger.warning("%s was saved by %d process%s and goes on with %d: the same levels, "
                           "draws and batches, but sums are rounded otherwise, so from here on "
                           "its numbers are no longer those of a run that was never stopped", file,
                           saved_by, "" if saved_by == 1 else "es", self.size)

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._gpus if tensor.is_cuda else None  # None: the group of all, by gloo


ALONE = Ranks()


def _flat(settings: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Values as text, by dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


@contextlib.contextmanager
def _talking() -> Iterator[None]:
    """Around messages to other ranks.

    Raises:
        LostRank: if they do not get through.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostRank from error


def _wait_for_all() -> None:
    with _talking():
        dist.barrier()


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks of this training, connected until the end of the block.

    Inside, messages of rank 0 alone are logged. An error that all ranks make is reported by one of
    them, and one that a single rank makes ends the others without a word. If torchrun is killed,
    all ranks are asked to stop, as they would train on unattended. When the block ends well
    all ranks leave it together, and signals to stop have no effect any more: torchrun sends them
    to those that take longer to leave.

    Raises:
        UserError: if torchrun's variables are wrong, the port is in use, or not all processes come.
    """
    size = _whole("WORLD_SIZE", "1")
    if size <= 1:
        yield ALONE
        return
    ranks = Ranks(_whole("RANK"), size, _whole("LOCAL_RANK", "0"),
                  _whole("LOCAL_WORLD_SIZE", str(size)))
    signal_at_death_of_parent(signal.SIGTERM)
    store = _meet(ranks)
    if not ranks.is_first:
        logging.disable()
    try:
        yield ranks
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _wait_for_all()
    except (UserError, OSError) as error:
        if not _is_first_to_say(store, error):
            raise SystemExit(2) from None
        raise
    finally:
        logging.disable(logging.NOTSET)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _is_first_to_say(store: dist.Store, error: Exception) -> bool:
    """Whether no rank has told the user yet about this error, or of a loss about its cause."""
    with contextlib.suppress(RuntimeError):  # the store may be lost, too
        if isinstance(error, LostRank) and store.check(["told"]):
            return False
        store.set("told", "yes")
        return store.add(str(error), 1) == 1
    return True


def _whole(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"the environment variable {name} is {text or 'missing'}, but WORLD_SIZE "
                        "says that there are several processes; start them with torchrun")
    return int(text)


def _meet(ranks: Ranks) -> dist.Store:
    """Connect the processes; returns the store through which they found each other."""
    address = f"{os.environ.get('MASTER_ADDR')}:{_whole('MASTER_PORT')}"
    try:
        found = dist.rendezvous("env://", ranks.rank, ranks.size, timeout=_JOINING)
        store = dist.PrefixStore(f"training{next(_times_joined)}", next(found)[0])
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size,
                                timeout=_WAITING)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"the port {address} is in use; choose another one (MASTER_PORT, "
                            "--master_port of torchrun) or let torchrun find one with "
                            "--standalone") from None
        first_line = str(error).partition("\n")[0]
        raise UserError(f"the {ranks.size} processes of this training could not connect at "
                        f"{address}: {first_line}") from None
    return store
