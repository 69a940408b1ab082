"""Ops that lack a low-precision kernel compute in fp32: the data, every op of OpInfo, and each form of call."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Policy, ops
from hmpx.compute import missing_kernels
from hmpx.compute.missing_kernels import Callee, Lacking
from hmpx.files import read_sections
from hmpx.ops import schemas as op_schemas
from hmpx.ops.sites import NAMESPACES
from hmpx.policy import lists as oplists
from hmpx.torch_internals.torch_part import torch_version
from tests.samples import sample_inputs
from tests.values import mapped, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: OpInfos of which values are not compared.
NOT_COMPARED = {
    **dict.fromkeys(("svd_lowrank", "pca_lowrank"), "multiply by random matrices"),
    **dict.fromkeys(
        ("linalg.lstsq", "linalg.pinv.singular"), "gives other last bits from run to run"
    ),
    **dict.fromkeys(("linalg.eig", "linalg.svd", "svd"), "signs and order are free"),
}


def current(function: Any) -> Any:
    """Returns what is in the slot of a builtin now."""
    for owner in NAMESPACES.values():
        for name, value in vars(owner).items():
            if getattr(value, "__wrapped__", value) is function:
                return getattr(owner, name)
    name = getattr(function, "__name__", "")
    return getattr(torch, name, function) if hasattr(torch, name) else function


# --- the data -----------------------------------------------------------------------------------


#: The version of torch whose ops the data names; others may lack some.
MADE_WITH = (2, 13)

#: What came after it.
NEWER = {"linalg_matrix_sqrth", "linalg_polar"}


def test_every_name_is_an_op_and_stands_in_one_way() -> None:
    """Sections are of known devices, dtypes and ways; an op that always lacks its kernel stands once."""
    facts = read_sections("hmpx.compute", "kernels.ini")
    known = {
        f"{device} {dtype} {how}"
        for device in missing_kernels.KNOWN_DEVICES
        for dtype in ("bfloat16", "float16")
        for how in ("always", "sometimes", "backward")
    }
    assert set(facts) - {"DEFAULT", "untried"} == known
    for section in [*known, "untried"]:
        names = list(facts[section])
        assert names == sorted(set(names)), section
        unknown = [name for name in names if name not in ops.table()]
        assert not set(unknown) - NEWER or torch_version() != MADE_WITH, f"{section}: {unknown}"
    for section in known:
        if not section.endswith("always"):
            device, dtype, _ = section.split()
            assert not set(facts[section]) & set(facts[f"{device} {dtype} always"]), section


def test_what_torch_autocast_runs_low_on_cuda_has_kernels_there() -> None:
    """No product is made slow by what OpInfo declares on a machine without a GPU."""
    low = set(oplists.read_set("autocast-cuda")["low"].ops)
    for name in low & set(missing_kernels.lacking_kernels()):
        lacking = missing_kernels.lacking_kernels()[name]
        assert ("cuda", BF16) not in lacking.always | lacking.backward, name
        assert ("cuda", FP16) not in lacking.always | lacking.backward, name


#: The nuclear norm of `torch.norm` is another op, which is in the data.
BY_OTHERS = {"norm"}


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_what_opinfo_declares_without_a_kernel_on_cuda_is_known(dtype: torch.dtype) -> None:
    """Under the name of what users call; what the CPU has a kernel for, no call of runs there."""
    faults = []
    for info in op_db:
        name = op_name(info)
        if name not in ops.table() or FP32 not in info.dtypesIfCUDA or dtype in info.dtypesIfCUDA:
            continue
        if name in BY_OTHERS or ops.kind(name)[0] == "gemm":  # of which it asks the GPU
            continue
        lacking = missing_kernels.lacking_kernels().get(name, Lacking())
        known = lacking.always if dtype in info.dtypes else lacking.always | lacking.sometimes
        if ("cuda", dtype) not in known:
            faults.append(info.full_name)
    assert not faults


@pytest.mark.parametrize("set_name", ["hmp", "hmpx", "o2"])
def test_the_low_lists_have_kernels_on_cuda(set_name: str) -> None:
    """None of their ops would compute in fp32 there."""
    for name in set(oplists.read_set(set_name)["low"].ops) & set(missing_kernels.lacking_kernels()):
        lacking = missing_kernels.lacking_kernels()[name]
        places = lacking.always | lacking.backward | lacking.sometimes
        assert not {("cuda", BF16), ("cuda", FP16)} & places, name


def test_the_random_ops_are_those_that_torch_tags() -> None:
    """So they need not be asked for at each convert."""
    tagged = set()
    for name, op in ops.table().items():
        for site in op.sites:
            for schema in (
                () if site.is_python else op_schemas.schemas_named(op_schemas.aten_name(site))
            ):
                try:
                    tags = torch._C._get_operation_overload(schema.name, schema.overload_name)[2]
                except RuntimeError:  # TorchScript's own
                    continue
                if torch.Tag.nondeterministic_seeded in tags:
                    tagged.add(name)
    assert tagged <= set(ops.facts("random"))


# --- every op of OpInfo --------------------------------------------------------------------------


def op_name(info: OpInfo) -> str | None:
    return ops.resolve(info.name) or (ops.resolve(info.aten_name) if info.aten_name else None)


INFOS = [
    info
    for info in op_db
    if op_name(info) is not None
    and torch.float32 in info.dtypes
    and not info.name.startswith("torch.ops.")
    and not info.name.startswith(("empty", "new_empty", "linear_cross"))
    and info.name
    != "_upsample_bilinear2d_aa"  # OpInfo calls it below every Python-visible callable
]


def samples(info: OpInfo, most: int | None) -> Iterator[tuple[Any, ...]]:
    """Yields calls on fp32 inputs: ``most`` of them, evenly spread, or all."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(sample_inputs(info))
    for sample in given[:: 1 + (len(given) - 1) // (most or len(given) or 1)]:
        yield ((sample.input, *sample.args), sample.kwargs)


def attempt(function: Any, call: Any) -> Any:
    """Returns the result of a call, or the error that it raises."""
    args, kwargs = mapped(call, lambda t: t.clone())
    torch.manual_seed(0)
    try:
        return function(*args, **kwargs)
    except Exception as error:  # whatever the op raises is the outcome
        return error


def faults(infos: list[OpInfo], dtype: torch.dtype, most: int | None, **options: Any) -> list[str]:
    """Returns where a call on inputs in ``dtype`` stops, or is not that in fp32, rounded."""
    calls = []
    for info in infos:
        lacking = missing_kernels.lacking_kernels().get(str(op_name(info)))
        is_exact = lacking is not None and ("cpu", dtype) in lacking.always
        is_exact = is_exact and info.name not in NOT_COMPARED
        for call in samples(info, most):
            low = mapped(call, lambda t: t.to(dtype) if t.dtype is FP32 else t)
            wide = mapped(low, lambda t: t.float() if t.dtype is dtype else t)
            for function in (info.op, info.inplace_variant):
                expected = None if function is None else attempt(function, wide)
                if function is not None and not isinstance(expected, Exception):
                    is_compared = is_exact and "dtype" not in call[1]
                    calls.append((info.full_name, function, low, expected, is_compared))
    found = []
    with hmpx.convert(lists="lean", **options):
        for name, function, low, expected, is_compared in calls:
            actual = attempt(current(function), low)
            what = f"{name} {[(tuple(t.shape), t.dtype) for t in tensors(low)]}"
            if isinstance(actual, Exception):
                found.append(f"{what}: {type(actual).__name__}: {actual}")
            elif is_compared:
                found += [f"{what}: {fault}" for fault in differences(actual, expected, low)]
    return found


def differences(actual: Any, expected: Any, call: Any) -> Iterator[str]:
    """Yields where a result is not the one of fp32, rounded to the dtype of the first floating input."""
    first = next((t.dtype for t in tensors(call) if t.is_floating_point()), FP32)
    for got, wide in zip(tensors(actual), tensors(expected), strict=True):
        want = wide.to(first) if wide.dtype is FP32 else wide
        pair = [t.to_dense() if t.layout is not torch.strided else t for t in (got, want)]
        if got.dtype is not want.dtype or not torch.equal(*[t.nan_to_num() for t in pair]):
            yield f"{got} instead of {want}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ops_that_lack_kernels_compute_in_fp32(
    dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    """One sample of each op in the data, bit for bit what fp32 gives, rounded."""
    table = missing_kernels.lacking_kernels()
    lacking = [info for info in INFOS if dtype in table.get(str(op_name(info)), Lacking()).dtypes]
    if not pytestconfig.getoption("whole"):
        lacking = lacking[dtype is FP16 :: 3]
    found = faults(lacking, dtype, 1, low_precision_type=dtype)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lists", [None, "hmp", "autocast-cuda", "*"])
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.formatted_name)
def test_no_op_stops_for_want_of_a_kernel(
    info: OpInfo, lists: str | None, dtype: torch.dtype
) -> None:
    """What runs in fp32 runs on low-precision inputs, whatever the lists."""
    options: dict[str, Any] = {"lists": lists, "low_precision_type": dtype}
    if lists == "*":
        options = {"policy": Policy.from_ops(low=["*"], low_precision_type=dtype)}
    found = faults([info], dtype, None, **options)
    assert not found, "\n".join(found)


