"""How the master parameters move: a torch optimizer in host memory, fed with a merged gradient."""

from hybridtrain.updates.base import Update
from hybridtrain.updates.contribution import Contribution
from hybridtrain.updates.evaluation import Again, Evaluation
from hybridtrain.updates.factory import build_update, load_updates
from hybridtrain.updates.optimizer_set import OptimizerFailed, Optimizers, Pending, Stepped
from hybridtrain.updates.saved import Saved

__all__ = [
    "Again",
    "Contribution",
    "Evaluation",
    "OptimizerFailed",
    "Optimizers",
    "Pending",
    "Saved",
    "Stepped",
    "Update",
    "build_update",
    "load_updates",
]
