"""Skip-gram and CBOW: the compiled steps are torch's, and vectors come out that mean something."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from hybridtrain.errors import UserError
from hybridtrain.tasks import shared_tables
from hybridtrain.tasks.words import word_kernels as kernels
from hybridtrain.tasks.words.questions import read_vectors
from hybridtrain.tasks.words.text_data import EncodedText, Vocabulary, alias_table, huffman
from hybridtrain.tasks.words.word2vec import Architecture, Output, Word2Vec
from hybridtrain.util import compiling
from tests.picking import by_default
from tests.tasks.words.made import margin, train, write_text

V, D = 9, 4
KINDS = list(itertools.product(get_args(Architecture), get_args(Output)))
COUNTS = np.array([40, 30, 20, 12, 9, 7, 5, 3, 1])
NUMBERS = np.array([3, 1, 4, -1, 1, 5, 2, 6, 0, -1, 7], dtype=np.int32)
ALWAYS_8 = (np.zeros(V, np.float32), np.full(V, 8, np.int32))  # every word drawn is the last


def a_module(architecture: str, output: str) -> Word2Vec:
    """In float64, with the last word for every one that is drawn."""
    module = Word2Vec(D, architecture, output, window=1, negative=1, sample=0.0)
    module._know(Vocabulary(tuple("abcdefghi"), COUNTS, int(COUNTS.sum())))
    module.configure_model()
    module._paths = huffman(COUNTS) if output == "hierarchical" else module._paths
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter)
    return module


def predictions(architecture: str) -> list[tuple[list[int], int]]:
    """What predicts what, with a window of one neighbour, in the order of the text."""
    near = {
        at: [n for n in (at - 1, at + 1) if 0 <= n < len(NUMBERS) and NUMBERS[n] >= 0]
        for at in range(len(NUMBERS))
        if NUMBERS[at] >= 0
    }
    words = NUMBERS.astype(int)
    if architecture == "cbow":
        return [(words[others].tolist(), words[at]) for at, others in near.items() if others]
    return [([words[at]], words[n]) for at, others in near.items() for n in others]


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "output"), by_default(KINDS, *KINDS[1:3]))
def test_compiled_steps_are_those_of_autograd(architecture: str, output: str) -> None:
    torch.manual_seed(0)
    module = a_module(architecture, output)
    inputs, outputs = (table.detach().numpy().copy() for table in module._tables())
    step = kernels.skip_gram if architecture == "skip_gram" else kernels.cbow
    keep, rate = np.ones(V, np.float32), np.float64(0.3)
    loss, seen = step(inputs, outputs, NUMBERS, keep, (*ALWAYS_8, 1), module._paths, 1, rate, 5)
    first: list[float] = []
    for sources, word in predictions(architecture):
        rows = np.array(sources)
        hidden = (
            module._mean(rows, np.array([0]))
            if architecture == "cbow"
            else module.inputs(torch.from_numpy(rows))
        )
        if output == "negative":
            found = module.sampled(hidden, np.array([word]), np.array([[8]]))
        else:
            found = module.hierarchical(hidden, np.array([word]))
        first.append(float(found.detach()))
        for table in module._tables():
            table.grad = None
        found.backward()
        with torch.no_grad():
            for table in module._tables():
                assert table.grad is not None
                table -= 0.3 * table.grad.to_dense()
    assert (seen, loss) == (1, pytest.approx(first[0], rel=1e-12))
    for made, table in zip((inputs, outputs), module._tables(), strict=True):
        assert np.abs(made - table.detach().numpy()).max() < 1e-14


def test_a_path_of_the_tree_costs_what_the_entropy_says() -> None:
    tree = huffman(COUNTS)
    lengths = np.diff(tree.starts)
    mean = (lengths * COUNTS).sum() / COUNTS.sum()
    share = COUNTS / COUNTS.sum()
    entropy = -(share * np.log2(share)).sum()
    assert entropy <= mean < entropy + 1
    assert (2.0**-lengths).sum() == 1.0, "no place is free, and none is taken twice"
    paths = [
        tuple(zip(tree.nodes[a:b].tolist(), tree.turns[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(tree.starts)
    ]
    assert len(set(paths)) == V and {path[0][0] for path in paths} == {V - 2}


def test_words_are_drawn_as_often_as_their_weight_says() -> None:
    kept, other = alias_table(COUNTS**0.75)
    share = kept / V
    np.add.at(share, other, (1 - kept) / V)
    assert share == pytest.approx(COUNTS**0.75 / (COUNTS**0.75).sum(), rel=1e-5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_one_worker_is_a_plain_loop_to_the_bit(text: Path, monkeypatch: Any) -> None:
    """Rates go down by the mini-batches that are done."""
    kept: list[EncodedText] = []
    made = EncodedText.__init__
    monkeypatch.setattr(
        EncodedText, "__init__", lambda self, *a: (kept.append(self), made(self, *a))[1]
    )
    module, plain = Word2Vec(8, save=()), Word2Vec(8, save=())
    train(module, text, "hogwild", 1, overfit_batches=1.0, max_epochs=2)
    train(plain, text, "auto", 1, overfit_batches=1.0, max_epochs=2)
    stretches = [numbers.numpy() for _, numbers in kept[0]]
    alone = Word2Vec(8)
    alone._know(module.vocabulary)
    pl.seed_everything(3, verbose=False)
    alone.configure_model()
    alone.on_fit_start()
    total = 2 * len(stretches)
    for at in range(total):
        epoch, index = divmod(at, len(stretches))
        alone.progress = lambda at=at: at / total  # type: ignore[method-assign, misc]
        alone._step(stretches[index], hash((0, epoch, index)) & 0x7FFFFFFF)
    assert np.array_equal(alone.vectors(), module.vectors())
    assert np.array_equal(alone.vectors(), plain.vectors())


@pytest.mark.few(1)
@pytest.mark.parametrize(("architecture", "output"), by_default(KINDS, *KINDS[::3]))
def test_two_workers_find_what_belongs_together(architecture: str, output: str, text: Path) -> None:
    module = Word2Vec(16, architecture, output, rate=0.1)
    trainer = train(module, text, "hogwild", 2, max_epochs=8)
    assert module.steps_compiled
    assert margin(module.vocabulary.words, module.vectors()) > 0.5
    stats = trainer.strategy.run_stats()
    assert sum(stats["samples_per_worker"]) == 8 * 6000, "samples are words"
    words, vectors = read_vectors(text.parent / "vectors.bin")
    assert tuple(words) == module.vocabulary.words
    assert np.array_equal(vectors, module.vectors())
    assert not (text.parent / "text-numbers").exists()


@pytest.mark.parametrize(
    ("strategy", "architecture", "output"),
    [
        pytest.param("hybrid", "skip_gram", "negative", marks=pytest.mark.slow),
        pytest.param("async", "cbow", "negative", marks=pytest.mark.slow),
        ("ssp", "skip_gram", "hierarchical"),
    ],
)
def test_other_strategies_step_by_torch(
    strategy: str, architecture: str, output: str, text: Path
) -> None:
    optimizer = partial(torch.optim.Adagrad, lr=0.2)
    module = Word2Vec(16, architecture, output, optimizer=optimizer)
    train(module, text, strategy, 2, max_epochs=4)
    assert not module.steps_compiled
    assert margin(module.vocabulary.words, module.vectors()) > 0.5


def test_a_checkpoint_has_the_words_and_goes_on(text: Path, tmp_path: Path) -> None:
    module = Word2Vec(8)
    trainer = train(module, text, "hogwild", 2, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    found = Word2Vec.load_from_checkpoint(tmp_path / "two.ckpt", dim=8)
    assert found.vocabulary.words == module.vocabulary.words
    assert np.array_equal(found.vectors(), module.vectors())


# ---- bad input ----------------------------------------------------------------------------------


def test_without_numba_everything_goes_through_torch(text: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_tables, "is_installed", lambda: False)
    module = Word2Vec(16, optimizer=partial(torch.optim.Adagrad, lr=0.2))
    train(module, text, "hogwild", 2)
    assert not module.steps_compiled
    assert margin(module.vocabulary.words, module.vectors()) > 0.3
    with pytest.raises(UserError, match=r"compiled=true .* numba: pip install .*sparse"):
        train(Word2Vec(16, compiled=True), text, "hogwild", 1)
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    with pytest.raises(UserError, match=r"need numba: pip install 'hybridtrain\[sparse\]'"):
        compiling.compiled(lambda: 0)


def test_a_cache_that_cannot_be_written_is_said_and_done_without(monkeypatch: Any) -> None:
    import numba
    import numba.typed  # it compiles functions of its own where it is imported first

    real = numba.njit

    def njit(cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.warns(UserWarning, match="no locator available.*NUMBA_CACHE_DIR"):
        twice = compiling.compiled(lambda x: 2 * x)
    assert twice(4) == 8


def test_a_table_larger_than_memory_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match=r"42 words and 1000000000 dim.* GiB.* smaller model.dim"):
        train(Word2Vec(10**9), text, "hogwild", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "model.dim=0"),
        ({"architecture": "glove"}, "architecture='glove' .* skip_gram or cbow"),
        ({"output": "full"}, "output='full' .* negative or hierarchical"),
        ({"negative": 0}, "negative=0 .* from 1 on"),
        ({"rate": -1.0}, "model.rate=-1.0 .* above 0"),
        ({"min_rate": -1.0}, "model.min_rate=-1.0"),
        ({"compiled": "maybe"}, "compiled='maybe' .* true, false or auto"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Word2Vec(**options)


def test_compiled_steps_need_parameters_that_all_share(text: Path) -> None:
    with pytest.raises(UserError, match=r"compiled=true .* use strategy=hogwild"):
        train(Word2Vec(4, compiled=True), text, "hybrid", 1)


class Losses(pl.Callback):
    """What is logged as the loss of each epoch."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:
            self.told.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.told.append(float(trainer.callback_metrics["train/loss"]))


def test_the_loss_of_an_epoch_is_the_mean_of_its_own(text: Path, monkeypatch: Any) -> None:
    own: dict[int, list[float]] = {}
    tell = Word2Vec.tell

    def kept(self: Any, loss: Any, *rest: Any) -> None:
        own.setdefault(self.current_epoch, []).append(float(loss))
        tell(self, loss, *rest)

    monkeypatch.setattr(Word2Vec, "tell", kept)
    losses = Losses()
    train(Word2Vec(dim=8), text, "auto", 1, callbacks=[losses], max_epochs=3)
    means = [sum(each) / len(each) for each in own.values()]
    assert len({len(each) for each in own.values()} - {1}) > 0
    assert losses.told == pytest.approx(means, rel=1e-5)
