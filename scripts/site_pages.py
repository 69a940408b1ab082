"""What mkdocs does for the site beside turning docs/ into pages; `mkdocs.yml` names it as a hook.

The repository's own Markdown becomes pages (README.md is the first), and what documents link to
outside of docs/ comes along: pictures as they are, source as pages of its own, in which links to a
test find it. So nothing leads out of the site, whatever address it and the repository have.
"""

from __future__ import annotations

import ast
import itertools
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

#: Documents outside of docs/ -> their pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}

#: Pages -> what they are of, for those that are no files of docs/.
SOURCES = {page: source for source, page in PAGES.items()}

LANGUAGES = {".py": "python", ".ini": "ini", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")

#: Text of a link to a test: its module and function.
TEST = re.compile(r"\[\w+::(\w+)\]")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version in the header."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "hmpx" / "version.py").read_text("utf-8"))
    config.site_name = f"{config.site_name} {version[1]}" if version else config.site_name
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of documents and source outside of docs/."""
    documents = {path: (ROOT / path).read_text("utf-8") for path in PAGES}
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=documents[path]))
    docs = Path(config.docs_dir)
    pages = {f"docs/{each.relative_to(docs).as_posix()}": each for each in docs.rglob("*.md")}
    texts = {name: each.read_text("utf-8") for name, each in pages.items()} | documents
    for path in sorted({each for name, text in texts.items() for each in outside(name, text)}):
        files.append(_page_of(path, config))
    return files


def outside(document: str, text: str) -> set[str]:
    """Returns the paths in the repository that a document links to and that are no documents."""
    paths = (resolved(document, target) for _, target in LINK.findall(_without_code(text)))
    return {
        path
        for path in paths
        if path is not None and path not in PAGES and not path.startswith("docs/")
    }


def resolved(document: str, target: str) -> str | None:
    """Returns the path in the repository that a link leads to; None for other links."""
    file = target.partition("#")[0]
    if not file or re.match(r"\w+:", file):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), file))
    return path if (ROOT / path).exists() else None


def _page_of(path: str, config: MkDocsConfig) -> File:
    """Returns a picture as it is, a file of text as a page that shows it, a directory as a list."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(
            each.relative_to(source).as_posix()
            for each in source.rglob("*")
            if each.is_file() and "__pycache__" not in each.parts
        )
        parts = [f"## {name}\n\n{_shown(source / name)}" for name in names]
        return _unlisted(path, "\n\n".join(parts), config)
    if source.suffix in {".svg", ".png"}:
        return File.generated(config, path, content=source.read_bytes())
    if source.name.startswith("test_"):
        return _unlisted(path, _tests(source.read_text("utf-8")), config)
    return _unlisted(path, _shown(source), config)


def _tests(source: str) -> str:
    """Returns a module of tests as Markdown: each test under a heading of its own."""
    lines = source.splitlines()
    starts = [
        (min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)]), each.name)
        for each in ast.parse(source).body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name.startswith("test_")
    ]
    parts = [(None, 1), *((name, line) for line, name in starts), (None, len(lines) + 1)]
    pieces = []
    for (name, start), (_, end) in itertools.pairwise(parts):
        code = "\n".join(lines[start - 1 : end - 1]).strip("\n")
        heading = f"## {name}\n\n" if name else ""
        pieces.append(f'{heading}````python linenums="{start}"\n{code}\n````')
    return "\n\n".join(pieces)


def _shown(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"````{language}\n{path.read_text('utf-8')}\n````"


def _unlisted(path: str, text: str, config: MkDocsConfig) -> File:
    """Returns a page that the menu and the search don't have."""
    content = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{text}\n"
    return File.generated(config, f"source/{path}.md", content=content)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links into those of the site."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    document = SOURCES.get(here, f"docs/{here}")

    def follow(match: re.Match[str]) -> str:
        path = resolved(document, match[2])
        if path is None:
            return match[0]
        _, mark, heading = match[2].partition("#")
        if path in PAGES:
            target = PAGES[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path.endswith((".svg", ".png")):
            target = path
        else:
            target = f"source/{path}.md"
            mark, heading = _place(match[1])
        target = os.path.relpath(target, posixpath.dirname(here) or ".")
        if heading and mark and match[1].startswith("[test_"):  # long names break a table's layout
            return f'[test]({target}#{heading} "{heading}")'
        return f"{match[1]}({target}{mark}{heading})"

    pieces = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        piece if index % 2 else LINK.sub(follow, piece) for index, piece in enumerate(pieces)
    )


def _place(text: str) -> tuple[str, str]:
    """Returns the mark and the anchor of the test that a link's text names."""
    named = TEST.fullmatch(text)
    if named is None:
        return "", ""
    return "#", named[1]


def _without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
