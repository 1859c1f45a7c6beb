"""Data-parallel training on several processes, started by torchrun.

All ranks run the same script, each on its share of the environments or training windows. Results
are gathered in the order of the ranks, so that all ranks compute the same weights. Without torchrun
there is one process, :data:`SINGLE`, whose methods return their arguments unchanged.

Tensors are sent through gloo, and between GPUs through NCCL; gradients of CPU processes on one
machine are summed in shared memory (``common.shared_memory``). The environment variables are those
of torchrun: WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import Stopped, UserError
from common.parameters import flattened
from common.shared_memory import SharedMemory, SharedSum, map_memory
from common.signals import STOP_SIGNALS, signal_at_death_of_parent

_CONNECT_TIMEOUT = datetime.timedelta(minutes=5)
_GLOO_TIMEOUT = datetime.timedelta(minutes=30)  # other ranks may be reading or writing files
_NCCL_TIMEOUT = datetime.timedelta(minutes=5)  # unlike gloo, NCCL does not detect dead processes
_LARGE = 2**17  # elements (half a megabyte) from which a tensor is sent in its own message

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Options = TypeVar("Options")
Run = TypeVar("Run")
_times_connected = itertools.count()


class LostProcess(UserError):
    """Raised if another process of the training run has ended or cannot be reached."""

    def __init__(self):
        super().__init__("another process of this training has ended or cannot be reached, so "
                         "this process ends, too; files saved earlier are kept")


class Distributed:
    """Rank of this process in data-parallel training, and communication with the other ranks.

    Args:
        rank: rank of this process. Only rank 0 writes files and messages.
        world_size: number of processes.
        local_rank: rank on this machine, which selects the GPU.
        local_size: number of processes on this machine.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, local_rank: int = 0,
                 local_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self.local_rank, self._local_size = local_rank, local_size
        self._gpus: dist.ProcessGroup | None = None
        self._shared: tuple[list[torch.Size], SharedSum | None] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether the world size is larger than 1."""
        return self.world_size > 1

    @property
    def launcher(self) -> str:
        """Command that starts a script with this world size, for messages."""
        if not self.is_distributed:
            return "python"
        if self._local_size != self.world_size:
            return "torchrun ..."
        return f"torchrun --standalone --nproc_per_node={self.world_size}"

    @property
    def description(self) -> str:
        """Text such as " by 4 processes" for messages; empty for a single process."""
        return f" by {self.world_size} processes" if self.is_distributed else ""

    def connect_gpus(self, device: torch.device) -> None:
        """Connect the GPUs of all processes through NCCL; no effect on the CPU."""
        if device.type == "cuda" and self.is_distributed:
            torch.cuda.set_device(device)
            with _communicating():
                self._gpus = dist.new_group(backend="nccl", timeout=_NCCL_TIMEOUT)

    def local_slice(self, num: int) -> slice:
        """Return the slice of ``num`` items that is this rank's share; the sizes of the shares
        differ by at most one item."""
        return self._slice_of(self.rank, num)

    def _slice_of(self, rank: int, num: int) -> slice:
        return slice(rank * num // self.world_size, (rank + 1) * num // self.world_size)

    def gather(self, local: Tensor, num: int, dim: int = 0) -> Tensor:
        """Concatenate the items of all ranks in the order of the ranks, without gradients.

        Args:
            local: items of this rank; its size along ``dim`` is that of ``local_slice(num)``.
            num: total number of items over all ranks.
            dim: dimension of the items.

        Returns:
            The items of all ranks, with size ``num`` along ``dim``.
        """
        if not self.is_distributed:
            return local
        sizes = [len(range(num)[self._slice_of(rank, num)]) for rank in range(self.world_size)]
        first = local.detach().movedim(dim, 0)
        padded = first.new_zeros((max(sizes), *first.shape[1:]))  # messages must have equal sizes
        padded[:len(first)] = first
        pieces = [torch.empty_like(padded) for _ in sizes]
        with _communicating():
            dist.all_gather(pieces, padded, group=self._group(local))
        whole = torch.cat([piece[:size] for piece, size in zip(pieces, sizes)])
        return whole.movedim(0, dim).contiguous()

    def gather_with_local_gradient(self, local: Tensor, num: int) -> Tensor:
        """Concatenate as ``gather`` does, along dimension 0, keeping gradients of the local items.

        If every rank differentiates the same function of all items, the gradients of the ranks sum
        to the full gradient.
        """
        if not self.is_distributed:
            return local
        whole, part = self.gather(local, num), self.local_slice(num)
        return torch.cat([whole[:part.start], local, whole[part.stop:]])

    def gather_list(self, local: list[Item]) -> list[Item]:
        """Return the items of all ranks, in the order of the ranks, on rank 0; the local items on
        other ranks."""
        if not self.is_distributed:
            return local
        lists: list[list[Item]] = [[] for _ in range(self.world_size)]
        with _communicating():
            dist.gather_object(local, lists if self.is_main else None)
        return list(itertools.chain(*lists)) if self.is_main else local

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, which is identical on every rank."""
        if not self.is_distributed:
            return tensor
        total = tensor.clone()
        with _communicating():
            dist.all_reduce(total, group=self._group(total))
        return total

    def mean(self, metrics: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
        """Return the weighted means of metrics over all ranks.

        Args:
            metrics: local metrics by name, scalars ().
            weight: weight of the local metrics; the weights of all ranks sum to 1.
        """
        if not self.is_distributed:
            return metrics
        means = self.sum(weight * torch.stack(list(metrics.values())))
        return {name: mean.clone() for name, mean in zip(metrics, means)}

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of parameters over all ranks, in place.

        Processes on the CPUs of one machine use shared memory; all others send messages. A missing
        gradient counts as 0. If no rank has a gradient of a parameter, this gradient stays None.
        """
        if not self.is_distributed:
            return
        present = parameters[0].new_tensor([parameter.grad is not None for parameter in parameters])
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for parameter in parameters]
        shared = self._shared_sum([present, *parameters])
        (shared.add_up if shared else self._all_reduce)([present, *gradients])
        for parameter, gradient, count in zip(parameters, gradients, present.tolist()):
            parameter.grad = gradient if count else None

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks in place; all small tensors share one message."""
        large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
        small = [tensor for tensor in tensors if tensor.numel() < _LARGE]
        concatenated = torch.cat([tensor.flatten() for tensor in small])
        with _communicating():
            group = self._group(concatenated)
            messages = [dist.all_reduce(tensor, group=group, async_op=True)
                        for tensor in (concatenated, *large)]
            for message in messages:
                message.wait()
        sizes = [tensor.numel() for tensor in small]
        for tensor, summed in zip(small, concatenated.split(sizes)):
            tensor.copy_(summed.view_as(tensor))

    def _shared_sum(self, like: Sequence[Tensor]) -> SharedSum | None:
        """Return the ``SharedSum`` for tensors like ``like``.

        The result is None if the ranks have no shared memory or the tensors are on a GPU.
        """
        if self._local_size != self.world_size or like[0].is_cuda:
            return None
        shapes = [tensor.shape for tensor in like]
        if self._shared is None or self._shared[0] != shapes:
            rows = self._share_memory(SharedSum.length(like), like[0].dtype)
            self._shared = shapes, None if rows is None else SharedSum(
                rows, self.rank, like, _barrier)
        return self._shared[1]

    def _share_memory(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """Return shared memory (world size + 1, ``length``) of type ``dtype``; None if a rank
        cannot map it."""
        with contextlib.ExitStack() as stack:
            address = None
            if self.is_main:
                with contextlib.suppress(OSError):
                    memory = SharedMemory((self.world_size + 1) * length * dtype.itemsize)
                    stack.callback(memory.close)
                    address = memory.path, memory.mark
            address, rows = self.broadcast(address), None
            if address:
                with contextlib.suppress(OSError):
                    rows = torch.frombuffer(map_memory(*address), dtype=dtype).view(
                        self.world_size + 1, length)
            return None if self.max(rows is None) else rows

    def max(self, number: int) -> int:
        """Return the maximum of an integer over all ranks."""
        if not self.is_distributed:
            return number
        numbers = torch.tensor([number])
        with _communicating():
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def broadcast(self, value: Item) -> Item:
        """Return rank 0's value, such as a random draw, a time, or whether a file exists."""
        if not self.is_distributed:
            return value
        values = [value]
        with _communicating():
            dist.broadcast_object_list(values)
        return values[0]

    def require_same(self, settings: dict) -> None:
        """Raise if the settings differ between ranks.

        Args:
            settings: settings of this rank, possibly nested.

        Raises:
            UserError: if a setting differs; the message names it.
        """
        if not self.is_distributed:
            return
        all_settings: list = [None] * self.world_size
        with _communicating():
            dist.all_gather_object(all_settings, flattened(settings))
        for rank, rank_settings in enumerate(all_settings):
            for name, expected in all_settings[0].items():
                if rank_settings.get(name) != expected:
                    raise UserError(
                        f"the processes of one training must have the same settings, but {name} is "
                        f"{expected} in process 0 and {rank_settings.get(name)} in process {rank}; "
                        "start all of them with the same command, from the same files")

    def warn_if_world_size_changed(self, saved_by: int, file: Path) -> None:
        """Log a warning if a resumed run has another world size, which changes rounding.

        Args:
            saved_by: world size of the run that saved the state.
            file: file of the saved state.
        """
        if saved_by != self.world_size:
            logger.warning("%s was saved by %d process%s and is resumed with %d: levels, random "
                           "draws and batches stay the same, but sums are rounded differently, so "
                           "the results will differ slightly from those of an uninterrupted run",
                           file, saved_by, "" if saved_by == 1 else "es", self.world_size)

    def _group(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._gpus if tensor.is_cuda else None  # None: the default group, which uses gloo


SINGLE = Distributed()


@contextlib.contextmanager
def _communicating() -> Iterator[None]:
    """Raise LostProcess if communication with other ranks fails in the block."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcess from error


def _barrier() -> None:
    with _communicating():
        dist.barrier()


@contextlib.contextmanager
def init_distributed() -> Iterator[Distributed]:
    """Connect this process to the other ranks of the training run until the end of the block.

    In the block, only rank 0 logs messages. An error raised by all ranks is reported once; an error
    of a single rank ends the other ranks silently. If torchrun is killed, all ranks receive
    SIGTERM, because they would otherwise continue unattended. If the block succeeds, all ranks
    leave it together and ignore further stop signals, which torchrun sends to the slower ranks.

    Raises:
        UserError: if torchrun's variables are invalid, the port is in use, or a process does not
            connect in time.
    """
    world_size = _environment_number("WORLD_SIZE", "1")
    if world_size <= 1:
        yield SINGLE
        return
    world = Distributed(_environment_number("RANK"), world_size,
                        _environment_number("LOCAL_RANK", "0"),
                        _environment_number("LOCAL_WORLD_SIZE", str(world_size)))
    signal_at_death_of_parent(signal.SIGTERM)
    store = _connect(world)
    if not world.is_main:
        logging.disable()
    try:
        yield world
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _barrier()
    except (UserError, OSError) as error:
        if not _is_first_to_report(store, error):
            raise SystemExit(2) from None
        raise
    finally:
        logging.disable(logging.NOTSET)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def run_in_group(train: Callable[[Distributed, Options], tuple[Run, int]], options: Options) -> Run:
    """Train in the group of processes that torchrun started, and return the training run.

    Args:
        train: function that trains in a group, and returns the run and the exit status.

    Raises:
        Stopped: after a stop signal.
    """
    with init_distributed() as world:
        run, status = train(world, options)
    if status:
        raise Stopped(status)
    return run


def _is_first_to_report(store: dist.Store, error: Exception) -> bool:
    """Return whether this rank should report an error, and record that it does.

    The first rank that raises an error reports it. ``LostProcess`` is not reported if any rank has
    reported an error, because it is then only a consequence of that error.

    Args:
        store: key-value store that all ranks share.
    """
    with contextlib.suppress(RuntimeError):  # the store may be lost, too
        if isinstance(error, LostProcess) and store.check(["reported"]):
            return False
        store.set("reported", "yes")
        return store.add(str(error), 1) == 1
    return True


def _environment_number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"the environment variable {name} is {text or 'missing'}, but WORLD_SIZE "
                        "is above 1; start the processes with torchrun")
    return int(text)


def _connect(world: Distributed) -> dist.Store:
    """Connect the processes and return the store of their rendezvous."""
    address = f"{os.environ.get('MASTER_ADDR')}:{_environment_number('MASTER_PORT')}"
    try:
        rendezvous = dist.rendezvous("env://", world.rank, world.world_size,
                                     timeout=_CONNECT_TIMEOUT)
        store = dist.PrefixStore(f"training{next(_times_connected)}", next(rendezvous)[0])
        dist.init_process_group("gloo", store=store, rank=world.rank,
                                world_size=world.world_size, timeout=_GLOO_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"the port {address} is in use; choose another one (MASTER_PORT, "
                            "--master_port of torchrun) or let torchrun find one with "
                            "--standalone") from None
        first_line = str(error).partition("\n")[0]
        raise UserError(f"the {world.world_size} processes of this training could not connect at "
                        f"{address}: {first_line}") from None
    return store
