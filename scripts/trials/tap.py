"""Looks over the server's shoulder: which samples made which update, and what came of it.

Only for trials: it patches classes of the process that it is called in, and keeps a copy of
parameters and optimizer state for every update.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtrain.engine.recovery.failure_policy import Judge
from hybridtrain.engine.server.rounds import Rounds
from hybridtrain.engine.worlds.start_workers import WorkerProcess
from hybridtrain.engine.worlds.worker_exit import Failed
from hybridtrain.lightning import launcher
from trials.work import LR, loss_of, network, numbers


@dataclass(frozen=True)
class Part:
    """One worker's contribution: its samples, and the version that it was computed at."""

    worker: int
    samples: tuple[int, ...]
    weight: float
    version: int


@dataclass
class Tap:
    """The recorded updates of one run. ``states[v]``: parameters and moments after update v."""

    lockstep: bool
    diary: torch.Tensor
    keeps: bool = True  # a copy of everything after each update; else samples are only counted
    count: Counter[int] = field(default_factory=Counter)  # of samples in updates
    parts: list[list[Part]] = field(default_factory=list)  # of each update
    states: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)  # when failures became known
    verdicts: list[str] = field(default_factory=list)  # what was decided then
    read: dict[int, int] = field(default_factory=dict)  # the version each worker computes at
    held: list[Part] = field(default_factory=list)  # put aside for the next update

    def part(self, worker: int, weight: float, version: int) -> Part:
        """As the worker has written it down."""
        page = self.diary[worker].tolist()
        at = version if self.lockstep else self.read.get(worker, version)
        return Part(worker, tuple(page[1 : 1 + page[0]]), weight, at)

    def used(self) -> Counter[int]:
        """How often each sample is in an update."""
        return self.count

    def take(self, parts: list[Part], rounds: Any) -> None:
        """An update has been made of these."""
        self.count.update(n for part in parts for n in part.samples)
        if self.keeps:
            self.parts.append(sorted(parts, key=lambda part: part.worker))
            self.states.append(state_of(rounds))


def tapped(lockstep: bool, diary: torch.Tensor, keeps: bool = True) -> Tap:
    """Listen to the run that this process is about to begin."""
    tap = Tap(lockstep, diary, keeps)
    # Or the server hears of rounds when they are over.
    launcher.workers_may_update = lambda strategy: False
    _listen_to_rounds(tap)
    _listen_to_deaths(tap)
    return tap


def _listen_to_rounds(tap: Tap) -> None:
    rounds: Any = Rounds
    apply, release, refresh = rounds._apply, rounds._release, rounds.refresh
    hold = rounds._hold

    def applying(self: Any, workers: tuple[int, ...]) -> None:
        before = self._statistics.version
        if tap.keeps and not tap.states:
            tap.states.append(state_of(self))
        pushes = {worker: self.pushed[worker] for worker in workers}
        parts = [tap.part(w, p.weight, before) for w, p in pushes.items() if p.weight > 0]
        apply(self, workers)
        if self._statistics.version > before:
            held, tap.held = tap.held, []
            tap.take([*held, *parts], self)

    def holding(self: Any, worker: int) -> None:
        push = self.pushed[worker]
        if push.weight > 0:
            tap.held.append(tap.part(worker, push.weight, self._statistics.version))
        hold(self, worker)

    def releasing(self: Any, worker: int) -> Any:
        tap.read[worker] = self._statistics.version
        return release(self, worker)

    def refreshing(self: Any, worker: int) -> Any:
        tap.read[worker] = self._statistics.version
        return refresh(self, worker)

    rounds._apply, rounds._release, rounds.refresh = applying, releasing, refreshing
    rounds._hold = holding


def _listen_to_deaths(tap: Tap) -> None:
    _note(Failed, "rebuild", tap.noticed_s, [])
    _note(WorkerProcess, "describe_exit", tap.noticed_s, [])
    _note(Judge, "failed", tap.noticed_s, tap.verdicts)


def _note(kind: Any, name: str, times: list[float], results: list[str]) -> None:
    original: Callable[..., Any] = getattr(kind, name)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        times.append(time.monotonic())
        result = original(self, *args, **kwargs)
        results.append(type(result).__name__)
        return result

    setattr(kind, name, noting)


def state_of(rounds: Any) -> dict[str, list[torch.Tensor]]:
    """Copies: the parameters, and what Adam keeps of each."""
    store = rounds.store
    dumped = rounds.optimizers.dump()
    (saved,) = torch.load(io.BytesIO(dumped), weights_only=False)
    return {
        "parameters": [store.master(slot).clone() for slot in store.layout.slots],
        **_moments(saved.parameters),
    }


def _moments(states: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    names = ("exp_avg", "exp_avg_sq", "step")
    return {name: [s[name].clone() for _, s in sorted(states.items())] for name in names}


def state_in(checkpoint: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The same of a checkpoint."""
    parameters = list(checkpoint["state_dict"].values())
    return {"parameters": parameters, **_moments(checkpoint["optimizer_states"][0]["state"])}


def same(one: Mapping[str, list[torch.Tensor]], other: Mapping[str, list[torch.Tensor]]) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True))
        for name in one
    )


# ---- the same with plain torch ------------------------------------------------------------------


def recomputed(tap: Tap, n_samples: int) -> list[list[torch.Tensor]]:
    """Parameters after each update, from the same mini-batches and nothing else of the run."""
    net, data = network(), numbers(n_samples)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    versions = [_values(net)]
    for parts in tap.parts:
        total = sum(part.weight for part in parts)
        mean = [torch.zeros_like(p) for p in net.parameters()]
        for part in parts:
            gradient = _gradient(net, versions[part.version], data, part.samples)
            for into, g in zip(mean, gradient, strict=True):
                into += (part.weight / total) * g
        _set(net, versions[-1])
        for parameter, g in zip(net.parameters(), mean, strict=True):
            parameter.grad = g
        if parts:
            optimizer.step()
        versions.append(_values(net))
    return versions


def farthest(tap: Tap, n_samples: int) -> float:
    """The largest difference between the run's parameters and plain torch's, of any update."""
    pairs = zip(recomputed(tap, n_samples), tap.states, strict=True)
    return max(
        float((mine - theirs).abs().max())
        for theirs_all, state in pairs
        for mine, theirs in zip(state["parameters"], theirs_all, strict=True)
    )


def _gradient(
    net: torch.nn.Module, at: list[torch.Tensor], data: Any, samples: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    _set(net, at)
    x, y, _ = data[list(samples)]
    return torch.autograd.grad(loss_of(net, x, y), list(net.parameters()))


def _values(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@torch.no_grad()
def _set(net: torch.nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(net.parameters(), values, strict=True):
        parameter.copy_(value)
