"""Several optimizer steps in one mini-batch: all of them count or none, and its samples once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from tests.lightning.metamorphic import strategies
from tests.lightning.toys import make_trainer
from tests.picking import but_slow

N, SIZE, EPOCHS = 14, 2, 2
LONGEST_S = 0.1


class Counting(pl.LightningModule):
    """Says, for each step of a mini-batch, how many updates each sample was part of.

    Args:
        steps: the numbers of the optimizers that a mini-batch steps, in their order.
    """

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.w = torch.nn.ParameterList([torch.zeros(LONGEST, N) for _ in range(2)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for place, number in enumerate(self.steps):
            optimizers[number].zero_grad()
            self.manual_backward(-self.w[number][place, batch].sum())
            self.be_late()
            optimizers[number].step()

    def be_late(self) -> None:
        """All but worker 0 wait, for some time, until others have made an update."""
        if self.global_rank == 0:
            return
        client = self.trainer.strategy.client
        before, until_s = client.stats()["updates"], time.monotonic() + LONGEST_S
        while client.stats()["updates"] == before and time.monotonic() < until_s:
            time.sleep(0.001)

    def configure_optimizers(self) -> Any:
        # Adam without memory moves an element by one wherever its gradient is not zero.
        return [torch.optim.Adam([w], lr=1.0, betas=(0.0, 0.0), eps=1e-30) for w in self.w]


# The optimizers that a mini-batch steps, one after the other.
WAYS = {
    "once": (0,),
    "two": (0, 1),
    "second first": (1, 0),
    "only second": (1,),
    "twice": (0, 0),
    "critic": (1, 1, 1, 0),
}
LONGEST = max(map(len, WAYS.values()))
DROPPING = [name for name in strategies.ALL if strategies.drops(name)]
CELLS = [
    (name, workers, way)
    for name in strategies.ALL
    for workers in (1, 2, 3)
    for way in WAYS
    if "two" in strategies.kinds(name, workers)
]


def _is_slow(cell: tuple[str, int, str], number: int) -> bool:
    name, workers, way = cell
    if name in DROPPING:
        return (workers, way) not in {(2, "two"), (3, "critic")}
    return number % 23 != 0


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "workers", "way"), but_slow(CELLS, _is_slow))
def test_each_sample_counts_once_however_many_steps_there_are(
    name: str, workers: int, way: str
) -> None:
    module, strategy = Counting(WAYS[way]), strategies.make(name, workers)
    trainer = make_trainer(strategy, workers, max_epochs=EPOCHS)
    trainer.fit(module, DataLoader(torch.arange(N), SIZE, shuffle=True))
    for place, number in enumerate(WAYS[way]):
        counts = module.w[number][place].detach().round()
        if strategy.requirements.in_place:  # whose steps may be lost to one another
            assert counts.max() <= EPOCHS
        else:
            assert counts.tolist() == [EPOCHS] * N
    assert strategy.run_stats()["samples"] == EPOCHS * N
