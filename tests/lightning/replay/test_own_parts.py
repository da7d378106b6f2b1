"""Records of runs from Python with parts of one's own, and paths given as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy, rehearse_fit, replay_fit
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.support.own_parts import Every, Largest, Quorum

Options = dict[str, Any]
PARTS: dict[str, Callable[[int], Options]] = {
    "policy": lambda number: {"policy": Quorum(number)},
    "exchange": lambda number: {"exchange": Every(number)},
    "update": lambda number: {"update": Largest(number / 100)},
}
EACH = pytest.mark.parametrize("part", PARTS)


def begun(**options: Any) -> tuple[Any, Regression, DataLoader[Any]]:
    torch.manual_seed(0)
    trainer = make_trainer(HybridStrategy(**options), 2, max_epochs=1)
    return trainer, Regression(), DataLoader(regression_data(24), 4)


@EACH
def test_a_run_is_replayed_with_a_part_of_the_same_class_and_arguments_alone(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, *fit = begun(record="run", **PARTS[part](2))
    trainer.fit(*fit)
    trainer, module, data = begun(**PARTS[part](2))
    assert replay_fit("run", trainer, module, train_dataloaders=data).equal
    trainer, module, data = begun(**PARTS[part](1))
    with pytest.raises(UserError, match=f"the run's {part} was .*tests.support.own_parts"):
        replay_fit("run", trainer, module, train_dataloaders=data)


def test_records_are_found_and_read_by_text_and_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, *fit = begun(record="run")
    trainer.fit(*fit)
    assert find_record("run") == find_record(Path("run")) == find_record("run/record.bin")
    record = read_record(str(find_record("run")))
    for given in ("run", Path("run"), "run/record.bin", record):
        trainer, module, data = begun()
        assert replay_fit(given, trainer, module, train_dataloaders=data).equal
    trainer, module, data = begun(policy=Quorum(1))
    assert rehearse_fit("run", trainer, module, train_dataloaders=data)["updates"] == 6
    with pytest.raises(UserError, match="run=nowhere: there is no such directory"):
        replay_fit("nowhere", *begun()[:2])


@pytest.mark.parametrize("given", ["backup", {"name": "backup", "k": 1}], ids=["name", "mapping"])
def test_parts_that_contradict_each_other_are_refused_by_the_trainer(given: Any) -> None:
    strategy = HybridStrategy(given, exchange="movement")
    with pytest.raises(UserError, match="exchange=movement was given with policy="):
        make_trainer(strategy, 2)
    make_trainer(HybridStrategy("backup", exchange="movement"), 1)  # none is ever late
