"""Workers without Lightning: every strategy, every kind of model, data once, failures, records."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import hybridtrain
from hybridtrain import Server, Worker
from hybridtrain.engine.step.session import WorkerSession
from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.engine.worlds.worker_main import _blas_libraries
from hybridtrain.errors import UserError
from hybridtrain.standalone.data import Data
from hybridtrain.standalone.saved_run import SavedRun
from hybridtrain.standalone.worker import OF_MODEL
from hybridtrain.util.streams import flush_output
from hybridtrain.virtual.service_times import ServiceTimes
from tests.picking import by_default
from tests.support.ends import wait_until

X = np.random.default_rng(0).normal(size=(90, 4)).astype("f4")
Y = X @ np.arange(4, dtype="f4")
SGD = {"name": "sgd", "lr": 0.1}
EVERY = ("synchronous", "hybrid", "backup", "k_async", "k_batch_sync", "k_batch_async", "ssp")
EVERY += ("softsync", "async", "grace", "hogwild", "local_sgd", "downpour", "post_local_sgd")
EVERY += ("easgd", "diloco", "async_diloco", "sign_sgd")


def weights() -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.zeros(4, "f4"), "b": np.zeros((), "f4")}


def descend(worker: Worker, kept: bool = False) -> list[int]:
    """Least squares; returns the samples that have counted."""
    seen = []
    for rows in worker.batches():
        model = worker.model
        error = X[rows] @ model["w"] + model["b"] - Y[rows]
        gradients = {"w": X[rows].T @ error / len(rows), "b": error.mean()}
        if worker.push(gradients):
            seen += rows.tolist()
    return seen


def test_the_smallest_program_of_the_page_is_15_lines_and_learns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(hybridtrain.__file__).parents[1] / "docs" / "worker.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    assert len(program.strip().splitlines()) <= 15
    exec(compile(program, "worker.md", "exec"), {})
    printed = capsys.readouterr().out.partition("]")[0].strip("[").split()
    assert [abs(float(number)) for number in printed] == [0, 1, 2, 3, 4]


@pytest.mark.few(6)
@pytest.mark.parametrize("strategy", EVERY)
def test_each_strategy_uses_each_sample_once_an_epoch(strategy: str) -> None:
    model = weights()
    server = Server(model, strategy, optimizer=SGD)
    parts = server.run(descend, workers=2, data=len(X), batch_size=8, epochs=3)
    seen = Counter(position for part in parts for position in part)
    if strategy not in ("backup", "k_batch_sync"):  # whose mini-batches may count a second time
        assert seen == dict.fromkeys(range(len(X)), 3)
    assert server.stats()["samples"] == 3 * len(X)
    assert np.abs(model["w"]).sum() > 0 and np.isfinite(model["w"]).all()
    assert server.model is model


def test_the_last_mini_batch_may_leave_a_worker_without_samples() -> None:
    for strategy in ("hybrid", "local_sgd"):
        server = Server(weights(), strategy, optimizer=SGD)
        parts = server.run(descend, workers=3, data=len(X), batch_size=11, epochs=2)
        assert Counter(p for part in parts for p in part) == dict.fromkeys(range(len(X)), 2)


# ---- the same as under Lightning -----------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(x)[:, 0], y)


def learn(worker: Worker) -> None:
    for x, y in worker.batches():
        worker.model.loss(x, y).backward()
        worker.push()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.wide
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "workers"), [("hybrid", 2), ("synchronous", 2), ("local_sgd", 2), ("async", 1)]
)
def test_a_module_comes_to_the_bits_of_the_lightning_strategy(
    strategy: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # else it is that of the order of samples
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.inner.loss(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.parameters())

    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    module, plain = Module(), Net()
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    options |= {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = pl.Trainer(strategy=strategy, devices=workers, max_epochs=2, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    server = Server(plain, strategy, optimizer=adam)
    server.run(learn, workers=workers, data=(x, y), batch_size=8, epochs=2)
    for (name, ours), theirs in zip(
        plain.named_parameters(), module.inner.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_an_optimizer_may_take_matrices_only() -> None:
    server = Server({"w": np.ones((3, 2), "f4")}, "async", optimizer={"name": "muon", "lr": 0.1})
    server.run(partial(push_ones, gradient={"w": np.ones((3, 2), "f4")}))
    alone = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Muon([alone], lr=0.1)
    for _ in range(3):
        alone.grad = torch.ones(3, 2)
        optimizer.step()
    assert torch.equal(torch.from_numpy(server.model["w"]), alone.detach())
    with pytest.raises(UserError, match=r"optimizer=muon with.*Muon only supports 2D parameters"):
        Server({"w": np.ones(3, "f4")}, optimizer="muon")


# ---- models and gradients -----------------------------------------------------------------------


def push_ones(worker: Worker, gradient: Any, times: int = 3) -> None:
    for _ in range(times):
        worker.push(gradient)


def test_an_array_alone_and_tensors_are_models_too() -> None:
    array, tensor = np.zeros((2, 2)), torch.zeros(3, requires_grad=True)
    Server(array, update={"name": "sgd", "lr": 1.0}).run(
        partial(push_ones, gradient=np.ones((2, 2)))
    )
    assert (array == -3).all()
    Server({"t": tensor}, update={"name": "sgd", "lr": 1.0}).run(
        partial(push_ones, gradient={"t": torch.ones(3)})
    )
    assert tensor.tolist() == [-3.0] * 3


@pytest.mark.parametrize(
    "rows",
    [
        (np.array([3, 1]), np.ones((2, 2), "f4")),
        torch.sparse_coo_tensor(torch.tensor([[3, 1]]), torch.ones(2, 2), (5, 2)),
    ],
)
def test_rows_of_a_table_are_handed_over_alone(rows: Any) -> None:
    table = np.zeros((5, 2), "f4")
    server = Server({"t": table}, "async", update={"name": "sgd", "lr": 1.0})
    server.run(partial(push_ones, gradient={"t": rows}), workers=2)
    assert table.tolist() == [[0, 0], [-6, -6], [0, 0], [-6, -6], [0, 0]]
    assert server.stats()["handed_over"]["sent_bytes"] < 6 * table.nbytes


def test_a_matrix_of_scipy_is_a_gradient() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    table = np.zeros((3, 2), "f4")
    Server(table, update={"name": "sgd", "lr": 1.0}).run(
        partial(push_ones, gradient=sparse.csr_matrix(np.eye(3, 2, dtype="f4")))
    )
    assert table.tolist() == [[-3, 0], [0, -3], [0, 0]]


def abstain(worker: Worker) -> bool:
    return worker.push(None if worker.number else {"w": np.ones(4, "f4"), "b": np.ones((), "f4")})


def test_none_abstains() -> None:
    model = weights()
    Server(model, update={"name": "sgd", "lr": 1.0}).run(abstain, workers=2)
    assert model["w"].tolist() == [-1.0] * 4


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["k_batch_async", "softsync", "async", "hybrid"])
def test_a_sum_counts_what_is_put_aside(policy: str) -> None:
    array = np.zeros(2)
    named = {"name": "k_batch_async", "k": 3} if policy == "k_batch_async" else policy
    body = partial(push_ones, gradient=np.ones(2), times=6)
    Server(array, policy=named, update="sum").run(body, workers=2)
    assert array.tolist() == [-12.0, -12.0]


def test_a_second_run_goes_on_with_the_optimizers_state() -> None:
    whole, parts = np.zeros(2), np.zeros(2)
    update = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    Server(whole, update=update).run(partial(push_ones, gradient=np.ones(2), times=4))
    server = Server(parts, update=update)
    for _ in range(2):
        server.run(partial(push_ones, gradient=np.ones(2), times=2))
    assert (whole == parts).all()


def look(worker: Worker) -> list[float]:
    seen = [float(worker.model[0])]
    for _ in range(2):
        worker.push(np.ones(1))
        seen.append(float(worker.model[0]))
    worker.copy()[0] = 100.0
    return [*seen, float(worker.model[0]), worker.version, worker.n_workers, *worker.gather(7)]


def test_a_body_sees_the_newest_parameters() -> None:
    results = Server(np.zeros(1), update={"name": "sgd", "lr": 1.0}).run(look, workers=2)
    assert results == [[0, -1, -2, -2, 2, 2, 7, 7]] * 2


def pulls(worker: Worker) -> None:
    for _ in worker.batches():
        worker.push(np.ones(1), loss=1.0)
        worker.pull()


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("local_sgd", {"optimizer": SGD}),
        ("async_diloco", {"optimizer": SGD}),
        ("local_sgd", {"optimizer": SGD, "policy": "k_async"}),
        ("sandblaster", {"update": "lbfgs"}),
    ],
)
def test_a_worker_with_parameters_of_its_own_does_not_pull(strategy: str, parts: Any) -> None:
    said = "mini-batch 1: pull was called with exchange=.*parameters of its own"
    with pytest.raises(UserError, match=said):
        Server(np.zeros(1), strategy, **parts).simulate(pulls, data=4, batch_size=1)


def wait_a_while(worker: Worker, folder: Path) -> None:
    worker.push(np.ones(1))
    while not (folder / "seen").exists():
        worker.push(np.zeros(1))


def test_the_caller_sees_parameters_and_figures_during_a_run(tmp_path: Path) -> None:
    server = Server(np.zeros(1), update={"name": "sgd", "lr": 1.0})
    seen = []

    def watch(stats: dict[str, Any]) -> None:
        if stats["updates"]:
            seen.append((float(server.model[0]), stats["workers"]))
            (tmp_path / "seen").touch()

    server.run(partial(wait_a_while, folder=tmp_path), workers=2, on_progress=watch)
    assert seen[0] == (-1.0, 2) and server.model[0] == -1.0


def go_on_for_ever(worker: Worker) -> None:
    for rows in worker.batches():
        worker.push(np.ones(1, "f4") * len(rows))


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_leaves_what_was_trained(
    strategy: str, signum: int, tmp_path: Path
) -> None:
    server = Server(np.zeros(1, "f4"), strategy, update={"name": "sgd", "lr": 1.0})

    def interrupt(stats: dict[str, Any]) -> None:
        if stats["updates"]:
            os.kill(os.getpid(), signum)

    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else SystemExit) as ended:
        server.run(go_on_for_ever, 2, 1000, interrupt, batch_size=1, epochs=10**6)
    assert signum == signal.SIGINT or ended.value.code == 143  # type: ignore[attr-defined]
    assert server.model[0] == -server.stats()["updates"] < 0
    server.save(tmp_path / "run.pt")
    assert torch.load(tmp_path / "run.pt")["updates"] == server.stats()["updates"]


# ---- saved runs ---------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("hybrid", {}),
        ("async", {}),
        ("hogwild", {}),
        ("k_batch_async", {}),
        ("async", {"state_dtype": "bf16"}),
    ],
)
def test_a_run_goes_on_from_a_file_as_from_the_run_before(
    strategy: str, options: Any, tmp_path: Path
) -> None:
    plan = {"workers": 1, "data": len(X), "batch_size": 8}
    adam = {"name": "adam", "lr": 0.1}
    server = Server(whole := weights(), strategy, optimizer=adam, **options)
    server.run(descend, **plan)
    server.save(tmp_path / "run.pt")
    server.run(descend, **plan)
    again = Server(second := weights(), strategy, optimizer=adam, **options)
    again.load(tmp_path / "run.pt")
    again.run(descend, **plan)
    assert (whole["w"] == second["w"]).all() and whole["b"] == second["b"]


def save_midway(worker: Worker, path: Path) -> None:
    for n, _ in enumerate(worker.batches()):
        if worker.number == 1 and n == 2:  # else it may have all the others
            wait_until(path.exists)
        worker.push({"w": np.ones(4, "f4"), "b": np.ones((), "f4")})
        if worker.number == 0 and n == 1:
            worker.save(path)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async", "ssp", "local_sgd", "downpour"])
def test_a_worker_saves_what_the_masters_are(strategy: str, tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "lr": 1.0, "momentum": 0.5}
    plain = Server(weights(), strategy, optimizer=optimizer)
    server = Server(model := weights(), strategy, optimizer=optimizer)
    plan = {"workers": 2, "data": len(X), "batch_size": 9}
    body = partial(save_midway, path=tmp_path / "run.pt")
    server.run(body, **plan)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert set(saved["parameters"]) == {"w", "b"}
    if strategy in ("hybrid", "async", "ssp"):
        momentum = (1 - 0.5 ** saved["updates"]) / 0.5
        assert saved["optimizer"]["w"]["momentum_buffer"][0] == pytest.approx(momentum)
        assert saved["parameters"]["w"][0] < 0
    if strategy in ("hybrid", "local_sgd"):  # the others come in another order each time
        plain.run(partial(save_midway, path=tmp_path / "other.pt"), **plan)
        assert (plain.model["w"] == model["w"]).all()


def test_files_that_are_no_saved_run_of_the_model_are_refused(tmp_path: Path) -> None:
    server = Server(weights(), optimizer=SGD)
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    torch.save({"w": torch.zeros(4)}, tmp_path / "other.pt")
    Server(np.zeros(3), optimizer=SGD).save(tmp_path / "model.pt")
    for name, said in (
        ("none.pt", "cannot|No such"),
        ("garbage.pt", "is damaged, or no file of server.save"),
        ("other.pt", "is damaged, or no file of server.save"),
        ("model.pt", r"of another model: b is missing there and torch.float32 of shape \(\) here"),
    ):
        with pytest.raises(UserError, match=said):
            server.load(tmp_path / name)
    with pytest.raises(UserError, match="cannot write"):
        server.save(tmp_path / "garbage.pt" / "run.pt")


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "workers"), [("async", 1), ("hybrid", 2)])
def test_runs_go_on_with_the_epochs_that_are_done(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    plan = {"workers": workers, "data": len(X), "batch_size": 8}
    whole = Server(weights(), strategy, optimizer=SGD)
    at_once = whole.run(descend, epochs=4, **plan)
    parts = Server(weights(), strategy, optimizer=SGD)
    first = parts.run(descend, epochs=2, **plan)
    parts.save(tmp_path / "run.pt")
    loaded = Server(weights(), strategy, optimizer=SGD)
    loaded.load(tmp_path / "run.pt")
    for server in (parts, loaded):
        second = server.run(descend, epochs=2, **plan)
        assert [a + b for a, b in zip(first, second, strict=True)] == at_once
        assert all((server.model[name] == whole.model[name]).all() for name in "wb")


def breaks_off(worker: Worker) -> None:
    for rows in worker.batches():
        pushed = None if worker.epoch < 2 else {"w": np.ones(4, "f4")}
        worker.push(pushed, samples=100.0 * len(rows))
        if worker.epoch == 5:
            raise KeyError("broken off")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["run", "simulate"])
def test_a_run_that_is_broken_off_has_ended_the_epochs_that_the_bodies_have(
    how: str, workers: int, tmp_path: Path
) -> None:
    """Whatever was pushed, or left out."""
    server = Server(weights(), "async", optimizer=SGD)
    with pytest.raises(KeyError, match="broken off"):
        getattr(server, how)(breaks_off, workers, 10, batch_size=4, drop_last=True, epochs=9)
    server.save(tmp_path / "run.pt")
    assert torch.load(tmp_path / "run.pt")["epochs"] == 5


def test_a_body_saves_the_epochs_that_are_done(tmp_path: Path) -> None:
    def body(worker: Worker) -> None:
        for _ in worker.batches():
            worker.push(None)
            worker.save(tmp_path / f"{worker.epoch}.pt")

    Server(weights(), optimizer=SGD).simulate(body, data=8, batch_size=4, epochs=2)
    assert [torch.load(tmp_path / f"{n}.pt")["epochs"] for n in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("strategy", "optimizer", "update"),
    [
        ("hybrid", "sgd", None),
        ("async", "adamw", None),
        ("hybrid", "adagrad", None),
        ("diloco", "adam", None),
        ("local_sgd", "adam", None),
        ("hybrid", "adam", "mean"),
    ],
)
def test_a_saved_run_of_another_optimizer_is_refused(
    strategy: str, optimizer: str, update: str | None, tmp_path: Path
) -> None:
    adam = {"name": "adam", "lr": 0.1}
    Server(weights(), optimizer=adam).save(tmp_path / "run.pt")
    others = {} if update is None else {"update": update}
    other = Server(weights(), strategy, optimizer={"name": optimizer, "lr": 0.1}, **others)
    with pytest.raises(UserError, match=r"run.pt was saved with .*, and this server has .*; make"):
        other.load(tmp_path / "run.pt")
    Server(weights(), "async", optimizer={"name": "adam", "lr": 0.3}).load(tmp_path / "run.pt")


FAULTS: dict[str, dict[str, Any]] = {
    "updates is -1": {"updates": -1},
    "updates is 1.5": {"updates": 1.5},
    "epochs is 'a'": {"epochs": "a"},
    "optimizer is None": {"optimizer": None},
    "optimizer.w is of type list": {"optimizer": {"w": [1]}},
    "w is torch.float64 of shape (3,) there and torch.float32": {
        "parameters": {"w": torch.zeros(3, dtype=torch.float64)}
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_saved_file_with_other_content_is_refused(fault: str, tmp_path: Path) -> None:
    server = Server({"w": np.zeros(3, np.float32)}, optimizer=SGD)
    server.save(tmp_path / "run.pt")
    content = torch.load(tmp_path / "run.pt", weights_only=True)
    SavedRun(**content | FAULTS[fault]).write(tmp_path / "run.pt")
    with pytest.raises(UserError, match=re.escape(fault)):
        server.load(tmp_path / "run.pt")


def test_a_saved_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    server, path = Server({"w": np.zeros(1000)}, optimizer=SGD), tmp_path / "run.pt"
    server.save(path)
    content = path.read_bytes()
    for n in (0, 1, 20, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:n])
        with pytest.raises(UserError, match=r"run.pt is damaged, or no file of server.save"):
            server.load(path)


# ---- failures, records, virtual time ------------------------------------------------------------


def die_once(flag: Path, waits: bool, worker: Worker) -> list[int]:
    """Worker 1 dies in its third mini-batch; if ``waits``, the others leave it as many."""
    seen: list[int] = []
    for rows in worker.batches():
        if worker.number == 1 and len(seen) >= 16:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while waits and worker.number != 1 and not flag.exists():
            time.sleep(0.01)
        worker.push({"w": np.zeros(4, "f4"), "b": np.zeros((), "f4")})
        seen += rows.tolist()
    return seen


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_the_others_do_the_samples_of_a_lost_worker(strategy: str, tmp_path: Path) -> None:
    server = Server(weights(), strategy, optimizer=SGD, on_failure="continue")
    body = partial(die_once, tmp_path / "dead", strategy == "async")
    results = server.run(body, workers=3, data=len(X), batch_size=8)
    assert results[1] is None
    assert server.stats()["samples"] == len(X)


def test_a_lost_worker_ends_the_run_if_nothing_else_is_said(tmp_path: Path) -> None:
    body = partial(die_once, tmp_path / "dead", False)
    with pytest.raises(WorkerDied, match="worker 1"):
        Server(weights(), optimizer=SGD).run(body, workers=2, data=len(X), batch_size=8)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["hybrid", "async", "ssp", "downpour"])
def test_a_recorded_run_is_replayed_to_the_bit(strategy: str, tmp_path: Path) -> None:
    record, run = tmp_path / "record.bin", {"batch_size": 8, "epochs": 2}
    server = Server(first := weights(), strategy, optimizer=SGD, record=record)
    server.run(descend, workers=2, data=len(X), **run)
    again = Server(second := weights(), strategy, optimizer=SGD)
    report = again.replay(record, descend, data=len(X), **run)
    assert report.equal and report.whole and report.updates == server.stats()["updates"]
    assert (first["w"] == second["w"]).all()
    other = Server(weights(), strategy, optimizer={"name": "sgd", "lr": 0.2})
    assert not other.replay(record, descend, data=len(X), **run).equal
    with pytest.raises(UserError, match="80 items, 90 in the run"):
        Server(weights(), strategy, optimizer=SGD).replay(record, descend, data=80, **run)


def test_many_workers_train_in_virtual_time() -> None:
    model = weights()
    server = Server(model, "async", optimizer=SGD)
    times = ServiceTimes("exponential", 1.0)
    server.simulate(descend, workers=20, data=len(X), times=times, batch_size=3, epochs=4)
    stats = server.stats()
    assert stats["samples"] == 4 * len(X) and stats["staleness"]["mean"] > 5
    assert 4 * len(X) / 3 / 20 < stats["training_s"] < 4 * len(X) / 3


@pytest.mark.wide
def test_virtual_time_rounds_optimizer_state_as_processes_do() -> None:
    adam = {"name": "adam", "lr": 0.1}
    found = []
    for dtype, virtual in (("bf16", False), ("bf16", True), (None, True)):
        server = Server(model := weights(), optimizer=adam, state_dtype=dtype)  # type: ignore[arg-type]
        go = server.simulate if virtual else server.run
        go(descend, workers=2, data=len(X), batch_size=8)
        found.append(model["w"])
    processes, narrow, wide = found
    assert (processes == narrow).all() and (narrow != wide).any()


def test_no_lightning_is_imported() -> None:
    code = (
        "import sys, numpy as np, hybridtrain\n"
        "hybridtrain.Server(np.zeros(2), update='mean'), hybridtrain.Worker, hybridtrain.DeepDist\n"
        "print([m for m in sys.modules if m.partition('.')[0] in "
        "('pytorch_lightning', 'lightning', 'lightning_fabric', 'hydra')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# ---- data ---------------------------------------------------------------------------------------


def test_data_keep_their_form() -> None:
    assert Data([1, 2, 3]).take([2, 0]) == [3, 1]
    assert Data(i * i for i in range(4)).take([3]) == [9]
    assert Data(X).take([1, 2]).shape == (2, 4)
    x, y = Data((X, Y)).take([5])
    assert (x[0] == X[5]).all() and y[0] == Y[5]
    assert Data({"x": torch.ones(3, 2), "n": ["a", "b", "c"]}).take([2])["n"] == ["c"]
    assert Data(torch.utils.data.TensorDataset(torch.arange(3))).take([1])[0][0] == 1
    assert Data(7).take([6, 0]).tolist() == [6, 0]


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Server({"w": [1.0]}, optimizer=SGD), r"parameter 'w': \[1.0\] was given"),
        (lambda: Server({"w": np.zeros(2, ">f4")}, optimizer=SGD), "'w' is an array of >f4"),
        (lambda: Server({"w": np.zeros(2, np.longdouble)}, optimizer=SGD), "an array of <f16"),
        (lambda: Server({"w": np.ma.zeros(2)}, optimizer=SGD), "a masked array"),
        (lambda: Server({"w": np.zeros(2, int)}, optimizer=SGD), "int64, which has no gradient"),
        (lambda: Server({}, optimizer=SGD), "the model has no parameters"),
        (lambda: Server(X, "asink", optimizer=SGD), r"asink was given \(did you mean async"),
        (lambda: Server(X, policy="asink", optimizer=SGD), "policy='asink' was given"),
        (lambda: Server(X, update="sgdd"), r"update='sgdd' was given \(did you mean sgd"),
        (lambda: Server(X, optimizer={"name": "sgd", "rate": 1}), "optimizer.rate was given"),
        (lambda: Server(X, optimizer={"name": "sgd", "lr": -1.0}), "Invalid learning rate"),
        (lambda: Server(X, optimizer={"name": "lbfgs"}), r"optimizer=lbfgs was given.*sandblaster"),
        (
            lambda: Server(X, policy=Server, optimizer=SGD),
            "policy=Server was given, which is a class",
        ),
        (lambda: Server(np.zeros((0, 2)), optimizer=SGD), r"has no elements, shape \(0, 2\)"),
        (lambda: Server(X), "no optimizer was given"),
        (lambda: Server(X, "local_sgd", update="mean"), "no optimizer was given"),
        (lambda: Server(X, optimizer=SGD).run(descend, workers=10**6), "workers=1000000 was given"),
        (lambda: Server({"w": np.full(2, np.nan)}, optimizer=SGD), "parameter w has 2 of 2 elem"),
        (lambda: Server(X, optimizer=SGD, devices=2), "devices was given"),
        (lambda: Server(X, optimizer=SGD, keep_order=True), "keep_order was given"),
        (lambda: Server(X, optimizer=SGD).run(descend, workers=0), "workers=0 was given"),
        (
            lambda: Server(X, optimizer=SGD).run(descend, data=X, batchsize=3),  # type: ignore[call-arg]
            r"run: batchsize was given \(did you mean batch_size\?\)",
        ),
        (
            lambda: Server(X, optimizer=SGD).run(descend, data=X, record="r"),  # type: ignore[call-arg]
            r"run has no option record; give it to Server\(...\)",
        ),
        (lambda: Server(X, optimizer=SGD).run(None), "body=None was given"),
        (lambda: Server(X, "synchronous", optimizer=SGD).run(print), "no data was given with pol"),
        (
            lambda: Server(X, policy={"name": "async", "warm_start": 3}, optimizer=SGD).run(print),
            r"no data was given with policy=\{name: async, warm_start: 3\}",
        ),
        (lambda: Server(X, optimizer=SGD).run(descend, data=[]), "has no samples"),
        (
            lambda: Server(X, optimizer=SGD, state_dtype="bf16").run(descend, data=X),
            "state_dtype=bf16 was given with optimizer SGD, but it keeps no state",
        ),
        (
            lambda: Server(X, "hogwild", optimizer="adam", state_dtype="bf16").run(descend, data=X),
            "state_dtype=bf16 was given with exchange=in_place, but workers step",
        ),
        (
            lambda: Server(X, optimizer="adam", state_dtype="fp8"),  # type: ignore[arg-type]
            "state_dtype='fp8' was given; it must be bf16 or null",
        ),
        (lambda: Server(X, optimizer=SGD).run(descend, data=(np.ones(2), [1, 2])), r"and \[1, 2\]"),
        (lambda: Server(X, optimizer=SGD).run(descend, data=3.5), "data=3.5 was given"),
        (lambda: Server(X, optimizer=SGD).run(descend, data=True), "data=True was given"),
        (lambda: Server(X, optimizer=SGD).run(descend, data=(X, Y[1:])), r"90 \(0\), 89 \(1\)"),
    ],
)
def test_bad_input_is_refused_before_a_process_starts(made: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ({"v": np.ones(4)}, r"worker 0, epoch 0.*'v' was pushed.*the model has w, b"),
        ({"w": np.ones(3)}, r"gradient of w has the shape \(3,\), and the parameter \(4,\)"),
        ({"w": "x"}, "the gradient of w is 'x'"),
        ({"w": np.ones(4, ">f4")}, "the gradient of w is an array of >f4"),
        ({"w": np.ones(4, complex)}, "the gradient of w is complex"),
        ({"w": np.ma.ones(4)}, "the gradient of w is a masked array"),
        (np.ones(4), "gradients of type ndarray were pushed"),
        ({"w": (np.array([9]), np.ones(1))}, "rows 9 to 9, and the parameter has 4"),
        ({"w": (np.array([1]), np.ones(2))}, r"must be \(1,\)"),
        ({"w": (np.array([1.7]), np.ones(1))}, "row numbers of float64"),
        ({"w": np.array([1, np.nan, 1, 1])}, r"has a gradient that is not finite: w"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradients: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Server(weights(), optimizer=SGD).run(partial(push_ones, gradient=gradients))


def test_a_gradient_that_is_not_finite_may_be_left_out() -> None:
    model = weights()
    server = Server(model, optimizer=SGD, on_nonfinite="drop")
    server.run(partial(push_ones, gradient={"w": np.full(4, np.inf)}))
    assert (model["w"] == 0).all() and server.stats()["left_out"] == {"nonfinite": [3]}


def overflows(worker: Worker) -> None:
    for number, _ in enumerate(worker.batches()):
        worker.push({"w": np.full(4, np.inf if number == 2 else 1.0, "f4")})


def test_a_gradient_that_is_not_finite_is_named_with_its_mini_batch() -> None:
    said = r"worker 0, epoch 0, mini-batch 3 has a gradient that is not finite: w \(4 of 4"
    with pytest.raises(Exception, match=said):
        Server(weights(), optimizer=SGD).run(overflows, data=8, batch_size=2)


def abstains_and_pushes(worker: Worker) -> None:
    for batch in worker.batches():
        worker.push(None)
        worker.push({"w": -np.bincount(batch, minlength=40)}, samples=len(batch))


@pytest.mark.parametrize("policy", ["hybrid", "async", "backup", "k_batch_sync"])
def test_a_push_behind_none_counts_its_samples_once(policy: str) -> None:
    server = Server({"w": np.zeros(40)}, policy, update="sum")
    server.run(abstains_and_pushes, 2, np.arange(40), batch_size=4, epochs=2)
    assert (server.model["w"] == 2).all() and server.stats()["samples"] == 80


def as_often_as_it_likes(worker: Worker) -> None:
    for _ in range(10 - 3 * worker.number):
        worker.push({"w": np.ones(40)}, samples=4)


@pytest.mark.parametrize(
    "exchange", ["movement", "accumulated", "elastic", {"name": "streaming", "fragments": 1}]
)
def test_in_lock_step_a_body_may_push_more_often_than_another(exchange: Any) -> None:
    server = Server({"w": np.zeros(40)}, "hybrid", optimizer=SGD, exchange=exchange)
    server.run(as_often_as_it_likes, 2)
    assert server.stats()["samples"] == 4 * (10 + 7)


def returns_a_function(worker: Worker) -> Any:
    return lambda: worker


def test_a_result_that_cannot_be_sent_is_one_line() -> None:
    with pytest.raises(UserError, match="what the worker returns cannot be sent"):
        Server(weights(), optimizer=SGD).run(returns_a_function)


def idle(worker: Worker) -> None:
    """Never asks for data."""


def test_a_body_that_never_asks_for_its_data_is_told_so() -> None:
    with pytest.raises(UserError, match="never asked for data"):
        Server(weights(), optimizer=SGD).run(idle, data=X)
    with pytest.raises(UserError, match=r"give run\(data=...\) some"):
        Server(weights(), optimizer=SGD).run(descend)


def blas_threads(worker: Worker) -> set[int]:
    for _ in worker.batches():
        worker.push(None)
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_numpy_has_as_many_threads_in_a_worker_as_torch() -> None:
    server = Server(weights(), optimizer=SGD, threads_per_worker=1)
    assert server.run(blas_threads, workers=2, data=X) == [{1}, {1}]


def searches(worker: Worker) -> int:
    for _ in worker.batches():
        worker.push(None)
    return _blas_libraries.cache_info().misses  # a fork goes on with its parent's number


def test_forked_workers_inherit_the_libraries_that_their_parent_has_found() -> None:
    found = Server(weights(), optimizer=SGD, start_method="fork").run(searches, workers=2, data=X)
    assert found == [_blas_libraries.cache_info().misses] * 2


def _or_in_place(model: Any, given: Any) -> None:
    model |= given


@pytest.mark.parametrize(
    ("replace", "name"),
    [
        (lambda model, given: model.__setitem__("w", given["w"]), "w"),
        (lambda model, given: model.update(given), "w"),
        (lambda model, given: model.update(**given), "w"),
        (lambda model, given: model.setdefault("v", given["w"]), "v"),
        (_or_in_place, "w"),
    ],
)
def test_a_replaced_array_is_refused(replace: Any, name: str) -> None:
    def body(worker: Worker) -> None:
        worker.model["b"] += 1.0
        worker.model.update(worker.model)
        replace(worker.model, {"w": np.ones(4)})

    with pytest.raises(UserError, match=rf"worker.model\['{name}'\] was given another array"):
        Server(weights(), optimizer=SGD).simulate(body)


def _parameters(worker: Worker) -> Any:
    deepcopy(worker.model)["w"] = 2.0
    return worker.model


def test_the_parameters_are_copied_and_returned_as_a_dict() -> None:
    (found,) = Server(weights(), optimizer=SGD).run(_parameters)
    assert type(found) is dict and found["w"].tolist() == [0.0] * 4


def test_a_saved_run_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    server = Server(weights(), optimizer=SGD)
    server.model["w"][1] = np.inf
    server.save(tmp_path / "run.pt")
    with pytest.raises(UserError, match=r"run.pt: parameter w has 1 of 4 elements"):
        Server(weights(), optimizer=SGD).load(tmp_path / "run.pt")


def _saved_adam(path: Path) -> dict[str, Any]:
    server = Server(weights(), "async", optimizer={"name": "adam", "lr": 0.1})
    server.simulate(descend, data=len(X), batch_size=30)
    server.save(path)
    return dict(torch.load(path, weights_only=True))


def _load_adam(path: Path) -> None:
    Server(weights(), "async", optimizer={"name": "adam", "lr": 0.1}).load(path)


def test_a_flipped_bit_of_a_saved_run_is_found(tmp_path: Path) -> None:
    content = _saved_adam(path := tmp_path / "run.pt")
    _load_adam(path)
    whole = path.read_bytes()
    for tensor in (content["parameters"]["w"], content["optimizer"]["w"]["exp_avg_sq"]):
        flipped = bytearray(whole)
        flipped[whole.index(tensor.numpy().tobytes()) + 2] ^= 0x20
        path.write_bytes(flipped)
        with pytest.raises(UserError, match=r"is damaged, .*the checksum of its .* is wrong"):
            _load_adam(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("exp_avg", torch.zeros(7), r"exp_avg of w is torch.float32 of shape \(7,\), and must be"),
        ("exp_avg", torch.zeros(4, dtype=torch.complex64), "exp_avg of w is torch.complex64 of"),
        ("exp_avg", None, "exp_avg of w is NoneType"),
        ("exp_avg", torch.zeros(4, device="meta"), "exp_avg of w is no dense tensor in host"),
        ("exp_avg", torch.zeros(4).to_sparse(), "exp_avg of w is no dense tensor in host"),
        ("exp_avg", torch.zeros(1).expand(4), "exp_avg of w is no dense tensor in host"),
        ("exp_avg", torch.full((4,), torch.nan), "exp_avg of w is not finite"),
        ("step", "three", "step of w is str"),
        ("other", 1.0, "the optimizer state of w has 'other'"),
    ],
)
def test_a_state_that_is_not_the_optimizers_is_refused(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    content = _saved_adam(path := tmp_path / "run.pt")
    content["optimizer"]["w"][key] = value
    SavedRun(**content).write(path)
    with pytest.raises(UserError, match=f"run.pt was changed, or is of another optimizer: {said}"):
        _load_adam(path)


def test_a_file_that_others_have_written_is_refused(tmp_path: Path) -> None:
    content = _saved_adam(path := tmp_path / "run.pt")
    torch.save(content | {"optimizer": {}}, path)
    with pytest.raises(UserError, match=r"run.pt is .* no file of server.save: it has no seal"):
        _load_adam(path)


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    content = _saved_adam(path := tmp_path / "run.pt")
    states = content["optimizer"]
    del (rest := dict(states["w"]))["exp_avg_sq"]
    for found, said in (
        (states | {"w": rest}, "the optimizer state of w lacks 'exp_avg_sq'"),
        (states | {"q": rest}, "state of 'q', which is no parameter"),
    ):
        SavedRun(**content | {"optimizer": found}).write(path)
        with pytest.raises(UserError, match=said):
            _load_adam(path)
    SavedRun(**content | {"made_by": {"optimizer": "Adam\n" * 50}}).write(path)
    with pytest.raises(UserError, match=r"Adam\\nAdam.*… \(\d+ characters\)"):
        _load_adam(path)


def _evaluate(worker: Worker, how: str) -> None:
    for rows in worker.batches():
        error = X[rows] @ worker.model["w"] - Y[rows]
        gradients, loss = {"w": X[rows].T @ error / len(rows)}, float((error**2).mean() / 2)
        if worker.number == 1:
            if how == "skip":
                continue
            if how == "leave":
                return
            if how == "none":
                worker.push(None)
            if how == "twice":
                worker.push(gradients, loss=loss)
        worker.push(gradients, loss=loss)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skip", "worker 1, epoch 0, mini-batch 1: nothing was pushed"),
        ("leave", "worker 1, epoch 0, mini-batch 1: nothing was pushed"),
        ("none", "mini-batch 1: push was called with None"),
        ("twice", "mini-batch 1: push was called a second time"),
    ],
)
def test_an_evaluation_takes_each_mini_batch_once(how: str, said: str) -> None:
    server = Server({"w": np.zeros(4, "f4")}, "sandblaster", update="lbfgs")
    with pytest.raises(UserError, match=said):
        server.simulate(partial(_evaluate, how=how), workers=2, data=len(X), batch_size=10)


def test_batches_are_asked_for_once() -> None:
    def body(worker: Worker) -> None:
        for _ in range(2):
            descend(worker)

    for strategy in ("hybrid", "async"):
        with pytest.raises(UserError, match="gives all epochs; call it once"):
            Server(weights(), strategy, optimizer=SGD).simulate(body, data=len(X))


def in_a_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("name", ["push", "pull", "stats", "gather", "batches"])
def test_a_second_thread_of_a_body_is_refused(name: str) -> None:
    """Two that push at once would take each other's mini-batch, or answer."""

    def body(worker: Worker) -> None:
        batches = worker.batches()
        rows = next(batches)
        worker.push({"w": np.ones(4, "f4")})
        calls = {"push": partial(worker.push, {}), "batches": partial(next, batches)}
        calls["gather"] = partial(worker.gather, rows)
        in_a_thread(calls.get(name) or getattr(worker, name))

    with pytest.raises(
        UserError, match="mini-batch 1: a second thread of the body uses the worker"
    ):
        Server(weights(), "async", optimizer=SGD).simulate(body, data=len(X))


