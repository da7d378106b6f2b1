"""Everything that may go wrong, in every phase, under every policy: what became of the run?

    python scripts/fault_matrix.py --out docs/faults
    python scripts/fault_matrix.py --strategies hybrid --policies restart --only kill:update
    python scripts/fault_matrix.py --strategies ssp backup k_async k_batch_sync synchronous hogwild
    python scripts/fault_matrix.py --at-once 2 3 --policies restart
    python scripts/fault_matrix.py --hosts --strategies hybrid async --only hang cut:fit

Each cell is a run of real processes: three workers, two epochs of 24 updates together, one fault
in worker 1 (of a checkpoint: in worker 0, which writes them; under ``stop`` in one and in the
other) at its step 3 or at the first occasion after it. The server's parent writes down the samples
that made each update and keeps what came of it. Then it is seen

- how long after the fault the parent knew of it (a hang: after ``hang_timeout_s``, here 5 s);
- whether each sample was in exactly as many updates as there were epochs, if the run went on;
- whether the parameters after *every* update are those that plain torch makes of the same
  mini-batches, each computed at the parameters that its worker had: none missing, none twice, no
  mixture; which is what a run without that worker would have made of them;
- whether, in lock-step, they are to the bit those of the undisturbed run (stop: as far as it went);
- whether every checkpoint is, to the bit, the state after as many of these updates as its
  ``global_step`` says, moments included, and whether a run that was stopped has left one;
- what processes, shared memory and temporary files are left.

With ``--hosts`` two hosts with two workers each, and a host is killed, paused, stopped for good,
cut off, slowed down, sends garbage, or a stranger comes (:mod:`trials.host_faults`).

A gradient that is not finite ends the run under ``stop``, and is left out elsewhere
(``on_nonfinite=drop``). A corrupt one is finite: nobody notices, and plain torch makes of the same
samples something else; that row is there to say so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.machine import in_short, machine
from trials.cell import POLICIES, Case, Row, cases, try_out, undisturbed_states
from trials.host_faults import STRATEGIES, HostCase, host_cases, try_all
from trials.host_faults import told as host_line
from trials.report import write_report

from hybridtrain.cli.quiet import hush, hush_lightning


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=[], help="default: hybrid, async")
    parser.add_argument("--hosts", action="store_true", help="faults of hosts; all strategies")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1], help="in so many workers (default 1)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND[:PHASE]")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell (default 1)")
    parser.add_argument("--read", nargs="+", default=[], help="no runs, but these matrix.json")
    parser.add_argument("--out", help="also write matrix.md and matrix.json to this folder")
    given = parser.parse_args()
    given.strategies = given.strategies or (STRATEGIES if given.hosts else ["hybrid", "async"])
    return given


def wanted(case: Case | HostCase, only: Sequence[str]) -> bool:
    """Whether the cell was asked for."""
    return not only or case.kind in only or f"{case.kind}:{case.phase}" in only


def main() -> int:
    """Run all; 1 if anything is as it must not be."""
    given = parse()
    if given.hosts:
        return run_hosts(given)
    rows = [row for path in given.read for row in read(path)] or run_all(given)
    print(report(rows))
    if given.out:
        content = {"rows": [as_json(row) for row in rows]}
        write_report(Path(given.out), "matrix", content, report(rows))
    return int(any(row.complaints for row in rows))


def run_hosts(given: argparse.Namespace) -> int:
    """All cells of hosts, one after the other; 1 if anything is as it must not be."""
    hush()
    hush_lightning()
    cases = host_cases(given.strategies, given.policies)
    lines, bad = [], 0
    for row, complaints in try_all([case for case in cases if wanted(case, given.only)]):
        lines.append(host_line(row, complaints))
        bad += bool(complaints)
        print(lines[-1], *([row.said] if complaints else []), sep="\n", flush=True)
    print(f"{len(lines)} runs on {in_short(machine())}. As they must not be: {bad}.")
    return int(bad > 0)


def run_all(given: argparse.Namespace) -> list[Row]:
    """One cell after the other."""
    hush()
    hush_lightning()
    base = {name: undisturbed_states(name) for name in given.strategies}
    rows: list[Row] = []
    for case in cases(given.strategies, given.policies, given.at_once):
        for _ in range(given.repeats if wanted(case, given.only) else 0):
            rows.append(try_out(case, base[case.strategy]))
            print(told(rows[-1]), file=sys.stderr, flush=True)
    return rows


def read(path: str) -> list[Row]:
    """Read the rows of an earlier ``matrix.json``."""
    known = {field.name for field in fields(Row)}
    found = json.loads(Path(path).read_text())["rows"]
    return [
        Row(**{k: v for k, v in row.items() if k in known} | {"case": Case(**row["case"])})
        for row in found
    ]


def as_json(row: Row) -> dict[str, Any]:
    """All that was seen."""
    return {**asdict(row), "complaints": row.complaints}


def told(row: Row) -> str:
    """A line while it goes on."""
    case = row.case
    found = "; ".join(row.complaints) or "ok"
    who = f" of {case.at_once}" if case.at_once > 1 else ""
    what = f"{case.strategy} {case.policy} {case.kind}{who} in {case.phase}"
    return f"{what:48} {in_words(row):34} {row.wall_s:5.1f} s  {found}  {row.error[:80]}"


def in_words(row: Row) -> str:
    """Describe a run's outcome for a table's cell."""
    text = row.outcome if row.detected_s is None else f"{row.outcome}, {row.detected_s:.2g} s"
    if row.as_undisturbed:
        text += ", = bits"
    return f"**{text}: {', '.join(row.complaints)}**" if row.complaints else text


def report(rows: Sequence[Row]) -> str:
    """A table: what went wrong down, policies across; and how much of it was as it should be."""
    columns = list(dict.fromkeys(map(of, rows)))
    head = [f"`{strategy}`, {policy}" for strategy, policy in columns]
    lines = ["| fault | in | " + " | ".join(head) + " |", "| --- " * (2 + len(head)) + "|"]
    for kind, phase in dict.fromkeys((row.case.kind, row.case.phase) for row in rows):
        found = [
            [r for r in rows if (r.case.kind, r.case.phase) == (kind, phase) and of(r) == column]
            for column in columns
        ]
        texts = [" / ".join(dict.fromkeys(map(in_words, each))) or "–" for each in found]
        lines.append(f"| {kind} | {phase} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", summary(rows)])


def of(row: Row) -> tuple[str, str]:
    """Its column."""
    first = row.case.worker == 0 and row.case.phase != "checkpoint"
    several = f", {row.case.at_once} at once" if row.case.at_once > 1 else ""
    return row.case.strategy, row.case.policy + (", worker 0" if first else "") + several


def summary(rows: Sequence[Row]) -> str:
    """The worst of everything."""
    deaths = [r.detected_s for r in rows if r.case.kind in ("kill", "exit") and r.detected_s]
    hangs = [r.detected_s for r in rows if r.case.kind == "hang" and r.detected_s]
    sure = [r for r in rows if r.case.kind != "corrupt_gradient" and r.difference is not None]
    return (
        f"{len(rows)} runs on {in_short(machine())}. As they must not be: "
        f"{sum(bool(r.complaints) for r in rows)}. Hung: {sum(r.outcome == 'hung' for r in rows)}. "
        f"Samples lost (beside gradients that are not finite): "
        f"{sum(r.lost for r in rows if r.case.kind != 'nan')}, twice: "
        f"{sum(r.doubled for r in rows)}. Processes, segments, files left: "
        f"{sum(len(r.left) for r in rows)}. Checkpoints: {sum(r.checkpoints for r in rows)}, torn: "
        f"{sum(r.torn for r in rows)}. A death was known after at most "
        f"{max(deaths, default=0):.3f} s, a hang after {max(hangs, default=0):.1f} s. Farthest "
        f"from plain torch: {max((r.difference or 0 for r in sure), default=0):.1e}."
    )


if __name__ == "__main__":
    sys.exit(main())
