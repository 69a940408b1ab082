"""Policy files: what they may hold, what each fault says, and that a policy survives being written."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hmpx
from hmpx import (
    CastPolicy,
    Decision,
    HmpxError,
    HmpxWarning,
    OpListError,
    OptionError,
    Policy,
    PolicyFileError,
    load_policy,
    ops,
)
from hmpx.policy import check_files
from hmpx.policy.sections import Section

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Policy]:
    """Returns what loads a policy from the text of a file, ``p.yaml`` by default."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, name: str = "p.yaml", **options: Any) -> Policy:
        Path(name).write_text(text, encoding="utf-8")
        return load_policy(policy=name, **options)

    return load_text


def x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(shape or (4, 4), dtype=dtype)


def kinds(policy: Policy, *names: str) -> list[str]:
    return [policy[name].cast_policy.name for name in names]


# --- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n", "lists: hmpx\n", "\ufeff{}\n",
                                  "low: []\n", "sections: []\n", "%YAML 1.1\n---\n{}\n...\n"])  # fmt: skip
def test_a_file_that_says_nothing_is_the_shipped_lists(
    load: Callable[..., Policy], text: str
) -> None:
    """It adds to them, and takes from them, what it says."""
    assert load(text) == load_policy()


def test_lists_add_to_a_base_and_remove_from_it(load: Callable[..., Policy]) -> None:
    """A plain list adds; ``add`` and ``remove`` do what they say; a file's own lines outrank."""
    policy = load("""\
low_precision_type: float16
lists: hmp
low: [tan, softmax]
fp32:
  add: [exp]
  remove: [log, embedding]
widest: {remove: [cat]}
first: {remove: lerp, add: [cross]}
pass: [relu]
follow: [avg_pool2d]
""")
    expected = {
        "tan": "LOW", "softmax": "LOW", "linear": "LOW", "exp": "FP32", "log2": "FP32",
        "log": "PASS", "cat": "PASS", "add": "WIDEST", "lerp": "PASS",
        "cross": "FIRST", "relu": "PASS", "avg_pool2d": "FOLLOW",
    }  # fmt: skip
    assert dict(zip(expected, kinds(policy, *expected), strict=True)) == expected
    assert policy["tan"].dtype is policy.low_precision_type is FP16
    assert policy["tan"].reason == "p.yaml:3"
    assert policy["exp"].reason == "p.yaml:5"
    assert policy["linear"].reason == "lists/hmp/bf16.txt:20"


def test_a_removed_op_is_its_next_list_s_or_nobody_s(load: Callable[..., Policy]) -> None:
    """``exp`` is in no other list; ``*`` empties a list; an op added again is in it."""
    assert kinds(load("fp32: {remove: [exp]}"), "exp") == ["PASS"]
    assert kinds(load("low: {remove: [bmm]}"), "bmm") == ["FIRST"]
    policy = load('fp32: {remove: ["*"], add: [log]}')
    assert kinds(policy, "log", "log2", "softmax") == ["FP32", "PASS", "PASS"]
    assert kinds(load("lists: none\nlow: [mul, -mul, torch.mul]"), "mul") == ["LOW"]


@pytest.mark.parametrize("base", ["hmp", "o2", "autocast-cuda", "autocast-cpu"])
def test_every_shipped_set_is_a_base(load: Callable[..., Policy], base: str) -> None:
    """With nothing added it is that set."""
    assert load(f"lists: {base}") == load_policy(lists=base)


def test_what_a_line_of_a_list_may_be_an_item_may(load: Callable[..., Policy]) -> None:
    """Includes, removals, everything, dtypes of its own; in quotes where YAML wants them."""
    policy = load("""\
lists: none
low: ["@hmp", -mul, conv2d float16, sum accumulate=fp32 output=torch.float32]
fp32: ["*", "-exp"]
""")
    assert policy["conv2d"] == Decision(hmpx.ALLOW, FP16)
    assert policy["sum"] == Decision(hmpx.ALLOW, BF16, accumulate_dtype=FP32, output_dtype=FP32)
    assert kinds(policy, "mul", "relu", "tan", "exp") == ["FP32", "LOW", "FP32", "PASS"]


def test_low_precision_type_of_the_file_outranks_that_of_the_call(
    load: Callable[..., Policy],
) -> None:
    """Which holds where the file says nothing."""
    assert load("low_precision_type: bf16", low_precision_type="fp16")["mm"].dtype is BF16
    assert load("", low_precision_type="fp16")["mm"].dtype is FP16


def test_convert_takes_files_dicts_and_what_is_loaded(load: Callable[..., Policy]) -> None:
    """In the first place too, as HMP's files."""
    policy = load("lists: none\nlow: [mm]\n")
    content = {"lists": "none", "low": ["mm"], "low_precision_type": BF16}
    sources = [{"policy": p} for p in (policy, content, "p.yaml", Path("p.yaml"))]
    for source in [*sources, {"bf16_file_path": "p.yaml"}]:
        with hmpx.convert(**source) as session:
            assert session.policy == policy
            assert torch.mm(x(), x()).dtype is BF16
        assert load_policy(**source) == policy


