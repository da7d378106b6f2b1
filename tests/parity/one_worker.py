"""With one worker every strategy is one device: ``ddp`` with one process, which draws alike.

For each strategy: how equal the two must be, what is left out of the comparison, and what holds
instead. What a strategy refuses it refuses before training (:func:`refuses`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.case import Case, Grade
from tests.parity.cases import CASES
from tests.parity.compare import Verdict, compare
from tests.parity.harness import NEVER, Harness, Job

BOTH, REFUSED = "both refuse it", "refused"


@dataclass(frozen=True, slots=True)
class Claim:
    """What one worker of a strategy has in common with one device.

    ``only``: names that are compared, where not all are; ``but``: names that are not; ``why``.
    ``themes``: of the cases that are compared at all; none: of all. ``without``: not these.
    """

    expect: Grade = Grade.BITWISE
    but: tuple[str, ...] = ()
    why: str = ""
    only: tuple[str, ...] = ()
    themes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


# The shared queue has no length.
_QUEUE = ("*.counters.num_training_batches",)
_MASTERS = ("*.optimizer_states.*.masters.*", "*.optimizer_states.*.workers.*")
_SCHEDULES = ("*.checkpoint.lr_schedulers.*", "*.counters.current_epoch")
_LENGTH = "mini-batches come from a queue, whose length no loader knows"
_OWN = "a worker's movement is a difference, which is rounded"
_STEPS = "schedules count the worker's own steps, as on one device"
CLAIMS: dict[str, Claim] = {
    **dict.fromkeys(("hybrid", "backup", "k_async"), Claim()),
    **dict.fromkeys(
        ("synchronous", "async", "ssp", "grace", "hogwild"),
        Claim(but=_QUEUE, why=_LENGTH),
    ),
    **dict.fromkeys(
        ("k_batch_sync", "k_batch_async", "softsync"),
        Claim(but=_QUEUE, why=f"one mini-batch makes an update; {_LENGTH}"),
    ),
    "local_sgd": Claim(
        Grade.ROUNDING,
        _MASTERS,
        f"{_OWN}; a validation or checkpoint within an epoch sees the masters of the last exchange",
        without=(
            "callbacks/ModelCheckpoint, every four steps",
            "loops/val_check_interval, a number",
        ),
    ),
    "post_local_sgd": Claim(Grade.ROUNDING, _MASTERS, _OWN),
    "downpour": Claim(Grade.ROUNDING, (*_QUEUE, *_MASTERS), f"{_LENGTH}; {_OWN}"),
    **dict.fromkeys(
        ("diloco", "streaming_diloco"),
        Claim(why=f"an outer momentum; {_STEPS}", only=_SCHEDULES, themes=("schedulers",)),
    ),
    "easgd": Claim(why=f"a force to the centre; {_STEPS}", only=_SCHEDULES, themes=("schedulers",)),
    "sign_sgd": Claim(
        why="the optimizer gets the signs of the gradient", only=_SCHEDULES, themes=("schedulers",)
    ),
    "power_sgd": Claim(
        why="the optimizer gets a gradient of rank 4", only=_SCHEDULES, themes=("schedulers",)
    ),
    "pipe_sgd": Claim(
        why="behind the warm-up gradients are one update late",
        only=_SCHEDULES,
        themes=("schedulers",),
    ),
    "sandblaster": Claim(
        why="an epoch is one evaluation for a line search, not a step for each mini-batch",
        themes=("manual",),
    ),
    "async_diloco": Claim(
        why=f"an outer momentum; {_STEPS}", only=_SCHEDULES, themes=("schedulers",)
    ),
}
THEMES = ("schedulers", "manual")
CHOSEN = {
    *("optimizers/SGD, momentum", "optimizers/Adam", "optimizers/several groups, SGD"),
    *("optimizers/hyper-parameters changed by hand", "optimizers/LBFGS"),
    *("steps/clipping by norm", "steps/accumulation with an odd remainder"),
    *("steps/accumulation with clipping", "steps/gradients read while accumulating"),
    *("loops/max_steps", "loops/max_steps while accumulating", "loops/resumed from a checkpoint"),
    *("loops/val_check_interval, a number", "loops/a hook stops the training"),
    *("callbacks/ModelCheckpoint, every four steps", "callbacks/LearningRateMonitor"),
    *("callbacks/EarlyStopping", "precision/bf16-mixed with clipping", "logged/torchmetrics"),
}
assert CASES.keys() >= CHOSEN
ONE_WORKER = [case for case in CASES.values() if case.theme in THEMES or case.id in CHOSEN]


def judge(harness: Harness, case: Case, strategy: str) -> Verdict | str:
    """The verdict, or how the two ended where one of them failed."""
    ours, theirs = (harness.outcome(Job(case, each, 1)) for each in (strategy, "ddp"))
    if ours.error is not None or theirs.error is not None:
        return _ended(ours.error, theirs.error)
    claim = CLAIMS[strategy]
    ignore = (*NEVER, *case.ignore, *claim.but)
    return compare(ours.seen, theirs.seen, claim.only or case.facets, ignore, case.rtol)


def _ended(ours: str | None, theirs: str | None) -> str:
    if ours is not None and theirs is not None:
        return BOTH  # more steps than the case's schedule has
    if ours is not None and ours.startswith("UserError"):
        return REFUSED
    return f"failed: {ours}" if theirs is None else f"ddp alone failed: {theirs}"


def compared(case: Case, strategy: str) -> bool:
    """Whether there is anything to compare."""
    claim = CLAIMS[strategy]
    return case.id not in claim.without and (not claim.themes or case.theme in claim.themes)


def allowed(case: Case, strategy: str) -> Grade:
    """The worst grade."""
    return max(case.expect, CLAIMS[strategy].expect)


def refuses(case: Case, strategy: str) -> bool:
    """Whether the strategy says before training that it cannot do this."""
    own = strategy in ("local_sgd", "post_local_sgd", "downpour", "sandblaster")
    waits = strategy in ("hybrid", "backup", "k_async")
    if case.theme == "manual":
        return own
    if case.id == "loops/val_check_interval, a number":
        return not waits and not strategy.endswith("local_sgd")
    return case.id == "optimizers/LBFGS" and not waits


def good(case: Case, strategy: str, found: Verdict | str) -> bool:
    """Whether it is as claimed."""
    if isinstance(found, str):
        return found == BOTH or (found == REFUSED and refuses(case, strategy))
    return found.compared > 0 and found.grade <= allowed(case, strategy)


def cell(case: Case, strategy: str, found: Verdict | str) -> str:
    """In the table."""
    text = found if isinstance(found, str) else str(found.grade)
    return text if good(case, strategy, found) else f"**{text}**"
