"""`freeze`: stores each weight of a model in the low-precision type that alone it is used in.

From how one forward uses the parameters and buffers it judges which to store low, replaces what they
hold, and seals the model against training. Knows neither ops nor how they are patched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments, patches, session, torch_state
from ..errors import FreezeError
from ..number_formats import Fixed, Float, Format, Posit, Table, code_dtype, encode
from ..policy import LowType
from ..tensors import chunk_of, short_name
from ..torch_internals import FakeTensor
from .originals import Originals
from .seal import REMEDY, Attachments, Seal, WidensOutputs, is_sealed, seal
from .slots import Slot, slots_of
from .weight_uses import FoundTensor, Place, Watch, found_tensors, replaced, watch_forward

_OUTPUTS: Final = ("fp32", "keep")
_STORES: Final = ("dtype", "codes")


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer of a frozen model, under one of its names.

    Attributes:
        name: Its name in the model.
        kind: ``"parameter"`` or ``"buffer"``.
        dtype: The dtype that it had.
        stored_dtype: The dtype that it has in the frozen model, or the number format whose codes it
            holds.
        size_bytes: Its size before; 0 for what shares the memory of another of this list.
        stored_bytes: Its size in the frozen model.
        reason: Why it is stored so.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.freeze(model, torch.ones(1, 2)) as frozen:
        ...     for weight in frozen.weights:
        ...         print(weight.name, weight.size_bytes, weight.stored_bytes)
        weight 24 12
        bias 12 6
    """

    name: str
    kind: str
    dtype: torch.dtype
    stored_dtype: LowType
    size_bytes: int
    stored_bytes: int
    reason: str

    @property
    def is_low(self) -> bool:
        """Whether freezing stored it in low precision."""
        return self.stored_dtype is not self.dtype


class Frozen:
    """What `freeze` did to a model, and the way back.

    It holds the fp32 weights; without a reference to it they are freed. As a context manager it
    undoes the freezing on exit.

    Attributes:
        weights: Every parameter and buffer, in the model's order.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     with hmpx.freeze(model, torch.ones(1, 2)):
        ...         model.weight.dtype
        ...     model.weight.dtype
        torch.bfloat16
        torch.float32
    """

    def __init__(
        self,
        model: nn.Module,
        weights: tuple[Weight, ...],
        seal: Seal | None,
        originals: Originals | None,
        attached: Attachments,
    ) -> None:
        """Is called by `freeze` only."""
        self.weights = weights
        self._model = model
        self._name = type(model).__name__
        self._seal = seal
        self._originals = originals
        self._attached = attached
        self._is_undone = False

    def summary(self) -> str:
        """Returns a table: the bytes before and after, and for each weight its dtype and why."""
        before = sum(weight.size_bytes for weight in self.weights)
        after = sum(weight.stored_bytes for weight in self.weights)
        low = sum(weight.is_low for weight in self.weights)
        lines = [
            f"{self._name}: {low} of {len(self.weights)} weights stored in low precision, "
            f"{before:,} -> {after:,} bytes{' (undone)' if self._is_undone else ''}"
        ]
        rows = [("name", "kind", "dtype", "stored", "bytes", "why")]
        rows += [
            (
                weight.name,
                weight.kind,
                short_name(weight.dtype),
                short_name(weight.stored_dtype),
                f"{weight.stored_bytes:,}",
                weight.reason,
            )
            for weight in self.weights
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for *cells, size, reason in rows:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
            lines.append("  ".join([*padded, size.rjust(widths[-2]), reason]))
        return "\n".join(lines)

    def undo(self, *, strict: bool = True) -> None:
        """Gives the model its fp32 weights back, bit for bit; does nothing the second time.

        A weight is known by its place: the name in its module. What was written to it since is
        dropped. Modules that are no longer part of the model are no obstacle.

        Args:
            strict: ``False`` leaves weights alone that are not where they were stored, and restores
                the others. A later call restores those that are back in their places.

        Raises:
            FreezeError: The model was frozen with ``keep_fp32=False``; or some weights are not where
                they were stored: replaced, deleted, parametrized, on the meta device, or in a copy
                of their module. The model is as it was then.
            OptionError: ``strict`` is neither True nor False.
        """
        strict = arguments.truth("strict", strict)
        if self._is_undone:
            return
        if self._originals is None:
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so its fp32 weights are gone; "
                "build the model from them anew, or leave out keep_fp32=False to undo()"
            )
        misplaced = dict(self._originals.misplaced(self._model))
        copies = [] if self._seal is None else self._seal.copies_in(self._model)
        if strict and (misplaced or copies):
            raise FreezeError(self._refusal(misplaced, copies))
        self._originals.restore(misplaced.keys())
        self._attached.close()
        self._is_undone = self._originals.is_empty
        patches.forget_compiled()

    def _refusal(self, misplaced: Mapping[Slot, str], copies: Sequence[str]) -> str:
        by_fault: dict[str, list[str]] = {}
        for slot, fault in misplaced.items():
            by_fault.setdefault(fault, []).append(repr(slot.name))
        for path in copies:
            by_fault.setdefault("a copy of a frozen module", []).append(repr(path))
        faults = [
            f"{_listed(names, 8)} {'is' if len(names) == 1 else 'are'} {fault}"
            for fault, names in by_fault.items()
        ]
        return (
            f"{self._name} can't be given its fp32 weights back, and nothing was changed: "
            f"{'; '.join(faults)}; put back what hmpx.freeze left there and call undo() again, or "
            "call undo(strict=False) to restore the others"
        )

    def __enter__(self) -> Frozen:
        """Returns itself.

        Raises:
            FreezeError: The model was frozen with ``keep_fp32=False``: there is no way back.
        """
        if self._originals is None:
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so a with block can't undo() it "
                "at its end; leave out keep_fp32=False, or call hmpx.freeze without the block"
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        low = sum(weight.is_low for weight in self.weights)
        state = "undone" if self._is_undone else f"{low} of {len(self.weights)} weights low"
        return f"<hmpx.Frozen {self._name}: {state}>"


