"""Wrong and hostile input to all that is public: made from a seed, tried, and judged.

``python -m tests.fuzzing --count 100000 --seed 1`` tries so many and prints what each kind came to.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import decimal
import enum
import io
import itertools
import json
import linecache
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

import hmpx
from hmpx import HmpxError, HmpxWarning, Policy, cli, formats
from hmpx.compute import LOWERINGS
from hmpx.policy import lists as oplists
from tests.conftest import differences, namespaces

PACKAGE = str(Path(hmpx.__file__).parent)

# --- odd objects -------------------------------------------------------------------------------


class _OddError(Exception):
    """What the odd objects raise."""


def _raises(*args: object) -> Any:
    raise _OddError("on purpose")


ODD_CLASSES = [
    type(f"No{name}", (), {f"__{name.lower()}__": _raises, **also})
    for name, also in (
        ("Repr", {"__str__": _raises}),
        ("Hash", {}),
        ("Eq", {"__hash__": object.__hash__}),
        ("Bool", {}),
        ("Len", {}),
        ("Iter", {}),
        ("Next", {"__iter__": lambda self: self}),
        ("Fspath", {}),
        ("Call", {}),
        ("Int", {"__index__": _raises, "__float__": _raises}),
        ("Getattr", {}),
        ("Contains", {"__getitem__": _raises}),
    )
]


class _Paths:
    def __init__(self, value: object) -> None:
        self._value = value

    def __fspath__(self) -> Any:
        return self._value


class _Kind(enum.Enum):
    LOW = "low"


class _Level(str, enum.Enum):  # as people wrote it before StrEnum
    O1 = "O1"


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


ODD: list[Callable[[], Any]] = [
    *ODD_CLASSES,
    lambda: torch.ones(3, 3),
    lambda: torch.tensor(1.0),
    lambda: torch.ones(2, dtype=torch.int64),
    lambda: torch.empty(0),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.ones(2, dtype=torch.complex64),
    lambda: torch.ones(2, 2).to_sparse(),
    lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.float32,
    lambda: torch.float16,
    lambda: torch.int8,
    lambda: torch.float8_e4m3fn,
    lambda: torch.device("cpu"),
    lambda: torch.Generator(),
    lambda: torch,
    lambda: torch.mm,
    lambda: torch.Size([1, 2]),
    lambda: np.ones(3),
    lambda: np.float32(1),
    lambda: np.str_("mm"),
    lambda: np.bool_(True),
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: -1,
    lambda: 10**5000,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("-inf"),
    lambda: 1j,
    lambda: decimal.Decimal("sNaN"),
    lambda: "",
    lambda: "\0",
    lambda: "\ud800",
    lambda: "x" * 100_000,
    lambda: "/dev/zero",
    lambda: "mm",
    lambda: b"\xff",
    lambda: b"mm",
    lambda: bytearray(b"mm"),
    lambda: memoryview(b"mm"),
    list,
    lambda: ["mm"],
    lambda: [["mm"]],
    lambda: [b"\xff"],
    lambda: [None, torch.ones(2)],
    lambda: ("mm", 1),
    lambda: {"mm"},
    lambda: {"mm": 1},
    lambda: {1: {2: 3}},
    lambda: frozenset({("a",)}),
    lambda: _nested(50),
    lambda: _nested(10_000),
    lambda: _itself(),
    lambda: [ODD_CLASSES[0]()],
    lambda: {"low": [ODD_CLASSES[0]()]},
    lambda: range(10**12),
    lambda: itertools.count(),
    lambda: itertools.repeat("mm"),
    lambda: (name for name in ["mm"]),
    lambda: (1 / 0 for _ in [1]),
    lambda: iter(["mm"]),
    lambda: _Paths("absent.txt"),
    lambda: _Paths(b"absent.txt"),
    lambda: _Paths(3),
    lambda: Path("absent.txt"),
    lambda: Path(),
    lambda: Path("a\0b"),
    lambda: io.StringIO("mm"),
    lambda: sys.stdin,
    lambda: object(),
    lambda: object,
    lambda: _Kind.LOW,
    lambda: _Level.O1,
    lambda: ValueError("x"),
    lambda: NotImplemented,
    lambda: ...,
    lambda: slice(1),
    lambda: lambda *args: None,
    lambda: hmpx.ALLOW,
    lambda: hmpx.Decision(hmpx.DENY),
    lambda: Policy({}),
    lambda: formats.get("posit8_1"),
    lambda: formats.Table("odd_table", range(1000)),
    lambda: nn.Linear(2, 2),
]

GOOD_NAMES = ["mm", "add", "iadd", "truediv", "torch.nn.functional.softmax", "F.gelu", "conv2d",
              "pow.Tensor_Scalar", "aten::relu", "lstm", "matmul", "sum", "*"]  # fmt: skip


@dataclass
class Chooser:
    """What inputs are made with.

    Attributes:
        rng: The source of all choices.
        folder: Where files may be written; the current directory.
    """

    rng: random.Random
    folder: Path
    text_parts: list[str] = field(default_factory=list)

    def odd(self) -> Any:
        """Returns an object of a random kind, made anew."""
        return self.rng.choice(ODD)()

    def one(self, *good: Any, odds: float = 0.5) -> Any:
        """Returns one of ``good``, or something odd."""
        return self.odd() if self.rng.random() < odds or not good else self.rng.choice(good)

    def some(self, choices: dict[str, Callable[[], Any]], most: int = 3) -> dict[str, Any]:
        """Returns a few of ``choices``, made."""
        names = self.rng.sample(sorted(choices), self.rng.randint(1, min(most, len(choices))))
        return {name: choices[name]() for name in names}

    def text(self, parts: list[str], most: int = 25) -> str:
        """Returns a text of such parts, and now and then of any characters."""
        found = []
        for _ in range(self.rng.randint(0, most)):
            if self.rng.random() < 0.05:
                found.append(chr(self.rng.choice([*range(256), 0x85, 0x2028, 0xFEFF, 0x1F600])))
            else:
                found.append(self.rng.choice(parts))
        return "".join(found)

    def mutated(self, data: bytes) -> bytes:
        """Returns ``data`` with a few bytes changed, left out, doubled or cut off."""
        changed = bytearray(data)
        for _ in range(self.rng.randint(1, 4)):
            if not changed:
                break
            at = self.rng.randrange(len(changed))
            match self.rng.randrange(5):
                case 0:
                    changed[at] = self.rng.randrange(256)
                case 1:
                    del changed[at : at + self.rng.randint(1, 8)]
                case 2:
                    changed[at:at] = changed[at : at + self.rng.randint(1, 30)]
                case 3:
                    del changed[at:]
                case _:
                    changed[at:at] = self.rng.choice([b"\n", b"@", b"-", b"*", b" ", b'"', b"\xff"])
        return bytes(changed)

    def write(self, name: str, data: bytes) -> str:
        """Writes a file and returns its name."""
        (self.folder / name).write_bytes(data)
        return name

    def encoded(self, text: str) -> bytes:
        """Returns ``text`` in some encoding, nearly always the right one."""
        if self.rng.random() < 0.03:
            return text.encode(self.rng.choice(["utf-16", "utf-32", "latin-1"]), "replace")
        return self.rng.choice([b"", b"", b"", b"\xef\xbb\xbf"]) + text.encode(
            errors="surrogatepass"
        )


# --- files -------------------------------------------------------------------------------------

LIST_PARTS = ["mm", "add", "matmull", "iadd", "torch.nn.functional.softmax", "\n", "\n", "\n", "\n",
              "\r\n", " ", "\t", "#", "# a comment", "@hmp", "@autocast-cuda", "@hpm", "@", "-mul",
              "-", "--", "*", "float16", "accumulate=fp32", "output=", "output=float32", "x=1",
              "custom[posit16_1]16", "posit8_1", ".", "..", "__add__", "\0", "\ufeff", "é", "\ud800",
              "size", "x" * 300, ",", "=", "==", "pow.Tensor_Scalar", "aten::relu"]  # fmt: skip

YAML_PARTS = ["low", "fp32", "sections", "lists", "pass", "module", "module_regex", "ndim",
              "min_numel", "phase", "device", "dtype", "low_precision_type", "add", "remove", ": ",
              ":\n", "\n", "\n- ", "\n  ", "- ", "  ", "[", "]", "{", "}", ", ", "&a ", "*a",
              "!!int ", "!!python/name:os.system ", "!x ", "'", '"', "|\n ", "> ", "# ", "---\n",
              "...\n", "%YAML 1.1\n", "<<", "? ", "@hmp", "*", "mm", "conv2d float16",
              "sum accumulate=float32", "-mul", "hmp", "none", "null", "~", "true", "1", "-1",
              "0x10", "1e3", "1:30", ".inf", "²", "\t", "\0", "\ufeff", "\u2028", "\x85", "\x7f",
              "\\U00110000", "(", "a{9999999999}", "train", "cpu", "fp32", "float64", "é",
              "%TAG ! tag:x\n", "!<tag:yaml.org,2002:int> ", "&a" * 50, "[" * 120]  # fmt: skip

YAML_GOOD = [
    "low_precision_type: float16\nlists: hmp\nlow: [tan, softmax]\nfp32:\n  add: [exp]\n"
    "  remove: [log, embedding]\nwidest: {remove: [cat]}\nfirst: {remove: lerp, add: [cross]}\n"
    "pass: [relu]\nfollow: [avg_pool2d]\n",
    "lists: none\nsections:\n- {module: head, phase: eval, low: [linear]}\n"
    "- {module: ['head*', \"body.1\"], low: [linear]}\n- {module_regex: 'body\\.[23]', fp32: [mm]}\n"
    "- {module_class: Sequential, follow: [linear output=float64]}\n"
    "- ndim: [1, 2]\n  min_numel: 1_000\n  device: cpu\n  dtype: [bf16]\n  low: [tan, '*']\n",
]

JSON_PARTS = ["{", "}", "[", "]", ":", ",", '"', '"hmp_bf16_ops"', '"hmp_fp32_ops"', '"hmp_opt_level"',
              '"use_habana_mixed_precision"', '"autocast_bf16_ops"', '"mm"', '"exp"', '"O1"', '"O2"',
              "true", "false", "null", "1", "-1.5e300", "NaN", "Infinity", "9" * 5000, "\n", " ",
              "\t", "\r", "\x7f", "\ufeff", '"\\ud800"', '"\\u0000"', '"' + "k" * 2000 + '"',
              "[" * 200, "[" * 100_000, "\\", "'", "#", "é", '"use_fused_adam"']  # fmt: skip

JSON_GOOD = [
    json.dumps({"use_habana_mixed_precision": True, "hmp_opt_level": "O1", "hmp_is_verbose": False,
                "use_fused_adam": True, "architectures": ["A", {"b": [None, 1.5]}],
                "hmp_bf16_ops": ["add", "gelu"], "hmp_fp32_ops": ["softmax", "truediv"]}, indent=1),
    json.dumps({"autocast_bf16_ops": ["linear", "é"], "autocast_fp32_ops": None}),
    '{"a": ' + "[" * 300 + "]" * 300 + "}",
]  # fmt: skip


def list_text(c: Chooser) -> Callable[[], object]:
    """A list file of any text, or a good one with damage."""
    if c.rng.random() < 0.5:
        data = c.encoded(c.text(LIST_PARTS))
    else:
        name = c.rng.choice(sorted(oplists.directory().glob("*/*.txt")))
        data = c.mutated(name.read_bytes())
    argument = c.rng.choice(["bf16_file_path", "fp32_file_path", "fp16_file_path"])
    path = c.write("a.txt", data)
    return lambda: hmpx.load_policy(**{argument: path}, strict=c.rng.random() < 0.2)


def _policy_text(c: Chooser, name: str, parts: list[str], good: list[str]) -> Callable[[], object]:
    if c.rng.random() < 0.5:
        data = c.encoded(c.text(parts))
    else:
        data = c.rng.choice(good).encode()
        data = c.mutated(data) if c.rng.random() < 0.9 else data
    path = c.write(name, data)
    is_written = c.rng.random() < 0.05  # takes a third of a second
    return lambda: _shown(hmpx.load_policy(policy=path), is_written)


def yaml_text(c: Chooser) -> Callable[[], object]:
    """A YAML file of any text, or a good one with damage; now and then a long one."""
    if c.rng.random() < 0.002:
        head = c.rng.choice(YAML_GOOD)
        path = c.write("a.yaml", c.mutated((head + "# x\n" * 20_000).encode()))
        return lambda: hmpx.load_policy(policy=path)
    return _policy_text(c, "a.yaml", YAML_PARTS, YAML_GOOD)


def json_text(c: Chooser) -> Callable[[], object]:
    """A JSON file of any text, or a good one with damage."""
    return _policy_text(c, "a.json", JSON_PARTS, JSON_GOOD)


def _shown(policy: Policy, is_written: bool) -> None:
    """Shows a policy in every way, or writes it and reads it again."""
    assert len(repr(policy)) <= 100
    assert "\n" not in repr(policy)
    assert str(policy)
    assert policy._repr_html_().startswith("<table>")
    if is_written:
        assert hmpx.load_policy(policy=yaml.safe_load(policy.to_yaml())) == policy


# --- objects -----------------------------------------------------------------------------------


def from_ops(c: Chooser) -> Callable[[], object]:
    """`Policy.from_ops`."""
    lists: dict[str, Callable[[], Any]] = {
        name: lambda: c.one(["mm"], "add", ("sum", "exp"))
        for name in ("low", "fp32", "widest", "first")
    }
    lists["low_precision_type"] = lambda: c.one("fp16", torch.float16, "posit8_1")
    options = c.some(lists)
    return lambda: Policy.from_ops(**options)


def _list_options(c: Chooser) -> dict[str, Callable[[], Any]]:
    return {
        "bf16_file_path": lambda: c.one("", None, "good.txt"),
        "fp32_file_path": lambda: c.one("", None, "good_fp32.txt"),
        "fp16_file_path": lambda: c.one("", None),
        "opt_level": lambda: c.one("O1", "O2", "O3"),
        "low_precision_type": lambda: c.one("bf16", torch.float16, "float8_e4m3fn"),
        "lists": lambda: c.one(None, "hmp", "o2", "."),
        "policy": lambda: c.one(None, "good.yaml", {"low": ["mm"]}),
        "strict": lambda: c.one(True, False),
    }


def load(c: Chooser) -> Callable[[], object]:
    """`load_policy`."""
    options = c.some(_list_options(c))
    return lambda: hmpx.load_policy(**options)


def mapping(c: Chooser) -> Callable[[], object]:
    """A policy given as a dict."""

    def value(levels: int) -> Any:
        if not levels or c.rng.random() < 0.4:
            return c.one("mm", ["mm"], "hmp", "none", 1, odds=0.3)
        if c.rng.random() < 0.5:
            return [value(levels - 1) for _ in range(c.rng.randint(0, 3))]
        keys = ["low", "fp32", "sections", "lists", "module", "ndim", "add", "remove", "phase"]
        return {
            c.one(*keys, odds=0.1) if c.rng.random() < 0.0 else c.rng.choice(keys): value(
                levels - 1
            )
            for _ in range(c.rng.randint(0, 3))
        }

    content = {name: value(3) for name in c.rng.sample(["low", "fp32", "sections", "lists"], 2)}
    return lambda: hmpx.load_policy(policy=content)


def convert(c: Chooser) -> Callable[[], object]:
    """`convert`, with names and without."""
    options = {
        **_list_options(c),
        "isVerbose": lambda: c.one(False),
        "device_types": lambda: c.one(None, "cpu", ["cuda"], {"cpu", "hpu"}),
        "legalize": lambda: c.one("never", "always"),
        "reuse_casts": lambda: c.one(True, False),
        "rounding": lambda: c.one("nearest", "stochastic"),
        "round_gradients": lambda: c.one(True, False),
    }
    given = c.some(options)
    given.setdefault("legalize", "never")
    if c.rng.random() < 0.95:  # a conversion takes long; most inputs are to be refused
        given[c.rng.choice(["device_types", "legalize", "rounding", "reuse_casts"])] = c.odd()
    args = [c.one("", "O1") for _ in range(c.rng.choice([0, 0, 0, 1, 2, 3, 4, 5]))]
    for name, _ in zip(("bf16_file_path", "fp32_file_path", "isVerbose"), args, strict=False):
        given.pop(name, None)

    def call() -> None:
        session = hmpx.convert(*args, **given)
        assert len(repr(session)) <= 130
        session.revert()

    return call


def rule(c: Chooser) -> Callable[[], object]:
    """`register_rule` and `unregister_rule`."""
    op, function = c.one(*GOOD_NAMES, ["mm", "add"]), c.one(lambda call: None)
    level = c.one(10, odds=0.3)

    def call() -> None:
        if c.rng.random() < 0.3:
            hmpx.unregister_rule(op, function)
            return
        made = hmpx.register_rule(op, function, level)
        try:
            if function is None:
                made(c.odd())
        finally:
            hmpx.rules.RULES.change(())

    return call


def decision(c: Chooser) -> Callable[[], object]:
    """`Decision`, `Policy`, and looking up in one."""

    def call() -> None:
        made = hmpx.Decision(
            c.one(hmpx.ALLOW, hmpx.DENY, odds=0.3),
            c.one(None, torch.float16, odds=0.3),
            **c.some(
                {
                    "accumulate_dtype": lambda: c.one(None, torch.float32),
                    "output_dtype": lambda: c.one(None, torch.float32),
                    "reason": lambda: c.one("", "why"),
                }
            ),
        )
        assert repr(made)

    def lookup() -> None:
        policy = c.one(Policy({}), odds=0)
        c.rng.choice([policy.__getitem__, policy.unmatched])(c.odd())

    def construct() -> None:
        made = Policy(
            c.one({}, {"mm": hmpx.Decision(hmpx.ALLOW)}, {"mm": 3}, {3: 3}),
            c.one(torch.bfloat16, odds=0.3),
            c.one((), [], odds=0.3),
        )
        assert len(repr(made)) <= 100
        assert str(made)

    return c.rng.choice([call, lookup, construct])


def number_formats(c: Chooser) -> Callable[[], object]:
    """All of `hmpx.formats`."""
    known = ["float8_e4m3fn", "posit8_1", "mxfp4_e2m1", "bfloat16", "custom[posit16_1]16",
             formats.get("posit16_2")]  # fmt: skip
    x = c.one(torch.ones(4), torch.ones(2, 2, dtype=torch.bfloat16), odds=0.4)
    rounding, overflow = (
        c.one("nearest", "stochastic", "up", odds=0.3),
        c.one(None, "nan", odds=0.3),
    )
    generator = c.one(None, torch.Generator(), odds=0.2)

    def small() -> Any:
        return c.one(3, 4, 5, 8, odds=0.3)

    def name() -> Any:
        return c.one("fuzzed", odds=0.2)

    def codes() -> Any:
        return c.one(torch.ones(2, dtype=torch.uint8), (torch.ones(2, dtype=torch.uint8),) * 2)

    def registered() -> None:
        format = c.one(
            formats.Float("fuzzed", 4, 3),
            formats.Posit("fuzzed", 8, 1),
            formats.Table("fuzzed", [1, 2]),
        )
        try:
            formats.register(format, c.one(None, 150))
        finally:
            with contextlib.suppress(HmpxError):
                formats.unregister("fuzzed")

    def op() -> None:
        try:
            formats.register_op(
                c.one(torch.mul), c.one("mul", "add"), c.one("posit8_1"), c.one(None, "cpu")
            )
        finally:
            LOWERINGS.change({})

    calls: list[Callable[[], object]] = [
        lambda: formats.quantize(x, c.one(*known), rounding, overflow, generator),
        lambda: formats.encode(x, c.one(*known), rounding, overflow, generator),
        lambda: formats.decode(codes(), c.one(*known)),
        lambda: formats.get(c.odd()),
        lambda: formats.unregister(c.odd()),
        lambda: formats.Float(name(), small(), small(), **c.some(
            {"bias": lambda: c.one(None, 7), "kind": lambda: c.one("fn"),
             "subnormals": lambda: c.one(True), "overflow": lambda: c.one(None, "nan")})),
        lambda: formats.Posit(name(), small(), small()),
        lambda: formats.Fixed(name(), small(), small()),
        lambda: formats.Block(name(), c.one(formats.get("float4_e2m1fn")), small(), small()),
        lambda: formats.Table(name(), c.one([1, 2], [1, 10**400], ["1", "x"], [2, 1], odds=0.7)),
        lambda: formats.Custom(name(), c.odd()),
        lambda: formats.create_lower_func(c.one("os:getcwd", "no.such:thing", ":", ".x:y", "json:")),
        registered,
        op,
    ]  # fmt: skip
    return c.rng.choice(calls)


def freezing(c: Chooser) -> Callable[[], object]:
    """`freeze`, of which every call is to be refused: torch isn't converted."""
    model = c.one(nn.Linear(2, 2))
    examples = [c.odd() for _ in range(c.rng.randint(0, 2))]
    options = c.some(
        {
            "outputs": lambda: c.one("fp32", "keep"),
            "store": lambda: c.one("dtype", "codes"),
            "keep_fp32": lambda: c.one(True),
        }
    )
    return lambda: hmpx.freeze(model, *examples, **options)


