"""Gradients on their way from the device to the worker's row.

Hooks add them as backward produces them; a bucket that is full leaves at once on its own lane, with
one mark behind it. Each gradient is preceded by a mark of the stream that has made it: hooks may
run on several, and waiting for the one that is current when the bucket leaves would miss the others
(DeepSpeed's issues 7898 and 8061).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrain.device.streams import Lane, Streams

BUCKET_BYTES = 16 * 2**20  # a millisecond or less of the bus; some hundreds for 1.5 G parameters


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients ``numbers`` lie in the row once ``mark`` has been reached."""

    numbers: tuple[int, ...]
    mark: Any


class Outgoing:
    """Fills buckets and sends them.

    Args:
        streams: of the device.
        rows: each parameter's place, in its shape; host, page-locked.
    """

    def __init__(self, streams: Streams, rows: Sequence[torch.Tensor]) -> None:
        self._streams, self._rows = streams, rows
        self._filling: list[tuple[int, torch.Tensor, Any]] = []
        self._filled_bytes = 0
        self._sent: deque[Bucket] = deque()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """It has just been queued to be computed."""
        self._filling.append((number, gradient, self._streams.record(Lane.COMPUTE)))
        self._filled_bytes += gradient.nbytes
        if self._filled_bytes >= BUCKET_BYTES:
            self.close()

    def close(self) -> None:
        """The bucket leaves, full or not."""
        if not self._filling:
            return
        for _, _, made in self._filling:
            self._streams.wait(Lane.OUT, made)
        for number, gradient, _ in self._filling:
            self._streams.copy(Lane.OUT, self._rows[number], gradient)
        numbers = tuple(number for number, _, _ in self._filling)
        self._sent.append(Bucket(numbers, self._streams.record(Lane.OUT)))
        self._filling, self._filled_bytes = [], 0

    def arrived(self, wait: bool = False) -> Bucket | None:
        """The next bucket whose gradients lie in the row; with ``wait``, once they do.

        ``None``: none has arrived, or with ``wait``, none is on its way any more.
        """
        if not self._sent:
            return None
        if wait:
            self._streams.synchronise(self._sent[0].mark)
        elif not self._streams.reached(self._sent[0].mark):
            return None
        return self._sent.popleft()
