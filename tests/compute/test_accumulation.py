"""Accumulate and output dtypes: every op, policy and dtype against the composition by hand, exactly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import ALLOW, DENY, FOLLOW, CastPolicy, Decision, OptionError, Policy, casting
from tests.values import normal

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW_DTYPES, ELIGIBLE = (BF16, FP16), (BF16, FP16, FP32)
DTypes = Sequence[torch.dtype]

KINDS = {"low": CastPolicy.LOW, "fp32": CastPolicy.FP32, "follow": CastPolicy.FOLLOW}
ACCUMULATE = (None, BF16, FP32, FP64)
OUTPUT = (None, BF16, FP16, FP32, FP64)


@pytest.fixture(autouse=True)
def rules_are_taken_back() -> Iterator[None]:
    """Takes back what a test has registered."""
    before = casting.all_rules()
    yield
    for rule in casting.all_rules():
        if rule not in before:
            hmpx.unregister_rule(rule.op, rule.function)


tensor = functools.partial(normal, drawn_in=FP64)


#: Op -> shapes of its floating inputs, and the call.
OPS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "sum": ([(5, 7)], lambda x: x.sum(1)),
    "mean": ([(5, 7)], lambda x: torch.mean(x, dim=0)),
    "nansum": ([(5, 7)], lambda x: torch.nansum(x, 1)),
    "prod": ([(5, 7)], lambda x: x.prod(1)),
    "cumsum": ([(5, 7)], lambda x: torch.cumsum(x, 1)),
    "cumprod": ([(5, 7)], lambda x: x.cumprod(0)),
    "log_softmax": ([(5, 7)], lambda x: torch.log_softmax(x, dim=-1)),
    "softmax": ([(5, 7)], lambda x: F.softmax(x, -1)),
    "avg_pool2d": ([(2, 3, 4, 4)], lambda x: F.avg_pool2d(x, 2)),
    "matmul": ([(2, 5, 7), (2, 7, 3)], lambda a, b: a @ b),
    "linear": ([(5, 7), (3, 7), (3,)], lambda x, w, b: F.linear(x, w, b)),
    "conv2d": ([(2, 3, 5, 5), (4, 3, 3, 3), (4,)], lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    "layer_norm": ([(5, 8), (8,), (8,)], lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    "cat": ([(2, 3), (2, 3)], lambda a, b: torch.cat([a, b], 1)),
    "add": ([(5, 7), (5, 7)], lambda a, b: a + b),
    "mul": ([(5, 7), (7,)], lambda a, b: torch.mul(a, other=b)),
    "addmm": ([(5, 3), (5, 7), (7, 3)], lambda c, a, b: torch.addmm(c, a, b)),
}  # fmt: skip

#: Dtypes of the inputs in turn.
INPUTS: list[tuple[torch.dtype, ...]] = [
    (FP32,), (BF16,), (FP16,), (BF16, FP32), (FP32, BF16), (FP16, BF16), (FP64,),
]  # fmt: skip

#: Norms: where a weight stays fp32 beside a low-precision input.
NORMS = {"layer_norm"}


def inputs_for(op: str, dtypes: DTypes) -> list[Tensor]:
    shapes = OPS[op][0]
    turns = itertools.cycle(dtypes)
    return [
        tensor(*shape, dtype=next(turns), seed=seed).requires_grad_()
        for seed, shape in enumerate(shapes)
    ]


def cast_to(kind: CastPolicy, given: DTypes, low_dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype that the policy brings inputs of these dtypes to; None to leave them."""
    if any(dtype not in ELIGIBLE for dtype in given):
        return None
    if kind is CastPolicy.LOW:
        return low_dtype
    if kind is CastPolicy.FOLLOW and given[0] in LOW_DTYPES and len(set(given)) == 1:
        return given[0]
    return FP32


