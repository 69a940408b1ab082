"""Numbers that a low-precision dtype does not hold: every op that torch has, and each form of call."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx
from hmpx import ops
from hmpx.ops import schemas
from hmpx.ops.sites import Site
from tests.values import mapped, same, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOWEST = torch.finfo(FP32).min

#: Low-precision dtype -> numbers that float32 holds, and it does not.
NUMBERS: dict[torch.dtype, tuple[float, ...]] = {
    BF16: (LOWEST, -LOWEST),
    FP16: (-1e9, 1e9),
}
DTYPES = pytest.mark.parametrize("dtype", list(NUMBERS), ids=["bf16", "fp16"])


# --- the data, derived again from torch's schemas ------------------------------------------------

SECTIONS = ("stored_numbers", "factors")

#: Ops that refuse such a number as ``alpha`` and are left to torch: a wrapper would cost every sum.
LEFT_TO_TORCH = {"add", "iadd", "isub", "radd", "rsub", "sub"}

#: Ops that do not refuse such numbers, but make them infinite.
SILENT = {"nan_to_num", "setitem", "where"}

SHAPES = ((3, 3), (3,), (2, 3, 4), (1, 2, 4, 4))
INDICES = {"index", "indices", "mask", "target"}


def is_number(argument: Any) -> bool:
    return str(argument.type) in ("number", "float", "Optional[number]", "Optional[float]")


def made_up(argument: Any, shape: tuple[int, ...], op: str) -> Any:
    """Returns a value of an argument's type."""
    tensor = torch.rand(shape) * 0.5 + 0.25
    if argument.name in INDICES and op != "binary_cross_entropy":
        tensor = torch.zeros(shape, dtype=torch.long)
    if argument.name in {"mask", "condition"}:
        tensor = torch.arange(tensor.numel()).reshape(shape) % 2 == 0
    if (op, argument.name) in VALUES:
        return VALUES[op, argument.name]
    return {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "List[Tensor]": [tensor, tensor.clone()],
        "int": 0 if argument.name == "dim" else 1,
        "float": 0.5,
        "bool": True,
        "number": 0.5,
        "List[int]": [1, 1],
        "List[number]": [0.5, 0.5],
        "str": argument.default_value if argument.has_default_value() else "",
        "Optional[number]": 0.5,
        "Optional[float]": 0.5,
    }.get(str(argument.type))


#: Values that the shapes above don't suit.
VALUES = {
    ("_unsafe_masked_index", "indices"): [torch.tensor([0, 1, 2])],
    ("_unsafe_masked_index", "mask"): torch.tensor([True, False, True]),
    ("addbmm", "batch1"): torch.ones(1, 3, 3),
    ("addbmm", "batch2"): torch.ones(1, 3, 3),
    ("addmv", "mat"): torch.ones(3, 3),
    ("addr", "self"): torch.ones(3, 3),
    ("addr", "vec1"): torch.ones(3),
    ("addr", "vec2"): torch.ones(3),
    ("baddbmm", "self"): torch.ones(2, 3, 3),
    ("baddbmm", "batch1"): torch.ones(2, 3, 3),
    ("baddbmm", "batch2"): torch.ones(2, 3, 3),
    ("index_add", "index"): torch.tensor([0, 1, 2]),
    ("index_fill", "index"): torch.tensor([0]),
    ("scatter", "index"): torch.tensor([[0]]),
    ("pad_sequence", "sequences"): [torch.ones(3), torch.ones(2)],
    ("renorm", "self"): torch.ones(3, 3),
}


