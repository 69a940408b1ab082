"""What errors say, on every version of Python."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable

import pytest

import hmpx
from hmpx.errors import noted, raised_here, suggestion


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


@pytest.mark.parametrize(
    ("call", "error", "builtins"),
    [
        (lambda: hmpx.convert(legalize="sometimes"), hmpx.OptionError, (ValueError, TypeError)),
        (lambda: hmpx.convert(nonsense=1), hmpx.OptionError, (ValueError, TypeError)),
        (
            lambda: hmpx.convert("no_such_list.txt"),
            hmpx.OpListError,
            (FileNotFoundError, ValueError),
        ),
        (lambda: hmpx.convert(policy="no.yaml"), hmpx.PolicyFileError, (OSError, ValueError)),
        (lambda: hmpx.convert(policy={"lo": ["mm"]}), hmpx.PolicyFileError, (ValueError,)),
        (lambda: hmpx.diff_runs("/", "/"), hmpx.OptionError, (IsADirectoryError,)),
        (
            lambda: hmpx.record().to_json("/no/such/directory/report.json"),
            hmpx.OptionError,
            (OSError,),
        ),
        (lambda: hmpx.freeze(3), hmpx.FreezeError, (TypeError,)),
    ],
)
def test_errors_are_those_of_python_too(
    call: Callable[[], object], error: type[Exception], builtins: tuple[type[Exception], ...]
) -> None:
    """Under their own name; a copy by pickle is of the same class."""
    for kind in (error, hmpx.HmpxError, *builtins):
        with pytest.raises(kind) as caught:
            call()
        found = caught.value
        assert type(found).__name__ == error.__name__
        copied = pickle.loads(pickle.dumps(found))
        assert (type(copied), str(copied)) == (type(found), str(found))
    assert not hmpx.is_converted()


def test_handlers_of_pythons_errors_pass_deliberate_ones() -> None:
    """Inside of hmpx."""

    def caught(error: Exception, *kinds: type[Exception]) -> bool:
        try:
            try:
                raise error
            except raised_here(*kinds):
                return True
        except hmpx.HmpxError:
            return False

    assert not caught(hmpx.OptionError("a"), ValueError, TypeError, OSError)
    assert caught(hmpx.OptionError("a"), ValueError, hmpx.HmpxError)
    assert caught(hmpx.OptionError("a"), Exception)
    assert caught(ValueError("a"), ValueError)
