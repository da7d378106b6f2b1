"""Updates of the master parameters: torch optimizers in host memory, with merged gradients."""

from hybridtrain.engine.updates.base import SavedOptimizer
from hybridtrain.engine.updates.factory import build_update, load_updates
from hybridtrain.engine.updates.optimizer_set import OptimizerFailed, Optimizers, Stepped

__all__ = [
    "OptimizerFailed",
    "Optimizers",
    "SavedOptimizer",
    "Stepped",
    "build_update",
    "load_updates",
]
