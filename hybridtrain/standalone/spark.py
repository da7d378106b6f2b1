"""DeepDist on a Spark RDD: executors compute gradients, the server stays in the driver.

Theory of operation. An epoch is one plain Spark job over the partitions. Each attempt of a task
has a TLS connection to the driver (the *line*), and gets one of the server's workers there, a
thread (the *slot*). It reads the parameters, hands over updates, and is told whether each counts.
An update has the key (epoch, partition, portion, number): the first attempt that hands it over
counts, be it tried again or speculated, and an attempt begins behind the portions that are done.
Spark's Python processes compute one task after the other, so each keeps its line and its model for
the next one. Both ends know the parameters that were read last, and only rows that have changed
since travel.

On the wire: after the greeting of :mod:`hybridtrain.hosts.door` JSON of at most 64 KiB, each
followed by as many bytes of arrays as it says, which is never more than the parameters have.
"""

from __future__ import annotations

import gc
import ssl
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isgenerator
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridtrain.engine.exchanges import begin_policy
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.errors import UserError
from hybridtrain.hosts import sockets
from hybridtrain.hosts.door import ConnectionRefused, Door, hear, knock, say, until_let_in
from hybridtrain.hosts.key import Key
from hybridtrain.standalone.model import Model, in_rows
from hybridtrain.standalone.server import Server
from hybridtrain.standalone.worker import Worker
from hybridtrain.util.option_types import Positive, as_typed, check, shown

PATIENCE_S = 20.0  # of an executor that the driver does not answer
_DENSE, _ABSENT = -1, -2  # in place of the number of rows

# A parameter as it is sent: all of it, some rows (their numbers, their values), or nothing.
Part = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def rdd_of(data: Any) -> Any:
    """The RDD that was given, or that of a data frame; ``None``: it is not Spark's.

    Raises:
        UserError: if it is of Spark Connect, which has no RDDs, or its context has been stopped.
    """
    module = type(data).__module__
    if not module.startswith("pyspark."):
        return None
    if module.startswith("pyspark.sql.connect"):
        raise UserError(
            f"data={shown(data)} was given, a data frame of Spark Connect, which has no RDDs; make "
            'the session by SparkSession.builder.master("…"), or let df.mapInArrow compute what '
            "Connect is to compute"
        )
    rdd = data if hasattr(data, "mapPartitions") else getattr(data, "rdd", None)
    if rdd is None:
        raise UserError(f"data={shown(data)} was given; of Spark, give an RDD or a data frame")
    if rdd.context._jsc is None:
        raise UserError("data was given, whose Spark context has been stopped; make another one")
    return rdd


# ---- the driver ---------------------------------------------------------------------------------


@dataclass
class PartitionProgress:
    """How far the updates of a partition count: portions that are done, updates of the next."""

    portion: int = 0
    updates: int = 0

    def takes(self, portion: int, update: int) -> bool:
        """Whether an update is the next one, and counted from now on."""
        if (portion, update) != (self.portion, self.updates):
            return False
        self.updates += 1
        return True

    def ends(self, portion: int) -> None:
        """An attempt has handed over all updates of the portion."""
        if portion == self.portion:
            self.portion, self.updates = portion + 1, 0


class _Ended(Exception):
    """The connection of an attempt is over: its executor is lost."""


