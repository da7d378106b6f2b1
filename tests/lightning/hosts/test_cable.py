"""Two hosts in network namespaces of their own, joined by a cable that is pulled."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.hosts.key import Key
from tests.lightning.hosts.test_two_hosts import EPOCHS, SAMPLES, Slowly, train, wait_for
from tests.support.several_hosts import Pids, run_hosts

_CLONE_NEWNET = 0x40000000
NAMES = [f"ht{os.getpid()}h{host}" for host in (0, 1)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """Between 10.77.0.1 and 10.77.0.2."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("-n", NAMES[0], "link", "add", "eth", "type", "veth", "peer", "eth", "netns", NAMES[1])
        for host, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth")
            for device in ("eth", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def train_there(key: Path, policy: str) -> dict[str, Any]:
    with (Path("/run/netns") / NAMES[int(os.environ["NODE_RANK"])]).open() as space:
        assert ctypes.CDLL(None).setns(space.fileno(), _CLONE_NEWNET) == 0
    return train(2, 2, policy, (Slowly,), on_failure="continue", hosts_key=str(key))


def pull(folder: Path, seconds: list[float], pids: Pids) -> None:
    wait_for((folder / "host1" / "begun").exists)
    ip("-n", NAMES[1], "link", "set", "eth", "down")
    began_s = time.monotonic()
    wait_for(lambda: "is lost" in (folder / "host0" / "log").read_text())
    seconds.append(time.monotonic() - began_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="hosts are forked processes")
@pytest.mark.parametrize("policy", ["async", "hybrid"])
def test_a_pulled_cable_is_known_and_both_sides_act(
    tmp_path: Path, cable: None, policy: str
) -> None:
    Key.new().write(tmp_path / "key")
    seconds: list[float] = []
    first, other = run_hosts(
        tmp_path,
        partial(train_there, tmp_path / "key", policy),
        variables={"MASTER_ADDR": "10.77.0.1"},
        meanwhile=partial(pull, tmp_path, seconds),
    )
    print(f"known after {seconds[0]:.1f} s")
    assert (first.status, other.status) == (0, 1), first.said + other.said
    assert first.result["samples"] == EPOCHS * SAMPLES
    assert "worker 2 is lost with host 1" in first.said and "host 0, which has" in other.said
