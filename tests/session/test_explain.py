"""What hmpx.explain says: decisions, their lines, what outranks them, what devices do, where calls are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import CastPolicy, Explanation, Explanations, OptionError, cli, ops, session
from hmpx.reports import Report, Row


def explained(op: str, **options: object) -> Explanation:
    """Returns the explanation of one op."""
    found = hmpx.explain(op, **options)  # type: ignore[arg-type]
    assert isinstance(found, Explanation)
    return found


@pytest.mark.parametrize(
    "spelling",
    [
        "softmax",
        "torch.softmax",
        "torch.nn.functional.softmax",
        "F.softmax",
        "Tensor.softmax",
        "special.softmax",
        "aten::softmax",
        "softmax.int",
    ],
)
def test_every_spelling_means_the_op(spelling: str) -> None:
    """As in lists."""
    found = explained(spelling)
    assert (found.op, found.cast_policy) == ("softmax", CastPolicy.FP32)
    assert found.reason.startswith("lists/hmpx/fp32.txt:")
    assert {"torch.softmax", "torch.Tensor.softmax", "torch.nn.functional.softmax"} <= {
        *found.sites
    }


def test_each_op_that_a_list_may_hold_has_a_text_of_80_columns() -> None:
    """Only names may be longer; what it says of decision and sites is what ``hmpx ops`` says."""
    policy = hmpx.load_policy()
    names = [name for name in session.listable(policy) if not ops.is_foreign(name)]
    found = [session.explanations(name, policy)[0] for name in names[::7]]
    for each in found:
        assert each.decision == policy[each.op]
        assert list(each.sites) == session.call_sites(each.op)
        for line in str(each).splitlines():
            assert len(line) <= 80 or " " not in line.strip(), line


def test_the_policy_in_force_is_asked(tmp_path: Path) -> None:
    """Without a conversion the default one, which the text says."""
    (tmp_path / "bf16.txt").write_text("# mine\nsoftmax\n")
    assert "default policy; torch is not converted" in str(hmpx.explain("softmax"))
    with hmpx.convert(str(tmp_path / "bf16.txt"), device_types={"cpu"}):
        found = explained("softmax")
    assert found.cast_policy is CastPolicy.LOW
    assert found.reason.endswith("bf16.txt:2")
    assert "(policy in force)" in str(found)


def test_a_glob_gives_a_line_for_each_op() -> None:
    """Of names and of call sites."""
    found = hmpx.explain("*norm*")
    assert isinstance(found, Explanations)
    assert {"layer_norm", "batch_norm", "norm"} <= {each.op for each in found}
    *lines, last = str(found).splitlines()
    assert len(lines) == len(found)
    assert any(line.split()[:2] == ["norm", "FP32"] for line in lines)
    assert last.startswith("by default policy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sofmax", "no op matches 'sofmax'; did you mean 'softmax'?"),
        ("zzz*", "no op matches 'zzz*'; `hmpx ops` shows all"),
        (
            "is_contiguous",
            "'is_contiguous' computes nothing from tensors, so there is nothing to cast",
        ),
        (
            "torchvison.ops.nms",
            "no library 'torchvison' is installed, for 'torchvison.ops.nms'; "
            "did you mean 'torchvision.ops.nms'?",
        ),
        (3, "op must be an op name, or a glob such as '*norm*', not 3"),
    ],
)
def test_an_unknown_name_is_an_error(name: object, message: str) -> None:
    """With the nearest known one."""
    with pytest.raises(OptionError) as raised:
        hmpx.explain(name)  # type: ignore[arg-type]
    assert str(raised.value) == message


def test_rules_and_sections_are_asked_first() -> None:
    """In their order, with their conditions."""

    def keep(call: hmpx.Call) -> None:
        return None

    policy = hmpx.load_policy(
        policy={"lists": "none", "low": ["mm"], "sections": [{"module": "head", "fp32": ["mm"]}]}
    )
    hmpx.register_rule("mm", keep, level=3)
    try:
        first, second = explained("mm", policy=policy).asked_first
    finally:
        hmpx.unregister_rule("mm", keep)
    assert first.startswith("rule test_rules_and_sections_are_asked_first.<locals>.keep (")
    assert first.endswith("level 3")
    assert second.endswith("FP32 where module head")
    assert explained("mm", policy=policy).asked_first == (second,)


def test_calls_that_write_are_named() -> None:
    """In-place methods, and ``out=`` where there is one."""
    found = explained("add")
    assert found.in_place == ("torch.Tensor.add_",)
    assert found.takes_out
    assert not explained("truediv").takes_out
    assert "in place      torch.Tensor.add_, out=: " in str(found)


@pytest.mark.parametrize(
    ("legalize", "said"),
    [
        (
            "always",
            'legalized: inputs are rounded to bf16, fp32 computes, the result is rounded to bf16: legalize is "always"',
        ),
        ("never", 'computed in bf16 by torch\'s kernels: legalize is "never"'),
    ],
)
def test_legalization_is_explained(legalize: str, said: str) -> None:
    """As the conversion in force was asked to do it."""
    with hmpx.convert(device_types={"cpu"}, legalize=legalize):
        assert explained("bmm").device_notes == (("cpu", said),)


@pytest.mark.usefixtures("slow_machine")
def test_a_slow_machine_is_the_reason_to_legalize() -> None:
    """With what was measured."""
    with hmpx.convert(device_types={"cpu"}):
        (note,) = explained("linear").device_notes
    with hmpx.convert(device_types={"cpu"}, lists="hmp"):
        (relative,) = explained("scaled_dot_product_attention").device_notes or [("", "")]
    assert "legalized" in note[1] and "9.0 times as long" in note[1]
    assert not relative[1] or relative[1].startswith("given bf16, legalized")


def test_what_torch_promotes_itself_is_said_as_it_is_done() -> None:
    """Exactly the ops of which the text says so are left without a wrapper."""
    policy = hmpx.load_policy()
    names = [n for n in ops.table() if policy[n].cast_policy is CastPolicy.WIDEST]
    with hmpx.convert(device_types={"cpu"}):
        for name in names:
            sites = [site for site in ops.table()[name].sites if not site.in_place]
            wrapped = [site for site in sites if hasattr(site.function(), "__wrapped__")]
            has_note = "patched for observers only" in str(hmpx.explain(name))
            if has_note:
                lacking = name in hmpx.compute.lacking_kernels()
                assert lacking or not [s for s in wrapped if not s.is_python], name


def row(**changes: object) -> Row:
    values: dict[str, object] = {
        "op": "softmax",
        "site": "torch.softmax",
        "module": "attn",
        "location": "model.py:7",
        "phase": "forward",
        "device_type": "cpu",
        "cast_policy": "FP32",
        "reason": "lists/hmp/fp32.txt:14",
        "dtype": "float32",
        "input_dtypes": ("bfloat16",),
        "cast_dtypes": ("float32",),
        "output_dtypes": ("float32",),
        "calls": 12,
        "casts": 12,
        "cast_bytes": 48,
        "flops": 0,
        "bytes": 96,
    }
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def test_a_record_says_where_the_model_calls_the_op() -> None:
    """Gradients do not count as calls of the model."""
    report = Report((row(), row(op="mm"), row(phase="backward")))
    found = explained("softmax", record=report)
    assert found.calls == (row(),)
    assert "called        12 times" in str(found)
    assert "    12 x in attn at model.py:7: bf16 -> fp32 -> fp32" in str(found)
    assert "never, in the recorded run" in str(hmpx.explain("erf", report))
    many = Report(tuple(row(location=f"model.py:{line}") for line in range(50)))
    assert "    and 30 more" in str(hmpx.explain("softmax", many)).splitlines()
    assert "600 calls" in str(hmpx.explain("softma?", many))
    with pytest.raises(OptionError, match=r"record must be an hmpx.record or its report, not 3"):
        hmpx.explain("softmax", 3)  # type: ignore[arg-type]


def test_the_command_line_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """``hmpx ops --why``."""
    assert cli.main(["ops", "--why", "F.softmax"]) == 0
    assert capsys.readouterr().out == f"{hmpx.explain('softmax', policy=hmpx.load_policy())}\n"
    assert cli.main(["ops", "--opt-level", "O2", "--why", "gelu"]) == 0
    assert capsys.readouterr().out.startswith("gelu: FP32, ")
    assert cli.main(["ops", "--why", "sofmax"]) == 1
    assert capsys.readouterr().err == "hmpx: no op matches 'sofmax'; did you mean 'softmax'?\n"
    with pytest.raises(SystemExit):
        cli.main(["ops", "--why"])
    assert "--why explains an op: name one" in capsys.readouterr().err
    assert torch.get_default_dtype() is torch.float32
