"""Workers killed at random, one, two or all at once, and signals while they come back.

    python scripts/trials/kill_at_random.py --policies hybrid async --seeds 0 25

Runs of real processes: three workers, three epochs, ``on_failure=restart``. Whatever happens, each
restart that is announced must happen, or the run end and say why; a run that finishes has used each
sample once an epoch; one that is ended has left a checkpoint that is, to the bit, of one update.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from hybridtrain.cli.quiet import hush, hush_lightning
from trials.schedule import Seen, try_schedule

POLICIES = ("hybrid", "ssp", "async", "backup")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 5), metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, help="begin no run after these")
    return parser.parse_args()


def main() -> int:
    """Run all; 1 if anything is as it must not be."""
    given = parse()
    hush()
    hush_lightning()
    bad = runs = 0
    began_s = time.monotonic()
    for seed in range(*given.seeds):
        for policy in given.policies:
            if given.minutes and time.monotonic() - began_s > 60 * given.minutes:
                break
            seen = try_schedule(policy, seed)
            runs, bad = runs + 1, bad + bool(seen.complaints)
            print(told(seed, seen), flush=True)
    print(f"{runs} runs, {bad} as they must not be")
    return int(bad > 0)


def told(seed: int, seen: Seen) -> str:
    """A line, and what was printed if it is bad."""
    blows = " ".join(f"{kind}×{n}" for _, kind, n in seen.plan.blows)
    took = "" if seen.stopped_s is None else f", {seen.stopped_s:.1f} s"
    line = f"{seen.plan.policy} {seed}: {blows}: {seen.outcome}{took}, {seen.started} restarts, "
    line += f"{seen.updates} updates, checkpoint of {seen.saved_at}"
    if not seen.complaints:
        return line
    return f"{line}: BAD {', '.join(seen.complaints)}\n{seen.plan}\n{seen.output}"


if __name__ == "__main__":
    sys.exit(main())
