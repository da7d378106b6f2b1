"""Optimizers for sparse gradients: only rows that were touched are stepped."""
