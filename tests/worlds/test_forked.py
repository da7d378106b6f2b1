"""User code of a worker forks: only the process that was started as the worker speaks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hybridtrain.engine.monitoring.hang_detector import Doing
from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds.process_world import ProcessWorld


def raise_error(client: Client) -> None:
    raise ValueError("in the fork")


def leave(client: Client) -> None:
    sys.exit(3)


def leave_with_words(client: Client) -> None:
    sys.exit("some words")


def speak(client: Client) -> None:
    client.gather("from the fork", 1)


def listen(client: Client) -> None:
    client.line.receive()


def beat_and_return(client: Client) -> None:
    client.heartbeat.fail()
    client.heartbeat.beat(Doing.STEP)


CHILDREN: list[tuple[Callable[[Client], None], int, str]] = [
    (raise_error, 1, "ValueError: in the fork"),
    (leave, 3, ""),
    (leave_with_words, 1, "some words"),
    (speak, 1, "was forked from a worker"),
    (listen, 1, "was forked from a worker"),
    (beat_and_return, 1, "was forked from a worker"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("child", "status", "said"), CHILDREN)
def test_a_child_ends_by_itself_and_the_worker_goes_on(
    capfd: pytest.CaptureFixture[str], child: Callable[[Client], None], status: int, said: str
) -> None:
    def body(client: Client) -> Any:
        client.gather("before", None)
        if client.worker == 1:
            if (pid := os.fork()) == 0:
                return child(client)
            client.gather("after", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return client.heartbeat.begun(Doing.STEP)
        return client.gather("after", None)

    world = ProcessWorld(ParameterServer(WaitForAll(), 2), 2)
    assert world.run(body) == [[None, status], 0]
    assert said in capfd.readouterr().err
