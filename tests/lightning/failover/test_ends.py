"""How runs end: errors, deaths, signals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain.engine.worlds.worker_exit import WorkerDied
from hybridtrain.errors import UserError
from hybridtrain.lightning import launcher
from tests.lightning.toys import Regression, fit, make_trainer, regression_data


class Failing(Regression):
    """Worker 1 fails in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            self.fail()
        if self.global_rank != 1:
            time.sleep(0.03)  # or, where workers draw from one queue, there may be no third for it
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        raise LookupError("the third step")


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_a_workers_exception_appears_with_its_traceback_and_number(strategy: str) -> None:
    with pytest.raises(LookupError, match="the third step") as caught:
        fit(strategy, 3, 4, Failing)
    (note,) = caught.value.__notes__
    assert "in worker 1, in its training step 3, on cpu:\n" in note and "in fail" in note


def test_a_killed_worker_is_named() -> None:
    class Killed(Failing):
        def fail(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"worker 1 .* was killed by SIGKILL"):
        fit("hybrid", 3, 4, Killed)
    assert time.monotonic() - began < 20


def test_callbacks_hear_of_the_exception_in_the_worker(tmp_path: Path) -> None:
    class Telling(Failing):
        def on_exception(self, exception: BaseException) -> None:
            (tmp_path / f"module-{self.global_rank}").write_text(repr(exception))

    from pytorch_lightning import Callback

    class Listener(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            (tmp_path / f"rank-{trainer.global_rank}-{os.getpid()}").write_text(repr(exception))

    with pytest.raises(LookupError):
        fit("hybrid", 2, 4, Telling, callbacks=[Listener()])
    texts = {path.name[:6]: path.read_text() for path in tmp_path.iterdir()}
    assert "the third step" in texts["rank-1"]


def test_an_optimizer_with_foreign_parameters_is_refused() -> None:
    class Foreign(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    with pytest.raises(UserError, match="not a parameter of Foreign"):
        fit("hybrid", 2, 4, Foreign)


def test_a_module_without_anything_to_train_is_refused() -> None:
    class Frozen(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    with pytest.raises(UserError, match="no parameters that need gradients"):
        fit("hybrid", 2, 4, Frozen)


def test_an_unknown_policy_and_silly_numbers_are_refused() -> None:
    from hybridtrain import HybridStrategy

    with pytest.raises(UserError, match="policy='maybe'"):
        HybridStrategy(policy="maybe")
    for value in (0, -1, True, "two"):
        with pytest.raises(UserError, match="workers_per_device"):
            HybridStrategy(workers_per_device=value)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="start_method='teleport'"):
        fit(HybridStrategy(start_method="teleport"), 2, 4)
    with pytest.raises(UserError, match="num_nodes is more than 1"):
        make_trainer("hybrid", 2, num_nodes=2)


@pytest.mark.parametrize(
    "option", [{"val_check_interval": 2}, {"val_check_interval": 0.5}, {"limit_train_batches": 0.5}]
)
def test_options_that_need_lock_step_are_refused_under_async(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(option))}=.* strategy=hybrid"):
        fit("async", 2, 4, **option)
    fit("hybrid", 2, 4, **option, max_epochs=1)


def test_workers_that_take_different_paths_are_told_so() -> None:
    class Apart(Regression):
        def on_train_epoch_end(self) -> None:
            if self.global_rank == 0:
                self.trainer.strategy.barrier("only here")

    with pytest.raises(UserError, match="same path"):
        fit("hybrid", 2, 4, Apart)


SCRIPT = """
    import sys, time, torch, pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from tests.lightning.toys import Regression, make_trainer, regression_data

    class Slow(Regression):
        def training_step(self, batch, batch_idx):
            time.sleep(0.05)
            if batch_idx == 3 and self.global_rank == 0:
                print("training", flush=True)
            return super().training_step(batch, batch_idx)
        def validation_step(self, batch, batch_idx):
            time.sleep(0.05)
            if batch_idx == 1 and self.global_rank == 0:
                print("validating", flush=True)
            return super().validation_step(batch, batch_idx)

    trainer = make_trainer(
        sys.argv[1], 3, max_epochs=1000, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(sys.argv[2])],
    )
    loader = DataLoader(regression_data(96), batch_size=4)
    trainer.fit(Slow(lambda p: torch.optim.Adam(p, lr=0.01)), loader, loader)
"""


INHERITING = """
    import sys, torch
    from tests.lightning.toys import fit

    where = f"file://{sys.argv[1]}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    _, trainer = fit("hybrid", 2, 6, max_epochs=1)
    print("steps", trainer.global_step)
"""


@pytest.mark.slow
def test_workers_leave_a_process_group_that_they_inherit(tmp_path: Path) -> None:
    """As ddp leaves one behind, in the process it ran in; with it Lightning would broadcast."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INHERITING), str(tmp_path / "rendezvous")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "steps 4" in done.stdout, done.stderr


def start(strategy: str, folder: Path, phase: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, brought to ``phase``."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), strategy, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if phase in line:
            return process
    raise AssertionError(f"the run ended before {phase}")


def members(group: int) -> list[int]:
    """The processes of a process group that are still there (zombies left out)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until_empty(group: int, limit_s: float = 10.0) -> list[int]:
    """What is left of a process group, at most ``limit_s`` later."""
    deadline = time.monotonic() + limit_s
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["training", "validating"])
@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_ctrl_c_leaves_a_checkpoint_and_no_process(
    strategy: str, phase: str, tmp_path: Path
) -> None:
    process = start(strategy, tmp_path, phase)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(30) != 0
    assert wait_until_empty(process.pid) == []
    checkpoint = torch.load(tmp_path / "interrupted/interrupted.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in states} == {checkpoint["global_step"]}


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_alone_ends_with_its_number(tmp_path: Path, signum: int) -> None:
    process = start("hybrid", tmp_path, "training")
    process.send_signal(signum)
    assert process.wait(30) == 128 + signum
    assert wait_until_empty(process.pid) == []
    assert (tmp_path / "interrupted/interrupted.ckpt").is_file()


@pytest.mark.slow
def test_sigkill_of_the_parent_leaves_no_worker(tmp_path: Path) -> None:
    process = start("hybrid", tmp_path, "training")
    assert len(members(process.pid)) == 4
    process.kill()
    process.wait(10)
    assert wait_until_empty(process.pid) == []


@pytest.mark.slow
def test_a_terminal_that_closes_leaves_a_checkpoint(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        script = [sys.executable, "-c", textwrap.dedent(SCRIPT), "hybrid", str(tmp_path)]
        os.execv(sys.executable, script)
    said = b""
    while b"training" not in said:
        said += os.read(terminal, 1024)
    os.close(terminal)  # what is printed from now on cannot be written
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "interrupted/interrupted.ckpt").is_file()
    assert wait_until_empty(pid) == []


class Interrupting(Regression):
    """The calling process gets a signal in worker 0's second epoch."""

    signum = signal.SIGINT

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (self.global_rank, self.current_epoch, batch_idx) == (0, 1, 1):
            os.kill(os.getppid(), self.signum)
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    adam = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    trainer = make_trainer(
        "hybrid", 2, default_root_dir=tmp_path, enable_checkpointing=True, max_epochs=1000
    )
    with pytest.raises(SystemExit):
        trainer.fit(Interrupting(adam), DataLoader(regression_data(96), 6))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    (path,) = tmp_path.rglob("interrupted.ckpt")
    step = torch.load(path, weights_only=True)["global_step"]
    assert 8 < step < 1000
    _, resumed = fit("hybrid", 3, 4, Regression(adam), regression_data(96), str(path), max_epochs=9)
    assert resumed.current_epoch == 9 and resumed.global_step > step


class HungUp(Interrupting):
    signum = signal.SIGHUP


def test_a_closed_terminal_ends_a_run_as_sigterm_does_unless_nohup_was_asked_for(
    tmp_path: Path,
) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True, "max_epochs": 3}
    try:
        trainer = make_trainer("hybrid", 2, **options)
        trainer.fit(HungUp(), DataLoader(regression_data(), 6))
        assert trainer.current_epoch == 3
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended:
            make_trainer("hybrid", 2, **options).fit(HungUp(), DataLoader(regression_data(), 6))
        assert ended.value.code == 128 + signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, former)
    assert len(list(tmp_path.rglob("interrupted.ckpt"))) == 1


@pytest.mark.parametrize("strategy", ["hybrid", "ssp"])
def test_an_interrupt_as_workers_go_home_loses_nothing(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is over: no worker stops any more, and none of them saves."""
    packed = launcher.pack

    def pack(*given: Any) -> Any:
        if os.environ["LOCAL_RANK"] == "0":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)  # it is heard before this worker has ended
        return packed(*given)

    monkeypatch.setattr(launcher, "pack", pack)
    handler = signal.getsignal(signal.SIGINT)
    module = Regression()
    trainer = make_trainer(
        strategy, 2, default_root_dir=tmp_path, enable_checkpointing=True, max_epochs=2
    )
    with pytest.raises(SystemExit):
        trainer.fit(module, DataLoader(regression_data(), 6))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from then on
    (path,) = tmp_path.rglob("interrupted.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == trainer.global_step > 0
    assert all(torch.equal(v, saved["state_dict"][k]) for k, v in module.state_dict().items())
    assert saved["optimizer_states"][0].keys() == {"state", "param_groups"}
    assert trainer.strategy.interrupted_by == signal.SIGINT
