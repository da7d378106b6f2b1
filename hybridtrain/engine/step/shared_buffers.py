"""Everybody computes with worker 0's buffers, as under ``DistributedDataParallel``.

There rank 0's buffers (running means, queues, vectors of a power iteration) are broadcast before
the forward that follows a step. Here worker 0 leaves its own in shared memory before each push, and
the others take them when they are released. Two places take turns, so that nothing is written where
somebody may still read: a place is used again two rounds later, and no round ends without those who
read. A worker that has missed a round finds another round's number there, and waits for the next.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import NamedTuple, Protocol

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.arena import align
from hybridtrain.engine.worker.client import Client

_TAG_BYTES = align(8)  # the version, before the buffers


class Buffers(Protocol):
    """A module's ``_buffers``: a dict, or of a scripted module an object with these methods."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> torch.Tensor | None: ...

    def __setitem__(self, name: str, buffer: torch.Tensor | None, /) -> None: ...

    def items(self) -> ItemsView[str, torch.Tensor | None]:
        """Names and buffers."""


Named = list[tuple[Buffers, str]]  # a module's buffers, and one's name


class SharedBuffers:
    """The buffers of one worker's module, by the names that they have when training begins.

    Args:
        named: where each is kept, see ``shared``; user code may put other tensors there.
        store: with room for them, see ``room_for``.
        client: to the server; knows the version of the last release.
    """

    def __init__(self, named: Named, store: Store, client: Client) -> None:
        self._named, self._client = named, client
        self._version = 0
        turns = [store.state(turn) for turn in (0, 1)]  # each (room,) uint8, host, shared
        self._tags = [turn[:8].view(torch.int64) for turn in turns]
        self._turns = turns
        self._places = [_views(turn, tensors(named)) for turn in turns]
        # On a device: the same places there, so that a single copy crosses the bus.
        devices = {buffer.device for buffer in tensors(named)}
        apart = len(devices) == 1 and devices != {torch.device("cpu")}
        self._staged = torch.empty_like(turns[0], device=devices.pop()) if apart else None
        self._stages = _views(self._staged, tensors(named)) if self._staged is not None else []

    @torch.no_grad()
    def meet(self, accumulating: bool = False) -> None:
        """All take worker 0's, wherever they have come from: at the start, before a validation.

        ``accumulating``: those before the mini-batches under way are to be put back, if any are.
        """
        if self._client.group.solo:
            return
        for (buffers, name), value in zip(self._named, self._first_ones(), strict=True):
            put(buffers, name, value)
        if not accumulating:
            self.keep(self._client.steps.version)

    def _first_ones(self) -> list[torch.Tensor | None]:
        """Worker 0's, or where it is lost in this meeting, in another one the next worker's."""
        mine = [buffers[name] for buffers, name in self._named]
        while True:
            leads = self._client.group.is_leader
            sent = [None if b is None else b.cpu() for b in mine] if leads else None
            found: list[torch.Tensor | None] | None = self._client.gather("buffers", sent)[0]
            if found is not None:
                return found

    @torch.no_grad()
    def publish(self) -> None:
        """Before a push."""
        self._version = self._client.steps.version
        self.keep(self._version + 1)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """These go with the parameters of that version."""
        turn = (version - 1) % 2
        if self._client.group.is_leader:
            self._leave(turn)
            self._tags[turn].fill_(version)

    @torch.no_grad()
    def adopt(self) -> None:
        """After the release."""
        turn = self._version % 2
        if not self._client.group.is_leader and int(self._tags[turn]) == self._version + 1:
            self._take(turn)

    @torch.no_grad()
    def put_back(self, version: int) -> None:
        """They are again what goes with the parameters of that version, if that is known.

        Where a step is not made: what they were before its mini-batches.
        """
        turn = (version - 1) % 2
        if int(self._tags[turn]) == version:
            self._take(turn)

    def _leave(self, turn: int) -> None:
        self._exchange(self._stages or self._places[turn], out=True)
        if self._staged is not None:
            self._turns[turn][_TAG_BYTES:].copy_(self._staged[_TAG_BYTES:])

    def _take(self, turn: int) -> None:
        if self._staged is not None:
            self._staged.copy_(self._turns[turn])
        self._exchange(self._stages or self._places[turn], out=False)

    def _exchange(self, places: list[torch.Tensor], out: bool) -> None:
        """Copy; a buffer that has become another shape in training is each worker's own."""
        now = [buffers[name] for buffers, name in self._named]
        both = [
            (buffer, place)
            for buffer, place in zip(now, places, strict=True)
            if buffer is not None and buffer.shape == place.shape
        ]
        if both:
            mine, theirs = zip(*both, strict=True)
            torch._foreach_copy_(*((theirs, mine) if out else (mine, theirs)))


def shared(module: torch.nn.Module) -> Named:
    """The buffers that can be shared: dense ones, whose elements lie apart. Each once."""
    found: dict[int, tuple[Buffers, str]] = {}
    for each in kept(module, copies=False).values():
        if each.buffer is not None and lies_apart(each.buffer):
            found.setdefault(id(each.buffer), (each.buffers, each.name))
    return list(found.values())


def put(buffers: Buffers, name: str, value: torch.Tensor | None) -> None:
    """Write into the tensor that is there, or where it has another shape, put another there."""
    here = buffers[name]
    if here is not None and value is not None and here.shape == value.shape and lies_apart(here):
        here.copy_(value)
    elif here is not None:
        buffers[name] = None if value is None else value.to(here.device, copy=True)


class KeptBuffer(NamedTuple):
    """A buffer as it was: where it is kept, its name there, the tensor, and a copy of it."""

    buffers: Buffers
    name: str
    buffer: torch.Tensor | None
    value: torch.Tensor | None

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor that is there now: the module may have assigned another."""
        here = self.buffers
        return here[self.name] if self.name in here else None  # noqa: SIM401  (it may have no get)

    def put_back(self) -> None:
        """The same tensor, with its value."""
        self.buffers[self.name] = self.buffer
        put(self.buffers, self.name, self.value)


def kept(module: torch.nn.Module, copies: bool = True) -> dict[str, KeptBuffer]:
    """All buffers by their path, also those that are ``None``; without ``copies`` no values."""
    return {
        f"{path}.{name}": KeptBuffer(
            part._buffers, name, buffer, buffer.clone() if copies and buffer is not None else None
        )
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
    }


def lies_apart(buffer: torch.Tensor) -> bool:
    """True if the buffer is dense and each element has its own memory (an expanded one has not)."""
    return buffer.layout == torch.strided and (buffer.numel() < 2 or 0 not in buffer.stride())


def tensors(named: Named) -> list[torch.Tensor]:
    """Return the buffers of these names that are not ``None`` now."""
    found = [buffers[name] for buffers, name in named]
    return [buffer for buffer in found if buffer is not None]


def room_for(named: Named) -> int:
    """Bytes that one copy of the buffers takes, its number included; 0 if there are none."""
    return _TAG_BYTES + sum(align(b.nbytes) for b in tensors(named)) if named else 0


def _views(flat: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    views, start = [], _TAG_BYTES
    for buffer in buffers:
        stop = start + buffer.nbytes
        views.append(flat[start:stop].view(buffer.dtype).view(buffer.shape))
        start = align(stop)
    return views