@dataclass(frozen=True)
class Trial:
    """A call of ``function`` with made-up arguments; numbers go to ``slots``."""

    site: Site
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[int | str, ...]

    def with_number(self, slot: int | str, number: Any) -> Trial:
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(slot, int):
            given = args[slot]
            args[slot] = [number] * len(given) if isinstance(given, list) else number
        else:
            kwargs[slot] = number
        return Trial(self.site, self.function, tuple(args), kwargs, self.slots)

    def run(
        self,
        dtype: torch.dtype,
        function: Callable[..., Any] | None = None,
        rounded: torch.dtype = FP32,
    ) -> Any:
        """Returns the result on copies in ``dtype``, or what is raised; the target of what returns None."""

        def copy(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            return tensor.to(rounded).to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = mapped((self.args, self.kwargs), copy)
        torch.manual_seed(0)
        try:
            result = (function or self.function)(*args, **kwargs)
        except Exception as error:
            return error
        return args[0] if result is None else result


@functools.cache
def trials(op: str) -> tuple[Trial, ...]:
    """Returns calls of the builtins of an op that hold numbers beside tensors, as its schemas allow."""
    return tuple(trial for site in ops.table()[op].sites for trial in trials_at(op, site))


def trials_at(op: str, site: Site) -> Iterator[Trial]:
    if site.is_property or site.is_python or site.namespace == "torch._VF":
        return
    for schema in schemas.schemas_named(schemas.aten_name(site)):
        arguments = [a for a in schema.arguments if not a.is_out]
        if site.namespace == "torch.Tensor":
            arguments.sort(key=lambda a: a.name != "self")
        holds = any(is_number(a) or str(a.type) == "List[number]" for a in arguments)
        if not holds or not any("Tensor" in str(a.type) for a in arguments):
            continue
        for shape in SHAPES:
            args: list[Any] = []
            kwargs, slots = {}, []
            for argument in arguments:
                value = made_up(argument, shape, op)
                is_slot = is_number(argument) or str(argument.type) == "List[number]"
                if not argument.kwarg_only:
                    slots += [len(args)] if is_slot else []
                    args.append(value)
                elif value is not None:
                    slots += [argument.name] if is_slot else []
                    kwargs[argument.name] = value
            kwargs.pop("reduce", None)
            if not any(tensor.is_floating_point() for tensor in tensors((args, kwargs))):
                continue
            trial = Trial(site, site.function(), tuple(args), kwargs, tuple(slots))
            outcomes = [trial.run(dtype) for dtype in (FP32, BF16, FP16)]
            if not any(isinstance(outcome, Exception) for outcome in outcomes):
                yield trial
                break


def refused(trial: Trial) -> Iterator[tuple[int | str, float, torch.dtype]]:
    """Yields the slots and numbers that torch refuses in a dtype, though not in float32."""
    for dtype, numbers in NUMBERS.items():
        for slot in trial.slots:
            for number in numbers:
                call = trial.with_number(slot, number)
                if isinstance(call.run(dtype), Exception) and not isinstance(
                    call.run(FP32), Exception
                ):
                    yield slot, number, dtype


def with_numbers() -> list[str]:
    """Returns the ops that a schema gives a number beside a tensor."""
    found = []
    for name, op in ops.table().items():
        arguments = [
            schema.arguments
            for site in op.sites
            if not (site.is_property or site.is_python)
            for schema in schemas.schemas_named(schemas.aten_name(site))
        ]
        if any(
            any(is_number(a) for a in each) and any("Tensor" in str(a.type) for a in each)
            for each in arguments
        ):
            found.append(name)
    return sorted(found)


#: Made-up arguments of these may end the process.
ENDS_THE_PROCESS = {"_fill_mem_eff_dropout_mask", "_philox_normal", "_philox_uniform"}


@pytest.mark.parametrize("op", sorted(set(with_numbers()) - ENDS_THE_PROCESS))
def test_every_op_that_refuses_a_number_is_in_the_data(op: str) -> None:
    """So this fails when torch gains one, and where the data names one that refuses none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = next((each for trial in trials(op) for each in refused(trial)), None)
    is_known = op in LEFT_TO_TORCH or (op in ops.converting() and op not in SILENT)
    assert (found is not None) == is_known, found


SLOTS = (
    0,
    1,
    2,
    3,
    *sorted({n for section in SECTIONS for names in ops.facts(section).values() for n in names}),
)
KNOWN = sorted({op for section in SECTIONS for op in ops.facts(section)})


def current(trial: Trial) -> Callable[..., Any]:
    """Returns what is in the slot of the trial's function now."""
    return getattr(trial.site.owner, trial.site.attribute)  # type: ignore[no-any-return]


@pytest.mark.native
@DTYPES
@pytest.mark.parametrize("op", sorted(set(KNOWN) - {"uniform", "setitem"}))
def test_each_call_that_torch_refuses_runs(op: str, dtype: torch.dtype) -> None:
    """A stored number counts as the largest of its dtype, which torch is given here; factors are fp32's."""
    largest, run = torch.finfo(dtype).max, 0
    made = trials(op)
    with hmpx.convert(low_precision_type=dtype):
        for trial, slot, number in itertools.product(made, SLOTS, NUMBERS[dtype]):
            numbers = ops.numbers(op, trial.site)
            assert numbers is not None
            if slot not in trial.slots or slot not in numbers.positions | numbers.names:
                continue
            call = trial.with_number(slot, number)
            expected = call.run(FP32, rounded=dtype)
            if isinstance(expected, Exception):
                continue
            if not numbers.are_factors:
                expected = trial.with_number(slot, math.copysign(largest, number)).run(dtype)
            result = call.run(dtype, current(trial))
            assert not isinstance(result, Exception), (trial.site, slot, number, result)
            for ours, theirs in zip(tensors(result), tensors(expected), strict=True):
                torch.testing.assert_close(ours, theirs.to(ours.dtype), equal_nan=True)
                run += 1
    assert run


@DTYPES
def test_numbers_drawn_from_a_range_that_the_dtype_does_not_hold(dtype: torch.dtype) -> None:
    highest = NUMBERS[dtype][1]
    with hmpx.convert():
        x = torch.zeros(1000, dtype=dtype)
        assert x.uniform_(0, highest) is x
    assert x.dtype is dtype and (x >= 0).all() and (x > 0).any()


# --- what counts as what -------------------------------------------------------------------------


def calls(number: Any) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Returns ways to put a number into x: [3] where mask: [3] is set, or all of it."""

    def assigned(x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = number
        return x

    return {
        "masked_fill": lambda x, mask: x.masked_fill(mask, number),
        "torch.masked_fill": lambda x, mask: torch.masked_fill(x, mask, number),
        "keyword": lambda x, mask: torch.masked_fill(x, value=number, mask=mask),
        "masked_fill_": lambda x, mask: x.clone().masked_fill_(mask, number),
        "where": lambda x, mask: torch.where(mask, number, x),
        "where's other": lambda x, mask: x.where(~mask, number),
        "setitem": assigned,
        "index_fill": lambda x, mask: x.index_fill(0, torch.tensor([0, 2]), number),
    }


MASK = torch.tensor([True, False, True])
EACH_CALL = pytest.mark.parametrize("name", list(calls(0)))


@DTYPES
@EACH_CALL
def test_finite_numbers_count_as_the_largest_and_others_stay(name: str, dtype: torch.dtype) -> None:
    """With their sign; infinities, NaN and what the dtype holds are what they are."""
    x, largest = torch.ones(3, dtype=dtype), torch.finfo(dtype).max
    stored = {number: math.copysign(largest, number) for number in NUMBERS[dtype]}
    for number in (-65504.0, 7, True, largest, 0, math.inf, -math.inf, math.nan):
        stored[number] = number
    expected = [calls(number)[name](x, MASK) for number in stored.values()]
    with hmpx.convert():
        actual = [calls(number)[name](x, MASK) for number in stored]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert {each.dtype for each in actual} == {dtype}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_a_number_that_float32_does_not_hold_is_refused_as_by_torch(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    with hmpx.convert(), pytest.raises(RuntimeError, match="without overflow"):
        x.masked_fill(MASK, 1e39)


@DTYPES
@pytest.mark.parametrize("name", sorted(set(calls(0)) - {"setitem"}))
def test_tensors_without_dimensions_count_as_numbers(name: str, dtype: torch.dtype) -> None:
    """Of masked assignment, they are cast before, as any tensor is."""
    x, largest = torch.ones(3, dtype=dtype), torch.finfo(dtype).max
    with hmpx.convert():
        for given in (FP32, torch.float64):
            result = calls(torch.tensor(LOWEST, dtype=given))[name](x, MASK)
            same(result, calls(-largest)[name](x, MASK))
        result = calls(torch.tensor(-math.inf))[name](x, MASK)
        assert result[0] == -math.inf


@DTYPES
def test_the_dtype_that_a_call_names_decides(dtype: torch.dtype) -> None:
    number, lowest = NUMBERS[dtype][0], torch.finfo(dtype).min
    with hmpx.convert():
        assert torch.full_like(torch.ones(2, dtype=dtype), number, dtype=FP32)[0] == number
        assert torch.full_like(torch.ones(2), number, dtype=dtype)[0] == lowest
        assert torch.ones(2, dtype=dtype).new_full((2,), number, dtype=FP32)[0] == number
        assert torch.ones(2, dtype=dtype).new_full((2,), number)[0] == lowest
        assert torch.ones(2).new_full((2,), fill_value=number, dtype=dtype)[0] == lowest
        assert torch.full((2,), number, dtype=dtype)[0] == lowest
        assert torch.full(size=(2,), fill_value=number, dtype=dtype)[0] == lowest
        assert torch.full((2,), number)[0] == number
        with hmpx.disable_casts(), pytest.raises(RuntimeError, match="without overflow"):
            torch.full((2,), number, dtype=dtype)
        with torch.device("meta"):
            assert torch.full((2,), 1.0).is_meta
        assert pickle.loads(pickle.dumps(torch.full)) is torch.full
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.ones(2, dtype=dtype).new_full((2,), number)


# --- what it is for ------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", ["masked_fill", "masked_fill_", "where", "setitem"])
def test_a_softmax_whose_scores_are_all_masked_is_that_of_float32(
    name: str, dtype: torch.dtype
) -> None:
    scores = torch.tensor([0.5, 1.0, 2.0])
    call = calls(LOWEST)[name]
    everything = torch.ones(3, dtype=torch.bool)
    expected = torch.softmax(call(scores, everything), -1)
    with hmpx.convert():
        result = torch.softmax(call(scores.to(dtype), everything), -1)
    same(result, expected)


@DTYPES
@EACH_CALL
def test_gradients_are_those_of_float32(name: str, dtype: torch.dtype) -> None:
    call, weights = calls(NUMBERS[dtype][0])[name], torch.tensor([1.0, 2.0, 3.0])
    x = torch.ones(3, requires_grad=True)
    call(x, MASK).backward(weights)
    low = torch.ones(3, dtype=dtype, requires_grad=True)
    with hmpx.convert():
        call(low, MASK).backward(weights.to(dtype))
    same(low.grad, x.grad.to(dtype))


# --- what it composes with -----------------------------------------------------------------------


def several(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Returns x: [3] filled by several ops."""
    number = LOWEST
    return (
        *[call(x, mask) for call in calls(number).values()],
        x.clamp(min=number),
        F.pad(x, (1, 1), value=number),
        F.hardtanh(x, number, 0.0),
        torch.full_like(x, number),
        x.new_full((2,), number),
        torch.full((2,), number, dtype=x.dtype),
        x.masked_fill(mask, torch.tensor(number)),
    )


@DTYPES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.5, -1.0, 2.0], dtype=dtype)
    with hmpx.convert():
        expected = several(x, MASK)
        same(torch.compile(several, fullgraph=True, backend=backend)(x, MASK), expected)
    assert all(each.isfinite().all() for each in expected)