def by_hand(  # noqa: PLR0917
    op: str,
    inputs: list[Tensor],
    kind: CastPolicy,
    accumulate: torch.dtype | None,
    output: torch.dtype | None,
    low_dtype: torch.dtype = BF16,
    call: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Returns what the decision promises, made of casts by the user's own hand."""
    call = call or OPS[op][1]
    dtype = cast_to(kind, [t.dtype for t in inputs], low_dtype)
    if dtype is None:
        return call(*inputs)
    stays = op in NORMS and dtype in LOW_DTYPES
    cast = [t if stays and i and t.dtype is FP32 else t.to(dtype) for i, t in enumerate(inputs)]
    if accumulate is not None and (accumulate, output or dtype) != (dtype, dtype):
        cast = [t.to(accumulate) for t in cast]
    return call(*cast).to(output or dtype)


def outcome(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor] | type:
    """Returns the output and the gradients of all inputs; the error's class if there is one."""
    try:
        return output_and_gradients(call, inputs)
    except RuntimeError:
        return RuntimeError


def output_and_gradients(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in inputs]
    result = call(*inputs)
    cotangent = tensor(*result.shape, dtype=result.dtype, seed=9)
    return [result, *torch.autograd.grad(result, inputs, cotangent)]


def same(actual: list[Tensor] | type, expected: list[Tensor] | type) -> bool:
    if isinstance(actual, type) or isinstance(expected, type):
        return actual is expected
    return all(
        a.dtype is e.dtype and a.shape == e.shape and torch.equal(a, e)
        for a, e in zip(actual, expected, strict=True)
    )


def name(dtype: torch.dtype | str | None) -> str:
    return str(dtype).removeprefix("torch.")


def line(op: str, accumulate: torch.dtype | None, output: torch.dtype | str | None) -> str:
    words = [op]
    words += [f"accumulate={name(accumulate)}"] if accumulate is not None else []
    words += [f"output={name(output)}"] if output is not None else []
    return " ".join(words)


def described(actual: list[Tensor] | type, expected: list[Tensor] | type) -> str:
    def show(each: list[Tensor] | type) -> Any:
        return each if isinstance(each, type) else [name(t.dtype) for t in each]

    return f"{show(actual)}, not {show(expected)}" if show(actual) != show(expected) else "values"


# --- the composition ----------------------------------------------------------------------------


@pytest.mark.parametrize("legalize", ["never", "auto"])
@pytest.mark.parametrize("accumulate", ACCUMULATE, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_casts_by_hand(
    kind: str, accumulate: torch.dtype | None, legalize: str
) -> None:
    """Every op, input and output dtype, bit for bit."""
    faults = []
    for output in OUTPUT:
        if accumulate is None and (output is None or legalize != "never"):
            continue  # nothing is composed, or what the machine finds slow is legalized
        expected = {
            (op, dtypes): outcome(
                lambda *t, op=op, o=output: by_hand(op, [*t], KINDS[kind], accumulate, o),
                inputs_for(op, dtypes),
            )
            for op in OPS
            for dtypes in INPUTS
        }
        policy = {"lists": "none", kind: [line(op, accumulate, output) for op in OPS]}
        with hmpx.convert(policy=policy, legalize=legalize):
            for (op, dtypes), wanted in expected.items():
                if wanted is RuntimeError and kind == "low":
                    continue  # it is retried in fp32
                actual = outcome(OPS[op][1], inputs_for(op, dtypes))
                if not same(actual, wanted):
                    what = f"{line(op, accumulate, output)} of {list(map(name, dtypes))}"
                    faults.append(f"{what}: {described(actual, wanted)}")
    assert not faults, "\n".join(faults)


def test_a_low_accumulate_dtype_rounds_inputs_of_the_fp32_list() -> None:
    """It is what the op computes in, where a low ``dtype=`` would be what the result is rounded to."""
    by_dtype = ["sum", "nansum", "prod", "softmax", "log_softmax"]
    for accumulate, output in itertools.product(LOW_DTYPES, OUTPUT):
        cast = functools.partial(
            by_hand, kind=CastPolicy.FP32, accumulate=accumulate, output=output
        )
        expected = {
            op: outcome(lambda x, op=op, cast=cast: cast(op, [x]), inputs_for(op, (FP32,)))
            for op in by_dtype
        }
        policy = {"lists": "none", "fp32": [line(op, accumulate, output) for op in by_dtype]}
        with hmpx.convert(policy=policy):
            for op in by_dtype:
                actual = outcome(OPS[op][1], inputs_for(op, (FP32,)))
                assert same(actual, expected[op]), f"{op} {described(actual, expected[op])}"


@pytest.mark.parametrize("output", OUTPUT[1:], ids=name)
@pytest.mark.parametrize("op", ["matmul", "linear", "conv2d", "cumsum"])
def test_an_output_dtype_comes_after_legalization(op: str, output: torch.dtype) -> None:
    """The op computes in fp32 and is rounded to the low type, as ever; that is then cast."""

    def legalized(*inputs: Tensor) -> Tensor:
        result = OPS[op][1](*[t.to(BF16).float() for t in inputs])
        return result.to(BF16).to(output)

    expected = outcome(legalized, inputs_for(op, (FP32,)))
    policy = {"lists": "none", "low": [line(op, None, output)]}
    with hmpx.convert(policy=policy, legalize="always"):
        actual = outcome(OPS[op][1], inputs_for(op, (FP32,)))
    assert same(actual, expected), described(actual, expected)


@pytest.mark.parametrize("legalize", ["never", "auto", "always", "fast"])
@pytest.mark.parametrize(("accumulate", "output"), [(FP32, None), (FP32, FP32), (FP64, BF16)])
def test_an_accumulate_dtype_is_no_matter_of_legalization(
    legalize: str, accumulate: torch.dtype, output: torch.dtype | None
) -> None:
    """Whatever the machine finds slow, and with rounded inputs even where others keep theirs."""
    op = "matmul"
    expected = outcome(
        lambda *t: by_hand(op, [*t], CastPolicy.LOW, accumulate, output), inputs_for(op, (FP32,))
    )
    policy = {"lists": "none", "low": [line(op, accumulate, output)]}
    with hmpx.convert(policy=policy, legalize=legalize):
        actual = outcome(OPS[op][1], inputs_for(op, (FP32,)))
    assert same(actual, expected), described(actual, expected)


COMBINATIONS = [(None, FP32), (FP32, None), (FP32, BF16), (FP64, FP16), (BF16, FP32)]


@pytest.mark.parametrize(("accumulate", "output"), [*COMBINATIONS, (None, "input")])
@pytest.mark.parametrize("kind", [*KINDS, "widest"])
def test_float64_without_dimensions_counts_as_a_number(
    kind: str, accumulate: torch.dtype | None, output: torch.dtype | str | None
) -> None:
    """What a line says holds beside it, too."""
    number = torch.tensor(1 / 3, dtype=FP64)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "mul": lambda x: x * number,
        "add": lambda x: torch.add(number, x),
    }
    policy = {"lists": "none", kind: [line(op, accumulate, output) for op in calls]}
    for given in ELIGIBLE:
        x = tensor(4, 4, dtype=given)
        dtype = given if kind == "widest" else cast_to(KINDS[kind], (given,), BF16)
        assert dtype is not None
        ends_in = given if output == "input" else output or dtype
        expected = [
            call(x.to(dtype).to(accumulate or dtype)).to(ends_in) for call in calls.values()
        ]
        with hmpx.convert(policy=policy, legalize="never"):
            actual = [call(x) for call in calls.values()]
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_dtype_of_the_input_is_that_of_the_first_argument_by_any_name() -> None:
    """``self`` in schemas is ``input`` in calls, or what numpy calls it."""
    low, wide = tensor(4, 4, dtype=BF16), tensor(4, 4)
    policy = {"lists": "none", "fp32": ["mm output=input", "mul accumulate=float64 output=input"]}
    with hmpx.convert(policy=policy):
        assert torch.mm(mat2=wide, input=low).dtype is BF16
        assert torch.mul(other=low, input=wide).dtype is FP32
        assert torch.mul(x2=wide, x1=low).dtype is BF16


@pytest.mark.parametrize(("accumulate", "output"), COMBINATIONS[:-1])
def test_widest_ends_in_the_widest_dtype_unless_told_otherwise(
    accumulate: torch.dtype | None, output: torch.dtype | None
) -> None:
    """Whether torch promotes the inputs by itself (add, cat) or the wrapper casts (cross)."""
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda a, b: a + b,
        "cat": lambda a, b: torch.cat([a, b]),
        "cross": lambda a, b: torch.cross(a, b, dim=-1),
    }
    policy = {"lists": "none", "widest": [line(op, accumulate, output) for op in calls]}
    for dtypes, widest in {
        (BF16, FP32): FP32,
        (FP32, BF16): FP32,
        (BF16, FP16): FP32,
        (BF16, BF16): BF16,
        (FP16, FP16): FP16,
    }.items():
        a, b = (tensor(4, 3, dtype=dtype, seed=i) for i, dtype in enumerate(dtypes))
        dtype = accumulate or widest
        expected = [c(a.to(dtype), b.to(dtype)).to(output or widest) for c in calls.values()]
        with hmpx.convert(policy=policy, legalize="never"):
            actual = [call(a, b) for call in calls.values()]
            scalar = torch.tensor(1.0) + tensor(3, dtype=BF16)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert scalar.dtype is (output or BF16)  # one of no dimensions does not widen


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16)])
def test_first_ends_in_the_dtype_of_the_first(dtypes: tuple[torch.dtype, ...]) -> None:
    """The dtype that the inputs were cast to."""
    a, b = (tensor(4, 4, dtype=dtype, seed=i) for i, dtype in enumerate(dtypes))
    expected = torch.mm(a.to(dtypes[0]).double(), b.to(dtypes[0]).double()).to(dtypes[0])
    with hmpx.convert(policy={"lists": "none", "first": ["mm accumulate=float64"]}):
        torch.testing.assert_close(torch.mm(a, b), expected, rtol=0, atol=0)


