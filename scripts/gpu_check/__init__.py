"""What ``scripts/gpu_check.sh`` does: checks of a machine with a GPU, the cheapest first."""
