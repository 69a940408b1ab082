"""A pytest plugin that runs a suite under a conversion and notes what became of each test.

`peers.py` starts pytest with ``-p peers_plugin`` and these options:

--peers-run      plain: torch as it is; none: converted by a policy that casts nothing; default:
                 ``hmpx.convert()``; and what tells why a test failed there (see `peers.py`):
                 typeless: default, and comparisons are blind to dtypes; loose: they also allow for
                 the rounding of bf16; rounded: values are rounded to bf16, but tensors stay fp32;
                 fine: as rounded, but to one bit less than fp32 has
--peers-results  where the results go, as JSON
--peers-every    runs one test in so many, chosen by a checksum of its name
--peers-only     a JSON file with the names of the tests to run
--peers-seconds  a test that takes longer fails
"""

from __future__ import annotations

import contextlib
import doctest
import json
import random
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import hmpx

RUNS: Final = ("plain", "none", "default", "typeless", "loose", "rounded", "fine")

#: Relative to the larger of two compared numbers, and absolute: a few roundings to bf16 (2^-8).
LOOSE: Final = 0.05


#: Before each test; torchmetrics' own runs have it, too, and what its examples print rests on it.
SEED: Final = 42


#: While comparisons are lenient, ``torch.allclose`` asks `are_close`.
_ALLCLOSE: Final = torch.allclose


class TimedOutError(BaseException):
    """A test took longer than it may; no test catches this by ``except Exception``."""


@contextlib.contextmanager
def in_force(run: str) -> Iterator[None]:
    """Puts in force what a run is about."""
    with contextlib.ExitStack() as stack:
        if run == "none":
            stack.enter_context(hmpx.convert(policy=hmpx.Policy.from_ops()))
        if run in {"default", "typeless", "loose"}:
            stack.enter_context(hmpx.convert())
        if run in {"rounded", "fine"}:
            bits = 7 if run == "rounded" else 22
            name = f"peers_{run}"
            hmpx.formats.register(hmpx.formats.Float(name, exponent_bits=8, mantissa_bits=bits))
            stack.callback(hmpx.formats.unregister, name)
            stack.enter_context(hmpx.convert(low_precision_type=name))
        if run in {"typeless", "loose"}:
            stack.enter_context(lenient_comparisons(is_loose=run == "loose"))
        yield


