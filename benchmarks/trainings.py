"""Trains eight small tasks to the end in each precision, and compares what they reach with fp32.

    python benchmarks/trainings.py [--tasks gpt cnn] [--modes fp32 hmpx] [--seeds 5] [--device cuda] [--jobs 12]
        [--limit SECONDS] [--journal FILE] [--save] [--document]

Each training is repeated with several seeds, which give weights, batches and noise. A mode is compared with fp32
by a paired t-test over the seeds: the mean of the differences, its 95 % interval and the p-value, two-sided.
A mode differs where p is below 0.05 and the mean difference is larger than the standard deviation of fp32's seeds.

`--journal FILE` gets a line as soon as a training ends. Trainings that are in it are not repeated, so a sweep that
was stopped goes on; with `--limit 0` it makes the tables of what is there. `--save` also draws the losses.
`--document` writes the tables into docs/evidence/trainings.md. The fp8 and mxfp4 modes are emulated, so their times say
nothing about hardware. Needs scikit-learn, and matplotlib for the picture.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import outcomes
import tasks
import timing
import torch
from torch import Tensor

import hmpx

DOCUMENT = timing.RESULTS.parent.parent / "docs" / "evidence" / "trainings.md"
POINTS = 50  # of a saved loss curve

#: Ops that multiply with weights, which the fp8 and mxfp4 modes round.
PRODUCTS = ("linear", "conv2d", "lstm")


@dataclass(frozen=True)
class Mode:
    """A precision.

    Attributes:
        options: What `hmpx.convert` is given; None leaves torch as it is.
        is_autocast: The forward and the loss run under ``torch.autocast`` in bfloat16.
        is_scaled: The loss is scaled by a GradScaler.
    """

    options: Mapping[str, Any] | None = None
    is_autocast: bool = False
    is_scaled: bool = False

    def converted(self) -> AbstractContextManager[object]:
        """Returns the context of a whole training."""
        return nullcontext() if self.options is None else hmpx.convert(**self.options)

    def region(self, device: str) -> AbstractContextManager[object]:
        """Returns the context of the forward and the loss."""
        return torch.autocast(device, torch.bfloat16) if self.is_autocast else nullcontext()


def products(line: str) -> dict[str, Any]:
    """Returns the default lists with another ``line`` for the products with weights."""
    return {"policy": {"lists": "hmpx", "low": {"add": [f"{op} {line}" for op in PRODUCTS]}}}


#: The last two are those of docs/formats.md: both factors and the gradients are rounded, bfloat16 comes out.
MODES = {
    "fp32": Mode(),
    "autocast": Mode(is_autocast=True),
    "hmpx": Mode({}),
    "lean": Mode({"lists": "lean"}),
    "hmpx fp16": Mode({"low_precision_type": torch.float16}, is_scaled=True),
    "fp8": Mode(products("float8_e4m3fn_tensor gradients=float8_e5m2_tensor output=bfloat16")),
    "mxfp4": Mode(products("mxfp4 gradients=mxfp4 output=bfloat16")),
}
COLORS = {
    "fp32": "#333333",
    "autocast": "#c9a227",
    "hmpx": "#1f77b4",
    "lean": "#2ca02c",
    "hmpx fp16": "#9467bd",
    "fp8": "#d62728",
    "mxfp4": "#ff7f0e",
}


@dataclass(frozen=True)
class Job:
    """A training: what, in which mode, with which seed, where, and in how many steps."""

    task: str
    mode: str
    seed: int
    device: str
    steps: int


def trained(job: Job) -> dict[str, Any]:
    """Returns losses, score and seconds of a training, and the score of the untrained model for fp32.

    The first tenth of the steps is not timed: libraries load then, and hmpx meets each call site.
    """
    task, mode = tasks.TASKS[job.task], MODES[job.mode]
    task.start(job.device, 1)  # reads and makes the data, in fp32
    torch.manual_seed(job.seed)
    with mode.converted():
        training = task.start(job.device, job.steps)
        untrained = scored(training, mode, job.device) if job.mode == "fp32" else None
        torch.manual_seed(job.seed)
        optimizer = torch.optim.AdamW(training.model.parameters(), lr=task.rate, fused=True)
        scaler = torch.amp.GradScaler(job.device, enabled=mode.is_scaled)
        losses, start = [], 0.0
        for step in range(job.steps):
            if step == job.steps // 10:
                start = now(job.device)
            for group in optimizer.param_groups:
                group["lr"] = task.rate * schedule(step / job.steps)
            with torch.no_grad(), mode.region(job.device):
                batch = training.batch(step)
            with mode.region(
                job.device
            ):  # a new one, as autocast keeps casts made without gradients
                loss = training.loss(*batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        seconds = (now(job.device) - start) * job.steps / (job.steps - job.steps // 10)
        loss, metric = scored(training, mode, job.device)
    return {
        "loss": loss,
        "metric": metric,
        "untrained": None if untrained is None else untrained[1],
        "seconds": seconds,
        "curve": curve(torch.stack(losses)),
    }


def schedule(share: float) -> float:
    """Returns the share of the learning rate: up within a tenth of the steps, then down to 0."""
    return min(share / 0.1 + 0.01, (1 - share) / 0.9)


def now(device: str) -> float:
    """Returns the time once the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def scored(training: tasks.Training, mode: Mode, device: str) -> tuple[float, float]:
    """Returns the score of a model as it is."""
    training.model.eval()
    with torch.no_grad(), mode.region(device):
        score = training.score()
    training.model.train()
    return score