# --- each form of call ---------------------------------------------------------------------------


def matrix(dtype: torch.dtype = BF16) -> Tensor:
    torch.manual_seed(0)
    return (torch.eye(4) + 0.1 * torch.rand(4, 4)).to(dtype)


def test_results_have_the_inputs_dtype_and_complex_ones_stay_complex64() -> None:
    """Named tuples stay what they are; indices stay integers."""
    m = matrix()
    with hmpx.convert(lists="lean"):
        assert torch.linalg.inv(m).dtype is BF16
        assert torch.fft.fft(m).dtype is torch.complex64
        assert torch.polar(m, m).dtype is torch.complex64
        assert torch.view_as_complex(m.view(4, 2, 2)).dtype is torch.complex64
        found = torch.linalg.lu_factor(m)
        assert type(found) is torch.return_types.linalg_lu_factor
        assert [t.dtype for t in found] == [BF16, torch.int32]
        assert torch.complex(m.float(), m).dtype is torch.complex64
        assert torch.cdist(m, m).dtype is BF16
        assert torch._standard_gamma(m.abs()).dtype is BF16


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_op_whose_kernels_give_wrong_numbers_computes_in_fp32(dtype: torch.dtype) -> None:
    """Torch's matrix exponential in low precision is 10^30 off, or NaN, without a word."""
    x = (torch.eye(4) / 8).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    expected = torch.linalg.matrix_exp(wide)
    torch.testing.assert_close(expected, math.exp(1 / 8) * torch.eye(4))
    with hmpx.convert(lists="lean", low_precision_type=dtype, device_types={"cpu"}):
        for function in (torch.matrix_exp, torch.linalg.matrix_exp, Tensor.matrix_exp):
            assert torch.equal(function(x), expected.to(dtype))
        (gradient,) = torch.autograd.grad(torch.matrix_exp(x).float().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), wide)[0].to(dtype))


