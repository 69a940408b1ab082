"""What `hmpx.tune` keeps in fp32 beside what lists keep, at the error that each list reaches.

    python benchmarks/tuned_lists.py [--models bert gpt2] [--save]

Small models of six families are trained for some steps on one batch. Then each list is measured: its error
in relative L2 of the outputs, and which calls were computed in low precision under it. With that error as
the tolerance `hmpx.tune` looks for a set of its own. The third rival is a search: halving, as
onnxconverter-common does it, at half of the error with all in bfloat16.

kept             candidates of which any call is computed in fp32
error            relative L2 of the outputs
flops_share      of FLOPs that are in low precision
bytes_share      of bytes, counted in fp32, of ops in low precision
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import families
import timing
import torch
import tuning

import hmpx
from hmpx.torch_state import unchanged
from hmpx.tuning.candidates import Candidate, Costs, Spot, assigned, policy_of
from hmpx.tuning.task import Task

LISTS = ("hmp", "autocast-cpu")
COLUMNS = ("evaluations", "kept", "error", "flops_share", "bytes_share")

Figures = dict[str, dict[str, float]]


def spots_in(model: Any, inputs: torch.Tensor) -> Costs:
    """Returns what may run in low precision, with its FLOPs and bytes."""
    defaults = {n: p.default for n, p in inspect.signature(hmpx.tune).parameters.items()}
    task = Task(**{**defaults, "model": model, "batches": inputs})
    with unchanged(model, task.batches) as task.state:
        return task.spots()


def kept_by(
    policy: hmpx.Policy,
    model: Any,
    inputs: torch.Tensor,
    spots: Costs,
    candidates: tuple[Candidate, ...],
) -> dict[str, float]:
    """Returns what a policy keeps, and its error. Of each spot the share of its calls counts."""
    with torch.no_grad():
        expected = model(inputs).double()
        conversion = hmpx.convert(policy=policy, device_types={"cpu"}, legalize="always")
        with hmpx.record() as recorded, conversion:
            found = model(inputs).double()
    calls: Counter[Spot] = Counter()
    low: Counter[Spot] = Counter()
    for row in recorded.rows:
        calls[row.op, row.module] += row.calls
        low[row.op, row.module] += row.calls * row.is_low
    part = {spot: low[spot] / calls[spot] for spot in spots}
    all_flops = sum(flops for flops, _ in spots.values())
    all_bytes = sum(count for _, count in spots.values())
    return {
        "evaluations": 0,
        "kept": sum(any(part[spot] < 1 for spot in each.spots) for each in candidates),
        "candidates": len(candidates),
        "error": float((found - expected).norm() / expected.norm()),
        "flops_share": sum(part[spot] * spots[spot][0] for spot in spots) / all_flops,
        "bytes_share": sum(part[spot] * spots[spot][1] for spot in spots) / all_bytes,
    }


def tuned(
    model: Any,
    inputs: torch.Tensor,
    spots: Costs,
    by: str,
    tolerance: float,
) -> dict[str, float]:
    """Returns what `hmpx.tune` keeps, measured as what a list keeps."""
    best = hmpx.tune(model, inputs, tolerance=tolerance, by=by, progress=False)
    found = kept_by(best.policy, model, inputs, spots, best.candidates)
    return {**found, "evaluations": best.evaluations}


def measure(name: str, by: str, steps: int) -> dict[str, Figures]:
    """Returns each rival -> ``"rival"`` and ``"hmpx"`` -> figures."""
    model, inputs = families.trained(name, steps)
    spots = spots_in(model, inputs)
    probe = hmpx.tune(model, inputs, tolerance=1e9, by=by, progress=False)
    oracle = tuning.Oracle(model, inputs, probe.candidates)
    rivals = {
        each: kept_by(hmpx.load_policy(lists=each), model, inputs, spots, probe.candidates)
        for each in LISTS
    }
    oracle.tolerance = probe.all_low_error / 2
    kept = frozenset(tuning.halving(oracle, tuning.called(model, inputs, probe.candidates)))
    evaluations = len(oracle.asked)
    policy = policy_of(assigned(probe.candidates, kept, "bfloat16"), "bfloat16")
    found = kept_by(policy, model, inputs, spots, probe.candidates)
    rivals["halving"] = {**found, "evaluations": evaluations}
    both = {}
    for rival, figures in rivals.items():
        # Sums in another order differ in the last digits.
        tolerance = oracle.tolerance if rival == "halving" else figures["error"] * (1 + 1e-9)
        both[rival] = {"rival": figures, "hmpx": tuned(model, inputs, spots, by, tolerance)}
    return both


def main() -> None:
    """Prints a table for each model; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=families.FAMILIES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=50, help="of training before")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, dict[str, Any]] = {}
    for name in options.models or families.FAMILIES:
        for by in ("op", "module"):
            found = measure(name, by, options.steps)
            figures.setdefault(name, {})[by] = found
            rows = {
                (label if who == "rival" else f"  hmpx at {label}'s"): row
                for label, both in found.items()
                for who, row in both.items()
            }
            timing.show(f"{name} by {by}", rows, COLUMNS)
            timing.save(
                options.save,
                "tuned_lists",
                {"figures": figures},
                device="cpu",
                threads=options.threads,
            )


if __name__ == "__main__":
    main()
