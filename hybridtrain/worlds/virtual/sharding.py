"""Parameters in several shards, each with its own server (Dean et al., NIPS 2012, 4.1).

A shard is a sequence of whole parameters with its own masters, rows, version and optimizer. Shards
are independent and drift apart: each applies a push when it arrives, and a worker may fetch them in
different versions. A worker sends each shard its part of a message, and continues when all have
answered. The first server also coordinates: it deals mini-batches, and its counts are the run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange, MergeRule, Requirements
from hybridtrain.memory import Layout, Store
from hybridtrain.policies import Policy
from hybridtrain.protocol.messages import Push
from hybridtrain.server.server import Server
from hybridtrain.updates import Optimizers, build_update
from hybridtrain.updates.serialize import dump, load
from hybridtrain.updates.staleness import Correction
from hybridtrain.updates.thread_pool import Pool


@dataclass(frozen=True)
class Shard:
    """Parameters number ``numbers`` of the task.

    ``groups``: the numbers of the optimizer's groups that have parameters here.
    """

    numbers: range
    store: Store
    optimizers: Optimizers
    groups: tuple[int, ...]

    def part(self, push: Push) -> Push:
        """This shard's part of a push; the first shard's has the mini-batches."""
        first = self.numbers.start
        absent = tuple(number - first for number in push.absent if number in self.numbers)
        groups = push.groups and tuple(push.groups[number] for number in self.groups)
        covers = () if first else push.covers
        return replace(push, absent=absent, groups=groups, covers=covers)


def servers_of(
    make: Callable[..., Server], policy: Policy, correction: Correction | None, n_shards: int
) -> list[Server]:
    """A server for each shard, with its own policy and correction."""
    parts = [deepcopy((policy, correction)) for _ in range(n_shards - 1)]  # before one has begun
    return [make(own, correction=corrects) for own, corrects in [(policy, correction), *parts]]


def first_timer(servers: Sequence[Server], busy: Collection[int]) -> tuple[float, int]:
    """The earliest timer of the servers' policies, without busy servers, and its server."""
    timers = [(s.wake_at_s, n) for n, s in enumerate(servers) if n not in busy]
    return min([(at_s, n) for at_s, n in timers if at_s is not None], default=(math.inf, 0))


def split(sizes: Sequence[int], n_shards: int) -> list[range]:
    """Shards of about equal size, for parameters with so many elements.

    Raises:
        UserError: if there are fewer parameters than shards.
    """
    if n_shards > len(sizes):
        raise UserError(
            f"{n_shards} shards were given for {len(sizes)} parameters; a shard has whole "
            f"parameters, so choose from 1 to {len(sizes)}"
        )
    ends = list(accumulate(sizes))
    found: list[range] = []
    begin = 0
    for number in range(1, n_shards + 1):
        wanted = ends[-1] * number / n_shards
        end = begin + 1  # each shard has at least one parameter
        while end < len(sizes) - (n_shards - number) and ends[end] <= wanted:
            end += 1
        found.append(range(begin, len(sizes) if number == n_shards else end))
        begin = end
    return found


def layouts_of(values: Sequence[torch.Tensor], n_shards: int) -> list[Layout]:
    """The layout of each shard, of parameters with these values.

    Raises:
        UserError: if there are fewer parameters than shards.
    """
    named = [(f"{number}", value) for number, value in enumerate(values)]
    shards = split([value.numel() for value in values], n_shards)
    return [Layout.of(named[numbers.start : numbers.stop]) for numbers in shards]


def shards_of(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[torch.nn.Parameter],
    stores: Sequence[Store],
    merge: MergeRule | None = None,
) -> list[Shard]:
    """All shards, each with the optimizer for its masters."""
    pool, found = Pool(1), list[Shard]()
    number_of = {id(master): number for number, master in enumerate(masters)}
    for store in stores:
        first = found[-1].numbers.stop if found else 0
        numbers = range(first, first + len(store.layout.slots))
        own, groups = optimizer, tuple(range(len(optimizer.param_groups)))
        if len(stores) > 1:
            own, groups = only(optimizer, masters, numbers)
        inside = [number_of[id(p)] - first for group in own.param_groups for p in group["params"]]
        update = build_update(own, inside, store, pool, merge)
        found.append(Shard(numbers, store, Optimizers([update], store, pool), groups))
    return found


def only(
    optimizer: torch.optim.Optimizer, masters: Sequence[torch.nn.Parameter], numbers: range
) -> tuple[torch.optim.Optimizer, tuple[int, ...]]:
    """A new optimizer, before its first step, over these parameters; and the groups it has left."""
    number_of = {id(master): number for number, master in enumerate(masters)}
    made, _ = load(dump(optimizer, number_of), lambda number: masters[number])
    groups = {}
    for number, group in enumerate(made.param_groups):
        inside = [p for p in group["params"] if number_of[id(p)] in numbers]
        if inside:
            groups[number] = {**group, "params": inside}
    made.param_groups[:] = list(groups.values())
    return made, tuple(groups)


@dataclass(slots=True)
class Answers:
    """The servers' answers to a worker's last message.

    ``first_s``: time of the first server's answer; ``at_s``: arrival time of the last answer.
    """

    n_servers: int
    first_s: float = 0.0
    at_s: float = 0.0
    _missing: int = 0

    def expect(self) -> None:
        """The worker has sent a message to all servers."""
        self._missing, self.at_s = self.n_servers, 0.0

    def all_there(self, shard: int, now_s: float, at_s: float) -> bool:
        """This server's answer arrives at ``at_s``; whether it is the last."""
        if shard == 0:
            self.first_s = now_s
        self._missing, self.at_s = self._missing - 1, max(self.at_s, at_s)
        return not self._missing


def check_shards(
    requirements: Requirements, task: object, exchange: Exchange, n_shards: int
) -> None:
    """Refuse options that need all shards at once.

    Raises:
        UserError: naming one.
    """
    clip = getattr(task, "clip", None)
    if n_shards == 1:
        return
    if getattr(exchange, "compress", None) is not None:
        raise UserError(
            f"{n_shards} shards were given with exchange={exchange}, which encodes all parameters "
            "together; leave compress out, or use one shard"
        )
    if requirements.drops_late:
        raise UserError(
            f"{n_shards} shards were given with a policy that drops what is late; each shard would "
            "drop other parts of it. Use async, ssp, k_async or hybrid, or one shard"
        )
    if clip is not None and clip.algorithm == "norm" and exchange.parameters != "own":
        raise UserError(
            f"{n_shards} shards were given with clipping by norm, but none of them knows the norm "
            "of the whole gradient; clip by value, or use one shard"
        )
