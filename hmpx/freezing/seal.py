"""Seals a frozen model: hooks that check its calls, describe it, and refuse gradients and loading.

The hooks are copied and pickled with the model, so they are objects of classes, and don't refer to the fp32
weights.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from .. import number_formats, session, torch_state
from ..casting import are_alike
from ..errors import FreezeError
from ..policy import LowType
from ..tensors import long_name, short_name, widened
from ..torch_internals import has_tangents, transforms
from .layer_cast import is_layer_cast
from .undo import Hook, Undo, hooks_of
from .weights import Slot, one_rounding

REMEDY: Final = "call undo() on what hmpx.freeze returned, or build the model from its fp32 weights"


def seal(
    model: nn.Module,
    slots: Sequence[Slot],
    ways: Mapping[str, LowType | number_formats.Packing],
    in_force: session.Session | None,
    undo: Undo,
) -> None:
    """Makes ``model`` refuse training and loading, and complete its undo; done before its weights change.

    If it was frozen under a conversion, it also checks that at its calls, and describes its state dict.
    """
    # The model, and each module in it that holds some of the slots, at any depth.
    paths = {"", *(p for s in slots for p in accumulate(s.path.split("."), "{}.{}".format))}
    holders = {path: each for path, each in model.named_modules() if path in paths}
    coded = _coded(slots, ways)
    own: dict[int, dict[str, Slot]] = defaultdict(dict)
    for slot in reversed(slots):  # under its first name
        own[id(slot.module)][slot.attribute] = slot

    def attach(register: Any, hook: Hook, **options: Any) -> None:
        hook.key, hook.undo = undo.key, undo
        register(hook, **options)

    name = type(model).__name__
    checks = _ChecksTraining(name, holders)
    if in_force is not None:
        checks = _ChecksCalls(name, in_force, holders, is_coded=bool(coded))
    attach(model.register_forward_pre_hook, checks, prepend=True)
    if in_force is not None:
        held: Mapping[str, Any] = ways
        stored = {name: long_name(getattr(way, "format", way)) for name, way in held.items()}
        low_type = long_name(in_force.policy.low_precision_type)
        attach(model.register_state_dict_post_hook, _DescribesWeights(low_type, stored))
    for path, module in holders.items():
        seals = _Seal({slot.name: slot.tensor for slot in own[id(module)].values()}, undo.key)
        attach(module.register_load_state_dict_pre_hook, seals)
        if names := coded.get(path):
            attach(module.register_state_dict_post_hook, _DecodesWeights(names))


def is_sealed(module: nn.Module) -> bool:
    """Whether a module, or one that contains it, was frozen under a conversion."""
    hooks = [hook for _, _, hook in hooks_of(module)]
    return not is_layer_cast(module) and any(isinstance(each, _Seal) for each in hooks)


def complete_undo(model: nn.Module) -> None:
    """Restores what an exception has left frozen."""
    for module in model.modules():
        for _, _, hook in hooks_of(module):
            if hook.undo is not None:
                hook.undo.complete()


class Widens(Hook):
    """A forward hook that returns float32 where the model returns bfloat16 or float16."""

    def __init__(self, key: object) -> None:
        self.key = key

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the output upcast."""
        return widened(output)


# --- calls ---------------------------------------------------------------------------------------


class _ChecksTraining(Hook):
    """A forward pre-hook: weights must not be trained. Completes an undo that an exception has stopped."""

    def __init__(self, name: str, holders: Mapping[str, nn.Module]) -> None:
        """Takes the model's class, and path -> module for those that hold weights."""
        self._name = name
        # Without the model itself, so that it is freed without garbage collection.
        self._inner = {path: module for path, module in holders.items() if path}

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.undo is not None and self.undo.is_due:
            self.undo.complete()
        if self.undo is None or not self.undo.is_done:
            self._check(module)

    def _check(self, model: nn.Module) -> None:
        learns = torch.is_grad_enabled() or transforms() is not None or has_tangents()
        if not learns or not any([m.training for m in (model, *self._inner.values())]):  # noqa: C419
            return
        inner = next((repr(path) for path, m in self._inner.items() if m.training), "it")
        raise FreezeError(
            f"{self._name} is frozen, but {'it' if model.training else inner} is in training mode, "
            f"and low-precision weights can't be trained; call eval() on the model, or {REMEDY}"
        )


