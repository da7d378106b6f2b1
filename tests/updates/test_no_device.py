"""Where the server steps an optimizer of torch's, nothing asks for a device.

Torch's optimizers look whether a CUDA graph is being captured, which would initialise CUDA in the
calling process: workers of a later run could not be forked any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.support.rows import make_pair

Groups = list[list[torch.nn.Parameter]]
OPTIM = torch.optim


class AskedForADevice(Exception):
    """By an optimizer."""


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: torch.optim.Optimizer) -> None:
        raise AskedForADevice

    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, name, ask, raising=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        partial(OPTIM.AdamW, fused=False),
        partial(OPTIM.AdamW, foreach=True),
        partial(OPTIM.NAdam, lr=0.1),
        partial(OPTIM.Adafactor, lr=0.1),
    ],
)
def test_a_step_in_the_server_asks_for_no_device(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, no_device: None
) -> None:
    pair = make_pair(lambda groups: kind(groups[0]), [[(4, 8), (32,)]], dtype=dtype)
    before = pair.masters()
    with pytest.raises(AskedForADevice):  # torch's own, which comes behind the server's
        pair.step(pair.gradients(torch.Generator().manual_seed(0)))
    assert all(not torch.equal(old, new) for old, new in zip(before, pair.masters(), strict=True))
