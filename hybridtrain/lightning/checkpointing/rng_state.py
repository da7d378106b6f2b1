"""Random numbers of a run that goes on are those that would have come next.

Lightning's checkpoints do not say how far the generators of random numbers had got, so dropout and
noise would begin again with the first numbers of the seed. Under our key a checkpoint holds the
states of the worker that writes it (torch, CUDA, numpy, Python). All workers are seeded alike and
draw alike, as under ddp; where a module has seeded them apart, only the worker that writes goes on
with its numbers. What loaders draw in worker 0's own process for mini-batches fetched ahead is
drawn anew.

A checkpoint may be written in the middle of a mini-batch, when a run is interrupted. That one is
done again, so torch's state of its beginning is kept (a microsecond for each step; the others'
would take a hundred, so that after an interrupt numpy's and Python's numbers are some further on).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from hybridtrain.worker.client import Client


def look() -> dict[str, Any]:
    """The states of this process' generators."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put(states: dict[str, Any]) -> None:
    """Go on from there."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class RngState:
    """The generators of this process, in a worker.

    Args:
        client: to compare them with the others'.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, Any] | None = None  # to go on with
        self._compared = False  # with the other workers' states
        self._whole = True  # no mini-batch has begun since the last step
        self._before: torch.Tensor | None = None  # torch's state then
        self._aside: dict[str, Any] = {}  # all of them, as the last validation began

    # ---- saving ---------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A mini-batch begins."""
        if self._kept is not None:
            self._throw(self._kept)
        if self._whole:
            self._before, self._whole = torch.get_rng_state(), False

    def begin_validation(self) -> None:
        """One begins, and an iterator draws a number."""
        self.throw()
        self._aside = look()

    def commit(self) -> None:
        """A step has been made."""
        self._whole = True

    @property
    def under_way(self) -> bool:
        """Whether a mini-batch has begun since the last step."""
        return not self._whole

    def take_back(self) -> None:
        """It was broken off."""
        self._whole = False

    def state(self, validates: bool = False) -> dict[str, Any]:
        """From where training goes on behind the last step; plain data and tensors.

        Args:
            validates: a validation is under way, which will be done again.
        """
        if self._kept is not None:
            return self._kept  # nothing has been drawn since the checkpoint that training came from
        found = dict(self._aside) if validates else look()
        if self._before is not None and not self._whole:
            found["torch"] = self._before
        version, numbers, gauss = found["python"]
        name, keys, place, has_gauss, cached = found["numpy"]
        found["python"] = version, _tensor(numbers), gauss
        found["numpy"] = str(name), _tensor(keys), place, has_gauss, cached
        return found

    # ---- going on -------------------------------------------------------------------------------

    def keep(self, state: dict[str, Any] | None) -> None:
        """This is what a checkpoint says."""
        self._kept, self._compared = state, False

    @property
    def waits(self) -> bool:
        """Whether there is something to go on with."""
        return self._kept is not None

    def compare(self) -> None:
        """Keep the state only if it is this worker's too. A meeting of all, once for a checkpoint.

        A worker that has no mini-batch in the epoch that goes on still waits in the next one, where
        the others, which had some, do not meet it.
        """
        if self._compared:
            return
        self._compared = True
        mine = torch.get_rng_state()
        states = self._client.gather("dice", mine)
        if self._client.worker and not all(torch.equal(mine, each) for each in states):
            self._kept = None

    def throw(self) -> None:
        """Go on from there now."""
        if self._kept is not None:
            self._throw(self._kept)

    def _throw(self, state: dict[str, Any]) -> None:
        self._kept = None
        version, numbers, gauss = state["python"]
        name, keys, *rest = state["numpy"]
        python = version, tuple(_numbers(numbers).tolist()), gauss
        put({**state, "python": python, "numpy": (name, _numbers(keys), *rest)})


def _tensor(numbers: Any) -> torch.Tensor:
    """Of 32 bits each, which torch has only with a sign."""
    return torch.from_numpy(np.asarray(numbers, np.uint32).view(np.int32).copy())


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)
