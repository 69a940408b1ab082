"""The HTML page: what it holds, and in a browser what it does."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hmpx.reports import Report
from hmpx.reports.report_page import module_tree, source_files

from .samples import hostile, large, row, waste, wide_row

#: What may be called outside of attributes: the page itself names nothing on a network.
ADDRESS = re.compile(r"(https?:)?//[a-z]", re.IGNORECASE)


class Elements(html.parser.HTMLParser):
    """The elements of a page: tag, attributes, text in scripts by their types."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self._script: str | None = None
        self._is_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._is_script, self._script = tag == "script", dict(attrs).get("type")

    def handle_data(self, data: str) -> None:
        if self._is_script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.found]


def data(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Elements(page).scripts["application/json"])
    return found


def test_the_page_asks_for_nothing() -> None:
    """No address, no link but within it, and a policy that forbids all but its own style and script."""
    page = large(20).to_html()
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert "src" not in attributes and "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    (policy,) = [a["content"] for _, a in elements.found if "http-equiv" in a]
    assert policy is not None
    for kind, text in [
        ("script", elements.scripts[None]),
        ("style", page.partition("<style>")[2].partition("</style>")[0]),
    ]:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    script = elements.scripts[None].replace("http://www.w3.org/2000/svg", "")
    assert not ADDRESS.search(script.replace("// ", ""))


def test_hostile_text_is_only_text() -> None:
    """It makes no element, ends no script, and fills in no template."""
    page = hostile().to_html()
    elements = Elements(page)
    assert elements.tags.count("script") == 2
    assert "img" not in elements.tags
    assert "{{ 7 * 7 }}" in page
    assert "\x1b" not in page and "\u202e" not in page and "\x00" not in page
    texts = data(page)["texts"]
    assert "<script>alert(1)</script>" in texts
    assert r"two\nlines\r\n" in texts
    page.encode("utf-8")


def test_the_notebook_part_has_no_script() -> None:
    for report in (hostile(), large(300), Report(()), Report((row(),), (waste(),), {}, "x")):
        part = report._repr_html_()
        elements = Elements(part)
        texts = {"div", "p", "strong", "ol", "ul", "li", "code", "br"}
        assert {*elements.tags} <= texts | {"table", "thead", "tbody", "tr", "th", "td"}
        assert all(set(attributes) <= {"scope", "class"} for _, attributes in elements.found)
        part.encode("utf-8")
    assert "<p>... and 200 more</p>" in large(300)._repr_html_()
    assert Elements(hostile().by_module()._repr_html_()).tags.count("table") == 1


def test_verdict_and_fixes_need_no_script() -> None:
    report = Report(
        (row(),), tuple(waste(fix=f"bf16.txt: op{i}") for i in range(25)), {}, "KeyError"
    )
    page = report.to_html()
    assert page.index('class="verdict"') < page.index("KeyError") < page.index("bf16.txt: op0")
    assert page.count('class="copy"') == 20
    assert "And 5 more, in the table of needless casts." in page


# --- modules -------------------------------------------------------------------------------------


def test_modules_sum_up_what_is_inside_them() -> None:
    nodes = module_tree(
        [
            row(module="a.b", flops=1, seconds=1.0),
            row(module="a", flops=10),
            wide_row(module="a.b.c", flops=100),
            row(module="", flops=1000, seconds=2.0),
        ]
    )
    assert [(path, name, parent) for path, name, parent, _ in nodes] == [
        ("", "", -1),
        ("a", "a", 0),
        ("a.b", "b", 1),
        ("a.b.c", "c", 2),
    ]
    sums = [totals for _, _, _, totals in nodes]
    assert [each.flops for each in sums] == [1111, 111, 101, 100]
    assert [each.low_flops for each in sums] == [1011, 11, 1, 0]
    assert [each.seconds for each in sums] == [3.0, 1.0, 1.0, None]


# --- source --------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("".join(f"line_{i} = '\u202e<b>'\n" for i in range(1, 31)), encoding="utf-8")
    return str(path)


