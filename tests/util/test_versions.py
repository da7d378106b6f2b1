"""Versions that are not supported are one clear error; the package's metadata say which are."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from email.message import Message
from importlib.metadata import PackageNotFoundError

import pytest

from hybridtrain.errors import UserError
from hybridtrain.util import versions

FOUND = {"torch": "2.13.0+cpu", "pytorch-lightning": "2.6.6", "hydra-core": "1.3.8"}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Metadata of the package, and versions that a test may change."""
    asked = Message()
    asked["Requires-Python"] = "<3.14,>=3.11"
    for text in ("torch<2.14,>=2.11", "pytorch-lightning<2.7,>=2.6", "hydra-core<1.5,>=1.3.8"):
        asked["Requires-Dist"] = text
    asked["Requires-Dist"] = "lightning<2.7,>=2.6; extra == 'lightning'"
    found = dict(FOUND)
    monkeypatch.delenv(versions.VARIABLE, raising=False)
    monkeypatch.setattr(versions, "metadata", lambda name: asked)
    monkeypatch.setattr(versions, "version", found.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: found.get("Python", "3.12.1"))
    return found


@pytest.mark.parametrize(
    ("name", "found", "supported"),
    [
        ("torch", "2.15.0+cu130", "torch>=2.11,<2.14"),
        ("torch", "2.10.0", "torch>=2.11,<2.14"),
        ("pytorch-lightning", "2.5.0", "pytorch-lightning>=2.6,<2.7"),
        ("lightning", "2.7.0", "lightning>=2.6,<2.7"),
        ("hydra-core", "1.3.7", "hydra-core>=1.3.8,<1.5"),
        ("Python", "3.14.0", "Python>=3.11,<3.14"),
        ("Python", "3.10.13", "Python>=3.11,<3.14"),
    ],
)
def test_a_version_that_is_not_supported_is_named_with_those_that_are(
    ours: dict[str, str], name: str, found: str, supported: str
) -> None:
    ours[name] = found
    with pytest.raises(UserError) as error:
        versions.check_versions(*ours)
    assert str(error.value) == (
        f"{name} {found} was found, but hybridtrain supports {supported}; install one of these, "
        "or try it with HYBRIDTRAIN_ANY_VERSION=1"
    )


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0+cpu", "2.13.1+cu130", "2.13.0a0+git12"])
def test_supported_versions_pass_whatever_their_build(ours: dict[str, str], torch: str) -> None:
    ours["torch"] = torch
    versions.check_versions(*ours)


def test_any_version_passes_where_that_is_asked_for(
    ours: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours["torch"] = "9.0"
    monkeypatch.setenv(versions.VARIABLE, "1")
    versions.check_versions("torch")


def test_a_checkout_that_is_not_installed_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Message:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "metadata", missing)
    versions.check_versions("torch")


TAKEN_AWAY = """
import importlib, sys
module = importlib.import_module("pytorch_lightning.strategies.launchers.multiprocessing")
del module._GlobalStateSnapshot
import hybridtrain
try:
    hybridtrain.HybridStrategy
except hybridtrain.errors.UserError as error:
    print(error)
"""
ANOTHER = """
import importlib.metadata
found = importlib.metadata.version
importlib.metadata.version = lambda name: {stand_in}.get(name) or found(name)
import sys, hybridtrain
{then}
"""


def output(code: str) -> str:
    environment = {**os.environ, versions.VARIABLE: "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_private_name_that_is_missing_is_named_with_the_version() -> None:
    said = output(TAKEN_AWAY)
    assert said.startswith("pytorch-lightning 2.6")
    assert "cannot import name '_GlobalStateSnapshot'" in said and said.count("\n") == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stand_in", "then", "line"),
    [
        ({"torch": "2.99.0"}, "hybridtrain.HybridStrategy", "torch 2.99.0 was found"),
        pytest.param(
            {"pytorch-lightning": "2.99.0"},
            "import pytorch_lightning as pl; pl.Trainer(strategy='hybrid')",
            "pytorch-lightning 2.99.0 was found",
            marks=pytest.mark.slow,
        ),
        (
            {"hydra-core": "1.9.0"},
            "from hybridtrain.cli.entry import main; sys.exit(main(['task=parabola']))",
            "hydra-core 1.9.0 was found",
        ),
    ],
    ids=["torch", "Lightning", "Hydra"],
)
def test_it_is_refused_before_anything_of_it_is_used(
    stand_in: dict[str, str], then: str, line: str
) -> None:
    last = output(ANOTHER.format(stand_in=stand_in, then=then)).strip().splitlines()[-1]
    assert line in last and "hybridtrain supports" in last


def test_a_package_that_is_missing_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'no_lightning'", name="no_lightning")
    assert str(versions.lacks("no-lightning", missing)) == (
        "no-lightning is not installed; install it: pip install no-lightning"
    )