# --- where it is said ---------------------------------------------------------------------------

SAID = [
    ("sum", DENY, FP64, BF16),
    ("conv2d", ALLOW, FP32, FP32),
    ("matmul", FOLLOW, FP32, None),
    ("softmax", ALLOW, None, FP32),
]


@pytest.mark.parametrize(("op", "policy", "accumulate", "output"), SAID)
def test_lists_files_dicts_and_rules_say_the_same(
    tmp_path: Path,
    op: str,
    policy: CastPolicy,
    accumulate: torch.dtype | None,
    output: torch.dtype | None,
) -> None:
    """An op's suffixes, a policy file in YAML, a dict, a rule: one result."""
    kinds = {policy: kind for kind, policy in KINDS.items()}
    for dtypes in [(FP32,), (FP16, BF16)]:
        text = line(op, accumulate, output)
        kind = kinds[policy]
        file = tmp_path / f"{op}.yaml"
        file.write_text(f"lists: none\n{kind}:\n- {text}\n")
        sources: dict[str, Any] = {
            "dict": {"policy": {"lists": "none", kind: [text]}},
            "file": {"policy": file},
            "section": {"policy": {"lists": "none", "sections": [{"min_numel": 0, kind: [text]}]}},
            "policy": {
                "policy": Policy(
                    {op: Decision(policy, accumulate_dtype=accumulate, output_dtype=output)}
                )
            },
        }
        if policy is not FOLLOW:
            listed, empty = tmp_path / f"{op}.txt", tmp_path / "empty.txt"
            listed.write_text(f"{text}  # as told\n")
            empty.write_text("")
            paths = {"bf16_file_path": empty, "fp32_file_path": empty}
            name_ = "bf16_file_path" if policy is ALLOW else "fp32_file_path"
            sources["list"] = {**paths, name_: listed}
        expected = outcome(
            lambda *t: by_hand(op, [*t], policy, accumulate, output), inputs_for(op, dtypes)
        )
        for source, options in sources.items():
            with hmpx.convert(legalize="never", **options):
                actual = outcome(OPS[op][1], inputs_for(op, dtypes))
            assert same(actual, expected), f"{op} from a {source}: {described(actual, expected)}"
        hmpx.register_rule(
            op,
            lambda call: Decision(policy, accumulate_dtype=accumulate, output_dtype=output),
        )
        with hmpx.convert(policy={"lists": "none"}, legalize="never"):
            actual = outcome(OPS[op][1], inputs_for(op, dtypes))
        hmpx.unregister_rule(op)
        assert same(actual, expected), f"{op} from a rule: {described(actual, expected)}"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("low",), {}, "a decision's policy must be hmpx.ALLOW, FOLLOW or DENY, or another "
                       "hmpx.CastPolicy, not 'low'"),
        ((ALLOW, FP32), {}, "dtype of LOW must be torch.bfloat16 or torch.float16 "
                            "or an hmpx.formats format, not torch.float32"),
        ((DENY, BF16), {}, "dtype of FP32 must be torch.float32, not torch.bfloat16"),
        ((FOLLOW, FP32), {}, "dtype of FOLLOW must be left out, not torch.float32"),
        ((ALLOW,), {"accumulate_dtype": torch.int32}, "accumulate_dtype must be one of "
         "torch.bfloat16, torch.float16, torch.float32, torch.float64, not torch.int32"),
        ((DENY,), {"output_dtype": "float32"}, "output_dtype must be one of "
         "torch.bfloat16, torch.float16, torch.float32, torch.float64, not 'float32'"),
        ((CastPolicy.PASS,), {"output_dtype": FP32}, "an op of CastPolicy.PASS has no "
                                                     "accumulate_dtype or output_dtype"),
    ],
)  # fmt: skip
def test_a_decision_that_says_nonsense_is_an_error(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """When it is made, not when an op is called."""
    with pytest.raises(OptionError) as error:
        Decision(*arguments, **options)
    assert str(error.value) == message


def test_a_policy_settles_the_dtypes_that_its_decisions_leave_out() -> None:
    """ALLOW is the policy's low-precision type, DENY float32."""
    policy = Policy({"mm": Decision(ALLOW), "tan": Decision(DENY)}, FP16)
    assert (policy["mm"].dtype, policy["tan"].dtype) == (FP16, FP32)
    assert policy == Policy({"mm": Decision(ALLOW, FP16), "tan": Decision(DENY, FP32)}, FP16)
    with hmpx.convert(policy=policy):
        assert torch.mm(tensor(4, 4), tensor(4, 4)).dtype is FP16
        assert torch.tan(tensor(4, dtype=BF16)).dtype is FP32


# --- what is not touched ------------------------------------------------------------------------


#: Ops that take ``dtype=``, and ways to give it.
DTYPE_CALLS: list[tuple[str, Callable[[Tensor, torch.dtype], Tensor]]] = [
    ("sum", lambda x, dtype: x.sum(1, dtype=dtype)),
    ("nansum", lambda x, dtype: torch.nansum(dtype=dtype, input=x)),
    ("prod", lambda x, dtype: torch.prod(x, 0, True, dtype=dtype)),
    ("mean", lambda x, dtype: torch.mean(x, dtype=dtype)),
    ("cumsum", lambda x, dtype: torch.cumsum(input=x, dim=0, dtype=dtype)),
    ("cumprod", lambda x, dtype: x.cumprod(1, dtype=dtype)),
    ("softmax", lambda x, dtype: torch.softmax(x, -1, dtype)),
    ("softmax", lambda x, dtype: F.softmax(x, -1, 3, dtype)),
    ("softmax", lambda x, dtype: torch.special.softmax(x, dim=0, dtype=dtype)),
    ("log_softmax", lambda x, dtype: x.log_softmax(dim=1, dtype=dtype)),
    ("log_softmax", lambda x, dtype: F.log_softmax(dtype=dtype, dim=0, input=x)),
    ("softmin", lambda x, dtype: F.softmin(x, 1, dtype=dtype)),
]


@pytest.mark.filterwarnings("ignore:.*has no effect. it has only one input:hmpx.HmpxWarning")
@pytest.mark.parametrize(("accumulate", "output"), [*COMBINATIONS, (None, "input"), (None, None)])
@pytest.mark.parametrize("kind", [*KINDS, "widest", "first"])
def test_a_call_that_names_its_own_dtype_is_bit_for_bit_what_its_list_makes_of_it(
    kind: str, accumulate: torch.dtype | None, output: torch.dtype | str | None
) -> None:
    """Its line's accumulate and output dtypes are not; of the fp32 list a low dtype is rounded to last."""
    rounds_last = {"sum", "nansum", "prod", "softmax", "log_softmax", "softmin"}

    def cast(x: Tensor, op: str, call: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        if kind in KINDS:
            x = x.to(cast_to(KINDS[kind], (x.dtype,), BF16))
        if kind == "fp32" and dtype in LOW_DTYPES and op in rounds_last:
            return call(x, FP32).to(dtype)
        return call(x, dtype)

    policy = {"lists": "none", kind: [line(op, accumulate, output) for op in dict(DTYPE_CALLS)]}
    cases = list(itertools.product(DTYPE_CALLS, ELIGIBLE, (BF16, FP16, FP32, FP64)))
    expected = [
        outcome(lambda x, o=op, c=call, d=dtype: cast(x, o, c, d), [tensor(5, 7, dtype=given)])
        for (op, call), given, dtype in cases
    ]
    with hmpx.convert(policy=policy, legalize="always"):
        for ((op, call), given, dtype), wanted in zip(cases, expected, strict=True):
            actual = outcome(lambda x, c=call, d=dtype: c(x, d), [tensor(5, 7, dtype=given)])
            assert same(actual, wanted), (op, name(given), name(dtype), described(actual, wanted))


@pytest.mark.parametrize("kind", ["low", "fp32", "follow", "widest"])
def test_in_place_and_out_are_untouched(kind: str) -> None:
    """The target keeps its dtype and storage, and holds what plain torch writes there."""
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add_": lambda a, b: a.add_(b),
        "+=": lambda a, b: a.__iadd__(b),
        "out=": lambda a, b: torch.add(b, b, out=a),
        "addmm_": lambda a, b: a.addmm_(b, b),
        "relu inplace": lambda a, b: F.relu(a, inplace=True),
        "relu_": lambda a, b: a.relu_(),
    }
    options = "accumulate=float64 output=float16"
    policy = {"lists": "none", kind: [f"{op} {options}" for op in ("add", "addmm", "relu")]}
    for dtype in (FP32, BF16, FP64):
        for spelling, call in calls.items():
            a, b = tensor(4, 4, dtype=dtype), tensor(4, 4, dtype=dtype, seed=1)
            expected = call(a.clone(), b)
            storage = a.data_ptr()
            with hmpx.convert(policy=policy):
                result = call(a, b)
            assert result is a, spelling
            assert a.data_ptr() == storage, spelling
            torch.testing.assert_close(a, expected, rtol=0, atol=0, msg=spelling)


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_integers_complex_numbers_and_other_devices_are_untouched() -> None:
    """A call without an input to cast has no output to cast."""
    policy = {"lists": "none", "low": ["mul accumulate=float32 output=float16"]}
    with hmpx.convert(policy=policy):
        assert (torch.arange(3) * 2).dtype is torch.int64
        assert (torch.arange(3) * 2.0).dtype is FP32
        assert (tensor(3).to(torch.complex64) * 2).dtype is torch.complex64
        assert (tensor(3, dtype=FP64) * tensor(3)).dtype is FP64
        assert (tensor(3) * torch.arange(3)).dtype is FP16
        assert (torch.empty(3, device="meta") * 2).dtype is FP32
    with hmpx.convert(policy=policy, device_types={"cuda"}):
        assert (tensor(3) * 2).dtype is FP32


def test_only_floating_outputs_are_cast_and_their_tuple_keeps_its_class() -> None:
    """Indices stay; ``torch.max`` and ``topk`` return torch's own named tuples."""
    ops = ["max", "topk", "max_pool2d", "var_mean"]
    policy = {"lists": "none", "low": [f"{op} accumulate=float32 output=float16" for op in ops]}
    x = tensor(4, 6)
    low = x.bfloat16().float()
    expected = [torch.max(low, 1), torch.topk(low, 2)]
    with hmpx.convert(policy=policy):
        actual = [torch.max(x, 1), torch.topk(x, 2)]
        pooled, indices = F.max_pool2d(x[None], 2, return_indices=True)
        moments = torch.var_mean(x)
    for one, other in zip(actual, expected, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.values, other.values.half())
        assert torch.equal(one.indices, other.indices)
    assert (pooled.dtype, indices.dtype) == (FP16, torch.int64)
    assert [m.dtype for m in moments] == [FP16, FP16]


@pytest.mark.parametrize("buffer_dtype", [FP32, BF16])
@pytest.mark.parametrize("options", ["accumulate=float32", "accumulate=float64",
                                     "accumulate=float64 output=float32", "output=float32",
                                     "accumulate=bfloat16 output=float32"])  # fmt: skip
def test_running_statistics_are_written_as_ever(buffer_dtype: torch.dtype, options: str) -> None:
    """Batch norm's buffers keep their dtype, and take the batch's statistics."""
    x = tensor(64, 3) + 5
    stay = {"track_running_stats": True, "dtype": buffer_dtype}
    norm, plain = nn.BatchNorm1d(3, **stay), nn.BatchNorm1d(3)
    plain(x.bfloat16().float())
    policy = {"lists": "none", "low": [f"batch_norm {options}"]}
    mean = norm.running_mean
    with hmpx.convert(policy=policy):
        norm(x)
        keywords = torch.zeros(3, dtype=buffer_dtype)
        F.batch_norm(x, running_mean=keywords, running_var=torch.ones(3, dtype=buffer_dtype),
                     training=True)  # fmt: skip
    assert norm.running_mean is mean
    for actual in (norm.running_mean, keywords):
        assert actual.dtype is buffer_dtype
        # One rounding to bfloat16, of the input or of the statistics: 2**-8.
        torch.testing.assert_close(actual.float(), plain.running_mean, rtol=2**-7, atol=0)


def test_an_op_without_a_low_kernel_ends_in_its_output_dtype() -> None:
    """It runs in fp32, is rounded, and that is cast."""
    x = tensor(3, 3) + 3 * torch.eye(3)
    expected = torch.linalg.inv(x.bfloat16().float()).bfloat16()
    for verbose in (False, "once"):
        policy = {"lists": "none", "low": ["linalg_inv output=float64"]}
        with hmpx.convert(policy=policy, isVerbose=verbose):
            actual = torch.linalg.inv(x)
        torch.testing.assert_close(actual, expected.double(), rtol=0, atol=0)


# --- what autograd keeps ------------------------------------------------------------------------


def test_products_keep_their_inputs_in_low_precision() -> None:
    """The raised copies are made again in the backward pass."""
    kept: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    x, weight = tensor(32, 16).requires_grad_(), nn.Parameter(tensor(8, 16))
    policy = {"lists": "none", "low": ["linear accumulate=float32 output=float32"]}
    with (
        hmpx.convert(policy=policy),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each),
    ):
        result = F.linear(x.bfloat16(), weight)
    assert result.dtype is FP32
    # Of the parameter, which is alive anyway, nothing else is kept.
    assert {(each.dtype, each.data_ptr() == weight.data_ptr()) for each in kept} == {
        (BF16, False),
        (FP32, True),
    }
    result.sum().backward()
    low = weight.detach().bfloat16().float()
    expected = (torch.ones(32, 8) @ low).bfloat16().float()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


