"""Every worker's RNG states, for the process that takes its place."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import torch

from hybridtrain.util.anonymous_files import SharedBytes

_HEAD = struct.Struct("<qq")  # updates so far (or blank); the number of bytes
_ROOM = 32 * 1024 - _HEAD.size  # about 11 KiB are needed
_BLANK = -2  # less than the version before the first
_BEFORE, _AFTER = 0, 1  # the fetching, the push


class RngMailbox(SharedBytes):
    """Every worker's RNG states in shared memory, where the process that replaces it reads them.

    A worker cannot send them when it dies, so it writes them as it goes: before it fetches the
    first mini-batch of a step, and when it pushes. In lock-step its replacement makes that step or
    the next. Numbers that hooks draw between the two (an evaluation, the end of an epoch) are in
    neither page: then another worker's states serve, which has drawn alike.

    Args:
        n_workers: W; each has two pages.
    """

    def __init__(self, n_workers: int) -> None:
        super().__init__(2 * n_workers * (_HEAD.size + _ROOM))
        for worker in range(n_workers):
            for page in (_BEFORE, _AFTER):
                self._blank(self._place(worker, page))

    def begin(self, worker: int, version: int, states: dict[str, Any]) -> None:
        """Write the states before the worker fetches its mini-batches of update ``version`` + 1."""
        self._write(self._place(worker, _BEFORE), version, states)

    def push(self, worker: int, version: int, states: dict[str, Any]) -> None:
        """Write the states at the push for that update."""
        self._write(self._place(worker, _AFTER), version, states)

    def find(self, worker: int, version: int, as_pushed: bool) -> dict[str, Any] | None:
        """The states with which the worker would fetch for update ``version`` + 1, if known.

        ``as_pushed``: nothing is drawn between the push before and this fetch.
        """
        for page, wanted in ((_BEFORE, version), (_AFTER, version - 1)):
            place = self._place(worker, page)
            found, n_bytes = _HEAD.unpack_from(self.map, place)
            if found == wanted and (page == _BEFORE or as_pushed):
                begin = place + _HEAD.size
                return _tensors(pickle.loads(self.map[begin : begin + n_bytes]))
        return None

    def _place(self, worker: int, page: int) -> int:
        return (2 * worker + page) * (_HEAD.size + _ROOM)

    def _blank(self, place: int) -> None:
        _HEAD.pack_into(self.map, place, _BLANK, 0)

    def _write(self, place: int, version: int, states: dict[str, Any]) -> None:
        """Write a page, blank until it is whole: this process may be killed in the middle."""
        self._blank(place)
        plain = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in states.items()}
        content = pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
        if len(content) <= _ROOM:
            begin = place + _HEAD.size
            self.map[begin : begin + len(content)] = content
            _HEAD.pack_into(self.map, place, version, len(content))


def _tensors(states: dict[str, Any]) -> dict[str, Any]:
    """Torch's states as tensors; they were written as arrays."""
    return {k: torch.from_numpy(v) if k in ("torch", "cuda") else v for k, v in states.items()}
