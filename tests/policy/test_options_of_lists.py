"""A directory of lists may hold the options of `convert` with which its lists were measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    (tmp_path / "bf16.txt").write_text("linear\n")
    (tmp_path / "fp32.txt").write_text("softmax\n")
    return tmp_path


def written(lists: Path, text: str) -> Path:
    (lists / "options.yaml").write_text(text)
    return lists


OPTIONS = "device_types: [cpu]\nlegalize: always\nlow_precision_type: float16\n"


def test_they_stand_in_for_arguments_that_are_not_given(lists: Path) -> None:
    with hmpx.convert(lists=written(lists, OPTIONS)) as session:
        assert session.policy.low_precision_type is torch.float16
        assert session.device_types == {"cpu"}
        assert session.options.legalize == "always"
        assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float16
    assert hmpx.load_policy(lists=lists).low_precision_type is torch.float16


def test_arguments_override_them(lists: Path) -> None:
    with hmpx.convert(
        lists=written(lists, OPTIONS), legalize="never", low_precision_type="float8_e4m3fn"
    ) as session:
        assert session.options.legalize == "never"
        assert session.policy.low_precision_type is hmpx.formats.get("float8_e4m3fn")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("low_precision_type", torch.bfloat16),
        ("legalize", "auto"),
        ("keep_weight_casts", "auto"),
        ("device_types", None),
    ],
)
def test_so_does_an_argument_that_has_its_default(name: str, given: Any, lists: Path) -> None:
    def converted() -> Any:
        with hmpx.convert(lists=lists, **{name: given}) as session:
            found = {"low_precision_type": session.policy.low_precision_type}
            found |= dataclasses.asdict(session.options)
            return (found | {"device_types": session.device_types})[name]

    expected = converted()
    written(lists, "device_types: [meta]\nlegalize: always\nlow_precision_type: float16\n")
    with (lists / "options.yaml").open("a") as file:
        file.write("keep_weight_casts: false\n")
    assert converted() == expected


@pytest.mark.parametrize("how", ["folder", "link"])
def test_what_is_no_file_is_an_error(how: str, lists: Path) -> None:
    path = lists / "options.yaml"
    path.mkdir() if how == "folder" else path.symlink_to("nowhere")
    with pytest.raises(hmpx.PolicyFileError, match=r"options.yaml"):
        hmpx.convert(lists=lists)
    assert not hmpx.is_converted()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("legalise: always\n", "options.yaml:1: unknown key 'legalise' of the options of lists; did you mean"),
        ("\nlow_precision_type: bf61\n", "options.yaml:2: low_precision_type"),
        ("device_types: [gpuu]\n", "options.yaml:1: device_types"),
        ("rounding: nearst\n", "options.yaml:1: rounding must be one of"),
        ("legalize: fats\n", "options.yaml:1: legalize must be one of"),
        ("# nothing\n", "options.yaml: is empty; delete it, or say how the lists are meant"),
        ("- always\n", "options.yaml:1: the options of lists must be a mapping of keys to values"),
    ],
)  # fmt: skip
def test_a_fault_names_its_line(text: str, said: str, lists: Path) -> None:
    """Before anything is patched."""
    with pytest.raises(hmpx.PolicyFileError) as caught:
        hmpx.convert(lists=written(lists, text))
    assert said in str(caught.value)
    assert not hmpx.is_converted()


@pytest.mark.parametrize("low", ["bfloat16", "float16", "float8_e4m3fn"])
def test_what_tune_writes_is_what_it_measured(low: str, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) + 256) - 256

    torch.manual_seed(0)
    given: dict[str, Any] = {"low_precision_type": low, "device_types": {"cpu"}}
    best = hmpx.tune(Model(), torch.randn(8, 16), tolerance=0.1, progress=False, **given)
    assert best.write(tmp_path)[-3].name == "options.yaml"
    with hmpx.convert(lists=tmp_path) as session, hmpx.convert(**best.lists) as measured:
        assert session is measured
