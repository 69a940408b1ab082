"""Reports as text: the verdict, fixes and tables, never wider than 80 columns."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from hmpx.reports import Column, Report, ReportTable, grouped, totals

from .samples import hostile, large, row, waste, wide_row


def small() -> Report:
    return Report(
        (
            row(flops=9_200, bytes=6_100, calls=40, casts=210, cast_bytes=37_900_000),
            row(phase="backward", flops=0, bytes=100, casts=0, cast_bytes=0),
            wide_row(flops=800, bytes=3_800, calls=58, casts=4, cast_bytes=100_000),
        ),
        (
            waste(),
            waste(
                kind="parameter cast again", what="fc1.weight", bytes=9, fix="hmpx.freeze(model)"
            ),
            waste(location="train.py:30", bytes=1_000_000),
        ),
    )


def test_a_report_reads_from_the_verdict_to_the_table() -> None:
    assert str(small()) == (
        "92 % of FLOPs, 62 % of bytes and 42 % of calls in low precision\n"
        "of these FLOPs, 100 % were computed natively, 0 % in fp32 and rounded\n"
        "214 casts wrote 38 MB\n"
        "\n"
        "fixes, those that save most first:\n"
        "  bf16.txt: softmax\n"
        "      13 MB: round trip, linear -> softmax -> matmul at train.py:14, 24 times,\n"
        "      and 1 more\n"
        "      (less accurate: compare before you keep it)\n"
        "  hmpx.freeze(model)\n"
        "      9 B: parameter cast again, fc1.weight at train.py:14, 24 times\n"
        "      (less accurate: compare before you keep it)\n"
        "\n"
        "not in low precision, and why:\n"
        "  softmax, 38 % of bytes: lists/hmp/bf16.txt:12\n"
        "\n"
        "op       phase  from  in    to    calls  casts  written  FLOPs  bytes\n"
        "linear          fp32  bf16  bf16     40    210    38 MB   92 %   61 %\n"
        "softmax         bf16  fp32  fp32     58      4   100 kB    8 %   38 %\n"
        "linear   bwd    fp32  bf16  bf16      2      0      0 B    0 %    1 %"
    )


def test_an_empty_report_says_so() -> None:
    assert str(Report(())) == "No calls were recorded."
    assert str(Report(()).by_op()) == "no calls"


def test_what_was_not_counted_is_not_shown() -> None:
    """No FLOPs, no bytes, no casts: neither shares nor columns of them."""
    report = Report((row(phase="backward", flops=0, bytes=0, casts=0, cast_bytes=0),))
    assert str(report).splitlines() == [
        "100 % of calls in low precision",
        "of these calls, 100 % were computed natively, 0 % in fp32 and rounded",
        "nothing was cast",
        "",
        "op      phase  from  in    to    calls",
        "linear  bwd    fp32  bf16  bf16      2",
    ]


def test_what_accuracy_depends_on_is_named_first() -> None:
    sum_of_two = {"op": "add", "input_dtypes": ("bfloat16", "bfloat16"), "location": "gpt.py:8"}
    loss = {"op": "cross_entropy", "dtype": "float32", "input_dtypes": ("bfloat16",)}
    rows = [
        row(**sum_of_two, calls=24),
        row(**sum_of_two, phase="backward"),
        row(op="add", input_dtypes=("bfloat16",)),  # of a number
        row(**loss, location="train.py:7", calls=1),
        row(op="layer_norm", dtype="float32"),
        row(op="mul"),
    ]
    states = {"Adam.exp_avg": "float32", "Adam.exp_avg_sq": "bfloat16, float32"}
    said = " ".join(str(Report(tuple(rows), optimizers=states)).split())
    assert (
        "low, of what accuracy depends on most: sums of tensors, as of residuals (bf16 in add at gpt.py:8 and 23 more), "
        "inputs of losses (bf16 in cross_entropy at train.py:7), Adam.exp_avg_sq (bf16+fp32) "
        "not low: losses, norms, Adam.exp_avg "
    ) in said
    assert "low, of what" not in str(Report((row(),)))


@pytest.mark.parametrize("scaler", ["none", "yes"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_float16_without_a_scaler(scaler: str, dtype: str) -> None:
    rows = (row(), row(phase="backward", input_dtypes=(dtype,)))
    is_named = "fp16 without torch.amp.GradScaler" in str(
        Report(rows, about={"loss scaler": scaler})
    )
    assert is_named == (scaler == "none" and dtype == "float16")


def test_times_are_shown_where_they_were_measured() -> None:
    report = Report((row(seconds=0.0123), row(op="mm")))
    assert str(report).splitlines()[-2:] == [
        "linear  fp32  bf16  bf16      2      4   4.0 kB   50 %   50 %  12 ms",
        "mm      fp32  bf16  bf16      2      4   4.0 kB   50 %   50 %      -",
    ]
    assert report.totals.seconds == 0.0123
    assert "time" not in str(Report((row(),)))


def test_long_tables_and_lists_of_fixes_end_with_a_count() -> None:
    report = Report(
        tuple([row(op=f"op{i}") for i in range(33)]),
        tuple([waste(fix=f"bf16.txt: op{i}") for i in range(7)]),
    )
    lines = str(report).splitlines()
    assert lines[-1] == "... and 13 more; rec.by_op() has all"
    assert "... and 2 more; rec.waste() has all" in lines


def test_groups_print_as_tables() -> None:
    report = small()
    assert str(report.by_module()).splitlines() == [
        "module        calls    low  casts  written  FLOPs  bytes",
        "blocks.0.fc1     42  100 %    210    38 MB   92 %   62 %",
        "blocks.0         58    0 %      4   100 kB    8 %   38 %",
    ]
    assert str(report.by_site()).splitlines()[0].split()[:3] == ["location", "op", "calls"]


@pytest.mark.parametrize("report", [small(), large(300), hostile(), Report(())])
def test_no_line_is_wider_than_a_terminal(report: Report) -> None:
    """Nor holds anything that a terminal obeys."""
    for part in (report, report.by_op(), report.by_module(), report.by_site()):
        lines = str(part).split("\n")
        assert max(map(len, lines)) <= 80
        assert all(map(str.isprintable, lines))


def test_bool_and_integer_dtypes_are_not_low_precision() -> None:
    assert [row(dtype=name).is_low for name in ("int64", "bool", "float32", "")] == [False] * 4
    assert [row(dtype=name).is_low for name in ("float16", "float8_e4m3fn", "tf32")] == [True] * 3


def test_groups_are_lists_with_named_columns() -> None:
    """The costliest first."""
    groups = small().by_op()
    found = [(group.op, group.phase, group.dtype, group.calls, group.bytes) for group in groups]
    assert found == [
        ("linear", "forward", "bfloat16", 40, 6_100),
        ("softmax", "forward", "float32", 58, 3_800),
        ("linear", "backward", "bfloat16", 2, 100),
    ]
    assert groups[0].totals == totals(groups[0].rows)
    assert groups == list(groups)
    assert grouped((), ("op",)) == []
    with pytest.raises(AttributeError, match="this group has no 'module'; it has op, phase, "):
        groups[0].module  # noqa: B018
    assert copy.copy(groups[0]) == pickle.loads(pickle.dumps(groups[0])) == groups[0]


def test_a_table_is_what_one_needs() -> None:
    """Cells as text in text and HTML; values as they are in CSV."""
    table = ReportTable(
        [
            Column("op", ["a|b", "<c>", "=1"], is_number=False),
            Column("share", [0.5, math.nan, 1.0], "{:.0%}".format),
        ]
    )
    assert str(table) == "op   share\na|b    50%\n<c>   nan%\n=1    100%"
    assert (
        '<td>&lt;c&gt;</td><td class="number">nan%</td>' in table.to_html() == table._repr_html_()
    )
    assert table.to_csv().splitlines() == ["op,share", "a|b,0.5", "<c>,nan", "'=1,1.0"]
    assert table.rows[0] == ("a|b", 0.5) and len(table) == 3
    empty = ReportTable.of(["op", "calls"], [], numbers=["calls"])
    assert (str(empty), len(empty)) == ("op  calls", 0)