# --- the command line --------------------------------------------------------------------------

WORDS = ["check", "ops", "run", "doctor", "--bf16", "--fp32", "--fp16", "--policy", "--lists",
         "--opt-level", "--low-precision-type", "--strict", "--formats", "--verbose-once", "-m", "--",
         "--device-types", "--legalize", "never", "O2", "good.txt", "good.yaml", "good_fp32.txt",
         "a.txt", "absent.txt", "", ".", "..", "/dev/zero", "script.py", "hmp", "o2", "softmax",
         "conv*", "[", "[!", "x" * 3000, "\ud800", "\udcff", "a\nb", "json", "no.such.module", ".x",
         "posit8_1", "cpu", "cpu,cuda", ",", "-1", "*"]  # fmt: skip

SCRIPTS = [b"x = 1", b"raise SystemExit(3)", b"raise SystemExit('bye')", b"1 / 0", b"\0", b"\xff",
           b"def f(:", b"# -*- coding: nothing -*-\n", b"import no_such_module", b"x = " + b"(" * 300,
           b"import hmpx; hmpx.convert('O1', '', '', False)", b"PK\x03\x04broken"]  # fmt: skip


def command_line(c: Chooser) -> Callable[[], object]:
    """`hmpx` with any arguments; ``run`` runs small scripts, and what isn't one."""
    command = c.rng.choice(["check", "ops", "run", "doctor", c.rng.choice(WORDS)])
    argv = [command, *c.rng.choices(WORDS, k=c.rng.randint(0, 4))]
    if command == "doctor" and c.rng.random() < 0.9:  # measures the machine
        argv += ["--lists", "absent"]
    if command == "ops" and c.rng.random() < 0.8:
        argv += ["softmax"] if len(argv) == 1 else []
    if command == "run":
        argv += ["--legalize", "never"] if c.rng.random() < 0.3 else []
        c.write("script.py", c.rng.choice(SCRIPTS))
    c.write("a.txt", c.encoded(c.text(LIST_PARTS)))
    return lambda: _main(argv)


