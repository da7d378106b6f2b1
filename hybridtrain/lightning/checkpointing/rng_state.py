"""Save and restore the RNG state, so that a resumed run draws the same numbers.

Lightning's checkpoints lack it: dropout and noise would repeat the first numbers of the seed. Under
our key a checkpoint holds the writing worker's states (torch, CUDA, numpy, Python), and those of
the other workers if all save together, or have stopped before one of them saves. Workers are seeded
alike, as under ddp, but draw unequally many where their mini-batches differ in size. Where a
checkpoint has the states of one worker, all go on from these, unless a module has seeded the
workers differently: then the others keep theirs. Numbers that loaders in worker 0's process drew
for prefetched mini-batches are drawn anew.

An interrupted run writes its checkpoint in the middle of a mini-batch, which the resumed run
repeats. So torch's state at the beginning of each step is kept (1 µs a step). The other states
would take 100 µs, so after an interrupt numpy's and Python's are some numbers ahead.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hybridtrain.engine.worker.client import Client
from hybridtrain.util.generators import look, put


class RngState:
    """A worker's RNG states.

    Args:
        client: to compare them with the other workers'.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, Any] | None = None  # to be restored
        self._compared = False  # with the other workers' states
        self._whole = True  # no mini-batch has begun since the last step
        self._before: torch.Tensor | None = None  # torch's state at that time
        self._first: torch.Tensor | None = None  # the same, when the masters had all steps

    # ---- saving ---------------------------------------------------------------------------------

    def begin_batch(self, has_unsent: bool = False) -> None:
        """Begin a mini-batch: restore, or remember torch's state.

        ``has_unsent``: masters lack steps.
        """
        self.throw()
        if self._whole:
            self._before, self._whole = torch.get_rng_state(), False
            if not has_unsent:
                self._first = self._before

    def commit(self) -> None:
        """A step has been made."""
        self._whole = True

    @property
    def under_way(self) -> bool:
        """Whether a mini-batch has begun since the last step."""
        return not self._whole

    def take_back(self) -> None:
        """The step was broken off."""
        self._whole, self._before = False, self._first

    def state(self, has_unsent: bool = False) -> dict[str, Any]:
        """The states after the last step, as plain data and tensors.

        Args:
            has_unsent: the resumed run repeats the steps that the masters lack, too.
        """
        if self._kept is not None:
            return self._kept  # nothing has been drawn since the checkpoint was restored
        found = look()
        before = self._first if has_unsent else self._before
        if before is not None and (has_unsent or not self._whole):
            found["torch"] = before
        version, numbers, gauss = found["python"]
        name, keys, place, has_gauss, cached = found["numpy"]
        found["python"] = version, _tensor(numbers), gauss
        found["numpy"] = str(name), _tensor(keys), place, has_gauss, cached
        return found

    # ---- restoring ------------------------------------------------------------------------------

    def keep(self, saved: Mapping[str, Any]) -> None:
        """Restore the states in a checkpoint at the next ``throw``.

        If it has those of as many workers as train now, each restores its own, else worker 0's.
        """
        client, others = self._client, saved.get("dice_of", {})
        self._compared = len(others) == client.n_workers - 1
        writers = saved.get("dice")
        self._kept = others.get(client.worker, writers) if self._compared else writers

    @property
    def waits(self) -> bool:
        """Whether there are states to restore."""
        return self._kept is not None

    def compare(self) -> None:
        """Drop the states unless this worker draws like worker 0. All meet, once per checkpoint.

        A worker without a mini-batch in the resumed epoch asks again in the next, where the other
        workers do not: hence only once.
        """
        if self._compared:
            return
        self._compared = True
        mine = torch.get_rng_state()
        states = self._client.gather("dice", mine)
        if self._client.worker and not all(torch.equal(mine, each) for each in states):
            self._kept = None

    def throw(self) -> None:
        """Restore the states now, if there are some."""
        state, self._kept = self._kept, None
        if state is not None:
            put(_parsed(state))


def are_states(saved: Any) -> bool:
    """Whether generators take these states of a checkpoint; those of this process stay."""
    try:
        states = _parsed(saved)
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
    except Exception:  # of a damaged file, whatever the three raise
        return False
    return True


def _parsed(saved: Mapping[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = saved["python"]
    name, keys, *rest = saved["numpy"]
    python = version, tuple(_numbers(numbers).tolist()), gauss
    return {**saved, "python": python, "numpy": (name, _numbers(keys), *rest)}


def _tensor(numbers: Any) -> torch.Tensor:
    """32-bit unsigned numbers as torch's int32."""
    return torch.from_numpy(np.asarray(numbers, np.uint32).view(np.int32).copy())


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)
