"""The interface of a part: the options, and the ways to compare."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.rows import NOTHING_ASKED, Goal, Row, Skipped, compare
from benchmarks.runs import Job, RunFailed, Runner
from hybridtrain.errors import UserError

Against = tuple[Job, Goal]
# What a job has returned -> the seconds that are compared, and what is told beside them.
Read = Callable[[Any], tuple[float, str]]


def seconds(found: Any) -> tuple[float, str]:
    """Read the result of a job that returns seconds alone."""
    return float(found), ""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    ``seconds``: about how long one run's timed steps take. ``only``: words that a work must name.
    """

    repeats: int = 3
    seconds: float = 2.0
    workers: int = 2
    quick: bool = False
    only: str = ""

    def wants(self, work: str) -> bool:
        """Whether this work is among those asked for."""
        return self.only.lower() in work.lower()


class Frame:
    """Measures, tells, compares.

    Args:
        part: its name, for the rows.
        options: of the command line.
        runner: makes the processes.
    """

    def __init__(self, part: str, options: Options, runner: Runner) -> None:
        self.part, self.options = part, options
        self._runner = runner

    def run(self, job: Job, work: str = "") -> Any:
        """One run. Raises what :meth:`Runner.run` raises."""
        began = time.monotonic()
        found = self._runner.run(job)
        took = time.monotonic() - began
        shown = f"{found:.6g}" if isinstance(found, float) else ""
        tell(f"{self.part:>10}  {work}: {job.label}  {shown}  ({took:.1f} s)")
        return found

    def alternate(
        self,
        work: str,
        ours: Job | Sequence[Job],
        against: Sequence[Against],
        unit: str = "ms/step",
        per: float = 1e3,
        note: str = "",
        repeats: int | None = None,
        read: Read = seconds,
    ) -> Iterator[Row | Skipped]:
        """Ours and the baselines in turn, forwards and backwards; a row for each two of them.

        Args:
            unit: of the figures shown, which are ``per`` times those that the jobs return.
            repeats: if not those of the command line.
            read: where a job returns more than seconds.
        """
        if not self.options.wants(work):
            return
        own = [ours] if isinstance(ours, Job) else list(ours)
        jobs = [*own, *(job for job, _ in against)]
        times = repeats or self.options.repeats
        figures, failed, beside = self._in_turn(work, jobs, per, times, read)
        for one, (other, goal) in product(own, against):
            reason = failed.get(one.label) or failed.get(other.label)
            if reason is not None:
                yield self.skip(f"{work}: {one.label} against {other.label}", reason)
                continue
            names = (self.part, work, one.label, other.label)
            asked = NOTHING_ASKED if self.options.quick else goal
            told = [
                note,
                *(f"{j.label}: {beside[j.label]}" for j in (one, other) if beside[j.label]),
            ]
            text = "; ".join(filter(None, told))
            yield compare(names, figures[one.label], figures[other.label], unit, asked, text)

    def _in_turn(
        self, work: str, jobs: Sequence[Job], per: float, repeats: int, read: Read
    ) -> tuple[dict[str, list[float]], dict[str, str], dict[str, str]]:
        """By label: the figures, why there are none, and what is told beside them."""
        figures: dict[str, list[float]] = {job.label: [] for job in jobs}
        failed: dict[str, str] = {}
        beside = dict.fromkeys(figures, "")
        for repeat in range(repeats):
            for job in jobs[:: 1 if repeat % 2 == 0 else -1]:
                if job.label in failed:
                    continue
                try:
                    found, beside[job.label] = read(self.run(job, work))
                    figures[job.label].append(per * found)
                except (UserError, RunFailed) as error:
                    failed[job.label] = str(error)
        return figures, failed, beside

    def alone(
        self,
        work: str,
        job: Job,
        unit: str = "ms",
        per: float = 1e3,
        note: str = "",
        repeats: int | None = None,
    ) -> Iterator[Row | Skipped]:
        """A figure with nothing to compare it with: the median of the repeats."""
        if not self.options.wants(work):
            return
        try:
            times = range(repeats or self.options.repeats)
            found = [per * float(self.run(job, work)) for _ in times]
        except (UserError, RunFailed) as error:
            yield self.skip(work, str(error))
            return
        yield Row(self.part, work, job.label, statistics.median(found), unit, note=note)

    def together(
        self,
        work: str,
        job: Job,
        baseline: str,
        goal: Goal = NOTHING_ASKED,
        unit: str = "ms",
        per: float = 1e3,
        note: str = "",
    ) -> Iterator[Row | Skipped]:
        """Both sides by turns in one process: the job returns ``{"ours": [...], "baseline": ...}``.

        ``job.label`` names our side.
        """
        if not self.options.wants(work):
            return
        try:
            found = self.run(job, f"{work}, with {baseline}")
        except (UserError, RunFailed) as error:
            yield self.skip(f"{work}: {job.label} against {baseline}", str(error))
            return
        ours, theirs = ([per * x for x in found[side]] for side in ("ours", "baseline"))
        yield compare((self.part, work, job.label, baseline), ours, theirs, unit, goal, note)

    def skip(self, work: str, reason: str) -> Skipped:
        """Say that something is not measured."""
        tell(f"{self.part:>10}  {work}: left out: {reason}")
        return Skipped(self.part, work, reason)


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
