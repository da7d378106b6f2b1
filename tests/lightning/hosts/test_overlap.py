"""Updates that begin while rows arrive, and one row for all workers of a host."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.hosts import other_hosts, sockets, transport
from tests.lightning.hosts.test_two_hosts import EPOCHS, SAMPLES, Net, assert_equal, both, train
from tests.picking import by_default
from tests.support.several_hosts import run_hosts

UPDATES = EPOCHS * SAMPLES // 4 // 4  # mini-batches of 4, four workers
WIDTH = 4096


@pytest.fixture
def slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size count as large ones, travel in small frames, and take their time."""
    read = sockets.read_exactly

    def slowly(sock: Any, room: memoryview, until: float | None = None) -> None:
        time.sleep(0.005 if until is None and len(room) != transport.FRAME.size else 0.0)
        read(sock, room, until)

    for module in (transport, other_hosts):
        monkeypatch.setattr(module, "FAR_BYTES", 0)
    monkeypatch.setattr(transport, "FRAME_BYTES", 512)
    monkeypatch.setattr(sockets, "read_exactly", slowly)


LOCK_STEP: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "gradients clipped": {"clips": 0.01},
    "synchronous": {"policy": "synchronous"},
}


@pytest.mark.usefixtures("slow_rows")
@pytest.mark.parametrize("name", by_default(LOCK_STEP, "hybrid"))
def test_an_update_that_begins_early_is_the_same_to_the_bit(tmp_path: Path, name: str) -> None:
    two, one = both(tmp_path, train, **LOCK_STEP[name])
    assert_equal(two[0].result, one.result)
    assert_equal(two[1].result, one.result)
    assert two[0].result["samples"] == EPOCHS * SAMPLES


def test_a_host_hands_over_one_row_for_all_its_workers(tmp_path: Path) -> None:
    """2 × 2 trains what 1 × 4 does, but for float32's rounding; a row up, the masters down."""
    body = partial(train, make=Wide)
    apart = run_hosts(tmp_path / "apart", partial(body, 2, 2))
    together = run_hosts(tmp_path / "together", partial(body, 2, 2, host_sums=True))
    assert [host.status for host in (*apart, *together)] == [0] * 4, together[0].said
    assert_equal(together[0].result, together[1].result)
    for name, value in apart[0].result["weights"].items():
        torch.testing.assert_close(together[0].result["weights"][name], value)
    row = 4 * sum(each.numel() for each in Wide().net.parameters())
    for result, rows in ((apart, 2), (together, 1)):
        between, _ = result[0].result["hosts"]
        assert UPDATES * rows * row <= between["received"] < UPDATES * (rows + 0.5) * row
        assert UPDATES * row <= between["sent"] < (UPDATES + 12) * row  # also before, and the end


class Wide(Net):
    """Large enough that rows are most of what travels; with a frozen parameter of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        )
        codes = torch.ones(4, dtype=torch.int8)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=self.rate)


@pytest.mark.slow
def test_a_worker_is_restarted_where_one_row_stands_for_all(tmp_path: Path) -> None:
    kill = [{"worker": 3, "step": 4, "kind": "kill"}]
    body = partial(train, 2, 2, make=Wide, host_sums=True)
    disturbed = run_hosts(tmp_path / "a", partial(body, on_failure="restart", faults=kill))
    undisturbed = run_hosts(tmp_path / "b", body)
    assert [host.status for host in disturbed] == [0, 0], disturbed[0].said
    assert disturbed[0].result["samples"] == EPOCHS * SAMPLES
    for name, value in undisturbed[0].result["weights"].items():
        found = disturbed[0].result["weights"][name]  # in that round each row came by itself
        torch.testing.assert_close(found, value, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "async"}, "strategy=hybrid"),
        ({"exchange": {"name": "gradient", "compress": "int8"}}, "strategy=hybrid"),
        ({"on_failure": "continue"}, "on_failure=restart"),
        ({"record": "r"}, "record=null"),
    ],
)
def test_sums_are_refused_where_each_gradient_is_needed(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    body = partial(refusal, host_sums=True, **options)
    (host,) = run_hosts(tmp_path, body, n_hosts=1)
    assert "host_sums was given" in host.result and reason in host.result, host.said


def refusal(**options: Any) -> str:
    with pytest.raises(UserError) as error:
        train(2, 2, **options)
    return str(error.value)
