"""Advise another strategy at the end of a run, from its own times in virtual time.

The run's recorded times go through the server's own code under the run's strategy, and under each
of ``CANDIDATES``. Nothing is said unless the simulation of the run's own strategy reproduces the
speed that was measured; so what virtual time does not know (a network, a slow disk, meetings in
every step) makes no advice. See docs/simulate.md.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hybridtrain.engine.exchanges import exchange_of
from hybridtrain.engine.exchanges.compression import codec_of
from hybridtrain.engine.exchanges.gradient import Gradient
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.policies.registry import POLICIES
from hybridtrain.engine.recording.observed import Observed, observe
from hybridtrain.engine.updates.flat.lent_state import LARGEST
from hybridtrain.engine.updates.named import NamedUpdate, make_update
from hybridtrain.errors import UserError
from hybridtrain.util.arguments import spelled
from hybridtrain.util.files import short
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.service_times import Measured
from hybridtrain.virtual.virtual_world import VirtualWorld

# Share of its time that at least one worker has waited, for others or for the update.
LEAST_WAITING = 0.15
LEAST_STEPS = 50  # mini-batches of each worker: fewer may be slow by chance
LEAST_FACTOR = 1.15
MOST_ERROR = 0.15  # of the simulation of the run's own strategy
NEARLY = 0.8  # of the fastest candidate's speed: the first that has it is advised
SLOW = 1.5  # times as long as the median of the others


@dataclass(frozen=True)
class Candidate:
    """A policy to try: its parameters for so many workers of which so many are ``fast``.

    ``reason``: why it is faster, and what that costs. ``least_fast``: with fewer it makes no sense;
    0: also for one worker alone.
    """

    name: str
    options: Callable[[int, int], dict[str, int]]
    reason: str
    least_fast: int = 1


# In the order of what they change of a run in lock-step. With k = 1 the first would train the fast
# worker alone, and the second is the last.
CANDIDATES = (
    Candidate("pipe_sgd", lambda *_: {}, "the update is made beside the next mini-batch", 0),
    Candidate("backup", lambda _, fast: {"k": fast}, "drops what comes late", 2),
    Candidate("k_async", lambda _, fast: {"k": fast}, "what comes late counts in the next", 2),
    Candidate("k_batch_async", lambda n, _: {"k": n}, "none waits; gradients may be stale"),
    Candidate("async", lambda *_: {}, "none waits; each stale gradient is an update"),
)


@dataclass(frozen=True)
class Advice:
    """The advised ``strategy``, as options of the command line.

    ``factor``: its samples per second over those of the run's own strategy, both in virtual time;
    ``command`` shows it.
    """

    text: str
    command: str
    strategy: str
    factor: float

    def __str__(self) -> str:
        return f"{self.text}: {self.command}"


def advise(
    run: Path, stats: Mapping[str, Any], most_per_s: float = math.inf, by_hand: bool = False
) -> Advice | None:
    """The advice for a recorded run; ``None``: there is nothing to say, or not for sure.

    Args:
        run: its directory.
        stats: of :meth:`hybridtrain.engine.server.run_statistics.RunStatistics.stats`.
        most_per_s: samples per second that the machine's processors can compute.
        by_hand: the module steps its optimizers itself.

    Raises:
        UserError: if the record cannot be read, or lacks what virtual time needs.
    """
    waiting: Sequence[float] = stats.get("waiting_share", ())
    if not waiting:
        return None
    seen = observe(run)
    if max(*waiting, _update_share(seen)) < LEAST_WAITING:
        return None
    own, update = _policy(seen.strategy), make_update(seen.strategy.get("update"))
    if own is None or min(len(times) for times in seen.times.values()) < LEAST_STEPS:
        return None
    if _delay(own, seen.n_workers):
        return None  # the record does not have the time of an update
    usual = _samples_per_s(seen, own, update)
    if abs(usual / stats["samples_per_s"] - 1) > MOST_ERROR:
        return None
    n_fast = sum(factor < SLOW for factor in _times_slower(seen))
    refused = by_hand or seen.strategy.get("correction") is not None
    most_behind = 0.0 if refused else _most_behind(seen, most_per_s)
    found = _chosen(seen, update, min(n_fast, seen.n_workers - 1), most_behind)
    if found is None or found[0] / usual < LEAST_FACTOR or found[0] > most_per_s:
        return None
    speed, candidate, policy = found
    options = (f"strategy.policy.{key}={policy[key]}" for key in policy if key != "name")
    strategy, factor = " ".join([f"strategy={candidate.name}", *options]), speed / usual
    return Advice(
        f"{_why(seen, waiting)}: `{strategy}` "
        f"({candidate.reason}) would have made {factor:.1f} times as many samples a second",
        f"python -m hybridtrain simulate run={shlex.quote(short(run))} "
        f"strategy={spelled(own)},{spelled(policy)}",
        strategy,
        factor,
    )


def _why(seen: Observed, waiting: Sequence[float]) -> str:
    """Who is slow, and who has waited how long."""
    times_slower = _times_slower(seen)
    slower, waited = max(times_slower), [each for each in waiting if each >= LEAST_WAITING]
    slowest = f"worker {times_slower.index(slower)} is {slower:.1f} times slower; "
    if not waited:
        return f"updates took {100 * _update_share(seen):.0f} % of the time"
    waits = f"{len(waited)} of {len(waiting)} workers waited {100 * fmean(waited):.0f} %"
    return f"{slowest if slower >= SLOW else ''}{waits} of their time"


def _update_share(seen: Observed) -> float:
    """The update's share of a step, which waiting for one another does not have in it."""
    slowest_s = max(median(times) for times in seen.times.values())
    return seen.update_s / (seen.update_s + slowest_s)


