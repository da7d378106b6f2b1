"""Kernels: the arithmetic of elementwise optimizers on a chunk."""

from hybridtrain.engine.updates.kernels.choice import kernel_for
from hybridtrain.engine.updates.kernels.kernel import Figures, Kernel, StepChunk, scalar_dtype

__all__ = ["Figures", "Kernel", "StepChunk", "kernel_for", "scalar_dtype"]
