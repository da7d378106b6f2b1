"""The command line on several hosts: all but the first write nothing; ``key`` makes their key."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import partial
from pathlib import Path

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from hybridtrain.cli import run
from hybridtrain.cli.commands import simulate
from hybridtrain.hosts.key import Key
from tests.cli.conftest import Command, Replay, in_use, summary
from tests.cli.test_claim import cut_short
from tests.cli.tiny import TINY
from tests.picking import by_default
from tests.support.several_hosts import run_hosts

HOST_1 = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2345"}
SEVERAL = [*TINY, "trainer.num_nodes=2", "trainer.devices=2"]


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """On host 1, where training is only noted: the run directory of each."""
    noted: list[str] = []
    for name, value in HOST_1.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(run, "_fit", lambda cfg, parts: noted.append(cfg.run_dir))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return noted


def test_host_1_writes_nothing_and_says_one_line(command: Command, fits: list[str]) -> None:
    Path("mine").mkdir()
    with in_use("mine"):  # by host 0
        result = command(*SEVERAL, "hydra.run.dir=mine", "logger=both", "test=true")
    assert result.code == 0, result.err
    assert result.complaint == "hybridtrain: host 1 of 2: 2 workers, relay to 127.0.0.1"
    assert result.out == ""
    assert list(Path("mine").iterdir()) == [Path("mine/.lock")]
    assert len(fits) == 1 and list(Path("temporary").iterdir()) == []
    assert rank_zero_only.rank == 1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_host_1_goes_on_with_a_run_whose_directory_host_0_has_claimed(
    command: Command, fits: list[str]
) -> None:
    os.environ["NODE_RANK"] = "0"
    first = command(*SEVERAL, "hydra.run.dir=old", "test=false", "strategy.record=null")
    assert first.code == 0, first.err
    cut_short("old")
    os.environ["NODE_RANK"] = "1"
    with in_use("old"):
        result = command("resume=old")
    assert result.code == 0, result.err
    assert "old goes on from its beginning" in result.out
    assert fits[0] == str(Path("old").absolute()) and "temporary" in fits[1]


@pytest.mark.parametrize("asked", ["resume=auto", "ckpt=last"])
def test_host_1_looks_for_no_run_and_leaves_that_to_host_0(
    command: Command, fits: list[str], asked: str
) -> None:
    result = command(*SEVERAL, asked)
    assert result.code == 0, result.err
    assert result.out == "" and len(fits) == 1


def test_a_range_of_hosts_is_their_number_and_the_least(command: Command, fits: list[str]) -> None:
    result = command(
        *TINY, "trainer.num_nodes=1:4", "strategy=async", "strategy.on_failure=restart"
    )
    assert result.code == 0, result.err
    assert "host 1 of 4" in result.complaint
    for given in ("1:", ":4", "4:1"):
        result = command(*TINY, f"trainer.num_nodes={given}")
        assert result.code == 2 and f"num_nodes={given} was given; a range" in result.complaint


def test_a_mistake_of_the_engine_is_one_line(command: Command, fits: list[str]) -> None:
    os.environ["NODE_RANK"] = "2"
    result = command(*SEVERAL)
    assert result.code == 2 and "NODE_RANK=2 was given" in result.complaint and fits == []


def test_a_sweep_is_refused(command: Command, fits: list[str]) -> None:
    result = command(*SEVERAL, "-m", "seed=1,2")
    assert result.code == 2 and "trainer.num_nodes=2 was given with --multirun" in result.complaint


def two_hosts(*arguments: str) -> int:
    from hybridtrain.cli.entry import main

    return main([*SEVERAL, *arguments, "hydra.run.dir=run", "logger=none"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "diloco"], "async"))
def test_a_run_of_two_hosts_is_replayed_and_tried_under_another_policy(
    tmp_path: Path, replay: Replay, strategy: str
) -> None:
    pytest.importorskip("cryptography")
    hosts = run_hosts(tmp_path / "hosts", partial(two_hosts, f"strategy={strategy}"))
    assert [host.result for host in hosts] == [0, 0], hosts[0].said
    run = tmp_path / "hosts" / "host0" / "run"
    assert "  host 1 " in hosts[0].said and len(summary(run)["hosts"]) == 2
    told = replay(f"run={run}")
    assert (told.code, told.err) == (0, "") and "result   equal to the bit" in told.out
    assert "4 workers on 2 hosts" in told.out
    if strategy == "async":
        told = replay(f"run={run}", "policy=backup")
        assert told.code == 0 and "simulated" in told.out
        refused = simulate.main([f"run={run}", "hosts=2x2"])
        assert refused == 2


def test_key_makes_a_file_that_only_this_user_can_read(command: Command) -> None:
    pytest.importorskip("cryptography")
    assert command("key", "mine").out.startswith("mine: a key; copy it to every host")
    assert stat.S_IMODE(Path("mine").stat().st_mode) == 0o600
    assert Key.read(Path("mine")) == Key.read(Path("mine"))
    again = command("key", "mine")
    assert again.code == 2 and "exists already" in again.complaint
    nothing = command("key")
    assert nothing.code == 2 and "python -m hybridtrain key FILE" in nothing.complaint
