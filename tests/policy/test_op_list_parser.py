"""The list parser: real files' warts, what a line may be, and every error text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hmpx
from hmpx import (
    CastPolicy,
    Decision,
    HmpxError,
    HmpxWarning,
    OpListError,
    OptionError,
    ops,
    policy,
)
from hmpx.policy import faults, op_lists
from hmpx.policy import lists as oplists

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def names(text: str) -> list[str]:
    return list(oplists.parse(text, "a.txt").ops)


@pytest.mark.parametrize(
    "text",
    [
        "matmul\nsoftmax\n",
        "matmul\r\nsoftmax\r\n",
        "\ufeffmatmul\nsoftmax",
        "  matmul  \n\n\t softmax\t",
        "# a comment\nmatmul # another\n#softmax\nsoftmax",
        "torch.matmul\ntorch.nn.functional.softmax",
        "Tensor.__matmul__\nF.softmax",
        "__rmatmul__\ntorch.special.softmax",
        "aten::matmul\nsoftmax.int",
    ],
)
def test_warts_and_spellings_are_read(text: str) -> None:
    """Blank lines, comments, spaces, CRLF, a byte-order mark, no last newline; any spelling."""
    expected = ["rmatmul", "softmax"] if "rmatmul" in text else ["matmul", "softmax"]
    assert names(text) == expected


@pytest.mark.parametrize(
    ("spelling", "op"),
    [
        ("truediv", "truediv"),
        ("__truediv__", "truediv"),
        ("iadd", "iadd"),
        ("rsub", "rsub"),
        ("imul", "imul"),
        ("add_", "add"),
        ("divide", "div"),
        ("true_divide", "div"),
        ("conv_transpose2d.input", "conv_transpose2d"),
        ("pow.Tensor_Scalar", "pow"),
        ("nll_loss2d", "nll_loss"),
        ("_convolution", "_convolution"),
        ("_convolution.deprecated", "_convolution"),
        ("norm", "norm"),
        ("linalg.norm", "linalg_norm"),
        ("torch.linalg.norm", "linalg_norm"),
        ("linalg_norm", "linalg_norm"),
        ("multi_dot", "linalg_multi_dot"),
        ("torch.Tensor.T.__get__", "T"),
        ("lstm", "lstm"),
        ("max_pool2d_with_indices", "max_pool2d"),
        ("torch.ops.aten.gelu", "gelu"),
        ("matmull", None),
        ("matmul.nonsense", None),
        ("torch.nonsense", None),
        ("", None),
        (".", None),
    ],
)
def test_resolve(spelling: str, op: str | None) -> None:
    """A name covers every spelling of its op; ATen's overload names count."""
    assert ops.resolve(spelling) == op


def test_include_and_remove() -> None:
    """A user's file can be two lines."""
    shipped = oplists.read_shipped("hmp/bf16").ops
    read = oplists.parse("@hmp\n-mul\ngelu", "a.txt", "low").ops
    assert set(read) == set(shipped) - {"mul"} | {"gelu"}
    assert read["matmul"].where.startswith("lists/hmp/bf16.txt:")
    assert read["gelu"].where == "a.txt:3"
    assert set(oplists.parse("@autocast-cuda", "a.txt", "fp32").ops) == set(
        oplists.read_shipped("autocast-cuda/fp32").ops
    )


