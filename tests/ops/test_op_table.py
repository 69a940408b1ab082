"""The ops table: complete against torch.overrides and OpInfo, and its facts against torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions, resolve_name
from torch.testing._internal.common_methods_invocations import op_db

import hmpx
from hmpx import Policy, ops
from hmpx.ops.schemas import schemas_named


def test_every_overridable_function_is_an_op() -> None:
    """Everything that torch.overrides lists resolves, by the name that torch gives it."""

    def is_torchs(function: Any) -> bool:  # Lightning replaces torch.compile when it is imported
        module = getattr(function, "__globals__", {}).get("__name__", "torch")
        return str(module).startswith("torch")

    missing = [
        name
        for functions in get_overridable_functions().values()
        for function in filter(is_torchs, functions)
        if (name := resolve_name(function)) and ops.resolve(name) is None
    ]
    # A class, and what would make tensors sequences.
    assert missing == ["torch.autocast", "torch.Tensor.__getitem__"]


def test_aliases_agree_with_opinfo() -> None:
    """Every alias in torch's OpInfo database resolves to its op."""
    differing = {}
    for info in op_db:
        for alias in info.aliases:
            name = alias.name.removeprefix("torch.")
            op, of_alias = ops.resolve(info.name), ops.resolve(name)
            if op is not None and of_alias is not None and op != of_alias:
                differing[name] = (of_alias, op)
    # OpInfo's max and min cover their two-argument form only; hmpx keeps the names apart.
    assert differing == {"maximum": ("maximum", "max"), "minimum": ("minimum", "min")}


def test_facts_name_ops_that_exist() -> None:
    """Every name in ops.ini that this torch should have, it has."""
    sections = (
        "promotes",
        "parameters",
        "mixed_parameters",
        "refused_parameters",
        "writes",
        "writes_if",
        "never_narrow",
    )
    for section in sections:
        for name, words in ops.facts(section).items():
            assert name in ops.table(), (section, name)
            known = {n for site in ops.table()[name].sites for n in ops.parameters(site).names}
            assert section.endswith("d_parameters") or known.issuperset(words), (section, name)
    for alias, (name,) in ops.facts("aliases").items():
        assert name in ops.table(), alias
        assert ops.resolve(alias) == name
    for qualified in ops.facts("python_level"):
        name = ops.resolve(qualified)
        assert name is not None, qualified
        sites = [site for site in ops.table()[name].sites if site.qualified == qualified]
        assert all(site.is_python for site in sites), qualified
        assert sites or qualified.startswith("torch.functional"), qualified


def test_every_norm_is_known_as_one() -> None:
    """What takes an input, a weight and an epsilon is a norm: its parameters may stay fp32."""
    known = ops.facts("parameters")
    for name in ops.table():
        for schema in schemas_named(name):
            arguments = {argument.name for argument in schema.arguments}
            if {"input", "weight"} <= arguments and arguments & {"eps", "epsilon"}:
                named = {"weight", "bias"} & arguments
                assert named <= set(known.get(name, ())) or name == "quantized_batch_norm", name


def test_functions_that_torch_calls_in_vf_are_known() -> None:
    """torch.nn's calls of them are cast, as those of torch's own functions are."""
    root = Path(torch.__file__).parent
    files = [root / "functional.py", root / "_tensor.py", *(root / "nn").rglob("*.py")]
    called = {name for f in files for name in re.findall(r"\b_VF\.(\w+)", f.read_text("utf-8"))}
    assert len(called) > 20
    assert called <= ops.facts("called_in_vf").keys()


@pytest.mark.parametrize(
    ("name", "spellings"),
    {
        "matmul": {
            "torch.matmul", "torch.Tensor.matmul", "torch.Tensor.__matmul__",
            "torch.linalg.matmul",
        },
        "softmax": {
            "torch.softmax", "torch.Tensor.softmax", "torch.special.softmax",
        },
        "conv2d": {"torch.conv2d", "torch.nn.functional.conv2d"},
        "truediv": {"torch.Tensor.__truediv__"},
        "dropout2d": {"torch.nn.functional.dropout2d"},
        "lstm": {"torch.lstm", "torch._VF.lstm"},
        "setitem": {"torch.Tensor.__setitem__"},
    }.items(),
)  # fmt: skip
def test_sites(name: str, spellings: set[str]) -> None:
    """An op is patched at every innermost callable, and at no function that ends in one."""
    assert {site.qualified for site in ops.table()[name].sites} == spellings


@pytest.mark.parametrize(
    ("operator", "chain"),
    [
        ("rtruediv", ["truediv", "div"]),
        ("itruediv", ["truediv", "div"]),
        ("iadd", ["add"]),
        ("radd", ["add"]),
        ("rsub", ["sub"]),
        ("imod", ["mod", "remainder"]),
        ("setitem", ["index_put"]),
        ("matmul", []),
    ],
)
def test_operators_are_covered_by_their_ops(operator: str, chain: list[str]) -> None:
    """A bare name covers its operators, reflected and in-place ones too."""
    covering = []
    while (name := ops.table()[operator].covered_by) is not None:
        covering.append(name)
        operator = name
    assert covering == chain


FOLLOWED = [
    lambda t: F.softmax(t, -1),
    lambda t: F.log_softmax(t, -1),
    lambda t: F.relu(t),
    lambda t: F.gelu(t),
    lambda t: F.dropout(t, 0.0),
    lambda t: F.layer_norm(t, (4,)),
    lambda t: F.group_norm(t, 2),
    lambda t: F.max_pool2d(t[None, None], 2),
    lambda t: F.max_pool2d(t[None, None], 2, return_indices=True)[0],
    lambda t: F.mse_loss(t, t),
    lambda t: F.cross_entropy(t, t.softmax(-1).detach()),
    lambda t: F.grid_sample(t[None, None], torch.zeros(1, 2, 2, 2), align_corners=False),
    lambda t: torch.einsum("ij->i", t),
    lambda t: torch.tensordot(t, t),
]


@pytest.mark.parametrize("call", FOLLOWED)
def test_functions_that_end_in_a_patched_builtin_follow_it(call) -> None:
    """``F.softmax`` and the like cast without a patch of their own, whoever imported them."""
    names = [
        "softmax", "log_softmax", "relu", "gelu", "dropout", "layer_norm", "group_norm",
        "max_pool2d", "mse_loss", "cross_entropy", "grid_sample", "einsum", "tensordot",
    ]  # fmt: skip
    functions = {name: getattr(F, name, None) for name in names}
    with hmpx.convert(policy=Policy.from_ops(low=names)):
        for name in ("softmax", "relu", "layer_norm", "mse_loss", "grid_sample", "cross_entropy"):
            assert getattr(F, name) is functions[name]
        assert call(torch.rand(4, 4)).dtype is torch.bfloat16
