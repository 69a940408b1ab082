"""Turns lines of results into docs/evidence/zoo.md."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .measuring import SEED
from .modes import MODES

Line = Mapping[str, Any]
#: A model may be this many times as far from fp32 as torch.autocast makes it, before other seeds have to show chance.
ACCEPTED = 1.1
#: Below this, both are as exact as fp32.
_EXACT = 1e-4
CAUSES = Path(__file__).with_name("causes.yaml")


def causes() -> dict[str, str]:
    """Returns the known causes: "library/model" -> text."""
    found = yaml.safe_load(CAUSES.read_text(encoding="utf-8")) if CAUSES.exists() else None
    return found or {}


def by_model(lines: Iterable[Line], seed: int = SEED) -> dict[tuple[str, str], dict[str, Line]]:
    """Returns (library, model) -> mode -> line, of one seed."""
    found: dict[tuple[str, str], dict[str, Line]] = defaultdict(dict)
    for line in lines:
        if line.get("seed", SEED) == seed:
            found[line["library"], line["model"]][line["mode"]] = line
    return dict(found)


def ratio(lines: Mapping[str, Line], mode: str, of: str) -> float | None:
    """Returns a mode's error over its peer's; None where either has none."""
    mine, peers = (lines.get(name, {}).get(of) for name in (mode, MODES[mode].peer))
    if mine is None or peers is None:
        return None
    return float(max(mine, _EXACT) / max(peers, _EXACT))


def modes_over(lines: Mapping[str, Line]) -> list[str]:
    """Returns the modes of hmpx in which a model's error is over what is accepted."""
    return [
        mode
        for mode in lines
        if mode.startswith("hmpx")
        and any((ratio(lines, mode, of) or 0) > ACCEPTED for of in _MEASURES)
    ]


def stopped(lines: Mapping[str, Line], mode: str) -> dict[str, str]:
    """Returns the stages that fail in the mode, but neither in fp32 nor under its peer."""
    if mode not in lines:
        return {}
    elsewhere = {
        stage
        for other in ("fp32", MODES[mode].peer)
        for stage in lines.get(other, {}).get("errors", {})
    }
    return {s: e for s, e in lines[mode]["errors"].items() if s not in elsewhere}


def stops(lines: Iterable[Line], mode: str) -> list[tuple[str, str, str, str]]:
    """Returns (library, model, stage, error) of what only this mode stops."""
    return [
        (*key, stage, error)
        for key, modes in by_model(lines).items()
        for stage, error in stopped(modes, mode).items()
    ]


def line_of(mode: str, measured: Line) -> str:
    """Returns a line for the terminal."""
    parts = [
        f"{name}={measured[name]:.2g}" if measured[name] is not None else f"{name}=?"
        for name in ("outputs", "gradients", "long_outputs")
        if name in measured
    ]
    parts += [f"{stage}: {error}" for stage, error in measured["errors"].items()]
    if measured.get("built_differently"):
        parts.append(f"{len(measured['built_differently'])} tensors built differently")
    return f"{mode:16} {measured.get('seconds', 0):5.1f} s  " + "  ".join(parts)


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _ratios(models: Mapping[Any, Mapping[str, Line]], mode: str, of: str) -> list[float]:
    found = (ratio(lines, mode, of) for lines in models.values())
    return [r for r in found if r is not None]


def _not_finite(line: Line) -> int:
    names = ("outputs_not_finite", "gradients_not_finite", "long_outputs_not_finite")
    return sum(line.get(name, 0) for name in names)


_MEASURES = ("outputs", "gradients", "long_outputs")