class Peers:
    """The plugin's state: which tests run, and what became of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.run = config.getoption("--peers-run")
        self.results_path = Path(config.getoption("--peers-results"))
        self.every = config.getoption("--peers-every")
        self.seconds = config.getoption("--peers-seconds")
        only = config.getoption("--peers-only")
        self.only = frozenset(json.loads(Path(only).read_text("utf-8"))) if only else None
        self.results: dict[str, dict[str, Any]] = {}
        self.compares_dtypes = False

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves the chosen tests."""
        chosen = [item for item in items if self._is_chosen(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    def _is_chosen(self, name: str) -> bool:
        if self.only is not None:
            return name in self.only
        return zlib.crc32(name.encode()) % self.every == 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Seeds a test."""
        torch.manual_seed(SEED)
        np.random.seed(SEED)
        random.seed(SEED)
        self.compares_dtypes = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[Any]:
        """Stops a test after its time."""
        with time_limit(self.seconds):
            return (yield)

    def pytest_assertrepr_compare(self, left: object, right: object) -> None:
        """Notes that a failing assert compares dtypes."""
        if isinstance(left, torch.dtype) and isinstance(right, torch.dtype):
            self.compares_dtypes = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Iterator[pytest.TestReport]:
        """Notes the outcome of a test, of its worst phase."""
        report = yield
        before = self.results.get(item.nodeid)
        if before is None or (before["outcome"] == "passed" and report.outcome != "passed"):
            result: dict[str, Any] = {"outcome": report.outcome}
            if report.failed and call.excinfo is not None:
                result |= described(call.excinfo) | {"compares_dtypes": self.compares_dtypes}
            self.results[item.nodeid] = result
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes what could not be collected."""
        if report.failed:
            said = str(report.longrepr).strip().splitlines()[-1:]
            self.results[report.nodeid] = {"outcome": "not collected", "said": "".join(said)}

    def pytest_sessionfinish(self) -> None:
        """Saves the outcomes."""
        self.results_path.write_text(json.dumps(self.results, indent=1), encoding="utf-8")


def described(excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """Returns what is kept of a failure: its exception, where it came from and what it says."""
    error = excinfo.value
    said = str(error)
    failures = getattr(error, "failures", None)  # of a doctest, by pytest
    if failures:
        error = failures[0]
    if isinstance(error, doctest.UnexpectedException):
        error = error.exc_info[1]
        said = str(error)
    elif isinstance(error, doctest.DocTestFailure):
        want = " ".join(error.example.want.split())
        said = f"expected {want[:90]!r}, got {' '.join(error.got.split())[:90]!r}"
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return {
        "exception": type(error).__name__,
        "is_comparison": isinstance(
            error, AssertionError | doctest.DocTestFailure | pytest.fail.Exception
        ),
        "frames": frames[-4:],
        "said": " ".join(said.split())[:300],
    }


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises `TimedOutError` in the block after so many seconds; 0: never."""

    def stop(number: int, frame: object) -> None:
        raise TimedOutError(f"took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# --- more lenient comparisons ------------------------------------------------------------------


def are_close(a: object, b: object) -> bool:
    """Whether two arrays or numbers are equal but for dtypes and a few roundings to bf16."""
    with hmpx.disable_casts():
        left, right = (torch.as_tensor(x).detach().cpu() for x in (a, b))
        if not (left.is_floating_point() or right.is_floating_point()):
            return left.shape == right.shape and bool(torch.all(left == right))
        left, right = left.double(), right.double()
        finite = left[left.isfinite()].abs()
        scale = float(finite.amax()) if finite.numel() else 0.0
        return _ALLCLOSE(left, right, rtol=LOOSE, atol=LOOSE * scale, equal_nan=True)


_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\bnan\b|\binf\b")
_DTYPE: Final = re.compile(r",?\s*dtype=torch\.(?:bfloat16|float16|float32)")


def typeless(text: str) -> str:
    """Returns a printed result without its floating dtypes."""
    return _DTYPE.sub("", text)


def reads_the_same(want: str, got: str) -> bool:
    """Whether two printed results differ in dtypes and a few roundings to bf16 alone."""
    texts = [typeless(text) for text in (want, got)]
    if len({"".join(_NUMBER.sub("#", text).split()) for text in texts}) > 1:
        return False
    return are_close(*([float(number) for number in _NUMBER.findall(text)] for text in texts))


def _wide(value: Any) -> Any:
    """Returns low-precision tensors as fp32 ones, and everything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in {torch.bfloat16, torch.float16}:
        return value.float()
    if isinstance(value, list | tuple) and type(value) in {list, tuple}:
        return type(value)(map(_wide, value))
    return value


#: Where the functions stand that suites compare by, and which of them answer instead of raising.
_COMPARISONS: Final = (
    (torch, ("allclose", "equal", "isclose"), True),
    (torch.Tensor, ("allclose", "equal", "isclose"), True),
    (np, ("allclose", "array_equal"), True),
    (torch.testing, ("assert_close",), False),
    (
        np.testing,
        (
            "assert_allclose",
            "assert_almost_equal",
            "assert_array_almost_equal",
            "assert_array_equal",
        ),
        False,
    ),
)


@contextlib.contextmanager
def lenient_comparisons(*, is_loose: bool) -> Iterator[None]:
    """Has the usual functions for comparing floats ignore dtypes, and bf16's rounding if asked."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, names, answers in _COMPARISONS:
            for name in names:
                strict = getattr(owner, name)
                patch.setattr(owner, name, _lenient(strict, answers, is_loose))
        check_output = doctest.OutputChecker.check_output

        def check(self: Any, want: str, got: str, flags: int) -> bool:
            return check_output(self, typeless(want), typeless(got), flags) or (
                is_loose and reads_the_same(want, got)
            )

        patch.setattr(doctest.OutputChecker, "check_output", check)
        yield


def _lenient(strict: Callable[..., Any], answers: bool, is_loose: bool) -> Callable[..., Any]:
    """Returns a comparison that takes more for equal than ``strict`` does."""
    is_by_element = strict.__name__ == "isclose"

    def compare(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_wide, args))
        kwargs = {name: _wide(value) for name, value in kwargs.items()}
        pair = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)][:2]
        if is_loose and not is_by_element and _is_close_pair(pair):
            return True if answers else None
        return strict(*args, **kwargs)

    return compare


_OPERANDS: Final = (
    "input",
    "actual",
    "x",
    "a",
    "a1",
    "other",
    "expected",
    "desired",
    "y",
    "b",
    "a2",
)


def _is_close_pair(pair: list[Any]) -> bool:
    try:
        return are_close(*pair)
    except (TypeError, ValueError, RuntimeError):  # no arrays, or not of one shape
        return False


# --- pytest's entry ----------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that the module's docstring lists."""
    group = parser.getgroup("peers")
    group.addoption("--peers-run", choices=RUNS, default="plain")
    group.addoption("--peers-results", default="peers.json")
    group.addoption("--peers-every", type=int, default=1)
    group.addoption("--peers-only", default="")
    group.addoption("--peers-seconds", type=int, default=60)


def pytest_configure(config: pytest.Config) -> None:
    """Converts before the suite's modules are imported, as a script does at its top."""
    peers = Peers(config)
    config.pluginmanager.register(peers, "peers")
    stack = contextlib.ExitStack()
    stack.enter_context(in_force(peers.run))
    config.add_cleanup(stack.close)
