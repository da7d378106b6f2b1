"""``python -m hybridtrain new DIR``: a project that trains at once; mistakes leave nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtrain import lightning_package
from hybridtrain.cli.commands.new import SUFFIX, TEMPLATES, filled_in
from tests.cli.conftest import Command, summary
from tests.cli.zygote import Zygote

ROOT = Path(__file__).parents[2]
OWN = ("--config-dir", "conf", "task=my_waves")


@pytest.fixture(autouse=True)
def where_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command adds its working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def project(command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, in which the test goes on."""
    made = command("new", "deep/er/My-Waves")
    assert made.code == 0, made.err
    files = [path for path in Path("deep/er/My-Waves").rglob("*") if path.is_file()]
    assert len(files) == len(list(TEMPLATES.rglob(f"*{SUFFIX}")))
    assert all(str(path.relative_to("deep/er/My-Waves")) in made.out for path in files)
    assert not any("PACKAGE" in str(path) for path in files)
    assert " ".join(("python -m hybridtrain", *OWN, "trainer.devices=2")) in made.out
    monkeypatch.chdir("deep/er/My-Waves")
    return Path.cwd()


def python(*arguments: str) -> str:
    """What a command in the working directory prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *arguments]
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_workers_train_in_a_new_project(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, zygote: Zygote
) -> None:
    monkeypatch.setenv(lightning_package.VARIABLE, "pytorch_lightning")  # which the zygote has
    request.getfixturevalue("project")
    small = ("data.train=256", "trainer.max_epochs=2", "hydra.run.dir=run")
    run = zygote.start(Path.cwd(), *OWN, "trainer.devices=2", *small)
    assert run.status() == 0, run.said()
    told = summary("run")
    assert (told["workers"], told["updates"]) == (2, 8)
    assert 0 < told["metrics"]["val/loss"] < 1.5
    longer = ("trainer.max_epochs=3", "resume_override=true")  # it knows its --config-dir
    run = zygote.start(Path.cwd(), "resume=run", *longer)
    assert run.status() == 0, run.said()
    assert summary("run")["updates"] == 4  # of this part
    Path("conf").rename("elsewhere")
    run = zygote.start(Path.cwd(), "resume=run", *longer)
    assert run.status() == 2 and "conf is gone; give --config-dir" in run.said(), run.said()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("project")
def test_the_test_and_the_sweep_of_a_new_project_run() -> None:
    assert "2 passed" in python("-m", "pytest", "-p", "no:cacheprovider")
    python("-m", "ruff", "check", ".")
    python("-m", "ruff", "format", "--check", ".")
    printed = python(
        *("-m", "hybridtrain", *OWN, "-m", "strategy=hybrid,async", "trainer.devices=2"),
        *("trainer.max_epochs=1", "strategy.start_method=spawn"),
        "hydra.launcher.start_method=popen",
    )
    assert all(x in printed for x in ("strategy=hybrid", "strategy=async", "side by side"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing was given; write python -m hybridtrain new DIR"),
        ([""], "'' was given"),
        (["one", "two"], "'one' 'two' was given"),
        (["--force"], "'--force' was given"),
        (["full"], "full is not empty"),
        (["file"], "file cannot be written: Not a directory"),
        (["file/waves"], "file/waves cannot be written: Not a directory"),
        (["closed/waves"], "closed/waves cannot be written: Permission denied"),
        (["closed/deep/waves"], "closed/deep/waves cannot be written: Permission denied"),
        (["1-2"], "'1-2' makes no name of a Python package"),
        (["class"], "'class' makes no name of a Python package"),
        (["wäves"], "'wäves' makes no name of a Python package"),
        (["torch"], "there is a package 'torch'"),
        (["hybridtrain"], "there is a package 'hybridtrain'"),
        (["lightning"], "there is a package 'lightning'"),
        (["json"], "there is a package 'json'"),
        (["tests"], "'tests' is a task or folder already"),
        (["digits"], "'digits' is a task or folder already"),
    ],
)
def test_a_mistake_is_one_line_and_makes_nothing(
    command: Command, ordinary_user: None, arguments: list[str], says: str
) -> None:
    Path("closed").mkdir(0o555)
    Path("full").mkdir()
    Path("full/mine").touch()
    Path("file").touch()
    before = sorted(Path().rglob("*"))
    done = command("new", *arguments)
    assert done.code == 2 and says in done.complaint and done.out == ""
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_a_project_that_cannot_be_written_completely_leaves_no_file(
    command: Command, monkeypatch: pytest.MonkeyPatch, there: bool, number: int
) -> None:
    write = Path.write_text

    def fails_in_the_end(path: Path, text: str, encoding: str) -> int:
        if path.name == "pyproject.toml":
            raise OSError(number, os.strerror(number))
        return write(path, text, encoding=encoding)

    if there:
        Path("deep/waves").mkdir(parents=True)
    monkeypatch.setattr(Path, "write_text", fails_in_the_end)
    done = command("new", "deep/waves")
    assert done.code == 2
    assert done.complaint == f"error: deep/waves cannot be written: {os.strerror(number)}"
    assert list(Path().rglob("*")) == ([Path("deep"), Path("deep/waves")] if there else [])


def test_the_checkout_hides_no_name_from_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert "a package 'hybridtrain'" in command("new", str(tmp_path / "hybridtrain")).complaint


def test_new_has_a_help_text_and_accepts_the_empty_current_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "python -m hybridtrain new DIR" in command("new", "--help").out
    Path("waves").mkdir()
    monkeypatch.chdir("waves")
    assert command("new", ".").code == 0
    assert Path("waves/module.py").is_file()


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_code_imports_the_package_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setenv(lightning_package.VARIABLE, package)
    files = filled_in("waves")
    assert f"import {package} as L" in files["waves/module.py"]
    assert f'"{package.replace("_", "-")}>=2.6.6"' in files["pyproject.toml"]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*OWN[:2], "task=my_wave"), "did you mean my_waves?"),
        ((*OWN, "model.widht=3"), "there is no key 'widht' in model (did you mean width?)"),
        (("--config-dir", "nope", OWN[2]), "--config-dir nope: there is no such folder"),
        (OWN[2:], "there is no task 'my_waves'"),
    ],
)
def test_choices_in_the_folder_of_the_command_line_are_known(
    command: Command, arguments: tuple[str, ...], says: str
) -> None:
    done = command(*arguments)
    assert done.code == 2 and says in done.complaint
