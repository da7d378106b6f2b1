"""Record what the package does, and compare later: a change of structure must change nothing.

    python scripts/golden.py record DIR           with the checkout that this file is in
    python scripts/golden.py compare DIR          the same again; status 1 if anything differs
    python scripts/golden.py compare DIR --only replay '*digits*'

Trainings whose every number is determined are done again and compared to the bit: losses, weights,
buffers, optimizers' states. Of the others DIR keeps the record, which is replayed. DIR also keeps
directories of runs that were killed, which must go on to the bits of a run that was not. Beside
them: figures in virtual time, what a user sees of the command line, and what can be imported.
Compare on the machine, and with the versions, of the recording: others have other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: this process forks
os.environ["COLUMNS"] = "100"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from goldens.calls import preload
from goldens.case import Case
from goldens.difference import Difference, differences

_MOST = 12  # differences of a case in the table


def main() -> int:
    """Run, print the table; 1 if anything differs."""
    given = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    preload()
    chosen = [case for case in every_case() if wanted(case, given.only)]
    if given.what == "record":
        begin(given.dir)
    elif not (given.dir / "made.json").is_file():
        sys.exit(f"{given.dir} holds no recording; make one with: golden.py record {given.dir}")
    warn(given.dir)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        in_lanes(chosen, given, Path(folder))
        found = {case.name: outcome(case, given, Path(folder)) for case in chosen}
    rows = [(case, each) for case in chosen for each in found[case.name]]
    show(rows)
    took_s, bad = time.monotonic() - began, sum(bool(each) for each in found.values())
    same = "equal to the bit" if given.what == "compare" else "recorded"
    print(f"{len(found) - bad} of {len(found)} {same}, {bad} not; {took_s / 60:.1f} minutes")
    return int(bad > 0)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("dir", type=lambda text: Path(text).absolute(), help="of the recording")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="what/strategy/task, a part of it, or with asterisks",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--list", action="store_true", help="name the cases, run nothing")
    given = parser.parse_args()
    if given.list:
        for case in every_case():
            if wanted(case, given.only):
                print(case.name)
        raise SystemExit(0)
    return given


def every_case() -> list[Case]:
    """In the order of the table."""
    from goldens import shown, trainings, virtual

    return [*trainings.cases(), *virtual.cases(), *shown.cases()]


def wanted(case: Case, only: Sequence[str]) -> bool:
    """Whether a pattern fits."""
    return any(fnmatchcase(case.name, f"*{pattern}*") for pattern in only)


def begin(folder: Path) -> None:
    """Make the recording's folder, and say what it is made with."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # what others can write to is neither replayed nor resumed
    (folder / "made.json").write_text(json.dumps(made_with(), indent=2) + "\n")


def made_with() -> dict[str, Any]:
    """Describe the machine and versions that the bits depend on."""
    from benchmarks.machine import machine

    facts = machine()
    passing = ("date", "commit", "load_before")
    return {name: value for name, value in facts.items() if name not in passing}


def warn(folder: Path) -> None:
    """Warn of another machine, or other versions."""
    for each in differences(json.loads((folder / "made.json").read_text()), made_with()):
        print(f"{each.path}: {each.then} when recorded, {each.now} now", file=sys.stderr)


# ---- running -------------------------------------------------------------------------------------


def in_lanes(cases: Sequence[Case], given: argparse.Namespace, folder: Path) -> None:
    """Several processes do every so-manieth case each, and leave what they find in ``folder``."""
    sys.stdout.flush()
    lanes = []
    for lane in range(given.jobs):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                for case in cases[lane :: given.jobs]:
                    one(case, given, folder)
                status = 0
            except KeyboardInterrupt:
                pass
            finally:
                sys.stdout.flush()
                os._exit(status)
        lanes.append(pid)
    try:
        for pid in lanes:
            os.waitpid(pid, 0)
    except KeyboardInterrupt:
        for pid in lanes:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGINT)
                os.waitpid(pid, 0)
        raise


def one(case: Case, given: argparse.Namespace, folder: Path) -> None:
    """Run one case; its findings go to the recording, or to ``folder``."""
    began = time.monotonic()
    target = place(given.dir if given.what == "record" else folder, case)
    kept = place(given.dir, case).with_suffix("")
    try:
        if given.what == "record":
            shutil.rmtree(kept, ignore_errors=True)
            target.unlink(missing_ok=True)
            kept.mkdir(parents=True)
            case.make(kept)
        with tempfile.TemporaryDirectory(prefix="golden-") as work:
            findings = case.look(kept, Path(work))
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(findings, target)
    except Exception as error:
        print(f"{case.name}: {error}", file=sys.stderr)
        if not isinstance(error, RuntimeError):
            traceback.print_exc()
    print(f"{time.monotonic() - began:6.1f} s  {case.name}", file=sys.stderr, flush=True)


def place(folder: Path, case: Case) -> Path:
    """Where its findings lie."""
    return folder / f"{case.name.replace('/', '__').replace(', ', '-').replace(' ', '_')}.pt"


def outcome(case: Case, given: argparse.Namespace, folder: Path) -> list[Difference]:
    """List the differences from the recording."""
    sides = [place(given.dir, case)]
    if given.what == "compare":
        sides.append(place(folder, case))
    found = [torch.load(path, weights_only=True) if path.is_file() else None for path in sides]
    names = ("", "it was not recorded", "it could not be run")
    missing = [name for name, each in zip(names[1:], found, strict=False) if each is None]
    if missing:
        return [Difference("", *(name if name in missing else "" for name in names[1:]))]
    return list(differences(*found)) if given.what == "compare" else []


# ---- showing -------------------------------------------------------------------------------------


def show(rows: Sequence[tuple[Case, Difference]]) -> None:
    """One line for each difference."""
    if not rows:
        return
    print("| what | strategy | task | where | recorded | now | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    shown: dict[str, int] = {}
    for case, each in rows:
        shown[case.name] = shown.get(case.name, 0) + 1
        if shown[case.name] > _MOST:
            continue
        size = "" if each.size is None else f"{each.size:.3g}"
        cells = (case.what, case.strategy, case.task, each.path, each.then, each.now, size)
        print(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    for name, n in shown.items():
        if n > _MOST:
            print(f"{name}: and {n - _MOST} more")


if __name__ == "__main__":
    sys.exit(main())
