"""Who trains on which samples: fixed shares in lock-step, a shared queue when running freely.

The order of an epoch is the same in every worker: a permutation seeded with ``seed + epoch`` (what
``DistributedSampler`` uses), or the order of the user's own sampler as worker 0 has drawn it. The
union of the workers' mini-batches of one step is a slice of that order, whatever the number of
workers and the sizes of their mini-batches; nothing is repeated and nothing is left out. A worker
without a sample in the last step sits it out
(:mod:`hybridtrain.lightning.participation.absent_steps`). Only where that cannot be, beside another
loader that has some for it, it gets a filler that has no weight.

A *lap* is one pass over the order; a short loader beside a longer one is passed over several times
in an epoch. A sampler knows what training has done of its lap, which is not what it has handed out:
loaders and Lightning fetch ahead, and gradients that wait for others to be accumulated do not count
yet. That is what a checkpoint in the middle of an epoch needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.utils.data import Sampler

from hybridtrain.lightning.data.epoch_order import Begun, Order
from hybridtrain.protocol.messages import DrawnBatch, Gone, LoaderPass, Visits
from hybridtrain.protocol.spans import Spans, dealt, merged, positions, split, total, without
from hybridtrain.worker.client import Client


@dataclass(frozen=True)
class EpochPlan:
    """What the sampler of one loader needs to know.

    ``sizes`` are the workers' mini-batches; 1 where the data set's items are whole mini-batches.
    ``turn``: mini-batches of one turn, where workers take turns; 0: they do not. ``fills``: who has
    nothing in a step gets a filler. ``visits``: shards that workers draw from.
    """

    order: Order
    length: int
    sizes: tuple[int, ...]
    drop_last: bool
    items_are_batches: bool = False
    turn: Callable[[], int] = lambda: 0
    fills: Callable[[], bool] = lambda: False
    visits: Visits | None = None


@dataclass(frozen=True)
class EpochPortion:
    """One mini-batch as the sampler has planned it.

    ``weight`` in samples, ``None``: look at the mini-batch itself; ``batches`` and ``done`` of the
    lap, mini-batches and positions, this one included; ``cover``: where it was drawn from;
    ``together``: samples that all workers have in this step, where they go in step; ``without``:
    the workers that have nothing in it, and no filler.
    """

    weight: float | None
    lap: int
    batches: int
    done: int = 0
    cover: DrawnBatch | None = None
    together: float | None = None
    without: tuple[int, ...] = ()


class EpochSampler(Sampler[int]):
    """A sampler that knows its epoch and lap, and what of it has been handed out and done."""

    def __init__(
        self,
        plan: EpochPlan,
        epoch: int,
        client: Client,
        number: int = 0,
        begun: Begun | None = None,
    ) -> None:
        self.plan, self.epoch, self.number = plan, epoch, number
        self._client, self._begun = client, begun
        self._planned: deque[EpochPortion] = deque()
        self._running: EpochPortion | None = None  # the mini-batch that training has got last
        self._without_now: tuple[int, ...] = ()  # who sits the step out
        self._done: tuple[int, EpochPortion] | None = None  # in which epoch
        self._former: tuple[int, EpochPortion] | None = None  # the same before the last step
        self._iterated: int | None = None  # the epoch of the current lap
        self.source = begun.order if begun else plan.order  # of the current lap's order
        self.order: Sequence[int] = ()
        self._lap = 0
        self.ended = False  # the current pass has nothing more for this worker
        self._crew = client.there  # who shares the passes that begin from now on
        self._steps: list[tuple[int, int]] = []  # version, mini-batches then done of this iteration

    @property
    def batch_size(self) -> int:
        """This worker's."""
        return self.plan.sizes[self._client.worker]

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch

    def has_begun(self, epoch: int) -> bool:
        """Whether something of the epoch has been done, here or before the checkpoint."""
        begun = self._begun is not None and self._begun.epoch == epoch
        return self.epoch == epoch and (begun or self._iterated == epoch)

    def stale(self) -> bool:
        """Whether the current iteration is one over another epoch."""
        return self._iterated not in (None, self.epoch)

    def _resumed(self, lap: int | None = None) -> Begun | None:
        """What a checkpoint says of this epoch (and lap)."""
        begun = self._begun
        fits = begun and begun.epoch == self.epoch and lap in (None, begun.lap)
        return begun if fits else None

    def _begin(self) -> tuple[Sequence[int], Spans, int]:
        """A lap begins (anew): the epoch's order, what is to be done of it, mini-batches before."""
        if self._iterated != self.epoch:
            first = self._resumed()
            self._lap = first.lap if first else 0
        elif self.ended:
            self._lap += 1
        if self._iterated != self.epoch or not self.ended:
            self._planned.clear()
        self._steps.clear()
        self._iterated, self.ended = self.epoch, False
        begun = self._resumed(self._lap)
        self.source = (begun or self.plan).order
        self.order = self.source(self.epoch)
        if begun:
            return self.order, begun.spans, begun.batches
        return self.order, ((0, len(self.order)),), 0

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
        self._planned.append(EpochPortion(weight, self._lap, batches, done, cover, known, without))

    def next_portion(self) -> EpochPortion | None:
        """Training has got the next mini-batch; ``None``: it was not planned here."""
        portion = self._planned.popleft() if self._planned else None
        if portion is not None:
            self._running, self._without_now = portion, portion.without
            if portion.cover is not None:
                self._client.cover(portion.cover)
        return portion

    @property
    def has_nothing_next(self) -> bool:
        """Whether this worker is to sit the next step out."""
        return bool(self._planned) and self._client.worker in self._planned[0].without

    def pop_without(self) -> tuple[int, ...]:
        """The workers that sit the step out which training is in; asked once in a step."""
        without, self._without_now = self._without_now, ()
        return without

    def commit(self, version: int | None = None) -> None:
        """A step has been made with all the mini-batches that training has got.

        Args:
            version: of the parameters after it, if it is to be remembered.
        """
        if self._running is not None:
            self._former, self._done = self._done, (self.epoch, self._running)
            if version is not None:
                self._steps.append((version, self._running.batches))

    def take_back(self, version: int) -> None:
        """The last step was broken off; ``version``: of the parameters, as they are."""
        self._done = self._former
        self._steps = [each for each in self._steps if each[0] <= version]

    def left_by(self, gone: Sequence[Gone]) -> Spans:
        """Positions of the current pass that these workers would have done."""
        return ()

    def go_on(self, crew: tuple[int, ...], spans: Spans) -> None:
        """The next iteration does these positions of the current pass, too, shared by ``crew``."""
        self._crew, self.ended = crew, False

    def shares_with(self, crew: tuple[int, ...]) -> None:
        """Who shares the passes that begin from now on."""
        self._crew = crew

    def progress(self, unseen: dict[LoaderPass, Spans]) -> tuple[int, int, Spans]:
        """Of the current epoch: the lap, mini-batches done in it, and positions still to do.

        Args:
            unseen: by the parameters, as the server's queue knows it.
        """
        begun = self._resumed()
        lap, batches, done = (begun.lap, begun.batches, 0) if begun else (0, 0, 0)
        if self._done is not None and self._done[0] == self.epoch:
            portion = self._done[1]
            lap, batches, done = portion.lap, portion.batches, portion.done
        begun = self._resumed(lap)
        spans = begun.spans if begun else ((0, self.plan.length),)
        drawn = unseen.get(LoaderPass(self.number, self.epoch, lap))
        if drawn is not None:
            return lap, batches, drawn
        rest, left = split(spans, done)[1], self.left_by(self._client.gone)
        return lap, batches, merged([*without(left, rest), *rest]) if left else rest


