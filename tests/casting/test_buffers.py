"""What ops write to beside their results reaches the caller's tensors, whatever is cast.

The oracle is plain torch: what it writes to is found out by looking, at values and versions.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import foreach_unary_op_db, op_db
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from hmpx import CastPolicy, Decision, Policy, ops, wrappers
from hmpx.casting import CallPlan
from hmpx.ops import schemas as op_schemas
from hmpx.ops.sites import NAMESPACES
from tests.samples import sample_inputs
from tests.values import mapped, tensors

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
FLOATS = (FP32, BF16, FP16)

pytestmark = pytest.mark.filterwarnings("ignore")


# --- every op of the table: what it writes to is the caller's ------------------------------------

#: Functions whose schemas do not say what they write to.
UNDECLARED = {
    "_batch_norm_impl_index": {"running_mean", "running_var"},
    "_cudnn_rnn_flatten_weight": {"weight_arr"},
    "backward": {"self", "inputs"},
    "batch_norm": {"running_mean", "running_var"},
    "batch_norm_gather_stats": {"running_mean", "running_var"},
    "batch_norm_gather_stats_with_counts": {"running_mean", "running_var"},
    "batch_norm_update_stats": {"running_mean", "running_var"},
    "instance_norm": {"running_mean", "running_var"},
    "miopen_batch_norm": {"running_mean", "running_var"},
    "module_load": {"self"},
    "native_batch_norm": {"running_mean", "running_var"},
    "register_hook": {"self"},
    "register_post_accumulate_grad_hook": {"self"},
}


def declared(name: str) -> set[str]:
    """Returns the arguments that the text of ATen's schemas marks ``(a!)``, those of ``out=`` aside."""
    found = set()
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        arguments = str(schema).split(" -> ")[0].split(", *")[0]
        found |= set(re.findall(r"Tensor\(\w+!\)\S* (\w+)", arguments))
    return found


def writing_sites() -> list[tuple[str, ops.Site, set[str]]]:
    """Returns (op, site, what it writes to) for every call site of the table that writes."""
    found = []
    for name, op in ops.table().items():
        for site in op.sites:
            if site.is_property:
                continue
            names = set(UNDECLARED.get(name, ()))
            if not site.is_python:
                names |= declared(op_schemas.aten_name(site))
            if site.in_place and (known := ops.parameters(site).names):
                names.add(known[0])
            names &= set(ops.parameters(site).names)
            if names and site.attribute != "sort":  # TorchScript's own sorts lists in place
                found.append((name, site, names))
    return found


WRITING = writing_sites()


def test_the_table_knows_what_each_callable_writes_to() -> None:
    """As the text of the schemas has it, and no more than that."""
    expected = {site.qualified: names for _, site, names in WRITING}
    actual = {
        site.qualified: names
        for name, op in ops.table().items()
        for site in op.sites
        if (names := set(ops.written(name, site))) and not site.is_property
    }
    assert actual == expected
    assert len(expected) > 400


DECISIONS = {
    "low": Decision(CastPolicy.LOW, BF16),
    "fp16": Decision(CastPolicy.LOW, FP16),
    "fp32": Decision(CastPolicy.FP32, FP32),
    "widest": Decision(CastPolicy.WIDEST),
    "follow": Decision(CastPolicy.FOLLOW),
    "first": Decision(CastPolicy.FIRST),
    "accumulating in fp32": Decision(CastPolicy.LOW, BF16, accumulate_dtype=FP32),
    "accumulating in fp64": Decision(CastPolicy.FP32, FP32, accumulate_dtype=FP64),
    "output in fp32": Decision(CastPolicy.LOW, BF16, output_dtype=FP32),
    "float8": Decision(CastPolicy.LOW, hmpx.formats.get("float8_e4m3fn")),
    "fp20": Decision(CastPolicy.LOW, hmpx.formats.Float("fp20", exponent_bits=8, mantissa_bits=11)),
}


