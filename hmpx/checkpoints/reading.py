"""Reads the directories of compressed-tensors: tensors, schemes by layer, and why these do not hold a weight."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import files
from ..errors import CheckpointError, OptionError, raised_here, said_by, shown
from ..later import imported
from ..policy import fullmatcher
from ..tensors import long_name
from .schemes import LAYOUTS, Scheme, codes_of_parts
from .writing import CONFIG, INDEX, METADATA, index_of, inside

#: Tensors of a quantized layer besides its bias.
PARTS: Final = frozenset({
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight_zero_point"
})  # fmt: skip
OF_INPUTS: Final = ("input_scale", "input_global_scale")
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory with safetensors or a config.json."""
    names = [each.name for each in Path(path).iterdir()] if Path(path).is_dir() else []
    return any(name == CONFIG or name.endswith(".safetensors") for name in names)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a config.json.

    Raises:
        CheckpointError: It is damaged, or names another method.
    """
    name, text = Path(path).name, files.read_text(path, files.CHECKPOINT)
    found = files.parsed(text, name, files.CHECKPOINT)
    config = found.get("quantization_config") if isinstance(found, dict) else None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(config, dict) or method != "compressed-tensors":
        raise CheckpointError(f"{name}: quant_method is {shown(method)}, not 'compressed-tensors'")
    return config


class Directory:
    """What a directory holds: tensors, schemes by their targets, and the faults of both."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not Path(path).is_dir():
            raise OptionError(f"{os.fspath(path)}: not a directory; give that of a checkpoint")
        self.tensors: dict[str, Tensor] = {}
        self.scales: dict[str, float] = {}  # those of whole tensors, exactly
        self.schemes: dict[str, Scheme] = {}
        self.ignored: list[str] = []
        self.faults = [*self._read_tensors(Path(path)), *self._read_config(Path(path, CONFIG))]

    def _read_tensors(self, folder: Path) -> Iterator[str]:
        safetensors = imported("safetensors", "reading checkpoints", "checkpoint")
        places: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with files.opened(path, files.STATE), safetensors.safe_open(path, "pt") as file:
                    metadata = json.loads((file.metadata() or {}).get(METADATA, "{}"))
                    self.scales |= {name: float.fromhex(scale) for name, scale in metadata.items()}
                    found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except raised_here(Exception) as error:  # of safetensors
                yield f"{path.name}: cut or damaged: {said_by(error)}"
                continue
            for name in found.keys() & places.keys():
                yield f"{name}: in {places[name]} and in {path.name}"
            self.tensors |= found
            places |= dict.fromkeys(found, path.name)
        if not places:
            yield "no tensors in safetensors"
        try:
            listed = index_of(folder)["weight_map"]
        except raised_here(KeyError):
            listed = None
        if not isinstance(listed, dict):
            yield f"{INDEX}: its weight_map is damaged"
        for name, file in (listed if isinstance(listed, dict) else {}).items():
            if places.get(name) != file:
                yield f"{name}: {INDEX} says that it is in {shown(file)}, where it is not"

    def _read_config(self, path: Path) -> Iterator[str]:
        try:
            config = read_config(path)
            self.ignored = [*map(str, config.get("ignore") or [])]
            for key, group in config["config_groups"].items():
                layout = str(group.get("format") or config.get("format"))
                scheme = Scheme(group["weights"], group.get("input_activations"), layout)
                if not scheme.is_known:
                    yield f"{CONFIG}: {key} has no scheme that hmpx knows, or its format and weights contradict"
                    continue
                self.schemes |= dict.fromkeys(map(str, group["targets"]), scheme)
        except raised_here(CheckpointError) as error:
            yield str(error)
        except raised_here(KeyError, TypeError, AttributeError, ValueError) as error:
            yield f"{CONFIG}: its quantization_config is damaged: {said_by(error)}"

    @property
    def layers(self) -> list[str]:
        """The quantized layers, and those that config.json names."""
        pairs = [(name.rpartition("."), tensor) for name, tensor in self.tensors.items()]
        found = {layer for (layer, _, part), _ in pairs if part in PARTS - {"weight"}}
        found |= {
            layer for (layer, _, part), each in pairs if part == "weight" and each.itemsize == 1
        }
        return sorted(
            found | {each for each in self.schemes if inside(each, "weight") in self.tensors}
        )

    def scheme(self, layer: str, classes: Sequence[str] = ()) -> Scheme | None:
        """Returns the scheme of a layer by its name, a pattern or its class; without classes, any one fits."""
        ranked = {
            rank(target, layer, classes): each for target, each in [*self.schemes.items()][::-1]
        }
        return next((ranked[each] for each in range(3) if each in ranked), None)

    def is_ignored(self, layer: str, classes: Sequence[str] = ()) -> bool:
        """Whether config.json leaves a layer out."""
        return any(rank(each, layer, classes or [""]) < 3 for each in self.ignored)

    def read(
        self, layer: str, classes: Sequence[str] = ()
    ) -> tuple[Scheme | None, dict[str, Tensor], list[str]]:
        """Returns a layer's scheme and tensors, and why these do not hold a weight."""
        names = {part: inside(layer, part) for part in (*PARTS, *OF_INPUTS)}
        parts = {part: self.tensors[name] for part, name in names.items() if name in self.tensors}
        scheme, faults = self.scheme(layer, classes), []
        if self.is_ignored(layer, classes):
            faults.append(f"quantized, but {CONFIG} ignores it")
        if scheme is None:
            return None, parts, [*faults, f"quantized, but no group of {CONFIG} has it"]
        faults += _of_parts(parts, scheme)
        try:
            return scheme, parts, faults or [*_of_scales(parts, scheme)]
        except raised_here(Exception) as error:  # of sizes that contradict each other
            return scheme, parts, [f"its tensors don't fit together: {said_by(error)}"]


