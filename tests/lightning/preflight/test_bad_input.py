"""What a user may get wrong in a module or a strategy, and how soon and how clearly it is said."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

from hybridtrain import HybridStrategy
from hybridtrain.engine.worlds.start_workers import ProcessSpawner
from hybridtrain.errors import UserError
from hybridtrain.lightning.failover.worker_end import advise
from tests.lightning.toys import Regression, fit, make_trainer, regression_data


@contextmanager
def refused(match: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A one-line error of that text, and no process has been started."""
    started: list[Any] = []
    monkeypatch.setattr(ProcessSpawner, "start", lambda *args: started.append(args))
    with pytest.raises(UserError, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert started == [] and multiprocessing.active_children() == []


class Halves(Regression):
    """Two layers over one flat buffer, which overlap in ``common`` elements."""

    def __init__(self, common: int) -> None:
        super().__init__()
        self.flat = torch.randn(8 - common)
        self.one = nn.Parameter(self.flat[:4])
        self.two = nn.Parameter(self.flat[4 - common :])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (batch[0] * (self.one + 2 * self.two) - batch[1]).pow(2).mean()
        return loss + super().training_step(batch, batch_idx)


def test_two_parameters_that_share_part_of_a_storage_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refused("the parameters one and two are two that share memory", monkeypatch):
        fit("hybrid", 2, 4, Halves(1))


def test_an_expanded_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Regression()
    module.net[0].bias = nn.Parameter(torch.zeros(1).expand(16))
    with refused(r"the elements of parameter net\.0\.bias share memory", monkeypatch):
        fit("hybrid", 2, 4, module)


def test_two_parameters_side_by_side_in_one_storage_train_as_in_one_process() -> None:
    shared, alone = Halves(0), Halves(0)
    alone.load_state_dict(shared.state_dict())
    fit("hybrid", 2, 6, shared)
    fit("hybrid", 1, 12, alone)
    torch.testing.assert_close(shared.state_dict(), alone.state_dict())


def test_views_made_in_configure_model_are_found_in_the_worker() -> None:
    class Later(Regression):
        def configure_model(self) -> None:
            self.head = nn.Parameter(self.net[0].weight.data[:2])

    with pytest.raises(UserError, match=r"head and net\.0\.weight are two that share"):
        fit("hybrid", 2, 4, Later)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_an_optimizer_of_parameters_that_are_not_the_modules_is_refused(strategy: str) -> None:
    class Kept(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.listed = [nn.Parameter(torch.ones(5))]  # a list does not register it

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), *self.listed], lr=0.1)

    with pytest.raises(UserError, match=r"SGD was given a tensor of shape \(5,\) that is not a"):
        fit(strategy, 2, 4, Kept)


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_module_without_parameters_that_need_gradients_is_refused(strategy: str) -> None:
    with pytest.raises(UserError, match="no parameters that need gradients; there is nothing to"):
        fit(strategy, 2, 4, Regression().requires_grad_(False))


def test_a_misspelt_option_of_the_strategy_names_the_close_one() -> None:
    with pytest.raises(UserError, match=r"worker_per_device was given.*mean workers_per_device"):
        HybridStrategy(worker_per_device=2)
    with pytest.raises(UserError, match=r"start_metod was given.*did you mean start_method"):
        HybridStrategy(start_metod="fork")
    with pytest.raises(UserError, match=r"colour was given.*it takes .*stop_grace_s"):
        HybridStrategy(colour="blue")


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph", "ddp_comm_hook"])
def test_an_option_of_ddp_is_said_to_be_needless(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} was given, an option of ddp; leave it out"):
        HybridStrategy(**{name: True})


def _in_a_pool(_: int) -> str:
    try:
        fit("hybrid", 2, 4, Regression, max_epochs=1)
    except UserError as error:
        return str(error)
    return "trained"


def test_a_fit_inside_a_pool_of_daemonic_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore
    with refused(r"daemonic process .*use concurrent\.futures\.ProcessPoolExecutor", monkeypatch):
        fit("hybrid", 2, 4, Regression)


@pytest.mark.slow
def test_what_is_said_inside_a_pool_is_a_way_out() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "ProcessPoolExecutor" in pool.map(_in_a_pool, [0])[0]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert list(executor.map(_in_a_pool, [0])) == ["trained"]


@pytest.mark.parametrize("call", [distributed.get_rank, distributed.barrier])
def test_calls_of_torch_distributed_are_told_what_to_use_instead(call: Any) -> None:
    class Raw(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            call()

    with pytest.raises(ValueError, match="process group has not been initialized") as caught:
        fit("hybrid", 1, 4, Raw)
    notes = "\n".join(caught.value.__notes__)
    assert "self.all_gather, trainer.strategy.reduce, .broadcast and .barrier" in notes


def test_an_exception_that_cannot_be_shown_is_not_hidden_by_the_search_for_advice() -> None:
    class Unreadable(Exception):
        def __str__(self) -> str:
            raise ValueError("of __str__")

    advise(Unreadable())


def test_a_distributed_sampler_is_told_to_be_needless() -> None:
    class Sharing(Regression):
        def train_dataloader(self) -> Any:
            data = regression_data()
            return DataLoader(data, 4, sampler=DistributedSampler(data))

    with pytest.raises(ValueError, match="process group has not been initialized") as caught:
        make_trainer("hybrid", 1).fit(Sharing())
    assert "no DistributedSampler" in "\n".join(caught.value.__notes__)


class Normed(Regression):
    """With BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


@pytest.mark.parametrize("strategy", ["async", "ssp", "synchronous", "hogwild", "backup"])
def test_averaged_weights_whose_statistics_take_one_more_pass_are_refused(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    workers = 2 if strategy == "backup" else 1
    trainer = make_trainer(strategy, workers, callbacks=[averaging])
    with refused(r"StochasticWeightAveraging .* BatchNorm.* use EMAWeightAveraging", monkeypatch):
        trainer.fit(Normed(), DataLoader(regression_data(), 8))


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_a_table_that_forward_rescales_is_refused_where_workers_share_it(kind: Any) -> None:
    class Table(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.table = kind(8, 2, max_norm=1.0)

    with pytest.raises(UserError, match=r"table has max_norm=1: its forward .* torch\.renorm"):
        make_trainer("hybrid", 2).fit(Table(), DataLoader(regression_data(), 4))
    frozen = Table()
    frozen.table.requires_grad_(False)
    make_trainer("hybrid", 2, max_steps=1).fit(frozen, DataLoader(regression_data(), 4))
