"""Writes a trace, line by line; `reading` says what the lines hold."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comparing import has_values
from ..errors import passing_over, raised_here, warn
from ..files import unwritable
from ..forks import new_lock
from ..observers import CallTensors, OpCall, spared
from ..ops import is_foreign
from ..tensors import long_name, map_tensors, node_of, tensors_in, version_of
from ..torch_internals import unseen
from ..torch_state import apart, named_tensors, without_casts
from ..version import __version__
from .reading import FORMAT, Header
from .sketches import FEW, Sketch, is_read_alone, low_contents, sketches, values_of

#: By so much the inputs of a call are moved, relatively, to see how much it amplifies rounding: that of bfloat16.
#: Half of the values by twice as much and half not at all: at random, and on average. Of tensors with fewer values
#: than `_FEW`, all by the same.
NOISE: Final = 2.0**-8
_FEW: Final = 16
#: The number of moves; they repeat in larger tensors.
_FACTORS: Final = 1 << 20

#: Lines that wait for the end of their step.
_MOST_LINES: Final = 1 << 12

#: Tensors with few values that wait to be read together.
_MOST_WAITING: Final = 64

#: Tensors of a step whose values are known by their digest.
_MOST_KNOWN: Final = 1 << 14


@dataclass(slots=True, eq=False)
class _Seen:
    """A tensor of the trace. Its values may be read later, with those of others; its number is that of its line."""

    shape: list[int]
    dtype: str
    name: str
    of: _Seen | None  # whose view it is
    is_copy: bool
    found: Sketch | None = None
    low: str = ""
    values: Tensor | None = None  # those that are to be read
    number: int = -1


class Writer:
    """Writes the lines of a trace.

    Attributes:
        calls: Number of calls written.
        is_open: Whether more is written; not after the end, or on a full disk.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._pid, self._lines = os.getpid(), list[tuple[str, Any]]()
        self._waiting = list[_Seen]()
        self._sites: dict[tuple[Any, ...], int] = {}
        self._ids: Any = WeakTensorKeyDictionary()  # tensor -> its version, and what is known of it
        self._contents: dict[tuple[Any, ...], int] = {}  # what was written of this step's tensors
        self._names: Any = WeakTensorKeyDictionary()
        self._tensors = self.calls = 0
        self.is_open = True
        self._lock = new_lock()  # threads, and autograd's
        self._write("trace", asdict(_header()))

    @spared
    def _write(self, kind: str, values: Any, *, flushes: bool = False) -> None:
        """Writes a line; a full disk ends the trace, not the program."""
        if not self.is_open or os.getpid() != self._pid:  # a fork has its parent's lines
            return
        self._lines.append((kind, values))
        if flushes or len(self._lines) >= _MOST_LINES:
            lines, self._lines = self._lines, []
            self._read(self._waiting)
            try:
                self._file.writelines([self._line(*each) for each in lines])
                self._file.flush()
            except raised_here(OSError) as error:
                self.is_open = False
                warn(f"{unwritable(self._file.name, error)}; the trace ends, the program goes on")

    def _line(self, kind: str, values: Any) -> str:
        """Returns a line; "" for a copy of a tensor that was written."""
        if kind == "tensor":
            values = self._numbered(values)
        return "" if values is None else _ENCODER.encode({kind: values}) + "\n"

    def _numbered(self, seen: _Seen) -> list[Any] | None:
        """Gives a tensor its number, and returns what is written about it; None if its values were written."""
        found = seen.found
        key = (*seen.shape, seen.dtype, found and found.digest)
        number = self._contents.get(key) if seen.is_copy and found else None
        if number is not None:
            seen.number = number
            return None
        seen.number, self._tensors = self._tensors, self._tensors + 1
        if len(self._contents) >= _MOST_KNOWN:  # a program without steps
            self._contents.clear()
        self._contents[key] = seen.number
        of = -1 if seen.of is None else seen.of.number
        return [seen.shape, seen.dtype, seen.low, of, seen.name, found.encoded() if found else ""]

    @unseen
    def _read(self, waiting: list[_Seen]) -> None:
        """Reads the values that wait, those of a kind at once."""
        by_kind = dict[Any, list[_Seen]]()
        for each in waiting:
            assert each.values is not None
            by_kind.setdefault((each.values.dtype, each.values.device), []).append(each)
        with apart():
            for alike in by_kind.values():
                _sketch([each for each in alike if each.found is None])
                narrow = [each for each in alike if each.values is not None]
                lows = low_contents([each.values for each in narrow if each.values is not None])
                for each, each.low in zip(narrow, lows, strict=True):
                    each.values = None
        waiting.clear()

    def end(self) -> None:
        """Writes the last line and closes the file; gradients that come later are not written."""
        self._write("end", self.calls, flushes=True)
        self.is_open = False
        with passing_over(OSError):  # the disk is still full
            self._file.close()

    def step(self, number: int) -> None:
        """Ends a step: all of it is in the file then."""
        self._write("step", number, flushes=True)
        self._contents.clear()

    def name(self, model: nn.Module) -> None:
        """Notes the names of a model's parameters and buffers."""
        for name, tensor in named_tensors(model):
            self._names[tensor] = name

    def call(self, call: OpCall, tensors: CallTensors) -> None:
        """Writes a call, its tensors, and its gradients when they come."""
        with self._lock:
            self._call(call, tensors)

    def _call(self, call: OpCall, tensors: CallTensors) -> None:
        given = tensors_in([*tensors.given, *tensors.given_kwargs.values()])
        results = tensors_in([tensors.result])
        is_copy = tensors.writes or tensors.in_graph
        inputs = [self._tensor(each, is_copy=is_copy) for each in given]
        outputs = [self._tensor(each, is_copy=tensors.in_graph) for each in results]
        site = (
            call.op,
            call.module,
            call.location,
            call.phase,
            call.cast_policy,
            call.reason,
            "" if call.dtype is None else long_name(call.dtype),
            _text(tensors.given, tensors.given_kwargs),
            tensors.in_graph,
        )
        if site not in self._sites:
            self._write("site", site)
            self._sites[site] = len(self._sites)
        gain = f"{self._gain(call.op, tensors, results, outputs):.2g}"
        self._write("call", [self._sites[site], inputs, outputs, float(gain)])
        self._follow_gradients(self.calls, results)
        self.calls += 1

    def _follow_gradients(self, call: int, results: list[Tensor]) -> None:
        note = functools.partial(self._note_gradients, call)
        for node in {node_of(each) for each in results if each.requires_grad} - {None}:
            node.register_prehook(note)

    @spared
    @unseen
    def _note_gradients(self, call: int, gradients: tuple[Tensor | None, ...]) -> None:
        if torch.compiler.is_dynamo_compiling():  # a compiled backward
            return
        with self._lock, without_casts(), torch.no_grad():
            for number, each in enumerate(gradients):
                if each is not None and self.is_open:
                    self._write("gradient", [call, number, self._tensor(each)])

    @unseen
    def parameter_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Writes the gradient of a parameter, as the optimizer gets it."""
        with self._lock, without_casts(), torch.no_grad():
            name = self._names.get(parameter, "")
            self._write("parameter", [name, self._tensor(gradient, is_copy=True)])

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes the settings of an optimizer that steps."""
        with without_casts():
            groups = [
                {name: text for name, value in group.items() if (text := _plain(_number(value)))}
                for group in optimizer.param_groups
            ]
        self._write("optimizer", [type(optimizer).__name__, groups])

    def _tensor(self, tensor: Tensor, *, is_copy: bool = False) -> _Seen:
        """Writes a tensor, unless its values were written, and returns what is known of it."""
        version, name = version_of(tensor), self._names.get(tensor, "")
        is_copy &= not name
        known = None if is_copy else self._ids.get(tensor)
        if known is not None and known[0] == version >= 0:
            return known[1]  # type: ignore[no-any-return]
        base = tensor._base if tensor._is_view() else None
        of = None if base is None else self._ids.get(base)
        if of is not None and of[0] != version:
            of = None  # the base was written to, perhaps through another view
        shape, dtype = [] if tensor.is_nested else [*tensor.shape], long_name(tensor.dtype)
        seen = _Seen(shape, dtype, name, None if of is None else of[1], is_copy)
        if has_values(tensor):
            seen.values = values = values_of(tensor)
            if is_read_alone(values):
                _sketch([seen])
            if seen.values is not None and len(values) > FEW:
                self._read([seen])
            elif seen.values is not None:
                seen.values = values.clone()
                self._waiting.append(seen)
                if len(self._waiting) >= _MOST_WAITING:
                    self._read(self._waiting)
        self._write("tensor", seen)
        if not is_copy:
            self._ids[tensor] = version, seen
            if base is not None and base not in self._ids and base.numel() == tensor.numel():
                self._ids[base] = version, seen  # of a result that torch returns as a view
        return seen

    def _gain(
        self, op: str, tensors: CallTensors, results: list[Tensor], outputs: list[_Seen]
    ) -> float:
        """Returns the relative change of the results by a relative change of the inputs; 0 if unknown."""
        if is_foreign(op):  # a function of the program's, with effects of its own
            return 0.0
        count = itertools.count()

        def moved(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() and has_values(tensor)):
                return tensor
            position = next(count)
            if tensor.numel() < _FEW:
                return tensor * (1 + NOISE * (1 + position / 2))
            return tensor * self._factor(tensor, position)

        kwargs = {name: map_tensors(value, moved) for name, value in tensors.given_kwargs.items()}
        try:
            again = tensors_in([tensors.run(*map_tensors(tensors.given, moved), **kwargs)])
        except raised_here(RuntimeError, ValueError, TypeError):
            return 0.0  # arguments that must keep their values: probabilities, indices
        change = norm = 0.0
        for old, new, seen in zip(results, again, outputs, strict=False):
            is_known = old.is_floating_point() and has_values(old) and has_values(new)
            if is_known and old.shape == new.shape:
                change = math.hypot(change, _norm(new.float() - old.float()))
                norm = math.hypot(norm, seen.found.norm if seen.found else _norm(old))
        return change / norm / NOISE if norm else 0.0

    def _factor(self, tensor: Tensor, position: int) -> Tensor:
        """Returns factors that move each value of the call's input number ``position``."""
        factors, first = _factors(tensor.device, tensor.dtype), 97 * position % _FACTORS
        if (count := first + tensor.numel()) > _FACTORS:
            factors = factors.repeat(-(-count // _FACTORS))
        return factors[first:count].view(tensor.shape)


def _sketch(alike: list[_Seen]) -> None:
    """Sketches values of one kind, and forgets those that no narrower dtype can hold."""
    found = sketches([each.values for each in alike if each.values is not None]) if alike else []
    for each, (sketch, is_wide) in zip(alike, found, strict=True):
        each.found = sketch
        if is_wide or "complex" in each.dtype:
            each.values = None


#: Writes numbers for tensors.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), default=lambda seen: seen.number)


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    moves = torch.randint(0, 2, (_FACTORS,), generator=generator) * 2
    return (1 + NOISE * moves.float()).to(device, dtype)  # exact in bfloat16


def _norm(values: Tensor) -> float:
    """Returns the L2 norm of the finite values."""
    found = float(torch.linalg.vector_norm(values.float()))
    if not math.isfinite(found):
        found = float(torch.linalg.vector_norm(values.double().nan_to_num(0.0, 0.0, 0.0)))
    return found


def _header() -> Header:
    """Returns the versions and the machine of a run."""
    has_cuda = torch.cuda.is_available()
    return Header(
        format=FORMAT,
        hmpx=__version__,
        program=sys.argv[0],
        torch=str(torch.__version__),
        machine=f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        device=torch.cuda.get_device_name() if has_cuda else "cpu",
        threads=torch.get_num_threads(),
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _text(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the arguments except tensors: ``"(16,), 1e-05"``."""
    found = [_plain(each) for each in args]
    found += [f"{name}={text}" for name, value in kwargs.items() if (text := _plain(value))]
    return ", ".join(filter(None, found))[:200]


def _number(value: Any) -> Any:
    """Returns the number of a tensor that holds one, such as the learning rate of a captured step."""
    is_number = isinstance(value, Tensor) and value.numel() == 1 and has_values(value)
    return value.item() if is_number else value


def _plain(value: Any) -> str:
    """Returns numbers, strings and tuples of them as text; ``""`` for other values."""
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        inner = [_plain(each) for each in value]
        return f"({', '.join(inner)})" if any(inner) else ""
    return ""
