"""Ops of other libraries, by dotted name: listed, found, wrapped, cast, put back."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx import CastPolicy, cli, ops
from hmpx.tensors import leaves

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

INIT = """
from .functions import fused_norm as reexported
"""

FUNCTIONS = """
import functools
import torch
from torch import nn
import torch.nn.functional as F

def fused_norm(x, weight, bias=None, *, eps=1e-5):
    "Returns the dtypes that it gets, and the product."
    product = F.linear(x, weight) if x.dtype == weight.dtype else None
    return x.dtype, weight.dtype, product

def mean_of(tensors, out=None):
    return [tensor.dtype for tensor in tensors]

def shift_(x, y):
    assert x.dtype is y.dtype
    return x.add_(y)

def no_half(x):
    if x.dtype is not torch.float32:
        raise NotImplementedError("no_half not implemented for 'BFloat16'")
    return x * 2

TABLE = {"norm": fused_norm}
PARTIAL = functools.partial(fused_norm, eps=1e-6)

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w if x.dtype is w.dtype else x.sum()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x

class Wider(Scale):
    pass

scale = Scale.apply

class Block(nn.Module):
    def method(self, a, b):
        return a.dtype, b.dtype

    @staticmethod
    def static(a, b):
        return a.dtype, b.dtype

    @classmethod
    def of_class(cls, a, b):
        return cls, a.dtype, b.dtype

class Derived(Block):
    pass
"""

OPERATORS = """
import torch

