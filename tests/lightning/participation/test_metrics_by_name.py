"""Each name has the values that were logged under it, whatever the order, in whichever workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.errors import UserError
from tests.lightning.toys import make_trainer
from tests.picking import by_default

STRATEGIES = by_default(
    ["hybrid", "async", "backup", "local_sgd", "hogwild", "ssp", "synchronous", "diloco"], "hybrid"
)
REDUCTIONS: dict[str, Callable[[float, float], float]] = {
    "mean": lambda one, two: (one + two) / 2,
    "sum": lambda one, two: one + two,
    "min": min,
    "max": max,
}


class Logs(pl.LightningModule):
    """Calls ``write(module, batch)`` in a step, and ``end(module)`` in the hook of its epoch."""

    def __init__(
        self, write: Callable[..., None] | None = None, end: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.metrics = torch.nn.ModuleDict(
            {"a": torchmetrics.SumMetric(), "b": torchmetrics.SumMetric()}
        )
        self.cat = torchmetrics.CatMetric()
        self.write, self.end = write or (lambda *_: None), end or (lambda *_: None)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.state.fn == "fit":
            self.write(self, batch[0])
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.write(self, batch[0])

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        self.end(self)

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(n: int = 4, size: int = 2) -> Any:
    return DataLoader(TensorDataset(torch.arange(1.0, n + 1)[:, None]), size)


def run(
    stage: str,
    strategy: Any,
    module: pl.LightningModule,
    data: Any = None,
    workers: int = 2,
    **options: Any,
) -> dict[str, float]:
    """What has been logged in one epoch."""
    trainer = make_trainer(strategy, workers, max_epochs=1, **options)
    if stage == "fit":
        trainer.fit(module, loader() if data is None else data)
    else:
        getattr(trainer, stage)(module, loader() if data is None else data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def in_another_order(module: Any, x: torch.Tensor, **options: Any) -> None:
    """Worker 0 logs a = 1, b = 10; worker 1 logs b = 20, a = 2."""
    names = ["a", "b"] if module.global_rank == 0 else ["b", "a"]
    for name in names:
        value = {"a": 1.0, "b": 10.0}[name] * (module.global_rank + 1)
        module.log(name, value, sync_dist=True, **options)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
@pytest.mark.parametrize("reduce_fx", REDUCTIONS)
def test_names_in_another_order_keep_their_values(
    reduce_fx: str, stage: str, strategy: str
) -> None:
    options: Any = {"on_step": False, "on_epoch": True, "reduce_fx": reduce_fx}
    found = run(stage, strategy, Logs(partial(in_another_order, **options)))
    expected = REDUCTIONS[reduce_fx]
    if strategy in ("hybrid", "local_sgd", "diloco") or stage != "fit":
        assert found == {"a": expected(1.0, 2.0), "b": expected(10.0, 20.0)}
    else:
        assert found["b"] == 10 * found["a"]


@pytest.mark.parametrize("on_epoch", [False, True])
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_values_logged_by_step_keep_their_names_in_another_order(
    stage: str, on_epoch: bool
) -> None:
    rows = Rows()
    write = partial(in_another_order, on_step=True, on_epoch=on_epoch)
    run(stage, "hybrid", Logs(write), callbacks=[rows])
    assert rows.seen[0] == rows.seen[1] and {"a", "a_step"} & rows.seen[0].keys()
    for name, value in rows.seen[0].items():
        assert value == (1.5 if name.startswith("a") else 15.0), name


class Rows(pl.Callback):
    """What callbacks see behind each mini-batch of worker 1, and of worker 0 (by its number)."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        own = {name: float(value) for name, value in trainer.logged_metrics.items()}
        everybodys = trainer.strategy.collectives.exchange("rows", own)
        self.seen = [row for _, row in everybodys]

    on_validation_batch_end: Any = on_train_batch_end


# ---- names that some workers have not logged ----------------------------------------------------


def by_sample(module: Any, x: torch.Tensor, **options: Any) -> None:
    """Each class by itself: a class that a worker has not seen, it has not logged."""
    for value in x.flatten().tolist():
        module.log(f"class {value % 3:.0f}", value, sync_dist=True, batch_size=1, **options)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_a_name_that_some_have_not_logged_is_the_mean_of_those_that_have(
    stage: str, workers: int, strategy: str
) -> None:
    write = partial(by_sample, on_step=False, on_epoch=True)
    found = run(stage, strategy, Logs(write), loader(5, 1), workers)
    assert found == {"class 0": 3.0, "class 1": 2.5, "class 2": 3.5}


