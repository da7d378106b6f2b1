"""The commands and code blocks of the README and of the pages in docs/ run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.picking import by_default

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)

# What makes a job small enough for a test; the commands themselves are those of the pages.
SMALL = {
    "speech": [
        "data.train=48",
        "data.val=8",
        "data.test=8",
        "model.net.width=32",
        "trainer.max_epochs=1",
    ],
    "digits": ["trainer.max_epochs=1"],
    "parabola": ["trainer.max_epochs=5"],
    "word2vec": ["trainer.max_epochs=1"],
    "glove": ["trainer.max_epochs=1"],
    "own": [],
}


def blocks(language: str, text: str = TEXT) -> list[str]:
    """The fenced code blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[list[str]]:
    """Each command line of the shell blocks, split into words, comments left out."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def runs() -> list[list[str]]:
    """The arguments of every ``python -m hybridtrain``, also of what train.sh passes on."""
    found: dict[tuple[str, ...], None] = {}  # each once
    for words in commands():
        if words[:3] == ["python", "-m", "hybridtrain"]:
            found[tuple(words[3:])] = None
        elif words[:2] == ["bash", "scripts/train.sh"]:
            found[tuple(words[2:])] = None
    return [list(arguments) for arguments in found]


def sweeps(arguments: list[str]) -> bool:
    """Whether it is a command of several jobs."""
    return not {"-m", "--multirun"}.isdisjoint(arguments)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Made once, by whichever test needs it first."""
    base = tmp_path_factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / "corpus"


def run(arguments: list[str], folder: Path, corpus: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder of its own, made small."""
    task = next((a.split("=")[1] for a in arguments if a.startswith("task=")), "speech")
    extra = [] if "--help" in arguments else SMALL[task]
    if task == "speech" and "--help" not in arguments:
        extra = [*extra, f"data.root={corpus}"]
    command = [sys.executable, "-m", "hybridtrain", *arguments, *extra]
    return subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_command_is_of_a_kind_that_some_test_runs() -> None:
    kinds = {" ".join(words[:2]) for words in commands()}
    covered = {
        "bash scripts/train.sh",  # here, and tests/packaging
        "bash scripts/test.sh",  # what is running now
        "pip install",  # tests/packaging
        "python -m",  # here
        "docker build",  # tests/packaging, as far as possible without an engine
        "docker run",
    }
    assert kinds <= covered
    assert len(runs()) >= 6


@pytest.mark.wide
@pytest.mark.own_process
def test_the_python_blocks_run(tmp_path: Path) -> None:
    """In a fork of this process: importing Lightning takes longer than all of them."""
    os.chdir(tmp_path)
    for number, block in enumerate(blocks("python")):
        if "pyspark" in block:  # needs Java: tests/cli/test_spark.py
            continue
        (script := tmp_path / f"block_{number}.py").write_text(block)
        runpy.run_path(str(script))
    assert number >= 1


@pytest.mark.wide
@pytest.mark.own_process
def test_a_command_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a fork of this process: importing Lightning takes longer than the run."""
    from hybridtrain.cli.entry import main

    os.chdir(tmp_path)
    arguments = ["task=digits", "trainer.devices=2"]
    assert arguments in runs()
    assert main([*arguments, *SMALL["digits"]]) == 0
    assert "Finished" in capfd.readouterr().out
    assert list(tmp_path.glob("outputs/*/*/summary.json"))


@pytest.mark.wide
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "arguments",
    by_default([a for a in runs() if not sweeps(a)], ["--help"]),
    ids=" ".join,
)
def test_the_commands_run(arguments: list[str], tmp_path: Path, corpus: Path) -> None:
    done = run(arguments, tmp_path, corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    if "--help" not in arguments:
        assert "Finished" in done.stdout
        assert list(tmp_path.glob("outputs/*/*/summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", list(filter(sweeps, runs())), ids=" ".join)
def test_the_sweep_runs(arguments: list[str], tmp_path: Path, corpus: Path) -> None:
    done = run(arguments, tmp_path, corpus)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = {
        int(number) for number in re.findall(r"^--- job \d+ of (\d+)", done.stdout, re.MULTILINE)
    }
    assert jobs == {len([*tmp_path.rglob("summary.json")])}
