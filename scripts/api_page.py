"""Writes docs/api.md from docstrings and signatures, and the signatures alone, which a test holds.

    python scripts/api_page.py

scripts/api_page.md has the text between them: ``::: hmpx.convert`` stands for all about one name.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hmpx.number_formats.families.number_format import NumberFormat
from hmpx.reports import Written

ROOT = Path(__file__).resolve().parent.parent

TEMPLATE = ROOT / "scripts" / "api_page.md"
PAGE = ROOT / "docs" / "api.md"
SIGNATURES = ROOT / "tests" / "golden" / "signatures.txt"

#: A longer signature has a line for each parameter.
WIDTH = 100

#: Methods for other parts of hmpx, which are not promised, here and in subclasses.
INTERNAL = {
    "Session": (
        *("add", "announce", "arguments", "equals", "follow", "note_modules", "run_suspended"),
        "warn_of_unmatched",
    ),
    "NumberFormat": (
        *("amax", "block_scales", "check_overflow", "check_rounding", "check_scale", "codes_of"),
        *("coding", "derived", "element_params", "fits_in_float32", "is_exact_in_float32"),
        *("kernel", "noise_index", "own_function", "params", "params_in", "round", "scale"),
        *("scale_limits", "scale_of", "values_of"),
    ),
}

_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example):$", re.MULTILINE)


def names() -> list[str]:
    """Returns the dotted names in the template, in its order."""
    return _NAME.findall(TEMPLATE.read_text("utf-8"))


def page() -> str:
    """Returns the text of docs/api.md."""
    found = _NAME.sub(lambda match: "\n".join(entry(match[1])), TEMPLATE.read_text("utf-8"))
    return re.sub(r"\n{3,}", "\n\n", found)


def signatures() -> str:
    """Returns a line for each function, class, method, property and field."""
    return "".join(f"{line}\n" for name in names() for line in _lines(name))


# --- objects -------------------------------------------------------------------------------------


def named(name: str) -> Any:
    """Returns the object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_called(value: Any) -> bool:
    """Whether users call it: a function, or a class whose docstring says what it takes."""
    if not isinstance(value, type):
        return True
    is_result = _is_error(value) or issubclass(value, enum.Enum)
    return not is_result and (value.__name__.islower() or "\nArgs:\n" in (value.__doc__ or ""))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties that hmpx defines, those of the class first."""
    seen = {name for base in cls.__mro__ for name in INTERNAL.get(base.__name__, ())}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "hmpx":
            continue
        for name, value in vars(base).items():
            is_method = isinstance(value, (property, staticmethod, classmethod)) or callable(value)
            own = getattr(value, "fget", value)
            is_shown = not name.startswith("_") and is_method and inspect.getdoc(own)
            if is_shown and name not in seen and not isinstance(value, type):
                seen.add(name)
                yield name, getattr(cls, name) if not isinstance(value, property) else value


def _fields(cls: type) -> dict[str, str]:
    """Returns the types of a dataclass's fields, or of annotated attributes."""
    if dataclasses.is_dataclass(cls):
        return {each.name: _type(each.type) for each in dataclasses.fields(cls)}
    found = vars(cls).get("__annotations__", {}) if hasattr(cls, "_fields") else {}
    return {name: _type(each) for name, each in found.items()}


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text or str(annotation)


