"""``scripts/sandblaster.py``: its documents, and its loss beside scikit-learn's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.scripts import loaded

SCRIPT = Path(__file__).parents[2] / "scripts/sandblaster.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return loaded("sandblaster")


def test_the_sandblaster_script_reads_documents_of_vowpal_wabbit(
    figures: ModuleType, tmp_path: Path
) -> None:
    (path := tmp_path / "some.vw").write_text("-1 |f 3:0.5 0:2e-1\n1 |f 1:1.5\n")
    x, y = figures.read(path)
    assert x.toarray().tolist() == [[0.2, 0.0, 0.0, 0.5], [0.0, 1.5, 0.0, 0.0]]
    assert y.tolist() == [-1.0, 1.0]


def test_made_documents_are_of_length_one_and_repeat(figures: ModuleType) -> None:
    x, y = figures.made(50, words=200, each=10)
    assert np.allclose(x.power(2).sum(1), 1.0) and set(y) == {-1.0, 1.0}
    assert (x != figures.made(50, words=200, each=10)[0]).nnz == 0


def test_each_accepted_point_is_lower_by_scikit_learns_loss(figures: ModuleType) -> None:
    x, y = figures.made(60, words=100, each=8)
    evaluate = figures.evaluation(x, y, 1 / 60)
    points = figures.trained(x, y, 1, 25, 8, 1 / 60).points.numpy()
    losses = [float(evaluate(w)[0]) for w in points]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * np.log(2)
    assert float(np.abs(evaluate(points[-1])[1]).max()) < 0.01
    assert figures.first_close([0.5, 0.4, 0.3, 0.3], 0.3) == 3
