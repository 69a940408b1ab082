"""What torch.compile keeps of a conversion: traced code, kernels, artefacts on the disk.

None of them knows of hmpx: a graph is traced with the wrappers in it, and cached under a key made
before their casts are; and compiled code calls ``torch.mm`` as it was when inductor was imported.
So they are told.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import sys
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .policy import Policy
from .version import __version__


def forget() -> None:
    """Makes torch.compile trace again, and learn anew what the functions of torch are.

    It sets no guard on the wrappers of methods and operators. What it finds under the names of
    torch's functions, wrappers now, it puts into the graph as they are; they cast when that runs.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not hasattr(dynamo, "reset"):  # not imported, or not to its end
        return
    dynamo.reset()
    if hasattr(dynamo.trace_rules, "clear_lru_cache"):
        dynamo.trace_rules.clear_lru_cache()


def prepare(
    policy: Policy, device_types: frozenset[str], options: object, rules: tuple[object, ...]
) -> Callable[[], None]:
    """Tells inductor's kernels and caches of a conversion.

    Returns:
        What undoes it.
    """
    finder = _keep_kernels_plain()
    restore_tag = _tag_caches(_digest(policy, device_types, options, rules))

    def undo() -> None:
        restore_tag()
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return undo


def _keep_kernels_plain() -> _Finder:
    """Has compiled code call torch's own kernels, where inductor is yet to note ``torch.mm``.

    Its calls are below the dispatcher: a wrapper would cost time, and cast outside of
    `disable_casts` what was traced inside.
    """
    finder, module = _Finder(), sys.modules.get(_SELECTION)
    if module is None:
        sys.meta_path.insert(0, finder)
    else:
        _unwrap_kernels(module)
    return finder


_SELECTION = "torch._inductor.select_algorithm"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module in which inductor notes the kernels, and sees to it once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of that module; None for any other."""
        if fullname != _SELECTION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _unwrap_kernels(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _unwrap_kernels(module: Any) -> None:
    choice = getattr(module, "ExternKernelChoice", None)
    if choice is None or hasattr(choice.__init__, "__hmpx_kernels__"):
        return
    kernels = vars(module.extern_kernels)
    kernels |= {name: _unwrapped(kernel) for name, kernel in kernels.items()}
    initialize = choice.__init__

    @functools.wraps(initialize)
    def unwrapping(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, _unwrapped(kernel), *args, **kwargs)

    unwrapping.__hmpx_kernels__ = True  # type: ignore[attr-defined]
    choice.__init__ = unwrapping


def _unwrapped(kernel: Any) -> Any:
    return kernel.__wrapped__ if hasattr(kernel, "__hmpx_site__") else kernel


def _tag_caches(digest: str) -> Callable[[], None]:
    """Keeps the disk caches of each policy, and of unconverted torch, apart; returns the undo."""
    config: Any = sys.modules.get("torch.compiler.config")
    if config is None or not hasattr(config, "cache_key_tag"):  # a torch older than the tag

        def nothing() -> None:
            pass

        return nothing
    before = config.cache_key_tag
    config.cache_key_tag = tagged = f"{before}hmpx-{digest}"

    def restore() -> None:
        if config.cache_key_tag == tagged:
            config.cache_key_tag = before

    return restore


def _digest(
    policy: Policy, device_types: frozenset[str], options: object, rules: tuple[object, ...]
) -> str:
    """Returns what stands for a conversion; nothing else does for one with functions that decide."""
    unique = uuid.uuid4().hex if rules else ""
    # Another version may round otherwise.
    state = repr((__version__, policy.fingerprint(), sorted(device_types), options, unique))
    return hashlib.sha256(state.encode()).hexdigest()[:16]
