"""The public server: trains arrays or a module with several workers, without Lightning."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch

from hybridtrain.engine import scheme
from hybridtrain.engine.exchanges import Exchange, evaluates, exchange_of
from hybridtrain.engine.memory.limits import available_bytes
from hybridtrain.engine.monitoring.watchdog import SlowReport, to_stderr
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.options.strategy_arguments import (
    DEFAULTS,
    SchemeArguments,
    checked,
    unknown,
)
from hybridtrain.engine.policies import STRATEGIES, make_policy
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.engine.recording.recorder import Stamp
from hybridtrain.engine.recording.replayer import Replayed, Replayer
from hybridtrain.engine.recording.run_description import check_replayable, check_same_data
from hybridtrain.engine.recording.virtual_rerun import Rehearsal
from hybridtrain.engine.recovery.failure_policy import Judge
from hybridtrain.engine.scheme import Scheme, StartOptions
from hybridtrain.engine.server import server as inner
from hybridtrain.engine.updates.factory import check_state_dtype
from hybridtrain.engine.updates.groups import needs_closure
from hybridtrain.engine.updates.named import KNOWN, MEAN, SUM, make_update
from hybridtrain.engine.updates.searches import Searches
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds.cpu_scheduling import one_thread
from hybridtrain.engine.worlds.inherited import Inherited, look_through
from hybridtrain.engine.worlds.signals import Interrupted
from hybridtrain.engine.worlds.threads import Threads
from hybridtrain.errors import UserError
from hybridtrain.standalone.data import as_data
from hybridtrain.standalone.model import Model
from hybridtrain.standalone.saved_run import SavedRun, made_by, states_after_a_step
from hybridtrain.standalone.worker import (
    BodyJob,
    Epochs,
    HowToGoThrough,
    MakeOptimizer,
    Returned,
    Worker,
    in_process,
    work,
)
from hybridtrain.util.option_types import (
    Named,
    Positive,
    as_typed,
    check,
    check_names,
    checked_choice,
    hints,
    name_of,
    shown,
)
from hybridtrain.virtual.service_times import ServiceTimes, Times

_OF_A_WORKER = 32 << 20  # bytes, of a forked process without its model
T = TypeVar("T")
Body = Callable[[Worker], Any]


class Server(Scheme):
    """Trains numpy arrays, torch tensors or a module with several processes.

    ``server = Server({"w": np.zeros(5)}, "async", update={"name": "sgd", "lr": 0.1})``
    ``server.run(body, workers=2, data=x)``

    No process outlives a run, so there is nothing to close.

    Args:
        model: a numpy array or torch tensor, a dict of them, or a ``torch.nn.Module``, in host
            memory. A run writes its result into them.
        strategy: a name of the table of strategies (``"async"``, ``"diloco"``).
        policy: when a gradient counts, in place of the strategy's: a name, a mapping with its name
            and parameters, or an object; see :class:`hybridtrain.HybridStrategy`.
        optimizer: the optimizer that steps the masters, or under an exchange of own parameters
            (``local_sgd``) each worker's: a name of ``torch.optim``, a mapping with its name and
            arguments, or a function that makes one for a list of parameters. If it is left out,
            ``update`` is taken, where that is an optimizer.

    Options ``exchange``, ``update``, ``correction``, ``state_dtype``, ``start_method``,
    ``threads_per_worker``, ``stop_grace_s``, ``on_nonfinite``, ``on_failure``, ``min_workers``,
    ``hang_timeout_s`` and ``record`` mean what they mean for :class:`hybridtrain.HybridStrategy`.

    Raises:
        UserError: if the model, an option or a name is not allowed, naming it.
    """

    def __init__(
        self,
        model: Any,
        strategy: str = "hybrid",
        *,
        policy: Named | None = None,
        optimizer: Named | Callable[..., torch.optim.Optimizer] | None = None,
        **options: Unpack[SchemeArguments],
    ) -> None:
        check_names("strategy=", [strategy], STRATEGIES)
        for name in options:
            if name not in hints(SchemeArguments):
                alien = f"{name} was given, an option of HybridStrategy that has no meaning here"
                raise UserError(alien if name in DEFAULTS else unknown(name, options))
        chosen = {} if policy is None else {"policy": policy}
        given = checked({**parts_of(strategy), **chosen, **options})
        if given["on_failure"] == "restart":
            raise UserError(
                "on_failure=restart was given, but a new process would not know where the loop of "
                "the body was; use on_failure=continue or stop"
            )
        exchange = exchange_of(make_policy(given["policy"]), given["exchange"])  # type: ignore[typeddict-item]
        steps, update = _who_steps(exchange, optimizer, given["update"])
        self.choose_parts({**given, "update": update})
        self._model = Model(model)
        self._make = _maker(steps, self._trained)
        self._model.check_finite(self._model.values, "the model")
        self._n_workers = 1
        self._serving: inner.ParameterServer | None = None  # during a run
        self._past = SavedRun()  # former runs
        self._stats: dict[str, Any] = {}

    @property
    def world_size(self) -> int:
        """The number of workers of the last run."""
        return self._n_workers

    @property
    def model(self) -> Any:
        """The user's model, as the last run has left it; during a run, copies of the masters."""
        server = self._serving  # which another thread may see the end of
        masters = {} if server is None else self._masters(server)
        return self._model.copies(masters) if masters else self._model.given

    def stats(self) -> dict[str, Any]:
        """Updates, samples, throughput, waiting shares, staleness: so far, or of the last run."""
        return self._stats if self._serving is None else self._serving.statistics.stats()

    def save(self, path: str | Path) -> None:
        """Write parameters, buffers, optimizer state, numbers of updates and epochs to a file.

        ``torch.load(path, weights_only=True)`` reads it. During a run a body does so, by
        :meth:`hybridtrain.Worker.save`.

        Raises:
            UserError: during a run, or if it cannot be written.
        """
        if self._serving is not None:
            raise UserError("server.save was called during a run; call worker.save in the body")
        model = self._model = self._model.renewed()
        past = replace(self._past, parameters=model.values, buffers=model.buffers)
        past = replace(past, made_by=self._made_by())
        past.write(path)

    def load(self, path: str | Path) -> None:
        """Take over what :meth:`save` has written: the next run goes on from there.

        Raises:
            UserError: if it cannot be read, or is of another model, optimizer, exchange or update.
        """
        self._model = self._model.renewed()
        model = self._model.values, self._model.buffers
        past = SavedRun.read(path, *model, self._made_by(), self._fresh_states())
        self._model.check_finite(past.parameters, str(path))
        self._past = past
        self._model.take(self._past.parameters)
        self._model.take_buffers(self._past.buffers)

    # ---- runs -----------------------------------------------------------------------------------

    def run(
        self,
        body: Body,
        workers: int = 1,
        data: Any = None,
        on_progress: Callable[[dict[str, Any]], object] | None = None,
        **how: Unpack[HowToGoThrough],
    ) -> list[Any]:
        """Run ``body(worker)`` in so many processes, and serve them; returns their results.

        Args:
            body: computes gradients; see :class:`hybridtrain.Worker`.
            workers: W.
            data: an array, a tuple or dict of arrays of one length, a sequence or data set, an
                iterable (which is read into memory once), or a number of samples; ``None``: the
                body goes by no data of the run's.
            on_progress: is called about once a second with :meth:`stats`.
            **how: ``batch_size`` (32): samples of one mini-batch of one worker; ``epochs`` (1):
                passes over the data; ``seed`` (0): of the order of samples, ``None``: their own;
                ``drop_last`` (False): leave out what is no full mini-batch at the end of an epoch.

        Raises:
            UserError: if an argument is not allowed, or gradients do not fit the model.
            BaseException: of the first body that fails.
        """
        job = self._job(body, workers, data, how)
        _check_number(workers)
        threads = scheme.threads_of_a_worker(self, workers)
        start = StartOptions(scheme.resolve_start_method(self.start_method), threads)
        inherited = _look_through({"body": body, "data": data}, workers, start.method)
        in_update = scheme.threads_of_an_update(self, workers, threads)
        server = self._serving = scheme.serving(self, True, threads, in_update)
        report = _Progress(server.statistics.stats, on_progress)
        judge, own = Judge(self.on_failure), scheme.workers_may_update(self)
        world = scheme.world_of(self, server, judge, start, (), own, report=report)
        try:
            return self._results(world.run(partial(in_process, inherited, job)))
        except Interrupted as interruption:
            if interruption.signum != signal.SIGINT:
                sys.exit(128 + interruption.signum)
            raise KeyboardInterrupt from None
        finally:
            self._conclude(server)

    def replay(
        self,
        record: str | Path,
        body: Body,
        data: Any = None,
        anyway: bool = False,
        **how: Unpack[HowToGoThrough],
    ) -> Replayed:
        """Repeat a recorded run in this process, to the bit.

        Args:
            record: that ``record=`` has written.
            body: as in the run.
            data: as in the run.
            anyway: also if code, versions or data have changed.
            **how: as for :meth:`run`.

        Raises:
            UserError: if something differs from the run, naming it.
        """
        known = read_record(find_record(Path(record)))
        job = self._job(body, known.n_workers, data, how)
        check_replayable(known, self, anyway)
        stamp, threads = Stamp(), int(known.header["server_threads"])
        server = scheme.make_server(self, threads, partial(inner.ParameterServer, clock=stamp))
        replayer = Replayer(known, server, stamp, partial(check_same_data, known, anyway))

        def repeat() -> Replayed:
            report, results = replayer.run(self._bodies(job))
            self._results(results)
            return report

        return self._in_process(server, repeat)

    def simulate(
        self,
        body: Body,
        workers: int = 1,
        data: Any = None,
        times: Times = ServiceTimes(),  # noqa: B008
        times_seed: int = 0,
        **how: Unpack[HowToGoThrough],
    ) -> list[Any]:
        """As :meth:`run`, in this process and in virtual time; :meth:`stats` has its figures.

        Args:
            body: its gradients are computed one after the other.
            workers: W.
            data: as for :meth:`run`.
            times: how long each gradient takes, in virtual seconds.
            times_seed: of their random numbers.
            **how: as for :meth:`run`.
        """
        job = self._job(body, workers, data, how)
        stamp = Stamp()
        server = scheme.make_server(self, 1, partial(inner.ParameterServer, clock=stamp))
        streams = [times.stream(worker, times_seed) for worker in range(workers)]
        rehearsal = Rehearsal(server, stamp, 1, streams)
        bodies = self._bodies(job)
        return self._in_process(server, lambda: self._results(rehearsal.run(bodies)))

    def run_beside(self, body: Body, workers: int, beside: Callable[[], object]) -> None:
        """Run ``body(worker)`` on threads of this process, for gradients that come from elsewhere.

        Args:
            body: as for :meth:`run`.
            workers: W.
            beside: runs meanwhile on this thread, and lets the bodies end.
        """
        job = self._job(body, workers, None, {})
        server = scheme.make_server(self, scheme.usable_cores(), inner.ParameterServer)
        world = Threads(server, workers)
        self._in_process(server, lambda: world.run(self._bodies(job), beside))

    # ---- inside ---------------------------------------------------------------------------------

    def _job(self, body: Body, workers: int, data: Any, how: HowToGoThrough) -> BodyJob:
        """Check all arguments, and pack them for the workers."""
        check("workers", workers, Positive)
        _check_options(how)
        if not callable(body):
            raise UserError(f"body={shown(body)} was given; give a function of a worker")
        self._n_workers, self._model = workers, self._model.renewed()
        self.requirements = scheme.required(self)
        scheme.check_parts(self)
        if self.state_dtype != torch.float32:
            check_state_dtype(self.update.over(self._make(self._trained)))
        if self.requirements.evaluates and (data is None or how.get("drop_last")):
            given = "no data was given" if data is None else "drop_last=True was given"
            raise UserError(
                f"{given} with exchange={as_typed(self.exchange)}, which compares the losses of "
                "passes over the same samples; give run(data=...), and leave drop_last out"
            )
        if data is None and (self.requirements.takes_turns or self.requirements.asks):
            raise UserError(
                f"no data was given with policy={as_typed(self.policy)}, under which a worker may "
                "have to wait before a mini-batch, and without data nobody knows where one begins; "
                "give run(data=...), which may be a number of samples"
            )
        if self.requirements.delay and not isinstance(self._model.given, torch.nn.Module):
            raise UserError(
                f"policy={as_typed(self.policy)} was given with a model of arrays, but workers "
                "read one of two buffers in turn there, and arrays stay in one; give a "
                "torch.nn.Module, or use policy=hybrid"
            )
        if (check_tensors := getattr(self.exchange, "check_tensors", None)) is not None:
            check_tensors(sum(parameter.requires_grad for _, parameter in self._model.named))
        return BodyJob(
            body,
            self._model.given,
            self._make,
            self.requirements,
            self.exchange,
            self.update,
            self.on_fault,
            None if data is None else Epochs(as_data(data), **how),
            self._past,
            self.recording is not None,
            self.on_failure.choice != "stop",
        )

    def _bodies(self, job: BodyJob) -> list[Callable[[Client], Any]]:
        """One for each worker that shares this process, with a model of its own."""
        given = [deepcopy(job.model) for _ in range(self._n_workers)]
        return [partial(work, replace(job, model=each, recorded=True)) for each in given]

    def _results(self, returned: list[Returned | None]) -> list[Any]:
        """List the bodies' results (of lost workers ``None``), and load the leader's buffers."""
        for each in returned:
            if each is not None and each.buffers:
                self._model.take_buffers(each.buffers)
        return [None if each is None else each.result for each in returned]

    def _in_process(self, server: inner.ParameterServer, run: Callable[[], T]) -> T:
        self._serving = server
        try:
            with one_thread():
                return run()
        finally:
            server.close()
            self._conclude(server)

    def _made_by(self) -> dict[str, str]:
        return made_by(self._make(self._trained), self.update, self.exchange)

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [each for _, each in self._model.named if each.requires_grad]

    def _fresh_states(self) -> dict[str, dict[str, Any]] | None:
        """Return the optimizer state of the masters after one update; ``None``: not known."""
        named = {
            name: torch.nn.Parameter(torch.empty_like(each, device="meta"))
            for name, each in self._model.named
            if each.requires_grad
        }
        try:
            optimizer = self._make(list(named.values()))
            own = scheme.required(self).own_state
            return states_after_a_step(self.update.beside(optimizer, own), named)
        except Exception:  # of a function that does more with parameters than to take them
            return None

    def _masters(self, server: inner.ParameterServer) -> dict[str, torch.Tensor]:
        """By name; none before worker 0 has written its parameters."""
        if (store := server.store) is None or not server.training:
            return {}
        return {slot.name: store.master(slot) for slot in store.layout.slots}

    def _conclude(self, server: inner.ParameterServer) -> None:
        """Keep the result of a run, however it has come to an end."""
        self._serving, self._stats = None, server.statistics.stats()
        if (store := server.store) is None or not (masters := self._masters(server)):
            return
        self._model.take(masters)
        states = self._past.optimizer
        if server.failure is None:
            saved, names = server.optimizers.updates[0].state(), list(masters)
            states = {names[number]: state for number, state in saved.parameters.items()}
        n_epochs = max(self._past.epochs, store.n_epochs)
        self._past = SavedRun(server.version, {}, states, n_epochs)


