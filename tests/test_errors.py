"""What errors say, on every version of Python."""

from __future__ import annotations

import traceback

import pytest

from hmpx.errors import noted


class OldError(RuntimeError):
    """As errors are before Python 3.11: without notes."""

    @property
    def add_note(self) -> object:
        raise AttributeError("add_note")


@pytest.mark.parametrize("kind", [RuntimeError, OldError])
def test_a_note_is_shown_below_the_message(kind: type[RuntimeError]) -> None:
    """The error stays itself."""
    error = kind("it failed")
    assert noted(error, "do this") is error
    shown = "".join(traceback.format_exception_only(error))
    assert shown.endswith(f"{kind.__name__}: it failed\ndo this\n")