def _policy(strategy: Mapping[str, Any]) -> dict[str, Any] | None:
    """The policy by name; ``None`` if there is none, or workers hand over no plain gradients."""
    given = strategy.get("policy")
    spec = {"name": given} if isinstance(given, str) else dict(given or {})
    plain = all(x is None or isinstance(x, str | float | int) for x in spec.values())
    if spec.get("name") not in POLICIES or not plain:
        return None
    exchange = exchange_of(make_policy(spec), strategy.get("exchange"))
    return spec if isinstance(exchange, Gradient) and codec_of(exchange) is None else None


def _samples_per_s(seen: Observed, policy: Any, update: NamedUpdate | None) -> float:
    """In virtual time, as ``python -m hybridtrain simulate run=...`` has it."""
    world = VirtualWorld(
        make_policy(policy),
        seen.n_workers,
        Measured(seen.times),
        seen.batch_size,
        conditions=Conditions(update_s=seen.update_s),
        update=update,
        epoch=seen.epoch,
    )
    world.run(mini_batches=seen.mini_batches)
    return float(world.server.statistics.stats()["samples"]) / world.now_s


def _delay(policy: Any, n_workers: int) -> int:
    """By how many updates gradients are late, because updates are made beside them."""
    return make_policy(policy).begin(n_workers).delay


def _most_behind(seen: Observed, most_per_s: float) -> float:
    """Samples per second that processors can compute if updates are made beside mini-batches.

    An update keeps all of them busy. Of small models, whose updates the worker that comes last
    makes in lock-step, the server would have to make them, which takes longer.
    """
    if 0 < seen.size_bytes <= 4 * LARGEST:
        return 0.0
    sample_s = 1 / most_per_s + seen.update_s / (seen.n_workers * seen.batch_size)
    return 1 / sample_s if sample_s else math.inf


def _times_slower(seen: Observed) -> list[float]:
    """Each worker's usual time of a mini-batch, over the median of the others'."""
    if seen.n_workers == 1:
        return [1.0]
    usual = [median(seen.times[worker]) for worker in range(seen.n_workers)]
    return [own / median(usual[:w] + usual[w + 1 :]) for w, own in enumerate(usual)]


def _chosen(
    seen: Observed, update: NamedUpdate | None, n_fast: int, most_behind: float
) -> tuple[float, Candidate, dict[str, Any]] | None:
    """Speed, candidate and policy: the first that is nearly as fast as the fastest.

    ``most_behind``: the most of those whose updates are made beside mini-batches.
    """
    tried = []
    for candidate in (each for each in CANDIDATES if each.least_fast <= n_fast):
        policy = {"name": candidate.name, **candidate.options(seen.n_workers, n_fast)}
        with suppress(UserError):  # it does not go with the run's update
            speed = _samples_per_s(seen, policy, update)
            if speed <= most_behind or not _delay(policy, seen.n_workers):
                tried.append((speed, candidate, policy))
    best = max((speed for speed, *_ in tried), default=0.0)
    return next((each for each in tried if each[0] >= NEARLY * best), None)
