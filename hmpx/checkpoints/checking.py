"""Checks checkpoints of compressed-tensors for damage, alone or against the model in float32."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from .. import torch_state
from ..number_formats import Block, Float, Format, Scaled, decode, quantize
from .checkpoint import Checkpoint, CheckpointLayer
from .reading import OF_INPUTS, PARTS, Directory, classes_of, rank, tensors_of
from .schemes import LAYOUTS, Scheme, codes_of_parts, values_of_parts
from .writing import CONFIG, inside

#: Tensors of other tools that hmpx has no use for: scales of caches, orders of columns.
_UNREAD: Final = (".k_scale", ".v_scale", ".weight_g_idx")

#: Far above norms of rows in trained linear layers; scales that are stored as reciprocals give larger ones.
_LONGEST_ROW: Final = 1000.0

#: The share of groups whose codes may end below the format's largest.
_MOST_LOW: Final = 0.5

#: Errors over the norm of a weight: FP4 has about 0.1, a cast to bfloat16 less than the second.
_MOST_ERROR: Final = 0.5

#: The error of a row over that of `quantize`: rules for scales differ by less.
_MOST_TIMES: Final = 3.0
_MOST_ROUNDING: Final = 2.0**-7


def read_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module | None = None
) -> Checkpoint:
    """Reads a checkpoint of compressed-tensors, and its faults; also against a model in float32.

    Raises:
        OptionError: The directory does not exist, or safetensors is not installed.
    """
    held = Directory(directory)
    with torch.no_grad(), torch_state.without_casts():
        state = {} if model is None else tensors_of(model)
        modules = {} if model is None else dict(model.named_modules())
        layers = [_layer(held, name, modules, state) for name in held.layers]
        faults = [*held.faults, *faults_of_others(held, model, state)]
    return Checkpoint(os.fspath(directory), tuple(layers), tuple(faults))


def _layer(
    held: Directory, name: str, modules: Mapping[str, nn.Module], state: Mapping[str, Tensor]
) -> CheckpointLayer:
    scheme, parts, faults = held.read(name, classes_of(modules.get(name)))
    largest = error = shape = None
    if scheme is not None and not faults:
        shape = tuple(codes_of_parts(parts, scheme).shape)
        if scheme.format is not None:
            values = values_of_parts(parts, scheme, held.scales.get(name))
            largest = float(values.abs().max())
            if modules:
                weight = state.get(inside(name, "weight"), torch.empty(0)).float()
                error = _error(values, weight) if weight.shape == values.shape else None
                faults += _against(parts, values, scheme, weight, state)
            else:
                faults += faults_of_values(parts, values, scheme)
    layout, strategy = ("", "") if scheme is None else (scheme.layout, scheme.weights["strategy"])
    return CheckpointLayer(name, layout, strategy, shape, largest, error, tuple(faults))


def faults_of_values(parts: Mapping[str, Tensor], values: Tensor, scheme: Scheme) -> Iterator[str]:
    """Yields what scales by largest magnitudes never give. Scales that are wrong by a moderate factor look right."""
    longest = float(values.square().sum(1).max().sqrt())
    if not longest < _LONGEST_ROW:
        yield f"rows have norms of up to {longest:.3g}, as if its scales were reciprocals"
    height, width = scheme.block(values.shape[1])
    if not height:
        return
    magnitudes = decode(codes_of_parts(parts, scheme), scheme.element).abs()
    padded = nn.functional.pad(
        magnitudes, (0, -values.shape[1] % width, 0, -values.shape[0] % height)
    )
    rows, columns = padded.shape[0] // height, padded.shape[1] // width
    most = padded.reshape(rows, height, columns, width).amax((1, 3))
    least = scheme.element.max * (0.25 if LAYOUTS[scheme.layout].scale_dtype == "uint8" else 0.85)
    low = int(((most > 0) & (most < least)).sum())
    if low > _MOST_LOW * int((most > 0).sum()):
        yield f"codes of {low} of {most.numel()} groups end below {least:g} of {scheme.element.max:g}, so others made their scales"


def _error(values: Tensor, weight: Tensor) -> float:
    """Returns the norm of the difference over that of the weight; tensors without fractions are equal or not."""
    if not weight.is_floating_point():
        return float(not torch.equal(values, weight.to(values.dtype)))
    values, weight = values.double(), weight.double()
    if torch.equal(values.nan_to_num(0.0), weight.nan_to_num(0.0)):
        return 0.0  # also of infinite ones, as masks are
    if not torch.equal(values.isinf() * values.sign(), weight.isinf() * weight.sign()):
        return math.inf
    values, weight = (each.where(each.isfinite(), 0.0) for each in (values, weight))
    error = (values - weight).norm() / weight.norm().clamp(min=1e-300)
    return float(error)


def _against(
    parts: Mapping[str, Tensor],
    values: Tensor,
    scheme: Scheme,
    weight: Tensor,
    state: Mapping[str, Tensor],
) -> Iterator[str]:
    """Yields how a weight differs from the model's, and a reason that would explain it."""
    if weight.shape != values.shape:
        yield f"its weight is of shape {tuple(values.shape)}, and the model's is {tuple(weight.shape)}"
        return
    error, reasons = _error(values, weight), []
    assert scheme.format is not None
    usual = quantize(weight, scheme.format, overflow="saturate").double()
    usual, found = ((each - weight.double()).norm(dim=1) for each in (usual, values.double()))
    is_odd = ~(found <= _MOST_TIMES * usual + _MOST_ROUNDING * weight.double().norm(dim=1))
    if not bool(is_odd.any()):
        return
    for part in parts.keys() & {"weight_scale", "weight_global_scale"}:
        scale = parts[part]
        inverse = 254 - scale if scale.dtype is torch.uint8 else (1 / scale.float()).to(scale.dtype)
        if _error(values_of_parts({**parts, part: inverse}, scheme), weight) < _MOST_ERROR:
            reasons.append(f": {part} is stored as its reciprocal")
    same = [name for name, each in state.items() if each.shape == values.shape]
    if not _error(values, weight) < _MOST_ERROR:
        reasons += [f": it is {name}" for name in same if _error(values, state[name]) < _MOST_ERROR]
    rows = f" in {int(is_odd.sum())} of {len(is_odd)} rows" if not bool(is_odd.all()) else ""
    yield f"differs from the model's weight by {error:.2g} of its norm{rows}{''.join(reasons[:1])}"


