"""Where mini-batches come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.parity.case import Grade, Theme
from tests.parity.toys import IN_ORDER, Net, even, loaders, regression

THEME = Theme("loaders", even)
add = partial(THEME.add, expect=Grade.BITWISE)

# ---- processes and samplers ---------------------------------------------------------------------

add("one worker process", Net, data=partial(even, num_workers=1))
add(
    "two worker processes that stay",
    Net,
    data=partial(even, num_workers=2, persistent_workers=True, prefetch_factor=3),
)
add("drop_last", Net, data=partial(loaders, 48, 24, drop_last=True))


class Augmented(Dataset[Any]):
    """Every item is drawn at random; each worker process has a seed of its own."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(4) * 0.1 + index / 48
        return x, x.pow(2).sum(0, keepdim=True)


def augmented(batch: int, workers: int) -> Mapping[str, Any]:
    return {"train_dataloaders": DataLoader(Augmented(), batch, shuffle=True, num_workers=workers)}


add("random data, drawn in the process", Net, data=partial(augmented, workers=0))
add("random data, drawn in worker processes", Net, data=partial(augmented, workers=1))


def sampled(batch: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * 24 + [0.2] * 24, 48, generator=generator)
    return {"train_dataloaders": DataLoader(regression(48), batch, sampler=sampler)}


def batch_sampled(batch: int) -> Mapping[str, Any]:
    data = regression(48)
    sampler = BatchSampler(SequentialSampler(data), batch, drop_last=False)
    return {"train_dataloaders": DataLoader(data, batch_sampler=sampler)}


class Pairs(BatchSampler):
    """A class of the user's own; Lightning re-creates it around each rank's sampler."""


def own_batch_sampler(batch: int) -> Mapping[str, Any]:
    data = regression(48)
    sampler = Pairs(SequentialSampler(data), batch, False)
    return {"train_dataloaders": DataLoader(data, batch_sampler=sampler)}


union: dict[str, Any] = {"versus": "union", "expect": Grade.ROUNDING}
add(
    "WeightedRandomSampler",
    Net,
    data=sampled,
    reason="DDP shuffles what the sampler has drawn; here its order is kept",
    **union,
)
add(
    "a batch sampler",
    Net,
    data=batch_sampled,
    trainer=IN_ORDER,
    reason="Lightning takes the batches for samples under DDP, and fails",
    **union,
)
add("a batch sampler of the user's own", Net, data=own_batch_sampler)
add("use_distributed_sampler=False", Net, trainer={"use_distributed_sampler": False})


class OwnSampler(Net):
    """The module brings its own distributed sampler."""

    def train_dataloader(self) -> Any:
        sampler: Any = torch.utils.data.DistributedSampler(
            regression(48), self.trainer.world_size, self.global_rank, seed=3
        )
        return DataLoader(regression(48), 4, sampler=sampler)


add(
    "a distributed sampler of the user's own",
    OwnSampler,
    data=lambda batch: {},
    trainer={"use_distributed_sampler": False},
)

# ---- streams ------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Each worker reads its share, as such data sets must; also where they know their length."""

    def __init__(self, n: int, rank: int, world: int) -> None:
        self.data, self.rank, self.world = regression(n), rank, world

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = range(self.rank, len(self.data), self.world)
        part = mine if info is None else mine[info.id :: info.num_workers]
        for index in part:
            yield self.data[index]


class Sized(Stream):
    def __len__(self) -> int:
        return len(range(self.rank, len(self.data), self.world))


class Streaming(Net):
    def __init__(self, kind: Any = Stream, n: int = 48, workers: int = 0) -> None:
        super().__init__()
        self.kind, self.n, self.workers = kind, n, workers

    def train_dataloader(self) -> Any:
        stream = self.kind(self.n, self.global_rank, self.trainer.world_size)
        return DataLoader(stream, 4, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.kind(24, self.global_rank, self.trainer.world_size), 4)


def nothing(batch: int) -> Mapping[str, Any]:
    """The module brings its own."""
    return {}


