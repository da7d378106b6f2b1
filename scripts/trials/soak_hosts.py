"""A long run over several hosts, of which one has trouble every few seconds."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridtrain.hosts import transport
from hybridtrain.hosts.key import Key
from trials.apart import run_apart
from trials.host_faults import (
    LETHAL,
    LOCKSTEP,
    SAMPLES,
    SILENT_S,
    HostProcesses,
    forwarders,
    strike,
    train_on_hosts,
    wait_for,
)

KINDS = ("kill", "kill", "kill", "pause", "hang", "cut", "garbage", "stranger")
_STUCK_S = 180.0  # behind the last fault, or without a new one
_CALM_EPOCHS = 20


@dataclass
class HostSoak:
    """The outcome of one run. ``missing`` and ``twice``: samples, over all epochs."""

    strategy: str
    epochs: int
    faults: dict[str, int] = field(default_factory=dict)
    statuses: list[int | None] = field(default_factory=list)
    missing: int = 0
    twice: int = 0
    weights: str = ""
    as_undisturbed: bool | None = None  # to the bit, in lock-step
    wall_s: float = 0.0
    left: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it is as it must not be."""
        wrong = self.missing or self.twice or self.left or self.as_undisturbed is False
        return bool(self.statuses[:1] != [0] or wrong)


def soak_hosts(
    strategy: str, n_hosts: int, seconds: float, every_s: float, seed: int = 7
) -> HostSoak:
    """One run with faults for so many seconds, and undisturbed to its end.

    Args:
        every_s: between two faults of hosts but the first.
    """
    calm = _soak(HostSoak(strategy, _CALM_EPOCHS), n_hosts, None, seed)
    each_s = calm.wall_s / _CALM_EPOCHS
    epochs = max(_CALM_EPOCHS, int(seconds / (2 * each_s)))
    run = _soak(HostSoak(strategy, epochs), n_hosts, every_s, seed, seconds)
    if strategy in LOCKSTEP:
        calm = _soak(HostSoak(strategy, epochs), n_hosts, None, seed, seconds)
        run.as_undisturbed = run.weights == calm.weights
    return run


def _soak(
    made: HostSoak, n_hosts: int, every_s: float | None, seed: int, seconds: float = 0.0
) -> HostSoak:
    ending = run_apart(
        lambda folder: _run(made, n_hosts, every_s, seed, seconds, folder), 24 * 3600.0
    )
    found: HostSoak = ending.result or made
    found.wall_s, found.left = round(ending.wall_s, 1), ending.left
    found.said = found.said or ending.output[-3000:]
    return found


def _run(
    made: HostSoak, n_hosts: int, every_s: float | None, seed: int, seconds: float, folder: Path
) -> HostSoak:
    transport.SILENT_S = SILENT_S
    Key.new().write(folder / "key")
    rng, faults = random.Random(seed), Counter[str]()
    port, between = forwarders(n_hosts - 1)
    options: dict[str, Any] = {"on_failure": "restart", "max_restarts": None}
    body = partial(train_on_hosts, made.strategy, folder, [], n_hosts, made.epochs, **options)
    hosts = HostProcesses(folder, (port, *(each.port for each in between)), body)
    begun = (folder / "checkpoints").exists  # before, a lost host ends the run
    wait_for(lambda: begun() or hosts.has_ended(0), time.monotonic() + _STUCK_S)
    until = time.monotonic() + seconds
    while (
        every_s is not None
        and time.monotonic() < until
        and not wait_for(lambda: hosts.has_ended(0), time.monotonic() + every_s)
    ):
        kind, host = rng.choice(KINDS), rng.randrange(1, n_hosts)
        faults[kind] += 1
        strike(kind, host, hosts, between[host - 1], port)
        if kind in LETHAL and not hosts.has_ended(0):
            wait_for(lambda which=host: hosts.has_ended(which), time.monotonic() + _STUCK_S)
            hosts.start(host)
    made.statuses = [hosts.wait(0, time.monotonic() + 2 * seconds + _STUCK_S)]
    for host in range(1, n_hosts):
        wait_for(lambda which=host: hosts.has_ended(which), time.monotonic() + 20.0)
        hosts.signal(host, signal.SIGKILL)  # started again too late
        made.statuses.append(hosts.wait(host, time.monotonic() + 20.0))
    found = hosts.result(0)
    more = found.get("samples", 0) - made.epochs * SAMPLES
    made.missing, made.twice = max(0, -more), max(0, more)
    made.weights, made.faults = found.get("weights", ""), dict(faults)
    made.said = "" if made.statuses[0] == 0 else hosts.said(0)[-3000:]
    return made


def told(run: HostSoak) -> str:
    """A line."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(run.faults.items()))
    bits = {None: "", True: ", = bits", False: ", other bits"}[run.as_undisturbed]
    return (
        f"{run.strategy} {run.epochs} epochs, {run.wall_s:.0f} s, {sum(run.faults.values())} faults"
        f" ({kinds}): ended with {run.statuses}, {run.missing} missing, {run.twice} twice, left "
        f"{', '.join(run.left) or 'nothing'}{bits} {run.said}"
    )