def test_a_body_may_train_in_a_thread_of_its_own() -> None:
    server = Server(weights(), "hybrid", optimizer=SGD)
    seen = server.run(lambda worker: in_a_thread(partial(descend, worker)), data=len(X))
    assert sorted(row for rows in seen for row in rows) == list(range(len(X)))


def test_a_process_without_standard_streams_flushes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    flush_output()


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_samples_that_the_bodies_leave_out_are_said(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(worker: Worker) -> None:
        for n, _ in enumerate(worker.batches()):
            worker.push({"w": np.ones(4, "f4")})
            if n == 1:
                return

    def no_push(worker: Worker) -> None:
        assert sum(len(rows) for rows in worker.batches())

    n = 20 if strategy == "hybrid" else 18  # which halves the last ones
    for body, said in (
        (leave, "hybridtrain: the bodies returned with 140 of 180 samples not done\n"),
        (no_push, f"hybridtrain: no push in {n} mini-batches: the model is as it was\n"),
        (descend, ""),
    ):
        server = Server(weights(), strategy, optimizer=SGD)
        server.simulate(body, workers=2, data=len(X), batch_size=10, epochs=2)
        assert capsys.readouterr().err == said


# ---- a module's buffers, and input that has no meaning -------------------------------------------


def normalise(worker: Worker) -> list[float]:
    for (x,) in worker.batches():
        worker.model(x).pow(2).mean().backward()
        worker.push()
    found: list[float] = worker.model[0].running_mean.tolist()
    return found


@pytest.mark.wide
@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_module_has_the_buffers_of_worker_0(strategy: str, workers: int, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, Server]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return net, Server(net, strategy, optimizer={"name": "sgd", "lr": 0.01})

    net, server = made()
    data = (torch.from_numpy(X) + 5,)
    means = server.run(normalise, workers=workers, data=data, batch_size=8)
    assert net[0].running_mean.tolist() == means[0] and min(means[0]) > 0  # type: ignore[index]
    server.save(tmp_path / "run.pt")
    another, again = made()
    again.load(tmp_path / "run.pt")
    for name, value in net.state_dict().items():
        assert torch.equal(value, another.state_dict()[name]), name
    further = server.run(normalise, workers=workers, data=data, batch_size=8)
    assert min(further[0]) > max(means[0])


def modes(worker: Worker) -> list[bool]:
    return [each.training for each in worker.model.modules()]


def test_parts_of_a_module_that_are_in_eval_mode_stay_so() -> None:
    """Unless the whole was evaluated between two runs."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4).eval(), torch.nn.Linear(4, 1))
    server = Server(module, optimizer=SGD)
    assert server.run(modes) == [[True, False, True]]
    module.eval()
    assert server.run(modes) == [[True, True, True]]


def test_a_module_has_the_running_means_of_its_run_in_a_replay_and_in_virtual_time(
    tmp_path: Path,
) -> None:
    nets = [torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)) for _ in range(3)]
    for other in nets[1:]:
        other.load_state_dict(nets[0].state_dict())
    data, sgd = (torch.from_numpy(X) + 5,), {"name": "sgd", "lr": 0.01}
    path = tmp_path / "run.bin"
    Server(nets[0], optimizer=sgd, record=path).run(normalise, workers=2, data=data)
    assert Server(nets[1], optimizer=sgd).replay(path, normalise, data=data).equal
    Server(nets[2], optimizer=sgd).simulate(normalise, workers=2, data=data)
    for other in nets[1:]:
        assert torch.equal(nets[0][0].running_mean, other[0].running_mean)  # type: ignore[arg-type]


class Past(torch.nn.Module):
    """Has buffers that grow, that are sparse, and that are views of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("mask", torch.eye(2).to_sparse())
        self.register_buffer("ones", torch.ones(1).expand(3))


def remember(worker: Worker) -> None:
    for rows in worker.batches():
        module = worker.model
        module.seen = torch.cat([module.seen, torch.from_numpy(rows)])
        module.w.sum().backward()
        worker.push()


def test_a_buffer_that_has_grown_comes_back_and_one_that_is_not_dense_stays(tmp_path: Path) -> None:
    module = Past()
    server = Server(module, optimizer=SGD)
    server.run(remember, data=5, batch_size=2)
    assert sorted(module.seen.tolist()) == [0, 1, 2, 3, 4]  # type: ignore[operator]
    server.save(tmp_path / "run.pt")
    Server(deepcopy(module), optimizer=SGD).load(tmp_path / "run.pt")


def test_a_file_of_a_module_with_other_buffers_is_refused(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False))
    Server(plain, optimizer=SGD).save(tmp_path / "run.pt")
    server = Server(torch.nn.Sequential(torch.nn.BatchNorm1d(4)), optimizer=SGD)
    with pytest.raises(UserError, match=r"0\.num_batches_tracked is missing there"):
        server.load(tmp_path / "run.pt")


