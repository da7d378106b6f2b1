"""How fast it is, against what one would use instead. See ``benchmarks/__init__.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # what is measured is what lies here

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
