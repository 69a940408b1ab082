"""`Frozen.save` and `hmpx.load_frozen`: what servers load, and the same model again."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.checkpoints import read_checkpoint
from hmpx.cli import main
from hmpx.formats import Block, Fixed, Scaled, get, quantize, register, unregister

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def own_formats() -> Any:
    own = (
        Block("mxfp4_even", get("mxfp4_e2m1").element, rule="even"),  # type: ignore[union-attr, arg-type]
        Block("mxfp8_ceil", get("mxfp8_e4m3").element, rule="ceil"),  # type: ignore[union-attr, arg-type]
        Scaled("int8_block32", Fixed("integer8", 8, 0), 32),
    )
    for each in own:
        register(each)
    yield
    for each in own:
        unregister(each.name)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(256, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 192, bias=False)
    ).eval()


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


#: A line of a list -> the layout, the strategies of weights and inputs, and the tensors of a layer with their dtypes.
LINES = {
    "linear float8_e4m3fn_tensor output=bfloat16": ("float-quantized", "tensor", "tensor", "weight float8_e4m3fn, weight_scale float32"),
    "linear float8_e4m3fn overflow=saturate": ("float-quantized", "tensor", "tensor", "input_scale float32, weight float8_e4m3fn, weight_scale float32"),
    "linear float8_e4m3fn_row output=bfloat16": ("float-quantized", "channel", "token", "weight float8_e4m3fn, weight_scale float32"),
    "linear bfloat16 weights=float8_e4m3fn_row": ("naive-quantized", "channel", None, "weight float8_e4m3fn, weight_scale float32"),
    "linear float8_e4m3fn_block128x128 activations=float8_e4m3fn_block128 output=bfloat16": ("float-quantized", "block", "group", "weight float8_e4m3fn, weight_scale float32"),
    "linear mxfp8_e4m3 output=bfloat16": ("mxfp8-quantized", "group", "group", "weight float8_e4m3fn, weight_scale uint8"),
    "linear bfloat16 weights=mxfp8_ceil": ("mxfp8-quantized", "group", None, "weight float8_e4m3fn, weight_scale uint8"),
    "linear mxfp4_e2m1": ("mxfp4-pack-quantized", "group", "group", "weight_packed uint8, weight_scale uint8"),
    "linear float32 weights=mxfp4_even": ("mxfp4-pack-quantized", "group", None, "weight_packed uint8, weight_scale uint8"),
    "linear nvfp4 output=bfloat16": ("nvfp4-pack-quantized", "tensor_group", None, "weight_global_scale float32, weight_packed uint8, weight_scale float8_e4m3fn"),
    "linear int8_row output=bfloat16": ("int-quantized", "channel", "token", "weight int8, weight_scale float32"),
    "linear int8 activations=int8_row output=bfloat16": ("int-quantized", "tensor", "token", "weight int8, weight_scale float32"),
    "linear int4_row activations=int8_row output=bfloat16": ("int-quantized", "channel", "token", "weight int8, weight_scale float32"),
    "linear bfloat16 weights=int8_block32": ("pack-quantized", "group", None, "weight_packed int32, weight_scale float32, weight_shape int64"),
    "linear bfloat16 weights=int4_block128 rounding=nearest_away": ("pack-quantized", "group", None, "weight_packed int32, weight_scale float32, weight_shape int64"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_checkpoint_is_loaded_bit_for_bit(
    line: str, spread: float, tmp_path: Path, own_formats: None
) -> None:
    layout, strategy, of_inputs, tensors = LINES[line]
    model, again, coded, x = mlp(), mlp(1), mlp(1), torch.randn(3, 256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.exp(spread * torch.randn_like(parameter)))
    with hmpx.convert(policy={"low": [line]}, device_types={"cpu"}):
        with hmpx.freeze(model, x) as frozen:
            frozen.save(tmp_path / "served")
            expected = model(x)
        hmpx.load_frozen(tmp_path / "served", again)
        assert torch.equal(again(x).float(), expected)
        assert hmpx.load_frozen(tmp_path / "served", coded, store="codes") is not None
        assert torch.equal(coded(x).float(), expected)
        assert [p.dtype for n, p in coded.named_parameters() if n in {"0.weight", "3.weight"}] == [
            torch.uint8
        ] * 2
        kept = zip(coded.state_dict().values(), again.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in kept)
        with hmpx.freeze(again, x) as frozen:
            frozen.save(tmp_path / "twice")
            assert torch.equal(again(x), expected)
    stored, twice = (
        safetensors.load_file(tmp_path / n / "model.safetensors") for n in ("served", "twice")
    )
    found = sorted(f"{n[2:]} {str(t.dtype)[6:]}" for n, t in stored.items() if n.startswith("3."))
    assert ", ".join(found) == tensors
    for name, tensor in stored.items():
        # Blocks whose largest magnitude was rounded up or down may have another exponent, for the same values.
        if "ceil" not in line and "nvfp4" not in line:
            assert torch.equal(tensor.view(torch.uint8), twice[name].view(torch.uint8)), name
    config = config_of(tmp_path / "served")["quantization_config"]
    (group,) = config["config_groups"].values()
    assert (config["format"], group["weights"]["strategy"]) == (layout, strategy)
    assert (group["input_activations"] or {}).get("strategy") == of_inputs
    assert (group["targets"], config["ignore"]) == (["Linear"], [])


def test_layers_in_other_types_are_ignored_and_others_keep_theirs(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 256)
    policy = {
        "low": ["linear bfloat16"],
        "sections": [{"module": "3", "low": ["linear float8_e4m3fn_row output=bfloat16"]}],
    }
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.freeze(model, x) as frozen:
        frozen.save(tmp_path)
        kept = model.state_dict()
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert {n: t.dtype for n, t in found.items() if n[0] != "3"} == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.bfloat16,
        "2.weight": torch.float32,
        "2.bias": torch.float32,
    }
    assert all(torch.equal(kept[n], t) for n, t in found.items() if n[0] != "3")
    assert config_of(tmp_path)["quantization_config"]["ignore"] == ["0"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.b.weight, self.head.weight = self.a.weight, self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.b(self.a(self.embed(ids))))
        return found


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model, again, ids = Tied().eval(), Tied().eval(), torch.arange(6)
    with hmpx.convert(policy={"low": ["linear int8_row output=bfloat16"]}, device_types={"cpu"}):
        with hmpx.freeze(model, ids) as frozen:
            frozen.save(tmp_path)
            expected = model(ids)
        hmpx.load_frozen(tmp_path, again)
        assert torch.equal(again(ids).float(), expected)
    names = safetensors.load_file(tmp_path / "model.safetensors").keys()
    assert names == {"embed.weight", "a.weight", "a.weight_scale", "a.bias", "b.bias"}
    assert config_of(tmp_path)["quantization_config"]["ignore"] == ["head"]


@pytest.mark.parametrize(
    "line",
    [
        "linear float8_e4m3fn overflow=saturate output=bfloat16",
        "linear nvfp4 output=bfloat16",
        "linear int4_block128 output=bfloat16",
    ],
)
def test_a_model_with_codes_gives_the_same_checkpoint(line: str, tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 256)
    policy = {"lists": "none", "low": [line]}
    for store in ("codes", "dtype"):
        with (
            hmpx.convert(policy=policy, device_types={"cpu"}),
            hmpx.freeze(model, x, store=store) as frozen,
        ):
            assert frozen.weights[0].is_low == (store == "codes")
            frozen.save(tmp_path / store)
    codes, values = (
        safetensors.load_file(tmp_path / store / "model.safetensors")
        for store in ("codes", "dtype")
    )
    assert codes.keys() == values.keys()
    for name, tensor in codes.items():
        assert torch.equal(tensor.view(torch.uint8), values[name].view(torch.uint8)), name
    assert config_of(tmp_path / "codes") == config_of(tmp_path / "dtype")


# --- files ---------------------------------------------------------------------------------------


def saved(folder: Path, line: str = "linear int8_row output=bfloat16") -> None:
    model, x = mlp(), torch.randn(3, 256)
    with (
        hmpx.convert(policy={"low": [line]}, device_types={"cpu"}),
        hmpx.freeze(model, x) as frozen,
    ):
        frozen.save(folder)


@pytest.mark.parametrize("failing", ["save_file", "rename"])
def test_an_earlier_checkpoint_stays_if_the_disk_is_full(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "served"
    saved(folder)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        *{"save_file": (safetensors, "save_file", full), "rename": (os, "fsync", full)}[failing]
    )
    with pytest.raises(hmpx.OptionError, match=r"can't write .*: No space left on device"):
        saved(folder, "linear mxfp4_e2m1")
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["served"]
    with pytest.raises(hmpx.OptionError, match="No space left on device"):
        saved(tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["served"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00002.safetensors", "adapter_model.safetensors"]
)
def test_other_weights_are_never_overwritten(name: str, tmp_path: Path) -> None:
    """Those of the model itself, of an adapter, or of another tool; other files stay."""
    (tmp_path / name).write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        hmpx.OptionError,
        match=f"holds {name}, which is not of an earlier Frozen.save; give another",
    ):
        saved(tmp_path)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        name: "mine",
        "config.json": "{}",
    }


@pytest.mark.parametrize("has_weights", [False, True])
def test_checkpoints_of_other_tools_are_never_overwritten(
    has_weights: bool, tmp_path: Path
) -> None:
    config = '{"quantization_config": {"quant_method": "compressed-tensors"}}'
    (tmp_path / "config.json").write_text(config)
    if has_weights:
        safetensors.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(hmpx.OptionError, match=r"not of an earlier Frozen\.save; give another"):
        saved(tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    saved(tmp_path)
    saved(tmp_path, "linear mxfp4_e2m1")
    assert {each.name for each in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(hmpx.OptionError, match="can't write"):
        saved(file)
    assert file.read_text() == "mine"


def test_large_checkpoints_are_in_several_files(tmp_path: Path) -> None:
    """Which replace those of an earlier one, and are read again; others' stay."""
    model, again, x = mlp(), mlp(1), torch.randn(3, 256)
    policy = {"low": ["linear nvfp4 output=bfloat16"]}
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.freeze(model, x) as frozen:
        expected = model(x)
        frozen.save(tmp_path)
        whole = safetensors.load_file(tmp_path / "model.safetensors")
        frozen.save(tmp_path, max_shard_size="13KB")
        names = sorted(each.name for each in tmp_path.glob("model*"))
        shards = names[:-1]
        assert names[-1] == "model.safetensors.index.json"
        assert shards == [
            f"model-0000{i}-of-0000{len(shards)}.safetensors" for i in range(1, len(shards) + 1)
        ]
        found = {name: safetensors.load_file(tmp_path / name) for name in shards}
        assert all(
            sum(t.nbytes for t in each.values()) <= max(13_000, 16_384) for each in found.values()
        )
        index = json.loads((tmp_path / names[-1]).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
        assert index["weight_map"] == {n: name for name, each in found.items() for n in each}
        merged = {n: t for each in found.values() for n, t in each.items()}
        assert merged.keys() == whole.keys()
        assert all(
            torch.equal(t.view(torch.uint8), whole[n].view(torch.uint8)) for n, t in merged.items()
        )
        assert not read_checkpoint(tmp_path, model).faults
        hmpx.load_frozen(tmp_path, again)
        assert torch.equal(again(x).float(), expected)
        frozen.save(tmp_path, max_shard_size=10**9)
        assert sorted(each.name for each in tmp_path.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        for size in ("5GiB", "many", 0, True, 1.5):
            with pytest.raises(hmpx.OptionError, match="max_shard_size must be a number of bytes"):
                frozen.save(tmp_path, max_shard_size=size)
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model-00001-of-00001.safetensors").write_text("mine")
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(
            hmpx.OptionError, match=r"holds model-00001-of-00001\.safetensors, which is"
        ):
            frozen.save(tmp_path)


def test_folders_of_killed_writes_are_named(tmp_path: Path) -> None:
    (tmp_path / ".hmpx-0123456789abcdef.part").mkdir()
    with pytest.warns(hmpx.HmpxWarning, match=r"\.part is of a write that was killed; delete it"):
        saved(tmp_path / "served")


@pytest.mark.parametrize(
    ("line", "size", "said"),
    [
        ("linear posit16_1", 256, r"'0.weight' is used in posit16_1, .* which compressed-tensors does not have"),
        ("linear float8_e4m3fn_delayed", 256, "which compressed-tensors does not have"),
        ("linear int4_block128 output=bfloat16", 200, "200 columns, which groups of 128 do not divide"),
        ("linear int8_row rounding=stochastic", 256, "rounding='stochastic', and checkpoints hold weights rounded"),
        ("linear bfloat16", 256, "no linear layer that computes in a number format only"),
    ],
)  # fmt: skip
def test_what_a_checkpoint_cant_hold_is_refused(
    line: str, size: int, said: str, tmp_path: Path
) -> None:
    model, x = nn.Sequential(nn.Linear(size, 128)).eval(), torch.randn(3, size)
    with (
        hmpx.convert(policy={"low": [line]}, device_types={"cpu"}),
        hmpx.freeze(model, x) as frozen,
        pytest.raises(hmpx.FreezeError, match=said),
    ):
        frozen.save(tmp_path / "served")
    assert not any(tmp_path.iterdir())


def test_infinite_weights_and_an_undone_model_are_refused(tmp_path: Path) -> None:
    model, x = mlp(), torch.randn(3, 256)
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
    with hmpx.convert(policy={"low": ["linear int8_row"]}, device_types={"cpu"}):
        frozen = hmpx.freeze(model, x)
        with pytest.raises(hmpx.FreezeError, match=r"'0.weight' holds infinities or NaN"):
            frozen.save(tmp_path)
        with pytest.raises(hmpx.OptionError, match="format must be 'compressed-tensors'"):
            frozen.save(tmp_path, format="gguf")
        frozen.undo()
        with pytest.raises(hmpx.FreezeError, match="not frozen any more"):
            frozen.save(tmp_path)
    assert not any(tmp_path.iterdir())


def test_codes_are_served_from_a_checkpoint(tmp_path: Path) -> None:
    policy = {"low": ["linear int4_block128 output=bfloat16"]}
    model, again, x = mlp(), mlp(1), torch.randn(3, 256)
    again[3].weight = nn.Parameter(torch.randn(192, 128))
    again.append(nn.Module())
    again[4].tied, again[4].forward = again[3].weight, lambda x: x
    with (
        hmpx.convert(policy=policy, device_types={"cpu"}),
        hmpx.freeze(model, x, store="codes") as frozen,
    ):
        frozen.save(tmp_path)
        expected, size = model(x), frozen.weights[0].stored_bytes
    with pytest.raises(
        hmpx.FreezeError, match=r"in training mode, and frozen weights can't be trained"
    ):
        hmpx.load_frozen(tmp_path, again.train(), store="codes")
    found = hmpx.load_frozen(tmp_path, again.eval(), store="codes")
    assert found is not None
    stored = {each.name: (each.stored_bytes, each.reason) for each in found.weights}
    assert stored["0.weight"] == (size, "quantized in the checkpoint")
    assert stored["2.weight"] == (512, "not stored as codes")
    assert stored["4.tied"] == (0, "is 3.weight")
    plain = again(x)  # no conversion is needed
    with hmpx.convert(policy=policy, device_types={"cpu"}), torch.no_grad():
        assert torch.equal(again(x).float(), expected)
        assert torch.equal(copy.deepcopy(again)(x).float(), expected)
    hmpx.load_frozen(tmp_path, other := mlp(2))
    assert torch.equal(other(x), plain)
    with pytest.raises(hmpx.FreezeError, match="is frozen and can't load weights"):
        again.load_state_dict(other.state_dict(), strict=False)
    with pytest.raises(hmpx.FreezeError, match="its fp32 weights are gone"):
        found.undo()
    with pytest.raises(hmpx.FreezeError, match="was loaded from a checkpoint; copy that directory"):
        found.save(tmp_path / "again")
    with pytest.raises(hmpx.FreezeError, match="is frozen already"):
        hmpx.load_frozen(tmp_path, again, store="codes")
    with pytest.raises(hmpx.OptionError, match="store must be"):
        hmpx.load_frozen(tmp_path, again, store="bytes")


def test_load_refuses_another_model(tmp_path: Path) -> None:
    saved(tmp_path)
    wrong = nn.Sequential(nn.Linear(256, 64)).eval()
    with pytest.raises(
        hmpx.CheckpointError, match=r"0.weight: of shape \(128, 256\), not \(64, 256\)"
    ):
        hmpx.load_frozen(tmp_path, wrong)
    with pytest.raises(hmpx.CheckpointError, match="float32, which bfloat16 can't hold"):
        hmpx.load_frozen(tmp_path, mlp().bfloat16())
    with pytest.raises(hmpx.OptionError, match="not a directory"):
        hmpx.load_frozen(tmp_path / "none", wrong)


def build() -> nn.Module:
    return mlp()


def inputs() -> Tensor:
    return torch.ones(2, 256)


def test_the_command_exports_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("low: [linear mxfp8_e4m3 output=bfloat16]\n")
    served = str(tmp_path / "served")
    assert (
        main(["export", f"{__file__}:build", "--policy", str(policy), "--checkpoint", served]) == 0
    )
    assert "2 quantized layers, no faults" in capsys.readouterr().out
    assert main(["check", served]) == 0


# --- other people's code -------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_compressed_tensors_restores_the_rounded_weights(
    line: str, tmp_path: Path, own_formats: None
) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model, x = mlp(), torch.randn(3, 256)
    with (
        hmpx.convert(policy={"low": [line]}, device_types={"cpu"}),
        hmpx.freeze(model, x) as frozen,
    ):
        frozen.save(tmp_path)
    config = quantization.QuantizationConfig.model_validate(
        config_of(tmp_path)["quantization_config"]
    )
    (scheme,) = config.config_groups.values()
    layout = LINES[line][0]
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    for layer in ("0", "3"):
        parts = {
            n[2:]: t for n, t in tensors.items() if n.startswith(f"{layer}.") and "bias" not in n
        }
        values = compressor.decompress(parts, scheme)["weight"].float()
        _, format, *options = line.split()
        said = {"weights": format, "rounding": "nearest", "overflow": None}
        said |= dict(option.split("=") for option in options)
        expected = quantize(
            model.get_submodule(layer).weight.detach(),
            said["weights"],
            said["rounding"],
            said["overflow"],
        )  # type: ignore[arg-type]
        if (
            layout == "nvfp4-pack-quantized"
        ):  # to bfloat16, with the scale of the tensor as a reciprocal
            assert torch.allclose(values, expected, rtol=2**-8, atol=0)
        else:
            assert torch.equal(values, expected)


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(12).view(1, 12)
    (tmp_path / "list.txt").write_text("linear float8_e4m3fn_row output=float32")
    with (
        hmpx.convert(tmp_path / "list.txt", exclude=["lm_head"], device_types={"cpu"}),
        hmpx.freeze(model, {"input_ids": ids}) as frozen,
        torch.no_grad(),
    ):
        frozen.save(tmp_path / "served")
        expected = model(ids).logits
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "served").eval()
    with torch.no_grad():
        assert torch.allclose(served(ids).logits, expected, atol=1e-6)


