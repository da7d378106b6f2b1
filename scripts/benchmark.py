"""How fast it is, against what one would use instead. See ``benchmarks/__init__.py``."""

from __future__ import annotations

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