def summary(lines: Iterable[Line]) -> str:
    """Returns the table of modes at the top."""
    models = by_model(lines)
    rows = [
        "| mode | models | stops | built differently | outputs | gradients | long inputs | "
        f"over {ACCEPTED} | not finite |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        run = {key: modes for key, modes in models.items() if mode in modes}
        if not run or mode == "fp32" or mode.startswith("autocast"):
            continue
        over = sum(mode in modes_over(modes) for modes in run.values())
        built = sum(bool(modes[mode].get("built_differently")) for modes in run.values())
        lost = sum(
            _not_finite(modes[mode]) > 0 and not _not_finite(modes.get(MODES[mode].peer, {}))
            for modes in run.values()
        )
        medians = " | ".join(_median(_ratios(run, mode, of)) for of in _MEASURES)
        stop = sum(bool(stopped(modes, mode)) for modes in run.values())
        rows.append(f"| {mode} | {len(run)} | {stop} | {built} | {medians} | {over} | {lost} |")
    return "\n".join(rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _runs(modes: Mapping[str, Line], mode: str) -> str:
    if mode not in modes:
        return ""
    new = stopped(modes, mode)
    if new:
        return "; ".join(f"**{stage}**: {error.replace('|', '/')}" for stage, error in new.items())
    same = modes[mode]["errors"]
    return "yes" if not same else f"as fp32 or autocast, not: {', '.join(same)}"


def _row(key: tuple[str, str], modes: Mapping[str, Line]) -> str:
    autocast, mine = modes.get("autocast", {}), modes.get("hmpx", {})
    cells = [key[1], _runs(modes, "hmpx")]
    for of in ("outputs", "gradients"):
        r = ratio(modes, "hmpx", of)
        shown = "" if r is None else f"{r:.2f}"
        cells += [
            _number(autocast.get(of)),
            _number(mine.get(of)),
            f"**{shown}**" if r and r > ACCEPTED else shown,
        ]
    for mode, of in (
        ("hmpx", "long_outputs"),
        ("hmpx autocast-cpu", "outputs"),
        ("hmpx fast", "outputs"),
        ("hmpx fp16", "outputs"),
    ):
        r = ratio(modes, mode, of)
        shown = "" if r is None else f"{r:.2f}"
        if mode != "hmpx" and stopped(modes, mode):
            shown = f"stops in {', '.join(stopped(modes, mode))}"
        cells.append(f"**{shown}**" if r and r > ACCEPTED else shown)
    lost, peers = (_not_finite(modes.get(m, {})) for m in ("hmpx fp16", "autocast fp16"))
    cells.append(f"{lost} / {peers}" if lost or peers else "")
    cells.append(
        {True: "no", False: "yes"}.get(bool(mine["built_differently"]), "")
        if "built_differently" in mine
        else ""
    )
    return f"| {' | '.join(cells)} |"


_HEAD = (
    "| model | runs | outputs: autocast | hmpx | ratio | gradients: autocast | hmpx | ratio "
    "| long | autocast-cpu | fast | fp16 | not finite in fp16, of autocast | built equal |\n"
    "|" + "---|" * 14
)
_INTRODUCTION = """# The zoo

What `hmpx.convert()` does to real models, small and with random weights, beside fp32 and
`torch.autocast` on the CPU. Written by `python -m zoo`; don't edit.

Each model is built, runs forward and backward in eval mode, takes an optimizer's step, generates
where it can, runs over up to 1,500 positions where it has them, and is then trained one step as
built after `convert()`. Errors are relative to fp32: the norm of the difference over the norm, of
all outputs and of all gradients; ratios are to torch.autocast's error of the same type, both taken
as {exact:g} where they are less. A *stop* is an error where neither fp32 nor autocast has one.
"""


def over(lines: Sequence[Line]) -> Iterator[tuple[tuple[str, str], str, str, list[float]]]:
    """Yields (library, model), mode, measure and the ratios of all seeds, where the first is over."""
    seeds = sorted({line.get("seed", SEED) for line in lines})
    by_seed = [by_model(lines, seed) for seed in seeds]
    for key, modes in by_seed[0].items():
        for mode, of in itertools.product(modes_over(modes), _MEASURES):
            ratios = [ratio(models.get(key, {}), mode, of) for models in by_seed]
            known = [r for r in ratios if r is not None]
            if ratios[0] is not None and ratios[0] > ACCEPTED:
                yield key, mode, of, known


def _rows_over(lines: Sequence[Line]) -> Iterator[str]:
    """Yields the table of what is over the accepted ratio, with the same model's other seeds."""
    yield "The same models again, with other random weights. `ratio` is the one that was over 1.1; `median` is"
    yield "that of the other weights alone. A median near 1 means that the high ratio was chance."
    yield ""
    yield "| model | mode | of | ratio | other seeds | median | cause |"
    yield "|---|---|---|---|---|---|---|"
    for key, mode, of, ratios in over(lines):
        median = statistics.median(ratios[1:] or ratios)
        cells = [
            key[1], mode, of.replace("_", " "), f"{ratios[0]:.2f}",
            " ".join(f"{r:.2f}" for r in ratios[1:]),
            f"**{median:.2f}**" if median > ACCEPTED else f"{median:.2f}",
            causes().get("/".join(key), ""),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def document(lines: Iterable[Line]) -> str:
    """Returns docs/evidence/zoo.md."""
    lines = list(lines)
    models = by_model(lines)
    known = causes()
    parts = [_INTRODUCTION.format(exact=_EXACT), summary(lines), ""]
    parts += [
        f"Medians of ratios; the last columns count models: with a ratio over {ACCEPTED}, and with",
        "NaNs or infinities where neither fp32 nor autocast has any.",
        "",
    ]
    parts += [f"## Over {ACCEPTED}", "", *_rows_over(lines), ""]
    found = [
        (mode, *stop) for mode in MODES if mode.startswith("hmpx") for stop in stops(lines, mode)
    ]
    parts += [
        "",
        "## Stops",
        "",
        "| model | mode | stage | error | cause |",
        "|---|---|---|---|---|",
    ]
    parts += [
        f"| {model} | {mode} | {stage} | {error.replace('|', '/')} | {known.get('/'.join((library, model)), '')} |"
        for mode, library, model, stage, error in found
    ]
    families: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for key, modes in models.items():
        families[key[0], next(iter(modes.values()))["family"]].append(key)
    for (library, family), keys in families.items():
        title = library if family == library else f"{library}: {family}"
        parts += ["", f"## {title}", "", _HEAD, *(_row(key, models[key]) for key in keys)]
    return "\n".join(parts) + "\n"
