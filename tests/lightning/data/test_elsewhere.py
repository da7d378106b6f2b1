"""Interactive sessions, notebooks, and systems that lack what Linux has."""

from __future__ import annotations

import code
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lightning.failover.test_ends import members, wait_until_empty

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

SESSION = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader
from tests.lightning.toys import Regression, make_trainer, regression_data
from hybridtrain import HybridStrategy

class Net(Regression):
    def __init__(self):
        super().__init__(lambda p: torch.optim.Adam(p, lr=0.01))

loader = DataLoader(regression_data(), batch_size=6)
net, trainer = Net(), make_trainer("hybrid", 2, max_epochs=1)
trainer.fit(net, loader)
again = make_trainer("async", 2, max_epochs=1)
again.fit(net, loader)
print("RESULT", hasattr(sys, "ps1"), trainer.global_step, again.global_step)
spawning = make_trainer(HybridStrategy(start_method="spawn"), 2, max_epochs=1)
try:
    spawning.fit(Regression(), loader)
except Exception as error:
    print("FOUND", error)

try:
    spawning.fit(net, loader)
except Exception as error:
    print("REFUSED", error)

"""


@pytest.mark.own_process
def test_an_interactive_session_trains_what_is_typed_into_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As :mod:`code` has sessions: ``sys.ps1`` is set, the main module has no file."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    sys.ps1 = ">>> "
    console = code.InteractiveConsole(vars(main), "<stdin>")
    for line in SESSION.splitlines():
        console.push(line)
    check_session(*capsys.readouterr())


@pytest.mark.slow
def test_a_real_interpreter_trains_what_is_piped_into_it() -> None:
    """Its lines come through a pipe."""
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=SESSION,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
        check=False,
    )
    check_session(done.stdout, done.stderr)


def check_session(out: str, err: str) -> None:
    assert "RESULT True 4 8" in out, err
    (found,) = [line for line in out.splitlines() if "FOUND" in line]
    assert "model.make_optimizer is a lambda" in found
    (refused,) = [line for line in out.splitlines() if "REFUSED" in line]
    assert "model is an object of the class Net" in refused or "is a lambda" in refused
    assert "start_method=fork" in refused


# ---- a notebook ---------------------------------------------------------------------------------

CELLS = [
    """
    import os, signal, threading, time, torch, warnings
    warnings.simplefilter("ignore")
    from torch.utils.data import DataLoader
    from tests.lightning.toys import Regression, make_trainer, regression_data

    class Net(Regression):
        def training_step(self, batch, batch_idx):
            time.sleep(self.pause)
            return super().training_step(batch, batch_idx)
        pause = 0.0

    loader = DataLoader(regression_data(), batch_size=6)
    """,
    """
    net = Net()
    for strategy in ("hybrid", "async"):
        trainer = make_trainer(strategy, 2, max_epochs=1)
        trainer.fit(net, loader)
        print(strategy, trainer.global_step)
    """,
    """
    Net.pause = 0.05
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()  # the stop button
    trainer = make_trainer("hybrid", 2, max_epochs=1000)
    trainer.fit(net, loader)
    """,
    """
    import multiprocessing
    Net.pause = 0.0
    trainer = make_trainer("hybrid", 2, max_epochs=1)
    trainer.fit(net, loader)
    print("alive", trainer.global_step, multiprocessing.active_children())
    """,
]


@pytest.mark.slow
def test_a_notebook_trains_twice_and_survives_the_stop_button(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, timeout=60, allow_errors=True)
    client.execute(cwd=str(tmp_path), env=ENVIRONMENT)

    def printed(number: int) -> str:
        outputs: list[Any] = notebook.cells[number].outputs
        return "".join(o.get("text", "") + o.get("ename", "") for o in outputs)

    assert "hybrid 4" in printed(1) and "async 8" in printed(1), printed(1)
    assert "SystemExit" in printed(2) or "KeyboardInterrupt" in printed(2), printed(2)
    assert "alive 4 []" in printed(3), printed(3)


# ---- macOS --------------------------------------------------------------------------------------

# Faked after the imports, whose own decisions are not ours, and in each spawned worker too.
MACOS = """
    import ctypes, multiprocessing, os, pathlib, sys, warnings
    warnings.simplefilter("ignore")
    import torch, pytorch_lightning
    from hybridtrain import HybridStrategy
    from hybridtrain.engine.memory import limits
    from hybridtrain.engine.worlds import worker_main
    from tests.lightning.spawnable import SpawnRegression
    from tests.lightning.toys import Regression, fit, flat

    for name in ("memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity"):
        delattr(os, name)
    limits._MEMINFO = pathlib.Path("/nowhere/meminfo")
    limits._CGROUP = pathlib.Path("/nowhere/cgroup")

    class Libc:  # neither prctl nor mallopt
        def __init__(self, *args, **kwargs): ...
        def __getattr__(self, name): raise AttributeError(name)

    worker_main.ctypes = type("ctypes", (), {"CDLL": Libc})
    sys.platform = "darwin"

    class Slow(SpawnRegression):
        def training_step(self, batch, batch_idx):
            import time
            time.sleep(0.05)
            print("training", flush=True)
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        what, strategy = sys.argv[1:]
        if what == "slow":
            fit(HybridStrategy(policy=strategy), 2, 6, Slow, max_epochs=1000)
        made = HybridStrategy(policy=strategy, start_method=what)
        module, trainer = fit(made, 2, 6, SpawnRegression, max_epochs=2)
        print("STEPS", trainer.global_step, trainer.strategy.run_stats()["samples"])
        print("SUM", float(flat(module).sum()))
"""


def macos(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(MACOS))
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=ENVIRONMENT | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
@pytest.mark.parametrize("method", ["fork", "auto"])  # which is spawn, as on macOS
def test_without_what_linux_has_whole_runs_work_and_leave_nothing(
    method: str, strategy: str, tmp_path: Path
) -> None:
    process = macos(tmp_path, method, strategy)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert f"STEPS {8 if strategy == 'hybrid' else 16} 96" in out
    assert wait_until_empty(process.pid) == []
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_without_a_signal_at_the_parents_death_workers_end_all_the_same(tmp_path: Path) -> None:
    process = macos(tmp_path, "slow", "hybrid")
    assert process.stdout is not None
    for line in process.stdout:
        if "training" in line:
            break
    time.sleep(0.2)
    assert len(members(process.pid)) >= 3
    process.kill()
    process.wait(10)
    assert wait_until_empty(process.pid, 20.0) == []
