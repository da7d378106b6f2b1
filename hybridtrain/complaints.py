"""What the server says when workers wait for what will not come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def missed(worker: int, waiting: Iterable[int]) -> str:
    """One has ended, and others wait to meet all."""
    return (
        f"worker {worker} has finished while worker {_numbers(waiting)} waits for all to meet; all "
        "workers must take the same path (a barrier or a reduction that only some reach?)"
    )


def stuck(policy: object, waiting: Sequence[tuple[str, Iterable[int]]]) -> str:
    """Everybody waits, and nobody is left to free them. ``waiting``: for what, and who."""
    who = [f"worker {_numbers(some)} for {what}" for what, some in waiting if some]
    return (
        f"policy {policy} would wait for ever: all who are left wait ({'; '.join(who)}), and "
        "nobody is left to free them; this is an error of the policy, or of a worker that left"
    )


def _numbers(workers: Iterable[int]) -> str:
    return ", ".join(str(each) for each in sorted(workers))
