"""``python -m hybridtrain doctor``: a line for each thing, what to do, and the exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.commands import doctor
from hybridtrain.engine.memory.limits import Gpu
from hybridtrain.hosts import sockets
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.probe import Link
from hybridtrain.lightning.hosts import agreement
from hybridtrain.lightning.hosts.agreement import differences
from tests.cli.conftest import Result
from tests.cli.tiny import TINY
from tests.support.several_hosts import free_port, run_hosts

Doctor = Callable[..., Result]
SEVERAL = [*TINY, "trainer.num_nodes=2", "wait_s=60"]


@pytest.fixture(autouse=True)
def a_roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    given: dict[str, Any] = {
        "usable_cores": 4,
        "container_cores": None,
        "available_bytes": 8 << 30,
        "shared_memory_bytes": 8 << 30,
        "gpus": [],
    }
    for name, value in given.items():
        monkeypatch.setattr(doctor, name, lambda value=value: value)


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Doctor:
    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = doctor.main(list(arguments))
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


def hosts(monkeypatch: pytest.MonkeyPatch, host: int, address: str = "127.0.0.1") -> int:
    """The variables of a host, and its port."""
    port = free_port()
    for name, value in {"NODE_RANK": host, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    return port


def line(result: Result, what: str) -> str:
    (found,) = [x for x in result.out.splitlines() if what in x[:30]]
    return found


def test_a_machine_that_is_well_has_a_line_for_each_thing(ask: Doctor) -> None:
    result = ask(*TINY, "trainer.devices=4")
    assert (result.code, result.err) == (0, "")
    assert [x[:21].rstrip() for x in result.out.splitlines()] == [
        "ok    versions",
        "ok    cores",
        "ok    memory",
        "ok    shared memory",
        "ok    GPUs",
    ]
    assert "torch" in result.out and "hydra-core" in result.out and "Python" in result.out


def test_the_doctor_prints_json_for_programs(ask: Doctor) -> None:
    found = json.loads(ask(*TINY, "json=true").out)
    assert found[0]["what"] == "versions" and found[0]["state"] == "ok" and found[0]["host"] == 0


@pytest.mark.parametrize(
    ("name", "value", "options", "code", "match"),
    [
        ("usable_cores", 2, ["trainer.devices=4"], 0, "note  cores .*2 would do as much"),
        ("container_cores", 1.5, ["trainer.devices=2"], 0, "note .*has the time of 1.5: 2 workers"),
        ("available_bytes", 1 << 20, [], 0, "note  memory .*give the container more"),
        (
            "shared_memory_bytes",
            64 << 20,
            [],
            0,
            "note  shared memory .*0.06 GiB of it free.*--shm-size=2g",
        ),
        ("gpus", [], ["trainer.accelerator=gpu"], 1, "bad   GPUs  .*none: trainer.accelerator=cpu"),
    ],
)
def test_what_is_scarce_has_advice(
    ask: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    options: list[str],
    code: int,
    match: str,
) -> None:
    monkeypatch.setattr(doctor, name, lambda: value)
    result = ask(*TINY, *options)
    assert result.code == code
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(result.out)


@pytest.mark.parametrize(
    ("accelerator", "state"), [("gpu", "bad"), ("auto", "note"), ("cpu", "ok")]
)
def test_a_gpu_that_torch_cannot_use_is_reported_and_fails_only_accelerator_gpu(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch, accelerator: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu(80 << 30, 9)])
    monkeypatch.setattr(doctor.torch.version, "cuda", None)
    result = ask(*TINY, f"trainer.accelerator={accelerator}")
    assert line(result, "GPUs").startswith(state) and "80 GiB" in line(result, "GPUs")
    assert result.code == (state == "bad")


def test_more_devices_than_there_are_are_reported_with_the_number_to_give(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu(80 << 30, 9)])
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = ask(*TINY, "trainer.accelerator=gpu", "trainer.devices=4")
    assert line(result, "GPUs").startswith("bad") and result.code == 1
    assert "trainer.devices=4 was given; give 1" in result.out


@pytest.mark.parametrize(
    ("visible", "devices", "said"),
    [
        ("2", "2", "give 1, or workers_per_device"),
        ("0,1", "[0,2]", "give numbers from 0 to 1"),
        ("0,7,1", "2", "shows 1"),  # nothing counts from an unknown one on
        ("", "1", "shows 0 (CUDA 13.0): trainer.accelerator=cpu"),
        ("MIG-1,MIG-2", "2", ""),
    ],
)
def test_devices_that_cuda_visible_devices_hides_are_reported_with_what_to_give(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch, visible: str, devices: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu(80 << 30, 9)] * 4)
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    result = ask(*TINY, "trainer.accelerator=gpu", f"trainer.devices={devices}")
    assert line(result, "GPUs").startswith("bad" if said else "ok")
    assert said in line(result, "GPUs") and result.code == bool(said)


def test_a_doctor_and_a_training_are_two_commands() -> None:
    said = differences({"doctor": {}}, {"versions": {"torch": "2.13"}})
    assert said is not None and "start the same command on all hosts" in said


def test_a_version_that_is_not_supported_is_reported(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridtrain.util.versions.version", lambda name: "0.1")
    result = ask(*TINY)
    assert result.code == 1 and "supports" in line(result, "versions")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["wait_s=0"], "wait_s=0 was given"),
        (["trainer.devises=2"], "devices"),
        (["trainer.devices=0"], "trainer.devices=0"),
    ],
)
def test_bad_input_is_one_line(ask: Doctor, arguments: list[str], match: str) -> None:
    result = ask(*TINY, *arguments)
    assert result.code == 2 and match in result.complaint


# ---- several hosts ------------------------------------------------------------------------------


def test_a_missing_node_rank_is_reported_with_the_variable_to_set(ask: Doctor) -> None:
    result = ask(*SEVERAL)
    assert result.code == 1 and "NODE_RANK is missing; set NODE_RANK" in line(result, "bad")


def test_strategies_of_lightnings_own_are_not_tried(ask: Doctor) -> None:
    result = ask("strategy=ddp", "trainer.num_nodes=2", "trainer.accelerator=cpu")
    assert result.code == 0 and "torch.distributed" in line(result, "note")


def test_a_missing_key_for_an_address_beyond_loopback_names_the_key_command(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts(monkeypatch, 1, "10.0.0.1")
    result = ask(*SEVERAL)
    assert result.code == 1 and "python -m hybridtrain key FILE" in line(result, "bad")


def test_a_missing_cryptography_package_names_the_extra_to_install(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts(monkeypatch, 0)
    for name in [x for x in sys.modules if x.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    result = ask(*SEVERAL)
    assert result.code == 1 and "pip install 'hybridtrain[hosts]'" in line(result, "bad")


def test_a_port_in_use_is_reported(ask: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    port = hosts(monkeypatch, 0)
    with sockets.listen("127.0.0.1", port):
        result = ask(*SEVERAL)
    assert result.code == 1
    assert f"port {port} of 127.0.0.1 is in use: choose another" in line(result, "bad")


@pytest.mark.slow
def test_hosts_that_do_not_answer_in_time_are_reported(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Key.new().write(tmp_path / "key")
    port = hosts(monkeypatch, 1)
    given = [*TINY, "trainer.num_nodes=2", "wait_s=0.5", f"strategy.hosts_key={tmp_path / 'key'}"]
    result = ask(*given)
    assert result.code == 1 and "host 1  versions" in result.out
    assert f"host 0 at 127.0.0.1, port {port} has not answered host 1 for 0.5 s" in result.out
    assert "check that host 0 runs" in line(result, "bad")
    hosts(monkeypatch, 0)
    result = ask(*given)
    assert result.code == 1 and "have not come within 0.5 s: 1; start the same" in line(
        result, "bad"
    )


def two(folder: Path, on_host_1: Callable[[], object], *more: str) -> list[Any]:
    """What each of two hosts returns and prints."""

    def body() -> int:
        if os.environ["NODE_RANK"] == "1":
            on_host_1()
        return doctor.main([*SEVERAL, "trainer.devices=1", *more])

    return run_hosts(folder, body)


def test_host_0_shows_what_all_hosts_have_and_what_is_between(tmp_path: Path) -> None:
    first, other = two(tmp_path, lambda: None)
    assert (first.result, other.result) == (0, 0), first.said + other.said
    assert other.said == "hybridtrain: host 1 of 2: host 0 prints what was found here\n"
    for what in ("versions", "cores", "memory", "shared memory", "GPUs"):
        assert f"ok    host 0  {what}" in first.said and f"ok    host 1  {what}" in first.said
    assert "ok    host 0  key            from host 0's process, over a Unix socket" in first.said
    assert "ok    host 1  agreement" in first.said
    assert "host 1  connection" in first.said and "ms there and back" in first.said


def test_hosts_that_differ_are_named_on_host_0_and_both_fail(tmp_path: Path) -> None:
    first, other = two(tmp_path, lambda: setattr(agreement, "_digest_of_source", lambda: "x"))
    assert (first.result, other.result) == (1, 1), first.said + other.said
    assert ": source is x on " in first.said
    assert "install the same hybridtrain on all hosts" in first.said
    assert "host 1  connection" in first.said


def test_a_slow_network_has_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure", lambda connection: Link(0.001, 100e6, 110e6))
    first, _ = two(tmp_path, lambda: None)
    assert first.result == 0, first.said
    assert "note  host 1  connection     1.00 ms there and back, 100 MB/s to host 0" in first.said
    assert "of 10 million parameters 400 ms and 364: use a faster network" in first.said
