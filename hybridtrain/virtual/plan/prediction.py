"""The rows of a plan: predict a strategy's speed on a layout of hosts, and its time to a target.

Theory of operation. Speed comes from the policy's own code on recorded times, in virtual time
without a task (:mod:`hybridtrain.virtual.virtual_world`). What a record does not say is modelled:

*Cores.* A mini-batch has a processor's part (its processor time over the worker's threads) and the
rest, a device's. ``g`` workers of a host that are released together need all their threads at the
same time, the ``W - g`` others ``u`` cores each (processor time over computing time): of ``C``
cores each gets less, and the processor's part takes ``max(1, (g threads + (W - g) u) / C)`` times
as long. The contention of the recorded run is removed from its times first.

*Between two mini-batches* lie messages and wake-ups. The run's own strategy is simulated from its
times; what its measured speed lacks is added to each contribution, however slow its worker is.

*Memory bandwidth*, of models that no cache holds: an update moves each row once and parameters and
state twice, in the time that was measured, which is what the memory gives. Mini-batches read
parameters and write a gradient, and where workers have copies, these; if all of them ask for more
than the memory gives, they take longer in proportion. An update of more rows takes longer, too.

*Samples to a target*, after Birch SGD (arXiv:2505.09218): ``N = c1 L + c2`` with the lag ``L =
(1 + staleness) x mini-batches of an update``. Runs of the same strategy and lag are measurements.
Runs of two lags give both constants. One run alone gives a range: with either constant zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, cycle, product
from statistics import fmean

import torch

from hybridtrain.engine.exchanges import Exchange, exchange_of
from hybridtrain.engine.exchanges.compression import codec_of
from hybridtrain.engine.exchanges.requirements import Requirements
from hybridtrain.engine.policies import Needs, make_policy
from hybridtrain.engine.protocol.facts import Began
from hybridtrain.engine.recording.observed import Observed
from hybridtrain.engine.updates.named import UpdateSpec
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import name_of
from hybridtrain.virtual.contention import NO_CONTENTION, Contention
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.plan.evidence import (
    FULL,
    SLOW,
    USUAL_STATE_BYTES,
    Evidence,
    MetricTarget,
    Reached,
    nearest,
)
from hybridtrain.virtual.service_times import Draw, Measured, Times
from hybridtrain.virtual.simulations import StrategySpec
from hybridtrain.virtual.virtual_world import VirtualWorld

CACHED_BYTES = 32_000_000  # of parameters: more do not stay in a cache
ALIKE = 1.25  # times a lag at which a measurement holds
MOST_MINI_BATCHES, LEAST_CONTRIBUTIONS = 5_000_000, 6  # of a row; of each worker
WIDE = 10.0  # a range of more times says nothing


@dataclass(frozen=True)
class HostLayout:
    """Hosts with so many workers each, as written in ``text``; ``cores`` of each, 0: as recorded.

    ``slower``: worker -> factor on its times.
    """

    text: str
    hosts: int
    each: int
    network: Network
    slower: Mapping[int, float]
    cores: int = 0

    @property
    def workers(self) -> int:
        return self.hosts * self.each


@dataclass(frozen=True)
class PlanRow:
    """Figures of a strategy on a layout; seconds and bytes.

    ``error``: share by which the run's own strategy, simulated from its times alone, is faster than
    it was. ``time_to_target_s`` and ``samples_to_target``: least and most. ``trust``: ``measured``,
    ``fitted``, ``range`` or empty. ``limits``: the share of the speed that each costs.
    ``extrapolated``: what was not measured.
    """

    strategy: str
    hosts: str
    workers: int
    samples_per_s: float
    error: float | None
    updates_per_s: float
    waiting_share: float
    staleness: float
    lag: float
    dropped_share: float
    handed_over_bytes_per_s: float
    memory_bytes: int
    bottleneck: str
    limits: Mapping[str, float]
    extrapolated: tuple[str, ...]
    samples_to_target: tuple[float, float] | None = None
    time_to_target_s: tuple[float, float] | None = None
    trust: str = ""


@dataclass(frozen=True)
class Plan:
    """Strategies and layouts to be ranked, and the runs to do it from."""

    runs: Sequence[Evidence]
    strategies: Sequence[StrategySpec]
    layouts: Sequence[HostLayout]
    target: MetricTarget | None = None
    own_cores: int = 1  # of this machine, for runs that do not say

    @cached_property
    def mini_batches(self) -> int:
        """Simulated in a row: fewer where there are many rows."""
        return min(2000, max(150, 500_000 // (len(self.strategies) * len(self.layouts))))

    @cached_property
    def checked(self) -> dict[str, tuple[float, float]]:
        """Each run's own speed: simulated, and measured."""
        found = {}
        for each in self.runs:
            if (spec := own_spec(each)) is not None:
                layout = HostLayout("", 1, each.seen.n_workers, Network(), {})
                alone = replace(self, strategies=[spec], layouts=[layout])  # as long as can be
                found[str(each.folder)] = _run(alone, each, spec, layout)[0], each.samples_per_s
        return found

    def between_s(self, run: Evidence) -> float:
        """Time of a contribution that is not in a run's times, from its own speed."""
        simulated, measured = self.checked.get(str(run.folder), (math.inf, math.inf))
        each = run.seen.n_workers * run.seen.batch_size * run.seen.steps
        return max(0.0, each / measured - each / simulated)

    def rows(
        self, tell: Callable[[str], object] = lambda _: None
    ) -> tuple[list[PlanRow], list[str]]:
        """The rows, best first, and why others are missing.

        Raises:
            UserError: if a strategy fits none of the layouts.
        """
        rows, missing = list[PlanRow](), list[str]()
        errors = {run: simulated / real - 1 for run, (simulated, real) in self.checked.items()}
        for spec in self.strategies:
            refusals = []
            for layout in self.layouts:
                tell(f"{spec.label}, {layout.text}")
                try:
                    rows.append(self._row(spec, layout, errors))
                except UserError as error:
                    refusals.append(f"{spec.label} on {layout.text}: {error}")
            if len(refusals) == len(self.layouts):
                raise UserError(refusals[0])
            missing += refusals
        return sorted(rows, key=_rank), missing

    def _row(self, spec: StrategySpec, layout: HostLayout, errors: Mapping[str, float]) -> PlanRow:
        source = nearest(_usable(self.runs, spec), layout.each, _name(spec))
        speed, world, steps = _run(self, source, spec, layout, self.between_s(source))
        statistics, wants = world.server.statistics, world.server.requirements
        stats, staleness = statistics.stats(), statistics.mean_age()
        lag = statistics.n_applied / statistics.version * steps * (1 + staleness)
        memory = _memory_factor(source, layout.each, wants.whole_rounds)
        waiting = fmean(stats["waiting_share"])
        limits = _limits(world, stats["waiting_share"], memory)
        error = errors.get(str(source.folder))
        row = PlanRow(
            strategy=spec.label,
            hosts=layout.text,
            workers=layout.workers,
            samples_per_s=speed,
            error=error,
            updates_per_s=statistics.version / world.now_s,
            waiting_share=waiting,
            staleness=staleness,
            lag=lag,
            dropped_share=sum(stats["dropped"]) / world.events,
            handed_over_bytes_per_s=world.events / world.now_s * world.links.row_bytes,
            memory_bytes=_memory_bytes(source, spec, wants, layout),
            bottleneck=_bottleneck(limits, _factors(source, layout)),
            limits=limits,
            extrapolated=tuple(_extrapolated(self, source, spec, layout)),
        )
        return row if self.target is None else self._timed(row, self.target)

    def _timed(self, row: PlanRow, target: MetricTarget) -> PlanRow:
        samples, trust = samples_to(self.runs, target, row.strategy, row.lag)
        if samples is None:
            return row
        off = abs(row.error or 0.0)
        low, high = (x / row.samples_per_s for x in samples)
        times = low / (1 + off), high * (1 + off)
        return replace(row, samples_to_target=samples, time_to_target_s=times, trust=trust)


