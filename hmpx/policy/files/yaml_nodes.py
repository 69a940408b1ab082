"""Parses YAML text into PyYAML's nodes, in bounded time: long text goes through the parser in C.

Nothing is evaluated.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml
from yaml.resolver import Resolver

from ...errors import PolicyFileError, cut

#: PyYAML's own parser takes some 5 s for a megabyte; libyaml a tenth, but its messages say less.
_LONG: Final = 1 << 16

_MOST_LEVELS: Final = 100


def compose(text: str, source: str) -> yaml.Node | None:
    """Returns the node of the one document in ``text``; None for an empty one.

    Raises:
        PolicyFileError: It is not valid YAML, or nested too deep.
    """
    try:
        if len(text) > _LONG and yaml.__with_libyaml__:
            return _composed(text)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        lines = text.splitlines()
        line = lines[mark.line] if mark and mark.line < len(lines) else ""
        hint = (
            "; put names that begin with * or @ in quotes"
            if re.search(r"[-\[,]\s*[*@]", line)
            else ""
        )
        problem = cut(str(error.problem or error.context))
        raise PolicyFileError(f"{where}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise PolicyFileError(f"{source}: not valid YAML: {cut(str(error))}") from None
    except (RecursionError, _TooDeepError):
        raise PolicyFileError(f"{source}: nested too deep to be a policy") from None
    except (ValueError, OverflowError) as error:  # of \\U escapes, of a version's number
        raise PolicyFileError(f"{source}: not valid YAML: {error}") from None


def _mark(event: Any) -> yaml.Mark:
    """Returns where ``event`` begins; libyaml's own marks have another class."""
    mark = event.start_mark
    return yaml.Mark("", mark.index, mark.line, mark.column, None, 0)


class _TooDeepError(Exception):
    """Collections within collections, deeper than any policy."""


def _composed(text: str) -> yaml.Node | None:
    """Returns what ``yaml.compose`` would, with a stack of its own: libyaml's recursion is unlimited.

    Raises:
        yaml.YAMLError: As there.
        _TooDeepError: It is nested too deep.
    """
    resolver = Resolver()
    anchors: dict[str, yaml.Node] = {}
    open_nodes: list[yaml.CollectionNode] = []
    keys: list[yaml.Node | None] = []  # of the mappings among them: the key that waits
    root: yaml.Node | None = None
    documents = 0
    event: Any
    node: Any
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.ScalarEvent):
            tag = event.tag
            if tag is None or tag == "!":
                tag = resolver.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
            node = yaml.ScalarNode(tag, event.value, _mark(event), None)
        elif isinstance(event, yaml.CollectionStartEvent):
            is_list = isinstance(event, yaml.SequenceStartEvent)
            kind = yaml.SequenceNode if is_list else yaml.MappingNode
            tag = event.tag
            if tag is None or tag == "!":
                tag = resolver.resolve(kind, None, event.implicit)  # type: ignore[no-untyped-call]
            node = kind(tag, [], _mark(event))
            open_nodes.append(node)
            keys.append(None)
            if len(open_nodes) > _MOST_LEVELS:
                raise _TooDeepError
        elif isinstance(event, yaml.CollectionEndEvent):
            node = open_nodes.pop()
            keys.pop()
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise yaml.composer.ComposerError(
                    None, None, f"found undefined alias {event.anchor!r}", _mark(event)
                )
            node = anchors[event.anchor]
        else:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise yaml.composer.ComposerError(
                        None, None, "but found another document", _mark(event)
                    )
            continue
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.anchor:
            anchors[event.anchor] = node
        if isinstance(event, yaml.CollectionStartEvent):
            continue
        if not open_nodes:
            root = node
        elif isinstance(open_nodes[-1], yaml.SequenceNode):
            open_nodes[-1].value.append(node)
        elif keys[-1] is None:
            keys[-1] = node
        else:
            open_nodes[-1].value.append((keys[-1], node))
            keys[-1] = None
    return root
