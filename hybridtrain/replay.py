"""Repeat a run from its record, and see that it comes to the same bits.

    python -m hybridtrain.replay run=outputs/2026-11-21/10-00-00-ab12 [anyway=true]

Every run of python -m hybridtrain leaves ``record.bin`` in its directory: who said what to the
server, in which order and when. This command does all of it again, in one process and one worker
after the other, writes nothing to the run's directory, and compares every gradient on the way and
the parameters and optimizer states at the end. Exit status: 0 equal, 1 not, 2 bad input.

Options:
  run=DIR        a run's directory (its newest record), or a record
  anyway=true    even if code, versions, data or configuration are not what they were; of an edited
                 .hydra/config.yaml the edited values are taken
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from hybridtrain.command import command
from hybridtrain.errors import UserError

OPTIONS = ("run", "anyway")


def run(arguments: Sequence[str]) -> None:
    """Replay what is asked for, and say what came of it."""
    given = parse(arguments)
    from hybridtrain.app.replaying import replay
    from hybridtrain.recording import find_record, read_record

    record = read_record(find_record(Path(given["run"])))
    report = replay(record, given.get("anyway") == "true")
    for error in report.errors:
        print(f"raised   {type(error).__name__}: {error} (as in the run)")
    print(f"record   {record.path}, {record.n_workers} workers, {record.header['policy']}")
    print(f"events   {report.events} of {len(record.cells)}")
    print(f"updates  {report.updates}")
    if not report.equal:
        print(f"result   parted at {report.parted}")
        raise SystemExit(1)
    if report.whole:
        print("result   equal to the bit: every gradient, the parameters, the optimizers' states")
    else:
        print("result   equal to the bit as far as the record goes; it ends before the run does")


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """The options by name.

    Raises:
        UserError: naming what is not known, or lacks.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name not in OPTIONS or not separator or not value:
            close = get_close_matches(name, OPTIONS, n=1)
            hint = f" (did you mean {close[0]}=...?)" if close else ""
            raise UserError(f"{argument!r} was given{hint}; known are {', '.join(OPTIONS)}")
        given[name] = value
    if "run" not in given:
        raise UserError("no run was given; say run=DIR, the directory of a run")
    if given.get("anyway", "true") not in ("true", "false"):
        raise UserError(f"anyway={given['anyway']} was given; it must be true or false")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, 1 if the runs part, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
