"""The data files: what ships under ``lists/``, and the lists that HMP's users have."""

from __future__ import annotations

import itertools
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import CastPolicy, HmpxWarning, ops, policy
from hmpx.policy import lists as oplists

LISTS = oplists.directory()
FILES = sorted(LISTS.rglob("*.txt"))
USER_LISTS = Path(__file__).parents[1] / "hmp_lists"

#: HMP's defaults.
HMP = {
    "bf16": (
        "addmm, batch_norm, bmm, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, "
        "conv_transpose3d, dot, dropout, dropout1d, dropout2d, dropout3d, group_norm, "
        "instance_norm, layer_norm, leaky_relu, linear, matmul, mm, mul, mv, relu, t"
    ),
    "fp32": (
        "binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, div, divide, "
        "embedding, embedding_bag, log, log2, log_softmax, nll_loss, smooth_l1_loss, softmax, "
        "topk, truediv"
    ),
}

#: (bf16 file, fp32 file) as HMP's users pass them together.
PAIRS = (
    ("bert", "bert"),
    ("bert_v2", "bert_v2"),
    ("dino", "dino"),
    ("dlrm", "dlrm"),
    ("dlrm_v2", "dlrm"),
    ("hubert", "hubert"),
    ("mnist", "mnist"),
    ("resnet", "resnet"),
    ("resnet_v2", "resnet"),
    ("sd21", "sd21"),
    ("sd21_v2", "sd21"),
    ("unet", "unet"),
    ("vit", "vit"),
    ("vit", "vit_v2"),
    ("yolox", "yolox"),
    ("yolox", "yolox_v2"),
)

#: Files of HMP's users that hold names of no op of any torch.
UNKNOWN = {"dlrm_fp32.txt": ("embedding_bag_sum_fwd", "embedding_bag_sum_bwd")}

#: Saved without a last newline, which a reader has to take.
NO_LAST_NEWLINE = {
    "dlrm_v2_bf16.txt",
    "hubert_fp32.txt",
    "resnet_bf16.txt",
    "resnet_v2_bf16.txt",
    "sd21_bf16.txt",
    "sd21_fp32.txt",
    "unet_bf16.txt",
    "vit_v2_fp32.txt",
}


def lines(path: Path) -> list[str]:
    """Returns the lines of a list that count with this torch, without blank lines and comments."""
    written = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [line.partition(" ;")[0] for line in written if line and counts(line)]


def counts(line: str) -> bool:
    """Whether a line counts with this version of torch."""
    if ";" not in line:
        return True
    found = oplists.parse(line, "line")
    return bool(found.ops or found.unknown)


def names_in(path: Path) -> list[str]:
    """Returns the lines of a list that add an op."""
    return [line for line in lines(path) if line[0] not in "@-*"]


def collected(check: Callable[[Path], list[str]], paths: list[Path]) -> None:
    """Fails once, with every fault that ``check`` finds in ``paths``."""
    faults = [f"{path.parent.name}/{path.name}: {f}" for path in paths for f in check(path)]
    assert not faults, "\n".join(faults)


# --- shipped -------------------------------------------------------------------------------------


def test_each_set_holds_files_of_known_names_and_both_lists() -> None:
    """Whatever lies in the directory of the shipped lists can be loaded by name."""
    allowed = {*policy.FILE_NAMES.values(), "fp16.txt"}
    faults = [
        f"{name}: {sorted(found)}"
        for name in oplists.set_names()
        if not {"bf16.txt", "fp32.txt"}
        <= (found := {path.name for path in (LISTS / name).iterdir()})
        <= allowed
    ]
    assert not faults, "\n".join(faults)
    assert {path.name for path in LISTS.glob("*.txt")} == {"first.txt", "libraries.txt"}


def test_each_file_has_a_header_and_clean_lines() -> None:
    """A comment first, a newline last, no spaces around, nothing but ASCII."""

    def faults(path: Path) -> list[str]:
        text = path.read_text("ascii")
        found = [
            f"{line!r} has spaces around it" for line in text.split("\n") if line != line.strip()
        ]
        if not text.startswith("# "):
            found.append("no comment on the first line")
        if not text.endswith("\n") or text.endswith("\n\n"):
            found.append("does not end in one newline")
        return found

    collected(faults, FILES)


def test_each_file_is_sorted_without_repeats() -> None:
    """Sorted files merge well, and a repeated line would warn at each convert."""

    def faults(path: Path) -> list[str]:
        names = names_in(path)
        unsorted = [f"{b} after {a}" for a, b in itertools.pairwise(names) if b < a]
        repeated = [f"{a} twice" for a in set(names) if names.count(a) > 1]
        return unsorted + repeated

    collected(faults, FILES)


def test_each_name_is_an_op_that_can_be_cast() -> None:
    """A shipped list never warns of an unknown name."""

    def faults(path: Path) -> list[str]:
        names = [name.partition(" ")[0] for name in names_in(path)]
        return [
            name for name in names if (op := ops.resolve(name)) is None or not ops.is_castable(op)
        ]

    collected(faults, FILES)


