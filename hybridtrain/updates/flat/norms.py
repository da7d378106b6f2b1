"""The norm of the mean gradient, as in ``torch.nn.utils.clip_grad_norm_``.

Torch computes the norm of each parameter's gradient, and the norm of these. Here the rows are
merged piece by piece, several whole parameters at a time, with torch's bits. A parameter that is
larger than a piece is summed in parts, which may round differently.

Legend: n elements of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from hybridtrain.memory import Store
from hybridtrain.memory.layout import Slot
from hybridtrain.updates.flat.chunks import Present, cut

Merged = Callable[["NormPiece", torch.Tensor], torch.Tensor]  # piece, scratch -> mean


@dataclass(slots=True)
class NormPiece:
    """Neighbours with gradients from the same contributions, or a part of one parameter."""

    size: int  # n
    rows: tuple[torch.Tensor, ...]  # of each worker, and the accumulated one: (n,)
    present: Present
    spans: tuple[tuple[int, int], ...]  # of the parameters in it, without padding
    parts: int = 1  # number of parts, if this is a parameter's first; 0: a later one
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of each lane's scratch

    def norms(self, merged: Merged, lane: int, scratch: torch.Tensor) -> list[torch.Tensor]:
        """The norm of each span, ()."""
        mean = merged(self, scratch)
        if mean is not scratch:
            return list(torch._foreach_norm([mean[start:stop] for start, stop in self.spans]))
        if lane not in self.views:
            self.views[lane] = [scratch[start:stop] for start, stop in self.spans]
        return list(torch._foreach_norm(self.views[lane]))


def pieces(places: Iterable[tuple[int, Present]], store: Store, chunk: int) -> list[NormPiece]:
    """Cut into pieces; ``places``: slot number and contributions of each parameter."""
    found: list[NormPiece] = []
    waiting: list[Slot] = []
    known: Present = None
    for number, present in places:
        slot = store.layout.slots[number]
        if waiting and not (present == known and _follows(waiting, slot, chunk)):
            found.append(_together(waiting, known, store))
            waiting = []
        known = present
        if slot.numel > chunk:
            found += _apart(slot, present, store, chunk)
        elif slot.numel:
            waiting.append(slot)
    return found + ([_together(waiting, known, store)] if waiting else [])


def _follows(before: list[Slot], slot: Slot, chunk: int) -> bool:
    """Whether the slot follows these, and all fit into a piece."""
    near = 0 <= slot.offset - (before[-1].offset + before[-1].numel) < 16
    return near and slot.offset + slot.numel - before[0].offset <= chunk


def _together(slots: list[Slot], present: Present, store: Store) -> NormPiece:
    start, stop = slots[0].offset, slots[-1].offset + slots[-1].numel
    spans = tuple((slot.offset - start, slot.offset - start + slot.numel) for slot in slots)
    return NormPiece(stop - start, _rows(store, start, stop), present, spans)


def _apart(slot: Slot, present: Present, store: Store, chunk: int) -> Iterator[NormPiece]:
    bounds = cut(slot.offset, slot.offset + slot.numel, chunk)
    for place, (start, stop) in enumerate(bounds):
        parts = 0 if place else len(bounds)
        yield NormPiece(
            stop - start, _rows(store, start, stop), present, ((0, stop - start),), parts
        )


def _rows(store: Store, start: int, stop: int) -> tuple[torch.Tensor, ...]:
    return tuple([row[torch.float32][start:stop] for row in store.gradients])


def total(found: Iterable[NormPiece], norms: Iterable[list[torch.Tensor]]) -> torch.Tensor:
    """The norm of all, (), from the norms of each piece's spans."""
    whole: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    missing = 0
    for piece, own in zip(found, norms, strict=True):
        missing = (piece.parts or missing) - 1
        if piece.parts == 1:
            whole += own
            continue
        parts += own
        if not missing:
            whole.append(torch.linalg.vector_norm(torch.stack(parts)))
            parts = []
    return torch.linalg.vector_norm(torch.stack(whole))
