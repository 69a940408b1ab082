"""Views of comparisons: text, CSV, JSON, the page, notebooks."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import hmpx
from hmpx import Comparison
from tests.reports.test_page import Elements


@pytest.fixture(scope="module")
def comparison():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    return hmpx.compare(model, torch.randn(4, 8), device_types={"cpu"})


def test_text_is_of_80_columns(comparison):
    long = replace(
        comparison.rows[0], module="a.very.long.name" * 10, location="/x" * 90, lost=1234
    )
    shown = str(Comparison(rows=(long, *comparison.rows) * 20, output_error=0.01))
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
    assert found["hmpx_comparison"] == 2


def test_the_page_escapes_what_users_wrote(comparison):
    odd = replace(comparison.rows[0], module="</script><script>alert(1)</script>", effect=math.inf)
    page = Comparison(rows=(odd,)).to_html()
    assert "<script>alert" not in page
    assert page.rstrip().endswith("</html>")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_notebooks_get_a_table_without_scripts(comparison):
    shown = comparison._repr_html_()
    assert "<script" not in shown and shown.count("<tr>") == len(comparison.rows) + 1


# --- the page as a whole -----------------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\n\u202e\u2028]]>--><!--'\"&amp;"


def hostile(comparison):
    return Comparison(
        rows=(
            *comparison.rows,
            replace(
                comparison.rows[0],
                op=HOSTILE,
                module=HOSTILE * 20,
                location=HOSTILE,
                reason=HOSTILE,
                effect=math.nan,
                sqnr_db=math.inf,
                order=99,
            ),
        ),
        gradients=(*comparison.gradients, replace(comparison.gradients[0], name=HOSTILE)),
        output_error=0.01,
        backward_error=HOSTILE,
    )


def test_the_data_of_the_page_has_a_key_for_each_number(comparison):
    data = Elements(hostile(comparison).to_html()).scripts["application/json"]
    tables = json.loads(data, parse_constant=pytest.fail)["tables"]
    assert [*tables] == ["sites", "gradients"]
    for table in tables.values():
        assert all(len(row) == len(table["titles"]) for row in table["rows"])
        assert all(len(keys) == table["numbers"] for keys in table["keys"])
        assert len(table["keys"]) == len(table["rows"])