def push_so_many(samples: Any, worker: Worker) -> None:
    worker.push({"w": np.ones(4, "f4")}, samples=samples)


@pytest.mark.parametrize("samples", [0, -1, float("nan"), float("inf"), "3"])
def test_samples_that_are_no_number_above_0_are_refused(samples: Any) -> None:
    with pytest.raises(UserError, match="give a number above 0"):
        Server(weights(), optimizer=SGD).simulate(partial(push_so_many, samples))


def test_arrays_that_share_memory_are_refused() -> None:
    array = np.zeros(3)
    for model in ({"a": array, "b": array}, {"a": array[:2], "b": array[1:]}):
        with pytest.raises(UserError, match="'a' and 'b' share memory"):
            Server(model, optimizer=SGD)
    tensor = torch.zeros(2)
    with pytest.raises(UserError, match="share memory"):
        Server({"a": tensor, "b": tensor}, optimizer=SGD)
    Server({"a": array[:1], "b": array[1:]}, optimizer=SGD)  # no element is shared


def leave_early(worker: Worker) -> None:
    for _ in worker.batches():
        worker.push({"w": np.ones(4, "f4")})
        if worker.number == 1:
            return


def test_a_worker_that_leaves_its_mini_batches_early_is_named() -> None:
    with pytest.raises(UserError, match=r"worker 1 waits in .*left its mini-batches early"):
        Server(weights(), optimizer=SGD).run(leave_early, workers=2, data=len(X), batch_size=8)


