"""Print the parity table: every case under every lock-step strategy, against DDP.

python scripts/parity.py                              the whole table, two and three workers
python scripts/parity.py --only 'optimizers/*'        some cases
python scripts/parity.py --write docs/parity.md       also as Markdown
python scripts/parity.py --one-worker --write docs/parity.md    one worker of each strategy alone
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.parity.case import Case, Grade
from tests.parity.cases import CASES
from tests.parity.cases.traps import NOT_APPLICABLE
from tests.parity.harness import STRATEGIES, Harness, Job
from tests.parity.one_worker import CLAIMS, ONE_WORKER, cell, compared, good
from tests.parity.one_worker import judge as judge_alone


@dataclass(frozen=True, slots=True)
class Row:
    """One case under one strategy with so many workers.

    ``grade`` is against DDP, ``None`` where one of the two did not end as expected; ``union``
    against one worker that sees the union of the mini-batches, where that is the reference.
    """

    case: Case
    strategy: str
    workers: int
    grade: Grade | None
    union: Grade | None
    largest: float
    note: str
    good: bool


def main() -> int:
    options = arguments()
    began = time.monotonic()
    cases = [c for c in CASES.values() if fnmatchcase(c.id, options.only) and not c.gpu]
    if options.one_worker:
        return one_worker(options)
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder), options.jobs)
        try:
            rows = measure(harness, cases, options.workers)
        finally:
            harness.close()
    seconds = time.monotonic() - began
    show(rows, seconds)
    if options.write:
        page = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        alone = ONE_WORKER_HEAD + page.partition(ONE_WORKER_HEAD)[2].partition(TRAPS)[0]
        options.write.write_text(markdown(rows, seconds, alone), encoding="utf-8")
    return 0 if all(row.good for row in rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3], help="how many")
    parser.add_argument("--only", default="*", help="a pattern of theme/name")
    parser.add_argument("--write", type=Path, help="a Markdown file")
    parser.add_argument("--one-worker", action="store_true", help="that section alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="runs at a time")
    return parser.parse_args()


# ---- measuring ----------------------------------------------------------------------------------


def measure(harness: Harness, cases: Sequence[Case], workers: Sequence[int]) -> list[Row]:
    """All runs are started at once; rows come in order."""
    wanted = [(c, s, w) for c in cases for s in STRATEGIES for w in workers]
    for case, strategy, n_workers in wanted:
        for each in dict.fromkeys(("ddp", case.versus, strategy)):
            harness.start(Job(case, each, n_workers))
    console = Console(stderr=True)
    return [judge(harness, *each) for each in track(wanted, "comparing", console=console)]


def judge(harness: Harness, case: Case, strategy: str, workers: int) -> Row:
    """Against DDP always, against the union where that is the reference."""
    ours = harness.outcome(Job(case, strategy, workers))
    if not case.ends_well(ours.error):
        return Row(case, strategy, workers, None, None, 0.0, f"failed: {ours.error}", False)
    theirs = harness.outcome(Job(case, "ddp", workers))
    grade, largest, note = None, 0.0, case.reason
    if case.ends_well(theirs.error):
        against_ddp = harness.verdict(case, strategy, workers, "ddp")
        grade, largest = against_ddp.grade, against_ddp.largest
    if case.versus == "ddp":
        good = grade is not None and grade <= case.allowed(workers)
        return Row(case, strategy, workers, grade, None, largest, note, good)
    verdict = harness.verdict(case, strategy, workers, "union")
    good = verdict.grade <= case.allowed(workers)
    return Row(case, strategy, workers, grade, verdict.grade, verdict.largest, note, good)


# ---- one worker of each strategy ----------------------------------------------------------------


def one_worker(options: argparse.Namespace) -> int:
    """Measure, show, and put that section into the page."""
    wanted = [(c, s) for c in ONE_WORKER if fnmatchcase(c.id, options.only) for s in CLAIMS]
    wanted = [(c, s) for c, s in wanted if compared(c, s)]
    with tempfile.TemporaryDirectory() as folder:
        harness = Harness(Path(folder), options.jobs)
        try:
            for case, strategy in wanted:
                harness.start(Job(case, "ddp", 1))
                harness.start(Job(case, strategy, 1))
            console = Console(stderr=True)
            found = {e: judge_alone(harness, *e) for e in track(wanted, "one", console=console)}
        finally:
            harness.close()
    section = one_worker_markdown({e: cell(*e, found[e]) for e in wanted})
    print(section)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        begin, _, rest = page.partition(ONE_WORKER_HEAD)
        if not rest:
            begin, _, rest = page.partition(TRAPS)
            rest = TRAPS + rest
        traps = rest[rest.index(TRAPS) :]
        options.write.write_text(f"{begin}{section}\n\n{traps}", encoding="utf-8")
    return 0 if all(good(*each, found[each]) for each in wanted) else 1


def one_worker_markdown(cells: dict[tuple[Case, str], str]) -> str:
    """Write the table of cases and strategies, and what is not compared, and why."""
    lines = [ONE_WORKER_HEAD, f"| case | {' | '.join(f'`{s}`' for s in CLAIMS)} |"]
    lines.append("| --- " * (len(CLAIMS) + 1) + "|")
    for case in dict.fromkeys(case for case, _ in cells):
        row = [cells.get((case, strategy), "not compared") for strategy in CLAIMS]
        lines.append(f"| {case.id} | {' | '.join(row)} |")
    lines += ["", "| strategy | where it is not all, to the bit |", "| --- | --- |"]
    lines += [f"| `{name}` | {claim.why or 'all'} |" for name, claim in CLAIMS.items()]
    return "\n".join(lines)


# ---- showing ------------------------------------------------------------------------------------


def words(row: Row) -> str:
    """The verdict in a few words."""
    if not row.good:
        return "**" + (str(row.grade or row.union) if row.note[:6] != "failed" else "failed") + "**"
    size = f" ({row.largest:.0e})" if row.largest else ""
    if row.union is None:
        return f"{row.grade}{size if row.grade else ''}"
    theirs = "DDP fails" if row.grade is None else f"{row.grade} from DDP"
    return f"{theirs}; union: {row.union}{size if row.union else ''}"


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Counts in one sentence."""
    counts = Counter(str(row.grade) for row in rows if row.union is None and row.good)
    unions = Counter(str(row.union) for row in rows if row.union is not None and row.good)
    n_cases = len({row.case.id for row in rows})
    bad = sum(not row.good for row in rows)
    parts = [f"{n} {grade}" for grade, n in sorted(counts.items())]
    exact = ", ".join(f"{n} {grade}" for grade, n in sorted(unions.items()))
    return (
        f"{n_cases} cases, {len(rows)} comparisons in {seconds:.0f} s. Against DDP: "
        f"{', '.join(parts) or 'none'}. Against one worker that sees the union of the "
        f"mini-batches, where DDP pads, refuses or hangs: {exact or 'none'}. "
        f"Not as expected: {bad}."
    )