# --- sections -----------------------------------------------------------------------------------

SECTION_CASES: list[tuple[str, Tensor, bool]] = [
    ("min_numel: 16", x(4, 4), True),
    ("min_numel: 17", x(4, 4), False),
    ("max_numel: 16", x(4, 4), True),
    ("max_numel: 1_5", x(4, 4), False),
    ("max_numel: 0", x(0), True),
    ("min_numel: 2, max_numel: 3", x(3), True),
    ("ndim: 2", x(4, 4), True),
    ("ndim: [1, 3]", x(4, 4), False),
    ("ndim: 0", torch.tensor(1.0), True),
    ("device: cpu", x(), True),
    ("device: [cuda, hpu]", x(), False),
    ("dtype: float32", x(), True),
    ("dtype: [bf16, fp16]", x(), False),
    ("dtype: float64", x(dtype=FP64), True),
    ("module: '*'", x(), True),
    ("module: nothing", x(), False),
    ("module_regex: '.*'", x(), True),
    ("module_regex: 'a+'", x(), False),
    ("module_class: Linear", x(), False),
    ("mode: train", x(), False),
    ("mode: eval", x(), False),
    ("ndim: 2, dtype: float32, min_numel: 1", x(), True),
    ("ndim: 2, dtype: float16, min_numel: 1", x(), False),
]


@pytest.mark.parametrize(("conditions", "value", "holds"), SECTION_CASES)
def test_a_section_holds_where_all_of_its_conditions_do(
    load: Callable[..., Policy], conditions: str, value: Tensor, holds: bool
) -> None:
    """They are about the first floating tensor, as it is given."""
    policy = load(
        f"lists: none\nlow: [relu]\nsections:\n- {{{conditions}, low: [relu output=float64]}}"
    )
    with hmpx.convert(policy=policy):
        for _ in range(2):
            wanted = FP64 if holds or value.dtype is FP64 else BF16
            assert torch.relu(value).dtype is wanted


def test_a_section_has_all_six_lists_and_a_low_type_of_its_own(
    load: Callable[..., Policy],
) -> None:
    """The first section that holds and names the op counts; then the lists do."""
    policy = load("""\
lists: none
low: [tan, exp, sin]
sections:
- ndim: 1
  low_precision_type: float16
  low: [tan]
  fp32: [cos]
  widest: [add]
  first: [cross]
  follow: [mul]
  pass: [exp]
- ndim: [1, 2]
  low: [tan, cos, exp]
""")
    with hmpx.convert(policy=policy, legalize="never"):
        assert [torch.tan(x(*shape)).dtype for shape in ((3,), (3, 3), (3, 3, 3))] == [
            FP16, BF16, BF16,
        ]  # fmt: skip
        assert [torch.cos(x(*shape)).dtype for shape in ((3,), (3, 3), (3, 3, 3))] == [
            FP32, BF16, FP32,
        ]  # fmt: skip
        assert torch.exp(x(3)).dtype is FP32
        assert torch.exp(x(3, 3)).dtype is BF16
        assert torch.cross(x(3, dtype=BF16), x(3), dim=0).dtype is BF16
        assert torch.mul(x(3, dtype=FP16), x(3, dtype=FP16)).dtype is FP16
        assert torch.add(x(3, dtype=BF16), x(3)).dtype is FP32
        assert torch.sin(x(3)).dtype is BF16


def test_sections_of_modules_and_phases(load: Callable[..., Policy]) -> None:
    """Globs reach into modules, regexes match whole names, classes count from outside."""
    policy = load("""\
lists: none
sections:
- {module: head, mode: eval, low_precision_type: float16, low: [linear]}
- {module: ["head*", "body.1"], low: [linear]}
- {module_regex: 'body\\.[23]', fp32: [linear]}
- {module_class: Sequential, follow: [linear output=float64]}
""")
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(*[nn.Linear(4, 4, dtype=BF16) for _ in range(4)]),
            "head": nn.Linear(4, 4, dtype=BF16),
        }
    )
    found: list[torch.dtype] = []
    model.forward = lambda value: [  # type: ignore[method-assign]
        found.append(layer(value).dtype) for layer in (model.head, *model.body)
    ]
    with hmpx.convert(policy=policy, legalize="never"):
        model(x(dtype=BF16))
        model.eval()
        model(x(dtype=BF16))
    lone = [BF16, BF16, BF16, FP32, FP32]  # model.body's call is not running
    assert found == [*lone, FP16, *lone[1:]]


