"""A training step that a GPU repeats by itself.

A step of the simulator is some three thousand small kernels, and starting them one by one takes a
processor longer than an H100 takes to run them. A CUDA graph starts them all at once (Gray 2019,
"Getting started with CUDA graphs").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from generative.dataset import Windows

_CALLS_BEFORE = 3  # in which the libraries choose their algorithms and take their memory


class RepeatedStep:
    """Runs the first steps as they are, then records one as a graph and repeats that.

    The numbers are those of the step itself.

    Args:
        generator: of the step's random numbers.
    """

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._calls = 0
        self._stream = torch.cuda.Stream(generator.device)
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, step: Callable[[Windows], Tensor], windows: Windows) -> Tensor:
        """Take a step.

        Args:
            step: windows on the GPU to a tensor, the same in every call; all that it changes must
                lie there, and it must not wait for it.
            windows: with the same shapes in every call.
        """
        if self._calls < _CALLS_BEFORE:
            self._calls += 1
            return self._as_it_is(step, windows)
        if self._calls == _CALLS_BEFORE:
            self._calls += 1
            self._record(step, windows)
        for name, tensor in windows.tensors().items():
            getattr(self._windows, name).copy_(tensor)
        self._graph.replay()
        return self._result.clone()

    def _as_it_is(self, step: Callable[[Windows], Tensor], windows: Windows) -> Tensor:
        """The step, where it can be recorded later: not in the default stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = step(windows)
        torch.cuda.synchronize()
        return result

    def _record(self, step: Callable[[Windows], Tensor], windows: Windows) -> None:
        self._windows = Windows(**{name: torch.empty_like(tensor)
                                   for name, tensor in windows.tensors().items()})
        self._graph.register_generator_state(self._generator)
        # Another thread may take memory meanwhile: that reads the next batch.
        with torch.cuda.graph(self._graph, stream=self._stream,
                              capture_error_mode="thread_local"):
            self._result = step(self._windows)
