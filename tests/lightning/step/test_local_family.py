"""Lock-step workers that train on their own are plain torch, whatever Lightning does meanwhile.

The reference is written down below: optimizers of torch, the papers' rules, and nothing of the
package but how an epoch is dealt to the workers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from hybridtrain import HybridStrategy
from hybridtrain.engine.protocol.spans import shares_of
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

SIZE = 4  # of a mini-batch
NESTEROV = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMING = {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1, "mix": 0.25}
SCHEMES: dict[str, dict[str, Any]] = {
    "local_sgd": {"exchange": {"name": "movement", "every": 3}},
    "post_local_sgd": {"exchange": {"name": "movement", "every": {"then": 3, "at": 3}}},
    "diloco": {"exchange": {"name": "movement", "every": 3}, "update": NESTEROV},
    "streaming_diloco": {"exchange": STREAMING, "update": NESTEROV},
    "easgd": {"exchange": {"name": "elastic", "every": 3}},  # its synchronous form
}


@dataclass(frozen=True)
class Case:
    """What the user has asked Lightning for; ``validation``: the size of each loader."""

    scheme: str
    workers: int = 3
    samples: int = 84
    epochs: int = 2
    limit: int | None = None
    accumulate: int = 1
    clip: float | None = None
    schedule: str = "step"
    frequency: int = 1
    adam: bool = False
    validation: tuple[int, ...] = ()
    interval: int | None = None
    saves_every: int | None = None
    max_steps: int = -1


class Toy(Regression):
    """Logs the norm of the weights: the smallest and the largest that a worker has seen."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        weights = torch.stack([(p * p).sum() for p in self.parameters()]).sum()
        for fold in ("min", "max"):
            name = f"{fold}{dataloader_idx}"
            self.log(name, weights, sync_dist=True, reduce_fx=fold, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.case.adam else momentum
        optimizer = kind(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        about = {"interval": self.case.schedule, "frequency": self.case.frequency}
        return [optimizer], [{"scheduler": scheduler, **about}]


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def made(case: Case) -> Toy:
    torch.manual_seed(5)
    return Toy(case).double()


# ---- plain torch --------------------------------------------------------------------------------


class Plain:
    """The whole run in one process."""

    def __init__(self, case: Case) -> None:
        options, whole = SCHEMES[case.scheme], case.workers
        self.case, self.exchange = case, options["exchange"]
        self.master, self.own = made(case), [made(case) for _ in range(whole)]
        setups = [module.configure_optimizers() for module in self.own]
        self.optimizers = [optimizers[0] for optimizers, _ in setups]
        self.schedulers = [schedulers[0]["scheduler"] for _, schedulers in setups]
        outer = options.get("update")
        rule = {"lr": 1.0} if outer is None else {k: v for k, v in outer.items() if k != "name"}
        self.outer = torch.optim.SGD(self.master.parameters(), **rule)
        self.steps, self.behind = 0, [0.0] * whole  # steps, samples behind the next one
        rules = {"streaming": self.fragments, "elastic": self.pulls}
        self.exchanges = rules.get(self.exchange["name"], self.movements)()
        next(self.exchanges)
        self.validated: list[float] = []
        self.saved: dict[int, list[torch.Tensor]] = {}

    def run(self) -> Plain:
        case, data = self.case, regression_data(self.case.samples, torch.float64)
        places, whole = shares_of((SIZE,) * case.workers), SIZE * case.workers
        rounds = [range(n, min(n + whole, case.samples)) for n in range(0, case.samples, whole)]
        rounds = rounds[: case.limit]
        for epoch in range(1, case.epochs + 1):
            for number, inside in enumerate(rounds, 1):
                shares = [[inside[p] for p in each if p < len(inside)] for each in places]
                for worker, share in enumerate(shares):
                    self.backward(worker, data[share] if share else None)
                stepped = number % case.accumulate == 0 or number == len(rounds)
                if stepped:
                    self.step(number)
                over = number == len(rounds) or self.steps == case.max_steps
                self.between(number, stepped, over)
                if over:
                    break
            self.exchanges.send("ends")
            if case.schedule == "epoch" and epoch % case.frequency == 0:
                self.schedule()
            if self.steps == case.max_steps:
                break
        return self

    def backward(self, worker: int, batch: Any) -> None:
        if batch is not None:
            module = self.own[worker]
            loss = torch.nn.functional.mse_loss(module.net(batch[0]), batch[1])
            (loss / self.case.accumulate).backward()
            self.behind[worker] += len(batch[0])

    def step(self, number: int) -> None:
        for module, optimizer, samples in zip(self.own, self.optimizers, self.behind, strict=True):
            if samples:
                if self.case.clip is not None:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), self.case.clip)
                optimizer.step()
                optimizer.zero_grad()
        self.exchanges.send("")
        self.behind, self.steps = [0.0] * self.case.workers, self.steps + 1

    def between(self, number: int, stepped: bool, over: bool) -> None:
        """As Lightning orders it: schedulers, a checkpoint, a validation."""
        case = self.case
        if case.schedule == "step" and stepped and number % case.frequency == 0:
            self.schedule()
        if case.saves_every and stepped and self.steps % case.saves_every == 0:
            self.observed(over)
            self.saved[self.steps] = self.weights()
        if case.validation and (over if case.interval is None else not number % case.interval):
            self.observed(over)
            self.validated.append(sum(float((w * w).sum()) for w in self.weights()))

    def observed(self, over: bool) -> None:
        """Within an epoch, who looks sees the masters, and does not move them."""
        if over:
            self.exchanges.send("ends")

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.master.parameters()]

    # ---- the rules: each is told that a step of all is made, or where an epoch ends

    def movements(self) -> Generator[None, str]:
        since, made, samples = 0, 0, [0.0] * self.case.workers
        while True:
            if (yield):
                due = since > 0
            else:
                samples = [a + b for a, b in zip(samples, self.behind, strict=True)]
                since, every = since + 1, self.exchange["every"]
                if isinstance(every, dict):
                    every = 1 if made < every["at"] else every["then"]
                made, due = made + 1, since >= every
            if due:
                self.merge(range(4), samples)
                self.copy(range(4), 0.0)
                since, samples = 0, [0.0] * self.case.workers

    def fragments(self) -> Generator[None, str]:
        """Two layers, each a weight and a bias, are the two fragments."""
        every, places = self.exchange["every"], ([0, 1], [2, 3])
        now, under_way, since = 0, None, [[0.0] * self.case.workers for _ in places]
        sent = [0, 0]
        while True:
            ends = yield
            if not ends:
                now += 1
                since = [[a + b for a, b in zip(x, self.behind, strict=True)] for x in since]
                due = {every // 2: 0, 0: 1}.get(now % every)
                if due is not None:
                    self.merge(places[due], since[due])
                    since[due], sent[due], under_way = [0.0] * self.case.workers, now, due
            lands = under_way is not None and (ends or now - sent[under_way] == 1)
            if lands:
                self.copy(places[under_way], self.exchange["mix"])  # type: ignore[index]
                under_way = None
            if ends and now:
                for fragment in (0, 1):
                    if sent[fragment] < now:
                        self.merge(places[fragment], since[fragment])
                self.copy(range(4), 0.0)
                now, sent, since = 0, [0, 0], [[0.0] * self.case.workers for _ in places]

    def pulls(self) -> Generator[None, str]:
        """The masters are a centre; where an epoch ends all pull once more, without a step."""
        made, alpha, since = 0, 0.9 / self.case.workers, [0.0] * self.case.workers
        while True:
            before = [[p.detach().clone() for p in module.parameters()] for module in self.own]
            where = yield
            made += not where
            if not where:
                since = [a + b for a, b in zip(since, self.behind, strict=True)]
            due = where == "ends" or not (where or made % self.exchange["every"])
            forces = [
                [
                    alpha * (centre.detach() - x)
                    for centre, x in zip(self.master.parameters(), own, strict=True)
                ]
                for own in before
            ]
            for module, mine, samples in zip(self.own, forces, since, strict=True):
                for own, centre, force in zip(
                    module.parameters(), self.master.parameters(), mine, strict=True
                ):
                    if due and samples:
                        own.data.add_(force)
                        centre.data.sub_(force)
            since = [0.0 if due else each for each in since]

    def merge(self, places: Sequence[int], samples: Sequence[float]) -> None:
        """The mean movement is the outer optimizer's gradient."""
        self.outer.zero_grad()
        masters, total = list(self.master.parameters()), sum(samples)
        for place in places:
            own = [list(module.parameters())[place].detach() for module in self.own]
            moved = [
                n / total * (masters[place].detach() - x) for n, x in zip(samples, own, strict=True)
            ]
            masters[place].grad = torch.stack(moved).sum(0)
        self.outer.step()

    def copy(self, places: Sequence[int], mix: float) -> None:
        masters = list(self.master.parameters())
        for module in self.own:
            for place in places:
                own = list(module.parameters())[place].data
                own.copy_(mix * own + (1 - mix) * masters[place].data)


# ---- the run itself -----------------------------------------------------------------------------


class Diary(pl.Callback):
    """What worker 0 sees, in a file: rates behind each mini-batch, metrics of each validation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, trainer: Any, *what: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                print(*what, file=file)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.write(trainer, "rate", trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        found = [float(value) for value in trainer.callback_metrics.values()]
        if not trainer.sanity_checking:
            self.write(trainer, "validated", min(found), max(found))

    def read(self, word: str) -> list[list[float]]:
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [[float(each) for each in line[1:]] for line in lines if line[0] == word]


def fitted(case: Case, folder: Path, ckpt: Path | None = None) -> tuple[Any, Any, Diary]:
    folder.mkdir(exist_ok=True)
    diary = Diary(folder / "diary")
    callbacks: list[Any] = [diary]
    if case.saves_every:
        name, every = "{step}", case.saves_every
        callbacks += [ModelCheckpoint(folder, name, save_top_k=-1, every_n_train_steps=every)]
    if case.validation:
        monitors = {"monitor": "min0", "save_top_k": -1}
        callbacks += [ModelCheckpoint(folder, "validated-{step}", **monitors)]
    trainer = make_trainer(
        HybridStrategy("hybrid", keep_order=True, **SCHEMES[case.scheme]),
        case.workers,
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        limit_train_batches=case.limit,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        val_check_interval=case.interval,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        num_sanity_val_steps=2,
    )
    module, data = made(case), regression_data(case.samples, torch.float64)
    loaders = [DataLoader(Subset(data, range(n)), SIZE) for n in case.validation]
    given = loaders if loaders else None
    trainer.fit(module, DataLoader(data, SIZE), given, ckpt_path=ckpt, weights_only=True)
    return module, trainer, diary


def close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


SMALL = [(2,), (1,), (17,), (17, 1), (2, 2, 17)]
BY_DEFAULT = [
    Case("local_sgd", samples=78, validation=(1,), interval=2),
    Case("diloco", validation=(17, 2), interval=2, saves_every=4, accumulate=2, clip=0.1),
    Case("streaming_diloco", samples=76, validation=(2,), interval=3, saves_every=7, adam=True),
    Case("easgd", samples=76, validation=(1,), interval=2, saves_every=5),
    Case("post_local_sgd", workers=2, validation=(1, 1), saves_every=5, schedule="epoch"),
]


def slow_cases() -> Iterator[Case]:
    for scheme in SCHEMES:
        for workers in (2, 3):
            plain = Case(scheme, workers, samples=78)
            for number, sizes in enumerate(SMALL):
                seen = replace(plain, validation=sizes, interval=[None, 1, 2, 3][number % 4])
                yield seen
                yield replace(seen, saves_every=2 + number, accumulate=1 + number % 3)
            yield plain
            yield replace(plain, limit=5, epochs=3, clip=0.05, schedule="epoch", frequency=2)
            yield replace(plain, accumulate=4, frequency=2, validation=(17,), saves_every=2)
            yield replace(plain, adam=True, samples=74, accumulate=3, validation=(5, 2))
            yield replace(plain, max_steps=9, validation=(2,), interval=4, saves_every=3)
            yield replace(plain, max_steps=7, samples=76, clip=0.2)


GOES_ON = [*slow_cases()][::5]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in slow_cases()]


@pytest.mark.sampled(35)
@pytest.mark.few(2)
@pytest.mark.parametrize("case", [*BY_DEFAULT, *SLOW], ids=repr)
def test_workers_exchange_where_plain_torch_does_whoever_looks(case: Case, tmp_path: Path) -> None:
    module, trainer, diary = fitted(case, tmp_path)
    wanted = Plain(case).run()
    assert trainer.global_step == wanted.steps
    close([p.detach() for p in module.parameters()], wanted.weights())
    assert trainer.strategy.run_stats()["staleness"]["mean"] == 0
    for seen, expected in zip(diary.read("validated"), wanted.validated, strict=True):
        assert seen == pytest.approx([expected] * 2, abs=1e-12)
    for step, weights in wanted.saved.items():
        (path,) = tmp_path.glob(f"step={step}.ckpt")
        saved = torch.load(path, weights_only=True)
        close(list(saved["state_dict"].values()), weights)
        assert set(saved["optimizer_states"][0]["workers"]) == set(range(case.workers))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "case",
    by_default([*BY_DEFAULT, *GOES_ON], BY_DEFAULT[1]),
    ids=repr,
)
def test_a_run_that_goes_on_is_the_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    whole, *_ = fitted(case, tmp_path / "whole")
    paths = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    for number, path in enumerate(paths[:: max(1, len(paths) // 3)]):
        resumed, *_ = fitted(case, tmp_path / str(number), path)
        assert all(map(torch.equal, whole.parameters(), resumed.parameters())), path.name
