"""The configuration files of the speech models, as the command line composes them."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.hydra_config import compose_config
from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.decoding import DecoderOptions
from hybridtrain.tasks.speech.module import SpeechModule, rise_and_fall
from hybridtrain.tasks.speech.nets import DeepSpeechPaper, DeepSpeechSTT


def config(*overrides: str) -> DictConfig:
    return compose_config(["task=speech", "run_dir=unused", *overrides])


def build(*overrides: str) -> SpeechModule:
    module = instantiate(config(*overrides).model)
    assert isinstance(module, SpeechModule)
    return module


def test_speech_is_the_small_stt_model_with_a_scheduled_optimizer() -> None:
    module = build()
    assert isinstance(module.net, DeepSpeechSTT)
    made = module.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.Adam)
    assert made["lr_scheduler"]["interval"] == "epoch"


def test_one_override_makes_the_published_model() -> None:
    module = build("model.net.width=2048")
    assert sum(p.numel() for p in module.parameters()) == 47_233_053


def test_the_paper_model_takes_the_papers_features() -> None:
    module = build("experiment=paper_2014", "model.net.width=8")
    assert isinstance(module.net, DeepSpeechPaper)
    assert module.net.dense[0][0].in_features == 81 * 19
    assert module.frames_per_output == 2  # of 10 ms
    assert module.hparams["net"]["stride"] == 2


def test_the_paper_model_looks_every_20_ms_whatever_the_frames() -> None:
    assert build("model=paper", "model.net.width=8").frames_per_output == 1
    assert build("model=paper", "data.features.step_s=0.005").frames_per_output == 4
    assert build("model=paper", "model.net.stride=2").frames_per_output == 2


def test_the_alphabet_is_that_of_the_data() -> None:
    module = build("data.alphabet=abc", "model.net.width=8")
    assert module.alphabet.symbols == "abc"
    assert module.net.output.out_features == 4


def test_the_config_lists_every_option_with_its_default() -> None:
    for name in ("stt", "paper"):
        decoder = OmegaConf.to_container(config(f"model={name}").model.decoder)
        assert decoder == {f.name: f.default for f in fields(DecoderOptions)}


def factors(epochs: int | None, rise: int, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, seen = rise_and_fall(optimizer, epochs, rise), []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("epochs", "rise", "expected"),
    [
        (6, 2, [1 / 3, 2 / 3, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
        (2, 0, [1.0, 0.5, 0.0]),
        (None, 1, [0.5, 1.0, 1.0, 1.0]),
        (-1, 0, [1.0, 1.0]),
        (1, 1, [0.5, 1.0]),
    ],
)
def test_learning_rate_rises_then_falls_to_zero_at_the_end(
    epochs: int | None, rise: int, expected: list[float]
) -> None:
    assert factors(epochs, rise, len(expected)) == pytest.approx(expected, abs=1e-6)


def test_a_run_that_goes_on_follows_its_new_end() -> None:
    make: Any = partial(torch.optim.SGD, [torch.zeros(1, requires_grad=True)], lr=1.0)
    first = rise_and_fall(make(), 4, 0)
    for _ in range(2):
        first.optimizer.step()
        first.step()
    longer = rise_and_fall(make(), 8, 0)
    longer.load_state_dict(first.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr() == pytest.approx(
        [0.5 * (1 + torch.cos(torch.tensor(3 * torch.pi / 8)).item())]
    )


def test_a_negative_rise_is_named() -> None:
    with pytest.raises(UserError, match="rise=-1"):
        rise_and_fall(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3, -1)