def test_lines_that_made_calls_are_shown_with_those_around(program: str) -> None:
    (file,) = source_files(
        [
            row(location=f"{program}:2"),
            row(location=f"{program}:3", phase="backward"),
            wide_row(location=f"{program}:3"),
            wide_row(location=f"{program}:20"),
        ],
        [f"{program}:29"],
    )
    lines = {line.number: line for line in file.lines}
    assert [*lines] == [*range(1, 7), *range(17, 24), *range(26, 31)]
    kinds = {number: line.precision for number, line in lines.items() if line.precision}
    assert kinds == {2: "low", 3: "mixed", 20: "wide"}
    assert lines[3].calls == ("linear (backward) in bf16 \xd7 2", "softmax in fp32 \xd7 2")
    assert [line.number for line in file.lines if line.follows_gap] == [17, 26]
    assert lines[1].text == r"line_1 = '\u202e<b>'"


@pytest.mark.parametrize(
    ("location", "note"),
    [
        ("/absent/train.py:3", "it can't be read"),
        ("/etc/passwd:1", "only .py files are"),
        ("nul\x00.py:1", "it can't be read"),
        ("//host/share/train.py:1", "on another machine"),
        (r"\\host\share\train.py:1", "on another machine"),
        ("{folder}:1", "only .py files are"),
        ("{folder}/bad.py:1", "it can't be read"),
        ("{folder}/folder.py:1", "it can't be read"),
        ("{folder}/short.py:9", "it is now shorter"),
    ],
)
def test_files_that_are_not_shown_have_a_note(location: str, note: str, tmp_path: Path) -> None:
    """A report of somebody else makes the page show no other files than programs."""
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "folder.py").mkdir()
    report = Report((row(location=location.format(folder=tmp_path)),))
    (file,) = source_files(report.rows)
    assert file.lines == ()
    assert note in file.note
    assert note.replace("'", "&#39;") in report.to_html()


# --- in a browser --------------------------------------------------------------------------------

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="none of chromium, chromium-browser, google-chrome is on PATH"
)


def in_browser(page: str, script: str, folder: Path) -> Any:
    """Returns what ``script`` returns in the page, and errors: a script that the page's policy is told of.

    Args:
        page: The page.
        script: The body of an asynchronous JavaScript function.
        folder: Where to put the page.
    """
    before = "window.faults = []; window.onerror = (message) => { faults.push(message); };"
    before += (
        "addEventListener('securitypolicyviolation', (e) => faults.push(e.violatedDirective));"
    )
    after = (
        "(async () => { let found; try { found = await (async () => {"
        + script
        + "})(); } catch (error) { faults.push(String(error)); }"
        "document.documentElement.setAttribute('data-found', JSON.stringify([found ?? null, faults]));"
        "})();"
    )
    for text in (before, after):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    page = page.replace("<title>", f"<script>{before}</script><title>", 1)
    page = page.replace("</body>", f"<script>{after}</script></body>")
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", "--dump-dom"),
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    elements = Elements(done.stdout.decode("utf-8", "replace"))
    found = elements.found[0][1].get("data-found")
    assert found is not None, "the page's script did not end"
    result, faults = json.loads(found)
    assert faults == []
    return result


