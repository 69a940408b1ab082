"""Whether sets by `hmpx.tune` stay within the tolerance on further batches, for four metrics.

    python benchmarks/tuned_batches.py [--models bert gpt2] [--save]

Small models of six families are trained for some steps on one batch, and tuned by eight batches at half of
the mean error with all in bfloat16. Then the error of further batches is measured.

kept             candidates that stay in fp32
bytes_share      of bytes, counted in fp32, of ops in low precision
error            that the search promises, over the tolerance
over_error       share of further batches whose error is larger than promised
over_tolerance   share of further batches whose error is larger than the tolerance
"""

from __future__ import annotations

import statistics
from typing import Any, Final

import families
import timing
import torch
from torch import Tensor

import hmpx
from hmpx.tuning import metrics

COLUMNS: Final = ("kept", "bytes_share", "error", "over_error", "over_tolerance")


def largest(low: Tensor, fp32: Tensor) -> float:
    """Returns the largest difference."""
    return float((low - fp32).abs().max())


def worst_row(low: Tensor, fp32: Tensor) -> float:
    """Returns the largest relative L2 error of a row of the batch."""
    return float(((low - fp32).flatten(1).norm(dim=1) / fp32.flatten(1).norm(dim=1)).max())


#: The name of each metric -> ``metric`` of `hmpx.tune`, and the same as a function.
METRICS: Final[dict[str, tuple[Any, Any]]] = {
    "relative_l2": ("relative_l2", metrics.relative_l2),
    "kl": ("kl", metrics.kl),
    "largest": (largest, largest),
    "worst_row": (worst_row, worst_row),
}


def measure(name: str, steps: int, tuned: int, further: int) -> dict[str, dict[str, float]]:
    """Returns the figures of each metric."""
    model, _ = families.trained(name, steps)
    # Seed 1 has the batch of the training.
    batches = [families.batch(name, 2 + seed)[0] for seed in range(tuned + further)]
    options: Any = {"device_types": {"cpu"}, "legalize": "always"}

    def outputs(policy: hmpx.Policy | None) -> list[Tensor]:
        with torch.no_grad():
            if policy is None:
                return [model(each).clone() for each in batches]
            with hmpx.convert(policy=policy, **options):
                return [model(each).clone() for each in batches]

    expected, figures = outputs(None), {}
    for label, (metric, function) in METRICS.items():

        def errors(policy: hmpx.Policy, of: Any = function) -> list[float]:
            return [of(*each) for each in zip(outputs(policy), expected, strict=True)]

        probe = hmpx.tune(
            model, batches[:tuned], metric=metric, tolerance=1e9, progress=False, **options
        )
        tolerance = statistics.fmean(errors(probe.policy)[:tuned]) / 2
        best = hmpx.tune(
            model, batches[:tuned], metric=metric, tolerance=tolerance, progress=False, **options
        )
        found = errors(best.policy)[tuned:]
        figures[label] = {
            "kept": len(best.kept),
            "bytes_share": best.low_precision_bytes_share,
            "error": best.error / tolerance,
            "over_error": statistics.fmean(each > best.error for each in found),
            "over_tolerance": statistics.fmean(each > tolerance for each in found),
        }
    return figures


def main() -> None:
    """Prints a table for each model; with ``--save`` also writes all figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=families.FAMILIES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=50, help="of training before")
    parser.add_argument("--batches", type=int, default=8, help="for tuning")
    parser.add_argument("--further", type=int, default=2000, help="batches afterwards")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    for name in options.models or families.FAMILIES:
        figures[name] = measure(name, options.steps, options.batches, options.further)
        timing.show(name, figures[name], COLUMNS)
    shares = [row["over_tolerance"] for rows in figures.values() for row in rows.values()]
    figures["sets"] = {"sets": len(shares), "above_5": sum(each > 0.05 for each in shares)}
    figures["sets"]["largest_over_tolerance"] = max(shares)
    timing.save(
        options.save, "tuned_batches", {"figures": figures}, device="cpu", threads=options.threads
    )


if __name__ == "__main__":
    main()
