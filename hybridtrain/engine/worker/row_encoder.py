"""Gradients that leave a worker encoded: fewer bytes in its row, and across a bus."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hybridtrain.engine.exchanges.compression import Codec, Compressor
from hybridtrain.engine.memory import Store


class RowEncoder:
    """Encodes the gradients of one worker into the front of its row.

    Args:
        codec: of the exchange.
        parameters: the module's, in the order of the layout's slots.
        store: the shared buffers.
        worker: whose row.
    """

    def __init__(
        self, codec: Codec, parameters: Sequence[torch.nn.Parameter], store: Store, worker: int
    ) -> None:
        self._compressor, self._parameters = Compressor(codec), list(parameters)
        self._store, self._fronts = store, [store.front(row) for row in store.rows_of(worker)]

    @torch.no_grad()
    def encode(self, numbers: Sequence[int], sparse: Collection[int]) -> int | None:
        """Encode these parameters' gradients; returns how many bytes they are.

        ``None``: they are to travel as they are, since one is not finite (it is to be judged), or
        one of the ``sparse`` parameters has a sparse gradient (a few rows are few bytes already).
        """
        found = {n: g for n in numbers if (g := self._parameters[n].grad) is not None}
        if any(gradient.is_sparse and n in sparse for n, gradient in found.items()):
            return None
        encoded = self._compressor.encode(found)
        if encoded is None:
            return None
        turns = self._store.turns
        self._fronts[0 if turns is None else turns.row][: len(encoded)].copy_(encoded)
        return len(encoded)

    def forget(self) -> None:
        """Begin with nothing left out."""
        self._compressor.load_state({})

    def state(self, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Residuals of these parameters (values not sent so far), 1-D, by slot number."""
        return {n: residual for n, residual in self._compressor.state().items() if n in numbers}

    def load_state(self, state: Mapping[int, torch.Tensor]) -> None:
        """Go on with what :meth:`state` has returned, of one optimizer."""
        self._compressor.load_state(self._compressor.state() | dict(state))
