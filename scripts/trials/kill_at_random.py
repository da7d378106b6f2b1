"""Workers killed at random, one, two or all at once, and signals while they come back.

    python scripts/trials/kill_at_random.py --policies hybrid async --seeds 0 25
    python scripts/trials/kill_at_random.py --alone --policies hybrid async hogwild --kills 300

Runs of real processes: three workers, three epochs, ``on_failure=restart``. Whatever happens, each
restart that is announced must happen, or the run end and say why; a run that finishes has used each
sample once an epoch; one that is ended has left a checkpoint that is, to the bit, of one update.

There the server makes every update, to see which samples are in it. With ``--alone`` workers make
them among themselves as fast as they can, one after the other is killed, and others go on or take
its place; parameters and the run's own figures must say that each sample was used once an epoch.
(Under ``hogwild`` the figures: a step that was made and not counted is done again.)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from hybridtrain.cli.quiet import hush, hush_lightning
from trials.schedule import Seen, drawn_alone, try_plan, try_schedule

POLICIES = ("hybrid", "ssp", "async", "backup")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 5), metavar=("FIRST", "END"))
    parser.add_argument("--minutes", type=float, help="begin no run after these")
    parser.add_argument("--alone", action="store_true", help="workers make the updates; only kills")
    parser.add_argument("--kills", type=int, default=300, help="with --alone: in all (default 300)")
    return parser.parse_args()


def main() -> int:
    """Run all; 1 if anything is as it must not be."""
    given = parse()
    hush()
    hush_lightning()
    if given.alone:
        return kill_alone(given.policies, given.kills)
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


def kill_alone(policies: Sequence[str], most: int) -> int:
    """So many kills, evenly in each cell; 1 if a run is as it must not be."""
    cells = [(policy, choice) for policy in policies for choice in ("restart", "continue")]
    kills, runs, bad = Counter[tuple[str, str]](), Counter[tuple[str, str]](), 0
    for seed in count():
        due = [cell for cell in cells if kills[cell] * len(cells) < most]
        for policy, choice in due:
            seen = try_plan(drawn_alone(policy, seed, choice), seed)
            kills[policy, choice] += seen.struck
            runs[policy, choice] += 1
            bad += bool(seen.complaints)
            print(told(seed, seen), flush=True)
        if not due:
            break
    for cell in cells:
        print(f"{' '.join(cell)}: {kills[cell]} kills in {runs[cell]} runs")
    print(f"{kills.total()} kills in {runs.total()} runs, {bad} as they must not be")
    return int(bad > 0)


def told(seed: int, seen: Seen) -> str:
    """A line, and what was printed if it is bad."""
    blows = " ".join(f"{kind}×{n}" for _, kind, n in seen.plan.blows)
    took = "" if seen.stopped_s is None else f", {seen.stopped_s:.1f} s"
    line = f"{seen.plan.policy} {seen.plan.on_failure} {seed}: {blows}: {seen.outcome}{took}, "
    line += f"{seen.started} restarts, {seen.updates} updates, checkpoint of {seen.saved_at}"
    if not seen.complaints:
        return line
    return f"{line}: BAD {', '.join(seen.complaints)}\n{seen.plan}\n{seen.output}"


if __name__ == "__main__":
    sys.exit(main())
