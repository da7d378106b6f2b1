"""What host 0 sends to a host that has come back or comes too late, and how it loses one."""

from __future__ import annotations

from contextlib import closing
from select import select
from types import SimpleNamespace
from typing import Any

import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.messages import Done, Gather, Gone, Shared
from hybridtrain.hosts.connection import HostLost, Listener, dial
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.orders import Over
from hybridtrain.hosts.other_hosts import Hosts, OtherHost, RemoteWorker


class Line:
    """A connection that refuses spans before it has the memory."""

    def __init__(self) -> None:
        self.about = dict[str, Any]()
        self.attached, self.sent = False, list[tuple[Any, Any]]()

    def attach(self, memory: memoryview, may_write: Any) -> None:
        self.attached = True

    def stats(self) -> dict[str, float]:
        return {}

    def receive(self) -> Any:
        raise HostLost("it has ended")

    def close(self) -> None:
        pass

    def send(self, order: Any, spans: Any = ()) -> None:
        assert self.attached or not spans
        self.sent.append(([reply for _, reply in order.replies], list(spans)))


def test_a_host_that_comes_back_gets_rows_once_it_has_the_memory_for_them() -> None:
    layout = Layout.of([("w", torch.zeros(4))])
    store = Store(layout, 2, private_parameters=True)
    line, host = Line(), OtherHost(1, [1], lambda signum: None)
    host.begin(SimpleNamespace(store=store, training=True))  # type: ignore[arg-type]
    host.take(line)  # type: ignore[arg-type]
    store.refresh(1)  # before its host was lost
    host.queue(1, Gone(0, 5))
    host.flush()
    host.queue(1, Shared(store.arena.n_bytes))
    store.refresh(1)
    host.queue(1, Done())
    host.flush()
    assert [type(replies[0]) for replies, _ in line.sent] == [Gone, Shared, Done]
    assert [bool(spans) for _, spans in line.sent] == [False, False, True]


def test_a_lost_hosts_waiting_workers_are_lost_first() -> None:
    """Else the loss of the others would release them, as a meeting then has all that are left."""
    host = OtherHost(1, [2, 3, 4], lambda signum: None)
    host.take(Line())  # type: ignore[arg-type]
    host.workers = {number: RemoteWorker(number, host) for number in host.numbers}
    host.workers[3].ask(Gather("validation", b""))
    assert list(host.listen()) == [(3, True), (2, True), (4, True)]
    assert [host.workers[number].counts for number in host.numbers] == [False, True, False]


def test_a_host_that_comes_when_training_has_ended_gets_its_results() -> None:
    key = Key.new()
    with (
        closing(Listener("127.0.0.1", 0, key, {})) as listener,
        closing(dial("127.0.0.1", listener.port, key, 1, {}, 60.0)) as theirs,
    ):
        Hosts([], 2, 1, list).conclude(Over(["result"]), listener.stop())
        orders: list[Any] = []
        while not orders:
            assert select([theirs], [], [], 60.0)[0]
            orders += theirs.receive()
    assert orders == [Over(["result"])]
