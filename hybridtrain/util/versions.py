"""Refuse versions of Python, torch, Lightning and Hydra that this package was not tested with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, metadata, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridtrain.errors import UserError

VARIABLE = "HYBRIDTRAIN_ANY_VERSION"


def check_versions(*names: str) -> None:
    """Compare Python and these packages with what the metadata of this one ask for.

    Raises:
        UserError: naming the version that is there, and those that are supported.
    """
    try:
        ours = metadata("hybridtrain")
    except PackageNotFoundError:
        return  # a checkout on the path, which is not installed, asks for nothing
    if os.environ.get(VARIABLE) == "1":
        return
    _check("Python", platform.python_version(), SpecifierSet(ours["Requires-Python"]))
    for asked in map(Requirement, ours.get_all("Requires-Dist") or ()):
        if asked.name in names:
            _check(asked.name, version(asked.name), asked.specifier)


def _check(name: str, found: str, supported: SpecifierSet) -> None:
    if not supported.contains(found, prereleases=True):
        text = ",".join(sorted(map(str, supported), reverse=True))
        raise UserError(
            f"{name} {found} was found, but hybridtrain supports {name}{text}; install one of "
            f"these, or try it with {VARIABLE}=1"
        )


def lacks(name: str, error: Exception) -> UserError:
    """The error for a package without a private name that is used: which version, which name."""
    if isinstance(error, ModuleNotFoundError) and error.name == name.replace("-", "_"):
        return UserError(f"{name} is not installed; install it: pip install {name}")
    reason = str(error).partition(" (")[0]  # behind it Python says where the file lies
    return UserError(
        f"{name} {version(name)} lacks a part of it that hybridtrain uses: {reason}; install "
        "another version of it"
    )