# --- what composes ------------------------------------------------------------------------------

COMPOSED = {
    "lists": "none",
    "low": ["matmul accumulate=float32 output=float32", "sum accumulate=float32"],
}


def computes(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).sum(1)


def computes_by_hand(a: Tensor, b: Tensor) -> Tensor:
    product = a.bfloat16().float() @ b.bfloat16().float()
    return product.bfloat16().float().sum(1).bfloat16()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by inductor's import
@pytest.mark.parametrize("keeps_casts", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_under_torch_compile(backend: str, keeps_casts: bool) -> None:
    """One graph, with the dtypes of eager, and its values where these are exact in any order."""
    torch._dynamo.reset()
    # Integers below 2**8: products and sums are exact in fp32, and so is each rounding defined.
    whole = [tensor(6, 6, seed=i).mul(4).round().requires_grad_() for i in range(2)]
    expected = output_and_gradients(computes_by_hand, whole)
    setting = torch._inductor.config.patch(emulate_precision_casts=keeps_casts)
    with setting, hmpx.convert(policy=COMPOSED):
        compiled = torch.compile(computes, backend=backend, fullgraph=True)
        actual = output_and_gradients(compiled, whole)
    assert same(actual, expected), described(actual, expected)


def test_under_vmap_grad_and_checkpoint() -> None:
    """The function transforms and recomputation give what they give on casts by hand."""
    a, b = tensor(3, 4, 4), tensor(3, 4, 4, seed=1)

    def loss(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: function(a, b).double().sum()

    def results(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        grad = torch.func.grad(loss(function), argnums=(0, 1))
        again = [a.detach().requires_grad_(), b.detach().requires_grad_()]
        checkpoint(loss(function), *again, use_reentrant=False).backward()
        return [
            torch.func.vmap(lambda a, b: function(a, b))(a, b),
            *grad(a[0], b[0]),
            *torch.func.vmap(grad)(a, b),
            *[t.grad for t in again],
        ]

    a3, b3 = a, b
    expected = [computes_by_hand(x, y) for x, y in zip(a3, b3, strict=True)]
    by_casts = results(lambda a, b: _by_hand_3d(a, b))
    with hmpx.convert(policy=COMPOSED):
        actual = results(lambda a, b: (a @ b).sum(-1))
        plain = [computes(x, y) for x, y in zip(a3, b3, strict=True)]
    for one, other in zip([*actual, *plain], [*by_casts, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _by_hand_3d(a: Tensor, b: Tensor) -> Tensor:
    product = a.bfloat16().float() @ b.bfloat16().float()
    return product.bfloat16().float().sum(-1).bfloat16()