def test_patterns_that_match_nothing_are_named_once(load: Callable[..., Policy]) -> None:
    """In one warning after the first forward, also where rules change meanwhile."""
    load("""\
sections:
- module: [body, hed]
  low: [linear]
- module_regex: ['0', 'x+']
  fp32: [relu]
""")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.add_module("body", nn.Identity())
    with hmpx.convert(policy="p.yaml"):
        torch.relu(x())
        with pytest.warns(HmpxWarning) as caught:
            model(x())
        assert [str(warning.message) for warning in caught] == [
            "these patterns match no module of Sequential:\n"
            "  p.yaml:2: module 'hed'\n"
            "  p.yaml:4: module_regex 'x+'"
        ]
        model(x())
        nn.Linear(4, 4)(x())
        hmpx.register_rule("exp", _pass)
        model(x())
        hmpx.unregister_rule("exp")
        model(x())


def _pass(call: hmpx.Call) -> None:
    return None


# --- Gaudi's JSON -------------------------------------------------------------------------------


def lists_equal(tmp_path: Path, base: str = "hmpx", **lists: str) -> Policy:
    paths = {}
    for kind, text in lists.items():
        path = tmp_path / f"like_{kind}.txt"
        path.write_text(text)
        paths[f"{kind}_file_path"] = path
    return load_policy(**paths, lists=base)


def test_gaudi_configurations_of_hmp(load: Callable[..., Policy], tmp_path: Path) -> None:
    """A list in them takes the place of the shipped one, as HMP's files do."""
    bf16, fp32 = ["add", "gelu", "rsub"], ["softmax", "truediv"]
    config = {
        "use_habana_mixed_precision": True,
        "hmp_opt_level": "O1",
        "hmp_is_verbose": False,
        "use_fused_adam": True,
        "use_fused_clip_norm": True,
        "transformers_version": "4.28.1",
        "architectures": ["A", {"b": [None, 1.5]}],
        "hmp_bf16_ops": bf16,
        "hmp_fp32_ops": fp32,
    }
    name = "gaudi_config.json"
    both = lists_equal(tmp_path, "hmp", bf16="\n".join(bf16), fp32="\n".join(fp32))
    assert load(json.dumps(config), name) == both
    assert load(json.dumps(config, indent="\t"), name) == both
    assert both["gelu"].reason.endswith("like_bf16.txt:2")
    del config["hmp_fp32_ops"]
    low = lists_equal(tmp_path, "hmp", bf16="\n".join(bf16))
    assert load(json.dumps({**config, "hmp_fp32_ops": None}), name) == load(
        json.dumps(config), name
    )
    assert load(json.dumps(config), name) == low
    assert load('{"use_habana_mixed_precision": true}', name) == load_policy(lists="hmp")
    assert load("{}", name) == load_policy(lists="hmp")


def test_gaudi_configurations_of_autocast(load: Callable[..., Policy], tmp_path: Path) -> None:
    """Their lists count where HMP is off or not spoken of; one alone does, too."""
    lists = {"autocast_bf16_ops": ["linear", "_convolution.deprecated"],
             "autocast_fp32_ops": ["tanh"]}  # fmt: skip
    bf16 = "linear\n_convolution.deprecated"
    both = lists_equal(tmp_path, bf16=bf16, fp32="tanh")
    assert load(json.dumps(lists), "g.json") == both
    off = {"use_habana_mixed_precision": False, "hmp_bf16_ops": ["exp"]}
    assert load(json.dumps({**off, **lists}), "g.json") == both
    fp32 = {"autocast_fp32_ops": ["tanh"]}
    assert load(json.dumps(fp32), "g.json") == lists_equal(tmp_path, fp32="tanh")
    assert load(json.dumps({**lists, "autocast_fp32_ops": None}), "g.json") == lists_equal(
        tmp_path, bf16=bf16
    )
    on = {"use_habana_mixed_precision": True}
    assert load(json.dumps({**on, **lists}), "g.json") == load_policy(lists="hmp")
    empty = '{"autocast_bf16_ops": null, "autocast_fp32_ops": null}'
    assert load(empty, "g.json") == load_policy(lists="hmp")


# --- faults -------------------------------------------------------------------------------------

KEYS = "(low_precision_type, rounding, overflow, round_gradients, lists, low, fp32, widest, first, follow, pass, exclude, sections)"

