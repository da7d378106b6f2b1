"""One page about runs: their curves, figures and settings side by side.

    python -m hybridtrain compare DIR [DIR ...] [out=FOLDER]

Each DIR is the folder of a run (outputs/DATE/TIME-ID) or one with runs below it (multirun/DATE).
Writes comparison.html, which needs no network and no other file, and the sheets comparison.csv (a
row for each run) and curves.csv (all their histories) into FOLDER: by default into DIR where one
folder of several runs is given, else into the working directory. A sweep makes its page itself.

Options:
  out=FOLDER         where to write page and sheets; it must exist
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.report.comparison import CURVES, PAGE, RUNS, compare
from hybridtrain.report.runs import find_runs
from hybridtrain.util.arguments import command


def parse(arguments: Sequence[str]) -> tuple[list[Path], Path]:
    """The folders to look in, and the one to write to.

    Raises:
        UserError: if none is given, or ``out`` is no folder.
    """
    outs = [x.partition("=")[2] for x in arguments if x.startswith("out=")]
    folders = [Path(x) for x in arguments if not x.startswith("out=")]
    if strange := [x for x in arguments if x.startswith("-")]:
        raise UserError(f"{strange[0]!r} was given; known are folders, out=FOLDER and --help")
    if not folders:
        raise UserError(
            "no folder was given; give those of runs or of sweeps: multirun/DATE/TIME-ID"
        )
    if outs:
        out = Path(outs[-1])
        if not out.is_dir():
            raise UserError(f"out={out} is no folder; make it first, or choose another")
        return folders, out
    single = len(folders) == 1 and find_runs(folders) != folders
    return folders, folders[0] if single else Path()


def run(arguments: Sequence[str]) -> None:
    """Write the page, and print its path."""
    folders, out = parse(arguments)
    runs = compare(folders, out)
    counted = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"{counted}: {out / PAGE} (sheets: {out / RUNS}, {out / CURVES})")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
