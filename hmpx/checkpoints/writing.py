"""Writes a model's weights as a directory that servers load: safetensors, and a config.json that says how they are stored."""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import arguments, files, torch_state
from ..compute import Formats
from ..errors import (
    FreezeError,
    OptionError,
    gathered,
    printable,
    raised_here,
    shown,
    to_the_end,
    warn,
)
from ..files import make_directory, unfinished_folder, unwritable, write
from ..later import imported
from ..number_formats import Scaled
from .schemes import Scheme, parts_of_weight, scheme_of, values_of_parts

WEIGHTS: Final = "model.safetensors"
INDEX: Final = f"{WEIGHTS}.index.json"
CONFIG: Final = "config.json"

#: Units of sizes, as in Hugging Face's libraries.
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

#: Key of hmpx's own metadata in indices, and in the header of safetensors: layer -> the scale of its tensor, as
#: hexadecimal digits.
METADATA: Final = "hmpx"

#: Modules that servers know by their classes.
_KNOWN: Final = (nn.Linear, nn.Embedding)

_PARALLEL: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel)

_REMEDY: Final = "leave it in another type by a section, or exclude it, before hmpx.freeze"


def save(
    model: nn.Module,
    formats: Mapping[str, Formats],
    encoded: Mapping[str, tuple[Tensor, ...]],
    reasons: Mapping[str, str],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
) -> None:
    """Writes the weights of ``model``, those in ``formats`` quantized; an earlier checkpoint stays if that fails.

    ``encoded`` are the codes and scales that the model has already. ``reasons`` tell for each weight why it is
    stored as it is.

    Raises:
        FreezeError: compressed-tensors can't hold a tensor, or no linear layer has a number format.
        OptionError: The files can't be written, or safetensors is not installed.
    """
    given = arguments.path("directory", directory)
    if not given:
        raise OptionError("directory is empty; give the path of a directory")
    most = _size(max_shard_size)
    try:
        target = Path(os.path.realpath(given))
    except raised_here(ValueError) as error:
        raise unwritable(given, error) from error
    refused = imported("safetensors", "Frozen.save", "checkpoint").SafetensorError
    safetensors = imported("safetensors.torch", "Frozen.save", "checkpoint")
    modules = dict(model.named_modules(remove_duplicate=False))
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    with torch.no_grad(), torch_state.without_casts():
        state = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        _refuse_tensors(model, state)
        tensors, schemes, scales = _stored(
            state, {n: formats.get(inside(n, "weight")) for n in linear}, encoded
        )
    whole = {name: reasons.get(inside(name, "weight"), "") for name in linear}
    whole = {n: why for n, why in whole.items() if formats.get(inside(n, "weight")) is None}
    if not schemes:
        name, why = printable(type(model).__name__), [*dict.fromkeys(filter(None, whole.values()))]
        remedy = (
            "call model.float() before hmpx.convert"
            if why[:1] in (["is bf16"], ["is fp16"])
            else ("name one in a list: linear float8_e4m3fn_row output=bfloat16")
        )
        said = f": their weights are {', '.join(map(repr, why[:3]))}" if why else ""
        raise FreezeError(
            f"{name} has no linear layer that computes in a number format only{said}; {remedy}"
        )
    # Lists and sections leave layers out by intention: these are "used in ..." another type.
    odd = {
        name: why
        for name, why in whole.items()
        if not why.startswith("used in") and why.removeprefix("is ") not in reasons  # tied
    }
    # Servers have linear layers for these, too: routers, experts.
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, dims = name.rpartition(".")[0], state[name].shape
        is_of_torch = type(modules[path]).__module__.startswith("torch.nn.")
        if len(dims) < 2 or not path or is_of_torch or isinstance(modules[path], _KNOWN):
            continue
        whole.setdefault(path, "")
        if len(dims) > 2 and dims[0] > 1:
            odd[name] = f"experts in {len(dims)} dimensions"
            whole[f"re:{re.escape(path)}\\.\\d+\\..*"] = ""
    others = [n for n in formats if n not in odd and n.rpartition(".")[0] not in {*linear}]
    odd |= dict.fromkeys(others, "not of a linear layer")
    if odd:
        lines = [f"{name} ({why})" for name, why in odd.items()]
        warn(f"these weights are not stored as codes: {', '.join(gathered(lines, len(lines)))}")
    config = _config(model, schemes, whole)
    earlier = _earlier(target)
    make_directory(target.parent)
    # Inside the directory, if it is there: it may be a mount.
    inner = target / CONFIG if target.is_dir() else target
    if left := sorted(inner.parent.glob(".hmpx-*.part/")):
        warn(
            f"{printable(str(left[0]))} is of a write that was killed; delete it unless another one is running"
        )
    with unfinished_folder(inner) as folder:
        try:
            files_of = _sharded(tensors, most)
            for name, shard in files_of.items():
                metadata = {"format": "pt", METADATA: json.dumps(scales)}
                safetensors.save_file(shard, folder / name, metadata)
                scales = {}
            if len(files_of) > 1:
                total = sum(each.nbytes for each in tensors.values())
                placed = {n: name for name, shard in files_of.items() for n in shard}
                index = {"metadata": {"total_size": total, METADATA: 1}, "weight_map": placed}
                write(json.dumps(index, indent=2).encode(), folder / INDEX)
            write(json.dumps(config, indent=2, default=str).encode(), folder / CONFIG)
            for name in files_of:
                (folder / name).chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))
            names = [*files_of, *[INDEX] * (len(files_of) > 1), CONFIG]
            to_the_end(functools.partial(_put, folder, target, names, earlier))
        except raised_here(OSError, refused) as error:
            raise unwritable(target, error) from error


