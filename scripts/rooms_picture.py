"""Draws docs/images/rooms.svg, the packages of hmpx, from the layers that import-linter checks.

python scripts/rooms_picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

WIDTH, HEIGHT, GAP = 720, 30, 10
CHARACTER, PADDING = 7.2, 22

STYLE = """\
    .card { fill: #ffffff; stroke: #d0d7de }
    .room { fill: #ddf4ff; stroke: #0969da }
    .root { fill: #f6f8fa; stroke: #8c959f }
    text { fill: #1f2328 }
    .dim { fill: #59636e }
    .line { stroke: #59636e; stroke-width: 1.5 }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d }
      .room { fill: #0c2d6b; stroke: #4493f8 }
      .root { fill: #151b23; stroke: #656c76 }
      text { fill: #f0f6fc }
      .dim { fill: #9198a1 }
      .line { stroke: #9198a1 }
    }"""


def layers() -> list[list[str]]:
    """Returns the packages of each layer, from the top to the bottom."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (body,) = re.findall(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return [line.split(" | ") for line in re.findall(r'"(.*)"', body)]


def picture() -> str:
    """Returns the SVG."""
    rows = layers()
    height = len(rows) * (HEIGHT + GAP) + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title" font-size="13" text-anchor="middle" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        '  <title id="title">The packages of hmpx in layers; imports go downward only</title>',
        f"  <style>\n{STYLE}\n  </style>",
        f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'  <path class="line" d="M24 40V{height - 26}"/>',
        f'  <path class="line" fill="none" d="M19 {height - 32}l5 7 5-7"/>',
        '  <text class="dim" x="14" y="26" text-anchor="start">imports go downward only, '
        "never between packages of one line</text>",
    ]
    for index, rooms in enumerate(rows):
        y = 40 + index * (HEIGHT + GAP)
        is_package = [(ROOT / "hmpx" / room).is_dir() for room in rooms]
        widths = [len(room) * CHARACTER + PADDING for room in rooms]
        x = 44.0
        for room, width, is_room in zip(rooms, widths, is_package, strict=True):
            kind = "room" if is_room else "root"
            parts += [
                f'  <rect class="{kind}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5"/>',
                f'  <text x="{x + width / 2:.0f}" y="{y + 20}">{room}</text>',
            ]
            x += width + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
