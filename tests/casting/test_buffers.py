"""What ops write to beside their results reaches the caller's tensors, whatever is cast.

The oracle is plain torch: what it writes to is found out by looking, at values and versions.
"""

from __future__ import annotations

import copy
import itertools
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
from hmpx import CastPolicy, Decision, Policy, ops
from hmpx.ops import schemas as op_schemas
from tests.conftest import NAMESPACES
from tests.samples import sample_inputs
from tests.values import mapped, tensors

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
FLOATS = (FP32, BF16, FP16)

pytestmark = pytest.mark.filterwarnings("ignore")


# --- every op of the table: what it writes to is the caller's ------------------------------------


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


def arguments(site: ops.Site, written: set[str], target: Any, others: Any) -> tuple[Any, ...]:
    """Returns arguments for a call: what is written to in one dtype, other tensors in another."""
    known = ops.parameters(site)
    schemas = [] if site.is_python else op_schemas.schemas_named(op_schemas.aten_name(site))
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


@pytest.mark.sampled(6)
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
