"""Low precision where a device lacks it: computed in fp32 from rounded inputs, and rounded.

The numerics are those of hardware that multiplies in low precision and accumulates in fp32. Rounded
are: every input (it comes here in the low-precision dtype), the output, the gradient that comes in
and each gradient that goes out. What autograd keeps is held in the low-precision dtype. For numpy,
bfloat16 is kept as the uint16 of its bits. Knows neither lists nor how wrappers get into torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import capability
from .capability import Capability
from .dtypes import CAST, LOW_PRECISION
from .errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: What `hmpx.convert` takes as ``legalize``.
MODES: Final = ("auto", "always", "never", "fast")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_LOW = frozenset(LOW_PRECISION)

# As they were before anything was patched: lists may hold any of them.
_widen = CAST[torch.float32]
_add, _sub, _gt, _isnan, _where = torch.add, torch.sub, torch.gt, torch.isnan, torch.where
_equal, _mm, _to, _t, _transpose = torch.equal, torch.mm, Tensor.to, Tensor.t, Tensor.transpose
_add_, _as_strided, _copy_, _detach = Tensor.add_, Tensor.as_strided, Tensor.copy_, Tensor.detach
_narrow, _reshape, _unsqueeze = Tensor.narrow, Tensor.reshape, Tensor.unsqueeze
_contiguous, _data_ptr = Tensor.contiguous, Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Legalizer:
    """Computes one op in fp32 where its kernels for a low-precision dtype are slow.

    Attributes:
        op: Op name.
        kind: One of `capability.KINDS`.
        first_matrix: Of a product of two matrices, the position of the first.
        mode: One of `MODES` but ``"never"``.
    """

    op: str
    kind: str
    first_matrix: int | None
    mode: str

    def applies(
        self, tensors: list[Tensor], args: Args, kwargs: Kwargs, dtype: torch.dtype
    ) -> bool:
        """Whether to compute this call in fp32; ``tensors`` are its floating inputs."""
        if kwargs.get("dtype") is not None or any([type(v) is torch.dtype for v in args]):  # noqa: C419
            return False  # its output is as asked for
        if self.mode == "always":
            return True
        if is_exported():
            return False
        device_type = tensors[0].device.type
        is_training = _is_training(tensors)
        known = _capability(self.kind, device_type, dtype)
        a, b = self._matrices(args)
        if a is not None and b is not None:
            traced = is_traced()
            if not traced and _work(a, b) <= capability.SMALL_PRODUCT:
                return False
            if not is_training and _is_skinny(a, is_traced=traced):
                known = _capability("gemv", device_type, dtype)
        return known.is_slow(training=is_training)

    def _matrices(self, args: Args) -> tuple[Tensor | None, Tensor | None]:
        if self.first_matrix is None:
            return None, None
        pair = args[self.first_matrix : self.first_matrix + 2]
        if len(pair) == 2 and isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor):
            return pair
        return None, None

    def compute(  # noqa: PLR0917  # all there is to one call
        self,
        function: Callable[..., Any],
        tensors: list[Tensor],
        args: Args,
        kwargs: Kwargs,
        given: Args,
        dtype: torch.dtype,
    ) -> Any:
        """Returns the call's result in ``dtype``.

        Args:
            function: torch's function.
            tensors: The floating tensors among the arguments.
            args: Positional arguments, and
            kwargs: those given by name.
            given: The positional arguments before they were cast.
            dtype: The low-precision dtype.
        """
        if is_traced() and self.mode != "fast" and not is_exported():
            return _in_graph(function, args, kwargs, dtype)
        is_plain = all([type(t) in _PLAIN_TENSORS and not t.is_nested for t in tensors])  # noqa: C419
        if not is_plain or _transforms() is not None or torch._C._is_tracing():
            return computed_in_fp32(function, args, kwargs, dtype)
        widen = _matrix_widen if self.kind == "gemm" else _widen
        has_hooks = _hooks_refused() is None
        if _is_training(tensors) and has_hooks:
            return _keeping_low(function, args, kwargs, given, _Precision(dtype, widen, self))
        if self.op in _BLOCKED and not kwargs and not _is_training(tensors):
            result = _in_blocks(self.op, args, dtype)
            if result is not None:
                return result
        return _rounded(_call(function, args, kwargs, widen), CAST[dtype])


#: Whether the mode ``"fast"`` rounds its inputs all the same.
rounds_inputs: Final = contextvars.ContextVar("hmpx_rounds_inputs", default=False)


@contextlib.contextmanager
def inputs_rounded() -> Iterator[None]:
    """Has ops round their inputs in the mode ``"fast"`` too, inside the block."""
    token = rounds_inputs.set(True)
    try:
        yield
    finally:
        rounds_inputs.reset(token)


def is_slow(kind: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether any ops of ``kind`` are computed in fp32 there, where that is up to what is fast."""
    known = {_capability(name, device_type, dtype) for name in (kind, _SKINNY.get(kind, kind))}
    return any(each.is_slow(training=training) for each in known for training in (True, False))


