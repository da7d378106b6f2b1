"""Corrections of late gradients: what each paper says, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Packed, Store, pack
from hybridtrain.engine.policies import OnArrival, Policy, Softsync, WaitForAll
from hybridtrain.engine.protocol.events import Received
from hybridtrain.engine.protocol.messages import Push, Row
from hybridtrain.engine.updates.base import Contribution
from hybridtrain.engine.updates.groups import slowed
from hybridtrain.engine.updates.staleness import Correction, make_correction
from hybridtrain.engine.updates.staleness.correction import (
    ByStaleness,
    DcAsgd,
    DcAsgdAdaptive,
    GapAware,
    Late,
    Polynomial,
)
from hybridtrain.errors import UserError
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld
from tests.support.served import Served

EVERY = [ByStaleness(), Polynomial(), DcAsgd(), DcAsgdAdaptive(), GapAware()]
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(lr: float, **rest: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **rest)


class RoundRobin:
    """Workers that take turns, so that each gradient is W - 1 updates late, once all have begun.

    Args:
        correction: of these late gradients.
        gradient: (step, parameter) -> gradient, both float64.
        make: the optimizer.
        start: the parameter.
        policy: one under which nobody waits.
    """

    def __init__(
        self,
        correction: Correction | None,
        workers: int,
        gradient: Callable[[int, torch.Tensor], torch.Tensor],
        make: Make,
        start: torch.Tensor,
        policy: Policy | None = None,
    ) -> None:
        self.workers, self.gradient = workers, gradient
        self.served = Served(workers, policy or OnArrival(), (start,), (make,), correction)
        self.slot = self.served.layout.slots[0]
        self.steps = 0

    def run(self, steps: int) -> torch.Tensor:
        """Go on; returns the parameter."""
        store = self.served.store
        for _ in range(steps):
            worker = self.steps % self.workers
            read = store.parameter(worker, self.slot)
            store.gradient(worker, self.slot).copy_(self.gradient(self.steps, read))
            [(freed, _)] = self.served.server.on(Received(worker, Push(0, 1.0)))
            assert freed == worker
            self.steps += 1
        return store.master(self.slot).clone()


def vector(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def quadratic(h: float) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda step, read: h * read


# ---- no delay is no correction ------------------------------------------------------------------


@pytest.mark.parametrize("correction", EVERY, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("optimizer", [sgd(0.3, momentum=0.9), torch.optim.Adam])
def test_without_delay_every_correction_is_plain_training(
    correction: Correction, optimizer: Make
) -> None:
    noise = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        start = vector(1.0, -2.0, 0.5, dtype=dtype)
        plain, corrected = (
            RoundRobin(c, 1, lambda n, w: w + noise[n], optimizer, start).run(40)
            for c in (None, correction)
        )
        assert torch.equal(plain, corrected)


@pytest.mark.parametrize(
    "nothing",
    [DcAsgd(strength=0.0), DcAsgdAdaptive(strength=0.0), Polynomial(exponent=0.0)],
    ids=lambda c: type(c).__name__,
)
def test_a_correction_of_strength_zero_is_plain_asynchronous_training(nothing: Correction) -> None:
    start = vector(1.0, -3.0)
    plain = RoundRobin(None, 4, quadratic(0.7), sgd(0.3), start).run(50)
    assert torch.equal(plain, RoundRobin(nothing, 4, quadratic(0.7), sgd(0.3), start).run(50))


@pytest.mark.parametrize("correction", EVERY, ids=lambda c: type(c).__name__)
def test_in_lock_step_nothing_is_late_and_nothing_is_corrected(correction: Correction) -> None:
    values = []
    for given in (None, correction):
        served = Served(2, WaitForAll(), correction=given)
        for _ in range(5):
            served.push(0, 1.0)
            served.push(1, 2.0)
        values.append(served.value())
    assert values[0] == values[1] == -7.5


# ---- the formulas, against a few lines that do the same by hand ----------------------------------


def by_hand(
    workers: int, steps: int, step: Callable[[float, float, float, int], float], h: float
) -> float:
    """w after ``steps`` round-robin updates ``w = step(w, gradient, w_read, tau)`` on h w^2 / 2."""
    w, reads, versions = 1.0, [1.0] * workers, [0] * workers
    for version in range(steps):
        worker = version % workers
        w = step(w, h * reads[worker], reads[worker], version - versions[worker])
        reads[worker], versions[worker] = w, version + 1
    return w


FORMULAS: list[tuple[Correction, Callable[[float, float, float, int], float]]] = [
    (ByStaleness(), lambda w, g, read, tau: w - 0.2 / max(1, tau) * g),
    (Polynomial(), lambda w, g, read, tau: w - 0.2 * (1 + tau) ** -0.5 * g),
    (Polynomial(2.0), lambda w, g, read, tau: w - 0.2 * (1 + tau) ** -2.0 * g),
    (DcAsgd(0.4), lambda w, g, read, tau: w - 0.2 * (g + 0.4 * g * g * (w - read))),
]


@pytest.mark.parametrize(("correction", "step"), FORMULAS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("workers", [2, 5])
def test_many_delayed_updates_follow_the_formula(
    correction: Correction, step: Callable[[float, float, float, int], float], workers: int
) -> None:
    world = RoundRobin(correction, workers, quadratic(0.9), sgd(0.2), vector(1.0, 1.0))
    assert world.run(60).tolist() == pytest.approx([by_hand(workers, 60, step, 0.9)] * 2, rel=1e-12)


@pytest.mark.parametrize(("correction", "step"), FORMULAS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_contributions_that_are_put_aside_are_corrected_then(
    correction: Correction, step: Callable[[float, float, float, int], float], n: int
) -> None:
    """n-softsync, Zhang et al. 2016: w = w - 1/c * sum of alpha(tau) * g, of c = W/n gradients."""
    workers, c, h = 4, 4 // n, 0.9
    w, version, reads, versions, move = 1.0, 0, [1.0] * workers, [0] * workers, 0.0
    for count in range(61):
        worker = count % workers
        tau = version - versions[worker]
        move += (step(w, h * reads[worker], reads[worker], tau) - w) / c
        if (count + 1) % c == 0:
            w, version, move = w + move, version + 1, 0.0
        reads[worker], versions[worker] = w, version
    world = RoundRobin(
        correction, workers, quadratic(h), sgd(0.2), vector(1.0, 1.0), policy=Softsync(n)
    )
    assert world.run(61).tolist() == pytest.approx([w, w], rel=1e-12)


def test_the_adaptive_strength_follows_each_workers_own_gradients() -> None:
    """lambda_t = 2 / sqrt(ms(m) + 1e-7), ms(m) = .95 ms(m) + .05 g^2 from 0, of worker m."""
    squares: dict[int, float] = {}

    def step(w: float, g: float, read: float, tau: int) -> float:
        worker = len(seen) % 3
        seen.append(g)
        squares[worker] = 0.95 * squares.get(worker, 0.0) + 0.05 * g * g
        strength = 2.0 / math.sqrt(squares[worker] + 1e-7)
        return w - 0.2 * (g + strength * g * g * (w - read))

    seen: list[float] = []
    world = RoundRobin(DcAsgdAdaptive(), 3, quadratic(0.9), sgd(0.2), vector(1.0))
    assert world.run(30).item() == pytest.approx(by_hand(3, 30, step, 0.9), rel=1e-12)


# ---- staleness-aware rates ----------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1, 2, 3, 7, 31])
@pytest.mark.slow
def test_a_rate_divided_by_staleness_is_stable_below_1_whatever_the_delay(tau: int) -> None:
    """Delayed gradients are stable iff eta h < 2 sin(pi / (2 (2 tau + 1))), and here eta = a / tau.

    So the edge of a h is 1 for tau = 1 and above 1 for all others; without, it is 0.0499 at 31.
    """
    edge = 2 * tau * math.sin(math.pi / (2 * (2 * tau + 1)))
    assert edge > 0.9999

    def ends_at(alpha: float) -> float:
        world = RoundRobin(ByStaleness(), tau + 1, quadratic(1.0), sgd(alpha), vector(1.0))
        world.run(250 * (tau + 1))
        return max(abs(world.run(1).item()) for _ in range(4 * tau + 4))

    assert ends_at(0.95) < 1e-2
    assert ends_at(1.05 * edge) > 1.0


def test_a_shorter_step_is_really_shorter_for_adam() -> None:
    """The length of an Adam step does not depend on the length of its gradient."""

    def last_step(correction: Correction | None) -> float:
        constant = RoundRobin(
            correction,
            5,
            lambda n, w: torch.ones_like(w),
            lambda p: torch.optim.Adam(p, lr=0.01),
            vector(0.0, dtype=torch.float32),
        )
        before = constant.run(30)
        return float(before - constant.run(1))

    assert last_step(None) == pytest.approx(0.01, rel=1e-4)
    assert last_step(ByStaleness()) == pytest.approx(0.01 / 4, rel=1e-4)


class SumAndStep(torch.optim.SGD):
    """A user's class, which lets its rate decay by itself."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5