def test_gradients_pass_through_in_the_inputs_dtype() -> None:
    """They are those of fp32, rounded."""
    low = matrix().requires_grad_()
    wide = matrix().float().requires_grad_()
    torch.linalg.inv(wide).sum().backward()
    with hmpx.convert():
        torch.linalg.inv(low).float().sum().backward()
    assert low.grad is not None and wide.grad is not None
    assert low.grad.dtype is BF16
    torch.testing.assert_close(low.grad, wide.grad.bfloat16(), rtol=0.02, atol=0.02)


def test_gradients_without_a_kernel_are_computed_in_fp32() -> None:
    """``special.i1`` has a bfloat16 kernel, and none for its gradient."""
    low = torch.rand(8).bfloat16().requires_grad_()
    with hmpx.convert():
        torch.special.i1(low).float().sum().backward()
    assert low.grad is not None


def test_in_place_and_out_keep_their_tensors() -> None:
    """The target has its storage and its dtype afterwards, and the fp32 result, rounded."""
    m = torch.rand(4, 4).mul(0.5).bfloat16()
    expected = torch.special.ndtri(m.float()).bfloat16()
    with hmpx.convert():
        out = torch.empty(0, dtype=BF16)
        assert torch.special.ndtri(m, out=out) is out
        wide = torch.empty(4, 4)
        assert torch.special.ndtri(m, out=wide) is wide
        values, vectors = torch.empty(4, dtype=BF16), torch.empty(4, 4, dtype=BF16)
        found = torch.linalg.eigh(matrix(), out=(values, vectors))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert wide.dtype is FP32
    assert found[0] is values and found[1] is vectors
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix().float()).bfloat16())


