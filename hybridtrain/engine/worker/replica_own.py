"""Parameters in a worker's own memory, which its own optimizer moves.

Whatever the device, what is handed over and what is taken back are plain copies between it and
shared memory, made once per exchange. Page-locked memory makes them several times as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybridtrain.engine.memory import Store
from hybridtrain.engine.memory.store import elements
from hybridtrain.engine.protocol.messages import Writes
from hybridtrain.engine.worker.device import KINDS, PageLocked
from hybridtrain.engine.worker.replica import Replica


class OwnReplica(Replica):
    """A worker's own parameters, and the masters as it has read them last.

    Args:
        parameters: the module's, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
        keeps: the masters are only looked at: training goes on from the worker's own.
        gives_gradients: nothing of the worker's own parameters is handed over.
        sends_writes: those of user code behind the last exchange of an epoch. An exchange brings
            the worker to the masters, so they are told apart. In lock-step all workers make them
            alike, and one sends them.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        keeps: bool = False,
        gives_gradients: bool = False,
        sends_writes: bool = False,
    ) -> None:
        self._sends_writes = sends_writes
        self._keeps, self._gives_gradients = keeps, gives_gradients
        self._kept: dict[int, torch.Tensor] = {}  # by number, while the module has the masters
        self._held: dict[int, torch.Tensor] = {}  # the masters that these are to be compared with
        self._parameters = list(parameters)
        device = self._parameters[0].device
        apart = device.type in KINDS
        self._locked = PageLocked(KINDS[device.type](device), store, worker) if apart else None
        slots = store.layout.slots
        self._rows = [store.gradient(worker, slot) for slot in slots]
        self._front = store.front(worker)
        self._masters = [store.parameter(worker, slot) for slot in slots]
        self._following = list(range(len(slots)))

    def parameters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The worker's own."""
        return [self._parameters[number].data for number in numbers]

    def masters(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """As this worker has read them last; they change with its next release."""
        return [self._masters[number] for number in numbers]

    @torch.no_grad()
    def moved(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """From the masters to the worker's own: on the host, where they are to be handed over."""
        found = []
        for number in numbers:
            master, own, row = self._masters[number], self._parameters[number], self._rows[number]
            host = own.device == row.device
            found.append(torch.sub(master, own, out=row) if host else master.to(own.device) - own)
        return found

    @torch.no_grad()
    def hand_over(
        self,
        numbers: Sequence[int],
        values: Sequence[torch.Tensor | None],
        encoded: torch.Tensor | None = None,
    ) -> tuple[int, ...]:
        """Bring these, or what they are encoded as, to the row; returns the numbers without one."""
        if encoded is not None:
            self._front[: len(encoded)].copy_(encoded)
        for number, value in zip(numbers, values, strict=True) if encoded is None else ():
            if value is not None and value is not self._rows[number]:
                self._rows[number].copy_(value.to_dense() if value.is_sparse else value)
        return tuple(n for n, value in zip(numbers, values, strict=True) if value is None)

    def collect_whole(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return self.hand_over(numbers, [self._parameters[number].grad for number in numbers])

    def follow(self, numbers: Iterable[int]) -> None:
        self._following = sorted(numbers)

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        self._following = sorted({*self._following, *numbers})

    def writes(self) -> Writes:
        """None: what user code writes is part of the worker's movement."""
        return {}

    def written(self, alike: bool) -> Writes:
        """None, but where no movement is handed over: workers that have met have the masters."""
        if not (alike and self._gives_gradients):
            return {}
        return {number: elements(self._parameters[number]) for number in self.changed()}

    def unsent(self) -> Writes:
        changed = self.changed() if self._sends_writes else []
        return {number: elements(self._parameters[number]) for number in changed}

    def changed(self) -> list[int]:
        """Parameters that are not the masters as this worker has read them last."""
        own = ((number, self._parameters[number].data.cpu()) for number in self._following)
        return [number for number, each in own if not torch.equal(each, self._masters[number])]

    @torch.no_grad()
    def refresh(self, keep: bool = False) -> None:
        """The module's parameters become the masters as this worker has read them last.

        Where the worker's own are to be kept (``keep``: this time, too), they come back with
        :meth:`put_back`.
        """
        for number in self.changed():
            own, master = self._parameters[number].data, self._masters[number]
            if (keep or self._keeps) and number not in self._kept:
                self._kept[number] = own.clone()
            own.copy_(master)

    @property
    def shows_masters(self) -> bool:
        """Whether the module has them instead of the worker's own, which are kept meanwhile."""
        return bool(self._kept)

    @torch.no_grad()
    def hold_masters(self) -> None:
        """Newer ones are to be read, which the worker has not computed with."""
        self._held = {number: self._masters[number].clone() for number in self._following}

    @torch.no_grad()
    def put_back(self) -> None:
        """Training goes on: the module has the worker's own parameters again."""
        for number, value in self._kept.items():
            self._parameters[number].data.copy_(value)
        for number, value in self._held.items():
            self._masters[number].copy_(value)
        self.forget()

    def forget(self) -> None:
        """Training begins with the masters."""
        self._kept.clear()
        self._held.clear()

    def kept(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Copies of the worker's own, on the host; nothing if they are the masters."""
        own = [
            self._kept.get(n, self._parameters[n]).detach().to("cpu", copy=True) for n in numbers
        ]
        return [] if all(map(torch.equal, own, self.masters(numbers))) else own

    def keep(self, numbers: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """These are the worker's own from the next step on."""
        devices = [self._parameters[number].device for number in numbers]
        self._kept |= {
            number: value.to(device, copy=True)
            for number, value, device in zip(numbers, values, devices, strict=True)
        }

    def close(self) -> None:
        """The memory is as it was."""
        if self._locked is not None:
            self._locked.release()
