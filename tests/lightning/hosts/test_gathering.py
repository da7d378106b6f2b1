"""While hosts gather one may go and come again; what they have of their own is made alike."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.hosts.other_hosts import Hosts
from hybridtrain.hosts.sockets import resolved
from hybridtrain.lightning.hosts.agreement import about_this_host
from hybridtrain.lightning.hosts.cluster import bound_to
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.toys import make_trainer
from tests.picking import by_default
from tests.support.several_hosts import Host, Pids, run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")


class Net(pl.LightningModule):
    """A worker's step uses one of two heads; its buffers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 300)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(300, 1) for _ in range(2))
        self.register_buffer("drawn", torch.randn(5))
        self.register_buffer("spread", torch.randn(1).expand(5), persistent=False)
        self.register_buffer("order", torch.randperm(50), persistent=False)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        head = self.heads[(self.global_rank + number) % 2]
        return torch.nn.functional.mse_loss(head(self.body(batch[0]).tanh()), batch[1])

    def on_train_end(self) -> None:
        torch.save([*self.buffers()], f"buffers-{self.global_rank}.pt")

    def test_step(self, batch: Any, _: int) -> None:
        self.log("weight", self.body.weight.mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ReadsGradients(pl.Callback):
    def on_before_optimizer_step(self, _: Any, module: Any, __: Any) -> None:
        self.seen = [each.grad for each in module.parameters()]


def loader() -> Any:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trained(
    n_hosts: int, workers: int, record: Path | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    pl.seed_everything(7, verbose=False)
    module = Net()
    strategy = HybridStrategy(threads_per_worker=1, record=record)
    options = {"max_epochs": 1, **options}
    make_trainer(strategy, workers, num_nodes=n_hosts, **options).fit(module, loader())
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_gradients_of_earlier_steps_do_not_count_where_hooks_look_at_the_mean(
    tmp_path: Path,
) -> None:
    reads = {"callbacks": [ReadsGradients()]}
    one, two = (
        run_hosts(tmp_path / str(n), partial(trained, n, 2 // n, **reads), n)[0].result
        for n in (1, 2)
    )
    assert all(torch.equal(two[name], value) for name, value in one.items())


@pytest.mark.filterwarnings("ignore")
def test_a_record_of_hosts_whose_hooks_read_gradients_is_replayed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reads = {"callbacks": [ReadsGradients()]}
    run_hosts(tmp_path, partial(trained, 2, 1, Path("record"), **reads))
    pl.seed_everything(7, verbose=False)
    record = read_record(find_record(tmp_path / "host0" / "record"))
    trainer = make_trainer(HybridStrategy(threads_per_worker=1), 2, max_epochs=1, **reads)
    report = replay_fit(record, trainer, Net(), train_dataloaders=loader())
    assert report.parted == "" and report.equal and report.whole and report.updates > 0


def unseeded(strategy: str) -> None:
    torch.manual_seed(int(os.environ["NODE_RANK"]))
    made = HybridStrategy(**parts_of(strategy))
    make_trainer(made, 1, num_nodes=2, max_epochs=1).fit(Net(), loader())


@pytest.mark.parametrize("strategy", by_default(["async", "local_sgd", "hybrid"], "async"))
def test_hosts_that_are_not_seeded_train_with_the_buffers_of_worker_0(
    strategy: str, tmp_path: Path
) -> None:
    assert not any(each.status for each in run_hosts(tmp_path, partial(unseeded, strategy)))
    one, two = (torch.load(tmp_path / f"host{n}" / f"buffers-{n}.pt") for n in (0, 1))
    assert all(map(torch.equal, one, two))


def evaluate() -> None:
    torch.manual_seed(int(os.environ["NODE_RANK"]))
    make_trainer(HybridStrategy(), 1, num_nodes=2).test(Net(), loader(), verbose=False)


def test_a_metric_of_two_models_is_refused(tmp_path: Path) -> None:
    hosts = run_hosts(tmp_path, evaluate)
    assert all(each.status for each in hosts)
    assert "the checksum of the weights is" in hosts[1].said and "seed all hosts" in hosts[1].said


def offers() -> list[bool]:
    """Whether host 0 hands over the key of this run while it tells the others how it has ended."""
    seen, conclude = list[bool](), Hosts.conclude

    def look(self: Hosts, *args: Any) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            port = int(os.environ["MASTER_PORT"])
            seen.append(sock.connect_ex(f"\0hybridtrain-{os.getuid()}-{port}") == 0)
        conclude(self, *args)

    with patch.object(Hosts, "conclude", look):
        strategy = HybridStrategy(on_failure="restart")
        make_trainer(strategy, 1, num_nodes=2, max_epochs=1).fit(Net(), loader())
    return seen


def test_a_host_that_has_its_results_cannot_take_the_same_key_for_its_next_call(
    tmp_path: Path,
) -> None:
    assert run_hosts(tmp_path, offers)[0].result == [False]


# ---- coming and going ---------------------------------------------------------------------------


def gathered(pids: Pids, folder: Path) -> None:
    """Wait until host 1 has come to host 0."""
    while not (folder / "host1" / "log").exists():
        time.sleep(0.05)
    time.sleep(4.0)
    assert pids[1]


def again(folder: Path, pids: Pids) -> None:
    gathered(pids, folder)
    os.kill(pids[1], signal.SIGKILL)
    pids.start(1)
    gathered(pids, folder)
    pids.start(2)


@pytest.mark.slow
def test_a_host_that_ends_while_it_waits_may_come_again(tmp_path: Path) -> None:
    hosts = run_hosts(
        tmp_path, partial(trained, 3, 1), 3, meanwhile=partial(again, tmp_path), late=1
    )
    assert [each.status for each in hosts] == [0, 0, 0], hosts
    assert "host 1 has gone, and may come again" in hosts[0].said


def interrupt(folder: Path, pids: Pids) -> None:
    gathered(pids, folder)
    os.kill(pids[1], signal.SIGINT)


def two_of_three() -> None:
    trained(3, 1)


@pytest.mark.slow
def test_ctrl_c_of_a_host_that_waits_ends_the_others(tmp_path: Path) -> None:
    began_s = time.monotonic()
    hosts = ends(tmp_path, partial(interrupt, tmp_path))
    assert all(each.status for each in hosts) and time.monotonic() - began_s < 25
    assert "is lost" not in hosts[1].said


def ends(folder: Path, meanwhile: Any) -> list[Host]:
    """Two hosts of a run of three."""
    return run_hosts(folder, two_of_three, 2, meanwhile=meanwhile)


def with_another_length() -> None:
    host = os.environ["NODE_RANK"]
    try:
        trained(3, 1, max_epochs=2 if host == "2" else 1)
    except BaseException as error:
        print(error, flush=True)
        if host == "0":
            time.sleep(12.0)  # a notebook, which goes on
        raise


def third(folder: Path, pids: Pids) -> None:
    gathered(pids, folder)
    pids.start(2)


@pytest.mark.slow
def test_hosts_that_have_come_are_told_that_another_one_does_not_fit(tmp_path: Path) -> None:
    began_s = time.monotonic()
    hosts = run_hosts(tmp_path, with_another_length, 3, meanwhile=partial(third, tmp_path), late=1)
    assert all(each.status for each in hosts) and time.monotonic() - began_s < 40
    assert "the run has ended on host 0: UserError: host 2 does not fit" in hosts[1].said


# ---- parts --------------------------------------------------------------------------------------


def test_host_0_listens_at_all_addresses_if_its_name_means_loopback_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"vm": "127.0.1.1", "gpu1": "10.0.0.7"}

    def resolved(name: str, *_: Any, **__: Any) -> list[Any]:
        if name not in known:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    addresses = ["vm", "gpu1", "localhost", "127.0.0.1", "10.0.0.7", "nowhere"]
    assert [bound_to(each) for each in addresses] == ["", *addresses[1:]]


@pytest.mark.parametrize("name", ["a..b", "x" * 70, ".gpu1"])
def test_what_is_no_name_of_a_host_is_an_error_of_the_address(name: str) -> None:
    with pytest.raises(OSError, match="is no name of a host"):
        resolved(name)


def test_a_greeting_has_room_for_any_number_of_hyperparameters() -> None:
    module = Net()
    module.save_hyperparameters({f"number_{n}": n for n in range(5000)})
    trainer: Any = make_trainer(HybridStrategy(), 1)
    about = about_this_host(trainer.strategy.run_setup, trainer, {"model": module})
    assert [*about["model"]] == ["the digest of 5002 entries"]


class Wide(pl.LightningModule):
    """160,000 parameters, more than all messages of a short run have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 20_000, bias=False)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def times_sent() -> float:
    pl.seed_everything(7, verbose=False)
    options = {"max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 2}
    trainer = make_trainer(HybridStrategy(), 1, num_nodes=2, **options)
    trainer.fit(Wide(), loader(), loader())
    hosts: Any = trainer.strategy.run_stats()["hosts"]  # type: ignore[attr-defined]
    return float(hosts[0]["sent"]) / (4 * 160_000)


def test_before_the_first_update_masters_go_down_when_they_change(tmp_path: Path) -> None:
    found = run_hosts(tmp_path, times_sent)[0].result
    assert 2 < found < 4, "as they are shared, as they are installed, and after the update"
