"""Traced functions: PyTorch functions as programs of few operations, which pages run.

``trace`` runs a function once, records the operations that depend on its inputs, and writes each as
one of the instructions that ``web/shared/lib/program.js`` knows. All other operations are computed
here, so their results are constants. Shapes are those of the traced inputs.

All values of a program are contiguous arrays of float32 numbers; truth values are 0 and 1. An
instruction is a list: its name; the numbers of its results; how many numbers each of them has; its
inputs, which are numbers of values, or [x] for a plain number x; and further settings.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

_aten = torch.ops.aten
_Node = Any  # a torch.fx.Node, the types of whose arguments are too general here
_LARGEST = 3e38  # limit that float32 numbers keep
_MOST_EXACT = 2 ** 24  # whole numbers up to this size are exact in float32

# Operations whose result depends on the shapes of their arguments only.
_SHAPE_ONLY = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like,
               _aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full}
_SAME = {_aten.alias, _aten.detach, _aten.clone, _aten.view, _aten._unsafe_view, _aten.reshape,
         _aten.lift_fresh, _aten.lift_fresh_copy, _aten.view_copy, _aten._to_copy}
_STRIDED = {_aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.permute, _aten.t, _aten.transpose,
            _aten.select, _aten.slice, _aten.unbind, _aten.split, _aten.split_with_sizes,
            _aten.unsafe_split, _aten.movedim}
_MOVED = {_aten.pixel_shuffle, _aten.pixel_unshuffle, _aten.repeat, _aten.flip,
          _aten.constant_pad_nd, _aten.upsample_nearest2d, _aten._upsample_nearest_exact2d}
# Operations by name, on one, two or three values of the same shape.
_EACH = {_aten.neg: "neg", _aten.cos: "cos", _aten.sin: "sin", _aten.abs: "abs", _aten.exp: "exp",
         _aten.log: "log", _aten.log1p: "log1p", _aten.sqrt: "sqrt", _aten.floor: "floor",
         _aten.silu: "silu", _aten.relu: "relu", _aten.sigmoid: "sigmoid", _aten.tanh: "tanh",
         _aten.softplus: "softplus", _aten.logical_not: "not",
         _aten.bitwise_not: "not",
         _aten.add: "add", _aten.sub: "sub", _aten.mul: "mul", _aten.div: "div",
         _aten.gt: "gt", _aten.lt: "lt", _aten.ge: "ge", _aten.le: "le", _aten.eq: "eq",
         _aten.ne: "ne", _aten.bitwise_and: "mul", _aten.logical_and: "mul",
         _aten.bitwise_or: "max", _aten.logical_or: "max", _aten.maximum: "max",
         _aten.minimum: "min", _aten.floor_divide: "floor_div", _aten.remainder: "remainder",
         _aten.pow: "pow", _aten.logaddexp: "logaddexp", _aten.where: "where"}
_REDUCED = {_aten.mean: "mean", _aten.sum: "sum", _aten.amax: "amax", _aten.amin: "amin",
            _aten.any: "amax", _aten.all: "amin"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
        inputs: number of each input by name.
        outputs: number of each output by name.
        shapes: shapes of the inputs by name.
        instructions: see the module's docstring.
        constants: constants by the number of their value; float16 where that is exact, else
            float32, and int32 for indices.
    """

    inputs: dict[str, int]
    outputs: dict[str, int]
    shapes: dict[str, list[int]]
    instructions: list[list]
    constants: dict[int, np.ndarray]

    def description(self) -> dict:
        """Return the program without its constants, serialisable as JSON."""
        return {name: getattr(self, name) for name in (
            "inputs", "outputs", "shapes", "instructions")}

    @property
    def size(self) -> int:
        """Bytes of the constants."""
        return sum(array.nbytes for array in self.constants.values())


@torch.no_grad()
def trace(function: Callable[..., dict[str, Tensor]], **inputs: Tensor) -> Program:
    """Trace a function of tensors.

    Args:
        function: function without control flow that depends on values, in float32.
        inputs: inputs by name; others of the same shapes must take the same way.

    Raises:
        NotImplementedError: if the function uses an operation that programs do not have.
    """
    names: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        outputs = function(**dict(zip(inputs, tensors)))
        names[:] = outputs
        return list(outputs.values())

    with sdpa_kernel(SDPBackend.MATH):
        graph = make_fx(flat)(*inputs.values())
    writer = _Writer(graph, inputs)
    return writer.finish(names)


