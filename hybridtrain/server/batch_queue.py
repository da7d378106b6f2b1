"""The shared queue that free-running workers draw their mini-batches from.

Each pass over a loader is a list of stretches of the epoch's order. Whoever asks gets the next
positions, as many as make one of its mini-batches, so fast workers do more and nothing is drawn
twice. A full mini-batch, as far as there is one, is kept for every worker that has had none yet,
first of all for the one with the smallest number, who logs and saves for all.

Near its end nobody gets a mini-batch that the others who are there would be done with sooner, all
they have and all that is left included: a slow worker that has fetched ahead (Lightning does, to
know which is the last; loaders with processes of their own do more) would keep everybody waiting.
How fast they are is told by what each has done of the pass, not by a clock, so that a recorded
order of messages gives the same tickets again. What remains to wait for is the mini-batch under
way.

What has been drawn is remembered until the update that it is part of. Loaders draw ahead, so only
this tells what a checkpoint has *not* seen, what a lost worker leaves undone, and what is to be
done again by somebody because it came too late.

The pass may be cut into shards, equal stretches of its order. A worker then takes some mini-batches
from one shard and goes on to the one that was visited least (Liu et al. 2024, arXiv:2401.09135,
whose workers change their shard with every round).

Where workers take turns, mini-batches are dealt instead: each worker's are known beforehand, so
that they are trained on in the order of the epoch. It gets of them what nobody has drawn yet, so
that one who comes back goes on where it was lost, and does not repeat what others have made up for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from hybridtrain.protocol.messages import Draw, DrawnBatch, LoaderPass, Push, Ticket
from hybridtrain.protocol.spans import Span, Spans, common, merged, split, total, without

_PLENTY = 4  # of its share of what is left a worker draws one part in so many at once


@dataclass
class _Shards:
    """Who is in which shard of a pass. Ties go to the shard with the smallest number."""

    visited: Counter[int] = field(default_factory=Counter)
    kept: dict[int, Spans] = field(default_factory=dict)  # of a worker's visit, drawn or not

    def offer(self, worker: int, request: Draw, left: Spans) -> Spans:
        """All that is left: first of the worker's visit, last of the others'."""
        own = common(self.kept.get(worker, ()), left)
        free = left
        for other, spans in self.kept.items():
            free = free if other == worker else without(free, spans)
        if not own:
            own = self.kept[worker] = self._visit(worker, request, free)
        begun = (*own, *without(free, own))
        return (*begun, *without(left, begun))

    def _visit(self, worker: int, request: Draw, free: Spans) -> Spans:
        """The next mini-batches of the shard that was visited least, of those that have some."""
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


@dataclass
class _Pass:
    """One pass over one loader."""

    spans: Spans  # all of it
    least: tuple[int, ...]  # how much of it each worker can draw
    served: set[int] = field(default_factory=set)
    drawn: dict[int, list[Spans]] = field(default_factory=dict)  # and not trained on yet
    ended: set[int] = field(default_factory=set)  # who will not draw again
    dealt: Counter[int] = field(default_factory=Counter)  # mini-batches that are behind a worker
    done: Counter[int] = field(default_factory=Counter)  # positions that are part of an update
    n_done: int = 0  # by all
    shards: _Shards = field(default_factory=_Shards)

    def __post_init__(self) -> None:
        self.left = self.spans  # that nobody has drawn

    def offer(self, worker: int, request: Draw) -> Spans:
        """What the worker could draw from, the next positions first."""
        if request.visits is not None:
            return self.shards.offer(worker, request, self.left)
        return self._dealt_to(worker, request) if request.turn else self.left

    def _dealt_to(self, worker: int, request: Draw) -> Spans:
        """Of what the worker is dealt and nobody has drawn, enough for a mini-batch, or all."""
        size, found, n = request.sizes[worker], list[Span](), 0
        while n < size:
            rest = split(self.spans, _place(worker, request, self.dealt[worker]))[1]
            if not rest:
                break
            fresh = common(split(rest, size)[0], self.left)
            found, n = [*found, *fresh], n + total(fresh)
            # Of the last one something may remain; the next draw looks at it again.
            self.dealt[worker] += n <= size
        return tuple(found)

    def take(self, worker: int, offered: Spans, n: int) -> Spans:
        """The first ``n`` positions of what the worker was offered."""
        drawn, rest = split(offered, n)
        self.left = rest if offered is self.left else without(self.left, drawn)
        self.drawn.setdefault(worker, []).append(drawn)
        return drawn

    def take_more(self, worker: int, request: Draw) -> tuple[Spans, ...]:
        """More of what the worker has asked for, as many as it will surely be done with in time.

        As fast as it has been so far it would do a share of what is left; it gets a part of that.
        """
        if request.most == 1 or not self.done[worker]:
            return ()
        size, share = request.sizes[worker], self.done[worker] / self.n_done
        n = min(request.most - 1, int(total(self.left) * share / (_PLENTY * size)))
        return tuple(self.take(worker, self.offer(worker, request), size) for _ in range(n))

    def near_its_end(self, worker: int, n: int) -> bool:
        """Whether the others might be sooner: if all were as fast together, they would.

        Spares the queue, most of the time, from asking about each of them.
        """
        return (self.held(worker) + n) * self.n_done > total(self.left) * self.done[worker]

    def others_are_sooner(self, worker: int, n: int, others: set[int], request: Draw) -> bool:
        """Whether the others will be done with everything before this worker with ``n`` more.

        In time units of the pass so far, in which a worker's speed is what it has done.
        """
        speeds = [self.done[other] for other in others]
        if not others or not self.done[worker] or not all(speeds):
            return False
        own = (self.held(worker) + n) / self.done[worker]
        last = max(request.sizes[other] / self.done[other] for other in others)
        rest = total(self.left) + sum(map(self.held, others))
        return own > rest / sum(speeds) + last

    def suffices(self, worker: int) -> bool:
        """Whether the worker can draw of what is left."""
        return total(self.left) >= self.least[worker]

    def held(self, worker: int) -> int:
        """Positions that the worker has drawn and that are not part of an update yet."""
        return sum(map(total, self.drawn.get(worker, [])))

    def give_back(self, worker: int) -> None:
        """What the worker has drawn is to be done by somebody."""
        undone = [span for spans in self.drawn.pop(worker, []) for span in spans]
        self.left = merged([*self.left, *undone])
        self.dealt.pop(worker, None)
        self.shards.kept.pop(worker, None)
        self.served.discard(worker)
        self.ended.discard(worker)

    def unseen(self) -> Spans:
        """What nobody has trained on yet."""
        drawn: list[Span] = [s for each in self.drawn.values() for spans in each for s in spans]
        return merged([*self.left, *drawn])


@dataclass
class BatchQueue:
    """Hands out positions of every pass.

    Args:
        members: the workers that are alive; shared with the server.
    """

    members: set[int]
    covered: Callable[[int], int] | None = None  # mini-batches that a worker has done by itself
    _passes: dict[LoaderPass, _Pass] = field(default_factory=dict)
    _owed: dict[int, tuple[int, tuple[DrawnBatch, ...], float]] = field(default_factory=dict)
    _told: Counter[int] = field(default_factory=Counter)  # mini-batches behind a worker's pushes
    _away: set[int] = field(default_factory=set)  # who may come back, and others go on meanwhile

    def draw(self, worker: int, request: Draw) -> Ticket:
        """The worker's next mini-batch, or the end of its pass.

        Where there are fewer mini-batches than workers, those left over have none; or, if they must
        run something, the first samples, which do not count.
        """
        if self._owed:
            self._settle_made()  # or what has just been made would go back
        one = self._pass(request)
        self._away.discard(worker)
        if request.begins:
            one.give_back(worker)
        fresh = worker not in one.served
        one.served.add(worker)
        kept = 0 if request.turn else self._kept(one, request, fresh, worker)
        size, offered = request.sizes[worker], one.offer(worker, request)
        n = min(size, total(offered) - kept)
        if not request.turn and one.near_its_end(worker, n):
            there = self.members - self._away - one.ended  # who is away may wait for this very step
            others = {each for each in there if one.suffices(each)} - {worker}
            n = 0 if one.others_are_sooner(worker, n, others, request) else n
        if n < size:
            one.ended.add(worker)  # for loaders, a smaller one is the last
        if n == size or (n > 0 and not request.drop_last):
            drawn = one.take(worker, offered, n)
            return Ticket(drawn, more=one.take_more(worker, request))
        if fresh and request.fills and _has_batches(request):
            return Ticket(((0, min(size, request.length)),), False)
        return Ticket(())

    def _kept(self, one: _Pass, request: Draw, fresh: bool, worker: int) -> int:
        """Positions of those who have had no mini-batch yet; for a ``fresh`` one, the first's."""
        waiting = self.members - one.served
        first = min(self.members - self._away, default=worker)
        kept = waiting & {first} if fresh else waiting
        return sum(request.sizes[other] for other in kept)

    def _pass(self, request: Draw) -> _Pass:
        epoch = request.lap.epoch
        for lap in [lap for lap in self._passes if lap.epoch < epoch]:
            del self._passes[lap]  # everybody has met since
        if request.lap not in self._passes:
            over = any(lap.epoch > epoch for lap in self._passes)  # so nothing of this is left
            least = request.sizes if request.drop_last else (1,) * len(request.sizes)
            self._passes[request.lap] = _Pass(() if over else request.spans, least)
        return self._passes[request.lap]

    def settle(self, worker: int, covers: tuple[DrawnBatch, ...]) -> None:
        """What the worker has drawn there is part of an update: it is done."""
        for cover in covers:
            drawn = self._passes[cover.lap].drawn if cover.lap in self._passes else {}
            if cover.spans in drawn.get(worker, []):
                drawn[worker].remove(cover.spans)
                self._passes[cover.lap].done[worker] += total(cover.spans)
                self._passes[cover.lap].n_done += total(cover.spans)

    def done(self, worker: int, push: Push, samples: float) -> None:
        """A push is part of an update; a worker that has asked for that still has to make it.

        ``samples`` are counted for it.
        """
        if self._owed:
            self._settle_made()
        self._told[worker] += len(push.covers)
        if push.own and push.age is None and self.covered is not None:
            self._owed[worker] = self._told[worker], push.covers, samples
        else:
            self.settle(worker, push.covers)

    def _settle_made(self) -> None:
        for worker, (told, covers, _) in list(self._owed.items()):
            if self.covered is not None and self.covered(worker) >= told:
                del self._owed[worker]
                self.settle(worker, covers)

    def untold(self, worker: int) -> list[DrawnBatch]:
        """What the worker has drawn and done, and not told of yet."""
        self._settle_made()
        n = 0 if self.covered is None else self.covered(worker) - self._told[worker]
        own = [(lap, one.drawn.get(worker, [])) for lap, one in self._passes.items()]
        return [DrawnBatch(lap, spans) for lap, drawn in own for spans in drawn][: max(n, 0)]

    def is_last_chance(self, covers: tuple[DrawnBatch, ...]) -> bool:
        """Whether nobody would draw what was drawn there, if it were given back."""
        passes = [self._passes[cover.lap] for cover in covers if cover.lap in self._passes]
        return any(self.members <= one.ended for one in passes)

    def give_back(self, worker: int, covers: tuple[DrawnBatch, ...]) -> None:
        """What the worker has drawn there is to be done again, by whoever still draws."""
        for cover in covers:
            if cover.lap in self._passes:
                one = self._passes[cover.lap]
                one.left = merged([*one.left, *cover.spans])
        self.settle(worker, covers)  # its time was as long as if it had counted

    def lost(self, worker: int) -> float:
        """The worker is gone; what it had not done goes to the others.

        Returns how many samples count though the step with them was not made.
        """
        self._away.add(worker)
        self._settle_made()
        _, _, samples = self._owed.pop(worker, (0, (), 0.0))
        del self._told[worker]
        for one in self._passes.values():
            one.give_back(worker)
        return samples

    def has_left(self, there: set[int]) -> bool:
        """Whether those who are ``there`` can draw something, in the epoch that they are in.

        Who goes on from where training was some time ago may be in the one before the latest.
        """
        epoch = min((lap.epoch for lap in self._passes), default=0)
        passes = [one for lap, one in self._passes.items() if lap.epoch == epoch]
        return any(one.suffices(each) for one in passes for each in there)

    def unseen(self) -> dict[LoaderPass, Spans]:
        """What of each pass is not behind the parameters yet."""
        self._settle_made()
        left = {lap: one.unseen() for lap, one in self._passes.items()}
        for cover in [cover for worker in self.members for cover in self.untold(worker)]:
            left[cover.lap] = without(left[cover.lap], cover.spans)
        return left


def _place(worker: int, request: Draw, number: int) -> int:
    """Where in the pass the worker's mini-batch ``number`` begins, dealt ``turn`` at a time."""
    rounds, within = divmod(number, request.turn)
    before = sum(request.sizes[:worker]) * request.turn + within * request.sizes[worker]
    return rounds * sum(request.sizes) * request.turn + before


def _has_batches(request: Draw) -> bool:
    needed = min(request.sizes) if request.drop_last else 1
    return request.length >= needed
