"""The flat pass in several processes, which step one shared state in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridtrain.engine.memory import Arena, Layout, Store, UpdateMaker
from hybridtrain.engine.memory.arena import LentState, TensorPlace
from hybridtrain.engine.updates.flat.chunks import StepCountGroup
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.groups import Groups, members_of
from hybridtrain.engine.updates.kernels import kernel_for
from hybridtrain.engine.updates.thread_pool import Pool

# Largest buffer that is lent, in elements: each step first backs up the buffer and its state. Adam,
# two workers, two cores, alternating: with 334 k parameters rounds of workers were faster than the
# server's by 5 to 20 %, with 514 k slower by 4 to 9; updates one by one were faster with 334 k to
# 823 k by 12 to 20 %, as often slower as faster with 1.04 M, slower from 1.36 M on.
LARGEST = 3 * 2**17
LARGEST_ALONE = 7 * 2**17


class LentFlatUpdate:
    """An update on lent state, with a backup to undo an interrupted step.

    Args:
        update: has the lent state.
        kept: memory for the backup of the masters and the state.
        store: the shared rows.
    """

    def __init__(self, update: FlatUpdate, kept: Sequence[torch.Tensor], store: Store) -> None:
        self.update = update
        live = [store.masters[torch.float32], *update.flats.values(), *_figures(update)]
        self._pairs = list(zip(live, kept, strict=True))

    def keep(self) -> None:
        """Back up masters and state, before a step."""
        for live, kept in self._pairs:
            kept.copy_(live)

    def restore(self) -> None:
        """Undo a step whose process died in it."""
        for live, kept in self._pairs:
            live.copy_(kept)

    def set_groups(self, groups: Groups) -> bool:
        """Set changed hyper-parameters; False if they need other state tensors."""
        if not self.update.changes_no_state(groups):
            return False
        self.update.set_groups(groups)
        return True


def _figures(update: FlatUpdate) -> list[torch.Tensor]:
    return [figure for group in update.count_groups.all for figure in group.figures.values()]


class Lender:
    """Moves an update's state to memory that workers can map; for the server.

    Args:
        store: the shared rows.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._room: dict[int, TensorPlace] = {}  # address of a tensor -> place of its backup
        self._lent: LentFlatUpdate | None = None  # the last
        self._known: object = None  # its shape when it was lent

    def lend(self, update: object) -> LentState | None:
        """The place of the state; ``None`` if it cannot be lent (before its first step)."""
        store = self._store
        if not isinstance(update, FlatUpdate):
            return None
        groups = update.count_groups.all
        if not groups or not all(map(update.is_settled, groups)):
            return None
        names, masters = list(update.flats), store.masters[torch.float32]
        places = store.lending.placed([*update.flats.values(), *_figures(update)])
        views = [place.view(store.lending.arenas) for place in places]
        left = iter(zip(places[len(names) :], views[len(names) :], strict=True))
        told = []
        for group in groups:
            mine = {name: next(left) for name in group.figures}
            group.figures.update({name: view for name, (_, view) in mine.items()})
            figures = {name: place for name, (place, _) in mine.items()}
            told.append((group.group, tuple(group.members), figures, group.begun))
        update.use(dict(zip(names, views, strict=False)))
        kept = tuple(self._room_for([masters, *views]))
        arenas = store.lending.arenas
        self._lent = LentFlatUpdate(update, [place.view(arenas) for place in kept], store)
        self._known = _shape_of(update)
        flats = dict(zip(names, places, strict=False))
        return LentState(flats, tuple(told), kept, update.members)

    def _room_for(self, tensors: list[torch.Tensor]) -> list[TensorPlace]:
        missing = [tensor for tensor in tensors if tensor.data_ptr() not in self._room]
        places = self._store.lending.put(missing) if missing else []
        self._room |= {t.data_ptr(): p for t, p in zip(missing, places, strict=True)}
        return [self._room[tensor.data_ptr()] for tensor in tensors]

    def restore(self) -> None:
        """Undo a step whose process died in it."""
        assert self._lent is not None, "workers step only lent state"
        self._lent.restore()

    @property
    def lends(self) -> bool:
        """Whether state is lent."""
        return self._lent is not None

    def is_outdated(self, updates: Sequence[object]) -> bool:
        """Whether the lent state has been replaced; True only once."""
        if self._lent is None or self._known is None:
            return False
        update = self._lent.update
        if len(updates) == 1 and updates[0] is update and _shape_of(update) == self._known:
            return False
        self._known = None
        return True


def _shape_of(update: FlatUpdate) -> object:
    """The places of the state, and the step count groups."""
    flats = [(name, flat.data_ptr()) for name, flat in update.flats.items()]
    groups = update.count_groups.all
    return flats, [(g.group, tuple(g.members), _addresses(g), g.begun) for g in groups]


def _addresses(group: StepCountGroup) -> dict[str, int]:
    return {name: figure.data_ptr() for name, figure in group.figures.items()}


def may_be_lent(layout: Layout, maker: UpdateMaker) -> bool:
    """Whether the buffer is small enough for backups, and dense with one dtype."""
    most = LARGEST_ALONE if maker is UpdateMaker.ONE_BY_ONE else LARGEST
    size = layout.sizes.get(torch.float32, 0)
    return len(layout.sizes) == 1 and 0 < size <= most and not layout.sparse


def borrow(
    optimizer: torch.optim.Optimizer,
    numbers: Sequence[int],
    store: Store,
    lent: LentState,
    arenas: Mapping[int, Arena],
) -> LentFlatUpdate | None:
    """The lent update in a worker, with this optimizer's hyper-parameters, if possible.

    Not where this worker's optimizer has other groups: workers that run freely change them one by
    one, and the server knows whose parameters have no gradient.
    """
    if members_of(optimizer, numbers) != lent.members:
        return None
    bare: Any = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer) | {"state": {}})  # the user's is not changed
    vars(bare).pop("step", None)
    if (kernel := kernel_for(bare)) is None:  # the server has changed options of devices
        return None
    update = FlatUpdate(bare, numbers, store, Pool(1), kernel)
    update.count_groups.take_over(
        StepCountGroup(number, [*members], {n: p.view(arenas) for n, p in figures.items()}, begun)
        for number, members, figures, begun in lent.count_groups
    )
    update.use({name: place.view(arenas) for name, place in lent.flats.items()})
    return LentFlatUpdate(update, [place.view(arenas) for place in lent.kept], store)
