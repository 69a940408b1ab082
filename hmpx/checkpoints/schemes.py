"""Schemes of compressed-tensors: their number formats, and the tensors that hold a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..compute import Formats
from ..number_formats import (
    Block,
    Fixed,
    Float,
    Format,
    Scaled,
    decode,
    encode,
    in_bytes,
    out_of_bytes,
)

#: Elements by their type and bits.
_ELEMENTS: Final[Mapping[tuple[str, int], Float | Fixed]] = {
    ("float", 8): Float("float8_e4m3fn", 4, 3, kind="fn"),
    ("float", 4): Float("float4_e2m1fn", 2, 1, kind="finite"),
    ("int", 8): Fixed("integer8", 8, 0),
    ("int", 4): Fixed("integer4", 4, 0),
}

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8: Final = (torch.float8_e4m3fn,)
_UINT8: Final = (torch.uint8,)
_INTEGERS: Final = (torch.int64, torch.int32)


class Layout(NamedTuple):
    """How tensors hold a weight: its type and bits, what shares a scale, and the dtypes of the tensors."""

    kind: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    scale_dtype: str
    parts: Mapping[str, tuple[torch.dtype, ...]]
    rounds_inputs: bool | None = None  # None: it may


_SHARED: Final = ("tensor", "channel", "group")
_OF_FLOAT8: Final = {"weight": _FLOAT8, "weight_scale": _FLOATS}
_OF_INT8: Final = {"weight": (torch.int8,), "weight_scale": _FLOATS}
_OF_PACKED: Final = {
    "weight_packed": (torch.int32,),
    "weight_scale": _FLOATS,
    "weight_shape": _INTEGERS,
}
_OF_MX: Final = {"weight": _FLOAT8, "weight_scale": _UINT8}
_OF_FP4: Final = {"weight_packed": _UINT8, "weight_scale": _UINT8}
_OF_NVFP4: Final = {
    "weight_packed": _UINT8,
    "weight_scale": _FLOAT8,
    "weight_global_scale": _FLOATS,
}

#: Layouts by the names of compressed-tensors, which takes the first one that fits.
LAYOUTS: Final[Mapping[str, Layout]] = {
    "mxfp4-pack-quantized": Layout("float", (4,), ("group",), "uint8", _OF_FP4),
    "mxfp8-quantized": Layout("float", (8,), ("group",), "uint8", _OF_MX),
    "nvfp4-pack-quantized": Layout("float", (4,), ("tensor_group",), "float8_e4m3fn", _OF_NVFP4),
    "int-quantized": Layout("int", (4, 8), _SHARED, "", _OF_INT8, rounds_inputs=True),
    "pack-quantized": Layout("int", (4, 8), _SHARED, "", _OF_PACKED),
    "float-quantized": Layout(
        "float", (8,), (*_SHARED, "block"), "", _OF_FLOAT8, rounds_inputs=True
    ),
    "naive-quantized": Layout("float", (8,), (*_SHARED, "block"), "", _OF_FLOAT8),
}


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized: compressed-tensors' arguments for its weight and its inputs, and a name of `LAYOUTS`."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    layout: str

    @property
    def is_known(self) -> bool:
        """Whether its layout can hold such weights, and hmpx has their format, at least if they are symmetric."""
        known, weights = LAYOUTS.get(self.layout), self.weights
        dtype = str(weights.get("scale_dtype") or "").removeprefix("torch.")
        return (
            known is not None
            and (weights.get("type"), weights.get("strategy"))
            in {(known.kind, s) for s in known.strategies}
            and weights.get("num_bits") in known.bits
            and (dtype == known.scale_dtype or not known.scale_dtype)
            and (self.format is not None or not weights.get("symmetric", True))
        )

    @property
    def element(self) -> Float | Fixed:
        """The format of the elements of a weight."""
        return _ELEMENTS[self.weights["type"], self.weights["num_bits"]]

    @property
    def format(self) -> Format | None:
        """The number format of the weight; None if hmpx has none."""
        return _format_of(self.weights)

    def block(self, columns: int) -> tuple[int, int]:
        """Returns how many rows and columns of a weight share a scale; 0 for all rows."""
        strategy = self.weights["strategy"]
        if strategy == "block":
            return self.weights["block_structure"][0], self.weights["block_structure"][1]
        is_group = strategy in {"group", "tensor_group"}
        return int(strategy != "tensor"), self.weights["group_size"] if is_group else columns


def _format_of(arguments: Mapping[str, Any]) -> Format | None:
    element = _ELEMENTS[arguments["type"], arguments["num_bits"]]
    strategy, size = arguments["strategy"], arguments.get("group_size")
    if not arguments.get("symmetric", True):
        return None
    if str(arguments.get("scale_dtype")).endswith("uint8"):
        return Block("mx", element) if size == 32 else None
    if strategy == "tensor_group":
        return Scaled("nvfp4", element, 16, "e4m3", tensor_scale=True) if size == 16 else None
    shared: Any = {"tensor": "tensor", "channel": "row", "group": size}.get(strategy)
    return Scaled("scaled", element, shared or tuple(arguments["block_structure"]))


def _arguments_for(format: Format) -> dict[str, Any] | None:
    """Returns the arguments with which compressed-tensors quantizes to a number format; None if it can't."""
    element, shared = getattr(format, "element", format), getattr(format, "granularity", "tensor")
    found: dict[str, Any] = {"symmetric": True, "dynamic": False}
    for (kind, bits), own in _ELEMENTS.items():
        if isinstance(element, type(own)) and replace(element, name=own.name) == own:
            found |= {"type": kind, "num_bits": bits}
    if isinstance(shared, int):
        found |= {"strategy": "group", "group_size": shared}
    else:
        found["strategy"] = {"tensor": "tensor", "row": "channel"}.get(shared, "block")
        found |= {"block_structure": [*shared]} if isinstance(shared, tuple) else {}
    if isinstance(format, Block):
        found["scale_dtype"] = "torch.uint8"
    elif isinstance(format, Scaled) and format.tensor_scale:
        found |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    if "type" not in found or shared == "column":
        return None
    known = _format_of(found)
    if isinstance(format, Scaled | Block) and isinstance(known, Scaled | Block):
        same = {each: getattr(format, each) for each in ("name", "element", "rule")}
        axis = -1 if format.axis == 1 or shared == "tensor" else format.axis
        return found if replace(known, **same) == replace(format, axis=axis) else None
    return found if isinstance(format, Float) else None


