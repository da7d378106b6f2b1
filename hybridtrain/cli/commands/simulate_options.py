"""Make a simulation plan from ``name=value`` arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any

from hybridtrain.engine.exchanges import Requirements, make_exchange
from hybridtrain.engine.options.schemes import SCHEMES
from hybridtrain.engine.policies import STRATEGIES, make_policy
from hybridtrain.engine.protocol.messages import Visits
from hybridtrain.engine.recording import service_times
from hybridtrain.engine.recording.observed import Observed, observe
from hybridtrain.engine.updates.named import make_update
from hybridtrain.engine.updates.staleness import make_correction
from hybridtrain.errors import UserError
from hybridtrain.report.timeline import REPORT, place
from hybridtrain.util.arguments import options, part_of, read_value, spelled, split_values
from hybridtrain.util.option_types import (
    Above0,
    Natural,
    NotNegative,
    Positive,
    Range,
    hint,
    is_target,
)
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.script import Script, read_script
from hybridtrain.virtual.service_times import (
    SHAPES,
    Measured,
    ServiceTimes,
    Times,
    read_times,
)
from hybridtrain.virtual.simulations import SimulationPlan, StrategySpec, Train
from hybridtrain.virtual.training_task import MakeOptimizer, Task

FILES = ("json", "html")
MOST_WORKERS, MOST_DIGITS = 10_000, 6  # in all; of a number of hosts or workers
BANDWIDTHS = ("network.bandwidth", "network.server_bandwidth")
_TEXTS = ("strategy", "compute", "from", "script", "correction", "exchange", "update", *FILES)
_Time = Annotated[float, Range(0, open="(", infinite=True)]
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("run", "hosts", *_TEXTS), str),
    **REPORT,
    "workers": Annotated[int, Range(1, MOST_WORKERS)],
    **dict.fromkeys(("batch_size", "mini_batches"), Positive),
    **dict.fromkeys(("data_shards", "data_visit", "epoch"), Positive),
    **dict.fromkeys(("seed", "parameters"), Natural),
    **dict.fromkeys(("compute.shift", "compute.alpha", "compute.sigma"), float),
    **dict.fromkeys(("seconds", "compute.mean_s", "compute.seconds_per_step", "slower"), Above0),
    **dict.fromkeys(BANDWIDTHS, _Time),
    **dict.fromkeys(("network.latency_s", "update_s"), NotNegative),
    **dict.fromkeys(("interrupt", "foresight"), bool),
}
_BRIEF = {f"strategy.{part}": part for part in ("exchange", "update", "correction")}
_BRIEF["strategy.policy"] = "strategy"
SEVERAL = ("strategy", "workers", "hosts", "compute.seconds_per_step")  # values with commas
TRAINING = ("task", "model", "data", "optimizer", "trainer", "experiment")  # as in a training

Given = Mapping[str, Any]


def parse(arguments: Sequence[str]) -> tuple[SimulationPlan, dict[str, Path]]:
    """The plan, and the paths of the files to write: ``json``, ``html`` and ``svg``.

    Raises:
        UserError: naming the option, its valid values, and the closest one.
    """
    overrides = [argument for argument in arguments if _is_training(argument)]
    others = [_brief(argument) for argument in arguments if not _is_training(argument)]
    said = _of_experiment(overrides) | options(others, list(OPTIONS), families=("slower",))
    given = {name: _read(name, text) for name, text in said.items() if text != "null"}
    run = observe(Path(given["run"])) if "run" in given else None
    sizes = [size(text) for text in given.get("hosts", ())]
    given = {**_of_run(run, given), **_of_hosts(sizes, given), **given}
    train = _train(given, overrides)
    workers = given.get("workers", [8])
    plan = SimulationPlan(
        strategies=tuple(map(strategy_spec, given.get("strategy", ["hybrid", "async"]))),
        workers=tuple(workers),
        hosts=tuple(hosts for hosts, _ in sizes) or (1,) * len(workers),
        times=_times(given, _slower(given, workers), run),
        conditions=_conditions(given, bool(overrides)),
        train=train,
        correction=_of_gradients("correction", given, overrides, make_correction),
        exchange=_of_gradients("exchange", given, overrides, make_exchange),
        update=_of_gradients("update", given, overrides, make_update),
        batch_size=given.get("batch_size", 32),
        mini_batches=_length(given, bool(overrides)),
        seconds=given.get("seconds", math.inf),
        seed=given.get("seed", 0),
        epoch=given.get("epoch"),
    )
    files = {name: Path(given[name]) for name in FILES if name in given}
    return plan, files if (svg := place(given)) is None else files | {"svg": svg}


def _is_training(argument: str) -> bool:
    """Whether the argument belongs to the configuration of a training."""
    name = argument.partition("=")[0].lstrip("+~")
    return name.partition(".")[0] in TRAINING


def _brief(argument: str) -> str:
    """``strategy.policy=``, ``strategy.exchange=`` ... as a training takes them, as here."""
    key, separator, value = argument.partition("=")
    return f"{_BRIEF.get(key, key)}{separator}{value}"


def _of_experiment(overrides: Sequence[str]) -> dict[str, str]:
    """The options that ``experiment=NAME`` has under ``simulate``."""
    if not any(override.startswith("experiment=") for override in overrides):
        return {}
    from hybridtrain.cli.virtual_tasks import usual_options  # imports Lightning

    return options(usual_options(overrides), list(OPTIONS), families=("slower",))


def _read(name: str, text: str) -> Any:
    """The value of an option, or its values; raises UserError unless they are of its kind."""
    kind = OPTIONS["slower" if name.startswith("slower.") else name]
    texts = split_values(text) if name in SEVERAL else [text]
    values = [read_value(name, each, kind) for each in texts]
    return values if name in SEVERAL else values[0]


def size(text: str) -> tuple[int, int]:
    """``2x4``: the number of hosts, and of workers on each."""
    # Cut, a longer number is still too large.
    found = fullmatch(r"([0-9]+)x([0-9]+)", text)
    hosts, each = (int(n[:MOST_DIGITS]) for n in found.groups()) if found else (0, 0)
    if not hosts * each:
        raise UserError(
            f"hosts={text} was given; say hosts=HxN, H hosts with N workers each: hosts=2x4"
        )
    if hosts * each > MOST_WORKERS:
        raise UserError(
            f"hosts={text[:60]} was given; at most {MOST_WORKERS:,} workers in all are simulated"
        )
    return hosts, each


def _of_hosts(sizes: Sequence[tuple[int, int]], given: Given) -> Given:
    """Options from the numbers of hosts and of workers on each; given ones take precedence."""
    if sizes and "workers" in given:
        raise UserError(
            f"workers={given['workers'][0]} was given with hosts={given['hosts'][0]}, which says "
            "how many workers there are; leave one of the two out"
        )
    said: dict[str, Any] = {"workers": [hosts * each for hosts, each in sizes]} if sizes else {}
    if sizes and "network.bandwidth" in given:
        said["network.server_bandwidth"] = given["network.bandwidth"]
    return said


# ---- strategies ---------------------------------------------------------------------------------


def strategy_spec(text: str) -> StrategySpec:
    """A strategy with its options: ``backup:k=3``, ``local_sgd:every=32``, ``my.Mine:k=3``.

    Options belong to the policy; of a strategy with an exchange of its own, to the exchange.

    Raises:
        UserError: if there is no such strategy, or it takes no such options.
    """
    given = part_of("strategy", text)
    if is_target(given):
        make_policy(given)
        return StrategySpec(spelled(given), given)
    name, options = (given, {}) if isinstance(given, str) else (given["name"], given)
    if name not in STRATEGIES:
        known = ", ".join(sorted(STRATEGIES))
        raise UserError(f"strategy={text} was given{hint(name, STRATEGIES)}; known are {known}")
    if name not in SCHEMES:
        make_policy(given)
        return StrategySpec(text, given)
    parts = SCHEMES[name]
    own = parts["exchange"]
    exchange = {"name": own} if isinstance(own, str) else dict(own)
    exchange |= {key: value for key, value in options.items() if key != "name"}
    make_exchange(exchange)
    return StrategySpec(text, parts["policy"], exchange, parts.get("update"))


def _of_gradients(
    name: str, given: Given, overrides: Sequence[str], make: Callable[[Any], object]
) -> Any:
    """The specification that ``make`` takes, checked by calling it."""
    if name not in given:
        return None
    if not overrides:
        raise UserError(
            f"{name}={given[name]} was given without task=...; it is about gradients, so "
            "there must be some"
        )
    spec = part_of(name, given[name])
    make(spec)
    return spec


# ---- training -----------------------------------------------------------------------------------


_TASKS_OWN = {
    "run": "mini-batches; give compute=measured from=RUN for the run's times alone",
    "batch_size": "a batch size (data.batch_size=...)",
    "parameters": "a number of parameters",
    "epoch": "epochs",
}


def _train(given: Given, overrides: Sequence[str]) -> Train | None:
    """Makes the task, if one is configured; then gradients are real."""
    if not overrides:
        return None
    for name, own in _TASKS_OWN.items():
        if name in given:
            raise UserError(
                f"{name} was given together with {overrides[0]}; the task itself has {own}"
            )
    from hybridtrain.cli.virtual_tasks import lessons  # imports Lightning

    make = lessons([*overrides, f"seed={given.get('seed', 0)}"])

    def train(workers: int, requirements: Requirements) -> tuple[Task, MakeOptimizer]:
        lesson = make(workers, requirements)
        return lesson, lesson.make_optimizer

    return train


# ---- conditions ---------------------------------------------------------------------------------


def _slower(given: Given, workers: Sequence[int]) -> dict[int, float]:
    """Factor on the service time, by worker."""
    slower: dict[int, float] = {}
    for name, factor in given.items():
        if name.startswith("slower."):
            slower[read_value("slower.W", name.removeprefix("slower."), Natural)] = factor
    name = "compute.seconds_per_step"
    if (times := given.get(name)) is None:
        return slower
    clashes = [other for other in given if other.startswith("slower.") or other == "compute.mean_s"]
    clashes += ["compute=measured"] * (given.get("compute") == "measured")
    if clashes:
        raise UserError(
            f"{name} was given with {clashes[0]}; it says itself how long each worker "
            "takes, so leave one of the two out (NAME=null, if an experiment says it)"
        )
    for n_workers in workers:
        if n_workers != len(times):
            raise UserError(
                f"{name}={times} was given with workers={n_workers}; give a number for each worker"
            )
    return dict(enumerate(times))


def _of_run(run: Observed | None, given: Given) -> Given:
    """Options from a recorded run; given ones take precedence."""
    if run is None:
        return {}
    clashes = [name for name in given if name == "from" or name.startswith("compute")]
    if clashes:
        raise UserError(f"run={given['run']} was given with {clashes[0]}; it brings its own times")
    wrong = [n for n in given if n == "hosts" or n.startswith("network.")] if run.hosts > 1 else []
    if wrong:
        raise UserError(
            f"run={given['run']} was given with {wrong[0]}; that run had {run.hosts} hosts, and "
            "its workers' times have the network in them: give a run of one host"
        )
    said = {name: getattr(run, name) for name in ("batch_size", "update_s", "mini_batches")}
    if run.size_bytes and any(name in given for name in BANDWIDTHS):
        said["parameters"] = run.size_bytes // 4
    return {"workers": [run.n_workers], **said, **({"epoch": run.epoch} if run.epoch else {})}


def _times(given: Given, slower: Mapping[int, float], run: Observed | None = None) -> Times:
    if run is not None:
        return Measured(run.times, slower)
    kind = given.get("compute", "exponential")
    own = SHAPES[kind][0] if kind in SHAPES else ""
    unfit = [n for n in ("shift", "alpha", "sigma") if n != own]
    unfit += ["mean_s"] if kind == "measured" else []
    for name in unfit:
        if f"compute.{name}" in given:
            raise UserError(f"compute.{name} was given, but compute={kind} has no such parameter")
    if (kind == "measured") != ("from" in given):
        raise UserError(
            f"compute={kind} was given {'with' if 'from' in given else 'without'} from=...; "
            "compute=measured and from=RUN (the directory of a run, or a .json or .csv file of "
            "service times) go together"
        )
    if kind == "measured":
        source = Path(given["from"])
        in_words = source.suffix in (".json", ".csv")
        return Measured(read_times(source) if in_words else service_times(source), slower)
    return ServiceTimes(kind, given.get("compute.mean_s", 1.0), given.get(f"compute.{own}"), slower)


def _conditions(given: Given, trains: bool) -> Conditions:
    script = read_script(given["script"]) if "script" in given else Script()
    network = _network(given, trains)
    interrupts, foresees = (given.get(name, False) for name in ("interrupt", "foresight"))
    update_s = given.get("update_s", 0.0)
    return Conditions(network, script, interrupts, update_s, foresees, _visits(given, trains))


def _visits(given: Given, trains: bool) -> Visits | None:
    both = [name for name in ("data_shards", "data_visit") if name in given]
    if len(both) == 1 or (both and not trains):
        raise UserError(
            f"{both[0]}={given[both[0]]} was given; data_shards=S and data_visit=N go together, "
            "and with task=..., whose data are cut"
        )
    return Visits(*(given[name] for name in both)) if both else None


def _network(given: Given, trains: bool) -> Network:
    limited = [name for name in BANDWIDTHS if name in given]
    if bool(limited) != ("parameters" in given) and not trains:
        have, lack = (limited[0], "parameters") if limited else ("parameters", BANDWIDTHS[0])
        raise UserError(
            f"{have} was given without {lack}; a bandwidth in bytes per second and the number of "
            "parameters (4 bytes each) go together"
        )
    own, servers = (given.get(name, math.inf) for name in BANDWIDTHS)
    latency_s, n_parameters = given.get("network.latency_s", 0.0), given.get("parameters", 0)
    return Network(latency_s, own, servers, 4 * n_parameters)


def _length(given: Given, trains: bool) -> float | None:
    """Length of the run in mini-batches; ``None``: the task's epochs."""
    if "mini_batches" not in given and "seconds" in given:
        return math.inf
    return given.get("mini_batches", None if trains else 20_000)
