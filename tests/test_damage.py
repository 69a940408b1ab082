"""Files of users: hmpx reads all of them in one way, with limits, and names those that are damaged."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx import checking, checkpoints, exporting, files, monitoring, reports
from hmpx.errors import HmpxError
from hmpx.files import Kind
from hmpx.policy.files import read_options
from hmpx.tuning.search import Journal

from .reports.samples import row, waste

ROOT = Path(hmpx.__file__).parent

# --- good files, and their readers ---------------------------------------------------------------

_LIST = b"# mine\nlinear\nconv2d float16\n-mul\n@hmp\nsum accumulate=float32\nbmm output=float32\n"
_POLICY = b"""\
low_precision_type: bfloat16
lists: hmp
low: [linear, "conv2d float16"]
fp32: {add: [exp], remove: [softmax]}
exclude: ["lm_head", "*.norm"]
sections:
- module: "blocks.[0-3].*"
  low: [gelu]
- module_regex: 'layers\\.(\\d+)\\.(q|k)_proj'
  mode: train
  min_numel: 100
  ndim: [2, 3]
  dtype: float32
  low: [mm]
"""
_GAUDI = json.dumps(
    {"use_habana_mixed_precision": True, "hmp_opt_level": "O1", "hmp_bf16_ops": ["mm", "bmm"],
     "hmp_fp32_ops": ["exp"], "hmp_is_verbose": False, "model_type": "bert"}, indent=1
).encode()  # fmt: skip
_OPTIONS = b"low_precision_type: float16\nlegalize: fast\ndevice_types: [cpu, cuda]\n"
_CONTRACT = b"""\
expect:
- {op: softmax, compute: float32}
- {module: "*.fc", output: [bfloat16, float32]}
- {tensor: "*.weight", contents: float32}
- {optimizer: exp_avg, contents: float32}
- {op: exp, mode: train, compute: float32}
"""
_CHECKPOINT = (
    b'{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}'
)
_BASELINE = b"HP101 softmax blocks.0 train.py\nHP103 sub  train.py\n"
_SOURCE = b"# coding: utf-8\nimport torch\n\nx = torch.ones(3)\n"


def _trace() -> bytes:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.trace("good.hmpx"):
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Path("good.hmpx").read_bytes()


def _journal() -> bytes:
    Path("good.jsonl").unlink(missing_ok=True)
    _read_journal("good.jsonl")
    return Path("good.jsonl").read_bytes()


def _read_journal(path: str) -> None:
    journal = Journal(path, {"model": "m", "seed": 0})
    journal.by_spot("spots", lambda: {("linear", "a"): (3, 4), ("exp", "b"): (5, 6)}, int, int)
    journal.by_spot("scores", lambda: {("linear", "a"): (0.5, True)}, float, bool)
    kind = tuple[float, files.Mapping[str, tuple[float, float, float]]]
    journal.remembered([["exp"], 0.1], lambda: (float("inf"), {"exp": (1.0, 2.0, 3.0)}), kind)


def _report() -> bytes:
    rows = (row(seconds=0.5), row(op="exp", dtype="float32", location="good.py:4"))
    return reports.Report(rows, (waste(),), {"torch": "2"}, "KeyError: 'x'").to_json().encode()


def _read_report(path: str) -> None:
    found = reports.read_json(path)
    for each in (found, reports.merged([found, found])):
        str(each), each.to_html(), each.to_csv(), each.to_json(), each._repr_html_()
        str(each.by_op()), str(each.by_module()), str(each.by_site())


def _read_trace(path: str) -> None:
    for pair in (("good.hmpx", path), (path, "good.hmpx")):
        found = hmpx.diff_runs(*pair)
        str(found), found.to_html(), found.to_json(), found._repr_html_()


def _read_source(path: str) -> None:
    reports.Report((row(location=f"{path}:4"), row(location=f"{path}:9999"))).to_html()


def _state(suffix: str) -> Callable[[], bytes]:
    def made() -> bytes:
        tensors = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
        if suffix == ".pt":
            torch.save(tensors, "good.pt")
        else:
            pytest.importorskip("safetensors.torch").save_file(tensors, "good.safetensors")
        return Path(f"good{suffix}").read_bytes()

    return made


def _onnx() -> bytes:
    helper = pytest.importorskip("onnx").helper
    half = helper.make_tensor("w", 10, [2], [1.0, 2.0])
    y = helper.make_tensor_value_info("y", 1, [2])
    branch = helper.make_graph([helper.make_node("Add", ["b", "w"], ["y"])], "branch", [], [y])
    nodes = [
        helper.make_node("Cast", ["a"], ["b"], name="cast", to=10),
        helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch),
    ]
    inputs = [
        helper.make_tensor_value_info("a", 1, [2]),
        helper.make_tensor_value_info("flag", 9, []),
    ]
    graph = helper.make_graph(nodes, "graph", inputs, [y], [half])
    return bytes(helper.make_model(graph).SerializeToString())


def _read_onnx(path: str) -> None:
    found = exporting.read_onnx(path)
    str(found), found.to_html(), found.to_json(), found.to_csv(), found._repr_html_()


_MONITORED = b'{"hmpx_monitor": 1, "about": {"torch": "2.13"}}\n{"step": 0, "figures": {"hmpx/zeros": 0.5}}\n'


#: Kind, name of the file -> its good content, or a function that returns it, and its reader.
GOOD: dict[tuple[Kind, str], tuple[Any, Callable[[str], object]]] = {
    (files.OP_LIST, ".txt"): (_LIST, lambda path: str(hmpx.load_policy(path))),
    (files.POLICY, ".yaml"): (_POLICY, lambda path: str(hmpx.load_policy(policy=path))),
    (files.POLICY, ".json"): (_GAUDI, lambda path: str(hmpx.load_policy(policy=path))),
    (files.OPTIONS, ".yaml"): (_OPTIONS, read_options),
    (files.CONTRACT, ".yaml"): (_CONTRACT, hmpx.expect),
    (files.BASELINE, ".keys"): (_BASELINE, lambda path: files.read_text(path, files.BASELINE)),
    (files.SOURCE, ".py"): (_SOURCE, _read_source),
    (files.REPORT, ".json"): (_report, _read_report),
    (files.TRACE, ".hmpx"): (_trace, _read_trace),
    (files.JOURNAL, ".jsonl"): (_journal, _read_journal),
    (files.MONITORED, ".jsonl"): (_MONITORED, monitoring.read_run),
    (files.ONNX, ".onnx"): (_onnx, _read_onnx),
    (files.CHECKPOINT, ".json"): (_CHECKPOINT, checkpoints.read_config),
    (files.STATE, ".pt"): (_state(".pt"), checking.read_state),
    (files.STATE, ".safetensors"): (_state(".safetensors"), checking.read_state),
}

#: Kinds whose reader must name the line, too, wherever a line is damaged.
OF_LINES = {files.OP_LIST, files.TRACE, files.JOURNAL}


def test_each_kind_of_file_is_damaged_here() -> None:
    kinds = {each for each in vars(files).values() if isinstance(each, Kind)}
    assert {kind for kind, _ in GOOD} == kinds


# --- damage --------------------------------------------------------------------------------------

_TEXTS = [
    b"\0", b"\xff\xfe", b"[" * 3000, b"{" * 3000, b"a: " * 2000, b"1" * 5000, b"1e999", b"NaN", b"-1",
    b'"', b"\\", b"\\ud800", b"&a [*a]", b"!!python/object:os.system", b"\r\n", b"\xe2\x80\xae", b"*", b"@",
    b"-", b"#", b";", b"- - - -", b"? ", b"((((a+)+)+)+)$", b"{}", b"[]", b"null", b"\x1b[31m",
]  # fmt: skip

_VALUES: list[Any] = [
    None, True, -1, 0, 3, 1 << 40, 1 << 70, 10**400, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "NaN", "\ud800", "a:b:-3", "\n", "../../x.py:1", "good.py:99999999999999999999", [], [[]], [None],
    ["x"], [1] * 50, {}, {"x": 1}, {"": {}}, [[[[[[]]]]]],
]  # fmt: skip


def _changed(draw: random.Random, value: Any) -> Any:
    """Returns JSON with another value at a random place."""
    inside = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()  # fmt: skip
    if not inside or draw.random() < 0.15:
        return draw.choice(_VALUES)
    key = draw.choice([*inside])
    found = dict(value) if isinstance(value, dict) else list(value)
    what = draw.random()
    if what < 0.1:
        del found[key]
    elif what < 0.2 and isinstance(found, dict):
        found[f"{key}x"] = found[key]
    elif what < 0.2:
        found.insert(key, found[key])
    else:
        found[key] = _changed(draw, found[key])
    return found


def _damaged(draw: random.Random, content: bytes, *, is_json: bool) -> bytes:
    lines = content.split(b"\n")
    at = draw.randrange(len(lines))
    way = draw.randrange(8)
    if is_json and way < 4:
        with contextlib.suppress(ValueError):  # a line, or the whole
            whole = not lines[at] or _is_json(content)
            old = json.loads(content if whole else lines[at])
            new = json.dumps(_changed(draw, old), indent=1 if whole else None).encode()
            return new if whole else b"\n".join([*lines[:at], new, *lines[at + 1 :]])
    if way in (0, 4):
        return content[: draw.randrange(len(content) + 1)]
    if way in (1, 5):
        del lines[at]
    elif way == 2:
        lines.insert(at, draw.choice(lines))
    elif way == 3:
        lines[at], lines[-1] = lines[-1], lines[at]
    else:
        place = draw.randrange(len(content) + 1)
        cut = place + draw.choice([0, 0, 1, 8])
        new = draw.choice([*_TEXTS, draw.randbytes(5)])
        return content[:place] + new + content[cut:]
    return b"\n".join(lines)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _damage(kind: Kind, suffix: str, seeds: range) -> None:
    good, read = GOOD[kind, suffix]
    content = good if isinstance(good, bytes) else good()
    Path(f"good{suffix}").write_bytes(content)
    read(f"good{suffix}")
    is_json = suffix in (".json", ".jsonl", ".hmpx")
    refused = 0
    for seed in seeds:
        draw = random.Random(f"{kind.name} {suffix} {seed}")
        damaged = content
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            damaged = _damaged(draw, damaged, is_json=is_json)
        Path(f"bad{suffix}").write_bytes(damaged)
        start = time.perf_counter()
        try:
            read(f"bad{suffix}")
        except HmpxError as error:
            refused += 1
            place = (
                rf"bad{re.escape(suffix)}:\d+: "
                if kind in OF_LINES and damaged.count(b"\n") > 1
                else "bad"
            )
            assert re.search(rf"{place}|another search|is not a journal", str(error)), (seed, error)
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {kind.name}: {damaged[:300]!r}") from error
        assert time.perf_counter() - start < 60, seed
    assert refused or kind in (files.SOURCE, files.BASELINE)


@pytest.mark.filterwarnings("ignore::hmpx.HmpxWarning")
@pytest.mark.parametrize(
    ("kind", "suffix"), GOOD, ids=lambda each: each if isinstance(each, str) else each.name
)
def test_damaged_files_are_read_or_named(
    kind: Kind, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an HmpxError, with the line; results that are read can be shown in all ways."""
    monkeypatch.chdir(tmp_path)
    _damage(kind, suffix, range(100))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hmpx.HmpxWarning")
@pytest.mark.parametrize(
    ("kind", "suffix"), GOOD, ids=lambda each: each if isinstance(each, str) else each.name
)
def test_many_damaged_files(
    kind: Kind, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _damage(kind, suffix, range(100, 3000))
