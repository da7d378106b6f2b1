"""Training samplers: fixed shares in lock-step; free-running workers draw from a shared queue.

The order of an epoch is the same in every worker: a permutation seeded with ``seed + epoch`` (as in
``DistributedSampler``), or worker 0's draw from the user's own sampler. The union of the workers'
mini-batches of one step is a slice of that order, for any number of workers and any batch sizes;
no sample is repeated or left out. A worker without a sample in the last step skips it
(:mod:`hybridtrain.lightning.participation.absent_steps`). Beside another loader that has samples
for it, it goes by the ``mode`` of the ``CombinedLoader``: ``max_size`` gives it ``None``,
``min_size`` ends its epoch, ``max_size_cycle`` repeats samples (a filler, of weight 0).

A *lap* is one pass over the order; a short loader beside a longer one makes several laps in an
epoch. A sampler counts the part of its lap that training has done, which a checkpoint in the middle
of an epoch needs. That is less than the part handed out: loaders prefetch, and accumulated
gradients without a step do not count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import Sampler

from hybridtrain.engine.protocol.messages import Draw, DrawnBatch, Gone, LoaderPass, Visits
from hybridtrain.engine.protocol.spans import (
    Spans,
    merged,
    positions,
    shares_of,
    split,
    total,
    without,
)
from hybridtrain.engine.worker.client import Client

Order = Callable[[int], Sequence[int]]  # epoch -> indices into the data set


@dataclass(frozen=True)
class Seeded:
    """The order of ``DistributedSampler``, unpadded; ``seed=None``: not shuffled."""

    length: int
    seed: int | None

    def __call__(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator).tolist()


def drawn(sampler: Sampler[int], client: Client, most: int | None, epoch: int) -> list[int]:
    """The order of the user's own sampler, drawn by worker 0 for all (it may be random).

    It has at most so many samples: the sampler may never end.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    draws = client.group.is_leader or client.group.solo  # who joins meets nobody yet
    mine = list(map(_plain, islice(sampler, most))) if draws else None
    return client.gather("order of the epoch", mine)[0]


def _plain(index: Any) -> Any:
    """An int in place of numpy's, or of a tensor without dimensions."""
    return index.item() if getattr(index, "ndim", None) == 0 else index


@dataclass(frozen=True)
class UnfinishedPass:
    """A pass that a checkpoint left unfinished: number ``lap`` of its epoch.

    ``spans`` of ``order`` are left; ``batches`` mini-batches are done. ``crew``: the workers that
    share it; empty: those of the run.
    """

    epoch: int
    order: Order
    spans: Spans
    batches: int = 0
    lap: int = 0
    crew: tuple[int, ...] = ()


@dataclass(frozen=True)
class EpochPlan:
    """How workers share one loader.

    ``sizes``: samples in each worker's mini-batch; 1 where items are whole mini-batches.
    ``batches_per_turn``: of a worker; 0: workers take no turns. ``fills``: whether a worker without
    samples in a step gets a filler, up to the ``last`` step that it takes part in (``None``: the
    last with samples of this loader). ``visits``: shards to draw from. ``limit``: mini-batches of
    each worker, which does others in place of dropped ones if it ``redoes`` them. ``several``:
    whether a step has a mini-batch of several loaders.
    """

    order: Order
    length: int
    sizes: tuple[int, ...]
    drop_last: bool
    items_are_batches: bool = False
    batches_per_turn: Callable[[], int] = lambda: 0
    fills: Callable[[], bool] = lambda: False
    last: Callable[[int], float] | None = None
    visits: Visits | None = None
    limit: Callable[[], float] = lambda: math.inf
    redoes: bool = False
    several: Callable[[], bool] = lambda: False

    def is_like(self, other: EpochPlan) -> bool:
        """Whether each step may have the same positions of both loaders."""
        kind = attrgetter("length", "sizes", "drop_last")
        return kind(self) == kind(other)


@dataclass(frozen=True)
class EpochPortion:
    """One planned mini-batch.

    ``weight``: samples, ``None``: count in the mini-batch; ``batches``, ``done``: mini-batches and
    positions of the lap up to and including this one; ``cover``: its draw from the queue;
    ``together``: samples of all workers in this step, in lock-step; ``without``: workers that have
    neither samples nor a filler in it.
    """

    weight: float | None
    lap: int
    batches: int
    done: int = 0
    cover: DrawnBatch | None = None
    together: float | None = None
    without: tuple[int, ...] = ()


