"""No `except` of hmpx swallows what a signal handler, or a mode of the program, raises in its ``try``."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.checking import lint_trace
from hmpx.compute import capabilities as capability
from hmpx.compute import missing_kernels
from hmpx.errors import passing_over, raised_here
from hmpx.planning import places
from hmpx.tracing import repeating, writing
from hmpx.watching import trials

PACKAGE = Path(hmpx.__file__).parent

#: Types with subclasses or causes that a handler does not expect: TimeoutError is an OSError.
WIDE = {"BaseException", "Exception", "RuntimeError", "OSError", "ArithmeticError", "LookupError"}

#: Wide handlers without `raised_here`, by file and function, and what becomes of each error.
KNOWN = {
    ("cli/entry.py", "main"): "hmpx's own errors and warnings alone",
    ("cli/lint.py", "_lint"): "the program ends; the error is printed",
    ("cli/functions.py", "run_on"): "the program ends; the error is printed",
    ("cli/run.py", "_run"): "the program ends; the error is printed",
    ("cli/run.py", "write"): "the program has ended; its exit status stays",
    ("cli/scripts.py", "show_uncaught"): "the program ends; the error is printed",
    ("compute/missing_kernels.py", "_tried"): "raised, unless `is_refusal`, which is stricter",
    ("errors.py", "to_the_end"): "raised at the end",
    ("forks.py", "run"): "raised in the thread that waits",
    ("patches/regions.py", "_complete"): "raised, unless `may_run_again`, which is stricter",
    ("planning/planning.py", "_called"): "raised, with a note",
    ("planning/planning.py", "_step"): "raised, with a note",
    ("tracing/repeating.py", "invariance"): "raised, with a note",
    ("torch_state/disabling.py", "_run_generator"): "raised in the generator",
    ("torch_state/disabling.py", "wrapper"): "raised in the generator",
}


def handlers() -> Iterator[tuple[str, str, int, ast.ExceptHandler]]:
    """Yields each handler: its file, its function and its line."""
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        stack: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text("utf-8")), "")]
        while stack:
            node, function = stack.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = node.name
            if isinstance(node, ast.ExceptHandler):
                yield file, function, node.lineno, node
            stack += [(child, function) for child in ast.iter_child_nodes(node)]


def is_wide(handler: ast.ExceptHandler) -> bool:
    """Whether it catches more than one exact error, and may not raise it again."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    kind = handler.type
    if isinstance(kind, ast.Call):
        return ast.unparse(kind.func) != "raised_here"
    is_named = isinstance(kind, ast.Name | ast.Attribute)
    return not is_named or ast.unparse(kind) in WIDE or ast.unparse(kind).startswith("_")


def test_every_wide_handler_lets_others_errors_pass() -> None:
    """By `raised_here`; or it is known to raise them."""
    wide = {(file, name): line for file, name, line, each in handlers() if is_wide(each)}
    new = [f"hmpx/{f}:{line} in {n}" for (f, n), line in wide.items() if (f, n) not in KNOWN]
    assert not new, f"write `except raised_here(...)` of hmpx.errors: {new}"
    assert KNOWN.keys() <= wide.keys()  # no entry is out of date


def test_nothing_is_suppressed_but_exact_errors() -> None:
    """`contextlib.suppress` of more is `passing_over`."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                kinds = [*map(ast.unparse, node.args)]
                is_exact = len(kinds) == 1 and kinds[0] not in WIDE
                assert is_exact, f"{path}:{node.lineno}: use passing_over of hmpx.errors"


# --- what raises ----------------------------------------------------------------------------------


class Refusing(TorchDispatchMode):
    """Raises the error of a bug in the program."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("raised by the program: bfloat16 has no such type")


def by_mode() -> None:
    """Raises it from a dispatch mode."""
    with Refusing():
        torch.ones(1)


def by_signal() -> None:
    """Raises it from a signal handler, in the main thread."""
    signal.raise_signal(signal.SIGUSR1)


