"""Server and DeepDist beside Lightning's loop, and beside DeepDist's first protocol on Spark.

    python scripts/deepdist.py [parts=lightning,lists,spark] [repeats=3] [seconds=3]

``lightning``: seconds of a step of ``Server`` and of Lightning's loop with our strategy, on an MLP
of 100 k parameters. ``lists``: the same of DeepDist over a list and of ``Server`` under ``async``.
``spark``: gradient rows a second on Spark (``local[2]``; needs pyspark and Java), beside pickles
over HTTP, as DeepDist of 2014 has it, rebuilt here: two matrices of 25,000 words, as its word2vec
has them, and updates of 1,000 rows each, which it hands over as whole arrays. It makes one update
of a partition, and so needs 40 tasks; ours takes 4 partitions in portions of 1,000, or the same 40.
By turns, each in a process of its own; ratios of neighbours, the median first. A ratio above 1:
ours is faster. 2 workers with one thread each.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from benchmarks.jobs.loops import lightning, warm_up
from benchmarks.jobs.models import MODELS

from hybridtrain import DeepDist, Server, Worker
from hybridtrain.util.arguments import command, options

MODEL, WORKERS = "mlp-100k", 2
ROWS, WIDTH, PARTITIONS, IN_PARTITION = 25_000, 100, 40, 1_000


# ---- Lightning's loop, a body, two functions ----------------------------------------------------


def of_lightning(strategy: str, seconds: float) -> float:
    return lightning(MODEL, strategy, WORKERS, seconds)


def of_server(strategy: str, seconds: float) -> float:
    """Seconds of a step of worker 0."""
    model = MODELS[MODEL]
    steps = model.steps(seconds)
    torch.manual_seed(0)

    def body(worker: Worker) -> float:
        began, first = 0.0, warm_up(steps)
        for n, (x, y) in enumerate(worker.batches()):
            if n == first:
                began = time.perf_counter()
            worker.model(x, y).backward()
            worker.push()
        return (time.perf_counter() - began) / (n + 1 - first)

    server = Server(
        model.make(),
        strategy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        threads_per_worker=1,
    )
    data = model.samples(steps * WORKERS * model.batch_size)
    return float(server.run(body, WORKERS, data, batch_size=model.batch_size)[0])


def numbers_of(model: Any, rows: Any) -> dict[str, Any]:
    """Least squares of 1,000 features."""
    x = np.stack(rows)
    error = x @ model["w"] - 1
    return {"w": x.T @ error / len(x)}


def of_lists(deepdist: bool, seconds: float) -> float:
    """Seconds of a mini-batch, of all workers."""
    data = list(np.random.default_rng(0).normal(size=(8192, 1000)).astype("f4"))
    model, sgd = {"w": np.zeros((1000, 64), "f4")}, {"name": "sgd", "lr": 1e-3}
    epochs = max(1, round(seconds))

    def body(worker: Worker) -> None:
        for rows in worker.batches():
            worker.push(numbers_of(worker.model, rows))

    began = time.perf_counter()
    if deepdist:
        dd = DeepDist(model, update=sgd, workers=WORKERS, threads_per_worker=1)
        dd.train(data, numbers_of, epochs=epochs, partition_size=32)
    else:
        server = Server(model, "async", update=sgd, threads_per_worker=1)
        server.run(body, WORKERS, data, batch_size=32, epochs=epochs)
    return (time.perf_counter() - began) / (epochs * len(data) / 32)


# ---- on Spark -----------------------------------------------------------------------------------


def rows_of(model: Any, rows: list[int]) -> Any:
    made = np.array(rows) % ROWS, np.ones((len(rows), WIDTH), "f4")
    return {"syn0": made, "syn1": made}


def whole_of(model: Any, rows: list[int]) -> Any:
    """A difference of all vectors, as word2vec of the original hands over."""
    before = {name: vectors.copy() for name, vectors in model.items()}
    for name, (numbers, values) in rows_of(model, rows).items():
        model[name][numbers] += values
    return {name: vectors - before[name] for name, vectors in model.items()}


def add(model: Any, update: Any) -> None:
    for name, part in update.items():
        if isinstance(part, tuple):
            numbers, values = part
            model[name][numbers] += values
        else:
            model[name] += part


class First:
    """The server of 2014: a model as a pickle, made when it is first asked for; updates by POST."""

    def __init__(self, model: Any, descent: Callable[[Any, Any], None]) -> None:
        lock, kept, first = threading.Lock(), list[bytes](), self
        self.served = self.received = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    first.served += 1
                    if not kept:
                        kept.append(pickle.dumps(model, -1))
                    content = kept[0]
                self.answer(content)

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    descent(model, pickle.loads(content))
                    first.received += 1
                    if first.received >= first.served:
                        first.received = first.served = 0
                        kept.clear()
                self.answer(b"OK")

            def answer(self, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def train(self, rdd: Any, gradient: Callable[[Any, Any], Any]) -> None:
        """One epoch."""
        where = f"http://127.0.0.1:{self.server.server_port}"

        def attempt(rows: Iterator[int]) -> None:
            with urllib.request.urlopen(f"{where}/model") as reply:
                model = pickle.loads(reply.read())
            content = pickle.dumps(gradient(model, list(rows)), -1)
            urllib.request.urlopen(f"{where}/update", content).read()

        rdd.foreachPartition(attempt)


def of_spark(how: str, seconds: float) -> float:
    """Seconds for each row of the data."""
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setMaster("local[2]").set("spark.ui.enabled", "false")
    conf = conf.set("spark.ui.showConsoleProgress", "false")
    context = SparkContext(conf=conf.set("spark.driver.host", "127.0.0.1"))
    context.setLogLevel("ERROR")
    model = {name: np.zeros((ROWS, WIDTH), "f4") for name in ("syn0", "syn1")}
    n_partitions = 4 if how == "ours, portions" else PARTITIONS
    rdd = context.parallelize(range(PARTITIONS * IN_PARTITION), n_partitions)
    epochs = max(1, round(seconds))
    gradient = whole_of if how == "the first" else rows_of
    if how.startswith("ours"):
        dd = DeepDist(model, workers=WORKERS)
        dd.train(rdd, gradient, add)
        began = time.perf_counter()
        dd.train(rdd, gradient, add, epochs=epochs, partition_size=IN_PARTITION)
    else:
        first = First(model, add)
        first.train(rdd, gradient)
        began = time.perf_counter()
        for _ in range(epochs):
            first.train(rdd, gradient)
    took_s = time.perf_counter() - began
    assert model["syn1"].sum() == (epochs + 1) * PARTITIONS * IN_PARTITION * WIDTH
    context.stop()
    return took_s / (epochs * PARTITIONS * IN_PARTITION)


# ---- by turns -----------------------------------------------------------------------------------

WAYS: dict[str, Callable[[float], float]] = {
    "Server, hybrid": lambda s: of_server("hybrid", s),
    "Lightning, hybrid": lambda s: of_lightning("hybrid", s),
    "Server, async": lambda s: of_server("async", s),
    "Lightning, async": lambda s: of_lightning("async", s),
    "DeepDist, a list": lambda s: of_lists(True, s),
    "Server, a list": lambda s: of_lists(False, s),
    "Spark, ours": lambda s: of_spark("ours", s),
    "Spark, ours, portions": lambda s: of_spark("ours, portions", s),
    "Spark, the first": lambda s: of_spark("the first", s),
}
PAIRS = {
    "lightning": [("Server, hybrid", "Lightning, hybrid"), ("Server, async", "Lightning, async")],
    "lists": [("DeepDist, a list", "Server, a list")],
    "spark": [
        ("Spark, ours, portions", "Spark, the first"),
        ("Spark, ours", "Spark, the first"),
    ],
}


def measured(way: str, seconds: float) -> float:
    """In a process of its own."""
    said = [sys.executable, __file__, f"way={way}", f"seconds={seconds}"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    known = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            said, cwd=folder, env={**os.environ, **known}, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main(arguments: Sequence[str]) -> int:
    """Print a line for each pair."""
    given = options(arguments, ("parts", "repeats", "seconds", "way"))
    seconds, repeats = float(given.get("seconds", "3")), int(given.get("repeats", "3"))
    if "way" in given:
        print(json.dumps(WAYS[given["way"]](seconds)))
        return 0
    for part in given.get("parts", ",".join(PAIRS)).split(","):
        for ours, other in PAIRS[part]:
            pairs = []
            for n in range(repeats):
                order = (ours, other) if n % 2 == 0 else (other, ours)
                took = {way: measured(way, seconds) for way in order}
                pairs.append((took[ours], took[other]))
            ratios = [b / a for a, b in pairs]
            usual = [statistics.median(each) * 1e6 for each in zip(*pairs, strict=True)]
            print(
                f"{ours} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
                f"{max(ratios):.2f}); {usual[0]:.1f} and {usual[1]:.1f} µs; load "
                f"{os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(command(main, __doc__, None))