def test_the_groups_are_untouched_after_a_shorter_step() -> None:
    tensor_rate = torch.tensor(0.3, dtype=torch.float64)
    groups: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": tensor_rate}]
    with slowed(groups, 1 / 3):
        assert groups[0]["lr"] == 0.1 * (1 / 3)
        torch.testing.assert_close(groups[1]["lr"], tensor_rate / 3)
    assert groups[0]["lr"] == 0.1 and groups[1]["lr"] is tensor_rate
    assert tensor_rate.item() == 0.3
    with pytest.raises(ZeroDivisionError), slowed(groups, 0.5):
        raise ZeroDivisionError
    assert groups[0]["lr"] == 0.1


@pytest.mark.parametrize("rate", [0.2, torch.tensor(0.2)])
def test_a_rate_that_the_optimizer_changes_by_itself_stays_changed(rate: Any) -> None:
    groups: list[dict[str, Any]] = [{"lr": rate}]
    with slowed(groups, 0.25):
        groups[0]["lr"] = groups[0]["lr"] * 0.5
    assert float(groups[0]["lr"]) == pytest.approx(0.1)
    news = RoundRobin(ByStaleness(), 3, quadratic(1.0), lambda p: SumAndStep(p, lr=1.0), vector(1))
    news.run(4)
    [update] = news.served.server._rounds.optimizers.updates
    assert update.state().groups[0]["lr"] == pytest.approx(0.5**4)