class EpochSampler(Sampler[int]):
    """A sampler that counts, of its epoch and lap, the parts handed out and done."""

    def __init__(
        self,
        plan: EpochPlan,
        epoch: int,
        client: Client,
        number: int = 0,
        begun: UnfinishedPass | None = None,
    ) -> None:
        self.plan, self.epoch, self.number = plan, epoch, number
        self._client, self._begun = client, begun
        self._planned: deque[EpochPortion] = deque()
        self._running: EpochPortion | None = None  # training's last mini-batch
        self._n_taken = 0  # mini-batches since the last step
        self._dropped = 0, 0, 0  # epoch, lap, and mini-batches of it that are part of no update
        self._without_now: tuple[int, ...] = ()  # workers that skip the step
        self._done: tuple[int, EpochPortion] | None = None  # in which epoch
        # The same before steps that may have to be done again.
        self._former: tuple[int, EpochPortion] | None = None
        self._iterated: int | None = None  # the epoch of the current lap
        self.source = begun.order if begun else plan.order  # of the current lap's order
        self.order: Sequence[int] = ()
        # By epoch, lap and source.
        self._drawn: dict[tuple[int, int, Order], Sequence[int]] = {}
        self.lap = 0
        self.ended = False  # the current pass has nothing more for this worker
        # Workers that share the next passes.
        self.crew = begun.crew if begun and begun.crew else client.group.there
        self._steps: list[tuple[int, int]] = []  # version, mini-batches of this iteration done then

    @property
    def batch_size(self) -> int:
        """Batch size of this worker."""
        return self.plan.sizes[self._client.worker]

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch

    def has_begun(self, epoch: int) -> bool:
        """Whether a part of the epoch is done, in this run or before the checkpoint."""
        begun = self._begun is not None and self._begun.epoch == epoch
        return self.epoch == epoch and (begun or self._iterated == epoch)

    @property
    def asked(self) -> bool:
        """Whether it has been iterated over."""
        return self._iterated is not None

    def stale(self) -> bool:
        """Whether the current iteration is over another epoch."""
        return self._iterated not in (None, self.epoch)

    def _resumed(self, lap: int | None = None) -> UnfinishedPass | None:
        """A checkpoint's pass, if it is of this epoch (and lap)."""
        begun = self._begun
        fits = begun and begun.epoch == self.epoch and lap in (None, begun.lap)
        return begun if fits else None

    def _begin(self) -> tuple[Sequence[int], Spans, int]:
        """Begin a lap: the epoch's order, the spans to do, mini-batches done before."""
        if self._iterated != self.epoch:
            first = self._resumed()
            self.lap = first.lap if first else 0
        elif self.ended:
            self.lap += 1
        if self._iterated != self.epoch or not self.ended:
            self._planned.clear()
            self._dropped = 0, 0, 0
        self._steps.clear()
        self._iterated, self.ended = self.epoch, False
        begun = self._resumed(self.lap)
        self.source = (begun or self.plan).order
        self.order = self._ordered(self.source, self.lap)
        if begun:
            return self.order, begun.spans, begun.batches
        return self.order, ((0, len(self.order)),), 0

    def _ordered(self, source: Order, lap: int) -> Sequence[int]:
        """The order of a lap. A sampler of the user's is asked once: it may be random, and what
        lost workers have left are positions in that order.
        """
        if isinstance(source, Seeded):
            return source(self.epoch)
        key = self.epoch, lap, source
        if key not in self._drawn:
            last = {k: v for k, v in self._drawn.items() if k[0] == self.epoch and k[1] >= lap - 1}
            self._drawn = {**last, key: source(self.epoch)}
        return self._drawn[key]

    def forget_orders(self) -> None:
        """Let the next iteration draw the order anew."""
        self._drawn = {}

    def _plan_next(
        self,
        n_samples: int,
        batches: int,
        done: int,
        cover: DrawnBatch | None,
        together: int | None = None,
        without: tuple[int, ...] = (),
    ) -> None:
        unknown = self.plan.items_are_batches and n_samples > 0
        weight = None if unknown else float(n_samples)
        known = None if self.plan.items_are_batches or together is None else float(together)
        self._planned.append(EpochPortion(weight, self.lap, batches, done, cover, known, without))

    def next_portion(self) -> EpochPortion | None:
        """Training takes the next mini-batch; ``None``: this sampler has not planned it."""
        portion = self._planned.popleft() if self._planned else None
        if portion is not None:
            self._running, self._without_now = portion, portion.without
            self._n_taken += 1
            if portion.cover is not None:
                self._client.tickets.cover(portion.cover)
        return portion

    @property
    def has_nothing_next(self) -> bool:
        """Whether this worker is to skip the next step."""
        return bool(self._planned) and self._client.worker in self._planned[0].without

    def pop_without(self) -> tuple[int, ...]:
        """The workers that skip the current step; to be called once in a step."""
        without, self._without_now = self._without_now, ()
        return without

    def commit(self, version: int | None = None, has_unsent: bool = False) -> None:
        """A step has been made with all mini-batches that training has taken.

        Args:
            version: of the parameters after it, if the step is to be remembered.
            has_unsent: the masters lack steps before it.
        """
        self._n_taken = 0
        if self._running is not None:
            self._former = self._former if has_unsent else self._done
            done = self._running
            if dropped := self._n_dropped:
                done = replace(done, batches=done.batches - dropped)
            self._done = self.epoch, done
            if version is not None:
                self._steps.append((version, done.batches))

    def drop(self) -> None:
        """No update has the mini-batches that training has taken since the last step."""
        if self._running is not None:
            place = self.epoch, self._running.lap
            self._dropped = *place, self._n_dropped + self._n_taken
        self._n_taken = 0

    @property
    def _n_dropped(self) -> int:
        """Samples dropped in the current lap, which Lightning does not count either."""
        now = (self.epoch, self._running.lap) if self._running is not None else ()
        return self._dropped[2] if self._dropped[:2] == now else 0

    def take_back(self, version: int) -> None:
        """The last step was broken off; ``version``: of the current parameters."""
        self._done, self._n_taken = self._former, 0
        self._steps = [each for each in self._steps if each[0] <= version]

    def left_by(self, gone: Sequence[Gone]) -> Spans:
        """Positions of the current pass that these workers have not done."""
        return ()

    @property
    def place(self) -> tuple[int, int]:
        """The current lap, and mini-batches done."""
        return self.lap, self._done[1].batches if self._done is not None else 0

    def go_on(
        self, crew: tuple[int, ...], spans: Spans, place: tuple[int, int] | None = None
    ) -> None:
        """Let ``crew`` share these positions of the pass in the next iteration.

        ``place``: the ``place`` of this sampler, if it is another than the current one.
        """
        self.crew, self.ended = crew, False
        if place is not None:
            self.lap, self.source = place[0], (self._resumed(place[0]) or self.plan).order

    def shares_with(self, crew: tuple[int, ...]) -> None:
        """Let ``crew`` share the next passes."""
        self.crew = crew

    def progress(
        self, unseen: dict[LoaderPass, Spans], has_unsent: bool = False
    ) -> tuple[int, int, Spans]:
        """Lap, mini-batches done and positions left of the current epoch.

        Args:
            unseen: spans of the server's queue that no update has used.
            has_unsent: mini-batches of steps that the masters lack are not done.
        """
        begun, known = self._resumed(), self._former if has_unsent else self._done
        lap, batches, done = (begun.lap, begun.batches, 0) if begun else (0, 0, 0)
        if known is not None and known[0] == self.epoch:
            portion = known[1]
            lap, batches, done = portion.lap, portion.batches, portion.done
        begun = self._resumed(lap)
        spans = begun.spans if begun else ((0, self.plan.length),)
        drawn = unseen.get(LoaderPass(self.number, self.epoch, lap))
        if drawn is not None:
            return lap, batches, drawn
        rest, remaining = split(spans, done)[1], self.left_by(self._client.group.gone)
        return lap, batches, merged([*without(remaining, rest), *rest]) if remaining else rest


