"""The command line: what to measure, where to put it."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from benchmarks.frame import Frame, Options, tell
from benchmarks.machine import in_short, machine
from benchmarks.plan import PARTS
from benchmarks.results import Result, read
from benchmarks.rows import Row, Skipped
from benchmarks.runs import Runner
from benchmarks.shown import changes, table
from hybridtrain.errors import UserError

QUICK = Options(repeats=1, seconds=0.3, quick=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. 2 after one line about bad input, 3 where a run has failed."""
    given = parse(arguments)
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:<10} {part.about}")
        return 0
    try:
        former = read(Path(given.compare)).rows if given.compare else None
        chosen = check(given.parts)
        check_places(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return measure(chosen, given, former)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Also checks numbers; exits with 2 where one makes no sense."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Ours against what one would use instead: alternating runs, medians, ratios. "
        "Quiet the machine first; all parts take about 16 minutes on 2 cores.",
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    parser.add_argument("--repeats", type=int, help="runs of each side (default 3)")
    parser.add_argument("--seconds", type=float, help="timed, of a run, about (default 2)")
    parser.add_argument("--workers", type=int, help="where a part leaves it open (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: small, once, no verdict"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="works that name these")
    parser.add_argument(
        "--out", metavar="DIR", help="write DATE.json, .md, .png there; parts not run stay"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--compare", metavar="OLD.json", help="show what has changed since")
    given = parser.parse_args(arguments)
    for name, least in (("repeats", 1), ("seconds", 0.01), ("workers", 2)):
        value = getattr(given, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value} was given; at least {least} is needed")
    return given


def check(parts: Sequence[str]) -> list[str]:
    """The parts that were named, or all, in their order.

    Raises:
        UserError: if there is no such part.
    """
    for name in parts:
        if name not in PARTS:
            close = get_close_matches(name, PARTS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"there is no part {name!r}{hint}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in parts or not parts]


def check_places(given: argparse.Namespace) -> None:
    """Check that the outputs can be written, before minutes are spent.

    Raises:
        UserError: if not.
    """
    folders = [Path(given.out)] if given.out else []
    folders += [Path(given.json).parent] if given.json else []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written to ({error.strerror})") from None


def measure(
    chosen: list[str], given: argparse.Namespace, former: list[Row | Skipped] | None
) -> int:
    """Run the parts; what is there after Ctrl-C is shown, and whole parts are written."""
    about, began = machine(), time.monotonic()
    options, runner = options_of(given), Runner()
    rows: list[Row | Skipped] = []
    done: list[str] = []
    code = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name in chosen:
            rows += PARTS[name].rows(Frame(name, options, runner))
            done.append(name)
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
        tell(f"stopped after {len(rows)} rows")
    about |= {"repeats": options.repeats, "seconds_per_run": options.seconds}
    about |= {"took_s": round(time.monotonic() - began), "only": options.only}
    print(table(rows, in_short(about)))
    if former is not None:
        print("\n" + changes(former, rows))
    result = Result([row for row in rows if row.part in done], dict.fromkeys(done, about))
    if given.json:
        result.write(Path(given.json))
    if given.out and done:
        result.publish(Path(given.out))
    return code


def options_of(given: argparse.Namespace) -> Options:
    """Return the given options, else the usual or quick ones."""
    usual = QUICK if given.quick else Options()
    return Options(
        given.repeats or usual.repeats,
        given.seconds or usual.seconds,
        given.workers or usual.workers,
        given.quick,
        given.only,
    )