FAULTS: dict[str, tuple[str, str]] = {
    "unknown key": ("low: [mm]\nfp23: [exp]\n",
        "p.yaml:2: unknown key 'fp23' of a policy; did you mean 'fp32'?"),
    "key unlike any": ("zzz: 1\n", f"p.yaml:1: unknown key 'zzz' of a policy {KEYS}"),
    "unknown key of a list": ("low:\n  ad: [mm]\n",
        "p.yaml:2: unknown key 'ad' of low; did you mean 'add'?"),
    "unknown key of a section": ("sections:\n- modul: a\n  low: [mm]\n",
        "p.yaml:2: unknown key 'modul' of a section; did you mean 'module'?"),
    "doubled key": ("low: [mm]\nfp32: [exp]\nlow: [bmm]\n",
        "p.yaml:3: 'low' is given twice, at line 1 too"),
    "doubled key of a section": ("sections:\n- ndim: 1\n  low: [mm]\n  ndim: 2\n",
        "p.yaml:4: 'ndim' is given twice, at line 2 too"),
    "merge key": ("<<: {low: [mm]}\n", f"p.yaml:1: unknown key '<<' of a policy {KEYS}"),
    "python tag": ("low: !!python/object/apply:os.system [ls]\n",
        "p.yaml:1: the tag 'tag:yaml.org,2002:python/object/apply:os.system' has no meaning here; "
        "leave it out"),
    "python name": ("low:\n- !!python/name:os.system ''\n",
        "p.yaml:2: the tag 'tag:yaml.org,2002:python/name:os.system' has no meaning here; "
        "leave it out"),
    "own tag": ("!policy\nlow: [mm]\n",
        "p.yaml:1: the tag '!policy' has no meaning here; leave it out"),
    "list": ("- mm\n", "p.yaml:1: a policy must be a mapping of keys to values"),
    "text": ("mm\n", "p.yaml:1: a policy must be a mapping of keys to values"),
    "null": ("null\n", "p.yaml:1: a policy must be a mapping of keys to values"),
    "null list": ("fp32:\n- exp\nlow:\n", "p.yaml:3: an op of low must be a string"),
    "nested list": ("low: [mm, [bmm]]\n", "p.yaml:1: an op of low must be a string"),
    "key that is a list": ("? [low]\n: [mm]\n", "p.yaml:1: a key must be a string"),
    "mapping for a list": ("sections:\n- ndim: {a: 1}\n  low: [mm]\n",
        "p.yaml:2: ndim must be a list"),
    "low type": ("low_precision_type: float23\n",
        "p.yaml:1: low_precision_type must be torch.bfloat16 or torch.float16, or a number format, "
        "not 'float23'; did you mean 'float32'?"),
    "low type that is not low": ("low_precision_type: uint8\n",
        "p.yaml:1: low_precision_type must be torch.bfloat16 or torch.float16, or a number format, "
        "not 'uint8'; integers have a sign here: int8 and int4 are symmetric, and share a scale"),
    "base": ("lists: hpm\n", "p.yaml:1: lists 'hpm' is neither a shipped set (autocast-cpu, autocast-cuda, "
        "autocast-hpu, autocast-mps, autocast-xpu, hmp, hmpx, lean, o2), nor a directory, nor none; did you mean 'hmp'?"),
    "option": ("low:\n- mm\n- sum accumulte=float32\n",
        "p.yaml:3: unknown option 'accumulte' of 'sum'; did you mean 'accumulate'?"),
    "option's dtype": ("low: [sum output=int8]\n",
        "p.yaml:1: unknown dtype 'int8' (bfloat16, float16, float32, float64)"),
    "option twice": ("low: [sum output=fp32 output=fp32]\n",
        "p.yaml:1: 'sum' is given output twice; keep one"),
    "dtype of its own in fp32": ("fp32: [mm float16]\n",
        "p.yaml:1: 'mm float16' names a dtype, but only low-precision lists have a choice"),
    "option of what is left alone": ("pass: [sum output=float32]\n",
        "p.yaml:1: 'sum output=float32' names a dtype, but is left alone"),
    "two ops in a line": ("low: mm bmm\n", "p.yaml:1: expected one op per line, found 'mm bmm'"),
    "one op, two dtypes": ("low:\n- conv2d\n- torch.conv2d float16\n",
        "p.yaml:3: 'torch.conv2d' is the op 'conv2d', which is already in this list, at "
        "p.yaml:2, with other dtypes; keep one of the lines"),
    "include": ('low: ["@hpm"]\n', "p.yaml:1: there is no shipped set 'hpm' (autocast-cpu, autocast-cuda, "
        "autocast-hpu, autocast-mps, autocast-xpu, hmp, hmpx, lean, o2); did you mean 'hmp'?"),
    "op in two lists": ("low: [mm]\nfp32:\n- torch.mm\n",
        "p.yaml:3: 'torch.mm' is in two lists: it is the op 'mm', as 'mm' at p.yaml:1 is; "
        "keep one of the lines"),
    "op in low and pass": ("low: [mm]\npass: [mm]\n",
        "p.yaml:2: 'mm' is in two lists: it is the op 'mm', as 'mm' at p.yaml:1 is; "
        "keep one of the lines"),
    "op in two lists of a section": ("sections:\n- ndim: 2\n  low: [mm]\n  follow: [mm]\n",
        "p.yaml:4: 'mm' is in two lists: it is the op 'mm', as 'mm' at p.yaml:3 is; "
        "keep one of the lines"),
    "everything twice": ('low: ["*"]\nfp32: ["*"]\n',
        "p.yaml:2: '*' is in two lists, at p.yaml:1 too; keep one of the lines"),
    "sections that conflict": (
        "sections:\n- ndim: 2\n  low: [mm]\n- module: a\n  low: [mm]\n- ndim: [2]\n  fp32: [mm]\n",
        "p.yaml:7: 'mm' is decided at p.yaml:3 already, in a section with the same conditions; "
        "keep one of the lines"),
    "remove what is not there": ("low: {remove: [tan]}\n",
        "p.yaml:1: no 'tan' in the shipped low list to remove"),
    "remove a misspelled op": ("low:\n  remove: [mm, matmull]\n",
        "p.yaml:2: no 'matmull' in the shipped low list to remove; did you mean 'matmul'?"),
    "remove from no list": ("follow: {remove: [mm]}\n",
        "p.yaml:1: the shipped set has no follow list to remove from"),
    "section that is none": ("sections: [mm]\n",
        "p.yaml:1: a section must be a mapping of keys to values"),
    "section that decides nothing": ("sections:\n- module: a\n",
        "p.yaml:2: a section decides nothing; give it low or fp32 or widest or first or follow or "
        "pass"),
    "section without conditions": ("sections:\n- low: [mm]\n",
        "p.yaml:2: a section holds for every call; give it module or module_regex or module_class "
        "or mode or min_numel or max_numel or ndim or device or dtype"),
    "section of no module": ("sections:\n- module: []\n  low: [mm]\n",
        "p.yaml:2: module is empty; name at least one, or leave it out"),
    "section of no ndim": ("sections:\n- {ndim: [], low: [mm]}\n",
        "p.yaml:2: ndim is empty; name at least one, or leave it out"),
    "number": ("sections:\n- min_numel: many\n  low: [mm]\n",
        "p.yaml:2: min_numel must be a whole number, not 'many'"),
    "negative number": ("sections:\n- max_numel: -1\n  low: [mm]\n",
        "p.yaml:2: max_numel must be a whole number, not '-1'"),
    "broken number": ("sections:\n- ndim: [2, 1.5]\n  low: [mm]\n",
        "p.yaml:2: ndim must be a whole number, not '1.5'"),
    "number in quotes": ("sections:\n- ndim: '2'\n  low: [mm]\n",
        "p.yaml:2: ndim must be a whole number, not '2'"),
    "truth for a number": ("sections:\n- ndim: true\n  low: [mm]\n",
        "p.yaml:2: ndim must be a whole number, not 'true'"),
    "superscript": ("sections:\n- ndim: !!int ²\n  low: [mm]\n",
        "p.yaml:2: ndim must be a whole number, not '²'"),
    "endless number": (f"sections:\n- min_numel: {'9' * 5000}\n  low: [mm]\n",
        f"p.yaml:2: min_numel must be a whole number, not '{'9' * 37}...{'9' * 38}'"),
    "numbers crossed": ("sections:\n- min_numel: 9\n  max_numel: 8\n  low: [mm]\n",
        "p.yaml:2: min_numel 9 is above max_numel 8"),
    "mode": ("sections:\n- mode: evl\n  low: [mm]\n",
        "p.yaml:2: mode must be one of train, eval, not 'evl'; did you mean 'eval'?"),
    "device": ("sections:\n- device: cudo\n  low: [mm]\n",
        "p.yaml:2: device: torch has no device type 'cudo'; did you mean 'cuda'?"),
    "no device": ("sections:\n- device: []\n  low: [mm]\n",
        'p.yaml:2: device is empty; name at least one, such as {"cuda"}'),
    "dtype": ("sections:\n- dtype: int64\n  low: [mm]\n",
        "p.yaml:2: dtype: unknown dtype 'int64' (bfloat16, float16, float32, float64)"),
    "regex": ("sections:\n- module_regex: [a, '(']\n  low: [mm]\n",
        "p.yaml:2: module_regex: not a regular expression: missing ), unterminated subpattern at "
        "position 0"),
    "regex that counts too far": ("sections:\n- module_regex: 'a{99999999999}'\n  low: [mm]\n",
        "p.yaml:2: module_regex: not a regular expression: the repetition number is too large"),
    "tab": ("low:\n\t- mm\n",
        "p.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
    "unquoted star": ("fp32: [*]\n", "p.yaml:1: not valid YAML: expected alphabetic or numeric character, "
        "but found ']'; put names that begin with * or @ in quotes"),
    "unquoted at": ("low:\n- @hmp\n", "p.yaml:2: not valid YAML: found character '@' that cannot start any "
        "token; put names that begin with * or @ in quotes"),
    "alias of nothing": ("low: *a\n", "p.yaml:1: not valid YAML: found undefined alias 'a'"),
    "alias of itself": ("low: &a [mm, *a]\n", "p.yaml:1: an op of low must be a string"),
    "section of itself": ("sections: &a\n- *a\n",
        "p.yaml:1: a section must be a mapping of keys to values"),
    "two documents": ("low: [mm]\n---\nlow: [bmm]\n", "p.yaml:2: not valid YAML: but found another document"),
    "unclosed": ("low: [mm\n", "p.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    "colon": ("low: mm: bmm\n", "p.yaml:1: not valid YAML: mapping values are not allowed here"),
    "zero byte": ("low: [mm]\0\n",
        "p.yaml: a binary file, not a policy file; give a text file's path"),
    "escape beyond Unicode": ('low: ["\\U00110000"]\n',
        "p.yaml: not valid YAML: chr() arg not in range(0x110000)"),
    "escape beyond everything": ('low: ["\\UFFFFFFFF"]\n',
        "p.yaml: not valid YAML: Python int too large to convert to C int"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_with_its_line_and_nothing_is_patched(
    load: Callable[..., Policy], fault: str
) -> None:
    """What is wrong, where, and what was meant, if that can be told."""
    text, message = FAULTS[fault]
    message = message.replace('in "p.yaml"', 'in "<unicode string>"')
    with pytest.raises(HmpxError) as error:
        load(text)
    assert str(error.value) == message
    with pytest.raises((PolicyFileError, OpListError)):
        hmpx.convert(policy="p.yaml")
    assert not hmpx.is_converted()


JSON_FAULTS: dict[str, tuple[str, str]] = {
    "unknown key": ('{\n "hmp_bf16_op": []\n}',
        "g.json:2: unknown key 'hmp_bf16_op' of a Gaudi configuration; did you mean 'hmp_bf16_ops'?"),
    "doubled key": ('{"use_fused_adam": true,\n "use_fused_adam": true}',
        "g.json:2: 'use_fused_adam' is given twice, at line 1 too"),
    "no JSON": ('{"hmp_opt_level": "O1",\n}',
        "g.json:2: not valid JSON: Expecting property name enclosed in double quotes"),
    "YAML": ("hmp_opt_level: O1\n", "g.json:1: not valid JSON: Expecting value"),
    "empty": ("", "g.json:1: not valid JSON: Expecting value"),
    "list": ("[]", "g.json:1: a Gaudi configuration must be a mapping of keys to values"),
    "level": ('{"hmp_opt_level": "O3"}', "g.json:1: hmp_opt_level must be one of O1, O2, not 'O3'"),
    "truth": ('{"use_habana_mixed_precision": 1}',
        "g.json:1: use_habana_mixed_precision must be one of true, false, not '1'"),
    "op that is a number": ('{"hmp_bf16_ops": [["mm"]]}',
        "g.json:1: an op of low must be a string"),
    "op in two lists": ('{"hmp_bf16_ops": ["mm"],\n "hmp_fp32_ops": ["mm"]}',
        "g.json:2: 'mm' is in two lists: it is the op 'mm', as 'mm' at g.json:1 is; "
        "keep one of the lines"),
    "deep": ("[" * 100_000, "g.json: nested too deep to be a policy"),
}  # fmt: skip


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_a_fault_of_a_gaudi_configuration_is_an_error_with_its_line(
    load: Callable[..., Policy], fault: str
) -> None:
    """As those of YAML."""
    text, message = JSON_FAULTS[fault]
    with pytest.raises(HmpxError) as error:
        load(text, "g.json")
    assert str(error.value) == message
    with pytest.raises((PolicyFileError, OpListError)):
        hmpx.convert("g.json")
    assert not hmpx.is_converted()


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, a directory, not UTF-8, of another kind."""
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    Path("latin.yaml").write_bytes(b"low: [mm] # \xe9")
    Path("utf16.yml").write_bytes("low: [mm]".encode("utf-16"))
    cases = {
        "missing.yaml": "missing.yaml: no such file; give the path of a policy file",
        "folder.yaml": "folder.yaml: a directory, not a policy file; give a file's path",
        "latin.yaml": "latin.yaml:1: not UTF-8 text (byte 12: 0xe9); save it as UTF-8",
        "utf16.yml": "utf16.yml:1: not UTF-8 text (byte 0: 0xff); save it as UTF-8",
        "policy.txt": "policy.txt: a policy file ends in .yaml, .yml, .json",
        "nul\0.yaml": r"nul\x00.yaml: can't be read: embedded null byte",
    }
    for name, message in cases.items():
        for path in (name, Path(name)):
            with pytest.raises(PolicyFileError) as error:
                hmpx.convert(policy=path)
            assert str(error.value) == message
            assert not hmpx.is_converted()


def test_arguments_that_do_not_go_together(load: Callable[..., Policy]) -> None:
    """A policy holds every decision; a policy's path in another place is told its own."""
    load("")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"policy": "p.yaml", "bf16_file_path": "a.txt"},
         "policy holds every decision; leave out lists, paths and opt_level"),
        ({"policy": "p.yaml", "opt_level": "O2"},
         "policy holds every decision; leave out lists, paths and opt_level"),
        ({"bf16_file_path": "p.yaml", "lists": "o2"},
         "policy holds every decision; leave out lists, paths and opt_level"),
        ({"fp32_file_path": "p.yaml"},
         "fp32_file_path is 'p.yaml'; pass it by name: policy='p.yaml'"),
        ({"fp16_file_path": "p.yaml"},
         "fp16_file_path is 'p.yaml'; pass it by name: policy='p.yaml'"),
        ({"policy": 3},
         "policy must be an hmpx.Policy, the path of a policy file, or a dict, not 3"),
        ({"policy": ["p.yaml"]},
         "policy must be an hmpx.Policy, the path of a policy file, or a dict, not ['p.yaml']"),
    ]  # fmt: skip
    for options, message in cases:
        with pytest.raises(OptionError) as error:
            hmpx.convert(**options)
        assert str(error.value) == message


def test_dicts_that_are_no_policy() -> None:
    """As files; what YAML can't hold is told."""
    cases: list[tuple[dict[Any, Any], str]] = [
        ({"lowe": ["mm"]}, "<policy>['lowe']: unknown key 'lowe' of a policy; did you mean 'low'?"),
        ({1: ["mm"]}, f"<policy>['1']: unknown key '1' of a policy {KEYS}"),
        ({"low": ["mm", None]}, "<policy>['low'][1]: an op of low must be a string"),
        ({"low": [object]}, "<policy>['low'][0]: a policy holds strings, numbers, dtypes and "
         "lists, not <class 'object'>"),
    ]  # fmt: skip
    for content, message in cases:
        with pytest.raises(PolicyFileError) as error:
            hmpx.convert(policy=content)
        assert str(error.value) == message
    assert not hmpx.is_converted()


def test_unknown_ops_are_one_warning_or_an_error_if_strict(load: Callable[..., Policy]) -> None:
    """Those of sections too."""
    text = "low: [matmull, mm]\nsections:\n- ndim: 2\n  fp32: [soft_max]\n"
    with pytest.warns(HmpxWarning) as caught:
        policy = load(text)
    assert [str(warning.message) for warning in caught] == [
        "left out of the op lists:\n"
        "  p.yaml:1: unknown op 'matmull'; did you mean 'matmul'?\n"
        "  p.yaml:4: unknown op 'soft_max'; did you mean 'softmax'?"
    ]
    assert caught[0].filename == __file__
    assert policy["mm"].reason == "p.yaml:1"
    with pytest.raises(OpListError) as error:
        load(text, strict=True)
    assert str(error.value) == (
        "p.yaml:1: unknown op 'matmull'; did you mean 'matmul'?\n"
        "p.yaml:4: unknown op 'soft_max'; did you mean 'softmax'?"
    )


# --- writing ------------------------------------------------------------------------------------

NAMES = sorted(name for name in ops.table() if ops.is_castable(name))
OPERATORS = ["div", "truediv", "rtruediv", "itruediv", "mul", "rmul", "imul", "add", "iadd", "radd",
             "matmul", "rmatmul", "sub", "rsub", "isub", "pow", "rpow", "sum", "conv2d"]  # fmt: skip
COMPUTED = st.sampled_from([None, BF16, FP16, FP32, FP64])


@st.composite
def decisions(draw: st.DrawFn, policies: Any = tuple(CastPolicy)) -> Decision:
    """Draws a decision with dtypes of its own."""
    cast_policy = draw(st.sampled_from(policies))
    if cast_policy is CastPolicy.PASS:
        return Decision(cast_policy)
    dtype = {CastPolicy.LOW: draw(st.sampled_from([BF16, FP16])), CastPolicy.FP32: FP32}
    return Decision(
        cast_policy,
        dtype.get(cast_policy),
        accumulate_dtype=draw(COMPUTED),
        output_dtype=draw(COMPUTED),
    )


def by_op(policies: Any = tuple(CastPolicy), **sizes: int) -> Any:
    names = st.one_of(st.sampled_from(OPERATORS), st.sampled_from(NAMES))
    return st.dictionaries(names, decisions(policies), **sizes)


def tuples(values: Any, least: int = 0) -> Any:
    return st.lists(values, min_size=least, max_size=3, unique=True).map(tuple)


@st.composite
def sections(draw: st.DrawFn) -> Section:
    """Draws a section with at least one condition."""
    least, greatest = sorted([draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1 << 40))])
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return Section(
        draw(by_op(min_size=1, max_size=6)),
        module=draw(tuples(texts)),
        module_regex=draw(tuples(st.sampled_from(["a.*", r"layer\.\d+", "", "#", "x: y", "'\""]))),
        module_class=draw(tuples(texts)),
        mode=draw(st.sampled_from([None, "train", "eval"])),
        min_numel=draw(st.sampled_from([None, least])),
        max_numel=draw(st.sampled_from([None, greatest])),
        ndim=draw(tuples(st.integers(0, 5))),
        device=tuple(sorted(draw(tuples(st.sampled_from(["cpu", "cuda", "hpu"]))))),
        dtype=draw(tuples(st.sampled_from([BF16, FP16, FP32, FP64]), least=1)),
    )


