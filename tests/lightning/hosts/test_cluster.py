"""Which host this is, how it gets the key, and each mistake in one line."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment
from torch.distributed import TCPStore

from hybridtrain.errors import UserError
from hybridtrain.hosts import sockets
from hybridtrain.hosts.key import Key
from hybridtrain.lightning.hosts import cluster
from hybridtrain.lightning.hosts.cluster import (
    be_silent_beyond_host_0,
    handed_over,
    place_of,
    take_key,
)
from hybridtrain.util.host_place import HostPlace

VARIABLES = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "2345"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "2345",
}
SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[05-06,9],m1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "3",
}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*VARIABLES, *TORCHRUN, *SLURM, "LOCAL_RANK", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def started(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **more: str) -> None:
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(name, value)


def test_torchrun_slurm_and_variables_say_which_host_this_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, address = {"host": 1, "n_hosts": 2}, "10.0.0.7"
    started(monkeypatch, VARIABLES)
    by_hand = HostPlace(**one, address=address, port=2345)
    assert place_of(2, LightningEnvironment()) == by_hand
    started(monkeypatch, SLURM)
    given = HostPlace(**one, address=address, port=2345, run="1234567.3")
    assert place_of(2, None) == given
    for name in VARIABLES:
        monkeypatch.delenv(name)
    assert place_of(2, None) == replace(given, address="n05", port=19567)
    started(monkeypatch, TORCHRUN)  # within Slurm, as Lightning decides
    elastic = HostPlace(**one, address=address, run="a", store_port=2345)
    assert place_of(2, None) == elastic
    started(monkeypatch, VARIABLES)
    assert place_of(2, LightningEnvironment()) == by_hand  # chosen as a plugin
    assert place_of(1, None) == HostPlace()


class Own(LightningEnvironment):
    """A scheduler that Lightning does not know."""

    def __init__(self, host: int, n_started: int = 2) -> None:
        super().__init__()
        self.host, self.n_started = host, n_started

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "there"

    @property
    def main_port(self) -> int:
        return 7

    def world_size(self) -> int:
        return self.n_started

    def node_rank(self) -> int:
        return self.host


def test_an_environment_of_the_users_own_is_asked() -> None:
    place = place_of(2, Own(1))
    assert (place.host, place.address, place.port) == (1, "there", 7)


WRONG: list[Any] = [
    (SLURM, {"SLURM_NNODES": "3"}, "num_nodes=2 was given, but Slurm.* on 3; .*srun --nodes=2"),
    (SLURM, {"SLURM_NTASKS": "4"}, "4 tasks on 2 hosts.*srun --nodes=2 --ntasks-per-node=1"),
    (TORCHRUN, {"GROUP_WORLD_SIZE": "3"}, "num_nodes=2 .*torchrun runs on 3;.*--nnodes 2"),
    (
        TORCHRUN,
        {"LOCAL_WORLD_SIZE": "4"},
        "4 processes on this host.*torchrun --nnodes 2 --nproc-per-node 1 ... trainer.devices=4",
    ),
    (VARIABLES, {"NODE_RANK": ""}, "NODE_RANK is missing; set NODE_RANK, MASTER_ADDR and"),
    (VARIABLES, {"NODE_RANK": "2"}, "NODE_RANK=2 was given; .*from 0 to 1"),
    (VARIABLES, {"NODE_RANK": "-1"}, "NODE_RANK=-1 was given; .*from 0 to 1"),
    (VARIABLES, {"NODE_RANK": "one"}, "NODE_RANK=one was given; .*whole number"),
    (VARIABLES, {"MASTER_ADDR": ""}, "MASTER_ADDR is missing; .*the address of host 0"),
    (VARIABLES, {"MASTER_PORT": ""}, "MASTER_PORT is missing"),
    (VARIABLES, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 was given; .*to 65535"),
    (VARIABLES, {"LOCAL_RANK": "1"}, "one of several processes of its host.*start it once"),
]


@pytest.mark.parametrize(("engine", "change", "match"), WRONG, ids=[str(x[1]) for x in WRONG])
def test_variables_of_an_engine_that_do_not_agree_are_one_error(
    engine: dict[str, str], change: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, engine, **change)
    with pytest.raises(UserError, match=match):
        place_of(2, None)


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        (Own(2), "this is host 2.*from 0 to 1"),
        (Own(0, 4), "Own has started 4 processes; start one"),
    ],
)
def test_a_cluster_environment_that_does_not_agree_with_num_nodes_is_refused(
    environment: ClusterEnvironment, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        place_of(2, environment)


def test_only_host_0_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    be_silent_beyond_host_0(HostPlace(host=0, n_hosts=2))
    assert rank_zero_only.rank == 0  # type: ignore[attr-defined]
    be_silent_beyond_host_0(HostPlace(host=1, n_hosts=2))
    assert rank_zero_only.rank == 1  # type: ignore[attr-defined]


# ---- the key ------------------------------------------------------------------------------------

HERE = HostPlace(host=1, n_hosts=2, port=2345)
KEY = Key(b"authority", b"certificate", b"private")


@pytest.fixture(autouse=True)
def plain_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that need no cryptography."""
    monkeypatch.setattr(Key, "to_bytes", lambda self: b"key " + self.private_key)
    monkeypatch.setattr(Key, "from_bytes", lambda content: replace(KEY, private_key=content[4:]))


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_on_one_machine_host_0_hands_the_key_to_its_user_without_a_file(
    free_port: int, tmp_path: Path
) -> None:
    here = replace(HERE, port=free_port)
    with pytest.raises(UserError, match="NODE_RANK=0 on it"):
        take_key(here, None, 0.01)
    with handed_over(replace(here, host=0), free_port, KEY, None):
        for _ in range(2):
            assert take_key(here, None) == (KEY, "127.0.0.1", free_port)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="NODE_RANK=0 on it"):
        take_key(here, None, 0.01)


