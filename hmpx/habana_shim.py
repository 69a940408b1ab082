"""Stands in for ``habana_frameworks``, so that a script written for Gaudi runs on CUDA or the CPU.

Puts modules of Habana's names into `sys.modules`, and sends whatever the script places on ``"hpu"``
to the device that is there. Knows no op list: the shim's ``hmp.convert`` is `hmpx.convert` with
HMP's own positional order.

What lands on the device: factories and methods with a ``device`` argument, ``tensor.to``,
``module.to``, ``tensor.hpu()``, ``torch.load``, ``torch.autocast``, ``with torch.device("hpu")``,
``torch.set_default_device``; process groups with the backend ``hccl``; ``torch.compile`` with the
backend ``hpu_backend``.

What does not: threads other than the one that called `install` and processes started by spawn;
``torch.Generator(device="hpu")``, the legacy constructors ``torch.Tensor(device="hpu")`` and
``.type("torch.hpu.FloatTensor")``; and ``tensor.device.type`` is that of the device really used,
so comparing it with ``"hpu"`` gives False. Habana's own optimizers and kernels
(``hpex.optimizers``, ``hpex.kernels``) are absent: importing them is an ImportError. ``torch.compile``
runs, but may break the graph where it traces through the rewriting of arguments.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, Final

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode
from torch.serialization import default_restore_location

from . import ops, patching, session
from .dtypes import is_available
from .errors import HmpxError
from .patching import Patch
from .switch import disable_casts
from .torch_internals import DeviceContext, function_modes

_ROOT: Final = "habana_frameworks"
_SHIM_FLAG: Final = "__hmpx_shim__"  # dtypes.py asks for it

_replaced_modules: dict[str, types.ModuleType | None] = {}
_applied: list[patching.Applied] = []
_mode: _DeviceMode | None = None


def install() -> bool:
    """Puts the shim in place.

    Returns:
        Whether it is; False if the real ``habana_frameworks`` is importable, which then is used.
    """
    global _mode
    if _mode is not None:
        return True
    if _is_importable(f"{_ROOT}.torch"):
        return False
    ops.table()  # read off torch before anything here changes it
    modules = _modules()
    if _is_importable("hmp"):  # somebody else's package of that name: theirs stays
        modules = {name: m for name, m in modules.items() if name.partition(".")[0] != "hmp"}
    for name, module in modules.items():
        _replaced_modules[name] = sys.modules.get(name)
        sys.modules[name] = module
    _applied.extend(patching.apply(_patches(modules["torch.hpu"])))
    _mode = _DeviceMode()
    _mode.__enter__()  # type: ignore[no-untyped-call]
    return True


def uninstall() -> None:
    """Takes the shim away; does nothing if it is not in place.

    To be called in the thread that called `install`, outside any torch function mode entered since.

    Raises:
        HmpxError: It is called elsewhere.
    """
    global _mode
    if _mode is None:
        return
    stack = function_modes()
    if not stack or stack[-1] is not _mode:
        raise HmpxError(
            "habana_shim.uninstall() in another thread than install(), or inside a torch function "
            "mode entered since; leave that mode first"
        )
    _mode.__exit__(None, None, None)
    _mode = None
    patching.undo(_applied)
    _applied.clear()
    for name, previous in _replaced_modules.items():
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
    _replaced_modules.clear()


def device_type() -> str:
    """Returns the type of the device that stands in for ``"hpu"``."""
    return "cuda" if is_available("cuda") else "cpu"


# --- devices -----------------------------------------------------------------------------------


class _DeviceMode(TorchFunctionMode):
    """Rewrites ``"hpu"`` in the arguments of every torch function of this thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for value in args:
            if _is_hpu(value):
                args = tuple(map(_on_device, args))
                break
        if kwargs is None:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_device(kwargs["device"])}
        return func(*args, **kwargs)


def _is_hpu(value: object) -> bool:
    if isinstance(value, str):
        return value == "hpu" or value.startswith("hpu:")
    return isinstance(value, torch.device) and value.type == "hpu"


def _on_device(value: Any) -> Any:
    """Returns the device that stands in for ``value`` if that is an hpu, else ``value``."""
    if not _is_hpu(value):
        return value
    _, _, index = str(value).partition(":")
    name = device_type()
    return torch.device(f"{name}:{index}" if index and name != "cpu" else name)


def _substituted(value: Any) -> Any:
    """Returns what stands in for ``value``: a device, a device type or a backend's name."""
    if _is_hpu(value):
        device = _on_device(value)
        return str(device) if isinstance(value, str) else device
    if value == "hccl":
        return "nccl" if device_type() == "cuda" else "gloo"
    if value == "hpu_backend":
        return "inductor"
    return value


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
    """Returns `torch.load` for checkpoints that were written on an hpu, or are to go to one."""

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