_SKINNY: Final = {"gemm": "gemv"}


def _capability(kind: str, device_type: str, dtype: torch.dtype) -> Capability:
    return capability.capability(kind, device_type, dtype)


_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run at trace time


def computed_in_fp32(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype
) -> Any:
    """Returns the result of ``function`` on inputs raised to fp32, rounded to ``dtype``."""
    return _rounded(_call(function, args, kwargs, _widen), CAST[dtype])


def tensors_of(args: Args, kwargs: Kwargs, dtypes: frozenset[torch.dtype]) -> list[Tensor]:
    """Returns the tensors of these dtypes among the arguments, and in lists of them."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.dtype in dtypes:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [t for t in value if isinstance(t, Tensor) and t.dtype in dtypes]
    return found


def _is_training(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])  # noqa: C419


_PRODUCTS: Final = frozenset({"gemm", "convolution"})
_transforms = torch._C._functorch.peek_interpreter_stack


def is_traced() -> bool:
    """Whether the call becomes part of a graph, by Dynamo or by what it calls."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return _dispatch_mode(_PROXY) is not None or _dispatch_mode(_FAKE) is not None


_dispatch_mode = torch._C._get_dispatch_mode
_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def is_exported() -> bool:
    """Whether the call becomes part of an artefact, for whatever hardware it will come to."""
    if torch.compiler.is_exporting() or torch._C._is_tracing():
        return True
    if torch.compiler.is_dynamo_compiling():
        return False
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


def _is_skinny(a: Tensor, *, is_traced: bool) -> bool:
    """Whether the product reads its second matrix for next to no rows of the first."""
    if is_traced:  # a size of 1 is known, without a guard
        return all([size == 1 for size in a.shape[:-1]])  # noqa: C419  # Dynamo knows lists better
    return a.dim() > 0 and a.numel() <= 2 * a.shape[-1]


def _work(a: Tensor, b: Tensor) -> int:
    """Returns about how many multiplications a product has."""
    return a.numel() * b.numel() // max(1, a.shape[-1] if a.dim() else 1)


def _call(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, widen: Callable[[Tensor], Tensor]
) -> Any:
    """Returns the result of ``function`` on low-precision tensors raised to fp32."""
    new_kwargs = {name: _raised(value, widen) for name, value in kwargs.items()}
    return function(*[_raised(value, widen) for value in args], **new_kwargs)


