"""scripts/gpu_check.sh: what it says without a GPU, what it makes of results, and its loops."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import frame, rows, runs
from benchmarks.jobs import gpu_loops, gpu_models
from benchmarks.parts import gpu
from gpu_check import __main__ as main
from gpu_check import bus, check, fits, machine, plan, testing
from pytorch_lightning.accelerators import AcceleratorRegistry

from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.packaging.test_scripts import complete, executable, script
from tests.standin.accelerator import StandInAccelerator
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS

assert complete is not None  # a fixture
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


# ---- as a whole ----------------------------------------------------------------------------------


@pytest.mark.slow
@no_gpu
def test_the_gpu_check_without_a_gpu_says_so_and_runs_nothing(complete: Path) -> None:
    executable(complete / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    before = set(complete.parent.iterdir())
    done = script("gpu_check.sh", complete)
    assert done.returncode == main.NO_GPU, done.stderr
    assert "No GPU: torch" in done.stderr and "Nothing was checked" in done.stderr
    assert done.stdout == "" and set(complete.parent.iterdir()) == before


@pytest.mark.slow
def test_the_gpu_check_takes_the_interpreter_that_is_there_and_leaves_one_file(
    complete: Path, tmp_path: Path
) -> None:
    executable(tmp_path / "bin" / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    before, arguments = set(complete.parent.iterdir()), ["--here", "--anyway", "--only", "machine"]
    done = script("gpu_check.sh", complete, *arguments, PATH=path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| yes ") == 1
    assert set(complete.parent.iterdir()) - before == {complete.parent / "gpu_check.json"}
    (found,) = json.loads((complete.parent / "gpu_check.json").read_text())["checks"]
    assert found["figures"]["cores"] >= 1 and found["figures"]["versions"]["torch"]


def test_an_interpreter_without_what_is_needed_is_no_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: None if name == "torch" else name)
    assert main.main([]) == main.NO_ENVIRONMENT
    assert "has no torch; nothing was checked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "hbyrid"], "names no check; there are: machine, "),
        (["--seconds", "0"], "it must be more than 0"),
        (["--json", "no/such/folder/file"], "there is no such folder"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.parse(arguments)
    assert said in capsys.readouterr().err


def test_what_is_planned_is_there_and_the_cheapest_comes_first() -> None:
    planned = list(plan.checks())
    assert len({each.name for each in planned}) == len(planned)
    assert planned[0].name == "machine"
    for each in planned:
        module, _, name = each.function.partition(":")
        assert callable(getattr(sys.modules.get(module) or __import__(module), name, print))
        for file in each.arguments.get("files", ()):
            assert (ROOT / file).is_file()


# ---- one check -----------------------------------------------------------------------------------


def answer(code: str, tmp_path: Path, limit_s: float = 30.0) -> check.Verdict:
    """Of a check with this code."""
    (tmp_path / "made_up.py").write_text(f"from gpu_check.check import Found\ndef it():\n {code}\n")
    return check.run(check.Check("it", "made_up:it", 9.0), tmp_path, limit_s)


@pytest.fixture
def found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("code", "right", "said"),
    [
        ("return Found('well', True, {'n': 1})", check.RIGHT, "well"),
        ("return Found('bad', False)", check.WRONG, "bad"),
        ("return Found('nothing to do', None)", check.LEFT_OUT, "nothing to do"),
        ("raise ValueError('x')", check.WRONG, "failed (exit code 1): ValueError: x"),
        ("import os; os._exit(7)", check.WRONG, "failed (exit code 7)"),
    ],
)
def test_a_check_ends_in_a_verdict(found_here: Path, code: str, right: str, said: str) -> None:
    verdict = answer(code, found_here)
    assert (verdict.right, verdict.found) == (right, said)


def test_a_check_that_takes_too_long_is_ended_with_all_that_it_has_started(
    found_here: Path,
) -> None:
    started = "__import__('subprocess').Popen(['sleep', '50']).pid"
    code = f"print({started}, flush=True); __import__('time').sleep(50)"
    verdict = answer(code, found_here, 1.5)
    assert verdict.right == check.WRONG and verdict.found == "took more than 2 s"
    command, end = Path("/proc", verdict.lines[-1], "cmdline"), time.monotonic() + 20
    while command.is_file() and command.read_bytes():  # a kill takes its time
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)


def test_what_cannot_be_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = check.Check("it", "nowhere:it", 9.0)
    assert main.judge(one, False, 99.0).found == "there is no GPU"
    assert main.judge(one, True, 1.0).found == "there was no time left"
    monkeypatch.setattr(main, "find_spec", lambda name: None)
    assert main.judge(one, True, 99.0).found == "not installed: torch, pytorch_lightning"


def verdict(right: str) -> check.Verdict:
    return check.Verdict("it", right, "so")


@pytest.mark.parametrize(
    ("rights", "well"),
    [
        ([check.RIGHT, check.LEFT_OUT], True),
        ([check.RIGHT, check.WRONG], False),
        ([check.LEFT_OUT], False),  # nothing was checked
    ],
)
def test_one_table_says_what_is_right(rights: list[str], well: bool) -> None:
    verdicts = [verdict(right) for right in rights]
    assert main.well(verdicts) is well
    assert [line.split("|")[2].strip() for line in main.table(verdicts).splitlines()[2:]] == rights


# ---- what they do --------------------------------------------------------------------------------

RESULTS = (
    '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}">'
    '<testcase><skipped message="needs 2"/></testcase></testsuite></testsuites>'
)


@pytest.mark.parametrize(
    ("code", "counts", "right"),
    [
        (0, (9, 0, 2), True),
        (1, (9, 1, 2), False),
        (0, (9, 0, 9), None),  # nothing was tested
        (2, (9, 0, 2), False),
    ],
)
def test_results_of_tests_are_counted(
    tmp_path: Path, code: int, counts: tuple[int, int, int], right: bool | None
) -> None:
    (tmp_path / "tests.xml").write_text(RESULTS.format(*counts))
    text, found = testing.counted(tmp_path / "tests.xml", code)
    n, failed, skipped = counts
    assert found is right
    assert text == f"{n - failed - skipped} passed, {failed} failed, {skipped} skipped (needs 2)"
    assert testing.counted(tmp_path / "none.xml", 4) == ("pytest did not run (exit code 4)", False)


def test_a_file_of_tests_whose_imports_are_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_it.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = testing.run(["test_it.py"])
    assert (found.text, found.right) == ("test_it.py (no no_such_package)", None)


@pytest.mark.own_process
def test_the_bus_is_measured_both_ways_with_and_without_page_locking() -> None:
    name_it()
    found = bus.probe(2**21, NAME)
    assert found.right and found.text.startswith("page-locked ")
    assert found.figures["locked"]["up_GB_s"] > 0 < found.figures["copy_64_KiB_us"]
    SETTINGS.lockable_bytes = 1.0
    assert bus.probe(2**21, NAME).text == "2 MiB could not be page-locked: CUDA error 2"


def test_what_nvidia_smi_says_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 0, NVIDIA H100 80GB\necho 1, Other\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.facts()
    assert found.figures["gpus"] == ["0, NVIDIA H100 80GB", "1, Other"]
    assert found.text.startswith("2 GPU (0, NVIDIA H100 80GB), ")


@pytest.mark.slow
def test_private_names_are_found_and_missed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nfrom torch.optim.optimizer import _such\nfrom torch.utils._pytree import x\n"
        "torch._foreach_norm([])\ntorch._no_such_thing()\n"
    )
    names = set(machine.names_used(tmp_path))
    assert names == {
        "torch.optim.optimizer._such",
        "torch.utils._pytree.x",
        "torch._foreach_norm",
        "torch._no_such_thing",
    }
    assert {name for name in names if machine._is_there(name)} == {"torch._foreach_norm"}
    assert machine.private_names().right, "of the torch that is here"


# ---- the benchmark -------------------------------------------------------------------------------


@no_gpu
def test_the_gpu_part_of_the_benchmark_is_left_out_without_a_gpu() -> None:
    (row,) = gpu.rows(frame.Frame("gpu", frame.Options(), runs.Runner()))
    assert isinstance(row, rows.Skipped) and "no CUDA device" in row.reason


@pytest.mark.slow
def test_the_ways_to_train_of_the_gpu_benchmark_agree_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny = gpu_models.TINY
    assert gpu_loops.difference(2, {}, "cpu") < 1e-6
    assert 1e-7 < gpu_loops.difference(2, {"transport_dtype": "bf16"}, "cpu") < 1e-2
    assert gpu_loops.difference_behind("cpu") < 1e-6
    behind = gpu_loops.hybrid(tiny, 2, gpu.ONE_BEHIND, "cpu", clip=gpu.CLIP)
    assert behind["samples_per_s"] == pytest.approx(2 / behind["step_s"])
    two = gpu_loops.hybrid(tiny, 2, {"workers_per_device": 2}, "cpu")
    assert two["samples_per_s"] == pytest.approx(4 / two["step_s"])
    assert gpu_loops.plain(tiny, 2, "cpu")["step_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_else_is_done_on_a_gpu_can_be_done_on_a_cpu(tmp_path: Path) -> None:
    def done(function: str, **arguments: Any) -> check.Verdict:
        return check.run(check.Check("it", function, 100, arguments), tmp_path, 100)

    on_cpu = {"size": "tiny", "accelerator": "cpu"}
    for found in (
        done("gpu_check.steps:measured", way="ddp", **on_cpu),
        done("gpu_check.steps:difference", workers=2, options={}, accelerator="cpu"),
        done("gpu_check.steps:profiled", options={}, **on_cpu),
        done("gpu_check.fits:run", device="cpu"),
        done("gpu_check.testing:run", files=["tests/util/test_files.py"], only="not gpu"),
    ):
        assert found.right == check.RIGHT, (found.found, found.lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in fits.FITS if name != "torch.compile"])
def test_fits_end_well_on_the_stand_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    if NAME not in AcceleratorRegistry:
        AcceleratorRegistry.register(NAME, StandInAccelerator)
    name_it()
    found = fits.run(NAME, only=(name,))
    assert found.right, found.figures
    assert list(found.figures) == [name]


def test_every_contender_may_use_all_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Any] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def enough(*_: Any, **__: Any) -> None:
        raise EOFError

    monkeypatch.setattr(gpu_loops, "fit", enough)
    monkeypatch.setattr(gpu_loops, "optional", enough)
    ours = partial(gpu_loops.hybrid, options={})
    others = gpu_loops.plain, gpu_loops.ddp, gpu_loops.torchao, gpu_loops.deepspeed
    for way in (ours, *others):
        with pytest.raises(EOFError):
            way(gpu_models.TINY, 2)
        assert os.environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads == [len(os.sched_getaffinity(0))] * 5


class Returns(runs.Runner):
    def __init__(self) -> None:
        pass

    def run(self, job: runs.Job) -> Any:
        step_s = 0.5 if "hybrid" in job.label or "pipe_sgd" in job.label else 1.0
        return {"step_s": step_s, "samples_per_s": 8 / step_s, "peak_bytes": 2**31}


def test_samples_and_memory_stand_beside_the_time_of_a_step() -> None:
    found = list(gpu.against_others(frame.Frame("gpu", frame.Options(), Returns()), {}, 8, "work"))
    assert len(found) == 3 * 4
    for row in found:
        assert isinstance(row, rows.Row) and (row.ours, row.theirs) == (500.0, 1000.0)
        assert f"{row.method}: 16 samples/s, 2.0 GiB of the device at most" in row.note
        assert f"{row.baseline}: 8 samples/s" in row.note


def test_sizes_are_what_their_names_say() -> None:
    found = {name: gpu_models.parameters_of(model) for name, model in gpu_models.SIZES.items()}
    wanted = {"25 M": 25e6, "170 M": 170e6, "1.2 G": 1.2e9}
    assert all(abs(found[name] / n - 1) < 0.06 for name, n in wanted.items()), found
