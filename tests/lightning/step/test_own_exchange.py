"""The exchange of one's own in the documentation is local SGD, checkpoints included."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Regression, flat, make_trainer, regression_data

PAGE = Path(__file__).parents[3] / "docs" / "own_policy.md"


def documented(name: str) -> Any:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if f"class {name}(" in block), names)
    return names[name]()


# Where runs repeat to the bit.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "policy, workers", [("hybrid", 1), ("hybrid", 2), ("hybrid", 3), ("async", 1)]
)
def test_the_documented_exchange_of_ones_own_is_local_sgd(
    policy: str, workers: int, tmp_path: Path
) -> None:
    ends = []
    for exchange in (documented("EverySecond"), {"name": "movement", "every": 2}):
        torch.manual_seed(0)
        module = Regression()
        first, second = (
            make_trainer(HybridStrategy(policy, exchange=exchange), workers, max_epochs=epochs)
            for epochs in (1, 2)
        )
        data = DataLoader(regression_data(31), 4)
        first.fit(module, data)
        first.save_checkpoint(tmp_path / "middle.ckpt")
        second.fit(module, data, ckpt_path=tmp_path / "middle.ckpt")
        ends.append(flat(module))
    assert torch.equal(*ends)


def test_the_signs_of_gradients_are_those_of_sign_sgd() -> None:
    ends = []
    for exchange in (documented("MySigns"), "sign_sgd"):
        torch.manual_seed(0)
        module = Regression()
        trainer = make_trainer(HybridStrategy("hybrid", exchange=exchange), 3)
        trainer.fit(module, DataLoader(regression_data(31), 4))
        ends.append(flat(module))
    assert torch.equal(*ends)
