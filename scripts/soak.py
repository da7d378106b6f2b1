"""Half an hour of training in which something goes wrong every five seconds.

    python scripts/soak.py --minutes 30 --out docs/faults
    python scripts/soak.py --minutes 2 --strategies ssp backup hogwild --at-once 2 --no-ddp
    python scripts/soak.py --minutes 20 --every 10 --hosts 3

Three workers; whenever one takes a step it may be killed (in computing, before its push, while the
server updates with it, before it takes the new parameters), exit without a word, raise, run out of
memory, hang (killed after 5 s), or become slow: in all about one fault in ``--every`` seconds,
drawn from a seed. ``on_failure=restart`` with any number of restarts, and at most half a second of
back-off, for nobody's worker fails this often. The parent counts which samples are in which update.

With ``--hosts 3`` so many hosts with two workers each, and every ``--every`` seconds one but the
first is killed, paused, stopped until it is lost, cut off or sends garbage, or a stranger comes
(:mod:`trials.soak_hosts`); who was lost is started again.

Beside it the same number of epochs undisturbed, with as many seeds as ``--seeds``: the noise that
the loss is held against. (These do not wait 20 ms in each step, as the disturbed ones do.) The
first has the same seed: in lock-step it must end with the same loss, to the bit. And Lightning's
own DDP with one fault: a rank that is killed, and one that is stopped as by a hang, which is given
``--patience`` seconds (DDP's own is 30 minutes).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import in_short, machine
from trials.report import write_report
from trials.soak_hosts import soak_hosts
from trials.soak_hosts import told as line_of_hosts
from trials.soaking import Soaked, Wish, disturb_ddp, is_lockstep, pace, soak

from hybridtrain.cli.quiet import hush, hush_lightning


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="*", default=["hybrid", "async"])
    parser.add_argument("--minutes", type=float, default=30.0, help="of each (default 30)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds to a fault (default 5)")
    parser.add_argument("--hosts", type=int, default=1, help="faults of so many hosts")
    parser.add_argument("--at-once", type=int, default=1, help="workers that are hit (default 1)")
    parser.add_argument("--seeds", type=int, default=3, help="undisturbed runs (default 3)")
    parser.add_argument("--patience", type=float, default=120.0, help="with DDP (default 120 s)")
    parser.add_argument("--no-ddp", action="store_true", help="leave Lightning's DDP out")
    parser.add_argument("--out", help="also write soak.json and soak.md to this folder")
    parser.add_argument("--read", nargs="+", help="no runs, but those of these soak.json")
    given = parser.parse_args()
    if given.read is not None:
        given.read = [run for path in given.read for run in read(path)]
    for name in ("minutes", "every", "patience"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name} must be above 0")
    return given


def main() -> int:
    """Run all; 1 if a run hangs, or anything is lost or left."""
    given = parse()
    hush()
    hush_lightning()
    if given.hosts > 1:
        return _of_hosts(given)
    runs: list[Soaked] = []
    for run in run_all(given) if given.read is None else given.read:
        runs.append(run)
        if given.out:  # as soon as there is anything
            content = {"runs": [asdict(each) for each in runs]}
            write_report(Path(given.out), "soak", content, table(runs))
    print(table(runs))
    return int(any(is_bad(run) or differs(run, runs) for run in runs if run.strategy != "ddp"))


def _of_hosts(given: argparse.Namespace) -> int:
    bad = 0
    for strategy in given.strategies:
        run = soak_hosts(strategy, given.hosts, 60 * given.minutes, given.every)
        print(line_of_hosts(run), flush=True)
        bad += run.is_bad
    print(in_short(machine()))
    return int(bad > 0)


def run_all(given: argparse.Namespace) -> Iterator[Soaked]:
    """One after the other."""
    for strategy in given.strategies:
        wish = pace(strategy, given.every, 60 * given.minutes, given.at_once)
        disturbed = soak(strategy, wish)
        yield _told(disturbed)
        for number in range(given.seeds if disturbed.epochs else 0):
            wish = Wish(epochs=disturbed.epochs, seed=disturbed.seed + number, step_s=0.0)
            yield _told(soak(strategy, wish))
    if not given.no_ddp:
        for signum in (signal.SIGKILL, signal.SIGSTOP):
            yield _told(disturb_ddp(1000, signum, given.every, given.patience))


def read(path: str) -> list[Soaked]:
    """Read the runs of an earlier ``soak.json``."""
    return [Soaked(**run) for run in json.loads(Path(path).read_text())["runs"]]


def _told(run: Soaked) -> Soaked:
    line = f"{run.strategy} {run.epochs} epochs: {run.outcome} after {run.wall_s:.0f} s, "
    line += f"{sum(run.faults.values())} faults, {run.missing} missing, {run.twice} twice, "
    print(f"{line}loss {run.loss} {run.error} {run.left}", file=sys.stderr, flush=True)
    if run.outcome != "finished":
        print(run.output[-1500:], file=sys.stderr, flush=True)
    return run


def is_bad(run: Soaked) -> bool:
    """Whether it is as it must not be."""
    return run.outcome != "finished" or bool(run.missing or run.twice or run.left)


def differs(run: Soaked, runs: Sequence[Soaked]) -> bool:
    """Whether an undisturbed run that must have come to the same has not."""
    peers = [each for each in runs if _is_peer(each, run) and each.seed == run.seed]
    return run.disturbed and is_lockstep(run.strategy) and any(p.loss != run.loss for p in peers)


def table(runs: Sequence[Soaked]) -> str:
    """Markdown."""
    head = "run | minutes | faults | restarts | updates | ended | samples lost, twice | left | loss"
    lines = [f"| {head} |", "| --- " * 9 + "|"]
    shown = [run for run in runs if run.disturbed]
    lines += [_row(run, [each for each in runs if _is_peer(each, run)]) for run in shown]
    return "\n".join([*lines, "", in_short(machine())])


def _is_peer(each: Soaked, run: Soaked) -> bool:
    return not each.disturbed and (each.strategy, each.epochs) == (run.strategy, run.epochs)


def _row(run: Soaked, peers: Sequence[Soaked]) -> str:
    losses = [each.loss for each in peers if each.loss is not None]
    noise = f" ({min(losses):.4g} to {max(losses):.4g} undisturbed)" if losses else ""
    if any(each.loss == run.loss for each in peers if each.seed == run.seed):
        noise = f", to the bit that of the undisturbed run{noise}"
    ended = run.outcome
    if run.fault_at_s is not None:
        after_s = run.wall_s - run.fault_at_s
        ended = f"{ended}, {after_s:.0f} s after the fault" + (" (given up)" * (ended == "hung"))
    kinds = ", ".join(f"{n} {name}" for name, n in sorted(run.faults.items()))
    known = run.strategy != "ddp"
    cells = [
        f"`{run.strategy}`",
        f"{run.wall_s / 60:.1f}",
        f"{sum(run.faults.values())} ({kinds})",
        str(run.verdicts.get("Replace", 0)) if known else "–",
        f"{run.updates:,}" if known else "–",
        ended,
        f"{run.missing}, {run.twice}" if known else "all since the last checkpoint",
        ", ".join(run.left) or "nothing",
        "–" if run.loss is None else f"{run.loss:.4g}{noise}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