def _main(argv: list[str]) -> None:
    kept = list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook
    streams = [
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors=e) for e in ("strict", "backslashreplace")
    ]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                status: Any = cli.main(argv)
            except SystemExit as stop:
                status = stop.code
        # 3 and "bye" are what scripts exit with
        assert status in (0, 1, 2, 3, "bye", None), status
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"], sys.excepthook = kept
        hmpx.revert()


# --- trying ------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[Chooser], Callable[[], object]], int]] = {
    "op lists": (list_text, 20),
    "YAML": (yaml_text, 20),
    "JSON": (json_text, 20),
    "dicts": (mapping, 10),
    "Policy.from_ops": (from_ops, 10),
    "load_policy": (load, 10),
    "convert": (convert, 8),
    "register_rule": (rule, 8),
    "Decision and Policy": (decision, 8),
    "hmpx.formats": (number_formats, 20),
    "freeze": (freezing, 4),
    "command line": (command_line, 3),
}


@dataclass
class Outcome:
    """What trying came to.

    Attributes:
        counts: Kind -> what came of it -> how often.
        slowest_s: Kind -> the longest processor time of one input.
        faults: What should not have been, with the seed that makes the input again.
    """

    counts: dict[str, collections.Counter[str]]
    slowest_s: dict[str, float]
    faults: list[str]