@needs_browser
def test_the_table_of_calls_is_sorted_searched_and_grouped(tmp_path: Path) -> None:
    report = Report(
        (
            row(op="conv10", calls=5, flops=300),
            row(op="conv9", calls=70, flops=200),
            wide_row(op="softmax", calls=6, flops=100, module="head"),
            wide_row(op="softmax", calls=1, flops=100, module="head"),
        ),
        (waste(), waste(what="fc1 -> gelu", fix="bf16.txt: gelu")),
    )
    found = in_browser(
        report.to_html(),
        """
        const table = document.getElementById("ops-table");
        const cells = (column) => [...table.querySelectorAll("tbody tr")].map(
          (row) => row.cells[column].textContent);
        const heads = () => [...table.querySelectorAll("th")];
        const click = (title) => heads().find((head) => head.textContent === title).firstChild.click();
        const search = document.getElementById("ops-search");
        const type = (box, text) => { box.value = text; box.dispatchEvent(new Event("input")); };
        const found = { first: cells(0), heads: heads().map((head) => head.textContent) };
        click("calls"); found.calls = cells(5);
        found.sorted = heads().map((head) => head.getAttribute("aria-sort"));
        click("calls"); found.up = cells(5);
        click("op"); found.ops = cells(0);
        type(search, "CONV fp32"); found.searched = cells(0);
        found.status = document.getElementById("ops-count").textContent;
        type(search, "absent"); found.none = cells(0);
        type(search, "");
        const grouping = document.getElementById("grouping");
        grouping.value = "module"; grouping.dispatchEvent(new Event("change"));
        found.modules = cells(0); found.low = cells(2);
        const casts = document.getElementById("casts-search");
        type(casts, "gelu");
        found.casts = [...document.querySelectorAll("#casts-table tbody tr")].length;
        return found;
        """,
        tmp_path,
    )
    assert found == {
        "first": ["conv10", "softmax", "conv9"],
        "heads": [
            *("op", "phase", "from", "in", "to"),
            *("calls", "casts", "bytes cast", "FLOPs", "bytes"),
        ],
        "calls": ["70", "7", "5"],
        "sorted": [None] * 5 + ["descending"] + [None] * 4,
        "up": ["5", "7", "70"],
        "ops": ["conv9", "conv10", "softmax"],
        "searched": ["conv9", "conv10"],
        "status": "2 of 3 rows",
        "none": [],
        "modules": ["blocks.0.fc1", "head"],
        "low": ["100 %", "0 %"],
        "casts": 1,
    }


@needs_browser
def test_the_modules_open_and_zoom(tmp_path: Path) -> None:
    report = Report(
        tuple(
            make(module=f"blocks.{i}.{part}", flops=flops, casts=1)
            for i in range(11)
            for part, make, flops in (("fc1", row, 800), ("fc2", wide_row, 200))
        )
    )
    found = in_browser(
        report.to_html(),
        """
        const found = {};
        const names = (root) => [...root.querySelectorAll(":scope > li")].map(
          (item) => item.querySelector(".name").textContent);
        const next = () => new Promise((resolve) => setTimeout(resolve, 50));
        await next();
        const blocks = document.querySelector("#tree details details");
        found.before = blocks.childElementCount;
        blocks.querySelector("summary").click(); await next();
        found.names = names(blocks.querySelector("ul"));
        const cells = () => [...document.querySelectorAll("#icicle g")];
        found.cells = cells().length;
        const third = cells().find((cell) => cell.getAttribute("aria-label").startsWith("blocks.3:"));
        third.dispatchEvent(new Event("click", { bubbles: true }));
        found.zoomed = cells().map((cell) => cell.getAttribute("aria-label").split(":")[0]);
        found.focused = document.activeElement.getAttribute("aria-label").split(":")[0];
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        found.next = document.activeElement.getAttribute("aria-label").split(":")[0];
        document.getElementById("out").click();
        document.getElementById("out").click();
        found.out = [cells().length, document.getElementById("out").disabled];
        const measure = document.getElementById("measure");
        const root = () => document.querySelector("#tree .note").textContent;
        found.by_flops = root();
        measure.value = "calls"; measure.dispatchEvent(new Event("change"));
        found.by_calls = root();
        found.measures = [...document.getElementById("measure").options].map((each) => each.text);
        return found;
        """,
        tmp_path,
    )
    assert found == {
        "before": 1,
        "names": [*map(str, range(11))],
        "cells": 2 + 3 * 11,
        "zoomed": ["(outermost)", "blocks", "blocks.3", "blocks.3.fc1", "blocks.3.fc2"],
        "focused": "blocks.3",
        "next": "blocks.3.fc1",
        "out": [2 + 3 * 11, True],
        "by_flops": "80 % low, 100 % of FLOPs, 88 kB cast",
        "by_calls": "50 % low, 100 % of calls, 88 kB cast",
        "measures": ["FLOPs", "bytes", "calls", "bytes cast"],
    }
