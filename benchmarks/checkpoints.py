"""Checkpoints of `Frozen.save` against llm-compressor's, compressed-tensors' decompression, and transformers' outputs.

    python benchmarks/checkpoints.py [NAME ...] [--save]

The model is a Llama of transformers with random weights. Each scheme is that of llm-compressor which needs no data.
It needs compressed-tensors, llmcompressor and transformers. With ``--save``, the figures go to
benchmarks/results/checkpoints-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import timing
import torch
import transformers
from torch import nn

import hmpx
from hmpx.formats import Block, Fixed, Scaled, get, quantize

_MXFP4: Final = Block("mxfp4_even", get("mxfp4_e2m1").element, rule="even")
_MXFP8: Final = Block("mxfp8_rceil", get("mxfp8_e4m3").element, rule="rceil")
_INT8: Final = Scaled("int8_block128", Fixed("integer8", 8, 0), 128)

#: llm-compressor's scheme -> the formats of weights and inputs, and what differs in the tensors.
SCHEMES: Final[Mapping[str, tuple[Any, str, str]]] = {
    "FP8": (get("float8_e4m3fn_tensor"), "float8_e4m3fn_tensor", ""),
    "FP8_DYNAMIC": (get("float8_e4m3fn_row"), "float8_e4m3fn_row", ""),
    "FP8_BLOCK": (get("float8_e4m3fn_block128x128"), "float8_e4m3fn_block128", ""),
    "MXFP8": (_MXFP8, "mxfp8_rceil", ""),
    "MXFP4": (_MXFP4, "mxfp4_even", ""),
    "NVFP4A16": (get("nvfp4"), "float32", "one scale for q, k, v and one for gate, up"),
    "INT8": (get("int8_row"), "int8_row", "scales of amax / 127.5 instead of 127"),
    "W8A16": (_INT8, "float32", "scales of amax / 127.5 instead of 127"),
    "W4A16": (get("int4_block128"), "float32", "scales of amax / 7.5 instead of 7"),
}


def model_of(seed: int = 0) -> Any:
    """Returns a Llama with random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Returns the figures of one scheme."""
    weights, inputs, why = SCHEMES[name]
    model, ids = model_of(), torch.arange(64).view(2, 32)
    batch = {"input_ids": ids}
    model.save_pretrained(folder / "fp32")
    with torch.no_grad():
        exact = model(**batch).logits
    # No other op is low, so that servers and hmpx compute the same.
    line = f"linear bfloat16 weights={weights.name} activations={inputs} output=float32"
    (folder / "linear.txt").write_text(line)
    with hmpx.convert(folder / "linear.txt", exclude=["lm_head"], device_types={"cpu"}):
        with hmpx.freeze(model, batch) as frozen, torch.no_grad():
            frozen.save(folder / "hmpx")
            expected = model(**batch).logits
        again = model_of(seed=1)
        hmpx.load_frozen(folder / "hmpx", again)
        with torch.no_grad():
            restored = torch.equal(again(**batch).logits, expected)
    linear = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    del linear["lm_head"]
    served = served_by_transformers(folder / "hmpx")
    with torch.no_grad():
        logits = served(**batch).logits
    error, difference = (float((x.float() - expected).abs().max()) for x in (exact, logits))
    return {
        "largest_logit": float(exact.abs().max()),
        "error_of_format": error,
        "difference_of_transformers": difference,
        "restored": restored,
        **against_llm_compressor(name, folder),
        "why": why,
        "decompressed": decompressed(linear, weights, folder / "hmpx"),
    }


def served_by_transformers(folder: Path) -> Any:
    """Returns the model that transformers loads, with decompressed weights in float32."""
    from compressed_tensors.utils import get_direct_state_dict, replace_direct_state_dict

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.hf_quantizer.compressor.decompress_model(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # weights in blocks are bfloat16 now
            state = get_direct_state_dict(module)
            replace_direct_state_dict(module, {**state, "weight": state["weight"].float()})
    return model


def against_llm_compressor(name: str, folder: Path) -> dict[str, Any]:
    """Returns how many tensors, and how many bytes of those that differ, equal llm-compressor's."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor.entrypoints.model_free import model_free_ptq
    from safetensors.torch import load_file

    preset = preset_name_to_scheme(name, ["Linear"])
    scheme = QuantizationScheme(targets=["Linear"], weights=preset.weights)
    if name == "INT8":
        scheme = preset
    ignore = ["lm_head", "re:.*embed_tokens"]
    model_free_ptq(folder / "fp32", folder / "theirs", scheme=scheme, ignore=ignore)
    own, theirs = (load_file(folder / each / "model.safetensors") for each in ("hmpx", "theirs"))
    theirs = {n: t for n, t in theirs.items() if n in own}
    if name == "INT8":
        theirs = {n: t for n, t in theirs.items() if not n.endswith("zero_point")}
    equal = {
        n: torch.equal(t.view(torch.uint8), own[n].view(torch.uint8)) for n, t in theirs.items()
    }
    differing = {}
    for kind in ("weight", "weight_packed", "weight_scale", "weight_global_scale"):
        pairs = [(own[n], t) for n, t in theirs.items() if n.endswith(f".{kind}") and not equal[n]]
        if pairs:
            bytes_ = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs]
            count = sum(int((a != b).sum()) for a, b in bytes_)
            differing[kind] = count / sum(a.numel() for a, _ in bytes_)
    return {
        "tensors": len(own),
        "only_hmpx": sorted({n.rpartition(".")[2] for n in own.keys() - theirs.keys()}),
        "equal": sum(equal.values()),
        "differing_share": differing,
    }


