"""Check McMahan and Streeter (NIPS 2014) on late gradients with our optimizers.

Delays are in updates: a gradient that is d late was computed at the parameters of d updates ago, as
with d + 1 equal workers that take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtrain.engine.updates.delay_tolerant import AdaptiveRevision, AsyncAdaDA, DelayTolerant
from theory.law import AtMost, Law, Same

Make = Callable[[torch.nn.Parameter], torch.optim.Optimizer]
MakeAtRate = Callable[[torch.nn.Parameter, float], torch.optim.Optimizer]

RATES = (0.1, 0.2, 0.3, 0.5, 1.0)
DELAYS = (0, 100, 1000, 4000)


def revision(x: torch.nn.Parameter, rate: float) -> AdaptiveRevision:
    """AdaptiveRevision."""
    return AdaptiveRevision([x], rate)


def gradient_descent(x: torch.nn.Parameter, rate: float) -> torch.optim.Optimizer:
    """AsyncAda-GD: AdaGrad that knows of no delay."""
    return torch.optim.Adagrad([x], rate, initial_accumulator_value=1, eps=0)


def dual_averaging(x: torch.nn.Parameter, rate: float) -> AsyncAdaDA:
    """AsyncAda-DA."""
    return AsyncAdaDA([x], rate)


# ---- identities ---------------------------------------------------------------------------------


def gradients(n: int, seed: int = 0, size: int = 7) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(n, size, dtype=torch.float64, generator=drawn)


def start(size: int = 7) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))


def stepped(
    optimizer: DelayTolerant, x: torch.nn.Parameter, gradient: torch.Tensor, *late: int
) -> None:
    """One step with this gradient; ``late``: whose it is, and how late it is."""
    x.grad = gradient.clone()
    with torch.no_grad():
        optimizer.step_late(*late) if late else optimizer.step()


def from_adagrad(make: Callable[[Any], DelayTolerant], **options: float) -> float:
    """How far an optimizer and AdaGrad come apart in 20 steps in which nothing is late."""
    x, y = start(), start()
    ours, theirs = make(x), torch.optim.Adagrad([y], 0.1, **options)
    for number, gradient in enumerate(gradients(20)):
        ours.read(0)
        stepped(ours, x, gradient, *((0, 0) if number % 2 else ()))
        y.grad = gradient.clone()
        theirs.step()
    return float((x - y).detach().abs().max())


def from_adagrad_on_sums(rounds: int = 5, each: int = 6) -> float:
    """How far AdaptiveRevision on gradients of one reading, in any order, and AdaGrad on their sum
    come apart. They are positive: partial sums grow, so the maximum of the rule is not active."""
    x, y = start(), start()
    ours = AdaptiveRevision([x], 0.1)
    theirs = torch.optim.Adagrad([y], 0.1, initial_accumulator_value=1, eps=0)
    drawn = torch.Generator().manual_seed(0)
    for number in range(rounds):
        for worker in range(each):
            ours.read(worker)
        round_ = gradients(each, number).abs()
        for worker in torch.randperm(each, generator=drawn).tolist():
            stepped(ours, x, round_[worker], worker, worker)
        y.grad = round_.sum(0)
        theirs.step()
    return float((x - y).detach().abs().max())


def revision_identities() -> list[Law]:
    """Sections 3 and 4 of the paper."""
    group = "AdaptiveRevision"
    none = from_adagrad(lambda x: revision(x, 0.1), initial_accumulator_value=1, eps=0)
    return [
        AtMost(group, "delay 0: from AdaGrad", none, 1e-14),
        AtMost(group, "gradients of one reading: from AdaGrad on sums", from_adagrad_on_sums()),
    ]


# ---- sparse data --------------------------------------------------------------------------------


def zipf_loss(make: Make, delay: int, n: int = 20_000, d: int = 3_000) -> float:
    """Mean logistic loss of the second half of one pass over sparse words, gradients so late.

    Each sample has twelve words drawn by Zipf's law, and one that all have (the bias).
    """
    drawn = torch.Generator().manual_seed(0)
    shares = 1.0 / torch.arange(1.0, d)
    words = 1 + torch.multinomial(shares, n * 12, replacement=True, generator=drawn).view(n, 12)
    words = torch.cat([torch.zeros(n, 1, dtype=torch.long), words], dim=1)
    truth = torch.randn(d, generator=drawn)
    labels = torch.rand(n, generator=drawn) < torch.sigmoid(truth[words].sum(1))
    x = torch.nn.Parameter(torch.zeros(d))
    optimizer = make(x)
    seen = [torch.zeros(d) for _ in range(delay + 1)]
    total = 0.0
    for number, (inside, label) in enumerate(zip(words, labels.float(), strict=True)):
        worker = number % (delay + 1)
        score = seen[worker][inside].sum()
        if number >= n // 2:
            total += float(torch.nn.functional.softplus(score) - label * score)
        slope = (torch.sigmoid(score) - label).expand(len(inside))
        x.grad = torch.zeros(d).index_add_(0, inside, slope)
        with torch.no_grad():
            if isinstance(optimizer, DelayTolerant):
                optimizer.step_late(worker, delay)
                optimizer.read(worker)
            else:
                optimizer.step()
        seen[worker].copy_(x.detach())
    return total / (n - n // 2)


def long_delays(
    delays: Sequence[int] = DELAYS, rates: Sequence[float] = RATES, n: int = 20_000, d: int = 3_000
) -> list[Law]:
    """Figures 2 and 3 of the paper, on synthetic words: losses at rates tuned without a delay."""

    def loss(make: MakeAtRate, rate: float, delay: int) -> float:
        return zipf_loss(lambda x: make(x, rate), delay, n, d)

    def best(make: MakeAtRate, delay: int) -> float:
        return min(rates, key=lambda rate: loss(make, rate, delay))

    tuned = {make: best(make, 0) for make in (revision, gradient_descent, dual_averaging)}
    laws: list[Law] = []
    for delay in delays:
        ours, plain, averaged = (loss(make, rate, delay) for make, rate in tuned.items())
        said = f"D={delay}: {ours:.4f} / {plain:.4f}"
        most = 0.8 if delay >= 1000 else 1.005  # that of AdaGrad itself, where little is late
        laws.append(AtMost("loss of AsyncAda-GD", said, ours / plain, most))
        said = f"D={delay}: {ours:.4f} / {averaged:.4f}"
        laws.append(AtMost("loss of AsyncAda-DA", said, ours / averaged, most))
    late = best(revision, 1000)
    laws.append(Same("best rate", "AdaptiveRevision, D=0 and 1000", tuned[revision], late))
    return laws
