"""task=hogwild: compiled steps are gradient descent, workers without a lock end where one does."""

from __future__ import annotations

import gzip
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch._subclasses import FakeTensorMode

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.errors import UserError
from hybridtrain.tasks import shared_tables
from hybridtrain.tasks.hogwild.graph_cuts import EdgesData, GraphCuts, on_simplex
from hybridtrain.tasks.hogwild.matrix_completion import MatrixCompletion, RatingsData
from hybridtrain.tasks.hogwild.sparse_svm import ExamplesData, SparseSvm
from hybridtrain.tasks.hogwild.text_examples import parse_example, read_examples, read_triples
from hybridtrain.tasks.shared_tables import data_of
from hybridtrain.tasks.words.glove import Cooccurrences, GloVe
from hybridtrain.tasks.words.text_data import TextData
from hybridtrain.tasks.words.word2vec import Word2Vec

PROBLEMS: dict[str, tuple[Any, Any]] = {
    "svm": (SparseSvm, partial(ExamplesData, made=1000, features=300, batch_size=50)),
    "completion": (MatrixCompletion, partial(RatingsData, users=60, items=50, batch_size=50)),
    "cuts": (GraphCuts, partial(EdgesData, side=8, batch_size=20)),
}


def fit(module: Any, data: Any, strategy: str, workers: int, epochs: int = 3) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data)
    return trainer


def known(name: str, **options: Any) -> tuple[Any, Any]:
    """A module that has been told its data, and these."""
    module, data = PROBLEMS[name][0](**options), PROBLEMS[name][1]()
    module.know(data)
    module.configure_model()
    return module, data.train_dataloader().dataset


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_compiled_step_is_torchs_step_on_the_loss_of_one_example(name: str) -> None:
    pytest.importorskip("numba", reason="compiled steps need the extra `sparse`")
    (ours, examples), (theirs, _) = known(name, rate=0.3), known(name, rate=0.3)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3)
    for each in (ours, theirs):
        each.trainer = pl.Trainer(logger=False, accelerator="cpu")  # type: ignore[assignment]
    order = np.random.default_rng(0).permutation(len(examples))[:150]
    for place in order.tolist():
        batch = examples[place]
        optimizer.zero_grad()
        theirs.loss(batch).backward()
        optimizer.step()
        if name == "cuts":  # torch steps points that are projected when they are read
            with torch.no_grad():
                nodes = torch.cat(batch[1:])
                theirs.places.weight[nodes] = theirs.points(nodes)
        ours.step_examples(batch)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    untouched = known(name)[0]
    moved = [
        bool((a != b).any()) for a, b in zip(ours.parameters(), untouched.parameters(), strict=True)
    ]
    assert all(moved)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROBLEMS)
def test_one_worker_without_a_lock_is_plain_training_to_the_bit(name: str) -> None:
    pytest.importorskip("numba", reason="compiled steps need the extra `sparse`")
    tables = []
    for strategy in ("auto", "hogwild"):
        module, data = PROBLEMS[name][0](), PROBLEMS[name][1]()
        loader = data.train_dataloader()
        in_order = torch.utils.data.DataLoader(
            loader.dataset, loader.batch_size, collate_fn=loader.collate_fn
        )
        data.train_dataloader = lambda in_order=in_order: in_order
        trainer = fit(module, data, strategy, 1)
        assert module.steps_compiled
        tables.append([p.detach().clone() for p in module.parameters()])
    assert trainer.global_step == 3 * len(in_order), "counted where the module chose in setup"
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))


