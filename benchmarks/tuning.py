"""What tuning costs and finds: `hmpx.tune` and other searches, all asking the same models.

    python benchmarks/tuning.py [--models gpt bert] [--sizes small] [--save]

Each model is trained for some steps on one batch, then tuned to a share of the error that it has with all
in bfloat16. The other searches are written here as their projects describe them; all of them evaluate
sets by the same function, and choose among the same candidates.

hmpx             hmpx.tune
one at a time    each candidate alone in low precision; then the worst are kept, as few as pass
ddmin            delta debugging (Zeller): a set from which none can be taken out
halving          parts of the model, the largest first, are tried in low precision, else halved, as
                 onnxconverter-common does
prefix           the first candidates in the order of calls are kept, as few as pass, as Polygraphy does

evaluations      sets that were evaluated
kept             candidates in fp32
error            relative L2 of the outputs
flops_share      of FLOPs that are in low precision
bytes_share      of bytes that ops in low precision read and write
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import models
import timing
import torch

import hmpx
from hmpx.tuning.candidates import Candidate, assigned, policy_of, shares

MODELS = ("gpt", "bert", "vit", "resnet", "mlp")
COLUMNS = ("evaluations", "kept", "error", "flops_share", "bytes_share")

Kept = frozenset[str]


class Oracle:
    """Errors of sets; counts those that one search asks for."""

    def __init__(self, model: Any, inputs: Any, candidates: tuple[Candidate, ...]) -> None:
        self._model, self._inputs, self.candidates = model, inputs, candidates
        self._errors: dict[Kept, float] = {}
        self.asked: set[Kept] = set()
        self.tolerance = 0.0
        with torch.no_grad():
            self._expected = model(inputs).double()

    def error(self, kept: Iterable[str]) -> float:
        """Returns the error with ``kept`` in fp32."""
        found = frozenset(kept)
        self.asked.add(found)
        if found not in self._errors:
            policy = policy_of(assigned(self.candidates, found, "bfloat16"), "bfloat16")
            device_types = {self._expected.device.type}
            with (
                torch.no_grad(),
                hmpx.convert(policy=policy, device_types=device_types, legalize="always"),
            ):
                output = self._model(self._inputs).double()
            gap = (output - self._expected).norm() / self._expected.norm()
            self._errors[found] = float(gap)
        return self._errors[found]

    def passes(self, kept: Iterable[str]) -> bool:
        """Whether the error is within the tolerance."""
        return self.error(kept) <= self.tolerance


def shortest(oracle: Oracle, order: list[str]) -> list[str]:
    """Returns the shortest prefix that passes, by bisection."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if oracle.passes(order[:middle]):
            high = middle
        else:
            low = middle + 1
    return order[:high]


def one_at_a_time(oracle: Oracle, order: list[str]) -> list[str]:
    """Returns the fewest of those that are worst alone."""
    everything = set(order)
    alone = {name: oracle.error(everything - {name}) for name in order}
    return shortest(oracle, sorted(order, key=lambda name: -alone[name]))


def ddmin(oracle: Oracle, order: list[str]) -> list[str]:
    """Returns a set from which none can be taken out."""
    kept, parts = order, 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        pieces = [kept[i : i + size] for i in range(0, len(kept), size)]
        complements = [[name for name in kept if name not in piece] for piece in pieces]
        smaller = next((each for each in pieces if oracle.passes(each)), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        rest = next((each for each in complements if oracle.passes(each)), None)
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif parts < len(kept):
            parts = min(len(kept), 2 * parts)
        else:
            break
    return [] if len(kept) == 1 and oracle.passes([]) else kept


def halving(oracle: Oracle, order: list[str]) -> list[str]:
    """Returns what is left after parts, the largest first, were tried in low precision."""
    kept, segments = set(order), [order]
    while segments:
        segments.sort(key=len)
        segment = segments.pop()
        if oracle.passes(kept - set(segment)):
            kept -= set(segment)
        elif len(segment) > 1:
            middle = len(segment) // 2
            segments += [segment[:middle], segment[middle:]]
    return sorted(kept)


SEARCHES: dict[str, Callable[[Oracle, list[str]], list[str]]] = {
    "one at a time": one_at_a_time,
    "ddmin": ddmin,
    "halving": halving,
    "prefix": shortest,
}


def trained(name: str, size: str, device: str, steps: int) -> tuple[Any, Any]:
    """Returns a model, and inputs that it was not trained on."""
    torch.manual_seed(0)
    model = models.build(name, size, device=device)
    batch = models.batch(name, size, device=device, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        models.loss(model(batch.inputs), batch.labels).backward()
        optimizer.step()
    return model.eval(), models.batch(name, size, device=device, seed=2).inputs


def measure(
    name: str, size: str, by: str, share: float, *, device: str, steps: int
) -> dict[str, dict[str, float]]:
    """Returns each search -> its figures."""
    model, inputs = trained(name, size, device, steps)
    probe = hmpx.tune(model, inputs, tolerance=1e9, by=by, progress=False)  # all in bfloat16 passes
    oracle = Oracle(model, inputs, probe.candidates)
    oracle.tolerance = share * probe.all_low_error
    best = hmpx.tune(model, inputs, tolerance=oracle.tolerance, by=by, progress=False)
    work = best.low_precision_flops_share, best.low_precision_bytes_share
    figures = {"hmpx": _figures(oracle, best.kept, best.evaluations, work)}
    order = called(model, inputs, probe.candidates)
    for label, search in SEARCHES.items():
        oracle.asked.clear()
        kept = frozenset(search(oracle, order))
        figures[label] = _figures(oracle, kept, len(oracle.asked))
    for each in best.kept:
        if oracle.passes(best.kept - {each}):
            raise SystemExit(f"{name} {size}: {each} was not needed")
    return figures


def called(model: Any, inputs: Any, candidates: tuple[Candidate, ...]) -> list[str]:
    """Returns the names of the candidates in the order of their first calls."""
    first: dict[tuple[str, str], int] = {}
    for row in hmpx.compare(model, inputs).rows:
        spot = (row.op, row.module)
        first[spot] = min(first.get(spot, row.order), row.order)
    last = len(first)
    return [
        each.name
        for each in sorted(
            candidates, key=lambda each: (min(first.get(s, last) for s in each.spots), each.name)
        )
    ]


def _figures(
    oracle: Oracle, kept: Kept, evaluations: int, work: tuple[float, float] | None = None
) -> dict[str, float]:
    flops, count = work or shares(oracle.candidates, kept)
    return {
        "evaluations": evaluations,
        "kept": len(kept),
        "candidates": len(oracle.candidates),
        "error": oracle.error(kept),
        "tolerance": oracle.tolerance,
        "flops_share": flops,
        "bytes_share": count,
    }


def main() -> None:
    """Prints a table for each model and size; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    timing.add_device_options(parser, MODELS, (), "models")
    parser.add_argument("--steps", type=int, default=50, help="of training before")
    parser.add_argument(
        "--share", type=float, default=0.5, help="of the error with all in bfloat16"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, dict[str, Any]] = {}
    for model in options.models:
        for size in options.sizes:
            for by in ("op", "module"):
                found = measure(
                    model, size, by, options.share, device=options.device, steps=options.steps
                )
                figures.setdefault(model, {}).setdefault(size, {})[by] = found
                timing.show(f"{model} {size} by {by}", found, COLUMNS)
                timing.save(
                    options.save,
                    "tuning",
                    {"figures": figures},
                    device=options.device,
                    threads=options.threads,
                )


if __name__ == "__main__":
    main()
