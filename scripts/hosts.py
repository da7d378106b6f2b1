"""Several hosts on one machine beside Lightning's ``ddp``, by turns: what a step takes.

    python scripts/hosts.py [hosts=2x1,2x2] [models=mlp-100k,mlp-10m,speech-short]
                            [links=free,1gbit]
                            [ways=alone,ddp,hybrid,hybrid:sums,hybrid:int8,diloco]
                            [seconds=4] [repeats=3]

Needs the right to make network namespaces. Each host lives in one of its own, and all are joined by
a bridge: with ``links=1gbit`` (100mbit, ...) a token bucket at both ends of each cable limits what
it carries in each direction, under ``ddp`` (gloo) as under ``hybrid``; ``free`` limits nothing.
With ``loopback`` there are no namespaces: all hosts share the loopback device, whose megabytes are
those of all of them.
``hosts=2x2`` is two hosts with two workers each, one thread each. ``alone``: the same workers
without any exchange. ``pipe_sgd:int8`` encodes rows and parameters alike. Columns: milliseconds of
a step (median of the runs, least to largest), steps per second over those of ``ddp`` (median of the
ratios of a round), megabytes that the busiest host has sent and received for a step, and
milliseconds of a core, of all processes of all hosts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import pytorch_lightning as pl
from benchmarks.jobs.loops import strategy_named, trainer
from benchmarks.jobs.models import MODELS, Trained, loader

from hybridtrain import HybridStrategy
from hybridtrain.cli.quiet import hush_lightning
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.errors import UserError
from hybridtrain.util.arguments import command, options

KNOWN = ("hosts", "models", "links", "ways", "seconds", "repeats")
LIMIT_S = 240.0
PORT = 29533
_JOB = "HYBRIDTRAIN_BENCHMARK_HOST"


# ---- in a process of a host ---------------------------------------------------------------------


class Meter(pl.Callback):
    """Each worker notes time, its CPU time and that of its parent, and its host's traffic."""

    def __init__(self, first: int, last: int, file: str) -> None:
        self.first, self.last, self.file, self.count = first, last, file, 0
        self.began: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count += 1
        if self.count == self.first:
            self.began = seen()
        if self.count == self.last:
            ended, n = seen(), self.last - self.first
            figures = {name: (ended[name] - self.began[name]) / n for name in ended}
            who = f"{os.environ.get('NODE_RANK', 0)}-{os.getpid()}-{os.getppid()}"
            Path(f"{self.file}.{who}").write_text(json.dumps(figures))


def seen() -> dict[str, float]:
    """The clock, and what has been used so far."""
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    own = os.times()
    cable = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
    counts = {way: int((cable / way).read_text()) for way in ("tx_bytes", "rx_bytes")}
    of_parent = sum(map(int, parent[11:13])) / os.sysconf("SC_CLK_TCK")
    return {"s": time.monotonic(), "cpu": own.user + own.system, "parent_cpu": of_parent, **counts}


