"""Lightning's collectives, by gathers at the server. No process group, no port.

With torch's default process group, Lightning would broadcast a flag on every batch, which would
lock-step free-running workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_map_only

from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import metrics_in
from hybridtrain.util.attributes import temporarily
from hybridtrain.worker.client import Client

T = TypeVar("T")
_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "product": torch.prod,
}


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A tensor of the sender's device, to be moved to the receiver's."""

    tensor: torch.Tensor  # host


class Collectives:
    """Collectives of all workers, of tensors and objects.

    While ``local`` is set (free-running workers within an epoch), a collective returns this
    worker's own value at once.

    Args:
        client: to the server.
        device: this worker's.
    """

    def __init__(self, client: Client, device: torch.device | None = None) -> None:
        self._client, self._device = client, device or torch.device("cpu")
        self.local = False
        self.samples = 1.0  # of this worker's mini-batch
        self.weight = 1.0  # of its gradient in the next step
        self.alone = ""  # why no other worker takes part now; empty: they do

    def stay_local(self, local: bool) -> None:
        """The other workers do, or do not, do what this one does."""
        self.local = local

    def begin_batch(self, local: bool, samples: float, weight: float) -> None:
        """A mini-batch of so many samples begins; ``weight``: of its gradient in the next step."""
        self.local, self.samples, self.weight = local, samples, weight

    @property
    def n_workers(self) -> int:
        """W."""
        return self._client.n_workers

    def refusing(self, alone: str) -> AbstractContextManager[None]:
        """Let collectives raise, with ``alone`` as the reason."""
        return temporarily(self, alone=alone)

    def _gather(self, tag: str, item: Any) -> list[Any]:
        self._check_that_others_come(tag)
        return self._client.gather(tag, item)

    def _check_that_others_come(self, tag: str) -> None:
        if self.alone and self._client.n_workers > 1 and not self._client.solo:
            raise UserError(f"a collective ('{tag}') was called {self.alone}")

    def barrier(self, name: str) -> None:
        """Wait for all workers."""
        if not self.local:
            self._gather(f"barrier {name}", None)

    def broadcast(self, obj: T, src: int) -> T:
        """Worker ``src``'s object, in all workers; in a worker left alone, its own.

        Tensors of the sender's device move to the receiver's. The first remaining worker replaces a
        lost ``src``.
        """
        client = self._client
        if self.local or client.solo:
            return obj
        source = src if src in client.there else client.there[0]
        while True:
            mine = tree_map_only(torch.Tensor, _sent, obj) if client.worker == source else None
            known = self._gather("broadcast", (source, mine))
            if all(whose == source for whose, _ in known) and source in client.met:
                found = known[client.met.index(source)][1]
                return tree_map_only(_OnDevice, lambda sent: sent.tensor.to(self._device), found)
            # It was lost meanwhile, or not all know that it is; all know which workers have met.
            source = src if src in client.met else client.met[0]

    def decide(self, decision: bool, all_must_agree: bool) -> bool:
        """Whether all (or any) workers decide True."""
        if self.local:
            return decision
        votes = self._gather("decision", bool(decision))
        return all(votes) if all_must_agree else any(votes)

    def reduce(self, tensor: T, op: Any) -> T:
        """Reduce elementwise over the workers, in the order of their numbers.

        The mean of integers is a float, not truncated.
        """
        if not isinstance(tensor, torch.Tensor) or self.local:
            return tensor
        parts = self._gather("reduce", tensor.detach().cpu())
        result = _fold(torch.stack(parts), op).to(tensor.device)
        if tensor.dtype == result.dtype and not tensor.requires_grad:
            return tensor.copy_(result)  # type: ignore[return-value]
        return result  # type: ignore[return-value]

    def all_gather(
        self, tensor: torch.Tensor, sync_grads: bool, weight: float = 1.0
    ) -> torch.Tensor:
        """All workers' tensors, stacked: (W, …).

        Args:
            tensor: this worker's.
            sync_grads: let its gradient be that of the sum of all workers' losses.
            weight: of this worker's loss in that sum; its own gradient is divided by it.
        """
        self._check_that_others_come("all_gather")
        if self.local:
            raise UserError(
                "all_gather was called while workers run freely, so they are not at the same step; "
                "call it at the end of an epoch, or use strategy=hybrid"
            )
        if sync_grads:
            return _GatherWithGradient.apply(tensor, self._client, weight)
        return _stack(self._client, "all_gather", tensor)

    def teach(self, module: torch.nn.Module) -> None:
        """Let the module's torchmetrics synchronise by these collectives."""
        for metric in metrics_in(module):
            metric.distributed_available_fn = self._distributed
            metric.dist_sync_fn = self._gather_list

    def _distributed(self) -> bool:
        return self._client.n_workers > 1 and not self.local

    def _gather_list(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        parts = self._gather("metric", tensor.detach().cpu())
        return [part.to(tensor.device) for part in parts]


class _GatherWithGradient(torch.autograd.Function):
    """Forward: stack. Backward: the weighted sum of all workers' gradients of this worker's part.

    It is divided by this worker's weight, since a worker's gradients are weighted later.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, client: Client, weight: float) -> torch.Tensor:
        ctx.client, ctx.weight = client, weight
        return _stack(client, "all_gather", tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = _stack(ctx.client, "all_gather backward", grads[0] * ctx.weight).sum(dim=0)
        return total[ctx.client.place] / max(ctx.weight, 1e-12), None, None


def _sent(tensor: torch.Tensor) -> torch.Tensor | _OnDevice:
    return tensor if tensor.device.type == "cpu" else _OnDevice(tensor.detach().cpu())


def _stack(client: Client, tag: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack(client.gather(tag, tensor.detach().cpu())).to(tensor.device)


def _fold(stacked: torch.Tensor, op: Any) -> torch.Tensor:
    name = "mean" if op is None else str(op).rsplit(".", maxsplit=1)[-1].lower()
    if name in _FOLDS:
        return _FOLDS[name](stacked, dim=0)
    if name not in ("mean", "avg"):
        rank_zero_warn(f"the reduction {op!r} is unknown; the mean is taken instead")
    exact = stacked.is_floating_point() or stacked.is_complex()
    return (stacked if exact else stacked.to(torch.float32)).mean(dim=0)
