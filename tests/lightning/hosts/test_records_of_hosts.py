"""What is known of a run over two hosts afterwards: its record, which is replayed, and figures."""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy, StepProfiler
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.recording import Record, find_record, read_record
from hybridtrain.lightning.hosts import agreement
from hybridtrain.lightning.replay.replay_fit import replay_fit
from tests.lightning.hosts.test_two_hosts import EPOCHS, SAMPLES, Net, data
from tests.picking import by_default
from tests.support.several_hosts import Host, run_hosts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
FLOATS = sum(p.numel() for p in Net().parameters())


class Drops(Net):
    """With dropout: each worker draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.1))


def made(
    n_hosts: int,
    devices: int,
    parts: dict[str, Any],
    record: Path | None,
    epochs: int = EPOCHS,
    **options: Any,
) -> tuple[pl.Trainer, pl.LightningModule]:
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        strategy=HybridStrategy(**parts, record=record),
        accelerator="cpu",
        devices=devices,
        num_nodes=n_hosts,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    return trainer, Drops()


def train(
    n_hosts: int, devices: int, parts: dict[str, Any], profile: bool = False
) -> dict[str, Any]:
    """Train with a record in the host's folder; the weights and the statistics."""
    more = {"profiler": StepProfiler("profile")} if profile else {}
    trainer, module = made(n_hosts, devices, parts, Path("record"), **more)
    trainer.fit(module, data(), data())
    strategy: Any = trainer.strategy
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "stats": strategy.run_stats()}


def recorded(folder: Path, devices: int, **parts: Any) -> tuple[Record, list[Host]]:
    hosts = run_hosts(folder, partial(train, 2, devices, parts))
    assert [host.status for host in hosts] == [0, 0], hosts[0].said
    assert not (folder / "host1" / "record").exists()
    assert hosts[0].result["stats"] == hosts[1].result["stats"]
    return read_record(find_record(folder / "host0" / "record")), hosts


NAMES = ["hybrid", "async", "local_sgd", "diloco", "ssp", "backup", "k_async", "easgd"]


@pytest.mark.sampled(6)
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "devices"),
    by_default(
        [(name, n) for name in NAMES for n in (1, 2)],
        *[("hybrid", 2), ("async", 2), ("local_sgd", 1), ("diloco", 2), ("ssp", 1)],
    ),
)
def test_a_record_of_two_hosts_is_replayed_in_one_process_to_the_bit(
    tmp_path: Path, name: str, devices: int
) -> None:
    parts = parts_of(name)
    record, hosts = recorded(tmp_path, devices, **parts)
    assert record.hosts == [0] * devices + [1] * devices
    trainer, module = made(1, 2 * devices, parts, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = replay_fit(
            record, trainer, module, train_dataloaders=data(), val_dataloaders=data()
        )
    assert report.parted == "" and report.equal and report.whole
    assert report.events == len(record.cells) and report.updates > 0
    for key, value in hosts[0].result["weights"].items():
        assert torch.equal(value, module.state_dict()[key]), key


@pytest.mark.slow
def test_a_record_of_hosts_that_went_on_from_a_checkpoint_is_replayed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_PART_BYTES", 1000)
    trainer, module = made(1, 2, {}, None)
    trainer.fit(module, data(), data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again: dict[str, Any] = {"ckpt_path": tmp_path / "end.ckpt", "weights_only": True}
    run_hosts(tmp_path, partial(go_on, again))
    record = read_record(find_record(tmp_path / "host0" / "record"))
    trainer, module = made(1, 2, {}, None, EPOCHS + 1)
    loaders = {"train_dataloaders": data(), "val_dataloaders": data()}
    report = replay_fit(record, trainer, module, **loaders, **again)
    assert report.equal and report.whole and report.updates == SAMPLES // 8


def go_on(again: dict[str, Any]) -> None:
    if os.environ["NODE_RANK"] == "1":  # which has no such file
        agreement._size_and_digest = lambda _: None
    trainer, module = made(2, 1, {}, Path("record"), EPOCHS + 1)
    trainer.fit(module, data(), data(), **again)


def test_a_record_says_what_each_host_has_sent_and_waited(tmp_path: Path) -> None:
    record, hosts = recorded(tmp_path, 2, policy="hybrid")
    for stats in (record.told["end"]["stats"], hosts[0].result["stats"]):
        first, second = stats["hosts"]
        assert first["workers"] == second["workers"] == 2
        rows = 2 * 4 * FLOATS * stats["updates"]
        assert rows < second["sent"] == first["received"] < 2 * rows + 200_000
        assert 4 * FLOATS * stats["updates"] < first["sent"] == second["received"]
        assert first["sending_s"] > 0 and first["receiving_s"] > 0
        shares = stats["waiting_share"]
        assert first["waiting_share"] == pytest.approx(sum(shares[:2]) / 2)
        assert second["waiting_share"] == pytest.approx(sum(shares[2:]) / 2)
    assert hosts[0].result["stats"]["samples"] == EPOCHS * SAMPLES
    assert 4 * FLOATS <= record.told["begin"]["bytes"] < 5 * FLOATS, "with gaps between tensors"


def test_one_host_has_no_figures_of_hosts(tmp_path: Path) -> None:
    (one,) = run_hosts(tmp_path, partial(train, 1, 2, {"policy": "hybrid"}), n_hosts=1)
    assert one.status == 0, one.said
    record = read_record(find_record(tmp_path / "host0" / "record"))
    assert record.hosts == [0, 0] and "hosts" not in record.header
    assert "hosts" not in one.result["stats"] and "hosts" not in record.told["end"]["stats"]


@pytest.mark.slow
def test_a_profile_says_what_each_host_spends_on_the_network(tmp_path: Path) -> None:
    hosts = run_hosts(tmp_path, partial(train, 2, 1, {"policy": "hybrid"}, profile=True))
    assert [host.status for host in hosts] == [0, 0], hosts[0].said
    found = json.loads((tmp_path / "host0" / "profile" / "profile.json").read_text())
    first, second = found["hosts"]
    assert first["sent"] == second["received"] > 0 and first["sending_s"] > 0
    assert "MB received" in hosts[0].said and "MB received" not in hosts[1].said
