"""Traps of the design that do not apply here, and why."""

# All apply; number 10 (loss scales) needs CUDA.
NOT_APPLICABLE: dict[int, str] = {}
