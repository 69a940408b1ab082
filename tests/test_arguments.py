"""Wrong arguments of public functions: the error names what was expected."""

from __future__ import annotations

import dataclasses
import html
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import HmpxError, OpListError, OptionError, Policy, PolicyFileError, errors, formats
from hmpx.casting import Options

CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: Policy.from_ops(low=1), "low must be a list of op names, not 1"),
    (lambda: Policy.from_ops(low=[["mm"]]), "each of low must be a string, not ['mm']"),
    (lambda: Policy.from_ops(fp32=[b"\xff"]), r"each of fp32 must be a string, not b'\xff'"),
    (lambda: Policy({})[1], "a policy's key must be an op name, not 1"),
    (lambda: Policy({}).unmatched([1]), "each of paths must be a string, not 1"),
    (lambda: Policy([]), "decisions must be a dict of op names to hmpx.Decision, not []"),
    (lambda: Policy({"mm": "low"}),
     "decisions must be a dict of op names to hmpx.Decision; it holds 'mm': 'low'"),
    (lambda: Policy({}, "bfloat"), "low_precision_type must be torch.bfloat16 or torch.float16, or a "
     "number format, not 'bfloat'; did you mean 'bfloat16'?"),
    (lambda: hmpx.Decision("low"), "a decision's policy must be hmpx.ALLOW, FOLLOW or DENY, or another "
     "hmpx.CastPolicy, not 'low'"),
    (lambda: hmpx.Decision(hmpx.ALLOW, accumulate_dtype=torch.ones(2)),
     "accumulate_dtype must be one of torch.bfloat16, torch.float16, torch.float32, torch.float64, "
     "not tensor([1., 1.])"),
    (lambda: hmpx.convert(torch.nn.Linear(2, 2)),
     "bf16_file_path must be a string or a path, not Linear(in_features=2, out_features=2, bias=True); "
     "leave the model out: it is torch that is converted, for all models"),
    (lambda: hmpx.convert(["linear"]), "bf16_file_path must be a string or a path, not ['linear']; "
     "names of ops go in policy=hmpx.Policy.from_ops(low=[...])"),
    (lambda: hmpx.convert({"low": ["linear"]}), "bf16_file_path must be a string or a path, not "
     "{'low': ['linear']}; pass it by name: policy=..."),
    (lambda: hmpx.convert(torch.float16), "bf16_file_path must be a string or a path, not torch.float16; "
     "pass it by name: low_precision_type=..."),
    (lambda: hmpx.convert(bf16_file_path="O1"), "bf16_file_path is 'O1'; pass it by name: opt_level='O1'"),
    (lambda: hmpx.convert(fp32_file_path="p.yaml"),
     "fp32_file_path is 'p.yaml'; pass it by name: policy='p.yaml'"),
    (lambda: hmpx.convert(opt_level="O3"), "opt_level must be 'O1' or 'O2', not 'O3'"),
    (lambda: hmpx.convert(low_precision_type=torch.float32), "low_precision_type must be torch.bfloat16 "
     "or torch.float16, or a number format, not torch.float32"),
    (lambda: hmpx.convert(device_types={"cdua"}),
     "device_types: torch has no device type 'cdua'; did you mean 'cuda'?"),
    (lambda: hmpx.convert(device_types=()), 'device_types is empty; name at least one, such as {"cuda"}'),
    (lambda: hmpx.convert(policy=Policy({}), lists="hmp"),
     "policy holds every decision; leave out lists, paths and opt_level"),
    (lambda: hmpx.convert(opt_level="O2", lists="hmp"),
     "opt_level 'O2' has its own lists; leave out lists, or use 'O1'"),
    (lambda: hmpx.compare(torch.relu, torch.ones(2), lossfn=len),
     "hmpx.compare has no argument 'lossfn'; did you mean 'loss_fn'?"),
    (lambda: hmpx.plan(torch.nn.ReLU, torch.ones(2), optimiser="SGD"),
     "hmpx.plan has no argument 'optimiser'; did you mean 'optimizer'?"),
    (lambda: hmpx.bench(len, list="hmp"), "hmpx.bench has no argument 'list'; did you mean 'lists'?"),
    (lambda: hmpx.explain("nn.LayerNorm"), "no op matches 'nn.LayerNorm'; did you mean 'layer_norm'?"),
    (lambda: hmpx.load_policy(torch.ones(2)),
     "bf16_file_path must be a string or a path, not tensor([1., 1.])"),
    (lambda: hmpx.load_policy(b"a.txt"), "bf16_file_path must be a string or a path, not b'a.txt'; "
     "os.fsdecode makes a string of bytes"),
    (lambda: hmpx.load_policy(lists=["hmp"]), "lists must be a string or a path, not ['hmp']"),
    (lambda: hmpx.load_policy(strict="yes"), "strict must be True or False, not 'yes'"),
    (lambda: hmpx.load_policy(opt_level=2), "opt_level must be 'O1' or 'O2', not 2"),
    (lambda: hmpx.load_policy(policy=itertools.count), "policy must be an hmpx.Policy, the path of a "
     "policy file, or a dict, not <class 'itertools.count'>"),
    (lambda: hmpx.convert(device_types=[["mul"]]), "each of device_types must be a string, not ['mul']"),
    (lambda: hmpx.convert(device_types=3),
     'device_types must be a set of names such as {"cuda"}, not 3'),
    (lambda: hmpx.convert(device_types=["cuda:9999999999999"]),
     "device_types: torch has no device type 'cuda:9999999999999'; did you mean 'cuda'?"),
    (lambda: hmpx.convert(device_types={"cpu:0"}),
     "device_types: torch has no device type 'cpu:0'; did you mean 'cpu'?"),
    (lambda: hmpx.convert(isVerbose=torch.ones(2)),
     "isVerbose must be True, False, 'once' or 'hmp', not tensor([1., 1.])"),
    (lambda: hmpx.convert(verbose="loud"), "verbose must be True, False, 'once' or 'hmp', not 'loud'"),
    (lambda: hmpx.convert(verbose="once", isVerbose=True),
     "isVerbose is HMP's name for verbose: give one of the two"),
    (lambda: hmpx.convert(dtype="fp16"),  # type: ignore[arg-type]
     "hmpx.convert has no argument 'dtype'; did you mean 'low_precision_type'?"),
    (lambda: hmpx.convert(enabled=False),  # type: ignore[arg-type]
     "hmpx.convert has no argument 'enabled'; hmpx.disable_casts() is a block without casts"),
    (lambda: hmpx.convert(exclude=3), "exclude must be a list of names of modules, not 3"),  # type: ignore[arg-type]
    (lambda: hmpx.load_policy(policy={"bf16": ["mm"]}),
     "<policy>['bf16']: unknown key 'bf16' of a policy; did you mean 'low'?"),
    (lambda: hmpx.explain("F.sofmax"), "no op matches 'F.sofmax'; did you mean 'softmax'?"),
    (lambda: hmpx.convert(legalize=["auto"]),
     "legalize must be one of 'auto', 'always', 'never', 'fast', not ['auto']"),
    (lambda: hmpx.convert(legalize="alwayss"),
     "legalize must be one of 'auto', 'always', 'never', 'fast', not 'alwayss'; did you mean 'always'?"),
    (lambda: hmpx.convert(strict=[1]), "strict must be True or False, not [1]"),
    (lambda: hmpx.convert("O1", "", "", False),  # type: ignore[call-arg]
     "convert takes three positional arguments, bf16_file_path, fp32_file_path and isVerbose, not 4; "
     "pass the others by name: opt_level=..."),
    (lambda: hmpx.register_rule(3), "op must be an op name, or several, not 3"),
    (lambda: hmpx.register_rule([b"mm"]), "op must be an op name, or several, not [b'mm']"),
    (lambda: hmpx.register_rule("mm", lambda call: None, level="high"),
     "level must be an integer, not 'high'"),
    (lambda: hmpx.unregister_rule("mm", 3), "a rule must be a function of a call, not 3"),
    (lambda: formats.get(["posit8_1"]), "a format must be a name or a format, not ['posit8_1']"),
    (lambda: formats.unregister([]), "name must be the name of a format, not []"),
    (lambda: formats.Float("f", 4, 3, kind=[]),
     "format f: kind must be one of 'ieee', 'p3109', 'fn', 'fnuz', 'finite', not []"),
    (lambda: formats.Float("f", 4, 3, subnormals="no"),
     "format f: subnormals must be True or False, not 'no'"),
    (lambda: formats.quantize(torch.ones(2), "posit8_1", ["up"]), "rounding must be one of 'nearest', "
     "'toward_zero', 'up', 'down', 'nearest_away', 'stochastic', not ['up']"),
    (lambda: formats.quantize(torch.ones(2), "float8_e4m3fn", overflow={}),
     "format float8_e4m3fn: overflow must be 'nan', 'saturate' or None, not {}"),
    (lambda: formats.quantize(torch.ones(2), "posit8_1", generator=3),
     "generator must be a torch.Generator, not 3"),
    (lambda: formats.encode([1.0], "posit8_1"), "encode takes a tensor, not list"),
    (lambda: formats.encode(torch.ones(2).to_sparse(), "float32"),
     "number formats take dense tensors, not one of torch.sparse_coo; its values() are dense"),
    (lambda: formats.quantize(torch.ones(2).to_sparse(), "posit8_1"),
     "number formats take dense tensors, not one of torch.sparse_coo; its values() are dense"),
    (lambda: formats.register_op(torch.mul, 3, "posit8_1"), "op must be an op name, not 3"),
    (lambda: formats.register_op(torch.mul, "mul", "posit8_1", "llvm"),
     "device_type: torch has no device type 'llvm' (known: cpu, cuda, hpu, xpu, mps, mtia, xla)"),
    (lambda: formats.create_lower_func(".x:y"), "no function '.x:y' (package.module:function): TypeError: "
     "the 'package' argument is required to perform a relative import for '.x'"),
    (lambda: hmpx.compare(torch.nn.Linear(2, 2)), "compare called Linear(): TypeError: Linear.forward() missing 1 "
     "required positional argument: 'input'; a tuple gives several arguments, a mapping arguments by name"),
    (lambda: hmpx.compare(torch.nn.Linear(2, 2), {"x": torch.ones(2)}), "compare called Linear(x=float32[2]): "
     "TypeError: Linear.forward() got an unexpected keyword argument 'x'; give forward_step=lambda model, batch: "
     "model(batch['x'])"),
    (lambda: hmpx.draw(torch.nn.Linear(2, 2), (torch.ones(2),) * 2), "draw called Linear(float32[2], float32[2]): "
     "TypeError: Linear.forward() takes 2 positional arguments but 3 were given; give the part that the model "
     "takes: inputs=batch[0]"),
    (lambda: hmpx.freeze(torch.nn.Linear(2, 2), torch.ones(2), outputs=[]),
     "outputs must be 'fp32' or 'keep', not []"),
    (lambda: hmpx.freeze(torch.nn.Linear(2, 2), torch.ones(2), keep_fp32="no"),
     "keep_fp32 must be True or False, not 'no'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES, ids=range(len(CASES)))
def test_wrong_arguments_are_errors_that_say_what_was_expected(
    call: Callable[[], object], message: str
) -> None:
    """And what was found, cut where it is long; torch stays as it is."""
    with pytest.raises(HmpxError) as error:
        call()
    assert str(error.value) == message
    assert not hmpx.is_converted()


def test_what_is_as_good_as_expected_is_taken(tmp_path: Path) -> None:
    """A name alone, any iterable of names, None for no path, 1 for True."""
    assert Policy.from_ops(low="mm") == Policy.from_ops(low=iter(["mm"]))
    path = tmp_path / "a.txt"
    path.write_text("mm")
    assert hmpx.load_policy(str(path), None, lists=None) == hmpx.load_policy(path, strict=0)
    assert Policy({}, "fp16") == Policy({}, torch.float16)
    with hmpx.convert(
        isVerbose=0, device_types="cpu", legalize="never", keep_weight_casts=1
    ) as session:
        assert session.device_types == {"cpu"}
        assert session.options.keep_weight_casts is True


# --- JSON --------------------------------------------------------------------------------------

JSON_TEXTS: dict[str, tuple[str, str]] = {
    "huge integer": ('{"hmp_bf16_ops": ["mm"],\n "use_fused_adam": ' + "9" * 5000 + "}", ""),
    "huge exponent": ('{"hmp_bf16_ops": ["mm"], "use_fused_adam": 1e999999}', ""),
    "long key": ('{"hmp_bf16_ops": ["mm"], "architectures": {"' + "k" * 1000 + '": 1}}', ""),
    "tabs and carriage returns": ('{\t"hmp_bf16_ops"\r:\t[\r"mm"]\t}', ""),
    "depth within what is left alone": ('{"hmp_bf16_ops": ["mm"], "architectures": '
                                        + "[" * 50 + "]" * 50 + "}", ""),
    "byte-order mark": ('\ufeff{"hmp_bf16_ops": ["mm"]}', ""),
    "escapes": ('{"hmp_bf16\\u005fops": ["\\u006dm"]}', ""),
    "lone surrogate": (
        '{"hmp_bf16_ops": ["mm",\n"\\ud800"]}',
        "g.json:2: expected one op per line, found '\\ud800'",
    ),
    "two marks": ('\ufeff\ufeff{}', "g.json:1: not valid JSON: Unexpected UTF-8 BOM (decode using utf-8-sig)"),
    "doubled key": ('{"hmp_bf16_ops": ["mm"],\n\n"hmp_bf16_ops": ["bmm"]}',
                    "g.json:3: 'hmp_bf16_ops' is given twice, at line 1 too"),
    "number for an op": ('{"hmp_bf16_ops":\n[1]}', "g.json:2: unknown op '1'"),
    "null for an op": ('{"hmp_bf16_ops":\n\n[null]}', "g.json:3: an op of low must be a string"),
    "control character": ('{"hmp_bf16_ops": [\n"m\nm"]}', "g.json:2: not valid JSON: Invalid control character at"),
    "scalar": ("1", "g.json:1: a Gaudi configuration must be a mapping of keys to values"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:left out of the op lists:hmpx.HmpxWarning")
@pytest.mark.parametrize("name", JSON_TEXTS)
def test_json_is_what_json_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is JSON is read, whatever YAML makes of it; what is not has a line."""
    monkeypatch.chdir(tmp_path)
    text, message = JSON_TEXTS[name]
    Path("g.json").write_text(text, encoding="utf-8")
    if not message:
        policy = hmpx.load_policy("g.json")
        assert policy["mm"].cast_policy is hmpx.ALLOW
        assert policy["bmm"].cast_policy is not hmpx.ALLOW
        return
    with pytest.raises((PolicyFileError, OpListError)) as error:
        hmpx.load_policy("g.json", strict=True)
    assert str(error.value) == message


# --- what messages show ------------------------------------------------------------------------


SHOWN: list[tuple[object, str]] = [
    ("a", "'a'"),
    ("\ud800\n", r"'\ud800\n'"),
    (b"\xff", r"b'\xff'"),
    ([], "[]"),
    ((1,), "(1,)"),
    (set(), "set()"),
    ({1: "a"}, "{1: 'a'}"),
    (frozenset({1}), "frozenset({1})"),
    (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
    (torch.ones(2), "tensor([1., 1.])"),
    (math.nan, "nan"),
]


@pytest.mark.parametrize(("value", "text"), SHOWN, ids=[text for _, text in SHOWN])
def test_values_are_shown_short_and_on_one_line(value: object, text: str) -> None:
    """Whatever they are."""
    assert errors.shown(value) == text


# --- showing policies --------------------------------------------------------------------------


def test_a_policy_prints_as_a_table() -> None:
    """Ops in their order, with what is done, in which type, and by which line; sections beneath."""
    policy = hmpx.load_policy(
        policy={
            "lists": "none",
            "low": ["sum accumulate=fp32", "bmm fp16"],
            "fp32": ["exp"],
            "sections": [{"module": ["a<b>", "c"], "mode": "train", "low": ["mm"]}],
        }
    )
    assert str(policy) == (
        "Policy, bf16: 2 LOW, 1 FP32, 1 section\n"
        "  op   policy  dtype                 reason\n"
        "  bmm  LOW     fp16                  <policy>['low'][1]\n"
        "  exp  FP32    fp32                  <policy>['fp32'][0]\n"
        "  sum  LOW     bf16 accumulate=fp32  <policy>['low'][0]\n"
        "where module ['a<b>', 'c'], mode 'train' (<policy>['sections'][0])\n"
        "  op   policy  dtype                 reason\n"
        "  mm   LOW     bf16                  <policy>['sections'][0]['low'][0]"
    )
    assert html.escape(str(policy)) in policy._repr_html_()


def test_option_errors_are_the_class_for_arguments() -> None:
    """So that one ``except`` catches them."""
    with pytest.raises(OptionError):
        hmpx.convert(device_types=3)


def test_options_are_arguments_of_convert_with_their_defaults() -> None:
    parameters = inspect.signature(hmpx.convert).parameters
    for field in dataclasses.fields(Options):
        assert parameters[field.name].default == field.default, field.name


def test_freeze_takes_inputs_by_name_and_disable_casts_needs_no_parentheses() -> None:
    model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
    with hmpx.convert(device_types={"cpu"}):
        with hmpx.freeze(model, {"input": x}) as frozen:
            assert frozen.weights

        @hmpx.disable_casts
        def multiplied() -> torch.Tensor:
            return x @ x.T

        assert (x @ x.T).dtype is torch.bfloat16
        assert multiplied().dtype is torch.float32