def of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as if a module of torch had defined it."""
    where = {**vars(sys.modules[function.__module__]), "__name__": "torch.functional"}
    return types.FunctionType(function.__code__, where)  # type: ignore[attr-defined]


def callee(function: Callable[..., Any], *, writes: bool = False, random: bool = False) -> Callee:
    names = frozenset({"x"} if writes else ())
    return Callee("op", function, ("x",), names, is_python=False, is_random=random)


SOMETIMES = Lacking(sometimes=frozenset({("cpu", BF16)}))


def test_a_failing_in_place_call_leaves_its_target_as_it_was() -> None:
    """It is computed beside the target, which is written last."""

    def broken(x: Tensor) -> Tensor:
        x.zero_()
        raise ValueError("half done")

    target = torch.ones(3, dtype=BF16)
    with pytest.raises(ValueError, match="half done"):
        missing_kernels.completed(callee(broken, writes=True), SOMETIMES)(target)
    assert target.tolist() == [1, 1, 1]


def test_random_numbers_are_drawn_once() -> None:
    """A call that draws and fails leaves the generator as it was for the one in fp32."""

    @of_torch
    def draw(x: Tensor) -> Tensor:
        noise = torch.rand(3)
        if x.dtype is BF16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return x + noise

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    function = missing_kernels.completed(callee(draw, random=True), SOMETIMES)
    actual = function(torch.zeros(3, dtype=BF16))
    torch.testing.assert_close(actual, expected.bfloat16(), rtol=0, atol=0)


def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """At the level of information: there is nothing to be done about it."""
    missing_kernels._noted.clear()
    with caplog.at_level(logging.INFO, "hmpx"), hmpx.convert(lists="lean"):
        for _ in range(3):
            torch.linalg.inv(matrix())
    assert caplog.messages == ["linalg_inv computes in fp32: cpu has no bf16 kernel for it"]


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_it_holds_where_casts_are_off_and_ends_with_the_conversion() -> None:
    """A tensor that an op before has made low is no reason to stop, wherever it goes."""
    with hmpx.convert(device_types={"cuda"}):
        kept = torch.linalg.inv
        assert torch.linalg.inv(matrix()).dtype is BF16
        with hmpx.disable_casts():
            assert torch.linalg.inv(matrix()).dtype is BF16
    with pytest.raises(RuntimeError):
        torch.linalg.inv(matrix())
    with pytest.raises(RuntimeError):
        kept(matrix())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_low_numbers_are_quantized() -> None:
    """To what their values in fp32 are."""
    low = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(BF16)
    scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "number": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "tensors": lambda x: torch.quantize_per_tensor(x, scales[0], zeros[0], torch.qint8),
        "list": lambda x: torch.quantize_per_tensor([x], scales[:1], zeros[:1], torch.qint8)[0],
        "channels": lambda x: torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
        "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
    }
    expected = {name: call(low.float()) for name, call in calls.items()}
    with hmpx.convert():
        actual = {name: call(low) for name, call in calls.items()}
    for name, each in actual.items():
        assert each.is_quantized, name
        assert torch.equal(each.int_repr(), expected[name].int_repr()), name


class Logged(Tensor):
    """A tensor whose class overrides torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_and_transforms() -> None:
    """What a class or a transform calls in turn has its kernel, too."""
    with hmpx.convert(lists="lean"):
        assert isinstance(torch.linalg.inv(matrix().as_subclass(Logged)), Logged)
        found = torch.func.vmap(torch.linalg.inv)(torch.stack([matrix()] * 2))
    assert found.dtype is BF16


def test_graphs_hold_it() -> None:
    """Without a break, and with what eager mode gives."""

    def function(m: Tensor) -> Tensor:
        return torch.linalg.inv(m) + torch.fft.fft(m).abs() + torch.cdist(m, m)

    with hmpx.convert(legalize="never"):
        expected = function(matrix())
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        actual = compiled(matrix())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class PickyError(Exception):
    """Says nothing of kernels."""


@of_torch
def picky(x: Tensor, y: Tensor) -> Tensor:
    if BF16 in (x.dtype, y.dtype):
        raise RuntimeError("not implemented for 'BFloat16'")
    if x.dim() > 1:
        raise PickyError(f"{x.dtype}: not these shapes")
    return x * y


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("kind", ["low", "first", "widest"])
def test_a_call_whose_dtypes_are_refused_is_tried_in_fp32(kind: str, verbose: bool) -> None:
    """Its result is rounded; what fp32 raises is raised, as if it had been tried alone."""
    x, y = torch.rand(3).bfloat16(), torch.rand(3)
    policy = Policy.from_ops(**{kind: ["dot"]})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "dot", picky)
        session = hmpx.convert(policy=policy, isVerbose=verbose)
        try:
            actual = torch.dot(x, y)
            with pytest.raises(PickyError, match=r"torch\.float32: not these shapes") as caught:
                torch.dot(torch.rand(2, 2), torch.rand(2, 2).bfloat16())
        finally:
            session.revert()
    assert caught.value.__context__ is None
    if kind == "widest":
        torch.testing.assert_close(actual, x.float() * y, rtol=0, atol=0)
    else:
        expected = (x.float() * y.bfloat16().float()).bfloat16()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# --- calls that fail on what they were cast to -----------------------------------------------------


