"""Gradients that travel encoded, and rules that merge them: equal to plain torch, written below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges import WorkerGradients, make_exchange
from hybridtrain.engine.exchanges.compression import PowerSGD
from hybridtrain.engine.exchanges.gradient import Gradient
from hybridtrain.engine.exchanges.sign_sgd import Majority, Signs, SignSGD
from hybridtrain.engine.updates.named import Median, TrimmedMean
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

STEPS, ROWS, COLUMNS, RATE = 4, 80, 60, 0.1
AS_IT_IS = {"name": "gradient", "compress": {"name": "topk", "density": 1, "bits": None}}


def wanted(worker: int, step: int) -> list[torch.Tensor]:
    """The gradients of worker and step: of a matrix that is encoded alone, and of a vector."""
    drawn = torch.Generator().manual_seed(100 * step + worker)
    return [torch.randn(ROWS, COLUMNS, generator=drawn), torch.randn(5, generator=drawn)]


class Given(pl.LightningModule):
    """Has these gradients; worker 0's may be garbage."""

    def __init__(self, garbage: float = 1.0, looks: bool = False, **options: Any) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.vector = torch.nn.Parameter(torch.zeros(5))
        self.garbage, self.looks, self.options = garbage, looks, options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        given = wanted(self.global_rank, batch_idx)
        factor = self.garbage if self.global_rank == 0 else 1.0
        parts = zip((self.matrix, self.vector), given, strict=True)
        return factor * torch.stack([(p * g).sum() for p, g in parts]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, **self.options)


class Looking(Given):
    """Looks at gradients before the step, so that each worker gets the merged one."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())


def trained(module: pl.LightningModule, workers: int, **strategy: Any) -> list[torch.Tensor]:
    made = make_trainer(HybridStrategy(**strategy), workers, max_epochs=1)
    made.fit(module, DataLoader(TensorDataset(torch.zeros(STEPS * workers, 1)), 1))
    return [parameter.detach() for parameter in module.parameters()]


def followed(merge: Any, workers: int) -> list[torch.Tensor]:
    """SGD with what ``merge`` makes of a parameter's gradients, (W, *shape)."""
    found = [torch.zeros(ROWS, COLUMNS), torch.zeros(5)]
    for step in range(STEPS):
        everyone = [wanted(worker, step) for worker in range(workers)]
        for number, parameter in enumerate(found):
            parameter.add_(merge(number, torch.stack([g[number] for g in everyone])), alpha=-RATE)
    return found


# ---- encoded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Given, Looking])
@pytest.mark.parametrize("workers", by_default([1, 2, 3], 3))
def test_sign_sgd_is_the_majority_of_signs_to_the_bit(module: type[Given], workers: int) -> None:
    found = trained(module(), workers, exchange=SignSGD())
    reference = followed(lambda _, stack: stack.sign().sum(0).sign(), workers)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("module", [Given, Looking])
@pytest.mark.parametrize("workers", [1, 3])
def test_power_sgd_is_the_mean_of_products_with_error_feedback(
    module: type[Given], workers: int
) -> None:
    left = torch.zeros(workers, ROWS, COLUMNS)
    start = torch.randn(COLUMNS, 3, generator=torch.Generator().manual_seed(0))

    def products(number: int, stack: torch.Tensor) -> torch.Tensor:
        if number == 1:  # a vector is not encoded
            return stack.mean(0)
        due = left + stack
        for worker, matrix in enumerate(due):
            second = start
            for _ in range(2):
                first = torch.linalg.qr(matrix @ second).Q
                second = matrix.T @ first
            left[worker] = matrix - first @ second.T
        return (due - left).mean(0)

    codec = PowerSGD(rank=3, iterations=2)
    found = trained(module(), workers, exchange={"name": "gradient", "compress": codec})
    reference = followed(products, workers)
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, reference, strict=True)
    )


class PlainSigns(Gradient):
    """Not a dataclass."""

    compress = Signs()
    update = Majority()


def test_a_class_names_its_codec_without_being_a_dataclass() -> None:
    assert isinstance(PlainSigns().compress, Signs)
    assert make_exchange(PlainSigns()).compress == Signs()