add("an IterableDataset", Streaming, data=nothing, wide=True)
add("an IterableDataset with a length", partial(Streaming, Sized), data=nothing)
add("an IterableDataset in worker processes", partial(Streaming, workers=2), data=nothing)
add(
    "an IterableDataset, steps limited",
    Streaming,
    data=nothing,
    trainer={"limit_train_batches": 4, "max_epochs": -1, "max_steps": 10},
)
add(
    "an IterableDataset, val_check_interval",
    Streaming,
    data=nothing,
    trainer={"val_check_interval": 2},
)

# ---- several loaders ----------------------------------------------------------------------------


def two(n: int, batch: int, seed: int = 5) -> DataLoader[Any]:
    return DataLoader(regression(n, seed), batch, shuffle=True)


class Several(Net):
    """Gets one mini-batch from each of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else batch
        loss = sum(self.loss(part) for part in parts if part is not None)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", self.loss(batch), sync_dist=True)


def combined(batch: int, mode: str) -> Mapping[str, Any]:
    both = {"a": two(48, batch), "b": two(24, batch, 6)}
    return {
        "train_dataloaders": CombinedLoader(both, mode),
        "val_dataloaders": [two(24, batch, 8), two(48, batch, 9)],
    }


def listed(batch: int) -> Mapping[str, Any]:
    return {"train_dataloaders": [two(48, batch), two(48, batch, 6)]}


for mode in ("min_size", "max_size_cycle", "max_size"):
    add(
        f"two loaders, {mode}",
        Several,
        data=partial(combined, mode=mode),
        expect=Grade.ROUNDING,
        reason="a shuffled validation set is shuffled once, under DDP anew in every epoch",
        wide=mode == "min_size",
    )
add("two loaders in a list", Several, data=listed)

# ---- forms of a batch ---------------------------------------------------------------------------


def collate(items: Any) -> dict[str, Any]:
    x, y = (torch.stack(part) for part in zip(*items, strict=True))
    return {"name": ["a"] * len(items), "xy": (x, y)}


class Named(Net):
    """Batches are dictionaries; some are moved and changed by the module's own hooks."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch["xy"])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch["xy"]
        return batch | {"xy": (x * 0.9, y)}


def named(batch: int) -> Mapping[str, Any]:
    return even(batch, collate_fn=collate) | {"val_dataloaders": None}


class Whole(Dataset[Any]):
    """Items are whole mini-batches."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x = regression(48).tensors[0][4 * index : 4 * index + 4]
        return x, x.pow(2).sum(1, keepdim=True)


def whole(batch: int) -> Mapping[str, Any]:
    return {"train_dataloaders": DataLoader(Whole(), batch_size=None, shuffle=True)}


class Data(pl.LightningDataModule):
    """Prepared once, set up in every worker, reloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def prepare_data(self) -> None:
        torch.save(regression(48).tensors, "prepared.pt")

    def setup(self, stage: str) -> None:
        self.tensors = torch.load("prepared.pt")

    def train_dataloader(self) -> Any:
        self.count += 1
        data = torch.utils.data.TensorDataset(*self.tensors)
        return DataLoader(
            Subset(ConcatDataset([data, data]), range(self.count, 48 + self.count)), 4
        )

    def val_dataloader(self) -> Any:
        return DataLoader(regression(24, 1), 4)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


add("dictionaries, changed after the transfer", Named, data=named, wide=True)
add("items that are whole mini-batches", Net, data=whole)
add("a LightningDataModule", Net, data=lambda batch: {"datamodule": Data()}, wide=True)
add(
    "reload_dataloaders_every_n_epochs",
    Net,
    data=lambda batch: {"datamodule": Data()},
    trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
)

# ---- uneven: the reference is one worker that sees the union -------------------------------------

# With accumulation a step weighs all its samples alike; one process weighs mini-batches alike.
UNEVEN = "DDP pads with repeated samples, or waits for ever, and takes the mean of means"


def uneven(name: str, n: int, wide: bool = False, **options: Any) -> None:
    """``n`` samples that cannot be shared evenly."""
    options = {"overfit_batches": 1.0} | options
    THEME.add(
        name,
        Net,
        data=partial(loaders, n, 24),
        trainer=options,
        versus="union",
        reason=UNEVEN,
        wide=wide,
    )


uneven("45 samples", 45, wide=True)
uneven("5 samples", 5)
uneven("1 sample", 1, wide=True)
uneven("45 samples, clipping", 45, gradient_clip_val=0.05)