@pytest.mark.parametrize("legalize", ["always", "never", "fast"])
@pytest.mark.parametrize("decision", DECISIONS.values(), ids=DECISIONS)
def test_what_a_function_writes_is_in_the_given_tensors(
    decision: Decision, legalize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call site in torch that writes, with a function in torch's place that does."""
    plans: dict[str, CallPlan] = {}

    def noting(original: Any, plan: CallPlan) -> None:
        plans[plan.site.name] = plan

    monkeypatch.setattr("hmpx.wrappers.make_wrapper", noting)
    policy = Policy({name: decision for name, _, _ in WRITING})
    with hmpx.convert(policy=policy, legalize=legalize):
        pass
    monkeypatch.undo()
    faults = []
    for name, site, written in WRITING:
        plan = plans.get(
            site.qualified
        )  # none if nothing is ever cast, or the slot is another's too
        if plan is None:
            continue
        for target, others in itertools.product(FLOATS, FLOATS):
            args = arguments(site, written, target, others)
            fault = fault_of(plan, args, written)
            if fault is not None:
                faults.append(f"{name} at {site.qualified}, {target} and {others}: {fault}")
    assert not faults, "\n".join(faults[:20])
    assert len(plans) > 100


def arguments(site: ops.Site, written: set[str], target: Any, others: Any) -> tuple[Any, ...]:
    """Returns arguments for a call: what is written to in one dtype, other tensors in another."""
    known = ops.parameters(site)
    schemas = [] if site.is_python else op_schemas.schemas(site)
    schema = max(schemas, key=lambda s: len(s.arguments), default=None)
    kinds = {} if schema is None else {a.name: str(a.type) for a in schema.arguments}
    made: list[Any] = []
    for position, name in enumerate(known.names):
        kind = kinds.get(name, "Tensor" if position == 0 or name in written else "")
        dtype = target if name in written else others
        if name == "out" or (schema is not None and _is_keyword(schema, name)):
            break
        if "Tensor" not in kind:
            made.append(True if kind == "bool" else 1)
        elif kind in ("Tensor", "Optional[Tensor]"):
            made.append(torch.ones(3, dtype=dtype))
        else:
            made.append([torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)])
    return tuple(made)


def _is_keyword(schema: Any, name: str) -> bool:
    return any(a.name == name and a.kwarg_only for a in schema.arguments)


def fault_of(plan: CallPlan, args: tuple[Any, ...], written: set[str]) -> str | None:
    """Returns what is wrong where a function writes 7 to what the op writes to; None if nothing is."""
    names = plan.site.parameters.names
    positions = [p for p, name in enumerate(names[: len(args)]) if name in written]
    if not positions:
        return None  # keyword-only

    def function(*given: Any) -> Tensor:
        for position in positions:
            for tensor in tensors(given[position]):
                tensor.fill_(7)
        return torch.ones(3)

    before = [(t, t.dtype, t.data_ptr()) for t in tensors(args)]
    wrapper = wrappers.make_wrapper(function, plan)
    if wrapper is None:
        return None
    wrapper(*args)
    for position, name in enumerate(names[: len(args)]):
        for tensor in tensors(args[position]):
            expected = 7 if position in positions else 1
            if not (tensor == expected).all():
                return f"{name} is {tensor.tolist()}, not {expected}"
    if [(t, t.dtype, t.data_ptr()) for t in tensors(args)] != before:
        return "dtype or storage changed"
    return None


@pytest.mark.parametrize("legalize", ["never", "always", "fast"])
@pytest.mark.parametrize("kind", ["low", "fp32"])
def test_positional_out_is_the_callers(kind: str, legalize: str) -> None:
    """Python functions take it by position."""
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    for out_dtype in FLOATS:
        out, norm = torch.zeros(3, 5, dtype=out_dtype), torch.zeros((), dtype=out_dtype)
        policy = Policy.from_ops(**{kind: ["tensordot", "norm"]})
        with hmpx.convert(policy=policy, legalize=legalize):
            torch.tensordot(a, b, 1, out)
            torch.norm(a, 2, None, False, norm)
        torch.testing.assert_close(out.float(), a @ b, rtol=0.02, atol=0.02)
        torch.testing.assert_close(norm.float(), a.norm(), rtol=0.02, atol=0.02)


# --- what plain torch writes to ------------------------------------------------------------------


