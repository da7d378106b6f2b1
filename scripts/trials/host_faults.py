"""One cell of the fault matrix by host: two hosts on this machine, and one thing goes wrong.

Host 1 dials a forwarder, which can cut, slow down and garble. Its first worker (of a checkpoint:
that of host 0, which writes it) says that the phase has come, and waits until the fault is there.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.errors import UserError
from hybridtrain.hosts import transport
from hybridtrain.hosts.connection import dial
from hybridtrain.hosts.key import Key
from trials import work
from trials.apart import run_apart

KINDS = ("kill", "pause", "hang", "cut", "slow", "garbage", "stranger")
PHASES = ("start", "fit", "validation", "checkpoint", "end")
STRATEGIES = ("hybrid", "backup", "ssp", "async", "diloco")
POLICIES = ("stop", "continue", "restart")
LETHAL = ("kill", "hang", "cut", "garbage")  # to host 1
LOCKSTEP = ("hybrid", "diloco")
EPOCHS, SAMPLES, WORKERS = 2, 64, 2  # workers of each host
SILENT_S, PAUSE_S, LIMIT_S = 6.0, 3.0, 120.0
HOME = "127.0.0.1"


@dataclass(frozen=True)
class HostCase:
    """A case to try. Without a kind: nothing goes wrong."""

    strategy: str
    policy: str = "restart"
    kind: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.strategy, self.policy, self.kind, self.phase)))


@dataclass
class HostRow:
    """The outcome. ``statuses``: exit statuses of the hosts; ``None``: it had to be killed."""

    case: HostCase
    statuses: list[int | None] = field(default_factory=list)
    samples: int = 0
    weights: str = ""  # a digest
    detected_s: float | None = None
    wall_s: float = 0.0
    left: list[str] = field(default_factory=list)
    said: str = ""

    def complaints(self, undisturbed: str = "") -> list[str]:
        """List the faults of the outcome; ``undisturbed``: the weights in lock-step."""
        case, found = self.case, list(self.left)
        if None in self.statuses or not self.statuses:
            return [*found, "hung"]
        lethal, ended = case.kind in LETHAL, self.statuses[0] == 0
        may_end = lethal and (case.policy == "stop" or case.phase == "start")
        if not ended and not may_end:
            found.append(f"host 0 ended with {self.statuses[0]}")
        if not ended and may_end and "is lost" not in self.said:
            found.append("no reason")
        if ended and self.samples != EPOCHS * SAMPLES:
            found.append(f"{self.samples} samples in place of {EPOCHS * SAMPLES}")
        if ended and lethal and case.policy == "stop" and case.phase == "fit":
            found.append("it went on")
        if not lethal and self.statuses[1] != 0:
            found.append(f"host 1 ended with {self.statuses[1]}")
        whole = case.strategy in LOCKSTEP and (case.policy != "continue" or not lethal)
        if ended and whole and undisturbed not in ("", self.weights):
            found.append("other weights than undisturbed")
        return found


def host_cases(
    strategies: Sequence[str] = STRATEGIES,
    policies: Sequence[str] = POLICIES,
    kinds: Sequence[str] = KINDS,
    phases: Sequence[str] = PHASES,
) -> list[HostCase]:
    """All of them; ``diloco`` refuses all but ``stop``, for its own steps."""
    return [
        HostCase(strategy, policy, kind, phase)
        for strategy in strategies
        for policy in policies
        if strategy != "diloco" or policy == "stop"
        for kind in kinds
        for phase in phases
    ]


def try_hosts(case: HostCase) -> HostRow:
    """Run it, in processes of its own."""
    ending = run_apart(lambda folder: _trial(case, folder), LIMIT_S + 30.0)
    row: HostRow = ending.result or HostRow(case, said=ending.output[-2000:])
    row.left, row.wall_s = ending.left, round(ending.wall_s, 1)
    return row


# ---- the hosts ----------------------------------------------------------------------------------


class _Phases(pl.Callback):
    """Waits in a phase until the fault is there, once."""

    def __init__(self, case: HostCase, folder: Path) -> None:
        self._case, self._folder = case, folder

    def _reach(self, trainer: Any, phase: str) -> None:
        where = 0 if phase == "checkpoint" else WORKERS
        if phase != self._case.phase or trainer.global_rank != where:
            return
        reached = self._folder / "reached"
        if not reached.exists():
            reached.touch()
            until = time.monotonic() + 30.0
            while not (self._folder / "done").exists() and time.monotonic() < until:
                time.sleep(0.01)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._reach(trainer, "start")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > 2:
            self._reach(trainer, "fit")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._reach(trainer, "validation")

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        self._reach(trainer, "checkpoint")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._reach(trainer, "end")


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = work.network()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        time.sleep(0.005)
        return work.loss_of(self.net, *batch[:2])

    def validation_step(self, batch: Any, _: int) -> None:
        loss = work.loss_of(self.net, *batch[:2])
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=work.LR)


def train_on_hosts(
    strategy: str,
    folder: Path,
    callbacks: Sequence[pl.Callback],
    n_hosts: int = 2,
    epochs: int = EPOCHS,
    **options: Any,
) -> dict[str, Any]:
    """In a host's process: one run; what is left of it."""
    warnings.simplefilter("ignore")
    pl.seed_everything(work.SEED, verbose=False)
    parts = parts_of(strategy) | options | {"hosts_key": str(folder / "key")}
    if strategy == "diloco":
        parts["exchange"] = {"name": "movement", "every": 2}
    made: Any = HybridStrategy(**parts)
    saving = ModelCheckpoint(folder / "checkpoints", save_on_train_epoch_end=True)
    trainer = pl.Trainer(
        strategy=made,
        accelerator="cpu",
        devices=WORKERS,
        num_nodes=n_hosts,
        max_epochs=epochs,
        logger=False,
        callbacks=[saving, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module, data = _Module(), work.numbers(SAMPLES)
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"samples": int(made.run_stats().get("samples", 0)), "weights": digest}


class HostProcesses:
    """The processes of hosts that were forked from this one.

    Args:
        folder: for what they say.
        ports: that each dials; host 0 listens at the first.
        body: of each.
    """

    def __init__(
        self, folder: Path, ports: Sequence[int], body: Callable[[], dict[str, Any]]
    ) -> None:
        self.folder, self._ports, self._body = folder, ports, body
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        for host in range(len(ports)):
            self.start(host)

    def start(self, host: int) -> None:
        """Start the host, also again."""
        sys.stdout.flush()
        self.statuses.pop(host, None)
        if (pid := os.fork()) == 0:
            self._be(host)
        self.pids[host] = pid

    def _be(self, host: int) -> None:
        status = 1
        try:
            out = os.open(self.folder / f"said{host}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in (1, 2):
                os.dup2(out, number)
            sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ |= {"NODE_RANK": str(host), "MASTER_ADDR": HOME}
            os.environ["MASTER_PORT"] = str(self._ports[host])
            torch.set_num_threads(1)
            torch.save(self._body(), self.folder / f"result{host}")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def said(self, host: int) -> str:
        """Return the host's output so far."""
        path = self.folder / f"said{host}"
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self, host: int) -> dict[str, Any]:
        """Return the host's result; empty if there is none."""
        path = self.folder / f"result{host}"
        return torch.load(path, weights_only=True) if path.exists() else {}

    def has_ended(self, host: int) -> bool:
        """Whether its process has ended."""
        if host not in self.statuses:
            pid, status = os.waitpid(self.pids[host], os.WNOHANG)
            if pid:
                self.statuses[host] = os.waitstatus_to_exitcode(status)
        return host in self.statuses

    def wait(self, host: int, until: float) -> int | None:
        """Its exit status; it is killed at that time."""
        if not wait_for(lambda: self.has_ended(host), until):
            self.signal(host, signal.SIGKILL)
            wait_for(lambda: self.has_ended(host), until + 10.0)
            return None
        return self.statuses[host]

    def signal(self, host: int, signum: int) -> None:
        """Send it a signal, if it is there."""
        if not self.has_ended(host):
            os.kill(self.pids[host], signum)


def wait_for(there: Callable[[], bool], until: float) -> bool:
    """Whether it came in time."""
    while not (found := there()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


# ---- what goes wrong ----------------------------------------------------------------------------


class Forwarder:
    """Forwards TCP connections to a port, and may do it badly."""

    def __init__(self, to: int) -> None:
        self._to, self.delay_s, self.garbles = to, 0.0, False
        self._server = socket.create_server((HOME, 0))
        self.port = int(self._server.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection((HOME, self._to))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                time.sleep(self.delay_s)
                if self.garbles:
                    part[-1] ^= 1
                target.sendall(part)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End all connections, as a firewall does."""
        for sock in self._open:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._open.clear()


def strike(kind: str, host: int, hosts: HostProcesses, between: Forwarder, port: int) -> None:
    """Let it go wrong with this host, and be over."""
    until = time.monotonic() + 8 * SILENT_S
    lost = hosts.said(0).count(" is lost: ")
    if kind == "kill":
        hosts.signal(host, signal.SIGKILL)
    elif kind in ("pause", "hang"):
        hosts.signal(host, signal.SIGSTOP)
        if kind == "pause":
            time.sleep(PAUSE_S)
        else:
            wait_for(lambda: hosts.said(0).count(" is lost: ") > lost or hosts.has_ended(0), until)
        hosts.signal(host, signal.SIGCONT)
    elif kind == "cut":
        between.cut()
    elif kind == "slow":
        between.delay_s = 0.01
    elif kind == "garbage":
        between.garbles = True
        wait_for(lambda: hosts.has_ended(host), until)
        between.garbles = False
    elif kind == "stranger":
        _strangers(port)


def _strangers(port: int) -> None:
    """One with another key, one that says anything; the door may be closed."""
    with suppress(UserError):
        dial(HOME, port, Key.new(), 1, {}, 1.0).close()
    with suppress(OSError), socket.create_connection((HOME, port)) as sock:
        sock.sendall(random.Random(0).randbytes(1 << 12))


def forwarders(n: int) -> tuple[int, list[Forwarder]]:
    """A port that nobody listens to, and so many forwarders to it, on other ports."""
    with socket.create_server((HOME, 0)) as server:
        port = int(server.getsockname()[1])
        return port, [Forwarder(port) for _ in range(n)]


def _trial(case: HostCase, folder: Path) -> HostRow:
    transport.SILENT_S = SILENT_S
    Key.new().write(folder / "key")
    (port, [between]), until = forwarders(1), time.monotonic() + LIMIT_S
    phases = _Phases(case, folder)
    hosts = HostProcesses(
        folder,
        (port, between.port),
        lambda: train_on_hosts(case.strategy, folder, [phases], on_failure=case.policy),
    )
    row, again = HostRow(case), False
    reached, ended = folder / "reached", lambda: hosts.has_ended(0)
    if case.kind and wait_for(lambda: reached.exists() or ended(), until):
        began_s, before = time.monotonic(), hosts.said(0).count(" is lost: ")
        watcher = threading.Thread(target=_see, args=(row, hosts, before, began_s), daemon=True)
        watcher.start()
        strike(case.kind, 1, hosts, between, port)
        (folder / "done").touch()
        if case.kind in LETHAL and case.policy == "restart":
            wait_for(lambda: hosts.has_ended(1) or ended(), until)
            again = not ended()
            if again:
                hosts.start(1)
    row.statuses = [hosts.wait(0, until)]
    if again:  # perhaps too late, and waits for a run of the same kind
        hosts.wait(1, time.monotonic() + 3.0)
        hosts.signal(1, signal.SIGKILL)
    row.statuses.append(hosts.wait(1, time.monotonic() + 20.0))
    found = hosts.result(0)
    row.samples, row.weights = found.get("samples", 0), found.get("weights", "")
    row.said = (hosts.said(0) + hosts.said(1))[-4000:]
    return row


def _see(row: HostRow, hosts: HostProcesses, before: int, began_s: float) -> None:
    until = began_s + 8 * SILENT_S
    if wait_for(lambda: hosts.said(0).count(" is lost: ") > before, until):
        row.detected_s = round(time.monotonic() - began_s, 2)


# ---- all of them --------------------------------------------------------------------------------


def try_all(cases: Sequence[HostCase]) -> Iterator[tuple[HostRow, list[str]]]:
    """Each row, and what must not be about it."""
    undisturbed: dict[str, str] = {}
    for case in cases:
        if case.strategy in LOCKSTEP and case.strategy not in undisturbed:
            undisturbed[case.strategy] = try_hosts(HostCase(case.strategy)).weights
        row = try_hosts(case)
        yield row, row.complaints(undisturbed.get(case.strategy, ""))


def told(row: HostRow, complaints: Sequence[str]) -> str:
    """A line."""
    seen = "" if row.detected_s is None else f"known after {row.detected_s:.2f} s"
    found = "; ".join(complaints) or "ok"
    statuses = ", ".join(map(str, row.statuses))
    return f"{row.case!s:40} {statuses:8} {row.wall_s:6.1f} s  {seen:20} {found}"
