"""Watch worker processes; print the stacks of one that hangs, name the workers waiting, kill it.

Three reports: a worker that hangs, one that is slower than the others, and a run in which no worker
has finished its first mini-batch after a minute.

Theory of operation. :class:`hybridtrain.engine.monitoring.hang_detector.HangDetector` reports a
worker without a sign of life. The watchdog sends it a signal, which :mod:`faulthandler` answers by
writing its stacks, and reads them at a later look, so it never blocks. The first report is a
warning; at the second the watchdog kills the worker, and the error that is raised says why.

A worker under a debugger is not killed: one with a tracer (gdb, strace), or with the frames of a
Python debugger in its stacks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from hybridtrain.engine.monitoring.hang_detector import (
    STACKS_SIGNAL,
    STEPS,
    Doing,
    HangDetector,
    HangTimeout,
    Heartbeat,
    Sign,
    Silent,
)
from hybridtrain.util.streams import printable, say

# ---- find a worker that is slower than the others, and what waiting for it costs them -----------

_FACTOR = 1.5  # times the others' time per mini-batch
_COSTS = 0.1  # share of the others' time spent waiting
_AWAITED = 0.5  # share of all waiting that is for this worker
_LEAST_S = 5.0  # of training; before, the slowest worker is a matter of chance
_ENOUGH_S = 20.0  # of training before a report in mid-run


@dataclass(frozen=True, slots=True)
class Slow:
    """One worker, ``factor`` times slower than the median of the others.

    ``awaited_share``: share of all waiting that is for this worker; ``waiting_share``: share of the
    others' time spent waiting. Both in [0, 1].
    """

    worker: int
    factor: float
    awaited_share: float
    waiting_share: float

    def __str__(self) -> str:
        return (
            f"worker {self.worker} is slow: a mini-batch takes it {self.factor:.1f} times as long "
            f"as the others, who wait {100 * self.waiting_share:.0f} % of their time; "
            f"{100 * self.awaited_share:.0f} % of all waiting is for it"
        )


HINT = (
    "if it stays so: give it smaller mini-batches (strategy.batch_size_per_worker), or use a "
    "strategy that does not wait for the slowest (backup, async)"
)


def slow_worker(stats: Mapping[str, Any], training_s: float) -> Slow | None:
    """The worker that the others wait for, if that costs them enough to report.

    Args:
        stats: of :meth:`hybridtrain.engine.server.run_statistics.RunStatistics.stats`; lists have
            one entry for each worker.
        training_s: training time so far.
    """
    seconds: Sequence[float] = stats.get("step_s", ())
    awaited, waiting = stats.get("awaited_share", ()), stats.get("waiting_share", ())
    if (
        training_s < _LEAST_S
        or len(seconds) < 2
        or min(seconds) <= 0.0
        or len(waiting) != len(seconds)
    ):
        return None
    worker = max(range(len(seconds)), key=seconds.__getitem__)
    others = [each for each in range(len(seconds)) if each != worker]
    factor = seconds[worker] / median(seconds[each] for each in others)
    costs = sum(waiting[each] for each in others) / len(others)
    if factor < _FACTOR or costs < _COSTS or awaited[worker] < _AWAITED:
        return None
    return Slow(worker, factor, awaited[worker], costs)


class SlowReport:
    """Reports a slow worker once in a run: in mid-run, or at its end.

    Args:
        stats: returns the run's statistics so far.
        say: prints a message to the user.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]], say: Callable[[str], None]) -> None:
        self._stats, self._say = stats, say
        self._said = False

    def look(self, least_s: float = _ENOUGH_S) -> None:
        """Report a slow worker once ``least_s`` of training are over; called once a second."""
        if self._said or (stats := self._stats())["training_s"] < least_s:
            return
        if (slow := slow_worker(stats, stats["training_s"])) is not None:
            self._said = True
            self._say(f"{slow}; {HINT}")

    def conclude(self) -> None:
        """The run has ended."""
        self.look(0.0)


_USUAL_S = 1.0  # between looks
_AGAIN_S = 0.1  # between looks while a worker writes its stacks
_STACKS_S = 2.0  # for the worker to begin to write its stacks
_DEBUGGER = re.compile(
    r'File "[^"]*(?:[/\\](?:pdb|bdb|ipdb|pudb|pdbpp)\.py|[/\\]python3\.\d+t?[/\\]code\.py'
    r'|pydevd|debugpy|remote_pdb)[^"]*"'
)