def op_name(info: OpInfo) -> str | None:
    """Returns the hmpx op that ``info`` samples."""
    return ops.resolve(info.name) or (ops.resolve(info.aten_name) if info.aten_name else None)


INFOS = [
    info
    for info in (*op_db, *foreach_unary_op_db)
    if op_name(info) is not None
    and torch.float32 in info.dtypes
    and not info.name.startswith("torch.ops.")
]

#: What is returned is memory that was never written.
EMPTY = ("empty", "new_empty", "resize_")

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
EVERYTHING = [name for name in ops.table() if ops.is_castable(name)]


def current(function: Any) -> Callable[..., Any]:
    """Returns what looks ``function`` up in torch's namespaces at each call."""
    name = getattr(function, "__name__", None)
    for owner in NAMESPACES.values():
        for slot in (name, *vars(owner)):
            if slot and getattr(owner, slot, None) is function:
                return lambda *args, **kwargs: getattr(owner, slot)(*args, **kwargs)
    return function


def samples_of(info: OpInfo, limit: int) -> list[Call]:
    torch.default_generator.manual_seed(0)
    made = itertools.islice(sample_inputs(info), limit)
    return [(s.input, tuple(s.args), s.kwargs) for s in made]


def is_same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or a.shape != b.shape:
        return a.layout is b.layout and a.shape == b.shape
    return torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b.detach()))


def written_by(function: Callable[..., Any], call: Call) -> Outcome | None:
    """Returns the call's tensors after it, which have new values, and which new versions.

    None if it failed.
    """
    with hmpx.disable_casts():
        input, args, kwargs = mapped(call, lambda t: t.detach().clone())
        given = list(tensors((input, args, kwargs)))
        before = [t.clone() for t in given]
        facts = [
            (t._version, t.dtype, t.data_ptr() if t.layout is torch.strided else 0) for t in given
        ]
    torch.default_generator.manual_seed(0)
    try:
        with torch.no_grad():
            function(input, *args, **kwargs)
    except Exception:
        return None
    with hmpx.disable_casts():
        written, is_newer = [], []
        for tensor, copied, (version, dtype, pointer) in zip(given, before, facts, strict=True):
            assert tensor.dtype is dtype
            if tensor.layout is torch.strided and tensor.shape == copied.shape:
                assert tensor.data_ptr() == pointer
            written.append(not is_same(tensor, copied))
            is_newer.append(tensor._version != version)
    return given, written, is_newer


