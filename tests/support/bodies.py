"""What workers do in the tests of the world. At the top level, so that spawn can import it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.messages import Install, Push, Share
from hybridtrain.engine.updates.serialize import dump
from hybridtrain.engine.worker.client import Client


def number(client: Client) -> int:
    return client.worker


def meet(client: Client) -> list[int]:
    return client.gather("numbers", client.worker**2)


def descend(client: Client, n_steps: int = 3) -> list[float]:
    """Everything a worker does, on f = ½·|w − worker|², with momentum; returns the parameters."""
    w = torch.nn.Parameter(torch.full((20,), 4.0))
    layout = Layout.of([("w", w)])
    store = Store(layout, client.n_workers, False, client.memory.map(Share(layout)))
    (slot,) = layout.slots
    if client.worker == 0:
        store.master(slot).copy_(w.detach())
    client.gather("published", None)
    optimizer = torch.optim.SGD([w], lr=0.25, momentum=0.5)
    client.install(Install((dump(optimizer, {id(w): 0}),) if client.worker == 0 else ()))
    for _ in range(n_steps):
        store.gradient(client.worker, slot).copy_(store.master(slot) - client.worker)
        client.push(Push(0, 1.0))
    client.gather("end", None)
    return store.master(slot).tolist()


def multiply(client: Client) -> float:
    """Enough work that torch runs it in its OpenMP threads."""
    a = torch.ones(400, 400)
    return float((a @ a)[0, 0] + torch.ones(1 << 18).exp_().mean() * 0)


def wait_for_stop(client: Client, folder: Path) -> None:
    """Say who one is, and go on until asked to stop."""
    (folder / f"{client.worker}.pid").write_text(str(os.getpid()))
    while True:
        client.check_stop()
        time.sleep(0.01)


def hang(client: Client, folder: Path) -> None:
    """Say who one is, and never listen."""
    (folder / f"{client.worker}.pid").write_text(str(os.getpid()))
    time.sleep(300)


def die(client: Client, signum: int = signal.SIGKILL) -> None:
    """Worker 1 dies without a word; the others wait for it."""
    if client.worker == 1:
        os.kill(os.getpid(), signum)
    client.gather("never", None)


def inheritable(client: Client) -> list[str]:
    """What a program that is started from a worker would hold open after the run."""
    descend(client)
    found = []
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        try:
            kind, leaks = str(path.readlink()), os.get_inheritable(number)
        except OSError:  # of the listing itself
            continue
        ours = kind.startswith("/memfd:hybridtrain") or "eventfd" in kind
        if leaks and (ours or (kind.startswith("socket:") and number > 2)):
            found.append(kind)
    return found


class Picky(ValueError):
    """Pickles, but cannot be rebuilt from its pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Pickled(Exception):
    """What its pickle makes is up to ``make``."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__("made here")
        self._make = make

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._make, ()


class NoNotes(Exception):
    def add_note(self, note: str) -> None:
        raise TypeError("no notes, please")


def _interrupt() -> None:
    raise KeyboardInterrupt


def fail(client: Client, kind: str) -> object:
    """Worker 1 fails in one of many ways; the others wait for it."""
    if client.worker != 1:
        return client.gather("never", None)
    match kind:
        case "zero":
            return 1 / 0
        case "picky":
            raise Picky("a", "b")
        case "local":

            class LocalError(Exception):
                pass

            raise LocalError("made here")
        case "unpicklable":
            return lambda: None
        case "exit":
            raise SystemExit(0)
        case "generator":
            raise GeneratorExit("of the user")
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        case "local group":
            raise ExceptionGroup("several", [Picky("a", "b")])
        case "ctrl-c":
            raise KeyboardInterrupt
        case "unreadable":
            raise Unreadable
        case "interrupting":
            raise Pickled(_interrupt)
        case "no exception":
            raise Pickled(list)
        case "no notes":
            raise NoNotes("made here")
        case "code 3":
            os._exit(3)
    raise AssertionError(kind)