def _rank(row: PlanRow) -> tuple[float, float]:
    times = row.time_to_target_s
    middle = math.inf if times is None else math.sqrt(times[0] * times[1]) or times[1] / 2
    return middle, -row.samples_per_s


def _name(spec: StrategySpec) -> str:
    return spec.label.partition(":")[0]


def _usable(runs: Sequence[Evidence], spec: StrategySpec) -> Sequence[Evidence]:
    """The runs whose records have the time of an update, or are of this strategy.

    Raises:
        UserError: if there is none.
    """
    hidden = [run for run in runs if run.strategy != _name(spec) and _delays(own_spec(run), run)]
    if len(hidden) == len(runs):
        raise UserError(
            f"run={hidden[0].folder} was given, under whose strategy {hidden[0].strategy} updates "
            "are made beside mini-batches, so the record does not have their time; give a run of "
            "hybrid"
        )
    return [run for run in runs if run not in hidden]


def _delays(spec: StrategySpec | None, run: Evidence) -> bool:
    """Whether updates are made beside mini-batches."""
    return spec is not None and make_policy(spec.policy).begin(run.seen.n_workers).delay > 0


def own_spec(run: Evidence) -> StrategySpec | None:
    """The run's own strategy; ``None``: it is not known by name."""
    given, *more = map(run.seen.strategy.get, ("policy", "exchange", "update"))
    return None if given is None else StrategySpec(run.strategy, given, *more)


