"""What a strategy takes: declared in groups, given flat."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from hybridtrain.options.strategy_arguments import (
    GROUPS,
    PLACES,
    LightningArguments,
    StrategyArguments,
)

COMMON = Path(__file__).parents[3] / "conf" / "strategy" / "host" / "common.yaml"


def test_every_field_of_a_group_has_a_place_and_a_text() -> None:
    names = [each.name for each in fields(StrategyArguments)]
    lightnings = [each.name for each in fields(LightningArguments)]
    assert sorted(names) == sorted([*PLACES, *lightnings])
    assert set(StrategyArguments.__bases__) == set(GROUPS)
    for group in GROUPS[:-1]:
        told = re.findall(r"^    (\w+): ", cleandoc(group.__doc__ or ""), re.MULTILINE)
        assert told == [each.name for each in fields(group)]


def test_each_is_in_the_signature_with_its_default_and_in_the_help() -> None:
    parameters = inspect.signature(HybridStrategy).parameters
    defaults = vars(StrategyArguments())
    assert [*parameters] == [*PLACES, "lightning"]
    assert all(parameters[name].default == defaults[name] for name in PLACES)
    assert parameters["on_failure"].annotation == Literal["stop", "continue", "restart"]
    page = pydoc.plain(pydoc.render_doc(HybridStrategy))
    for name in (*PLACES, r"\*\*lightning"):
        assert re.search(rf"^ \|      {name}: \S", page, re.MULTILINE), name
    assert page.index("Args:") < page.index("Raises:\n |      UserError")


def test_each_is_an_option_of_the_command_line() -> None:
    names = re.findall(r"^([a-z]\w*):", COMMON.read_text(), re.MULTILINE)
    assert {*names, "policy"} == set(PLACES)


def test_they_are_given_by_place_or_by_name() -> None:
    one, other = HybridStrategy("async", 2), HybridStrategy(policy="async", workers_per_device=2)
    assert repr(one.policy) == repr(other.policy) == "OnArrival()"
    assert one.workers_per_device == other.workers_per_device == 2


def test_lightnings_are_passed_on() -> None:
    plugin = object()
    assert vars(HybridStrategy(checkpoint_io=plugin))["_checkpoint_io"] is plugin


def test_what_is_given_twice_or_unknown_is_refused() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'policy'"):
        HybridStrategy("async", policy="hybrid")
    with pytest.raises(UserError, match=r"quite was given, .* it takes policy, workers_per_device"):
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
        ({"on_failur": "stop"}, r"did you mean on_failure\?"),
    ],
)
def test_a_misplaced_or_misspelt_option_names_the_right_one(
    given: dict[str, Any], meant: str
) -> None:
    with pytest.raises(UserError, match=meant):
        HybridStrategy(**given)