def signature(name: str, value: Any, *, width: int = WIDTH) -> str:
    """Returns a call with names, types and defaults, on one line or on one for each parameter."""
    found = inspect.signature(value)
    parts, is_keyword = [], False
    for each in found.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
        is_keyword |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        typed = each.annotation is not each.empty
        text = f"{stars}{each.name}" + (f": {_type(each.annotation)}" if typed else "")
        if each.default is not each.empty:
            text += f" = {each.default!r}" if typed else f"={each.default!r}"
        parts.append(text)
        if each.kind is each.POSITIONAL_ONLY:
            parts.append("/")
    parts = [part for at, part in enumerate(parts) if part != "/" or "/" not in parts[at + 1 :]]
    result = found.return_annotation
    end = "" if result is found.empty or isinstance(value, type) else f" -> {_type(result)}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= width or not parts:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _lines(name: str) -> Iterator[str]:
    value = named(name)
    if not isinstance(value, type):
        yield signature(name, value, width=10**6)
        return
    if _is_called(value):
        yield signature(name, value, width=10**6)
    else:
        bases = ", ".join(each.__name__ for each in value.__bases__ if each is not object)
        yield f"class {name}({bases})" if bases else f"class {name}"
    for field, text in _fields(value).items():
        yield f"{name}.{field}: {text}"
    for member, found in _members(value):
        if isinstance(found, property):
            made = inspect.signature(found.fget).return_annotation  # type: ignore[arg-type]
            yield f"{name}.{member}: {_type(made)}"
        else:
            yield signature(f"{name}.{member}", found, width=10**6)
    if issubclass(value, enum.Enum):
        yield f"{name}: {', '.join(value.__members__)}"


# --- Markdown --------------------------------------------------------------------------------------


def entry(name: str) -> Iterator[str]:
    """Yields the lines about one name."""
    value = named(name)
    yield f"### {name}\n"
    if _is_called(value):
        yield f"```text\n{signature(name, value)}\n```\n"
    elif _is_error(value):
        bases = [each.__name__ for each in value.__mro__[1:] if issubclass(each, Exception)]
        yield f"Is also: {', '.join(f'`{each}`' for each in bases)}.\n"
    text, *rest = _SECTION.split(inspect.getdoc(value) or "")
    yield f"{_plain(text.strip())}\n"
    types = _fields(value) if isinstance(value, type) else {}
    for title, part in zip(rest[::2], rest[1::2], strict=True):
        body = textwrap.dedent(part.strip("\n")).strip()
        if title == "Example":
            yield f"```pycon\n{body}\n```\n"
        elif title in ("Returns", "Yields"):
            yield f"{title}: {_plain(body)}\n"
        else:
            yield f"{title}:\n"
            yield from _items(body, types if title == "Attributes" else {})
            yield ""
    if isinstance(value, type):
        yield from _methods(value)


def _items(body: str, types: dict[str, str]) -> Iterator[str]:
    for item in re.split(r"\n(?=\S)", body):
        name, _, text = item.partition(": ")
        of_type = f" (`{types[name]}`)" if name in types else ""
        yield f"- `{name}`{of_type}: {_plain(' '.join(text.split()))}"


def _methods(cls: type) -> Iterator[str]:
    title = next((title for base, title in SHARED.items() if issubclass(cls, base)), "")
    described = _described(title) if title else set()
    lines, shared = [], []
    for name, value in _members(cls):
        if name in described:
            shared.append(name)
            continue
        own = value.fget if isinstance(value, property) else value
        said = " ".join((inspect.getdoc(own) or "").partition("\n\n")[0].split())
        shown = name if isinstance(value, property) else signature(name, value, width=10**6)
        lines.append(f"- `{shown}`: {_plain(said)}")
    if shared:
        place = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
        named = ", ".join(f"`{name}`" for name in shared)
        is_whole = described == {*shared}
        lines.append(f"- Those of all {place}." if is_whole else f"- {named}: see {place}.")
    if lines:
        yield "Members:\n"
        yield from lines
        yield ""


#: Classes with members that the template describes once, for all subclasses, and under which heading.
SHARED = {Written: "Results", NumberFormat: "Number formats"}


def _described(title: str) -> set[str]:
    """Returns the members that the template lists under a heading."""
    _, _, rest = TEMPLATE.read_text("utf-8").partition(f"\n## {title}\n")
    return set(re.findall(r"(?:^- |, )`(\w+)", rest.partition("\n:::")[0], re.MULTILINE))


def _plain(text: str) -> str:
    """Returns a docstring's text as Markdown: code between single quotes."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    SIGNATURES.parent.mkdir(exist_ok=True)
    SIGNATURES.write_text(signatures(), "utf-8")
