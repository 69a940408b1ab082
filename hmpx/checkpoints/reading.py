"""Reads checkpoints of compressed-tensors: into a model, and for their damage."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments, files, torch_state
from ..errors import CheckpointError, OptionError, gathered, raised_here, said_by, shown
from ..later import imported
from ..number_formats import Scaled, decode, quantize
from ..policy import fullmatcher
from ..tensors import long_name
from .checkpoint import Checkpoint, CheckpointLayer
from .schemes import LAYOUTS, Scheme, codes_of_parts, values_of_parts
from .writing import CONFIG, METADATA, WEIGHTS, inside

#: Tensors of a quantized layer besides its bias.
_PARTS: Final = frozenset({
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight_zero_point"
})  # fmt: skip
_OF_INPUTS: Final = ("input_scale", "input_global_scale")
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

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


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory with safetensors or a config.json."""
    names = [each.name for each in Path(path).iterdir()] if Path(path).is_dir() else []
    return any(name == CONFIG or name.endswith(".safetensors") for name in names)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a config.json.

    Raises:
        CheckpointError: It is damaged, or names another method.
    """
    found, name = (
        files.parsed(files.read_text(path, files.CHECKPOINT), Path(path).name, files.CHECKPOINT),
        Path(path).name,
    )
    config = found.get("quantization_config") if isinstance(found, dict) else None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(config, dict) or method != "compressed-tensors":
        raise CheckpointError(f"{name}: quant_method is {shown(method)}, not 'compressed-tensors'")
    return config


class _Directory:
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
        index = folder / f"{WEIGHTS}.index.json"
        listed: Any = {"weight_map": {}}
        if index.exists():
            text = files.read_text(index, files.CHECKPOINT)
            listed = files.parsed(text, index.name, files.CHECKPOINT)
        listed = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(listed, dict):
            yield f"{index.name}: its weight_map is damaged"
        for name, file in (listed if isinstance(listed, dict) else {}).items():
            if places.get(name) != file:
                yield f"{name}: {index.name} says that it is in {shown(file)}, where it is not"

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
        found = {layer for (layer, _, part), _ in pairs if part in _PARTS - {"weight"}}
        found |= {
            layer for (layer, _, part), each in pairs if part == "weight" and each.itemsize == 1
        }
        return sorted(
            found | {each for each in self.schemes if inside(each, "weight") in self.tensors}
        )

    def scheme(self, layer: str, classes: Sequence[str] = ()) -> Scheme | None:
        """Returns the scheme of a layer by its name, a pattern or its class; without classes, any one fits."""
        ranked = [(_rank(target, layer, classes), each) for target, each in self.schemes.items()]
        return (
            min(ranked, key=lambda pair: pair[0], default=(3, None))[1]
            if any(rank < 3 for rank, _ in ranked)
            else None
        )

    def is_ignored(self, layer: str, classes: Sequence[str] = ()) -> bool:
        return any(_rank(each, layer, classes or [""]) < 3 for each in self.ignored)

    def read(
        self, layer: str, classes: Sequence[str] = ()
    ) -> tuple[Scheme | None, dict[str, Tensor], list[str]]:
        """Returns a layer's scheme and tensors, and why these do not hold a weight."""
        names = {part: inside(layer, part) for part in (*_PARTS, *_OF_INPUTS)}
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


def _rank(target: str, layer: str, classes: Sequence[str]) -> int:
    """Returns 0 if a target is a layer's name, 1 for a pattern of it, 2 for its class, else 3."""
    if target.startswith("re:"):
        try:
            return 1 if fullmatcher(f"(?:{target[3:]}).*")(layer) else 3
        except re.error:
            return 3
    is_class = target in classes if classes else target[:1].isupper() and "." not in target
    return 0 if target == layer else 2 if is_class else 3


# --- checks --------------------------------------------------------------------------------------


def read_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module | None = None
) -> Checkpoint:
    """Reads a checkpoint of compressed-tensors, and its faults; also against a model in float32.

    Raises:
        OptionError: The directory does not exist, or safetensors is not installed.
    """
    held = _Directory(directory)
    with torch.no_grad(), torch_state.without_casts():
        state = {} if model is None else _tensors_of(model)
        modules = {} if model is None else dict(model.named_modules())
        layers = [_layer(held, name, modules, state) for name in held.layers]
        faults = [*held.faults, *_others(held, model, state)]
    return Checkpoint(os.fspath(directory), tuple(layers), tuple(faults))


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
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