def freeze(
    model: nn.Module,
    *example_inputs: Any,
    outputs: str = "fp32",
    store: str = "dtype",
    keep_fp32: bool = True,
    **kwargs: Any,
) -> Frozen:
    """Stores, in place, the weights of ``model`` that it uses only in low precision in that type.

    One forward on the example is watched. What it casts to bfloat16 or float16 on every use is
    stored so, once; a weight that is used in float32 too, or that the example does not use, stays
    as it is. The model then gives the same results, bit for bit, without casting weights. It is for
    inference: training it and loading weights into it are errors.

    Args:
        model: In evaluation mode. Its parameters stay the same objects.
        *example_inputs: Inputs of the forward to watch.
        outputs: ``"fp32"`` makes the model return float32 where it would return bfloat16 or
            float16; ``"keep"`` leaves its outputs.
        store: ``"codes"`` stores weights that are used only in one number format as its codes, in
            uint8, uint16 or int32, which are decoded at each use, if the policy has one format and
            no rules; ``"dtype"`` leaves them float32.
        keep_fp32: Whether the float32 weights are kept, in host memory, for `Frozen.undo`.
        **kwargs: Keyword inputs of the forward to watch.

    Returns:
        What was done, and the way back.

    Raises:
        FreezeError: There is no example, torch is not converted, casts are off, the model is in
            training mode or frozen, its forward raised, or its values would be lost, under
            FakeTensorMode. The model is untouched then.
        OptionError: ``outputs``, ``store`` or ``keep_fp32`` has no such value.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     frozen = hmpx.freeze(model, torch.ones(1, 2))
        ...     model.weight.dtype, model(torch.ones(1, 2)).dtype
        ...     frozen.undo()
        (torch.bfloat16, torch.float32)
        >>> model.weight.dtype
        torch.float32
    """
    outputs = arguments.choice("outputs", outputs, _OUTPUTS)
    store = arguments.choice("store", store, _STORES)
    keep_fp32 = arguments.truth("keep_fp32", keep_fp32)
    in_force = _checked(model, has_example=bool(example_inputs or kwargs))
    found = found_tensors(model)
    watch = watch_forward(model, found, example_inputs, kwargs)
    codes = _AS_CODES if store == "codes" and _rounds_in_one_way(in_force) else ()
    weights = tuple(_judged(found, watch, replaced(model, found), codes))
    dtypes = {w.name: w.stored_dtype for w in weights if w.is_low}
    lows: dict[int, FoundTensor] = {}
    for f in found:
        if f.name in dtypes:
            lows.setdefault(id(f.tensor), f)
    low_copies = _low_copies(lows.values(), dtypes)
    _check_values_last(model, lows.values(), low_copies, keep_fp32)
    slots = slots_of(model, [f.tensor for f in lows.values()])
    kept_alive = {
        f.place.storage for f in found if f.place is not None and id(f.tensor) not in lows
    }
    originals = Originals(slots, kept_alive) if keep_fp32 or not lows else None
    attached = Attachments()
    with contextlib.ExitStack() as on_error:
        if originals is not None:
            on_error.callback(originals.restore)
        on_error.callback(attached.close)
        for tensor, low in low_copies:
            if not low.is_floating_point():
                tensor.requires_grad_(False)
            tensor.data = low
        _flatten_rnns({id(slot.module): slot.module for slot in slots}.values())
        if outputs == "fp32":
            attached.callback(model.register_forward_hook(WidensOutputs()).remove)
        sealed = seal(model, slots, dtypes, in_force, attached) if lows else None
        patches.forget_compiled()
        on_error.pop_all()
        return Frozen(model, weights, sealed, originals, attached)


