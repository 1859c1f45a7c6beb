"""A function of tensors on a GPU as a CUDA graph.

A training step of the simulator consists of about three thousand small kernels, and a step of the
agent of about a hundred; launching them one by one takes the CPU longer than an H100 takes to run
them. A CUDA graph launches them all at once (Gray 2019, "Getting started with CUDA graphs").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_WARM_UP_CALLS = 3  # calls in which the libraries choose their algorithms and allocate memory


class GraphedFunction:
    """Function whose first calls run eagerly; then one call is captured as a CUDA graph, which is
    replayed from then on.

    The results equal those of eager calls.

    Args:
        function: maps tensors on the GPU, passed by name, to a tuple of tensors. It may only change
            data on the GPU, and must not synchronise.
        device: the GPU.
        generator: source of the function's random numbers on the GPU; None if it draws none.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], device: torch.device,
                 generator: torch.Generator | None = None):
        self._function = function
        self._generator = generator
        self._calls = 0
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function.

        Args:
            inputs: tensors on the GPU, with the same names and shapes in every call.

        Returns:
            Results of the function; later calls do not overwrite them.
        """
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:  # on a side stream, as graph capture requires
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                results = self._function(**inputs)
            torch.cuda.synchronize()
            return results
        if self._calls == _WARM_UP_CALLS + 1:
            self._capture(inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return tuple(result.clone() for result in self._results)

    def _capture(self, inputs: dict[str, Tensor]) -> None:
        self._inputs = {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
        if self._generator is not None:
            self._graph.register_generator_state(self._generator)
        # During the capture, the thread that reads the next batch may allocate memory.
        with torch.cuda.graph(self._graph, stream=self._stream,
                              capture_error_mode="thread_local"):
            self._results = self._function(**self._inputs)