def push_a_row(worker: Worker) -> None:
    for _ in range(3):
        worker.push({"w": (np.array([1]), np.ones(1, "f4"))})


def test_rows_of_one_element_have_momentum() -> None:
    model = weights()
    Server(model, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}).run(push_a_row)
    assert model["w"] == pytest.approx([0, -(0.1 + 0.19 + 0.271), 0, 0])


def test_too_few_samples_for_a_mini_batch_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(weights(), optimizer=SGD)
    server.run(descend, data=3, batch_size=8, drop_last=True)
    assert "no mini-batch in 3 samples" in capfd.readouterr().err
    for number in (np.int64(8), IntEnum("Sizes", {"EIGHT": 8}).EIGHT):  # type: ignore[attr-defined]
        server.run(descend, data=number)
        assert server.stats()["samples"] == 8


# ---- found by reading ---------------------------------------------------------------------------


def save_behind_a_write(worker: Worker, path: Path, clamps: bool) -> None:
    ones = {"w": np.ones(4)}
    if worker.number:
        worker.gather("a")
        for _ in range(5):
            worker.push(ones)
        worker.gather("b")
        return
    worker.push(ones)
    if clamps:
        np.clip(worker.model["w"], -100, 100, out=worker.model["w"])
    worker.gather("a")
    worker.gather("b")
    worker.save(path)
    worker.push(ones)


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("how", ["run", "simulate"])
def test_a_file_saved_behind_a_write_has_the_masters(
    how: str, clamps: bool, tmp_path: Path
) -> None:
    model, path = {"w": np.zeros(4)}, tmp_path / "run.pt"
    server = Server(model, "async", update=SGD | {"lr": 1.0})
    getattr(server, how)(partial(save_behind_a_write, path=path, clamps=clamps), workers=2)
    saved = torch.load(path, weights_only=True)
    assert saved["updates"] == 6 and float(saved["parameters"]["w"][0]) == -6
    assert model["w"].tolist() == [-7.0] * 4, "what others had done is not taken back"


