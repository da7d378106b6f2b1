"""What workers have pushed, sorted, and what they hear of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hybridtrain.protocol.messages import DrawnBatch, Push, Released, Ticket
from hybridtrain.protocol.spans import total
from hybridtrain.updates import Stepped


def by_optimizer(
    pushes: Mapping[int, Push], holding: Iterable[int]
) -> dict[int, Mapping[int, Push]]:
    """Some may be a step ahead of the others; and what is held may be for any optimizer."""
    numbers = {*holding, *(push.optimizer for push in pushes.values())}
    if len(numbers) == 1:
        return {numbers.pop(): pushes}
    return {
        number: {w: push for w, push in pushes.items() if push.optimizer == number}
        for number in sorted(numbers)
    }


def samples_of(push: Push) -> float:
    """What it is counted for: a mini-batch that several optimizers use, by the first of them."""
    if push.optimizer != 0:
        return 0.0
    return push.weight if push.samples is None else push.samples


def release(
    stepped: Stepped, version: int, counted: bool, tickets: tuple[Ticket, ...] = ()
) -> Released:
    """What came of its push, for the one who has pushed."""
    again = stepped.again
    cleared = again is not None and again.cleared
    return Released(
        version, again is not None, cleared, stepped.news, stepped.turn, counted, tickets
    )


def untold_steps(n: int, covers: Sequence[DrawnBatch]) -> Iterator[Push]:
    """What a worker would have told of ``n`` steps, with these mini-batches, that it has made."""
    for step in range(n):
        own = tuple(covers[step * len(covers) // n : (step + 1) * len(covers) // n])
        samples = float(sum(total(cover.spans) for cover in own))
        yield Push(0, 1.0, samples=samples, covers=own, own=True, age=0)