def _size(given: int | str) -> int:
    """Returns a number of bytes, which may be given like ``"5GB"``."""
    found = (
        re.fullmatch(r"\s*([0-9]{1,9})\s*([KMGT]B)\s*", given.upper())
        if isinstance(given, str)
        else None
    )
    size = int(found[1]) * _UNITS[found[2]] if found else given
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise OptionError(
            f"max_shard_size must be a number of bytes, or like '5GB', not {shown(given)}"
        )
    return size


def _sharded(tensors: Mapping[str, Tensor], most: int) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of each file by its name; a file is larger only if one tensor is."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {
        f"model-{i:05}-of-{len(shards):05}.safetensors": each for i, each in enumerate(shards, 1)
    }


def _refuse_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises FreezeError for tensors that the file can't hold, and for wrappers, which change names."""
    if isinstance(model, _PARALLEL) or hasattr(model, "_orig_mod"):
        inner = "module" if isinstance(model, _PARALLEL) else "_orig_mod"
        raise FreezeError(
            f"{type(model).__name__} changes the names of its model's weights; freeze model.{inner} instead"
        )
    for name, tensor in state.items():
        kind = "on the meta device" if tensor.is_meta else ""
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = f"of layout {tensor.layout}"
        elif tensor.is_quantized or tensor.dtype is torch.complex128:
            kind = str(tensor.dtype).removeprefix("torch.")
        if kind:
            raise FreezeError(f"{name!r} is {kind}, which safetensors can't hold")


def index_of(folder: Path) -> dict[str, Any]:
    """Returns the content of the index of a checkpoint in several files; one that lists nothing if it has none.

    Raises:
        CheckpointError: The index is damaged.
    """
    if not (folder / INDEX).exists():
        return {"metadata": {}, "weight_map": {}}
    text = files.read_text(folder / INDEX, files.CHECKPOINT)
    found = files.parsed(text, INDEX, files.CHECKPOINT)
    return found if isinstance(found, dict) else {}


def _earlier(target: Path) -> set[str]:
    """Returns the files of an earlier `save`; raises OptionError if a directory holds other weights."""
    if (target / CONFIG).is_dir():
        raise OptionError(f"{target / CONFIG} is a directory; give another directory")
    found = [*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json")]
    known = {each.name for each in found if _is_own(each)}
    names = {each.name for each in found}
    others = sorted(names - known)
    if (target / CONFIG).exists() and not known:
        others.append(CONFIG)
    if others:
        raise OptionError(
            f"{target} holds {others[0]}, which is not of an earlier Frozen.save; give another directory, or delete it"
        )
    return names


def _is_own(path: Path) -> bool:
    """Whether `save` wrote a file of weights, or an index of these."""
    try:
        if path.suffix == ".json":
            return METADATA in index_of(path.parent)["metadata"]
        with imported("safetensors", "Frozen.save", "checkpoint").safe_open(path, "pt") as file:
            return METADATA in (file.metadata() or {})
    except raised_here(Exception):  # damaged, so another's
        return False


def _put(folder: Path, target: Path, names: Sequence[str], earlier: set[str]) -> None:
    """Moves a folder's files into a directory, and removes those of an earlier checkpoint."""
    if folder.exists() and not target.exists():
        folder.rename(target)
        return
    for name in names:
        if (folder / name).exists():  # it may be repeated
            (folder / name).replace(target / name)
    for name in earlier.difference(names):
        if (target / name).exists():
            (target / name).replace(folder / name)  # which is removed


def inside(layer: str, name: str) -> str:
    """Returns the name of a layer's tensor."""
    return f"{layer}.{name}" if layer else name


def _stored(
    state: Mapping[str, Tensor],
    layers: Mapping[str, Formats | None],
    encoded: Mapping[str, tuple[Tensor, ...]],
) -> tuple[dict[str, Tensor], dict[str, Scheme], dict[str, str]]:
    """Returns the tensors to store, the schemes of layers, and the scales of whole tensors; tied ones are there once."""
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    scales: dict[str, str] = {}
    seen, storages = set(), set[int]()
    for layer, formats in layers.items():
        weight = state.get(inside(layer, "weight"))
        if formats is None or weight is None:
            continue
        scheme = _checked(layer, weight, formats)
        if _place(weight) in seen:
            continue
        schemes[layer] = scheme
        seen.add(_place(weight))
        known = encoded.get(inside(layer, "weight"))
        parts = parts_of_weight(weight, formats, scheme, known)
        if not bool(values_of_parts(parts, scheme).isfinite().all()):
            raise FreezeError(f"{inside(layer, 'weight')!r} holds infinities or NaN; {_REMEDY}")
        if isinstance(formats.weights, Scaled) and formats.weights.tensor_scale:
            scale = formats.weights.scale(formats.weights.amax(weight))
            scales[layer] = float(scale).hex()
        tensors |= {inside(layer, name): part for name, part in parts.items()}
    for name, tensor in state.items():
        if _place(tensor) not in seen:
            seen.add(_place(tensor))
            memory = tensor.untyped_storage()
            is_whole = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in storages
            storages.add(memory.data_ptr())
            kept = tensor.detach().cpu().contiguous()
            tensors[name] = kept if is_whole else kept.clone()
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