def _raised(value: Any, widen: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return widen(value) if value.dtype in _LOW else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        new = [_raised(item, widen) for item in value]
        return new if isinstance(value, list) else tuple(new)
    return value


def _rounded(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value) if value.dtype is torch.float32 else value
    if isinstance(value, (list, tuple)):
        new = [_rounded(item, convert) for item in value]
        if isinstance(value, list):
            return new
        # torch.return_types are tuples made from one sequence, named tuples from several values
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    return value


def _matrix_widen(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` in fp32, matrices laid out so that a product need not copy them again."""
    if tensor.dim() < 3 or tensor.is_contiguous():
        return _widen(tensor)
    if tensor.stride(-1) <= tensor.stride(-2):
        return _to(tensor, torch.float32, memory_format=torch.contiguous_format)
    transposed = _transpose(tensor, -2, -1)
    return _transpose(_to(transposed, torch.float32, memory_format=torch.contiguous_format), -2, -1)


# --- in training: what autograd keeps ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Precision:
    """How one call is computed: for which dtype, how its inputs are raised, and for which op."""

    dtype: torch.dtype
    widen: Callable[[Tensor], Tensor]
    legalizer: Legalizer


class _Kept:
    """What autograd keeps instead of an fp32 tensor.

    Attributes:
        tensor: The low-precision tensor, or parameter, that it is made from; with outer hooks, what
            they made of that.
        version: That of the tensor, so that writing to it meanwhile is noticed.
        raise_again: Makes the fp32 tensor; None where ``tensor`` is it.
        layout: Strides of the tensor that ``raise_again`` made first, then shape and strides of the
            view of it to be given back; None for that tensor itself.
    """

    __slots__ = ("layout", "raise_again", "tensor", "version")

    def __init__(
        self,
        tensor: Any,
        raise_again: Callable[[Tensor], Tensor] | None = None,
        layout: tuple[Any, Any, Any] | None = None,
    ) -> None:
        self.tensor, self.raise_again, self.layout = tensor, raise_again, layout
        self.version = tensor._version


def _keeping_low(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args, precision: _Precision
) -> Any:
    """Returns the rounded result of ``function`` in fp32; autograd keeps low-precision tensors.

    An fp32 copy of an input is made again from the input, or from the parameter behind it, which is
    alive anyway; an output is kept as it was rounded; statistics of a norm stay as they are.
    """
    convert, widen = CAST[precision.dtype], precision.widen
    is_product = precision.legalizer.kind in _PRODUCTS
    # By address: what an fp32 input is made from, how, and its strides.
    sources: dict[int, tuple[Tensor, Callable[[Tensor], Tensor], Any]] = {}
    alive: set[int] = set()  # addresses of fp32 parameters that are inputs themselves
    pending: list[tuple[int, _Kept]] = []
    outer = _top_hooks(True)

    def reround(tensor: Tensor) -> Tensor:
        return widen(convert(tensor))

    def raised(tensor: Tensor) -> Tensor:
        wide = widen(tensor)
        sources[_data_ptr(wide)] = (tensor, widen, wide.stride())
        return wide

    def pack(tensor: Tensor) -> _Kept:
        tensor = _detach(tensor)
        if tensor.dtype is not torch.float32 or not tensor.numel():
            return keep(_Kept(tensor))
        pointer = _data_ptr(tensor)
        found = sources.get(pointer)
        if found is not None:
            source, again, strides = found
            layout = (strides, tensor.shape, tensor.stride())
            return keep(_Kept(_detach(source), again, layout))
        if pointer in alive:
            return keep(_Kept(tensor))
        if is_product:
            low = convert(tensor)
            # Of fp32 inputs that were not rounded, or a copy of an input in another layout.
            if precision.legalizer.mode == "fast" or _equal(_widen(low), tensor):
                return keep(_Kept(low, _widen))
            return keep(_Kept(tensor))
        kept = _Kept(tensor)
        pending.append((pointer, kept))
        return kept

    def keep(kept: _Kept) -> _Kept:
        if outer is not None:
            kept.tensor = outer[0](kept.tensor)
        return kept

    def unpack(kept: _Kept) -> Tensor:
        tensor: Tensor = kept.tensor
        if outer is not None:
            tensor = outer[1](tensor)
        elif tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.dtype}, {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {kept.version} instead"
            )
        if kept.raise_again is None:
            return tensor
        tensor = kept.raise_again(tensor)
        return tensor if kept.layout is None else _laid_out(tensor, *kept.layout)

    new_args = tuple([_raised(value, raised) for value in args])
    for value, cast in zip(given, args, strict=False):
        if type(value) is not torch.nn.Parameter:
            continue
        if value is not cast:
            for pointer, (source, _, strides) in sources.items():
                if source is cast:
                    sources[pointer] = (value, reround, strides)
        elif value.dtype is torch.float32:
            alive.add(_data_ptr(value))
    _push_hooks(pack, unpack)
    try:
        result = _call(function, new_args, kwargs, raised)
    finally:
        _pop_hooks()
    rounded = _rounded(result, convert)
    for pointer, kept in pending:
        if isinstance(result, Tensor) and pointer == _data_ptr(result):
            kept.tensor, kept.raise_again = _detach(rounded), _widen
            kept.version = rounded._version
        keep(kept)
    return rounded


def _laid_out(tensor: Tensor, strides: Any, shape: Any, view_strides: Any) -> Tensor:
    """Returns the view of ``tensor``, which must have these strides, and had when it was packed."""
    if tensor.shape == shape and tensor.stride() == view_strides:
        return tensor
    if tensor.stride() != strides:  # outer hooks gave back another layout
        same = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = _copy_(same, tensor)
    return _as_strided(tensor, shape, view_strides)


_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_hooks_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


# --- in inference: products by blocks ----------------------------------------------------------

#: Ops that multiply by a matrix of weights, and how many arguments `_in_blocks` takes.
_BLOCKED: Final = {"addmm": (3,), "linear": (2, 3), "matmul": (2,), "mm": (2,)}
_BLOCK_BYTES = 8 << 20
_MOST_ROWS = 512  # beyond, arithmetic hides the casts
_LEAST_WEIGHTS = 1 << 14


def _in_blocks(op: str, args: Args, dtype: torch.dtype) -> Tensor | None:
    """Returns a product whose weights are raised to fp32 block by block; None if it isn't apt.

    For few rows the time is that of reading the weights. Raised as a whole, they are written to
    memory and read again, four bytes each; a block stays in the cache. The transposed product is the
    faster one.
    """
    bias: Tensor | None = None
    if forward_ad._current_level >= 0 or len(args) not in _BLOCKED[op]:
        return None
    if op == "linear":
        x, weight, bias = (*args, None)[:3]  # x: [..., k], weight: [n, k]
    elif op == "addmm":
        bias, x, weight = args
        weight = _t(weight)
    else:
        x, weight = args
        if weight.dim() != 2:
            return None
        weight = _t(weight)
    if weight.numel() < _LEAST_WEIGHTS or x.dim() < 2 or x.numel() > _MOST_ROWS * x.shape[-1]:
        return None
    if bias is not None and bias.dim() != 1:
        return None
    n, k = weight.shape
    if x.shape[-1] != k or weight.dtype is not dtype or not x.numel():
        return None
    rows = x.numel() // k
    size = min(n, max(1, _BLOCK_BYTES // (4 * k)))  # rows of the weight in a block
    memory = _scratch(x.device, size * k + rows * (k + n))
    wide = _copy_(_as_strided(memory, x.shape, _contiguous_strides(x.shape)), x)
    columns = _as_strided(wide, (k, rows), (1, k))
    product = _as_strided(memory, (n, rows), (rows, 1), rows * k)
    is_by_column = weight.stride(0) < weight.stride(1)
    for start in range(0, n, size):
        length = min(size, n - start)
        strides = (1, length) if is_by_column else (k, 1)
        block = _as_strided(memory, (length, k), strides, rows * (k + n))
        _copy_(block, _narrow(weight, 0, start, length))
        _mm(block, columns, out=_narrow(product, 0, start, length))
    if bias is not None:
        _add_(product, _unsqueeze(_widen(bias), 1))
    # A copy to another layout is fast in one dtype only.
    return _reshape(_contiguous(_t(CAST[dtype](product))), (*x.shape[:-1], n))


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1]


_thread: Final = threading.local()  # .memory: kept, since memory new from the system is slow


def _scratch(device: torch.device, size: int) -> Tensor:
    """Returns memory for so many elements that nothing else uses until this thread asks again."""
    memory = getattr(_thread, "memory", None)
    if memory is None or memory.device != device or memory.numel() < size:
        with torch.inference_mode(False):
            memory = torch.empty(size, dtype=torch.float32, device=device)
        if device.type == "cpu":  # elsewhere torch keeps memory itself
            _thread.memory = memory
    return memory


# --- in a graph: rounding that compilers keep --------------------------------------------------


def _in_graph(function: Callable[..., Any], args: Args, kwargs: Kwargs, dtype: torch.dtype) -> Any:
    """Returns what the composition of casts would, where inductor leaves out casts there and back.

    So the rounding is arithmetic on the bits of fp32, which is fused with what is around it.
    """
    result = _call(function, args, kwargs, _raised_in_graph)

    def convert(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return _RoundOutput.apply(tensor, dtype)  # type: ignore[no-any-return, no-untyped-call]
        return CAST[dtype](round_fp32(tensor, dtype))

    return _rounded(result, convert)


def _raised_in_graph(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return _RoundInput.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return round_fp32(_widen(tensor), tensor.dtype)


class _RoundInput(torch.autograd.Function):
    """Low precision -> fp32, rounded both ways."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return round_fp32(_widen(tensor), tensor.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return CAST[ctx.dtype](round_fp32(_widen(gradient), ctx.dtype))


class _RoundOutput(torch.autograd.Function):
    """fp32 -> low precision, rounded both ways."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return CAST[dtype](round_fp32(tensor, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return round_fp32(_widen(gradient), ctx.dtype), None


def round_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` rounded to ``dtype`` but kept in float32, without a cast to ``dtype``.

    To nearest, ties to even, as the cast would, NaN staying NaN. Has no gradient.

    Args:
        tensor: float32, of any shape.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """
    bits = tensor.view(torch.int32)
    if dtype is torch.bfloat16:
        # Half a unit in the last place less one, and one more if that place is odd.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return _where(_isnan(tensor), tensor, rounded.view(torch.float32))
    # Adding 2**13 times the power of two at or below it leaves float16's ten mantissa bits; below
    # its least normal number the power stays that of 2**-14.
    exponent = (bits & 0x7F800000).clamp(113 << 23, 143 << 23)
    power = (exponent + (13 << 23)).view(torch.float32)
    magnitude = (bits & 0x7FFFFFFF).view(torch.float32)
    magnitude = _sub(_add(magnitude, power), power)
    magnitude = _where(_gt(magnitude, 65504.0), float("inf"), magnitude)
    magnitude = _where(_isnan(tensor), tensor, magnitude)
    return (magnitude.view(torch.int32) | (bits & -0x80000000)).view(torch.float32)


# --- bfloat16 for numpy ------------------------------------------------------------------------


def to_uint16(values: Tensor | npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Returns the bfloat16 encodings of ``values``: sign, 8 exponent bits, 7 mantissa bits.

    Rounds as torch's own casts do: to nearest, ties to even, beyond the greatest value to infinity;
    a NaN stays one.

    Args:
        values: Floating, of any shape and device.

    Returns:
        An array of its own, with the shape of ``values``.

    Raises:
        OptionError: ``values`` are not floating.
    """
    import numpy as np

    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise OptionError(f"values must be float16, float32 or float64, not {array.dtype}")
        values = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if not values.is_floating_point():
        raise OptionError(f"values must be floating, not {values.dtype}")
    encoded = values.detach().to("cpu", torch.bfloat16, copy=True)
    return encoded.contiguous().view(torch.uint16).numpy()


def from_uint16(encoded: npt.NDArray[np.uint16]) -> Tensor:
    """Returns the bfloat16 tensor that `to_uint16` encodes so.

    Args:
        encoded: uint16, of any shape.

    Returns:
        A tensor of its own on the CPU, with the shape of ``encoded``.

    Raises:
        OptionError: ``encoded`` is not of uint16.
    """
    import numpy as np

    array = np.asarray(encoded)
    if array.dtype.kind != "u" or array.dtype.itemsize != 2:
        raise OptionError(f"encoded bfloat16 must be uint16, not {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native).view(torch.bfloat16)
