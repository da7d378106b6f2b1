"""DeepDist on a Spark RDD: executors compute gradients, the server stays in the driver.

Theory of operation. An epoch is one plain Spark job over the partitions. Each attempt of a task
opens a TLS connection to the driver, and gets one of the server's workers there, a thread (the
*slot*). It reads the parameters, hands over updates, and is told whether each counts. An update has
the key (epoch, partition, portion, number): the first attempt that hands it over counts, be it
tried again or speculated, and an attempt begins behind the portions that are done.

On the wire: after the greeting of :mod:`hybridtrain.worlds.hosts.door` JSON of at most 64 KiB, each
followed by as many bytes of arrays as it says, which is never more than the parameters have.
"""

from __future__ import annotations

import gc
import ssl
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isgenerator
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import combine
from hybridtrain.monitoring.watchdog import to_stderr
from hybridtrain.training.model import Model
from hybridtrain.training.server import Server
from hybridtrain.training.worker import Worker
from hybridtrain.util.option_types import Positive, check, shown
from hybridtrain.worlds.hosts import sockets
from hybridtrain.worlds.hosts.door import Door, Refused, hear, knock, say, until_let_in
from hybridtrain.worlds.hosts.key import Key

PATIENCE_S = 20.0  # of an executor that the driver does not answer
_DENSE, _ABSENT = -1, -2  # in place of the number of rows


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
class Place:
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
    """The connection of an attempt is over: it is done, or its executor is lost."""


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
        self._came: SimpleQueue[tuple[ssl.SSLSocket, tuple[int, int]] | None] = SimpleQueue()
        self._talking: set[ssl.SSLSocket] = set()
        self._places: defaultdict[tuple[int, int], Place] = defaultdict(Place)
        super().__init__(address, port, key, {})

    def _misfit(self, said: dict[str, Any]) -> str | None:
        if self._over:
            return "training has failed"
        right = all(type(said.get(name)) is int for name in ("epoch", "partition"))
        return None if right else "its greeting is damaged"

    def _keep(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        if self._over:
            raise Refused("training has failed")
        sock.settimeout(None)
        sockets.set_options(sock, sockets.ROWS_TIMEOUT_S)
        self._talking.add(sock)
        self._came.put((sock, (said["epoch"], said["partition"])))

    def close(self) -> None:
        """Turn all away, and let the slots end."""
        super().close()
        self._end_all()
        for _ in range(self._slots):
            self._came.put(None)

    def _end_all(self) -> None:
        with self._lock:
            self._over = True
            for sock in self._talking:
                sockets.shut(sock)

    def serve(self, worker: Worker, fail: Callable[[], object]) -> None:
        """The body of a slot: serve one attempt after the other.

        Args:
            fail: is called if an update cannot be taken, before its exception goes on.
        """
        while (came := self._came.get()) is not None:
            sock, key = came
            try:
                self._talk(_Attempt(sock, worker), self._places[key], worker)
            except _Ended:
                pass
            except BaseException:
                self._end_all()
                fail()
                raise
            finally:
                with self._lock:
                    self._talking.discard(sock)
                sock.close()

    def _talk(self, attempt: _Attempt, place: Place, worker: Worker) -> None:
        attempt.say({"portion": place.portion})
        while True:
            said = attempt.hear()
            match said:
                case {"read": True}:
                    worker.pull()
                    attempt.send_parameters()
                case {"portion": int(portion), "update": int(n), "sizes": list(sizes)}:
                    gradients = attempt.gradients(sizes)
                    with self._lock:
                        counts = place.takes(portion, n)
                    if counts:
                        worker.push(gradients, samples=said.get("rows"))
                    attempt.say({"counts": counts})
                case {"ends": int(portion)}:
                    with self._lock:
                        place.ends(portion)
                case _:
                    raise _Ended


class _Attempt:
    """The driver's side of a connection; all that is wrong with it ends it."""

    def __init__(self, sock: ssl.SSLSocket, worker: Worker) -> None:
        self._sock, self._worker = sock, worker

    def say(self, content: dict[str, Any]) -> None:
        with _ending():
            say(self._sock, content)

    def hear(self) -> dict[str, Any]:
        with _ending():
            return hear(self._sock, None)

    def send_parameters(self) -> None:
        with _ending():
            _send(self._sock, (parameter for _, parameter in self._worker.parameters))

    def gradients(self, sizes: list[int]) -> dict[str, Any]:
        """Receive an update: for each parameter so many rows, or all, or nothing."""
        found: dict[str, Any] = {}
        with _ending():
            for (name, parameter), size in zip(self._worker.parameters, sizes, strict=True):
                if size == _DENSE:
                    (found[name],) = _receive(self._sock, [torch.empty_like(parameter)])
                elif size != _ABSENT:
                    if not 0 <= size <= len(parameter):
                        raise ValueError(size)
                    numbers = torch.empty(size, dtype=torch.int64)
                    rows = parameter.new_empty(size, *parameter.shape[1:])
                    found[name] = tuple(_receive(self._sock, [numbers, rows]))
        return found


@contextmanager
def _ending() -> Iterator[None]:
    """End the attempt if its connection fails inside."""
    try:
        yield
    except (OSError, Refused, ValueError, TypeError) as error:
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
    errand = replace(errand, address=here, port=desk.port, key=key)
    to_stderr(f"executors hand over to {here}, port {desk.port}")

    def jobs() -> None:
        with closing(desk):
            context.addJobTag(tag)
            try:
                for epoch in range(epochs):
                    rdd.foreachPartition(partial(attempt, replace(errand, epoch=epoch)))
            finally:
                context.removeJobTag(tag)

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
    wants = combine(deepcopy(server.policy), server.exchange, n_slots)
    goes_on = wants.free or (wants.holds and not wants.drops_late)
    if not goes_on or wants.whole_rounds or wants.parameters != "copy":
        raise UserError(
            f"policy={server.policy}, exchange={server.exchange} was given with data of Spark, "
            "whose tasks come and go, so none may wait for another, and what is dropped is not "
            "computed again; use policy=async, k_batch_async or softsync"
        )
    if server.recording is not None:
        raise UserError(
            f"record={server.recording.place} was given with data of Spark, whose tasks cannot be "
            "repeated; leave it out"
        )


def _said_in(text: str) -> str | None:
    """The message for the user within Spark's report of a task's failure."""
    for begin in ("hybridtrain.errors.UserError: ", "No module named 'hybridtrain"):
        if begin in text:
            line = text.partition(begin)[2].partition("\n")[0]
            if "module" in begin:
                return "executors cannot import hybridtrain; install it on all hosts of the cluster"
            return line
    return None


# ---- an executor --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errand:
    """The arguments of a task: where the driver is, and what to compute."""

    model: Any
    gradient: Callable[[Any, Any], Any]
    size: int | None
    epoch: int = 0
    address: str = ""
    port: int = 0
    key: Key | None = None


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
    where = f"the driver at {errand.address}, port {errand.port},"
    assert errand.key is not None, "the driver has filled it in"
    context = errand.key.context(server_side=False)
    said = {"epoch": errand.epoch, "partition": partition}
    sock, _ = until_let_in(
        lambda within_s: knock(errand.address, errand.port, context, said, within_s),
        where,
        who,
        PATIENCE_S,
        "set spark.driver.host to an address of the driver that executors reach, and if a "
        "firewall is between, open a port and give it as DeepDist(port=...)",
    )
    with closing(sock):
        sock.settimeout(None)
        sockets.set_options(sock, sockets.ROWS_TIMEOUT_S)
        _compute(sock, errand, rows, f"{who}, epoch {errand.epoch}")


def _compute(sock: ssl.SSLSocket, errand: Errand, rows: Iterable[Any], who: str) -> None:
    model = Model(errand.model)
    done = hear(sock, None)["portion"]
    for number, portion in enumerate(_portions(rows, errand.size)):
        if number < done:
            continue
        say(sock, {"read": True})
        _receive(sock, [parameter.data for _, parameter in model.named])
        made, n = errand.gradient(model.visible, portion), 0
        for update in made if isgenerator(made) else (made,):
            if update is None:
                continue
            try:
                model.set_gradients(update)
            except UserError as error:
                raise UserError(f"{who}, portion {number}: {error}") from None
            about = {"portion": number, "update": n, "rows": 0 if n else len(portion)}
            _hand_over(sock, model, about)
            n += 1
        say(sock, {"ends": number})


def _portions(rows: Iterable[Any], size: int | None) -> Iterator[list[Any]]:
    """Lists of so many rows, or all in one; none of nothing."""
    source = iter(rows)
    while portion := list(islice(source, size)):
        yield portion


def _hand_over(sock: ssl.SSLSocket, model: Model, about: dict[str, Any]) -> None:
    sizes, arrays = [], list[torch.Tensor]()
    for _, parameter in model.named:
        gradient = parameter.grad
        if gradient is None:
            sizes.append(_ABSENT)
        elif gradient.is_sparse:
            gradient = gradient.coalesce()
            numbers = gradient.indices()[0]
            sizes.append(len(numbers))
            arrays += [numbers, gradient.values()]
        else:
            sizes.append(_DENSE)
            arrays.append(gradient)
    say(sock, {**about, "sizes": sizes})
    _send(sock, arrays)
    hear(sock, None)


# ---- both ---------------------------------------------------------------------------------------


def _send(sock: ssl.SSLSocket, arrays: Iterable[torch.Tensor]) -> None:
    for array in arrays:
        if array.numel():
            sock.sendall(_bytes(array.detach().contiguous()))


def _receive(sock: ssl.SSLSocket, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fill the arrays, which lie in one piece each."""
    for array in arrays:
        if array.numel():
            sockets.read_exactly(sock, _bytes(array))
    return arrays


def _bytes(array: torch.Tensor) -> memoryview:
    numbers: Any = array.reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