LISTED = tuple(policy for policy in CastPolicy if policy is not CastPolicy.PASS)
POLICIES = st.builds(
    Policy,
    by_op(LISTED, max_size=12),
    st.sampled_from([BF16, FP16]),
    st.lists(sections(), max_size=3, unique_by=lambda s: s.conditions).map(tuple),
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(policy=POLICIES)
def test_a_policy_that_is_written_loads_back_equal(tmp_path: Path, policy: Policy) -> None:
    """Whatever it holds: operators apart from their ops, dtypes, sections, odd names."""
    path = tmp_path / "p.yaml"
    path.write_text(policy.to_yaml(), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "(?s).* (has no effect|is read as)"
        )  # lines that are right
        loaded = load_policy(policy=path, strict=True)
    assert loaded == policy, policy.to_yaml()
    assert hash(loaded) == hash(policy)
    assert loaded.to_yaml() == policy.to_yaml()
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    "options",
    [{}, {"opt_level": "O2"}, {"lists": "autocast-cuda"}, {"low_precision_type": "float16"}],
)
def test_shipped_policies_are_written_and_read(
    load: Callable[..., Policy], options: dict[str, Any]
) -> None:
    """Each equal to itself, and readable."""
    policy = load_policy(**options)
    text = policy.to_yaml()
    assert load(text) == policy
    assert text.startswith(f"low_precision_type: {options.get('low_precision_type', 'bfloat16')}\n"
                           "lists: none\nlow:\n- ")  # fmt: skip


