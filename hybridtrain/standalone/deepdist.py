"""DeepDist: ``gradient`` in workers, ``descent`` in the server (Neumann 2014).

:class:`~hybridtrain.standalone.data.Data` takes partitions from the data, and the server deals them
to workers; those of Spark are :mod:`hybridtrain.standalone.spark`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isgenerator
from itertools import count
from typing import Any, Self, Unpack

from hybridtrain.engine.options.strategy_arguments import SchemeArguments
from hybridtrain.engine.scheme import usable_cores
from hybridtrain.engine.updates.delay_tolerant import DelayTolerant
from hybridtrain.errors import UserError
from hybridtrain.standalone.data import as_data
from hybridtrain.standalone.model import Model
from hybridtrain.standalone.server import Server
from hybridtrain.standalone.spark import Errand, rdd_of, train_on
from hybridtrain.standalone.worker import Worker
from hybridtrain.util.option_types import Named, Natural, Positive, as_typed, check, shown

Gradient = Callable[[Any, Any], Any]
Step = Callable[[Any, Any], object]
_PARTITIONS = 8  # for each worker, unless their size is given


class DeepDist:
    """Trains a model by two functions, as DeepDist did, on data of this host or of Spark.

    ``with DeepDist(model, workers=4) as dd: dd.train(data, gradient, descent)``

    As in the original it is given to ``with``, which leaves nothing to close.

    Args:
        model: as for :class:`hybridtrain.Server`; :meth:`train` writes its result into it.
        policy: when an update counts: a name, a mapping or an object; by default each at once.
        workers: how many processes compute; ``None``: as many as there are cores.
        min_updates: so many updates are made before workers read the model anew.
        max_updates: no more workers than that have read the model, and not handed an update over.
        port: where executors of Spark reach this process; 0 takes a free one.

    Other options are those of :class:`hybridtrain.Server`; ``update`` is the optimizer that steps
    the model, where there is no ``descent``.

    Raises:
        UserError: if the model or an option is not allowed.
    """

    def __init__(
        self,
        model: Any,
        policy: Named | None = None,
        *,
        workers: int | None = None,
        min_updates: int = 0,
        max_updates: int = 4096,
        port: int = 0,
        **options: Unpack[SchemeArguments],
    ) -> None:
        check("workers", workers, Positive | None)
        check("min_updates", min_updates, Natural)
        check("max_updates", max_updates, Positive)
        check("port", port, Natural)
        if policy is not None and min_updates > 1:
            raise UserError(
                f"min_updates={min_updates} was given with policy={shown(policy)}, and stands for "
                "a policy of its own (k_batch_async); leave one out"
            )
        if policy is None:
            policy = {"name": "k_batch_async", "k": min_updates} if min_updates > 1 else "async"
        self._workers, self._most, self._port = workers, max_updates, port
        self._given, self._options = Model(model), {**options, "policy": policy}
        # With an update the server is there from the start, and keeps its state.
        self._server = None if options.get("update") is None else self._made()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to do: no process outlives a training."""

    def _made(self, **options: Any) -> Server:
        return Server(self._given.given, **{**self._options, **options})

    def _server_for(self, descent: Step | None, key: int) -> Server:
        """The server that is there, if it has an update; else a new one.

        Raises:
            UserError: if neither or both are given, a ``descent`` and an update.
        """
        if descent is not None:
            names = [name for name, p in self._given.named if p.requires_grad]
            made = self._made(optimizer=partial(Descent, key=key, names=names))
            _check(made)
        elif self._server is None or self._options.get("update") is None:
            made = self._made()  # which says that there is no update
        else:
            return self._server
        self._server = made
        return made

    @property
    def model(self) -> Any:
        """The user's model, with the result of the last training."""
        return self._given.given if self._server is None else self._server.model

    def stats(self) -> dict[str, Any]:
        """The figures of the last training; see :meth:`hybridtrain.Server.stats`."""
        return {} if self._server is None else self._server.stats()

    def train(
        self,
        data: Any,
        gradient: Gradient,
        descent: Step | None = None,
        epochs: int = 1,
        partition_size: int | None = None,
        **run: Any,
    ) -> Any:
        """Train; returns the model.

        Args:
            data: as for :meth:`hybridtrain.Server.run`, and workers draw partitions of it; or an
                RDD or data frame of Spark, whose executors compute.
            gradient: ``gradient(model, rows)`` returns an update, or yields several: a mapping of
                names to arrays, dense or sparse; ``None`` abstains. The model is a copy, which it
                may change.
            descent: ``descent(model, update)`` changes the model in place, here, one update after
                the other; ``None``: the optimizer of ``update`` steps.
            epochs: passes over the data.
            partition_size: rows; ``None``: several partitions for each worker, or those of Spark.
            **run: other arguments of :meth:`hybridtrain.Server.run`, with data of this host.

        Raises:
            UserError: if an update does not fit the model, naming worker or task and partition.
        """
        check("partition_size", partition_size, Positive | None)
        if not callable(gradient):
            raise UserError(f"gradient={shown(gradient)} was given; give a function")
        self._given = self._given.renewed()
        rdd = rdd_of(data)
        here = as_data(data) if rdd is None else None
        found = usable_cores() if rdd is None else rdd.context.defaultParallelism
        workers = min(self._workers or found, self._most)
        with _kept(descent, self._given) as key:
            server = self._server_for(descent, key)
            if here is None:
                errand = Errand(self._given.given, gradient, partition_size)
                train_on(rdd, server, errand, epochs, workers, self._port, **run)
                return self.model
            size = partition_size or -(-here.length // (_PARTITIONS * workers))
            body, plan = partial(_compute, gradient), {"batch_size": size, "epochs": epochs, **run}
            server.run(body, workers, here, **plan)
        return self.model


def _check(server: Server) -> None:
    """Raises ``UserError`` if updates would not reach ``descent`` one by one."""
    if server.exchange.parameters != "read" or not server.update.is_users or server.update.merge:
        raise UserError(
            f"descent was given with exchange={as_typed(server.exchange)} and "
            f"update={server.update.name}, but it takes each update as it was made; leave them out"
        )
    if server.correction is not None:
        raise UserError(
            f"descent was given with correction={as_typed(server.correction)}, but it takes each "
            "update as it was made; leave one out"
        )


def _compute(gradient: Gradient, worker: Worker) -> None:
    """The body of a worker."""
    for rows in worker.batches():
        made, handed_over = gradient(worker.copy(), rows), False
        for update in made if isgenerator(made) else (made,):
            worker.keep_buffers()
            worker.push(update)
            handed_over = True
        if not handed_over:
            worker.push(None)


# ---- the user's function as an optimizer of the masters ------------------------------------------
# The server runs in the process that trains, so an optimizer that travels to it from a worker names
# the function by a number.

_DESCENTS: dict[int, tuple[Step, Model]] = {}
_numbers = count()


@contextmanager
def _kept(descent: Step | None, model: Model) -> Iterator[int]:
    """The number of a function, while it is needed."""
    key = next(_numbers)
    if descent is not None:
        _DESCENTS[key] = descent, model.apart()
    try:
        yield key
    finally:
        _DESCENTS.pop(key, None)


class Descent(DelayTolerant):
    """Steps by a function of the user's, with one worker's update at a time.

    Args:
        params: of the model, in the order of ``names``.
        key: the number of the function.
        names: of the parameters.
    """

    sums = True

    def __init__(self, params: Any, key: int, names: Sequence[str]) -> None:
        super().__init__(params, {})
        self.key, self.names = key, list(names)

    def step_late(self, worker: int | None, staleness: int) -> None:
        descent, model = _DESCENTS[self.key]
        parameters = dict(zip(self.names, self.param_groups[0]["params"], strict=True))
        update = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        with model.over(parameters) as seen:
            descent(seen, model.update_of(update))
