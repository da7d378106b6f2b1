"""Arena, layout and store: nameless memory, and where everything lies in it."""

from __future__ import annotations

import gc
import io
import mmap
import os
from pathlib import Path

import pytest
import torch

from hybridtrain.engine.memory import Arena, Layout, Store, limits
from hybridtrain.engine.memory.arena import ALIGNMENT_BYTES
from hybridtrain.errors import UserError


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


# ---- arena --------------------------------------------------------------------------------------


def test_an_arena_has_no_name_anywhere() -> None:
    before = set(Path("/dev/shm").iterdir())
    arena = Arena.create(1 << 20)
    assert set(Path("/dev/shm").iterdir()) == before
    target = Path(f"/proc/self/fd/{arena.fd}").readlink()
    assert str(target).endswith("(deleted)")


def test_an_arena_larger_than_the_machine_is_a_user_error_that_says_what_to_do() -> None:
    before = open_descriptors()
    with pytest.raises(UserError, match=r"MiB .* asked .* MiB are available.*use fewer workers"):
        Arena.create(1 << 46)
    assert open_descriptors() == before


def test_a_containers_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"max": "1000000", "current": "700000", "stat": "anon 1\ninactive_file 50000"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    assert limits.available_bytes() == 350_000
    with pytest.raises(UserError):
        Arena.create(400_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert (limits.available_bytes() or 0) > 2**24, "no limit: what the machine has"


def test_an_arena_begins_with_zeros_and_is_shared_by_its_descriptor() -> None:
    arena = Arena.create(1000)
    assert arena.n_bytes % ALIGNMENT_BYTES == 0
    one = arena.tensor(64, 10, torch.float32)
    assert one.count_nonzero() == 0
    other = Arena(os.dup(arena.fd), arena.n_bytes).tensor(64, 10, torch.float32)
    one.fill_(3.0)
    assert other.tolist() == [3.0] * 10


def test_an_arena_returns_its_descriptors_when_it_and_its_tensors_are_gone() -> None:
    gc.collect()
    before = open_descriptors()
    arena = Arena.create(1 << 16)
    tensor = arena.tensor(0, 4, torch.float32)
    del arena
    tensor.fill_(1.0)  # still mapped
    assert tensor.sum() == 4
    del tensor
    gc.collect()
    assert open_descriptors() == before


def test_a_view_is_saved_without_the_rest_of_the_arena() -> None:
    view = Arena.create(1 << 20).tensor(128, 8, torch.float32)
    assert view.untyped_storage().nbytes() == 8 * 4
    buffer = io.BytesIO()
    torch.save(view, buffer)
    assert buffer.tell() < 4096


def test_an_empty_tensor_may_lie_at_the_end() -> None:
    arena = Arena.create(64)
    assert arena.tensor(64, 0, torch.float32).shape == (0,)


def test_without_memfd_an_unlinked_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    arena = Arena.create(1 << 12)
    arena.tensor(0, 4, torch.int64).fill_(7)
    assert Arena(os.dup(arena.fd), arena.n_bytes).tensor(0, 4, torch.int64).tolist() == [7] * 4
    target = Path(f"/proc/self/fd/{arena.fd}").readlink()
    assert not target.exists()


# ---- layout -------------------------------------------------------------------------------------


def mixed() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).double()),
        ("c", torch.randn(())),
        ("d", torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)),
        ("e", torch.randn(0, 4)),
        ("f", torch.randn(9).bfloat16()),
        ("g", torch.randn(4, 6).t()),
        ("h", torch.randn(1).expand(3, 2)),
    ]


def test_every_slot_begins_on_a_cache_line_and_none_overlap() -> None:
    layout = Layout.of(mixed())
    ends: dict[torch.dtype, int] = {}
    for slot, (name, tensor) in zip(layout.slots, mixed(), strict=True):
        assert (slot.name, slot.shape, slot.numel) == (name, tuple(tensor.shape), tensor.numel())
        assert slot.offset * slot.dtype.itemsize % ALIGNMENT_BYTES == 0
        assert slot.offset >= ends.get(slot.dtype, 0)
        ends[slot.dtype] = slot.offset + slot.numel
    assert all(layout.sizes[dtype] >= end for dtype, end in ends.items())
    assert set(layout.sizes) == {torch.float32, torch.float64, torch.bfloat16}


def test_dense_strides_are_kept_and_gaps_are_closed() -> None:
    by_name = {slot.name: slot for slot in Layout.of(mixed()).slots}
    channels_last = dict(mixed())["d"]
    assert by_name["d"].stride == channels_last.stride() != torch.empty(2, 4, 3, 3).stride()
    assert by_name["g"].stride == (1, 6), "transposed, but dense"
    assert by_name["h"].stride in {(2, 1), (1, 3)}, "expanded: given memory of its own"
    sliced = torch.randn(6, 8)[:, ::2]
    assert Layout.of([("s", sliced)]).slots[0].stride == (4, 1)


