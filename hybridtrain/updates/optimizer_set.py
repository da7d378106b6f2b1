"""All optimizers of a module, stepped with what the workers have pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.memory.lending import SharedState
from hybridtrain.memory.scratch_file import fill
from hybridtrain.protocol.messages import Push, StepNumber
from hybridtrain.updates.accumulator import Accumulator, check_held
from hybridtrain.updates.base import Update
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.evaluation import Again, Evaluation
from hybridtrain.updates.factory import for_sparse
from hybridtrain.updates.groups import Groups, Members
from hybridtrain.updates.regroup import States, regroup, with_state
from hybridtrain.updates.shared_state import SharedStateOptimizer
from hybridtrain.updates.staleness.late_gradients import LateGradients
from hybridtrain.updates.thread_pool import Pool


class OptimizerFailed(UserError):
    """An optimizer's own code raised; ``__cause__`` is what it raised."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What came of a round: who counted, or that the step needs one more evaluation.

    ``news``: hyper-parameters that the optimizer has changed by itself; ``turn``: what a worker
    needs that steps itself.
    """

    workers: tuple[int, ...]
    again: Again | None = None
    news: Groups | None = None
    turn: StepNumber | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet: what :meth:`Optimizers.step` may answer in place of what came of a round.

    The contributions have been read, so their rows may be written again. The masters are those of
    the version before until ``finish`` is called, once, which moves them; it may raise what a step
    may raise.
    """

    finish: Callable[[], Stepped]


