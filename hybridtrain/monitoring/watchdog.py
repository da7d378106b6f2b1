"""Watches worker processes for one that hangs: asks for its stacks, says who waits, kills it.

Theory of operation. :class:`hybridtrain.monitoring.hang_detector.HangDetector` says who shows no
sign of life for long. Then the worker is asked for its stacks, by a signal that :mod:`faulthandler`
answers, and the watchdog goes on looking: what has come is read at a later look, so nobody waits
here. The first time it is a warning; the second time the worker is killed, and the error that is
raised says why.

A worker in which somebody stands with a debugger is waited for: one with a tracer (gdb, strace), or
with the frames of a Python debugger in its stacks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybridtrain.monitoring.cpu_starvation import Starving
from hybridtrain.monitoring.hang_detector import STEPS, HangDetector, HangTimeout, Sign, Silent
from hybridtrain.monitoring.heartbeat import STACKS_SIGNAL, Heartbeat

_USUAL_S = 1.0  # between looks
_AGAIN_S = 0.1  # until the stacks may be there
_STACKS_S = 2.0  # after this they do not come
_DEBUGGER = re.compile(
    r'File "[^"]*(?:[/\\](?:pdb|bdb|ipdb|pudb|code|pdbpp)\.py|pydevd|debugpy|remote_pdb)[^"]*"'
)


def to_stderr(text: str) -> None:
    """What a user should see, whatever happens to the run."""
    print(f"hybridtrain: {text}", file=sys.stderr, flush=True)


class Watched(Protocol):
    """A worker process, as far as it matters here."""

    @property
    def number(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def heard(self) -> int:
        """Messages that have come from it."""
        ...

    @property
    def asked(self) -> str:
        """What it waits for, as a word; empty: it does not wait."""
        ...

    def kill(self, cause: str) -> None: ...


_BOTTOM = ("in _run_in_worker", "in _outcome", "in run_worker")


class Also(Protocol):
    """Somebody else who watches (:class:`hybridtrain.monitoring.stragglers.SlowReport`)."""

    def look(self) -> None: ...
    def conclude(self) -> None: ...


@dataclass
class _Question:
    """A worker has been asked for its stacks."""

    silent: Silent
    sign: Sign  # of life, then
    until_s: float
    length: int = -1  # of the answer, at the last look


class Watchdog:
    """Looks at worker processes.

    Args:
        patience: how long they may show no sign of life; ``None``: they may hang.
        say: what is said to the user.
        also: looks at the same times.

    ``due_s``: when to look next.
    """

    def __init__(
        self,
        patience: HangTimeout | None = None,
        say: Callable[[str], None] = to_stderr,
        also: Also | None = None,
    ) -> None:
        self.due_s = 0.0
        self._looks = None if patience is None else HangDetector(patience)
        self._say, self._also, self._starving = say, also, Starving()
        self._questions: dict[int, _Question] = {}

    def look(self, now_s: float, workers: Sequence[Watched]) -> None:
        """At those who have not ended; kill who hangs."""
        if self._also is not None:
            self._also.look()
        self.due_s = now_s + _USUAL_S
        if self._looks is None:
            return
        signs = {each.number: _sign(each) for each in workers}
        self._starving.forget({each.pid for each in workers})
        starved_s = {each.number: self._starving.since(each.pid) for each in workers}
        for silent in self._looks.look(now_s, signs, starved_s):
            if silent.worker not in self._questions:
                self._ask(_named(workers, silent.worker), silent, now_s)
        for number, question in list(self._questions.items()):
            self._listen(number, question, workers, now_s)
        pause_s = _AGAIN_S if self._questions else self._looks.patience.interval_s
        self.due_s = now_s + pause_s

    def conclude(self) -> None:
        """All have done their job."""
        if self._also is not None:
            self._also.conclude()

    def _ask(self, worker: Watched, silent: Silent, now_s: float) -> None:
        worker.heartbeat.forget_stacks()
        asked = _ask_for_stacks(worker.pid)
        until_s = now_s + (_STACKS_S if asked else 0.0)
        self._questions[silent.worker] = _Question(silent, _sign(worker), until_s)

    def _listen(
        self, number: int, question: _Question, workers: Sequence[Watched], now_s: float
    ) -> None:
        """Go on once the stacks are there, or will not come."""
        present = [each for each in workers if each.number == number]
        if not present or _sign(present[0]) != question.sign:
            del self._questions[number]  # it has ended, or goes on
            return
        stacks = present[0].heartbeat.stacks()
        if now_s < question.until_s and (not stacks or len(stacks) != question.length):
            question.length = len(stacks)
            return
        del self._questions[number]
        self._conclude(present[0], question.silent, stacks, workers)

    def _conclude(
        self, worker: Watched, silent: Silent, stacks: str, workers: Sequence[Watched]
    ) -> None:
        assert self._looks is not None, "somebody has looked"
        if (why := _excuse(worker.pid, stacks)) is not None:
            self._looks.excuse(silent.worker)
            if not silent.hung:
                self._say(f"worker {silent.worker} {why}; it is waited for")
            return
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


def _sign(worker: Watched) -> Sign:
    return Sign.of(worker.pid, bool(worker.asked), worker.heard, worker.heartbeat)


def _named(workers: Iterable[Watched], number: int) -> Watched:
    return next(each for each in workers if each.number == number)


# ---- words --------------------------------------------------------------------------------------


def _in_words(silent: Silent, state: str, waiting: str) -> str:
    longest = f", where it never took more than {silent.longest_s:.3g} s" * (silent.longest_s >= 1)
    where = f"{silent.doing}{f' (number {silent.nth})' * (silent.doing in STEPS)}"
    return f"has shown no sign of life for {silent.for_s:.3g} s {where}{longest}{state}{waiting}"


def _shortened(stacks: str) -> str:
    """Without the frames that every worker stands on."""
    kept: list[str] = []
    ours = False
    for line in stacks.rstrip().splitlines():
        ours = line.startswith("  ") and (ours or line.endswith(_BOTTOM))
        if not ours:
            kept.append(line)
    return "\n".join(kept)


def _waiting(number: int, workers: Iterable[Watched]) -> str:
    """Who waits meanwhile, and for what."""
    asked: dict[str, list[str]] = {}
    for each in workers:
        if each.number != number and each.asked:
            asked.setdefault(each.asked, []).append(str(each.number))
    parts = [
        f"worker{'s' * (len(who) > 1)} {', '.join(who)} wait{'s' * (len(who) == 1)} for {what}"
        for what, who in asked.items()
    ]
    return f"; meanwhile {' and '.join(parts)}" if parts else ""


def _state_in_words(pid: int) -> str:
    match _status(pid):
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
    """False where none can come."""
    listens = STACKS_SIGNAL is not None and _listens_for(pid, STACKS_SIGNAL)
    if STACKS_SIGNAL is None or not listens or is_stopped(pid):
        return False
    os.kill(pid, STACKS_SIGNAL)
    return True


def _listens_for(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal, which would else kill it."""
    caught = _field(pid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> (signum - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (not a debugger)."""
    return _status(pid) == "T"


def _status(pid: int) -> str:
    """One letter: R, S, D, T, t, Z; empty where it cannot be known."""
    return _field(pid, "State")[:1]


def _field(pid: int, name: str) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")
