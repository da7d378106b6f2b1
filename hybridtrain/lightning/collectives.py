"""Lightning's collectives, by gathers at the server. No process group, no port.

With torch's default process group, Lightning would broadcast a flag on every batch, which would
lock-step free-running workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from hybridtrain.engine.protocol.checksums import CALLED_AT
from hybridtrain.engine.worker.client import Client
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import named_metrics, state_in
from hybridtrain.util.attributes import temporarily

T = TypeVar("T")
_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "product": torch.prod,
}
# Packages between user code and a collective, by the beginnings of their modules' names.
_BETWEEN = ("hybridtrain.lightning", "pytorch_lightning", "lightning", "torch", "contextlib")


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A tensor of the sender's device, to be moved to the receiver's."""

    tensor: torch.Tensor  # host


class Collectives:
    """Collectives of all workers, of tensors and objects.

    While ``local`` is set (free-running workers within an epoch), a collective returns this
    worker's own value at once.

    Every collective is named: a metric by its name, a call of user code by its line. Workers that
    meet in different ones are an error that names both, since values would be mixed up.

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
        self._logged = ""  # the name under which ``self.log`` is being called
        self._later = False  # its value is reduced later, together with others
        self._path = ""  # of the part of a dictionary that is being gathered

    def __deepcopy__(self, memo: Any) -> Collectives:
        """A copy of a metric synchronises as the metric does."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A metric that is saved is connected to nobody where it is loaded."""
        return _Unconnected, ()

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

    @property
    def meets(self) -> bool:
        """Whether what is logged now is put together with that of other workers."""
        return not self.local and self._client.n_workers > 1

    def refusing(self, alone: str) -> AbstractContextManager[None]:
        """Let collectives raise, with ``alone`` as the reason."""
        return temporarily(self, alone=alone)

    def logging(self, name: str, later: bool) -> AbstractContextManager[None]:
        """Within ``self.log(name, …)``; ``later``: what it reduces is reduced later, not now."""
        return temporarily(self, _logged=name, _later=later)

    def within(self, key: object) -> AbstractContextManager[None]:
        """Within ``self.all_gather`` of a dictionary, of the value under this key."""
        return temporarily(self, _path=f"{self._path}[{key!r}]")

    def exchange(
        self, tag: str, item: Any, names: Sequence[str] = (), in_step: bool = False
    ) -> list[tuple[int, Any]]:
        """Every worker's number and item.

        ``names``: what the item is of, for error messages; ``in_step``: before the next step.
        """
        self._check_that_others_come(tag)
        items = self._client.gather(tag, item, names=", ".join(names), in_step=in_step)
        return [*zip(self._numbers(len(items)), items, strict=True)]

    def _numbers(self, n: int) -> Sequence[int]:
        """The numbers of the ``n`` workers that have just met."""
        return self._client.group.met if n > 1 else (self._client.worker,)

    def _gather(self, tag: str, item: Any) -> list[Any]:
        self._check_that_others_come(tag)
        return self._client.gather(tag, item)

    def _check_that_others_come(self, tag: str) -> None:
        if self.alone and self._client.n_workers > 1 and not self._client.group.solo:
            name = tag.partition(CALLED_AT)[0]
            raise UserError(f"a collective ('{name}') was called {self.alone}")

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
        if self.local or client.group.solo:
            return obj
        source = src if src in client.group.there else client.group.there[0]
        while True:
            mine = tree_map_only(torch.Tensor, _sent, obj) if client.worker == source else None
            known = self._gather("broadcast", (source, mine))
            if all(whose == source for whose, _ in known) and source in client.group.met:
                found = known[client.group.met.index(source)][1]
                return tree_map_only(_OnDevice, lambda sent: sent.tensor.to(self._device), found)
            # It was lost meanwhile, or not all know that it is; all know which workers have met.
            source = src if src in client.group.met else client.group.met[0]

    def decide(self, decision: bool, all_must_agree: bool) -> bool:
        """Whether all (or any) workers decide True."""
        if self.local:
            return decision
        votes = self._gather("decision", bool(decision))
        return all(votes) if all_must_agree else any(votes)

    def reduce(self, tensor: T, op: Any) -> T:
        """Reduce elementwise over the workers, in the order of their numbers.

        The mean of integers is a float, not truncated.

        Raises:
            UserError: if the workers' shapes differ.
        """
        if not isinstance(tensor, torch.Tensor) or self.local or self._later:
            return tensor
        what = f"self.log({self._logged!r}, sync_dist=True)" if self._logged else "reduce"
        tag = what if self._logged else f"{what}{_place()}"
        parts = self._gather(tag, tensor.detach().cpu())
        result = fold(self._alike(tag, parts), op).to(tensor.device)
        if tensor.dtype == result.dtype and not tensor.requires_grad:
            return tensor.copy_(result)  # type: ignore[return-value]
        return result  # type: ignore[return-value]

    def all_gather(
        self, tensor: torch.Tensor, sync_grads: bool, weight: float = 1.0, what: str = ""
    ) -> torch.Tensor:
        """All workers' tensors, stacked: (W, …).

        Args:
            tensor: this worker's.
            sync_grads: let its gradient be that of the sum of all workers' losses.
            weight: of this worker's loss in that sum; its own gradient is divided by it.
            what: the part that gathers; empty: user code.

        Raises:
            UserError: if workers run freely, or their shapes differ.
        """
        tag = what or f"all_gather{self._path and f' of {self._path}'}{_place()}"
        self._check_that_others_come(tag)
        if self.local:
            raise UserError(
                "all_gather was called while workers run freely, so they are not at the same step; "
                "call it at the end of an epoch, or use strategy=hybrid"
            )
        if sync_grads:
            return _GatherWithGradient.apply(
                tensor, partial(self._stack, tag), self._client, weight
            )
        return self._stack(tag, tensor)

    def _stack(self, tag: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._client.gather(tag, tensor.detach().cpu())
        return self._alike(tag, parts).to(tensor.device)

    def _alike(self, tag: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack tensors of one shape.

        Raises:
            UserError: if the shapes differ.
        """
        shapes = [tuple(each.shape) for each in parts]
        if all(shape == shapes[0] for shape in shapes):
            return torch.stack([*parts])
        known = zip(self._numbers(len(parts)), shapes, strict=True)
        given = ", ".join(f"{shape} in worker {worker}" for worker, shape in known)
        raise UserError(
            f"{tag} was given tensors of different shapes: {given}; give it one shape in all "
            "workers: pad to the longest (gather the lengths first, then "
            "torch.nn.functional.pad), or collect the samples in a torchmetrics.CatMetric"
        )

    def teach(self, module: torch.nn.Module) -> None:
        """Let the module's torchmetrics synchronise by these collectives."""
        for name, metric in named_metrics(module).items():
            metric.distributed_available_fn = self._is_distributed
            metric.dist_sync_fn = partial(self._gather_state, name, metric)

    def _is_distributed(self) -> bool:
        return self.meets

    def _gather_state(
        self, name: str, metric: Metric, tensor: torch.Tensor, group: Any = None
    ) -> list[torch.Tensor]:
        """All workers' values of one state of the metric, or of an element of its list."""
        tag = f"metric {name!r} ({state_in(metric, tensor)})"
        parts = self._gather(tag, tensor.detach().cpu())
        full = next((part for part in parts if part.numel()), parts[0])
        # Of a worker without samples torchmetrics gives an empty tensor of its own dtype, (0,).
        parts = [part if part.numel() else full.new_empty((0, *full.shape[1:])) for part in parts]
        return [part.to(tensor.device) for part in parts]


class _Unconnected(Collectives):
    """Collectives of a process that is no worker: it is the only participant."""

    def __init__(self) -> None:
        self.local = True


def _place() -> str:
    """Where user code calls a collective: file and line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_BETWEEN):
            return f"{CALLED_AT}{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _GatherWithGradient(torch.autograd.Function):
    """Forward: stack. Backward: the weighted sum of all workers' gradients of this worker's part.

    It is divided by this worker's weight, since a worker's gradients are weighted later.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, stack: partial[torch.Tensor], client: Client, weight: float
    ) -> torch.Tensor:
        ctx.stack, ctx.client, ctx.weight = stack, client, weight
        return stack(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (tag,) = ctx.stack.args
        total = ctx.stack.func(f"backward of {tag}", grads[0] * ctx.weight).sum(dim=0)
        return total[ctx.client.group.place] / max(ctx.weight, 1e-12), None, None, None


def _sent(tensor: torch.Tensor) -> torch.Tensor | _OnDevice:
    return tensor if tensor.device.type == "cpu" else _OnDevice(tensor.detach().cpu())


def fold(stacked: torch.Tensor, op: Any) -> torch.Tensor:
    """Reduce the workers' values, (W, …); the mean of integers is a float."""
    name = "mean" if op is None else str(op).rsplit(".", maxsplit=1)[-1].lower()
    if name in _FOLDS:
        return _FOLDS[name](stacked, dim=0)
    if name not in ("mean", "avg"):
        rank_zero_warn(f"the reduction {op!r} is unknown; the mean is taken instead")
    exact = stacked.is_floating_point() or stacked.is_complex()
    return (stacked if exact else stacked.to(torch.float32)).mean(dim=0)