def of_one_worker(module: Any, x: torch.Tensor, **options: Any) -> None:
    """Worker 1 alone logs "rare", as the sum of its two samples; all log "x"."""
    module.log("x", x.sum(), sync_dist=True, **options)
    if module.global_rank == 1:
        module.log("rare", 7.0, sync_dist=True, **options)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_name_of_one_worker_in_a_mini_batch_is_known_to_all(stage: str) -> None:
    rows = Rows()
    run(stage, "hybrid", Logs(partial(of_one_worker, on_step=True)), callbacks=[rows])
    assert all(7.0 in row.values() for row in rows.seen) and len(rows.seen) == 2


def test_where_one_worker_alone_logs_by_step_the_next_step_names_it() -> None:
    def write(module: Any, x: torch.Tensor) -> None:
        assert module.trainer.global_step < 2
        if module.global_rank == 1:
            module.log("rare", 7.0, sync_dist=True, on_step=True)

    with pytest.raises(UserError, match=r"of mini-batch 1 \(train\): rare'"):
        run("fit", "hybrid", Logs(write), loader(64, 2))


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_metric_object_that_one_worker_alone_logs_is_that_of_all(stage: str) -> None:
    def write(module: Any, x: torch.Tensor) -> None:
        names = ["a", "b"] if module.global_rank == 0 else ["b"]
        for name in names:
            module.metrics[name].update(module.global_rank + 1.0)
            module.log(name, module.metrics[name], on_step=False, on_epoch=True)
        if module.global_rank == 1:
            module.cat.update(x.long())

    def end(module: Any) -> None:
        module.log("samples", float(module.cat.compute().numel()))

    assert run(stage, "hybrid", Logs(write, end)) == {"a": 1.0, "b": 3.0, "samples": 2.0}


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_one_worker_may_log_alone_at_the_end_of_an_epoch(stage: str) -> None:
    def end(module: Any) -> None:
        if module.global_rank == 1:
            module.log("rare", 7.0, sync_dist=True)

    assert run(stage, "hybrid", Logs(end=end)) == {"rare": 7.0}


def test_several_loaders_have_names_of_their_own() -> None:
    write = partial(by_sample)
    found = run("validate", "hybrid", Logs(write), [loader(3, 1), loader(2, 1)])
    assert found == {
        "class 0/dataloader_idx_0": 3.0,
        "class 1/dataloader_idx_0": 1.0,
        "class 2/dataloader_idx_0": 2.0,
        "class 1/dataloader_idx_1": 1.0,
        "class 2/dataloader_idx_1": 2.0,
    }


def test_a_metric_that_one_worker_has_read_before_the_others_is_of_all() -> None:
    def end(module: Any) -> None:
        module.log("a", float(module.global_rank), sync_dist=True)
        if module.trainer.is_global_zero:  # as a progress bar does
            module.trainer.progress_bar_callback.get_metrics(module.trainer, module)
        module.log("b", float(module.global_rank), sync_dist=True)

    bar = TQDMProgressBar(refresh_rate=0)
    found = run("fit", "hybrid", Logs(end=end), callbacks=[bar], enable_progress_bar=True)
    assert found == {"a": 0.5, "b": 0.5}


def test_other_options_in_another_worker_are_named() -> None:
    def write(module: Any, x: torch.Tensor) -> None:
        reduce_fx = "sum" if module.global_rank else "mean"
        module.log("a", 1.0, sync_dist=True, reduce_fx=reduce_fx)

    said = r"self\.log\('a'.*reduce_fx=mean.* in worker 0, and with .*reduce_fx=sum"
    with pytest.raises(UserError, match=said):
        run("validate", "hybrid", Logs(write))


