"""Reads checkpoints of compressed-tensors: into a model, and for their damage."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import torch_state
from ..errors import CheckpointError, OptionError, brief, fielded, gathered, raised_here, shown
from ..files import CHECKPOINT, parsed, read_text
from ..number_formats import Scaled, decode
from ..policy import fullmatcher
from ..reports import Column, ReportTable, Written, page, paragraphs, table_section, without_end
from ..tensors import long_name
from .schemes import STRATEGIES, Scheme, codes_of_parts, element_of, format_of, values_of_parts
from .tensor_files import StoredTensor, TensorFile
from .writing import CONFIG, METADATA, WEIGHTS

#: The version of the JSON that `Checkpoint.to_json` writes.
SCHEMA: Final = 1

_PARTS: Final = (
    "weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight_zero_point", "weight"
)  # fmt: skip

_SCALES_OF_INPUTS: Final = ("input_scale", "input_global_scale")

#: The share of groups whose codes may end below the format's largest.
_MOST_LOW: Final = 0.5

#: Norms of rows of a trained linear layer are far below; scales that are stored as reciprocals give larger ones.
_LONGEST_ROW: Final = 1000.0

#: The error of a weight, over its norm: FP4 has about 0.1.
_MOST_ERROR: Final = 0.5
_MOST_ROUNDING: Final = 2.0**-7


@dataclass(frozen=True, slots=True)
class CheckpointLayer:
    """A quantized layer of a checkpoint.

    Attributes:
        name: The name of its module.
        layout: How its tensors hold it: ``"float-quantized"``.
        strategy: What shares a scale: ``"channel"``.
        shape: The shape of its weight; None: unknown.
        largest: The largest magnitude of its weight.
        error: The norm of the difference from the model's weight, over that of the weight.
        faults: Its faults, as text.
    """

    name: str
    layout: str
    strategy: str
    shape: tuple[int, ...] | None
    largest: float | None
    error: float | None
    faults: tuple[str, ...]

    __repr__ = fielded


@dataclass(frozen=True)
class Checkpoint(Written):
    """The quantized layers of a checkpoint, and its faults.

    Attributes:
        path: The directory.
        layers: A row for each quantized layer.
        other_faults: Those of files, of config.json and of other tensors.
        about: See [results](#results).
    """

    path: str
    layers: tuple[CheckpointLayer, ...]
    other_faults: tuple[str, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def faults(self) -> tuple[str, ...]:
        """A line for each fault."""
        of_layers = [f"{each.name}: {fault}" for each in self.layers for fault in each.faults]
        return (*self.other_faults, *of_layers)

    __repr__ = brief

    def __str__(self) -> str:
        return "\n".join([self._verdict(), "", *(self.faults or self._shown().lines())])

    def _repr_html_(self) -> str:
        return f"<div>{paragraphs([self._verdict(), *self.faults])}{self._shown().to_html()}</div>"

    def _verdict(self) -> str:
        count = len(self.faults)
        said = "no faults" if not count else f"{count} fault{'s' * (count > 1)}"
        return f"{self.path}: {len(self.layers)} quantized layers, {said}"

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_checkpoint": SCHEMA, **asdict(self)}

    def _table(self) -> ReportTable:
        return ReportTable.of_fields([each.name for each in fields(CheckpointLayer)], self.layers)

    def _shown(self) -> ReportTable:
        def column(name: str, show: Callable[[Any], str] = str, *, is_number: bool = False) -> Column:
            values = [getattr(each, name) for each in self.layers]
            return Column(name, values, show, is_number=is_number, cut=without_end)

        names = ("name", "layout", "strategy", "shape")
        columns = [*map(column, names), column("largest", "{:.3g}".format, is_number=True)]
        if any(each.error is not None for each in self.layers):
            columns.append(column("error", "{:.2g}".format, is_number=True))
        if any(each.faults for each in self.layers):
            columns.append(column("faults", "; ".join))
        return ReportTable(columns)

    def _page(self) -> str:
        name = Path(self.path).name
        said = paragraphs([self._verdict(), *self.other_faults], "verdict")
        parts = said + table_section("layers", "Layers")
        tables = {"layers": self._shown()}
        return page(f"hmpx: {name}", f"Quantized layers of {name}", parts, self.about, tables=tables)


# --- files ---------------------------------------------------------------------------------------


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory with safetensors or a config.json."""
    return Path(path).is_dir() and any(
        each.name == CONFIG or each.name.endswith((".safetensors", f"{WEIGHTS}.index.json"))
        for each in Path(path).iterdir()
    )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of a config.json.

    Raises:
        CheckpointError: It is damaged, or names another method.
    """
    name = Path(path).name
    found = parsed(read_text(path, CHECKPOINT), name, CHECKPOINT)
    config = found.get("quantization_config") if isinstance(found, dict) else None
    if not isinstance(config, dict):
        raise CheckpointError(f"{name}: it has no quantization_config; {CHECKPOINT.remedy}")
    if config.get("quant_method") != "compressed-tensors":
        method = shown(config.get("quant_method"))
        raise CheckpointError(f"{name}: quant_method is {method}, not 'compressed-tensors'")
    return config


@dataclass(frozen=True)
class _ConfigGroup:
    """A group of ``config_groups``."""

    targets: tuple[str, ...]
    scheme: Scheme


class _Directory:
    """What a directory holds: tensors, groups, and faults of both."""

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.scales: dict[str, float] = {}
        self.groups: list[_ConfigGroup] = []
        self.ignored: tuple[str, ...] = ()
        self.faults = [*self._read_files(path), *self._read_groups(path / CONFIG)]

    def _read_files(self, path: Path) -> Iterator[str]:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            yield "it holds no safetensors"
        for each in files:
            found = TensorFile(each)
            yield from found.faults
            for name in found.tensors.keys() & self.tensors.keys():
                yield f"{name}: in {self.tensors[name].path.name} and in {each.name}"
            self.tensors |= found.tensors
            try:
                scales = json.loads(found.metadata.get(METADATA, "{}"))
                self.scales |= {name: float.fromhex(scale) for name, scale in scales.items()}
            except raised_here(ValueError, TypeError, AttributeError):
                yield f"{each.name}: its metadata {METADATA!r} is damaged"
        index = path / f"{WEIGHTS}.index.json"
        if index.exists():
            listed = parsed(read_text(index, CHECKPOINT), index.name, CHECKPOINT)
            places = listed.get("weight_map") if isinstance(listed, dict) else None
            for name, file in places.items() if isinstance(places, dict) else ():
                if name not in self.tensors or self.tensors[name].path.name != file:
                    yield f"{name}: {index.name} says that it is in {shown(file)}, where it is not"

    def _read_groups(self, path: Path) -> Iterator[str]:
        try:
            config = read_config(path)
        except raised_here(CheckpointError) as error:
            yield str(error)
            return
        ignored, groups = config.get("ignore") or [], config.get("config_groups")
        if not isinstance(groups, dict) or not groups or not isinstance(ignored, list):
            yield f"{CONFIG}: config_groups or ignore is missing or of the wrong type"
            return
        self.ignored = tuple(map(str, ignored))
        for key, group in groups.items():
            try:
                layout = group.get("format") or config.get("format")
                scheme = Scheme(group["weights"], group.get("input_activations"), layout)
                strategy, targets = scheme.weights.get("strategy"), tuple(map(str, group["targets"]))
                is_known = strategy in STRATEGIES[layout] and _is_of_layout(scheme)
            except (KeyError, TypeError, AttributeError):
                is_known, targets, scheme = False, (), Scheme({}, None, "")
            if not is_known:
                yield f"{CONFIG}: {key} has no scheme that hmpx knows, or its format and weights contradict"
                continue
            self.groups.append(_ConfigGroup(targets, scheme))

    def scheme(self, layer: str, classes: Sequence[str] = ()) -> Scheme | None:
        """Returns the scheme of a layer: by its name, a pattern, or its class; without classes any class matches."""
        for how in range(3):
            for group in self.groups:
                for target in group.targets:
                    if _matches(target, layer, classes)[how]:
                        return group.scheme
        return None

    def is_ignored(self, layer: str, classes: Sequence[str] = ()) -> bool:
        return any(any(_matches(each, layer, classes or [""])) for each in self.ignored)


def _is_of_layout(scheme: Scheme) -> bool:
    layout, bits, kind = scheme.layout, scheme.weights.get("num_bits"), scheme.weights.get("type")
    is_mx = "scale_dtype" in scheme.weights and scheme.weights["scale_dtype"] is not None
    expected = {
        "mxfp8-quantized": ("float", 8, True), "mxfp4-pack-quantized": ("float", 4, True),
        "nvfp4-pack-quantized": ("float", 4, True), "float-quantized": ("float", 8, False),
        "int-quantized": ("int", bits, False), "pack-quantized": ("int", bits, False),
    }.get(layout, (kind, 8, False))  # fmt: skip
    sizes = {"mx": 32, "nv": 16}
    size = scheme.weights.get("group_size")
    fits = sizes.get(layout[:2], size) == size and (kind, bits, is_mx) == expected
    return fits and (not scheme.weights.get("symmetric", True) or format_of(scheme.weights) is not None)


def _matches(target: str, layer: str, classes: Sequence[str]) -> tuple[bool, bool, bool]:
    """Returns whether a target is a layer's name, a pattern of it, or its class."""
    if target.startswith("re:"):
        try:
            return False, fullmatcher(f"(?:{target[3:]}).*")(layer), False
        except re.error:
            return False, False, False
    is_class = target in classes if classes else target[:1].isupper() and "." not in target
    return target == layer, False, is_class


# --- checks --------------------------------------------------------------------------------------


def read_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module | None = None
) -> Checkpoint:
    """Reads a checkpoint of compressed-tensors, and its faults; also against a model in float32.

    Raises:
        OptionError: There is no such directory.
    """
    if not Path(directory).is_dir():
        raise OptionError(f"{os.fspath(directory)}: not a directory; give that of a checkpoint")
    held = _Directory(Path(directory))
    with torch.no_grad(), torch_state.without_casts():
        state = {} if model is None else {n: t.detach() for n, t in model.state_dict().items()}
        names = _layers(held)
        layers = [_layer(held, name, model, state) for name in names]
        others = [*held.faults, *_others(held, names, model, state)]
    return Checkpoint(os.fspath(directory), tuple(layers), tuple(others))


