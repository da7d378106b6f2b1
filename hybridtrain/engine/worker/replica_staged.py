"""A worker on a GPU, where the server makes an update while workers compute.

The masters come to spare memory of the device as the update steps them, beside the computation. A
push lets the server begin the next update, so before it this worker waits until the update that is
under way is made, and until it has all of it. With the release it computes with what it has by
then: the masters without the update that follows the release.

| released with | the parameters become |
| --- | --- |
| an update that is due, as at the release before | what has come to the spare memory |
| an update that is due, behind one in lock-step | nothing else: they are the masters |
| an update that is made (warm-up, the end of an epoch) | the masters, from host memory |
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from hybridtrain.engine.memory import Store, Turns
from hybridtrain.engine.protocol.messages import Writes
from hybridtrain.engine.worker.device import Staged, Streams
from hybridtrain.engine.worker.replica import Leads
from hybridtrain.engine.worker.replica_cuda import STEPPING_S, CudaReplica
from hybridtrain.engine.worker.row_encoder import RowEncoder


class StagedReplica(CudaReplica):
    """As ``CudaReplica``, with one more copy of the trained parameters on the device.

    Args:
        parameters, store, worker, eager, streams, encoder, leads: see ``CudaReplica``.
    """

    _turns: Turns

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        store: Store,
        worker: int,
        eager: bool,
        streams: Streams,
        encoder: RowEncoder | None = None,
        leads: Leads | None = None,
    ) -> None:
        sources = [store.master(slot) for slot in store.layout.slots]
        self._staged = Staged(streams, list(parameters), sources)
        self._behind = False  # this worker computes with parameters that lack an update
        self._has_all = False  # of that update, in the spare memory
        super().__init__(parameters, store, worker, eager, streams, encoder, leads)

    def follow(self, numbers: Iterable[int]) -> None:
        super().follow(numbers)
        self._staged.reserve(self._following)

    def admit(self, numbers: Iterable[int], sparse: bool) -> None:
        super().admit(numbers, sparse)
        self._staged.reserve(self._following)

    # ---- the next parameters come ---------------------------------------------------------------

    @property
    def _awaits_update(self) -> bool:
        """Not if the update has begun behind a release that this worker has not received yet."""
        return not self._has_all and self._turns.behind == self._behind

    def _take(self, numbers: list[int]) -> None:
        if self._behind:
            self._staged.bring(numbers)
        else:
            super()._take(numbers)

    def _fetch_next(self) -> None:
        """Wait until the update that is under way is made, and queue the copies of all of it."""
        if not self._behind or self._closed:
            return
        while self._turns.due:
            time.sleep(self.take_stepped() or STEPPING_S)
        if not self._has_all:
            self._has_all, self._whole_of = True, self._update_number()
            if self._taken_of != self._whole_of:  # no update, or one that has told nothing
                self._taken.clear()
        rest = [number for number in self._following if number not in self._taken]
        self._staged.bring(rest)
        self._taken.update(rest)

    def writes(self) -> Writes:
        self._fetch_next()
        return super().writes()

    def _settle(self) -> None:
        super()._settle()
        self._staged.settle()

    # ---- a release ------------------------------------------------------------------------------

    def refresh(self, keep: bool = False) -> None:
        if self._closed:
            return
        is_ahead = self._turn() and self._turns.behind
        if is_ahead:
            if self._has_all:
                self._staged.take(self._following)
                self._note(self._following)
            self._begin_behind()
        elif not (self._behind and self._turns.behind):
            if self._behind:  # what has come to the spare memory is not in the parameters
                self._taken.clear()
            self._behind = self._has_all = False
            self._take_released()

    def _begin_behind(self) -> None:
        self._taken.clear()
        self._behind, self._has_all = True, False

    def _note(self, numbers: Sequence[int]) -> None:
        """The parameters are as they are without any write of user code."""
        self._take_norms(numbers)
        self._take_counts(numbers)

    # ---- what only looks at training, and a resumed run -----------------------------------------

    def show_masters(self) -> None:
        if self._behind and self._turns.behind and not self._shows:
            self._fetch_next()
            self._staged.bring(self._following)  # also what was put off until somebody looks
            self._swap(shows=True)

    def put_back(self) -> None:
        if self._shows:
            self.writes()
            self._swap(shows=False)

    def _swap(self, shows: bool) -> None:
        self._staged.swap(self._following)
        self._note(self._following)
        self._shows = shows

    def read_behind(self, number: int) -> list[torch.Tensor]:
        if not (self._behind and self._turns.behind):
            return []
        own = self._staged.copy_of(number) if self._shows else self._parameters[number]
        return [own.detach().cpu()]

    def resume(self, read: Mapping[int, Sequence[torch.Tensor]]) -> None:
        for number, (value, *_) in read.items():
            self._parameters[number].detach().copy_(value)
        self._note(list(read))
        self._begin_behind()
