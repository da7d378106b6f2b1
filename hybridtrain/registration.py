"""Register the strategies with Lightning without importing it.

``import hybridtrain`` must be enough for ``Trainer(strategy="hybrid")``, and must stay quick: even
``--help`` and tab completion import it, and Lightning and torch take seconds. Where Lightning is
not imported yet, a finder registers the strategies after its import, and only then reads their
names. A strategy's own modules are imported when a trainer asks for it by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hybridtrain.lightning_package import PACKAGES, admit, decide, refuse_malicious, refuse_mixture


def register_strategies() -> None:
    """Register in each of Lightning's packages, now or as soon as it has been imported."""
    for package in PACKAGES.values():
        if package in sys.modules:
            _register(package)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(package: str) -> None:
    from hybridtrain.engine.options.schemes import parts_of
    from hybridtrain.engine.policies import STRATEGIES

    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for name in STRATEGIES:
        if name not in registry:
            registry.register(name, partial(_made, package), **parts_of(name))
    loaded = sys.modules.get("hybridtrain.lightning.strategy")
    if (strategy := getattr(loaded, "HybridStrategy", None)) is not None:  # it may be importing
        admit(strategy)


def _made(package: str, **parts: Any) -> Any:
    """Make the strategy for a trainer of this package, and decide on the package.

    Raises:
        UserError: if this process uses the other package.
    """
    of = next(name for name, module in PACKAGES.items() if module == package)
    if decide(of) != of:
        raise refuse_mixture("the Trainer")
    from hybridtrain.lightning.strategy import HybridStrategy

    return HybridStrategy(**parts)


class _Watch(MetaPathFinder):
    """Registers after the import of a package; callers may also only look for its spec."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in PACKAGES and not self._asking:
            refuse_malicious()  # before its code runs
        if name not in PACKAGES.values() or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader, name)
        return spec


def _register_after(loader: Loader, package: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _register(package)

    loader.exec_module = exec_module  # type: ignore[method-assign]
