"""``python -m hmpx``: the command line. Knows nothing but where it starts."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
