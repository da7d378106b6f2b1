"""Clusters can be told apart, an epoch may go through them several times; nonsense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.clusters import ClustersData, ClustersModule


def test_an_epoch_has_every_point_in_every_pass() -> None:
    data = ClustersData(dimensions=8, classes=3, clusters=2, points=10, passes=3, batch_size=4)
    points = torch.cat([x for x, _ in data.train_dataloader()])
    assert len(points) == 30 and len(points.unique(dim=0)) == 10


def test_the_module_learns_to_tell_clusters_apart() -> None:
    data = ClustersData(dimensions=32, noise=0.05, points=256, val_points=64)
    torch.manual_seed(0)
    module = ClustersModule(dimensions=32, hidden=16)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    points, classes = data.trained.datasets[0].tensors  # type: ignore[attr-defined]
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(points), classes).backward()
        optimizer.step()
    points, classes = data.validated.tensors
    assert (module(points).argmax(1) == classes).float().mean() > 0.95


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"passes": 0}, "data.passes=0 .* from 1 on"),
        ({"noise": -1.0}, "data.noise=-1.0 .* from 0 on"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ClustersData(**given)
