"""``task=hogwild model=cuts data=edges``: a graph is cut into parts, one for each terminal.

Each node has a point on the simplex, a terminal a corner of it. The objective is the weight of what
is cut, Σ weight · ‖x_u − x_v‖₁ / 2: a linear program, whose corners are cuts.

Legend: K classes, B edges of a mini-batch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from hybridtrain.errors import UserError
from hybridtrain.tasks.hogwild.text_examples import Batch, InPlaceData, Triples, read_triples
from hybridtrain.tasks.shared_tables import InPlaceModule, MakeOptimizer, array
from hybridtrain.util.option_types import Natural, Positive, Range, typed


class GraphCuts(InPlaceModule):
    """A point on the simplex for each node.

    Args:
        rate, decay, compiled, optimizer: see :class:`InPlaceModule`.
    """

    reads = "edges"
    places: nn.Embedding  # made by configure_model

    def __init__(
        self,
        rate: float = 0.1,
        decay: float = 0.95,
        compiled: bool | Literal["auto"] = "auto",
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(rate, decay, compiled, optimizer)
        self.nodes, self.terminals = 0, [0]
        self._fixed, self._corners = torch.empty(0), torch.empty(0)

    def know(self, data: EdgesData) -> None:
        self.nodes, self.terminals = data.nodes, list(data.terminals)
        self.check_size(self.nodes, len(self.terminals), 2 * len(data.edges))

    def configure_model(self) -> None:
        """As many rows as the graph has nodes."""
        if hasattr(self, "places"):
            return
        classes = len(self.terminals)
        self.places = nn.Embedding(self.nodes, classes, sparse=True)
        nn.init.constant_(self.places.weight, 1 / classes)
        self._fixed = torch.zeros(self.nodes, dtype=torch.bool)
        self._fixed[self.terminals] = True
        with torch.no_grad():
            self.places.weight[self.terminals] = torch.eye(classes)
        self._corners = self.places.weight.detach().clone()

    def points(self, nodes: Tensor) -> Tensor:
        """On the simplex, (B, K); terminals do not move."""
        free = on_simplex(self.places(nodes))
        fixed, corners = self._fixed.to(nodes.device), self._corners.to(nodes.device)
        return torch.where(fixed[nodes, None], corners[nodes], free)

    def cut(self, batch: Batch) -> Tensor:
        """The weight that is cut of each edge, (B,)."""
        weights, ones, others = batch
        return 0.5 * weights * (self.points(ones) - self.points(others)).abs().sum(1)

    def loss(self, batch: Batch) -> Tensor:
        """Mean over the edges."""
        return self.cut(batch).mean()

    def step_examples(self, batch: Batch) -> None:
        from hybridtrain.tasks.hogwild import hogwild_kernels

        weights, ones, others = (each.numpy() for each in batch)
        fixed = self._fixed.numpy()
        hogwild_kernels.cuts(array(self.places.weight), ones, others, weights, fixed, self.rate_now)

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/objective`` and ``val/cut``, each node in its largest class; per edge."""
        weights, ones, others = batch
        apart = self.points(ones).argmax(1) != self.points(others).argmax(1)
        found = {"val/objective": self.cut(batch).mean(), "val/cut": (weights * apart).mean()}
        self.log_dict(found, prog_bar=True, sync_dist=True, batch_size=len(weights))


def on_simplex(points: Tensor) -> Tensor:
    """The nearest points of the simplex to points (B, K)."""
    ordered = points.sort(dim=1, descending=True).values
    shifts = (ordered.cumsum(1) - 1) / torch.arange(1, points.shape[1] + 1, device=points.device)
    count = (ordered > shifts).sum(1, keepdim=True).clamp(min=1)
    return (points - shifts.gather(1, count - 1)).clamp(min=0)


class EdgesData(InPlaceData):
    """``u v weight`` from text files, or a square grid of as many regions as there are terminals.

    Args:
        files: text; None: a grid is made.
        terminals: a node for each class; None: of a grid that is made, its four corners.
        side: of the grid.
        batch_size: of each worker.
        seed: of the grid.
    """

    kind = "edges"

    @typed("data.")
    def __init__(
        self,
        files: str | list[str] | None = None,
        terminals: list[int] | int | None = None,
        side: Annotated[int, Range(4)] = 16,
        batch_size: Positive = 200,
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        if files is None:
            self.edges = made_grid(side, seed)
            terminals = terminals or [0, side - 1, side * (side - 1), side * side - 1]
            rank_zero_info(f"A grid of {side} × {side} nodes was made; data.files=... reads yours")
        else:
            self.edges = read_triples(files, ("u", "v", "weight"))
        self.nodes = int(max(self.edges.ones.max(), self.edges.others.max())) + 1
        self.terminals = [terminals] if isinstance(terminals, int) else list(terminals or [])
        _check(self.terminals, self.nodes, float(self.edges.values.min()))
        self.trained = self.validated = self.edges


def _check(terminals: list[int], nodes: int, lightest: float) -> None:
    if len(set(terminals)) < 2:
        raise UserError(f"data.terminals={terminals}: give at least two nodes, one for each class")
    if not all(0 <= node < nodes for node in terminals):
        raise UserError(f"data.terminals={terminals}: the graph has the nodes 0 to {nodes - 1}")
    if lightest < 0:
        raise UserError(f"an edge has the weight {lightest}; give weights of at least 0")


def made_grid(side: int, seed: int) -> Triples:
    """Edges of weight about 1 within a quarter of the grid, 0.02 from one quarter to the next."""
    random = np.random.default_rng(seed)
    node = np.arange(side * side).reshape(side, side)
    ones = np.concatenate([node[:, :-1].ravel(), node[:-1].ravel()])
    others = np.concatenate([node[:, 1:].ravel(), node[1:].ravel()])
    half = side // 2
    quarter = (node // side >= half) * 2 + (node % side >= half)
    across = quarter.ravel()[ones] != quarter.ravel()[others]
    weights = np.where(across, 0.02, 1.0) * random.uniform(0.5, 1.5, len(ones))
    return Triples(weights.astype(np.float32), ones, others)