def variants(info: OpInfo) -> list[tuple[Any, Any]]:
    """Returns (plain callable, the same looked up when called) of an op's function and in-place method."""
    found = [(info.op, current(info.op))]
    name = getattr(info.inplace_variant, "__name__", "<lambda>")
    if name != "<lambda>" and hasattr(Tensor, name):

        def late(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return getattr(x, name)(*args, **kwargs)

        found.append((late, late))
    return found


@pytest.mark.opinfo
@pytest.mark.parametrize("given", [FP32, BF16], ids=str)
def test_opinfo_samples_are_written_to_as_in_plain_torch(
    given: torch.dtype, no_search_for_early_names: None
) -> None:
    """What torch writes to is written to, with the same values up to rounding, and nothing else is.

    Where torch itself rounds more, in bf16, float64 has the values: instance_norm's kernel cancels.
    """
    calls = []
    for info in INFOS:
        if info.name.startswith(EMPTY):
            continue
        for sample in samples_of(info, 4):
            call = mapped(sample, lambda t: t.to(given) if t.dtype is FP32 else t)
            for plain, late in variants(info):
                expected = written_by(plain, call)
                if expected is not None:
                    calls.append((info, call, plain, late, expected))
    faults = []
    count = 0
    for kind in ("low", "fp32", "first"):
        with hmpx.convert(policy=Policy.from_ops(**{kind: EVERYTHING}), legalize="never"):
            for info, call, plain, late, expected in calls:
                actual = written_by(late, call)
                if actual is None:
                    continue  # whether it runs at all is for other tests
                count += 1
                with hmpx.disable_casts():
                    found = differences(actual, expected, is_random=info.name in RANDOM)
                    if found and given is BF16:
                        exact = written_by(plain, mapped(call, in_float64))
                        found = found if exact is None else differences(actual, exact)
                faults += [f"{info.full_name} {kind}: {each}" for each in found]
    assert not faults, "\n".join(faults[:20])
    assert count > 5000


Outcome = tuple[list[Tensor], list[bool], list[bool]]


def in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype is BF16 else tensor


def differences(actual: Outcome, expected: Outcome, *, is_random: bool = False) -> list[str]:
    """Returns where what was written to differs, or what was written there by more than rounding."""
    is_new = [got and not want for got, want in zip(actual[2], expected[2], strict=True)]
    if actual[1] != expected[1] or any(is_new):
        return [f"wrote {actual[1]}, plain torch {expected[1]}"]
    found = []
    for got, want, was_written in zip(actual[0], *expected[:2], strict=True):
        if was_written and want.is_floating_point() and not is_random:
            wide = got.double(), want.double()
            if not torch.allclose(*wide, rtol=0.05, atol=0.05, equal_nan=True):
                found.append(f"{got} is not {want}")
    return found


#: Other draws for another dtype.
RANDOM = ("cauchy", "exponential", "log_normal", "normal", "uniform", "geometric", "bernoulli")


def test_no_other_builtin_writes_without_a_word() -> None:
    """Every builtin that runs on made-up arguments writes to nothing but what the table says."""
    skipped = "cudnn", "miopen", "mkldnn", "fbgemm", "quantized", "from_file", "seed", "sparse"
    faults, ran = [], set()
    for name, op in sorted(ops.table().items()):
        if name.startswith("_") or any(word in name for word in skipped):
            continue
        for site in op.sites:
            if site.is_python or site.namespace not in ("torch", "torch._C._nn"):
                continue
            for schema, shape in itertools.product(op_schemas.schemas(site), SHAPES):
                if any(a.is_out for a in schema.arguments) or not any(
                    map(op_schemas.holds_tensor, schema.arguments)
                ):
                    continue
                written = written_of_schema(site.function(), schema, shape)
                if written is None:
                    continue
                ran.add(name)
                if not written <= set(ops.written(name, site)):
                    faults.append(f"{schema} wrote to {written}")
    assert not faults, "\n".join(faults)
    assert len(ran) > 300


SHAPES = (2, 3), (2, 3, 4), (3,), (2, 3, 4, 4), (3, 3)


def written_of_schema(function: Any, schema: Any, shape: tuple[int, ...]) -> set[str] | None:
    """Returns the names of what a call with made-up arguments writes to; None if it fails."""
    args, kwargs, watched = [], {}, []
    for argument in schema.arguments:
        value = made_up(argument, shape)
        watched += [(argument.name, t, t.clone(), t._version) for t in tensors(value)]
        if not argument.kwarg_only:
            args.append(value)
        elif not argument.has_default_value():
            kwargs[argument.name] = value
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    except Exception:
        return None
    return {n for n, t, before, v in watched if t._version != v or not is_same(t, before)}


def made_up(argument: Any, shape: tuple[int, ...]) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        if argument.name in ("running_mean", "running_var", "weight", "bias", "mean", "invstd"):
            return torch.rand(3)
        if argument.name in ("indices", "index", "target", "lengths", "offsets"):
            return torch.zeros(shape, dtype=torch.long)
        return torch.rand(shape)
    if "Tensor" in kind:
        return [torch.rand(shape), torch.rand(shape)]
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("List[int"):
        return [1, 1]
    return {"int": 1, "float": 0.5, "bool": True, "number": 1}.get(kind)


# --- running statistics --------------------------------------------------------------------------

NORMS: dict[str, Callable[..., nn.Module]] = {
    "BatchNorm1d": lambda **options: nn.BatchNorm1d(4, **options),
    "BatchNorm2d": lambda **options: nn.BatchNorm2d(4, **options),
    "InstanceNorm1d": lambda **options: nn.InstanceNorm1d(4, **options),
    "InstanceNorm2d": lambda **options: nn.InstanceNorm2d(4, **options),
}
LISTS: dict[str, dict[str, Any]] = {
    "the default": {},
    "low": {"policy": Policy.from_ops(low=["batch_norm", "instance_norm"])},
    "low is fp16": {
        "policy": Policy.from_ops(low=["batch_norm", "instance_norm"], low_precision_type=FP16)
    },
    "fp32": {"policy": Policy.from_ops(fp32=["batch_norm", "instance_norm"])},
    "first": {"policy": Policy.from_ops(first=["batch_norm", "instance_norm"])},
    "widest": {"policy": Policy.from_ops(widest=["batch_norm", "instance_norm"])},
    "follow": {
        "policy": Policy({n: Decision(CastPolicy.FOLLOW) for n in ("batch_norm", "instance_norm")})
    },
    "everything low": {"policy": {"lists": "none", "low": ["*"]}},
    "everything fp32": {"policy": {"lists": "none", "fp32": ["*"]}},
    "O2": {"opt_level": "O2"},
    "autocast-cuda": {"lists": "autocast-cuda"},
    **{
        name: {"policy": Policy(dict.fromkeys(("batch_norm", "instance_norm"), DECISIONS[name]))}
        for name in (
            "accumulating in fp32",
            "accumulating in fp64",
            "output in fp32",
            "float8",
            "fp20",
        )
    },
}


def made_norm(name: str, dtypes: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = NORMS[name](**options)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    kept = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "bf16, statistics fp32": BF16}[dtypes]
    module.to(kept)
    if dtypes.endswith("statistics fp32"):
        for buffer_name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                setattr(module, buffer_name, buffer.float())
    return module


def data_for(name: str, dtype: torch.dtype) -> Tensor:
    shape = (6, 4, 5) if name.endswith("1d") else (6, 4, 3, 5)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2 + 3).to(dtype)