def scheme_of(formats: Formats) -> Scheme | None:
    """Returns the scheme of a layer with these formats; None if compressed-tensors has none."""
    weights, inputs = _arguments_for(formats.weights), _arguments_for(formats.activations)
    of_inputs = formats.activations
    is_wide = isinstance(of_inputs, Float) and of_inputs.bits >= 16
    if weights is None or (inputs is None and not is_wide):
        return None
    if inputs is not None:
        inputs["dynamic"] = isinstance(of_inputs, Scaled | Block)
        inputs["strategy"] = {"channel": "token"}.get(inputs["strategy"], inputs["strategy"])
        if inputs["strategy"] == "block" or inputs["type"] != weights["type"]:
            return None
        if inputs["strategy"] == "tensor_group":  # would need a scale from calibration
            inputs = None
    every = [
        Scheme(weights, inputs, layout)
        for layout in LAYOUTS
        if inputs or not LAYOUTS[layout].rounds_inputs
    ]
    return next((scheme for scheme in every if scheme.is_known), None)


# --- tensors -------------------------------------------------------------------------------------


def parts_of_weight(
    weight: Tensor, formats: Formats, scheme: Scheme, encoded: tuple[Tensor, ...] | None
) -> dict[str, Tensor]:
    """Returns the tensors of a layer with a weight, by their names in it; its codes may be known."""
    found = encoded or encode(weight, formats.weights, formats.rounding, formats.overflow)
    codes, scale, *of_tensor = found if isinstance(found, tuple) else (found, torch.ones(1))
    bits, dtypes = scheme.weights["num_bits"], LAYOUTS[scheme.layout].parts
    parts = {"weight_scale": scale.reshape(1) if scheme.weights["strategy"] == "tensor" else scale}
    if scheme.layout == "pack-quantized":
        parts["weight_packed"] = in_bytes(codes ^ (1 << (bits - 1)), bits, 4).view(torch.int32)
        parts["weight_shape"] = torch.tensor(weight.shape)
    elif "weight_packed" in dtypes:
        parts["weight_packed"] = in_bytes(codes, bits)
    elif bits == 4:
        parts["weight"] = (codes ^ 8).view(torch.int8) - 8
    else:
        parts["weight"] = codes.view(*dtypes["weight"])
    if of_tensor:  # by which compressed-tensors divides
        most, amax = scheme.element.max * 448, weight.detach().abs().amax().float()
        is_usual = amax / most == of_tensor[0]
        parts["weight_global_scale"] = torch.where(is_usual, most / amax, 1 / of_tensor[0]).reshape(
            1
        )
        parts["weight_scale"] = scale.view(torch.float8_e4m3fn)
    if scheme.inputs and not scheme.inputs["dynamic"]:  # a format without scales
        parts["input_scale"] = torch.ones(1)
    return {name: part.cpu().contiguous() for name, part in parts.items()}


def codes_of_parts(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Returns the codes of elements, as uint8 in the shape of the weight."""
    bits, is_packed = scheme.weights["num_bits"], "weight_packed" in parts
    codes = parts["weight_packed" if is_packed else "weight"].view(torch.uint8)
    if is_packed:
        codes = out_of_bytes(codes, bits)
    if scheme.layout == "pack-quantized":
        codes = codes[:, : int(parts["weight_shape"][1])] ^ (1 << (bits - 1))
    return codes & 15 if bits == 4 else codes


def encoded_of_parts(
    parts: Mapping[str, Tensor], scheme: Scheme, tensor_scale: float | None = None
) -> tuple[Tensor, ...]:
    """Returns codes and scales, as `encode` does; the scale of all of NVFP4's tensor may be known exactly."""
    codes, scale = codes_of_parts(parts, scheme), parts["weight_scale"]
    if "weight_global_scale" in parts:
        whole = 1 / parts["weight_global_scale"].float() if tensor_scale is None else tensor_scale
        return codes, scale.view(torch.uint8), torch.as_tensor(whole).reshape(())
    scale = scale.reshape(()) if scheme.weights["strategy"] == "tensor" else scale
    return codes, scale if scale.dtype is torch.uint8 else scale.float()


def values_of_parts(
    parts: Mapping[str, Tensor], scheme: Scheme, tensor_scale: float | None = None
) -> Tensor:
    """Returns the weight in float32, from what `encoded_of_parts` returns."""
    assert scheme.format is not None
    return decode(encoded_of_parts(parts, scheme, tensor_scale), scheme.format)
