"""Updates of the master parameters: torch optimizers in host memory, with merged gradients."""

from hybridtrain.updates.base import Again, Contribution, Evaluation, Saved, StepInput, Update
from hybridtrain.updates.factory import build_update, load_updates
from hybridtrain.updates.optimizer_set import OptimizerFailed, Optimizers, Stepped

__all__ = [
    "Again",
    "Contribution",
    "Evaluation",
    "OptimizerFailed",
    "Optimizers",
    "Saved",
    "StepInput",
    "Stepped",
    "Update",
    "build_update",
    "load_updates",
]
