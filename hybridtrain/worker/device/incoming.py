"""Parameters on their way from host memory to the device, as the next forward needs them.

After an update the host is told at once; the copies run on a lane of their own, bucket by bucket in
the order in which the last forward has needed them. The compute lane waits for a bucket before the
first use of one of its parameters. Who uses them is not guessed: while anything is on its way,
every torch function that is called shows its arguments here (:class:`ForwardWait`), so a parameter
that is read from outside its module, by a callback, or as a view, is waited for as well. What shows
no arguments (kernels bound without torch, TorchScript) is called by modules, whose forward waits
for all that they and their children own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybridtrain.worker.device.streams import Lane, Streams

BUCKET_BYTES = 16 * 2**20


class Incoming:
    """Brings parameters to the device.

    Args:
        streams: of the device.
        parameters: on the device.
        sources: their values in host memory, page-locked.

    ``lazily``: what is on its way is waited for by its users; else the compute lane waits at once.
    """

    def __init__(
        self,
        streams: Streams,
        parameters: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self._streams, self._sources = streams, sources
        self.lazily = False
        self._originals = list(parameters)
        self._order = list(range(len(parameters)))  # in which the last forward has needed them
        self._needed: list[int] = []
        self._coming: list[Any] = []  # marks of buckets, of which the first ``_waited`` are there
        self._waited = 0
        self._bucket_of: dict[int, int] = {}  # of those that nobody has needed yet
        self._find_places()

    def _find_places(self) -> None:
        """Where the parameters lie: what is copied goes there."""
        self._addresses = [p.data_ptr() for p in self._originals]
        self._parameters = [p.detach() for p in self._originals]
        places = [(self._addresses[n], n) for n, p in enumerate(self._parameters) if p.numel()]
        self._places = sorted(places)

    @property
    def pending(self) -> bool:
        """Whether something may still be on its way."""
        return self._waited < len(self._coming)

    def start(self, numbers: Iterable[int], after: Callable[[list[int]], Any] = len) -> None:
        """The masters have moved: copy these. ``after``: what follows each bucket's copies."""
        with torch._C.DisableTorchFunction():  # what is done here is no use of a parameter
            self._start(set(numbers), after)
        if not self.lazily:
            self.need_all()

    def _start(self, chosen: set[int], after: Callable[[list[int]], Any]) -> None:
        if [p.data_ptr() for p in self._originals] != self._addresses:  # ``.data`` was replaced
            self.need_all()  # or who gets the old memory would race with a copy to it
            self._find_places()
        self._settle_order()
        self._streams.wait(Lane.BACK, self._streams.record(Lane.COMPUTE))  # the old are in use
        self._coming, self._waited, self._bucket_of = [], 0, {}
        for bucket in self._buckets([n for n in self._order if n in chosen]):
            own, sources = self._parameters, self._sources
            self._streams.copy(Lane.BACK, [own[n] for n in bucket], [sources[n] for n in bucket])
            self._bucket_of |= dict.fromkeys(bucket, len(self._coming))
            after(bucket)
            self._coming.append(self._streams.record(Lane.BACK))

    def _buckets(self, numbers: Iterable[int]) -> Iterable[list[int]]:
        bucket, n_bytes = [], 0
        for number in numbers:
            bucket.append(number)
            n_bytes += self._parameters[number].nbytes
            if n_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, n_bytes = [], 0
        if bucket:
            yield bucket

    def _settle_order(self) -> None:
        """As the last forward has needed them; what it has not needed comes last."""
        known = set(self._needed)
        self._order = self._needed + [n for n in self._order if n not in known]
        self._needed = []

    def need(self, tensor: torch.Tensor) -> None:
        """The compute lane is about to use this tensor, perhaps a parameter, or a view of one."""
        try:
            first = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # without memory (vmap, tracing, mkldnn)
            self.need_all()
            return
        # Parameters may share a storage (cuDNN's of an LSTM): those count that lie in the tensor.
        behind = first + max(1, _reach(tensor))
        at = max(0, bisect_right(self._places, (first, len(self._parameters))) - 1)
        while at < len(self._places) and self._places[at][0] < behind:
            address, number = self._places[at]
            at += 1
            if first < address + self._parameters[number].nbytes:
                self._need(number)

    def _need(self, number: int) -> None:
        bucket = self._bucket_of.pop(number, None)
        if bucket is None:
            return
        self._needed.append(number)
        if bucket >= self._waited:  # a mark stands for all buckets before it
            self._streams.wait(Lane.COMPUTE, self._coming[bucket])
            self._waited = bucket + 1

    def need_all(self) -> None:
        """The compute lane may use any of them."""
        if self.pending:
            self._streams.wait(Lane.COMPUTE, self._coming[-1])
            self._waited = len(self._coming)

    def settle(self) -> None:
        """The host waits until all copies are made: what they are made from may change now."""
        self.need_all()
        if self._coming:
            self._streams.synchronise(self._coming[-1])


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n)
    return (steps + 1) * tensor.itemsize if tensor.numel() else 0


class ForwardWait(TorchFunctionMode):
    """Shows the arguments of every torch function to what brings parameters.

    Args:
        incoming: to be told.
    """

    def __init__(self, incoming: Incoming) -> None:
        super().__init__()
        self._incoming = incoming

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self._incoming.pending:
            self._show(args)
            if kwargs:
                self._show(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _show(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                if argument.layout is torch.strided:
                    self._incoming.need(argument)
            elif isinstance(argument, list | tuple):
                self._show(argument)


def await_in_forward(module: torch.nn.Module, incoming: Incoming) -> list[Any]:
    """Before each forward, what the module itself owns; its children wait for theirs.

    A module of torch's own with children may read theirs without calling them (attention), so it
    waits for all. Returns the hooks.
    """

    def wait(which: torch.nn.Module, _: Any) -> None:
        if incoming.pending:
            deep = type(which).__module__.startswith("torch.nn.modules")
            for parameter in which.parameters(recurse=deep and not _is_container(which)):
                incoming.need(parameter)

    return [each.register_forward_pre_hook(wait) for each in module.modules()]


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict)