@torch.library.custom_op("NAMESPACE::scaled_add", mutates_args=())
def scaled_add(a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
    assert a.dtype is b.dtype
    return a + factor * b

@scaled_add.register_fake
def _(a, b, factor):
    assert a.dtype is b.dtype
    return torch.empty_like(a)

def setup(ctx, inputs, output):
    ctx.factor = inputs[2]

scaled_add.register_autograd(lambda ctx, g: (g, g * ctx.factor, None), setup_context=setup)

lib = torch.library.Library("NAMESPACE", "FRAGMENT")
lib.define("mix(Tensor a, Tensor b) -> Tensor")
lib.define("mix.number(Tensor a, float b) -> Tensor")
lib.define("inc(Tensor(a!) a, Tensor b) -> ()")

def mix(a, b):
    assert a.dtype is b.dtype
    return a.clone()

def inc(a, b):
    assert a.dtype is b.dtype
    a.add_(b)

lib.impl("mix", mix, "CompositeExplicitAutograd")
lib.impl("mix.number", lambda a, b: a.clone(), "CompositeExplicitAutograd")
lib.impl("inc", inc, "CompositeExplicitAutograd")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the name of a package that can be imported, and is not."""
    name = f"library_{uuid.uuid4().hex}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "operators.py").write_text(OPERATORS.replace("NAMESPACE", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield name
    hmpx.revert()
    assert sys.meta_path == finders, "an import hook is left"
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


def only(**lists: list[str]) -> hmpx.Policy:
    return hmpx.Policy.from_ops(**lists)  # type: ignore[arg-type]


def mixed() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 2), torch.ones(2, 2, dtype=BF16)


LISTS = [("low", BF16, BF16), ("fp32", FP32, FP32), ("widest", FP32, FP32), ("first", FP32, FP32)]


@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported after"])
@pytest.mark.parametrize(("kind", "x_dtype", "weight_dtype"), LISTS)
def test_a_function_is_cast_as_its_list_says(
    package: str, kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, is_early: bool
) -> None:
    """By every name that it has, also those taken before; and not once reverted."""
    name = f"{package}.functions.fused_norm"
    module = importlib.import_module(f"{package}.functions") if is_early else None
    with hmpx.convert(policy=only(**{kind: [name]})) as active:
        module = module or importlib.import_module(f"{package}.functions")
        held = sys.modules[package].reexported, module.TABLE["norm"], module.PARTIAL
        for function in (module.fused_norm, *held):
            assert function(*mixed())[:2] == (x_dtype, weight_dtype)
            assert function(weight=mixed()[1], x=mixed()[0])[:2] == (x_dtype, weight_dtype)
        assert active.policy[name].cast_policy is CastPolicy[kind.upper()]
        assert active.policy[f"{package}.reexported"] == active.policy[name]
        assert module.fused_norm.__doc__.startswith("Returns the dtypes")
    assert module.fused_norm(*mixed())[:2] == (FP32, BF16)
    assert sys.modules[package].reexported(*mixed())[:2] == (FP32, BF16)
    assert not hasattr(module.fused_norm, "__wrapped__")
    assert module.fused_norm is module.TABLE["norm"]


def test_float64_lists_and_keywords_follow_the_rules(package: str) -> None:
    """A float64 input leaves the call alone; tensors in lists are cast."""
    functions = f"{package}.functions"
    with hmpx.convert(policy=only(low=[f"{functions}.fused_norm", f"{functions}.mean_of"])):
        module = importlib.import_module(functions)
        assert module.fused_norm(torch.ones(2, dtype=FP64), torch.ones(2))[:2] == (FP64, FP32)
        assert module.mean_of([*mixed()]) == [BF16, BF16]
        with hmpx.disable_casts():
            assert module.mean_of([*mixed()]) == [FP32, BF16]


def test_what_is_written_to_keeps_its_dtype(package: str) -> None:
    """A function with a trailing underscore writes to its first argument, as torch's do."""
    name = f"{package}.functions.shift_"
    with hmpx.convert(policy=only(low=[name])):
        module = importlib.import_module(f"{package}.functions")
        x = torch.ones(2)
        assert module.shift_(x, torch.ones(2, dtype=BF16)) is x
        assert x.dtype is FP32
        assert x.tolist() == [2, 2]


def test_an_op_is_atomic(package: str) -> None:
    """While a listed function runs, the ops in it are not cast; those of an unlisted one are."""
    x = torch.ones(2, 2)
    with hmpx.convert(policy=only(low=["linear"], fp32=[f"{package}.functions.fused_norm"])):
        module = importlib.import_module(f"{package}.functions")
        assert module.fused_norm(x, x)[2].dtype is FP32
    with hmpx.convert(policy=only(low=["linear"])):
        assert module.fused_norm(x, x)[2].dtype is BF16


def test_a_kernel_that_lacks_the_type_is_run_in_fp32(package: str) -> None:
    """As torch's ops: the result is rounded."""
    with hmpx.convert(policy=only(low=[f"{package}.functions.no_half"])):
        module = importlib.import_module(f"{package}.functions")
        assert module.no_half(torch.ones(2)).dtype is BF16


def test_methods_are_cast_for_their_class(package: str) -> None:
    """Methods, static ones, those of the class; an inherited one for the class that is named."""
    names = ["Block.method", "Block.static", "Block.of_class", "Scale.apply"]
    policy = only(low=[f"{package}.functions.{name}" for name in names])
    module = importlib.import_module(f"{package}.functions")
    before = {c: dict(vars(c)) for c in (module.Block, module.Derived, module.Scale)}
    with hmpx.convert(policy=policy):
        block = module.Derived()
        assert block.method(*mixed()) == block.static(*mixed()) == (BF16, BF16)
        assert module.Block.static(*mixed()) == (BF16, BF16)
        assert module.Derived.of_class(*mixed()) == (module.Derived, BF16, BF16)
        x = torch.ones(2, 2, requires_grad=True)
        y = module.Scale.apply(x, mixed()[1])
        assert y.dtype is BF16
        assert module.Wider.apply(*mixed()).dtype is BF16
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is FP32
    assert {c: dict(vars(c)) for c in before} == before


@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported after"])
@pytest.mark.parametrize(("kind", "dtype"), [("low", BF16), ("fp32", FP32)])
def test_an_operator_of_torch_library_is_cast_however_it_is_called(
    package: str, kind: str, dtype: torch.dtype, is_early: bool
) -> None:
    """By the object of its decorator, by packet and by overload, taken before or after."""
    if is_early:
        importlib.import_module(f"{package}.operators")
    names = [f"torch.ops.{package}.{name}" for name in ("scaled_add", "mix", "inc")]
    with hmpx.convert(policy=only(**{kind: names})) as active:
        module = importlib.import_module(f"{package}.operators")
        space = getattr(torch.ops, package)
        x, w = torch.ones(2, requires_grad=True), torch.ones(2, dtype=BF16)
        for call in (module.scaled_add, space.scaled_add, space.scaled_add.default):
            y = call(x, w, 2.0)
            assert y.dtype is dtype
            assert y.tolist() == [3, 3]
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is FP32
        x = x.detach()
        assert space.mix(x, w).dtype is space.mix.default(x, w).dtype is dtype
        assert space.mix(x, 2.0).dtype is space.mix.number(x, 2.0).dtype is dtype
        target = torch.ones(2)
        space.inc(target, w)
        assert target.dtype is FP32
        assert target.tolist() == [2, 2]
        same = f"{package}.operators.scaled_add"
        assert active.policy[same].cast_policy is active.policy[names[0]].cast_policy
        assert active.policy[f"{names[1]}.number"] == active.policy[names[1]]
        hashes = [hash(space.mix), hash(space.mix.default)]
    assert [hash(space.mix), hash(space.mix.default)] == hashes
    with pytest.raises(AssertionError):
        space.mix(x, w)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_have_the_casts(package: str, backend: str) -> None:
    """A function is traced through without a break; an operator's inputs are cast outside of it."""
    names = [f"{package}.functions.fused_norm", f"torch.ops.{package}.mix"]
    with hmpx.convert(policy=only(low=names)):
        functions = importlib.import_module(f"{package}.functions")
        operators = importlib.import_module(f"{package}.operators")

        @torch.compile(fullgraph=True, backend=backend)
        def compute(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mix = getattr(torch.ops, package).mix
            return functions.fused_norm(x, w)[2], mix(x, w), mix.default(x, w)

        assert [each.dtype for each in compute(*mixed())] == [BF16, BF16, BF16]
    del operators


def test_a_conversion_replaces_another(package: str) -> None:
    """Names taken during the first follow the second, and are torch's own afterwards."""
    name = f"{package}.functions.fused_norm"
    hmpx.convert(policy=only(low=[name]))
    module = importlib.import_module(f"{package}.functions")
    kept = module.fused_norm
    hmpx.convert(policy=only(fp32=[name]))
    assert kept(*mixed())[:2] == module.fused_norm(*mixed())[:2] == (FP32, FP32)
    hmpx.revert()
    assert kept(*mixed())[:2] == module.fused_norm(*mixed())[:2] == (FP32, BF16)


def test_reverting_leaves_no_trace(package: str) -> None:
    """Neither in the import system, nor in torch's operators."""
    namespace = torch._ops._OpNamespace
    before = sys.meta_path[:], dict(vars(namespace)), torch._ops._refresh_packet
    hmpx.convert(policy=only(low=[f"torch.ops.{package}.mix", f"{package}.functions.fused_norm"]))
    assert len(sys.meta_path) > len(before[0])
    hmpx.revert()
    assert (sys.meta_path, dict(vars(namespace)), torch._ops._refresh_packet) == before


def test_the_log_says_what_it_says_of_torchs_ops(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a decision, with the list's line."""
    policy = only(low=[f"{package}.functions.fused_norm"])
    with (
        caplog.at_level(logging.INFO, logger="hmpx"),
        hmpx.convert(policy=policy, isVerbose="once"),
    ):
        importlib.import_module(f"{package}.functions").fused_norm(*mixed())
    (line,) = [record.getMessage() for record in caplog.records]
    start = f"casting  {package}.functions.fused_norm(fp32, bf16)  to_bf16  LOW by <low>:1  at "
    assert line.startswith(start + os.path.relpath(__file__))


def test_rules_and_sections_decide_calls(package: str) -> None:
    """As for torch's ops, before the lists do."""
    name = f"{package}.functions.fused_norm"
    policy = {
        "lists": "none",
        "fp32": [name],
        "sections": [{"min_numel": 5, "low": [name]}],
    }
    with hmpx.convert(policy=policy):
        module = importlib.import_module(f"{package}.functions")
        large = torch.ones(3, 3)
        assert module.fused_norm(large, large)[:2] == (BF16, BF16)
        assert module.fused_norm(*mixed())[:2] == (FP32, FP32)
        hmpx.register_rule(name, lambda call: hmpx.DENY if call.shapes[0].numel() > 8 else None)
        try:
            assert module.fused_norm(large, large)[:2] == (FP32, FP32)
        finally:
            hmpx.unregister_rule(name)
        assert module.fused_norm(large, large)[:2] == (BF16, BF16)


def test_outputs_can_be_given_the_dtype_of_the_input() -> None:
    """``output=input``, of any op: what the first floating input was given in, by whatever name."""
    x, w = torch.randn(3, 4, dtype=FP16), torch.randn(2, 4)
    for kind in ("low", "fp32", "widest"):
        with hmpx.convert(policy={"lists": "none", kind: ["linear output=input"]}) as active:
            assert torch.nn.functional.linear(x, w).dtype is FP16
            assert torch.nn.functional.linear(weight=w, input=x).dtype is FP16
            assert torch.nn.functional.linear(x.float(), w).dtype is FP32
            again = hmpx.load_policy(policy=active.policy)
            assert again["linear"].output_dtype == "input"
            assert "linear output=input" in active.policy.to_yaml()
    with hmpx.convert(policy={"lists": "none", "fp32": ["linear output=input"]}):
        expected = torch.nn.functional.linear(x, w)
    assert torch.equal(expected, torch.nn.functional.linear(x.float(), w).half())
    with pytest.raises(hmpx.HmpxError, match="number format"):
        hmpx.load_policy(policy={"lists": "none", "low": ["linear float8_e4m3fn output=input"]})


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision.ops.nms", "torchvision.ops.nms"),
        ("nms", "torchvision.ops.nms"),  # HMP's name
        ("mylib::scaled_add", "torch.ops.mylib.scaled_add"),
        ("torch.ops.mylib.scaled_add.default", "torch.ops.mylib.scaled_add"),
        ("torch.ops.aten.add", "add"),
        ("pow.Tensor_Scalar", "pow"),
        ("torch.nn.Linear.forward", "torch.nn.Linear.forward"),
        ("torch.nn.functional.sofmax", None),
        ("torch.nn.Linear.forwards", None),
        ("Tensor.sofmax", None),
        ("nn.functional.sofmax", None),
        ("pow.Foo", None),
        ("torch.save", None),
        ("torch.ops.aten.sofmax", None),
        ("a..b", None),
        ("a.b()", None),
    ],
)
def test_names_resolve(name: str, expected: str | None) -> None:
    """What is no name of torch's own may be one of another library; a torch name is checked."""
    assert ops.resolve(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "__import__",
        "os.system",
        "builtins.eval",
        "importlib.import_module",
        "my_package.__class__.mro",
        "my_package.function.__globals__",
        "hmpx.convert",
        "-os.system",
    ],
)
def test_names_that_are_nobodys_ops_are_unknown(name: str, tmp_path: Path) -> None:
    """Python's own functions, and hmpx's, in any list."""
    path = tmp_path / "bf16.txt"
    path.write_text(f"linear\n{name}\n")
    with pytest.warns(hmpx.HmpxWarning, match=r"bf16\.txt:2: unknown op"):
        policy = hmpx.load_policy(path)
    assert name.removeprefix("-") not in policy.decisions


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("functions.nn.functional.relu", "is torch's own function; list it by the name"),
        ("functions.F.gelu", "is torch's own function; list it by the name"),
        ("functions.functools.reduce", "is a function of"),
        ("functions.Block", "is a class; list a function of it"),
        ("functions.TABLE", "is not a function but a dict"),
        ("functions.fused_nrom", "has no 'fused_nrom'; did you mean 'fused_norm'?"),
        ("functions.Block.methodx", "has no 'methodx'; did you mean 'method'?"),
    ],
)
@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported after"])
def test_what_a_module_lacks_is_said(
    package: str, tmp_path: Path, attribute: str, said: str, is_early: bool
) -> None:
    """With file, line and the nearest name, once the module is there; torch is left alone."""
    path = tmp_path / "bf16.txt"
    path.write_text(f"linear\n{package}.{attribute}\n")
    if is_early:
        importlib.import_module(f"{package}.functions")
        with pytest.warns(hmpx.HmpxWarning) as caught:
            hmpx.convert(path)
        with pytest.raises(hmpx.OpListError, match=r"bf16\.txt:2: "):
            hmpx.load_policy(path, strict=True)
    else:
        hmpx.convert(path)
        with pytest.warns(hmpx.HmpxWarning) as caught:
            importlib.import_module(f"{package}.functions")
    (warning,) = caught
    assert f"{path}:2: " in str(warning.message)
    assert said in str(warning.message)
    assert warning.filename == __file__ or not is_early


