"""Versions that are not supported are one clear error; the package's metadata say which are."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import warnings
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from hybridtrain import lightning_package, registration
from hybridtrain.errors import UserError
from hybridtrain.util import versions

RELEASES = ["2.6.0", "2.6.1", "2.6.2", "2.6.3", "2.6.5", "2.6.6"]
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
def test_an_unsupported_version_is_refused_before_anything_of_the_package_is_used(
    stand_in: dict[str, str], then: str, line: str
) -> None:
    last = output(ANOTHER.format(stand_in=stand_in, then=then)).strip().splitlines()[-1]
    assert line in last and "hybridtrain supports" in last


PACKAGES = ("pytorch_lightning", "lightning")


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Nothing is decided yet; returns the installed versions, which a test may change."""
    installed = dict.fromkeys(("pytorch-lightning", "lightning"), "2.6.6")
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    monkeypatch.setattr(lightning_package, "_decided", None)
    monkeypatch.setattr(lightning_package, "_resolve_to_lightning", lambda: None)
    monkeypatch.setenv(lightning_package._SPAWNED, "")
    monkeypatch.setenv(versions.VARIABLE, "1")
    return installed


@pytest.mark.parametrize("release", ["2.6.2", "2.6.3"])
@pytest.mark.parametrize("name", ["pytorch-lightning", "lightning"])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_malicious_release_of_either_package_is_refused_with_what_to_do(
    undecided: dict[str, str], package: str, name: str, release: str
) -> None:
    undecided[name] = release
    for use in (
        lambda: lightning_package.decide(package),
        lambda: registration._Watch().find_spec(package, None),
    ):
        with pytest.raises(UserError) as error:
            use()
        assert str(error.value).startswith(f"{name} {release} is installed, a malicious release")
        assert f"(pip uninstall {name})" in str(error.value)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("release", "warned"),
    [("2.6.0", 1), ("2.6.5.post1", 1), ("2.6", 1), ("2.6.6", 0), ("2.6.10", 0), ("2.7.0rc1", 0)],
)
def test_a_release_with_an_advisory_is_one_line_of_warning(
    undecided: dict[str, str], package: str, release: str, warned: int
) -> None:
    name = package.replace("_", "-")
    undecided[name] = release
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert lightning_package.decide(package) == lightning_package.decide(package) == package
    assert len(found) == warned
    for each in found:
        assert str(each.message).startswith(f"{name} {release} is installed; before 2.6.6, ")
        assert f"pip install '{name}>=2.6.6'" in str(each.message)


def test_a_spawned_worker_does_not_repeat_the_warning_of_its_parent(
    undecided: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undecided["lightning"] = "2.6.0"
    monkeypatch.setattr(sys, "orig_argv", ["python", "--multiprocessing-fork"])
    monkeypatch.delenv(lightning_package._SPAWNED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lightning_package.decide("lightning") == "lightning"


def test_a_package_that_is_not_installed_has_no_release(
    undecided: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    lightning_package.refuse_malicious()


def test_every_range_of_lightning_excludes_the_malicious_releases() -> None:
    root = Path(__file__).parents[2]
    names = ("*.toml", "*.txt", "Dockerfile", "docs/**/*.md", "scripts/**/*.py")
    files = [*(file for name in names for file in root.glob(name))]
    files += (root / "hybridtrain/cli/new_project").rglob("*.template")
    ranges = [
        (file, found)
        for file in files
        for found in re.findall(
            r"(?:lightning|requires|\})((?:[<>=!~]=?[\d.]+,?)+)", file.read_text()
        )
        if found.startswith((">=2", "==2"))
    ]
    assert len(ranges) >= 3
    bad = [
        (file, x) for file, x in ranges if {"2.6.2", "2.6.3"} & {*SpecifierSet(x).filter(RELEASES)}
    ]
    assert not bad


def test_a_package_that_is_missing_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'no_lightning'", name="no_lightning")
    assert str(versions.lacks("no-lightning", missing)) == (
        "no-lightning is not installed; install it: pip install no-lightning"
    )