SLOW = pytest.param("hybrid", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "strategy", ["hogwild", pytest.param("async", marks=pytest.mark.slow), SLOW]
)
def test_two_workers_reach_the_objective_of_one(strategy: str) -> None:
    """Compiled where they share parameters, else through sparse gradients."""
    lr = {"async": 20.0, "hybrid": 40.0}.get(strategy, 1.0)
    make = partial(SparseSvm, optimizer=partial(torch.optim.SGD, lr=lr), rate=0.4)
    found = []
    for name, workers in (("auto", 1), (strategy, 2)):
        trainer = fit(make(), PROBLEMS["svm"][1](), name, workers, epochs=8)
        found.append(float(trainer.callback_metrics["val/objective"]))
    assert found[1] == pytest.approx(found[0], rel=0.03 if strategy == "hogwild" else 0.1)
    assert found[0] < 0.6, "1 before training"


@pytest.mark.slow
def test_the_quarters_of_a_grid_are_cut_apart() -> None:
    trainer = fit(GraphCuts(), EdgesData(), "hogwild", 2, epochs=40)
    assert float(trainer.callback_metrics["val/cut"]) < 0.01, "0.016 cuts off the corners"


def test_the_projection_stays_on_its_device() -> None:
    with FakeTensorMode(), torch.no_grad():
        assert on_simplex(torch.zeros(3, 4, device="cuda")).device.type == "cuda"


def test_points_are_projected_onto_the_simplex() -> None:
    numba = pytest.importorskip("numba", reason="compiled steps need the extra `sparse`")
    assert numba
    from hybridtrain.tasks.hogwild.hogwild_kernels import project

    points = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = on_simplex(points)
    assert bool((near >= 0).all())
    torch.testing.assert_close(near.sum(1), torch.ones(200, dtype=torch.float64))
    torch.testing.assert_close(on_simplex(near), near)
    ours = points.numpy().copy()
    for row in range(200):
        project(ours, row)
    torch.testing.assert_close(torch.from_numpy(ours), near)


# ---- text ---------------------------------------------------------------------------------------


def test_both_forms_of_examples_and_gzip_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("# a comment\n1 0:0.5 7:1.5\n0 3:2\n\n-1\n")
    with gzip.open(tmp_path / "b.vw.gz", "wt") as file:
        file.write("1 |f 0:0.5 7:1.5\n-1 | 3:2\n-1 |f\n")
    one, other = (read_examples([str(tmp_path / name)]) for name in ("a.svm", "b.vw.gz"))
    for each in (one, other):
        assert each.labels.tolist() == [1, -1, -1] and each.n_features == 8
        assert each.starts.tolist() == [0, 2, 3, 3]
        assert each.degrees().tolist() == [1, 1, 1, 1, 1, 1, 1, 1]
    labels, starts, features, values = one.rows(one.__getitems__([2, 0]))
    assert (labels.tolist(), starts.tolist()) == ([-1, 1], [0, 0, 2])
    assert (features.tolist(), values.tolist()) == ([0, 7], [0.5, 1.5])
    both = read_examples([str(tmp_path / name) for name in ("a.svm", "b.vw.gz")])
    assert len(both) == 6
    assert parse_example("1 |f 5 6:2", "x")[1:] == ([5, 6], [1.0, 2.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a file with one example"),
        ("# only this\n", "is empty"),
        ("1 0:1\n2 0:1\n", r"line 2: label '2' is none of -1, 0 and 1"),
        ("1 0:1\nspam 0:1\n", r"line 2: label 'spam' is no finite number"),
        ("1 3\n", r"line 1: '3' is no feature; write it as index:value"),
        ("1 3:x\n", r"line 1: value of feature 3 'x' is no finite number"),
        ("1 3:nan\n", r"line 1: value of feature 3 'nan' is no finite number"),
        ("1 -3:1\n", r"line 1: feature '-3' is no whole number"),
        ("1 a:1\n", r"line 1: feature 'a' is no whole number"),
        ("1 4294967296:1\n", r"line 1: feature 4294967296 is above 4294967295; number them"),
        ("1 3:1 3:2\n", r"line 1: a feature is given twice"),
        ("1 9:1\n", r"line 1: feature 9 is beyond the table, whose rows are 0 to 8"),
        ("|f 3:1\n", r"line 1: label"),
    ],
)
def test_a_malformed_example_is_named_by_file_and_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.svm"
    path.write_text(text)
    with pytest.raises(UserError, match=f"bad.svm.*{message}"):
        read_examples([str(path)], 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("1 2 3\n1 2\n", r"line 2: '1 2' is not user item rating"),
        ("1::2::nan\n", r"line 1: rating 'nan' is no finite number"),
        ("1,2,inf\n", r"line 1: rating 'inf' is no finite number"),
        ("1\t5\t3\n", r"line 1: item 5 is beyond the table, whose rows are 0 to 4"),
        ("1,2,,9\n", r"line 1: rating '' is no finite number"),
        ("1\t\t3\n", r"line 1: item '' is no whole number"),
        (",1,2,3\n", r"line 1: user '' is no whole number"),
        ("1_0 2 3\n", r"line 1: user '1_0' is no whole number"),
        ("x 2 3\n", r"line 1: user 'x' is no whole number"),
        ("1;2;3,5\n", r"line 1: rating '3,5' is no finite number"),
        ("1 2 3,5\n", r"line 1: rating '3,5' is no finite number"),
        ("1,2,3\n1,2,3,5\n", r"line 2: '1,2,3,5' has 4 numbers, and the first line has 3"),
        ("1.5 2 3\n", r"line 1: user '1.5' is no whole number"),
        ("user,item,rating\n", "only names of columns; give user item rating"),
        ("userId,movieId,rating\n1,2,3\nuserId,movieId,rating\n", r"line 3: user 'userId' is no"),
        ("rating,user,item\n3,1,2\n", r"line 1: the columns are rating user item, but user item"),
        ("%%MatrixMarket matrix coordinate\n3 3 1\n", r"line 1: .*is no whole number"),
        ("9223372036854775808 2 3\n", r"line 1: user 9223372036854775808 is above 4294967295"),
    ],
)
def test_a_malformed_rating_is_named_by_file_and_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=f"bad.txt.*{message}"):
        read_triples([str(path)], ("user", "item", "rating"), (None, 5))


