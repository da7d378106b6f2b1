"""Stepping what has arrived of all workers while their backward still runs.

Theory of operation. A policy decides on whole contributions; but under lock-step, where it waits
for all, all that it has to decide is that all have come. So once the gradients of some parameters
have come from every worker, the step of these parameters is what it will be, and an elementwise
optimizer can make it at once: it is an ordinary step in which everything else is absent. At the
push what has been stepped is absent in turn, and the rest is stepped. The bits are those of one
whole step, as each parameter is stepped once, with the same shares in the order of the workers.

So that all plans of an update stay few, the parameters are divided into the same few portions in
every step, and a portion is stepped when the last of its gradients has come.

What has been stepped cannot be taken back. So each worker announces only what nobody can change any
more, and promises what its push will be; a promise that is broken ends the run. One that cannot
promise does not announce, and nothing is stepped early.

Legend: W workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from hybridtrain.errors import UserError
from hybridtrain.memory.layout import Slot
from hybridtrain.protocol.early_gradients import GradientsReady
from hybridtrain.protocol.messages import Push
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.groups import Members

PORTIONS = 12  # at most; what is left to do after backward is one or two of them


class ReadyPortion(NamedTuple):
    """These parameters of an optimizer, and all others that it has."""

    numbers: frozenset[int]
    others: frozenset[int]


class Early:
    """What has arrived in the step under way.

    Args:
        n_workers: W; all of them must announce.
    """

    def __init__(self, n_workers: int) -> None:
        self._n_workers = n_workers
        self._said: dict[int, GradientsReady] = {}  # by worker, the first of this step
        self._arrived: dict[int, set[int]] = {}  # worker -> numbers
        self._members: Members = ()
        self._portions: list[ReadyPortion] = []
        self._stepped: list[ReadyPortion] = []

    @property
    def stepped(self) -> bool:
        """Whether the step under way has been begun."""
        return bool(self._stepped)

    def arrived(
        self, worker: int, arrived: GradientsReady, members: Members, slots: Sequence[Slot]
    ) -> list[list[Contribution]]:
        """What can be stepped now, portion by portion.

        Raises:
            UserError: if the worker has announced something else, or one parameter twice.
        """
        first = self._said.setdefault(worker, arrived)
        if (first.optimizer, first.weight) != (arrived.optimizer, arrived.weight):
            raise UserError(_broken(worker, "announces gradients with another weight"))
        mine = self._arrived.setdefault(worker, set())
        if mine & set(arrived.numbers):
            raise UserError(_broken(worker, "announces one gradient twice"))
        mine |= set(arrived.numbers)
        agree = len({each.optimizer for each in self._said.values()}) == 1
        if not agree or len(self._said) < self._n_workers:
            return []
        if members != self._members:
            self._members, self._portions = members, divided(members, slots)
        new = [each for each in self._portions if self._is_complete(each)]
        self._stepped += new
        return [self._contributions(each) for each in new]

    def _is_complete(self, portion: ReadyPortion) -> bool:
        come = all(portion.numbers <= numbers for numbers in self._arrived.values())
        return come and portion not in self._stepped

    def _contributions(self, portion: ReadyPortion) -> list[Contribution]:
        total = sum(self._said[worker].weight for worker in sorted(self._said))
        return [
            Contribution(worker, self._said[worker].weight / total, portion.others)
            for worker in sorted(self._said)
        ]

    def portions(self, contributions: Sequence[Contribution]) -> Iterator[Sequence[Contribution]]:
        """All of these at once, or, where the step has been begun, what is left of them."""
        if not self._stepped:
            yield contributions
            return
        for portion in self._portions:
            if portion not in self._stepped:
                others = portion.others
                yield [
                    replace(c, absent=c.absent | others if c.absent else others)
                    for c in contributions
                ]

    @contextmanager
    def ending(self, pushes: Mapping[int, Push]) -> Iterator[None]:
        """The step ends with these.

        Raises:
            UserError: if something was stepped in trust, and a worker does not keep its promise.
        """
        for worker, said in self._said.items() if self._stepped else ():
            push = pushes.get(worker)
            if push is None or (push.optimizer, push.weight) != (said.optimizer, said.weight):
                raise UserError(_broken(worker, "pushes something else"))
            late = push.groups or push.writes or push.members or push.state
            if late or push.clip is not None or push.veto or push.averaged:
                raise UserError(_broken(worker, "changes the step after it"))
        yield
        self._said.clear()
        self._arrived.clear()
        self._stepped.clear()


def divided(members: Members, slots: Sequence[Slot]) -> list[ReadyPortion]:
    """Neighbours together, of nearly equal size."""
    numbers = sorted(number for group in members for number in group)
    whole = frozenset(numbers)
    least = sum(slots[number].numel for number in numbers) / PORTIONS
    found: list[ReadyPortion] = []
    inside: list[int] = []
    size = 0
    for number in numbers:
        inside.append(number)
        size += slots[number].numel
        if size >= least or number == numbers[-1]:
            found.append(ReadyPortion(frozenset(inside), whole.difference(inside)))
            inside, size = [], 0
    return found


def _broken(worker: int, what: str) -> str:
    return (
        f"worker {worker} has announced gradients while backward ran (overlap_update), and {what}: "
        "user code has changed a gradient, a parameter or the optimizer in the middle of a step, "
        "or backward reaches a parameter twice (checkpoint with use_reentrant=True); use "
        "overlap_update=false"
    )
