"""`Policy.export`: other engines' settings run in those engines, and nothing of a policy is dropped."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import ops
from hmpx.cli import main

ENGINES = ("openvino", "coreml", "fsdp2", "deepspeed", "gaudi")

#: The defaults of Gaudi's bridge, of its autocast_helpers.h.
LOWER = """addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
dot dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv softmax
log_softmax scaled_dot_product_attention"""
FP32 = """acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh
cosine_embedding_loss cosine_similarity cross_entropy_loss dist div divide embedding embedding_bag erfinv exp expm1
hinge_embedding_loss huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
multi_margin_loss multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh
smooth_l1_loss soft_margin_loss softplus tan topk triplet_margin_loss true_divide"""


#: Ops that Gaudi's bridge and torch promote unless a list names them.
PROMOTED = {"add", "addcdiv", "addcmul", "cat", "div", "mul", "stack", "sub"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x + self.inner(x)))
        return F.softmax(logits, -1).pow(2.5).sum(-1)


def policy(low: str = "float16") -> hmpx.Policy:
    sections = [{"module": "head", "fp32": ["linear"]}, {"ndim": 3, "low": ["exp"]}]
    return hmpx.load_policy(policy={"low_precision_type": low, "sections": sections})


def defined(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(text, found)
    return found


def test_gaudi_gets_its_own_defaults_back(tmp_path: Path) -> None:
    text = hmpx.load_policy(lists="autocast-hpu").export("gaudi").text
    shown = (
        "cat $PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST; echo; cat $PT_HPU_AUTOCAST_FP32_OPS_LIST"
    )
    done = subprocess.run(
        ["sh", "-ec", text + shown], cwd=tmp_path, capture_output=True, check=True
    )
    for got, want in zip(
        done.stdout.decode().split("\n\n"), (LOWER.split(), FP32.split()), strict=True
    ):
        names = got.split()
        assert {*want} <= {*names}
        assert {*map(ops.resolve, names)} == {*map(ops.resolve, want)}  # the rest are other names
        assert all(hasattr(torch.ops.aten, name) for name in names)


def test_fsdp2_runs_layers_in_their_types() -> None:
    torch.manual_seed(0)
    model, x, seen = Block(), torch.randn(2, 8), {}
    with hmpx.convert(policy=policy("bfloat16"), device_types={"cpu"}, legalize="never"):
        expected = model(x)
        expected.sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        seen[layer] = {output.dtype, *(each.dtype for each in layer.parameters())}

    for layer in model.children():
        layer.register_forward_hook(note)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        defined(policy("bfloat16").export("fsdp2").text)["shard"](model, mesh=mesh)
        result = model(x)
        result.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    low, wide = {torch.bfloat16}, {torch.float32}
    assert [seen[each] for each in model.children()] == [low, wide, wide]
    assert torch.equal(result, expected)
    for name, each in model.named_parameters():
        assert each.grad is not None
        assert torch.equal(each.grad.full_tensor(), gradients[name])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.inner(self.table(ids))))


@pytest.mark.parametrize("make", [Tied, lambda: nn.Linear(4, 2)])
def test_fsdp2_takes_tied_weights_and_single_layers(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.arange(4) if isinstance(model, Tied) else torch.randn(2, 4)
    seen: list[torch.dtype] = []
    layer = model.inner if isinstance(model, Tied) else model
    layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    text = policy("bfloat16").export("fsdp2").text
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        defined(text)["shard"](model, mesh=mesh)
        model(x).float().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [torch.bfloat16]
    assert all(each.grad is not None for each in model.parameters())


def test_engines_without_a_low_op_stay_off() -> None:
    for lists, is_on in (("none", False), ("hmpx", True)):
        text = hmpx.load_policy(policy={"lists": lists}).export("deepspeed").text
        assert (f'"enabled": {str(is_on).lower()}') in text
    for engine in ENGINES:
        assert all(hmpx.load_policy(policy={"lists": "none"}).export(engine).unsaid.values())
    said = hmpx.load_policy(policy={"lists": "none", "low": ["linear"]}).export("fsdp2").unsaid
    assert [(ops, "nn.MultiheadAttention" in why) for why, ops in said.items()] == [
        (("linear",), True)
    ]


def test_deepspeed_gets_a_block_of_classes() -> None:
    text = policy("bfloat16").export("deepspeed").text
    block = json.loads(re.sub("^//.*$", "", text, flags=re.MULTILINE))
    assert [*block] == ["torch_autocast"]
    assert (block["torch_autocast"]["enabled"], block["torch_autocast"]["dtype"]) == (
        True,
        "bfloat16",
    )
    classes = set()
    for name in block["torch_autocast"]["lower_precision_safe_modules"]:
        package, _, attribute = name.rpartition(".")
        classes.add(getattr(importlib.import_module(package), attribute))
    assert {nn.Linear, nn.Conv2d, nn.ConvTranspose1d, nn.LSTM} <= classes
    assert not {nn.LayerNorm, nn.Embedding, nn.BatchNorm1d} & classes


def test_all_layers_with_weights_are_known() -> None:
    """Found by the names in their code."""
    known = hmpx.policy.engines._LAYERS
    for name, layer in vars(nn).items():
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)) or name.startswith(
            "Lazy"
        ):
            continue
        methods = [
            layer.forward,
            getattr(layer, "_conv_forward", None),
            getattr(layer, "_apply_instance_norm", None),
        ]
        code = [each.__code__ for each in methods if hasattr(each, "__code__")]
        called = {ops.resolve(each) for one in code for each in one.co_names} & ops.table().keys()
        takes = {
            op
            for op in called
            for site in ops.table()[op].sites
            if {"weight", "params", "w_ih"} & {*ops.parameters(site).names}
            and ops.role(op) != "loss"
        }
        if name not in {"MultiheadAttention", "TransformerEncoderLayer", "LinearCrossEntropyLoss"}:
            assert takes == {*known.get(name, ())}, name


def test_openvino_keeps_nodes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes as OpenVINO 2026 names them, of a module and of torch.export."""
    names = {
        "__module.inner/aten::linear/MatMul": False,
        "__module.head/aten::linear/MatMul": True,
        "__module.layers.0.norm/aten::layer_norm/MVN": True,
        "aten::softmax/Softmax": True,
        "_softmax/aten._softmax.default/Softmax": True,
        "pow_1/aten.pow.Tensor_Scalar/Power": True,
        "aten::gelu/Gelu": False,
        "self.head.weight": False,
    }
    nodes = []
    for name in names:
        info: dict[str, str] = {}
        nodes.append(
            types.SimpleNamespace(
                get_friendly_name=lambda name=name: name, get_rt_info=lambda info=info: info
            )
        )
    stub = types.SimpleNamespace(experimental=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "openvino", stub)
    keep_fp32 = defined(policy().export("openvino").text)["keep_fp32"]
    kept = keep_fp32(types.SimpleNamespace(get_ops=lambda: nodes))
    assert kept == [name for name, is_kept in names.items() if is_kept]
    assert ["precise_0" in node.get_rt_info() for node in nodes] == [*names.values()]