class ByHand(Regression):
    """Steps its optimizer itself."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.few(2)
@pytest.mark.parametrize("module", by_default([Regression, ByHand], ByHand))
@pytest.mark.parametrize("policy", ["hybrid", {"name": "backup", "k": 1}, "ssp", "async"])
def test_encoded_as_they_are_gradients_train_as_without(
    policy: Any, module: type[Regression]
) -> None:
    """One worker, so that every policy repeats to the bit; all elements travel, none is rounded."""
    both = []
    for exchange in ("gradient", AS_IT_IS):
        torch.manual_seed(1)
        made = module(lambda p: torch.optim.Adam(p, lr=0.01))
        trainer = make_trainer(HybridStrategy(policy, exchange=exchange), 1, max_epochs=2)
        trainer.fit(made, DataLoader(regression_data(), 8))
        both.append(list(made.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("clip", by_default([None, 0.5], 0.5))
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_workers_with_clipping_and_accumulation_train_as_without(
    clip: float | None, accumulate: int
) -> None:
    both = []
    for exchange in ("gradient", AS_IT_IS):
        torch.manual_seed(1)
        made = Regression(lambda p: torch.optim.Adam(p, lr=0.01))
        options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(HybridStrategy(exchange=exchange), 2, max_epochs=2, **options)
        trainer.fit(made, DataLoader(regression_data(50), 8))
        both.append(list(made.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("compress", by_default(["int8", "int4", "topk"], "int4"))
@pytest.mark.parametrize("policy", ["hybrid", "async", "ssp"])
def test_a_gradient_that_is_not_finite_is_seen_before_it_is_encoded(
    compress: str, policy: str
) -> None:
    exchange = {"name": "gradient", "compress": compress}
    with pytest.raises(UserError, match=r"worker 0 .* has a gradient that is not finite: matrix"):
        trained(Given(garbage=float("nan")), 2, policy=policy, exchange=exchange)


def test_a_quarter_of_the_bytes_is_counted() -> None:
    made = make_trainer(HybridStrategy(exchange={"name": "gradient", "compress": "int8"}), 2)
    made.fit(Given(), DataLoader(TensorDataset(torch.zeros(2 * STEPS, 1)), 1))
    found = made.strategy.run_stats()["handed_over"]  # type: ignore[attr-defined]
    whole = 4 * (ROWS * COLUMNS + 5) * 2 * STEPS * 3
    assert found["sent_bytes"] + found["saved_bytes"] == whole
    assert found["sent_bytes"] < 0.26 * whole


# ---- merge rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Given, Looking])
@pytest.mark.parametrize("garbage", by_default([1.0, 1e9], 1e9))
def test_a_median_bears_a_worker_that_sends_garbage(module: type[Given], garbage: float) -> None:
    def median(_: int, stack: torch.Tensor) -> torch.Tensor:
        stack = stack.clone()
        stack[0] *= garbage
        return stack.median(0).values

    found = trained(module(garbage), 5, update="median")
    reference = followed(median, 5)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    assert max(float(parameter.abs().max()) for parameter in found) < STEPS * RATE * 3


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["median", "trimmed_mean"])
@pytest.mark.parametrize("module", by_default([Given, Looking], Looking))
@pytest.mark.parametrize("left", by_default([1, 2, 3, 4], 2, 3))
def test_an_epochs_last_update_of_too_few_is_their_mean(
    left: int, module: type[Given], update: str
) -> None:
    """Five workers: one update of all, then one of those that have data left."""
    made, rule = module(), {"median": Median(), "trimmed_mean": TrimmedMean()}[update]
    trainer = make_trainer(HybridStrategy(update=update), 5, max_epochs=1)
    trainer.fit(made, DataLoader(TensorDataset(torch.zeros(5 + left, 1)), 1))
    reference = [torch.zeros(ROWS, COLUMNS), torch.zeros(5)]
    for step, n_workers in enumerate((5, left)):
        parts = [WorkerGradients(w, 1 / n_workers, 0, wanted(w, step)) for w in range(n_workers)]
        if n_workers < 3:
            stacks = (torch.stack(each) for each in zip(*(p.gradients for p in parts), strict=True))
            merged = [stack.mean(0) for stack in stacks]
        else:
            merged = rule.merge(parts)
        for parameter, gradient in zip(reference, merged, strict=True):
            parameter.add_(gradient, alpha=-RATE)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(made.parameters(), reference, strict=True)
    )


def test_a_run_ends_with_fewer_workers_than_its_rule_merges(tmp_path: Path) -> None:
    fault = {"worker": 1, "step": 1, "kind": "kill"}
    strategy = HybridStrategy(update="median", on_failure="continue", faults=[fault])
    trainer = make_trainer(strategy, 3, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerDied, match=r"2 workers would be left, and the merge rule needs 3"):
        trainer.fit(Given(), DataLoader(TensorDataset(torch.zeros(30, 1)), 1))


def test_a_trimmed_mean_leaves_out_both_ends() -> None:
    found = trained(Given(garbage=1e9), 4, update={"name": "trimmed_mean", "trim": 0.25})

    def trimmed(_: int, stack: torch.Tensor) -> torch.Tensor:
        stack = stack.clone()
        stack[0] *= 1e9
        return stack.sort(0).values[1:3].mean(0)

    reference = followed(trimmed, 4)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, reference, strict=True))


class Weighted:
    """The mean again, written by a user."""

    least: ClassVar[int] = 1

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        assert sum(part.weight for part in parts) == pytest.approx(1)
        assert all(part.staleness == 0 for part in parts)
        columns = zip(*(part.gradients for part in parts), strict=True)
        weights = [part.weight for part in parts]
        return [sum(w * g for w, g in zip(weights, each, strict=True)) for each in columns]  # type: ignore[misc]


def test_a_rule_of_ones_own_sees_weights_and_separate_gradients() -> None:
    found = trained(Given(), 3, update=Weighted())
    reference = followed(lambda _, stack: stack.mean(0), 3)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, reference, strict=True))


class Wrong(Weighted):
    """Returns other shapes."""

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        return [torch.zeros(3), torch.zeros(5)]


class Nothing(Weighted):
    """Has no ``return``."""

    def merge(self, parts: Sequence[WorkerGradients]) -> Any:
        pass


class Short(Weighted):
    """Returns too few."""

    def merge(self, parts: Sequence[WorkerGradients]) -> list[torch.Tensor | None]:
        return []


@pytest.mark.parametrize(
    ("workers", "strategy", "said"),
    [
        (2, {"update": "median"}, "update=median .* 2 contributions .* at least 3"),
        (3, {"update": "median", "policy": "async"}, "update=median .* 1 contributions"),
        (3, {"update": "median", "policy": {"name": "softsync"}}, "update=median"),
        (3, {"update": {"name": "trimmed_mean", "trim": 0.5}}, "update.trim=0.5 .* below 0.5"),
        (2, {"update": "median", "exchange": "movement"}, "update=median.* exchange=movement"),
        (2, {"update": object()}, "neither a name nor a merge rule"),
        (2, {"update": {"_target_": "torch.optim.SGD", "lr": 1.0}}, "is a class of optimizers"),
        (2, {"update": Wrong()}, r"merge\(\) returned .*3.* for parameter 0, .* \(80, 60\)"),
        (2, {"update": Nothing()}, r"merge\(\) returned NoneType; return a list"),
        (2, {"update": Short()}, r"merge\(\) returned 0 gradients for 2 parameters"),
        (
            2,
            {"policy": "hogwild", "exchange": {"name": "in_place", "compress": "int8"}},
            "exchange.compress was given.*in_place takes optimizer_state",
        ),
        (2, {"exchange": {"name": "gradient", "compress": "int3"}}, "did you mean int"),
        (2, {"exchange": PowerSGD()}, "exchange=PowerSGD.* use exchange={name: gradient, comp"),
        (2, {"exchange": "int8"}, "exchange=int8 .* use exchange={name: gradient, compress: int8}"),
        (
            2,
            {"exchange": {"name": "gradient", "compress": PowerSGD()}, "transport_dtype": "bf16"},
            r"transport_dtype=bf16 was given with exchange=.*; leave one out",
        ),
    ],
)
def test_codecs_and_merge_rules_that_make_no_sense_are_refused_in_one_line(
    workers: int, strategy: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as error:
        trained(Given(), workers, **strategy)
    assert "\n" not in str(error.value)


def test_an_optimizer_that_compares_losses_takes_no_rounded_gradients() -> None:
    module = Regression(lambda p: torch.optim.LBFGS(p))
    trainer = make_trainer(HybridStrategy(exchange={"name": "gradient", "compress": "int8"}), 2)
    with pytest.raises(UserError, match=r"LBFGS.* leave it out"):
        trainer.fit(module, DataLoader(regression_data(), 8))


class WithoutOptimizer(Regression):
    """Only measures: Lightning puts an optimizer of its own in the place of none."""

    def configure_optimizers(self) -> Any:
        return None


def test_a_module_without_an_optimizer_has_nothing_to_encode() -> None:
    module, trainer = WithoutOptimizer(), make_trainer("power_sgd", 2, max_epochs=1)
    before = module.net[0].weight.detach().clone()
    trainer.fit(module, DataLoader(regression_data(8), 2))
    assert trainer.current_epoch == 1 and torch.equal(module.net[0].weight, before)


def test_median_and_trimmed_mean_are_the_rules_of_the_paper() -> None:
    parts = [
        WorkerGradients(w, 0.2, 0, [torch.tensor([float(v)]), None])
        for w, v in enumerate((5, 1, 100, 2, 3))
    ]
    assert Median().merge(parts) == [torch.tensor([3.0]), None]
    assert Median().merge(parts[:4])[0] == torch.tensor([3.5])
    assert TrimmedMean(0.2).merge(parts)[0] == torch.tensor([10 / 3])
    assert TrimmedMean(0.01).merge(parts)[0] == torch.tensor([10 / 3])
    assert TrimmedMean(0.4).merge(parts)[0] == torch.tensor([3.0])
    assert make_exchange("gradient").update == "user"


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", by_default([1, 2], 2))
@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_goes_on_with_what_encoding_has_left_out(
    tmp_path: Path, workers: int, stop: int
) -> None:
    def fit(epochs: int, ckpt: Any = None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module = Regression(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        saving = ModelCheckpoint(tmp_path, filename=f"{epochs}", save_on_train_epoch_end=True)
        options = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": epochs}
        strategy = HybridStrategy(exchange={"name": "gradient", "compress": "int4"})
        trainer = make_trainer(strategy, workers, **options)
        trainer.fit(module, DataLoader(regression_data(), 8), ckpt_path=ckpt)
        return list(module.parameters())

    whole = fit(4)
    fit(stop)
    resumed = fit(4, tmp_path / f"{stop}.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
