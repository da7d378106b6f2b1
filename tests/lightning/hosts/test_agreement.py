"""What hosts compare before they train together."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.engine.policies.basic import WaitForAll
from hybridtrain.errors import UserError
from hybridtrain.lightning.hosts import agreement, joining
from hybridtrain.lightning.hosts.agreement import (
    about_this_host,
    compare_configuration,
    described,
    differences,
)
from hybridtrain.lightning.hosts.cluster import Meeting
from hybridtrain.util.host_place import HostPlace
from tests.lightning.toys import make_trainer


@pytest.fixture(autouse=True)
def no_configuration() -> Iterator[None]:
    yield
    compare_configuration({})


def about(policy: Any = "hybrid", **options: Any) -> dict[str, Any]:
    trainer: Any = make_trainer(policy, 2, **options)
    found = about_this_host(trainer.strategy.run_setup, trainer, {})
    assert json.loads(json.dumps(found)) == found
    return found


def test_equal_hosts_do_not_differ() -> None:
    assert differences(about(), about()) is None


def test_another_host_hears_in_what_host_0_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = make_trainer("hybrid", 2)
    mine = about_this_host(trainer.strategy.run_setup, trainer, {})
    connection = Mock(about=mine | {"name": "far", "source": "x"})
    monkeypatch.setattr(joining, "dial", lambda *_: connection)
    monkeypatch.setattr(joining, "take_key", lambda *_: Meeting(Mock(), "far", 1))
    with (
        pytest.raises(UserError, match="host 0 does not fit: source is x on far"),
        joining.joined(trainer.strategy.run_setup, trainer, {}),
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


def test_trainers_models_and_data_are_compared() -> None:
    def seen(width: int = 2, samples: int = 8, **options: Any) -> dict[str, Any]:
        trainer: Any = make_trainer("hybrid", 2, **options)
        model = torch.nn.Linear(width, 1)
        loader = DataLoader(TensorDataset(torch.zeros(samples, 2)))
        given = {"model": model, "train_dataloaders": {"a": [loader]}, "val_dataloaders": loader}
        return about_this_host(trainer.strategy.run_setup, trainer, given) | {"name": "far"}

    assert differences(seen(), seen()) is None
    for other, match in (
        (seen(accumulate_grad_batches=2), "accumulate_grad_batches is 2 on far and 1 here; give"),
        (seen(gradient_clip_val=0.5), "gradient_clip_val is 0.5 on far and null here"),
        (seen(limit_val_batches=0), "limit_val_batches is 0 on far and 1.0 here"),
        (seen(3), "shapes of parameters is .*1, 3.* on far and .*1, 2.* here; make the same model"),
        (seen(samples=9), "samples of train_dataloaders is 9 on far and 8 here, .*the same data"),
    ):
        assert re.search(match, str(differences(seen(), other)))


def test_the_files_of_the_users_classes_are_compared(tmp_path: Path) -> None:
    digests = []
    for text in ("class Net: rate = 1", "class Net: rate = 2"):
        (tmp_path / "mine.py").write_text(text)
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        assert spec is not None and spec.loader is not None
        sys.modules["mine"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        digests.append(agreement._code_of(module.Net(), print, None))
    del sys.modules["mine"]
    assert digests[0]["mine.py"] != digests[1]["mine.py"] and digests[0].keys() == digests[1].keys()


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


def test_a_script_that_was_generated_on_each_host_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Spark's TorchDistributor does for a function, with the path of its pickle."""
    found = {}
    for folder in ("tmpk3x", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").touch()
        script = str(tmp_path / folder / "train.py")
        monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
        found[folder] = list(agreement._code_of())
    assert found == {"tmpk3x": [], "mine": ["train.py"]}


def test_another_host_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said, before = threading.Event(), joining.to_stderr
    monkeypatch.setattr(joining, "_NEWS_S", 0.01)
    monkeypatch.setattr(joining, "to_stderr", lambda text: (before(text), said.set()))
    monkeypatch.setattr(joining, "take_key", lambda *_: Meeting(Mock(), "far", 1))
    connection = Mock(about={})

    def dialled(*_: Any) -> Any:
        assert said.wait(60)
        return connection

    monkeypatch.setattr(joining, "dial", dialled)
    place = HostPlace(host=1, n_hosts=2, address="far", port=7)
    with joining.reached(place, None, {}):
        n_threads = threading.active_count()
    assert "host 1 waits for host 0 at far, port 7" in capfd.readouterr().err
    assert n_threads == threading.active_count()