def test_a_config_of_transformers_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    model, ids = transformers.BertModel(config).eval(), torch.arange(12).view(1, 12)
    with (
        hmpx.convert(policy={"low": ["linear mxfp4_e2m1 output=float32"]}, device_types={"cpu"}),
        hmpx.freeze(model, {"input_ids": ids}) as frozen,
    ):
        frozen.save(tmp_path)
    found = config_of(tmp_path)
    assert (found["model_type"], found["architectures"]) == ("bert", ["BertModel"])
    restored = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (
        restored.hidden_size == 32
        and restored.quantization_config["format"] == "mxfp4-pack-quantized"
    )


# --- what is refused, and what is said -----------------------------------------------------------


class Routed(torch.nn.Module):
    """Experts of which the example takes one; buffers as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        shared = torch.randn(64)
        self.register_buffer("flat", shared)
        self.register_buffer("square", shared.view(8, 8))
        self.register_buffer("count", torch.tensor(20_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts[0](x)
        return result


def frozen_to(folder: Path | str, model: torch.nn.Module, x: torch.Tensor) -> None:
    policy = {"low": ["linear int8_row output=bfloat16"]}
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.freeze(model.eval(), x) as frozen:
        frozen.save(folder)


def test_layers_that_stay_whole_are_named_and_buffers_come_back(tmp_path: Path) -> None:
    model, again = Routed(), Routed()
    with pytest.warns(
        hmpx.HmpxWarning, match=r"not stored as codes: experts\.1 \(not used by the example"
    ):
        frozen_to(tmp_path / "m", model, torch.randn(2, 32))
    hmpx.load_frozen(tmp_path / "m", again)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), again.buffers(), strict=True))
    assert not read_checkpoint(tmp_path / "m", model).faults
    model.count += 100_000
    assert read_checkpoint(tmp_path / "m", model).faults == (
        "count: differs from the model's by 1 of its norm",
    )


class Mixture(torch.nn.Module):
    """A router and stacked experts, as models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(32, 32)
        self.router, self.stacked = Product(4, 32), Product(4, 16, 32)
        self.class_token = torch.nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x) + self.class_token[0]
        chosen = nn.functional.linear(x, self.router.weight).argmax(-1)
        found = [
            nn.functional.linear(row, self.stacked.weight[e])
            for row, e in zip(x, chosen, strict=True)
        ]
        return torch.stack(found)


