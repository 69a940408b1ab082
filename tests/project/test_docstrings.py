"""Each function and class of the public menu has an example in its docstring, which does what it shows."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx import formats

#: Errors and warnings are met, not used: an example would be one of what raises them.
MENU: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (hmpx, formats)
    for name in module.__all__
    if inspect.isroutine(getattr(module, name))
    or (inspect.isclass(getattr(module, name)) and not issubclass(getattr(module, name), Exception))
}


def examples(name: str) -> doctest.DocTest:
    """Returns the examples in a docstring; they know ``hmpx`` and ``torch``."""
    names = {"hmpx": hmpx, "torch": torch}
    text = inspect.getdoc(MENU[name]) or ""
    return doctest.DocTestParser().get_doctest(text, names, name, None, None)


def test_each_entry_of_the_menu_has_an_example() -> None:
    """In a section of its own."""
    without = [
        name
        for name, entry in MENU.items()
        if "\nExample:\n    >>> " not in (inspect.getdoc(entry) or "")
    ]
    assert without == []
    assert len(MENU) > 30


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MENU)
@pytest.mark.usefixtures("has_low_precision")
def test_examples_show_what_happens(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is as it was afterwards."""
    monkeypatch.chdir(tmp_path)  # some write files
    run(name, capsys)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the examples of an entry."""
    before = (formats.names(), hmpx.casting.RULES.value)
    runner = doctest.DocTestRunner(verbose=False)
    failed, tried = runner.run(examples(name), clear_globs=False)
    assert tried
    assert not failed, capsys.readouterr().out
    assert not hmpx.is_converted()
    assert (formats.names(), hmpx.casting.RULES.value) == before
