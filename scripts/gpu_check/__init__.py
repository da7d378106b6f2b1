"""Checks of a machine with a GPU for ``scripts/gpu_check.sh``, the cheapest first."""
