"""Counts what a step asks of a device: kernels, casts, bytes, waits, in a process with a fake device.

A *kernel* is an op that computes or copies; views and allocations are none. Its *traffic* is the size
of its inputs and outputs: what a kernel reads and writes at least, were nothing in a cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import library

aten = torch.ops.aten

#: Ops that neither compute nor copy, although their schemas don't say so.
NO_KERNEL = {
    "_reshape_alias",
    "_unsafe_view",
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "sym_numel",
    "sym_size",
    "sym_stride",
}
#: Ops that cast, if dtypes differ.
CASTS = {"_foreach_copy_", "_to_copy", "copy_"}
#: Ops after which the host needs what the device computed.
WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
}


@dataclass(frozen=True)
class Kernel:
    """One call that reached the device.

    Attributes:
        name: Of the ATen op, without namespace.
        given: Dtypes of the floating inputs.
        returned: Dtypes of the floating outputs.
        bytes: Of all inputs and outputs.
        casts: How many tensors it casts from one floating dtype to another.
        casts_of_parameters: How many of these are parameters, or views of one.
        waits: Whether the host waits for it.
        moves: Whether it copies between the host and the device.
    """

    name: str
    given: tuple[str, ...]
    returned: tuple[str, ...]
    bytes: int
    casts: int
    casts_of_parameters: int
    waits: bool
    moves: bool

    def __str__(self) -> str:
        """Returns the name and the dtypes: ``mm bfloat16,bfloat16 -> bfloat16``."""
        return f"{self.name} {','.join(self.given)} -> {','.join(self.returned)}"

    def apart(self) -> list[str]:
        """Returns this text; of casts made together, that of each cast."""
        if self.name != "_foreach_copy_":
            return [str(self)]
        return [f"copy_ {a} -> {b}" for a, b in zip(self.given, self.returned, strict=True)]


class Touched(NamedTuple):
    """A tensor that a kernel reads or writes."""

    dtype: torch.dtype
    bytes: int
    storage: int  # identifies it
    device_type: str
    dimensions: int


def _touched(tensor: Tensor) -> Touched:
    size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()._cdata
    return Touched(tensor.dtype, size, storage, tensor.device.type, tensor.dim())


def _kernel(
    name: str,
    read: list[Touched],
    inputs: list[Touched],
    outputs: list[Touched],
    parameters: set[int],
) -> Kernel:
    """Returns the kernel ``name``; ``read`` are those inputs that it reads."""
    cast = [
        a
        for a, b in zip(read, outputs, strict=False)
        if name in CASTS
        and a.dtype is not b.dtype
        and a.dtype.is_floating_point
        and b.dtype.is_floating_point
    ]
    places = {t.device_type for t in inputs if t.dimensions}, {t.device_type for t in outputs}
    return Kernel(
        name,
        _dtypes(inputs),
        _dtypes(outputs),
        sum(t.bytes for t in (*inputs, *outputs)),
        casts=len(cast),
        casts_of_parameters=sum(t.storage in parameters for t in cast),
        waits=name in WAITS or (bool(inputs) and "cpu" in places[1]),
        moves=len(places[0] | places[1]) > 1,
    )


class Kernels(TorchDispatchMode):
    """Collects the kernels that reach ``device_type``; ``list`` holds them, in order."""

    def __init__(self, device_type: str, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.list: list[Kernel] = []
        self._device_type = device_type
        self._storages = {p.untyped_storage()._cdata for p in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if self._is_kernel(func, inputs, outputs):
            self.list.append(self._kernel(func, inputs, outputs))
        return result

    def _is_kernel(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        name = _name(func)
        is_there = any(t.device.type == self._device_type for t in inputs + outputs)
        return is_there and name not in NO_KERNEL and not (func.is_view and outputs)

    def _kernel(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Kernel:
        name, given = _name(func), list(map(_touched, inputs))
        read = given[1:] if name == "copy_" else given[:1]
        return _kernel(name, read, given, list(map(_touched, outputs)), self._storages)


class Log:
    """Collects the kernels of the fake device as `Kernels` does, below all modes."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.list: list[Kernel] = []
        self._storages = {p.untyped_storage()._cdata for p in parameters}

    def __enter__(self) -> Log:
        library().start()
        return self

    def __exit__(self, *error: object) -> None:
        library().stop.restype = ctypes.c_char_p
        for line in library().stop().decode().splitlines():
            name, given, returned = json.loads(line)
            inputs, outputs = ([_parsed(each) for each in side] for side in (given, returned))
            self.list.append(_kernel(name, inputs, inputs, outputs, self._storages))


