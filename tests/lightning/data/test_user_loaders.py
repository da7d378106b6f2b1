"""A loader of the user's own class stays itself: its mini-batches are trained and evaluated on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, islice
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from tests.lightning.metamorphic.strategies import NAMES, make
from tests.lightning.toys import make_trainer
from tests.picking import by_default

N, SIZE = 22, 4
WIDEST = 8


class Numbers(Dataset[torch.Tensor]):
    """Sample number n is n."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


DATA = Numbers()


# ---- loaders as users write them -----------------------------------------------------------------


class Scaled(DataLoader[Any]):
    """Keeps its argument under another name."""

    def __init__(self, dataset: Any, factor: float = 1.0, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._scale = factor

    def __iter__(self) -> Any:
        return (batch * self._scale for batch in super().__iter__())


class Required(DataLoader[Any]):
    """Its arguments cannot be guessed from its attributes."""

    def __init__(self, offset: float, /, *, path: str) -> None:
        super().__init__(Numbers(int(path)), SIZE)
        self._offset = offset

    def _get_iterator(self) -> Any:
        return (batch + self._offset for batch in super()._get_iterator())


class Prefetching(DataLoader[Any]):
    """Has the next mini-batch while one is used."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        held = next(batches, None)
        while held is not None:
            coming = next(batches, None)
            yield held
            held = coming


class Mover:
    """No DataLoader, but an object around one. What it has not itself is the loader's."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        return (batch + 0.5 for batch in self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataloader, name)


class Subclassed(DataLoader[Any]):
    """Is around another without being made as a DataLoader."""

    def __init__(self, inner: Any) -> None:
        vars(self)["inner"] = inner

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


class Every(Sampler[int]):
    """Its arguments are kept under other names."""

    def __init__(self, step: int = 1) -> None:
        self._by = step

    def __len__(self) -> int:
        return len(range(0, N, self._by))

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, N, self._by))


class Backwards(RandomSampler):
    """A class of torch's, with an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))


class Endless(Every):
    """Goes round and round; its length is one round's."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class Sparse(BatchSampler):
    """Makes mini-batches of torch's, and keeps arguments under other names."""

    def __init__(self, data: Any, least: int = 0) -> None:
        super().__init__(Every(2), 3, False)
        self._least = least
        assert least == 1 and isinstance(data, Numbers)


class Twice(BatchSampler):
    """Has the first sample of a mini-batch twice."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([*batch, batch[0]] for batch in super().__iter__())


class Restless(DataLoader[Any]):
    """Keeps one iterator, so that its processes stay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.batches)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


class Again:
    """Never ends."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.batches


class Ignoring(DataLoader[Any]):
    """Reads its data set by itself."""

    def __iter__(self) -> Any:
        items = torch.stack([self.dataset[index] for index in range(N)])
        return iter(items.split(SIZE))


class Plain:
    """Nothing but what a loop needs."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(N)).split(SIZE))


def named() -> DataLoader[Any]:
    """Attributes are set after it is made."""
    loader = Scaled(DATA, batch_size=SIZE)
    loader._scale = 3.0
    loader.collate_fn = lambda items: torch.stack(items) + loader._scale
    return loader


LOADERS: dict[str, Callable[[], Any]] = {
    "torch's": lambda: DataLoader(DATA, SIZE),
    "an argument under another name": lambda: Scaled(DATA, 3.0, batch_size=SIZE),
    "its processes": lambda: Scaled(
        DATA, 3.0, batch_size=SIZE, num_workers=1, persistent_workers=True
    ),
    "required arguments": lambda: Required(1.0, path="19"),
    "attributes set later": named,
    "one that prefetches": lambda: Prefetching(DATA, SIZE),
    "an object around it": lambda: Mover(DataLoader(DATA, SIZE)),
    "an object around an own class": lambda: Mover(Scaled(DATA, 2.0, batch_size=SIZE)),
    "a class around it": lambda: Subclassed(DataLoader(DATA, SIZE)),
    "a sampler": lambda: DataLoader(DATA, SIZE, sampler=Every(3)),
    "a class of torch's samplers": lambda: DataLoader(DATA, SIZE, sampler=Backwards(DATA)),
    "a sampler that never ends": lambda: Scaled(
        DATA, 2.0, batch_size=2, sampler=Endless(), drop_last=True
    ),
    "a batch sampler": lambda: Scaled(DATA, 2.0, batch_sampler=Sparse(DATA, 1)),
    "a batch sampler that draws itself": lambda: Scaled(
        DATA, 2.0, batch_sampler=Twice(SequentialSampler(DATA), SIZE, False)
    ),
    "a list of mini-batches": lambda: DataLoader(DATA, batch_sampler=[[0, 1], [5], [7, 8, 9]]),
    "items": lambda: DataLoader(Numbers(7), batch_size=None, collate_fn=lambda x: x.view(1)),
}
ALONE: dict[str, Callable[[], Any]] = {
    "its own iterator": lambda: Restless(DATA, SIZE),
    "its own way": lambda: Ignoring(DATA, SIZE),
    "no DataLoader": Plain,
}


