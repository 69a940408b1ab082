"""Writes a model's weights as a directory that servers load: safetensors, and a config.json that says how they are stored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments, torch_state
from ..compute import Formats
from ..errors import FreezeError, OptionError, printable, raised_here
from ..files import make_directory, unfinished_folder, unwritable, write
from ..later import imported
from ..number_formats import Scaled
from .schemes import Scheme, parts_of_weight, scheme_of, values_of_parts

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.json"

#: Key of hmpx's own metadata in the header of safetensors: layer -> the scale of its tensor, as hexadecimal digits.
METADATA: Final = "hmpx"

_REMEDY: Final = "leave it in another type by a section, or exclude it, before hmpx.freeze"


def save(
    model: nn.Module, formats: Mapping[str, Formats], directory: str | os.PathLike[str]
) -> None:
    """Writes the weights of ``model``, those in ``formats`` quantized; an earlier checkpoint stays if that fails.

    Raises:
        FreezeError: compressed-tensors can't hold a layer, or no linear layer has a number format.
        OptionError: The files can't be written, or safetensors is not installed.
    """
    target = Path(os.path.realpath(arguments.path("directory", directory)))
    refused = imported("safetensors", "Frozen.save", "checkpoint").SafetensorError
    safetensors = imported("safetensors.torch", "Frozen.save", "checkpoint")
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    with torch.no_grad(), torch_state.without_casts():
        state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        tensors, schemes, scales = _stored(
            state, {n: formats.get(inside(n, "weight")) for n in linear}
        )
    if not schemes:
        name = printable(type(model).__name__)
        raise FreezeError(
            f"{name} has no linear layer that computes in a number format only; name one in a list: linear "
            "float8_e4m3fn_row output=bfloat16"
        )
    ignored = [name for name in linear if formats.get(inside(name, "weight")) is None]
    config = _config(model, schemes, ignored)
    metadata = {"format": "pt"} | ({METADATA: json.dumps(scales)} if scales else {})
    _refuse_others(target)
    make_directory(target.parent)
    with unfinished_folder(target) as folder:
        try:
            safetensors.save_file(tensors, folder / WEIGHTS, metadata)
            write(json.dumps(config, indent=2, default=str).encode(), folder / CONFIG)
            _put(folder, target)
        except raised_here(OSError, refused) as error:
            raise unwritable(target, error) from error


def _refuse_others(target: Path) -> None:
    """Raises OptionError if a directory holds other weights than those of an earlier `save`."""
    known = (
        {WEIGHTS}
        if (target / CONFIG).is_file() and b'"compressed-tensors"' in (target / CONFIG).read_bytes()
        else set()
    )
    others = {
        each.name
        for each in (*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json"))
    } - known
    if others:
        raise OptionError(
            f"{target} holds {min(others)}, which is not of an earlier Frozen.save; give another directory, or delete it"
        )


def _put(folder: Path, target: Path) -> None:
    """Moves a folder's files into a directory."""
    if not target.exists():
        folder.rename(target)
        return
    for name in (WEIGHTS, CONFIG):
        (folder / name).replace(target / name)


def inside(layer: str, name: str) -> str:
    """Returns the name of a layer's tensor."""
    return f"{layer}.{name}" if layer else name


def _stored(
    state: Mapping[str, Tensor], layers: Mapping[str, Formats | None]
) -> tuple[dict[str, Tensor], dict[str, Scheme], dict[str, str]]:
    """Returns the tensors to store, the schemes of layers, and the scales of whole tensors; tied ones are there once."""
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    scales: dict[str, str] = {}
    seen = set()
    for layer, formats in layers.items():
        weight = state.get(inside(layer, "weight"))
        if formats is None or weight is None:
            continue
        scheme = _checked(layer, weight, formats)
        if _place(weight) in seen:
            continue
        schemes[layer] = scheme
        seen.add(_place(weight))
        parts = parts_of_weight(weight, formats, scheme)
        if not bool(values_of_parts(parts, scheme).isfinite().all()):
            raise FreezeError(f"{inside(layer, 'weight')!r} holds infinities or NaN; {_REMEDY}")
        if isinstance(formats.weights, Scaled) and formats.weights.tensor_scale:
            scale = formats.weights.scale(formats.weights.amax(weight))
            scales[layer] = float(scale).hex()
        tensors |= {inside(layer, name): part for name, part in parts.items()}
    for name, tensor in state.items():
        if _place(tensor) not in seen:
            seen.add(_place(tensor))
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            kept = tensor.detach().cpu().contiguous()
            tensors[name] = kept if whole else kept.clone()
    return tensors, schemes, scales


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that tied tensors share."""
    where = tensor.data_ptr() if tensor.numel() else id(tensor)
    return where, tensor.shape, tensor.stride(), tensor.dtype


def _checked(layer: str, weight: Tensor, formats: Formats) -> Scheme:
    name, scheme = inside(layer, "weight"), scheme_of(formats)
    used = f"{name!r} is used in {formats.weights.name}, with inputs in {formats.activations.name}"
    if scheme is None:
        raise FreezeError(f"{used}, which compressed-tensors does not have; {_REMEDY}")
    if not formats.rounding.startswith("nearest"):
        raise FreezeError(
            f"{used}, with rounding={formats.rounding!r}, and checkpoints hold weights rounded to the nearest; {_REMEDY}"
        )
    size = scheme.weights.get("group_size", 1)
    if weight.shape[-1] % size:
        raise FreezeError(
            f"{name!r} has {weight.shape[-1]} columns, which groups of {size} do not divide; {_REMEDY}"
        )
    return scheme


def _config(
    model: nn.Module, schemes: Mapping[str, Scheme], ignored: Iterable[str]
) -> dict[str, Any]:
    """Returns the content of config.json."""
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = {}
    if callable(getattr(own, "to_dict", None)) and hasattr(own, "model_type"):
        config = own.to_dict()
        config["architectures"] = config.get("architectures") or [type(model).__name__]
    distinct: dict[str, tuple[Scheme, list[str]]] = {}
    for layer, scheme in schemes.items():
        distinct.setdefault(repr(scheme), (scheme, []))[1].append(layer)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(distinct) == 1 else layers,
            "weights": scheme.weights,
            "input_activations": scheme.inputs,
            "format": scheme.layout,
        }
        for i, (scheme, layers) in enumerate(distinct.values())
    }
    layouts = {scheme.layout for scheme in schemes.values()}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*ignored],
    }
    return config
