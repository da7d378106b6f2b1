"""Messages name a part as the user has typed it."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest

from hybridtrain.engine.exchanges import begin_policy, make_exchange
from hybridtrain.engine.policies import make_policy
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("hybrid", "hybrid"),
        ({"name": "ssp", "lead": 4}, "{name: ssp, lead: 4}"),
        ({"name": "async", "max_staleness": None}, "async"),
        (
            {"name": "switch", "first": "hybrid", "then": {"name": "ssp", "lead": 3}},
            "{name: switch, then: {name: ssp, lead: 3}}",
        ),
    ],
)
def test_a_part_is_named_by_name_and_what_is_not_the_default(given: Any, said: str) -> None:
    policy = make_policy(given)
    assert [
        as_typed(p) for p in (policy, deepcopy(policy), pickle.loads(pickle.dumps(policy)))
    ] == [said] * 3


def test_a_refusal_shows_no_class() -> None:
    with pytest.raises(UserError) as caught:
        begin_policy(
            make_policy("synchronous"), make_exchange({"name": "movement", "every": 16}), 2
        )
    assert str(caught.value).startswith(
        "exchange={name: movement, every: 16} was given with policy=synchronous, but"
    )
