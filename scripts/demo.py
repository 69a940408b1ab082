"""Makes an environment in ``.venv`` and trains a small GPT in fp32 and with hmpx, side by side.

    python3 scripts/demo.py
    python3 scripts/demo.py --steps 300 --seed 1

Needs Python 3.10 or newer and pip. Options go to ``examples/train_gpt.py``.
"""

from __future__ import annotations

import sys

import environment


def main() -> None:
    """Prepares the environment and runs the example in it."""
    environment.prepare("examples")
    example = environment.ROOT / "examples" / "train_gpt.py"
    environment.run([environment.program("python"), str(example), *sys.argv[1:]])


if __name__ == "__main__":
    main()
