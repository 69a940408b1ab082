"""Classes of tensors and modes that torch keeps private, and ways to disable them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.masked.maskedtensor.core
from torch import Tensor

from ..errors import TorchError
from .torch_part import one, rely_on

#: Modules that name `torch.overrides.get_default_nowrap_functions`: getters whose results stay as they are.
NAMING_GETTERS = (torch._tensor, torch.masked.maskedtensor.core)

#: The class of tensors without values.
FakeTensor = rely_on(
    "torch._subclasses.fake_tensor.FakeTensor",
    feature="models of fake tensors",
    since="2.13",
    without="weights of RNNs are cast one by one there, and hmpx.freeze leaves all as they are",
    behaves=lambda fake: isinstance(fake, type) and issubclass(fake, Tensor),
    instead=(type("NoFakeTensor", (), {}),),
)


class _Tracker(Tensor):
    """A tensor that reports whether its calls were seen."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "seen"


def _disables_subclasses(disable: Any) -> bool:
    tracker = one().as_subclass(_Tracker)
    with disable():
        inside: Any = torch.exp(tracker)
    return isinstance(inside, Tensor) and torch.exp(tracker) == "seen"


#: Inside, subclasses' ``__torch_function__`` is not called.
DisableTorchFunctionSubclass = rely_on(
    "torch._C.DisableTorchFunctionSubclass",
    feature="tensor subclasses",
    since="2.13",
    without="casts inside of a subclass' own functions would not end",
    behaves=_disables_subclasses,
)


class _NoDispatchMode:
    """Replaces `TorchDispatchMode` in a torch without it."""

    def __init__(self) -> None:
        raise TorchError(
            f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode, which "
            "hmpx.freeze needs; install another version of torch: see docs/versions.md"
        )


#: A context in which no dispatch mode sees a call; the class of modes; tensors of graphs being traced;
#: whether a tensor contains others.
disable_modes, TorchDispatchMode, FunctionalTensor, is_tensor_of_tensors = rely_on(
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    feature="freezing",
    since="2.13",
    without="hmpx.freeze raises TorchError",
    behaves=lambda disable, mode, tensor, has_others: (
        isinstance(mode, type)
        and isinstance(tensor, type)
        and has_others(one()) is False
        and hasattr(disable(), "__enter__")
    ),
    instead=(
        contextlib.nullcontext,
        _NoDispatchMode,
        type("NoTensor", (), {}),
        lambda tensor: False,
    ),
)


def _current_function_modes() -> Sequence[Any]:
    return ()


#: The functions that a context of a device gives that device: known from the first call on, which none
#: may be patched before.
device_constructors = rely_on(
    "torch.utils._device._device_constructors",
    feature="torch.full in contexts of devices",
    since="2.13",
    without="it fills tensors on the CPU there, while torch is converted",
    behaves=lambda constructors: torch.full in constructors(),
    instead=(frozenset,),
)

#: The active function modes, and the class of the one that `torch.device` enters.
function_modes, DeviceContext = rely_on(
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
    feature="scripts that place tensors on hpu",
    since="2.13",
    without="the stand-in for habana_frameworks would not see torch.device as a context",
    behaves=lambda modes, context: isinstance(modes(), (list, tuple)),
    instead=(_current_function_modes, type("NoContext", (), {"__init__": lambda self: None})),
)
