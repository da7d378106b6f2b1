"""All optimizers of a module, stepped with the workers' pushes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hybridtrain.engine.memory import Packed, Store, pack, unpack
from hybridtrain.engine.memory.arena import SharedState
from hybridtrain.engine.memory.layout import as_parameter
from hybridtrain.engine.memory.scratch_file import fill
from hybridtrain.engine.protocol.events import Arrivals
from hybridtrain.engine.protocol.messages import (
    OWN_STEPS,
    Changes,
    Clip,
    ExchangePush,
    GradientPush,
    Push,
    StepNumber,
)
from hybridtrain.engine.updates.base import Again, Contribution, Evaluation, StepInput, Update
from hybridtrain.engine.updates.factory import build_update, for_sparse
from hybridtrain.engine.updates.groups import Groups, Members, merged, numbers_of
from hybridtrain.engine.updates.mean import merge_mixed
from hybridtrain.engine.updates.shared_state import SharedStateOptimizer
from hybridtrain.engine.updates.staleness.correction import LateGradients
from hybridtrain.engine.updates.thread_pool import Pool
from hybridtrain.errors import UserError

States = dict[int, dict[str, Any]]  # by slot number


class OptimizerFailed(UserError):
    """An optimizer's own code raised; ``__cause__`` is what it raised."""


class Stepped(NamedTuple):
    """The result of a step: the workers whose gradients were applied, or one more evaluation.

    ``news``: hyper-parameters that the optimizer has changed itself; ``step_number``: for a
    worker that makes the step itself.
    """

    workers: tuple[int, ...]
    again: Again | None = None
    news: Groups | None = None
    step_number: StepNumber | None = None