class ShareSampler(EpochSampler):
    """This worker's fixed share of every global mini-batch, until a worker is lost.

    A global mini-batch of G = sum(sizes) positions is dealt in one pattern, as evenly as the sizes
    allow: with equal sizes every W-th sample. The last, smaller one follows the beginning of the
    pattern, so that it is shared in proportion. At the end of the epoch the remaining workers share
    the rest of a lost worker's.
    """

    _positions: Sequence[int] = ()  # of this iteration
    _before = 0  # mini-batches of the pass that were done before it
    _left: int | None = None  # the epoch in which this worker sits out the last step

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Batch sizes of the workers that share the pass."""
        return tuple(self.plan.sizes[worker] for worker in self.crew)

    def _shares(self, todo: int, worker: int) -> Iterator[list[int]]:
        """A worker's places in each global mini-batch of ``todo`` positions."""
        places, whole = self._places(worker), sum(self._sizes)
        usable = todo // whole * whole if self.plan.drop_last else todo
        for start in range(0, usable, whole):
            yield [start + place for place in places if start + place < usable]

    def _places(self, worker: int) -> list[int]:
        return shares_of(self._sizes)[self.crew.index(worker)]

    def left_by(self, gone: Sequence[Gone]) -> Spans:
        remaining: list[int] = []
        for each in gone:
            if each.worker in self.crew and self._iterated == self.epoch:
                done = max([n for version, n in self._steps if version <= each.version], default=0)
                n_before = max(done - self._before, 0)
                shares = list(self._shares(len(self._positions), each.worker))[n_before:]
                remaining += [self._positions[place] for share in shares for place in share]
        return merged((position, position + 1) for position in remaining)

    def go_on(
        self, crew: tuple[int, ...], spans: Spans, place: tuple[int, int] | None = None
    ) -> None:
        super().go_on(crew, spans, place)
        self._left = None  # it may have samples again
        _, batches = place or self.place
        self._begun = UnfinishedPass(self.epoch, self.source, spans, batches, self.lap)

    def _todo(self) -> tuple[int, int]:
        """Positions left of the epoch's first lap, and mini-batches done before."""
        begun = self._resumed()
        return (total(begun.spans), begun.batches) if begun else (self.plan.length, 0)

    def last_step(self, worker: int) -> int:
        """The worker's last step of the epoch with samples of the first lap."""
        if (begun := self._resumed()) and begun.lap:
            return 0
        todo, before = self._todo()
        full, rest = divmod(todo, sum(self._sizes))
        return before + full + (not self.plan.drop_last and self._places(worker)[0] < rest)

    def _without(self, step: int, rest: int) -> tuple[int, ...]:
        """Workers that sit out a step, a global mini-batch of only ``rest`` places."""
        if rest >= sum(self._sizes) or self.lap:
            return ()
        last = self.plan.last or self.last_step
        return tuple(worker for worker in self.crew if last(worker) < step)

    def __len__(self) -> int:
        """Indices of the epoch, as if every worker had a mini-batch in every step.

        Includes those done before a checkpoint, because Lightning continues its count from them.
        """
        todo, before = self._todo()
        whole, size = sum(self._sizes), self.batch_size
        full, rest = divmod(todo, whole)
        rest = 0 if self.plan.drop_last else rest
        last = sum(place < rest for place in self._places(self._client.worker))
        return (before + full) * size + (last or (size if rest else 0))

    def __iter__(self) -> Iterator[int]:
        if self._left == self.epoch:  # another loader is asked after this one
            return
        order, spans, batches = self._begin()
        self._positions = todo = list(positions(spans))
        self._before = batches
        whole, worker = sum(self._sizes), self._client.worker
        for number, places in enumerate(self._shares(len(todo), worker), 1):
            done = min(number * whole, len(todo))
            together = done - (number - 1) * whole
            without = self._without(batches + number, together)
            self._plan_next(len(places), batches + number, done, None, together, without)
            if worker in without:
                self._left = self.epoch
            elif not places and self.plan.fills():
                # The mini-batch with which this worker begins the next lap.
                begin = dict.fromkeys(p % len(order) for p in self._places(worker))
                yield from (order[place] for place in begin)
            yield from (order[todo[place]] for place in places)
        self.ended = True


