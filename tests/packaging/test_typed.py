"""What is public, and what a type checker says of a program that uses it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hybridtrain

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "hybridtrain": (
        "DeepDist HybridStrategy PlainProgress Server StepProfiler Worker __version__ "
        "rehearse_fit replay_fit simulate_strategy"
    ),
    "hybridtrain.engine.policies": (
        "Accumulate Apply Began Drop Fact Joined Left Needs Order Policy Pushed Ready Release "
        "SetTimer TimerFired Waiting make_policy"
    ),
    "hybridtrain.engine.exchanges": "Await Exchange Leaving Local LocalExchange Offer",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there_documented_and_used_by_the_typed_program(module: str) -> None:
    """To change this list is to change what users rely on."""
    names = PUBLIC[module].split()
    found = importlib.import_module(module)
    assert set(names) <= set(found.__all__)
    if module == "hybridtrain":
        assert set(names) == set(found.__all__)
    script = (Path(__file__).parent / "users_script.py").read_text()
    for name in names:
        value = getattr(found, name)
        assert isinstance(value, str) or value.__doc__ or not isinstance(value, type), name
        assert name in script


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(hybridtrain.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_program_that_uses_every_public_name_passes_mypy_strict(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text((Path(__file__).parent / "users_script.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