class Product(torch.nn.Module):
    """A weight that its model uses."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))


def test_routers_and_stacked_experts_stay_whole_and_are_ignored(tmp_path: Path) -> None:
    model, again, x = Mixture(), Mixture(), torch.randn(5, 32)
    with pytest.warns(
        hmpx.HmpxWarning, match=r"stacked\.weight \(experts in 3 dimensions\), router\.w"
    ):
        frozen_to(tmp_path, model, x)
    ignored = config_of(tmp_path)["quantization_config"]["ignore"]
    assert ignored == ["router", "stacked", r"re:stacked\.\d+\..*"]
    # vLLM asks for each of an expert's layers by these names, transformers and compressed-tensors by modules'.
    layers = [
        f"stacked.{i}.{name}" for i in (0, 3) for name in ("gate_proj", "up_proj", "down_proj")
    ]
    assert all(re.match(ignored[2][3:], each) for each in layers)
    assert not re.match(ignored[2][3:], "stacked2.0.up_proj")
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[n], p) for n, p in model.named_parameters() if "proj" not in n)
    assert not read_checkpoint(tmp_path, model).faults
    hmpx.load_frozen(tmp_path, again.eval())
    policy = {"low": ["linear int8_row output=bfloat16"]}
    with hmpx.convert(policy=policy, device_types={"cpu"}), torch.no_grad():
        assert torch.equal(again(x), model(x))
        frozen = hmpx.freeze(model, x, store="codes")
        with pytest.warns(hmpx.HmpxWarning, match="not stored as codes"):
            frozen.save(tmp_path / "codes")
    assert not read_checkpoint(tmp_path / "codes", again).faults  # the router is rounded
    with torch.no_grad():
        again.router.weight[0] *= -1
    (fault,) = read_checkpoint(tmp_path / "codes", again).faults
    assert fault.startswith("router.weight: differs from the model's by ")


class Expert(torch.nn.Module):
    """A weight that `matmul` sums along its first axis, and a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.down = torch.nn.Linear(32, 32), torch.nn.Parameter(torch.randn(32, 16))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.proj(x) @ self.down).softmax(-1)


