"""What errors say, on every version of Python."""

from __future__ import annotations

import traceback

import pytest

from hmpx.errors import noted, suggestion


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


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("matmull", "matmul"),
        ("sofmax", "softmax"),
        ("laynorm", "layer_norm"),
        ("exp_", "exp"),
        ("tnah", "tanh"),
        ("nosuch", None),  # of six letters three are in "cosh", too
        ("frobnicate", None),
    ],
)
def test_what_is_suggested_is_near(name: str, nearest: str | None) -> None:
    """At most a third of the letters differ; two that are swapped count as one."""
    known = ["cosh", "exp", "layer_norm", "matmul", "softmax", "tanh", "bernoulli"]
    expected = "" if nearest is None else f"; did you mean {nearest!r}?"
    assert suggestion(name, known) == expected


def test_the_nearest_is_suggested_of_names_that_are_alike() -> None:
    """`difflib` takes ``"_softmax"`` for more like it."""
    assert suggestion("softmaxx", ["_softmax_", "softmax"]) == "; did you mean 'softmax'?"
