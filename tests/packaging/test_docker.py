"""The Dockerfile, as far as it can be tried without an engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, str]]:
    """(instruction, argument) of each step, continued lines joined, comments left out."""
    lines = [x for x in (ROOT / "Dockerfile").read_text().splitlines() if not x.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(x.split(None, 1)[0], x.split(None, 1)[1]) for x in text.splitlines() if x.strip()]


def of(instruction: str) -> list[str]:
    return [argument for name, argument in steps() if name == instruction]


def test_the_image_runs_as_somebody_without_rights_in_a_folder_of_his() -> None:
    names = [name for name, _ in steps()]
    (user,) = of("USER")
    assert user not in ("root", "0")
    assert any(f"useradd --create-home --uid 1000 {user}" in x for x in of("RUN"))
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert of("WORKDIR")[-1] == f"/home/{user}"


def test_the_image_is_the_command_line_with_help_as_default() -> None:
    assert of("ENTRYPOINT") == ['["python", "-m", "hybridtrain"]']
    assert of("CMD") == ['["--help"]']


def test_torch_comes_in_the_cpu_build_unless_the_build_argument_says_cuda() -> None:
    assert of("ARG") == ["TORCH=cpu"]
    install = next(x for x in of("RUN") if "$TORCH" in x)
    assert re.search(r'cpu\) pip install .*"\$torch\+cpu"', install)
    assert re.search(r'cuda\) pip install [^;]*"\$torch" ;;', install)
    assert "exit 1" in install


def test_everything_that_is_copied_exists_and_reaches_the_builder() -> None:
    allowed = {x[1:] for x in (ROOT / ".dockerignore").read_text().split() if x.startswith("!")}
    for line in of("COPY"):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.removeprefix("./") in allowed, source


def test_the_base_image_has_a_python_that_the_package_admits() -> None:
    (base,) = of("FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)
    assert version is not None and version[1] in ("3.11", "3.12", "3.13")


@pytest.mark.slow
def test_memory_shared_by_the_workers_is_not_taken_from_dev_shm(tmp_path: Path) -> None:
    """Docker gives /dev/shm 64 MB; the parameters of a run may not lie there."""
    code = """
import ctypes, os, sys, pytest
from pathlib import Path
before = set(os.listdir("/dev/shm"))
from hybridtrain.cli.entry import main
Path("shm.py").write_text('''
import os, pytorch_lightning as pl
class Look(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        maps = open("/proc/self/maps").read()
        open(f"maps-{trainer.global_rank}", "w").write(maps)
''')
sys.exit(main(["task=parabola", "trainer.max_epochs=2", "trainer.devices=2", "hydra.run.dir=here",
               "trainer.accelerator=cpu", "+callbacks.look._target_=shm.Look"]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        maps = (tmp_path / f"maps-{rank}").read_text()
        assert "memfd:" in maps
        assert not re.search(r"/dev/shm/(?!sem\.)", maps), "shared memory in /dev/shm"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_steps_of_the_dockerfile_succeed_in_an_empty_environment(tmp_path: Path) -> None:
    """Each COPY and RUN in order, in a folder and a virtual environment instead of an image."""
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    path = f"{tmp_path}/env/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TORCH": "cpu"}
    environment.pop("PYTHONPATH", None)
    for name, argument in steps():
        if name == "COPY":
            *sources, _ = argument.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, work / source)
        elif name == "RUN" and "useradd" not in argument:
            done = subprocess.run(
                ["sh", "-c", argument], cwd=work, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    line = ["python", "-m", "hybridtrain", "task=parabola", "trainer.max_epochs=3"]
    done = subprocess.run(
        line, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Finished after" in done.stdout