@pytest.mark.parametrize(
    ("line", "kind", "options"),
    [
        ("sum", "low", {}),
        ("sum accumulate=float32", "fp32", {"accumulate_dtype": FP32}),
        ("sum\toutput=torch.bfloat16   accumulate=fp64 # why", "widest",
         {"output_dtype": BF16, "accumulate_dtype": FP64}),
        ("conv2d float16", "low", {"dtype": FP16}),
        ("conv2d fp16 output=fp32", "fp16", {"dtype": FP16, "output_dtype": FP32}),
        ("* accumulate=fp32", "low", {"accumulate_dtype": FP32}),
    ],
)  # fmt: skip
def test_options_stand_after_the_name(line: str, kind: str, options: dict[str, object]) -> None:
    """A low-precision dtype of its own, ``accumulate=`` and ``output=``, in any order."""
    read = oplists.parse(line, "a.txt", kind)
    (entry,) = [*read.ops.values(), *([read.everything] if read.everything else [])]
    assert entry == (line.split(maxsplit=1)[0], "a.txt:1", options)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("softmax\nmatmul, mm", "low",
         "a.txt:2: expected one op per line, found 'matmul, mm'"),
        ("gelu linear mm", "low", "a.txt:1: expected one op per line, found 'gelu linear mm'"),
        ("mat\x01mul", "low", "a.txt:1: expected one op per line, found 'mat\\x01mul'"),
        ("@hpm", "low",
         "a.txt:1: there is no shipped set 'hpm' (autocast-cpu, autocast-cuda, autocast-hpu, "
         "autocast-mps, autocast-xpu, hmp, hmpx, lean, o2); did you mean 'hmp'?"),
        ("sum acumulate=fp32", "low",
         "a.txt:1: unknown option 'acumulate' of 'sum'; did you mean 'accumulate'?"),
        ("sum x=fp32", "low",
         "a.txt:1: unknown option 'x' of 'sum' (dtype, accumulate, output, weights, activations, gradients, rounding, overflow)"),
        ("sum output=int8", "low",
         "a.txt:1: unknown dtype 'int8' (bfloat16, float16, float32, float64)"),
        ("sum output=", "low",
         "a.txt:1: unknown dtype '' (bfloat16, float16, float32, float64)"),
        ("mm float31", "low",
         "a.txt:1: low_precision_type must be torch.bfloat16 or torch.float16, or a number format, not 'float31'; "
         "did you mean 'float32'?"),
        ("mm float16 bfloat16", "low", "a.txt:1: 'mm' is given dtype twice; keep one"),
        ("sum output=fp32 output=fp32", "low", "a.txt:1: 'sum' is given output twice; keep one"),
        ("-mm float16", "low", "a.txt:1: '-mm' takes no options; put them after an op's name"),
        ("@hmp output=fp32", "low",
         "a.txt:1: '@hmp' takes no options; put them after an op's name"),
        ("mm float16", "fp32",
         "a.txt:1: 'mm float16' names a dtype, but only low-precision lists have a choice"),
        ("mm\ntorch.mm output=fp32", "low",
         "a.txt:2: 'torch.mm' is the op 'mm', which is already in this list, at a.txt:1, with "
         "other dtypes; keep one of the lines"),
    ],
)  # fmt: skip
def test_faults_of_lines_are_errors(text: str, kind: str, message: str) -> None:
    """Each with file, line and remedy."""
    with pytest.raises(OpListError) as error:
        oplists.parse(text, "a.txt", kind)
    assert str(error.value) == message


def test_options_reach_the_decisions_of_operators_and_everything(tmp_path: Path) -> None:
    """``div`` covers ``/`` with its dtypes; an op of two dtypes in two lists is a conflict."""
    policy = hmpx.load_policy(**write(tmp_path, bf16="div accumulate=fp32\n* output=fp32"))
    assert policy["rtruediv"] == Decision(CastPolicy.LOW, BF16, accumulate_dtype=FP32)
    assert policy["cos"] == Decision(CastPolicy.LOW, BF16, output_dtype=FP32)
    with pytest.raises(OpListError, match=r"fp32.txt:1: 'mm' is in two lists"):
        hmpx.load_policy(**write(tmp_path, bf16="mm output=fp32", fp32="mm output=fp32"))


