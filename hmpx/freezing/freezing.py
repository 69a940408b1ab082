"""`freeze`: stores in low precision the weights that a model only uses in low precision."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import (
    arguments,
    checkpoints,
    compute,
    number_formats,
    patches,
    renames,
    session,
    torch_state,
)
from ..errors import FreezeError, OptionError, also, printable, warn
from ..inputs import arguments_of
from ..policy import LowType
from ..tensors import chunk_of, short_name
from ..torch_internals import FakeTensor
from .layer_cast import decode_parameters, is_layer_cast, other_objects, upcast_parameters
from .seal import REMEDY, Widens, complete_undo, is_sealed, seal
from .undo import LOCK, Originals, Undo
from .weights import (
    Judged,
    MemorySpan,
    Rounding,
    Slot,
    Weight,
    judged,
    listed,
    one_rounding,
    replaced,
    slots_of,
    table,
    watch_forward,
)

_LAYER_CAST: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@session.restoring
@renames.renamed(gathers=True)
def freeze(
    model: nn.Module,
    inputs: Any = (),
    *,
    outputs: str = "fp32",
    store: str = "dtype",
    compute: str | None = None,
    keep_fp32: bool = True,
) -> Frozen:
    """Stores in low precision, in place, the weights that ``model`` only uses in low precision.

    A weight that a forward on the example casts to bfloat16 or float16 on every use is stored in
    that type; others stay as they are. Results stay the same, bit for bit. Training the model and
    loading weights into it are errors.

    ``store="bfloat16", compute="float32"`` needs neither an example nor a conversion (LayerCast): it rounds
    all parameters, and upcasts them where a module reads them, so that every op computes in float32.

    Args:
        model: In evaluation mode. Its parameters stay the same objects.
        inputs: The arguments of the forward to watch ([inputs](#inputs)).
        outputs: ``"fp32"`` upcasts low outputs of the model to float32; ``"keep"`` leaves them
            unchanged.
        store: ``"dtype"`` stores weights in the low type. ``"codes"`` stores weights used in a single
            number format as its codes, with their scales, if weights have one format in the policy, which has no
            rules. ``"bfloat16"`` and ``"float16"`` are for ``compute="float32"``.
        compute: ``"float32"`` for LayerCast; None for the conversion in force.
        keep_fp32: Whether the float32 weights are kept, in host memory, for `Frozen.undo`.

    Raises:
        FreezeError: There is no example, torch is not converted, casts are off, the model is in
            training mode or already frozen, or FakeTensorMode would lose its values. The model is
            then untouched, as it is if its forward raises an error. With ``compute="float32"``:
            torch is converted, the model is in training mode or frozen, or has a module of
            TorchScript.
        OptionError: An argument has an invalid value, or two do not fit together.

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
    outputs = arguments.choice("outputs", outputs, ("fp32", "keep"))
    if store == "prepared":
        renames.prepared_is_gone()
        store = "dtype"
    store = arguments.choice("store", store, ("dtype", "codes", *_LAYER_CAST))
    keep_fp32 = arguments.truth("keep_fp32", keep_fp32)
    has_example = any(arguments_of(inputs))
    if not isinstance(model, nn.Module):
        said = f"hmpx.freeze takes a torch.nn.Module, not {type(model).__name__}; pass the model itself"
        raise also(FreezeError, TypeError, f"{said}, then its example inputs")
    if compute is not None:
        arguments.choice("compute", compute, ("float32",))
    if (compute is not None) != (store in _LAYER_CAST):
        raise OptionError(
            'store="bfloat16" and store="float16" go with compute="float32", and other stores without it'
        )
    if store in _LAYER_CAST:
        if has_example:
            raise OptionError(f'store="{store}" takes no example: it stores all parameters')
        with LOCK:
            _check_layer_cast(model)
            found = slots_of(model)
            firsts = {id(f.tensor): f for f in reversed(found)}
            weights = [
                Judged(_in_16_bits(f, _LAYER_CAST[store], firsts[id(f.tensor)]), None, None)
                for f in found
            ]
            frozen = _frozen(
                model, found, weights, None, outputs, keep_fp32=keep_fp32, upcasts=True
            )
    else:
        in_force = _checked(model, has_example=has_example)
        found = slots_of(model)
        reads = other_objects(model) if store == "codes" else contextlib.nullcontext()
        with torch_state.unchanged(model, inputs, but=[f.tensor for f in found]), reads:
            watch = watch_forward(model, found, inputs)
            gone = replaced(model, found)
        with LOCK:
            _check_free(model)  # another thread may have frozen it meanwhile
            gone |= replaced(model, found)
            weights = [*judged(found, watch, gone, in_force if store == "codes" else None)]
            frozen = _frozen(model, found, weights, in_force, outputs, keep_fp32=keep_fp32)
    patches.forget_compiled()
    return frozen


@session.restoring
def load_frozen(
    directory: str | os.PathLike[str], model: nn.Module, *, store: str = "dtype"
) -> Frozen | None:
    """Loads a checkpoint that `Frozen.save` wrote into a model in float32.

    Under the conversion with which it was frozen, the model then computes what the frozen model did, bit for bit.

    Args:
        directory: That of the checkpoint, which may also come from elsewhere.
        model: Its weights are overwritten. Tied ones may be stored once.
        store: ``"dtype"`` stores all weights in the model's types. ``"codes"`` keeps codes and their scales, decoded
            where modules read them, as `freeze` does, but without a conversion and for good.

    Returns:
        With ``"codes"`` a report, whose ``undo`` is an error; else None.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model, which is then untouched.
        FreezeError: The model is frozen, or with ``"codes"`` in training mode.
        OptionError: The directory does not exist, safetensors is not installed, or ``store`` is invalid.

    Example:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> with hmpx.convert(policy={"low": ["linear int8_row"]}, device_types={"cpu"}):
        ...     with hmpx.freeze(model, torch.ones(1, 4)) as frozen:
        ...         frozen.save("int8")
        >>> hmpx.load_frozen("int8", torch.nn.Linear(4, 2))
    """
    are_codes = arguments.choice("store", store, ("dtype", "codes")) == "codes"
    new = checkpoints.weights_for(arguments.path("directory", directory), model)
    if are_codes:
        _check_free(model)
    found = slots_of(model) if are_codes else []
    packed = dict[int, tuple[number_formats.Packing, Tensor]]()
    with torch.no_grad(), torch_state.without_casts():
        for f in found:
            each = new.get(f.name)
            if each and each.scheme and f.place and f.tensor.dtype is torch.float32:
                assert each.scheme.format is not None  # others are faults
                how = each.scheme.format, "nearest", "saturate"
                if given := number_formats.packed(each.values, *how, each.encoded):
                    packed[id(f.tensor)] = given[0], given[1].to(f.tensor.device)
        whole = {name: each.values for name, each in new.items()}
        model.load_state_dict(whole, strict=False)  # tied ones are there once
    if not are_codes:
        return None
    weights, firsts = [], {id(f.tensor): f for f in reversed(found)}
    for f in found:
        first, given = firsts[id(f.tensor)], packed.get(id(f.tensor))
        dtype: LowType = given[0].format if given else f.tensor.dtype
        size, stored = f.tensor.nbytes, (given[1] if given else f.tensor).nbytes
        why = "quantized in the checkpoint" if given else "not stored as codes"
        if f is not first:
            size, stored, why = 0, 0, f"is {first.name}"
        weight = Weight(f.name, f.kind, f.tensor.dtype, dtype, size, stored, why)
        weights.append(Judged(weight, None, given))
    with LOCK:
        return _frozen(model, found, weights, None, "keep", keep_fp32=False)


def _frozen(
    model: nn.Module,
    found: Sequence[Slot],
    weights: Sequence[Judged],
    in_force: session.Session | None,
    outputs: str,
    *,
    keep_fp32: bool,
    upcasts: bool = False,
) -> Frozen:
    """Stores weights, to the end or not at all; modules may upcast them where they read them."""
    dtypes = {each.name: each.stored_dtype for each, _, _ in weights if each.is_low}
    packed = {each.weight.name: each.packed for each in weights if each.packed}
    lows: dict[int, Slot] = {}
    for f in found:
        if f.name in dtypes:
            lows.setdefault(id(f.tensor), f)
    rounding = None if in_force is None else one_rounding(in_force)
    stored = _low_copies(lows.values(), dtypes, rounding, packed)
    for f, (tensor, low) in zip(lows.values(), stored, strict=True):
        where, is_fake = f"{f.name!r} in {type(model).__name__}", isinstance(low, FakeTensor)
        if is_fake and not isinstance(tensor, FakeTensor):
            raise FreezeError(
                f"{where} has values, which would be lost under the FakeTensorMode that is on; freeze the "
                "model outside of it, or make the model inside"
            )
        if keep_fp32 and tensor.is_meta:
            raise FreezeError(
                f"{where} is on the meta device, which holds no values to keep for undo(); pass "
                "keep_fp32=False, or make the model under FakeTensorMode"
            )
        is_real = not (low.is_meta or is_fake)
        if upcasts and is_real and bool((low.isinf() & ~tensor.isinf()).any()):
            raise FreezeError(
                f"{f.name!r} has values beyond {short_name(low.dtype)}'s largest number"
            )
    slots = [f for f in found if id(f.tensor) in lows]
    others = {f.place.storage for f in found if f.place is not None and id(f.tensor) not in lows}
    undo = Undo(model, Originals(slots, others if keep_fp32 else None))
    formats = {w.name: said for w, said, _ in weights if said is not None}
    packings = {name: packing for name, (packing, _) in packed.items()}
    in_bytes: dict[nn.Module, dict[str, number_formats.Packing]] = defaultdict(dict)
    for slot in slots:
        if slot.name in packings:
            in_bytes[slot.module][slot.attribute] = packings[slot.name]
    every, name = tuple([each.weight for each in weights]), printable(type(model).__name__)
    frozen = Frozen(every, undo, name, formats, packings)
    try:
        if outputs == "fp32":
            model.register_forward_hook(Widens(undo.key))
        if lows or in_force is None:
            sealed = {slot.name: dtypes[lows[id(slot.tensor)].name] for slot in slots}
            seal(model, slots, {**sealed, **packings}, in_force, undo)
        for module in model.modules() if upcasts else ():
            upcast_parameters(module)
        for module, several in in_bytes.items():
            decode_parameters(module, several)
        for tensor, low in stored:
            if not low.is_floating_point():
                tensor.requires_grad_(False)
            tensor.data = low
        with torch.no_grad(), torch_state.without_casts():
            for module in {slot.module: None for slot in slots} if in_force else ():
                if isinstance(module, nn.RNNBase):  # as cuDNN requires for the current dtype
                    module.flatten_parameters()
    except BaseException:
        undo()
        raise
    if slots and not keep_fp32:
        undo.originals = None
    undo.has_begun = False
    return frozen


def _checked(model: nn.Module, *, has_example: bool) -> session.Session:
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
    _check_free(model)
    return in_force


def _check_free(model: nn.Module) -> None:
    complete_undo(model)
    name = type(model).__name__
    for path, module in model.named_modules():
        if is_sealed(module) or is_layer_cast(module):
            where = f"{path!r} in {name}" if path else name
            raise FreezeError(f"{where} is frozen already; {REMEDY} before freezing it again")
    if model.training:
        raise FreezeError(
            f"{name} is in training mode, and frozen weights can't be trained; call model.eval() "
            "first"
        )


def _check_layer_cast(model: nn.Module) -> None:
    if session.current() is not None:
        raise FreezeError(
            "torch is converted, so ops would not compute in float32; call hmpx.revert() before "
            'hmpx.freeze(model, compute="float32")'
        )
    _check_free(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"{path!r} in {type(model).__name__}" if path else type(model).__name__
            raise FreezeError(
                f"{where} is a module of TorchScript, whose compiled code reads weights as they are "
                "stored; freeze the module from which it was scripted or traced, and call that"
            )


def _in_16_bits(f: Slot, dtype: torch.dtype, first: Slot) -> Weight:
    """Returns how LayerCast stores a tensor, which is ``first`` under its first name."""
    kept, size = f.tensor.dtype, f.tensor.nbytes if f.place is not None and f is first else 0
    is_low = f.kind == "parameter" and f.place is not None and kept is torch.float32
    why = "upcast where it is read"
    if not is_low:
        why = f.fault or ("is a buffer" if f.kind == "buffer" else f"is {short_name(kept)}")
    if f is not first:
        why = f"is {first.name}"
    stored = (dtype, size // 2) if is_low else (kept, size)
    return Weight(f.name, f.kind, kept, stored[0], size, stored[1], why)


def _low_copies(
    lows: Iterable[Slot],
    dtypes: Mapping[str, LowType],
    rounding: Rounding | None,
    packed: Mapping[str, tuple[number_formats.Packing, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor to store low, with its new contents; a shared chunk stays one, as cuDNN needs."""
    by_storage: dict[object, dict[MemorySpan, Slot]] = {}
    for f in lows:
        if f.place is not None:
            key = f.place.storage, dtypes[f.name], f.tensor.is_inference()
            by_storage.setdefault(key, {}).setdefault(f.place, f)
    copies: dict[MemorySpan | None, Tensor] = {}
    with torch.no_grad(), torch_state.without_casts():
        for group in by_storage.values():
            first = next(iter(group.values()))
            values, low = [f.tensor.detach() for f in group.values()], dtypes[first.name]
            with torch.inference_mode(first.tensor.is_inference()):
                chunk = chunk_of(values) if isinstance(low, torch.dtype) else None
                stored: list[Any]
                if chunk is not None and isinstance(low, torch.dtype):
                    stored = chunk.parts(chunk.elements(values[0]).to(low))
                else:
                    stored = [
                        packed[f.name][1]
                        if f.name in packed
                        else each.to(low)
                        if isinstance(low, torch.dtype)
                        else number_formats.encode(
                            number_formats.quantize(each, low, *(rounding or ())), low
                        )
                        for f, each in zip(group.values(), values, strict=True)
                    ]
            copies.update(zip(group, stored, strict=True))
    return [(f.tensor, copies[f.place]) for f in lows]


# --- the result ----------------------------------------------------------------------------------


class Frozen:
    """A report of what `freeze` did to a model, and the way to undo it.

    As a context manager it undoes the freezing on exit. So does its end, with a warning: keep it as long as the
    model is to be frozen, or freeze with ``keep_fp32=False``.

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
        weights: tuple[Weight, ...],
        undo: Undo,
        name: str,
        formats: Mapping[str, compute.Formats],
        packings: Mapping[str, number_formats.Packing],
    ) -> None:
        self.weights = weights
        self._formats, self._packings = formats, packings  # by name
        self._name = name
        self._undo = undo
        undo.owner = weakref.ref(self)

    def summary(self) -> str:
        """Returns a table: the bytes before and after, and for each weight its dtype and the reason."""
        return table(self._name, self.weights, is_undone=self._undo.is_done)

    def save(
        self,
        directory: str | os.PathLike[str],
        format: str = "compressed-tensors",
        *,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Writes the weights as a checkpoint that servers load, such as vLLM and transformers.

        Weights of linear layers that are used in FP8, MXFP8, MXFP4, NVFP4, INT8 or INT4 are stored as codes and scales,
        other weights in their type in the frozen model ([checkpoints](freeze.md#checkpoints)).

        Args:
            directory: Gets ``model.safetensors`` and ``config.json``. If it can't be written, an earlier checkpoint stays;
                other weights there are refused.
            format: ``"compressed-tensors"``.
            max_shard_size: Bytes, or text such as ``"5GB"``. Larger weights are split into files
                ``model-00001-of-00002.safetensors``, with an index.

        Raises:
            FreezeError: No linear layer has such a format; or one has a format, a size or values that the checkpoint can't
                hold; or the freezing was undone.
            OptionError: The files can't be written, safetensors is not installed, or ``max_shard_size`` is not a size.

        Example:
            >>> model = torch.nn.Linear(4, 2).eval()
            >>> with hmpx.convert(policy={"low": ["linear float8_e4m3fn_row"]}, device_types={"cpu"}):
            ...     with hmpx.freeze(model, torch.ones(1, 4)) as frozen:
            ...         frozen.save("served")
            >>> restored = hmpx.load_frozen("served", torch.nn.Linear(4, 2))
        """
        arguments.choice("format", format, ("compressed-tensors",))
        model = self._undo.model()
        if model is None or self._undo.is_done:
            raise FreezeError(f"{self._name} is not frozen any more; call save() before undo()")
        if self._packings and not self._formats:
            raise FreezeError(
                f"{self._name} was loaded from a checkpoint; copy that directory in place of save()"
            )
        reasons = {each.name: each.reason for each in self.weights}
        held = dict(model.named_parameters(remove_duplicate=False))
        encoded = {
            name: packing.parts(held[name].detach())
            for name, packing in self._packings.items()
            if name in held and packing.holds(held[name])
        }
        checkpoints.save(
            model, self._formats, encoded, reasons, directory, max_shard_size=max_shard_size
        )

    @session.restoring
    def undo(self, *, strict: bool = True) -> None:
        """Restores the model's fp32 weights, bit for bit; does nothing the second time.

        A weight is identified by its name in its module. Anything written to it since is lost. Modules removed
        from the model are ignored.

        Args:
            strict: ``False`` skips weights that are not where they were stored, and restores the others. A
                later call restores those that are back in their places.

        Raises:
            FreezeError: The model was frozen with ``keep_fp32=False``; or some weights are not where
                they were stored: replaced, deleted, parametrized or on the meta device. The
                model is then unchanged.
            OptionError: ``strict`` is neither True nor False.
        """
        strict = arguments.truth("strict", strict)
        if self._undo.is_done:
            return
        if self._undo.originals is None:
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so its fp32 weights are gone; "
                "build the model from them again, or leave out keep_fp32=False to undo()"
            )
        self._undo(self._refusal if strict else None)

    def _refusal(self, misplaced: Mapping[Slot, str]) -> FreezeError:
        by_fault: dict[str, list[str]] = {}
        for slot, fault in misplaced.items():
            by_fault.setdefault(fault, []).append(repr(slot.name))
        faults = [
            f"{listed(names, 8)} {'is' if len(names) == 1 else 'are'} {fault}"
            for fault, names in by_fault.items()
        ]
        return FreezeError(
            f"{self._name} can't be given its fp32 weights back, and nothing was changed: "
            f"{'; '.join(faults)}; put back what hmpx.freeze left there and call undo() again, or "
            "call undo(strict=False) to restore the others"
        )

    def __enter__(self) -> Frozen:
        if self._undo.originals is None:
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so a with block can't undo() it "
                "at its end; leave out keep_fp32=False, or call hmpx.freeze without the block"
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.has_begun = True
        self.undo()

    def __del__(self) -> None:
        undo: Undo | None = getattr(self, "_undo", None)  # an exception may have stopped __init__
        if undo is None or undo.is_done or undo.originals is None or sys.is_finalizing():
            return
        has_begun = undo.has_begun
        if has_begun or undo.originals.have_places():
            undo()
            if not has_begun:
                warn(
                    f"what hmpx.freeze returned for {self._name} is gone, so the model has its fp32 weights again; "
                    "keep it as long as the model is to be frozen, or pass keep_fp32=False"
                )

    def __repr__(self) -> str:
        low = sum(weight.is_low for weight in self.weights)
        state = "undone" if self._undo.is_done else f"{low} of {len(self.weights)} weights low"
        return f"<hmpx.Frozen {self._name}: {state}>"
