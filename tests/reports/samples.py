"""Reports to look at: of one row, of many, and of hostile text."""

from __future__ import annotations

import random
from typing import Any

from hmpx.reports import Report, Row, Waste

#: Text that users may have in names of modules, ops and files.
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"'`&amp;",
    "{{ 7 * 7 }}{% raw %}",
    "two\nlines\r\n",
    "\x1b[31mred\x1b[0m\x00\x07",
    "\U0001f600\u202egnp.exe\udc80",
    "__proto__",
    "漢字" * 30,
    "e\u0301" * 100,
    "=cmd|' /C calc'!A0",
    "[red]rich[/red]",
    "." * 300,
    "",
)


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "op": "linear",
        "site": "torch.nn.functional.linear",
        "module": "blocks.0.fc1",
        "location": "train.py:12",
        "phase": "forward",
        "device_type": "cpu",
        "cast_policy": "LOW",
        "reason": "lists/hmp/bf16.txt:12",
        "dtype": "bfloat16",
        "input_dtypes": ("float32", "float32"),
        "cast_dtypes": ("bfloat16", "bfloat16"),
        "output_dtypes": ("bfloat16",),
        "calls": 2,
        "casts": 4,
        "cast_bytes": 4000,
        "flops": 800,
        "bytes": 6000,
        "seconds": None,
    }
    return Row(**{**values, **changes})


def wide_row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "op": "softmax",
        "site": "torch.softmax",
        "module": "blocks.0",
        "cast_policy": "FP32",
        "dtype": "float32",
        "input_dtypes": ("bfloat16",),
        "cast_dtypes": ("float32",),
        "output_dtypes": ("float32",),
        "casts": 2,
        "flops": 0,
    }
    return row(**{**values, **changes})


def waste(**changes: Any) -> Waste:
    values: dict[str, Any] = {
        "kind": "round trip",
        "what": "linear -> softmax -> matmul",
        "module": "blocks.0",
        "location": "train.py:14",
        "times": 24,
        "bytes": 12_000_000,
        "fix": "bf16.txt: softmax",
        "note": "less accurate: compare before you keep it",
    }
    return Waste(**{**values, **changes})


def large(count: int) -> Report:
    """Returns a report of so many rows that all differ, of a deep model."""
    chance = random.Random(0)
    ops = ["linear", "softmax", "conv2d", "layer_norm", "add", "scaled_dot_product_attention"]
    rows = []
    for i in range(count):
        make = chance.choice([row, wide_row])
        rows.append(
            make(
                op=f"{chance.choice(ops)}_{i % 1000}",
                module=f"model.stage{i % 7}.blocks.{i % 50}.part{i % 3}",
                location=f"/home/somebody/project/models/part{i % 20}.py:{i}",
                phase=chance.choice(["forward", "backward"]),
                calls=i + 1,
                flops=chance.randrange(10**9),
                seconds=chance.random(),
            )
        )
    wasted = [
        waste(location=f"/home/somebody/project/models/part{i % 20}.py:{i}", bytes=i * 1000)
        for i in range(count // 10)
    ]
    return Report(tuple(rows), tuple(wasted), {"torch": "2.13.0"})


def hostile() -> Report:
    """Returns a report with every hostile text in every field of texts, and with odd numbers."""
    rows, wasted = [], []
    for i, text in enumerate(HOSTILE):
        make = (row, wide_row)[i % 2]
        fields = ("op", "site", "module", "location", "phase", "device_type", "reason")
        rows.append(make(**dict.fromkeys(fields, text), seconds=[None, 0.5][i % 2]))
        rows.append(
            row(
                dtype=text,
                input_dtypes=(text, "float32"),
                output_dtypes=(text,),
                flops=10 ** (20 * i),
            )
        )
        rows.append(row(module=f"model.{text}.last", location=f"{text}.py:3", calls=10**400))
        texts = dict.fromkeys(("kind", "what", "module", "location", "fix", "note"), text)
        wasted.append(waste(**texts, bytes=10 ** (i * 3)))
    about = {text: text for text in HOSTILE}
    return Report(tuple(rows), tuple(wasted), about, "\n".join(HOSTILE))
