"""Compares the tensors of two checkpoints: names, shapes, dtypes and contents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..comparing import contents, is_readable
from ..errors import OptionError, raised_here, said_by, short
from ..files import STATE, opened
from ..tensors import long_name


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the tensors of a file by name: ``.safetensors``, or a state dict of `torch.save`.

    Raises:
        OptionError: There is no such file, it holds no tensors, or safetensors is not installed.
    """
    plain = os.fspath(path)
    with opened(plain, STATE) as file:
        try:
            if plain.endswith(".safetensors"):
                from safetensors.torch import load_file

                return dict(load_file(plain))
            found = torch.load(file, map_location="cpu", weights_only=True)
        except raised_here(ImportError):
            raise OptionError(
                f"{short(plain)}: reading it needs safetensors; pip install safetensors"
            ) from None
        except raised_here(Exception) as error:  # of pickle, zip, safetensors or torch
            raise OptionError(f"{short(plain)}: not a state dict: {said_by(error)}") from error
    tensors = dict(_tensors_in("", found))
    if not tensors:
        raise OptionError(f"{short(plain)}: it holds no tensors")
    return tensors


def _tensors_in(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        several = [(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
        return [found for key, each in several for found in _tensors_in(key, each)]
    return []


def differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Returns a line for each tensor that is missing, new, or of another shape, dtype or precision."""
    lines = [f"{name}: missing afterwards" for name in before if name not in after]
    lines += [f"{name}: new" for name in after if name not in before]
    for name in before:
        if name in after:
            old, new = before[name], after[name]
            if old.shape != new.shape:
                lines.append(f"{name}: shape {tuple(old.shape)} became {tuple(new.shape)}")
            elif old.dtype != new.dtype:
                lines.append(f"{name}: {long_name(old.dtype)} became {long_name(new.dtype)}")
            elif is_readable(old) and is_readable(new):
                was, now = contents(old), contents(new)
                if was is not None and now is not None and was != now:
                    lines.append(
                        f"{name}: still {long_name(new.dtype)}, but its contents were {long_name(was)} "
                        f"and are {long_name(now)}"
                    )
    return lines
