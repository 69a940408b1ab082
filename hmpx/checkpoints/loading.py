"""Reads the weights of checkpoints of compressed-tensors, for models in float32."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import arguments, torch_state
from ..errors import CheckpointError, gathered
from ..number_formats import Scaled
from ..tensors import long_name
from .checking import faults_of_others, faults_of_values
from .reading import Directory, classes_of, tensors_of
from .schemes import Scheme, encoded_of_parts, values_of_parts
from .writing import inside


class Loaded(NamedTuple):
    """A weight in float32 that rounds to the stored values; of quantized ones also the scheme, codes and scales."""

    values: Tensor
    scheme: Scheme | None = None
    encoded: tuple[Tensor, ...] = ()


def weights_for(directory: str | os.PathLike[str], model: nn.Module) -> dict[str, Loaded]:
    """Returns a checkpoint's weights by their names in a model.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model.
        OptionError: The directory does not exist, or safetensors is not installed.
    """
    state = tensors_of(model)
    held = Directory(arguments.path("directory", directory))
    modules, new = dict(model.named_modules()), {n: Loaded(t) for n, t in held.tensors.items()}
    with torch.no_grad(), torch_state.without_casts():
        same = {name: held.tensors[name] for name in state.keys() & held.tensors.keys()}
        faults = [*held.faults, *faults_of_others(held, model, same)]
        for layer in held.layers:
            scheme, parts, found = held.read(layer, classes_of(modules.get(layer)))
            for part in parts:
                del new[inside(layer, part)]
            if scheme is not None and scheme.format is None:
                found.append("hmpx reads no zero points")
            elif scheme is not None and not found:
                given = parts, scheme, held.scales.get(layer)
                found += faults_of_values(parts, values_of_parts(*given), scheme)
                loaded = Loaded(_unrounded(*given), scheme, encoded_of_parts(*given))
                new[inside(layer, "weight")] = loaded
            faults += [f"{layer}: {fault}" for fault in found]
        for name in sorted(new.keys() & state.keys()):
            has, tensor = state[name], new[name].values
            if has.shape != tensor.shape:
                faults.append(f"{name}: of shape {tuple(tensor.shape)}, not {tuple(has.shape)}")
            elif torch.promote_types(has.dtype, tensor.dtype) != has.dtype:
                faults.append(
                    f"{name}: {long_name(tensor.dtype)}, which {long_name(has.dtype)} can't hold; give a model in "
                    "float32"
                )
        if faults:
            raise CheckpointError("; ".join(gathered(faults, len(faults))))
    return new


def _unrounded(parts: Mapping[str, Tensor], scheme: Scheme, tensor_scale: float | None) -> Tensor:
    """Returns a weight that rounds to the stored values.

    These may give other scales, since largest magnitudes were rounded: those change by some units in the last place.
    """
    values, format = values_of_parts(parts, scheme, tensor_scale), scheme.format
    if not isinstance(format, Scaled) or not values.numel():
        return values
    amax = found = format.amax(values)
    scale = parts["weight_scale"].float()
    if format.tensor_scale:
        scale = torch.tensor(tensor_scale or 1 / float(parts["weight_global_scale"]))
    scale = scale.reshape(amax.shape)
    for away in (0.0, math.inf):
        near = amax
        for _ in range(3):
            near = near.nextafter(torch.full_like(near, away))
            is_right = (format.scale(found) != scale) & (format.scale(near) == scale)
            found = torch.where(is_right, near, found)
    if amax.dim():
        height, width = scheme.block(values.shape[1])
        amax, found = (
            each.repeat_interleave(height, 0).repeat_interleave(width, 1)[
                : len(values), : values.shape[1]
            ]
            for each in (amax, found)
        )
    return torch.where(values.abs() == amax, found.copysign(values), values)