def exact(module: nn.Module, data: Tensor) -> tuple[Tensor, nn.Module]:
    """Returns the result of plain torch in float64, and the module after it."""
    module = copy.deepcopy(module).double()
    return module(data.double()), module


def assert_updated(module: nn.Module, expected: nn.Module, rtol: float) -> None:
    for (name, got), (_, want) in zip(
        module.named_buffers(), expected.named_buffers(), strict=True
    ):
        torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=rtol, msg=name)


#: Every combination of two of them is tried, those of three with ``-m slow``.
NORM_CASES = [
    pytest.param(
        name,
        LISTS[lists],
        legalize,
        id=f"{name}-{lists}-{legalize}",
        marks=[pytest.mark.slow] if (n + m + k) % 4 else [],
    )
    for n, name in enumerate(NORMS)
    for m, lists in enumerate(LISTS)
    for k, legalize in enumerate(["auto", "always", "never", "fast"])
]


#: Odd, so that in each case all values of each setting are tried.
STRIDE = 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "options", "legalize"), NORM_CASES)
def test_modules_run_and_update_their_statistics(
    name: str, options: dict[str, Any], legalize: str, request: pytest.FixtureRequest
) -> None:
    """In each dtype, whatever the input's, training or not: to the precision of what is stored.

    Each case tries one combination in `STRIDE`, another one than its neighbours; all with ``--whole``.
    """
    combinations = [
        *itertools.product(
            ("fp32", "bf16", "fp16", "bf16, statistics fp32"),
            FLOATS,
            (True, False),
            (True, False),
            (True, False),
            (True, False),
        )
    ]
    if not request.config.getoption("whole"):
        combinations = combinations[crc32(request.node.name.encode()) % STRIDE :: STRIDE]
    with hmpx.convert(**options, legalize=legalize):
        for dtypes, dtype, training, affine, tracks, with_grad in combinations:
            module = made_norm(name, dtypes, affine=affine, track_running_stats=tracks)
            module.train(training)
            data = data_for(name, dtype).requires_grad_(with_grad)
            format = next((d.dtype for d in decisions(options) if is_format(d.dtype)), None)
            with hmpx.disable_casts():
                seen = data.detach()
                if format is not None:  # whose rounding of the input is not the statistics' matter
                    seen = hmpx.formats.quantize(seen.float(), format)
                expected, updated = exact(module, seen)
                kept = [(b, b.dtype, b.data_ptr()) for b in module.buffers()]
            what = f"{dtypes} module, {dtype} input, training={training}, affine={affine}"
            result = module(data)
            if with_grad:
                result.float().sum().backward()
            with hmpx.disable_casts():
                tolerance = 0.04 if format is None else 0.07
                torch.testing.assert_close(
                    result.double(), expected, rtol=tolerance, atol=tolerance, msg=what
                )
                assert [(b, b.dtype, b.data_ptr()) for b in module.buffers()] == kept
                if not training and tracks:
                    assert_updated(module, updated, 0)
                else:
                    assert_updated(module, updated, 0.01)


