"""Measures each line of the default lists: what a model loses without it, or gains with another one.

    python -m zoo.lines --sample 40 --write docs/evidence/lists.md

For each model and each line whose op it calls, the line is taken out and the model runs again. The
same for lines of other shipped sets that the default lacks: each is added alone. A ratio is the
error against fp32 then, over the error with the default lists, both taken as 0.0001 where they are
less. Bytes are those that calls read and write, by `hmpx.record`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import hmpx

from . import catalogue
from .entry import Entry
from .measuring import SEED, backward, built, distance, floating_tensors, settle
from .peers import put
from .results import ROOT
from .running import warm_up

KINDS: Final = {"LOW": "low", "FP32": "fp32", "WIDEST": "widest"}
OTHERS: Final = ("hmp", "autocast-cuda", "autocast-cpu")
LEAST: Final = 1e-4


@dataclass(frozen=True)
class Change:
    """One line that is taken out of a list of the default, or added to it."""

    is_added: bool
    kind: str
    op: str

    def policy(self) -> hmpx.Policy:
        """Returns the default policy with this change."""
        change = "add" if self.is_added else "remove"
        return hmpx.load_policy(policy={"lists": "hmpx", self.kind: {change: [self.op]}})


def changes(called: Iterable[str]) -> Iterator[Change]:
    """Yields the changes that concern these ops."""
    default = hmpx.load_policy()
    others = [hmpx.load_policy(lists=name) for name in OTHERS]
    removed = set()
    for op in sorted(called):
        now = default[op].cast_policy.name
        if default[op].reason.startswith("lists/hmpx/"):
            path, _, number = default[op].reason.rpartition(":")
            line = (ROOT / path).read_text("utf-8").splitlines()[int(number) - 1]
            removed.add((KINDS[now], line.split()[0]))  # a line may cover several ops
        for kind in sorted({other[op].cast_policy.name for other in others} - {now}):
            if kind in KINDS:
                yield Change(True, KINDS[kind], op)
    for kind, name in sorted(removed):
        yield Change(False, kind, name)


def outcome(
    entry: Entry, model: nn.Module, policy: hmpx.Policy | None
) -> tuple[list[Tensor], list[Tensor], hmpx.Report | None]:
    """Returns a model's outputs and gradients, and what was recorded unless it ran in fp32."""
    model.zero_grad()
    torch.manual_seed(SEED)
    batch = entry.batch(model)
    if policy is None:
        outputs = entry.forward(model, batch)
        backward(outputs)
        report = None
    else:
        with hmpx.convert(policy=policy), hmpx.record() as recording:
            outputs = entry.forward(model, batch)
            backward(outputs)
        report = recording.report()
    gradients = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().to_dense().clone()
        for p in model.parameters()
    ]
    return [t.detach().clone() for t in floating_tensors(outputs)], gradients, report


def measure(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yields what each change does to one model."""
    torch.set_num_threads(1)
    model = built(entry)
    settle(model, entry, entry.batch(model))
    entry.compared_mode(model)
    exact = outcome(entry, model, None)
    default = outcome(entry, model, hmpx.load_policy())
    assert default[2] is not None
    for change in changes({row.op for row in default[2].rows}):
        found = outcome(entry, model, change.policy())
        assert found[2] is not None
        ratios: list[float | None] = []
        for part in (0, 1):
            errors = [distance(run[part], exact[part]).relative for run in (found, default)]
            known = [max(error, LEAST) for error in errors if error is not None]
            ratios.append(known[0] / known[1] if len(known) == len(errors) else None)
        yield {
            "model": entry.name,
            "is_added": change.is_added,
            "kind": change.kind,
            "op": change.op,
            "outputs": ratios[0],
            "gradients": ratios[1],
            "bytes": found[2].totals.bytes / default[2].totals.bytes,
        }


def _write_measured(entry: Entry, path: Path) -> None:
    warnings.simplefilter("ignore")
    with path.open("a", encoding="utf-8") as file:
        for line in measure(entry):
            file.write(json.dumps(line) + "\n")
            file.flush()


def _ratios(lines: list[Mapping[str, Any]], part: str) -> str:
    """Returns the median and the largest ratio, with the model that has it."""
    known = [line for line in lines if line[part] is not None]
    if not known:
        return "not finite |"
    worst = max(known, key=lambda line: line[part])
    lost = "" if len(known) == len(lines) else f", not finite in {len(lines) - len(known)}"
    median = statistics.median(line[part] for line in known)
    return f"{median:.2f} | {worst[part]:.2f} ({worst['model']}){lost}"


def tables(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of both tables."""
    by_change: dict[Change, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_change[Change(line["is_added"], line["kind"], line["op"])].append(line)
    for is_added, title in ((False, "without the line"), (True, "with the line")):
        yield f"| {title} | list | models | outputs | worst | gradients | worst | bytes |"
        yield "|---|---|---|---|---|---|---|---|"
        for change in sorted(by_change, key=lambda each: (each.kind, each.op)):
            if change.is_added is is_added:
                found = by_change[change]
                moved = statistics.median(line["bytes"] for line in found)
                yield (
                    f"| `{change.op}` | {change.kind} | {len(found)} | {_ratios(found, 'outputs')} | "
                    f"{_ratios(found, 'gradients')} | {moved:.2f} |"
                )
        yield ""


def main() -> None:
    """Measures a sample of the models, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m zoo.lines", description=__doc__)
    parser.add_argument("--sample", type=int, default=40, metavar="N")
    parser.add_argument("--results", type=Path, default=Path("lines.jsonl"))
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of one model")
    parser.add_argument("--write", type=Path, help="the document that gets the tables")
    options = parser.parse_args()
    lines = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    known = {json.loads(line)["model"] for line in lines}
    chosen = [
        e for e in catalogue.sample(catalogue.entries(), options.sample) if e.name not in known
    ]
    warm_up({entry.library for entry in chosen})
    for entry in chosen:
        arguments = (entry, options.results)
        process = multiprocessing.get_context("fork").Process(
            target=_write_measured, args=arguments
        )
        process.start()
        process.join(options.limit)
        if process.exitcode is None:
            process.kill()
        print(entry.name, process.exitcode, flush=True)
    content = "\n".join(tables(map(json.loads, options.results.read_text("utf-8").splitlines())))
    if options.write is None:
        print(content)
    else:
        options.write.write_text(
            put(options.write.read_text("utf-8"), "by zoo.lines", content), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
