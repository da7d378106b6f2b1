"""Decide which of Lightning's packages this process uses: ``pytorch_lightning`` or ``lightning``.

Both packages hold the same code under two names, and a class of one is no class of the other. Our
modules import ``pytorch_lightning`` everywhere. Where ``lightning`` is decided on, a finder
resolves ``pytorch_lightning`` and ``lightning_fabric``, and all modules in them, to the very same
modules of ``lightning.pytorch`` and ``lightning.fabric``; nothing else changes.

The decision falls once in a process, at the first import of a module of ours that needs Lightning.
In this order it follows: ``HYBRIDTRAIN_LIGHTNING``; the package of the trainer that asks for a
strategy by name, or of the classes that a configuration names; the package that the process has
imported first; the package that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hybridtrain.errors import UserError

VARIABLE = "HYBRIDTRAIN_LIGHTNING"
PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
_SPAWNED = "HYBRIDTRAIN_SPAWNED_LIGHTNING"  # what the parent of a spawned worker decided on
_ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_PRESENT = (
    (r"^lightning\.pytorch(?=\.)", "pytorch_lightning"),
    (r"^lightning\.fabric(?=\.)", "lightning_fabric"),
    (r"^lightning(?=\.[A-Z])", "pytorch_lightning"),
)
_MALICIOUS = ("2.6.2", "2.6.3")
_FIXED = "2.6.6"
_decided: str | None = None


def decide(wanted: str | None = None) -> str:
    """Return the package of this process; the first call decides.

    Args:
        wanted: ``pytorch_lightning`` or ``lightning``, taken unless the environment names one.

    Raises:
        UserError: if the environment names a package that there is not, or a malicious release is
            installed.
    """
    global _decided
    if _decided is None:
        package = _from_environment() or wanted or _first_imported() or _installed()
        refuse_malicious()
        _warn_of_old(package)
        _decided = package
        if _decided == "lightning":
            _resolve_to_lightning()
    return _decided


@contextmanager
def told_to_children() -> Iterator[None]:
    """Let processes that are spawned inside use this process' package, whatever they import first.

    Afterwards the environment of this process is as it was.
    """
    former, os.environ[_SPAWNED] = os.environ.get(_SPAWNED), decide()
    try:
        yield
    finally:
        os.environ.pop(_SPAWNED, None)
        if former is not None:
            os.environ[_SPAWNED] = former


def refuse_malicious() -> None:
    """Refuse the releases that steal credentials when they are imported; nothing is imported here.

    Raises:
        UserError: if one of them is installed, in either package.
    """
    for package in PACKAGES:
        if (found := _release(package)) in _MALICIOUS:
            name = package.replace("_", "-")
            raise UserError(
                f"{name} {found} is installed, a malicious release that steals credentials when it "
                f"is imported (CVE-2026-44484); remove it (pip uninstall {name}), treat all "
                f"credentials of this machine as stolen, and install {name}>={_FIXED}"
            )


def _warn_of_old(package: str) -> None:
    """Warn of a release with the advisory; not in a spawned process, whose parent has."""
    found, name = _release(package), package.replace("_", "-")
    old = found is not None and _numbers(found) < _numbers(_FIXED)
    if old and "--multiprocessing-fork" not in sys.orig_argv:
        warnings.warn(
            f"{name} {found} is installed; before {_FIXED}, loading a checkpoint can run code that "
            f"it names (GHSA-qqmf-gpg7-g8gw): pip install '{name}>={_FIXED}'",
            stacklevel=3,
        )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def _release(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # it takes long to import

    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None


def decide_by_environment() -> None:
    """Decide now if the environment names a package, before any Lightning is imported."""
    if os.environ.get(VARIABLE) in PACKAGES:
        decide()


def decide_by_configuration(configuration: Mapping[str, Any]) -> str:
    """Decide by the classes that a run's configuration names as ``_target_``.

    A trainer of ``lightning`` decides, else the package that the modules of the user's own model
    and data import first.
    """
    for group in ("trainer", "model", "data"):
        target = str((configuration.get(group) or {}).get("_target_"))
        top, dot, _ = target.partition(".")
        if top == "lightning" and importlib.util.find_spec(top) is not None:
            return decide("lightning")
        if dot and top not in (__package__, "torch", *_ALIASES, *PACKAGES):
            with suppress(Exception):  # the checks of the configuration report what is wrong
                importlib.import_module(target.rpartition(".")[0])
    return decide()


def for_new_code() -> str:
    """The package that new code imports: ``lightning`` where it is installed."""
    there = importlib.util.find_spec("lightning") is not None
    return _from_environment() or ("lightning" if there else "pytorch_lightning")


def own_name(name: str) -> str:
    """The name that a module (or its logger) of pytorch_lightning has in the package decided on."""
    top, dot, rest = name.partition(".")
    return _ALIASES[top] + dot + rest if decide() == "lightning" else name


def with_present_targets(value: Any) -> Any:
    """A configuration of plain values whose ``_target_`` are names in the package decided on.

    So the run directory of a run with ``lightning`` is read where only pytorch_lightning is.
    """
    match value:
        case dict():
            found = {key: with_present_targets(each) for key, each in value.items()}
            for pattern, package in () if decide() == "lightning" else _PRESENT:
                if isinstance(target := found.get("_target_"), str):
                    found["_target_"] = re.sub(pattern, package, target)
            return found
        case list():
            return list(map(with_present_targets, value))
    return value


def is_foreign(value: object) -> bool:
    """Whether the object's class derives from a class of the other package."""
    others = {"lightning"} if decide() == "pytorch_lightning" else set(_ALIASES)
    return any(base.__module__.partition(".")[0] in others for base in type(value).__mro__)


def refuse_mixture(what: str) -> UserError:
    """The error for something that belongs to the package that is not the one in use."""
    of = next(name for name in PACKAGES if name != decide())
    return UserError(
        f"{what} is of the package {of!r}, but hybridtrain uses {decide()!r} in this process; use "
        f"one of both everywhere (a program, its modules, data and callbacks), or set "
        f"{VARIABLE}={of} if only {of!r} is meant"
    )


def admit(strategy: type) -> None:
    """Let trainers of both packages take objects of the class, which then refuse the other's."""
    for package in PACKAGES.values():
        if package in sys.modules:
            importlib.import_module(f"{package}.strategies").Strategy.register(strategy)


def _from_environment() -> str | None:
    if "--multiprocessing-fork" in sys.orig_argv and _SPAWNED in os.environ:
        return os.environ[_SPAWNED]
    named = os.environ.get(VARIABLE)
    if named is None or named in PACKAGES:
        return named
    raise UserError(f"{VARIABLE}={named} was given; it must be {' or '.join(PACKAGES)}")


def _first_imported() -> str | None:
    return next((name for name in sys.modules if name in PACKAGES), None)


def _installed() -> str:
    only = importlib.util.find_spec("pytorch_lightning") is None
    return "lightning" if only and importlib.util.find_spec("lightning") else "pytorch_lightning"


def _resolve_to_lightning() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in _ALIASES]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Aliases())


class _Aliases(MetaPathFinder):
    """Finds ``lightning.pytorch.x`` where ``pytorch_lightning.x`` is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, rest = name.partition(".")
        if top not in _ALIASES:
            return None
        real = _ALIASES[top] + dot + rest
        return ModuleSpec(name, _SameModule(real)) if importlib.util.find_spec(real) else None


class _SameModule(Loader):
    """Returns a module that is imported under another name, as it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the alias in its place
