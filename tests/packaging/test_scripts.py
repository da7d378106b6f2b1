"""scripts/*.sh: one command makes the environment, once, and uses it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import loaded

ROOT = Path(__file__).parents[2]
FAKE = '#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n'  # an interpreter that tells how it was called


@pytest.fixture
def setup() -> ModuleType:
    return loaded("make_environment")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def script(
    name: str, venv: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *arguments],
        cwd=venv.parent,
        env=os.environ | {"HYBRIDTRAIN_VENV": str(venv), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """An environment made by a builder that does nothing, so that its marker is the true one."""
    venv = tmp_path / "env"
    builder = 'case "$1" in *make_environment.py) mkdir -p "$3"; echo "$4" > "$3/complete";; esac'
    base = executable(tmp_path / "base" / "python", f"#!/bin/sh\n{builder}\n")
    executable(venv / "bin" / "python", FAKE)
    assert script("train.sh", venv, HYBRIDTRAIN_PYTHON=str(base)).returncode == 0
    assert (venv / "complete").is_file()
    return venv


def test_train_passes_every_argument_on_and_stays_in_the_users_folder(complete: Path) -> None:
    arguments = ["trainer.devices=4", "model.words=[a, b]", "x='$HOME *'"]
    done = script("train.sh", complete, *arguments)
    assert done.stdout.splitlines() == [str(complete.parent), "-m", "hybridtrain", *arguments]
    assert done.stderr == ""


ALL, SLOW = ["-n", "auto", "--maxprocesses", "4"], ["-n", "auto", "--maxprocesses", "8"]


@pytest.mark.parametrize(
    ("arguments", "before"),
    [
        (["-k", "one or two"], []),
        ([], ALL),
        (["-m", "slow", "-k", "one or two"], [*SLOW, "--dist", "worksteal"]),
    ],
)
def test_test_runs_pytest_in_the_repository(
    complete: Path, arguments: list[str], before: list[str]
) -> None:
    done = script("test.sh", complete, *arguments)
    assert done.stdout.splitlines() == [str(ROOT), "-m", "pytest", *before, *arguments]


def test_a_complete_environment_costs_next_to_nothing(complete: Path) -> None:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        script("train.sh", complete)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.3


@pytest.mark.parametrize("damage", ["no marker", "old marker", "no interpreter"])
def test_an_incomplete_environment_is_made_anew(complete: Path, damage: str) -> None:
    if damage == "no marker":
        (complete / "complete").unlink()
    elif damage == "old marker":
        (complete / "complete").write_text("1 2\n")
    else:
        (complete / "bin" / "python").unlink()
    noted = '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@" >&2\nexit 3\n'
    base = executable(complete.parent / "noted", noted)
    done = script("train.sh", complete, HYBRIDTRAIN_PYTHON=str(base))
    assert done.returncode == 3  # the builder's own status
    assert f"make_environment.py {ROOT} {complete}" in done.stderr
    assert done.stdout == ""


def test_a_machine_without_a_fitting_python_is_told_so(tmp_path: Path) -> None:
    tools = ("bash", "cat", "cksum", "dirname", "env")
    for name in tools:
        found = subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        (tmp_path / name).symlink_to(found)
    done = script("train.sh", tmp_path / "env", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr


Tries = list[tuple[str, ...]]


@pytest.fixture
def pip(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., bool]], Tries]:
    """Replace pip by a function that says what succeeds; returns the list of what was tried."""

    def replace(works: Callable[..., bool]) -> Tries:
        tried: Tries = []

        def fake(self: object, *args: str) -> bool:
            tried.append(args)
            return works(*args)

        monkeypatch.setattr(setup.Environment, "pip", fake)
        monkeypatch.setattr(setup.Environment, "create", lambda self: self.venv.mkdir())
        return tried

    return replace


def make(setup: ModuleType, venv: Path) -> int:
    code: int = setup.main(ROOT, venv, "wanted")
    return code


def test_the_cpu_build_comes_from_the_configured_source_first_then_from_pytorchs(
    setup: ModuleType, pip: Callable[..., Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDTRAIN_TORCH", "cpu")
    tried = pip(lambda *args: "--index-url" in args or "--editable" in args)
    assert make(setup, tmp_path / "env") == 0
    torch = [x for x in tried if any("torch==" in y for y in x)]
    assert [x[-1].endswith("+cpu") for x in torch] == [True, True]
    assert [setup.CPU_INDEX in x for x in torch] == [False, True]
    assert all(set(setup.QUICK) <= set(x) for x in torch)
    assert (tmp_path / "env" / "complete").read_text() == "wanted\n"


def test_without_any_cpu_build_the_standard_one_is_taken_and_a_line_says_so(
    setup: ModuleType,
    pip: Callable[..., Tries],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HYBRIDTRAIN_TORCH", "cpu")
    tried = pip(lambda *args: not args[-1].endswith("+cpu"))
    assert make(setup, tmp_path / "env") == 0
    assert tried[2][-1].startswith("torch==") and "+" not in tried[2][-1]
    assert "taking the standard one" in capsys.readouterr().err


def test_with_a_gpu_the_standard_build_is_taken_at_once(
    setup: ModuleType, pip: Callable[..., Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: something'\n")
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.delenv("HYBRIDTRAIN_TORCH", raising=False)
    tried = pip(lambda *args: True)
    assert make(setup, tmp_path / "env") == 0
    assert not any("+cpu" in y for x in tried for y in x)


def test_a_failed_set_up_leaves_no_marker_and_says_what_pip_said(
    setup: ModuleType,
    pip: Callable[..., Tries],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip(lambda *args: False)
    venv = tmp_path / "env"
    monkey = setup.Environment.create
    setup.Environment.create = lambda self: (
        monkey(self),
        self.log.write_text("ERROR: no space left\n"),
    )
    try:
        assert make(setup, venv) == 2
    finally:
        setup.Environment.create = monkey
    assert "no space left" in capsys.readouterr().err
    assert not (venv / "complete").exists()


def test_a_second_set_up_waits_for_the_first_and_then_does_nothing(tmp_path: Path) -> None:
    venv = tmp_path / "env"
    body = f"""
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("m", {str(ROOT / "scripts/make_environment.py")!r})
m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
def create(self):
    (self.venv / "bin").mkdir(parents=True); (self.venv / "bin/python").touch()
    with open({str(tmp_path / "count")!r}, "a") as file: file.write("x")
    time.sleep(1)
m.Environment.create = create
m.Environment.pip = lambda self, *args: True
sys.exit(m.main(Path({str(ROOT)!r}), Path({str(venv)!r}), "wanted"))
"""
    both = [
        subprocess.Popen([sys.executable, "-c", body], stderr=subprocess.PIPE) for _ in range(2)
    ]
    assert [x.wait(timeout=30) for x in both] == [0, 0]
    assert (tmp_path / "count").read_text() == "x"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_set_up_from_nothing_then_a_run(tmp_path: Path) -> None:
    line = ["bash", str(ROOT / "scripts" / "train.sh"), "task=parabola", "trainer.max_epochs=3"]
    environment = os.environ | {"HYBRIDTRAIN_VENV": str(tmp_path / "env")}
    environment.pop("PYTHONPATH", None)
    for _ in range(2):
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Finished after" in done.stdout
    assert "[set-up]" not in done.stderr
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 2