# ---- speed --------------------------------------------------------------------------------------


def _run(
    plan: Plan, source: Evidence, spec: StrategySpec, layout: HostLayout, between_s: float = 0.0
) -> tuple[float, VirtualWorld, float]:
    """Samples a second, the simulated run, and the mean of a contribution's mini-batches."""
    policy = make_policy(spec.policy)
    exchange = exchange_of(policy, spec.exchange)
    _check_plannable(spec, exchange)
    n, seen = layout.workers, source.seen
    sizes = _sizes(exchange.steps, seen, n)
    contributions = _contributions(plan, spec, n, steps := fmean(sizes))
    times, needs = _times(source, layout), policy.begin(n)
    same = _as_recorded(source, layout) and spec.label == source.strategy
    contention = NO_CONTENTION if same else _contention(plan, source, layout, needs)
    own = exchange.parameters == "own" and source.parameters != "own"
    own_step_s = seen.update_s if own else 0.0  # else it is in the times
    each = ContributionTimes(times, sizes, between_s, own_step_s)
    epoch = None if seen.epoch is None else max(n, round(seen.epoch / seen.batch_size / steps))
    network = replace(
        layout.network,
        hosts=layout.hosts,
        size_bytes=seen.size_bytes,
        row_bytes=_row_bytes(spec, exchange, seen.size_bytes),
    )
    brings = 2 * (needs.delay > 0)  # and copies the masters to what workers read
    update_s = _update_s(source, needs.gathers + brings)
    under = Conditions(network, update_s=update_s, contention=contention)
    world = VirtualWorld(policy, n, each, conditions=under, exchange=exchange, epoch=epoch)
    policy.on(Began(needs.delay_from))  # a row is of the middle of a run
    wants = world.server.requirements
    if wants.watches_loss or wants.evaluates:
        raise UserError(f"strategy={spec.label} depends on losses, which {_SIMULATE}")
    world.run(mini_batches=contributions)
    statistics = world.server.statistics
    speed = statistics.n_applied / statistics.stats()["training_s"] * steps * seen.batch_size
    return speed, world, steps


def _sizes(steps: int, seen: Observed, n_workers: int) -> list[int]:
    """Mini-batches of a worker's contributions in an epoch, at whose end it hands over the rest."""
    if steps == 1 or seen.epoch is None:
        return [steps]
    full, rest = divmod(max(1, round(seen.epoch / seen.batch_size / n_workers)), steps)
    return [*[steps] * full, *[rest] * (rest > 0)]