class IgnoreTheOld(Correction):
    """A user's own: what is more than one update late does not count."""

    def factor(self, staleness: int) -> float:
        return float(staleness <= 1)


def test_a_users_own_correction_may_leave_contributions_out() -> None:
    world = RoundRobin(IgnoreTheOld(), 4, quadratic(1.0), sgd(0.5), vector(1.0))
    assert world.run(2).item() == 1 - 0.5 - 0.5
    assert world.run(2).item() == 0.0, "two updates late"
    assert world.run(1).item() == -0.25, "read after the first update, and one has been made since"


# ---- single contributions, prepared by hand ------------------------------------------------------


class Bench:
    """One worker's row, what it had read, and the parameters as they are now.

    Args:
        now, read, gradient: of the only parameter.
        indices: the gradient is sparse, of these rows of the parameter.
    """

    def __init__(
        self,
        now: torch.Tensor,
        read: torch.Tensor,
        gradient: torch.Tensor,
        indices: Sequence[int] | None = None,
    ) -> None:
        layout = Layout.of([("p", now)])
        self.slot = layout.slots[0]
        self.store = Store(layout, 1, private_parameters=True)
        self.store.master(self.slot).copy_(now)
        self.store.parameter(0, self.slot).copy_(read)
        self.packed: dict[int, Packed] = {}
        place = self.store.gradient(0, self.slot)
        if indices is None:
            place.copy_(gradient)
        else:
            place.fill_(math.nan)  # nobody may read what the gradient does not have
            sparse = torch.sparse_coo_tensor(
                [list(indices)], gradient, now.shape, check_invariants=True
            )
            self.packed[0] = pack(0, sparse.coalesce(), place)

    def late(self, staleness: int = 3) -> Late:
        return Late(Contribution(0, 1.0, packed=self.packed), staleness, [0], self.store)

    def after(self, correction: Correction, staleness: int = 3) -> torch.Tensor:
        """The gradient as it will be merged."""
        correction.begin(self.store)
        return self.corrected(correction, staleness)

    def corrected(self, correction: Correction, staleness: int = 3) -> torch.Tensor:
        late = self.late(staleness)
        correction.correct(late)
        [part] = late.parts()
        return late.gradient(part).clone()

    def step(self, correction: Correction, move: torch.Tensor) -> None:
        """The parameter moves, as the correction sees it."""
        with correction.watch([self.late()]):
            self.store.master(self.slot).add_(move)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_delay_compensation_in_every_precision(dtype: torch.dtype) -> None:
    now, read = vector(1.0, 2.0, 3.0, dtype=dtype), vector(0.5, 2.0, 3.5, dtype=dtype)
    gradient = vector(2.0, 4.0, -1.0, dtype=dtype)
    expected = [2.0 + 0.25 * 4.0 * 0.5, 4.0, -1.0 + 0.25 * 1.0 * -0.5]
    assert Bench(now, read, gradient).after(DcAsgd(0.25)).tolist() == expected


