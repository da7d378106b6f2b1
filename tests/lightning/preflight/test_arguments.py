"""What a strategy takes: types, defaults and texts of its options, and what it refuses."""

from __future__ import annotations

import inspect
import pydoc
import re
from inspect import cleandoc
from pathlib import Path
from typing import Any, Unpack

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.strategy_arguments import (
    DEFAULTS,
    OPTIONS,
    LightningArguments,
    StrategyArguments,
)
from hybridtrain.engine.policies.bounded_staleness import BoundedStaleness
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import allows, hints

COMMON = Path(__file__).parents[3] / "conf" / "strategy" / "host" / "common.yaml"


def test_every_option_has_a_type_a_default_and_a_text() -> None:
    kinds = hints(StrategyArguments)
    assert kinds.keys() - hints(LightningArguments) == DEFAULTS.keys()
    assert all(allows(value, kinds[name]) for name, value in DEFAULTS.items())
    text = cleandoc(HybridStrategy.__doc__ or "").partition("Raises:")[0]
    told = re.findall(r"^    ([*\w]+): ", text, re.MULTILINE)
    assert told == [*OPTIONS]


def test_the_signature_names_the_policy_and_the_types_of_all_others() -> None:
    assert str(inspect.signature(HybridStrategy)) == (
        "(policy: 'Named' = 'hybrid', **options: 'Unpack[StrategyArguments]') -> 'None'"
    )
    assert hints(HybridStrategy)["options"] == Unpack[StrategyArguments]
    page = pydoc.plain(pydoc.render_doc(HybridStrategy))
    for name in OPTIONS:
        assert re.search(rf"^ \|      {name}: \S", page, re.MULTILINE), name


def test_each_option_of_a_strategy_is_an_option_of_the_command_line() -> None:
    names = re.findall(r"^([a-z]\w*):", COMMON.read_text(), re.MULTILINE)
    assert {*names, "policy"} == set(OPTIONS)


def test_the_policy_is_given_by_place_or_by_name() -> None:
    one, other = HybridStrategy("async"), HybridStrategy(policy="async", workers_per_device=2)
    assert repr(one.policy) == repr(other.policy) == "OnArrival()"
    assert (one.workers_per_device, other.workers_per_device) == (1, 2)


def test_options_of_lightnings_own_strategy_are_passed_on() -> None:
    plugin = object()
    assert vars(HybridStrategy(checkpoint_io=plugin))["_checkpoint_io"] is plugin


def test_a_number_beyond_those_of_float64_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"stop_grace_s=a whole number of .* must be a number from 0 on"
    ):
        HybridStrategy(stop_grace_s=10**400)


def test_what_is_given_twice_or_unknown_is_refused() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'policy'"):
        HybridStrategy("async", policy="hybrid")
    with pytest.raises(UserError, match=r"quite was given, .* it takes policy, exchange, update"):
        HybridStrategy(quite="another")


@pytest.mark.parametrize(
    "given", [4, {"number": 4}, {"number": 0, "visit": 2}, {"number": 2, "visit": 1.5}]
)
def test_shards_that_make_no_sense_are_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"data_shards.*(number|visit).* from 1 on"):
        HybridStrategy(data_shards=given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"policy": "ssp", "max_staleness": 4}, "policy=async; yours takes policy.lead"),
        ({"policy": "ssp", "led": 4}, r"did you mean policy.lead\?"),
        ({"policy": "backup", "k": 4}, r"did you mean policy.k\?"),
        ({"exchange": "elastic", "beta": 0.5}, r"did you mean exchange.beta\?"),
        ({"exchange": {"name": "movement"}, "n_push": 2}, "exchange=accumulated; yours takes"),
        ({"policy": BoundedStaleness(3), "max_staleness": 4}, r"policy=async; yours is an object"),
        (
            {"policy": {"name": "ssp", "max_staleness": 4}},
            "ssp takes lead, max_staleness is ",
        ),
        ({"policy": {"name": "ssp", "min_workers": 1}}, r"policy.min_workers .*mean min_workers\?"),
        (
            {"exchange": {"name": "movement", "k": 1}},
            r"exchange.k .*, a parameter of policy=",
        ),
        ({"policy": "hogwild", "optimizer_state": "private"}, "exchange=in_place"),
        ({"correction": "polynomial", "exponent": 2.0}, r"did you mean correction.exponent\?"),
        ({"on_failur": "stop"}, r"did you mean on_failure\?"),
    ],
)
def test_a_misplaced_or_misspelt_option_names_the_right_one(
    given: dict[str, Any], meant: str
) -> None:
    with pytest.raises(UserError, match=meant):
        HybridStrategy(**given)