def to_stderr(text: str) -> None:
    """Print a message of the run's own on standard error."""
    say(f"hybridtrain: {printable(text)}", error=True)


class Watched(Protocol):
    """The interface of a worker process to the watchdog."""

    @property
    def number(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def heard(self) -> int:
        """Number of messages received from it."""
        ...

    @property
    def asked(self) -> str:
        """Name of the reply it waits for; empty: it does not wait."""
        ...

    def kill(self, cause: str) -> None: ...


_BOTTOM = ("in _run_in_worker", "in _outcome", "in run_worker")


# ---- say where workers are, if none has finished its first mini-batch ---------------------------
# Reads before training may hang alike in all workers (a pool or a lock of the parent's, a disk). As
# nobody waits for anybody then, the limit is long; a first mini-batch may also take minutes.

_LATE_S = 60.0
_PAUSE_S = 2.0  # a longer one between looks is a pause of this process
_MOST_PLACES = 4
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_NOT_USERS = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))  # noqa: PTH120


class LateStart:
    """Says once where workers are, if none has finished its first mini-batch after a minute.

    Args:
        say: prints a message to the user.
        ask: asks a process for its stacks.
    """

    def __init__(self, say: Callable[[str], None], ask: Callable[[int], bool]) -> None:
        self._say, self._ask = say, ask
        self._over = False
        self._waited_s, self._last_s = 0.0, math.inf
        self._until_s: float | None = None  # for stacks, once they are asked for
        self._lengths: list[int] = []

    @property
    def asks(self) -> bool:
        """Whether it waits for stacks."""
        return self._until_s is not None and not self._over

    def end(self) -> None:
        """Something else has been said of a worker that hangs."""
        self._over = True

    def look(self, now_s: float, workers: Sequence[Watched]) -> None:
        """Look at the running ``workers``, about once a second."""
        if self._over or not workers:
            return
        if any(_has_finished_one(each.heartbeat) for each in workers):
            self._over = True
            return
        self._waited_s += min(max(0.0, now_s - self._last_s), _PAUSE_S)
        self._last_s = now_s
        if self._until_s is None and self._waited_s >= _LATE_S:
            for each in workers:
                each.heartbeat.forget_stacks()
                self._ask(each.pid)
            self._until_s = now_s + _STACKS_S
        elif self._until_s is not None:
            self._listen(now_s, workers)

    def _listen(self, now_s: float, workers: Sequence[Watched]) -> None:
        """Speak once all stacks are complete, or the time to write them is over."""
        assert self._until_s is not None, "they were asked for"
        stacks = [each.heartbeat.stacks() for each in workers]
        former, self._lengths = self._lengths, [len(each) for each in stacks]
        if now_s < self._until_s and (former != self._lengths or not all(former)):
            return
        self._over = True
        places: dict[str, list[str]] = {}
        for worker, text in zip(workers, stacks, strict=True):
            places.setdefault(_place(worker, text), []).append(str(worker.number))
        told = [
            f"worker{'s' * (len(who) > 1)} {', '.join(who)} {where}"
            for where, who in list(places.items())[:_MOST_PLACES]
        ]
        more = "; …" * (len(places) > _MOST_PLACES)
        late = f"no worker has finished its first mini-batch after {self._waited_s:.0f} s"
        self._say(f"{late}: {'; '.join(told)}{more}")


def _has_finished_one(heartbeat: Heartbeat) -> bool:
    doing = heartbeat.doing
    steps = any(heartbeat.begun(each) > (each == doing) for each in STEPS)
    return steps or heartbeat.begun(Doing.BETWEEN) > 0


def _place(worker: Watched, stacks: str) -> str:
    """Where a worker is: what it waits for, or its innermost call and that of user code."""
    if worker.asked:
        return f"({worker.heartbeat.where}) waits for {worker.asked}"
    frames = _main_frames(stacks)
    users = (each for each in frames if not each["path"].startswith(_NOT_USERS))
    shown = dict.fromkeys(map(_in_short, [*frames[:1], *list(users)[:1]]))
    calls = f" in {', called by '.join(shown)}" if shown else ""
    return f"({worker.heartbeat.where}){calls or ' has not said where'}"


