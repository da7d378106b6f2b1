"""DeepDist on an RDD: each update counts once, also where tasks fail, are tried again, or race.

Quick ones have an RDD on threads; slow ones have Spark.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain import DeepDist, Server
from hybridtrain.errors import UserError
from hybridtrain.hosts import sockets
from hybridtrain.hosts.door import hear
from hybridtrain.hosts.key import Key
from hybridtrain.standalone import spark

Arrays = dict[str, Any]
ROOT = Path(__file__).parents[2]
_task = threading.local()


class Context:
    """Of Spark, as far as DeepDist looks at it."""

    defaultParallelism, _jsc = 2, True

    def __init__(self) -> None:
        self.cancelled = False

    def broadcast(self, value: Any) -> Any:
        return SimpleNamespace(value=value, destroy=lambda: None)

    def getConf(self) -> dict[str, str]:
        return {"spark.driver.host": "127.0.0.1"}

    def addJobTag(self, tag: str) -> None: ...

    def removeJobTag(self, tag: str) -> None: ...

    def cancelJobsWithTag(self, tag: str) -> None:
        self.cancelled = True


class RDD:
    """Partitions on two threads; a task that fails is tried four times, ``twice`` races itself."""

    def __init__(self, rows: list[Any], n: int, twice: bool = False) -> None:
        self.parts = [rows[i::n] for i in range(n)]
        self.context, self.copies = Context(), 1 + twice

    def mapPartitions(self) -> None: ...

    def foreachPartition(self, compute: Callable[[Iterator[Any]], object]) -> None:
        with ThreadPoolExecutor(2 * self.copies) as pool:
            tasks = [(n, copy) for n in range(len(self.parts)) for copy in range(self.copies)]
            for done in [pool.submit(self._tried, compute, *task) for task in tasks]:
                done.result()

    def _tried(self, compute: Callable[[Iterator[Any]], object], n: int, copy: int) -> None:
        for attempt in range(4):
            _task.numbers = n, 4 * copy + attempt
            try:
                compute(iter(self.parts[n]))
                return
            except Exception:
                if attempt == 3 or self.context.cancelled:
                    raise
        raise AssertionError


RDD.__module__ = "pyspark.core.rdd"


class TaskContext:
    @staticmethod
    def get() -> Any:
        partition, attempt = _task.numbers
        return SimpleNamespace(
            partitionId=lambda: partition,
            attemptNumber=lambda: attempt,
            taskAttemptId=lambda: 10 * partition + attempt,
        )


@pytest.fixture(autouse=True)
def pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pyspark")
    module.TaskContext = TaskContext  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", module)


def add(model: Arrays, update: Arrays) -> None:
    numbers, values = update["t"]
    model["t"][numbers] += values
    model["w"] += update["w"]


def parameters() -> Arrays:
    return {"w": np.zeros(3, "f4"), "t": np.zeros((30, 2)), "unused": np.ones(())}


def sums(model: Arrays, rows: list[int]) -> Arrays:
    model["w"] += 7  # it may change its copy
    return {"w": np.full(3, sum(rows), "f4"), "t": (np.array(rows) % 30, np.ones((len(rows), 2)))}


def one_by_one(model: Arrays, rows: list[int]) -> Iterator[Arrays | None]:
    for row in rows:
        yield None if row == 17 else sums(model, [row])


def is_whole(model: Arrays, epochs: int = 1, without: int = 0) -> None:
    assert model["w"].tolist() == [epochs * (1770.0 - without)] * 3
    assert model["t"].sum() == 2 * epochs * (60 - bool(without)) and model["unused"] == 1


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"min_updates": 4}, {"max_updates": 1}])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", [None, 4])
def test_each_partition_counts_once_an_epoch(options: Any, twice: bool, size: int | None) -> None:
    with DeepDist(parameters(), **options) as dd:
        dd.train(RDD([*range(60)], 5, twice), sums, add, epochs=2, partition_size=size)
    is_whole(dd.model, epochs=2)
    assert dd.stats()["samples"] == 120


def test_elements_of_a_table_travel_as_rows() -> None:
    model = {"t": np.zeros((3, 2)), "w": np.zeros(())}
    update = {"t": torch.eye(3, 2, dtype=torch.float64).to_sparse(), "w": np.ones(())}
    DeepDist(model).train(RDD([1], 1), lambda model, rows: update, add)
    assert model["t"].tolist() == [[1, 0], [0, 1], [0, 0]] and model["w"] == 1


@pytest.mark.slow
def test_an_update_of_many_counts_once_where_tasks_race() -> None:
    with DeepDist(parameters(), workers=4) as dd:
        dd.train(RDD([*range(60)], 5, twice=True), one_by_one, add, partition_size=6)
    is_whole(dd.model, without=17)


@pytest.mark.wide
def test_an_attempt_goes_on_behind_what_has_counted() -> None:
    computed: list[int] = []
    fails = {9, 31, 50}

    def failing(model: Arrays, rows: list[int]) -> Iterator[Arrays]:
        for row in rows:
            if row in fails:
                fails.discard(row)
                raise OSError("of the user")
            computed.append(row)
            yield sums(model, [row])

    with DeepDist(parameters()) as dd:
        dd.train(RDD([*range(60)], 3), failing, add, partition_size=4)
    is_whole(dd.model)
    assert not fails and len(computed) < 72, "whole portions are not computed again"


@pytest.mark.slow
def test_optimizers_step_where_there_is_no_descent() -> None:
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def ones(module: torch.nn.Module, rows: list[int]) -> Any:
        return {name: torch.ones_like(p) for name, p in module.named_parameters()}

    with DeepDist(model, update={"name": "sgd", "lr": 0.5}) as dd:
        dd.train(RDD([*range(8)], 4), ones)
        dd.train(RDD([*range(8)], 4), ones)
    assert torch.allclose(model.weight, before - 4)


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("breaks", "most"), [(False, 2), (True, 6)])
def test_an_executors_process_keeps_its_line_and_survives_its_loss(
    monkeypatch: pytest.MonkeyPatch, breaks: bool, most: int
) -> None:
    knocks, knock, each = [], spark.knock, RDD.foreachPartition

    def counted(*given: Any) -> Any:
        knocks.append(given)
        return knock(*given)

    def broken(rdd: RDD, compute: Callable[[Iterator[Any]], object]) -> None:
        each(rdd, compute)
        for line in spark._idle if breaks else ():
            sockets.shut(line.sock)

    monkeypatch.setattr(spark, "knock", counted)
    monkeypatch.setattr(RDD, "foreachPartition", broken)
    with DeepDist(parameters()) as dd:
        dd.train(RDD([*range(60)], 5), sums, add, epochs=3)
    is_whole(dd.model, epochs=3)
    assert 1 <= len(knocks) <= most


def test_executors_compute_from_the_masters_though_only_changed_rows_travel() -> None:
    seen, masters = list[Arrays](), list[Arrays]()

    def compute(model: Arrays, rows: list[int]) -> Arrays:
        seen.append({name: array.copy() for name, array in model.items()})
        model["t"] -= 3.0
        return sums(model, rows)

    def record(model: Arrays, update: Arrays) -> None:
        masters.append({name: array.copy() for name, array in model.items()})
        add(model, update)

    rdd = RDD([*range(60)], 2)
    DeepDist(parameters(), workers=1).train(rdd, compute, record, partition_size=3)
    assert len(seen) == len(masters) == 20
    for one, other in zip(seen, masters, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_differ_in_a_bit_travel(dtype: torch.dtype) -> None:
    seen = torch.zeros(9, 3, dtype=dtype)
    now = seen.clone()
    now[4, 1], now[7, 0] = -0.0, torch.nan
    numbers, rows = spark._changed(now, seen)
    assert numbers.tolist() == [4, 7] and rows[1, 0].isnan()
    assert len(spark._changed(now, now.clone())[0]) == 0
    assert spark._changed(now + 1, seen).shape == (9, 3), "many travel as a whole"


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"v": np.ones(2)}, r"task \d+ \(partition \d, attempt \d\), epoch 0, portion 0.*'v' was"),
        ({"w": np.ones(2)}, r"partition \d.*gradient of w has the shape \(2,\)"),
        ({"t": (np.array([30]), np.ones((1, 2)))}, r"partition \d.*rows 30 to 30"),
        ({"w": np.array([np.nan, 0, 0])}, "has a gradient that is not finite: w"),
    ],
)
def test_an_update_that_does_not_fit_names_task_partition_and_parameter(
    update: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        DeepDist(parameters()).train(RDD([*range(6)], 3), lambda model, rows: update, add)


def fail(model: Arrays, update: Arrays) -> None:
    raise KeyError("of the user")


@pytest.mark.wide
def test_an_error_in_descent_ends_the_job() -> None:
    rdd = RDD([*range(6)], 3)
    with pytest.raises(KeyError, match="of the user"):
        DeepDist(parameters()).train(rdd, sums, fail)
    assert rdd.context.cancelled


def test_a_port_in_use_is_said_in_the_words_of_deepdist() -> None:
    with sockets.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} .* give DeepDist another port, or none"):
            spark.Desk("127.0.0.1", port, Key.new(), 1)


@pytest.mark.wide
def test_an_executor_that_does_not_reach_the_driver_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spark, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Context, "getConf", lambda self: Settings())
    with pytest.raises(UserError, match=r"driver at 127.0.0.2.*spark.driver.host.*port"):
        DeepDist(parameters()).train(RDD([*range(6)], 1), sums, add)


class Settings(dict[str, str]):
    """The address is not that at which the driver listens."""

    def get(self, name: str, other: Any = None) -> Any:
        return "127.0.0.2" if name == "spark.driver.host" else "127.0.0.1"


@pytest.mark.wide
def test_who_does_not_hold_the_key_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    other, attempt = Key.new(), spark.attempt

    def with_other_key(errand: spark.Errand, rows: Any) -> None:
        attempt(replace(errand, key=other), rows)

    monkeypatch.setattr(spark, "attempt", with_other_key)
    with pytest.raises(UserError, match=r"the driver at 127.*has another key than task"):
        DeepDist(parameters()).train(RDD([*range(6)], 1), sums, add)


def of(module: str, **content: Any) -> Any:
    return type("DataFrame", (), {"__module__": module, **content})()


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (of("pyspark.sql.connect.dataframe"), {}, "of Spark Connect, which has no RDDs"),
        (of("pyspark.sql.column"), {}, "give an RDD or a data frame"),
        (RDD([1], 1), {"policy": "hybrid"}, "was given with data of Spark"),
        (RDD([1], 1), {"policy": "k_async"}, "none may wait for another"),
        (RDD([1], 1), {"policy": {"name": "k_batch_sync", "k": 2}}, "not computed again"),
        (RDD([1], 1), {"record": "x.bin"}, "record=x.bin was given"),
    ],
)
def test_what_does_not_fit_spark_is_refused(data: Any, options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        DeepDist(parameters(), **options).train(data, sums, add)


def test_a_stopped_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "_jsc", None)
    with pytest.raises(UserError, match="has been stopped"):
        DeepDist(parameters()).train(of("pyspark.sql.classic", rdd=RDD([1], 1)), sums, add)


# ---- Spark itself -------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import numpy as np
from pyspark import SparkConf, SparkContext, TaskContext
from hybridtrain import DeepDist, Server
from hybridtrain.errors import UserError

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

def compute(model, rows):
    task = TaskContext.get()
    first = task.attemptNumber() == 0 and task.stageId() == 0
    if first and rows[0] == 40:  # behind a portion that counts
        os.kill(parent(os.getppid()), signal.SIGKILL)  # the executor
    if first and rows[0] == 220:
        time.sleep(600)  # another attempt is begun, and this one killed
    yield {"w": np.full(3, float(sum(rows))), "t": (np.array(rows) % 30, np.ones((len(rows), 2)))}

def add(model, update):
    numbers, values = update["t"]
    model["t"][numbers] += values
    model["w"] += update["w"]

def misfit(model, rows):
    return {"w": np.ones(4)}

settings = {"spark.ui.enabled": "false", "spark.speculation": "true",
            "spark.speculation.interval": "200ms", "spark.speculation.quantile": "0.5",
            "spark.driver.host": "127.0.0.1"}
conf = SparkConf().setMaster(sys.argv[1]).setAll(settings.items())
context = SparkContext(conf=conf)
model = {"w": np.zeros(3), "t": np.zeros((30, 2))}
data = context.parallelize(range(240), 8)
with DeepDist(model, workers=3) as dd:
    dd.train(data, compute, add, epochs=2, partition_size=10)
print(model["w"].tolist(), model["t"].sum(), dd.stats()["samples"])
try:
    DeepDist(model).train(data, misfit, add)
except UserError as error:
    print(error)
context.stop()
try:
    DeepDist(model).train(data, misfit, add)
except UserError as error:
    print(error)
"""


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A master and two workers on hosts of their own, or Spark speculates nothing; its address."""
    command = Path(vars(importlib.import_module("pyspark.find_spark_home"))["_find_spark_home"]())
    started, port = [], sockets.free_port("127.0.0.1")
    address = f"spark://127.0.0.1:{port}"
    master = ["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    limits = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(folder)]
    try:
        for arguments in (
            master,
            *(["worker.Worker", "--host", f"127.0.0.{n}", *limits, address] for n in (2, 3)),
        ):
            name, *rest = arguments
            started.append(
                subprocess.Popen(
                    [command / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *rest],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield address
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_executor_and_a_speculated_task_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    pytest.importorskip("pyspark", reason="needs Spark: pip install pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17")
    given = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    environment = {**os.environ, **given}
    with cluster(tmp_path, environment) as address:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, address],
            capture_output=True,
            env={**environment, "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            text=True,
            timeout=450,
        )
    assert done.returncode == 0, done.stderr
    whole, misfit, stopped = done.stdout.strip().splitlines()
    assert whole == "[57360.0, 57360.0, 57360.0] 960.0 480", done.stderr
    assert "Lost executor" in done.stderr
    assert "gradient of w has the shape (4,)" in misfit and "partition" in misfit
    assert "has been stopped" in stopped


@pytest.mark.parametrize("kind", ["whole", "transposed", "channels_last", "every other"])
def test_arrays_of_any_layout_are_received(kind: str) -> None:
    conv = torch.arange(48.0).view(4, 3, 2, 2)
    sent = {
        "whole": torch.arange(6.0).view(2, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "channels_last": conv.to(memory_format=torch.channels_last),
        "every other": torch.arange(12.0)[::2],
    }[kind]
    place = torch.empty_strided(sent.shape, sent.stride()).fill_(-1.0)
    here, there = socket.socketpair()
    with here, there:
        spark._send(here, {}, [sent + 1])
        (found,) = spark._receive(there, hear(there, None)["sizes"], [place])
    assert found is place and torch.equal(place, sent + 1)


class Executor:
    """Hands over two updates of one portion of 1,000 rows."""

    def __init__(self) -> None:
        about = [{"portion": 0, "update": n, "rows": 1000, "sizes": [-1]} for n in (0, 1)]
        self.said, self.n = iter([*about, {"ends": 0}, {"done": True}]), 0

    def say(self, content: Any) -> None:
        """What is said is not looked at."""

    def hear(self) -> Any:
        return next(self.said)

    def gradients(self, sizes: Any, worker: Any) -> Any:
        self.n += 1
        return {"w": torch.full((1,), 1.0 if self.n == 1 else 101.0)}


def test_all_updates_of_a_portion_weigh_its_rows_which_count_once() -> None:
    policy = {"name": "k_batch_async", "k": 2}
    server = Server({"w": np.zeros(1)}, policy=policy, update={"name": "sgd", "lr": 1.0})
    desk = object.__new__(spark.Desk)
    vars(desk)["_lock"] = threading.Lock()
    body = partial(desk._talk, Executor(), spark.PartitionProgress())  # type: ignore[arg-type]
    server.run_beside(body, 1, lambda: None)
    assert server.model["w"].tolist() == [-51.0] and server.stats()["samples"] == 1000
