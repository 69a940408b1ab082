"""Names of modules and files may hold escapes of terminals: no tool prints them as they are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
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


def watch() -> Iterator[str]:
    with hmpx.watch("collect") as watched:
        Model()(x() * 1000)
    yield str(watched.first)
    with pytest.raises(hmpx.HmpxError) as caught, hmpx.watch("raise"):
        Model()(x() * 1000)
    yield str(caught.value)
    with pytest.raises(ZeroDivisionError) as stopped, hmpx.watch("raise"):
        Model()(x() * 1000)
        raise ZeroDivisionError
    yield from stopped.value.__notes__


def freeze() -> Iterator[str]:
    model = Model().eval()
    with hmpx.freeze(model, x()) as frozen:
        yield frozen.summary()
        yield repr(frozen)
        for refused in (lambda: hmpx.freeze(model, x()), model.train):
            with pytest.raises(hmpx.HmpxError) as caught:
                refused()
            yield str(caught.value)


def explain() -> Iterator[str]:
    with hmpx.record() as rec:
        Model()(x())
    yield str(hmpx.explain("linear", record=rec))
    yield str(hmpx.explain("lin*", record=rec))


def tune() -> Iterator[str]:
    yield str(hmpx.tune(Model(), x(), by="module", tolerance=1e-9, progress=False))


def errors() -> Iterator[str]:
    for call in (
        lambda: hmpx.convert(bf16_file_path=f"missing{HOSTILE}"),
        lambda: hmpx.convert(lists=HOSTILE),
        lambda: hmpx.load_policy(f"missing{HOSTILE}.yaml"),
        lambda: hmpx.explain(HOSTILE),
        lambda: hmpx.plan(raising, x()),
    ):
        with pytest.raises(hmpx.HmpxError) as caught:
            call()
        yield str(caught.value)


def raising() -> nn.Module:
    raise hmpx.HmpxError(HOSTILE)


def unmatched() -> Iterator[str]:
    """Warnings."""
    policy = {
        "lists": "none",
        "low": ["linear"],
        "sections": [{"module": "other", "fp32": ["exp"]}],
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hmpx.convert(policy=policy, device_types={"cpu"}):
            Model()(x())
    yield from (str(each.message) for each in caught)


@pytest.mark.parametrize("texts", [watch, freeze, explain, tune, errors, unmatched])
def test_texts_of_tools_escape_names(
    texts: Callable[[], Iterator[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Line ends in names, too, where names stand in lines of their own."""
    with caplog.at_level(logging.INFO, "hmpx"), hmpx.convert(device_types={"cpu"}):
        found = [*texts(), *caplog.messages]
    assert found
    for text in found:
        assert text.replace("\n", "").isprintable(), ascii(text)


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
