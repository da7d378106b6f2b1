"""What a sweep leaves besides its jobs: how each ended, and one page that compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.cli.telemetry.summary import plain
from hybridtrain.report.comparison import PAGE, compare
from hybridtrain.report.page import write
from hybridtrain.report.runs import JOBS_FILE
from hybridtrain.util.files import short

if TYPE_CHECKING:
    from hybridtrain.cli.sweep.job_launcher import JobRow


def leave_page(rows: Sequence[JobRow], directory: Path) -> str | None:
    """Write the page into the sweep's ``directory``; returns where it lies.

    The jobs are done, and their results are worth more than a page about them: what goes wrong here
    is one line on standard error, and the sweep ends as it would have.
    """
    try:
        write(directory / JOBS_FILE, _endings(rows, directory), "hydra.sweep.dir")
        compare([directory], directory)
    except (Exception, KeyboardInterrupt) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        again = f"python -m hybridtrain.compare {short(directory)}"
        print(f"hybridtrain: no page that compares the jobs ({reason}); {again}", file=sys.stderr)
        return None
    return short(directory / PAGE)


def _endings(rows: Sequence[JobRow], directory: Path) -> str:
    """By folder: exit status, error and metric, for jobs that had no time to leave a summary."""
    endings = {
        row.folder.relative_to(directory).as_posix(): asdict(row.outcome)
        for row in rows
        if row.folder is not None
    }
    return json.dumps(plain(endings), indent=2) + "\n"
