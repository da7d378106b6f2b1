"""Register the strategies with Lightning without importing it.

``import hybridtrain`` must be enough for ``Trainer(strategy="hybrid")``, and must stay quick: even
``--help`` and tab completion import it, and Lightning and torch take seconds. Where Lightning is
not imported yet, a finder registers the strategies after its import. A strategy's own modules are
imported when a trainer asks for it by name.
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

from hybridtrain.lightning_package import PACKAGES, admit, decide, refuse_mixture
from hybridtrain.schemes import parts_of

DESCRIPTIONS = {
    "hybrid": "parameters in host memory; wait for all workers, apply the mean of their gradients",
    "async": "parameters in host memory; apply each gradient on arrival, never wait",
    "synchronous": "parameters in host memory; one worker at a time, in turn",
    "backup": "parameters in host memory; apply the mean of all but the slowest, drop what is late",
    "k_async": "parameters in host memory; apply the first k, keep what is late",
    "k_batch_sync": "parameters in host memory; apply any k mini-batches, drop what is late",
    "k_batch_async": "parameters in host memory; apply any k mini-batches, keep what is late",
    "softsync": "parameters in host memory; apply as many mini-batches as there are workers",
    "ssp": "parameters in host memory; nobody is more than a few steps ahead of the slowest",
    "grace": "parameters in host memory; apply each gradient, go on with who comes shortly behind",
    "switch": "parameters in host memory; as hybrid until the loss stops falling, then as async",
    "hogwild": "parameters in host memory; workers step them themselves, without a lock",
    "local_sgd": "parameters in host memory; workers train on their own, and average now and then",
    "downpour": "parameters in host memory; workers train on their own, push and fetch, never wait",
    "post_local_sgd": "parameters in host memory; as hybrid first, as local_sgd later",
    "easgd": "parameters in host memory; workers train on their own, tied to them by a force",
    "diloco": "parameters in host memory; as local_sgd, with an outer Nesterov momentum",
    "streaming_diloco": "parameters in host memory; as diloco, one fragment of them at a time",
    "async_diloco": "parameters in host memory; as diloco, but only those wait who come together",
    "sign_sgd": "parameters in host memory; as hybrid, with the sign most gradients have",
    "power_sgd": "parameters in host memory; as hybrid, a gradient travels as two narrow matrices",
}


def register_strategies() -> None:
    """Register in each of Lightning's packages, now or as soon as it has been imported."""
    for package in PACKAGES.values():
        if package in sys.modules:
            _register(package)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(package: str) -> None:
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for name, description in DESCRIPTIONS.items():
        if name not in registry:
            registry.register(name, partial(_made, package), description, **parts_of(name))
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
        raise refuse_mixture("the Trainer", of)
    from hybridtrain.lightning.strategy import HybridStrategy

    return HybridStrategy(**parts)


class _Watch(MetaPathFinder):
    """Registers after the import of a package; callers may also only look for its spec."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
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
