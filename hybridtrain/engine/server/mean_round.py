"""The mean of all gradients before the step, for user code that reads or changes gradients.

If a hook reads or changes gradients, or the user clips them, every worker must see the merged
gradient, as under all-reduce. Then a step takes two rounds: all workers send their gradients and
get the mean; the hooks of each change it alike; all push, and one row stands for all. Workers wait
as in lock-step (:class:`hybridtrain.engine.policies.WaitForAll`), but not for a worker that pushes
without asking (it abstains) or is in a meeting.
A worker may be lost between its mean and its push. The others push that mean, so its gradient
counts: a restarted worker gets the same mean; without a restart its mini-batch is finished. Where a
step has several means (user code accumulates), each replaces the gradient, so only the last one is
in the step; the restarted worker gets that one as often as its former process had got a mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch

from hybridtrain.engine.exchanges.exchange import MergeRule, WorkerGradients, merged, merges
from hybridtrain.engine.memory import Packed, Store, pack, unpack
from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.protocol.facts import Apply, Fact, Joined, Left, Pushed, Release, Waiting
from hybridtrain.engine.protocol.messages import Average, Averaged
from hybridtrain.engine.updates.mean import merge, merge_mixed
from hybridtrain.engine.updates.thread_pool import Pool

_CHUNK = 256 * 1024  # elements: one thread is enough for less


class Mean(NamedTuple):
    """The reply to a worker whose gradient was one of ``weight`` samples.

    ``number``: of the worker's means since its last push, from 1.
    """

    reply: Averaged
    weight: float
    number: int


class Averaging:
    """Collects gradients until no worker can send another one in this step.

    Args:
        workers: all workers.
        pool: computes the means.
        merge: the user's rule in place of the mean.
    """

    def __init__(self, workers: Iterable[int], pool: Pool, merge: MergeRule | None = None) -> None:
        self._rule, self._pool, self._merge = WaitForAll(), pool, merge
        self._asked: dict[int, Average] = {}
        self.given: dict[int, Mean] = {}  # to workers that have not pushed yet
        self._requests: Counter[int] = Counter()  # of each process, since its last push
        workers = tuple(workers)
        self._rule.begin(len(workers))
        for worker in workers:
            self._rule.on(Joined(worker))

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that wait for a mean."""
        return frozenset(self._asked)

    def ask(
        self, worker: int, request: Average, store: Store, anew: bool
    ) -> list[tuple[int, Averaged]]:
        """The worker requests the mean; its gradient lies in its row.

        ``anew``: it has been restarted, and repeats a step.
        """
        self._requests[worker] += 1
        known = self.given.get(worker) if anew else None
        if known is not None and self._requests[worker] <= known.number:
            return [(worker, known.reply)]
        self._asked[worker] = request
        return self._obey(Pushed(worker), store)

    def forget(self, worker: int) -> Mean | None:
        """The worker has pushed or is gone; returns its last mean that is in no push."""
        self._requests.pop(worker, None)
        return self.given.pop(worker, None)

    def busy(self, worker: int, store: Store | None) -> list[tuple[int, Averaged]]:
        """The worker waits for something else: do not wait for it here."""
        return self._obey(Waiting(worker), store)

    def back(self, worker: int) -> None:
        """The worker computes again."""
        self._rule.on(Joined(worker))

    def miss(self, worker: int, keeps: bool) -> None:
        """The worker will be restarted, and send its gradient again.

        ``keeps``: others push its last mean. No worker is freed: if all the others had asked, none
        would wait.
        """
        self._requests.pop(worker, None)
        if not keeps:
            self.given.pop(worker, None)
        if self._asked.pop(worker, None) is not None:
            self._rule.on(Left(worker))

    def left(self, worker: int, store: Store | None) -> list[tuple[int, Averaged]]:
        """The worker is gone."""
        self._asked.pop(worker, None)
        return self._obey(Left(worker), store)

    def dissolve(self) -> None:
        """Forget all requests."""
        self._asked.clear()

    def _obey(self, fact: Fact, store: Store | None) -> list[tuple[int, Averaged]]:
        reply = Averaged(())
        freed: dict[int, Mean] = {}
        for order in self._rule.on(fact):
            match order:
                case Apply(workers):
                    assert store is not None, "gradients lie in a store"
                    asked = {w: self._asked[w] for w in workers if w in self._asked}
                    reply = average(asked, store, self._pool, self._merge)
                case Release(workers):
                    asking = {w: self._asked.pop(w) for w in workers if w in self._asked}
                    numbers = self._requests
                    freed |= {w: Mean(reply, x.weight, numbers[w]) for w, x in asking.items()}
        self.given |= freed
        return [(worker, mean.reply) for worker, mean in freed.items()]


