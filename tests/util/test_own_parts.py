"""Parts of the user's own: made from ``_target_``, described by class and arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy, Server
from hybridtrain.engine.exchanges import StepsOwnParameters, make_exchange
from hybridtrain.engine.exchanges.gradient import Gradient
from hybridtrain.engine.exchanges.sign_sgd import Signs
from hybridtrain.engine.policies import FirstK, Needs, Switch, make_policy
from hybridtrain.engine.policies.warm_start import WarmStart
from hybridtrain.engine.updates.named import make_update
from hybridtrain.engine.updates.staleness import Correction, make_correction
from hybridtrain.errors import UserError
from hybridtrain.util.own_parts import identity

HERE = __name__


class Mine:
    def __init__(self, least: int = 2, rule: Any = None) -> None:
        self.least, self._rule = least, rule

    def begin(self, n_workers: int) -> Needs:
        self.pushed = set(range(n_workers))
        return Needs(whole_rounds=True)

    def on(self, fact: Any) -> list[Any]:
        return []


class Slotted(Mine):
    __slots__ = ("least",)

    def __init__(self, least: int) -> None:
        self.least = least


class Otherwise(Mine):
    """Keeps its argument under another name."""

    def __init__(self, least: int) -> None:
        self.at_least = least


class Spoken(Mine):
    def __repr__(self) -> str:
        return f"at least {self.least}"


@dataclass
class Data(Mine):
    least: int = 2
    rule: Any = None


class Own(StepsOwnParameters):
    def __init__(self, every: int = 2) -> None:
        self.every = every


class Rule:
    least = 1

    def merge(self, parts: Any) -> Any:
        return parts[0].gradients


class Late(Correction):
    def __init__(self, by: float = 0.5) -> None:
        self.by = by


class MySigns(Signs):
    pass


class Encoded(Gradient):
    compress = MySigns()


class Patient(FirstK):
    """Inherits a ``repr`` that does not know its argument."""

    def __init__(self, hours: int) -> None:
        super().__init__(k=1)
        self.hours = hours


class PatientData(Data):
    def __init__(self, hours: int) -> None:
        super().__init__()
        self.hours = hours


def halved(values: Any, k: int = 2) -> Any:
    return values


MADE: list[tuple[Any, Any, str]] = [
    (Mine(3), Mine(4), "Mine(least=3, rule=None)"),
    (Mine(3, rule=halved), Mine(3, rule=len), "Mine(least=3, rule={}.halved)"),
    (Mine(rule=partial(halved, k=1)), Mine(), "Mine(least=2, rule={}.halved(k=1))"),
    (Mine(rule=[Mine(1)]), Mine(), "Mine(least=2, rule=[{}.Mine(least=1, rule=None)])"),
    (Mine(rule={"a": Rule()}), Mine(), "Mine(least=2, rule={{'a': {}.Rule()}})"),
    (Slotted(3), Slotted(4), "Slotted(least=3)"),
    (Otherwise(3), Otherwise(4), "Otherwise(at_least=3)"),
    (Own(3), Own(4), "Own(every=3)"),
    (Late(0.1), Late(0.2), "Late(by=0.1)"),
    (Patient(3), Patient(4), "Patient(hours=3)"),
    (PatientData(3), PatientData(4), "PatientData(hours=3)"),
    (Encoded(), Gradient(), "Encoded(compress=MySigns())"),
]


@pytest.mark.parametrize(("one", "other", "said"), MADE, ids=[said for *_, said in MADE])
def test_a_part_is_described_by_its_class_and_arguments(one: Any, other: Any, said: str) -> None:
    assert identity(one) == f"{HERE}.{said.format(HERE)}" != identity(other)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Spoken(4), "at least 4"),
        (Data(4), "Data(least=4, rule=None)"),
        (Data(4, Rule()), f"Data(least=4, rule={HERE}.Rule())"),
        (Gradient(compress=MySigns()), "Gradient(compress=MySigns())"),
        (make_policy("hybrid"), "WaitForAll()"),
        (make_policy({"name": "backup", "k": 2}), repr(make_policy({"name": "backup", "k": 2}))),
        (
            Switch(Mine(), make_policy("async"), at_update=3),
            f"Switch(first={HERE}.Mine(least=2, rule=None), then=OnArrival(), at_update=3, "
            "patience=None, min_delta=0.0)",
        ),
        (WarmStart(Mine(5), 2), f"WarmStart(policy={HERE}.Mine(least=5, rule=None), updates=2)"),
    ],
    ids=["repr", "dataclass", "of objects", "codec", "hybrid", "backup", "switch", "warm start"],
)
def test_a_text_of_its_own_and_those_of_parts_of_parts(part: Any, said: str) -> None:
    assert identity(part) == said


def test_a_policy_that_has_begun_is_the_same_policy() -> None:
    begun = Mine(3)
    begun.begin(4)
    assert identity(begun) == identity(Mine(3))


def test_an_object_that_holds_itself_and_one_of_c_have_a_description() -> None:
    part = Mine(rule=[torch.Generator()])
    part.least = part  # type: ignore[assignment]
    assert "0x" not in identity(part) and "Generator" in identity(part)


def test_a_class_of_a_script_is_called_as_its_module(tmp_path: Path) -> None:
    code = "from {} import identity\nclass Mine: pass\nif __name__ == '__main__':\n    "
    code = code.format(identity.__module__) + "print(identity(Mine()))\n"
    (tmp_path / "script.py").write_text(code)
    for how in (["script.py"], ["-m", "script"]):
        done = subprocess.run(
            [sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "script.Mine()\n"


# ---- made from _target_, refused as a class ------------------------------------------------------

MAKERS: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("policy", make_policy, Mine),
    ("exchange", make_exchange, Encoded),
    ("update", make_update, Rule),
    ("correction", make_correction, Late),
]
EACH = pytest.mark.parametrize(("part", "make", "kind"), MAKERS, ids=[each[0] for each in MAKERS])


@EACH
def test_each_part_is_made_from_its_target(part: str, make: Any, kind: type) -> None:
    target = {"_target_": f"{HERE}.{kind.__name__}"}
    made = make(target)
    assert isinstance(getattr(made, "merge", None) or made, kind)
    options: dict[str, Any] = {"policy": "async", part: target}
    strategy = HybridStrategy(**options)
    assert f"{HERE}.{kind.__name__}(" in identity(getattr(strategy, part))


@EACH
def test_a_class_in_place_of_an_object_is_one_line(part: str, make: Any, kind: type) -> None:
    line = rf"{part}={kind.__name__} was given, which is a class; write {kind.__name__}\(\)"
    options: dict[str, Any] = {part: kind}
    for refuse in (
        lambda: make(kind),
        lambda: HybridStrategy(**options),
        lambda: Server(torch.zeros(2), **options),
    ):
        with pytest.raises(UserError, match=line):
            refuse()


def test_a_class_of_optimizers_is_told_where_it_belongs() -> None:
    with pytest.raises(UserError, match=r"update=SGD was given.*configure_optimizers"):
        HybridStrategy(update=torch.optim.SGD)


def test_arguments_are_made_from_their_own_targets() -> None:
    inner = {"_target_": f"{HERE}.Mine", "least": 1}
    made = make_policy({"_target_": f"{HERE}.Mine", "rule": [{"a": inner}]})
    assert isinstance(made, Mine)
    assert identity(made._rule) == f"[{{'a': {HERE}.Mine(least=1, rule=None)}}]"
    switch = make_policy({"name": "switch", "first": inner, "at_update": 2})
    assert isinstance(switch, Switch) and isinstance(switch.first, Mine)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"_target_": f"{HERE}.Mine", "lest": 1}, "policy: .*Mine refuses its arguments: .*'lest'"),
        ({"_target_": f"{HERE}.Rule"}, "which is no Policy: it lacks begin, on"),
        ({"_target_": f"{HERE}.Nobody"}, "Nobody cannot be imported"),
        ({"_target_": "nowhere_at_all.Mine"}, "no module 'nowhere_at_all' to import .*PYTHONPATH"),
        ({"_target_": "Mine"}, "give package.Class"),
    ],
    ids=["argument", "kind", "class", "module", "no module"],
)
def test_a_target_that_makes_no_policy_is_one_line(target: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        HybridStrategy(target)


def test_a_module_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", "/some/where")
    with pytest.raises(UserError) as refused:
        make_policy({"_target_": "nowhere_at_all.Mine"})
    said = str(refused.value)
    assert f"looked in {tmp_path}" in said and "PYTHONPATH=/some/where" in said