def test_what_is_written_is_what_a_person_would_write() -> None:
    """Ops sorted, operators only where they differ, dtypes by name."""
    policy = load_policy(
        policy={
            "lists": "none",
            "low": ["sum accumulate=fp32", "div", "conv2d fp16"],
            "fp32": ["truediv"],
            "sections": [{"module": ["a", "b"], "mode": "train", "dtype": "fp32", "pass": "mm"}],
        }
    )
    assert (
        policy.to_yaml()
        == """\
low_precision_type: bfloat16
lists: none
low:
- conv2d float16
- div
- sum accumulate=float32
fp32:
- truediv
sections:
- module:
  - a
  - b
  mode: train
  dtype:
  - float32
  pass:
  - mm
"""
    )


# --- all faults -----------------------------------------------------------------------------------


def faults_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    found = check_files({"policy": (str(path),)})
    return [fault.replace(f"{path}:", "") for fault in found]


def test_all_faults_of_a_file_are_found_in_the_order_of_its_lines(tmp_path: Path) -> None:
    """An unknown key hides neither the ops of its section nor what follows."""
    text = """\
low: [matmull, mm]
fp32:
  add: [sofmax]
  remofe: [exp]
low_precision_type: bfloat17
sections:
  - modules: enc.*
    low: [bmmm]
  - module: dec.*
    fp32: [softmax, expp]
    low: [softmax]
  - fp32: [exp]
bogus: 1
low: [bmm]
"""
    found = [fault.partition("; did you mean")[0] for fault in faults_of(tmp_path, text)]
    assert [fault.partition(": ")[0] for fault in found] == [
        "1",
        "3",
        "4",
        "5",
        "7",
        "8",
        "10",
        "11",
        "12",
        "13",
        "14",
    ]
    expected = (
        "unknown op 'matmull'",
        "unknown op 'sofmax'",
        "unknown key 'remofe' of fp32",
        "low_precision_type must be",
        "unknown key 'modules' of a section",
        "unknown op 'bmmm'",
        "unknown op 'expp'",
        "'softmax' is in two lists",
        "a section holds for every call",
        "unknown key 'bogus' of a policy",
        "'low' is given twice, at line 1 too",
    )
    for fault, part in zip(found, expected, strict=True):
        assert part in fault


