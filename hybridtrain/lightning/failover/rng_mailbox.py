"""The states of every worker's random generators, where one that takes its place finds them.

A worker that is about to die tells nobody, so each writes them down as it goes, to memory that it
shares with the parent and with its successor: before it fetches the first mini-batch of a step, and
when it pushes. In lock-step the successor makes either that step, or the one behind it. What an
evaluation or the end of an epoch draws between the two is in neither: there the states of another
worker serve, which has drawn alike.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import torch

from hybridtrain.util.anonymous_files import SharedBytes

# The updates that there were (or blank); evaluations and ends of epochs; the number of bytes.
_HEAD = struct.Struct("<qqq")
_ROOM = 32 * 1024 - _HEAD.size  # about 11 KiB are needed
_BLANK = -2  # less than the version before the first
_BEFORE, _AFTER = 0, 1  # the fetching, the push


class RngMailbox:
    """Two pages for each of W workers, which only processes of this run read.

    Args:
        n_workers: W.
    """

    def __init__(self, n_workers: int) -> None:
        self._shared = SharedBytes(2 * n_workers * (_HEAD.size + _ROOM))
        for worker in range(n_workers):
            for page in (_BEFORE, _AFTER):
                self._blank(self._place(worker, page))

    def begin(self, worker: int, version: int, states: dict[str, Any]) -> None:
        """The worker is about to fetch what it makes update ``version`` + 1 of."""
        self._write(self._place(worker, _BEFORE), version, 0, states)

    def push(self, worker: int, version: int, breaks: int, states: dict[str, Any]) -> None:
        """The worker has computed, and what it has is to become a part of that update.

        ``breaks``: evaluations and ends of epochs so far.
        """
        self._write(self._place(worker, _AFTER), version, breaks, states)

    def find(self, worker: int, version: int, breaks: int) -> dict[str, Any] | None:
        """With which the worker would fetch what it makes update ``version`` + 1 of, if known."""
        for page, wanted in ((_BEFORE, (version, 0)), (_AFTER, (version - 1, breaks))):
            place = self._place(worker, page)
            *found, n_bytes = _HEAD.unpack_from(self._shared.map, place)
            if tuple(found) == wanted:
                begin = place + _HEAD.size
                return _tensors(pickle.loads(self._shared.map[begin : begin + n_bytes]))
        return None

    def close(self) -> None:
        """Nobody looks any more."""
        self._shared.close()

    def _place(self, worker: int, page: int) -> int:
        return (2 * worker + page) * (_HEAD.size + _ROOM)

    def _blank(self, place: int) -> None:
        _HEAD.pack_into(self._shared.map, place, _BLANK, 0, 0)

    def _write(self, place: int, version: int, breaks: int, states: dict[str, Any]) -> None:
        """Blank until it is whole: this process may be killed in the middle."""
        self._blank(place)
        shared = self._shared.map
        plain = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in states.items()}
        content = pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
        if len(content) <= _ROOM:
            begin = place + _HEAD.size
            shared[begin : begin + len(content)] = content
            _HEAD.pack_into(shared, place, version, breaks, len(content))


def _tensors(states: dict[str, Any]) -> dict[str, Any]:
    """Torch's were written as arrays."""
    return {k: torch.from_numpy(v) if k in ("torch", "cuda") else v for k, v in states.items()}
