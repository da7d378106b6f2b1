"""After any end of a run no process, temporary file or shared memory of it is there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.busy import BUSY
from tests.cli.zygote import Run, Zygote
from tests.picking import by_default

LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
pytestmark = LINUX


def ended(run: Run, end: str) -> int:
    """Bring the run to its end, and return its status."""
    match end:
        case "parent":
            os.kill(run.pid, signal.SIGKILL)
        case "worker":
            os.kill(run.workers()[0], signal.SIGKILL)
        case "all":
            run.kill_all()
        case "SIGTERM" | "SIGINT":
            os.kill(run.pid, getattr(signal, end))
    return run.status()


STATUS = {"parent": -9, "all": -9, "worker": 1, "SIGTERM": 143, "SIGINT": 130}


def is_clean_after(end: str, run: Run, n_processes: int) -> None:
    """Whether it has that many processes, ends so, and leaves nothing."""
    run.until("reached")
    assert len(run.processes()) >= n_processes
    assert ended(run, end) == STATUS[end], run.said()
    assert run.left() == [], run.said()


@pytest.mark.parametrize("end", by_default(["parent", "worker", "SIGTERM"], "SIGTERM"))
def test_nothing_is_left_of_a_run_with_data_loaders(
    end: str, zygote: Zygote, tmp_path: Path
) -> None:
    is_clean_after(end, zygote.start(tmp_path, *BUSY), 1 + 2 + 4)


def test_a_run_that_waits_for_its_data_loaders_is_gone_when_its_parent_is(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Nobody in it looks whether the others live: this is the kernel's doing."""
    is_clean_after("parent", zygote.start(tmp_path, *BUSY, "data.stuck=true"), 1 + 2 + 4)


def test_ranks_of_ddp_end_with_the_process_that_has_started_them(
    zygote: Zygote, tmp_path: Path
) -> None:
    is_clean_after("parent", zygote.start(tmp_path, *BUSY, "strategy=ddp"), 1 + 2 + 4)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_test_has_failed(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start(tmp_path, "-m", *BUSY[:-1], "hydra.sweep.dir=.", "strategy=hybrid,async")
    run.until("reached")
    assert len(run.processes()) >= 1 + 1 + 2 + 4
    zygote.clear()
    assert run.processes() == [] and not Path(run.temporary).exists()
    assert run.status() == -signal.SIGKILL


# Whatever is run, and however it ends ----------------------------------------------------------

RUNS = {
    "hybrid": ["strategy=hybrid"],
    "async": ["strategy=async"],
    "hogwild": ["strategy=hogwild"],
    "spawn": ["strategy=hybrid", "strategy.start_method=spawn"],
    "forkserver": ["strategy=hybrid", "strategy.start_method=forkserver"],
    "profile": ["strategy=hybrid", "profile=true"],
    "ddp": ["strategy=ddp"],
    "ddp-spawn": ["strategy=ddp", "strategy.start_method=spawn"],
    "ddp-popen": ["strategy=ddp", "strategy.start_method=popen"],
}
ENDS = ("parent", "worker", "all", "SIGTERM", "SIGINT", "exception", "end")
# Each has half of the ends, each end half of them: their processes import everything anew, or only
# what happens in a step is another.
HALF = {
    "async": ("parent", "worker", "SIGINT", "end"),
    "hogwild": ("parent", "all", "SIGTERM", "exception"),
    "profile": ("worker", "SIGTERM", "SIGINT", "end"),
    "spawn": ("parent", "worker", "SIGTERM", "exception"),
    "forkserver": ("parent", "all", "SIGINT", "end"),
    "ddp-spawn": ("parent", "worker", "SIGINT", "end"),
    "ddp-popen": ("parent", "all", "SIGTERM", "exception"),
}


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.timeout(300)  # importing all in nine processes afresh takes a busy machine a while
@pytest.mark.parametrize(
    ("kind", "end"), [(kind, end) for kind in RUNS for end in HALF.get(kind, ENDS)]
)
def test_nothing_is_left_of_any_run(kind: str, end: str, zygote: Zygote, tmp_path: Path) -> None:
    more = {"exception": ["model.fail_at=20"], "end": ["trainer.max_epochs=1"]}.get(end, [])
    run = zygote.start(tmp_path, *BUSY, *RUNS[kind], *more)
    run.until("reached")
    status = ended(run, end)
    assert (status == 0) == (end == "end"), run.said()
    assert run.left() == [], run.said()


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("end", ["parent", "all", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("how", ["fork", "popen"])
def test_nothing_is_left_of_a_sweep(how: str, end: str, zygote: Zygote, tmp_path: Path) -> None:
    # The sweep has claimed its own directory: a job in a fresh process needs another one.
    job = ["hydra.sweep.dir=.", "hydra.sweep.subdir=job", f"hydra.launcher.start_method={how}"]
    run = zygote.start(tmp_path, "-m", *BUSY[:-1], *job, "strategy=hybrid,ddp")
    run.until("reached")
    assert ended(run, end) != 0
    assert run.left() == [], run.said()
