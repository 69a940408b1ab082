"""Views of comparisons: text, CSV, JSON, the page, notebooks."""

from __future__ import annotations

import csv
import html.parser
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import hmpx
from hmpx.comparing import Comparison
from hmpx.errors import OptionError
from tests.reports.test_page import Elements, in_browser, needs_browser


@pytest.fixture(scope="module")
def comparison():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    return hmpx.compare(model, torch.randn(4, 8), device_types={"cpu"})


def test_text_is_of_80_columns(comparison):
    long = replace(comparison.rows[0], module="a.very.long.name" * 10, site="/x" * 90, lost=1234)
    shown = str(Comparison(rows=(long, *comparison.rows) * 20, output_rel=0.01))
    assert max(map(len, shown.splitlines())) <= 80
    assert "1,234 n" in shown
    assert "... and 65 more; .rows has all" in shown


def test_text_says_what_differs(comparison):
    shown = str(comparison)
    assert shown.startswith("outputs differ by ")
    assert "linear" in shown and "gelu" in shown
    assert "gradients of 4 parameters" in shown


def test_worst(comparison):
    assert comparison.worst(2) == comparison.rows[:2]
    effects = [row.effect for row in comparison.rows]
    assert effects == sorted(effects, reverse=True)


def test_csv(comparison, tmp_path):
    odd = replace(comparison.rows[0], module="=1+1")
    path = tmp_path / "c.csv"
    Comparison(rows=(odd,)).to_csv(path)
    (row,) = csv.DictReader(path.read_text("utf-8").splitlines())
    assert row["module"] == "'=1+1"
    assert float(row["effect"]) == odd.effect


def test_json_has_no_numbers_that_json_lacks(comparison):
    odd = replace(comparison.rows[0], effect=math.inf, sqnr_db=-math.inf)
    found = json.loads(Comparison(rows=(odd,)).to_json(), parse_constant=pytest.fail)
    assert found["rows"][0]["effect"] == "inf"
    assert found["loss"] == "nan"
    assert found["hmpx_comparison"] == 1


def test_the_page_escapes_what_users_wrote(comparison):
    odd = replace(comparison.rows[0], module="</script><script>alert(1)</script>", effect=math.inf)
    page = Comparison(rows=(odd,)).to_html()
    assert "<script>alert" not in page
    assert page.rstrip().endswith("</html>")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_page_of_nothing():
    assert "No calls were compared." in Comparison(rows=()).to_html()
    assert Comparison(rows=())._repr_html_() == "<div><p>No calls were compared.</p></div>"


def test_notebooks_get_a_table_without_scripts(comparison):
    shown = comparison._repr_html_()
    assert "<script" not in shown and shown.count("<tr>") == len(comparison.rows) + 1


def test_a_file_that_can_not_be_written(comparison, tmp_path):
    with pytest.raises(OptionError, match="can't write"):
        comparison.to_html(tmp_path)


def test_the_page_has_pictures(comparison):
    page = comparison.to_html()
    assert page.count("<svg") == 2
    assert "unit roundoff of bfloat16" in page


# --- the page as a whole -----------------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\n\u202e\u2028]]>--><!--'\"&amp;"

#: Elements without an end tag.
VOID = {"meta", "input", "br", "img", "link", "hr"}


class Nesting(html.parser.HTMLParser):
    """Checks that each element ends, in order, and that ids are unique and references lead somewhere."""

    def __init__(self, page):
        super().__init__()
        self.open, self.faults, self.ids, self.references = [], [], [], []
        self.feed(page)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]
        self.faults += [f"no id {each}" for each in self.references if each not in self.ids]
        self.faults += [f"two ids {each}" for each in self.ids if self.ids.count(each) > 1]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += filter(None, [attributes.get("id")])
        self.references += filter(None, [attributes.get("aria-labelledby"), attributes.get("for")])
        self.faults += [f"{tag} has {name}" for name in attributes if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> ends nothing")


def hostile(comparison):
    return Comparison(
        rows=(
            *comparison.rows,
            replace(
                comparison.rows[0],
                op=HOSTILE,
                module=HOSTILE * 20,
                site=HOSTILE,
                reason=HOSTILE,
                effect=math.nan,
                sqnr_db=math.inf,
                order=99,
            ),
        ),
        gradients=(*comparison.gradients, replace(comparison.gradients[0], name=HOSTILE)),
        output_rel=0.01,
        backward_error=HOSTILE,
    )


def test_the_page_is_well_formed(comparison):
    for each in (comparison, hostile(comparison), Comparison(rows=())):
        page = each.to_html()
        assert Nesting(page).faults == []
        for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            ElementTree.fromstring(picture)
        assert Nesting(each._repr_html_()).faults == []


def test_the_data_of_the_page_has_a_key_for_each_number(comparison):
    data = Elements(hostile(comparison).to_html()).scripts["application/json"]
    tables = json.loads(data, parse_constant=pytest.fail)["tables"]
    assert [*tables] == ["sites", "gradients"]
    for table in tables.values():
        assert all(len(row) == len(table["titles"]) for row in table["rows"])
        assert all(len(keys) == table["numbers"] for keys in table["keys"])
        assert len(table["keys"]) == len(table["rows"])


@pytest.mark.slow
@needs_browser
def test_the_page_in_a_browser(comparison, tmp_path):
    rows = (
        replace(comparison.rows[0], op="zeta", module="first", effect=3.0, calls=5),
        replace(comparison.rows[0], op="alpha", module="second", effect=2.0, calls=70),
        replace(comparison.rows[0], op="mid", module=HOSTILE, effect=math.nan, calls=6),
    )
    shown = Comparison(rows=rows, gradients=comparison.gradients, output_rel=0.01)
    found = in_browser(
        shown.to_html(),
        """
        const table = document.getElementById("sites-table");
        const cells = (index) => [...table.querySelectorAll("tbody tr")].map(
          (row) => row.cells[index].textContent);
        const head = (title) => [...table.querySelectorAll("th")].find(
          (each) => each.textContent === title);
        const found = { first: cells(0), scripts: document.images.length };
        head("op").firstChild.click(); found.byOp = cells(0);
        head("calls").firstChild.click(); found.byCalls = cells(6);
        head("effect").firstChild.click(); found.down = cells(0);
        found.sorted = head("effect").getAttribute("aria-sort");
        head("effect").firstChild.click(); found.up = cells(0);
        const search = document.getElementById("sites-search");
        search.value = "SECOND alpha"; search.dispatchEvent(new Event("input"));
        found.searched = cells(0);
        found.count = document.getElementById("sites-count").textContent;
        const ground = () => getComputedStyle(document.body).backgroundColor;
        const before = ground();
        document.getElementById("theme").click(); found.isDark = before !== ground();
        document.getElementById("theme").click(); found.isBack = before === ground();
        document.documentElement.style.width = "360px";
        found.wide = [...document.querySelectorAll("body *")].filter((each) =>
          !each.closest(".scroll") && each.getBoundingClientRect().right > 360.5).map(
          (each) => each.outerHTML.slice(0, 60));
        return found;
        """,
        tmp_path,
    )
    assert found == {
        "first": ["zeta", "alpha", "mid"],
        "scripts": 0,
        "byOp": ["alpha", "mid", "zeta"],
        "byCalls": ["70", "6", "5"],
        "down": ["zeta", "alpha", "mid"],
        "sorted": "descending",
        "up": ["alpha", "zeta", "mid"],
        "searched": ["alpha"],
        "count": "1 of 3",
        "isDark": True,
        "isBack": True,
        "wide": [],
    }
