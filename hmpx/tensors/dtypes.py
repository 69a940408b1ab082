"""The dtypes that hmpx casts between, device types, and their names."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from .. import arguments
from ..errors import OptionError, raised_here, shown, suggestion

#: Tensors of these dtypes may be cast; float64, complex, integer and bool never are.
ELIGIBLE: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})

LOW_PRECISION: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
LOW_DTYPES: Final = frozenset(LOW_PRECISION)


def is_low(dtype: object) -> TypeGuard[torch.dtype]:
    return isinstance(dtype, torch.dtype) and dtype in LOW_DTYPES


#: The dtypes that an op may compute in, and that its outputs may be cast to.
COMPUTED: tuple[torch.dtype, ...] = (*LOW_PRECISION, torch.float32, torch.float64)

#: The cheapest differentiable cast to each dtype: ``Tensor.bfloat16`` takes half the time of
#: ``Tensor.to``. Taken from torch before anything is patched.
CAST: Mapping[torch.dtype, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        torch.float32: Tensor.float,
        torch.bfloat16: Tensor.bfloat16,
        torch.float16: Tensor.half,
        torch.float64: Tensor.double,
    }
)

_PROMOTING: Final = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
_PROMOTED: Final = {(a, b): torch.promote_types(a, b) for a in _PROMOTING for b in _PROMOTING}


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype to which dtypes promote, without a call that the program's dispatch modes see.

    Those of 8 bits don't promote in torch: the wider one counts, or the first.
    """
    first, *others = dtypes
    for each in others:
        first = _PROMOTED.get((first, each)) or max(first, each, key=lambda each: each.itemsize)
    return first


_SHORT_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float64: "fp64",
    }
)


class HasName(Protocol):
    """An object with a name, such as a number format."""

    @property
    def name(self) -> str:
        """Its name."""


def short_name(dtype: torch.dtype | HasName | str) -> str:
    """Returns ``"bf16"`` for ``torch.bfloat16``, ``"int64"`` for ``torch.int64``; a format's own name."""
    if isinstance(dtype, str):
        return dtype
    if not isinstance(dtype, torch.dtype):
        return dtype.name
    return _SHORT_NAMES.get(dtype, long_name(dtype))


def long_name(dtype: torch.dtype | HasName | str) -> str:
    """Returns ``"bfloat16"`` for ``torch.bfloat16``; a format's own name."""
    if isinstance(dtype, str):
        return dtype
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype.name


def parse_name(name: str, allowed: tuple[torch.dtype, ...] = COMPUTED) -> torch.dtype:
    """Returns the dtype among ``allowed`` named ``"float16"`` or ``"fp16"``, say; else raises `OptionError`."""
    names = {n: d for d in allowed for n in (str(d).removeprefix("torch."), short_name(d))}
    found = names.get(name.removeprefix("torch."))
    if found is None:
        known = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise OptionError(f"unknown dtype {shown(name)} ({known}){suggestion(name, names)}")
    return found


# --- devices -------------------------------------------------------------------------------------


class DeviceType(NamedTuple):
    """Facts about one device type; any other of torch's works without a row.

    `compute.capability` measures what a device computes natively; facts about single ops on it are in ``ops.ini`` and
    ``kernels.ini``.
    """

    name: str  # As torch calls it
    is_suggested: bool  # Error texts list it among the known types
    # ``kernels.ini`` says which ops lack kernels there. On other types, ops that lack a kernel
    # on some type are tried.
    has_kernel_table: bool
    # Its place in the order in which ``torch_state.switch`` uses autocast bits of absent devices as
    # marks; None if its bit is not used
    spare: int | None
    spellings: tuple[str, ...] = ()  # Its other names, for hints


DEVICE_TYPES: Final = (
    DeviceType("cpu", True, True, None),
    DeviceType("cuda", True, True, 6, ("gpu", "nvidia", "rocm", "amd")),
    DeviceType("hpu", True, False, 3, ("gaudi", "habana")),
    DeviceType("xpu", True, False, 4, ("intel",)),
    # The first: autocast itself never reads its bit
    DeviceType("mps", True, False, 0, ("metal", "apple")),
    DeviceType("mtia", True, False, 1),
    DeviceType("xla", True, False, 2, ("tpu",)),
    DeviceType("ipu", False, False, None),  # its bit marks training
    DeviceType("privateuseone", False, False, 5),
)

_SPELLINGS: Final = {other: each.name for each in DEVICE_TYPES for other in each.spellings}


def default_device_types() -> frozenset[str]:
    """Returns the accelerator's device type when there is one, else ``{"cpu"}``.

    An importable ``habana_frameworks`` means Gaudi, even before that package registers itself.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and is_available(accelerator.type):
        return frozenset({accelerator.type})
    if _has_habana_frameworks():
        return frozenset({"hpu"})
    return frozenset({"cpu"})


def is_available(device_type: str) -> bool:
    """Whether there is an accelerator of this type that this build of torch supports.

    This starts no context on the accelerator, which would make it unusable in processes that are
    forked later: it counts CUDA devices through the management library, whereas
    `torch.cuda.is_available` initializes the driver.
    """
    module = torch.get_device_module(device_type)
    if device_type == "cuda" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count() > 0
    return bool(module.is_available())


def is_present(device_type: str) -> bool:
    try:
        return device_type == "meta" or is_available(device_type)
    except raised_here(RuntimeError, AttributeError):  # torch has no module, or no `is_available`
        return False


def is_captured(tensor: Tensor) -> bool:
    """Whether calls with ``tensor`` are being recorded for a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def parse_device_types(value: object) -> frozenset[str]:
    """Returns ``value`` as a set of torch device types, None as the default; else raises `OptionError`."""
    if value is None:
        return default_device_types()
    names = arguments.texts("device_types", value, 'a set of names such as {"cuda"}')
    if not names:
        raise OptionError('device_types is empty; name at least one, such as {"cuda"}')
    return frozenset([parse_device_type("device_types", name) for name in names])


def parse_device_type(argument: str, value: object) -> str:
    """Returns ``value`` as the name of a torch device type; else raises `OptionError`."""
    name = arguments.text(argument, value, 'a device type such as "cuda"')
    try:
        parsed = torch.device(name).type
    except raised_here(RuntimeError, ValueError):  # for a bad name, and for a bad number after it
        parsed = None
    if parsed != name:
        known = tuple([each.name for each in DEVICE_TYPES if each.is_suggested])
        hint = (
            suggestion(name.partition(":")[0], known, _SPELLINGS) or f" (known: {', '.join(known)})"
        )
        raise OptionError(f"{argument}: torch has no device type {shown(name)}{hint}")
    return name


def _has_habana_frameworks() -> bool:
    loaded = sys.modules.get("habana_frameworks")
    if loaded is not None:
        return not getattr(loaded, "__hmpx_shim__", False)
    path = tuple(sys.path)
    if path not in _searched:  # it takes longer than the rest of a block's beginning
        # Unlike importlib.util's function it takes no lock, which Ctrl-C might leave locked.
        found = importlib.machinery.PathFinder.find_spec("habana_frameworks", list(path))
        _searched[path] = found is not None
    return _searched[path]


#: ``sys.path`` -> whether ``habana_frameworks`` is there.
_searched: Final[dict[tuple[str, ...], bool]] = {}