class Optimizers:
    """The module's optimizers, by number.

    Args:
        updates: in the order in which ``configure_optimizers`` has returned them.
        store: the shared rows.
        pool: who does the arithmetic.
    """

    def __init__(
        self, updates: Sequence[Update] = (), store: Store | None = None, pool: Pool | None = None
    ) -> None:
        self._updates = list(updates)
        self._place = None if store is None or pool is None else (store, pool)
        self._first = [update.members for update in self._updates]
        self._told: dict[tuple[int, int], Members] = {}  # (worker, optimizer) -> its groups
        self._left: list[States] = [{} for _ in self._updates]
        self._held: dict[int, Accumulator] = {}  # by optimizer
        self._usual: tuple[Update | None, dict[int, float], list[Contribution]] = (None, {}, [])
        self.late = LateGradients()

    @property
    def updates(self) -> tuple[Update, ...]:
        """In their order."""
        return tuple(self._updates)

    @property
    def under_way(self) -> int | None:
        """The optimizer that is in the middle of a step, if there is one."""
        return next((n for n, update in enumerate(self._updates) if update.under_way), None)

    def objection(self, worker: int, push: Push) -> str | None:
        """Why this push cannot be served, if so."""
        number, under_way = push.optimizer, self.under_way
        if not 0 <= number < len(self._updates):
            return f"worker {worker} steps optimizer {number}, but {len(self._updates)} are known"
        if under_way is not None and under_way != number:
            return (
                f"worker {worker} steps optimizer {number} while optimizer {under_way} evaluates "
                "its closure; a closure must not step another optimizer"
            )
        if under_way is not None and self.members(worker, push) != self._updates[number].members:
            return f"the parameters of optimizer {number} have changed in the middle of its step"
        return None

    def members(self, worker: int, push: Push) -> Members:
        """The groups as this worker has them, when it pushes."""
        known = self._told.get((worker, push.optimizer), self._first[push.optimizer])
        return known if push.members is None else push.members

    # ---- what is put aside ----------------------------------------------------------------------

    def hold(self, worker: int, push: Push) -> bool:
        """Put the worker's contribution aside for the next step; whether there was one."""
        number = push.optimizer
        with self._naming(number):
            self._hear(worker, push)
        update = self._updates[number]
        if push.weight <= 0 or push.veto:
            return False
        if number not in self._held:
            assert self._place is not None, "what is put aside has a place"
            numbers = _numbers(update.members)
            check_held(self._held, number, numbers)
            self._held[number] = Accumulator(self._place[0], numbers)
        contribution = self._contribution(worker, push, update)
        factor = self.late.correct(contribution, update.members)
        self._held[number].add(worker, push, contribution.absent, factor)
        return True

    @property
    def holding(self) -> tuple[int, ...]:
        """The optimizers for which something is put aside."""
        return tuple(self._held)

    # ---- one round ------------------------------------------------------------------------------

    def step(self, pushes: Mapping[int, Push], number: int | None = None) -> Stepped | Pending:
        """Apply one round's pushes, all for one optimizer, and what is held for it.

        Those that abstain have no share, but what they tell of hyper-parameters and groups does
        count: a worker tells a change only once. A single veto leaves the step out, but not in the
        middle of one.
        """
        number = next(iter(pushes.values())).optimizer if number is None else number
        vetoed = any(push.veto for push in pushes.values()) and self.under_way is None
        counted = {w: push for w, push in pushes.items() if push.weight > 0 and not vetoed}
        with torch.no_grad(), self._naming(number):
            for worker, push in pushes.items():
                self._hear(worker, push)
            update = self._updates[number]
            held = self._held.pop(number, None)
            if not counted and not update.under_way and held is None:
                return Stepped(())
            if own := [worker for worker, push in counted.items() if push.own]:
                return self._ticket(own[0], counted[own[0]], update)
            clip = next((push.clip for push in counted.values()), held.clip if held else None)
            contributions, rate = self._contributions(counted, update, held)
            if rate == 0.0:
                return Stepped(())
            if self._place is not None:
                update = self._updates[number] = for_sparse(update, contributions, *self._place)
            with self.late.watch(contributions, update.members):
                again = update.step(contributions, clip, evaluation_of(counted), rate)
            self._note_moves(update)
        turn = (
            StepNumber(update.lent.generation) if isinstance(update, SharedStateOptimizer) else None
        )
        return Stepped(tuple(counted), again, update.news, turn)

    def _note_moves(self, update: Update) -> None:
        """What the update has just moved, workers with parameters of their own lack."""
        if self._place is not None:
            self._place[0].moves.note(_numbers(update.members), update.moved)

    def _ticket(self, worker: int, push: Push, update: Update) -> Stepped:
        """The worker steps; here the step is only counted, unless the state does that itself."""
        if not isinstance(update, SharedStateOptimizer):
            return Stepped((worker,))
        steps = update.ticket(self._absent(worker, push, update))
        return Stepped((worker,), turn=StepNumber(update.lent.generation, steps))

    def lent(self, number: int) -> SharedState:
        """Where an optimizer's state lies that workers step themselves."""
        update = self._updates[number]
        assert isinstance(update, SharedStateOptimizer), "nothing is lent"
        return update.lent

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Say which optimizer it was that has raised."""
        try:
            yield
        except UserError:
            raise  # said already, and by us
        except Exception as error:
            who = f"optimizer {number} ({self._updates[number].name})"
            error.add_note(f"This happened in the process that holds the parameters, in {who}.")
            raise OptimizerFailed(f"{who} raised {type(error).__name__}: {error}") from error

    def hear(self, worker: int, push: Push) -> None:
        """What a push that does not count tells of groups and hyper-parameters does count."""
        with torch.no_grad(), self._naming(push.optimizer):
            self._hear(worker, push)

    def _hear(self, worker: int, push: Push) -> None:
        """Take over what the worker says of groups and hyper-parameters."""
        number = push.optimizer
        if push.members is not None:
            self._usual = (None, {}, [])
            self._told[worker, number] = push.members
            if push.members != self._updates[number].members:
                self._regroup(number, push.groups or (), push.members)
        if push.state is not None and self._place is not None:
            self._updates[number] = with_state(self._updates[number], push.state, *self._place)
        current = self._updates[number]
        if push.groups is not None and self.members(worker, push) == current.members:
            current.set_groups(push.groups)

    def _regroup(self, number: int, groups: Groups, members: Members) -> None:
        assert self._place is not None, "what steps has a store"
        old, left = self._updates[number], self._left[number]
        self._updates[number] = regroup(old, groups, members, left, *self._place)

    def _contributions(
        self, pushes: Mapping[int, Push], update: Update, held: Accumulator | None
    ) -> tuple[list[Contribution], float]:
        """Everybody's share by samples, or one row for all where gradients are averaged already.

        Also what the step's learning rates are multiplied with, as late contributions may count
        less. Shares sum to 1 (but where contributions add up), so that an optimizer which does not
        care how long a gradient is makes a shorter step, too.
        """
        plain = not update.wants_staleness and not update.sums
        usual = held is None and not self.late.active and plain
        if usual and all(map(is_usual, pushes.values())):
            return self._usual_contributions(pushes, update), 1.0
        made = {w: self._contribution(w, push, update) for w, push in pushes.items()}
        if pushes and all(push.averaged for push in pushes.values()):
            return [next(iter(made.values()))], 1.0
        if update.sums:
            return list(made.values()), 1.0
        factors = {w: self.late.correct(each, update.members) for w, each in made.items()}
        counts = {w: pushes[w].weight * factor for w, factor in factors.items()}
        weight = sum(push.weight for push in pushes.values()) + (held.weight if held else 0.0)
        total = sum(counts.values()) + (held.count if held else 0.0)
        if not total:
            return [], 0.0 if weight else 1.0
        aside = [held.contribution(total)] if held else []
        shared = [replace(each, share=counts[w] / total) for w, each in made.items()]
        return aside + shared, total / weight

    def _usual_contributions(
        self, pushes: Mapping[int, Push], update: Update
    ) -> list[Contribution]:
        """Where gradients are all that was pushed, and most rounds are like the one before."""
        weights = {worker: push.weight for worker, push in pushes.items()}
        if (update, weights) != self._usual[:2]:
            total = sum(weights.values())
            made = [(w, self._contribution(w, push, update)) for w, push in pushes.items()]
            shared = [replace(each, share=weights[w] / total) for w, each in made]
            self._usual = (update, weights, shared if total else [])
        return self._usual[2]

    def _contribution(self, worker: int, push: Push, update: Update) -> Contribution:
        packed = {each.number: each for each in push.packed}
        staleness = self.late.staleness(worker) if update.wants_staleness else 0
        return Contribution(worker, 1.0, self._absent(worker, push, update), packed, staleness)

    def _absent(self, worker: int, push: Push, update: Update) -> frozenset[int]:
        """Also what the worker does not know yet that it belongs to the optimizer."""
        known = self.members(worker, push)
        if known == update.members:
            return frozenset(push.absent)
        return frozenset(push.absent) | _numbers(update.members) - _numbers(known)

    def read(self, worker: int) -> None:
        """The worker reads the masters as they are now."""
        for update in self._updates:
            update.read(worker)

    # ---- state ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Somebody is going to look at parameters: move what was put off."""
        for update in self._updates:
            if update.puts_off:
                with torch.no_grad():
                    update.settle()
                if self._place is not None:
                    self._place[0].moves.all_of(_numbers(update.members))

    def dump(self, place: str = "") -> bytes:
        """What each optimizer would save, for ``torch.load``; nothing, if it lies in ``place``."""
        return fill(place, [update.state() for update in self._updates])

    def close(self) -> None:
        """End what the updates hold."""
        for update in self._updates:
            update.close()


def _numbers(members: Members) -> frozenset[int]:
    return frozenset(number for group in members for number in group)


def is_usual(push: Push) -> bool:
    """Whether the whole gradient lies in the worker's row, and counts for what the push weighs."""
    return not (push.absent or push.packed or push.averaged)


def evaluation_of(pushes: Mapping[int, Push]) -> Evaluation:
    """The mean of the losses, weighted by samples."""
    losses = [(push.loss, push.weight) for push in pushes.values() if push.loss is not None]
    total = sum(weight for _, weight in losses)
    mean = sum(loss * weight for loss, weight in losses) / total if losses else None
    return Evaluation(mean, any(push.repeatable for push in pushes.values()))
