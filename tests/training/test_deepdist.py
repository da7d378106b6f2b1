"""DeepDist's two functions: its checks, its three examples in small, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridtrain import DeepDist
from hybridtrain.errors import UserError

Arrays = dict[str, Any]


def add(model: Arrays, update: Arrays) -> None:
    for name, value in update.items():
        model[name] += value


def difference(model: Arrays, rows: list[float]) -> Arrays:
    """Changes its copy of the model, and returns by how much."""
    before = model["w"].copy()
    for row in rows:
        model["w"] += row
    return {"w": model["w"] - before}


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"min_updates": 3}, {"max_updates": 1}])
def test_additive_updates_come_to_the_sum_of_all(options: Any) -> None:
    with DeepDist({"w": np.ones(3)}, workers=2, **options) as dd:
        dd.train(map(float, range(50)), difference, add, epochs=2, partition_size=4)
    assert dd.model["w"].tolist() == [2451.0] * 3
    assert dd.stats()["samples"] == 100


def read(model: Arrays, rows: Any) -> Arrays:
    return {"seen": np.eye(40)[int(model["n"][0])], "n": np.ones(1)}


@pytest.mark.parametrize("least", [1, 4])
def test_who_reads_between_min_updates_has_the_same_model(least: int) -> None:
    model = {"n": np.zeros(1), "seen": np.zeros(40)}
    with DeepDist(model, workers=2, min_updates=least) as dd:
        dd.train(32, read, add, partition_size=1)
    assert model["n"][0] == 32 and model["seen"].sum() == 32
    steps = np.flatnonzero(model["seen"])
    assert least == 1 or ((np.diff(steps) >= 2).all() and len(steps) <= 32 // least + 1)


def one_at_a_time(found: list[int], model: Any, update: Any) -> None:
    found.append(os.getpid())
    model += update


def several(model: Any, rows: Any) -> Iterator[Any]:
    for row in rows:
        yield None if row % 2 else np.full(2, float(row))


def test_gradient_may_yield_several_updates_and_abstain() -> None:
    found: list[int] = []
    model = np.zeros(2)
    with DeepDist(model, workers=2) as dd:
        dd.train(list(range(10)), several, partial(one_at_a_time, found))
    assert model.tolist() == [20.0, 20.0]
    assert found == [os.getpid()] * 5, "descent runs here"


def replace(model: Arrays, update: Arrays) -> None:
    model["w"] = model["w"] + update["w"]


def test_descent_may_put_another_array_in_the_place_of_one() -> None:
    model = {"w": np.zeros(2)}
    DeepDist(model, workers=1).train(4, lambda model, rows: {"w": np.ones(2)}, replace)
    assert model["w"].tolist() == [4.0, 4.0]


def by_data(model: Any, update: Any) -> None:
    model.weight.data = model.weight.data + update["weight"]


def by_parameter(model: Any, update: Any) -> None:
    model.weight = torch.nn.Parameter(model.weight + update["weight"])


def by_data_of_tensors(model: Arrays, update: Arrays) -> None:
    model["weight"].data = model["weight"].data + update["weight"]


@pytest.mark.parametrize(
    ("descent", "model"),
    [
        (by_data, torch.nn.Linear(2, 1, bias=False)),
        (by_parameter, torch.nn.Linear(2, 1, bias=False)),
        (by_data_of_tensors, {"weight": torch.zeros(1, 2)}),
    ],
)
def test_descent_may_put_other_data_in_the_place_of_a_parameters(descent: Any, model: Any) -> None:
    weight = model["weight"] if isinstance(model, dict) else model.weight
    torch.nn.init.zeros_(weight)
    DeepDist(model, workers=1).train(4, lambda model, rows: {"weight": np.ones((1, 2))}, descent)
    assert weight.tolist() == [[4.0, 4.0]]


def one_row(model: Arrays, rows: Any) -> Arrays:
    return {"t": (rows, np.ones((len(rows), 2)))}


def add_rows(model: Arrays, update: Arrays) -> None:
    numbers, values = update["t"]
    model["t"][numbers] += values


@pytest.mark.parametrize("least", [0, 3])
def test_rows_of_a_table_reach_descent_as_rows(least: int) -> None:
    model = {"t": np.zeros((30, 2))}
    DeepDist(model, workers=2, min_updates=least).train(30, one_row, add_rows, partition_size=2)
    assert (model["t"] == 1).all()


def eye(kind: str) -> Any:
    whole = torch.eye(3, 2, dtype=torch.float64)
    if kind == "scipy":
        return pytest.importorskip("scipy.sparse").csr_matrix(whole.numpy())
    return whole.to_sparse_csr() if kind == "csr" else whole.to_sparse()


@pytest.mark.parametrize("kind", ["scipy", "csr", "elements"])
def test_elements_of_a_table_reach_descent_as_rows(kind: str) -> None:
    model = {"t": np.zeros((3, 2))}
    DeepDist(model, workers=1).train(1, lambda model, rows: {"t": eye(kind)}, add_rows)
    assert model["t"].tolist() == [[1, 0], [0, 1], [0, 0]]


def by_module(model: torch.nn.Module, rows: Any) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def add_to_module(model: torch.nn.Module, update: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += update[name]


def test_a_module_is_a_model() -> None:
    module = torch.nn.Linear(2, 1)
    before = module.weight.detach().clone()
    DeepDist(module, workers=2).train(6, by_module, add_to_module, partition_size=1)
    assert torch.allclose(module.weight, before + 6)


def test_an_optimizer_steps_where_there_is_no_descent_and_keeps_its_state() -> None:
    def gradient(model: Arrays, rows: Any) -> Arrays:
        return {"w": np.ones(2)}

    model, reference = {"w": np.zeros(2)}, torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with DeepDist(model, update={"name": "adagrad", "lr": 0.1}, workers=1) as dd:
        for _ in range(2):
            dd.train(3, gradient, partition_size=1)
    optimizer = torch.optim.Adagrad([reference], lr=0.1)
    for _ in range(6):
        reference.grad = torch.ones(2, dtype=torch.float64)
        optimizer.step()
    assert np.allclose(model["w"], reference.detach().numpy(), rtol=1e-6)


def ones(model: Any, rows: Any) -> Any:
    return np.ones(2)


def test_a_training_without_descent_knows_none_of_one_with_it() -> None:
    trained = DeepDist(np.zeros(2), workers=1)
    trained.train(1, ones, partial(one_at_a_time, []))
    with pytest.raises(UserError, match="no optimizer was given"):
        trained.train(1, ones)
    with DeepDist(model := np.zeros(2), workers=1, update={"name": "sgd", "lr": 1.0}) as dd:
        with pytest.raises(UserError, match="descent was given with exchange"):
            dd.train(1, ones, partial(one_at_a_time, []))
        dd.train(1, ones)
    assert model.tolist() == [-1.0, -1.0]


# ---- the three examples of the original, in the notebook ----------------------------------------

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "deepdist.ipynb"


@pytest.mark.wide
def test_the_notebook_separates_words_and_classifies(capfd: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    exec(compile(code, str(NOTEBOOK), "exec"), {"__name__": "deepdist"})
    word2vec, adagrad, *classified = capfd.readouterr().out.splitlines()
    before, after = (float(each) for each in re.findall(r"-?\d\.\d+", word2vec))
    by_adagrad = float(adagrad.rpartition(" ")[2])
    assert min(after, by_adagrad) > 0.5 + before
    right = [int(line.partition(": ")[2].partition("%")[0]) for line in classified]
    assert len(right) == 2 and min(right) > 90


# ---- failures and bad input ---------------------------------------------------------------------


def die_at_20(model: Arrays, rows: list[float]) -> Arrays:
    if 20.0 in rows and not model["w"].any():  # the copy of a worker that has just begun
        os.kill(os.getpid(), signal.SIGKILL)
    return {"w": np.full(1, sum(rows))}


def test_the_partition_of_a_lost_worker_counts_once() -> None:
    model = {"w": np.zeros(1)}
    data = [20.0, *map(float, range(20))]
    with DeepDist(model, workers=2, on_failure="continue") as dd:
        dd.train(data, die_at_20, add, partition_size=1, seed=None)
    assert model["w"].tolist() == [210.0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("gradient", "said"),
    [
        (lambda m, r: {"v": np.ones(2)}, r"worker \d, epoch 0, mini-batch \d.*'v' was pushed"),
        (lambda m, r: {"w": np.ones(3)}, r"mini-batch \d.*gradient of w has the shape \(3,\)"),
        (lambda m, r: {"w": np.array([np.nan, 1])}, "has a gradient that is not finite: w"),
        (lambda m, r: 1 / 0, "division by zero"),
    ],
)
def test_updates_that_do_not_fit_name_worker_partition_and_parameter(
    gradient: Any, said: str
) -> None:
    with pytest.raises((UserError, ZeroDivisionError), match=said):
        DeepDist({"w": np.zeros(2)}, workers=2).train(8, gradient, add)


def fail(model: Arrays, update: Arrays) -> None:
    raise KeyError("of the user")


def test_an_error_in_descent_ends_the_run() -> None:
    with pytest.raises(KeyError, match="of the user"):
        DeepDist({"w": np.zeros(2)}, workers=1).train(4, lambda m, r: {"w": np.ones(2)}, fail)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: DeepDist(np.zeros(2), workers=0), "workers=0 was given"),
        (lambda: DeepDist(np.zeros(2), min_updates=-1), "min_updates=-1 was given"),
        (lambda: DeepDist(np.zeros(2), "hybrid", min_updates=2), "leave one out"),
        (lambda: DeepDist(np.zeros(2), update="adagad"), "did you mean adagrad"),
        (lambda: DeepDist(np.zeros(2), "asink", update="sgd"), "did you mean async"),
        (lambda: DeepDist([1.0]), "give a numpy array"),
        (lambda: DeepDist(np.zeros(2)).train(4, None), "gradient=None was given"),
        (lambda: DeepDist(np.zeros(2)).train(4, one_row), "no optimizer was given"),
        (lambda: DeepDist(np.zeros(2)).train([], one_row, add), "has no samples"),
        (
            lambda: DeepDist(np.zeros(2), exchange="movement").train(4, one_row, add),
            "descent was given with exchange",
        ),
        (
            lambda: DeepDist(np.zeros(2), correction="polynomial").train(4, one_row, add),
            "descent was given with correction=polynomial",
        ),
    ],
)
def test_bad_input_is_refused_before_a_process_starts(run: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run()


def of_backward(model: torch.nn.Module, rows: Any) -> dict[str, torch.Tensor]:
    """Does not clear what it has made before."""
    x, y = rows
    ((model(x) - y) ** 2).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_module_has_its_running_means_and_the_gradients_of_one_mini_batch() -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3 + 7
    y = x.sum(1, keepdim=True)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    alone = deepcopy(module)
    with DeepDist(module, workers=1, update={"name": "sgd", "lr": 0.01}) as model:
        model.train((x, y), of_backward, partition_size=64)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    ((alone(x) - y) ** 2).mean().backward()
    optimizer.step()
    assert int(module[0].num_batches_tracked) == 1
    for mine, theirs in zip(module.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), atol=1e-4)
