"""``habana_frameworks.torch.hpu.graphs``: wrapping a model does nothing, captured graphs are replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .....torch_internals import TorchDispatchMode
from ....devices import device_type
from ...absent import absent, unknown


def wrap_in_hpu_graph(module: Any, *args: object, **kwargs: object) -> Any:
    """Returns ``module`` as it is."""
    return module


def wrap_in_hpu_graph_func(func: Any, *args: object, **kwargs: object) -> Any:
    """Returns ``func`` as it is."""
    return func


def make_graphed_callables(
    callables: Any, sample_args: Any, *args: object, **kwargs: object
) -> Any:
    """Returns ``callables`` as they are."""
    return callables


class ModuleCacher:
    """Leaves models as they are."""

    def __init__(self, max_graphs: int = 10) -> None:
        """Takes the number of graphs to keep."""
        self.max_graphs = max_graphs

    def __call__(self, model: Any, inplace: bool = False, *args: object, **kwargs: object) -> Any:
        """Returns ``model``."""
        return model


class CachedModule(torch.nn.Module):
    """A model, called as it is."""

    def __init__(self, module: torch.nn.Module, *args: object, **kwargs: object) -> None:
        """Takes the model."""
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.module(*args, **kwargs)


# --- capture and replay ------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the operators that are called, and the former contents of tensors they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: set[int] = set()
        self._kept: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._keep_written(func, args, kwargs)
        result = func(*args, **kwargs)
        given = {_memory(each) for each in _tensors((args, kwargs))}
        self._made |= {_memory(each) for each in _tensors(result)} - given
        self.calls.append((func, args, kwargs, result))
        return result

    def _keep_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies the tensors that the call will write to, unless an earlier call made them."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                memory = _memory(tensor)
                if memory not in self._made and memory not in self._kept:
                    self._kept.add(memory)
                    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                    self.before.append((whole, whole.clone()))


class _CpuGraph:
    """Operators on the CPU, recorded once and replayed on the same tensors."""

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None

    def capture_begin(self, *args: object, **kwargs: object) -> None:
        """Starts to record this thread's operators."""
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """Ends recording, and undoes what was written: only `replay` computes.

        Raises:
            RuntimeError: Nothing is being recorded.
        """
        recorder = self._recorded("capture_end")
        recorder.__exit__(None, None, None)
        with torch.no_grad():
            for tensor, value in recorder.before:
                tensor.copy_(value)
        recorder.before.clear()

    def replay(self, *args: object, **kwargs: object) -> None:
        """Runs the operators again; tensors made while they were recorded take the new values.

        Raises:
            RuntimeError: Nothing was recorded.
        """
        with torch.no_grad():
            for func, call_args, call_kwargs, made in self._recorded("replay").calls:
                result = func(*call_args, **call_kwargs)
                for old, new in zip(_tensors(made), _tensors(result), strict=True):
                    if _memory(old) != _memory(new):
                        old.copy_(new)

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._recorder = None

    def _recorded(self, name: str) -> _Recorder:
        if self._recorder is None:
            raise RuntimeError(f"HPUGraph.{name}() without a capture; call capture_begin() first")
        return self._recorder


def HPUGraph() -> Any:  # noqa: N802  # Habana's name
    """Returns a new graph: CUDA's, or one of the CPU's operators."""
    return torch.cuda.CUDAGraph() if device_type() == "cuda" else _CpuGraph()


@contextlib.contextmanager
def graph(hpu_graph: Any, stream: Any = None, *args: object, **kwargs: object) -> Iterator[None]:
    """Captures what is computed in a block."""
    if device_type() == "cuda":
        with torch.cuda.graph(hpu_graph, stream=stream):
            yield
        return
    hpu_graph.capture_begin()
    try:
        yield
    finally:
        hpu_graph.capture_end()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [t for each in value for t in _tensors(each)] if isinstance(value, (list, tuple)) else []


def __getattr__(name: str) -> Any:
    if name == "input_hash":
        return absent(__name__, name, "call the model itself")
    raise unknown(__name__, name)