def told(worker: Worker) -> list[bool]:
    return [worker.push({"w": np.ones(1)}) for _ in range(5 if worker.number else 2)]


def test_without_data_each_push_is_told_whether_it_counts() -> None:
    policy = {"name": "async", "max_staleness": 0}
    server = Server({"w": np.zeros(1)}, policy=policy, update=SGD | {"lr": 1.0})
    quick, slow = server.simulate(told, workers=2, times=ServiceTimes("constant", 1.0))
    counted = sum(map(sum, (quick, slow)))
    assert False in quick + slow, "some are late"
    assert counted == server.stats()["updates"]


def meets(worker: Worker) -> Any:
    ones = {"w": np.ones(1)}
    if worker.number:
        for _ in range(10):
            worker.push(ones)
        worker.gather("met")
        return None
    worker.push(ones)
    worker.gather("met")
    return worker.push(ones), worker.push(ones)


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "async", "max_staleness": 1},
        {"name": "backup", "k": 1},
        {"name": "k_batch_sync", "k": 1},
    ],
    ids=lambda policy: policy["name"],
)
def test_a_meeting_makes_no_gradient_newer(policy: Any) -> None:
    server = Server({"w": np.zeros(1)}, policy=policy, update=SGD | {"lr": 1.0})
    told, _ = server.simulate(meets, workers=2, times=ServiceTimes("constant", 1.0))
    assert told == (False, True)
    assert server.stats()["staleness"]["max"] <= 1


