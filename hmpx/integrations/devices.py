"""Maps ``"hpu"`` to a present device: rewrites Habana's device and backend names.

Not in threads that were started before, or by C++, such as hooks of a backward on CUDA.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode
from torch.serialization import default_restore_location

from ..errors import HmpxError
from ..patching import Patch
from ..tensors import is_available
from ..torch_internals import DeviceContext


class GaudiError(HmpxError, NotImplementedError):
    """The program uses a feature that only a Gaudi has."""


def device_type() -> str:
    """Returns the type of the device that stands in for ``"hpu"``."""
    return "cuda" if is_available("cuda") else "cpu"


class DeviceMode(TorchFunctionMode):
    """Rewrites ``"hpu"`` in the arguments of every torch function that this thread calls."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.device:  # it still says "hpu"; what is placed there does not
            return func(*args, **(kwargs or {}))
        for value in args:
            if is_hpu(value):
                args = tuple(map(on_device, args))
                break
        if kwargs is None:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_device(kwargs["device"])}
        return func(*args, **kwargs)


def is_hpu(value: object) -> bool:
    """Whether ``value`` names an HPU."""
    name = value.type if isinstance(value, torch.device) else value
    return isinstance(name, str) and name.partition(":")[0] == "hpu"


def on_device(value: Any) -> Any:
    """Returns the device that stands in for ``value`` if that is an HPU, else ``value``."""
    if not is_hpu(value):
        return value
    _, _, index = str(value).partition(":")
    name = device_type()
    return torch.device(f"{name}:{index}" if index and name != "cpu" else name)


def _substituted(value: Any) -> Any:
    """Returns the substitute for a device, its type, a backend, or ``"cpu:gloo,hpu:hccl"``."""
    if not isinstance(value, str):
        return on_device(value)
    backend = "nccl" if device_type() == "cuda" else "gloo"
    names = {"hccl": backend, "hcl": backend, "hpu_backend": "inductor"}
    parts = [part.split(":") for part in value.lower().split(",")]
    if names.keys().isdisjoint(itertools.chain.from_iterable(parts)):
        return str(on_device(value))
    names["hpu"] = device_type()
    found = [":".join([names.get(name, name) for name in part]) for part in parts]
    return ",".join(dict.fromkeys(found))


def _substituting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with Habana's names in its arguments substituted."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_substituted(v) if isinstance(v, str | torch.device) else v for v in args)
        for name, value in kwargs.items():
            if isinstance(value, str | torch.device):
                kwargs[name] = _substituted(value)
        return function(*args, **kwargs)

    return call


def _loading_elsewhere(load: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `torch.load` accept checkpoints that were written on an HPU, or are mapped to one."""

    @functools.wraps(load)
    def call(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, str | torch.device):
            return load(f, _substituted(map_location), *args, **kwargs)

        def restore(storage: Any, location: str) -> Any:
            if callable(map_location):
                moved = map_location(storage, location)
                if moved is not None:
                    return moved
            elif isinstance(map_location, Mapping):
                location = map_location.get(location, location)
            return default_restore_location(storage, _substituted(location))  # type: ignore[no-untyped-call]

        return load(f, restore, *args, **kwargs)

    return call


def _to_hpu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    if device is None:
        device = "hpu"
    elif isinstance(device, int):
        device = f"hpu:{device}"
    return self.to(on_device(device), non_blocking=non_blocking)


def _in_mode(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(self: threading.Thread) -> Any:
        with DeviceMode():
            return run(self)

    return call


def patches(hpu: types.ModuleType) -> list[Patch]:
    """Returns the patches that make torch accept Habana's names; ``hpu`` becomes `torch.hpu`."""
    load = _loading_elsewhere(torch.load)
    found = [
        Patch(torch, "hpu", hpu),
        Patch(torch, "load", load),
        Patch(torch.serialization, "load", load),
        Patch(torch, "compile", _substituting(torch.compile)),
        *[Patch(owner, "hpu", _to_hpu) for owner in (torch.Tensor, torch.nn.Module)],
        # torch.device as a context, and torch.set_default_device, act below every other mode
        *[
            Patch(owner, "__init__", _substituting(owner.__init__))
            for owner in (torch.autocast, torch.utils.data.DataLoader, DeviceContext)
        ],
        # patched below ``run``, which subclasses override
        Patch(
            threading.Thread,
            "_bootstrap_inner",
            _in_mode(threading.Thread._bootstrap_inner),  # type: ignore[attr-defined]
        ),
    ]
    if torch.distributed.is_available():
        found += [
            Patch(torch.distributed, name, _substituting(getattr(torch.distributed, name)))
            for name in ("init_process_group", "new_group")
        ]
    return found
