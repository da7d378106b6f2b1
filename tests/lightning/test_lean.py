"""Lightning's loops cost less in a worker, and nothing else about them changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler

from hybridtrain.lightning.hooks.faster_hooks import speed_up_hooks

SIGNATURE = training_epoch_loop.is_param_in_hook_signature


@pytest.fixture(autouse=True)
def lean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a worker does to its own process, taken back."""
    profile = PassThroughProfiler.profile
    had = "__setattr__" in vars(pl.LightningModule)
    monkeypatch.setattr(training_epoch_loop, "is_param_in_hook_signature", SIGNATURE)
    speed_up_hooks()
    yield
    PassThroughProfiler.profile = profile  # type: ignore[method-assign]
    if not had:
        del pl.LightningModule.__setattr__


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))


def test_a_modules_attributes_are_what_they_are_to_torch() -> None:
    module = Module()
    assert dict(module.named_parameters()).keys() == {"scale", "layer.weight", "layer.bias"}
    module.layer = torch.nn.Linear(3, 1)
    module.seen = torch.ones(1)
    assert module.state_dict()["layer.weight"].shape == (1, 3) and module.state_dict()["seen"] == 1
    with pytest.raises(TypeError, match="cannot assign"):
        module.scale = 3.0  # type: ignore[assignment]
    module._current_fx_name = "training_step"
    assert module._current_fx_name == "training_step"
    assert vars(module)["_current_fx_name"] == "training_step"


class Watching(torch.nn.Module):
    """Notes which of its attributes are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("names", []).append(name)
        super().__setattr__(name, value)


class First(Watching, Module):
    pass


class Last(Module, Watching):
    pass


@pytest.mark.parametrize("kind", [First, Last])
def test_a_module_may_watch_its_own_attributes(kind: type[Any]) -> None:
    module = kind()
    module._current_fx_name = "training_step"
    assert "layer" in module.names and "layer" in module._modules
    assert module._current_fx_name == "training_step"


def test_only_the_profiler_that_does_nothing_is_spared() -> None:
    class Counting(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            actions.append(action_name)

    actions: list[str] = []

    with PassThroughProfiler().profile("one"), PassThroughProfiler().profile("one"):
        pass
    with Counting().profile("two"):
        assert actions == ["two"]


def test_a_signature_is_read_once_of_each_function_and_means_what_it_means_to_lightning() -> None:
    class Without(Module):
        def training_step(self, batch: Any) -> None:
            pass

    class With(Module):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

    asked = training_epoch_loop.is_param_in_hook_signature
    assert asked is not SIGNATURE
    replaced = With()
    vars(replaced)["training_step"] = lambda batch: None
    for module in (Without(), With(), Without(), replaced, With()):
        for explicit, least in ((False, 2), (True, None), (False, None)):
            rest = (module.training_step, "batch_idx", explicit, least)
            assert asked(*rest) == SIGNATURE(*rest)
