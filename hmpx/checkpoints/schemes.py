"""Schemes of compressed-tensors: their number formats, and the tensors that hold a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..compute import Formats
from ..number_formats import Block, Fixed, Float, Format, Scaled, decode, encode, get

#: Elements by their type and bits in compressed-tensors.
_ELEMENTS: Final[Mapping[tuple[str, int], Float | Fixed]] = {
    ("float", 8): get("float8_e4m3fn"),  # type: ignore[dict-item]  # a Float
    ("float", 4): get("float4_e2m1fn"),  # type: ignore[dict-item]
    ("int", 8): Fixed("integer8", 8, 0),
    ("int", 4): Fixed("integer4", 4, 0),
}

#: Values of FP4's codes without a sign, and of e4m3's largest.
E4M3_MOST: Final = 448.0

#: How tensors hold a weight -> the strategies that it may have.
STRATEGIES: Final[Mapping[str, tuple[str, ...]]] = {
    "float-quantized": ("tensor", "channel", "group", "block"),
    "naive-quantized": ("tensor", "channel", "group", "block"),
    "int-quantized": ("tensor", "channel", "group"),
    "pack-quantized": ("tensor", "channel", "group"),
    "mxfp8-quantized": ("group",),
    "mxfp4-pack-quantized": ("group",),
    "nvfp4-pack-quantized": ("tensor_group",),
}


def arguments_for(format: Format) -> dict[str, Any] | None:
    """Returns the arguments with which compressed-tensors quantizes to a number format; None if it can't."""
    element = getattr(format, "element", format)
    found = {kind for kind, own in _ELEMENTS.items() if own == _named(element, own.name)}
    if not found:
        return None
    ((kind, bits),) = found
    strategy: dict[str, Any] | None = None
    if isinstance(format, Float) and bits == 8:
        strategy = {"strategy": "tensor"}
    elif isinstance(format, Block) and kind == "float" and format.size == 32:
        strategy = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    elif isinstance(format, Scaled) and format.history is None:
        shared = format.granularity
        if format.scale_format == "e4m3":
            if format.tensor_scale and (kind, bits, shared) == ("float", 4, 16):
                e4m3 = "torch.float8_e4m3fn"
                strategy = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": e4m3}
        elif format.scale_format == "float32" and (kind, bits) != ("float", 4):
            if isinstance(shared, int):
                strategy = {"strategy": "group", "group_size": shared}
            elif isinstance(shared, tuple) and kind == "float":
                strategy = {"strategy": "block", "block_structure": [*shared]}
            elif shared in {"tensor", "row"}:
                strategy = {"strategy": "tensor" if shared == "tensor" else "channel"}
    if strategy is None or getattr(format, "axis", -1) not in {-1, 1}:
        return None
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **strategy}


def _named(format: Any, name: str) -> Any:
    return replace(format, name=name) if isinstance(format, Float | Fixed) else None


def element_of(scheme: Scheme) -> Float | Fixed:
    """Returns the format of the elements of a weight."""
    return _ELEMENTS[scheme.weights["type"], scheme.weights["num_bits"]]


