"""What a hook changes in the layers (frozen, in which mode, buffers) is so after a run, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, flat, make_trainer, regression_data
from tests.picking import by_default


class Changed(Regression):
    """In its second epoch the first layer is frozen, a mode is another, and buffers are."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].mark = 0
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(False)
            self.net[1].eval()
            self.net[1].mark = 5
            self.grown, self.unsaved = torch.ones(3), self.unsaved + 1
            self.net[2].register_buffer("late", torch.ones(2))
            self.net[2].register_buffer("later", torch.ones(2), persistent=False)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


def loader() -> DataLoader[Any]:
    return DataLoader(regression_data(32), batch_size=4)


def layers(module: Changed) -> dict[str, Any]:
    return {
        "needs gradients": {n: p.requires_grad for n, p in module.named_parameters()},
        "modes": {name: layer.training for name, layer in module.named_modules()},
        "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers()},
        "saved": list(module.state_dict()),
        "mark": module.net[1].mark,
    }


def trained(strategy: str, workers: int, calls: str = "") -> Changed:
    module, trainer = Changed(), make_trainer(strategy, workers, max_epochs=2)
    for call in ("fit", *calls.split()):
        data = (loader(), loader()) if call == "fit" else (loader(),)
        getattr(trainer, call)(module, *data)
    return module


@pytest.mark.parametrize("calls", by_default(["", "validate test predict"], ""))
@pytest.mark.parametrize(
    "strategy", by_default(["hybrid", "async", "hogwild", "local_sgd"], "hybrid", "async")
)
def test_layers_are_as_after_training_on_one_device(strategy: str, calls: str) -> None:
    assert layers(trained(strategy, 2, calls)) == layers(trained("auto", 1, calls))


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "hogwild"], "async"))
def test_what_was_frozen_in_training_stays_so_in_the_next(strategy: str) -> None:
    module = trained(strategy, 2)
    first, last = flat(module.net[0]), flat(module.net[2])
    make_trainer(strategy, 2, max_epochs=1).fit(module, loader())
    assert torch.equal(flat(module.net[0]), first)
    assert not torch.equal(flat(module.net[2]), last)