def attempts(count: int) -> Iterator[str]:
    """Yields kinds by their weights, ``count`` in all."""
    order = [kind for kind, (_, weight) in KINDS.items() for _ in range(weight)]
    random.Random(0).shuffle(order)
    return itertools.islice(itertools.cycle(order), count)


def run(count: int, seed: int, most_s: float) -> Outcome:
    """Tries ``count`` inputs; none may take longer than ``most_s`` of processor time."""
    outcome = Outcome(
        collections.defaultdict(collections.Counter), collections.defaultdict(float), []
    )
    here = Path.cwd()
    formats.quantize(torch.ones(4), "posit8_1")  # waits for what is compiled once
    before = namespaces()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            (Path(folder) / "good.txt").write_text("mm\nadd\n")
            (Path(folder) / "good_fp32.txt").write_text("softmax\nexp\n")
            (Path(folder) / "good.yaml").write_text(YAML_GOOD[1])
            for number, kind in enumerate(attempts(count)):
                own = f"{seed}:{number}"
                chooser = Chooser(random.Random(own), Path(folder))
                call = KINDS[kind][0](chooser)
                began_s = time.thread_time()
                word, fault = _tried(call)
                took_s = time.thread_time() - began_s
                outcome.counts[kind][word] += 1
                outcome.slowest_s[kind] = max(outcome.slowest_s[kind], took_s)
                if fault is None and took_s > most_s:
                    fault = f"took {took_s:.1f} s"
                if fault is None and hmpx.is_converted():
                    hmpx.revert()
                    fault = "left torch converted"
                if fault is None and (number % 50 == 0 or kind == "convert"):
                    patched = differences(before)
                    fault = f"left patched: {patched[:5]}" if patched else None
                if fault is not None:
                    outcome.faults.append(f"{kind} {own}: {fault}")
        finally:
            os.chdir(here)
    return outcome


