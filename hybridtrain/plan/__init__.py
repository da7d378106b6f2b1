"""Which strategy, on how many workers? ``python -m hybridtrain.plan --help``."""

from hybridtrain.plan.evidence import steady_samples_per_s
from hybridtrain.plan.plan_cli import main

__all__ = ["main", "steady_samples_per_s"]