class Desk(Door):
    """Lets attempts in, which wait there for a slot.

    Args:
        address, port: to listen at.
        key: of the run.
        n_slots: how many attempts are served at a time.
    """

    in_use = "give DeepDist another port, or none"
    elsewhere = "set spark.driver.bindAddress, or spark.driver.host, to one of this machine"

    def __init__(self, address: str, port: int, key: Key, n_slots: int) -> None:
        self._slots, self._over = n_slots, False
        self._came: SimpleQueue[tuple[_SparkLine, tuple[int, int]] | None] = SimpleQueue()
        self._lines: set[_SparkLine] = set()
        self._progress = defaultdict[tuple[int, int], PartitionProgress](PartitionProgress)
        super().__init__(address, port, key, {})

    def _misfit(self, said: dict[str, Any]) -> str | None:
        if self._over:
            return "training has failed"
        right = all(type(said.get(name)) is int for name in ("epoch", "partition"))
        return None if right else "its greeting is damaged"

    def _keep(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        if self._over:
            raise ConnectionRefused("training has failed")
        sock.settimeout(None)
        sockets.set_options(sock, sockets.ROWS_TIMEOUT_S)
        line = _SparkLine(sock)
        self._lines.add(line)
        self._came.put((line, (said["epoch"], said["partition"])))

    def close(self) -> None:
        """Turn all away, and let the slots end."""
        super().close()
        self._end_all()
        for _ in range(self._slots):
            self._came.put(None)

    def _end_all(self) -> None:
        with self._lock:
            self._over = True
            for line in self._lines:
                sockets.shut(line.sock)

    def _drop(self, line: _SparkLine) -> None:
        with self._lock:
            self._lines.discard(line)
        line.sock.close()

    def serve(self, worker: Worker, fail: Callable[[], object]) -> None:
        """The body of a slot: serve one attempt after the other.

        Args:
            fail: is called if an update cannot be taken, before its exception goes on.
        """
        while (came := self._came.get()) is not None:
            line, key = came
            try:
                self._talk(line, self._progress[key], worker)
            except _Ended:
                self._drop(line)
            except BaseException:
                self._end_all()
                self._drop(line)
                fail()
                raise
            else:
                threading.Thread(target=self._await, args=(line,), daemon=True).start()

    def _await(self, line: _SparkLine) -> None:
        """Wait for the next attempt of the same process of an executor."""
        with suppress(_Ended):
            said = line.hear()
            if self._misfit(said) is None:
                self._came.put((line, (said["epoch"], said["partition"])))
                return
        self._drop(line)

    def _talk(self, line: _SparkLine, progress: PartitionProgress, worker: Worker) -> None:
        line.say({"portion": progress.portion})
        while True:
            said = line.hear()
            match said:
                case {"read": True}:
                    worker.pull()
                    line.send_parameters(worker)
                case {
                    "portion": int(portion),
                    "update": int(n),
                    "sizes": list(sizes),
                    "rows": int(),
                }:
                    gradients = line.gradients(sizes, worker)
                    with self._lock:
                        counts = progress.takes(portion, n)
                    if counts and n:
                        worker.push_more(gradients, said["rows"])
                    elif counts:
                        worker.push(gradients, samples=said["rows"])
                    line.say({"counts": counts})
                case {"ends": int(portion)}:
                    with self._lock:
                        progress.ends(portion)
                case {"done": True}:
                    return
                case _:
                    raise _Ended


class _SparkLine:
    """The driver's side of a connection; all that is wrong with it ends it."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self._seen: list[torch.Tensor] | None = None  # the parameters that were read last

    def say(self, content: dict[str, Any]) -> None:
        with _ending():
            say(self.sock, content)

    def hear(self) -> dict[str, Any]:
        with _ending():
            return hear(self.sock, None)

    def send_parameters(self, worker: Worker) -> None:
        """Send what has changed since they were read last."""
        now = [parameter for _, parameter in worker.parameters]
        if self._seen is None:
            self._seen = [parameter.clone() for parameter in now]
            parts: list[Part] = list(now)
        else:
            parts = [_changed(*pair) for pair in zip(now, self._seen, strict=True)]
            for seen, part in zip(self._seen, parts, strict=True):
                _write(seen, part)
        with _ending():
            _send(self.sock, {}, parts)

    def gradients(self, sizes: list[int], worker: Worker) -> dict[str, Any]:
        """Receive an update: for each parameter so many rows, or all, or nothing."""
        names = [name for name, _ in worker.parameters]
        with _ending():
            room = [torch.empty_like(parameter) for _, parameter in worker.parameters]
            parts = zip(names, _receive(self.sock, sizes, room), strict=True)
            return {name: part for name, part in parts if part is not None}


def _changed(now: torch.Tensor, seen: torch.Tensor) -> Part:
    """The rows that differ in a bit; the whole where they are many."""
    if now.dim() < 2 or not now.numel():
        return now
    one, other = (each.reshape(len(each), -1).view(torch.uint8).numpy() for each in (now, seen))
    wide = np.int64 if one.shape[1] % 8 == 0 else np.uint8  # compares in half of torch's time
    numbers = torch.from_numpy((one.view(wide) != other.view(wide)).any(1).nonzero()[0])
    return (numbers, now[numbers]) if len(numbers) < len(now) // 2 else now


@contextmanager
def _ending() -> Iterator[None]:
    """End the attempt if its connection fails inside."""
    try:
        yield
    except (OSError, ConnectionRefused, ValueError, TypeError) as error:
        raise _Ended from error


def train_on(
    rdd: Any, server: Server, errand: Errand, epochs: int, n_slots: int, port: int, **other: Any
) -> None:
    """Train on an RDD; ``errand``: as far as it is known.

    Raises:
        UserError: if the strategy makes workers wait for one another, an update does not fit, or
            executors do not reach this process.
    """
    check("epochs", epochs, Positive)
    check("partition_size", errand.size, Positive | None)
    _check(server, n_slots, other)
    context = rdd.context
    settings, tag = context.getConf(), f"hybridtrain-{uuid.uuid4()}"
    here = settings.get("spark.driver.host", "localhost")
    key = Key.new()
    desk = Desk(settings.get("spark.driver.bindAddress", here), port, key, n_slots)
    model = context.broadcast(errand.model)  # a process of an executor unpickles it once
    errand = replace(errand, model=model, run=tag, address=here, port=desk.port, key=key)
    to_stderr(f"executors hand over to {here}, port {desk.port}")

    def jobs() -> None:
        with closing(desk):
            context.addJobTag(tag)
            try:
                for epoch in range(epochs):
                    rdd.foreachPartition(partial(attempt, replace(errand, epoch=epoch)))
            finally:
                context.removeJobTag(tag)
                model.destroy()

    body = partial(desk.serve, fail=partial(context.cancelJobsWithTag, tag))
    try:
        server.run_beside(body, n_slots, jobs)
    except Exception as error:
        if (said := _said_in(str(error))) is None or isinstance(error, UserError):
            raise
        raise UserError(said) from error


def _check(server: Server, n_slots: int, other: Mapping[str, Any]) -> None:
    for name in other:
        raise UserError(f"{name} was given with data of Spark, where it has no meaning")
    wants = begin_policy(deepcopy(server.policy), server.exchange, n_slots)
    goes_on = wants.free or (wants.holds and not wants.drops_late)
    if not goes_on or wants.whole_rounds or wants.parameters != "copy":
        raise UserError(
            f"policy={as_typed(server.policy)}, exchange={as_typed(server.exchange)} was given "
            "with data of Spark, whose tasks come and go, so none may wait for another, and what "
            "is dropped is not computed again; use policy=async, k_batch_async or softsync"
        )
    if server.recording is not None:
        raise UserError(
            f"record={server.recording.place} was given with data of Spark, whose tasks cannot be "
            "repeated; leave it out"
        )


def _said_in(text: str) -> str | None:
    """The message for the user within Spark's report of a task's failure."""
    _, begins, said = text.partition("hybridtrain.errors.UserError: ")
    if begins:
        return said.partition("\n")[0]
    if "No module named 'hybridtrain" in text:
        return "executors cannot import hybridtrain; install it on all hosts of the cluster"
    return None


# ---- an executor --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errand:
    """The arguments of a task: where the driver is, and what to compute.

    ``model``: for a task that of Spark's broadcast.
    """

    model: Any
    gradient: Callable[[Any, Any], Any]
    size: int | None
    epoch: int = 0
    run: str = ""
    address: str = ""
    port: int = 0
    key: Key | None = None


class _Kept(NamedTuple):
    """The executor's side of a line: its model, and the parameters that were read last."""

    run: str
    sock: ssl.SSLSocket
    model: Model
    seen: list[torch.Tensor]


_idle: list[_Kept] = []  # between tasks of this process


def attempt(errand: Errand, rows: Iterable[Any]) -> None:
    """An attempt of a task: compute the updates of a partition, and hand them over.

    Raises:
        UserError: if the driver is not reached, or an update does not fit the model.
    """
    from pyspark import TaskContext

    if not gc.get_freeze_count():
        gc.freeze()  # Spark collects garbage after each task, and torch has many objects: 150 ms
    task = TaskContext.get()
    assert task is not None, "Spark runs it in a task"
    partition = task.partitionId()
    who = f"task {task.taskAttemptId()} (partition {partition}, attempt {task.attemptNumber()})"
    line = _line(errand, {"epoch": errand.epoch, "partition": partition}, who)
    try:
        _compute(line, errand, rows, f"{who}, epoch {errand.epoch}")
        say(line.sock, {"done": True})
    except BaseException:
        line.sock.close()
        raise
    _idle.append(line)


def _line(errand: Errand, said: dict[str, int], who: str) -> _Kept:
    """The line of the task before, or a new one."""
    with suppress(IndexError):
        while True:
            line = _idle.pop()
            if line.run == errand.run:
                say(line.sock, said)
                return line
            line.sock.close()
    where = f"the driver at {errand.address}, port {errand.port},"
    assert errand.key is not None, "the driver has filled it in"
    context = errand.key.context(server_side=False)
    sock, _ = until_let_in(
        lambda within_s: knock(errand.address, errand.port, context, said, within_s),
        where,
        who,
        PATIENCE_S,
        "set spark.driver.host to an address of the driver that executors reach, and if a "
        "firewall is between, open a port and give it as DeepDist(port=...)",
    )
    sock.settimeout(None)
    sockets.set_options(sock, sockets.ROWS_TIMEOUT_S)
    model = Model(errand.model.value).apart()
    return _Kept(errand.run, sock, model, [p.detach().clone() for _, p in model.named])


def _compute(line: _Kept, errand: Errand, rows: Iterable[Any], who: str) -> None:
    sock, model = line.sock, line.model
    done = hear(sock, None)["portion"]
    for number, portion in enumerate(_portions(rows, errand.size)):
        if number < done:
            continue
        say(sock, {"read": True})
        parts = _receive(sock, hear(sock, None)["sizes"], line.seen)
        for seen, (_, parameter), part in zip(line.seen, model.named, parts, strict=True):
            _write(seen, part)
            parameter.data.copy_(seen)
        model.clear_gradients()
        made, n = errand.gradient(model.visible, portion), 0
        for update in made if isgenerator(made) else (made,):
            if update is None:
                continue
            try:
                model.set_gradients(update)
            except UserError as error:
                raise UserError(f"{who}, portion {number}: {error}") from None
            about = {"portion": number, "update": n, "rows": len(portion)}
            _send(sock, about, [_part(parameter.grad) for _, parameter in model.named])
            hear(sock, None)
            n += 1
        say(sock, {"ends": number})


def _portions(rows: Iterable[Any], size: int | None) -> Iterator[list[Any]]:
    """Lists of so many rows, or all in one; none of nothing."""
    source = iter(rows)
    while portion := list(islice(source, size)):
        yield portion


def _part(gradient: torch.Tensor | None) -> Part:
    return in_rows(gradient) if gradient is not None and gradient.is_sparse else gradient


# ---- both ---------------------------------------------------------------------------------------


def _send(sock: ssl.SSLSocket, about: dict[str, Any], parts: Sequence[Part]) -> None:
    sizes, arrays = [], list[torch.Tensor]()
    for part in parts:
        rows = isinstance(part, tuple)
        sizes.append(_ABSENT if part is None else len(part[0]) if rows else _DENSE)
        arrays += () if part is None else part if isinstance(part, tuple) else (part,)
    say(sock, {**about, "sizes": sizes})
    for array in arrays:
        if array.numel():
            sock.sendall(_bytes(array.detach().contiguous()))


def _receive(
    sock: ssl.SSLSocket, sizes: Sequence[int], places: Sequence[torch.Tensor]
) -> Iterator[Part]:
    """A part for each of the places, into which a whole one is written."""
    for place, size in zip(places, sizes, strict=True):
        if size in (_ABSENT, _DENSE):
            yield None if size == _ABSENT else _filled(sock, place)
        elif not 0 <= size <= len(place):
            raise ValueError(size)
        else:
            numbers = _filled(sock, torch.empty(size, dtype=torch.int64))
            yield numbers, _filled(sock, place.new_empty(size, *place.shape[1:]))


def _write(place: torch.Tensor, part: Part) -> None:
    if isinstance(part, tuple):
        place[part[0]] = part[1]
    elif part is not None and part is not place:
        place.copy_(part)


def _filled(sock: ssl.SSLSocket, array: torch.Tensor) -> torch.Tensor:
    """The array with what comes."""
    whole = array.contiguous()  # itself, as a rule
    if array.numel():
        sockets.read_exactly(sock, _bytes(whole))
    return array if whole is array else array.copy_(whole)


def _bytes(array: torch.Tensor) -> memoryview:
    numbers: Any = array.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