def _main_frames(stacks: str) -> list[re.Match[str]]:
    """The frames of the thread that runs the worker, innermost first."""
    threads = stacks.split("\n\n")
    mine = [each for each in threads if any(bottom in each for bottom in _BOTTOM)] or threads
    return list(_FRAME.finditer(mine[0]))


def _in_short(frame: re.Match[str]) -> str:
    return f"{frame['name']} ({Path(frame['path']).name}:{frame['line']})"


@dataclass
class _Question:
    """A pending request for a worker's stacks."""

    silent: Silent
    sign: Sign  # when it was asked
    until_s: float
    length: int = -1  # bytes written at the last look


class Watchdog:
    """Looks at all worker processes, about once a second.

    Args:
        patience: how long they may show no sign of life; ``None``: for ever.
        say: prints a message to the user.
        also: reports stragglers at the same looks.

    ``due_s``: time of the next look.
    """

    def __init__(
        self,
        patience: HangTimeout | None = None,
        say: Callable[[str], None] = to_stderr,
        also: SlowReport | None = None,
    ) -> None:
        self.due_s = 0.0
        self._detector = None if patience is None else HangDetector(patience)
        self._say, self._also, self._cpu_waits = say, also, CpuWaits()
        self._late = LateStart(say, _ask_for_stacks)
        self._questions: dict[int, _Question] = {}
        self._somebody_goes_on = True  # at this look, one worker waits for nobody

    def look(self, now_s: float, workers: Sequence[Watched]) -> None:
        """Look at the running ``workers``; kill one that hangs."""
        if self._also is not None:
            self._also.look()
        if not self._questions:  # a worker writes one answer at a time
            self._late.look(now_s, workers)
        self.due_s = now_s + (_AGAIN_S if self._late.asks else _USUAL_S)
        if self._detector is None or self._late.asks:
            return
        present = {each.number: each for each in workers}
        self._somebody_goes_on = not all(_waits(each) for each in workers)
        signs = {number: self._sign(each) for number, each in present.items()}
        self._cpu_waits.forget({each.pid for each in workers})
        starved_s = {n: self._cpu_waits.since(each.pid) for n, each in present.items()}
        for silent in self._detector.look(now_s, signs, starved_s):
            if silent.worker not in self._questions:
                self._ask(present[silent.worker], silent, now_s)
        for number, question in list(self._questions.items()):
            self._listen(present.get(number), question, workers, now_s)
        pause_s = _AGAIN_S if self._questions else self._detector.patience.interval_s
        self.due_s = now_s + pause_s

    def conclude(self) -> None:
        """The run has ended."""
        if self._also is not None:
            self._also.conclude()

    def _sign(self, worker: Watched) -> Sign:
        """A worker that waits for others of its host does not hang, unless none of them goes on."""
        waits = _waits(worker) if self._somebody_goes_on else bool(worker.asked)
        return Sign.of(worker.pid, waits, worker.heard, worker.heartbeat)

    def _ask(self, worker: Watched, silent: Silent, now_s: float) -> None:
        worker.heartbeat.forget_stacks()
        asked = _ask_for_stacks(worker.pid)
        until_s = now_s + (_STACKS_S if asked else 0.0)
        self._questions[silent.worker] = _Question(silent, self._sign(worker), until_s)

    def _listen(
        self, worker: Watched | None, question: _Question, workers: Sequence[Watched], now_s: float
    ) -> None:
        """Warn or kill once the stacks are complete, or the time to write them is over."""
        if worker is None or self._sign(worker) != question.sign:
            del self._questions[question.silent.worker]  # it has ended, or continues
            return
        stacks = worker.heartbeat.stacks()
        if now_s < question.until_s and (not stacks or len(stacks) != question.length):
            question.length = len(stacks)
            return
        del self._questions[question.silent.worker]
        self._conclude(worker, question.silent, stacks, workers)

    def _conclude(
        self, worker: Watched, silent: Silent, stacks: str, workers: Sequence[Watched]
    ) -> None:
        assert self._detector is not None, "it has reported this worker"
        if (why := _excuse(worker.pid, stacks)) is not None:
            self._detector.excuse(silent.worker)
            if not silent.hung:
                self._say(f"worker {silent.worker} {why}; it is waited for")
            return
        self._late.end()
        what = _in_words(silent, _state_in_words(worker.pid), _waiting(silent.worker, workers))
        where = f"\nIts stacks, innermost call first:\n{_shortened(stacks)}" if stacks else ""
        if silent.hung:
            self._say(f"worker {silent.worker} (process {worker.pid}) hangs: it {what}{where}")
            worker.kill(f"hung and was killed: it {what}")
        else:
            after = f"it is killed after {silent.limit_s:.3g} s (hang_timeout_s)"
            self._say(
                f"worker {silent.worker} (process {worker.pid}) may hang: it {what}; {after}{where}"
            )