def _nearest(stored: Tensor, weight: Tensor, held: Directory) -> Tensor:
    """Returns a model's weight, rounded to one of the checkpoint's formats, along any axis, if it is stored so."""
    formats = {each.format for each in held.schemes.values()}
    ways = list[Format]()
    for each in formats if bool(weight.isfinite().all()) else ():
        if isinstance(each, Block | Scaled):
            ways += [each.along(axis) for axis in range(-weight.dim(), 0)]
            if isinstance(each.element, Float):  # as integers, small values would all be zeros
                ways.append(each.element)
    rounded = (quantize(weight, each, overflow="saturate") for each in dict.fromkeys(ways))
    return min([weight, *rounded], key=lambda each: _error(stored, each))


def faults_of_others(
    held: Directory, model: nn.Module | None, state: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yields faults of tensors that are not quantized, and of what is missing."""
    layers = held.layers
    for target in held.schemes:
        if all(rank(target, layer, ()) == 3 for layer in layers):
            yield f"{target}: {CONFIG} quantizes it, and it has no quantized tensors"
    own = {inside(layer, part) for layer in layers for part in (*PARTS, *OF_INPUTS)}
    for name in sorted(held.tensors.keys() - own):
        tensor, weight = held.tensors[name], state.get(name)
        if name.endswith(_UNREAD):
            continue
        if bool(tensor.isnan().any()):
            yield f"{name}: holds NaN"
        elif name.endswith(("weight", "bias")) and bool(tensor.isinf().any()):  # masks may
            yield f"{name}: holds infinities"
        elif weight is not None and weight.shape != tensor.shape:
            yield f"{name}: of shape {tuple(tensor.shape)}, and the model's is {tuple(weight.shape)}"
        elif weight is not None and _error(tensor, _nearest(tensor, weight, held)) > _MOST_ROUNDING:
            yield f"{name}: differs from the model's by {_error(tensor, weight):.2g} of its norm"
        elif weight is None and model is not None:
            yield f"{name}: not in the model"
    if model is None:
        return
    given = {inside(layer, "weight") for layer in layers} | held.tensors.keys()
    tensors = model.state_dict(keep_vars=True)
    present = {
        id(tensor) for name, tensor in tensors.items() if name in given
    }  # tied ones are stored once
    yield from (
        f"{n}: missing" for n, t in tensors.items() if n not in given and id(t) not in present
    )
    for name, module in model.named_modules():
        is_ignored = held.is_ignored(name, classes_of(module))
        is_whole = isinstance(module, nn.Linear) and name not in layers
        if (
            is_whole
            and not is_ignored
            and inside(name, "weight") in given
            and held.scheme(name, classes_of(module))
        ):
            yield f"{name}: not quantized, and {CONFIG} does not ignore it"
