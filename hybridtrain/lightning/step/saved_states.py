"""Save and load the state of the masters' optimizer and each worker's own state.

One worker writes the checkpoint. The state of the user's optimizer is where Lightning and plain
PyTorch look for it. Beside it are the state of the masters' own optimizer, if there is one, and,
where workers train on their own, each worker's moments, exchange state and parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.exchanges.exchange import OWN
from hybridtrain.engine.memory.scratch_file import Scratch, fill, read
from hybridtrain.engine.step.worker_step import MASTERS, WorkerStep
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.replica import Replica
from hybridtrain.lightning.checkpointing.checkpoint_content import READ, WORKERS, restoring
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_shapes, check_worker

States = dict[int, dict[str, Any]]  # by worker


class SavedStates:
    """Saves the states into checkpoints, and loads them.

    Args:
        client: to the server, and to the other workers.
        like: the worker whose state this one has, too.
    """

    def __init__(self, client: Client, like: int) -> None:
        self._client, self._like = client, like
        self._masters: dict[int, dict[str, Any]] = {}  # id(optimizer) -> of the masters' own
        self._inner: dict[int, States] = {}  # id(optimizer) -> what is each worker's own
        self._gathered: list[States] = []  # of each optimizer, while all save together
        self._read: dict[int, dict[int, list[torch.Tensor]]] = {}  # id(optimizer) -> by place

    # ---- back -----------------------------------------------------------------------------------

    def load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer's state, and keep the masters' and workers' parts until training."""
        own = dict(state)
        if (masters := own.pop(MASTERS, None)) is not None:
            self._masters[id(optimizer)] = masters
        self._inner[id(optimizer)] = own.pop(WORKERS, {})
        self._read[id(optimizer)] = own.pop(READ, {})
        for inner in self._inner[id(optimizer)].values():
            check_worker(optimizer, inner, "ckpt")
        optimizer.load_state_dict(own)

    def masters_of(
        self, optimizer: torch.optim.Optimizer, update: NamedUpdate, own: bool
    ) -> torch.optim.Optimizer:
        """Make the optimizer that steps the masters; a resumed run restores its state.

        ``own``: workers step the user's optimizer themselves.
        """
        made = update.beside(optimizer, own)
        apart = made is not optimizer
        loaded = self._masters.pop(id(optimizer), None)
        if loaded is not None and apart and loaded["update"] == update.name:
            check_shapes(made, {"state": loaded["state"]}, "ckpt")
            made.load_state_dict(made.state_dict() | {"state": loaded["state"]})
        elif loaded is not None or (apart and not own and optimizer.state):
            rank_zero_warn(
                f"the checkpoint is of a run with another update than {update.name}, whose "
                "optimizer in host memory begins without state; give the same update to go on as "
                "it was"
            )
        return made

    def take_back(self, steps: Sequence[WorkerStep]) -> None:
        """Restore this worker's own state, or if there is none the saving worker's."""
        for step in steps:
            states = self._inner.pop(id(step.optimizer), {})
            if not states or not step.own_state():
                continue
            tell_what_is_dropped(states, self._client.n_workers)
            known = states[min(states)]
            exchange = {key: part for key, part in known["exchange"].items() if key not in OWN}
            saver: dict[str, Any] = {"exchange": exchange}
            if "means" in known:  # all count alike the steps since then; this one has made none
                saver["means"] = known["means"][0], 0.0
            used = states.get(self._client.worker, {}).get("used", 0.0)
            with restoring():
                step.load_own_state({**states.get(self._like, saver), "used": used})

    def take_read(self, steps: Sequence[WorkerStep]) -> dict[int, list[torch.Tensor]]:
        """By number, the parameters that workers computed with, if they were an update behind."""
        return {
            step.numbers[place]: value
            for step in steps
            for place, value in self._read.pop(id(step.optimizer), {}).items()
            if place < len(step.numbers)
        }

    # ---- into -----------------------------------------------------------------------------------

    def gather(self, steps: Sequence[WorkerStep], numbers: Any) -> dict[int, Any]:
        """Collective: the leader receives the states of all, as nameless files, not as messages.

        Returns, in the leader, the random ``numbers`` of each worker.
        """
        client = self._client
        own = [step.own_state() for step in steps]
        self._gathered = [{} for _ in own] if client.group.is_leader else []
        numbers_of: dict[int, Any] = {}
        scratch = Scratch(client.apart)
        try:
            left = b"" if client.group.is_leader else fill(scratch.path, (own, numbers))
            sent = client.gather("inner states", (client.worker, scratch.path, left), invites=True)
            for worker, path, rest in sent if client.group.is_leader else ():
                mine = worker == client.worker
                found, numbers_of[worker] = (own, numbers) if mine else read(path, rest)
                for states, state in zip(self._gathered, found, strict=True):
                    states[worker] = state
            client.gather("inner states are read", None)
        finally:
            scratch.close()
        return numbers_of

    def forget(self) -> None:
        """All have saved together."""
        self._gathered = []

    def with_inner(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each optimizer's saved state and what was gathered; this worker's moments only once."""
        if not (gathered := self._gathered):
            return states
        self.forget()
        worker = self._client.worker
        for inner in gathered:
            inner[worker] = {key: part for key, part in inner[worker].items() if key != "state"}
        return [own | {WORKERS: inner} for own, inner in zip(states, gathered, strict=True)]

    @staticmethod
    def with_read(
        states: list[dict[str, Any]], steps: Sequence[WorkerStep], replica: Replica
    ) -> list[dict[str, Any]]:
        """Each optimizer's saved state, with the parameters that workers compute with.

        Only where they are an update behind those that are saved.
        """
        found = []
        for state, step in zip(states, steps, strict=True):
            read = {place: replica.read_behind(n) for place, n in enumerate(step.numbers)}
            found.append(state | {READ: read} if any(read.values()) else state)
        return found


def tell_what_is_dropped(states: Mapping[int, object], n_workers: int) -> None:
    """Say in one line what becomes of a checkpoint of another number of workers."""
    if len(states) == n_workers:
        return
    there = f"the checkpoint has optimizer states of {len(states)} workers and {n_workers} train"
    if max(states) >= n_workers:
        rank_zero_warn(f"{there}: those of workers from {n_workers} on are dropped")
    else:
        rank_zero_warn(f"{there}: the others begin with that of worker {min(states)}")