class QueueSampler(EpochSampler):
    """Mini-batches drawn one by one from the server's queue. It has no length, on purpose.

    Lightning relies on a length: with an upper bound it would miss validation and the last step.
    """

    _reopened = False  # the next iteration does what lost workers have left

    def go_on(
        self, crew: tuple[int, ...], spans: Spans, place: tuple[int, int] | None = None
    ) -> None:
        super().go_on(crew, spans, place)
        self._reopened = True

    def _begin(self) -> tuple[Sequence[int], Spans, int]:
        joins = self._client.group.joins  # who joins is alone here
        begins = self._iterated != self.epoch and not joins
        found = super()._begin()
        if begins and self.source is not self.plan.order and self.plan.several():
            self._ordered(self.plan.order, 0)  # while all are here
        return found

    def _ordered(self, source: Order, lap: int) -> Sequence[int]:
        """All laps of an epoch have one order: workers come to the next lap at different times,
        and cannot meet there to ask the user's sampler.
        """
        return super()._ordered(source, 0)

    def __iter__(self) -> Iterator[int]:
        order, spans, batches = self._begin()
        lap, begins = LoaderPass(self.number, self.epoch, self.lap), True
        plan, n_drawn = self.plan, self.batch_size
        fills, limit, several = plan.fills(), plan.limit(), plan.several()
        # The rest of a reopened pass is not dealt in turns.
        in_turn = 0 if self._reopened else plan.batches_per_turn()
        continues, self._reopened = self._reopened, False
        # The loader counts samples into mini-batches, so a smaller one must be the last.
        while n_drawn == self.batch_size and (batches < limit or plan.redoes):
            ask = Draw(
                *(lap, spans, len(order), plan.sizes, plan.drop_last, begins, in_turn, fills),
                visits=plan.visits,
                limited=limit < math.inf,
                last=batches + 1 >= limit,
                several=several,
                continues=continues,
            )
            ticket = self._client.queue.draw(ask)
            begins, batches, n_drawn = False, batches + 1, total(ticket.spans)
            cover = DrawnBatch(lap, ticket.spans) if ticket.counts else None
            self._plan_next(n_drawn if ticket.counts else 0, batches, 0, cover)
            yield from (order[position] for position in positions(ticket.spans))
        self.ended = True
