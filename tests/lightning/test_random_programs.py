"""Random programs: several features of Lightning at once, against one device.

Drawn are module, optimizer, schedule, clipping, accumulation, hooks, data, callbacks and what
follows ``fit``. Under ``hybrid``, W workers are one device with mini-batches W times as large; one
worker of the other strategies is one device. In 64 bits whatever is not rounding stands out.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from pytorch_lightning.loggers import CSVLogger
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from tests.picking import but_slow

LONE = ("backup", "k_async", "synchronous", "async", "ssp", "grace", "hogwild", "k_batch_sync")
LONE += ("k_batch_async", "softsync", "local_sgd", "post_local_sgd", "downpour")
LOCAL = ("local_sgd", "post_local_sgd", "downpour")
LIKE_ONE = ("hybrid", "backup", "k_async")  # also within an epoch
LOOSE = 1e-6  # what Lightning keeps in 32 bits

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5)},
    "every second": lambda o: {
        "scheduler": lr_scheduler.ExponentialLR(o, 0.9),
        "interval": "step",
        "frequency": 2,
    },
    "one cycle": lambda o: {
        "scheduler": lr_scheduler.OneCycleLR(o, 0.05, 200, cycle_momentum=False),
        "interval": "step",
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "monitor": "val/loss",
    },
    "restarts": lambda o: {
        "scheduler": lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        "interval": "step",
    },
}


@dataclass(frozen=True)
class Program:
    """``kind``: of optimization; ``net``, ``hooks``, ``callbacks``: features by name."""

    strategy: str
    workers: int
    kind: str
    optimizer: str
    groups: bool
    schedule: str
    clip: tuple[str, float] | None
    accumulates: int | dict[int, int]
    net: tuple[str, ...]
    hooks: tuple[str, ...]
    callbacks: tuple[str, ...]
    loader: str
    size: int
    n: int
    epochs: int
    after: str
    options: tuple[tuple[str, Any], ...]
    seed: int

    def __str__(self) -> str:
        features = [self.strategy, self.workers, self.kind, self.optimizer, self.schedule]
        return "-".join(map(str, [*features, self.loader, self.after, self.seed]))


def drawn(seed: int) -> Program:
    """The same for the same seed."""
    rng = random.Random(seed)
    strategy = rng.choice(["hybrid", "hybrid", rng.choice(LONE)])
    workers = rng.choice([1, 2, 2, 3]) if strategy == "hybrid" else 1
    kind = rng.choice(["automatic"] * 4 + ["by hand", "two optimizers"])
    kind = "automatic" if strategy in LOCAL else kind
    automatic, meets = kind == "automatic", strategy in LIKE_ONE
    accumulates: Any = rng.choice([1, 1, 1, 2, 3, {0: 1, 1: 2}]) if automatic else 1
    size, steps, epochs = rng.choice([1, 2, 3, 4]), rng.randint(2, 7), rng.choice([1, 2, 3])
    together = size * workers
    # Mini-batches that are accumulated weigh alike on one device, and by their samples here.
    even = accumulates != 1 or rng.random() < 0.4
    some = [h for h in ("scales", "clips itself", "reads", "clamps", "warms up") if few(rng)]
    may = [*some, *(h for h in ("stops", "ends epochs") if meets and few(rng))]
    if strategy in LOCAL or not automatic:  # nothing of a masters' update; Lightning's clipping
        may = [hook for hook in may if hook not in ("clips itself", "warms up")]
    callbacks = [c for c in ("stops early", "saves epochs") if few(rng)]
    theirs = ("saves steps", "averages", "unfreezes")  # of the masters' update
    callbacks += [c for c in theirs if strategy not in LOCAL and few(rng)]
    if not automatic or accumulates not in (1, 2, 3):
        callbacks = [c for c in callbacks if c not in ("averages", "unfreezes")]
    if strategy == "downpour":  # docs/limits.md: until the next fetch
        may = [hook for hook in may if hook != "clamps"]
    options: dict[str, Any] = {"num_sanity_val_steps": rng.choice([0, 2])}
    options["log_every_n_steps"] = rng.choice([1, 2, 50])
    if few(rng):
        options["max_steps"] = rng.randint(1, steps) * (2 if kind == "two optimizers" else 1)
    if few(rng):
        options["limit_train_batches"] = rng.choice([1, 2, 3])
    if few(rng):
        options["check_val_every_n_epoch"] = 2
    elif meets and few(rng):
        options["val_check_interval"] = rng.choice([0.5, 1])
    schedule = rng.choice(["none", "none", *SCHEDULES])
    ends = "ends epochs" in may or "stops" in may
    if (
        schedule == "plateau" or ends or "check_val_every_n_epoch" in options
    ):  # no validation, or two
        callbacks = [name for name in callbacks if name != "stops early"]
    if "check_val_every_n_epoch" in options or ends:
        schedule = "none" if schedule == "plateau" else schedule
    after = rng.choice(["nothing", "nothing", "fit", "resume", "test", "predict"])
    if "unfreezes" in callbacks:  # Lightning gives new groups no initial rate
        schedule, after = "none", "nothing" if after == "fit" else after
    if after == "fit" and isinstance(accumulates, dict):  # refused by Lightning
        after = "nothing"
    if after == "resume":  # saved behind fit: no averages, and Lightning may save a step again
        callbacks = [name for name in callbacks if name not in ("averages", "saves steps")]
    return Program(
        strategy=strategy,
        workers=workers,
        kind=kind,
        optimizer=rng.choice([*OPTIMIZERS]),
        groups=few(rng),
        schedule=schedule,
        clip=None if "clips itself" in may else rng.choice([None, ("norm", 0.05), ("value", 0.01)]),
        accumulates=accumulates,
        net=tuple(each for each in ("norm", "tied", "table", "frozen", "unused") if few(rng)),
        hooks=tuple(may),
        callbacks=tuple(callbacks),
        loader=rng.choice(["plain", "plain", "batch sampler", "dict"]),
        size=size,
        n=steps * together - (0 if even else rng.randint(0, together - 1)),
        epochs=epochs,
        after=after,
        options=tuple(options.items()),
        seed=seed,
    )


def few(rng: random.Random) -> bool:
    return rng.random() < 0.2


class Module(pl.LightningModule):
    """A small network with the features of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.automatic_optimization = program.kind == "automatic"
        torch.manual_seed(3)
        self.first, self.middle = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.norm = torch.nn.LayerNorm(6) if "norm" in program.net else torch.nn.Identity()
        self.table = torch.nn.Embedding(5, 6) if "table" in program.net else None
        self.tied = torch.nn.Linear(4, 6, bias=False)
        if "tied" in program.net:
            self.tied.weight = self.first.weight
        if "unused" in program.net:
            self.unused = torch.nn.Linear(2, 2)
        if "frozen" in program.net:
            self.middle.requires_grad_(False)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        if self.table is not None:
            hidden = hidden + self.table((x[:, 0].abs() * 10).long() % 5)
        hidden = torch.tanh(self.middle(hidden))
        return self.last(hidden + 0.1 * self.tied(hidden)[:, :4]).squeeze(1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch["x"] if isinstance(batch, dict) else batch
        return (self(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            self.by_hand(batch)
        self.log(
            "loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len_of(batch)
        )
        return loss

    def by_hand(self, batch: Any) -> None:
        optimizers: Any = self.optimizers()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.toggle_optimizer(each)
            each.zero_grad()
            self.manual_backward(self.loss(batch))
            if self.program.clip is not None:
                how, most = self.program.clip
                self.clip_gradients(each, most, how)
            each.step()
            self.untoggle_optimizer(each)
        if (schedulers := self.lr_schedulers()) is not None and self.program.schedule != "plateau":
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()  # type: ignore[call-arg]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if "ends epochs" in self.program.hooks and batch_idx == 2 else None

    def on_train_batch_end(self, *_: Any) -> None:
        if "clamps" in self.program.hooks:
            with torch.no_grad():
                self.last.weight.clamp_(-0.3, 0.3)
        if "stops" in self.program.hooks and self.trainer.global_step >= 4:
            self.trainer.should_stop = True

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if "scales" in self.program.hooks:
            torch._foreach_mul_(gradients, 0.5)
        if "reads" in self.program.hooks:
            self.log("norm of gradients", torch.stack([g.norm() for g in gradients]).sum())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if "warms up" in self.program.hooks and self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
        itself = "clips itself" in self.program.hooks
        self.clip_gradients(
            optimizer, *((0.02, "norm") if itself else given), **({} if itself else named)
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True, batch_size=len_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), sync_dist=True, batch_size=len_of(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self(batch[0]))

    def configure_optimizers(self) -> Any:
        program, chosen = self.program, [p for p in self.parameters() if p.requires_grad]
        parts = [chosen[:2], chosen[2:]] if program.kind == "two optimizers" else [chosen]
        optimizers = []
        for own in parts:
            groups: Any = [{"params": own[:1], "lr": 0.02}, {"params": own[1:]}]
            optimizers.append(OPTIMIZERS[program.optimizer](groups if program.groups else own))
        make = SCHEDULES.get(program.schedule)
        return optimizers, [] if make is None else [make(each) for each in optimizers]


def len_of(batch: Any) -> int:
    return len(batch["x"][0] if isinstance(batch, dict) else batch[0])


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.01)


class Seen(pl.Callback):
    """What is seen at the end of validations and epochs."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["val/loss"])
            self.rows.append([trainer.global_step, trainer.current_epoch, loss])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
        self.rows.append([trainer.global_step, trainer.current_epoch, rates])

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]


def callbacks_of(program: Program, folder: Path) -> Iterator[pl.Callback]:
    always: dict[str, Any] = {"save_top_k": -1, "filename": "{epoch}-{step}"}
    make: dict[str, Callable[[], pl.Callback]] = {
        "stops early": lambda: EarlyStopping("val/loss", patience=1, strict=False),
        "saves steps": lambda: ModelCheckpoint(folder / "steps", every_n_train_steps=2, **always),
        "saves epochs": lambda: ModelCheckpoint(
            folder / "epochs", save_on_train_epoch_end=True, **always
        ),
        "unfreezes": Unfreezes,
        "averages": lambda: EMAWeightAveraging(decay=0.9),
    }
    yield from (make[name]() for name in program.callbacks)
    if isinstance(program.accumulates, dict):
        yield GradientAccumulationScheduler(program.accumulates)


def loaders_of(program: Program, together: int) -> tuple[dict[str, Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(program.seed)
    x, other = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (program.n, 6))
    data, size = TensorDataset(x, x.sum(1).sin()), program.size * together
    training: Any = DataLoader(data, size)
    if program.loader == "batch sampler":
        training = DataLoader(
            data, batch_sampler=BatchSampler(SequentialSampler(data), size, False)
        )
    if program.loader == "dict":
        training = {"x": DataLoader(data, size), "z": DataLoader(data, size)}
    validation = DataLoader(TensorDataset(other, other.sum(1).sin()), 2)
    return {"train_dataloaders": training, "val_dataloaders": validation}, validation


def outcome(program: Program, ours: bool, folder: Path) -> dict[str, Any]:
    """Everything that is compared of a run."""
    workers, seen = program.workers if ours else 1, Seen()
    loaders, validation = loaders_of(program, 1 if ours else program.workers)

    def trainer_for(epochs: int) -> pl.Trainer:
        options: dict[str, Any] = dict(program.options)
        if program.clip is not None and program.kind == "automatic":
            how, most = program.clip
            options |= {"gradient_clip_algorithm": how, "gradient_clip_val": most}
        if not isinstance(program.accumulates, dict):
            options["accumulate_grad_batches"] = program.accumulates
        strategy: Any = HybridStrategy(**parts_of(program.strategy), keep_order=True)
        return pl.Trainer(
            strategy=strategy if ours else "auto",
            accelerator="cpu",
            devices=workers,
            max_epochs=epochs,
            precision="64-true",
            callbacks=[*callbacks_of(program, folder), seen],
            logger=CSVLogger(folder, name="", version="rows"),
            enable_checkpointing=any(name.startswith("saves") for name in program.callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    module, trainer, more = Module(program), trainer_for(program.epochs), dict[str, Any]()
    trainer.fit(module, **loaders)
    match program.after:
        case "fit":
            trainer.fit_loop.max_epochs, trainer.should_stop = program.epochs + 1, False
            trainer.fit(module, **loaders)
        case "resume":
            trainer.save_checkpoint(folder / "on.ckpt")
            module, trainer = Module(program), trainer_for(program.epochs + 1)
            trainer.fit(module, ckpt_path=folder / "on.ckpt", weights_only=False, **loaders)
        case "test":
            more = dict(trainer.test(module, validation, verbose=False)[0])
        case "predict":
            found: Any = trainer.predict(module, validation)
            more = {"predicted": sorted(torch.cat(found).tolist())}
    files = {str(path.relative_to(folder)): saved(path) for path in folder.glob("*s/*.ckpt")}
    rows, logged = [], folder / "rows" / "metrics.csv"
    if logged.exists():
        with logged.open() as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "counts": [trainer.global_step, trainer.current_epoch],
        "states": [states_of(each.state_dict()) for each in trainer.optimizers],
        "loose": [
            {k: float(v) for k, v in trainer.callback_metrics.items()},
            seen.rows,
            rows,
            more,
        ],
        "files": files,
    }


def saved(path: Path) -> dict[str, Any]:
    """What is compared of a checkpoint."""
    content = torch.load(path, weights_only=False)
    return {
        "weights": {name: value.tolist() for name, value in content["state_dict"].items()},
        "counts": [content["global_step"], content["epoch"]],
        "states": [states_of(each) for each in content["optimizer_states"]],
        "rates": [each["_last_lr"] for each in content["lr_schedulers"]],
    }


def states_of(state: dict[str, Any]) -> list[Any]:
    values = [
        {k: torch.as_tensor(v).tolist() for k, v in own.items()} for own in state["state"].values()
    ]
    return [values, [group["lr"] for group in state["param_groups"]]]


def differences(one: Any, ours: Any, loose: bool, where: str = "") -> Iterator[str]:
    """What differs by more than rounding."""
    loose = loose or where.startswith("/loose")
    if isinstance(one, dict) and isinstance(ours, dict):
        for key in sorted(one.keys() ^ ours.keys()):
            yield f"{where}/{key}: only in one"
        for key in one.keys() & ours.keys():
            yield from differences(one[key], ours[key], loose, f"{where}/{key}")
    elif isinstance(one, list) and isinstance(ours, list):
        if len(one) != len(ours):
            yield f"{where}: {one} and {ours}"
        for number, (a, b) in enumerate(zip(one, ours, strict=False)):
            yield from differences(a, b, loose, f"{where}/{number}")
    elif not math.isclose(
        one, ours, rel_tol=LOOSE if loose else 1e-9, abs_tol=LOOSE if loose else 1e-9
    ):
        yield f"{where}: {one} and {ours}"


PROGRAMS = [drawn(seed) for seed in range(150)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", but_slow([(p,) for p in PROGRAMS], lambda _, n: n > 7), ids=str)
def test_a_random_program_is_that_of_one_device(program: Program, tmp_path: Path) -> None:
    one = outcome(program, False, tmp_path / "one")
    ours = outcome(program, True, tmp_path / "ours")
    assert list(differences(one, ours, loose=False)) == []