def test_a_library_that_is_not_installed_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for those who ask: strict mode, and the linter."""
    path = tmp_path / "bf16.txt"
    path.write_text("linear\nno_such_library.function\n")
    with hmpx.convert(path) as active:
        assert active.policy["no_such_library.function"].cast_policy is CastPolicy.LOW
    with pytest.raises(hmpx.OpListError, match=r"bf16\.txt:2: no library 'no_such_library'"):
        hmpx.convert(path, strict=True)
    assert cli.main(["check", str(path)]) == 1
    assert f"{path}:2: no library 'no_such_library' is installed" in capsys.readouterr().out
    policy = tmp_path / "policy.yaml"
    policy.write_text("lists: none\nlow: [no_such_library.function]\n")
    assert cli.main(["check", str(policy)]) == 1
    assert "policy.yaml:2: no library" in capsys.readouterr().out


def test_two_names_of_one_op_in_two_lists_are_told(package: str, tmp_path: Path) -> None:
    """The first wins: which it is, no reader of the lists can know before the module is there."""
    low, fp32 = tmp_path / "bf16.txt", tmp_path / "fp32.txt"
    low.write_text(f"{package}.functions.fused_norm\n")
    fp32.write_text(f"{package}.reexported\n")
    importlib.import_module(package)
    with pytest.warns(hmpx.HmpxWarning, match=r"fp32\.txt:1: .*bf16\.txt:1; keep one"):
        hmpx.convert(low, fp32)
    assert sys.modules[package].reexported(*mixed())[:2] == (BF16, BF16)


@pytest.mark.parametrize("lists", ["hmp", "autocast-cpu", "autocast-cuda"])
def test_torchvisions_ops_are_in_every_shipped_policy(lists: str) -> None:
    """In fp32, with the input's type for the result; also beside lists of the user's own."""
    policy = hmpx.load_policy(lists=lists)
    for name in ("nms", "torchvision.ops.roi_align", "torch.ops.torchvision.deform_conv2d"):
        assert policy[name].cast_policy is CastPolicy.FP32
    assert policy["torchvision.ops.roi_align"].output_dtype == "input"
    assert hmpx.load_policy(opt_level="O2")["nms"].cast_policy is CastPolicy.FP32


def test_a_line_takes_a_shipped_op_away(tmp_path: Path) -> None:
    """Or puts it elsewhere, whatever the file includes."""
    path = tmp_path / "fp32.txt"
    path.write_text("@hmp\n-torchvision.ops.nms\n")
    policy = hmpx.load_policy("", path)
    assert policy["torchvision.ops.nms"].cast_policy is CastPolicy.PASS
    assert policy["torchvision.ops.roi_align"].cast_policy is CastPolicy.FP32
    given = {"lists": "hmp", "fp32": {"remove": ["nms"]}, "low": ["roi_align"]}
    policy = hmpx.load_policy(policy=given)
    assert policy["torchvision.ops.nms"].cast_policy is CastPolicy.PASS
    assert policy["torchvision.ops.roi_align"].cast_policy is CastPolicy.LOW
    assert hmpx.load_policy(policy={"lists": "none", "low": ["mm"]})["nms"].reason == "in no list"


# --- torchvision -------------------------------------------------------------------------------


Cast = Callable[[torch.Tensor], torch.Tensor]


def of_torchvision() -> dict[str, Callable[[types.ModuleType, Cast, Cast], torch.Tensor]]:
    """Returns calls of torchvision's ops, with inputs cast in two ways."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 16, 16, generator=generator)
    rois = torch.tensor([[0, 1.0, 1.0, 9.0, 9.0], [0, 2.0, 2.0, 12.0, 12.0]])
    boxes = torch.rand(10, 4, generator=generator) * 10
    boxes[:, 2:] += boxes[:, :2]
    scores, ids = torch.rand(10, generator=generator), torch.zeros(10, dtype=torch.long)
    offset, weight = torch.randn(1, 18, 14, 14), torch.randn(4, 8, 3, 3)
    return {
        "nms": lambda v, a, b: v.nms(a(boxes), b(scores), 0.5),
        "batched_nms": lambda v, a, b: v.batched_nms(a(boxes), b(scores), ids, 0.5),
        "roi_align": lambda v, a, b: v.roi_align(a(x), b(rois), 4),
        "RoIAlign": lambda v, a, b: v.RoIAlign(4, 1.0, 2)(a(x), b(rois)),
        "roi_pool": lambda v, a, b: v.roi_pool(a(x), b(rois), 4),
        "ps_roi_align": lambda v, a, b: v.ps_roi_align(a(x), b(rois), 2),
        "ps_roi_pool": lambda v, a, b: v.ps_roi_pool(a(x), b(rois), 2),
        "deform_conv2d": lambda v, a, b: v.deform_conv2d(a(x), b(offset), b(weight)),
        "torch.ops": lambda v, a, b: torch.ops.torchvision.nms(a(boxes), b(scores), 0.5),
    }