def decisions(options: dict[str, Any]) -> list[Decision]:
    policy = options.get("policy")
    return list(policy.decisions.values()) if isinstance(policy, Policy) else []


def is_format(dtype: object) -> bool:
    return dtype is not None and not isinstance(dtype, torch.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NORMS)
def test_without_casts_to_do_it_is_plain_torch(name: str, dtype: torch.dtype) -> None:
    """A module all of one dtype that is the list's: the same kernel, bit for bit."""
    kind = "fp32" if dtype is FP32 else "low"
    low = BF16 if dtype is FP32 else dtype
    module = made_norm(name, {FP32: "fp32", BF16: "bf16", FP16: "fp16"}[dtype], affine=True)
    plain, data = copy.deepcopy(module), data_for(name, dtype)
    expected = plain(data)
    listed = Policy.from_ops(**{kind: ["batch_norm", "instance_norm"]}, low_precision_type=low)
    with hmpx.convert(policy=listed, legalize="never"):
        assert torch.equal(module(data), expected)
    for got, want in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want)


def native(**dtypes: torch.dtype) -> dict[str, Tensor]:
    made = {"weight": torch.rand(3), "bias": torch.rand(3)}
    made |= {"running_mean": torch.rand(3), "running_var": torch.rand(3) + 0.5}
    return {name: value.to(dtypes.get(name, FP32)) for name, value in made.items()}