class Optimizers:
    """The module's optimizers, by number.

    Args:
        updates: in the order of ``configure_optimizers``.
        store: the shared rows.
        pool: the threads that step.
    """

    def __init__(
        self, updates: Sequence[Update] = (), store: Store | None = None, pool: Pool | None = None
    ) -> None:
        self._updates = list(updates)
        self._memory = None if store is None or pool is None else (store, pool)
        self._initial_groups = [update.members for update in self._updates]
        self._worker_groups: dict[tuple[int, int], Members] = {}  # by worker, optimizer
        self._told: dict[tuple[int, int], Groups] = {}  # their changes so far, likewise
        self._led_by: dict[int, int] = {}  # optimizer -> the worker whose hyper-parameters it has
        self._departed_states: list[States] = [{} for _ in self._updates]
        self._accumulated: dict[int, Accumulator] = {}  # by optimizer
        # Of the last plain round: update, weights, turn, contributions.
        self._cached: tuple[Update | None, dict[int, float], int, list[Contribution]]
        self._cached = (None, {}, 0, [])
        self.late = LateGradients()

    def correct_by(self, late: LateGradients) -> None:
        """Correct late gradients by this."""
        self.late = late

    @property
    def updates(self) -> tuple[Update, ...]:
        """In their order."""
        return tuple(self._updates)

    @property
    def under_way(self) -> int | None:
        """The optimizer whose step needs one more evaluation, if any."""
        return next((n for n, update in enumerate(self._updates) if update.under_way), None)

    def objection(self, worker: int, push: Push) -> str | None:
        """Why this push cannot be applied; ``None`` if it can."""
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
        """The groups that this worker has, as of its push."""
        told = push.changes.members
        return self._known(worker, push.optimizer) if told is None else told

    def _known(self, worker: int, number: int) -> Members:
        return self._worker_groups.get((worker, number), self._initial_groups[number])

    # ---- gradient accumulation ------------------------------------------------------------------

    def hold(self, worker: int, push: Push) -> bool:
        """Accumulate the worker's gradient for the next step; whether there was one."""
        number = push.optimizer
        with self._naming(number):
            self._apply_changes(worker, number, push.changes)
        update = self._updates[number]
        if push.weight <= 0 or _vetoes(push):
            return False
        if number not in self._accumulated:
            assert self._memory is not None, "what is put aside has a place"
            numbers = frozenset(numbers_of(update.members))
            check_held(self._accumulated, number, numbers)
            self._accumulated[number] = Accumulator(self._memory[0], numbers)
        contribution = self._contribution(worker, push, update)
        if update.hold(contribution):
            return True
        factor = self.late.correct(contribution, update.members)
        factor /= push.weight if update.sums else 1.0  # a sum counts none by its samples
        self._accumulated[number].add(worker, push, contribution.absent, factor)
        return True

    @property
    def holding(self) -> tuple[int, ...]:
        """The optimizers with accumulated gradients."""
        return tuple(self._accumulated)

    # ---- one round ------------------------------------------------------------------------------

    def can_begin(self, pushes: Sequence[Push]) -> bool:
        """Whether a step of these may begin before their rows are complete: it can be undone."""
        number = pushes[0].optimizer
        update = self._updates[number] if 0 <= number < len(self._updates) else None
        if update is None or not update.can_undo or self._accumulated or self.late.active:
            return False
        return all(push.optimizer == number and _is_plain(push) for push in pushes)

    def undo(self, number: int) -> None:
        """Undo the optimizer's last step, which was begun early."""
        self._updates[number].undo()
        if self._memory is not None:
            self._memory[0].moves.all_of(())

    def step(
        self,
        pushes: Mapping[int, Push],
        number: int | None = None,
        arrivals: Arrivals | None = None,
        lead: int | None = None,
        version: int = 0,
    ) -> Stepped:
        """Step one optimizer with these pushes and its accumulated gradients.

        ``lead``: the worker whose hyper-parameters it has, if they differ between workers (a
        schedule that follows each one's own loss); else whoever has changed them last. ``version``:
        the number of updates before this one.

        Pushes of weight 0 have no share, but their changes of hyper-parameters and groups are
        applied: a worker sends a change only once. A single veto skips the step, unless it is one
        more evaluation.
        """
        number = next(iter(pushes.values())).optimizer if number is None else number
        vetoed = any(map(_vetoes, pushes.values())) and self.under_way is None
        counted = {w: push for w, push in pushes.items() if push.weight > 0 and not vetoed}
        with torch.no_grad(), self._naming(number):
            for worker, push in pushes.items():
                self._apply_changes(worker, number, push.changes, lead in (None, worker))
            if lead is not None:
                self._follow(lead, number)
            update = self._updates[number]
            held = self._accumulated.pop(number, None)
            if not counted and not update.under_way and held is None:
                return Stepped(())
            if own := [w for w, push in counted.items() if isinstance(push, OWN_STEPS)]:
                return self._number_step(own[0], counted[own[0]], update)
            clip = next(map(_clip_of, counted.values()), held.clip if held else None)
            contributions, rate = self._contributions(counted, update, held)
            if rate == 0.0:
                return Stepped(())
            if self._memory is not None:
                update = self._updates[number] = for_sparse(update, contributions, *self._memory)
            evaluation = evaluation_of(counted, held)
            given = StepInput(contributions, clip, evaluation, rate, arrivals, version)
            with self.late.watch(contributions, update.members):
                again = update.step(given)
            if self._memory is not None:  # for workers with their own copies
                self._memory[0].moves.note(numbers_of(update.members), update.moved)
        return Stepped(tuple(counted), again, update.news, _number_of(update))

    def _number_step(self, worker: int, push: Push, update: Update) -> Stepped:
        """The worker makes the step itself; count it, and number it if the state is shared."""
        if not isinstance(update, SharedStateOptimizer):
            return Stepped((worker,))
        steps = update.number_step(self._absent(worker, push, update))
        return Stepped((worker,), step_number=StepNumber(update.lent.generation, steps))

    def lent(self, number: int) -> SharedState:
        """The place of an optimizer's state that workers step themselves."""
        update = self._updates[number]
        assert isinstance(update, SharedStateOptimizer), "nothing is lent"
        return update.lent

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Name the optimizer in exceptions of its own code."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            who = f"optimizer {number} ({self._updates[number].name})"
            error.add_note(f"This happened in the process that holds the parameters, in {who}.")
            raise OptimizerFailed(f"{who} raised {type(error).__name__}: {error}") from error

    def apply_changes(self, worker: int, number: int, changes: Changes) -> None:
        """Apply the changes of an optimizer without a step."""
        with torch.no_grad(), self._naming(number):
            self._apply_changes(worker, number, changes)

    def _follow(self, lead: int, number: int) -> None:
        """Another worker led before: set all that this one has changed."""
        groups, former = self._told.get((lead, number)), self._led_by.get(number, lead)
        self._led_by[number] = lead
        if former != lead and groups and self._known(lead, number) == self._updates[number].members:
            self._updates[number].set_groups(groups)

    def _apply_changes(
        self, worker: int, number: int, changes: Changes, counts: bool = True
    ) -> None:
        """``counts``: or the groups are only remembered."""
        groups, members = changes.groups, changes.members
        if groups is not None:
            before = self._told.get((worker, number)) if members is None else None
            self._told[worker, number] = merged(before, groups)
        if members is not None:
            self._cached = (None, {}, 0, [])
            self._worker_groups[worker, number] = members
            if members != self._updates[number].members:
                assert self._memory is not None, "what steps has a store"
                old, left = self._updates[number], self._departed_states[number]
                made = regroup(old, groups or (), members, left, *self._memory)
                self._updates[number] = made
        if changes.state is not None and self._memory is not None:
            self._updates[number] = with_state(self._updates[number], changes.state, *self._memory)
        current = self._updates[number]
        if counts and groups is not None and self._known(worker, number) == current.members:
            current.set_groups(groups)

    def _contributions(
        self, pushes: Mapping[int, Push], update: Update, held: Accumulator | None
    ) -> tuple[list[Contribution], float]:
        """Shares by samples (one row for all if gradients are averaged already), and a rate factor.

        Staleness factors shorten the step by the learning rate, not by the shares, which sum to 1
        (unless the update sums): an optimizer like Adam ignores the length of the gradient.
        """
        plain = not update.wants_staleness and not update.sums
        usual = held is None and not self.late.active and plain
        apart = not usual or update.merge is not None
        if apart and any(push.row.within is not None for push in pushes.values()):
            raise UserError(
                f"host_sums was given, but {update.name} needs the gradient of each worker; leave "
                "it out"
            )
        if usual and all(map(is_dense, pushes.values())):
            return self._plain_contributions(pushes, update), 1.0
        weights = _weights(pushes)
        made = {w: self._contribution(w, pushes[w], update) for w in weights}
        if pushes and all(push.row.averaged for push in pushes.values()):
            return [replace(next(iter(made.values())), merged=True)], 1.0
        factors = {w: self.late.correct(each, update.members) for w, each in made.items()}
        if update.sums:
            aside = [held.contribution(1.0)] if held is not None and held.weight else []
            return [*aside, *(replace(made[w], share=factors[w]) for w in made)], 1.0
        counts = {w: weights[w] * factor for w, factor in factors.items()}
        weight = sum(weights.values()) + (held.weight if held else 0.0)
        total = sum(counts.values()) + (held.count if held else 0.0)
        if not total:
            return [], 0.0 if weight else 1.0
        aside = [held.contribution(total)] if held else []
        shared = [replace(each, share=counts[w] / total) for w, each in made.items()]
        return aside + shared, total / weight

    def _plain_contributions(
        self, pushes: Mapping[int, Push], update: Update
    ) -> list[Contribution]:
        """Contributions of plain gradients; reused from the last round if all weights are equal."""
        weights, turn = _weights(pushes), self._row_of(0)
        if (update, weights, turn) != self._cached[:3]:
            total = sum(weights.values())
            made = [(w, self._contribution(w, pushes[w], update)) for w in weights]
            shared = [replace(each, share=weights[w] / total) for w, each in made]
            self._cached = (update, weights, turn, shared if total else [])
        return self._cached[3]

    def _row_of(self, worker: int) -> int:
        """The number of the row that holds the worker's gradient."""
        return worker if self._memory is None else self._memory[0].row_of(worker)

    def _contribution(self, worker: int, push: Push, update: Update) -> Contribution:
        packed = {each.number: each for each in push.row.packed}
        staleness = self.late.age(worker) if update.wants_staleness else 0
        row, absent = self._row_of(worker), self._absent(worker, push, update)
        return Contribution(row, 1.0, absent, packed, staleness)

    def _absent(self, worker: int, push: Push, update: Update) -> frozenset[int]:
        """Absent parameters, with those that the worker does not know to be in the optimizer."""
        known = self.members(worker, push)
        if known == update.members:
            return frozenset(push.row.absent)
        joined = set(numbers_of(update.members)) - set(numbers_of(known))
        return frozenset(push.row.absent) | joined

    def read(self, worker: int) -> None:
        """The worker reads the current masters."""
        for update in self._updates:
            update.read(worker)

    def show_trial(self, worker: int) -> None:
        """The worker's parameters become the point at which it is to evaluate the loss."""
        for number, point in [each for update in self._updates for each in update.trial.items()]:
            assert self._memory is not None, "what is evaluated has a place"
            store = self._memory[0]
            store.parameter(worker, store.layout.slots[number]).copy_(point)

    # ---- state ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make all steps that were put off, before parameters are read."""
        for update in self._updates:
            if update.puts_off:
                with torch.no_grad():
                    update.settle()
                if self._memory is not None:
                    self._memory[0].moves.all_of(numbers_of(update.members))

    def dump(self, place: str = "") -> bytes:
        """The optimizers' states for ``torch.load``; empty if they were written to ``place``."""
        return fill(place, [update.state() for update in self._updates])

    def close(self) -> None:
        """Free what the updates hold."""
        for update in self._updates:
            update.close()


