"""Which samples a worker validates and tests with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

from hybridtrain.client import Client


class EvaluationSampler(Sampler[int]):
    """Every W-th sample, none twice, in the order of the user's sampler.

    Where there are fewer samples than workers every worker sees them all, because Lightning skips
    the evaluation of a worker that has none and would leave the others waiting.
    """

    def __init__(self, indices: Sequence[int], client: Client) -> None:
        whole = len(indices) < client.n_workers
        self._indices = indices if whole else indices[client.worker :: client.n_workers]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)