@pytest.mark.parametrize("correction", EVERY[2:], ids=lambda c: type(c).__name__)
def test_sparse_gradients_are_corrected_like_the_rows_of_dense_ones(correction: Correction) -> None:
    generator = torch.Generator().manual_seed(1)
    now, read, gradient = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64).unbind()
    rows = [1, 2, 5]
    move = torch.zeros_like(now).index_fill_(0, torch.tensor(rows), 0.1)
    corrected = []
    for bench in (Bench(now, read, gradient), Bench(now, read, gradient[rows], rows)):
        correction.begin(bench.store)
        bench.step(correction, move)
        bench.step(correction, -2 * move)
        corrected.append(bench.corrected(correction))
    dense, sparse = corrected[0].view(6, 4)[rows], corrected[1]
    assert torch.equal(sparse, dense)
    assert not torch.isclose(sparse, gradient[rows], rtol=1e-6).any()


def test_a_correction_of_sparse_gradients_remembers_only_touched_rows() -> None:
    correction = GapAware()
    now = torch.zeros(4, 2, dtype=torch.float64)
    bench = Bench(now, now - 0.3, torch.ones(2, 2, dtype=torch.float64), [0, 3])
    correction.begin(bench.store)
    for _ in range(5):
        bench.step(correction, torch.full_like(now, 0.1))
    moved = bench.store.master(bench.slot) - bench.store.parameter(0, bench.slot)
    typical = 0.1 + 1e-8
    torch.testing.assert_close(
        bench.corrected(correction), 1 / (1 + moved[[0, 3]] / typical), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("correction", EVERY, ids=lambda c: type(c).__name__)
def test_sparse_contributions_that_are_put_aside_equal_dense_ones(correction: Correction) -> None:
    """Of rows that are touched each time; the others stay where they are."""
    rows, noise = [0, 2], torch.randn(40, 2, 3, generator=torch.Generator().manual_seed(5))

    def trained(sparse: bool) -> torch.Tensor:
        served = Served(4, Softsync(2), (torch.ones(4, 3),), (sgd(0.1),), correction)
        slot = served.layout.slots[0]
        for step, values in enumerate(noise):
            worker = step % 4
            place = served.store.gradient(worker, slot)
            values = values + served.store.parameter(worker, slot)[rows]
            packed: tuple[Packed, ...] = ()
            if sparse:
                whole = torch.sparse_coo_tensor([rows], values, (4, 3), check_invariants=True)
                packed = (pack(0, whole.coalesce(), place.fill_(math.nan)),)
            else:
                place.zero_()[rows] = values
            served.server.on(Received(worker, Push(0, 1.0, Row(packed=packed))))
        return served.store.master(slot).clone()

    dense, sparse = trained(sparse=False), trained(sparse=True)
    torch.testing.assert_close(sparse, dense, rtol=1e-6, atol=1e-7)
    assert not torch.isclose(dense[rows], torch.ones(2, 3), atol=1e-3).any()
    assert torch.equal(dense[[1, 3]], torch.ones(2, 3))


def test_delay_compensation_halves_twice_what_the_delay_spoils() -> None:
    """Logistic regression whose labels follow the model: E[g * g] is its Hessian.

    So the error of a compensated gradient is of second order in the gap, uncompensated of first.
    """
    x, read = vector(0.3, -1.2, 2.0), 0.4

    def gradient_at(w: float, label: float) -> torch.Tensor:
        return (torch.sigmoid(x * w) - label) * x

    def error(gap: float, strength: float) -> float:
        now = torch.full_like(x, read + gap)
        likely, mean, true = torch.sigmoid(x * read), torch.zeros_like(x), torch.zeros_like(x)
        for label, probability in ((1.0, likely), (0.0, 1 - likely)):
            bench = Bench(now, torch.full_like(x, read), gradient_at(read, label))
            mean += probability * bench.after(DcAsgd(strength))
            true += probability * gradient_at(read + gap, label)
        return float((mean - true).abs().max())

    compensated = [error(gap, 1.0) for gap in (0.2, 0.1, 0.05)]
    late = [error(gap, 0.0) for gap in (0.2, 0.1, 0.05)]
    for errors, factor in ((compensated, 4.0), (late, 2.0)):
        assert errors[0] / errors[1] == pytest.approx(factor, rel=0.1)
        assert errors[1] / errors[2] == pytest.approx(factor, rel=0.1)
    assert compensated[2] < late[2] / 20


# ---- gap-aware ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_a_gap_a_gradient_is_unchanged_however_late_it_is(dtype: torch.dtype) -> None:
    correction, gradient = GapAware(), vector(3.0, -0.7, dtype=dtype)
    bench = Bench(vector(1.0, 2.0, dtype=dtype), vector(1.0, 2.0, dtype=dtype), gradient)
    correction.begin(bench.store)
    for move in (0.25, 0.25, -0.25, -0.25):  # opposite steps cancel
        bench.step(correction, torch.full_like(gradient, move))
    assert torch.equal(bench.corrected(correction, staleness=4).to(dtype), gradient)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("tau", [1, 3, 10])
def test_equal_steps_in_one_direction_divide_by_1_plus_tau(tau: int, decay: float) -> None:
    correction = GapAware(decay)
    start = vector(5.0, -5.0)
    bench = Bench(start, start, vector(1.0, 8.0))
    correction.begin(bench.store)
    for _ in range(tau):
        bench.step(correction, vector(-0.5, 2.0))
    expected = [1 / (1 + tau), 8 / (1 + tau)]
    assert bench.corrected(correction, tau).tolist() == pytest.approx(expected, rel=1e-6)


def test_gap_aware_training_settles_at_the_rate_of_the_staleness_aware() -> None:
    """Constant gradients of W round-robin workers: steps of eta / (1 + tau) = eta / W."""
    world = RoundRobin(GapAware(0.5), 4, lambda n, w: torch.ones_like(w), sgd(0.1), vector(0.0))
    before = world.run(200)
    assert (before - world.run(1)).item() == pytest.approx(0.1 / 4, rel=1e-6)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    layout = Layout.of([("p", torch.zeros(2)), ("q", torch.zeros(2))])
    store = Store(layout, 1, private_parameters=True)
    for number, slot in enumerate(layout.slots):
        store.master(slot).fill_(1.0)
        store.gradient(0, slot).fill_(math.nan if number else 2.0)
    correction = DcAsgd(0.5)
    correction.begin(store)
    correction.correct(Late(Contribution(0, 1.0, frozenset({1})), 2, [0, 1], store))
    assert store.gradient(0, layout.slots[0]).tolist() == [2 + 0.5 * 4, 4.0]


# ---- what user code writes is what the worker has read -------------------------------------------


def test_a_workers_own_write_is_no_gap() -> None:
    """It has computed with what it has written; only what others have done lies in between."""
    start = vector(1.0)
    served = Served(2, OnArrival(), (start,), (sgd(1.0),), DcAsgd(1.0))
    slot = served.layout.slots[0]
    served.push(1, 0.25)  # now 0.75
    written = vector(5.0).numpy().tobytes()
    served.push(0, 2.0, writes={0: written})  # worker 0 moved itself from 1 to 5: now 4.75
    gap = 4.75 - 5.0
    assert served.store.master(slot).item() == pytest.approx(4.75 - (2.0 + 4.0 * gap))


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("gapaware", r"correction='gapaware' was given \(did you mean gap_aware\?\); known are"),
        ({"exponent": 1}, "without a name"),
        ({"name": "polynomial", "power": 1}, "correction.power was given; polynomial takes expo"),
        ({"name": "by_staleness", "x": 1}, "by_staleness takes no parameters"),
        ({"name": "polynomial", "exponent": -1}, "exponent=-1 was given; it must be a number from"),
        ({"name": "polynomial", "exponent": math.inf}, "exponent=inf was given"),
        ({"name": "dc_asgd", "strength": -0.1}, "strength=-0.1 was given"),
        ({"name": "dc_asgd", "strength": True}, "strength=True was given"),
        ({"name": "dc_asgd_adaptive", "decay": 1}, "decay=1 was given; .* from 0 to below 1"),
        ({"name": "gap_aware", "decay": -0.1}, "decay=-0.1 was given"),
        ({"name": "gap_aware", "epsilon": 0}, "epsilon=0 was given; it must be a number above 0"),
        (7, "correction=7 was given; known are"),
    ],
)
def test_impossible_corrections_are_refused(given: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_correction(given)


def test_a_correction_is_a_name_a_mapping_an_object_or_nothing() -> None:
    own = IgnoreTheOld()
    assert make_correction(None) is None
    assert make_correction(own) is own
    assert make_correction("gap_aware") == GapAware()
    assert make_correction({"name": "polynomial", "exponent": 2}) == Polynomial(2)


@pytest.mark.parametrize("correction", EVERY[2:], ids=lambda c: type(c).__name__)
def test_complex_parameters_are_refused_where_the_gradient_is_changed(
    correction: Correction,
) -> None:
    layout = Layout.of([("spectrum", torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(UserError, match=r"spectrum is of torch\.complex64"):
        correction.begin(Store(layout, 1, private_parameters=True))


# ---- workers of random speed, in virtual time ----------------------------------------------------


class Bowl:
    """f(w) = w^2 / 2."""

    def parameters(self) -> list[torch.Tensor]:
        return [vector(1.0)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [values[0].clone()]


@pytest.mark.parametrize("correction", [ByStaleness(), GapAware()], ids=lambda c: type(c).__name__)
@pytest.mark.slow
def test_a_rate_that_suits_one_worker_suits_32_of_random_speed(correction: Correction) -> None:
    """Uncorrected, 31 updates late on average, it blows up."""

    def ends_at(given: Correction | None) -> float:
        times = ServiceTimes("exponential")
        world = VirtualWorld(
            OnArrival(), 32, times, task=Bowl(), optimizer=sgd(0.9), correction=given
        )
        world.run(updates=3000)
        return abs(float(world.parameters()[0]))

    assert ends_at(correction) < 0.1 < 1e3 < ends_at(None)