class Seeing(pl.LightningModule):
    """Notes its mini-batches, by rank, in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = torch.full((3, 64, WIDEST), torch.nan).share_memory_()
        self.checked = torch.full((3, 64, WIDEST), torch.nan).share_memory_()

    def _note(self, where: torch.Tensor, batch: torch.Tensor) -> None:
        rows = where[self.global_rank]
        rows[int((~rows[:, 0].isnan()).sum()), : len(batch)] = batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.unsqueeze(1)).sum() * 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(self.seen, batch)  # not of a mini-batch that is dropped

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note(self.checked, batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def batches_in(rows: torch.Tensor) -> list[list[float]]:
    """The mini-batches of all ranks."""
    return [row[~row.isnan()].tolist() for row in rows.flatten(0, 1) if not row[0].isnan()]


def samples_in(batches: Iterable[list[float]]) -> list[float]:
    return sorted(chain.from_iterable(batches))


def found(call: str, loader: Any, strategy: Any, workers: int) -> list[list[list[float]]]:
    """Mini-batches of a call of the trainer."""
    module, trainer = Seeing(), make_trainer(strategy, workers, max_epochs=1)
    if call == "predict":
        outputs = trainer.predict(module, loader)
        return [[batch.tolist() for batch in outputs]]  # type: ignore[union-attr]
    if call == "fit":
        trainer.fit(module, loader, loader)
        return [batches_in(module.seen), batches_in(module.checked)]
    getattr(trainer, call)(module, loader, verbose=False)
    return [batches_in(module.checked)]


def expected(call: str, name: str) -> list[list[list[float]]]:
    """Those that the loader has by itself."""
    loader = (LOADERS | ALONE)[name]()
    most = len(loader) if isinstance(loader, Sized) else None
    batches = [batch.tolist() for batch in islice(loader, most)]
    return [batches, batches] if call == "fit" else [batches]


def check(call: str, name: str, strategy: Any, workers: int) -> None:
    ours, theirs = found(call, (LOADERS | ALONE)[name](), strategy, workers), expected(call, name)
    if workers > 1 and call != "predict":  # whose outputs come in one device's order
        ours = [[samples_in(batches)] for batches in ours]
        theirs = [[samples_in(batches)] for batches in theirs]
    assert ours == theirs


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*LOADERS, *ALONE])
@pytest.mark.parametrize("call", ["fit", "validate", "test"])
def test_plain_lightning_has_the_mini_batches_of_the_loader_itself(call: str, name: str) -> None:
    check(call, name, "auto", 1)


@pytest.mark.parametrize("name", [*LOADERS, *ALONE])
@pytest.mark.parametrize("call", by_default(["fit", "predict", "validate", "test"], "fit"))
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "hogwild"], "hybrid"))
def test_one_worker_has_the_mini_batches_of_the_loader_in_their_order(
    strategy: str, call: str, name: str
) -> None:
    check(call, name, strategy, 1)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("call", ["fit", "predict", "validate", "test"])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_several_workers_share_the_samples_of_the_loader(
    strategy: str, call: str, name: str
) -> None:
    check(call, name, strategy, 2)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy_trains_on_the_samples_of_the_loader(
    strategy: str, workers: int, name: str
) -> None:
    check("fit", name, make(strategy, workers), workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an argument under another name", "an object around it"])
def test_spawned_workers_share_the_samples_of_the_loader(name: str) -> None:
    check("fit", name, HybridStrategy(start_method="spawn"), 2)


def test_predictions_have_the_last_mini_batch_of_a_loader_that_drops_it() -> None:
    for drops in (
        Scaled(DATA, 3.0, batch_size=SIZE, drop_last=True),
        Scaled(DATA, 3.0, batch_sampler=Twice(Every(), SIZE, True)),
    ):
        (outputs,) = found("predict", drops, "hybrid", 2)
        assert len(outputs) == math.ceil(N / SIZE)
        assert {*samples_in(outputs)} == {3.0 * n for n in range(N)}


def test_a_loader_that_is_given_keeps_its_sampler_and_attributes() -> None:
    loader = Scaled(DATA, 3.0, batch_size=SIZE, generator=torch.Generator())
    before = dict(vars(loader))
    seen: list[Any] = []

    class Looking(Seeing):
        def on_train_start(self) -> None:
            used = self.trainer.train_dataloader
            assert type(used) is Scaled and used is not loader
            assert used.batch_size == SIZE and used.generator is loader.generator
            assert vars(loader) == before
            seen.append(used.dataset)

    make_trainer("hybrid", 1, max_epochs=1).fit(Looking(), loader)
    assert vars(loader) == before


@pytest.mark.parametrize("mode", by_default(["min_size", "max_size", "max_size_cycle"], "max_size"))
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "hybrid"))
def test_loaders_of_own_classes_that_are_combined_keep_their_samples(
    strategy: str, mode: Any
) -> None:
    class Both(Seeing):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["one"], batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._note(self.seen, batch["one"])
            self._note(self.checked, batch["two"])

    module = Both()
    loaders = {
        "one": Scaled(DATA, 3.0, batch_size=SIZE),
        "two": Mover(Scaled(DATA, 2.0, batch_size=SIZE)),
    }
    make_trainer(strategy, 2, max_epochs=1).fit(module, CombinedLoader(loaders, mode))
    assert samples_in(batches_in(module.seen)) == [3.0 * n for n in range(N)]
    assert samples_in(batches_in(module.checked)) == [2.0 * n + 0.5 for n in range(N)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_of_a_loader_in_another_object_are_told_apart(shuffle: bool) -> None:
    module = Seeing()
    loader = Mover(DataLoader(DATA, SIZE, shuffle=shuffle))
    make_trainer("hybrid", 2, max_epochs=2).fit(module, loader)
    steps = len(batches_in(module.seen[:1])) // 2
    first, second = module.seen[:, :steps], module.seen[:, steps : 2 * steps]
    assert batches_in(first) != batches_in(second)
    assert samples_in(batches_in(first)) == samples_in(batches_in(second))


# ---- loaders whose samples cannot be shared out --------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("call", ["fit", "validate", "predict"])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_loader_that_does_not_ask_its_sampler_is_refused_with_two_ways_out(
    strategy: str, call: str
) -> None:
    with pytest.raises(UserError, match=r"Ignoring.*without asking.*iterable=deal.*iterable=own"):
        found(call, Ignoring(DATA, SIZE), strategy, 2)


@pytest.mark.parametrize("name", ["its own iterator", "its own way"])
def test_a_loader_that_does_not_ask_its_sampler_can_be_dealt_out(name: str) -> None:
    module, strategy = Seeing(), HybridStrategy(iterable="deal")
    trainer = make_trainer(strategy, 2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, ALONE[name]())
    assert samples_in(batches_in(module.seen)) == [float(n) for n in range(N)]


@pytest.mark.filterwarnings("error:the .* loader is not shared out")
@pytest.mark.parametrize("call", by_default(["fit", "validate"], "fit"))
def test_an_object_that_is_no_loader_is_warned_of_and_can_be_dealt_out(call: str) -> None:
    with pytest.raises(UserWarning, match=r"Plain is no DataLoader.*strategy.iterable=deal"):
        found(call, Plain(), "hybrid", 2)
    once = found(call, Plain(), HybridStrategy(iterable="deal"), 2)
    assert all(samples_in(batches) == [float(n) for n in range(N)] for batches in once)


def test_an_object_that_shares_itself_out_is_left_alone() -> None:
    loader = Mover(DataLoader(DATA, SIZE))
    batches, _ = found("fit", loader, HybridStrategy(iterable="own"), 2)
    assert len(samples_in(batches)) == 2 * N
