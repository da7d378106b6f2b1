"""The shared queue from which free-running workers draw their mini-batches.

Each pass over a loader is a list of spans of the epoch's order. A worker that asks gets the next
positions, one of its mini-batches, so fast workers process more and nothing is drawn twice. The
queue reserves a full mini-batch, if there is one, for every worker that has drawn none yet, first
for the one with the smallest number, which logs and saves for all.

Near the end of a pass the queue refuses a mini-batch if the other workers would finish everything,
their own mini-batches included, sooner: a slow worker that has prefetched (Lightning does, to know
the last mini-batch; loader processes prefetch more) would keep all waiting. A worker's speed is its
share of the pass so far, not a time, so that a replay of the recorded messages gives the same
tickets. What remains to wait for is the current mini-batch.

The queue remembers a drawn mini-batch until the update that covers it. Loaders prefetch, so only
the queue knows what a checkpoint has *not* seen, what a lost worker has not finished, and which
dropped mini-batches must be repeated.

A pass may be cut into shards, equal parts of its order. A worker then draws some mini-batches from
one shard and moves to the one visited least (Liu et al. 2024, arXiv:2401.09135, whose workers
change their shard with every round).

Where a step has a mini-batch of several loaders, those of the same length and batch sizes are drawn
from together: a worker gets the same positions of each.

Where a pass is one evaluation (``backs_up``), a worker that finds nothing left gets a mini-batch
that another one has drawn and would probably end later. Each says when it has processed one
(``claim``), and only the first counts, so that every mini-batch is in one worker's sum.

Where workers take turns, mini-batches are dealt instead: each worker's are known beforehand, so
that training follows the order of the epoch. A worker gets those of its share that no worker has
drawn, so that a restarted one continues where it was lost and repeats nothing that others have
processed since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, itemgetter

from hybridtrain.engine.protocol.messages import (
    Draw,
    DrawnBatch,
    LoaderPass,
    Push,
    StepRequest,
    Ticket,
)
from hybridtrain.engine.protocol.spans import Span, Spans, common, merged, split, total, without

NOBODY = -1  # owns accumulated mini-batches, so that they stay done if the worker is lost
_PLENTY = 4  # a worker draws at once a quarter of its share of what is left


@dataclass
class _Shards:
    """The workers' visits to shards of a pass. Ties go to the shard with the smallest number."""

    visited: Counter[int] = field(default_factory=Counter)
    kept: dict[int, Spans] = field(default_factory=dict)  # each worker's visit, drawn or not

    def offer(self, worker: int, request: Draw, remaining: Spans) -> Spans:
        """All positions left: those of the worker's visit first, of the others' visits last."""
        own = common(self.kept.get(worker, ()), remaining)
        free = remaining
        for other, spans in self.kept.items():
            free = free if other == worker else without(free, spans)
        if not own:
            own = self.kept[worker] = self._visit(worker, request, free)
        begun = (*own, *without(free, own))
        return (*begun, *without(remaining, begun))

    def _visit(self, worker: int, request: Draw, free: Spans) -> Spans:
        """The next mini-batches of the least visited shard that has some."""
        assert request.visits is not None
        n_shards, n_batches = request.visits
        bounds = [number * request.length // n_shards for number in range(n_shards + 1)]
        shards = {n: common([span], free) for n, span in enumerate(pairwise(bounds))}
        some = [number for number, spans in shards.items() if spans]
        if not some:
            return ()
        shard = min(some, key=lambda number: (self.visited[number], number))
        self.visited[shard] += 1
        return split(shards[shard], n_batches * request.sizes[worker])[0]


def end_sooner(own: float, rest: float, speeds: Sequence[float], last: float) -> bool:
    """Whether others end everything before one worker ends its own part, in units of time.

    Args:
        own: until the worker has ended its part.
        rest: positions of all others, drawn and undrawn.
        speeds: of each of them, in positions.
        last: the longest mini-batch of one of them, which may begin late.
    """
    return own > rest / sum(speeds) + last


@dataclass
class _Steps:
    """A worker's steps in loaders that are drawn from together, since it began their passes."""

    tickets: list[Ticket] = field(default_factory=list)  # of each step
    n_drawn: Counter[int] = field(default_factory=Counter)  # by loader

    def begin(self, loader: int) -> bool:
        """The loader begins its pass; whether it is the first one, so that all begin anew."""
        anew = not self.n_drawn or loader in self.n_drawn
        if anew:
            self.tickets.clear()
            self.n_drawn.clear()
        self.n_drawn[loader] = 0
        return anew


@dataclass
class _Pass:
    """One pass over one loader."""

    request: Draw  # the first one
    spans: Spans  # the whole pass
    first: _Pass | None = None  # of a loader that is drawn from together with this one
    steps: dict[int, _Steps] = field(default_factory=dict)  # by worker, if it is the first
    served: set[int] = field(default_factory=set)  # workers that have drawn
    drawn: dict[int, list[Spans]] = field(default_factory=dict)  # not done yet
    claimed: dict[int, list[Spans]] = field(default_factory=dict)  # done, part of no update yet
    doubled: set[Spans] = field(default_factory=set)  # drawn by two workers
    ended: set[int] = field(default_factory=set)  # workers that will not draw again
    dealt: Counter[int] = field(default_factory=Counter)  # mini-batches dealt to each worker
    done: Counter[int] = field(default_factory=Counter)  # positions that are part of an update
    n_done: int = 0  # by all
    shards: _Shards = field(default_factory=_Shards)

    def __post_init__(self) -> None:
        self.remaining = self.spans  # not drawn

    def is_like(self, request: Draw) -> bool:
        """Whether the request is for the same pass over another loader of the same kind."""
        kind = attrgetter(
            "several", "lap.epoch", "lap.number", "spans", "length", "sizes", "drop_last"
        )
        return request.several and kind(self.request) == kind(request)

    def least(self, sizes: Sequence[int]) -> int:
        """The smallest mini-batch that workers of these batch sizes can draw."""
        return min(sizes) if self.request.drop_last else 1

    def offer(self, worker: int, request: Draw) -> Spans:
        """The positions that the worker could draw, the next ones first."""
        if request.visits is not None:
            return self.shards.offer(worker, request, self.remaining)
        return (
            self._positions_of_turn(worker, request) if request.batches_per_turn else self.remaining
        )

    def _positions_of_turn(self, worker: int, request: Draw) -> Spans:
        """The worker's dealt positions that none has drawn, enough for a mini-batch, or all."""
        size, found, n = request.sizes[worker], list[Span](), 0
        while n < size:
            rest = split(self.spans, _turn_start(worker, request, self.dealt[worker]))[1]
            if not rest:
                break
            fresh = common(split(rest, size)[0], self.remaining)
            found, n = [*found, *fresh], n + total(fresh)
            # A part of the last one may remain for the next draw.
            self.dealt[worker] += n <= size
        return tuple(found)

    def take(self, worker: int, offered: Spans, n: int) -> Spans:
        """Draw the first ``n`` positions of the worker's offer."""
        drawn, rest = split(offered, n)
        self.remaining = rest if offered is self.remaining else without(self.remaining, drawn)
        self.drawn.setdefault(worker, []).append(drawn)
        return drawn

    def follow(self, worker: int, ticket: Ticket) -> None:
        """Draw what the worker has drawn from another loader in the same step."""
        self.served.add(worker)
        for spans in (ticket.spans, *ticket.more) if ticket.counts and ticket.spans else ():
            self.remaining = without(self.remaining, spans)
            self.drawn.setdefault(worker, []).append(spans)
        if not ticket.counts or total(ticket.spans) < self.request.sizes[worker]:
            self.ended.add(worker)

    def take_more(self, worker: int, request: Draw) -> tuple[Spans, ...]:
        """Draw more mini-batches, as many as the worker will surely finish in time.

        At its speed so far it would process a share of what is left; it gets a part of that share.
        """
        if request.most == 1 or request.limited or not self.done[worker]:
            return ()
        size, share = request.sizes[worker], self.done[worker] / self.n_done
        n = min(request.most - 1, int(total(self.remaining) * share / (_PLENTY * size)))
        return tuple(self.take(worker, self.offer(worker, request), size) for _ in range(n))

    def near_its_end(self, worker: int, n: int) -> bool:
        """Whether the others might finish sooner: a cheap check before ``others_are_sooner``."""
        return (self.held(worker) + n) * self.n_done > total(self.remaining) * self.done[worker]

    def others_are_sooner(self, worker: int, n: int, others: set[int], request: Draw) -> bool:
        """Whether the others finish everything before this worker finishes ``n`` more positions.

        The unit of time is the pass so far; a worker's speed is the positions it has finished.
        """
        speeds = [self.done[other] for other in others]
        if not others or not self.done[worker] or not all(speeds):
            return False
        own = (self.held(worker) + n) / self.done[worker]
        last = max(request.sizes[other] / self.done[other] for other in others)
        rest = total(self.remaining) + sum(map(self.held, others))
        return end_sooner(own, rest, speeds, last)

    def suffices(self, worker: int) -> bool:
        """Whether the worker can draw from what is left."""
        return total(self.remaining) >= self.least(self.request.sizes[worker : worker + 1])

    def held(self, worker: int) -> int:
        """The number of positions that the worker has drawn and not done yet."""
        return sum(map(total, self.drawn.get(worker, [])))

    def spare(self, worker: int, request: Draw) -> Spans:
        """Draw the mini-batch of another worker that would end it last, and later than this one.

        Of several in hand that is the last, which the other may not have begun. A smaller one is
        the loader's last, so it comes when no other does.
        """
        size, found = request.sizes[worker], list[tuple[bool, float, int, Spans]]()
        if not self.done[worker]:
            return ()
        own = (self.held(worker) + size) / self.done[worker]
        fitting = range(size if request.drop_last else 1, size + 1)
        for other, drawn in self.drawn.items():
            n, done = 0, self.done[other] if other != worker else math.inf
            for spans in drawn:
                n += total(spans)
                at = n / done if done else math.inf
                if at > own and total(spans) in fitting and spans not in self.doubled:
                    found.append((total(spans) == size, at, n, spans))
        if not found:
            return ()
        spans = max(found, key=itemgetter(0, 1, 2))[3]
        self.doubled.add(spans)
        self.drawn.setdefault(worker, []).append(spans)
        return spans

    def finish(self, worker: int, spans: Spans) -> None:
        """The worker has done one that it has drawn."""
        self.drawn[worker].remove(spans)
        self.done[worker] += total(spans)
        self.n_done += total(spans)

    def claim(self, worker: int, spans: Spans) -> tuple[bool, list[int]]:
        """Whether the worker's answer counts, and the others that have drawn the mini-batch."""
        if spans not in self.drawn.get(worker, []):
            return False, []
        self.finish(worker, spans)
        self.claimed.setdefault(worker, []).append(spans)
        twice = self.drawn if spans in self.doubled else {}
        others = [other for other, drawn in twice.items() if spans in drawn]
        for other in others:
            self.drawn[other].remove(spans)
        self.doubled.discard(spans)
        return True, others

    def settle(self, worker: int, spans: Spans) -> None:
        """An update covers what the worker has drawn."""
        if spans in (claimed := self.claimed.get(worker, [])):
            claimed.remove(spans)
        elif spans in self.drawn.get(worker, []):
            self.finish(worker, spans)

    def begin(self, worker: int, request: Draw) -> None:
        """The worker begins the pass, perhaps anew."""
        if request.continues:
            self._forget(worker)
        else:
            self.give_back(worker)

    def give_back(self, worker: int) -> None:
        """Return the worker's mini-batches to the queue, but those that others process, too."""
        gone = [*self.drawn.pop(worker, []), *self.claimed.pop(worker, [])]
        undone = [span for spans in gone if spans not in self.doubled for span in spans]
        self.doubled.difference_update(gone)
        self.remaining = merged([*self.remaining, *undone])
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        """The worker has drawn nothing yet, as far as its next draws go."""
        self.dealt.pop(worker, None)
        self.shards.kept.pop(worker, None)
        self.served.discard(worker)
        self.ended.discard(worker)

    def unseen(self) -> Spans:
        """The positions that no update covers yet."""
        held = [*self.drawn.values(), *self.claimed.values()]
        return merged([*self.remaining, *[s for each in held for spans in each for s in spans]])


@dataclass
class BatchQueue:
    """Hands out the positions of every pass.

    Args:
        members: the workers that train; shared with the server.
        covered: the number of mini-batches that a worker has finished without the server, if it
            makes steps.
        backs_up: near the end of a pass, workers draw mini-batches of others.
    """

    members: set[int]
    covered: Callable[[int], int] | None = None
    backs_up: bool = False
    _passes: dict[LoaderPass, _Pass] = field(default_factory=dict)
    # By worker: released pushes of steps not made yet: covered after them, mini-batches, samples.
    _owed: dict[int, tuple[int, tuple[DrawnBatch, ...], float]] = field(default_factory=dict)
    _told: Counter[int] = field(default_factory=Counter)  # mini-batches covered by pushes
    _away: set[int] = field(default_factory=set)  # may be restarted; the others continue

    def draw(self, worker: int, request: Draw) -> Ticket:
        """The worker's next mini-batch, or the end of its pass.

        If there are fewer mini-batches than workers, the last workers get none; with ``fills``,
        they get the first samples, which do not count.
        """
        if self._owed:
            self._settle_made()  # else mini-batches of steps just made would return to the queue
        one = self._pass(request)
        self._away.discard(worker)
        if request.several:
            return self._draw_together(one, worker, request)
        if request.begins:
            one.begin(worker, request)
        return self._next(one, worker, request)

    def _draw_together(self, one: _Pass, worker: int, request: Draw) -> Ticket:
        """Draw the positions that the worker has of another loader in this step, or new ones.

        Loader processes draw ahead, so any loader may be the first to ask.
        """
        first, loader = one.first or one, request.lap.loader
        steps = first.steps.setdefault(worker, _Steps())
        if request.begins:
            if steps.begin(loader):
                first.begin(worker, request)
            if one is not first:
                one.begin(worker, request)
        step = steps.n_drawn[loader]
        steps.n_drawn[loader] += 1
        if step == len(steps.tickets):
            steps.tickets.append(self._next(first, worker, request))
        if one is not first:
            one.follow(worker, steps.tickets[step])
        return steps.tickets[step]

    def _next(self, one: _Pass, worker: int, request: Draw) -> Ticket:
        fresh = worker not in one.served
        one.served.add(worker)
        kept = 0 if request.batches_per_turn else self._kept(one, request, fresh, worker)
        size, offered = request.sizes[worker], one.offer(worker, request)
        n = min(size, total(offered) - kept)
        if not (request.batches_per_turn or request.limited) and one.near_its_end(worker, n):
            there = self.members - self._away - one.ended  # a restarting one may need this step
            others = {each for each in there if one.suffices(each)} - {worker}
            n = 0 if one.others_are_sooner(worker, n, others, request) else n
        # A mini-batch that is the only one of its step may be any worker's.
        doubles = self.backs_up and not (request.limited or request.several)
        if n < size and doubles and (spare := one.spare(worker, request)):
            return Ticket(spare)
        if n < size:
            one.ended.add(worker)  # loaders take a smaller mini-batch for the last
        if n == size or (n > 0 and not request.drop_last):
            drawn = one.take(worker, offered, n)
            return Ticket(drawn, more=one.take_more(worker, request))
        if fresh and request.fills and request.length >= one.least(request.sizes):
            return Ticket(((0, min(size, request.length)),), False)
        return Ticket(())

    def _kept(self, one: _Pass, request: Draw, fresh: bool, worker: int) -> int:
        """Positions reserved for workers without a mini-batch; if ``fresh``, for the first only."""
        if self.members <= one.served:  # nearly always
            return 0
        waiting = self.members - one.served
        first = min(self.members - self._away, default=worker)
        kept = waiting & {first} if fresh else waiting
        return sum(request.sizes[other] for other in kept)

    def _pass(self, request: Draw) -> _Pass:
        epoch = request.lap.epoch
        for lap in [lap for lap in self._passes if lap.epoch < epoch]:
            del self._passes[lap]  # all workers have met since
        if request.lap not in self._passes:
            over = any(lap.epoch > epoch for lap in self._passes)  # this epoch has ended
            alike = [one for one in self._passes.values() if one.is_like(request)]
            first = (alike[0].first or alike[0]) if alike else None
            self._passes[request.lap] = _Pass(request, () if over else request.spans, first)
        return self._passes[request.lap]

    def settle(self, worker: int, covers: tuple[DrawnBatch, ...]) -> None:
        """An update covers these mini-batches of the worker."""
        for one, spans in self._known(covers):
            one.settle(worker, spans)

    def _known(self, covers: Iterable[DrawnBatch]) -> list[tuple[_Pass, Spans]]:
        """The passes of mini-batches, less those that are over, and the positions."""
        return [(self._passes[lap], spans) for lap, spans in covers if lap in self._passes]

    def claim(self, worker: int, batch: DrawnBatch) -> tuple[bool, list[int]]:
        """Whether the mini-batch counts for this worker, and which others process it in vain."""
        one = self._passes.get(batch.lap)
        return (False, []) if one is None else one.claim(worker, batch.spans)

    def keep(self, worker: int, covers: Sequence[DrawnBatch]) -> int:
        """Mark accumulated mini-batches done; returns their owner.

        They are not done again if the worker is lost, but a checkpoint begins the pass anew.
        """
        for one, spans in self._known(covers):
            one.settle(worker, spans)
            one.claimed.setdefault(NOBODY, []).append(spans)
        return NOBODY

    def count_by(self, covered: Callable[[int], int] | None) -> None:
        """``covered``: how many mini-batches a worker has finished without the server."""
        self.covered = covered

    def done(self, worker: int, push: Push, samples: float) -> None:
        """A push of so many ``samples`` is part of an update.

        If the worker makes the step itself, its mini-batches are settled once it has.
        """
        if self._owed:
            self._settle_made()
        self._told[worker] += len(push.covers)
        if self.covered is not None and isinstance(push, StepRequest):
            self._owed[worker] = self._told[worker], push.covers, samples
        else:
            self.settle(worker, push.covers)

    def _settle_made(self) -> None:
        for worker, (told, covers, _) in list(self._owed.items()):
            if self.covered is not None and self.covered(worker) >= told:
                del self._owed[worker]
                self.settle(worker, covers)

    def untold(self, worker: int) -> list[DrawnBatch]:
        """The mini-batches that the worker has finished and not reported."""
        self._settle_made()
        n = 0 if self.covered is None else self.covered(worker) - self._told[worker]
        own = [(lap, enumerate(one.drawn.get(worker, []))) for lap, one in self._passes.items()]
        drawn = [(step, DrawnBatch(lap, spans)) for lap, each in own for step, spans in each]
        return [batch for _, batch in sorted(drawn, key=itemgetter(0))][: max(n, 0)]

    def is_last_chance(self, covers: tuple[DrawnBatch, ...]) -> bool:
        """Whether no worker would draw these mini-batches if they were returned."""
        return any(self.members <= one.ended for one, _ in self._known(covers))

    def is_whole(self, covers: Sequence[DrawnBatch]) -> bool:
        """Whether with these mini-batches nothing is left of their passes that could be drawn.

        Where each worker has its own number of mini-batches, something may always be.
        """
        for lap in {cover.lap for cover in covers} & self._passes.keys():
            one = self._passes[lap]
            own = merged([span for cover in covers if cover.lap == lap for span in cover.spans])
            least, rest = one.least(one.request.sizes), total(without(one.unseen(), own))
            if not one.request.limited and rest >= least:
                return False
        return True

    def give_back(self, worker: int, covers: tuple[DrawnBatch, ...]) -> None:
        """Return these mini-batches to the queue, for any worker."""
        for one, spans in self._known(covers):
            one.remaining = merged([*one.remaining, *spans])
        self.settle(worker, covers)  # dropped work counts for the worker's speed

    def lost(self, worker: int) -> float:
        """The worker is gone: return its unfinished mini-batches to the queue.

        Returns how many samples were counted of a step that was not made.
        """
        self._away.add(worker)
        self._settle_made()
        _, _, samples = self._owed.pop(worker, (0, (), 0.0))
        del self._told[worker]
        for one in self._passes.values():
            one.give_back(worker)
            one.steps.pop(worker, None)
        return samples

    def has_left(self, there: set[int]) -> bool:
        """Whether workers ``there`` can draw something in the earliest epoch known.

        A worker that continues from an earlier report may be one epoch behind.
        """
        epoch = min((lap.epoch for lap in self._passes), default=0)
        # A loader that ends before others may have begun its next pass; others follow the first.
        laps, first = self._passes.items(), (epoch, 0)
        passes = [one for lap, one in laps if lap[1:] == first and one.first is None]
        return any(one.suffices(each) for one in passes for each in there)

    def unseen(self) -> dict[LoaderPass, Spans]:
        """The positions of each pass that no update covers, for a checkpoint."""
        self._settle_made()
        remaining = {lap: one.unseen() for lap, one in self._passes.items()}
        for cover in [cover for worker in self.members for cover in self.untold(worker)]:
            remaining[cover.lap] = without(remaining[cover.lap], cover.spans)
        return remaining


def _turn_start(worker: int, request: Draw, number: int) -> int:
    """The position in the pass at which the worker's dealt mini-batch ``number`` begins."""
    rounds, within = divmod(number, request.batches_per_turn)
    before = sum(request.sizes[:worker]) * request.batches_per_turn + within * request.sizes[worker]
    return rounds * sum(request.sizes) * request.batches_per_turn + before