def _move_to_hpu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Returns ``self``, a tensor or a module, on the device that stands in for ``"hpu"``."""
    if device is None:
        device = "hpu"
    elif isinstance(device, int):
        device = f"hpu:{device}"
    return self.to(_on_device(device), non_blocking=non_blocking)


def _patches(hpu: types.ModuleType) -> list[Patch]:
    load = _loading_elsewhere(torch.load)
    patches = [
        Patch(torch, "hpu", hpu),
        Patch(torch, "load", load),
        Patch(torch.serialization, "load", load),
        Patch(torch, "compile", _substituting(torch.compile)),
        Patch(torch.Tensor, "hpu", _move_to_hpu),
        Patch(torch.nn.Module, "hpu", _move_to_hpu),
        Patch(torch.autocast, "__init__", _substituting(torch.autocast.__init__)),
        # torch.device as a context, and torch.set_default_device, act below every other mode
        Patch(DeviceContext, "__init__", _substituting(DeviceContext.__init__)),
    ]
    if torch.distributed.is_available():
        patches += [
            Patch(torch.distributed, name, _substituting(getattr(torch.distributed, name)))
            for name in ("init_process_group", "new_group")
        ]
    return patches


# --- modules -----------------------------------------------------------------------------------


def convert(  # noqa: PLR0917  # HMP's positional order
    opt_level: str = "O1",
    bf16_file_path: str | os.PathLike[str] = "",
    fp32_file_path: str | os.PathLike[str] = "",
    isVerbose: bool | str = False,  # noqa: N803  # HMP's name
    low_precision_type: torch.dtype | str = torch.bfloat16,
    fp16_file_path: str | os.PathLike[str] = "",
) -> None:
    """Patches torch as `hmpx.convert` does, with HMP's positional order.

    Where a list is not given, HMP's own is used. Casts on the device that stands in for ``"hpu"``;
    replaces a conversion that is in force.

    Raises:
        OpListError: A list can't be read, or an op stands in two lists.
        OptionError: An argument has a value that it can't have.
    """
    session.convert(
        bf16_file_path or "",
        fp32_file_path or "",
        isVerbose,
        fp16_file_path=fp16_file_path or "",
        opt_level=opt_level,
        low_precision_type=low_precision_type,
        lists=None if opt_level == "O2" else "hmp",
        device_types={device_type()},
    )


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Accepts everything and does nothing: there is no graph to launch here."""


def _same(model: Any, *args: object, **kwargs: object) -> Any:
    return model


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _device_count() -> int:
    return torch.cuda.device_count() if device_type() == "cuda" else 1


def _initialize_distributed(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Returns world size, rank and local rank as the launcher set them; local rank -1 if none."""
    given = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": local_rank}
    for name, value in given.items():
        if value is not None:
            os.environ[name] = str(value)
    environ = os.environ
    return (
        int(environ.get("WORLD_SIZE", 1)),
        int(environ.get("RANK", 0)),
        int(environ.get("LOCAL_RANK", -1)),
    )


#: What `torch.cpu` lacks of an accelerator's module.
_ON_CPU: Final[Mapping[str, Callable[..., Any]]] = {
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "seed": torch.seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "current_device": _zero,
    "empty_cache": _do_nothing,
    "reset_peak_memory_stats": _do_nothing,
    **dict.fromkeys(
        (
            "max_memory_allocated",
            "max_memory_reserved",
            "memory_allocated",
            "memory_reserved",
        ),
        _zero,
    ),
}


def _device_attribute(name: str) -> Any:
    """Returns attribute ``name`` of the torch module of the device that stands in for ``"hpu"``."""
    if device_type() == "cuda":
        return getattr(torch.cuda, name)
    return _ON_CPU[name] if name in _ON_CPU else getattr(torch.cpu, name)


def _contents() -> dict[str, dict[str, Any]]:
    """Returns module name -> its attributes, submodules aside."""
    return {
        _ROOT: {_SHIM_FLAG: True},
        f"{_ROOT}.torch": {},
        f"{_ROOT}.torch.core": dict.fromkeys(
            (
                "hpu_inference_initialize",
                "hpu_inference_set_env",
                "hpu_initialize",
                "hpu_set_env",
                "hpu_set_inference_env",
                "hpu_teardown_inference_env",
                "mark_step",
            ),
            _do_nothing,
        ),
        f"{_ROOT}.torch.hpex": {},
        f"{_ROOT}.torch.hpex.hmp": {"convert": convert, "disable_casts": disable_casts},
        f"{_ROOT}.torch.hpu": {
            "device_count": _device_count,
            "disable_dynamic_shape": _do_nothing,
            "enable_dynamic_shape": _do_nothing,
            "get_device_name": lambda device=None: f"{device_type()} (for hpu)",
            "is_available": lambda: True,
            "wrap_in_hpu_graph": _same,
        },
        f"{_ROOT}.torch.hpu.random": {},
        f"{_ROOT}.torch.utils": {},
        f"{_ROOT}.torch.utils.debug": {},
        f"{_ROOT}.torch.utils.library_loader": {"load_habana_module": _do_nothing},
        f"{_ROOT}.torch.distributed": {},
        f"{_ROOT}.torch.distributed.hccl": {"initialize_distributed_hpu": _initialize_distributed},
        "hmp": {},
    }


def _modules() -> dict[str, types.ModuleType]:
    """Returns the entries that `install` makes in `sys.modules`."""
    modules: dict[str, types.ModuleType] = {}
    for name, attributes in _contents().items():
        module = types.ModuleType(name, "hmpx's stand-in for a module of Habana's.")
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        vars(module).update(attributes)
        vars(module)["__getattr__"] = functools.partial(_missing, name)
        modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    hmp = modules[f"{_ROOT}.torch.hpex.hmp"]
    modules["hmp"].hmp = hmp  # type: ignore[attr-defined]
    return {**modules, "hmp.hmp": hmp, "torch.hpu": modules[f"{_ROOT}.torch.hpu"]}


def _missing(module: str, name: str) -> Any:
    """Finds an attribute that shim module ``module`` does not hold itself."""
    if module.startswith(f"{_ROOT}.torch.hpu") and not name.startswith("_"):
        try:
            return _device_attribute(name)
        except AttributeError:
            pass
    raise AttributeError(
        f"hmpx's stand-in for {module!r} has no {name!r}; guard its use with "
        f"hasattr({module.rpartition('.')[2]}, {name!r}), or run where the real one is installed"
    )


def _is_importable(name: str) -> bool:
    """Whether module ``name`` is there: a regular one, no mere directory of that name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
