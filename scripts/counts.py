"""Measure what each strategy counts, and write it to docs/strategies.md.

python scripts/counts.py                       print the table
python scripts/counts.py --only hogwild        one strategy
python scripts/counts.py --write               put it into the page
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.counts import PAGE, STRATEGIES, put, row, table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=STRATEGIES, help="this strategy alone")
    parser.add_argument("--write", action="store_true", help="put it into the page")
    options = parser.parse_args()
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = {name: row(name) for name in ([options.only] if options.only else STRATEGIES)}
    print("\n".join(table(rows)))
    if options.write:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