def _number_of(update: Update) -> StepNumber | None:
    """The number of a step that the server has made, for workers that share the state."""
    lent = update.lent if isinstance(update, SharedStateOptimizer) else None
    return None if lent is None else StepNumber(lent.generation)


def is_dense(push: Push) -> bool:
    """Whether the worker's row holds a whole dense gradient, weighted by the push."""
    return not (push.row.absent or push.row.packed or push.row.averaged)


def _is_plain(push: Push) -> bool:
    """Whether the push brings a whole gradient and nothing that cannot be undone."""
    changes, clip = push.changes, _clip_of(push)
    said = push.writes or changes.members is not None or changes.state is not None
    by_norm = clip is not None and clip.algorithm != "value"
    whole = isinstance(push, GradientPush) and is_dense(push) and push.row.encoded is None
    return whole and push.weight > 0 and not (said or by_norm or _vetoes(push))


def _weights(pushes: Mapping[int, Push]) -> dict[int, float]:
    """The workers whose rows hold all of these, and what each row counts for."""
    weights = {w: 0.0 for w, push in pushes.items() if push.row.within in (None, w)}
    for worker, push in pushes.items():
        weights[worker if push.row.within is None else push.row.within] += push.weight
    return weights


def _vetoes(push: Push) -> bool:
    return isinstance(push, GradientPush) and push.veto