def changing_to(dtype: torch.dtype, *, every: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that casts one in ``every`` fp32 tensors."""
    count = itertools.count()
    return lambda t: t.to(dtype) if t.dtype is FP32 and next(count) % every == 0 else t


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("given", ["low", "mixed"])
def test_the_refusals_of_all_ops_are_known(
    dtype: torch.dtype, given: str, pytestconfig: pytest.Config
) -> None:
    """What a call raises in low or mixed dtypes, and not in fp32, is a refusal."""
    count = 0
    for info in INFOS:
        for call in samples(info, 8 if pytestconfig.getoption("whole") else 1):
            low = mapped(call, changing_to(dtype, every=1 if given == "low" else 2))
            error = attempt(info.op, low)
            wide = mapped(low, lambda t: t.float() if t.dtype is dtype else t)
            if not isinstance(error, Exception) or isinstance(attempt(info.op, wide), Exception):
                continue
            count += 1
            error = error.with_traceback(None)  # its frames are this test's
            assert missing_kernels.is_refusal(error), f"{info.full_name}: {error!r}"
    assert count > 40


def test_checkpoints_recompute_ops_without_kernels() -> None:
    """Their gradients are those without a checkpoint."""

    def block(x: Tensor) -> Tensor:
        return torch.linalg.inv(F.linear(x, torch.eye(4)) + torch.eye(4)).float()

    grads = []
    with hmpx.convert():
        for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
            x = matrix(FP32).requires_grad_()
            run(x).sum().backward()
            grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


# --- sparse beside dense -------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda s, d: torch.mm(s, d),
    "matmul": lambda s, d: torch.matmul(s, d),
    "@": lambda s, d: s @ d,
    "reflected @": lambda s, d: d @ s,
    "method": lambda s, d: s.mm(d),
    "mv": lambda s, d: torch.mv(s, d[0]),
    "spmm": lambda s, d: torch.spmm(s, d),
    "dsmm": lambda s, d: torch.dsmm(s, d),
    "hspmm": lambda s, d: torch.hspmm(s, d),
    "smm": lambda s, d: torch.smm(s, d),
    "sspaddmm": lambda s, d: torch.sspaddmm(s, s, d),
    "addmm": lambda s, d: torch.addmm(d, s, d),
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d),
    "sparse.addmm": lambda s, d: torch.sparse.addmm(d, s, d),
    "sparse.sampled_addmm": lambda s, d: torch.sparse.sampled_addmm(s, d, d),
    "linear": lambda s, d: F.linear(d, s),
    "add": lambda s, d: torch.add(d, s),
    "mul": lambda s, d: torch.mul(s, d),
    "sparse.softmax": lambda s, d: torch.sparse.softmax(s, 1),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("legalize", ["never", "always"])
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_dense_input_has_the_sparse_ones_dtype(layout: str, legalize: str) -> None:
    """All that runs on fp32 inputs runs, and gives what fp32 gives of the rounded dense input."""
    sparse, dense = LAYOUTS[layout](matrix(FP32)), matrix()
    both = LAYOUTS[layout](matrix())
    expected = {}
    for name, product in PRODUCTS.items():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not of this layout
            expected[name] = product(sparse, dense.float())
    assert expected
    with hmpx.convert(legalize=legalize):
        actual = {name: PRODUCTS[name](sparse, dense) for name in expected}
        if layout not in {"bsc", "csc"}:
            for name in expected:
                assert PRODUCTS[name](both, dense).dtype is BF16, name
    for name, wanted in expected.items():
        assert actual[name].dtype is FP32, name
        torch.testing.assert_close(actual[name].to_dense(), wanted.to_dense(), msg=name)


def test_the_sparse_inputs_gradients_are_fp32() -> None:
    """Those of the dense input have its own dtype."""
    sparse, dense = matrix(FP32).to_sparse().requires_grad_(), matrix().requires_grad_()
    with hmpx.convert():
        (sparse @ dense).sum().backward()
    assert sparse.grad is not None and sparse.grad.dtype is FP32
    assert dense.grad is not None and dense.grad.dtype is BF16


@pytest.mark.parametrize("name", ["laguerre_polynomial_l", "zeta"])
def test_mixed_inputs_of_a_kernel_that_promotes_give_fp32(name: str) -> None:
    """It lacks a kernel for low inputs alone, and torch gives fp32 of mixed ones."""
    function = getattr(torch.special, name)
    low, single = torch.tensor([1.5, 2.5], dtype=BF16), torch.tensor([2.0, 3.0])
    expected = function(low, single), function(single, low)
    with hmpx.convert():
        actual = (
            getattr(torch.special, name)(low, single),
            getattr(torch.special, name)(single, low),
        )
        assert getattr(torch.special, name)(low, low).dtype is BF16
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