def test_weights_rounded_along_another_axis_are_the_models(tmp_path: Path) -> None:
    model = Expert().eval()
    policy = {"low": [f"{op} float8_e4m3fn_row output=bfloat16" for op in ("linear", "matmul")]}
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        frozen = hmpx.freeze(model, torch.randn(2, 32), store="codes")
        with pytest.warns(hmpx.HmpxWarning, match="not stored as codes"):
            frozen.save(tmp_path / "m")
        frozen.undo()
    assert not read_checkpoint(tmp_path / "m", model).faults
    model.mask.zero_()
    (fault,) = read_checkpoint(tmp_path / "m", model).faults
    assert fault.startswith("mask: differs from the model's by ")


@pytest.mark.parametrize(
    ("make", "folder", "said"),
    [
        (
            lambda: torch.nn.Linear(32, 4).bfloat16(),
            "m",
            "their weights are 'is bf16'; call model.float",
        ),
        (
            lambda: torch.compile(torch.nn.Linear(32, 4), backend="eager"),
            "m",
            "freeze model._orig_mod instead",
        ),
        (lambda: torch.nn.DataParallel(torch.nn.Linear(32, 4)), "m", "freeze model.module instead"),
        (lambda: torch.nn.Linear(32, 4), "", "directory is empty; give the path"),
        (lambda: torch.nn.Linear(32, 4), "a\0b", "can't write"),
    ],
    ids=["bf16", "compiled", "parallel", "empty", "zero"],
)
def test_what_can_not_be_saved(
    make: Any, folder: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make()
    x = torch.randn(2, 32, dtype=next(model.parameters()).dtype)
    with pytest.raises(hmpx.HmpxError, match=said):
        frozen_to(folder, model, x)
    assert not [*tmp_path.iterdir()]


def test_models_that_can_not_be_loaded_into(tmp_path: Path) -> None:
    frozen_to(tmp_path / "m", torch.nn.Linear(32, 4), torch.randn(2, 32))
    with pytest.raises(hmpx.OptionError, match=r"on the meta device; call model\.to_empty"):
        hmpx.load_frozen(tmp_path / "m", torch.nn.Linear(32, 4, device="meta"))
    with pytest.raises(hmpx.OptionError, match=r"must be a torch\.nn\.Module, not <class"):
        hmpx.load_frozen(tmp_path / "m", torch.nn.Linear)  # type: ignore[arg-type]
    model = torch.nn.Linear(32, 4).eval()
    with (
        hmpx.convert(
            policy={"low": ["linear float8_e4m3fn output=bfloat16"]}, device_types={"cpu"}
        ),
        hmpx.freeze(model, torch.randn(2, 32), store="codes"),
        pytest.raises(hmpx.FreezeError, match="is frozen and can't load weights"),
    ):
        hmpx.load_frozen(tmp_path / "m", model)
