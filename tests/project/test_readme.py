"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

from tests import forks

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    """The 30-second example, run as a script."""
    (tmp_path / "example.py").write_text(blocks("python")[0])
    run = forks.run("example.py", cwd=tmp_path)
    assert run.stdout.replace(f"{tmp_path.resolve()}/", "") == blocks("text")[0]


def test_the_report_is_as_shown(tmp_path: Path) -> None:
    """That of `hmpx.record`, run as a script."""
    (source,) = [block for block in blocks("python") if "print(rec)" in block]
    (tmp_path / "see.py").write_text(source)
    run = forks.run("see.py", cwd=tmp_path)
    assert run.stdout.replace(f"{tmp_path.resolve()}/", "") in blocks("text")


def test_the_options_shown_exist() -> None:
    """Each call of convert in the README is made of arguments that it has."""
    import inspect

    import hmpx

    known = set(inspect.signature(hmpx.convert).parameters)
    calls = re.findall(r"hmpx\.convert\((.*?)\)(?:;|\s|$)", "\n".join(blocks("python")))
    used = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    assert used
    assert used - known <= {"low", "fp32"}  # arguments of Policy.from_ops inside one of them


def test_the_table_of_policies_has_each() -> None:
    """In a row of its own."""
    from hmpx import CastPolicy

    (table,) = re.findall(r"^## The policies\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(policy.name for policy in CastPolicy)
