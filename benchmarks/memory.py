"""What autograd keeps between forward and backward, in mixed precision and in fp32.

    python benchmarks/memory.py [--save] [--models mlp ...] [--sizes small] [--rows N]

Every candidate has the same weights and batch, and a process of its own.

fp32            the program as it is
autocast        its forward and loss inside torch.autocast(bfloat16)
bf16            after model.bfloat16()
hmpx            after hmpx.convert()
hmpx fast       after hmpx.convert(legalize="fast")
hmpx native, kept           after hmpx.convert(legalize="never", keep_weight_casts=True)
hmpx native, cast again     after hmpx.convert(legalize="never", keep_weight_casts=False)

saved           distinct storages that torch hands to saved-tensor hooks in a forward, but those of
                parameters and buffers; so casts of weights count, and what modules keep does not
saved_ratio     saved / fp32's
live            what the allocator has given out after the forward, less before it: counted another
                way, to compare; by glibc on the CPU, by torch on CUDA, else not measured
live_ratio      live / fp32's
peak            memory at its highest in forward and backward, less before; the gradients are in it.
                On the CPU it is resident memory, which is given back late: use large models
"""

from __future__ import annotations

import argparse
import gc

import candidates
import meter
import models
import timing
import torch
from torch import Tensor

CANDIDATES = (
    "fp32",
    "autocast",
    "bf16",
    "hmpx",
    "hmpx fast",
    "hmpx native, kept",
    "hmpx native, cast again",
)
MODELS = ("mlp", "gpt", "llama", "bert", "vit", "resnet")
COLUMNS = ("saved_bytes", "saved_ratio", "live_bytes", "live_ratio", "peak_bytes")


class Activations:
    """One candidate's model and batch."""

    def __init__(self, candidate: str, model: str, size: str, options: argparse.Namespace) -> None:
        self._device = options.device
        candidates.convert(candidate, self._device)
        module = models.build(
            model,
            size,
            device=options.device,
            is_attention_explicit=options.attention == "explicit",
        )
        batch = models.batch(model, size, device=options.device, seed=1, rows=options.rows)
        self._labels = batch.labels
        self._prepared = candidates.prepare(candidate, module, batch.inputs)

    def _loss(self) -> Tensor:
        with self._prepared.region():
            return models.loss(self._prepared.model(*self._prepared.inputs), self._labels)

    def measure(self) -> dict[str, int | None]:
        """Returns the sizes of what a forward saves."""
        saved_bytes = self._saved_bytes()  # also warms up: kernels keep what they first allocate
        meter.settle()
        gc.disable()
        meter.reset_peak(self._device)
        used, live = meter.used_bytes(self._device), meter.live_bytes(self._device)
        loss = self._loss()
        live_after = meter.live_bytes(self._device)
        loss.backward()
        peak = meter.peak_bytes(self._device)
        return {
            "saved_bytes": saved_bytes,
            "live_bytes": meter.difference(live_after, live),
            "peak_bytes": meter.difference(peak, used),
        }

    def _saved_bytes(self) -> int:
        module = self._prepared.module
        own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self._loss()
        size_bytes = sum(storage.nbytes() for storage in saved.values())
        del loss
        return size_bytes


def measure(
    model: str, size: str, names: list[str], options: argparse.Namespace
) -> dict[str, dict[str, float | None]]:
    """Returns candidate -> figures."""
    arguments = (model, size, options)
    with timing.workers(names, Activations, *arguments, threads=options.threads) as workers:
        found = {name: worker.call("measure") for name, worker in workers.items()}
    base = found[candidates.BASE]
    return {
        name: {
            **sizes,
            "saved_ratio": sizes["saved_bytes"] / base["saved_bytes"],
            "live_ratio": sizes["live_bytes"] / base["live_bytes"] if base["live_bytes"] else None,
        }
        for name, sizes in found.items()
    }


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, MODELS, CANDIDATES, "models")
    parser.add_argument("--attention", choices=("fused", "explicit"), default="fused", help="GPT's")
    parser.add_argument("--rows", type=int, metavar="N", help="examples in a batch")
    options = parser.parse_args()
    names = candidates.choose(options.candidates, CANDIDATES, ())
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for model in options.models:
        for size in options.sizes:
            found = measure(model, size, names, options)
            figures.setdefault(model, {})[size] = found
            timing.show(f"saved for backward by {model} {size}", found, COLUMNS)
            timing.save(
                options.save,
                "memory",
                {"figures": figures},
                device=options.device,
                threads=options.threads,
            )


if __name__ == "__main__":
    main()