def test_a_dict_is_cited_by_its_keys() -> None:
    """There are no lines: the keys lead to what is wrong, and to what decides."""
    given = {"lists": "none", "sections": [{"module": "a", "low": ["mm", "bmm"]}]}
    policy = hmpx.load_policy(policy=given)
    [section] = policy.sections
    assert section.decisions["bmm"].reason == "<policy>['sections'][0]['low'][1]"
    given["sections"][0]["mod_ule"] = "b"
    with pytest.raises(PolicyFileError, match=r"<policy>\['sections'\]\[0\]\['mod_ule'\]: unknown"):
        hmpx.load_policy(policy=given)


@pytest.mark.parametrize(
    ("module", "op"),
    [
        ("nn.Linear", "linear"),
        ("torch.nn.ReLU", "relu"),
        ("LayerNorm", "layer_norm"),
        ("BatchNorm2d", "batch_norm"),
        ("nn.CrossEntropyLoss", "cross_entropy_loss"),
        ("MSELoss", "mse_loss"),
    ],
)
def test_a_module_in_the_place_of_an_op_is_answered_by_its_op(module: str, op: str) -> None:
    with pytest.raises(hmpx.OpListError, match=f"unknown op '{module}'; did you mean '{op}'"):
        hmpx.Policy.from_ops(low=[module])
    hmpx.Policy.from_ops(low=[op])