def _clip_of(push: Push) -> Clip | None:
    return push.clip if isinstance(push, GradientPush) else None


def evaluation_of(pushes: Mapping[int, Push], held: Accumulator | None = None) -> Evaluation:
    """The mean of the losses, weighted by samples."""
    losses = [(push.loss, push.weight) for push in pushes.values() if push.loss is not None]
    losses += [] if held is None else held.losses
    total = sum(weight for _, weight in losses)
    mean = sum(loss * weight for loss, weight in losses) / total if losses else None
    gradients = [push for push in pushes.values() if isinstance(push, GradientPush)]
    return Evaluation(mean, any(push.repeatable for push in gradients))


# ---- groups and states that change during a run -------------------------------------------------


def regroup(
    update: Update, groups: Groups, members: Members, left: States, store: Store, pool: Pool
) -> Update:
    """The same optimizer over other groups (unfrozen layers); parameters keep their state.

    Args:
        update: the one to be replaced.
        groups: all hyper-parameters of the new groups.
        members: slot numbers of their parameters.
        left: states of parameters that have left the optimizer, kept for their return as torch
            does. Changed in place.
        store: holds the masters.
        pool: the threads that step.
    """
    optimizer, parameters = update.release_optimizer()
    update.close()
    for number, parameter in parameters.items():
        if parameter in optimizer.state:
            left[number] = optimizer.state.pop(parameter)
    numbers = numbers_of(members)
    for number in numbers:
        if number not in parameters:
            parameters[number] = as_parameter(store.master(store.layout.slots[number]))
        if number in left:
            optimizer.state[parameters[number]] = left.pop(number)
    # The dictionaries stay the same objects: an optimizer that wraps another shares them with it.
    known = {id(g["params"][0]): g for g in optimizer.param_groups if g["params"]}
    optimizer.param_groups[:] = [
        _filled(known, [parameters[number] for number in inside], group)
        for group, inside in zip(groups, members, strict=True)
    ]
    return build_update(optimizer, numbers, store, pool, update.merge, update.state_dtype)


