"""Runs models in processes of their own, each with limits of time and memory, several at once.

The processes are forked off one that has imported the libraries. A model's modes share a process,
and so a reference; a process that dies or takes too long ends the mode that it was in, and another
one runs the modes that are left.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

import hmpx

from .entry import Entry
from .measuring import SEED, first_line, measure, run
from .modes import MODES

Line = dict[str, Any]
_REFERENCE = "fp32"


#: What a library imports as late as its first model is built, which would be in each process.
_LATE = {"transformers": ("transformers.modeling_utils", "transformers.generation.utils")}


def warm_up(libraries: Iterable[str], device: str = "cpu") -> None:
    """Imports the libraries and has hmpx measure the CPU, once for all processes.

    A GPU is left to them: processes forked off one that has used it can't.
    """
    torch.set_num_threads(1)
    for library in sorted(libraries):
        for name in (library, *_LATE.get(library, ())):
            importlib.import_module(name)
    for dtype in (torch.bfloat16, torch.float16) if device == "cpu" else ():
        with hmpx.convert(low_precision_type=dtype):
            x = torch.randn(8, 8, requires_grad=True)
            torch.nn.functional.linear(x, x).softmax(-1).sum().backward()


def _work(
    entry: Entry,
    modes: Sequence[str],
    sender: Connection,
    *,
    seed: int,
    device: str,
    memory_bytes: int,
) -> None:
    """Runs one model in some modes and sends a line for each, with the stages as they begin."""
    if device == "cpu":  # a GPU's driver reserves more addresses than there is memory
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    mode = _REFERENCE

    def notify(stage: str) -> None:
        sender.send(("stage", mode, stage))

    notify("build")
    try:
        reference = run(entry, MODES[mode], notify, seed, device)
    except Exception as error:
        sender.send(("unusable", mode, first_line(error)))
        return
    if mode in modes:
        sender.send(("line", mode, measure(reference, reference)))
    for mode in modes:
        if mode == _REFERENCE:
            continue
        notify("convert")
        try:
            result = run(entry, MODES[mode], notify, seed, device)
            sender.send(("line", mode, measure(result, reference)))
        except Exception as error:
            sender.send(("line", mode, {"errors": {"convert": first_line(error)}}))


@dataclass
class _Job:
    entry: Entry
    modes: list[str]
    process: BaseProcess
    receiver: Connection
    deadline: float
    mode: str = _REFERENCE
    stage: str = "build"
    done: list[str] = field(default_factory=list)


def sweep(
    work: Sequence[tuple[Entry, Sequence[str]]],
    report: Callable[[Entry, str, Line], None],
    *,
    seed: int = SEED,
    device: str = "cpu",
    jobs: int,
    limit_s: float,
    memory_bytes: int,
) -> None:
    """Runs all of `work`.

    Args:
        work: the models, each with its modes.
        report: is called with each line as soon as it is there.
        seed: of weights and random ops.
        device: where the models run.
        jobs: how many processes run at once.
        limit_s: the longest time that a model may take in one mode.
        memory_bytes: the most memory that a process may allocate.
    """
    context = multiprocessing.get_context("fork")
    waiting = [(entry, list(modes)) for entry, modes in work]
    running: list[_Job] = []

    def begin(entry: Entry, modes: list[str]) -> None:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_work,
            args=(entry, modes, sender),
            kwargs={"seed": seed, "device": device, "memory_bytes": memory_bytes},
            daemon=True,
        )
        process.start()
        sender.close()
        running.append(_Job(entry, modes, process, receiver, time.monotonic() + limit_s))

    def end(job: _Job, why: str | None) -> None:
        job.process.kill()
        job.process.join()
        job.receiver.close()
        running.remove(job)
        left = [mode for mode in job.modes if mode not in job.done]
        if why is None or not left:
            return
        if job.mode == _REFERENCE:
            for mode in left:
                report(job.entry, mode, {"errors": {job.stage: f"in fp32: {why}"}})
            return
        report(job.entry, job.mode, {"errors": {job.stage: why}})
        left.remove(job.mode)
        if left:
            waiting.insert(0, (job.entry, left))

    while waiting or running:
        while waiting and len(running) < jobs:
            begin(*waiting.pop(0))
        ready = wait([job.receiver for job in running], timeout=1)
        for job in list(running):
            if job.receiver in ready:
                try:
                    kind, mode, content = job.receiver.recv()
                except EOFError:
                    job.process.join()
                    finished = set(job.done) == set(job.modes)
                    end(job, None if finished else f"process ended with {job.process.exitcode}")
                    continue
                if kind == "stage":
                    if mode != job.mode:
                        job.deadline = time.monotonic() + limit_s
                    job.mode, job.stage = mode, content
                elif kind == "line":
                    job.done.append(mode)
                    report(job.entry, mode, content)
                else:
                    end(job, content)
            elif time.monotonic() > job.deadline:
                end(job, f"took more than {limit_s:.0f} s")
