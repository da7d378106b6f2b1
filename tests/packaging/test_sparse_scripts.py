"""What scripts/hogwild.py counts and compares is what it says."""

from __future__ import annotations

import hogwild
import numpy as np
import pytest

from hybridtrain.tasks.hogwild.text_examples import Examples, planted_examples


def examples(features: np.ndarray) -> Examples:  # type: ignore[type-arg]
    n, each = features.shape
    starts = np.arange(0, n * each + 1, each)
    values = np.ones(n * each, np.float32)
    labels = np.ones(n, np.float32)
    return Examples(labels, starts, features.ravel().astype(np.uint32), values, 10_000)


def test_collisions_are_none_where_nothing_is_shared_and_all_where_everything_is() -> None:
    apart = examples(np.arange(9000).reshape(3000, 3))
    in_examples, in_writes = hogwild.collisions(apart, 2, n=500)
    assert in_examples < 0.01 and in_writes < 0.01  # an example may meet itself
    assert hogwild.collisions(examples(np.tile([1, 2, 3], (50, 1))), 2, n=500)[0] > 0.99
    one = examples(np.arange(9).reshape(3, 3))
    assert hogwild.collisions(one, 1, n=50) == (0.0, 0.0)


def test_more_workers_meet_more_often_and_a_run_repeats_itself() -> None:
    made = planted_examples(500, 2000, seed=0)
    shares = [hogwild.collisions(made, workers, n=800)[1] for workers in (2, 4, 16)]
    assert shares == sorted(shares) and shares[0] > 0
    assert hogwild.collisions(made, 4, n=800) == hogwild.collisions(made, 4, n=800)


def test_repeated_examples_have_the_same_objective() -> None:
    made = planted_examples(50, 100, seed=0)
    weights = np.random.default_rng(0).standard_normal(made.n_features)
    once = hogwild.objective(weights, made)
    size = 0.5 * hogwild.MU * np.square(weights).sum()
    thrice = hogwild.objective(weights, hogwild.repeated(made, 3))
    assert thrice == pytest.approx(once - size / 50 + size / 150)


@pytest.mark.slow
def test_bare_processes_with_and_without_a_lock_come_to_the_same_objective() -> None:
    pytest.importorskip("numba", reason="compiled steps need the extra `sparse`")
    made = planted_examples(120, 200, seed=0)
    ends = [hogwild.bare(made, lock, 2, 2)[-1][1] for lock in ("none", "each")]
    assert ends == pytest.approx([ends[0]] * 2, rel=0.05)