def _parsed(logged: list[Any]) -> Touched:
    dtype = getattr(torch, _DTYPES.get(logged[0], logged[0].lower()))
    return Touched(dtype, *logged[1:])


#: Names of dtypes in C++ that Python has others for.
_DTYPES = {"Byte": "uint8", "Char": "int8"}


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _dtypes(tensors: list[Touched]) -> tuple[str, ...]:
    floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
    return tuple(str(dtype).removeprefix("torch.") for dtype in floating)


def summary(kernels: list[Kernel]) -> dict[str, int]:
    """Returns the figures of a step: numbers of kernels, and bytes."""
    return {
        "kernels": len(kernels),
        "casts": sum(kernel.casts for kernel in kernels),
        "casts_of_parameters": sum(kernel.casts_of_parameters for kernel in kernels),
        "bytes": sum(kernel.bytes for kernel in kernels),
        "cast_bytes": sum(kernel.bytes for kernel in kernels if kernel.casts),
        "waits": sum(kernel.waits for kernel in kernels),
        "moves": sum(kernel.moves for kernel in kernels),
    }


# --- the device ---------------------------------------------------------------------------------


@contextlib.contextmanager
def fake(device_type: str = "cuda") -> Iterator[None]:
    """Has tensors be made on the fake device, and be fake ones."""
    # The engine's threads would ask the driver for a device.
    in_this_thread = torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode(), torch.device(device_type), in_this_thread:
        yield


def _attention(  # noqa: PLR0917  # as torch has them
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that torch picks on CUDA: flash for 16 bits, or the efficient one.

    A build for CPUs would take it apart, so that a mask's dtype alone changes what is counted.
    """
    if query.dim() != 4:  # CUDA has no kernels for these either
        math = aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            added = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = added.masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient = aten._scaled_dot_product_efficient_attention
    result = efficient(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )
    return result[0]  # type: ignore[no-any-return]


_library = torch.library.Library("aten", "IMPL")  # as long as the process
if not torch.cuda.is_available():  # a real device has its own
    for _key in ("AutogradCUDA", "CUDA", "AutogradXPU", "XPU"):
        _library.impl("scaled_dot_product_attention", _attention, _key)


@contextlib.contextmanager
def autocast(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """``torch.autocast("cuda", dtype)``, which a build for CPUs disables: the state that it sets."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# --- models and their steps ---------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A model, what it is called with, and what makes a loss of its output."""

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


def kernels_of(
    make: Callable[[], Step],
    *,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    device_type: str = "cuda",
    is_training: bool = True,
    prepare: Callable[[Step], object] = lambda step: None,
) -> list[Kernel]:
    """Returns the kernels of a second step: forward and backward, or a forward without gradients.

    Args:
        make: Is called on the device.
        region: Makes the context of the forward alone.
        device_type: Of the fake device.
        is_training: Whether there are a loss and a backward.
        prepare: Is called before the step.
    """
    with contextlib.ExitStack() as stack:
        if library() is None:
            stack.enter_context(fake(device_type))
            step = make()
        else:
            module = torch.get_device_module(device_type)
            module._initialized, module.default_generators = True, (torch.Generator(),)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            with torch.device(device_type):  # a mode, which compiled nodes do without
                step = make()
        step.model.train(is_training)
        prepare(step)

        def run() -> None:
            if not is_training:
                with torch.no_grad(), region():
                    step.model(**step.inputs)
                return
            step.model.zero_grad()
            with region():
                loss = step.loss(step.model(**step.inputs))
            loss.backward()

        run()  # in the first calls hmpx finds out what the device is fast in
        parameters = [*step.model.parameters()]
        with Kernels(device_type, parameters) if library() is None else Log(parameters) as counting:
            run()
        return counting.list
