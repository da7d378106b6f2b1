"""The longest batch is taken once before training, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.module import SpeechModule
from tests.tasks.speech.speech_batches import Batches, batch_of, tiny_module, trainer


def snapshot(module: SpeechModule) -> list[torch.Tensor]:
    return [t.detach().clone() for t in [*module.parameters(), *module.buffers()]]


def everything_random() -> list[Any]:
    return [
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


def count_a_batch(net: torch.nn.Module, *_: Any) -> None:
    net.seen.add_(1)  # as BatchNorm counts


def test_rehearsal_takes_the_longest_batch_once_and_changes_nothing() -> None:
    data = Batches([batch_of(["ab"]), batch_of(["a longer one"])])
    module = tiny_module()
    module.net.register_buffer("seen", torch.zeros(1))
    sizes: list[int] = []
    module.net.register_forward_hook(count_a_batch)
    module.net.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[1]))
    fired: list[bool] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append(True))
    rehearse = module.on_fit_start

    def watched() -> None:
        before, random_before = snapshot(module), everything_random()
        rehearse()
        torch.testing.assert_close(snapshot(module), before, rtol=0, atol=0)
        assert everything_random() == random_before
        assert all(p.grad is None for p in module.parameters())

    module.on_fit_start = watched  # type: ignore[method-assign]
    trainer(max_epochs=1, limit_val_batches=0).fit(module, data)
    assert data.rehearsals == 1
    assert sizes == [48, 8, 48]  # the longest, then the epoch
    assert len(fired) == 2 * len(list(module.parameters()))  # only the two training steps


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_rehearsal_that_runs_out_of_memory_says_what_to_lower(error: Exception) -> None:
    data = Batches([batch_of(["ab"]), batch_of(["abc", "dad"])])
    module = tiny_module()

    def fail(*_: Any) -> None:
        raise error

    module.net.register_forward_hook(fail)
    with pytest.raises(UserError, match=r"2 samples of up to 12 frames.*lower data\.batch_size"):
        trainer(max_epochs=1).fit(module, data)


def test_an_error_that_is_not_about_memory_stays_itself() -> None:
    module = tiny_module()
    module.net.dense[0] = torch.nn.Linear(3, 24)
    with pytest.raises(RuntimeError, match="shapes"):
        trainer(max_epochs=1).fit(module, Batches([batch_of(["ab"])]))
