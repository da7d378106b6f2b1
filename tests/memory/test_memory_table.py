"""The table in docs/memory.md is what is really allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.engine.options.schemes import SCHEMES
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.policies.registry import POLICIES
from hybridtrain.engine.updates.flat.flat_update import FlatUpdate
from hybridtrain.engine.updates.kernels import kernel_for
from tests.picking import by_default
from tests.support.served import Served

ROOT = Path(__file__).parents[2]
P = 1 << 20  # parameters
SPECS: dict[str, Any] = {"switch": {"name": "switch", "at_update": 5}}


def table() -> dict[str, dict[str, str]]:
    """By strategy and column."""
    lines = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    head = cells[0]
    return {row[0]: dict(zip(head, row, strict=True)) for row in cells[2:]}


def resident() -> int:
    """Bytes of anonymous and shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return sum(int(found[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))


def allocated(served: Served) -> int:
    """The sizes of the arena, and of the state."""
    n_bytes: int = served.store.arena.n_bytes
    n_bytes += sum(arena.n_bytes for arena in served.store.lending.arenas.values())
    for update in served.server.optimizers.updates:
        if isinstance(update, FlatUpdate):
            n_bytes += sum(flat.nbytes for flat in update.flats.values())
    return n_bytes


def push_from_all(served: Served) -> None:
    """Everybody fills its row; then whatever an optimizer keeps is there."""
    for worker in range(served.n_workers):
        served.push(worker, 1e-3)


SGD: Callable[..., Any] = partial(torch.optim.SGD, lr=0.1)
ADAM: Callable[..., Any] = partial(torch.optim.Adam, lr=0.1)
COLUMNS = [
    ("with SGD, W=2", 2, SGD),
    ("with Adam, W=2", 2, ADAM),
    ("with Adam, W=4", 4, ADAM),
]


def test_the_table_has_every_strategy_there_is() -> None:
    names = {file.stem for file in (ROOT / "conf" / "strategy").glob("*.yaml")}
    own = SCHEMES.keys()  # state in workers' own memory: said below the table
    assert table().keys() == names - {"ddp"} - own == POLICIES.keys()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    by_default(POLICIES, "hybrid", "async", "backup", "k_batch_async", "hogwild", "synchronous"),
)
@pytest.mark.parametrize(("column", "n_workers", "optimizer"), by_default(COLUMNS, COLUMNS[-1]))
def test_as_many_bytes_are_allocated_as_the_memory_table_says(
    name: str, column: str, n_workers: int, optimizer: Callable[..., Any]
) -> None:
    gc.collect()
    before = resident()
    policy = make_policy(SPECS.get(name, name))
    served = Served(n_workers, policy, [torch.zeros(P)], [optimizer])
    push_from_all(served)
    expected = int(table()[name][column]) * P
    assert expected <= allocated(served) <= expected + 2**16
    mine = 8 * P  # the test's own tensors of this size: what it begins with, and a copy
    # There torch's own step makes temporaries, and a state that moves away: malloc may keep both.
    mine += 20 * P * (name == "hogwild")
    assert resident() - before <= expected + mine + 8 * 2**20, "nothing more is kept"


def test_the_masters_and_the_state_are_there_once_and_a_row_for_each_worker() -> None:
    for name, row in table().items():
        two, four = int(row["with Adam, W=2"]), int(row["with Adam, W=4"])
        rows = 1 if row["copies"] == "–" else 2
        aside = 4 * row["put aside"].endswith("W > 2")
        assert four - two == 2 * 4 * rows + aside, name
        assert two - int(row["with SGD, W=2"]) == 8, name


@pytest.mark.parametrize(
    ("kind", "options", "n_bytes"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 4),
        ("Adam", {}, 8),
        ("Adam", {"amsgrad": True}, 12),
        ("AdamW", {}, 8),
        ("NAdam", {}, 8),
        ("RAdam", {}, 8),
        ("Adamax", {}, 8),
        ("Adadelta", {}, 8),
        ("Rprop", {}, 8),
        ("Adagrad", {}, 4),
        ("ASGD", {}, 4),
        ("RMSprop", {}, 4),
        ("RMSprop", {"momentum": 0.9}, 8),
        ("RMSprop", {"centered": True}, 8),
    ],
)
def test_an_optimizer_keeps_the_expected_bytes_of_state_per_element(
    kind: str, options: dict[str, Any], n_bytes: int
) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
    kernel = kernel_for(optimizer)
    assert kernel is not None
    assert 4 * len(kernel.names(optimizer.param_groups[0])) == n_bytes