@torch.no_grad()
def average(
    asked: dict[int, Average], store: Store, pool: Pool, rule: MergeRule | None = None
) -> Averaged:
    """Write the mean, weighted by samples, or what the ``rule`` makes, to the row for means."""
    total = sum(request.weight for request in asked.values())
    shares = {w: request.weight / total for w, request in asked.items() if request.weight > 0}
    absent = [set(asked[worker].row.absent) for worker in shares]
    if not absent:
        return Averaged(tuple(range(len(store.layout.slots))))
    missing = tuple(sorted(set.intersection(*absent)))
    if merges(rule, len(shares)):
        return Averaged(_merge_by_rule(rule, asked, shares, store))
    if any(asked[worker].row.packed for worker in shares):
        return Averaged(missing, _average_one_by_one(asked, shares, store))
    for dtype in store.layout.addable:
        _average_rows(shares, store, dtype, pool)
    return Averaged(missing)


def _average_rows(shares: dict[int, float], store: Store, dtype: torch.dtype, pool: Pool) -> None:
    """The mean of all parameters of one dtype, in parallel chunks."""
    mean = store.means[dtype]  # (P,)
    rows = [store.gradients[store.row_of(worker)][dtype] for worker in shares]
    counts = list(shares.values())

    def piece(lane: int, start: int) -> None:
        part = slice(start, start + _CHUNK)
        out = mean[part]
        mean_of = merge([row[part] for row in rows], counts, out)
        if mean_of is not out:  # a lone row
            out.copy_(mean_of)

    pool.map(piece, range(0, mean.numel(), _CHUNK))


def _merge_by_rule(
    rule: MergeRule, asked: dict[int, Average], shares: dict[int, float], store: Store
) -> tuple[int, ...]:
    """Returns the numbers of the parameters that get no gradient."""
    slots = store.layout.slots
    parts = []
    for worker, share in shares.items():
        packed = {each.number: each for each in asked[worker].row.packed}
        gradients: list[torch.Tensor | None] = [None] * len(slots)
        for n in set(range(len(slots))).difference(asked[worker].row.absent):
            place = store.gradient(store.row_of(worker), slots[n])
            found = unpack(packed[n], place).to_dense() if n in packed else place
            gradients[n] = found.to(slots[n].dtype, copy=True)
        parts.append(WorkerGradients(worker, share, 0, gradients))
    means = [store.mean(slot) for slot in slots]
    made = merged(rule, parts, means)
    for mean, gradient in zip(means, made, strict=True):
        if gradient is not None:
            mean.copy_(gradient)
    return tuple(n for n, gradient in enumerate(made) if gradient is None)


def _average_one_by_one(
    asked: dict[int, Average], shares: dict[int, float], store: Store
) -> tuple[Packed, ...]:
    """The mean by parameter; sparse if all its gradients are."""
    packed = {w: {each.number: each for each in asked[w].row.packed} for w in shares}
    sparse: list[Packed] = []
    for number, slot in enumerate(store.layout.slots):
        mean = store.mean(slot)
        present = [w for w in shares if number not in asked[w].row.absent]
        if not present:
            continue
        places = {w: store.gradient(store.row_of(w), slot) for w in present}
        gradients = [
            unpack(packed[w][number], place) if number in packed[w] else place
            for w, place in places.items()
        ]
        made = merge_mixed(gradients, [shares[w] for w in present], partial(store.mean, slot))
        if made.is_sparse:
            sparse.append(pack(number, made, mean))
        elif made.data_ptr() != mean.data_ptr():
            mean.copy_(made)
    return tuple(sparse)