def decompressed(linear: Mapping[str, torch.Tensor], format: Any, folder: Path) -> dict[str, Any]:
    """Returns how many weights compressed-tensors restores to the bits of `formats.quantize`, in its own dtype."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(found).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(
        getattr(scheme.format, "value", scheme.format)
    )
    tensors = load_file(folder / "model.safetensors")
    equal, dtypes, largest = 0, set(), 0.0
    for name, weight in linear.items():
        parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{name}.")}
        values = compressor.decompress(parts, scheme)["weight"]
        expected = quantize(weight.detach(), format)
        dtypes.add(str(values.dtype))
        equal += torch.equal(values.float(), expected)
        largest = max(
            largest, float((values.float() - expected).abs().max() / expected.abs().max())
        )
    return {"weights": len(linear), "equal": equal, "dtypes": sorted(dtypes), "largest": largest}


def relative(found: Mapping[str, Any]) -> float:
    """Returns the largest difference of transformers' logits over the largest logit."""
    return float(found["difference_of_transformers"] / found["largest_logit"])


def main() -> None:
    """Prints a line for each scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {[*SCHEMES]}")
    parser.add_argument("--save", action="store_const", const=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for format in (_MXFP4, _MXFP8, _INT8):
        hmpx.formats.register(format)
    schemes = {}
    for name in options.names or SCHEMES:
        with tempfile.TemporaryDirectory() as folder:
            schemes[name] = measured(name, Path(folder))
        print(name, schemes[name], flush=True)
    every = schemes.values()
    exact = [each for each in every if each["equal"] == each["tensors"]]
    figures = {
        "schemes": len(schemes),
        "restored": sum(each["restored"] for each in every),
        "byte_equal": len(exact),
        "decompressed": sum(
            each["decompressed"]["equal"] == each["decompressed"]["weights"] for each in every
        ),
        # Over the largest logit: of schemes with llm-compressor's bytes, and of all.
        "difference": max((relative(each) for each in exact), default=0.0),
        "largest_difference": max(map(relative, every)),
    }
    print(figures)
    timing.save(
        options.save,
        "checkpoints",
        {"figures": figures, "schemes": schemes},
        device="cpu",
        threads=1,
    )


if __name__ == "__main__":
    main()