def with_state(update: Update, payload: bytes, store: Store, pool: Pool) -> Update:
    """The same optimizer with another state, by slot number in ``payload``."""
    optimizer, parameters = update.release_optimizer()
    update.close()
    states = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
    optimizer.state.clear()
    optimizer.state.update({parameters.get(key, key): state for key, state in states.items()})
    numbers, kept = numbers_of(update.members), update.state_dtype
    return build_update(optimizer, numbers, store, pool, update.merge, kept)


def _filled(
    known: dict[int, dict[str, Any]], inside: list[torch.nn.Parameter], group: dict[str, Any]
) -> dict[str, Any]:
    filled = known.pop(id(inside[0]), {}) if inside else {}
    filled.clear()
    filled.update({"params": inside} | group)
    return filled


# ---- gradient accumulation ----------------------------------------------------------------------
# Gradient accumulation on the server, for policies that release workers before the update.
# Legend: P elements of one dtype's buffer.


@dataclass
class Accumulator:
    """The weighted sum of one optimizer's gradients.

    Args:
        store: the shared rows; the last one holds the sum.
        numbers: the optimizer's parameters.
    """

    store: Store
    numbers: frozenset[int]
    weight: float = 0.0
    count: float = 0.0  # the weights, each times its staleness factor
    clip: Clip | None = None
    _unit: float = 1.0  # what a weight of 1 stands for in the sum
    losses: list[tuple[float, float]] = field(default_factory=list)  # of evaluations, and weights
    _present: set[int] = field(default_factory=set)
    _packed: dict[int, Packed] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, worker: int, push: Push, absent: frozenset[int], factor: float = 1.0) -> None:
        """Add the worker's row, times its weight and this factor."""
        count = push.weight * factor
        if not self._present and count > 0 and torch.float16 in self.store.gradients[worker]:
            self._unit = count  # or gradients times samples would soon be too large
        whole = len(self.numbers) == len(self.store.layout.slots)
        dense = whole and not absent and not push.row.packed and not self._packed
        if dense and len(self._present) in (0, len(self.numbers)):
            self._add_rows(worker, count / self._unit)
        else:
            packed = {each.number: each for each in push.row.packed}
            for number in self.numbers - absent:
                self._add_one(worker, number, packed.get(number), count / self._unit)
        self._present |= self.numbers - absent
        self.weight += push.weight
        self.count += count
        self.clip = _clip_of(push) or self.clip
        if push.loss is not None and isinstance(push, ExchangePush):
            self.losses.append((push.loss, push.weight))

    def _add_rows(self, worker: int, weight: float) -> None:
        """Add whole buffers: no gradient is absent or sparse."""
        for dtype, held in self.store.gradients[self.store.held].items():  # (P,)
            row = self.store.gradients[worker][dtype]
            if self._present:
                held.add_(row, alpha=weight)
            else:
                held.copy_(row).mul_(weight)  # the row may be narrower

    def _add_one(self, worker: int, number: int, packed: Packed | None, weight: float) -> None:
        slot = self.store.layout.slots[number]
        row, place = self.store.gradient(worker, slot), self.store.gradient(self.store.held, slot)
        parts, shares = [row if packed is None else unpack(packed, row)], [weight]
        if number in self._present:
            known = self._packed.pop(number, None)
            parts.insert(0, place.clone() if known is None else unpack(known, place.clone()))
            shares.insert(0, 1.0)
        merged = merge_mixed(parts, shares, lambda: place)
        if merged.is_sparse:
            self._packed[number] = pack(number, merged.coalesce(), place)
        elif merged.data_ptr() != place.data_ptr():
            place.copy_(merged)

    def contribution(self, total: float) -> Contribution:
        """The sum as a contribution; ``total``: the weight of all contributions of the update."""
        return Contribution(
            self.store.held, self._unit / total, self.numbers - self._present, dict(self._packed)
        )


def check_held(held: dict[int, Accumulator], number: int, numbers: frozenset[int]) -> None:
    """Refuse to accumulate for two optimizers of the same parameters.

    Raises:
        UserError: naming them.
    """
    for other, each in held.items():
        if other != number and each.numbers & numbers:
            raise UserError(
                f"optimizers {other} and {number} step the same parameters, whose gradients cannot "
                "be put aside for both; use a policy in which workers wait for their update "
                "(hybrid, backup, k_async) or async"
            )
