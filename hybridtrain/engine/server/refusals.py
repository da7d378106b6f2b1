"""Error texts for deadlocks and invalid pushes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from hybridtrain.engine.protocol.facts import (
    Accumulate,
    Apply,
    Drop,
    Release,
    ReleaseThenApply,
    SetTimer,
)
from hybridtrain.engine.protocol.messages import Push
from hybridtrain.engine.updates import Optimizers
from hybridtrain.util.option_types import as_typed, shown


def missed(worker: int, waiting: Iterable[int]) -> str:
    """A worker has finished, and others wait for it in a meeting."""
    return (
        f"worker {worker} has finished while worker {_numbers(waiting)} waits for all to meet; all "
        "workers must take the same path (a barrier or a reduction that only some reach?)"
    )


def stuck(policy: object, waiting: Sequence[tuple[str, Iterable[int]]]) -> str:
    """All workers wait, and none can free them. ``waiting``: for what, and which workers."""
    who = [f"worker {_numbers(some)} for {what}" for what, some in waiting if some]
    return (
        f"policy {as_typed(policy)} would wait for ever: all who are left wait "
        f"({'; '.join(who)}), and nobody is left to free them; this is an error of the policy, or "
        "of a worker that left"
    )


def standing(for_s: float, waiting: Mapping[int, str], away: Sequence[int]) -> str:
    """The run stands still. ``waiting``: worker -> what it waits for."""
    who = [f"worker {worker} waits for {what}" for worker, what in waiting.items()]
    who += [f"worker {worker} is to come back" for worker in away]
    return (
        f"the run stands still: nothing has happened for {for_s:.0f} s, nothing is due, and all "
        f"who are left wait ({'; '.join(who)}); this is an error of hybridtrain, please report it"
    )


_NAMES_WORKERS = (Apply, Accumulate, Drop, Release, ReleaseThenApply)


def misordered(
    policy: object,
    order: object,
    pushed: Container[int],
    settled: Container[int],
    ready: Container[int],
) -> str | None:
    """Why this order of the policy cannot be carried out, if so.

    ``pushed``: workers whose contributions wait; ``settled``: those of them that an order has
    applied, accumulated or dropped; ``ready``: workers that wait to begin a mini-batch.
    """
    if isinstance(order, SetTimer):
        return None
    if not isinstance(order, _NAMES_WORKERS) or not isinstance(order.workers, (tuple, list)):
        return (
            f"policy {as_typed(policy)} returned {shown(order)}; it must return a list of "
            "Apply(workers), Accumulate(workers), Drop(workers), Release(workers), "
            "ReleaseThenApply(workers) and SetTimer(at_s), where workers are a tuple"
        )
    if isinstance(order, Release):
        wrong = [each for each in order.workers if each not in settled and each not in ready]
        why = "does not wait, or its contribution was not applied, accumulated or dropped before"
    else:
        wrong = [each for each in order.workers if each not in pushed or each in settled]
        why = "has no contribution, or it was applied, accumulated or dropped before"
    if not wrong:
        return None
    return f"policy {as_typed(policy)} ordered {order}, but worker {_numbers(wrong)} {why}"


def objection(
    worker: int, push: Push, others: Mapping[int, Push], optimizers: Optimizers
) -> str | None:
    """Why this push is invalid, or contradicts those of ``others`` in the same step, if so."""
    other = next((p.optimizer for p in others.values()), push.optimizer)
    if other != push.optimizer:
        return (
            f"worker {worker} steps optimizer {push.optimizer} while others step optimizer "
            f"{other}; in lock-step all workers must step their optimizers in the same order"
        )
    if (reason := optimizers.objection(worker, push)) is not None or not others:
        return reason
    first, pushed = next(iter(others.items()))  # the others agree among themselves
    behind, theirs = getattr(push, "step", 0), getattr(pushed, "step", 0)
    if behind != theirs:
        return (
            f"worker {worker} hands over behind its step {behind}, worker {first} behind step "
            f"{theirs}; in lock-step all do so behind the same one: where a learning rate that "
            "falls decides (at: first_decay), it must fall in the same step of all workers (log "
            "what ReduceLROnPlateau monitors with sync_dist=True)"
        )
    if optimizers.members(first, pushed) == optimizers.members(worker, push):
        return None
    return (
        f"the parameter groups of optimizer {push.optimizer} differ between worker {worker} and "
        f"worker {first}; unfreeze, add or remove parameters in the same step of all workers (the "
        "same epoch, the same global_step)"
    )


def _numbers(workers: Iterable[int]) -> str:
    return ", ".join(str(each) for each in sorted(workers))