@pytest.mark.parametrize("lists", ["hmp", "autocast-cpu"])
@pytest.mark.parametrize("name", of_torchvision())
def test_torchvisions_ops_compute_in_fp32(name: str, lists: str) -> None:
    """On mixed and low inputs; the result is that of fp32, rounded to the first input's type."""
    vision = pytest.importorskip("torchvision").ops
    call = of_torchvision()[name]
    for a, b in itertools.product((FP32, BF16), repeat=2):
        expected = call(vision, lambda t, a=a: t.to(a).float(), lambda t, b=b: t.to(b).float())
        with hmpx.convert(lists=lists):
            result = call(vision, lambda t, a=a: t.to(a), lambda t, b=b: t.to(b))
        assert result.dtype is (a if expected.is_floating_point() else torch.int64)
        assert torch.equal(result, expected.to(result.dtype))


# --- torch's quantized modules --------------------------------------------------------------------


def quantized_modules() -> dict[str, Callable[[], Callable[[torch.Tensor], Any]]]:
    """Returns modules that quantize what they are given, made for vectors of eight elements."""
    dynamic = torch.ao.nn.quantized.dynamic
    return {
        "Linear": lambda: dynamic.Linear(8, 4),
        "Linear, fp16": lambda: dynamic.Linear(8, 4, dtype=torch.float16),
        "LSTM": lambda: dynamic.LSTM(8, 4),
        "LSTM, fp16": lambda: dynamic.LSTM(8, 4, dtype=torch.float16),
        "GRU": lambda: dynamic.GRU(8, 4),
        "LSTMCell": lambda: dynamic.LSTMCell(8, 4),
        "GRUCell": lambda: dynamic.GRUCell(8, 4),
        "RNNCell, tanh": lambda: dynamic.RNNCell(8, 4),
        "RNNCell, relu": lambda: dynamic.RNNCell(8, 4, nonlinearity="relu"),
    }


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("lists", ["hmpx", "autocast-cpu"])
@pytest.mark.parametrize("name", quantized_modules())
def test_modules_that_quantize_take_what_low_ops_give(name: str, lists: str) -> None:
    """The result is that of fp32, rounded to the input's type."""
    torch.manual_seed(0)
    module = quantized_modules()[name]()
    x = torch.randn(6, 8)
    x = x if "Cell" in name or "Linear" in name else x[:, None]
    low = x.to(BF16)
    expected = leaves([module(low.float())])
    with hmpx.convert(lists=lists):
        actual = leaves([module(low)])
        unrounded = leaves([module(x)])
    output = FP32 if name == "LSTM, fp16" else BF16  # it hands on `dtype=torch.float16`
    assert {each.dtype for each in actual} == {output}
    assert all(torch.equal(a, e.to(output)) for a, e in zip(actual, expected, strict=True))
    assert {each.dtype for each in unrounded} == {FP32}
