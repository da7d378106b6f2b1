"""One worker of any strategy leaves what one device leaves, or what else is claimed."""

from __future__ import annotations

import pytest

from hybridtrain.engine.policies import STRATEGIES
from tests.parity.case import Case
from tests.parity.cases import CASES
from tests.parity.harness import Harness
from tests.parity.one_worker import CLAIMS, ONE_WORKER, compared, good, judge
from tests.picking import but_slow

BY_DEFAULT = {
    ("manual/a scheduler stepped by hand", "synchronous"),
    ("steps/accumulation with clipping", "async"),
    ("schedulers/LambdaLR per step", "downpour"),
    ("manual/GAN, the generator every third time", "hogwild"),
    ("schedulers/StepLR, every second step", "easgd"),
}


def test_every_strategy_makes_a_claim() -> None:
    assert CLAIMS.keys() >= set(STRATEGIES) - {"switch"}  # it is one policy, then another
    assert {case for case, _ in BY_DEFAULT} <= CASES.keys()


@pytest.mark.wide
@pytest.mark.sampled(40)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "strategy"),
    but_slow(
        [(c, s) for c in ONE_WORKER for s in CLAIMS if compared(c, s)],
        lambda each, n: (each[0].id, each[1]) not in BY_DEFAULT,
    ),
    ids=lambda each: each.id if isinstance(each, Case) else each,
)
def test_one_worker_is_one_device(harness: Harness, case: Case, strategy: str) -> None:
    found = judge(harness, case, strategy)
    assert good(case, strategy, found), found if isinstance(found, str) else found.explain()
