"""Seals a frozen model: hooks that check its calls, describe it, and refuse training and loading.

The hooks are copied and pickled with the model, and don't refer to the fp32 weights.
"""

from __future__ import annotations

import functools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import session, torch_state
from ..number_formats import Format, decode
from ..policy import LowType
from ..tensors import long_name
from .call_checks import ChecksCalls
from .refusals import RefusesLoading, RefusesTraining
from .slots import Slot


@dataclass(frozen=True)
class Seal:
    """The modules that were sealed together.

    Attributes:
        key: Identifies the modules and their copies.
        modules: The modules.
    """

    key: str
    modules: tuple[nn.Module, ...]

    def copies_in(self, model: nn.Module) -> list[str]:
        """Returns the names in ``model`` of modules that were copied from sealed ones."""
        own = set(map(id, self.modules))
        return [
            path
            for path, module in model.named_modules()
            if _key(module) == self.key and id(module) not in own
        ]


class Attachments:
    """The undo functions for everything attached to a model; an interrupted `close` can be repeated."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._undo: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: object) -> None:
        """Makes `close` call ``function``; calling that a second time must have no effect."""
        self._undo.append(functools.partial(function, *args))

    def close(self) -> None:
        """Removes everything, newest first."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def seal(
    model: nn.Module,
    slots: Sequence[Slot],
    dtypes: Mapping[str, LowType],
    in_force: session.Session,
    attached: Attachments,
) -> Seal:
    """Makes ``model`` check its calls, describe its state dict, and refuse training and loading.

    Args:
        model: The model, with weights that are stored low.
        slots: Where these weights are.
        dtypes: Their names -> the type they are stored in.
        in_force: The conversion that they are stored for.
        attached: Collects the functions that undo all this.
    """
    name = type(model).__name__
    holders = dict(_holders(model, slots))
    coded = _coded(slots, dtypes)
    own: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for slot in slots:
        own[id(slot.module)][slot.name] = slot.tensor
    is_coded = any(isinstance(dtype, Format) for dtype in dtypes.values())
    checks = ChecksCalls(name, in_force, holders, slots, is_coded)
    attached.callback(checks.release)
    attached.callback(model.register_forward_pre_hook(checks, prepend=True).remove)
    stored = {n: long_name(dtype) for n, dtype in dtypes.items()}
    low_type = long_name(in_force.policy.low_precision_type)
    describes = _DescribesWeights(low_type, stored)
    handle = model.register_state_dict_post_hook(describes)  # type: ignore[no-untyped-call]
    attached.callback(handle.remove)
    key = uuid.uuid4().hex
    for path, module in holders.items():
        handle = module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            RefusesLoading(key)
        )
        attached.callback(handle.remove)
        if names := coded.get(path):
            decodes = _DecodesWeights(names)
            handle = module.register_state_dict_post_hook(decodes)  # type: ignore[no-untyped-call]
            attached.callback(handle.remove)
        where = f"{path!r} in {name}" if path else name
        refuses = RefusesTraining(module, where, own.get(id(module), {}))
        attached.callback(refuses.release, vars(module).get("train"))
        vars(module)["train"] = refuses
    return Seal(key, tuple(holders.values()))


def _holders(model: nn.Module, slots: Sequence[Slot]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the model, and each module in it that holds some of the slots, directly or deeper down."""
    parents: dict[int, list[int]] = defaultdict(list)
    for module in model.modules():
        for child in module.children():
            parents[id(child)].append(id(module))
    holding, waiting = {id(model)}, [id(slot.module) for slot in slots]
    while waiting:
        found = waiting.pop()
        if found not in holding:
            holding.add(found)
            waiting += parents[found]
    for path, module in model.named_modules():
        if id(module) in holding:
            yield path, module


def is_sealed(module: nn.Module) -> bool:
    """Whether `seal` was called with this module, or with one that contains it."""
    return _key(module) is not None


def _key(module: nn.Module) -> str | None:
    for hook in module._load_state_dict_pre_hooks.values():
        refuses = getattr(hook, "hook", hook)
        if isinstance(refuses, RefusesLoading):
            return refuses.key
    return None


class _DescribesWeights:
    """A state dict hook: records in the metadata which weights are stored low."""

    def __init__(self, low_type: str, dtypes: dict[str, str]) -> None:
        self._low_type = low_type
        self._dtypes = dtypes

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        local_metadata["hmpx"] = {
            "frozen": True,
            "low_precision_type": self._low_type,
            "dtypes": dict(self._dtypes),
        }


def _coded(
    slots: Sequence[Slot], dtypes: Mapping[str, LowType]
) -> dict[str, list[tuple[Format, list[str]]]]:
    """Returns path of a module -> the formats of codes in it, each with the names there of one tied weight."""
    tied: dict[str, dict[int, tuple[Format, list[str]]]] = defaultdict(dict)
    for slot in slots:
        format = dtypes[slot.name]
        if isinstance(format, Format):
            path, inside = "", slot.name
            while inside:
                tied[path].setdefault(id(slot.tensor), (format, []))[1].append(inside)
                part, _, inside = inside.partition(".")
                path = f"{path}.{part}" if path else part
    return {path: list(several.values()) for path, several in tied.items()}


class _DecodesWeights:
    """A state dict hook: puts values in place of weights' codes; tied weights stay tied.

    A model that is not frozen would load codes as numbers: `nn.Module.load_state_dict` copies integers to
    float32 weights without a word.

    Attributes:
        names: The format of each weight, and its names.
    """

    def __init__(self, names: list[tuple[Format, list[str]]]) -> None:
        self.names = names

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        with torch.no_grad(), torch_state.without_casts():
            for format, names in self.names:
                held = [prefix + name for name in names if prefix + name in state_dict]
                if not held:
                    continue
                first = state_dict[held[0]]  # values, where an inner module's hook has been
                values = first if first.is_floating_point() else decode(first.detach(), format)
                state_dict.update(dict.fromkeys(held, values))