def test_shipped_names_that_a_torch_lacks_do_not_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user can't remove them, neither from a set that is given by name nor from an included one."""
    shutil.copytree(LISTS, tmp_path / "lists")
    with (tmp_path / "lists" / "hmpx" / "fp32.txt").open("a") as file:
        file.write("an_op_of_another_torch\n")
    monkeypatch.setattr(oplists, "directory", lambda: tmp_path / "lists")
    monkeypatch.setattr(oplists, "read_shipped", oplists.read_shipped.__wrapped__)
    assert hmpx.load_policy(strict=True) == hmpx.load_policy(lists="hmpx", strict=True)
    mine = tmp_path / "fp32.txt"
    mine.write_text("@hmpx\nan_op_of_another_torch\n")
    with pytest.warns(HmpxWarning, match=r"fp32.txt:2: unknown op 'an_op_of_another_torch'$"):
        found = hmpx.load_policy(fp32_file_path=mine)
    assert found["softmax"].cast_policy is CastPolicy.FP32


def test_low_and_fp32_lists_of_a_set_are_disjoint() -> None:
    """No op stands in both lists of a set, however it is spelled."""

    def faults(path: Path) -> list[str]:
        low, fp32 = (
            {ops.resolve(line): line for line in names_in(path.parent / name)}
            for name in ("bf16.txt", "fp32.txt")
        )
        return [f"{low[op]} is {fp32[op]} in fp32.txt" for op in low.keys() & fp32.keys()]

    collected(faults, [LISTS / name / "bf16.txt" for name in oplists.set_names()])


@pytest.mark.parametrize("name", oplists.set_names())
def test_each_set_converts_without_a_warning(name: str) -> None:
    """Nothing in a shipped set is unknown, repeated or in conflict with `strict` either."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = hmpx.convert(lists=LISTS / name, strict=True)  # as a user's own lists
    policies = {decision.cast_policy for decision in session.policy.decisions.values()}
    assert {CastPolicy.LOW, CastPolicy.FP32} <= policies


@pytest.mark.parametrize("kind", HMP)
def test_default_lists_are_those_of_hmp(kind: str) -> None:
    """HMP's users get the lists they know, on each device and in each version (pytorch #188955)."""
    assert lines(LISTS / "hmp" / f"{kind}.txt") == HMP[kind].split(", ")


@pytest.mark.parametrize(
    ("kind", "cast_policy"), [("bf16", CastPolicy.LOW), ("fp32", CastPolicy.FP32)]
)
def test_default_lists_decide(kind: str, cast_policy: CastPolicy) -> None:
    """Under ``"hmp"`` each op of HMP's lists has the decision that its list says."""
    policy = hmpx.convert(lists="hmp").policy
    wrong = [name for name in HMP[kind].split(", ") if policy[name].cast_policy is not cast_policy]
    assert not wrong


def test_the_default_leaves_products_to_torch_and_views_alone() -> None:
    """They have no wrapper; ``weight.t()`` is the weight."""
    mul, t = torch.mul, torch.Tensor.t
    weight = torch.ones(2, 3)
    with hmpx.convert():
        assert torch.mul is mul
        assert torch.Tensor.t is t
        assert (torch.tensor(1234.5) * 1.0).item() == 1234.5
        assert (torch.ones(2).bfloat16() * torch.ones(2)).dtype is torch.float32
        assert (torch.ones(2).bfloat16() * 2).dtype is torch.bfloat16
        weight.t().zero_()
    assert not weight.any()


# --- HMP's users' --------------------------------------------------------------------------------


def test_users_lists_are_kept_as_they_were() -> None:
    """All files are there, each is in a pair, and none was tidied up by an editor."""
    found = {path.name for path in USER_LISTS.iterdir()}
    paired = {f"{low}_bf16.txt" for low, _ in PAIRS} | {f"{fp32}_fp32.txt" for _, fp32 in PAIRS}
    assert found == paired
    assert len(found) == 27
    unended = {p.name for p in USER_LISTS.iterdir() if not p.read_bytes().endswith(b"\n")}
    assert unended == NO_LAST_NEWLINE


@pytest.mark.parametrize(("low", "fp32"), PAIRS)
def test_users_lists_convert(low: str, fp32: str) -> None:
    """Each pair loads, only the names of no torch are warned of, and each line is obeyed."""
    paths = {
        CastPolicy.LOW: USER_LISTS / f"{low}_bf16.txt",
        CastPolicy.FP32: USER_LISTS / f"{fp32}_fp32.txt",
    }
    unknown = [(path, name) for path in paths.values() for name in UNKNOWN.get(path.name, ())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = hmpx.convert(*map(str, paths.values()))
    assert len(caught) == bool(unknown), [str(w.message) for w in caught]
    if unknown:
        assert caught[0].category is hmpx.HmpxWarning
        assert caught[0].filename == __file__
        named = re.findall(
            r"^\s+(.+):\d+: '(\w+)' was an op of Gaudi's torch; torch's own is 'embedding_bag'$",
            str(caught[0].message),
            re.MULTILINE,
        )
        assert [(Path(where).absolute(), name) for where, name in named] == unknown
    wrong = []
    for cast_policy, path in paths.items():
        for name in lines(path):
            if (path, name) in unknown:
                continue
            decision = session.policy[name]
            where, _, number = decision.reason.rpartition(":")
            line = path.read_text().splitlines()[int(number) - 1]
            if decision.cast_policy is not cast_policy or Path(where).absolute() != path:
                wrong.append(f"{name}: {decision}")
            elif ops.resolve(line.strip()) != ops.resolve(name):
                wrong.append(f"{name}: the reason {decision.reason} is the line {line!r}")
    assert not wrong, "\n".join(wrong)
