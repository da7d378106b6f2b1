"""Which strategy, on how many workers? ``python -m hybridtrain plan --help``."""

from hybridtrain.virtual.plan.evidence import steady_samples_per_s

__all__ = ["steady_samples_per_s"]
