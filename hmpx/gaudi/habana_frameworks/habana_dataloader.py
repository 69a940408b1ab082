"""Stands in for the package ``habana_dataloader``: torch's own data loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .absent import unknown


class HabanaDataLoader(DataLoader[Any]):
    """`torch.utils.data.DataLoader`, which Habana's falls back to where it can't use the device."""


def __getattr__(name: str) -> Any:
    raise unknown(__name__.rpartition(".")[2], name)
