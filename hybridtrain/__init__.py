"""Parameters live in host memory, devices only compute, the host decides whose gradients count.

Importing the package makes its strategies known to PyTorch Lightning, in either of its packages::

    import lightning as L  # or pytorch_lightning as L

    import hybridtrain

    L.Trainer(strategy="hybrid", devices=4).fit(module, data)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridtrain.lightning_package import decide_by_environment
from hybridtrain.registration import register_strategies

if TYPE_CHECKING:
    from hybridtrain.cli.telemetry.progress import PlainProgress
    from hybridtrain.lightning.replay.replay_fit import rehearse_fit, replay_fit
    from hybridtrain.lightning.simulate_strategy import simulate_strategy
    from hybridtrain.lightning.step_profiler import StepProfiler
    from hybridtrain.lightning.strategy import HybridStrategy
    from hybridtrain.standalone.deepdist import DeepDist
    from hybridtrain.standalone.server import Server
    from hybridtrain.standalone.worker import Worker

__version__ = "0.1.0"
__all__ = [
    "DeepDist",
    "HybridStrategy",
    "PlainProgress",
    "Server",
    "StepProfiler",
    "Worker",
    "__version__",
    "rehearse_fit",
    "replay_fit",
    "simulate_strategy",
]

register_strategies()
decide_by_environment()


_LATER = {
    "DeepDist": "hybridtrain.standalone.deepdist",
    "HybridStrategy": "hybridtrain.lightning.strategy",
    "PlainProgress": "hybridtrain.cli.telemetry.progress",
    "Server": "hybridtrain.standalone.server",
    "StepProfiler": "hybridtrain.lightning.step_profiler",
    "Worker": "hybridtrain.standalone.worker",
    "rehearse_fit": "hybridtrain.lightning.replay.replay_fit",
    "replay_fit": "hybridtrain.lightning.replay.replay_fit",
    "simulate_strategy": "hybridtrain.lightning.simulate_strategy",
}


def __getattr__(name: str) -> Any:
    """``hybridtrain.HybridStrategy`` and the others, imported when they are asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
