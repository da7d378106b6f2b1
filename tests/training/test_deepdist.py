"""DeepDist's two functions: its checks, its three examples in small, bad input."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
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


# ---- the three examples of the original, in small -----------------------------------------------

VOCABULARY, WIDTH = 12, 8


def sentences() -> list[list[int]]:
    """Words of one half of the vocabulary stand together."""
    numbers = np.random.default_rng(0)
    halves = numbers.integers(0, 2, size=60) * (VOCABULARY // 2)
    return [(half + numbers.integers(0, VOCABULARY // 2, size=8)).tolist() for half in halves]


def vectors() -> Arrays:
    numbers = np.random.default_rng(1)
    first = (numbers.random((VOCABULARY, WIDTH)) - 0.5) / WIDTH
    return {"syn0": first, "syn1": np.zeros((VOCABULARY, WIDTH))}


def skip_gram(model: Arrays, rows: list[list[int]], rate: float = 0.1) -> Arrays:
    """Negative sampling with neighbours in a sentence; returns differences of the vectors."""
    before = {name: array.copy() for name, array in model.items()}
    numbers = np.random.default_rng(len(rows))
    for sentence in rows:
        for centre, other in pairwise(sentence):
            for word, wanted in ((other, 1.0), (int(numbers.integers(VOCABULARY)), 0.0)):
                near, far = model["syn0"][centre].copy(), model["syn1"][word].copy()
                wrong = wanted - 1 / (1 + np.exp(-near @ far))
                model["syn0"][centre] += rate * wrong * far
                model["syn1"][word] += rate * wrong * near
    return {name: model[name] - before[name] for name in model}


def separation(vectors: np.ndarray[Any, Any]) -> float:
    """How much more alike words of one half are."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    alike, half = unit @ unit.T, VOCABULARY // 2
    within = alike[:half, :half].mean() + alike[half:, half:].mean()
    return float(within - 2 * alike[:half, half:].mean())


def test_word2vec_separates_words_of_different_sentences() -> None:
    model = vectors()
    with DeepDist(model, workers=2) as dd:
        dd.train(sentences(), skip_gram, add, epochs=20, partition_size=10)
    assert separation(model["syn0"]) > 0.5 + separation(vectors()["syn0"])


class Adagrad:
    """Divides by the root of all squares so far, which lie here."""

    def __init__(self, rate: float) -> None:
        self.rate, self.squares = rate, dict[str, Any]()

    def __call__(self, model: Arrays, update: Arrays) -> None:
        for name, gradient in update.items():
            squares = self.squares[name] = self.squares.get(name, 0.0) + gradient**2
            model[name] += self.rate * gradient / (1e-6 + np.sqrt(squares))


def test_word2vec_by_adagrad_in_descent() -> None:
    model = vectors()
    with DeepDist(model, workers=2, min_updates=2) as dd:
        dd.train(sentences(), skip_gram, Adagrad(0.05), epochs=20, partition_size=10)
    assert separation(model["syn0"]) > 0.5 + separation(vectors()["syn0"])


def cross_entropy(model: Arrays, rows: Any) -> Arrays:
    """Of a softmax classifier."""
    x, labels = rows
    scores = x @ model["w"] + model["b"]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return {"w": x.T @ shares / len(labels), "b": shares.mean(0)}


def descend(model: Arrays, update: Arrays) -> None:
    for name, gradient in update.items():
        model[name] -= 0.5 * gradient


@pytest.mark.parametrize("by_descent", [True, False])
def test_a_classifier_learns_clusters(by_descent: bool) -> None:
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, 3, size=300)
    x = np.eye(3, 5)[labels] * 4 + numbers.normal(size=(300, 5))
    model = {"w": np.zeros((5, 3)), "b": np.zeros(3)}
    update = {} if by_descent else {"update": {"name": "sgd", "lr": 0.5}}
    with DeepDist(model, workers=2, **update) as dd:
        steps = descend if by_descent else None
        dd.train((x, labels), cross_entropy, steps, epochs=4, partition_size=20)
    right = (x @ model["w"] + model["b"]).argmax(1) == labels
    assert right.mean() > 0.9


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
    ],
)
def test_bad_input_is_refused_before_a_process_starts(run: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run()
