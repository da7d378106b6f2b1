"""Repeat a run from its record, and see that it comes to the same bits; or try another policy.

    python -m hybridtrain replay run=outputs/2026-11-21/10-00-00-ab12 [anyway=true]
    python -m hybridtrain replay run=outputs/2026-11-21/10-00-00-ab12 policy=backup policy.k=3
    python -m hybridtrain replay run=outputs/2026-11-21/10-00-00-ab12 report=timeline

Every run of python -m hybridtrain leaves ``record.bin`` in its directory: who said what to the
server, in which order and when. This command does all of it again, in one process and one worker
after the other, writes nothing to the run's directory, and compares every gradient on the way and
the parameters and optimizer states at the end. Exit status: 0 equal, 1 not, 2 bad input. What user
code decides by the machine's own clock (trainer.max_time) is in no record; where that makes a
difference, it is named like any other.

With another policy the run is trained again in virtual time, in one process: the same task, workers
as fast as they were (each one's own times from release to push), real gradients. Printed are the
run as it was recorded, the same policy in virtual time (so that both columns leave out the same),
and the other one.

With report=timeline a picture shows when each worker computed, waited or was dropped, and the
updates. It needs nothing but the record; with another policy, that one is drawn below.

Options:
  run=DIR            a run's directory (its newest record), or a record
  anyway=true        even if code, versions, data or configuration are not what they were; of an
                     edited .hydra/config.yaml the edited values are taken
  policy=NAME        another policy, with its parameters as policy.k=3; or an object of one's own
                     class, policy='{_target_: my.Mine, k: 3}'
  correction=NAME    another correction of late gradients, with parameters; null: none
  strategy=NAME      policy and correction of a row of conf/strategy
  report=timeline    draw what happened when
  svg=FILE           where to draw it (default timeline.svg)
  at_s=X             second of training at which the picture begins (default: when each worker has
                     handed something over once, as first steps take longer)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide_by_configuration
from hybridtrain.report.page import write
from hybridtrain.report.timeline import REPORT, picture, place
from hybridtrain.util.arguments import command, options, read_value, spelled
from hybridtrain.util.option_types import NotNegative

if TYPE_CHECKING:
    from hybridtrain.engine.recording import Record

DRAWING = {**REPORT, "at_s": NotNegative}
OPTIONS = ("run", "anyway", "policy", "correction", "strategy", *DRAWING)


def run(arguments: Sequence[str]) -> None:
    """Replay the record, or try another policy, and print the result."""
    given = parse(arguments)
    from hybridtrain.engine.recording import find_record, read_record

    record = read_record(find_record(Path(given.pop("run"))))
    anyway = given.pop("anyway", "false") == "true"
    wanted = {name: given.pop(name) for name in DRAWING if name in given}
    if given or not wanted:
        _decide(record)
    if (svg := place(wanted)) is not None:
        _draw(record, given, anyway, svg, float(wanted["at_s"]) if "at_s" in wanted else None)
    elif given:
        _what_if(record, given, anyway)
    else:
        _replay(record, anyway)


def _decide(record: Record) -> None:
    """Decide on Lightning's package by the modules that the record names, which are imported.

    Raises:
        UserError: if another user can have written the record.
    """
    if record.foreign is not None:
        raise UserError(record.foreign)
    decide_by_configuration(record.header["about"].get("config", {}))


def _draw(
    record: Record, given: Mapping[str, str], anyway: bool, svg: Path, begin_s: float | None
) -> None:
    """The timeline of the run itself and, if one is given, of another policy."""
    from hybridtrain.engine.recording.recorded_timeline import timeline_of

    configured = record.header["about"].get("config", {}).get("strategy", {})
    parts = [configured.get(part) for part in ("policy", "exchange")]
    named = [spelled(part) for part in parts if part is not None] or [record.header["policy"]]
    drawn = timeline_of(record, begin_s)
    timelines = {f"{', '.join(named)}, {record.n_workers} workers, as recorded": drawn}
    if given:
        other = Timeline(record.n_workers, drawn.begin_s)
        name = _what_if(record, given, anyway, other)
        timelines[f"{name}, in virtual time"] = other
    write(svg, picture(timelines, "{} of training"), "svg")
    print(f"drawn: {svg}")


def _replay(record: Record, anyway: bool) -> None:
    from hybridtrain.cli.replay_run import replay

    report = replay(record, anyway)
    for error in report.errors:
        print(f"raised   {type(error).__name__}: {error} (as in the run)")
    several = f" on {n} hosts" if (n := record.n_hosts) > 1 else ""
    workers = f"{record.n_workers} workers{several}"
    print(f"record   {record.path}, {workers}, {record.header['policy']}")
    print(f"events   {report.events} of {len(record.cells)}")
    print(f"updates  {report.updates}")
    if not report.equal:
        print(f"result   parted at {report.parted}")
        raise SystemExit(1)
    if report.whole:
        print("result   equal to the bit: every gradient, the parameters, the optimizers' states")
    else:
        print("result   equal to the bit as far as the record goes; it ends before the run does")


def _what_if(
    record: Record, given: Mapping[str, str], anyway: bool, timeline: Timeline | None = None
) -> str:
    """Try another policy, and fill its timeline; returns its name."""
    from rich.console import Console

    from hybridtrain.cli.replay_run import asked_for, check_same, recorded, simulated, table

    options = asked_for(given)
    check_same(record, anyway)
    name = ",".join(f"{key}={value}" for key, value in given.items())
    courses = [recorded(record)]
    if not record.in_place:
        courses.append(simulated(record, {}, "simulated"))
    courses.append(simulated(record, options, name, timeline))
    Console().print(table(courses))
    return name


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """The options by name.

    Raises:
        UserError: naming the option that is unknown or missing.
    """
    given = options(arguments, OPTIONS, families=("policy", "correction"))
    if "run" not in given:
        raise UserError("no run was given; say run=DIR, the directory of a run")
    if given.get("anyway", "true") not in ("true", "false"):
        raise UserError(f"anyway={given['anyway']} was given; it must be true or false")
    for option, kind in DRAWING.items():
        if option in given:
            read_value(option, given[option], kind)
    place(given)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, 1 if the runs part, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
