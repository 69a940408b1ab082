"""`hmpx check DIR` names the damage of checkpoints, and finds none in whole ones."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.checkpoints import read_checkpoint
from hmpx.cli import main

safetensors = pytest.importorskip("safetensors.torch")

#: Module -> the line of the list for it.
LINES = {
    "fp8": "linear float8_e4m3fn_row output=float32",
    "block": "linear float8_e4m3fn_block128x128 activations=float8_e4m3fn_block128 output=float32",
    "mx": "linear mxfp4_e2m1 output=float32",
    "nv": "linear bfloat16 weights=nvfp4 output=float32",
    "int4": "linear bfloat16 weights=int4_block128 output=float32",
    "int8": "linear int8_row output=float32",
    "again": "linear int8_row output=float32",
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.block = nn.Linear(256, 128), nn.Linear(128, 256)
        self.mx, self.nv, self.int4 = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 64)
        self.int8, self.again = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for name in (*LINES, "norm", "head"):
            x = getattr(self, name)(x)
        return x


def build() -> Layers:
    torch.manual_seed(0)
    return Layers().eval()


def inputs() -> Tensor:
    return torch.ones(2, 256)


def frozen_to(folder: Path) -> None:
    model = build()
    sections = [{"module": name, "low": [line]} for name, line in LINES.items()]
    with (
        hmpx.convert(policy={"exclude": ["head"], "sections": sections}, device_types={"cpu"}),
        hmpx.freeze(model, inputs()) as frozen,
    ):
        frozen.save(folder)


class Files(NamedTuple):
    """A checkpoint in memory, to damage."""

    folder: Path
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def groups(self) -> dict[str, Any]:
        """Module -> its group."""
        groups = self.config["quantization_config"]["config_groups"].values()
        return {target: group for group in groups for target in group["targets"]}

    def write(self) -> None:
        safetensors.save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            self.folder / "model.safetensors",
        )
        (self.folder / "config.json").write_text(json.dumps(self.config))


def on(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Files], None]:
    def damage(files: Files) -> None:
        files.tensors[name] = change(files.tensors[name].clone())

    return damage


def without(*names: str) -> Callable[[Files], None]:
    def damage(files: Files) -> None:
        for name in names:
            del files.tensors[name]

    return damage


def swapped(a: str, b: str) -> Callable[[Files], None]:
    def damage(files: Files) -> None:
        for name in [each for each in files.tensors if each.startswith(f"{a}.")]:
            other = b + name[len(a) :]
            files.tensors[name], files.tensors[other] = files.tensors[other], files.tensors[name]

    return damage


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def config(**changes: Any) -> Callable[[Files], None]:
    return lambda files: files.config["quantization_config"].update(changes)


def weights(module: str, **changes: Any) -> Callable[[Files], None]:
    return lambda files: files.groups[module]["weights"].update(changes)


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Files], None]:
    """Damages a file after it was written."""

    def damage(files: Files) -> None:
        files.write()
        path = files.folder / name
        path.write_bytes(change(path.read_bytes()))

    damage.is_last = True  # type: ignore[attr-defined]
    return damage


def header(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        new = change(data[8 : 8 + length].decode()).encode()
        return struct.pack("<Q", len(new)) + new + data[8 + length :]

    return changed


def other_file(name: str, tensors: dict[str, Tensor]) -> Callable[[Files], None]:
    return lambda files: safetensors.save_file(tensors, files.folder / name)


def index(files: Files) -> None:
    named = {"weight_map": {"head.weight": "model-00002-of-00002.safetensors"}}
    (files.folder / "model.safetensors.index.json").write_text(json.dumps(named))


def reciprocal(scale: Tensor) -> Tensor:
    return 254 - scale if scale.dtype is torch.uint8 else (1 / scale.float()).to(scale.dtype)


def nibbles_swapped(packed: Tensor) -> Tensor:
    return packed >> 4 | packed << 4


E5M2 = torch.float8_e5m2

#: Damage -> how to do it, what is said of it, and whether that needs the model.
DAMAGE: dict[str, tuple[Callable[[Files], None], str, bool]] = {
    "fp8 scales as reciprocals": (on("fp8.weight_scale", reciprocal), "fp8: rows have norms of up to .* reciprocals", False),
    "block scales as reciprocals": (on("block.weight_scale", reciprocal), "block: rows have norms of up to .* reciprocals", False),
    "scale of a tensor as reciprocal": (on("nv.weight_global_scale", reciprocal), "nv: rows have norms of up to .* reciprocals", False),
    "mx scales as reciprocals": (on("mx.weight_scale", reciprocal), "mx: differs .*: weight_scale is stored as its reciprocal", True),
    "int4 scales as reciprocals": (on("int4.weight_scale", reciprocal), "int4: differs .*: weight_scale is stored as its reciprocal", True),
    "group size of config.json": (weights("int4", group_size=64), r"int4: weight_scale .* groups of 128, where config.json says 64", False),
    "group size of mx": (weights("mx", group_size=16), "config.json: group_2 has no scheme that hmpx knows", False),
    "scales for larger groups": (on("nv.weight_scale", lambda t: t[:, ::2]), r"nv: weight_scale .* groups of 32, where config.json says 16", False),
    "scales for smaller groups": (on("int4.weight_scale", lambda t: t.repeat_interleave(2, 1)), "int4: weight_scale .* groups of 64", False),
    "codes for other groups": (on("nv.weight_packed", lambda t: t & 0x33), "nv: codes of .* groups end below 5.1 of 6", False),
    "file cut in its data": (content("model.safetensors", lambda data: data[:-1000]), "model.safetensors: cut or damaged: .* not fully covered", False),
    "file cut in its header": (content("model.safetensors", lambda data: data[:300]), "model.safetensors: cut or damaged: .* invalid header length", False),
    "file with bytes at its end": (content("model.safetensors", lambda data: data + b"0" * 9), "model.safetensors: cut or damaged: .* not fully covered", False),
    "damaged header": (content("model.safetensors", header(lambda text: "{" + text)), "model.safetensors: cut or damaged: .* invalid JSON", False),
    "wrong shape in the header": (content("model.safetensors", header(lambda text: text.replace('"shape":[64,64]', '"shape":[64,63]', 1))), "model.safetensors: cut or damaged: .* invalid shape", False),
    "name twice in the header": (content("model.safetensors", header(lambda text: text.replace('"again.bias"', '"int8.bias"'))), "model.safetensors: cut or damaged: .* invalid offset", False),
    "tensor in two files": (other_file("more.safetensors", {"head.bias": torch.zeros(8)}), "head.bias: in model.safetensors and in more.safetensors", False),
    "index names a missing file": (index, "head.weight: model.safetensors.index.json says that it is in 'model-00002-of-00002.safetensors'", False),
    "swapped layers": (swapped("int8", "again"), "int8: differs from the model's weight .*: it is again.weight", True),
    "swapped layers of other shapes": (swapped("mx", "nv"), "mx: weight_scale is float8_e4m3fn", False),
    "weight as uint8": (on("fp8.weight", lambda t: t.view(torch.uint8)), "fp8: weight is uint8, and float-quantized has float8_e4m3fn", False),
    "weight in e5m2": (on("fp8.weight", lambda t: t.float().to(E5M2)), "fp8: weight is float8_e5m2", False),
    "weight not quantized": (on("fp8.weight", lambda t: t.float()), "fp8: weight is float32", False),
    "mx scales in float32": (on("mx.weight_scale", lambda t: t.float()), "mx: weight_scale is float32", False),
    "packed in int64": (on("int4.weight_packed", lambda t: t.long()), "int4: weight_packed is int64", False),
    "missing scales": (without("fp8.weight_scale"), "fp8: weight_scale is missing", False),
    "missing scale of a tensor": (without("nv.weight_global_scale"), "nv: weight_global_scale is missing", False),
    "missing codes": (without("int4.weight_packed"), "int4: weight_packed is missing", False),
    "missing shape": (without("int4.weight_shape"), "int4: weight_shape is missing", False),
    "missing layer": (without("fp8.weight", "fp8.weight_scale"), "fp8: config.json quantizes it, and it has no quantized tensors", False),
    "missing tensor": (without("norm.weight"), "norm.weight: missing", True),
    "unknown tensor": (lambda files: files.tensors.update(extra=torch.ones(1)), "extra: not in the model", True),
    "weight next to its codes": (lambda files: files.tensors.update({"nv.weight": torch.ones(256, 256)}), "nv: weight is there, and nvfp4-pack-quantized has none", False),
    "scale that is NaN": (on("fp8.weight_scale", first(float("nan"))), "fp8: weight_scale holds 1 values that are zero, negative, infinite or NaN", False),
    "scale that is zero": (on("block.weight_scale", first(0.0)), "block: weight_scale holds 1 values", False),
    "scale that is infinite": (on("nv.weight_global_scale", first(float("inf"))), "nv: weight_global_scale holds 1 values", False),
    "scale that is negative": (on("int8.weight_scale", first(-1.0)), "int8: weight_scale holds 1 values", False),
    "mx scale that is NaN": (on("mx.weight_scale", first(255)), "mx: weight_scale holds 1 values", False),
    "scales transposed": (on("fp8.weight_scale", lambda t: t.T), r"fp8: weight_scale is of shape \(1, 128\), not \(128, 1\)", False),
    "weight transposed": (on("fp8.weight", lambda t: t.view(torch.uint8).T.contiguous().view(t.dtype)), "fp8: weight_scale is of shape", False),
    "weight that is NaN": (on("fp8.weight", lambda t: first(0x7F)(t.view(torch.uint8)).view(t.dtype)), "fp8: weight holds NaN", False),
    "wrong weight_shape": (on("int4.weight_shape", first(32)), "int4: weight_packed is of shape .*, and weight_shape says", False),
    "nibbles swapped": (on("mx.weight_packed", nibbles_swapped), "mx: differs from the model's weight by", True),
    "other bias": (on("head.bias", lambda t: t + 1), "head.bias: differs from the model's", True),
    "bias that is infinite": (on("head.bias", first(float("inf"))), "head.bias: holds infinities", False),
    "bias without a weight": (without("head.weight"), "head.weight: missing", True),
    "config.json without a method": (lambda files: files.config.clear(), "config.json: quant_method is None", False),
    "config.json of another method": (config(quant_method="gptq"), "config.json: quant_method is 'gptq'", False),
    "damaged config.json": (content("config.json", lambda data: data[:-20]), "config.json:1: not a checkpoint's config.json, or damaged", False),
    "config.json without groups": (config(config_groups={}), "fp8: quantized, but no group of config.json has it", False),
    "layer ignored": (config(ignore=["re:.*fp8"]), "fp8: quantized, but config.json ignores it", False),
    "layer in no group": (lambda files: files.groups["int8"]["targets"].remove("again"), "again: quantized, but no group of config.json has it", False),
    "layer not quantized": (config(ignore=[]), "head: not quantized, and config.json does not ignore it", True),
    "other bits": (weights("int4", num_bits=8), "int4: weight_packed is of shape", False),
    "format of other weights": (lambda files: files.groups["nv"].update(format="pack-quantized"), "config.json: group_3 has no scheme that hmpx knows", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "served"
    frozen_to(folder)
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    damage, expected, needs_model = DAMAGE[name]
    tensors = safetensors.load_file(whole / "model.safetensors")
    files = Files(tmp_path, tensors, json.loads((whole / "config.json").read_text()))
    if name == "layer not quantized":
        for group in files.groups.values():
            group["targets"] = [*group["targets"], "Linear"]
    damage(files)
    if not hasattr(damage, "is_last"):
        files.write()
    found = read_checkpoint(tmp_path, build() if needs_model else None)
    assert any(re.search(expected, fault) for fault in found.faults), found.faults
    if not (needs_model or "end below" in expected or "reciprocals" in expected):
        model = build()
        with pytest.raises(hmpx.CheckpointError):
            hmpx.load_frozen(tmp_path, model)
        same = zip(model.parameters(), build().parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize("has_model", [False, True])
def test_whole_checkpoints_have_no_faults(whole: Path, has_model: bool) -> None:
    found = read_checkpoint(whole, build() if has_model else None)
    assert found.faults == ()
    assert [(each.name, each.layout) for each in found.layers] == [
        ("again", "int-quantized"),
        ("block", "float-quantized"),
        ("fp8", "float-quantized"),
        ("int4", "pack-quantized"),
        ("int8", "int-quantized"),
        ("mx", "mxfp4-pack-quantized"),
        ("nv", "nvfp4-pack-quantized"),
    ]
    assert all((each.error is not None) == has_model for each in found.layers)


def test_the_command_prints_and_writes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"{__file__}:build"]
    out = {name: tmp_path / f"c.{name}" for name in ("html", "json", "csv")}
    written = [word for name, path in out.items() for word in (f"--{name}", str(path))]
    assert main(["check", str(whole), "--model", *target, *written]) == 0
    assert "7 quantized layers, no faults" in capsys.readouterr().out
    assert json.loads(out["json"].read_text())["hmpx_checkpoint"] == 1
    assert out["csv"].read_text().splitlines()[3].startswith("fp8,float-quantized,channel,")
    assert "Quantized layers of served" in out["html"].read_text()
    (tmp_path / "config.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 1
    assert "no tensors in safetensors" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", "no_such_directory", "--model", *target])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a/model.safetensors"], "is a file of a checkpoint; check its directory: hmpx check "),
        (["a/config.json"], "is a file of a checkpoint; check its directory: hmpx check "),
        (["a", "b"], "a is a checkpoint; check it alone: hmpx check "),
        (
            ["served"],
            "served: no such file or directory; give an op list, a policy file or the dir",
        ),
    ],
)
def test_paths_that_are_no_checkpoint_get_a_remedy(
    files: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("")
    with pytest.raises(SystemExit):
        main(["check", *[str(tmp_path / each) for each in files]])
    assert said in capsys.readouterr().err