class _Progress(SlowReport):
    """Reports a slow worker once, and the statistics at each look."""

    def __init__(
        self,
        stats: Callable[[], dict[str, Any]],
        tell: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        super().__init__(stats, to_stderr)
        self._tell, self._now = tell, stats

    def look(self, *least_s: float) -> None:
        super().look(*least_s)
        if self._tell is not None:
            self._tell(self._now())


def _look_through(parts: dict[str, Any], workers: int, start_method: str) -> Inherited:
    """Look at what workers inherit; warn of what they cannot use."""
    found = look_through(parts, parts, workers, start_method == "fork")
    for line in found.lines:
        warnings.warn(line, stacklevel=3)
    return found


def _check_number(workers: int) -> None:
    """Raises ``UserError`` if the machine has no memory for so many processes."""
    there = available_bytes()
    if there is not None and workers * _OF_A_WORKER > there:
        raise UserError(
            f"workers={workers} was given, but {there / 2**30:.1f} GiB of memory are free here, "
            f"and a process takes about {_OF_A_WORKER >> 20} MiB: at most {there // _OF_A_WORKER}; "
            f"give as many as there are cores ({scheme.usable_cores()}), or see server.simulate "
            "for more of them in this process"
        )


# ---- which optimizer steps ----------------------------------------------------------------------


def _who_steps(exchange: Exchange, optimizer: Any, update: Any) -> tuple[Any, Any]:
    """The optimizer of the workers, or of the masters if workers step none; and the update.

    Raises:
        UserError: if there is none.
    """
    if evaluates(exchange):
        if optimizer is not None:
            raise UserError(
                f"optimizer={shown(optimizer)} was given with exchange={as_typed(exchange)}, where "
                'workers step nothing; give update={"name": "lbfgs"} or gradient_descent, or '
                "leave it out"
            )
        return {"name": "sgd", "lr": 1.0}, update  # never steps
    if optimizer is not None:
        return optimizer, update
    if exchange.parameters != "own":
        if name_of(update) in KNOWN:
            return update, None
        if name_of(update) in (MEAN, SUM):
            return {"name": "sgd", "lr": 1.0}, update  # its rate is not used
        make_update(update)  # refuses what there is not
    raise UserError(
        f"no optimizer was given{'' if update is None else f', and update={shown(update)}'}; "
        'give optimizer={"name": "sgd", "lr": 0.1}, or a function that makes one for a list of '
        "parameters"
    )


def _maker(given: Any, parameters: list[torch.nn.Parameter]) -> MakeOptimizer:
    """Makes the optimizer for a list of parameters, such as these.

    Raises:
        UserError: if there is no such name or argument.
    """
    if callable(given):
        return partial(_made_by, given)
    name, options = checked_choice("optimizer", given, KNOWN)
    if issubclass(KNOWN[name], Searches):
        raise UserError(
            f"optimizer={name} was given, which evaluates a whole pass several times; give "
            f'Server(model, "sandblaster", update="{name}"), or another optimizer'
        )
    make = partial(_named, name, options)
    make(parameters or [torch.nn.Parameter(torch.zeros(1))])
    return make


def _named(
    name: str, options: Mapping[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    try:
        return KNOWN[name](parameters, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer={name} with {dict(options)} was given: {error}") from error


def _made_by(
    make: Callable[..., Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    made = make(parameters)
    searches = isinstance(made, Searches)
    if not isinstance(made, torch.optim.Optimizer) or searches or needs_closure(made):
        raise UserError(
            f"optimizer: the function has returned {shown(made)}; it must be a torch.optim."
            "Optimizer that takes one gradient a step"
        )
    return made


def _check_options(how: Mapping[str, Any]) -> None:
    """Raises ``UserError`` if a run has no such option."""
    known = [*hints(HowToGoThrough), "workers", "data", "on_progress"]
    for name in how:
        if name in (*hints(SchemeArguments), "strategy", "policy", "optimizer"):
            raise UserError(f"run has no option {name}; give it to Server(...)")
    check_names("run: ", how, known)