def _classes(module: nn.Module | None) -> list[str]:
    return [] if module is None else [each.__name__ for each in type(module).__mro__]


def _layer(
    held: _Directory, name: str, modules: Mapping[str, nn.Module], state: Mapping[str, Tensor]
) -> CheckpointLayer:
    scheme, parts, faults = held.read(name, _classes(modules.get(name)))
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
                faults += _of_values(parts, values, scheme)
    layout, strategy = ("", "") if scheme is None else (scheme.layout, scheme.weights["strategy"])
    return CheckpointLayer(name, layout, strategy, shape, largest, error, tuple(faults))


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
        elif part not in expected and part in _PARTS:
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


def _of_values(parts: Mapping[str, Tensor], values: Tensor, scheme: Scheme) -> Iterator[str]:
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
    return float((values - weight).norm() / weight.norm().clamp(min=1e-300))


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


def _others(
    held: _Directory, model: nn.Module | None, state: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yields faults of tensors that are not quantized, and of what is missing."""
    layers = held.layers
    for target in held.schemes:
        if all(_rank(target, layer, ()) == 3 for layer in layers):
            yield f"{target}: {CONFIG} quantizes it, and it has no quantized tensors"
    own = {inside(layer, part) for layer in layers for part in (*_PARTS, *_OF_INPUTS)}
    for name in sorted(held.tensors.keys() - own):
        tensor, weight = held.tensors[name], state.get(name)
        if name.endswith(_UNREAD):
            continue
        if bool(tensor.isnan().any()):
            yield f"{name}: holds NaN"
        elif weight is not None and weight.shape != tensor.shape:
            yield f"{name}: of shape {tuple(tensor.shape)}, and the model's is {tuple(weight.shape)}"
        elif weight is not None and _error(tensor, weight) > _MOST_ROUNDING:
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
        is_ignored = held.is_ignored(name, _classes(module))
        is_whole = isinstance(module, nn.Linear) and name not in layers
        if (
            is_whole
            and not is_ignored
            and inside(name, "weight") in given
            and held.scheme(name, _classes(module))
        ):
            yield f"{name}: not quantized, and {CONFIG} does not ignore it"


# --- into a model --------------------------------------------------------------------------------


def load_frozen(directory: str | os.PathLike[str], model: nn.Module) -> None:
    """Loads a checkpoint that `Frozen.save` wrote into a model in float32.

    Under the conversion with which it was frozen, the model then computes what the frozen model did, bit for bit.

    Args:
        directory: That of the checkpoint, which may also come from elsewhere.
        model: Its weights are overwritten. Tied ones may be stored once.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model, which is then untouched.
        OptionError: The directory does not exist, or safetensors is not installed.

    Example:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> with hmpx.convert(policy={"low": ["linear int8_row"]}, device_types={"cpu"}):
        ...     with hmpx.freeze(model, torch.ones(1, 4)) as frozen:
        ...         frozen.save("int8")
        >>> hmpx.load_frozen("int8", torch.nn.Linear(4, 2))
    """
    state = _tensors_of(model)
    held = _Directory(arguments.path("directory", directory))
    modules, new = dict(model.named_modules()), dict(held.tensors)
    with torch.no_grad(), torch_state.without_casts():
        same = {name: held.tensors[name] for name in state.keys() & held.tensors.keys()}
        faults = [*held.faults, *_others(held, model, same)]
        for layer in held.layers:
            scheme, parts, found = held.read(layer, _classes(modules.get(layer)))
            for part in parts:
                del new[inside(layer, part)]
            if scheme is not None and scheme.format is None:
                found.append("hmpx reads no zero points")
            elif scheme is not None and not found:
                found += _of_values(
                    parts, values_of_parts(parts, scheme, held.scales.get(layer)), scheme
                )
                new[inside(layer, "weight")] = _unrounded(parts, scheme, held.scales.get(layer))
            faults += [f"{layer}: {fault}" for fault in found]
        for name in sorted(new.keys() & state.keys()):
            has, tensor = state[name], new[name]
            if has.shape != tensor.shape:
                faults.append(f"{name}: of shape {tuple(tensor.shape)}, not {tuple(has.shape)}")
            elif torch.promote_types(has.dtype, tensor.dtype) != has.dtype:
                faults.append(
                    f"{name}: {long_name(tensor.dtype)}, which {long_name(has.dtype)} can't hold; give a model in "
                    "float32"
                )
        if faults:
            raise CheckpointError("; ".join(gathered(faults, len(faults))))
        model.load_state_dict(new, strict=False)  # tied ones are there once


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