@pytest.mark.parametrize("other", [lambda w: w, lambda w: w.T, lambda w: w[::-1], lambda w: w[1:]])
def test_arrays_of_any_strides_that_share_memory_are_refused(other: Any) -> None:
    w = np.zeros((3, 3), "f4")
    with pytest.raises(UserError, match="share memory"):
        Server({"enc": w, "dec": other(w)}, update=SGD)
    Server({"enc": w[:1], "dec": w[1:].T}, update=SGD)


def push_twice(worker: Worker, dtype: str) -> None:
    for _ in range(2):
        worker.push({"w": np.full(4, 100, dtype)}, samples=1000)


@pytest.mark.parametrize("policy", ["k_batch_async", "k_batch_sync"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_what_is_put_aside_does_not_overflow(dtype: str, policy: str) -> None:
    model = {"w": np.zeros(4, dtype)}
    chosen = {"name": policy, "k": 2}
    server = Server(model, policy=chosen, update=SGD | {"lr": 1.0})
    workers = 1 if policy == "k_batch_async" else 2
    server.simulate(partial(push_twice, dtype=dtype), workers=workers)
    assert model["w"].tolist() == [-100.0 * server.stats()["updates"]] * 4


class Changes:
    """A body that halves its gradients before it hands them over, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, worker: Worker) -> None:
        for _ in worker.batches():
            worker.model(torch.ones(1, worker.model.in_features)).sum().backward()
            weight = worker.model.weight
            if self.how == "in place":
                weight.grad.mul_(0.5)
            elif self.how == "another":
                weight.grad = weight.grad * 0.5
            worker.push({"weight": weight.grad * 0.5} if self.how == "given" else OF_MODEL)


@pytest.mark.parametrize("how", ["in place", "another", "given"])
@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "ssp", "local_sgd"], "hybrid"))
def test_a_gradient_is_what_it_is_when_it_is_pushed(strategy: str, size: int, how: str) -> None:
    module = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    server = Server(module, strategy, optimizer=SGD | {"lr": 1.0})
    server.run(Changes(how), workers=2, data=2, batch_size=1)
    weights = module.weight.detach().unique().tolist()
    updates = server.stats()["updates"]  # of both workers' gradients together, or of one each
    assert weights == [-0.5 * updates] and updates <= 2


def one_bad(worker: Worker) -> None:
    for n, _ in enumerate(worker.batches()):
        bad = worker.number == 0 and n == 2
        worker.push({"w": np.full(3, np.nan if bad else 1.0)})


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("strategy", "updates"), [("hybrid", 20), ("async", 40)])
def test_a_step_that_is_skipped_is_one(strategy: str, updates: int) -> None:
    server = Server(
        {"w": np.zeros(3)}, strategy, update=SGD | {"lr": 1.0}, on_nonfinite="skip_step"
    )
    server.run(one_bad, workers=2, data=40, batch_size=1)
    assert server.model["w"].tolist() == [1.0 - updates] * 3


def test_a_run_that_ends_before_the_masters_are_written_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(session: WorkerSession) -> None:
        raise KeyError("before")

    monkeypatch.setattr(WorkerSession, "_publish", fail)
    server = Server(model := {"w": np.ones(3)}, update=SGD)
    with pytest.raises(KeyError, match="before"):
        server.simulate(pushes_one, data=4)
    assert model["w"].tolist() == [1.0] * 3


def writes_in_place(worker: Worker) -> None:
    for _ in worker.batches():
        worker.model["w"] -= 1.0


def test_who_writes_to_the_masters_need_not_push(capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(model := {"w": np.zeros(3)}, "hogwild", optimizer=SGD)
    server.run(writes_in_place, workers=1, data=4, batch_size=1)
    assert model["w"].tolist() == [-4.0] * 3 and "no push" not in capfd.readouterr().err


def test_what_the_user_writes_between_runs_is_saved(tmp_path: Path) -> None:
    for w in (np.zeros(3), torch.zeros(3)):
        server = Server({"w": w}, update=SGD)
        server.run(pushes_one, workers=1, data=4, batch_size=1)
        server.model["w"][...] = 100.0
        server.save(tmp_path / "run.pt")
        server.model["w"][...] = 0.0
        server.load(tmp_path / "run.pt")
        assert server.model["w"].tolist() == [100.0] * 3


@pytest.mark.parametrize("given", [np.ones(2), torch.ones(2)])
def test_an_array_put_in_the_place_of_one_between_runs_is_trained(given: Any) -> None:
    server = Server(model := {"w": given}, update={"name": "sgd", "lr": 1.0})
    body = partial(push_ones, gradient={"w": np.ones(2)})
    for start in (1.0, 10.0):
        model["w"] = given * 0 + start
        server.run(body)
        assert server.model["w"] is model["w"] and model["w"].tolist() == [start - 3] * 2
    model["w"] = np.ones(3)
    with pytest.raises(
        UserError, match=r"the model was changed: w is .*\(3,\).*, and was .*\(2,\)"
    ):
        server.run(body)


def test_a_layer_put_in_the_place_of_one_between_runs_is_trained_and_saved(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    server = Server(module, update={"name": "sgd", "lr": 1.0})
    module[0] = deepcopy(module[0])
    before = module[0].weight.detach().clone()
    server.run(partial(push_ones, gradient={"0.weight": torch.ones(1, 2)}))
    assert torch.equal(module[0].weight, before - 1 - 1 - 1)
    module[0] = deepcopy(module[0])
    module[0].weight.data.fill_(7.0)
    server.save(tmp_path / "run.pt")
    assert torch.load(tmp_path / "run.pt")["parameters"]["0.weight"].tolist() == [[7.0, 7.0]]


def pushes_one(worker: Worker) -> None:
    for _ in worker.batches():
        worker.push({"w": np.ones(3)})


def test_a_column_of_pandas_is_read_by_place() -> None:
    class Labelled(list[int]):
        """Looks numbers up among its labels, which are in another order."""

        ndim, shape = 1, (4,)

        def __getitem__(self, label: Any) -> Any:
            return super().__getitem__([3, 0, 2, 1].index(label))

        @property
        def iloc(self) -> Any:
            class Places:
                def __getitem__(places, positions: list[int]) -> Any:
                    values = np.array(list(self))[positions]
                    return type("Found", (), {"to_numpy": lambda found: values})()

            return Places()

    data = Data({"x": np.array([3, 0, 2, 1]), "y": Labelled([30, 0, 20, 10])})
    taken = data.take([0, 3, 2])
    assert taken["x"].tolist() == [3, 1, 2] and list(taken["y"]) == [30, 10, 20]
    alone, one_of_two = Data(Labelled([30, 0, 20, 10])), Data((Labelled([30, 0, 20, 10]),) * 2)
    assert alone.take([0, 3, 2]).tolist() == one_of_two.take([0, 3, 2])[1].tolist() == [30, 10, 20]


def normed(worker: Worker) -> Any:
    for x, y in worker.batches():
        ((worker.model(x) - y) ** 2).mean().backward()
        worker.push()
    copy, again = worker.copy(), worker.copy()
    copy[0](torch.ones(4, 4)).sum().backward()
    again = worker.copy()
    assert again is copy and again[0].weight.grad is None
    return torch.equal(again[0].running_mean, worker.model[0].running_mean)


def test_a_copy_has_buffers_as_they_are_and_no_gradients() -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3 + 7
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    server = Server(module, "async", update=SGD | {"lr": 0.001})
    assert server.run(normed, workers=2, data=(x, x.sum(1, keepdim=True)), batch_size=8) == [
        True,
        True,
    ]
