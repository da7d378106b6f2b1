"""``python -m hybridtrain``, and the console script of the same name."""

from __future__ import annotations

import sys

from hybridtrain.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
