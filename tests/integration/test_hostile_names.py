"""Names of modules and files may hold escapes of terminals: no tool prints them as they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

#: Clears a terminal's screen, sets its title, turns the direction of writing, begins a line.
HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e\r\nforged"


class Inner(nn.Linear):
    """A layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(super().forward(x) * 0 + x)


class Model(nn.Module):
    """A model whose module has such a name."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, Inner(4, 4))

    def forward(self, x: Tensor) -> Any:
        return getattr(self, HOSTILE)(x)


Model.__qualname__ = Model.__name__ = f"Model{HOSTILE}"


def x() -> Tensor:
    return torch.ones(2, 4)


@pytest.mark.parametrize("verbose", [True, "once"])
def test_lines_of_the_log_escape_names(
    verbose: bool | str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also line ends: one call, one line."""
    with (
        caplog.at_level(logging.INFO, "hmpx"),
        hmpx.convert(isVerbose=verbose, device_types={"cpu"}),
    ):
        Model()(x())
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)
