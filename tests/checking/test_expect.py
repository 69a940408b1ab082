"""`hmpx.expect`: contracts are checked, written and read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import hmpx
from tests.upstream_bugs import BUGS, Bug, drawn


def breaches(lines: list[dict[str, Any]], run: Any) -> list[hmpx.Breach]:
    with hmpx.expect({"expect": lines}, mode="collect") as contract:
        run()
    return contract.breaches


def model_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8), nn.Softmax(-1))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.run.__name__)
def test_bugs_of_other_projects_break_a_contract_until_they_are_fixed(bug: Bug) -> None:
    with pytest.raises(hmpx.ContractError), hmpx.expect({"expect": bug.lines}):
        bug.run(False)
    with hmpx.expect({"expect": bug.lines}):
        bug.run(True)
    assert not hmpx.is_converted()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"op": "softmax", "compute": "float32"}, "softmax in 2"),
        ({"module": "0", "compute": "float32"}, "linear in 0"),
        ({"module_class": "Softmax", "output": "float32"}, "Softmax in 2"),
        ({"module": "1", "saved": "float32"}, "a call in 1"),
        ({"module": "1", "op": "linear", "gradient": "float32"}, "linear in 1"),
        ({"phase": "backward", "module": "0", "gradient": "float32"}, "Linear in 0"),
        ({"op": "softmax", "contents": "float32"}, "softmax in 2"),
    ],
)
def test_each_key_is_checked_below_autocast(line: dict[str, Any], found: str) -> None:
    def run() -> None:
        with torch.autocast("cpu"):
            model_of_two()(drawn(4, 32)).sum().backward()

    seen = breaches([line], run)
    assert seen
    assert {f"{each.op} in {each.module}" for each in seen} == {found}
    assert {each.found for each in seen} == {"bfloat16"}
    assert all(each.location.startswith(__file__) for each in seen)
    assert not breaches([line], lambda: model_of_two()(drawn(4, 32)).sum().backward())


def test_a_breach_names_the_line_the_place_and_where_precision_was_lost(tmp_path: Path) -> None:
    file = tmp_path / "contract.yaml"
    file.write_text("expect:\n  - op: softmax\n    contents: float32\n")
    model = model_of_two()
    with (
        pytest.raises(hmpx.ContractError) as raised,
        hmpx.expect(file),
        torch.autocast("cpu"),
    ):
        model(drawn(4, 32))
    assert str(raised.value).startswith(f"{file}:2: softmax in 2 (")
    assert (
        ") has contents of bfloat16, expected float32; precision was lost in linear of 0 ("
        in str(raised.value)
    )
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


MOVES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: y.chunk(3, -1)[0],
    lambda y: y.chunk(3, -1)[0].view(2, 4, 4, 8).transpose(1, 2),
    lambda y: y[..., :16].contiguous(),
    lambda y: y.clone(),
    lambda y: y.transpose(1, 2).reshape(2, -1),
    lambda y: y.transpose(1, 2).flatten(1),
    lambda y: y[torch.tensor([1, 0])],
    lambda y: y.float().clone().exp().chunk(3, -1)[0].bfloat16()[0].clone(),
]


@pytest.mark.parametrize("move", MOVES)
def test_the_loss_of_precision_is_followed_through_views_and_copies(
    move: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    layer = nn.Linear(32, 96)
    with torch.autocast("cpu"):
        found = breaches(
            [{"op": "softmax", "contents": "float32"}],
            lambda: move(layer(drawn(2, 4, 32))).softmax(-1),
        )
    lost = "in bfloat16" if move is MOVES[-1] else "in linear"
    assert [each.lost.startswith(lost) for each in found] == [True]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_followed_through_views(mode: Callable[[], Any]) -> None:
    layer = nn.Linear(32, 96)
    for move in MOVES[:4]:
        with torch.autocast("cpu"), mode():
            (found,) = breaches(
                [{"op": "softmax", "contents": "float32"}],
                lambda move=move: move(layer(drawn(2, 4, 32))).softmax(-1),
            )
        is_view = move in MOVES[:2]
        assert found.lost.startswith(
            "in linear" if is_view else "before the first observed call, or"
        )


def test_conversions_are_seen_with_what_they_compute_in() -> None:
    line = {"op": "linear", "compute": "bfloat16"}
    with hmpx.convert(device_types={"cpu"}, legalize="always"):
        assert not breaches([line], lambda: model_of_two()(drawn(4, 32)))
    assert breaches([line], lambda: model_of_two()(drawn(4, 32)))


def test_optimizer_states_and_gradients_of_parameters_are_checked() -> None:
    lines = [
        {"optimizer": "exp_avg*", "contents": "float32"},
        {"tensor": "*.weight", "gradient": "float32"},
    ]

    def train(dtype: torch.dtype) -> None:
        model = model_of_two().to(dtype)
        optimizer = torch.optim.Adam(model.parameters())
        model(drawn(4, 32).to(dtype)).square().sum().backward()
        optimizer.step()

    assert not breaches(lines, lambda: train(torch.float32))
    found = {(each.key, each.op) for each in breaches(lines, lambda: train(torch.bfloat16))}
    assert {("contents", "exp_avg of 0.weight"), ("gradient", "1.weight")} <= found


def test_a_line_that_nothing_met_is_a_breach() -> None:
    lines = [{"module": "2.*", "compute": "float32"}, {"tensor": "*.scale", "contents": "float32"}]
    found = breaches(lines, lambda: model_of_two()(drawn(4, 32)))
    assert [str(each) for each in found] == [
        "<contract>['expect'][0]: no call met this line",
        "<contract>['expect'][1]: no tensor met this line",
    ]


def test_a_contract_may_be_text() -> None:
    """As `expect.of` returns it; its lines have numbers, as in a file."""
    model, x = model_of_two(), drawn(4, 32)
    text = hmpx.expect.of(model, x)
    with hmpx.expect(text):
        model(x)
    no_call = pytest.raises(hmpx.ContractError, match=r"^<contract>:2: no call met this line$")
    with no_call, hmpx.expect(text):
        pass


@pytest.mark.parametrize("low", [False, True])
def test_a_written_contract_holds_for_other_data_and_other_weights(
    low: bool, tmp_path: Path
) -> None:
    model = model_of_two()
    with torch.autocast("cpu", enabled=low):
        text = hmpx.expect.of(model, drawn(4, 32))
    file = tmp_path / "contract.yaml"
    file.write_text(text)
    for each in model.parameters():
        nn.init.normal_(each)
    with hmpx.expect(file), torch.autocast("cpu", enabled=low):
        model(drawn(9, 32, seed=1))
    with (
        pytest.raises(hmpx.ContractError),
        hmpx.expect(file),
        torch.autocast("cpu", enabled=not low),
    ):
        model(drawn(9, 32, seed=1))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("part", ["all", "first"])
def test_a_written_contract_of_a_compiled_model_holds(part: str) -> None:
    model: Any = model_of_two()
    if part == "all":
        model = torch.compile(model, backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    text = hmpx.expect.of(model, drawn(4, 32))
    assert "- 0.weight" in text
    with hmpx.expect(yaml.safe_load(text)):
        model(drawn(4, 32))


def test_complex_numbers_have_the_precision_of_their_parts() -> None:
    def run() -> torch.Tensor:
        x = drawn(64)
        return (torch.fft.rfft(x) * torch.fft.rfft(x)).abs() * drawn(33)

    text = hmpx.expect.of(run, ())
    with hmpx.expect(yaml.safe_load(text)):
        run()
    assert not breaches([{"op": "mul", "compute": "float32", "output": "float32"}], run)
    assert breaches([{"op": "mul", "compute": "float64"}], run)


def test_results_and_gradients_keep_their_bits() -> None:
    def run() -> list[torch.Tensor]:
        model = model_of_two()
        with torch.autocast("cpu"):
            result = model(drawn(4, 32))
        result.square().sum().backward()
        return [result, *[each.grad for each in model.parameters() if each.grad is not None]]

    plain = run()
    with hmpx.expect(
        {"expect": [{"saved": "bfloat16"}, {"contents": "bfloat16"}, {"compute": "bfloat16"}]},
        mode="collect",
    ):
        observed = run()
    assert all(map(torch.equal, plain, observed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; a contract has a list under 'expect:'"),
        ("expect: []", ":1: a contract without lines; list them under 'expect:'"),
        ("expects: []", ":1: unknown key 'expects' of a contract; did you mean 'expect'?"),
        ("expect:\n- op: sofmax\n  compute: float32", ":2: unknown op 'sofmax'; did you mean 'softmax'?"),
        ("expect:\n- op: softmax", ":2: this line expects nothing; give it compute or output or contents or saved or gradient"),
        ("expect:\n- op: linear\n  saved: bfloat16", ":2: a line with an op can't have saved, which is known by module; name a module instead"),
        ("expect:\n- tensor: a\n  output: float32", ":2: a line about tensors has no output; it has contents and gradient"),
        ("expect:\n- op: softmax\n  compute: float33", ":3: compute: unknown dtype 'float33'"),
    ],
)  # fmt: skip
def test_faulty_contracts_are_refused_before_anything_runs(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "contract.yaml"
    file.write_text(text)
    with pytest.raises(hmpx.PolicyFileError) as raised:
        hmpx.expect(file)
    assert message in str(raised.value)