def _contributions(plan: Plan, spec: StrategySpec, n_workers: int, steps: float) -> int:
    """To be simulated, of so many mini-batches each. Raises UserError if they are too many."""
    found = max(int(plan.mini_batches / steps), LEAST_CONTRIBUTIONS * n_workers)
    if found * steps > MOST_MINI_BATCHES:
        raise UserError(
            f"strategy={spec.label}: {LEAST_CONTRIBUTIONS} contributions of each of {n_workers} "
            f"workers are {found * steps:,.0f} mini-batches, and a row has at most "
            f"{MOST_MINI_BATCHES:,}; give fewer workers, or fewer mini-batches in a contribution"
        )
    return found


_SIMULATE = "a plan has not; python -m hybridtrain simulate with task=... has"


def _check_plannable(spec: StrategySpec, exchange: Exchange) -> None:
    """Workers that compute while they hand over are known to virtual time only."""
    if getattr(exchange, "overlap", 0) or getattr(exchange, "fetch", None) == "overlapped":
        raise UserError(
            f"strategy={spec.label}: its workers compute on while they hand over, which a plan "
            "does not know; use python -m hybridtrain simulate with task=..."
        )


def _row_bytes(spec: StrategySpec, exchange: Exchange, size_bytes: int) -> int:
    """Bytes of a contribution, of which a codec may make fewer.

    Raises:
        UserError: if they depend on the parameters' shapes, which a record does not hold.
    """
    if (codec := codec_of(exchange)) is None:
        return size_bytes
    one, two = (codec.n_bytes(shape, torch.float32) for shape in ((4096,), (1, 4096)))
    if one != two:
        raise UserError(
            f"strategy={spec.label}: how many bytes it hands over depends on the shapes of "
            f"parameters, {_SIMULATE}"
        )
    return codec.n_bytes((size_bytes // 4,), torch.float32)


@dataclass(frozen=True)
class ContributionTimes:
    """Seconds of contributions: of so many mini-batches each, in turn, and of what lies between.

    ``own_step_s``: of a worker's own step, after each mini-batch.
    """

    mini_batches: Times
    sizes: Sequence[int]
    between_s: float
    own_step_s: float

    def stream(self, worker: int, seed: int) -> Draw:
        """Draws the worker's times."""
        draw, between_s = self.mini_batches.stream(worker, seed), self.between_s
        own_s = self.own_step_s
        if max(self.sizes) == 1:
            return lambda: draw() + own_s + between_s
        size = cycle(self.sizes)
        return lambda: between_s + sum(draw() + own_s for _ in range(next(size)))


def _as_recorded(source: Evidence, layout: HostLayout) -> bool:
    """Whether the layout is the recorded one."""
    same = (layout.hosts, layout.each) == (1, source.seen.n_workers)
    return same and not layout.slower and not layout.cores


def _times(source: Evidence, layout: HostLayout) -> Times:
    """As recorded on the run's own layout; else those of ordinary workers, in turn."""
    if _as_recorded(source, layout):
        return Measured(source.times)
    return Measured(source.ordinary, layout.slower)


def _factors(source: Evidence, layout: HostLayout) -> Mapping[int, float]:
    """Slow workers of the layout."""
    if _as_recorded(source, layout):
        return source.slow
    return {worker: factor for worker, factor in layout.slower.items() if factor >= SLOW}


def _contention(plan: Plan, source: Evidence, layout: HostLayout, needs: Needs) -> Contention:
    usual_s, threads, n_before = source.ordinary_s, source.threads, source.seen.n_workers
    recorded = source.cores or plan.own_cores
    # If the run does not say: always busy, as far as it had cores.
    cpu_s = source.cpu_s or usual_s * min(threads, recorded / n_before)
    cpu_s = min(cpu_s, usual_s * threads)
    part_s, own_s = cpu_s / threads, usual_s  # of the processor; of what no other worker held up
    if n_before * threads > recorded:
        if n_before * cpu_s / usual_s > FULL * recorded:
            own_s = part_s  # all else was waiting for a core
        elif source.gathers > 0.9 * n_before:  # in lock-step
            own_s = max(part_s, usual_s - part_s * (n_before * threads / recorded - 1))
    each = (layout.each, n_before)
    now, then = (_memory_factor(source, n, needs.whole_rounds) for n in each)
    # A worker's share of a core on average; where workers take turns, one computes.
    cores, asked = layout.cores or recorded, 0.0 if needs.turns else cpu_s / own_s

    def longer(together: int) -> float:
        here = min(layout.each, -(-together // layout.hosts))
        busy = here * threads + (layout.each - here) * asked
        part = 1 + part_s / own_s * (max(1.0, busy / cores) - 1)
        return alone * part

    alone = own_s / usual_s * (now / then)
    return Contention(longer, alone, layout.slower)


def _memory_factor(source: Evidence, workers: int, whole_rounds: bool) -> float:
    """Times as long as mini-batches take if so many workers ask for more than memory gives."""
    size, update_s = source.seen.size_bytes, source.seen.update_s
    if size < CACHED_BYTES or not update_s:
        return 1.0  # the parameters stay in a cache, or the update's time is not known
    given = size * _moved(source, source.gathers) / update_s
    asked = workers * size * (3 if whole_rounds else 5) / source.ordinary_s
    return max(1.0, asked / given)


def _moved(source: Evidence, rows: float) -> float:
    """Times the parameters' bytes that an update of so many rows moves."""
    state = USUAL_STATE_BYTES if source.state_bytes is None else source.state_bytes
    return 2 + state / 2 + rows


def _update_s(source: Evidence, rows: int) -> float:
    """Predict the seconds of an update of so many rows."""
    if source.seen.size_bytes < CACHED_BYTES:
        return source.seen.update_s
    return source.seen.update_s * _moved(source, rows) / _moved(source, source.gathers)


# ---- what limits it, what it needs, what was not measured ---------------------------------------


def _limits(world: VirtualWorld, waits: Sequence[float], memory: float) -> dict[str, float]:
    """The share of the workers' time that each costs; ``memory``: its factor on mini-batches."""
    statistics, waiting = world.server.statistics, fmean(waits)
    update = statistics.version * world.update_s / world.now_s
    if world.server.requirements.delay:  # but what is beside the mini-batches of the slowest
        update = max(0.0, update - (1 - min(waits)))
    update, computing = min(waiting, update), 1 - waiting
    return {
        "waiting": waiting - update,
        "server's update": update,
        "host link": world.network_s / world.now_s / statistics.n_workers,
        "cores": computing * max(0.0, 1 - memory / max(world.mean_contention, memory)),
        "memory bandwidth": computing * max(0.0, 1 - 1 / memory),
    }


def _bottleneck(limits: Mapping[str, float], slow: Mapping[int, float]) -> str:
    name = max(limits, key=lambda each: limits[each])
    if limits[name] < 0.05:
        return "workers' own speed"
    if name == "waiting" and slow:
        worker = max(slow, key=lambda each: slow[each])
        return f"worker {worker}, {slow[worker]:.3g}× slower"
    return name


def _memory_bytes(
    source: Evidence, spec: StrategySpec, wants: Requirements, layout: HostLayout
) -> int:
    """Masters, optimizer state, rows, copies on the host with the server (docs/memory.md)."""
    exchange = exchange_of(make_policy(spec.policy), spec.exchange)
    state = USUAL_STATE_BYTES if source.state_bytes is None else source.state_bytes
    own = layout.each * (4 + state) if wants.parameters == "own" else 0
    rows = 4 * (layout.workers * wants.n_rows + wants.n_copies(layout.workers))
    if not isinstance(exchange.update, str):  # the merge rule sees a copy of each row
        rows += 4 * layout.workers
    elif exchange.update != "user":  # the masters move by what is merged
        state, rows = _outer_state_bytes(spec.update), rows + 4 * wants.has_copies
    return (4 + state + rows + own + 4 * wants.holds) * source.seen.size_bytes // 4


def _outer_state_bytes(update: UpdateSpec) -> int:
    """Bytes of a named update's state for each parameter."""
    given = update if isinstance(update, Mapping) else {"name": update}
    momentum = 4 if given.get("momentum") else 0
    return {None: 0, "sgd": momentum, "delayed_nesterov": 8}.get(name_of(given), USUAL_STATE_BYTES)


def _extrapolated(
    plan: Plan, run: Evidence, spec: StrategySpec, layout: HostLayout
) -> Iterator[str]:
    """Say how the row differs from the run with its times."""
    before, seen = run.seen.n_workers, run.seen
    if layout.workers != before:
        yield f"workers {before} → {layout.workers}"
    if _name(spec) != run.strategy:
        yield f"a strategy other than {run.strategy}"
        if codec_of(exchange_of(make_policy(spec.policy), spec.exchange)) is not None:
            yield "time of encoding not measured"
        if _delays(spec, run):
            yield "an update beside mini-batches not measured"
    if layout.slower:
        yield "a slower worker"
    elif run.slow and not _as_recorded(run, layout):
        yield f"slow worker {', '.join(map(str, run.slow))} of the run left out"
    cores, busy = layout.cores or run.cores, layout.each * run.threads
    if not cores:
        yield f"cores not recorded, {plan.own_cores} taken"
    elif run.cores and cores != run.cores:
        yield f"cores {run.cores} → {cores}"
    if busy > max(before * run.threads, cores or plan.own_cores):
        yield f"{busy} busy threads on {cores or plan.own_cores} cores"
    if layout.each > before and seen.size_bytes < CACHED_BYTES:
        yield f"memory bandwidth of {layout.each} workers not measured"
    if layout.hosts > 1:
        yield "network not measured"
    if not seen.size_bytes and (layout.hosts > 1 or layout.network.bandwidth < math.inf):
        yield "bytes of parameters not recorded, 0 taken"
    if not run.cpu_s:
        yield "processor time not recorded"


# ---- samples to a target ------------------------------------------------------------------------


def samples_to(
    runs: Sequence[Evidence], target: MetricTarget, strategy: str, lag: float
) -> tuple[tuple[float, float] | None, str]:
    """Least and most samples to the target, and how far to trust them; ``None``: not known."""
    known = [(run, at) for run in runs if (at := run.reached(target)) is not None]
    own = [(run.lag, at) for run, at in known if run.strategy == strategy.partition(":")[0]]
    every = [(run.lag, at) for run, at in known]
    if alike := [at for other, at in own if max(other / lag, lag / other) <= ALIKE]:
        return _around(alike), "measured"
    for group in (own, every):
        if (fitted := _fitted(group, lag)) is not None:
            return fitted, "fitted"
    ranges = [_range(other, at, lag) for other, at in own or every]
    low, high = _around(ranges) if ranges else (0.0, 0.0)
    return ((low, high), "range") if low > 0 and high <= WIDE * low else (None, "")


def _around(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """From the least of them to the most."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _range(lag: float, reached: Reached, other: float) -> tuple[float, float]:
    """With either constant zero."""
    factors = sorted((1.0, other / lag))
    return reached[0] * factors[0], reached[1] * factors[1]


def _fitted(known: Sequence[tuple[float, Reached]], lag: float) -> tuple[float, float] | None:
    """From runs of two lags; ``None``: there are none, or the law does not describe them."""
    found = list[float]()
    for (lag_a, a), (lag_b, b) in combinations(known, 2):
        if max(lag_a / lag_b, lag_b / lag_a) >= ALIKE:
            for n_a, n_b in product(a, b):
                c1 = (n_b - n_a) / (lag_b - lag_a)
                if c1 >= 0 and n_a - c1 * lag_a >= 0:
                    found.append(n_a + c1 * (lag - lag_a))
    return (min(found), max(found)) if found else None