class Classes(Logs):
    """Logs in every way that there is: names of classes, metric objects, by step and epoch."""

    def __init__(self) -> None:
        super().__init__()
        names = ("fit", "val 0", "val 1")
        self.of = torch.nn.ModuleDict({name: self._made(name) for name in names})

    @staticmethod
    def _made(name: str) -> Any:
        area = torchmetrics.classification.BinaryAUROC()  # its states are lists
        both: Any = {"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()}
        collection = torchmetrics.MetricCollection(both, prefix=f"{name} ")
        return torch.nn.ModuleDict({"area": area, "both": collection})

    def _log(self, name: str, x: torch.Tensor) -> None:
        own: Any = self.of[name]
        own["area"].update(x.flatten().sin().sigmoid(), (x.flatten() % 2).long())
        own["both"].update(x)
        epoch: Any = {"on_step": False, "on_epoch": True}
        self.log(f"{name} area", own["area"], **epoch)
        self.log_dict(own["both"], **epoch)
        self.log(f"{name} x", x.mean(), on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        by_sample(self, x, **epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._log("fit", batch[0])
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log(f"val {dataloader_idx}", batch[0])

    def on_train_epoch_end(self) -> None:
        pass


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [2, 3])
def test_all_that_is_logged_is_as_on_one_device(workers: int, strategy: str) -> None:
    def logged(strategy: str, workers: int) -> dict[str, Any]:
        bar, stopping = TQDMProgressBar(), EarlyStopping("val 0 x/dataloader_idx_0", patience=3)
        trainer = make_trainer(
            strategy, workers, max_epochs=2, enable_progress_bar=True, callbacks=[bar, stopping]
        )
        trainer.fit(Classes(), loader(13, 2), [loader(7, 2), loader(4, 1)])
        known = trainer.callback_metrics.items()
        # ``fit x`` is the last mini-batch's, whose samples the sampler has shuffled.
        return {k: pytest.approx(float(v)) for k, v in known if "_step" not in k and k != "fit x"}

    one, several = logged("auto", 1), logged(strategy, workers)
    assert several == one and len(one) > 15


# ---- collectives of user code -------------------------------------------------------------------


def gathers(module: Any) -> None:
    one, two = (
        (lambda: module.all_gather(torch.ones(1))),
        (lambda: module.all_gather(torch.ones(1))),
    )
    for each in (one, two) if module.global_rank == 0 else (two, one):
        each()


def reduces(module: Any) -> None:
    one = torch.tensor(1.0)
    if module.global_rank == 0:
        module.trainer.strategy.reduce(one)
    else:
        module.all_gather(one)


def computes(module: Any) -> None:
    for name in ("a", "b") if module.global_rank == 0 else ("b", "a"):
        module.metrics[name].update(1.0)
        module.metrics[name].compute()


def gathers_other_keys(module: Any) -> None:
    one = torch.ones(1)
    module.all_gather({"a": one} if module.global_rank else {"a": one, "b": one})
    module.trainer.strategy.barrier("end")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (computes, r"metric 'metrics.[ab]' \(sum_value\)' while"),
        (gathers_other_keys, r"all_gather of \['b'\], called at"),
        (gathers, r"all_gather, called at test_metrics_by_name.py:\d+' while"),
        (reduces, r"reduce, called at test_metrics_by_name.py:\d+'"),
    ],
)
def test_calls_of_user_code_that_do_not_belong_together_are_named(end: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run("validate", "hybrid", Logs(end=end))


def test_the_values_of_a_dictionary_are_gathered_by_their_keys() -> None:
    def end(module: Any) -> None:
        rank = module.global_rank
        values = {"a": torch.tensor(1.0 + rank), "more": {"b": 10.0 * (1 + rank), "c": 5.0}}
        found = module.all_gather(dict(reversed(values.items())) if rank else values)
        assert [*found] == (["more", "a"] if rank else ["a", "more"])
        for worker in range(2):
            module.log(f"a{worker}", found["a"][worker])
            module.log(f"b{worker}", found["more"]["b"][worker])

    expected = {"a0": 1.0, "a1": 2.0, "b0": 10.0, "b1": 20.0}
    assert run("validate", "hybrid", Logs(end=end)) == expected


@pytest.mark.parametrize("name", ["all_gather", "reduce"])
def test_tensors_of_unequal_shapes_are_named_with_the_call(name: str) -> None:
    def end(module: Any) -> None:
        own = torch.ones(module.global_rank + 1, 3)
        module.all_gather(own) if name == "all_gather" else module.trainer.strategy.reduce(own)

    shapes = r"\(1, 3\) in worker 0, \(2, 3\) in worker 1"
    said = rf"{name}, called at \S+:\d+ was given .*: {shapes}; .*pad"
    with pytest.raises(UserError, match=said):
        run("validate", "hybrid", Logs(end=end))


def test_a_metric_can_be_copied_and_saved_in_a_worker() -> None:
    def end(module: Any) -> None:
        module.metrics["a"].update(1.0)
        module.log("copy", module.metrics["a"].clone().compute())
        alone = pickle.loads(pickle.dumps(module.metrics["a"]))
        module.log("saved", alone.compute())

    assert run("validate", "hybrid", Logs(end=end)) == {"copy": 2.0, "saved": 1.0}