def _waits(worker: Watched) -> bool:
    return bool(worker.asked) or worker.heartbeat.waits


# ---- words --------------------------------------------------------------------------------------


def _in_words(silent: Silent, state: str, waiting: str) -> str:
    longest = f", where it never took more than {silent.longest_s:.3g} s" * (silent.longest_s >= 1)
    where = f"{silent.doing}{f' (number {silent.nth})' * (silent.doing in STEPS)}"
    return f"has shown no sign of life for {silent.for_s:.3g} s {where}{longest}{state}{waiting}"


def _shortened(stacks: str) -> str:
    """Remove the outermost frames, which all workers share, from stacks."""
    kept: list[str] = []
    ours = False
    for line in stacks.rstrip().splitlines():
        ours = line.startswith("  ") and (ours or line.endswith(_BOTTOM))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def _waiting(number: int, workers: Iterable[Watched]) -> str:
    """The workers that wait meanwhile, and for which reply."""
    asked: dict[str, list[str]] = {}
    for each in workers:
        if each.number != number and _waits(each):
            asked.setdefault(each.asked or "others of its host", []).append(str(each.number))
    parts = [
        f"worker{'s' * (len(who) > 1)} {', '.join(who)} wait{'s' * (len(who) == 1)} for {what}"
        for what, who in asked.items()
    ]
    return f"; meanwhile {' and '.join(parts)}" if parts else ""


def _state_in_words(pid: int) -> str:
    match process_state(pid):
        case "T":
            return f", stopped by a signal (kill -CONT {pid} lets it go on)"
        case "D":
            return ", waiting in the kernel (a disk, or a network file system?)"
    return ""


# ---- what the system knows ----------------------------------------------------------------------


def _excuse(pid: int, stacks: str) -> str | None:
    if _field(pid, "TracerPid") not in ("", "0"):
        return f"is traced by process {_field(pid, 'TracerPid')} (a debugger?)"
    if _DEBUGGER.search(stacks):
        return "stands in a debugger"
    return None


def _ask_for_stacks(pid: int) -> bool:
    """Send the signal; False where the process cannot answer it."""
    if STACKS_SIGNAL is None or not _listens_for(pid, STACKS_SIGNAL) or is_stopped(pid):
        return False
    os.kill(pid, STACKS_SIGNAL)
    return True


def _listens_for(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal, which would otherwise kill it."""
    caught = _field(pid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> (signum - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether a signal, not a debugger, has stopped the process."""
    return process_state(pid) == "T"


def process_state(pid: int) -> str:
    """One letter: R, S, D, T, t, Z, X; empty: there is no such process, or no ``/proc``."""
    return _field(pid, "State")[:1]


def _field(pid: int, name: str) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


class CpuWaits:
    """How long runnable threads of processes have waited for a core.

    On a machine with more work than cores this time is not held against a worker. It is 0 where
    the kernel does not count it (not Linux).
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {}  # process -> thread -> ns so far

    def since(self, pid: int) -> float:
        """Seconds since the last call, of the thread that waited longest; 0 at the first call."""
        before, now = self._known.get(pid), _waited_ns(pid)
        self._known[pid] = now
        if before is None:
            return 0.0
        return 1e-9 * max((ns - before.get(thread, ns) for thread, ns in now.items()), default=0)

    def forget(self, pids: set[int]) -> None:
        """Drop all processes but these."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}


def _waited_ns(pid: int) -> dict[str, int]:
    """Per thread (``Documentation/scheduler/sched-stats.rst``: the second number)."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[task.parent.name] = int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has ended
    return found
