"""What hosts compare before they train together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from hybridtrain.errors import UserError
from hybridtrain.lightning.hosts import agreement, joining
from hybridtrain.lightning.hosts.agreement import (
    about_this_host,
    compare_configuration,
    described,
    differences,
)
from hybridtrain.lightning.hosts.cluster import Meeting
from hybridtrain.policies.basic import WaitForAll
from tests.lightning.toys import make_trainer


@pytest.fixture(autouse=True)
def no_configuration() -> Iterator[None]:
    yield
    compare_configuration({})


def about(policy: Any = "hybrid", **options: Any) -> dict[str, Any]:
    strategy: Any = make_trainer(policy, 2, **options).strategy
    found = about_this_host(strategy)
    assert json.loads(json.dumps(found)) == found
    return found


def test_equal_hosts_do_not_differ() -> None:
    assert differences(about(), about()) is None


def test_another_host_hears_in_what_host_0_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = make_trainer("hybrid", 2).strategy
    mine = about_this_host(strategy)
    connection = Mock(about=mine | {"name": "far", "source": "x"})
    monkeypatch.setattr(joining, "dial", lambda *_: connection)
    monkeypatch.setattr(joining, "take_key", lambda *_: Meeting(Mock(), "far", 1))
    with (
        pytest.raises(UserError, match="host 0 does not fit: source is x on far"),
        joining.joined(strategy),
    ):
        pass
    connection.close.assert_called_once()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"versions": {"torch": "0.1"}}, "torch is 0.1 on far and .* here; install the same"),
        ({"source": "x"}, "source is x on far .*the digest of its files differs"),
        ({"workers": 3}, "workers is 3 on far and 2 here; .*trainer.devices"),
        ({"num_nodes": 3}, "num_nodes is 3 on far and 1 here"),
        ({"options": {"exchange": '"elastic"'}}, "exchange is .*elastic.* on far and null here"),
        ({"configuration": {"seed": "1"}}, "seed is 1 on far and None here; .*same command"),
    ],
)
def test_the_first_difference_is_named(change: dict[str, Any], match: str) -> None:
    mine = about()
    theirs = mine | {"name": "far"}
    for part, value in change.items():
        theirs[part] = mine[part] | value if isinstance(value, dict) else value
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(differences(mine, theirs))


def test_a_host_may_have_its_own_paths_and_threads_but_no_other_options() -> None:
    given = {"hosts_key": "/k", "threads_per_worker": 1, "record": None}
    options = about()["options"]
    assert not options.keys() & given.keys() and "on_failure" in options
    compare_configuration(
        {"seed": 1, "run_dir": "a", "strategy": {"hosts_key": "b", "policy": {"name": "ssp"}}}
    )
    assert about()["configuration"] == {"seed": "1", "strategy.policy.name": '"ssp"'}


def test_three_differences_are_shown_and_the_others_counted() -> None:
    mine = {"configuration": {}}
    theirs = {"name": "far", "configuration": dict.fromkeys("abcde", "1")}
    assert "c is 1 on far" in (said := str(differences(mine, theirs))) and "d is" not in said
    assert "and 2 more" in said


def test_objects_are_described_alike_in_two_processes() -> None:
    assert described(WaitForAll()) == described(WaitForAll()) and "0x" not in described(
        WaitForAll()
    )
    assert described(print) == '"builtins.print"'
    assert described("x" * 99) != described("x" * 98 + "y")
    loop: list[Any] = []
    loop.append(loop)
    assert described(loop) == "builtins.list"
    assert agreement._digest_of_source() == agreement._digest_of_source()