@pytest.mark.parametrize(
    "text",
    [
        "userId,movieId,rating,timestamp\n1,2,3.5,964982703\n3,0,1,964982703\n",
        "\ufeff1::2::3.5::964982703\r\n3::0::1::964982703\r\n",
        '"user";"item";"rating"\n"1";"2";"3.5"\n"3";"0";"1"\n',
        "1.0\t2.0\t3.5\n3.0\t0.0\t1.0\n",
        "1, 2, 3.5,,\n\n# again\n3, 0, 1,\n",
        "1   2 3.5\n3 0\t1\n",
    ],
)
def test_ratings_as_spreadsheets_and_pandas_write_them_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ratings.txt"
    path.write_bytes(text.encode())
    found = read_triples(str(path), ("user", "item", "rating"))
    assert found.ones.tolist() == [1, 3] and found.others.tolist() == [2, 0]
    assert found.values.tolist() == [3.5, 1.0]


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the file nowhere"):
        read_triples(["nowhere"], ("u", "v", "weight"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary, line 1 cannot be read"):
        read_triples([str(tmp_path / "binary")], ("u", "v", "weight"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"1 2 3\n" * 99)[:-9])
    with pytest.raises(UserError, match="is damaged"):
        read_triples([str(tmp_path / "cut.gz")], ("u", "v", "weight"))


def test_ratings_and_edges_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "ratings.txt"
    path.write_text("".join(f"{n % 7} {n % 5} {n % 3}\n" for n in range(40)))
    data = RatingsData(str(path))
    assert (data.users, data.items, len(data.ratings), len(data.held_out)) == (7, 5, 36, 4)
    edges = EdgesData([str(path)], terminals=[0, 6])
    assert (edges.nodes, len(edges.edges)) == (7, 40)


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("svm", {}, "1 1000000:0.5"),
        ("completion", {}, "0 1000000 3"),
        ("cuts", {"terminals": [0, 1]}, "0 1000000 3"),
    ],
)
def test_a_number_too_large_for_a_table_is_refused(
    name: str, options: Any, line: str, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "data.txt"
    path.write_text(f"{line}\n" * 2)
    module, data = PROBLEMS[name]
    monkeypatch.setattr(os, "sysconf", lambda _: 1024)  # a machine of 1 MiB
    with pytest.raises(UserError, match=r"1,000,00\d rows.* GiB.* number them from 0"):
        module().know(data.func(str(path), **options))


@pytest.mark.parametrize(("name", "options"), [("completion", {}), ("cuts", {"terminals": [0, 1]})])
def test_a_table_of_which_nearly_no_row_is_in_the_data_is_refused(
    name: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("0 200000000 1\n" * 2)
    module, data = PROBLEMS[name]
    monkeypatch.setattr(os, "sysconf", lambda _: 2**24)  # a machine that could hold it
    with pytest.raises(UserError, match=r"200,000,00\d rows.* GiB.* at most [24] different num"):
        module().know(data.func(str(path), **options))


# ---- options ------------------------------------------------------------------------------------


def test_without_numba_steps_go_through_torch_and_compiled_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(shared_tables, "is_installed", lambda: False)
    module, data = SparseSvm(optimizer=partial(torch.optim.SGD, lr=5.0)), PROBLEMS["svm"][1]()
    fit(module, data, "auto", 1, epochs=1)
    assert not module.steps_compiled and float(module.weights.weight.abs().sum()) > 0
    with pytest.raises(UserError, match=r"needs numba: pip install 'hybridtrain\[sparse\]'"):
        fit(SparseSvm(compiled=True), data, "auto", 1)


def test_compiled_steps_are_refused_where_parameters_are_not_shared() -> None:
    with pytest.raises(UserError, match=r"use strategy=hogwild, or model\.compiled=auto"):
        fit(SparseSvm(compiled=True), PROBLEMS["svm"][1](), "hybrid", 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(SparseSvm, rate=0.0), "model.rate=0.0"),
        (partial(SparseSvm, decay=1.5), "model.decay=1.5"),
        (partial(SparseSvm, mu=-1.0), "model.mu=-1.0"),
        (
            partial(SparseSvm, compiled="yes"),
            "model.compiled='yes' was given",
        ),
        (partial(MatrixCompletion, dim=0), "model.dim=0"),
        (partial(ExamplesData, made=0), "data.made=0"),
        (partial(ExamplesData, features=9), "data.features=9 was given; .* from 10 on"),
        (partial(RatingsData, known=0.0), "data.known=0.0"),
        (partial(RatingsData, users=0), "data.users=0 was given; .* from 1 on, or null"),
        (partial(RatingsData, items=-3), "data.items=-3"),
        (partial(RatingsData, []), "data.files is empty"),
        (partial(ExamplesData, []), "data.files is empty"),
        (partial(EdgesData, side=2), "data.side=2"),
        (partial(EdgesData, terminals=3), r"data.terminals=\[3\]: give at least two nodes"),
        (partial(EdgesData, terminals=[3]), "at least two nodes"),
        (partial(EdgesData, terminals=[3, 999]), "the nodes 0 to 255"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make()


@pytest.mark.parametrize(
    ("module", "data", "wanted"),
    [
        (GraphCuts, ExamplesData, "ExamplesData was given as data, but GraphCuts reads data=edges"),
        (Word2Vec, Cooccurrences, "Cooccurrences was given .* Word2Vec reads data=text"),
        (GloVe, TextData, "TextData was given .* GloVe reads data=cooccurrences"),
        (SparseSvm, pl.LightningDataModule, "LightningDataModule .* reads data=examples"),
    ],
)
def test_data_of_another_kind_are_named(module: Any, data: Any, wanted: str) -> None:
    model = module()
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    model.trainer.datamodule = data()
    with pytest.raises(UserError, match=wanted):
        data_of(model, model.reads)
