"""Batch normalisation over the mini-batches of all workers (``Trainer(sync_batchnorm=True)``).

Torch's ``SyncBatchNorm`` needs GPUs and a process group. Here the server gathers the statistics, so
any device works. Every worker sends count, mean and sum of squared deviations of its share; they
are combined as in Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for
computing sample variances", formula 2.1. The result, gradients included, is that of one worker with
the union of the mini-batches.

Legend: C channels, W workers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pytorch_lightning.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from hybridtrain.lightning.collectives import Collectives


class HostBatchNorm(_BatchNorm):
    """Batch normalisation of any number of dimensions over all workers' samples.

    ``weight``, ``bias`` and buffers are those of the replaced layer. In evaluation it is ordinary.
    """

    # A class attribute, so that layers can be copied and saved.
    collectives: ClassVar[Collectives | None] = None

    @classmethod
    def of(cls, layer: _BatchNorm) -> HostBatchNorm:
        """Convert a layer, hooks and parameters included."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        return made

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"an input of {input.dim()} dimensions was given to a batch normalisation, which "
                "takes at least 2: samples first, then channels"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # (N, C, ...)
        group = self.collectives
        if not self.training or group is None or group.n_workers == 1:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = _statistics(input, group)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        normalised = (input - mean.view(shape)) * scale.view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance, as in torch."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _statistics(
    input: torch.Tensor, group: Collectives
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and biased variance over all workers, (C,) each, and the number of values."""
    wide = input if input.dtype == torch.float64 else input.float()
    others = [d for d in range(input.dim()) if d != 1]
    counts_at_all = float(group.samples > 0)  # a filler has none
    own = counts_at_all * (input.numel() // input.shape[1])
    mean = wide.mean(others)
    deviations = (wide - mean.view(1, -1, *[1] * (input.dim() - 2))).square().sum(others)
    deviations = deviations * counts_at_all
    local = torch.stack([mean, deviations, torch.full_like(mean, own)])  # (3, C)
    gathered = group.all_gather(local, True, group.weight, "sync_batchnorm")  # (W, 3, C)
    means, sums, counts = gathered.unbind(dim=1)  # (W, C)
    total = counts.sum(dim=0)
    overall = (counts * means).sum(dim=0) / total
    variance = (sums + counts * (means - overall).square()).sum(dim=0) / total
    return overall, variance, float(total[0])


def synchronise(
    module: torch.nn.Module, layer_sync: LayerSync | None, collectives: Collectives
) -> None:
    """Synchronise the module's batch normalisation in place, if the user has asked for it.

    Args:
        module: the user's.
        layer_sync: Lightning's plugin; the standard one is replaced by this file, another is the
            user's own.
        collectives: of this worker.
    """
    if layer_sync is not None and not isinstance(layer_sync, TorchSyncBatchNorm):
        layer_sync.apply(module)
        return
    # The user may have converted layers with torch's ``convert_sync_batchnorm``.
    converted = any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules())
    if layer_sync is None and not converted:
        return
    HostBatchNorm.collectives = collectives
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, _LazyNormBase):
                setattr(parent, name, HostBatchNorm.of(child))
