"""What a user may give to a strategy, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.protocol.messages import Visits


@dataclass(frozen=True)
class DataOptions:
    """What a user may say about data.

    ``num_samples_key``: which entry of a batch tells its number of samples; ``batch_sizes``: of
    each worker; ``iterable``: what is done about loaders that cannot be shared out by sample;
    ``keep_order``: a loader that does not shuffle is gone through in its order; ``visits``: shards
    that workers draw from.

    Raises:
        UserError: if that makes no sense.
    """

    num_samples_key: str | int | None = None
    batch_sizes: tuple[int, ...] | None = None
    iterable: str | None = None
    keep_order: bool = False
    visits: Visits | None = None

    @classmethod
    def of(
        cls, key: Any, sizes: Any, iterable: Any, keep_order: Any, shards: Any = None
    ) -> DataOptions:
        """Checked."""
        if isinstance(key, bool) or not isinstance(key, str | int | None):
            raise UserError(
                f"num_samples_key={key!r} was given; it must be a key, an attribute's name or a "
                "whole number (the place in the batch)"
            )
        if iterable not in (None, "deal", "own"):
            raise UserError(
                f"iterable={iterable!r} was given; it must be deal (each worker takes every W-th "
                "mini-batch), own (the data share themselves out) or null"
            )
        if not isinstance(keep_order, bool):
            raise UserError(f"keep_order={keep_order!r} was given; it must be true or false")
        given = None if sizes is None else _sizes(sizes)
        return cls(key, given, iterable, keep_order, Visits.of(shards))

    def check_workers(self, n_workers: int) -> None:
        """Everybody must know its size."""
        if self.batch_sizes is not None and len(self.batch_sizes) != n_workers:
            raise UserError(
                f"batch_size_per_worker={list(self.batch_sizes)} was given for {n_workers} "
                f"worker{'s' * (n_workers > 1)}; give one size for each worker"
            )


def _sizes(sizes: Any) -> tuple[int, ...]:
    whole = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not whole or not sizes or not all(type(n) is int and n >= 1 for n in sizes):
        raise UserError(
            f"batch_size_per_worker={sizes!r} was given; it must be a list of whole numbers from 1 "
            "on, one for each worker, as in [32,8]"
        )
    return tuple(sizes)


_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
)
_OF_DDP = {
    "find_unused_parameters": "unused parameters need no option here",
    "static_graph": "there is no graph to be prepared here",
    "gradient_as_bucket_view": "gradients are not kept in buckets here",
    "process_group_backend": "there is no process group here",
    "timeout": "there is no process group here; see stop_grace_s",
    "ddp_comm_hook": "gradients travel through shared memory here",
}


def known_options(given: Iterable[str], own: Iterable[str]) -> None:
    """See that a strategy is given only what it takes: its own options and Lightning's.

    Raises:
        UserError: naming the option that is closest.
    """
    own = tuple(own)
    for name in given:
        if name in _OF_LIGHTNING:
            continue
        if name in _OF_DDP:
            raise UserError(f"{name} was given, an option of ddp; leave it out: {_OF_DDP[name]}")
        close = get_close_matches(name, own + _OF_LIGHTNING, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(own)}"
        raise UserError(f"{name} was given, which the strategy does not know; {hint}")