def _checked(model: object, *, has_example: bool) -> session.Session:
    """Returns the session in force, once nothing speaks against freezing ``model``."""
    if not isinstance(model, nn.Module):
        raise FreezeError(
            f"hmpx.freeze takes a torch.nn.Module, not {type(model).__name__}; pass the model "
            "itself, then its example inputs"
        )
    name = type(model).__name__
    if not has_example:
        raise FreezeError(
            f"hmpx.freeze has no example to run {name} on; pass its inputs: hmpx.freeze(model, x)"
        )
    in_force = session.current()
    if in_force is None:
        raise FreezeError(
            f"torch is not converted, so {name} uses no weight in low precision; call "
            "hmpx.convert() before hmpx.freeze"
        )
    if torch_state.is_off():
        raise FreezeError(
            f"casts are off here, so {name} uses no weight in low precision; call hmpx.freeze "
            "outside of the hmpx.disable_casts block, or of the region in which torch.autocast is off"
        )
    for path, module in model.named_modules():
        if is_sealed(module):
            where = f"{path!r} in {name}" if path else name
            raise FreezeError(f"{where} is frozen already; {REMEDY} before freezing it again")
    if model.training:
        raise FreezeError(
            f"{name} is in training mode, and frozen weights can't be trained; call model.eval() "
            "first"
        )
    return in_force


# --- judging -----------------------------------------------------------------------------------


def _rounds_in_one_way(in_force: session.Session) -> bool:
    """Whether each use of a weight rounds it alike, whatever the call: codes don't say their format."""
    policy = in_force.policy
    decisions = [
        *policy.decisions.values(),
        *[decision for section in policy.sections for decision in section.decisions.values()],
    ]
    formats = {decision.dtype for decision in decisions if isinstance(decision.dtype, Format)}
    is_random = in_force.options.rounding == "stochastic"
    return len(formats) == 1 and not in_force.rules and not is_random


#: Formats whose values are one code each.
_AS_CODES: Final = (Float, Posit, Fixed, Table)


def _judged(
    found: Sequence[FoundTensor], watch: Watch, replaced: set[Place], codes: tuple[type, ...]
) -> Iterator[Weight]:
    """Yields for each tensor how it is to be stored, and why."""
    firsts: dict[object, FoundTensor] = {}
    by_storage: dict[int, list[FoundTensor]] = {}
    for f in found:
        if f.place is not None:
            by_storage.setdefault(f.place.storage, []).append(f)
    for f in found:
        key = f.place or id(f.tensor)
        first = firsts.setdefault(key, f)
        neighbours = by_storage[f.place.storage] if f.place is not None else []
        dtype, reason = _judgement(f, neighbours, watch, replaced)
        is_data = f.place is not None and watch.uses[f.place].is_first_input
        if isinstance(dtype, Format) and (is_data or not isinstance(dtype, codes)):
            reason = f"used in {dtype.name} as a first input" if is_data else reason
            dtype, reason = f.tensor.dtype, f"{reason}, but not stored as codes"
        size_bytes = stored_bytes = 0
        if first is not f:
            reason = (
                f"{'is' if first.tensor is f.tensor else 'shares its memory with'} {first.name}"
            )
        elif not nn.parameter.is_lazy(f.tensor):
            size_bytes = f.tensor.numel() * f.tensor.element_size()
            stored_bytes = f.tensor.numel() * _stored(dtype).itemsize
        yield Weight(f.name, f.kind, f.tensor.dtype, dtype, size_bytes, stored_bytes, reason)


