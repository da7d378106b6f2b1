"""The wheel alone is enough: it carries conf/ and runs from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ["task=parabola", "trainer.max_epochs=3", "trainer.accelerator=cpu", "hydra.run.dir=here"]


def shell(*line: str | Path, cwd: Path | None = None, timeout: float = 110) -> str:
    """Run a command that knows nothing of this checkout; returns what it printed."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        [str(x) for x in line],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    shell(sys.executable, *build)
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_the_code_the_configuration_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"hybridtrain/conf/{path.relative_to(ROOT / 'conf')}" in names
    for path in (ROOT / "hybridtrain").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "hybridtrain").rglob("*.template"):
        assert str(path.relative_to(ROOT)) in names
    tops = {x.split("/")[0] for x in names}
    assert tops == {"hybridtrain", "hybridtrain-0.1.0.dist-info"}
    assert any(x.endswith("licenses/LICENSE") for x in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it depends on is borrowed from ours, which is quick."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    options = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    shell(sys.executable, "-m", "pip", "--python", python, *options, wheel)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_the_wheel_runs_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    where = shell(installed, "-c", "import hybridtrain; print(hybridtrain.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    printed = shell(installed, "-m", "hybridtrain", *RUN, "trainer.devices=2", cwd=tmp_path)
    assert "Finished after" in printed
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["workers"] == 2


@pytest.mark.slow
def test_the_command_of_the_wheel_finds_a_users_module_in_the_working_directory(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from hybridtrain.tasks.parabola import ParabolaData, ParabolaModule\n"
        "class Module(ParabolaModule): pass\n"
        "class Data(ParabolaData): pass\n"
    )
    own = ["model._target_=mine.Module", "data._target_=mine.Data", "model.hidden=3", *RUN[1:]]
    shell(installed.parent / "hybridtrain", *own, cwd=tmp_path)
    assert (tmp_path / "here" / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pip_installs_the_checkout_into_an_empty_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pins = ("--constraint", ROOT / "constraints.txt")
    shell(python, "-m", "pip", "install", "--quiet", *pins, ROOT, timeout=800)
    printed = shell(python, "-m", "hybridtrain", *RUN, "trainer.devices=2", cwd=tmp_path)
    assert "Finished after" in printed