def test_lines_may_be_for_versions_of_torch() -> None:
    """From one on, or before one; names, options, ``@``, ``-`` and ``*`` alike, with or without spaces."""
    text = (
        "mm ; torch >= 2.14\nbmm;torch<2.14  # why\nsum float16 ; torch >= 2.9\n"
        "@hmp ; torch < 2.0\nadd\n-add ; torch >= 2.14\n* ; torch >= 3.0\n"
    )
    for version, expected in {
        "2.14.1": {"mm", "sum"},
        "2.13.0+cpu": {"bmm", "sum", "add"},
        "2.14.0a0+git123": {"mm", "sum"},
        "2.8.0": {"bmm", "add"},
    }.items():
        found = parsed_with(version, text)
        assert found.ops.keys() == expected
        assert found.everything is None
        assert not found.unknown
    assert found.ops["bmm"].where == "my.txt:2"
    assert parsed_with("3.1.0", text).everything is not None


def parsed_with(version: str, text: str) -> op_lists.OpList:
    """Returns a list as it is with that torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        return oplists.parse(text, "my.txt")


@pytest.mark.parametrize(
    "line", ["mm ;", "mm ; torch", "mm ; torch == 2.14", "mm ; python >= 3.10", "mm ; torch >= two"]
)
def test_what_follows_a_semicolon_is_a_version_of_torch(line: str) -> None:
    """Or an error, that says what may stand there."""
    message = r"my.txt:1: after a semicolon expected a version such as 'torch >= 2.14' or 'torch < 2.14', found"
    with pytest.raises(OpListError, match=message):
        oplists.parse(line, "my.txt")


def test_unreadable_files_are_errors_before_anything_is_patched(tmp_path: Path) -> None:
    """Missing, a directory, undecodable, binary: each is named, and torch is as it was."""
    (tmp_path / "latin.txt").write_bytes(b"matmul\n\xe9")
    (tmp_path / "utf16.txt").write_bytes("matmul\n".encode("utf-16"))
    (tmp_path / "binary.txt").write_bytes(b"\0\0matmul")
    cases = {
        "missing.txt": "missing.txt: no such file; give the path of an op list",
        "": ": a directory, not an op list; give a file's path",
        "latin.txt": "latin.txt:2: not UTF-8 text (byte 7: 0xe9); save it as UTF-8",
        "utf16.txt": "utf16.txt:1: not UTF-8 text (byte 0: 0xff); save it as UTF-8",
        "binary.txt": "binary.txt: a binary file, not an op list; give a text file's path",
    }
    for name, message in cases.items():
        for argument in ("bf16_file_path", "fp32_file_path", "fp16_file_path"):
            with pytest.raises(OpListError) as error:
                hmpx.convert(**{argument: tmp_path / name})
            assert str(error.value).endswith(message)
            assert not hmpx.is_converted()
    with pytest.raises(OpListError, match="can't be read"):
        hmpx.convert(bf16_file_path="\0")


def write(folder: Path, **lists: str) -> dict[str, str]:
    paths = {}
    for kind, text in lists.items():
        path = folder / f"{kind}.txt"
        path.write_text(text)
        paths[f"{kind}_file_path"] = str(path)
    return paths


def test_unknown_names_give_one_warning_that_gathers_all(tmp_path: Path) -> None:
    """Each with file:line and the nearest known name; the warning points at the caller."""
    paths = write(tmp_path, bf16="matmull\nmatmul\n", fp32="soft_max\nsize\n")
    with pytest.warns(HmpxWarning) as caught:
        hmpx.convert(**paths)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(caught[0].message).replace(str(tmp_path), "") == (
        "left out of the op lists:\n"
        "  /bf16.txt:1: unknown op 'matmull'; did you mean 'matmul'?\n"
        "  /fp32.txt:1: unknown op 'soft_max'; did you mean 'softmax'?\n"
        "  /fp32.txt:2: 'size' computes nothing from tensors, so there is nothing to cast"
    )


def test_unknown_names_are_an_error_if_strict(tmp_path: Path) -> None:
    """The same text, and nothing patched."""
    with pytest.raises(OpListError, match=r"bf16.txt:1: unknown op 'matmull'; did you mean"):
        hmpx.convert(**write(tmp_path, bf16="matmull"), strict=True)
    assert not hmpx.is_converted()


@pytest.mark.parametrize(
    ("bf16", "fp32", "op"),
    [
        ("softmax", "softmax", "softmax"),
        ("torch.conv2d", "torch.nn.functional.conv2d", "conv2d"),
        ("div", "divide", "div"),
        ("pow.Scalar", "pow", "pow"),
    ],
)
def test_an_op_in_both_lists_is_an_error_that_names_both_lines(
    tmp_path: Path, bf16: str, fp32: str, op: str
) -> None:
    """Two spellings of one op count as well."""
    with pytest.raises(OpListError) as error:
        hmpx.convert(**write(tmp_path, bf16=f"mm\n{bf16}", fp32=fp32))
    assert str(error.value).replace(f"{tmp_path}/", "") == (
        f"fp32.txt:1: {fp32!r} is in two lists: it is the op {op!r}, as {bf16!r} at bf16.txt:2 is; "
        "keep one of the lines"
    )


def test_the_same_name_twice_in_one_list_is_a_warning(tmp_path: Path) -> None:
    """It names both lines."""
    with pytest.warns(HmpxWarning, match=r"bf16.txt:3: 'mm' is already in this list, at .*:1"):
        hmpx.convert(**write(tmp_path, bf16="mm\nbmm\nmm"))


def test_removing_what_is_not_there_is_a_warning(tmp_path: Path) -> None:
    """A ``-`` line must remove something."""
    with pytest.warns(HmpxWarning, match=r"'-mul' removes an op that no earlier line holds"):
        hmpx.convert(**write(tmp_path, bf16="mm\n-mul"))


def test_an_operators_own_name_outranks_its_op(tmp_path: Path) -> None:
    """``div`` covers ``/`` unless ``truediv`` is listed itself."""
    session = hmpx.convert(**write(tmp_path, bf16="div\nmul", fp32="truediv\nrmul"))
    decided = {name: session.policy[name].cast_policy for name in ("div", "rmul", "imul", "mul")}
    assert decided == {
        "div": CastPolicy.LOW,
        "rmul": CastPolicy.FP32,
        "imul": CastPolicy.LOW,
        "mul": CastPolicy.LOW,
    }
    assert session.policy["truediv"].cast_policy is CastPolicy.FP32
    assert session.policy["rtruediv"].cast_policy is CastPolicy.FP32


def test_a_users_list_outranks_a_shipped_one_filled_in(tmp_path: Path) -> None:
    """Softmax stands in the shipped fp32 list, div in the widest one: the user's own lines win."""
    session = hmpx.convert(**write(tmp_path, bf16="softmax\ndiv"))
    assert session.policy["softmax"].cast_policy is CastPolicy.LOW
    assert session.policy["truediv"].cast_policy is CastPolicy.LOW
    assert session.policy["log_softmax"].reason.startswith("lists/hmpx/fp32.txt:")
    assert session.policy["linear"].cast_policy is CastPolicy.FIRST