def _judgement(
    f: FoundTensor, neighbours: Sequence[FoundTensor], watch: Watch, replaced: set[Place]
) -> tuple[LowType, str]:
    """Returns the type that a tensor is to be stored in, and why.

    ``neighbours`` are the tensors in its storage.
    """
    kept = f.tensor.dtype
    if f.place is None:
        return kept, f.fault
    if kept is not torch.float32:
        return kept, f"is {short_name(kept)}"
    if f.place in replaced:
        return kept, "was replaced while the example ran"
    for other in neighbours:
        if other.place is not None and other.place != f.place and f.place.overlaps(other.place):
            return kept, f"shares its storage with {other.name}"
    uses = watch.uses[f.place]
    if uses.written_by:
        return kept, f"written by {_listed(uses.written_by)}"
    if uses.is_changed:
        return kept, "changed while the example ran"
    if uses.unrounded_by:
        return kept, f'used in fp32 by {_listed(uses.unrounded_by)} under legalize="fast"'
    converted = [short_name(dtype) for dtype in sorted(uses.converted_to, key=str)]
    read = [f"in {short_name(dtype)} by {_listed(by)}" for dtype, by in uses.read_by.items()]
    if read or len(converted) > 1:
        used = ", ".join([*(f"in {name}" for name in converted), *read])
        return kept, f"used {used}"
    if not converted:
        return kept, "not used by the example"
    return next(iter(uses.converted_to)), f"used in {converted[0]} only"


def _stored(low: LowType) -> torch.dtype:
    """Returns the dtype of a tensor that holds values, or codes, of this type."""
    if isinstance(low, torch.dtype):
        return low
    return code_dtype(int(low.bits)) if isinstance(low, _AS_CODES) else torch.float32


def _listed(names: Sequence[str], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")


# --- storing -----------------------------------------------------------------------------------


def _low_copies(
    lows: Iterable[FoundTensor], dtypes: Mapping[str, LowType]
) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor that is to be stored low, and what it is to hold; one copy a place.

    Tensors that lie in one chunk of memory do so afterwards, as cuDNN wants the weights of its RNNs.
    """
    lows = list(lows)
    by_storage: dict[object, dict[Place, FoundTensor]] = {}
    for f in lows:
        if f.place is not None:
            key = f.place.storage, dtypes[f.name], f.tensor.is_inference()
            by_storage.setdefault(key, {}).setdefault(f.place, f)
    copies: dict[Place | None, Tensor] = {}
    with torch.no_grad(), torch_state.disable_casts():
        for group in by_storage.values():
            first = next(iter(group.values()))
            values, low = [f.tensor.detach() for f in group.values()], dtypes[first.name]
            with torch.inference_mode(first.tensor.is_inference()):
                chunk = chunk_of(values) if isinstance(low, torch.dtype) else None
                if chunk is not None and isinstance(low, torch.dtype):
                    stored = chunk.parts(chunk.elements(values[0]).to(low))
                else:
                    stored = [_low_copy(each, low) for each in values]
            copies.update(zip(group, stored, strict=True))
    return [(f.tensor, copies[f.place]) for f in lows]


def _check_values_last(
    model: nn.Module,
    lows: Iterable[FoundTensor],
    low_copies: Iterable[tuple[Tensor, Tensor]],
    keep_fp32: bool,
) -> None:
    """Raises an error if a weight's values would be lost, or have none that `Frozen.undo` could keep."""
    for f, (tensor, low) in zip(lows, low_copies, strict=True):
        if isinstance(low, FakeTensor) and not isinstance(tensor, FakeTensor):
            raise FreezeError(
                f"{f.name!r} in {type(model).__name__} has values, which would be lost under the "
                "FakeTensorMode that is on; freeze the model outside of it, or make the model inside"
            )
        if keep_fp32 and tensor.is_meta:
            raise FreezeError(
                f"{f.name!r} in {type(model).__name__} is on the meta device, which holds no values to "
                "keep for undo(); pass keep_fp32=False, or make the model under FakeTensorMode"
            )


def _flatten_rnns(modules: Iterable[nn.Module]) -> None:
    """Has RNNs lay out their weights as cuDNN wants them in the dtype that they have now, if it runs."""
    with torch.no_grad(), torch_state.disable_casts():
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _low_copy(values: Tensor, low: LowType) -> Tensor:
    if isinstance(low, torch.dtype):
        return values.to(low)
    codes = encode(values, low)
    assert isinstance(codes, Tensor)
    return codes