def _handle(number: int, frame: types.FrameType | None) -> None:
    raise RuntimeError("raised by the program: bfloat16 has no such type")


class Handler:
    """A handler that is an object."""

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        """Raises."""
        _handle(number, frame)


#: Also one whose code seems to be torch's, as that of data loaders is.
HANDLERS: dict[str, Callable[[int, types.FrameType | None], None]] = {
    "function": _handle,
    "partial": functools.partial(_handle),
    "object": Handler(),
    "torch": types.FunctionType(
        _handle.__code__, {"__name__": "torch.x", "RuntimeError": RuntimeError}
    ),
}


@pytest.fixture(params=["mode", "signal"])
def interlope(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Returns a function that raises what others raise."""
    before = signal.signal(signal.SIGUSR1, HANDLERS["torch"])
    yield by_mode if request.param == "mode" else by_signal
    signal.signal(signal.SIGUSR1, before)


raised_by_others = functools.partial(pytest.raises, RuntimeError, match="raised by the program")


@pytest.mark.parametrize("name", HANDLERS)
def test_each_kind_of_signal_handler_is_recognized(name: str) -> None:
    """Wherever its code comes from."""
    before = signal.signal(signal.SIGUSR1, HANDLERS[name])
    try:
        with raised_by_others(), passing_over(RuntimeError):
            by_signal()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_errors_of_the_call_are_caught() -> None:
    """Of torch's kernels, of the program's functions, and of torch's kernels under a mode that passes calls on."""

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def fail() -> None:
        raise RuntimeError("the function's own")

    contexts: list[Any] = [contextlib.nullcontext(), Passing()]
    for context in contexts:
        for function in (fail, lambda: torch.ones(2) @ torch.ones(3)):
            with context, passing_over(RuntimeError):
                function()
    with pytest.raises(ValueError, match="another"), passing_over(RuntimeError):
        raise ValueError("another kind")
    try:
        raise RuntimeError
    except raised_here(RuntimeError, ValueError) as error:
        assert type(error) is RuntimeError


# --- where it is raised ---------------------------------------------------------------------------


def interloped(function: Callable[..., Any], interlope: Callable[[], None]) -> Callable[..., Any]:
    """Returns ``function`` as others interlope in its call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        interlope()
        return function(*args, **kwargs)

    return wrapper


def watched() -> None:
    """Has `watch` try remedies."""
    with (
        hmpx.convert(policy={"low": ["mm"]}, low_precision_type=torch.float16),
        hmpx.watch("collect"),
    ):
        torch.mm(torch.full((2, 2), 300.0), torch.full((2, 2), 300.0))


def linted() -> None:
    """Has `lint` repeat calls in float64."""
    with hmpx.lint():
        scores = torch.randn(64, 64).mul(30).bfloat16() @ torch.eye(64, dtype=torch.bfloat16)
        scores.float().softmax(-1)


def traced(folder: Path) -> None:
    """Has `trace` repeat calls with noise."""
    with hmpx.trace(folder / "a.hmpx"):
        torch.ones(64, 64) @ torch.ones(64, 64)


def repeated() -> None:
    """Has `invariance` repeat calls, and try remedies."""
    hmpx.invariance(nn.Linear(64, 64), torch.randn(4, 64))


def planned() -> None:
    """Has `plan` follow values."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * torch.arange(4).sum().item()

    hmpx.plan(Counts, lambda: torch.ones(2, 4))


@pytest.mark.parametrize(
    ("place", "use"),
    [
        ((trials, "outcome"), watched),
        ((lint_trace, "map_tensors"), linted),
        ((writing.Writer, "_factor"), traced),
        ((repeating._Repeats, "_repeated"), repeated),
        ((places._Values, "_real"), planned),
    ],
    ids=["watch", "lint", "trace", "invariance", "plan"],
)
def test_what_others_raise_amid_an_observers_repeats_reaches_the_program(
    place: tuple[Any, str],
    use: Callable[..., None],
    interlope: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whatever is repeated."""
    monkeypatch.setattr(*place, interloped(getattr(*place), interlope))
    with raised_by_others():
        use(*[tmp_path] if use is traced else [])


def test_what_others_raise_amid_the_measurement_of_speed_passes(
    interlope: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mode in its thread; a handler in the main thread, which waits."""
    main = threading.main_thread().ident
    assert main is not None

    calls = []

    def probe(x: Tensor) -> Tensor:
        calls.append(x)
        if interlope is by_mode:
            interlope()
        elif len(calls) == 1:
            signal.pthread_kill(main, signal.SIGUSR1)
        return x.exp()

    capability.forget()
    monkeypatch.setitem(capability._PROBES, "norm", (probe, ((2, 2),)))
    with raised_by_others():
        capability.capability("norm", "cpu", torch.bfloat16)
    monkeypatch.undo()
    assert capability.capability("norm", "cpu", torch.bfloat16).training  # measured now
    assert not caplog.records
    capability.forget()


@pytest.mark.parametrize("interlope", ["signal"], indirect=True)
def test_what_a_handler_raises_waits_for_the_end_of_a_thread(
    monkeypatch: pytest.MonkeyPatch, interlope: Callable[[], None]
) -> None:
    """Wherever the main thread is when the signal arrives: otherwise the thread measures amid what follows."""
    main = threading.main_thread().ident
    assert main is not None
    signalled: list[int] = []
    ended: list[int] = []

    def probe(x: Tensor) -> Tensor:
        if number not in signalled:
            signalled.append(number)
            time.sleep(number % 10 * 0.01)
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.01)
            ended.append(number)
        return x

    monkeypatch.setitem(capability._PROBES, "norm", (probe, ((2, 2),)))
    for number in range(40):
        capability.forget()
        with raised_by_others():
            capability.capability("norm", "cpu", torch.bfloat16)
        assert ended[-1:] == [number]
    capability.forget()


def test_what_others_raise_amid_a_call_that_may_be_tried_again_passes(
    interlope: Callable[[], None],
) -> None:
    """Even if it is about dtypes."""
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        interlope()
        return x

    callee = missing_kernels.Callee("exp", function, ("x",), frozenset(), False, False)
    x = torch.ones(2, dtype=torch.bfloat16)
    with raised_by_others():
        missing_kernels._tried(callee, (x,), {}, x, torch.bfloat16)
    assert calls == [torch.bfloat16]


# --- tools that run a model -----------------------------------------------------------------------


class Model(nn.Module):
    """A model in which others interlope at the call ``position``, forwards and backwards counted."""

    def __init__(self, interlope: Callable[[], None], position: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = itertools.count(1)  # which no tool restores
        self._interlope, self._position = interlope, position

    def _count(self, *_: Any) -> None:
        if next(self.calls) == self._position:
            self._interlope()

    def forward(self, x: Tensor) -> Tensor:
        """Computes a linear layer."""
        self._count()
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(self._count)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        return self


X = torch.linspace(-1, 1, 16).view(4, 4)

TOOLS: dict[str, Callable[[nn.Module], object]] = {
    "bench": lambda model: hmpx.bench(lambda: lambda: model(X).sum().backward(), runs=1, warmup=1),
    "compare": lambda model: hmpx.compare(model, X),
    "invariance": lambda model: hmpx.invariance(model, X),
    "plan": lambda model: hmpx.plan(model, X),
    "tune": lambda model: hmpx.tune(model, [(X,)] * 4, tolerance=0.5, progress=False),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_others_raise_amid_a_run_of_the_model_reaches_the_caller(
    tool: str, interlope: Callable[[], None]
) -> None:
    """In each of the first runs, forward or backward."""
    for position in range(1, 5):
        model = Model(interlope, position)
        try:
            TOOLS[tool](model)
        except RuntimeError as error:
            assert "raised by the program" in str(error)
            assert type(error) is RuntimeError
        else:
            assert next(model.calls) <= position  # it was not called so often