def show(rows: Sequence[Row], seconds: float) -> None:
    table = Table("case", "strategy", "workers", "verdict", "why")
    for row in rows:
        style = None if row.good else "red"
        cells = (row.case.id, row.strategy, str(row.workers), words(row), row.note)
        table.add_row(*cells, style=style)
    console = Console()
    console.print(table)
    console.print(summary(rows, seconds))


def markdown(rows: Sequence[Row], seconds: float, one_worker: str) -> str:
    """``docs/parity.md``."""
    columns = sorted({(row.strategy, row.workers) for row in rows})
    of = {(row.case.id, row.strategy, row.workers): row for row in rows}
    heads = [f"`{strategy}`, {workers} workers" for strategy, workers in columns]
    lines = [HEAD, summary(rows, seconds), "", f"| case | {' | '.join(heads)} | why |"]
    lines.append("| --- " * (len(columns) + 2) + "|")
    for case in dict.fromkeys(row.case for row in rows):
        cells = [words(of[case.id, *column]) for column in columns if (case.id, *column) in of]
        lines.append(f"| {case.id} | {' | '.join(cells)} | {case.reason} |")
    exceptions = [f"- Trap {n}: {why}" for n, why in sorted(NOT_APPLICABLE.items())]
    lines += ["", one_worker.rstrip("\n"), "", TRAPS, *(exceptions or ["None."])]
    return "\n".join(lines) + "\n"


HEAD = """# Parity with DDP

Made by `python scripts/parity.py --write docs/parity.md`; do not edit.

Each case runs the same module, seed and data under `ddp` (started by fork, gloo) and under each
strategy in the table. Compared are, rank by rank: parameters, buffers, the whole content of a
checkpoint (optimizer states, schedulers, loops, callbacks), what the logger was told, all metrics,
the samples of every mini-batch, every hook in its order, gradients where a case looks at them,
files written, and what is left in the calling process.

*Bitwise*: no difference at all. *Within rounding*: no number differs by more than 1e-4 of the
largest element of its tensor (the largest such difference is given), and whatever is no
floating-point number is equal. *Differs*: see why; the reference then is one worker, without any
strategy, that sees the union of the mini-batches. With three workers DDP adds in another order
(around a ring), so sums of three differ in the last bit.

Cases for CUDA (`tests/parity/cases/precision.py`) need as many GPUs as workers and are not in the
table. Not compared are times, the versions of libraries, and our one key in a checkpoint.
Wider tolerances: bfloat16 1e-2 to 5e-2, L-BFGS with line search 1e-3. Against the union only
weights, optimizer and scheduler states and counters are compared, because a mini-batch's loss is
another one there. What else a case leaves out is written in it (`facets`, `ignore`).
"""
ONE_WORKER_HEAD = """## One worker of each strategy

Made by `python scripts/parity.py --one-worker --write docs/parity.md`. With one worker a strategy
is one device: all that is listed above is compared with `ddp` and one process, which draws
mini-batches and random numbers alike. *Both refuse it*: the case has more steps than its schedule.
*Refused*: the strategy says so before training. For what several workers count see
[strategies](strategies.md#what-is-counted).
"""
TRAPS = """## Traps

Every trap known from the design has a test named after it (`test_trap_05_…`), mostly in
`tests/parity/test_traps.py`. Those that do not apply:
"""

if __name__ == "__main__":
    sys.exit(main())
