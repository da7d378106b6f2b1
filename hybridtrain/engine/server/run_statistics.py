"""Counts of a run: updates, samples, staleness, and how long workers waited for each other.

The clock is an argument, so that the same code counts real and virtual seconds. All times are
*training time*, which stops while training pauses (validation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.engine.policies.bounded_staleness import StepCounts
from hybridtrain.engine.protocol.shared_round import MadeRounds
from hybridtrain.engine.server.timeline import Timeline, TrainingTime

# Figures of each host of a run over several, which have equally many workers.
Traffic = Callable[[], Sequence[Mapping[str, float]]]


@dataclass(slots=True)
class _WorkerFigures:
    """One worker's account; training time in seconds."""

    read_version: int = 0
    released_at_s: float | None = None  # while it computes
    pushed_at_s: float | None = None  # while it waits
    computing_s: float = 0.0
    waiting_s: float = 0.0
    awaited_s: float = 0.0  # others have waited for this worker
    pushes: int = 0
    samples: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    lead: int = 0  # the largest so far


@dataclass
class RunStatistics:
    """Counts pushes, updates and releases.

    Args:
        n_workers: W.
        clock: seconds from any origin.
        timeline: each interval that is counted is added to it.
        traffic: between several hosts: what each has sent and received.
    """

    n_workers: int
    clock: Callable[[], float]
    timeline: Timeline | None = None
    traffic: Traffic | None = None
    version: int = 0
    first_version: int = 0
    samples: float = 0.0
    sent_bytes: int = 0  # size of all contributions
    saved_bytes: int = 0  # by encoding them
    ages: Counter[int] = field(default_factory=Counter)  # staleness -> contributions
    clocks: StepCounts = field(default_factory=StepCounts)  # pushes of training workers
    _accounts: list[_WorkerFigures] = field(default_factory=list)
    _time: TrainingTime = field(default_factory=TrainingTime)
    _training_s: float = 0.0  # until the last update
    _last: int = 0  # the last worker that pushed: a worker released then has waited for it

    def __post_init__(self) -> None:
        self._accounts = [_WorkerFigures() for _ in range(self.n_workers)]

    def _now_s(self) -> float:
        """Training time since the start."""
        return self._time.of(self.clock())

    def start(self, version: int = 0) -> None:
        """Training begins, or resumes after ``version`` updates: all workers compute from now."""
        self.version = self.first_version = version
        self._time = TrainingTime(self.clock())
        for account in self._accounts:
            account.released_at_s = 0.0

    def count_bytes(self, sent: int, saved: int = 0) -> None:
        """A contribution has so many bytes; encoding has saved so many."""
        self.sent_bytes += sent
        self.saved_bytes += saved

    def pause(self) -> None:
        """A validation begins: training time stops until ``resume``."""
        self._time.pause(self.clock())

    def resume(self) -> None:
        """Training resumes."""
        self._time.resume(self.clock())

    def pushed(
        self,
        worker: int,
        weight: float,
        fault: str = "",
        waits: bool = True,
        waited_s: float = 0.0,
        contributes: bool = True,
    ) -> None:
        """The worker has pushed a gradient of ``weight`` samples, and ``waits`` or computes on.

        ``fault``: why it had to leave its contribution out, if so. ``waited_s``: before it pushed.
        ``contributes``: false if the worker only fetches parameters.
        """
        account = self._accounts[worker]
        now = max(self._now_s() - waited_s, account.released_at_s or 0.0)
        self._count_computing(worker, account, now, pushed=True)
        account.released_at_s, account.pushed_at_s = (None, now) if waits else (now, None)
        account.samples += weight
        account.pushes += contributes
        if (self._accounts[self._last].pushed_at_s or 0.0) <= now:
            self._last = worker
        if fault:
            account.faults[fault] += 1
        self.samples += weight
        if contributes:
            self.clocks.tick(worker)
            account.lead = max(account.lead, self.clocks.lead(worker))

    def _count_computing(
        self, worker: int, account: _WorkerFigures, now: float, pushed: bool
    ) -> None:
        if (begin_s := account.released_at_s) is not None:
            account.computing_s += now - begin_s
            if self.timeline is not None:
                self.timeline.computed(worker, begin_s, now, pushed)

    def waits(self, worker: int) -> None:
        """The worker waits for its turn to begin a mini-batch."""
        account = self._accounts[worker]
        account.released_at_s, account.pushed_at_s = None, self._now_s()

    def awaits(self, worker: int) -> None:
        """The worker, which has computed on after a push, now waits for the answer."""
        self._count_computing(worker, self._accounts[worker], self._now_s(), pushed=False)
        self.waits(worker)

    def dropped(self, worker: int, weight: float, contributes: bool = True) -> None:
        """The worker's last push, of ``weight`` samples, does not count; see :meth:`pushed`."""
        account = self._accounts[worker]
        account.dropped += contributes
        account.samples -= weight
        self.samples -= weight
        if self.timeline is not None:
            self.timeline.dropped(worker)

    def age(self, worker: int) -> int:
        """The number of updates since the worker has read the parameters."""
        return self.version - self._accounts[worker].read_version

    def updated(self, ages: Iterable[int]) -> None:
        """Count an update of contributions of these ages.

        A round in which all workers abstained counts, too, as Lightning counts a skipped step.
        """
        for age in ages:
            self.ages[age] += 1
        self.version += 1
        self._training_s = self._now_s()
        if self.timeline is not None:
            self.timeline.updated(self._training_s)

    def made_together(self, made: MadeRounds) -> None:
        """Count rounds that the workers completed without the server."""
        now = made.at_s - self._time.began_s
        shares = zip(self._accounts, made.samples, made.waited_s, made.awaited_s, strict=True)
        for worker, (account, samples, waited_s, awaited_s) in enumerate(shares):
            if account.released_at_s is not None:
                account.computing_s += max(0.0, now - account.released_at_s - waited_s)
                account.released_at_s = now
            account.waiting_s += waited_s
            account.awaited_s += awaited_s
            account.samples += samples
            account.pushes += made.n
            account.read_version += made.n
            for _ in range(made.n):
                self.clocks.tick(worker)
        self.samples += sum(made.samples)
        self.ages[0] += made.n * self.n_workers
        self.version += made.n
        self._training_s = max(self._training_s, now)

    def released(self, worker: int, reads: bool = True) -> None:
        """The worker continues; with ``reads``, from the current version."""
        account, now = self._accounts[worker], self._now_s()
        self._count_computing(worker, account, now, pushed=False)
        if account.pushed_at_s is not None:
            waited_s = now - account.pushed_at_s
            account.waiting_s += waited_s
            if self.timeline is not None:
                self.timeline.waited(worker, account.pushed_at_s, now)
            if self._last != worker:
                self._accounts[self._last].awaited_s += waited_s
        account.released_at_s, account.pushed_at_s = now, None
        if reads:
            account.read_version = self.version

    def end_timeline(self, now: float) -> None:
        """Add what the workers do until ``now``, which is not counted yet."""
        assert self.timeline is not None, "there is one"
        for worker, account in enumerate(self._accounts):
            if account.released_at_s is not None:
                self.timeline.computed(worker, account.released_at_s, now)
            elif account.pushed_at_s is not None:
                self.timeline.waited(worker, account.pushed_at_s, now)

    def left(self, worker: int) -> None:
        """The worker is gone: it neither computes nor waits."""
        self.idle(worker)
        self.clocks.leave(worker)

    def idle(self, worker: int) -> None:
        """From now on the worker neither computes nor waits."""
        self._accounts[worker].released_at_s = self._accounts[worker].pushed_at_s = None
        if self.timeline is not None:
            self.timeline.left(worker)

    def comes(self, worker: int) -> None:
        """The worker is back, and computes from now."""
        self._accounts[worker].released_at_s = self._now_s()

    def read(self, worker: int) -> None:
        """The worker has read the current parameters outside a release."""
        self._accounts[worker].read_version = self.version

    @property
    def n_applied(self) -> int:
        """The number of contributions that updates have had."""
        return sum(self.ages.values())

    def mean_age(self) -> float:
        """The mean staleness of contributions."""
        total = self.n_applied
        return sum(age * n for age, n in self.ages.items()) / total if total else 0.0

    def age_quantile(self, share: float) -> int:
        """The quantile ``share`` of the contributions' staleness."""
        left = share * self.n_applied
        for age in sorted(self.ages):
            left -= self.ages[age]
            if left <= 0:
                return age
        return 0

    def stats(self) -> dict[str, Any]:
        """Updates, samples, samples per second of training, waiting shares in [0, 1], staleness.

        ``awaited_share``: waiting for each worker, in [0, 1] of all waiting; ``step_s``: seconds of
        computing for a contribution, by worker; ``dropped``: contributions that were too late or of
        an aborted step, by worker; ``lead``: contributions ahead of the slowest worker;
        ``effective_batch``: samples per update; ``left_out``: contributions that each worker left
        out, by the kind of fault; ``handed_over``: ``sent_bytes`` of all contributions with a
        weight, and ``saved_bytes`` by encoding; of several hosts also ``hosts``, for each: its
        ``workers``, the mean of their ``waiting_share``, and its traffic. Staleness is counted per
        contribution: updates between the reading of the parameters and the application of the
        gradient computed from them.
        """
        training_s, updates = self._training_s, self.version - self.first_version
        awaited_s = sum(account.awaited_s for account in self._accounts)
        waiting = [_share(account.waiting_s, account.computing_s) for account in self._accounts]
        return {
            "updates": updates,
            "samples": int(self.samples),
            "samples_per_s": self.samples / training_s if training_s > 0 else 0.0,
            "training_s": training_s,
            "waiting_share": waiting,
            "awaited_share": [_share(a.awaited_s, awaited_s - a.awaited_s) for a in self._accounts],
            "step_s": [a.computing_s / a.pushes if a.pushes else 0.0 for a in self._accounts],
            "samples_per_worker": [int(account.samples) for account in self._accounts],
            "staleness": {
                "mean": self.mean_age(),
                "max": max(self.ages, default=0),
                "histogram": dict(sorted(self.ages.items())),
            },
            "dropped": [account.dropped for account in self._accounts],
            "lead": {
                "now": [self.clocks.lead(worker) for worker in range(self.n_workers)],
                "max": [account.lead for account in self._accounts],
            },
            "effective_batch": self.samples / updates if updates else 0.0,
            "left_out": {
                fault: [account.faults[fault] for account in self._accounts]
                for fault in sorted(set().union(*(a.faults for a in self._accounts)))
            },
            "handed_over": {"sent_bytes": self.sent_bytes, "saved_bytes": self.saved_bytes},
            "workers": self.n_workers,
            **({} if self.traffic is None else {"hosts": _of_hosts(waiting, self.traffic())}),
        }


def _of_hosts(
    waiting: Sequence[float], traffic: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    n = len(waiting) // len(traffic)
    return [
        {"workers": n, "waiting_share": sum(waiting[h * n : h * n + n]) / n, **each}
        for h, each in enumerate(traffic)
    ]


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0