def _in(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _layers(held: _Directory) -> list[str]:
    """Returns the quantized layers."""
    found = set()
    for name, tensor in held.tensors.items():
        layer, _, part = name.rpartition(".")
        is_named = any(layer in each.targets for each in held.groups)
        if part in _PARTS[:-1] or (part == "weight" and (tensor.dtype.itemsize == 1 or is_named)):
            found.add(layer)
    return sorted(found)


def _read(
    held: _Directory, name: str, classes: Sequence[str] = ()
) -> tuple[Scheme, dict[str, Tensor], list[str]]:
    """Returns a layer's scheme and tensors, and why these don't hold a weight."""
    found, faults = held.scheme(name, classes), []
    scheme = found or Scheme({"strategy": ""}, None, "")
    if held.is_ignored(name, classes):
        faults.append(f"quantized, but {CONFIG} ignores it")
    if found is None:
        return scheme, {}, [*faults, f"quantized, but no group of {CONFIG} has it"]
    stored = {part: held.tensors.get(_in(name, part)) for part in (*_PARTS, *_SCALES_OF_INPUTS)}
    present = {part: each for part, each in stored.items() if each is not None}
    faults += _of_parts(present, scheme)
    parts = {} if faults else {part: each.read() for part, each in present.items()}
    if parts:
        faults += _of_scales(parts, scheme)
    return scheme, parts, faults


def _layer(
    held: _Directory, name: str, model: nn.Module | None, state: Mapping[str, Tensor]
) -> CheckpointLayer:
    module = dict(model.named_modules()).get(name) if model is not None else None
    classes = [each.__name__ for each in type(module).__mro__] if module is not None else []
    scheme, parts, faults = _read(held, name, classes)
    shape = tuple(codes_of_parts(parts, scheme).shape) if parts else None
    largest = error = None
    if not faults and format_of(scheme.weights) is not None:
        values = values_of_parts(parts, scheme, held.scales.get(name))
        largest = float(values.abs().max())
        faults += _of_values(parts, values, scheme)
        if model is not None:
            weight = state.get(_in(name, "weight"))
            if weight is None or weight.shape != values.shape:
                has = "no such weight" if weight is None else f"one of shape {tuple(weight.shape)}"
                faults.append(f"its weight is of shape {shape}, and the model has {has}")
            else:
                error = _error(values, weight)
                faults += _against(parts, values, scheme, weight, state)
    strategy = scheme.weights["strategy"]
    return CheckpointLayer(name, scheme.layout, strategy, shape, largest, error, tuple(faults))


def _of_parts(parts: Mapping[str, StoredTensor], scheme: Scheme) -> Iterator[str]:
    """Yields tensors of a layer that are missing, doubled, or of the wrong dtype."""
    bits, layout = scheme.weights["num_bits"], scheme.layout
    floats = (torch.float32, torch.bfloat16, torch.float16)
    expected: dict[str, tuple[torch.dtype, ...]] = {"weight_scale": floats}
    if layout == "pack-quantized":
        expected |= {"weight_packed": (torch.int32,), "weight_shape": (torch.int64, torch.int32)}
    elif "pack" in layout:
        expected["weight_packed"] = (torch.uint8,)
    else:
        is_float = scheme.weights["type"] == "float"
        expected["weight"] = (torch.float8_e4m3fn if is_float else torch.int8,)
    if layout[:2] == "mx":
        expected["weight_scale"] = (torch.uint8,)
    if layout[:2] == "nv":
        expected |= {"weight_scale": (torch.float8_e4m3fn,), "weight_global_scale": floats}
    if not scheme.weights.get("symmetric", True):
        expected["weight_zero_point"] = (torch.int32, torch.int8)
    dynamic = (scheme.inputs or {}).get("dynamic", True)
    if dynamic is not True:
        expected["input_global_scale" if dynamic == "local" else "input_scale"] = floats
    for part in expected.keys() - parts.keys():
        yield f"{part} is missing"
    for part, tensor in parts.items():
        if part in expected and tensor.dtype not in expected[part]:
            wanted = " or ".join(map(long_name, expected[part]))
            yield f"{part} is {long_name(tensor.dtype)}, and {layout} of {bits} bits has {wanted}"
        elif part not in expected and part in _PARTS:
            yield f"{part} is there, and {layout} has none"


def _of_scales(parts: Mapping[str, Tensor], scheme: Scheme) -> Iterator[str]:
    """Yields shapes that do not fit, and scales that are not positive and finite."""
    shape = codes_of_parts(parts, scheme).shape
    weights, scale = scheme.weights, parts["weight_scale"]
    packed = parts.get("weight_packed")
    if len(shape) != 2:
        yield f"its weight has shape {tuple(shape)}, not rows and columns"
        return
    if "weight_shape" in parts and packed is not None:
        words = -(-int(parts["weight_shape"][1]) * weights["num_bits"] // 32)
        own = [int(parts["weight_shape"][0]), words]
        if own != [*packed.shape]:
            yield f"weight_packed is of shape {tuple(packed.shape)}, and weight_shape says {tuple(own)}"
    rows, columns = shape
    size = weights.get("group_size") or columns
    height, width = weights.get("block_structure") or (1, size)
    wanted = (-(-rows // height), -(-columns // width))
    if weights["strategy"] == "tensor":
        wanted = (1,)
    if tuple(scale.shape) != wanted and (wanted != (1,) or scale.numel() != 1):
        groups = scale.shape[-1] if scale.dim() == 2 and scale.shape[0] == rows else 0
        said = ""
        if groups and columns % groups == 0 and weights["strategy"] in {"group", "tensor_group"}:
            said = f": groups of {columns // groups}, where {CONFIG} says {size}"
        yield f"weight_scale is of shape {tuple(scale.shape)}, not {wanted}{said}"
    for part, tensor in parts.items():
        if part.endswith("scale"):
            if tensor.dtype is torch.uint8:
                is_bad = tensor == 255
            else:
                is_bad = ~(tensor.float().isfinite() & (tensor.float() > 0))
            if bool(is_bad.any()):
                yield f"{part} holds {int(is_bad.sum())} values that are zero, negative, infinite or NaN"
    if parts.get("weight", scale).dtype is torch.float8_e4m3fn and "weight" in parts:
        if not bool(parts["weight"].float().isfinite().all()):
            yield "weight holds NaN"


def _of_values(parts: Mapping[str, Tensor], values: Tensor, scheme: Scheme) -> Iterator[str]:
    """Yields what no scales by largest magnitudes give. Scales that are wrong by a moderate factor look like right ones."""
    longest = float(values.square().sum(1).max().sqrt())
    if not longest < _LONGEST_ROW:
        yield f"rows have norms of up to {longest:.3g}, as if its scales were reciprocals"
    weights, element = scheme.weights, element_of(scheme)
    if weights["strategy"] == "tensor" or not values.numel():
        return
    magnitudes = decode(codes_of_parts(parts, scheme), element).abs()
    rows, columns = magnitudes.shape
    height, width = weights.get("block_structure") or (1, weights.get("group_size") or columns)
    padded = nn.functional.pad(magnitudes, (0, -columns % width, 0, -rows % height))
    most = padded.unflatten(0, (-1, height)).unflatten(-1, (-1, width)).amax((1, 3))
    least = element.max * (0.85 if scheme.layout[:2] != "mx" else 0.25)
    low = (most > 0) & (most < least)
    if int(low.sum()) > _MOST_LOW * int((most > 0).sum()):
        yield (
            f"codes of {int(low.sum())} of {most.numel()} groups end below {least:g} of {element.max:g}, so their "
            "scales are not those of their largest magnitudes"
        )


def _error(values: Tensor, weight: Tensor) -> float:
    weight = weight.float().cpu()
    return float((values - weight).norm() / weight.norm().clamp(min=1e-30))


def _against(
    parts: Mapping[str, Tensor],
    values: Tensor,
    scheme: Scheme,
    weight: Tensor,
    state: Mapping[str, Tensor],
) -> Iterator[str]:
    """Yields how a weight differs from the model's, and a reason that would explain it."""
    error = _error(values, weight)
    if error < _MOST_ERROR:
        return
    said = f"differs from the model's weight by {error:.2g} of its norm"
    for part in ("weight_scale", "weight_global_scale"):
        if part in parts:
            scale = parts[part]
            inverse = 254 - scale if scale.dtype is torch.uint8 else (1 / scale.float()).to(scale.dtype)
            other = values_of_parts({**parts, part: inverse}, scheme)
            if _error(other, weight) < _MOST_ERROR:
                yield f"{said}: {part} is stored as its reciprocal"
                return
    for name, other in state.items():
        if other.shape == values.shape and _error(values, other) < _MOST_ERROR:
            yield f"{said}: it is {name}"
            return
    yield said


def _others(
    held: _Directory, layers: Sequence[str], model: nn.Module | None, state: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yields faults of tensors that are not quantized, and of layers that should be."""
    for group in held.groups:
        for target in group.targets:
            if not any(any(_matches(target, layer, ())) for layer in layers):
                yield f"{target}: {CONFIG} quantizes it, and it has no quantized tensors"
    own = {_in(layer, part) for layer in layers for part in (*_PARTS, *_SCALES_OF_INPUTS)}
    others = {name: each for name, each in held.tensors.items() if name not in own}
    for name, stored in others.items():
        tensor = stored.read()
        if not bool(tensor.float().isfinite().all()):
            yield f"{name}: holds infinities or NaN"
        if name in state:
            weight = state[name]
            if weight.shape != tensor.shape:
                yield f"{name}: of shape {tuple(tensor.shape)}, and the model's is {tuple(weight.shape)}"
            elif _error(tensor.float(), weight) > _MOST_ROUNDING:
                yield f"{name}: differs from the model's by {_error(tensor.float(), weight):.2g} of its norm"
        elif model is not None:
            yield f"{name}: not in the model"
    if model is not None:
        yield from _missing(held, layers, model)


def _missing(held: _Directory, layers: Sequence[str], model: nn.Module) -> Iterator[str]:
    """Yields the model's tensors that a checkpoint lacks; tied ones may be there once."""
    given = {_in(layer, "weight") for layer in layers} | held.tensors.keys()
    tensors = model.state_dict(keep_vars=True)
    held_once = {id(each) for name, each in tensors.items() if name in given}
    for name, tensor in tensors.items():
        if name not in given and id(tensor) not in held_once:
            yield f"{name}: missing"
    for name, module in model.named_modules():
        classes = [each.__name__ for each in type(module).__mro__]
        if isinstance(module, nn.Linear) and name not in layers and _in(name, "weight") in given:
            if held.scheme(name, classes) is not None and not held.is_ignored(name, classes):
                yield f"{name}: not quantized, and {CONFIG} does not ignore it"


# --- into a model --------------------------------------------------------------------------------


def load_frozen(directory: str | os.PathLike[str], model: nn.Module) -> None:
    """Loads a checkpoint that `Frozen.save` wrote into a model in float32.

    Under the conversion with which it was frozen, the model then computes what the frozen model did, bit for bit: the
    formats round its weights to the stored values.

    Args:
        directory: That of the checkpoint, which may also come from elsewhere.
        model: Its weights are overwritten. Tied ones may be stored once.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the model, which is then untouched.
        OptionError: There is no such directory.

    Example:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> with hmpx.convert(policy={"low": ["linear int8_row output=float32"]}, device_types={"cpu"}):
        ...     with hmpx.freeze(model, torch.ones(1, 4)) as frozen:
        ...         frozen.save("int8")
        >>> hmpx.load_frozen("int8", torch.nn.Linear(4, 2))
    """
    if not Path(directory).is_dir():
        raise OptionError(f"{os.fspath(directory)}: not a directory; give that of a checkpoint")
    held = _Directory(Path(directory))
    layers = _layers(held)
    state = model.state_dict(keep_vars=True)
    faults = [*held.faults, *_others(held, layers, None, {}), *_missing(held, layers, model)]
    new: dict[str, Tensor] = {}
    with torch.no_grad(), torch_state.without_casts():
        for layer in layers:
            scheme, parts, found = _read(held, layer)
            if not found and format_of(scheme.weights) is None:
                found = ["asymmetric, which hmpx has no format for"]
            faults += [f"{layer}: {fault}" for fault in found]
            if not found:
                new[_in(layer, "weight")] = _unrounded(parts, scheme, held.scales.get(layer))
        own = {_in(layer, part) for layer in layers for part in (*_PARTS, *_SCALES_OF_INPUTS)}
        new |= {name: each.read() for name, each in held.tensors.items() if name not in own}
        for name, tensor in new.items():
            has = state.get(name)
            if has is None:
                faults.append(f"{name}: not in the model")
            elif has.shape != tensor.shape:
                faults.append(f"{name}: of shape {tuple(tensor.shape)}, not {tuple(has.shape)}")
            elif torch.promote_types(has.dtype, tensor.dtype) != has.dtype:
                faults.append(f"{name}: {long_name(tensor.dtype)}, which {long_name(has.dtype)} can't hold")
        if faults:
            raise CheckpointError("; ".join(gathered(faults, len(faults))))
        for name, tensor in new.items():
            state[name].copy_(tensor)


def _unrounded(
    parts: Mapping[str, Tensor], scheme: Scheme, tensor_scale: float | None
) -> Tensor:
    """Returns a weight that rounds to the stored values.

    The largest magnitudes may have been rounded, and would give other scales, by a unit in the last place.
    """
    values, format = values_of_parts(parts, scheme, tensor_scale), format_of(scheme.weights)
    if not isinstance(format, Scaled) or not values.numel():
        return values
    amax = format.amax(values)
    if format.tensor_scale:
        scale = torch.tensor(tensor_scale or 1 / float(parts["weight_global_scale"]))
    else:
        scale = parts["weight_scale"].float().reshape(amax.shape)
    found = amax.clone()
    for away in (0.0, math.inf):
        near = amax
        for _ in range(3):
            is_wrong = format.scale(found) != scale
            near = near.nextafter(torch.full_like(near, away))
            found = torch.where(is_wrong & (format.scale(near) == scale), near, found)
    spread = [x.broadcast_to(values.shape) if x.dim() == 0 else _spread(x, values, scheme) for x in (amax, found)]
    return torch.where(values.abs() == spread[0], spread[1].copysign(values), values)


def _spread(scales: Tensor, like: Tensor, scheme: Scheme) -> Tensor:
    """Returns each scale at all places that share it."""
    size = scheme.weights.get("group_size") or like.shape[1]
    height, width = scheme.weights.get("block_structure") or (1, size)
    found = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return found[: like.shape[0], : like.shape[1]]