def _overload(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


class _Writer:
    """Runs a graph node by node, and writes the instructions of those that depend on inputs."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: dict[str, Tensor]):
        self.instructions: list[list] = []
        self.constants: dict[int, np.ndarray] = {}
        self._count = 0
        self._results: dict[_Node, Any] = {}  # tensors, or tuples of tensors
        self._numbers: dict[_Node, Any] = {}  # numbers of values; none for constants
        self._constants_of: dict[_Node, int] = {}
        self.inputs: dict[str, int] = {}
        self.shapes: dict[str, list[int]] = {}
        given = iter(inputs.items())
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                name, tensor = next(given)
                self._results[node] = tensor
                self.inputs[name] = self._numbers[node] = self._new()
                self.shapes[name] = list(tensor.shape)
            elif node.op == "get_attr":
                self._results[node] = operator.attrgetter(node.target)(graph)
            elif node.op == "output":
                self._output = node
            else:
                self._call(node)

    def finish(self, names: Sequence[str]) -> Program:
        """Return the program, without instructions whose results are not used."""
        outputs = {}
        for name, node in zip(names, self._output.args[0], strict=True):
            outputs[name] = self._number(node)
        used, kept = set(outputs.values()), []
        for instruction in reversed(self.instructions):
            _, results, _, given, *_ = instruction
            if used & set(results):
                kept.append(instruction)
                used |= {number for number in given if isinstance(number, int)}
        constants = {number: array for number, array in self.constants.items() if number in used}
        return Program(self.inputs, outputs, self.shapes, kept[::-1], constants)

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _emit(self, name: str, count: int, inputs: Iterable[Any], *settings: Any) -> int:
        """Write an instruction with one result, and return its number."""
        result = self._new()
        self.instructions.append([name, [result], count, list(inputs), *settings])
        return result

    def _constant(self, tensor: Tensor, is_index: bool = False) -> int:
        """Add a constant, and return its number."""
        number = self._new()
        array = tensor.detach().cpu().contiguous().flatten().numpy()
        if is_index:
            self.constants[number] = array.astype(np.int32)
            return number
        if array.dtype.kind in "iu" and array.size and abs(array).max() > _MOST_EXACT:
            raise NotImplementedError("whole numbers that are not exact in float32")
        array = array.astype(np.float32)
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        self.constants[number] = half if np.array_equal(half.astype(np.float32), array) else array
        return number

    def _number(self, node: _Node) -> int:
        """Return the number of a node's value."""
        if node in self._numbers:
            return self._numbers[node]
        if node not in self._constants_of:
            self._constants_of[node] = self._constant(self._results[node])
        return self._constants_of[node]

    def _expanded(self, node: Any, shape: torch.Size) -> Any:
        """Return an argument of an operation on each number: a number of a value of the shape or
        with one number, or [number] if it is a plain number."""
        if not isinstance(node, torch.fx.Node):
            return [float(node)]
        tensor = self._results[node]
        if node not in self._numbers:
            if tensor.numel() == 1:
                return [float(tensor)]
            return self._constant(tensor.expand(shape))
        if tensor.numel() == 1 or tensor.shape == shape:
            return self._numbers[node]
        return self._strided(self._numbers[node], tensor.expand(shape), tensor)

    def _strided(self, number: int, view: Tensor, base: Tensor) -> int:
        """Return the number of a view of a contiguous value, which is copied unless it is equal.

        Args:
            number: number of the value.
            view: view of ``base``.
            base: tensor of the value's shape.
        """
        assert base.is_contiguous()
        dims: list[list[int]] = []  # length and stride, neighbours joined where possible
        for length, stride in zip(view.shape, view.stride()):
            if length == 1:
                continue
            if dims and dims[-1][1] == stride * length:
                dims[-1] = [dims[-1][0] * length, stride]
            else:
                dims.append([length, stride])
        offset = view.storage_offset() - base.storage_offset()
        if not dims or (len(dims) == 1 and dims[0][1] == 1):
            if view.numel() == base.numel():
                return number
            return self._emit("part", view.numel(), [number], offset)
        return self._emit("strided", view.numel(), [number], offset, *map(list, zip(*dims)))

    def _call(self, node: _Node) -> None:
        """Compute a node and, if it depends on inputs, write its instructions."""
        results = self._results
        arguments = torch.fx.map_arg(node.args, results.__getitem__)
        options = torch.fx.map_arg(node.kwargs, results.__getitem__)
        if node.target is operator.getitem:
            results[node] = arguments[0][arguments[1]]
            numbers = self._numbers.get(node.args[0])
            if numbers is not None:
                # Programs lack some second results, such as the places of maxima.
                self._numbers[node] = dict(enumerate(numbers)).get(arguments[1])
            return
        target = node.target
        kind = _overload(target)
        depends = any(n in self._numbers for n in node.all_input_nodes)
        if depends and kind.__name__.endswith("_"):  # nothing may read the old value afterwards
            before = node.args[0]
            if list(before.users)[-1] is not node or _overload(before.target) in _STRIDED:
                raise NotImplementedError(f"the result of {target} under two names")
            kind = getattr(_aten, kind.__name__[:-1])
            target = kind
        result = target(*arguments, **options)
        if kind in _SHAPE_ONLY or not depends:
            results[node] = result  # perhaps a view, through which its base may be changed
            return
        results[node] = _contiguous(result)
        self._numbers[node] = self._written(node, kind, arguments, options, result)

    def _written(self, node: _Node, kind: Any, arguments: tuple, options: dict,
                 result: Any) -> Any:
        """Write the instructions of a node, and return the numbers of its results."""
        first = node.args[0]
        if kind in _SAME:
            if not result.is_floating_point() and arguments[0].is_floating_point() and \
                    result.dtype != torch.bool:
                return self._emit("trunc", result.numel(), [self._number(first)])
            return self._number(first)
        if kind in _STRIDED:
            base = torch.empty(arguments[0].shape)
            views = node.target(base, *arguments[1:], **options)
            if isinstance(views, Tensor):
                return self._strided(self._number(first), views, base)
            return [self._strided(self._number(first), view, base) for view in views]
        if kind in _MOVED:
            return self._moved(node, arguments, options)
        if kind in _EACH:
            return self._each(_EACH[kind], node, options, result)
        if kind in _REDUCED:
            return self._reduced(_REDUCED[kind], node, arguments, options, result)
        method = getattr(self, f"_{kind.__name__.lstrip('_')}", None)
        if method is None:
            raise NotImplementedError(f"pages cannot run the operation {node.target}")
        return method(node, arguments, options, result)

    def _moved(self, node: _Node, arguments: tuple, options: dict) -> int:
        """Write an operation that moves numbers, with the places that they come from (-1 for 0)."""
        places = 1 + torch.arange(arguments[0].numel(), dtype=torch.float64)
        moved = node.target(places.reshape(arguments[0].shape), *arguments[1:], **options)
        return self._emit("take", moved.numel(), [
            self._number(node.args[0]), self._constant(moved - 1, is_index=True)])

    def _each(self, name: str, node: _Node, options: dict, result: Tensor) -> int:
        arguments = list(node.args)
        if options.get("rounding_mode") == "floor":
            name = "floor_div"
        if options.get("alpha", 1) != 1:
            raise NotImplementedError("a factor of a sum")
        if name in ("softplus", "not", "silu"):
            arguments = arguments[:1]
        return self._emit(name, result.numel(), [
            self._expanded(argument, result.shape) for argument in arguments])

    def _rsub(self, node, arguments, options, result) -> int:
        return self._emit("sub", result.numel(), [
            self._expanded(argument, result.shape) for argument in node.args[1::-1]])

    def _clamp(self, node, arguments, options, result) -> int:
        low = options.get("min", arguments[1] if len(arguments) > 1 else None)
        high = options.get("max", arguments[2] if len(arguments) > 2 else None)
        return self._emit("clamp", result.numel(), [
            self._number(node.args[0]), [-_LARGEST if low is None else low],
            [_LARGEST if high is None else high]])

    def _reduced(self, name: str, node: _Node, arguments: tuple, options: dict,
                 result: Tensor) -> int:
        tensor = arguments[0]
        dims = options.get("dim", arguments[1] if len(arguments) > 1 else None)
        dims = range(tensor.ndim) if dims in (None, []) else (
            [dims] if isinstance(dims, int) else dims)
        dims = [dim % tensor.ndim for dim in dims]
        last, _ = self._at_end(node.args[0], dims)
        rows = result.numel()
        return self._emit(name, rows, [last], rows, tensor.numel() // max(rows, 1))

    def _linalg_vector_norm(self, node, arguments, options, result) -> int:
        if len(arguments) > 1 and arguments[1] != 2:
            raise NotImplementedError("a norm that is not the Euclidean one")
        tensor, dims = arguments[0], arguments[2] if len(arguments) > 2 else None
        last, _ = self._at_end(node.args[0], [dim % tensor.ndim for dim in (
            range(tensor.ndim) if dims is None else dims)])
        squares = self._emit("mul", tensor.numel(), [last, last])
        rows = result.numel()
        total = self._emit("sum", rows, [squares], rows, tensor.numel() // max(rows, 1))
        return self._emit("sqrt", rows, [total])

    def _at_end(self, node: _Node, dims: Sequence[int]) -> tuple[int, list[int]]:
        """Return the number of a node's value with some dimensions moved to the end, and the order
        of its dimensions."""
        tensor = torch.empty(self._results[node].shape)
        order = [dim for dim in range(tensor.ndim) if dim not in dims] + list(dims)
        return self._strided(self._number(node), tensor.permute(order), tensor), order

    def _along(self, name: str, node: _Node, dim: int, result: Tensor) -> int:
        """Write an operation along one dimension that keeps the shape."""
        shape = result.shape
        last, order = self._at_end(node.args[0], [dim % result.ndim])
        length = shape[dim]
        moved = self._emit(name, result.numel(), [last], result.numel() // length, length)
        back = torch.empty([shape[d] for d in order])
        return self._strided(moved, back.permute(*np.argsort(order).tolist()), back)

    def _softmax(self, node, arguments, options, result) -> int:
        return self._along("softmax", node, arguments[1], result)

    _safe_softmax = _softmax  # for rows of -inf, which no network here has

    def _log_softmax(self, node, arguments, options, result) -> int:
        return self._along("log_softmax", node, arguments[1], result)

    def _cummax(self, node, arguments, options, result) -> list[int]:
        return [self._along("cummax", node, arguments[1], result[0])]

    def _cummin(self, node, arguments, options, result) -> list[int]:
        return [self._along("cummin", node, arguments[1], result[0])]

    def _cat(self, node, arguments, options, result) -> int:
        dim = (arguments[1] if len(arguments) > 1 else options.get("dim", 0)) % result.ndim
        parts = [part for part in node.args[0] if self._results[part].numel()]
        if len(parts) == 1:
            return self._number(parts[0])
        outer = math.prod(result.shape[:dim])
        return self._emit("cat", result.numel(), map(self._number, parts), outer,
                          [self._results[part].numel() // outer for part in parts])

    def _stack(self, node, arguments, options, result) -> int:
        return self._cat(node, arguments, options, result)

    def _convolution(self, node, arguments, options, result) -> int:
        image, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
        if transposed or groups != 1 or dilation != [1, 1] or stride[0] != stride[1] or \
                padding[0] != padding[1]:
            raise NotImplementedError("this kind of convolution")
        return self._emit(
            "conv", result.numel(), map(self._number, node.args[:2 if bias is None else 3]),
            *image.shape, weight.shape[0], *weight.shape[2:], stride[0], padding[0],
            *result.shape[2:])

    def _product(self, factors: Sequence[_Node], batch: int, size: Sequence[int], columns: int
                 ) -> int:
        """Write a product of matrices (batch, *size) and (batch, size[1], columns)."""
        rows, inner = size
        return self._emit("matmul", batch * rows * columns, map(self._number, factors), batch,
                          rows, inner, columns)

    def _mm(self, node, arguments, options, result) -> int:
        one, other = arguments
        return self._product(node.args, 1, one.shape, other.shape[1])

    def _mv(self, node, arguments, options, result) -> int:
        one, _ = arguments
        return self._product(node.args, 1, one.shape, 1)

    def _bmm(self, node, arguments, options, result) -> int:
        one, other = arguments
        return self._product(node.args, len(one), one.shape[1:], other.shape[2])

    def _addmm(self, node, arguments, options, result) -> int:
        if options:
            raise NotImplementedError("factors of a matrix product")
        _, one, other = arguments
        product = self._product(node.args[1:], 1, one.shape, other.shape[1])
        return self._emit("add", result.numel(), [
            product, self._expanded(node.args[0], result.shape)])

    def _native_group_norm(self, node, arguments, options, result) -> list[int]:
        num, channels, size, groups, epsilon = arguments[3:]
        return [self._emit(
            "group_norm", result[0].numel(), map(self._number, node.args[:3]), num, channels, size,
            groups, epsilon)]

    def _max_pool2d_with_indices(self, node, arguments, options, result) -> list[int]:
        image, kernel, stride, padding = (*arguments, [0, 0])[:4]
        return [self._emit("max_pool", result[0].numel(), [self._number(node.args[0])],
                           image.shape[0] * image.shape[1], *image.shape[2:], kernel[0], stride[0],
                           padding[0], *result[0].shape[2:])]

    def _avg_pool2d(self, node, arguments, options, result) -> int:
        image, kernel = arguments[:2]
        if (len(arguments) > 2 and arguments[2] not in ([], kernel)) or len(arguments) > 3:
            raise NotImplementedError("average pooling with overlap or padding")
        blocks = torch.empty(image.shape)
        blocks = blocks.unflatten(3, (-1, kernel[1])).unflatten(2, (-1, kernel[0]))
        number = self._strided(self._number(node.args[0]), blocks.movedim(3, 4),
                               torch.empty(image.shape))
        return self._emit("mean", result.numel(), [number], result.numel(), math.prod(kernel))

    def _grid_sampler_2d(self, node, arguments, options, result) -> int:
        image, _, mode, padding, aligned = arguments
        if mode != 0 or padding != 1 or not aligned:
            raise NotImplementedError("this kind of grid sampling")
        return self._emit("grid_sample", result.numel(), map(self._number, node.args[:2]),
                          *image.shape, *result.shape[2:])

    def _argmax(self, node, arguments, options, result) -> int:
        return self._reduced("argmax", node, arguments, options, result)

    def _topk(self, node, arguments, options, result) -> list[int]:
        tensor, k = arguments[:2]
        if tuple(arguments[2:]) not in ((), (-1,), (tensor.ndim - 1,)):
            raise NotImplementedError("topk along another dimension than the last")
        length = tensor.shape[-1]
        numbers = [self._new(), self._new()]
        self.instructions.append(["topk", numbers, result[0].numel(), [self._number(node.args[0])],
                                  tensor.numel() // length, length, k])
        return numbers

    def _gather(self, node, arguments, options, result) -> int:
        tensor, dim, index = arguments
        dim = dim % tensor.ndim
        others = [[size for d, size in enumerate(each.shape) if d != dim]
                  for each in (tensor, index)]
        if others[0] != others[1]:
            raise NotImplementedError("gather from tensors of another shape")
        return self._emit("gather", result.numel(), map(self._number, node.args[::2]),
                          math.prod(tensor.shape[:dim]), tensor.shape[dim], index.shape[dim],
                          math.prod(tensor.shape[dim + 1:]))

    def _index(self, node, arguments, options, result) -> int:
        tensor, indices = arguments
        if not any(index in self._numbers for index in node.args[1] if index is not None):
            return self._moved(node, arguments, options)
        if any(index is None or index.dtype == torch.bool for index in indices):
            raise NotImplementedError("this kind of indexing")
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        inner = math.prod(tensor.shape[len(indices):])
        return self._emit("index", result.numel(), [self._number(node.args[0]), *(
            self._expanded(index, shape) for index in node.args[1])],
            list(tensor.shape[:len(indices)]), inner)


def _contiguous(result: Any) -> Any:
    """Return a result with contiguous tensors."""
    if isinstance(result, Tensor):
        return result.contiguous()
    return type(result)(map(_contiguous, result)) if isinstance(result, tuple | list) else result