class ShareSampler(EpochSampler):
    """This worker's fixed share of every global mini-batch, as long as nobody is lost.

    A global mini-batch of G = sum(sizes) positions is dealt out in one pattern, as evenly as the
    sizes allow: with equal sizes every W-th sample. The last, smaller one is its beginning, so that
    it is shared in proportion. What a worker that is gone has not done is shared out anew, to be
    done at the end of the epoch.
    """

    _positions: Sequence[int] = ()  # of this iteration
    _before = 0  # mini-batches of the pass that were done before it

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Mini-batches of those who share."""
        return tuple(self.plan.sizes[worker] for worker in self._crew)

    def _shares(self, todo: int, worker: int) -> Iterator[list[int]]:
        """A worker's places in each global mini-batch of ``todo`` positions."""
        places, whole = self._places(worker), sum(self._sizes)
        usable = todo // whole * whole if self.plan.drop_last else todo
        for start in range(0, usable, whole):
            yield [start + place for place in places if start + place < usable]

    def _places(self, worker: int) -> list[int]:
        return dealt(self._sizes)[self._crew.index(worker)]

    def left_by(self, gone: Sequence[Gone]) -> Spans:
        """Positions of the current pass that these workers would have done."""
        left: list[int] = []
        for each in gone:
            if each.worker in self._crew and self._iterated == self.epoch:
                done = max([n for version, n in self._steps if version <= each.version], default=0)
                n_before = max(done - self._before, 0)
                shares = list(self._shares(len(self._positions), each.worker))[n_before:]
                left += [self._positions[place] for share in shares for place in share]
        return merged((position, position + 1) for position in left)

    def go_on(self, crew: tuple[int, ...], spans: Spans) -> None:
        """The next iteration does these positions of the current pass, too, shared by ``crew``."""
        super().go_on(crew, spans)
        batches = self._done[1].batches if self._done is not None else 0
        self._begun = Begun(self.epoch, self.source, spans, batches, self._lap)

    def _todo(self) -> tuple[int, int]:
        """Positions to do in the first lap of the epoch, and mini-batches done before."""
        begun = self._resumed()
        return (total(begun.spans), begun.batches) if begun else (self.plan.length, 0)

    def _without(self, rest: int) -> tuple[int, ...]:
        """Who has nothing of a global mini-batch that has only its first ``rest`` places."""
        if rest >= sum(self._sizes) or self.plan.fills():
            return ()
        return tuple(worker for worker in self._crew if self._places(worker)[0] >= rest)

    def __len__(self) -> int:
        """Indices of the epoch, as if every worker had something in every step, as all count.

        Lightning counts on from the mini-batches that were done before a checkpoint, so they are
        part of the length, though they do not come again.
        """
        todo, before = self._todo()
        whole, size = sum(self._sizes), self.batch_size
        full, rest = divmod(todo, whole)
        rest = 0 if self.plan.drop_last else rest
        last = sum(place < rest for place in self._places(self._client.worker))
        return (before + full) * size + (last or (size if rest else 0))

    def __iter__(self) -> Iterator[int]:
        order, spans, batches = self._begin()
        self._positions = todo = list(positions(spans))
        self._before = batches
        whole = sum(self._sizes)
        for number, places in enumerate(self._shares(len(todo), self._client.worker), 1):
            done = min(number * whole, len(todo))
            together = done - (number - 1) * whole
            without = self._without(together)
            self._plan_next(len(places), batches + number, done, None, together, without)
            share = [order[todo[place]] for place in places]
            yield from share or (filler(order, self.batch_size) if self.plan.fills() else ())
        self.ended = True


def filler(order: Sequence[int], size: int) -> list[int]:
    """A mini-batch for a worker without samples: an ordinary one, so that any module can run it."""
    return list(order[:size])
