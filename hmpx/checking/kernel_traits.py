"""What lint knows about a kernel, from its schema."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..torch_internals import schemas_of
from .lint_trace import COPIES

#: Kernels that make ranges; those that add up; those that make whole numbers of whole numbers; casts.
RANGES: Final = frozenset({"arange", "linspace"})
SUMS: Final = frozenset({"add", "sub", "rsub", "lerp"})
COUNTS: Final = SUMS | {"mul", "cumsum", "sum"}
SCALES: Final = frozenset({"mul", "div"})
UNDOING: Final = frozenset({"sub", "rsub", "foreach_sub"})
CASTS: Final = frozenset({"_to_copy", "copy_"})

#: Kernels of products that torch has in inference mode, and counts by their parts.
_WHOLE: Final = frozenset({"linear", "matmul"})

#: Arguments that say which elements get which values, and how. Kernels with a word in their name add them up.
_PLACES: Final = frozenset({"index", "indices", "offsets", "lengths"})
_WAYS: Final = frozenset({"accumulate", "reduce"})
_ADDING: Final = frozenset({"accumulate", "add", "backward", "bag"})
#: Arguments of windows, which may overlap, and words of kernels that then add up.
_WINDOWS: Final = ({"size", "step"}, {"kernel_size", "stride"})
_SHARING: Final = frozenset({"backward", "col2im"})

#: Names of running averages, which most norms write to without saying so.
_AVERAGES: Final = frozenset(
    each.name
    for schema in schemas_of("aten::_native_batch_norm_legit")
    for each in schema.arguments
    if not schema.overload_name and each.alias_info is not None and each.alias_info.is_write
)


class KernelTraits(NamedTuple):
    """What is known about a kernel."""

    name: str
    writes: bool = False  # to its first argument, and no other
    is_random: bool = False
    is_checked: bool = False
    adds: bool = False  # perhaps
    scatters: bool = False  # perhaps many terms to one element
    is_noted: bool = False  # as a call is: values come from it
    statistics: tuple[int, ...] = ()  # places of running averages that it writes to
    flops: Callable[..., int] | None = None


def _flops_of_product(x: Tensor, *others: object, out_val: Tensor) -> int:
    return 2 * out_val.numel() * x.shape[-1]


@functools.cache
def traits_of(func: Any) -> KernelTraits:
    """Returns the traits of a kernel, from its schema and tags."""
    schema, name = getattr(func, "_schema", None), getattr(func, "overloadpacket", func).__name__
    if schema is None:
        return KernelTraits(name)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    written = [n for n, e in enumerate(schema.arguments) if e.alias_info and e.alias_info.is_write]
    is_torchs = schema.name.startswith("aten::")  # other packages' names may mean something else
    writes = is_torchs and name.endswith("_") and written == [0] and not is_random
    adds = torch.Tag.pointwise in func.tags or "add" in name or name.startswith("_foreach")
    scatters = scatters_terms(func)
    is_noted = is_random or name in COPIES
    is_named = scatters or is_noted or name in RANGES | CASTS | COUNTS | SCALES
    is_checked = writes or (is_named and not written)  # to run it again would write to an `out=`
    averages = tuple(n for n, each in enumerate(schema.arguments) if each.name in _AVERAGES)
    flops = flop_registry.get(func.overloadpacket, _flops_of_product if name in _WHOLE else None)
    return KernelTraits(
        name, writes, is_random, is_checked, adds, scatters, is_noted, averages, flops
    )


def scatters_terms(func: Any) -> bool:
    """Whether a kernel may add many terms to the elements that an argument names, or that windows share."""
    names, words = {each.name for each in func._schema.arguments}, func._schema.name[6:].split("_")
    is_of_windows = any(names >= each for each in _WINDOWS) and bool(_SHARING & {*words})
    return is_of_windows or (bool(names & _PLACES) and bool(names & _WAYS or _ADDING & {*words}))