FAMILY: dict[str, Callable[[Tensor, Any], Any]] = {
    "native_batch_norm": lambda x, n: torch.native_batch_norm(x, *n.values(), True, 0.1, 1e-5),
    "_native_batch_norm_legit": lambda x, n: torch._native_batch_norm_legit(
        x, *n.values(), True, 0.1, 1e-5
    ),
    "_batch_norm_impl_index": lambda x, n: torch._batch_norm_impl_index(
        x, *n.values(), True, 0.1, 1e-5, False
    ),
    "batch_norm": lambda x, n: torch.batch_norm(x, *n.values(), True, 0.1, 1e-5, False),
    "batch_norm_update_stats": lambda x, n: torch.batch_norm_update_stats(
        x, n["running_mean"], n["running_var"], 0.1
    ),
    "by name": lambda x, n: torch.native_batch_norm(
        input=x, **n, training=True, momentum=0.1, eps=1e-5
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("statistics", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("kind", ["low", "fp32", "first", "widest"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_family_of_batch_norm_updates_statistics(
    name: str, kind: str, given: torch.dtype, statistics: torch.dtype
) -> None:
    """Each of its ops, called by itself."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4) + 2
    arguments = native(running_mean=statistics, running_var=statistics)
    expected = {n: value.double() for n, value in arguments.items()}
    FAMILY[name](x.to(given).double(), expected)
    names = [n for n in FAMILY if n != "by name"]
    with hmpx.convert(policy=Policy.from_ops(**{kind: names})):
        FAMILY[name](x.to(given), arguments)
    for key in ("running_mean", "running_var"):
        assert arguments[key].dtype is statistics
        torch.testing.assert_close(arguments[key].double(), expected[key], rtol=0.01, atol=0.01)


def test_one_policy_for_everything_updates_native_statistics() -> None:
    """``*`` in the low list means ``native_batch_norm`` and ``batch_norm_update_stats``, too."""
    x = torch.randn(5, 3, 4) + 2
    for dtype, name in itertools.product(FLOATS, ("native_batch_norm", "batch_norm_update_stats")):
        arguments = native(running_mean=dtype, running_var=dtype)
        before = arguments["running_mean"].clone()
        with hmpx.convert(policy={"lists": "none", "low": ["*"]}, legalize="never"):
            FAMILY[name](x, arguments)
        assert not torch.equal(arguments["running_mean"], before)


@pytest.mark.parametrize("kind", ["low", "fp32"])
@pytest.mark.parametrize("statistics", [FP32, BF16])
def test_gradients_still_to_come_survive_an_update(kind: str, statistics: torch.dtype) -> None:
    """Plain torch updates without a new version: what an earlier evaluation kept stays valid."""
    module = made_norm("BatchNorm1d", "bf16", affine=True).eval()
    data = data_for("BatchNorm1d", BF16).requires_grad_()
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["batch_norm"]})):
        with hmpx.disable_casts():
            kept = module(data)
        module(data)
        module.train()
        module(data.detach().float())
        kept.float().sum().backward()
    assert data.grad is not None


# --- other programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["low", "fp32"])
def test_compiled_modules_update_their_statistics(kind: str, dtypes: str) -> None:
    """As in eager mode, without graph breaks."""
    module = made_norm("BatchNorm1d", dtypes, affine=True)
    data = data_for("BatchNorm1d", FP32)
    expected, updated = exact(module, data)
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["batch_norm"]})):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        result = compiled(data)
    torch.testing.assert_close(result.double(), expected, rtol=0.04, atol=0.04)
    assert_updated(module, updated, 0.01)


@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["low", "fp32"])
def test_functional_call_updates_the_statistics_it_is_given(kind: str, dtypes: str) -> None:
    """The dict's, not the module's."""
    module = made_norm("BatchNorm1d", dtypes, affine=True)
    data = data_for("BatchNorm1d", FP32)
    given = {name: t.detach().clone() for name, t in module.state_dict().items()}
    _, updated = exact(module, data)
    kept = copy.deepcopy(module)
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["batch_norm"]})):
        torch.func.functional_call(module, given, (data,))
    assert_updated(module, kept, 0)
    for name in ("running_mean", "running_var"):
        want = getattr(updated, name)
        torch.testing.assert_close(given[name].double(), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["low", "fp32"])
@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize("affine", [True, False])
def test_transformed_modules_update_their_statistics(
    affine: bool, transform: str, kind: str, dtypes: str, training: bool
) -> None:
    """An ensemble under vmap; a gradient by torch.func."""
    modules = [made_norm("BatchNorm1d", dtypes, affine=affine).train(training) for _ in range(3)]
    with torch.no_grad():
        modules[1].running_mean += 1
    data = data_for("BatchNorm1d", FP32)
    expected = [exact(module, data) for module in modules]
    params, buffers = torch.func.stack_module_state(modules)

    def run(params: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(modules[0], (params, buffers), (data,))

    with hmpx.convert(policy=Policy.from_ops(**{kind: ["batch_norm"]})):
        if transform == "vmap":
            results = torch.func.vmap(run)(params, buffers)
            for result, (want, _) in zip(results, expected, strict=True):
                torch.testing.assert_close(result.double(), want, rtol=0.04, atol=0.04)
                assert result.dtype is (BF16 if kind == "low" else FP32)
        else:
            first = [{n: t[0] for n, t in each.items()} for each in (params, buffers)]
            gradients, result = torch.func.grad(
                lambda p, b: ((r := run(p, b)).float().sum(), r), has_aux=True
            )(*first)
            torch.testing.assert_close(result.double(), expected[0][0], rtol=0.04, atol=0.04)
            assert {n: g.dtype for n, g in gradients.items()} == {
                n: p.dtype for n, p in params.items()
            }
            buffers = {n: t[None] for n, t in first[1].items()}
            expected = expected[:1]
    for position, (_, module) in enumerate(expected):
        for name in ("running_mean", "running_var"):
            got, want = buffers[name][position].double(), getattr(module, name)
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("kind", ["low", "fp32"])
@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
def test_renormalized_rows_are_the_weights(
    function: Any, kind: str, weight_dtype: torch.dtype
) -> None:
    """``max_norm`` shortens rows of the weight itself."""
    weight = (torch.rand(5, 4) + 1).to(weight_dtype)
    expected, indices = weight.clone(), torch.tensor([[0, 2]])
    function(indices, expected, max_norm=0.5)
    given = weight.clone()
    names = ["embedding", "embedding_bag"]
    with hmpx.convert(policy=Policy.from_ops(**{kind: names})):
        result = function(indices, given, max_norm=0.5)
    assert torch.equal(given, expected)
    assert result.dtype is (BF16 if kind == "low" else FP32)


@pytest.mark.parametrize("kind", ["low", "fp32", "first"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_lists_of_tensors_are_written_to_where_they_are(kind: str, dtype: torch.dtype) -> None:
    """Fused optimizers, `_foreach` ops, unscaling: nothing of such a call is cast."""

    def made(*values: float) -> list[Tensor]:
        return [torch.full((3,), value, dtype=dtype) for value in values]

    def run() -> list[list[Tensor]]:
        params, grads = made(1, 2), made(0.5, 0.25)
        torch._foreach_add_(params, grads)
        torch._foreach_mul_(params, made(2, 2))
        averages, squares, steps = made(0, 0), made(0, 0), [torch.tensor(1.0) for _ in range(2)]
        torch._fused_adam_(
            params, grads, averages, squares, [], steps, lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([0.5]))
        return [params, grads, averages, squares, [found]]

    names = ["_foreach_add", "_foreach_mul", "_fused_adam"]
    names.append("_amp_foreach_non_finite_check_and_unscale")
    expected = run()
    with hmpx.convert(policy=Policy.from_ops(**{kind: names})):
        actual = run()
    for got, want in zip(tensors(actual), tensors(expected), strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("kind", ["low", "fp32"])
def test_observers_see_what_they_observe(kind: str, given: torch.dtype) -> None:
    """Fake quantization updates its range, scale and zero point, all in fp32; the input follows."""
    x = torch.randn(4, 5).to(given)

    def run(x: Tensor) -> list[Tensor]:
        on = torch.ones(1, dtype=torch.long)
        state = [torch.tensor(float("inf")), torch.tensor(float("-inf"))]
        state += [torch.ones(1), torch.zeros(1, dtype=torch.int32)]
        result = torch.fused_moving_avg_obs_fake_quant(
            x, on, on, *state, 0.01, 0, 255, 0, False, False
        )
        return [result, *state]

    expected = run(x.float())
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["fused_moving_avg_obs_fake_quant"]})):
        actual = run(x)
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["low", "fp32"])
@pytest.mark.parametrize("noise_dtype", [FP32, BF16])
@pytest.mark.parametrize("given", [FP32, BF16])
def test_noise_is_handed_out(kind: str, given: torch.dtype, noise_dtype: torch.dtype) -> None:
    """``rrelu_with_noise`` draws it into its second argument."""
    x, noise = -torch.ones(4, 5, dtype=given), torch.zeros(4, 5, dtype=noise_dtype)
    with hmpx.convert(policy=Policy.from_ops(**{kind: ["rrelu_with_noise"]})):
        torch._C._nn.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    assert (noise != 0).all()
    assert (x == -1).all()


@pytest.mark.parametrize("kind", ["low", "fp32"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_hung_on_a_tensor_is_on_that_tensor(kind: str, dtype: torch.dtype) -> None:
    """Hooks, retained gradients, and gradients of the inputs that are named."""
    names = ["register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward"]
    seen = []
    with hmpx.convert(policy=Policy(dict.fromkeys(names, DECISIONS[kind]))):
        leaf = torch.ones(3, dtype=dtype, requires_grad=True)
        inner = leaf * 2
        inner.retain_grad()
        inner.register_hook(lambda grad: seen.append("inner"))
        leaf.register_post_accumulate_grad_hook(lambda tensor: seen.append("leaf"))
        (inner * 3).sum().backward(inputs=[leaf, inner])
    assert seen == ["inner", "leaf"]
    assert leaf.grad is not None
    assert inner.grad is not None