def be_a_host(job: dict[str, Any]) -> None:
    """Train as one of the hosts."""
    hush_lightning()
    model, way, hosts, workers, steps = job["what"]
    meter = Meter(max(2, steps // 4), steps, job["file"])
    data = loader(model, steps, 1 if way == "alone" else hosts * workers)
    given: dict[str, Any] = {"num_nodes": hosts}
    if way == "alone":
        strategy, workers, given = strategy_named("single"), 1, {}
    elif way == "ddp":
        strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    else:
        name, *more = way.split(":")
        parts = parts_of(name)
        if "sums" in more:
            parts = {**parts, "host_sums": True}
        if codecs := [each for each in more if each != "sums"]:
            exchange = parts.get("exchange", "gradient")
            known = {"name": exchange} if isinstance(exchange, str) else exchange
            parts = {**parts, "exchange": {**known, "compress": codecs[0]}}
        if name == "pipe_sgd":  # the timed steps are behind its warm-up; parameters go as rows do
            down = codecs[0] if codecs else None
            parts = {**parts, "policy": {"name": name, "warm_up": 1, "compress": down}}
        strategy = HybridStrategy(**parts, threads_per_worker=1, hosts_key=job["key"])
    trainer(strategy, workers, meter, **given).fit(Trained(model, None), data)


# ---- hosts and cables ---------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cables(n: int, rate: str) -> Iterator[list[str]]:
    """``n`` namespaces with addresses 10.77.0.1, ..., joined by a bridge; none on loopback."""
    if rate == "loopback":
        yield [""] * n
        return
    tag = f"ht{os.getpid() % 10000}"
    names = [f"{tag}n{host}" for host in range(n)]
    bridge = f"{tag}b"
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "b0", "type", "bridge")
        ip("-n", bridge, "link", "set", "b0", "up")
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip(*f"-n {bridge} link add p{host} type veth peer name e0 netns {name}".split())
            ip(*f"-n {bridge} link set p{host} master b0 up".split())
            ip(*f"-n {name} addr add 10.77.0.{host + 1}/24 dev e0".split())
            ip("-n", name, "link", "set", "e0", "up")
            for space, end in ((name, "e0"), (bridge, f"p{host}")) if rate != "free" else ():
                limit = f"qdisc add dev {end} root tbf rate {rate} burst 256kb latency 20ms"
                subprocess.run(["tc", "-n", space, *limit.split()], check=True)
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def run(names: Sequence[str], model: str, way: str, workers: int, steps: int) -> dict[str, float]:
    """One run on these hosts; what a step has taken."""
    with tempfile.TemporaryDirectory() as folder:
        key, n_hosts = f"{folder}/key", len(names)
        subprocess.run([sys.executable, "-m", "hybridtrain", "key", key], check=True, stdout=-3)
        job = {"what": (model, way, n_hosts, workers, steps), "file": f"{folder}/took", "key": key}
        each = workers if way == "alone" else 1
        started = [_start(name, host, job) for host, name in enumerate(names) for _ in range(each)]
        try:
            for process in started:
                if process.wait(LIMIT_S):
                    raise UserError(f"{way} has failed: {Path(folder, 'log').read_text()[-2000:]}")
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return summed(list(Path(folder).glob("took.*")), way not in ("alone", "ddp"))


def summed(files: Sequence[Path], parents: bool) -> dict[str, float]:
    """The figures of all workers: the mean time, the busiest host's traffic, all CPU time.

    ``parents``: their parents' as well.
    """
    told = {file.name: json.loads(file.read_text()) for file in files}
    once = {name.rpartition("-")[2]: each["parent_cpu"] for name, each in told.items()}
    rows, of_parents = list(told.values()), sum(once.values()) if parents else 0.0
    return {
        "s": statistics.mean(each["s"] for each in rows),
        "cpu": sum(each["cpu"] for each in rows) + of_parents,
        "sent": max(each["tx_bytes"] for each in rows) / 1e6,
        "received": max(each["rx_bytes"] for each in rows) / 1e6,
    }


def _start(name: str, host: int, job: dict[str, Any]) -> subprocess.Popen[bytes]:
    address, device = ("10.77.0.1", "e0") if name else ("127.0.0.1", "lo")
    own = {"NODE_RANK": str(host), "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    own |= {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1", _JOB: json.dumps(job)}
    line = [*(["ip", "netns", "exec", name] if name else []), sys.executable, __file__]
    with (Path(job["file"]).parent / "log").open("ab") as log:
        return subprocess.Popen(
            line, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )


# ---- the table ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is started is ended then, too
    given = options(arguments, KNOWN)
    listed = {
        "hosts": "2x1,2x2",
        "models": "mlp-100k,mlp-10m,speech-short",
        "links": "free,1gbit",
        "ways": "alone,ddp,hybrid,hybrid:sums,hybrid:int8,diloco",
    }
    hosts, models, links, ways = (given.get(x, listed[x]).split(",") for x in listed)
    _check("hosts", hosts, r"\d+x\d+", "2x1, 2x2, ...")
    _check("links", links, r"free|loopback|\d+[kmg]bit", "free, loopback, 100mbit, 1gbit, ...")
    _check("models", models, "|".join(MODELS), ", ".join(MODELS))
    seconds, repeats = float(given.get("seconds", 4)), int(given.get("repeats", 3))
    print("| hosts | link | model | way | ms a step | of ddp | sent, received MB | CPU ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for shape in hosts:
        n_hosts, workers = map(int, shape.split("x"))
        for link in links:
            with cables(n_hosts, link) as names:
                for model in models:
                    row = f"| {shape} | {link} | {model}"
                    _measure(row, names, workers, ways, seconds, repeats)


def _check(key: str, values: Sequence[str], pattern: str, known: str) -> None:
    for value in values:
        if not re.fullmatch(pattern, value):
            raise UserError(f"{key}={value} was given; give {known}")


def _measure(
    row: str, names: Sequence[str], workers: int, ways: Sequence[str], seconds: float, repeats: int
) -> None:
    model = row.rpartition("| ")[2]
    steps = 30 * -(-MODELS[model].steps(seconds) // 30) + 1  # whole movements
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way in ways if turn % 2 == 0 else reversed(ways):
            found[way].append(run(names, model, way, workers, steps))
    for way, runs in found.items():
        times = [1e3 * each["s"] for each in runs]
        ratio = "–"
        if "ddp" in found:
            pairs = zip(found["ddp"], runs, strict=True)
            ratio = f"{statistics.median(ddp['s'] / own['s'] for ddp, own in pairs):.2f}"
        middle = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
        took = f"{statistics.median(times):.1f} ({min(times):.1f}–{max(times):.1f})"
        bytes_ = f"{middle['sent']:.2f}, {middle['received']:.2f}"
        line = f"{row} | {way} | {took} | {ratio} | {bytes_} | {1e3 * middle['cpu']:.0f} |"
        print(line, flush=True)


if __name__ == "__main__":
    if _JOB in os.environ:
        be_a_host(json.loads(os.environ[_JOB]))
    else:
        sys.exit(command(main, __doc__, None))
