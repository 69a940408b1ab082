"""Conformance: each sample of torch's OpInfo database, under each policy, equals casting by hand.

The oracle is torch's own: the unpatched op called on inputs that this file casts itself.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from hmpx import CastPolicy, Policy, compute, ops
from tests.conftest import NAMESPACES
from tests.samples import sample_inputs, spread
from tests.values import mapped, tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOW = torch.bfloat16
LOW_DTYPES = (torch.bfloat16, torch.float16)

#: OpInfos left out, with the reason.
LEFT_OUT = {
    **dict.fromkeys(
        (
            "empty",
            "empty_like",
            "empty_permuted",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ),
        "return memory that was never written",
    ),
    **dict.fromkeys(
        ("linalg.lstsq", "linalg.lstsq.grad_oriented"),
        "LAPACK's gelsy gives other last bits from run to run, unpatched too",
    ),
    **dict.fromkeys(
        ("linalg.pinv.singular", "svd_lowrank", "pca_lowrank"),
        "OpInfo multiplies two matrices before it calls the op, so the samples are not its inputs",
    ),
    "as_strided.partial_views": "its samples reach past the view, into memory that no cast copies",
    "native_layer_norm": "torch's backward refuses an fp32 bias without a weight beside low inputs",
    **dict.fromkeys(
        ("_softmax_backward_data", "_upsample_bilinear2d_aa"),
        "OpInfo calls the ATen overload, below every Python-visible callable",
    ),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.opinfo,
    pytest.mark.usefixtures("no_search_for_early_names"),
]


def op_name(info: OpInfo) -> str | None:
    """Returns the op of torch that ``info`` samples."""
    names = [ops.resolve(name) for name in (info.name, info.aten_name) if name]
    return next((name for name in names if name in ops.table()), None)


def listed() -> list[OpInfo]:
    """Returns the OpInfos whose op can stand in a list, and that run on real fp32 tensors."""
    return [
        info
        for info in op_db
        if (name := op_name(info)) is not None
        and ops.is_castable(name)
        and torch.float32 in info.dtypes
        and info.full_name not in LEFT_OUT
        and not info.name.startswith("torch.ops.")
    ]


INFOS = listed()

#: How many samples of an op run; all with ``--whole``.
MOST_SAMPLES = 20


# --- the call by hand ---------------------------------------------------------------------------


#: OpInfos whose op writes to (a clone of) its first input: that keeps its dtype.
IN_PLACE = {
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal.in_place",
    "uniform",
    "resize_",
    "resize_as_",
    "zero_",
}

#: Positions, after the input, of a norm's buffers, and of weight and bias.
NORMS = {
    "_native_batch_norm_legit": ((2, 3), (0, 1)),
    "native_batch_norm": ((2, 3), (0, 1)),
    "batch_norm": ((0, 1), (2, 3)),
    "instance_norm": ((0, 1), (2, 3)),
    "group_norm": ((), (1, 2)),
    "layer_norm": ((), (1, 2)),
    "native_group_norm": ((), (0, 1)),
    "native_layer_norm": ((), (1, 2)),
}
#: On the CPU: where they follow their input, they compute in fp32 beside such a weight.
REFUSES_FP32_WEIGHTS = {"rms_norm"}
NORM_NAMES = {"running_mean", "running_var"}, {"weight", "bias"}


def cast_by_hand(
    name: str, policy: CastPolicy, call: tuple[Any, ...], *, is_in_place: bool = False
) -> tuple[Any, ...]:
    """Returns (input, args, kwargs) with every eligible tensor cast as design and policy say."""
    promotes = ops.root(name) in set(ops.facts("promotes")) - set(ops.facts("rounds_mixed"))
    if is_in_place or (policy is CastPolicy.WIDEST and promotes):
        return call  # the target keeps its dtype; torch's own kernel promotes
    if name in NORMS:
        return cast_norm_by_hand(name, policy, call)
    inputs = [t for t in tensors(call) if t.dtype.is_floating_point]
    if not inputs:
        return call
    sparse = [t.dtype for t in inputs if t.layout is not torch.strided]
    if sparse:
        dtype = sparse[0]  # torch's sparse products take no other dtype beside it
    elif policy is CastPolicy.LOW:
        dtype = LOW
    elif policy is CastPolicy.FP32:
        dtype = torch.float32
    elif policy is CastPolicy.FIRST:
        dtype = inputs[0].dtype
    else:
        counted = name in {"column_stack", "dstack", "hstack", "vstack"}
        dimensioned = [t for t in inputs if t.dim() or counted] or inputs
        dtype = torch.result_type(dimensioned[0], dimensioned[0])
        for tensor in dimensioned[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
    if (policy in (CastPolicy.LOW, CastPolicy.FP32) or sparse) and any(
        t.dtype not in FLOATS for t in inputs
    ):
        return call

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in FLOATS or tensor.dtype is dtype:
            return tensor
        return tensor.to(dtype) if tensor.layout is torch.strided else tensor

    return mapped(call, cast)


def cast_norm_by_hand(name: str, policy: CastPolicy, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the input; weight and bias follow unless the CPU kernel takes them in fp32.

    Where it doesn't take the buffers beside these, all are brought to a dtype that it takes.
    """
    input, args, kwargs = call
    dtype = {CastPolicy.LOW: LOW, CastPolicy.FP32: torch.float32}.get(policy, input.dtype)
    buffers, parameters = NORMS[name]
    if policy is CastPolicy.WIDEST:
        inputs = [
            input,
            *(t for i, a in enumerate(args) if i not in buffers for t in tensors(a)),
            *(t for k, a in kwargs.items() if k not in NORM_NAMES[0] for t in tensors(a)),
        ]
        for tensor in inputs:
            dtype = torch.promote_types(dtype, tensor.dtype)

    def cast(key: int | str, value: Any) -> Any:
        if not isinstance(value, Tensor) or key in buffers or key in NORM_NAMES[0]:
            return value
        keeps_fp32 = dtype is LOW and value.dtype is torch.float32
        if (key in parameters or key in NORM_NAMES[1]) and keeps_fp32:
            return value
        return value.to(dtype)

    new_args = tuple(cast(i, a) for i, a in enumerate(args))
    new_kwargs = {k: cast(k, a) for k, a in kwargs.items()}
    found = {t.dtype for t in tensors((new_args, new_kwargs))}
    is_low = dtype in (torch.bfloat16, torch.float16)
    if buffers and not found <= {dtype} and not (is_low and found <= {torch.float32}):
        wide = torch.float32 if is_low else dtype
        new_args, new_kwargs = mapped((new_args, new_kwargs), lambda t: t.to(wide))
    return input.to(dtype), new_args, new_kwargs