def test_everything_is_every_other_computing_op(tmp_path: Path) -> None:
    """``*`` leaves out named ops of the other lists, views, conversions and queries."""
    session = hmpx.convert(**write(tmp_path, bf16="mm", fp32="*\n-exp"))
    for name in ("softmax", "add", "sum", "cat"):
        assert session.policy[name].cast_policy is CastPolicy.FP32, name
    assert session.policy["mm"].cast_policy is CastPolicy.LOW
    for name in ("exp", "view", "t", "detach", "size", "to", "T", "bfloat16"):
        assert session.policy[name].cast_policy is CastPolicy.PASS, name


def test_o2_is_gemms_and_convolutions_low_and_the_rest_fp32() -> None:
    """HMP's O2; it ignores list files, and says so."""
    policy = hmpx.load_policy(opt_level="O2")
    low = {name for name, d in policy.decisions.items() if d.cast_policy is CastPolicy.LOW}
    assert low == {
        "addmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "dot", "linear", "matmul", "mm", "mv", "rmatmul",
    }  # fmt: skip
    assert policy["layer_norm"].cast_policy is CastPolicy.FP32
    with pytest.warns(
        HmpxWarning, match=r"opt_level 'O2' ignores list files \('a.txt'\); use 'O1'"
    ):
        hmpx.load_policy("a.txt", opt_level="O2")