def test_a_key_of_another_user_counts_for_nothing(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with handed_over(replace(HERE, host=0), free_port, KEY, None):
        monkeypatch.setattr(sockets, "user_of", lambda sock: os.getuid() + 1)
        with pytest.raises(UserError, match=r"of user .* counts for nothing"):
            take_key(replace(HERE, port=free_port), None, 5)


def test_two_runs_at_one_port_are_one_error(free_port: int) -> None:
    with (
        handed_over(replace(HERE, host=0), free_port, KEY, None),
        pytest.raises(UserError, match=r"another process.*MASTER_PORT.*hosts_key=FILE"),
        handed_over(replace(HERE, host=0), free_port, KEY, None),
    ):
        pass


def test_a_forked_child_does_not_keep_the_offer_of_a_key(free_port: int) -> None:
    awake, asleep = os.pipe()
    host_0 = os.fork()
    if host_0 == 0:
        with handed_over(replace(HERE, host=0), free_port, KEY, None):
            if os.fork() == 0:
                os.close(asleep)
                os.read(awake, 1)
                os._exit(0)
            os._exit(0)  # as by kill -9: nothing is put away
    os.waitpid(host_0, 0)
    with handed_over(replace(HERE, host=0), free_port, KEY, None):
        assert take_key(replace(HERE, port=free_port), None).key == KEY
    os.close(asleep)
    os.close(awake)


def test_far_hosts_need_a_key() -> None:
    far = replace(HERE, address="10.0.0.7")
    for wanted in (lambda: take_key(far, None), lambda: cluster.key_of(far, None)):
        with pytest.raises(UserError, match=r"python -m hybridtrain key FILE.*hosts_key=FILE"):
            wanted()


def test_a_key_in_a_file_of_the_users_choice_is_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = replace(HERE, address="10.0.0.7")
    monkeypatch.setattr(Key, "read", lambda path: KEY)
    with handed_over(replace(far, host=0), 2345, KEY, "file"):
        assert take_key(far, "file") == (KEY, "10.0.0.7", 2345)
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_torchruns_store_hands_over_key_and_port_while_host_0_lives(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Key, "read", lambda path: KEY)
    place = HostPlace(host=1, n_hosts=2, run="a", store_port=store.port)
    with pytest.raises(UserError, match="host 0 of 2 has not come"):
        take_key(place, None, 1)
    with handed_over(replace(place, host=0), 7, KEY, None):
        assert take_key(place, None, 60) == (KEY, "127.0.0.1", 7)
    with pytest.raises(UserError, match="has not come"):  # restarted: that server is gone
        take_key(place, None, 1)
    with handed_over(replace(place, host=0), 8, KEY, "file"):
        assert take_key(place, "file", 60) == (KEY, "127.0.0.1", 8)
        with pytest.raises(UserError, match=r"host 0 was given strategy\.hosts_key"):
            take_key(place, None, 60)


def test_a_store_that_is_not_there_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = HostPlace(host=1, n_hosts=2, run="a", store_port=port)
    with pytest.raises(UserError, match=re.escape(f"store at 127.0.0.1:{port} does not answer")):
        take_key(place, None, 0.5)


def test_host_0_publishes_the_address_by_which_it_reaches_the_store() -> None:
    assert cluster.address_towards(HostPlace(n_hosts=2, store_port=9)) == "127.0.0.1"
    assert cluster.address_towards(
        HostPlace(n_hosts=2, address="nowhere.invalid", store_port=9)
    ) == ("nowhere.invalid")
