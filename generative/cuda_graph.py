"""A training step as a CUDA graph.

A training step of the simulator consists of about three thousand small kernels, and launching them
one by one takes the CPU longer than an H100 takes to run them. A CUDA graph launches them all at
once (Gray 2019, "Getting started with CUDA graphs").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from generative.dataset import Windows

_WARM_UP_STEPS = 3  # steps in which the libraries choose their algorithms and allocate memory


class GraphedStep:
    """Runner of training steps. The first steps run eagerly; then one step is captured as a CUDA
    graph, which is replayed from then on.

    The results equal those of eager steps.

    Args:
        generator: source of the step's random numbers.
    """

    def __init__(self, generator: torch.Generator):
        self._generator = generator
        self._calls = 0
        self._stream = torch.cuda.Stream(generator.device)
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, step: Callable[[Windows], Tensor], windows: Windows) -> Tensor:
        """Run one step.

        Args:
            step: the training step, the same function in every call. It maps windows on the GPU to
                a tensor, may only change data on the GPU, and must not synchronise.
            windows: windows on the GPU, with the same shapes in every call.

        Returns:
            A copy of the step's result.
        """
        self._calls += 1
        if self._calls <= _WARM_UP_STEPS:  # on a side stream, as graph capture requires
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = step(windows)
            torch.cuda.synchronize()
            return result
        if self._calls == _WARM_UP_STEPS + 1:
            self._capture(step, windows)
        for name, tensor in windows.tensors().items():
            getattr(self._windows, name).copy_(tensor)
        self._graph.replay()
        return self._result.clone()

    def _capture(self, step: Callable[[Windows], Tensor], windows: Windows) -> None:
        self._windows = Windows(**{name: torch.empty_like(tensor)
                                   for name, tensor in windows.tensors().items()})
        self._graph.register_generator_state(self._generator)
        # During the capture, the thread that reads the next batch may allocate memory.
        with torch.cuda.graph(self._graph, stream=self._stream,
                              capture_error_mode="thread_local"):
            self._result = step(self._windows)