def _tried(call: Callable[[], object]) -> tuple[str, str | None]:
    """Returns what came of ``call`` in a word, and what is wrong with that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", HmpxWarning)
        try:
            call()
        except HmpxError as error:
            text = str(error)
            is_long = len(text) > 5_000 or "\n\n" in text
            return type(error).__name__, f"a message of {len(text)} characters" if is_long else None
        except TypeError as error:
            return "TypeError", None if _is_ours(error) else _described(error)
        except Exception as error:
            return "fault", _described(error)
    return "accepted", None


def _is_ours(error: BaseException) -> bool:
    """Whether a ``raise`` of hmpx raised ``error``."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return frame.filename.startswith(PACKAGE) and line.strip().startswith("raise ")


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-4:]]
    try:
        message = str(error)[:200]
    except Exception:
        message = "?"
    return f"{type(error).__name__}: {message} at {' > '.join(where)}"


def main() -> int:
    """Tries what the command line asks for; returns 1 if there are faults."""
    parser = argparse.ArgumentParser(description="Tries wrong and hostile inputs to hmpx.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-s", type=float, default=2.0, help="processor time of one input")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcome = run(options.count, options.seed, options.most_s)
    for kind, counts in outcome.counts.items():
        listed = ", ".join(f"{count:,} {word}" for word, count in counts.most_common())
        print(
            f"{kind}: {sum(counts.values()):,}: {listed}; slowest {outcome.slowest_s[kind]:.2f} s"
        )
    for fault in outcome.faults[:100]:
        print(fault)
    print(f"{sum(map(sum, (c.values() for c in outcome.counts.values()))):,} inputs, "
          f"{len(outcome.faults):,} faults")  # fmt: skip
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
