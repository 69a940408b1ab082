"""Turns lines of results into docs/evidence/trained.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from ..modes import TRAINED
from ..table import ACCEPTED, Line, by_model, causes

_INTRODUCTION = """# Trained models

What `hmpx.convert()` does to models with trained weights, judged by what their users judge them by. The
weights come inside packages of the package index; the data are made from seeds or shipped with scikit-image and
scikit-learn. Written by `python -m zoo --trained`; don't edit.

Values are means over three batches. *autocast* is `torch.autocast("cpu")` in
bfloat16, *hmpx* is `convert()` with the default lists, *frozen* is that after `hmpx.freeze`; *lean* and *hmp* are
`lists=`; the rest are `low_precision_type=` with the default lists.
"""
_TUNED = """`hmpx.tune` looked for the smallest set of ops out of low precision with which the first measure of the task stays
within one percent of fp32's (a distance, such as the error of forces: below one percent). *8, limit*: that holds for
the [limit](../tune.md#on-other-data) from six batches, and for two others. *3, mean*: for the mean of three, in an older
search; if its set changes nothing, it is the smallest for the limit, too. *(budget)* marks a search that ended at its
budget: some of its set may not be needed. *fresh* is of batches of six other seeds: on how many the change is within
one percent, its mean, and the largest. *within 0.9%*, *0.7%*: sets for a larger tolerance had failed on one of six
batches; *fresh* is of six others. The sets are policies in [examples/trained_lists](../../examples/trained_lists).
"""

Models = Mapping[tuple[str, str], Mapping[str, Line]]


def _short(mode: str) -> str:
    return mode.removeprefix("hmpx ")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) >= 0.01 or not value else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _grid(
    models: Models, modes: Sequence[str], cell: Callable[[Line, Mapping[str, Line]], str]
) -> Iterator[str]:
    """Yields a table of models and modes; what stopped a mode is said instead of its cell."""
    yield f"| model | {' | '.join(map(_short, modes))} |"
    yield "|---" * (len(modes) + 1) + "|"
    for (_, model), lines in models.items():
        cells = [
            ""
            if mode not in lines
            else "stops"
            if lines[mode]["errors"]
            else cell(lines[mode], lines)
            for mode in modes
        ]
        yield f"| {model} | {' | '.join(cells)} |"


def _scores(models: Models, modes: Sequence[str]) -> Iterator[str]:
    """Yields the table of all measures."""
    yield f"| model | measure | {' | '.join(map(_short, modes))} |"
    yield "|---" * (len(modes) + 2) + "|"
    for (_, model), lines in models.items():
        known = next((line["scores"] for line in lines.values() if "scores" in line), {})
        for name in known:
            cells = [
                "" if mode not in lines
                else "stops" if lines[mode]["errors"]
                else _number(lines[mode]["scores"][name])
                for mode in modes
            ]  # fmt: skip
            yield f"| {model} | {name} | {' | '.join(cells)} |"


def _tuned(models: Models) -> Iterator[str]:
    yield "| model | type | batches | all low | kept | FLOPs | bytes | evaluations | time | fresh | set |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for (_, model), lines in models.items():
        for mode, line in lines.items():
            if not mode.startswith("tune "):
                continue
            low_type = mode.removeprefix("tune ")
            if line["errors"]:
                yield f"| {model} | {low_type} | | | | | | | | | {next(iter(line['errors'].values()))} |"
                continue
            held = sum(each <= 0.01 for each in line["fresh"])
            ended = "" if line["is_complete"] else f" ({line['stopped_by']})"
            yield (
                f"| {model} | {low_type} | {line.get('batches', '3, mean')} | {_change(line['all_low'])} | {len(line['kept'])} of {line['candidates']} "
                f"| {_percent(line['flops'])} | {_percent(line['bytes'])} | {line['evaluations']}{ended} "
                f"| {line['seconds']:.0f} s | {held} of {len(line['fresh'])}, "
                f"{_change(fmean(line['fresh']))}, {_change(max(line['fresh']))} "
                f"| {', '.join(f'`{each}`' for each in line['kept'])} |"
            )


def _held(models: Models) -> str:
    """Returns on how many fresh batches the sets hold that change anything."""
    found = [
        line for lines in models.values() for line in lines.values() if any(line.get("fresh", ()))
    ]

    def share(lines: Sequence[Line]) -> str:
        fresh = [each for line in lines for each in line["fresh"]]
        return f"{sum(each <= 0.01 for each in fresh)} of {len(fresh)} fresh batches"

    limited = [line for line in found if "batches" in line]
    others = [line for line in found if "batches" not in line]
    return (
        f"Of the sets that change anything, the {len(limited)} by the limit hold on {share(limited)}, "
        f"the {len(others)} by the mean on {share(others)}."
    )


def _change(value: float) -> str:
    return f"{value:.2%}" if value < 10 else f"{value:.1g}"


def _over_autocast(models: Models) -> str:
    """Returns which models hmpx leaves further from float64 than torch.autocast does."""
    found = []
    for (_, model), lines in models.items():
        theirs, ours = (lines.get(mode, {}).get("outputs") for mode in ("autocast", "hmpx"))
        if theirs is not None and ours is not None and ours > ACCEPTED * theirs:
            found.append(f"{model} ({_number(ours / theirs)})")
    return f"Under hmpx over {ACCEPTED} times torch.autocast's: {', '.join(found) or 'none'}."


def document(lines: Iterable[Line], about: Mapping[str, str]) -> str:
    """Returns docs/evidence/trained.md.

    Args:
        lines: of results.
        about: name of each model -> what it is and what it is given.
    """
    found_of = {key[1]: (key, found) for key, found in by_model(lines).items()}
    models: Models = dict(found_of[name] for name in about if name in found_of)
    modes = [mode for mode in TRAINED if any(mode in found for found in models.values())]
    parts = [_INTRODUCTION]

    def section(title: str, text: str, *rows: str) -> None:
        parts.extend([f"## {title}", "", *([text, ""] if text else []), *rows, ""])

    def grid(cell: Callable[[Line, Mapping[str, Line]], str]) -> Iterator[str]:
        return _grid(models, modes, cell)

    packages = [f"| {name} | {package} | {about[name]} |" for package, name in models]
    section("The models", "", "| model | package | |", "|---|---|---|", *packages)
    section("The measures of the tasks", "", *_scores(models, modes))
    errors = "Relative L2 errors of all outputs; none where boxes differ in number or something isn't finite."
    section(
        "Errors to float64", f"{errors}\n{_over_autocast(models)}",
        *grid(lambda line, _: _number(line["outputs"])),
    )  # fmt: skip
    section(
        "In low precision", "Shares of FLOPs and of bytes.",
        *grid(lambda line, _: f"{_percent(line['flops'])} {_percent(line['bytes'])}".strip()),
    )  # fmt: skip
    section(
        "Time", "CPU time over fp32's, one thread, on a CPU without bfloat16.",
        *grid(
            lambda line, found: _number(line["seconds"] / found["fp32"]["seconds"])
            if "fp32" in found else ""
        ),
    )  # fmt: skip
    stops = [
        f"| {model} | {mode} | {error.replace('|', '/')} |"
        for (_, model), found in models.items()
        for mode in modes
        for error in found.get(mode, {}).get("errors", {}).values()
    ]
    section("Stops", "", "| model | mode | error |", "|---|---|---|", *stops)
    section("Tuned", f"{_TUNED}\n{_held(models)}", *_tuned(models))
    known = causes()
    notes = [
        f"- **{model}**: {known[key]}" for p, model in models if (key := f"{p}/{model}") in known
    ]
    if notes:
        section("Notes", "", *notes)
    return "\n".join(parts)