@DTYPES
def test_exported(dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            return several(x, mask)

    x = torch.tensor([0.5, -1.0, 2.0], dtype=dtype)
    with hmpx.convert():
        expected = several(x, MASK)
        program = torch.export.export(Model(), (x, MASK))
    same(program.module()(x, MASK), expected)


@DTYPES
def test_transforms_of_functions(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.5, -1.0, 2.0], [1.0, 2.0, 3.0]], dtype=dtype)

    def total(x: Tensor) -> Tensor:
        return x.masked_fill(MASK, LOWEST)[1] + torch.where(MASK, x, LOWEST)[0]

    with hmpx.convert():
        mapped_ = torch.vmap(lambda x: x.masked_fill(MASK, LOWEST))(x)
        same(mapped_, x.masked_fill(MASK, LOWEST))
        same(torch.func.grad(total)(x[0]), torch.tensor([1.0, 1.0, 0.0], dtype=dtype))


@DTYPES
def test_legalized(dtype: torch.dtype) -> None:
    x, w = torch.ones(3, 3), torch.eye(3)
    with hmpx.convert(low_precision_type=dtype, legalize="always"):
        filled = torch.mm(x, w).masked_fill(MASK, LOWEST)
        assert torch.softmax(filled, -1).isfinite().all()
    assert filled.dtype is dtype and filled[0, 0] == torch.finfo(dtype).min