def format_of(arguments: Mapping[str, Any]) -> Format | None:
    """Returns the number format of arguments of compressed-tensors; None if hmpx has none."""
    element = _ELEMENTS.get((arguments.get("type", "int"), arguments.get("num_bits", 8)))
    strategy, size = arguments.get("strategy") or "tensor", arguments.get("group_size")
    if element is None or not arguments.get("symmetric", True):
        return None
    if strategy == "tensor_group":
        return Scaled("nvfp4", element, size, "e4m3", tensor_scale=True)  # type: ignore[arg-type]
    if str(arguments.get("scale_dtype")).endswith("uint8"):
        return Block("mx", element)
    shared: Any = {"tensor": "tensor", "channel": "row", "group": size}.get(strategy)
    return Scaled("scaled", element, shared or tuple(arguments["block_structure"]))


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized.

    Attributes:
        weights: Arguments of compressed-tensors for the weight.
        inputs: Those for the layer's inputs; None: they stay as they are.
        layout: The name of the layout of its tensors.
    """

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    layout: str

    @property
    def group(self) -> dict[str, Any]:
        """The entry of ``config_groups``, without its targets."""
        return {"weights": self.weights, "input_activations": self.inputs, "format": self.layout}


def scheme_of(formats: Formats) -> Scheme | None:
    """Returns the scheme of a layer with these formats; None if compressed-tensors has none."""
    weights, inputs = arguments_for(formats.weights), arguments_for(formats.activations)
    if weights is None:
        return None
    of_inputs = formats.activations
    if inputs is None and not (isinstance(of_inputs, Float) and of_inputs.bits >= 16):
        return None
    if inputs is not None:
        if isinstance(of_inputs, Scaled | Block):
            inputs["dynamic"] = True
        if inputs["strategy"] == "channel":
            inputs["strategy"] = "token"
        if inputs["strategy"] == "block" or inputs["type"] != weights["type"]:
            return None
        if inputs["strategy"] == "tensor_group":  # needs a scale from calibration
            inputs = None
    is_mx, kind, bits = "scale_dtype" in weights, weights["type"], weights["num_bits"]
    if weights["strategy"] == "tensor_group":
        layout = "nvfp4-pack-quantized"
    elif is_mx:
        layout = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    elif kind == "int":
        layout = "int-quantized" if inputs else "pack-quantized"
    else:
        layout = "float-quantized" if inputs else "naive-quantized"
    return Scheme(weights, inputs, layout)


# --- tensors -------------------------------------------------------------------------------------


def parts_of_weight(weight: Tensor, formats: Formats, scheme: Scheme) -> dict[str, Tensor]:
    """Returns the tensors of a layer with a weight, by their names in it."""
    found = encode(weight, formats.weights, formats.rounding, formats.overflow)
    codes, *scales = found if isinstance(found, tuple) else (found, torch.ones(1))
    bits, kind = scheme.weights["num_bits"], scheme.weights["type"]
    parts = {}
    if scheme.layout == "pack-quantized":
        parts["weight_packed"] = _in_bytes(codes ^ (1 << (bits - 1)), bits, 4).view(torch.int32)
        parts["weight_shape"] = torch.tensor(weight.shape)
    elif bits == 4 and kind == "float":
        parts["weight_packed"] = _in_bytes(codes, 4, 1)
    elif kind == "float":
        parts["weight"] = codes.view(torch.float8_e4m3fn)
    else:
        parts["weight"] = codes.view(torch.int8) if bits == 8 else (codes ^ 8).view(torch.int8) - 8
    scale = scales[0].reshape(1) if scheme.weights["strategy"] == "tensor" else scales[0]
    if len(scales) == 2:  # compressed-tensors divides by the second one
        scale, most = scale.view(torch.float8_e4m3fn), 6.0 * E4M3_MOST
        amax = weight.detach().abs().amax().float()
        of_tensor = torch.where(amax / most == scales[1], most / amax, 1 / scales[1])
        parts["weight_global_scale"] = of_tensor.reshape(1)
    parts["weight_scale"] = scale
    if scheme.inputs and not scheme.inputs["dynamic"]:  # a format without scales
        parts["input_scale"] = torch.ones(1)
    return {name: part.cpu().contiguous() for name, part in parts.items()}


def _in_bytes(codes: Tensor, bits: int, multiple: int) -> Tensor:
    """Returns codes of 4 or 8 bits in bytes, the first ones low; rows are filled up to a multiple of bytes."""
    columns = multiple * 8 // bits
    codes = nn.functional.pad(codes, (0, -codes.shape[-1] % columns))
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def codes_of_parts(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Returns the codes of elements, as uint8 in the shape of the weight."""
    bits, kind = scheme.weights["num_bits"], scheme.weights["type"]
    codes = parts["weight_packed" if "pack" in scheme.layout else "weight"].view(torch.uint8)
    if "pack" in scheme.layout and bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    if scheme.layout == "pack-quantized":
        codes = codes[:, : int(parts["weight_shape"][1])] ^ (1 << (bits - 1))
    return codes & 15 if bits == 4 and kind == "int" else codes


def values_of_parts(
    parts: Mapping[str, Tensor], scheme: Scheme, tensor_scale: float | None = None
) -> Tensor:
    """Returns the weight in float32; the scale of all of NVFP4's tensor may be known exactly."""
    format, codes, scale = format_of(scheme.weights), codes_of_parts(parts, scheme), parts["weight_scale"]
    assert format is not None
    if scheme.weights["strategy"] == "tensor":
        return decode((codes, scale.float().reshape(())), format)
    if scheme.weights["strategy"] == "tensor_group":
        whole = 1 / parts["weight_global_scale"].float() if tensor_scale is None else tensor_scale
        return decode(
            (codes, scale.view(torch.uint8), torch.as_tensor(whole).reshape(())), format
        )
    return decode((codes, scale if scale.dtype is torch.uint8 else scale.float()), format)