def in_fp32(function: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    """Runs an op on low-precision inputs in fp32; floating results have the first one's dtype."""
    wide = mapped(call, lambda t: t.float() if t.dtype in FLOATS else t)
    dtype = next(t.dtype for t in tensors(call) if t.dtype.is_floating_point)
    results = list(tensors(function(*wide)))
    return [t.to(dtype) if t.dtype is torch.float32 else t for t in results]


def has_fp32_statistics(call: tuple[Any, ...]) -> bool:
    """Whether a norm is given running statistics in fp32."""
    positions, names = NORMS["instance_norm"][0], NORM_NAMES[0]
    given = [*(call[1][i] for i in positions if i < len(call[1])), *(call[2].get(n) for n in names)]
    return any(isinstance(each, Tensor) and each.dtype is torch.float32 for each in given)


def lacks_kernel(name: str, call: tuple[Any, ...], how: str = "always") -> bool:
    """Whether such a call in low precision has no kernel on the CPU, or none that gives right numbers."""
    lacking = compute.lacking_kernels().get(name, compute.Lacking())
    low = next((t.dtype for t in tensors(call) if t.dtype in FLOATS[1:]), None)
    options = [v for v in (*call[1], *call[2].values()) if isinstance(v, (bool, str))]
    if "beyond_input" in lacking.only:
        if not is_beyond_input(name, call):
            return False
    elif lacking.only and (*lacking.only[1:], True)[0] not in options:
        return False
    return ("cpu", low) in getattr(lacking, how)


def is_beyond_input(name: str, call: tuple[Any, ...]) -> bool:
    """Whether a convolution's kernel reaches past what it slides over, in some dimension.

    A transposed one slides over its output without the padding.
    """
    is_transposed = name.startswith("conv_transpose")
    names = "weight bias stride padding output_padding groups dilation"
    if not is_transposed:
        names = "weight bias stride padding dilation groups"
    given = {**dict(zip(names.split(), call[1], strict=False)), **call[2]}
    kernel = given["weight"].shape[2:]
    sizes = call[0].shape[-len(kernel) :]

    def each(option: str, default: int) -> torch.Tensor:
        return torch.as_tensor(given.get(option, default)).expand(len(kernel))

    n, k = torch.tensor(sizes), torch.tensor(kernel)
    if is_transposed:
        return bool((2 * each("padding", 0) > each("stride", 1) * (n - 1)).any())
    return bool((each("dilation", 1) * (k - 1) + 1 > n).any())


def expected_outcome(
    name: str,
    function: Callable[..., Any],
    cast: Callable[..., tuple[Any, ...]],
    call: tuple[Any, ...],
    *,
    is_low: bool,
    backward: bool,
) -> Any:
    """Returns the outcome of a call with its inputs cast, in fp32 if there is no kernel for low ones.

    That is where the op is known to lack it, is in the low list, or fails on inputs that were cast.
    """
    before, after = ([t.dtype for t in tensors(c)] for c in (call, cast(*call)))
    low = next((dtype for dtype in after if dtype in LOW_DTYPES), None)
    found = outcome(lambda *c: function(*cast(*c)), call, backward=backward)
    if low is None:
        return found
    lacking = compute.lacking_kernels().get(name, compute.Lacking())
    may_fail = is_low or before != after or ("cpu", low) in lacking.sometimes | lacking.backward
    may_fail |= any(site.is_python for site in ops.table()[name].sites)  # it calls others that lack
    if lacks_kernel(name, cast(*call)) or (isinstance(found[0], type) and may_fail):
        return outcome(lambda *c: in_fp32(function, cast(*c)), call, backward=backward)
    if backward and lacks_kernel(name, cast(*call), "backward"):
        _, gradients, *_ = outcome(lambda *c: in_fp32(function, cast(*c)), call, backward=True)
        return found[0], gradients, *found[2:]
    return found


def outcome(function: Callable[..., Any], call: tuple[Any, ...], *, backward: bool) -> Any:
    """Returns the results and gradients of a call, or the error's type and text."""
    with hmpx.disable_casts():
        leaves = [
            t.detach().clone().requires_grad_(t.requires_grad and t.dtype.is_floating_point)
            for t in tensors(call)
        ]
    pending = iter(leaves)
    call = mapped(call, lambda _: next(pending))
    versions = [t._version for t in leaves]
    torch.default_generator.manual_seed(0)
    try:
        results = [t for t in tensors(function(*call)) if t.dtype is not torch.bool]
        grads: list[Tensor | None] = []
        if backward and (outputs := [t for t in results if t.requires_grad]):
            wanted = [t for t in leaves if t.requires_grad]
            with hmpx.disable_casts():
                seeds = [torch.ones_like(t) for t in outputs]
            grads = list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
    except Exception as error:  # whatever the op raises is the outcome
        return type(error), str(error).split("\n")[0]
    return results, grads, leaves, versions


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Compares two outcomes bit for bit."""
    if isinstance(expected[0], type):
        assert actual == expected, what
        return
    assert not isinstance(actual[0], type), f"{what}: {actual}"
    for kind, got, want in zip(("result", "gradient"), actual[:2], expected[:2], strict=True):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None), f"{what} {kind}"
            if a is not None:
                torch.testing.assert_close(
                    a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, k=kind: f"{what} {k}: {m}"
                )


def assert_not_mutated(actual: Any, what: str) -> None:
    """Checks that a call left its arguments as they were."""
    if isinstance(actual[0], type):
        return
    _, _, leaves, versions = actual
    for leaf, version in zip(leaves, versions, strict=True):
        assert leaf._version == version, f"{what}: an argument was written to"


# --- patched callables --------------------------------------------------------------------------


def current(function: Any) -> Callable[..., Any]:
    """Returns a callable that looks ``function`` up in torch's namespaces at each call.

    OpInfo holds builtins from before `convert`; a user would spell their names.
    """
    for namespace, owner in NAMESPACES.items():
        name = getattr(function, "__name__", None)
        if name and getattr(owner, name, None) is function and namespace != "torch._VF":
            return lambda input, args, kwargs: getattr(owner, name)(input, *args, **kwargs)
    for owner in NAMESPACES.values():
        for name, value in vars(owner).items():
            if value is function:
                return lambda i, a, k, o=owner, n=name: getattr(o, n)(i, *a, **k)
    return lambda input, args, kwargs: function(input, *args, **kwargs)


def uncalled(function: Any) -> Callable[..., Any]:
    return lambda input, args, kwargs: function(input, *args, **kwargs)


PATTERNS: dict[str, Callable[[int], torch.dtype]] = {
    "fp32": lambda index: torch.float32,
    "bf16": lambda index: torch.bfloat16,
    "bf16 first": lambda index: torch.bfloat16 if index == 0 else torch.float32,
    "fp32 first": lambda index: torch.float32 if index == 0 else torch.bfloat16,
}


def patterned(call: tuple[Any, ...], pattern: Callable[[int], torch.dtype]) -> tuple[Any, ...]:
    index = itertools.count()

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32 or tensor.layout is not torch.strided:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        return tensor.detach().to(pattern(next(index))).requires_grad_(tensor.requires_grad)

    return mapped(call, cast)


def is_mixed(call: tuple[Any, ...]) -> bool:
    """Whether tensors of several floating dtypes meet in ``call``."""
    return len({t.dtype for t in tensors(call)} & set(FLOATS)) > 1


@pytest.mark.native
@pytest.mark.sampled(14)
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.formatted_name)
def test_each_sample_equals_the_call_with_inputs_cast_by_hand(
    info: OpInfo, pytestconfig: pytest.Config
) -> None:
    """Same dtype, bit-equal, same failures; results, gradients, and arguments left alone.

    Of an op with hundreds of samples, which are all combinations of a few options, a spread.
    """
    name = op_name(info)
    assert name is not None
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [
            (s.input, tuple(s.args), s.kwargs)
            for s in sample_inputs(info, requires_grad=info.supports_autograd)
        ]
    if not pytestconfig.getoption("whole"):
        samples = spread(samples, MOST_SAMPLES)
    is_in_place, backward = info.full_name in IN_PLACE, info.supports_autograd
    patched, plain = current(info.op), uncalled(info.op)
    given = {
        pattern_name: [
            call
            for call in (patterned(sample, pattern) for sample in samples)
            if not pattern_name.endswith("first") or is_mixed(call)
        ]
        for pattern_name, pattern in PATTERNS.items()
    }
    for policy in (CastPolicy.LOW, CastPolicy.FP32, CastPolicy.WIDEST, CastPolicy.FIRST):

        def cast(*call: Any, policy: CastPolicy = policy) -> tuple[Any, ...]:
            return cast_by_hand(name, policy, call, is_in_place=is_in_place)

        def expect(call: tuple[Any, ...], policy: CastPolicy = policy) -> Any:
            if is_in_place:
                return outcome(lambda *parts: plain(*cast(*parts)), call, backward=backward)
            if policy is CastPolicy.FIRST and name in REFUSES_FP32_WEIGHTS and is_mixed(call):
                return outcome(lambda *c: in_fp32(plain, c), call, backward=backward)
            if name == "instance_norm" and has_fp32_statistics(call):
                # torch's function would give its kernel statistics in the input's dtype
                return outcome(lambda *c: in_fp32(plain, cast(*c)), call, backward=backward)
            is_low = policy is CastPolicy.LOW
            return expected_outcome(name, plain, cast, call, is_low=is_low, backward=backward)

        cases = []
        for pattern_name, calls in given.items():
            if pattern_name.endswith("first") and policy in (CastPolicy.LOW, CastPolicy.FP32):
                continue  # their casts do not depend on each other's dtypes
            for index, call in enumerate(calls):
                what = f"{name} sample {index} of {pattern_name} under {policy.name}"
                cases.append((what, call, expect(call)))
        with hmpx.convert(policy=Policy.from_ops(**{policy.value: [name]})):
            actual = [outcome(patched, call, backward=backward) for _, call, _ in cases]
        for (what, _, want), got in zip(cases, actual, strict=True):
            assert_same(got, want, what)
            if not is_in_place and name not in NORMS:  # these write to their input or buffers
                assert_not_mutated(got, what)


def runs(function: Callable[..., Any], call: tuple[Any, ...]) -> bool:
    return not isinstance(outcome(function, call, backward=False)[0], type)


#: Without what torch alone calls.
PUBLIC = [
    info
    for info in INFOS
    if not str(op_name(info)).startswith("_") and info.full_name not in IN_PLACE
]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("info", PUBLIC, ids=lambda info: info.formatted_name)
def test_what_refuses_mixed_inputs_runs_under_every_shipped_set(info: OpInfo) -> None:
    """An op before it may be low there: a program that runs in float32 does not stop for that."""
    plain, patched = uncalled(info.op), current(info.op)
    samples = itertools.islice(sample_inputs(info), 4)
    calls = [(each.input, tuple(each.args), each.kwargs) for each in samples]
    refused = [
        mixed
        for call in calls
        if is_mixed(mixed := patterned(call, PATTERNS["bf16 first"]))
        and not runs(plain, mixed)
        and runs(plain, call)
    ]
    for lists in ("autocast-cpu", "autocast-cuda", "hmpx", "o2") if refused else ():
        with hmpx.convert(lists=lists, device_types={"cpu"}):
            stopped = [call for call in refused if not runs(patched, call)]
            assert not stopped, lists


VARIANTS = [
    (info, kind, getattr(variant, "__name__", "<lambda>"))
    for info in INFOS
    for kind, variant in (
        ("method", info.method_variant),
        ("operator", info.operator_variant),
        ("in-place method", info.inplace_variant),
        ("in-place operator", info.inplace_operator_variant),
    )
    if variant is not None
    and getattr(variant, "__name__", "<lambda>") != "<lambda>"
    and info.full_name not in IN_PLACE
]


def spelled(kind: str, variant: str, info: OpInfo) -> Callable[..., Any]:
    """Returns a callable that spells the op as a user would: ``x.add_(y)``, ``x += y``."""
    if "method" in kind:
        return lambda input, args, kwargs: getattr(input, variant)(*args, **kwargs)
    function = info.inplace_operator_variant if "in-place" in kind else info.operator_variant
    return lambda input, args, kwargs: function(input, *args, **kwargs)


@pytest.mark.native
@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("info", "kind", "variant"),
    VARIANTS,
    ids=[f"{info.formatted_name}-{kind}-{variant}" for info, kind, variant in VARIANTS],
)
def test_methods_operators_and_in_place_forms_follow_the_same_rule(
    info: OpInfo, kind: str, variant: str
) -> None:
    """``x.op()`` and ``x + y`` cast as the function does; ``x.op_()`` and ``x += y`` keep x's dtype."""
    name = op_name(info)
    assert name is not None
    torch.default_generator.manual_seed(0)
    samples = [
        (s.input, tuple(s.args), s.kwargs)
        for s in sample_inputs(info)
        if isinstance(s.input, Tensor)
    ]
    call_it = spelled(kind, variant, info)
    is_in_place = "in-place" in kind
    promotes = ops.root(name) in ops.facts("promotes")
    given = {
        pattern_name: [patterned(sample, pattern) for sample in samples]
        for pattern_name, pattern in PATTERNS.items()
    }
    for policy in (CastPolicy.LOW, CastPolicy.FIRST):

        def cast(*call: Any, policy: CastPolicy = policy) -> tuple[Any, ...]:
            if is_in_place and promotes:
                return call
            return cast_by_hand(name, CastPolicy.FIRST if is_in_place else policy, call)

        def expect(call: tuple[Any, ...], policy: CastPolicy = policy) -> Any:
            if is_in_place and lacks_kernel(name, cast(*call)):

                def written(*parts: Any) -> Tensor:
                    (result,) = in_fp32(call_it, cast(*parts))
                    return parts[0].resize_(result.shape).copy_(result)  # addbmm_ resizes

                return outcome(written, call, backward=False)
            if is_in_place:
                return outcome(lambda *parts: call_it(*cast(*parts)), call, backward=False)
            is_low = policy is CastPolicy.LOW
            return expected_outcome(name, call_it, cast, call, is_low=is_low, backward=False)

        cases = []
        for pattern_name, calls in given.items():
            for index, call in enumerate(calls):
                what = f"{name} {kind} sample {index} of {pattern_name} under {policy.name}"
                cases.append((what, call, expect(call)))
        with hmpx.convert(policy=Policy.from_ops(**{policy.value: [name]})):
            actual = [outcome(call_it, call, backward=False) for _, call, _ in cases]
        for (what, call, want), got in zip(cases, actual, strict=True):
            assert_same(got, want, what)
            if is_in_place and not isinstance(got[0], type) and variant != "resize_as_":
                assert got[0][0].dtype is call[0].dtype, what
                assert got[0][0].data_ptr() == got[2][0].data_ptr(), what