def test_lists_takes_a_set_or_a_directory(tmp_path: Path) -> None:
    """A directory with files of the shipped names is a set too."""
    (tmp_path / "bf16.txt").write_text("exp")
    policy = hmpx.load_policy(lists=tmp_path)
    assert policy["exp"].cast_policy is CastPolicy.LOW
    assert policy["softmax"].cast_policy is CastPolicy.PASS
    assert policy["add"].cast_policy is CastPolicy.WIDEST
    with pytest.raises(
        OptionError, match=r"is neither a shipped set .* did you mean 'autocast-cuda'"
    ):
        hmpx.load_policy(lists="autocast_cuda")


def test_fp16_list_runs_in_float16_whatever_the_low_type() -> None:
    """With float16 as low type it is the low list; beside bf16 it is a list of its own."""
    path = oplists.directory() / "o2" / "bf16.txt"
    both = hmpx.load_policy(fp16_file_path=path)
    assert both["linear"].dtype is torch.float16
    assert both["lstm"].dtype is torch.bfloat16
    alone = hmpx.load_policy(fp16_file_path=path, low_precision_type=torch.float16)
    assert alone["linear"].dtype is torch.float16
    assert alone["lstm"].cast_policy is CastPolicy.FIRST


LINES = st.one_of(
    st.sampled_from(
        ["matmul", "@hmp", "-mul", "*", "#", "softmax.int", "\ufeff", "@", "-", "--", "."]
    ),
    st.text(max_size=12),
    st.sampled_from(["add", "iadd", "truediv", "mm float16", "sum output=fp32", "sum x=", "a b"]),
    st.sampled_from(["A.A", "numpy.sum", "os.path.join", "A::A", "A.", ".A", "A..A", "torch.A"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(LINES, max_size=8).map("\n".join))
def test_no_text_crashes_the_parser(text: str) -> None:
    """Whatever the text, the parser returns a list or raises HmpxError."""
    try:
        parsed = oplists.parse(text, "fuzz.txt")
    except HmpxError as error:
        assert str(error).startswith("fuzz.txt:")
    else:
        # A dotted name may be that of a function of a library that is imported later.
        assert all(name in ops.table() or ops.is_foreign(name) for name in parsed.ops)
        assert all(
            message for message in faults.unknown_names([parsed]) + faults.repeated_lines([parsed])
        )


# --- names of HMP's, and lines without effect ---------------------------------------------------

#: HMP's dictionary of ops, as far as torch has it.
DICTIONARY = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d avg_pool2d max_pool2d
max_pool2d_with_indices sum mean any addmm bmm dot linear matmul mm mv batch_norm dropout embedding
layer_norm instance_norm interpolate sort binary_cross_entropy binary_cross_entropy_with_logits
cross_entropy log_softmax softmax topk nll_loss mse_loss smooth_l1_loss l1_loss add addcmul addcdiv div
exp iadd idiv imul ipow isub itruediv mul pow rsub rsqrt sqrt sub max min truediv eq ge gt ne log log2
gelu relu leaky_relu relu6 hardtanh tanh t flatten view cat index_put index_fill nonzero stack nms
batched_nms roi_align
"""


def test_every_name_that_hmp_knew_resolves() -> None:
    """Or says what it became."""
    read = oplists.parse(DICTIONARY.replace(" ", "\n"), "hmp.txt")
    assert not read.unknown
    gone = oplists.parse("embedding_bag_sum_fwd\nembedding_bag_sum_bwd", "dlrm.txt")
    assert faults.unknown_names([gone]) == [
        f"dlrm.txt:{line}: 'embedding_bag_sum_{name}' was an op of Gaudi's torch; torch's own is "
        "'embedding_bag'"
        for line, name in ((1, "fwd"), (2, "bwd"))
    ]


@pytest.mark.parametrize("name", ["convolution", "_convolution", "aten::convolution"])
def test_a_line_of_convolution_means_every_convolution(name: str, tmp_path: Path) -> None:
    """They end in it below Python, where nothing is listed; a line of one's own outranks it."""
    low, fp32 = tmp_path / "low.txt", tmp_path / "fp32.txt"
    low.write_text(f"{name}\n")
    fp32.write_text("conv1d\n")
    image, kernel = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
    line = torch.ones(1, 1, 4)
    with hmpx.convert(low, fp32, lists="autocast-cpu", legalize="never", device_types={"cpu"}):
        assert F.conv2d(image, kernel).dtype is torch.bfloat16
        assert F.conv_transpose2d(image, kernel).dtype is torch.bfloat16
        assert torch.nn.Conv3d(1, 1, 1)(image[None]).dtype is torch.bfloat16
        assert F.conv1d(line.bfloat16(), line).dtype is torch.float32
    assert hmpx.load_policy(low)["conv2d"].reason.endswith("low.txt:1")


@pytest.mark.parametrize("where", ["1", "4"])
def test_all_alone_says_that_it_is_an_op(tmp_path: Path, where: str) -> None:
    """Whoever writes it means every op; beside others, as a written policy has it, it is one of them."""
    path = tmp_path / "policy.yaml"
    path.write_text(
        "fp32: all" if where == "1" else "sections:\n- module: a\n  low: mm\n  fp32: all"
    )
    fault = f"{path}:{where}: 'all' is read as the op torch.all; write '*' for every other op"
    assert policy.check_files({"policy": (str(path),)}) == [fault]
    with pytest.warns(hmpx.HmpxWarning) as caught:
        hmpx.load_policy(path)
    assert [str(w.message) for w in caught] == [fault]
    path.write_text("fp32: [all, any]")  # no warning
    hmpx.load_policy(path)


def test_a_line_that_can_change_nothing_is_said(tmp_path: Path) -> None:
    """In one warning, and by `check`; not beside the op that covers it, nor of shipped lists."""
    path = tmp_path / "low.txt"
    path.write_text("iadd\nmm\nzero_\nmul\nimul\n")
    with pytest.warns(hmpx.HmpxWarning) as caught:
        hmpx.load_policy(path)
    faults = [
        f"{path}:1: 'iadd' has no effect: the dtype of its output decides; remove the line",
        f"{path}:3: 'zero_' has no effect: the dtype of its output decides; remove the line",
    ]
    assert [str(w.message) for w in caught] == ["\n".join(faults)]
    assert policy.check_files({"low": (str(path),)}) == faults
    relative = tmp_path / "widest.txt"
    relative.write_text("cat\nexp\n")
    assert policy.check_files({"widest": (str(relative),)}) == [
        f"{relative}:2: 'exp' has no effect: it has only one input; remove the line"
    ]
    for name in oplists.set_names():
        hmpx.load_policy(lists=name)


def test_of_many_faults_some_are_shown_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In warnings, in errors, and over all lists together."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("".join(f"unknown{i}\n" for i in range(30)) + "mul\n" * 30)
    Path("b.txt").write_text("".join(f"unknown{i}\n" for i in range(30, 60)))
    with pytest.warns(HmpxWarning) as caught:
        hmpx.load_policy("a.txt", "b.txt")
    unknown, repeated = [str(warning.message).splitlines() for warning in caught]
    assert len(unknown) == 22
    assert unknown[1].startswith("  a.txt:1: unknown op 'unknown0'")
    assert unknown[-1] == "  and 40 more"
    assert repeated[-1] == "and 9 more"
    with pytest.raises(OpListError) as error:
        hmpx.load_policy("a.txt", "b.txt", strict=True)
    assert str(error.value).splitlines()[-1] == "and 40 more"