@pytest.mark.filterwarnings("ignore")
def test_openvino_itself(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model = openvino.convert_model(Block().eval(), example_input=torch.randn(2, 8))
    kept = defined(policy().export("openvino").text)["keep_fp32"](model)
    assert {each.split("/")[-2] for each in kept} == {
        "aten::linear", "aten::layer_norm", "aten::softmax", "aten::pow", "aten::sum",
    }  # fmt: skip
    assert not any("inner" in each for each in kept)
    openvino.save_model(model, tmp_path / "m.xml")
    assert (tmp_path / "m.xml").read_text().count("DisablePrecisionConversion") == len(kept)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_traced", [True, False])
def test_coreml_itself(is_traced: bool) -> None:
    coremltools = pytest.importorskip("coremltools")
    model, x = Block().eval(), torch.randn(2, 8)
    selector = defined(policy().export("coreml").text)["op_selector"](model)
    found = coremltools.convert(
        torch.jit.trace(model, x) if is_traced else torch.export.export(model, (x,)).run_decompositions({}),
        compute_precision=coremltools.transform.FP16ComputePrecision(op_selector=selector),
        convert_to="mlprogram",
        **({"inputs": [coremltools.TensorType(shape=x.shape)]} if is_traced else {}),
    )  # fmt: skip
    operations = found._mil_program.functions["main"].operations
    low = [
        each.op_type
        for each in operations
        if each.name.endswith("_fp16") and each.op_type != "cast"
    ]
    assert [each for each in low if each != "const"] == ["linear", "add"] + ["linear"] * (
        not is_traced
    )


def test_coreml_by_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations as coremltools 9 describes them."""
    source = types.SimpleNamespace(TORCHSCRIPT_MODULE_TYPE="type", TORCHSCRIPT_MODULE_NAME="name")
    stub = types.SimpleNamespace(ScopeSource=source)
    monkeypatch.setitem(sys.modules, "coremltools.converters.mil.mil.scope", stub)
    for part in (
        "coremltools",
        "coremltools.converters",
        "coremltools.converters.mil",
        "coremltools.converters.mil.mil",
    ):
        monkeypatch.setitem(sys.modules, part, types.SimpleNamespace(__path__=[]))
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "head": Block()})
    given = {
        "low_precision_type": "float16",
        "sections": [{"module": "layers.1", "fp32": ["linear"]}],
    }
    text = hmpx.load_policy(policy=given).export("coreml").text
    selector = defined(text)["op_selector"](model)
    cases: list[tuple[str, dict[str, list[str]], bool]] = [
        ("linear_0", {"type": ["Block", "Linear", "linear"], "name": ["0", "inner", "7"]}, True),
        ("linear_1", {"type": ["Block", "Linear", "linear"], "name": ["1", "inner", "9"]}, False),
        ("28", {"type": ["sum"], "name": ["28"]}, False),
        ("36", {"type": ["gelu"], "name": ["36"]}, True),
        ("pow_1", {}, False),
    ]
    for name, scopes, is_low in cases:
        assert selector(types.SimpleNamespace(name=name, scopes=scopes)) is is_low


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_dropped(engine: str) -> None:
    given = {
        "low_precision_type": "bfloat16",
        "lists": "hmpx",
        "low": {"add": ["gelu output=float32", "conv2d float16", "tanh float8_e4m3fn"]},
        "follow": ["relu"],
        "sections": [
            {"module": "a.*", "fp32": ["linear", "relu"]},
            {"module_class": "Linear", "low": ["softmax"]},
        ],
    }
    loaded = hmpx.load_policy(policy=given)
    settings = loaded.export(engine)
    said = " ".join(name for names in settings.unsaid.values() for name in names)
    words = {*re.findall(r"[\w.]+", said + settings.text)}
    autocast = hmpx.load_policy(lists="autocast-cuda")
    for op in loaded.decisions:
        same = [op, ops.root(op), *[n for n, each in ops.names().items() if each == ops.root(op)]]
        if engine in {"gaudi", "deepspeed"} and ops.root(op) in PROMOTED:
            continue
        if engine == "deepspeed" and autocast[op].cast_policy is loaded[op].cast_policy:
            continue  # it runs torch.autocast
        assert words & {*same}, op
    flat = {reason: " ".join(names) for reason, names in settings.unsaid.items()}
    for reason, op in (
        ("number formats", "tanh"),
        ("output", "gelu"),
        ("FOLLOW: types by inputs", "relu"),
        (
            "sections with these conditions",
            "module_class ['Linear'] (<policy>['sections'][1]): softmax",
        ),
    ):
        assert op in flat[reason]
        assert reason in settings.text
    if engine in {"gaudi", "deepspeed"}:
        assert "conv2d" in flat["another type than bfloat16 and float32"]
        assert (
            "module ['a.*'] (<policy>['sections'][0]): linear, relu"
            in flat["sections with these conditions"]
        )
    assert str(settings) == settings.text


def test_the_command_and_wrong_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--lists", "autocast-hpu", "--engine", "gaudi"]) == 0
    assert capsys.readouterr().out == hmpx.load_policy(lists="autocast-hpu").export("gaudi").text
    with pytest.raises(hmpx.OptionError, match="engine must be"):
        hmpx.load_policy().export("tensorrt")