def curve(losses: Tensor) -> list[float]:
    """Returns the means of at most `POINTS` parts of a training."""
    parts = losses.double().cpu().tensor_split(min(POINTS, len(losses)))
    return [float(f"{part.mean().item():.5g}") for part in parts]


def attempted(job: Job) -> dict[str, Any]:
    """Returns a line of the journal: the job, and what `trained` returns of it or its error."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    torch.backends.mha.set_fastpath_enabled(False)  # scores are computed as the training is
    try:
        return {**asdict(job), **trained(job)}
    except Exception as error:  # the other trainings go on
        return {**asdict(job), "error": f"{type(error).__name__}: {error}"}


def ran(jobs: Sequence[Job], processes: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields what `attempted` returns as the jobs end; after ``limit_s`` the others are given up."""
    end = time.perf_counter() + limit_s
    if processes == 1:
        for job in jobs:
            if time.perf_counter() > end:
                return
            yield attempted(job)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # imported once for all
    with context.Pool(processes) as pool:
        rows = pool.imap_unordered(attempted, jobs)
        for _ in jobs:
            try:
                yield rows.next(max(end - time.perf_counter(), 0.0))
            except multiprocessing.TimeoutError:
                return


def read(journal: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the header of a journal and its trainings."""
    header, *rows = map(json.loads, journal.read_text("utf-8").splitlines())
    return header, [row for row in rows if "error" not in row]


def sweep(jobs: Sequence[Job], processes: int, limit_s: float, journal: Path) -> None:
    """Trains what is not in the journal yet, and writes a line for each training as it ends."""
    done = {job_of(row) for row in read(journal)[1]}
    left = [job for job in jobs if job not in done]
    with journal.open("a", encoding="utf-8") as file:
        for number, row in enumerate(ran(left, processes, limit_s), 1):
            print(json.dumps(row), file=file, flush=True)
            said = row.get("error") or f"{row['metric']:.4g} in {row['seconds']:.1f} s"
            name = f"{row['task']}, {row['mode']}, seed {row['seed']}"
            print(f"{number}/{len(left)}  {name}: {said}", flush=True)


def job_of(row: Mapping[str, Any]) -> Job:
    """Returns the job of a line of a journal."""
    return Job(**{field.name: row[field.name] for field in fields(Job)})


def documented(text: str, found: outcomes.Figures) -> str:
    """Returns the text of docs/evidence/trainings.md with new tables."""
    labels = {name: f"{name}: {task.what}; {task.metric}" for name, task in tasks.TASKS.items()}
    return timing.with_tables(text, outcomes.tables(found, labels), DOCUMENT)


def main() -> None:
    """Trains, and prints the comparisons; with ``--save`` and ``--document`` also writes them."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, default=[*tasks.TASKS])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--steps", type=int, help="of each training, in place of the task's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--limit", type=float, default=86400.0, metavar="SECONDS", help="stop after this time"
    )
    parser.add_argument("--journal", type=Path, metavar="FILE", help="trainings done, a line each")
    parser.add_argument(
        "--document", action="store_true", help="write docs/evidence/trainings.md's tables"
    )
    options = parser.parse_args()
    jobs = [
        Job(task, mode, seed, options.device, options.steps or tasks.TASKS[task].steps)
        for seed in range(options.seeds)  # so that a sweep that is stopped has all modes
        for mode in options.modes
        for task in options.tasks
    ]
    with tempfile.TemporaryDirectory() as folder:
        journal = options.journal or Path(folder, "journal.jsonl")
        if not journal.exists():
            header = {**timing.header(options.device, 1), "processes": options.jobs}
            journal.write_text(json.dumps(header) + "\n", encoding="utf-8")
        sweep(jobs, options.jobs, options.limit, journal)
        header, rows = read(journal)
    chosen = [row for row in rows if job_of(row) in set(jobs)]
    found = outcomes.figures(sorted(chosen, key=lambda row: jobs.index(job_of(row))))
    if not found:
        raise SystemExit("nothing to compare: no training in fp32 has ended")
    print(outcomes.printed(found))
    if options.save is not None:
        name = f"trainings-{options.device}"
        timing.write(options.save, name, {**header, "figures": found})
        steps = {job.task: job.steps for job in jobs}
        outcomes.draw(found, COLORS, steps, options.save / f"{name}.svg")
    if options.document:
        DOCUMENT.write_text(documented(DOCUMENT.read_text("utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