def rank(target: str, layer: str, classes: Sequence[str]) -> int:
    """Returns 0 if a target is a layer's name, 1 for a pattern of it, 2 for its class, else 3."""
    if target.startswith("re:"):
        try:
            return 1 if fullmatcher(f"(?:{target[3:]}).*")(layer) else 3
        except re.error:
            return 3
    is_class = target in classes if classes else target[:1].isupper() and "." not in target
    return 0 if target == layer else 2 if is_class else 3


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's tensors on the CPU.

    Raises:
        OptionError: It is not a module, or is on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, not {shown(model)}")
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    if any(tensor.is_meta for tensor in state.values()):
        name = type(model).__name__
        raise OptionError(f"{name} is on the meta device; call model.to_empty(device='cpu') before")
    return {name: tensor.cpu() for name, tensor in state.items()}


def classes_of(module: nn.Module | None) -> list[str]:
    """Returns the names of a module's classes."""
    return [] if module is None else [each.__name__ for each in type(module).__mro__]


def _of_parts(parts: Mapping[str, Tensor], scheme: Scheme) -> Iterator[str]:
    """Yields tensors of a layer that are missing, unexpected, or of the wrong dtype."""
    expected = dict(LAYOUTS[scheme.layout].parts)
    if not scheme.weights.get("symmetric", True):
        expected["weight_zero_point"] = (torch.int32, torch.int8)
    dynamic = (scheme.inputs or {}).get("dynamic", True)
    if dynamic is not True:
        expected["input_global_scale" if dynamic == "local" else "input_scale"] = _FLOATS
    for part in expected.keys() - parts.keys():
        yield f"{part} is missing"
    for part, tensor in parts.items():
        if part in expected and tensor.dtype not in expected[part]:
            wanted = " or ".join(map(long_name, expected[part]))
            yield f"{part} is {long_name(tensor.dtype)}, and {scheme.layout} has {wanted}"
        elif part not in expected and part in PARTS:
            yield f"{part} is there, and {scheme.layout} has none"


def _of_scales(parts: Mapping[str, Tensor], scheme: Scheme) -> Iterator[str]:
    """Yields shapes that do not fit, and scales that are not positive and finite."""
    shape, scale = codes_of_parts(parts, scheme).shape, parts["weight_scale"]
    if len(shape) != 2:
        yield f"its weight is of shape {tuple(shape)}, not of rows and columns"
        return
    if "weight_shape" in parts:
        rows, columns = map(int, parts["weight_shape"].tolist())
        words = rows, -(-columns * scheme.weights["num_bits"] // 32)
        if words != tuple(parts["weight_packed"].shape):
            yield f"weight_packed is of shape {tuple(parts['weight_packed'].shape)}, and weight_shape says {words}"
    if "weight_global_scale" in parts and parts["weight_global_scale"].numel() != 1:
        yield f"weight_global_scale holds {parts['weight_global_scale'].numel()} numbers, not one"
    height, width = scheme.block(shape[1])
    wanted = (-(-shape[0] // height), -(-shape[1] // width)) if height else (1,)
    if tuple(scale.shape) != wanted and (height or scale.numel() != 1):
        size = shape[1] // scale.shape[1] if scale.dim() == 2 and scale.shape[0] == shape[0] else 0
        groups = f": groups of {size}, where {CONFIG} says {width}" if size and height == 1 else ""
        yield f"weight_scale is of shape {tuple(scale.shape)}, not {wanted}{groups}"
    for part, tensor in parts.items():
        values = tensor.float()
        is_bad = (
            tensor == 255 if tensor.dtype is torch.uint8 else ~(values.isfinite() & (values > 0))
        )
        if part.endswith("scale") and bool(is_bad.any()):
            yield f"{part} holds {int(is_bad.sum())} values that are zero, negative, infinite or NaN"
        if part == "weight" and not bool(values.isfinite().all()):
            yield "weight holds NaN"
