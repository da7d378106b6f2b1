"""docs/notebooks: from top to bottom in a kernel and as a script; what a cell leaves behind."""

from __future__ import annotations

import builtins
import gc
import json
import os
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from hybridtrain.engine.worlds.worker_main import leave_notebook
from hybridtrain.lightning.launcher import clear_frames_of
from tests.support.ends import wait_until
from tests.support.kernels import Kernel, kernel, shared_memory

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "first_run.ipynb"
LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")


def cells() -> list[str]:
    """Its code, cell by cell."""
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def is_whole(said: str) -> None:
    """Whether this is what all cells print."""
    lines = said.splitlines()
    assert sum("epoch 10/10  done  loss" in line for line in lines) == 2
    assert "200 updates" in lines
    right = [line.partition("%")[0] for line in lines if "% of the points" in line]
    assert len(right) == 1 and int(right[0]) > 60
    assert any(line.startswith("staleness: ") for line in lines)
    assert "[]" in lines


@pytest.mark.wide
@pytest.mark.own_process
def test_the_cells_run_as_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.chdir(tmp_path)
    (script := tmp_path / "first_run.py").write_text("\n\n".join(cells()))
    runpy.run_path(str(script))
    is_whole(capfd.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first_run.py"]


# ---- in a kernel ---------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Kernel]:
    pytest.importorskip("ipykernel")
    with kernel(tmp_path) as started:
        yield started


def leaves_nothing(notebook: Kernel) -> None:
    assert notebook.children() == []
    assert shared_memory(notebook.pid) == []


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom_in_a_kernel(notebook: Kernel) -> None:
    for cell in cells():
        assert notebook.run(cell) == "ok", notebook.printed
        leaves_nothing(notebook)
    is_whole(notebook.printed)
    assert notebook.of_kind("display_data", "comm_open") == []  # widgets


@pytest.mark.sampled(1)
@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["hybrid", "async", "hogwild"])
def test_interrupting_a_cell_stops_the_workers_and_the_next_cell_trains(
    strategy: str, notebook: Kernel
) -> None:
    for cell in cells()[:2]:
        assert notebook.run(cell) == "ok", notebook.printed
    train = cells()[2].partition("\n\n\n")[0]
    assert notebook.run(train.replace("line_every_s=1.0", "line_every_s=0.0")) == "ok"
    for _ in range(2):  # the second time as the first
        request = notebook.begin(f"train({strategy!r}, epochs=10**6)")
        wait_until(lambda: len(notebook.children()) == 2, 60.0)
        time.sleep(1.0)  # in the midst of it, as a rule
        notebook.interrupt()
        assert notebook.end(request) == "SystemExit", notebook.printed
        leaves_nothing(notebook)
    assert notebook.run(f"print(train({strategy!r}, epochs=2)[1].global_step)") == "ok"
    leaves_nothing(notebook)
    assert ("40" if strategy == "hybrid" else "80") in notebook.printed.splitlines()


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_error_in_a_worker_is_shown_below_the_cell_and_leaves_nothing(notebook: Kernel) -> None:
    for cell in cells()[:3]:
        assert notebook.run(cell) == "ok", notebook.printed
    cell = "Spirals.training_step = lambda self, batch, batch_idx: 1 / 0\ntrain('hybrid')"
    assert notebook.run(cell) == "ZeroDivisionError"
    (shown,) = notebook.of_kind("error")
    assert "worker" in "".join(shown["traceback"])
    leaves_nothing(notebook)


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lightnings_own_bar_and_summary_are_text_of_a_worker(notebook: Kernel) -> None:
    for cell in cells()[:2]:
        assert notebook.run(cell) == "ok", notebook.printed
    notebook.said.clear()
    notebook.run(
        "L.Trainer(strategy='hybrid', accelerator='cpu', devices=2, max_epochs=1, logger=False,"
        " enable_checkpointing=False).fit(Spirals(), loader)"
    )
    assert "Trainable params" in notebook.printed and "ipywidgets" not in str(notebook.said)
    assert notebook.of_kind("display_data") == []


# ---- what keeps it so ----------------------------------------------------------------------------


class Ending(BoringModel):
    """Ends its training in the second step of worker 0."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self.end = end

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.end()
        return super().training_step(batch, batch_idx)


def fails() -> None:
    raise ArithmeticError("on purpose")


def quiet(**options: Any) -> pl.Trainer:
    """A trainer with two workers."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(strategy="hybrid", accelerator="cpu", devices=2, **silent, **options)


@pytest.mark.wide
@pytest.mark.few(1)
@LINUX
@pytest.mark.own_process
@pytest.mark.parametrize("end", ["an error", "an interrupt"])
def test_an_exception_that_is_kept_keeps_no_shared_memory_and_training_goes_on(
    end: str, tmp_path: Path
) -> None:
    """As a notebook keeps the last one, and trains again in its next cell."""
    os.chdir(tmp_path)
    gc.collect()
    parent, before = os.getpid(), shared_memory("self")  # of tests before this one
    module = Ending(fails if end == "an error" else lambda: os.kill(parent, 2))
    with pytest.raises((ArithmeticError, SystemExit)) as kept:
        quiet(max_epochs=100).fit(module)
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert set(shared_memory("self")) <= set(before)  # collections since may have freed some
    step = torch.load("interrupted.ckpt", weights_only=True)["global_step"]
    (again := quiet(max_steps=step + 5)).fit(BoringModel(), ckpt_path="interrupted.ckpt")
    assert again.global_step == step + 5


@pytest.mark.own_process
def test_a_forked_worker_is_in_no_notebook() -> None:
    pytest.importorskip("IPython")
    import rich
    from IPython import get_ipython
    from IPython.core.interactiveshell import InteractiveShell

    class ZMQInteractiveShell(InteractiveShell):
        """Which rich knows by its name."""

    vars(builtins)["get_ipython"] = ZMQInteractiveShell.instance().get_ipython
    rich.reconfigure()
    assert rich.get_console().is_jupyter and get_ipython() is not None
    leave_notebook()
    assert not rich.get_console().is_jupyter and get_ipython() is None


def test_an_exception_that_is_its_own_cause_is_cleared_and_a_handled_one_is_not() -> None:
    def failing(held: str) -> None:
        raise ArithmeticError(held)

    with pytest.raises(ArithmeticError) as handled:
        failing("before")
    with pytest.raises(ArithmeticError) as kept:
        failing("now")
    kept.value.__cause__, kept.value.__context__ = kept.value, handled.value
    clear_frames_of(kept.value, handled.value)
    (now, before) = (e.value.__traceback__.tb_next.tb_frame for e in (kept, handled))  # type: ignore[union-attr]
    assert not now.f_locals and before.f_locals == {"held": "before"}