class _ChecksCalls(_ChecksTraining):
    """A forward pre-hook: weights must be used as they were stored for, and not be trained."""

    def __init__(
        self,
        name: str,
        in_force: session.Session,
        holders: Mapping[str, nn.Module],
        *,
        is_coded: bool,
    ) -> None:
        """Takes the model's class, the conversion, and path -> module for those that hold weights."""
        super().__init__(name, holders)
        self._low_name = short_name(in_force.policy.low_precision_type)
        self._fingerprint = _fingerprint(in_force)
        self._rules = self._own_rules = in_force.rules
        self._rounding = one_rounding(in_force, of_weights=True) if is_coded else None
        self._is_rounded = in_force.options.legalize != "fast"
        self._seen: Callable[[], session.Session | None] = weakref.ref(in_force)

    def _check(self, model: nn.Module) -> None:
        in_force = session.current()
        if in_force is None:
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but torch is not "
                f"converted; call hmpx.convert() as it was when the model was frozen, or {REMEDY}"
            )
        if torch_state.is_off():
            raise FreezeError(
                f"{self._name} is frozen, with weights in {self._low_name}, but casts are off "
                f"here; call it outside of the hmpx.disable_casts block, or of the region in which "
                f"torch.autocast is off, or {REMEDY}"
            )
        if in_force is not self._seen() or in_force.rules != self._rules:
            other = self._difference(in_force)
            if other:
                raise FreezeError(
                    f"{self._name} was frozen under {other} than that in force now; call "
                    f"hmpx.convert() as it was when the model was frozen, or {REMEDY}"
                )
            self._seen, self._rules = weakref.ref(in_force), in_force.rules
        super()._check(model)

    def _difference(self, in_force: session.Session) -> str:
        """Returns the conversion in force if it would store weights differently; else ``""``."""
        own = self._own_rules  # none in another process, which only knows their names
        if _fingerprint(in_force) != self._fingerprint or (
            own and not all(map(are_alike, own, in_force.rules))
        ):
            return "another policy"
        if self._is_rounded and in_force.options.legalize == "fast":
            return "another legalize="
        if self._rounding and one_rounding(in_force, of_weights=True) != self._rounding:
            return "another rounding= or overflow="
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": _nothing, "_rules": (), "_own_rules": ()}


#: Called, it returns None. Files of frozen models hold its name.
_nothing: Final = type(None)


def _fingerprint(in_force: session.Session) -> str:
    """Returns a digest that is equal for equal conversions, in any process."""
    rules = [(rule.op, rule.level, rule.name) for rule in in_force.rules]
    state = repr((in_force.policy.fingerprint(), sorted(in_force.device_types), rules))
    return hashlib.sha256(state.encode()).hexdigest()


# --- gradients and loading -----------------------------------------------------------------------


class _Seal(Hook):
    """A hook that refuses to load weights, which would be rounded, and their gradients.

    Copies of a tensor lose its hooks, so a copy of the module sets them again.
    """

    def __init__(self, tensors: Mapping[str, Tensor], key: object) -> None:
        self._tensors, self.key = dict(tensors), key
        self._hook_gradients()

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        where = f"{prefix[:-1]!r}, a {type(module).__name__}," if prefix else type(module).__name__
        raise FreezeError(f"{where} is frozen and can't load weights; undo() first: {REMEDY}")

    def _hook_gradients(self) -> None:
        with torch.inference_mode(False):
            for name, tensor in self._tensors.items():
                if tensor.is_inference() or not tensor.is_leaf or not tensor.is_floating_point():
                    continue  # autograd itself refuses these
                requires_grad = tensor.requires_grad
                tensor.requires_grad_(True)  # needed for a hook; the user may set it later
                tensor.register_hook(_RefusesGradient(name, self.key))  # type: ignore[no-untyped-call]
                tensor.requires_grad_(requires_grad)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hook_gradients()


class _RefusesGradient(Hook):
    def __init__(self, name: str, key: object) -> None:
        self._name, self.key = name, key

    def __call__(self, gradient: Tensor) -> None:
        raise FreezeError(
            f"a gradient reached {self._name!r}, a low-precision weight of a frozen model, which "
            f"can't be trained; {REMEDY}"
        )


# --- state dicts ---------------------------------------------------------------------------------


class _DescribesWeights(Hook):
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


#: How to decode a weight.
_Codes: TypeAlias = "number_formats.Format | number_formats.Packing"


def _coded(
    slots: Sequence[Slot], ways: Mapping[str, LowType | number_formats.Packing]
) -> dict[str, list[tuple[_Codes, list[str]]]]:
    """Returns module path -> how to decode the weights in it, each with the names there of one tied weight."""
    tied: dict[str, dict[int, tuple[_Codes, list[str]]]] = defaultdict(dict)
    for slot in slots:
        way = ways[slot.name]
        if not isinstance(way, torch.dtype):
            path, inside = "", slot.name
            while inside:
                tied[path].setdefault(id(slot.tensor), (way, []))[1].append(inside)
                part, _, inside = inside.partition(".")
                path = f"{path}.{part}" if path else part
    return {path: list(several.values()) for path, several in tied.items()}


class _DecodesWeights(Hook):
    """A state dict hook: replaces weights' codes by values; tied weights stay tied.

    An unfrozen model would load codes as numbers: `nn.Module.load_state_dict` silently copies integers to
    float32 weights.
    """

    def __init__(self, names: list[tuple[_Codes, list[str]]]) -> None:
        self._names = names

    def __call__(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        with torch.no_grad(), torch_state.without_casts():
            for way, names in self._names:
                held = [prefix + name for name in names if prefix + name in state_dict]
                if not held:
                    continue
                values = state_dict[held[0]]
                if not values.is_floating_point():  # else an inner module's hook ran before
                    values = values.detach()
                    if isinstance(way, number_formats.Packing):
                        values = way.values(values)
                    else:
                        values = number_formats.decode(values, way)
                state_dict.update(dict.fromkeys(held, values))