def test_layouts_are_equal_exactly_when_parameters_are() -> None:
    assert Layout.of(mixed()) == Layout.of(mixed())
    assert Layout.of(mixed()) != Layout.of(mixed()[:-1])
    assert Layout.of([("a", torch.zeros(2, 3))]) != Layout.of([("a", torch.zeros(3, 2))])
    assert Layout.of([("a", torch.zeros(2))]) != Layout.of([("b", torch.zeros(2))])
    contiguous = torch.zeros(2, 4, 3, 3)
    other = contiguous.to(memory_format=torch.channels_last)
    assert Layout.of([("a", contiguous)]) != Layout.of([("a", other)])


# ---- store --------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_views_of_the_store_alias_its_flat_buffers_and_nothing_else(private: bool) -> None:
    store = Store(Layout.of(mixed()), n_workers=3, private_parameters=private)
    value = 0.0
    for slot in store.layout.slots:
        views = [store.master(slot), *(store.gradient(w, slot) for w in range(3))]
        if private:
            views += [store.parameter(w, slot) for w in range(3)]
        for view in views:
            value += 1
            assert tuple(view.shape) == slot.shape
            assert view.stride() == slot.stride
            view.fill_(value)
        firsts = [view.flatten()[0].item() for view in views if slot.numel]
        assert len(set(firsts)) == len(firsts), "rows are distinct"
        flat = store.masters[slot.dtype][slot.offset : slot.offset + slot.numel]
        assert torch.equal(slot.view(flat), store.master(slot))
        flat = store.gradients[2][slot.dtype][slot.offset : slot.offset + slot.numel]
        assert torch.equal(slot.view(flat), store.gradient(2, slot))


def test_the_elements_between_slots_stay_zero() -> None:
    store = Store(Layout.of(mixed()), n_workers=1, private_parameters=False)
    for slot in store.layout.slots:
        store.master(slot).fill_(1.0)
    for dtype, flat in store.masters.items():
        used = sum(slot.numel for slot in store.layout.slots if slot.dtype == dtype)
        assert flat.double().sum() == used <= flat.numel()


def test_in_lock_step_a_worker_computes_with_the_masters_themselves() -> None:
    store = Store(Layout.of(mixed()), n_workers=2, private_parameters=False)
    slot = store.layout.slots[0]
    assert store.parameter(1, slot).data_ptr() == store.master(slot).data_ptr()
    store.refresh(1)  # nothing to do
    assert store.copies == []


def test_refresh_brings_one_workers_copy_up_to_date_and_no_other() -> None:
    store = Store(Layout.of(mixed()), n_workers=2, private_parameters=True)
    for slot in store.layout.slots:
        store.master(slot).fill_(5.0)
    store.refresh(1)
    for slot in store.layout.slots:
        assert torch.equal(store.parameter(1, slot), store.master(slot))
        assert store.parameter(0, slot).count_nonzero() == 0


@pytest.mark.parametrize("private", [False, True])
def test_the_store_takes_the_memory_it_says(private: bool) -> None:
    layout, n_workers = Layout.of(mixed()), 3
    row = sum(-(-size * dtype.itemsize // 64) * 64 for dtype, size in layout.sizes.items())
    row = -(-row // mmap.PAGESIZE) * mmap.PAGESIZE
    store = Store(layout, n_workers, private)
    told = 64  # how far an update has come
    assert store.arena.n_bytes == row * (1 + n_workers * (2 if private else 1)) + told


def test_rows_of_sparse_gradients_take_memory_as_they_come() -> None:
    """A table of 1 MiB between two small parameters, whose rows are there as ever."""
    shapes = {"first": (5,), "table": (4096, 64), "last": (7, 3)}
    layout = Layout.of(((k, torch.empty(v)) for k, v in shapes.items()), sparse=[1])
    store = Store(layout, 3, private_parameters=False)

    def taken() -> int:
        return os.fstat(store.arena.fd).st_blocks * 512

    assert 2**20 <= taken() < 2**20 + 20 * mmap.PAGESIZE, "the masters, and no row of the table"
    assert store.arena.n_bytes > 4 * 2**20
    before, (first, table, last) = taken(), layout.slots
    for worker in range(3):
        store.gradient(worker, first).fill_(1.0)
        store.gradient(worker, last).fill_(2.0)
    assert taken() == before
    store.gradient(1, table)[:100].fill_(3.0)
    assert before < taken() <= before + 100 * 256 + 2 * mmap.PAGESIZE
    store.gradient(2, table).fill_(4.0)  # a dense one, after all
    assert float(store.gradient(1, table)[:100].mean()) == 3.0
    assert float(store.gradient(2, last).mean()) == 2.0


def test_another_process_sees_the_same_through_the_descriptor() -> None:
    layout = Layout.of(mixed())
    mine = Store(layout, 2, private_parameters=True)
    theirs = Store(layout, 2, True, Arena(os.dup(mine.arena.fd), mine.arena.n_bytes))
    for number, slot in enumerate(layout.slots):
        theirs.gradient(1, slot).fill_(number)
        mine.master(slot).fill_(number + 0.5)
        assert torch.equal(mine.gradient(1, slot), theirs.gradient(1, slot))
        assert torch.equal(mine.master(slot), theirs.master(slot))
