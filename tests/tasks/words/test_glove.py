"""GloVe: what is counted in parts is what is counted at once, compiled steps are Adagrad's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks.words.glove import (
    ENTRY,
    Cooccurrences,
    Entries,
    GloVe,
    count_cooccurrences,
    counted,
)
from hybridtrain.tasks.words.text_data import Vocabulary
from hybridtrain.tasks.words.word_kernels import glove_steps
from tests.lightning.toys import make_trainer
from tests.picking import by_default
from tests.tasks.words.made import margin, write_text

V = 7


def test_neighbours_count_by_their_distance_both_ways() -> None:
    numbers = np.array([0, 1, 2, -1, 3, 0, 1], dtype=np.int32)
    keys, counts = counted(numbers, 2, V)
    table = np.zeros((V, V))
    table[keys // V, keys % V] = counts
    half = np.zeros((V, V))
    half[0, 1], half[1, 2], half[0, 2], half[3, 0], half[3, 1] = 2.0, 1.0, 0.5, 1.0, 0.5
    assert np.array_equal(table, half + half.T) and np.array_equal(keys, np.unique(keys))


@pytest.mark.parametrize(("memory", "threads"), [(1 << 30, 1), (300_000, 3), (40_000, 2)])
def test_what_does_not_fit_into_memory_is_counted_in_parts(
    memory: int, threads: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(-1, 60, 6000).astype(np.int32)
    n = count_cooccurrences(numbers, 60, 5, tmp_path / "entries", memory, threads)
    found = np.fromfile(tmp_path / "entries", dtype=ENTRY)
    keys, counts = counted(numbers, 5, 60)
    order = np.argsort(found["row"].astype(np.int64) * 60 + found["column"])
    assert n == len(keys) == len(found)
    assert np.array_equal(found["row"][order] * 60 + found["column"][order], keys)
    assert found["count"][order] == pytest.approx(counts, rel=1e-5)
    assert not np.array_equal(order, np.arange(n)), "in random order"
    assert [path.name for path in tmp_path.iterdir()] == ["entries"], "no parts are left"


def a_module(**options: Any) -> GloVe:
    module = GloVe(4, compiled=False, **options)
    module._know(Vocabulary(tuple("abcdefg"), np.arange(V, 0, -1), 28))
    module.steps_compiled = True
    module.configure_model()
    return module.double()


def test_a_compiled_step_shows_the_loss_of_an_entry_that_is_logged(monkeypatch: Any) -> None:
    module, told = a_module(), []
    monkeypatch.setattr(module, "tell", lambda loss, *_: told.append(float(loss)))
    rows, counts = torch.arange(6, dtype=torch.int32), torch.full((6,), 30.0)
    summed = float(module.loss(rows, rows, counts).detach())
    shown = module.training_step((rows, rows, counts), 0)
    assert told == [float(shown)] == [pytest.approx(summed / 6)]


def test_compiled_steps_are_those_of_torchs_adagrad() -> None:
    torch.manual_seed(0)
    module, random = a_module(rate=0.5, x_max=4.0), np.random.default_rng(0)
    tables = tuple(each.detach().numpy().copy() for each in module.tables.parameters())
    squares = tuple(each.detach().numpy().copy() for each in module.squares.parameters())
    entries = [(random.integers(V), random.integers(V), 8.0 * random.random()) for _ in range(60)]
    rows, columns = (np.array([e[n] for e in entries], dtype=np.int32) for n in (0, 1))
    counts = np.array([e[2] for e in entries])
    summed = glove_steps(tables, squares, (rows, columns, counts), 4.0, 0.75)
    optimizer = torch.optim.Adagrad(
        module.tables.parameters(), lr=1.0, initial_accumulator_value=4.0
    )
    losses = []
    for row, column, count in entries:
        optimizer.zero_grad()
        counted_as = torch.tensor([count], dtype=torch.float64)
        loss = module.loss(torch.tensor([row]), torch.tensor([column]), counted_as)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert summed == pytest.approx(sum(losses), rel=1e-12)
    for table, square, part in zip(tables, squares, module.tables.parameters(), strict=True):
        assert np.abs(table - part.detach().numpy()).max() < 1e-12
        assert np.abs(square - optimizer.state[part]["sum"].numpy()).max() < 1e-12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def train(module: GloVe, file: Path, strategy: Any, workers: int, **options: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    data = Cooccurrences(str(file), min_count=1, window=5)
    settings: dict[str, Any] = {"default_root_dir": file.parent, "max_epochs": 20}
    trainer = make_trainer(strategy, workers, **(settings | options))
    trainer.fit(module, datamodule=data)
    return trainer


def cost(module: GloVe, file: Path) -> float:
    """The sum of all losses, of a text that is counted again."""
    words, numbers = module.vocabulary.number_of, []
    for line in file.read_text().splitlines():
        numbers += [*(words[word] for word in line.split()), -1]
    count_cooccurrences(np.array(numbers, np.int32), len(words), 5, file.parent / "again")
    with torch.no_grad():
        return float(module.loss(*Entries(file.parent / "again", 10**9)[0]))


@pytest.mark.slow
def test_workers_end_where_one_does(text: Path) -> None:
    alone, both = GloVe(8, x_max=20.0), GloVe(8, x_max=20.0)
    train(alone, text, "auto", 1)
    trainer = train(both, text, "hogwild", 2)
    assert alone.steps_compiled and both.steps_compiled
    assert cost(both, text) == pytest.approx(cost(alone, text), rel=0.05)
    assert margin(both.vocabulary.words, both.vectors()) > 0.5
    assert sum(trainer.strategy.run_stats()["samples_per_worker"]) % 20 == 0
    assert (text.parent / "vectors.bin").exists()
    assert not (text.parent / "text-numbers").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "ssp"], "hybrid"))
def test_other_strategies_step_by_torch(strategy: str, text: Path) -> None:
    module = GloVe(8, x_max=20.0, rate=0.2)
    train(module, text, strategy, 2)
    assert not module.steps_compiled
    # In 60 updates the order of two workers makes much: 0.17 to 0.47; at the beginning it is 0.
    assert margin(module.vocabulary.words, module.vectors()) > 0.1


def test_a_checkpoint_goes_on_compiled_or_not(text: Path) -> None:
    path = text.parent / "two.ckpt"
    module = GloVe(8)
    train(module, text, "hogwild", 2, max_epochs=2).save_checkpoint(path)
    found = GloVe.load_from_checkpoint(path, dim=8)
    assert np.array_equal(found.vectors(), module.vectors())
    again = GloVe(8)
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer("hogwild", 2, max_epochs=3, default_root_dir=text.parent)
    data = Cooccurrences(str(text), min_count=1, window=5)
    trainer.fit(again, datamodule=data, ckpt_path=path)
    assert not np.array_equal(again.vectors(), module.vectors())
    assert float(again.squares[0].weight.detach().min()) >= 400.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GloVe(rate=0.0), "rate=0.0"),
        (lambda: GloVe(x_max=-1.0), "x_max=-1.0 was given; it must be a number above 0"),
        (lambda: GloVe(alpha=-1.0), "alpha=-1.0 was given; it must be a number from 0 on"),
        (lambda: Cooccurrences(batch_entries="many"), "batch_entries='many' .* from 1 on"),
        (lambda: Cooccurrences(batch_entries=0), "batch_entries=0 .* from 1 on"),
        (lambda: Cooccurrences(window=0), "window=0 was given; .* from 1 on"),
        (lambda: Cooccurrences(memory=0), "memory=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_lines_of_one_word_have_no_neighbours(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n" * 9)
    with pytest.raises(UserError, match="no two words of the text stand in one line"):
        train(GloVe(4), tmp_path / "lines.txt", "hogwild", 1)
