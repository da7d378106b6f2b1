"""What a user may write of exchanges that makes no sense: one line each, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtrain.engine.exchanges import begin_policy, exchange_of
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates.named import make_update, update_of
from hybridtrain.errors import UserError

WHOLE = "a whole number from 1 on"


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True, None])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("accumulated", "n_push"),
        ("accumulated", "n_fetch"),
        ("movement", "every"),
        ("elastic", "every"),
    ],
)
def test_numbers_of_steps_are_whole_and_from_1_on(name: str, option: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        exchange_of(make_policy("async"), {"name": name, option: value})
    said = str(error.value)
    assert f"exchange.{option}={value!r} was given; it must be {WHOLE}" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("policy", "exchange", "update", "fragments"),
    [
        ("hybrid", "movement", "LBFGS", ["update=lbfgs", "evaluates the loss several times"]),
        ("hogwild", "movement", None, ["exchange=movement", "policy=async"]),
        ("hogwild", None, "sgd", ["update=sgd", "exchange=in_place"]),
        (
            "grace",
            {"name": "movement", "every": {"longest": 8}},
            None,
            ["exchange.every.seconds_per_step=None", "as a run with every worker at work has"],
        ),
        ({"name": "k_async", "k": 4}, "movement", None, ["k=4 was given for 3 workers", "1 to 3"]),
        (
            "hybrid",
            {"name": "movement", "compress": {"name": "topk", "density": 0}},
            None,
            ["exchange.compress.density=0", "above 0 and up to 1"],
        ),
    ],
)
def test_parts_that_make_no_sense_say_so_in_a_line(
    policy: Any, exchange: Any, update: Any, fragments: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        made = make_policy(policy)
        chosen = exchange_of(made, exchange)
        update_of(chosen, make_update(update))
        begin_policy(made, chosen, 3)
    for fragment in fragments:
        assert fragment in str(error.value)
    assert "\n" not in str(error.value)
