"""What host 0 sends to a host that has come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hybridtrain.memory import Layout, Store
from hybridtrain.protocol.messages import Done, Gone, Shared
from hybridtrain.worlds.hosts.other_hosts import OtherHost


class Line:
    """A connection that refuses spans before it has the memory."""

    def __init__(self) -> None:
        self.about = dict[str, Any]()
        self.attached, self.sent = False, list[tuple[Any, Any]]()

    def attach(self, memory: memoryview, may_write: Any) -> None:
        self.attached = True

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
