"""What a step overwrites, kept while it may have to be undone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridtrain.updates.flat.chunks import Chunk, StepCountGroup


class Undo:
    """Keeps the chunks and step counts of one step.

    Args:
        buffers: (P,) each, for the masters and as many state tensors as a chunk may have.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._chunks: list[Chunk] = []
        self._counts: list[tuple[StepCountGroup, dict[str, torch.Tensor], bool]] = []

    def begin(self, count_groups: Sequence[StepCountGroup]) -> None:
        """A step of these begins; forget the last one."""
        self._chunks = []
        self._counts = [
            (each, {name: figure.clone() for name, figure in each.figures.items()}, each.begun)
            for each in count_groups
        ]

    def keep(self, chunk: Chunk) -> None:
        """The chunk is about to be stepped; by any thread."""
        end = chunk.start + chunk.size
        for buffer, part in zip(self._buffers, (chunk.parameter, *chunk.state), strict=False):
            buffer[chunk.start : end].copy_(part)
        self._chunks.append(chunk)

    def undo(self) -> None:
        """Bring all that back."""
        for chunk in self._chunks:
            end = chunk.start + chunk.size
            for buffer, part in zip(self._buffers, (chunk.parameter, *chunk.state), strict=False):
                part.copy_(buffer[chunk.start : end])
        for count_group, figures, begun in self._counts:
            count_group.begun = begun
            for name, figure in figures.items():
                count_group.figures[name].copy_(figure)
        self.begin(())
