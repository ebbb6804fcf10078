"""`python -m toolkit`: the same as the command `toolkit`."""

from __future__ import annotations

import sys

from toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
